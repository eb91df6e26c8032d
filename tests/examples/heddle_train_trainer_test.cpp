// Mutants: rows folded in the order in which they end; a failing row swallowed; two rows in one slot;
// old log-probs taken anew in the second update; the report of the last update instead of the first; a
// row without advantages differentiated all the same; the gradient of an earlier step left standing.
#include "heddle-train/trainer.hpp"

#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "examples/heddle_train_cases.hpp"
#include "heddle-train/row_passes.hpp"
#include "heddle/loss/token_loss.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/rollout_file.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

namespace heddle::train {
namespace {

std::vector<examples::RolloutRecord> some_rollouts() {
  test::Random random(41);
  std::string text;
  for (int i = 0; i < 9; ++i) {
    const auto ids = [&](std::int64_t length) {
      std::string list;
      for (const std::int32_t id : random_document(random, length, tiny_dims().vocab)) {
        list += (list.empty() ? "" : ",") + std::to_string(id);
      }
      return "[" + list + "]";
    };
    text += R"({"prompt_ids":)" + ids(2 + i % 3) + R"(,"completion_ids":)" + ids(3 + i % 4) +
            R"(,"reward":)" + std::to_string(i % 2) + R"(,"advantages":)" +
            (i % 2 == 0 ? "-1.5" : "0.75") + "}\n";
  }
  return examples::parse_rollouts(text, "r");
}

template <class A>
StepRows<A> some_rows() {
  const auto records = some_rollouts();
  std::vector<std::size_t> chosen(records.size());
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    chosen[i] = i;
  }
  packing::PackOptions pack;
  pack.budget = 16;
  pack.segment_align_multiple = 4;
  return pack_step<A>(records, chosen, std::vector<double>(records.size(), 0.0), pack);
}

const auto no_progress = [](std::int64_t) {};

TEST(HeddleTrainRowPasses, FoldsRowsInOrderWhateverTheThreads) {
  const ParameterLayout layout(tiny_dims());
  const std::vector<float> parameters = random_parameters<float>(layout, 42);
  const Model<float> model(layout, parameters, moe::RouterTraining::trained);
  const StepRows<float> step = some_rows<float>();
  std::vector<RowInputs> rows;
  for (std::int64_t row = 0; row < step.rows; ++row) {
    rows.push_back(step.inputs(row));
  }
  ASSERT_GT(rows.size(), 4U);
  const auto weigh = [](std::int64_t row, const RowActivations<float>&, std::span<float> d_logps) {
    std::fill(d_logps.begin(), d_logps.end(), static_cast<float>(row) - 1.5F);
    return true;
  };
  std::vector<std::vector<float>> gradients;
  for (const int threads : {1, 2, 7}) {
    test::with_threads(threads, [&] {
      RowSlots<float> slots;
      std::vector<float>& gradient = gradients.emplace_back(parameters.size(), 0.0F);
      std::vector<std::int64_t> order;
      pass_rows(model, std::span<const RowInputs>(rows), slots, std::span<float>(gradient), weigh,
                [&](std::int64_t row, const RowActivations<float>& kept) {
                  order.push_back(row);
                  EXPECT_EQ(kept.logps.size(),
                            rows[static_cast<std::size_t>(row)].token_ids.size());
                });
      std::vector<std::int64_t> in_order(rows.size());
      for (std::size_t i = 0; i < in_order.size(); ++i) {
        in_order[i] = static_cast<std::int64_t>(i);
      }
      EXPECT_EQ(order, in_order);
      EXPECT_LE(slots.slots.size(), static_cast<std::size_t>(threads));
    });
  }
  EXPECT_TRUE(test::same_bits(gradients[1], gradients[0]));
  EXPECT_TRUE(test::same_bits(gradients[2], gradients[0]));
}

// The loss inside the head: the gradient of forward, loss and backward to the bit, though the head's
// logits are computed once.
TEST(HeddleTrainRowPasses, ALossInsideTheHeadHasTheBitsOfOneBesideIt) {
  const ParameterLayout layout(tiny_dims());
  const std::vector<float> parameters = random_parameters<float>(layout, 45);
  const Model<float> model(layout, parameters, moe::RouterTraining::trained);
  const StepRows<float> step = some_rows<float>();
  std::vector<RowInputs> rows;
  for (std::int64_t row = 0; row < step.rows; ++row) {
    rows.push_back(step.inputs(row));
  }
  // Each token weighs something else, the last row nothing.
  std::vector<double> weights(static_cast<std::size_t>(step.tokens));
  for (std::size_t t = 0; t < weights.size(); ++t) {
    weights[t] = 0.25 + 0.01 * static_cast<double>(t);
  }
  const std::vector<double> nothing(weights.size());
  const auto weights_of = [&](std::int64_t row) {
    return std::span<const double>(row + 1 == step.rows ? nothing : weights);
  };
  std::vector<float> beside(parameters.size());
  std::vector<double> losses_beside;
  RowSlots<float> slots;
  pass_rows(
      model, std::span<const RowInputs>(rows), slots, std::span<float>(beside),
      [&](std::int64_t row, const RowActivations<float>&, std::span<float> d_logps) {
        for (std::size_t t = 0; t < d_logps.size(); ++t) {
          d_logps[t] = static_cast<float>(-weights_of(row)[t]);
        }
        return row + 1 != step.rows;
      },
      [&](std::int64_t row, const RowActivations<float>& kept) {
        double loss = 0;
        for (std::size_t t = 0; t < kept.logps.size(); ++t) {
          loss +=
              kept.scored[t] != 0 ? -weights_of(row)[t] * static_cast<double>(kept.logps[t]) : 0;
        }
        losses_beside.push_back(loss);
      });
  std::vector<float> inside(parameters.size());
  std::vector<double> losses_inside;
  pass_rows_with_loss(
      model, std::span<const RowInputs>(rows), slots, std::span<float>(inside),
      [&](std::int64_t row) { return loss::NllTokenLoss<float>(weights_of(row)); },
      [&](std::int64_t, const RowActivations<float>&, double loss) {
        losses_inside.push_back(loss);
      });
  EXPECT_TRUE(test::same_bits(inside, beside));
  EXPECT_TRUE(test::same_bits(losses_inside, losses_beside));
  EXPECT_NE(losses_inside.front(), 0.0);
  EXPECT_EQ(losses_inside.back(), 0.0);
}

TEST(HeddleTrainRowPasses, ARowThatFailsEndsThePass) {
  const ParameterLayout layout(tiny_dims());
  const std::vector<float> parameters = random_parameters<float>(layout, 43);
  const Model<float> model(layout, parameters, moe::RouterTraining::trained);
  StepRows<float> step = some_rows<float>();
  step.token_ids[static_cast<std::size_t>(2 * step.tokens)] = 99;
  std::vector<RowInputs> rows;
  for (std::int64_t row = 0; row < step.rows; ++row) {
    rows.push_back(step.inputs(row));
  }
  RowSlots<float> slots;
  EXPECT_EQ(
      test::thrown_text<Error>([&] {
        pass_rows(
            model, std::span<const RowInputs>(rows), slots, std::span<float>(),
            [](std::int64_t, const RowActivations<float>&, std::span<float>) { return false; },
            [](std::int64_t, const RowActivations<float>&) {});
      }),
      "train::Model::forward: token_ids[0] = 99: must be in the vocabulary [0, 13)");
}

TEST(HeddleTrainTrainer, UpdatesOfAStepShareItsOldLogProbs) {
  const ParameterLayout layout(tiny_dims());
  const std::vector<double> start = random_parameters<double>(layout, 44);
  TrainerOptions options;
  options.adamw.learning_rate = 1e-6;  // no token changes its experts
  options.updates_per_step = 3;
  Trainer<double> together(layout, start, options);
  StepRows<double> rows = some_rows<double>();
  std::int64_t passed = 0;
  const StepReport report = together.step(
      rows, [&](std::int64_t done) { passed = done; }, nullptr);
  EXPECT_EQ(passed, 3 * rows.rows);

  // The rows keep the old log-probs that the first update took.
  options.updates_per_step = 1;
  Trainer<double> apart(layout, start, options);
  StepRows<double> kept = some_rows<double>();
  ASSERT_TRUE(kept.old_logps.empty());
  const StepReport first = apart.step(kept, no_progress, nullptr);
  const StepReport second = apart.step(kept, no_progress, nullptr);
  const StepReport third = apart.step(kept, no_progress, nullptr);
  EXPECT_TRUE(test::same_bits(together.parameters(), apart.parameters()));
  EXPECT_EQ(report.loss, first.loss);
  EXPECT_EQ(report.grad_norm, first.grad_norm);
  EXPECT_EQ(report.entropy, first.entropy);
  EXPECT_LT(second.loss, first.loss);
  EXPECT_NE(third.loss, second.loss);
  EXPECT_EQ(kept.old_logps, rows.old_logps);
}

TEST(HeddleTrainTrainer, TheGradientIsTheLossesDerivative) {
  const ParameterLayout layout(tiny_dims());
  std::vector<double> parameters = random_parameters<double>(layout, 45);
  StepRows<double> rows = some_rows<double>();
  // Old log-probs that put ratios inside and outside the clip.
  test::Random random(46);
  const TrainerOptions still{.adamw = {.learning_rate = 0, .weight_decay = 0}};
  {
    Trainer<double> trainer(layout, parameters, still);
    static_cast<void>(trainer.step(rows, no_progress, nullptr));
    for (double& old : rows.old_logps) {
      old += random.uniform(-0.6, 0.6);
    }
  }
  const auto loss = [&](const std::vector<double>& at) {
    Trainer<double> trainer(layout, at, still);
    return trainer.step(rows, no_progress, nullptr).loss;
  };
  // Along random directions of all parameters at once.
  for (int direction = 0; direction < 3; ++direction) {
    const std::vector<double> along = random.normals<double>(layout.size());
    std::vector<double> above = parameters;
    std::vector<double> below = parameters;
    for (std::size_t i = 0; i < along.size(); ++i) {
      above[i] += 1e-6 * along[i];
      below[i] -= 1e-6 * along[i];
    }
    std::vector<examples::Tensor> dump;
    Trainer<double> trainer(layout, parameters, still);
    static_cast<void>(trainer.step(rows, no_progress, &dump));
    double slope = 0;
    for (const TensorPlace& place : layout.tensors()) {
      for (const examples::Tensor& tensor : dump) {
        if (tensor.name == "grad." + place.name) {
          std::vector<double> flat(along.size(), 0.0);
          scatter(place, tensor.values<double>(), std::span<double>(flat));
          for (std::size_t i = 0; i < flat.size(); ++i) {
            slope += flat[i] * along[i];
          }
        }
      }
    }
    EXPECT_NEAR(slope, (loss(above) - loss(below)) / 2e-6, 1e-6 * std::abs(slope) + 1e-8);
  }
}

TEST(HeddleTrainTrainer, StopsBeforeTheUpdateThatWouldSpoilTheModel) {
  const ParameterLayout layout(tiny_dims());
  const std::vector<float> start = random_parameters<float>(layout, 47);
  Trainer<float> trainer(layout, start, {.adamw = {.learning_rate = 0.1}});
  StepRows<float> rows = some_rows<float>();
  for (float& advantage : rows.advantages) {
    advantage *= 1e38F;
  }
  const std::string text = test::thrown_text<std::runtime_error>(
      [&] { static_cast<void>(trainer.step(rows, no_progress, nullptr)); });
  EXPECT_EQ(text.find("step 1: the loss is "), 0U) << text;
  EXPECT_TRUE(test::same_bits(trainer.parameters(), start));
}

TEST(HeddleTrainTrainer, WithoutAdvantagesOnlyDecayMoves) {
  const ParameterLayout layout(tiny_dims());
  const std::vector<double> start = random_parameters<double>(layout, 48);
  Trainer<double> trainer(layout, start, {.adamw = {.learning_rate = 0.1, .weight_decay = 0.5}});
  StepRows<double> rows = some_rows<double>();
  std::fill(rows.advantages.begin(), rows.advantages.end(), 0.0);
  const StepReport report = trainer.step(rows, no_progress, nullptr);
  EXPECT_EQ(report.loss, 0.0);
  EXPECT_EQ(report.grad_norm, 0.0);
  for (std::size_t i = 0; i < start.size(); ++i) {
    EXPECT_EQ(trainer.parameters()[i], start[i] * (1 - 0.1 * 0.5));
  }
}

}  // namespace
}  // namespace heddle::train

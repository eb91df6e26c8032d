// Mutants: a residual connection dropped; the post-mixer norm fed from before the mixer; q and k
// projections of another layer; one of the four projections' parts left out of d_mixer_in; the
// gradient of the final norm or the embedding forgotten; d_out of the experts without its padding
// zeroed; the router's gradient formed though frozen, or its path to hidden cut with it; activations
// of an earlier, longer row showing through; runs cut at padding but not at document starts; forced
// experts of layer 0 used in layer 1.
#include "heddle-train/model.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "examples/heddle_train_cases.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"
#include "support/table.hpp"
#include "support/thrown_text.hpp"

namespace heddle::train {
namespace {

using Documents = std::vector<std::vector<std::int32_t>>;

struct Case {
  ParameterLayout layout{tiny_dims()};
  std::vector<double> parameters = random_parameters<double>(layout, 5);
  Documents documents;

  Case() {
    test::Random random(6);
    for (const std::int64_t length : {4, 1, 6}) {
      documents.push_back(random_document(random, length, layout.dims().vocab));
    }
  }

  [[nodiscard]] Model<double> model(
      moe::RouterTraining router = moe::RouterTraining::trained) const {
    return {layout, parameters, router};
  }
};

std::vector<double> weights_of(const TestRow& row) {
  test::Random random(7);
  return random.normals<double>(static_cast<std::int64_t>(row.token_ids.size()));
}

/// sum of weights[t] logps[t]: unscored tokens have log-prob 0.
double weighted_logps(const Model<double>& model, const TestRow& row,
                      const std::vector<double>& weights) {
  RowActivations<double> kept;
  model.forward(row.inputs(), kept);
  double sum = 0;
  for (std::size_t t = 0; t < weights.size(); ++t) {
    sum += weights[t] * kept.logps[t];
  }
  return sum;
}

std::vector<double> gradient_of(const Model<double>& model, const RowInputs& row,
                                const std::vector<double>& weights) {
  RowActivations<double> kept;
  model.forward(row, kept);
  std::vector<double> gradient(static_cast<std::size_t>(model.layout().size()), 0.0);
  model.backward(row, kept, weights, gradient);
  return gradient;
}

/// The same values, tensor by tensor.
std::map<std::string, std::vector<double>> by_tensor(const ParameterLayout& layout,
                                                     const std::vector<double>& values) {
  std::map<std::string, std::vector<double>> tensors;
  for (const TensorPlace& place : layout.tensors()) {
    std::vector<double>& tensor = tensors[place.name];
    tensor.resize(static_cast<std::size_t>(place.size()));
    gather(place, std::span<const double>(values), std::span<double>(tensor));
  }
  return tensors;
}

TEST(HeddleTrainModel, EveryGradientIsTheDerivative) {
  Case given;
  const TestRow row(16, given.documents, {2, 7, 9});
  const std::vector<double> weights = weights_of(row);
  const Model<double> model = given.model();
  const auto actual = by_tensor(given.layout, gradient_of(model, row.inputs(), weights));
  // The norm of a short q or k bends sharply: two step widths, extrapolated to none.
  const auto differences = [&](double step) {
    return test::central_differences(
        std::span<double>(given.parameters), [&] { return weighted_logps(model, row, weights); },
        step);
  };
  std::vector<double> derivatives = differences(1e-5);
  const std::vector<double> coarse = differences(2e-5);
  for (std::size_t i = 0; i < derivatives.size(); ++i) {
    derivatives[i] += (derivatives[i] - coarse[i]) / 3;
  }
  const auto expected = by_tensor(given.layout, derivatives);
  ASSERT_EQ(actual.size(), 2U * 18U + 3U);
  double worst = 0;
  for (const auto& [name, tensor] : expected) {
    const test::Difference found =
        test::difference(std::span<const double>(actual.at(name)), std::span<const double>(tensor));
    EXPECT_GT(found.scale, 1e-6) << name << ": nothing depends on it";
    EXPECT_LT(found.relative_l2, 1e-7) << name;
    worst = std::max(worst, found.relative_l2);
  }
  RecordProperty("worst_relative_l2", examples::number_text(worst));
}

TEST(HeddleTrainModel, BackwardAddsToTheGradient) {
  const Case given;
  const TestRow row(16, given.documents, {2, 7, 9});
  const std::vector<double> weights = weights_of(row);
  const Model<double> model = given.model();
  RowActivations<double> kept;
  model.forward(row.inputs(), kept);
  std::vector<double> gradient(given.parameters.size(), 3.0);
  model.backward(row.inputs(), kept, weights, gradient);
  std::vector<double> expected = gradient_of(model, row.inputs(), weights);
  for (double& value : expected) {
    value += 3.0;
  }
  EXPECT_TRUE(test::close(gradient, expected, 1e-12));
}

TEST(HeddleTrainModel, FrozenRouterChangesNoOtherGradient) {
  const Case given;
  const TestRow row(16, given.documents, {2, 7, 9});
  const std::vector<double> weights = weights_of(row);
  const auto trained = by_tensor(given.layout, gradient_of(given.model(), row.inputs(), weights));
  const auto frozen = by_tensor(
      given.layout, gradient_of(given.model(moe::RouterTraining::frozen), row.inputs(), weights));
  for (const auto& [name, tensor] : trained) {
    if (name.ends_with("mlp.gate.weight")) {
      EXPECT_EQ(frozen.at(name), std::vector<double>(tensor.size(), 0.0));
    } else {
      EXPECT_TRUE(test::same_bits(frozen.at(name), tensor)) << name;
    }
  }
}

TEST(HeddleTrainModel, PackedDocumentsScoreAsEachAlone) {
  const Case given;
  const Model<double> model = given.model();
  const std::vector<std::vector<std::int64_t>> layouts = {
      {0, 4, 5},   // end: padding behind
      {5, 9, 10},  // start: padding in front
      {0, 5, 10},  // gaps
  };
  std::vector<double> gradient_alone(given.parameters.size(), 0.0);
  std::vector<RowActivations<double>> alone(given.documents.size());
  for (std::size_t s = 0; s < given.documents.size(); ++s) {
    const TestRow row(static_cast<std::int64_t>(given.documents[s].size()), {given.documents[s]},
                      {0});
    model.forward(row.inputs(), alone[s]);
    const std::vector<double> ones(row.token_ids.size(), 1.0);
    model.backward(row.inputs(), alone[s], ones, gradient_alone);
  }
  for (const std::vector<std::int64_t>& offsets : layouts) {
    const TestRow row(16, given.documents, offsets);
    RowActivations<double> kept;
    model.forward(row.inputs(), kept);
    std::vector<double> logps(16, 0.0);
    std::vector<double> entropy(16, 0.0);
    for (std::size_t s = 0; s < offsets.size(); ++s) {
      for (std::size_t i = 0; i < given.documents[s].size(); ++i) {
        logps[static_cast<std::size_t>(offsets[s]) + i] = alone[s].logps[i];
        entropy[static_cast<std::size_t>(offsets[s]) + i] = alone[s].entropy[i];
      }
    }
    EXPECT_TRUE(test::close(kept.logps, logps, 1e-14));
    EXPECT_TRUE(test::close(kept.entropy, entropy, 1e-14));
    std::vector<double> gradient(given.parameters.size(), 0.0);
    model.backward(row.inputs(), kept, std::vector<double>(16, 1.0), gradient);
    EXPECT_TRUE(test::close(gradient, gradient_alone, 1e-13));
  }
}

TEST(HeddleTrainModel, OneDocumentDoesNotReachAnother) {
  const Case given;
  const Model<double> model = given.model();
  const TestRow row(16, given.documents, {2, 7, 9});
  RowActivations<double> kept;
  model.forward(row.inputs(), kept);
  for (std::size_t changed = 0; changed < given.documents.size(); ++changed) {
    Documents documents = given.documents;
    for (std::int32_t& id : documents[changed]) {
      id = (id + 1) % 13;
    }
    const TestRow other(16, documents, {2, 7, 9});
    RowActivations<double> perturbed;
    model.forward(other.inputs(), perturbed);
    bool differs = false;
    for (std::size_t t = 0; t < 16; ++t) {
      if (row.segment_ids[t] == static_cast<std::int32_t>(changed) + 1) {
        differs = differs || kept.logps[t] != perturbed.logps[t] ||
                  kept.leaving(static_cast<std::int64_t>(t), 0) !=
                      perturbed.leaving(static_cast<std::int64_t>(t), 0);
      } else {
        EXPECT_EQ(kept.logps[t], perturbed.logps[t]) << t;
        EXPECT_EQ(kept.entropy[t], perturbed.entropy[t]) << t;
      }
    }
    EXPECT_TRUE(differs) << changed;
  }
}

// Positions that start anew inside one id are a boundary that the id alone does not show.
TEST(HeddleTrainModel, PositionsThatRestartBeginADocument) {
  const Case given;
  const Model<double> model = given.model();
  const TestRow by_ids(16, given.documents, {2, 7, 9});
  RowActivations<double> expected;
  model.forward(by_ids.inputs(), expected);
  TestRow by_positions = by_ids;
  for (std::int32_t& id : by_positions.segment_ids) {
    id = id > 0 ? 1 : 0;
  }
  RowActivations<double> kept;
  model.forward(by_positions.inputs(), kept);
  EXPECT_TRUE(test::same_bits(kept.logps, expected.logps));
  EXPECT_TRUE(test::same_bits(kept.entropy, expected.entropy));
  // Without positions the neighbours of one id are one document, and see each other.
  RowInputs joined = by_positions.inputs();
  joined.segment_positions = {};
  model.forward(joined, kept);
  EXPECT_FALSE(test::same_bits(kept.logps, expected.logps));
}

TEST(HeddleTrainModel, NumbersDocumentsByIdAndPosition) {
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(number_documents(Ids{0, 4, 4, 0, 4, 2}, {}), (Ids{0, 1, 1, 0, 1, 2}));
  EXPECT_EQ(number_documents(Ids{4, 4, 4, 4}, Ids{0, 1, 0, 1}), (Ids{1, 1, 2, 2}));
  EXPECT_EQ(number_documents(Ids{4, 0, 4, 4}, Ids{0, 9, 1, 3}), (Ids{1, 0, 1, 2}));
  EXPECT_EQ(number_documents(Ids{}, {}), Ids{});
}

/// Leaves NaN in the memory that the next allocations are likely to get: several blocks of each size,
/// as an allocator keeps them by size.
void poison_heap() {
  std::vector<std::vector<double>> blocks;
  for (std::size_t size = 2; size <= 512; size += 2) {
    for (int copy = 0; copy < 7; ++copy) {
      blocks.emplace_back(size, std::numeric_limits<double>::quiet_NaN());
    }
  }
}

// Padding and reused memory: a row computed into activations and from temporaries that are full of NaN
// gives the bits of one computed into fresh ones.
TEST(HeddleTrainModel, NothingThatStoodAtPaddingIsRead) {
  const Case given;
  const Model<double> model = given.model();
  const TestRow row(16, given.documents, {2, 7, 9});
  const std::vector<double> weights = weights_of(row);
  RowActivations<double> fresh;
  model.forward(row.inputs(), fresh);
  std::vector<double> expected(given.parameters.size(), 0.0);
  model.backward(row.inputs(), fresh, weights, expected);

  const double nan = std::numeric_limits<double>::quiet_NaN();
  RowActivations<double> kept;
  model.forward(row.inputs(), kept);
  for (LayerActivations<double>& layer : kept.layers) {
    for (Matrix<double>* matrix :
         {&layer.entering, &layer.mixer_in, &layer.qkv, &layer.z, &layer.a, &layer.b,
          &layer.recurrence_out, &layer.gate_inverse_root, &layer.gated, &layer.between,
          &layer.experts_in, &layer.expert_weights}) {
      matrix->setConstant(nan);
    }
  }
  kept.leaving.setConstant(nan);
  kept.head_in.setConstant(nan);
  poison_heap();
  model.forward(row.inputs(), kept);
  EXPECT_TRUE(test::same_bits(kept.logps, fresh.logps));
  EXPECT_TRUE(test::same_bits(kept.entropy, fresh.entropy));
  std::vector<double> actual(given.parameters.size(), 0.0);
  poison_heap();
  model.backward(row.inputs(), kept, weights, actual);
  EXPECT_TRUE(test::same_bits(actual, expected));
}

TEST(HeddleTrainModel, RowsWithoutScoredTokensGiveNothing) {
  const Case given;
  const Model<double> model = given.model();
  for (const TestRow& row : {TestRow(5, {}, {}), TestRow(0, {}, {}), TestRow(5, {{3}}, {2})}) {
    RowActivations<double> kept;
    model.forward(row.inputs(), kept);
    EXPECT_EQ(kept.logps, std::vector<double>(row.token_ids.size(), 0.0));
    EXPECT_EQ(kept.entropy, std::vector<double>(row.token_ids.size(), 0.0));
    std::vector<double> gradient(given.parameters.size(), 0.0);
    model.backward(
        row.inputs(), kept,
        std::vector<double>(row.token_ids.size(), std::numeric_limits<double>::quiet_NaN()),
        gradient);
    EXPECT_EQ(gradient, std::vector<double>(gradient.size(), 0.0));
  }
}

TEST(HeddleTrainModel, RecordedRoutingIsFollowedLayerByLayer) {
  const Case given;
  const Model<double> model = given.model();
  const TestRow row(16, given.documents, {2, 7, 9});
  // Another pair of experts in each layer; one token without a record chooses for itself.
  std::vector<std::vector<std::int32_t>> ids = {std::vector<std::int32_t>(32, 0),
                                                std::vector<std::int32_t>(32, 0)};
  for (std::size_t t = 0; t < 16; ++t) {
    ids[0][2 * t] = 4;
    ids[0][2 * t + 1] = 1;
    ids[1][2 * t] = 0;
    ids[1][2 * t + 1] = 3;
  }
  ids[1][2 * 3] = -1;
  const std::vector<ConstMatrixView<std::int32_t>> views = {{ids[0].data(), 16, 2},
                                                            {ids[1].data(), 16, 2}};
  RowInputs inputs = row.inputs();
  inputs.forced_experts = views;
  RowActivations<double> kept;
  model.forward(inputs, kept);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    for (std::int64_t t = 0; t < 16; ++t) {
      const bool padding = row.segment_ids[static_cast<std::size_t>(t)] == 0;
      if (layer == 1 && t == 3) {
        EXPECT_GE(kept.layers[1].expert_ids(3, 0), 0);
        continue;
      }
      for (std::int64_t k = 0; k < 2; ++k) {
        EXPECT_EQ(kept.layers[layer].expert_ids(t, k),
                  padding ? -1 : ids[layer][static_cast<std::size_t>(2 * t + k)]);
      }
    }
  }
}

TEST(HeddleTrainModel, LogitsAreWhatIsScored) {
  const Case given;
  const Model<double> model = given.model();
  const TestRow row(16, given.documents, {2, 7, 9});
  RowActivations<double> kept;
  model.forward(row.inputs(), kept);
  const Matrix<double> logits = model.logits(kept);
  for (std::int64_t t = 0; t < 16; ++t) {
    const auto at = static_cast<std::size_t>(t);
    if (row.segment_ids[at] == 0) {
      EXPECT_EQ(logits.row(t).cwiseAbs().maxCoeff(), 0.0);
    }
    if (kept.scored[at] != 0) {
      const double log_sum = std::log(logits.row(t - 1).array().exp().sum());
      EXPECT_NEAR(kept.logps[at], logits(t - 1, row.token_ids[at]) - log_sum, 1e-13);
    }
  }
}

TEST(HeddleTrainModel, NarrowStorageStaysNearTheWide) {
  const Case given;
  const TestRow row(16, given.documents, {2, 7, 9});
  const std::vector<double> weights = weights_of(row);
  RowActivations<double> expected;
  given.model().forward(row.inputs(), expected);
  const std::vector<double> expected_gradient = gradient_of(given.model(), row.inputs(), weights);

  const std::vector<float> parameters(given.parameters.begin(), given.parameters.end());
  const std::vector<float> narrow_weights(weights.begin(), weights.end());
  const auto check = [&](const auto& model, double tolerance) {
    using M = std::remove_cvref_t<decltype(model)>;
    RowActivations<std::conditional_t<std::is_same_v<M, Model<float>>, float, bfloat16>> kept;
    model.forward(row.inputs(), kept);
    EXPECT_TRUE(test::close(
        kept.logps, std::vector<float>(expected.logps.begin(), expected.logps.end()), tolerance));
    std::vector<float> gradient(parameters.size(), 0.0F);
    model.backward(row.inputs(), kept, narrow_weights, gradient);
    EXPECT_LT(test::difference(std::span<const float>(gradient),
                               std::span<const double>(expected_gradient))
                  .relative_l2,
              10 * tolerance);
  };
  check(Model<float>(given.layout, parameters, moe::RouterTraining::trained), 1e-5);
  // Eight significant bits, through two layers.
  check(Model<bfloat16>(given.layout, parameters, moe::RouterTraining::trained), 5e-2);
}

TEST(HeddleTrainModel, RefreshTakesOverChangedParameters) {
  const Case given;
  const TestRow row(16, given.documents, {2, 7, 9});
  std::vector<float> parameters(given.parameters.begin(), given.parameters.end());
  Model<bfloat16> model(given.layout, parameters, moe::RouterTraining::trained);
  for (float& value : parameters) {
    value *= 0.5F;
  }
  model.refresh();
  const Model<bfloat16> expected(given.layout, parameters, moe::RouterTraining::trained);
  RowActivations<bfloat16> kept;
  RowActivations<bfloat16> kept_expected;
  model.forward(row.inputs(), kept);
  expected.forward(row.inputs(), kept_expected);
  EXPECT_TRUE(test::same_bits(kept.logps, kept_expected.logps));
}

TEST(HeddleTrainModel, NamesAnIdOutsideTheVocabulary) {
  const Case given;
  TestRow row(16, given.documents, {2, 7, 9});
  row.token_ids[10] = 13;
  RowActivations<double> kept;
  EXPECT_EQ(test::thrown_text<Error>([&] { given.model().forward(row.inputs(), kept); }),
            "train::Model::forward: token_ids[10] = 13: must be in the vocabulary [0, 13)");
}

TEST(HeddleTrainTokens, RunsEndAtDocumentsAndPadding) {
  const std::vector<std::int32_t> ids = {0, 1, 1, 2, 0, 0, 2, 2, 3, 0};
  const std::vector<TokenRun> expected = {{1, 2}, {3, 1}, {6, 2}, {8, 1}};
  EXPECT_EQ(token_runs(ids), expected);
  EXPECT_TRUE(token_runs({}).empty());
}

}  // namespace
}  // namespace heddle::train

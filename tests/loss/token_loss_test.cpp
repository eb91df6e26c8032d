// Mutants, each of which must fail a test here: the mask not asked; old log-probs not subtracted, or
// subtracted where there are none; weights left out; the sign of the log-likelihood; a weight of 0
// multiplied instead of selected; a sequence's ratio accepted; logps accepted.
#include "heddle/loss/token_loss.hpp"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/thrown_text.hpp"

namespace {

namespace loss = heddle::loss;
using heddle::test::Random;
using heddle::test::same_bits;
using heddle::test::thrown_text;

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

struct Row {
  std::vector<float> logps, old_logps, ref_logps, advantages, importance_weights;
  std::vector<std::uint8_t> mask;
  std::vector<std::int32_t> segment_ids;
  std::vector<double> weights;

  [[nodiscard]] loss::GrpoInputs<float> inputs() const {
    return {.logps = {},
            .old_logps = old_logps,
            .ref_logps = ref_logps,
            .advantages = advantages,
            .importance_weights = importance_weights,
            .mask = mask,
            .segment_ids = segment_ids,
            .weights = weights};
  }
};

Row random_row(std::uint64_t seed) {
  Random random(seed);
  Row row;
  for (int t = 0; t < 60; ++t) {
    row.logps.push_back(static_cast<float>(-random.uniform(0, 4)));
    row.old_logps.push_back(row.logps.back() + static_cast<float>(random.normal(0.4)));
    row.ref_logps.push_back(row.logps.back() + static_cast<float>(random.normal(0.4)));
    row.advantages.push_back(static_cast<float>(random.normal()));
    row.importance_weights.push_back(static_cast<float>(random.uniform(0.5, 2)));
    row.segment_ids.push_back(t < 25 ? 1 : t < 50 ? 2 : 0);
    row.mask.push_back(t < 50 && random.chance(0.7) ? 1 : 0);
    row.weights.push_back(row.mask.back() != 0 ? random.uniform(0.01, 0.1) : 0);
  }
  return row;
}

// The whole row at once and token by token: the same gradient to the bit, the same loss.
TEST(LossTokenLoss, SaysWhatGrpoSays) {
  std::uint64_t seed = 1;
  for (const auto kl :
       {loss::KlForm::none, loss::KlForm::kl, loss::KlForm::mse_kl, loss::KlForm::low_var_kl}) {
    for (const bool has_old : {true, false}) {
      for (const bool corrected : {true, false}) {
        Row row = random_row(seed++);
        row.old_logps = has_old ? row.old_logps : std::vector<float>();
        row.importance_weights = corrected ? row.importance_weights : std::vector<float>();
        for (std::size_t t = 0; t < row.mask.size(); ++t) {
          if (row.mask[t] == 0) {
            row.advantages[t] = nan_value;
          }
        }
        loss::GrpoOptions options;
        options.kl = kl;
        options.dual_clip = 1.5;
        std::vector<float> expected(row.mask.size());
        loss::GrpoInputs<float> inputs = row.inputs();
        inputs.logps = row.logps;
        const loss::GrpoLoss total = loss::grpo<float>(options, inputs, expected);
        const loss::GrpoTokenLoss<float> token_loss(options, row.inputs());
        std::vector<float> d_logps;
        double sum = 0;
        for (std::size_t t = 0; t < row.mask.size(); ++t) {
          const float logp = row.mask[t] != 0 ? row.logps[t] : nan_value;
          const auto share = token_loss(static_cast<std::int64_t>(t), logp, nan_value);
          d_logps.push_back(share.d_logp);
          EXPECT_EQ(share.d_entropy, 0.0F);
          sum += share.loss;
        }
        EXPECT_TRUE(same_bits(d_logps, expected));
        if (kl == loss::KlForm::none) {
          EXPECT_EQ(sum, total.loss);
        } else {
          EXPECT_NEAR(sum, total.loss, 1e-14);
        }
        EXPECT_NE(sum, 0.0);
      }
    }
  }
}

TEST(LossTokenLoss, RefusesARatioOfSequencesAndLogProbsOfItsOwn) {
  const Row row = random_row(20);
  loss::GrpoOptions options;
  options.ratio = loss::RatioLevel::sequence;
  EXPECT_EQ(thrown_text<heddle::Error>(
                [&] { const loss::GrpoTokenLoss<float> refused(options, row.inputs()); }),
            "loss::GrpoTokenLoss: options.ratio = 1: must be token");
  loss::GrpoInputs<float> inputs = row.inputs();
  inputs.logps = row.logps;
  EXPECT_EQ(
      thrown_text<heddle::Error>([&] { const loss::GrpoTokenLoss<float> refused({}, inputs); }),
      "loss::GrpoTokenLoss: inputs.logps.size = 60: must be 0: the call brings them");
  inputs = row.inputs();
  inputs.weights = inputs.weights.first(3);
  EXPECT_EQ(
      thrown_text<heddle::Error>([&] { const loss::GrpoTokenLoss<float> refused({}, inputs); }),
      "loss::GrpoTokenLoss: inputs.weights.size = 3: must equal inputs.mask.size (60)");
}

TEST(LossTokenLoss, NegativeLogLikelihoodIsWeighedAndSelected) {
  const std::vector<double> weights = {0.5, 0.0, 0.25};
  const loss::NllTokenLoss<float> weighed(weights);
  EXPECT_EQ(weighed(0, -3.0F, 1.0F).loss, 1.5);
  EXPECT_EQ(weighed(0, -3.0F, 1.0F).d_logp, -0.5F);
  EXPECT_EQ(weighed(0, -3.0F, 1.0F).d_entropy, 0.0F);
  EXPECT_EQ(weighed(1, nan_value, 1.0F).loss, 0.0) << "selected, not multiplied";
  EXPECT_EQ(weighed(1, nan_value, 1.0F).d_logp, 0.0F);
  const loss::NllTokenLoss<float> constant(0.125);
  EXPECT_EQ(constant(77, -8.0F, 1.0F).loss, 1.0);
  EXPECT_EQ(constant(77, -8.0F, 1.0F).d_logp, -0.125F);
}

}  // namespace

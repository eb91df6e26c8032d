// Mutants, each of which must fail a test here (numbers of spec/head.md 10 in brackets): sign of the
// one-pass cotangent [1], division by the temperature dropped on the way back [2], a token's cotangent
// taken from the block's first row [3], max and exp_sum swapped [4], max dropped from a log-prob [5],
// sign of the entropy [6], d_entropy ignored [7], negative ids not wrapped [9], the vocabulary's bound
// off by one [10], the non-finite maximum kept [11], the mode ignored [12, 13], columns beyond V
// counted [16], weighted sum rescaled after the exp-sum [17] or without delta * exp_sum [18, 29], the
// guard of an all -inf tile removed [19], rounding before the one-hot [20], d_weight summed in bf16
// [21], inactive rows multiplied [22], the target picked by multiplication [25], max + log exp_sum
// stored for the pair [26], entropy of untempered logits [27], every rank adding the one-hot [30],
// Write ignored, a stride taken for a width.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "head/problem.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"

namespace {

namespace head = heddle::head;
using namespace heddle::test;
using head::EntropyPolicy;
using head::IdPolicy;
using head::LogitsDtype;
using head::LogpForm;
using head::Mode;
using heddle::bfloat16;

/// Every case of the contract, on each tier.
class HeadTiers : public ::testing::TestWithParam<Tier> {
 protected:
  void SetUp() override { current_tier = GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(, HeadTiers, ::testing::Values(Tier::reference, Tier::chunked),
                         [](const auto& tier) {
                           return tier.param == Tier::reference ? "Reference" : "Chunked";
                         });

// Forward: against the definition.

TEST_P(HeadTiers, MatchesTheDefinitionInDouble) {
  const head::Dims shapes[] = {{.tokens = 1, .hidden = 1, .vocab = 1},
                               {.tokens = 2, .hidden = 1, .vocab = 9},
                               {.tokens = 5, .hidden = 3, .vocab = 1},
                               {.tokens = 33, .hidden = 5, .vocab = 64},
                               {.tokens = 65, .hidden = 4, .vocab = 130}};
  double worst = 0;
  std::uint64_t seed = 1;
  for (const head::Dims& dims : shapes) {
    for (const double temperature : {1.0, 0.7, 3.0}) {
      for (const std::int64_t shards : {1, 2, 3, 200}) {
        auto problem = random_problem<double>(dims, seed++, 3.0);
        problem.options.temperature = temperature;
        problem.options.vocab_shards = shards;
        const Truth truth = definition(problem);
        for (const Mode mode : modes) {
          problem.options.mode = mode;
          const auto result = problem.forward();
          EXPECT_TRUE(close(result.logps, truth.logps, 1e-11));
          EXPECT_TRUE(close(result.entropy, truth.entropy, 1e-11));
          worst = std::max(
              worst, heddle::test::difference<double, double>(result.logps, truth.logps).error);
          for (std::size_t t = 0; t < truth.logps.size(); ++t) {
            EXPECT_NEAR(std::log(result.exp_sum[t]) - result.mean[t], result.entropy[t], 1e-12);
            EXPECT_GE(result.exp_sum[t], 1.0 - 1e-12) << "the maximum's own share";
          }
        }
      }
    }
  }
  RecordProperty("worst_error", std::to_string(worst));
}

TEST_P(HeadTiers, FloatAndBf16StorageAreWithinTheBar) {
  const head::Dims dims{.tokens = 40, .hidden = 24, .vocab = 700};
  const auto check = [](auto problem) {
    const Truth truth = definition(problem);
    for (const Mode mode : modes) {
      problem.options.mode = mode;
      const auto result = problem.forward();
      EXPECT_TRUE(close(result.logps, truth.logps, 2e-6));
      EXPECT_TRUE(close(result.entropy, truth.entropy, 2e-6));
    }
  };
  check(random_problem<float>(dims, 5));
  check(random_problem<bfloat16, float>(dims, 6));
  check(random_problem<bfloat16>(dims, 7).transposed());
}

TEST_P(HeadTiers, OneColumnHasNothingToChoose) {
  for (const Mode mode : modes) {
    auto problem = random_problem<float>({.tokens = 4, .hidden = 3, .vocab = 1}, 9);
    problem.options.temperature = 0.7;
    problem.options.mode = mode;
    const auto result = problem.backward();
    for (const auto* zeros : {&result.logps, &result.entropy, &result.d_hidden, &result.d_weight}) {
      EXPECT_TRUE(equal(*zeros, std::vector<double>(zeros->size(), 0.0), 0.0));
    }
  }
}

TEST_P(HeadTiers, NoTokensIsLegalAndStillClearsTheWeightsCotangent) {
  auto problem = random_problem<float>({.tokens = 0, .hidden = 2, .vocab = 3}, 1);
  const auto result = problem.backward();
  EXPECT_TRUE(result.logps.empty());
  EXPECT_TRUE(equal(result.d_weight, std::vector<double>(6, 0.0), 0.0));
}

// A maximum that rises or falls from tile to tile: every rescale of both sums is in play.
TEST_P(HeadTiers, EntropyHoldsWhereverTheMaximumComes) {
  std::vector<double> x;
  for (int k = 0; k < 40; ++k) {
    x.push_back(0.25 * k);
  }
  std::vector<double> falling(x.rbegin(), x.rend());
  for (const auto& row : {x, falling}) {
    auto problem = row_problem<double>(row, 3);
    const Truth truth = definition(problem);
    for (const std::int64_t tile : {1, 3, 8, 39, 40, 1000}) {
      for (const std::int64_t shards : {1, 2, 7, 40, 41}) {
        problem.options.vocab_tile = tile;
        problem.options.vocab_shards = shards;
        const auto result = problem.forward();
        EXPECT_TRUE(close(result.logps, truth.logps, 1e-12)) << tile << " " << shards;
        EXPECT_TRUE(close(result.entropy, truth.entropy, 1e-12)) << tile << " " << shards;
        EXPECT_EQ(result.max[0], 0.25 * 39);
      }
    }
  }
}

// 1,536 columns that are no columns would each add exp(0 - max) to a sum of this order.
TEST_P(HeadTiers, LastShortTileCountsNoColumnsBeyondTheVocabulary) {
  for (const std::int64_t tile : {4, 6, 512}) {
    auto problem = row_problem<float>(std::vector<double>(5, -40.0), 4);
    problem.options.vocab_tile = tile;
    const auto result = problem.forward();
    EXPECT_TRUE(equal(result.logps, {-std::log(5.0)}, 1e-5));
    EXPECT_TRUE(equal(result.exp_sum, {5.0}, 0.0));
  }
}

TEST_P(HeadTiers, TemperatureScalesBothAndZeroMeansNone) {
  auto problem = row_problem<double>({0.0, std::log(2.0), std::log(3.0), -1.0}, 2);
  problem.options.temperature = 0.5;
  const double partition = 1 + 4 + 9 + std::exp(-2.0);
  const double p[] = {1 / partition, 4 / partition, 9 / partition, std::exp(-2.0) / partition};
  double entropy = 0;
  for (const double share : p) {
    entropy -= share * std::log(share);
  }
  for (const Mode mode : modes) {
    problem.options.mode = mode;
    problem.options.temperature = 0.5;
    const auto result = problem.forward();
    EXPECT_NEAR(result.logps[0], std::log(p[2]), 1e-14);
    EXPECT_NEAR(result.entropy[0], entropy, 1e-14);
    EXPECT_NEAR(result.max[0], 2 * std::log(3.0), 1e-14) << "of the tempered logits";
    EXPECT_NEAR(problem.backward().d_weight[0], -p[0] / 0.5, 1e-14);

    problem.options.temperature = 0;
    const auto zero = problem.backward();
    problem.options.temperature = 1;
    const auto one = problem.backward();
    EXPECT_TRUE(same_bits(zero.logps, one.logps));
    EXPECT_TRUE(same_bits(zero.d_weight, one.d_weight));
    EXPECT_NEAR(one.logps[0], std::log(3 / (6 + std::exp(-1.0))), 1e-14);
  }
}

// Bits.

TEST_P(HeadTiers, LayoutsHaveTheSameBits) {
  for (const std::int64_t shards : {1, 3}) {
    auto problem = random_problem<float>({.tokens = 37, .hidden = 6, .vocab = 131}, 21);
    problem.options.vocab_shards = shards;
    const auto dv = problem.backward();
    const auto vd = problem.transposed().backward();
    EXPECT_TRUE(same_bits(dv.logps, vd.logps));
    EXPECT_TRUE(same_bits(dv.entropy, vd.entropy));
    EXPECT_TRUE(same_bits(dv.d_hidden, vd.d_hidden));
    for (std::int64_t d = 0; d < 6; ++d) {
      for (std::int64_t k = 0; k < 131; ++k) {
        EXPECT_EQ(dv.d_weight[static_cast<std::size_t>(d * 131 + k)],
                  vd.d_weight[static_cast<std::size_t>(k * 6 + d)]);
      }
    }
  }
}

TEST_P(HeadTiers, TokenBlocksHaveTheBitsOfTheWhole) {
  const auto problem = random_problem<float>({.tokens = 70, .hidden = 5, .vocab = 90}, 22);
  const auto whole = problem.backward();
  Results<float> parts{whole};
  std::vector<float> d_weight_sum(whole.d_weight.size(), 0);
  for (auto* values : {&parts.logps, &parts.entropy, &parts.max, &parts.exp_sum, &parts.mean}) {
    std::ranges::fill(*values, -77.0F);
  }
  std::ranges::fill(parts.d_hidden, -77.0F);
  const head::Outputs<float> outputs{parts.logps, parts.entropy, parts.max, parts.exp_sum,
                                     parts.mean};
  const head::Residuals<float> residuals{parts.max, parts.exp_sum, parts.mean};
  const head::OutputCotangents<float> given{problem.d_logps, problem.d_entropy};
  const head::Cotangents<float> cotangents{
      .d_hidden = {parts.d_hidden.data(), 70, 5},
      .d_weight = {.values = {d_weight_sum.data(), 5, 90}, .write = heddle::Write::accumulate}};
  for (std::int64_t first = 0; first < 70; first += 23) {
    const std::int64_t count = std::min<std::int64_t>(23, 70 - first);
    const head::Dims dims{.tokens = count, .hidden = 5, .vocab = 90};
    const auto inputs = problem.inputs().token_block(first, count);
    run_forward(dims, inputs, problem.options, outputs.token_block(first, count));
    run_backward(dims, inputs, problem.options, residuals.token_block(first, count),
                 given.token_block(first, count), cotangents.token_block(first, count));
  }
  EXPECT_TRUE(same_bits(parts.logps, whole.logps));
  EXPECT_TRUE(same_bits(parts.entropy, whole.entropy));
  EXPECT_TRUE(same_bits(parts.max, whole.max));
  EXPECT_TRUE(same_bits(parts.exp_sum, whole.exp_sum));
  EXPECT_TRUE(same_bits(parts.mean, whole.mean));
  EXPECT_TRUE(same_bits(parts.d_hidden, whole.d_hidden));
  EXPECT_TRUE(close(d_weight_sum, whole.d_weight, 1e-6));
}

// Shards that hold whole cells of the tile grid send the very statistics that one device merges.
TEST_P(HeadTiers, ShardsOnTheTileGridHaveTheBitsOfOneDevice) {
  auto problem = random_problem<float>({.tokens = 9, .hidden = 6, .vocab = 96}, 23);
  problem.options.vocab_tile = 8;
  const auto one = problem.forward();
  for (const std::int64_t shards : {2, 3, 4, 12}) {
    problem.options.vocab_shards = shards;
    const auto split = problem.forward();
    EXPECT_TRUE(same_bits(split.logps, one.logps));
    EXPECT_TRUE(same_bits(split.entropy, one.entropy));
    EXPECT_TRUE(same_bits(split.exp_sum, one.exp_sum));
  }
}

TEST_P(HeadTiers, TilesAndUnevenShardsAgreeWithinTheBar) {
  auto problem = random_problem<float>({.tokens = 35, .hidden = 6, .vocab = 97}, 24, 2.0);
  problem.options.vocab_tile = 97;
  const auto whole = problem.backward();
  for (const Mode mode : modes) {
    for (const std::int64_t tile : {1, 7, 64, 96, 512}) {
      for (const std::int64_t shards : {1, 2, 5, 97, 100}) {
        problem.options.mode = mode;
        problem.options.vocab_tile = tile;
        problem.options.vocab_shards = shards;
        const auto split = problem.backward();
        EXPECT_TRUE(close(split.logps, whole.logps, 1e-6));
        EXPECT_TRUE(close(split.entropy, whole.entropy, 1e-6));
        EXPECT_TRUE(close(split.d_hidden, whole.d_hidden, 2e-6));
        EXPECT_TRUE(close(split.d_weight, whole.d_weight, 2e-6));
      }
    }
  }
}

// The modes compute the same by other formulas: equal bits everywhere would mean that one of them runs
// under every name.
TEST_P(HeadTiers, LocalIsAnotherEvaluationThanFused) {
  auto problem = random_problem<float>({.tokens = 20, .hidden = 6, .vocab = 97}, 25, 2.0);
  const auto fused = problem.backward();
  problem.options.mode = Mode::local;
  problem.options.vocab_shards = 3;
  const auto local = problem.backward();
  EXPECT_FALSE(same_bits(local.entropy, fused.entropy));
  EXPECT_FALSE(same_bits(local.d_weight, fused.d_weight));
  problem.options.mode = Mode::unsharded;
  const auto unsharded = problem.backward();
  EXPECT_FALSE(same_bits(unsharded.d_hidden, local.d_hidden)) << "one device sums no rank's share";
}

TEST_P(HeadTiers, LocalAndUnshardedBackwardReadNoResidual) {
  auto problem = random_problem<float>({.tokens = 5, .hidden = 3, .vocab = 20}, 26);
  for (const Mode mode : {Mode::local, Mode::unsharded}) {
    problem.options.mode = mode;
    const auto expected = problem.backward();
    const std::vector<float> wild(5, static_cast<float>(nan_value));
    std::vector<float> d_hidden(problem.hidden.size(), -77.0F);
    run_backward(problem.dims, problem.inputs(), problem.options,
                 head::Residuals<float>{wild, wild, wild},
                 head::OutputCotangents<float>{problem.d_logps, problem.d_entropy},
                 head::Cotangents<float>{.d_hidden = {d_hidden.data(), 5, 3}});
    EXPECT_TRUE(same_bits(d_hidden, expected.d_hidden));
  }
}

// Summed in float, 50,000 shares of one row would lose tens of ulps of the log-sum.
TEST_P(HeadTiers, LongRowsKeepTheDigitsOfTheirSums) {
  Random random(27);
  std::vector<double> x;
  for (int k = 0; k < 50000; ++k) {
    x.push_back(static_cast<double>(static_cast<float>(random.normal())));
  }
  auto wide = row_problem<double>(x, 123);
  const auto truth = wide.forward();
  for (const Mode mode : modes) {
    for (const std::int64_t tile : {512, 50000}) {
      auto problem = row_problem<float>(x, 123);
      problem.options.mode = mode;
      problem.options.vocab_tile = tile;
      const auto result = problem.forward();
      const double ulp = 0x1.0p-20;  // of a log-sum between 8 and 16
      EXPECT_NEAR(result.logps[0], truth.logps[0], ulp);
      EXPECT_NEAR(result.entropy[0], truth.entropy[0], 2 * ulp);
      EXPECT_NEAR(result.exp_sum[0], truth.exp_sum[0], 1e-7 * truth.exp_sum[0]);
    }
  }
}

// Logits on a grid of 1/64, and 64 more: differences from the maximum are exact, so all that is formed
// of them keeps its bits. Only the reference form lets the offset touch the log-sum.
TEST_P(HeadTiers, CommonOffsetCostsNothingInTheShiftedForm) {
  Random random(31);
  std::vector<double> x;
  std::vector<double> moved;
  for (int k = 0; k < 300; ++k) {
    x.push_back(static_cast<double>(random.integer(-1023, 1023)) / 64);
    moved.push_back(x.back() + 64);
  }
  for (const Mode mode : modes) {
    auto near = row_problem<float>(x, 17);
    near.d_entropy = {0.25F};
    near.options.mode = mode;
    near.options.logp_form = LogpForm::shifted;
    near.options.vocab_tile = 32;
    auto far = near;
    far.weight = converted<float>(moved);
    const auto a = near.backward();
    const auto b = far.backward();
    EXPECT_EQ(b.max[0], a.max[0] + 64);
    EXPECT_TRUE(same_bits(a.exp_sum, b.exp_sum));
    EXPECT_TRUE(same_bits(a.mean, b.mean));
    EXPECT_TRUE(same_bits(a.entropy, b.entropy));
    EXPECT_TRUE(same_bits(a.logps, b.logps));
    EXPECT_TRUE(same_bits(a.d_weight, b.d_weight));
    far.options.logp_form = LogpForm::reference;
    const auto reference = far.forward();
    EXPECT_NEAR(reference.logps[0], a.logps[0], 0x1.0p-16) << "an ulp of the log-sum + 64";
  }
}

// exp(x - lse) would carry half an ulp of lse = 2^13 into every probability.
TEST_P(HeadTiers, LargeOffsetDoesNotReachEntropyOrCotangents) {
  Random random(32);
  std::vector<double> x;
  for (int k = 0; k < 48; ++k) {
    x.push_back(8192 + static_cast<double>(random.integer(-2048, 2048)) / 1024);
  }
  auto wide = row_problem<double>(x, 5);
  wide.d_entropy = {0.5};
  const auto truth = wide.backward();
  for (const Mode mode : modes) {
    auto problem = row_problem<float>(x, 5);
    problem.d_entropy = {0.5F};
    problem.options.mode = mode;
    problem.options.vocab_tile = 16;
    const auto result = problem.backward();
    EXPECT_TRUE(close(result.entropy, truth.entropy, 1e-6));
    EXPECT_TRUE(close(result.d_weight, truth.d_weight, 2e-6));
    const float coarse = result.logps[0] * 1024;
    EXPECT_EQ(coarse, std::round(coarse)) << "the reference form has the ulp of 8192";
    EXPECT_TRUE(close(result.logps, truth.logps, 1e-3 / 3));
    problem.options.logp_form = LogpForm::shifted;
    EXPECT_TRUE(close(problem.forward().logps, truth.logps, 1e-6));
  }
}

// What is not finite.

struct SpecialRow {
  std::string name;
  std::vector<double> x;
  std::int32_t id;
  double logp;
  double entropy;            ///< EntropyPolicy::xlogx
  double reference_entropy;  ///< EntropyPolicy::reference
  double max;
  double exp_sum;
  std::vector<double> d_logits;  ///< under d_logps = 1
};

std::vector<SpecialRow> special_rows() {
  const double ln2 = std::log(2.0);
  const std::vector<double> nans(4, nan_value);
  return {
      {"NaN", {1, nan_value, 3, 4}, 0, nan_value, nan_value, nan_value, 0, nan_value, nans},
      {"NaN and inf",
       {nan_value, inf, -inf, 0},
       3,
       nan_value,
       nan_value,
       nan_value,
       0,
       nan_value,
       nans},
      {"inf off target",
       {1, inf, 3, 4},
       0,
       -inf,
       nan_value,
       nan_value,
       0,
       inf,
       {1, nan_value, 0, 0}},
      {"inf on target",
       {1, inf, 3, 4},
       1,
       nan_value,
       nan_value,
       nan_value,
       0,
       inf,
       {0, nan_value, 0, 0}},
      // A maximum kept at inf would make exp(100 - inf) = 0 here; masked to 0 it overflows.
      {"inf and overflow",
       {1, inf, 100, 4},
       0,
       -inf,
       nan_value,
       nan_value,
       0,
       inf,
       {1, nan_value, nan_value, 0}},
      {"all -inf", {-inf, -inf, -inf, -inf}, 2, nan_value, nan_value, nan_value, 0, 0, nans},
      {"some -inf", {-inf, 5, 5, -inf}, 1, -ln2, ln2, nan_value, 5, 2, {0, 0.5, -0.5, 0}},
      {"-inf on target", {-inf, 5, 5, -inf}, 0, -inf, ln2, nan_value, 5, 2, {1, -0.5, -0.5, 0}},
      {"one finite", {-inf, -inf, -inf, 7}, 3, 0, 0, nan_value, 7, 1, {0, 0, 0, 0}},
  };
}

TEST_P(HeadTiers, RowsThatAreNotFiniteFollowTheTable) {
  for (const SpecialRow& row : special_rows()) {
    for (const Mode mode : modes) {
      for (const std::int64_t tile : {1, 2, 3, 4}) {
        for (const std::int64_t shards : {1, 2, 3, 4}) {
          SCOPED_TRACE(row.name + ", mode " + std::to_string(static_cast<int>(mode)) + ", tile " +
                       std::to_string(tile) + ", shards " + std::to_string(shards));
          auto problem = row_problem<float>(row.x, row.id);
          problem.options.mode = mode;
          problem.options.vocab_tile = tile;
          problem.options.vocab_shards = shards;
          const auto result = problem.backward();
          EXPECT_TRUE(equal(result.logps, {row.logp}));
          EXPECT_TRUE(equal(result.entropy, {row.entropy}));
          EXPECT_TRUE(equal(result.max, {row.max}));
          EXPECT_TRUE(equal(result.exp_sum, {row.exp_sum}));
          EXPECT_TRUE(equal(result.d_weight, row.d_logits));
          problem.options.entropy_policy = EntropyPolicy::reference;
          const auto reference = problem.backward();
          EXPECT_TRUE(equal(reference.logps, {row.logp}));
          EXPECT_TRUE(equal(reference.entropy, {row.reference_entropy}));
          EXPECT_TRUE(equal(reference.d_weight, row.d_logits)) << "d_entropy is absent";
        }
      }
    }
  }
}

TEST_P(HeadTiers, EntropyCotangentOfARowWithMinusInfFollowsThePolicy) {
  for (const Mode mode : modes) {
    auto problem = row_problem<float>({-inf, 0, std::log(3.0), -inf}, 2);
    problem.d_logps = {0};
    problem.d_entropy = {1};
    problem.options.mode = mode;
    problem.options.vocab_tile = 1;
    const double mean_log_p = 0.25 * std::log(0.25) + 0.75 * std::log(0.75);
    const double d_first = -0.25 * (std::log(0.25) - mean_log_p);
    EXPECT_TRUE(equal(problem.backward().d_weight, {0, d_first, -d_first, 0}));
    problem.options.entropy_policy = EntropyPolicy::reference;
    EXPECT_TRUE(equal(problem.backward().d_weight, std::vector<double>(4, nan_value)));
  }
}

TEST_P(HeadTiers, EntropyCotangentOfARowWithoutEntropyIsNaN) {
  for (const SpecialRow& row : special_rows()) {
    if (std::isnan(row.entropy)) {
      for (const Mode mode : modes) {
        auto problem = row_problem<float>(row.x, row.id);
        problem.d_logps = {0};
        problem.d_entropy = {1};
        problem.options.mode = mode;
        EXPECT_TRUE(equal(problem.backward().d_weight, std::vector<double>(4, nan_value)))
            << row.name << ", mode " << static_cast<int>(mode);
      }
    }
  }
}

// Rows of 1 to 40 logits with inf, -inf and NaN in them, in any tiles and shards, under ids from -2V to
// 2V, against one pass over the whole row in JAX's order.
TEST_P(HeadTiers, MixedSpecialsAgreeWithOnePassOverTheWholeRow) {
  Random random(33);
  for (int round = 0; round < 4000; ++round) {
    std::vector<double> x(static_cast<std::size_t>(random.integer(1, 40)));
    const double rate = random.chance(0.5) ? 0.05 : 0.6;
    for (double& value : x) {
      value = random.normal(3.0);
      if (random.chance(rate)) {
        const std::int64_t kind = random.integer(0, 9);
        value = kind == 0 ? nan_value : kind == 1 ? inf : -inf;
      }
    }
    const auto vocab = static_cast<std::int64_t>(x.size());
    auto problem = row_problem<double>(
        x, static_cast<std::int32_t>(random.integer(-2 * vocab, 2 * vocab - 1)));
    problem.options.id_policy = IdPolicy::wrap;
    problem.options.vocab_tile = random.integer(1, vocab);
    problem.options.vocab_shards = random.integer(1, 4);
    problem.options.mode = modes[random.integer(0, 2)];
    const bool xlogx = random.chance(0.5);
    problem.options.entropy_policy = xlogx ? EntropyPolicy::xlogx : EntropyPolicy::reference;
    problem.d_logps = {0.7};

    double largest = -inf;
    for (const double value : x) {
      largest = std::isnan(value) || value > largest ? value : largest;
    }
    const double m = std::isfinite(largest) ? largest : 0;
    double s = 0;
    for (const double value : x) {
      s += std::exp(value - m);
    }
    const std::int64_t column = problem.ids[0] < 0 ? problem.ids[0] + vocab : problem.ids[0];
    const bool in_range = column >= 0 && column < vocab;
    const double target = in_range ? x[static_cast<std::size_t>(column)] : nan_value;
    double entropy = std::isfinite(largest) ? 0 : nan_value;
    std::vector<double> d_logits;
    for (std::size_t k = 0; k < x.size(); ++k) {
      const double log_p = x[k] - m - std::log(s);
      if (log_p != -inf || !xlogx) {
        entropy -= std::exp(log_p) * log_p;
      }
      const bool hit = in_range && static_cast<std::int64_t>(k) == column;
      d_logits.push_back(std::exp(x[k] - m) * (-0.7 / s) + (hit ? 0.7 : 0.0));
    }
    const auto result = problem.backward();
    const auto agrees = [](double a, double b) {
      return (std::isnan(a) && std::isnan(b)) || a == b || std::abs(a - b) < 1e-11;
    };
    ASSERT_TRUE(agrees(result.logps[0], target - (std::log(s) + m))) << "seed 33, round " << round;
    ASSERT_TRUE(agrees(result.entropy[0], entropy))
        << "seed 33, round " << round << ": " << result.entropy[0] << " against " << entropy;
    for (std::size_t k = 0; k < x.size(); ++k) {
      ASSERT_TRUE(agrees(result.d_weight[k], d_logits[k]))
          << "seed 33, round " << round << ", column " << k << ": " << result.d_weight[k]
          << " against " << d_logits[k];
    }
  }
}

TEST_P(HeadTiers, FiniteWeightsWhoseLogitsOverflowGiveNoNaN) {
  Problem<float> problem;
  problem.dims = {.tokens = 1, .hidden = 1, .vocab = 3};
  problem.hidden = {-1e30F};
  problem.weight = {1e20F, 0.0F, 0.0F};  // logits -inf, 0, 0
  problem.ids = {1};
  problem.d_logps = {1};
  problem.d_entropy = {1};
  for (const Mode mode : modes) {
    problem.options.mode = mode;
    const auto result = problem.backward();
    EXPECT_TRUE(equal(result.logps, {-std::log(2.0)}));
    EXPECT_TRUE(close(result.d_weight, std::vector<float>{0.0F, -0.5e30F, 0.5e30F}, 1e-6));
    EXPECT_TRUE(equal(result.d_hidden, {0.0}));
  }
}

// Target ids.

TEST_P(HeadTiers, WrappedIdsFollowTheGatherOfJax) {
  const std::vector<double> x = {0.0, 1.0, 2.0, 0.5, -1.0};
  double partition = 0;
  for (const double value : x) {
    partition += std::exp(value);
  }
  struct Case {
    std::int32_t id;
    int column;  // -1: none
  };
  for (const Case& c :
       {Case{0, 0}, Case{4, 4}, Case{-1, 4}, Case{-5, 0}, Case{-6, -1}, Case{5, -1}, Case{1000, -1},
        Case{-100, -1}, Case{std::numeric_limits<std::int32_t>::min(), -1}}) {
    for (const Mode mode : modes) {
      auto problem = row_problem<float>(x, c.id);
      problem.options.id_policy = IdPolicy::wrap;
      problem.options.mode = mode;
      problem.options.vocab_tile = 2;
      problem.options.vocab_shards = 2;
      problem.d_logps = {2};
      const auto result = problem.backward();
      std::vector<double> expected;
      for (int k = 0; k < 5; ++k) {
        expected.push_back(-2 * std::exp(x[static_cast<std::size_t>(k)]) / partition +
                           (k == c.column ? 2 : 0));
      }
      EXPECT_TRUE(equal(result.d_weight, expected)) << c.id;
      EXPECT_TRUE(equal(
          result.logps,
          {c.column < 0 ? nan_value : x[static_cast<std::size_t>(c.column)] - std::log(partition)}))
          << c.id;
      EXPECT_TRUE(std::isfinite(result.entropy[0]));
      problem.d_logps = {0};
      EXPECT_TRUE(equal(problem.backward().d_weight, std::vector<double>(5, 0.0), 0.0)) << c.id;
    }
  }
}

// -100 ignores nothing here: it names a column of a large vocabulary.
TEST_P(HeadTiers, AnIgnoreIndexIsAColumnUnderWrap) {
  std::vector<double> x(128, 0.0);
  x[28] = 3.0;
  auto problem = row_problem<double>(x, -100);
  problem.options.id_policy = IdPolicy::wrap;
  EXPECT_NEAR(problem.forward().logps[0], 3 - std::log(127 + std::exp(3.0)), 1e-12);
}

// Logits in bf16.

TEST_P(HeadTiers, Bf16LogitsAreRoundedOnceBeforeTheTemperature) {
  // 1 + 2^-8 lies between bf16's 1 and 1 + 2^-7: the tie goes to even, 1. 3.4e38 overflows bf16.
  auto problem = row_problem<float>({1.00390625, 1.0, 0.0}, 0);
  problem.options.logits_dtype = LogitsDtype::bf16;
  problem.options.temperature = 0.7;
  const double partition = 2 * std::exp(1 / 0.7) + 1;
  const auto result = problem.forward();
  EXPECT_TRUE(equal(result.max, {1 / 0.7}));
  EXPECT_TRUE(equal(result.logps, {1 / 0.7 - std::log(partition)}));
  auto overflow = row_problem<float>({3.4e38, 1.0}, 1);
  EXPECT_TRUE(equal(overflow.forward().max, {3.4e38}, 1e32));
  overflow.options.logits_dtype = LogitsDtype::bf16;
  EXPECT_TRUE(equal(overflow.forward().exp_sum, {inf}));
  EXPECT_TRUE(equal(overflow.forward().logps, {-inf}));
}

// p(target) = 0.998: its bf16 is 1 or 0.996, so 1 - p survives only where one-hot and softmax meet in
// f32, and 1 - 0.998 = 0.002 is then rounded by itself.
TEST_P(HeadTiers, Bf16CotangentIsRoundedAfterTheOneHot) {
  const double gap = std::log(0.998 / 0.002) * 0.7;  // the temperature takes the factor off again
  auto problem = row_problem<float>({gap, 0.0}, 0);
  problem.options.logits_dtype = LogitsDtype::bf16;
  problem.options.temperature = 0.7;
  for (const Mode mode : modes) {
    problem.options.mode = mode;
    const auto result = problem.backward();
    const double z = static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(gap))));
    const double p_other = 1 / (1 + std::exp(z / 0.7));
    const auto expected = bfloat16(static_cast<float>(p_other / 0.7));
    EXPECT_FLOAT_EQ(result.d_weight[0], static_cast<float>(expected));
    EXPECT_FLOAT_EQ(result.d_weight[1], -static_cast<float>(expected));
    EXPECT_GT(result.d_weight[0], 0);
  }
}

// Rows that are not read.

TEST_P(HeadTiers, InactiveRowsAreNeverRead) {
  for (const Mode mode : modes) {
    auto clean = random_problem<float>({.tokens = 41, .hidden = 5, .vocab = 30}, 41);
    clean.options.mode = mode;
    clean.active.assign(41, 1);
    for (const std::size_t t : {0U, 1U, 17U, 32U, 33U, 40U}) {
      clean.active[t] = 0;
      std::fill_n(clean.hidden.begin() + static_cast<std::ptrdiff_t>(5 * t), 5, 0.0F);
      clean.d_logps[t] = 0;
      clean.d_entropy[t] = 0;
      clean.ids[t] = 0;
    }
    auto wild = clean;
    for (const std::size_t t : {0U, 1U, 17U, 32U, 33U, 40U}) {
      const float special[] = {static_cast<float>(nan_value), static_cast<float>(inf), -5, 0,
                               1e38F};
      std::copy_n(special, 5, wild.hidden.begin() + static_cast<std::ptrdiff_t>(5 * t));
      wild.d_logps[t] = static_cast<float>(nan_value);
      wild.d_entropy[t] = static_cast<float>(inf);
      wild.ids[t] = -100;
    }
    const auto a = clean.backward();
    const auto b = wild.backward();
    EXPECT_TRUE(same_bits(a.logps, b.logps));
    EXPECT_TRUE(same_bits(a.entropy, b.entropy));
    EXPECT_TRUE(same_bits(a.d_hidden, b.d_hidden));
    EXPECT_TRUE(same_bits(a.d_weight, b.d_weight));
    for (const std::size_t t : {0U, 1U, 17U, 32U, 33U, 40U}) {
      for (const auto* output : {&b.logps, &b.entropy, &b.max, &b.exp_sum, &b.mean}) {
        EXPECT_EQ((*output)[t], 0.0F);
      }
      for (std::size_t d = 0; d < 5; ++d) {
        EXPECT_EQ(b.d_hidden[5 * t + d], 0.0F);
      }
    }
    // The rows that are active score as they would alone.
    auto alone = clean;
    alone.active.clear();
    const auto c = alone.forward();
    EXPECT_EQ(c.logps[2], b.logps[2]);
    EXPECT_NE(c.logps[0], 0.0F);
  }
}

TEST_P(HeadTiers, NothingActiveStillGivesZerosOfFullShape) {
  auto problem = random_problem<float>({.tokens = 3, .hidden = 2, .vocab = 4}, 42);
  problem.active.assign(3, 0);
  problem.hidden.assign(6, static_cast<float>(nan_value));
  const auto result = problem.backward();
  EXPECT_TRUE(equal(result.logps, std::vector<double>(3, 0.0), 0.0));
  EXPECT_TRUE(equal(result.d_hidden, std::vector<double>(6, 0.0), 0.0));
  EXPECT_TRUE(equal(result.d_weight, std::vector<double>(8, 0.0), 0.0));
}

// -0 / s * e of a row of NaN is NaN: such a row must not enter at all.
TEST_P(HeadTiers, ActiveRowWithoutCotangentIsSkippedOnTheWayBack) {
  auto problem = random_problem<float>({.tokens = 3, .hidden = 2, .vocab = 4}, 43);
  const auto with = problem.backward();
  problem.hidden[2] = static_cast<float>(nan_value);
  problem.d_logps[1] = 0;
  for (const bool entropy_given : {true, false}) {
    problem.d_entropy = entropy_given ? std::vector<float>{0, 0, 0} : std::vector<float>{};
    for (const Mode mode : modes) {
      problem.options.mode = mode;
      const auto result = problem.backward();
      EXPECT_TRUE(std::isnan(result.logps[1]));
      for (const float value : result.d_weight) {
        EXPECT_TRUE(std::isfinite(value));
      }
      EXPECT_EQ(result.d_hidden[2], 0.0F);
      EXPECT_EQ(result.d_hidden[3], 0.0F);
      EXPECT_NE(result.d_hidden[0], 0.0F);
    }
  }
}

// Backward: against central differences of the definition.

void expect_central_differences(Problem<double>& problem) {
  const auto result = problem.backward();
  const auto scalar = [&] { return weighed(problem); };
  EXPECT_TRUE(
      close(result.d_hidden, heddle::test::central_differences(problem.hidden, scalar), 1e-8));
  EXPECT_TRUE(
      close(result.d_weight, heddle::test::central_differences(problem.weight, scalar), 1e-8));
}

TEST_P(HeadTiers, CotangentsAreTheDerivativesOfTheDefinition) {
  std::uint64_t seed = 51;
  for (const Mode mode : modes) {
    for (const double temperature : {1.0, 0.7}) {
      // 36 tokens cross a block of rows, so that a cotangent of the wrong row shows.
      auto problem = random_problem<double>({.tokens = 36, .hidden = 2, .vocab = 9}, seed++);
      problem.options.mode = mode;
      problem.options.temperature = temperature;
      problem.options.vocab_shards = 2;
      problem.options.vocab_tile = 4;
      expect_central_differences(problem);
      const std::vector<double> d_entropy = problem.d_entropy;
      problem.d_entropy.clear();
      expect_central_differences(problem);
      problem.d_entropy = d_entropy;
      std::ranges::fill(problem.d_logps, 0.0);
      expect_central_differences(problem);
      problem = problem.transposed();
      expect_central_differences(problem);
    }
  }
}

TEST_P(HeadTiers, FloatCotangentsAreWithinTheBar) {
  const auto check = [](const auto& problem) {
    Problem<double> wide;
    wide.dims = problem.dims;
    wide.hidden = converted<double>(problem.hidden);
    wide.weight = converted<double>(problem.weight);
    wide.layout = problem.layout;
    wide.ids = problem.ids;
    wide.options = problem.options;
    wide.d_logps = converted<double>(problem.d_logps);
    wide.d_entropy = converted<double>(problem.d_entropy);
    const auto truth = wide.backward();
    auto narrow = problem;
    for (const Mode mode : modes) {
      narrow.options.mode = mode;
      const auto result = narrow.backward();
      EXPECT_TRUE(close(result.d_hidden, truth.d_hidden, 2e-6));
      EXPECT_TRUE(close(result.d_weight, truth.d_weight, 2e-6));
    }
  };
  auto problem = random_problem<float>({.tokens = 300, .hidden = 8, .vocab = 150}, 61);
  problem.options.temperature = 0.7;
  check(problem);
  check(random_problem<bfloat16, float>({.tokens = 40, .hidden = 8, .vocab = 70}, 62));
  check(random_problem<bfloat16>({.tokens = 40, .hidden = 8, .vocab = 70}, 63).transposed());
}

TEST_P(HeadTiers, CotangentOfLogitsSumsToNothing) {
  Random random(64);
  for (const Mode mode : modes) {
    std::vector<double> x;
    for (int k = 0; k < 500; ++k) {
      x.push_back(random.normal(4.0));
    }
    auto problem = row_problem<float>(x, 77);
    problem.options.mode = mode;
    problem.d_entropy = {0.5F};
    double sum = 0;
    for (const float d : problem.backward().d_weight) {
      sum += static_cast<double>(d);
    }
    EXPECT_LE(std::abs(sum), 0x1.0p-20);
  }
}

TEST_P(HeadTiers, AbsentAndZeroEntropyCotangentHaveTheSameBits) {
  for (const Mode mode : modes) {
    auto problem = random_problem<float>({.tokens = 6, .hidden = 3, .vocab = 20}, 65);
    problem.options.mode = mode;
    std::ranges::fill(problem.d_entropy, 0.0F);
    const auto zero = problem.backward();
    problem.d_entropy.clear();
    const auto absent = problem.backward();
    EXPECT_TRUE(same_bits(zero.d_hidden, absent.d_hidden));
    EXPECT_TRUE(same_bits(zero.d_weight, absent.d_weight));
  }
}

// Where it goes.

TEST_P(HeadTiers, EitherCotangentAloneHasTheBitsOfBoth) {
  const auto problem = random_problem<float>({.tokens = 34, .hidden = 3, .vocab = 70}, 71);
  const auto both = problem.backward();
  const head::Residuals<float> residuals{both.max, both.exp_sum, both.mean};
  const head::OutputCotangents<float> given{problem.d_logps, problem.d_entropy};
  std::vector<float> d_hidden(both.d_hidden.size(), -77.0F);
  run_backward(problem.dims, problem.inputs(), problem.options, residuals, given,
               head::Cotangents<float>{.d_hidden = {d_hidden.data(), 34, 3}});
  EXPECT_TRUE(same_bits(d_hidden, both.d_hidden));
  std::vector<float> d_weight(both.d_weight.size(), -77.0F);
  run_backward(
      problem.dims, problem.inputs(), problem.options, residuals, given,
      head::Cotangents<float>{.d_hidden = {}, .d_weight = {.values = {d_weight.data(), 3, 70}}});
  EXPECT_TRUE(same_bits(d_weight, both.d_weight));
}

TEST_P(HeadTiers, AccumulateAddsToWhatWasThere) {
  for (const bool transpose : {false, true}) {
    auto problem = random_problem<double>({.tokens = 4, .hidden = 3, .vocab = 10}, 72);
    problem = transpose ? problem.transposed() : problem;
    const auto overwritten = problem.backward();
    std::vector<double> d_weight(overwritten.d_weight.size(), 1.5);
    run_backward(
        problem.dims, problem.inputs(), problem.options,
        head::Residuals<double>{overwritten.max, overwritten.exp_sum, overwritten.mean},
        head::OutputCotangents<double>{problem.d_logps, problem.d_entropy},
        head::Cotangents<double>{
            .d_hidden = {},
            .d_weight = {.values = {d_weight.data(), problem.weight_rows(), problem.weight_cols()},
                         .write = heddle::Write::accumulate}});
    for (std::size_t i = 0; i < d_weight.size(); ++i) {
      EXPECT_NEAR(d_weight[i], 1.5 + overwritten.d_weight[i], 1e-14);
    }
  }
}

TEST_P(HeadTiers, OutputsThatAreNotWantedChangeNothing) {
  const auto problem = random_problem<float>({.tokens = 4, .hidden = 3, .vocab = 10}, 73);
  const auto all = problem.forward();
  std::vector<float> logps(4, -77.0F);
  run_forward(problem.dims, problem.inputs(), problem.options,
              head::Outputs<float>{.logps = logps});
  EXPECT_TRUE(same_bits(logps, all.logps));
}

TEST_P(HeadTiers, StridesBeyondTheWidthAreGapsThatNobodyTouches) {
  for (const bool transpose : {false, true}) {
    auto problem = random_problem<float>({.tokens = 35, .hidden = 3, .vocab = 70}, 74);
    problem = transpose ? problem.transposed() : problem;
    const auto dense = problem.backward();
    Padded hidden(problem.hidden, 35, 3);
    Padded weight(problem.weight, problem.weight_rows(), problem.weight_cols());
    Padded d_hidden(std::vector<float>(problem.hidden.size(), -77.0F), 35, 3);
    Padded d_weight(std::vector<float>(problem.weight.size(), -77.0F), problem.weight_rows(),
                    problem.weight_cols());
    head::Inputs<float> inputs = problem.inputs();
    inputs.hidden = hidden.view();
    inputs.weight = weight.view();
    auto result = dense;
    run_forward(problem.dims, inputs, problem.options,
                head::Outputs<float>{.logps = result.logps, .entropy = result.entropy});
    run_backward(problem.dims, inputs, problem.options,
                 head::Residuals<float>{dense.max, dense.exp_sum, dense.mean},
                 head::OutputCotangents<float>{problem.d_logps, problem.d_entropy},
                 head::Cotangents<float>{.d_hidden = d_hidden.view(),
                                         .d_weight = {.values = d_weight.view()}});
    EXPECT_TRUE(same_bits(result.logps, dense.logps));
    EXPECT_TRUE(same_bits(result.entropy, dense.entropy));
    EXPECT_TRUE(same_bits(d_hidden.dense(), dense.d_hidden));
    EXPECT_TRUE(same_bits(d_weight.dense(), dense.d_weight));
    EXPECT_EQ(d_hidden.nans_in_gaps(), 35 * 3 + 1);
    EXPECT_EQ(d_weight.nans_in_gaps(), problem.weight_rows() * 3 + 1);
  }
}

TEST_P(HeadTiers, EntropyIsBetweenNothingAndTheLogOfTheVocabulary) {
  auto problem = random_problem<float>({.tokens = 64, .hidden = 3, .vocab = 50}, 76, 6.0);
  std::fill_n(problem.hidden.begin(), 3, 0.0F);
  const auto result = problem.forward();
  EXPECT_NEAR(result.entropy[0], std::log(50.0), 1e-6) << "a uniform row";
  for (const float entropy : result.entropy) {
    EXPECT_GE(entropy, 0.0F);
    EXPECT_LE(entropy, static_cast<float>(std::log(50.0)) + 1e-6F);
  }
}

}  // namespace

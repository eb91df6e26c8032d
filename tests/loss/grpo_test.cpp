// Mutants, each of which must fail a test here: the sign of the policy term; max taken for min; the two
// clip bounds swapped; a clipped token's gradient kept, or an unclipped one's dropped; a tie counted as
// clipped; the log-ratio not cut at +-20, or cut without dropping the gradient; dual clip applied to a
// positive advantage; the importance weight left out of value or gradient, or applied to the KL term;
// beta dropped; a KL gradient with the other sign; kl_clip on the value alone; a denominator of one row
// instead of the step; c_s and n swapped; norm ignored; a masked entry read; 0 / 0 when all is masked;
// the segment's mean over all its tokens instead of the mask's; standard deviation over n.
#include "heddle/loss/grpo.hpp"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"
#include "support/thrown_text.hpp"

namespace {

namespace loss = heddle::loss;
using heddle::test::close;
using heddle::test::Random;
using heddle::test::thrown_text;
using loss::Aggregation;
using loss::GrpoOptions;
using loss::KlForm;
using loss::RatioLevel;
using Ids = std::vector<std::int32_t>;
using Mask = std::vector<std::uint8_t>;
using Values = std::vector<double>;

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr Aggregation aggregations[] = {
    Aggregation::token_mean, Aggregation::sequence_mean_token_mean,
    Aggregation::sequence_mean_token_scale, Aggregation::seq_mean_token_sum,
    Aggregation::sequence_mean_token_sum_norm};
constexpr KlForm kl_forms[] = {KlForm::none, KlForm::kl, KlForm::mse_kl, KlForm::low_var_kl};

template <class A>
struct Row {
  std::vector<A> logps, old_logps, ref_logps, advantages, importance_weights;
  Mask mask;
  Ids segment_ids;
};

template <class A>
struct Outcome {
  loss::GrpoLoss loss;
  std::vector<A> d_logps;
};

template <class A>
Outcome<A> evaluate(const GrpoOptions& options, const Row<A>& row, const loss::MaskCounts& step) {
  Values weights(row.mask.size(), nan_value);
  loss::token_weights(options, step, row.mask, row.segment_ids, weights);
  Outcome<A> outcome;
  outcome.d_logps.assign(row.logps.size(), static_cast<A>(nan_value));
  outcome.loss = loss::grpo<A>(options,
                               {.logps = row.logps,
                                .old_logps = row.old_logps,
                                .ref_logps = row.ref_logps,
                                .advantages = row.advantages,
                                .importance_weights = row.importance_weights,
                                .mask = row.mask,
                                .segment_ids = row.segment_ids,
                                .weights = weights},
                               outcome.d_logps);
  return outcome;
}

template <class A>
Outcome<A> evaluate(const GrpoOptions& options, const Row<A>& row) {
  return evaluate(options, row, loss::count_mask(row.mask, row.segment_ids));
}

/// A row of one token with ratio r under advantage A, in a segment of its own: loss and gradient are
/// those of the token.
Outcome<double> one_token(const GrpoOptions& options, double log_ratio, double advantage) {
  return evaluate<double>(options, {.logps = {-1 + log_ratio},
                                    .old_logps = {-1},
                                    .ref_logps = {},
                                    .advantages = {advantage},
                                    .importance_weights = {},
                                    .mask = {1},
                                    .segment_ids = {1}});
}

Outcome<double> one_token_kl(const GrpoOptions& options, double difference) {
  return evaluate<double>(options, {.logps = {-2},
                                    .old_logps = {-2},
                                    .ref_logps = {-2 - difference},
                                    .advantages = {0},
                                    .importance_weights = {},
                                    .mask = {1},
                                    .segment_ids = {1}});
}

/// Three segments, the second masked out whole, padding before, between and after; ratios on both sides
/// of the clips but not at them.
Row<double> random_row(std::uint64_t seed) {
  Random random(seed);
  Row<double> row;
  row.segment_ids = {0, 0, 1, 1, 1, 1, 1, 0, 2, 2, 2, 3, 3, 3, 3, 3, 3, 0, 0};
  row.mask = {0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0};
  for (std::size_t t = 0; t < row.mask.size(); ++t) {
    row.logps.push_back(random.uniform(-3, -0.1));
    row.old_logps.push_back(row.logps.back() + random.normal(0.4));
    row.ref_logps.push_back(row.logps.back() + random.normal(0.5));
    row.advantages.push_back(random.normal());
    row.importance_weights.push_back(random.uniform(0.2, 2));
  }
  return row;
}

// Weights.

TEST(LossGrpo, WeightsOfEveryAggregationByHand) {
  const Ids segments = {1, 1, 1, 2, 2, 0, 4, 4};
  const Mask mask = {0, 1, 1, 0, 0, 0, 7, 0};
  const loss::MaskCounts counts = loss::count_mask(mask, segments);
  EXPECT_EQ(counts, (loss::MaskCounts{.tokens = 3, .segments = 2}));
  const auto weights = [&](Aggregation aggregation, std::optional<double> norm = {}) {
    Values out(8, nan_value);
    loss::token_weights({.aggregation = aggregation, .norm = norm}, counts, mask, segments, out);
    return out;
  };
  const double third = 1.0 / 3;
  EXPECT_EQ(weights(Aggregation::token_mean), (Values{0, third, third, 0, 0, 0, third, 0}));
  EXPECT_EQ(weights(Aggregation::sequence_mean_token_mean),
            (Values{0, 0.25, 0.25, 0, 0, 0, 0.5, 0}));
  EXPECT_EQ(weights(Aggregation::sequence_mean_token_scale, 8.0),
            (Values{0, 0.0625, 0.0625, 0, 0, 0, 0.0625, 0}));
  EXPECT_EQ(weights(Aggregation::seq_mean_token_sum), (Values{0, 0.5, 0.5, 0, 0, 0, 0.5, 0}));
  EXPECT_EQ(weights(Aggregation::sequence_mean_token_sum_norm),
            (Values{0, 0.5, 0.5, 0, 0, 0, 0.5, 0}));
  EXPECT_EQ(weights(Aggregation::sequence_mean_token_sum_norm, 16.0),
            (Values{0, 0.0625, 0.0625, 0, 0, 0, 0.0625, 0}));
}

TEST(LossGrpo, SegmentIdsNeedNotAscendOrTouch) {
  const loss::MaskCounts counts = loss::count_mask(Mask{1, 1, 1, 1}, Ids{7, 3, 7, 0x7FFFFFFF});
  EXPECT_EQ(counts, (loss::MaskCounts{.tokens = 4, .segments = 3}));
}

// Rows of a step under its one denominator: their losses and gradients are those of one long row.
TEST(LossGrpo, RowsOfAStepAddUpToOneLongRow) {
  const Row<double> first = random_row(3);
  const Row<double> second = random_row(4);
  Row<double> joined = first;
  const auto append = [](auto& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(joined.logps, second.logps);
  append(joined.old_logps, second.old_logps);
  append(joined.ref_logps, second.ref_logps);
  append(joined.advantages, second.advantages);
  append(joined.importance_weights, second.importance_weights);
  append(joined.mask, second.mask);
  for (const std::int32_t id : second.segment_ids) {
    joined.segment_ids.push_back(id == 0 ? 0 : id + 10);
  }
  const loss::MaskCounts step = loss::count_mask(first.mask, first.segment_ids) +
                                loss::count_mask(second.mask, second.segment_ids);
  EXPECT_EQ(step, loss::count_mask(joined.mask, joined.segment_ids));
  for (const Aggregation aggregation : aggregations) {
    for (const RatioLevel ratio : {RatioLevel::token, RatioLevel::sequence}) {
      const GrpoOptions options{
          .ratio = ratio, .kl = KlForm::low_var_kl, .aggregation = aggregation, .norm = 5.0};
      const auto whole = evaluate(options, joined);
      const auto a = evaluate(options, first, step);
      const auto b = evaluate(options, second, step);
      EXPECT_NEAR((a.loss + b.loss).loss, whole.loss.loss, 1e-15);
      EXPECT_NEAR((a.loss + b.loss).policy, whole.loss.policy, 1e-15);
      EXPECT_NEAR((a.loss + b.loss).kl, whole.loss.kl, 1e-15);
      Values parts = a.d_logps;
      append(parts, b.d_logps);
      EXPECT_EQ(parts, whole.d_logps);
    }
  }
}

TEST(LossGrpo, EverythingMaskedOutIsZeroAndNeverNaN) {
  Row<double> row = random_row(5);
  row.mask.assign(row.mask.size(), 0);
  for (auto* values :
       {&row.logps, &row.old_logps, &row.ref_logps, &row.advantages, &row.importance_weights}) {
    values->assign(row.mask.size(), nan_value);
  }
  for (const Aggregation aggregation : aggregations) {
    for (const RatioLevel ratio : {RatioLevel::token, RatioLevel::sequence}) {
      const auto outcome = evaluate(
          {.ratio = ratio, .kl = KlForm::kl, .aggregation = aggregation, .norm = 5.0}, row);
      EXPECT_EQ(outcome.loss.loss, 0);
      EXPECT_EQ(outcome.d_logps, Values(row.mask.size(), 0.0));
    }
  }
}

TEST(LossGrpo, EmptyRowIsLegal) {
  const auto outcome = evaluate<double>({.kl = KlForm::kl}, Row<double>{});
  EXPECT_EQ(outcome.loss.loss, 0);
}

TEST(LossGrpo, MaskedEntriesAreNeverRead) {
  const Row<double> clean = random_row(6);
  Row<double> wild = clean;
  for (std::size_t t = 0; t < clean.mask.size(); ++t) {
    if (clean.mask[t] == 0) {
      wild.logps[t] = nan_value;
      wild.old_logps[t] = -std::numeric_limits<double>::infinity();
      wild.ref_logps[t] = nan_value;
      wild.advantages[t] = std::numeric_limits<double>::infinity();
      wild.importance_weights[t] = nan_value;
    }
  }
  for (const RatioLevel ratio : {RatioLevel::token, RatioLevel::sequence}) {
    const GrpoOptions options{.ratio = ratio, .kl = KlForm::mse_kl};
    const auto a = evaluate(options, clean);
    const auto b = evaluate(options, wild);
    EXPECT_EQ(a.loss.loss, b.loss.loss);
    EXPECT_EQ(a.d_logps, b.d_logps);
    for (std::size_t t = 0; t < clean.mask.size(); ++t) {
      EXPECT_TRUE(clean.mask[t] != 0 || b.d_logps[t] == 0) << t;
    }
  }
}

// The policy term of one token.

TEST(LossGrpo, ClippedObjectiveByHand) {
  const GrpoOptions options{.clip_low = 0.2, .clip_high = 0.5};
  struct Case {
    double ratio, advantage, loss, d_logp;
  };
  for (const Case& c : {Case{1.25, 2, -2.5, -2.5},  // inside
                        Case{2.0, 2, -3.0, 0},      // A > 0, above: clipped to 1.5
                        Case{0.5, 2, -1.0, -1.0},   // A > 0, below: the worse side counts
                        Case{0.5, -2, 1.6, 0},      // A < 0, below: clipped to 0.8
                        Case{2.0, -2, 4.0, 4.0},    // A < 0, above
                        Case{0.9, -2, 1.8, 1.8},    // inside
                        Case{2.0, 0, 0, 0}}) {
    const auto outcome = one_token(options, std::log(c.ratio), c.advantage);
    EXPECT_NEAR(outcome.loss.loss, c.loss, 1e-12) << c.ratio << " " << c.advantage;
    EXPECT_NEAR(outcome.d_logps[0], c.d_logp, 1e-12) << c.ratio << " " << c.advantage;
  }
}

// Ratio 1 with both clips at 0 lies on both bounds, exactly.
TEST(LossGrpo, TieAtAClipBoundIsActive) {
  const GrpoOptions options{.clip_low = 0, .clip_high = 0};
  for (const double advantage : {2.0, -2.0}) {
    const auto outcome = one_token(options, 0, advantage);
    EXPECT_EQ(outcome.loss.loss, -advantage);
    EXPECT_EQ(outcome.d_logps[0], -advantage);
  }
}

TEST(LossGrpo, TieAtTheDualClipIsActive) {
  const double two = std::exp(std::log(2.0));
  const GrpoOptions options{.dual_clip = two};
  EXPECT_EQ(one_token(options, std::log(2.0), -3).d_logps[0], 3 * two);
}

TEST(LossGrpo, DualClipBoundsNegativeAdvantagesOnly) {
  const GrpoOptions options{.dual_clip = 3.0};
  const auto bounded = one_token(options, std::log(5.0), -2);
  EXPECT_NEAR(bounded.loss.loss, 6, 1e-12);
  EXPECT_EQ(bounded.d_logps[0], 0);
  const auto below = one_token(options, std::log(2.5), -2);
  EXPECT_NEAR(below.loss.loss, 5, 1e-12);
  EXPECT_NEAR(below.d_logps[0], 5, 1e-12);
  const auto positive = one_token({.clip_high = 9, .dual_clip = 3.0}, std::log(5.0), 2);
  EXPECT_NEAR(positive.loss.loss, -10, 1e-12);
  EXPECT_NEAR(positive.d_logps[0], -10, 1e-12);
  EXPECT_NEAR(one_token({.clip_high = 9, .dual_clip = 3.0}, std::log(2.0), 2).loss.loss, -4, 1e-12);
  EXPECT_NEAR(one_token({}, std::log(5.0), -2).loss.loss, 10, 1e-12) << "off by default";
}

TEST(LossGrpo, LogRatioIsCutAtTwentyWithItsGradient) {
  const double e20 = std::exp(20.0);
  const auto above = one_token({}, 21, -1);
  EXPECT_DOUBLE_EQ(above.loss.loss, e20);
  EXPECT_EQ(above.d_logps[0], 0);
  const auto at = one_token({}, 20, -1);
  EXPECT_DOUBLE_EQ(at.loss.loss, e20);
  EXPECT_DOUBLE_EQ(at.d_logps[0], e20) << "a tie is active";
  const auto below = one_token({}, -21, 1);
  EXPECT_DOUBLE_EQ(below.loss.loss, -std::exp(-20.0));
  EXPECT_EQ(below.d_logps[0], 0);
  const auto just_inside = one_token({}, -19.5, 1);
  EXPECT_DOUBLE_EQ(just_inside.d_logps[0], -std::exp(-19.5));
}

TEST(LossGrpo, WithoutOldLogProbsTheRatioIsOne) {
  Row<double> row = random_row(8);
  row.old_logps.clear();
  row.importance_weights.clear();
  for (const RatioLevel ratio : {RatioLevel::token, RatioLevel::sequence}) {
    const auto outcome = evaluate({.ratio = ratio, .aggregation = Aggregation::token_mean}, row);
    double expected = 0;
    for (std::size_t t = 0; t < row.mask.size(); ++t) {
      const double share = row.mask[t] != 0 ? -row.advantages[t] / 7 : 0;
      EXPECT_NEAR(outcome.d_logps[t], share, 1e-15);
      expected += share;
    }
    EXPECT_NEAR(outcome.loss.loss, expected, 1e-14);
  }
}

TEST(LossGrpo, ImportanceWeightsScaleThePolicyTermAlone) {
  Row<double> row = random_row(9);
  const GrpoOptions options{.kl = KlForm::mse_kl, .beta = 0.3};
  const auto weighted = evaluate(options, row);
  std::vector<double> importance = row.importance_weights;
  row.importance_weights.clear();
  const auto plain = evaluate(options, row);
  EXPECT_DOUBLE_EQ(weighted.loss.kl, plain.loss.kl);
  EXPECT_NE(weighted.loss.policy, plain.loss.policy);
  const auto policy_only = evaluate({.kl = KlForm::none}, row);
  for (std::size_t t = 0; t < importance.size(); ++t) {
    EXPECT_NEAR(weighted.d_logps[t] - plain.d_logps[t],
                (importance[t] - 1) * policy_only.d_logps[t], 1e-14);
  }
}

// The KL term of one token.

TEST(LossGrpo, KlFormsByHand) {
  struct Case {
    KlForm form;
    double difference, value, d_logp;
  };
  for (const Case& c : {Case{KlForm::kl, 0.5, 0.5, 1}, Case{KlForm::kl, -0.5, -0.5, 1},
                        Case{KlForm::mse_kl, -3, 4.5, -3}, Case{KlForm::low_var_kl, 0, 0, 0},
                        Case{KlForm::low_var_kl, std::log(2.0), 0.5 + std::log(2.0) - 1, 0.5},
                        Case{KlForm::low_var_kl, -std::log(2.0), 2 - std::log(2.0) - 1, -1},
                        Case{KlForm::none, 0.5, 0, 0}}) {
    const auto outcome = one_token_kl({.kl = c.form, .beta = 0.25}, c.difference);
    EXPECT_NEAR(outcome.loss.kl, c.value, 1e-15);
    EXPECT_NEAR(outcome.loss.loss, 0.25 * c.value, 1e-15);
    EXPECT_NEAR(outcome.d_logps[0], 0.25 * c.d_logp, 1e-15);
  }
  // e^q - q - 1 at q = 1e-9 is q^2 / 2: nothing of it is left where 1 is subtracted from e^q.
  EXPECT_NEAR(one_token_kl({.kl = KlForm::low_var_kl, .beta = 1}, -1e-6).loss.kl, 5e-13, 1e-18);
}

TEST(LossGrpo, KlClipBoundsValueAndGradientTogether) {
  const auto clipped = [](KlForm form, double difference) {
    return one_token_kl({.kl = form, .beta = 1, .kl_clip = 2.0}, difference);
  };
  EXPECT_EQ(clipped(KlForm::kl, 2.5).loss.kl, 2);
  EXPECT_EQ(clipped(KlForm::kl, 2.5).d_logps[0], 0);
  EXPECT_EQ(clipped(KlForm::kl, -2.5).loss.kl, -2);
  EXPECT_EQ(clipped(KlForm::kl, -2.5).d_logps[0], 0);
  EXPECT_EQ(clipped(KlForm::kl, 2).d_logps[0], 1) << "a tie is active";
  EXPECT_EQ(clipped(KlForm::mse_kl, -3).loss.kl, 2);
  EXPECT_EQ(clipped(KlForm::mse_kl, -3).d_logps[0], 0);
  EXPECT_EQ(clipped(KlForm::low_var_kl, -100).loss.kl, 2);
  EXPECT_EQ(clipped(KlForm::low_var_kl, -1000).d_logps[0], 0) << "beyond the overflow of exp";
}

// The gradient against central differences of the loss.

TEST(LossGrpo, GradientIsTheDerivativeOfTheLoss) {
  std::uint64_t seed = 20;
  for (const Aggregation aggregation : aggregations) {
    for (const KlForm kl : kl_forms) {
      Row<double> row = random_row(seed++);
      const GrpoOptions options{.clip_low = 0.15,
                                .clip_high = 0.28,
                                .dual_clip = 1.6,
                                .kl = kl,
                                .beta = 0.4,
                                .aggregation = aggregation,
                                .norm = aggregation == Aggregation::sequence_mean_token_scale
                                            ? std::optional<double>(6.0)
                                            : std::nullopt};
      const auto outcome = evaluate(options, row);
      const auto expected = heddle::test::central_differences(
          row.logps, [&] { return evaluate(options, row).loss.loss; });
      EXPECT_TRUE(close(outcome.d_logps, expected, 1e-8)) << "seed " << seed - 1;
    }
  }
}

// The sequence ratio is one constant to a segment's tokens: its gradient is not a difference quotient of
// the loss, but -A r of the segment's own ratio, token by token.
TEST(LossGrpo, SequenceRatioByHand) {
  const double d = 0.1;
  Row<double> row{.logps = {-1, -1, -1, -1, -1},
                  .old_logps = {-1 - d, -1 + 3 * d, -1 - 5 * d, -1 - 2, -1 - 40},
                  .ref_logps = {},
                  .advantages = {1, -2, 99, 3, -1},
                  .importance_weights = {},
                  .mask = {1, 1, 0, 1, 1},
                  .segment_ids = {1, 1, 1, 2, 3}};
  const GrpoOptions options{.clip_low = 0.2,
                            .clip_high = 0.2,
                            .ratio = RatioLevel::sequence,
                            .aggregation = Aggregation::token_mean};
  const auto outcome = evaluate(options, row);
  const double ratio = std::exp((d - 3 * d) / 2);
  EXPECT_NEAR(outcome.d_logps[0], -1 * ratio / 4, 1e-15);
  EXPECT_NEAR(outcome.d_logps[1], 2 * ratio / 4, 1e-15);
  EXPECT_EQ(outcome.d_logps[2], 0);
  EXPECT_EQ(outcome.d_logps[3], 0) << "e^2 is beyond the clip";
  EXPECT_EQ(outcome.d_logps[4], 0) << "20 is beyond the limit of 10";
  EXPECT_NEAR(outcome.loss.loss, (-ratio + 2 * ratio - 3 * 1.2 + std::exp(10.0)) / 4, 1e-11);
}

TEST(LossGrpo, SequenceRatioTakesTheMeanOfLogRatiosCutAtTwenty) {
  const Row<double> row{.logps = {-1, -1},
                        .old_logps = {-41, 3},  // log-ratios 40, cut to 20, and -4
                        .ref_logps = {},
                        .advantages = {-1, -1},
                        .importance_weights = {},
                        .mask = {1, 1},
                        .segment_ids = {1, 1}};
  EXPECT_DOUBLE_EQ(evaluate({.ratio = RatioLevel::sequence}, row).loss.loss, std::exp(8.0));
}

TEST(LossGrpo, SequenceRatioIsNotCutDownwards) {
  Row<double> row{.logps = {-1},
                  .old_logps = {14},
                  .ref_logps = {},
                  .advantages = {1},
                  .importance_weights = {},
                  .mask = {1},
                  .segment_ids = {1}};
  EXPECT_DOUBLE_EQ(evaluate({.ratio = RatioLevel::sequence}, row).d_logps[0], -std::exp(-15.0));
}

TEST(LossGrpo, FloatIsTheDoubleAnswerRoundedOnce) {
  const Row<double> wide = random_row(40);
  const auto narrow = [](const Values& values) {
    return std::vector<float>(values.begin(), values.end());
  };
  Row<float> row{narrow(wide.logps),      narrow(wide.old_logps),          narrow(wide.ref_logps),
                 narrow(wide.advantages), narrow(wide.importance_weights), wide.mask,
                 wide.segment_ids};
  const auto back = [](const std::vector<float>& values) {
    return Values(values.begin(), values.end());
  };
  const Row<double> exact{back(row.logps),      back(row.old_logps),          back(row.ref_logps),
                          back(row.advantages), back(row.importance_weights), row.mask,
                          row.segment_ids};
  const GrpoOptions options{.kl = KlForm::low_var_kl};
  const auto a = evaluate(options, row);
  const auto b = evaluate(options, exact);
  EXPECT_EQ(a.loss.loss, b.loss.loss);
  EXPECT_EQ(a.d_logps, narrow(b.d_logps));
}

TEST(LossGrpo, ImportanceWeightsByHand) {
  const Values trainer = {-1, -1, -1, nan_value, -1};
  const Values sampler = {-1.5, -3, 60, -1, -0.5};
  Values out(5, nan_value);
  loss::importance_weights<double>(trainer, sampler, Mask{1, 1, 1, 0, 1}, out);
  EXPECT_DOUBLE_EQ(out[0], std::exp(0.5));
  EXPECT_EQ(out[1], 2) << "e^2 is truncated";
  EXPECT_DOUBLE_EQ(out[2], std::exp(-20.0));
  EXPECT_EQ(out[3], 0);
  EXPECT_DOUBLE_EQ(out[4], std::exp(-0.5));
}

// Advantages.

TEST(LossGrpo, AdvantagesByHand) {
  const Values rewards = {1, 10, 0, 5, 2};
  const std::vector<std::int64_t> groups = {7, 3, 7, -1, 7};
  const auto of = [&](loss::AdvantageForm form) {
    Values out(5, nan_value);
    loss::advantages_of<double>(form, rewards, groups, out);
    return out;
  };
  const double scale = 1 / (1 + 1e-6);  // deviations 0, -1, 1: variance 2 / 2
  const auto relative = of(loss::AdvantageForm::group_relative);
  EXPECT_TRUE(close(relative, Values{0, 0, -scale, 0, scale}, 1e-15));
  EXPECT_TRUE(close(of(loss::AdvantageForm::rloo), Values{0, 0, -1.5, 0, 1.5}, 1e-15));
  EXPECT_TRUE(close(of(loss::AdvantageForm::drgrpo), Values{0, 0, -1, 0, 1}, 1e-15));
}

TEST(LossGrpo, AdvantagesOfEqualRewardsAndOfLoneRolloutsAreZero) {
  for (const auto form : {loss::AdvantageForm::group_relative, loss::AdvantageForm::rloo,
                          loss::AdvantageForm::drgrpo}) {
    Values in_place = {3, 3, 3, 8};
    loss::advantages_of<double>(form, in_place, std::vector<std::int64_t>{0, 0, 0, 1}, in_place);
    EXPECT_EQ(in_place, (Values{0, 0, 0, 0}));
  }
}

// Refusals.

std::string options_refusal(const GrpoOptions& options) {
  return thrown_text<heddle::Error>([&] { options.validate("call"); });
}

TEST(LossGrpo, OptionsOutOfRangeAreRefused) {
  EXPECT_EQ(options_refusal({}), "nothing was thrown");
  EXPECT_EQ(options_refusal({.clip_low = -0.1}),
            "call: options.clip_low = -0.1: must be in [0, 1]");
  EXPECT_EQ(options_refusal({.clip_low = 1.5}), "call: options.clip_low = 1.5: must be in [0, 1]");
  EXPECT_EQ(options_refusal({.clip_high = -1}),
            "call: options.clip_high = -1: must be >= 0 and finite");
  EXPECT_EQ(options_refusal({.dual_clip = 1.0}),
            "call: options.dual_clip = 1: must be > 1 and finite");
  EXPECT_EQ(options_refusal({.ratio = static_cast<RatioLevel>(2)}),
            "call: options.ratio = 2: must be token or sequence");
  EXPECT_EQ(options_refusal({.kl = static_cast<KlForm>(9)}),
            "call: options.kl = 9: must be none, kl, mse_kl or low_var_kl");
  EXPECT_EQ(options_refusal({.beta = nan_value}),
            "call: options.beta = nan: must be >= 0 and finite");
  EXPECT_EQ(options_refusal({.kl_clip = 0.0}), "call: options.kl_clip = 0: must be > 0 and finite");
  EXPECT_EQ(options_refusal({.aggregation = static_cast<Aggregation>(5)}),
            "call: options.aggregation = 5: must be token_mean, sequence_mean_token_mean, "
            "sequence_mean_token_scale, seq_mean_token_sum or sequence_mean_token_sum_norm");
  EXPECT_EQ(options_refusal({.norm = -2.0}), "call: options.norm = -2: must be > 0 and finite");
  EXPECT_EQ(options_refusal({.aggregation = Aggregation::sequence_mean_token_scale}),
            "call: options.norm = null: required by sequence_mean_token_scale");
}

TEST(LossGrpo, WrongMasksAndCountsAreRefused) {
  EXPECT_EQ(thrown_text<heddle::Error>([] {
              (void)loss::count_mask(Mask{1, 1}, Ids{1});
            }),
            "loss::count_mask: segment_ids.size = 1: must equal mask.size (2)");
  EXPECT_EQ(thrown_text<heddle::Error>([] {
              (void)loss::count_mask(Mask{0, 1}, Ids{0, 0});
            }),
            "loss::count_mask: mask[1] = 1: must be 0 where segment_ids is 0 (padding)");
  EXPECT_EQ(thrown_text<heddle::Error>([] {
              (void)loss::count_mask(Mask{1, 0}, Ids{1, -1});
            }),
            "loss::count_mask: segment_ids[1] = -1: must be >= 0");
  Values weights(2, -77.0);
  Values short_weights(1, -77.0);
  const auto refusal = [&](const loss::MaskCounts& step, Values& out) {
    return thrown_text<heddle::Error>([&] {
      loss::token_weights({}, step, Mask{1, 1}, Ids{1, 2}, out);
    });
  };
  EXPECT_EQ(refusal({.tokens = 1, .segments = 2}, weights),
            "loss::token_weights: step.tokens = 1: must count at least this row's mask");
  EXPECT_EQ(refusal({.tokens = 2, .segments = 1}, weights),
            "loss::token_weights: step.segments = 1: must count at least this row's segments");
  EXPECT_EQ(refusal({.tokens = 2, .segments = 2}, short_weights),
            "loss::token_weights: weights.size = 1: must equal mask.size (2)");
  EXPECT_EQ(weights, (Values{-77, -77}));
}

TEST(LossGrpo, WrongRowsAreRefusedBeforeAnythingIsWritten) {
  const Values two = {-1, -1};
  const Values one = {-1};
  const Mask mask = {1, 1};
  const Ids segments = {1, 1};
  Values d_logps(2, -77.0);
  const auto refusal = [&](const std::function<void(loss::GrpoInputs<double>&)>& spoil,
                           const GrpoOptions& options = {}) {
    loss::GrpoInputs<double> inputs{.logps = two,
                                    .old_logps = two,
                                    .ref_logps = {},
                                    .advantages = two,
                                    .importance_weights = {},
                                    .mask = mask,
                                    .segment_ids = segments,
                                    .weights = two};
    spoil(inputs);
    const std::string text =
        thrown_text<heddle::Error>([&] { loss::grpo<double>(options, inputs, d_logps); });
    EXPECT_EQ(d_logps, (Values{-77, -77}));
    return text;
  };
  const std::string rule = ": must equal inputs.logps.size (2)";
  EXPECT_EQ(refusal([&](auto& in) { in.old_logps = one; }),
            "loss::grpo: inputs.old_logps.size = 1" + rule);
  EXPECT_EQ(refusal([&](auto& in) { in.ref_logps = one; }),
            "loss::grpo: inputs.ref_logps.size = 1" + rule);
  EXPECT_EQ(refusal([&](auto&) {}, {.kl = KlForm::kl}),
            "loss::grpo: inputs.ref_logps = null: required by options.kl");
  EXPECT_EQ(refusal([&](auto& in) { in.advantages = one; }),
            "loss::grpo: inputs.advantages.size = 1" + rule);
  EXPECT_EQ(refusal([&](auto& in) { in.importance_weights = one; }),
            "loss::grpo: inputs.importance_weights.size = 1" + rule);
  EXPECT_EQ(refusal([&](auto& in) { in.mask = in.mask.first(1); }),
            "loss::grpo: inputs.mask.size = 1" + rule);
  EXPECT_EQ(refusal([&](auto& in) { in.segment_ids = in.segment_ids.first(1); }),
            "loss::grpo: inputs.segment_ids.size = 1" + rule);
  EXPECT_EQ(refusal([&](auto& in) { in.weights = one; }),
            "loss::grpo: inputs.weights.size = 1" + rule);
  EXPECT_EQ(refusal([&](auto&) {}, {.beta = -1}),
            "loss::grpo: options.beta = -1: must be >= 0 and finite");
  Values short_gradient(1, -77.0);
  EXPECT_EQ(thrown_text<heddle::Error>([&] {
              loss::grpo<double>({},
                                 {.logps = two,
                                  .advantages = two,
                                  .mask = mask,
                                  .segment_ids = segments,
                                  .weights = two},
                                 short_gradient);
            }),
            "loss::grpo: d_logps.size = 1: must equal inputs.logps.size (2)");
}

TEST(LossGrpo, HelpersRefuseOtherLengths) {
  Values two = {1, 2};
  Values one = {1};
  EXPECT_EQ(thrown_text<heddle::Error>([&] {
              loss::importance_weights<double>(two, one, Mask{1, 1}, two);
            }),
            "loss::importance_weights: sampler_logps.size = 1: must equal trainer_logps.size (2)");
  EXPECT_EQ(
      thrown_text<heddle::Error>([&] { loss::importance_weights<double>(two, two, Mask{1}, two); }),
      "loss::importance_weights: mask.size = 1: must equal trainer_logps.size (2)");
  EXPECT_EQ(thrown_text<heddle::Error>([&] {
              loss::importance_weights<double>(two, two, Mask{1, 1}, one);
            }),
            "loss::importance_weights: out.size = 1: must equal trainer_logps.size (2)");
  using Groups = std::vector<std::int64_t>;
  EXPECT_EQ(
      thrown_text<heddle::Error>([&] {
        loss::advantages_of<double>(static_cast<loss::AdvantageForm>(3), two, Groups{0, 0}, two);
      }),
      "loss::advantages_of: form = 3: must be group_relative, rloo or drgrpo");
  EXPECT_EQ(thrown_text<heddle::Error>([&] {
              loss::advantages_of<double>(loss::AdvantageForm::rloo, two, Groups{0}, two);
            }),
            "loss::advantages_of: groups.size = 1: must equal rewards.size (2)");
  EXPECT_EQ(thrown_text<heddle::Error>([&] {
              loss::advantages_of<double>(loss::AdvantageForm::rloo, two, Groups{0, 0}, one);
            }),
            "loss::advantages_of: advantages.size = 1: must equal rewards.size (2)");
}

}  // namespace

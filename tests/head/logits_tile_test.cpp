// Mutants, each of which must fail a test here: the weighted sum rescaled after the exp-sum, or without
// delta * exp_sum; the guard of columns that are all -inf removed; a tail's fill counted; -inf times 0
// summed; a tie of two zeros that tells which came first; merge taking one side's target whatever it is;
// the one-hot before the softmax; the one-hot divided twice, or not; lambda read without a cotangent of
// the entropy; rounded logits not divided.
#include "heddle/head/logits_tile.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/isa.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace {

namespace head = heddle::head;
using head::EntropyPolicy;
using head::LogitsDtype;
using head::LogitsState;
using head::LogpForm;
using head::RowStats;
using heddle::bfloat16;
using heddle::test::close;
using heddle::test::Random;
using heddle::test::same_bits;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// A row in pieces of `piece` columns, added in order.
template <class A>
RowStats<A> stats_of(std::vector<A> row, std::int64_t piece, std::int64_t target = -1,
                     A divisor = 1, LogitsDtype dtype = LogitsDtype::accumulator) {
  RowStats<A> stats;
  const auto count = static_cast<std::int64_t>(row.size());
  for (std::int64_t first = 0; first < count; first += piece) {
    const auto n = static_cast<std::size_t>(std::min(piece, count - first));
    head::add_logits(std::span<A>(row).subspan(static_cast<std::size_t>(first), n), first, target,
                     divisor, dtype, EntropyPolicy::reference, stats);
  }
  return stats;
}

std::vector<float> random_row(std::uint64_t seed, std::int64_t count, double deviation = 2) {
  return Random(seed).normals<float>(count, deviation);
}

// Every length around the width of a vector, on every path, against double; the memory beyond the row
// holds what would spoil any sum.
TEST(LogitsTile, TailsCountNothingThatIsNotThere) {
  for (std::int64_t count = 1; count <= 70; ++count) {
    std::vector<float> padded(static_cast<std::size_t>(count) + 32, nan_value);
    const auto row = random_row(static_cast<std::uint64_t>(count), count);
    std::ranges::copy(row, padded.begin() + 1);
    double sum = 0;
    double weighted = 0;
    const float largest = *std::ranges::max_element(row);
    for (const float x : row) {
      const double u = static_cast<double>(x) - static_cast<double>(largest);
      sum += std::exp(u);
      weighted += std::exp(u) * u;
    }
    RowStats<float> first_stats;
    for (const heddle::Path path : heddle::available_paths()) {
      const heddle::ScopedPath forced(path);
      auto copy = padded;
      RowStats<float> stats;
      head::add_logits(std::span<float>(copy).subspan(1, row.size()), 0, std::int64_t{0}, 1.0F,
                       LogitsDtype::accumulator, EntropyPolicy::xlogx, stats);
      EXPECT_EQ(stats.max, largest);
      EXPECT_NEAR(stats.exp_sum, sum, 1e-6 * sum);
      EXPECT_NEAR(stats.weighted_sum, weighted, 1e-6 * (1 + std::abs(weighted)));
      EXPECT_EQ(stats.target, row[0]);
      if (path == heddle::available_paths().front()) {
        first_stats = stats;
      }
      EXPECT_EQ(stats.exp_sum, first_stats.exp_sum) << heddle::path_name(path) << " " << count;
      EXPECT_EQ(stats.weighted_sum, first_stats.weighted_sum);
      EXPECT_TRUE(std::isnan(copy[0]) && std::isnan(copy[row.size() + 1])) << "neighbours";
    }
  }
}

TEST(LogitsTile, PiecesMeetWhereverTheMaximumComes) {
  std::vector<double> rising;
  for (int k = 0; k < 50; ++k) {
    rising.push_back(0.3 * k);
  }
  const std::vector<double> falling(rising.rbegin(), rising.rend());
  for (const auto& row : {rising, falling}) {
    const auto whole = stats_of(row, 50);
    for (const std::int64_t piece : {1, 7, 16, 49}) {
      const auto cut = stats_of(row, piece);
      EXPECT_EQ(cut.max, whole.max);
      EXPECT_NEAR(cut.exp_sum, whole.exp_sum, 1e-14 * whole.exp_sum);
      EXPECT_NEAR(cut.weighted_sum, whole.weighted_sum, 1e-13 * std::abs(whole.weighted_sum));
    }
  }
}

TEST(LogitsTile, MergeIsAssociativeUpToRoundingAndHasAnIdentity) {
  const auto row = Random(3).normals<double>(90, 3.0);
  const std::span<const double> x(row);
  const auto part = [&](std::size_t first, std::size_t count, std::int64_t target) {
    return stats_of(std::vector<double>(x.begin() + static_cast<std::ptrdiff_t>(first),
                                        x.begin() + static_cast<std::ptrdiff_t>(first + count)),
                    8, target);
  };
  const auto a = part(0, 30, -1);
  const auto b = part(30, 13, 5);
  const auto c = part(43, 47, -1);
  const auto left = head::merge(head::merge(a, b), c);
  const auto right = head::merge(a, head::merge(b, c));
  const auto whole = stats_of(row, 90, 35);
  for (const auto& merged : {left, right}) {
    EXPECT_EQ(merged.max, whole.max);
    EXPECT_NEAR(merged.exp_sum, whole.exp_sum, 2e-15 * whole.exp_sum);
    EXPECT_NEAR(merged.weighted_sum, whole.weighted_sum, 1e-14 * std::abs(whole.weighted_sum));
    EXPECT_EQ(merged.target, row[35]);
  }
  const auto same = head::merge(head::merge(RowStats<double>{}, a), RowStats<double>{});
  EXPECT_EQ(same.exp_sum, a.exp_sum);
  EXPECT_EQ(same.weighted_sum, a.weighted_sum);
  EXPECT_EQ(same.max, a.max);
}

// A rank of nothing but -inf, one with a +inf, one with a NaN, at either side of a merge.
TEST(LogitsTile, MergeFollowsTheTableOfSpecials) {
  const std::vector<float> plain = {1.0F, 2.0F, 3.0F};
  const auto finished = [&](const std::vector<float>& a, const std::vector<float>& b) {
    return head::finish_row(head::merge(stats_of(a, 2), stats_of(b, 2)), LogpForm::reference,
                            EntropyPolicy::xlogx);
  };
  const auto expected =
      head::finish_row(stats_of(plain, 2), LogpForm::reference, EntropyPolicy::xlogx);
  const std::vector<float> lost(3, -inf);
  for (const auto& score : {finished(lost, plain), finished(plain, lost)}) {
    EXPECT_EQ(score.exp_sum, expected.exp_sum);
    EXPECT_EQ(score.entropy, expected.entropy);
  }
  EXPECT_EQ(finished(lost, lost).exp_sum, 0.0F);
  EXPECT_TRUE(std::isnan(finished(lost, lost).entropy));
  EXPECT_EQ(finished(plain, {inf, 0.0F}).exp_sum, inf);
  EXPECT_EQ(finished({inf, 0.0F}, plain).max, 0.0F);
  EXPECT_TRUE(std::isnan(finished({inf, nan_value}, plain).exp_sum));
  EXPECT_TRUE(std::isnan(finished(plain, {nan_value}).exp_sum));
  EXPECT_TRUE(std::isnan(finished(lost, {nan_value}).exp_sum));
  EXPECT_TRUE(std::isnan(finished({inf}, {nan_value, -inf}).exp_sum));
}

// -inf in the body of a row and in its tail: 0 log 0 is 0, whatever the vector's width.
TEST(LogitsTile, LostLogitsAddNothingWhereverTheyStand) {
  auto row = random_row(13, 75);
  std::vector<float> kept;
  for (std::size_t k = 0; k < row.size(); ++k) {
    if (k % 7 == 3 || k == 74) {
      row[k] = -inf;
    } else {
      kept.push_back(row[k]);
    }
  }
  for (const heddle::Path path : heddle::available_paths()) {
    const heddle::ScopedPath forced(path);
    const auto stats = stats_of(row, 75);
    const auto expected = stats_of(kept, 75);
    EXPECT_TRUE(stats.any_negative_inf);
    EXPECT_NEAR(stats.exp_sum, expected.exp_sum, 1e-6 * expected.exp_sum);
    EXPECT_NEAR(stats.weighted_sum, expected.weighted_sum, 1e-6 * std::abs(expected.weighted_sum));
  }
}

TEST(LogitsTile, ZerosOfEitherSignAreOneMaximum) {
  for (const std::vector<float>& row : {std::vector<float>{-0.0F, 0.0F}, {0.0F, -0.0F}, {-0.0F}}) {
    const auto score =
        head::finish_row(stats_of(row, 1), LogpForm::reference, EntropyPolicy::xlogx);
    EXPECT_FALSE(std::signbit(score.max));
  }
}

TEST(LogitsTile, LogitsBecomeWhatWasScored) {
  std::vector<float> row = {1.00390625F, -2.0F, 0.5F};
  RowStats<float> stats;
  head::add_logits(std::span<float>(row), 10, std::int64_t{12}, 0.5F, LogitsDtype::bf16,
                   EntropyPolicy::xlogx, stats);
  EXPECT_EQ(row, (std::vector<float>{2.0F, -4.0F, 1.0F})) << "rounded, then divided";
  EXPECT_EQ(stats.target, 1.0F);
  EXPECT_EQ(stats.max, 2.0F);
}

// Cotangents.

TEST(LogitsTile, CotangentIsTheFormulaElementByElement) {
  const auto row = random_row(11, 100);
  for (const bool entropy : {false, true}) {
    for (const float divisor : {1.0F, 0.7F}) {
      const auto given = head::row_cotangent(0.5F, entropy ? 0.25F : 0.0F, 3.0F, 20.0F,
                                             entropy ? -1.5F : nan_value, 42);
      std::vector<float> d(row.size(), nan_value);
      head::logits_cotangent<float>(row, 0, LogitsState::rounded, LogitsDtype::accumulator, divisor,
                                    given, d);
      std::vector<double> expected;
      for (std::size_t k = 0; k < row.size(); ++k) {
        const double u = static_cast<double>(row[k]) / static_cast<double>(divisor) - 3.0;
        const double slope = -0.5 / 20 - (entropy ? 0.25 / 20 * (u + 1.5) : 0.0);
        expected.push_back((std::exp(u) * slope + (k == 42 ? 0.5 : 0.0)) /
                           static_cast<double>(divisor));
      }
      EXPECT_TRUE(close(d, expected, 1e-6));
      // The same, cut anywhere, in place, and on every path.
      for (const std::size_t cut : {1U, 42U, 43U, 99U}) {
        auto parts = row;
        const std::span<float> whole(parts);
        head::logits_cotangent<float>(whole.first(cut), 0, LogitsState::rounded,
                                      LogitsDtype::accumulator, divisor, given, whole.first(cut));
        const std::span<float> rest = whole.subspan(cut);
        head::logits_cotangent<float>(rest, static_cast<std::int64_t>(cut), LogitsState::rounded,
                                      LogitsDtype::accumulator, divisor, given, rest);
        EXPECT_TRUE(same_bits(parts, d));
      }
      for (const heddle::Path path : heddle::available_paths()) {
        const heddle::ScopedPath forced(path);
        std::vector<float> other(row.size());
        head::logits_cotangent<float>(row, 0, LogitsState::rounded, LogitsDtype::accumulator,
                                      divisor, given, other);
        EXPECT_TRUE(same_bits(other, d)) << heddle::path_name(path);
      }
    }
  }
}

TEST(LogitsTile, TemperedLogitsAreNotDividedAgain) {
  const auto z = random_row(12, 40);
  auto x = z;
  for (float& value : x) {
    value = value / 0.7F;
  }
  const auto given = head::row_cotangent(1.0F, 0.0F, 2.0F, 9.0F, 0.0F, 3);
  std::vector<float> of_z(40);
  std::vector<float> of_x(40);
  head::logits_cotangent<float>(z, 0, LogitsState::rounded, LogitsDtype::accumulator, 0.7F, given,
                                of_z);
  head::logits_cotangent<float>(x, 0, LogitsState::tempered, LogitsDtype::accumulator, 0.7F, given,
                                of_x);
  EXPECT_TRUE(same_bits(of_z, of_x));
}

TEST(LogitsTile, Bf16CotangentsAreRoundedOnce) {
  const std::vector<float> x = {3.0F, 0.0F, -1.0F};
  std::vector<bfloat16> stored;
  for (const float value : x) {
    stored.push_back(bfloat16(value));
  }
  const auto given = head::row_cotangent(1.0F, 0.0F, 3.0F, 1.07F, 0.0F, 0);
  std::vector<bfloat16> d(3);
  head::logits_cotangent<bfloat16>(stored, 0, LogitsState::rounded, LogitsDtype::bf16, 1.0F, given,
                                   d);
  std::vector<float> wide(3);
  head::logits_cotangent<float>(x, 0, LogitsState::rounded, LogitsDtype::accumulator, 1.0F, given,
                                wide);
  for (std::size_t k = 0; k < 3; ++k) {
    EXPECT_EQ(static_cast<float>(d[k]), static_cast<float>(bfloat16(wide[k])));
  }
  EXPECT_GT(static_cast<float>(d[0]), 0.06F) << "1 - p of p = 0.93, not of its bf16";
}

}  // namespace

#include "heddle/numerics/difference.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: |c| - |b| for |c - b|; the norm of the wrong side below; 1 - cos by
// subtraction, which sees nothing below 1e-16; a NaN passed over, or one on both sides; rows of the first
// dimension; small rows passed over, or measured against themselves; squares that overflow or vanish; an
// entry beyond the first piece of a row lost.

namespace heddle::numerics {
namespace {

using Doubles = std::vector<double>;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

template <class T>
NamedTensor tensor(const std::vector<T>& values, std::vector<std::int64_t> shape) {
  return {.name = "x", .shape = std::move(shape), .elements = std::span<const T>(values)};
}

template <class B, class C>
Difference measured(const std::vector<B>& b, const std::vector<C>& c,
                    std::vector<std::int64_t> shape = {}) {
  if (shape.empty()) {
    shape = {static_cast<std::int64_t>(b.size())};
  }
  return measure(tensor(b, shape), tensor(c, shape));
}

TEST(Difference, FiguresByHand) {
  const Difference d = measured(Doubles{3, 4, 0}, Doubles{3, 0, 4});
  EXPECT_DOUBLE_EQ(d.relative_l2, std::sqrt(32.0) / 5);
  EXPECT_DOUBLE_EQ(d.one_minus_cosine, 1 - 9.0 / 25);
  EXPECT_EQ(d.norm_ratio, 0);
  EXPECT_FALSE(d.zero);
  EXPECT_FALSE(d.non_finite.has_value());
  const Difference other = measured(Doubles{3, 0, 4}, Doubles{0, 0, 12});
  EXPECT_DOUBLE_EQ(other.relative_l2, std::sqrt(73.0) / 5) << "against the baseline";
  EXPECT_DOUBLE_EQ(other.norm_ratio, 7.0 / 5);
  EXPECT_DOUBLE_EQ(other.one_minus_cosine, 1 - 0.8);
}

TEST(Difference, EqualTensorsAreNoDistanceApart) {
  test::Random random(1);
  const auto x = random.normals<float>(5000);
  const Difference d = measured(x, x, {50, 100});
  EXPECT_EQ(d.relative_l2, 0);
  EXPECT_EQ(d.one_minus_cosine, 0);
  EXPECT_EQ(d.norm_ratio, 0);
  EXPECT_EQ(d.worst_row, 0);
}

TEST(Difference, EachFigureSeesWhatAnotherDoesNot) {
  test::Random random(2);
  const auto b = random.normals<double>(4096);
  auto flipped = b;
  auto doubled = b;
  for (std::size_t i = 0; i < b.size(); ++i) {
    flipped[i] = -b[i];
    doubled[i] = 2 * b[i];
  }
  const Difference sign = measured(b, flipped);
  EXPECT_EQ(sign.norm_ratio, 0) << "a norm sees no direction";
  EXPECT_NEAR(sign.one_minus_cosine, 2, 1e-12);
  EXPECT_NEAR(sign.relative_l2, 2, 1e-12);
  const Difference twice = measured(b, doubled);
  EXPECT_EQ(twice.one_minus_cosine, 0) << "a direction sees no norm";
  EXPECT_EQ(twice.norm_ratio, 1);
}

TEST(Difference, CosineKeepsItsDigitsWhereDirectionsAreClose) {
  // A rotation of one plane by an angle: 1 - cos is share * (1 - cos(angle)), far below an epsilon of 1.
  const double angle = 1e-9;
  const Doubles b = {1, 0, 1, 1, 1};
  const Doubles c = {std::cos(angle), std::sin(angle), 1, 1, 1};
  const double expected = angle * angle / 2 / 4;
  EXPECT_NEAR(measured(b, c).one_minus_cosine, expected, 1e-3 * expected);
}

TEST(Difference, AgreesWithTheDefinitionInLongDouble) {
  test::Random random(4);
  for (const std::int64_t rows : {1, 3, 17}) {
    for (const std::int64_t cols : {1, 7, 8, 9, 2048, 2049, 5000}) {
      const auto b = random.normals<float>(rows * cols);
      auto c = b;
      for (float& x : c) {
        x += static_cast<float>(random.normal(1e-3));
      }
      long double bb = 0;
      long double cc = 0;
      long double bc = 0;
      long double dd = 0;
      long double largest = 0;
      std::vector<long double> row_b;
      std::vector<long double> row_d;
      for (std::int64_t r = 0; r < rows; ++r) {
        long double rb = 0;
        long double rd = 0;
        for (std::int64_t i = r * cols; i < (r + 1) * cols; ++i) {
          const long double x = b[static_cast<std::size_t>(i)];
          const long double y = c[static_cast<std::size_t>(i)];
          rb += x * x;
          rd += (y - x) * (y - x);
          cc += y * y;
          bc += x * y;
        }
        bb += rb;
        dd += rd;
        row_b.push_back(std::sqrt(rb));
        row_d.push_back(std::sqrt(rd));
        largest = std::max(largest, row_b.back());
      }
      long double worst = 0;
      for (std::size_t r = 0; r < row_b.size(); ++r) {
        worst = std::max(worst, row_d[r] / std::max(row_b[r], 1e-3L * largest));
      }
      const Difference d = measured(b, c, {rows, cols});
      const auto near = [](double actual, long double expected, double scale) {
        EXPECT_NEAR(actual, static_cast<double>(expected), 1e-13 * scale);
      };
      near(d.relative_l2, std::sqrt(dd / bb), d.relative_l2);
      near(d.norm_ratio, std::abs(std::sqrt(cc / bb) - 1), 0.1);
      near(d.one_minus_cosine, 1 - bc / std::sqrt(bb * cc), 1e-3);
      near(d.worst_row, worst, d.worst_row);
    }
  }
}

TEST(Difference, WorstRowIsToldEvenWhereItIsSmall) {
  // Rows of norms 1, 1e-2 and 0; each is off in turn.
  const Doubles b = {1, 0, 0.01, 0, 0, 0};
  const auto off = [&](std::size_t at, double by) {
    Doubles c = b;
    c[at] += by;
    return measured(b, c, {3, 2});
  };
  EXPECT_DOUBLE_EQ(off(3, 0.001).worst_row, 0.1);
  EXPECT_EQ(off(3, 0.001).worst_row_index, 1);
  EXPECT_NEAR(off(3, 0.001).relative_l2, 1e-3, 1e-6) << "the tensor as a whole hardly sees it";
  EXPECT_DOUBLE_EQ(off(1, 0.001).worst_row, 0.001);
  // A row of zeros is held to a thousandth of the largest.
  EXPECT_DOUBLE_EQ(off(5, 1e-4).worst_row, 0.1);
  EXPECT_EQ(off(5, 1e-4).worst_row_index, 2);
  EXPECT_EQ(measured(b, b, {3, 2}).worst_row, 0);
}

TEST(Difference, RowsAreThoseOfTheLastDimension) {
  Doubles b(24, 1.0);
  Doubles c = b;
  c[23] = 2;
  const Difference d = measured(b, c, {2, 4, 3});
  EXPECT_EQ(d.worst_row_index, 7);
  EXPECT_DOUBLE_EQ(d.worst_row, 1 / std::sqrt(3.0));
}

TEST(Difference, ZerosHaveNoDirection) {
  const Difference both = measured(Doubles{0, -0.0}, Doubles{0, 0});
  EXPECT_TRUE(both.zero);
  EXPECT_EQ(both.relative_l2, 0);
  EXPECT_EQ(both.one_minus_cosine, 0);
  const Difference baseline = measured(Doubles{0, 0}, Doubles{0, 1e-30});
  EXPECT_FALSE(baseline.zero);
  EXPECT_EQ(baseline.relative_l2, inf);
  EXPECT_EQ(baseline.norm_ratio, inf);
  EXPECT_EQ(baseline.worst_row, inf);
  EXPECT_EQ(baseline.one_minus_cosine, 1);
  const Difference candidate = measured(Doubles{1, 2}, Doubles{0, 0});
  EXPECT_EQ(candidate.relative_l2, 1);
  EXPECT_EQ(candidate.norm_ratio, 1);
  EXPECT_EQ(candidate.one_minus_cosine, 1);
  EXPECT_EQ(candidate.worst_row, 1);
  const Difference empty = measured(Doubles{}, Doubles{}, {0, 4});
  EXPECT_TRUE(empty.zero);
  EXPECT_EQ(empty.worst_row, 0);
}

TEST(Difference, WhatIsNotFiniteIsToldAndNothingElse) {
  for (const double bad : {nan, inf, -inf}) {
    const Difference candidate = measured(Doubles{1, 2, 3}, Doubles{1, bad, bad});
    ASSERT_TRUE(candidate.non_finite.has_value());
    EXPECT_EQ(candidate.non_finite->count, 2);
    EXPECT_EQ(candidate.non_finite->entry, 1);
    EXPECT_EQ(candidate.non_finite->baseline, 2);
    EXPECT_TRUE(std::isnan(candidate.relative_l2));
    EXPECT_TRUE(std::isnan(candidate.worst_row));
    EXPECT_TRUE(measured(Doubles{bad}, Doubles{bad}).non_finite) << "equal, and as wrong";
    EXPECT_TRUE(measured(Doubles{bad}, Doubles{1}).non_finite);
  }
}

TEST(Difference, ValuesAtTheEndsOfTheRange) {
  EXPECT_DOUBLE_EQ(measured(Doubles{4e200}, Doubles{3e200}).relative_l2, 0.25);
  EXPECT_DOUBLE_EQ(measured(Doubles{4e-200}, Doubles{3e-200}).relative_l2, 0.25);
  EXPECT_DOUBLE_EQ(measured(Doubles{5e-324}, Doubles{1e-323}).relative_l2, 1);
  EXPECT_DOUBLE_EQ(measured(Doubles{1.7e308, 0}, Doubles{-1.7e308, 0}).relative_l2, 2);
  EXPECT_DOUBLE_EQ(measured(Doubles{1.7e308, 0}, Doubles{-1.7e308, 0}).one_minus_cosine, 2);
}

TEST(Difference, TypesMayDiffer) {
  const std::vector<bfloat16> b = {bfloat16(1.0F), bfloat16(0.5F)};
  const std::vector<float> c = {1.0F, 0.5F};
  EXPECT_EQ(measured(b, c).relative_l2, 0);
  EXPECT_DOUBLE_EQ(measured(c, Doubles{1, 1}).relative_l2, 0.5 / std::sqrt(1.25));
}

TEST(Difference, RefusesWhatCannotBeMeasured) {
  const Doubles x(6, 1.0);
  const std::vector<std::int32_t> ids(6);
  EXPECT_EQ(test::thrown_text<Error>([&] {
              static_cast<void>(measure(tensor(x, {2, 3}), tensor(x, {3, 2})));
            }),
            "numerics::measure: candidate.shape = x: must be the baseline's");
  EXPECT_EQ(test::thrown_text<Error>(
                [&] { static_cast<void>(measure(tensor(x, {6}), tensor(ids, {6}))); }),
            "numerics::measure: tensor = x: must hold floating numbers");
  EXPECT_EQ(
      test::thrown_text<Error>([&] { static_cast<void>(measure(tensor(x, {5}), tensor(x, {6}))); }),
      "numerics::measure: x.elements.size = 6: must equal the product of its shape (5)");
}

}  // namespace
}  // namespace heddle::numerics

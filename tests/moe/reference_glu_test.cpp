#include "heddle/moe/reference_glu.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: halves swapped in the forward, in the backward, in both;
// the derivative of sigmoid without the gate's term; -0 kept; a truncating cast; the up half read
// one column on.

namespace heddle::moe::reference {
namespace {

using heddle::test::close;
using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;

using Vector = std::vector<double>;

template <class S>
std::vector<S> forward(const std::vector<S>& gate_up, std::int64_t rows) {
  const std::int64_t cols = static_cast<std::int64_t>(gate_up.size()) / rows;
  std::vector<S> activation(gate_up.size() / 2, poison<S>());
  glu<S>({gate_up.data(), rows, cols}, {activation.data(), rows, cols / 2});
  return activation;
}

template <class S>
std::vector<S> backward(const std::vector<S>& gate_up, const std::vector<S>& d_activation,
                        std::int64_t rows) {
  const std::int64_t cols = static_cast<std::int64_t>(gate_up.size()) / rows;
  std::vector<S> d_gate_up(gate_up.size(), poison<S>());
  glu_backward<S>({gate_up.data(), rows, cols}, {d_activation.data(), rows, cols / 2},
                  {d_gate_up.data(), rows, cols});
  return d_gate_up;
}

TEST(ReferenceGlu, GateBeforeUp) {
  // Row by row [gate, gate, up, up]; sigmoid(ln 3) = 3/4, sigmoid(0) = 1/2.
  const double ln3 = std::log(3.0);
  const Vector activation = forward<double>({ln3, 0, 4, 100, -ln3, ln3, 2, -4}, 2);
  EXPECT_TRUE(close(activation, Vector{3 * ln3, 0, -0.5 * ln3, -3 * ln3}, 1e-15));
}

TEST(ReferenceGlu, BackwardByHand) {
  // At gate 0: s = 1/2, d_gate = d * up / 2, d_up = 0.
  EXPECT_EQ(backward<double>({0, 6}, {5}, 1), (Vector{15, 0}));
  // At gate ln 3: s = 3/4, d_gate = d up s (1 + ln3 / 4), d_up = d ln3 s.
  const double ln3 = std::log(3.0);
  EXPECT_TRUE(close(backward<double>({ln3, 2}, {4}, 1), Vector{6 * (1 + ln3 / 4), 3 * ln3}, 1e-15));
}

TEST(ReferenceGlu, EachHalfByCentralDifferences) {
  Random random(1);
  Vector gate_up = random.normals<double>(3 * 10, 2.0);
  const Vector d = random.normals<double>(3 * 5);
  const Vector expected = heddle::test::central_differences(std::span<double>(gate_up), [&] {
    const Vector activation = forward(gate_up, 3);
    return std::inner_product(d.begin(), d.end(), activation.begin(), 0.0);
  });
  const Vector actual = backward(gate_up, d, 3);
  const auto half = [](const Vector& all, std::size_t first) {
    Vector columns;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (i % 10 / 5 == first) {
        columns.push_back(all[i]);
      }
    }
    return columns;
  };
  EXPECT_TRUE(close(half(actual, 0), half(expected, 0), 1e-8));
  EXPECT_TRUE(close(half(actual, 1), half(expected, 1), 1e-8));
}

TEST(ReferenceGlu, AColumnOfTheCotangentReachesItsTwoColumnsAlone) {
  Random random(2);
  const Vector gate_up = random.normals<double>(8);
  for (std::size_t f = 0; f < 4; ++f) {
    Vector d(4, 0.0);
    d[f] = 1;
    const Vector d_gate_up = backward(gate_up, d, 1);
    for (std::size_t column = 0; column < 8; ++column) {
      EXPECT_EQ(d_gate_up[column] != 0, column % 4 == f) << f << " " << column;
    }
  }
}

TEST(ReferenceGlu, NeverNegativeZero) {
  const std::vector<float> gate_up{1, -1, 0, 1, 2, 2};
  const std::vector<float> d_gate_up = backward<float>(gate_up, {-0.0F, 0.0F, -1.0F}, 1);
  for (const std::size_t zero : {0U, 1U, 3U, 4U, 5U}) {
    EXPECT_EQ(d_gate_up[zero], 0.0F);
    EXPECT_FALSE(std::signbit(d_gate_up[zero])) << zero;
  }
  EXPECT_EQ(d_gate_up[2], -1.0F);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(backward<float>(gate_up, {nan, 1, 1}, 1)[0]));
  // An underflow of the cast is a zero like any other.
  const std::vector<bfloat16> tiny =
      backward<bfloat16>({bfloat16(1e-30F), bfloat16(1.0F)}, {bfloat16(-1e-30F)}, 1);
  EXPECT_EQ(static_cast<float>(tiny[1]), 0.0F);
  EXPECT_FALSE(std::signbit(static_cast<float>(tiny[1])));
}

TEST(ReferenceGlu, SaturatesWithoutNaN) {
  const std::vector<float> gate_up{200, -200, 3, 3};
  EXPECT_EQ(forward(gate_up, 1), (std::vector<float>{600, 0}));
  EXPECT_EQ(backward<float>(gate_up, {1, 1}, 1), (std::vector<float>{3, 0, 200, 0}));
}

TEST(ReferenceGlu, RoundsOnceToStorage) {
  Random random(3);
  const std::vector<bfloat16> gate_up = random.normals<bfloat16>(2 * 40);
  const std::vector<bfloat16> d = random.normals<bfloat16>(40);
  Vector wide(gate_up.begin(), gate_up.end());
  const Vector wide_d(d.begin(), d.end());
  const Vector activation = forward(wide, 1);
  const Vector d_gate_up = backward(wide, wide_d, 1);
  const auto rounded = [](const Vector& values) {
    std::vector<bfloat16> result;
    for (const double value : values) {
      result.emplace_back(static_cast<float>(value));
    }
    return result;
  };
  EXPECT_TRUE(same_bits(forward(gate_up, 1), rounded(activation)));
  EXPECT_TRUE(same_bits(backward(gate_up, d, 1), rounded(d_gate_up)));
}

TEST(ReferenceGlu, NoRows) {
  std::vector<float> nothing;
  glu<float>({nothing.data(), 0, 4}, {nothing.data(), 0, 2});
  glu_backward<float>({nothing.data(), 0, 4}, {nothing.data(), 0, 2}, {nothing.data(), 0, 4});
}

TEST(ReferenceGlu, RefusesOtherShapes) {
  Vector a(12, 0.0);
  Vector b(12, 0.0);
  Vector c(12, 0.0);
  const auto refusal = [&](std::int64_t cols, std::int64_t rows, std::int64_t width) {
    return heddle::test::thrown_text<Error>([&] {
      glu<double>({a.data(), 2, cols}, {b.data(), rows, width});
    });
  };
  EXPECT_EQ(refusal(5, 2, 2), "moe::reference::glu: gate_up.cols = 5: must be even");
  EXPECT_EQ(refusal(4, 3, 2),
            "moe::reference::glu: activation.rows = 3: must equal gate_up.rows (2)");
  EXPECT_EQ(refusal(4, 2, 4),
            "moe::reference::glu: activation.cols = 4: must equal gate_up.cols / 2 (2)");
  const auto back = [&](std::int64_t d_rows, std::int64_t out_cols) {
    return heddle::test::thrown_text<Error>([&] {
      glu_backward<double>({a.data(), 2, 4}, {b.data(), d_rows, 2}, {c.data(), 2, out_cols});
    });
  };
  EXPECT_EQ(back(1, 4),
            "moe::reference::glu_backward: d_activation.rows = 1: must equal gate_up.rows (2)");
  EXPECT_EQ(back(2, 2),
            "moe::reference::glu_backward: d_gate_up.cols = 2: must equal gate_up.cols (4)");
}

}  // namespace
}  // namespace heddle::moe::reference

#include "heddle/moe/glu.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/isa.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: halves swapped in the forward, in the backward only, in both;
// the sigmoid's slope without the gate's term; -0 kept; a truncating cast; a column read one on; a
// vector's tail left out, or written behind.

namespace heddle::moe {
namespace {

using heddle::test::close;
using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;
using heddle::test::thrown_text;
using heddle::test::with_threads;

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

struct Exact {
  std::vector<double> activation, d_gate_up;
};

/// Both directions from their definition, in double.
template <class S>
Exact by_definition(const std::vector<S>& gate_up, const std::vector<S>& d, std::int64_t rows) {
  const std::size_t width = d.size() / static_cast<std::size_t>(rows);
  Exact exact{std::vector<double>(d.size()), std::vector<double>(gate_up.size())};
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    for (std::size_t f = 0; f < width; ++f) {
      const auto g = static_cast<double>(gate_up[r * 2 * width + f]);
      const auto u = static_cast<double>(gate_up[r * 2 * width + width + f]);
      const auto c = static_cast<double>(d[r * width + f]);
      const double s = 1 / (1 + std::exp(-g));
      exact.activation[r * width + f] = g * s * u;
      exact.d_gate_up[r * 2 * width + f] = c * u * s * (1 + g * (1 - s));
      exact.d_gate_up[r * 2 * width + width + f] = c * g * s;
    }
  }
  return exact;
}

/// Largest error in units of 2^-digits of the exact value, and of the root of the mean square.
template <class S>
std::pair<double, double> relative_errors(const std::vector<S>& actual,
                                          const std::vector<double>& exact) {
  double largest = 0;
  double squares = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double error =
        std::abs(static_cast<double>(actual[i]) - exact[i]) / std::max(std::abs(exact[i]), 1e-30);
    largest = std::max(largest, error);
    squares += error * error;
  }
  return {largest, std::sqrt(squares / static_cast<double>(actual.size()))};
}

TEST(Glu, BothDirectionsAgainstDouble) {
  constexpr std::int64_t rows = 37;
  for (const std::int64_t width : {1, 15, 16, 17, 131}) {
    Random random(static_cast<std::uint64_t>(width));
    const auto gate_up = random.normals<float>(rows * 2 * width, 3.0);
    const auto d = random.normals<float>(rows * width);
    const Exact exact = by_definition(gate_up, d, rows);
    // Sigmoid 2.5 ulp and two products; the slope cancels near gate = -1.28, where the bound is of its
    // terms: so against the largest value.
    EXPECT_LE(relative_errors(forward(gate_up, rows), exact.activation).first, 8 * 0x1p-24);
    EXPECT_TRUE(close(backward(gate_up, d, rows), exact.d_gate_up, 4 * 0x1p-24));
  }
}

TEST(Glu, Bf16RoundsOnce) {
  constexpr std::int64_t rows = 64;
  constexpr std::int64_t width = 203;
  Random random(2);
  const auto gate_up = random.normals<bfloat16>(rows * 2 * width, 2.0);
  const auto d = random.normals<bfloat16>(rows * width);
  const Exact exact = by_definition(gate_up, d, rows);
  // One ulp, and an error of one rounding on average: a chain in bf16 has 3.9e-3.
  const auto [forward_worst, forward_rms] =
      relative_errors(forward(gate_up, rows), exact.activation);
  EXPECT_LE(forward_worst, 0x1p-8);
  EXPECT_LE(forward_rms, 2.5e-3);
  const auto [backward_worst, backward_rms] =
      relative_errors(backward(gate_up, d, rows), exact.d_gate_up);
  EXPECT_LE(backward_worst, 0x1p-7);
  EXPECT_LE(backward_rms, 2.5e-3);
  EXPECT_GE(backward_rms, 1e-3) << "this is not bf16";
}

TEST(Glu, GateBeforeUp) {
  const double ln3 = std::log(3.0);
  EXPECT_TRUE(close(forward<double>({ln3, 0, 4, 100, -ln3, ln3, 2, -4}, 2),
                    std::vector<double>{3 * ln3, 0, -0.5 * ln3, -3 * ln3}, 1e-15));
  EXPECT_TRUE(close(backward<double>({ln3, 2}, {4}, 1),
                    std::vector<double>{6 * (1 + ln3 / 4), 3 * ln3}, 1e-15));
}

TEST(Glu, EachHalfByCentralDifferences) {
  Random random(3);
  std::vector<double> gate_up = random.normals<double>(3 * 10, 2.0);
  const auto d = random.normals<double>(3 * 5);
  const auto expected = heddle::test::central_differences(std::span<double>(gate_up), [&] {
    const auto activation = forward(gate_up, 3);
    return std::inner_product(d.begin(), d.end(), activation.begin(), 0.0);
  });
  const auto actual = backward(gate_up, d, 3);
  const auto half = [](const std::vector<double>& all, std::size_t first) {
    std::vector<double> columns;
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

TEST(Glu, AColumnOfTheCotangentReachesItsTwoColumnsAlone) {
  constexpr std::size_t width = 35;
  Random random(4);
  const auto gate_up = random.normals<float>(2 * width);
  for (std::size_t f = 0; f < width; ++f) {
    std::vector<float> d(width, 0.0F);
    d[f] = 1;
    const auto d_gate_up = backward(gate_up, d, 1);
    for (std::size_t column = 0; column < 2 * width; ++column) {
      EXPECT_EQ(d_gate_up[column] != 0, column % width == f) << f << " " << column;
    }
  }
}

template <class S>
void expect_no_negative_zero(float tiny) {
  // Twenty columns of each kind: whole vectors and a tail.
  std::vector<S> gate_up;
  std::vector<S> d;
  const auto add = [&](float gate, float up, float cotangent) {
    gate_up.insert(gate_up.end(), {S(gate), S(up)});
    d.push_back(S(cotangent));
  };
  for (int i = 0; i < 20; ++i) {
    add(1, 2, -0.0F);     // the cotangent is -0
    add(0, -1, 1);        // d_up = 1 * 0 * s
    add(1, -0.0F, 1);     // d_gate is -0
    add(-tiny, 1, tiny);  // d_up underflows from below
    add(1, 1, -tiny * tiny);
  }
  // Interleaved pairs to halves.
  const std::size_t width = d.size();
  std::vector<S> halves(2 * width);
  for (std::size_t f = 0; f < width; ++f) {
    halves[f] = gate_up[2 * f];
    halves[width + f] = gate_up[2 * f + 1];
  }
  int zeros = 0;
  for (const S value : backward(halves, d, 1)) {
    if (static_cast<double>(value) == 0) {
      ++zeros;
      EXPECT_FALSE(std::signbit(static_cast<double>(value)));
    }
  }
  EXPECT_GE(zeros, 60);
}

TEST(Glu, NeverNegativeZeroOnAnyPath) {
  for (const Path path : available_paths()) {
    const ScopedPath scoped(path);
    expect_no_negative_zero<float>(1e-30F);
    expect_no_negative_zero<bfloat16>(1e-25F);
  }
  expect_no_negative_zero<double>(1e-30F);
  // The smallest bf16, 2^-133, and the tie between it and 0; sigmoid(32) is 1.
  const std::vector<bfloat16> gate_up = {bfloat16(32.0F), bfloat16(1.0F)};
  const auto d_up = [&](float d) {
    std::vector<bfloat16> d_gate(1);
    std::vector<bfloat16> up(1);
    detail::glu_backward_row<bfloat16, float, bfloat16>(&gate_up[0], &gate_up[1], &d, d_gate.data(),
                                                        up.data(), 1);
    return static_cast<float>(up[0]);
  };
  EXPECT_EQ(d_up(-0x1p-139F), 0.0F);
  EXPECT_FALSE(std::signbit(d_up(-0x1p-139F)));
  EXPECT_EQ(d_up(-0x1.02p-139F), -0x1p-133F);
  EXPECT_EQ(d_up(-0x1p-138F), -0x1p-133F);
}

TEST(Glu, NaNPassesAndLargeGatesSaturate) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(backward<float>({1, 2}, {nan}, 1)[0]));
  EXPECT_TRUE(std::isnan(backward<float>({1, 2}, {nan}, 1)[1]));
  EXPECT_TRUE(std::isnan(forward<float>({nan, 2}, 1)[0]));
  EXPECT_EQ(forward<float>({200, 3}, 1)[0], 600.0F);
  EXPECT_EQ(forward<float>({-200, 3}, 1)[0], 0.0F);
  EXPECT_EQ(backward<float>({-200, 3}, {2}, 1), (std::vector<float>{0, 0}));
  EXPECT_EQ(backward<float>({200, 3}, {2}, 1), (std::vector<float>{6, 400}));
}

template <class S>
void expect_same_bits_everywhere() {
  constexpr std::int64_t rows = 7;
  constexpr std::int64_t width = 1029;
  Random random(5);
  const auto gate_up = random.normals<S>(rows * 2 * width, 4.0);
  const auto d = random.normals<S>(rows * width);
  const auto activation = forward(gate_up, rows);
  const auto d_gate_up = backward(gate_up, d, rows);
  for (const Path path : available_paths()) {
    const ScopedPath scoped(path);
    EXPECT_TRUE(same_bits(forward(gate_up, rows), activation)) << path_name(path);
    EXPECT_TRUE(same_bits(backward(gate_up, d, rows), d_gate_up)) << path_name(path);
  }
  for (const int threads : {1, 3}) {
    with_threads(threads, [&] { EXPECT_TRUE(same_bits(forward(gate_up, rows), activation)); });
  }
}

TEST(Glu, SameBitsOnEveryPathAndThreadCount) {
  expect_same_bits_everywhere<float>();
  expect_same_bits_everywhere<bfloat16>();
}

TEST(Glu, ReadsAndWritesItsColumnsAlone) {
  // Rows of 5 columns in a matrix of 23: NaN around them.
  constexpr std::int64_t stride = 23;
  std::vector<float> gate_up(4 * stride, poison<float>());
  std::vector<float> activation(4 * stride, -1.0F);
  for (std::int64_t r = 0; r < 4; ++r) {
    std::fill_n(gate_up.begin() + r * stride, 10, 1.0F);
  }
  glu<float>({gate_up.data(), 4, 10, stride}, {activation.data(), 4, 5, stride});
  for (std::size_t i = 0; i < activation.size(); ++i) {
    EXPECT_EQ(activation[i] == -1.0F, i % stride >= 5) << i;
    EXPECT_FALSE(std::isnan(activation[i]));
  }
}

TEST(Glu, RefusesOtherShapesAndTakesNone) {
  std::vector<float> values(12);
  EXPECT_EQ(thrown_text<Error>([&] {
              glu<float>({values.data(), 2, 3}, {values.data(), 2, 1});
            }),
            "moe::glu: gate_up.cols = 3: must be even");
  EXPECT_EQ(thrown_text<Error>([&] {
              glu<float>({values.data(), 2, 4}, {values.data(), 2, 1});
            }),
            "moe::glu: activation.cols = 1: must equal gate_up.cols / 2 (2)");
  EXPECT_EQ(
      thrown_text<Error>([&] {
        glu_backward<float>({values.data(), 2, 4}, {values.data(), 1, 2}, {values.data(), 2, 4});
      }),
      "moe::glu_backward: d_activation.rows = 1: must equal gate_up.rows (2)");
  EXPECT_EQ(
      thrown_text<Error>([&] {
        glu_backward<float>({values.data(), 2, 4}, {values.data(), 2, 2}, {values.data(), 2, 2});
      }),
      "moe::glu_backward: d_gate_up.cols = 2: must equal gate_up.cols (4)");
  glu<float>({nullptr, 0, 4}, {nullptr, 0, 2});
}

}  // namespace
}  // namespace heddle::moe

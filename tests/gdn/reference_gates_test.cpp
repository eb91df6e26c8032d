#include "heddle/gdn/reference_gates.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"

// Mutants these tests are written against: exp of a positive argument in sigmoid or softplus; gates
// of padding left as they were or read; the decay of a document's first token kept, or its d_a;
// dt_bias outside softplus; the factor 2 of BetaRange::doubled missing in one direction; A_log's
// gradient without g; a block of the sums over tokens dropped.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::Random;

using Vector = std::vector<double>;
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

struct Gates {
  Vector a{}, b{};
  double A_log = 0;
  double dt_bias = 0;
  BetaRange range = BetaRange::unit;
  std::vector<std::int32_t> segment_ids{};

  [[nodiscard]] std::int64_t tokens() const { return static_cast<std::int64_t>(a.size()); }
  [[nodiscard]] reference::GateInputs<double, double> inputs() const {
    return {.a = {a.data(), tokens(), 1},
            .b = {b.data(), tokens(), 1},
            .A_log = A_log,
            .dt_bias = dt_bias};
  }
};

struct Forward {
  Vector beta, g;
};

Forward forward(const Gates& gates) {
  Forward out{Vector(gates.a.size(), nan), Vector(gates.a.size(), nan)};
  reference::gates_forward<double, double>(Segments(gates.segment_ids, 0), gates.inputs(),
                                           gates.range, out.beta, out.g);
  return out;
}

struct Backward {
  Vector d_a, d_b;
  reference::GateParameterCotangents<double> parameters;
};

Backward backward(const Gates& gates, const Vector& d_beta, const Vector& d_g) {
  Backward out{Vector(gates.a.size(), nan), Vector(gates.a.size(), nan), {}};
  out.parameters = reference::gates_backward<double, double>(
      Segments(gates.segment_ids, 0), gates.inputs(), gates.range, d_beta, d_g,
      {out.d_a.data(), gates.tokens(), 1}, {out.d_b.data(), gates.tokens(), 1});
  return out;
}

TEST(GdnReferenceGates, SigmoidAndSoftplusAtTheirEnds) {
  EXPECT_EQ(reference::sigmoid(0.0), 0.5);
  EXPECT_NEAR(reference::sigmoid(2.0), 1 / (1 + std::exp(-2.0)), 1e-16);
  EXPECT_NEAR(reference::sigmoid(-2.0), 1 / (1 + std::exp(2.0)), 1e-16);
  EXPECT_EQ(reference::sigmoid(1e4), 1.0);
  EXPECT_EQ(reference::sigmoid(-1e4), 0.0);
  EXPECT_EQ(reference::sigmoid(-700.0), std::exp(-700.0));
  EXPECT_EQ(reference::sigmoid(-200.0F), 0.0F);
  EXPECT_NEAR(reference::softplus(0.0), std::log(2.0), 1e-16);
  EXPECT_NEAR(reference::softplus(-3.0), std::log1p(std::exp(-3.0)), 1e-17);
  EXPECT_NEAR(reference::softplus(3.0), std::log(1 + std::exp(3.0)), 1e-15);
  EXPECT_EQ(reference::softplus(1e4), 1e4);
  EXPECT_EQ(reference::softplus(-1e4), 0.0);
  EXPECT_EQ(reference::softplus(-50.0), std::exp(-50.0));
}

TEST(GdnReferenceGates, ByHand) {
  const Gates gates{.a = {0.5, 0.5, -1},
                    .b = {0, 1, -1},
                    .A_log = std::log(3.0),
                    .dt_bias = 0.25,
                    .segment_ids = {1, 1, 1}};
  const Forward out = forward(gates);
  const double s1 = 1 / (1 + std::exp(-1.0));
  EXPECT_TRUE(close(out.beta, Vector{0.5, s1, 1 - s1}, 1e-15));
  EXPECT_TRUE(
      close(out.g, Vector{0, -3 * std::log(1 + std::exp(0.75)), -3 * std::log(1 + std::exp(-0.75))},
            1e-15));
}

TEST(GdnReferenceGates, PaddingIsNotReadAndGetsZeros) {
  const Gates gates{
      .a = {nan, nan, 1, nan, 1}, .b = {nan, 0.5, 1, nan, 1}, .segment_ids = {0, 1, 1, 0, 2}};
  const Forward out = forward(gates);
  EXPECT_EQ(out.beta[0], 0);
  EXPECT_EQ(out.g[0], 0);
  EXPECT_EQ(out.g[1], 0) << "a first token's decay acts on nothing: its a is not read";
  EXPECT_LT(out.g[2], 0);
  EXPECT_EQ(out.beta[3], 0);
  EXPECT_EQ(out.g[4], 0);
  const Backward back = backward(gates, {nan, 1, 1, nan, 1}, {nan, 0, 1, nan, 0});
  EXPECT_EQ(back.d_a[0], 0);
  EXPECT_EQ(back.d_b[0], 0);
  EXPECT_EQ(back.d_a[1], 0);
  EXPECT_GT(back.d_b[1], 0);
  EXPECT_LT(back.d_a[2], 0);
  EXPECT_EQ(back.d_a[3], 0);
  EXPECT_EQ(back.d_a[4], 0);
  EXPECT_TRUE(std::isfinite(back.parameters.d_A_log));
  EXPECT_EQ(back.parameters.d_dt_bias, back.d_a[2]);
}

TEST(GdnReferenceGates, ExtremeInputsGiveExactEnds) {
  const Gates gates{.a = {0, 1e4, -1e4, 0},
                    .b = {0, -1e4, 1e4, 0},
                    .A_log = std::log(2.0),
                    .segment_ids = {1, 1, 1, 1}};
  const Forward out = forward(gates);
  EXPECT_NEAR(out.g[1], -2e4, 1e-11);
  EXPECT_EQ(out.g[2], 0);
  EXPECT_EQ(out.beta[1], 0);
  EXPECT_EQ(out.beta[2], 1);
  // What the recurrence gives behind exp(-2e4) is exactly 0, and so is what is made of it.
  const Backward back = backward(gates, {0, 1, 1, 0}, {0, 0, 1, 0});
  EXPECT_EQ(back.d_a[1], 0);
  EXPECT_EQ(back.d_a[2], 0);
  EXPECT_EQ(back.d_b[1], 0);
  EXPECT_EQ(back.d_b[2], 0);
}

TEST(GdnReferenceGates, BackwardAgreesWithCentralDifferences) {
  Random random(11);
  const std::vector<std::int32_t> ids{1, 1, 0, 1, 2, 2, 2, 0};
  for (const BetaRange range : {BetaRange::unit, BetaRange::doubled}) {
    Gates gates{.a = random.normals<double>(8),
                .b = random.normals<double>(8),
                .A_log = 0.3,
                .dt_bias = -0.4,
                .range = range,
                .segment_ids = ids};
    const Vector d_beta = random.normals<double>(8);
    const Vector d_g = random.normals<double>(8);
    const auto loss = [&] {
      const Forward out = forward(gates);
      double sum = 0;
      for (std::size_t t = 0; t < 8; ++t) {
        sum += out.beta[t] * d_beta[t] + out.g[t] * d_g[t];
      }
      return sum;
    };
    // Padding and first tokens: their g does not exist, whatever cotangent they are handed.
    const Backward found = backward(gates, d_beta, d_g);
    EXPECT_TRUE(close(found.d_a, heddle::test::central_differences(gates.a, loss), 1e-8));
    EXPECT_TRUE(close(found.d_b, heddle::test::central_differences(gates.b, loss), 1e-8));
    EXPECT_NEAR(found.parameters.d_A_log,
                heddle::test::central_differences({&gates.A_log, 1}, loss)[0], 1e-8);
    EXPECT_NEAR(found.parameters.d_dt_bias,
                heddle::test::central_differences({&gates.dt_bias, 1}, loss)[0], 1e-8);
  }
}

TEST(GdnReferenceGates, DoubledRangeIsTwiceTheUnitRange) {
  Gates gates{.a = {0, 0}, .b = {1, -2}, .segment_ids = {1, 1}};
  const Vector unit = forward(gates).beta;
  gates.range = BetaRange::doubled;
  const Vector doubled = forward(gates).beta;
  EXPECT_EQ(doubled[0], 2 * unit[0]);
  EXPECT_EQ(doubled[1], 2 * unit[1]);
}

TEST(GdnReferenceGates, SumsOverALongRowKeepTheirPrecision) {
  const std::int64_t tokens = 20000;
  Random random(4);
  const std::vector<float> a = random.normals<float>(tokens);
  const std::vector<float> b(static_cast<std::size_t>(tokens), 0.0F);
  const std::vector<float> d_g(static_cast<std::size_t>(tokens), 1.0F);
  std::vector<float> d_a(static_cast<std::size_t>(tokens));
  std::vector<float> d_b(static_cast<std::size_t>(tokens));
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens), 1);
  const auto found = reference::gates_backward<float, float>(
      Segments(ids, 1),
      {.a = {a.data(), tokens, 1}, .b = {b.data(), tokens, 1}, .A_log = 0, .dt_bias = 0},
      BetaRange::unit, d_g, d_g, {d_a.data(), tokens, 1}, {d_b.data(), tokens, 1});
  double d_A_log = 0;
  double d_dt_bias = 0;
  for (const float x : a) {
    d_A_log -= std::log1p(std::exp(static_cast<double>(x)));
    d_dt_bias -= 1 / (1 + std::exp(-static_cast<double>(x)));
  }
  // All terms of one sign: plain sums in float are off by some 1e-5 here.
  EXPECT_NEAR(static_cast<double>(found.d_A_log) / d_A_log, 1, 2e-6);
  EXPECT_NEAR(static_cast<double>(found.d_dt_bias) / d_dt_bias, 1, 2e-6);
}

}  // namespace
}  // namespace heddle::gdn

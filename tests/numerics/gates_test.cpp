#include "heddle/numerics/gates.hpp"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: the smaller of floor and noise; the noise not multiplied; a NaN of value or
// noise that passes; a limit above 1 that lets zeros through; a floor read from its neighbour; a scalar
// told against the candidate; a worst row of a vector.

namespace heddle::numerics {
namespace {

using Doubles = std::vector<double>;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

template <class T>
NamedTensor tensor(const std::vector<T>& values, std::vector<std::int64_t> shape) {
  return {.name = "grad.x", .shape = std::move(shape), .elements = std::span<const T>(values)};
}

TEST(Gates, LimitIsTheLargerOfFloorAndEightTimesTheNoise) {
  const auto limit = [](double floor, std::optional<double> noise) {
    return judge(GateKind::relative_l2, "x", 0, floor, noise).limit;
  };
  EXPECT_EQ(limit(1e-4, std::nullopt), 1e-4);
  EXPECT_EQ(limit(1e-4, 1e-6), 1e-4);
  EXPECT_DOUBLE_EQ(limit(1e-4, 1e-3), 8e-3);
  EXPECT_EQ(limit(0, 0.0), 0);
}

TEST(Gates, ValueMayReachItsLimit) {
  EXPECT_TRUE(judge(GateKind::loss, {}, 1e-6, 1e-6).passed);
  EXPECT_FALSE(judge(GateKind::loss, {}, std::nextafter(1e-6, 1.0), 1e-6).passed);
  EXPECT_TRUE(judge(GateKind::equal, "ids", 0, 0).passed);
  EXPECT_FALSE(judge(GateKind::equal, "ids", 1, 0).passed);
}

TEST(Gates, NanNeverPasses) {
  EXPECT_FALSE(judge(GateKind::relative_l2, "x", nan, 1e-4).passed);
  EXPECT_FALSE(judge(GateKind::relative_l2, "x", 0, 1e-4, nan).passed);
  EXPECT_FALSE(judge(GateKind::log_prob, "x", 0, 1e-4, nan).passed);
  EXPECT_FALSE(judge(GateKind::relative_l2, "x", inf, 1e-4).passed);
}

TEST(Gates, NoiseAsLargeAsTheTensorJudgesNothing) {
  const Gate gate = judge(GateKind::relative_l2, "x", 0, 1e-4, 0.125);
  EXPECT_FALSE(gate.passed);
  EXPECT_EQ(gate.reason, "the noise is too large to judge by");
  EXPECT_TRUE(judge(GateKind::relative_l2, "x", 0.5, 1e-4, 0.12).passed);
  EXPECT_TRUE(judge(GateKind::log_prob, {}, 3, 2, 1.0).passed) << "ulps are no share of anything";
}

TEST(Gates, EveryKindHasANameOfItsOwn) {
  std::vector<std::string_view> names;
  for (int kind = 0; kind <= static_cast<int>(GateKind::names); ++kind) {
    names.push_back(name(static_cast<GateKind>(kind)));
  }
  const std::vector<std::string_view> expected = {"loss",
                                                  "log_prob",
                                                  "entropy",
                                                  "grad_norm",
                                                  "dropped_slots",
                                                  "update_norm",
                                                  "relative_l2",
                                                  "one_minus_cosine",
                                                  "norm_ratio",
                                                  "worst_row",
                                                  "directional_derivative",
                                                  "expert_ids",
                                                  "equal",
                                                  "finite",
                                                  "shape",
                                                  "names"};
  EXPECT_EQ(names, expected);
}

TEST(Gates, FloorsAreThoseOfTheSpecification) {
  EXPECT_EQ(kernel_f32.relative_l2, 2e-6);
  EXPECT_EQ(kernel_f32.one_minus_cosine, 1e-11);
  EXPECT_EQ(kernel_f32.norm_ratio, 2e-6);
  EXPECT_EQ(kernel_f32.worst_row, 1e-5);
  EXPECT_EQ(kernel_f32.log_prob, 2);
  EXPECT_EQ(kernel_f32.log_prob_unit, LogProbUnit::ulps);
  EXPECT_EQ(kernel_f32.entropy, 1e-6);
  EXPECT_EQ(kernel_f32.loss, 1e-6);
  EXPECT_EQ(kernel_bf16.relative_l2, 5e-3);
  EXPECT_EQ(kernel_bf16.one_minus_cosine, 5e-3 * 5e-3 / 2);
  EXPECT_EQ(kernel_bf16.norm_ratio, 1e-3);
  EXPECT_EQ(kernel_bf16.worst_row, 2e-2);
  EXPECT_EQ(kernel_bf16.log_prob, 2) << "the forward is the same";
  EXPECT_EQ(whole_model_f32.relative_l2, 1e-4);
  EXPECT_EQ(whole_model_f32.one_minus_cosine, 1e-8);
  EXPECT_EQ(whole_model_f32.log_prob, 1e-4);
  EXPECT_EQ(whole_model_f32.log_prob_unit, LogProbUnit::nats);
  EXPECT_EQ(whole_model_f32.grad_norm, 2e-3);
  EXPECT_GE(updated_f32.worst_row, 8 * 2.1e-4);
  EXPECT_GE(updated_f32.relative_l2, 8 * 2.3e-5);
  for (const Floors& floors : {kernel_f32, kernel_bf16, whole_model_f32}) {
    EXPECT_EQ(floors.directional_derivative, 1e-6);
    EXPECT_EQ(floors.dropped_slots, 0);
    for (int kind = 0; kind <= static_cast<int>(GateKind::names); ++kind) {
      const auto gate = static_cast<GateKind>(kind);
      EXPECT_TRUE(!is_relative(gate) || (floors.of(gate) > 0 && floors.of(gate) < 1)) << name(gate);
    }
  }
}

TEST(Gates, FloorOfAKindIsItsOwn) {
  const Floors floors = {.loss = 1,
                         .log_prob = 2,
                         .entropy = 3,
                         .grad_norm = 4,
                         .dropped_slots = 5,
                         .update_norm = 6,
                         .relative_l2 = 7,
                         .one_minus_cosine = 8,
                         .norm_ratio = 9,
                         .worst_row = 10,
                         .directional_derivative = 11,
                         .expert_ids = 12};
  for (int kind = 0; kind <= static_cast<int>(GateKind::expert_ids); ++kind) {
    EXPECT_EQ(floors.of(static_cast<GateKind>(kind)), kind + 1);
  }
  EXPECT_EQ(floors.of(GateKind::equal), 0);
}

TEST(Gates, ScalarsAreRelativeToTheBaselineAndCountsAreNot) {
  EXPECT_DOUBLE_EQ(judge_scalar(GateKind::loss, -2, -2.5, whole_model_f32).value, 0.25);
  EXPECT_DOUBLE_EQ(judge_scalar(GateKind::grad_norm, 4, 3, whole_model_f32).value, 0.25);
  EXPECT_EQ(judge_scalar(GateKind::dropped_slots, 7, 9, whole_model_f32).value, 2);
  EXPECT_FALSE(judge_scalar(GateKind::dropped_slots, 9, 8, whole_model_f32).passed);
  EXPECT_TRUE(judge_scalar(GateKind::dropped_slots, 8, 8, whole_model_f32).passed);
  EXPECT_TRUE(judge_scalar(GateKind::dropped_slots, 8, 10, whole_model_f32, 1.0).passed);
  EXPECT_TRUE(judge_scalar(GateKind::loss, 0, 0, kernel_f32).passed);
  EXPECT_EQ(judge_scalar(GateKind::loss, 0, 1e-30, kernel_f32).value, inf);
  EXPECT_TRUE(judge_scalar(GateKind::update_norm, 1, 1.001, whole_model_f32).passed);
  EXPECT_FALSE(judge_scalar(GateKind::update_norm, 1, 1.003, whole_model_f32).passed);
  EXPECT_EQ(judge_scalar(GateKind::loss, 1, 1, whole_model_f32).tensor, "");
}

TEST(Gates, ScalarsThatAreNotFiniteFailWithBothTold) {
  for (const double bad : {nan, inf, -inf}) {
    for (const GateKind kind : {GateKind::loss, GateKind::dropped_slots}) {
      EXPECT_FALSE(judge_scalar(kind, bad, bad, whole_model_f32).passed);
      EXPECT_FALSE(judge_scalar(kind, 1, bad, whole_model_f32).passed);
      EXPECT_FALSE(judge_scalar(kind, bad, 1, whole_model_f32).passed);
    }
  }
  EXPECT_EQ(judge_scalar(GateKind::loss, 0.5, -nan, whole_model_f32).reason, "nan against 0.5");
  EXPECT_TRUE(std::isnan(judge_scalar(GateKind::loss, 0.5, inf, whole_model_f32).value));
}

TEST(Gates, ScalarGateOfATensorIsRefused) {
  EXPECT_EQ(test::thrown_text<Error>(
                [] { static_cast<void>(judge_scalar(GateKind::relative_l2, 1, 1, kernel_f32)); }),
            "numerics::judge_scalar: kind = relative_l2: must be loss, grad_norm, update_norm or "
            "dropped_slots");
}

TEST(Gates, TensorHasFourGatesAndAVectorThree) {
  test::Random random(1);
  const auto b = random.normals<double>(12);
  auto c = b;
  c[3] += 1e-3;
  const std::vector<Gate> gates = judge_tensor(tensor(b, {4, 3}), tensor(c, {4, 3}), kernel_f32);
  ASSERT_EQ(gates.size(), 4U);
  const std::array kinds = {GateKind::relative_l2, GateKind::one_minus_cosine, GateKind::norm_ratio,
                            GateKind::worst_row};
  const Difference d = measure(tensor(b, {4, 3}), tensor(c, {4, 3}));
  const std::array values = {d.relative_l2, d.one_minus_cosine, d.norm_ratio, d.worst_row};
  for (std::size_t i = 0; i < gates.size(); ++i) {
    EXPECT_EQ(gates[i].kind, kinds[i]);
    EXPECT_EQ(gates[i].value, values[i]);
    EXPECT_EQ(gates[i].limit, kernel_f32.of(kinds[i]));
    EXPECT_EQ(gates[i].tensor, "grad.x");
    EXPECT_FALSE(gates[i].passed);
  }
  EXPECT_EQ(gates[3].reason, "row 1");
  EXPECT_FALSE(all_passed(gates));
  EXPECT_EQ(judge_tensor(tensor(b, {12}), tensor(c, {12}), kernel_f32).size(), 3U);
  EXPECT_TRUE(all_passed(judge_tensor(tensor(b, {4, 3}), tensor(b, {4, 3}), kernel_f32)));
}

TEST(Gates, NoiseWidensEachGateByItsOwnFigure) {
  const Doubles b = {1, 0, 0, 1};
  const Doubles noisy = {1, 0, 0.001, 1};
  const Doubles c = {1, 0, 0.004, 1};
  const Difference noise = measure(tensor(b, {2, 2}), tensor(noisy, {2, 2}));
  const auto gates = judge_tensor(tensor(b, {2, 2}), tensor(c, {2, 2}), kernel_f32, noise);
  EXPECT_DOUBLE_EQ(gates[0].limit, 8 * noise.relative_l2);
  EXPECT_DOUBLE_EQ(gates[1].limit, 8 * noise.one_minus_cosine);
  EXPECT_DOUBLE_EQ(gates[3].limit, 8 * noise.worst_row);
  EXPECT_TRUE(gates[0].passed);
  EXPECT_FALSE(gates[1].passed) << "16 times the noise: its square grows faster";
}

TEST(Gates, NothingButZerosPassesAndSaysSo) {
  const Doubles zero(4, 0.0);
  const auto gates = judge_tensor(tensor(zero, {2, 2}), tensor(zero, {2, 2}), kernel_f32);
  EXPECT_TRUE(all_passed(gates));
  EXPECT_EQ(gates[0].reason, "zero on both sides");
  const Doubles none;
  EXPECT_EQ(judge_tensor(tensor(none, {0, 2}), tensor(none, {0, 2}), kernel_f32)[0].reason,
            "no elements");
  const Doubles some = {0, 0, 1e-30, 0};
  for (const auto& failing :
       {judge_tensor(tensor(zero, {2, 2}), tensor(some, {2, 2}), kernel_f32),
        judge_tensor(tensor(some, {2, 2}), tensor(zero, {2, 2}), kernel_f32)}) {
    for (const Gate& gate : failing) {
      EXPECT_FALSE(gate.passed) << name(gate.kind);
    }
  }
}

TEST(Gates, WhatIsNotFiniteIsOneGateThatNamesTheEntry) {
  const Doubles b = {1, 2, 3, 4};
  const Doubles c = {1, 2, nan, inf};
  const auto gates = judge_tensor(tensor(b, {2, 2}), tensor(c, {2, 2}), kernel_f32);
  ASSERT_EQ(gates.size(), 1U);
  EXPECT_EQ(gates[0].kind, GateKind::finite);
  EXPECT_EQ(gates[0].value, 2);
  EXPECT_EQ(gates[0].limit, 0);
  EXPECT_FALSE(gates[0].passed);
  EXPECT_EQ(gates[0].reason, "entry [1, 0] is nan against 3");
  EXPECT_FALSE(all_passed(judge_tensor(tensor(c, {4}), tensor(c, {4}), kernel_f32)));
}

// What a gradient must not have, and what no norm sees. Each is put into one tensor of a gradient of
// three; the scalar gate passes the whole, the gates of the tensor do not.
class Mutants : public ::testing::Test {
 protected:
  static constexpr std::int64_t rows = 24;
  static constexpr std::int64_t cols = 16;

  Mutants() {
    test::Random random(7);
    gradient_ = random.normals<double>(rows * cols);
    others_ = random.normals<double>(4000);
  }

  [[nodiscard]] static double norm(const Doubles& a, const Doubles& b) {
    double sum = 0;
    for (const Doubles* const part : {&a, &b}) {
      for (const double x : *part) {
        sum += x * x;
      }
    }
    return std::sqrt(sum);
  }

  /// Whether the norm of the whole gradient lets the mutant of a part of it pass.
  [[nodiscard]] bool scalar_passes(const Doubles& mutant) const {
    return judge_scalar(GateKind::grad_norm, norm(gradient_, others_), norm(mutant, others_),
                        whole_model_f32)
        .passed;
  }

  [[nodiscard]] std::vector<GateKind> failing(const Doubles& mutant) const {
    std::vector<GateKind> kinds;
    for (const Gate& gate : judge_tensor(tensor(gradient_, {rows, cols}),
                                         tensor(mutant, {rows, cols}), whole_model_f32)) {
      if (!gate.passed) {
        kinds.push_back(gate.kind);
      }
    }
    return kinds;
  }

  Doubles gradient_;
  Doubles others_;
};

using Kinds = std::vector<GateKind>;
const Kinds direction = {GateKind::relative_l2, GateKind::one_minus_cosine, GateKind::worst_row};

TEST_F(Mutants, SignFlip) {
  Doubles mutant = gradient_;
  for (double& g : mutant) {
    g = -g;
  }
  EXPECT_TRUE(scalar_passes(mutant));
  EXPECT_EQ(failing(mutant), direction);
}

TEST_F(Mutants, SwappedHalves) {
  // Gate and up columns of a gated unit exchanged.
  Doubles mutant = gradient_;
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto row = mutant.begin() + r * cols;
    std::rotate(row, row + cols / 2, row + cols);
  }
  EXPECT_TRUE(scalar_passes(mutant));
  EXPECT_EQ(failing(mutant), direction);
}

TEST_F(Mutants, Rotation) {
  Doubles mutant = gradient_;
  const double angle = 0.01;
  for (std::size_t i = 0; i + 1 < mutant.size(); i += 2) {
    mutant[i] = std::cos(angle) * gradient_[i] - std::sin(angle) * gradient_[i + 1];
    mutant[i + 1] = std::sin(angle) * gradient_[i] + std::cos(angle) * gradient_[i + 1];
  }
  EXPECT_TRUE(scalar_passes(mutant));
  EXPECT_EQ(failing(mutant), direction);
}

TEST_F(Mutants, SmallTensorZeroedOrDoubled) {
  // A share of 4e-3 of the squared norm may vanish under a limit of 2e-3.
  Doubles mutant = gradient_;
  const double share = 0.003;
  const double scale = norm({}, others_) / norm(gradient_, {}) * std::sqrt(share);
  for (double& g : gradient_) {
    g *= scale;
  }
  mutant.assign(gradient_.size(), 0.0);
  EXPECT_TRUE(scalar_passes(mutant));
  EXPECT_EQ(failing(mutant), (Kinds{GateKind::relative_l2, GateKind::one_minus_cosine,
                                    GateKind::norm_ratio, GateKind::worst_row}));
  for (double& g : gradient_) {
    g /= 2;
  }
  mutant = gradient_;
  for (double& g : mutant) {
    g *= 2;
  }
  EXPECT_TRUE(scalar_passes(mutant));
  EXPECT_EQ(failing(mutant),
            (Kinds{GateKind::relative_l2, GateKind::norm_ratio, GateKind::worst_row}))
      << "no direction changed";
}

TEST_F(Mutants, SmallRowSignFlipped) {
  // One row in a tensor whose others hide it.
  for (std::int64_t i = 0; i < cols; ++i) {
    gradient_[static_cast<std::size_t>(5 * cols + i)] *= 2e-4;
  }
  Doubles mutant = gradient_;
  for (std::int64_t i = 0; i < cols; ++i) {
    mutant[static_cast<std::size_t>(5 * cols + i)] *= -1;
  }
  EXPECT_TRUE(scalar_passes(mutant));
  EXPECT_EQ(failing(mutant), Kinds{GateKind::worst_row}) << "no other gate sees it";
}

TEST_F(Mutants, ScaleThatIsOff) {
  Doubles mutant = gradient_;
  for (double& g : mutant) {
    g *= 1.0003;
  }
  EXPECT_TRUE(scalar_passes(mutant));
  EXPECT_EQ(failing(mutant), (Kinds{GateKind::relative_l2, GateKind::norm_ratio}));
}

}  // namespace
}  // namespace heddle::numerics

#include "heddle/numerics/directional_derivative.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: one-sided differences; a direction that is the same each time, or the
// gradient's own; an error relative to <g, v>, which may be anything; a NaN passed over by a maximum; the
// number of directions or the seed ignored.

namespace heddle::numerics {
namespace {

using Doubles = std::vector<double>;

/// f(x) = sum of exp(a_i x_i) + x_i x_{i+1}, and its gradient.
class Smooth {
 public:
  explicit Smooth(std::int64_t size) {
    test::Random random(11);
    x = random.normals<double>(size, 0.5);
    coefficients_ = random.normals<double>(size, 0.5);
    gradient.resize(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      gradient[i] = coefficients_[i] * std::exp(coefficients_[i] * x[i]);
      gradient[i] += (i > 0 ? x[i - 1] : 0) + (i + 1 < x.size() ? x[i + 1] : 0);
    }
  }

  double operator()(std::span<const double> at) const {
    double sum = 0;
    for (std::size_t i = 0; i < at.size(); ++i) {
      sum += std::exp(coefficients_[i] * at[i]) + (i + 1 < at.size() ? at[i] * at[i + 1] : 0);
    }
    return sum;
  }

  [[nodiscard]] double error(const Doubles& of, const DirectionOptions& options = {}) const {
    return directional_error<double>(x, of, *this, options);
  }
  [[nodiscard]] bool passes(const Doubles& of) const {
    return judge_directions<double>("grad.x", x, of, *this, kernel_f32).passed;
  }

  Doubles x;
  Doubles gradient;

 private:
  Doubles coefficients_;
};

TEST(DirectionalDerivative, GradientPassesAtEverySize) {
  for (const std::int64_t size : {1, 2, 3, 100, 1000}) {
    const Smooth f(size);
    EXPECT_LT(f.error(f.gradient), 1e-7) << size;
    EXPECT_TRUE(f.passes(f.gradient)) << size;
  }
}

TEST(DirectionalDerivative, MutantsThatKeepTheNormFail) {
  const Smooth f(100);
  Doubles flipped = f.gradient;
  for (double& g : flipped) {
    g = -g;
  }
  EXPECT_GT(f.error(flipped), 0.5);
  Doubles swapped = f.gradient;
  std::rotate(swapped.begin(), swapped.begin() + 50, swapped.end());
  EXPECT_FALSE(f.passes(swapped));
  Doubles rotated = f.gradient;
  const double angle = 1e-4;
  rotated[3] = std::cos(angle) * f.gradient[3] - std::sin(angle) * f.gradient[4];
  rotated[4] = std::sin(angle) * f.gradient[3] + std::cos(angle) * f.gradient[4];
  EXPECT_FALSE(f.passes(rotated));
  Doubles scaled = f.gradient;
  for (double& g : scaled) {
    g *= 1.00001;
  }
  EXPECT_FALSE(f.passes(scaled));
  EXPECT_FALSE(f.passes(Doubles(100, 0.0))) << "no gradient at all";
}

TEST(DirectionalDerivative, OneEntryThatIsOffIsSeen) {
  const Smooth f(100);
  for (const std::size_t at : {0U, 57U, 99U}) {
    Doubles off = f.gradient;
    off[at] += 1e-3;
    EXPECT_FALSE(f.passes(off)) << at;
  }
}

TEST(DirectionalDerivative, DirectionsHaveMeanZeroAndVarianceOne) {
  detail::Directions random(5);
  double sum = 0;
  double squares = 0;
  constexpr int count = 100'000;
  for (int i = 0; i < count; ++i) {
    const double v = random.next();
    EXPECT_LE(std::abs(v), std::sqrt(3.0));
    sum += v;
    squares += v * v;
  }
  EXPECT_NEAR(sum / count, 0, 0.02);
  EXPECT_NEAR(squares / count, 1, 0.02);
  EXPECT_NE(detail::Directions(1).next(), detail::Directions(2).next());
}

TEST(DirectionalDerivative, ErrorIsRelativeToTheGradientsNorm) {
  // Linear: <g, v> is exact, and an error of the gradient is told against |g|, whatever v is.
  const Doubles x(50, 1.0);
  Doubles gradient(50, 1.0);
  const auto f = [](std::span<const double> at) {
    double sum = 0;
    for (const double value : at) {
      sum += value;
    }
    return sum;
  };
  EXPECT_LT(directional_error<double>(x, gradient, f), 1e-9);
  gradient[0] += 1e-3;
  double largest = 0;
  for (std::uint64_t seed = 1; seed < 200; ++seed) {
    const double error = directional_error<double>(x, gradient, f, {.directions = 1, .seed = seed});
    largest = std::max(largest, error);
  }
  EXPECT_LT(largest, 1e-3 * std::sqrt(3.0) / std::sqrt(50.0) * 1.01);
}

TEST(DirectionalDerivative, OptionsAreHeeded) {
  const Smooth f(20);
  std::int64_t calls = 0;
  const auto counted = [&](std::span<const double> at) {
    ++calls;
    return f(at);
  };
  static_cast<void>(directional_error<double>(f.x, f.gradient, counted));
  EXPECT_EQ(calls, 16) << "eight directions";
  calls = 0;
  static_cast<void>(directional_error<double>(f.x, f.gradient, counted, {.directions = 3}));
  EXPECT_EQ(calls, 6);
  EXPECT_NE(f.error(f.gradient, {.seed = 1}), f.error(f.gradient, {.seed = 2}));
  EXPECT_EQ(f.error(f.gradient, {.seed = 1}), f.error(f.gradient, {.seed = 1}));
  // Of the square of the step where it is the step that limits.
  const double coarse = f.error(f.gradient, {.step = 2e-2});
  EXPECT_NEAR(coarse / f.error(f.gradient, {.step = 1e-2}), 4, 0.1);
}

TEST(DirectionalDerivative, GradientsOfAnyStorageType) {
  const Smooth f(10);
  std::vector<float> single(f.gradient.begin(), f.gradient.end());
  EXPECT_LT(directional_error<float>(f.x, single, f), 1e-7);
  std::vector<bfloat16> half;
  for (const double g : f.gradient) {
    half.emplace_back(static_cast<float>(g));
  }
  const double rounded = directional_error<bfloat16>(f.x, half, f);
  EXPECT_GT(rounded, 1e-5);
  EXPECT_LT(rounded, 1e-2);
}

TEST(DirectionalDerivative, NothingAndNaN) {
  const auto zero = [](std::span<const double>) { return 0.0; };
  EXPECT_EQ(directional_error<double>(Doubles{}, Doubles{}, zero), 0);
  EXPECT_EQ(directional_error<double>(Doubles{1, 2}, Doubles{0, 0}, zero), 0);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isnan(directional_error<double>(Doubles{1, 2}, Doubles{0, nan}, zero)));
  int call = 0;
  const auto once = [&](std::span<const double>) { return call++ == 3 ? nan : 0.0; };
  EXPECT_TRUE(std::isnan(directional_error<double>(Doubles{1, 2}, Doubles{0, 0}, once)));
  call = 0;
  EXPECT_FALSE(
      judge_directions<double>("x", Doubles{1, 2}, Doubles{0, 0}, once, kernel_f32).passed);
}

TEST(DirectionalDerivative, GateHasItsFloorAndNoise) {
  const Smooth f(10);
  Doubles off = f.gradient;
  off[0] *= 1 + 1e-4;
  const Gate strict = judge_directions<double>("grad.x", f.x, off, f, kernel_f32);
  EXPECT_EQ(strict.kind, GateKind::directional_derivative);
  EXPECT_EQ(strict.tensor, "grad.x");
  EXPECT_EQ(strict.limit, 1e-6);
  EXPECT_FALSE(strict.passed);
  EXPECT_TRUE(judge_directions<double>("x", f.x, off, f, kernel_f32, {}, 1e-4).passed);
}

TEST(DirectionalDerivative, RefusesWhatCannotBe) {
  const auto f = [](std::span<const double>) { return 0.0; };
  const auto refusal = [&](const Doubles& gradient, const DirectionOptions& options) {
    return test::thrown_text<Error>([&] {
      static_cast<void>(directional_error<double>(Doubles{1, 2}, gradient, f, options));
    });
  };
  EXPECT_EQ(refusal({1}, {}),
            "numerics::directional_error: gradient.size = 1: must equal x.size (2)");
  EXPECT_EQ(refusal({1, 2}, {.directions = 0}),
            "numerics::directional_error: options.directions = 0: must be >= 1");
  EXPECT_EQ(refusal({1, 2}, {.step = 0}),
            "numerics::directional_error: options.step = 0: must be > 0 and finite");
}

}  // namespace
}  // namespace heddle::numerics

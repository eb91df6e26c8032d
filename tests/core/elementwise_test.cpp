// Mutants tried: the lower bound of exp at -87 (subnormal results lost), its upper one at 88; the
// second part of ln 2 left out; a coefficient of the polynomial wrong in its 20th bit; scale by one
// factor; log1p without what u dropped; log of a subnormal not rescaled; sigmoid from e^x for x > 0;
// softplus without max; the rest of a span computed by std::exp.
#include "heddle/core/elementwise.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle {
namespace {

constexpr float inf = std::numeric_limits<float>::infinity();

/// Distance to the exact value in units of the last place of a float of its size.
double ulps(float value, double exact) {
  if (std::isnan(exact)) {
    return std::isnan(value) ? 0 : inf;
  }
  if (std::isinf(static_cast<float>(exact))) {
    return value == static_cast<float>(exact) ? 0 : inf;
  }
  int exponent = -125;
  if (std::abs(exact) >= 0x1p-126) {
    std::frexp(exact, &exponent);
  }
  return std::abs(value - exact) / std::ldexp(1.0, exponent - 24);
}

struct Sweep {
  Elementwise function;
  std::string name;
  std::function<double(double)> exact;
  float low;
  float high;
  double bound;
};

std::vector<Sweep> sweeps() {
  const auto softplus = [](double x) {
    return std::fmax(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
  };
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  const auto as_exp = [](double x) { return std::exp(x); };
  const auto as_log = [](double x) { return std::log(x); };
  const auto as_log1p = [](double x) { return std::log1p(x); };
  return {
      {Elementwise::exp, "exp", as_exp, -86, 0, 1},
      {Elementwise::exp, "exp", as_exp, -inf, inf, 1},
      {Elementwise::exp, "exp of a subnormal result", as_exp, -105, -86, 1},
      {Elementwise::exp, "exp near its end", as_exp, 88, 90, 1},
      {Elementwise::log, "log", as_log, -inf, inf, 1},
      {Elementwise::log, "log near 1", as_log, 0.7F, 1.5F, 1},
      {Elementwise::log, "log of subnormals", as_log, 0, 0x1p-125F, 1},
      {Elementwise::log1p, "log1p", as_log1p, -inf, inf, 1},
      {Elementwise::log1p, "log1p near 0", as_log1p, -0.5F, 2, 1},
      {Elementwise::softplus, "softplus", softplus, -inf, inf, 2},
      {Elementwise::softplus, "softplus", softplus, -20, 20, 2},
      {Elementwise::sigmoid, "sigmoid", sigmoid, -inf, inf, 2.5},
      {Elementwise::sigmoid, "sigmoid", sigmoid, -30, 30, 2.5},
      {Elementwise::silu, "silu", [&](double x) { return x / (1 + std::exp(-x)); }, -80, 3e38F, 3}};
}

/// Floats of [low, high], evenly over their bit patterns: every exponent is met.
std::vector<float> patterns(float low, float high, std::size_t count) {
  const auto rank = [](float x) {
    const auto bits = std::bit_cast<std::int32_t>(x);
    return static_cast<double>(bits >= 0 ? bits : std::numeric_limits<std::int32_t>::min() - bits);
  };
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) {
    const double at = rank(low) + (rank(high) - rank(low)) * static_cast<double>(i) /
                                      static_cast<double>(count - 1);
    const auto index = static_cast<std::int64_t>(std::llround(at));
    values.push_back(std::bit_cast<float>(static_cast<std::int32_t>(
        index >= 0 ? index : std::numeric_limits<std::int32_t>::min() - index)));
  }
  return values;
}

TEST(Elementwise, StaysWithinItsBoundsOverAllExponents) {
  for (const Sweep& sweep : sweeps()) {
    const std::vector<float> x = patterns(sweep.low, sweep.high, 100003);
    std::vector<float> y(x.size());
    transform<float>(sweep.function, x, y);
    double worst = 0;
    float at = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double error = ulps(y[i], sweep.exact(static_cast<double>(x[i])));
      if (!(error <= worst)) {
        worst = error;
        at = x[i];
      }
    }
    EXPECT_LE(worst, sweep.bound) << sweep.name << " at " << at;
    RecordProperty(sweep.name, std::to_string(worst));
  }
}

TEST(Elementwise, HasTheSameBitsOnEveryPathAtEveryPosition) {
  for (const Sweep& sweep : sweeps()) {
    std::vector<float> x = patterns(sweep.low, sweep.high, 5000);
    x.push_back(std::nanf(""));
    const ScopedPath scope(Path::portable);
    std::vector<float> expected(x.size());
    transform<float>(sweep.function, x, expected);
    for (const Path path : available_paths()) {
      const ScopedPath inner(path);
      for (const std::size_t first : {0U, 1U, 5U}) {
        for (const std::size_t length : {x.size() - 5, std::size_t{1}, std::size_t{19}}) {
          std::vector<float> y(length + 1, -77.0F);
          transform(sweep.function, std::span<const float>(x).subspan(first, length),
                    std::span<float>(y).first(length));
          for (std::size_t i = 0; i < length; ++i) {
            ASSERT_TRUE(std::bit_cast<std::uint32_t>(y[i]) ==
                            std::bit_cast<std::uint32_t>(expected[first + i]) ||
                        (std::isnan(y[i]) && std::isnan(expected[first + i])))
                << sweep.name << " " << path_name(path) << " at " << x[first + i];
          }
          ASSERT_EQ(y[length], -77.0F);
        }
      }
    }
  }
}

TEST(Elementwise, MeetsTheEdges) {
  const auto value = [](Elementwise function, float x) {
    transform_in_place(function, std::span<float>(&x, 1));
    return x;
  };
  for (const Path path : available_paths()) {
    const ScopedPath scope(path);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(value(Elementwise::exp, -inf)), 0U);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(value(Elementwise::exp, -200)), 0U);
    EXPECT_EQ(value(Elementwise::exp, 0), 1.0F);
    EXPECT_EQ(value(Elementwise::exp, 88.72F), std::exp(88.72F));
    EXPECT_EQ(value(Elementwise::exp, 88.73F), inf);
    EXPECT_EQ(value(Elementwise::exp, 3e38F), inf);
    EXPECT_EQ(value(Elementwise::exp, inf), inf);
    EXPECT_EQ(value(Elementwise::exp, -103.0F), 0x1p-149F);
    EXPECT_EQ(value(Elementwise::log, 0), -inf);
    EXPECT_EQ(value(Elementwise::log, 1), 0.0F);
    EXPECT_EQ(value(Elementwise::log, inf), inf);
    EXPECT_TRUE(std::isnan(value(Elementwise::log, -1)));
    EXPECT_EQ(value(Elementwise::log1p, -1), -inf);
    EXPECT_EQ(value(Elementwise::log1p, inf), inf);
    EXPECT_EQ(value(Elementwise::log1p, 1e-30F), 1e-30F);
    EXPECT_TRUE(std::isnan(value(Elementwise::log1p, -1.5F)));
    EXPECT_EQ(value(Elementwise::softplus, -inf), 0.0F);
    EXPECT_EQ(value(Elementwise::softplus, inf), inf);
    EXPECT_EQ(value(Elementwise::softplus, 1000), 1000.0F);
    EXPECT_EQ(value(Elementwise::sigmoid, -inf), 0.0F);
    EXPECT_EQ(value(Elementwise::sigmoid, inf), 1.0F);
    EXPECT_EQ(value(Elementwise::sigmoid, 0), 0.5F);
    EXPECT_EQ(value(Elementwise::silu, 0), 0.0F);
    EXPECT_EQ(value(Elementwise::silu, inf), inf);
    for (const Elementwise function :
         {Elementwise::exp, Elementwise::log, Elementwise::log1p, Elementwise::softplus,
          Elementwise::sigmoid, Elementwise::silu}) {
      EXPECT_TRUE(std::isnan(value(function, std::nanf("")))) << static_cast<int>(function);
    }
  }
}

TEST(Elementwise, OfDoublesIsTheStandardLibrarys) {
  const std::vector<double> x = {-3, -0.25, 0.5, 2, 40};
  for (const Sweep& sweep : sweeps()) {
    std::vector<double> y(x.size());
    transform<double>(sweep.function, x, y);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double exact = sweep.exact(x[i]);
      EXPECT_TRUE((std::isnan(y[i]) && std::isnan(exact)) ||
                  std::abs(y[i] - exact) <= 4e-16 * std::abs(exact))
          << sweep.name;
    }
  }
}

TEST(Convert, WidensExactlyAndRoundsToNearestEven) {
  test::Random random(9);
  std::vector<float> x = {0.0F,          -0.0F,          inf,       -inf,
                          std::nanf(""), -std::nanf(""), 0x1.01p0F, 0x1.03p0F,
                          0x1.010002p0F, 3.4e38F,        1e-45F};
  while (x.size() < 1003) {
    x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random.bits())));
  }
  for (const Path path : available_paths()) {
    const ScopedPath scope(path);
    std::vector<bfloat16> narrow_values(x.size());
    std::vector<float> back(x.size());
    convert(std::span<const float>(x), std::span<bfloat16>(narrow_values));
    convert(std::span<const bfloat16>(narrow_values), std::span<float>(back));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const bfloat16 expected = narrow<bfloat16>(x[i]);
      ASSERT_EQ(std::bit_cast<std::uint16_t>(narrow_values[i]),
                std::bit_cast<std::uint16_t>(expected))
          << path_name(path) << " " << x[i];
      ASSERT_EQ(std::bit_cast<std::uint32_t>(back[i]),
                static_cast<std::uint32_t>(std::bit_cast<std::uint16_t>(expected)) << 16);
    }
  }
}

TEST(ElementwiseErrors, NameTheLengthAndTheFunction) {
  std::vector<float> x(3), y(2);
  std::vector<bfloat16> narrow_values(3);
  const auto text = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(text([&] { transform<float>(Elementwise::exp, x, y); }),
            "transform: y.size = 2: must equal x.size (3)");
  EXPECT_EQ(text([&] { transform<float>(static_cast<Elementwise>(9), x, x); }),
            "transform: function = 9: must be exp, log, log1p, softplus, sigmoid or silu");
  EXPECT_EQ(text([&] { convert(std::span<const bfloat16>(narrow_values), std::span<float>(y)); }),
            "convert: to.size = 2: must equal from.size (3)");
}

}  // namespace
}  // namespace heddle

#include "heddle/numerics/ulp.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"

// Mutants that must fail here: bits subtracted without the sign; -0 apart from 0; a difference that
// overflows I64; ulps of another type; an exponent below the subnormals' own; NaN as near as a number.

namespace heddle::numerics {
namespace {

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

template <class T>
T after(T value, int steps) {
  for (int i = 0; i < steps; ++i) {
    value = std::nextafter(value, std::numeric_limits<T>::infinity());
  }
  return value;
}

TEST(Ulp, CountsRepresentableValuesBetween) {
  for (const float x : {1.0F, -1.0F, 0.0F, 1e-45F, -1e-45F, 3.4e38F, 0.99999994F}) {
    for (int n = 0; n < 5; ++n) {
      EXPECT_EQ(ulp_distance(x, after(x, n)), static_cast<std::uint64_t>(n)) << x;
      EXPECT_EQ(ulp_distance(after(x, n), x), static_cast<std::uint64_t>(n)) << x;
    }
  }
  for (const double x : {1.0, -2.0, -5e-324, 1.7e308}) {
    EXPECT_EQ(ulp_distance(x, after(x, 4)), 4U) << x;
  }
  EXPECT_EQ(ulp_distance(bfloat16(1.0F), bfloat16(1.0078125F)), 1U);
  EXPECT_EQ(ulp_distance(bfloat16(-1.0F), bfloat16(1.0F)), 2U * 0x3F80U);
}

TEST(Ulp, ZerosAreOneAndInfinityIsTheNextValue) {
  EXPECT_EQ(ulp_distance(-0.0, 0.0), 0U);
  EXPECT_EQ(ulp_distance(-0.0F, std::numeric_limits<float>::denorm_min()), 1U);
  EXPECT_EQ(ulp_distance(std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity()),
            1U);
  EXPECT_EQ(ulp_distance(inf, inf), 0U);
  EXPECT_EQ(ulp_distance(-std::numeric_limits<double>::max(), std::numeric_limits<double>::max()),
            2 * 0x7FEFFFFFFFFFFFFFULL)
      << "beyond I64";
}

TEST(Ulp, NanIsFartherThanAnything) {
  constexpr auto farthest = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(ulp_distance(nan, nan), farthest);
  EXPECT_EQ(ulp_distance(1.0, nan), farthest);
  EXPECT_EQ(ulp_distance(std::numeric_limits<float>::quiet_NaN(), 1.0F), farthest);
  EXPECT_EQ(ulp_distance(bfloat16(std::numeric_limits<float>::quiet_NaN()), bfloat16(1.0F)),
            farthest);
  EXPECT_LT(ulp_distance(-inf, inf), farthest);
}

TEST(Ulp, SizeIsTheDistanceToTheNextValue) {
  test::Random random(3);
  for (int i = 0; i < 2000; ++i) {
    const double x =
        std::ldexp(random.uniform(-2, 2), static_cast<int>(random.integer(-1080, 1020)));
    const double size = std::abs(x);
    EXPECT_EQ(ulp_of<double>(x), std::nextafter(size, inf) - size) << x;
    const auto single = static_cast<float>(std::ldexp(x, -100));
    if (std::isfinite(single) && std::abs(single) < 1e38F) {
      const float magnitude = std::abs(single);
      EXPECT_EQ(ulp_of<float>(static_cast<double>(single)),
                static_cast<double>(std::nextafter(magnitude, 3e38F) - magnitude))
          << single;
    }
  }
  EXPECT_EQ(ulp_of<float>(12.42), 0x1p-20) << "an ulp of the log of a vocabulary: 9.5e-7";
  EXPECT_EQ(ulp_of<bfloat16>(1.0), 0x1p-7);
  EXPECT_EQ(ulp_of<bfloat16>(0), 0x1p-133);
  EXPECT_EQ(ulp_of<float>(0), 0x1p-149);
  EXPECT_EQ(ulp_of<double>(0), 0x1p-1074);
  EXPECT_TRUE(std::isnan(ulp_of<float>(inf)));
  EXPECT_TRUE(std::isnan(ulp_of<float>(nan)));
}

}  // namespace
}  // namespace heddle::numerics

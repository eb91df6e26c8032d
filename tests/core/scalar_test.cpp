#include "heddle/core/scalar.hpp"

#include <cmath>
#include <limits>
#include <type_traits>

#include <gtest/gtest.h>

namespace heddle {
namespace {

struct Counting {
  float value = 0;
};
struct Stranger {};

}  // namespace

template <>
struct ScalarTraits<Counting> {
  using Accumulator = Counting;
};

namespace {

static_assert(Storage<bfloat16> && Storage<float> && Storage<double>);
static_assert(Accumulator<float> && Accumulator<double> && !Accumulator<bfloat16>);
static_assert(std::is_same_v<AccumulatorOf<bfloat16>, float>);
static_assert(Accumulator<Counting> && !Storage<Stranger> && !Storage<int>);

TEST(Scalar, NarrowingRoundsToNearestEvenOnce) {
  // Between 1 and 1 + 2^-7 a tie goes to the even fraction.
  EXPECT_EQ(static_cast<float>(narrow<bfloat16>(1.0F + 0x1.0p-8F)), 1.0F);
  EXPECT_EQ(static_cast<float>(narrow<bfloat16>(1.0F + 3 * 0x1.0p-8F)), 1.0F + 0x1.0p-6F);
  EXPECT_EQ(static_cast<float>(narrow<bfloat16>(1.0F + 0x1.02p-8F)), 1.0F + 0x1.0p-7F);
  EXPECT_EQ(static_cast<float>(narrow<bfloat16>(3.4e38F)), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(
      std::isnan(static_cast<float>(narrow<bfloat16>(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::signbit(static_cast<float>(narrow<bfloat16>(-0.0F))));
}

TEST(Scalar, WideningIsExact) {
  for (const float value : {0.0F, -1.5F, 0x1.fep100F, -0x1.0p-130F}) {
    EXPECT_EQ(widen<float>(bfloat16(value)), value);
    EXPECT_EQ(widen<double>(value), static_cast<double>(value));
  }
}

}  // namespace
}  // namespace heddle

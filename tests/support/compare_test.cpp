#include "support/compare.hpp"

#include <cmath>
#include <limits>
#include <vector>

namespace heddle::test {
namespace {

using Values = std::vector<double>;
const double nan = std::numeric_limits<double>::quiet_NaN();
const double inf = std::numeric_limits<double>::infinity();

TEST(Compare, AcceptsWithinAndRefusesBeyondTheTolerance) {
  EXPECT_TRUE(close(Values{1.0, -2.0}, Values{1.0, -2.0}, 0.0));
  EXPECT_TRUE(close(Values{1.0, -2.001}, Values{1.0, -2.0}, 1e-3));
  EXPECT_FALSE(close(Values{1.0, -2.1}, Values{1.0, -2.0}, 1e-3));
}

TEST(Compare, TwoNegativesThatDifferAreADifference) {
  EXPECT_FALSE(close(Values{-5.0}, Values{-1.0}, 1e-3));
}

TEST(Compare, NanMeetsNanAlone) {
  EXPECT_FALSE(close(Values{nan, 1.0}, Values{0.0, 1.0}, 1.0));
  EXPECT_FALSE(close(Values{0.0, 1.0}, Values{nan, 1.0}, 1.0));
  EXPECT_TRUE(close(Values{nan, 1.0}, Values{nan, 1.0}, 0.0));
}

TEST(Compare, InfinityMeetsItsOwnSignAlone) {
  EXPECT_TRUE(close(Values{inf, 1.0}, Values{inf, 1.0}, 0.0));
  EXPECT_FALSE(close(Values{-inf, 1.0}, Values{inf, 1.0}, 1.0));
  EXPECT_FALSE(close(Values{1e300, 1.0}, Values{inf, 1.0}, 1.0));
}

TEST(Compare, ZerosMustBeMetExactly) {
  EXPECT_TRUE(close(Values{0.0, -0.0}, Values{0.0, 0.0}, 0.0));
  EXPECT_FALSE(close(Values{1e-300}, Values{0.0}, 1.0));
}

TEST(Compare, NothingComparedIsAFailure) {
  EXPECT_FALSE(close(Values{}, Values{}, 1.0));
  EXPECT_FALSE(close(Values{nan}, Values{nan}, 1.0));
  EXPECT_FALSE(close(Values{1.0}, Values{1.0, 1.0}, 1.0));
}

TEST(Compare, BitsTellSignedZerosAndOneUlpApart) {
  EXPECT_FALSE(same_bits(Values{0.0}, Values{-0.0}));
  EXPECT_FALSE(same_bits(Values{1.0}, Values{std::nextafter(1.0, 2.0)}));
  EXPECT_TRUE(same_bits(Values{nan}, Values{nan}));
}

}  // namespace
}  // namespace heddle::test

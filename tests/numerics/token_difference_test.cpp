#include "heddle/numerics/token_difference.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

// Mutants that must fail here: ulps of the log-prob itself; of the finer type; the lse of another entry;
// an entropy near 0 told against itself; the mean over unscored tokens; entries that are left out read; a
// NaN passed over.

namespace heddle::numerics {
namespace {

using Doubles = std::vector<double>;
using Floats = std::vector<float>;
using Mask = std::vector<std::uint8_t>;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

template <class T>
NamedTensor tensor(const std::vector<T>& values) {
  return {.name = "logps",
          .shape = {static_cast<std::int64_t>(values.size())},
          .elements = std::span<const T>(values)};
}

TEST(TokenDifference, LogProbsInNats) {
  const TokenDifference d = log_prob_difference(
      tensor(Doubles{-1, -2, -3}), tensor(Doubles{-1, -2.5, -3.25}), LogProbUnit::nats);
  EXPECT_EQ(d.value, 0.5);
  EXPECT_EQ(d.entry, 1);
  EXPECT_EQ(d.compared, 3);
}

TEST(TokenDifference, LogProbsInUlpsOfTheLogSumExp) {
  const Floats b = {-1e-4F, -3.0F};
  const Floats c = {-1e-4F + 0x1p-20F, -3.0F};
  const double difference = static_cast<double>(c[0]) - static_cast<double>(b[0]);
  // lse 12.4: an ulp is 2^-20, 1e5 ulps of the log-prob.
  const auto ulps = [&](const Doubles& lse) {
    return log_prob_difference(tensor(b), tensor(c), LogProbUnit::ulps, lse).value;
  };
  EXPECT_EQ(ulps({12.4, 1}), difference / 0x1p-20);
  EXPECT_NEAR(ulps({12.4, 1}), 1, 1e-4);
  EXPECT_EQ(ulps({-12.4, 1}), ulps({12.4, 1})) << "its size, not its sign";
  EXPECT_EQ(ulps({3, 12.4}), difference / 0x1p-22);
  EXPECT_EQ(ulps({std::numeric_limits<double>::infinity(), 1}),
            difference / ulp_of<float>(static_cast<double>(b[0])))
      << "no lse of its own";
  EXPECT_EQ(ulps({}), difference / 0x1p-22) << "the largest log-prob stands for the lse";
}

TEST(TokenDifference, UlpsAreOfTheCoarserType) {
  const std::vector<bfloat16> half = {bfloat16(-1.0F)};
  const auto ulps = [](const NamedTensor& b, const NamedTensor& c) {
    return log_prob_difference(b, c, LogProbUnit::ulps).value;
  };
  EXPECT_EQ(ulps(tensor(half), tensor(Floats{-1.0F - 0x1p-7F})), 1);
  EXPECT_EQ(ulps(tensor(Doubles{-1}), tensor(Floats{-1.0F - 0x1p-23F})), 1);
  EXPECT_EQ(ulps(tensor(Doubles{-1}), tensor(Doubles{-1 - 0x1p-52})), 1);
}

TEST(TokenDifference, EntropiesAgainstThemselvesOrTheMean) {
  const Doubles b = {4, 2, 0, 1e-6, 0};
  const auto off = [&](std::size_t at, double by) {
    Doubles c = b;
    c[at] += by;
    return entropy_difference(tensor(b), tensor(c)).value;
  };
  const double mean = (4 + 2 + 1e-6) / 3;
  EXPECT_NEAR(off(0, 0.004), 0.001, 1e-12);
  EXPECT_NEAR(off(1, 0.002), 0.002 / mean, 1e-12) << "below the mean, over those that are not 0";
  EXPECT_NEAR(off(3, 1e-6), 1e-6 / mean, 1e-12);
  EXPECT_NEAR(off(2, 1e-3), 1e-3 / mean, 1e-12) << "0 is an entropy too";
  EXPECT_TRUE(
      std::isinf(entropy_difference(tensor(Doubles{0, 0}), tensor(Doubles{0, 1e-9})).value));
}

TEST(TokenDifference, EntriesLeftOutAreNotRead) {
  const Doubles b = {-1, -2, nan};
  const Doubles c = {-1.5, -2.25, -3};
  const Mask left_out = {1, 0, 1};
  const TokenDifference d =
      log_prob_difference(tensor(b), tensor(c), LogProbUnit::nats, {}, left_out);
  EXPECT_EQ(d.value, 0.25);
  EXPECT_EQ(d.entry, 1);
  EXPECT_EQ(d.compared, 1);
  EXPECT_FALSE(d.non_finite);
  EXPECT_EQ(entropy_difference(tensor(b), tensor(c), Mask{1, 1, 1}).compared, 0);
}

TEST(TokenDifference, WhatIsNotFiniteIsTold) {
  for (const double bad : {nan, std::numeric_limits<double>::infinity()}) {
    const TokenDifference d = log_prob_difference(tensor(Doubles{-1, bad, bad}),
                                                  tensor(Doubles{-1, bad, -2}), LogProbUnit::ulps);
    ASSERT_TRUE(d.non_finite.has_value());
    EXPECT_EQ(d.non_finite->count, 2);
    EXPECT_EQ(d.non_finite->entry, 1);
    EXPECT_TRUE(entropy_difference(tensor(Doubles{1}), tensor(Doubles{bad})).non_finite);
  }
}

TEST(TokenDifference, RefusesLengthsThatDiffer) {
  const Doubles two = {1, 2};
  const Doubles one = {1};
  const std::vector<std::int32_t> ids = {1, 2};
  EXPECT_EQ(test::thrown_text<Error>([&] {
              static_cast<void>(log_prob_difference(tensor(two), tensor(one), LogProbUnit::nats));
            }),
            "numerics::log_prob_difference: candidate.size = 1: must equal baseline.size (2)");
  EXPECT_EQ(
      test::thrown_text<Error>([&] {
        static_cast<void>(log_prob_difference(tensor(two), tensor(two), LogProbUnit::ulps, one));
      }),
      "numerics::log_prob_difference: lse.size = 1: must equal baseline.size (2)");
  EXPECT_EQ(test::thrown_text<Error>(
                [&] { static_cast<void>(entropy_difference(tensor(two), tensor(two), Mask{0})); }),
            "numerics::entropy_difference: left_out.size = 1: must equal baseline.size (2)");
  EXPECT_EQ(test::thrown_text<Error>(
                [&] { static_cast<void>(entropy_difference(tensor(two), tensor(ids))); }),
            "numerics::entropy_difference: tensor = logps: must hold floating numbers");
}

}  // namespace
}  // namespace heddle::numerics

// Mutants tried: the fold starts from 0; from the right; bf16 rounded at every step; integer overflow
// left to the compiler's mercy; max keeps the last NaN; max(+0, -0) = -0; pairs first (a tree);
// a block's remainder dropped; a NaN in the sum replaced on one path.
#include "heddle/mesh/fold.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/isa.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/thrown_text.hpp"

namespace heddle {
namespace {

template <class A, class T>
std::vector<T> folded(Reduce reduce, const std::vector<std::vector<T>>& inputs) {
  std::vector<const T*> pointers;
  for (const std::vector<T>& input : inputs) {
    pointers.push_back(input.data());
  }
  std::vector<T> out(inputs[0].size(), test::poison<T>());
  fold<A>(reduce, std::span<const T* const>(pointers), static_cast<std::int64_t>(out.size()),
          out.data());
  return out;
}

TEST(Fold, IsALeftFoldInRankOrder) {
  // 1e8 + 1 is 1e8 in float, so only ((1e8 + 1) - 1e8) + 1 gives 1.
  EXPECT_EQ((folded<float, float>(Reduce::sum, {{1e8F}, {1.0F}, {-1e8F}, {1.0F}})[0]), 1.0F);
  EXPECT_EQ((folded<float, float>(Reduce::sum, {{1e8F}, {-1e8F}, {1.0F}, {1.0F}})[0]), 2.0F);
}

TEST(Fold, BlocksAndRemaindersDoNotShow) {
  test::Random random(11);
  for (const std::int64_t count : {0, 1, 15, 17, 4095, 4096, 4097, 9000}) {
    std::vector<std::vector<float>> inputs;
    for (int member = 0; member < 5; ++member) {
      inputs.push_back(random.normals<float>(count));
    }
    std::vector<float> expected = inputs[0];
    for (std::size_t member = 1; member < inputs.size(); ++member) {
      for (std::size_t i = 0; i < expected.size(); ++i) {
        expected[i] += inputs[member][i];
      }
    }
    EXPECT_TRUE(test::same_bits((folded<float, float>(Reduce::sum, inputs)), expected));
  }
}

TEST(Fold, EveryPathHasTheSameBits) {
  test::Random random(12);
  for (const std::int64_t count : {1, 15, 16, 17, 100, 5000}) {
    std::vector<std::vector<float>> inputs;
    std::vector<std::vector<bfloat16>> narrow;
    for (int member = 0; member < 4; ++member) {
      inputs.push_back(random.normals<float>(count));
      narrow.push_back(random.normals<bfloat16>(count));
      for (float& value : inputs.back()) {
        if (random.chance(0.05)) {
          // Infinities, both zeros, NaN of either sign with a payload of its own.
          constexpr std::array<std::uint32_t, 6> odd = {0x7F800000, 0xFF800000, 0x80000000,
                                                        0x00000000, 0x7FC00000, 0xFFC00000};
          std::uint32_t bits = odd[static_cast<std::size_t>(random.integer(0, 5))];
          bits += (bits & 0x00400000U) != 0 ? static_cast<std::uint32_t>(random.integer(1, 99)) : 0;
          value = std::bit_cast<float>(bits);
        }
      }
    }
    std::vector<float> expected = inputs[0];
    for (std::size_t member = 1; member < inputs.size(); ++member) {
      for (std::size_t i = 0; i < expected.size(); ++i) {
        expected[i] = detail::add(expected[i], inputs[member][i]);
      }
    }
    for (const Path path : available_paths()) {
      const ScopedPath scope(path);
      // inf - inf makes a NaN whose sign is the processor's; all others are given.
      EXPECT_TRUE(test::same_bits((folded<float, float>(Reduce::sum, inputs)), expected))
          << path_name(path) << " " << count;
    }
    const std::vector<bfloat16> best = folded<float, bfloat16>(Reduce::sum, narrow);
    for (const Path path : available_paths()) {
      const ScopedPath scope(path);
      EXPECT_TRUE(test::same_bits((folded<float, bfloat16>(Reduce::sum, narrow)), best))
          << path_name(path) << " " << count;
    }
  }
}

TEST(Fold, NarrowTypesAreRoundedOnce) {
  // In bf16 steps 256 + 1 stays 256; in float it is 257, and 258 + 0 has a bf16 of its own.
  const auto narrow = [](float value) { return bfloat16(value); };
  EXPECT_EQ(static_cast<float>(
                folded<float, bfloat16>(Reduce::sum, {{narrow(256)}, {narrow(1)}, {narrow(1)}})[0]),
            258.0F);
  EXPECT_EQ(
      static_cast<float>(folded<float, Eigen::half>(
          Reduce::sum, {{Eigen::half(2048.0F)}, {Eigen::half(1.0F)}, {Eigen::half(1.0F)}})[0]),
      2050.0F);
}

TEST(Fold, AWiderAccumulatorIsUsedWhereAsked) {
  const std::vector<std::vector<float>> inputs = {{1e8F}, {1.0F}, {-1e8F}};
  EXPECT_EQ((folded<float, float>(Reduce::sum, inputs)[0]), 0.0F);
  EXPECT_EQ((folded<double, float>(Reduce::sum, inputs)[0]), 1.0F);
}

TEST(Fold, IntegersWrap) {
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ((folded<std::int32_t, std::int32_t>(Reduce::sum, {{most}, {1}})[0]),
            std::numeric_limits<std::int32_t>::min());
  EXPECT_EQ((folded<std::uint8_t, std::uint8_t>(Reduce::sum, {{200}, {100}})[0]), 44);
}

template <class T>
T with_bits(std::uint32_t bits) {
  return std::bit_cast<T>(
      static_cast<std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>>(bits));
}

TEST(Fold, MinusZeroSurvivesSums) {
  EXPECT_TRUE(std::signbit(folded<float, float>(Reduce::sum, {{-0.0F}})[0]));
  EXPECT_TRUE(std::signbit(folded<float, float>(Reduce::sum, {{-0.0F}, {-0.0F}})[0]));
  EXPECT_FALSE(std::signbit(folded<float, float>(Reduce::sum, {{-0.0F}, {0.0F}})[0]));
}

TEST(Fold, OneMemberIsCopiedBitsAndAll) {
  const auto signalling = with_bits<bfloat16>(0x7F81);
  const bfloat16 kept = folded<float, bfloat16>(Reduce::sum, {{signalling}})[0];
  EXPECT_EQ(std::bit_cast<std::uint16_t>(kept), 0x7F81);
}

TEST(Fold, MaxAndMinAreThoseOfTheStandard) {
  EXPECT_FALSE(std::signbit(folded<float, float>(Reduce::max, {{-0.0F}, {0.0F}})[0]));
  EXPECT_FALSE(std::signbit(folded<float, float>(Reduce::max, {{0.0F}, {-0.0F}})[0]));
  EXPECT_TRUE(std::signbit(folded<float, float>(Reduce::min, {{-0.0F}, {0.0F}})[0]));
  EXPECT_TRUE(std::signbit(folded<float, float>(Reduce::min, {{0.0F}, {-0.0F}})[0]));
  EXPECT_EQ((folded<float, float>(Reduce::max, {{1.0F}, {3.0F}, {2.0F}})[0]), 3.0F);
  EXPECT_EQ((folded<float, float>(Reduce::min, {{2.0F}, {1.0F}, {3.0F}})[0]), 1.0F);
  EXPECT_EQ((folded<std::int64_t, std::int64_t>(Reduce::max, {{-5}, {-7}})[0]), -5);
  EXPECT_EQ((folded<std::uint8_t, std::uint8_t>(Reduce::min, {{200}, {100}})[0]), 100);
}

TEST(Fold, TheFirstNaNWinsWithItsPayload) {
  const auto first = with_bits<float>(0x7FC00111);
  const auto second = with_bits<float>(0xFFC00222);
  for (const Reduce reduce : {Reduce::max, Reduce::min, Reduce::sum}) {
    const float kept = folded<float, float>(reduce, {{1.0F}, {first}, {second}, {2.0F}})[0];
    EXPECT_EQ(std::bit_cast<std::uint32_t>(kept), 0x7FC00111U);
    const float other = folded<float, float>(reduce, {{1.0F}, {second}, {first}, {2.0F}})[0];
    EXPECT_EQ(std::bit_cast<std::uint32_t>(other), 0xFFC00222U);
  }
  const auto narrow = with_bits<bfloat16>(0x7FC5);
  const bfloat16 kept =
      folded<float, bfloat16>(Reduce::max, {{bfloat16(9.0F)}, {narrow}, {bfloat16(1.0F)}})[0];
  EXPECT_EQ(std::bit_cast<std::uint16_t>(kept), 0x7FC5);
}

TEST(Fold, ResultMayLieOnAnInput) {
  std::vector<float> a = {1, 2, 3};
  std::vector<float> b = {10, 20, 30};
  const std::vector<const float*> inputs = {a.data(), b.data()};
  fold<float>(Reduce::sum, std::span<const float* const>(inputs), 3, b.data());
  EXPECT_EQ(b, (std::vector<float>{11, 22, 33}));
}

TEST(Fold, RefusesAnUnknownReduction) {
  float value = 1;
  const float* const input = &value;
  EXPECT_EQ(test::thrown_text<Error>([&] {
              fold<float>(static_cast<Reduce>(7), std::span<const float* const>(&input, 1), 1,
                          &value);
            }),
            "fold: reduce = 7: must be sum, max or min");
}

}  // namespace
}  // namespace heddle

// Mutants tried: max with its operands' NaN rule the other way round; a partial store one element too
// long; the fill of a partial load left out; bf16 rounded towards zero; fold_sum from left to right;
// the mantissa's lower bound 1 instead of sqrt(1/2).
#include "heddle/core/simd.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle {
namespace {

constexpr std::int64_t values_count = 1000;

/// The results of every operation of F32 on a row of x and y, written by one path.
struct Results {
  std::vector<float> values;
  std::vector<bfloat16> rounded;
  float sum = 0;
  float largest = 0;
};

}  // namespace

// The same text on every path, as a room's kernel would be.
#if defined(__x86_64__)
#include "heddle/core/region/avx512_begin.inl"
namespace v4 {
#include "core/simd_operations.inl"
}  // namespace v4
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"
namespace v3 {
#include "core/simd_operations.inl"
}  // namespace v3
#include "heddle/core/region/end.inl"
#elif defined(__aarch64__)
namespace neon {
#include "core/simd_operations.inl"
}  // namespace neon
#endif
namespace portable {
#include "core/simd_operations.inl"
}  // namespace portable

namespace {

Results run(const std::vector<float>& x, const std::vector<float>& y) {
  Results results;
  results.values.assign(x.size() * 24, test::poison<float>());
  results.rounded.assign(x.size(), test::poison<bfloat16>());
  pick_path(&v4::every_operation, &v3::every_operation, &neon::every_operation,
            &portable::every_operation)(x.data(), y.data(), static_cast<std::int64_t>(x.size()),
                                        results.values.data(), results.rounded.data());
  float folds[2];
  pick_path(&v4::folds, &v3::folds, &neon::folds, &portable::folds)(
      x.data(), static_cast<std::int64_t>(x.size()), folds);
  results.sum = folds[0];
  results.largest = folds[1];
  return results;
}

std::vector<float> arguments(std::uint64_t seed) {
  test::Random random(seed);
  std::vector<float> values = {
      0.0F,          -0.0F,     1.0F,          -1.0F,
      INFINITY,      -INFINITY, std::nanf(""), std::numeric_limits<float>::denorm_min(),
      3.4e38F,       0x1p-126F, 0x1.008p0F,    0x1.018p0F,
      0x1.0180002p0F};
  while (static_cast<std::int64_t>(values.size()) <
         values_count + static_cast<std::int64_t>(seed)) {
    values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random.bits())));
    values.push_back(static_cast<float>(random.normal(4)));
  }
  return values;
}

TEST(Simd, EveryPathComputesTheSameBits) {
  for (const std::uint64_t seed : {1U, 2U, 6U, 11U}) {  // lengths that leave different rests
    const std::vector<float> x = arguments(seed);
    std::vector<float> y(x.rbegin(), x.rend());
    const ScopedPath scope(Path::portable);
    const Results expected = run(x, y);
    for (const Path path : available_paths()) {
      const ScopedPath inner(path);
      const Results results = run(x, y);
      for (std::size_t i = 0; i < expected.values.size(); ++i) {
        // Which NaN comes out of an operation on one is the processor's affair.
        if (std::isnan(expected.values[i]) && std::isnan(results.values[i])) {
          continue;
        }
        ASSERT_EQ(std::bit_cast<std::uint32_t>(results.values[i]),
                  std::bit_cast<std::uint32_t>(expected.values[i]))
            << path_name(path) << " operation " << i / x.size() << " of " << x[i % x.size()]
            << " and " << y[i % x.size()];
      }
      EXPECT_TRUE(test::same_bits(results.rounded, expected.rounded)) << path_name(path);
    }
  }
}

TEST(Simd, OperationsAreWhatTheyAreCalled) {
  const std::vector<float> x = arguments(4);
  const std::vector<float> y(x.rbegin(), x.rend());
  const std::size_t n = x.size();
  const Results results = run(x, y);
  const auto same = [](float a, float b) { return (std::isnan(a) && std::isnan(b)) || a == b; };
  for (std::size_t i = 0; i < n; ++i) {
    const auto result = [&](std::size_t operation) { return results.values[operation * n + i]; };
    const float a = x[i], b = y[i];
    ASSERT_TRUE(same(result(0), a + b));
    ASSERT_TRUE(same(result(1), a - b));
    const float product = a * b;
    ASSERT_TRUE(same(result(2), product));
    ASSERT_TRUE(same(result(3), a / b));
    ASSERT_TRUE(same(result(4), std::fma(a, b, 0.5F)));
    ASSERT_TRUE(same(result(5), std::fma(-a, b, 0.5F)));
    ASSERT_TRUE(same(result(6), a > b ? a : b));
    ASSERT_TRUE(same(result(7), a < b ? a : b));
    ASSERT_TRUE(same(result(8), std::abs(a)));
    ASSERT_TRUE(same(result(9), -a));
    ASSERT_EQ(result(10), a < b ? 1.0F : 2.0F);
    ASSERT_EQ(result(11), a == b ? 1.0F : 2.0F);
    ASSERT_EQ(result(12), std::isnan(a) ? 1.0F : 2.0F);
    if (std::isfinite(a)) {
      ASSERT_EQ(result(13), std::ldexp(a, 3)) << a;
      ASSERT_EQ(result(14), std::ldexp(a, -140)) << a;
    }
    if (std::isnormal(a) && a > 0) {
      ASSERT_EQ(std::ldexp(result(15), static_cast<int>(result(16))), a);
      ASSERT_GE(result(15), 0x1.6a09e4p-1F);
      ASSERT_LT(result(15), 0x1.6a09e8p0F);
    }
    ASSERT_TRUE(same(static_cast<float>(results.rounded[i]), static_cast<float>(bfloat16(a))));
    ASSERT_TRUE(same(result(17), static_cast<float>(bfloat16(a))));
  }
}

TEST(Simd, PartialLoadsFillAndPartialStoresStop) {
  const std::vector<float> x(64, 3.0F);
  for (const Path path : available_paths()) {
    const ScopedPath scope(path);
    for (int count = 0; count <= 16; ++count) {
      std::array<float, 48> out;
      std::array<bfloat16, 48> narrow;
      out.fill(-1.0F);
      narrow.fill(bfloat16(-1.0F));
      const int lanes = pick_path(&v4::partial, &v3::partial, &neon::partial, &portable::partial)(
          x.data(), count, out.data(), narrow.data());
      const int existing = std::min(count, lanes);
      for (int i = 0; i < lanes; ++i) {
        EXPECT_EQ(out[static_cast<std::size_t>(i)], i < existing ? 3.0F : 7.0F);
        EXPECT_EQ(out[static_cast<std::size_t>(16 + i)], i < existing ? 3.0F : -1.0F);
        EXPECT_EQ(static_cast<float>(narrow[static_cast<std::size_t>(i)]),
                  i < existing ? 3.0F : -1.0F);
        EXPECT_EQ(out[static_cast<std::size_t>(32 + i)], i < existing ? 3.0F : 7.0F);
      }
    }
  }
}

TEST(Simd, FoldsTakeLanesInAFixedTree) {
  std::vector<float> x = arguments(3);
  for (float& value : x) {
    value = std::isfinite(value) ? std::fmod(value, 100.0F) : 0.0F;
  }
  std::array<float, 16> lanes{};
  float largest = -INFINITY;
  for (std::size_t i = 0; i < x.size(); ++i) {
    lanes[i % 16] += x[i];
    largest = std::max(largest, x[i]);
  }
  for (std::size_t half = 8; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) {
      lanes[i] += lanes[i + half];
    }
  }
  for (const Path path : available_paths()) {
    const ScopedPath scope(path);
    const Results results = run(x, x);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(results.sum), std::bit_cast<std::uint32_t>(lanes[0]));
    EXPECT_EQ(results.largest, largest);
  }
}

}  // namespace
}  // namespace heddle

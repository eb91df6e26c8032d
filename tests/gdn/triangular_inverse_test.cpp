#include "heddle/gdn/triangular_inverse.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/chunk_matrix.hpp"
#include "heddle/core/isa.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: one early column's updates skipped, in a block and in the
// products before it; the sign of an update; a block's product cut one row short; the row of a last,
// smaller block lost; the vector behind the last whole one not written, or written too far; the part
// above the diagonal left as it was; the diagonal of t read.

namespace heddle::gdn {
namespace {

using heddle::gdn::test::all_keys;
using heddle::gdn::test::chunk_matrix;
using heddle::gdn::test::Keys;
using heddle::test::Random;

template <class A>
std::vector<A> inverse(const std::vector<A>& t, std::int64_t n) {
  std::vector<A> t_inv(t.size(), heddle::test::poison<A>());
  triangular_inverse<A>(
      n, {t.data(), static_cast<std::int64_t>(t.size()) / std::max<long>(n, 1), n},
      {t_inv.data(), static_cast<std::int64_t>(t.size()) / std::max<long>(n, 1), n});
  return t_inv;
}

/// Forward substitution in double, whatever the type of t.
template <class A>
std::vector<double> by_definition(const std::vector<A>& t, std::int64_t n) {
  std::vector<double> x(t.size(), 0.0);
  const auto at = [n](std::int64_t i, std::int64_t j) {
    return static_cast<std::size_t>(i * n + j);
  };
  for (std::int64_t c = 0; c < n; ++c) {
    x[at(c, c)] = 1;
    for (std::int64_t i = c + 1; i < n; ++i) {
      for (std::int64_t j = c; j < i; ++j) {
        x[at(i, c)] -= static_cast<double>(t[at(i, j)]) * x[at(j, c)];
      }
    }
  }
  return x;
}

double max_difference(const auto& a, const std::vector<double>& b) {
  double worst = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return worst;
}

template <class A>
std::vector<A> stored(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

TEST(GdnTriangularInverse, ByHand) {
  const std::vector<double> t{1, 0, 0, 2, 1, 0, 3, 4, 1};
  EXPECT_EQ(inverse(t, 3), (std::vector<double>{1, 0, 0, -2, 1, 0, 5, -4, 1}));
}

TEST(GdnTriangularInverse, IdenticalKeysLeaveOneSubdiagonal) {
  for (const std::int64_t n : {5, 16, 31, 64, 65}) {
    std::vector<float> t(static_cast<std::size_t>(n * n), 0.0F);
    std::vector<float> expected = t;
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t j = 0; j <= i; ++j) {
        t[static_cast<std::size_t>(i * n + j)] = 1.0F;
        expected[static_cast<std::size_t>(i * n + j)] = i == j ? 1.0F : i == j + 1 ? -1.0F : 0.0F;
      }
    }
    EXPECT_EQ(inverse(t, n), expected) << n;
  }
}

TEST(GdnTriangularInverse, WithinOneMillionthForEverySizeAndKeyFamily) {
  Random random(11);
  double worst_float = 0;
  double worst_double = 0;
  for (std::int64_t n = 1; n <= 65; ++n) {
    for (const Keys keys : all_keys) {
      for (const double beta : {random.uniform(), 1.0 - 1e-7, 1.0}) {
        const std::int64_t dim = n % 2 == 0 ? 16 : 128;
        const std::vector<double> t = chunk_matrix(n, dim, keys, beta, random);
        const auto narrow = stored<float>(t);
        const std::vector<float> x = inverse(narrow, n);
        worst_float = std::max(worst_float, max_difference(x, by_definition(narrow, n)));
        worst_double = std::max(worst_double, max_difference(inverse(t, n), by_definition(t, n)));
        for (std::int64_t i = 0; i < n; ++i) {
          for (std::int64_t j = 0; j < i; ++j) {
            ASSERT_LE(std::abs(static_cast<double>(x[static_cast<std::size_t>(i * n + j)])),
                      beta * (1 + 1e-6))
                << n << " (" << i << ", " << j << ")";
          }
        }
      }
    }
  }
  RecordProperty("float", std::to_string(worst_float));
  EXPECT_LT(worst_float, 1e-6);
  EXPECT_LT(worst_double, 1e-14);
}

TEST(GdnTriangularInverse, BetaOfTwoStaysWithinItsBar) {
  Random random(12);
  for (const std::int64_t n : {16, 33, 64}) {
    for (const Keys keys : all_keys) {
      const auto t = stored<float>(chunk_matrix(n, 32, keys, 2.0, random));
      EXPECT_LT(max_difference(inverse(t, n), by_definition(t, n)), 1e-5) << n;
    }
  }
}

/// What the tolerance is worth: the same matrix with one column's updates left out.
TEST(GdnTriangularInverse, OneSkippedColumnWouldShow) {
  Random random(13);
  for (const std::int64_t column : {0, 1, 16, 17, 33, 48}) {
    const std::vector<double> t = chunk_matrix(64, 128, Keys::random, 1.0, random);
    std::vector<double> skipped = t;
    for (std::int64_t i = column + 1; i < 64; ++i) {
      skipped[static_cast<std::size_t>(i * 64 + column)] = 0;
    }
    EXPECT_GT(max_difference(inverse(stored<float>(skipped), 64), by_definition(t, 64)), 4e-3);
  }
}

/// The documented order, executed an element at a time.
template <class A>
void expect_documented_order() {
  Random random(14);
  for (const std::int64_t n : {1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 47, 63, 64, 65}) {
    const auto t = stored<A>(chunk_matrix(n, 24, Keys::near_identical, 0.9, random));
    std::vector<A> expected(t.size(), A(0));
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t c = 0; c <= i; ++c) {
        A sum = i == c ? A(1) : A(0);
        for (std::int64_t j = c; j < i; ++j) {
          sum = std::fma(-t[static_cast<std::size_t>(i * n + j)],
                         expected[static_cast<std::size_t>(j * n + c)], sum);
        }
        expected[static_cast<std::size_t>(i * n + c)] = sum;
      }
    }
    for (const Path path : available_paths()) {
      const ScopedPath scoped(path);
      EXPECT_EQ(inverse(t, n), expected) << n << " on " << path_name(path);
    }
  }
}

TEST(GdnTriangularInverse, FloatFollowsTheDocumentedOrderOnEveryPath) {
  expect_documented_order<float>();
}

TEST(GdnTriangularInverse, DoubleFollowsTheDocumentedOrderOnEveryPath) {
  expect_documented_order<double>();
}

TEST(GdnTriangularInverse, ReadsNeitherDiagonalNorUpperPartAndWritesTheWholeSquareAlone) {
  Random random(15);
  for (const std::int64_t n : {3, 16, 21, 40}) {
    const std::int64_t stride = n + 5;
    const std::vector<double> t = chunk_matrix(n, 16, Keys::random, 0.8, random);
    std::vector<float> from(static_cast<std::size_t>(n * stride), std::nanf(""));
    std::vector<float> to(static_cast<std::size_t>((n + 1) * stride), -7.0F);
    std::vector<float> expected = to;
    const std::vector<float> x = inverse(stored<float>(t), n);
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        const auto dense = static_cast<std::size_t>(i * n + j);
        const auto at = static_cast<std::size_t>(i * stride + j);
        from[at] = j < i ? static_cast<float>(t[dense]) : from[at];
        expected[at] = x[dense];
      }
    }
    triangular_inverse<float>({from.data(), n, n, stride}, {to.data(), n, n, stride});
    EXPECT_EQ(to, expected) << n;
  }
}

TEST(GdnTriangularInverse, InPlaceEqualsElsewhere) {
  Random random(16);
  for (const std::int64_t n : {1, 7, 16, 30, 64, 65}) {
    for (const Path path : available_paths()) {
      const ScopedPath scoped(path);
      auto t = stored<float>(chunk_matrix(n, 16, Keys::random, 1.0, random));
      const std::vector<float> elsewhere = inverse(t, n);
      triangular_inverse<float>({t.data(), n, n}, {t.data(), n, n});
      EXPECT_EQ(t, elsewhere) << n << " on " << path_name(path);
    }
  }
}

TEST(GdnTriangularInverse, OneAmongManyEqualsOneAloneForAnyNumberOfThreads) {
  Random random(17);
  const std::int64_t n = 24;
  std::vector<float> t;
  std::vector<float> expected;
  for (int i = 0; i < 1500; ++i) {
    const auto one = stored<float>(chunk_matrix(n, 8, Keys::random, 0.7, random));
    const std::vector<float> one_inverse = inverse(one, n);
    t.insert(t.end(), one.begin(), one.end());
    expected.insert(expected.end(), one_inverse.begin(), one_inverse.end());
  }
  for (const int threads : {1, 3}) {
    heddle::test::with_threads(threads, [&] { EXPECT_EQ(inverse(t, n), expected); });
  }
}

TEST(GdnTriangularInverse, NaNStaysInItsMatrixAndBelow) {
  Random random(18);
  const std::int64_t n = 32;
  auto t = stored<float>(chunk_matrix(n, 16, Keys::random, 0.7, random));
  const std::size_t size = t.size();
  t.insert(t.end(), t.begin(), t.begin() + static_cast<std::ptrdiff_t>(size));
  const std::vector<float> clean = inverse(t, n);
  t[20 * n + 3] = std::nanf("");
  const std::vector<float> x = inverse(t, n);
  EXPECT_TRUE(std::isnan(x[20 * n + 3]));
  EXPECT_TRUE(std::equal(x.begin(), x.begin() + 16 * n, clean.begin()));
  EXPECT_TRUE(std::equal(x.begin() + static_cast<std::ptrdiff_t>(size), x.end(),
                         clean.begin() + static_cast<std::ptrdiff_t>(size)));
}

TEST(GdnTriangularInverse, NothingToInvert) {
  triangular_inverse<float>({}, {});
  triangular_inverse<float>(7, {nullptr, 0, 7}, {nullptr, 0, 7});
  EXPECT_EQ(inverse(std::vector<float>{5.0F}, 1), std::vector<float>{1.0F});
}

TEST(GdnTriangularInverse, RefusesOtherShapes) {
  std::vector<double> t(12, 1.0);
  std::vector<double> t_inv(12, 5.0);
  const auto refusal = [](std::int64_t size, ConstMatrixView<double> from, MatrixView<double> to) {
    return heddle::test::thrown_text<Error>([&] { triangular_inverse<double>(size, from, to); });
  };
  EXPECT_EQ(refusal(-1, {t.data(), 2, 2}, {t_inv.data(), 2, 2}),
            "gdn::triangular_inverse: size = -1: must be >= 0");
  EXPECT_EQ(refusal(2, {t.data(), 3, 2}, {t_inv.data(), 3, 2}),
            "gdn::triangular_inverse: t.rows = 3: must be a multiple of size (2)");
  EXPECT_EQ(refusal(0, {t.data(), 3, 0}, {t_inv.data(), 3, 0}),
            "gdn::triangular_inverse: t.rows = 3: must be a multiple of size (0)");
  EXPECT_EQ(refusal(2, {t.data(), 2, 3}, {t_inv.data(), 2, 2}),
            "gdn::triangular_inverse: t.cols = 3: must equal size (2)");
  EXPECT_EQ(refusal(2, {t.data(), 4, 2}, {t_inv.data(), 2, 2}),
            "gdn::triangular_inverse: t_inv.rows = 2: must equal t.rows (4)");
  EXPECT_EQ(refusal(2, {t.data(), 2, 2, 1}, {t_inv.data(), 2, 2}),
            "gdn::triangular_inverse: t.stride = 1: must be at least its cols (2)");
  EXPECT_EQ(t_inv, std::vector<double>(12, 5.0));
}

}  // namespace
}  // namespace heddle::gdn

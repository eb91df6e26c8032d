#include "heddle/gdn/reference_inverse.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/chunk_matrix.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: one column's updates skipped, an early one; the sign of
// the update; a solved row read one too short; the diagonal or the upper part of t read; the upper
// part of t_inv left as it was.

namespace heddle::gdn {
namespace {

using heddle::gdn::test::chunk_matrix;
using heddle::gdn::test::Keys;
using heddle::gdn::test::residual;
using heddle::test::Random;

template <class A>
std::vector<A> inverse(const std::vector<A>& t, std::int64_t n) {
  std::vector<A> t_inv(t.size(), heddle::test::poison<A>());
  reference::triangular_inverse<A>({t.data(), n, n}, {t_inv.data(), n, n});
  return t_inv;
}

TEST(GdnReferenceInverse, ByHand) {
  const std::vector<double> t{1, 0, 0, 2, 1, 0, 3, 4, 1};
  EXPECT_EQ(inverse(t, 3), (std::vector<double>{1, 0, 0, -2, 1, 0, 5, -4, 1}));
}

TEST(GdnReferenceInverse, IdenticalKeysLeaveOneSubdiagonal) {
  const std::int64_t n = 65;
  std::vector<float> t(static_cast<std::size_t>(n * n), 0.0F);
  std::vector<float> expected = t;
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) {
      t[static_cast<std::size_t>(i * n + j)] = 1.0F;
    }
    expected[static_cast<std::size_t>(i * n + i)] = 1.0F;
    if (i > 0) {
      expected[static_cast<std::size_t>(i * n + i - 1)] = -1.0F;
    }
  }
  EXPECT_EQ(inverse(t, n), expected);
}

TEST(GdnReferenceInverse, InvertsAndStaysBoundedForUnitKeys) {
  Random random(5);
  double worst_float = 0;
  double worst_double = 0;
  for (const Keys keys : {Keys::random, Keys::identical, Keys::antipodal, Keys::near_identical}) {
    for (const double beta : {0.3, 1.0}) {
      for (const std::int64_t n : {1, 2, 7, 8, 9, 15, 16, 17, 33, 64, 65}) {
        const std::vector<double> t = chunk_matrix(n, 16, keys, beta, random);
        const std::vector<double> t_inv = inverse(t, n);
        worst_double = std::max(worst_double, residual(t, t_inv, n));
        for (std::int64_t i = 0; i < n; ++i) {
          for (std::int64_t j = 0; j < i; ++j) {
            EXPECT_LE(std::abs(t_inv[static_cast<std::size_t>(i * n + j)]), beta * (1 + 1e-12));
          }
        }
        // Against the double inverse of the same float matrix.
        std::vector<float> narrow;
        std::vector<double> wide;
        for (const double x : t) {
          narrow.push_back(static_cast<float>(x));
          wide.push_back(static_cast<double>(narrow.back()));
        }
        const std::vector<float> narrow_inv = inverse(narrow, n);
        const std::vector<double> wide_inv = inverse(wide, n);
        for (std::size_t i = 0; i < wide_inv.size(); ++i) {
          worst_float =
              std::max(worst_float, std::abs(static_cast<double>(narrow_inv[i]) - wide_inv[i]));
        }
      }
    }
  }
  EXPECT_LT(worst_double, 1e-13);  // a residual: 65 terms of size 1
  EXPECT_LT(worst_float, 1e-6);
  RecordProperty("float", std::to_string(worst_float));
}

TEST(GdnReferenceInverse, ReadsNeitherDiagonalNorUpperPartAndWritesTheWholeSquare) {
  const double nan = std::nan("");
  const std::vector<double> t{nan, nan, nan, 2, nan, nan, 3, 4, nan};
  EXPECT_EQ(inverse(t, 3), (std::vector<double>{1, 0, 0, -2, 1, 0, 5, -4, 1}));
}

TEST(GdnReferenceInverse, WorksInsideLargerRows) {
  const double nan = std::nan("");
  std::vector<double> t{1, 0, nan, nan, 2, 1, nan, nan};
  std::vector<double> t_inv(6, -7.0);
  reference::triangular_inverse<double>({t.data(), 2, 2, 4}, {t_inv.data(), 2, 2, 3});
  EXPECT_EQ(t_inv, (std::vector<double>{1, 0, -7, -2, 1, -7}));
}

TEST(GdnReferenceInverse, NothingToInvert) {
  reference::triangular_inverse<float>({}, {});
  EXPECT_EQ(inverse(std::vector<float>{5.0F}, 1), std::vector<float>{1.0F});
}

TEST(GdnReferenceInverse, RefusesOtherShapes) {
  std::vector<double> t(6);
  std::vector<double> t_inv(9, 5.0);
  const auto refusal = [](ConstMatrixView<double> from, MatrixView<double> to) {
    return heddle::test::thrown_text<Error>(
        [&] { reference::triangular_inverse<double>(from, to); });
  };
  EXPECT_EQ(refusal({t.data(), 2, 3}, {t_inv.data(), 2, 2}),
            "gdn::reference::triangular_inverse: t.cols = 3: must equal t.rows (2)");
  EXPECT_EQ(refusal({t.data(), 2, 2}, {t_inv.data(), 3, 3}),
            "gdn::reference::triangular_inverse: t_inv.rows = 3: must equal t.rows (2)");
  EXPECT_EQ(t_inv, std::vector<double>(9, 5.0));
}

}  // namespace
}  // namespace heddle::gdn

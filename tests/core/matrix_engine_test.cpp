// Mutants tried: accumulate overwrites; overwrite accumulates; transposition of b ignored; the last
// depth block of a bf16 product dropped; strides taken for columns.
#include "heddle/core/matrix_engine.hpp"

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle {
namespace {

/// op(a) * op(b) + c by the definition, in double.
template <class T, class A>
std::vector<double> product_in_double(const Factor<T>& a, const Factor<T>& b, MatrixView<A> c,
                                      Write write) {
  const auto at = [](const Factor<T>& factor, std::int64_t row, std::int64_t col) {
    return static_cast<double>(factor.transpose ? factor.matrix(col, row)
                                                : factor.matrix(row, col));
  };
  std::vector<double> result;
  for (std::int64_t m = 0; m < c.rows(); ++m) {
    for (std::int64_t n = 0; n < c.cols(); ++n) {
      double sum = write == Write::accumulate ? static_cast<double>(c(m, n)) : 0.0;
      for (std::int64_t k = 0; k < a.cols(); ++k) {
        sum += at(a, m, k) * at(b, k, n);
      }
      result.push_back(sum);
    }
  }
  return result;
}

template <class T>
class MatrixEngine : public ::testing::Test {};
using Scalars = ::testing::Types<bfloat16, float, double>;
TYPED_TEST_SUITE(MatrixEngine, Scalars);

TYPED_TEST(MatrixEngine, MatchesTheDefinitionInEveryForm) {
  using A = AccumulatorOf<TypeParam>;
  test::Random random(11);
  const double tolerance = std::is_same_v<A, double> ? 1e-14 : 4e-6;
  for (const auto& [m, k, n] :
       std::vector<std::array<std::int64_t, 3>>{{1, 1, 1}, {3, 5, 2}, {17, 300, 9}, {4, 513, 6}}) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        for (const Write write : {Write::overwrite, Write::accumulate}) {
          const std::int64_t a_rows = transpose_a ? k : m;
          const std::int64_t a_cols = transpose_a ? m : k;
          const std::int64_t b_rows = transpose_b ? n : k;
          const std::int64_t b_cols = transpose_b ? k : n;
          constexpr std::int64_t gap = 3;  // rows lie apart, and what lies between must not be read
          std::vector<TypeParam> a_data(static_cast<std::size_t>(a_rows * (a_cols + gap)),
                                        test::poison<TypeParam>());
          std::vector<TypeParam> b_data(static_cast<std::size_t>(b_rows * (b_cols + gap)),
                                        test::poison<TypeParam>());
          const MatrixView<TypeParam> a(a_data.data(), a_rows, a_cols, a_cols + gap);
          const MatrixView<TypeParam> b(b_data.data(), b_rows, b_cols, b_cols + gap);
          for (const auto& matrix : {a, b}) {
            for (std::int64_t row = 0; row < matrix.rows(); ++row) {
              for (TypeParam& value : matrix.row(row)) {
                value = static_cast<TypeParam>(static_cast<float>(random.normal()));
              }
            }
          }
          std::vector<A> c_data(static_cast<std::size_t>(m * n), write == Write::overwrite
                                                                     ? test::poison<A>()
                                                                     : static_cast<A>(2.5));
          const MatrixView<A> c(c_data.data(), m, n);
          const Factor<TypeParam> left = transpose_a ? transposed(a) : as_is(a);
          const Factor<TypeParam> right = transpose_b ? transposed(b) : as_is(b);
          const auto expected = product_in_double(left, right, c, write);
          multiply(left, right, c, write);
          EXPECT_TRUE(test::close(c_data, expected, tolerance));
        }
      }
    }
  }
}

TYPED_TEST(MatrixEngine, EmptyExtentsAreSumsOfNothing) {
  using A = AccumulatorOf<TypeParam>;
  std::vector<A> c_data(6, static_cast<A>(7));
  const MatrixView<A> c(c_data.data(), 2, 3);
  const Factor<TypeParam> a = as_is(MatrixView<TypeParam>(nullptr, 2, 0));
  const Factor<TypeParam> b = as_is(MatrixView<TypeParam>(nullptr, 0, 3));
  multiply(a, b, c, Write::accumulate);
  EXPECT_EQ(c_data, std::vector<A>(6, static_cast<A>(7)));
  multiply(a, b, c, Write::overwrite);
  EXPECT_EQ(c_data, std::vector<A>(6, static_cast<A>(0)));
  multiply(as_is(MatrixView<TypeParam>(nullptr, 0, 4)), as_is(MatrixView<TypeParam>(nullptr, 4, 0)),
           MatrixView<A>());
}

TEST(MatrixEngineErrors, NameTheExtentThatDoesNotFit) {
  std::vector<float> data(64);
  const auto refusal = [&](std::int64_t k, std::int64_t rows, std::int64_t cols) -> std::string {
    try {
      multiply(as_is(ConstMatrixView<float>(data.data(), 2, 3)),
               as_is(ConstMatrixView<float>(data.data(), k, 4)),
               MatrixView<float>(data.data(), rows, cols));
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal(5, 2, 4), "multiply: b.rows = 5: must equal a.cols (3)");
  EXPECT_EQ(refusal(3, 3, 4), "multiply: c.rows = 3: must equal a.rows (2)");
  EXPECT_EQ(refusal(3, 2, 5), "multiply: c.cols = 5: must equal b.cols (4)");
}

}  // namespace
}  // namespace heddle

// Mutants: weight without its 1 (rms_norm), weight with a 1 (gated_norm), eps outside the root, mean
// over another extent, pull not squared in r, d_x overwritten, d_weight overwritten, gate before the
// norm, sigmoid gate, d_z without the derivative of silu, heads sharing one root.
#include "heddle-train/norm.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"

namespace heddle::train {
namespace {

using test::Random;

template <class T>
MatrixView<T> matrix(std::vector<T>& values, std::int64_t rows, std::int64_t cols) {
  return {values.data(), rows, cols};
}
template <class T>
ConstMatrixView<T> matrix(const std::vector<T>& values, std::int64_t rows, std::int64_t cols) {
  return {values.data(), rows, cols};
}
template <class T>
std::span<const T> constant(const std::vector<T>& values) {
  return values;
}

std::vector<double> normed(const std::vector<double>& x, const std::vector<double>& weight,
                           double eps) {
  std::vector<double> y(x.size(), test::poison<double>());
  const auto dim = static_cast<std::int64_t>(weight.size());
  const std::int64_t rows = static_cast<std::int64_t>(x.size()) / dim;
  std::vector<double> roots(static_cast<std::size_t>(rows), test::poison<double>());
  rms_norm<double, double>(matrix(x, rows, dim), weight, eps, matrix(y, rows, dim),
                           std::span<double>(roots));
  return y;
}

TEST(HeddleTrainNorm, RmsNormByHand) {
  // mean(x^2) = (9 + 16) / 2, plus eps 0.5: 13; the factor is one plus the weight.
  const std::vector<double> y = normed({3, 4}, {1, -0.5}, 0.5);
  EXPECT_DOUBLE_EQ(y[0], 3 / std::sqrt(13.0) * 2);
  EXPECT_DOUBLE_EQ(y[1], 4 / std::sqrt(13.0) * 0.5);
}

TEST(HeddleTrainNorm, RmsNormFollowsItsDefinitionAtEveryWidth) {
  Random random(1);
  for (const std::int64_t dim : {1, 7, 8, 9, 16, 67}) {
    const std::int64_t rows = 3;
    const std::vector<double> x = random.normals<double>(rows * dim);
    const std::vector<double> weight = random.normals<double>(dim);
    std::vector<double> expected(x.size());
    for (std::int64_t t = 0; t < rows; ++t) {
      double squares = 0;
      for (std::int64_t d = 0; d < dim; ++d) {
        squares += std::pow(x[static_cast<std::size_t>(t * dim + d)], 2);
      }
      for (std::int64_t d = 0; d < dim; ++d) {
        expected[static_cast<std::size_t>(t * dim + d)] =
            x[static_cast<std::size_t>(t * dim + d)] /
            std::sqrt(squares / static_cast<double>(dim) + 1e-3) *
            (1 + weight[static_cast<std::size_t>(d)]);
      }
    }
    EXPECT_TRUE(test::close(normed(x, weight, 1e-3), expected, 8e-16)) << dim;
  }
}

TEST(HeddleTrainNorm, RmsNormBackwardIsItsDerivativeAndAccumulates) {
  Random random(2);
  const std::int64_t rows = 3;
  const std::int64_t dim = 11;
  std::vector<double> x = random.normals<double>(rows * dim);
  std::vector<double> weight = random.normals<double>(dim, 0.3);
  const std::vector<double> d_y = random.normals<double>(rows * dim);
  const auto loss = [&] {
    const std::vector<double> y = normed(x, weight, 0.01);
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      sum += y[i] * d_y[i];
    }
    return sum;
  };
  std::vector<double> y(x.size());
  std::vector<double> roots(static_cast<std::size_t>(rows));
  rms_norm<double, double>(matrix(std::as_const(x), rows, dim), constant(weight), 0.01,
                           matrix(y, rows, dim), std::span<double>(roots));
  // What was there before must still be there: 5 everywhere.
  std::vector<double> d_x(x.size(), 5.0);
  std::vector<double> d_weight(weight.size(), 5.0);
  rms_norm_backward<double>(matrix(std::as_const(x), rows, dim), constant(weight), constant(roots),
                            matrix(d_y, rows, dim), matrix(d_x, rows, dim),
                            std::span<double>(d_weight));
  std::vector<double> expected_x = test::central_differences(std::span<double>(x), loss);
  std::vector<double> expected_weight = test::central_differences(std::span<double>(weight), loss);
  for (double& value : expected_x) {
    value += 5.0;
  }
  for (double& value : expected_weight) {
    value += 5.0;
  }
  EXPECT_TRUE(test::close(d_x, expected_x, 1e-9));
  EXPECT_TRUE(test::close(d_weight, expected_weight, 1e-9));
}

struct Gated {
  std::int64_t rows = 2;
  std::int64_t heads = 3;
  std::int64_t dim = 5;
  double eps = 0.02;
  std::vector<double> o, z, weight;

  [[nodiscard]] std::int64_t cols() const { return heads * dim; }
  [[nodiscard]] std::vector<double> forward(std::vector<double>& roots) const {
    std::vector<double> y(o.size(), test::poison<double>());
    roots.assign(static_cast<std::size_t>(rows * heads), test::poison<double>());
    gated_norm<double, double>(matrix(o, rows, cols()), matrix(z, rows, cols()), weight, eps,
                               matrix(y, rows, cols()), matrix(roots, rows, heads));
    return y;
  }
};

Gated gated_case() {
  Random random(3);
  Gated gated;
  gated.o = random.normals<double>(gated.rows * gated.cols());
  gated.z = random.normals<double>(gated.rows * gated.cols());
  gated.weight = random.normals<double>(gated.dim);
  return gated;
}

TEST(HeddleTrainNorm, GatedNormFollowsItsDefinition) {
  const Gated gated = gated_case();
  std::vector<double> roots;
  const std::vector<double> y = gated.forward(roots);
  std::vector<double> expected(y.size());
  for (std::int64_t t = 0; t < gated.rows; ++t) {
    for (std::int64_t h = 0; h < gated.heads; ++h) {
      double squares = 0;
      const auto at = [&](std::int64_t d) {
        return static_cast<std::size_t>(t * gated.cols() + h * gated.dim + d);
      };
      for (std::int64_t d = 0; d < gated.dim; ++d) {
        squares += gated.o[at(d)] * gated.o[at(d)];
      }
      const double root = std::sqrt(squares / static_cast<double>(gated.dim) + gated.eps);
      for (std::int64_t d = 0; d < gated.dim; ++d) {
        const double z = gated.z[at(d)];
        expected[at(d)] = gated.o[at(d)] / root * gated.weight[static_cast<std::size_t>(d)] * z /
                          (1 + std::exp(-z));
      }
    }
  }
  EXPECT_TRUE(test::close(y, expected, 8e-16));
}

TEST(HeddleTrainNorm, GatedNormBackwardIsItsDerivative) {
  Gated gated = gated_case();
  Random random(4);
  const std::vector<double> d_y = random.normals<double>(gated.rows * gated.cols());
  std::vector<double> roots;
  const auto loss = [&] {
    std::vector<double> scratch;
    const std::vector<double> y = gated.forward(scratch);
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      sum += y[i] * d_y[i];
    }
    return sum;
  };
  static_cast<void>(gated.forward(roots));
  std::vector<double> d_o(gated.o.size(), test::poison<double>());
  std::vector<double> d_z(gated.z.size(), test::poison<double>());
  std::vector<double> d_weight(gated.weight.size(), 2.0);
  gated_norm_backward<double, double>(
      matrix(std::as_const(gated.o), gated.rows, gated.cols()),
      matrix(std::as_const(gated.z), gated.rows, gated.cols()), constant(gated.weight),
      matrix(std::as_const(roots), gated.rows, gated.heads), matrix(d_y, gated.rows, gated.cols()),
      matrix(d_o, gated.rows, gated.cols()), matrix(d_z, gated.rows, gated.cols()),
      std::span<double>(d_weight));
  EXPECT_TRUE(test::close(d_o, test::central_differences(std::span<double>(gated.o), loss), 1e-8));
  EXPECT_TRUE(test::close(d_z, test::central_differences(std::span<double>(gated.z), loss), 1e-8));
  std::vector<double> expected = test::central_differences(std::span<double>(gated.weight), loss);
  for (double& value : expected) {
    value += 2.0;
  }
  EXPECT_TRUE(test::close(d_weight, expected, 1e-8));
}

TEST(HeddleTrainNorm, NamesWhatDoesNotFit) {
  std::vector<double> x(6);
  std::vector<double> weight(3);
  std::vector<double> roots(2);
  try {
    rms_norm<double, double>(matrix(std::as_const(x), 3, 2), constant(weight), 1e-6,
                             matrix(x, 3, 2), std::span<double>(roots));
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "train::rms_norm: weight.size = 3: must equal x.cols (2)");
  }
}

}  // namespace
}  // namespace heddle::train

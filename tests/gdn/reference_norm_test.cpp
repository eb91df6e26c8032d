#include "heddle/gdn/reference_norm.hpp"

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"

// Mutants these tests are written against: eps outside the root, on the mean, or another in the
// backward; the scale missing in the backward; the projection dropped, or kept below the clamp.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using reference::Norm;

using Vector = std::vector<double>;

Vector forward(const Norm<double>& norm, const Vector& x) {
  Vector y(x.size(), std::nan(""));
  reference::norm_forward<double>(norm, x, y);
  return y;
}

Vector backward(const Norm<double>& norm, const Vector& x, const Vector& d_y) {
  Vector d_x(x.size(), std::nan(""));
  reference::norm_backward<double>(norm, x, d_y, d_x);
  return d_x;
}

TEST(GdnReferenceNorm, ByHand) {
  const Vector x{3, 4};
  EXPECT_TRUE(close(forward({NormMode::root, 11, 2}, x), Vector{1, 4.0 / 3}, 1e-15));
  EXPECT_TRUE(close(forward({NormMode::clamp, 1e-6, 2}, x), Vector{1.2, 1.6}, 1e-15));
  EXPECT_TRUE(close(forward({NormMode::clamp, 10, 2}, x), Vector{0.6, 0.8}, 1e-15));
  EXPECT_EQ(forward({NormMode::none, 11, 2}, x), (Vector{6, 8}));
}

TEST(GdnReferenceNorm, TheModesPartBelowTheRootOfEps) {
  const Vector x{1e-3, 0, 0};
  EXPECT_NEAR(forward({NormMode::root, 1e-6, 1}, x)[0], std::sqrt(0.5), 1e-12);
  EXPECT_NEAR(forward({NormMode::clamp, 1e-6, 1}, x)[0], 1.0, 1e-12);
}

TEST(GdnReferenceNorm, ZeroGivesZeroAndAFiniteJacobian) {
  const Vector zero(5, 0.0);
  const Vector d_y{1, -2, 3, 0, 0.5};
  for (const NormMode mode : {NormMode::root, NormMode::clamp, NormMode::none}) {
    EXPECT_EQ(forward({mode, 1e-6, 0.5}, zero), zero);
  }
  EXPECT_TRUE(close(backward({NormMode::root, 1e-6, 1}, zero, d_y),
                    Vector{1000, -2000, 3000, 0, 500}, 1e-12));
  EXPECT_TRUE(close(backward({NormMode::clamp, 1e-3, 1}, zero, d_y),
                    Vector{1000, -2000, 3000, 0, 500}, 1e-12));
  EXPECT_EQ(backward({NormMode::none, 1e-3, 1}, zero, d_y), d_y);
}

TEST(GdnReferenceNorm, BackwardAgreesWithCentralDifferences) {
  heddle::test::Random random(3);
  for (const NormMode mode : {NormMode::root, NormMode::clamp, NormMode::none}) {
    for (const double eps : {1e-6, 0.5, 30.0}) {
      for (const std::int64_t dim : {1, 3, 8, 11}) {
        const Norm<double> norm{mode, eps, 0.7};
        Vector x = random.normals<double>(dim);
        const Vector d_y = random.normals<double>(dim);
        const Vector expected = heddle::test::central_differences(x, [&] {
          const Vector y = forward(norm, x);
          double sum = 0;
          for (std::size_t i = 0; i < y.size(); ++i) {
            sum += y[i] * d_y[i];
          }
          return sum;
        });
        const Vector found = backward(norm, x, d_y);
        for (std::size_t i = 0; i < found.size(); ++i) {
          EXPECT_NEAR(found[i], expected[i], 1e-8) << static_cast<int>(mode) << " eps " << eps;
        }
      }
    }
  }
}

TEST(GdnReferenceNorm, WorksInPlace) {
  const Norm<double> norm{NormMode::root, 1e-3, 0.25};
  const Vector x{0.5, -1, 2};
  const Vector d_y{1, 2, -3};
  Vector y = x;
  reference::norm_forward<double>(norm, y, y);
  EXPECT_EQ(y, forward(norm, x));
  Vector d = d_y;
  reference::norm_backward<double>(norm, x, d, d);
  EXPECT_EQ(d, backward(norm, x, d_y));
}

}  // namespace
}  // namespace heddle::gdn

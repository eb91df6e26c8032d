#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/random.hpp"

namespace heddle::gdn::test {

/// t = I + strictly lower(beta_i k_i . k_j), k of unit length: what a chunk of the layer gives.
enum class Keys { random, identical, antipodal, near_identical };

inline constexpr Keys all_keys[] = {Keys::random, Keys::identical, Keys::antipodal,
                                    Keys::near_identical};

[[nodiscard]] inline std::vector<double> chunk_matrix(std::int64_t n, std::int64_t dim, Keys keys,
                                                      double beta, heddle::test::Random& random) {
  std::vector<std::vector<double>> k(static_cast<std::size_t>(n));
  std::vector<double> common = random.normals<double>(dim);
  for (std::size_t i = 0; i < k.size(); ++i) {
    k[i] = keys == Keys::random ? random.normals<double>(dim) : common;
    double length = 0;
    for (double& x : k[i]) {
      x += keys == Keys::near_identical ? 0.05 * random.normal() : 0.0;
      x *= keys == Keys::antipodal && i % 2 == 1 ? -1.0 : 1.0;
      length += x * x;
    }
    for (double& x : k[i]) {
      x /= std::sqrt(length);
    }
  }
  std::vector<double> t(static_cast<std::size_t>(n * n), 0.0);
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) {
      double product = 0;
      for (std::int64_t c = 0; c < dim; ++c) {
        product += k[static_cast<std::size_t>(i)][static_cast<std::size_t>(c)] *
                   k[static_cast<std::size_t>(j)][static_cast<std::size_t>(c)];
      }
      t[static_cast<std::size_t>(i * n + j)] = i == j ? 1.0 : beta * product;
    }
  }
  return t;
}

/// max |t t_inv - I|, the product formed in long double.
template <class A>
[[nodiscard]] double residual(const std::vector<A>& t, const std::vector<A>& t_inv,
                              std::int64_t n) {
  long double worst = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      long double sum = i == j ? -1 : 0;
      for (std::int64_t c = 0; c < n; ++c) {
        sum += static_cast<long double>(t[static_cast<std::size_t>(i * n + c)]) *
               static_cast<long double>(t_inv[static_cast<std::size_t>(c * n + j)]);
      }
      worst = std::max(worst, std::abs(sum));
    }
  }
  return static_cast<double>(worst);
}

}  // namespace heddle::gdn::test

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>

#include "heddle/core/factor.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/workspace.hpp"
#include "peers/eigen_gemm.hpp"

namespace heddle::bench {

/// One product: hidden states of rms 1 against weights of 0.02, its result, and what it must be.
template <class T>
class GemmProblem {
 public:
  explicit GemmProblem(const PeerProduct& product) : product_(product) {
    a_ = fill(product.m * product.k, 1.0F);
    b_ = fill(product.k * product.n, 0.02F);
    c_ = memory_.take<float>(product.m * product.n);
    clear();
  }

  [[nodiscard]] const PeerProduct& product() const { return product_; }
  [[nodiscard]] const T* a() const { return a_.data(); }
  [[nodiscard]] const T* b() const { return b_.data(); }
  [[nodiscard]] float* c() const { return c_.data(); }
  [[nodiscard]] double flops() const {
    return 2.0 * static_cast<double>(product_.m * product_.k * product_.n);
  }

  [[nodiscard]] Factor<T> left() const {
    return product_.a_transposed ? transposed(ConstMatrixView<T>(a_.data(), product_.k, product_.m))
                                 : as_is(ConstMatrixView<T>(a_.data(), product_.m, product_.k));
  }
  [[nodiscard]] Factor<T> right() const {
    return as_is(ConstMatrixView<T>(b_.data(), product_.k, product_.n));
  }
  [[nodiscard]] MatrixView<float> result() const { return {c_.data(), product_.m, product_.n}; }
  [[nodiscard]] Write write() const {
    return product_.accumulate ? Write::accumulate : Write::overwrite;
  }

  void clear() const { std::fill(c_.begin(), c_.end(), product_.accumulate ? 0.5F : NAN); }

  /// Every 97th element against its sum in double.
  [[nodiscard]] bool is_right() const {
    const Factor<T> a = left();
    for (std::int64_t i = 0; i < product_.m * product_.n; i += 97) {
      double sum = product_.accumulate ? 0.5 : 0.0;
      double size = std::abs(sum);
      for (std::int64_t k = 0; k < product_.k; ++k) {
        const T left =
            product_.a_transposed ? a.matrix(k, i / product_.n) : a.matrix(i / product_.n, k);
        const double term = static_cast<double>(static_cast<float>(left)) *
                            static_cast<double>(static_cast<float>(
                                b_[static_cast<std::size_t>(k * product_.n + i % product_.n)]));
        sum += term;
        size += std::abs(term);
      }
      if (!(std::abs(sum - static_cast<double>(c_[static_cast<std::size_t>(i)])) <= 2e-6 * size)) {
        return false;
      }
    }
    return true;
  }

 private:
  [[nodiscard]] std::span<T> fill(std::int64_t count, float scale) {
    const std::span<T> values = memory_.take<T>(count);
    std::uniform_real_distribution<float> uniform(-1.7320508F * scale, 1.7320508F * scale);
    for (T& value : values) {
      value = static_cast<T>(uniform(random_));
    }
    return values;
  }

  PeerProduct product_;
  std::minstd_rand random_{1};
  Workspace memory_;
  std::span<T> a_;
  std::span<T> b_;
  std::span<float> c_;
};

}  // namespace heddle::bench

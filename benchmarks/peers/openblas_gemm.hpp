#pragma once

#include <cblas.h>

#include "peers/eigen_gemm.hpp"

namespace heddle::bench {

inline void openblas_gemm(const PeerProduct& product, const float* a, const float* b, float* c) {
  const auto m = static_cast<blasint>(product.m);
  const auto k = static_cast<blasint>(product.k);
  const auto n = static_cast<blasint>(product.n);
  cblas_sgemm(CblasRowMajor, product.a_transposed ? CblasTrans : CblasNoTrans, CblasNoTrans, m, n,
              k, 1.0F, a, product.a_transposed ? m : k, b, n, product.accumulate ? 1.0F : 0.0F, c,
              n);
}

inline void openblas_on_one_thread() {
  openblas_set_num_threads(1);
}

}  // namespace heddle::bench

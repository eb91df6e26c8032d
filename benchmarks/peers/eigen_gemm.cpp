#include "peers/eigen_gemm.hpp"

#include <algorithm>

namespace heddle::bench {
namespace {

template <class T>
using RowMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

template <class T>
Eigen::Map<const RowMajor<T>> stored_a(const PeerProduct& product, const T* a) {
  return {a, product.a_transposed ? product.k : product.m,
          product.a_transposed ? product.m : product.k};
}

}  // namespace

void eigen_gemm(const PeerProduct& product, const float* a, const float* b, float* c) {
  const auto left = stored_a(product, a);
  const Eigen::Map<const RowMajor<float>> right(b, product.k, product.n);
  Eigen::Map<RowMajor<float>> result(c, product.m, product.n);
  const auto write = [&](const auto& factor) {
    if (product.accumulate) {
      result.noalias() += factor * right;
    } else {
      result.noalias() = factor * right;
    }
  };
  if (product.a_transposed) {
    write(left.transpose());
  } else {
    write(left);
  }
}

void eigen_gemm(const PeerProduct& product, const Eigen::bfloat16* a, const Eigen::bfloat16* b,
                float* c) {
  constexpr std::int64_t block_depth = 256;
  const auto left = stored_a(product, a);
  const Eigen::Map<const RowMajor<Eigen::bfloat16>> right(b, product.k, product.n);
  Eigen::Map<RowMajor<float>> result(c, product.m, product.n);
  if (!product.accumulate) {
    result.setZero();
  }
  RowMajor<float> wide_left;
  RowMajor<float> wide_right;
  for (std::int64_t first = 0; first < product.k; first += block_depth) {
    const std::int64_t count = std::min(block_depth, product.k - first);
    wide_right = right.middleRows(first, count).cast<float>();
    if (product.a_transposed) {
      wide_left = left.middleRows(first, count).cast<float>();
      result.noalias() += wide_left.transpose() * wide_right;
    } else {
      wide_left = left.middleCols(first, count).cast<float>();
      result.noalias() += wide_left * wide_right;
    }
  }
}

}  // namespace heddle::bench

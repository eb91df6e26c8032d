#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <Eigen/Core>

#include "heddle/core/factor.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"

namespace heddle::detail {

template <class T>
using RowMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using ConstRowMajorMap = Eigen::Map<const RowMajor<T>, Eigen::Unaligned, Eigen::OuterStride<>>;
template <class T>
using RowMajorMap = Eigen::Map<RowMajor<T>, Eigen::Unaligned, Eigen::OuterStride<>>;

template <class T>
[[nodiscard]] ConstRowMajorMap<T> map(ConstMatrixView<T> view) {
  return {view.data(), view.rows(), view.cols(), Eigen::OuterStride<>(view.stride())};
}

template <class T>
[[nodiscard]] RowMajorMap<T> map(MatrixView<T> view) {
  return {view.data(), view.rows(), view.cols(), Eigen::OuterStride<>(view.stride())};
}

/// The block of K of a factor as a matrix of its own, widened.
template <class A, Storage T>
[[nodiscard]] RowMajor<A> widened_copy(const Factor<T>& factor) {
  RowMajor<A> copy(factor.rows(), factor.cols());
  for (std::int64_t row = 0; row < copy.rows(); ++row) {
    for (std::int64_t col = 0; col < copy.cols(); ++col) {
      std::int64_t stored_row = factor.transpose ? col : row;
      stored_row =
          factor.row_ids ? (*factor.row_ids)[static_cast<std::size_t>(stored_row)] : stored_row;
      copy(row, col) = widen<A>(factor.matrix(stored_row, factor.transpose ? row : col));
    }
  }
  return copy;
}

/// Calls use(matrix expression) with a factor that is stored as it is multiplied.
template <Storage T, class Use>
void with_map(const Factor<T>& factor, const Use& use) {
  if (factor.transpose) {
    use(map(factor.matrix).transpose());
  } else {
    use(map(factor.matrix));
  }
}

/// c = a * b or c += a * b by Eigen's product.
template <Storage TA, Storage TB, Accumulator TC>
void multiply_eigen(const Factor<TA>& a, const Factor<TB>& b, MatrixView<TC> c, Write write) {
  auto result = map(c);
  if (write == Write::overwrite) {
    result.setZero();
  }
  if constexpr (std::is_same_v<TA, TC> && std::is_same_v<TB, TC>) {
    if (!a.row_ids && !b.row_ids) {
      with_map(a, [&](const auto& left) {
        with_map(b, [&](const auto& right) { result.noalias() += left * right; });
      });
      return;
    }
  }
  constexpr std::int64_t block_depth = 256;
  for (std::int64_t first = 0; first < a.cols(); first += block_depth) {
    const std::int64_t count = std::min(block_depth, a.cols() - first);
    result.noalias() += widened_copy<TC>(a.column_block(first, count)) *
                        widened_copy<TC>(b.row_block(first, count));
  }
}

}  // namespace heddle::detail

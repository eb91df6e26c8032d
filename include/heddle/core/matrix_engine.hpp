#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <Eigen/Core>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"

namespace heddle {

/// Who multiplies.
enum class Gemm {
  eigen,  ///< Eigen's product on operands widened a block at a time; bits depend on the shapes
};

/// One factor of a product: a stored matrix, read as it is or transposed in place.
template <Storage T>
struct Factor {
  ConstMatrixView<T> matrix;
  bool transpose = false;

  [[nodiscard]] std::int64_t rows() const { return transpose ? matrix.cols() : matrix.rows(); }
  [[nodiscard]] std::int64_t cols() const { return transpose ? matrix.rows() : matrix.cols(); }
};

/// `matrix` as a factor, as it is stored.
template <class T>
[[nodiscard]] Factor<std::remove_const_t<T>> as_is(MatrixView<T> matrix) {
  return {matrix, false};
}

/// `matrix` as a factor, transposed; nothing is moved.
template <class T>
[[nodiscard]] Factor<std::remove_const_t<T>> transposed(MatrixView<T> matrix) {
  return {matrix, true};
}

namespace detail {

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

/// The block [row, row + rows) x [col, col + cols) of op(matrix).
template <Storage T>
[[nodiscard]] Factor<T> block(const Factor<T>& factor, std::int64_t row, std::int64_t rows,
                              std::int64_t col, std::int64_t cols) {
  if (factor.transpose) {
    return {factor.matrix.row_block(col, cols).column_block(row, rows), true};
  }
  return {factor.matrix.row_block(row, rows).column_block(col, cols), false};
}

/// Calls use(matrix expression) with the factor in A: a map where it is stored so, else a widened
/// copy of this block.
template <class A, Storage T, class Use>
void with_widened(const Factor<T>& factor, const Use& use) {
  if constexpr (std::is_same_v<A, T>) {
    if (factor.transpose) {
      use(map(factor.matrix).transpose());
    } else {
      use(map(factor.matrix));
    }
  } else {
    const RowMajor<A> widened = map(factor.matrix).template cast<A>();
    if (factor.transpose) {
      use(widened.transpose());
    } else {
      use(widened);
    }
  }
}

}  // namespace detail

/// c = a * b, or c += a * b.
///
/// shapes    a [M,K], b [K,N] after transposition, c [M,N]; any strides
/// dtypes    a, b: Storage; c: the Accumulator of both
/// writes    all of c (Write::overwrite), or adds to all of it; K = 0 is a sum of nothing
/// alias     c disjoint from a and b
/// specials  M, N or K = 0 are legal
/// order     Gemm::eigen: the same call gives the same bits, another shape may not
/// memory    bf16 operands are widened 256 rows of K at a time
/// throws    Error for a.cols != b.rows, c.rows != M, c.cols != N
template <Gemm engine = Gemm::eigen, Storage TA, Storage TB, Accumulator TC>
void multiply(const Factor<TA>& a, const Factor<TB>& b, MatrixView<TC> c,
              Write write = Write::overwrite) {
  static_assert(std::is_same_v<AccumulatorOf<TA>, TC> && std::is_same_v<AccumulatorOf<TB>, TC>,
                "heddle::multiply: the result must be the accumulator type of both operands");
  static_assert(engine == Gemm::eigen);
  constexpr const char* where = "multiply";
  require_equal(where, "b.rows", b.rows(), "a.cols", a.cols());
  require_equal(where, "c.rows", c.rows(), "a.rows", a.rows());
  require_equal(where, "c.cols", c.cols(), "b.cols", b.cols());
  if (c.rows() == 0 || c.cols() == 0) {
    return;
  }
  auto result = detail::map(c);
  if (write == Write::overwrite) {
    result.setZero();
  }
  constexpr std::int64_t block_depth = 256;
  constexpr bool stored_wide = std::is_same_v<TA, TC> && std::is_same_v<TB, TC>;
  const std::int64_t depth = a.cols();
  const std::int64_t step = stored_wide ? std::max<std::int64_t>(depth, 1) : block_depth;
  for (std::int64_t first = 0; first < depth; first += step) {
    const std::int64_t count = std::min(step, depth - first);
    detail::with_widened<TC>(detail::block(a, 0, a.rows(), first, count), [&](const auto& left) {
      detail::with_widened<TC>(detail::block(b, first, count, 0, b.cols()),
                               [&](const auto& right) { result.noalias() += left * right; });
    });
  }
}

}  // namespace heddle

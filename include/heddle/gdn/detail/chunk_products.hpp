#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "heddle/core/factor.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/packed_matrix.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/detail/chunk_math.hpp"

namespace heddle::gdn::detail {

/// A tile's rows lie a cache line further apart than they need, so that the rows of a column do not fall
/// onto few sets of the cache.
template <class T>
[[nodiscard]] constexpr std::int64_t tile_stride(std::int64_t columns) {
  constexpr std::int64_t line = 64 / static_cast<std::int64_t>(sizeof(T));
  return (columns + line - 1) / line * line + line;
}

/// The products of a chunk, unchecked: small ones, on tiles that are right by construction. With lower
/// triangular tiles they run block of rows by block, and skip what is zero.
template <class T>
class ChunkProducts {
 public:
  ChunkProducts() = default;
  explicit ChunkProducts(std::span<std::byte> scratch) : scratch_(scratch) {}

  /// Scratch that suffices for products of at most these extents.
  [[nodiscard]] static std::int64_t scratch_bytes(std::int64_t m, std::int64_t n, std::int64_t k) {
    return static_cast<std::int64_t>(product_workspace_bytes<T, T>(m, n, k));
  }

  /// c = a b, or c += a b.
  template <class Right>
  void run(const Factor<T>& a, const Right& b, MatrixView<T> c, Write write) const {
    multiply_prechecked(a, b, c, write, scratch_);
  }

  /// The same for a lower triangular a.
  void lower(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<T> c, Write write) const {
    for (std::int64_t row = 0; row < c.rows(); row += triangle_block) {
      const std::int64_t rows = std::min(triangle_block, c.rows() - row);
      const std::int64_t depth = row + rows;
      run(as_is(a.row_block(row, rows).column_block(0, depth)), as_is(b.row_block(0, depth)),
          c.row_block(row, rows), write);
    }
  }

  /// c = a^T b, or c += a^T b, for a lower triangular a.
  void lower_transposed(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<T> c,
                        Write write) const {
    for (std::int64_t row = 0; row < c.rows(); row += triangle_block) {
      const std::int64_t rows = std::min(triangle_block, c.rows() - row);
      const std::int64_t depth = c.rows() - row;
      run(transposed(a.row_block(row, depth).column_block(row, rows)),
          as_is(b.row_block(row, depth)), c.row_block(row, rows), write);
    }
  }

  /// The lower triangle of c = a b, and what lies above it in blocks of the diagonal.
  void to_lower(ConstMatrixView<T> a, ConstPanelView<T> b, MatrixView<T> c) const {
    for (std::int64_t row = 0; row < c.rows(); row += triangle_block) {
      const std::int64_t rows = std::min(triangle_block, c.rows() - row);
      const std::int64_t end = row + rows;
      run(as_is(a.row_block(row, rows)), ConstPanelView<T>(b.data(), b.rows(), end),
          c.row_block(row, rows).column_block(0, end), Write::overwrite);
    }
  }

 private:
  std::span<std::byte> scratch_;
};

}  // namespace heddle::gdn::detail

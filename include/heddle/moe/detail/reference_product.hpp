#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"

namespace heddle::moe::reference::detail {

/// store(i, j, sum_k left(i, k) * right(k, j)) for all i < rows, j < cols.
///
/// order     one chain of additions over k per element and 256 k, the chains added in order: an
///           element's bits depend on its own operands alone, not on the other rows or columns of
///           the call
/// specials  depth = 0 stores zeros
template <Accumulator A, class Left, class Right, class Store>
void product(std::int64_t rows, std::int64_t cols, std::int64_t depth, const Left& left,
             const Right& right, const Store& store) {
  // 4 x 8 sums stay in registers; columns beyond the last are zeros and rows beyond it repeat it,
  // so that every element goes through the same instructions.
  constexpr std::int64_t tile_rows = 4;
  constexpr std::int64_t tile_cols = 8;
  constexpr std::int64_t tile_depth = 256;
  std::vector<A> panel(static_cast<std::size_t>(tile_depth * tile_cols));
  std::vector<A> totals(static_cast<std::size_t>(rows * tile_cols));
  for (std::int64_t col = 0; col < cols; col += tile_cols) {
    const std::int64_t width = std::min(tile_cols, cols - col);
    std::fill(totals.begin(), totals.end(), A(0));
    for (std::int64_t start = 0; start < depth; start += tile_depth) {
      const std::int64_t count = std::min(tile_depth, depth - start);
      for (std::int64_t k = 0; k < count; ++k) {
        for (std::int64_t j = 0; j < tile_cols; ++j) {
          panel[static_cast<std::size_t>(k * tile_cols + j)] =
              j < width ? right(start + k, col + j) : A(0);
        }
      }
      for (std::int64_t row = 0; row < rows; row += tile_rows) {
        A sums[tile_rows][tile_cols] = {};
        for (std::int64_t k = 0; k < count; ++k) {
          const A* const factors = panel.data() + k * tile_cols;
          for (std::int64_t i = 0; i < tile_rows; ++i) {
            const A factor = left(std::min(row + i, rows - 1), start + k);
            for (std::int64_t j = 0; j < tile_cols; ++j) {
              sums[i][j] += factor * factors[j];
            }
          }
        }
        for (std::int64_t i = 0; i < std::min(tile_rows, rows - row); ++i) {
          for (std::int64_t j = 0; j < tile_cols; ++j) {
            totals[static_cast<std::size_t>((row + i) * tile_cols + j)] += sums[i][j];
          }
        }
      }
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < width; ++j) {
        store(i, col + j, totals[static_cast<std::size_t>(i * tile_cols + j)]);
      }
    }
  }
}

/// A store for `product` into the rows of a weight's cotangent from `first_row` on, as the caller
/// asked: the whole sum is assigned, or added once.
template <Accumulator A>
[[nodiscard]] auto store_into(const WeightCotangent<A>& cotangent, std::int64_t first_row) {
  return [values = cotangent.values, write = cotangent.write, first_row](std::int64_t i,
                                                                         std::int64_t j, A sum) {
    A& element = values(first_row + i, j);
    element = write == Write::accumulate ? element + sum : sum;
  };
}

}  // namespace heddle::moe::reference::detail

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heddle/core/detail/gemm_paths.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"

namespace heddle::detail {

/// A stored factor, row-major. op(stored) is it, or its transpose; a gathered one takes its stored
/// rows by index.
template <class T>
struct StoredOperand {
  using Element = T;

  const T* data;
  std::int64_t stride;
  bool transposed;
  const std::int32_t* row_ids;

  [[nodiscard]] const T* row(std::int64_t index) const {
    return data + (row_ids == nullptr ? index : row_ids[index]) * stride;
  }
};

/// A right factor in panels.
template <class T>
struct PanelOperand {
  using Element = T;

  const T* data;
  std::int64_t panel_stride;
};

/// A result: row-major (panel_stride = the columns of a panel) or panel-major (stride = these).
template <class C>
struct ResultOperand {
  C* data;
  std::int64_t stride;
  std::int64_t panel_stride;
};

/// The element of a result at (row, column), which is the first of a panel's row, as a result.
template <class C>
[[nodiscard]] ResultOperand<C> result_at(const ResultOperand<C>& c, std::int64_t row,
                                         std::int64_t column) {
  return {c.data + row * c.stride + column / panel_columns<C> * c.panel_stride, c.stride,
          c.panel_stride};
}

/// Rows and columns of the result that one call computes; columns start at a panel.
struct ResultRange {
  std::int64_t first_row;
  std::int64_t rows;
  std::int64_t first_column;
  std::int64_t columns;
};

/// Most bytes of A that are packed at a time: half of a second-level cache of 1 MiB.
inline constexpr std::int64_t packed_a_bytes = std::int64_t{512} * 1024;

/// Bytes of scratch for a block of rows x columns of a product, whatever the path: packed A with the
/// surplus of a last panel and the vector that packers write behind it, then packed B.
template <class B>
[[nodiscard]] constexpr std::int64_t block_scratch_bytes(std::int64_t rows, std::int64_t columns,
                                                         std::int64_t depth) {
  constexpr std::int64_t line = 64;
  constexpr std::int64_t surplus_rows = 8;
  const std::int64_t k = std::min(depth, product_block_depth) + 1;
  const std::int64_t row_bytes = k * static_cast<std::int64_t>(sizeof(AccumulatorOf<B>));
  const std::int64_t a =
      rows == 0 ? 0 : std::min(rows * row_bytes, packed_a_bytes) + surplus_rows * row_bytes;
  const std::int64_t panels = (columns + panel_columns<B> - 1) / panel_columns<B>;
  return (a + line - 1) / line * line + line + std::min(panels, pack_group) * k * line;
}

/// Memory that a factor may span and still be read in place: it stays in a second-level cache, rows
/// apart included, and its lines do not fall onto few sets of the first.
inline constexpr std::int64_t in_place_bytes = std::int64_t{128} * 1024;

/// Rows of A up to which copying B would cost more than reading it from afar.
inline constexpr std::int64_t in_place_rows = 8;

/// Columns of B up to which copying A would cost more than reading it from afar.
inline constexpr std::int64_t in_place_columns = 128;

/// Whether tiles read A where it is, all but the rows of a last tile that is not whole.
template <class A, class B>
[[nodiscard]] constexpr bool reads_in_place(const StoredOperand<A>& a, std::int64_t rows,
                                            std::int64_t columns, std::int64_t depth) {
  const std::int64_t lines = a.transposed ? depth : rows;
  return std::is_same_v<A, AccumulatorOf<B>> && a.row_ids == nullptr &&
         ((!a.transposed && columns <= in_place_columns) ||
          lines * a.stride * static_cast<std::int64_t>(sizeof(A)) <= in_place_bytes);
}

/// Whether tiles read B where it is, all but the columns of a last panel that is not whole.
template <class A, class B>
[[nodiscard]] constexpr bool reads_in_place(const StoredOperand<B>& b, std::int64_t rows,
                                            std::int64_t depth) {
  return std::is_same_v<A, B> && !b.transposed && b.row_ids == nullptr &&
         depth % step_depth<B> == 0 &&
         (rows <= in_place_rows ||
          depth * b.stride * static_cast<std::int64_t>(sizeof(B)) <= in_place_bytes);
}

/// A product, block of rows by block of K: packs what must be packed and runs the path's tiles. The
/// driver of everything public.
template <class A, class B>
class BlockProduct {
  using Kernels = GemmKernels<A, B>;
  using C = typename Kernels::C;
  static constexpr std::int64_t width = panel_columns<B>;
  static constexpr std::int64_t line = 64;

 public:
  BlockProduct(const StoredOperand<A>& a, std::int64_t depth, std::byte* scratch)
      : kernels_(current_kernels<A, B>()), a_(a), depth_(depth), scratch_(scratch) {}

  /// The range of the product of A with each of several right factors, written from the first element
  /// of each c on. A is packed once for all; B as often as there are blocks of rows.
  template <class Right, std::size_t count>
  void run(const std::array<Right, count>& b, std::array<ResultOperand<C>, count> c,
           const ResultRange& range, Write write) const {
    if (range.rows == 0 || range.columns == 0) {
      return;
    }
    if (depth_ == 0 && write == Write::overwrite) {
      for (const ResultOperand<C>& result : c) {
        clear(result, range);
      }
    }
    const std::int64_t step = block_rows();
    for (std::int64_t row = 0; row < range.rows; row += step) {
      ResultRange block = range;
      block.first_row += row;
      block.rows = std::min(step, range.rows - row);
      for (std::int64_t k = 0; k < depth_; k += product_block_depth) {
        const std::int64_t depth = std::min(product_block_depth, depth_ - k);
        PlacedA a = place_a(block, k, depth);
        a.add = k > 0 || write == Write::accumulate;
        for (std::size_t i = 0; i < count; ++i) {
          multiply_columns(b[i], result_at(c[i], row, 0), block, k, depth, a);
        }
      }
    }
  }

 private:
  using Block = typename Kernels::Block;

  /// A block of A as tiles read it: its first rows where they are stored, the others packed.
  struct PlacedA {
    const A* in_place;
    std::int64_t in_place_rows;
    std::int64_t packed_rows;
    std::int64_t panel_bytes;
    std::int64_t steps;
    std::byte* rest;  ///< of the scratch
    bool add;
  };

  /// Rows of A that take packed_a_bytes, a whole number of tiles.
  [[nodiscard]] std::int64_t block_rows() const {
    const std::int64_t rows =
        packed_a_bytes * kernels_.step_depth / (product_block_depth * kernels_.a_step_bytes);
    return (rows + kernels_.tile_rows - 1) / kernels_.tile_rows * kernels_.tile_rows;
  }

  [[nodiscard]] std::int64_t packed_depth(std::int64_t depth) const {
    return (depth + kernels_.depth_multiple - 1) / kernels_.depth_multiple *
           kernels_.depth_multiple;
  }

  [[nodiscard]] PlacedA place_a(const ResultRange& range, std::int64_t k,
                                std::int64_t depth) const {
    const std::int64_t tile_rows = kernels_.tile_rows;
    PlacedA placed{};
    placed.steps = packed_depth(depth) / kernels_.step_depth;
    placed.panel_bytes = tile_rows * kernels_.a_step_bytes * placed.steps;
    if (reads_in_place<A, B>(a_, range.rows, range.columns, depth_)) {
      // The rows of a last, smaller tile are packed: tiles read as many rows as they have.
      placed.in_place = a_.transposed ? a_.row(k) + range.first_row : a_.row(range.first_row) + k;
      placed.in_place_rows = range.rows / tile_rows * tile_rows;
    }
    placed.packed_rows = range.rows - placed.in_place_rows;
    if (placed.packed_rows > 0) {
      pack_a(range.first_row + placed.in_place_rows, k, depth, placed);
    }
    const std::int64_t panels = (placed.packed_rows + tile_rows - 1) / tile_rows;
    const std::int64_t bytes = panels == 0 ? 0 : panels * placed.panel_bytes + line;
    placed.rest = scratch_ + (bytes + line - 1) / line * line;
    return placed;
  }

  void pack_a(std::int64_t first_row, std::int64_t k, std::int64_t depth,
              const PlacedA& placed) const {
    const A* lines[product_block_depth];
    if (a_.transposed) {
      for (std::int64_t i = 0; i < depth; ++i) {
        lines[i] = a_.row(k + i) + first_row;
      }
      kernels_.pack_rows_a(lines, 0, placed.packed_rows, depth, scratch_, placed.panel_bytes);
      return;
    }
    const std::int64_t tile_rows = kernels_.tile_rows;
    for (std::int64_t row = 0; row < placed.packed_rows; row += tile_rows) {
      const std::int64_t rows = std::min(tile_rows, placed.packed_rows - row);
      for (std::int64_t i = 0; i < rows; ++i) {
        lines[i] = a_.row(first_row + row + i) + k;
      }
      kernels_.pack_lines_a(lines, static_cast<int>(rows), depth,
                            scratch_ + row / tile_rows * placed.panel_bytes);
    }
  }

  /// Columns whose panels exist already.
  void multiply_columns(const PanelOperand<B>& b, const ResultOperand<C>& c,
                        const ResultRange& range, std::int64_t k, std::int64_t depth,
                        const PlacedA& a) const {
    const std::int64_t first = range.first_column / width;
    if constexpr (std::is_same_v<B, bfloat16>) {
      if (kernels_.widen_panel != nullptr) {
        const std::int64_t pairs = (depth + 1) / 2;
        const std::int64_t panel_bytes = pairs * 2 * line;
        for (std::int64_t column = 0; column < range.columns; column += pack_group * width) {
          const std::int64_t columns = std::min(pack_group * width, range.columns - column);
          for (std::int64_t j = 0; j < columns; j += width) {
            kernels_.widen_panel(
                b.data + (first + (column + j) / width) * b.panel_stride + k * width, pairs,
                a.rest + j / width * panel_bytes);
          }
          run_columns(a, {a.rest, line, panel_bytes}, c, column, columns);
        }
        return;
      }
    }
    run_columns(a,
                {b.data + first * b.panel_stride + k * width, line,
                 b.panel_stride * static_cast<std::int64_t>(sizeof(B))},
                c, 0, range.columns);
  }

  /// Columns that are read where they are stored, or packed a group of panels at a time.
  void multiply_columns(const StoredOperand<B>& b, const ResultOperand<C>& c,
                        const ResultRange& range, std::int64_t k, std::int64_t depth,
                        const PlacedA& a) const {
    std::int64_t column = 0;
    if (reads_in_place<A>(b, range.rows, depth_)) {
      // Whole panels where they lie; what is left of a last one is packed, since tiles read whole
      // panels.
      column = range.columns / width * width;
      multiply_in_place(b, b.row(k) + range.first_column, c, depth, column, a);
    }
    if (column == range.columns) {
      return;
    }
    const B* lines[product_block_depth];
    if (!b.transposed) {
      for (std::int64_t i = 0; i < depth; ++i) {
        lines[i] = b.row(k + i) + range.first_column;
      }
    }
    const std::int64_t panel_bytes = a.steps * line;
    for (; column < range.columns; column += pack_group * width) {
      const std::int64_t columns = std::min(pack_group * width, range.columns - column);
      if (b.transposed) {
        for (std::int64_t first = 0; first < columns; first += width) {
          const std::int64_t existing = std::min(width, columns - first);
          for (std::int64_t j = 0; j < existing; ++j) {
            lines[j] = b.row(range.first_column + column + first + j) + k;
          }
          kernels_.pack_lines_b(lines, static_cast<int>(existing), depth,
                                a.rest + first / width * panel_bytes);
        }
      } else {
        kernels_.pack_rows_b(lines, column, columns, depth, a.rest, panel_bytes);
      }
      run_columns(a, {a.rest, line, panel_bytes}, c, column, columns);
    }
  }

  void multiply_in_place(const StoredOperand<B>& b, const B* first, const ResultOperand<C>& c,
                         std::int64_t depth, std::int64_t columns, PlacedA a) const {
    constexpr auto element = static_cast<std::int64_t>(sizeof(B));
    if constexpr (std::is_same_v<B, bfloat16>) {
      a.steps = depth / 2;
      run_packed(kernels_.block_b_rows, a, {first, 2 * b.stride * element, width * element}, c, 0,
                 columns);
    } else {
      run_columns(a, {first, b.stride * element, width * element}, c, 0, columns);
    }
  }

  struct PlacedB {
    const void* data;
    std::int64_t step_bytes;
    std::int64_t panel_bytes;
  };

  void run_columns(const PlacedA& a, const PlacedB& b, const ResultOperand<C>& c,
                   std::int64_t column, std::int64_t columns) const {
    if (a.in_place_rows > 0) {
      BlockWork<C> work = work_of(a, b, c, column, columns);
      work.a = a.in_place;
      work.a_stride = a_.stride;
      work.a_panel_bytes = kernels_.tile_rows * kernels_.a_step_bytes;
      work.rows = a.in_place_rows;
      (a_.transposed ? kernels_.block : kernels_.block_a_rows)(work);
    }
    if (a.packed_rows > 0) {
      run_packed(kernels_.block, a, b, c, column, columns);
    }
  }

  void run_packed(Block block, const PlacedA& a, const PlacedB& b, const ResultOperand<C>& c,
                  std::int64_t column, std::int64_t columns) const {
    BlockWork<C> work = work_of(a, b, c, column, columns);
    work.a = scratch_;
    work.a_stride = kernels_.tile_rows;
    work.a_panel_bytes = a.panel_bytes;
    work.rows = a.packed_rows;
    work.c += a.in_place_rows * c.stride;
    block(work);
  }

  [[nodiscard]] static BlockWork<C> work_of(const PlacedA& a, const PlacedB& b,
                                            const ResultOperand<C>& c, std::int64_t column,
                                            std::int64_t columns) {
    BlockWork<C> work{};
    work.b = b.data;
    work.b_step_bytes = b.step_bytes;
    work.b_panel_bytes = b.panel_bytes;
    work.c = c.data + column / width * c.panel_stride;
    work.c_stride = c.stride;
    work.c_panel = c.panel_stride;
    work.steps = a.steps;
    work.columns = columns;
    work.add = a.add;
    return work;
  }

  static void clear(const ResultOperand<C>& c, const ResultRange& range) {
    for (std::int64_t row = 0; row < range.rows; ++row) {
      for (std::int64_t column = 0; column < range.columns; ++column) {
        c.data[row * c.stride + column / width * c.panel_stride + column % width] = C(0);
      }
    }
  }

  const Kernels& kernels_;
  StoredOperand<A> a_;
  std::int64_t depth_;
  std::byte* scratch_;
};

}  // namespace heddle::detail

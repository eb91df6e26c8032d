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

template <class T>
[[nodiscard]] constexpr bool is_near(std::int64_t lines, std::int64_t stride) {
  return lines * stride * static_cast<std::int64_t>(sizeof(T)) <= in_place_bytes;
}

/// Whether tiles can read B as it is stored.
template <class A, class B>
[[nodiscard]] constexpr bool is_in_rows(const StoredOperand<B>& b) {
  return std::is_same_v<A, B> && !b.transposed && b.row_ids == nullptr;
}

/// Whether tiles read B where it is, all but the columns of a last panel that is not whole. Pairs of
/// bf16 are made anew by each tile, so only few tiles should.
template <class A, class B>
[[nodiscard]] constexpr bool reads_in_place(const StoredOperand<B>& b, std::int64_t rows,
                                            std::int64_t depth) {
  return is_in_rows<A>(b) && depth % step_depth<B> == 0 &&
         (rows <= in_place_rows || (step_depth<B> == 1 && is_near<B>(depth, b.stride)));
}

/// Whether few rows read B, from afar, in the order of memory.
template <class A, class B>
[[nodiscard]] constexpr bool streams(const StoredOperand<B>& b, std::int64_t rows,
                                     std::int64_t depth) {
  return rows <= in_place_rows && reads_in_place<A>(b, rows, depth) && !is_near<B>(depth, b.stride);
}

/// Whether tiles read B in a way that wants A step after step: streaming, or packing B meanwhile.
template <class A, class B>
[[nodiscard]] constexpr bool wants_steps(const StoredOperand<B>& b, std::int64_t rows,
                                         std::int64_t depth) {
  return is_in_rows<A>(b) && (!reads_in_place<A>(b, rows, depth) || streams<A>(b, rows, depth));
}
template <class A, class B>
[[nodiscard]] constexpr bool wants_steps(const PanelOperand<B>&, std::int64_t, std::int64_t) {
  return false;
}

/// Whether tiles read A where it is, all but the rows of a last tile that is not whole.
template <class A, class Right>
[[nodiscard]] constexpr bool reads_in_place(const StoredOperand<A>& a, const Right& b,
                                            std::int64_t rows, std::int64_t columns,
                                            std::int64_t depth) {
  if (!std::is_same_v<A, AccumulatorOf<typename Right::Element>> || a.row_ids != nullptr) {
    return false;
  }
  const bool near = is_near<A>(a.transposed ? depth : rows, a.stride);
  return a.transposed ? near
                      : columns <= in_place_columns || (near && !wants_steps<A>(b, rows, depth));
}

/// Scratch for the chains of a streaming block.
template <class B>
[[nodiscard]] constexpr std::int64_t chain_bytes(std::int64_t rows, std::int64_t columns) {
  return rows <= in_place_rows
             ? in_place_rows * columns * static_cast<std::int64_t>(sizeof(AccumulatorOf<B>))
             : 0;
}

/// A product, block of rows by block of K: packs what must be packed and runs the path's tiles. The
/// driver of everything public.
template <class A, class B>
class BlockProduct {
  using Kernels = GemmKernels<A, B>;
  using C = typename Kernels::C;
  static constexpr std::int64_t width = panel_columns<B>;
  static constexpr std::int64_t group = pack_group * width;
  static constexpr std::int64_t line = 64;
  static constexpr auto element = static_cast<std::int64_t>(sizeof(B));

 public:
  BlockProduct(const StoredOperand<A>& a, std::int64_t depth, std::byte* scratch)
      : kernels_(current_kernels<A, B>()), a_(a), depth_(depth), scratch_(scratch) {}

  /// The range of the product of A with each of several right factors, written from the first element
  /// of each c on. A is packed once for all; B as often as there are blocks of rows. The columns of
  /// `next`, the range that follows, are fetched towards the end.
  template <class Right, std::size_t count>
  void run(const std::array<Right, count>& b, std::array<ResultOperand<C>, count> c,
           const ResultRange& range, const ResultRange& next, Write write) const {
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
      const bool a_in_place = reads_in_place(a_, b[0], block.rows, block.columns, depth_);
      for (std::int64_t k = 0; k < depth_; k += product_block_depth) {
        const std::int64_t depth = std::min(product_block_depth, depth_ - k);
        PlacedA a = place_a(block, k, depth, a_in_place);
        a.add = k > 0 || write == Write::accumulate;
        for (std::size_t i = 0; i < count; ++i) {
          FetchAhead after;
          if (i + 1 < count) {
            after = fetch_ahead(b[i + 1], k, range.first_column, range.columns);
          } else if (k + depth < depth_) {
            after = fetch_ahead(b[0], k + depth, range.first_column, range.columns);
          } else if (row + step < range.rows) {
            after = fetch_ahead(b[0], 0, range.first_column, range.columns);
          } else if (next.columns > 0) {
            after = fetch_ahead(b[0], 0, next.first_column, next.columns);
          }
          multiply_columns(b[i], result_at(c[i], row, 0), block, k, depth, a, after);
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

  [[nodiscard]] PlacedA place_a(const ResultRange& range, std::int64_t k, std::int64_t depth,
                                bool in_place) const {
    const std::int64_t tile_rows = kernels_.tile_rows;
    PlacedA placed{};
    placed.steps = packed_depth(depth) / kernels_.step_depth;
    placed.panel_bytes = tile_rows * kernels_.a_step_bytes * placed.steps;
    if (in_place) {
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
    const std::int64_t tile_rows = kernels_.tile_rows;
    const A* lines[product_block_depth];
    if (a_.transposed) {
      for (std::int64_t i = 0; i < depth; ++i) {
        lines[i] = a_.row(k + i) + first_row;
      }
      // Few panels at a time: they lie a power of two apart, on the same sets of the first-level cache.
      for (std::int64_t row = 0; row < placed.packed_rows; row += 8 * tile_rows) {
        kernels_.pack_rows_a(lines, row, std::min(8 * tile_rows, placed.packed_rows - row), depth,
                             scratch_ + row / tile_rows * placed.panel_bytes, placed.panel_bytes);
      }
      return;
    }
    for (std::int64_t row = 0; row < placed.packed_rows; row += tile_rows) {
      const std::int64_t rows = std::min(tile_rows, placed.packed_rows - row);
      for (std::int64_t i = 0; i < rows; ++i) {
        lines[i] = a_.row(first_row + row + i) + k;
      }
      kernels_.pack_lines_a(lines, static_cast<int>(rows), depth,
                            scratch_ + row / tile_rows * placed.panel_bytes);
    }
  }

  /// The first group of panels of these columns, from row k on: what packing will read.
  [[nodiscard]] FetchAhead fetch_ahead(const StoredOperand<B>& b, std::int64_t k,
                                       std::int64_t first_column, std::int64_t columns) const {
    if (b.row_ids != nullptr) {
      return {};
    }
    const auto pieces = [](std::int64_t elements) {
      return (elements * element + fetch_row_bytes - 1) / fetch_row_bytes;
    };
    const std::int64_t depth = std::min(product_block_depth, depth_ - k);
    const std::int64_t taken = std::min(fetch_row_bytes / element, columns);
    const std::int64_t rows = b.transposed ? taken : depth;
    const B* const first = b.transposed ? b.row(first_column) + k : b.row(k) + first_column;
    return {reinterpret_cast<const char*>(first), b.stride * element, rows,
            rows * pieces(b.transposed ? depth : taken)};
  }

  [[nodiscard]] static FetchAhead fetch_ahead(const PanelOperand<B>&, std::int64_t, std::int64_t,
                                              std::int64_t) {
    return {};  // panels lie one behind the other, which hardware foresees
  }

  /// Columns whose panels exist already.
  void multiply_columns(const PanelOperand<B>& b, const ResultOperand<C>& c,
                        const ResultRange& range, std::int64_t k, std::int64_t depth,
                        const PlacedA& a, const FetchAhead&) const {
    const std::int64_t first = range.first_column / width;
    if constexpr (std::is_same_v<B, bfloat16>) {
      if (kernels_.widen_panel != nullptr) {
        const std::int64_t pairs = (depth + 1) / 2;
        const std::int64_t panel_bytes = pairs * 2 * line;
        for (std::int64_t column = 0; column < range.columns; column += group) {
          const std::int64_t columns = std::min(group, range.columns - column);
          for (std::int64_t j = 0; j < columns; j += width) {
            kernels_.widen_panel(
                b.data + (first + (column + j) / width) * b.panel_stride + k * width, pairs,
                a.rest + j / width * panel_bytes);
          }
          run_columns(kernels_.block, a, {a.rest, line, panel_bytes}, c, column, columns);
        }
        return;
      }
    }
    run_columns(kernels_.block, a,
                {b.data + first * b.panel_stride + k * width, line,
                 b.panel_stride * static_cast<std::int64_t>(sizeof(B))},
                c, 0, range.columns);
  }

  /// Columns that are read where they are stored, packed by the tiles of the first rows, or packed a
  /// group of panels at a time: whole panels by one of the first two where it can be, since tiles read
  /// whole panels.
  void multiply_columns(const StoredOperand<B>& b, const ResultOperand<C>& c,
                        const ResultRange& range, std::int64_t k, std::int64_t depth,
                        const PlacedA& a, const FetchAhead& after) const {
    const std::int64_t whole = range.columns / width * width;
    std::int64_t column = 0;
    if (reads_in_place<A>(b, range.rows, depth_)) {
      column = whole;
      const PlacedB rows = in_rows(b.row(k) + range.first_column, b.stride);
      if (streams<A>(b, range.rows, depth_) && is_in_one_place(a)) {
        multiply_streaming(rows, c, depth, whole, a);
      } else {
        multiply_in_place(rows, c, depth, whole, a);
      }
    } else if (tiles_pack(b, a, depth)) {
      for (; column < whole; column += fetch_row_bytes / element) {
        const std::int64_t columns = std::min(fetch_row_bytes / element, whole - column);
        multiply_packing(in_rows(b.row(k) + range.first_column + column, b.stride),
                         result_at(c, 0, column), depth, columns, a,
                         column + columns < range.columns
                             ? fetch_ahead(b, k, range.first_column + column + columns,
                                           range.columns - column - columns)
                             : after);
      }
      column = whole;
    }
    if (column < range.columns) {
      multiply_packed(b, c, range, column, k, depth, a, after);
    }
  }

  struct PlacedB {
    const void* data;
    std::int64_t step_bytes;
    std::int64_t panel_bytes;
  };

  [[nodiscard]] static PlacedB in_rows(const B* first, std::int64_t stride) {
    return {first, step_depth<B> * stride * element, width * element};
  }

  void multiply_in_place(const PlacedB& rows, const ResultOperand<C>& c, std::int64_t depth,
                         std::int64_t columns, PlacedA a) const {
    a.steps = depth / step_depth<B>;
    run_columns(step_depth<B> == 2 ? kernels_.block_b_rows : kernels_.block, a, rows, c, 0,
                columns);
  }

  /// Whether all rows of A lie step after step in one place.
  [[nodiscard]] bool is_in_one_place(const PlacedA& a) const {
    return a.in_place_rows == 0 || (a_.transposed && a.packed_rows == 0);
  }

  /// Whether the tiles of the first rows can pack B: at least one tile of rows.
  [[nodiscard]] bool tiles_pack(const StoredOperand<B>& b, const PlacedA& a,
                                std::int64_t depth) const {
    return is_in_rows<A>(b) && depth % step_depth<B> == 0 && is_in_one_place(a) &&
           a.in_place_rows + a.packed_rows >= kernels_.tile_rows;
  }

  /// All rows of A, which lie step after step in one place, against B in rows.
  [[nodiscard]] BlockWork<C> work_in_rows(const PlacedB& rows, const ResultOperand<C>& c,
                                          std::int64_t depth, std::int64_t columns,
                                          const PlacedA& a) const {
    BlockWork<C> work = work_of(a, rows, c, 0, columns);
    work.steps = depth / step_depth<B>;
    if (a.in_place_rows > 0) {
      take_in_place(a, work);
    } else {
      take_packed(a, work);
    }
    return work;
  }

  void multiply_packing(const PlacedB& rows, const ResultOperand<C>& c, std::int64_t depth,
                        std::int64_t columns, const PlacedA& a, const FetchAhead& ahead) const {
    BlockWork<C> work = work_in_rows(rows, c, depth, columns, a);
    work.ahead = ahead;
    work.packed_b = a.rest;
    work.packed_b_panel_bytes = a.steps * line;
    kernels_.packing_block(work);
  }

  void multiply_streaming(const PlacedB& rows, const ResultOperand<C>& c, std::int64_t depth,
                          std::int64_t columns, const PlacedA& a) const {
    if (columns > 0) {
      BlockWork<C> work = work_in_rows(rows, c, depth, columns, a);
      work.chains = a.rest;
      kernels_.streaming_block(work);
    }
  }

  void multiply_packed(const StoredOperand<B>& b, const ResultOperand<C>& c,
                       const ResultRange& range, std::int64_t column, std::int64_t k,
                       std::int64_t depth, const PlacedA& a, const FetchAhead& after) const {
    const B* lines[product_block_depth];
    if (!b.transposed) {
      for (std::int64_t i = 0; i < depth; ++i) {
        lines[i] = b.row(k + i) + range.first_column;
      }
    }
    const std::int64_t panel_bytes = a.steps * line;
    for (; column < range.columns; column += group) {
      const std::int64_t columns = std::min(group, range.columns - column);
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
      const std::int64_t rest = range.columns - column - columns;
      run_columns(
          kernels_.block, a, {a.rest, line, panel_bytes}, c, column, columns,
          rest == 0 ? after : fetch_ahead(b, k, range.first_column + column + columns, rest));
    }
  }

  /// Every row against columns of B; `by_step` takes A step after step.
  void run_columns(Block by_step, const PlacedA& a, const PlacedB& b, const ResultOperand<C>& c,
                   std::int64_t column, std::int64_t columns, const FetchAhead& ahead = {}) const {
    BlockWork<C> work = work_of(a, b, c, column, columns);
    work.ahead = ahead;
    if (a.in_place_rows > 0) {
      take_in_place(a, work);
      (a_.transposed ? by_step : kernels_.block_a_rows)(work);
      work.ahead = {};
      work.c += a.in_place_rows * c.stride;
    }
    if (a.packed_rows > 0) {
      take_packed(a, work);
      by_step(work);
    }
  }

  void take_in_place(const PlacedA& a, BlockWork<C>& work) const {
    work.a = a.in_place;
    work.a_stride = a_.stride;
    work.a_panel_bytes = kernels_.tile_rows * kernels_.a_step_bytes;
    work.rows = a.in_place_rows;
  }

  void take_packed(const PlacedA& a, BlockWork<C>& work) const {
    work.a = scratch_;
    work.a_stride = kernels_.tile_rows;
    work.a_panel_bytes = a.panel_bytes;
    work.rows = a.packed_rows;
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

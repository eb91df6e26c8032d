#pragma once

#include <cstdint>
#include <type_traits>

#include "heddle/core/scalar.hpp"

namespace heddle {

/// How deep the blocks of a product's sum are: inside a block one chain of fused multiply-adds, then
/// the blocks are added in order. A constant of the library, not a tuning parameter: it is what the
/// bits of every product depend on. (Between 64 and 2048 the rate is flat; the error is not.)
inline constexpr std::int64_t product_block_depth = 512;

/// Columns of one panel of a packed right factor: a cache line of accumulators, which every path's
/// tile is a whole number of.
template <Storage T>
inline constexpr std::int64_t panel_columns = 64 /
                                              static_cast<std::int64_t>(sizeof(AccumulatorOf<T>));

namespace detail {

/// Rows of a right factor that a row of its panels holds: two for bf16, whose products are summed in
/// pairs.
template <Storage T>
inline constexpr std::int64_t step_depth = std::is_same_v<T, bfloat16> ? 2 : 1;

/// Panels of B that are packed together: 256 bytes of each row of f32 are read at once, and at most
/// 128 KiB are written before they are used.
inline constexpr std::int64_t pack_group = 4;

/// Bytes of a row of B that are fetched ahead at once: a few cache lines, since the next row is likely
/// on another page.
inline constexpr std::int64_t fetch_row_bytes = 256;

/// Elements of K that a block of few rows multiplies with all columns before the next: few enough for
/// hardware to follow that many rows of B, many enough to hide that its chains go through memory.
inline constexpr int stretch_depth = 16;

/// Memory that a block's tiles fetch into the second-level cache while they multiply: what will be
/// packed next. Row by row fetch_row_bytes of it, then the next so many bytes of each row.
struct FetchAhead {
  const char* first = nullptr;  ///< null: nothing
  std::int64_t stride = 0;      ///< bytes between rows
  std::int64_t rows = 0;
  std::int64_t pieces = 0;  ///< of fetch_row_bytes, in all rows
};

/// One block of a product: all columns and any number of rows over one block of K. A step is one
/// element of K, or a pair of bf16.
///
///   a  row r, step s: row after row    a + r * a_stride + s
///                     step after step  panels of the path's tile rows, a_panel_bytes apart; in a
///                                      panel the rows side by side, step s + 1 (bf16 widened: the
///                                      other element of its pair) a_stride behind step s
///   b  panel p, step s: a cache line at b + p * b_panel_bytes + s * b_step_bytes
///   c  panel p, row r, column j: c + p * c_panel + r * c_stride + j
template <class C>
struct BlockWork {
  const void* a;
  std::int64_t a_stride;
  std::int64_t a_panel_bytes;
  const void* b;
  std::int64_t b_step_bytes;
  std::int64_t b_panel_bytes;
  C* c;
  std::int64_t c_stride;
  std::int64_t c_panel;
  std::int64_t steps;
  std::int64_t rows;
  std::int64_t columns;  ///< that exist: only they are written
  bool add;              ///< c += the block's sum, else c = it
  FetchAhead ahead;
  void*
      packed_b;  ///< where a packing block leaves a tile's panels of B, packed_b_panel_bytes apart
  std::int64_t packed_b_panel_bytes;
  void* chains;  ///< a streaming block's: [rows of whole tiles, columns] of C
};

/// What one path offers for factors stored as A and B. The functions are compiled for the path's
/// instructions; the driver that calls them is not. `lines` run along K, `rows` across it.
template <class A, class B>
struct GemmKernels {
  using C = AccumulatorOf<B>;
  using Block = void (*)(const BlockWork<C>& work);

  std::int64_t tile_rows;
  std::int64_t a_step_bytes;    ///< of one row of packed A in one step
  std::int64_t step_depth;      ///< elements of K in a step of packed factors
  std::int64_t depth_multiple;  ///< of K in packed factors, filled up with zeros
  void (*pack_lines_a)(const A* const* lines, int count, std::int64_t depth, void* out);
  void (*pack_rows_a)(const A* const* rows, std::int64_t column, std::int64_t count,
                      std::int64_t depth, void* out, std::int64_t panel_bytes);
  void (*pack_lines_b)(const B* const* lines, int count, std::int64_t depth, void* out);
  void (*pack_rows_b)(const B* const* rows, std::int64_t column, std::int64_t count,
                      std::int64_t depth, void* out, std::int64_t panel_bytes);
  Block block;         ///< A step after step; B in panels, or rows of f32 and f64 in place
  Block block_a_rows;  ///< the same with A row after row; null where A must be widened
  Block block_b_rows;  ///< bf16: A step after step, steps of two rows of B in place
  /// The same for f32 and f64 too, whole panels and at least tile_rows rows: the first tile packs B, the
  /// others read it packed. Null where A and B are stored as different types.
  Block packing_block;
  /// The same operands, few rows: B is read in the order of memory.
  Block streaming_block;
  /// A panel of bf16 pairs as this path multiplies it; null where that is as it is.
  void (*widen_panel)(const bfloat16* pairs, std::int64_t count, void* out);
};

/// What one path offers for matrices that are kept in panels: bf16 as pairs.
template <class T>
struct PanelPackers {
  void (*pack_lines)(const T* const* lines, int count, std::int64_t depth, void* out);
  void (*pack_rows)(const T* const* rows, std::int64_t column, std::int64_t count,
                    std::int64_t depth, void* out, std::int64_t panel_bytes);
};

}  // namespace detail
}  // namespace heddle

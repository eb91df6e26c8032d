#pragma once

#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "heddle/packing/first_fit.hpp"
#include "heddle/packing/pack_options.hpp"
#include "heddle/packing/packed_chunk.hpp"
#include "heddle/packing/rollout.hpp"
#include "heddle/packing/row_layout.hpp"
#include "heddle/packing/row_writer.hpp"
#include "heddle/packing/segment_table.hpp"

namespace heddle::packing {

/// A chunk and the items that found no place in it, in arrival order.
struct ChunkAndLeftover {
  PackedChunk chunk;
  std::vector<std::int32_t> leftover;
};

namespace detail {

/// Where items[pending[0]], items[pending[1]], ... go: their bins, and these as rows of whole chunks.
struct Placement {
  BinAssignment bins;
  SegmentTable rows;
};

[[nodiscard]] inline Placement place(std::span<const Rollout> items,
                                     std::span<const std::int32_t> pending,
                                     const PackOptions& options) {
  constexpr std::int64_t no_limit = std::numeric_limits<std::int32_t>::max();
  Placement placement{.bins = assign_bins(items, pending, no_limit, options), .rows = {}};
  placement.rows = lay_out_rows(items, placement.bins,
                                align_up(placement.bins.bins(), options.pack_size), options);
  return placement;
}

[[nodiscard]] inline std::vector<std::int32_t> all_indices(std::span<const Rollout> items) {
  std::vector<std::int32_t> indices(items.size());
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

/// Writes rows of a table to the buffers and hands them out as a chunk.
[[nodiscard]] inline PackedChunk write_chunk(std::string_view where, std::span<const Rollout> items,
                                             const SegmentTable& table, const RowRange& rows,
                                             const PackOptions& options, ChunkBuffers& buffers) {
  PackedChunk chunk;
  chunk.dims = chunk_dims(where, items, table, rows, options.budget);
  chunk.arrays = buffers.prepare(chunk.dims);
  write_rows(items, table, rows, options.pad_id, chunk.arrays);
  chunk.segments = table.slice(rows);
  chunk.num_segments = options.num_segments();
  return chunk;
}

}  // namespace detail

/// Where every item of a batch goes: chunks of pack_size rows, each first-fit decreasing over what the
/// chunks before it left, until nothing is left. A last chunk is filled up with rows of padding.
///
/// specials  no item: no row, after the options have been checked; items of no token alone: one chunk of
///           padding
/// cost      O(n log n) for n items (max_loss_tokens apart: first_fit_decreasing), and the shifts
/// throws    Error for what validate(options) and validate(items) refuse
/// source    google/tunix pack_core; spec/packing.md 2.2
[[nodiscard]] inline SegmentTable plan(std::span<const Rollout> items, const PackOptions& options) {
  constexpr const char* where = "packing::plan";
  validate(where, options);
  validate(where, items, options);
  return detail::place(items, detail::all_indices(items), options).rows;
}

/// One chunk of pack_size rows, and what did not fit.
///
/// writes    the buffers, which the chunk points to; leftover and the segments' item_index are indices
///           of `items`
/// specials  no item: a chunk of padding
/// throws    Error for what validate(options), validate(items) and chunk_dims refuse
/// source    google/tunix; spec/packing.md 2.1
[[nodiscard]] inline ChunkAndLeftover pack_chunk(std::span<const Rollout> items,
                                                 const PackOptions& options,
                                                 ChunkBuffers& buffers) {
  constexpr const char* where = "packing::pack_chunk";
  validate(where, options);
  validate(where, items, options);
  BinAssignment bins =
      detail::assign_bins(items, detail::all_indices(items), options.pack_size, options);
  const SegmentTable table = lay_out_rows(items, bins, options.pack_size, options);
  return {
      .chunk = detail::write_chunk(where, items, table, {0, options.pack_size}, options, buffers),
      .leftover = std::move(bins.leftover)};
}

/// All items as chunks of pack_size rows, placed as plan() says. Each chunk is written to the buffers
/// and handed to `use` before the next takes its place.
///
/// writes    the buffers; is_update_step of the last chunk
/// specials  no item: `use` is not called
/// throws    Error for what validate(options), validate(items) and, for any of the chunks, chunk_dims
///           refuse: before the first is written
template <class Use>
void pack(std::span<const Rollout> items, const PackOptions& options, ChunkBuffers& buffers,
          const Use& use) {
  constexpr const char* where = "packing::pack";
  validate(where, options);
  validate(where, items, options);
  const SegmentTable table = detail::place(items, detail::all_indices(items), options).rows;
  for (std::int64_t row = 0; row < table.rows(); row += options.pack_size) {
    static_cast<void>(
        detail::chunk_dims(where, items, table, {row, options.pack_size}, options.budget));
  }
  for (std::int64_t row = 0; row < table.rows(); row += options.pack_size) {
    PackedChunk chunk =
        detail::write_chunk(where, items, table, {row, options.pack_size}, options, buffers);
    chunk.is_update_step = row + options.pack_size == table.rows();
    use(std::as_const(chunk));
  }
}

}  // namespace heddle::packing

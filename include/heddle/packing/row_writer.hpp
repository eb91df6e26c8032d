#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/streaming_copy.hpp"
#include "heddle/core/view.hpp"
#include "heddle/packing/packed_chunk.hpp"
#include "heddle/packing/rollout.hpp"
#include "heddle/packing/segment_table.hpp"

namespace heddle::packing {

namespace detail {

/// "0, 4, 7", cut where it is long.
[[nodiscard]] inline std::string index_list(const std::vector<std::int32_t>& indices) {
  constexpr std::size_t shown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(indices.size(), shown); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(indices[i]);
  }
  return indices.size() > shown ? text + ", ..." : text;
}

/// Refuses a field that some documents of the rows carry and others do not; says whether they do.
inline bool carried(std::string_view where, std::span<const Rollout> items,
                    std::span<const std::int32_t> documents, PerTokenField field) {
  std::vector<std::int32_t> without;
  for (const std::int32_t item : documents) {
    if (!items[static_cast<std::size_t>(item)].per_token[field].is_given()) {
      without.push_back(item);
    }
  }
  if (!without.empty() && without.size() < documents.size()) {
    fail(where, "items[" + index_list(without) + "]." + std::string(name(field)), nullptr,
         "must be given for every item of a chunk that has tokens, or for none");
  }
  return without.empty() && !documents.empty();
}

/// Refuses rows that the items or the budget cannot fill; what the writer's pointers rely on.
inline void validate_rows(std::string_view where, std::span<const Rollout> items,
                          const SegmentTable& table, const RowRange& rows, std::int64_t tokens) {
  require(rows.first >= 0 && rows.first <= table.rows(), where, "rows.first", rows.first,
          "must be a row of the table");
  require(rows.count >= 0 && rows.count <= table.rows() - rows.first, where, "rows.count",
          rows.count, "must end within the table");
  for (std::int64_t row = rows.first; row < rows.first + rows.count; ++row) {
    const std::span<const Segment> segments = table.row(row);
    std::int64_t free = 0;
    for (std::size_t i = 0; i < segments.size(); ++i) {
      const Segment& segment = segments[i];
      const auto argument = [row, i](const char* what) {
        return element_name(element_name("table.row", row), i) + what;
      };
      if (segment.item_index < 0 || std::cmp_greater_equal(segment.item_index, items.size())) {
        fail(where, argument(".item_index"), segment.item_index, "must be the index of an item");
      }
      const Rollout& item = items[static_cast<std::size_t>(segment.item_index)];
      if (segment.len < 1 || segment.len != item.length()) {
        fail(where, argument(".len"), segment.len,
             "must be >= 1 and the item's length (" + std::to_string(item.length()) + ")");
      }
      if (segment.prompt_len != item.prompt_length()) {
        fail(where, argument(".prompt_len"), segment.prompt_len,
             "must be the item's prompt length (" + std::to_string(item.prompt_length()) + ")");
      }
      validate(where, segment.item_index, item, tokens);
      if (segment.start < free) {
        fail(where, argument(".start"), segment.start,
             "must not lie before " + std::to_string(free) + ", the end of what stands before it");
      }
      free = std::int64_t{segment.start} + segment.len;
      if (free > tokens) {
        fail(where, argument(".end"), free,
             "must not exceed the budget (" + std::to_string(tokens) + ")");
      }
    }
  }
}

/// chunk_dims, for whoever refuses.
[[nodiscard]] inline ChunkDims chunk_dims(std::string_view where, std::span<const Rollout> items,
                                          const SegmentTable& table, const RowRange& rows,
                                          std::int64_t budget) {
  validate_rows(where, items, table, rows, budget);
  std::vector<std::int32_t> documents;
  for (std::int64_t row = rows.first; row < rows.first + rows.count; ++row) {
    for (const Segment& segment : table.row(row)) {
      documents.push_back(segment.item_index);
    }
  }
  std::sort(documents.begin(), documents.end());
  ChunkDims dims{.rows = rows.count, .tokens = budget};
  for (const PerTokenField field : per_token_fields) {
    dims.carried[field] = carried(where, items, documents, field);
  }
  for (const std::int32_t item : documents) {
    const auto& routing = items[static_cast<std::size_t>(item)].routed_experts;
    if (!routing) {
      continue;
    }
    if (dims.layers == 0) {
      dims.layers = routing->layers;
      dims.top_k = routing->top_k;
    }
    if (routing->layers != dims.layers || routing->top_k != dims.top_k) {
      fail(where, element_name("items", item) + ".routed_experts",
           std::to_string(routing->layers) + " x " + std::to_string(routing->top_k),
           "must have the layers x top_k of the items before it (" + std::to_string(dims.layers) +
               " x " + std::to_string(dims.top_k) + ")");
    }
  }
  return dims;
}

}  // namespace detail

/// What the arrays of these rows look like: budget positions each, the per-token fields that their
/// documents carry, the routing's layers and top_k.
///
/// specials  a field is carried by all documents of the rows or by none; items without routing are legal
///           beside items with it; items of no token are not asked
/// throws    Error for: rows outside the table, documents that do not fit their item or the row, items that
///           validate refuses; then naming the items without a field that others carry, or the first whose
///           (layers, top_k) differ from those before it
/// source    spec/packing.md 1.1 (P-2)
[[nodiscard]] inline ChunkDims chunk_dims(std::span<const Rollout> items, const SegmentTable& table,
                                          const RowRange& rows, std::int64_t budget) {
  return detail::chunk_dims("packing::chunk_dims", items, table, rows, budget);
}

namespace detail {

/// Walks positions [first, last) of a row: pad(from, to) for padding, token(index, segment, from, to)
/// for tokens from..to-1 of a segment, in order, each position once.
template <class Pad, class Token>
void walk(std::span<const Segment> row, std::int64_t first, std::int64_t last, const Pad& pad,
          const Token& token) {
  // Blocks of a row of many documents start in the middle: skip what ends before.
  auto segment = std::partition_point(row.begin(), row.end(), [first](const Segment& candidate) {
    return candidate.end() <= first;
  });
  std::int64_t at = first;
  for (; segment != row.end() && segment->start < last; ++segment) {
    const std::int64_t from = std::max<std::int64_t>(segment->start, first);
    const std::int64_t to = std::min<std::int64_t>(segment->end(), last);
    if (at < from) {
      pad(at, from);
    }
    token(segment - row.begin(), *segment, from, to);
    at = to;
  }
  if (at < last) {
    pad(at, last);
  }
}

template <class T>
void copy(std::span<const T> source, T* destination) {
  if (!source.empty()) {
    std::memcpy(destination, source.data(), source.size_bytes());
  }
}

/// One row of one [B,T] array: `padding` where there is no token, write(index, segment, destination)
/// for the len values of each document.
template <class T, class WriteDocument>
void write_row(std::span<T> row, std::span<const Segment> segments, T padding,
               const WriteDocument& write) {
  walk(
      segments, 0, static_cast<std::int64_t>(row.size()),
      [&](std::int64_t from, std::int64_t to) {
        std::fill(row.data() + from, row.data() + to, padding);
      },
      [&](std::int64_t index, const Segment& segment, std::int64_t from, std::int64_t) {
        write(index, segment, row.data() + from);
      });
}

/// Values of the completion behind zeros of the prompt.
inline void write_values(const Rollout& item, const TokenValues& values, float* destination) {
  const std::int64_t prompt = item.prompt_length();
  const std::int64_t completion = item.completion_length();
  std::fill_n(destination, prompt, 0.0F);
  if (values.is_given() && !values.is_scalar()) {
    copy(values.completion(completion), destination + prompt);
  } else {
    std::fill_n(destination + prompt, completion, values.scalar());
  }
}

/// Where the stores of a large array go.
enum class Stores {
  cached,
  streaming,  ///< past the caches: 1.4 to 1.5 times the rate of memcpy on a chunk far larger than they are
};

/// Positions of routing that one task writes: some megabytes at the recipe's 600 ids a token.
inline constexpr std::int64_t routing_block = 4096;

/// Routing of positions [first, last) of a row that begins at `row`. Offsets count elements and pass
/// 2^31 within the recipe's chunk.
inline void write_routing(std::span<const Rollout> items, std::span<const Segment> segments,
                          std::int64_t first, std::int64_t last, Stores stores,
                          std::int64_t per_token, std::int16_t* row) {
  const auto pad = [&](std::int64_t from, std::int64_t to) {
    std::fill(row + from * per_token, row + to * per_token, std::int16_t{-1});
  };
  walk(segments, first, last, pad,
       [&](std::int64_t, const Segment& segment, std::int64_t from, std::int64_t to) {
         const auto& routing = items[static_cast<std::size_t>(segment.item_index)].routed_experts;
         const std::int64_t routed_end =
             routing ? std::clamp(segment.start + routing->tokens, from, to) : from;
         if (from < routed_end) {
           const std::int16_t* const source =
               routing->ids.data() + (from - segment.start) * per_token;
           const auto bytes =
               static_cast<std::size_t>((routed_end - from) * per_token) * sizeof(std::int16_t);
           if (stores == Stores::streaming) {
             streaming_copy(source, row + from * per_token, bytes);
           } else {
             std::memcpy(row + from * per_token, source, bytes);
           }
         }
         pad(routed_end, to);
       });
  if (stores == Stores::streaming) {
    fence_stores();
  }
}

/// Writes one array, or a block of routing, of one row: an independent piece of work.
using Piece = std::function<void(std::int64_t row, std::span<const Segment> segments)>;

template <class T, class WriteDocument>
[[nodiscard]] Piece array_piece(MatrixView<T> array, T padding, const WriteDocument& write) {
  return [=](std::int64_t row, std::span<const Segment> segments) {
    write_row(array.row(row), segments, padding, write);
  };
}

/// The pieces of a row, the long ones first: what starts last should be short.
[[nodiscard]] inline std::vector<Piece> row_pieces(std::span<const Rollout> items,
                                                   const ChunkArrays& arrays, std::int32_t pad_id,
                                                   Stores stores) {
  const auto item = [items](const Segment& segment) -> const Rollout& {
    return items[static_cast<std::size_t>(segment.item_index)];
  };
  std::vector<Piece> pieces;
  const std::int64_t tokens = arrays.ids.cols();
  const MatrixView<std::int16_t> routed = arrays.routed_experts;
  for (std::int64_t first = 0; !routed.is_null() && first < tokens; first += routing_block) {
    pieces.push_back([=](std::int64_t row, std::span<const Segment> segments) {
      write_routing(items, segments, first, std::min(first + routing_block, tokens), stores,
                    routed.cols(), routed.row_block(row * tokens, tokens).data());
    });
  }
  pieces.push_back(array_piece(
      arrays.ids, pad_id, [=](std::int64_t, const Segment& segment, std::int32_t* destination) {
        copy(item(segment).prompt_ids, destination);
        copy(item(segment).completion_ids, destination + segment.prompt_len);
      }));
  pieces.push_back(array_piece(
      arrays.prompt_mask, 0.0F, [](std::int64_t, const Segment& segment, float* destination) {
        std::fill_n(destination, segment.prompt_len, 1.0F);
        std::fill(destination + segment.prompt_len, destination + segment.len, 0.0F);
      }));
  pieces.push_back(array_piece(
      arrays.completion_mask, 0.0F, [=](std::int64_t, const Segment& segment, float* destination) {
        std::fill_n(destination, segment.prompt_len, 0.0F);
        write_completion_mask(
            item(segment), {destination + segment.prompt_len, item(segment).completion_ids.size()});
      }));
  pieces.push_back(array_piece(arrays.advantages, 0.0F,
                               [=](std::int64_t, const Segment& segment, float* destination) {
                                 write_values(item(segment), item(segment).advantages, destination);
                               }));
  pieces.push_back(
      array_piece(arrays.segment_ids, std::int32_t{0},
                  [](std::int64_t index, const Segment& segment, std::int32_t* destination) {
                    std::fill_n(destination, segment.len, static_cast<std::int32_t>(index) + 1);
                  }));
  pieces.push_back(array_piece(arrays.segment_positions, std::int32_t{0},
                               [](std::int64_t, const Segment& segment, std::int32_t* destination) {
                                 std::iota(destination, destination + segment.len, 0);
                               }));
  for (const PerTokenField field : per_token_fields) {
    if (!arrays.per_token[field].is_null()) {
      pieces.push_back(array_piece(arrays.per_token[field], 0.0F,
                                   [=](std::int64_t, const Segment& segment, float* destination) {
                                     write_values(item(segment), item(segment).per_token[field],
                                                  destination);
                                   }));
    }
  }
  return pieces;
}

}  // namespace detail

/// Writes rows of a segment table: each position of each array once, at its final place.
///
/// shapes    arrays of chunk_dims(items, table, rows, budget), where budget = arrays.ids.cols
/// dtypes    ids and segments i32, masks and values f32, routing i16
/// writes    all of every array; alias: arrays disjoint from the items and from each other
/// specials  rows.count = 0: no-op; rows without documents are all padding
/// order     the same bytes for any number of threads
/// memory    a list of pieces of a row
/// cost      cost(dims, tokens): bytes alone; parallel over rows, their arrays and blocks of routing;
///           large chunks' routing passes the caches by
/// throws    Error for what chunk_dims refuses and for arrays that validate(dims, arrays) refuses
/// source    spec/packing.md 1.2, 4, 9
inline void write_rows(std::span<const Rollout> items, const SegmentTable& table,
                       const RowRange& rows, std::int32_t pad_id, const ChunkArrays& arrays) {
  constexpr const char* where = "packing::write_rows";
  const ChunkDims dims = detail::chunk_dims(where, items, table, rows, arrays.ids.cols());
  validate(where, dims, arrays);

  const std::int64_t bytes = cost(dims, 0).bytes_written;
  const std::vector<detail::Piece> pieces = detail::row_pieces(
      items, arrays, pad_id,
      bytes >= streaming_bytes ? detail::Stores::streaming : detail::Stores::cached);
  const auto piece_count = static_cast<std::int64_t>(pieces.size());
  const auto write = [&](std::int64_t task) {
    const std::int64_t row = task / piece_count;
    pieces[static_cast<std::size_t>(task % piece_count)](row, table.row(rows.first + row));
  };
  // Below this a parallel loop costs more than the writing.
  constexpr std::int64_t small_chunk = std::int64_t{1} << 18;
  if (bytes < small_chunk) {
    for (std::int64_t task = 0; task < rows.count * piece_count; ++task) {
      write(task);
    }
  } else {
    parallel_tasks(rows.count * piece_count, write);
  }
  for (std::int64_t row = 0; row < rows.count; ++row) {
    arrays.num_real_segments[static_cast<std::size_t>(row)] =
        static_cast<std::int32_t>(table.row(rows.first + row).size());
  }
}

}  // namespace heddle::packing

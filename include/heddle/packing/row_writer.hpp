#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
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

}  // namespace detail

/// What the arrays of these rows look like: budget positions each, the per-token fields that their
/// documents carry, the routing's layers and top_k.
///
/// specials  a field is carried by all documents of the rows or by none; items without routing are legal
///           beside items with it; items of no token are not asked
/// throws    Error naming the items without a field that others carry, or the first whose (layers, top_k)
///           differ from those before it
[[nodiscard]] inline ChunkDims chunk_dims(std::string_view where, std::span<const Rollout> items,
                                          const SegmentTable& table, const RowRange& rows,
                                          std::int64_t budget) {
  std::vector<std::int32_t> documents;
  for (std::int64_t row = rows.first; row < rows.first + rows.count; ++row) {
    for (const Segment& segment : table.row(row)) {
      documents.push_back(segment.item_index);
    }
  }
  std::sort(documents.begin(), documents.end());
  ChunkDims dims{.rows = rows.count, .tokens = budget};
  for (const PerTokenField field : per_token_fields) {
    dims.carried[field] = detail::carried(where, items, documents, field);
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
    const std::string argument = element_name("items", item) + ".routed_experts";
    require_equal(where, argument + ".layers", routing->layers, "that of the items before it",
                  dims.layers);
    require_equal(where, argument + ".top_k", routing->top_k, "that of the items before it",
                  dims.top_k);
  }
  return dims;
}

namespace detail {

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
      const std::string argument = element_name(element_name("table.row", row), i);
      require(segment.item_index >= 0 && std::cmp_less(segment.item_index, items.size()), where,
              argument + ".item_index", segment.item_index, "must be the index of an item");
      const Rollout& item = items[static_cast<std::size_t>(segment.item_index)];
      require_equal(where, argument + ".len", segment.len, "the item's length", item.length());
      require_equal(where, argument + ".prompt_len", segment.prompt_len, "the item's prompt length",
                    item.prompt_length());
      require(segment.len >= 1, where, argument + ".len", segment.len, "must be >= 1");
      require(segment.start >= free, where, argument + ".start", segment.start,
              "must not lie before the end of the segment before it");
      free = std::int64_t{segment.start} + segment.len;
      if (free > tokens) {
        fail(where, argument + ".end", free,
             "must not exceed the budget (" + std::to_string(tokens) + ")");
      }
    }
  }
}

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

/// Positions of routing that one task writes: some megabytes at the recipe's 600 ids a token.
inline constexpr std::int64_t routing_block = 4096;

/// Routing of positions [first, last) of a row. Offsets are elements of the whole chunk, which at 64
/// rows of the recipe passes 2^31.
inline void write_routing(std::span<const Rollout> items, std::span<const Segment> segments,
                          std::int64_t first, std::int64_t last, std::int16_t* row,
                          std::int64_t per_token) {
  const auto pad = [&](std::int64_t from, std::int64_t to) {
    std::fill(row + from * per_token, row + to * per_token, std::int16_t{-1});
  };
  walk(segments, first, last, pad,
       [&](std::int64_t, const Segment& segment, std::int64_t from, std::int64_t to) {
         const auto& routing = items[static_cast<std::size_t>(segment.item_index)].routed_experts;
         const std::int64_t routed_end =
             std::clamp(segment.start + (routing ? routing->tokens : 0), from, to);
         if (routing && from < routed_end) {
           copy(routing->ids.subspan(static_cast<std::size_t>((from - segment.start) * per_token),
                                     static_cast<std::size_t>((routed_end - from) * per_token)),
                row + from * per_token);
         }
         pad(routed_end, to);
       });
}

/// The arrays of a chunk's rows as independent pieces of work: piece p of a row is one of its [T]
/// arrays, or a block of its routing.
class RowPieces {
 public:
  RowPieces(std::span<const Rollout> items, const ChunkArrays& arrays, std::int32_t pad_id)
      : items_(items), arrays_(arrays), pad_id_(pad_id) {
    for (const PerTokenField field : per_token_fields) {
      if (!arrays.per_token[field].is_null()) {
        fields_.push_back(field);
      }
    }
    if (!arrays.routed_experts.is_null()) {
      blocks_ = (arrays.ids.cols() + routing_block - 1) / routing_block;
    }
  }

  [[nodiscard]] std::int64_t count() const {
    return fixed + static_cast<std::int64_t>(fields_.size()) + blocks_;
  }

  void write(std::int64_t piece, std::int64_t row, std::span<const Segment> segments) const {
    // Routing first: it is the longest by far, and what starts last should be short.
    if (piece < blocks_) {
      write_routing_block(piece, row, segments);
    } else if (piece < blocks_ + fixed) {
      write_fixed(piece - blocks_, row, segments);
    } else {
      write_field(fields_[static_cast<std::size_t>(piece - blocks_ - fixed)], row, segments);
    }
  }

 private:
  static constexpr std::int64_t fixed = 6;  // arrays that every chunk has

  [[nodiscard]] const Rollout& item(const Segment& segment) const {
    return items_[static_cast<std::size_t>(segment.item_index)];
  }

  void write_fixed(std::int64_t array, std::int64_t row, std::span<const Segment> segments) const {
    switch (array) {
      case 0:
        write_row(arrays_.ids.row(row), segments, pad_id_,
                  [this](std::int64_t, const Segment& segment, std::int32_t* destination) {
                    copy(item(segment).prompt_ids, destination);
                    copy(item(segment).completion_ids, destination + segment.prompt_len);
                  });
        break;
      case 1:
        write_row(arrays_.prompt_mask.row(row), segments, 0.0F,
                  [](std::int64_t, const Segment& segment, float* destination) {
                    std::fill_n(destination, segment.prompt_len, 1.0F);
                    std::fill(destination + segment.prompt_len, destination + segment.len, 0.0F);
                  });
        break;
      case 2:
        write_row(arrays_.completion_mask.row(row), segments, 0.0F,
                  [this](std::int64_t, const Segment& segment, float* destination) {
                    const Rollout& rollout = item(segment);
                    std::fill_n(destination, segment.prompt_len, 0.0F);
                    write_completion_mask(
                        rollout, {destination + segment.prompt_len, rollout.completion_ids.size()});
                  });
        break;
      case 3:
        write_row(arrays_.advantages.row(row), segments, 0.0F,
                  [this](std::int64_t, const Segment& segment, float* destination) {
                    write_values(item(segment), item(segment).advantages, destination);
                  });
        break;
      case 4:
        write_row(arrays_.segment_ids.row(row), segments, std::int32_t{0},
                  [](std::int64_t index, const Segment& segment, std::int32_t* destination) {
                    std::fill_n(destination, segment.len, static_cast<std::int32_t>(index) + 1);
                  });
        break;
      default:
        write_row(arrays_.segment_positions.row(row), segments, std::int32_t{0},
                  [](std::int64_t, const Segment& segment, std::int32_t* destination) {
                    std::iota(destination, destination + segment.len, 0);
                  });
    }
  }

  void write_field(PerTokenField field, std::int64_t row, std::span<const Segment> segments) const {
    write_row(arrays_.per_token[field].row(row), segments, 0.0F,
              [&](std::int64_t, const Segment& segment, float* destination) {
                write_values(item(segment), item(segment).per_token[field], destination);
              });
  }

  void write_routing_block(std::int64_t block, std::int64_t row,
                           std::span<const Segment> segments) const {
    const std::int64_t tokens = arrays_.ids.cols();
    const std::int64_t first = block * routing_block;
    write_routing(items_, segments, first, std::min(first + routing_block, tokens),
                  arrays_.routed_experts.row_block(row * tokens, tokens).data(),
                  arrays_.routed_experts.cols());
  }

  std::span<const Rollout> items_;
  const ChunkArrays& arrays_;
  std::int32_t pad_id_;
  std::vector<PerTokenField> fields_;
  std::int64_t blocks_ = 0;
};

}  // namespace detail

/// Writes rows of a segment table: each position of each array once, at its final place.
///
/// shapes    arrays of chunk_dims(items, table, rows, budget), where budget = arrays.ids.cols
/// dtypes    ids and segments i32, masks and values f32, routing i16
/// writes    all of every array; alias: arrays disjoint from the items and from each other
/// specials  rows.count = 0: no-op; rows without documents are all padding
/// order     the same bytes for any number of threads
/// memory    nothing but a list of the carried fields
/// cost      cost(dims, tokens): bytes alone; parallel over rows, their arrays and blocks of routing
/// throws    Error for: rows outside the table, documents that do not fit their item or the row, fields
///           and arrays as chunk_dims and validate say
/// source    spec/packing.md 1.2, 4, 9
inline void write_rows(std::span<const Rollout> items, const SegmentTable& table,
                       const RowRange& rows, std::int32_t pad_id, const ChunkArrays& arrays) {
  constexpr const char* where = "packing::write_rows";
  const std::int64_t tokens = arrays.ids.cols();
  detail::validate_rows(where, items, table, rows, tokens);
  const ChunkDims dims = chunk_dims(where, items, table, rows, tokens);
  validate(where, dims, arrays);

  const detail::RowPieces pieces(items, arrays, pad_id);
  const auto write = [&](std::int64_t task) {
    const std::int64_t row = task / pieces.count();
    pieces.write(task % pieces.count(), row, table.row(rows.first + row));
  };
  const std::int64_t tasks = rows.count * pieces.count();
  // Below this a parallel loop costs more than the writing.
  constexpr std::int64_t small_chunk = std::int64_t{1} << 18;
  if (cost(dims, 0).bytes_written < small_chunk) {
    for (std::int64_t task = 0; task < tasks; ++task) {
      write(task);
    }
  } else {
    parallel_tasks(tasks, write);
  }
  for (std::int64_t row = 0; row < rows.count; ++row) {
    arrays.num_real_segments[static_cast<std::size_t>(row)] =
        static_cast<std::int32_t>(table.row(rows.first + row).size());
  }
}

}  // namespace heddle::packing

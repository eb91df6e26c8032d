#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/packing/rollout.hpp"
#include "heddle/packing/segment_table.hpp"

namespace heddle::packing {

/// What a chunk's arrays look like.
struct ChunkDims {
  std::int64_t rows = 0;             ///< B
  std::int64_t tokens = 0;           ///< T, positions of a row
  PerTokenArray<bool> carried = {};  ///< which per-token fields there are
  std::int32_t layers = 0;           ///< L; 0 where no item has routing
  std::int32_t top_k = 0;            ///< K

  [[nodiscard]] std::int64_t positions() const { return rows * tokens; }
  [[nodiscard]] std::int64_t routed_per_token() const {
    return std::int64_t{layers} * std::int64_t{top_k};
  }
};

/// The arrays of a chunk, in the caller's memory.
///
///   array                 on a token                           on padding
///   ids                   prompt, then completion              pad_id
///   prompt_mask           1 on the prompt, else 0              0
///   completion_mask       0 on the prompt, else the item's     0
///   advantages            0 on the prompt, else the item's     0
///   segment_ids           1, 2, ... in placement order         0
///   segment_positions     0 .. n-1 within its segment          0
///   per_token[f]          0 on the prompt, else the item's     0
///   routed_experts        the item's; -1 where it has none     -1
///   num_real_segments     documents of the row                 0
///
/// Padding is every position of segment id 0: in front, between documents, behind. Validity is segment
/// id > 0; ids may equal pad_id on a real token.
///
/// shapes    [B,T], outer stride >= T; routed_experts [B*T, L*K], stride = L*K; num_real_segments [B]
/// specials  per_token[f] null where the chunk does not carry f; routed_experts null where no item has any
struct ChunkArrays {
  MatrixView<std::int32_t> ids = {};
  MatrixView<float> prompt_mask = {};
  MatrixView<float> completion_mask = {};
  MatrixView<float> advantages = {};
  MatrixView<std::int32_t> segment_ids = {};
  MatrixView<std::int32_t> segment_positions = {};
  PerTokenArray<MatrixView<float>> per_token = {};
  MatrixView<std::int16_t> routed_experts = {};
  std::span<std::int32_t> num_real_segments = {};
};

/// Rows written, their documents, and what a trainer has to know of them.
///
/// alias     arrays are views of the buffers they were written to, valid until those are used again
struct PackedChunk {
  ChunkDims dims = {};
  ChunkArrays arrays = {};
  SegmentTable segments = {};
  std::int64_t num_segments = 0;  ///< segment buckets, padding's bucket 0 included
  bool is_update_step = false;    ///< the last chunk of its optimizer update
};

/// Payload of a chunk, each array written once and each item read once. `real_tokens` of the rows'
/// positions are tokens.
[[nodiscard]] inline Cost cost(const ChunkDims& dims, std::int64_t real_tokens) {
  std::int64_t fields = 0;
  for (const PerTokenField field : per_token_fields) {
    fields += dims.carried[field] ? 1 : 0;
  }
  const std::int64_t routing = 2 * dims.routed_per_token();
  return {.bytes_read = real_tokens * (4 * (3 + fields) + routing),
          .bytes_written = dims.positions() * (4 * (6 + fields) + routing) + 4 * dims.rows};
}

/// Refuses arrays that a chunk of `dims` cannot be written to.
///
/// throws    Error for: a shape that differs, a null array that is needed, a per-token array that no item
///           fills, routed_experts whose tokens do not follow one another
inline void validate(std::string_view where, const ChunkDims& dims, const ChunkArrays& arrays) {
  const auto check = [&](std::string_view argument, auto array) {
    require_shape(where, "arrays." + std::string(argument), array, "rows", dims.rows, "budget",
                  dims.tokens);
  };
  check("ids", arrays.ids);
  check("prompt_mask", arrays.prompt_mask);
  check("completion_mask", arrays.completion_mask);
  check("advantages", arrays.advantages);
  check("segment_ids", arrays.segment_ids);
  check("segment_positions", arrays.segment_positions);
  for (const PerTokenField field : per_token_fields) {
    if (dims.carried[field]) {
      check(name(field), arrays.per_token[field]);
    } else if (!arrays.per_token[field].is_null()) {
      fail(where, "arrays." + std::string(name(field)), "given",
           "must be null, no item of the chunk carries it");
    }
  }
  const MatrixView<std::int16_t> routed = arrays.routed_experts;
  if (dims.layers > 0) {
    require_shape(where, "arrays.routed_experts", routed, "rows * budget", dims.positions(),
                  "layers * top_k", dims.routed_per_token());
  } else if (!routed.is_null()) {
    require_equal(where, "arrays.routed_experts.rows", routed.rows(), "rows * budget",
                  dims.positions());
  }
  require_equal(where, "arrays.routed_experts.stride", routed.stride(), "its cols", routed.cols());
  require_length(where, "arrays.num_real_segments", arrays.num_real_segments, "rows", dims.rows);
}

/// Memory for a chunk's arrays, kept from chunk to chunk: fresh pages cost several times the write
/// itself, so reuse one of these.
///
/// memory    grows to the largest chunk asked for and stays
class ChunkBuffers {
 public:
  /// Arrays for `dims`, uninitialised. What earlier ones pointed to is given up.
  [[nodiscard]] ChunkArrays prepare(const ChunkDims& dims) {
    const std::size_t bytes = bytes_for(dims);
    if (bytes > capacity_) {
      memory_ = Workspace(bytes);
      capacity_ = bytes;
    }
    const Workspace::Frame frame(memory_);
    ChunkArrays arrays;
    // Routing first: the largest array stands at the block's (huge page) boundary.
    if (dims.layers > 0) {
      arrays.routed_experts = take<std::int16_t>(dims.positions(), dims.routed_per_token());
    }
    arrays.ids = take<std::int32_t>(dims.rows, dims.tokens);
    arrays.prompt_mask = take<float>(dims.rows, dims.tokens);
    arrays.completion_mask = take<float>(dims.rows, dims.tokens);
    arrays.advantages = take<float>(dims.rows, dims.tokens);
    arrays.segment_ids = take<std::int32_t>(dims.rows, dims.tokens);
    arrays.segment_positions = take<std::int32_t>(dims.rows, dims.tokens);
    for (const PerTokenField field : per_token_fields) {
      if (dims.carried[field]) {
        arrays.per_token[field] = take<float>(dims.rows, dims.tokens);
      }
    }
    arrays.num_real_segments = memory_.take<std::int32_t>(dims.rows);
    return arrays;
  }

 private:
  [[nodiscard]] static std::size_t bytes_for(const ChunkDims& dims) {
    std::size_t bytes = Workspace::bytes_for<std::int32_t>(dims.rows);
    bytes += Workspace::bytes_for<std::int16_t>(dims.positions() * dims.routed_per_token());
    bytes += 6 * Workspace::bytes_for<std::int32_t>(dims.positions());
    for (const PerTokenField field : per_token_fields) {
      bytes += dims.carried[field] ? Workspace::bytes_for<float>(dims.positions()) : 0;
    }
    return bytes;
  }

  template <class T>
  [[nodiscard]] MatrixView<T> take(std::int64_t rows, std::int64_t cols) {
    return {memory_.take<T>(rows * cols).data(), rows, cols};
  }

  Workspace memory_;
  std::size_t capacity_ = 0;
};

}  // namespace heddle::packing

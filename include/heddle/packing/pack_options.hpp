#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/mesh/context_layout.hpp"
#include "heddle/packing/attention_tiles.hpp"
#include "heddle/packing/pad_position.hpp"

namespace heddle::packing {

/// How many items share a row.
enum class RowFilling {
  packed,  ///< as many as fit, first-fit decreasing
  padded,  ///< one, in arrival order: the unpacked batch, for comparison
};

/// How items become rows. One struct for every form of packing, so that no option is lost on the way
/// from a caller's configuration to the row writer.
struct PackOptions {
  std::int64_t budget = 0;                   ///< T, positions of a row
  std::int64_t pack_size = 1;                ///< B, rows of a chunk (fsdp * dp)
  std::int64_t segment_align_multiple = 64;  ///< a; 64 is the chunk of the GDN recurrence
  RowFilling filling = RowFilling::packed;
  std::optional<std::int64_t> max_segments = {};  ///< documents of a row; the budget where absent
  std::optional<std::int64_t> max_loss_tokens = {};  ///< of a row, with completion mask > 0
  std::int32_t pad_id = 0;                           ///< may equal a real token's id
  PadPosition pad_position = PadPosition::end;
  std::int64_t pad_align = 4096;   ///< A; the least common multiple of the recipe's blocks
  AttentionShards attention = {};  ///< read under PadPosition::auto_ alone

  /// Documents of a row at most.
  [[nodiscard]] std::int64_t segment_limit() const { return max_segments.value_or(budget); }
  /// The static bucket count of segment reductions: bucket 0 is padding's.
  [[nodiscard]] std::int64_t num_segments() const { return segment_limit() + 1; }
};

/// Refuses options that no packer can serve, before it looks at any item: the packer's column of the
/// validation matrix. pad_align is not looked at under `end`.
///
/// throws    Error for: budget, pack_size, segment_align_multiple, max_segments or max_loss_tokens
///           outside [1, 2^31 - 1], an unknown filling or pad position, under `start` and `auto` a
///           pad_align that is not a positive multiple of segment_align_multiple, under `auto` blocks < 1
///           and a budget that the context layout cannot divide
/// source    spec/packing.md 2.3, 3.1
inline void validate(std::string_view where, const PackOptions& options) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  require(options.budget >= 1 && options.budget <= most, where, "options.budget", options.budget,
          "must be in [1, 2^31 - 1]");
  require(options.pack_size >= 1 && options.pack_size <= most, where, "options.pack_size",
          options.pack_size, "must be in [1, 2^31 - 1]");
  require(options.segment_align_multiple >= 1 && options.segment_align_multiple <= most, where,
          "options.segment_align_multiple", options.segment_align_multiple,
          "must be in [1, 2^31 - 1]");
  if (options.max_segments) {
    require(*options.max_segments >= 1 && *options.max_segments <= most, where,
            "options.max_segments", *options.max_segments, "must be in [1, 2^31 - 1]");
  }
  if (options.max_loss_tokens) {
    require(*options.max_loss_tokens >= 1 && *options.max_loss_tokens <= most, where,
            "options.max_loss_tokens", *options.max_loss_tokens, "must be in [1, 2^31 - 1]");
  }
  require(options.filling == RowFilling::packed || options.filling == RowFilling::padded, where,
          "options.filling", options.filling, "must be packed or padded");
  require(options.pad_position == PadPosition::end || options.pad_position == PadPosition::start ||
              options.pad_position == PadPosition::auto_,
          where, "options.pad_position", options.pad_position, "must be end, start or auto");
  if (options.pad_position == PadPosition::end) {
    return;
  }
  if (options.pad_align < 1 || options.pad_align % options.segment_align_multiple != 0) {
    fail(where, "options.pad_align", options.pad_align,
         "must be a positive multiple of segment_align_multiple (" +
             std::to_string(options.segment_align_multiple) + ")");
  }
  if (options.pad_position == PadPosition::auto_) {
    validate(where, options.attention, options.budget);
  }
}

/// How far a row moves to the right of its `end` layout.
[[nodiscard]] inline std::int64_t pad_shift(const PlacedRow& row, const PackOptions& options) {
  switch (options.pad_position) {
    case PadPosition::end:
      return 0;
    case PadPosition::start:
      return start_shift(row, options.pad_align);
    case PadPosition::auto_:
      return auto_shift(row, options.pad_align, options.attention);
  }
  fail("packing::pad_shift", "options.pad_position", options.pad_position,
       "must be end, start or auto");
}

}  // namespace heddle::packing

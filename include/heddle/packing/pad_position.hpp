#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/packing/attention_tiles.hpp"
#include "heddle/packing/segment_table.hpp"

namespace heddle::packing {

/// Where a row's padding goes.
enum class PadPosition {
  end,    ///< behind the documents
  start,  ///< before them, as far as whole multiples of pad_align go
  auto_,  ///< before them as far as serves the busiest context rank best; never worse than end
};

[[nodiscard]] constexpr std::string_view name(PadPosition position) {
  switch (position) {
    case PadPosition::end:
      return "end";
    case PadPosition::start:
      return "start";
    case PadPosition::auto_:
      return "auto";
  }
  return "";
}

/// The position of that name, spelled exactly; Error for any other text, the empty one too.
[[nodiscard]] inline PadPosition pad_position(std::string_view position_name) {
  for (const PadPosition position : {PadPosition::end, PadPosition::start, PadPosition::auto_}) {
    if (name(position) == position_name) {
      return position;
    }
  }
  fail("packing::pad_position", "name", position_name, "must be end, start or auto");
}

/// How far `start` moves a row to the right: the largest multiple of pad_align within its trailing
/// padding. Trailing padding is what lies behind the last token: alignment gaps do not count, nor
/// does the alignment that a next segment would need. Rows without tokens do not move.
///
/// throws    Error for pad_align < 1 and for a row that has been moved already
/// source    seed 0 (tunix#2913); spec/packing.md 3
[[nodiscard]] inline std::int64_t start_shift(const PlacedRow& row, std::int64_t pad_align) {
  constexpr const char* where = "packing::start_shift";
  require(pad_align >= 1, where, "pad_align", pad_align, "must be >= 1");
  require(row.shift == 0, where, "row.shift", row.shift, "must be 0");
  if (row.segments.empty()) {
    return 0;
  }
  const std::int64_t trailing = row.tokens - used_positions(row.segments);
  return trailing / pad_align * pad_align;
}

/// How far `auto` moves a row: the smallest shift, of the multiples of pad_align within its trailing
/// padding, that minimises AttentionTiles::busiest_cost() under TileRule::pad_aware. 0 is one of them.
///
/// cost      trailing / pad_align + 1 counts of both phases' tiles
/// throws    as start_shift and count_attention_tiles
/// source    spec/packing.md 8 (P-17)
[[nodiscard]] inline std::int64_t auto_shift(const PlacedRow& row, std::int64_t pad_align,
                                             const AttentionShards& shards) {
  const std::int64_t most = start_shift(row, pad_align);
  std::int64_t best = 0;
  std::int64_t best_cost = 0;
  for (std::int64_t shift = 0; shift <= most; shift += pad_align) {
    const std::int64_t cost =
        count_attention_tiles({.segments = row.segments, .tokens = row.tokens, .shift = shift},
                              shards, TileRule::pad_aware)
            .busiest_cost();
    if (shift == 0 || cost < best_cost) {
      best = shift;
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace heddle::packing

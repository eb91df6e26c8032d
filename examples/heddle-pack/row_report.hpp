#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "heddle/packing/attention_tiles.hpp"
#include "heddle/packing/pack_options.hpp"
#include "heddle/packing/pad_position.hpp"
#include "heddle/packing/segment_table.hpp"
#include "support/json_text.hpp"

namespace heddle::pack {

inline constexpr std::array<packing::PadPosition, 3> pad_positions = {
    packing::PadPosition::end, packing::PadPosition::start, packing::PadPosition::auto_};

/// A row as it would stand with its padding at one position.
struct PlacementReport {
  std::int64_t shift = 0;
  packing::AttentionTiles naive;
  packing::AttentionTiles pad_aware;
};

/// What a reader wants to know of a row: where its padding went and what that does to the ranks.
struct RowReport {
  std::int64_t row = 0;
  std::int64_t tokens = 0;
  std::int64_t segments = 0;
  std::int64_t trailing_padding = 0;  ///< behind the last token as `end` places the row
  std::int64_t shift = 0;             ///< of the row that was written
  /// One a position; nothing where the position's rule refuses the row.
  std::array<std::optional<PlacementReport>, pad_positions.size()> placements = {};

  [[nodiscard]] const std::optional<PlacementReport>& at(packing::PadPosition position) const {
    return placements[static_cast<std::size_t>(position)];
  }
};

[[nodiscard]] RowReport report_row(const packing::SegmentTable& table, std::int64_t row,
                                   const packing::PackOptions& options);

/// Share of the busiest rank's tiles that a placement saves against `end`: 0.1 is a tenth fewer, below 0
/// is more. 0 where `end` has none.
[[nodiscard]] double saving(std::span<const std::int64_t> end,
                            std::span<const std::int64_t> placed);

[[nodiscard]] examples::Json to_json(const RowReport& report);

/// All rows as tables, and what they come to.
void print(std::span<const RowReport> reports, const packing::PackOptions& options,
           std::ostream& out);

}  // namespace heddle::pack

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace heddle::packing {

/// One document of a packed row: where it stands and which item it is.
struct Segment {
  std::int32_t start = 0;       ///< position of its first token in the row
  std::int32_t len = 0;         ///< tokens, >= 1
  std::int32_t prompt_len = 0;  ///< of them, the prompt's
  std::int32_t item_index = 0;  ///< index of the item in the list that was packed

  [[nodiscard]] constexpr std::int32_t end() const { return start + len; }
  friend constexpr bool operator==(const Segment&, const Segment&) = default;
};

/// One past the row's last token: what lies behind is trailing padding. 0 for a row without tokens.
[[nodiscard]] constexpr std::int32_t used_positions(std::span<const Segment> row) {
  return row.empty() ? 0 : row.back().end();
}

/// Tokens of the row, padding not counted.
[[nodiscard]] constexpr std::int64_t token_count(std::span<const Segment> row) {
  std::int64_t tokens = 0;
  for (const Segment& segment : row) {
    tokens += segment.len;
  }
  return tokens;
}

/// The row's documents as cumulative offsets: the starts, then one past the last token. The first
/// offset is the first document's start (not 0 where the row was shifted), an alignment gap counts
/// with the document before it, and no two offsets are equal. A row without tokens gives {0}.
[[nodiscard]] inline std::vector<std::int32_t> cu_seqlens(std::span<const Segment> row) {
  std::vector<std::int32_t> offsets;
  offsets.reserve(row.size() + 1);
  for (const Segment& segment : row) {
    offsets.push_back(segment.start);
  }
  offsets.push_back(used_positions(row));
  return offsets;
}

/// Rows [first, first + count) of a table.
struct RowRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// The documents of every row, in order of their positions; segment id = 1 + index in the row. The
/// one source of boundaries: ids and positions of a row are written from it, and kernels, offsets,
/// tile ranges and losses read it instead of guessing from padding ids or positions.
///
/// shapes    row r holds segments [row_begin[r], row_begin[r + 1]); shifts [rows]
/// source    spec/packing.md 1.2 (P-5)
struct SegmentTable {
  std::vector<Segment> segments;
  std::vector<std::int64_t> row_begin{0};
  std::vector<std::int32_t> shifts;  ///< how far each row was moved right of its `end` layout

  [[nodiscard]] std::int64_t rows() const { return static_cast<std::int64_t>(shifts.size()); }

  [[nodiscard]] std::span<const Segment> row(std::int64_t index) const {
    const auto first = static_cast<std::size_t>(row_begin[static_cast<std::size_t>(index)]);
    const auto last = static_cast<std::size_t>(row_begin[static_cast<std::size_t>(index) + 1]);
    return std::span<const Segment>(segments).subspan(first, last - first);
  }

  [[nodiscard]] std::int32_t shift(std::int64_t index) const {
    return shifts[static_cast<std::size_t>(index)];
  }

  /// Some of the rows, as a table of their own.
  [[nodiscard]] SegmentTable slice(const RowRange& range) const {
    SegmentTable part;
    for (std::int64_t index = range.first; index < range.first + range.count; ++index) {
      const std::span<const Segment> documents = row(index);
      part.segments.insert(part.segments.end(), documents.begin(), documents.end());
      part.row_begin.push_back(static_cast<std::int64_t>(part.segments.size()));
      part.shifts.push_back(shift(index));
    }
    return part;
  }

  friend bool operator==(const SegmentTable&, const SegmentTable&) = default;
};

}  // namespace heddle::packing

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/view.hpp"

namespace heddle::packing {

namespace detail {

/// A token that has a predecessor in its own document.
[[nodiscard]] constexpr bool is_scored(std::int32_t segment_id, std::int32_t segment_position) {
  return segment_id > 0 && segment_position > 0;
}

inline void require_segment_ids(std::string_view where, std::span<const std::int32_t> segment_ids) {
  for (std::size_t t = 0; t < segment_ids.size(); ++t) {
    if (segment_ids[t] < 0) [[unlikely]] {
      fail(where, element_name("segment_ids", t), segment_ids[t], "must be >= 0");
    }
  }
}

}  // namespace detail

/// Which tokens of a row have a predecessor in their own document, and so a log-prob at all:
///   scored[t] = segment_ids[t] > 0 and segment_positions[t] > 0
/// The first token of a document is not scored, wherever it stands: not from the document before it,
/// not from a gap, not from the row's end.
///
/// shapes    segment_ids, segment_positions, scored [T], in sequence order (permute for context
///           parallelism afterwards: there index t - 1 is no predecessor at chunk edges)
/// writes    all of scored, 0 or 1
/// throws    Error for lengths that differ, a negative segment id
/// source    spec/packing.md 5.1 (P-9)
inline void scored(std::span<const std::int32_t> segment_ids,
                   std::span<const std::int32_t> segment_positions,
                   std::span<std::uint8_t> scored_tokens) {
  constexpr const char* where = "packing::scored";
  const auto tokens = static_cast<std::int64_t>(segment_ids.size());
  require_length(where, "segment_positions", segment_positions, "segment_ids.size", tokens);
  require_length(where, "scored_tokens", scored_tokens, "segment_ids.size", tokens);
  detail::require_segment_ids(where, segment_ids);
  for (std::size_t t = 0; t < segment_ids.size(); ++t) {
    scored_tokens[t] = detail::is_scored(segment_ids[t], segment_positions[t]) ? 1 : 0;
  }
}

/// The mask of every numerator, denominator, ratio and KL term: the completion mask where the token is
/// scored, else 0. Selected, not multiplied: NaN at an unscored token stays out.
///
/// shapes    all [T]; alias: effective may be completion_mask
/// writes    all of effective
/// throws    Error for lengths that differ, a negative segment id
/// source    spec/packing.md 5.1 (P-10)
inline void effective_mask(std::span<const std::int32_t> segment_ids,
                           std::span<const std::int32_t> segment_positions,
                           std::span<const float> completion_mask, std::span<float> effective) {
  constexpr const char* where = "packing::effective_mask";
  const auto tokens = static_cast<std::int64_t>(segment_ids.size());
  require_length(where, "segment_positions", segment_positions, "segment_ids.size", tokens);
  require_length(where, "completion_mask", completion_mask, "segment_ids.size", tokens);
  require_length(where, "effective", effective, "segment_ids.size", tokens);
  detail::require_segment_ids(where, segment_ids);
  for (std::size_t t = 0; t < segment_ids.size(); ++t) {
    effective[t] = detail::is_scored(segment_ids[t], segment_positions[t]) ? completion_mask[t] : 0;
  }
}

}  // namespace heddle::packing

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "heddle/packing/pad_position.hpp"
#include "support/usage_error.hpp"

namespace heddle::examples {

/// What --budget, --segment-align, --pad-position and --pad-align say together.
struct PadRequest {
  std::int64_t budget = 0;
  std::int64_t segment_align = 0;
  packing::PadPosition position = packing::PadPosition::end;
  std::optional<std::int64_t> pad_align;
};

/// 4096, the least common multiple of the recipe's attention blocks.
inline constexpr std::int64_t usual_pad_align = 4096;

/// The usual alignment where that is below the budget; in a shorter row about an eighth of it.
[[nodiscard]] inline std::int64_t default_pad_align(const PadRequest& request) {
  if (usual_pad_align < request.budget) {
    return usual_pad_align;
  }
  const std::int64_t eighth = request.budget / 8 / request.segment_align * request.segment_align;
  return std::max(eighth, request.segment_align);
}

/// The alignment a program works with. A request that could have no effect is refused, so that nobody
/// measures the default by accident: another alignment than the usual one with `end`, and one that no row
/// could move by.
///
/// throws    UsageError as above, and for an alignment that is no positive multiple of --segment-align
[[nodiscard]] inline std::int64_t checked_pad_align(const PadRequest& request) {
  const std::int64_t align = request.pad_align.value_or(default_pad_align(request));
  const std::string what = "--pad-align = " + std::to_string(align) + ": ";
  const std::string position(name(request.position));
  if (request.position == packing::PadPosition::end) {
    if (request.pad_align && align != usual_pad_align) {
      throw UsageError(what + "has no effect with --pad-position=end");
    }
    return align;
  }
  if (align < 1 || align % request.segment_align != 0) {
    throw UsageError(what + "must be a positive multiple of --segment-align (" +
                     std::to_string(request.segment_align) + ")");
  }
  if (align >= request.budget) {
    throw UsageError(what + "must be below --budget (" + std::to_string(request.budget) +
                     ") with --pad-position=" + position + ", no row could move");
  }
  return align;
}

}  // namespace heddle::examples

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/view.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/routing_map.hpp"

namespace heddle::moe {

/// Which sorted positions of a map have a row, and where: the rows of the experts that a device
/// holds, in a buffer of its own or in one as long as the slots.
///
///   position p is kept iff first_position <= p < first_position + kept; it then has row
///   p - first_position + first_row
///
/// A buffer with room for every slot is none: rows are then the positions themselves. In a smaller
/// one the window's first position has row 0, and when it is full the last positions are dropped:
/// the highest experts, and of the expert that is cut the latest slots.
struct RoutingWindow {
  ExpertRange experts;
  std::int64_t first_position = 0;
  std::int64_t first_row = 0;
  std::int64_t wanted = 0;  ///< slots of the experts
  std::int64_t kept = 0;    ///< of these with a row
  std::int64_t rows = 0;    ///< rows that the buffer has

  [[nodiscard]] std::int64_t dropped() const { return wanted - kept; }
  /// The row of a sorted position, or nowhere. `nowhere` as a position has none either.
  [[nodiscard]] std::int64_t row_of(std::int64_t position) const {
    const std::int64_t index = position - first_position;
    return position >= 0 && index >= 0 && index < kept ? index + first_row : nowhere;
  }
};

/// The window of some of a map's experts over a buffer.
/// specials  no buffer_rows, or at least the map's M: no buffer, `rows` is M. buffer_rows = 0 drops
///           everything
/// throws    Error for experts that the map does not hold, buffer_rows < 0
/// source    spec/moe.md 4
[[nodiscard]] inline RoutingWindow routing_window(
    const RoutingMap& map, ExpertRange experts,
    std::optional<std::int64_t> buffer_rows = std::nullopt) {
  constexpr std::string_view where = "moe::routing_window";
  detail::check_range(where, map.dims, experts);
  require(experts.first >= map.experts.first && experts.end() <= map.experts.end(), where,
          "experts.first", experts.first, "must lie, with all of the range, in the map's experts");
  if (buffer_rows) {
    require(*buffer_rows >= 0, where, "buffer_rows", *buffer_rows, "must be >= 0");
  }
  const auto offset = [&](std::int64_t expert) {
    return map.group_offsets[static_cast<std::size_t>(expert - map.experts.first)];
  };
  const bool buffered = buffer_rows && *buffer_rows < map.dims.slots();
  RoutingWindow window{.experts = experts,
                       .first_position = offset(experts.first),
                       .first_row = 0,
                       .wanted = offset(experts.end()) - offset(experts.first),
                       .kept = 0,
                       .rows = buffered ? *buffer_rows : map.dims.slots()};
  window.first_row = buffered ? 0 : window.first_position;
  window.kept = std::min(window.wanted, window.rows);
  return window;
}

/// The window of all experts of a map.
[[nodiscard]] inline RoutingWindow routing_window(
    const RoutingMap& map, std::optional<std::int64_t> buffer_rows = std::nullopt) {
  return routing_window(map, map.experts, buffer_rows);
}

/// The kept rows of each expert of a window, as a grouped product wants them: expert e of the window
/// has rows [offsets[e], offsets[e + 1]).
/// shapes    offsets [window.experts.count + 1]
/// writes    all of offsets, from window.first_row to window.first_row + window.kept
/// throws    Error for another length, experts that the map does not hold
/// source    spec/moe.md 4
inline void row_offsets(const RoutingMap& map, const RoutingWindow& window,
                        std::span<std::int64_t> offsets) {
  constexpr std::string_view where = "moe::row_offsets";
  require_length(where, "offsets", offsets, "window.experts.count + 1", window.experts.count + 1);
  const std::int64_t skipped = window.experts.first - map.experts.first;
  require(skipped >= 0 && window.experts.end() <= map.experts.end(), where, "window.experts.first",
          window.experts.first, "must lie, with all of the range, in the map's experts");
  for (std::size_t e = 0; e < offsets.size(); ++e) {
    const std::int64_t index =
        map.group_offsets[static_cast<std::size_t>(skipped) + e] - window.first_position;
    offsets[e] = window.first_row + std::min(index, window.kept);
  }
}

/// Rows that a device has for one chunk when `balanced` is its even share: trunc(balanced * factor).
/// Nothing where there is no factor.
/// throws    Error for balanced < 0, a factor that is not finite and positive, a product beyond int64
/// source    spec/moe.md 1.2
[[nodiscard]] inline std::optional<std::int64_t> buffer_rows(std::int64_t balanced,
                                                             std::optional<double> factor) {
  constexpr std::string_view where = "moe::buffer_rows";
  require(balanced >= 0, where, "balanced", balanced, "must be >= 0");
  if (!factor) {
    return std::nullopt;
  }
  require(std::isfinite(*factor) && *factor > 0, where, "factor", *factor,
          "must be finite and > 0");
  const double rows = static_cast<double>(balanced) * *factor;
  require(rows < 0x1p62, where, "factor", *factor, "must give fewer than 2^62 rows");
  return static_cast<std::int64_t>(rows);
}

/// What full buffers dropped, over the windows of all devices and chunks.
struct DropReport {
  std::int64_t dropped_slots = 0;
  std::int64_t largest_drop = 0;  ///< of one window
  double required_factor = 0;     ///< the smallest buffer factor without a drop

  [[nodiscard]] bool has_overflow() const { return dropped_slots > 0; }

  /// Takes in one window; `balanced` is a device's even share of the chunk's slots.
  void add(const RoutingWindow& window, std::int64_t balanced) {
    dropped_slots += window.dropped();
    largest_drop = std::max(largest_drop, window.dropped());
    if (balanced > 0) {
      required_factor = std::max(
          required_factor, static_cast<double>(window.wanted) / static_cast<double>(balanced));
    }
  }
  /// Takes in what other windows dropped.
  void add(const DropReport& other) {
    dropped_slots += other.dropped_slots;
    largest_drop = std::max(largest_drop, other.largest_drop);
    required_factor = std::max(required_factor, other.required_factor);
  }
};

}  // namespace heddle::moe

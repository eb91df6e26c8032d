#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"

namespace heddle::packing {

/// What a bin holds at most.
struct BinLimits {
  std::int64_t budget = 0;                  ///< T: one past the last token must not exceed it
  std::int64_t segment_align_multiple = 1;  ///< a: each segment starts at a multiple of it
  std::int64_t max_segments = std::numeric_limits<std::int32_t>::max();
  std::int64_t max_loss_tokens = std::numeric_limits<std::int32_t>::max();
  std::int64_t bins = std::numeric_limits<std::int32_t>::max();  ///< how many may be opened
};

/// Lists of item indices: bin b holds items[bin_begin[b] .. bin_begin[b + 1]), in placement order.
struct BinAssignment {
  std::vector<std::int32_t> items;
  std::vector<std::int64_t> bin_begin{0};
  std::vector<std::int32_t> leftover;  ///< items that fitted no bin, in arrival order

  [[nodiscard]] std::int64_t bins() const {
    return static_cast<std::int64_t>(bin_begin.size()) - 1;
  }
  [[nodiscard]] std::span<const std::int32_t> bin(std::int64_t index) const {
    const auto first = static_cast<std::size_t>(bin_begin[static_cast<std::size_t>(index)]);
    const auto last = static_cast<std::size_t>(bin_begin[static_cast<std::size_t>(index) + 1]);
    return std::span<const std::int32_t>(items).subspan(first, last - first);
  }
};

/// The next multiple of `multiple` that is not below `value`.
[[nodiscard]] constexpr std::int64_t align_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

namespace detail {

/// Tokens that a bin has room for, or that an item asks for.
struct Room {
  std::int32_t tokens = 0;
  std::int32_t loss_tokens = 0;

  [[nodiscard]] bool holds(const Room& need) const {
    return tokens >= need.tokens && loss_tokens >= need.loss_tokens;
  }
  friend constexpr bool operator==(const Room&, const Room&) = default;
};

/// Bins in a row under a tree of maxima, so that the first one with enough room is found by walking
/// down instead of along. With one limit in force (loss tokens unlimited) the walk never turns back:
/// O(log bins). With both it may visit subtrees whose two maxima belong to different bins.
class RoomTree {
 public:
  RoomTree(std::int64_t bins, const Room& empty_bin)
      : leaves_(std::bit_ceil(static_cast<std::size_t>(bins))), nodes_(2 * leaves_, none) {
    std::fill_n(nodes_.begin() + static_cast<std::ptrdiff_t>(leaves_), bins, empty_bin);
    for (std::size_t node = leaves_ - 1; node >= 1; --node) {
      fold(node);
    }
  }

  /// The lowest bin that holds `need`, or -1.
  [[nodiscard]] std::int64_t first(const Room& need) const {
    std::size_t node = 1;
    for (;;) {
      if (!nodes_[node].holds(need)) {
        // To the next subtree on the right: up while this is a right child, then over.
        while ((node & 1) != 0) {
          node >>= 1;
        }
        if (node == 0) {
          return -1;
        }
        ++node;
      } else if (node >= leaves_) {
        return static_cast<std::int64_t>(node - leaves_);
      } else {
        node *= 2;
      }
    }
  }

  [[nodiscard]] const Room& room(std::int64_t bin) const {
    return nodes_[leaves_ + static_cast<std::size_t>(bin)];
  }

  void set(std::int64_t bin, const Room& room) {
    std::size_t node = leaves_ + static_cast<std::size_t>(bin);
    nodes_[node] = room;
    while (node > 1) {
      node /= 2;
      const Room before = nodes_[node];
      fold(node);
      if (nodes_[node] == before) {
        return;  // and so are all above
      }
    }
  }

 private:
  static constexpr Room none{-1, -1};

  void fold(std::size_t node) {
    const Room& left = nodes_[2 * node];
    const Room& right = nodes_[2 * node + 1];
    nodes_[node] = {std::max(left.tokens, right.tokens),
                    std::max(left.loss_tokens, right.loss_tokens)};
  }

  std::size_t leaves_;
  std::vector<Room> nodes_;  // node k has children 2k and 2k + 1; leaf b is node leaves_ + b
};

/// Indices of the items by length, longest first, ties in arrival order: a counting sort by each digit
/// of the shortness (longest - length), the lowest first.
[[nodiscard]] inline std::vector<std::int32_t> longest_first(
    std::span<const std::int32_t> lengths) {
  // 2,048 counters fit into the first-level cache; rows of up to 2^22 positions take two digits.
  constexpr int digit_bits = 11;
  constexpr std::uint32_t digits = 1U << digit_bits;
  const std::int32_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::int32_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::int32_t> sorted(lengths.size());
  for (int shift = 0; shift < 32 && (longest >> shift) != 0; shift += digit_bits) {
    const auto digit = [&](std::int32_t item) {
      const std::int32_t shortness = longest - lengths[static_cast<std::size_t>(item)];
      return (static_cast<std::uint32_t>(shortness) >> shift) % digits;
    };
    std::array<std::int32_t, digits + 1> begin{};
    for (const std::int32_t item : order) {
      ++begin[digit(item) + 1];
    }
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    for (const std::int32_t item : order) {
      sorted[static_cast<std::size_t>(begin[digit(item)]++)] = item;
    }
    std::swap(order, sorted);
  }
  return order;
}

inline void validate(const char* where, std::span<const std::int32_t> lengths,
                     const BinLimits& limits, std::span<const std::int32_t> loss_tokens) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  require(limits.budget >= 1 && limits.budget <= most, where, "limits.budget", limits.budget,
          "must be in [1, 2^31 - 1]");
  require(limits.segment_align_multiple >= 1, where, "limits.segment_align_multiple",
          limits.segment_align_multiple, "must be >= 1");
  require(limits.max_segments >= 1, where, "limits.max_segments", limits.max_segments,
          "must be >= 1");
  require(limits.max_loss_tokens >= 1 && limits.max_loss_tokens <= most, where,
          "limits.max_loss_tokens", limits.max_loss_tokens, "must be in [1, 2^31 - 1]");
  require(limits.bins >= 1, where, "limits.bins", limits.bins, "must be >= 1");
  require(std::cmp_less_equal(lengths.size(), most), where, "lengths.size", lengths.size(),
          "must be <= 2^31 - 1");
  if (!loss_tokens.empty()) {
    require_equal(where, "loss_tokens.size", loss_tokens.size(), "lengths.size", lengths.size());
  }
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0 || lengths[i] > limits.budget) {
      fail(where, element_name("lengths", i), lengths[i],
           "must be in [0, limits.budget (" + std::to_string(limits.budget) + ")]");
    }
  }
  for (std::size_t i = 0; i < loss_tokens.size(); ++i) {
    if (loss_tokens[i] < 0 || loss_tokens[i] > limits.max_loss_tokens) {
      fail(where, element_name("loss_tokens", i), loss_tokens[i],
           "must be in [0, limits.max_loss_tokens (" + std::to_string(limits.max_loss_tokens) +
               ")]");
    }
  }
}

/// The bin of each item, offered in `order`; -1 where none had room.
[[nodiscard]] inline std::vector<std::int32_t> first_fit(
    std::span<const std::int32_t> order, std::span<const std::int32_t> lengths,
    const BinLimits& limits, std::span<const std::int32_t> loss_tokens) {
  const std::int64_t bins = std::min(limits.bins, static_cast<std::int64_t>(lengths.size()));
  const auto budget = static_cast<std::int32_t>(limits.budget);
  // Alignment beyond the budget says no more than alignment to it, that a second segment never fits;
  // capped, a bin's room stays within int32.
  const std::int64_t align = std::min(limits.segment_align_multiple, limits.budget);
  RoomTree tree(bins, {budget, static_cast<std::int32_t>(limits.max_loss_tokens)});
  std::vector<std::int64_t> segments(static_cast<std::size_t>(bins), 0);
  std::vector<std::int32_t> bin_of(lengths.size(), -1);
  for (const std::int32_t item : order) {
    const auto i = static_cast<std::size_t>(item);
    if (lengths[i] == 0) {
      bin_of[i] = 0;
      continue;
    }
    const Room need{lengths[i], loss_tokens.empty() ? 0 : loss_tokens[i]};
    const std::int64_t bin = tree.first(need);
    if (bin < 0) {
      continue;
    }
    bin_of[i] = static_cast<std::int32_t>(bin);
    // A bin's room for tokens is what lies behind the next aligned start.
    const Room before = tree.room(bin);
    const std::int64_t load = budget - before.tokens + need.tokens;
    const auto room = static_cast<std::int32_t>(budget - align_up(load, align));
    const bool full = ++segments[static_cast<std::size_t>(bin)] == limits.max_segments;
    tree.set(bin, full ? Room{-1, -1} : Room{room, before.loss_tokens - need.loss_tokens});
  }
  return bin_of;
}

/// Items listed by bin, each bin in the order of `order`; those without a bin in arrival order.
[[nodiscard]] inline BinAssignment by_bin(std::span<const std::int32_t> order,
                                          std::span<const std::int32_t> bin_of) {
  BinAssignment assignment;
  std::int64_t bins = 0;
  for (std::size_t i = 0; i < bin_of.size(); ++i) {
    bins = std::max(bins, std::int64_t{bin_of[i]} + 1);
    if (bin_of[i] < 0) {
      assignment.leftover.push_back(static_cast<std::int32_t>(i));
    }
  }
  std::vector<std::int64_t>& begin = assignment.bin_begin;
  begin.assign(static_cast<std::size_t>(bins) + 1, 0);
  for (const std::int32_t bin : bin_of) {
    if (bin >= 0) {
      ++begin[static_cast<std::size_t>(bin) + 1];
    }
  }
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  assignment.items.resize(bin_of.size() - assignment.leftover.size());
  std::vector<std::int64_t> next(begin.begin(), begin.end() - 1);
  for (const std::int32_t item : order) {
    const std::int32_t bin = bin_of[static_cast<std::size_t>(item)];
    if (bin >= 0) {
      assignment.items[static_cast<std::size_t>(next[static_cast<std::size_t>(bin)]++)] = item;
    }
  }
  return assignment;
}

}  // namespace detail

/// First-fit decreasing: items, longest first and ties in arrival order, go each to the lowest bin
/// where they fit. An item of n tokens fits at s = 0 in an empty bin, else at the bin's load rounded
/// up to the alignment, if s + n <= budget and the bin has a segment (and loss tokens) to spare; the
/// load becomes s + n. Items of no token go to bin 0 and count for nothing.
///
/// Packing in chunks of B bins, each chunk made of what the ones before left over (in arrival order),
/// is the same as one run with no limit on bins, cut every B bins: an item leaves a chunk exactly when
/// none of its bins fits at that moment, so the next chunk sees the same items in the same order as
/// bins B, B + 1, ... of the single run do.
///
/// shapes    lengths [n]; loss_tokens [n], or empty where limits.max_loss_tokens is not to bind
/// specials  n = 0: no bin; only bins that hold an item are returned
/// memory    O(n)
/// cost      O(n log n) (under max_loss_tokens the search may look at more bins)
/// throws    Error for: a limit < 1, a length < 0 or above the budget, a loss count < 0 or above its
///           limit, budget or n above 2^31 - 1, loss_tokens of another length
/// source    google/tunix pack_core; spec/packing.md 2.1
[[nodiscard]] inline BinAssignment first_fit_decreasing(
    std::span<const std::int32_t> lengths, const BinLimits& limits,
    std::span<const std::int32_t> loss_tokens = {}) {
  detail::validate("packing::first_fit_decreasing", lengths, limits, loss_tokens);
  if (lengths.empty()) {
    return {};
  }
  const std::vector<std::int32_t> order = detail::longest_first(lengths);
  return detail::by_bin(order, detail::first_fit(order, lengths, limits, loss_tokens));
}

}  // namespace heddle::packing

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <oneapi/tbb/task_arena.h>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/dims.hpp"

namespace heddle::moe {

/// The inverse of a slot that a map holds no position for: its expert is not one of the map's.
inline constexpr std::int32_t nowhere = -1;

/// Experts [first, first + count): those a device holds.
struct ExpertRange {
  std::int64_t first = 0;
  std::int64_t count = 0;

  [[nodiscard]] std::int64_t end() const { return first + count; }
  friend bool operator==(const ExpertRange&, const ExpertRange&) = default;
};

/// The memory that a routing map is built in: the caller's, a residual of the layer.
struct RoutingMapStorage {
  std::span<std::int32_t> permutation;    ///< [M]
  std::span<std::int32_t> inverse;        ///< [M]
  std::span<std::int64_t> group_offsets;  ///< [experts.count + 1]
};

/// Slots in the order of their experts. Slot t*K + k is the k-th choice of token t; its sorted
/// position is where it lies when all slots of the held experts are sorted by expert, stably.
///
/// A map holds all experts or a range of them, a device's. That of all experts is a whole
/// permutation: slots routed nowhere have the last positions. That of a range has the positions of
/// the whole map less its first one, and `nowhere` for every other slot.
struct RoutingMap {
  RouterDims dims;
  ExpertRange experts;                          ///< whose slots have a position
  std::span<const std::int32_t> permutation;    ///< sorted position -> slot; [M] of all experts,
                                                ///< [routed_slots()] of a range
  std::span<const std::int32_t> inverse;        ///< [M], slot -> sorted position, or nowhere
  std::span<const std::int64_t> group_offsets;  ///< [experts.count + 1], an expert's first position

  /// Slots of the held experts; positions behind them are of slots routed nowhere.
  [[nodiscard]] std::int64_t routed_slots() const { return group_offsets.back(); }
  /// Slots of one expert, by its global id.
  [[nodiscard]] std::int64_t group_size(std::int64_t expert) const {
    const auto local = static_cast<std::size_t>(expert - experts.first);
    return group_offsets[local + 1] - group_offsets[local];
  }
  [[nodiscard]] std::int64_t token_of(std::int64_t position) const {
    return permutation[static_cast<std::size_t>(position)] / dims.top_k;
  }
};

/// How many slots of each held expert, of none, and of the experts between lie in tokens [first,
/// last): the first pass over one block.
///   counts[e - experts.first] += 1 for held e, counts[experts.count] += 1 for the rest
/// shapes    expert_ids [T,K]; counts [experts.count + 1]
/// writes    all of counts
/// returns   false where an id is neither an expert nor -1, or a row is routed in part; counts are
///           then of no use, and no memory outside of them was touched
/// source    spec/moe.md 3
[[nodiscard]] inline bool count_slots(const RouterDims& dims,
                                      ConstMatrixView<std::int32_t> expert_ids, ExpertRange experts,
                                      std::int64_t first, std::int64_t last,
                                      std::span<std::int32_t> counts) {
  std::fill(counts.begin(), counts.end(), 0);
  const auto all = static_cast<std::uint32_t>(dims.experts);
  const auto low = static_cast<std::uint32_t>(experts.first);
  const auto held = static_cast<std::uint32_t>(experts.count);
  std::int32_t* const count = counts.data();
  bool valid = true;
  for (std::int64_t t = first; t < last; ++t) {
    const std::int32_t* const ids = expert_ids.row(t).data();
    std::int64_t without_expert = 0;
    for (std::int64_t k = 0; k < dims.top_k; ++k) {
      const auto id = static_cast<std::uint32_t>(ids[k]);
      without_expert += id >= all ? 1 : 0;
      valid &= id + 1U <= all;  // -1 becomes 0, everything else that is no expert more than `all`
      ++count[std::min(id - low, held)];
    }
    valid &= without_expert == 0 || without_expert == dims.top_k;
  }
  return valid;
}

/// Gives the slots of tokens [first, last) their positions: the second pass over one block.
/// shapes    expert_ids [T,K]; next [experts.count + 1], the position that the block's first slot of
///           each held expert gets, then that of its first slot routed nowhere
/// writes    inverse of every slot of the block, permutation at the positions given; next moves on.
///           In a map of a range, next.back() is not used
/// source    spec/moe.md 3
inline void place_slots(const RouterDims& dims, ConstMatrixView<std::int32_t> expert_ids,
                        ExpertRange experts, std::int64_t first, std::int64_t last,
                        std::span<std::int32_t> next, std::span<std::int32_t> permutation,
                        std::span<std::int32_t> inverse) {
  const auto low = static_cast<std::uint32_t>(experts.first);
  const auto held = static_cast<std::uint32_t>(experts.count);
  const bool whole = experts.count == dims.experts;
  std::int32_t* const position_of = next.data();
  std::int32_t* const slots = permutation.data();
  std::int32_t* const positions = inverse.data();
  for (std::int64_t t = first; t < last; ++t) {
    const std::int32_t* const ids = expert_ids.row(t).data();
    for (std::int64_t k = 0; k < dims.top_k; ++k) {
      const std::int64_t slot = t * dims.top_k + k;
      const std::uint32_t group = std::min(static_cast<std::uint32_t>(ids[k]) - low, held);
      if (group == held && !whole) {
        positions[slot] = nowhere;
        continue;
      }
      const std::int32_t position = position_of[group]++;
      slots[position] = static_cast<std::int32_t>(slot);
      positions[slot] = position;
    }
  }
}

namespace detail {

/// Slots a block is worth: below that, setting its counters to work costs more than it saves.
inline constexpr std::int64_t slots_per_block = 8192;

[[nodiscard]] inline std::int64_t map_blocks(const RouterDims& dims, std::int64_t threads) {
  return std::max<std::int64_t>(1, std::min(threads, dims.slots() / slots_per_block));
}

/// Each block's counters start on their own cache line.
[[nodiscard]] inline std::int64_t counter_stride(ExpertRange experts) {
  constexpr std::int64_t line = 64 / sizeof(std::int32_t);
  return (experts.count + 1 + line - 1) / line * line;
}

inline void check_range(std::string_view where, const RouterDims& dims, ExpertRange experts) {
  require(experts.first >= 0, where, "experts.first", experts.first, "must be >= 0");
  require(experts.count >= 1, where, "experts.count", experts.count, "must be >= 1");
  if (experts.end() > dims.experts) {
    fail(where, "experts.end", experts.end(),
         "must be at most dims.experts (" + std::to_string(dims.experts) + ")");
  }
}

/// Throws for the first id that count_slots refused.
inline void check_ids(std::string_view where, ConstMatrixView<std::int32_t> expert_ids,
                      const RouterDims& dims) {
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    for (std::int64_t k = 0; k < dims.top_k; ++k) {
      const std::int32_t id = expert_ids(t, k);
      const std::string name = element_name("expert_ids", t * dims.top_k + k);
      if (id != unrouted && (id < 0 || id >= dims.experts)) {
        fail(where, name, id, "must be in [0, " + std::to_string(dims.experts) + ") or -1");
      }
      if ((id == unrouted) != (expert_ids(t, 0) == unrouted)) {
        fail(where, name, id, "must be -1 in every column of a row or in none");
      }
    }
  }
}

}  // namespace detail

/// Builds routing maps by counting, and counts how many: a layer's forward takes one, its backward
/// none, so that nothing there can sort again what the forward's map already holds.
class RoutingMapBuilder {
 public:
  explicit RoutingMapBuilder(Workspace& workspace) : workspace_(workspace) {}

  /// Maps built so far: one a layer, token chunk and micro-batch is enough, whatever is computed
  /// again.
  [[nodiscard]] std::int64_t maps_built() const { return maps_built_; }

  /// Bytes that build takes from its workspace, with so many blocks.
  [[nodiscard]] static std::size_t workspace_bytes(ExpertRange experts, std::int64_t blocks) {
    return Workspace::bytes_for<std::int32_t>(blocks * detail::counter_stride(experts)) +
           Workspace::bytes_for<std::uint8_t>(blocks);
  }
  /// The same with the blocks that build chooses where it is called.
  [[nodiscard]] static std::size_t workspace_bytes(const RouterDims& dims, ExpertRange experts) {
    return workspace_bytes(experts, default_blocks(dims));
  }

  /// The blocks that build cuts its slots into in the caller's arena: min(threads, M / 8192).
  [[nodiscard]] static std::int64_t default_blocks(const RouterDims& dims) {
    return detail::map_blocks(dims, oneapi::tbb::this_task_arena::max_concurrency());
  }

  /// The map of the held experts: two passes over the ids, a scan of the counts in between.
  /// shapes    expert_ids [T,K]; storage.permutation and .inverse [M], .group_offsets
  ///           [experts.count + 1]
  /// writes    all of inverse and group_offsets; all of permutation in a map of all experts, else
  ///           its first routed_slots(), the rest is left as it is
  /// alias     storage disjoint from expert_ids; the map reads storage as long as it lives
  /// specials  T = 0: empty, offsets 0. Duplicate ids in a row are separate slots
  /// order     unique: equal ids keep the order of their slots, for any number of blocks
  /// memory    workspace_bytes(experts, blocks)
  /// cost      cost(dims, experts)
  /// throws    Error for bad dims, a range outside the experts, other shapes, blocks < 1, an id that
  ///           is neither an expert nor -1, a row that is routed in part
  /// source    spec/moe.md 3
  RoutingMap build(const RouterDims& dims, ConstMatrixView<std::int32_t> expert_ids,
                   ExpertRange experts, std::int64_t blocks, const RoutingMapStorage& storage) {
    constexpr std::string_view where = "moe::RoutingMapBuilder::build";
    dims.validate(where);
    require_shape(where, "expert_ids", expert_ids, "dims.tokens", dims.tokens, "dims.top_k",
                  dims.top_k);
    detail::check_range(where, dims, experts);
    require(blocks >= 1, where, "blocks", blocks, "must be >= 1");
    require_length(where, "storage.permutation", storage.permutation, "dims.slots", dims.slots());
    require_length(where, "storage.inverse", storage.inverse, "dims.slots", dims.slots());
    require_length(where, "storage.group_offsets", storage.group_offsets, "experts.count + 1",
                   experts.count + 1);

    const Workspace::Frame frame(workspace_);
    const std::int64_t stride = detail::counter_stride(experts);
    const auto counters = workspace_.take<std::int32_t>(blocks * stride);
    const auto valid = workspace_.take<std::uint8_t>(blocks);
    const auto block_counters = [&](std::int64_t block) {
      return counters.subspan(static_cast<std::size_t>(block * stride),
                              static_cast<std::size_t>(experts.count) + 1);
    };
    const auto first_token = [&](std::int64_t block) { return dims.tokens * block / blocks; };

    parallel_tasks(blocks, [&](std::int64_t block) {
      valid[static_cast<std::size_t>(block)] =
          count_slots(dims, expert_ids, experts, first_token(block), first_token(block + 1),
                      block_counters(block))
              ? 1
              : 0;
    });
    if (std::find(valid.begin(), valid.end(), std::uint8_t{0}) != valid.end()) {
      detail::check_ids(where, expert_ids, dims);
    }

    // Experts outside, blocks inside: a block's slots of an expert follow those of earlier blocks.
    std::int32_t position = 0;
    for (std::size_t group = 0; group <= static_cast<std::size_t>(experts.count); ++group) {
      storage.group_offsets[group] = position;
      if (group < static_cast<std::size_t>(experts.count) || experts.count == dims.experts) {
        for (std::int64_t block = 0; block < blocks; ++block) {
          std::int32_t& counter = block_counters(block)[group];
          const std::int32_t count = counter;
          counter = position;
          position += count;
        }
      }
    }

    parallel_tasks(blocks, [&](std::int64_t block) {
      place_slots(dims, expert_ids, experts, first_token(block), first_token(block + 1),
                  block_counters(block), storage.permutation, storage.inverse);
    });
    ++maps_built_;
    return {dims, experts, storage.permutation.first(static_cast<std::size_t>(position)),
            storage.inverse, storage.group_offsets};
  }

  /// The same, in the blocks of the caller's arena.
  RoutingMap build(const RouterDims& dims, ConstMatrixView<std::int32_t> expert_ids,
                   ExpertRange experts, const RoutingMapStorage& storage) {
    dims.validate("moe::RoutingMapBuilder::build");
    return build(dims, expert_ids, experts, default_blocks(dims), storage);
  }

  /// The map of all experts.
  RoutingMap build(const RouterDims& dims, ConstMatrixView<std::int32_t> expert_ids,
                   const RoutingMapStorage& storage) {
    return build(dims, expert_ids, {.first = 0, .count = dims.experts}, storage);
  }

  /// Ids are read twice; positions and slots written once.
  [[nodiscard]] static Cost cost(const RouterDims& dims, ExpertRange experts) {
    const std::int64_t slot_bytes = dims.slots() * std::int64_t{sizeof(std::int32_t)};
    return {
        .bytes_read = 2 * slot_bytes,
        .bytes_written = 2 * slot_bytes + (experts.count + 1) * std::int64_t{sizeof(std::int64_t)}};
  }

 private:
  Workspace& workspace_;
  std::int64_t maps_built_ = 0;
};

}  // namespace heddle::moe

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

namespace detail {

/// Ids of consecutive tokens as runs without gaps: all of them one run where rows lie end to end.
template <class Body>
void for_runs_of_ids(const RouterDims& dims, ConstMatrixView<std::int32_t> expert_ids,
                     std::int64_t first, std::int64_t last, const Body& body) {
  if (expert_ids.stride() == dims.top_k || last - first == 1) {
    body(expert_ids.row(first).data(), first * dims.top_k, (last - first) * dims.top_k);
    return;
  }
  for (std::int64_t t = first; t < last; ++t) {
    body(expert_ids.row(t).data(), t * dims.top_k, dims.top_k);
  }
}

/// An id is an expert or -1, a row holds experts or is -1 in every column: the flat index of the first
/// that breaks this, or -1.
[[nodiscard]] inline std::int64_t first_bad_id(const RouterDims& dims,
                                               ConstMatrixView<std::int32_t> expert_ids,
                                               std::int64_t first, std::int64_t last) {
  for (std::int64_t t = first; t < last; ++t) {
    const std::span<const std::int32_t> ids = expert_ids.row(t);
    for (std::size_t k = 0; k < ids.size(); ++k) {
      const bool expert = ids[k] >= 0 && ids[k] < dims.experts;
      if ((!expert && ids[k] != unrouted) || (ids[k] == unrouted) != (ids[0] == unrouted)) {
        return t * dims.top_k + static_cast<std::int64_t>(k);
      }
    }
  }
  return -1;
}

}  // namespace detail

/// How many slots of tokens [first, last) each held expert has: the first pass over one block.
///   counts[e - experts.first] += 1 for held e, counts[experts.count] += 1 for the rest
/// shapes    expert_ids [T,K]; counts [experts.count + 1]
/// writes    all of counts
/// returns   the flat index of an id that is neither an expert nor -1, or of one in a row that is
///           routed in part, the first of them; -1 where there is none. An id outside the experts never
///           indexes anything
/// source    spec/moe.md 3
[[nodiscard]] inline std::int64_t count_slots(const RouterDims& dims,
                                              ConstMatrixView<std::int32_t> expert_ids,
                                              ExpertRange experts, std::int64_t first,
                                              std::int64_t last, std::span<std::int32_t> counts) {
  std::fill(counts.begin(), counts.end(), 0);
  const auto low = static_cast<std::uint32_t>(experts.first);
  const auto held = static_cast<std::uint32_t>(experts.count);
  const auto highest = static_cast<std::int32_t>(dims.experts - 1);
  std::int32_t* const count = counts.data();
  std::int32_t outside = 0;  // negative once an id was below 0 or above the highest
  detail::for_runs_of_ids(dims, expert_ids, first, last,
                          [&](const std::int32_t* ids, std::int64_t, std::int64_t length) {
                            for (std::int64_t i = 0; i < length; ++i) {
                              outside |= ids[i] | (highest - (ids[i] & INT32_MAX));
                              ++count[std::min(static_cast<std::uint32_t>(ids[i]) - low, held)];
                            }
                          });
  return outside < 0 ? detail::first_bad_id(dims, expert_ids, first, last) : -1;
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
  // A map is built once between kernels that stream gigabytes, so its memory is cold: positions are
  // asked for this many slots ahead.
  constexpr std::int64_t ahead = 24;
  std::int32_t* const position_of = next.data();
  std::int32_t* const slots = permutation.data();
  const auto group_of = [&](std::int32_t id) {
    return std::min(static_cast<std::uint32_t>(id) - low, held);
  };
  detail::for_runs_of_ids(
      dims, expert_ids, first, last,
      [&](const std::int32_t* ids, std::int64_t first_slot, std::int64_t length) {
        std::int32_t* const positions = inverse.data() + first_slot;
        for (std::int64_t i = 0; i < length; ++i) {
          if (i + ahead < length) {
            __builtin_prefetch(slots + position_of[group_of(ids[i + ahead])], 1);
          }
          const std::uint32_t group = group_of(ids[i]);
          if (group == held && !whole) {
            positions[i] = nowhere;
            continue;
          }
          const std::int32_t position = position_of[group]++;
          slots[position] = static_cast<std::int32_t>(first_slot + i);
          positions[i] = position;
        }
      });
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

[[noreturn]] inline void refuse_id(std::string_view where, const RouterDims& dims,
                                   ConstMatrixView<std::int32_t> expert_ids, std::int64_t slot) {
  const std::int32_t id = expert_ids(slot / dims.top_k, slot % dims.top_k);
  const bool expert = id >= 0 && id < dims.experts;
  fail(where, element_name("expert_ids", slot), id,
       expert || id == unrouted ? "must be -1 in every column of a row or in none"
                                : "must be in [0, " + std::to_string(dims.experts) + ") or -1");
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
           Workspace::bytes_for<std::int64_t>(blocks);
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
    const auto bad_ids = workspace_.take<std::int64_t>(blocks);
    const auto block_counters = [&](std::int64_t block) {
      return counters.subspan(static_cast<std::size_t>(block * stride),
                              static_cast<std::size_t>(experts.count) + 1);
    };
    const auto first_token = [&](std::int64_t block) { return dims.tokens * block / blocks; };

    parallel_tasks(blocks, [&](std::int64_t block) {
      bad_ids[static_cast<std::size_t>(block)] =
          count_slots(dims, expert_ids, experts, first_token(block), first_token(block + 1),
                      block_counters(block));
    });
    for (const std::int64_t slot : bad_ids) {
      if (slot >= 0) {
        detail::refuse_id(where, dims, expert_ids, slot);
      }
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

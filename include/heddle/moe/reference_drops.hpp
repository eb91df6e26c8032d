#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <vector>

#include "heddle/core/view.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/reference_router.hpp"

namespace heddle::moe::reference {

/// Which slots reach their expert, and how full the buffers are.
struct Dispatch {
  std::vector<std::uint8_t> kept;  ///< [T*K], 1 where the slot has a row at its expert
  std::int64_t dropped_slots = 0;  ///< routed slots without one, over all devices and chunks
  std::int64_t largest_drop = 0;   ///< of one device in one chunk
  std::int64_t buffer_rows = 0;  ///< B: rows a device has for one chunk; without a buffer, or with
                                 ///< one larger than that, all slots of the group's chunk
  double required_factor = 0;    ///< the smallest buffer factor without a drop: most rows that any
                                 ///< device wants in a chunk, over the balanced number
  [[nodiscard]] bool has_overflow() const { return dropped_slots > 0; }
};

/// Where the slots of one layer would fall on the devices of `options`.
///   balanced = slice * K,  B = trunc(balanced * buffer_factor)
/// Of the slots that want a device in one chunk the first B keep a row: in (expert, slot) order for
/// the ring, in (source device, expert, slot) order for all-to-all, where slots count through the
/// gathered tokens of the chunk, device after device.
/// shapes    expert_ids [T,K]
/// specials  unrouted slots take no room, are not kept and not dropped. B = 0 drops everything. T =
///           0: none
/// order     unique
/// throws    Error for bad dims or options, another shape, an id that is neither an expert nor -1
/// source    spec/moe.md 4 and 7
[[nodiscard]] inline Dispatch dispatch(const RouterDims& dims,
                                       ConstMatrixView<std::int32_t> expert_ids,
                                       const DispatchOptions& options) {
  constexpr std::string_view where = "moe::reference::dispatch";
  dims.validate(where);
  detail::check_expert_ids(where, expert_ids, dims);
  options.validate(where, "options", dims);

  const std::int64_t devices = options.groups * options.shards;
  const std::int64_t slices = devices * options.token_chunks;
  const std::int64_t slice = (dims.tokens + slices - 1) / slices;  // tokens a device and chunk
  const std::int64_t balanced = slice * dims.top_k;
  const std::int64_t gathered_slots = balanced * options.shards;
  const std::int64_t shard_experts = dims.experts / options.shards;

  Dispatch result;
  result.kept.assign(static_cast<std::size_t>(dims.slots()), 0);
  result.buffer_rows = gathered_slots;
  if (options.buffer_factor) {
    const double rows = static_cast<double>(balanced) * *options.buffer_factor;
    if (rows < static_cast<double>(gathered_slots)) {
      result.buffer_rows = static_cast<std::int64_t>(rows);
    }
  }

  struct Row {
    std::int64_t source;
    std::int32_t expert;
    std::int64_t slot;
  };
  for (std::int64_t group = 0; group < options.groups; ++group) {
    for (std::int64_t chunk = 0; chunk < options.token_chunks; ++chunk) {
      std::vector<std::vector<Row>> wanted(static_cast<std::size_t>(options.shards));
      for (std::int64_t source = 0; source < options.shards; ++source) {
        const std::int64_t device = group * options.shards + source;
        const std::int64_t first = (device * options.token_chunks + chunk) * slice;
        const std::int64_t last = std::min(first + slice, dims.tokens);
        for (std::int64_t t = first; t < last; ++t) {
          for (std::int64_t k = 0; k < dims.top_k; ++k) {
            const std::int32_t expert = expert_ids(t, k);
            if (expert != unrouted) {
              wanted[static_cast<std::size_t>(expert / shard_experts)].push_back(
                  {source, expert, t * dims.top_k + k});
            }
          }
        }
      }
      for (std::vector<Row>& rows : wanted) {
        std::stable_sort(rows.begin(), rows.end(), [&](const Row& left, const Row& right) {
          return options.strategy == Strategy::ring
                     ? left.expert < right.expert
                     : std::tie(left.source, left.expert) < std::tie(right.source, right.expert);
        });
        const auto count = static_cast<std::int64_t>(rows.size());
        const std::int64_t room = std::min(count, result.buffer_rows);
        for (std::int64_t i = 0; i < room; ++i) {
          result.kept[static_cast<std::size_t>(rows[static_cast<std::size_t>(i)].slot)] = 1;
        }
        result.dropped_slots += count - room;
        result.largest_drop = std::max(result.largest_drop, count - room);
        if (balanced > 0) {
          result.required_factor = std::max(
              result.required_factor, static_cast<double>(count) / static_cast<double>(balanced));
        }
      }
    }
  }
  return result;
}

}  // namespace heddle::moe::reference

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string_view>
#include <vector>

#include "heddle/core/view.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/reference_router.hpp"

namespace heddle::moe::reference {

/// Slots in the order of their experts.
struct RoutingMaps {
  std::vector<std::int32_t> permutation;    ///< [M], sorted position -> slot t*K + k
  std::vector<std::int32_t> inverse;        ///< [M], slot -> sorted position
  std::vector<std::int64_t> group_sizes;    ///< [E], slots of each expert
  std::vector<std::int64_t> group_offsets;  ///< [E+1], sorted position of an expert's first slot;
                                            ///< the last entry: how many slots are routed
};

/// The stable sort of all slots by expert, those routed nowhere last.
/// shapes    expert_ids [T,K]; M = T*K
/// specials  T = 0: empty maps, sizes and offsets 0. Duplicate ids in a row are separate slots
/// order     unique: equal ids keep the order of their slots
/// memory    8 M + 16 E bytes
/// throws    Error for bad dims, another shape, an id that is neither an expert nor -1, a row that
///           is routed in part
/// source    spec/moe.md 3
[[nodiscard]] inline RoutingMaps routing_maps(const RouterDims& dims,
                                              ConstMatrixView<std::int32_t> expert_ids) {
  constexpr std::string_view where = "moe::reference::routing_maps";
  dims.validate(where);
  detail::check_expert_ids(where, expert_ids, dims);

  const auto expert_of = [&](std::int32_t slot) {
    return expert_ids(slot / dims.top_k, slot % dims.top_k);
  };
  const auto sort_key = [&](std::int32_t slot) {
    const std::int32_t id = expert_of(slot);
    return id == unrouted ? std::numeric_limits<std::int32_t>::max() : id;
  };
  RoutingMaps maps;
  maps.permutation.resize(static_cast<std::size_t>(dims.slots()));
  std::iota(maps.permutation.begin(), maps.permutation.end(), 0);
  std::stable_sort(
      maps.permutation.begin(), maps.permutation.end(),
      [&](std::int32_t left, std::int32_t right) { return sort_key(left) < sort_key(right); });

  maps.inverse.resize(maps.permutation.size());
  maps.group_sizes.assign(static_cast<std::size_t>(dims.experts), 0);
  for (std::size_t position = 0; position < maps.permutation.size(); ++position) {
    const std::int32_t slot = maps.permutation[position];
    maps.inverse[static_cast<std::size_t>(slot)] = static_cast<std::int32_t>(position);
    if (expert_of(slot) != unrouted) {
      ++maps.group_sizes[static_cast<std::size_t>(expert_of(slot))];
    }
  }
  maps.group_offsets.assign(static_cast<std::size_t>(dims.experts) + 1, 0);
  std::partial_sum(maps.group_sizes.begin(), maps.group_sizes.end(),
                   maps.group_offsets.begin() + 1);
  return maps;
}

}  // namespace heddle::moe::reference

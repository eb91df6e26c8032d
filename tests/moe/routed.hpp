#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "heddle/core/workspace.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/routing_map.hpp"
#include "support/random.hpp"

namespace heddle::moe::test {

using Ids = std::vector<std::int32_t>;

/// A map that owns its memory, poisoned before it was built.
struct OwnedMap {
  RouterDims dims;
  ExpertRange experts;
  Ids ids, permutation, inverse;
  std::vector<std::int64_t> group_offsets;
  RoutingMap map;

  OwnedMap(const RouterDims& d, Ids expert_ids, ExpertRange range, std::int64_t blocks = 3)
      : dims(d),
        experts(range),
        ids(std::move(expert_ids)),
        permutation(static_cast<std::size_t>(d.slots()), -77),
        inverse(static_cast<std::size_t>(d.slots()), -77),
        group_offsets(static_cast<std::size_t>(range.count) + 1, -77) {
    Workspace workspace;
    map = RoutingMapBuilder(workspace).build(d, {ids.data(), d.tokens, d.top_k}, range, blocks,
                                             {permutation, inverse, group_offsets});
  }
  OwnedMap(const RouterDims& d, Ids expert_ids)
      : OwnedMap(d, std::move(expert_ids), {.first = 0, .count = d.experts}) {}
  OwnedMap(const OwnedMap&) = delete;
  OwnedMap& operator=(const OwnedMap&) = delete;
};

/// K experts for each token, repeats allowed, low experts the popular ones; some tokens are routed
/// nowhere.
[[nodiscard]] inline Ids random_ids(const RouterDims& dims, std::uint64_t seed,
                                    double padding = 0.2) {
  heddle::test::Random random(seed);
  Ids ids;
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    const bool skip = random.chance(padding);
    for (std::int64_t k = 0; k < dims.top_k; ++k) {
      const std::int64_t one = random.integer(0, dims.experts - 1);
      const std::int64_t other = random.integer(0, dims.experts - 1);
      ids.push_back(skip ? unrouted : static_cast<std::int32_t>(one < other ? one : other));
    }
  }
  return ids;
}

}  // namespace heddle::moe::test

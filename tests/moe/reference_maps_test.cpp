#include "heddle/moe/reference_maps.hpp"

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: permutation and inverse swapped; an unstable or reversed
// order inside an expert; unrouted slots first, or counted; inclusive offsets; slot mod K read as
// the token; an id of E accepted.

namespace heddle::moe::reference {
namespace {

using Ids = std::vector<std::int32_t>;
using Counts = std::vector<std::int64_t>;

RoutingMaps maps_of(const Ids& ids, std::int64_t experts, std::int64_t top_k) {
  const std::int64_t tokens = static_cast<std::int64_t>(ids.size()) / top_k;
  return routing_maps({.tokens = tokens, .experts = experts, .top_k = top_k},
                      {ids.data(), tokens, top_k});
}

// The worked vector of spec/moe.md 3.
TEST(ReferenceMaps, WorkedVector) {
  const RoutingMaps maps = maps_of({2, 0, -1, -1, 0, 3, 0, 2, 2, 1}, 4, 2);
  EXPECT_EQ(maps.permutation, (Ids{1, 4, 6, 9, 0, 7, 8, 5, 2, 3}));
  EXPECT_EQ(maps.inverse, (Ids{4, 0, 8, 9, 1, 7, 2, 5, 6, 3}));
  EXPECT_EQ(maps.group_sizes, (Counts{3, 1, 3, 1}));
  EXPECT_EQ(maps.group_offsets, (Counts{0, 3, 4, 7, 8}));
}

TEST(ReferenceMaps, Edges) {
  const RoutingMaps none = maps_of({}, 3, 2);
  EXPECT_TRUE(none.permutation.empty());
  EXPECT_TRUE(none.inverse.empty());
  EXPECT_EQ(none.group_sizes, (Counts{0, 0, 0}));
  EXPECT_EQ(none.group_offsets, (Counts{0, 0, 0, 0}));

  const Ids identity{0, 1, 2, 3};
  const RoutingMaps same = maps_of({1, 1, 1, 1}, 3, 1);
  EXPECT_EQ(same.permutation, identity);
  EXPECT_EQ(same.inverse, identity);
  EXPECT_EQ(same.group_offsets, (Counts{0, 0, 4, 4}));

  const RoutingMaps padding = maps_of({-1, -1, -1, -1}, 3, 2);
  EXPECT_EQ(padding.permutation, identity);
  EXPECT_EQ(padding.group_sizes, (Counts{0, 0, 0}));
  EXPECT_EQ(padding.group_offsets.back(), 0);

  EXPECT_EQ(maps_of({0, 0, 0, 0}, 1, 1).group_sizes, (Counts{4}));
  // Two slots of one token at one expert are two rows.
  EXPECT_EQ(maps_of({2, 2, 0, 2}, 3, 2).permutation, (Ids{2, 0, 1, 3}));
}

TEST(ReferenceMaps, LawsOfASort) {
  heddle::test::Random random(3);
  const std::int64_t tokens = 333;
  const std::int64_t top_k = 3;
  const std::int64_t experts = 7;
  Ids ids(static_cast<std::size_t>(tokens * top_k));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const bool padding = random.chance(0.2);
    for (std::int64_t k = 0; k < top_k; ++k) {
      ids[static_cast<std::size_t>(t * top_k + k)] =
          padding ? -1 : static_cast<std::int32_t>(random.integer(0, experts - 1));
    }
  }
  const RoutingMaps maps = maps_of(ids, experts, top_k);
  const auto id_at = [&](std::size_t position) {
    const std::int32_t id = ids[static_cast<std::size_t>(maps.permutation[position])];
    return id < 0 ? static_cast<std::int32_t>(experts) : id;
  };
  for (std::size_t j = 0; j < ids.size(); ++j) {
    EXPECT_EQ(maps.inverse[static_cast<std::size_t>(maps.permutation[j])],
              static_cast<std::int32_t>(j));
    if (j > 0) {
      EXPECT_TRUE(id_at(j - 1) < id_at(j) ||
                  (id_at(j - 1) == id_at(j) && maps.permutation[j - 1] < maps.permutation[j]))
          << j;
    }
  }
  for (std::size_t e = 0; e < static_cast<std::size_t>(experts); ++e) {
    EXPECT_EQ(maps.group_offsets[e + 1] - maps.group_offsets[e], maps.group_sizes[e]);
    EXPECT_EQ(id_at(static_cast<std::size_t>(maps.group_offsets[e])), static_cast<std::int32_t>(e));
  }
  EXPECT_EQ(std::accumulate(maps.group_sizes.begin(), maps.group_sizes.end(), std::int64_t{0}),
            maps.group_offsets.back());
}

TEST(ReferenceMaps, RefusesIdsThatAreNoExperts) {
  const auto refusal = [](const Ids& ids) {
    return heddle::test::thrown_text<Error>([&] { static_cast<void>(maps_of(ids, 3, 2)); });
  };
  EXPECT_EQ(refusal({0, 1, 2, 3}),
            "moe::reference::routing_maps: expert_ids[3] = 3: must be in [0, 3) or -1");
  EXPECT_EQ(refusal({0, -2, 2, 3}),
            "moe::reference::routing_maps: expert_ids[1] = -2: must be in [0, 3) or -1");
  EXPECT_EQ(refusal({-1, 1, 2, 0}),
            "moe::reference::routing_maps: expert_ids[1] = 1: must be -1 in every column of a row "
            "or in none");
  const Ids ids(4, 0);
  EXPECT_EQ(heddle::test::thrown_text<Error>([&] {
              static_cast<void>(
                  routing_maps({.tokens = 3, .experts = 3, .top_k = 2}, {ids.data(), 2, 2}));
            }),
            "moe::reference::routing_maps: expert_ids.rows = 2: must equal dims.tokens (3)");
  EXPECT_EQ(heddle::test::thrown_text<Error>([&] {
              static_cast<void>(
                  routing_maps({.tokens = 2, .experts = 0, .top_k = 2}, {ids.data(), 2, 2}));
            }),
            "moe::reference::routing_maps: dims.experts = 0: must be >= 1");
}

}  // namespace
}  // namespace heddle::moe::reference

#include "heddle/moe/routing_map.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/workspace.hpp"
#include "heddle/moe/reference_maps.hpp"
#include "moe/routed.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: permutation and inverse swapped; an unstable order inside
// an expert; an inclusive scan; the scan blocks outside and experts inside; one block's counters not
// zeroed; slots routed nowhere first, or counted; slot mod K as the token; a range's first expert off
// by one; a range's positions those of the whole map; an id used as an index before it is checked; a
// row routed in part let through; the last block's remainder skipped; a build not counted.

namespace heddle::moe {
namespace {

using test::Ids;
using test::OwnedMap;
using test::random_ids;
using Offsets = std::vector<std::int64_t>;

/// Slots by a stable sort of their ids, those routed nowhere last.
Ids sorted_slots(const Ids& ids, std::int64_t experts) {
  Ids slots(ids.size());
  std::iota(slots.begin(), slots.end(), 0);
  const auto key = [&](std::int32_t slot) {
    const std::int64_t id = ids[static_cast<std::size_t>(slot)];
    return id < 0 ? experts : id;
  };
  std::stable_sort(slots.begin(), slots.end(), [&](int a, int b) { return key(a) < key(b); });
  return slots;
}

Ids inverse_of(const Ids& permutation) {
  Ids inverse(permutation.size());
  for (std::size_t j = 0; j < permutation.size(); ++j) {
    inverse[static_cast<std::size_t>(permutation[j])] = static_cast<std::int32_t>(j);
  }
  return inverse;
}

// The worked vector of spec/moe.md 3.
TEST(RoutingMap, WorkedVector) {
  const Ids ids{2, 0, -1, -1, 0, 3, 0, 2, 2, 1};
  const OwnedMap owned({.tokens = 5, .experts = 4, .top_k = 2}, ids);
  EXPECT_EQ(owned.permutation, (Ids{1, 4, 6, 9, 0, 7, 8, 5, 2, 3}));
  EXPECT_EQ(owned.inverse, (Ids{4, 0, 8, 9, 1, 7, 2, 5, 6, 3}));
  EXPECT_EQ(owned.group_offsets, (Offsets{0, 3, 4, 7, 8}));
  EXPECT_EQ(owned.map.routed_slots(), 8);
  Ids tokens;
  for (std::int64_t j = 0; j < 10; ++j) {
    tokens.push_back(static_cast<std::int32_t>(owned.map.token_of(j)));
  }
  EXPECT_EQ(tokens, (Ids{0, 2, 3, 4, 0, 3, 4, 2, 1, 1}));
  for (const auto& [expert, size] : {std::pair(0, 3), {1, 1}, {2, 3}, {3, 1}}) {
    EXPECT_EQ(owned.map.group_size(expert), size);
  }
}

// Four tokens of one expert; only the first slot of each was scattered in a kernel we know of.
TEST(RoutingMap, EdgeShapes) {
  const OwnedMap none({.tokens = 0, .experts = 3, .top_k = 2}, {});
  EXPECT_TRUE(none.map.permutation.empty());
  EXPECT_EQ(none.group_offsets, (Offsets{0, 0, 0, 0}));
  const Ids identity{0, 1, 2, 3};
  const OwnedMap one({.tokens = 4, .experts = 1, .top_k = 1}, {0, 0, 0, 0});
  EXPECT_EQ(one.permutation, identity);
  EXPECT_EQ(one.inverse, identity);
  const OwnedMap same({.tokens = 2, .experts = 3, .top_k = 2}, {1, 1, 1, 1});
  EXPECT_EQ(same.permutation, identity);
  EXPECT_EQ(same.group_offsets, (Offsets{0, 0, 4, 4}));
  const OwnedMap padding({.tokens = 2, .experts = 3, .top_k = 2}, {-1, -1, -1, -1});
  EXPECT_EQ(padding.permutation, identity);
  EXPECT_EQ(padding.inverse, identity);
  EXPECT_EQ(padding.map.routed_slots(), 0);
}

TEST(RoutingMap, IsTheStableSortForAnyNumberOfBlocks) {
  for (const RouterDims& dims : {RouterDims{.tokens = 333, .experts = 7, .top_k = 3},
                                 RouterDims{.tokens = 1, .experts = 40, .top_k = 10},
                                 RouterDims{.tokens = 61, .experts = 512, .top_k = 10},
                                 RouterDims{.tokens = 100, .experts = 16, .top_k = 1}}) {
    const Ids ids = random_ids(dims, 3);
    const Ids slots = sorted_slots(ids, dims.experts);
    for (std::int64_t blocks = 1; blocks <= 64; ++blocks) {
      const OwnedMap owned(dims, ids, {.first = 0, .count = dims.experts}, blocks);
      ASSERT_EQ(owned.permutation, slots) << blocks;
      ASSERT_EQ(owned.inverse, inverse_of(slots)) << blocks;
      ASSERT_EQ(owned.map.routed_slots(), static_cast<std::int64_t>(ids.size()) -
                                              std::count(ids.begin(), ids.end(), unrouted));
    }
    const auto reference = reference::routing_maps(dims, {ids.data(), dims.tokens, dims.top_k});
    const OwnedMap owned(dims, ids);
    EXPECT_EQ(owned.permutation, reference.permutation);
    EXPECT_EQ(owned.inverse, reference.inverse);
    EXPECT_EQ(owned.group_offsets, reference.group_offsets);
  }
}

TEST(RoutingMap, MapOfARangeIsASliceOfTheWhole) {
  const RouterDims dims{.tokens = 211, .experts = 12, .top_k = 3};
  const Ids ids = random_ids(dims, 4);
  const OwnedMap whole(dims, ids);
  for (const ExpertRange range : {ExpertRange{0, 4}, {4, 4}, {8, 4}, {5, 1}, {11, 1}, {1, 11}}) {
    const OwnedMap held(dims, ids, range, 5);
    const std::int64_t first = whole.group_offsets[static_cast<std::size_t>(range.first)];
    const std::int64_t last = whole.group_offsets[static_cast<std::size_t>(range.end())];
    ASSERT_EQ(held.map.routed_slots(), last - first);
    EXPECT_TRUE(std::equal(held.map.permutation.begin(), held.map.permutation.end(),
                           whole.permutation.begin() + first, whole.permutation.begin() + last));
    EXPECT_EQ(held.permutation.back(), -77) << "positions behind the range's are not written";
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::int64_t position = whole.inverse[i];
      const bool inside = first <= position && position < last;
      EXPECT_EQ(held.inverse[i], inside ? position - first : nowhere);
    }
    for (std::int64_t e = range.first; e < range.end(); ++e) {
      EXPECT_EQ(held.map.group_size(e), whole.map.group_size(e));
    }
  }
}

// Tokens that are routed nowhere leave no trace: the map is that of the batch without them.
TEST(RoutingMap, ExcludedTokensMightAsWellBeDeleted) {
  const RouterDims dims{.tokens = 150, .experts = 9, .top_k = 4};
  const Ids ids = random_ids(dims, 7, 0.4);
  Ids real, real_tokens;
  for (std::int32_t t = 0; t < 150; ++t) {
    const auto row = ids.begin() + std::ptrdiff_t{4} * t;
    if (*row != unrouted) {
      real.insert(real.end(), row, row + 4);
      real_tokens.push_back(t);
    }
  }
  ASSERT_LT(real_tokens.size(), 120U);
  const OwnedMap padded(dims, ids);
  const OwnedMap deleted(
      {.tokens = static_cast<std::int64_t>(real_tokens.size()), .experts = 9, .top_k = 4}, real);
  EXPECT_EQ(padded.group_offsets, deleted.group_offsets);
  for (std::int64_t j = 0; j < deleted.map.routed_slots(); ++j) {
    const auto position = static_cast<std::size_t>(j);
    EXPECT_EQ(padded.map.token_of(j),
              real_tokens[static_cast<std::size_t>(deleted.map.token_of(j))]);
    EXPECT_EQ(padded.permutation[position] % 4, deleted.permutation[position] % 4);
  }
}

TEST(RoutingMap, BlocksFollowTheThreadsAndTheWork) {
  const RouterDims large{.tokens = 16384, .experts = 8, .top_k = 4};  // 8 blocks of 8,192 slots
  const RouterDims small{.tokens = 4095, .experts = 8, .top_k = 2};
  heddle::test::with_threads(1, [&] { EXPECT_EQ(RoutingMapBuilder::default_blocks(large), 1); });
  heddle::test::with_threads(16, [&] {
    EXPECT_EQ(RoutingMapBuilder::default_blocks(large), 8);
    EXPECT_EQ(RoutingMapBuilder::default_blocks(small), 1);
  });
  heddle::test::with_threads(3, [&] { EXPECT_EQ(RoutingMapBuilder::default_blocks(large), 3); });

  const Ids ids = random_ids(large, 5);
  const Ids slots = sorted_slots(ids, large.experts);
  for (const int threads : {1, 2, 5, 16}) {
    Ids permutation(ids.size());
    Ids inverse(ids.size());
    Offsets offsets(9);
    Workspace workspace;
    heddle::test::with_threads(threads, [&] {
      RoutingMapBuilder(workspace).build(large, {ids.data(), large.tokens, large.top_k},
                                         {permutation, inverse, offsets});
      EXPECT_EQ(workspace.high_water_bytes(),
                RoutingMapBuilder::workspace_bytes(large, {.first = 0, .count = 8}));
    });
    EXPECT_EQ(permutation, slots) << threads;
    EXPECT_EQ(inverse, inverse_of(slots)) << threads;
  }
}

TEST(RoutingMap, CountsItsBuilds) {
  Workspace workspace;
  RoutingMapBuilder builder(workspace);
  EXPECT_EQ(builder.maps_built(), 0);
  const RouterDims dims{.tokens = 2, .experts = 3, .top_k = 2};
  Ids ids{0, 1, 2, 3};
  Ids permutation(4);
  Ids inverse(4);
  Offsets offsets(4);
  const auto build = [&] {
    builder.build(dims, {ids.data(), 2, 2}, {permutation, inverse, offsets});
  };
  EXPECT_THROW(build(), Error);
  EXPECT_EQ(builder.maps_built(), 0);
  ids[3] = 0;
  build();
  build();
  EXPECT_EQ(builder.maps_built(), 2);
}

TEST(RoutingMap, ReadsIdsThroughAStride) {
  const Ids wide{2, 0, 99, -1, -1, 99, 0, 1, 99};
  Ids permutation(6);
  Ids inverse(6);
  Offsets offsets(4);
  Workspace workspace;
  RoutingMapBuilder(workspace).build({.tokens = 3, .experts = 3, .top_k = 2},
                                     {wide.data(), 3, 2, 3}, {permutation, inverse, offsets});
  EXPECT_EQ(permutation, (Ids{1, 4, 5, 0, 2, 3}));
}

TEST(RoutingMap, RefusesWrongArgumentsBeforeItWrites) {
  const auto refusal = [](const Ids& ids, ExpertRange range = {0, 3}, std::size_t slots = 4,
                          std::int64_t blocks = 2, std::int64_t experts = 3) {
    Ids permutation(slots, -77);
    Ids inverse(4, -77);
    Offsets offsets(static_cast<std::size_t>(std::max<std::int64_t>(range.count, 0)) + 1, -77);
    Workspace workspace;
    const std::string text = heddle::test::thrown_text<Error>([&] {
      RoutingMapBuilder(workspace).build({.tokens = 2, .experts = experts, .top_k = 2},
                                         {ids.data(), 2, 2}, range, blocks,
                                         {permutation, inverse, offsets});
    });
    EXPECT_EQ(permutation, Ids(slots, -77));
    EXPECT_EQ(inverse, Ids(4, -77));
    EXPECT_EQ(offsets.front(), -77);
    return text.substr(text.find(": ") + 2);
  };
  EXPECT_EQ(refusal({0, 1, 2, 3}), "expert_ids[3] = 3: must be in [0, 3) or -1");
  EXPECT_EQ(refusal({0, -2, 2, 3}), "expert_ids[1] = -2: must be in [0, 3) or -1");
  EXPECT_EQ(refusal({INT32_MIN, 1, 2, INT32_MAX}),
            "expert_ids[0] = -2147483648: must be in [0, 3) or -1");
  EXPECT_EQ(refusal({-1, 1, 2, 0}),
            "expert_ids[1] = 1: must be -1 in every column of a row or in none");
  EXPECT_EQ(refusal({0, 1, 2, -1}),
            "expert_ids[3] = -1: must be -1 in every column of a row or in none");
  // The ids of other experts are checked too.
  EXPECT_EQ(refusal({0, 1, 2, 3}, {0, 1}), "expert_ids[3] = 3: must be in [0, 3) or -1");
  const Ids good{0, 1, 2, 0};
  EXPECT_EQ(refusal(good, {-1, 2}), "experts.first = -1: must be >= 0");
  EXPECT_EQ(refusal(good, {1, 0}), "experts.count = 0: must be >= 1");
  EXPECT_EQ(refusal(good, {2, 2}), "experts.end = 4: must be at most dims.experts (3)");
  EXPECT_EQ(refusal(good, {0, 3}, 3), "storage.permutation.size = 3: must equal dims.slots (4)");
  EXPECT_EQ(refusal(good, {0, 3}, 4, 0), "blocks = 0: must be >= 1");
  EXPECT_EQ(refusal(good, {0, 3}, 4, 2, 0), "dims.experts = 0: must be >= 1");
  EXPECT_EQ(heddle::test::thrown_text<Error>([&] {
              Workspace workspace;
              RoutingMapBuilder(workspace).build({.tokens = 1 << 30, .experts = 4, .top_k = 2}, {},
                                                 RoutingMapStorage{});
            }),
            "moe::RoutingMapBuilder::build: dims.tokens = 1073741824: tokens * top_k must be at "
            "most 2147483647");
}

TEST(RoutingMap, CostIsTwoReadsAndTwoWritesASlot) {
  const Cost cost = RoutingMapBuilder::cost({.tokens = 65536, .experts = 512, .top_k = 10},
                                            {.first = 0, .count = 512});
  EXPECT_EQ(cost.bytes_read, 5 << 20);
  EXPECT_EQ(cost.bytes_written, (5 << 20) + 513 * 8);
}

}  // namespace
}  // namespace heddle::moe

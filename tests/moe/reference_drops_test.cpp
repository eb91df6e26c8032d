#include "heddle/moe/reference_drops.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: `<= room`; drops from the front; the boundary expert's
// earliest slots dropped; all-to-all ordered as the ring; the last source kept; a drop not counted,
// or of one device only; buffers shared by chunks or groups; chunks cut from the whole row instead
// of each device's piece; a remainder of tokens skipped; padding taking room; a buffer of 0 taken
// for none; B rounded instead of cut; the first expert of a device off by one.

namespace heddle::moe::reference {
namespace {

using Ids = std::vector<std::int32_t>;
using Slots = std::vector<std::int64_t>;

Dispatch dispatched(const Ids& ids, std::int64_t experts, std::int64_t top_k,
                    const DispatchOptions& options) {
  const std::int64_t tokens = static_cast<std::int64_t>(ids.size()) / top_k;
  return dispatch({.tokens = tokens, .experts = experts, .top_k = top_k},
                  {ids.data(), tokens, top_k}, options);
}

Slots kept_slots(const Dispatch& result) {
  Slots kept;
  for (std::size_t i = 0; i < result.kept.size(); ++i) {
    if (result.kept[i] != 0) {
      kept.push_back(static_cast<std::int64_t>(i));
    }
  }
  return kept;
}

/// Slots that are routed and not kept.
Slots dropped_slots(const Dispatch& result, const Ids& ids) {
  Slots dropped;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] != unrouted && result.kept[i] == 0) {
      dropped.push_back(static_cast<std::int64_t>(i));
    }
  }
  return dropped;
}

// spec/moe.md 3: two devices of 3 rows. A device's slice is ceil(5 / 2) = 3 tokens, balanced 6
// rows.
TEST(ReferenceDrops, WorkedVector) {
  const Ids ids{2, 0, -1, -1, 0, 3, 0, 2, 2, 1};
  const Dispatch result = dispatched(ids, 4, 2, {.buffer_factor = 0.5, .shards = 2});
  EXPECT_EQ(result.buffer_rows, 3);
  EXPECT_EQ(kept_slots(result), (Slots{0, 1, 4, 6, 7, 8}));
  EXPECT_EQ(dropped_slots(result, ids), (Slots{5, 9}));
  EXPECT_EQ(result.dropped_slots, 2);
  EXPECT_EQ(result.largest_drop, 1);
  EXPECT_TRUE(result.has_overflow());
  EXPECT_DOUBLE_EQ(result.required_factor, 4.0 / 6);
}

TEST(ReferenceDrops, NoBufferKeepsEveryRoutedSlot) {
  const Ids ids{2, 0, -1, -1, 0, 3, 0, 2, 2, 1};
  for (const std::optional<double> factor : {std::optional<double>(), std::optional<double>(99)}) {
    const Dispatch result = dispatched(ids, 4, 2, {.buffer_factor = factor, .shards = 2});
    EXPECT_EQ(kept_slots(result), (Slots{0, 1, 4, 5, 6, 7, 8, 9}));
    EXPECT_EQ(result.dropped_slots, 0);
    EXPECT_EQ(result.buffer_rows, 12);
    EXPECT_FALSE(result.has_overflow());
  }
}

TEST(ReferenceDrops, BufferOfNoRowsDropsEverything) {
  const Ids ids{0, 1, -1, -1, 1, 0};
  const Dispatch result = dispatched(ids, 2, 2, {.buffer_factor = 0.16});
  EXPECT_EQ(result.buffer_rows, 0);
  EXPECT_TRUE(kept_slots(result).empty());
  EXPECT_EQ(result.dropped_slots, 4);
}

TEST(ReferenceDrops, BufferRowsAreCutNotRounded) {
  const Ids ids{0, 0, 0, 0};
  EXPECT_EQ(dispatched(ids, 1, 1, {.buffer_factor = 0.74}).buffer_rows, 2);
  EXPECT_EQ(dispatched(ids, 1, 1, {.buffer_factor = 0.75}).buffer_rows, 3);
  EXPECT_EQ(kept_slots(dispatched(ids, 1, 1, {.buffer_factor = 0.75})), (Slots{0, 1, 2}));
}

// Two devices, experts 0, 1 on the first and 2, 3 on the second; tokens 0-2 come from device 0,
// tokens 3-5 from device 1. Device 0 is wanted by slots 0, 1, 2 (e1, e0, e1) and 3, 4 (e0, e0).
TEST(ReferenceDrops, AllToAllDropsTheLastSourceAndTheRingTheHighestExpert) {
  const Ids ids{1, 0, 1, 0, 0, 3};
  const DispatchOptions ring{.buffer_factor = 1.0, .shards = 2};  // B = 3 * 1
  // (expert, slot): e0 1 3 4 | e1 0 2
  EXPECT_EQ(dropped_slots(dispatched(ids, 4, 1, ring), ids), (Slots{0, 2}));
  DispatchOptions sent = ring;
  sent.strategy = Strategy::all_to_all;
  // (source, expert, slot): 1 0 2 | 3 4
  const Dispatch result = dispatched(ids, 4, 1, sent);
  EXPECT_EQ(dropped_slots(result, ids), (Slots{3, 4}));
  EXPECT_EQ(result.dropped_slots, 2);
  sent.buffer_factor = 0.67;  // B = 2: source 0 keeps 1 0
  EXPECT_EQ(dropped_slots(dispatched(ids, 4, 1, sent), ids), (Slots{2, 3, 4}));
}

// Each device's piece is cut into the chunks, and each chunk has buffers of its own. Two devices of
// four tokens, two chunks: chunk 0 is tokens 0 1 4 5, chunk 1 tokens 2 3 6 7. All want device 0.
TEST(ReferenceDrops, ChunksAreSlicesOfEachDevicesPiece) {
  const Ids ids{0, 1, 1, 0, 1, 0, 0, 1};
  const DispatchOptions options{.buffer_factor = 1.5, .token_chunks = 2, .shards = 2};  // B = 3
  const Dispatch result = dispatched(ids, 4, 1, options);
  // chunk 0: e0 0 5 | e1 1 4; chunk 1: e0 3 6 | e1 2 7
  EXPECT_EQ(result.buffer_rows, 3);
  EXPECT_EQ(dropped_slots(result, ids), (Slots{4, 7}));
  EXPECT_EQ(result.dropped_slots, 2);
  EXPECT_EQ(result.largest_drop, 1);
  EXPECT_DOUBLE_EQ(result.required_factor, 2.0);
}

// Groups share nothing: the second group's device 0 has a buffer of its own, and is the one that
// overflows.
TEST(ReferenceDrops, GroupsHaveBuffersOfTheirOwn) {
  const Ids ids{0, 2, 0, 2, 1, 0, 0, 3};
  const DispatchOptions options{.buffer_factor = 1.0, .groups = 2, .shards = 2};  // B = 2
  const Dispatch result = dispatched(ids, 4, 1, options);
  EXPECT_EQ(dropped_slots(result, ids), (Slots{4}));
  EXPECT_EQ(result.dropped_slots, 1);
  EXPECT_DOUBLE_EQ(result.required_factor, 1.5);
}

TEST(ReferenceDrops, TokensThatDoNotDivideAreFilledUpNotSkipped) {
  // Slices of ceil(7 / (2 * 2)) = 2: device 0 holds tokens 0-3, device 1 tokens 4-6 and one of
  // fill.
  const Ids ids{0, 0, 0, 0, 0, 0, 0};
  const DispatchOptions options{.buffer_factor = 1.0, .token_chunks = 2, .shards = 2};
  const Dispatch result = dispatched(ids, 2, 1, options);
  EXPECT_EQ(result.buffer_rows, 2);
  EXPECT_EQ(dropped_slots(result, ids), (Slots{4, 5, 6}));
  EXPECT_EQ(kept_slots(dispatched(ids, 2, 1, {.token_chunks = 5, .shards = 2})).size(), 7U);
  // More devices than tokens: the last ones have none.
  EXPECT_EQ(kept_slots(dispatched({0, 3}, 4, 1, {.shards = 4})).size(), 2U);
}

TEST(ReferenceDrops, NoTokens) {
  const Dispatch result = dispatched({}, 4, 2, {.buffer_factor = 1.0, .shards = 2});
  EXPECT_TRUE(result.kept.empty());
  EXPECT_EQ(result.dropped_slots, 0);
  EXPECT_EQ(result.required_factor, 0);
}

// 65,536 tokens of one gathered chunk over 8 devices, 10 of 512 experts, a buffer of 2.75.
TEST(ReferenceDrops, BufferOfThePublishedRecipe) {
  const std::int64_t tokens = 65536;
  Ids ids(static_cast<std::size_t>(tokens * 10));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int32_t>(i % 512);
  }
  const Dispatch result = dispatched(ids, 512, 10, {.buffer_factor = 2.75, .shards = 8});
  EXPECT_EQ(result.buffer_rows, 225280);
  EXPECT_EQ(result.dropped_slots, 0);
  EXPECT_EQ(result.required_factor, 1.0);
}

Ids random_ids(std::int64_t tokens, std::int64_t experts, std::int64_t top_k, double padding) {
  heddle::test::Random random(4);
  Ids ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const bool skip = random.chance(padding);
    for (std::int64_t k = 0; k < top_k; ++k) {
      // Low experts are the popular ones.
      const std::int64_t id =
          std::min(random.integer(0, experts - 1), random.integer(0, experts - 1));
      ids.push_back(skip ? unrouted : static_cast<std::int32_t>(id));
    }
  }
  return ids;
}

TEST(ReferenceDrops, KeptAndDroppedAreAllRoutedSlots) {
  const Ids ids = random_ids(60, 8, 3, 0.2);
  const auto routed = ids.size() - static_cast<std::size_t>(std::count(ids.begin(), ids.end(), -1));
  for (const Strategy strategy : {Strategy::ring, Strategy::all_to_all}) {
    Slots fewer;
    for (int step = 1; step <= 20; ++step) {
      const Dispatch result = dispatched(ids, 8, 3,
                                         {.buffer_factor = 0.1 * step,
                                          .strategy = strategy,
                                          .token_chunks = 3,
                                          .groups = 2,
                                          .shards = 4});
      const Slots kept = kept_slots(result);
      EXPECT_EQ(kept.size() + static_cast<std::size_t>(result.dropped_slots), routed);
      EXPECT_EQ(dropped_slots(result, ids).size(), static_cast<std::size_t>(result.dropped_slots));
      // A larger buffer only adds rows.
      EXPECT_TRUE(std::includes(kept.begin(), kept.end(), fewer.begin(), fewer.end())) << step;
      EXPECT_EQ(result.has_overflow(), 0.1 * step < result.required_factor) << step;
      fewer = kept;
    }
  }
}

// The number of drops depends on the counts alone, wherever padding lies (spec/moe.md 5).
TEST(ReferenceDrops, PaddingThatIsRoutedDropsRealSlotsFromEitherEnd) {
  // 16 tokens, experts 0, 1 on one device; B = 8 of 16. Padding goes to expert 0, real tokens to 1.
  const auto ids = [](bool padding_first, bool excluded) {
    Ids result(16, 1);
    std::fill_n(padding_first ? result.begin() : result.begin() + 10, 6, excluded ? -1 : 0);
    return result;
  };
  for (const bool first : {true, false}) {
    const Ids routed = ids(first, false);
    const Dispatch with = dispatched(routed, 2, 1, {.buffer_factor = 0.5});
    EXPECT_EQ(with.dropped_slots, 8);
    for (const std::int64_t slot : dropped_slots(with, routed)) {
      EXPECT_EQ(routed[static_cast<std::size_t>(slot)], 1);
    }
    EXPECT_EQ(dispatched(ids(first, true), 2, 1, {.buffer_factor = 0.5}).dropped_slots, 2);
  }
}

TEST(ReferenceDrops, RefusesWrongArguments) {
  const Ids ids{0, 1, 2, 3};
  const auto refusal = [&](const RouterDims& dims, const DispatchOptions& options) {
    return heddle::test::thrown_text<Error>([&] {
      static_cast<void>(dispatch(dims, {ids.data(), 2, 2}, options));
    });
  };
  const RouterDims dims{.tokens = 2, .experts = 4, .top_k = 2};
  EXPECT_EQ(refusal(dims, {.shards = 3}),
            "moe::reference::dispatch: options.shards = 3: must divide dims.experts (4)");
  EXPECT_EQ(refusal(dims, {.buffer_factor = -2.0}),
            "moe::reference::dispatch: options.buffer_factor = -2: must be finite and > 0");
  EXPECT_EQ(refusal({.tokens = 2, .experts = 3, .top_k = 2}, {}),
            "moe::reference::dispatch: expert_ids[3] = 3: must be in [0, 3) or -1");
  EXPECT_EQ(refusal({.tokens = 3, .experts = 4, .top_k = 2}, {}),
            "moe::reference::dispatch: expert_ids.rows = 2: must equal dims.tokens (3)");
  EXPECT_EQ(refusal({.tokens = 2, .experts = 4, .top_k = 0}, {}),
            "moe::reference::dispatch: dims.top_k = 0: must be >= 1");
}

}  // namespace
}  // namespace heddle::moe::reference

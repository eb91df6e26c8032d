#include "heddle/moe/routing_window.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/moe/options.hpp"
#include "heddle/moe/reference_drops.hpp"
#include "moe/routed.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: `<= kept`; drops from the front; a drop not counted, or
// that of the last window only; the first expert of a window off by one; a buffer of 0 taken for none;
// a buffer as long as the slots taken for one; offsets not cut at the buffer's end; rows rounded
// instead of cut.

namespace heddle::moe {
namespace {

using test::Ids;
using test::OwnedMap;
using test::random_ids;
using Offsets = std::vector<std::int64_t>;

const RouterDims worked_dims{.tokens = 5, .experts = 4, .top_k = 2};
const Ids worked_ids{2, 0, -1, -1, 0, 3, 0, 2, 2, 1};

Offsets offsets_of(const RoutingMap& map, const RoutingWindow& window) {
  Offsets offsets(static_cast<std::size_t>(window.experts.count) + 1, -77);
  row_offsets(map, window, offsets);
  return offsets;
}

/// The slots that have a row, in the order of the rows, as row_of says.
Ids slots_by_row(const OwnedMap& owned, const RoutingWindow& window) {
  Ids slots(static_cast<std::size_t>(window.kept), -77);
  for (std::size_t i = 0; i < owned.inverse.size(); ++i) {
    const std::int64_t row = window.row_of(owned.inverse[i]);
    if (row != nowhere) {
      slots.at(static_cast<std::size_t>(row - window.first_row)) = static_cast<std::int32_t>(i);
    }
  }
  return slots;
}

// The worked vector of spec/moe.md 3: two devices of three rows.
TEST(RoutingWindow, WorkedVector) {
  const OwnedMap owned(worked_dims, worked_ids);
  const RoutingWindow low = routing_window(owned.map, {0, 2}, 3);
  EXPECT_EQ(slots_by_row(owned, low), (Ids{1, 4, 6}));
  EXPECT_EQ(low.wanted, 4);
  EXPECT_EQ(low.dropped(), 1);
  EXPECT_EQ(low.rows, 3);
  EXPECT_EQ(low.row_of(owned.inverse[9]), nowhere);
  EXPECT_EQ(offsets_of(owned.map, low), (Offsets{0, 3, 3}));
  const RoutingWindow high = routing_window(owned.map, {2, 2}, 3);
  EXPECT_EQ(slots_by_row(owned, high), (Ids{0, 7, 8}));
  EXPECT_EQ(high.dropped(), 1);
  EXPECT_EQ(offsets_of(owned.map, high), (Offsets{0, 3, 3}));

  DropReport report;
  report.add(low, 6);
  report.add(high, 6);
  EXPECT_EQ(report.dropped_slots, 2);
  EXPECT_EQ(report.largest_drop, 1);
  EXPECT_DOUBLE_EQ(report.required_factor, 4.0 / 6);
  EXPECT_TRUE(report.has_overflow());
}

TEST(RoutingWindow, WithoutABufferRowsArePositions) {
  const OwnedMap owned(worked_dims, worked_ids);
  for (const std::optional<std::int64_t> rows :
       {std::optional<std::int64_t>(), std::optional<std::int64_t>(10),
        std::optional<std::int64_t>(std::numeric_limits<std::int64_t>::max())}) {
    const RoutingWindow window = routing_window(owned.map, {2, 2}, rows);
    EXPECT_EQ(window.rows, 10);
    EXPECT_EQ(window.first_row, 4);
    EXPECT_EQ(window.kept, 4);
    EXPECT_EQ(window.dropped(), 0);
    EXPECT_EQ(slots_by_row(owned, window), (Ids{0, 7, 8, 5}));
    EXPECT_EQ(offsets_of(owned.map, window), (Offsets{4, 7, 8}));
    // Slots routed nowhere have a position behind the window, and no row.
    EXPECT_EQ(window.row_of(owned.inverse[2]), nowhere);
  }
  EXPECT_EQ(routing_window(owned.map, 9).rows, 9) << "one row short of all slots is a buffer";
}

TEST(RoutingWindow, BufferOfNoRowsDropsEverything) {
  const OwnedMap owned(worked_dims, worked_ids);
  const RoutingWindow window = routing_window(owned.map, 0);
  EXPECT_EQ(window.kept, 0);
  EXPECT_EQ(window.dropped(), 8);
  EXPECT_EQ(offsets_of(owned.map, window), (Offsets{0, 0, 0, 0, 0}));
  for (const std::int32_t position : owned.inverse) {
    EXPECT_EQ(window.row_of(position), nowhere);
  }
}

TEST(RoutingWindow, NowhereHasNoRow) {
  const OwnedMap held(worked_dims, worked_ids, {2, 2});
  const RoutingWindow window = routing_window(held.map, 3);
  EXPECT_EQ(window.row_of(nowhere), nowhere);
  EXPECT_EQ(slots_by_row(held, window), (Ids{0, 7, 8}));
  // A window whose first position is 0 must not take -1 for the one before it.
  EXPECT_EQ(window.first_position, 0);
}

// Group sizes of 2, 1, 4 over buffers of every size.
TEST(RoutingWindow, OffsetsAreCutWhereTheBufferEnds) {
  const OwnedMap owned({.tokens = 7, .experts = 3, .top_k = 1}, {2, 0, 2, 1, 2, 0, 2});
  const Offsets whole{0, 2, 3, 7};
  for (std::int64_t rows = 0; rows <= 7; ++rows) {
    Offsets expected = whole;
    for (std::int64_t& offset : expected) {
      offset = std::min(offset, rows);
    }
    EXPECT_EQ(offsets_of(owned.map, routing_window(owned.map, rows)), expected) << rows;
  }
}

// Every device, group and chunk of a ring against the plain drop rule.
TEST(RoutingWindow, AgreesWithTheReferenceDrops) {
  const std::int64_t shards = 4;
  const RouterDims dims{.tokens = 64, .experts = 8, .top_k = 3};
  const Ids ids = random_ids(dims, 6);
  const OwnedMap owned(dims, ids);
  const std::int64_t balanced = dims.slots() / shards;
  for (int step = 1; step <= 30; ++step) {
    const double factor = 0.1 * step;
    const reference::Dispatch expected =
        reference::dispatch(dims, {ids.data(), dims.tokens, dims.top_k},
                            DispatchOptions{.buffer_factor = factor, .shards = shards});
    std::vector<std::uint8_t> kept(ids.size(), 0);
    DropReport report;
    for (std::int64_t shard = 0; shard < shards; ++shard) {
      const RoutingWindow window =
          routing_window(owned.map, {shard * 2, 2}, buffer_rows(balanced, factor));
      EXPECT_EQ(window.rows, expected.buffer_rows);
      DropReport one;
      one.add(window, balanced);
      report.add(one);
      for (std::size_t i = 0; i < ids.size(); ++i) {
        if (window.row_of(owned.inverse[i]) != nowhere) {
          kept[i] = 1;
        }
      }
    }
    EXPECT_EQ(kept, expected.kept) << factor;
    EXPECT_EQ(report.dropped_slots, expected.dropped_slots);
    EXPECT_EQ(report.largest_drop, expected.largest_drop);
    EXPECT_EQ(report.required_factor, expected.required_factor);
    EXPECT_EQ(report.has_overflow(), expected.has_overflow());
  }
}

TEST(RoutingWindow, BufferRowsOfThePublishedRecipe) {
  EXPECT_EQ(buffer_rows(81920, 2.75), 225280);
  EXPECT_EQ(buffer_rows(81920, std::nullopt), std::nullopt);
  EXPECT_EQ(buffer_rows(4, 0.74), 2);
  EXPECT_EQ(buffer_rows(4, 0.24), 0);
  EXPECT_EQ(buffer_rows(0, 2.75), 0);
}

TEST(RoutingWindow, RefusesWrongArguments) {
  const OwnedMap held(worked_dims, worked_ids, {1, 2});
  const auto refusal = [](auto call) { return heddle::test::thrown_text<Error>(call); };
  EXPECT_EQ(refusal([&] { static_cast<void>(routing_window(held.map, -1)); }),
            "moe::routing_window: buffer_rows = -1: must be >= 0");
  EXPECT_EQ(refusal([&] {
              static_cast<void>(routing_window(held.map, {0, 2}));
            }),
            "moe::routing_window: experts.first = 0: must lie, with all of the range, in the map's "
            "experts");
  EXPECT_EQ(refusal([&] {
              static_cast<void>(routing_window(held.map, {2, 3}));
            }),
            "moe::routing_window: experts.end = 5: must be at most dims.experts (4)");
  EXPECT_EQ(refusal([&] {
              Offsets offsets(2);
              row_offsets(held.map, routing_window(held.map), offsets);
            }),
            "moe::row_offsets: offsets.size = 2: must equal window.experts.count + 1 (3)");
  EXPECT_EQ(refusal([] { static_cast<void>(buffer_rows(-1, 1.0)); }),
            "moe::buffer_rows: balanced = -1: must be >= 0");
  for (const auto& [factor, text] :
       {std::pair(std::numeric_limits<double>::quiet_NaN(), "nan"), {0.0, "0"}, {-1.0, "-1"}}) {
    EXPECT_EQ(refusal([&, f = factor] { static_cast<void>(buffer_rows(8, f)); }),
              "moe::buffer_rows: factor = " + std::string(text) + ": must be finite and > 0");
  }
}

}  // namespace
}  // namespace heddle::moe

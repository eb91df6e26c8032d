#include "heddle/packing/row_layout.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "packing/owned_rollout.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: the pad position lost between bin and row (28), or pad_align lost while the
// position passes (29); starts not aligned, or aligned from the row's shift; an item of no token given a
// document (47); an end beyond the budget accepted; the aligned cursor checked instead of the last token;
// the shift left out of the starts or of the table.

namespace heddle::packing {
namespace {

std::vector<test::OwnedRollout> row_a() {
  return {test::plain_item(2, 3), test::plain_item(0, 3), test::plain_item(1, 0)};
}

BinAssignment bins_of(const std::vector<std::vector<std::int32_t>>& lists) {
  BinAssignment bins;
  for (const auto& list : lists) {
    bins.items.insert(bins.items.end(), list.begin(), list.end());
    bins.bin_begin.push_back(static_cast<std::int64_t>(bins.items.size()));
  }
  return bins;
}

TEST(RowLayout, RowAUnderBothPositions) {
  const auto owned = row_a();
  const auto items = test::views(owned);
  PackOptions options{.budget = 24, .segment_align_multiple = 4, .pad_align = 8};
  const SegmentTable end = lay_out_rows(items, bins_of({{0, 1, 2}}), 1, options);
  EXPECT_EQ(end.segments, (std::vector<Segment>{{0, 5, 2, 0}, {8, 3, 0, 1}, {12, 1, 1, 2}}));
  EXPECT_EQ(end.shifts, (std::vector<std::int32_t>{0}));
  options.pad_position = PadPosition::start;
  const SegmentTable start = lay_out_rows(items, bins_of({{0, 1, 2}}), 1, options);
  EXPECT_EQ(start.segments, (std::vector<Segment>{{8, 5, 2, 0}, {16, 3, 0, 1}, {20, 1, 1, 2}}));
  EXPECT_EQ(start.shifts, (std::vector<std::int32_t>{8}));
  options.pad_align = 4;
  EXPECT_EQ(lay_out_rows(items, bins_of({{0, 1, 2}}), 1, options).shifts,
            (std::vector<std::int32_t>{8}));
  options.budget = 25;
  EXPECT_EQ(lay_out_rows(items, bins_of({{0, 1, 2}}), 1, options).shifts,
            (std::vector<std::int32_t>{12}));
}

TEST(RowLayout, RowsOfPaddingFollowTheBinsAndDoNotMove) {
  const auto owned = row_a();
  const PackOptions options{.budget = 24,
                            .segment_align_multiple = 4,
                            .pad_position = PadPosition::start,
                            .pad_align = 8};
  const SegmentTable table = lay_out_rows(test::views(owned), bins_of({{1}, {}, {0}}), 5, options);
  ASSERT_EQ(table.rows(), 5);
  EXPECT_EQ(table.row(0).size(), 1U);
  EXPECT_TRUE(table.row(1).empty());
  EXPECT_EQ(table.row(2).size(), 1U);
  EXPECT_TRUE(table.row(3).empty());
  EXPECT_EQ(table.shifts, (std::vector<std::int32_t>{16, 0, 16, 0, 0}));
}

TEST(RowLayout, EmptyItemsGetNoDocument) {
  const std::vector<test::OwnedRollout> owned{test::plain_item(0, 0), test::plain_item(1, 1),
                                              test::plain_item(0, 0), test::plain_item(1, 0)};
  const SegmentTable table =
      lay_out_rows(test::views(owned), bins_of({{0, 1, 2, 3}}), 1,
                   {.budget = 8, .segment_align_multiple = 4, .max_segments = 2});
  EXPECT_EQ(table.segments, (std::vector<Segment>{{0, 2, 1, 1}, {4, 1, 1, 3}}));
}

TEST(RowLayout, OnlyTheLastTokenMustLieWithinTheBudget) {
  const std::vector<test::OwnedRollout> owned{test::plain_item(0, 6), test::plain_item(0, 2),
                                              test::plain_item(0, 3)};
  const auto items = test::views(owned);
  const PackOptions options{.budget = 10, .segment_align_multiple = 4};
  EXPECT_EQ(lay_out_rows(items, bins_of({{0, 1}}), 1, options).segments.back().end(), 10)
      << "the next aligned start, 12, lies beyond";
  const auto refusal = [&](const std::vector<std::vector<std::int32_t>>& lists, std::int64_t rows,
                           PackOptions with) {
    return test::thrown_text<Error>(
        [&] { static_cast<void>(lay_out_rows(items, bins_of(lists), rows, with)); });
  };
  const std::string where = "packing::lay_out_rows: ";
  EXPECT_EQ(refusal({{2}, {0, 2}}, 2, options),
            where + "bins[1].end = 11: must not exceed options.budget (10)");
  EXPECT_EQ(refusal({{0, 3}}, 1, options),
            where + "bins[0].item = 3: must be the index of an item");
  EXPECT_EQ(refusal({{-1}}, 1, options), where + "bins[0].item = -1: must be the index of an item");
  EXPECT_EQ(refusal({{0}, {1}}, 1, options),
            where + "rows = 1: must be at least the number of bins");
  PackOptions one = options;
  one.max_segments = 1;
  EXPECT_EQ(refusal({{0, 1}}, 1, one),
            where + "bins[0].segments = 2: must not exceed options.max_segments (1)");
  one.pad_position = PadPosition::start;
  one.pad_align = 6;
  EXPECT_EQ(
      refusal({}, 0, one),
      where + "options.pad_align = 6: must be a positive multiple of segment_align_multiple (4)");
}

TEST(RowLayout, ItemsAreRefusedByTheirIndex) {
  const std::vector<test::OwnedRollout> owned{test::plain_item(1, 1), test::plain_item(5, 6)};
  const auto items = test::views(owned);
  EXPECT_EQ(test::thrown_text<Error>([&] { validate("pack", items, PackOptions{.budget = 10}); }),
            "pack: items[1].length = 11: must not exceed options.budget (10)");
  EXPECT_EQ(test::thrown_text<Error>(
                [&] { validate("pack", items, PackOptions{.budget = 11, .max_loss_tokens = 5}); }),
            "pack: items[1].loss_tokens = 6: must not exceed options.max_loss_tokens (5)");
  EXPECT_EQ(test::thrown_text<Error>(
                [&] { validate("pack", items, PackOptions{.budget = 11, .max_loss_tokens = 6}); }),
            "nothing was thrown");
}

}  // namespace
}  // namespace heddle::packing

#include "heddle/packing/segment_table.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

// Mutants that must fail here: offsets that begin at 0 after a shift or end at the budget; a row's segments
// taken from its neighbour; shifts lost in a slice; documents of one token merged.

namespace heddle::packing {
namespace {

// Row A of the specification under start, a row of padding, row B under end.
SegmentTable three_rows() {
  SegmentTable table;
  table.segments = {{.start = 8, .len = 5, .prompt_len = 2, .item_index = 0},
                    {.start = 16, .len = 3, .prompt_len = 0, .item_index = 1},
                    {.start = 20, .len = 1, .prompt_len = 1, .item_index = 2},
                    {.start = 0, .len = 6, .prompt_len = 1, .item_index = 4},
                    {.start = 8, .len = 5, .prompt_len = 2, .item_index = 3}};
  table.row_begin = {0, 3, 3, 5};
  table.shifts = {8, 0, 0};
  return table;
}

TEST(SegmentTable, RowsHoldTheirOwnDocuments) {
  const SegmentTable table = three_rows();
  EXPECT_EQ(table.rows(), 3);
  ASSERT_EQ(table.row(0).size(), 3U);
  EXPECT_EQ(table.row(0)[2].item_index, 2);
  EXPECT_TRUE(table.row(1).empty());
  ASSERT_EQ(table.row(2).size(), 2U);
  EXPECT_EQ(table.row(2)[0].item_index, 4);
  EXPECT_EQ(table.shift(0), 8);
  EXPECT_EQ(SegmentTable{}.rows(), 0);
}

TEST(SegmentTable, UsedPositionsEndAtTheLastToken) {
  const SegmentTable table = three_rows();
  EXPECT_EQ(used_positions(table.row(0)), 21);
  EXPECT_EQ(used_positions(table.row(1)), 0);
  EXPECT_EQ(used_positions(table.row(2)), 13);
  EXPECT_EQ(token_count(table.row(0)), 9);
  EXPECT_EQ(token_count(table.row(1)), 0);
  EXPECT_EQ(token_count(table.row(2)), 11);
}

TEST(SegmentTable, CumulativeOffsetsBeginAtTheFirstDocumentAndEndAtTheLastToken) {
  const SegmentTable table = three_rows();
  EXPECT_EQ(cu_seqlens(table.row(0)), (std::vector<std::int32_t>{8, 16, 20, 21}));
  EXPECT_EQ(cu_seqlens(table.row(1)), (std::vector<std::int32_t>{0}));
  EXPECT_EQ(cu_seqlens(table.row(2)), (std::vector<std::int32_t>{0, 8, 13}));

  const std::vector<Segment> ones{
      {.start = 0, .len = 1}, {.start = 1, .len = 1}, {.start = 2, .len = 1}};
  EXPECT_EQ(cu_seqlens(ones), (std::vector<std::int32_t>{0, 1, 2, 3}));
}

TEST(SegmentTable, SliceIsATableOfItsOwn) {
  const SegmentTable table = three_rows();
  const SegmentTable tail = table.slice({.first = 1, .count = 2});
  EXPECT_EQ(tail.rows(), 2);
  EXPECT_TRUE(tail.row(0).empty());
  ASSERT_EQ(tail.row(1).size(), 2U);
  EXPECT_EQ(tail.row(1)[1], table.row(2)[1]);
  const SegmentTable head = table.slice({.first = 0, .count = 1});
  EXPECT_EQ(head.shifts, (std::vector<std::int32_t>{8}));
  EXPECT_EQ(table.slice({.first = 0, .count = 3}), table);
  EXPECT_EQ(table.slice({.first = 3, .count = 0}), SegmentTable{});
}

}  // namespace
}  // namespace heddle::packing

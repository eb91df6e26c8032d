// Mutants: the later piece of a rank owned by its neighbour; ids local to the shard; a halo that reaches
// over another document; an empty piece that always asks for a state; the last piece's transition asked
// for; the window needed whenever the state is.
#include "heddle/gdn/context_pieces.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "support/thrown_text.hpp"

namespace heddle::gdn {
namespace {

using Ids = std::vector<std::int32_t>;

ContextRow row_of(const Ids& ids, std::int64_t ranks, ContextLayout layout,
                  std::int64_t pieces_per_rank = 0) {
  return {.partition = ContextPartition(layout, static_cast<std::int64_t>(ids.size()), ranks),
          .segment_ids = ids,
          .pieces_per_rank = pieces_per_rank};
}

TEST(GdnContextPieces, WhereEachPieceLies) {
  const Ids ids(32, 1);
  const ContextPieces dual("call", row_of(ids, 4, ContextLayout::dual_chunk_swap), 0, 4, true);
  EXPECT_EQ(dual.count(), 8);
  EXPECT_EQ(dual.length(), 4);
  const std::vector<std::int64_t> owners = {0, 1, 2, 3, 3, 2, 1, 0};
  for (std::int64_t p = 0; p < 8; ++p) {
    EXPECT_EQ(dual.owner(p), owners[static_cast<std::size_t>(p)]) << p;
    EXPECT_EQ(dual.at(dual.owner(p), dual.place(p)), p);
    EXPECT_EQ(dual.crosses(p == 7 ? 6 : p), p != 3) << "the hop in the middle is local";
  }
  const ContextPieces lines("call", row_of(ids, 4, ContextLayout::contiguous, 2), 0, 4, true);
  for (std::int64_t p = 0; p < 8; ++p) {
    EXPECT_EQ(lines.owner(p), p / 2);
    EXPECT_EQ(lines.at(p / 2, p % 2), p);
  }
  EXPECT_FALSE(lines.crosses(2));
  EXPECT_TRUE(lines.crosses(3));
}

TEST(GdnContextPieces, WhatCrossesTheBordersFollowsFromTheIds) {
  //              piece 0     1           2           3           4
  const Ids ids = {5, 5, 5, 5, 5, 5, 5, 5, 0, 0, 0, 0, 5, 7, 7, 7, 8, 8, 8, 0};
  const ContextPieces pieces("call", row_of(ids, 5, ContextLayout::contiguous), 5, 4, false);
  const std::vector<std::int32_t> initial = {5, 5, 5, 5, 7};
  for (std::int64_t p = 0; p < 5; ++p) {
    EXPECT_EQ(pieces.initial_segment(p), initial[static_cast<std::size_t>(p)]) << p;
  }
  EXPECT_TRUE(pieces.empty(2));
  EXPECT_FALSE(pieces.empty(3));
  EXPECT_TRUE(pieces.cuts(3) && pieces.cuts(4));
  EXPECT_FALSE(pieces.cuts(0) || pieces.cuts(1) || pieces.cuts(2));
  // Document 5 is continued in pieces 0 to 3; 8 starts in piece 4; nobody asks for the final state.
  for (std::int64_t p = 0; p < 4; ++p) {
    EXPECT_TRUE(pieces.needs_state(p)) << p;
  }
  EXPECT_FALSE(pieces.needs_state(4) || pieces.needs_state(5));
  // Piece 3 continues, but the three positions before it are padding: its window is empty.
  EXPECT_FALSE(pieces.needs_window(0) || pieces.needs_window(2) || pieces.needs_window(3) ||
               pieces.needs_window(4));
  EXPECT_TRUE(pieces.needs_window(1));
  EXPECT_TRUE(pieces.maps_state(0) && pieces.maps_state(1));
  EXPECT_FALSE(pieces.maps_state(2) || pieces.maps_state(3) || pieces.maps_state(4));
  EXPECT_TRUE(pieces.needs_transition(1));
  EXPECT_FALSE(pieces.needs_transition(0) || pieces.needs_transition(2) ||
               pieces.needs_transition(3) || pieces.needs_transition(4));
  EXPECT_TRUE(pieces.maps_cotangent(1) && pieces.maps_cotangent(3));
  EXPECT_FALSE(pieces.maps_cotangent(0) || pieces.maps_cotangent(2) || pieces.maps_cotangent(4));
  EXPECT_TRUE(pieces.state_crosses());
  EXPECT_EQ(pieces.final_window_piece(), 4);
}

TEST(GdnContextPieces, AHaloIsOfTheDocumentThatGoesOn) {
  const auto valid = [](const Ids& ids) {
    const ContextPieces pieces("call", row_of(ids, 2, ContextLayout::contiguous), 0, 4, true);
    std::vector<std::uint8_t> halo(3, 9);
    pieces.fill_halo_valid(1, halo);
    return halo;
  };
  EXPECT_EQ(valid({1, 1, 1, 1, 1, 1, 1, 1}), (std::vector<std::uint8_t>{1, 1, 1}));
  EXPECT_EQ(valid({1, 1, 2, 2, 2, 2, 2, 2}), (std::vector<std::uint8_t>{0, 1, 1}));
  EXPECT_EQ(valid({1, 1, 0, 1, 1, 1, 1, 1}), (std::vector<std::uint8_t>{1, 0, 1}));
  // The first 2 is no part of the second one, whatever its id.
  EXPECT_EQ(valid({1, 2, 1, 2, 2, 2, 2, 2}), (std::vector<std::uint8_t>{0, 0, 1}));
}

TEST(GdnContextPieces, RefusesWhatCannotBeCut) {
  const auto refusal = [](const Ids& ids, const ContextRow& row) {
    return heddle::test::thrown_text<Error>([&] {
      const ContextPieces pieces("call", row, 0, 4, true);
      (void)ids;
    });
  };
  const Ids ids(16, 1);
  EXPECT_EQ(refusal(ids, row_of(ids, 2, ContextLayout::contiguous)), "nothing was thrown");
  EXPECT_EQ(refusal(ids, row_of(ids, 2, ContextLayout::contiguous, 3)),
            "call: row.pieces_per_rank = 3: must divide the tokens of a rank (8)");
  EXPECT_EQ(refusal(ids, row_of(ids, 2, ContextLayout::dual_chunk_swap, 1)),
            "call: row.pieces_per_rank = 1: must be 2 in dual_chunk_swap order, or 0");
  EXPECT_EQ(
      refusal(ids, row_of(ids, 4, ContextLayout::dual_chunk_swap)),
      "call: row.partition.positions = 16: pieces of 2 tokens are shorter than dims.kernel - 1 "
      "(3)");
  Ids negative = ids;
  negative[7] = -1;
  EXPECT_EQ(refusal(negative, row_of(negative, 2, ContextLayout::contiguous)),
            "call: row.segment_ids[7] = -1: must be >= 0");
}

}  // namespace
}  // namespace heddle::gdn

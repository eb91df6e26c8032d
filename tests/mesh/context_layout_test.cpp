// Mutants tried: Transformer Engine's chunk order; inverse = forward; back chunk before front chunk;
// striped without the shard; divisibility by ranks alone under dual_chunk_swap.
#include "heddle/mesh/context_layout.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace heddle {
namespace {

using Positions = std::vector<std::int64_t>;

TEST(ContextLayout, DualChunkSwapOnTwoRanks) {
  const ContextPartition partition(ContextLayout::dual_chunk_swap, 8, 2);
  EXPECT_EQ(partition.permutation(), (Positions{0, 1, 6, 7, 2, 3, 4, 5}));
  EXPECT_EQ(partition.inverse(), (Positions{0, 1, 4, 5, 6, 7, 2, 3}));
}

TEST(ContextLayout, DualChunkSwapOnFourRanksPairsEnds) {
  const ContextPartition partition(ContextLayout::dual_chunk_swap, 16, 4);
  EXPECT_EQ(partition.permutation(),
            (Positions{0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9}));
}

TEST(ContextLayout, StripedDealsPositionsRound) {
  const ContextPartition partition(ContextLayout::striped, 6, 3);
  EXPECT_EQ(partition.permutation(), (Positions{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(partition.rank_of(4), 1);
}

TEST(ContextLayout, PermutationAndInverseUndoEachOther) {
  for (const ContextLayout layout :
       {ContextLayout::contiguous, ContextLayout::dual_chunk_swap, ContextLayout::striped}) {
    for (std::int64_t ranks = 1; ranks <= 17; ++ranks) {
      for (const std::int64_t chunk : {0, 1, 3}) {
        const ContextPartition partition(layout, 2 * ranks * chunk, ranks);
        for (std::int64_t position = 0; position < partition.positions(); ++position) {
          const std::int64_t slot = partition.destination(position);
          ASSERT_GE(slot, 0);
          ASSERT_LT(slot, partition.positions());
          ASSERT_EQ(partition.source(slot), position);
          ASSERT_EQ(partition.rank_of(position), slot / partition.shard());
        }
      }
    }
  }
}

TEST(ContextLayout, OneRankIsTheIdentityAndNeedsNoEvenLength) {
  for (const ContextLayout layout :
       {ContextLayout::contiguous, ContextLayout::dual_chunk_swap, ContextLayout::striped}) {
    const ContextPartition partition(layout, 5, 1);
    EXPECT_EQ(partition.permutation(), (Positions{0, 1, 2, 3, 4}));
    EXPECT_EQ(partition.chunk(), 5);
  }
}

std::string refusal(ContextLayout layout, std::int64_t positions, std::int64_t ranks,
                    LayoutCheck check = LayoutCheck::exact) {
  try {
    const ContextPartition partition(layout, positions, ranks, check);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ContextLayout, RefusesWhatDoesNotDivide) {
  EXPECT_EQ(refusal(ContextLayout::dual_chunk_swap, 12, 4),
            "ContextPartition: positions = 12: must be a multiple of 2 * context (8)");
  EXPECT_EQ(refusal(ContextLayout::contiguous, 12, 5),
            "ContextPartition: positions = 12: must be a multiple of context (5)");
  EXPECT_EQ(refusal(ContextLayout::striped, 12, 4), "accepted");
  EXPECT_EQ(refusal(ContextLayout::striped, -4, 4),
            "ContextPartition: positions = -4: must be >= 0");
  EXPECT_EQ(refusal(ContextLayout::striped, 4, 0),
            "ContextPartition: ranks = 0: must be in [1, 2^31 - 1]");
  EXPECT_EQ(refusal(static_cast<ContextLayout>(7), 4, 1),
            "ContextPartition: layout = 7: must be contiguous, dual_chunk_swap or striped");
}

TEST(ContextLayout, OddRankCountsAreLegalUnlessStrict) {
  EXPECT_EQ(refusal(ContextLayout::dual_chunk_swap, 12, 3), "accepted");
  EXPECT_EQ(refusal(ContextLayout::dual_chunk_swap, 12, 3, LayoutCheck::strict),
            "ContextPartition: ranks = 3: strict dual_chunk_swap needs an even number");
  EXPECT_EQ(refusal(ContextLayout::dual_chunk_swap, 12, 1, LayoutCheck::strict), "accepted");
}

}  // namespace
}  // namespace heddle

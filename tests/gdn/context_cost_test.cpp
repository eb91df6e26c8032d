// Mutants: borders within a rank counted; the backward's borders the forward's way round; a gather that
// counts the own maps; the transition of the first piece counted.
#include "heddle/gdn/context_cost.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/gdn/chunked_cost.hpp"

namespace heddle::gdn {
namespace {

/// The benchmark model's layer on one of four context ranks, bf16 activations.
const Dims dims{.tokens = 16384,
                .key_heads = 16,
                .value_heads = 64,
                .key_dim = 128,
                .value_dim = 128,
                .kernel = 4};
constexpr std::int64_t state_bytes = std::int64_t{64} * 128 * 128 * 4;
constexpr std::int64_t window_bytes = std::int64_t{3} * 12288 * 2;

class GdnContextCost : public ::testing::Test {
 protected:
  [[nodiscard]] ContextPieces pieces(ContextLayout layout) const {
    return {"call",
            {.partition = ContextPartition(layout, 65536, 4), .segment_ids = ids_},
            1,
            4,
            false};
  }

 private:
  std::vector<std::int32_t> ids_ = std::vector<std::int32_t>(65536, 1);
};

TEST_F(GdnContextCost, AStateTravelsOverEachBorderBetweenRanks) {
  const ContextPieces line = pieces(ContextLayout::contiguous);
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    const auto there = context_forward_traffic<bfloat16>(dims, line, rank, StateExchange::chain);
    EXPECT_EQ(there.states, rank == 0 ? 0 : state_bytes);
    EXPECT_EQ(there.windows, rank == 0 ? 0 : window_bytes);
    const auto back = context_backward_traffic<float>(dims, line, rank, StateExchange::chain, 0);
    EXPECT_EQ(back.states, rank == 3 ? 0 : state_bytes);
    EXPECT_EQ(back.windows, rank == 3 ? 0 : 2 * window_bytes) << "in f32";
    EXPECT_EQ(back.parameters, 0);
    EXPECT_EQ(back.total(), back.states + back.windows);
  }
}

TEST_F(GdnContextCost, DualChunksTravelForthAndBackButForTheHopInTheMiddle) {
  const ContextPieces dual = pieces(ContextLayout::dual_chunk_swap);
  std::int64_t states = 0;
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    const auto there = context_forward_traffic<bfloat16>(dims, dual, rank, StateExchange::chain);
    states += there.states;
    // Ranks 1 and 2 are entered from both sides, 0 and 3 from one.
    EXPECT_EQ(there.states, (rank == 0 || rank == 3 ? 1 : 2) * state_bytes) << rank;
  }
  EXPECT_EQ(states, 6 * state_bytes);
}

TEST_F(GdnContextCost, AGatherBringsTheOthersStatesAndTransitions) {
  const ContextPieces dual = pieces(ContextLayout::dual_chunk_swap);
  const auto gather = context_forward_traffic<bfloat16>(dims, dual, 2, StateExchange::gather);
  EXPECT_EQ(gather.states, 3 * 2 * 2 * state_bytes) << "3 ranks, 2 pieces, S and M";
}

TEST_F(GdnContextCost, WorkIsThatOfThePassesTheIdsAskFor) {
  const ContextPieces line = pieces(ContextLayout::contiguous);
  const ChunkOptions chunks;
  const auto flops = [&](std::int64_t rank) {
    return context_forward_cost<bfloat16, bfloat16, float, bfloat16>(dims, line, rank, chunks)
        .flops;
  };
  const std::int64_t layer =
      layer_forward_cost<bfloat16, bfloat16, float, bfloat16>(dims, chunks).flops;
  const std::int64_t conv = std::int64_t{8} * 16384 * 12288;
  const std::int64_t states = chunked_states_cost<bfloat16, float>(dims, chunks).flops + conv;
  const std::int64_t transition = transitions_cost<bfloat16, float>(dims, chunks).flops +
                                  std::int64_t{2} * 64 * 128 * 128 * 128;
  EXPECT_EQ(flops(0), layer + states) << "it knows the state before it";
  EXPECT_EQ(flops(1), layer + states + transition);
  EXPECT_EQ(flops(3), layer) << "nobody asks for the state behind it";
}

}  // namespace
}  // namespace heddle::gdn

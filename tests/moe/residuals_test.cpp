#include "heddle/moe/residuals.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

namespace heddle::moe {
namespace {

using heddle::test::thrown_text;

const Dims dims = {
    .tokens = 10, .hidden = 4, .experts = 3, .top_k = 2, .expert_hidden = 5, .shared_hidden = 6};

TEST(ChunkPlan, LastChunksAreShortOrEmpty) {
  const ChunkPlan plan(dims.router(), {.token_chunks = 4});
  EXPECT_EQ(plan.slice, 3);
  EXPECT_EQ(plan.balanced, 6);
  EXPECT_EQ(plan.chunk_rows, 6);
  EXPECT_FALSE(plan.buffer_rows);
  std::int64_t next = 0;
  for (const std::int64_t count : {3, 3, 3, 1}) {
    const std::int64_t chunk = next / 3;
    EXPECT_EQ(plan.first(chunk), next);
    EXPECT_EQ(plan.count(chunk), count);
    next += count;
  }
  const ChunkPlan many(dims.router(), {.token_chunks = 7});  // slices of 2: two are empty
  EXPECT_EQ(many.count(4), 2);
  EXPECT_EQ(many.count(5), 0);
  EXPECT_EQ(many.first(6), 10);
  EXPECT_EQ(many.count(6), 0);
  const ChunkPlan none({.tokens = 0, .experts = 3, .top_k = 2}, {.token_chunks = 2});
  EXPECT_EQ(none.count(0), 0);
  EXPECT_EQ(none.chunk_rows, 0);
}

TEST(ChunkPlan, ABufferIsOfOneChunk) {
  const ChunkPlan small(dims.router(), {.buffer_factor = 0.55, .token_chunks = 4});
  EXPECT_EQ(small.buffer_rows, 3);  // 6 * .55, truncated
  EXPECT_EQ(small.chunk_rows, 3);
  const ChunkPlan large(dims.router(), {.buffer_factor = 2.75, .token_chunks = 4});
  EXPECT_EQ(large.buffer_rows, 16);
  EXPECT_EQ(large.chunk_rows, 6);  // it is none
  // The model's own: 2.75 times a balanced shard's 81,920 rows.
  const ChunkPlan model({.tokens = 16'384, .experts = 512, .top_k = 10},
                        {.buffer_factor = 2.75, .token_chunks = 2});
  EXPECT_EQ(model.balanced, 81'920);
  EXPECT_EQ(model.buffer_rows, 225'280);
  EXPECT_EQ(model.chunk_rows, 81'920);
}

TEST(Residuals, AreAsLargeAsStated) {
  for (const DispatchOptions& options :
       {DispatchOptions{}, DispatchOptions{.buffer_factor = 0.5, .token_chunks = 3}}) {
    Workspace memory;
    const Residuals<bfloat16> kept = take_residuals<bfloat16>(dims, options, memory);
    EXPECT_TRUE(kept.wanted());
    EXPECT_EQ(memory.high_water_bytes(), residual_bytes<bfloat16>(dims, options));
    const ChunkPlan plan(dims.router(), options);
    EXPECT_EQ(kept.gate_up.rows(), plan.chunks * plan.chunk_rows);
    EXPECT_EQ(kept.gate_up.cols(), 10);
    EXPECT_EQ(kept.shared_gate_up.cols(), 12);
    EXPECT_EQ(kept.shared_weights.size(), 10U);
  }
  EXPECT_FALSE(Residuals<float>{}.wanted());
}

TEST(Residuals, MapsOfChunksLieOneBehindTheOther) {
  const DispatchOptions options = {.token_chunks = 4};
  const ChunkPlan plan(dims.router(), options);
  Workspace memory;
  const Residuals<float> kept = take_residuals<float>(dims, options, memory);
  for (std::int64_t chunk = 0; chunk < 4; ++chunk) {
    const RoutingMap map = kept.map(dims, plan, chunk);
    EXPECT_EQ(map.dims.tokens, plan.count(chunk));
    EXPECT_EQ(map.permutation.data(), kept.permutation.data() + 6 * chunk);
    EXPECT_EQ(map.inverse.data(), kept.inverse.data() + 6 * chunk);
    EXPECT_EQ(map.inverse.size(), static_cast<std::size_t>(2 * plan.count(chunk)));
    EXPECT_EQ(map.group_offsets.data(), kept.group_offsets.data() + 4 * chunk);
    EXPECT_EQ(map.group_offsets.size(), 4U);
  }
}

TEST(Residuals, NameWhatTheyRefuse) {
  EXPECT_EQ(thrown_text<Error>(
                [] { static_cast<void>(residual_bytes<float>(dims, {.token_chunks = 0})); }),
            "moe::residual_bytes: options.token_chunks = 0: must be >= 1");
  Workspace memory;
  Dims other = dims;
  other.top_k = 4;
  EXPECT_EQ(
      thrown_text<Error>([&] { static_cast<void>(take_residuals<float>(other, {}, memory)); }),
      "moe::take_residuals: dims.top_k = 4: must be at most dims.experts (3)");
}

}  // namespace
}  // namespace heddle::moe

#include "heddle/moe/sharded_layer.hpp"

#include <cstdint>
#include <optional>

#include <gtest/gtest.h>

#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/topology.hpp"
#include "support/thrown_text.hpp"

namespace heddle::moe {
namespace {

using heddle::test::thrown_text;

constexpr Dims benchmark{
    .tokens = 16384, .hidden = 4096, .experts = 512, .top_k = 10, .expert_hidden = 1024};

ShardedOptions options_of(std::int64_t chunks, std::optional<double> factor) {
  ShardedOptions options;
  options.layer.dispatch.token_chunks = chunks;
  options.layer.dispatch.buffer_factor = factor;
  return options;
}

TEST(ShardedLayer, ShardsOfTheBenchmark) {
  const Topology mesh({.fsdp = 32, .context = 4, .expert = 2});
  const LayerShards shards = layer_shards("test", mesh, 11, benchmark, options_of(2, 2.75));
  EXPECT_EQ(shards.members, 8);
  EXPECT_EQ(shards.index, 3);  // context major
  EXPECT_EQ(shards.experts, (ExpertRange{192, 64}));
  EXPECT_EQ(shards.expert_parts, 32);
  EXPECT_EQ(shards.dense_parts, 32);
  EXPECT_EQ(shards.copies, 8);
  EXPECT_EQ(shards.balanced, 81920);
  EXPECT_EQ(shards.buffer_rows, 225280);
  EXPECT_EQ(shards.chunk_rows, 225280);
  EXPECT_EQ(layer_shards("test", mesh, 11, benchmark, options_of(2, {})).chunk_rows, 655360);
}

TEST(ShardedLayer, ExpertAxisAlone) {
  ShardedOptions options = options_of(1, {});
  options.rules = {.experts = ExpertRule::ep_own, .dense = DenseShard::all};
  const Topology mesh({.fsdp = 2, .context = 4, .expert = 2});
  const Dims dims{.tokens = 7, .hidden = 32, .experts = 6, .top_k = 5, .expert_hidden = 3};
  const LayerShards shards = layer_shards("test", mesh, 3, dims, options);
  EXPECT_EQ(shards.members, 2);
  EXPECT_EQ(shards.experts, (ExpertRange{3, 3}));
  EXPECT_EQ(shards.expert_parts, 8);
  EXPECT_EQ(shards.dense_parts, 16);
  EXPECT_EQ(shards.copies, 1);
  EXPECT_EQ(shards.chunk_rows, 2 * 7 * 3);  // a token has at most three experts there
  EXPECT_EQ(shards.reported_buffer_rows(dims.top_k), 70);
}

TEST(ShardedLayer, ShortAndEmptyChunks) {
  Dims dims = benchmark;
  dims.tokens = 7;
  const LayerShards shards =
      layer_shards("test", Topology({.expert = 2}), 0, dims, options_of(5, {}));
  EXPECT_EQ(shards.slice, 2);
  std::int64_t total = 0;
  for (std::int64_t chunk = 0; chunk < 5; ++chunk) {
    EXPECT_EQ(shards.first(chunk), total);
    total += shards.count(chunk);
  }
  EXPECT_EQ(total, 7);
  EXPECT_EQ(shards.count(3), 1);
  EXPECT_EQ(shards.count(4), 0);
}

TEST(ShardedLayer, ReplayFitsTheBufferThatOverflowed) {
  const Topology mesh({.fsdp = 32, .context = 4, .expert = 2});
  const DispatchOptions replay = replay_dispatch(mesh, benchmark, options_of(2, 2.75));
  EXPECT_EQ(replay.token_chunks, 8);  // of 16,384 gathered tokens, at most 163,840 rows
  EXPECT_FALSE(replay.buffer_factor);
  EXPECT_EQ(replay_dispatch(mesh, benchmark, options_of(2, {})).token_chunks, 2);
  // No buffer holds a token's rows on all devices: one token a chunk is the most there can be.
  EXPECT_GE(replay_dispatch(mesh, benchmark, options_of(1, 1e-9)).token_chunks, 16384);
}

TEST(ShardedLayer, Refusals) {
  const Topology mesh({.fsdp = 3, .context = 2});
  const auto text = [&](const Dims& dims, const ShardedOptions& options) {
    return thrown_text<Error>(
        [&] { static_cast<void>(layer_shards("here", mesh, 0, dims, options)); });
  };
  EXPECT_EQ(text(benchmark, {}),
            "mesh: hidden of the experts = 4096: is not divisible by fsdp=3 (= 3), remainder 1; "
            "nearest: 4095, 4098");
  Dims dims = benchmark;
  dims.hidden = 6;
  dims.tokens = 200000000;
  EXPECT_EQ(text(dims, {}),
            "here: dims.tokens = 400000000: tokens * top_k must be at most 2147483647");
  dims.tokens = 4;
  ShardedOptions options;
  options.layer.dispatch.groups = 2;
  EXPECT_EQ(text(dims, options),
            "here: options.layer.dispatch.groups = 2: must be 1 or that of the mesh (3)");
  options = {};
  options.schedule = ChunkSchedule(7);
  EXPECT_EQ(text(dims, options), "here: options.schedule = 7: must be plain or pipelined");
}

}  // namespace
}  // namespace heddle::moe

#include "heddle/moe/sharded_cost.hpp"

#include <cstdint>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/scalar.hpp"
#include "heddle/mesh/topology.hpp"
#include "support/thrown_text.hpp"

// That ledgers are what is foretold here, ring_test.cpp and all_to_all_test.cpp see on small meshes.

namespace heddle::moe {
namespace {

// The table of the specification, of one device of 32x4x2.
TEST(ShardedCost, MessagesOfTheBenchmark) {
  const Dims dims{
      .tokens = 16384, .hidden = 4096, .experts = 512, .top_k = 10, .expert_hidden = 1024};
  ShardedOptions options;
  options.layer.dispatch = {.buffer_factor = 2.75, .token_chunks = 2};
  const Topology mesh({.fsdp = 32, .context = 4, .expert = 2});
  const auto messages = ring_messages<bfloat16, float>(mesh, 11, dims, options);
  const auto find = [&](std::string_view label, LayerPass pass) {
    Traffic sum;
    for (const LayerMessage& message : messages) {
      if (message.label == label && message.pass == pass) {
        sum.payload_bytes += message.bytes.payload_bytes;
        sum.wire_bytes += message.bytes.wire_bytes;
      }
    }
    return sum;
  };
  constexpr std::int64_t mib = 1 << 20;
  EXPECT_EQ(find("moe.ring.routing", LayerPass::forward).payload_bytes, 1310720);
  EXPECT_EQ(find("moe.ring.routing", LayerPass::forward).wire_bytes, 9175040);
  EXPECT_EQ(find("moe.ring.gather", LayerPass::forward).payload_bytes, 128 * mib);
  EXPECT_EQ(find("moe.ring.gather", LayerPass::forward).wire_bytes, 896 * mib);
  EXPECT_EQ(find("moe.ring.sum", LayerPass::forward).wire_bytes, 896 * mib);
  EXPECT_EQ(find("moe.ring.d_expert_weights", LayerPass::backward).payload_bytes, 8 * 655360);
  EXPECT_EQ(find("moe.expert_weights", LayerPass::forward).payload_bytes, 50331648);
  EXPECT_EQ(find("moe.expert_weights", LayerPass::forward).wire_bytes, 1560281088);
}

// Balanced routing sends each device of the group an eighth of the slots.
TEST(ShardedCost, RowsOfTheBenchmarkByAllToAll) {
  const Dims dims{
      .tokens = 16384, .hidden = 4096, .experts = 512, .top_k = 10, .expert_hidden = 1024};
  ShardedOptions options;
  options.layer.dispatch.strategy = Strategy::all_to_all;
  options.layer.dispatch.token_chunks = 2;
  const Topology mesh({.fsdp = 32, .context = 4, .expert = 2});
  const ExchangedRows chunk{.sent = 81920, .arrived = 81920, .staying = 10240};
  const std::vector<ExchangedRows> rows = {chunk, chunk};
  const auto messages = all_to_all_messages<bfloat16, float>(mesh, 11, dims, options, rows);
  constexpr std::int64_t mib = 1 << 20;
  std::int64_t payload = 0;
  std::int64_t wire = 0;
  for (const LayerMessage& message : messages) {
    if (message.label == "moe.all_to_all.dispatch" && message.pass == LayerPass::forward) {
      payload += message.bytes.payload_bytes;
      wire += message.bytes.wire_bytes;
    }
  }
  EXPECT_EQ(payload, 1280 * mib);
  EXPECT_EQ(wire, 1120 * mib);
  EXPECT_EQ(heddle::test::thrown_text<Error>([&] {
              static_cast<void>(all_to_all_messages<bfloat16, float>(
                  mesh, 11, dims, options, std::vector<ExchangedRows>(3)));
            }),
            "moe::all_to_all_messages: rows.size = 3: must equal token_chunks (2)");
}

TEST(ShardedCost, WhatIsNotWantedIsNotSent) {
  const Dims dims{
      .tokens = 4, .hidden = 8, .experts = 4, .top_k = 2, .expert_hidden = 3, .shared_hidden = 5};
  const Topology mesh({.fsdp = 2, .context = 2});
  const auto fsdp = [&](const WantedCotangents& wanted, RouterTraining training) {
    ShardedOptions options;
    options.layer.router_training = training;
    return bytes_along(ring_messages<float>(mesh, 1, dims, options, wanted), {Axis::fsdp},
                       LayerPass::backward);
  };
  // Halves of router [8,4], shared wi [8,10], wo [5,8], gate [8,1] and two experts of 8*6 and 3*8.
  const std::int64_t gathered = 4 * (16 + 40 + 20 + 4 + 48 + 24);
  const auto all = fsdp({}, RouterTraining::trained);
  EXPECT_EQ(all, 2 * gathered);
  EXPECT_EQ(fsdp({}, RouterTraining::frozen), all - 4 * 16);
  EXPECT_EQ(fsdp({.wi = false}, RouterTraining::trained), all - 4 * 48);
  EXPECT_EQ(fsdp({false, false, false, false, false, false}, RouterTraining::trained), gathered);
}

}  // namespace
}  // namespace heddle::moe

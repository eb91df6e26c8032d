#include "heddle/moe/all_to_all.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/moe/ring.hpp"
#include "heddle/moe/sharded_cost.hpp"
#include "moe/layer_run.hpp"
#include "moe/problem.hpp"
#include "moe/sharded_calls.hpp"
#include "moe/sharded_run.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/thrown_text.hpp"

namespace heddle::moe {
namespace {

using heddle::test::close;
using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;
using test::AllToAll;
using test::choice_of;
using test::expect_messages;
using test::meshes;
using test::plain;
using test::Problem;
using test::random_problem;
using test::Ring;
using test::run_sharded;
using test::shared;

template <class S, class R = S>
Problem<S, R> sent_problem(const Dims& dims, std::uint64_t seed) {
  auto p = random_problem<S, R>(dims, seed);
  p.options.dispatch.strategy = Strategy::all_to_all;
  return p;
}

TEST(AllToAll, LikeOneDeviceOnEveryMesh) {
  for (const MeshAxes& axes : meshes()) {
    const auto f = sent_problem<float>(shared, 1);
    test::expect_like_reference<AllToAll>(f, axes, choice_of(f), 1e-5);
    const auto d = sent_problem<double>(plain, 2);
    test::expect_like_reference<AllToAll>(d, axes, choice_of(d), 1e-13);
  }
}

TEST(AllToAll, LikeOneDeviceInBf16) {
  const auto p = sent_problem<bfloat16, float>(shared, 3);
  test::expect_like_reference<AllToAll>(p, meshes()[1], choice_of(p), 2e-2);
}

// Unlike a ring's, whose parts are rounded device by device, these outputs do not know the mesh.
TEST(AllToAll, OutputsHaveTheBitsOfOneDevice) {
  auto p = sent_problem<bfloat16, float>(shared, 4);
  p.options.dispatch.token_chunks = 2;
  auto alone = p;
  alone.options.dispatch.strategy = Strategy::ring;
  test::LayerRun<bfloat16, float> layer(alone);
  const auto expected = layer.forward().out;
  for (const MeshAxes& axes : {meshes()[1], meshes()[4]}) {
    const auto run = run_sharded<AllToAll>(p, axes, choice_of(p));
    EXPECT_TRUE(same_bits(run.forward.out, expected)) << to_string(axes);
  }
}

// Rows of an expert stand in the same order, so what sums over rows has the same bits.
TEST(AllToAll, EqualToTheRingWithoutDrops) {
  for (const MeshAxes& axes : {meshes()[1], meshes()[2]}) {
    auto p = sent_problem<float>(shared, 5);
    p.options.dispatch.token_chunks = 3;
    const auto sent = run_sharded<AllToAll>(p, axes, choice_of(p));
    p.options.dispatch.strategy = Strategy::ring;
    const auto ring = run_sharded<Ring>(p, axes, choice_of(p));
    EXPECT_TRUE(close(sent.forward.out, ring.forward.out, 1e-5));
    EXPECT_TRUE(same_bits(sent.gradients.d_wi, ring.gradients.d_wi));
    EXPECT_TRUE(same_bits(sent.gradients.d_wo, ring.gradients.d_wo));
    test::for_each_gradient(sent.gradients, ring.gradients,
                            [](const char* name, const auto& a, const auto& e) {
                              EXPECT_TRUE(close(a, e, 1e-5)) << name;
                            });
  }
}

// Full buffers drop the last sources: other slots than the ring drops.
TEST(AllToAll, BuffersOfEverySize) {
  for (const double factor : {0.001, 0.5, 1.0, 1.5, 100.0}) {
    auto p = sent_problem<float>(plain, 10);
    p.options.dispatch.buffer_factor = factor;
    p.options.dispatch.token_chunks = 2;
    for (const MeshAxes& axes : {meshes()[1], meshes()[4]}) {
      test::expect_like_reference<AllToAll>(p, axes, choice_of(p), 1e-5);
    }
  }
}

TEST(AllToAll, LikeOneDeviceInEveryOption) {
  auto p = sent_problem<float>(plain, 6);
  p.segment_ids.assign(static_cast<std::size_t>(p.dims.tokens), 1);
  for (const std::int64_t t : {0, 1, 5, 6, 7, 29, 47}) {
    p.segment_ids[static_cast<std::size_t>(t)] = 0;
    std::fill_n(p.hidden.begin() + t * p.dims.hidden, p.dims.hidden, poison<float>());
    std::fill_n(p.d_out.begin() + t * p.dims.hidden, p.dims.hidden, poison<float>());
  }
  Random random(77);
  for (std::int64_t i = 0; i < p.dims.slots(); ++i) {
    p.forced_ids.push_back(static_cast<std::int32_t>(random.integer(-1, p.dims.experts - 1)));
  }
  p.options.dispatch.buffer_factor = 0.8;
  p.options.dispatch.token_chunks = 3;
  p.options.weight_grad_from = WeightGradFrom::wo_output;
  p.options.router.weights = TopKWeights::softmax_of_all;
  test::expect_like_reference<AllToAll>(p, meshes()[1], choice_of(p), 1e-5);
  p.options.router_training = RouterTraining::frozen;
  auto choice = choice_of(p);
  choice.options.rules = {.experts = ExpertRule::ep_own, .dense = DenseShard::all};
  test::expect_like_reference<AllToAll>(p, meshes()[1], choice, 1e-5);
}

TEST(AllToAll, OneDeviceMayReceiveEverything) {
  auto p = sent_problem<float>(plain, 9);
  for (std::int64_t t = 0; t < p.dims.tokens; ++t) {
    p.forced_ids.insert(p.forced_ids.end(), {6, 4, 7});
  }
  test::expect_like_reference<AllToAll>(p, {.fsdp = 2, .expert = 2}, choice_of(p), 1e-5);
  p.options.dispatch.buffer_factor = 1.0;
  test::expect_like_reference<AllToAll>(p, {.fsdp = 2, .expert = 2}, choice_of(p), 1e-5);
}

TEST(AllToAll, NoThreadOrResidualChangesABit) {
  auto p = sent_problem<float>(shared, 7);
  p.options.dispatch.buffer_factor = 1.2;
  p.options.dispatch.token_chunks = 4;  // 2, 2, 2 and nothing
  auto choice = choice_of(p);
  choice.mesh = {.tokens = 1, .workers = 1};
  const auto one = run_sharded<AllToAll>(p, meshes()[1], choice);
  EXPECT_EQ(one.maps_built, 8);  // of what leaves and of what arrives, none in the backward
  choice.mesh = {.tokens = 4, .workers = 2};
  test::expect_same_bits(one, run_sharded<AllToAll>(p, meshes()[1], choice));
  choice.with_residuals = false;
  choice.backward = false;
  EXPECT_TRUE(
      same_bits(one.forward.out, run_sharded<AllToAll>(p, meshes()[1], choice).forward.out));
}

TEST(AllToAll, LedgerIsTheFormula) {
  auto p = sent_problem<bfloat16, float>(shared, 14);
  p.options.dispatch.buffer_factor = 1.1;
  p.options.dispatch.token_chunks = 2;
  for (const MeshAxes& axes : {meshes()[1], meshes()[4]}) {
    const auto choice = choice_of(p);
    const Topology mesh(axes);
    Dims own = p.dims;
    own.tokens /= mesh.devices();
    const LayerShards shards = layer_shards("test", mesh, 0, own, choice.options);
    const auto run = run_sharded<AllToAll>(p, axes, choice);
    // From the ids alone: slots a source, chunk and destination, cut where the buffer is full.
    const std::int64_t members = shards.members;
    const auto rows = [&](std::int64_t group, std::int64_t chunk, std::int64_t source,
                          std::int64_t destination) {
      std::int64_t before = 0;
      std::int64_t wanted = 0;
      for (std::int64_t s = 0; s <= source; ++s) {
        before += wanted;
        wanted = 0;
        const std::int64_t first = (group * members + s) * own.tokens + shards.first(chunk);
        for (std::int64_t i = first * own.top_k; i < (first + shards.count(chunk)) * own.top_k;
             ++i) {
          const std::int32_t id = run.forward.expert_ids[static_cast<std::size_t>(i)];
          wanted += id / (own.experts / members) == destination ? 1 : 0;
        }
      }
      const std::int64_t room = *shards.buffer_rows;
      return std::min(before + wanted, room) - std::min(before, room);
    };
    for (std::int64_t id = 0; id < mesh.devices(); ++id) {
      const std::int64_t group = id / members;
      const std::int64_t index = id % members;
      std::vector<ExchangedRows> exchanged;
      for (std::int64_t chunk = 0; chunk < shards.chunks; ++chunk) {
        ExchangedRows each;
        for (std::int64_t other = 0; other < members; ++other) {
          each.sent += rows(group, chunk, index, other);
          each.arrived += rows(group, chunk, other, index);
        }
        each.staying = rows(group, chunk, index, index);
        exchanged.push_back(each);
      }
      const auto messages =
          all_to_all_messages<bfloat16, float>(mesh, id, own, choice.options, exchanged);
      expect_messages(run.forward_ledger, messages, id, LayerPass::forward);
      expect_messages(run.backward_ledger, messages, id, LayerPass::backward);
    }
  }
}

TEST(AllToAll, StaysWithinItsWorkspaceAndResiduals) {
  auto p = sent_problem<bfloat16, float>(shared, 16);
  p.options.dispatch.token_chunks = 2;
  auto choice = choice_of(p);
  choice.mesh = {.tokens = 2, .workers = 2};
  const Topology mesh(meshes()[1]);
  Dims own = p.dims;
  own.tokens = 6;
  for (const bool with_residuals : {true, false}) {
    choice.with_residuals = with_residuals;
    choice.backward = with_residuals;
    const auto run = run_sharded<AllToAll>(p, meshes()[1], choice);
    EXPECT_LE(run.most_forward_bytes,
              (all_to_all_forward_workspace_bytes<bfloat16, float>(mesh, own, choice.options, 2)));
    if (with_residuals) {
      EXPECT_EQ(run.residual_bytes, all_to_all_residual_bytes<bfloat16>(mesh, own, choice.options));
      EXPECT_LE(run.most_backward_bytes, (all_to_all_backward_workspace_bytes<bfloat16, float>(
                                             mesh, own, choice.options, 2)));
    }
  }
}

TEST(AllToAll, RefusesAPipelineAndTheRing) {
  const Topology mesh({.expert = 2});
  ShardedOptions options;
  const auto text = [&] {
    return heddle::test::thrown_text<Error>(
        [&] { static_cast<void>(all_to_all_residual_bytes<float>(mesh, plain, options)); });
  };
  EXPECT_EQ(text(),
            "moe::all_to_all_residual_bytes: options.layer.dispatch.strategy = 0: must be "
            "all_to_all");
  options.layer.dispatch.strategy = Strategy::all_to_all;
  options.schedule = ChunkSchedule::pipelined;
  EXPECT_EQ(text(),
            "moe::all_to_all_residual_bytes: options.schedule = 1: must be plain where rows are "
            "sent");
}

}  // namespace
}  // namespace heddle::moe

#include "heddle/moe/ring.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/moe/sharded_cost.hpp"
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
using test::choice_of;
using test::expect_messages;
using test::meshes;
using test::plain;
using test::Problem;
using test::random_problem;
using test::Ring;
using test::run_sharded;
using test::RunChoice;
using test::shared;

TEST(Ring, LikeOneDeviceOnEveryMesh) {
  for (const MeshAxes& axes : meshes()) {
    const auto f = random_problem<float>(shared, 1);
    test::expect_like_reference<Ring>(f, axes, choice_of(f), 1e-5);
    const auto d = random_problem<double>(plain, 2);
    test::expect_like_reference<Ring>(d, axes, choice_of(d), 1e-13);
  }
}

TEST(Ring, LikeOneDeviceInBf16) {
  const auto p = random_problem<bfloat16, float>(shared, 3);
  for (const MeshAxes& axes : {meshes()[0], meshes()[1]}) {
    test::expect_like_reference<Ring>(p, axes, choice_of(p), 2e-2);
  }
}

// Excluded padding is NaN and read nowhere; replay, chunks, buffers and the rest of the options together.
TEST(Ring, LikeOneDeviceInEveryOption) {
  const MeshAxes axes = meshes()[1];
  const auto pad = [](Problem<float>& p) {
    p.segment_ids.assign(static_cast<std::size_t>(p.dims.tokens), 1);
    for (const std::int64_t t : {0, 1, 5, 6, 7, 29, 47}) {
      p.segment_ids[static_cast<std::size_t>(t)] = 0;
      std::fill_n(p.hidden.begin() + t * p.dims.hidden, p.dims.hidden, poison<float>());
      std::fill_n(p.d_out.begin() + t * p.dims.hidden, p.dims.hidden, poison<float>());
    }
  };
  {
    auto p = random_problem<float>(plain, 4);
    pad(p);
    p.options.dispatch = {.buffer_factor = 0.8, .token_chunks = 3};
    p.options.weight_grad_from = WeightGradFrom::wo_output;
    test::expect_like_reference<Ring>(p, axes, choice_of(p), 1e-5);
    auto choice = choice_of(p);
    choice.options.rules = {.experts = ExpertRule::ep_own, .dense = DenseShard::all};
    test::expect_like_reference<Ring>(p, axes, choice, 1e-5);
  }
  {
    auto p = random_problem<float>(shared, 5);
    Random random(77);
    for (std::int64_t i = 0; i < p.dims.slots(); ++i) {
      p.forced_ids.push_back(static_cast<std::int32_t>(random.integer(-1, p.dims.experts - 1)));
    }
    p.d_router_logits = Random(78).normals<float>(p.dims.tokens * p.dims.experts, 0.1);
    p.options.router.weights = TopKWeights::softmax_of_all;
    p.options.fusion = GluFusion::separate;
    p.options.dispatch.token_chunks = 2;
    auto choice = choice_of(p);
    choice.options.schedule = ChunkSchedule::pipelined;
    choice.options.rules.dense = DenseShard::all;
    test::expect_like_reference<Ring>(p, axes, choice, 1e-5);
    p.options.router_training = RouterTraining::frozen;
    test::expect_like_reference<Ring>(p, axes, choice_of(p), 1e-5);
  }
}

TEST(Ring, NoScheduleThreadOrResidualChangesABit) {
  auto p = random_problem<float>(shared, 6);
  p.options.dispatch = {.buffer_factor = 1.2, .token_chunks = 3};
  for (const MeshAxes& axes : {meshes()[1], meshes()[3]}) {
    auto choice = choice_of(p);
    choice.mesh = {.tokens = 1, .workers = 1};
    const auto plainly = run_sharded<Ring>(p, axes, choice);
    choice.options.schedule = ChunkSchedule::pipelined;
    choice.mesh = {.tokens = 4, .workers = 2};
    const auto pipelined = run_sharded<Ring>(p, axes, choice);
    test::expect_same_bits(plainly, pipelined);
    choice.with_residuals = false;
    choice.backward = false;
    const auto alone = run_sharded<Ring>(p, axes, choice);
    EXPECT_TRUE(same_bits(plainly.forward.out, alone.forward.out));
  }
}

TEST(Ring, ChunksChangeNoOutputWithoutDrops) {
  auto p = random_problem<float>(plain, 7);
  const auto whole = run_sharded<Ring>(p, meshes()[1], choice_of(p));
  for (const std::int64_t chunks : {2, 4, 6, 9}) {  // nine: of one token, the last three empty
    p.options.dispatch.token_chunks = chunks;
    auto choice = choice_of(p);
    choice.options.schedule = ChunkSchedule::pipelined;
    const auto cut = run_sharded<Ring>(p, meshes()[1], choice);
    EXPECT_TRUE(same_bits(whole.forward.out, cut.forward.out)) << chunks;
    EXPECT_TRUE(same_bits(whole.gradients.d_hidden, cut.gradients.d_hidden)) << chunks;
    EXPECT_TRUE(close(cut.gradients.d_wi, whole.gradients.d_wi, 1e-5)) << chunks;
    EXPECT_TRUE(close(cut.gradients.d_wo, whole.gradients.d_wo, 1e-5)) << chunks;
    EXPECT_EQ(cut.maps_built, chunks);
  }
}

TEST(Ring, ExpertGradientsAreNotScaledByTheGroup) {
  const auto p = random_problem<double>(plain, 8);
  const auto one = run_sharded<Ring>(p, {.fsdp = 4}, choice_of(p));
  for (const MeshAxes& axes : {MeshAxes{.expert = 2}, MeshAxes{.context = 4, .expert = 2}}) {
    const auto more = run_sharded<Ring>(p, axes, choice_of(p));
    EXPECT_TRUE(close(more.gradients.d_wi, one.gradients.d_wi, 1e-13));
    EXPECT_TRUE(close(more.gradients.d_wo, one.gradients.d_wo, 1e-13));
  }
}

TEST(Ring, OneDeviceMayReceiveEverything) {
  auto p = random_problem<float>(plain, 9);
  for (std::int64_t t = 0; t < p.dims.tokens; ++t) {
    p.forced_ids.insert(p.forced_ids.end(), {6, 4, 7});  // all of the second half of the experts
  }
  test::expect_like_reference<Ring>(p, {.fsdp = 2, .expert = 2}, choice_of(p), 1e-5);
  p.options.dispatch.buffer_factor = 1.0;  // half of them find no room
  test::expect_like_reference<Ring>(p, {.fsdp = 2, .expert = 2}, choice_of(p), 1e-5);
  const auto run = run_sharded<Ring>(p, {.fsdp = 2, .expert = 2}, choice_of(p));
  for (const LayerReport& report : run.reports) {  // the devices of the first half know it, too
    EXPECT_EQ(report.dropped_slots, 72);
    EXPECT_EQ(report.required_factor, 2.0);
  }
}

TEST(Ring, BuffersOfEverySize) {
  for (const double factor : {0.001, 0.5, 1.0, 1.5, 100.0}) {
    auto p = random_problem<float>(plain, 10);
    p.options.dispatch = {.buffer_factor = factor, .token_chunks = 2};
    for (const MeshAxes& axes : {meshes()[1], meshes()[4]}) {
      test::expect_like_reference<Ring>(p, axes, choice_of(p), 1e-5);
    }
  }
}

TEST(Ring, OddCountsOfTokensInShortChunks) {
  auto p = random_problem<float>(
      {.tokens = 56, .hidden = 16, .experts = 8, .top_k = 3, .expert_hidden = 5}, 11);
  const auto expected = test::run_forward(p);
  const auto expected_gradients = test::run_backward(p);
  p.options.dispatch.token_chunks = 3;  // 3, 3 and 1 of 7
  const auto run = run_sharded<Ring>(p, meshes()[1], choice_of(p));
  EXPECT_TRUE(close(run.forward.out, expected.out, 1e-5));
  test::for_each_gradient(run.gradients, expected_gradients,
                          [](const char* name, const auto& a, const auto& e) {
                            if (!e.empty()) {
                              EXPECT_TRUE(close(a, e, 1e-5)) << name;
                            }
                          });
}

// Padding that all goes to the same experts, and in front of everything real: it evicts what is real when it
// is routed, and takes no room when it is not.
TEST(Ring, PaddingInFrontTakesNoRoom) {
  auto p = random_problem<float>(plain, 12);
  p.segment_ids.assign(48, 1);
  std::fill_n(p.segment_ids.begin(), 24, 0);
  p.forced_ids.assign(static_cast<std::size_t>(p.dims.slots()), -1);
  for (std::size_t t = 0; t < 24; ++t) {
    for (std::size_t k = 0; k < 3; ++k) {
      p.forced_ids[3 * t + k] = static_cast<std::int32_t>(k);
    }
  }
  // 50 rows a device: 24 real tokens have at most 48 at its two experts.
  p.options.dispatch.buffer_factor = 1.4;
  const MeshAxes axes{.context = 2, .expert = 2};
  const auto excluded = run_sharded<Ring>(p, axes, choice_of(p));
  EXPECT_EQ(excluded.forward.report.dropped_slots, 0);
  EXPECT_EQ(excluded.forward.report.routed_slots, 72);
  test::expect_like_reference<Ring>(p, axes, choice_of(p), 1e-5);
  p.options.router.padding = PaddingRouting::include;
  const auto included = run_sharded<Ring>(p, axes, choice_of(p));
  EXPECT_GT(included.forward.report.dropped_slots, 0);
  const std::size_t real = static_cast<std::size_t>(24 * p.dims.hidden);
  EXPECT_FALSE(same_bits(std::span<const float>(excluded.forward.out).subspan(real),
                         std::span<const float>(included.forward.out).subspan(real)));
}

TEST(Ring, ReplayAfterAnOverflowDropsNothing) {
  auto p = random_problem<float>(plain, 13);
  p.options.dispatch = {.buffer_factor = 0.9, .token_chunks = 2};
  const MeshAxes axes = meshes()[1];
  auto choice = choice_of(p);
  const auto full = run_sharded<Ring>(p, axes, choice);
  for (const LayerReport& report : full.reports) {
    EXPECT_GT(report.dropped_slots, 0);
  }
  Dims own = p.dims;
  own.tokens = 6;
  const Topology mesh(axes);
  const ShardedOptions overflowed = choice.options;
  choice.options.layer.dispatch = replay_dispatch(mesh, own, overflowed);
  EXPECT_FALSE(choice.options.layer.dispatch.buffer_factor);
  EXPECT_GT(choice.options.layer.dispatch.token_chunks, 2);
  EXPECT_LE(layer_shards("test", mesh, 0, own, choice.options).chunk_rows,
            layer_shards("test", mesh, 0, own, overflowed).chunk_rows);
  const auto again = run_sharded<Ring>(p, axes, choice);
  EXPECT_EQ(again.forward.report.dropped_slots, 0);
  p.options.dispatch = {};
  EXPECT_TRUE(close(again.forward.out, test::run_forward(p).out, 1e-5));
}

TEST(Ring, LedgerIsTheFormula) {
  auto p = random_problem<bfloat16, float>(shared, 14);
  p.options.dispatch.token_chunks = 4;  // 2, 2, 2, 0 of the eight devices' six
  for (const MeshAxes& axes : meshes()) {
    for (const bool weights : {true, false}) {
      auto choice = choice_of(p);
      choice.weight_cotangents = weights;
      if (!weights) {
        choice.options.rules = {.experts = ExpertRule::ep_own, .dense = DenseShard::all};
      }
      const auto run = run_sharded<Ring>(p, axes, choice);
      const Topology mesh(axes);
      Dims own = p.dims;
      own.tokens /= mesh.devices();
      for (std::int64_t id = 0; id < mesh.devices(); ++id) {
        const auto messages = ring_messages<bfloat16, float>(
            mesh, id, own, choice.options, {weights, weights, weights, weights, weights, weights});
        expect_messages(run.forward_ledger, messages, id, LayerPass::forward);
        expect_messages(run.backward_ledger, messages, id, LayerPass::backward);
      }
    }
  }
}

TEST(Ring, AddsToCotangentsOnce) {
  const auto p = random_problem<double>(shared, 15);
  auto choice = choice_of(p);
  const auto fresh = run_sharded<Ring>(p, meshes()[1], choice);
  choice.write = Write::accumulate;
  choice.before = 3.0;
  auto added = run_sharded<Ring>(p, meshes()[1], choice);
  for (std::vector<double>* each : added.gradients.weights()) {
    for (double& value : *each) {
      value -= 3.0;
    }
  }
  test::for_each_gradient(added.gradients, fresh.gradients,
                          [](const char* name, const auto& a, const auto& e) {
                            EXPECT_TRUE(close(a, e, 1e-12)) << name;
                          });
}

TEST(Ring, StaysWithinItsWorkspaceAndResiduals) {
  for (const bool pipelined : {false, true}) {
    auto p = random_problem<bfloat16, float>(shared, 16);
    p.options.dispatch.token_chunks = 2;
    auto choice = choice_of(p);
    choice.mesh = {.tokens = 2, .workers = 2};
    choice.options.schedule = pipelined ? ChunkSchedule::pipelined : ChunkSchedule::plain;
    for (const bool with_residuals : {true, false}) {
      choice.with_residuals = with_residuals;
      choice.backward = with_residuals;
      const auto run = run_sharded<Ring>(p, meshes()[1], choice);
      const Topology mesh(meshes()[1]);
      Dims own = p.dims;
      own.tokens = 6;
      EXPECT_LE(run.most_forward_bytes,
                (ring_forward_workspace_bytes<bfloat16, float>(mesh, own, choice.options, 2)));
      EXPECT_GT(run.most_forward_bytes, 0U);
      if (with_residuals) {
        EXPECT_EQ(run.residual_bytes, ring_residual_bytes<bfloat16>(mesh, own, choice.options));
        EXPECT_LE(run.most_backward_bytes,
                  (ring_backward_workspace_bytes<bfloat16, float>(mesh, own, choice.options, 2)));
      }
    }
  }
}

TEST(Ring, RefusesBeforeAnythingMoves) {
  const auto refusal = [](const MeshAxes& axes, const auto& change) {
    auto p = random_problem<float>(plain, 17);
    auto choice = choice_of(p);
    LocalMesh mesh(axes);
    const std::string text = heddle::test::thrown_text<Error>([&] {
      mesh.run([&](auto& device) {
        test::DeviceParts parts(device.topology(), device.id(), p.dims, {});
        Problem<float> own = test::cut(p, parts);
        Dims dims = own.dims;
        Inputs<float> in = test::inputs_of(own, parts);
        std::vector<float> out(own.hidden.size());
        Workspace workspace;
        RoutingMapBuilder maps(workspace);
        ShardedOptions options = choice.options;
        change(dims, in, options);
        ring_forward(device, dims, in, options,
                     Outputs<float>{.out = {out.data(), parts.tokens, dims.hidden}}, {}, maps,
                     workspace);
      });
    });
    EXPECT_TRUE(mesh.ledger().records().empty()) << text;
    return text;
  };
  const auto contains = [](const std::string& text, std::string_view part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const MeshAxes axes{.fsdp = 2, .expert = 2};
  contains(refusal(axes,
                   [](auto&, auto&, auto& o) { o.layer.dispatch.strategy = Strategy::all_to_all; }),
           "moe::ring_forward: options.layer.dispatch.strategy = 1: must be ring");
  contains(refusal(axes, [](auto&, auto&, auto& o) { o.layer.dispatch.shards = 4; }),
           "options.layer.dispatch.shards = 4: must be 1 or that of the mesh (2)");
  contains(refusal(axes, [](auto& d, auto&, auto&) { d.experts = 7; }),
           "mesh: experts = 7: is not divisible by context=1 x expert=2 (= 2), remainder 1");
  contains(refusal(axes, [](auto&, auto& in, auto&) { in.wi = in.wi.row_block(0, 3); }),
           "moe::ring_forward: wi.rows = 3: must equal own experts * dims.hidden / expert shards");
  contains(refusal(axes,
                   [](auto&, auto& in, auto&) {
                     in.hidden = {in.hidden.data(), in.hidden.rows(), in.hidden.cols(), 25};
                   }),
           "hidden.stride = 25: must equal its cols (24): it is sent");
  contains(refusal(axes, [](auto&, auto&, auto& o) { o.schedule = ChunkSchedule(5); }),
           "options.schedule = 5: must be plain or pipelined");
}

}  // namespace
}  // namespace heddle::moe

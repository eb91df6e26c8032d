#include "heddle/moe/expert_layer.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "moe/layer_run.hpp"
#include "moe/problem.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: the router's gradient missing, or without the weights of
// dropped slots being 0; a chunk's rows in another chunk's residuals; the second chunk's cotangents over
// the first's; a buffer of the whole batch for each chunk; weights renormalised after a drop; the frozen
// router without its part of d_hidden; the shared gate without s (1 - s); the shared expert before the
// routed part is written; padding read, counted or added to; d_router_logits of padding added; a map built
// in the backward; tokens not gathered; a window's first row forgotten.

namespace heddle::moe {
namespace {

using heddle::test::close;
using heddle::test::Difference;
using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;
using heddle::test::thrown_text;
using heddle::test::with_threads;
using test::for_each_gradient;
using test::Gradients;
using test::LayerRun;
using test::Problem;
using test::random_problem;
using test::Result;

/// Passes when everything the fast tier writes is within `tolerance` of the largest value of each array
/// of the reference; ids, counts and the report must be equal.
template <class S, class R>
void expect_like_reference(const Problem<S, R>& p, double tolerance) {
  using A = AccumulatorOf<S>;
  LayerRun<S, R> run(p);
  const Result<A> actual = run.forward();
  const Result<A> expected = test::run_forward(p);
  EXPECT_EQ(actual.expert_ids, expected.expert_ids);
  EXPECT_EQ(actual.group_sizes, expected.group_sizes);
  EXPECT_EQ(actual.report.dropped_slots, expected.report.dropped_slots);
  EXPECT_EQ(actual.report.largest_drop, expected.report.largest_drop);
  EXPECT_EQ(actual.report.buffer_rows, expected.report.buffer_rows);
  EXPECT_EQ(actual.report.routed_slots, expected.report.routed_slots);
  EXPECT_EQ(actual.report.required_factor, expected.report.required_factor);
  EXPECT_EQ(actual.report.router.forced_tokens, expected.report.router.forced_tokens);
  EXPECT_EQ(actual.report.router.padding_tokens, expected.report.router.padding_tokens);
  EXPECT_TRUE(close(actual.out, expected.out, tolerance));
  EXPECT_TRUE(close(actual.router_logits, expected.router_logits, tolerance));
  EXPECT_TRUE(close(actual.expert_weights, expected.expert_weights, tolerance));

  const Gradients<A> actual_gradients = run.backward();
  const Gradients<A> expected_gradients = test::run_backward(p);
  for_each_gradient(actual_gradients, expected_gradients,
                    [&](const char* name, const auto& a, const auto& e) {
                      if (!e.empty()) {
                        EXPECT_TRUE(close(a, e, tolerance)) << name;
                      }
                    });
}

/// Every option away from its default at least once, and together.
template <class S, class R = S>
std::vector<Problem<S, R>> problems() {
  std::vector<Problem<S, R>> all;
  const Dims plain{.tokens = 40, .hidden = 24, .experts = 6, .top_k = 2, .expert_hidden = 20};
  Dims shared = plain;
  shared.shared_hidden = 28;
  std::uint64_t seed = 1;
  const auto add = [&](const Dims& dims) -> Problem<S, R>& {
    all.push_back(random_problem<S, R>(dims, seed++));
    return all.back();
  };
  const auto pad = [](Problem<S, R>& p) {
    p.segment_ids.assign(static_cast<std::size_t>(p.dims.tokens), 1);
    const S nan = poison<S>();
    for (const std::int64_t t : {0, 1, 7, 8, 9, 39}) {
      p.segment_ids[static_cast<std::size_t>(t)] = 0;
      if (!p.dims.has_shared_expert()) {
        std::fill_n(p.hidden.begin() + t * p.dims.hidden, p.dims.hidden, nan);
        std::fill_n(p.d_out.begin() + t * p.dims.hidden, p.dims.hidden, nan);
      }
    }
  };
  add(plain);
  add(shared);
  add({.tokens = 5, .hidden = 3, .experts = 1, .top_k = 1, .expert_hidden = 1});
  add({.tokens = 33, .hidden = 17, .experts = 4, .top_k = 4, .expert_hidden = 9});
  add(shared).options.weight_grad_from = WeightGradFrom::wo_output;
  add(plain).options.router.weights = TopKWeights::softmax_of_all;
  add(plain).options.router_training = RouterTraining::frozen;
  add(shared).options.fusion = GluFusion::separate;
  pad(add(plain));
  pad(add(shared));
  {
    Problem<S, R>& p = add(plain);
    pad(p);
    p.options.router.padding = PaddingRouting::include;
    p.hidden = random_problem<S, R>(plain, 50).hidden;
    p.d_out = random_problem<S, R>(plain, 51).d_out;
  }
  {
    Problem<S, R>& p = add(plain);  // replay, with rows that fall back
    Random random(77);
    for (std::int64_t i = 0; i < p.dims.slots(); ++i) {
      p.forced_ids.push_back(static_cast<std::int32_t>(random.integer(-1, p.dims.experts - 1)));
    }
  }
  add(plain).options.dispatch.token_chunks = 3;    // 14, 14, 12
  add(shared).options.dispatch.token_chunks = 16;  // the last ones are empty
  add(plain).options.dispatch.buffer_factor = 0.6;
  {
    Problem<S, R>& p = add(shared);
    p.options.dispatch = {.buffer_factor = 0.7, .token_chunks = 4};
    p.options.weight_grad_from = WeightGradFrom::wo_output;
    pad(p);
    p.d_router_logits = Random(78).normals<AccumulatorOf<S>>(p.dims.tokens * p.dims.experts, 0.1);
    for (std::int64_t t = 0; t < p.dims.tokens; ++t) {
      if (p.segment_ids[static_cast<std::size_t>(t)] == 0) {
        std::fill_n(p.d_router_logits.begin() + t * p.dims.experts, p.dims.experts,
                    poison<AccumulatorOf<S>>());
      }
    }
  }
  return all;
}

TEST(ExpertLayer, LikeTheReferenceInEveryOption) {
  for (const auto& p : problems<float>()) {
    expect_like_reference(p, 1e-5);
  }
  for (const auto& p : problems<double>()) {
    expect_like_reference(p, 1e-13);
  }
}

TEST(ExpertLayer, LikeTheReferenceInBf16) {
  for (const auto& p : problems<bfloat16, float>()) {
    expect_like_reference(p, 2e-2);
  }
}

TEST(ExpertLayer, LayerByDefinition) {
  Problem<double> p = random_problem<double>(
      {.tokens = 9, .hidden = 6, .experts = 8, .top_k = 3, .expert_hidden = 5, .shared_hidden = 4},
      3);
  LayerRun<double> run(p);
  EXPECT_TRUE(close(run.forward().out, test::layer_by_definition(p), 1e-13));
}

// Central differences through the whole layer, for buffers with room for everything, some, and nothing.
TEST(ExpertLayer, EveryGradientByCentralDifferences) {
  for (const std::optional<double> factor :
       {std::optional<double>(), std::optional<double>(5.5 / 27), std::optional<double>(0.01)}) {
    for (const WeightGradFrom from : {WeightGradFrom::wo_input, WeightGradFrom::wo_output}) {
      Problem<double> p = random_problem<double>({.tokens = 9,
                                                  .hidden = 6,
                                                  .experts = 8,
                                                  .top_k = 3,
                                                  .expert_hidden = 5,
                                                  .shared_hidden = 4},
                                                 4);
      p.segment_ids = {1, 1, 0, 1, 1, 2, 2, 0, 2};
      p.options.dispatch.buffer_factor = factor;
      p.options.weight_grad_from = from;
      const auto loss = [&] {
        LayerRun<double> run(p);
        const auto out = run.forward(false).out;
        double total = 0;
        for (std::size_t i = 0; i < out.size(); ++i) {
          total += out[i] * p.d_out[i];
        }
        return total;
      };
      LayerRun<double> run(p);
      const auto report = run.forward().report;
      EXPECT_EQ(report.buffer_rows, factor ? static_cast<std::int64_t>(27 * *factor) : 27);
      EXPECT_EQ(report.dropped_slots, factor ? 21 - report.buffer_rows : 0);
      Gradients<double> actual = run.backward();
      const auto check = [&](const char* name, std::vector<double>& x,
                             const std::vector<double>& gradient) {
        // What nothing reaches is zero on both sides, which close() asks to be exact.
        EXPECT_TRUE(
            close(gradient, heddle::test::central_differences(std::span<double>(x), loss), 1e-6))
            << name << " at factor " << factor.value_or(-1);
      };
      check("hidden", p.hidden, actual.d_hidden);
      check("router_weight", p.router_weight, actual.d_router_weight);
      check("wi", p.wi, actual.d_wi);
      check("wo", p.wo, actual.d_wo);
      check("shared_wi", p.shared_wi, actual.d_shared_wi);
      check("shared_wo", p.shared_wo, actual.d_shared_wo);
      check("shared_gate", p.shared_gate, actual.d_shared_gate);
    }
  }
}

TEST(ExpertLayer, BuildsOneMapAChunkAndNoneInTheBackward) {
  Problem<float> p = random_problem<float>(
      {.tokens = 40, .hidden = 8, .experts = 4, .top_k = 2, .expert_hidden = 6}, 5);
  p.options.dispatch.token_chunks = 4;
  LayerRun<float> run(p);
  const auto out = run.forward().out;
  EXPECT_EQ(run.maps_built(), 4);
  const auto gradients = run.backward();
  EXPECT_EQ(run.maps_built(), 4);

  // Rematerialised: gate and up are formed again from the maps that were kept; nothing is sorted.
  const Residuals<float>& kept = run.residuals();
  const ChunkPlan plan(p.dims.router(), p.options.dispatch);
  const std::vector<float> before(kept.gate_up.data(), kept.gate_up.data() + 80 * 12);
  std::fill_n(kept.gate_up.data(), 80 * 12, poison<float>());
  std::vector<float> again(out.size(), poison<float>());
  for (std::int64_t chunk = 0; chunk < 4; ++chunk) {
    const RoutingMap map = kept.map(p.dims, plan, chunk);
    routed_experts<float, float>(
        map, routing_window(map), kept.expert_weights.row_block(chunk * 10, 10),
        p.inputs().hidden.row_block(chunk * 10, 10), {.wi = p.inputs().wi, .wo = p.inputs().wo},
        {.out = MatrixView<float>(again.data(), 40, 8).row_block(chunk * 10, 10),
         .gate_up = kept.gate_up.row_block(chunk * plan.chunk_rows, plan.chunk_rows)},
        {}, run.workspace());
  }
  EXPECT_TRUE(same_bits(again, out));
  EXPECT_TRUE(same_bits(std::span<const float>(kept.gate_up.data(), before.size()),
                        std::span<const float>(before)));
  EXPECT_EQ(run.maps_built(), 4);
  for_each_gradient(run.backward(), gradients, [](const char* name, const auto& a, const auto& e) {
    EXPECT_TRUE(same_bits(a, e)) << name;
  });
}

TEST(ExpertLayer, WhatWasInMemoryBeforeNeverShows) {
  for (const auto& p : problems<float>()) {
    LayerRun<float> first(p, std::numeric_limits<float>::quiet_NaN());
    LayerRun<float> second(p, 1e30F);
    const auto a = first.forward();
    const auto b = second.forward();
    EXPECT_TRUE(same_bits(a.out, b.out));
    EXPECT_TRUE(same_bits(a.router_logits, b.router_logits));
    EXPECT_TRUE(same_bits(a.out, second.forward(false).out)) << "residuals change the output";
    static_cast<void>(second.forward());
    for_each_gradient(first.backward(), second.backward(),
                      [](const char* name, const auto& x, const auto& y) {
                        EXPECT_TRUE(same_bits(x, y)) << name;
                      });
  }
}

TEST(ExpertLayer, SameBitsForEveryThreadCountAndFusion) {
  Problem<bfloat16, float> p = random_problem<bfloat16, float>({.tokens = 300,
                                                                .hidden = 70,
                                                                .experts = 5,
                                                                .top_k = 3,
                                                                .expert_hidden = 40,
                                                                .shared_hidden = 30},
                                                               6);
  LayerRun<bfloat16, float> run(p);
  const auto out = run.forward().out;
  const auto gradients = run.backward();
  const auto check = [&] {
    LayerRun<bfloat16, float> other(p);
    EXPECT_TRUE(same_bits(other.forward().out, out));
    for_each_gradient(other.backward(), gradients,
                      [](const char* name, const auto& a, const auto& e) {
                        // The dot of the separate pass is cut into the same tiles.
                        EXPECT_TRUE(same_bits(a, e)) << name;
                      });
  };
  for (const int threads : {1, 2, 7, 16}) {
    with_threads(threads, check);
  }
  p.options.fusion = GluFusion::separate;
  check();
  p.options.fusion = GluFusion::fused;
  p.options.epilogue = GluEpilogue::fast;
  LayerRun<bfloat16, float> fast(p);
  const auto fast_out = fast.forward().out;
  EXPECT_FALSE(same_bits(fast_out, out));
  EXPECT_TRUE(close(fast_out, out, 1e-2));
  for_each_gradient(fast.backward(), gradients, [](const char* name, const auto& a, const auto& e) {
    EXPECT_TRUE(close(a, e, 2e-2)) << name;
  });
}

TEST(ExpertLayer, ChunksChangeNoOutputWithoutDrops) {
  Problem<float> p = random_problem<float>({.tokens = 48,
                                            .hidden = 20,
                                            .experts = 5,
                                            .top_k = 2,
                                            .expert_hidden = 12,
                                            .shared_hidden = 8},
                                           7);
  LayerRun<float> one(p);
  const auto out = one.forward().out;
  const auto gradients = one.backward();
  for (const std::int64_t chunks : {2, 4, 5, 8, 48, 60}) {
    p.options.dispatch.token_chunks = chunks;
    LayerRun<float> run(p);
    EXPECT_TRUE(same_bits(run.forward().out, out)) << chunks;
    const auto chunked = run.backward();
    EXPECT_TRUE(same_bits(chunked.d_hidden, gradients.d_hidden)) << chunks;
    for_each_gradient(chunked, gradients, [&](const char* name, const auto& a, const auto& e) {
      EXPECT_TRUE(close(a, e, 1e-5)) << name << " " << chunks;
    });
  }
}

TEST(ExpertLayer, AddsToCotangentsOnce) {
  for (const std::int64_t chunks : {1, 3}) {
    Problem<double> p = random_problem<double>({.tokens = 12,
                                                .hidden = 5,
                                                .experts = 6,
                                                .top_k = 1,
                                                .expert_hidden = 4,
                                                .shared_hidden = 3},
                                               8);
    p.options.dispatch.token_chunks = chunks;
    p.forced_ids.assign(12, 2);  // five experts get nothing
    LayerRun<double> run(p);
    static_cast<void>(run.forward());
    Gradients<double> fresh = run.backward();
    Gradients<double> added = run.backward(Write::accumulate, 100.0);
    const auto weights = fresh.weights();
    const auto added_weights = added.weights();
    for (std::size_t w = 0; w < weights.size(); ++w) {
      for (std::size_t i = 0; i < weights[w]->size(); ++i) {
        EXPECT_NEAR((*added_weights[w])[i], 100 + (*weights[w])[i], 1e-11) << w;
      }
    }
    EXPECT_TRUE(same_bits(added.d_hidden, fresh.d_hidden));
    for (std::size_t i = 0; i < fresh.d_wi.size(); ++i) {
      const bool used = i / (5 * 8) == 2;
      EXPECT_EQ(fresh.d_wi[i] != 0, used);
      EXPECT_EQ(added.d_wi[i] == 100.0, !used);
    }
    // K = 1: the only weight is 1 whatever its logit.
    for (const double value : fresh.d_router_weight) {
      EXPECT_EQ(value, 0.0);
    }
  }
}

TEST(ExpertLayer, CotangentsThatAreNotWantedAreNotTouched) {
  const Problem<float> p = random_problem<float>(
      {.tokens = 7, .hidden = 4, .experts = 3, .top_k = 2, .expert_hidden = 5, .shared_hidden = 2},
      9);
  LayerRun<float> run(p);
  static_cast<void>(run.forward());
  const Gradients<float> all = run.backward();
  std::vector<float> d_hidden(p.hidden.size(), poison<float>());
  Workspace workspace;
  backward(p.dims, p.inputs(), p.cotangents(), p.options, run.residuals(),
           InputCotangents<float>{.d_hidden = {d_hidden.data(), 7, 4}}, workspace);
  EXPECT_TRUE(same_bits(d_hidden, all.d_hidden));
}

TEST(ExpertLayer, NoTokens) {
  Problem<float> p = random_problem<float>(
      {.tokens = 0, .hidden = 4, .experts = 3, .top_k = 2, .expert_hidden = 5, .shared_hidden = 2},
      10);
  p.options.dispatch = {.buffer_factor = 1.5, .token_chunks = 2};
  LayerRun<float> run(p);
  const auto result = run.forward();
  EXPECT_EQ(result.group_sizes, (std::vector<std::int64_t>{0, 0, 0}));
  Gradients<float> gradients = run.backward();
  for (const std::vector<float>* weight : gradients.weights()) {
    EXPECT_EQ(*weight, std::vector<float>(weight->size(), 0.0F));
  }
}

TEST(ExpertLayer, StaysWithinItsWorkspaceAndResiduals) {
  const auto check = [](const auto& p, auto s, auto r) {
    using S = decltype(s);
    using R = decltype(r);
    with_threads(3, [&] {
      LayerRun<S, R> sized(p);
      Workspace memory;
      static_cast<void>(take_residuals<S>(p.dims, p.options.dispatch, memory));
      EXPECT_EQ(memory.high_water_bytes(), (residual_bytes<S>(p.dims, p.options.dispatch)));
      for (const bool with_residuals : {true, false}) {
        Workspace workspace;
        Workspace map_workspace;
        RoutingMapBuilder maps(map_workspace);
        std::vector<AccumulatorOf<S>> out(p.hidden.size());
        forward(p.dims, p.inputs(), p.options,
                Outputs<AccumulatorOf<S>>{.out = {out.data(), p.dims.tokens, p.dims.hidden}},
                with_residuals ? sized.residuals() : Residuals<S>{}, maps, workspace);
        EXPECT_LE(workspace.high_water_bytes(),
                  (forward_workspace_bytes<S, R>(p.dims, p.options, 3)));
      }
      Workspace workspace;
      Gradients<AccumulatorOf<S>> gradients(p);
      backward(p.dims, p.inputs(), p.cotangents(), p.options, sized.residuals(),
               gradients.views(p.dims), workspace);
      EXPECT_LE(workspace.high_water_bytes(),
                (backward_workspace_bytes<S, R>(p.dims, p.options, 3)));
    });
  };
  for (const auto& p : problems<float>()) {
    check(p, float{}, float{});
  }
  for (const auto& p : problems<bfloat16, float>()) {
    check(p, bfloat16{}, float{});
  }
}

TEST(ExpertLayer, RefusesWhatIsNotOneDevice) {
  Problem<float> p = random_problem<float>(
      {.tokens = 4, .hidden = 4, .experts = 4, .top_k = 2, .expert_hidden = 5}, 11);
  const auto text = [&] {
    Workspace workspace;
    RoutingMapBuilder maps(workspace);
    std::vector<float> out(p.hidden.size(), 5.0F);
    const std::string what = thrown_text<Error>([&] {
      forward(p.dims, p.inputs(), p.options, Outputs<float>{.out = {out.data(), 4, 4}},
              Residuals<float>{}, maps, workspace);
    });
    EXPECT_EQ(out, std::vector<float>(16, 5.0F));
    return what;
  };
  p.options.dispatch.shards = 2;
  EXPECT_EQ(text(), "moe::forward: options.dispatch.shards = 2: must be 1 on one device");
  p.options.dispatch = {.groups = 2};
  EXPECT_EQ(text(), "moe::forward: options.dispatch.groups = 2: must be 1 on one device");
  p.options.dispatch = {.buffer_factor = std::numeric_limits<double>::quiet_NaN()};
  EXPECT_EQ(text(), "moe::forward: options.dispatch.buffer_factor = nan: must be finite and > 0");
}

TEST(ExpertLayer, RefusesResidualsOfOtherOptions) {
  Problem<float> p = random_problem<float>(
      {.tokens = 4, .hidden = 4, .experts = 4, .top_k = 2, .expert_hidden = 5}, 12);
  LayerRun<float> run(p);
  static_cast<void>(run.forward());
  p.options.dispatch.token_chunks = 2;
  EXPECT_EQ(thrown_text<Error>([&] { static_cast<void>(run.backward()); }),
            "moe::backward: residuals.group_offsets.size = 5: must equal token_chunks * "
            "(dims.experts + 1) (10)");
  p.options.dispatch = {.buffer_factor = 0.5};
  EXPECT_EQ(thrown_text<Error>([&] { static_cast<void>(run.backward()); }),
            "moe::backward: residuals.gate_up.rows = 8: must equal token_chunks * chunk_rows (4)");
}

}  // namespace
}  // namespace heddle::moe

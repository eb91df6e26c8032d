#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "heddle/core/cost.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/arguments.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/expert_layer.hpp"
#include "heddle/moe/glu.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/residuals.hpp"
#include "heddle/moe/routing_map.hpp"
#include "moe_experts_problem.hpp"
#include "moe_problem.hpp"
#include "peers/expert_loop.hpp"
#include "support/paired.hpp"
#include "support/shapes.hpp"

namespace heddle::bench {

/// A layer whose routing is replayed, so that every expert has the rows that the shape says.
template <class S>
class LayerProblem {
 public:
  explicit LayerProblem(const ExpertShape& shape)
      : dims_{.tokens = shape.total_rows() / choices(shape),
              .hidden = shape.hidden,
              .experts = shape.experts,
              .top_k = choices(shape),
              .expert_hidden = shape.width} {
    // Experts one after the other, as often as they have rows; token t takes places t, t + T, ... of
    // that list, which are different experts as long as none has more than T rows.
    const std::vector<std::int64_t> sizes = group_sizes(shape);
    offsets_ = offsets_of(sizes);
    std::vector<std::int32_t> places;
    for (std::size_t e = 0; e < sizes.size(); ++e) {
      places.insert(places.end(), static_cast<std::size_t>(sizes[e]), static_cast<std::int32_t>(e));
    }
    for (std::int64_t t = 0; t < dims_.tokens; ++t) {
      for (std::int64_t k = 0; k < dims_.top_k; ++k) {
        forced_.push_back(places[static_cast<std::size_t>(k * dims_.tokens + t)]);
      }
    }
    residuals_ = moe::take_residuals<S>(dims_, options_.dispatch, memory_);
  }

  void run(moe::GluFusion fusion) {
    options_.fusion = fusion;
    moe::RoutingMapBuilder maps(workspace_);
    moe::forward(dims_, inputs(), options_, moe::Outputs<float>{.out = out_}, residuals_, maps,
                 workspace_);
    moe::backward(dims_, inputs(), moe::OutputCotangents<S>{.d_out = d_out_}, options_, residuals_,
                  moe::InputCotangents<float>{.d_hidden = d_hidden_,
                                              .d_router_weight = {d_router_},
                                              .d_wi = {d_wi_},
                                              .d_wo = {d_wo_}},
                  workspace_);
  }

  /// The same experts over a library's products, from the routing of the run before.
  [[nodiscard]] ExpertLoop<S> expert_loop() {
    const moe::ChunkPlan plan(dims_.router(), options_.dispatch);
    const moe::RoutingMap map = residuals_.map(dims_, plan, 0);
    for (std::int64_t row = 0; row < dims_.slots(); ++row) {
      const std::int64_t slot = map.permutation[static_cast<std::size_t>(row)];
      loop_tokens_.push_back(static_cast<std::int32_t>(slot / dims_.top_k));
      loop_weights_.push_back(residuals_.expert_weights(slot / dims_.top_k, slot % dims_.top_k));
    }
    return {offsets_, loop_tokens_, loop_weights_, dims_.hidden, dims_.expert_hidden};
  }
  void run_loop(ExpertLoop<S>& loop) {
    loop.forward(hidden_, wi_, wo_, loop_out_);
    loop.backward(d_out_, wi_, wo_, loop_d_hidden_, d_wi_, d_wo_);
  }

  /// Whether the loop found the same outputs.
  [[nodiscard]] bool agrees_with_loop() const {
    double error = 0;
    double scale = 0;
    for (std::int64_t t = 0; t < dims_.tokens; ++t) {
      for (std::int64_t d = 0; d < dims_.hidden; ++d) {
        const double expected = loop_out_(t, d);
        error = std::max(error, std::abs(static_cast<double>(out_(t, d)) - expected));
        scale = std::max(scale, std::abs(expected));
      }
    }
    return error <= (sizeof(S) == 2 ? 2e-2 : 1e-5) * scale && scale > 0;
  }

  /// Forward and backward of the routed experts, without what is computed again.
  [[nodiscard]] double flops() const {
    return 18.0 * static_cast<double>(dims_.slots() * dims_.hidden * dims_.expert_hidden);
  }
  [[nodiscard]] const moe::Dims& dims() const { return dims_; }
  [[nodiscard]] std::size_t scratch_bytes() const { return workspace_.high_water_bytes(); }

 private:
  /// Few enough that the largest expert of a skewed spread has less rows than there are tokens.
  [[nodiscard]] static std::int64_t choices(const ExpertShape& shape) {
    return shape.experts >= 64 ? 8 : 2;
  }
  [[nodiscard]] moe::Inputs<S, float> inputs() const {
    return {.hidden = hidden_,
            .router_weight = router_,
            .wi = wi_,
            .wo = wo_,
            .forced_ids = {forced_.data(), dims_.tokens, dims_.top_k}};
  }

  moe::Dims dims_;
  moe::Options options_;
  std::vector<std::int64_t> offsets_;
  std::vector<std::int32_t> forced_;
  std::vector<std::int32_t> loop_tokens_;
  std::vector<float> loop_weights_;
  Workspace memory_;
  Workspace workspace_;
  MatrixView<S> hidden_ = take_normals<S>(memory_, dims_.tokens, dims_.hidden, 1.0, 1);
  MatrixView<S> d_out_ = take_normals<S>(memory_, dims_.tokens, dims_.hidden, 1.0, 2);
  MatrixView<float> router_ = take_normals<float>(memory_, dims_.hidden, dims_.experts, 0.02, 3);
  MatrixView<S> wi_ =
      take_normals<S>(memory_, dims_.experts* dims_.hidden, 2 * dims_.expert_hidden, 0.02, 4);
  MatrixView<S> wo_ =
      take_normals<S>(memory_, dims_.experts* dims_.expert_hidden, dims_.hidden, 0.02, 5);
  MatrixView<float> out_ = take_normals<float>(memory_, dims_.tokens, dims_.hidden, 0, 6);
  MatrixView<float> d_hidden_ = take_normals<float>(memory_, dims_.tokens, dims_.hidden, 0, 7);
  MatrixView<float> d_router_ = take_normals<float>(memory_, dims_.hidden, dims_.experts, 0, 8);
  MatrixView<float> d_wi_ =
      take_normals<float>(memory_, dims_.experts* dims_.hidden, 2 * dims_.expert_hidden, 0, 9);
  MatrixView<float> d_wo_ =
      take_normals<float>(memory_, dims_.experts* dims_.expert_hidden, dims_.hidden, 0, 10);
  MatrixView<float> loop_out_ = take_normals<float>(memory_, dims_.tokens, dims_.hidden, 0, 11);
  MatrixView<float> loop_d_hidden_ =
      take_normals<float>(memory_, dims_.tokens, dims_.hidden, 0, 12);
  moe::Residuals<S> residuals_;
};

template <class S>
void moe_layer(benchmark::State& state, const ExpertShape& shape) {
  LayerProblem<S> problem(shape);
  problem.run(moe::GluFusion::fused);
  const std::size_t scratch = problem.scratch_bytes();
  constexpr bool has_loop = strided_gemm_library<S>() != nullptr;
  strided_gemm_on_one_thread();
  ExpertLoop<S> loop = problem.expert_loop();
  if (has_loop) {
    problem.run_loop(loop);
    if (!problem.agrees_with_loop()) {
      state.SkipWithError("moe.layer: the outputs are not those of the expert loop");
      return;
    }
  }
  problem.run(moe::GluFusion::separate);
  RateShare rate;
  std::vector<double> loop_ratios;
  std::vector<double> separate_ratios;
  for ([[maybe_unused]] const auto _ : state) {
    const double seconds = rate.run(problem.flops(), [&] { problem.run(moe::GluFusion::fused); });
    separate_ratios.push_back(seconds_of([&] { problem.run(moe::GluFusion::separate); }) / seconds);
    if (has_loop) {
      loop_ratios.push_back(seconds_of([&] { problem.run_loop(loop); }) / seconds);
    }
    state.SetIterationTime(seconds);
  }
  const moe::Dims& dims = problem.dims();
  state.counters["frac_f32"] = rate.share();
  state.counters["gflops"] = 1e-9 * problem.flops() / rate.seconds();
  state.counters["tokens_s"] = static_cast<double>(dims.tokens) / rate.seconds();
  state.counters["scratch_mib"] = static_cast<double>(scratch) / (1 << 20);
  state.counters["residual_mib"] =
      static_cast<double>(moe::residual_bytes<S>(dims, {})) / (1 << 20);
  // What the passes of their own would move, and how much longer they take.
  const Cost passes = moe::glu_cost<S>(dims.slots(), dims.expert_hidden) +
                      moe::glu_backward_cost<S>(dims.slots(), dims.expert_hidden);
  state.counters["fused_bytes_mib"] =
      static_cast<double>(passes.bytes_read + passes.bytes_written) / (1 << 20);
  state.counters["ratio_separate"] = median(separate_ratios);
  if (has_loop) {
    state.counters["ratio_expert_loop"] = median(loop_ratios);
  }
}

template <class S>
void register_layer(Shapes shapes) {
  const auto add = [](const ExpertShape& shape) {
    std::string label = std::string("moe.layer/") + dtype_name<S> + "/" + shape.text();
    benchmark::RegisterBenchmark(label.c_str(),
                                 [shape](benchmark::State& state) { moe_layer<S>(state, shape); })
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  };
  add(expert_shape(shapes, Spread::uniform));
  add(expert_shape(shapes, Spread::skewed));
  ExpertShape few = expert_shape(shapes, Spread::uniform);
  few.rows = 8;
  add(few);
}

inline void register_moe_experts(Shapes shapes) {
  register_layer<bfloat16>(shapes);
  register_layer<float>(shapes);
}

}  // namespace heddle::bench

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <benchmark/benchmark.h>

#include "gdn_row_problem.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/causal_conv.hpp"
#include "heddle/gdn/chunked_cost.hpp"
#include "heddle/gdn/layer.hpp"
#include "heddle/gdn/triangular_inverse.hpp"
#include "support/copy_twin.hpp"
#include "support/paired.hpp"
#include "support/roofline.hpp"

namespace heddle::bench {

/// A layer call on a row of one document, its arrays touched beforehand.
template <class S>
class GdnLayerProblem {
 public:
  explicit GdnLayerProblem(const gdn::Dims& dims)
      : dims_(dims),
        qkv_(take<S>(dims.tokens, dims.qkv_columns())),
        conv_weight_(take<float>(dims.qkv_columns(), dims.kernel)),
        a_(take<S>(dims.tokens, dims.value_heads)),
        b_(take<S>(dims.tokens, dims.value_heads)),
        d_o_(take<S>(dims.tokens, dims.output_columns())),
        o_(take<S>(dims.tokens, dims.output_columns())),
        initial_(take<float>(dims.state_rows(), dims.value_dim)),
        state_(take<float>(dims.state_rows(), dims.value_dim)),
        A_log_(memory_.take<float>(dims.value_heads)),
        dt_bias_(memory_.take<float>(dims.value_heads)),
        ids_(memory_.take<std::int32_t>(dims.tokens)) {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](auto view, float scale) {
      using T = typename decltype(view)::Element;
      std::generate_n(view.data(), view.rows() * view.cols(),
                      [&] { return static_cast<T>(scale * normal(random)); });
    };
    fill(qkv_, 1);
    fill(conv_weight_, 0.5F);
    fill(a_, 1);
    fill(b_, 1);
    fill(d_o_, 1);
    fill(o_, 0);
    fill(initial_, 0.1F);
    std::fill(A_log_.begin(), A_log_.end(), -3.0F);  // a memory of some tens of tokens
    std::fill(dt_bias_.begin(), dt_bias_.end(), -1.0F);
    std::fill(ids_.begin(), ids_.end(), 1);
  }

  void forward(gdn::Recurrence recurrence) {
    gdn::forward(dims_, inputs(), continued, gdn::LayerOptions{.recurrence = recurrence},
                 gdn::Outputs<S, S, float>{.o = o_, .final_recurrent_state = state_},
                 gdn::ChunkResiduals<float>{}, scratch_);
  }
  void backward() {
    if (d_qkv_.is_null()) {
      d_qkv_ = take<float>(dims_.tokens, dims_.qkv_columns());
      d_a_ = take<float>(dims_.tokens, dims_.value_heads);
      d_b_ = take<float>(dims_.tokens, dims_.value_heads);
      d_conv_weight_ = take<float>(dims_.qkv_columns(), dims_.kernel);
      d_parameters_ = take<float>(2, dims_.value_heads);
      std::fill_n(d_qkv_.data(), d_qkv_.rows() * d_qkv_.cols(), 0.0F);
    }
    gdn::backward(dims_, inputs(), continued, gdn::LayerOptions{},
                  gdn::ChunkResiduals<const float>{}, gdn::OutputCotangents<S, float>{.d_o = d_o_},
                  gdn::Cotangents<float>{.d_qkv = d_qkv_,
                                         .d_conv_weight = {.values = d_conv_weight_},
                                         .d_a = d_a_,
                                         .d_b = d_b_,
                                         .d_A_log = {.values = d_parameters_.row(0)},
                                         .d_dt_bias = {.values = d_parameters_.row(1)}},
                  scratch_);
  }

  [[nodiscard]] bool is_finite() const {
    const auto finite = [](auto view) {
      return std::all_of(view.data(), view.data() + view.rows() * view.cols(),
                         [](auto value) { return std::isfinite(static_cast<float>(value)); });
    };
    return finite(o_) && finite(state_) && finite(d_qkv_) && finite(d_a_);
  }
  [[nodiscard]] double scratch_mib() const {
    return static_cast<double>(scratch_.row_high_water_bytes() +
                               scratch_.thread_high_water_bytes()) /
           (1 << 20);
  }

 private:
  template <class T>
  MatrixView<T> take(std::int64_t rows, std::int64_t cols) {
    return {memory_.take<T>(rows * cols).data(), rows, cols};
  }
  [[nodiscard]] gdn::Inputs<S, float, float> inputs() const {
    return {.qkv = qkv_,
            .conv_weight = conv_weight_,
            .a = a_,
            .b = b_,
            .A_log = A_log_,
            .dt_bias = dt_bias_,
            .segment_ids = ids_,
            .recurrent_state = initial_};
  }

  gdn::Dims dims_;
  Workspace memory_;
  MatrixView<S> qkv_;
  MatrixView<float> conv_weight_;
  MatrixView<S> a_, b_, d_o_, o_;
  MatrixView<float> initial_, state_;
  std::span<float> A_log_, dt_bias_;
  std::span<std::int32_t> ids_;
  MatrixView<float> d_qkv_, d_a_, d_b_, d_conv_weight_, d_parameters_;
  gdn::LayerScratch scratch_;
};

template <class S>
void layer_forward(benchmark::State& state, const gdn::Dims& dims) {
  GdnLayerProblem<S> problem(dims);
  problem.forward(gdn::Recurrence::automatic);
  if (!problem.is_finite()) {
    state.SkipWithError("gdn.layer_forward: a result is not finite");
    return;
  }
  AgainstRoofline roofline;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(roofline.run([&] { problem.forward(gdn::Recurrence::automatic); }));
  }
  roofline.report(state, gdn::chunked_cost<float, float, float>(dims, chunk_options).flops,
                  dims.tokens);
  state.counters["scratch_mib"] = problem.scratch_mib();
}

template <class S>
void layer_backward(benchmark::State& state, const gdn::Dims& dims) {
  GdnLayerProblem<S> problem(dims);
  problem.backward();
  if (!problem.is_finite()) {
    state.SkipWithError("gdn.layer_backward: a result is not finite");
    return;
  }
  AgainstRoofline roofline;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(roofline.run([&] { problem.backward(); }));
  }
  roofline.report(state, gdn::chunked_backward_cost<float, float, float>(dims, chunk_options).flops,
                  dims.tokens);
  state.counters["scratch_mib"] = problem.scratch_mib();
}

/// The recurrence token by token beside the chunked one, both from the convolution's output.
inline void recurrence(benchmark::State& state, const gdn::Dims& dims) {
  RowProblem problem(dims);
  problem.forward();
  problem.forward_by_token();
  if (!problem.is_finite()) {
    state.SkipWithError("gdn.recurrence: a result is not finite");
    return;
  }
  AgainstRoofline roofline;
  Pairs pairs;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(roofline.run([&] { problem.forward_by_token(); }));
    pairs.run([&] { problem.forward_by_token(); }, [&] { problem.forward(); });
  }
  roofline.report(state, gdn::chunked_cost<float, float, float>(dims, chunk_options).flops,
                  dims.tokens);
  state.counters["ratio_chunked"] = pairs.ratio();
}

/// As many inverses as the forward of `dims` forms, of matrices that lie where it has them: in a
/// second-level cache.
inline void inverse(benchmark::State& state, const gdn::Dims& dims) {
  constexpr std::int64_t n = chunk_options.chunk;
  constexpr std::int64_t kept = 16;
  std::mt19937_64 random(1);
  std::uniform_real_distribution<float> entry(-0.1F, 0.1F);
  std::vector<float> t(static_cast<std::size_t>(kept * n * n));
  std::generate(t.begin(), t.end(), [&] { return entry(random); });
  std::vector<float> t_inv(t.size());
  const std::int64_t blocks = dims.tokens / n * dims.value_heads;
  const auto invert = [&] {
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t first = block % kept * n * n;
      gdn::detail::invert_unit_lower<float>({t.data() + first, n, n}, {t_inv.data() + first, n, n});
    }
  };
  RowProblem problem(dims);
  problem.forward();
  AgainstRoofline roofline;
  Pairs pairs;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(roofline.run(invert));
    pairs.run(invert, [&] { problem.forward(); });
  }
  roofline.report(state, blocks * ((n * n * n - n) / 3), dims.tokens);
  state.counters["share_of_forward"] = 1 / pairs.ratio();
  state.counters["us"] = 1e6 * pairs.seconds() / static_cast<double>(blocks);
}

/// The convolution of all columns alone, f32 in and out.
inline void conv(benchmark::State& state, const gdn::Dims& dims) {
  Workspace memory;
  const std::int64_t columns = dims.qkv_columns();
  const auto x = memory.take<float>(dims.tokens * columns);
  const auto y = memory.take<float>(dims.tokens * columns);
  const auto weight = memory.take<float>(columns * dims.kernel);
  std::mt19937_64 random(1);
  std::uniform_real_distribution<float> value(-1, 1);
  std::generate(x.begin(), x.end(), [&] { return value(random); });
  std::generate(weight.begin(), weight.end(), [&] { return value(random); });
  std::fill(y.begin(), y.end(), 0.0F);
  const std::vector<std::int32_t> ids(static_cast<std::size_t>(dims.tokens), 1);
  const gdn::Segments segments(ids, 0);
  gdn::Workspaces workspaces;
  const auto run = [&] {
    gdn::causal_conv<float, float, float>(
        segments,
        {.x = {x.data(), dims.tokens, columns}, .weight = {weight.data(), columns, dims.kernel}},
        gdn::ConvOutput::accumulator, {y.data(), dims.tokens, columns}, workspaces);
  };
  run();
  const std::int64_t bytes = dims.tokens * columns * static_cast<std::int64_t>(sizeof(float));
  const CopyTwin copy(bytes);
  Pairs pairs;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(pairs.run(run, copy));
  }
  state.counters["frac_bw"] = pairs.ratio();
  state.counters["gbps"] = 1e-9 * static_cast<double>(bytes) / pairs.seconds();
  state.counters["tokens_s"] = static_cast<double>(dims.tokens) / pairs.seconds();
}

/// What is measured besides the chunked recurrence itself, at its shape.
inline void register_parts(const gdn::Dims& dims) {
  const std::string arguments = gdn_arguments("f32", dims);
  register_pass("gdn.layer_forward" + arguments,
                [dims](benchmark::State& state) { layer_forward<float>(state, dims); });
  register_pass("gdn.layer_forward" + gdn_arguments("bf16", dims),
                [dims](benchmark::State& state) { layer_forward<bfloat16>(state, dims); });
  register_pass("gdn.layer_backward" + arguments,
                [dims](benchmark::State& state) { layer_backward<float>(state, dims); });
  register_pass("gdn.layer_backward" + gdn_arguments("bf16", dims),
                [dims](benchmark::State& state) { layer_backward<bfloat16>(state, dims); });
  register_pass("gdn.inverse" + arguments,
                [dims](benchmark::State& state) { inverse(state, dims); });
  register_pass("gdn.conv" + arguments, [dims](benchmark::State& state) { conv(state, dims); });
  register_pass("gdn.recurrence" + arguments,
                [dims](benchmark::State& state) { recurrence(state, dims); });
  // Where the one overtakes the other.
  for (const std::int64_t tokens : {1, 4, 16, 64, 256}) {
    for (const std::int64_t dim : {64, 128, 256}) {
      const gdn::Dims some{
          .tokens = tokens, .key_heads = 2, .value_heads = 8, .key_dim = dim, .value_dim = dim};
      register_pass("gdn.recurrence" + gdn_arguments("f32", some),
                    [some](benchmark::State& state) { recurrence(state, some); });
    }
  }
}

}  // namespace heddle::bench

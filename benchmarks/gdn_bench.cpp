#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "heddle/core/workspace.hpp"
#include "heddle/gdn/chunked.hpp"
#include "heddle/gdn/chunked_cost.hpp"
#include "heddle/gdn/states.hpp"
#include "support/fma_rate.hpp"
#include "support/paired.hpp"
#include "support/program.hpp"

#if __has_include("gdn_bench_layer.hpp")
#include "gdn_bench_layer.hpp"
#endif

namespace heddle::bench {
namespace {

using gdn::ChunkOptions;
using gdn::Dims;

constexpr ChunkOptions chunk_options;

/// The row continues a document, so that every chunk reads a state and nothing is skipped.
constexpr gdn::Options continued{.initial_segment = 1};

/// A row of one document, what its passes read and what they write, touched beforehand.
class RowProblem {
 public:
  explicit RowProblem(const Dims& dims)
      : dims_(dims),
        chunks_((dims.tokens + chunk_options.chunk - 1) / chunk_options.chunk),
        y_(take(dims.tokens, dims.qkv_columns())),
        g_(take(dims.tokens, dims.value_heads)),
        beta_(take(dims.tokens, dims.value_heads)),
        d_o_(take(dims.tokens, dims.output_columns())),
        o_(take(dims.tokens, dims.output_columns())),
        initial_(take(dims.state_rows(), dims.value_dim)),
        state_(take(dims.state_rows(), dims.value_dim)),
        m_(take(dims.state_rows(), dims.key_dim)),
        ids_(memory_.take<std::int32_t>(dims.tokens)) {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    fill(y_, [&] { return normal(random); });
    fill(d_o_, [&] { return normal(random); });
    fill(initial_, [&] { return normal(random); });
    // Long memory, so that nothing is skipped: m never falls below its bound.
    std::uniform_real_distribution<float> decay(-1e-3F, 0);
    fill(g_, [&] { return decay(random); });
    std::uniform_real_distribution<float> strength(0, 1);
    fill(beta_, [&] { return strength(random); });
    std::fill(ids_.begin(), ids_.end(), 1);
  }

  void forward() { forward({}); }
  /// The forward that keeps what the backward reads.
  void forward_for_backward() {
    keep();
    forward(residuals_);
  }
  void states() {
    gdn::chunked_states(dims_, inputs(), continued, chunk_options, state_, {}, workspaces_);
  }
  void keep_inverses() {
    keep_t_inv();
    gdn::chunked_states(dims_, inputs(), continued, chunk_options, state_, residuals_.t_inv,
                        workspaces_);
  }
  void transitions() {
    gdn::transitions(dims_, inputs(), continued, chunk_options,
                     ConstMatrixView<float>(residuals_.t_inv), m_, workspaces_);
  }
  void backward() {
    if (d_y_.is_null()) {
      d_y_ = take(dims_.tokens, dims_.qkv_columns());
      d_g_ = take(dims_.tokens, dims_.value_heads);
      d_beta_ = take(dims_.tokens, dims_.value_heads);
      for (const MatrixView<float> view : {d_y_, d_g_, d_beta_}) {
        fill(view, [] { return 0.0F; });
      }
    }
    gdn::chunked_backward(
        dims_, inputs(), continued, chunk_options,
        gdn::ChunkResiduals<const float>{residuals_.t_inv, residuals_.chunk_states},
        gdn::ChunkedCotangents<float, float>{
            .d_o = d_o_, .d_y = d_y_, .d_g = d_g_, .d_beta = d_beta_},
        workspaces_);
  }

  [[nodiscard]] bool is_finite() const {
    for (const MatrixView<float>& view : {o_, state_, m_, d_y_, d_g_}) {
      for (std::int64_t row = 0; row < view.rows(); ++row) {
        for (const float value : view.row(row)) {
          if (!std::isfinite(value)) {
            return false;
          }
        }
      }
    }
    return true;
  }
  [[nodiscard]] double scratch_mib() const {
    return static_cast<double>(workspaces_.high_water_bytes()) / (1 << 20);
  }

 private:
  MatrixView<float> take(std::int64_t rows, std::int64_t cols) {
    return {memory_.take<float>(rows * cols).data(), rows, cols};
  }
  template <class Value>
  static void fill(MatrixView<float> view, const Value& value) {
    std::generate_n(view.data(), view.rows() * view.cols(), value);
  }
  [[nodiscard]] gdn::ChunkedInputs<float> inputs() const {
    return {.y = y_, .g = g_, .beta = beta_, .segment_ids = ids_, .recurrent_state = initial_};
  }
  void forward(const gdn::ChunkResiduals<float>& kept) {
    gdn::chunked_forward(
        dims_, inputs(), continued, chunk_options,
        gdn::ChunkedOutputs<float, float>{.o = o_, .final_recurrent_state = state_}, kept,
        workspaces_);
  }
  void keep_t_inv() {
    if (residuals_.t_inv.is_null()) {
      residuals_.t_inv =
          take(chunks_ * dims_.value_heads, chunk_options.chunk * chunk_options.chunk);
    }
  }
  void keep() {
    keep_t_inv();
    if (residuals_.chunk_states.is_null()) {
      residuals_.chunk_states = take(chunks_ * dims_.value_heads, dims_.key_dim * dims_.value_dim);
    }
  }

  Dims dims_;
  std::int64_t chunks_;
  Workspace memory_;
  MatrixView<float> y_, g_, beta_, d_o_, o_, initial_, state_, m_;
  std::span<std::int32_t> ids_;
  MatrixView<float> d_y_, d_g_, d_beta_;
  gdn::ChunkResiduals<float> residuals_;
  gdn::Workspaces workspaces_;
};

/// Times `run` between two looks at the machine's f32 rate.
class AgainstRoofline {
 public:
  template <class Run>
  double run(const Run& run) {
    const double before = fma_gflops();
    seconds_.push_back(seconds_of(run));
    rates_.push_back(0.5 * (before + fma_gflops()));
    return seconds_.back();
  }
  void report(benchmark::State& state, std::int64_t flops, std::int64_t tokens) const {
    const double threads = oneapi::tbb::this_task_arena::max_concurrency();
    std::vector<double> fractions;
    for (std::size_t i = 0; i < seconds_.size(); ++i) {
      fractions.push_back(1e-9 * static_cast<double>(flops) / seconds_[i] / rates_[i] / threads);
    }
    state.counters["frac_f32"] = median(fractions);
    state.counters["gflops"] = 1e-9 * static_cast<double>(flops) / median(seconds_);
    state.counters["tokens_s"] = static_cast<double>(tokens) / median(seconds_);
  }

 private:
  std::vector<double> seconds_;
  std::vector<double> rates_;
};

using Pass = void (RowProblem::*)();

/// A pass over the row; `before` prepares what it reads.
void measure(benchmark::State& state, const Dims& dims, std::int64_t flops, Pass pass,
             Pass before = nullptr) {
  RowProblem problem(dims);
  if (before != nullptr) {
    (problem.*before)();
  }
  (problem.*pass)();
  if (!problem.is_finite()) {
    state.SkipWithError("gdn: a result is not finite");
    return;
  }
  AgainstRoofline roofline;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(roofline.run([&] { (problem.*pass)(); }));
  }
  roofline.report(state, flops, dims.tokens);
  state.counters["scratch_mib"] = problem.scratch_mib();
}

/// The time a token takes in a long row, over that in a short one: 1 where it is linear.
void growth(benchmark::State& state, const Dims& dims, std::int64_t short_tokens) {
  Dims short_dims = dims;
  short_dims.tokens = short_tokens;
  RowProblem longer(dims);
  RowProblem shorter(short_dims);
  longer.forward();
  shorter.forward();
  const std::int64_t times = dims.tokens / short_tokens;
  Pairs pairs;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(pairs.run([&] { longer.forward(); },
                                     [&] {
                                       for (std::int64_t i = 0; i < times; ++i) {
                                         shorter.forward();
                                       }
                                     }));
  }
  state.counters["ratio_T" + std::to_string(short_tokens)] = pairs.ratio();
  state.counters["tokens_s"] = static_cast<double>(dims.tokens) / pairs.seconds();
  state.counters["scratch_mib"] = longer.scratch_mib();
}

/// The states-only pass beside the whole forward.
void states(benchmark::State& state, const Dims& dims) {
  RowProblem problem(dims);
  problem.forward();
  problem.states();
  AgainstRoofline roofline;
  Pairs pairs;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(roofline.run([&] { problem.states(); }));
    pairs.run([&] { problem.states(); }, [&] { problem.forward(); });
  }
  roofline.report(state, gdn::chunked_states_cost<float, float>(dims, chunk_options).flops,
                  dims.tokens);
  state.counters["share_of_forward"] = 1 / pairs.ratio();
  state.counters["scratch_mib"] = problem.scratch_mib();
}

void register_pass(const std::string& name, const std::function<void(benchmark::State&)>& run) {
  benchmark::RegisterBenchmark(name.c_str(), run)->UseManualTime()->Unit(benchmark::kMillisecond);
}

void register_all(Shapes shapes) {
  Dims dims{.key_dim = 128, .value_dim = 128};
  switch (shapes) {
    case Shapes::ci:
      dims.tokens = 512;
      dims.key_heads = 2;
      dims.value_heads = 8;
      break;
    case Shapes::standard:
      dims.tokens = 4096;
      dims.key_heads = 16;
      dims.value_heads = 64;
      break;
    case Shapes::geometry:
      dims.tokens = 16384;
      dims.key_heads = 16;
      dims.value_heads = 64;
      break;
  }
  const auto arguments_of = [](const Dims& of) {
    return "/f32/T:" + std::to_string(of.tokens) + "/Hk:" + std::to_string(of.key_heads) +
           "/Hv:" + std::to_string(of.value_heads) + "/K:" + std::to_string(of.key_dim) +
           "/V:" + std::to_string(of.value_dim) + "/C:" + std::to_string(chunk_options.chunk);
  };
  const std::string arguments = arguments_of(dims);
  register_pass("gdn.forward" + arguments, [dims](benchmark::State& state) {
    measure(state, dims, gdn::chunked_cost<float, float, float>(dims, chunk_options).flops,
            &RowProblem::forward);
  });
  register_pass("gdn.backward" + arguments, [dims](benchmark::State& state) {
    measure(state, dims, gdn::chunked_backward_cost<float, float, float>(dims, chunk_options).flops,
            &RowProblem::backward, &RowProblem::forward_for_backward);
  });
  register_pass("gdn.states" + arguments, [dims](benchmark::State& state) { states(state, dims); });
  register_pass("gdn.m_scan" + arguments, [dims](benchmark::State& state) {
    measure(state, dims, gdn::transitions_cost<float, float>(dims, chunk_options).flops,
            &RowProblem::transitions, &RowProblem::keep_inverses);
  });
  if (shapes != Shapes::ci) {
    Dims long_row = dims;
    long_row.tokens = 65536;
    long_row.key_heads = 2;
    long_row.value_heads = 8;
    register_pass("gdn.forward_growth" + arguments_of(long_row),
                  [long_row](benchmark::State& state) { growth(state, long_row, 4096); });
  }
#if __has_include("gdn_bench_layer.hpp")
  register_layer(shapes);
#endif
}

}  // namespace
}  // namespace heddle::bench

int main(int argc, char** argv) {
  return heddle::bench::run(argc, argv, heddle::bench::register_all);
}

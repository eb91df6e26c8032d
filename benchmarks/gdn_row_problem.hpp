#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>

#include <benchmark/benchmark.h>

#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/chunked.hpp"
#include "heddle/gdn/detail/row_recurrence.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/states.hpp"

namespace heddle::bench {

inline constexpr gdn::ChunkOptions chunk_options;

/// The row continues a document, so that every chunk reads a state and nothing is skipped.
inline constexpr gdn::Options continued{.initial_segment = 1};

[[nodiscard]] inline std::string gdn_arguments(const std::string& dtype, const gdn::Dims& dims) {
  return "/" + dtype + "/T:" + std::to_string(dims.tokens) +
         "/Hk:" + std::to_string(dims.key_heads) + "/Hv:" + std::to_string(dims.value_heads) +
         "/K:" + std::to_string(dims.key_dim) + "/V:" + std::to_string(dims.value_dim) +
         "/C:" + std::to_string(chunk_options.chunk);
}

inline void register_pass(const std::string& name,
                          const std::function<void(benchmark::State&)>& run) {
  benchmark::RegisterBenchmark(name.c_str(), run)->UseManualTime()->Unit(benchmark::kMillisecond);
}

/// A row of one document, what its passes read and what they write, touched beforehand.
class RowProblem {
 public:
  explicit RowProblem(const gdn::Dims& dims)
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
    for (const MatrixView<float> written : {o_, state_, m_}) {
      fill(written, [] { return 0.0F; });
    }
  }

  void forward() { forward({}); }
  /// The forward that keeps what the backward reads.
  void forward_for_backward() {
    keep();
    forward(residuals_);
  }
  /// The same forward token by token.
  void forward_by_token() {
    const gdn::Segments segments(ids_, continued.initial_segment);
    const gdn::ChunkPlan plan(segments, chunk_options);
    const gdn::RecurrenceRow<float> row{
        .dims = dims_, .segments = segments, .plan = plan, .g = g_, .beta = beta_};
    gdn::detail::run_recurrence<float>(
        row, gdn::ArrayPort<float, float>(dims_, segments, y_),
        gdn::StatesInOut<float>{.initial = initial_, .final = state_}, o_, workspaces_);
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

  gdn::Dims dims_;
  std::int64_t chunks_;
  Workspace memory_;
  MatrixView<float> y_, g_, beta_, d_o_, o_, initial_, state_, m_;
  std::span<std::int32_t> ids_;
  MatrixView<float> d_y_, d_g_, d_beta_;
  gdn::ChunkResiduals<float> residuals_;
  gdn::Workspaces workspaces_;
};

}  // namespace heddle::bench

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>
#include <oneapi/tbb/task_arena.h>

#include "head_problem.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/options.hpp"
#include "support/fma_rate.hpp"
#include "support/paired.hpp"
#include "support/program.hpp"

namespace heddle::bench {
namespace {

enum class Op { forward, backward, forward_backward };

template <class S>
void run_op(HeadProblem<S>& problem, Op op, head::Mode mode, Workspace& workspace) {
  switch (op) {
    case Op::forward:
      return problem.forward(mode, workspace);
    case Op::backward:
      return problem.backward(mode, workspace);
    case Op::forward_backward:
      return problem.forward_backward(mode, workspace);
  }
}

template <class S>
void run_unchunked(HeadProblem<S>& problem, Op op, Workspace& workspace) {
  if (op != Op::backward) {
    problem.unchunked_forward(workspace);
  }
  if (op != Op::forward) {
    problem.unchunked_backward(workspace);
  }
}

/// Both cotangents have the size that the unchunked ones have: a wrong one would be far off.
double size_of(MatrixView<float> values) {
  double sum = 0;
  for (std::int64_t row = 0; row < values.rows(); row += 7) {
    for (const float value : values.row(row)) {
      sum += static_cast<double>(value) * static_cast<double>(value);
    }
  }
  return std::sqrt(sum);
}

template <class S>
bool is_right(HeadProblem<S>& problem, Op op, Workspace& workspace) {
  problem.forward(head::Mode::fused, workspace);
  if (!problem.scores_are_right()) {
    return false;
  }
  problem.unchunked_forward(workspace);
  problem.unchunked_backward(workspace);
  const double d_hidden = size_of(problem.d_hidden());
  const double d_weight = size_of(problem.d_weight());
  run_op(problem, op == Op::forward ? Op::backward : op, head::Mode::fused, workspace);
  const double bar = sizeof(S) == 2 ? 1e-3 : 1e-5;
  return std::abs(size_of(problem.d_hidden()) - d_hidden) < bar * d_hidden &&
         std::abs(size_of(problem.d_weight()) - d_weight) < bar * d_weight;
}

template <class S>
void measure(benchmark::State& state, Op op, const head::Dims& dims) {
  HeadProblem<S> problem(dims, head::WeightLayout::vd);  // as checkpoints hold it
  Workspace checking;
  if (!is_right(problem, op, checking)) {
    state.SkipWithError("head: the results are wrong");
    return;
  }
  Workspace workspace;
  run_op(problem, op, head::Mode::fused, workspace);
  const std::size_t scratch = workspace.high_water_bytes();
  const std::int64_t flops = problem.flops(op == Op::forward ? 1 : 3);
  const double threads = oneapi::tbb::this_task_arena::max_concurrency();
  std::vector<double> seconds;
  std::vector<double> fractions;
  std::vector<double> local;
  std::vector<double> unchunked;
  for ([[maybe_unused]] const auto _ : state) {
    const double before = fma_gflops();
    seconds.push_back(seconds_of([&] { run_op(problem, op, head::Mode::fused, workspace); }));
    const double rate = 0.5 * (before + fma_gflops()) * threads;
    fractions.push_back(1e-9 * static_cast<double>(flops) / seconds.back() / rate);
    local.push_back(seconds_of([&] { run_op(problem, op, head::Mode::local, checking); }) /
                    seconds.back());
    unchunked.push_back(seconds_of([&] { run_unchunked(problem, op, checking); }) / seconds.back());
    state.SetIterationTime(seconds.back());
  }
  state.counters["frac_f32"] = median(fractions);
  state.counters["gflops"] = 1e-9 * static_cast<double>(flops) / median(seconds);
  state.counters["tokens_s"] = static_cast<double>(dims.tokens) / median(seconds);
  state.counters["scratch_mib"] = static_cast<double>(scratch) / (1 << 20);
  state.counters["ratio_local"] = median(local);
  state.counters["ratio_unchunked"] = median(unchunked);
}

template <class S>
void register_dtype(const std::string& dtype, const head::Dims& dims, bool few) {
  const auto add = [&](const char* name, Op op) {
    const std::string full = std::string(name) + "/" + dtype + "/T:" + std::to_string(dims.tokens) +
                             "/D:" + std::to_string(dims.hidden) +
                             "/V:" + std::to_string(dims.vocab);
    auto* const registered = benchmark::RegisterBenchmark(
        full.c_str(), [=](benchmark::State& state) { measure<S>(state, op, dims); });
    registered->UseManualTime()->Unit(benchmark::kMillisecond);
    if (few) {
      registered->Iterations(3);
    }
  };
  add("head.forward", Op::forward);
  add("head.backward", Op::backward);
  add("head.forward_backward", Op::forward_backward);
}

void register_all(Shapes shapes) {
  const auto add = [&](const head::Dims& dims) {
    register_dtype<float>("f32", dims, shapes != Shapes::ci);
    register_dtype<bfloat16>("bf16", dims, shapes != Shapes::ci);
  };
  switch (shapes) {
    case Shapes::ci:
      return add({.tokens = 256, .hidden = 1024, .vocab = 8192});
    case Shapes::standard:
      add({.tokens = 1024, .hidden = 4096, .vocab = 16384});
      return add({.tokens = 256, .hidden = 1024, .vocab = 248320});
    case Shapes::geometry:
      return register_dtype<bfloat16>("bf16", {.tokens = 64, .hidden = 4096, .vocab = 248320},
                                      true);
  }
}

}  // namespace
}  // namespace heddle::bench

int main(int argc, char** argv) {
  benchmark::AddCustomContext("weight", "[V, D]");
  benchmark::AddCustomContext("logits", "f32 under f32 storage, bf16 under bf16");
  return heddle::bench::run(argc, argv, heddle::bench::register_all);
}

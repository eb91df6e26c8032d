#include <cstdint>
#include <functional>
#include <string>

#include <benchmark/benchmark.h>

#include "gdn_layer_bench.hpp"
#include "gdn_row_problem.hpp"
#include "heddle/gdn/chunked.hpp"
#include "heddle/gdn/chunked_cost.hpp"
#include "heddle/gdn/states.hpp"
#include "support/paired.hpp"
#include "support/program.hpp"
#include "support/roofline.hpp"

namespace heddle::bench {
namespace {

using gdn::Dims;

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
  const std::string arguments = gdn_arguments("f32", dims);
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
    register_pass("gdn.forward_growth" + gdn_arguments("f32", long_row),
                  [long_row](benchmark::State& state) { growth(state, long_row, 4096); });
  }
  register_parts(dims);
}

}  // namespace
}  // namespace heddle::bench

int main(int argc, char** argv) {
  return heddle::bench::run(argc, argv, heddle::bench::register_all);
}

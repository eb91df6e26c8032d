#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <benchmark/benchmark.h>
#include <oneapi/tbb/task_arena.h>

#include "support/fma_rate.hpp"
#include "support/paired.hpp"

namespace heddle::bench {

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

}  // namespace heddle::bench

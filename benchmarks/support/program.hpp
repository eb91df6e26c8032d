#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

#include <benchmark/benchmark.h>
#include <oneapi/tbb/task_arena.h>

#include "support/copy_twin.hpp"
#include "support/fma_rate.hpp"
#include "support/paired.hpp"
#include "support/shapes.hpp"

namespace heddle::bench {

namespace detail {

[[nodiscard]] inline std::string rounded(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

/// One thread's memcpy of 256 MiB, 10^9 bytes copied a second.
[[nodiscard]] inline double copy_gbps() {
  constexpr std::int64_t bytes = std::int64_t{256} << 20;
  oneapi::tbb::task_arena one(1);
  double best = 0;
  one.execute([&] {
    const CopyTwin copy(bytes);
    for (int repetition = 0; repetition < 3; ++repetition) {
      best = std::max(best, 1e-9 * static_cast<double>(bytes) / seconds_of(copy));
    }
  });
  return best;
}

}  // namespace detail

/// What a reader of the figures has to know of the build and the machine.
inline void add_context(Shapes shapes) {
  benchmark::AddCustomContext("shapes", std::string(name(shapes)));
  benchmark::AddCustomContext("compiler", HEDDLE_BENCHMARK_COMPILER);
  benchmark::AddCustomContext("flags", HEDDLE_BENCHMARK_FLAGS);
  benchmark::AddCustomContext("commit", HEDDLE_BENCHMARK_COMMIT);
  benchmark::AddCustomContext("threads",
                              std::to_string(oneapi::tbb::this_task_arena::max_concurrency()));
  benchmark::AddCustomContext("path", std::string(name(fma_path())));
  benchmark::AddCustomContext("fma_gflops", detail::rounded(fma_gflops()));
  benchmark::AddCustomContext("copy_gbps", detail::rounded(detail::copy_gbps()));
}

/// main() of a benchmark program: Google Benchmark's flags and --shapes. `register_all(shapes)` registers
/// what the program measures.
template <class Register>
[[nodiscard]] int run(int argc, char** argv, const Register& register_all) {
  const Shapes shapes = take_shapes(argc, argv);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  register_all(shapes);
  add_context(shapes);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace heddle::bench

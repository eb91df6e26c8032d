#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <benchmark/benchmark.h>
#include <oneapi/tbb/task_arena.h>

#include "gemm_problem.hpp"
#include "heddle/core/elementwise.hpp"
#include "heddle/core/isa.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/packed_matrix.hpp"
#include "heddle/core/parallel_product.hpp"
#include "heddle/core/workspace.hpp"
#include "peers/eigen_gemm.hpp"
#ifdef HEDDLE_HAS_OPENBLAS
#include "peers/openblas_gemm.hpp"
#endif
#ifdef HEDDLE_HAS_ONEDNN
#include "peers/onednn_gemm.hpp"
#endif
#include "support/fma_rate.hpp"
#include "support/paired.hpp"
#include "support/program.hpp"

namespace heddle::bench {
namespace {

constexpr int samples = 15;

/// Runs that take about a millisecond together.
template <class Action>
int runs_of_a_millisecond(const Action& action) {
  action();
  const double once = seconds_of(action);
  const int few = std::clamp(static_cast<int>(1e-4 / once), 1, 10'000);
  const double seconds = seconds_of([&] {
    for (int i = 0; i < few; ++i) {
      action();
    }
  });
  return std::clamp(static_cast<int>(1e-3 * few / seconds), 1, 100'000);
}

/// Times a product between FMA loops of the same vectors.
template <class Action>
void measure(benchmark::State& state, double flops, FmaPath path, const Action& multiply) {
  const int runs = runs_of_a_millisecond(multiply);
  std::vector<double> fractions;
  std::vector<double> seconds;
  double before = fma_gflops(path);
  for ([[maybe_unused]] const auto _ : state) {
    seconds.push_back(seconds_of([&] {
                        for (int i = 0; i < runs; ++i) {
                          multiply();
                        }
                      }) /
                      runs);
    const double after = fma_gflops(path);
    fractions.push_back(1e-9 * flops / seconds.back() / (0.5 * (before + after)));
    before = after;
    state.SetIterationTime(seconds.back());
  }
  state.counters["frac_f32"] = median(fractions);
  state.counters["gflops"] = 1e-9 * flops / median(seconds);
}

/// Verifies a product once, then times it. `prepare(problem)` gives what is timed, without arguments.
template <class T, class Prepare>
void measure_gemm(benchmark::State& state, const PeerProduct& product, FmaPath path,
                  const Prepare& prepare) {
  const GemmProblem<T> problem(product);
  auto multiply = prepare(problem);
  multiply();
  if (!problem.is_right()) {
    state.SkipWithError("core.gemm: the product is wrong");
    return;
  }
  measure(state, problem.flops(), path, multiply);
}

template <class T>
std::string dtype() {
  return sizeof(T) == 2 ? "bf16" : "f32";
}

std::string arguments(const PeerProduct& product) {
  return "M:" + std::to_string(product.m) + "/K:" + std::to_string(product.k) +
         "/N:" + std::to_string(product.n) + (product.a_transposed ? "/a_transposed:1" : "") +
         (product.accumulate ? "/accumulate:1" : "");
}

template <class Run>
void add(const std::string& name, const Run& run) {
  benchmark::RegisterBenchmark(name.c_str(), run)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(samples);
}

template <class T, class Prepare>
void add_gemm(const std::string& op, const std::string& kind, const PeerProduct& product,
              const Prepare& prepare) {
  add(op + "/" + dtype<T>() + "/" + kind + "/" + arguments(product),
      [=](benchmark::State& state) { measure_gemm<T>(state, product, fma_path(), prepare); });
}

/// The engine as any caller enters it: what must be packed is packed in each call.
constexpr auto engine = [](const auto& problem) {
  return [&problem, workspace = std::make_shared<Workspace>()] {
    multiply(problem.left(), problem.right(), problem.result(), problem.write(), *workspace);
  };
};

/// The engine as kernels enter it in their loops.
constexpr auto inner = [](const auto& problem) {
  using T = typename decltype(problem.left())::Element;
  const PeerProduct& product = problem.product();
  auto workspace = std::make_shared<Workspace>();
  const auto scratch = workspace->take<std::byte>(
      static_cast<std::int64_t>(product_workspace_bytes<T, T>(product.m, product.n, product.k)));
  return [&problem, workspace, scratch] {
    multiply_prechecked(problem.left(), problem.right(), problem.result(), problem.write(),
                        scratch);
  };
};

constexpr auto prepacked = [](const auto& problem) {
  using T = typename decltype(problem.left())::Element;
  return [&problem, workspace = std::make_shared<Workspace>(),
          weights = std::make_shared<const PackedMatrix<T>>(problem.right())] {
    multiply(problem.left(), weights->view(), problem.result(), problem.write(), *workspace);
  };
};

constexpr auto eigen = [](const auto& problem) {
  return [&problem] { eigen_gemm(problem.product(), problem.a(), problem.b(), problem.c()); };
};

#ifdef HEDDLE_HAS_OPENBLAS
constexpr auto openblas = [](const auto& problem) {
  openblas_on_one_thread();
  return [&problem] { openblas_gemm(problem.product(), problem.a(), problem.b(), problem.c()); };
};
#endif

#ifdef HEDDLE_HAS_ONEDNN
constexpr auto onednn = [](const auto& problem) {
  using T = typename decltype(problem.left())::Element;
  onednn_on_one_thread();
  return [&problem, product = std::make_shared<OnednnGemm<T>>(problem.product())] {
    (*product)(problem.a(), problem.b(), problem.c());
  };
};
#endif

template <class T>
void add_peers(const PeerProduct& product) {
  add_gemm<T>("core.gemm", "eigen", product, eigen);
#ifdef HEDDLE_HAS_OPENBLAS
  if constexpr (std::is_same_v<T, float>) {
    add_gemm<T>("core.gemm", "openblas", product, openblas);
  }
#endif
#ifdef HEDDLE_HAS_ONEDNN
  add_gemm<T>("core.gemm", "onednn", product, onednn);
#endif
}

/// The engine on another path than the machine's best, against the FMA loop of that path.
template <class T, class Prepare>
void add_avx2(const std::string& kind, const PeerProduct& product, const Prepare& prepare) {
  const auto paths = available_paths();
  if (std::find(paths.begin(), paths.end(), Path::avx2) == paths.end()) {
    return;
  }
  add("core.gemm_avx2/" + dtype<T>() + "/" + kind + "/" + arguments(product),
      [=](benchmark::State& state) {
        const ScopedPath scope(Path::avx2);
        measure_gemm<T>(state, product, FmaPath::avx2, prepare);
      });
}

/// All threads of the arena against one of them, in turns.
template <class T>
void threads_gemm(benchmark::State& state, const PeerProduct& product) {
  const GemmProblem<T> problem(product);
  Workspace workspace;
  const auto multiply = [&] {
    parallel_multiply(problem.left(), problem.right(), problem.result(), problem.write(),
                      workspace);
  };
  oneapi::tbb::task_arena one(1);
  multiply();
  if (!problem.is_right()) {
    state.SkipWithError("core.gemm_threads: the product is wrong");
    return;
  }
  one.execute(multiply);
  const double threads = oneapi::tbb::this_task_arena::max_concurrency();
  Pairs pairs;
  std::vector<double> fractions;
  for ([[maybe_unused]] const auto _ : state) {
    const double before = fma_gflops();
    const double seconds = pairs.run(multiply, [&] { one.execute(multiply); });
    fractions.push_back(1e-9 * problem.flops() / seconds /
                        (0.5 * threads * (before + fma_gflops())));
    state.SetIterationTime(seconds);
  }
  state.counters["frac_f32"] = median(fractions);
  state.counters["speedup"] = pairs.ratio();
}

template <class T>
void add_threads(const PeerProduct& product) {
  const int threads = oneapi::tbb::this_task_arena::max_concurrency();
  if (threads > 1) {
    add("core.gemm_threads/" + dtype<T>() + "/packed/threads:" + std::to_string(threads) + "/" +
            arguments(product),
        [=](benchmark::State& state) { threads_gemm<T>(state, product); });
  }
}

/// Largest error of exp over [-86, 0], in units of the last place of the exact value.
double exp_max_ulp() {
  constexpr std::int64_t count = 1 << 20;
  std::vector<float> x(count);
  std::vector<float> y(count);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = -86.0F * static_cast<float>(i) / static_cast<float>(count - 1);
  }
  transform(Elementwise::exp, std::span<const float>(x), std::span<float>(y));
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    int exponent = 0;
    std::frexp(exact, &exponent);
    worst = std::max(worst,
                     std::abs(static_cast<double>(y[i]) - exact) / std::ldexp(1.0, exponent - 24));
  }
  return worst;
}

void exp_values(benchmark::State& state, std::int64_t count) {
  const double max_ulp = exp_max_ulp();
  if (!(max_ulp <= 1.5)) {
    state.SkipWithError("core.exp: the values are wrong");
    return;
  }
  std::vector<float> x(static_cast<std::size_t>(count));
  std::vector<float> y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = -20.0F * static_cast<float>(i) / static_cast<float>(count);
  }
  const auto run = [&] {
    transform(Elementwise::exp, std::span<const float>(x), std::span<float>(y));
    benchmark::ClobberMemory();
  };
  const int runs = runs_of_a_millisecond(run);
  std::vector<double> seconds;
  for ([[maybe_unused]] const auto _ : state) {
    seconds.push_back(seconds_of([&] {
                        for (int i = 0; i < runs; ++i) {
                          run();
                        }
                      }) /
                      runs);
    state.SetIterationTime(seconds.back());
  }
  state.counters["ns_per_value"] = 1e9 * median(seconds) / static_cast<double>(count);
  state.counters["max_ulp"] = max_ulp;
}

template <class T>
void add_packed(const PeerProduct& product) {
  add_gemm<T>("core.gemm", "packed", product, engine);
  add_gemm<T>("core.gemm_prepacked", "packed", product, prepacked);
  add_peers<T>(product);
}

void register_all(Shapes shapes) {
  std::vector<PeerProduct> packed;
  for (const std::int64_t m : {256, 1024}) {
    for (const std::int64_t k : {256, 1024}) {
      for (const std::int64_t n : {256, 1024}) {
        packed.push_back({m, k, n});
      }
    }
  }
  packed.push_back({64, 4096, 1024});
  if (shapes != Shapes::ci) {
    packed.push_back({512, 4096, 4096});
  }
  for (const PeerProduct& product : packed) {
    add_packed<float>(product);
    add_packed<bfloat16>(product);
  }
  // The recurrence's: [W;Q] S, P N, K^T N.
  const std::vector<PeerProduct> direct = {
      {64, 128, 128}, {64, 64, 128}, {128, 64, 128, true, true}};
  for (const PeerProduct& product : direct) {
    add_gemm<float>("core.gemm", "direct", product, inner);
    add_peers<float>(product);
    add_avx2<float>("direct", product, inner);
  }
  const PeerProduct large{256, 1024, 1024};
  add_avx2<float>("packed", large, engine);
  add_avx2<bfloat16>("packed", large, engine);
  add_threads<float>({1024, 1024, 1024});
  add_threads<bfloat16>({1024, 1024, 1024});
  constexpr std::int64_t values = 4096;
  add("core.exp/f32/n:" + std::to_string(values),
      [](benchmark::State& state) { exp_values(state, values); });
}

}  // namespace
}  // namespace heddle::bench

int main(int argc, char** argv) {
  return heddle::bench::run(argc, argv, heddle::bench::register_all);
}

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/routing_window.hpp"
#include "heddle/moe/sort.hpp"
#include "moe_problem.hpp"
#include "support/copy_twin.hpp"
#include "support/paired.hpp"
#include "support/read_twin.hpp"
#include "support/shapes.hpp"

namespace heddle::bench {

/// Argsort of the ids as the standard library does it, and its inverse.
class StableSort {
 public:
  explicit StableSort(std::span<const std::int32_t> ids)
      : ids_(ids), permutation_(ids.size()), inverse_(ids.size()) {}

  void operator()() {
    std::iota(permutation_.begin(), permutation_.end(), 0);
    std::stable_sort(permutation_.begin(), permutation_.end(),
                     [this](std::int32_t a, std::int32_t b) {
                       return ids_[static_cast<std::size_t>(a)] < ids_[static_cast<std::size_t>(b)];
                     });
    for (std::size_t j = 0; j < permutation_.size(); ++j) {
      inverse_[static_cast<std::size_t>(permutation_[j])] = static_cast<std::int32_t>(j);
    }
  }
  [[nodiscard]] bool agrees(const moe::RoutingMap& map) const {
    return std::ranges::equal(map.permutation, permutation_) &&
           std::ranges::equal(map.inverse, inverse_);
  }

 private:
  std::span<const std::int32_t> ids_;
  std::vector<std::int32_t> permutation_, inverse_;
};

inline void moe_maps(benchmark::State& state, const moe::RouterDims& dims) {
  RoutedTokens routed(dims);
  StableSort stable_sort(routed.ids());
  stable_sort();
  if (!stable_sort.agrees(routed.map())) {
    state.SkipWithError("moe.maps: the map is not the stable sort");
    return;
  }
  constexpr int builds = 8;  // a sample of a millisecond or more
  const auto build = [&] {
    for (int i = 0; i < builds; ++i) {
      routed.build();
    }
  };
  Pairs pairs;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(pairs.run(build, [&] { stable_sort(); }) / builds);
  }
  state.counters["ratio_stable_sort"] = builds * pairs.ratio();
  state.counters["us"] = 1e6 * pairs.seconds() / builds;
}

/// Hidden rows of tokens, and their rows at the experts.
template <class S>
class RowsOfExperts {
 public:
  RowsOfExperts(const moe::RouterDims& dims, std::int64_t hidden)
      : routed(dims),
        window(moe::routing_window(routed.map())),
        tokens(take_normals<S>(memory_, dims.tokens, hidden, 1.0, 2)),
        rows(take_normals<S>(memory_, dims.slots(), hidden, 1.0, 3)),
        out(take_normals<S>(memory_, dims.tokens, hidden, 1.0, 4)),
        weights(take_normals<float>(memory_, dims.tokens, dims.top_k, 0.1, 5)) {}

 private:
  Workspace memory_;

 public:
  RoutedTokens routed;
  moe::RoutingWindow window;
  MatrixView<S> tokens, rows, out;
  MatrixView<float> weights;

  [[nodiscard]] std::int64_t row_bytes() const {
    return rows.rows() * rows.cols() * static_cast<std::int64_t>(sizeof(S));
  }
};

template <class S>
void moe_sort(benchmark::State& state, const moe::RouterDims& dims, std::int64_t hidden) {
  const RowsOfExperts<S> p(dims, hidden);
  const moe::RoutingMap& map = p.routed.map();
  const CopyTwin copy(p.row_bytes());
  const auto sort = [&] { moe::sort<S>(map, p.window, p.tokens, p.rows); };
  sort();
  for (std::int64_t j = 0; j < dims.slots(); ++j) {
    if (std::memcmp(p.rows.row(j).data(), p.tokens.row(map.token_of(j)).data(),
                    static_cast<std::size_t>(hidden) * sizeof(S)) != 0) {
      state.SkipWithError("moe.sort: a row is not its token's");
      return;
    }
  }
  Pairs pairs;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(pairs.run(sort, copy));
  }
  state.counters["frac_bw"] = pairs.ratio();
  state.counters["gbps"] = 1e-9 * static_cast<double>(p.row_bytes()) / pairs.seconds();
}

template <class S>
void moe_unsort(benchmark::State& state, const moe::RouterDims& dims, std::int64_t hidden) {
  const RowsOfExperts<S> p(dims, hidden);
  const moe::RoutingMap& map = p.routed.map();
  const ReadTwin read(p.row_bytes());
  const auto unsort = [&] { moe::unsort<S>(map, p.window, p.weights, p.rows, p.out); };
  unsort();
  for (std::int64_t t = 0; t < dims.tokens; t += 97) {
    for (std::int64_t d = 0; d < hidden; ++d) {
      double sum = 0;
      double magnitude = 0;
      for (std::int64_t k = 0; k < dims.top_k; ++k) {
        const std::int64_t row = map.inverse[static_cast<std::size_t>(t * dims.top_k + k)];
        const double term =
            static_cast<double>(p.weights(t, k)) * static_cast<double>(p.rows(row, d));
        sum += term;
        magnitude += term < 0 ? -term : term;
      }
      const double error = static_cast<double>(p.out(t, d)) - sum;
      if (!((error < 0 ? -error : error) <= 0x1p-8 * magnitude)) {
        state.SkipWithError("moe.unsort: a sum is wrong");
        return;
      }
    }
  }
  Pairs pairs;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(pairs.run(unsort, read));
  }
  state.counters["frac_bw"] = pairs.ratio();
  state.counters["gbps"] = 1e-9 * static_cast<double>(p.row_bytes()) / pairs.seconds();
}

inline void register_moe_rows(Shapes shapes) {
  moe::RouterDims map_dims{.tokens = 512, .experts = 64, .top_k = 10};
  moe::RouterDims row_dims{.tokens = 205, .experts = 64, .top_k = 10};
  std::int64_t hidden = 1024;
  if (shapes != Shapes::ci) {
    map_dims = {.tokens = shapes == Shapes::standard ? 16384 : 65536, .experts = 512, .top_k = 10};
    row_dims = {.tokens = 16384, .experts = 512, .top_k = 10};
    hidden = 4096;
  }
  const auto extents = [](const moe::RouterDims& dims) {
    return "/T:" + std::to_string(dims.tokens) + "/K:" + std::to_string(dims.top_k) +
           "/E:" + std::to_string(dims.experts);
  };
  benchmark::RegisterBenchmark(("moe.maps/i32" + extents(map_dims)).c_str(),
                               [map_dims](benchmark::State& state) { moe_maps(state, map_dims); })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
  const std::string rows = extents(row_dims) + "/D:" + std::to_string(hidden);
  const auto add = [&](const std::string& name, auto* run) {
    benchmark::RegisterBenchmark(
        (name + rows).c_str(),
        [run, row_dims, hidden](benchmark::State& state) { run(state, row_dims, hidden); })
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  };
  add("moe.sort/bf16", &moe_sort<bfloat16>);
  add("moe.unsort/bf16", &moe_unsort<bfloat16>);
}

}  // namespace heddle::bench

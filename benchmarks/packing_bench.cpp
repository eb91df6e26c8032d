#include "heddle/packing/pack.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "heddle/core/workspace.hpp"
#include "support/copy_twin.hpp"
#include "support/paired.hpp"
#include "support/program.hpp"

namespace heddle::bench {
namespace {

struct RowShape {
  std::int64_t rows = 1;
  std::int64_t tokens = 0;
  std::int32_t layers = 0;
  std::int32_t top_k = 10;
};

/// Rows of seven documents, 93 % full, with old log-probs and routing of the whole item.
class RowsProblem {
 public:
  explicit RowsProblem(const RowShape& shape)
      : options_{.budget = shape.tokens,
                 .pack_size = shape.rows,
                 .pad_id = -1,
                 .pad_position = packing::PadPosition::start,
                 .pad_align = 64} {
    constexpr double shares[] = {0.266, 0.195, 0.147, 0.123, 0.096, 0.069, 0.033};
    std::minstd_rand random(1);
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      for (const double share : shares) {
        const auto length = static_cast<std::int64_t>(share * static_cast<double>(shape.tokens));
        const auto ids = memory_.take<std::int32_t>(length);
        const auto logps = memory_.take<float>(length);
        const auto routed = memory_.take<std::int16_t>(length * shape.layers * shape.top_k);
        std::generate(ids.begin(), ids.end(), [&] { return static_cast<int>(random() % 248320); });
        std::fill(logps.begin(), logps.end(), -0.5F);
        std::generate(routed.begin(), routed.end(), [next = random()]() mutable {
          return static_cast<std::int16_t>(next++ % 512);
        });
        packing::Rollout item{.prompt_ids = ids.first(ids.size() / 8),
                              .completion_ids = ids.subspan(ids.size() / 8),
                              .advantages = 0.25F};
        item.per_token[packing::PerTokenField::old_per_token_logps] = std::span<const float>(logps);
        item.routed_experts = packing::RoutedExperts{
            .ids = routed, .tokens = length, .layers = shape.layers, .top_k = shape.top_k};
        items_.push_back(item);
      }
    }
    table_ = packing::plan(items_, options_);
    dims_ = packing::chunk_dims(items_, table_, {0, shape.rows}, shape.tokens);
    arrays_ = buffers_.prepare(dims_);
  }

  void write() const {
    packing::write_rows(items_, table_, {0, dims_.rows}, options_.pad_id, arrays_);
  }

  [[nodiscard]] std::int64_t payload_bytes() const { return packing::cost(dims_, 0).bytes_written; }

  /// Ids and routing of every position against the items.
  [[nodiscard]] bool is_right() const {
    for (std::int64_t row = 0; row < dims_.rows; ++row) {
      const auto segments = table_.row(row);
      for (std::int64_t t = 0; t < dims_.tokens; ++t) {
        const auto found =
            std::find_if(segments.begin(), segments.end(),
                         [t](const packing::Segment& s) { return s.start <= t && t < s.end(); });
        const auto routed = arrays_.routed_experts.row(row * dims_.tokens + t);
        if (found == segments.end()) {
          if (arrays_.ids(row, t) != options_.pad_id ||
              !std::all_of(routed.begin(), routed.end(), [](int id) { return id == -1; })) {
            return false;
          }
          continue;
        }
        const packing::Rollout& item = items_[static_cast<std::size_t>(found->item_index)];
        const std::int64_t p = t - found->start;  // the item's ids lie one after the other
        if (arrays_.ids(row, t) != item.prompt_ids.data()[p] ||
            !std::equal(routed.begin(), routed.end(),
                        item.routed_experts->ids.data() + p * dims_.routed_per_token())) {
          return false;
        }
      }
    }
    return true;
  }

 private:
  packing::PackOptions options_;
  Workspace memory_;
  std::vector<packing::Rollout> items_;
  packing::SegmentTable table_;
  packing::ChunkDims dims_;
  packing::ChunkBuffers buffers_;
  packing::ChunkArrays arrays_;
};

void rows(benchmark::State& state, const RowShape& shape) {
  const RowsProblem problem(shape);
  const CopyTwin copy(problem.payload_bytes());
  problem.write();
  if (!problem.is_right()) {
    state.SkipWithError("packing.rows: the rows are wrong");
    return;
  }
  Pairs pairs;
  for ([[maybe_unused]] const auto _ : state) {
    state.SetIterationTime(pairs.run([&] { problem.write(); }, copy));
  }
  const double tokens = static_cast<double>(shape.rows * shape.tokens);
  state.counters["frac_bw"] = pairs.ratio();
  state.counters["gbps"] = 1e-9 * static_cast<double>(problem.payload_bytes()) / pairs.seconds();
  state.counters["tokens_s"] = tokens / pairs.seconds();
}

/// Lengths as rollouts have them: log-normal, median 12,000.
std::vector<std::int32_t> rollout_lengths(std::int64_t count, std::int64_t budget) {
  std::mt19937_64 random(1);
  std::lognormal_distribution<double> length(std::log(12000.0), 0.5);
  std::vector<std::int32_t> lengths;
  while (std::cmp_less(lengths.size(), count)) {
    lengths.push_back(
        static_cast<std::int32_t>(std::clamp(length(random), 1.0, static_cast<double>(budget))));
  }
  return lengths;
}

/// Every item in one bin, no bin beyond its budget.
bool is_right(const packing::BinAssignment& assignment, std::span<const std::int32_t> lengths,
              const packing::BinLimits& limits) {
  std::vector<int> times(lengths.size(), 0);
  for (std::int64_t bin = 0; bin < assignment.bins(); ++bin) {
    std::int64_t load = 0;
    for (const std::int32_t item : assignment.bin(bin)) {
      ++times[static_cast<std::size_t>(item)];
      load = packing::align_up(load, limits.segment_align_multiple) +
             lengths[static_cast<std::size_t>(item)];
    }
    if (load > limits.budget) {
      return false;
    }
  }
  return std::all_of(times.begin(), times.end(), [](int count) { return count == 1; });
}

void bins(benchmark::State& state, std::int64_t count) {
  constexpr std::int64_t budget = 65536;
  const std::vector<std::int32_t> lengths = rollout_lengths(count, budget);
  const packing::BinLimits limits{.budget = budget, .segment_align_multiple = 64};
  packing::BinAssignment assignment = packing::first_fit_decreasing(lengths, limits);
  if (!is_right(assignment, lengths, limits)) {
    state.SkipWithError("packing.bins: the bins are wrong");
    return;
  }
  std::vector<double> seconds;
  for ([[maybe_unused]] const auto _ : state) {
    seconds.push_back(
        seconds_of([&] { assignment = packing::first_fit_decreasing(lengths, limits); }));
    state.SetIterationTime(seconds.back());
  }
  state.counters["ms"] = 1e3 * median(seconds);
  state.counters["bins"] = static_cast<double>(assignment.bins());
}

void register_all(Shapes shapes) {
  RowShape shape;
  switch (shapes) {
    case Shapes::ci:
      shape = {.rows = 1, .tokens = 4096, .layers = 2};
      break;
    case Shapes::standard:
      shape = {.rows = 1, .tokens = 65536, .layers = 60};
      break;
    case Shapes::geometry:
      shape = {.rows = 4, .tokens = 65536, .layers = 60};
      break;
  }
  const std::string name = "packing.rows/i16/T:" + std::to_string(shape.tokens) +
                           "/L:" + std::to_string(shape.layers) +
                           "/K:" + std::to_string(shape.top_k) + "/B:" + std::to_string(shape.rows);
  benchmark::RegisterBenchmark(name.c_str(),
                               [shape](benchmark::State& state) { rows(state, shape); })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
  constexpr std::int64_t lengths = 100'000;
  benchmark::RegisterBenchmark(("packing.bins/i32/n:" + std::to_string(lengths)).c_str(),
                               [](benchmark::State& state) { bins(state, lengths); })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

}  // namespace
}  // namespace heddle::bench

int main(int argc, char** argv) {
  return heddle::bench::run(argc, argv, heddle::bench::register_all);
}

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "moe_problem.hpp"
#include "support/fma_rate.hpp"
#include "support/paired.hpp"
#include "support/shapes.hpp"

namespace heddle::bench {

/// How rows spread over the experts.
enum class Spread {
  uniform,
  skewed,  ///< a quarter has none, the largest between four and five times the mean
};

[[nodiscard]] constexpr const char* name(Spread spread) {
  return spread == Spread::uniform ? "uniform" : "skewed";
}

struct ExpertShape {
  std::int64_t experts = 0;
  std::int64_t hidden = 0;  // D
  std::int64_t width = 0;   // F
  std::int64_t rows = 0;    // an expert, on average
  Spread spread = Spread::uniform;

  [[nodiscard]] std::int64_t total_rows() const { return experts * rows; }
  [[nodiscard]] std::string text() const {
    return std::string(name(spread)) + "/E:" + std::to_string(experts) +
           "/D:" + std::to_string(hidden) + "/F:" + std::to_string(width) +
           "/rows:" + std::to_string(rows);
  }
};

/// Rows of each expert, total_rows() in all.
[[nodiscard]] inline std::vector<std::int64_t> group_sizes(const ExpertShape& shape) {
  const auto experts = static_cast<std::size_t>(shape.experts);
  if (shape.spread == Spread::uniform) {
    return std::vector<std::int64_t>(experts, shape.rows);
  }
  std::minstd_rand random(7);
  std::vector<std::int64_t> sizes(experts, 0);
  std::vector<double> shares(experts, 0.0);
  double total = 0;
  for (std::size_t e = 0; e < experts; ++e) {
    const double u = std::uniform_real_distribution<double>(0, 1)(random);
    shares[e] = e % 4 == 1 ? 0 : 0.05 + u * u;
    total += shares[e];
  }
  std::int64_t left = shape.total_rows();
  for (std::size_t e = 0; e < experts; ++e) {
    sizes[e] =
        static_cast<std::int64_t>(shares[e] / total * static_cast<double>(shape.total_rows()));
    left -= sizes[e];
  }
  *std::max_element(sizes.begin(), sizes.end()) += left;
  return sizes;
}

[[nodiscard]] inline std::vector<std::int64_t> offsets_of(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> offsets = {0};
  for (const std::int64_t size : sizes) {
    offsets.push_back(offsets.back() + size);
  }
  return offsets;
}

/// Shapes of a run, mean and skewed.
[[nodiscard]] inline ExpertShape expert_shape(Shapes shapes, Spread spread) {
  switch (shapes) {
    case Shapes::ci:
      return {.experts = 8, .hidden = 1024, .width = 512, .rows = 32, .spread = spread};
    case Shapes::standard:
      return {.experts = 64, .hidden = 4096, .width = 1024, .rows = 64, .spread = spread};
    case Shapes::geometry:  // one of eight row slices of 81,920 rows
      return {.experts = 64, .hidden = 4096, .width = 1024, .rows = 160, .spread = spread};
  }
  return {};
}

/// Shares of this thread's f32 rate, each run between two looks at it.
class RateShare {
 public:
  template <class Own>
  double run(double flops, const Own& own) {
    const double before = fma_gflops();
    seconds_.push_back(seconds_of(own));
    shares_.push_back(1e-9 * flops / seconds_.back() / (0.5 * (before + fma_gflops())));
    return seconds_.back();
  }
  [[nodiscard]] double share() const { return median(shares_); }
  [[nodiscard]] double seconds() const { return median(seconds_); }

 private:
  std::vector<double> seconds_, shares_;
};

}  // namespace heddle::bench

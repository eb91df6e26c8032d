#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"

namespace heddle::train {

struct AdamWOptions {
  double learning_rate = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

/// AdamW (decoupled weight decay) over a flat array of parameters: at step n,
///   p <- p - rate * decay * p
///   m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2
///   p <- p - rate * (m / (1 - beta1^n)) / (sqrt(v / (1 - beta2^n)) + eps)
///
/// dtypes    parameters, gradient and moments in the Accumulator, the two corrections in double
/// order     elementwise: bits do not depend on the threads
/// memory    two moments a parameter
/// throws    Error for arrays of another length than the first step's
/// source    Loshchilov and Hutter, Decoupled Weight Decay Regularization
template <Accumulator A>
class AdamW {
 public:
  explicit AdamW(std::int64_t parameters, const AdamWOptions& options)
      : options_(options),
        first_moment_(static_cast<std::size_t>(parameters)),
        second_moment_(static_cast<std::size_t>(parameters)) {}

  /// Begins step n + 1: every update() until the next call belongs to it.
  void begin_step() { ++step_; }

  /// Updates parameters [first, first + values.size()).
  void update(std::int64_t first, std::span<A> values, std::span<const A> gradient) {
    require_equal("train::AdamW::update", "gradient.size", gradient.size(), "values.size",
                  values.size());
    const auto n = static_cast<double>(step_);
    const A rate = static_cast<A>(options_.learning_rate);
    const A keep = A{1} - static_cast<A>(options_.learning_rate * options_.weight_decay);
    const A beta1 = static_cast<A>(options_.beta1);
    const A beta2 = static_cast<A>(options_.beta2);
    const A rest1 = static_cast<A>(1 - options_.beta1);
    const A rest2 = static_cast<A>(1 - options_.beta2);
    const A unbias1 = static_cast<A>(1 / (1 - std::pow(options_.beta1, n)));
    const A unbias2 = static_cast<A>(1 / (1 - std::pow(options_.beta2, n)));
    const A eps = static_cast<A>(options_.eps);
    A* const moment = first_moment_.data() + first;
    A* const square = second_moment_.data() + first;
    constexpr std::int64_t grain = 1 << 14;  // about 50 us, what a task is worth
    parallel_blocks(
        static_cast<std::int64_t>(values.size()), grain, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) {
            const A g = gradient[static_cast<std::size_t>(i)];
            A& p = values[static_cast<std::size_t>(i)];
            moment[i] = beta1 * moment[i] + rest1 * g;
            square[i] = beta2 * square[i] + rest2 * g * g;
            p = p * keep - rate * (moment[i] * unbias1) / (std::sqrt(square[i] * unbias2) + eps);
          }
        });
  }

 private:
  AdamWOptions options_;
  std::int64_t step_ = 0;
  std::vector<A> first_moment_;
  std::vector<A> second_moment_;
};

}  // namespace heddle::train

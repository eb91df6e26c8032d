#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "heddle-train/adamw.hpp"
#include "heddle-train/model.hpp"
#include "heddle-train/parameters.hpp"
#include "heddle-train/row_passes.hpp"
#include "heddle-train/step_rows.hpp"
#include "heddle/core/scalar.hpp"
#include "support/tensor.hpp"

namespace heddle::train {

struct TrainerOptions {
  AdamWOptions adamw = {};
  std::int64_t updates_per_step = 1;
  /// Rows whose gradients are formed before the next begin; all of a step where absent.
  std::optional<std::int64_t> micro_batch = std::nullopt;
  moe::RouterTraining router = moe::RouterTraining::trained;
};

/// What a step's first update saw: the model before it.
struct StepReport {
  double loss = 0;
  std::optional<double> logp_rewarded;  ///< mean per completion token; none without such a token
  std::optional<double> logp_unrewarded;
  std::optional<double> entropy;  ///< mean per completion token
  double grad_norm = 0;
  std::int64_t tokens = 0;
  double seconds = 0;  ///< of all the step's updates
  double padding_share = 0;
  std::int64_t busiest_tiles = 0;
  std::int64_t dropped_slots = 0;

  [[nodiscard]] std::optional<double> logp_gap() const {
    return logp_rewarded && logp_unrewarded ? std::optional(*logp_rewarded - *logp_unrewarded)
                                            : std::nullopt;
  }
};

/// GRPO with AdamW: clip 0.2 / 0.2, no KL term, every completion token of the step weighed alike, the
/// gradient's norm not clipped. Old log-probs are the rollouts' or the model's before the step.
///
/// order     the gradient is a sum over rows in order: the same bits for any micro-batch and any
///           number of threads
/// throws    std::runtime_error naming the step where loss or gradient are not finite; the parameters
///           are then as they were before the update
template <Storage S>
class Trainer {
 public:
  using A = AccumulatorOf<S>;

  Trainer(const ParameterLayout& layout, std::vector<A> parameters, const TrainerOptions& options);

  [[nodiscard]] const std::vector<A>& parameters() const { return parameters_; }

  /// One step. `progress` is told the rows done so far, over all the step's updates.
  /// Where `dump` is wanted it gets what --dump-step writes, of the first update.
  StepReport step(StepRows<A>& rows, const std::function<void(std::int64_t)>& progress,
                  std::vector<examples::Tensor>* dump);

 private:
  struct Sums;
  double accumulate_gradient(StepRows<A>& rows, bool take_old_logps,
                             const std::function<void()>& row_done, Sums* sums);
  [[nodiscard]] double gradient_norm() const;
  void update();

  const ParameterLayout& layout_;
  TrainerOptions options_;
  std::int64_t steps_ = 0;
  std::vector<A> parameters_;
  std::vector<A> gradient_;
  AdamW<A> adamw_;
  Model<S> model_;
  RowSlots<S> slots_;
};

}  // namespace heddle::train

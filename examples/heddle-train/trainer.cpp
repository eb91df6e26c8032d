#include "heddle-train/trainer.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "heddle-train/output_tensors.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/loss/grpo.hpp"
#include "heddle/loss/token_loss.hpp"

namespace heddle::train {
namespace {

struct Mean {
  double sum = 0;
  std::int64_t count = 0;

  void add(double value) {
    sum += value;
    ++count;
  }
  [[nodiscard]] std::optional<double> value() const {
    return count == 0 ? std::nullopt : std::optional(sum / static_cast<double>(count));
  }
};

loss::GrpoOptions loss_options() {
  loss::GrpoOptions options;
  options.aggregation = loss::Aggregation::token_mean;
  return options;
}

/// The loss of one row's tokens, and the weights that it reads.
template <class A>
class RowLoss {
 public:
  RowLoss(const loss::GrpoOptions& options, loss::GrpoInputs<A> inputs, std::vector<double> weights)
      : weights_(std::move(weights)), loss_(options, with_weights(inputs)) {}
  RowLoss(const RowLoss&) = delete;
  RowLoss& operator=(const RowLoss&) = delete;

  [[nodiscard]] loss::TokenShare<A> operator()(std::int64_t token, A logp, A entropy) const {
    return loss_(token, logp, entropy);
  }

 private:
  [[nodiscard]] loss::GrpoInputs<A> with_weights(loss::GrpoInputs<A> inputs) const {
    inputs.weights = weights_;
    return inputs;
  }

  std::vector<double> weights_;
  loss::GrpoTokenLoss<A> loss_;
};

}  // namespace

// What is gathered, row after row, while the first update's gradient is formed.
template <Storage S>
struct Trainer<S>::Sums {
  Mean rewarded;
  Mean unrewarded;
  Mean entropy;
  bool keep_tokens = false;  // for a dump
  std::vector<A> logps;
  std::vector<A> entropies;
  std::vector<std::int32_t> expert_ids;

  void add(const StepRows<A>& step, std::int64_t row, const RowActivations<S>& kept) {
    const std::span<const std::uint8_t> mask = step.row(step.mask, row);
    const std::span<const Outcome> outcome = step.row(step.outcome, row);
    for (std::size_t t = 0; t < mask.size(); ++t) {
      if (mask[t] == 0) {
        continue;
      }
      entropy.add(static_cast<double>(kept.entropy[t]));
      if (outcome[t] == Outcome::rewarded) {
        rewarded.add(static_cast<double>(kept.logps[t]));
      } else if (outcome[t] == Outcome::unrewarded) {
        unrewarded.add(static_cast<double>(kept.logps[t]));
      }
    }
    if (keep_tokens) {
      logps.insert(logps.end(), kept.logps.begin(), kept.logps.end());
      entropies.insert(entropies.end(), kept.entropy.begin(), kept.entropy.end());
      copy_expert_ids(kept, step.rows * step.tokens, row * step.tokens,
                      std::span<std::int32_t>(expert_ids));
    }
  }
};

template <Storage S>
Trainer<S>::Trainer(const ParameterLayout& layout, std::vector<A> parameters,
                    const TrainerOptions& options)
    : layout_(layout),
      options_(options),
      parameters_(std::move(parameters)),
      gradient_(parameters_.size()),
      adamw_(layout.size(), options.adamw),
      model_(layout, parameters_, options.router) {}

// The gradient of the step's loss, which is returned.
template <Storage S>
double Trainer<S>::accumulate_gradient(StepRows<A>& step, bool take_old_logps,
                                       const std::function<void()>& row_done, Sums* sums) {
  const loss::GrpoOptions options = loss_options();
  std::fill(gradient_.begin(), gradient_.end(), A(0));
  std::vector<double> losses(static_cast<std::size_t>(step.rows));
  // A row whose log-probs are to be the old ones has every ratio 1, before they are known.
  const auto loss_of = [&](std::int64_t row) {
    const std::span<const std::uint8_t> mask = step.row(std::as_const(step.mask), row);
    const std::span<const std::int32_t> segments = step.row(std::as_const(step.segment_ids), row);
    std::vector<double> weights(mask.size());
    loss::token_weights(options, step.counts, mask, segments, weights);
    return RowLoss<A>(options,
                      {.logps = {},
                       .old_logps = take_old_logps ? std::span<const A>()
                                                   : step.row(std::as_const(step.old_logps), row),
                       .ref_logps = {},
                       .advantages = step.row(std::as_const(step.advantages), row),
                       .importance_weights = {},
                       .mask = mask,
                       .segment_ids = segments,
                       .weights = {}},
                      std::move(weights));
  };
  const auto fold_from = [&](std::int64_t first) {
    return [&, first](std::int64_t row, const RowActivations<S>& kept, double loss) {
      if (take_old_logps) {
        std::ranges::copy(kept.logps, step.row(step.old_logps, first + row).begin());
      }
      losses[static_cast<std::size_t>(first + row)] = loss;
      if (sums != nullptr) {
        sums->add(step, first + row, kept);
      }
      row_done();
    };
  };

  std::vector<RowInputs> inputs;
  const std::int64_t batch = std::min(options_.micro_batch.value_or(step.rows), step.rows);
  for (std::int64_t first = 0; first < step.rows; first += batch) {
    const std::int64_t last = std::min(first + batch, step.rows);
    inputs.clear();
    for (std::int64_t row = first; row < last; ++row) {
      inputs.push_back(step.inputs(row));
    }
    pass_rows_with_loss(
        model_, std::span<const RowInputs>(inputs), slots_, std::span<A>(gradient_),
        [&, first](std::int64_t row) { return loss_of(first + row); }, fold_from(first));
  }
  double loss = 0;
  for (const double row_loss : losses) {
    loss += row_loss;
  }
  return loss;
}

template <Storage S>
double Trainer<S>::gradient_norm() const {
  constexpr std::int64_t grain = 1 << 14;
  const auto size = static_cast<std::int64_t>(gradient_.size());
  std::vector<double> squares(static_cast<std::size_t>((size + grain - 1) / grain));
  parallel_blocks(size, grain, [&](std::int64_t first, std::int64_t last) {
    double sum = 0;
    for (std::int64_t i = first; i < last; ++i) {
      const auto g = static_cast<double>(gradient_[static_cast<std::size_t>(i)]);
      sum += g * g;
    }
    squares[static_cast<std::size_t>(first / grain)] = sum;
  });
  double total = 0;
  for (const double sum : squares) {
    total += sum;
  }
  return std::sqrt(total);
}

// Every parameter but a frozen router's, which is none of the optimizer's: weight decay would move it.
template <Storage S>
void Trainer<S>::update() {
  adamw_.begin_step();
  std::int64_t begin = 0;
  const auto update_until = [&](std::int64_t end) {
    const auto at = static_cast<std::size_t>(begin);
    const auto count = static_cast<std::size_t>(end - begin);
    adamw_.update(begin, std::span<A>(parameters_).subspan(at, count),
                  std::span<const A>(gradient_).subspan(at, count));
  };
  for (const TensorPlace& place : layout_.tensors()) {
    if (place.router && options_.router == moe::RouterTraining::frozen) {
      update_until(place.offset);
      begin = place.offset + place.size();
    }
  }
  update_until(layout_.size());
  model_.refresh();
}

template <Storage S>
StepReport Trainer<S>::step(StepRows<A>& rows, const std::function<void(std::int64_t)>& progress,
                            std::vector<examples::Tensor>* dump) {
  const auto start = std::chrono::steady_clock::now();
  ++steps_;
  std::int64_t passed = 0;
  const auto row_done = [&] { progress(++passed); };
  const auto positions = static_cast<std::size_t>(rows.rows * rows.tokens);
  const bool take_old_logps = rows.old_logps.empty();
  rows.old_logps.resize(positions);

  const ModelDims& dims = layout_.dims();
  Sums sums;
  sums.keep_tokens = dump != nullptr;
  if (dump != nullptr) {
    sums.expert_ids.resize(static_cast<std::size_t>(dims.layers) * positions *
                           static_cast<std::size_t>(dims.experts_per_token));
  }
  StepReport report;
  for (std::int64_t n = 0; n < options_.updates_per_step; ++n) {
    const bool first = n == 0;
    const double loss =
        accumulate_gradient(rows, first && take_old_logps, row_done, first ? &sums : nullptr);
    const double norm = gradient_norm();
    if (!std::isfinite(loss) || !std::isfinite(norm)) {
      throw std::runtime_error("step " + std::to_string(steps_) + ": the loss is " +
                               error_text(loss) + " and its gradient's norm " + error_text(norm) +
                               ": training cannot go on from here");
    }
    if (first) {
      report.loss = loss;
      report.grad_norm = norm;
      if (dump != nullptr) {
        const examples::Shape shape = {rows.rows, rows.tokens};
        dump->push_back(examples::Tensor::of("token_ids", shape, rows.token_ids));
        dump->push_back(examples::Tensor::of("segment_ids", shape, rows.segment_ids));
        dump->push_back(examples::Tensor::of("logps", shape, sums.logps));
        dump->push_back(examples::Tensor::of("entropy", shape, sums.entropies));
        dump->push_back(examples::Tensor::of(
            "expert_ids", {dims.layers, rows.rows * rows.tokens, dims.experts_per_token},
            sums.expert_ids));
        dump->push_back(examples::Tensor::of("loss", {1}, std::vector<A>{static_cast<A>(loss)}));
        dump->push_back(
            examples::Tensor::of("grad_norm", {1}, std::vector<A>{static_cast<A>(norm)}));
        append_parameter_tensors("grad.", layout_, std::span<const A>(gradient_), *dump);
      }
    }
    update();
    if (first && dump != nullptr) {
      append_parameter_tensors("updated.", layout_, std::span<const A>(parameters_), *dump);
    }
  }
  report.logp_rewarded = sums.rewarded.value();
  report.logp_unrewarded = sums.unrewarded.value();
  report.entropy = sums.entropy.value();
  report.tokens = rows.real_tokens;
  report.padding_share =
      positions == 0 ? 0
                     : 1 - static_cast<double>(rows.real_tokens) / static_cast<double>(positions);
  report.busiest_tiles = rows.busiest_tiles;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

template class Trainer<float>;
template class Trainer<double>;
template class Trainer<bfloat16>;

}  // namespace heddle::train

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/numerics/difference.hpp"
#include "heddle/numerics/tensor.hpp"

/// Gates hold a candidate run against a baseline run. Each is one number with a limit: the larger of a
/// floor, which says what rounding alone may do, and a multiple of what two correct runs differ by.
///
/// Scalars first, as trainers have them: loss, log-probs, entropy, gradient norm, dropped slots,
/// parameter update norm. They pass a gradient whose sign is flipped, whose halves are swapped or that
/// is rotated, for none of them sees a direction; the gates of each tensor are for that.
///
/// source    spec/head.md 9
namespace heddle::numerics {

/// What a gate measures.
enum class GateKind {
  // Scalars of a run.
  loss,           ///< relative
  log_prob,       ///< largest difference of a token's
  entropy,        ///< largest difference of a token's, relative to it or to the mean token's
  grad_norm,      ///< relative
  dropped_slots,  ///< difference of the counts
  update_norm,    ///< relative; the norm of what the optimizer adds to the parameters
  // Of each floating tensor: see Difference.
  relative_l2,
  one_minus_cosine,
  norm_ratio,
  worst_row,
  directional_derivative,  ///< of a gradient against central differences, relative to its norm
  // Of each tensor of integers: how many tokens' sets of expert ids, or how many entries, differ.
  expert_ids,
  equal,
  // What must be so before anything is measured; the value counts what is not.
  finite,
  shape,
  names,
};

/// As reports spell it.
[[nodiscard]] constexpr std::string_view name(GateKind kind) {
  switch (kind) {
    case GateKind::loss:
      return "loss";
    case GateKind::log_prob:
      return "log_prob";
    case GateKind::entropy:
      return "entropy";
    case GateKind::grad_norm:
      return "grad_norm";
    case GateKind::dropped_slots:
      return "dropped_slots";
    case GateKind::update_norm:
      return "update_norm";
    case GateKind::relative_l2:
      return "relative_l2";
    case GateKind::one_minus_cosine:
      return "one_minus_cosine";
    case GateKind::norm_ratio:
      return "norm_ratio";
    case GateKind::worst_row:
      return "worst_row";
    case GateKind::directional_derivative:
      return "directional_derivative";
    case GateKind::expert_ids:
      return "expert_ids";
    case GateKind::equal:
      return "equal";
    case GateKind::finite:
      return "finite";
    case GateKind::shape:
      return "shape";
    case GateKind::names:
      return "names";
  }
  return "unknown gate";
}

/// Whether the value is a share of the baseline's, so that 1 is what nothing at all in its place has.
[[nodiscard]] constexpr bool is_relative(GateKind kind) {
  switch (kind) {
    case GateKind::loss:
    case GateKind::entropy:
    case GateKind::grad_norm:
    case GateKind::update_norm:
    case GateKind::relative_l2:
    case GateKind::one_minus_cosine:
    case GateKind::norm_ratio:
    case GateKind::worst_row:
    case GateKind::directional_derivative:
      return true;
    case GateKind::log_prob:
    case GateKind::dropped_slots:
    case GateKind::expert_ids:
    case GateKind::equal:
    case GateKind::finite:
    case GateKind::shape:
    case GateKind::names:
      return false;
  }
  return false;
}

/// One verdict.
struct Gate {
  GateKind kind = GateKind::relative_l2;
  std::string tensor = {};  ///< empty of a scalar of the run
  double value = 0;         ///< NaN where there is nothing to measure
  double limit = 0;
  bool passed = false;
  std::string reason = {};  ///< what the value alone does not say; mostly empty
};

/// What a log-prob's difference is told in.
enum class LogProbUnit {
  nats,
  ulps,  ///< of the larger of |logp| and |log-sum-exp|: those of a log-prob near 0 mean nothing
};

/// What rounding alone may do to each figure.
struct Floors {
  double loss = 0;
  double log_prob = 0;
  LogProbUnit log_prob_unit = LogProbUnit::nats;
  double entropy = 0;
  double grad_norm = 0;
  double dropped_slots = 0;
  double update_norm = 0;
  double relative_l2 = 0;
  double one_minus_cosine = 0;
  double norm_ratio = 0;
  double worst_row = 0;
  double directional_derivative = 0;
  double expert_ids = 0;  ///< share of the tokens, at least one token unless it is 0

  /// Of a gate whose limit is a matter of the figure alone.
  [[nodiscard]] constexpr double of(GateKind kind) const {
    switch (kind) {
      case GateKind::loss:
        return loss;
      case GateKind::log_prob:
        return log_prob;
      case GateKind::entropy:
        return entropy;
      case GateKind::grad_norm:
        return grad_norm;
      case GateKind::dropped_slots:
        return dropped_slots;
      case GateKind::update_norm:
        return update_norm;
      case GateKind::relative_l2:
        return relative_l2;
      case GateKind::one_minus_cosine:
        return one_minus_cosine;
      case GateKind::norm_ratio:
        return norm_ratio;
      case GateKind::worst_row:
        return worst_row;
      case GateKind::directional_derivative:
        return directional_derivative;
      case GateKind::expert_ids:
        return expert_ids;
      case GateKind::equal:
      case GateKind::finite:
      case GateKind::shape:
      case GateKind::names:
        return 0;
    }
    return 0;
  }
};

/// Of one kernel on equal inputs, computed in f32.
inline constexpr Floors kernel_f32 = {.loss = 1e-6,
                                      .log_prob = 2,
                                      .log_prob_unit = LogProbUnit::ulps,
                                      .entropy = 1e-6,
                                      .grad_norm = 2e-6,
                                      .update_norm = 2e-6,
                                      .relative_l2 = 2e-6,
                                      .one_minus_cosine = 1e-11,
                                      .norm_ratio = 2e-6,
                                      .worst_row = 1e-5,
                                      .directional_derivative = 1e-6};

/// The same of outputs that are rounded to bf16, which alone is 1.7e-3 of their norm.
inline constexpr Floors kernel_bf16 = {.loss = 1e-6,
                                       .log_prob = 2,
                                       .log_prob_unit = LogProbUnit::ulps,
                                       .entropy = 1e-6,
                                       .grad_norm = 1e-3,
                                       .update_norm = 1e-3,
                                       .relative_l2 = 5e-3,
                                       .one_minus_cosine = 1.25e-5,
                                       .norm_ratio = 1e-3,
                                       .worst_row = 2e-2,
                                       .directional_derivative = 1e-6};

/// Of a whole model's step in f32, where every layer's rounding goes through all that follow. The limit
/// of the gradient norm is the one that trainers' published gates have; the parameter update's norm has
/// the same. A token in a thousand may sit on a near tie of its experts. Against the same step in double
/// a model of two layers is 2e-6 of relative L2 off, 8e-7 of a tensor's norm, 5e-6 of a row, 8e-7 nats.
inline constexpr Floors whole_model_f32 = {.loss = 1e-5,
                                           .log_prob = 1e-4,
                                           .log_prob_unit = LogProbUnit::nats,
                                           .entropy = 1e-5,
                                           .grad_norm = 2e-3,
                                           .update_norm = 2e-3,
                                           .relative_l2 = 1e-4,
                                           .one_minus_cosine = 1e-8,
                                           .norm_ratio = 2e-5,
                                           .worst_row = 5e-4,
                                           .directional_derivative = 1e-6,
                                           .expert_ids = 1e-3};

/// Of the parameters after such a step. Adam divides a gradient's entry by its own size, so one that is
/// nothing but rounding moves its parameter by a whole learning rate, to either side: eight times what the
/// model above is off after its first step, 2.3e-5 of relative L2 and 2.1e-4 of a row.
inline constexpr Floors updated_f32 = {
    .relative_l2 = 2e-4, .one_minus_cosine = 2e-8, .norm_ratio = 2e-5, .worst_row = 2e-3};

/// How many times the spread of two correct runs a figure may be.
inline constexpr double noise_factor = 8;

/// A figure against its limit, max(floor, 8 x noise).
///
/// specials  a value or noise that is NaN fails; so does a relative gate whose limit reaches 1, which
///           would pass zeros in the tensor's place
[[nodiscard]] inline Gate judge(GateKind kind, std::string tensor, double value, double floor,
                                std::optional<double> noise = {}) {
  Gate gate{.kind = kind, .tensor = std::move(tensor), .value = value, .limit = floor};
  if (noise) {
    // Written so that a NaN noise stays and fails.
    gate.limit = noise_factor * *noise <= floor ? floor : noise_factor * *noise;
  }
  gate.passed = value <= gate.limit;
  if (is_relative(kind) && !(gate.limit < 1)) {
    gate.passed = false;
    gate.reason = "the noise is too large to judge by";
  }
  return gate;
}

/// |candidate - baseline| / |baseline|: 0 of equal numbers, infinite where the baseline alone is 0.
[[nodiscard]] inline double relative_difference(double baseline, double candidate) {
  return candidate == baseline ? 0 : std::abs(candidate - baseline) / std::abs(baseline);
}

namespace detail {

/// "1e-3", "inf", "nan" without a sign: whose bits a NaN has is no matter here.
[[nodiscard]] inline std::string number_text(double value) {
  return std::isnan(value) ? "nan" : error_text(value);
}

}  // namespace detail

/// The verdict on what is not finite, which no other gate of the tensor could measure.
[[nodiscard]] inline Gate not_finite(const NamedTensor& tensor, const NonFinite& found) {
  return {.kind = GateKind::finite,
          .tensor = tensor.name,
          .value = static_cast<double>(found.count),
          .limit = 0,
          .passed = false,
          .reason = "entry " + entry_text(tensor.shape, found.entry) + " is " +
                    detail::number_text(found.candidate) + " against " +
                    detail::number_text(found.baseline)};
}

/// The gates of one floating tensor: relative L2, cosine, norm ratio and, where there are several rows,
/// the worst of them. `noise` is what measure() finds between two correct runs.
[[nodiscard]] inline std::vector<Gate> judge_tensor(const NamedTensor& baseline,
                                                    const NamedTensor& candidate,
                                                    const Floors& floors,
                                                    const std::optional<Difference>& noise = {}) {
  const Difference found = measure(baseline, candidate);
  if (found.non_finite) {
    return {not_finite(baseline, *found.non_finite)};
  }
  std::vector<Gate> gates;
  const auto add = [&](GateKind kind, double Difference::*figure) {
    gates.push_back(judge(kind, baseline.name, found.*figure, floors.of(kind),
                          noise ? std::optional((*noise).*figure) : std::nullopt));
    if (found.zero && gates.back().reason.empty()) {
      gates.back().reason = baseline.size() == 0 ? "no elements" : "zero on both sides";
    }
  };
  add(GateKind::relative_l2, &Difference::relative_l2);
  add(GateKind::one_minus_cosine, &Difference::one_minus_cosine);
  add(GateKind::norm_ratio, &Difference::norm_ratio);
  if (baseline.rows() > 1) {
    add(GateKind::worst_row, &Difference::worst_row);
    if (!gates.back().passed && gates.back().reason.empty()) {
      gates.back().reason = "row " + std::to_string(found.worst_row_index);
    }
  }
  return gates;
}

/// The gate of a scalar of the run: loss, gradient norm, parameter update norm (relative), dropped slots
/// (a count). `noise` is the value that this gate has between two correct runs.
///
/// throws    Error for another kind
[[nodiscard]] inline Gate judge_scalar(GateKind kind, double baseline, double candidate,
                                       const Floors& floors, std::optional<double> noise = {}) {
  require(kind == GateKind::loss || kind == GateKind::grad_norm || kind == GateKind::update_norm ||
              kind == GateKind::dropped_slots,
          "numerics::judge_scalar", "kind", name(kind),
          "must be loss, grad_norm, update_norm or dropped_slots");
  const double value =
      is_relative(kind) ? relative_difference(baseline, candidate) : std::abs(candidate - baseline);
  Gate gate = judge(kind, {}, value, floors.of(kind), noise);
  if (!std::isfinite(baseline) || !std::isfinite(candidate)) {
    gate.value = std::numeric_limits<double>::quiet_NaN();
    gate.passed = false;
    gate.reason = detail::number_text(candidate) + " against " + detail::number_text(baseline);
  }
  return gate;
}

/// Also of none.
[[nodiscard]] inline bool all_passed(const std::vector<Gate>& gates) {
  return std::ranges::all_of(gates, &Gate::passed);
}

}  // namespace heddle::numerics

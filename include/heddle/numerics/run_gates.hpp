#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/numerics/detail/run_tensors.hpp"
#include "heddle/numerics/difference.hpp"
#include "heddle/numerics/expert_ids.hpp"
#include "heddle/numerics/gates.hpp"
#include "heddle/numerics/tensor.hpp"
#include "heddle/numerics/token_difference.hpp"

namespace heddle::numerics {

/// What two runs share, which says what rounding may do.
enum class RunKind {
  kernel,       ///< one kernel on equal inputs
  whole_model,  ///< a step of a model
};

/// A run is a whole model's where a tensor is a gradient or an updated parameter of it ("grad.",
/// "updated."), or where a loss stands beside log-probs.
[[nodiscard]] inline RunKind kind_of(std::span<const NamedTensor> run) {
  const auto has = [run](std::string_view name) {
    return std::ranges::any_of(run, [name](const NamedTensor& t) { return t.name == name; });
  };
  const bool parameters = std::ranges::any_of(run, [](const NamedTensor& tensor) {
    return tensor.name.starts_with("grad.") || tensor.name.starts_with("updated.");
  });
  return parameters || (has("loss") && has("logps")) ? RunKind::whole_model : RunKind::kernel;
}

/// The verdicts on a run, scalars of the run first, then tensor by tensor in the baseline's order.
struct RunReport {
  std::vector<Gate> gates;
  std::vector<RoutedElsewhere> routed_elsewhere;
  std::int64_t routed_tokens = 0;  ///< of the baseline

  [[nodiscard]] bool passed() const { return all_passed(gates); }
};

namespace detail {

/// Holds runs against one baseline.
class RunJudge {
 public:
  RunJudge(std::span<const NamedTensor> baseline, std::span<const NamedTensor> candidate,
           std::span<const NamedTensor> noise, RunKind kind)
      : baseline_(baseline),
        candidate_(candidate),
        by_name_(where, "baseline", baseline),
        of_candidate_(where, "candidate", candidate),
        of_noise_(where, "noise", noise),
        has_noise_(!noise.empty()),
        kind_(kind) {
    require_noise();
    routing_ = routing_between(by_name_, of_candidate_);
    if (has_noise_) {
      noise_routing_ = routing_between(by_name_, of_noise_);
    }
  }

  [[nodiscard]] RunReport report() {
    std::vector<const NamedTensor*> order;
    for (const NamedTensor& tensor : baseline_) {
      order.push_back(&tensor);
    }
    std::ranges::stable_sort(order, {}, [](const NamedTensor* t) { return place_of(*t); });
    for (const NamedTensor* const tensor : order) {
      judge_one(*tensor);
    }
    for (const NamedTensor& tensor : candidate_) {
      if (by_name_.find(tensor.name) == nullptr) {
        add({.kind = GateKind::names,
             .tensor = tensor.name,
             .value = 1,
             .reason = "not in the baseline"});
      }
    }
    report_.routed_elsewhere = routing_.elsewhere;
    return std::move(report_);
  }

 private:
  static constexpr const char* where = "numerics::judge_runs";

  void require_noise() const {
    if (!has_noise_) {
      return;
    }
    for (const NamedTensor& tensor : baseline_) {
      const NamedTensor* const other = of_noise_.find(tensor.name);
      require(other != nullptr, where, "noise", tensor.name, "must be in every run");
      require(same_form(tensor, *other), where, "noise", tensor.name,
              "must be the baseline's " + form_text(tensor) + ", is " + form_text(*other));
      // Another input would pass for noise, and its spread would let anything through.
      require(role_of(tensor) != Role::integers || entries_that_differ(tensor, *other) == 0, where,
              "noise", tensor.name, "integers must be the baseline's");
    }
  }

  void add(Gate gate) { report_.gates.push_back(std::move(gate)); }

  [[nodiscard]] Floors floors_of(const NamedTensor& a, const NamedTensor& b) const {
    if (kind_ == RunKind::whole_model) {
      return a.name.starts_with("updated.") ? updated_f32 : whole_model_f32;
    }
    const bool bf16 = a.is_floating() && std::min(a.element_bytes(), b.element_bytes()) ==
                                             static_cast<std::int64_t>(sizeof(bfloat16));
    return bf16 ? kernel_bf16 : kernel_f32;
  }

  void judge_one(const NamedTensor& baseline) {
    const NamedTensor* const candidate = of_candidate_.find(baseline.name);
    if (candidate == nullptr) {
      add({.kind = GateKind::names,
           .tensor = baseline.name,
           .value = 1,
           .reason = "not in the candidate"});
      return;
    }
    if (!same_form(baseline, *candidate)) {
      add({.kind = GateKind::shape,
           .tensor = baseline.name,
           .value = 1,
           .reason = form_text(*candidate) + " against " + form_text(baseline)});
      return;
    }
    const NamedTensor* const noise = of_noise_.find(baseline.name);
    const Floors floors = floors_of(baseline, *candidate);
    switch (role_of(baseline)) {
      case Role::scalar:
        judge_number(baseline, *candidate, noise, floors);
        return;
      case Role::log_prob:
      case Role::entropy:
        judge_tokens(baseline, *candidate, noise, floors);
        return;
      case Role::expert_ids:
        judge_routing(baseline, floors);
        return;
      case Role::tensor:
        judge_values(baseline, *candidate, noise, floors);
        return;
      case Role::integers:
        add(judge(GateKind::equal, baseline.name,
                  static_cast<double>(entries_that_differ(baseline, *candidate)), 0));
        return;
    }
  }

  void judge_number(const NamedTensor& baseline, const NamedTensor& candidate,
                    const NamedTensor* noise, const Floors& floors) {
    const GateKind kind = *scalar_kind(baseline);
    const double b = baseline.read_all<double>().front();
    const double c = candidate.read_all<double>().front();
    std::optional<double> spread;
    if (noise != nullptr) {
      const double n = noise->read_all<double>().front();
      require(std::isfinite(n), where, "noise", baseline.name, "must be finite");
      spread = judge_scalar(kind, b, n, floors).value;
    }
    add(judge_scalar(kind, b, c, floors, spread));
  }

  [[nodiscard]] TokenDifference token_difference(const NamedTensor& baseline,
                                                 const NamedTensor& other, const Routing& routing,
                                                 const Floors& floors) const {
    std::span<const std::uint8_t> left_out = routing.left_out;
    if (std::cmp_not_equal(left_out.size(), baseline.size())) {
      left_out = {};
    }
    return role_of(baseline) == Role::entropy
               ? entropy_difference(baseline, other, left_out)
               : log_prob_difference(baseline, other, floors.log_prob_unit,
                                     lse_of(by_name_, baseline.size()), left_out);
  }

  void judge_tokens(const NamedTensor& baseline, const NamedTensor& candidate,
                    const NamedTensor* noise, const Floors& floors) {
    const GateKind kind =
        role_of(baseline) == Role::entropy ? GateKind::entropy : GateKind::log_prob;
    const TokenDifference found = token_difference(baseline, candidate, routing_, floors);
    if (found.non_finite) {
      add(not_finite(baseline, *found.non_finite));
      return;
    }
    std::optional<double> spread;
    if (noise != nullptr) {
      const TokenDifference other = token_difference(baseline, *noise, noise_routing_, floors);
      require(!other.non_finite, where, "noise", baseline.name, "must be finite");
      spread = other.value;
    }
    Gate gate = judge(kind, {}, found.value, floors.of(kind), spread);
    if (found.compared == 0 && baseline.size() > 0) {
      gate.passed = false;
      gate.reason = "every entry is left out";
    } else if (!gate.passed && gate.reason.empty()) {
      gate.reason = "entry " + entry_text(baseline.shape, found.entry);
    } else if (gate.reason.empty() && found.compared < baseline.size()) {
      gate.reason = std::to_string(baseline.size() - found.compared) + " entries left out";
    }
    add(std::move(gate));
  }

  /// The limit is a number of tokens: a share of those that are routed at all, at least one.
  void judge_routing(const NamedTensor& baseline, const Floors& floors) {
    const auto ids = baseline.read_all<std::int32_t>();
    const ExpertIds routing = expert_ids_of(baseline, ids);
    report_.routed_tokens = 0;
    for (std::int64_t token = 0; token < routing.tokens; ++token) {
      for (std::int64_t layer = 0; layer < routing.layers; ++layer) {
        if (std::ranges::any_of(routing.of(layer, token), [](auto id) { return id >= 0; })) {
          ++report_.routed_tokens;
          break;
        }
      }
    }
    const double share = floors.expert_ids * static_cast<double>(report_.routed_tokens);
    const double floor = floors.expert_ids == 0 ? 0 : std::max(1.0, std::floor(share));
    add(judge(GateKind::expert_ids, baseline.name, static_cast<double>(routing_.elsewhere.size()),
              floor,
              has_noise_ ? std::optional(static_cast<double>(noise_routing_.elsewhere.size()))
                         : std::nullopt));
  }

  void judge_values(const NamedTensor& baseline, const NamedTensor& candidate,
                    const NamedTensor* noise, const Floors& floors) {
    std::optional<Difference> spread;
    if (noise != nullptr) {
      spread = measure(baseline, *noise);
      require(!spread->non_finite || !std::isfinite(spread->non_finite->baseline), where, "noise",
              baseline.name, "must be finite");
    }
    for (Gate& gate : judge_tensor(baseline, candidate, floors, spread)) {
      add(std::move(gate));
    }
  }

  std::span<const NamedTensor> baseline_;
  std::span<const NamedTensor> candidate_;
  RunIndex by_name_;
  RunIndex of_candidate_;
  RunIndex of_noise_;
  bool has_noise_;
  RunKind kind_;
  Routing routing_;
  Routing noise_routing_;
  RunReport report_;
};

}  // namespace detail

/// Holds a candidate run against a baseline run, tensor by tensor of equal names. `noise` is another
/// correct run, or empty: the spread between it and the baseline widens the limits.
///
/// shapes    by name: loss, grad_norm, update_norm [1], dropped_slots [1] are scalar gates; logps, entropy
///           (floating) one entry a token, logps in ulps of max + log(exp_sum) where those are there too
///           and the run is a kernel's; expert_ids [layers.., tokens, K]; every other floating tensor has
///           the gates of a tensor, every other one of integers must be equal
/// specials  a token whose set of experts differs is counted, listed and left out of logps and entropy with
///           all entries that it reaches. A name on one side alone, another shape, an integer against a
///           floating tensor, an entry that is NaN or infinite on either side: a gate that fails
/// order     fixed: the same bits for the same runs
/// memory    two doubles an entry of logps; nothing of the size of other tensors but of their rows
/// throws    Error for a tensor whose elements are not its shape's, a name given twice, a noise run that lacks
///           a tensor of the baseline or holds another shape, other integers or what is not finite
/// source    spec/head.md 9
[[nodiscard]] inline RunReport judge_runs(std::span<const NamedTensor> baseline,
                                          std::span<const NamedTensor> candidate,
                                          std::span<const NamedTensor> noise, RunKind kind) {
  return detail::RunJudge(baseline, candidate, noise, kind).report();
}

/// The same, of the kind that the baseline's names tell.
[[nodiscard]] inline RunReport judge_runs(std::span<const NamedTensor> baseline,
                                          std::span<const NamedTensor> candidate,
                                          std::span<const NamedTensor> noise = {}) {
  return judge_runs(baseline, candidate, noise, kind_of(baseline));
}

}  // namespace heddle::numerics

#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/numerics/expert_ids.hpp"
#include "heddle/numerics/gates.hpp"
#include "heddle/numerics/tensor.hpp"

namespace heddle::numerics::detail {

/// A run's tensors by name.
class RunIndex {
 public:
  RunIndex(std::string_view where, std::string_view argument, std::span<const NamedTensor> run) {
    for (std::size_t i = 0; i < run.size(); ++i) {
      run[i].validate(where);
      require(tensors_.emplace(run[i].name, &run[i]).second, where,
              element_name(argument, i) + ".name", run[i].name,
              "must be the name of one tensor alone");
    }
  }

  [[nodiscard]] const NamedTensor* find(std::string_view name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : found->second;
  }

 private:
  std::map<std::string_view, const NamedTensor*> tensors_;
};

/// "floating [2, 3]": types may differ in width.
[[nodiscard]] inline std::string form_text(const NamedTensor& tensor) {
  std::string text = tensor.is_floating() ? "floating [" : "integer [";
  for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(tensor.shape[axis]);
  }
  return text + "]";
}

[[nodiscard]] inline bool same_form(const NamedTensor& a, const NamedTensor& b) {
  return a.shape == b.shape && a.is_floating() == b.is_floating();
}

/// The entries where tensors of integers differ, exactly.
[[nodiscard]] inline std::int64_t entries_that_differ(const NamedTensor& a, const NamedTensor& b) {
  const auto x = a.read_all<std::int64_t>();
  const auto y = b.read_all<std::int64_t>();
  std::int64_t count = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    count += x[i] != y[i] ? 1 : 0;
  }
  return count;
}

/// How a tensor is judged, by its name and form.
enum class Role { scalar, log_prob, entropy, expert_ids, tensor, integers };

inline constexpr std::array scalar_kinds = {GateKind::loss, GateKind::grad_norm,
                                            GateKind::dropped_slots, GateKind::update_norm};

[[nodiscard]] inline std::optional<GateKind> scalar_kind(const NamedTensor& tensor) {
  for (const GateKind kind : scalar_kinds) {
    if (tensor.name == name(kind) && tensor.size() == 1) {
      return kind;
    }
  }
  return std::nullopt;
}

[[nodiscard]] inline Role role_of(const NamedTensor& tensor) {
  if (scalar_kind(tensor)) {
    return Role::scalar;
  }
  if (!tensor.is_floating()) {
    return tensor.name == "expert_ids" && tensor.shape.size() >= 2 ? Role::expert_ids
                                                                   : Role::integers;
  }
  if (tensor.name == "logps") {
    return Role::log_prob;
  }
  return tensor.name == "entropy" ? Role::entropy : Role::tensor;
}

/// Where its gates stand in a report: the scalars of a run, in the order of GateKind, the routing, all
/// else.
[[nodiscard]] inline int place_of(const NamedTensor& tensor) {
  switch (role_of(tensor)) {
    case Role::scalar:
      return static_cast<int>(*scalar_kind(tensor));
    case Role::log_prob:
      return static_cast<int>(GateKind::log_prob);
    case Role::entropy:
      return static_cast<int>(GateKind::entropy);
    case Role::expert_ids:
      return static_cast<int>(GateKind::expert_ids);
    case Role::tensor:
    case Role::integers:
      return static_cast<int>(GateKind::names);
  }
  return static_cast<int>(GateKind::names);
}

/// The tokens that another run sends elsewhere than the baseline, and the entries they reach.
struct Routing {
  std::vector<RoutedElsewhere> elsewhere;
  std::vector<std::uint8_t> left_out;  // of the tokens; empty where there is no routing to compare
};

[[nodiscard]] inline ExpertIds expert_ids_of(const NamedTensor& tensor,
                                             std::span<const std::int32_t> ids) {
  const std::size_t axes = tensor.shape.size();
  ExpertIds result{
      .layers = 1, .tokens = tensor.shape[axes - 2], .top_k = tensor.shape[axes - 1], .ids = ids};
  for (std::size_t axis = 0; axis + 2 < axes; ++axis) {
    result.layers *= tensor.shape[axis];
  }
  return result;
}

[[nodiscard]] inline Routing routing_between(const RunIndex& baseline, const RunIndex& other) {
  const NamedTensor* const b = baseline.find("expert_ids");
  const NamedTensor* const o = other.find("expert_ids");
  if (b == nullptr || o == nullptr || role_of(*b) != Role::expert_ids || !same_form(*b, *o)) {
    return {};
  }
  const auto b_ids = b->read_all<std::int32_t>();
  const auto o_ids = o->read_all<std::int32_t>();
  const ExpertIds b_routing = expert_ids_of(*b, b_ids);
  Routing routing{.elsewhere = routed_elsewhere(b_routing, expert_ids_of(*o, o_ids)),
                  .left_out = {}};
  const NamedTensor* const logps = baseline.find("logps");
  const NamedTensor* const segments = baseline.find("segment_ids");
  std::vector<std::int32_t> segment_ids;
  if (segments != nullptr && segments->size() == b_routing.tokens) {
    segment_ids = segments->read_all<std::int32_t>();
  }
  if (logps != nullptr && logps->size() == b_routing.tokens && logps->size() > 0) {
    routing.left_out = reached_entries(routing.elsewhere, {.tokens = b_routing.tokens,
                                                           .row_tokens = logps->row_size(),
                                                           .layers = b_routing.layers,
                                                           .segment_ids = segment_ids});
  }
  return routing;
}

/// log-sum-exp of the rows, where the baseline has its parts.
[[nodiscard]] inline std::vector<double> lse_of(const RunIndex& run, std::int64_t size) {
  const NamedTensor* const max = run.find("max");
  const NamedTensor* const exp_sum = run.find("exp_sum");
  if (max == nullptr || exp_sum == nullptr || max->size() != size || exp_sum->size() != size) {
    return {};
  }
  std::vector<double> lse = max->read_all<double>();
  const std::vector<double> sums = exp_sum->read_all<double>();
  for (std::size_t t = 0; t < lse.size(); ++t) {
    lse[t] += std::log(sums[t]);
  }
  return lse;
}

}  // namespace heddle::numerics::detail

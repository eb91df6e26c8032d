#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "heddle/core/workspace.hpp"
#include "heddle/moe/expert_layer.hpp"
#include "moe/problem.hpp"

namespace heddle::moe::test {

/// One layer of the fast tier with its residuals; everything is poisoned before it is written.
template <class S, class R = S>
class LayerRun {
 public:
  using A = AccumulatorOf<S>;

  explicit LayerRun(const Problem<S, R>& problem, float poison_value = poison<float>())
      : problem_(problem), poison_(poison_value), maps_(map_workspace_) {
    poison_memory(workspace_, 1 << 20);
    poison_memory(memory_, static_cast<std::int64_t>(
                               residual_bytes<S>(problem.dims, problem.options.dispatch)));
    residuals_ = take_residuals<S>(problem.dims, problem.options.dispatch, memory_);
  }

  [[nodiscard]] Result<A> forward(bool with_residuals = true) {
    const Dims& d = problem_.dims;
    const auto poisoned = [this](std::int64_t count) {
      return std::vector<A>(static_cast<std::size_t>(count), static_cast<A>(poison_));
    };
    Result<A> result{poisoned(d.tokens * d.hidden),
                     poisoned(d.slots()),
                     poisoned(d.tokens * d.experts),
                     std::vector<std::int32_t>(static_cast<std::size_t>(d.slots()), -77),
                     std::vector<std::int64_t>(static_cast<std::size_t>(d.experts), -77),
                     {}};
    result.report =
        moe::forward(d, problem_.inputs(), problem_.options,
                     Outputs<A>{.out = {result.out.data(), d.tokens, d.hidden},
                                .expert_ids = matrix(result.expert_ids, d.tokens, d.top_k),
                                .expert_weights = matrix(result.expert_weights, d.tokens, d.top_k),
                                .router_logits = matrix(result.router_logits, d.tokens, d.experts),
                                .group_sizes = result.group_sizes},
                     with_residuals ? residuals_ : Residuals<S>{}, maps_, workspace_);
    return result;
  }

  /// Of the forward that ran last with residuals.
  [[nodiscard]] Gradients<A> backward(Write write = Write::overwrite) {
    return backward(write, static_cast<A>(poison_));
  }
  [[nodiscard]] Gradients<A> backward(Write write, A before) {
    Gradients<A> gradients(problem_, before);
    moe::backward(problem_.dims, problem_.inputs(), problem_.cotangents(), problem_.options,
                  residuals_, gradients.views(problem_.dims, write), workspace_);
    return gradients;
  }

  [[nodiscard]] const Residuals<S>& residuals() const { return residuals_; }
  [[nodiscard]] Workspace& workspace() { return workspace_; }
  [[nodiscard]] std::int64_t maps_built() const { return maps_.maps_built(); }

 private:
  void poison_memory(Workspace& workspace, std::int64_t bytes) const {
    const Workspace::Frame frame(workspace);
    for (float& value : workspace.take<float>(bytes / 4)) {
      value = poison_;
    }
  }

  const Problem<S, R>& problem_;
  float poison_;
  Workspace map_workspace_;
  Workspace workspace_;
  Workspace memory_;
  RoutingMapBuilder maps_;
  Residuals<S> residuals_;
};

/// The pairs of a comparison of all gradients, with their names.
template <class A, class Use>
void for_each_gradient(const Gradients<A>& actual, const Gradients<A>& expected, const Use& use) {
  use("d_hidden", actual.d_hidden, expected.d_hidden);
  use("d_router_weight", actual.d_router_weight, expected.d_router_weight);
  use("d_wi", actual.d_wi, expected.d_wi);
  use("d_wo", actual.d_wo, expected.d_wo);
  use("d_shared_wi", actual.d_shared_wi, expected.d_shared_wi);
  use("d_shared_wo", actual.d_shared_wo, expected.d_shared_wo);
  use("d_shared_gate", actual.d_shared_gate, expected.d_shared_gate);
}

}  // namespace heddle::moe::test

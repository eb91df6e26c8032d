#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/reference.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle::moe::test {

using heddle::test::poison;

template <class T>
[[nodiscard]] ConstMatrixView<T> matrix(const std::vector<T>& values, std::int64_t rows,
                                        std::int64_t cols) {
  return values.empty() ? ConstMatrixView<T>() : ConstMatrixView<T>(values.data(), rows, cols);
}

template <class T>
[[nodiscard]] MatrixView<T> matrix(std::vector<T>& values, std::int64_t rows, std::int64_t cols) {
  return values.empty() ? MatrixView<T>() : MatrixView<T>(values.data(), rows, cols);
}

/// A layer call that owns its arrays, contiguous; an empty one is not given.
template <class S, class R = S>
struct Problem {
  using A = AccumulatorOf<S>;

  Dims dims;
  reference::Options options;
  std::vector<S> hidden, wi, wo, shared_wi, shared_wo, shared_gate, d_out;
  std::vector<R> router_weight;
  std::vector<std::int32_t> forced_ids, segment_ids;
  std::vector<A> d_router_logits;

  [[nodiscard]] reference::Inputs<S, R> inputs() const {
    const Dims& d = dims;
    return {.hidden = {hidden.data(), d.tokens, d.hidden},
            .router_weight = matrix(router_weight, d.hidden, d.experts),
            .wi = matrix(wi, d.experts * d.hidden, 2 * d.expert_hidden),
            .wo = matrix(wo, d.experts * d.expert_hidden, d.hidden),
            .shared_wi = matrix(shared_wi, d.hidden, 2 * d.shared_hidden),
            .shared_wo = matrix(shared_wo, d.shared_hidden, d.hidden),
            .shared_gate = matrix(shared_gate, d.hidden, 1),
            .forced_ids = matrix(forced_ids, d.tokens, d.top_k),
            .segment_ids = segment_ids};
  }
  [[nodiscard]] reference::OutputCotangents<S> cotangents() const {
    return {.d_out = {d_out.data(), dims.tokens, dims.hidden},
            .d_router_logits = matrix(d_router_logits, dims.tokens, dims.experts)};
  }
};

/// The outputs of a forward call, poisoned before it.
template <class A>
struct Result {
  std::vector<A> out, expert_weights, router_logits;
  std::vector<std::int32_t> expert_ids;
  std::vector<std::int64_t> group_sizes;
  reference::LayerReport report;
};

template <class S, class R>
[[nodiscard]] Result<AccumulatorOf<S>> run_forward(const Problem<S, R>& p) {
  using A = AccumulatorOf<S>;
  const Dims& d = p.dims;
  const auto poisoned = [](std::int64_t count) {
    return std::vector<A>(static_cast<std::size_t>(count), poison<A>());
  };
  Result<A> result{poisoned(d.tokens * d.hidden),
                   poisoned(d.slots()),
                   poisoned(d.tokens * d.experts),
                   std::vector<std::int32_t>(static_cast<std::size_t>(d.slots()), -77),
                   std::vector<std::int64_t>(static_cast<std::size_t>(d.experts), -77),
                   {}};
  result.report =
      reference::forward(d, p.inputs(), p.options,
                         {.out = {result.out.data(), d.tokens, d.hidden},
                          .expert_ids = matrix(result.expert_ids, d.tokens, d.top_k),
                          .expert_weights = matrix(result.expert_weights, d.tokens, d.top_k),
                          .router_logits = matrix(result.router_logits, d.tokens, d.experts),
                          .group_sizes = result.group_sizes});
  return result;
}

/// The cotangents of all inputs, poisoned before the call; of the shared expert where there is one.
template <class A>
struct Gradients {
  std::vector<A> d_hidden, d_router_weight, d_wi, d_wo, d_shared_wi, d_shared_wo, d_shared_gate;

  template <class S, class R>
  explicit Gradients(const Problem<S, R>& p, A value = poison<A>())
      : d_hidden(p.hidden.size(), value),
        d_router_weight(p.router_weight.size(), value),
        d_wi(p.wi.size(), value),
        d_wo(p.wo.size(), value),
        d_shared_wi(p.shared_wi.size(), value),
        d_shared_wo(p.shared_wo.size(), value),
        d_shared_gate(p.shared_gate.size(), value) {}

  [[nodiscard]] reference::InputCotangents<A> views(const Dims& d, Write write = Write::overwrite) {
    return {.d_hidden = {d_hidden.data(), d.tokens, d.hidden},
            .d_router_weight = {matrix(d_router_weight, d.hidden, d.experts), write},
            .d_wi = {matrix(d_wi, d.experts * d.hidden, 2 * d.expert_hidden), write},
            .d_wo = {matrix(d_wo, d.experts * d.expert_hidden, d.hidden), write},
            .d_shared_wi = {matrix(d_shared_wi, d.hidden, 2 * d.shared_hidden), write},
            .d_shared_wo = {matrix(d_shared_wo, d.shared_hidden, d.hidden), write},
            .d_shared_gate = {matrix(d_shared_gate, d.hidden, 1), write}};
  }

  /// The weights' cotangents, in the order of the members.
  [[nodiscard]] std::vector<std::vector<A>*> weights() {
    return {&d_router_weight, &d_wi, &d_wo, &d_shared_wi, &d_shared_wo, &d_shared_gate};
  }
};

template <class S, class R>
[[nodiscard]] Gradients<AccumulatorOf<S>> run_backward(const Problem<S, R>& p) {
  Gradients<AccumulatorOf<S>> gradients(p);
  reference::backward(p.dims, p.inputs(), p.cotangents(), p.options, gradients.views(p.dims));
  return gradients;
}

/// Random inputs and cotangents, exact in float, bf16 rounded.
template <class S, class R = S>
[[nodiscard]] Problem<S, R> random_problem(const Dims& dims, std::uint64_t seed) {
  heddle::test::Random random(seed);
  Problem<S, R> p;
  p.dims = dims;
  const Dims& d = dims;
  p.hidden = random.normals<S>(d.tokens * d.hidden);
  p.router_weight = random.normals<R>(d.hidden * d.experts);
  p.wi = random.normals<S>(d.experts * d.hidden * 2 * d.expert_hidden, 0.5);
  p.wo = random.normals<S>(d.experts * d.expert_hidden * d.hidden, 0.5);
  p.d_out = random.normals<S>(d.tokens * d.hidden);
  if (d.has_shared_expert()) {
    p.shared_wi = random.normals<S>(d.hidden * 2 * d.shared_hidden, 0.5);
    p.shared_wo = random.normals<S>(d.shared_hidden * d.hidden, 0.5);
    p.shared_gate = random.normals<S>(d.hidden, 0.5);
  }
  return p;
}

/// The layer from its definition, a token and a choice at a time, in double: `kept` says which
/// slots have a row (empty: all).
[[nodiscard]] inline std::vector<double> layer_by_definition(
    const Problem<double>& p, const std::vector<std::uint8_t>& kept = {}) {
  const auto D = static_cast<std::size_t>(p.dims.hidden);
  const auto E = static_cast<std::size_t>(p.dims.experts);
  const auto K = static_cast<std::size_t>(p.dims.top_k);
  const auto feed_forward = [&](const double* x, const double* wi, const double* wo, std::size_t F,
                                double weight, double* sum) {
    for (std::size_t f = 0; f < F; ++f) {
      double gate = 0;
      double up = 0;
      for (std::size_t d = 0; d < D; ++d) {
        gate += x[d] * wi[d * 2 * F + f];
        up += x[d] * wi[d * 2 * F + F + f];
      }
      const double activation = gate / (1 + std::exp(-gate)) * up;
      for (std::size_t d = 0; d < D; ++d) {
        sum[d] += weight * activation * wo[f * D + d];
      }
    }
  };
  std::vector<double> out(p.hidden.size(), 0.0);
  for (std::size_t t = 0; t < static_cast<std::size_t>(p.dims.tokens); ++t) {
    const double* const x = p.hidden.data() + t * D;
    double* const sum = out.data() + t * D;
    const bool routed = p.segment_ids.empty() || p.segment_ids[t] != 0 ||
                        p.options.router.padding == PaddingRouting::include;
    if (routed) {
      std::vector<double> logits(E, 0.0);
      for (std::size_t e = 0; e < E; ++e) {
        for (std::size_t d = 0; d < D; ++d) {
          logits[e] += x[d] * p.router_weight[d * E + e];
        }
      }
      std::vector<std::size_t> order(E);
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::stable_sort(order.begin(), order.end(),
                       [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
      const std::size_t terms = p.options.router.weights == TopKWeights::softmax_of_chosen ? K : E;
      double total = 0;
      for (std::size_t i = 0; i < terms; ++i) {
        total += std::exp(logits[order[i]] - logits[order[0]]);
      }
      const auto F = static_cast<std::size_t>(p.dims.expert_hidden);
      for (std::size_t k = 0; k < K; ++k) {
        if (kept.empty() || kept[t * K + k] != 0) {
          const std::size_t e = order[k];
          feed_forward(x, p.wi.data() + e * D * 2 * F, p.wo.data() + e * F * D, F,
                       std::exp(logits[e] - logits[order[0]]) / total, sum);
        }
      }
    }
    if (p.dims.has_shared_expert()) {
      double gate = 0;
      for (std::size_t d = 0; d < D; ++d) {
        gate += x[d] * p.shared_gate[d];
      }
      feed_forward(x, p.shared_wi.data(), p.shared_wo.data(),
                   static_cast<std::size_t>(p.dims.shared_hidden), 1 / (1 + std::exp(-gate)), sum);
    }
  }
  return out;
}

}  // namespace heddle::moe::test

#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <type_traits>

#include "heddle/core/factor.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/parallel_product.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/arguments.hpp"
#include "heddle/moe/detail/glu_rows.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/residuals.hpp"
#include "heddle/moe/routed_experts.hpp"
#include "heddle/moe/routing_map.hpp"
#include "heddle/moe/routing_window.hpp"

namespace heddle::moe::detail {

/// The shared expert is one that every token goes to once, padding too, with weight sigmoid(h *
/// shared_gate): one of the routed kind, whose map is the identity.
class SharedRouting {
 public:
  SharedRouting(std::int64_t most_tokens, Workspace& workspace)
      : slots_(workspace.take<std::int32_t>(most_tokens)),
        offsets_(workspace.take<std::int64_t>(2)) {
    std::iota(slots_.begin(), slots_.end(), 0);
    offsets_[0] = 0;
  }

  /// The map of so many tokens; the one before it is no more.
  [[nodiscard]] RoutingMap map(std::int64_t tokens) {
    offsets_[1] = tokens;
    const auto slots = slots_.first(static_cast<std::size_t>(tokens));
    return {.dims = {.tokens = tokens, .experts = 1, .top_k = 1},
            .experts = {.first = 0, .count = 1},
            .permutation = slots,
            .inverse = slots,
            .group_offsets = offsets_};
  }

  [[nodiscard]] static std::size_t bytes(std::int64_t most_tokens) {
    return Workspace::bytes_for<std::int32_t>(most_tokens) + Workspace::bytes_for<std::int64_t>(2);
  }

 private:
  std::span<std::int32_t> slots_;
  std::span<std::int64_t> offsets_;
};

template <Storage S, Storage R>
[[nodiscard]] ExpertWeights<S> shared_weights_of(const Inputs<S, R>& in) {
  return {.wi = in.shared_wi, .wo = in.shared_wo};
}

/// weights[t] = sigmoid(hidden[t] * shared_gate).
template <Storage S>
void shared_gates(ConstMatrixView<S> hidden, ConstMatrixView<S> shared_gate,
                  std::span<AccumulatorOf<S>> weights, Workspace& workspace) {
  using A = AccumulatorOf<S>;
  const Workspace::Frame frame(workspace);
  const auto gate = workspace.take<S>(hidden.cols());
  for (std::int64_t d = 0; d < hidden.cols(); ++d) {
    gate[static_cast<std::size_t>(d)] = shared_gate(d, 0);
  }
  parallel_blocks(hidden.rows(), 64, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      weights[static_cast<std::size_t>(t)] =
          plain_sigmoid(dot_row<A>(hidden.row(t).data(), gate.data(), hidden.cols()));
    }
  });
}

/// The shared expert's output of the tokens of one chunk, added to out.
template <Storage S, Storage R>
void shared_forward(SharedRouting& routing, const Inputs<S, R>& in, const GluOptions& options,
                    const RoutedOutputs<S, AccumulatorOf<S>>& out,
                    std::span<AccumulatorOf<S>> weights, ConstMatrixView<S> hidden,
                    Workspace& workspace) {
  shared_gates<S>(hidden, in.shared_gate, weights, workspace);
  const RoutingMap map = routing.map(hidden.rows());
  routed_experts<S, AccumulatorOf<S>>(map, routing_window(map), {weights.data(), hidden.rows(), 1},
                                      hidden, shared_weights_of(in), out, options, workspace);
}

/// Where the shared expert's backward writes for the tokens of one chunk.
template <Accumulator A>
struct SharedGradients {
  MatrixView<A> d_hidden;  ///< added to
  WeightCotangent<A> d_wi, d_wo, d_gate;
};

/// Through the shared expert and its gate: d_z = s (1 - s) <d_out, Y>, d_hidden += d_z * gate^T,
/// d_gate += hidden^T d_z.
template <Storage S, Storage R>
void shared_backward(SharedRouting& routing, const Inputs<S, R>& in, ConstMatrixView<S> hidden,
                     std::span<const AccumulatorOf<S>> weights, const RoutedCotangents<S>& d,
                     WeightGradFrom weight_grad_from, const GluOptions& options,
                     const SharedGradients<AccumulatorOf<S>>& out, Workspace& workspace) {
  using A = AccumulatorOf<S>;
  const std::int64_t tokens = hidden.rows();
  const Workspace::Frame frame(workspace);
  const MatrixView<A> d_gate = take_matrix<A>(workspace, tokens, 1);
  const RoutingMap map = routing.map(tokens);
  routed_experts_backward<S>(map, routing_window(map), {weights.data(), tokens, 1}, hidden,
                             shared_weights_of(in), d, weight_grad_from, options,
                             {.d_hidden = out.d_hidden,
                              .write = Write::accumulate,
                              .d_expert_weights = d_gate,
                              .d_wi = out.d_wi,
                              .d_wo = out.d_wo},
                             workspace);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const A weight = weights[static_cast<std::size_t>(t)];
    d_gate(t, 0) = weight * (A(1) - weight) * d_gate(t, 0);
  }
  const Factor<A> d_z = as_is(ConstMatrixView<A>(d_gate));
  parallel_multiply(d_z, transposed(in.shared_gate), out.d_hidden, Write::accumulate, workspace);
  if (out.d_gate.wanted()) {
    parallel_multiply(transposed(hidden), d_z, out.d_gate.values, out.d_gate.write, workspace);
  }
}

/// Scratch of both, beside that of the experts themselves.
template <Storage S>
[[nodiscard]] std::size_t shared_gate_bytes(std::int64_t tokens, std::int64_t hidden,
                                            std::int64_t threads) {
  using A = AccumulatorOf<S>;
  const std::int64_t most = std::max(tokens, hidden);
  return Workspace::bytes_for<A>(tokens) + Workspace::bytes_for<S>(hidden) +
         std::max(parallel_workspace_bytes<A, S>(1, most, most, most, threads),
                  parallel_workspace_bytes<S, A>(1, most, most, most, threads));
}

}  // namespace heddle::moe::detail

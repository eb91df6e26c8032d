#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/moe/arguments.hpp"
#include "heddle/moe/detail/reference_experts.hpp"
#include "heddle/moe/detail/reference_product.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/reference_drops.hpp"
#include "heddle/moe/reference_glu.hpp"
#include "heddle/moe/reference_maps.hpp"
#include "heddle/moe/reference_router.hpp"

namespace heddle::moe::reference {

// The arguments are those of the fast tier.
using moe::InputCotangents;
using moe::Inputs;
using moe::LayerReport;
using moe::Options;
using moe::OutputCotangents;
using moe::Outputs;

namespace detail {

/// What forward and backward both need to know before any expert computes.
template <Accumulator A>
struct Routing {
  std::vector<std::int32_t> tokens;  // the routed ones, ascending
  Matrix<A> logits;                  // [T,E]
  Matrix<std::int32_t> expert_ids;   // [T,K]
  Matrix<A> expert_weights;          // [T,K]
  std::vector<std::int64_t> group_sizes;
  ExpertRows<A> rows;                     // of the slots that keep one, in the order of the maps
  std::vector<std::int32_t> row_of_slot;  // [T*K], -1 without a row
  LayerReport report;
};

template <Storage S, Storage R>
[[nodiscard]] Routing<AccumulatorOf<S>> route_layer(const Dims& dims, const Inputs<S, R>& in,
                                                    const Options& options) {
  using A = AccumulatorOf<S>;
  const RouterDims router = dims.router();
  Routing<A> routing{{},
                     Matrix<A>(dims.tokens, dims.experts),
                     Matrix<std::int32_t>(dims.tokens, dims.top_k),
                     Matrix<A>(dims.tokens, dims.top_k),
                     {},
                     {},
                     std::vector<std::int32_t>(static_cast<std::size_t>(dims.slots()), -1),
                     {}};
  const bool excludes =
      options.router.padding == PaddingRouting::exclude && !in.segment_ids.empty();
  for (std::int32_t t = 0; t < dims.tokens; ++t) {
    if (!excludes || in.segment_ids[static_cast<std::size_t>(t)] != 0) {
      routing.tokens.push_back(t);
    }
  }
  const MatrixView<A> logits = routing.logits.view();
  parallel_blocks(
      static_cast<std::int64_t>(routing.tokens.size()), rows_per_task,
      [&](std::int64_t first, std::int64_t last) {
        const std::span<const std::int32_t> tokens(routing.tokens.data() + first,
                                                   static_cast<std::size_t>(last - first));
        const auto token = [&](std::int64_t i) {
          return std::int64_t{tokens[static_cast<std::size_t>(i)]};
        };
        product<A>(
            last - first, dims.experts, dims.hidden,
            [&](std::int64_t i, std::int64_t d) { return widen<A>(in.hidden(token(i), d)); },
            [&](std::int64_t d, std::int64_t e) { return widen<A>(in.router_weight(d, e)); },
            [&](std::int64_t i, std::int64_t e, A sum) { logits(token(i), e) = sum; });
      });

  routing.report.router = reference::route<A>(
      router, {.router_logits = logits, .forced_ids = in.forced_ids, .segment_ids = in.segment_ids},
      options.router,
      {.expert_ids = routing.expert_ids.view(), .expert_weights = routing.expert_weights.view()});
  const ConstMatrixView<std::int32_t> ids = std::as_const(routing.expert_ids).view();
  const ConstMatrixView<A> weights = std::as_const(routing.expert_weights).view();
  RoutingMaps maps = routing_maps(router, ids);
  const Dispatch dispatched = dispatch(router, ids, options.dispatch);

  routing.rows.offsets.push_back(0);
  for (std::size_t e = 0; e < maps.group_sizes.size(); ++e) {
    for (std::int64_t j = maps.group_offsets[e]; j < maps.group_offsets[e + 1]; ++j) {
      const std::int32_t slot = maps.permutation[static_cast<std::size_t>(j)];
      if (dispatched.kept[static_cast<std::size_t>(slot)] != 0) {
        const std::int64_t token = slot / dims.top_k;
        routing.row_of_slot[static_cast<std::size_t>(slot)] =
            static_cast<std::int32_t>(routing.rows.count());
        routing.rows.tokens.push_back(static_cast<std::int32_t>(token));
        routing.rows.weights.push_back(weights(token, slot % dims.top_k));
      }
    }
    routing.rows.offsets.push_back(routing.rows.count());
  }
  routing.report.routed_slots = maps.group_offsets.back();
  routing.report.dropped_slots = dispatched.dropped_slots;
  routing.report.largest_drop = dispatched.largest_drop;
  routing.report.buffer_rows = dispatched.buffer_rows;
  routing.report.required_factor = dispatched.required_factor;
  routing.group_sizes = std::move(maps.group_sizes);
  return routing;
}

template <Storage S, Storage R>
[[nodiscard]] Experts<S> routed_experts(const Dims& dims, const Inputs<S, R>& in) {
  return {.hidden = dims.hidden, .width = dims.expert_hidden, .wi = in.wi, .wo = in.wo};
}

template <Storage S, Storage R>
[[nodiscard]] Experts<S> shared_expert(const Dims& dims, const Inputs<S, R>& in) {
  return {
      .hidden = dims.hidden, .width = dims.shared_hidden, .wi = in.shared_wi, .wo = in.shared_wo};
}

/// The shared expert is one that every token goes to, padding too, with weight sigmoid(h *
/// shared_gate).
template <Storage S, Storage R>
[[nodiscard]] ExpertRows<AccumulatorOf<S>> shared_rows(const Dims& dims, const Inputs<S, R>& in) {
  using A = AccumulatorOf<S>;
  ExpertRows<A> rows;
  rows.tokens.resize(static_cast<std::size_t>(dims.tokens));
  std::iota(rows.tokens.begin(), rows.tokens.end(), 0);
  rows.weights.resize(rows.tokens.size());
  rows.offsets = {0, dims.tokens};
  parallel_blocks(dims.tokens, rows_per_task, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      A gate = A(0);
      for (std::int64_t d = 0; d < dims.hidden; ++d) {
        gate += widen<A>(in.hidden(t, d)) * widen<A>(in.shared_gate(d, 0));
      }
      rows.weights[static_cast<std::size_t>(t)] = sigmoid(gate);
    }
  });
  return rows;
}

/// sums[t] = sum_k term(t, k, row, d) over the slots of t that have a row, k ascending from +0.
template <Accumulator A, class Term>
void sum_over_slots(const Routing<A>& routing, MatrixView<A> sums, const Term& term) {
  const std::int64_t top_k = routing.expert_ids.view().cols();
  parallel_blocks(sums.rows(), rows_per_task, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      const std::span<A> sum = sums.row(t);
      std::fill(sum.begin(), sum.end(), A(0));
      for (std::int64_t k = 0; k < top_k; ++k) {
        const std::int64_t row = routing.row_of_slot[static_cast<std::size_t>(t * top_k + k)];
        if (row >= 0) {
          for (std::int64_t d = 0; d < sums.cols(); ++d) {
            sum[static_cast<std::size_t>(d)] += term(t, k, row, d);
          }
        }
      }
    }
  });
}

/// The cotangent of every token's logits; 0 on rows that are routed nowhere.
template <Accumulator A>
[[nodiscard]] Matrix<A> logits_cotangent(const Dims& dims, const Routing<A>& routing,
                                         const std::vector<A>& d_row_weights,
                                         ConstMatrixView<A> d_router_logits,
                                         const RouterOptions& options) {
  // Only the slot's own expert knows its weight's cotangent; a slot without a row has none.
  Matrix<A> d_expert_weights(dims.tokens, dims.top_k);
  const MatrixView<A> d_weights = d_expert_weights.view();
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    for (std::int64_t k = 0; k < dims.top_k; ++k) {
      const std::int32_t row = routing.row_of_slot[static_cast<std::size_t>(t * dims.top_k + k)];
      d_weights(t, k) = row < 0 ? A(0) : d_row_weights[static_cast<std::size_t>(row)];
    }
  }
  Matrix<A> result(dims.tokens, dims.experts);
  const MatrixView<A> d_logits = result.view();
  reference::route_backward<A>(dims.router(),
                               {.router_logits = routing.logits.view(),
                                .expert_ids = routing.expert_ids.view(),
                                .d_expert_weights = d_weights},
                               options, d_logits);
  if (!d_router_logits.is_null()) {
    for (const std::int64_t t : routing.tokens) {
      for (std::int64_t e = 0; e < dims.experts; ++e) {
        d_logits(t, e) += d_router_logits(t, e);
      }
    }
  }
  return result;
}

/// Adds the shared expert's part to d_hidden and writes the cotangents of its weights.
template <Storage S, Storage R>
void shared_backward(const Dims& dims, const Inputs<S, R>& in, ConstMatrixView<S> d_out,
                     WeightGradFrom weight_grad_from,
                     const InputCotangents<AccumulatorOf<S>>& out) {
  using A = AccumulatorOf<S>;
  const ExpertRows<A> rows = shared_rows(dims, in);
  const ExpertRowCotangents<A> shared =
      experts_backward(shared_expert(dims, in), rows, in.hidden, d_out, weight_grad_from,
                       out.d_shared_wi, out.d_shared_wo);
  const ConstMatrixView<A> d_rows = shared.d_rows.view();
  const auto d_gate = [&](std::int64_t t) {  // through the sigmoid
    const A gate = rows.weight(t);
    return gate * (A(1) - gate) * shared.d_weights[static_cast<std::size_t>(t)];
  };
  parallel_blocks(dims.tokens, rows_per_task, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      const A d_z = d_gate(t);
      for (std::int64_t c = 0; c < dims.hidden; ++c) {
        out.d_hidden(t, c) += d_rows(t, c) + d_z * widen<A>(in.shared_gate(c, 0));
      }
    }
  });
  if (out.d_shared_gate.wanted()) {
    product<A>(
        dims.hidden, 1, dims.tokens,
        [&](std::int64_t c, std::int64_t t) { return widen<A>(in.hidden(t, c)); },
        [&](std::int64_t t, std::int64_t) { return d_gate(t); }, store_into(out.d_shared_gate, 0));
  }
}

template <class T>
void copy_into(ConstMatrixView<T> source, MatrixView<T> target) {
  if (target.is_null()) {
    return;
  }
  for (std::int64_t i = 0; i < source.rows(); ++i) {
    std::copy(source.row(i).begin(), source.row(i).end(), target.row(i).begin());
  }
}

}  // namespace detail

/// One routed mixture-of-experts layer, by a loop over its experts.
///   l = h * router_weight;  (ids, w) = route(l)
///   out[t] = sum_k w[t,k] * Y_{ids[t,k]}(h[t]) + sigmoid(h[t] * shared_gate) * Y_shared(h[t])
///   Y_e(x) = (silu(x * wi_e[:, :F]) * (x * wi_e[:, F:])) * wo_e
/// The devices of options.dispatch are a model: it decides which slots find no room. Those add
/// nothing, and the other weights of the token stay as they are.
/// shapes    as the structs say
/// dtypes    S storage, R the router's (the same accumulator); logits, weights and out in the
///           accumulator A. X*wi, the activation and Y are rounded to S
/// writes    all of out and of each output given
/// alias     outputs disjoint from inputs and each other
/// specials  excluded padding: its hidden row is not read by the routed part, which gives exactly 0
///           there; the shared expert runs on every row. T = 0: group_sizes are 0. Other cases: see
///           route
/// order     k ascending into +0, the shared expert last; same bits for any thread count, and for a
///           token whatever other tokens there are, as long as none of its slots is dropped
/// memory    [R,D] of S for R kept slots, [T,E] of A, the maps
/// cost      6 D F flops a kept slot, 2 D E a routed token, 6 D Fs a token
/// throws    Error for bad dims or options, views of another shape, negative segment ids, shared
///           weights without dims.shared_hidden
/// source    spec/moe.md 1 to 8
template <Storage S, Storage R>
LayerReport forward(const Dims& dims, const Inputs<S, R>& in, const Options& options,
                    const Outputs<AccumulatorOf<S>>& out) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::reference::forward";
  moe::detail::check_inputs(where, dims, in);
  moe::detail::check_options(where, dims, options);
  moe::detail::require_plain(where, options);
  moe::detail::check_outputs(where, dims, out);

  const detail::Routing<A> routing = detail::route_layer(dims, in, options);
  const detail::Matrix<S> outputs =
      detail::experts_forward(detail::routed_experts(dims, in), routing.rows, in.hidden);
  const ConstMatrixView<S> y = outputs.view();
  const ConstMatrixView<A> weights = routing.expert_weights.view();
  detail::sum_over_slots(routing, out.out,
                         [&](std::int64_t t, std::int64_t k, std::int64_t row, std::int64_t d) {
                           return weights(t, k) * widen<A>(y(row, d));
                         });
  if (dims.has_shared_expert()) {
    const detail::ExpertRows<A> rows = detail::shared_rows(dims, in);
    const detail::Matrix<S> shared =
        detail::experts_forward(detail::shared_expert(dims, in), rows, in.hidden);
    const ConstMatrixView<S> shared_y = shared.view();
    parallel_blocks(dims.tokens, detail::rows_per_task, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t t = first; t < last; ++t) {
        for (std::int64_t d = 0; d < dims.hidden; ++d) {
          out.out(t, d) += rows.weight(t) * widen<A>(shared_y(t, d));
        }
      }
    });
  }
  detail::copy_into(routing.expert_ids.view(), out.expert_ids);
  detail::copy_into(weights, out.expert_weights);
  detail::copy_into(routing.logits.view(), out.router_logits);
  std::copy_n(routing.group_sizes.begin(), out.group_sizes.size(), out.group_sizes.begin());
  return routing.report;
}

/// The backward of `forward`, called with the same dims, inputs and options; it routes and runs the
/// experts' first half again instead of reading residuals.
///   o = d_out[t], a = activation of the slot's row:
///   wo_input:  q = o * wo^T, d_w = <q, a>, d_a = w q, d_wo += (w a)^T o
///   wo_output: d_w = <o, Y>, d_y = w o, d_a = d_y * wo^T, d_wo += a^T d_y
///   d_l = route_backward(d_w) + d_router_logits;  d_router_weight = sum_t h[t]^T d_l[t]
///   d_hidden[t] = sum_k d_x of its kept slots + d_l[t] * router_weight^T + the shared part
/// shapes    as the structs say
/// dtypes    as forward; what stands for the cotangents of Y, of the activation and of X*wi is
///           rounded to S (w a as well), everything else is in the accumulator
/// writes    all of d_hidden; each weight cotangent given, overwritten or added to once
/// alias     outputs disjoint from inputs and each other
/// specials  a dropped slot gives and gets nothing. Excluded padding: its rows of hidden, d_out and
///           d_router_logits are not read by the routed part, d_hidden there is the shared expert's
///           alone. An expert without rows: exact zeros, written. Router frozen: d_router_weight is
///           zero (adds nothing), d_hidden keeps the router's part. K = 1: the router gets exactly
///           0 from d_out
/// order     rows of a weight cotangent in slot order, folded 256 at a time; same bits for any
///           thread count
/// memory    [R, 3F] of S and [R, D] of A for R kept slots, besides what forward takes
/// cost      16 D F flops a kept slot (18 under wo_output), 6 D E a routed token, 16 D Fs a token
///           (18)
/// throws    as forward; Error for cotangents of another shape, or of a shared expert that is not
///           there
/// source    spec/moe.md 4, 4.1, 6 and 8
template <Storage S, Storage R>
LayerReport backward(const Dims& dims, const Inputs<S, R>& in, const OutputCotangents<S>& d,
                     const Options& options, const InputCotangents<AccumulatorOf<S>>& out) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::reference::backward";
  moe::detail::check_inputs(where, dims, in);
  moe::detail::check_output_cotangents(where, dims, d);
  moe::detail::check_options(where, dims, options);
  moe::detail::require_plain(where, options);
  moe::detail::check_input_cotangents(where, dims, out);

  const detail::Routing<A> routing = detail::route_layer(dims, in, options);
  const detail::ExpertRowCotangents<A> routed =
      detail::experts_backward(detail::routed_experts(dims, in), routing.rows, in.hidden, d.d_out,
                               options.weight_grad_from, out.d_wi, out.d_wo);
  const ConstMatrixView<A> d_rows = routed.d_rows.view();
  detail::sum_over_slots(
      routing, out.d_hidden,
      [&](std::int64_t, std::int64_t, std::int64_t row, std::int64_t c) { return d_rows(row, c); });

  const detail::Matrix<A> d_router_logits =
      detail::logits_cotangent(dims, routing, routed.d_weights, d.d_router_logits, options.router);
  const ConstMatrixView<A> d_logits = d_router_logits.view();  // [T,E]
  const auto token = [&](std::int64_t i) {
    return std::int64_t{routing.tokens[static_cast<std::size_t>(i)]};
  };
  const auto routed_tokens = static_cast<std::int64_t>(routing.tokens.size());
  parallel_blocks(routed_tokens, detail::rows_per_task, [&](std::int64_t first, std::int64_t last) {
    detail::product<A>(
        last - first, dims.hidden, dims.experts,
        [&](std::int64_t i, std::int64_t e) { return d_logits(token(first + i), e); },
        [&](std::int64_t e, std::int64_t c) { return widen<A>(in.router_weight(c, e)); },
        [&](std::int64_t i, std::int64_t c, A sum) { out.d_hidden(token(first + i), c) += sum; });
  });
  if (out.d_router_weight.wanted()) {
    const std::int64_t terms =
        options.router_training == RouterTraining::frozen ? 0 : routed_tokens;
    parallel_blocks(dims.hidden, detail::weight_rows_per_task,
                    [&](std::int64_t first, std::int64_t last) {
                      detail::product<A>(
                          last - first, dims.experts, terms,
                          [&](std::int64_t i, std::int64_t r) {
                            return widen<A>(in.hidden(token(r), first + i));
                          },
                          [&](std::int64_t r, std::int64_t e) { return d_logits(token(r), e); },
                          detail::store_into(out.d_router_weight, first));
                    });
  }
  if (dims.has_shared_expert()) {
    detail::shared_backward(dims, in, d.d_out, options.weight_grad_from, out);
  }
  return routing.report;
}

}  // namespace heddle::moe::reference

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/arguments.hpp"
#include "heddle/moe/detail/layer_router.hpp"
#include "heddle/moe/detail/shared_expert.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/residuals.hpp"
#include "heddle/moe/routed_experts.hpp"
#include "heddle/moe/router.hpp"
#include "heddle/moe/routing_map.hpp"
#include "heddle/moe/routing_window.hpp"

namespace heddle::moe {

namespace detail {

[[nodiscard]] inline GluOptions glu_options(const Options& options) {
  return {.epilogue = options.epilogue, .fusion = options.fusion};
}

inline void require_one_device(std::string_view where, const Options& options) {
  require(options.dispatch.groups == 1, where, "options.dispatch.groups", options.dispatch.groups,
          "must be 1 on one device");
  require(options.dispatch.shards == 1, where, "options.dispatch.shards", options.dispatch.shards,
          "must be 1 on one device");
}

/// The same cotangent for a chunk: what the first one overwrites, the others add to.
template <Accumulator A>
[[nodiscard]] WeightCotangent<A> of_chunk(const WeightCotangent<A>& cotangent, std::int64_t chunk) {
  return {cotangent.values, chunk == 0 ? cotangent.write : Write::accumulate};
}

template <class T>
void copy_rows(ConstMatrixView<T> from, MatrixView<T> to) {
  for (std::int64_t row = 0; !to.is_null() && row < from.rows(); ++row) {
    std::copy_n(from.row(row).data(), from.cols(), to.row(row).data());
  }
}

[[nodiscard]] inline RoutedDims routed_dims(const Dims& dims, const ChunkPlan& plan) {
  return {.rows = plan.chunk_rows,
          .hidden = dims.hidden,
          .experts = dims.experts,
          .width = dims.expert_hidden};
}

[[nodiscard]] inline RoutedDims shared_dims(const Dims& dims, const ChunkPlan& plan) {
  return {.rows = plan.slice, .hidden = dims.hidden, .experts = 1, .width = dims.shared_hidden};
}

}  // namespace detail

/// Bytes of workspace that suffice for the forward of a layer on so many threads, with or without
/// residuals. The map builder's own are RoutingMapBuilder::workspace_bytes.
/// throws    Error for bad dims or options
template <Storage S, Storage R = S>
[[nodiscard]] std::size_t forward_workspace_bytes(const Dims& dims, const Options& options,
                                                  std::int64_t threads) {
  constexpr std::string_view where = "moe::forward_workspace_bytes";
  dims.validate(where);
  detail::check_options(where, dims, options);
  const ChunkPlan plan(dims.router(), options.dispatch);
  const GluOptions glu = detail::glu_options(options);
  std::size_t most =
      std::max(detail::router_product_bytes<S, R>(dims, threads),
               routed_workspace_bytes<S>(detail::routed_dims(dims, plan), glu, threads));
  std::size_t bytes = detail::RoutedTokens::bytes(dims) + detail::routing_bytes<S>(dims, plan);
  if (dims.has_shared_expert()) {
    bytes += detail::SharedRouting::bytes(plan.slice);
    most = std::max({most, detail::shared_gate_bytes<S>(plan.slice, dims.hidden, threads),
                     routed_workspace_bytes<S>(detail::shared_dims(dims, plan), glu, threads)});
  }
  return bytes + most;
}

/// One routed mixture-of-experts layer on one device.
///   l = h * router_weight;  (ids, w) = route(l)
///   out[t] = sum_k w[t,k] * Y_{ids[t,k]}(h[t]) + sigmoid(h[t] * shared_gate) * Y_shared(h[t])
///   Y_e(x) = (silu(x * wi_e[:, :F]) * (x * wi_e[:, F:])) * wo_e
/// Tokens pass in options.dispatch.token_chunks chunks, each with its own map and, where a buffer factor
/// is given, its own buffer; what finds no room there adds nothing.
/// shapes    as the structs say
/// dtypes    S storage, R the router's (the same accumulator); logits, weights and out in the accumulator
///           A. X*wi, the activation and Y are rounded to S
/// writes    all of out and of each output given; the residuals, where they are
/// alias     outputs and residuals disjoint from inputs and each other
/// specials  excluded padding: its hidden row is not read by the routed part, which gives exactly 0
///           there; the shared expert runs on every row. Experts without slots: no weight is read. T = 0:
///           group_sizes are 0. Losses on the logits: accumulate them from the router_logits written here
/// order     k ascending into +0, the shared expert last; same bits for any thread count and number of
///           chunks, and for a token whatever other tokens there are, as long as none of its slots is
///           dropped
/// memory    forward_workspace_bytes; residual_bytes<S> in the residuals. Nothing of 2F columns without
///           them
/// cost      layer_cost<S, R>(dims, ...).forward
/// throws    Error for bad dims or options, more than one device in them, views of another shape,
///           negative segment ids, shared weights without dims.shared_hidden
/// source    spec/moe.md 1 to 8
template <Storage S, Storage R>
LayerReport forward(const Dims& dims, const Inputs<S, R>& in, const Options& options,
                    const Outputs<AccumulatorOf<S>>& out, const Residuals<S>& residuals,
                    RoutingMapBuilder& maps, Workspace& workspace) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::forward";
  detail::check_inputs(where, dims, in);
  detail::check_options(where, dims, options);
  detail::require_one_device(where, options);
  detail::check_outputs(where, dims, out);
  const ChunkPlan plan(dims.router(), options.dispatch);
  if (residuals.wanted()) {
    detail::check_residuals(where, dims, plan, residuals);
  }

  const Workspace::Frame frame(workspace);
  const Residuals<S> kept =
      residuals.wanted() ? residuals : detail::take_routing<S>(dims, plan, workspace);
  LayerReport report;
  {
    const Workspace::Frame routing(workspace);
    const detail::RoutedTokens tokens(dims, in.segment_ids, options.router, workspace);
    detail::router_logits(tokens, in.hidden, in.router_weight, kept.router_logits, workspace);
  }
  report.router = route<A>(dims.router(),
                           {.router_logits = kept.router_logits,
                            .forced_ids = in.forced_ids,
                            .segment_ids = in.segment_ids},
                           options.router,
                           {.expert_ids = kept.expert_ids, .expert_weights = kept.expert_weights});

  DropReport drops;
  std::fill(out.group_sizes.begin(), out.group_sizes.end(), std::int64_t{0});
  const GluOptions glu = detail::glu_options(options);
  for (std::int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
    const std::int64_t first = plan.first(chunk);
    const std::int64_t count = plan.count(chunk);
    const RoutingMap map =
        maps.build({.tokens = count, .experts = dims.experts, .top_k = dims.top_k},
                   kept.expert_ids.row_block(first, count), kept.map_storage(dims, plan, chunk));
    const RoutingWindow window = routing_window(map, plan.buffer_rows);
    drops.add(window, plan.balanced);
    report.routed_slots += map.routed_slots();
    for (std::size_t e = 0; e < out.group_sizes.size(); ++e) {
      out.group_sizes[e] += map.group_size(static_cast<std::int64_t>(e));
    }
    routed_experts<S, A>(
        map, window, kept.expert_weights.row_block(first, count), in.hidden.row_block(first, count),
        {.wi = in.wi, .wo = in.wo},
        {.out = out.out.row_block(first, count),
         .write = Write::overwrite,
         .gate_up = kept.gate_up.row_block(chunk * plan.chunk_rows, plan.chunk_rows)},
        glu, workspace);
  }
  if (dims.has_shared_expert()) {
    detail::SharedRouting shared(plan.slice, workspace);
    for (std::int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
      const std::int64_t first = plan.first(chunk);
      const std::int64_t count = plan.count(chunk);
      detail::shared_forward(shared, in, glu,
                             {.out = out.out.row_block(first, count),
                              .write = Write::accumulate,
                              .gate_up = kept.shared_gate_up.row_block(first, count)},
                             kept.shared_weights.subspan(static_cast<std::size_t>(first),
                                                         static_cast<std::size_t>(count)),
                             in.hidden.row_block(first, count), workspace);
    }
  }
  detail::copy_rows<std::int32_t>(kept.expert_ids, out.expert_ids);
  detail::copy_rows<A>(kept.expert_weights, out.expert_weights);
  detail::copy_rows<A>(kept.router_logits, out.router_logits);
  report.dropped_slots = drops.dropped_slots;
  report.largest_drop = drops.largest_drop;
  report.required_factor = drops.required_factor;
  report.buffer_rows = plan.chunk_rows;
  return report;
}

/// Bytes of workspace that suffice for the backward of a layer on so many threads.
/// throws    Error for bad dims or options
template <Storage S, Storage R = S>
[[nodiscard]] std::size_t backward_workspace_bytes(const Dims& dims, const Options& options,
                                                   std::int64_t threads) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::backward_workspace_bytes";
  dims.validate(where);
  detail::check_options(where, dims, options);
  const ChunkPlan plan(dims.router(), options.dispatch);
  const GluOptions glu = detail::glu_options(options);
  std::size_t most = std::max(
      Workspace::bytes_for<A>(dims.tokens * dims.experts) + detail::RoutedTokens::bytes(dims) +
          detail::router_product_bytes<S, R>(dims, threads),
      routed_backward_workspace_bytes<S>(detail::routed_dims(dims, plan), options.weight_grad_from,
                                         glu, threads));
  std::size_t bytes = Workspace::bytes_for<A>(dims.slots());
  if (dims.has_shared_expert()) {
    most = std::max(
        most,
        detail::SharedRouting::bytes(plan.slice) + Workspace::bytes_for<A>(plan.slice) +
            std::max(detail::shared_gate_bytes<S>(plan.slice, dims.hidden, threads),
                     routed_backward_workspace_bytes<S>(detail::shared_dims(dims, plan),
                                                        options.weight_grad_from, glu, threads)));
  }
  return bytes + most;
}

/// The backward of `forward`, called with the same dims, inputs and options and the residuals it left.
/// Nothing is routed or sorted again; the activation is formed again from gate and up, the experts'
/// outputs under wo_output only.
///   o = d_out[t], a = activation of the slot's row:
///   wo_input:  q = o * wo^T, d_w = <q, a>, d_a = w q, d_wo += (w a)^T o
///   wo_output: d_w = <o, Y>, d_y = w o, d_a = d_y * wo^T, d_wo += a^T d_y
///   d_l = route_backward(d_w) + d_router_logits;  d_router_weight = sum_t h[t]^T d_l[t]
///   d_hidden[t] = sum_k d_x of its kept slots + d_l[t] * router_weight^T + the shared part
/// shapes    as the structs say
/// dtypes    as forward; what stands for the cotangents of Y, of the activation and of X*wi is rounded to
///           S (w a as well), everything else is in the accumulator
/// writes    all of d_hidden; each weight cotangent given, overwritten or added to
/// alias     outputs disjoint from inputs and each other
/// specials  a dropped slot gives and gets nothing. Excluded padding: its rows of hidden, d_out and
///           d_router_logits are not read by the routed part, d_hidden there is the shared expert's
///           alone. An expert without rows: exact zeros, written. Router frozen: d_router_weight is zero
///           (adds nothing), d_hidden keeps the router's part. K = 1: the router gets exactly 0 from
///           d_out
/// order     rows of a weight cotangent in slot order, 512 at a time, chunk after chunk; same bits for any
///           thread count
/// memory    backward_workspace_bytes
/// cost      layer_cost<S, R>(dims, weight_grad_from).backward
/// throws    as forward; Error for residuals or cotangents of another shape, cotangents of a shared expert
///           that is not there
/// source    spec/moe.md 4, 4.1, 6 and 8
template <Storage S, Storage R>
void backward(const Dims& dims, const Inputs<S, R>& in, const OutputCotangents<S>& d,
              const Options& options, const Residuals<S>& residuals,
              const InputCotangents<AccumulatorOf<S>>& out, Workspace& workspace) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::backward";
  detail::check_inputs(where, dims, in);
  detail::check_output_cotangents(where, dims, d);
  detail::check_options(where, dims, options);
  detail::require_one_device(where, options);
  const ChunkPlan plan(dims.router(), options.dispatch);
  detail::check_residuals(where, dims, plan, residuals);
  detail::check_input_cotangents(where, dims, out);

  const GluOptions glu = detail::glu_options(options);
  const Workspace::Frame frame(workspace);
  const MatrixView<A> d_expert_weights = detail::take_matrix<A>(workspace, dims.tokens, dims.top_k);
  for (std::int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
    const std::int64_t first = plan.first(chunk);
    const std::int64_t count = plan.count(chunk);
    const RoutingMap map = residuals.map(dims, plan, chunk);
    routed_experts_backward<S>(
        map, routing_window(map, plan.buffer_rows),
        residuals.expert_weights.row_block(first, count), in.hidden.row_block(first, count),
        {.wi = in.wi, .wo = in.wo},
        {.d_out = d.d_out.row_block(first, count),
         .gate_up = residuals.gate_up.row_block(chunk * plan.chunk_rows, plan.chunk_rows)},
        options.weight_grad_from, glu,
        {.d_hidden = out.d_hidden.row_block(first, count),
         .write = Write::overwrite,
         .d_expert_weights = d_expert_weights.row_block(first, count),
         .d_wi = detail::of_chunk(out.d_wi, chunk),
         .d_wo = detail::of_chunk(out.d_wo, chunk)},
        workspace);
  }
  {
    const Workspace::Frame router(workspace);
    const MatrixView<A> d_logits = detail::take_matrix<A>(workspace, dims.tokens, dims.experts);
    route_backward<A>(dims.router(),
                      {.router_logits = residuals.router_logits,
                       .expert_ids = residuals.expert_ids,
                       .d_expert_weights = d_expert_weights},
                      options.router, d_logits);
    const detail::RoutedTokens tokens(dims, in.segment_ids, options.router, workspace);
    detail::add_loss_cotangents<A>(tokens, d.d_router_logits, d_logits);
    detail::router_weight_backward<S, R>(tokens, in, d_logits, options.router_training,
                                         out.d_hidden, out.d_router_weight, workspace);
  }
  if (dims.has_shared_expert()) {
    detail::SharedRouting shared(plan.slice, workspace);
    for (std::int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
      const std::int64_t first = plan.first(chunk);
      const std::int64_t count = plan.count(chunk);
      detail::shared_backward<S, R>(
          shared, in, in.hidden.row_block(first, count),
          residuals.shared_weights.subspan(static_cast<std::size_t>(first),
                                           static_cast<std::size_t>(count)),
          {.d_out = d.d_out.row_block(first, count),
           .gate_up = residuals.shared_gate_up.row_block(first, count)},
          options.weight_grad_from, glu,
          {.d_hidden = out.d_hidden.row_block(first, count),
           .d_wi = detail::of_chunk(out.d_shared_wi, chunk),
           .d_wo = detail::of_chunk(out.d_shared_wo, chunk),
           .d_gate = detail::of_chunk(out.d_shared_gate, chunk)},
          workspace);
    }
  }
}

}  // namespace heddle::moe

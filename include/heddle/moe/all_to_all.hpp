#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "heddle/core/elementwise.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/mesh/collectives.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/topology.hpp"
#include "heddle/moe/arguments.hpp"
#include "heddle/moe/detail/exchange.hpp"
#include "heddle/moe/detail/sharded_parts.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/residuals.hpp"
#include "heddle/moe/routed_experts.hpp"
#include "heddle/moe/routing_map.hpp"
#include "heddle/moe/routing_window.hpp"
#include "heddle/moe/sharded_layer.hpp"
#include "heddle/moe/sort.hpp"

// Experts by all-to-all: every kept slot's row is sent to the device that holds its expert, and what the expert
// makes of it comes back to the token. Every function here is called by every device of a mesh with its own
// shards; sharded_layer.hpp has their shapes.

namespace heddle::moe {

/// What the forward by all-to-all leaves for its backward.
template <Storage S>
struct AllToAllResiduals {
  /// Of the own tokens; its maps are those of the kept slots of the own tokens, its gate_up that of the
  /// arrived rows, chunk after chunk.
  Residuals<S> layer;
  MatrixView<S> arrived;  ///< [chunks * chunk_rows, D]
  std::span<std::int32_t>
      arrived_permutation;                  ///< [chunks * chunk_rows], by expert -> as it arrived
  std::span<std::int32_t> arrived_inverse;  ///< [chunks * chunk_rows]
  std::span<std::int64_t> arrived_group_offsets;  ///< [chunks * (E_l + 1)]
  std::span<std::int64_t> sent_rows;              ///< [chunks * P], to each device of the group
  std::span<std::int64_t> arrived_rows;           ///< [chunks * P], from each device

  [[nodiscard]] bool wanted() const { return layer.wanted(); }
};

namespace detail {

inline constexpr const char* exchange_counts_label = "moe.all_to_all.counts";
inline constexpr const char* exchange_out_label = "moe.all_to_all.dispatch";
inline constexpr const char* exchange_back_label = "moe.all_to_all.combine";

template <Storage S>
[[nodiscard]] AllToAllResiduals<S> take_exchange(const Dims& dims, const LayerShards& shards,
                                                 bool with_rows, Workspace& memory) {
  AllToAllResiduals<S> kept;
  const std::int64_t rows = shards.chunks * shards.chunk_rows;
  kept.layer = take_own_residuals<S>(dims, with_rows, memory);
  kept.layer.permutation = memory.take<std::int32_t>(dims.slots());
  kept.layer.inverse = memory.take<std::int32_t>(dims.slots());
  kept.layer.group_offsets = memory.take<std::int64_t>(shards.chunks * (dims.experts + 1));
  kept.arrived_permutation = memory.take<std::int32_t>(rows);
  kept.arrived_inverse = memory.take<std::int32_t>(rows);
  kept.arrived_group_offsets =
      memory.take<std::int64_t>(shards.chunks * (shards.experts.count + 1));
  kept.sent_rows = memory.take<std::int64_t>(shards.chunks * shards.members);
  kept.arrived_rows = memory.take<std::int64_t>(shards.chunks * shards.members);
  if (with_rows) {
    kept.layer.gate_up = take_matrix<S>(memory, rows, 2 * dims.expert_hidden);
    kept.arrived = take_matrix<S>(memory, rows, dims.hidden);
  }
  return kept;
}

template <Storage S>
[[nodiscard]] std::size_t exchange_bytes(const Dims& dims, const LayerShards& shards,
                                         bool with_rows) {
  const std::int64_t rows = shards.chunks * shards.chunk_rows;
  std::size_t bytes =
      own_residual_bytes<S>(dims, with_rows) +
      2 * Workspace::bytes_for<std::int32_t>(dims.slots()) +
      Workspace::bytes_for<std::int64_t>(shards.chunks * (dims.experts + 1)) +
      2 * Workspace::bytes_for<std::int32_t>(rows) +
      Workspace::bytes_for<std::int64_t>(shards.chunks * (shards.experts.count + 1)) +
      2 * Workspace::bytes_for<std::int64_t>(shards.chunks * shards.members);
  if (with_rows) {
    bytes += Workspace::bytes_for<S>(rows * 2 * dims.expert_hidden) +
             Workspace::bytes_for<S>(rows * dims.hidden);
  }
  return bytes;
}

template <Storage S>
void check_exchange_residuals(std::string_view where, const Dims& dims, const LayerShards& shards,
                              const AllToAllResiduals<S>& kept) {
  check_own_residuals(where, dims, kept.layer);
  const std::int64_t rows = shards.chunks * shards.chunk_rows;
  constexpr std::string_view rows_name = "token_chunks * chunk_rows";
  const auto require_counts = [&](std::string_view argument, auto values, std::string_view name,
                                  std::int64_t count) {
    require_length(where, argument, values, name, count);
  };
  require_counts("residuals.layer.permutation", kept.layer.permutation, "dims.slots", dims.slots());
  require_counts("residuals.layer.inverse", kept.layer.inverse, "dims.slots", dims.slots());
  require_counts("residuals.layer.group_offsets", kept.layer.group_offsets,
                 "token_chunks * (dims.experts + 1)", shards.chunks * (dims.experts + 1));
  require_shape(where, "residuals.layer.gate_up", kept.layer.gate_up, rows_name, rows,
                "2 * dims.expert_hidden", 2 * dims.expert_hidden);
  require_shard(where, "residuals.arrived", kept.arrived, rows_name, rows, "dims.hidden",
                dims.hidden);
  require_counts("residuals.arrived_permutation", kept.arrived_permutation, rows_name, rows);
  require_counts("residuals.arrived_inverse", kept.arrived_inverse, rows_name, rows);
  require_counts("residuals.arrived_group_offsets", kept.arrived_group_offsets,
                 "token_chunks * (own experts + 1)", shards.chunks * (shards.experts.count + 1));
  require_counts("residuals.sent_rows", kept.sent_rows, "token_chunks * members",
                 shards.chunks * shards.members);
  require_counts("residuals.arrived_rows", kept.arrived_rows, "token_chunks * members",
                 shards.chunks * shards.members);
}

[[nodiscard]] inline LayerShards exchange_shards(std::string_view where, const Topology& mesh,
                                                 std::int64_t id, const Dims& dims,
                                                 const ShardedOptions& options) {
  const LayerShards shards = layer_shards(where, mesh, id, dims, options);
  require(options.layer.dispatch.strategy == Strategy::all_to_all, where,
          "options.layer.dispatch.strategy", options.layer.dispatch.strategy, "must be all_to_all");
  require(options.schedule == ChunkSchedule::plain, where, "options.schedule", options.schedule,
          "must be plain where rows are sent");
  return shards;
}

template <Storage S>
[[nodiscard]] SourceChunk source_chunk(const Dims& dims, const LayerShards& shards,
                                       const AllToAllResiduals<S>& kept, std::int64_t chunk) {
  const auto first = static_cast<std::size_t>(shards.first(chunk) * dims.top_k);
  const auto count = static_cast<std::size_t>(shards.count(chunk) * dims.top_k);
  const auto offsets = static_cast<std::size_t>(dims.experts + 1);
  const auto members = static_cast<std::size_t>(shards.members);
  return {.dims = {.tokens = shards.count(chunk), .experts = dims.experts, .top_k = dims.top_k},
          .storage = {kept.layer.permutation.subspan(first, count),
                      kept.layer.inverse.subspan(first, count),
                      kept.layer.group_offsets.subspan(static_cast<std::size_t>(chunk) * offsets,
                                                       offsets)},
          .rows = kept.sent_rows.subspan(static_cast<std::size_t>(chunk) * members, members)};
}

template <Storage S>
[[nodiscard]] ArrivedChunk arrived_chunk(const LayerShards& shards,
                                         const AllToAllResiduals<S>& kept, std::int64_t chunk) {
  const auto first = static_cast<std::size_t>(chunk * shards.chunk_rows);
  const auto most = static_cast<std::size_t>(shards.chunk_rows);
  const auto offsets = static_cast<std::size_t>(shards.experts.count + 1);
  const auto members = static_cast<std::size_t>(shards.members);
  return {.experts = shards.experts.count,
          .permutation = kept.arrived_permutation.subspan(first, most),
          .inverse = kept.arrived_inverse.subspan(first, most),
          .group_offsets = kept.arrived_group_offsets.subspan(
              static_cast<std::size_t>(chunk) * offsets, offsets),
          .rows = kept.arrived_rows.subspan(static_cast<std::size_t>(chunk) * members, members)};
}

}  // namespace detail

/// Bytes of the residuals of one device.
/// throws    as all_to_all_forward
template <Storage S>
[[nodiscard]] std::size_t all_to_all_residual_bytes(const Topology& mesh, const Dims& dims,
                                                    const ShardedOptions& options) {
  return detail::exchange_bytes<S>(
      dims, detail::exchange_shards("moe::all_to_all_residual_bytes", mesh, 0, dims, options),
      true);
}

/// The residuals of one device in memory of the caller's, as long as the frame they are taken in lasts.
/// throws    as all_to_all_forward
template <Storage S>
[[nodiscard]] AllToAllResiduals<S> take_all_to_all_residuals(const Topology& mesh, const Dims& dims,
                                                             const ShardedOptions& options,
                                                             Workspace& memory) {
  return detail::take_exchange<S>(
      dims, detail::exchange_shards("moe::take_all_to_all_residuals", mesh, 0, dims, options), true,
      memory);
}

/// Bytes of workspace that suffice for all_to_all_forward on so many threads, with or without residuals. The
/// map builder's own are RoutingMapBuilder::workspace_bytes.
/// throws    as all_to_all_forward
template <Storage S, Storage R = S>
[[nodiscard]] std::size_t all_to_all_forward_workspace_bytes(const Topology& mesh, const Dims& dims,
                                                             const ShardedOptions& options,
                                                             std::int64_t threads) {
  using A = AccumulatorOf<S>;
  const LayerShards shards =
      detail::exchange_shards("moe::all_to_all_forward_workspace_bytes", mesh, 0, dims, options);
  const GluOptions glu = detail::glu_options(options.layer);
  const std::int64_t counts = shards.chunks * dims.experts;
  const std::size_t routed =
      Workspace::bytes_for<std::int32_t>(shards.members * counts) +
      std::max(Workspace::bytes_for<std::int32_t>(counts),
               detail::gather_experts_bytes<S>(dims, shards) +
                   Workspace::bytes_for<A>(shards.chunk_rows) +
                   2 * Workspace::bytes_for<S>(shards.balanced * dims.hidden) +
                   2 * Workspace::bytes_for<S>(shards.chunk_rows * dims.hidden) +
                   2 * Workspace::bytes_for<std::int64_t>(shards.members) +
                   std::max({Workspace::bytes_for<std::int32_t>(shards.chunk_rows),
                             routed_workspace_bytes<S>(detail::own_expert_dims(dims, shards), glu,
                                                       threads)}));
  return detail::exchange_bytes<S>(dims, shards, false) +
         std::max({detail::route_own_bytes<S, R>(dims, shards, threads), routed,
                   detail::shared_own_bytes<S>(dims, shards, glu, threads),
                   Workspace::bytes_for<detail::DropRecord>(mesh.devices())});
}

/// One routed layer over a mesh: moe::forward of all devices' tokens, each writing those of its own.
///   on each device: route the own tokens; tell the group how many slots each expert has, one message a layer;
///   chunk by chunk send the slots' rows in (expert, slot) order, sort what arrives by expert, compute, send
///   back, and sum each token's rows where it is at home; the shared expert on the own tokens, last
/// shapes    sharded_layer.hpp
/// dtypes    as moe::forward; rows are sent in S
/// writes    all of out and of each output given, group_sizes of the own tokens; the residuals, where they
///           are
/// alias     as moe::forward
/// specials  as moe::forward. A buffer holds the rows of one device in one chunk: what is beyond it is not
///           sent, of the last sources first, and of a source the highest experts. The report's router is of
///           the own tokens, everything else in it of all devices, as ring_forward
/// order     as moe::forward, with its very bits, whatever the mesh, as long as nothing is dropped
/// memory    all_to_all_forward_workspace_bytes; all_to_all_residual_bytes<S> in the residuals
/// cost      all_to_all_messages; 6 D F flops a kept row
/// throws    before anything is sent: Error for what layer_shards refuses, another strategy, a pipelined
///           schedule, views of another shape or, where they are sent, with gaps; as Communicator
/// source    spec/moe.md 7
template <Communicator Device, Storage S, Storage R>
LayerReport all_to_all_forward(Device& device, const Dims& dims, const Inputs<S, R>& in,
                               const ShardedOptions& options, const Outputs<AccumulatorOf<S>>& out,
                               const AllToAllResiduals<S>& residuals, RoutingMapBuilder& maps,
                               Workspace& workspace) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::all_to_all_forward";
  const LayerShards shards =
      detail::exchange_shards(where, device.topology(), device.id(), dims, options);
  detail::check_sharded_inputs(where, dims, shards, in);
  detail::check_outputs(where, dims, out);
  const bool keeps = residuals.wanted();
  if (keeps) {
    detail::check_exchange_residuals(where, dims, shards, residuals);
  }

  const Workspace::Frame frame(workspace);
  const GluOptions glu = detail::glu_options(options.layer);
  const AllToAllResiduals<S> kept =
      keeps ? residuals : detail::take_exchange<S>(dims, shards, false, workspace);
  LayerReport report;
  report.router = detail::route_own_tokens(device, dims, shards, in, options.layer.router,
                                           kept.layer, workspace);
  for (std::int64_t chunk = 0; chunk < shards.chunks; ++chunk) {
    const detail::SourceChunk source = detail::source_chunk(dims, shards, kept, chunk);
    static_cast<void>(maps.build(
        source.dims, kept.layer.expert_ids.row_block(shards.first(chunk), shards.count(chunk)),
        source.storage));
  }
  DropReport drops;
  {
    const Workspace::Frame routed(workspace);
    const detail::SlotCounts counts = [&] {
      const detail::MoeTraffic label(device, detail::exchange_counts_label);
      return detail::gather_slot_counts(device, dims, shards, kept.layer.group_offsets, workspace);
    }();
    const ExpertWeights<S> weights = detail::gather_experts(device, dims, shards, in, workspace);
    const auto ones = workspace.take<A>(shards.chunk_rows);
    std::fill(ones.begin(), ones.end(), A(1));
    for (std::int64_t chunk = 0; chunk < shards.chunks; ++chunk) {
      const Workspace::Frame each(workspace);
      const std::int64_t first = shards.first(chunk);
      const std::int64_t count = shards.count(chunk);
      const detail::SourceChunk source = detail::source_chunk(dims, shards, kept, chunk);
      const detail::ArrivedChunk arrived = detail::arrived_chunk(shards, kept, chunk);
      drops.add(detail::agree_on_rows(counts, shards, chunk, source.rows, arrived.rows),
                shards.balanced);
      source.keep_rows(shards.experts.count);
      const std::int64_t sent = source.total_rows();
      const std::int64_t received = arrived.total_rows();
      const MatrixView<S> leaving = detail::take_matrix<S>(workspace, sent, dims.hidden);
      const MatrixView<S> returned = detail::take_matrix<S>(workspace, sent, dims.hidden);
      const MatrixView<S> results = detail::take_matrix<S>(workspace, received, dims.hidden);
      const MatrixView<S> rows = keeps ? kept.arrived.row_block(chunk * shards.chunk_rows, received)
                                       : detail::take_matrix<S>(workspace, received, dims.hidden);
      sort<S>(source.map(), source.window(), in.hidden.row_block(first, count), leaving);
      {
        const detail::MoeTraffic label(device, detail::exchange_out_label);
        detail::exchange_rows<S>(device, shards.group, source.rows, leaving, arrived.rows, rows,
                                 workspace);
      }
      const RoutingMap map = detail::map_arrived(counts, shards, chunk, arrived, maps, workspace);
      routed_experts<S, S>(
          map, routing_window(map), {ones.data(), received, 1}, rows, weights,
          {.out = results,
           .write = Write::overwrite,
           .gate_up = kept.layer.gate_up.row_block(chunk * shards.chunk_rows, shards.chunk_rows)},
          glu, workspace);
      {
        const detail::MoeTraffic label(device, detail::exchange_back_label);
        detail::exchange_rows<S>(device, shards.group, arrived.rows, results, source.rows, returned,
                                 workspace);
      }
      unsort<S, A>(source.map(), source.window(), kept.layer.expert_weights.row_block(first, count),
                   returned, out.out.row_block(first, count));
    }
  }
  detail::shared_own_forward(device, dims, shards, in, glu, out.out, kept.layer, workspace);
  detail::copy_rows<std::int32_t>(kept.layer.expert_ids, out.expert_ids);
  detail::copy_rows<A>(kept.layer.expert_weights, out.expert_weights);
  detail::copy_rows<A>(kept.layer.router_logits, out.router_logits);
  const std::int64_t routed_slots = detail::count_own_slots(kept.layer.expert_ids, out.group_sizes);
  detail::share_drops(device, routed_slots, drops, report, workspace);
  report.buffer_rows = shards.reported_buffer_rows(dims.top_k);
  return report;
}

/// Bytes of workspace that suffice for all_to_all_backward on so many threads.
/// throws    as all_to_all_backward
template <Storage S, Storage R = S>
[[nodiscard]] std::size_t all_to_all_backward_workspace_bytes(const Topology& mesh,
                                                              const Dims& dims,
                                                              const ShardedOptions& options,
                                                              std::int64_t threads) {
  using A = AccumulatorOf<S>;
  const LayerShards shards =
      detail::exchange_shards("moe::all_to_all_backward_workspace_bytes", mesh, 0, dims, options);
  const GluOptions glu = detail::glu_options(options.layer);
  const detail::GatherBytes d_weights = detail::ExpertCotangents<A>::bytes(dims, shards);
  const std::size_t routed =
      detail::gather_experts_bytes<S>(dims, shards) + d_weights.kept +
      2 * Workspace::bytes_for<S>(shards.balanced * dims.hidden) +
      2 * Workspace::bytes_for<A>(shards.balanced) +
      2 * Workspace::bytes_for<S>(shards.chunk_rows * dims.hidden) +
      2 * Workspace::bytes_for<A>(shards.chunk_rows) +
      Workspace::bytes_for<A>(std::is_same_v<S, A> ? 0 : shards.chunk_rows * dims.hidden) +
      2 * Workspace::bytes_for<std::int64_t>(shards.members) +
      std::max(d_weights.passing,
               routed_backward_workspace_bytes<S>(detail::own_expert_dims(dims, shards),
                                                  options.layer.weight_grad_from, glu, threads));
  return Workspace::bytes_for<A>(dims.slots()) +
         std::max({routed, detail::route_own_backward_bytes<S, R>(dims, shards, threads),
                   detail::shared_own_backward_bytes<S>(dims, shards, options.layer, threads)});
}

/// The backward of all_to_all_forward, called with the same dims, inputs and options and the residuals it
/// left: moe::backward of all devices' tokens.
///   on each device, chunk by chunk: send the rows of d_out and the slots' weights where the slots' rows went,
///   go through the own experts, send back the rows' cotangents and those of the weights, and sum at the token.
///   Router, shared expert and cotangents of weights as ring_backward
/// shapes    sharded_layer.hpp
/// dtypes    as moe::backward; rows are sent in S, routing weights and their cotangents in A
/// writes    all of d_hidden; each weight cotangent given, overwritten or added to
/// alias     as moe::backward
/// specials  as ring_backward
/// order     as all_to_all_forward; the rows of an expert stand in (source, slot) order, the ring's
/// memory    all_to_all_backward_workspace_bytes
/// cost      all_to_all_messages; 12 D F flops a kept row (14 under wo_output)
/// throws    as all_to_all_forward; Error for residuals or cotangents of another shape
/// source    spec/moe.md 4 and 7
template <Communicator Device, Storage S, Storage R>
void all_to_all_backward(Device& device, const Dims& dims, const Inputs<S, R>& in,
                         const OutputCotangents<S>& d, const ShardedOptions& options,
                         const AllToAllResiduals<S>& residuals,
                         const InputCotangents<AccumulatorOf<S>>& out, Workspace& workspace) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::all_to_all_backward";
  const LayerShards shards =
      detail::exchange_shards(where, device.topology(), device.id(), dims, options);
  detail::check_sharded_inputs(where, dims, shards, in);
  detail::check_sharded_output_cotangents(where, dims, d);
  detail::check_exchange_residuals(where, dims, shards, residuals);
  detail::check_sharded_cotangents(where, dims, shards, out);

  const Workspace::Frame frame(workspace);
  const GluOptions glu = detail::glu_options(options.layer);
  const MatrixView<A> d_expert_weights = detail::take_matrix<A>(workspace, dims.tokens, dims.top_k);
  {
    const Workspace::Frame routed(workspace);
    const ExpertWeights<S> weights = detail::gather_experts(device, dims, shards, in, workspace);
    const detail::ExpertCotangents<A> d_weights(dims, shards, out, workspace);
    for (std::int64_t chunk = 0; chunk < shards.chunks; ++chunk) {
      const Workspace::Frame each(workspace);
      const std::int64_t first = shards.first(chunk);
      const std::int64_t count = shards.count(chunk);
      const detail::SourceChunk source = detail::source_chunk(dims, shards, residuals, chunk);
      const detail::ArrivedChunk arrived = detail::arrived_chunk(shards, residuals, chunk);
      const std::int64_t sent = source.total_rows();
      const std::int64_t received = arrived.total_rows();
      const MatrixView<S> leaving = detail::take_matrix<S>(workspace, sent, dims.hidden);
      const MatrixView<S> returned = detail::take_matrix<S>(workspace, sent, dims.hidden);
      const MatrixView<A> slot_weights = detail::take_matrix<A>(workspace, sent, 1);
      const MatrixView<A> d_slot_weights = detail::take_matrix<A>(workspace, sent, 1);
      const MatrixView<S> d_rows = detail::take_matrix<S>(workspace, received, dims.hidden);
      const MatrixView<S> results = detail::take_matrix<S>(workspace, received, dims.hidden);
      const MatrixView<A> row_weights = detail::take_matrix<A>(workspace, received, 1);
      const MatrixView<A> d_row_weights = detail::take_matrix<A>(workspace, received, 1);
      constexpr bool narrows = !std::is_same_v<S, A>;
      const MatrixView<A> wide =
          detail::take_matrix<A>(workspace, narrows ? received : 0, dims.hidden);

      sort<S>(source.map(), source.window(), d.d_out.row_block(first, count), leaving);
      sort_weights<A>(source.map(), source.window(),
                      residuals.layer.expert_weights.row_block(first, count),
                      detail::elements_of(slot_weights));
      {
        const detail::MoeTraffic label(device, detail::exchange_out_label);
        detail::exchange_rows<S>(device, shards.group, source.rows, leaving, arrived.rows, d_rows,
                                 workspace);
        detail::exchange_rows<A>(device, shards.group, source.rows, slot_weights, arrived.rows,
                                 row_weights, workspace);
      }
      MatrixView<A> d_hidden;
      if constexpr (narrows) {
        d_hidden = wide;
      } else {
        d_hidden = results;
      }
      const RoutingMap map = arrived.map();
      routed_experts_backward<S>(
          map, routing_window(map), row_weights,
          residuals.arrived.row_block(chunk * shards.chunk_rows, received), weights,
          {.d_out = d_rows,
           .gate_up =
               residuals.layer.gate_up.row_block(chunk * shards.chunk_rows, shards.chunk_rows)},
          options.layer.weight_grad_from, glu,
          {.d_hidden = d_hidden,
           .write = Write::overwrite,
           .d_expert_weights = d_row_weights,
           .d_wi = d_weights.wi(chunk),
           .d_wo = d_weights.wo(chunk)},
          workspace);
      if constexpr (narrows) {
        convert(detail::elements_of(ConstMatrixView<A>(d_hidden)), detail::elements_of(results));
      }
      {
        const detail::MoeTraffic label(device, detail::exchange_back_label);
        detail::exchange_rows<S>(device, shards.group, arrived.rows, results, source.rows, returned,
                                 workspace);
        detail::exchange_rows<A>(device, shards.group, arrived.rows, d_row_weights, source.rows,
                                 d_slot_weights, workspace);
      }
      sort_backward<S, A>(source.map(), source.window(), returned,
                          out.d_hidden.row_block(first, count), Write::overwrite);
      unsort_weights<A>(source.map(), source.window(),
                        detail::elements_of(ConstMatrixView<A>(d_slot_weights)),
                        d_expert_weights.row_block(first, count));
    }
    d_weights.settle(device, workspace);
  }
  detail::route_own_backward(device, dims, shards, in, d, options.layer, residuals.layer,
                             d_expert_weights, out, workspace);
  detail::shared_own_backward(device, dims, shards, in, d, options.layer, residuals.layer, out,
                              workspace);
}

}  // namespace heddle::moe

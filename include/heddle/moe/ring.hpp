#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "heddle/core/elementwise.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/mesh/collectives.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/topology.hpp"
#include "heddle/moe/arguments.hpp"
#include "heddle/moe/detail/sharded_parts.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/residuals.hpp"
#include "heddle/moe/routed_experts.hpp"
#include "heddle/moe/routing_map.hpp"
#include "heddle/moe/routing_window.hpp"
#include "heddle/moe/sharded_layer.hpp"

// The ring of experts: the tokens of an expert group are gathered on all of its devices, each computes what
// its own experts make of them, and the parts are summed in rank order. Every function here is called by
// every device of a mesh with its own shards; sharded_layer.hpp has their shapes.

namespace heddle::moe {

/// What the forward of a ring leaves for its backward.
template <Storage S>
struct RingResiduals {
  using A = AccumulatorOf<S>;
  /// Of the own tokens; its maps and gate_up are those of the own experts and the group's tokens, chunk
  /// after chunk.
  Residuals<S> layer;
  MatrixView<A> expert_weights;  ///< [chunks * group_slice, K], of the group's tokens
  MatrixView<S> hidden;          ///< [chunks * group_slice, D], gathered

  [[nodiscard]] bool wanted() const { return layer.wanted(); }
};

namespace detail {

inline constexpr const char* ring_routing_label = "moe.ring.routing";
inline constexpr const char* ring_gather_label = "moe.ring.gather";
inline constexpr const char* ring_sum_label = "moe.ring.sum";
inline constexpr const char* ring_weights_label = "moe.ring.d_expert_weights";

/// A token's record in the routing message: its K ids and the bits of its K weights, in 32-bit words.
template <Accumulator A>
struct RoutingRecord {
  static constexpr auto words_a_weight =
      static_cast<std::int64_t>(sizeof(A) / sizeof(std::int32_t));

  [[nodiscard]] static std::int64_t words(std::int64_t top_k) {
    return top_k * (1 + words_a_weight);
  }
  static void write(std::span<const std::int32_t> ids, std::span<const A> weights,
                    std::int32_t* to) {
    std::copy(ids.begin(), ids.end(), to);
    std::memcpy(to + ids.size(), weights.data(), weights.size_bytes());
  }
  static void read(const std::int32_t* from, std::span<std::int32_t> ids, std::span<A> weights) {
    std::copy_n(from, ids.size(), ids.data());
    std::memcpy(weights.data(), from + ids.size(), weights.size_bytes());
  }
};

template <Storage S>
[[nodiscard]] RingResiduals<S> take_ring(const Dims& dims, const LayerShards& shards,
                                         bool with_rows, Workspace& memory) {
  using A = AccumulatorOf<S>;
  RingResiduals<S> kept;
  kept.layer = take_own_residuals<S>(dims, with_rows, memory);
  const std::int64_t tokens = shards.chunks * shards.group_slice();
  kept.layer.permutation = memory.take<std::int32_t>(tokens * dims.top_k);
  kept.layer.inverse = memory.take<std::int32_t>(tokens * dims.top_k);
  kept.layer.group_offsets = memory.take<std::int64_t>(shards.chunks * (shards.experts.count + 1));
  kept.expert_weights = take_matrix<A>(memory, tokens, dims.top_k);
  if (with_rows) {
    kept.layer.gate_up =
        take_matrix<S>(memory, shards.chunks * shards.chunk_rows, 2 * dims.expert_hidden);
    kept.hidden = take_matrix<S>(memory, tokens, dims.hidden);
  }
  return kept;
}

template <Storage S>
[[nodiscard]] std::size_t ring_bytes(const Dims& dims, const LayerShards& shards, bool with_rows) {
  using A = AccumulatorOf<S>;
  const std::int64_t tokens = shards.chunks * shards.group_slice();
  std::size_t bytes =
      own_residual_bytes<S>(dims, with_rows) +
      2 * Workspace::bytes_for<std::int32_t>(tokens * dims.top_k) +
      Workspace::bytes_for<std::int64_t>(shards.chunks * (shards.experts.count + 1)) +
      Workspace::bytes_for<A>(tokens * dims.top_k);
  if (with_rows) {
    bytes += Workspace::bytes_for<S>(shards.chunks * shards.chunk_rows * 2 * dims.expert_hidden) +
             Workspace::bytes_for<S>(tokens * dims.hidden);
  }
  return bytes;
}

template <Storage S>
void check_ring_residuals(std::string_view where, const Dims& dims, const LayerShards& shards,
                          const RingResiduals<S>& kept) {
  check_own_residuals(where, dims, kept.layer);
  const std::int64_t tokens = shards.chunks * shards.group_slice();
  const std::int64_t slots = tokens * dims.top_k;
  constexpr std::string_view slots_name = "token_chunks * slots of the group";
  constexpr std::string_view tokens_name = "token_chunks * tokens of the group";
  require_length(where, "residuals.layer.permutation", kept.layer.permutation, slots_name, slots);
  require_length(where, "residuals.layer.inverse", kept.layer.inverse, slots_name, slots);
  require_length(where, "residuals.layer.group_offsets", kept.layer.group_offsets,
                 "token_chunks * (own experts + 1)", shards.chunks * (shards.experts.count + 1));
  require_shape(where, "residuals.layer.gate_up", kept.layer.gate_up, "token_chunks * chunk_rows",
                shards.chunks * shards.chunk_rows, "2 * dims.expert_hidden",
                2 * dims.expert_hidden);
  require_shape(where, "residuals.expert_weights", kept.expert_weights, tokens_name, tokens,
                "dims.top_k", dims.top_k);
  require_shard(where, "residuals.hidden", kept.hidden, tokens_name, tokens, "dims.hidden",
                dims.hidden);
}

[[nodiscard]] inline LayerShards ring_shards(std::string_view where, const Topology& mesh,
                                             std::int64_t id, const Dims& dims,
                                             const ShardedOptions& options) {
  const LayerShards shards = layer_shards(where, mesh, id, dims, options);
  require(options.layer.dispatch.strategy == Strategy::ring, where,
          "options.layer.dispatch.strategy", options.layer.dispatch.strategy, "must be ring");
  return shards;
}

/// The group's tokens of one chunk, device after device.
[[nodiscard]] inline RouterDims chunk_dims(const Dims& dims, const LayerShards& shards,
                                           std::int64_t chunk) {
  return {
      .tokens = shards.members * shards.count(chunk), .experts = dims.experts, .top_k = dims.top_k};
}

template <Storage S>
[[nodiscard]] RoutingMapStorage ring_map_storage(const Dims& dims, const LayerShards& shards,
                                                 const RingResiduals<S>& kept, std::int64_t chunk) {
  const auto first = static_cast<std::size_t>(chunk * shards.group_slice() * dims.top_k);
  const auto count = static_cast<std::size_t>(chunk_dims(dims, shards, chunk).slots());
  const auto offsets = static_cast<std::size_t>(shards.experts.count + 1);
  return {kept.layer.permutation.subspan(first, count), kept.layer.inverse.subspan(first, count),
          kept.layer.group_offsets.subspan(static_cast<std::size_t>(chunk) * offsets, offsets)};
}

/// The map that the forward built there.
template <Storage S>
[[nodiscard]] RoutingMap ring_map(const Dims& dims, const LayerShards& shards,
                                  const RingResiduals<S>& kept, std::int64_t chunk) {
  const RoutingMapStorage storage = ring_map_storage(dims, shards, kept, chunk);
  return {.dims = chunk_dims(dims, shards, chunk),
          .experts = shards.experts,
          .permutation =
              storage.permutation.first(static_cast<std::size_t>(storage.group_offsets.back())),
          .inverse = storage.inverse,
          .group_offsets = storage.group_offsets};
}

template <class T>
[[nodiscard]] MatrixView<T> chunk_rows_of(MatrixView<T> all, const LayerShards& shards,
                                          std::int64_t chunk) {
  return all.row_block(chunk * shards.group_slice(), shards.members * shards.count(chunk));
}

/// Every device's own tokens as records, in rank order: one message for all chunks of the layer.
template <Communicator Device, Storage S>
[[nodiscard]] std::span<const std::int32_t> gather_routing(Device& device, const Dims& dims,
                                                           const LayerShards& shards,
                                                           const Residuals<S>& own,
                                                           Workspace& workspace) {
  using Record = RoutingRecord<AccumulatorOf<S>>;
  const std::int64_t words = Record::words(dims.top_k);
  const auto all = workspace.take<std::int32_t>(shards.members * dims.tokens * words);
  const Workspace::Frame frame(workspace);
  const auto mine = workspace.take<std::int32_t>(dims.tokens * words);
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    Record::write(own.expert_ids.row(t), own.expert_weights.row(t), mine.data() + t * words);
  }
  const MoeTraffic label(device, ring_routing_label);
  mesh::all_gather<Device, std::int32_t>(device, shards.group, mine, all);
  return all;
}

/// The ids and weights of one chunk out of that message, in gathered order.
template <Accumulator A>
void read_routing(const Dims& dims, const LayerShards& shards,
                  std::span<const std::int32_t> records, std::int64_t chunk,
                  MatrixView<std::int32_t> ids, MatrixView<A> weights) {
  const std::int64_t words = RoutingRecord<A>::words(dims.top_k);
  const std::int64_t count = shards.count(chunk);
  for (std::int64_t member = 0; member < shards.members; ++member) {
    for (std::int64_t t = 0; t < count; ++t) {
      const std::int64_t token = member * dims.tokens + shards.first(chunk) + t;
      const std::int64_t row = member * count + t;
      RoutingRecord<A>::read(records.data() + token * words, ids.row(row), weights.row(row));
    }
  }
}

/// Gathers, computes and sums the chunks of a layer. gather(c) and sum(c) start a collective, compute(c)
/// works between the two, settle(c) takes what the sum brought. Pipelined, the gather of chunk c + 1 and the
/// sum of chunk c - 1 are under way while chunk c is computed, in buffers of its parity.
template <class Gather, class Compute, class Sum, class Settle>
void run_chunks(std::int64_t chunks, ChunkSchedule schedule, const Gather& gather,
                const Compute& compute, const Sum& sum, const Settle& settle) {
  using Gathering = std::invoke_result_t<Gather, std::int64_t>;
  using Summing = std::invoke_result_t<Sum, std::int64_t>;
  const bool ahead = schedule == ChunkSchedule::pipelined;
  std::optional<Gathering> gathering;
  std::optional<Summing> summing;
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (!gathering) {
      gathering.emplace(gather(chunk));
    }
    gathering->finish();
    gathering.reset();
    if (ahead && chunk + 1 < chunks) {
      gathering.emplace(gather(chunk + 1));
    }
    compute(chunk);
    Summing next = sum(chunk);
    if (summing) {
      summing->finish();
      summing.reset();
      settle(chunk - 1);
    }
    if (ahead) {
      summing.emplace(std::move(next));
    } else {
      next.finish();
      settle(chunk);
    }
  }
  if (summing) {
    summing->finish();
    settle(chunks - 1);
  }
}

/// Buffers for as many chunks as are under way at a time.
template <class T>
class ChunkBuffers {
 public:
  ChunkBuffers(ChunkSchedule schedule, std::int64_t chunks, std::int64_t rows, std::int64_t cols,
               Workspace& workspace)
      : rows_(rows), all_(take_matrix<T>(workspace, depth(schedule, chunks) * rows, cols)) {}

  /// The first `rows` rows of the chunk's buffer.
  [[nodiscard]] MatrixView<T> of(std::int64_t chunk, std::int64_t rows) const {
    return all_.row_block(all_.rows() > rows_ ? chunk % 2 * rows_ : 0, rows);
  }
  [[nodiscard]] static std::size_t bytes(ChunkSchedule schedule, std::int64_t chunks,
                                         std::int64_t rows, std::int64_t cols) {
    return Workspace::bytes_for<T>(depth(schedule, chunks) * rows * cols);
  }

 private:
  [[nodiscard]] static std::int64_t depth(ChunkSchedule schedule, std::int64_t chunks) {
    return schedule == ChunkSchedule::pipelined && chunks > 1 ? 2 : 1;
  }

  std::int64_t rows_;
  MatrixView<T> all_;
};

[[nodiscard]] inline Overlap overlap_of(ChunkSchedule schedule) {
  return schedule == ChunkSchedule::pipelined ? Overlap::overlappable : Overlap::blocking;
}

}  // namespace detail

/// Bytes of the residuals of a ring on one device.
/// throws    as ring_forward
template <Storage S>
[[nodiscard]] std::size_t ring_residual_bytes(const Topology& mesh, const Dims& dims,
                                              const ShardedOptions& options) {
  return detail::ring_bytes<S>(
      dims, detail::ring_shards("moe::ring_residual_bytes", mesh, 0, dims, options), true);
}

/// The residuals of a ring on one device in memory of the caller's, as long as the frame they are taken in
/// lasts.
/// throws    as ring_forward
template <Storage S>
[[nodiscard]] RingResiduals<S> take_ring_residuals(const Topology& mesh, const Dims& dims,
                                                   const ShardedOptions& options,
                                                   Workspace& memory) {
  return detail::take_ring<S>(
      dims, detail::ring_shards("moe::take_ring_residuals", mesh, 0, dims, options), true, memory);
}

/// Bytes of workspace that suffice for ring_forward on so many threads, with or without residuals. The map
/// builder's own are RoutingMapBuilder::workspace_bytes.
/// throws    as ring_forward
template <Storage S, Storage R = S>
[[nodiscard]] std::size_t ring_forward_workspace_bytes(const Topology& mesh, const Dims& dims,
                                                       const ShardedOptions& options,
                                                       std::int64_t threads) {
  using A = AccumulatorOf<S>;
  const LayerShards shards =
      detail::ring_shards("moe::ring_forward_workspace_bytes", mesh, 0, dims, options);
  const GluOptions glu = detail::glu_options(options.layer);
  const std::int64_t group = shards.group_slice();
  const std::int64_t words = detail::RoutingRecord<A>::words(dims.top_k);
  const auto buffers = [&](std::int64_t rows) {
    return detail::ChunkBuffers<S>::bytes(options.schedule, shards.chunks, rows, dims.hidden);
  };
  const std::size_t message = Workspace::bytes_for<std::int32_t>(dims.tokens * words);
  const std::size_t routed =
      Workspace::bytes_for<std::int32_t>(shards.members * dims.tokens * words) +
      std::max(message,
               detail::gather_experts_bytes<S>(dims, shards) +
                   Workspace::bytes_for<std::int32_t>(group * dims.top_k) + 2 * buffers(group) +
                   buffers(shards.slice) +
                   routed_workspace_bytes<S>(detail::own_expert_dims(dims, shards), glu, threads));
  return detail::ring_bytes<S>(dims, shards, false) +
         std::max({detail::route_own_bytes<S, R>(dims, shards, threads), routed,
                   detail::shared_own_bytes<S>(dims, shards, glu, threads),
                   Workspace::bytes_for<detail::DropRecord>(mesh.devices())});
}

/// One routed layer over a mesh: moe::forward of all devices' tokens, each writing those of its own.
///   on each device: route the own tokens; gather their ids and weights over the expert group, one message a
///   layer; chunk by chunk gather the group's hidden, compute the own experts' part of every token, and sum
///   the parts in rank order; the shared expert on the own tokens, last
/// shapes    sharded_layer.hpp
/// dtypes    as moe::forward; what is gathered and the parts that are summed are in S, a sum is formed in A
///           and rounded to S once
/// writes    all of out and of each output given, group_sizes of the own tokens; the residuals, where they
///           are
/// alias     as moe::forward
/// specials  as moe::forward. A buffer belongs to one device's experts in one chunk. The report's router is
///           of the own tokens, everything else in it of all devices, the same on each: a single shard that
///           overflows is known to all, which then may run again as replay_dispatch says
/// order     as moe::forward; no schedule, thread count or, without drops, number of chunks changes a bit.
///           The number of members does, for a token's experts are summed device by device
/// memory    ring_forward_workspace_bytes; ring_residual_bytes<S> in the residuals
/// cost      ring_messages; 6 D F flops a kept row
/// throws    before anything is sent: Error for what layer_shards refuses, another strategy, views of another
///           shape or, where they are sent, with gaps; as Communicator
/// source    spec/moe.md 7
template <Communicator Device, Storage S, Storage R>
LayerReport ring_forward(Device& device, const Dims& dims, const Inputs<S, R>& in,
                         const ShardedOptions& options, const Outputs<AccumulatorOf<S>>& out,
                         const RingResiduals<S>& residuals, RoutingMapBuilder& maps,
                         Workspace& workspace) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::ring_forward";
  const LayerShards shards =
      detail::ring_shards(where, device.topology(), device.id(), dims, options);
  detail::check_sharded_inputs(where, dims, shards, in);
  detail::check_outputs(where, dims, out);
  const bool keeps = residuals.wanted();
  if (keeps) {
    detail::check_ring_residuals(where, dims, shards, residuals);
  }

  const Workspace::Frame frame(workspace);
  const GluOptions glu = detail::glu_options(options.layer);
  const RingResiduals<S> kept =
      keeps ? residuals : detail::take_ring<S>(dims, shards, false, workspace);
  LayerReport report;
  report.router = detail::route_own_tokens(device, dims, shards, in, options.layer.router,
                                           kept.layer, workspace);
  DropReport drops;
  {
    const Workspace::Frame routed(workspace);
    const auto records = detail::gather_routing(device, dims, shards, kept.layer, workspace);
    const ExpertWeights<S> weights = detail::gather_experts(device, dims, shards, in, workspace);
    const std::int64_t group = shards.group_slice();
    const auto ids = detail::take_matrix<std::int32_t>(workspace, group, dims.top_k);
    const auto buffers = [&](std::int64_t rows) {
      return detail::ChunkBuffers<S>(options.schedule, shards.chunks, rows, dims.hidden, workspace);
    };
    const detail::ChunkBuffers<S> gathered = buffers(keeps ? 0 : group);
    const detail::ChunkBuffers<S> parts = buffers(group);
    const detail::ChunkBuffers<S> sums = buffers(shards.slice);
    const auto hidden_of = [&](std::int64_t chunk) {
      return keeps ? detail::chunk_rows_of(kept.hidden, shards, chunk)
                   : gathered.of(chunk, shards.members * shards.count(chunk));
    };
    const auto parts_of = [&](std::int64_t chunk) {
      return parts.of(chunk, shards.members * shards.count(chunk));
    };
    const Overlap overlap = detail::overlap_of(options.schedule);
    detail::run_chunks(
        shards.chunks, options.schedule,
        [&](std::int64_t chunk) {
          const detail::MoeTraffic label(device, detail::ring_gather_label);
          return mesh::start_all_gather<Device, S>(
              device, shards.group,
              detail::elements_of(in.hidden.row_block(shards.first(chunk), shards.count(chunk))),
              detail::elements_of(hidden_of(chunk)), CallSite::here(), overlap);
        },
        [&](std::int64_t chunk) {
          const RouterDims chunk_dims = detail::chunk_dims(dims, shards, chunk);
          const MatrixView<std::int32_t> chunk_ids = ids.row_block(0, chunk_dims.tokens);
          const MatrixView<A> expert_weights =
              detail::chunk_rows_of(kept.expert_weights, shards, chunk);
          detail::read_routing<A>(dims, shards, records, chunk, chunk_ids, expert_weights);
          const RoutingMap map = maps.build(chunk_dims, chunk_ids, shards.experts,
                                            detail::ring_map_storage(dims, shards, kept, chunk));
          const RoutingWindow window = routing_window(map, shards.buffer_rows);
          drops.add(window, shards.balanced);
          routed_experts<S, S>(map, window, expert_weights, hidden_of(chunk), weights,
                               {.out = parts_of(chunk),
                                .write = Write::overwrite,
                                .gate_up = kept.layer.gate_up.row_block(chunk * shards.chunk_rows,
                                                                        shards.chunk_rows)},
                               glu, workspace);
        },
        [&](std::int64_t chunk) {
          const detail::MoeTraffic label(device, detail::ring_sum_label);
          return mesh::start_reduce_scatter<void, Device, S>(
              device, shards.group, detail::elements_of(parts_of(chunk)),
              detail::elements_of(sums.of(chunk, shards.count(chunk))), Reduce::sum,
              CallSite::here(), overlap);
        },
        [&](std::int64_t chunk) {
          detail::widen_rows<S, A>(sums.of(chunk, shards.count(chunk)),
                                   out.out.row_block(shards.first(chunk), shards.count(chunk)));
        });
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

/// Bytes of workspace that suffice for ring_backward on so many threads.
/// throws    as ring_backward
template <Storage S, Storage R = S>
[[nodiscard]] std::size_t ring_backward_workspace_bytes(const Topology& mesh, const Dims& dims,
                                                        const ShardedOptions& options,
                                                        std::int64_t threads) {
  using A = AccumulatorOf<S>;
  const LayerShards shards =
      detail::ring_shards("moe::ring_backward_workspace_bytes", mesh, 0, dims, options);
  const GluOptions glu = detail::glu_options(options.layer);
  const std::int64_t group = shards.group_slice();
  const auto buffers = [&](std::int64_t rows) {
    return detail::ChunkBuffers<S>::bytes(options.schedule, shards.chunks, rows, dims.hidden);
  };
  const detail::GatherBytes d_weights = detail::ExpertCotangents<A>::bytes(dims, shards);
  const std::size_t routed =
      Workspace::bytes_for<A>(shards.members * dims.slots()) +
      detail::gather_experts_bytes<S>(dims, shards) + d_weights.kept + 2 * buffers(group) +
      buffers(shards.slice) + Workspace::bytes_for<A>(group * dims.top_k) +
      Workspace::bytes_for<A>(std::is_same_v<S, A> ? 0 : group * dims.hidden) +
      std::max(d_weights.passing,
               routed_backward_workspace_bytes<S>(detail::own_expert_dims(dims, shards),
                                                  options.layer.weight_grad_from, glu, threads));
  return Workspace::bytes_for<A>(dims.slots()) +
         std::max({routed, detail::route_own_backward_bytes<S, R>(dims, shards, threads),
                   detail::shared_own_backward_bytes<S>(dims, shards, options.layer, threads)});
}

/// The backward of ring_forward, called with the same dims, inputs and options and the residuals it left:
/// moe::backward of all devices' tokens.
///   on each device: chunk by chunk gather the group's d_out, go through the own experts, and sum the parts of
///   d_hidden in rank order; sum the routing weights' cotangents at their tokens' homes, one message a layer;
///   router and shared expert on the own tokens. Cotangents of weights are summed over the devices that share
///   out the weight, and over those that have copies of it; nothing is divided by anything
/// shapes    sharded_layer.hpp
/// dtypes    as moe::backward; gathered d_out and the parts of d_hidden are in S as in ring_forward, the
///           cotangents of weights and routing weights in A
/// writes    all of d_hidden; each weight cotangent given, overwritten or added to
/// alias     as moe::backward
/// specials  as moe::backward. A weight cotangent that is not given is neither computed nor sent; that of a
///           frozen router is not sent either. Whether it is given must be the same on all devices
/// order     as ring_forward
/// memory    ring_backward_workspace_bytes
/// cost      ring_messages; 12 D F flops a kept row (14 under wo_output)
/// throws    as ring_forward; Error for residuals or cotangents of another shape
/// source    spec/moe.md 4 and 7
template <Communicator Device, Storage S, Storage R>
void ring_backward(Device& device, const Dims& dims, const Inputs<S, R>& in,
                   const OutputCotangents<S>& d, const ShardedOptions& options,
                   const RingResiduals<S>& residuals, const InputCotangents<AccumulatorOf<S>>& out,
                   Workspace& workspace) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::ring_backward";
  const LayerShards shards =
      detail::ring_shards(where, device.topology(), device.id(), dims, options);
  detail::check_sharded_inputs(where, dims, shards, in);
  detail::check_sharded_output_cotangents(where, dims, d);
  detail::check_ring_residuals(where, dims, shards, residuals);
  detail::check_sharded_cotangents(where, dims, shards, out);

  const Workspace::Frame frame(workspace);
  const GluOptions glu = detail::glu_options(options.layer);
  const MatrixView<A> d_expert_weights = detail::take_matrix<A>(workspace, dims.tokens, dims.top_k);
  {
    const Workspace::Frame routed(workspace);
    const std::int64_t group = shards.group_slice();
    const auto group_d_weights =
        detail::take_matrix<A>(workspace, shards.members * dims.tokens, dims.top_k);
    const ExpertWeights<S> weights = detail::gather_experts(device, dims, shards, in, workspace);
    const detail::ExpertCotangents<A> d_weights(dims, shards, out, workspace);
    const auto buffers = [&](std::int64_t rows) {
      return detail::ChunkBuffers<S>(options.schedule, shards.chunks, rows, dims.hidden, workspace);
    };
    const detail::ChunkBuffers<S> gathered = buffers(group);
    const detail::ChunkBuffers<S> parts = buffers(group);
    const detail::ChunkBuffers<S> sums = buffers(shards.slice);
    const auto chunk_d_weights = detail::take_matrix<A>(workspace, group, dims.top_k);
    constexpr bool narrows = !std::is_same_v<S, A>;
    const auto wide_part = detail::take_matrix<A>(workspace, narrows ? group : 0, dims.hidden);
    const Overlap overlap = detail::overlap_of(options.schedule);
    const auto tokens_of = [&](std::int64_t chunk) { return shards.members * shards.count(chunk); };
    detail::run_chunks(
        shards.chunks, options.schedule,
        [&](std::int64_t chunk) {
          const detail::MoeTraffic label(device, detail::ring_gather_label);
          return mesh::start_all_gather<Device, S>(
              device, shards.group,
              detail::elements_of(d.d_out.row_block(shards.first(chunk), shards.count(chunk))),
              detail::elements_of(gathered.of(chunk, tokens_of(chunk))), CallSite::here(), overlap);
        },
        [&](std::int64_t chunk) {
          const RoutingMap map = detail::ring_map(dims, shards, residuals, chunk);
          const MatrixView<S> part = parts.of(chunk, tokens_of(chunk));
          MatrixView<A> d_hidden;
          if constexpr (narrows) {
            d_hidden = wide_part.row_block(0, tokens_of(chunk));
          } else {
            d_hidden = part;
          }
          const auto slots = chunk_d_weights.row_block(0, tokens_of(chunk));
          routed_experts_backward<S>(
              map, routing_window(map, shards.buffer_rows),
              detail::chunk_rows_of(residuals.expert_weights, shards, chunk),
              detail::chunk_rows_of(residuals.hidden, shards, chunk), weights,
              {.d_out = gathered.of(chunk, tokens_of(chunk)),
               .gate_up =
                   residuals.layer.gate_up.row_block(chunk * shards.chunk_rows, shards.chunk_rows)},
              options.layer.weight_grad_from, glu,
              {.d_hidden = d_hidden,
               .write = Write::overwrite,
               .d_expert_weights = slots,
               .d_wi = d_weights.wi(chunk),
               .d_wo = d_weights.wo(chunk)},
              workspace);
          if constexpr (narrows) {
            convert(detail::elements_of(ConstMatrixView<A>(d_hidden)), detail::elements_of(part));
          }
          for (std::int64_t member = 0; member < shards.members; ++member) {
            detail::copy_rows<A>(
                slots.row_block(member * shards.count(chunk), shards.count(chunk)),
                group_d_weights.row_block(member * dims.tokens + shards.first(chunk),
                                          shards.count(chunk)));
          }
        },
        [&](std::int64_t chunk) {
          const detail::MoeTraffic label(device, detail::ring_sum_label);
          return mesh::start_reduce_scatter<void, Device, S>(
              device, shards.group, detail::elements_of(parts.of(chunk, tokens_of(chunk))),
              detail::elements_of(sums.of(chunk, shards.count(chunk))), Reduce::sum,
              CallSite::here(), overlap);
        },
        [&](std::int64_t chunk) {
          detail::widen_rows<S, A>(
              sums.of(chunk, shards.count(chunk)),
              out.d_hidden.row_block(shards.first(chunk), shards.count(chunk)));
        });
    {
      const detail::MoeTraffic label(device, detail::ring_weights_label);
      mesh::reduce_scatter<void, Device, A>(device, shards.group,
                                            detail::elements_of(group_d_weights),
                                            detail::elements_of(d_expert_weights));
    }
    d_weights.settle(device, workspace);
  }
  detail::route_own_backward(device, dims, shards, in, d, options.layer, residuals.layer,
                             d_expert_weights, out, workspace);
  detail::shared_own_backward(device, dims, shards, in, d, options.layer, residuals.layer, out,
                              workspace);
}

}  // namespace heddle::moe

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/shard_rules.hpp"
#include "heddle/mesh/topology.hpp"
#include "heddle/moe/arguments.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/routing_map.hpp"
#include "heddle/moe/routing_window.hpp"

// How one routed layer lies over a mesh, whichever way its rows travel. A device has T tokens of its own
// (dims.tokens, the same number on all devices) and shards of the weights; everything else of Dims is the
// whole layer's. Inputs, outputs and cotangents are the structs of arguments.hpp with these shapes:
//
//   hidden, out, d_*              [T, ...]                of the own tokens
//   router_weight                 [D/dense, E]            dense = devices that share out a dense weight
//   wi                            [E_l*D/parts, 2F]       expert by expert this device's rows of D
//   wo                            [E_l*F, D/parts]        this device's columns of D
//   shared_wi, _wo, _gate         [D/dense, 2Fs], [Fs, D/dense], [D/dense, 1]
//
// with E_l = E / P experts of the device's place in its expert group, and parts = devices that share out an
// expert's D: shard_rules.hpp. Cotangents of weights have the shapes of their weights.

namespace heddle::moe {

/// In which order the token chunks of a device gather, compute and sum. No bit depends on it.
enum class ChunkSchedule {
  plain,      ///< one after the other, nothing in flight while a device computes
  pipelined,  ///< the next chunk is gathered and the one before it summed beside the experts
};

/// How a layer proceeds over a mesh.
struct ShardedOptions {
  /// Of its dispatch, groups and shards are the mesh's: 1, or what they are there.
  Options layer = {};
  ShardRules rules = {};
  ChunkSchedule schedule = ChunkSchedule::plain;
};

/// A device's part of a layer.
struct LayerShards {
  AxisTuple group;           ///< the expert group
  std::int64_t members = 1;  ///< P, its devices
  std::int64_t index = 0;    ///< which of them this one is
  ExpertRange experts;       ///< held by this device

  AxisTuple expert_axes;  ///< share out an expert's D
  std::int64_t expert_parts = 1;
  AxisTuple dense_axes;  ///< share out D of the router's and the shared expert's weights
  std::int64_t dense_parts = 1;
  AxisTuple dense_copies;  ///< along which those are copies
  std::int64_t copies = 1;

  std::int64_t tokens = 0;  ///< T, of the device
  std::int64_t chunks = 1;
  std::int64_t slice = 0;     ///< of a device's tokens in a whole chunk
  std::int64_t balanced = 0;  ///< slots of them: a device's even share
  std::optional<std::int64_t> buffer_rows;
  std::int64_t chunk_rows = 0;  ///< most rows that a chunk keeps

  /// A device's tokens [first(c), first(c) + count(c)) are its part of chunk c.
  [[nodiscard]] std::int64_t first(std::int64_t chunk) const {
    return std::min(chunk * slice, tokens);
  }
  [[nodiscard]] std::int64_t count(std::int64_t chunk) const {
    return first(chunk + 1) - first(chunk);
  }
  /// The tokens of a whole chunk on all devices of the group.
  [[nodiscard]] std::int64_t group_slice() const { return members * slice; }
  /// The buffer as LayerReport has it: never more than all slots of the group's chunk.
  [[nodiscard]] std::int64_t reported_buffer_rows(std::int64_t top_k) const {
    const std::int64_t slots = group_slice() * top_k;
    return std::min(buffer_rows.value_or(slots), slots);
  }
};

/// The part of device `id`.
/// throws    Error for bad dims, options or rules, a dispatch that says another number of groups or shards
///           than the mesh, experts or D that the mesh does not divide, more slots in a group's chunk than
///           an int32 can number
/// source    spec/moe.md 1.2 and 7, spec/mesh.md 1.2
[[nodiscard]] inline LayerShards layer_shards(std::string_view where, const Topology& mesh,
                                              std::int64_t id, const Dims& dims,
                                              const ShardedOptions& options) {
  dims.validate(where);
  detail::check_options(where, dims, options.layer);
  require(options.schedule == ChunkSchedule::plain || options.schedule == ChunkSchedule::pipelined,
          where, "options.schedule", options.schedule, "must be plain or pipelined");
  const ArrayShards expert = shards_of(ModelArray::expert_wi, options.rules);
  const ArrayShards dense = shards_of(ModelArray::dense_kernel, options.rules);
  LayerShards shards;
  shards.group = expert_group(options.rules);
  shards.members = shards.group.size(mesh.axes());
  shards.index = mesh.index_in(shards.group, id);
  shards.expert_axes = expert.gathered;
  shards.expert_parts = expert.gathered.size(mesh.axes());
  shards.dense_axes = dense.gathered;
  shards.dense_parts = dense.gathered.size(mesh.axes());
  shards.dense_copies = dense.summed;
  shards.copies = dense.summed.size(mesh.axes());

  const DispatchOptions& dispatch = options.layer.dispatch;
  const auto require_of_mesh = [&](std::string_view name, std::int64_t given, std::int64_t actual) {
    if (given != 1 && given != actual) {
      fail(where, "options.layer.dispatch." + std::string(name), given,
           "must be 1 or that of the mesh (" + std::to_string(actual) + ")");
    }
  };
  require_of_mesh("groups", dispatch.groups, mesh.devices() / shards.members);
  require_of_mesh("shards", dispatch.shards, shards.members);
  require_divisible("experts", dims.experts, mesh.axes(), shards.group);
  require_divisible("hidden of the experts", dims.hidden, mesh.axes(), shards.expert_axes);
  require_divisible("hidden of the dense weights", dims.hidden, mesh.axes(), shards.dense_axes);
  shards.experts.count = dims.experts / shards.members;
  shards.experts.first = shards.index * shards.experts.count;

  shards.tokens = dims.tokens;
  shards.chunks = dispatch.token_chunks;
  shards.slice = (dims.tokens + shards.chunks - 1) / shards.chunks;
  shards.balanced = shards.slice * dims.top_k;
  RouterDims gathered = dims.router();
  gathered.tokens = shards.group_slice();
  gathered.validate(where);
  shards.buffer_rows = buffer_rows(shards.balanced, dispatch.buffer_factor);
  // A token's experts are distinct, so it has at most a row for each expert here.
  shards.chunk_rows = shards.group_slice() * std::min(dims.top_k, shards.experts.count);
  if (shards.buffer_rows) {
    shards.chunk_rows = std::min(shards.chunk_rows, *shards.buffer_rows);
  }
  return shards;
}

/// How the same layer runs again after an overflow, without a drop: no buffer, and so many more chunks that
/// the rows of a chunk fit, however they fall, into the memory of the buffer that overflowed.
/// specials  without a buffer the dispatch itself; where not even one token a chunk fits, one token a chunk
/// throws    as layer_shards
/// source    spec/moe.md 4
[[nodiscard]] inline DispatchOptions replay_dispatch(const Topology& mesh, const Dims& dims,
                                                     const ShardedOptions& options) {
  const LayerShards shards = layer_shards("moe::replay_dispatch", mesh, 0, dims, options);
  DispatchOptions replay = options.layer.dispatch;
  replay.buffer_factor = std::nullopt;
  if (!shards.buffer_rows) {
    return replay;
  }
  const std::int64_t rows_of_a_token = shards.members * std::min(dims.top_k, shards.experts.count);
  const std::int64_t slice = std::max<std::int64_t>(1, *shards.buffer_rows / rows_of_a_token);
  // Doubled, so that a length which the chunks divided is likely to be divided again.
  while ((dims.tokens + replay.token_chunks - 1) / replay.token_chunks > slice) {
    replay.token_chunks *= 2;
  }
  return replay;
}

namespace detail {

inline constexpr AxisTuple all_devices = {Axis::fsdp, Axis::context, Axis::expert};

/// What is sent lies without gaps.
template <class T>
void require_without_gaps(std::string_view where, std::string_view argument, MatrixView<T> view) {
  if (view.rows() > 1 && view.stride() != view.cols()) {
    fail(where, std::string(argument) + ".stride", view.stride(),
         "must equal its cols (" + std::to_string(view.cols()) + "): it is sent");
  }
}

template <class T>
void require_shard(std::string_view where, std::string_view argument, MatrixView<T> view,
                   std::string_view rows_name, std::int64_t rows, std::string_view cols_name,
                   std::int64_t cols) {
  require_shape(where, argument, view, rows_name, rows, cols_name, cols);
  require_without_gaps(where, argument, view);
}

template <Storage S, Storage R>
void check_sharded_inputs(std::string_view where, const Dims& dims, const LayerShards& shards,
                          const Inputs<S, R>& in) {
  static_assert(std::is_same_v<AccumulatorOf<S>, AccumulatorOf<R>>,
                "heddle::moe: the router's weight must have the accumulator of hidden");
  const std::int64_t dense = dims.hidden / shards.dense_parts;
  require_shard(where, "hidden", in.hidden, "dims.tokens", dims.tokens, "dims.hidden", dims.hidden);
  require_shard(where, "router_weight", in.router_weight, "dims.hidden / dense shards", dense,
                "dims.experts", dims.experts);
  require_shard(where, "wi", in.wi, "own experts * dims.hidden / expert shards",
                shards.experts.count * (dims.hidden / shards.expert_parts),
                "2 * dims.expert_hidden", 2 * dims.expert_hidden);
  require_shard(where, "wo", in.wo, "own experts * dims.expert_hidden",
                shards.experts.count * dims.expert_hidden, "dims.hidden / expert shards",
                dims.hidden / shards.expert_parts);
  if (dims.has_shared_expert()) {
    require_shard(where, "shared_wi", in.shared_wi, "dims.hidden / dense shards", dense,
                  "2 * dims.shared_hidden", 2 * dims.shared_hidden);
    require_shard(where, "shared_wo", in.shared_wo, "dims.shared_hidden", dims.shared_hidden,
                  "dims.hidden / dense shards", dense);
    require_shard(where, "shared_gate", in.shared_gate, "dims.hidden / dense shards", dense,
                  "columns", 1);
  } else {
    require_no_shared_weights(where, in);
  }
  if (!in.forced_ids.is_null()) {
    require_shape(where, "forced_ids", in.forced_ids, "dims.tokens", dims.tokens, "dims.top_k",
                  dims.top_k);
  }
  reference::detail::check_segment_ids(where, in.segment_ids, dims.tokens);
}

template <Accumulator A>
void check_sharded_cotangents(std::string_view where, const Dims& dims, const LayerShards& shards,
                              const InputCotangents<A>& out) {
  const std::int64_t dense = dims.hidden / shards.dense_parts;
  constexpr std::string_view dense_name = "dims.hidden / dense shards";
  require_shape(where, "d_hidden", out.d_hidden, "dims.tokens", dims.tokens, "dims.hidden",
                dims.hidden);
  check_cotangent(where, "d_router_weight", out.d_router_weight, dense_name, dense, "dims.experts",
                  dims.experts);
  check_cotangent(where, "d_wi", out.d_wi, "own experts * dims.hidden / expert shards",
                  shards.experts.count * (dims.hidden / shards.expert_parts),
                  "2 * dims.expert_hidden", 2 * dims.expert_hidden);
  check_cotangent(where, "d_wo", out.d_wo, "own experts * dims.expert_hidden",
                  shards.experts.count * dims.expert_hidden, "dims.hidden / expert shards",
                  dims.hidden / shards.expert_parts);
  if (!dims.has_shared_expert()) {
    require_no_shared_cotangents(where, out);
    return;
  }
  check_cotangent(where, "d_shared_wi", out.d_shared_wi, dense_name, dense,
                  "2 * dims.shared_hidden", 2 * dims.shared_hidden);
  check_cotangent(where, "d_shared_wo", out.d_shared_wo, "dims.shared_hidden", dims.shared_hidden,
                  dense_name, dense);
  check_cotangent(where, "d_shared_gate", out.d_shared_gate, dense_name, dense, "columns", 1);
}

template <Storage S>
void check_sharded_output_cotangents(std::string_view where, const Dims& dims,
                                     const OutputCotangents<S>& d) {
  check_output_cotangents(where, dims, d);
  require_without_gaps(where, "d_out", d.d_out);
}

}  // namespace detail

}  // namespace heddle::moe

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "heddle/core/scalar.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/topology.hpp"
#include "heddle/moe/all_to_all.hpp"
#include "heddle/moe/detail/sharded_parts.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/ring.hpp"
#include "heddle/moe/sharded_layer.hpp"

namespace heddle::moe {

/// The two passes of a layer.
enum class LayerPass { forward, backward };

/// One collective of a layer on one device, known before anything runs.
struct LayerMessage {
  LayerPass pass = LayerPass::forward;
  std::string_view label;  ///< as the ledger has it
  AxisTuple axes;
  Traffic bytes;  ///< without recv_bytes
};

/// Bytes that enter a device along `axes` in one pass.
[[nodiscard]] inline std::int64_t bytes_along(const std::vector<LayerMessage>& messages,
                                              const AxisTuple& axes, LayerPass pass) {
  std::int64_t bytes = 0;
  for (const LayerMessage& message : messages) {
    if (message.axes == axes && message.pass == pass) {
      bytes += message.bytes.wire_bytes;
    }
  }
  return bytes;
}

/// Which weights' cotangents a backward is asked for.
struct WantedCotangents {
  bool router_weight = true;
  bool wi = true;
  bool wo = true;
  bool shared_wi = true;
  bool shared_wo = true;
  bool shared_gate = true;
};

namespace detail {

/// The messages of one device.
class MessageList {
 public:
  MessageList(const Topology& mesh, std::int64_t id) : mesh_(mesh), id_(id) {}

  void add(LayerPass pass, std::string_view label, Collective op, const AxisTuple& axes,
           std::int64_t count, std::size_t element) {
    messages_.push_back({pass, label, axes,
                         traffic_of({.op = op,
                                     .members = axes.size(mesh_.axes()),
                                     .index = mesh_.index_in(axes, id_),
                                     .count = count,
                                     .bytes = static_cast<std::int64_t>(element)})});
  }
  void exchange(LayerPass pass, std::string_view label, const AxisTuple& axes, std::int64_t leaving,
                std::int64_t arriving, std::int64_t staying, std::size_t element) {
    const auto bytes = static_cast<std::int64_t>(element);
    messages_.push_back({pass, label, axes,
                         Traffic{.payload_bytes = leaving * bytes,
                                 .wire_bytes = (arriving - staying) * bytes,
                                 .sent_bytes = (leaving - staying) * bytes}});
  }
  void gather(LayerPass pass, std::string_view label, const WeightSplit& split,
              std::size_t element) {
    if (split.parts > 1) {
      add(pass, label, Collective::all_gather, split.axes, split.shard_size(), element);
    }
  }
  void sum(std::string_view label, const WeightSplit& split, bool wanted, std::size_t element) {
    if (wanted && split.parts > 1) {
      add(LayerPass::backward, label, Collective::reduce_scatter, split.axes, split.shard_size(),
          element);
    }
    if (wanted && split.copy_count > 1) {
      add(LayerPass::backward, label, Collective::all_reduce, split.copies, split.shard_size(),
          element);
    }
  }
  [[nodiscard]] std::vector<LayerMessage> take() { return std::move(messages_); }

 private:
  const Topology& mesh_;
  std::int64_t id_;
  std::vector<LayerMessage> messages_;
};

/// Those of router and shared expert, whatever the strategy.
template <Storage S, Storage R>
void add_dense_messages(MessageList& list, const Dims& dims, const LayerShards& shards,
                        const Options& options, const WantedCotangents& wanted) {
  constexpr std::size_t wide = sizeof(AccumulatorOf<S>);
  const WeightSplit router = router_split(dims, shards);
  for (const LayerPass pass : {LayerPass::forward, LayerPass::backward}) {
    list.gather(pass, dense_weights_label, router, sizeof(R));
  }
  list.sum(dense_weights_label, router,
           wanted.router_weight && options.router_training == RouterTraining::trained, wide);
  if (!dims.has_shared_expert()) {
    return;
  }
  const std::array<WeightSplit, 3> splits = {shared_wi_split(dims, shards),
                                             shared_wo_split(dims, shards),
                                             shared_gate_split(dims, shards)};
  const std::array<bool, 3> sums = {wanted.shared_wi, wanted.shared_wo, wanted.shared_gate};
  for (std::size_t i = 0; i < splits.size(); ++i) {
    for (const LayerPass pass : {LayerPass::forward, LayerPass::backward}) {
      list.gather(pass, dense_weights_label, splits[i], sizeof(S));
    }
    list.sum(dense_weights_label, splits[i], sums[i], wide);
  }
}

template <Storage S>
void add_expert_messages(MessageList& list, const Dims& dims, const LayerShards& shards,
                         const WantedCotangents& wanted) {
  constexpr std::size_t wide = sizeof(AccumulatorOf<S>);
  const WeightSplit wi = wi_split(dims, shards);
  const WeightSplit wo = wo_split(dims, shards);
  for (const LayerPass pass : {LayerPass::forward, LayerPass::backward}) {
    list.gather(pass, expert_weights_label, wi, sizeof(S));
    list.gather(pass, expert_weights_label, wo, sizeof(S));
  }
  list.sum(expert_weights_label, wi, wanted.wi, wide);
  list.sum(expert_weights_label, wo, wanted.wo, wide);
}

}  // namespace detail

/// Every message that device `id` takes part in during ring_forward and ring_backward.
///   routing 4 K (1 + A/4) bytes a token, hidden, out, d_out and d_hidden one row of S a token and chunk,
///   the routing weights' cotangents K of A a token, weights as they are shared out
/// throws    as ring_forward
/// source    spec/moe.md 7
template <Storage S, Storage R = S>
[[nodiscard]] std::vector<LayerMessage> ring_messages(const Topology& mesh, std::int64_t id,
                                                      const Dims& dims,
                                                      const ShardedOptions& options,
                                                      const WantedCotangents& wanted = {}) {
  using A = AccumulatorOf<S>;
  const LayerShards shards = detail::ring_shards("moe::ring_messages", mesh, id, dims, options);
  detail::MessageList list(mesh, id);
  detail::add_dense_messages<S, R>(list, dims, shards, options.layer, wanted);
  detail::add_expert_messages<S>(list, dims, shards, wanted);
  list.add(LayerPass::forward, detail::ring_routing_label, Collective::all_gather, shards.group,
           dims.tokens * detail::RoutingRecord<A>::words(dims.top_k), sizeof(std::int32_t));
  for (std::int64_t chunk = 0; chunk < shards.chunks; ++chunk) {
    const std::int64_t count = shards.count(chunk) * dims.hidden;
    for (const LayerPass pass : {LayerPass::forward, LayerPass::backward}) {
      list.add(pass, detail::ring_gather_label, Collective::all_gather, shards.group, count,
               sizeof(S));
      list.add(pass, detail::ring_sum_label, Collective::reduce_scatter, shards.group, count,
               sizeof(S));
    }
  }
  list.add(LayerPass::forward, detail::drops_label, Collective::all_gather, detail::all_devices, 1,
           sizeof(detail::DropRecord));
  list.add(LayerPass::backward, detail::ring_weights_label, Collective::reduce_scatter,
           shards.group, dims.slots(), sizeof(A));
  return list.take();
}

/// Rows of one token chunk between a device and its expert group.
struct ExchangedRows {
  std::int64_t sent = 0;     ///< kept slots of the own tokens
  std::int64_t arrived = 0;  ///< kept rows of the own experts
  std::int64_t staying = 0;  ///< of both, from the device to itself
};

/// Every message that device `id` takes part in during all_to_all_forward and all_to_all_backward, when so many
/// rows move: what the residuals of a forward say, or what balanced routing would.
///   4 E bytes of counts a chunk, one row of S a kept slot there and back in both passes, in the backward one A
///   more each way, weights as they are shared out
/// throws    as all_to_all_forward; Error for rows.size != token_chunks
/// source    spec/moe.md 7
template <Storage S, Storage R = S>
[[nodiscard]] std::vector<LayerMessage> all_to_all_messages(const Topology& mesh, std::int64_t id,
                                                            const Dims& dims,
                                                            const ShardedOptions& options,
                                                            std::span<const ExchangedRows> rows,
                                                            const WantedCotangents& wanted = {}) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::all_to_all_messages";
  const LayerShards shards = detail::exchange_shards(where, mesh, id, dims, options);
  require_length(where, "rows", rows, "token_chunks", shards.chunks);
  detail::MessageList list(mesh, id);
  detail::add_dense_messages<S, R>(list, dims, shards, options.layer, wanted);
  detail::add_expert_messages<S>(list, dims, shards, wanted);
  list.add(LayerPass::forward, detail::exchange_counts_label, Collective::all_gather, shards.group,
           shards.chunks * dims.experts, sizeof(std::int32_t));
  list.add(LayerPass::forward, detail::drops_label, Collective::all_gather, detail::all_devices, 1,
           sizeof(detail::DropRecord));
  const auto there_and_back = [&](LayerPass pass, const ExchangedRows& each, std::int64_t cols,
                                  std::size_t element) {
    list.exchange(pass, detail::exchange_out_label, shards.group, each.sent * cols,
                  each.arrived * cols, each.staying * cols, element);
    list.exchange(pass, detail::exchange_back_label, shards.group, each.arrived * cols,
                  each.sent * cols, each.staying * cols, element);
  };
  for (const ExchangedRows& each : rows) {
    there_and_back(LayerPass::forward, each, dims.hidden, sizeof(S));
    there_and_back(LayerPass::backward, each, dims.hidden, sizeof(S));
    there_and_back(LayerPass::backward, each, 1, sizeof(A));
  }
  return list.take();
}

}  // namespace heddle::moe

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "heddle/core/elementwise.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/mesh/collectives.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/moe/arguments.hpp"
#include "heddle/moe/detail/layer_router.hpp"
#include "heddle/moe/detail/shard_weights.hpp"
#include "heddle/moe/detail/shared_expert.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/expert_layer.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/residuals.hpp"
#include "heddle/moe/routed_experts.hpp"
#include "heddle/moe/router.hpp"
#include "heddle/moe/routing_window.hpp"
#include "heddle/moe/sharded_layer.hpp"

// What a layer does over a mesh whichever way its rows travel: the router and the shared expert on a device's
// own tokens, the experts' weights, and what all devices learn of the drops.

namespace heddle::moe::detail {

/// Labels in the ledger what a part of a layer sends; the phase stays the caller's.
class MoeTraffic {
 public:
  template <Communicator Device>
  MoeTraffic(Device& device, const char* label)
      : scope_(device.ledger(), device.ledger().phase(), label) {}

 private:
  LedgerScope scope_;
};

inline constexpr const char* expert_weights_label = "moe.expert_weights";
inline constexpr const char* dense_weights_label = "moe.dense_weights";
inline constexpr const char* drops_label = "moe.drops";

/// The own tokens' logits, ids and weights.
template <Communicator Device, Storage S, Storage R>
reference::RouterReport route_own_tokens(Device& device, const Dims& dims,
                                         const LayerShards& shards, const Inputs<S, R>& in,
                                         const RouterOptions& options, const Residuals<S>& kept,
                                         Workspace& workspace) {
  using A = AccumulatorOf<S>;
  {
    const Workspace::Frame frame(workspace);
    const MoeTraffic label(device, dense_weights_label);
    const ConstMatrixView<R> weight =
        gather_weight<R>(device, router_split(dims, shards), in.router_weight, workspace);
    const RoutedTokens tokens(dims, in.segment_ids, options, workspace);
    router_logits(tokens, in.hidden, weight, kept.router_logits, workspace);
  }
  return route<A>(dims.router(),
                  {.router_logits = kept.router_logits,
                   .forced_ids = in.forced_ids,
                   .segment_ids = in.segment_ids},
                  options, {.expert_ids = kept.expert_ids, .expert_weights = kept.expert_weights});
}

template <Storage S, Storage R>
[[nodiscard]] std::size_t route_own_bytes(const Dims& dims, const LayerShards& shards,
                                          std::int64_t threads) {
  const GatherBytes weight = gather_bytes<R>(router_split(dims, shards));
  return weight.kept + std::max(weight.passing, RoutedTokens::bytes(dims) +
                                                    router_product_bytes<S, R>(dims, threads));
}

/// From the cotangents of the own tokens' routing weights to the router's weight and d_hidden, added to.
template <Communicator Device, Storage S, Storage R>
void route_own_backward(Device& device, const Dims& dims, const LayerShards& shards,
                        const Inputs<S, R>& in, const OutputCotangents<S>& d,
                        const Options& options, const Residuals<S>& kept,
                        ConstMatrixView<AccumulatorOf<S>> d_expert_weights,
                        const InputCotangents<AccumulatorOf<S>>& out, Workspace& workspace) {
  using A = AccumulatorOf<S>;
  const Workspace::Frame frame(workspace);
  const MoeTraffic label(device, dense_weights_label);
  const WeightSplit split = router_split(dims, shards);
  Inputs<S, R> whole = in;
  whole.router_weight = gather_weight<R>(device, split, in.router_weight, workspace);
  const MatrixView<A> d_logits = take_matrix<A>(workspace, dims.tokens, dims.experts);
  route_backward<A>(dims.router(),
                    {.router_logits = kept.router_logits,
                     .expert_ids = kept.expert_ids,
                     .d_expert_weights = d_expert_weights},
                    options.router, d_logits);
  const RoutedTokens tokens(dims, in.segment_ids, options.router, workspace);
  add_loss_cotangents<A>(tokens, d.d_router_logits, d_logits);
  if (options.router_training == RouterTraining::frozen) {
    // Zeros need no sum.
    router_weight_backward<S, R>(tokens, whole, d_logits, options.router_training, out.d_hidden,
                                 out.d_router_weight, workspace);
    return;
  }
  const SharedOutCotangent<A> d_weight(split, out.d_router_weight, workspace);
  router_weight_backward<S, R>(tokens, whole, d_logits, options.router_training, out.d_hidden,
                               d_weight.whole(), workspace);
  d_weight.settle(device, workspace);
}

template <Storage S, Storage R>
[[nodiscard]] std::size_t route_own_backward_bytes(const Dims& dims, const LayerShards& shards,
                                                   std::int64_t threads) {
  using A = AccumulatorOf<S>;
  const WeightSplit split = router_split(dims, shards);
  const GatherBytes weight = gather_bytes<R>(split);
  const GatherBytes d_weight = SharedOutCotangent<A>::bytes(split);
  return weight.kept + Workspace::bytes_for<A>(dims.tokens * dims.experts) +
         RoutedTokens::bytes(dims) + d_weight.kept +
         std::max({weight.passing, d_weight.passing, router_product_bytes<S, R>(dims, threads)});
}

/// The weights of the own experts.
template <Communicator Device, Storage S, Storage R>
[[nodiscard]] ExpertWeights<S> gather_experts(Device& device, const Dims& dims,
                                              const LayerShards& shards, const Inputs<S, R>& in,
                                              Workspace& workspace) {
  const MoeTraffic label(device, expert_weights_label);
  const ConstMatrixView<S> wi = gather_weight<S>(device, wi_split(dims, shards), in.wi, workspace);
  return {.wi = wi, .wo = gather_weight<S>(device, wo_split(dims, shards), in.wo, workspace)};
}

template <Storage S>
[[nodiscard]] std::size_t gather_experts_bytes(const Dims& dims, const LayerShards& shards) {
  const GatherBytes wi = gather_bytes<S>(wi_split(dims, shards));
  const GatherBytes wo = gather_bytes<S>(wo_split(dims, shards));
  return wi.kept + wo.kept + std::max(wi.passing, wo.passing);
}

[[nodiscard]] inline RoutedDims own_expert_dims(const Dims& dims, const LayerShards& shards) {
  return {.rows = shards.chunk_rows,
          .hidden = dims.hidden,
          .experts = shards.experts.count,
          .width = dims.expert_hidden};
}

/// Where the own experts' cotangents are summed up, chunk after chunk.
template <Accumulator A>
class ExpertCotangents {
 public:
  ExpertCotangents(const Dims& dims, const LayerShards& shards, const InputCotangents<A>& out,
                   Workspace& workspace)
      : wi_(wi_split(dims, shards), out.d_wi, workspace),
        wo_(wo_split(dims, shards), out.d_wo, workspace) {}

  [[nodiscard]] WeightCotangent<A> wi(std::int64_t chunk) const {
    return of_chunk(wi_.whole(), chunk);
  }
  [[nodiscard]] WeightCotangent<A> wo(std::int64_t chunk) const {
    return of_chunk(wo_.whole(), chunk);
  }
  template <Communicator Device>
  void settle(Device& device, Workspace& workspace) const {
    const MoeTraffic label(device, expert_weights_label);
    wi_.settle(device, workspace);
    wo_.settle(device, workspace);
  }

  [[nodiscard]] static GatherBytes bytes(const Dims& dims, const LayerShards& shards) {
    const GatherBytes wi = SharedOutCotangent<A>::bytes(wi_split(dims, shards));
    const GatherBytes wo = SharedOutCotangent<A>::bytes(wo_split(dims, shards));
    return {.kept = wi.kept + wo.kept, .passing = std::max(wi.passing, wo.passing)};
  }

 private:
  SharedOutCotangent<A> wi_;
  SharedOutCotangent<A> wo_;
};

/// `in` with the shared expert's weights whole.
template <Communicator Device, Storage S, Storage R>
[[nodiscard]] Inputs<S, R> gather_shared(Device& device, const Dims& dims,
                                         const LayerShards& shards, const Inputs<S, R>& in,
                                         Workspace& workspace) {
  Inputs<S, R> whole = in;
  whole.shared_wi =
      gather_weight<S>(device, shared_wi_split(dims, shards), in.shared_wi, workspace);
  whole.shared_wo =
      gather_weight<S>(device, shared_wo_split(dims, shards), in.shared_wo, workspace);
  whole.shared_gate =
      gather_weight<S>(device, shared_gate_split(dims, shards), in.shared_gate, workspace);
  return whole;
}

[[nodiscard]] inline RoutedDims own_shared_dims(const Dims& dims, const LayerShards& shards) {
  return {.rows = shards.slice, .hidden = dims.hidden, .experts = 1, .width = dims.shared_hidden};
}

template <Storage S>
[[nodiscard]] GatherBytes gather_shared_bytes(const Dims& dims, const LayerShards& shards) {
  const GatherBytes wi = gather_bytes<S>(shared_wi_split(dims, shards));
  const GatherBytes wo = gather_bytes<S>(shared_wo_split(dims, shards));
  const GatherBytes gate = gather_bytes<S>(shared_gate_split(dims, shards));
  return {.kept = wi.kept + wo.kept + gate.kept,
          .passing = std::max({wi.passing, wo.passing, gate.passing})};
}

/// The shared expert's output of the own tokens, added to out.
template <Communicator Device, Storage S, Storage R>
void shared_own_forward(Device& device, const Dims& dims, const LayerShards& shards,
                        const Inputs<S, R>& in, const GluOptions& glu,
                        MatrixView<AccumulatorOf<S>> out, const Residuals<S>& kept,
                        Workspace& workspace) {
  if (!dims.has_shared_expert()) {
    return;
  }
  const Workspace::Frame frame(workspace);
  const MoeTraffic label(device, dense_weights_label);
  const Inputs<S, R> whole = gather_shared(device, dims, shards, in, workspace);
  SharedRouting routing(shards.slice, workspace);
  for (std::int64_t chunk = 0; chunk < shards.chunks; ++chunk) {
    const std::int64_t first = shards.first(chunk);
    const std::int64_t count = shards.count(chunk);
    shared_forward<S, R>(routing, whole, glu,
                         {.out = out.row_block(first, count),
                          .write = Write::accumulate,
                          .gate_up = kept.shared_gate_up.row_block(first, count)},
                         kept.shared_weights.subspan(static_cast<std::size_t>(first),
                                                     static_cast<std::size_t>(count)),
                         in.hidden.row_block(first, count), workspace);
  }
}

template <Storage S>
[[nodiscard]] std::size_t shared_own_bytes(const Dims& dims, const LayerShards& shards,
                                           const GluOptions& glu, std::int64_t threads) {
  if (!dims.has_shared_expert()) {
    return 0;
  }
  const GatherBytes weights = gather_shared_bytes<S>(dims, shards);
  return weights.kept +
         std::max(
             weights.passing,
             SharedRouting::bytes(shards.slice) +
                 std::max(shared_gate_bytes<S>(shards.slice, dims.hidden, threads),
                          routed_workspace_bytes<S>(own_shared_dims(dims, shards), glu, threads)));
}

/// Through the shared expert: d_hidden, added to, and its weights' cotangents.
template <Communicator Device, Storage S, Storage R>
void shared_own_backward(Device& device, const Dims& dims, const LayerShards& shards,
                         const Inputs<S, R>& in, const OutputCotangents<S>& d,
                         const Options& options, const Residuals<S>& kept,
                         const InputCotangents<AccumulatorOf<S>>& out, Workspace& workspace) {
  using A = AccumulatorOf<S>;
  if (!dims.has_shared_expert()) {
    return;
  }
  const Workspace::Frame frame(workspace);
  const MoeTraffic label(device, dense_weights_label);
  const Inputs<S, R> whole = gather_shared(device, dims, shards, in, workspace);
  const SharedOutCotangent<A> d_wi(shared_wi_split(dims, shards), out.d_shared_wi, workspace);
  const SharedOutCotangent<A> d_wo(shared_wo_split(dims, shards), out.d_shared_wo, workspace);
  const SharedOutCotangent<A> d_gate(shared_gate_split(dims, shards), out.d_shared_gate, workspace);
  SharedRouting routing(shards.slice, workspace);
  for (std::int64_t chunk = 0; chunk < shards.chunks; ++chunk) {
    const std::int64_t first = shards.first(chunk);
    const std::int64_t count = shards.count(chunk);
    shared_backward<S, R>(routing, whole, in.hidden.row_block(first, count),
                          kept.shared_weights.subspan(static_cast<std::size_t>(first),
                                                      static_cast<std::size_t>(count)),
                          {.d_out = d.d_out.row_block(first, count),
                           .gate_up = kept.shared_gate_up.row_block(first, count)},
                          options.weight_grad_from, glu_options(options),
                          {.d_hidden = out.d_hidden.row_block(first, count),
                           .d_wi = of_chunk(d_wi.whole(), chunk),
                           .d_wo = of_chunk(d_wo.whole(), chunk),
                           .d_gate = of_chunk(d_gate.whole(), chunk)},
                          workspace);
  }
  d_wi.settle(device, workspace);
  d_wo.settle(device, workspace);
  d_gate.settle(device, workspace);
}

template <Storage S>
[[nodiscard]] std::size_t shared_own_backward_bytes(const Dims& dims, const LayerShards& shards,
                                                    const Options& options, std::int64_t threads) {
  using A = AccumulatorOf<S>;
  if (!dims.has_shared_expert()) {
    return 0;
  }
  const GatherBytes weights = gather_shared_bytes<S>(dims, shards);
  const GatherBytes d_wi = SharedOutCotangent<A>::bytes(shared_wi_split(dims, shards));
  const GatherBytes d_wo = SharedOutCotangent<A>::bytes(shared_wo_split(dims, shards));
  const GatherBytes d_gate = SharedOutCotangent<A>::bytes(shared_gate_split(dims, shards));
  return weights.kept + d_wi.kept + d_wo.kept + d_gate.kept + SharedRouting::bytes(shards.slice) +
         std::max({weights.passing, d_wi.passing, d_wo.passing, d_gate.passing,
                   Workspace::bytes_for<A>(shards.slice) +
                       std::max(shared_gate_bytes<S>(shards.slice, dims.hidden, threads),
                                routed_backward_workspace_bytes<S>(
                                    own_shared_dims(dims, shards), options.weight_grad_from,
                                    glu_options(options), threads))});
}

/// What one device says of its drops.
struct DropRecord {
  std::int64_t routed_slots;
  std::int64_t dropped_slots;
  std::int64_t largest_drop;
  double required_factor;
};

/// The same report on every device: one that overflowed is known to all.
template <Communicator Device>
void share_drops(Device& device, std::int64_t routed_slots, const DropReport& own,
                 LayerReport& report, Workspace& workspace) {
  const Workspace::Frame frame(workspace);
  const MoeTraffic label(device, drops_label);
  const std::array<DropRecord, 1> mine = {
      DropRecord{routed_slots, own.dropped_slots, own.largest_drop, own.required_factor}};
  const std::span<DropRecord> all = workspace.take<DropRecord>(device.topology().devices());
  mesh::all_gather<Device, DropRecord>(device, all_devices, mine, all);
  DropReport total;
  report.routed_slots = 0;
  for (const DropRecord& each : all) {
    report.routed_slots += each.routed_slots;
    total.add({each.dropped_slots, each.largest_drop, each.required_factor});
  }
  report.dropped_slots = total.dropped_slots;
  report.largest_drop = total.largest_drop;
  report.required_factor = total.required_factor;
}

/// Counts the own tokens' slots an expert, and returns how many are routed.
inline std::int64_t count_own_slots(ConstMatrixView<std::int32_t> expert_ids,
                                    std::span<std::int64_t> group_sizes) {
  std::int64_t routed = 0;
  std::fill(group_sizes.begin(), group_sizes.end(), std::int64_t{0});
  for (std::int64_t t = 0; t < expert_ids.rows(); ++t) {
    for (const std::int32_t id : expert_ids.row(t)) {
      routed += id == unrouted ? 0 : 1;
      if (id != unrouted && !group_sizes.empty()) {
        ++group_sizes[static_cast<std::size_t>(id)];
      }
    }
  }
  return routed;
}

/// Rows of the storage type where rows of the accumulator are wanted.
template <Storage S, Accumulator A>
void widen_rows(ConstMatrixView<S> from, MatrixView<A> to) {
  for (std::int64_t row = 0; row < from.rows(); ++row) {
    if constexpr (std::is_same_v<S, A>) {
      std::copy_n(from.row(row).data(), from.cols(), to.row(row).data());
    } else {
      convert(from.row(row), to.row(row));
    }
  }
}

/// The residuals that a layer has on its own tokens; maps and rows come from elsewhere.
template <Storage S>
[[nodiscard]] Residuals<S> take_own_residuals(const Dims& dims, bool with_shared_gate_up,
                                              Workspace& memory) {
  using A = AccumulatorOf<S>;
  Residuals<S> kept;
  kept.router_logits = take_matrix<A>(memory, dims.tokens, dims.experts);
  kept.expert_ids = take_matrix<std::int32_t>(memory, dims.tokens, dims.top_k);
  kept.expert_weights = take_matrix<A>(memory, dims.tokens, dims.top_k);
  if (dims.has_shared_expert()) {
    kept.shared_weights = memory.take<A>(dims.tokens);
    if (with_shared_gate_up) {
      kept.shared_gate_up = take_matrix<S>(memory, dims.tokens, 2 * dims.shared_hidden);
    }
  }
  return kept;
}

template <Storage S>
[[nodiscard]] std::size_t own_residual_bytes(const Dims& dims, bool with_shared_gate_up) {
  using A = AccumulatorOf<S>;
  std::size_t bytes = Workspace::bytes_for<A>(dims.tokens * dims.experts) +
                      Workspace::bytes_for<std::int32_t>(dims.slots()) +
                      Workspace::bytes_for<A>(dims.slots());
  if (dims.has_shared_expert()) {
    bytes += Workspace::bytes_for<A>(dims.tokens);
    bytes += with_shared_gate_up ? Workspace::bytes_for<S>(dims.tokens * 2 * dims.shared_hidden)
                                 : std::size_t{0};
  }
  return bytes;
}

template <Storage S>
void check_own_residuals(std::string_view where, const Dims& dims, const Residuals<S>& kept) {
  const auto require_tokens = [&](std::string_view argument, auto matrix, std::string_view name,
                                  std::int64_t cols) {
    require_shape(where, argument, matrix, "dims.tokens", dims.tokens, name, cols);
  };
  require_tokens("residuals.router_logits", kept.router_logits, "dims.experts", dims.experts);
  require_tokens("residuals.expert_ids", kept.expert_ids, "dims.top_k", dims.top_k);
  require_tokens("residuals.expert_weights", kept.expert_weights, "dims.top_k", dims.top_k);
  if (dims.has_shared_expert()) {
    require_tokens("residuals.shared_gate_up", kept.shared_gate_up, "2 * dims.shared_hidden",
                   2 * dims.shared_hidden);
    require_length(where, "residuals.shared_weights", kept.shared_weights, "dims.tokens",
                   dims.tokens);
  }
}

}  // namespace heddle::moe::detail

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/chunked_head.hpp"
#include "heddle/head/detail/weight_tiles.hpp"
#include "heddle/head/forward_backward.hpp"
#include "heddle/head/head_sharding.hpp"
#include "heddle/head/logits_tile.hpp"
#include "heddle/head/options.hpp"
#include "heddle/head/vocab_shard.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/topology.hpp"

/// The head on a mesh, as a function of one device and its shards. Tokens are split over all axes and a
/// row is scored where it lies, against the whole vocabulary: no log-prob is put together from devices.
/// The weight passes by, a tile of columns at a time, gathered over the axes that share it out while the
/// tile before is used; its cotangent goes the other way.
///
/// Every device of the mesh makes the same calls with the same options, whatever tokens it has, none
/// included: which outputs and cotangents are wanted decides what is sent.
namespace heddle::head::sharded {

/// head::forward of the device's tokens.
///
/// shapes    dims: tokens the device's own, hidden and vocab of all devices; inputs and outputs as
///           head::forward, inputs.weight the shard that weight_block names, in inputs.layout
/// dtypes    as head::forward; the weight travels as it is stored
/// writes    all of every output that is wanted, 0 at inactive rows
/// alias     as head::forward
/// specials  as head::forward; one device along the gathered axes: nothing is copied or sent
/// order     every output has the bits of head::forward of the row with the whole weight, on every mesh,
///           for any split, tile and number of tokens
/// memory    forward_workspace_bytes: two tiles of the weight, the device's part of one, statistics of a
///           row each, and head::forward's of a tile. Tiles of the whole vocabulary: the weight once, or
///           twice where parts must be put together
/// cost      head::forward_cost, and forward_traffic: each weight element comes in once
/// throws    before anything moves: Error as head::forward; for the sharding; for a hidden dimension that
///           the mesh does not divide; for options.vocab_shards other than 1, since the ranks are the
///           mesh's; for a mode other than fused under tiles. Then as Communicator
/// source    spec/head.md 6, spec/mesh.md 1.2
template <Communicator Device, Storage S, Storage W, Accumulator A>
void forward(Device& device, const Dims& dims, const Inputs<S, W>& inputs,
             const HeadSharding& sharding, const ScoringOptions& options, const Outputs<A>& outputs,
             Workspace& workspace);

/// head::backward of the device's tokens: d_hidden of them, and the shard's part of a d_weight that is
/// summed over the tokens of all devices.
///
/// shapes    as forward and head::backward; cotangents.d_weight as the shard
/// dtypes    as head::backward; the weight's cotangent travels in A
/// writes    as head::backward
/// specials  null cotangents are neither computed nor sent; without any, no weight is gathered. A device
///           without tokens adds zeros
/// order     d_hidden has the bits of head::backward of the row with the whole weight, on every mesh.
///           d_weight: each device's sum over its tokens as head::backward forms it, added along the
///           gathered axes in rank order, then along those that hold copies: the same bits for any tile
///           and number of threads, and on every device that holds a copy. Accumulating adds that sum
/// memory    backward_workspace_bytes: two tiles of the weight, one of its cotangent, the device's parts,
///           and head::backward's of a tile
/// cost      head::backward_cost, and backward_traffic
/// throws    as forward, and Error as head::backward
/// source    spec/head.md 4-6, spec/mesh.md 1.2
template <Communicator Device, Storage S, Storage W, Accumulator A>
void backward(Device& device, const Dims& dims, const Inputs<S, W>& inputs,
              const HeadSharding& sharding, const ScoringOptions& options,
              const Residuals<A>& residuals, const OutputCotangents<A>& output_cotangents,
              const Cotangents<A>& cotangents, Workspace& workspace);

/// forward, the loss and backward. Under tiles they run one after the other and the weight passes by
/// twice; where the whole weight stays, head::forward_backward runs on it.
///
/// shapes    as forward and backward; the loss is asked for the device's rows, by their place in the call
/// order     scores, losses and d_hidden as head::forward_backward on one device. d_weight as backward;
///           where the whole weight stays, a device's sum is over chunks of forward_backward_rows
/// memory    forward_backward_workspace_bytes
/// cost      forward_backward_traffic; under tiles the costs of forward and backward, else
///           head::forward_backward_cost
/// throws    as forward and backward
/// source    spec/head.md 5.1, 6
template <Communicator Device, Storage S, Storage W, Accumulator A, class Loss>
void forward_backward(Device& device, const Dims& dims, const Inputs<S, W>& inputs,
                      const HeadSharding& sharding, const ScoringOptions& options, const Loss& loss,
                      const LossOutputs<A>& outputs, const Cotangents<A>& cotangents,
                      Workspace& workspace);

namespace detail {

using head::detail::columns_grid;
using head::detail::CotangentMemory;
using head::detail::CotangentTiles;
using head::detail::product_columns;
using head::detail::TileMemory;
using head::detail::WeightPlan;
using head::detail::WeightTiles;
using heddle::head::detail::Columns;

inline void require_valid(std::string_view where, const WeightPlan& plan,
                          const ScoringOptions& options) {
  require(options.vocab_shards == 1, where, "options.vocab_shards", options.vocab_shards,
          "must be 1: the ranks are the mesh's");
  require(options.mode == Mode::fused || plan.whole(), where, "options.mode", options.mode,
          "must be fused where sharding.gather_columns is less than dims.vocab");
}

template <Storage S, Storage W, Accumulator A>
void require_valid_forward(std::string_view where, const WeightPlan& plan, const Dims& dims,
                           const Inputs<S, W>& inputs, const ScoringOptions& options,
                           const Outputs<A>& outputs) {
  head::detail::require_valid(where, dims, inputs, options, plan.held_extents());
  static_cast<void>(head::detail::temperature_divisor<A>(where, options));
  head::detail::require_valid(where, dims, outputs);
  head::detail::require_row_ids(where, dims);
  require_valid(where, plan, options);
}

/// A tile of the weight in place of the shard.
template <Storage S, Storage W>
[[nodiscard]] Inputs<S, W> with_weight(Inputs<S, W> inputs, ConstMatrixView<W> weight) {
  inputs.weight = weight;
  return inputs;
}

/// Ids were checked once, for all tiles.
[[nodiscard]] inline ScoringOptions any_id(ScoringOptions options) {
  options.id_policy = IdPolicy::wrap;
  return options;
}

[[nodiscard]] inline Dims tile_dims(const Dims& dims, std::int64_t columns) {
  return {.tokens = dims.tokens, .hidden = dims.hidden, .vocab = columns};
}

template <Communicator Device, Storage S, Storage W, Accumulator A>
void run_forward(Device& device, const WeightPlan& plan, const Dims& dims,
                 const Inputs<S, W>& inputs, const ScoringOptions& options,
                 const Outputs<A>& outputs, Workspace& workspace) {
  const LedgerScope scope(device.ledger(), device.ledger().phase(), "head");
  const Workspace::Frame frame(workspace);
  const std::int64_t step = plan.tile_columns(columns_grid(options));
  const TileMemory<W> memory(workspace, plan, step);
  WeightTiles<Device, W> tiles(device, plan, memory, inputs.weight);
  if (plan.whole()) {
    tiles.for_each(step, [&](Columns, ConstMatrixView<W> weight) {
      head::forward(dims, with_weight(inputs, weight), options, outputs, workspace);
    });
    return;
  }
  const std::span<RowStats<A>> stats = workspace.take<RowStats<A>>(dims.tokens);
  std::ranges::fill(stats, RowStats<A>{});
  tiles.for_each(step, [&](Columns columns, ConstMatrixView<W> tile) {
    add_shard_stats(tile_dims(dims, columns.count()), with_weight(inputs, tile),
                    VocabShard{columns.first, dims.vocab}, any_id(options), stats, workspace);
  });
  finish_scores(dims, inputs.active, options, std::span<const RowStats<A>>(stats), outputs);
}

template <Communicator Device, Storage S, Storage W, Accumulator A>
void run_backward(Device& device, const WeightPlan& plan, const Dims& dims,
                  const Inputs<S, W>& inputs, const ScoringOptions& options,
                  const Residuals<A>& residuals, const OutputCotangents<A>& output_cotangents,
                  const Cotangents<A>& cotangents, Workspace& workspace) {
  if (cotangents.d_hidden.is_null() && !cotangents.d_weight.wanted()) {
    return;
  }
  const LedgerScope scope(device.ledger(), Phase::backward, "head");
  const Workspace::Frame frame(workspace);
  const std::int64_t step = plan.tile_columns(product_columns);
  const TileMemory<W> memory(workspace, plan, step);
  const CotangentMemory<A> cotangent_memory(workspace, plan, step);
  WeightTiles<Device, W> tiles(device, plan, memory, inputs.weight);
  CotangentTiles<Device, A> d_weight(device, plan, cotangent_memory, cotangents.d_weight);
  tiles.for_each(step, [&](Columns columns, ConstMatrixView<W> tile) {
    const Cotangents<A> shares{.d_hidden = cotangents.d_hidden,
                               .d_weight = d_weight.share(columns)};
    if (plan.whole()) {
      head::backward(dims, with_weight(inputs, tile), options, residuals, output_cotangents, shares,
                     workspace);
    } else {
      shard_backward(tile_dims(dims, columns.count()), with_weight(inputs, tile),
                     VocabShard{columns.first, dims.vocab}, any_id(options), residuals,
                     output_cotangents, shares, workspace,
                     columns.first == 0 ? Write::overwrite : Write::accumulate);
    }
    d_weight.reduce(columns);
  });
}

}  // namespace detail

template <Communicator Device, Storage S, Storage W, Accumulator A>
void forward(Device& device, const Dims& dims, const Inputs<S, W>& inputs,
             const HeadSharding& sharding, const ScoringOptions& options, const Outputs<A>& outputs,
             Workspace& workspace) {
  static_assert(head::detail::accumulates_in<S, W, A>,
                "heddle::head::sharded::forward: outputs must be in the accumulator of hidden and "
                "weight");
  constexpr const char* where = "head::sharded::forward";
  const detail::WeightPlan plan(where, device.topology(), device.id(), dims, inputs.layout,
                                sharding);
  detail::require_valid_forward(where, plan, dims, inputs, options, outputs);
  detail::run_forward(device, plan, dims, inputs, options, outputs, workspace);
}

template <Communicator Device, Storage S, Storage W, Accumulator A>
void backward(Device& device, const Dims& dims, const Inputs<S, W>& inputs,
              const HeadSharding& sharding, const ScoringOptions& options,
              const Residuals<A>& residuals, const OutputCotangents<A>& output_cotangents,
              const Cotangents<A>& cotangents, Workspace& workspace) {
  static_assert(head::detail::accumulates_in<S, W, A>,
                "heddle::head::sharded::backward: cotangents must be in the accumulator of hidden "
                "and weight");
  constexpr const char* where = "head::sharded::backward";
  const detail::WeightPlan plan(where, device.topology(), device.id(), dims, inputs.layout,
                                sharding);
  head::detail::require_valid_backward(where, dims, inputs, options, residuals, output_cotangents,
                                       cotangents, plan.held_extents());
  detail::require_valid(where, plan, options);
  detail::run_backward(device, plan, dims, inputs, options, residuals, output_cotangents,
                       cotangents, workspace);
}

template <Communicator Device, Storage S, Storage W, Accumulator A, class Loss>
void forward_backward(Device& device, const Dims& dims, const Inputs<S, W>& inputs,
                      const HeadSharding& sharding, const ScoringOptions& options, const Loss& loss,
                      const LossOutputs<A>& outputs, const Cotangents<A>& cotangents,
                      Workspace& workspace) {
  static_assert(
      TokenLoss<Loss, A>,
      "heddle::head::sharded::forward_backward: the loss must be a TokenLoss, which tells "
      "a row's loss and cotangents from that row alone");
  static_assert(head::detail::accumulates_in<S, W, A>,
                "heddle::head::sharded::forward_backward: outputs must be in the accumulator of "
                "hidden and weight");
  constexpr const char* where = "head::sharded::forward_backward";
  const detail::WeightPlan plan(where, device.topology(), device.id(), dims, inputs.layout,
                                sharding);
  detail::require_valid_forward(where, plan, dims, inputs, options, outputs.scores);
  head::detail::require_length_if_given(where, "outputs.losses", outputs.losses, "dims.tokens",
                                        dims.tokens);
  head::detail::require_valid(where, dims, inputs.layout, cotangents, plan.held_extents());
  const Workspace::Frame frame(workspace);
  if (!plan.whole()) {
    head::detail::forward_then_backward(
        dims, inputs, loss, outputs, workspace,
        [&](const Outputs<A>& scores) {
          detail::run_forward(device, plan, dims, inputs, options, scores, workspace);
        },
        [&](const Residuals<A>& residuals, const OutputCotangents<A>& d_outputs) {
          detail::run_backward(device, plan, dims, inputs, options, residuals, d_outputs,
                               cotangents, workspace);
        });
    return;
  }
  const LedgerScope scope(device.ledger(), Phase::backward, "head");
  const detail::TileMemory<W> memory(workspace, plan, dims.vocab);
  const detail::CotangentMemory<A> cotangent_memory(workspace, plan, dims.vocab);
  detail::WeightTiles<Device, W> tiles(device, plan, memory, inputs.weight);
  detail::CotangentTiles<Device, A> d_weight(device, plan, cotangent_memory, cotangents.d_weight);
  tiles.for_each(dims.vocab, [&](detail::Columns columns, ConstMatrixView<W> weight) {
    head::forward_backward(
        dims, detail::with_weight(inputs, weight), options, loss, outputs,
        Cotangents<A>{.d_hidden = cotangents.d_hidden, .d_weight = d_weight.share(columns)},
        workspace);
    d_weight.reduce(columns);
  });
}

/// Bytes of workspace that forward takes on any device of a mesh.
///
/// throws    Error for dims, options and sharding, as forward
template <Storage S, Storage W = S>
[[nodiscard]] std::size_t forward_workspace_bytes(const Dims& dims, WeightLayout layout,
                                                  const HeadSharding& sharding,
                                                  const ScoringOptions& options,
                                                  const MeshAxes& mesh, std::int64_t threads = 1) {
  constexpr const char* where = "head::sharded::forward_workspace_bytes";
  const detail::WeightPlan plan(where, Topology(mesh), 0, dims, layout, sharding);
  options.validate(where);
  detail::require_valid(where, plan, options);
  head::detail::ByteCounter counter;
  const std::int64_t step = plan.tile_columns(detail::columns_grid(options));
  const detail::TileMemory<W> memory(counter, plan, step);
  const std::size_t stats =
      plan.whole() ? 0 : Workspace::bytes_for<RowStats<AccumulatorOf<S>>>(dims.tokens);
  return counter.bytes() + stats +
         head::forward_workspace_bytes<S, W>(detail::tile_dims(dims, step), options, threads);
}

/// The same of backward, both cotangents wanted.
template <Storage S, Storage W = S>
[[nodiscard]] std::size_t backward_workspace_bytes(const Dims& dims, WeightLayout layout,
                                                   const HeadSharding& sharding,
                                                   const ScoringOptions& options,
                                                   const MeshAxes& mesh, std::int64_t threads = 1) {
  constexpr const char* where = "head::sharded::backward_workspace_bytes";
  const detail::WeightPlan plan(where, Topology(mesh), 0, dims, layout, sharding);
  options.validate(where);
  detail::require_valid(where, plan, options);
  head::detail::ByteCounter counter;
  const std::int64_t step = plan.tile_columns(detail::product_columns);
  const detail::TileMemory<W> memory(counter, plan, step);
  const detail::CotangentMemory<AccumulatorOf<S>> cotangents(counter, plan, step);
  const std::size_t ids = plan.whole() ? 0 : Workspace::bytes_for<std::int32_t>(dims.tokens);
  return counter.bytes() + ids +
         head::backward_workspace_bytes<S, W>(detail::tile_dims(dims, step), layout, options,
                                              threads);
}

/// The same of forward_backward, none of the scores given but the log-probs.
template <Storage S, Storage W = S>
[[nodiscard]] std::size_t forward_backward_workspace_bytes(const Dims& dims, WeightLayout layout,
                                                           const HeadSharding& sharding,
                                                           const ScoringOptions& options,
                                                           const MeshAxes& mesh,
                                                           std::int64_t threads = 1) {
  using A = AccumulatorOf<S>;
  const detail::WeightPlan plan("head::sharded::forward_backward_workspace_bytes", Topology(mesh),
                                0, dims, layout, sharding);
  if (!plan.whole()) {
    return 6 * Workspace::bytes_for<A>(dims.tokens) +
           std::max(forward_workspace_bytes<S, W>(dims, layout, sharding, options, mesh, threads),
                    backward_workspace_bytes<S, W>(dims, layout, sharding, options, mesh, threads));
  }
  head::detail::ByteCounter counter;
  const detail::TileMemory<W> memory(counter, plan, dims.vocab);
  const detail::CotangentMemory<A> cotangents(counter, plan, dims.vocab);
  return counter.bytes() +
         head::forward_backward_workspace_bytes<S, W>(dims, layout, options, threads);
}

namespace detail {

template <class T>
void add_pass_traffic(const WeightPlan& plan, std::int64_t step, bool cotangent,
                      HeadTraffic& traffic) {
  head::detail::for_each_tile({0, plan.vocab()}, 0, step, [&](Columns columns) {
    head::detail::add_tile_traffic<T>(plan, columns, cotangent, traffic);
  });
}

}  // namespace detail

/// What forward moves on device `id` of a mesh, byte for byte what its ledger says. Hidden states stay
/// where they are; nothing depends on tokens.
///
/// throws    Error for dims, options and sharding
template <Storage W>
[[nodiscard]] HeadTraffic forward_traffic(const Dims& dims, const HeadSharding& sharding,
                                          const ScoringOptions& options, const Topology& mesh,
                                          std::int64_t id) {
  const detail::WeightPlan plan("head::sharded::forward_traffic", mesh, id, dims, WeightLayout::dv,
                                sharding);
  options.validate("head::sharded::forward_traffic");
  HeadTraffic traffic{.gathered = plan.gathered(), .summed = plan.summed()};
  detail::add_pass_traffic<W>(plan, plan.tile_columns(detail::columns_grid(options)), false,
                              traffic);
  return traffic;
}

/// The same of backward with a d_hidden, with or without a d_weight. Neither: nothing moves.
template <Storage W>
[[nodiscard]] HeadTraffic backward_traffic(const Dims& dims, const HeadSharding& sharding,
                                           const Topology& mesh, std::int64_t id,
                                           bool wants_d_weight = true) {
  const detail::WeightPlan plan("head::sharded::backward_traffic", mesh, id, dims, WeightLayout::dv,
                                sharding);
  HeadTraffic traffic{.gathered = plan.gathered(), .summed = plan.summed()};
  const std::int64_t step = plan.tile_columns(detail::product_columns);
  detail::add_pass_traffic<W>(plan, step, false, traffic);
  if (wants_d_weight) {
    detail::add_pass_traffic<AccumulatorOf<W>>(plan, step, true, traffic);
  }
  return traffic;
}

/// The same of forward_backward: the weight comes in twice under tiles, once where it stays whole.
template <Storage W>
[[nodiscard]] HeadTraffic forward_backward_traffic(const Dims& dims, const HeadSharding& sharding,
                                                   const ScoringOptions& options,
                                                   const Topology& mesh, std::int64_t id,
                                                   bool wants_d_weight = true) {
  HeadTraffic traffic = backward_traffic<W>(dims, sharding, mesh, id, wants_d_weight);
  if (sharding.gather_columns < dims.vocab) {
    const Traffic again = forward_traffic<W>(dims, sharding, options, mesh, id).gather;
    traffic.gather.payload_bytes += again.payload_bytes;
    traffic.gather.wire_bytes += again.wire_bytes;
    traffic.gather.sent_bytes += again.sent_bytes;
    traffic.gather.recv_bytes += again.recv_bytes;
  }
  return traffic;
}

}  // namespace heddle::head::sharded

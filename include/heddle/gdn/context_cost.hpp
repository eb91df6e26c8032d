#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heddle/core/cost.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/chunk_plan.hpp"
#include "heddle/gdn/chunked_cost.hpp"
#include "heddle/gdn/context_options.hpp"
#include "heddle/gdn/context_pieces.hpp"
#include "heddle/gdn/conv_port.hpp"
#include "heddle/gdn/detail/context_call.hpp"
#include "heddle/gdn/detail/context_piece.hpp"
#include "heddle/gdn/detail/context_scan.hpp"
#include "heddle/gdn/detail/row_backward.hpp"
#include "heddle/gdn/detail/row_forward.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/gates.hpp"
#include "heddle/gdn/layer_cost.hpp"
#include "heddle/gdn/states.hpp"
#include "heddle/mesh/ledger.hpp"

namespace heddle::gdn {

/// What must enter a rank over the context axis in one call: wire bytes of the ledger.
///
/// units     bytes
struct ContextTraffic {
  std::int64_t windows = 0;     ///< label "gdn.windows"
  std::int64_t states = 0;      ///< "gdn.states"
  std::int64_t parameters = 0;  ///< "gdn.parameters"

  [[nodiscard]] constexpr std::int64_t total() const { return windows + states + parameters; }
  friend constexpr bool operator==(const ContextTraffic&, const ContextTraffic&) = default;
};

namespace detail {

/// (borders whose window comes to this rank, borders whose state does).
struct BordersIn {
  std::int64_t windows = 0;
  std::int64_t states = 0;
};

[[nodiscard]] inline BordersIn borders_in(const ContextPieces& pieces, std::int64_t rank,
                                          Travel travel) {
  BordersIn in;
  for (std::int64_t piece = 0; piece + 1 < pieces.count(); ++piece) {
    if (pieces.crosses(piece) && border_move(pieces, piece, travel).to == rank) {
      in.windows += pieces.needs_window(piece + 1) ? 1 : 0;
      in.states += pieces.needs_state(piece + 1) ? 1 : 0;
    }
  }
  return in;
}

template <class T, Accumulator A>
[[nodiscard]] ContextTraffic context_traffic(const Dims& dims, const ContextPieces& pieces,
                                             std::int64_t rank, StateExchange exchange,
                                             Travel travel) {
  const BordersIn in = borders_in(pieces, rank, travel);
  ContextTraffic traffic;
  traffic.windows = in.windows * bytes_of<T>(dims.window_rows() * dims.qkv_columns());
  if (exchange == StateExchange::chain) {
    traffic.states = in.states * bytes_of<A>(dims.state_rows() * dims.value_dim);
  } else if (pieces.state_crosses()) {
    traffic.states = bytes_of<A>((pieces.ranks() - 1) * pieces.per_rank() * map_elements(dims));
  }
  return traffic;
}

/// The convolution once more, for a pass that reads its output.
[[nodiscard]] constexpr Cost conv_again(const Dims& dims) {
  const std::int64_t elements = dims.tokens * dims.qkv_columns();
  return {.flops = 2 * dims.kernel * elements, .transcendentals = elements};
}

[[nodiscard]] constexpr Cost advance_cost(const Dims& dims) {
  return {.flops = 2 * dims.state_rows() * dims.key_dim * dims.value_dim};
}

template <Accumulator A>
[[nodiscard]] std::size_t advance_bytes(const Dims& dims) {
  return Workspace::bytes_for<std::byte>(static_cast<std::int64_t>(
      product_workspace_bytes<A, A>(dims.key_dim, dims.value_dim, dims.key_dim)));
}

}  // namespace detail

/// Of context_forward: a window of kernel - 1 rows over each border into the rank, and a state each
/// (chain), or the other ranks' states and transitions (gather).
///
/// source    spec/gdn.md 8.6
template <Storage S, Accumulator A = AccumulatorOf<S>>
[[nodiscard]] ContextTraffic context_forward_traffic(const Dims& dims, const ContextPieces& pieces,
                                                     std::int64_t rank, StateExchange exchange) {
  return detail::context_traffic<S, A>(dims, pieces, rank, exchange, detail::Travel::forward);
}

/// Of context_backward: the same borders the other way round, the windows' cotangents in the accumulation
/// type, for so many elements of parameters' cotangents an all-reduce.
template <Accumulator A>
[[nodiscard]] ContextTraffic context_backward_traffic(const Dims& dims, const ContextPieces& pieces,
                                                      std::int64_t rank, StateExchange exchange,
                                                      std::int64_t parameters) {
  ContextTraffic traffic =
      detail::context_traffic<A, A>(dims, pieces, rank, exchange, detail::Travel::backward);
  traffic.parameters = traffic_of({.op = Collective::all_reduce,
                                   .members = pieces.ranks(),
                                   .index = rank,
                                   .count = parameters,
                                   .bytes = sizeof(A)})
                           .wire_bytes;
  return traffic;
}

/// Scratch of context_forward. residuals: states, transitions and windows are given.
///
/// units     bytes; as layer_forward_workspace_bytes
template <Storage S, Storage P = S, Accumulator A = AccumulatorOf<S>>
[[nodiscard]] LayerWorkspaceBytes context_forward_workspace_bytes(const Dims& dims,
                                                                  const ContextPieces& pieces,
                                                                  const ContextOptions& options,
                                                                  bool residuals) {
  const Dims piece = detail::dims_of_piece(dims, pieces);
  const std::int64_t places = pieces.per_rank();
  const std::int64_t window = dims.window_rows() * dims.qkv_columns();
  const std::size_t windows =
      Workspace::bytes_for<S>(places * window) + 2 * Workspace::bytes_for<S>(window);
  const std::size_t own = static_cast<std::size_t>(places) *
                          detail::ContextPiece<S, P, A>::workspace_bytes(dims, pieces);
  const std::size_t later =
      own + std::max(Workspace::bytes_for<A>(dims.value_heads),
                     detail::state_scan_bytes<A>(dims, pieces, options.exchange));
  const LayerOptions layer{.chunks = options.chunks, .recurrence = Recurrence::chunked};
  return {.row = (residuals ? 0 : detail::ContextStates<S, A>::workspace_bytes(dims, places)) +
                 Workspace::bytes_for<A>(places * dims.state_rows() * dims.value_dim) +
                 std::max(windows, later),
          .thread = std::max(
              layer_states_workspace_bytes<S, P, A>(piece, layer, Residuals::inverses).thread,
              detail::advance_bytes<A>(dims))};
}

/// Scratch of context_backward on a rank, for so many elements of parameters' cotangents.
template <Storage S, Storage P = S, Accumulator A = AccumulatorOf<S>>
[[nodiscard]] LayerWorkspaceBytes context_backward_workspace_bytes(const Dims& dims,
                                                                   const ContextPieces& pieces,
                                                                   std::int64_t rank,
                                                                   const ContextOptions& options,
                                                                   std::int64_t parameters) {
  const Dims piece = detail::dims_of_piece(dims, pieces);
  const std::int64_t places = pieces.per_rank();
  const std::int64_t state = dims.state_rows() * dims.value_dim;
  const std::int64_t window = dims.window_rows() * dims.qkv_columns();
  std::int64_t chunks = 0;
  for (std::int64_t place = 0; place < places; ++place) {
    chunks = std::max(chunks,
                      ChunkPlan(pieces.segments(pieces.at(rank, place)), options.chunks).count());
  }
  const std::int64_t longest = std::min(options.chunks.chunk, piece.tokens);
  const HeadSlice slice = HeadSlice::of_key_head(piece, 0);
  const Segments none({}, 0);
  const Inputs<S, P, A> nothing{};
  const std::size_t passes =
      std::max(detail::backward_slice_bytes<A>(
                   piece, longest, chunks, false,
                   ConvPort<S, P, A>(piece, none, nothing, ConvOutput::accumulator, {}, {}), slice),
               detail::cotangent_slice_bytes<A>(
                   piece, longest,
                   ConvSource<S, P, A>(piece, none, nothing, ConvOutput::accumulator), slice));
  return {.row = 2 * Workspace::bytes_for<A>(places * state) +
                 Workspace::bytes_for<A>(places * window) +
                 Workspace::bytes_for<A>(places * parameters) +
                 static_cast<std::size_t>(places) *
                     detail::ContextPiece<S, P, A>::workspace_bytes(dims, pieces) +
                 std::max({gates_workspace_bytes<A>(piece.tokens, dims.value_heads),
                           detail::state_scan_bytes<A>(dims, pieces, options.exchange),
                           Workspace::bytes_for<A>(places * window) +
                               2 * Workspace::bytes_for<A>(window)}),
          .thread = std::max(passes, detail::advance_bytes<A>(dims))};
}

/// Cost of context_forward on a rank, each piece counted as one document: layer_forward_cost, the states'
/// pass and the transition where the ids ask for them, with inverses kept.
///
/// source    spec/gdn.md 9
template <Storage S, Storage P, Accumulator A, Storage O>
[[nodiscard]] Cost context_forward_cost(const Dims& dims, const ContextPieces& pieces,
                                        std::int64_t rank, const ChunkOptions& options) {
  const Dims piece = detail::dims_of_piece(dims, pieces);
  Cost cost;
  for (std::int64_t place = 0; place < pieces.per_rank(); ++place) {
    const std::int64_t p = pieces.at(rank, place);
    cost = cost + layer_forward_cost<S, P, A, O>(piece, options);
    if (pieces.maps_state(p)) {
      cost = cost + chunked_states_cost<S, A>(piece, options) + detail::conv_again(piece);
    }
    if (pieces.needs_transition(p)) {
      cost = cost + transitions_cost<S, A>(piece, options) + detail::advance_cost(dims);
    }
  }
  return cost;
}

/// Cost of context_backward with inverses kept: layer_backward_cost, the states computed again, and the
/// pass of the states' cotangents.
template <Storage S, Storage P, Accumulator A, Storage G>
[[nodiscard]] Cost context_backward_cost(const Dims& dims, const ContextPieces& pieces,
                                         std::int64_t rank, const ChunkOptions& options) {
  const Dims piece = detail::dims_of_piece(dims, pieces);
  Cost cost;
  for (std::int64_t place = 0; place < pieces.per_rank(); ++place) {
    const std::int64_t p = pieces.at(rank, place);
    cost = cost + layer_backward_cost<S, P, A, G>(piece, options) +
           chunked_states_cost<S, A>(piece, options) + chunked_states_cost<S, A>(piece, options);
    if (pieces.maps_cotangent(p)) {
      cost =
          cost +
          Cost{.flops = detail::row_flops(
                   piece, options, {.with_state = 3, .with_tile = 2, .of_keys = 2, .inverses = 0}),
               .transcendentals = detail::row_exps(piece, options),
               .bytes_read = detail::bytes_of<G>(piece.tokens * piece.output_columns())} +
          detail::conv_again(piece);
    }
    if (pieces.needs_transition(p)) {
      cost = cost + detail::advance_cost(dims);
    }
  }
  return cost;
}

}  // namespace heddle::gdn

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/causal_conv.hpp"
#include "heddle/gdn/chunked.hpp"
#include "heddle/gdn/context_options.hpp"
#include "heddle/gdn/context_pieces.hpp"
#include "heddle/gdn/conv_port.hpp"
#include "heddle/gdn/detail/context_call.hpp"
#include "heddle/gdn/detail/context_messages.hpp"
#include "heddle/gdn/detail/context_piece.hpp"
#include "heddle/gdn/detail/context_scan.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/gates.hpp"
#include "heddle/gdn/layer_options.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/reduction.hpp"

/// The Gated Delta Net layer over a row that the ranks of the context axis hold in pieces: the recurrence
/// goes from piece to piece as an affine map, S_out = M S_in + B, of which each rank works out its own
/// before any state arrives.
namespace heddle::gdn {

/// The layer's forward on this device's shard: layer.hpp's, over the row.
///   pass 1: B, the state after each piece from a state of zeros, and M, what it does to the one before it;
///   the states before the pieces, one after the other;  pass 2: the layer on each piece, from its state
/// shapes    dims.tokens: of the shard, row.partition.shard(). inputs and outputs: the shard's rows in the
///           order of row.partition, in place; segment_ids null, for row.segment_ids say it. conv_state and
///           recurrent_state are read on the first piece's rank alone, whose options.initial_segment, equal
///           on all, says what they belong to
/// writes    o whole; final_recurrent_state on the last piece's rank, final_conv_state on that of
///           ContextPieces::final_window_piece, elsewhere neither; residuals as they say
/// alias     a final state may be the view of the given one, all else is disjoint
/// specials  a piece in which a document starts has M = 0 and sends B at once; one of padding passes on what
///           it gets. Nothing goes into a piece whose first token starts a document, and its neighbour's
///           map is not computed. The first piece's pass 1 begins with the given state, so that its M is
///           never needed, and the last one has no pass 1. Padding is never read
/// order     what a piece computes depends on the cut alone: not on the layout, nor on the exchange,
///           schedule or threads. Always chunked, pieces cut at their own beginning
/// accuracy  1e-5 (float) and 1e-12 (double) of the unsplit layer, relative to the largest value, for any cut
/// memory    context_forward_workspace_bytes
/// cost      context_forward_cost, context_forward_traffic
/// throws    Error, before anything moves: as forward; row and dims that do not fit the mesh or each other;
///           some of states, transitions and windows without the others; a final state without
///           context_options.final_state. And as Communicator
/// source    spec/gdn.md 8
template <Communicator Device, Storage S, Storage P, Accumulator A, Storage O>
void context_forward(Device& device, const Dims& dims, const ContextRow& row,
                     const Inputs<S, P, A>& inputs, const Options& options,
                     const ContextOptions& context_options, const Outputs<O, S, A>& outputs,
                     const ContextResiduals<S, A>& residuals, LayerScratch& scratch) {
  constexpr std::string_view where = "gdn::context_forward";
  const ContextPieces pieces =
      detail::checked_pieces(where, device, dims, row, inputs, options, context_options);
  check_outputs(where, dims, outputs);
  const std::int64_t rank = mesh::axis_index(device, detail::context_axis);
  detail::check_context_residuals(where, dims, pieces, rank, context_options, residuals);
  detail::require_final(where, "final_recurrent_state", outputs.final_recurrent_state, pieces, rank,
                        context_options);

  Workspace& workspace = scratch.row();
  Workspaces& threads = scratch.threads();
  const Workspace::Frame frame(workspace);
  const detail::ContextStates<S, A> kept(dims, pieces.per_rank(), residuals, workspace);
  const MatrixView<A> leaving = detail::take_states<A>(dims, pieces.per_rank(), workspace);
  detail::fetch_windows(device, pieces, dims, inputs.qkv, kept.windows, workspace);
  const detail::RankPieces<S, P, A, A> own(pieces, rank, dims, inputs, options,
                                           context_options.chunks, kept.windows, residuals.t_inv,
                                           workspace);

  // Pass 1. An inverse that it has kept is not computed again.
  for (std::int64_t place = 0; place < pieces.per_rank(); ++place) {
    const auto& piece = own[place];
    piece.compute_gates(workspace);
    const MatrixView<A> after = detail::state_rows_of(leaving, dims, place);
    if (pieces.maps_state(piece.index())) {
      piece.states(piece.inputs().recurrent_state, after, own.t_inv(place), threads);
      if (pieces.needs_transition(piece.index())) {
        piece.transition(own.t_inv(place), detail::state_rows_of(kept.transitions, dims, place),
                         threads);
      }
    } else if (piece.index() == 0 && pieces.empty(0)) {
      detail::copy_state(piece.inputs().recurrent_state, after);
    }
  }

  detail::StateScan<Device, A> scan(device, pieces, detail::Travel::forward, dims, kept.states,
                                    leaving, kept.transitions, workspace, threads);
  const auto pass_2 = [&](std::int64_t place) {
    const auto& piece = own[place];
    const std::int64_t p = piece.index();
    const bool known = pieces.maps_state(p);
    const bool last = p + 1 == pieces.count();
    detail::forward_row<A>(
        piece.row().recurrence, piece.source(),
        {.initial = detail::state_before(pieces, p, piece.inputs().recurrent_state,
                                         detail::state_rows_of(kept.states, dims, place)),
         .final = last ? outputs.final_recurrent_state : MatrixView<A>()},
        outputs.o.row_block(place * pieces.length(), pieces.length()),
        {.t_inv = known ? MatrixView<A>() : own.t_inv(place)}, threads,
        known ? own.t_inv(place) : MatrixView<A>());
  };
  {
    const detail::TrafficLabel label(device.ledger(), "gdn.states");
    scan.run(context_options.exchange);
  }
  for (std::int64_t i = 0; i < pieces.per_rank(); ++i) {
    pass_2(scan.place(i));
  }
  // Last: a final state may lie where the given one was read.
  const std::int64_t window = pieces.final_window_piece();
  if (pieces.owner(window) == rank && !outputs.final_conv_state.is_null()) {
    const auto& piece = own[pieces.place(window)];
    ConvInputs<S, P> conv = detail::conv_inputs(piece.inputs());
    conv.halo_valid = piece.halo_valid();
    conv_final_state(piece.row().segments, conv, outputs.final_conv_state);
  }
}

/// Backward of context_forward.
///   pass 1: D, the cotangent of the state before each piece without any from behind it; the states'
///   cotangents from piece to piece, dS_in = M^T dS_out + D;  pass 2: the layer's backward on each piece
/// shapes    residuals of the forward of the same inputs and options, required but for t_inv; given and
///           wanted: the shard's rows, final states' cotangents where the forward writes the states, d_states
///           where it reads them; parameters on all ranks or on none
/// dtypes    as backward
/// writes    as backward; parameters: the sum over the row, on every rank
/// alias     as backward
/// specials  messages and computations are left out as forward, in mirror image: the last piece's pass 1
///           begins with the given cotangent
/// order     per piece as context_forward has it. What goes back through the windows is added to the rows
///           before it once those are done. Parameters: each piece's sums, those of a rank in the order of
///           the sequence, ranks in theirs: of all that is computed they alone depend on the layout, in
///           rounding
/// memory    context_backward_workspace_bytes
/// cost      context_backward_cost, context_backward_traffic
/// throws    Error, before anything moves: as context_forward and backward. And as Communicator
/// source    spec/gdn.md 8
template <Communicator Device, Storage S, Storage P, Accumulator A, Storage G>
void context_backward(Device& device, const Dims& dims, const ContextRow& row,
                      const Inputs<S, P, A>& inputs, const Options& options,
                      const ContextOptions& context_options,
                      const std::type_identity_t<ContextResiduals<const S, const A>>& residuals,
                      const OutputCotangents<G, A>& given, const Cotangents<A>& wanted,
                      LayerScratch& scratch) {
  constexpr std::string_view where = "gdn::context_backward";
  const ContextPieces pieces =
      detail::checked_pieces(where, device, dims, row, inputs, options, context_options);
  check_cotangents(where, dims, inputs, given, wanted);
  const std::int64_t rank = mesh::axis_index(device, detail::context_axis);
  detail::check_context_residuals(where, dims, pieces, rank, context_options, residuals);
  require(!residuals.states.is_null() || pieces.count() == 1, where, "residuals.states", nullptr,
          "required");
  detail::require_final(where, "d_final_recurrent_state", given.d_final_recurrent_state, pieces,
                        rank, context_options);

  Workspace& workspace = scratch.row();
  Workspaces& threads = scratch.threads();
  const Workspace::Frame frame(workspace);
  const MatrixView<A> arriving = detail::take_states<A>(dims, pieces.per_rank(), workspace);
  const MatrixView<A> leaving = detail::take_states<A>(dims, pieces.per_rank(), workspace);
  const MatrixView<A> d_windows(
      workspace.take<A>(pieces.per_rank() * dims.window_rows() * dims.qkv_columns()).data(),
      pieces.per_rank() * dims.window_rows(), dims.qkv_columns());
  detail::ParameterSums<A> sums(dims, wanted, pieces.per_rank(), workspace);
  const detail::RankPieces<S, P, A, const A> own(pieces, rank, dims, inputs, options,
                                                 context_options.chunks, residuals.windows,
                                                 residuals.t_inv, workspace);
  const auto rows_of = [&](auto view, std::int64_t place) {
    return view.row_block(place * pieces.length(), pieces.length());
  };

  for (std::int64_t place = 0; place < pieces.per_rank(); ++place) {
    const auto& piece = own[place];
    const std::int64_t p = piece.index();
    const bool last = p + 1 == pieces.count();
    piece.compute_gates(workspace);
    const MatrixView<A> before = detail::state_rows_of(leaving, dims, place);
    const ConstMatrixView<A> d_final = last ? given.d_final_recurrent_state : ConstMatrixView<A>();
    if (pieces.maps_cotangent(p)) {
      piece.state_cotangent(own.t_inv(place), rows_of(given.d_o, place), d_final, before, threads);
    } else if (last && pieces.empty(p)) {
      detail::copy_state(d_final, before);
    }
  }

  detail::StateScan<Device, A> scan(device, pieces, detail::Travel::backward, dims, arriving,
                                    leaving, residuals.transitions, workspace, threads);
  const auto pass_2 = [&](std::int64_t place) {
    const auto& piece = own[place];
    const std::int64_t p = piece.index();
    const bool last = p + 1 == pieces.count();
    Cotangents<A> out = sums.of_piece(place, wanted);
    out.d_qkv = rows_of(wanted.d_qkv, place);
    out.d_a = rows_of(wanted.d_a, place);
    out.d_b = rows_of(wanted.d_b, place);
    out.d_conv_state = p == 0                   ? wanted.d_conv_state
                       : pieces.needs_window(p) ? detail::window_rows_of(d_windows, dims, place)
                                                : MatrixView<A>();
    detail::backward_row<A>(
        piece.row().recurrence,
        ConvPort<S, P, A>(
            piece.dims(), piece.row().segments, piece.inputs(), piece.options().conv_output,
            p == pieces.final_window_piece() ? given.d_final_conv_state : ConstMatrixView<A>(), out,
            piece.halo_valid()),
        detail::state_before(pieces, p, piece.inputs().recurrent_state,
                             detail::state_rows_of(residuals.states, dims, place)),
        ChunkResiduals<const A>{.t_inv = own.t_inv(place)},
        detail::RowCotangents<G, A>{
            .d_o = rows_of(given.d_o, place),
            .d_final = last ? given.d_final_recurrent_state
                       : pieces.needs_state(p + 1)
                           ? ConstMatrixView<A>(detail::state_rows_of(arriving, dims, place))
                           : ConstMatrixView<A>(),
            .d_initial = p == 0 ? wanted.d_recurrent_state : MatrixView<A>(),
            .d_g = out.d_a,
            .d_beta = out.d_b},
        threads);
    detail::gates_backward(
        piece.row().segments, detail::gate_inputs(piece.inputs(), piece.value_heads()),
        piece.options().beta_range, out.d_a, out.d_b,
        GateParameterCotangents<A>{.d_A_log = out.d_A_log, .d_dt_bias = out.d_dt_bias}, workspace,
        detail::ParallelBlocks{});
  };
  {
    const detail::TrafficLabel label(device.ledger(), "gdn.states");
    scan.run(context_options.exchange);
  }
  for (std::int64_t i = 0; i < pieces.per_rank(); ++i) {
    pass_2(scan.place(i));
  }
  detail::return_windows(device, pieces, dims, d_windows, wanted.d_qkv, workspace);
  sums.add_places();
  {
    const detail::TrafficLabel label(device.ledger(), "gdn.parameters");
    if (sums.count() > 0) {
      mesh::all_reduce<void, Device, A>(device, detail::context_axis, sums.values(), sums.values());
    }
  }
  sums.deliver(wanted);
}

}  // namespace heddle::gdn

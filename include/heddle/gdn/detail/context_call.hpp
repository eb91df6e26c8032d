#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/context_options.hpp"
#include "heddle/gdn/context_pieces.hpp"
#include "heddle/gdn/detail/context_messages.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/tile.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/replicas.hpp"

namespace heddle::gdn::detail {

/// What the collectives of one purpose are called in the ledger, behind what the caller calls all of
/// them; the phase stays the caller's, who alone knows a forward from its replay.
class TrafficLabel {
 public:
  TrafficLabel(DeviceLedger& ledger, std::string_view name)
      : scope_(ledger, ledger.phase(),
               (ledger.label().empty() ? "" : ledger.label() + " ") + std::string(name)) {}

 private:
  LedgerScope scope_;
};

template <class T>
[[nodiscard]] MatrixView<T> state_rows_of(MatrixView<T> states, const Dims& dims,
                                          std::int64_t place) {
  return states.row_block(place * dims.state_rows(), dims.state_rows());
}
template <class T>
[[nodiscard]] MatrixView<T> window_rows_of(MatrixView<T> windows, const Dims& dims,
                                           std::int64_t place) {
  return windows.row_block(place * dims.window_rows(), dims.window_rows());
}

template <class T>
[[nodiscard]] MatrixView<T> take_rows(std::int64_t rows, std::int64_t cols, Workspace& workspace) {
  return {workspace.take<T>(rows * cols).data(), rows, cols};
}
/// A state for each piece of a rank.
template <Accumulator A>
[[nodiscard]] MatrixView<A> take_states(const Dims& dims, std::int64_t pieces,
                                        Workspace& workspace) {
  return take_rows<A>(pieces * dims.state_rows(), dims.value_dim, workspace);
}

/// A given state, or the zeros that none stands for.
template <Accumulator A>
void copy_state(ConstMatrixView<A> from, MatrixView<A> to) {
  if (from.is_null()) {
    clear_rows(to);
  } else {
    store_rows<A, A>(from, to);
  }
}

/// The state a piece begins with, null for zeros: what was given to the row, or what arrived.
template <class T>
[[nodiscard]] ConstMatrixView<std::remove_const_t<T>> state_before(
    const ContextPieces& pieces, std::int64_t piece, ConstMatrixView<std::remove_const_t<T>> given,
    MatrixView<T> arrived) {
  if (piece == 0) {
    return given;
  }
  return pieces.needs_state(piece) ? ConstMatrixView<std::remove_const_t<T>>(arrived)
                                   : ConstMatrixView<std::remove_const_t<T>>();
}

/// What a forward keeps for itself where nothing of it is kept for a backward.
template <Storage S, Accumulator A>
struct ContextStates {
  MatrixView<A> states;
  MatrixView<A> transitions;
  MatrixView<S> windows;

  ContextStates(const Dims& dims, std::int64_t pieces, const ContextResiduals<S, A>& residuals,
                Workspace& workspace)
      : states(residuals.states), transitions(residuals.transitions), windows(residuals.windows) {
    if (states.is_null()) {
      states = take_states<A>(dims, pieces, workspace);
      transitions = take_rows<A>(pieces * dims.state_rows(), dims.key_dim, workspace);
      windows = take_rows<S>(pieces * dims.window_rows(), dims.qkv_columns(), workspace);
    }
  }

  [[nodiscard]] static std::size_t workspace_bytes(const Dims& dims, std::int64_t pieces) {
    return Workspace::bytes_for<A>(pieces * dims.state_rows() * dims.value_dim) +
           Workspace::bytes_for<A>(pieces * dims.state_rows() * dims.key_dim) +
           Workspace::bytes_for<S>(pieces * dims.window_rows() * dims.qkv_columns());
  }
};

template <class T>
[[nodiscard]] std::span<T> span_of_window(MatrixView<T> windows, const Dims& dims,
                                          std::int64_t place) {
  const MatrixView<T> rows = window_rows_of(windows, dims, place);
  return {rows.data(), static_cast<std::size_t>(rows.rows() * rows.cols())};
}

/// The last rows of qkv of each piece, for the window of the next one.
template <Communicator Device, Storage S>
void fetch_windows(Device& device, const ContextPieces& pieces, const Dims& dims,
                   ConstMatrixView<S> qkv, MatrixView<S> windows, Workspace& workspace) {
  if (dims.window_rows() == 0) {
    return;
  }
  const TrafficLabel label(device.ledger(), "gdn.windows");
  const std::int64_t rank = mesh::axis_index(device, context_axis);
  const Workspace::Frame frame(workspace);
  const MatrixView<S> leaving =
      take_rows<S>(pieces.per_rank() * dims.window_rows(), dims.qkv_columns(), workspace);
  for (std::int64_t place = 0; place < pieces.per_rank(); ++place) {
    const std::int64_t piece = pieces.at(rank, place);
    if (piece + 1 < pieces.count() && pieces.needs_window(piece + 1)) {
      const std::int64_t end = (place + 1) * pieces.length();
      const ConstMatrixView<S> rows = qkv.row_block(end - dims.window_rows(), dims.window_rows());
      const MatrixView<S> to = pieces.crosses(piece)
                                   ? window_rows_of(leaving, dims, place)
                                   : window_rows_of(windows, dims, pieces.place(piece + 1));
      for (std::int64_t row = 0; row < rows.rows(); ++row) {
        std::copy_n(&rows(row, 0), rows.cols(), &to(row, 0));
      }
    }
  }
  move_over_borders<Device, S>(
      device, pieces, Travel::forward, dims.window_rows() * dims.qkv_columns(),
      [&](std::int64_t piece) {
        return std::span<const S>(span_of_window(leaving, dims, pieces.place(piece)));
      },
      [&](std::int64_t piece) { return span_of_window(windows, dims, pieces.place(piece + 1)); },
      workspace);
}

/// Adds the cotangents of those rows where they came from.
template <Communicator Device, Accumulator A>
void return_windows(Device& device, const ContextPieces& pieces, const Dims& dims,
                    MatrixView<A> d_windows, MatrixView<A> d_qkv, Workspace& workspace) {
  if (dims.window_rows() == 0) {
    return;
  }
  const TrafficLabel label(device.ledger(), "gdn.windows");
  const std::int64_t rank = mesh::axis_index(device, context_axis);
  const Workspace::Frame frame(workspace);
  const MatrixView<A> arriving =
      take_rows<A>(pieces.per_rank() * dims.window_rows(), dims.qkv_columns(), workspace);
  move_over_borders<Device, A>(
      device, pieces, Travel::backward, dims.window_rows() * dims.qkv_columns(),
      [&](std::int64_t piece) {
        return std::span<const A>(span_of_window(d_windows, dims, pieces.place(piece + 1)));
      },
      [&](std::int64_t piece) { return span_of_window(arriving, dims, pieces.place(piece)); },
      workspace);
  for (std::int64_t place = 0; place < pieces.per_rank(); ++place) {
    const std::int64_t piece = pieces.at(rank, place);
    if (piece + 1 == pieces.count() || !pieces.needs_window(piece + 1)) {
      continue;
    }
    const ConstMatrixView<A> rows = pieces.crosses(piece)
                                        ? window_rows_of(arriving, dims, place)
                                        : window_rows_of(d_windows, dims, pieces.place(piece + 1));
    const std::int64_t first = (place + 1) * pieces.length() - dims.window_rows();
    for (std::int64_t row = 0; row < rows.rows(); ++row) {
      for (std::int64_t column = 0; column < rows.cols(); ++column) {
        d_qkv(first + row, column) += rows(row, column);
      }
    }
  }
}

/// Sums of a rank's pieces for those parameters whose cotangents are wanted, one after the other:
/// conv_weight, conv_bias, A_log, dt_bias.
template <Accumulator A>
class ParameterSums {
 public:
  ParameterSums(const Dims& dims, const Cotangents<A>& wanted, std::int64_t places,
                Workspace& workspace)
      : dims_(dims), count_(count(dims, wanted)), sums_(take_rows<A>(places, count_, workspace)) {}

  [[nodiscard]] static std::int64_t count(const Dims& dims, const Cotangents<A>& wanted) {
    return (wanted.d_conv_weight.wanted() ? dims.qkv_columns() * dims.kernel : 0) +
           (wanted.d_conv_bias.wanted() ? dims.qkv_columns() : 0) +
           (wanted.d_A_log.wanted() ? dims.value_heads : 0) +
           (wanted.d_dt_bias.wanted() ? dims.value_heads : 0);
  }

  [[nodiscard]] std::int64_t count() const { return count_; }
  /// The sum over the rank's pieces, once add_places has run, and over the ranks.
  [[nodiscard]] std::span<A> values() const {
    return {sums_.data(), static_cast<std::size_t>(count_)};
  }

  /// Cotangents of parameters that write to a piece's part.
  [[nodiscard]] Cotangents<A> of_piece(std::int64_t place, const Cotangents<A>& wanted) const {
    Cotangents<A> part;
    A* next = sums_.data() + place * count_;
    const auto vector = [&](const VectorCotangent<A>& like) {
      VectorCotangent<A> to;
      if (like.wanted()) {
        to.values = {next, like.values.size()};
        next += like.values.size();
      }
      return to;
    };
    if (wanted.d_conv_weight.wanted()) {
      part.d_conv_weight.values = {next, dims_.qkv_columns(), dims_.kernel};
      next += dims_.qkv_columns() * dims_.kernel;
    }
    part.d_conv_bias = vector(wanted.d_conv_bias);
    part.d_A_log = vector(wanted.d_A_log);
    part.d_dt_bias = vector(wanted.d_dt_bias);
    return part;
  }

  /// Places are in the order of the sequence.
  void add_places() const {
    for (std::int64_t place = 1; place < sums_.rows(); ++place) {
      for (std::int64_t i = 0; i < count_; ++i) {
        sums_(0, i) += sums_(place, i);
      }
    }
  }

  void deliver(const Cotangents<A>& wanted) const {
    const Cotangents<A> sum = of_piece(0, wanted);
    const auto add = [](A value, A& to, Write write) {
      to = write == Write::accumulate ? to + value : value;
    };
    const auto vector = [&](const VectorCotangent<A>& from, const VectorCotangent<A>& to) {
      for (std::size_t i = 0; i < from.values.size(); ++i) {
        add(from.values[i], to.values[i], to.write);
      }
    };
    const MatrixView<A> weight = sum.d_conv_weight.values;
    for (std::int64_t row = 0; row < weight.rows(); ++row) {
      for (std::int64_t tap = 0; tap < weight.cols(); ++tap) {
        add(weight(row, tap), wanted.d_conv_weight.values(row, tap), wanted.d_conv_weight.write);
      }
    }
    vector(sum.d_conv_bias, wanted.d_conv_bias);
    vector(sum.d_A_log, wanted.d_A_log);
    vector(sum.d_dt_bias, wanted.d_dt_bias);
  }

 private:
  Dims dims_;
  std::int64_t count_;
  MatrixView<A> sums_;
};

/// Refuses what neither direction can take, and cuts the row.
template <Communicator Device, Storage S, Storage P, Accumulator A>
[[nodiscard]] ContextPieces checked_pieces(std::string_view where, Device& device, const Dims& dims,
                                           const ContextRow& row, const Inputs<S, P, A>& inputs,
                                           const Options& options,
                                           const ContextOptions& context_options) {
  dims.validate(where);
  require_equal(where, "row.partition.ranks", row.partition.ranks(), "context",
                mesh::axis_size(device, context_axis));
  require_equal(where, "dims.tokens", dims.tokens, "row.partition.shard", row.partition.shard());
  options.validate(where);
  context_options.validate(where);
  require(inputs.segment_ids.data() == nullptr, where, "segment_ids", "given",
          "must be null: row.segment_ids are those of the whole row");
  ContextPieces pieces(where, row, options.initial_segment, dims.kernel,
                       context_options.final_state);
  const std::int64_t rank = mesh::axis_index(device, context_axis);
  // The rule about a given state and padding is one of the row.
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(dims.tokens));
  for (std::int64_t place = 0; place < pieces.per_rank(); ++place) {
    const std::span<const std::int32_t> of_piece = pieces.segment_ids(pieces.at(rank, place));
    ids.insert(ids.end(), of_piece.begin(), of_piece.end());
  }
  Inputs<S, P, A> shard = inputs;
  shard.segment_ids = ids;
  shard.conv_state = {};
  shard.recurrent_state = {};
  check_inputs(where, dims, shard, options);
  require_window_shape(where, "conv_state", inputs.conv_state, dims);
  require_recurrent_shape(where, "recurrent_state", inputs.recurrent_state, dims);
  const bool state_given = !inputs.conv_state.is_null() || !inputs.recurrent_state.is_null();
  if (pieces.owner(0) == rank && state_given && !row.segment_ids.empty() &&
      row.segment_ids[0] == 0 &&
      std::any_of(row.segment_ids.begin(), row.segment_ids.end(),
                  [](std::int32_t id) { return id > 0; })) {
    fail(where, "row.segment_ids[0]", row.segment_ids[0],
         "must be > 0 where a state is given and a token follows: no padding between the two");
  }
  mesh::require_replicated(device, context_axis, "row.segment_ids", row.segment_ids);
  return pieces;
}

/// What lies in messages lies row behind row.
template <class T>
void require_dense(std::string_view where, std::string_view argument, MatrixView<T> view,
                   std::string_view rows_name, std::int64_t rows, std::string_view cols_name,
                   std::int64_t cols) {
  require_shape(where, argument, view, rows_name, rows, cols_name, cols);
  require_equal(where, std::string(argument) + ".stride", view.stride(), "its cols", cols);
}

template <class S, class A>
void check_context_residuals(std::string_view where, const Dims& dims, const ContextPieces& pieces,
                             std::int64_t rank, const ContextOptions& options,
                             const ContextResiduals<S, A>& residuals) {
  const bool any = !residuals.states.is_null() || !residuals.transitions.is_null() ||
                   !residuals.windows.is_null();
  if (any) {
    require_dense(where, "residuals.states", residuals.states, "pieces * state_rows",
                  pieces.per_rank() * dims.state_rows(), "dims.value_dim", dims.value_dim);
    require_dense(where, "residuals.transitions", residuals.transitions, "pieces * state_rows",
                  pieces.per_rank() * dims.state_rows(), "dims.key_dim", dims.key_dim);
    if (dims.window_rows() > 0) {
      require_dense(where, "residuals.windows", residuals.windows, "pieces * (kernel - 1)",
                    pieces.per_rank() * dims.window_rows(), "dims.qkv_columns()",
                    dims.qkv_columns());
    }
  }
  if (!residuals.t_inv.is_null()) {
    require_shape(where, "residuals.t_inv", residuals.t_inv, "chunks * value_heads",
                  pieces.chunks(rank, options.chunks) * dims.value_heads, "chunk * chunk",
                  options.chunks.chunk * options.chunks.chunk);
  }
}

/// A state after the row, or its cotangent, on the rank that has to do with it.
template <class T>
void require_final(std::string_view where, std::string_view argument, MatrixView<T> state,
                   const ContextPieces& pieces, std::int64_t rank, const ContextOptions& options) {
  require(options.final_state || state.is_null() || pieces.owner(pieces.count() - 1) != rank, where,
          argument, "given", "must be null where options.final_state is false");
}

}  // namespace heddle::gdn::detail

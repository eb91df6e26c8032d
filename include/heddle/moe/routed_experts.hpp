#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/factor.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/glu.hpp"
#include "heddle/moe/grouped_gemm.hpp"
#include "heddle/moe/grouped_glu.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/routing_map.hpp"
#include "heddle/moe/routing_window.hpp"
#include "heddle/moe/sort.hpp"

// The experts of one window between tokens and tokens: what a layer does once a token chunk, and each
// device of a ring for the experts it holds. Rows stand one behind the other whatever the window's buffer
// is, for no unfilled row is made; tokens are gathered where the products read them, not copied before.

namespace heddle::moe {

/// The experts of a window, one under the other, gate columns before up.
template <Storage S>
struct ExpertWeights {
  ConstMatrixView<S> wi;  ///< [E*D, 2F]
  ConstMatrixView<S> wo;  ///< [E*F, D]
};

/// How the gated unit is computed.
struct GluOptions {
  GluEpilogue epilogue = GluEpilogue::strict;
  GluFusion fusion = GluFusion::fused;
};

/// Where routed_experts writes.
template <Storage S, Storage O>
struct RoutedOutputs {
  MatrixView<O> out;  ///< [T,D]
  Write write = Write::overwrite;
  MatrixView<S> gate_up = {};  ///< [window.kept, 2F] or more rows, for the backward; may be null
};

/// What routed_experts_backward is given beside the arguments of the forward.
template <Storage S>
struct RoutedCotangents {
  ConstMatrixView<S> d_out;    ///< [T,D]
  ConstMatrixView<S> gate_up;  ///< [window.kept, 2F] or more rows, of the forward
};

/// Where routed_experts_backward writes. The weights' may be null.
template <Accumulator A>
struct RoutedGradients {
  MatrixView<A> d_hidden;  ///< [T,D]
  Write write = Write::overwrite;
  MatrixView<A> d_expert_weights;  ///< [T,K]
  WeightCotangent<A> d_wi = {};    ///< [E*D, 2F]
  WeightCotangent<A> d_wo = {};    ///< [E*F, D]
};

/// Extents that the workspace depends on.
struct RoutedDims {
  std::int64_t rows = 0;  ///< most that a window keeps
  std::int64_t hidden = 0;
  std::int64_t experts = 0;  ///< of the window
  std::int64_t width = 0;    ///< F
};

namespace detail {

/// The kept rows of a window in the order of their positions, from row 0, and where their tokens are.
class RoutedRows {
 public:
  RoutedRows(const RoutingMap& map, const RoutingWindow& window, Workspace& workspace)
      : window_(dense(window)),
        // One expert that takes every token once has them in order.
        in_order_(map.dims.experts == 1 && window.kept == map.dims.tokens),
        offsets_(workspace.take<std::int64_t>(window.experts.count + 1)),
        tokens_(workspace.take<std::int32_t>(in_order_ ? 0 : window.kept)) {
    row_offsets(map, window_, offsets_);
    parallel_blocks(static_cast<std::int64_t>(tokens_.size()), 1 << 14,
                    [&](std::int64_t first, std::int64_t last) {
                      for (std::int64_t row = first; row < last; ++row) {
                        tokens_[static_cast<std::size_t>(row)] =
                            static_cast<std::int32_t>(map.token_of(window_.first_position + row));
                      }
                    });
  }

  [[nodiscard]] std::int64_t count() const { return window_.kept; }
  [[nodiscard]] const RoutingWindow& window() const { return window_; }
  [[nodiscard]] ExpertGroups groups() const { return {offsets_}; }

  /// The rows of [T,D] that the experts see.
  template <class T>
  [[nodiscard]] Factor<T> of(ConstMatrixView<T> per_token) const {
    return in_order_ ? as_is(per_token)
                     : gathered(per_token, std::span<const std::int32_t>(tokens_));
  }

  [[nodiscard]] static std::size_t bytes(const RoutedDims& dims) {
    return Workspace::bytes_for<std::int64_t>(dims.experts + 1) +
           Workspace::bytes_for<std::int32_t>(dims.rows);
  }

 private:
  [[nodiscard]] static RoutingWindow dense(RoutingWindow window) {
    window.first_row = 0;
    window.rows = window.kept;
    return window;
  }

  RoutingWindow window_;
  bool in_order_;
  std::span<std::int64_t> offsets_;
  std::span<std::int32_t> tokens_;
};

template <class T>
[[nodiscard]] MatrixView<T> take_matrix(Workspace& workspace, std::int64_t rows,
                                        std::int64_t cols) {
  return {workspace.take<T>(rows * cols).data(), rows, cols};
}

template <Storage S>
void check_routed(std::string_view where, const RoutingMap& map, const RoutingWindow& window,
                  ConstMatrixView<AccumulatorOf<S>> expert_weights, ConstMatrixView<S> hidden,
                  const ExpertWeights<S>& weights, ConstMatrixView<S> gate_up,
                  const GluOptions& options) {
  check_window(where, map, window);
  require_shape(where, "expert_weights", expert_weights, "map.dims.tokens", map.dims.tokens,
                "map.dims.top_k", map.dims.top_k);
  require_shape(where, "hidden", hidden, "map.dims.tokens", map.dims.tokens, "hidden.cols",
                hidden.cols());
  const std::int64_t experts = window.experts.count;
  require_shape(where, "wi", weights.wi, "window.experts.count * hidden.cols",
                experts * hidden.cols(), "wi.cols", weights.wi.cols());
  require(weights.wi.cols() % 2 == 0, where, "wi.cols", weights.wi.cols(), "must be even");
  require_shape(where, "wo", weights.wo, "window.experts.count * wi.cols / 2",
                experts * weights.wi.cols() / 2, "hidden.cols", hidden.cols());
  if (!gate_up.is_null()) {
    require(gate_up.rows() >= window.kept, where, "gate_up.rows", gate_up.rows(),
            "must be at least window.kept (" + std::to_string(window.kept) + ")");
    require_shape(where, "gate_up", gate_up, "gate_up.rows", gate_up.rows(), "wi.cols",
                  weights.wi.cols());
  }
  require_glu_options(where, "options.", options.epilogue, options.fusion);
}

/// grouped_glu_backward in two: a product that is stored, then its epilogue in a pass over it.
template <Storage S>
void separate_glu_backward(const ExpertGroups& groups, const GroupedGluCotangents<S>& in,
                           const GroupedGluGradients<S>& out, Workspace& workspace) {
  using A = AccumulatorOf<S>;
  const std::int64_t rows = in.gate_up.rows();
  const std::int64_t width = in.gate_up.cols() / 2;
  const Workspace::Frame frame(workspace);
  const MatrixView<A> q = take_matrix<A>(workspace, rows, width);
  grouped_product_d_rows(groups, in.d_result, in.wo, q, UnfilledRows::untouched, workspace);
  parallel_blocks(rows, glu_grain(width), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      A dot = A(0);
      for (std::int64_t column = 0; column < width; column += most_tile_columns) {
        const auto at = [&](const auto& matrix, std::int64_t half) {
          return matrix.is_null() ? nullptr : matrix.row(row).data() + half * width + column;
        };
        const auto index = static_cast<std::size_t>(row);
        const bool weighted = !in.row_weights.empty();
        const GluBackwardRow<S> each{.q = at(q, 0),
                                     .gate = at(in.gate_up, 0),
                                     .up = at(in.gate_up, 1),
                                     .weight = weighted ? in.row_weights[index] : A(1),
                                     .weighted = weighted,
                                     .d_gate = at(out.d_gate_up, 0),
                                     .d_up = at(out.d_gate_up, 1),
                                     .weighted_activation = at(out.weighted_activation, 0)};
        dot = dot + finish_glu_backward_row(GluEpilogue::strict, each, !out.d_row_weights.empty(),
                                            std::min(most_tile_columns, width - column));
      }
      if (!out.d_row_weights.empty()) {
        out.d_row_weights[static_cast<std::size_t>(row)] = dot;
      }
    }
  });
}

template <Storage S>
void through_wo_and_glu(const ExpertGroups& groups, const GroupedGluCotangents<S>& in,
                        const GroupedGluGradients<S>& out, const GluOptions& options,
                        Workspace& workspace) {
  if (options.fusion == GluFusion::fused) {
    grouped_glu_backward(groups, in, out, options.epilogue, UnfilledRows::untouched, workspace);
  } else {
    separate_glu_backward(groups, in, out, workspace);
  }
}

}  // namespace detail

/// Bytes of workspace that suffice for routed_experts on so many threads.
template <Storage S>
[[nodiscard]] std::size_t routed_workspace_bytes(const RoutedDims& dims, const GluOptions& options,
                                                 std::int64_t threads) {
  const std::int64_t rows = dims.rows;
  const std::size_t into = std::max(
      grouped_glu_workspace_bytes<S>(dims.experts, rows, dims.hidden, dims.width, threads),
      grouped_workspace_bytes<S>(dims.experts, rows, dims.hidden, 2 * dims.width, threads));
  const std::size_t out_of =
      Workspace::bytes_for<S>(rows * dims.hidden) +
      grouped_workspace_bytes<S>(dims.experts, rows, dims.width, dims.hidden, threads);
  const std::int64_t separate = options.fusion == GluFusion::separate ? 2 * rows * dims.width : 0;
  return detail::RoutedRows::bytes(dims) + Workspace::bytes_for<S>(rows * dims.width) +
         Workspace::bytes_for<S>(separate) + std::max(into, out_of);
}

/// The experts' part of a token's output.
///   out[t] = sum over kept k of expert_weights[t,k] * Y_e(hidden[t]),  e of slot t*K + k
///   Y_e(x) = glu(x * wi_e) * wo_e
/// shapes    hidden [T,D]; the map's T tokens; weights of the window's experts; the rest as the structs
///           say
/// dtypes    S storage; the sum over k in its accumulator A, out in S or A. x * wi, the activation and
///           Y are rounded to S
/// writes    all of out, or adds to it; of gate_up rows [0, window.kept), in the order of their sorted
///           positions
/// alias     outputs disjoint from inputs and each other
/// specials  slots without a row and tokens without a slot are read nowhere and get +0. window.kept = 0:
///           no weight is read
/// order     k ascending from +0; same bits for any thread count, and for a token whatever other tokens
///           there are
/// memory    routed_workspace_bytes: window.kept rows of F and of D elements of S, not what the window's
///           buffer could hold
/// cost      6 D F flops and F exps a kept row; weights of experts with rows are read once
/// throws    Error for a window of another map, views of another shape, options that are none
/// source    spec/moe.md 4 and 6
template <Storage S, Storage O>
void routed_experts(const RoutingMap& map, const RoutingWindow& window,
                    ConstMatrixView<AccumulatorOf<S>> expert_weights, ConstMatrixView<S> hidden,
                    const ExpertWeights<S>& weights, const RoutedOutputs<S, O>& out,
                    const GluOptions& options, Workspace& workspace) {
  constexpr std::string_view where = "moe::routed_experts";
  detail::check_routed<S>(where, map, window, expert_weights, hidden, weights, out.gate_up,
                          options);
  require_shape(where, "out", out.out, "map.dims.tokens", map.dims.tokens, "hidden.cols",
                hidden.cols());
  detail::check_write(where, out.write);

  const Workspace::Frame frame(workspace);
  const detail::RoutedRows rows(map, window, workspace);
  const std::int64_t width = weights.wi.cols() / 2;
  const MatrixView<S> activation = detail::take_matrix<S>(workspace, rows.count(), width);
  const MatrixView<S> kept =
      out.gate_up.is_null() ? MatrixView<S>() : out.gate_up.row_block(0, rows.count());
  if (options.fusion == GluFusion::fused) {
    grouped_glu(rows.groups(), rows.of(hidden), weights.wi,
                {.activation = activation, .gate_up = kept}, options.epilogue,
                UnfilledRows::untouched, workspace);
  } else {
    const MatrixView<S> gate_up =
        kept.is_null() ? detail::take_matrix<S>(workspace, rows.count(), 2 * width) : kept;
    grouped_product(rows.groups(), rows.of(hidden), weights.wi, gate_up, UnfilledRows::untouched,
                    workspace);
    glu<S>(gate_up, activation);
  }
  const MatrixView<S> y = detail::take_matrix<S>(workspace, rows.count(), hidden.cols());
  grouped_product(rows.groups(), as_is(ConstMatrixView<S>(activation)), weights.wo, y,
                  UnfilledRows::untouched, workspace);
  unsort<S, O>(map, rows.window(), expert_weights, y, out.out, out.write);
}

/// Bytes of workspace that suffice for routed_experts_backward on so many threads.
template <Storage S>
[[nodiscard]] std::size_t routed_backward_workspace_bytes(const RoutedDims& dims,
                                                          WeightGradFrom weight_grad_from,
                                                          const GluOptions& options,
                                                          std::int64_t threads) {
  using A = AccumulatorOf<S>;
  const std::int64_t rows = dims.rows;
  const std::size_t into =
      grouped_workspace_bytes<S>(dims.experts, rows, dims.hidden, 2 * dims.width, threads);
  const std::size_t through =
      options.fusion == GluFusion::fused
          ? grouped_glu_workspace_bytes<S>(dims.experts, rows, dims.hidden, dims.width, threads)
          : Workspace::bytes_for<A>(rows * dims.width) + into;
  std::size_t bytes = detail::RoutedRows::bytes(dims) +
                      Workspace::bytes_for<S>(rows * 2 * dims.width) +
                      Workspace::bytes_for<S>(rows * dims.width);
  std::size_t most = std::max(through, Workspace::bytes_for<A>(rows * dims.hidden) + into);
  if (weight_grad_from == WeightGradFrom::wo_input) {
    bytes += 2 * Workspace::bytes_for<A>(rows);
  } else {
    bytes += Workspace::bytes_for<S>(rows * dims.hidden);
    most = std::max(most, Workspace::bytes_for<S>(rows * dims.hidden) + into);
  }
  return bytes + most;
}

/// The cotangents of routed_experts; the map is the forward's, nothing is sorted again.
///   o = d_out[t], a the activation of the slot's row:
///   wo_input:  q = o * wo^T, d_w = <q, a>, d_a = w q, d_wo += (w a)^T o
///   wo_output: d_w = <o, Y>, d_y = w o, d_a = d_y * wo^T, d_wo += a^T d_y
///   d_x = glu_backward(gate_up, d_a) * wi^T, d_wi += x^T glu_backward(gate_up, d_a),
///   d_hidden[t] = sum over kept k of d_x
/// shapes    as the structs say
/// dtypes    as the forward; what stands for the cotangents of Y, of the activation and of x * wi, and
///           w a, is rounded to S; everything else is in the accumulator
/// writes    all of d_hidden, or adds to it; all of d_expert_weights, 0 where a slot has no row; each
///           weight cotangent given, exact zeros where an expert has no rows, or added to
/// alias     outputs disjoint from inputs and each other
/// specials  slots without a row and tokens without a slot are read nowhere
/// order     rows of a weight cotangent in slot order, in blocks of 512; k ascending; same bits for any
///           thread count
/// memory    routed_backward_workspace_bytes
/// cost      12 D F flops a kept row (14 under wo_output) and 2 F exps; weights of experts with rows are
///           read once
/// throws    as routed_experts; Error for gate_up = null, cotangents of another shape
/// source    spec/moe.md 4, 4.1 and 6
template <Storage S>
void routed_experts_backward(const RoutingMap& map, const RoutingWindow& window,
                             ConstMatrixView<AccumulatorOf<S>> expert_weights,
                             ConstMatrixView<S> hidden, const ExpertWeights<S>& weights,
                             const RoutedCotangents<S>& d, WeightGradFrom weight_grad_from,
                             const GluOptions& options,
                             const RoutedGradients<AccumulatorOf<S>>& out, Workspace& workspace) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::routed_experts_backward";
  detail::check_routed<S>(where, map, window, expert_weights, hidden, weights, d.gate_up, options);
  require(!d.gate_up.is_null() || window.kept == 0, where, "gate_up", nullptr, "required");
  const std::int64_t tokens = map.dims.tokens;
  const auto require_like_hidden = [&](std::string_view argument, auto matrix) {
    require_shape(where, argument, matrix, "map.dims.tokens", tokens, "hidden.cols", hidden.cols());
  };
  require_like_hidden("d_out", d.d_out);
  require(
      weight_grad_from == WeightGradFrom::wo_input || weight_grad_from == WeightGradFrom::wo_output,
      where, "weight_grad_from", weight_grad_from, "must be wo_input or wo_output");
  require_like_hidden("d_hidden", out.d_hidden);
  detail::check_write(where, out.write);
  require_shape(where, "d_expert_weights", out.d_expert_weights, "map.dims.tokens", tokens,
                "map.dims.top_k", map.dims.top_k);

  const Workspace::Frame frame(workspace);
  const detail::RoutedRows rows(map, window, workspace);
  const ExpertGroups groups = rows.groups();
  const std::int64_t count = rows.count();
  const std::int64_t width = weights.wi.cols() / 2;
  const ConstMatrixView<S> gate_up = d.gate_up.row_block(0, count);
  const MatrixView<S> d_gate_up = detail::take_matrix<S>(workspace, count, 2 * width);
  const MatrixView<S> wo_input = detail::take_matrix<S>(workspace, count, width);
  Factor<S> d_result;
  if (weight_grad_from == WeightGradFrom::wo_input) {
    d_result = rows.of(d.d_out);
    const auto row_weights = workspace.take<A>(count);
    const auto d_row_weights = workspace.take<A>(count);
    sort_weights<A>(map, rows.window(), expert_weights, row_weights);
    detail::through_wo_and_glu<S>(
        groups,
        {.d_result = d_result, .wo = weights.wo, .gate_up = gate_up, .row_weights = row_weights},
        {.d_gate_up = d_gate_up, .weighted_activation = wo_input, .d_row_weights = d_row_weights},
        options, workspace);
    unsort_weights<A>(map, rows.window(), d_row_weights, out.d_expert_weights);
  } else {
    const MatrixView<S> d_y = detail::take_matrix<S>(workspace, count, hidden.cols());
    d_result = as_is(ConstMatrixView<S>(d_y));
    {
      const Workspace::Frame recomputed(workspace);
      const MatrixView<S> y = detail::take_matrix<S>(workspace, count, hidden.cols());
      glu<S>(gate_up, wo_input);
      grouped_product(groups, as_is(ConstMatrixView<S>(wo_input)), weights.wo, y,
                      UnfilledRows::untouched, workspace);
      unsort_backward<S>(map, rows.window(), expert_weights, y, d.d_out,
                         {.d_rows = d_y, .d_expert_weights = out.d_expert_weights});
    }
    detail::through_wo_and_glu<S>(
        groups, {.d_result = d_result, .wo = weights.wo, .gate_up = gate_up, .row_weights = {}},
        {.d_gate_up = d_gate_up}, options, workspace);
  }
  {
    const Workspace::Frame summed(workspace);
    const MatrixView<A> d_rows = detail::take_matrix<A>(workspace, count, hidden.cols());
    grouped_product_d_rows(groups, as_is(ConstMatrixView<S>(d_gate_up)), weights.wi, d_rows,
                           UnfilledRows::untouched, workspace);
    sort_backward<A, A>(map, rows.window(), d_rows, out.d_hidden, out.write);
  }
  grouped_product_d_weights(groups, rows.of(hidden), as_is(ConstMatrixView<S>(d_gate_up)), out.d_wi,
                            workspace);
  grouped_product_d_weights(groups, as_is(ConstMatrixView<S>(wo_input)), d_result, out.d_wo,
                            workspace);
}

}  // namespace heddle::moe

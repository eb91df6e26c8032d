#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "heddle/core/elementwise.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/factor.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/parallel_product.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/detail/glu_rows.hpp"
#include "heddle/moe/glu.hpp"
#include "heddle/moe/grouped_gemm.hpp"
#include "heddle/moe/options.hpp"

namespace heddle::moe {

/// What grouped_glu writes.
template <Storage S>
struct GroupedGluOutputs {
  MatrixView<S> activation;    ///< [R,F]
  MatrixView<S> gate_up = {};  ///< [R,2F], the product itself, for the backward; may be null
};

/// What grouped_glu_backward reads.
template <Storage S>
struct GroupedGluCotangents {
  Factor<S> d_result;          ///< [R,D], as stored or gathered
  ConstMatrixView<S> wo;       ///< [E*F, D]
  ConstMatrixView<S> gate_up;  ///< [R,2F], of the forward
  /// [R] by which each row's d_result counts; empty: every row once.
  std::span<const AccumulatorOf<S>> row_weights = {};
};

/// What grouped_glu_backward writes. All but d_gate_up may be null or empty.
template <Storage S>
struct GroupedGluGradients {
  MatrixView<S> d_gate_up;                         ///< [R,2F]
  MatrixView<S> weighted_activation = {};          ///< [R,F], row_weight * activation
  std::span<AccumulatorOf<S>> d_row_weights = {};  ///< [R]
};

namespace detail {

inline void require_epilogue(std::string_view where, GluEpilogue epilogue) {
  require(epilogue == GluEpilogue::strict || epilogue == GluEpilogue::fast, where, "epilogue",
          epilogue, "must be strict or fast");
}

/// Columns that a tile of one right factor has at most.
inline constexpr std::int64_t most_tile_columns = product_tile_columns;

template <Storage S>
void store_row(const AccumulatorOf<S>* from, S* to, std::int64_t count) {
  if constexpr (std::is_same_v<S, AccumulatorOf<S>>) {
    std::copy_n(from, count, to);
  } else {
    const auto size = static_cast<std::size_t>(count);
    convert(std::span<const AccumulatorOf<S>>(from, size), std::span<S>(to, size));
  }
}

/// The activation of one row of a finished gate and up tile. gate_to and up_to, where the tile itself
/// goes, may be null.
template <Storage S>
void finish_glu_row(GluEpilogue epilogue, const AccumulatorOf<S>* gate, const AccumulatorOf<S>* up,
                    S* gate_to, S* up_to, S* activation, std::int64_t count) {
  std::array<S, 2 * most_tile_columns> rounded;
  if (gate_to == nullptr) {
    gate_to = rounded.data();
    up_to = rounded.data() + most_tile_columns;
  }
  store_row(gate, gate_to, count);
  store_row(up, up_to, count);
  if (epilogue == GluEpilogue::strict) {
    glu_row<S, S>(gate_to, up_to, activation, count);
  } else {
    glu_row<AccumulatorOf<S>, S>(gate, up, activation, count);
  }
}

/// Where one row of grouped_glu_backward reads and writes its columns of a tile.
template <Storage S>
struct GluBackwardRow {
  const AccumulatorOf<S>* q;  ///< d_result * wo^T, unweighted
  const S* gate;
  const S* up;
  AccumulatorOf<S> weight;
  bool weighted;
  S* d_gate;
  S* d_up;
  S* weighted_activation;  ///< may be null
};

/// Returns <q, activation> over the columns.
template <Storage S>
[[nodiscard]] AccumulatorOf<S> finish_glu_backward_row(GluEpilogue epilogue,
                                                       const GluBackwardRow<S>& row, bool wants_dot,
                                                       std::int64_t count) {
  using A = AccumulatorOf<S>;
  if (count <= 0) {  // no tile is empty, but a compiler that cannot know sees buffers unwritten
    return A(0);
  }
  // The weight stands after the product: q is common to d_activation and to the weight's own
  // cotangent, which needs it in the accumulator and unweighted.
  if (epilogue == GluEpilogue::strict) {
    std::array<S, most_tile_columns> d_activation;
    if (row.weighted) {
      scale_row<A, S>(row.weight, row.q, d_activation.data(), count);
    } else {
      store_row(row.q, d_activation.data(), count);
    }
    glu_backward_row(row.gate, row.up, d_activation.data(), row.d_gate, row.d_up, count);
  } else if (row.weighted) {
    std::array<A, most_tile_columns> d_activation;
    scale_row<A, A>(row.weight, row.q, d_activation.data(), count);
    glu_backward_row(row.gate, row.up, d_activation.data(), row.d_gate, row.d_up, count);
  } else {
    glu_backward_row(row.gate, row.up, row.q, row.d_gate, row.d_up, count);
  }
  if (!wants_dot && row.weighted_activation == nullptr) {
    return A(0);
  }
  std::array<S, most_tile_columns> activation;  // as the forward stored it
  glu_row<S, S>(row.gate, row.up, activation.data(), count);
  if (row.weighted_activation != nullptr) {
    scale_row<S, S>(row.weight, activation.data(), row.weighted_activation, count);
  }
  return wants_dot ? dot_row<A>(row.q, activation.data(), count) : A(0);
}

/// Tiles of the columns of a weight cotangent's dot: one partial sum each.
[[nodiscard]] constexpr std::int64_t dot_tiles(std::int64_t width) {
  return (width + most_tile_columns - 1) / most_tile_columns;
}

}  // namespace detail

/// Bytes of workspace that suffice for grouped_glu or grouped_glu_backward of so many rows on so many
/// threads.
template <Storage S>
[[nodiscard]] constexpr std::size_t grouped_glu_workspace_bytes(std::int64_t experts,
                                                                std::int64_t rows,
                                                                std::int64_t hidden,
                                                                std::int64_t width,
                                                                std::int64_t threads) {
  using Pair = TileProduct<S, Factor<S>, 2>;
  return Workspace::bytes_for<Pair>(experts) +
         Workspace::bytes_for<AccumulatorOf<S>>(rows * detail::dot_tiles(width)) +
         parallel_workspace_bytes<S, S>(experts, product_tile_rows, product_tile_columns,
                                        std::max(hidden, 2 * width), threads);
}

/// grouped_product and glu in one: each tile of gate columns is multiplied together with the tile of
/// the same up columns, and activated when both sums are whole.
///   gate_up[r] = rows[r] * wi_e,  activation[r] = glu(gate_up[r])
/// shapes    rows [R,D], as stored or gathered; wi [E*D, 2F], gate columns before up; outputs as the
///           struct says
/// dtypes    S in and out; sums and activation in its accumulator. strict: gate_up is rounded to S
///           before it is activated, the bits are those of grouped_product and glu; fast: it is not
/// writes    the rows of every expert; of activation and gate_up the others as `unfilled` says
/// alias     outputs disjoint from inputs and each other
/// specials  an expert without rows costs nothing, its weights are not read; neither are unfilled rows
/// order     the bits of a row depend on its row and its expert's weights alone
/// memory    grouped_glu_workspace_bytes; nothing of 2F columns where gate_up is null
/// cost      grouped_cost(D, 2F) less the write of gate_up where it is null, and glu_cost without its
///           bytes
/// throws    Error for bad groups, views of other shapes, row ids outside their matrix
/// source    spec/moe.md 6
template <Storage S>
void grouped_glu(const ExpertGroups& groups, const Factor<S>& rows, ConstMatrixView<S> wi,
                 const GroupedGluOutputs<S>& out, GluEpilogue epilogue, UnfilledRows unfilled,
                 Workspace& workspace) {
  constexpr std::string_view where = "moe::grouped_glu";
  using A = AccumulatorOf<S>;
  using Pair = TileProduct<S, Factor<S>, 2>;
  groups.validate(where, "rows.rows", rows.rows());
  detail::require_rows(where, "rows", rows);
  require(wi.cols() % 2 == 0, where, "wi.cols", wi.cols(), "must be even");
  detail::require_weights(where, "wi", wi, groups, "rows.cols", rows.cols(), "wi.cols", wi.cols());
  const std::int64_t width = wi.cols() / 2;
  require_shape(where, "activation", out.activation, "rows.rows", rows.rows(), "wi.cols / 2",
                width);
  const bool keeps = !out.gate_up.is_null();
  if (keeps) {
    require_shape(where, "gate_up", out.gate_up, "rows.rows", rows.rows(), "wi.cols", wi.cols());
  }
  detail::require_epilogue(where, epilogue);
  detail::require_unfilled_rows(where, unfilled);

  const std::int64_t hidden = rows.cols();
  const Workspace::Frame frame(workspace);
  const auto products =
      detail::take_products<Pair>(workspace, groups.experts(), [&](std::int64_t e) {
        const ConstMatrixView<S> both = wi.row_block(e * hidden, hidden);  // [D,2F]
        return Pair{rows.row_block(groups.first_row(e), groups.rows(e)),
                    {as_is(both.column_block(0, width)), as_is(both.column_block(width, width))}};
      });
  parallel_multiply_tiles(
      products, workspace, [&](std::int64_t expert, const ProductTile<A, 2>& tile) {
        const std::int64_t column = tile.first_column;
        for (std::int64_t i = 0; i < tile.values[0].rows(); ++i) {
          const std::int64_t row = groups.first_row(expert) + tile.first_row + i;
          S* const gate_to = keeps ? out.gate_up.row(row).data() + column : nullptr;
          detail::finish_glu_row(epilogue, tile.values[0].row(i).data(),
                                 tile.values[1].row(i).data(), gate_to,
                                 keeps ? gate_to + width : nullptr,
                                 out.activation.row(row).data() + column, tile.values[0].cols());
        }
      });
  detail::settle_unfilled_rows(groups, out.activation, unfilled);
  if (keeps) {
    detail::settle_unfilled_rows(groups, out.gate_up, unfilled);
  }
}

/// grouped_product_d_rows and glu_backward in one: the cotangent of the activation is used where it
/// is formed and never stored.
///   q = d_result[r] * wo_e^T,  a = glu(gate_up[r]),  w = row_weights[r]
///   d_gate_up[r] = glu_backward(gate_up[r], w q),  weighted_activation[r] = w a,
///   d_row_weights[r] = <q, a>
/// So the cotangent of a routing weight comes from the input of wo, over F columns: neither the
/// expert's output nor its product is formed again.
/// shapes    as the structs say
/// dtypes    S, sums in its accumulator. strict: w q is rounded to S first, the bits are those of
///           grouped_product_d_rows, a scaling and glu_backward; fast: it is not. a is rounded to S
///           in both, as the forward stored it; q in <q, a> never
/// writes    the rows of every expert; of d_gate_up and weighted_activation the others as `unfilled`
///           says; d_row_weights of the experts' rows alone
/// alias     gradients disjoint from the inputs and each other
/// specials  d_gate_up has no -0. Experts without rows and unfilled rows as in grouped_glu
/// order     the bits of a row depend on its own operands and its expert's weights alone; <q, a> in
///           tiles of 512 columns, added in order
/// memory    grouped_glu_workspace_bytes
/// cost      grouped_cost(F, D) less the write of q, and glu_backward_cost less the read of its
///           cotangent; one exp an element more where weighted_activation or d_row_weights are wanted
/// throws    Error for bad groups, views of other shapes, row ids outside their matrix
/// source    spec/moe.md 4.1 and 6
template <Storage S>
void grouped_glu_backward(const ExpertGroups& groups, const GroupedGluCotangents<S>& in,
                          const GroupedGluGradients<S>& out, GluEpilogue epilogue,
                          UnfilledRows unfilled, Workspace& workspace) {
  constexpr std::string_view where = "moe::grouped_glu_backward";
  using A = AccumulatorOf<S>;
  using One = TileProduct<S, Factor<S>, 1>;
  const std::int64_t rows = in.d_result.rows();
  groups.validate(where, "d_result.rows", rows);
  detail::require_rows(where, "d_result", in.d_result);
  const std::int64_t width = detail::weight_rows(where, in.wo, groups);
  detail::require_weights(where, "wo", in.wo, groups, "wo.rows / groups.experts", width,
                          "d_result.cols", in.d_result.cols());
  const auto require_rows_of = [&](std::string_view argument, auto matrix, std::string_view name,
                                   std::int64_t cols) {
    require_shape(where, argument, matrix, "d_result.rows", rows, name, cols);
  };
  require_rows_of("gate_up", in.gate_up, "2 * wo.rows / groups.experts", 2 * width);
  const bool weighted = !in.row_weights.empty();
  if (weighted) {
    require_length(where, "row_weights", in.row_weights, "d_result.rows", rows);
  }
  require_rows_of("d_gate_up", out.d_gate_up, "2 * wo.rows / groups.experts", 2 * width);
  const bool keeps = !out.weighted_activation.is_null();
  if (keeps) {
    require_rows_of("weighted_activation", out.weighted_activation, "wo.rows / groups.experts",
                    width);
  }
  const bool wants_dot = !out.d_row_weights.empty();
  if (wants_dot) {
    require_length(where, "d_row_weights", out.d_row_weights, "d_result.rows", rows);
  }
  detail::require_epilogue(where, epilogue);
  detail::require_unfilled_rows(where, unfilled);

  const Workspace::Frame frame(workspace);
  const auto products =
      detail::take_products<One>(workspace, groups.experts(), [&](std::int64_t e) {
        return One{in.d_result.row_block(groups.first_row(e), groups.rows(e)),
                   {transposed(in.wo.row_block(e * width, width))}};
      });
  const std::int64_t tiles = detail::dot_tiles(width);
  const std::int64_t first = groups.offsets.front();
  const auto dots = workspace.take<A>(wants_dot ? groups.total_rows() * tiles : 0);
  parallel_multiply_tiles(
      products, workspace, [&](std::int64_t expert, const ProductTile<A, 1>& tile) {
        const std::int64_t column = tile.first_column;
        for (std::int64_t i = 0; i < tile.values[0].rows(); ++i) {
          const std::int64_t row = groups.first_row(expert) + tile.first_row + i;
          const S* const gate = in.gate_up.row(row).data() + column;
          S* const d_gate = out.d_gate_up.row(row).data() + column;
          const detail::GluBackwardRow<S> each{
              .q = tile.values[0].row(i).data(),
              .gate = gate,
              .up = gate + width,
              .weight = weighted ? in.row_weights[static_cast<std::size_t>(row)] : A(1),
              .weighted = weighted,
              .d_gate = d_gate,
              .d_up = d_gate + width,
              .weighted_activation =
                  keeps ? out.weighted_activation.row(row).data() + column : nullptr};
          const A dot =
              detail::finish_glu_backward_row(epilogue, each, wants_dot, tile.values[0].cols());
          if (wants_dot) {
            dots[static_cast<std::size_t>((row - first) * tiles +
                                          column / detail::most_tile_columns)] = dot;
          }
        }
      });
  for (std::int64_t row = first; wants_dot && row < groups.offsets.back(); ++row) {
    const auto parts = dots.subspan(static_cast<std::size_t>((row - first) * tiles),
                                    static_cast<std::size_t>(tiles));
    A sum = A(0);
    for (const A part : parts) {
      sum = sum + part;
    }
    out.d_row_weights[static_cast<std::size_t>(row)] = sum;
  }
  detail::settle_unfilled_rows(groups, out.d_gate_up, unfilled);
  if (keeps) {
    detail::settle_unfilled_rows(groups, out.weighted_activation, unfilled);
  }
}

}  // namespace heddle::moe

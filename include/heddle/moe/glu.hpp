#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/moe/detail/glu_rows.hpp"

namespace heddle::moe {

namespace detail {

/// Width F of an activation whose gate and up lie side by side in 2F columns.
template <class T>
[[nodiscard]] std::int64_t glu_width(std::string_view where, MatrixView<T> gate_up) {
  require(gate_up.cols() % 2 == 0, where, "gate_up.cols", gate_up.cols(), "must be even");
  require_shape(where, "gate_up", gate_up, "gate_up.rows", gate_up.rows(), "gate_up.cols",
                gate_up.cols());
  return gate_up.cols() / 2;
}

/// Rows of `width` columns that make a task of some 20 us.
[[nodiscard]] inline std::int64_t glu_grain(std::int64_t width) {
  constexpr std::int64_t elements = 1 << 15;
  return std::max<std::int64_t>(1, elements / std::max<std::int64_t>(width, 1));
}

}  // namespace detail

/// The gated linear unit SwiGLU.
///   activation = silu(gate) * up,  silu(x) = x * sigmoid(x);  gate_up = [gate | up]
/// shapes    gate_up [rows, 2F], columns [0,F) the gate and [F,2F) up; activation [rows, F]. A range of
///           rows is a row block of both
/// dtypes    Storage; arithmetic in its Accumulator, one rounding
/// writes    all of activation
/// alias     activation disjoint from gate_up
/// specials  rows = 0. gate = -inf gives NaN, as -inf * 0 does
/// order     an element's bits depend on its gate and up alone: on no path, thread or shape
/// memory    -
/// cost      glu_cost
/// throws    Error for an odd number of columns, another shape of activation
/// source    spec/moe.md 6
template <Storage S>
void glu(ConstMatrixView<S> gate_up, MatrixView<S> activation) {
  constexpr std::string_view where = "moe::glu";
  const std::int64_t width = detail::glu_width(where, gate_up);
  require_shape(where, "activation", activation, "gate_up.rows", gate_up.rows(), "gate_up.cols / 2",
                width);
  parallel_blocks(gate_up.rows(), detail::glu_grain(width),
                  [&](std::int64_t first, std::int64_t last) {
                    for (std::int64_t row = first; row < last; ++row) {
                      const S* const gate = gate_up.row(row).data();
                      detail::glu_row(gate, gate + width, activation.row(row).data(), width);
                    }
                  });
}

/// Its backward, both halves side by side.
///   d_gate = d_activation * up * s * (1 + gate * (1 - s)),  d_up = d_activation * gate * s,
///   s = sigmoid(gate)
/// shapes    gate_up, d_gate_up [rows, 2F]; d_activation [rows, F]
/// dtypes    Storage; arithmetic in its Accumulator, one rounding
/// writes    all of d_gate_up; never -0: the sum of two zero-padded halves, which this stands for,
///           has none
/// alias     d_gate_up disjoint from the inputs
/// and the rest as glu
template <Storage S>
void glu_backward(ConstMatrixView<S> gate_up, ConstMatrixView<S> d_activation,
                  MatrixView<S> d_gate_up) {
  constexpr std::string_view where = "moe::glu_backward";
  const std::int64_t width = detail::glu_width(where, gate_up);
  require_shape(where, "d_activation", d_activation, "gate_up.rows", gate_up.rows(),
                "gate_up.cols / 2", width);
  require_shape(where, "d_gate_up", d_gate_up, "gate_up.rows", gate_up.rows(), "gate_up.cols",
                gate_up.cols());
  parallel_blocks(gate_up.rows(), detail::glu_grain(width),
                  [&](std::int64_t first, std::int64_t last) {
                    for (std::int64_t row = first; row < last; ++row) {
                      const S* const gate = gate_up.row(row).data();
                      S* const d_gate = d_gate_up.row(row).data();
                      detail::glu_backward_row(gate, gate + width, d_activation.row(row).data(),
                                               d_gate, d_gate + width, width);
                    }
                  });
}

/// What a pass of glu over stored rows costs; fused into the product before it, none of these bytes
/// moves.
template <Storage S>
[[nodiscard]] constexpr Cost glu_cost(std::int64_t rows, std::int64_t width) {
  constexpr auto element = static_cast<std::int64_t>(sizeof(S));
  return {.flops = 4 * rows * width,
          .transcendentals = rows * width,
          .bytes_read = 2 * rows * width * element,
          .bytes_written = rows * width * element};
}

/// The same of glu_backward.
template <Storage S>
[[nodiscard]] constexpr Cost glu_backward_cost(std::int64_t rows, std::int64_t width) {
  constexpr auto element = static_cast<std::int64_t>(sizeof(S));
  return {.flops = 10 * rows * width,
          .transcendentals = rows * width,
          .bytes_read = 3 * rows * width * element,
          .bytes_written = 2 * rows * width * element};
}

}  // namespace heddle::moe

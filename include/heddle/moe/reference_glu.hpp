#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"

namespace heddle::moe::reference {

namespace detail {

template <Accumulator A>
[[nodiscard]] A sigmoid(A x) {
  using std::exp;
  return A(1) / (A(1) + exp(-x));
}

/// Width F of an activation whose gate and up lie side by side in 2F columns.
template <class T>
[[nodiscard]] std::int64_t glu_width(std::string_view where, MatrixView<T> gate_up) {
  require(gate_up.cols() % 2 == 0, where, "gate_up.cols", gate_up.cols(), "must be even");
  require_shape(where, "gate_up", gate_up, "gate_up.rows", gate_up.rows(), "gate_up.cols",
                gate_up.cols());
  return gate_up.cols() / 2;
}

}  // namespace detail

/// The gated linear unit SwiGLU.
///   activation = silu(gate) * up,  silu(x) = x * sigmoid(x);  gate_up = [gate | up]
/// shapes    gate_up [rows, 2F], columns [0,F) the gate and [F,2F) up; activation [rows, F]
/// dtypes    Storage; arithmetic in its Accumulator, one rounding
/// writes    all of activation
/// alias     activation disjoint from gate_up
/// throws    Error for an odd number of columns, another shape of activation
/// source    spec/moe.md 6
template <Storage S>
void glu(ConstMatrixView<S> gate_up, MatrixView<S> activation) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::reference::glu";
  const std::int64_t width = detail::glu_width(where, gate_up);
  require_shape(where, "activation", activation, "gate_up.rows", gate_up.rows(), "gate_up.cols / 2",
                width);
  for (std::int64_t i = 0; i < gate_up.rows(); ++i) {
    for (std::int64_t f = 0; f < width; ++f) {
      const A gate = widen<A>(gate_up(i, f));
      const A up = widen<A>(gate_up(i, width + f));
      activation(i, f) = narrow<S>(gate * detail::sigmoid(gate) * up);
    }
  }
}

/// Its backward, both halves side by side.
///   d_gate = d_activation * up * s * (1 + gate * (1 - s)),  d_up = d_activation * gate * s,
///   s = sigmoid(gate)
/// shapes    gate_up, d_gate_up [rows, 2F]; d_activation [rows, F]
/// dtypes    Storage; arithmetic in its Accumulator, one rounding
/// writes    all of d_gate_up; never -0: the sum of two zero-padded halves, which this stands for,
///           has none
/// alias     d_gate_up disjoint from the inputs
/// throws    Error for an odd number of columns, other shapes
/// source    spec/moe.md 6
template <Storage S>
void glu_backward(ConstMatrixView<S> gate_up, ConstMatrixView<S> d_activation,
                  MatrixView<S> d_gate_up) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::reference::glu_backward";
  const std::int64_t width = detail::glu_width(where, gate_up);
  require_shape(where, "d_activation", d_activation, "gate_up.rows", gate_up.rows(),
                "gate_up.cols / 2", width);
  require_shape(where, "d_gate_up", d_gate_up, "gate_up.rows", gate_up.rows(), "gate_up.cols",
                gate_up.cols());
  const auto stored = [](A value) {
    const S rounded = narrow<S>(value);
    return widen<A>(rounded) == A(0) ? narrow<S>(A(0)) : rounded;
  };
  for (std::int64_t i = 0; i < gate_up.rows(); ++i) {
    for (std::int64_t f = 0; f < width; ++f) {
      const A gate = widen<A>(gate_up(i, f));
      const A up = widen<A>(gate_up(i, width + f));
      const A d = widen<A>(d_activation(i, f));
      const A s = detail::sigmoid(gate);
      d_gate_up(i, f) = stored(d * up * s * (A(1) + gate * (A(1) - s)));
      d_gate_up(i, width + f) = stored(d * gate * s);
    }
  }
}

}  // namespace heddle::moe::reference

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/gdn/detail/reference_arrays.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"

namespace heddle::gdn::reference {

/// 1 / (1 + exp(-x)) without an exponential above 1, whatever the sign of x.
template <Accumulator A>
[[nodiscard]] A sigmoid(A x) {
  using std::abs;
  using std::exp;
  const A small = exp(-abs(x));
  return (x >= A(0) ? A(1) : small) / (A(1) + small);
}

/// log(1 + exp(x)), exact to rounding for any x.
template <Accumulator A>
[[nodiscard]] A softplus(A x) {
  using std::abs;
  using std::exp;
  using std::log1p;
  return (x > A(0) ? x : A(0)) + log1p(exp(-abs(x)));
}

/// One value head's gate inputs: columns of a and b, and its two parameters.
template <Storage S, Accumulator A>
struct GateInputs {
  ConstMatrixView<S> a{};  // [T,1]
  ConstMatrixView<S> b{};  // [T,1]
  A A_log;
  A dt_bias;
};

/// Writing strength and log decay of one value head.
///   beta = sigmoid(b), twice that where BetaRange::doubled;  g = -exp(A_log) softplus(a + dt_bias)
/// shapes    a, b [T,1]; beta, g [T]
/// units     g in nats, <= 0
/// dtypes    a, b: Storage, widened first; arithmetic and outputs: Accumulator
/// writes    all of beta and g
/// specials  padding: beta = g = 0, a and b not read; a document's first token: g = 0, a not read
///           (its decay would multiply a state that is exactly zero)
/// cost      3 transcendentals a token
/// source    spec/gdn.md 3
template <Storage S, Accumulator A>
void gates_forward(const Segments& segments, const GateInputs<S, A>& inputs, BetaRange range,
                   std::span<A> beta, std::span<A> g) {
  using std::exp;
  const A rate = exp(inputs.A_log);
  const A top = range == BetaRange::doubled ? A(2) : A(1);
  for (std::int64_t t = 0; t < segments.tokens(); ++t) {
    const auto i = static_cast<std::size_t>(t);
    const bool decays = segments.valid(t) && !segments.starts(t);
    beta[i] = segments.valid(t) ? top * sigmoid(widen<A>(inputs.b(t, 0))) : A(0);
    g[i] = decays ? -rate * softplus(widen<A>(inputs.a(t, 0)) + inputs.dt_bias) : A(0);
  }
}

/// The cotangents of one value head's parameters, summed over the row.
template <Accumulator A>
struct GateParameterCotangents {
  A d_A_log;
  A d_dt_bias;
};

/// Backward of gates_forward.
///   d_b = d_beta beta (1 - sigmoid(b));  d_a = -d_g exp(A_log) sigmoid(a + dt_bias)
///   d_dt_bias = sum_t d_a,  d_A_log = sum_t d_g g
/// shapes    d_beta, d_g [T]; d_a, d_b [T,1]
/// writes    all of d_a and d_b; exactly 0 at padding, d_a also at a document's first token
/// order     sums over tokens ascending, in blocks
/// source    spec/gdn.md 3
template <Storage S, Accumulator A>
GateParameterCotangents<A> gates_backward(const Segments& segments, const GateInputs<S, A>& inputs,
                                          BetaRange range, std::span<const A> d_beta,
                                          std::span<const A> d_g, MatrixView<A> d_a,
                                          MatrixView<A> d_b) {
  using std::exp;
  const A rate = exp(inputs.A_log);
  const A top = range == BetaRange::doubled ? A(2) : A(1);
  detail::TokenSums<A> sums(2);
  for (std::int64_t t = 0; t < segments.tokens(); ++t) {
    const auto i = static_cast<std::size_t>(t);
    d_a(t, 0) = A(0);
    d_b(t, 0) = A(0);
    if (!segments.valid(t)) {
      continue;
    }
    const A open = sigmoid(widen<A>(inputs.b(t, 0)));
    d_b(t, 0) = d_beta[i] * top * open * (A(1) - open);
    if (!segments.starts(t)) {
      const A shifted = widen<A>(inputs.a(t, 0)) + inputs.dt_bias;
      d_a(t, 0) = -d_g[i] * rate * sigmoid(shifted);
      const std::span<A> sum = sums.next_token();
      sum[0] += d_g[i] * (-rate * softplus(shifted));
      sum[1] += d_a(t, 0);
    }
  }
  return {.d_A_log = sums.total()[0], .d_dt_bias = sums.total()[1]};
}

}  // namespace heddle::gdn::reference

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/gdn/detail/reference_arrays.hpp"
#include "heddle/gdn/segments.hpp"

namespace heddle::gdn::reference {

/// One value head's inputs of the recurrence, normalised and scaled.
///
/// shapes    q, k [T,Dk]; v [T,Dv]; beta, g [T]; q may be null where no output is asked for
template <Accumulator A>
struct RecurrenceInputs {
  ConstMatrixView<A> q{};
  ConstMatrixView<A> k{};
  ConstMatrixView<A> v{};
  std::span<const A> beta{};
  std::span<const A> g{};
};

namespace detail {

/// What one token does to the state; its residual v - S'^T k and delta = beta * residual stay
/// behind for the backward.
template <Accumulator A>
void advance(const Segments& segments, const RecurrenceInputs<A>& in, std::int64_t t,
             MatrixView<A> state, std::span<A> residual, std::span<A> delta) {
  using std::exp;
  const std::int64_t value_dim = state.cols();
  A* const r = residual.data();
  A* const d = delta.data();
  // A document's first token selects zero: whatever the last one left, NaN too, is gone.
  const bool starts = segments.starts(t);
  const A beta = in.beta[static_cast<std::size_t>(t)];
  const A decay = exp(in.g[static_cast<std::size_t>(t)]);
  std::fill(residual.begin(), residual.end(), A(0));
  for (std::int64_t i = 0; i < state.rows(); ++i) {
    A* const s = &state(i, 0);
    const A k = in.k(t, i);
    for (std::int64_t j = 0; j < value_dim; ++j) {
      s[j] = starts ? A(0) : decay * s[j];
      r[j] += s[j] * k;
    }
  }
  const A* const v = &in.v(t, 0);
  for (std::int64_t j = 0; j < value_dim; ++j) {
    r[j] = v[j] - r[j];
    d[j] = beta * r[j];
  }
  for (std::int64_t i = 0; i < state.rows(); ++i) {
    A* const s = &state(i, 0);
    const A k = in.k(t, i);
    for (std::int64_t j = 0; j < value_dim; ++j) {
      s[j] += k * d[j];
    }
  }
}

}  // namespace detail

/// The gated delta rule of one value head, token by token.
///   S' = r_t ? 0 : exp(g_t) S_{t-1};  S_t = S' + k_t (beta_t (v_t - S'^T k_t))^T;  o_t = S_t^T q_t
/// shapes    state [Dk,Dv]: S_0 going in, S_T coming out; o [T,Dv] or null (states only)
/// dtypes    arithmetic and state: A; o: any Storage, rounded once
/// writes    all of state and o; o exactly 0 at padding, which leaves the state as it is
/// specials  a document's first token makes the state 0 by selection
/// order     tokens ascending; sums over Dk ascending
/// memory    3 [Dv] vectors
/// cost      7 Dk Dv flops, 1 exp a token
/// source    spec/gdn.md 4
template <Accumulator A, Storage O>
void recurrence_forward(const Segments& segments, const RecurrenceInputs<A>& inputs,
                        MatrixView<A> state, MatrixView<O> o) {
  const std::int64_t value_dim = state.cols();
  detail::Matrix<A> scratch(3, value_dim);
  A* const read = scratch.row(2).data();
  for (std::int64_t t = 0; t < segments.tokens(); ++t) {
    if (segments.valid(t)) {
      detail::advance(segments, inputs, t, state, scratch.row(0), scratch.row(1));
    }
    if (o.is_null()) {
      continue;
    }
    std::fill_n(read, value_dim, A(0));
    if (segments.valid(t)) {
      for (std::int64_t i = 0; i < state.rows(); ++i) {
        const A* const s = &state(i, 0);
        const A q = inputs.q(t, i);
        for (std::int64_t j = 0; j < value_dim; ++j) {
          read[j] += s[j] * q;
        }
      }
    }
    for (std::int64_t j = 0; j < value_dim; ++j) {
      o(t, j) = narrow<O>(read[j]);
    }
  }
}

/// What the row does to an incoming state: final state = m * initial state + what its tokens write.
/// The identity is pushed through the recurrence with nothing to write.
/// shapes    m [Dk,Dk]
/// writes    all of m; exactly 0 where a document starts in the row, the identity without any token
/// source    spec/gdn.md 8.1, 8.2
template <Accumulator A>
void transition(const Segments& segments, const RecurrenceInputs<A>& inputs, MatrixView<A> m) {
  detail::fill(m, A(0));
  for (std::int64_t i = 0; i < m.rows(); ++i) {
    m(i, i) = A(1);
  }
  std::vector<A> nothing(static_cast<std::size_t>(m.cols()));
  RecurrenceInputs<A> silent = inputs;
  silent.v = {nothing.data(), segments.tokens(), m.cols(), 0};  // one row of zeros for every token
  recurrence_forward(segments, silent, m, MatrixView<A>());
}

/// Where the cotangents of one value head go.
///
/// shapes    those of the inputs
/// writes    d_v, d_beta, d_g: every element, exactly 0 at padding, d_g also at a document's first
///           token; d_q, d_k: added to, padding left alone, for the value heads of a group share them
template <Accumulator A>
struct RecurrenceCotangents {
  MatrixView<A> d_q{};
  MatrixView<A> d_k{};
  MatrixView<A> d_v{};
  std::span<A> d_beta{};
  std::span<A> d_g{};
};

/// Backward of recurrence_forward, tokens descending, dS from the future:
///   dS += q do^T, dq = S_t do; dd = dS^T k, dk = dS delta - S' (beta dd); dv = beta dd,
///   dbeta = dd . (v - S'^T k); dS -= k (beta dd)^T; dg = exp(g) <dS, S_{t-1}>;
///   dS = r_t ? 0 : exp(g) dS
/// shapes    initial_state [Dk,Dv] or null (zeros); d_o [T,Dv]; d_state [Dk,Dv]: the final state's
///           cotangent going in, the initial state's coming out
/// writes    all of d_state; the cotangents as they say
/// specials  d_o at padding is not read; an initial state of another document is not read
/// order     tokens descending, the same for any split of the work over heads
/// memory    states before every sqrt(n)-th of n tokens, and of sqrt(n) tokens at a time, replayed:
///           about 2 sqrt(n) [Dk,Dv]
/// cost      25 Dk Dv flops a token: 10 in two forward passes, 15 backward
/// source    spec/gdn.md 4
template <Accumulator A, Storage G>
void recurrence_backward(const Segments& segments, const RecurrenceInputs<A>& inputs,
                         ConstMatrixView<A> initial_state, ConstMatrixView<G> d_o,
                         MatrixView<A> d_state, const RecurrenceCotangents<A>& out) {
  using std::exp;
  const std::int64_t key_dim = d_state.rows();
  const std::int64_t value_dim = d_state.cols();
  const std::int64_t elements = key_dim * value_dim;

  std::vector<std::int64_t> real;  // the tokens that are not padding
  real.reserve(static_cast<std::size_t>(segments.valid_tokens()));
  for (std::int64_t t = 0; t < segments.tokens(); ++t) {
    if (segments.valid(t)) {
      real.push_back(t);
    } else {
      std::fill_n(&out.d_v(t, 0), value_dim, A(0));
      out.d_beta[static_cast<std::size_t>(t)] = A(0);
      out.d_g[static_cast<std::size_t>(t)] = A(0);
    }
  }
  const auto count = static_cast<std::int64_t>(real.size());
  if (count == 0) {
    return;
  }
  const auto length = static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(count))));
  const std::int64_t blocks = (count + length - 1) / length;

  // A state a row: before each block, and before each token of one block and after its last.
  detail::Matrix<A> checkpoints(blocks, elements);
  detail::Matrix<A> states(length + 1, elements);
  detail::Matrix<A> residuals(length, value_dim);
  detail::Matrix<A> deltas(length, value_dim);
  const auto as_state = [&](std::span<A> row) {
    return MatrixView<A>(row.data(), key_dim, value_dim);
  };

  MatrixView<A> state = as_state(states.row(0));
  if (!initial_state.is_null()) {
    detail::copy(initial_state, state);
  }
  for (std::int64_t n = 0; n < count; ++n) {
    if (n % length == 0) {
      std::copy_n(state.data(), elements, checkpoints.row(n / length).begin());
    }
    detail::advance(segments, inputs, real[static_cast<std::size_t>(n)], state, residuals.row(0),
                    deltas.row(0));
  }

  detail::Matrix<A> scratch(3, value_dim);
  A* const d_read = scratch.row(0).data();   // do, widened
  A* const d_delta = scratch.row(1).data();  // dd
  A* const d_v = scratch.row(2).data();      // beta dd
  for (std::int64_t block = blocks - 1; block >= 0; --block) {
    const std::int64_t first = block * length;
    const std::int64_t size = std::min(length, count - first);
    std::copy_n(checkpoints.row(block).begin(), elements, states.row(0).begin());
    for (std::int64_t i = 0; i < size; ++i) {
      std::copy_n(states.row(i).begin(), elements, states.row(i + 1).begin());
      detail::advance(segments, inputs, real[static_cast<std::size_t>(first + i)],
                      as_state(states.row(i + 1)), residuals.row(i), deltas.row(i));
    }
    for (std::int64_t i = size - 1; i >= 0; --i) {
      const std::int64_t t = real[static_cast<std::size_t>(first + i)];
      const auto at = static_cast<std::size_t>(t);
      const MatrixView<A> before = as_state(states.row(i));
      const MatrixView<A> after = as_state(states.row(i + 1));
      const A beta = inputs.beta[at];
      const A decay = exp(inputs.g[at]);

      for (std::int64_t j = 0; j < value_dim; ++j) {
        d_read[j] = widen<A>(d_o(t, j));
        d_delta[j] = A(0);
      }
      for (std::int64_t row = 0; row < key_dim; ++row) {
        A* const ds = &d_state(row, 0);
        const A q = inputs.q(t, row);
        const A k = inputs.k(t, row);
        for (std::int64_t j = 0; j < value_dim; ++j) {
          ds[j] += q * d_read[j];
          d_delta[j] += ds[j] * k;
        }
        out.d_q(t, row) += detail::dot<A>(after.row(row), scratch.row(0));
        out.d_k(t, row) += detail::dot<A>(d_state.row(row), deltas.row(i));
      }
      for (std::int64_t j = 0; j < value_dim; ++j) {
        d_v[j] = beta * d_delta[j];
        out.d_v(t, j) = d_v[j];
      }
      out.d_beta[at] = detail::dot<A>(scratch.row(1), residuals.row(i));
      out.d_g[at] = A(0);
      if (segments.starts(t)) {
        // The state before belongs to another document: it is neither read nor given a cotangent.
        detail::fill(d_state, A(0));
        continue;
      }
      A d_decay = A(0);
      for (std::int64_t row = 0; row < key_dim; ++row) {
        A* const ds = &d_state(row, 0);
        const A k = inputs.k(t, row);
        out.d_k(t, row) -= decay * detail::dot<A>(before.row(row), scratch.row(2));
        for (std::int64_t j = 0; j < value_dim; ++j) {
          ds[j] -= k * d_v[j];
        }
        d_decay += detail::dot<A>(d_state.row(row), before.row(row));
        for (std::int64_t j = 0; j < value_dim; ++j) {
          ds[j] *= decay;
        }
      }
      out.d_g[at] = decay * d_decay;
    }
  }
}

}  // namespace heddle::gdn::reference

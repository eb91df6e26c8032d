// The recurrence of one value head over some columns of its state, compiled once for each path inside
// its namespace. S is a vector type: zero, broadcast, load, store, add and fma are all it needs.

/// Vectors of a row that are moved on together. Each sum over rows is two chains, of even and of odd
/// rows, on every path: one alone would wait for its own latency.
inline constexpr int recurrence_vectors = 2;

template <class S>
struct RowSums {
  typename S::Vector chain[2][recurrence_vectors];
};

template <class S>
[[gnu::always_inline]] inline void clear(RowSums<S>& sums) {
#pragma GCC unroll 4
  for (int j = 0; j < recurrence_vectors; ++j) {
    sums.chain[0][j] = S::zero();
    sums.chain[1][j] = S::zero();
  }
}

/// sums += k_i row
template <class S, int parity>
[[gnu::always_inline]] inline void read_row(const typename S::Scalar* row, typename S::Scalar k_i,
                                            RowSums<S>& sums) {
  const typename S::Vector factor = S::broadcast(k_i);
#pragma GCC unroll 4
  for (int j = 0; j < recurrence_vectors; ++j) {
    sums.chain[parity][j] = S::fma(factor, S::load(row + j * S::lanes), sums.chain[parity][j]);
  }
}

/// One token's row numbers: k_i, q_i, and k_i of the next token.
template <class T>
struct RowFactors {
  T k;
  T q;
  T next_k;
};

/// row <- keep row + k_i delta; o += q_i row; r += next k_i row.
template <class S, int parity, bool output, bool next, bool decays>
[[gnu::always_inline]] inline void move_row(typename S::Scalar* row,
                                            const RowFactors<typename S::Scalar>& factors,
                                            typename S::Vector keep,
                                            const typename S::Vector (&delta)[recurrence_vectors],
                                            RowSums<S>& o, RowSums<S>& r) {
  using Vector = typename S::Vector;
  const Vector k_i = S::broadcast(factors.k);
  const Vector q_i = S::broadcast(factors.q);
  const Vector next_k_i = S::broadcast(factors.next_k);
#pragma GCC unroll 4
  for (int j = 0; j < recurrence_vectors; ++j) {
    Vector state = S::load(row + j * S::lanes);
    if (decays) {
      state = S::fma(keep, state, S::zero());
    }
    state = S::fma(k_i, delta[j], state);
    S::store(row + j * S::lanes, state);
    if (output) {
      o.chain[parity][j] = S::fma(q_i, state, o.chain[parity][j]);
    }
    if (next) {
      r.chain[parity][j] = S::fma(next_k_i, state, r.chain[parity][j]);
    }
  }
}

/// One token: the state moves on, o is read from it and, for the next token, r of it: all in one pass.
template <class S, bool output, bool next, bool decays>
[[gnu::always_inline]] inline void move_state(const detail::RecurrenceRun<typename S::Scalar>& run,
                                              std::int64_t t, RowSums<S>& r) {
  using T = typename S::Scalar;
  using Vector = typename S::Vector;
  const detail::RecurrenceGate<T>& gate = run.gates[t];
  const Vector keep = S::broadcast(gate.keep);
  const Vector write = S::broadcast(gate.write);
  const Vector erase = S::broadcast(gate.erase);
  const T* const k = run.k + t * run.qk_stride;
  const T* const q = output ? run.q + t * run.qk_stride : k;
  const T* const next_k = next ? k + run.qk_stride : k;
  Vector delta[recurrence_vectors];
#pragma GCC unroll 4
  for (int j = 0; j < recurrence_vectors; ++j) {
    const Vector v = S::load(run.v + t * run.v_stride + j * S::lanes);
    delta[j] = S::fma(erase, S::add(r.chain[0][j], r.chain[1][j]), S::fma(write, v, S::zero()));
  }
  RowSums<S> o;
  clear<S>(o);
  clear<S>(r);
  T* row = run.state;
  std::int64_t i = 0;
  for (; i + 2 <= run.key_dim; i += 2) {
    move_row<S, 0, output, next, decays>(row, {k[i], q[i], next_k[i]}, keep, delta, o, r);
    row += run.state_stride;
    move_row<S, 1, output, next, decays>(row, {k[i + 1], q[i + 1], next_k[i + 1]}, keep, delta, o,
                                         r);
    row += run.state_stride;
  }
  if (i < run.key_dim) {
    move_row<S, 0, output, next, decays>(row, {k[i], q[i], next_k[i]}, keep, delta, o, r);
  }
  if (output) {
    const Vector scale = S::broadcast(gate.scale);
#pragma GCC unroll 4
    for (int j = 0; j < recurrence_vectors; ++j) {
      S::store(run.o + t * run.o_stride + j * S::lanes,
               S::fma(scale, S::add(o.chain[0][j], o.chain[1][j]), S::zero()));
    }
  }
}

template <class S, bool output, bool next>
[[gnu::always_inline]] inline void move_token(const detail::RecurrenceRun<typename S::Scalar>& run,
                                              std::int64_t t, RowSums<S>& r) {
  if (run.gates[t].keep == 1) {
    move_state<S, output, next, false>(run, t, r);
  } else {
    move_state<S, output, next, true>(run, t, r);
  }
}

template <class S, bool output>
inline void recurrence_columns(const detail::RecurrenceRun<typename S::Scalar>& run) {
  RowSums<S> r;
  clear<S>(r);
  const typename S::Scalar* row = run.state;
  for (std::int64_t i = 0; i < run.key_dim; ++i) {
    if (i % 2 == 0) {
      read_row<S, 0>(row, run.k[i], r);
    } else {
      read_row<S, 1>(row, run.k[i], r);
    }
    row += run.state_stride;
  }
  for (std::int64_t t = 0; t + 1 < run.tokens; ++t) {
    move_token<S, output, true>(run, t, r);
  }
  move_token<S, output, false>(run, run.tokens - 1, r);
}

/// At least one token over a panel of columns.
template <class S>
inline void recurrence_run(const detail::RecurrenceRun<typename S::Scalar>& run) {
  constexpr std::int64_t columns = recurrence_vectors * S::lanes;
  for (std::int64_t c = 0; c < detail::state_panel_columns<typename S::Scalar>; c += columns) {
    detail::RecurrenceRun<typename S::Scalar> part = run;
    part.state += c;
    part.v += c;
    if (run.o != nullptr) {
      part.o += c;
      recurrence_columns<S, true>(part);
    } else {
      recurrence_columns<S, false>(part);
    }
  }
}

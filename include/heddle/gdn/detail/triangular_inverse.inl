// The blocked inverse, compiled once for each path inside its namespace.

/// Rows of a block: as many accumulators as half of the path's registers hold.
inline constexpr int inverse_rows = F32::lanes == 16 || F32::lanes == 4 ? 16 : 8;

/// One vector of a row; of its first `count` elements where it is not whole.
template <class S, bool whole>
[[gnu::always_inline]] inline typename S::Vector load_columns(const typename S::Scalar* p,
                                                              int count) {
  if constexpr (whole) {
    return S::load(p);
  } else {
    typename S::Scalar buffer[S::lanes] = {};
    for (int i = 0; i < count; ++i) {
      buffer[i] = p[i];
    }
    return S::load(buffer);
  }
}

template <class S, bool whole>
[[gnu::always_inline]] inline void store_columns(typename S::Scalar* p, typename S::Vector v,
                                                 int count) {
  if constexpr (whole) {
    S::store(p, v);
  } else {
    typename S::Scalar buffer[S::lanes];
    S::store(buffer, v);
    for (int i = 0; i < count; ++i) {
      p[i] = buffer[i];
    }
  }
}

/// -v, by the operations that both vector types have; the sign of a zero does not matter here.
template <class S>
[[gnu::always_inline]] inline typename S::Vector minus(typename S::Vector v) {
  return S::fma(v, S::broadcast(-1), S::zero());
}

/// Rows [s, s + rows) and one vector of columns from c <= s + rows - 1 on: the rows of I, less the
/// products with the rows above the block, less those inside it, each row of the block subtracted from
/// all below it as soon as it is final. One chain an element, columns of t ascending.
template <class S, int rows, bool whole>
inline void inverse_tile(const typename S::Scalar* t, std::int64_t t_stride, typename S::Scalar* x,
                         std::int64_t x_stride, std::int64_t s, std::int64_t c, int count) {
  using T = typename S::Scalar;
  constexpr int quads = (rows + 3) / 4;
  // Four rows to a pointer: one pointer a row would take all of the registers for addresses.
  const T* quad[quads];
#pragma GCC unroll 16
  for (int q = 0; q < quads; ++q) {
    quad[q] = t + (s + 4 * q) * t_stride;
  }

  typename S::Vector sum[rows];
  T unit[2 * S::lanes] = {};
  unit[S::lanes] = 1;
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    const std::int64_t lane = s + r - c;
    sum[r] = S::load(unit + (lane >= 0 && lane < S::lanes ? S::lanes - lane : 0));
  }

  const T* solved = x + c * x_stride + c;
  for (std::int64_t k = c; k < s; ++k) {
    const typename S::Vector row = minus<S>(load_columns<S, whole>(solved, count));
    solved += x_stride;
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      sum[r] = S::fma(S::broadcast(quad[r / 4][r % 4 * t_stride + k]), row, sum[r]);
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j + 1 < rows; ++j) {
    const typename S::Vector row = minus<S>(sum[j]);
#pragma GCC unroll 16
    for (int r = j + 1; r < rows; ++r) {
      sum[r] = S::fma(S::broadcast(quad[r / 4][r % 4 * t_stride + s + j]), row, sum[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    store_columns<S, whole>(x + (s + r) * x_stride + c, sum[r], count);
  }
}

/// Rows [s, s + rows) of the inverse.
template <class S, int rows>
inline void inverse_block(const typename S::Scalar* t, std::int64_t t_stride, typename S::Scalar* x,
                          std::int64_t x_stride, std::int64_t n, std::int64_t s) {
  std::int64_t c = 0;
  for (; c < s + rows && c + S::lanes <= n; c += S::lanes) {
    inverse_tile<S, rows, true>(t, t_stride, x, x_stride, s, c, S::lanes);
  }
  if (c < s + rows) {
    inverse_tile<S, rows, false>(t, t_stride, x, x_stride, s, c, static_cast<int>(n - c));
    c = n;
  }
  for (; c < n; ++c) {
    for (int r = 0; r < rows; ++r) {
      x[(s + r) * x_stride + c] = 0;
    }
  }
}

/// The inverse of one matrix.
template <class S>
inline void inverse(const typename S::Scalar* t, std::int64_t t_stride, typename S::Scalar* x,
                    std::int64_t x_stride, std::int64_t n) {
  std::int64_t s = 0;
  for (; s + inverse_rows <= n; s += inverse_rows) {
    inverse_block<S, inverse_rows>(t, t_stride, x, x_stride, n, s);
  }
  // What is left over, in blocks of powers of two: a tile cannot have more rows than there are.
  if (inverse_rows > 8 && s + 8 <= n) {
    inverse_block<S, 8>(t, t_stride, x, x_stride, n, s);
    s += 8;
  }
  if (s + 4 <= n) {
    inverse_block<S, 4>(t, t_stride, x, x_stride, n, s);
    s += 4;
  }
  if (s + 2 <= n) {
    inverse_block<S, 2>(t, t_stride, x, x_stride, n, s);
    s += 2;
  }
  if (s < n) {
    inverse_block<S, 1>(t, t_stride, x, x_stride, n, s);
  }
}

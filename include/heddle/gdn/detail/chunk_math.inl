// What the chunked recurrence does between its products, compiled once for each path inside its
// namespace. Templates on a vector type: F32, or one double at a time. Tiles are row-major; a row's
// vectors may reach behind its columns into padding that belongs to it, never into another row.

/// One double as a vector of one lane.
struct OneDouble {
  using Scalar = double;
  using Vector = double;
  using Mask = bool;
  static constexpr int lanes = 1;

  static double zero() { return 0; }
  static double broadcast(double x) { return x; }
  static double load(const double* p) { return *p; }
  static void store(double* p, double x) { *p = x; }
  static double load_first(const double* p, int, double) { return *p; }
  static void store_first(double* p, double x, int) { *p = x; }
  static double add(double a, double b) { return a + b; }
  static double sub(double a, double b) { return a - b; }
  static double mul(double a, double b) {
    double product = a * b;
    // Not to be contracted with a later add on the paths that could.
#if defined(__x86_64__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#else
    asm("" : "+m"(product));
#endif
    return product;
  }
  static double fma(double a, double b, double c) {
    return __builtin_fma(a, b, c);
  }
  static double negated_fma(double a, double b, double c) {
    return __builtin_fma(-a, b, c);
  }
  static double max(double a, double b) {
    return a > b ? a : b;
  }
  static double abs(double a) {
    return __builtin_fabs(a);
  }
  static bool less(double a, double b) {
    return a < b;
  }
  static double select(bool mask, double yes, double no) {
    return mask ? yes : no;
  }
};

inline F32::Vector exponential(F32::Vector x) {
  return exp(x);
}
inline double exponential(double x) {
  return __builtin_exp(x);
}
inline float square_root(float x) {
  return __builtin_sqrtf(x);
}
inline double square_root(double x) {
  return __builtin_sqrt(x);
}

template <class T>
struct LanesOf;
template <>
struct LanesOf<float> {
  using Type = F32;
};
template <>
struct LanesOf<double> {
  using Type = OneDouble;
};
template <class T>
using Lanes = typename LanesOf<T>::Type;

/// 16 partial sums whatever the path, column j into the sum j % 16, folded in halves.
template <class S>
struct RowSum {
  using T = typename S::Scalar;
  static constexpr int vectors = 16 / S::lanes;
  typename S::Vector part[vectors];

  RowSum() {
    for (int v = 0; v < vectors; ++v) {
      part[v] = S::zero();
    }
  }
  T fold() const {
    T values[16];
    for (int v = 0; v < vectors; ++v) {
      S::store(values + v * S::lanes, part[v]);
    }
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) {
        values[i] += values[i + half];
      }
    }
    return values[0];
  }
};

/// How many of the vector at column j exist.
template <class S>
inline int existing(std::int64_t j, std::int64_t columns) {
  return columns - j < S::lanes ? static_cast<int>(columns - j) : S::lanes;
}

template <class S>
inline typename S::Vector load_some(const typename S::Scalar* p, int count) {
  return count == S::lanes ? S::load(p) : S::load_first(p, count, 0);
}
template <class S>
inline void store_some(typename S::Scalar* p, typename S::Vector v, int count) {
  if (count == S::lanes) {
    S::store(p, v);
  } else {
    S::store_first(p, v, count);
  }
}

/// sum_j a[j] b[j].
template <class T>
inline T dot(const T* a, const T* b, std::int64_t columns) {
  using S = Lanes<T>;
  RowSum<S> sum;
  for (std::int64_t j = 0; j < columns; j += 16) {
    for (int v = 0; v < RowSum<S>::vectors; ++v) {
      const std::int64_t at = j + v * S::lanes;
      if (at < columns) {
        const int count = existing<S>(at, columns);
        sum.part[v] = S::fma(load_some<S>(a + at, count), load_some<S>(b + at, count), sum.part[v]);
      }
    }
  }
  return sum.fold();
}

/// <a, b> of two blocks.
template <class T>
inline T block_dot(const T* a, std::int64_t a_stride, const T* b, std::int64_t b_stride,
                   std::int64_t rows, std::int64_t columns) {
  using S = Lanes<T>;
  // Eight rows at a time into one set of partial sums, and these added up in double: no sum is long.
  double total = 0;
  for (std::int64_t first = 0; first < rows; first += 8) {
    RowSum<S> sum;
    const std::int64_t end = first + 8 < rows ? first + 8 : rows;
    for (std::int64_t j = 0; j < columns; j += 16) {
      for (int v = 0; v < RowSum<S>::vectors; ++v) {
        const std::int64_t at = j + v * S::lanes;
        if (at < columns) {
          const int count = existing<S>(at, columns);
          for (std::int64_t i = first; i < end; ++i) {
            sum.part[v] = S::fma(load_some<S>(a + i * a_stride + at, count),
                                 load_some<S>(b + i * b_stride + at, count), sum.part[v]);
          }
        }
      }
    }
    total += static_cast<double>(sum.fold());
  }
  return static_cast<T>(total);
}

/// e^x where x is a sum of log decays: 0 below the cut, where it would be subnormal.
template <class S>
inline typename S::Vector decay_of(typename S::Vector x) {
  constexpr auto cut =
      static_cast<typename S::Scalar>(sizeof(typename S::Scalar) == 4 ? -87 : -708);
  return S::select(S::less(x, S::broadcast(cut)), S::zero(), exponential(x));
}

/// What the gates of a chunk's rows come to. sums[i]: log decay from the last start, or the chunk's
/// first row, to row i; rows before `entering` continue the state, rows from `leaving` on reach the
/// next one.
template <class T>
inline void decays(const double* sums, std::int64_t rows, std::int64_t entering,
                   std::int64_t leaving, T* in, T* out) {
  using S = Lanes<T>;
  const double last = sums[rows - 1];
  for (std::int64_t i = 0; i < rows; i += S::lanes) {
    const int count = existing<S>(i, rows);
    T to_row[S::lanes];
    T from_row[S::lanes];
    for (int l = 0; l < S::lanes; ++l) {
      const bool exists = l < count;
      to_row[l] = static_cast<T>(exists ? sums[i + l] : 0);
      from_row[l] = static_cast<T>(exists ? last - sums[i + l] : 0);
    }
    S::store(to_row, decay_of<S>(S::load(to_row)));
    S::store(from_row, decay_of<S>(S::load(from_row)));
    for (int l = 0; l < count; ++l) {
      in[i + l] = i + l < entering ? to_row[l] : T(0);
      out[i + l] = i + l >= leaving ? from_row[l] : T(0);
    }
  }
}

/// Columns behind row i that a lower triangular tile is zero in: up to the end of its block of rows.
inline std::int64_t triangle_end(std::int64_t i, std::int64_t rows) {
  const std::int64_t end = (i / detail::triangle_block + 1) * detail::triangle_block;
  return end < rows ? end : rows;
}

/// gamma_ij = exp(sums_i - sums_j) for first[i] <= j <= i, else 0; a_ij = beta_i kappa_ij gamma_ij below
/// the diagonal; p_ij = sigma_ij gamma_ij. a and p may be null. All tiles have one stride.
template <class T>
inline void decay_tiles(const double* sums, const std::int32_t* first, const T* beta,
                        std::int64_t rows, std::int64_t stride, const T* kappa, const T* sigma,
                        T* gamma, T* a, T* p) {
  using S = Lanes<T>;
  T column[S::lanes];
  for (int l = 0; l < S::lanes; ++l) {
    column[l] = static_cast<T>(l);
  }
  const auto columns = S::load(column);
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t end = triangle_end(i, rows);
    const auto weight = S::broadcast(beta[i]);
    // j <= i and j < i, on the column numbers, which are exact.
    const auto after_row = S::broadcast(static_cast<T>(i + 1));
    const auto row = S::broadcast(static_cast<T>(i));
    const auto before_first = S::broadcast(static_cast<T>(first[i]));
    for (std::int64_t j = 0; j < end; j += S::lanes) {
      T difference[S::lanes];
      for (int l = 0; l < S::lanes; ++l) {
        // sums has a vector of zeros behind it.
        difference[l] = static_cast<T>(sums[i] - sums[j + l]);
      }
      const auto index = S::add(columns, S::broadcast(static_cast<T>(j)));
      const auto until_row = S::less(index, after_row);
      const auto below = S::less(index, row);
      const auto other = S::less(index, before_first);
      auto decay = S::select(until_row, decay_of<S>(S::load(difference)), S::zero());
      decay = S::select(other, S::zero(), decay);
      const int count = existing<S>(j, end);
      store_some<S>(gamma + i * stride + j, decay, count);
      if (a != nullptr) {
        const auto product =
            S::mul(S::mul(weight, load_some<S>(kappa + i * stride + j, count)), decay);
        store_some<S>(a + i * stride + j, S::select(below, product, S::zero()), count);
      }
      if (p != nullptr) {
        const auto product = S::mul(load_some<S>(sigma + i * stride + j, count), decay);
        store_some<S>(p + i * stride + j, S::select(until_row, product, S::zero()), count);
      }
    }
  }
}

/// y_i = v_i - in_i ks_i for i < entering, else v_i; r_i = beta_i y_i. v may be null: zeros. y may be null.
template <class T>
inline void residual_rows(const T* v, std::int64_t v_stride, const T* ks, std::int64_t ks_stride,
                          const T* in, const T* beta, std::int64_t entering, std::int64_t rows,
                          std::int64_t columns, T* y, T* r, std::int64_t stride) {
  using S = Lanes<T>;
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto decay = S::broadcast(in[i]);
    const auto weight = S::broadcast(beta[i]);
    for (std::int64_t j = 0; j < columns; j += S::lanes) {
      const int count = existing<S>(j, columns);
      auto value = v == nullptr ? S::zero() : load_some<S>(v + i * v_stride + j, count);
      if (i < entering) {
        value = S::negated_fma(decay, load_some<S>(ks + i * ks_stride + j, count), value);
      }
      if (y != nullptr) {
        store_some<S>(y + i * stride + j, value, count);
      }
      store_some<S>(r + i * stride + j, S::mul(weight, value), count);
    }
  }
}

/// to_i = factor_i from_i for rows [begin, end), exactly 0 in the others. to may be from.
template <class T>
inline void scale_rows(const T* from, std::int64_t from_stride, const T* factor, std::int64_t begin,
                       std::int64_t end, std::int64_t rows, std::int64_t columns, T* to,
                       std::int64_t to_stride) {
  using S = Lanes<T>;
  for (std::int64_t i = 0; i < rows; ++i) {
    const bool inside = i >= begin && i < end;
    const auto by = S::broadcast(inside ? factor[i] : T(0));
    for (std::int64_t j = 0; j < columns; j += S::lanes) {
      const int count = existing<S>(j, columns);
      auto value = S::zero();
      if (inside) {
        value = S::mul(by, load_some<S>(from + i * from_stride + j, count));
      }
      store_some<S>(to + i * to_stride + j, value, count);
    }
  }
}

/// x = factor x.
template <class T>
inline void scale_block(T factor, T* x, std::int64_t stride, std::int64_t rows,
                        std::int64_t columns) {
  using S = Lanes<T>;
  const auto by = S::broadcast(factor);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; j += S::lanes) {
      const int count = existing<S>(j, columns);
      store_some<S>(x + i * stride + j, S::mul(by, load_some<S>(x + i * stride + j, count)), count);
    }
  }
}

/// max |x|; NaN does not count.
template <class T>
inline T largest(const T* x, std::int64_t stride, std::int64_t rows, std::int64_t columns) {
  using S = Lanes<T>;
  auto most = S::zero();
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; j += S::lanes) {
      most = S::max(S::abs(load_some<S>(x + i * stride + j, existing<S>(j, columns))), most);
    }
  }
  T values[S::lanes];
  S::store(values, most);
  T result = values[0];
  for (int l = 1; l < S::lanes; ++l) {
    result = values[l] > result ? values[l] : result;
  }
  return result;
}

/// What the cotangents of a chunk's tiles come to, i descending (E: of the log of gamma):
///   d_a = -z_n below the diagonal, d_p = o_n up to it
///   d_kappa_ij += beta_i d_a_ij gamma_ij,  d_sigma_ij += d_p_ij gamma_ij
///   d_beta_i += sum_j d_a_ij kappa_ij gamma_ij
///   d_g_i = sum_{l >= i} sum_{j < i} E_lj,  E = d_a a + d_p p below the diagonal
/// sums: `rows` elements of scratch, and a vector.
template <class T>
inline void tile_cotangents(std::int64_t rows, std::int64_t stride, const T* beta, const T* gamma,
                            const T* kappa, const T* sigma, const T* z_n, const T* o_n, T* d_kappa,
                            T* d_sigma, T* d_beta, T* d_g, T* sums) {
  using S = Lanes<T>;
  T column[S::lanes];
  for (int l = 0; l < S::lanes; ++l) {
    column[l] = static_cast<T>(l);
  }
  const auto columns = S::load(column);
  for (std::int64_t j = 0; j < rows; j += S::lanes) {
    S::store(sums + j, S::zero());
  }
  for (std::int64_t i = rows - 1; i >= 0; --i) {
    const auto weight = S::broadcast(beta[i]);
    const auto after_row = S::broadcast(static_cast<T>(i + 1));
    const auto row = S::broadcast(static_cast<T>(i));
    RowSum<S> of_beta;
    RowSum<S> of_g;
    for (std::int64_t j = 0; j <= i; j += S::lanes) {
      const int count = existing<S>(j, triangle_end(i, rows));
      const std::int64_t at = i * stride + j;
      const auto index = S::add(columns, S::broadcast(static_cast<T>(j)));
      const auto below = S::less(index, row);
      const auto until_row = S::less(index, after_row);
      const auto decay = load_some<S>(gamma + at, count);
      const auto k = load_some<S>(kappa + at, count);
      const auto d_a =
          S::select(below, S::sub(S::zero(), load_some<S>(z_n + at, count)), S::zero());
      const auto d_p = S::select(until_row, load_some<S>(o_n + at, count), S::zero());
      const auto decayed_a = S::mul(d_a, decay);
      const auto decayed_p = S::mul(d_p, decay);
      store_some<S>(d_kappa + at, S::fma(weight, decayed_a, load_some<S>(d_kappa + at, count)),
                    count);
      store_some<S>(d_sigma + at, S::add(decayed_p, load_some<S>(d_sigma + at, count)), count);
      const auto of_a = S::mul(decayed_a, k);
      const int v = static_cast<int>(j % 16) / S::lanes;
      of_beta.part[v] = S::add(of_beta.part[v], of_a);
      // What falls onto the diagonal is never read: rows below are done, and row i reads j < i.
      const auto e = S::fma(weight, of_a, S::mul(decayed_p, load_some<S>(sigma + at, count)));
      const auto sum = S::add(S::load(sums + j), e);
      S::store(sums + j, sum);
      of_g.part[v] = S::add(of_g.part[v], S::select(below, sum, S::zero()));
    }
    d_beta[i] += of_beta.fold();
    d_g[i] = of_g.fold();
  }
}

/// The state's part in the cotangents of q and k, and of the decays between it and the rows:
///   d_q_i += in_i s_o_i,  d_k_i += out_i n_ds_i - beta_i in_i s_z_i
///   a_in_i = in_i q_i . s_o_i,  a_taken_i = beta_i in_i k_i . s_z_i,  a_out_i = out_i k_i . n_ds_i
/// s_z, s_o may be null (no state came in), n_ds too (no cotangent of the one that goes out).
template <class T>
inline void state_cotangents(std::int64_t rows, std::int64_t columns, std::int64_t entering,
                             std::int64_t leaving, const T* in, const T* out, const T* beta,
                             const T* q, const T* k, std::int64_t qk_stride, const T* s_z,
                             const T* s_o, const T* n_ds, std::int64_t stride, T* d_q, T* d_k,
                             std::int64_t d_stride, T* a_in, T* a_taken, T* a_out) {
  using S = Lanes<T>;
  for (std::int64_t i = 0; i < rows; ++i) {
    a_in[i] = T(0);
    a_taken[i] = T(0);
    a_out[i] = T(0);
    if (s_z != nullptr && i < entering) {
      const T written = beta[i] * in[i];
      const auto from_state = S::broadcast(in[i]);
      const auto to_residual = S::broadcast(written);
      for (std::int64_t j = 0; j < columns; j += S::lanes) {
        const int count = existing<S>(j, columns);
        T* const dq = d_q + i * d_stride + j;
        T* const dk = d_k + i * d_stride + j;
        store_some<S>(
            dq,
            S::fma(from_state, load_some<S>(s_o + i * stride + j, count), load_some<S>(dq, count)),
            count);
        store_some<S>(dk,
                      S::negated_fma(to_residual, load_some<S>(s_z + i * stride + j, count),
                                     load_some<S>(dk, count)),
                      count);
      }
      a_in[i] = in[i] * dot(q + i * qk_stride, s_o + i * stride, columns);
      a_taken[i] = written * dot(k + i * qk_stride, s_z + i * stride, columns);
    }
    if (n_ds != nullptr && i >= leaving) {
      const auto to_state = S::broadcast(out[i]);
      for (std::int64_t j = 0; j < columns; j += S::lanes) {
        const int count = existing<S>(j, columns);
        T* const dk = d_k + i * d_stride + j;
        store_some<S>(
            dk,
            S::fma(to_state, load_some<S>(n_ds + i * stride + j, count), load_some<S>(dk, count)),
            count);
      }
      a_out[i] = out[i] * dot(k + i * qk_stride, n_ds + i * stride, columns);
    }
  }
}

/// d_beta_i = z_i . y_i, d_v_i = beta_i z_i.
template <class T>
inline void value_cotangents(std::int64_t rows, std::int64_t columns, const T* beta, const T* z,
                             std::int64_t z_stride, const T* y, std::int64_t y_stride, T* d_v,
                             std::int64_t d_v_stride, T* d_beta) {
  using S = Lanes<T>;
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto weight = S::broadcast(beta[i]);
    for (std::int64_t j = 0; j < columns; j += S::lanes) {
      const int count = existing<S>(j, columns);
      store_some<S>(d_v + i * d_v_stride + j,
                    S::mul(weight, load_some<S>(z + i * z_stride + j, count)), count);
    }
    d_beta[i] = dot(z + i * z_stride, y + i * y_stride, columns);
  }
}

/// 1 / length of a row, as the mode has it; `bounded` where the length entered as eps and not by x.
template <class T>
inline T reciprocal_length(NormMode mode, T eps, T squares, bool& bounded) {
  bounded = false;
  if (mode == NormMode::root) {
    return T(1) / square_root(squares + eps);
  }
  if (mode == NormMode::clamp) {
    const T length = square_root(squares);
    bounded = !(length > eps);
    return T(1) / (bounded ? eps : length);
  }
  bounded = true;
  return T(1);
}

/// y_i = scale x_i / length. y may be x.
template <class T>
inline void normalise_rows(NormMode mode, T eps, T scale, const T* x, std::int64_t x_stride,
                           std::int64_t rows, std::int64_t columns, T* y, std::int64_t y_stride) {
  using S = Lanes<T>;
  const auto by_scale = S::broadcast(scale);
  for (std::int64_t i = 0; i < rows; ++i) {
    const T* const from = x + i * x_stride;
    bool bounded = false;
    const T squares = mode == NormMode::none ? T(0) : dot(from, from, columns);
    const auto rho = S::broadcast(reciprocal_length(mode, eps, squares, bounded));
    for (std::int64_t j = 0; j < columns; j += S::lanes) {
      const int count = existing<S>(j, columns);
      store_some<S>(y + i * y_stride + j,
                    S::mul(by_scale, S::mul(load_some<S>(from + j, count), rho)), count);
    }
  }
}

/// d_i = scale rho (d_i - x_i rho^2 (x_i . d_i)), in place.
template <class T>
inline void normalise_rows_backward(NormMode mode, T eps, T scale, const T* x,
                                    std::int64_t x_stride, std::int64_t rows, std::int64_t columns,
                                    T* d, std::int64_t d_stride) {
  using S = Lanes<T>;
  const auto by_scale = S::broadcast(scale);
  for (std::int64_t i = 0; i < rows; ++i) {
    const T* const from = x + i * x_stride;
    T* const to = d + i * d_stride;
    bool bounded = false;
    const T squares = mode == NormMode::none ? T(0) : dot(from, from, columns);
    const T length = reciprocal_length(mode, eps, squares, bounded);
    const auto rho = S::broadcast(length);
    const T square = length * length;
    const auto along = S::broadcast(bounded ? T(0) : square * dot(from, to, columns));
    for (std::int64_t j = 0; j < columns; j += S::lanes) {
      const int count = existing<S>(j, columns);
      const auto across =
          S::negated_fma(load_some<S>(from + j, count), along, load_some<S>(to + j, count));
      store_some<S>(to + j, S::mul(by_scale, S::mul(rho, across)), count);
    }
  }
}

/// The path's functions.
template <class T>
constexpr detail::ChunkMath<T> make_chunk_math() {
  return {&decays<T>,           &decay_tiles<T>,     &residual_rows<T>,
          &scale_rows<T>,       &scale_block<T>,     &largest<T>,
          &block_dot<T>,        &tile_cotangents<T>, &state_cotangents<T>,
          &value_cotangents<T>, &normalise_rows<T>,  &normalise_rows_backward<T>};
}

template <class T>
inline constexpr detail::ChunkMath<T> chunk_math = make_chunk_math<T>();

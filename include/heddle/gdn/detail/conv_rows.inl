// Rows of the causal convolution, compiled once for each path inside its namespace.

/// A vector of a row, or the `count` floats that are left of it.
template <class X>
[[gnu::always_inline]] inline F32::Vector load_part(const X* p, int count) {
  return count == F32::lanes ? F32::load(p) : F32::load_first(p, count, 0.0F);
}

[[gnu::always_inline]] inline void store_part(float* p, F32::Vector v, int count) {
  if (count == F32::lanes) {
    F32::store(p, v);
  } else {
    F32::store_first(p, v, count);
  }
}

/// What becomes of a window's sum z: z itself, silu(z), or the cotangent of silu(z) times its slope.
/// e^-z may be infinite: then silu is -0 and the slope 0.
template <ConvFinish finish, class X>
[[gnu::always_inline]] inline F32::Vector finished(F32::Vector z, const float* cotangent, int count,
                                                   bool rounded) {
  if constexpr (finish == ConvFinish::none) {
    return z;
  } else {
    const F32::Vector one = F32::broadcast(1.0F);
    const F32::Vector denominator = F32::add(one, exp(F32::negate(z)));
    if constexpr (finish == ConvFinish::silu) {
      const F32::Vector y = F32::div(z, denominator);
      if (!rounded) {
        return y;
      }
      X stored[F32::lanes];
      F32::store(stored, y);
      return F32::load(stored);
    } else {
      const F32::Vector s = F32::div(one, denominator);
      const F32::Vector slope = F32::mul(s, F32::fma(z, F32::sub(one, s), one));
      return F32::mul(load_part(cotangent, count), slope);
    }
  }
}

/// `tokens` neighbouring windows, all of whose slots are rows of x, over one vector of columns.
template <ConvFinish finish, int kernel, int tokens, class X>
[[gnu::always_inline]] inline void conv_vector(const detail::ConvRun<X>& run, const X* x,
                                               const float* in, float* out, std::int64_t c,
                                               int count) {
  const std::int64_t slots = kernel > 0 ? kernel : run.kernel;
  F32::Vector z[tokens];
#pragma GCC unroll 4
  for (int j = 0; j < tokens; ++j) {
    z[j] = run.bias == nullptr ? F32::zero() : load_part(run.bias + c, count);
  }
#pragma GCC unroll 4
  for (std::int64_t w = 0; w < slots; ++w) {
    const F32::Vector tap = load_part(run.taps + w * run.tap_stride + c, count);
#pragma GCC unroll 4
    for (int j = 0; j < tokens; ++j) {
      z[j] = F32::fma(tap, load_part(x + (j + w) * run.x_stride + c, count), z[j]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < tokens; ++j) {
    const float* const cotangent =
        finish == ConvFinish::slope ? in + j * run.in_stride + c : nullptr;
    float* const to = out + j * run.out_stride + c;
    const F32::Vector result = finished<finish, X>(z[j], cotangent, count, run.rounded);
    if (run.streamed) {
      stream(to, result);
    } else {
      store_part(to, result, count);
    }
  }
}

template <ConvFinish finish, int kernel, int tokens, class X>
inline void conv_tokens(const detail::ConvRun<X>& run, std::int64_t first) {
  const X* const x = run.x + first * run.x_stride;
  const float* const in = finish == ConvFinish::slope ? run.in + first * run.in_stride : nullptr;
  float* const out = run.out + first * run.out_stride;
  // The next group's rows, while this one is computed: rows of a wide array lie in pages of their
  // own, which no prefetcher of the processor's crosses.
  const bool more = first + 2 * tokens <= run.tokens;
  std::int64_t c = 0;
  for (; c + F32::lanes <= run.columns; c += F32::lanes) {
    if (more) {
#pragma GCC unroll 4
      for (int j = 0; j < tokens; ++j) {
        __builtin_prefetch(x + (run.kernel - 1 + tokens + j) * run.x_stride + c, 0, 2);
      }
    }
    conv_vector<finish, kernel, tokens>(run, x, in, out, c, F32::lanes);
  }
  if (c < run.columns) {
    conv_vector<finish, kernel, tokens>(run, x, in, out, c, static_cast<int>(run.columns - c));
  }
}

template <ConvFinish finish, int kernel, class X>
inline void conv_run_of_kernel(const detail::ConvRun<X>& run) {
  std::int64_t t = 0;
  for (; t + 4 <= run.tokens; t += 4) {
    conv_tokens<finish, kernel, 4>(run, t);
  }
  for (; t < run.tokens; ++t) {
    conv_tokens<finish, kernel, 1>(run, t);
  }
}

/// Neighbouring windows without a gap.
template <ConvFinish finish, class X>
inline void conv_run(const detail::ConvRun<X>& run) {
  if (run.kernel == 4) {
    conv_run_of_kernel<finish, 4>(run);
  } else {
    conv_run_of_kernel<finish, 0>(run);
  }
}

/// One window, only some of whose slots hold anything.
template <ConvFinish finish, class X>
inline void conv_window(const detail::ConvWindow<X>& window) {
  for (std::int64_t c = 0; c < window.columns; c += F32::lanes) {
    const std::int64_t rest = window.columns - c;
    const int count = rest < F32::lanes ? static_cast<int>(rest) : F32::lanes;
    F32::Vector z = window.bias == nullptr ? F32::zero() : load_part(window.bias + c, count);
    for (int i = 0; i < window.filled; ++i) {
      z = F32::fma(load_part(window.taps[i] + c, count), load_part(window.rows[i] + c, count), z);
    }
    const float* const cotangent = finish == ConvFinish::slope ? window.in + c : nullptr;
    store_part(window.out + c, finished<finish, X>(z, cotangent, count, window.rounded), count);
  }
}

/// sum[w] += dz x[w] and sum[kernel] += dz over neighbouring windows without a gap, tokens ascending.
template <int kernel, int tokens, class X>
inline void sum_tokens(const detail::ConvRun<X>& run, std::int64_t first) {
  const X* const x = run.x + first * run.x_stride;
  const float* const dz = run.in + first * run.in_stride;
  const std::int64_t slots = kernel > 0 ? kernel : run.kernel;
  for (std::int64_t c = 0; c < run.columns; c += F32::lanes) {
    const std::int64_t rest = run.columns - c;
    const int count = rest < F32::lanes ? static_cast<int>(rest) : F32::lanes;
    F32::Vector d[tokens];
    float* const bias = run.out + slots * run.out_stride + c;
    F32::Vector sum = load_part(bias, count);
#pragma GCC unroll 4
    for (int j = 0; j < tokens; ++j) {
      d[j] = load_part(dz + j * run.in_stride + c, count);
      sum = F32::add(sum, d[j]);
    }
    store_part(bias, sum, count);
#pragma GCC unroll 4
    for (std::int64_t w = 0; w < slots; ++w) {
      float* const tap = run.out + w * run.out_stride + c;
      sum = load_part(tap, count);
#pragma GCC unroll 4
      for (int j = 0; j < tokens; ++j) {
        sum = F32::fma(d[j], load_part(x + (j + w) * run.x_stride + c, count), sum);
      }
      store_part(tap, sum, count);
    }
  }
}

template <int kernel, class X>
inline void sum_run_of_kernel(const detail::ConvRun<X>& run) {
  std::int64_t t = 0;
  for (; t + 4 <= run.tokens; t += 4) {
    sum_tokens<kernel, 4>(run, t);
  }
  for (; t < run.tokens; ++t) {
    sum_tokens<kernel, 1>(run, t);
  }
}

template <class X>
inline void sum_run(const detail::ConvRun<X>& run) {
  if (run.kernel == 4) {
    sum_run_of_kernel<4>(run);
  } else {
    sum_run_of_kernel<0>(run);
  }
}

/// to += a b, element by element, or to += a where b is null.
template <class X>
inline void add_product(const float* a, const X* b, float* to, std::int64_t columns) {
  for (std::int64_t c = 0; c < columns; c += F32::lanes) {
    const std::int64_t rest = columns - c;
    const int count = rest < F32::lanes ? static_cast<int>(rest) : F32::lanes;
    const F32::Vector sum = load_part(to + c, count);
    const F32::Vector factor = load_part(a + c, count);
    store_part(
        to + c,
        b == nullptr ? F32::add(sum, factor) : F32::fma(factor, load_part(b + c, count), sum),
        count);
  }
}

// A kernel in the form that simd.hpp describes, for simd_test.cpp.

inline F32::Vector take(const float* p, std::int64_t i, std::int64_t count) {
  return count - i < F32::lanes ? F32::load_first(p + i, static_cast<int>(count - i), 0)
                                : F32::load(p + i);
}

inline void put(float* p, std::int64_t i, std::int64_t count, F32::Vector v) {
  if (count - i < F32::lanes) {
    F32::store_first(p + i, v, static_cast<int>(count - i));
  } else {
    F32::store(p + i, v);
  }
}

inline void every_operation(const float* x, const float* y, std::int64_t count, float* out,
                            bfloat16* rounded) {
  const F32::Vector one = F32::broadcast(1);
  const F32::Vector two = F32::broadcast(2);
  for (std::int64_t i = 0; i < count; i += F32::lanes) {
    const F32::Vector a = take(x, i, count);
    const F32::Vector b = take(y, i, count);
    const F32::Vector half = F32::broadcast(0.5F);
    const F32::Vector results[] = {
        F32::add(a, b),
        F32::sub(a, b),
        F32::mul(a, b),
        F32::div(a, b),
        F32::fma(a, b, half),
        F32::negated_fma(a, b, half),
        F32::max(a, b),
        F32::min(a, b),
        F32::abs(a),
        F32::negate(a),
        F32::select(F32::less(a, b), one, two),
        F32::select(F32::equal(a, b), one, two),
        F32::select(F32::is_nan(a), one, two),
        F32::scale(a, F32::broadcast(3)),
        F32::scale(a, F32::broadcast(-140)),
        F32::mantissa(a),
        F32::exponent(a),
    };
    for (int operation = 0; operation < 17; ++operation) {
      put(out + operation * count, i, count, results[operation]);
    }
    const int rest = static_cast<int>(count - i < F32::lanes ? count - i : F32::lanes);
    if (rest < F32::lanes) {
      F32::store_first(rounded + i, a, rest);
      put(out + 17 * count, i, count, F32::load_first(rounded + i, rest, 0));
    } else {
      F32::store(rounded + i, a);
      put(out + 17 * count, i, count, F32::load(rounded + i));
    }
    put(out + 18 * count, i, count, exp(a));
    put(out + 19 * count, i, count, log(a));
    put(out + 20 * count, i, count, log1p(a));
    put(out + 21 * count, i, count, softplus(a));
    put(out + 22 * count, i, count, sigmoid(a));
    put(out + 23 * count, i, count, silu(a));
  }
}

inline void folds(const float* x, std::int64_t count, float* out) {
  F32::Vector sums[lane_vectors];
  F32::Vector largest[lane_vectors];
  for (int v = 0; v < lane_vectors; ++v) {
    sums[v] = F32::zero();
    largest[v] = F32::broadcast(-__builtin_inff());
  }
  for (std::int64_t i = 0; i < count; i += 16) {
    for (int v = 0; v < lane_vectors; ++v) {
      const std::int64_t first = i + v * F32::lanes;
      if (first < count) {
        const int rest = static_cast<int>(count - first < F32::lanes ? count - first : F32::lanes);
        sums[v] = F32::add(sums[v], F32::load_first(x + first, rest, 0));
        largest[v] = F32::max(largest[v], F32::load_first(x + first, rest, -__builtin_inff()));
      }
    }
  }
  out[0] = fold_sum(sums);
  out[1] = fold_max(largest);
}

/// out[0..): a partial load of x filled with 7; out[16..) and narrow: partial stores; out[32..): the
/// partial load of narrow.
inline int partial(const float* x, int count, float* out, bfloat16* narrow) {
  const int existing = count < F32::lanes ? count : F32::lanes;
  F32::store(out, F32::load_first(x, existing, 7));
  F32::store_first(out + 16, F32::load(x), existing);
  F32::store_first(narrow, F32::load(x), existing);
  F32::store(out + 32, F32::load_first(narrow, existing, 7));
  return F32::lanes;
}

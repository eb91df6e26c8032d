// Rows of the gated linear unit, compiled once for each path inside its namespace.

/// gate * sigmoid(gate) * up.
inline F32::Vector glu_value(F32::Vector gate, F32::Vector up) {
  return F32::mul(F32::mul(gate, sigmoid(gate)), up);
}

template <class From, class To>
inline void glu_row(const From* gate, const From* up, To* activation, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + F32::lanes <= count; i += F32::lanes) {
    F32::store(activation + i, glu_value(F32::load(gate + i), F32::load(up + i)));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    F32::store_first(
        activation + i,
        glu_value(F32::load_first(gate + i, rest, 0), F32::load_first(up + i, rest, 0)), rest);
  }
}

/// What rounds to a zero of either sign becomes +0; NaN passes.
template <class To>
inline F32::Vector without_negative_zero(F32::Vector value) {
  // The smallest magnitude that is stored as something else than 0: half of the smallest bf16 is a tie
  // that goes to 0.
  constexpr float smallest = sizeof(To) == 2 ? 0x1.0002p-134F : 0x1p-149F;
  return F32::select(F32::less(F32::abs(value), F32::broadcast(smallest)), F32::zero(), value);
}

template <class To>
struct GluCotangents {
  F32::Vector d_gate;
  F32::Vector d_up;
};

template <class To>
inline GluCotangents<To> glu_cotangents(F32::Vector gate, F32::Vector up, F32::Vector d) {
  const F32::Vector one = F32::broadcast(1.0F);
  const F32::Vector s = sigmoid(gate);
  const F32::Vector slope = F32::fma(gate, F32::sub(one, s), one);
  return {without_negative_zero<To>(F32::mul(F32::mul(F32::mul(d, up), s), slope)),
          without_negative_zero<To>(F32::mul(F32::mul(d, gate), s))};
}

template <class From, class Cotangent, class To>
inline void glu_backward_row(const From* gate, const From* up, const Cotangent* d_activation,
                             To* d_gate, To* d_up, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + F32::lanes <= count; i += F32::lanes) {
    const GluCotangents<To> d =
        glu_cotangents<To>(F32::load(gate + i), F32::load(up + i), F32::load(d_activation + i));
    F32::store(d_gate + i, d.d_gate);
    F32::store(d_up + i, d.d_up);
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    const GluCotangents<To> d =
        glu_cotangents<To>(F32::load_first(gate + i, rest, 0), F32::load_first(up + i, rest, 0),
                           F32::load_first(d_activation + i, rest, 0));
    F32::store_first(d_gate + i, d.d_gate, rest);
    F32::store_first(d_up + i, d.d_up, rest);
  }
}

/// y = factor * x.
template <class From, class To>
inline void scale_row(float factor, const From* x, To* y, std::int64_t count) {
  const F32::Vector by = F32::broadcast(factor);
  std::int64_t i = 0;
  for (; i + F32::lanes <= count; i += F32::lanes) {
    F32::store(y + i, F32::mul(by, F32::load(x + i)));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    F32::store_first(y + i, F32::mul(by, F32::load_first(x + i, rest, 0)), rest);
  }
}

/// sum_i x[i] * y[i] in 16 lanes.
template <class X, class Y>
inline float dot_row(const X* x, const Y* y, std::int64_t count) {
  F32::Vector sum[lane_vectors];
  for (int v = 0; v < lane_vectors; ++v) {
    sum[v] = F32::zero();
  }
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int v = 0; v < lane_vectors; ++v) {
      const std::int64_t at = i + v * F32::lanes;
      sum[v] = F32::fma(F32::load(x + at), F32::load(y + at), sum[v]);
    }
  }
  for (int v = 0; v < lane_vectors && i + v * F32::lanes < count; ++v) {
    const std::int64_t at = i + v * F32::lanes;
    const int rest = static_cast<int>(count - at < F32::lanes ? count - at : F32::lanes);
    sum[v] = F32::fma(F32::load_first(x + at, rest, 0), F32::load_first(y + at, rest, 0), sum[v]);
  }
  return fold_sum(sum);
}

// The gates of one token, all heads side by side, compiled once for each path inside its namespace.

template <class X>
[[gnu::always_inline]] inline F32::Vector load_heads(const X* p, int count) {
  return count == F32::lanes ? F32::load(p) : F32::load_first(p, count, 0.0F);
}

[[gnu::always_inline]] inline void store_heads(float* p, F32::Vector v, int count) {
  if (count == F32::lanes) {
    F32::store(p, v);
  } else {
    F32::store_first(p, v, count);
  }
}

[[gnu::always_inline]] inline int heads_left(std::int64_t heads, std::int64_t h) {
  return heads - h < F32::lanes ? static_cast<int>(heads - h) : F32::lanes;
}

/// beta = top sigmoid(b)
template <class X>
inline void strengths(const X* b, float top, float* beta, std::int64_t heads) {
  for (std::int64_t h = 0; h < heads; h += F32::lanes) {
    const int count = heads_left(heads, h);
    store_heads(beta + h, F32::mul(F32::broadcast(top), sigmoid(load_heads(b + h, count))), count);
  }
}

/// g = -rate softplus(a + dt_bias)
template <class X>
inline void decays(const X* a, const float* rate, const float* dt_bias, float* g,
                   std::int64_t heads) {
  for (std::int64_t h = 0; h < heads; h += F32::lanes) {
    const int count = heads_left(heads, h);
    const F32::Vector shifted = F32::add(load_heads(a + h, count), load_heads(dt_bias + h, count));
    store_heads(g + h, F32::mul(F32::negate(load_heads(rate + h, count)), softplus(shifted)),
                count);
  }
}

/// d_b = d_beta top sigmoid(b) (1 - sigmoid(b)), in the place of d_beta.
template <class X>
inline void strengths_backward(const X* b, float top, float* d, std::int64_t heads) {
  const F32::Vector one = F32::broadcast(1.0F);
  for (std::int64_t h = 0; h < heads; h += F32::lanes) {
    const int count = heads_left(heads, h);
    const F32::Vector open = sigmoid(load_heads(b + h, count));
    const F32::Vector slope = F32::mul(F32::mul(F32::broadcast(top), open), F32::sub(one, open));
    store_heads(d + h, F32::mul(load_heads(d + h, count), slope), count);
  }
}

/// d_a = -d_g rate sigmoid(a + dt_bias), in the place of d_g; sums of d_g g and of d_a.
template <class X>
inline void decays_backward(const X* a, const float* rate, const float* dt_bias, float* d,
                            float* sum_A_log, float* sum_dt_bias, std::int64_t heads) {
  for (std::int64_t h = 0; h < heads; h += F32::lanes) {
    const int count = heads_left(heads, h);
    const F32::Vector shifted = F32::add(load_heads(a + h, count), load_heads(dt_bias + h, count));
    const F32::Vector d_g = load_heads(d + h, count);
    const F32::Vector scaled = F32::mul(d_g, F32::negate(load_heads(rate + h, count)));
    const F32::Vector d_a = F32::mul(scaled, sigmoid(shifted));
    store_heads(sum_A_log + h,
                F32::fma(scaled, softplus(shifted), load_heads(sum_A_log + h, count)), count);
    store_heads(sum_dt_bias + h, F32::add(load_heads(sum_dt_bias + h, count), d_a), count);
    store_heads(d + h, d_a, count);
  }
}

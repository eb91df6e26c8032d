// Passes over a piece of a row of logits, compiled once for each path inside its namespace, after the
// functions of region/math.inl. Sums run in 16 lanes whatever the path's width, tails are filled with
// what adds nothing: the bits of a result depend on the values and on where the piece begins alone.

/// Below this an exponential is 0, and its product with the difference too; -inf is never multiplied.
inline constexpr float vanishing = -200.0F;

/// Logits as they leave the product become x, in place: rounded to bf16 (kept in `rounded` too, if that
/// is not null) and divided by the temperature (1: not at all). Returns the largest that is not NaN.
inline float prepare(float* z, std::int64_t count, bfloat16* rounded, float divisor) {
  const F32::Vector tau = F32::broadcast(divisor);
  const bool divide = divisor != 1.0F;
  F32::Vector largest[lane_vectors];
  for (int v = 0; v < lane_vectors; ++v) {
    largest[v] = F32::broadcast(-__builtin_inff());
  }
  std::int64_t k = 0;
  int lane = 0;
  for (; k + F32::lanes <= count; k += F32::lanes) {
    F32::Vector x = F32::load(z + k);
    if (rounded != nullptr) {
      F32::store(rounded + k, x);
      x = F32::load(rounded + k);
    }
    if (divide) {
      x = F32::div(x, tau);
    }
    if (divide || rounded != nullptr) {
      F32::store(z + k, x);
    }
    largest[lane] = F32::max(x, largest[lane]);
    lane = lane + 1 == lane_vectors ? 0 : lane + 1;
  }
  if (k < count) {
    const int rest = static_cast<int>(count - k);
    F32::Vector x = F32::load_first(z + k, rest, -__builtin_inff());
    if (rounded != nullptr) {
      F32::store_first(rounded + k, x, rest);
      x = F32::load_first(rounded + k, rest, -__builtin_inff());
    }
    if (divide) {
      x = F32::div(x, tau);
    }
    if (divide || rounded != nullptr) {
      F32::store_first(z + k, x, rest);
    }
    largest[0] = F32::max(x, largest[0]);
  }
  return fold_max(largest);
}

/// sum of e = exp(x - max) and of e (x - max).
inline ExpSums exp_sums(const float* x, std::int64_t count, float max) {
  const F32::Vector m = F32::broadcast(max);
  const F32::Vector floor = F32::broadcast(vanishing);
  F32::Vector s[lane_vectors];
  F32::Vector n[lane_vectors];
  for (int v = 0; v < lane_vectors; ++v) {
    s[v] = F32::zero();
    n[v] = F32::zero();
  }
  std::int64_t k = 0;
  for (; k + 16 <= count; k += 16) {
    for (int v = 0; v < lane_vectors; ++v) {
      const F32::Vector u = F32::max(floor, F32::sub(F32::load(x + k + v * F32::lanes), m));
      const F32::Vector e = exp(u);
      s[v] = F32::add(s[v], e);
      n[v] = F32::fma(e, u, n[v]);
    }
  }
  for (int v = 0; v < lane_vectors && k < count; ++v, k += F32::lanes) {
    const int rest = static_cast<int>(count - k < F32::lanes ? count - k : F32::lanes);
    const F32::Vector u =
        F32::max(floor, F32::sub(F32::load_first(x + k, rest, -__builtin_inff()), m));
    const F32::Vector e = exp(u);
    s[v] = F32::add(s[v], e);
    n[v] = F32::fma(e, u, n[v]);
  }
  return {fold_sum(s), fold_sum(n)};
}

/// d = (e (kappa + lambda (u - mean)) + add) / temperature, u = x - max, e = exp(u), one vector.
inline F32::Vector cotangent_of(F32::Vector x, const CotangentTerms<float>& terms) {
  if (terms.divide_in) {
    x = F32::div(x, F32::broadcast(terms.divisor));
  }
  const F32::Vector u = F32::sub(x, F32::broadcast(terms.max));
  F32::Vector d = exp(u);
  if (terms.entropy) {
    // Selected before the product: 0 * inf is NaN whatever is done to it afterwards.
    const F32::Mask lost = F32::equal(u, F32::broadcast(-__builtin_inff()));
    const F32::Vector finite = F32::select(lost, F32::zero(), u);
    const F32::Vector slope = F32::fma(F32::broadcast(terms.lambda),
                                       F32::sub(finite, F32::broadcast(terms.mean)),
                                       F32::broadcast(terms.kappa));
    d = F32::mul(d, slope);
  } else {
    d = F32::mul(d, F32::broadcast(terms.kappa));
  }
  if (terms.one_hot) {
    d = F32::add(d, F32::broadcast(terms.add));
  }
  if (terms.divisor != 1.0F) {
    d = F32::div(d, F32::broadcast(terms.divisor));
  }
  return d;
}

/// T: float, or bfloat16 that is rounded once, at the end. In place is fine.
template <class T>
inline void cotangent(const T* x, T* d, std::int64_t count, const CotangentTerms<float>& terms) {
  std::int64_t k = 0;
  for (; k + F32::lanes <= count; k += F32::lanes) {
    F32::store(d + k, cotangent_of(F32::load(x + k), terms));
  }
  if (k < count) {
    const int rest = static_cast<int>(count - k);
    F32::store_first(d + k, cotangent_of(F32::load_first(x + k, rest, 0.0F), terms), rest);
  }
}

// Log-softmax and a second softmax, whole rows.

/// l = (x - max) - log_sum; the sum of exp(l) l. With `drop` a product 0 * -inf counts as 0.
inline float log_prob_sum(const float* x, std::int64_t count, float max, float log_sum, bool drop) {
  F32::Vector total[lane_vectors];
  for (int v = 0; v < lane_vectors; ++v) {
    total[v] = F32::zero();
  }
  const F32::Vector lost = F32::broadcast(-__builtin_inff());
  std::int64_t k = 0;
  while (k < count) {
    for (int v = 0; v < lane_vectors && k < count; ++v, k += F32::lanes) {
      const int rest = static_cast<int>(count - k < F32::lanes ? count - k : F32::lanes);
      const F32::Vector value =
          rest == F32::lanes ? F32::load(x + k) : F32::load_first(x + k, rest, 0.0F);
      const F32::Vector l =
          F32::sub(F32::sub(value, F32::broadcast(max)), F32::broadcast(log_sum));
      const F32::Vector p = exp(l);
      F32::Vector term = F32::mul(p, drop ? F32::select(F32::equal(l, lost), F32::zero(), l) : l);
      if (rest < F32::lanes) {
        float kept[16];
        F32::store(kept, F32::zero());
        F32::store_first(kept, term, rest);
        term = F32::load(kept);
      }
      total[v] = F32::add(total[v], term);
    }
  }
  return fold_sum(total);
}

/// The derivative of log-softmax's gather, and with terms.entropy that of -sum exp(l) l, in place:
/// lambda is d_entropy, mean the sum of all d_l, log_sum the row's.
inline F32::Vector local_cotangent_of(F32::Vector x, const CotangentTerms<float>& terms,
                                      float log_sum, bool drop) {
  const F32::Vector u = F32::sub(x, F32::broadcast(terms.max));
  F32::Vector d = F32::mul(exp(u), F32::broadcast(terms.kappa));
  if (terms.entropy) {
    const F32::Vector l = F32::sub(u, F32::broadcast(log_sum));
    const F32::Vector p = exp(l);
    const F32::Vector one = F32::broadcast(1.0F);
    F32::Vector d_l =
        F32::mul(F32::mul(F32::broadcast(-terms.lambda), p), F32::add(l, one));
    if (drop) {
      d_l = F32::select(F32::equal(l, F32::broadcast(-__builtin_inff())), F32::zero(), d_l);
    }
    d = F32::add(d, F32::sub(d_l, F32::mul(p, F32::broadcast(terms.mean))));
  }
  if (terms.one_hot) {
    d = F32::add(d, F32::broadcast(terms.add));
  }
  return terms.divisor != 1.0F ? F32::div(d, F32::broadcast(terms.divisor)) : d;
}

inline void local_cotangent(float* x, std::int64_t count, const CotangentTerms<float>& terms,
                            float log_sum, bool drop) {
  std::int64_t k = 0;
  for (; k + F32::lanes <= count; k += F32::lanes) {
    F32::store(x + k, local_cotangent_of(F32::load(x + k), terms, log_sum, drop));
  }
  if (k < count) {
    const int rest = static_cast<int>(count - k);
    F32::store_first(
        x + k, local_cotangent_of(F32::load_first(x + k, rest, 0.0F), terms, log_sum, drop), rest);
  }
}

// Elementary functions of a vector, compiled once for each path inside its namespace, after F32. Every
// path executes the same roundings in the same order, so their bits agree; sums of products are
// explicit fused multiply-adds for that reason, and F32::mul is never contracted into one.

/// e^x: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial of degree 6 in r (relative error 3.1e-9), and
/// a scaling by 2^n that rounds once, into the subnormals too.
inline F32::Vector exp(F32::Vector x) {
  // Below -104 the result is 0, above 89 infinite. The operand order lets NaN through.
  const F32::Vector bounded = F32::min(F32::broadcast(89.0F), F32::max(F32::broadcast(-104.0F), x));
  // Adding 1.5 * 2^23 leaves an integer in the last bits, rounded to nearest even.
  const F32::Vector shift = F32::broadcast(0x1.8p23F);
  const F32::Vector n = F32::sub(F32::fma(bounded, F32::broadcast(0x1.715476p+0F), shift), shift);
  // ln 2 in two parts; n times the first, and the difference, are exact.
  F32::Vector r = F32::negated_fma(n, F32::broadcast(0x1.62e430p-1F), bounded);
  r = F32::fma(n, F32::broadcast(0x1.05c610p-29F), r);
  F32::Vector p = F32::broadcast(0x1.6a2352p-10F);
  p = F32::fma(p, r, F32::broadcast(0x1.123a6cp-7F));
  p = F32::fma(p, r, F32::broadcast(0x1.5558f4p-5F));
  p = F32::fma(p, r, F32::broadcast(0x1.555490p-3F));
  p = F32::fma(p, r, F32::broadcast(0x1.fffffcp-2F));
  p = F32::fma(p, r, F32::broadcast(1.0F));
  p = F32::fma(p, r, F32::broadcast(1.0F));
  return F32::scale(p, n);
}

/// log(x) + correction for normal x > 0 and a small correction: x = 2^e m with m in [sqrt(1/2),
/// sqrt(2)), and log(1 + f) = f - f^2/2 + f^3 P(f), P of degree 7 (relative error 5.9e-9).
inline F32::Vector log_of_normal(F32::Vector x, F32::Vector e, F32::Vector correction) {
  const F32::Vector f = F32::sub(F32::mantissa(x), F32::broadcast(1.0F));
  const F32::Vector square = F32::mul(f, f);
  F32::Vector p = F32::broadcast(-0x1.38b4fcp-4F);
  p = F32::fma(p, f, F32::broadcast(0x1.056582p-3F));
  p = F32::fma(p, f, F32::broadcast(-0x1.0d8a06p-3F));
  p = F32::fma(p, f, F32::broadcast(0x1.22d918p-3F));
  p = F32::fma(p, f, F32::broadcast(-0x1.5471b6p-3F));
  p = F32::fma(p, f, F32::broadcast(0x1.99a00ep-3F));
  p = F32::fma(p, f, F32::broadcast(-0x1.000228p-2F));
  p = F32::fma(p, f, F32::broadcast(0x1.555554p-2F));
  F32::Vector tail = F32::fma(F32::mul(f, square), p, correction);
  tail = F32::fma(e, F32::broadcast(-0x1.05c610p-29F), tail);
  tail = F32::fma(F32::broadcast(-0.5F), square, tail);
  return F32::fma(e, F32::broadcast(0x1.62e430p-1F), F32::add(f, tail));
}

/// The results of log(x) that no polynomial gives: -inf at 0, NaN below and at NaN, inf at inf.
inline F32::Vector log_at_edges(F32::Vector x, F32::Vector result) {
  const F32::Vector infinity = F32::broadcast(__builtin_inff());
  result = F32::select(F32::less(F32::zero(), x), result, F32::broadcast(__builtin_nanf("")));
  result = F32::select(F32::equal(x, F32::zero()), F32::negate(infinity), result);
  return F32::select(F32::equal(x, infinity), infinity, result);
}

inline F32::Vector log(F32::Vector x) {
  const F32::Mask subnormal = F32::less(x, F32::broadcast(0x1p-126F));
  const F32::Vector normal = F32::select(subnormal, F32::mul(x, F32::broadcast(0x1p23F)), x);
  const F32::Vector e =
      F32::add(F32::exponent(normal), F32::select(subnormal, F32::broadcast(-23.0F), F32::zero()));
  return log_at_edges(x, log_of_normal(normal, e, F32::zero()));
}

/// log(1 + x). With u = 1 + x as rounded, log(1 + x) = log(u) + (1 + x - u) / u to first order.
inline F32::Vector log1p(F32::Vector x) {
  const F32::Vector one = F32::broadcast(1.0F);
  const F32::Vector u = F32::add(one, x);
  // What the rounding of u dropped, exact when taken from the larger of 1 and x.
  const F32::Vector dropped =
      F32::select(F32::less(one, x), F32::sub(one, F32::sub(u, x)), F32::sub(x, F32::sub(u, one)));
  const F32::Vector result =
      log_at_edges(u, log_of_normal(u, F32::exponent(u), F32::div(dropped, u)));
  return F32::select(F32::equal(u, one), x, result);
}

/// log(1 + e^x) = max(x, 0) + log1p(e^-|x|).
inline F32::Vector softplus(F32::Vector x) {
  return F32::add(F32::max(F32::zero(), x), log1p(exp(F32::negate(F32::abs(x)))));
}

/// 1 / (1 + e^-x), from e^-|x| so that nothing overflows.
inline F32::Vector sigmoid(F32::Vector x) {
  const F32::Vector one = F32::broadcast(1.0F);
  const F32::Vector e = exp(F32::negate(F32::abs(x)));
  return F32::div(F32::select(F32::less(x, F32::zero()), e, one), F32::add(one, e));
}

/// x / (1 + e^-x).
inline F32::Vector silu(F32::Vector x) {
  return F32::mul(x, sigmoid(x));
}

// Sums and maxima over a row: 16 lanes on every path, the lane of column j is j % 16, folded in a
// fixed tree. So their bits do not depend on the path's width either.

/// Vectors that hold the 16 lanes of a row's sum.
inline constexpr int lane_vectors = 16 / F32::lanes;

/// ((lane 0 + lane 8) + (lane 4 + lane 12)) + ...: halves, then quarters, eighths, pairs.
inline float fold_sum(const F32::Vector (&lanes)[lane_vectors]) {
  float values[16];
  for (int v = 0; v < lane_vectors; ++v) {
    F32::store(values + v * F32::lanes, lanes[v]);
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      values[i] += values[i + half];
    }
  }
  return values[0];
}

/// The largest lane; NaN counts as less than everything else where it meets a number on the right.
inline float fold_max(const F32::Vector (&lanes)[lane_vectors]) {
  float values[16];
  for (int v = 0; v < lane_vectors; ++v) {
    F32::store(values + v * F32::lanes, lanes[v]);
  }
  float largest = values[0];
  for (int i = 1; i < 16; ++i) {
    largest = values[i] > largest ? values[i] : largest;
  }
  return largest;
}

#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "heddle/core/scalar.hpp"
#include "heddle/core/simd.hpp"

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"
namespace heddle::v4::moe {
#include "heddle/moe/detail/glu.inl"
}  // namespace heddle::v4::moe
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"
namespace heddle::v3::moe {
#include "heddle/moe/detail/glu.inl"
}  // namespace heddle::v3::moe
#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon::moe {
#include "heddle/moe/detail/glu.inl"
}  // namespace heddle::neon::moe

#endif

namespace heddle::portable::moe {
#include "heddle/moe/detail/glu.inl"
}  // namespace heddle::portable::moe

namespace heddle::moe::detail {

/// The rows that a gated linear unit is made of, for stored values of type S and their accumulator.
/// bf16 and f32 at the path's width, whatever else there is (f64, a user's scalar) in a plain loop.
template <Storage S>
inline constexpr bool has_rows = std::is_same_v<S, bfloat16> || std::is_same_v<S, float>;

template <Accumulator A>
[[nodiscard]] A plain_sigmoid(A x) {
  using std::exp;
  // From e^-|x|, so that nothing overflows.
  const A e = exp(x < A(0) ? x : -x);
  return (x < A(0) ? e : A(1)) / (A(1) + e);
}

/// activation = gate * sigmoid(gate) * up. From is S or its accumulator.
template <Storage From, Storage To>
void glu_row(const From* gate, const From* up, To* activation, std::int64_t count) {
  if constexpr (has_rows<From> && has_rows<To>) {
    pick_path(&v4::moe::glu_row<From, To>, &v3::moe::glu_row<From, To>,
              &neon::moe::glu_row<From, To>,
              &portable::moe::glu_row<From, To>)(gate, up, activation, count);
  } else {
    using A = AccumulatorOf<To>;
    for (std::int64_t i = 0; i < count; ++i) {
      const A g = widen<A>(gate[i]);
      activation[i] = narrow<To>(g * plain_sigmoid(g) * widen<A>(up[i]));
    }
  }
}

/// d_gate = d * up * s * (1 + gate * (1 - s)), d_up = d * gate * s, s = sigmoid(gate); no -0.
template <Storage From, Storage Cotangent, Storage To>
void glu_backward_row(const From* gate, const From* up, const Cotangent* d_activation, To* d_gate,
                      To* d_up, std::int64_t count) {
  if constexpr (has_rows<From> && has_rows<Cotangent> && has_rows<To>) {
    pick_path(&v4::moe::glu_backward_row<From, Cotangent, To>,
              &v3::moe::glu_backward_row<From, Cotangent, To>,
              &neon::moe::glu_backward_row<From, Cotangent, To>,
              &portable::moe::glu_backward_row<From, Cotangent, To>)(gate, up, d_activation, d_gate,
                                                                     d_up, count);
  } else {
    using A = AccumulatorOf<To>;
    const auto stored = [](A value) {
      const To rounded = narrow<To>(value);
      return widen<A>(rounded) == A(0) ? narrow<To>(A(0)) : rounded;
    };
    for (std::int64_t i = 0; i < count; ++i) {
      const A g = widen<A>(gate[i]);
      const A u = widen<A>(up[i]);
      const A d = widen<A>(d_activation[i]);
      const A s = plain_sigmoid(g);
      d_gate[i] = stored(d * u * s * (A(1) + g * (A(1) - s)));
      d_up[i] = stored(d * g * s);
    }
  }
}

/// y = factor * x.
template <Storage From, Storage To>
void scale_row(AccumulatorOf<To> factor, const From* x, To* y, std::int64_t count) {
  if constexpr (has_rows<From> && has_rows<To>) {
    pick_path(&v4::moe::scale_row<From, To>, &v3::moe::scale_row<From, To>,
              &neon::moe::scale_row<From, To>,
              &portable::moe::scale_row<From, To>)(factor, x, y, count);
  } else {
    using A = AccumulatorOf<To>;
    for (std::int64_t i = 0; i < count; ++i) {
      y[i] = narrow<To>(factor * widen<A>(x[i]));
    }
  }
}

/// sum_i x[i] * y[i] in 16 interleaved sums, folded in a fixed tree.
template <Accumulator A, Storage X, Storage Y>
[[nodiscard]] A dot_row(const X* x, const Y* y, std::int64_t count) {
  if constexpr (has_rows<X> && has_rows<Y>) {
    return pick_path(&v4::moe::dot_row<X, Y>, &v3::moe::dot_row<X, Y>, &neon::moe::dot_row<X, Y>,
                     &portable::moe::dot_row<X, Y>)(x, y, count);
  } else {
    constexpr std::int64_t lanes = 16;
    A sums[lanes] = {};
    for (std::int64_t i = 0; i < count; ++i) {
      sums[i % lanes] = sums[i % lanes] + widen<A>(x[i]) * widen<A>(y[i]);
    }
    for (std::int64_t half = lanes / 2; half > 0; half /= 2) {
      for (std::int64_t i = 0; i < half; ++i) {
        sums[i] = sums[i] + sums[i + half];
      }
    }
    return sums[0];
  }
}

}  // namespace heddle::moe::detail

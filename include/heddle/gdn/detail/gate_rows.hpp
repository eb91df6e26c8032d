#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "heddle/core/scalar.hpp"
#include "heddle/core/simd.hpp"
#include "heddle/gdn/reference_gates.hpp"

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"
namespace heddle::v4::gdn_gates {
#include "heddle/gdn/detail/gate_rows.inl"
}  // namespace heddle::v4::gdn_gates
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"
namespace heddle::v3::gdn_gates {
#include "heddle/gdn/detail/gate_rows.inl"
}  // namespace heddle::v3::gdn_gates
#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon::gdn_gates {
#include "heddle/gdn/detail/gate_rows.inl"
}  // namespace heddle::neon::gdn_gates

#endif

namespace heddle::portable::gdn_gates {
#include "heddle/gdn/detail/gate_rows.inl"
}  // namespace heddle::portable::gdn_gates

namespace heddle::gdn::detail {

/// The types that the vector kernels are written for; others take the plain loops.
template <class X, class A>
inline constexpr bool gates_have_vectors = std::is_same_v<A, float> &&
                                           (std::is_same_v<X, float> ||
                                            std::is_same_v<X, bfloat16>);

/// beta = top sigmoid(b)
template <class X, class A>
void strengths(const X* b, A top, A* beta, std::int64_t heads) {
  if constexpr (gates_have_vectors<X, A>) {
    pick_path(&v4::gdn_gates::strengths<X>, &v3::gdn_gates::strengths<X>,
              &neon::gdn_gates::strengths<X>,
              &portable::gdn_gates::strengths<X>)(b, top, beta, heads);
  } else {
    for (std::int64_t h = 0; h < heads; ++h) {
      beta[h] = top * reference::sigmoid(widen<A>(b[h]));
    }
  }
}

/// g = -rate softplus(a + dt_bias)
template <class X, class A>
void decays(const X* a, const A* rate, const A* dt_bias, A* g, std::int64_t heads) {
  if constexpr (gates_have_vectors<X, A>) {
    pick_path(&v4::gdn_gates::decays<X>, &v3::gdn_gates::decays<X>, &neon::gdn_gates::decays<X>,
              &portable::gdn_gates::decays<X>)(a, rate, dt_bias, g, heads);
  } else {
    for (std::int64_t h = 0; h < heads; ++h) {
      g[h] = -rate[h] * reference::softplus(widen<A>(a[h]) + dt_bias[h]);
    }
  }
}

/// d: d_beta coming in, d_b going out.
template <class X, class A>
void strengths_backward(const X* b, A top, A* d, std::int64_t heads) {
  if constexpr (gates_have_vectors<X, A>) {
    pick_path(&v4::gdn_gates::strengths_backward<X>, &v3::gdn_gates::strengths_backward<X>,
              &neon::gdn_gates::strengths_backward<X>,
              &portable::gdn_gates::strengths_backward<X>)(b, top, d, heads);
  } else {
    for (std::int64_t h = 0; h < heads; ++h) {
      const A open = reference::sigmoid(widen<A>(b[h]));
      d[h] *= top * open * (A(1) - open);
    }
  }
}

/// d: d_g coming in, d_a going out; its terms of d_A_log and d_dt_bias are added to the sums.
template <class X, class A>
void decays_backward(const X* a, const A* rate, const A* dt_bias, A* d, A* sum_A_log,
                     A* sum_dt_bias, std::int64_t heads) {
  if constexpr (gates_have_vectors<X, A>) {
    pick_path(&v4::gdn_gates::decays_backward<X>, &v3::gdn_gates::decays_backward<X>,
              &neon::gdn_gates::decays_backward<X>, &portable::gdn_gates::decays_backward<X>)(
        a, rate, dt_bias, d, sum_A_log, sum_dt_bias, heads);
  } else {
    for (std::int64_t h = 0; h < heads; ++h) {
      const A shifted = widen<A>(a[h]) + dt_bias[h];
      const A scaled = -d[h] * rate[h];
      sum_A_log[h] += scaled * reference::softplus(shifted);
      d[h] = scaled * reference::sigmoid(shifted);
      sum_dt_bias[h] += d[h];
    }
  }
}

}  // namespace heddle::gdn::detail

#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "heddle/core/scalar.hpp"
#include "heddle/core/simd.hpp"

namespace heddle::gdn {

/// What a convolution makes of a window's sum z.
enum class ConvFinish {
  none,   ///< z
  silu,   ///< z / (1 + e^-z)
  slope,  ///< the given cotangent of silu(z), times its derivative
};

namespace detail {

/// Neighbouring windows all of whose slots are rows of x: window j reads rows j .. j + kernel - 1.
/// What is summed by token goes to out as well, a row a tap and one for the bias.
///
/// X stores x, A is what is computed in
template <class X, class A = AccumulatorOf<X>>
struct ConvRun {
  const X* x = nullptr;  // row of the first window's oldest slot
  std::int64_t x_stride = 0;
  std::int64_t tokens = 0;
  std::int64_t columns = 0;
  std::int64_t kernel = 0;
  const A* taps = nullptr;      // [kernel, columns], oldest slot first
  std::int64_t tap_stride = 0;  // negative where the order of slots is the other one
  const A* bias = nullptr;      // null: none
  const A* in = nullptr;        // cotangents
  std::int64_t in_stride = 0;
  A* out = nullptr;
  std::int64_t out_stride = 0;
  bool rounded = false;  // silu: to X and back
  /// Past the caches: whole vectors, whole cache lines. Others read them after fence_stores().
  bool streamed = false;
};

/// One window by its filled slots.
template <class X, class A = AccumulatorOf<X>>
struct ConvWindow {
  const X* const* rows = nullptr;
  const A* const* taps = nullptr;
  int filled = 0;
  std::int64_t columns = 0;
  const A* bias = nullptr;
  const A* in = nullptr;
  A* out = nullptr;
  bool rounded = false;
};

}  // namespace detail
}  // namespace heddle::gdn

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"
namespace heddle::v4::gdn_conv {
using heddle::gdn::ConvFinish;
namespace detail = heddle::gdn::detail;
inline void stream(float* p, F32::Vector v) {
  _mm512_stream_ps(p, v);
}
#include "heddle/gdn/detail/conv_rows.inl"
}  // namespace heddle::v4::gdn_conv
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"
namespace heddle::v3::gdn_conv {
using heddle::gdn::ConvFinish;
namespace detail = heddle::gdn::detail;
inline void stream(float* p, F32::Vector v) {
  _mm256_stream_ps(p, v);
}
#include "heddle/gdn/detail/conv_rows.inl"
}  // namespace heddle::v3::gdn_conv
#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon::gdn_conv {
using heddle::gdn::ConvFinish;
namespace detail = heddle::gdn::detail;
inline void stream(float* p, F32::Vector v) {
  F32::store(p, v);
}
#include "heddle/gdn/detail/conv_rows.inl"
}  // namespace heddle::neon::gdn_conv

#endif

namespace heddle::portable::gdn_conv {
using heddle::gdn::ConvFinish;
namespace detail = heddle::gdn::detail;
inline void stream(float* p, F32::Vector v) {
  F32::store(p, v);
}
#include "heddle/gdn/detail/conv_rows.inl"
}  // namespace heddle::portable::gdn_conv

namespace heddle::gdn::detail {

/// The types that the vector kernels are written for; others take the plain loops.
template <class X, class A>
inline constexpr bool conv_has_vectors = std::is_same_v<A, float> &&
                                         (std::is_same_v<X, float> || std::is_same_v<X, bfloat16>);

template <ConvFinish finish, class X, class A>
[[nodiscard]] A finished(A z, const A* cotangent, bool rounded) {
  if constexpr (finish == ConvFinish::none) {
    return z;
  } else {
    using std::exp;
    const A denominator = A(1) + exp(-z);
    if constexpr (finish == ConvFinish::silu) {
      return rounded ? widen<A>(narrow<X>(z / denominator)) : z / denominator;
    } else {
      const A s = A(1) / denominator;
      return *cotangent * (s * (A(1) + z * (A(1) - s)));
    }
  }
}

template <ConvFinish finish, class X, class A>
void conv_window(const ConvWindow<X, A>& window) {
  if constexpr (conv_has_vectors<X, A>) {
    pick_path(&v4::gdn_conv::conv_window<finish, X>, &v3::gdn_conv::conv_window<finish, X>,
              &neon::gdn_conv::conv_window<finish, X>,
              &portable::gdn_conv::conv_window<finish, X>)(window);
  } else {
    for (std::int64_t c = 0; c < window.columns; ++c) {
      A z = window.bias == nullptr ? A(0) : window.bias[c];
      for (int i = 0; i < window.filled; ++i) {
        z += window.taps[i][c] * widen<A>(window.rows[i][c]);
      }
      window.out[c] = finished<finish, X, A>(
          z, finish == ConvFinish::slope ? window.in + c : nullptr, window.rounded);
    }
  }
}

template <ConvFinish finish, class X, class A>
void conv_run(const ConvRun<X, A>& run) {
  if constexpr (conv_has_vectors<X, A>) {
    pick_path(&v4::gdn_conv::conv_run<finish, X>, &v3::gdn_conv::conv_run<finish, X>,
              &neon::gdn_conv::conv_run<finish, X>, &portable::gdn_conv::conv_run<finish, X>)(run);
  } else {
    for (std::int64_t t = 0; t < run.tokens; ++t) {
      for (std::int64_t c = 0; c < run.columns; ++c) {
        A z = run.bias == nullptr ? A(0) : run.bias[c];
        for (std::int64_t w = 0; w < run.kernel; ++w) {
          z += run.taps[w * run.tap_stride + c] * widen<A>(run.x[(t + w) * run.x_stride + c]);
        }
        run.out[t * run.out_stride + c] = finished<finish, X, A>(
            z, finish == ConvFinish::slope ? run.in + t * run.in_stride + c : nullptr, run.rounded);
      }
    }
  }
}

/// out[w] += in x[w], out[kernel] += in, over the run's tokens.
template <class X, class A>
void sum_run(const ConvRun<X, A>& run) {
  if constexpr (conv_has_vectors<X, A>) {
    pick_path(&v4::gdn_conv::sum_run<X>, &v3::gdn_conv::sum_run<X>, &neon::gdn_conv::sum_run<X>,
              &portable::gdn_conv::sum_run<X>)(run);
  } else {
    for (std::int64_t t = 0; t < run.tokens; ++t) {
      for (std::int64_t c = 0; c < run.columns; ++c) {
        const A dz = run.in[t * run.in_stride + c];
        for (std::int64_t w = 0; w < run.kernel; ++w) {
          run.out[w * run.out_stride + c] += dz * widen<A>(run.x[(t + w) * run.x_stride + c]);
        }
        run.out[run.kernel * run.out_stride + c] += dz;
      }
    }
  }
}

/// to += a b, or to += a where b is null.
template <class X, class A>
void add_product(const A* a, const X* b, A* to, std::int64_t columns) {
  if constexpr (conv_has_vectors<X, A>) {
    pick_path(&v4::gdn_conv::add_product<X>, &v3::gdn_conv::add_product<X>,
              &neon::gdn_conv::add_product<X>,
              &portable::gdn_conv::add_product<X>)(a, b, to, columns);
  } else {
    for (std::int64_t c = 0; c < columns; ++c) {
      to[c] += b == nullptr ? a[c] : a[c] * widen<A>(b[c]);
    }
  }
}

}  // namespace heddle::gdn::detail

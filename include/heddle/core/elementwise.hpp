#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/simd.hpp"
#include "heddle/core/view.hpp"

namespace heddle {

enum class Elementwise {
  exp,
  log,
  log1p,
  softplus,  ///< log(1 + e^x)
  sigmoid,   ///< 1 / (1 + e^-x)
  silu,      ///< x / (1 + e^-x)
};

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"
namespace v4::elementwise {
#include "heddle/core/detail/elementwise.inl"
}  // namespace v4::elementwise
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"
namespace v3::elementwise {
#include "heddle/core/detail/elementwise.inl"
}  // namespace v3::elementwise
#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace neon::elementwise {
#include "heddle/core/detail/elementwise.inl"
}  // namespace neon::elementwise

#endif

namespace portable::elementwise {
#include "heddle/core/detail/elementwise.inl"
}  // namespace portable::elementwise

namespace detail {

template <Elementwise function>
void transform_values(std::span<const float> x, std::span<float> y) {
  pick_path(&v4::elementwise::transform<function>, &v3::elementwise::transform<function>,
            &neon::elementwise::transform<function>, &portable::elementwise::transform<function>)(
      x.data(), y.data(), static_cast<std::int64_t>(x.size()));
}

template <Elementwise function>
void transform_values(std::span<const double> x, std::span<double> y) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    if constexpr (function == Elementwise::exp) {
      y[i] = std::exp(x[i]);
    } else if constexpr (function == Elementwise::log) {
      y[i] = std::log(x[i]);
    } else if constexpr (function == Elementwise::log1p) {
      y[i] = std::log1p(x[i]);
    } else if constexpr (function == Elementwise::softplus) {
      y[i] = (x[i] < 0 ? 0 : x[i]) + std::log1p(std::exp(-std::abs(x[i])));
    } else {
      const double e = std::exp(-std::abs(x[i]));
      const double sigmoid = (x[i] < 0 ? e : 1) / (1 + e);
      y[i] = function == Elementwise::silu ? x[i] * sigmoid : sigmoid;
    }
  }
}

template <class From, class To>
void convert_values(const From* from, To* to, std::int64_t count) {
  pick_path(&v4::elementwise::convert<From, To>, &v3::elementwise::convert<From, To>,
            &neon::elementwise::convert<From, To>,
            &portable::elementwise::convert<From, To>)(from, to, count);
}

}  // namespace detail

/// y[i] = function(x[i]).
///
/// shapes    y as long as x
/// dtypes    f32: own functions; f64: the standard library's
/// writes    all of y
/// alias     y may be x itself, else disjoint from it
/// specials  exp: -inf gives +0, large x inf. log: 0 gives -inf, x < 0 NaN. log1p: the same at -1.
///           silu(-inf) is NaN. NaN stays NaN everywhere
/// order     f32: the bits of y[i] depend on x[i] alone, on no path, compiler, position or length
/// accuracy  f32, in units of the last place against the exact value: exp, log and log1p 1, subnormal
///           arguments and results included; softplus 2, sigmoid 2.5, silu 3 (elementwise_test.cpp)
/// throws    Error for y.size != x.size
/// source    Cody and Waite's reductions; minimax polynomials fitted for this library
template <class T>
void transform(Elementwise function, std::span<const T> x, std::span<T> y) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>,
                "heddle::transform: the values must be float or double");
  require_length("transform", "y", y, "x.size", static_cast<std::int64_t>(x.size()));
  switch (function) {
    case Elementwise::exp:
      return detail::transform_values<Elementwise::exp>(x, y);
    case Elementwise::log:
      return detail::transform_values<Elementwise::log>(x, y);
    case Elementwise::log1p:
      return detail::transform_values<Elementwise::log1p>(x, y);
    case Elementwise::softplus:
      return detail::transform_values<Elementwise::softplus>(x, y);
    case Elementwise::sigmoid:
      return detail::transform_values<Elementwise::sigmoid>(x, y);
    case Elementwise::silu:
      return detail::transform_values<Elementwise::silu>(x, y);
  }
  fail("transform", "function", function, "must be exp, log, log1p, softplus, sigmoid or silu");
}

/// transform(function, values, values).
template <class T>
void transform_in_place(Elementwise function, std::span<T> values) {
  transform(function, std::span<const T>(values), values);
}

/// Stored values in the type they are computed in, and back: exact one way, one rounding to nearest
/// even the other, NaN stays NaN.
///
/// shapes    to as long as from
/// dtypes    bf16 to f32, f32 to bf16
/// writes    all of to
/// alias     disjoint
/// order     the bits of narrow<bfloat16> on every path
/// throws    Error for to.size != from.size
inline void convert(std::span<const bfloat16> from, std::span<float> to) {
  require_length("convert", "to", to, "from.size", static_cast<std::int64_t>(from.size()));
  detail::convert_values(from.data(), to.data(), static_cast<std::int64_t>(from.size()));
}
inline void convert(std::span<const float> from, std::span<bfloat16> to) {
  require_length("convert", "to", to, "from.size", static_cast<std::int64_t>(from.size()));
  detail::convert_values(from.data(), to.data(), static_cast<std::int64_t>(from.size()));
}

}  // namespace heddle

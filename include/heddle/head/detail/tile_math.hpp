#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

#include "heddle/core/elementwise.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/simd.hpp"
#include "heddle/head/options.hpp"

namespace heddle::head::detail {

/// What a cotangent of logits is made of, one row's.
template <Accumulator A>
struct CotangentTerms {
  A max = A(0);
  A kappa = A(0);   ///< -d_logp / exp_sum
  A lambda = A(0);  ///< -d_entropy / exp_sum; d_entropy itself for log-softmax's own derivative
  A mean = A(0);
  A divisor = A(1);        ///< the temperature; 1: none
  A add = A(0);            ///< d_logp, where one_hot
  bool divide_in = false;  ///< what is given are logits and not yet divided
  bool entropy = false;
  bool one_hot = false;
};

struct ExpSums {
  float exp_sum;
  float weighted_sum;
};

}  // namespace heddle::head::detail

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"
namespace heddle::v4::head {
using heddle::head::detail::CotangentTerms;
using heddle::head::detail::ExpSums;
#include "heddle/head/detail/tile_math.inl"
}  // namespace heddle::v4::head
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"
namespace heddle::v3::head {
using heddle::head::detail::CotangentTerms;
using heddle::head::detail::ExpSums;
#include "heddle/head/detail/tile_math.inl"
}  // namespace heddle::v3::head
#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon::head {
using heddle::head::detail::CotangentTerms;
using heddle::head::detail::ExpSums;
#include "heddle/head/detail/tile_math.inl"
}  // namespace heddle::neon::head

#endif

namespace heddle::portable::head {
using heddle::head::detail::CotangentTerms;
using heddle::head::detail::ExpSums;
#include "heddle/head/detail/tile_math.inl"
}  // namespace heddle::portable::head

namespace heddle::head::detail {

/// What sums over the vocabulary are formed in: in float they would lose up to hundreds of ulps.
template <Accumulator A>
using StatsSum = std::conditional_t<std::is_same_v<A, float>, double, A>;

template <Accumulator A>
inline constexpr A infinity = std::numeric_limits<A>::infinity();
template <Accumulator A>
inline constexpr A quiet_nan = std::numeric_limits<A>::quiet_NaN();

/// Columns whose float sums are formed in float: beyond, rounding would show.
inline constexpr std::int64_t float_sum_columns = 1024;

/// How the cotangents of logits are kept between their making and the products: rounded ones as they
/// are rounded, so that bf16 factors meet in bf16 products.
template <Accumulator A, LogitsDtype dtype>
using CotangentStorage =
    std::conditional_t<std::is_same_v<A, float> && dtype == LogitsDtype::bf16, bfloat16, A>;

/// The passes of tile_math.inl, for any accumulator: the definition, element by element.
template <Accumulator A>
struct TileMath {
  struct Sums {
    A exp_sum;
    A weighted_sum;
  };

  static A prepare(A* z, std::int64_t count, LogitsDtype dtype, bfloat16* /*of float alone*/,
                   A divisor) {
    A largest = -infinity<A>;
    for (std::int64_t k = 0; k < count; ++k) {
      if (dtype == LogitsDtype::bf16) {
        z[k] = widen<A>(narrow<bfloat16>(z[k]));
      }
      if (divisor != A(1)) {
        z[k] = z[k] / divisor;
      }
      largest = z[k] > largest ? z[k] : largest;
    }
    return largest;
  }

  static Sums exp_sums(const A* x, std::int64_t count, A max) {
    using std::exp;
    Sums sums{A(0), A(0)};
    for (std::int64_t k = 0; k < count; ++k) {
      const A u = x[k] - max;
      const A e = exp(u);
      sums.exp_sum += e;
      sums.weighted_sum += u == -infinity<A> ? A(0) : e * u;
    }
    return sums;
  }

  static void cotangent(const A* x, A* d, std::int64_t count, LogitsDtype dtype,
                        const CotangentTerms<A>& terms) {
    using std::exp;
    for (std::int64_t k = 0; k < count; ++k) {
      const A u = (terms.divide_in ? x[k] / terms.divisor : x[k]) - terms.max;
      A value = exp(u);
      if (terms.entropy) {
        const A finite = u == -infinity<A> ? A(0) : u;
        value = value * (terms.kappa + terms.lambda * (finite - terms.mean));
      } else {
        value = value * terms.kappa;
      }
      d[k] = finished(value, dtype, terms);
    }
  }

  static A log_prob_sum(const A* x, std::int64_t count, A max, A log_sum, bool drop) {
    using std::exp;
    A total(0);
    for (std::int64_t k = 0; k < count; ++k) {
      const A l = (x[k] - max) - log_sum;
      const A p = exp(l);
      total += drop && l == -infinity<A> ? A(0) : p * l;
    }
    return total;
  }

  static void local_cotangent(A* x, std::int64_t count, LogitsDtype dtype,
                              const CotangentTerms<A>& terms, A log_sum, bool drop) {
    using std::exp;
    for (std::int64_t k = 0; k < count; ++k) {
      const A u = x[k] - terms.max;
      A value = exp(u) * terms.kappa;
      if (terms.entropy) {
        const A l = u - log_sum;
        const A p = exp(l);
        const A d_l = drop && l == -infinity<A> ? A(0) : -terms.lambda * p * (l + A(1));
        value += d_l - p * terms.mean;
      }
      x[k] = finished(value, dtype, terms);
    }
  }

 private:
  static A finished(A value, LogitsDtype dtype, const CotangentTerms<A>& terms) {
    if (terms.one_hot) {
      value += terms.add;
    }
    if (terms.divisor != A(1)) {
      value = value / terms.divisor;
    }
    return dtype == LogitsDtype::bf16 ? widen<A>(narrow<bfloat16>(value)) : value;
  }
};

/// In float: the current path's.
template <>
struct TileMath<float> {
  using Sums = ExpSums;

  /// `rounded`, where it is not null, gets the logits before the temperature: LogitsDtype::bf16 alone.
  static float prepare(float* z, std::int64_t count, LogitsDtype dtype, bfloat16* rounded,
                       float divisor) {
    const auto pass = pick_path(&v4::head::prepare, &v3::head::prepare, &neon::head::prepare,
                                &portable::head::prepare);
    if (dtype != LogitsDtype::bf16 || rounded != nullptr) {
      return pass(z, count, rounded, divisor);
    }
    bfloat16 scratch[float_sum_columns];
    float largest = -infinity<float>;
    for (std::int64_t k = 0; k < count; k += float_sum_columns) {
      largest =
          std::max(largest, pass(z + k, std::min(float_sum_columns, count - k), scratch, divisor));
    }
    return largest;
  }

  static Sums exp_sums(const float* x, std::int64_t count, float max) {
    return pick_path(&v4::head::exp_sums, &v3::head::exp_sums, &neon::head::exp_sums,
                     &portable::head::exp_sums)(x, count, max);
  }

  template <class T>
  static void cotangent(const T* x, T* d, std::int64_t count, LogitsDtype /*T says it*/,
                        const CotangentTerms<float>& terms) {
    pick_path(&v4::head::cotangent<T>, &v3::head::cotangent<T>, &neon::head::cotangent<T>,
              &portable::head::cotangent<T>)(x, d, count, terms);
  }

  static float log_prob_sum(const float* x, std::int64_t count, float max, float log_sum,
                            bool drop) {
    return pick_path(&v4::head::log_prob_sum, &v3::head::log_prob_sum, &neon::head::log_prob_sum,
                     &portable::head::log_prob_sum)(x, count, max, log_sum, drop);
  }

  static void local_cotangent(float* x, std::int64_t count, LogitsDtype dtype,
                              const CotangentTerms<float>& terms, float log_sum, bool drop) {
    pick_path(&v4::head::local_cotangent, &v3::head::local_cotangent, &neon::head::local_cotangent,
              &portable::head::local_cotangent)(x, count, terms, log_sum, drop);
    if (dtype == LogitsDtype::bf16) {
      bfloat16 scratch[float_sum_columns];
      for (std::int64_t k = 0; k < count; k += float_sum_columns) {
        const auto n = static_cast<std::size_t>(std::min(float_sum_columns, count - k));
        convert(std::span<const float>(x + k, n), std::span<bfloat16>(scratch, n));
        convert(std::span<const bfloat16>(scratch, n), std::span<float>(x + k, n));
      }
    }
  }
};

}  // namespace heddle::head::detail

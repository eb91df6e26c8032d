#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>

#include "heddle/core/scalar.hpp"

namespace heddle::numerics {

/// The floating types whose values lie in ulps of one another.
template <class T>
concept IeeeFloat = std::same_as<T, double> || std::same_as<T, float> || std::same_as<T, bfloat16>;

namespace detail {

template <IeeeFloat T>
struct UlpTraits;

template <>
struct UlpTraits<double> {
  using Bits = std::uint64_t;
  static constexpr int fraction_bits = 52;
  static constexpr int smallest_exponent = -1022;
};
template <>
struct UlpTraits<float> {
  using Bits = std::uint32_t;
  static constexpr int fraction_bits = 23;
  static constexpr int smallest_exponent = -126;
};
template <>
struct UlpTraits<bfloat16> {
  using Bits = std::uint16_t;
  static constexpr int fraction_bits = 7;
  static constexpr int smallest_exponent = -126;
};

/// An integer that orders as the floats do, both zeros in one place.
template <IeeeFloat T>
[[nodiscard]] std::int64_t ordered_bits(T value) {
  using Bits = typename UlpTraits<T>::Bits;
  const auto bits = std::bit_cast<Bits>(value);
  constexpr auto sign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  const auto magnitude = static_cast<std::int64_t>(bits & static_cast<Bits>(~sign));
  return (bits & sign) != 0 ? -magnitude : magnitude;
}

}  // namespace detail

/// How many representable values lie between two: 0 of equal ones, 1 of neighbours.
///
/// specials  -0 is 0; an infinity is the neighbour of the largest finite value; NaN is 2^64 - 1 from
///           everything, itself included, so that a largest distance never passes over it
template <IeeeFloat T>
[[nodiscard]] std::uint64_t ulp_distance(T a, T b) {
  if (std::isnan(static_cast<double>(a)) || std::isnan(static_cast<double>(b))) {
    return std::numeric_limits<std::uint64_t>::max();
  }
  // Of doubles of opposite sign the difference may not fit I64, but it fits U64.
  const std::int64_t x = detail::ordered_bits(a);
  const std::int64_t y = detail::ordered_bits(b);
  return static_cast<std::uint64_t>(std::max(x, y)) - static_cast<std::uint64_t>(std::min(x, y));
}

/// The distance from |value| to the next larger value of T: the unit in which an error next to it is
/// told. `value` need not be representable in T.
///
/// specials  0 and subnormals: the smallest subnormal; NaN of what is not finite
template <IeeeFloat T>
[[nodiscard]] double ulp_of(double value) {
  using Traits = detail::UlpTraits<T>;
  if (!std::isfinite(value)) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const int exponent = value == 0 ? Traits::smallest_exponent : std::ilogb(value);
  return std::ldexp(1.0, std::max(exponent, Traits::smallest_exponent) - Traits::fraction_bits);
}

}  // namespace heddle::numerics

#pragma once

#include <concepts>

#include <Eigen/Core>

#ifdef __FAST_MATH__
#error \
    "heddle needs IEEE semantics (masks, -inf, NaN and signed zeros): compile without -ffast-math"
#endif

namespace heddle {

/// The 16-bit float of activations and weights: 8 exponent bits, 7 stored fraction bits.
using bfloat16 = Eigen::bfloat16;

/// Which accumulator a storage type is summed in. A user's scalar (a counting one, say) takes part
/// in the kernels by specialising this.
template <class T>
struct ScalarTraits;

template <>
struct ScalarTraits<bfloat16> {
  using Accumulator = float;
};
template <>
struct ScalarTraits<float> {
  using Accumulator = float;
};
template <>
struct ScalarTraits<double> {
  using Accumulator = double;
};

/// A type that arrays are stored in: bfloat16, float, double, or one with its own ScalarTraits.
template <class T>
concept Storage = requires {
  typename ScalarTraits<T>::Accumulator;
};

/// A type that sums are formed in: a storage type that is its own accumulator.
template <class T>
concept Accumulator = Storage<T> && std::same_as<typename ScalarTraits<T>::Accumulator, T>;

template <Storage T>
using AccumulatorOf = typename ScalarTraits<T>::Accumulator;

/// A stored value in the type it is computed in. Widening is exact.
template <Accumulator A, Storage S>
[[nodiscard]] constexpr A widen(S value) {
  return static_cast<A>(value);
}

/// A computed value in the type it is stored in: one rounding, to nearest even, NaN stays NaN.
template <Storage S, Accumulator A>
[[nodiscard]] constexpr S narrow(A value) {
  if constexpr (std::same_as<S, A>) {
    return value;
  } else if constexpr (std::same_as<S, bfloat16>) {
    return bfloat16(static_cast<float>(value));
  } else {
    return static_cast<S>(value);
  }
}

}  // namespace heddle

#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <span>
#include <type_traits>

#include <Eigen/Core>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/detail/fold_step.hpp"
#include "heddle/mesh/detail/stream.hpp"

// Folds promise bits. Clang says of -fassociative-math alone nothing that could be read here.
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__NO_SIGNED_ZEROS__) || \
    (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "heddle folds in rank order and keeps NaN and -0: compile without -ffast-math and its parts"
#endif

namespace heddle {

/// A type whose values can be folded over devices: integers (sums wrap), float, double, and the types
/// that are stored narrower than they are summed.
template <class T>
concept Foldable =
    (std::integral<T> && !std::same_as<T, bool>) || Storage<T> || std::same_as<T, Eigen::half>;

namespace detail {

template <class T>
struct FoldTraits {
  using Accumulator = T;
};
template <class T>
requires Storage<T>
struct FoldTraits<T> {
  using Accumulator = AccumulatorOf<T>;
};
template <>
struct FoldTraits<Eigen::half> {
  using Accumulator = float;
};

}  // namespace detail

/// What a fold of T sums in unless the caller asks for more: float for bf16 and f16, else T itself.
template <Foldable T>
using FoldAccumulator = typename detail::FoldTraits<T>::Accumulator;

namespace detail {

/// One step of a sum. A NaN that is already there stays as it is, so that of several the first in rank
/// order survives; hardware would keep whichever operand the compiler happened to put first.
template <class A>
[[nodiscard]] constexpr A add(A sum, A value) {
  if constexpr (std::integral<A>) {
    using Unsigned = std::make_unsigned_t<A>;
    return static_cast<A>(
        static_cast<Unsigned>(static_cast<Unsigned>(sum) + static_cast<Unsigned>(value)));
  } else {
    const A next = sum + value;
    return sum == sum ? next : sum;
  }
}

template <class T>
[[nodiscard]] constexpr auto comparable(T value) {
  if constexpr (std::integral<T> || std::floating_point<T>) {
    return value;
  } else {
    return static_cast<FoldAccumulator<T>>(value);
  }
}

/// IEEE 754-2019 maximum or minimum of stored values: the first NaN wins with its payload, +0 is above
/// -0. Selects, never computes, so nothing is rounded.
template <Reduce reduce, class T>
[[nodiscard]] T select(T first, T second) {
  const auto a = comparable(first);
  const auto b = comparable(second);
  if constexpr (!std::integral<T>) {
    if (a != a) {
      return first;
    }
    if (b != b) {
      return second;
    }
    if (a == b) {
      using std::signbit;
      const bool first_is_negative = signbit(a);
      return (reduce == Reduce::max) == first_is_negative ? second : first;
    }
  }
  return (reduce == Reduce::max ? a < b : b < a) ? second : first;
}

// The running values of a block stay in the first-level cache while the inputs stream past.
inline constexpr std::int64_t fold_block = 4096;

/// True where a sum of T in A has a step of its own for every path.
template <class A, class T>
inline constexpr bool has_fold_step = std::is_same_v<A, float> &&
                                      (std::is_same_v<T, float> || std::is_same_v<T, bfloat16>);

template <class A, class T>
void add_block(const T* values, const T* next, std::int64_t count, A* sums) {
  if constexpr (has_fold_step<A, T>) {
    fold_step<T>()(values, next, sums, count);
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      sums[i] = add(sums[i], static_cast<A>(values[i]));
    }
  }
}

template <class A, class T>
void fold_sum(std::span<const T* const> inputs, std::int64_t first, std::int64_t count, T* out) {
  std::array<A, fold_block> sums;
  for (std::int64_t i = 0; i < count; ++i) {
    sums[static_cast<std::size_t>(i)] = static_cast<A>(inputs[0][first + i]);
  }
  for (std::size_t member = 1; member < inputs.size(); ++member) {
    const T* const next = inputs[member + 1 < inputs.size() ? member + 1 : member];
    add_block<A>(inputs[member] + first, next + first, count, sums.data());
  }
  for (std::int64_t i = 0; i < count; ++i) {
    out[first + i] = static_cast<T>(sums[static_cast<std::size_t>(i)]);
  }
}

template <Reduce reduce, class T>
void fold_select(std::span<const T* const> inputs, std::int64_t first, std::int64_t count, T* out) {
  for (std::int64_t i = first; i < first + count; ++i) {
    T best = inputs[0][i];
    for (const T* const input : inputs.subspan(1)) {
      best = select<reduce>(best, input[i]);
    }
    out[i] = best;
  }
}

}  // namespace detail

/// Folds inputs from left to right, elementwise: out[i] = ((x_0[i] + x_1[i]) + x_2[i]) + ...
///
/// shapes    inputs: >= 1 pointers to `count` elements each; out [count]
/// dtypes    a sum is formed in A and rounded to T once, at its end; max and min select among the
///           stored values
/// writes    all of out
/// alias     out may be one of the inputs
/// specials  one input: copied, bits and all. The sum starts from x_0, not from 0, so -0 survives. Of
///           several NaN the first stays. max(+0, -0) = +0, min(+0, -0) = -0. Integers wrap
/// order     that of `inputs`; blocks and threads do not show in the bits
/// throws    Error for a reduction that is none of the three
template <class A, Foldable T>
void fold(Reduce reduce, std::span<const T* const> inputs, std::int64_t count, T* out) {
  require(reduce == Reduce::sum || reduce == Reduce::max || reduce == Reduce::min, "fold", "reduce",
          reduce, "must be sum, max or min");
  if (inputs.size() == 1) {
    detail::copy_elements(inputs[0], count, out);
    return;
  }
  for (std::int64_t first = 0; first < count; first += detail::fold_block) {
    const std::int64_t block = std::min(detail::fold_block, count - first);
    switch (reduce) {
      case Reduce::sum:
        detail::fold_sum<A>(inputs, first, block, out);
        break;
      case Reduce::max:
        detail::fold_select<Reduce::max>(inputs, first, block, out);
        break;
      case Reduce::min:
        detail::fold_select<Reduce::min>(inputs, first, block, out);
        break;
    }
  }
}

}  // namespace heddle

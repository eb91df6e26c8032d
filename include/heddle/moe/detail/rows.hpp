#pragma once

#include <cstdint>
#include <type_traits>

#include "heddle/core/scalar.hpp"
#include "heddle/core/simd.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace heddle::moe::detail {

/// The rows of one token's slots in a buffer: slot k lies at index positions[k] - first_position if
/// that is below `kept`, nowhere otherwise.
template <class S>
struct SlotRows {
  S* rows;  ///< that of index 0
  std::int64_t stride;
  const std::int32_t* positions;
  std::int64_t count;
  std::int64_t first_position;
  std::int64_t kept;
  bool has_next = false;  ///< the next token's positions follow

  /// The row of slot k, or null.
  [[nodiscard]] S* row(std::int64_t k) const { return at(positions[k]); }
  /// The same of the next token, null where there is none.
  [[nodiscard]] S* next_row(std::int64_t k) const {
    return has_next ? at(positions[count + k]) : nullptr;
  }

  /// In unsigned arithmetic, positions before the first are behind the last.
  [[nodiscard]] S* at(std::int32_t position) const {
    const std::int64_t index = position - first_position;
    return static_cast<std::uint64_t>(index) < static_cast<std::uint64_t>(kept)
               ? rows + index * stride
               : nullptr;
  }
};

/// Row arithmetic in float, whatever float or bf16 rows are stored in.
template <class S>
inline constexpr bool is_f32_row = std::is_same_v<S, float> || std::is_same_v<S, bfloat16>;

/// a * b, rounded before anything is added to it: neither compiler contracts what it cannot see
/// through.
template <Accumulator A>
[[nodiscard]] inline A rounded_product(A a, A b) {
  A product = a * b;
  if constexpr (std::is_same_v<A, float> || std::is_same_v<A, double>) {
#if defined(__x86_64__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#else
    asm("" : "+m"(product));
#endif
  }
  return product;
}

}  // namespace heddle::moe::detail

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"

namespace heddle::v4::moe_rows {
#include "heddle/moe/detail/rows.inl"
}  // namespace heddle::v4::moe_rows

#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"

namespace heddle::v3::moe_rows {
#include "heddle/moe/detail/rows.inl"
}  // namespace heddle::v3::moe_rows

#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon::moe_rows {
#include "heddle/moe/detail/rows.inl"
}  // namespace heddle::neon::moe_rows

#endif

namespace heddle::portable::moe_rows {
#include "heddle/moe/detail/rows.inl"
}  // namespace heddle::portable::moe_rows

namespace heddle::moe::detail {

/// The row functions of a path: taken once a slice, not once a row. Weights of null are ones, which
/// leave a product what it was.
template <Storage S, Storage O = S>
struct RowFunctions {
  using A = AccumulatorOf<S>;
  void (*weighted_sum)(const SlotRows<const S>&, const A*, bool, bool, O*, std::int64_t);
  void (*scale)(A, const S*, S*, std::int64_t);
  A (*dot)(const S*, const S*, std::int64_t);
};

template <Storage S, Storage O>
void plain_weighted_sum(const SlotRows<const S>& slots, const AccumulatorOf<S>* weights,
                        bool accumulates, bool /*streams*/, O* out, std::int64_t columns) {
  using A = AccumulatorOf<S>;
  for (std::int64_t column = 0; column < columns; ++column) {
    A sum = A(0);
    for (std::int64_t k = 0; k < slots.count; ++k) {
      const S* const row = slots.row(k);
      if (row != nullptr) {
        const A value = widen<A>(row[column]);
        sum += weights == nullptr ? value : rounded_product(weights[k], value);
      }
    }
    out[column] = narrow<O>(accumulates ? widen<A>(out[column]) + sum : sum);
  }
}

template <Storage S>
void plain_scale(AccumulatorOf<S> weight, const S* row, S* scaled, std::int64_t columns) {
  for (std::int64_t column = 0; column < columns; ++column) {
    scaled[column] = narrow<S>(weight * widen<AccumulatorOf<S>>(row[column]));
  }
}

template <Storage S>
[[nodiscard]] AccumulatorOf<S> plain_dot(const S* a, const S* b, std::int64_t columns) {
  using A = AccumulatorOf<S>;
  A sum = A(0);
  for (std::int64_t column = 0; column < columns; ++column) {
    sum += rounded_product(widen<A>(a[column]), widen<A>(b[column]));
  }
  return sum;
}

template <Storage S, Storage O = S>
[[nodiscard]] RowFunctions<S, O> row_functions() {
  if constexpr (is_f32_row<S> && is_f32_row<O>) {
    using Table = RowFunctions<S, O>;
    return pick_path(Table{&v4::moe_rows::weighted_sum<const S, O>, &v4::moe_rows::scale<S>,
                           &v4::moe_rows::dot<S>},
                     Table{&v3::moe_rows::weighted_sum<const S, O>, &v3::moe_rows::scale<S>,
                           &v3::moe_rows::dot<S>},
                     Table{&neon::moe_rows::weighted_sum<const S, O>, &neon::moe_rows::scale<S>,
                           &neon::moe_rows::dot<S>},
                     Table{&portable::moe_rows::weighted_sum<const S, O>,
                           &portable::moe_rows::scale<S>, &portable::moe_rows::dot<S>});
  } else {
    return {&plain_weighted_sum<S, O>, &plain_scale<S>, &plain_dot<S>};
  }
}

}  // namespace heddle::moe::detail

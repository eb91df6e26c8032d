#pragma once

#include <cstdint>
#include <type_traits>

#include "heddle/core/scalar.hpp"
#include "heddle/core/simd.hpp"

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"

namespace heddle::v4::mesh {
#include "heddle/mesh/detail/fold_step.inl"
}  // namespace heddle::v4::mesh

#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"

namespace heddle::v3::mesh {
#include "heddle/mesh/detail/fold_step.inl"
}  // namespace heddle::v3::mesh

#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon::mesh {
#include "heddle/mesh/detail/fold_step.inl"
}  // namespace heddle::neon::mesh

#endif

namespace heddle::portable::mesh {
#include "heddle/mesh/detail/fold_step.inl"
}  // namespace heddle::portable::mesh

namespace heddle::detail {

/// sums[i] += values[i] at the machine's width, while next[i] is fetched.
template <class T>
requires(std::is_same_v<T, float> ||
         std::is_same_v<T, bfloat16>) using FoldStep = void(*)(const T* values, const T* next,
                                                               float* sums, std::int64_t count);

/// The one of the current path: asked for once a fold.
template <class T>
[[nodiscard]] FoldStep<T> fold_step() {
  return pick_path<FoldStep<T>>(&v4::mesh::fold_add<T>, &v3::mesh::fold_add<T>,
                                &neon::mesh::fold_add<T>, &portable::mesh::fold_add<T>);
}

}  // namespace heddle::detail

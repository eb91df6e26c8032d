#pragma once

#include <cstdint>

#include "heddle/core/detail/gemm_types.hpp"
#include "heddle/core/isa.hpp"
#include "heddle/core/simd.hpp"

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"
namespace heddle::v4::gemm {

/// 8 rows x 2 panels are 16 accumulators: enough chains for two units of latency 4, and 10 loads for
/// 16 multiply-adds. Wider tiles spill under GCC 12.
struct Tiling {
  static constexpr int rows = 8;
  static constexpr int panels = 2;
  static constexpr int transpose = 8;
};
#include "heddle/core/detail/transpose_x86.inl"

#include "heddle/core/detail/gemm.inl"

}  // namespace heddle::v4::gemm
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx512_bf16_begin.inl"
namespace heddle::v4_bf16::gemm {

using v4::F32;
using v4::F64;
using v4::gemm::interleave;
using v4::gemm::Tiling;
using v4::gemm::transpose_block;
#include "heddle/core/detail/gemm.inl"

/// Two elements of K of one row, as they are stored.
struct Pair {
  char bytes[4];
};

/// c = fma(a_even, b_even, fma(a_odd, b_odd, c)) in one instruction.
struct DotStep {
  using Accumulate = F32;
  using AElement = Pair;
  using BVector = __m512i;
  static constexpr int parts = 1;

  template <int part, int count>
  static void load_b(const char* b, std::int64_t panel_bytes, std::int64_t, BVector (&out)[count]) {
#pragma GCC unroll 2
    for (int v = 0; v < count; ++v) {
      out[v] = _mm512_loadu_si512(b + v * panel_bytes);
    }
  }
  static __m512i broadcast(const AElement* a) {
    int pair = 0;
    __builtin_memcpy(&pair, a, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static F32::Vector fma(__m512i a, BVector b, F32::Vector c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

/// The same with B as it is stored, row-major.
struct DotStepRows : DotStep {
  template <int part, int count>
  static void load_b(const char* b, std::int64_t panel_bytes, std::int64_t step_bytes,
                     BVector (&out)[count]) {
#pragma GCC unroll 2
    for (int v = 0; v < count; ++v) {
      const char* const even = b + v * panel_bytes;
      const char* const odd = even + step_bytes / 2;
      const __m512i low = _mm512_maskz_cvtepu16_epi32(
          0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
      const __m512i high = _mm512_maskz_cvtepu16_epi32(
          0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
      out[v] = _mm512_or_si512(low, _mm512_maskz_slli_epi32(0xffff, high, 16));
    }
  }
};

inline constexpr detail::GemmKernels<bfloat16, bfloat16> dot_kernels =
    make_kernels<DotStep, DotStepRows, PackPairs, PackPairs>();

}  // namespace heddle::v4_bf16::gemm
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"
namespace heddle::v3::gemm {

/// 6 rows x 2 vectors are 12 of the 16 registers.
struct Tiling {
  static constexpr int rows = 6;
  static constexpr int panels = 1;
  static constexpr int transpose = 8;
};
#include "heddle/core/detail/transpose_x86.inl"

#include "heddle/core/detail/gemm.inl"

}  // namespace heddle::v3::gemm
#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon::gemm {

/// 6 rows x 4 vectors are 24 of the 32 registers.
struct Tiling {
  static constexpr int rows = 6;
  static constexpr int panels = 1;
  static constexpr int transpose = 4;
};

/// out[k * stride + j] = word k of line j, for 4 lines and 4 words of 32 bits.
inline void transpose_block(const void* const* lines, std::int64_t first, void* out,
                            std::int64_t stride) {
  uint32x4_t row[4];
  for (int j = 0; j < 4; ++j) {
    __builtin_memcpy(&row[j], static_cast<const char*>(lines[j]) + 4 * first, sizeof row[j]);
  }
  const uint32x4x2_t low = vtrnq_u32(row[0], row[1]);
  const uint32x4x2_t high = vtrnq_u32(row[2], row[3]);
  const uint32x4_t column[4] = {
      vcombine_u32(vget_low_u32(low.val[0]), vget_low_u32(high.val[0])),
      vcombine_u32(vget_low_u32(low.val[1]), vget_low_u32(high.val[1])),
      vcombine_u32(vget_high_u32(low.val[0]), vget_high_u32(high.val[0])),
      vcombine_u32(vget_high_u32(low.val[1]), vget_high_u32(high.val[1]))};
  for (int j = 0; j < 4; ++j) {
    __builtin_memcpy(static_cast<char*>(out) + 4 * j * stride, &column[j], sizeof column[j]);
  }
}

/// out = even[0], odd[0], even[1], odd[1], ... of `count` elements each.
template <int count>
inline void interleave(const bfloat16* even, const bfloat16* odd, bfloat16* out) {
  for (int half = 0; half < count; half += 8) {
    uint16x8_t e;
    uint16x8_t o;
    __builtin_memcpy(&e, static_cast<const void*>(even + half), sizeof e);
    __builtin_memcpy(&o, static_cast<const void*>(odd + half), sizeof o);
    const uint16x8x2_t pairs = vzipq_u16(e, o);
    __builtin_memcpy(static_cast<void*>(out + 2 * half), &pairs, sizeof pairs);
  }
}

#include "heddle/core/detail/gemm.inl"

}  // namespace heddle::neon::gemm

#endif

namespace heddle::portable::gemm {

struct Tiling {
  static constexpr int rows = 1;
  static constexpr int panels = 1;
  static constexpr int transpose = 1;
};

inline void transpose_block(const void* const* lines, std::int64_t first, void* out, std::int64_t) {
  __builtin_memcpy(out, static_cast<const char*>(lines[0]) + 4 * first, 4);
}

template <int count>
inline void interleave(const bfloat16* even, const bfloat16* odd, bfloat16* out) {
  for (int j = 0; j < count; ++j) {
    out[2 * j] = even[j];
    out[2 * j + 1] = odd[j];
  }
}

#include "heddle/core/detail/gemm.inl"

}  // namespace heddle::portable::gemm

namespace heddle::detail {

/// The kernels of the current path.
template <class A, class B>
[[nodiscard]] const GemmKernels<A, B>& current_kernels() {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<A, bfloat16> && std::is_same_v<B, bfloat16>) {
    if (current_path() == Path::avx512_bf16) {
      return v4_bf16::gemm::dot_kernels;
    }
  }
#endif
  return *pick_path(&v4::gemm::gemm_kernels<A, B>, &v3::gemm::gemm_kernels<A, B>,
                    &neon::gemm::gemm_kernels<A, B>, &portable::gemm::gemm_kernels<A, B>);
}

/// The current path's packers of panels.
template <class T>
[[nodiscard]] const PanelPackers<T>& current_panel_packers() {
  return *pick_path(&v4::gemm::panel_packers<T>, &v3::gemm::panel_packers<T>,
                    &neon::gemm::panel_packers<T>, &portable::gemm::panel_packers<T>);
}

}  // namespace heddle::detail

#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#include "heddle/core/scalar.hpp"

#include "heddle/core/region/avx512_begin.inl"

namespace heddle::v4 {

struct F32 {
  using Scalar = float;
  using Vector = __m512;
  using Mask = __mmask16;
  static constexpr int lanes = 16;

  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector broadcast(float x) { return _mm512_set1_ps(x); }
  static Vector load(const float* p) { return _mm512_loadu_ps(p); }
  static Vector load_first(const float* p, int count, float fill) {
    return _mm512_mask_loadu_ps(broadcast(fill), first(count), p);
  }
  static void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
  static void store_first(float* p, Vector v, int count) {
    _mm512_mask_storeu_ps(p, first(count), v);
  }

  static Vector load(const bfloat16* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Vector load_first(const bfloat16* p, int count, float fill) {
    return _mm512_mask_mov_ps(broadcast(fill), first(count),
                              widen(_mm256_maskz_loadu_epi16(first(count), p)));
  }
  static void store(bfloat16* p, Vector v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded(v));
  }
  static void store_first(bfloat16* p, Vector v, int count) {
    _mm256_mask_storeu_epi16(p, first(count), rounded(v));
  }

  static Vector load_even(const bfloat16* pairs) {
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, _mm512_loadu_si512(pairs), 16));
  }
  static Vector load_odd(const bfloat16* pairs) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32(-0x10000)));
  }

  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  static Vector mul(Vector a, Vector b) {
    Vector product = _mm512_mul_ps(a, b);
    asm("" : "+v"(product));
    return product;
  }
  static Vector div(Vector a, Vector b) { return _mm512_div_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static Vector negated_fma(Vector a, Vector b, Vector c) { return _mm512_fnmadd_ps(a, b, c); }
  static Vector max(Vector a, Vector b) { return _mm512_maskz_max_ps(0xffff, a, b); }
  static Vector min(Vector a, Vector b) { return _mm512_maskz_min_ps(0xffff, a, b); }
  static Vector abs(Vector a) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
  }
  static Vector negate(Vector a) {
    return _mm512_castsi512_ps(
        _mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32(INT32_MIN)));
  }
  static Mask less(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static Mask equal(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static Mask is_nan(Vector a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
  static Vector select(Mask mask, Vector yes, Vector no) {
    return _mm512_mask_mov_ps(no, mask, yes);
  }
  static bool any(Mask mask) { return mask != 0; }

  static Vector scale(Vector a, Vector n) { return _mm512_maskz_scalef_ps(0xffff, a, n); }
  static Vector mantissa(Vector a) {
    const __m512i bits = _mm512_castps_si512(a);
    return _mm512_castsi512_ps(_mm512_sub_epi32(bits, exponent_bits(bits)));
  }
  static Vector exponent(Vector a) {
    return _mm512_maskz_cvtepi32_ps(
        0xffff, _mm512_maskz_srai_epi32(0xffff, exponent_bits(_mm512_castps_si512(a)), 23));
  }

 private:
  static Mask first(int count) { return static_cast<Mask>((1U << count) - 1U); }
  static Vector widen(__m256i half) {
    return _mm512_castsi512_ps(
        _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, half), 16));
  }
  static __m256i rounded(Vector v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i high = _mm512_maskz_srli_epi32(0xffff, bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i even = _mm512_maskz_srli_epi32(
        0xffff, _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_and_si512(high, _mm512_set1_epi32(0x8000)),
                                          _mm512_set1_epi32(0x7fc0));
    return _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_mask_mov_epi32(even, is_nan(v), quiet));
  }
  static __m512i exponent_bits(__m512i bits) {
    return _mm512_and_si512(_mm512_sub_epi32(bits, _mm512_set1_epi32(0x3f3504f3)),
                            _mm512_set1_epi32(-0x800000));
  }
};

struct F64 {
  using Scalar = double;
  using Vector = __m512d;
  static constexpr int lanes = 8;

  static Vector zero() { return _mm512_setzero_pd(); }
  static Vector broadcast(double x) { return _mm512_set1_pd(x); }
  static Vector load(const double* p) { return _mm512_loadu_pd(p); }
  static void store(double* p, Vector v) { _mm512_storeu_pd(p, v); }
  static Vector add(Vector a, Vector b) { return _mm512_add_pd(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_pd(a, b, c); }
};

}  // namespace heddle::v4

#include "heddle/core/region/end.inl"

#endif

#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#include "heddle/core/scalar.hpp"

#include "heddle/core/region/avx2_begin.inl"

namespace heddle::v3 {

struct F32 {
  using Scalar = float;
  using Vector = __m256;
  using Mask = __m256;
  static constexpr int lanes = 8;

  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector broadcast(float x) { return _mm256_set1_ps(x); }
  static Vector load(const float* p) { return _mm256_loadu_ps(p); }
  static Vector load_first(const float* p, int count, float fill) {
    const __m256i mask = first(count);
    return select(_mm256_castsi256_ps(mask), _mm256_maskload_ps(p, mask), broadcast(fill));
  }
  static void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
  static void store_first(float* p, Vector v, int count) {
    _mm256_maskstore_ps(p, first(count), v);
  }

  static Vector load(const bfloat16* p) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Vector load_first(const bfloat16* p, int count, float fill) {
    alignas(16) std::uint16_t halves[lanes] = {};
    __builtin_memcpy(halves, p, sizeof(std::uint16_t) * static_cast<unsigned>(count));
    return select(_mm256_castsi256_ps(first(count)),
                  widen(_mm_load_si128(reinterpret_cast<const __m128i*>(halves))), broadcast(fill));
  }
  static void store(bfloat16* p, Vector v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), rounded(v));
  }
  static void store_first(bfloat16* p, Vector v, int count) {
    alignas(16) std::uint16_t halves[lanes];
    _mm_store_si128(reinterpret_cast<__m128i*>(halves), rounded(v));
    __builtin_memcpy(static_cast<void*>(p), halves,
                     sizeof(std::uint16_t) * static_cast<unsigned>(count));
  }

  static Vector load_even(const bfloat16* pairs) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs)), 16));
  }
  static Vector load_odd(const bfloat16* pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs)), _mm256_set1_epi32(-0x10000)));
  }

  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static Vector mul(Vector a, Vector b) {
    Vector product = _mm256_mul_ps(a, b);
    asm("" : "+x"(product));
    return product;
  }
  static Vector div(Vector a, Vector b) { return _mm256_div_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static Vector negated_fma(Vector a, Vector b, Vector c) { return _mm256_fnmadd_ps(a, b, c); }
  static Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  static Vector min(Vector a, Vector b) { return _mm256_min_ps(a, b); }
  static Vector abs(Vector a) {
    return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
  }
  static Vector negate(Vector a) {
    return _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN)));
  }
  static Mask less(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static Mask equal(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  static Mask is_nan(Vector a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
  static Vector select(Mask mask, Vector yes, Vector no) { return _mm256_blendv_ps(no, yes, mask); }
  static bool any(Mask mask) { return _mm256_movemask_ps(mask) != 0; }

  static Vector scale(Vector a, Vector n) {
    // Two factors: a * 2^(n/2) is exact, the second product rounds once, into the subnormals too.
    const __m256i power = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(power, 1);
    return mul(mul(a, power_of_two(half)), power_of_two(_mm256_sub_epi32(power, half)));
  }
  static Vector mantissa(Vector a) {
    const __m256i bits = _mm256_castps_si256(a);
    return _mm256_castsi256_ps(_mm256_sub_epi32(bits, exponent_bits(bits)));
  }
  static Vector exponent(Vector a) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(exponent_bits(_mm256_castps_si256(a)), 23));
  }

 private:
  static __m256i first(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Vector widen(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static __m128i rounded(Vector v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i even = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi32(0x8000)),
                                          _mm256_set1_epi32(0x7fc0));
    const __m256i words = _mm256_blendv_epi8(even, quiet, _mm256_castps_si256(is_nan(v)));
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
  static Vector power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
  static __m256i exponent_bits(__m256i bits) {
    return _mm256_and_si256(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f3504f3)),
                            _mm256_set1_epi32(-0x800000));
  }
};

struct F64 {
  using Scalar = double;
  using Vector = __m256d;
  static constexpr int lanes = 4;

  static Vector zero() { return _mm256_setzero_pd(); }
  static Vector broadcast(double x) { return _mm256_set1_pd(x); }
  static Vector load(const double* p) { return _mm256_loadu_pd(p); }
  static void store(double* p, Vector v) { _mm256_storeu_pd(p, v); }
  static Vector add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_pd(a, b, c); }
};

}  // namespace heddle::v3

#include "heddle/core/region/end.inl"

#endif

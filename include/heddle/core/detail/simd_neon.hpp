#pragma once

#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstdint>

#include "heddle/core/scalar.hpp"

namespace heddle::neon {

struct F32 {
  using Scalar = float;
  using Vector = float32x4_t;
  using Mask = uint32x4_t;
  static constexpr int lanes = 4;

  static Vector zero() { return vdupq_n_f32(0); }
  static Vector broadcast(float x) { return vdupq_n_f32(x); }
  static Vector load(const float* p) { return vld1q_f32(p); }
  static Vector load_first(const float* p, int count, float fill) {
    float values[lanes] = {fill, fill, fill, fill};
    __builtin_memcpy(values, p, sizeof(float) * static_cast<unsigned>(count));
    return load(values);
  }
  static void store(float* p, Vector v) { vst1q_f32(p, v); }
  static void store_first(float* p, Vector v, int count) {
    float values[lanes];
    store(values, v);
    __builtin_memcpy(p, values, sizeof(float) * static_cast<unsigned>(count));
  }

  static Vector load(const bfloat16* p) {
    std::uint16_t halves[lanes];
    __builtin_memcpy(halves, static_cast<const void*>(p), sizeof halves);
    return widen(vld1_u16(halves));
  }
  static Vector load_first(const bfloat16* p, int count, float fill) {
    std::uint16_t halves[lanes] = {};
    __builtin_memcpy(halves, static_cast<const void*>(p),
                     sizeof(std::uint16_t) * static_cast<unsigned>(count));
    const std::uint32_t index[lanes] = {0, 1, 2, 3};
    const Mask mask = vcltq_u32(vld1q_u32(index), vdupq_n_u32(static_cast<unsigned>(count)));
    return select(mask, widen(vld1_u16(halves)), broadcast(fill));
  }
  static void store(bfloat16* p, Vector v) { store_first(p, v, lanes); }
  static void store_first(bfloat16* p, Vector v, int count) {
    std::uint16_t halves[lanes];
    vst1_u16(halves, rounded(v));
    __builtin_memcpy(static_cast<void*>(p), halves,
                     sizeof(std::uint16_t) * static_cast<unsigned>(count));
  }

  static Vector load_even(const bfloat16* pairs) {
    return vreinterpretq_f32_u32(vshlq_n_u32(load_words(pairs), 16));
  }
  static Vector load_odd(const bfloat16* pairs) {
    return vreinterpretq_f32_u32(vandq_u32(load_words(pairs), vdupq_n_u32(0xffff0000)));
  }

  static Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
  static Vector sub(Vector a, Vector b) { return vsubq_f32(a, b); }
  static Vector mul(Vector a, Vector b) {
    Vector product = vmulq_f32(a, b);
    asm("" : "+w"(product));
    return product;
  }
  static Vector div(Vector a, Vector b) { return vdivq_f32(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
  static Vector negated_fma(Vector a, Vector b, Vector c) { return vfmsq_f32(c, a, b); }
  static Vector max(Vector a, Vector b) { return select(vcgtq_f32(a, b), a, b); }
  static Vector min(Vector a, Vector b) { return select(vcltq_f32(a, b), a, b); }
  static Vector abs(Vector a) { return vabsq_f32(a); }
  static Vector negate(Vector a) { return vnegq_f32(a); }
  static Mask less(Vector a, Vector b) { return vcltq_f32(a, b); }
  static Mask equal(Vector a, Vector b) { return vceqq_f32(a, b); }
  static Mask is_nan(Vector a) { return vmvnq_u32(vceqq_f32(a, a)); }
  static Vector select(Mask mask, Vector yes, Vector no) { return vbslq_f32(mask, yes, no); }
  static bool any(Mask mask) { return vmaxvq_u32(mask) != 0; }

  static Vector scale(Vector a, Vector n) {
    // Two factors: a * 2^(n/2) is exact, the second product rounds once, into the subnormals too.
    const int32x4_t power = vcvtq_s32_f32(n);
    const int32x4_t half = vshrq_n_s32(power, 1);
    return mul(mul(a, power_of_two(half)), power_of_two(vsubq_s32(power, half)));
  }
  static Vector mantissa(Vector a) {
    const int32x4_t bits = vreinterpretq_s32_f32(a);
    return vreinterpretq_f32_s32(vsubq_s32(bits, exponent_bits(bits)));
  }
  static Vector exponent(Vector a) {
    return vcvtq_f32_s32(vshrq_n_s32(exponent_bits(vreinterpretq_s32_f32(a)), 23));
  }

 private:
  static uint32x4_t load_words(const bfloat16* pairs) {
    std::uint32_t words[lanes];
    __builtin_memcpy(words, static_cast<const void*>(pairs), sizeof words);
    return vld1q_u32(words);
  }
  static Vector widen(uint16x4_t half) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(half), 16));
  }
  static uint16x4_t rounded(Vector v) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t high = vshrq_n_u32(bits, 16);
    const uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
    const uint32x4_t even = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    const uint32x4_t quiet = vorrq_u32(vandq_u32(high, vdupq_n_u32(0x8000)), vdupq_n_u32(0x7fc0));
    return vmovn_u32(vbslq_u32(is_nan(v), quiet, even));
  }
  static Vector power_of_two(int32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
  }
  static int32x4_t exponent_bits(int32x4_t bits) {
    return vandq_s32(vsubq_s32(bits, vdupq_n_s32(0x3f3504f3)), vdupq_n_s32(-0x800000));
  }
};

struct F64 {
  using Scalar = double;
  using Vector = float64x2_t;
  static constexpr int lanes = 2;

  static Vector zero() { return vdupq_n_f64(0); }
  static Vector broadcast(double x) { return vdupq_n_f64(x); }
  static Vector load(const double* p) { return vld1q_f64(p); }
  static void store(double* p, Vector v) { vst1q_f64(p, v); }
  static Vector add(Vector a, Vector b) { return vaddq_f64(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f64(c, a, b); }
};

}  // namespace heddle::neon

#endif

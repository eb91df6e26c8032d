#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "heddle/core/scalar.hpp"

namespace heddle::portable {

struct F32 {
  using Scalar = float;
  using Vector = float;
  using Mask = bool;
  static constexpr int lanes = 1;

  static Vector zero() { return 0; }
  static Vector broadcast(float x) { return x; }
  static Vector load(const float* p) { return *p; }
  static Vector load_first(const float* p, int count, float fill) { return count > 0 ? *p : fill; }
  static void store(float* p, Vector v) { *p = v; }
  static void store_first(float* p, Vector v, int count) {
    if (count > 0) {
      *p = v;
    }
  }

  static Vector load(const bfloat16* p) { return static_cast<float>(*p); }
  static Vector load_first(const bfloat16* p, int count, float fill) {
    return count > 0 ? load(p) : fill;
  }
  static void store(bfloat16* p, Vector v) { *p = bfloat16(v); }
  static void store_first(bfloat16* p, Vector v, int count) {
    if (count > 0) {
      store(p, v);
    }
  }

  static Vector load_even(const bfloat16* pairs) { return static_cast<float>(pairs[0]); }
  static Vector load_odd(const bfloat16* pairs) { return static_cast<float>(pairs[1]); }

  static Vector add(Vector a, Vector b) { return a + b; }
  static Vector sub(Vector a, Vector b) { return a - b; }
  static Vector mul(Vector a, Vector b) {
    Vector product = a * b;
#if defined(__x86_64__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#else
    asm("" : "+m"(product));
#endif
    return product;
  }
  static Vector div(Vector a, Vector b) {
    return a / b;
  }
  static Vector fma(Vector a, Vector b, Vector c) {
    return std::fma(a, b, c);
  }
  static Vector negated_fma(Vector a, Vector b, Vector c) {
    return std::fma(-a, b, c);
  }
  static Vector max(Vector a, Vector b) {
    return a > b ? a : b;
  }
  static Vector min(Vector a, Vector b) {
    return a < b ? a : b;
  }
  static Vector abs(Vector a) {
    return std::abs(a);
  }
  static Vector negate(Vector a) {
    return -a;
  }
  static Mask less(Vector a, Vector b) {
    return a < b;
  }
  static Mask equal(Vector a, Vector b) {
    return a == b;
  }
  static Mask is_nan(Vector a) {
    return a != a;
  }
  static Vector select(Mask mask, Vector yes, Vector no) {
    return mask ? yes : no;
  }
  static bool any(Mask mask) {
    return mask;
  }

  static Vector scale(Vector a, Vector n) {
    // Two factors: a * 2^(n/2) is exact, the second product rounds once, into the subnormals too.
    // The integer is read from the bits of n + 1.5 * 2^23, which is defined for NaN as well.
    const auto power = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(n + 0x1.8p23F) -
                                                 std::bit_cast<std::uint32_t>(0x1.8p23F));
    const std::int32_t half = power >> 1;
    return mul(mul(a, power_of_two(half)), power_of_two(power - half));
  }
  static Vector mantissa(Vector a) {
    const auto bits = std::bit_cast<std::uint32_t>(a);
    return std::bit_cast<float>(bits - exponent_bits(bits));
  }
  static Vector exponent(Vector a) {
    return static_cast<float>(
        static_cast<std::int32_t>(exponent_bits(std::bit_cast<std::uint32_t>(a))) >> 23);
  }

 private:
  static Vector power_of_two(std::int32_t n) {
    return std::bit_cast<float>((static_cast<std::uint32_t>(n) + 127U) << 23);
  }
  static std::uint32_t exponent_bits(std::uint32_t bits) {
    return (bits - 0x3f3504f3U) & 0xff800000U;
  }
};

struct F64 {
  using Scalar = double;
  using Vector = double;
  static constexpr int lanes = 1;

  static Vector zero() { return 0; }
  static Vector broadcast(double x) { return x; }
  static Vector load(const double* p) { return *p; }
  static void store(double* p, Vector v) { *p = v; }
  static Vector add(Vector a, Vector b) { return a + b; }
  static Vector fma(Vector a, Vector b, Vector c) { return std::fma(a, b, c); }
};

}  // namespace heddle::portable

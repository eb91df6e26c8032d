#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "support/paired.hpp"

namespace heddle::bench {

/// Vector instructions that this machine's f32 roofline is measured with.
enum class FmaPath { scalar, neon, avx2, avx512 };

[[nodiscard]] constexpr std::string_view name(FmaPath path) {
  switch (path) {
    case FmaPath::scalar:
      return "scalar";
    case FmaPath::neon:
      return "neon";
    case FmaPath::avx2:
      return "avx2";
    case FmaPath::avx512:
      return "avx512";
  }
  return "";
}

[[nodiscard]] inline FmaPath fma_path() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    return FmaPath::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return FmaPath::avx2;
  }
#elif defined(__aarch64__)
  return FmaPath::neon;
#endif
  return FmaPath::scalar;
}

namespace detail {

/// Independent chains: latency 4 times 2 units is 8; a few more hide the loop.
inline constexpr int fma_chains = 12;

struct F32x4 {
  typedef float Vector __attribute__((vector_size(16)));
};
struct F32x8 {
  typedef float Vector __attribute__((vector_size(32)));
};
struct F32x16 {
  typedef float Vector __attribute__((vector_size(64)));
};

/// `rounds` fused multiply-adds on each chain. Inlined into functions that may use such vectors.
template <class Lanes>
[[gnu::always_inline]] inline float fma_loop(std::int64_t rounds, float factor) {
  using Vector = typename Lanes::Vector;
  Vector chain[fma_chains];
  for (int c = 0; c < fma_chains; ++c) {
    chain[c] = Vector{} + static_cast<float>(c);
  }
  const Vector a = Vector{} + factor;
  const Vector b = Vector{} + (1.0F - factor);
  for (std::int64_t round = 0; round < rounds; ++round) {
    for (int c = 0; c < fma_chains; ++c) {
      chain[c] = chain[c] * a + b;
    }
  }
  float sum = 0;
  for (int c = 0; c < fma_chains; ++c) {
    sum += chain[c][0];
  }
  return sum;
}

#if defined(__x86_64__)
[[gnu::target("avx512f")]] inline float fma_loop_avx512(std::int64_t rounds, float factor) {
  return fma_loop<F32x16>(rounds, factor);
}
[[gnu::target("avx2,fma")]] inline float fma_loop_avx2(std::int64_t rounds, float factor) {
  return fma_loop<F32x8>(rounds, factor);
}
#endif

}  // namespace detail

/// f32 rate of one thread, 10^9 flop/s (a fused multiply-add is two), the best of several loops of about a
/// millisecond: what frac_f32 divides by. Another path than the machine's own is for kernels that were
/// made to take it too.
[[nodiscard]] inline double fma_gflops(FmaPath path = fma_path()) {
  constexpr std::int64_t rounds = 200'000;
  volatile float factor = 0.999F;
  volatile float sink = 0;
  double best = 0;
  for (int repetition = 0; repetition < 7; ++repetition) {
    const double seconds = seconds_of([&] {
      switch (path) {
#if defined(__x86_64__)
        case FmaPath::avx512:
          sink = detail::fma_loop_avx512(rounds, factor);
          break;
        case FmaPath::avx2:
          sink = detail::fma_loop_avx2(rounds, factor);
          break;
#endif
        default:
          sink = detail::fma_loop<detail::F32x4>(rounds, factor);
      }
    });
    const int lanes = path == FmaPath::avx512 ? 16 : path == FmaPath::avx2 ? 8 : 4;
    best =
        std::max(best, 2e-9 * lanes * detail::fma_chains * static_cast<double>(rounds) / seconds);
  }
  return best;
}

}  // namespace heddle::bench

#pragma once

#include <cstdint>

#include <Eigen/Core>

namespace heddle::bench {

/// What a peer multiplies: c [m,n] = a [m,k] * b [k,n], row-major without gaps; a may be stored
/// transposed, the product added to c.
struct PeerProduct {
  std::int64_t m;
  std::int64_t k;
  std::int64_t n;
  bool a_transposed = false;
  bool accumulate = false;
};

/// Eigen's product, compiled for the machine that builds, in a library of its own: the templates of a program that
/// is compiled for all machines would be merged with these.
[[gnu::visibility("default")]] void eigen_gemm(const PeerProduct& product, const float* a,
                                               const float* b, float* c);

/// The same of operands that are widened a block of K at a time: Eigen's own product of bf16 sums in it.
[[gnu::visibility("default")]] void eigen_gemm(const PeerProduct& product, const Eigen::bfloat16* a,
                                               const Eigen::bfloat16* b, float* c);

}  // namespace heddle::bench

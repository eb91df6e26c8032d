#pragma once

#include <cstdint>

namespace heddle::train {

/// The numbers that a model is initialised with: one stream a seed, the same on every compiler and
/// machine, because no step of it rounds in a way that a library chooses.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  /// 64 random bits (splitmix64).
  std::uint64_t bits() {
    state_ += 0x9E3779B97F4A7C15ULL;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }

  /// In [low, high), of 32 bits: the product and the sum are the only roundings.
  double uniform(double low, double high) {
    return low + (high - low) * (static_cast<double>(bits() >> 32) * 0x1.0p-32);
  }

  /// Mean 0 and deviation 1, within 6 of 0: twelve uniforms summed as integers. No logarithm and no
  /// cosine, whose last bit differs between mathematical libraries.
  double normal() {
    std::int64_t sum = 0;
    for (int draw = 0; draw < 12; ++draw) {
      sum += static_cast<std::int64_t>(bits() >> 32);
    }
    return static_cast<double>(sum) * 0x1.0p-32 - 6.0;
  }

 private:
  std::uint64_t state_;
};

}  // namespace heddle::train

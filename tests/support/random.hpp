#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

namespace heddle::test {

/// Numbers for tests: the same on every platform and compiler, unlike the standard distributions.
class Random {
 public:
  explicit Random(std::uint64_t seed)
      : state_(seed * 0x9E3779B97F4A7C15ULL + 0x632BE59BD9B4E019ULL) {}

  /// 64 random bits (splitmix64).
  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }

  /// In [low, high).
  double uniform(double low = 0.0, double high = 1.0) {
    return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1.0p-53;
  }

  double normal(double deviation = 1.0) {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return deviation * radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

  /// In [low, high], both ends included.
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }

  bool chance(double probability) { return uniform() < probability; }

  template <class T>
  std::vector<T> normals(std::int64_t count, double deviation = 1.0) {
    std::vector<T> values(static_cast<std::size_t>(count));
    for (T& value : values) {
      value = static_cast<T>(static_cast<float>(normal(deviation)));
    }
    return values;
  }

 private:
  std::uint64_t state_;
};

}  // namespace heddle::test

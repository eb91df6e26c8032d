#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <numbers>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/numerics/gates.hpp"

namespace heddle::numerics {

/// How derivatives along random directions are taken.
struct DirectionOptions {
  std::int64_t directions = 8;
  double step = 1e-5;  ///< to each side; entries of a direction have variance 1
  std::uint64_t seed = 1;

  void validate(std::string_view where) const {
    require(directions >= 1, where, "options.directions", directions, "must be >= 1");
    require(step > 0 && std::isfinite(step), where, "options.step", step, "must be > 0 and finite");
  }
};

namespace detail {

/// Entries of random directions: uniform, of mean 0 and variance 1, by integer arithmetic alone
/// (splitmix64), so that every machine draws the same.
class Directions {
 public:
  explicit Directions(std::uint64_t seed) : state_(seed) {}

  double next() {
    state_ += 0x9E3779B97F4A7C15ULL;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
    const double uniform = static_cast<double>(z >> 11) * 0x1.0p-53;
    return (2 * uniform - 1) * std::numbers::sqrt3;
  }

 private:
  std::uint64_t state_;
};

}  // namespace detail

/// The largest error over random directions v of a gradient g of f at x:
///   |<g, v> - (f(x + step v) - f(x - step v)) / (2 step)| / max(|g|, the larger of the two)
/// |g| is what <g, v> is on average, so a direction that happens to be across the gradient does no harm.
///
/// shapes    x, gradient [n]
/// dtypes    x and f in double; the gradient is what is tested, in any storage type
/// specials  n = 0, or gradient and differences all 0: 0. NaN where f or the gradient is not finite
/// order     elements ascending
/// memory    16 bytes an element
/// cost      2 calls of f a direction
/// throws    Error for lengths that differ, options
/// source    spec/head.md 9
template <Storage G, std::invocable<std::span<const double>> Function>
[[nodiscard]] double directional_error(std::span<const double> x, std::span<const G> gradient,
                                       Function&& f, const DirectionOptions& options = {}) {
  constexpr const char* where = "numerics::directional_error";
  options.validate(where);
  require_equal(where, "gradient.size", gradient.size(), "x.size", x.size());

  double squared_norm = 0;
  for (const G g : gradient) {
    squared_norm += static_cast<double>(g) * static_cast<double>(g);
  }
  const double norm = std::sqrt(squared_norm);
  detail::Directions random(options.seed);
  std::vector<double> direction(x.size());
  std::vector<double> point(x.size());
  double worst = 0;
  for (std::int64_t d = 0; d < options.directions; ++d) {
    double product = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      direction[i] = random.next();
      product += static_cast<double>(gradient[i]) * direction[i];
    }
    const auto f_at = [&](double distance) {
      for (std::size_t i = 0; i < x.size(); ++i) {
        point[i] = x[i] + distance * direction[i];
      }
      return static_cast<double>(f(std::span<const double>(point)));
    };
    const double slope = (f_at(options.step) - f_at(-options.step)) / (2 * options.step);
    const double error = std::abs(product - slope);
    if (error == 0) {
      continue;
    }
    const double relative = error / std::max({norm, std::abs(product), std::abs(slope)});
    // Not std::max, which would pass over a NaN.
    worst = relative <= worst ? worst : relative;
    if (std::isnan(worst)) {
      break;
    }
  }
  return worst;
}

/// The gate of it; `tensor` is the gradient's name.
template <Storage G, std::invocable<std::span<const double>> Function>
[[nodiscard]] Gate judge_directions(std::string tensor, std::span<const double> x,
                                    std::span<const G> gradient, Function&& f, const Floors& floors,
                                    const DirectionOptions& options = {},
                                    std::optional<double> noise = {}) {
  return judge(GateKind::directional_derivative, std::move(tensor),
               directional_error(x, gradient, std::forward<Function>(f), options),
               floors.directional_derivative, noise);
}

}  // namespace heddle::numerics

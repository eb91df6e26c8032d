#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace heddle::test {

/// d f / d x[i] for every i by central differences; `f` reads x through the span it closed over.
template <class Function>
[[nodiscard]] std::vector<double> central_differences(std::span<double> x, const Function& f,
                                                      double step = 1e-5) {
  std::vector<double> derivatives(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double centre = x[i];
    x[i] = centre + step;
    const double above = f();
    x[i] = centre - step;
    const double below = f();
    x[i] = centre;
    derivatives[i] = (above - below) / (2 * step);
  }
  return derivatives;
}

}  // namespace heddle::test

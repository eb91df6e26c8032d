#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace heddle::bench {

/// Wall-clock seconds that `action` takes.
template <class Action>
[[nodiscard]] double seconds_of(const Action& action) {
  const auto begin = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

[[nodiscard]] inline double median(std::vector<double> values) {
  if (values.empty()) {
    return 0;
  }
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Times of our kernel and of what it is measured against, taken in turns in one run, so that whatever
/// slows the machine down for a moment slows both.
class Pairs {
 public:
  /// Runs both once, the other first; returns our seconds.
  template <class Own, class Other>
  double run(const Own& own, const Other& other) {
    const double other_seconds = seconds_of(other);
    own_.push_back(seconds_of(own));
    ratios_.push_back(other_seconds / own_.back());
    return own_.back();
  }

  /// Time of the other over ours, the median over pairs: above 1 where we are faster.
  [[nodiscard]] double ratio() const { return median(ratios_); }
  [[nodiscard]] double seconds() const { return median(own_); }

 private:
  std::vector<double> own_;
  std::vector<double> ratios_;
};

}  // namespace heddle::bench

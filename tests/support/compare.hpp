#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace heddle::test {

/// What a comparison found. `error` is max|a - b| / max|b| over the entries that are finite on both
/// sides; `mismatch` names the first entry where the two cannot be subtracted and are not the same.
struct Difference {
  double max_abs = 0;
  double scale = 0;  ///< max|b|
  double error = 0;
  double relative_l2 = 0;
  std::int64_t compared = 0;
  std::string mismatch;
};

template <class Actual, class Expected>
[[nodiscard]] Difference difference(std::span<const Actual> actual,
                                    std::span<const Expected> expected) {
  Difference result;
  if (actual.size() != expected.size()) {
    result.mismatch =
        "sizes " + std::to_string(actual.size()) + " and " + std::to_string(expected.size());
    return result;
  }
  double squared_difference = 0;
  double squared_expected = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double a = static_cast<double>(actual[i]);
    const double b = static_cast<double>(expected[i]);
    if (!std::isfinite(a) || !std::isfinite(b)) {
      if (!(std::isnan(a) && std::isnan(b)) && !(a == b)) {
        result.mismatch = "entry " + std::to_string(i) + ": " + std::to_string(a) + " against " +
                          std::to_string(b);
        return result;
      }
      continue;
    }
    ++result.compared;
    result.max_abs = std::max(result.max_abs, std::abs(a - b));
    result.scale = std::max(result.scale, std::abs(b));
    squared_difference += (a - b) * (a - b);
    squared_expected += b * b;
  }
  result.error = result.max_abs == 0 ? 0 : result.max_abs / result.scale;
  result.relative_l2 =
      squared_difference == 0 ? 0 : std::sqrt(squared_difference / squared_expected);
  return result;
}

/// Passes when every entry is within `tolerance` of the largest expected magnitude. An expectation of
/// zeros alone must be met exactly; NaN meets NaN and inf meets inf of its sign; nothing compared is
/// a failure, so that a test cannot pass on empty hands.
template <class Actual, class Expected>
[[nodiscard]] ::testing::AssertionResult close(std::span<const Actual> actual,
                                               std::span<const Expected> expected,
                                               double tolerance) {
  const Difference found = difference(actual, expected);
  if (!found.mismatch.empty()) {
    return ::testing::AssertionFailure() << found.mismatch;
  }
  if (found.compared == 0) {
    return ::testing::AssertionFailure() << "vacuous: nothing finite was compared";
  }
  if (!(found.error <= tolerance)) {
    return ::testing::AssertionFailure() << "error " << found.error << " of the largest value "
                                         << found.scale << " exceeds " << tolerance;
  }
  return ::testing::AssertionSuccess() << "error " << found.error;
}

template <class Actual, class Expected>
[[nodiscard]] ::testing::AssertionResult close(const std::vector<Actual>& actual,
                                               const std::vector<Expected>& expected,
                                               double tolerance) {
  return close(std::span<const Actual>(actual), std::span<const Expected>(expected), tolerance);
}

/// Passes when both hold the same bits: -0 is not +0, and NaN is only the NaN of the same payload.
template <class T>
[[nodiscard]] ::testing::AssertionResult same_bits(std::span<const T> actual,
                                                   std::span<const T> expected) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure() << "sizes " << actual.size() << " and " << expected.size();
  }
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (std::memcmp(&actual[i], &expected[i], sizeof(T)) != 0) {
      return ::testing::AssertionFailure()
             << "entry " << i << ": " << static_cast<double>(actual[i]) << " against "
             << static_cast<double>(expected[i]);
    }
  }
  return ::testing::AssertionSuccess();
}

template <class T>
[[nodiscard]] ::testing::AssertionResult same_bits(const std::vector<T>& actual,
                                                   const std::vector<T>& expected) {
  return same_bits(std::span<const T>(actual), std::span<const T>(expected));
}

/// What an output must not still hold when a kernel returns.
template <class T>
[[nodiscard]] T poison() {
  if constexpr (std::numeric_limits<T>::has_quiet_NaN) {
    return std::numeric_limits<T>::quiet_NaN();
  } else {
    return static_cast<T>(-77);
  }
}

}  // namespace heddle::test

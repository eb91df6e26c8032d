#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/view.hpp"
#include "heddle/numerics/difference.hpp"
#include "heddle/numerics/gates.hpp"
#include "heddle/numerics/tensor.hpp"
#include "heddle/numerics/ulp.hpp"

namespace heddle::numerics {

/// The largest difference of a result that each token has. Entries that are left out are not read.
struct TokenDifference {
  double value = 0;
  std::int64_t entry = 0;  ///< where it is
  std::int64_t compared = 0;
  std::optional<NonFinite> non_finite = {};  ///< then `value` is over the others
};

namespace detail {

/// The largest error(entry, baseline, candidate) of the entries that are finite and not left out.
template <class Error>
[[nodiscard]] TokenDifference largest_difference(std::span<const double> baseline,
                                                 std::span<const double> candidate,
                                                 std::span<const std::uint8_t> left_out,
                                                 const Error& error) {
  TokenDifference result;
  for (std::size_t t = 0; t < baseline.size(); ++t) {
    if (!left_out.empty() && left_out[t] != 0) {
      continue;
    }
    const auto entry = static_cast<std::int64_t>(t);
    if (!std::isfinite(baseline[t]) || !std::isfinite(candidate[t])) {
      if (!result.non_finite) {
        result.non_finite = {
            .count = 0, .entry = entry, .baseline = baseline[t], .candidate = candidate[t]};
      }
      ++result.non_finite->count;
      continue;
    }
    ++result.compared;
    const double value = candidate[t] == baseline[t] ? 0 : error(t, baseline[t], candidate[t]);
    if (value > result.value) {
      result.value = value;
      result.entry = entry;
    }
  }
  return result;
}

inline void require_tokens(std::string_view where, const NamedTensor& baseline,
                           const NamedTensor& candidate, std::span<const std::uint8_t> left_out) {
  for (const NamedTensor* const tensor : {&baseline, &candidate}) {
    tensor->validate(where);
    require(tensor->is_floating(), where, "tensor", tensor->name, "must hold floating numbers");
  }
  require_equal(where, "candidate.size", candidate.size(), "baseline.size", baseline.size());
  if (!left_out.empty()) {
    require_length(where, "left_out", left_out, "baseline.size", baseline.size());
  }
}

/// An ulp of the coarser of the two types.
[[nodiscard]] inline double coarser_ulp(const NamedTensor& a, const NamedTensor& b,
                                        double magnitude) {
  switch (std::min(a.element_bytes(), b.element_bytes())) {
    case sizeof(bfloat16):
      return ulp_of<bfloat16>(magnitude);
    case sizeof(float):
      return ulp_of<float>(magnitude);
    default:
      return ulp_of<double>(magnitude);
  }
}

}  // namespace detail

/// How far log-probs are apart, in `unit`. Ulps are of the coarser of the two types, each entry's of
/// max(|logp|, |lse|); where there is no lse, of the largest |logp|, which no lse is far below.
///
/// shapes    lse [entries] or empty; left_out [entries] or empty, 1 where an entry is passed over
/// specials  an lse that is not finite counts as absent for its entry
/// throws    Error for lengths that differ, integers
/// source    spec/head.md 9, 10
[[nodiscard]] inline TokenDifference log_prob_difference(
    const NamedTensor& baseline, const NamedTensor& candidate, LogProbUnit unit,
    std::span<const double> lse = {}, std::span<const std::uint8_t> left_out = {}) {
  constexpr const char* where = "numerics::log_prob_difference";
  detail::require_tokens(where, baseline, candidate, left_out);
  if (!lse.empty()) {
    require_length(where, "lse", lse, "baseline.size", baseline.size());
  }
  const std::vector<double> b = baseline.read_all<double>();
  const std::vector<double> c = candidate.read_all<double>();
  double largest = 0;
  for (const double logp : b) {
    largest = std::isfinite(logp) ? std::max(largest, std::abs(logp)) : largest;
  }
  return detail::largest_difference(b, c, left_out, [&](std::size_t t, double x, double y) {
    if (unit == LogProbUnit::nats) {
      return std::abs(y - x);
    }
    const double other = lse.empty() ? largest : std::isfinite(lse[t]) ? std::abs(lse[t]) : 0;
    return std::abs(y - x) / detail::coarser_ulp(baseline, candidate, std::max(std::abs(x), other));
  });
}

/// How far entropies are apart, relative to max(the token's, the mean of those that are not 0): of a
/// token that is nearly certain the entropy is what is left of numbers near 1, and their rounding does
/// not shrink with it.
///
/// throws    Error for lengths that differ, integers
/// source    spec/head.md 9
[[nodiscard]] inline TokenDifference entropy_difference(
    const NamedTensor& baseline, const NamedTensor& candidate,
    std::span<const std::uint8_t> left_out = {}) {
  detail::require_tokens("numerics::entropy_difference", baseline, candidate, left_out);
  const std::vector<double> b = baseline.read_all<double>();
  const std::vector<double> c = candidate.read_all<double>();
  double sum = 0;
  double count = 0;
  for (const double entropy : b) {
    if (std::isfinite(entropy) && entropy != 0) {
      sum += std::abs(entropy);
      count += 1;
    }
  }
  const double mean = count == 0 ? 0 : sum / count;
  return detail::largest_difference(b, c, left_out, [mean](std::size_t, double x, double y) {
    return std::abs(y - x) / std::max(std::abs(x), mean);
  });
}

}  // namespace heddle::numerics

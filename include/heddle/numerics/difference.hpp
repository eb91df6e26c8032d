#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/numerics/tensor.hpp"

namespace heddle::numerics {

/// The first entry that is NaN or infinite on either side, and how many there are.
struct NonFinite {
  std::int64_t count = 0;
  std::int64_t entry = 0;
  double baseline = 0;
  double candidate = 0;
};

/// How far a candidate c is from a baseline b, each figure blind to something that another sees: a
/// norm sees no direction, and a tensor's figures hardly a row. Where there is `non_finite` they are all
/// NaN.
///
///   relative_l2      |c - b| / |b|
///   one_minus_cosine 1 - <c, b> / (|c| |b|), in [0, 2]
///   norm_ratio       | |c| / |b| - 1 |
///   worst_row        the largest |c_r - b_r| / max(|b_r|, 1e-3 max_s |b_s|) of the rows
///
/// specials  both zero, or no elements: all 0, `zero` is set. A zero b alone: relative_l2, norm_ratio and
///           worst_row are infinite, one_minus_cosine is 1; a zero c alone: all 1
struct Difference {
  double relative_l2 = 0;
  double one_minus_cosine = 0;
  double norm_ratio = 0;
  double worst_row = 0;
  std::int64_t worst_row_index = 0;
  bool zero = false;  ///< nothing but zeros on both sides: the figures say nothing
  std::optional<NonFinite> non_finite = {};
};

/// Rows below this share of the largest are measured against it: rounding puts noise into them that is
/// not theirs.
inline constexpr double small_row = 1e-3;

namespace detail {

inline constexpr std::int64_t block_elements = 2048;  // of both sides: they stay in the first cache

/// The sum of term(i) over [0, count) in an order of its own: eight partial sums side by side, so that
/// the machine may add them at once, folded left to right.
template <class Term>
[[nodiscard]] double lane_sum(std::size_t count, const Term& term) {
  std::array<double, 8> lanes{};
  std::size_t i = 0;
  for (; i + lanes.size() <= count; i += lanes.size()) {
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
      lanes[lane] += term(i + lane);
    }
  }
  for (; i < count; ++i) {
    lanes[i % lanes.size()] += term(i);
  }
  double sum = 0;
  for (const double lane : lanes) {
    sum += lane;
  }
  return sum;
}

/// Calls body(first entry, baseline values, candidate values) for pieces of [begin, begin + count).
template <class Body>
void for_each_piece(const NamedTensor& baseline, const NamedTensor& candidate, std::int64_t begin,
                    std::int64_t count, const Body& body) {
  std::array<double, block_elements> b;
  std::array<double, block_elements> c;
  for (std::int64_t done = 0; done < count; done += block_elements) {
    const auto size = static_cast<std::size_t>(std::min(block_elements, count - done));
    baseline.read(begin + done, std::span<double>(b.data(), size));
    candidate.read(begin + done, std::span<double>(c.data(), size));
    body(begin + done, std::span<const double>(b.data(), size),
         std::span<const double>(c.data(), size));
  }
}

struct Range {
  double largest = 0;
  std::optional<NonFinite> non_finite = {};
};

[[nodiscard]] inline Range range_of(const NamedTensor& baseline, const NamedTensor& candidate) {
  Range range;
  for_each_piece(baseline, candidate, 0, baseline.size(), [&](std::int64_t first, auto b, auto c) {
    for (std::size_t i = 0; i < b.size(); ++i) {
      if (!std::isfinite(b[i]) || !std::isfinite(c[i])) [[unlikely]] {
        if (!range.non_finite) {
          range.non_finite = {.count = 0,
                              .entry = first + static_cast<std::int64_t>(i),
                              .baseline = b[i],
                              .candidate = c[i]};
        }
        ++range.non_finite->count;
      } else {
        range.largest = std::max({range.largest, std::abs(b[i]), std::abs(c[i])});
      }
    }
  });
  return range;
}

/// Sums of squares of one row or of a whole tensor.
struct Squares {
  double baseline = 0;
  double candidate = 0;
  double difference = 0;
};

/// The squares of each row, of values times `scale`.
[[nodiscard]] inline std::vector<Squares> row_squares(const NamedTensor& baseline,
                                                      const NamedTensor& candidate, double scale) {
  const std::int64_t row_size = baseline.row_size();
  std::vector<Squares> rows(static_cast<std::size_t>(baseline.rows()));
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for_each_piece(baseline, candidate, static_cast<std::int64_t>(r) * row_size, row_size,
                   [&](std::int64_t, auto b, auto c) {
                     const auto square = [scale](double x) { return (x * scale) * (x * scale); };
                     rows[r].baseline += lane_sum(b.size(), [&](auto i) { return square(b[i]); });
                     rows[r].candidate += lane_sum(b.size(), [&](auto i) { return square(c[i]); });
                     // Scaled first: the difference of two large values may overflow.
                     rows[r].difference += lane_sum(b.size(), [&](auto i) {
                       const double d = c[i] * scale - b[i] * scale;
                       return d * d;
                     });
                   });
  }
  return rows;
}

/// 1 - cos as half the squared distance of the directions, which loses no digits where they are close.
[[nodiscard]] inline double direction_distance(const NamedTensor& baseline,
                                               const NamedTensor& candidate, double scale,
                                               const Squares& total) {
  const double b_norm = std::sqrt(total.baseline);
  const double c_norm = std::sqrt(total.candidate);
  double sum = 0;
  for_each_piece(baseline, candidate, 0, baseline.size(), [&](std::int64_t, auto b, auto c) {
    sum += lane_sum(b.size(), [&](auto i) {
      const double d = c[i] * scale / c_norm - b[i] * scale / b_norm;
      return d * d;
    });
  });
  return sum / 2;
}

inline void find_worst_row(const std::vector<Squares>& rows, Difference& result) {
  double largest = 0;
  for (const Squares& row : rows) {
    largest = std::max(largest, row.baseline);
  }
  const double least = small_row * std::sqrt(largest);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].difference > 0) {
      const double against = std::max(std::sqrt(rows[r].baseline), least);
      const double error = std::sqrt(rows[r].difference) / against;
      if (error > result.worst_row) {
        result.worst_row = error;
        result.worst_row_index = static_cast<std::int64_t>(r);
      }
    }
  }
}

}  // namespace detail

/// Measures a floating tensor against another of the same shape; their types may differ.
///
/// shapes    rows are those of the last dimension, the others folded into one; a vector is one row
/// order     double throughout; the elements of a row in pieces of fixed size, then the rows
/// accuracy  relative 1e-13 of each figure, however close the two are: no figure is a difference of
///           rounded ones but norm_ratio, which is good to 1e-15 absolute
/// memory    24 bytes a row, 32 KB
/// cost      three passes over both
/// throws    Error for shapes that differ, an element count that is not the shape's, integers
/// source    spec/head.md 9
[[nodiscard]] inline Difference measure(const NamedTensor& baseline, const NamedTensor& candidate) {
  constexpr const char* where = "numerics::measure";
  for (const NamedTensor* const tensor : {&baseline, &candidate}) {
    tensor->validate(where);
    require(tensor->is_floating(), where, "tensor", tensor->name, "must hold floating numbers");
  }
  require(candidate.shape == baseline.shape, where, "candidate.shape", candidate.name,
          "must be the baseline's");

  Difference result;
  const detail::Range range = detail::range_of(baseline, candidate);
  if (range.non_finite) {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    result = {.relative_l2 = nan,
              .one_minus_cosine = nan,
              .norm_ratio = nan,
              .worst_row = nan,
              .non_finite = range.non_finite};
    return result;
  }
  result.zero = range.largest == 0;
  if (result.zero) {
    return result;
  }

  // Squares of values near the ends of the range would overflow or vanish: all are scaled by the
  // power of two that brings the largest to about 1, which rounds nothing.
  const double scale = std::ldexp(1.0, std::clamp(-std::ilogb(range.largest), -1022, 1022));
  const std::vector<detail::Squares> rows = detail::row_squares(baseline, candidate, scale);
  detail::Squares total;
  for (const detail::Squares& row : rows) {
    total.baseline += row.baseline;
    total.candidate += row.candidate;
    total.difference += row.difference;
  }
  const double b_norm = std::sqrt(total.baseline);
  const double c_norm = std::sqrt(total.candidate);
  const bool one_zero = total.baseline == 0 || total.candidate == 0;
  result.relative_l2 = total.difference == 0 ? 0 : std::sqrt(total.difference) / b_norm;
  result.norm_ratio = c_norm == b_norm ? 0 : std::abs(c_norm - b_norm) / b_norm;
  result.one_minus_cosine =
      one_zero ? 1 : detail::direction_distance(baseline, candidate, scale, total);
  detail::find_worst_row(rows, result);
  return result;
}

}  // namespace heddle::numerics

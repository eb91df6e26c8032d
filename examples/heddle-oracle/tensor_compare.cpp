#include "heddle-oracle/tensor_compare.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <ostream>
#include <span>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/numerics/ulp.hpp"
#include "support/table.hpp"

namespace heddle::oracle {
namespace {

using examples::Dtype;
using examples::Shape;
using examples::TensorView;

constexpr std::int64_t block = 4096;  // elements converted at a time: they stay in the first cache

/// Elements [first, first + count) of a tensor as To.
template <class To>
void convert(const TensorView& tensor, std::int64_t first, std::int64_t count, To* to) {
  examples::with_type(tensor.dtype, [&](auto stored) {
    const auto* const from = tensor.values<decltype(stored)>().data() + first;
    for (std::int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<To>(from[i]);
    }
  });
}

/// The place of an element by its indices: "[3, 1]".
std::string element_text(const Shape& shape, std::int64_t flat) {
  Shape index(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    index[axis] = flat % shape[axis];
    flat /= shape[axis];
  }
  return examples::shape_text(index);
}

std::string number_or_word(double value) {
  return std::isnan(value) ? "nan" : error_text(value);
}

/// The first place where two values cannot be subtracted and are not the same.
struct Mismatch {
  std::int64_t at = -1;
  double a = 0;
  double b = 0;
};

struct FloatSums {
  double max_abs = 0;
  double max_a = 0;
  double max_b = 0;
  double max_ulps = 0;
  Mismatch mismatch;
};

double quotient(double difference, double scale) {
  return difference == 0 ? 0 : difference / scale;
}

/// Calls body(a values, b values, first) for each block of both tensors as doubles.
template <class Body>
void for_each_block(const TensorView& a, const TensorView& b, const Body& body) {
  std::array<double, block> a_values{};
  std::array<double, block> b_values{};
  const std::int64_t count = a.elements();
  for (std::int64_t first = 0; first < count; first += block) {
    const std::int64_t size = std::min(block, count - first);
    convert(a, first, size, a_values.data());
    convert(b, first, size, b_values.data());
    body(std::span<const double>(a_values.data(), static_cast<std::size_t>(size)),
         std::span<const double>(b_values.data(), static_cast<std::size_t>(size)), first);
  }
}

/// Steps between two finite values, both rounded to a floating dtype.
double steps(double a, double b, Dtype dtype) {
  return examples::with_type(dtype, [&](auto stored) {
    using T = decltype(stored);
    if constexpr (numerics::IeeeFloat<T>) {
      return static_cast<double>(numerics::ulp_distance(narrow<T>(a), narrow<T>(b)));
    }
    return std::abs(a - b);
  });
}

/// Of the floating ones among the two; F64 where there is none.
Dtype narrower(Dtype a, Dtype b) {
  if (!examples::is_floating(a)) {
    return examples::is_floating(b) ? b : Dtype::f64;
  }
  return !examples::is_floating(b) || examples::dtype_bytes(a) <= examples::dtype_bytes(b) ? a : b;
}

void compare_floats(const TensorView& a, const TensorView& b, TensorComparison& result) {
  const Dtype dtype = narrower(a.dtype, b.dtype);
  FloatSums sums;
  for_each_block(a, b, [&](auto a_values, auto b_values, std::int64_t first) {
    for (std::size_t i = 0; i < a_values.size(); ++i) {
      const double x = a_values[i];
      const double y = b_values[i];
      if (std::isfinite(x) && std::isfinite(y)) {
        sums.max_abs = std::max(sums.max_abs, std::abs(x - y));
        sums.max_a = std::max(sums.max_a, std::abs(x));
        sums.max_b = std::max(sums.max_b, std::abs(y));
        if (x != y) {
          sums.max_ulps = std::max(sums.max_ulps, steps(x, y, dtype));
        }
      } else if (sums.mismatch.at < 0 && x != y && !(std::isnan(x) && std::isnan(y))) {
        sums.mismatch = {.at = first + static_cast<std::int64_t>(i), .a = x, .b = y};
      }
    }
  });

  // Squares of values near the ends of the range would overflow or vanish: scaled by the largest.
  const double scale = std::max(sums.max_a, sums.max_b);
  double squared_difference = 0;
  double squared_a = 0;
  double squared_b = 0;
  double product = 0;
  if (scale > 0) {
    for_each_block(a, b, [&](auto a_values, auto b_values, std::int64_t) {
      for (std::size_t i = 0; i < a_values.size(); ++i) {
        if (std::isfinite(a_values[i]) && std::isfinite(b_values[i])) {
          const double x = a_values[i] / scale;
          const double y = b_values[i] / scale;
          squared_difference += (x - y) * (x - y);
          squared_a += x * x;
          squared_b += y * y;
          product += x * y;
        }
      }
    });
  }
  result.max_abs = sums.max_abs;
  result.max_rel = quotient(sums.max_abs, sums.max_b);
  result.relative_l2 = std::sqrt(quotient(squared_difference, squared_b));
  if (squared_a > 0 && squared_b > 0) {
    result.cosine = product / (std::sqrt(squared_a) * std::sqrt(squared_b));
  }
  result.max_ulps = sums.max_ulps;
  result.vacuous = sums.max_b == 0;
  if (sums.mismatch.at >= 0) {
    result.failure = "entry " + element_text(a.shape, sums.mismatch.at) + " is " +
                     number_or_word(sums.mismatch.a) + " against " +
                     number_or_word(sums.mismatch.b);
  }
}

/// The first entry where an integer tensor and another tensor differ, told exactly: a double holds no
/// integer beyond 2^53 for certain.
Mismatch first_difference(const TensorView& a, const TensorView& b) {
  const auto differs = [](std::int64_t integer, double value) {
    // 2^63 itself is no I64, and the cast of what is not would be undefined.
    constexpr double beyond = 9223372036854775808.0;
    return !(value >= -beyond && value < beyond) || static_cast<std::int64_t>(value) != integer ||
           value != std::floor(value);
  };
  Mismatch found;
  for (std::int64_t first = 0; first < a.elements() && found.at < 0; first += block) {
    const std::int64_t size = std::min(block, a.elements() - first);
    std::array<std::int64_t, block> a_integers{};
    std::array<std::int64_t, block> b_integers{};
    std::array<double, block> a_values{};
    std::array<double, block> b_values{};
    const bool a_integral = !examples::is_floating(a.dtype);
    const bool b_integral = !examples::is_floating(b.dtype);
    convert(a, first, size, a_values.data());
    convert(b, first, size, b_values.data());
    if (a_integral) {
      convert(a, first, size, a_integers.data());
    }
    if (b_integral) {
      convert(b, first, size, b_integers.data());
    }
    for (std::int64_t i = 0; i < size && found.at < 0; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const bool different = a_integral && b_integral ? a_integers[at] != b_integers[at]
                             : a_integral             ? differs(a_integers[at], b_values[at])
                                                      : differs(b_integers[at], a_values[at]);
      if (different) {
        found = {.at = first + i, .a = a_values[at], .b = b_values[at]};
      }
    }
  }
  return found;
}

/// Exact differences of integers; as doubles those beyond 2^53 would come out 0.
void measure_integers(const TensorView& a, const TensorView& b, TensorComparison& result) {
  std::uint64_t largest = 0;
  const std::vector<std::int64_t> x = a.converted<std::int64_t>();
  const std::vector<std::int64_t> y = b.converted<std::int64_t>();
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto high = static_cast<std::uint64_t>(std::max(x[i], y[i]));
    const auto low = static_cast<std::uint64_t>(std::min(x[i], y[i]));
    largest = std::max(largest, high - low);
  }
  result.max_abs = static_cast<double>(largest);
  result.max_ulps = result.max_abs;
  double scale = 0;
  for (const std::int64_t value : y) {
    scale = std::max(scale, std::abs(static_cast<double>(value)));
  }
  result.max_rel = quotient(result.max_abs, scale);
}

}  // namespace

TensorComparison compare_tensors(const TensorView& a, const TensorView& b, double tolerance) {
  require(tolerance >= 0, "compare_tensors", "tolerance", tolerance, "must be >= 0");
  TensorComparison result;
  result.name = a.name;
  if (a.shape != b.shape) {
    result.measured = false;
    result.failure =
        "shape " + examples::shape_text(a.shape) + " against " + examples::shape_text(b.shape);
    return result;
  }
  const bool a_integral = !examples::is_floating(a.dtype);
  const bool b_integral = !examples::is_floating(b.dtype);
  compare_floats(a, b, result);
  if (a_integral || b_integral) {
    if (a_integral && b_integral) {
      measure_integers(a, b, result);
    }
    const Mismatch found = first_difference(a, b);
    if (found.at >= 0 && result.failure.empty()) {
      result.failure = "integers differ, first at " + element_text(a.shape, found.at);
    }
  }
  if (result.failure.empty() && !(result.max_rel <= tolerance)) {
    result.failure = "max_rel above " + error_text(tolerance);
  }
  result.passed = result.failure.empty();
  return result;
}

std::vector<TensorComparison> compare_files(const examples::TensorFile& a,
                                            const examples::TensorFile& b, double tolerance) {
  std::vector<TensorComparison> comparisons;
  const auto missing = [&](const std::string& name, const std::string& path) {
    TensorComparison comparison;
    comparison.name = name;
    comparison.measured = false;
    comparison.failure = "not in " + path;
    comparisons.push_back(comparison);
  };
  for (const examples::TensorInfo& tensor : a.tensors()) {
    const std::optional<TensorView> expected = b.find(tensor.name);
    if (expected) {
      comparisons.push_back(compare_tensors(a.at(tensor.name), *expected, tolerance));
    } else {
      missing(tensor.name, b.path());
    }
  }
  for (const examples::TensorInfo& tensor : b.tensors()) {
    if (!a.find(tensor.name)) {
      missing(tensor.name, a.path());
    }
  }
  return comparisons;
}

void print_comparisons(const std::vector<TensorComparison>& comparisons, std::ostream& out) {
  examples::Table table(
      std::vector<examples::Table::Column>(7, {"", examples::Table::Align::left}));
  for (const TensorComparison& c : comparisons) {
    const auto figure = [&](const std::string& name, std::optional<double> value, int digits) {
      return name + " " + (c.measured && value ? examples::number_text(*value, digits) : "-");
    };
    std::string verdict = !c.passed ? "FAIL" : c.vacuous ? "vacuous" : "ok";
    verdict += c.failure.empty() ? "" : ": " + c.failure;
    table.add({c.name, figure("max_abs", c.max_abs, 3), figure("max_rel", c.max_rel, 3),
               figure("rel_l2", c.relative_l2, 3), figure("cosine", c.cosine, 6),
               figure("max_ulps", c.max_ulps, 6), verdict});
  }
  table.print(out);
}

examples::Json comparison_json(const TensorComparison& c) {
  using examples::Json;
  const auto figure = [&](std::optional<double> value) {
    // JSON has no infinity.
    return c.measured && value && std::isfinite(*value) ? Json(*value) : Json(nullptr);
  };
  return {{"tensor", c.name},
          {"max_abs", figure(c.max_abs)},
          {"max_rel", figure(c.max_rel)},
          {"relative_l2", figure(c.relative_l2)},
          {"cosine", figure(c.cosine)},
          {"max_ulps", figure(c.max_ulps)},
          {"vacuous", c.vacuous},
          {"pass", c.passed},
          {"failure", c.failure.empty() ? Json(nullptr) : Json(c.failure)}};
}

}  // namespace heddle::oracle

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/workspace.hpp"
#include "heddle/head/chunked_head.hpp"
#include "heddle/head/reference.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle::test {

/// A double that counts what is done with it.
struct Counted {
  double value = 0;

  static inline std::int64_t exps = 0;
  static inline std::int64_t logs = 0;
  static inline std::int64_t products = 0;
  static inline std::int64_t divisions = 0;

  static void reset() { exps = logs = products = divisions = 0; }

  Counted() = default;
  constexpr Counted(double v)
      : value(v) {}  // NOLINT(google-explicit-constructor): a number like any other
  explicit operator double() const { return value; }
  explicit operator float() const { return static_cast<float>(value); }

  Counted& operator+=(Counted b) { return *this = *this + b; }
  Counted& operator-=(Counted b) { return *this = *this - b; }
  Counted& operator*=(Counted b) { return *this = *this * b; }
  friend Counted operator+(Counted a, Counted b) { return {a.value + b.value}; }
  friend Counted operator-(Counted a, Counted b) { return {a.value - b.value}; }
  friend Counted operator*(Counted a, Counted b) {
    ++products;
    return {a.value * b.value};
  }
  friend Counted operator/(Counted a, Counted b) {
    ++divisions;
    return {a.value / b.value};
  }
  friend constexpr Counted operator-(Counted a) { return {-a.value}; }
  friend auto operator<=>(Counted a, Counted b) = default;
  friend Counted exp(Counted a) {
    ++exps;
    return {std::exp(a.value)};
  }
  friend Counted log(Counted a) {
    ++logs;
    return {std::log(a.value)};
  }
};

}  // namespace heddle::test

template <>
struct heddle::ScalarTraits<heddle::test::Counted> {
  using Accumulator = heddle::test::Counted;
};
template <>
class std::numeric_limits<heddle::test::Counted> : public std::numeric_limits<double> {
 public:
  static constexpr heddle::test::Counted infinity() {
    return std::numeric_limits<double>::infinity();
  }
  static constexpr heddle::test::Counted quiet_NaN() {
    return std::numeric_limits<double>::quiet_NaN();
  }
};

namespace heddle::test {

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr head::Mode modes[] = {head::Mode::fused, head::Mode::local, head::Mode::unsharded};

/// The tiers of the head: the same contract, so the same tests.
enum class Tier { reference, chunked };
inline Tier current_tier = Tier::reference;

template <class S, class W, class A>
void run_forward(const head::Dims& dims, const head::Inputs<S, W>& inputs,
                 const head::ScoringOptions& options, const head::Outputs<A>& outputs) {
  if (current_tier == Tier::reference) {
    head::reference::forward(dims, inputs, options, outputs);
  } else {
    Workspace workspace;
    head::forward(dims, inputs, options, outputs, workspace);
  }
}

template <class S, class W, class A>
void run_backward(const head::Dims& dims, const head::Inputs<S, W>& inputs,
                  const head::ScoringOptions& options, const head::Residuals<A>& residuals,
                  const head::OutputCotangents<A>& output_cotangents,
                  const head::Cotangents<A>& cotangents) {
  if (current_tier == Tier::reference) {
    head::reference::backward(dims, inputs, options, residuals, output_cotangents, cotangents);
  } else {
    Workspace workspace;
    head::backward(dims, inputs, options, residuals, output_cotangents, cotangents, workspace);
  }
}

template <class To, class From>
std::vector<To> converted(const std::vector<From>& values) {
  std::vector<To> result;
  for (const From value : values) {
    result.push_back(static_cast<To>(value));
  }
  return result;
}

/// Results of a forward or backward call, poisoned before it.
template <class A>
struct Results {
  std::vector<A> logps, entropy, max, exp_sum, mean;
  std::vector<A> d_hidden, d_weight;
};

/// One call's arrays. The weight is kept as [hidden, vocab] by `weight_at`, stored as `layout` says.
template <class S, class W = S>
struct Problem {
  using A = heddle::AccumulatorOf<S>;

  head::Dims dims;
  std::vector<S> hidden;
  std::vector<W> weight;
  head::WeightLayout layout = head::WeightLayout::dv;
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> active;
  head::ScoringOptions options;
  std::vector<A> d_logps;
  std::vector<A> d_entropy;

  [[nodiscard]] std::int64_t weight_rows() const {
    return layout == head::WeightLayout::dv ? dims.hidden : dims.vocab;
  }
  [[nodiscard]] std::int64_t weight_cols() const {
    return layout == head::WeightLayout::dv ? dims.vocab : dims.hidden;
  }
  [[nodiscard]] double weight_at(std::int64_t d, std::int64_t k) const {
    const std::int64_t at =
        layout == head::WeightLayout::dv ? d * dims.vocab + k : k * dims.hidden + d;
    return static_cast<double>(weight[static_cast<std::size_t>(at)]);
  }
  [[nodiscard]] head::Inputs<S, W> inputs() const {
    return {.hidden = {hidden.data(), dims.tokens, dims.hidden},
            .weight = {weight.data(), weight_rows(), weight_cols()},
            .layout = layout,
            .target_ids = ids,
            .active = active};
  }

  /// The same weight, stored the other way.
  [[nodiscard]] Problem transposed() const {
    Problem other = *this;
    other.layout =
        layout == head::WeightLayout::dv ? head::WeightLayout::vd : head::WeightLayout::dv;
    for (std::int64_t r = 0; r < weight_rows(); ++r) {
      for (std::int64_t c = 0; c < weight_cols(); ++c) {
        other.weight[static_cast<std::size_t>(c * weight_rows() + r)] =
            weight[static_cast<std::size_t>(r * weight_cols() + c)];
      }
    }
    return other;
  }

  [[nodiscard]] Results<A> forward() const {
    const auto tokens = static_cast<std::size_t>(dims.tokens);
    const std::vector<A> poisoned(tokens, A(-77));
    Results<A> out{poisoned, poisoned, poisoned, poisoned, poisoned, {}, {}};
    run_forward(dims, inputs(), options,
                head::Outputs<A>{.logps = out.logps,
                                 .entropy = out.entropy,
                                 .max = out.max,
                                 .exp_sum = out.exp_sum,
                                 .mean = out.mean});
    return out;
  }
  [[nodiscard]] Results<A> backward() const {
    Results<A> out = forward();
    out.d_hidden.assign(hidden.size(), A(nan_value));
    out.d_weight.assign(weight.size(), A(nan_value));
    run_backward(dims, inputs(), options,
                 head::Residuals<A>{.max = out.max, .exp_sum = out.exp_sum, .mean = out.mean},
                 head::OutputCotangents<A>{.d_logps = d_logps, .d_entropy = d_entropy},
                 head::Cotangents<A>{
                     .d_hidden = {out.d_hidden.data(), dims.tokens, dims.hidden},
                     .d_weight = {.values = {out.d_weight.data(), weight_rows(), weight_cols()}}});
    return out;
  }
};

template <class S, class W = S>
Problem<S, W> random_problem(const head::Dims& dims, std::uint64_t seed, double spread = 1.0) {
  using A = heddle::AccumulatorOf<S>;
  Random random(seed);
  Problem<S, W> problem;
  problem.dims = dims;
  problem.hidden = random.normals<S>(dims.tokens * dims.hidden);
  problem.weight = random.normals<W>(dims.hidden * dims.vocab, spread);
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    problem.ids.push_back(static_cast<std::int32_t>(random.integer(0, dims.vocab - 1)));
  }
  problem.d_logps = random.normals<A>(dims.tokens);
  problem.d_entropy = random.normals<A>(dims.tokens);
  problem.options.vocab_tile = 7;
  problem.options.chunk = 16;
  return problem;
}

/// Log-prob and entropy by the definition, in double, of tokens that are active.
struct Truth {
  std::vector<double> logps, entropy;
};

template <class S, class W>
Truth definition(const Problem<S, W>& problem) {
  const double tau = problem.options.temperature == 0 ? 1 : problem.options.temperature;
  Truth truth;
  for (std::int64_t t = 0; t < problem.dims.tokens; ++t) {
    if (!problem.active.empty() && problem.active[static_cast<std::size_t>(t)] == 0) {
      truth.logps.push_back(0);
      truth.entropy.push_back(0);
      continue;
    }
    std::vector<double> x;
    for (std::int64_t k = 0; k < problem.dims.vocab; ++k) {
      double z = 0;
      for (std::int64_t d = 0; d < problem.dims.hidden; ++d) {
        const auto at = static_cast<std::size_t>(t * problem.dims.hidden + d);
        z += static_cast<double>(problem.hidden[at]) * problem.weight_at(d, k);
      }
      x.push_back(z / tau);
    }
    const double largest = *std::ranges::max_element(x);
    double partition = 0;
    for (const double value : x) {
      partition += std::exp(value - largest);
    }
    double entropy = 0;
    for (const double value : x) {
      const double log_p = value - largest - std::log(partition);
      entropy -= std::exp(log_p) * log_p;
    }
    const auto target = static_cast<std::size_t>(problem.ids[static_cast<std::size_t>(t)]);
    truth.logps.push_back(x[target] - largest - std::log(partition));
    truth.entropy.push_back(entropy);
  }
  return truth;
}

/// What d_logps and d_entropy make a scalar of, by the definition.
template <class S, class W>
double weighed(const Problem<S, W>& problem) {
  const Truth truth = definition(problem);
  double sum = 0;
  for (std::size_t t = 0; t < truth.logps.size(); ++t) {
    sum += static_cast<double>(problem.d_logps[t]) * truth.logps[t];
    if (!problem.d_entropy.empty()) {
      sum += static_cast<double>(problem.d_entropy[t]) * truth.entropy[t];
    }
  }
  return sum;
}

/// The row x itself as logits: hidden [1, 1] = 1, weight [1, V] = x, so that d_weight is d_logits.
template <class S>
Problem<S> row_problem(const std::vector<double>& x, std::int32_t id) {
  Problem<S> problem;
  problem.dims = {.tokens = 1, .hidden = 1, .vocab = static_cast<std::int64_t>(x.size())};
  problem.hidden = {S(1)};
  problem.weight = converted<S>(x);
  problem.ids = {id};
  problem.d_logps = {1};
  return problem;
}

/// NaN meets NaN; anything else, the sign of a zero aside, must be equal.
inline ::testing::AssertionResult equal(const std::vector<float>& actual,
                                        const std::vector<double>& expected,
                                        double tolerance = 1e-6) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure() << "sizes";
  }
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const auto a = static_cast<double>(actual[i]);
    const bool same = std::isnan(expected[i])
                          ? std::isnan(a)
                          : a == expected[i] || std::abs(a - expected[i]) <= tolerance;
    if (!same) {
      return ::testing::AssertionFailure()
             << "entry " << i << ": " << a << " against " << expected[i];
    }
  }
  return ::testing::AssertionSuccess();
}

/// The matrix with `gap` more elements to a row, NaN in them, off the alignment of a vector.
struct Padded {
  std::vector<float> storage;
  std::int64_t rows, cols, stride;

  Padded(const std::vector<float>& values, std::int64_t row_count, std::int64_t col_count)
      : storage(static_cast<std::size_t>(row_count * (col_count + 3) + 1),
                static_cast<float>(nan_value)),
        rows(row_count),
        cols(col_count),
        stride(col_count + 3) {
    for (std::int64_t r = 0; r < rows; ++r) {
      std::copy_n(values.begin() + r * cols, cols, storage.begin() + 1 + r * stride);
    }
  }
  [[nodiscard]] heddle::MatrixView<float> view() {
    return {storage.data() + 1, rows, cols, stride};
  }
  [[nodiscard]] std::vector<float> dense() const {
    std::vector<float> values;
    for (std::int64_t r = 0; r < rows; ++r) {
      values.insert(values.end(), storage.begin() + 1 + r * stride,
                    storage.begin() + 1 + r * stride + cols);
    }
    return values;
  }
  [[nodiscard]] std::int64_t nans_in_gaps() const {
    return std::ranges::count_if(storage, [](float value) { return std::isnan(value); });
  }
};

}  // namespace heddle::test

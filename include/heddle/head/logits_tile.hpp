#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/head/detail/tile_math.hpp"
#include "heddle/head/options.hpp"

/// One row's logits, a piece of columns at a time: statistics that build up over the pieces, and the
/// cotangent of a piece. Both take one exponential a logit.
namespace heddle::head {

/// What the columns seen so far say of a row.
///
/// specials  the initial value is that of no columns. A +inf or a NaN decides the row: the sums mean
///           nothing then
template <Accumulator A>
struct RowStats {
  A max = -detail::infinity<A>;          ///< over x that are not NaN
  detail::StatsSum<A> exp_sum = 0;       ///< sum of e = exp(x - max)
  detail::StatsSum<A> weighted_sum = 0;  ///< sum of e (x - max)
  A target = detail::quiet_nan<A>;       ///< x of the target, NaN until it was met
  bool any_nan = false;
  bool any_negative_inf = false;  ///< kept under EntropyPolicy::reference alone
};

/// A row's results.
template <Accumulator A>
struct RowScore {
  A logp = 0;
  A entropy = 0;
  A max = 0;
  A exp_sum = 0;
  A mean = 0;
};

namespace detail {

/// Brings sums to a larger maximum: e shrinks by exp(max - larger), and every x - max by the difference.
template <Accumulator A>
void raise_max(RowStats<A>& stats, A larger) {
  using std::exp;
  // Else there is nothing to rescale, and -inf - larger is not to be formed.
  if (stats.exp_sum != 0) {
    const StatsSum<A> delta = StatsSum<A>(stats.max) - StatsSum<A>(larger);
    const StatsSum<A> alpha = exp(delta);
    stats.weighted_sum = alpha * (stats.weighted_sum + delta * stats.exp_sum);
    stats.exp_sum = alpha * stats.exp_sum;
  }
  stats.max = larger;
}

template <Accumulator A>
[[nodiscard]] bool is_nan(A x) {
  return x != x;
}

/// Adds columns whose x are ready and whose largest is known.
template <Accumulator A>
void add_prepared(std::span<const A> x, A largest, EntropyPolicy policy, RowStats<A>& stats) {
  if (policy == EntropyPolicy::reference) {
    stats.any_negative_inf =
        stats.any_negative_inf || std::ranges::any_of(x, [](A v) { return v == -infinity<A>; });
  }
  const A max = std::max(stats.max, largest);
  if (max == infinity<A> || max == -infinity<A>) {
    stats.max = max;
    stats.any_nan = stats.any_nan || std::ranges::any_of(x, [](A v) { return is_nan(v); });
    return;
  }
  if (stats.max < max) {
    raise_max(stats, max);
  }
  const auto count = static_cast<std::int64_t>(x.size());
  for (std::int64_t k = 0; k < count; k += float_sum_columns) {
    const auto sums =
        TileMath<A>::exp_sums(x.data() + k, std::min(float_sum_columns, count - k), max);
    stats.exp_sum += StatsSum<A>(sums.exp_sum);
    stats.weighted_sum += StatsSum<A>(sums.weighted_sum);
  }
}

/// add_logits that also keeps the rounded logits, where `rounded` is not null.
template <Accumulator A>
void add_and_keep(std::span<A> logits, std::int64_t first_column, std::int64_t target_column,
                  A divisor, LogitsDtype dtype, EntropyPolicy policy, bfloat16* rounded,
                  RowStats<A>& stats) {
  const auto count = static_cast<std::int64_t>(logits.size());
  const A largest = TileMath<A>::prepare(logits.data(), count, dtype, rounded, divisor);
  add_prepared(std::span<const A>(logits), largest, policy, stats);
  if (target_column >= first_column && target_column < first_column + count) {
    stats.target = logits[static_cast<std::size_t>(target_column - first_column)];
  }
}

}  // namespace detail

/// Adds a piece of a row: its logits as the product left them.
///   x = logits rounded to their dtype / divisor
///
/// shapes    logits: columns [first_column, first_column + logits.size) of the row
/// dtypes    A; in float, sums of at most 1,024 columns are formed in 16 lanes of float, those of pieces
///           in double
/// writes    stats; logits become x, in place
/// specials  target_column: -1 for a target outside the vocabulary. The table of specials of
///           finish_row holds for every cut into pieces
/// order     bits depend on the pieces and their order, on no path and no alignment
/// cost      an exponential a logit, and one where the piece raises the maximum of columns before it
/// source    spec/head.md 3.2; online softmax of Milakov and Gimelshein
template <Accumulator A>
void add_logits(std::span<A> logits, std::int64_t first_column, std::int64_t target_column,
                A divisor, LogitsDtype dtype, EntropyPolicy policy, RowStats<A>& stats) {
  detail::add_and_keep(logits, first_column, target_column, divisor, dtype, policy, nullptr, stats);
}

/// Statistics of a's columns and then b's. The owner's target is copied: a sum over ranks would be
/// 0 * inf.
///
/// order     associative up to rounding: merge in column order
/// cost      at most one exponential
/// source    spec/head.md 6
template <Accumulator A>
[[nodiscard]] RowStats<A> merge(RowStats<A> a, RowStats<A> b) {
  RowStats<A> both;
  both.any_nan = a.any_nan || b.any_nan;
  both.any_negative_inf = a.any_negative_inf || b.any_negative_inf;
  both.target = detail::is_nan(a.target) ? b.target : a.target;
  both.max = std::max(a.max, b.max);
  if (both.max != detail::infinity<A>) {  // else the sums mean nothing
    if (a.max < both.max) {
      detail::raise_max(a, both.max);
    }
    if (b.max < both.max) {
      detail::raise_max(b, both.max);
    }
    both.exp_sum = a.exp_sum + b.exp_sum;
    both.weighted_sum = a.weighted_sum + b.weighted_sum;
  }
  return both;
}

namespace detail {

template <Accumulator A>
[[nodiscard]] A log_prob(A target, A max, A log_sum, LogpForm form) {
  return form == LogpForm::shifted ? (target - max) - log_sum : target - (log_sum + max);
}

}  // namespace detail

/// A row's results once all its columns are in.
///
/// specials  a row with
///             NaN: max 0, exp_sum NaN, logp and entropy NaN
///             a +inf: max 0, exp_sum +inf, logp -inf (NaN where the target is +inf), entropy NaN
///             no finite logit, all -inf: max 0, exp_sum 0, logp and entropy NaN
///             some -inf: logp finite (-inf at a target of -inf), entropy as EntropyPolicy says
/// cost      a logarithm and a division
/// source    spec/head.md 3.3
template <Accumulator A>
[[nodiscard]] RowScore<A> finish_row(const RowStats<A>& stats, LogpForm form,
                                     EntropyPolicy policy) {
  using std::log;
  using Sum = detail::StatsSum<A>;
  A max = 0;
  Sum exp_sum = 0;
  Sum mean = detail::quiet_nan<Sum>;
  if (stats.any_nan || detail::is_nan(stats.exp_sum)) {
    exp_sum = detail::quiet_nan<Sum>;
  } else if (stats.max == detail::infinity<A>) {
    exp_sum = detail::infinity<Sum>;
  } else if (stats.max != -detail::infinity<A>) {
    max = stats.max + A(0);  // one zero: which of -0 and +0 was met first is nobody's business
    exp_sum = stats.exp_sum;
    if (!stats.any_negative_inf || policy == EntropyPolicy::xlogx) {
      mean = stats.weighted_sum / stats.exp_sum;
    }
  }
  const Sum log_sum = log(exp_sum);
  return {.logp = detail::log_prob(stats.target, max, static_cast<A>(log_sum), form),
          .entropy = static_cast<A>(log_sum - mean),
          .max = max,
          .exp_sum = static_cast<A>(exp_sum),
          .mean = static_cast<A>(mean)};
}

/// One row of a backward call: what its outputs' cotangents and its residuals come to.
template <Accumulator A>
struct RowCotangent {
  A d_logp = 0;
  A max = 0;
  A mean = 0;
  A kappa = 0;           ///< -d_logp / exp_sum
  A lambda = 0;          ///< -d_entropy / exp_sum
  bool entropy = false;  ///< d_entropy is not 0
  std::int64_t target_column = -1;
};

/// cost      a division, two with a cotangent of the entropy
template <Accumulator A>
[[nodiscard]] RowCotangent<A> row_cotangent(A d_logp, A d_entropy, A max, A exp_sum, A mean,
                                            std::int64_t target_column) {
  const bool entropy = d_entropy != A(0);
  return {.d_logp = d_logp,
          .max = max,
          .mean = mean,
          .kappa = -d_logp / exp_sum,
          .lambda = entropy ? -d_entropy / exp_sum : A(0),
          .entropy = entropy,
          .target_column = target_column};
}

/// How the x of a cotangent are given.
enum class LogitsState {
  tempered,  ///< x itself, as add_logits leaves it
  rounded,   ///< logits rounded to their dtype, before the temperature
};

/// The cotangent of a piece of a row's logits.
///   d[k] = (e (kappa + lambda (u - mean)) + d_logp [k = target]) / divisor, u = x - max, e = exp(u)
///
/// shapes    x, d: columns [first_column, first_column + x.size) of the row
/// dtypes    T: A, or bfloat16 under float and LogitsDtype::bf16; d is rounded once, at the end
/// writes    all of d
/// alias     d may be x
/// specials  without a cotangent of the entropy lambda and mean are not read
/// order     element by element: bits depend on no cut
/// cost      an exponential a logit
/// source    spec/head.md 4, 5
template <class T, Accumulator A>
void logits_cotangent(std::span<const T> x, std::int64_t first_column, LogitsState state,
                      LogitsDtype dtype, A divisor, const RowCotangent<A>& row, std::span<T> d) {
  detail::CotangentTerms<A> terms;
  terms.max = row.max;
  terms.kappa = row.kappa;
  terms.lambda = row.lambda;
  terms.mean = row.mean;
  terms.divisor = divisor;
  terms.add = row.d_logp;
  terms.divide_in = state == LogitsState::rounded && divisor != A(1);
  terms.entropy = row.entropy;
  const auto pass = [&](std::int64_t first, std::int64_t last) {
    if (first < last) {
      detail::TileMath<A>::cotangent(x.data() + first, d.data() + first, last - first, dtype,
                                     terms);
    }
  };
  const auto count = static_cast<std::int64_t>(x.size());
  const std::int64_t hit = row.target_column - first_column;
  if (hit < 0 || hit >= count || row.target_column < 0) {
    pass(0, count);
    return;
  }
  pass(0, hit);
  pass(hit + 1, count);
  terms.one_hot = true;
  pass(hit, hit + 1);
}

}  // namespace heddle::head

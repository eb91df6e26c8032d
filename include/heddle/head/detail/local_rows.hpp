#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "heddle/core/scalar.hpp"
#include "heddle/head/detail/logits_pass.hpp"
#include "heddle/head/detail/tile_math.hpp"
#include "heddle/head/logits_tile.hpp"
#include "heddle/head/options.hpp"

/// Log-softmax and a second softmax on whole rows, as trainers have them: the baseline that takes three
/// exponentials a logit forward and two back.
namespace heddle::head::detail {

/// The maximum, 0 where it is not finite, and the sum of exp(x - max): of ranks' maxima and of ranks'
/// sums.
template <Accumulator A>
struct RowExpSum {
  A max = 0;
  StatsSum<A> sum = 0;
};

/// `largest`: of the x that are not NaN.
template <Accumulator A>
[[nodiscard]] RowExpSum<A> row_exp_sum(std::span<const A> x, A largest, std::int64_t shards) {
  RowExpSum<A> row;
  row.max = largest == infinity<A> || largest == -infinity<A> ? A(0) : largest + A(0);
  for_each_shard(static_cast<std::int64_t>(x.size()), shards, [&](Columns held) {
    StatsSum<A> rank_sum = 0;
    for_each_tile(held, held.first, float_sum_columns, [&](Columns part) {
      rank_sum +=
          StatsSum<A>(TileMath<A>::exp_sums(x.data() + part.first, part.count(), row.max).exp_sum);
    });
    row.sum += rank_sum;
  });
  row.max = is_nan(row.sum) ? A(0) : row.max;
  return row;
}

/// Entropy from the log-probs' own softmax: log-softmax forms its exp-sum again.
template <Accumulator A>
[[nodiscard]] StatsSum<A> local_entropy(std::span<const A> x, A largest, std::int64_t shards,
                                        EntropyPolicy policy) {
  using std::log;
  const RowExpSum<A> total = row_exp_sum(x, largest, shards);
  const A log_sum = static_cast<A>(log(total.sum));
  StatsSum<A> entropy = 0;
  for_each_shard(static_cast<std::int64_t>(x.size()), shards, [&](Columns held) {
    StatsSum<A> rank_sum = 0;
    for_each_tile(held, held.first, float_sum_columns, [&](Columns part) {
      rank_sum -= StatsSum<A>(TileMath<A>::log_prob_sum(
          x.data() + part.first, part.count(), total.max, log_sum, policy == EntropyPolicy::xlogx));
    });
    entropy += rank_sum;
  });
  return entropy;
}

/// x: tempered logits of the whole row.
template <Accumulator A>
[[nodiscard]] RowScore<A> local_score(std::span<const A> x, A largest, std::int64_t target,
                                      std::int64_t shards, const ScoringOptions& options,
                                      bool wants_entropy) {
  using std::log;
  const RowExpSum<A> total = row_exp_sum(x, largest, shards);
  const StatsSum<A> log_sum = log(total.sum);
  const A target_logit = target < 0 ? quiet_nan<A> : x[static_cast<std::size_t>(target)];
  RowScore<A> score{
      .logp = log_prob(target_logit, total.max, static_cast<A>(log_sum), options.logp_form),
      .max = total.max,
      .exp_sum = static_cast<A>(total.sum)};
  if (wants_entropy) {
    const StatsSum<A> entropy = local_entropy(x, largest, shards, options.entropy_policy);
    score.entropy = static_cast<A>(entropy);
    score.mean = static_cast<A>(log_sum - entropy);
  }
  return score;
}

/// The derivatives of gather(log_softmax(x)) and of -sum exp(l) l, l = log_softmax(x), one after the
/// other: x becomes its cotangent, rounded to the logits dtype.
template <Accumulator A>
void local_row_cotangent(std::span<A> x, A largest, std::int64_t target, A d_logp, A d_entropy,
                         std::int64_t shards, A divisor, const ScoringOptions& options) {
  using std::exp;
  using std::log;
  const RowExpSum<A> total = row_exp_sum(std::span<const A>(x), largest, shards);
  const A log_sum = static_cast<A>(log(total.sum));
  const bool drop = options.entropy_policy == EntropyPolicy::xlogx;
  CotangentTerms<A> terms;
  terms.max = total.max;
  terms.kappa = -d_logp / static_cast<A>(total.sum);
  terms.divisor = divisor;
  terms.add = d_logp;
  terms.entropy = d_entropy != A(0);
  terms.lambda = d_entropy;
  if (terms.entropy) {
    // The sum of -d_entropy p (l + 1); p sums to exp_sum exp(-log_sum), 1 up to rounding.
    StatsSum<A> log_probs = 0;
    for_each_tile({0, static_cast<std::int64_t>(x.size())}, 0, float_sum_columns,
                  [&](Columns part) {
                    log_probs += StatsSum<A>(TileMath<A>::log_prob_sum(
                        x.data() + part.first, part.count(), total.max, log_sum, drop));
                  });
    const StatsSum<A> probs = total.sum * exp(-StatsSum<A>(log_sum));
    terms.mean = static_cast<A>(-StatsSum<A>(d_entropy) * (log_probs + probs));
  }
  const auto pass = [&](std::int64_t first, std::int64_t last) {
    if (first < last) {
      TileMath<A>::local_cotangent(x.data() + first, last - first, options.logits_dtype, terms,
                                   log_sum, drop);
    }
  };
  const auto vocab = static_cast<std::int64_t>(x.size());
  if (target < 0) {
    pass(0, vocab);
    return;
  }
  pass(0, target);
  pass(target + 1, vocab);
  terms.one_hot = true;
  pass(target, target + 1);
}

}  // namespace heddle::head::detail

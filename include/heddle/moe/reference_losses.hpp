#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/reference_router.hpp"

namespace heddle::moe::reference {

/// What the auxiliary losses of the router take from a set of tokens: a sequence, a batch. Sums
/// over chunks or shards of it add up, and the losses are formed from the totals; a mean of the
/// chunks' losses would be another function.
template <Accumulator A>
struct RouterLossSums {
  std::vector<std::int64_t>
      counts;                    ///< [E] slots that chose the expert, before drops; empty: none yet
  std::vector<A> probabilities;  ///< [E] sum over tokens of softmax(l)_e over all E
  A squared_logsumexp = A(0);    ///< sum over tokens of lse(l)^2
  std::int64_t tokens = 0;       ///< the tokens taken
};

/// The constant in front of the balance loss, named by what the loss is under uniform routing.
enum class BalanceScale {
  top_k,  ///< E * sum_e f_e P_e, f_e the slots of e a token: K
  one,    ///< the same over K: 1
};

/// What the balance loss is scaled by.
struct BalanceLossOptions {
  double weight = 0;  ///< lambda
  BalanceScale scale = BalanceScale::top_k;
  std::int64_t sequences = 1;  ///< the loss is a mean over so many sums

  /// Throws Error for a weight that is not finite, an unknown scale, sequences < 1.
  void validate(std::string_view where) const {
    require(std::isfinite(weight), where, "options.weight", weight, "must be finite");
    require(scale == BalanceScale::top_k || scale == BalanceScale::one, where, "options.scale",
            scale, "must be top_k or one");
    require(sequences >= 1, where, "options.sequences", sequences, "must be >= 1");
  }
};

/// What the z-loss is scaled by.
struct ZLossOptions {
  double weight = 0;  ///< lambda_z

  /// Throws Error for a weight that is not finite.
  void validate(std::string_view where) const {
    require(std::isfinite(weight), where, "options.weight", weight, "must be finite");
  }
};

namespace detail {

inline constexpr std::int64_t loss_grain = 256;  // tokens folded at a time

template <Accumulator A>
struct Logsumexp {
  A max;
  A sum;

  [[nodiscard]] A value() const {
    using std::log;
    return max + log(sum);
  }
  template <Storage S>
  [[nodiscard]] A probability(S logit) const {
    using std::exp;
    return exp(ranked<A>(logit) - max) / sum;
  }
};

template <Accumulator A, Storage S>
[[nodiscard]] Logsumexp<A> logsumexp(std::span<const S> logits) {
  using std::exp;
  Logsumexp<A> result{-std::numeric_limits<A>::infinity(), A(0)};
  for (const S logit : logits) {
    result.max = std::max(result.max, ranked<A>(logit));
  }
  for (const S logit : logits) {
    result.sum += exp(ranked<A>(logit) - result.max);
  }
  return result;
}

/// The logsumexp of a token's row, or nothing for a token that the losses leave out: an unrouted
/// one, and one whose logsumexp is not finite.
template <Storage S>
[[nodiscard]] std::optional<Logsumexp<AccumulatorOf<S>>> loss_row(
    ConstMatrixView<S> router_logits, ConstMatrixView<std::int32_t> expert_ids, std::int64_t t) {
  using A = AccumulatorOf<S>;
  using std::isfinite;
  if (expert_ids(t, 0) == unrouted) {
    return std::nullopt;
  }
  const Logsumexp<A> row = logsumexp<A>(router_logits.row(t));
  return isfinite(row.max) ? std::optional<Logsumexp<A>>(row) : std::nullopt;
}

template <Storage S>
void check_loss_arguments(std::string_view where, const RouterDims& dims,
                          ConstMatrixView<S> router_logits,
                          ConstMatrixView<std::int32_t> expert_ids) {
  dims.validate(where);
  require_shape(where, "router_logits", router_logits, "dims.tokens", dims.tokens, "dims.experts",
                dims.experts);
  check_expert_ids(where, expert_ids, dims);
}

template <Accumulator A>
void check_loss_sums(std::string_view where, const RouterLossSums<A>& sums, std::int64_t experts) {
  require_equal(where, "sums.counts.size", sums.counts.size(), "dims.experts", experts);
  require_equal(where, "sums.probabilities.size", sums.probabilities.size(), "dims.experts",
                experts);
}

/// weight * E / (sequences * tokens^2), over K where the scale says so: what counts_e *
/// probabilities_e is multiplied by.
template <Accumulator A>
[[nodiscard]] A balance_factor(const RouterDims& dims, std::int64_t tokens,
                               const BalanceLossOptions& options) {
  if (tokens == 0) {
    return A(0);
  }
  const double share = options.scale == BalanceScale::one ? static_cast<double>(dims.top_k) : 1.0;
  const auto count = static_cast<double>(tokens);
  return static_cast<A>(options.weight * static_cast<double>(dims.experts) /
                        (static_cast<double>(options.sequences) * share * count * count));
}

}  // namespace detail

/// Adds the tokens of one chunk to the sums.
/// shapes    router_logits [T,E]; expert_ids [T,K] as routed, replayed ones included
/// writes    adds to sums; sums of no experts yet become [E]
/// specials  unrouted tokens are not read and not counted; a row without a finite logsumexp (+inf,
///           or nothing above -inf) is left out in the same way. NaN counts as -inf, as in route
/// order     256 tokens at a time, folded in token order; same bits for any thread count
/// throws    Error for bad dims, other shapes, ids that are neither experts nor -1, sums of other E
/// source    spec/moe.md 8
template <Storage S>
void add_router_loss_sums(const RouterDims& dims, ConstMatrixView<S> router_logits,
                          ConstMatrixView<std::int32_t> expert_ids,
                          RouterLossSums<AccumulatorOf<S>>& sums) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::reference::add_router_loss_sums";
  detail::check_loss_arguments(where, dims, router_logits, expert_ids);
  const auto experts = static_cast<std::size_t>(dims.experts);
  const RouterLossSums<A> nothing{std::vector<std::int64_t>(experts, 0),
                                  std::vector<A>(experts, A(0)), A(0), 0};
  if (sums.counts.empty() && sums.probabilities.empty()) {
    sums = nothing;
  }
  detail::check_loss_sums(where, sums, dims.experts);

  const std::int64_t blocks = (dims.tokens + detail::loss_grain - 1) / detail::loss_grain;
  std::vector<RouterLossSums<A>> partial(static_cast<std::size_t>(blocks), nothing);
  parallel_blocks(dims.tokens, detail::loss_grain, [&](std::int64_t first, std::int64_t last) {
    RouterLossSums<A>& block = partial[static_cast<std::size_t>(first / detail::loss_grain)];
    for (std::int64_t t = first; t < last; ++t) {
      const auto row = detail::loss_row(router_logits, expert_ids, t);
      if (!row) {
        continue;
      }
      for (const std::int32_t id : expert_ids.row(t)) {
        ++block.counts[static_cast<std::size_t>(id)];
      }
      for (std::size_t e = 0; e < experts; ++e) {
        block.probabilities[e] += row->probability(router_logits.row(t)[e]);
      }
      const A value = row->value();
      block.squared_logsumexp += value * value;
      ++block.tokens;
    }
  });
  for (const RouterLossSums<A>& block : partial) {
    for (std::size_t e = 0; e < experts; ++e) {
      sums.counts[e] += block.counts[e];
      sums.probabilities[e] += block.probabilities[e];
    }
    sums.squared_logsumexp += block.squared_logsumexp;
    sums.tokens += block.tokens;
  }
}

/// The load-balance loss of one set of tokens.
///   weight / sequences * E * sum_e f_e P_e
///   f_e = counts_e / tokens,  P_e = probabilities_e / tokens
/// specials  no tokens: 0
/// throws    Error for bad dims or options, sums of another E
/// source    spec/moe.md 8; BalanceScale::top_k as maxtext, BalanceScale::one as megablocks
template <Accumulator A>
[[nodiscard]] A balance_loss(const RouterDims& dims, const RouterLossSums<A>& sums,
                             const BalanceLossOptions& options) {
  constexpr std::string_view where = "moe::reference::balance_loss";
  dims.validate(where);
  detail::check_loss_sums(where, sums, dims.experts);
  options.validate(where);
  A total = A(0);
  for (std::size_t e = 0; e < sums.counts.size(); ++e) {
    total += static_cast<A>(sums.counts[e]) * sums.probabilities[e];
  }
  return detail::balance_factor<A>(dims, sums.tokens, options) * total;
}

/// Its gradient with respect to the logits of one chunk; the counts are constants.
///   d_l[t,j] += p_tj (c_j - sum_e c_e p_te),  c_e = weight / sequences * E * f_e / tokens
/// shapes    d_router_logits [T,E]; sums of all chunks together
/// writes    adds to d_router_logits, at the tokens that the sums took
/// throws    Error for bad dims or options, other shapes, sums of another E
/// source    spec/moe.md 8
template <Storage S>
void balance_loss_backward(const RouterDims& dims, ConstMatrixView<S> router_logits,
                           ConstMatrixView<std::int32_t> expert_ids,
                           const RouterLossSums<AccumulatorOf<S>>& sums,
                           const BalanceLossOptions& options,
                           MatrixView<AccumulatorOf<S>> d_router_logits) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::reference::balance_loss_backward";
  detail::check_loss_arguments(where, dims, router_logits, expert_ids);
  detail::check_loss_sums(where, sums, dims.experts);
  options.validate(where);
  require_shape(where, "d_router_logits", d_router_logits, "dims.tokens", dims.tokens,
                "dims.experts", dims.experts);
  const A factor = detail::balance_factor<A>(dims, sums.tokens, options);
  const auto cost = [&](std::size_t e) { return factor * static_cast<A>(sums.counts[e]); };
  parallel_blocks(dims.tokens, detail::loss_grain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      const auto row = detail::loss_row(router_logits, expert_ids, t);
      if (!row) {
        continue;
      }
      const std::span<const S> logits = router_logits.row(t);
      A mean = A(0);
      for (std::size_t e = 0; e < logits.size(); ++e) {
        mean += cost(e) * row->probability(logits[e]);
      }
      for (std::size_t e = 0; e < logits.size(); ++e) {
        d_router_logits.row(t)[e] += row->probability(logits[e]) * (cost(e) - mean);
      }
    }
  });
}

/// The router z-loss: weight times the mean over tokens of lse(l)^2.
/// specials  no tokens: 0
/// throws    Error for bad options
/// source    spec/moe.md 8, as megablocks
template <Accumulator A>
[[nodiscard]] A z_loss(const RouterLossSums<A>& sums, const ZLossOptions& options) {
  options.validate("moe::reference::z_loss");
  return sums.tokens == 0 ? A(0)
                          : static_cast<A>(options.weight) * sums.squared_logsumexp /
                                static_cast<A>(sums.tokens);
}

/// Its gradient with respect to the logits of one chunk.
///   d_l[t,j] += 2 weight lse_t p_tj / tokens
/// shapes    d_router_logits [T,E]; sums of all chunks together
/// writes    adds to d_router_logits, at the tokens that the sums took
/// throws    Error for bad dims or options, other shapes
/// source    spec/moe.md 8
template <Storage S>
void z_loss_backward(const RouterDims& dims, ConstMatrixView<S> router_logits,
                     ConstMatrixView<std::int32_t> expert_ids,
                     const RouterLossSums<AccumulatorOf<S>>& sums, const ZLossOptions& options,
                     MatrixView<AccumulatorOf<S>> d_router_logits) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::reference::z_loss_backward";
  detail::check_loss_arguments(where, dims, router_logits, expert_ids);
  options.validate(where);
  require_shape(where, "d_router_logits", d_router_logits, "dims.tokens", dims.tokens,
                "dims.experts", dims.experts);
  const A factor =
      sums.tokens == 0 ? A(0) : A(2) * static_cast<A>(options.weight) / static_cast<A>(sums.tokens);
  parallel_blocks(dims.tokens, detail::loss_grain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      const auto row = detail::loss_row(router_logits, expert_ids, t);
      if (!row) {
        continue;
      }
      const std::span<const S> logits = router_logits.row(t);
      const A scale = factor * row->value();
      for (std::size_t e = 0; e < logits.size(); ++e) {
        d_router_logits.row(t)[e] += scale * row->probability(logits[e]);
      }
    }
  });
}

}  // namespace heddle::moe::reference

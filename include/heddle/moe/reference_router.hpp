#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"

namespace heddle::moe::reference {

/// What routing reads.
template <Storage S>
struct RouterInputs {
  ConstMatrixView<S> router_logits;  ///< [T,E]
  // Null or empty where there is nothing to replay, or no padding.
  ConstMatrixView<std::int32_t> forced_ids = {};   ///< [T,K], -1 = not replayed
  std::span<const std::int32_t> segment_ids = {};  ///< [T], 0 = padding
};

/// What routing writes, every element.
template <Accumulator A>
struct RouterOutputs {
  MatrixView<std::int32_t> expert_ids;  ///< [T,K], `unrouted` in every column of excluded padding
  MatrixView<A> expert_weights;         ///< [T,K], 0 there
};

/// What routing did with its tokens.
struct RouterReport {
  std::int64_t padding_tokens = 0;    ///< routed nowhere
  std::int64_t forced_tokens = 0;     ///< replayed
  std::int64_t automatic_tokens = 0;  ///< chosen by their logits
  std::int64_t chosen_rows = 0;       ///< rows whose K best were looked for
  std::int64_t nonfinite_rows = 0;    ///< routed rows whose weights come from the non-finite rule
  double replay_mismatch =
      0;  ///< mean over replayed tokens of the share of their ids that the router
          ///< would not have chosen; 0 unless measured
};

namespace detail {

/// A logit as the router orders it: NaN ranks with -inf, below everything.
template <Accumulator A, Storage S>
[[nodiscard]] A ranked(S logit) {
  const A value = widen<A>(logit);
  return value != value ? -std::numeric_limits<A>::infinity() : value;
}

[[nodiscard]] inline bool contains(std::span<const std::int32_t> ids, std::int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

/// The K best of a row, best first. `>` keeps the lowest id of a tie, and has -0 equal +0; what is
/// taken is left out by its id, so that ids stay distinct where all that remains is -inf.
template <Accumulator A, Storage S>
void choose(std::span<const S> logits, std::span<std::int32_t> chosen) {
  for (std::size_t k = 0; k < chosen.size(); ++k) {
    const std::span<const std::int32_t> taken = chosen.first(k);
    std::int32_t best = -1;
    for (std::size_t e = 0; e < logits.size(); ++e) {
      const auto id = static_cast<std::int32_t>(e);
      if (!contains(taken, id) &&
          (best < 0 || ranked<A>(logits[e]) > ranked<A>(logits[static_cast<std::size_t>(best)]))) {
        best = id;
      }
    }
    chosen[k] = best;
  }
}

/// All K ids are experts and no two the same.
[[nodiscard]] inline bool replayable(std::span<const std::int32_t> ids, std::int64_t experts) {
  for (std::size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] < 0 || ids[k] >= experts || contains(ids.first(k), ids[k])) {
      return false;
    }
  }
  return true;
}

/// The softmax that a row's weights are read from: weight = exp(logit - max) / sum.
template <Accumulator A>
struct RowSoftmax {
  A max = -std::numeric_limits<A>::infinity();  ///< over the chosen, or over all
  A sum = A(0);
  A chosen_max = -std::numeric_limits<A>::infinity();  ///< over the chosen
  std::int64_t chosen_infinities = 0;                  ///< chosen logits that are +inf

  /// False where the softmax has no value, or one that no logit moves: the non-finite rule holds.
  [[nodiscard]] bool is_finite() const {
    using std::isfinite;
    return isfinite(max) && isfinite(chosen_max);
  }
};

template <Accumulator A, Storage S>
[[nodiscard]] RowSoftmax<A> row_softmax(std::span<const S> logits,
                                        std::span<const std::int32_t> ids, TopKWeights weights) {
  using std::exp;
  constexpr A infinity = std::numeric_limits<A>::infinity();
  RowSoftmax<A> row;
  for (const std::int32_t id : ids) {
    const A logit = ranked<A>(logits[static_cast<std::size_t>(id)]);
    row.chosen_max = std::max(row.chosen_max, logit);
    row.chosen_infinities += logit == infinity ? 1 : 0;
  }
  if (weights == TopKWeights::softmax_of_chosen) {
    row.max = row.chosen_max;
    for (const std::int32_t id : ids) {
      row.sum += exp(ranked<A>(logits[static_cast<std::size_t>(id)]) - row.max);
    }
  } else {
    for (const S logit : logits) {
      row.max = std::max(row.max, ranked<A>(logit));
    }
    for (const S logit : logits) {
      row.sum += exp(ranked<A>(logit) - row.max);
    }
  }
  return row;
}

/// The weight of one chosen logit. Without a finite softmax: shared equally by the chosen +inf; 0
/// beside an unchosen +inf; shared by all K where every chosen logit is -inf.
template <Accumulator A>
[[nodiscard]] A weight_of(const RowSoftmax<A>& row, A logit, std::int64_t top_k) {
  using std::exp;
  constexpr A infinity = std::numeric_limits<A>::infinity();
  if (row.is_finite()) {
    return exp(logit - row.max) / row.sum;
  }
  if (row.chosen_infinities > 0) {
    return logit == infinity ? A(1) / static_cast<A>(row.chosen_infinities) : A(0);
  }
  return row.chosen_max == -infinity ? A(1) / static_cast<A>(top_k) : A(0);
}

/// Segment ids are [T] or none, and none is negative.
inline void check_segment_ids(std::string_view where, std::span<const std::int32_t> segment_ids,
                              std::int64_t tokens) {
  if (segment_ids.empty()) {
    return;
  }
  require_length(where, "segment_ids", segment_ids, "dims.tokens", tokens);
  for (std::size_t t = 0; t < segment_ids.size(); ++t) {
    if (segment_ids[t] < 0) {
      fail(where, element_name("segment_ids", t), segment_ids[t], "must be >= 0");
    }
  }
}

/// Ids are [T,K]; a row holds experts, or is unrouted in every column.
inline void check_expert_ids(std::string_view where, ConstMatrixView<std::int32_t> expert_ids,
                             const RouterDims& dims) {
  require_shape(where, "expert_ids", expert_ids, "dims.tokens", dims.tokens, "dims.top_k",
                dims.top_k);
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    for (std::int64_t k = 0; k < dims.top_k; ++k) {
      const std::int32_t id = expert_ids(t, k);
      if (id != unrouted && (id < 0 || id >= dims.experts)) {
        fail(where, element_name("expert_ids", t * dims.top_k + k), id,
             "must be in [0, " + std::to_string(dims.experts) + ") or -1");
      }
      if ((id == unrouted) != (expert_ids(t, 0) == unrouted)) {
        fail(where, element_name("expert_ids", t * dims.top_k + k), id,
             "must be -1 in every column of a row or in none");
      }
    }
  }
}

}  // namespace detail

/// Chooses K experts for each token and weighs them.
///   chosen: the K largest logits, falling; weight_k = exp(l_k - m) / sum_j exp(l_j - m)
/// A token is, the first that holds: excluded padding (ids `unrouted`, weights 0; its logits are
/// not read); replayed (its forced ids are K distinct experts: taken in their order, weighed by the
/// logits given here); automatic.
/// shapes    router_logits [T,E], forced_ids [T,K], segment_ids [T], expert_ids and expert_weights
///           [T,K]
/// dtypes    logits Storage; arithmetic and weights their Accumulator
/// writes    all of expert_ids and expert_weights
/// alias     outputs disjoint from inputs; forced_ids null, segment_ids empty: absent
/// specials  equal logits: the lowest id first, -0 equal to +0. NaN ranks with -inf; ids are K
///           distinct experts whatever the row holds. Weights when a chosen logit is +inf: equal
///           over the chosen +inf, 0 for the rest; when all K are -inf: 1/K; when softmax_of_all
///           meets +inf at an unchosen expert only: 0. T = 0: no-op
/// order     each row by itself; same bits for any thread count
/// cost      T*E*K compares, T*K exps (T*E with softmax_of_all)
/// throws    Error for bad dims or options, views of another shape, negative segment ids
/// source    spec/moe.md 1.3 and 2; ties as jax.lax.top_k
template <Storage S>
RouterReport route(const RouterDims& dims, const RouterInputs<S>& in, const RouterOptions& options,
                   const RouterOutputs<AccumulatorOf<S>>& out) {
  using A = AccumulatorOf<S>;
  constexpr std::string_view where = "moe::reference::route";
  dims.validate(where);
  require_shape(where, "router_logits", in.router_logits, "dims.tokens", dims.tokens,
                "dims.experts", dims.experts);
  if (!in.forced_ids.is_null()) {
    require_shape(where, "forced_ids", in.forced_ids, "dims.tokens", dims.tokens, "dims.top_k",
                  dims.top_k);
  }
  detail::check_segment_ids(where, in.segment_ids, dims.tokens);
  options.validate(where, "options");
  require_shape(where, "expert_ids", out.expert_ids, "dims.tokens", dims.tokens, "dims.top_k",
                dims.top_k);
  require_shape(where, "expert_weights", out.expert_weights, "dims.tokens", dims.tokens,
                "dims.top_k", dims.top_k);

  const bool excludes = options.padding == PaddingRouting::exclude && !in.segment_ids.empty();
  constexpr std::int64_t grain = 64;  // tokens a task: a few microseconds of work even at E = 8
  struct Counts {
    std::int64_t padding = 0, forced = 0, automatic = 0, nonfinite = 0, agreed = 0;
  };
  std::vector<Counts> counts(static_cast<std::size_t>((dims.tokens + grain - 1) / grain));
  parallel_blocks(dims.tokens, grain, [&](std::int64_t first, std::int64_t last) {
    Counts& count = counts[static_cast<std::size_t>(first / grain)];
    std::vector<std::int32_t> own_choice(static_cast<std::size_t>(dims.top_k));
    for (std::int64_t t = first; t < last; ++t) {
      const std::span<std::int32_t> ids = out.expert_ids.row(t);
      const std::span<A> weights = out.expert_weights.row(t);
      if (excludes && in.segment_ids[static_cast<std::size_t>(t)] == 0) {
        std::fill(ids.begin(), ids.end(), unrouted);
        std::fill(weights.begin(), weights.end(), A(0));
        ++count.padding;
        continue;
      }
      const std::span<const S> logits = in.router_logits.row(t);
      if (!in.forced_ids.is_null() && detail::replayable(in.forced_ids.row(t), dims.experts)) {
        const std::span<const std::int32_t> forced = in.forced_ids.row(t);
        std::copy(forced.begin(), forced.end(), ids.begin());
        ++count.forced;
        if (options.mismatch == ReplayMismatch::measure) {
          detail::choose<A>(logits, std::span<std::int32_t>(own_choice));
          count.agreed += std::count_if(forced.begin(), forced.end(), [&](std::int32_t id) {
            return detail::contains(own_choice, id);
          });
        }
      } else {
        detail::choose<A>(logits, ids);
        ++count.automatic;
      }
      const detail::RowSoftmax<A> softmax =
          detail::row_softmax<A>(logits, std::span<const std::int32_t>(ids), options.weights);
      count.nonfinite += softmax.is_finite() ? 0 : 1;
      for (std::size_t k = 0; k < ids.size(); ++k) {
        const A logit = detail::ranked<A>(logits[static_cast<std::size_t>(ids[k])]);
        weights[k] = detail::weight_of(softmax, logit, dims.top_k);
      }
    }
  });

  RouterReport report;
  std::int64_t agreed = 0;
  for (const Counts& count : counts) {
    report.padding_tokens += count.padding;
    report.forced_tokens += count.forced;
    report.automatic_tokens += count.automatic;
    report.nonfinite_rows += count.nonfinite;
    agreed += count.agreed;
  }
  report.chosen_rows = report.automatic_tokens;
  if (options.mismatch == ReplayMismatch::measure) {
    report.chosen_rows += report.forced_tokens;
  }
  if (options.mismatch == ReplayMismatch::measure && report.forced_tokens > 0) {
    report.replay_mismatch =
        1.0 - static_cast<double>(agreed) / static_cast<double>(report.forced_tokens * dims.top_k);
  }
  return report;
}

/// What the backward of routing reads.
template <Storage S>
struct RouterBackwardInputs {
  ConstMatrixView<S> router_logits;                    ///< [T,E], as given to route
  ConstMatrixView<std::int32_t> expert_ids;            ///< [T,K], as route wrote them
  ConstMatrixView<AccumulatorOf<S>> d_expert_weights;  ///< [T,K]
};

/// The cotangent of the logits: that of `route`, with the choice held fixed.
///   softmax_of_chosen: d_l[chosen_k] = w_k (d_w_k - sum_j w_j d_w_j), 0 at the others
///   softmax_of_all:    d_l[e] = sum_k [e = chosen_k] w_k d_w_k - p_e sum_j w_j d_w_j
/// shapes    as route; d_router_logits [T,E]
/// dtypes    as route; cotangents the Accumulator
/// writes    all of d_router_logits
/// alias     output disjoint from inputs
/// specials  0 on unrouted rows (their logits and cotangents are not read) and on rows weighed by
///           the non-finite rule. K = 1 under softmax_of_chosen: exactly 0, the weight is constant
/// order     each row by itself, k ascending; same bits for any thread count
/// throws    Error for bad dims or options, views of another shape, ids that are neither experts
///           nor -1
/// source    spec/moe.md 1.3
template <Storage S>
void route_backward(const RouterDims& dims, const RouterBackwardInputs<S>& in,
                    const RouterOptions& options, MatrixView<AccumulatorOf<S>> d_router_logits) {
  using A = AccumulatorOf<S>;
  using std::exp;
  constexpr std::string_view where = "moe::reference::route_backward";
  dims.validate(where);
  require_shape(where, "router_logits", in.router_logits, "dims.tokens", dims.tokens,
                "dims.experts", dims.experts);
  detail::check_expert_ids(where, in.expert_ids, dims);
  require_shape(where, "d_expert_weights", in.d_expert_weights, "dims.tokens", dims.tokens,
                "dims.top_k", dims.top_k);
  options.validate(where, "options");
  require_shape(where, "d_router_logits", d_router_logits, "dims.tokens", dims.tokens,
                "dims.experts", dims.experts);

  constexpr std::int64_t grain = 64;
  parallel_blocks(dims.tokens, grain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      const std::span<const std::int32_t> ids = in.expert_ids.row(t);
      const std::span<A> d_logits = d_router_logits.row(t);
      std::fill(d_logits.begin(), d_logits.end(), A(0));
      if (ids[0] == unrouted) {
        continue;
      }
      const std::span<const S> logits = in.router_logits.row(t);
      const detail::RowSoftmax<A> softmax = detail::row_softmax<A>(logits, ids, options.weights);
      if (!softmax.is_finite()) {
        continue;
      }
      const std::span<const A> d_weights = in.d_expert_weights.row(t);
      const auto probability = [&](std::size_t e) {
        return exp(detail::ranked<A>(logits[e]) - softmax.max) / softmax.sum;
      };
      A mean = A(0);  // sum_j w_j d_w_j
      for (std::size_t k = 0; k < ids.size(); ++k) {
        mean += probability(static_cast<std::size_t>(ids[k])) * d_weights[k];
      }
      if (options.weights == TopKWeights::softmax_of_all) {
        for (std::size_t e = 0; e < d_logits.size(); ++e) {
          d_logits[e] = -probability(e) * mean;
        }
        for (std::size_t k = 0; k < ids.size(); ++k) {
          const auto e = static_cast<std::size_t>(ids[k]);
          d_logits[e] += probability(e) * d_weights[k];
        }
      } else {
        for (std::size_t k = 0; k < ids.size(); ++k) {
          const auto e = static_cast<std::size_t>(ids[k]);
          d_logits[e] += probability(e) * (d_weights[k] - mean);
        }
      }
    }
  });
}

}  // namespace heddle::moe::reference

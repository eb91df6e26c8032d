#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/moe/detail/router_rows.hpp"
#include "heddle/moe/detail/rows.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/reference_router.hpp"

namespace heddle::moe {

using reference::RouterBackwardInputs;
using reference::RouterInputs;
using reference::RouterOutputs;
using reference::RouterReport;

/// Whose K best are looked for when some tokens are replayed. The ids do not depend on it: a choice is
/// made row by row, and what is not needed is not used.
enum class ChoiceRows {
  needed,    ///< the rows that choose for themselves: n * E compares instead of T * E
  all,       ///< every routed row
  by_count,  ///< `needed` where T > 256 and at most 256 rows need it, else `all`: the switch of an
             ///< accelerator, whose block of gathered rows has a fixed size
};

namespace detail {

inline constexpr std::int64_t choice_block = 256;  // rows of ChoiceRows::by_count

/// A token's row of chosen logits, before the softmax: the reference's rule says what becomes of it.
struct ChosenRow {
  float max = -std::numeric_limits<float>::infinity();  ///< over the chosen, or over all
  float sum = 0;
  float chosen_max = -std::numeric_limits<float>::infinity();
  std::int64_t infinities = 0;

  [[nodiscard]] bool is_finite() const { return std::isfinite(max) && std::isfinite(chosen_max); }
};

/// What is known of a row's softmax before its exps, from the logits of the chosen.
template <Storage S>
[[nodiscard]] ChosenRow chosen_row(const RouterRowFunctions<S>& rows, std::span<const S> logits,
                                   std::span<const float> chosen, TopKWeights weights) {
  ChosenRow row;
  for (const float logit : chosen) {
    row.chosen_max = std::max(row.chosen_max, logit);
    row.infinities += logit == std::numeric_limits<float>::infinity() ? 1 : 0;
  }
  row.max = row.chosen_max;
  if (weights == TopKWeights::softmax_of_all) {
    rows.row_softmax(logits.data(), static_cast<std::int64_t>(logits.size()), &row.max, &row.sum);
  }
  return row;
}

/// Turns the logits of the chosen into their weights. Returns false where the non-finite rule weighed.
template <Storage S>
bool weigh(const RouterRowFunctions<S>& rows, std::span<const S> logits, TopKWeights weights,
           std::span<float> chosen) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  ChosenRow row = chosen_row<S>(rows, logits, chosen, weights);
  if (!row.is_finite()) {
    for (float& value : chosen) {
      if (row.infinities > 0) {
        value = value == infinity ? 1.0F / static_cast<float>(row.infinities) : 0.0F;
      } else {
        value = row.chosen_max == -infinity ? 1.0F / static_cast<float>(chosen.size()) : 0.0F;
      }
    }
    return false;
  }
  rows.exps_in_place(static_cast<std::int64_t>(chosen.size()), row.max, chosen.data());
  if (weights == TopKWeights::softmax_of_chosen) {
    for (const float value : chosen) {
      row.sum += value;
    }
  }
  for (float& value : chosen) {
    value /= row.sum;
  }
  return true;
}

struct RouteCounts {
  std::int64_t padding = 0, forced = 0, automatic = 0, nonfinite = 0, agreed = 0, chosen = 0;
};

template <Storage S>
void check_route(std::string_view where, const RouterDims& dims, const RouterInputs<S>& in,
                 const RouterOptions& options, const RouterOutputs<AccumulatorOf<S>>& out) {
  dims.validate(where);
  require_shape(where, "router_logits", in.router_logits, "dims.tokens", dims.tokens,
                "dims.experts", dims.experts);
  if (!in.forced_ids.is_null()) {
    require_shape(where, "forced_ids", in.forced_ids, "dims.tokens", dims.tokens, "dims.top_k",
                  dims.top_k);
  }
  reference::detail::check_segment_ids(where, in.segment_ids, dims.tokens);
  options.validate(where, "options");
  require_shape(where, "expert_ids", out.expert_ids, "dims.tokens", dims.tokens, "dims.top_k",
                dims.top_k);
  require_shape(where, "expert_weights", out.expert_weights, "dims.tokens", dims.tokens,
                "dims.top_k", dims.top_k);
}

/// At most so many tasks: their counts fit a stack. A task has 64 tokens or more, some microseconds.
inline constexpr std::int64_t most_router_tasks = 128;

[[nodiscard]] inline std::int64_t router_grain(std::int64_t tokens) {
  return std::max<std::int64_t>(64, (tokens + most_router_tasks - 1) / most_router_tasks);
}

[[nodiscard]] inline bool is_excluded(std::span<const std::int32_t> segment_ids,
                                      const RouterOptions& options, std::int64_t t) {
  return options.padding == PaddingRouting::exclude && !segment_ids.empty() &&
         segment_ids[static_cast<std::size_t>(t)] == 0;
}

template <Storage S>
[[nodiscard]] bool is_forced(const RouterDims& dims, const RouterInputs<S>& in, std::int64_t t) {
  return !in.forced_ids.is_null() &&
         reference::detail::replayable(in.forced_ids.row(t), dims.experts);
}

}  // namespace detail

/// route for tokens [first, last), unchecked; adds to counts. `choose_all`: also the rows whose choice
/// is replayed.
template <Storage S>
requires(detail::is_f32_row<S>) void route_tokens(const RouterDims& dims, std::int64_t first,
                                                  std::int64_t last, const RouterInputs<S>& in,
                                                  const RouterOptions& options, bool choose_all,
                                                  const RouterOutputs<float>& out,
                                                  detail::RouteCounts& counts) {
  const detail::RouterRowFunctions<S> rows = detail::router_row_functions<S>();
  const bool measures = options.mismatch == ReplayMismatch::measure;
  for (std::int64_t t = first; t < last; ++t) {
    const std::span<std::int32_t> ids = out.expert_ids.row(t);
    const std::span<float> weights = out.expert_weights.row(t);
    if (detail::is_excluded(in.segment_ids, options, t)) {
      std::fill(ids.begin(), ids.end(), unrouted);
      std::fill(weights.begin(), weights.end(), 0.0F);
      ++counts.padding;
      continue;
    }
    const std::span<const S> logits = in.router_logits.row(t);
    const bool forced = detail::is_forced(dims, in, t);
    if (!forced || measures || choose_all) {
      rows.choose(logits.data(), dims.experts, dims.top_k, ids.data(), weights.data());
      ++counts.chosen;
    }
    if (forced) {
      const std::span<const std::int32_t> given = in.forced_ids.row(t);
      if (measures) {
        counts.agreed += std::count_if(given.begin(), given.end(), [&](std::int32_t id) {
          return reference::detail::contains(ids, id);
        });
      }
      std::copy(given.begin(), given.end(), ids.begin());
      rows.gather(logits.data(), dims.top_k, ids.data(), weights.data());
    }
    ++(forced ? counts.forced : counts.automatic);
    counts.nonfinite += detail::weigh<S>(rows, logits, options.weights, weights) ? 0 : 1;
  }
}

/// Chooses K experts for each token and weighs them: reference::route, a vector of logits at a time.
///   chosen: the K largest logits, falling; weight_k = exp(l_k - m) / sum_j exp(l_j - m)
/// shapes    router_logits [T,E], forced_ids [T,K], segment_ids [T], expert_ids and expert_weights
///           [T,K]
/// dtypes    logits Storage; arithmetic and weights their Accumulator. Other than f32 and bf16: the
///           reference itself
/// writes    all of expert_ids and expert_weights
/// alias     outputs disjoint from inputs; forced_ids null, segment_ids empty: absent
/// specials  as reference::route: ties to the lowest id, NaN with -inf, K distinct ids always; padding
///           before replay before the router's own choice
/// order     each row by itself; same bits for any thread count and path
/// accuracy  weights within 4e-7 of float64's (router_test.cpp)
/// memory    none
/// cost      route_cost: a compare a logit and K insertions where `choice` says so; K exps a token, E
///           with softmax_of_all
/// throws    Error for bad dims or options, views of another shape, negative segment ids
/// source    spec/moe.md 1.3 and 2
template <Storage S>
RouterReport route(const RouterDims& dims, const RouterInputs<S>& in, const RouterOptions& options,
                   const RouterOutputs<AccumulatorOf<S>>& out,
                   ChoiceRows choice = ChoiceRows::needed) {
  constexpr std::string_view where = "moe::route";
  detail::check_route<S>(where, dims, in, options, out);
  require(
      choice == ChoiceRows::needed || choice == ChoiceRows::all || choice == ChoiceRows::by_count,
      where, "choice", choice, "must be needed, all or by_count");
  if constexpr (!detail::is_f32_row<S>) {
    return reference::route<S>(dims, in, options, out);
  } else {
    bool choose_all = choice == ChoiceRows::all;
    if (choice == ChoiceRows::by_count) {
      std::int64_t automatic = 0;
      for (std::int64_t t = 0; t < dims.tokens; ++t) {
        automatic +=
            detail::is_excluded(in.segment_ids, options, t) || detail::is_forced(dims, in, t) ? 0
                                                                                              : 1;
      }
      choose_all = automatic > 0 &&
                   (dims.tokens <= detail::choice_block || automatic > detail::choice_block);
    }
    std::array<detail::RouteCounts, detail::most_router_tasks> counts{};
    const std::int64_t grain = detail::router_grain(dims.tokens);
    parallel_blocks(dims.tokens, grain, [&](std::int64_t first, std::int64_t last) {
      route_tokens<S>(dims, first, last, in, options, choose_all, out,
                      counts[static_cast<std::size_t>(first / grain)]);
    });
    RouterReport report;
    std::int64_t agreed = 0;
    for (const detail::RouteCounts& count : counts) {
      report.padding_tokens += count.padding;
      report.forced_tokens += count.forced;
      report.automatic_tokens += count.automatic;
      report.nonfinite_rows += count.nonfinite;
      report.chosen_rows += count.chosen;
      agreed += count.agreed;
    }
    if (options.mismatch == ReplayMismatch::measure && report.forced_tokens > 0) {
      report.replay_mismatch = 1.0 - static_cast<double>(agreed) /
                                         static_cast<double>(report.forced_tokens * dims.top_k);
    }
    return report;
  }
}

/// route_backward for tokens [first, last), unchecked.
template <Storage S>
requires(detail::is_f32_row<S>) void route_backward_tokens(const RouterDims& dims,
                                                           std::int64_t first, std::int64_t last,
                                                           const RouterBackwardInputs<S>& in,
                                                           const RouterOptions& options,
                                                           MatrixView<float> d_router_logits) {
  const detail::RouterRowFunctions<S> rows = detail::router_row_functions<S>();
  constexpr std::int64_t part = 16;  // of the chosen at a time, so that no K needs scratch
  for (std::int64_t t = first; t < last; ++t) {
    const std::span<const std::int32_t> ids = in.expert_ids.row(t);
    const std::span<float> d_logits = d_router_logits.row(t);
    std::fill(d_logits.begin(), d_logits.end(), 0.0F);
    if (ids[0] == unrouted) {
      continue;
    }
    const std::span<const S> logits = in.router_logits.row(t);
    const std::span<const float> d_weights = in.d_expert_weights.row(t);
    float values[part];
    const auto for_parts = [&](const auto& use) {
      for (std::int64_t k = 0; k < dims.top_k; k += part) {
        const std::int64_t count = std::min(part, dims.top_k - k);
        rows.gather(logits.data(), count, ids.data() + k, values);
        use(k, count);
      }
    };
    detail::ChosenRow row;
    for_parts([&](std::int64_t, std::int64_t count) {
      const detail::ChosenRow some = detail::chosen_row<S>(
          rows, logits, {values, static_cast<std::size_t>(count)}, TopKWeights::softmax_of_chosen);
      row.chosen_max = std::max(row.chosen_max, some.chosen_max);
    });
    row.max = row.chosen_max;
    if (options.weights == TopKWeights::softmax_of_all) {
      rows.row_softmax(logits.data(), dims.experts, &row.max, &row.sum);
    }
    if (!row.is_finite()) {
      continue;
    }
    if (options.weights == TopKWeights::softmax_of_chosen) {
      for_parts([&](std::int64_t, std::int64_t count) {
        rows.exps_in_place(count, row.max, values);
        for (std::int64_t i = 0; i < count; ++i) {
          row.sum += values[i];
        }
      });
    }
    const auto for_weights = [&](const auto& use) {
      for_parts([&](std::int64_t k, std::int64_t count) {
        rows.exps_in_place(count, row.max, values);
        for (std::int64_t i = 0; i < count; ++i) {
          use(static_cast<std::size_t>(k + i), values[i] / row.sum);
        }
      });
    };
    float mean = 0;  // sum_j w_j d_w_j
    for_weights([&](std::size_t k, float weight) {
      mean += detail::rounded_product(weight, d_weights[k]);
    });
    const bool of_all = options.weights == TopKWeights::softmax_of_all;
    if (of_all) {
      rows.spread_mean(logits.data(), dims.experts, row.max, row.sum, mean, d_logits.data());
    }
    for_weights([&](std::size_t k, float weight) {
      d_logits[static_cast<std::size_t>(ids[k])] +=
          detail::rounded_product(weight, of_all ? d_weights[k] : d_weights[k] - mean);
    });
  }
}

/// The cotangent of the logits: reference::route_backward, a vector at a time.
///   softmax_of_chosen: d_l[chosen_k] = w_k (d_w_k - sum_j w_j d_w_j), 0 at the others
///   softmax_of_all:    d_l[e] = sum_k [e = chosen_k] w_k d_w_k - p_e sum_j w_j d_w_j
/// It does not depend on whether the router is trained: freezing keeps what flows on to hidden.
/// shapes    as route; d_router_logits [T,E]
/// dtypes    as route; cotangents the Accumulator
/// writes    all of d_router_logits
/// alias     output disjoint from inputs
/// specials  as reference::route_backward
/// order     each row by itself, k ascending; same bits for any thread count and path
/// memory    none
/// throws    Error for bad dims or options, views of another shape, ids that are neither experts nor -1
/// source    spec/moe.md 1.3
template <Storage S>
void route_backward(const RouterDims& dims, const RouterBackwardInputs<S>& in,
                    const RouterOptions& options, MatrixView<AccumulatorOf<S>> d_router_logits) {
  constexpr std::string_view where = "moe::route_backward";
  dims.validate(where);
  require_shape(where, "router_logits", in.router_logits, "dims.tokens", dims.tokens,
                "dims.experts", dims.experts);
  reference::detail::check_expert_ids(where, in.expert_ids, dims);
  require_shape(where, "d_expert_weights", in.d_expert_weights, "dims.tokens", dims.tokens,
                "dims.top_k", dims.top_k);
  options.validate(where, "options");
  require_shape(where, "d_router_logits", d_router_logits, "dims.tokens", dims.tokens,
                "dims.experts", dims.experts);
  if constexpr (!detail::is_f32_row<S>) {
    reference::route_backward<S>(dims, in, options, d_router_logits);
  } else {
    parallel_blocks(dims.tokens, detail::router_grain(dims.tokens),
                    [&](std::int64_t first, std::int64_t last) {
                      route_backward_tokens<S>(dims, first, last, in, options, d_router_logits);
                    });
  }
}

/// Of route with `chosen_rows` rows that choose and `routed_tokens` that are weighed (RouterReport says
/// how many that were). A compare counts as a flop.
template <Storage S>
[[nodiscard]] Cost route_cost(const RouterDims& dims, const RouterOptions& options,
                              std::int64_t chosen_rows, std::int64_t routed_tokens) {
  const bool of_all = options.weights == TopKWeights::softmax_of_all;
  const std::int64_t weighed = of_all ? dims.experts : dims.top_k;
  const std::int64_t read_rows = of_all ? routed_tokens : chosen_rows;
  return {.flops = chosen_rows * dims.experts + routed_tokens * weighed,
          .transcendentals = routed_tokens * (of_all ? dims.experts + dims.top_k : dims.top_k),
          .bytes_read = read_rows * dims.experts * static_cast<std::int64_t>(sizeof(S)),
          .bytes_written = dims.slots() * static_cast<std::int64_t>(sizeof(std::int32_t) +
                                                                    sizeof(AccumulatorOf<S>))};
}

}  // namespace heddle::moe

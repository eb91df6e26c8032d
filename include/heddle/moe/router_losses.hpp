#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "heddle/core/cost.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/detail/router_rows.hpp"
#include "heddle/moe/detail/rows.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/reference_losses.hpp"

// The auxiliary losses of the router. Sums of chunks, micro-batches and shards add up; the losses and
// their gradients are formed once, of the totals. balance_loss and z_loss are sums over E: the reference
// computes them as fast as they can be.

namespace heddle::moe {

using reference::balance_loss;
using reference::BalanceLossOptions;
using reference::BalanceScale;
using reference::RouterLossSums;
using reference::z_loss;
using reference::ZLossOptions;

/// Which losses a backward takes, and with what options; a weight of 0 leaves a loss out.
struct RouterLossOptions {
  BalanceLossOptions balance = {};
  ZLossOptions z = {};
};

namespace detail {

/// The softmax of a token that the losses take: a routed one with a finite logsumexp.
template <Storage S>
[[nodiscard]] bool takes_token(const RouterRowFunctions<S>& rows, std::span<const S> logits,
                               std::int32_t first_id, float& max, float& sum) {
  if (first_id == unrouted) {
    return false;
  }
  rows.row_softmax(logits.data(), static_cast<std::int64_t>(logits.size()), &max, &sum);
  return std::isfinite(max);
}

/// One block's sums, in a workspace.
struct LossBlock {
  std::span<std::int32_t> counts;
  std::span<float> probabilities;
  float squared_logsumexp = 0;
  std::int64_t tokens = 0;
};

[[nodiscard]] inline std::int64_t loss_blocks(const RouterDims& dims) {
  using reference::detail::loss_grain;
  return (dims.tokens + loss_grain - 1) / loss_grain;
}

}  // namespace detail

/// Bytes that add_router_loss_sums takes from its workspace: its blocks of 256 tokens have sums of their
/// own.
template <Storage S>
[[nodiscard]] std::size_t router_loss_workspace_bytes(const RouterDims& dims) {
  if constexpr (!detail::is_f32_row<S>) {
    return 0;
  } else {
    const std::int64_t blocks = detail::loss_blocks(dims);
    return Workspace::bytes_for<detail::LossBlock>(blocks) +
           Workspace::bytes_for<std::int32_t>(blocks * dims.experts) +
           Workspace::bytes_for<float>(blocks * dims.experts);
  }
}

/// What add_router_loss_sums does with tokens [first, last), unchecked: adds them to block.
template <Storage S>
requires(detail::is_f32_row<S>) void add_router_loss_tokens(
    std::int64_t first, std::int64_t last, ConstMatrixView<S> router_logits,
    ConstMatrixView<std::int32_t> expert_ids, detail::LossBlock& block) {
  const detail::RouterRowFunctions<S> rows = detail::router_row_functions<S>();
  for (std::int64_t t = first; t < last; ++t) {
    const std::span<const S> logits = router_logits.row(t);
    float max = 0;
    float sum = 0;
    if (!detail::takes_token<S>(rows, logits, expert_ids(t, 0), max, sum)) {
      continue;
    }
    for (const std::int32_t id : expert_ids.row(t)) {
      ++block.counts[static_cast<std::size_t>(id)];
    }
    rows.add_probabilities(logits.data(), router_logits.cols(), max, sum,
                           block.probabilities.data());
    const float logsumexp = max + rows.log_one(sum);
    block.squared_logsumexp += detail::rounded_product(logsumexp, logsumexp);
    ++block.tokens;
  }
}

/// Adds the tokens of one chunk to the sums: reference::add_router_loss_sums, a vector at a time.
/// shapes    router_logits [T,E]; expert_ids [T,K] as routed, replayed ones included
/// dtypes    logits Storage; sums its Accumulator. Other than f32 and bf16: the reference itself
/// writes    adds to sums; sums of no experts yet become [E]
/// specials  unrouted tokens are not read and not counted; nor is a row without a finite logsumexp. NaN
///           counts as -inf, as in route
/// order     256 tokens at a time, folded in token order; same bits for any thread count and path
/// memory    router_loss_workspace_bytes(dims)
/// cost      2 T*E exps
/// throws    Error for bad dims, other shapes, ids that are neither experts nor -1, sums of other E
/// source    spec/moe.md 8
template <Storage S>
void add_router_loss_sums(const RouterDims& dims, ConstMatrixView<S> router_logits,
                          ConstMatrixView<std::int32_t> expert_ids,
                          RouterLossSums<AccumulatorOf<S>>& sums, Workspace& workspace) {
  if constexpr (!detail::is_f32_row<S>) {
    reference::add_router_loss_sums<S>(dims, router_logits, expert_ids, sums);
  } else {
    constexpr std::string_view where = "moe::add_router_loss_sums";
    reference::detail::check_loss_arguments<S>(where, dims, router_logits, expert_ids);
    const auto experts = static_cast<std::size_t>(dims.experts);
    if (sums.counts.empty() && sums.probabilities.empty()) {
      sums = {std::vector<std::int64_t>(experts, 0), std::vector<float>(experts, 0.0F), 0.0F, 0};
    }
    reference::detail::check_loss_sums<float>(where, sums, dims.experts);

    const Workspace::Frame frame(workspace);
    const std::int64_t block_count = detail::loss_blocks(dims);
    const auto blocks = workspace.take<detail::LossBlock>(block_count);
    const auto counts = workspace.take<std::int32_t>(block_count * dims.experts);
    const auto probabilities = workspace.take<float>(block_count * dims.experts);
    parallel_blocks(
        dims.tokens, reference::detail::loss_grain, [&](std::int64_t first, std::int64_t last) {
          const auto index = static_cast<std::size_t>(first / reference::detail::loss_grain);
          detail::LossBlock block{counts.subspan(index * experts, experts),
                                  probabilities.subspan(index * experts, experts)};
          std::fill(block.counts.begin(), block.counts.end(), 0);
          std::fill(block.probabilities.begin(), block.probabilities.end(), 0.0F);
          add_router_loss_tokens<S>(first, last, router_logits, expert_ids, block);
          blocks[index] = block;
        });
    for (const detail::LossBlock& block : blocks) {
      for (std::size_t e = 0; e < experts; ++e) {
        sums.counts[e] += block.counts[e];
        sums.probabilities[e] += block.probabilities[e];
      }
      sums.squared_logsumexp += block.squared_logsumexp;
      sums.tokens += block.tokens;
    }
  }
}

/// The gradient of both losses with respect to the logits of one chunk, in one pass over them; the
/// counts are constants.
///   d_l[t,j] += p_tj (c_j - sum_e c_e p_te + 2 weight_z lse_t / tokens)
///   c_e = weight / sequences * E * f_e / tokens
/// shapes    d_router_logits [T,E]; sums of all chunks together
/// dtypes    as add_router_loss_sums
/// writes    adds to d_router_logits, at the tokens that the sums took
/// order     each row by itself; same bits for any thread count and path
/// memory    router_loss_backward_workspace_bytes(dims)
/// cost      3 T*E exps
/// throws    Error for bad dims or options, other shapes, sums of another E
/// source    spec/moe.md 8
template <Storage S>
void router_loss_backward(const RouterDims& dims, ConstMatrixView<S> router_logits,
                          ConstMatrixView<std::int32_t> expert_ids,
                          const RouterLossSums<AccumulatorOf<S>>& sums,
                          const RouterLossOptions& options,
                          MatrixView<AccumulatorOf<S>> d_router_logits, Workspace& workspace) {
  using A = AccumulatorOf<S>;
  if constexpr (!detail::is_f32_row<S>) {
    reference::balance_loss_backward<S>(dims, router_logits, expert_ids, sums, options.balance,
                                        d_router_logits);
    reference::z_loss_backward<S>(dims, router_logits, expert_ids, sums, options.z,
                                  d_router_logits);
  } else {
    constexpr std::string_view where = "moe::router_loss_backward";
    reference::detail::check_loss_arguments<S>(where, dims, router_logits, expert_ids);
    reference::detail::check_loss_sums<A>(where, sums, dims.experts);
    options.balance.validate(where);
    options.z.validate(where);
    require_shape(where, "d_router_logits", d_router_logits, "dims.tokens", dims.tokens,
                  "dims.experts", dims.experts);
    const Workspace::Frame frame(workspace);
    const auto cost = workspace.take<float>(dims.experts);
    const float factor =
        reference::detail::balance_factor<float>(dims, sums.tokens, options.balance);
    for (std::size_t e = 0; e < cost.size(); ++e) {
      cost[e] = factor * static_cast<float>(sums.counts[e]);
    }
    const float z_factor = sums.tokens == 0 ? 0.0F
                                            : 2.0F * static_cast<float>(options.z.weight) /
                                                  static_cast<float>(sums.tokens);
    parallel_blocks(
        dims.tokens, reference::detail::loss_grain, [&](std::int64_t first, std::int64_t last) {
          const auto rows = detail::router_row_functions<S>();
          for (std::int64_t t = first; t < last; ++t) {
            const std::span<const S> logits = router_logits.row(t);
            float max = 0;
            float sum = 0;
            if (!detail::takes_token<S>(rows, logits, expert_ids(t, 0), max, sum)) {
              continue;
            }
            const float mean = rows.mean_cost(logits.data(), dims.experts, max, sum, cost.data());
            const float offset = detail::rounded_product(z_factor, max + rows.log_one(sum)) - mean;
            rows.add_loss_row(logits.data(), dims.experts, max, sum, cost.data(), offset,
                              d_router_logits.row(t).data());
          }
        });
  }
}

/// Bytes that router_loss_backward takes from its workspace.
template <Storage S>
[[nodiscard]] std::size_t router_loss_backward_workspace_bytes(const RouterDims& dims) {
  return detail::is_f32_row<S> ? Workspace::bytes_for<float>(dims.experts) : 0;
}

/// Of add_router_loss_sums over so many tokens that the losses take.
template <Storage S>
[[nodiscard]] Cost router_loss_sums_cost(const RouterDims& dims, std::int64_t taken_tokens) {
  const std::int64_t logits = taken_tokens * dims.experts;
  return {.flops = 5 * logits,
          .transcendentals = 2 * logits + taken_tokens,
          .bytes_read = logits * static_cast<std::int64_t>(sizeof(S)) +
                        taken_tokens * dims.top_k * static_cast<std::int64_t>(sizeof(std::int32_t)),
          .bytes_written = 0};
}

/// Of router_loss_backward over so many.
template <Storage S>
[[nodiscard]] Cost router_loss_backward_cost(const RouterDims& dims, std::int64_t taken_tokens) {
  constexpr auto cotangent = static_cast<std::int64_t>(sizeof(AccumulatorOf<S>));
  const std::int64_t logits = taken_tokens * dims.experts;
  return {.flops = 9 * logits,
          .transcendentals = 3 * logits + taken_tokens,
          .bytes_read = logits * (static_cast<std::int64_t>(sizeof(S)) + cotangent),
          .bytes_written = logits * cotangent};
}

}  // namespace heddle::moe

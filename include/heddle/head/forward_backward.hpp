#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/chunked_head.hpp"
#include "heddle/head/detail/forward_backward_pass.hpp"
#include "heddle/head/options.hpp"

namespace heddle::head {

/// A loss whose share of a row and whose cotangents there follow from that row's log-prob and entropy:
///   loss(row, logp, entropy) -> {loss, d_logp, d_entropy}
/// Weights, denominators, advantages and old log-probs are known to it before. A loss that needs other
/// rows first, as a ratio that is a mean over a segment does, is none.
template <class Loss, class A>
concept TokenLoss = Accumulator<A> &&
    requires(const Loss& loss, std::int64_t row, A logp, A entropy) {
  { loss(row, logp, entropy).loss } -> std::convertible_to<double>;
  { loss(row, logp, entropy).d_logp } -> std::convertible_to<A>;
  { loss(row, logp, entropy).d_entropy } -> std::convertible_to<A>;
};

/// Fewer rows than these would wait for memory: forward and backward then are faster.
inline constexpr std::int64_t least_loss_rows = 64;

/// forward, loss and backward in one: each logit is computed once, 6 T D V flops for their 8 T D V, and
/// nothing is kept for a backward call.
///
/// shapes    as forward and backward; the loss is asked for every active row, ascending
/// dtypes    as backward
/// writes    all of the scores and losses that are wanted, 0 at inactive rows; d_hidden and d_weight as
///           backward does
/// alias     outputs and cotangents disjoint from inputs and from each other
/// specials  as forward and backward. Mode::local and Mode::unsharded, and a budget too small for 64 rows
///           of logits, run forward, the loss and backward one after the other
/// order     scores, losses and d_hidden have the bits of forward, loss and backward; so has d_weight
///           where options.chunk is forward_backward_rows of them, else it differs by the rounding of
///           its sums over chunks
/// memory    forward_backward_workspace_bytes: all logits of a chunk's rows, as many as fit into
///           options.scratch_bytes
/// cost      forward_backward_cost; two exponentials a logit
/// throws    Error as forward and backward
/// source    spec/head.md 5.1
template <Storage S, Storage W, Accumulator A, class Loss>
void forward_backward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
                      const Loss& loss, const LossOutputs<A>& outputs,
                      const Cotangents<A>& cotangents, Workspace& workspace);

namespace detail {

/// Bytes of a pass over so many rows at a time, both cotangents wanted.
template <Storage S, Storage W, Storage D>
[[nodiscard]] std::size_t forward_backward_bytes(const Dims& dims, WeightLayout layout,
                                                 const ScoringOptions& options, std::int64_t rows,
                                                 std::int64_t threads) {
  using A = AccumulatorOf<S>;
  A wanted{};
  const Cotangents<A> both{.d_hidden = {&wanted, 1, 1}, .d_weight = {.values = {&wanted, 1, 1}}};
  const Inputs<S, W> inputs{.hidden = {}, .weight = {}, .layout = layout, .target_ids = {}};
  ByteCounter counter;
  const ForwardBackwardPass<S, W, A, D> pass(counter, dims, inputs, options, both, rows, threads);
  return counter.bytes();
}

/// The loss between a forward and a backward call, and what they hand to each other.
///   score(outputs); differentiate(residuals, output_cotangents)
template <Storage S, Storage W, Accumulator A, class Loss, class Forward, class Backward>
void forward_then_backward(const Dims& dims, const Inputs<S, W>& inputs, const Loss& loss,
                           const LossOutputs<A>& outputs, Workspace& workspace,
                           const Forward& score, const Backward& differentiate) {
  const auto given_or_own = [&](std::span<A> given) {
    return given.empty() ? workspace.take<A>(dims.tokens) : given;
  };
  Outputs<A> scores = outputs.scores;
  scores.entropy = given_or_own(scores.entropy);
  scores.max = given_or_own(scores.max);
  scores.exp_sum = given_or_own(scores.exp_sum);
  scores.mean = given_or_own(scores.mean);
  const std::span<A> d_logps = workspace.take<A>(dims.tokens);
  const std::span<A> d_entropy = workspace.take<A>(dims.tokens);
  score(scores);
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    const auto at = static_cast<std::size_t>(t);
    double value = 0;
    d_logps[at] = A(0);
    d_entropy[at] = A(0);
    if (inputs.is_active(t)) {
      const auto share = loss(t, scores.logps[at], scores.entropy[at]);
      value = static_cast<double>(share.loss);
      d_logps[at] = static_cast<A>(share.d_logp);
      d_entropy[at] = static_cast<A>(share.d_entropy);
    }
    if (!outputs.losses.empty()) {
      outputs.losses[at] = value;
    }
  }
  differentiate(Residuals<A>{scores.max, scores.exp_sum, scores.mean},
                OutputCotangents<A>{d_logps, d_entropy});
}

}  // namespace detail

/// Rows of logits that forward_backward keeps at a time: the most that options.chunk and
/// options.scratch_bytes allow, in eights. 0: too few to be worth it, and forward and backward run. The
/// scratch of one thread is counted, whatever the arena: no bit may depend on that. Each further thread
/// takes about a MiB more.
///
/// throws    Error for dims and options
template <Storage S, Storage W = S>
[[nodiscard]] std::int64_t forward_backward_rows(const Dims& dims, WeightLayout layout,
                                                 const ScoringOptions& options) {
  using A = AccumulatorOf<S>;
  constexpr const char* where = "head::forward_backward_rows";
  dims.validate(where);
  options.validate(where);
  if (options.mode != Mode::fused) {
    return 0;
  }
  return detail::with_cotangent_storage<A>(options.logits_dtype, [&]<class D>(D) {
    const auto fits = [&](std::int64_t rows) {
      return std::cmp_less_equal(
          detail::forward_backward_bytes<S, W, D>(dims, layout, options, rows, 1),
          options.scratch_bytes);
    };
    const std::int64_t most = std::min(options.chunk, std::max<std::int64_t>(dims.tokens, 1));
    if (fits(most)) {
      return most;
    }
    std::int64_t low = 0;  // fits, in units of row_multiple
    std::int64_t high = (most + detail::row_multiple - 1) / detail::row_multiple;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (fits(middle * detail::row_multiple) ? low : high) = middle;
    }
    const std::int64_t rows = low * detail::row_multiple;
    return rows < std::min(least_loss_rows, most) ? std::int64_t{0} : rows;
  });
}

template <Storage S, Storage W, Accumulator A, class Loss>
void forward_backward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
                      const Loss& loss, const LossOutputs<A>& outputs,
                      const Cotangents<A>& cotangents, Workspace& workspace) {
  static_assert(TokenLoss<Loss, A>,
                "heddle::head::forward_backward: the loss must be a TokenLoss, which tells a row's "
                "loss and cotangents from that row alone");
  static_assert(
      detail::accumulates_in<S, W, A>,
      "heddle::head::forward_backward: outputs must be in the accumulator of hidden and weight");
  constexpr const char* where = "head::forward_backward";
  detail::require_valid(where, dims, inputs, options);
  const A divisor = detail::temperature_divisor<A>(where, options);
  detail::require_valid(where, dims, outputs.scores);
  detail::require_length_if_given(where, "outputs.losses", outputs.losses, "dims.tokens",
                                  dims.tokens);
  detail::require_valid(where, dims, inputs.layout, cotangents);
  detail::require_row_ids(where, dims);
  const std::int64_t threads = detail::arena_threads();
  const std::int64_t rows = forward_backward_rows<S, W>(dims, inputs.layout, options);
  const Workspace::Frame frame(workspace);
  if (rows == 0) {
    detail::forward_then_backward(
        dims, inputs, loss, outputs, workspace,
        [&](const Outputs<A>& scores) { forward(dims, inputs, options, scores, workspace); },
        [&](const Residuals<A>& residuals, const OutputCotangents<A>& d_outputs) {
          backward(dims, inputs, options, residuals, d_outputs, cotangents, workspace);
        });
    return;
  }
  detail::with_cotangent_storage<A>(options.logits_dtype, [&]<class D>(D) {
    detail::ForwardBackwardPass<S, W, A, D> pass(workspace, dims, inputs, options, cotangents, rows,
                                                 threads);
    pass.run(divisor, loss, outputs);
  });
}

/// Bytes of workspace that forward_backward takes, both cotangents wanted.
///
/// throws    Error for dims and options
template <Storage S, Storage W = S>
[[nodiscard]] std::size_t forward_backward_workspace_bytes(const Dims& dims, WeightLayout layout,
                                                           const ScoringOptions& options,
                                                           std::int64_t threads = 1) {
  using A = AccumulatorOf<S>;
  const std::int64_t rows = forward_backward_rows<S, W>(dims, layout, options);
  if (rows == 0) {
    return 6 * Workspace::bytes_for<A>(dims.tokens) +
           std::max(forward_workspace_bytes<S, W>(dims, options, threads),
                    backward_workspace_bytes<S, W>(dims, layout, options, threads));
  }
  return detail::with_cotangent_storage<A>(options.logits_dtype, [&]<class D>(D) {
    return detail::forward_backward_bytes<S, W, D>(dims, layout, options, rows, threads);
  });
}

/// What forward_backward costs where every token has a cotangent, in Mode::fused.
template <Storage S, Storage W = S>
[[nodiscard]] Cost forward_backward_cost(const Dims& dims, WeightLayout layout,
                                         const ScoringOptions& options) {
  const std::int64_t rows = forward_backward_rows<S, W>(dims, layout, options);
  if (rows == 0) {
    return forward_cost<S, W>(dims, options) + backward_cost<S, W>(dims, options);
  }
  ScoringOptions as_chunked = options;
  as_chunked.chunk = rows;
  Cost cost = backward_cost<S, W>(dims, as_chunked);
  cost.transcendentals += forward_cost<S, W>(dims, as_chunked).transcendentals;
  // The weight is read once for the logits and once for d_hidden.
  const std::int64_t chunks = (dims.tokens + rows - 1) / rows;
  cost.bytes_read += chunks * dims.hidden * dims.vocab * static_cast<std::int64_t>(sizeof(W));
  cost.bytes_written += forward_cost<S, W>(dims, as_chunked).bytes_written;
  return cost;
}

}  // namespace heddle::head

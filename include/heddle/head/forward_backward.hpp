#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/factor.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/chunked_head.hpp"
#include "heddle/head/logits_tile.hpp"
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

/// What forward_backward writes.
///
/// shapes    each [tokens]
/// specials  losses: each row's share, 0 at inactive rows; an empty span is not wanted
template <Accumulator A>
struct LossOutputs {
  Outputs<A> scores;
  std::span<double> losses = {};
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

template <Storage S, Storage W, Accumulator A, Storage D>
class ForwardBackwardPass {
  static constexpr bool keeps_rounded = !std::is_same_v<D, A>;

 public:
  template <class Space>
  ForwardBackwardPass(Space& space, const Dims& dims, const Inputs<S, W>& inputs,
                      const ScoringOptions& options, const Cotangents<A>& cotangents,
                      std::int64_t most_rows, std::int64_t threads)
      : dims_(dims),
        inputs_(inputs),
        options_(options),
        cotangents_(cotangents),
        columns_(stats_columns(dims, options)),
        most_rows_(most_rows),
        rows_(space, most_rows),
        drawing_(space.template take<std::int32_t>(most_rows)),
        kept_rows_(space.template take<std::int32_t>(most_rows)),
        stats_(space.template take<RowStats<A>>(most_rows)),
        row_terms_(space.template take<RowCotangent<A>>(most_rows)),
        logits_pass_(space, dims, inputs, columns_),
        gradient_(space, dims, inputs, cotangents, most_rows, options.vocab_shards),
        tasks_(space, threads,
               std::max(LogitsPass<S, W, A>::piece_bytes(dims),
                        GradientPass<S, W, A, D>::piece_bytes(dims, most_rows))) {
    kept_ = space.template take<D>(most_rows * scratch_stride<D>(dims.vocab)).data();
    if constexpr (keeps_rounded) {
      group_ = space.template take<A>(most_rows * scratch_stride<A>(columns_)).data();
    }
  }

  template <class Loss>
  void run(A divisor, const Loss& loss, const LossOutputs<A>& outputs) {
    put_inactive(dims_, inputs_, outputs.scores);
    for (std::int64_t t = 0; t < dims_.tokens; ++t) {
      if (!inputs_.is_active(t)) {
        put_loss(outputs, t, 0);
        clear_d_hidden(t);
      }
    }
    rows_.for_each_chunk(
        dims_.tokens, most_rows_, [&](std::int64_t t) { return inputs_.is_active(t); },
        [&](std::span<const std::int32_t> tokens) {
          score(tokens, divisor);
          const std::size_t drawing = finish(tokens, loss, outputs);
          differentiate(drawing, divisor);
        });
    gradient_.finish();
  }

 private:
  static void put_loss(const LossOutputs<A>& outputs, std::int64_t token, double value) {
    if (!outputs.losses.empty()) {
      outputs.losses[static_cast<std::size_t>(token)] = value;
    }
  }

  void clear_d_hidden(std::int64_t token) const {
    if (!cotangents_.d_hidden.is_null()) {
      std::ranges::fill(cotangents_.d_hidden.row(token), A(0));
    }
  }

  /// [rows, vocab]: x, or under D = bfloat16 the rounded logits; then their cotangents.
  [[nodiscard]] MatrixView<D> kept(Columns columns) const {
    return MatrixView<D>(kept_, most_rows_, dims_.vocab, scratch_stride<D>(dims_.vocab))
        .column_block(columns.first, columns.count());
  }

  void score(std::span<const std::int32_t> tokens, A divisor) {
    const auto rows = static_cast<std::int64_t>(tokens.size());
    std::fill_n(stats_.begin(), tokens.size(), RowStats<A>{});
    const std::int64_t tile = options_.vocab_tile;
    for_each_shard(dims_.vocab, options_.vocab_shards, [&](Columns held) {
      for_each_tile(held, 0, columns_grid(options_), [&](Columns group) {
        MatrixView<A> logits;
        if constexpr (keeps_rounded) {
          logits = {group_, rows, group.count(), scratch_stride<A>(columns_)};
        } else {
          logits = kept(group).row_block(0, rows);
        }
        logits_pass_.run(tokens, group, logits, tasks_, [&](std::int64_t row, std::span<A> z) {
          const auto token = static_cast<std::size_t>(tokens[static_cast<std::size_t>(row)]);
          const std::int64_t target = target_column(inputs_.target_ids[token], dims_.vocab);
          for_each_tile(group, 0, tile, [&](Columns piece) {
            bfloat16* rounded = nullptr;
            if constexpr (keeps_rounded) {
              rounded = kept(piece).row(row).data();
            }
            add_and_keep(z.subspan(static_cast<std::size_t>(piece.first - group.first),
                                   static_cast<std::size_t>(piece.count())),
                         piece.first, target, divisor, options_.logits_dtype,
                         options_.entropy_policy, rounded, stats_[static_cast<std::size_t>(row)]);
          });
        });
      });
    });
  }

  /// Scores, losses, and the rows that have a cotangent; returns how many.
  template <class Loss>
  [[nodiscard]] std::size_t finish(std::span<const std::int32_t> tokens, const Loss& loss,
                                   const LossOutputs<A>& outputs) {
    std::size_t drawing = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const std::int32_t token = tokens[i];
      const RowScore<A> score = finish_row(stats_[i], options_.logp_form, options_.entropy_policy);
      put_score(outputs.scores, token, score);
      const auto share = loss(std::int64_t{token}, score.logp, score.entropy);
      put_loss(outputs, token, static_cast<double>(share.loss));
      const A d_logp = static_cast<A>(share.d_logp);
      const A d_entropy = static_cast<A>(share.d_entropy);
      if (d_logp == A(0) && d_entropy == A(0)) {
        clear_d_hidden(token);
        continue;
      }
      drawing_[drawing] = token;
      kept_rows_[drawing] = static_cast<std::int32_t>(i);
      row_terms_[drawing++] = row_cotangent(
          d_logp, d_entropy, score.max, score.exp_sum, score.mean,
          target_column(inputs_.target_ids[static_cast<std::size_t>(token)], dims_.vocab));
    }
    return drawing;
  }

  void differentiate(std::size_t drawing, A divisor) {
    const std::span<const std::int32_t> rows(kept_rows_.first(drawing));
    gradient_.run(
        drawing_.first(drawing), tasks_, [](Columns) {},
        [&](Columns columns, std::int64_t first, std::int64_t last, std::span<std::byte>) {
          const MatrixView<D> tile = kept(columns);
          for (std::int64_t i = first; i < last; ++i) {
            const auto at = static_cast<std::size_t>(i);
            const std::span<D> d = tile.row(rows[at]);
            logits_cotangent(std::span<const D>(d), columns.first,
                             keeps_rounded ? LogitsState::rounded : LogitsState::tempered,
                             options_.logits_dtype, divisor, row_terms_[at], d);
          }
          return picked_rows(MatrixView<const D>(tile),
                             rows.subspan(static_cast<std::size_t>(first),
                                          static_cast<std::size_t>(last - first)));
        },
        [&](Columns columns) { return picked_rows(MatrixView<const D>(kept(columns)), rows); });
  }

  const Dims& dims_;
  const Inputs<S, W>& inputs_;
  const ScoringOptions& options_;
  const Cotangents<A>& cotangents_;
  std::int64_t columns_;
  std::int64_t most_rows_;
  ChunkRows rows_;
  std::span<std::int32_t> drawing_;    // tokens of the chunk that have a cotangent
  std::span<std::int32_t> kept_rows_;  // and their rows of kept_
  std::span<RowStats<A>> stats_;
  std::span<RowCotangent<A>> row_terms_;
  LogitsPass<S, W, A> logits_pass_;
  GradientPass<S, W, A, D> gradient_;
  BlockTasks tasks_;
  D* kept_ = nullptr;
  A* group_ = nullptr;  // [rows, columns_]
};

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
template <Storage S, Storage W, Accumulator A, class Loss>
void forward_then_backward(const Dims& dims, const Inputs<S, W>& inputs,
                           const ScoringOptions& options, const Loss& loss,
                           const LossOutputs<A>& outputs, const Cotangents<A>& cotangents,
                           Workspace& workspace) {
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
  forward(dims, inputs, options, scores, workspace);
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
  backward(dims, inputs, options, Residuals<A>{scores.max, scores.exp_sum, scores.mean},
           OutputCotangents<A>{d_logps, d_entropy}, cotangents, workspace);
}

}  // namespace detail

/// Rows of logits that forward_backward keeps at a time: the most that options.chunk and
/// options.scratch_bytes allow, in eights. 0: too few to be worth it, and forward and backward run.
///
/// throws    Error for dims and options
template <Storage S, Storage W = S>
[[nodiscard]] std::int64_t forward_backward_rows(const Dims& dims, WeightLayout layout,
                                                 const ScoringOptions& options,
                                                 std::int64_t threads = 1) {
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
          detail::forward_backward_bytes<S, W, D>(dims, layout, options, rows, threads),
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
  const std::int64_t rows = forward_backward_rows<S, W>(dims, inputs.layout, options, threads);
  const Workspace::Frame frame(workspace);
  if (rows == 0) {
    detail::forward_then_backward(dims, inputs, options, loss, outputs, cotangents, workspace);
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
  const std::int64_t rows = forward_backward_rows<S, W>(dims, layout, options, threads);
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
                                         const ScoringOptions& options, std::int64_t threads = 1) {
  const std::int64_t rows = forward_backward_rows<S, W>(dims, layout, options, threads);
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

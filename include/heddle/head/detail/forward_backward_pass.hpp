#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "heddle/core/factor.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/detail/block_tasks.hpp"
#include "heddle/head/detail/forward_pass.hpp"
#include "heddle/head/detail/gradient_pass.hpp"
#include "heddle/head/detail/logits_pass.hpp"
#include "heddle/head/logits_tile.hpp"
#include "heddle/head/options.hpp"

namespace heddle::head::detail {

/// forward_backward: all logits of a chunk's rows; D: CotangentStorage.
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
        logits_pass_(space, dims, inputs, columns_, threads),
        gradient_(space, dims, inputs, cotangents, most_rows, options.vocab_shards, threads),
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

}  // namespace heddle::head::detail

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/detail/block_tasks.hpp"
#include "heddle/head/detail/local_rows.hpp"
#include "heddle/head/detail/logits_pass.hpp"
#include "heddle/head/logits_tile.hpp"
#include "heddle/head/options.hpp"

namespace heddle::head::detail {

/// A simulated or real rank's place in the vocabulary: the grid of tiles is of all ranks' columns.
struct VocabPlace {
  std::int64_t first_column = 0;  ///< of the weight that is held
  std::int64_t vocab = 0;         ///< columns of all ranks
};

/// Whole cells of the grid of tiles: a block of the product where they are small.
[[nodiscard]] inline std::int64_t columns_grid(const ScoringOptions& options) {
  return std::max<std::int64_t>(product_columns / options.vocab_tile, 1) * options.vocab_tile;
}

/// Columns whose statistics are formed together, at most.
[[nodiscard]] inline std::int64_t stats_columns(const Dims& dims, const ScoringOptions& options) {
  if (options.mode != Mode::fused) {
    return dims.vocab;
  }
  return std::min(dims.vocab, columns_grid(options));
}

/// Rows of logits, `columns` wide, that the scratch may hold.
template <class T>
[[nodiscard]] std::int64_t rows_that_fit(std::int64_t bytes, std::int64_t columns) {
  const std::int64_t row_bytes = scratch_stride<T>(columns) * static_cast<std::int64_t>(sizeof(T));
  return std::max<std::int64_t>(bytes / row_bytes, 1);
}

/// Active rows of a chunk whose logits, `columns` wide, are kept: of one product always a chunk's.
template <class T>
[[nodiscard]] std::int64_t chunk_rows(const Dims& dims, const ScoringOptions& options,
                                      std::int64_t columns) {
  const std::int64_t most = std::min(options.chunk, std::max<std::int64_t>(dims.tokens, 1));
  return columns <= product_columns
             ? most
             : std::min(most, rows_that_fit<T>(options.scratch_bytes, columns));
}

template <Accumulator A>
void put(std::span<A> values, std::int64_t token, A value) {
  if (!values.empty()) {
    values[static_cast<std::size_t>(token)] = value;
  }
}

template <Accumulator A>
void put_score(const Outputs<A>& outputs, std::int64_t token, const RowScore<A>& score) {
  put(outputs.logps, token, score.logp);
  put(outputs.entropy, token, score.entropy);
  put(outputs.max, token, score.max);
  put(outputs.exp_sum, token, score.exp_sum);
  put(outputs.mean, token, score.mean);
}

template <Storage S, Storage W, Accumulator A>
void put_inactive(const Dims& dims, const Inputs<S, W>& inputs, const Outputs<A>& outputs) {
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    if (!inputs.is_active(t)) {
      put_score(outputs, t, RowScore<A>{});
    }
  }
}

/// Forward of any mode: logits of a chunk's rows, as many columns as are scored together.
template <Storage S, Storage W, Accumulator A>
class ForwardPass {
 public:
  template <class Space>
  ForwardPass(Space& space, const Dims& dims, const Inputs<S, W>& inputs,
              const ScoringOptions& options, std::int64_t threads)
      : dims_(dims),
        inputs_(inputs),
        options_(options),
        columns_(stats_columns(dims, options)),
        most_rows_(chunk_rows<A>(dims, options, columns_)),
        rows_(space, most_rows_),
        logits_pass_(space, dims, inputs, columns_, threads),
        tasks_(space, threads, LogitsPass<S, W, A>::piece_bytes(dims)) {
    logits_ = space.template take<A>(most_rows_ * scratch_stride<A>(columns_)).data();
    stats_ = space.template take<RowStats<A>>(most_rows_);
  }

  [[nodiscard]] std::int64_t most_rows() const { return most_rows_; }

  void run(A divisor, const Outputs<A>& outputs) {
    put_inactive(dims_, inputs_, outputs);
    rows_.for_each_chunk(
        dims_.tokens, most_rows_, [&](std::int64_t t) { return inputs_.is_active(t); },
        [&](std::span<const std::int32_t> tokens) {
          if (options_.mode == Mode::fused) {
            std::fill_n(stats_.begin(), tokens.size(), RowStats<A>{});
            for_each_shard(dims_.vocab, options_.vocab_shards, [&](Columns held) {
              add_columns(tokens, held, {0, dims_.vocab}, divisor, stats_);
            });
            for (std::size_t i = 0; i < tokens.size(); ++i) {
              put_score(outputs, tokens[i],
                        finish_row(stats_[i], options_.logp_form, options_.entropy_policy));
            }
          } else {
            score_whole_rows(tokens, divisor, outputs);
          }
        });
  }

  /// Adds all columns of the weight to the statistics of the call's active rows.
  void add_shard(const VocabPlace& place, A divisor, std::span<RowStats<A>> stats) {
    rows_.for_each_chunk(
        dims_.tokens, most_rows_, [&](std::int64_t t) { return inputs_.is_active(t); },
        [&](std::span<const std::int32_t> tokens) {
          for (std::size_t i = 0; i < tokens.size(); ++i) {
            stats_[i] = stats[static_cast<std::size_t>(tokens[i])];
          }
          add_columns(tokens, {0, dims_.vocab}, place, divisor, stats_);
          for (std::size_t i = 0; i < tokens.size(); ++i) {
            stats[static_cast<std::size_t>(tokens[i])] = stats_[i];
          }
        });
  }

 private:
  /// Adds `held` columns of the weight to the statistics of rows, on the grid of all ranks' tiles.
  void add_columns(std::span<const std::int32_t> tokens, Columns held, const VocabPlace& place,
                   A divisor, std::span<RowStats<A>> stats) {
    const std::int64_t tile = options_.vocab_tile;
    for_each_tile(
        held, -place.first_column % columns_grid(options_), columns_grid(options_),
        [&](Columns group) {
          logits_pass_.run(
              tokens, group, logits(tokens, group), tasks_, [&](std::int64_t row, std::span<A> z) {
                const std::int64_t target = target_of(tokens[static_cast<std::size_t>(row)], place);
                for_each_tile(group, -place.first_column % tile, tile, [&](Columns piece) {
                  add_logits(z.subspan(static_cast<std::size_t>(piece.first - group.first),
                                       static_cast<std::size_t>(piece.count())),
                             piece.first, target, divisor, options_.logits_dtype,
                             options_.entropy_policy, stats[static_cast<std::size_t>(row)]);
                });
              });
        });
  }

  [[nodiscard]] std::int64_t target_of(std::int32_t token, const VocabPlace& place) const {
    const std::int64_t column =
        target_column(inputs_.target_ids[static_cast<std::size_t>(token)], place.vocab);
    return column < place.first_column ? -1 : column - place.first_column;
  }

  [[nodiscard]] MatrixView<A> logits(std::span<const std::int32_t> tokens, Columns group) const {
    return {logits_, static_cast<std::int64_t>(tokens.size()), group.count(),
            scratch_stride<A>(columns_)};
  }

  void score_whole_rows(std::span<const std::int32_t> tokens, A divisor,
                        const Outputs<A>& outputs) {
    const std::int64_t shards = options_.mode == Mode::local ? options_.vocab_shards : 1;
    const bool wants_entropy = !outputs.entropy.empty() || !outputs.mean.empty();
    const Columns all{0, dims_.vocab};
    logits_pass_.run(
        tokens, all, logits(tokens, all), tasks_, [&](std::int64_t row, std::span<A> z) {
          const std::int32_t token = tokens[static_cast<std::size_t>(row)];
          const A largest =
              TileMath<A>::prepare(z.data(), dims_.vocab, options_.logits_dtype, nullptr, divisor);
          put_score(outputs, token,
                    local_score(std::span<const A>(z), largest, target_of(token, {0, dims_.vocab}),
                                shards, options_, wants_entropy));
        });
  }

  const Dims& dims_;
  const Inputs<S, W>& inputs_;
  const ScoringOptions& options_;
  std::int64_t columns_;
  std::int64_t most_rows_;
  ChunkRows rows_;
  LogitsPass<S, W, A> logits_pass_;
  BlockTasks tasks_;
  A* logits_ = nullptr;  // [rows, columns]
  std::span<RowStats<A>> stats_;
};

}  // namespace heddle::head::detail

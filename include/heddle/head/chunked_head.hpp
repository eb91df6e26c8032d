#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <type_traits>

#include "heddle/core/cost.hpp"
#include "heddle/core/elementwise.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/factor.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/detail/block_tasks.hpp"
#include "heddle/head/detail/gradient_pass.hpp"
#include "heddle/head/detail/local_rows.hpp"
#include "heddle/head/detail/logits_pass.hpp"
#include "heddle/head/logits_tile.hpp"
#include "heddle/head/options.hpp"

/// The head at the speed of its own matrix products: logits exist a tile at a time, in cache.
namespace heddle::head {

/// Log-prob of each row's target and entropy of its softmax; reference::forward says what that is, for
/// every input.
///
/// shapes    as Inputs and Outputs say
/// units     nats
/// dtypes    bf16, f32 or f64 storage, hidden and weight each their own under one accumulator A, and
///           scalars of the user's with the operations of a number; sums over columns in float lanes of
///           at most 1,024, in double beyond
/// writes    all of every output that is wanted, 0 at inactive rows
/// alias     outputs disjoint from inputs and from each other
/// specials  those of reference::forward; tokens = 0: no-op; inactive rows are never read or multiplied
/// order     logits: Gemm::fixed_order. Statistics: tiles of options.vocab_tile columns on one grid over
///           all columns, cut where ranks' columns end, in column order. A row's bits depend on the row,
///           the weight, the temperature, the policies, vocab_tile and the ranks' cuts alone: on no
///           chunk, layout, thread, path, stride or neighbour
/// accuracy  Mode::fused, in float, any tile up to 1,024: log-prob within an ulp of its log-sum of the
///           float64 answer for the same logits, entropy within 7 ulp (chunked_head_test.cpp)
/// memory    forward_workspace_bytes of the workspace: a tile of weight and of logits, never all columns
///           of a chunk but in Mode::local and Mode::unsharded, which take options.scratch_bytes
/// cost      forward_cost; Mode::fused takes an exponential a logit and one where a tile raises the
///           maximum of tiles before it, the other modes three
/// throws    Error as reference::forward
/// source    spec/head.md 1-3, 6; spec/performance.md 3
template <Storage S, Storage W, Accumulator A>
void forward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
             const Outputs<A>& outputs, Workspace& workspace);

/// The cotangents of hidden and weight under those of log-probs and entropy; reference::backward says
/// what they are. Logits are computed again, a tile at a time; both products read that tile's one
/// cotangent, made with one exponential a logit and rounded once.
///
/// shapes    as Inputs, Residuals, OutputCotangents and Cotangents say
/// dtypes    as forward; d_hidden and d_weight in A, not rounded to storage. LogitsDtype::bf16 under
///           float keeps cotangents of logits in bf16, so that bf16 storage meets in bf16 products
/// writes    all of d_hidden, 0 at rows that draw no gradient; d_weight as its Write says
/// alias     cotangents disjoint from everything read and from each other; either may be null
/// specials  those of reference::backward
/// order     d_hidden: columns ascending in blocks of 512, then ranks ascending: the same bits for any
///           chunk. d_weight: a chunk's rows in blocks of 512, then chunks. Same bits in either layout
///           and on any number of threads
/// accuracy  Mode::fused against Mode::local: 2.6e-8 of the largest cotangent of logits, 2e-6 with one
///           of the entropy (chunked_head_test.cpp)
/// memory    backward_workspace_bytes of the workspace, as forward and a chunk's rows of d_hidden
/// cost      backward_cost; Mode::fused an exponential a logit of rows with a cotangent, the other modes
///           two, four with one of the entropy
/// throws    Error as reference::backward
/// source    spec/head.md 4, 5, 6; spec/performance.md 3
template <Storage S, Storage W, Accumulator A>
void backward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
              const Residuals<A>& residuals, const OutputCotangents<A>& output_cotangents,
              const Cotangents<A>& cotangents, Workspace& workspace);

namespace detail {

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

/// Active rows of a chunk whose logits, `columns` wide, are kept.
template <class T>
[[nodiscard]] std::int64_t chunk_rows(const Dims& dims, const ScoringOptions& options,
                                      std::int64_t columns) {
  const std::int64_t fit = rows_that_fit<T>(options.scratch_bytes, columns);
  return std::min({options.chunk, std::max<std::int64_t>(dims.tokens, 1), fit});
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
        logits_pass_(space, dims, inputs, columns_),
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

 private:
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

/// Rounds logits to their dtype, into the storage of their cotangents.
template <class D, Accumulator A>
void round_logits(std::span<const A> logits, LogitsDtype dtype, std::span<D> rounded) {
  if constexpr (std::is_same_v<D, bfloat16>) {
    convert(logits, rounded);
  } else {
    for (std::size_t k = 0; k < logits.size(); ++k) {
      rounded[k] = dtype == LogitsDtype::bf16 ? widen<A>(narrow<bfloat16>(logits[k])) : logits[k];
    }
  }
}

/// Backward of any mode; D: CotangentStorage.
template <Storage S, Storage W, Accumulator A, Storage D>
class BackwardPass {
 public:
  template <class Space>
  BackwardPass(Space& space, const Dims& dims, const Inputs<S, W>& inputs,
               const ScoringOptions& options, const Cotangents<A>& cotangents, std::int64_t threads)
      : dims_(dims),
        inputs_(inputs),
        options_(options),
        columns_(options.mode == Mode::fused ? std::min(product_columns, dims.vocab) : dims.vocab),
        most_rows_(chunk_rows<A>(dims, options, columns_)),
        rows_(space, most_rows_),
        drawing_(space.template take<std::int32_t>(most_rows_)),
        row_terms_(space.template take<RowCotangent<A>>(most_rows_)),
        logits_pass_(space, dims, inputs, columns_),
        gradient_(space, dims, inputs, cotangents, most_rows_,
                  options.mode == Mode::unsharded ? 1 : options.vocab_shards),
        tasks_(space, threads,
               logits_bytes() + std::max(LogitsPass<S, W, A>::piece_bytes(dims),
                                         GradientPass<S, W, A, D>::piece_bytes(dims, most_rows_))) {
    if (options.mode != Mode::fused) {
      whole_rows_ = space.template take<A>(most_rows_ * scratch_stride<A>(columns_)).data();
    }
    d_logits_ =
        space
            .template take<D>(most_rows_ * scratch_stride<D>(std::min(product_columns, dims.vocab)))
            .data();
  }

  void run(A divisor, const Residuals<A>& residuals, const OutputCotangents<A>& given,
           MatrixView<A> d_hidden) {
    const auto draws = [&](std::int64_t token) {
      const auto t = static_cast<std::size_t>(token);
      return inputs_.is_active(token) &&
             (given.d_logps[t] != A(0) || (!given.d_entropy.empty() && given.d_entropy[t] != A(0)));
    };
    for (std::int64_t t = 0; t < dims_.tokens && !d_hidden.is_null(); ++t) {
      if (!draws(t)) {
        std::ranges::fill(d_hidden.row(t), A(0));
      }
    }
    rows_.for_each_chunk(
        dims_.tokens, most_rows_, [&](std::int64_t t) { return inputs_.is_active(t); },
        [&](std::span<const std::int32_t> tokens) {
          std::size_t count = 0;
          for (const std::int32_t token : tokens) {
            if (draws(token)) {
              drawing_[count++] = token;
            }
          }
          run_chunk(drawing_.first(count), divisor, residuals, given);
        });
    gradient_.finish();
  }

 private:
  /// A block of logits in float whose cotangents are kept in bf16.
  [[nodiscard]] static constexpr std::size_t logits_bytes() {
    return std::is_same_v<D, A>
               ? 0
               : Workspace::bytes_for<A>(block_rows * scratch_stride<A>(product_columns));
  }

  [[nodiscard]] MatrixView<D> tile_view(std::int64_t rows, Columns columns) const {
    return {d_logits_, rows, columns.count(),
            scratch_stride<D>(std::min(product_columns, dims_.vocab))};
  }

  void run_chunk(std::span<const std::int32_t> tokens, A divisor, const Residuals<A>& residuals,
                 const OutputCotangents<A>& given) {
    const auto rows = static_cast<std::int64_t>(tokens.size());
    const auto at = [](std::span<const A> values, std::int32_t token) {
      return values.empty() ? A(0) : values[static_cast<std::size_t>(token)];
    };
    const auto tile_rows = [&](Columns columns) {
      return as_is(MatrixView<const D>(tile_view(rows, columns)));
    };
    if (options_.mode == Mode::fused) {
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        const std::int32_t token = tokens[i];
        row_terms_[i] = row_cotangent(
            at(given.d_logps, token), at(given.d_entropy, token), at(residuals.max, token),
            at(residuals.exp_sum, token), at(residuals.mean, token),
            target_column(inputs_.target_ids[static_cast<std::size_t>(token)], dims_.vocab));
      }
      gradient_.run(
          tokens, tasks_, [&](Columns columns) { logits_pass_.load(columns, tasks_); },
          [&](Columns columns, std::int64_t first, std::int64_t last,
              std::span<std::byte> scratch) {
            return make_fused(tokens, columns, first, last, divisor, scratch);
          },
          tile_rows);
      return;
    }
    differentiate_whole_rows(tokens, divisor, given);
    gradient_.run(
        tokens, tasks_, [](Columns) {},
        [&](Columns columns, std::int64_t first, std::int64_t last, std::span<std::byte>) {
          const MatrixView<const A> whole(whole_rows_, rows, dims_.vocab,
                                          scratch_stride<A>(columns_));
          const MatrixView<D> tile = tile_view(rows, columns);
          for (std::int64_t row = first; row < last; ++row) {
            round_logits<D, A>(whole.column_block(columns.first, columns.count()).row(row),
                               LogitsDtype::accumulator, tile.row(row));
          }
          return as_is(MatrixView<const D>(tile.row_block(first, last - first)));
        },
        tile_rows);
  }

  /// Rows [first, last) of a tile: logits, then their cotangents in place.
  [[nodiscard]] Factor<D> make_fused(std::span<const std::int32_t> tokens, Columns columns,
                                     std::int64_t first, std::int64_t last, A divisor,
                                     std::span<std::byte> scratch) {
    const std::int64_t count = last - first;
    const MatrixView<D> d_logits =
        tile_view(static_cast<std::int64_t>(tokens.size()), columns).row_block(first, count);
    MatrixView<A> logits;
    if constexpr (std::is_same_v<D, A>) {
      logits = d_logits;
    } else {
      logits = {reinterpret_cast<A*>(scratch.data()), count, columns.count(),
                scratch_stride<A>(product_columns)};
    }
    const std::span<std::byte> product_scratch = scratch.subspan(logits_bytes());
    logits_pass_.multiply_rows(
        tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)), logits,
        product_scratch);
    for (std::int64_t row = 0; row < count; ++row) {
      const std::span<D> d = d_logits.row(row);
      round_logits<D, A>(logits.row(row), options_.logits_dtype, d);
      logits_cotangent(std::span<const D>(d), columns.first, LogitsState::rounded,
                       options_.logits_dtype, divisor,
                       row_terms_[static_cast<std::size_t>(first + row)], d);
    }
    return as_is(MatrixView<const D>(d_logits));
  }

  void differentiate_whole_rows(std::span<const std::int32_t> tokens, A divisor,
                                const OutputCotangents<A>& given) {
    const auto rows = static_cast<std::int64_t>(tokens.size());
    const MatrixView<A> whole(whole_rows_, rows, dims_.vocab, scratch_stride<A>(columns_));
    const std::int64_t shards = options_.mode == Mode::local ? options_.vocab_shards : 1;
    logits_pass_.run(
        tokens, {0, dims_.vocab}, whole, tasks_, [&](std::int64_t row, std::span<A> x) {
          const auto token = static_cast<std::size_t>(tokens[static_cast<std::size_t>(row)]);
          const A largest =
              TileMath<A>::prepare(x.data(), dims_.vocab, options_.logits_dtype, nullptr, divisor);
          local_row_cotangent(x, largest, target_column(inputs_.target_ids[token], dims_.vocab),
                              given.d_logps[token],
                              given.d_entropy.empty() ? A(0) : given.d_entropy[token], shards,
                              divisor, options_);
        });
  }

  const Dims& dims_;
  const Inputs<S, W>& inputs_;
  const ScoringOptions& options_;
  std::int64_t columns_;
  std::int64_t most_rows_;
  ChunkRows rows_;
  std::span<std::int32_t> drawing_;  // tokens of the chunk that have a cotangent
  std::span<RowCotangent<A>> row_terms_;
  LogitsPass<S, W, A> logits_pass_;
  GradientPass<S, W, A, D> gradient_;
  BlockTasks tasks_;
  A* whole_rows_ = nullptr;  // [rows, vocab], Mode::local and Mode::unsharded
  D* d_logits_ = nullptr;    // [rows, product_columns]
};

/// Calls body with a D{}: how cotangents of logits are kept.
template <Accumulator A, class Body>
decltype(auto) with_cotangent_storage(LogitsDtype dtype, const Body& body) {
  if (dtype == LogitsDtype::bf16) {
    return body(CotangentStorage<A, LogitsDtype::bf16>{});
  }
  return body(CotangentStorage<A, LogitsDtype::accumulator>{});
}

template <Storage S, Storage W, Accumulator A>
inline constexpr bool accumulates_in =
    std::is_same_v<A, AccumulatorOf<S>>&& std::is_same_v<A, AccumulatorOf<W>>;

inline void require_row_ids(std::string_view where, const Dims& dims) {
  require(dims.tokens <= std::numeric_limits<std::int32_t>::max(), where, "dims.tokens",
          dims.tokens, "must fit an int32 row id");
}

}  // namespace detail

template <Storage S, Storage W, Accumulator A>
void forward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
             const Outputs<A>& outputs, Workspace& workspace) {
  static_assert(detail::accumulates_in<S, W, A>,
                "heddle::head::forward: outputs must be in the accumulator of hidden and weight");
  constexpr const char* where = "head::forward";
  detail::require_valid(where, dims, inputs, options);
  const A divisor = detail::temperature_divisor<A>(where, options);
  detail::require_valid(where, dims, outputs);
  detail::require_row_ids(where, dims);
  const Workspace::Frame frame(workspace);
  detail::ForwardPass<S, W, A> pass(workspace, dims, inputs, options, detail::arena_threads());
  pass.run(divisor, outputs);
}

template <Storage S, Storage W, Accumulator A>
void backward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
              const Residuals<A>& residuals, const OutputCotangents<A>& output_cotangents,
              const Cotangents<A>& cotangents, Workspace& workspace) {
  static_assert(
      detail::accumulates_in<S, W, A>,
      "heddle::head::backward: cotangents must be in the accumulator of hidden and weight");
  constexpr const char* where = "head::backward";
  detail::require_valid(where, dims, inputs, options);
  const A divisor = detail::temperature_divisor<A>(where, options);
  detail::require_valid(where, dims, options, residuals, output_cotangents);
  detail::require_valid(where, dims, inputs.layout, cotangents);
  detail::require_row_ids(where, dims);
  detail::with_cotangent_storage<A>(options.logits_dtype, [&]<class D>(D) {
    const Workspace::Frame frame(workspace);
    detail::BackwardPass<S, W, A, D> pass(workspace, dims, inputs, options, cotangents,
                                          detail::arena_threads());
    pass.run(divisor, residuals, output_cotangents, cotangents.d_hidden);
  });
}

/// Bytes of workspace that forward takes of hidden states stored as S and a weight stored as W, in an
/// arena of so many threads.
///
/// throws    Error for dims and options
template <Storage S, Storage W = S>
[[nodiscard]] std::size_t forward_workspace_bytes(const Dims& dims, const ScoringOptions& options,
                                                  std::int64_t threads = 1) {
  dims.validate("head::forward_workspace_bytes");
  options.validate("head::forward_workspace_bytes");
  detail::ByteCounter counter;
  const detail::ForwardPass<S, W, AccumulatorOf<S>> pass(counter, dims, Inputs<S, W>{}, options,
                                                         threads);
  return counter.bytes();
}

/// The same of backward, both cotangents wanted.
template <Storage S, Storage W = S>
[[nodiscard]] std::size_t backward_workspace_bytes(const Dims& dims, WeightLayout layout,
                                                   const ScoringOptions& options,
                                                   std::int64_t threads = 1) {
  using A = AccumulatorOf<S>;
  dims.validate("head::backward_workspace_bytes");
  options.validate("head::backward_workspace_bytes");
  A wanted{};
  const Cotangents<A> both{.d_hidden = {&wanted, 1, 1}, .d_weight = {.values = {&wanted, 1, 1}}};
  const Inputs<S, W> inputs{.layout = layout};
  detail::ByteCounter counter;
  detail::with_cotangent_storage<A>(options.logits_dtype, [&]<class D>(D) {
    const detail::BackwardPass<S, W, A, D> pass(counter, dims, inputs, options, both, threads);
  });
  return counter.bytes();
}

namespace detail {

template <Storage S, Storage W>
[[nodiscard]] Cost pass_cost(const Dims& dims, const ScoringOptions& options,
                             std::int64_t products) {
  const std::int64_t rows = std::min(options.chunk, std::max<std::int64_t>(dims.tokens, 1));
  const std::int64_t chunks = (dims.tokens + rows - 1) / rows;
  return {.flops = products * 2 * dims.tokens * dims.hidden * dims.vocab,
          .transcendentals = dims.tokens * dims.vocab,
          .bytes_read = chunks * dims.hidden * dims.vocab * static_cast<std::int64_t>(sizeof(W)) +
                        dims.tokens * dims.hidden * static_cast<std::int64_t>(sizeof(S))};
}

}  // namespace detail

/// What forward costs where every token is active, in Mode::fused. The exponentials of rising maxima,
/// at most one a row and tile, depend on the data and are not counted.
template <Storage S, Storage W = S>
[[nodiscard]] Cost forward_cost(const Dims& dims, const ScoringOptions& options) {
  Cost cost = detail::pass_cost<S, W>(dims, options, 1);
  cost.transcendentals += dims.tokens;  // a logarithm each
  cost.bytes_written = 5 * dims.tokens * static_cast<std::int64_t>(sizeof(AccumulatorOf<S>));
  return cost;
}

/// What backward costs where every token has a cotangent: logits again and both products. d_weight is
/// read and written once a chunk.
template <Storage S, Storage W = S>
[[nodiscard]] Cost backward_cost(const Dims& dims, const ScoringOptions& options) {
  using A = AccumulatorOf<S>;
  constexpr auto element = static_cast<std::int64_t>(sizeof(A));
  Cost cost = detail::pass_cost<S, W>(dims, options, 3);
  const std::int64_t rows = std::min(options.chunk, std::max<std::int64_t>(dims.tokens, 1));
  const std::int64_t chunks = (dims.tokens + rows - 1) / rows;
  const std::int64_t weight = dims.hidden * dims.vocab * element;
  cost.bytes_read += std::max<std::int64_t>(chunks - 1, 0) * weight + 5 * dims.tokens * element;
  cost.bytes_written =
      std::max<std::int64_t>(chunks, 1) * weight + dims.tokens * dims.hidden * element;
  return cost;
}

}  // namespace heddle::head

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "heddle/core/elementwise.hpp"
#include "heddle/core/factor.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/detail/block_tasks.hpp"
#include "heddle/head/detail/forward_pass.hpp"
#include "heddle/head/detail/gradient_pass.hpp"
#include "heddle/head/detail/local_rows.hpp"
#include "heddle/head/detail/logits_pass.hpp"
#include "heddle/head/logits_tile.hpp"
#include "heddle/head/options.hpp"

namespace heddle::head::detail {

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
        logits_pass_(space, dims, inputs, columns_, threads),
        gradient_(space, dims, inputs, cotangents, most_rows_,
                  options.mode == Mode::unsharded ? 1 : options.vocab_shards, threads),
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
           MatrixView<A> d_hidden, Write d_hidden_write = Write::overwrite) {
    const auto draws = [&](std::int64_t token) {
      const auto t = static_cast<std::size_t>(token);
      return inputs_.is_active(token) &&
             (given.d_logps[t] != A(0) || (!given.d_entropy.empty() && given.d_entropy[t] != A(0)));
    };
    if (d_hidden_write == Write::accumulate) {
      gradient_.add_to_d_hidden();
      d_hidden = {};  // rows that draw nothing stay as they are
    }
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
               : Workspace::bytes_for<A>(block_rows<W> * scratch_stride<A>(product_columns));
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
          tokens, tasks_, [&](Columns columns) { logits_pass_.load(columns, rows, tasks_); },
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

}  // namespace heddle::head::detail

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/chunked_head.hpp"
#include "heddle/head/logits_tile.hpp"
#include "heddle/head/options.hpp"

/// One rank's share of a vocabulary whose columns are split over ranks, and the slice entry of a loop over
/// columns. A rank adds its columns to the statistics of rows; what crosses ranks is a RowStats a row,
/// either handed on from rank to rank, or merged in rank order.
namespace heddle::head {

/// Where a weight's columns lie among all ranks'.
///
/// throws    validate: Error for a first column < 0, columns beyond vocab, a vocab beyond int32
struct VocabShard {
  std::int64_t first_column = 0;
  std::int64_t vocab = 0;  ///< columns of all ranks

  void validate(std::string_view where, const Dims& dims) const {
    require(first_column >= 0, where, "shard.first_column", first_column, "must be >= 0");
    require(vocab <= std::numeric_limits<std::int32_t>::max(), where, "shard.vocab", vocab,
            "must fit an int32 id");
    require(first_column + dims.vocab <= vocab, where, "shard.vocab", vocab,
            "must hold the shard's columns");
  }
};

namespace detail {

template <Storage S, Storage W>
void require_valid(std::string_view where, const Dims& dims, const Inputs<S, W>& inputs,
                   const VocabShard& shard, const ScoringOptions& options) {
  ScoringOptions any_id = options;  // ids are of the whole vocabulary
  any_id.id_policy = IdPolicy::wrap;
  require_valid(where, dims, inputs, any_id);
  require(options.mode == Mode::fused, where, "options.mode", options.mode, "must be fused");
  shard.validate(where, dims);
  require_row_ids(where, dims);
  for (std::int64_t t = 0; t < dims.tokens && options.id_policy == IdPolicy::strict; ++t) {
    const std::int32_t id = inputs.target_ids[static_cast<std::size_t>(t)];
    if (inputs.is_active(t) && (id < 0 || id >= shard.vocab)) [[unlikely]] {
      fail(where, element_name("inputs.target_ids", t), id,
           "must be in [0, shard.vocab (" + std::to_string(shard.vocab) + ")) on an active row");
    }
  }
}

}  // namespace detail

/// Adds a rank's columns to the statistics of every active row.
///
/// shapes    as forward, dims.vocab the rank's columns; stats [tokens]; target_ids of all ranks' columns
/// writes    stats of active rows: RowStats{} before the first rank
/// order     tiles lie on one grid over all ranks' columns. Where ranks end on it and each goes on from
///           the last one's statistics, rows have the bits of one device
/// memory    forward_workspace_bytes(dims, options)
/// throws    Error as forward, and for the shard; options.mode must be fused
/// source    spec/head.md 6
template <Storage S, Storage W, Accumulator A>
void add_shard_stats(const Dims& dims, const Inputs<S, W>& inputs, const VocabShard& shard,
                     const ScoringOptions& options, std::span<RowStats<A>> stats,
                     Workspace& workspace) {
  constexpr const char* where = "head::add_shard_stats";
  detail::require_valid(where, dims, inputs, shard, options);
  const A divisor = detail::temperature_divisor<A>(where, options);
  require_length(where, "stats", stats, "dims.tokens", dims.tokens);
  const Workspace::Frame frame(workspace);
  detail::ForwardPass<S, W, A> pass(workspace, dims, inputs, options, detail::arena_threads());
  pass.add_shard({shard.first_column, shard.vocab}, divisor, stats);
}

/// Every output from the statistics of all ranks' columns.
///
/// shapes    active, as in Inputs, empty or [tokens]; stats and outputs [tokens]
/// writes    all of every output that is wanted, 0 at inactive rows
/// throws    Error for lengths and options
template <Accumulator A>
void finish_scores(const Dims& dims, std::span<const std::uint8_t> active,
                   const ScoringOptions& options, std::span<const RowStats<A>> stats,
                   const Outputs<A>& outputs) {
  constexpr const char* where = "head::finish_scores";
  dims.validate(where);
  detail::require_length_if_given(where, "active", active, "dims.tokens", dims.tokens);
  options.validate(where);
  require_length(where, "stats", stats, "dims.tokens", dims.tokens);
  detail::require_valid(where, dims, outputs);
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    const auto at = static_cast<std::size_t>(t);
    detail::put_score(outputs, t,
                      !active.empty() && active[at] == 0
                          ? RowScore<A>{}
                          : finish_row(stats[at], options.logp_form, options.entropy_policy));
  }
}

/// backward of a rank's columns: d_weight is the rank's own, d_hidden a share to be added over ranks in
/// rank order. Only the owner of a target adds its one-hot; every rank has the softmax part.
///
/// writes    d_hidden as `d_hidden_write` says: handed on from rank to rank and added to, where ranks end
///           on blocks of 512 columns, it has the bits of one device
/// shapes    as backward, dims.vocab the rank's columns; residuals of all ranks' columns
/// memory    backward_workspace_bytes(dims, layout, options) and an int32 a token
/// throws    Error as backward, and for the shard; options.mode must be fused
/// source    spec/head.md 6
template <Storage S, Storage W, Accumulator A>
void shard_backward(const Dims& dims, const Inputs<S, W>& inputs, const VocabShard& shard,
                    const ScoringOptions& options, const Residuals<A>& residuals,
                    const OutputCotangents<A>& output_cotangents, const Cotangents<A>& cotangents,
                    Workspace& workspace, Write d_hidden_write = Write::overwrite) {
  constexpr const char* where = "head::shard_backward";
  detail::require_valid(where, dims, inputs, shard, options);
  const Workspace::Frame frame(workspace);
  const auto own_ids = workspace.take<std::int32_t>(dims.tokens);
  for (std::size_t t = 0; t < own_ids.size(); ++t) {
    const std::int64_t column =
        detail::target_column(inputs.target_ids[t], shard.vocab) - shard.first_column;
    // An id that names none of the rank's columns, under IdPolicy::wrap.
    own_ids[t] = column >= 0 && column < dims.vocab ? static_cast<std::int32_t>(column)
                                                    : std::numeric_limits<std::int32_t>::min();
  }
  Inputs<S, W> own = inputs;
  own.target_ids = own_ids;
  ScoringOptions wrapping = options;
  wrapping.id_policy = IdPolicy::wrap;
  detail::require_valid_backward(where, dims, own, wrapping, residuals, output_cotangents,
                                 cotangents, detail::WeightExtents{dims.hidden, dims.vocab});
  detail::run_backward(dims, own, wrapping, residuals, output_cotangents, cotangents,
                       d_hidden_write, workspace);
}

}  // namespace heddle::head

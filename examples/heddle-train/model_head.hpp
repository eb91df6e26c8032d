#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "heddle-train/model.hpp"
#include "heddle-train/tokens.hpp"
#include "heddle/head/reference.hpp"
#include "heddle/head/target.hpp"

namespace heddle::train {

namespace detail {

template <Storage S>
[[nodiscard]] head::Inputs<S> head_inputs(const RowActivations<S>& kept,
                                          ConstMatrixView<S> weight) {
  return {.hidden = constant_view(kept.head_in),
          .weight = weight,
          .layout = head::WeightLayout::vd,
          .target_ids = kept.target_ids,
          .active = kept.active};
}

[[nodiscard]] inline head::Dims head_dims(const ModelDims& dims, std::int64_t tokens) {
  return {.tokens = tokens, .hidden = dims.hidden, .vocab = dims.vocab};
}

}  // namespace detail

template <Storage S>
void Model<S>::head_forward(const RowInputs& row, RowActivations<S>& kept) const {
  const auto tokens = row.token_ids.size();
  kept.scored.resize(tokens);
  kept.target_ids.resize(tokens);
  kept.active.resize(tokens);
  head::scored_tokens(row.segment_ids, row.segment_positions, kept.scored);
  head::shift_targets({.token_ids = row.token_ids,
                       .segment_ids = row.segment_ids,
                       .segment_positions = row.segment_positions},
                      {.target_ids = kept.target_ids, .active = kept.active});
  std::vector<A> logps(tokens);
  std::vector<A> entropy(tokens);
  kept.head_max.resize(tokens);
  kept.head_exp_sum.resize(tokens);
  head::reference::forward(detail::head_dims(layout_.dims(), row.tokens()),
                           detail::head_inputs<S>(kept, weights_.head), head::ScoringOptions{},
                           head::Outputs<A>{.logps = logps,
                                            .entropy = entropy,
                                            .max = kept.head_max,
                                            .exp_sum = kept.head_exp_sum,
                                            .mean = {}});
  kept.logps.resize(tokens);
  kept.entropy.resize(tokens);
  head::to_token_frame<A>(logps, kept.scored, kept.logps);
  head::to_token_frame<A>(entropy, kept.scored, kept.entropy);
}

template <Storage S>
void Model<S>::head_backward(const RowActivations<S>& kept, std::span<const A> d_logps,
                             MatrixView<A> d_head_in, MatrixView<A> d_weight) const {
  std::vector<A> shifted(d_logps.size());
  head::to_hidden_frame<A>(d_logps, kept.scored, std::span<A>(shifted));
  head::reference::backward(
      detail::head_dims(layout_.dims(), d_head_in.rows()),
      detail::head_inputs<S>(kept, weights_.head), head::ScoringOptions{},
      head::Residuals<A>{.max = kept.head_max, .exp_sum = kept.head_exp_sum, .mean = {}},
      head::OutputCotangents<A>{.d_logps = shifted, .d_entropy = {}},
      head::Cotangents<A>{.d_hidden = d_head_in,
                          .d_weight = {.values = d_weight, .write = Write::accumulate}});
}

}  // namespace heddle::train

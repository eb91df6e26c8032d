#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "heddle-train/model.hpp"
#include "heddle-train/tokens.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/chunked_head.hpp"
#include "heddle/head/forward_backward.hpp"
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

/// Scores from the hidden frame into the row's.
template <Storage S>
void keep_scores(std::span<const AccumulatorOf<S>> logps, std::span<const AccumulatorOf<S>> entropy,
                 RowActivations<S>& kept) {
  using A = AccumulatorOf<S>;
  kept.logps.resize(logps.size());
  kept.entropy.resize(entropy.size());
  head::to_token_frame<A>(logps, kept.scored, kept.logps);
  head::to_token_frame<A>(entropy, kept.scored, kept.entropy);
}

/// A loss of the token frame, asked by the rows of the hidden frame: row j speaks of token j + 1.
template <class A, class Loss>
struct NextTokenLoss {
  const Loss& loss;
  bool& differentiated;

  [[nodiscard]] auto operator()(std::int64_t row, A logp, A entropy) const {
    const auto share = loss(row + 1, logp, entropy);
    differentiated = differentiated || share.d_logp != A(0) || share.d_entropy != A(0);
    return share;
  }
};

}  // namespace detail

template <Storage S>
void Model<S>::place_targets(const RowInputs& row, RowActivations<S>& kept) const {
  const auto tokens = row.token_ids.size();
  kept.scored.resize(tokens);
  kept.target_ids.resize(tokens);
  kept.active.resize(tokens);
  head::scored_tokens(row.segment_ids, row.segment_positions, kept.scored);
  head::shift_targets({.token_ids = row.token_ids,
                       .segment_ids = row.segment_ids,
                       .segment_positions = row.segment_positions},
                      {.target_ids = kept.target_ids, .active = kept.active});
}

template <Storage S>
void Model<S>::head_forward(const RowInputs& row, RowActivations<S>& kept) const {
  place_targets(row, kept);
  const auto tokens = row.token_ids.size();
  std::vector<A> logps(tokens);
  std::vector<A> entropy(tokens);
  kept.head_max.resize(tokens);
  kept.head_exp_sum.resize(tokens);
  head::forward(detail::head_dims(layout_.dims(), row.tokens()),
                detail::head_inputs<S>(kept, weights_.head), head::ScoringOptions{},
                head::Outputs<A>{.logps = logps,
                                 .entropy = entropy,
                                 .max = kept.head_max,
                                 .exp_sum = kept.head_exp_sum,
                                 .mean = {}},
                kept.scratch);
  detail::keep_scores<S>(logps, entropy, kept);
}

template <Storage S>
void Model<S>::head_backward(const RowActivations<S>& kept, std::span<const A> d_logps,
                             MatrixView<A> d_head_in, MatrixView<A> d_weight) const {
  std::vector<A> shifted(d_logps.size());
  head::to_hidden_frame<A>(d_logps, kept.scored, std::span<A>(shifted));
  Workspace scratch;
  head::backward(detail::head_dims(layout_.dims(), d_head_in.rows()),
                 detail::head_inputs<S>(kept, weights_.head), head::ScoringOptions{},
                 head::Residuals<A>{.max = kept.head_max, .exp_sum = kept.head_exp_sum, .mean = {}},
                 head::OutputCotangents<A>{.d_logps = shifted, .d_entropy = {}},
                 head::Cotangents<A>{.d_hidden = d_head_in,
                                     .d_weight = {.values = d_weight, .write = Write::accumulate}},
                 scratch);
}

template <Storage S>
template <class Loss>
double Model<S>::forward_backward(const RowInputs& row, RowActivations<S>& kept, const Loss& loss,
                                  std::span<A> gradient, bool& differentiated) const {
  require_length("train::Model::forward_backward", "gradient", gradient, "layout.size",
                 layout_.size());
  trunk_forward(row, kept);
  place_targets(row, kept);
  const ModelViews<A> gradients = layout_.views(gradient.data());
  const auto tokens = row.token_ids.size();
  std::vector<A> logps(tokens);
  std::vector<A> entropy(tokens);
  std::vector<double> losses(tokens);
  Matrix<A> d_head_in(row.tokens(), layout_.dims().hidden);
  differentiated = false;
  head::forward_backward(
      detail::head_dims(layout_.dims(), row.tokens()), detail::head_inputs<S>(kept, weights_.head),
      head::ScoringOptions{}, detail::NextTokenLoss<A, Loss>{loss, differentiated},
      head::LossOutputs<A>{.scores = {.logps = logps, .entropy = entropy}, .losses = losses},
      head::Cotangents<A>{.d_hidden = view(d_head_in),
                          .d_weight = {.values = gradients.head, .write = Write::accumulate}},
      kept.scratch);
  detail::keep_scores<S>(logps, entropy, kept);
  if (differentiated) {
    trunk_backward(row, kept, d_head_in, gradients);
  }
  double sum = 0;
  for (const double value : losses) {
    sum += value;
  }
  return sum;
}

}  // namespace heddle::train

#pragma once

#include <cstdint>
#include <span>

#include "heddle-train/model.hpp"
#include "heddle-train/model_mixer.hpp"
#include "heddle-train/norm.hpp"
#include "heddle-train/tokens.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/arguments.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/expert_layer.hpp"
#include "heddle/moe/residuals.hpp"
#include "heddle/moe/routing_map.hpp"

namespace heddle::train {

namespace detail {

[[nodiscard]] inline moe::Dims expert_dims(const ModelDims& dims, std::int64_t tokens) {
  return {.tokens = tokens,
          .hidden = dims.hidden,
          .experts = dims.experts,
          .top_k = dims.experts_per_token,
          .expert_hidden = dims.expert_dim,
          .shared_hidden = dims.shared_dim};
}

// The router stays wide: a choice between close logits should not hang on eight bits.
template <Storage S>
[[nodiscard]] moe::Inputs<S, AccumulatorOf<S>> expert_inputs(
    std::int64_t layer, const LayerViews<const S>& weights,
    const LayerViews<const AccumulatorOf<S>>& wide, const RowInputs& row,
    const LayerActivations<S>& kept) {
  return {.hidden = constant_view(kept.experts_in),
          .router_weight = wide.router_weight,
          .wi = weights.wi,
          .wo = weights.wo,
          .shared_wi = weights.shared_wi,
          .shared_wo = weights.shared_wo,
          .shared_gate = weights.shared_gate,
          .forced_ids = row.forced_experts.empty()
                            ? ConstMatrixView<std::int32_t>()
                            : row.forced_experts[static_cast<std::size_t>(layer)],
          .segment_ids = row.segment_ids};
}

}  // namespace detail

// x <- x + experts(norm(x)), from kept.between into `stream`.
template <Storage S>
void Model<S>::experts_forward(std::int64_t layer, const RowInputs& row,
                               std::span<const TokenRun> runs, LayerActivations<S>& kept,
                               Matrix<A>& stream) const {
  const ModelDims& dims = layout_.dims();
  const LayerViews<const A>& wide = wide_.layers[static_cast<std::size_t>(layer)];
  const LayerViews<const S>& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t tokens = row.tokens();

  kept.experts_in.resize(tokens, dims.hidden);
  kept.post_inverse_root.resize(static_cast<std::size_t>(tokens));
  zero_padding(runs, kept.experts_in);  // the shared expert runs on every row
  for (const TokenRun& run : runs) {
    rms_norm<S, A>(constant_view(kept.between).row_block(run.first, run.count), wide.post_norm,
                   dims.norm_eps, view(kept.experts_in).row_block(run.first, run.count),
                   detail::entries(kept.post_inverse_root, run));
  }
  Matrix<A> out(tokens, dims.hidden);
  kept.expert_ids.resize(tokens, dims.experts_per_token);
  kept.expert_weights.resize(tokens, dims.experts_per_token);
  const moe::Dims expert_dims = detail::expert_dims(dims, tokens);
  const moe::Options options;
  {
    // The frame ends at once: nobody else takes from this memory, and the next row finds it again.
    const Workspace::Frame frame(kept.experts_memory);
    kept.experts = moe::take_residuals<S>(expert_dims, options.dispatch, kept.experts_memory);
  }
  Workspace workspace;
  moe::RoutingMapBuilder maps(workspace);
  moe::forward(expert_dims, detail::expert_inputs<S>(layer, weights, wide, row, kept), options,
               moe::Outputs<A>{.out = view(out),
                               .expert_ids = view(kept.expert_ids),
                               .expert_weights = view(kept.expert_weights),
                               .router_logits = {},
                               .group_sizes = {}},
               kept.experts, maps, workspace);
  stream.resize(tokens, dims.hidden);
  for (const TokenRun& run : runs) {
    stream.middleRows(run.first, run.count) =
        kept.between.middleRows(run.first, run.count) + out.middleRows(run.first, run.count);
  }
}

// d_stream: d loss / d (what the layer leaves) coming in, d loss / d kept.between going out.
template <Storage S>
void Model<S>::experts_backward(std::int64_t layer, const RowInputs& row,
                                std::span<const TokenRun> runs, const LayerActivations<S>& kept,
                                Matrix<A>& d_stream, const LayerViews<A>& gradient) const {
  const ModelDims& dims = layout_.dims();
  const LayerViews<const A>& wide = wide_.layers[static_cast<std::size_t>(layer)];
  const LayerViews<const S>& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t tokens = row.tokens();

  Matrix<S> d_out(tokens, dims.hidden);
  zero_padding(runs, d_out);
  for (const TokenRun& run : runs) {
    store_rows(run, d_stream, d_out);
  }
  Matrix<A> d_experts_in(tokens, dims.hidden);
  Workspace workspace;
  moe::Options options;
  options.router_training = router_;
  const bool frozen = router_ == moe::RouterTraining::frozen;
  const auto accumulate = [](MatrixView<A> values) {
    return WeightCotangent<A>{.values = values, .write = Write::accumulate};
  };
  moe::backward(
      detail::expert_dims(dims, tokens), detail::expert_inputs<S>(layer, weights, wide, row, kept),
      moe::OutputCotangents<S>{.d_out = constant_view(d_out), .d_router_logits = {}}, options,
      kept.experts,
      moe::InputCotangents<A>{
          .d_hidden = view(d_experts_in),
          .d_router_weight = accumulate(frozen ? MatrixView<A>() : gradient.router_weight),
          .d_wi = accumulate(gradient.wi),
          .d_wo = accumulate(gradient.wo),
          .d_shared_wi = accumulate(gradient.shared_wi),
          .d_shared_wo = accumulate(gradient.shared_wo),
          .d_shared_gate = accumulate(gradient.shared_gate)},
      workspace);
  for (const TokenRun& run : runs) {
    rms_norm_backward<A>(constant_view(kept.between).row_block(run.first, run.count),
                         wide.post_norm, detail::entries(kept.post_inverse_root, run),
                         constant_view(d_experts_in).row_block(run.first, run.count),
                         view(d_stream).row_block(run.first, run.count), gradient.post_norm);
  }
}

}  // namespace heddle::train

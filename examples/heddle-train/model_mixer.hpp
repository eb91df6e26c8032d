#pragma once

#include <cstdint>
#include <span>

#include "heddle-train/model.hpp"
#include "heddle-train/norm.hpp"
#include "heddle-train/tokens.hpp"
#include "heddle/gdn/layer.hpp"

namespace heddle::train {

namespace detail {

[[nodiscard]] inline gdn::Dims mixer_dims(const ModelDims& dims, std::int64_t tokens) {
  return {.tokens = tokens,
          .key_heads = dims.key_heads,
          .value_heads = dims.value_heads,
          .key_dim = dims.key_dim,
          .value_dim = dims.value_dim,
          .kernel = dims.conv_width};
}

/// Rows [run.first, run.first + run.count) of a vector with one entry a token.
template <class Vector>
[[nodiscard]] auto entries(Vector& values, const TokenRun& run) {
  return std::span(values).subspan(static_cast<std::size_t>(run.first),
                                   static_cast<std::size_t>(run.count));
}

template <Storage S>
[[nodiscard]] gdn::Inputs<S> mixer_inputs(const LayerViews<const S>& weights,
                                          const LayerViews<const AccumulatorOf<S>>& wide,
                                          const RowInputs& row, const LayerActivations<S>& kept) {
  return {.qkv = constant_view(kept.qkv),
          .conv_weight = weights.conv_weight,
          .conv_bias = {},
          .a = constant_view(kept.a),
          .b = constant_view(kept.b),
          .A_log = wide.a_log,
          .dt_bias = wide.dt_bias,
          .segment_ids = row.segment_ids,
          .conv_state = {},
          .recurrent_state = {}};
}

}  // namespace detail

// x <- x + W_out gated_norm(recurrence(conv(W_qkv u), W_a u, W_b u), W_z u), u = norm(x); from
// kept.entering into kept.between.
template <Storage S>
void Model<S>::mixer_forward(std::int64_t layer, const RowInputs& row,
                             std::span<const TokenRun> runs, LayerActivations<S>& kept) const {
  const ModelDims& dims = layout_.dims();
  const LayerViews<const A>& wide = wide_.layers[static_cast<std::size_t>(layer)];
  const LayerViews<const S>& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t tokens = row.tokens();

  kept.mixer_in.resize(tokens, dims.hidden);
  kept.input_inverse_root.resize(static_cast<std::size_t>(tokens));
  for (const TokenRun& run : runs) {
    rms_norm<S, A>(constant_view(kept.entering).row_block(run.first, run.count), wide.input_norm,
                   dims.norm_eps, view(kept.mixer_in).row_block(run.first, run.count),
                   detail::entries(kept.input_inverse_root, run));
  }
  project(runs, kept.mixer_in, weights.in_proj_qkv, kept.qkv);
  project(runs, kept.mixer_in, weights.in_proj_z, kept.z);
  project(runs, kept.mixer_in, weights.in_proj_a, kept.a);
  project(runs, kept.mixer_in, weights.in_proj_b, kept.b);

  kept.recurrence_out.resize(tokens, dims.value_columns());
  gdn::LayerScratch scratch;
  gdn::forward(
      detail::mixer_dims(dims, tokens), detail::mixer_inputs<S>(weights, wide, row, kept),
      gdn::Options{}, gdn::LayerOptions{},
      gdn::Outputs<A, S>{
          .o = view(kept.recurrence_out), .final_recurrent_state = {}, .final_conv_state = {}},
      gdn::ChunkResiduals<A>{}, scratch);

  kept.gated.resize(tokens, dims.value_columns());
  kept.gate_inverse_root.resize(tokens, dims.value_heads);
  kept.between.resize(tokens, dims.hidden);
  for (const TokenRun& run : runs) {
    gated_norm<S, A>(constant_view(kept.recurrence_out).row_block(run.first, run.count),
                     constant_view(kept.z).row_block(run.first, run.count), wide.gate_norm,
                     dims.norm_eps, view(kept.gated).row_block(run.first, run.count),
                     view(kept.gate_inverse_root).row_block(run.first, run.count));
    kept.between.middleRows(run.first, run.count) = kept.entering.middleRows(run.first, run.count);
    multiply(as_is(constant_view(kept.gated).row_block(run.first, run.count)),
             transposed(weights.out_proj), view(kept.between).row_block(run.first, run.count),
             Write::accumulate);
  }
}

// d_stream: d loss / d kept.between coming in, d loss / d kept.entering going out.
template <Storage S>
void Model<S>::mixer_backward(std::int64_t layer, const RowInputs& row,
                              std::span<const TokenRun> runs, const LayerActivations<S>& kept,
                              Matrix<A>& d_stream, const LayerViews<A>& gradient) const {
  const ModelDims& dims = layout_.dims();
  const LayerViews<const A>& wide = wide_.layers[static_cast<std::size_t>(layer)];
  const LayerViews<const S>& weights = weights_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t tokens = row.tokens();

  Matrix<A> d_gated(tokens, dims.value_columns());
  Matrix<S> d_recurrence_out(tokens, dims.value_columns());
  Matrix<A> d_z(tokens, dims.value_columns());
  project_backward(runs, kept.gated, weights.out_proj, d_stream, Write::overwrite, d_gated,
                   gradient.out_proj);
  for (const TokenRun& run : runs) {
    gated_norm_backward<S, A>(constant_view(kept.recurrence_out).row_block(run.first, run.count),
                              constant_view(kept.z).row_block(run.first, run.count), wide.gate_norm,
                              constant_view(kept.gate_inverse_root).row_block(run.first, run.count),
                              constant_view(d_gated).row_block(run.first, run.count),
                              view(d_recurrence_out).row_block(run.first, run.count),
                              view(d_z).row_block(run.first, run.count), gradient.gate_norm);
  }

  Matrix<A> d_qkv(tokens, dims.qkv_columns());
  Matrix<A> d_a(tokens, dims.value_heads);
  Matrix<A> d_b(tokens, dims.value_heads);
  gdn::LayerScratch scratch;
  gdn::backward(detail::mixer_dims(dims, tokens), detail::mixer_inputs<S>(weights, wide, row, kept),
                gdn::Options{}, gdn::LayerOptions{}, gdn::ChunkResiduals<const A>{},
                gdn::OutputCotangents<S, A>{.d_o = constant_view(d_recurrence_out),
                                            .d_final_recurrent_state = {},
                                            .d_final_conv_state = {}},
                gdn::Cotangents<A>{
                    .d_qkv = view(d_qkv),
                    .d_conv_weight = {.values = gradient.conv_weight, .write = Write::accumulate},
                    .d_conv_bias = {},
                    .d_a = view(d_a),
                    .d_b = view(d_b),
                    .d_A_log = {.values = gradient.a_log, .write = Write::accumulate},
                    .d_dt_bias = {.values = gradient.dt_bias, .write = Write::accumulate},
                    .d_conv_state = {},
                    .d_recurrent_state = {}},
                scratch);

  Matrix<A> d_mixer_in(tokens, dims.hidden);
  project_backward(runs, kept.mixer_in, weights.in_proj_qkv, d_qkv, Write::overwrite, d_mixer_in,
                   gradient.in_proj_qkv);
  project_backward(runs, kept.mixer_in, weights.in_proj_z, d_z, Write::accumulate, d_mixer_in,
                   gradient.in_proj_z);
  project_backward(runs, kept.mixer_in, weights.in_proj_a, d_a, Write::accumulate, d_mixer_in,
                   gradient.in_proj_a);
  project_backward(runs, kept.mixer_in, weights.in_proj_b, d_b, Write::accumulate, d_mixer_in,
                   gradient.in_proj_b);
  for (const TokenRun& run : runs) {
    rms_norm_backward<A>(constant_view(kept.entering).row_block(run.first, run.count),
                         wide.input_norm, detail::entries(kept.input_inverse_root, run),
                         constant_view(d_mixer_in).row_block(run.first, run.count),
                         view(d_stream).row_block(run.first, run.count), gradient.input_norm);
  }
}

}  // namespace heddle::train

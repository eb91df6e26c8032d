#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <string>

#include "heddle-train/model.hpp"
#include "heddle-train/model_experts.hpp"
#include "heddle-train/model_head.hpp"
#include "heddle-train/model_mixer.hpp"
#include "heddle-train/norm.hpp"
#include "heddle-train/tokens.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"

namespace heddle::train {

template <Storage S>
Model<S>::Model(const ParameterLayout& layout, std::span<const A> parameters,
                moe::RouterTraining router)
    : layout_(layout), parameters_(parameters), router_(router) {
  require_length("train::Model", "parameters", parameters, "layout.size", layout.size());
  wide_ = layout_.views(parameters_.data());
  if constexpr (std::same_as<S, A>) {
    weights_ = wide_;
  } else {
    stored_.resize(parameters.size());
    weights_ = layout_.views(static_cast<const S*>(stored_.data()));
  }
  refresh();
}

template <Storage S>
void Model<S>::refresh() {
  if constexpr (!std::same_as<S, A>) {
    constexpr std::int64_t grain = 1 << 16;
    parallel_blocks(layout_.size(), grain, [this](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) {
        stored_[static_cast<std::size_t>(i)] = narrow<S>(parameters_[static_cast<std::size_t>(i)]);
      }
    });
  }
}

template <Storage S>
void Model<S>::forward(const RowInputs& row, RowActivations<S>& kept) const {
  trunk_forward(row, kept);
  head_forward(row, kept);
}

/// Everything before the head.
template <Storage S>
void Model<S>::trunk_forward(const RowInputs& row, RowActivations<S>& kept) const {
  constexpr const char* where = "train::Model::forward";
  const ModelDims& dims = layout_.dims();
  const std::int64_t tokens = row.tokens();
  require_length(where, "segment_ids", row.segment_ids, "token_ids.size", tokens);
  if (!row.segment_positions.empty()) {
    require_length(where, "segment_positions", row.segment_positions, "token_ids.size", tokens);
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int32_t id = row.token_ids[static_cast<std::size_t>(t)];
    if (row.segment_ids[static_cast<std::size_t>(t)] > 0 && (id < 0 || id >= dims.vocab)) {
      fail(where, element_name("token_ids", t), id,
           "must be in the vocabulary [0, " + std::to_string(dims.vocab) + ")");
    }
  }
  kept.document_ids = number_documents(row.segment_ids, row.segment_positions);
  kept.runs = token_runs(kept.document_ids);
  RowInputs by_document = row;
  by_document.segment_ids = kept.document_ids;
  const std::span<const TokenRun> runs(kept.runs);
  kept.layers.resize(static_cast<std::size_t>(dims.layers));

  Matrix<A>& embedded = kept.layers.empty() ? kept.leaving : kept.layers.front().entering;
  embedded.resize(tokens, dims.hidden);
  for (const TokenRun& run : runs) {
    for (std::int64_t t = run.first; t < run.first + run.count; ++t) {
      const std::span<const S> embedding =
          weights_.embedding.row(row.token_ids[static_cast<std::size_t>(t)]);
      for (std::int64_t d = 0; d < dims.hidden; ++d) {
        embedded(t, d) = widen<A>(embedding[static_cast<std::size_t>(d)]);
      }
    }
  }
  for (std::int64_t layer = 0; layer < dims.layers; ++layer) {
    const auto l = static_cast<std::size_t>(layer);
    mixer_forward(layer, by_document, runs, kept.layers[l]);
    Matrix<A>& next = layer + 1 < dims.layers ? kept.layers[l + 1].entering : kept.leaving;
    experts_forward(layer, row, runs, kept.layers[l], next);
  }

  kept.head_in.resize(tokens, dims.hidden);
  kept.final_inverse_root.resize(static_cast<std::size_t>(tokens));
  for (const TokenRun& run : runs) {
    rms_norm<S, A>(constant_view(kept.leaving).row_block(run.first, run.count), wide_.final_norm,
                   dims.norm_eps, view(kept.head_in).row_block(run.first, run.count),
                   detail::entries(kept.final_inverse_root, run));
  }
}

template <Storage S>
void Model<S>::backward(const RowInputs& row, const RowActivations<S>& kept,
                        std::span<const A> d_logps, std::span<A> gradient) const {
  constexpr const char* where = "train::Model::backward";
  const std::int64_t tokens = row.tokens();
  require_length(where, "d_logps", d_logps, "token_ids.size", tokens);
  require_length(where, "gradient", gradient, "layout.size", layout_.size());
  const ModelViews<A> gradients = layout_.views(gradient.data());
  Matrix<A> d_head_in(tokens, layout_.dims().hidden);
  head_backward(kept, d_logps, view(d_head_in), gradients.head);
  trunk_backward(row, kept, d_head_in, gradients);
}

template <Storage S>
void Model<S>::trunk_backward(const RowInputs& row, const RowActivations<S>& kept,
                              const Matrix<A>& d_head_in, const ModelViews<A>& gradients) const {
  const ModelDims& dims = layout_.dims();
  const std::int64_t tokens = row.tokens();
  const std::span<const TokenRun> runs(kept.runs);
  RowInputs by_document = row;
  by_document.segment_ids = kept.document_ids;

  Matrix<A> d_stream(tokens, dims.hidden);
  for (const TokenRun& run : runs) {
    d_stream.middleRows(run.first, run.count).setZero();
    rms_norm_backward<A>(constant_view(kept.leaving).row_block(run.first, run.count),
                         wide_.final_norm, detail::entries(kept.final_inverse_root, run),
                         constant_view(d_head_in).row_block(run.first, run.count),
                         view(d_stream).row_block(run.first, run.count), gradients.final_norm);
  }
  for (std::int64_t layer = dims.layers - 1; layer >= 0; --layer) {
    const auto l = static_cast<std::size_t>(layer);
    experts_backward(layer, row, runs, kept.layers[l], d_stream, gradients.layers[l]);
    mixer_backward(layer, by_document, runs, kept.layers[l], d_stream, gradients.layers[l]);
  }
  for (const TokenRun& run : runs) {
    for (std::int64_t t = run.first; t < run.first + run.count; ++t) {
      const std::span<A> d_embedding =
          gradients.embedding.row(row.token_ids[static_cast<std::size_t>(t)]);
      for (std::int64_t d = 0; d < dims.hidden; ++d) {
        d_embedding[static_cast<std::size_t>(d)] += d_stream(t, d);
      }
    }
  }
}

template <Storage S>
auto Model<S>::logits(const RowActivations<S>& kept) const -> Matrix<A> {
  Matrix<A> logits(kept.head_in.rows(), layout_.dims().vocab);
  zero_padding(kept.runs, logits);
  for (const TokenRun& run : kept.runs) {
    multiply(as_is(constant_view(kept.head_in).row_block(run.first, run.count)),
             transposed(weights_.head), view(logits).row_block(run.first, run.count));
  }
  return logits;
}

}  // namespace heddle::train

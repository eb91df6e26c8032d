#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "heddle-train/parameters.hpp"
#include "heddle-train/tokens.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/residuals.hpp"

namespace heddle::train {

/// One packed row.
///
/// shapes    token_ids, segment_ids, segment_positions [T]; forced_experts empty, or one [T,K] a layer
/// units     segment_ids: 0 is padding; positions count from each document's first token, and may be
///           empty: then a document is told by its id alone
/// specials  what stands at padding is never read
struct RowInputs {
  std::span<const std::int32_t> token_ids;
  std::span<const std::int32_t> segment_ids;
  std::span<const std::int32_t> segment_positions;
  std::span<const ConstMatrixView<std::int32_t>> forced_experts;

  [[nodiscard]] std::int64_t tokens() const { return static_cast<std::int64_t>(token_ids.size()); }
};

/// What one layer keeps of its forward pass for its backward pass.
template <Storage S>
struct LayerActivations {
  using A = AccumulatorOf<S>;

  Matrix<A> entering;                 // [T,D] the residual stream before the layer
  std::vector<A> input_inverse_root;  // [T]
  Matrix<S> mixer_in;                 // [T,D]
  Matrix<S> qkv;                      // [T,qkv_columns] before the convolution
  Matrix<S> z;                        // [T,Hv*Dv]
  Matrix<S> a;                        // [T,Hv]
  Matrix<S> b;                        // [T,Hv]
  Matrix<A> recurrence_out;           // [T,Hv*Dv]
  Matrix<A> gate_inverse_root;        // [T,Hv]
  Matrix<S> gated;                    // [T,Hv*Dv]
  Matrix<A> between;                  // [T,D] the residual stream between mixer and experts
  std::vector<A> post_inverse_root;   // [T]
  Matrix<S> experts_in;               // [T,D], 0 at padding
  Matrix<std::int32_t> expert_ids;    // [T,K], -1 at padding
  Matrix<A> expert_weights;           // [T,K]
  Workspace experts_memory;           // of `experts`
  moe::Residuals<S> experts;
};

/// What a row's forward pass leaves: scores, and what its backward pass reads. In the token frame
/// entry t is of token t, given its document before it, and 0 where that is unscored; in the hidden
/// frame entry t is of what row t predicts.
///
/// memory    grows with the longest row and is reused by the next
template <Storage S>
struct RowActivations {
  using A = AccumulatorOf<S>;

  std::vector<std::int32_t> document_ids;  // [T], 0 at padding: what the mixer resets by
  std::vector<TokenRun> runs;
  std::vector<LayerActivations<S>> layers;
  Matrix<A> leaving;                     // [T,D] the residual stream after the last layer
  std::vector<A> final_inverse_root;     // [T]
  Matrix<S> head_in;                     // [T,D]
  std::vector<std::uint8_t> scored;      // [T], token frame
  std::vector<std::int32_t> target_ids;  // [T], hidden frame: row t scores token t + 1
  std::vector<std::uint8_t> active;      // [T], hidden frame
  std::vector<A> head_max;               // [T], hidden frame
  std::vector<A> head_exp_sum;           // [T], hidden frame
  std::vector<A> logps;                  // [T], token frame
  std::vector<A> entropy;                // [T], token frame
  Workspace scratch;                     // of the head
};

/// The Qwen3.5-MoE text model with every layer a Gated Delta Net: token embedding, then for each layer
/// x <- x + mixer(norm(x)), x <- x + experts(norm(x)), then norm and head.
///
/// dtypes    S stores matrices and activations between kernels; sums, the residual stream, norms,
///           decay parameters and gradients are in its accumulator
/// order     a row's bits depend on that row alone; rows may be computed at once
/// source    transformers Qwen3_5MoeForCausalLM
template <Storage S>
class Model {
 public:
  using A = AccumulatorOf<S>;

  /// `parameters` are read through; they must outlive the model.
  Model(const ParameterLayout& layout, std::span<const A> parameters, moe::RouterTraining router);

  [[nodiscard]] const ParameterLayout& layout() const { return layout_; }

  /// Tells the model that the parameters have changed.
  void refresh();

  /// throws    Error for what a kernel refuses, a token id outside the vocabulary first
  void forward(const RowInputs& row, RowActivations<S>& kept) const;

  /// Adds the row's part of d loss / d parameters to `gradient`, given d loss / d logps in the token
  /// frame; entries of unscored tokens are not read. A frozen router's part stays untouched.
  void backward(const RowInputs& row, const RowActivations<S>& kept, std::span<const A> d_logps,
                std::span<A> gradient) const;

  /// forward() and backward() under a loss that is known token by token, a head::TokenLoss over the token
  /// frame: the head's logits are computed once. Returns the row's loss, tokens ascending; adds to
  /// `gradient` if any token has a cotangent, and says so in `differentiated`.
  template <class Loss>
  double forward_backward(const RowInputs& row, RowActivations<S>& kept, const Loss& loss,
                          std::span<A> gradient, bool& differentiated) const;

  /// The logits of every token, 0 at padding.
  [[nodiscard]] Matrix<A> logits(const RowActivations<S>& kept) const;

 private:
  void mixer_forward(std::int64_t layer, const RowInputs& row, std::span<const TokenRun> runs,
                     LayerActivations<S>& kept) const;
  void mixer_backward(std::int64_t layer, const RowInputs& row, std::span<const TokenRun> runs,
                      const LayerActivations<S>& kept, Matrix<A>& d_stream,
                      const LayerViews<A>& gradient) const;
  void experts_forward(std::int64_t layer, const RowInputs& row, std::span<const TokenRun> runs,
                       LayerActivations<S>& kept, Matrix<A>& stream) const;
  void experts_backward(std::int64_t layer, const RowInputs& row, std::span<const TokenRun> runs,
                        const LayerActivations<S>& kept, Matrix<A>& d_stream,
                        const LayerViews<A>& gradient) const;
  void trunk_forward(const RowInputs& row, RowActivations<S>& kept) const;
  void trunk_backward(const RowInputs& row, const RowActivations<S>& kept,
                      const Matrix<A>& d_head_in, const ModelViews<A>& gradients) const;
  void place_targets(const RowInputs& row, RowActivations<S>& kept) const;
  void head_forward(const RowInputs& row, RowActivations<S>& kept) const;
  void head_backward(const RowActivations<S>& kept, std::span<const A> d_logps,
                     MatrixView<A> d_head_in, MatrixView<A> d_weight) const;

  const ParameterLayout& layout_;
  std::span<const A> parameters_;
  moe::RouterTraining router_;
  std::vector<S> stored_;        // the parameters in S, where that is not A
  ModelViews<const A> wide_;     // vectors and the router
  ModelViews<const S> weights_;  // matrices
};

}  // namespace heddle::train

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"

namespace heddle::train {

/// The extents of the model: token embedding, `layers` x [norm, Gated Delta Net mixer, norm, experts
/// with a shared expert], norm, head.
struct ModelDims {
  std::int64_t vocab = 0;
  std::int64_t hidden = 0;
  std::int64_t layers = 0;
  std::int64_t key_heads = 0;
  std::int64_t value_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t conv_width = 0;
  std::int64_t experts = 0;
  std::int64_t experts_per_token = 0;
  std::int64_t expert_dim = 0;
  std::int64_t shared_dim = 0;
  double norm_eps = 1e-6;

  /// Columns of the mixer's convolved projection: all q heads, all k heads, all v heads.
  [[nodiscard]] std::int64_t qkv_columns() const {
    return 2 * key_heads * key_dim + value_heads * value_dim;
  }
  /// Columns of the recurrence's output and of its gate z.
  [[nodiscard]] std::int64_t value_columns() const { return value_heads * value_dim; }

  friend bool operator==(const ModelDims&, const ModelDims&) = default;
};

/// One tensor of a checkpoint, and where its elements lie in the flat array of all parameters:
/// element (b, r, c) of the tensor seen as [batch, rows, cols] at
/// offset + b * batch_stride + r * row_stride + c * col_stride. The kernels' layouts are the
/// transposes of the checkpoint's for the experts and the router; strides say so, and nothing is
/// transposed but by loading and saving through them.
struct TensorPlace {
  std::string name;
  std::vector<std::int64_t> shape;  ///< in the checkpoint
  std::int64_t offset = 0;
  std::int64_t batch = 1;
  std::int64_t rows = 1;
  std::int64_t cols = 1;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  bool router = false;

  [[nodiscard]] std::int64_t size() const { return batch * rows * cols; }
};

/// Copies a tensor from the flat array into the checkpoint's element order.
template <class From, class To>
void gather(const TensorPlace& place, std::span<const From> parameters, std::span<To> tensor) {
  std::int64_t next = 0;
  for (std::int64_t b = 0; b < place.batch; ++b) {
    for (std::int64_t r = 0; r < place.rows; ++r) {
      const std::int64_t row = place.offset + b * place.batch_stride + r * place.row_stride;
      for (std::int64_t c = 0; c < place.cols; ++c) {
        tensor[static_cast<std::size_t>(next++)] =
            static_cast<To>(parameters[static_cast<std::size_t>(row + c * place.col_stride)]);
      }
    }
  }
}

/// The other way: a tensor in the checkpoint's element order into the flat array.
template <class From, class To>
void scatter(const TensorPlace& place, std::span<const From> tensor, std::span<To> parameters) {
  std::int64_t next = 0;
  for (std::int64_t b = 0; b < place.batch; ++b) {
    for (std::int64_t r = 0; r < place.rows; ++r) {
      const std::int64_t row = place.offset + b * place.batch_stride + r * place.row_stride;
      for (std::int64_t c = 0; c < place.cols; ++c) {
        parameters[static_cast<std::size_t>(row + c * place.col_stride)] =
            static_cast<To>(tensor[static_cast<std::size_t>(next++)]);
      }
    }
  }
}

/// The parameters of one layer in the layouts that the kernels read, over any flat array of the
/// model's size: parameters, their gradient, their copy in a narrower type.
template <class T>
struct LayerViews {
  std::span<T> input_norm;      // [D]
  MatrixView<T> in_proj_qkv;    // [qkv_columns,D]
  MatrixView<T> in_proj_z;      // [Hv*Dv,D]
  MatrixView<T> in_proj_b;      // [Hv,D]
  MatrixView<T> in_proj_a;      // [Hv,D]
  MatrixView<T> conv_weight;    // [qkv_columns,W]
  std::span<T> a_log;           // [Hv]
  std::span<T> dt_bias;         // [Hv]
  std::span<T> gate_norm;       // [Dv]
  MatrixView<T> out_proj;       // [D,Hv*Dv]
  std::span<T> post_norm;       // [D]
  MatrixView<T> router_weight;  // [D,E]
  MatrixView<T> wi;             // [E*D,2F], expert-major, gate columns first
  MatrixView<T> wo;             // [E*F,D]
  MatrixView<T> shared_wi;      // [D,2Fs]
  MatrixView<T> shared_wo;      // [Fs,D]
  MatrixView<T> shared_gate;    // [D,1]
};

template <class T>
struct ModelViews {
  MatrixView<T> embedding;  // [V,D]
  std::vector<LayerViews<T>> layers;
  std::span<T> final_norm;  // [D]
  MatrixView<T> head;       // [V,D]
};

/// Where every parameter of a model lies in one flat array.
class ParameterLayout {
 public:
  explicit ParameterLayout(const ModelDims& dims);

  [[nodiscard]] const ModelDims& dims() const { return dims_; }
  /// Parameters in all.
  [[nodiscard]] std::int64_t size() const { return size_; }
  /// The tensors of a checkpoint with stacked experts, in the model's order.
  [[nodiscard]] const std::vector<TensorPlace>& tensors() const { return tensors_; }
  /// The tensors that a checkpoint with experts one by one has instead of `stacked`
  /// (mlp.experts.gate_up_proj or down_proj of a layer); empty for any other tensor.
  [[nodiscard]] std::vector<TensorPlace> one_by_one(const TensorPlace& stacked) const;

  /// Views into `parameters`, an array of size() elements.
  template <class T>
  [[nodiscard]] ModelViews<T> views(T* parameters) const {
    const ModelDims& d = dims_;
    ModelViews<T> model;
    const auto vector = [parameters](std::int64_t offset, std::int64_t length) {
      return std::span<T>(parameters + offset, static_cast<std::size_t>(length));
    };
    const auto matrix = [parameters](std::int64_t offset, std::int64_t rows, std::int64_t cols) {
      return MatrixView<T>(parameters + offset, rows, cols);
    };
    model.embedding = matrix(embedding_, d.vocab, d.hidden);
    for (const LayerOffsets& at : layers_) {
      model.layers.push_back({
          .input_norm = vector(at.input_norm, d.hidden),
          .in_proj_qkv = matrix(at.in_proj_qkv, d.qkv_columns(), d.hidden),
          .in_proj_z = matrix(at.in_proj_z, d.value_columns(), d.hidden),
          .in_proj_b = matrix(at.in_proj_b, d.value_heads, d.hidden),
          .in_proj_a = matrix(at.in_proj_a, d.value_heads, d.hidden),
          .conv_weight = matrix(at.conv_weight, d.qkv_columns(), d.conv_width),
          .a_log = vector(at.a_log, d.value_heads),
          .dt_bias = vector(at.dt_bias, d.value_heads),
          .gate_norm = vector(at.gate_norm, d.value_dim),
          .out_proj = matrix(at.out_proj, d.hidden, d.value_columns()),
          .post_norm = vector(at.post_norm, d.hidden),
          .router_weight = matrix(at.router_weight, d.hidden, d.experts),
          .wi = matrix(at.wi, d.experts * d.hidden, 2 * d.expert_dim),
          .wo = matrix(at.wo, d.experts * d.expert_dim, d.hidden),
          .shared_wi = matrix(at.shared_wi, d.hidden, 2 * d.shared_dim),
          .shared_wo = matrix(at.shared_wo, d.shared_dim, d.hidden),
          .shared_gate = matrix(at.shared_gate, d.hidden, 1),
      });
    }
    model.final_norm = vector(final_norm_, d.hidden);
    model.head = matrix(head_, d.vocab, d.hidden);
    return model;
  }

 private:
  struct LayerOffsets {
    std::int64_t input_norm = 0;
    std::int64_t in_proj_qkv = 0;
    std::int64_t in_proj_z = 0;
    std::int64_t in_proj_b = 0;
    std::int64_t in_proj_a = 0;
    std::int64_t conv_weight = 0;
    std::int64_t a_log = 0;
    std::int64_t dt_bias = 0;
    std::int64_t gate_norm = 0;
    std::int64_t out_proj = 0;
    std::int64_t post_norm = 0;
    std::int64_t router_weight = 0;
    std::int64_t wi = 0;
    std::int64_t wo = 0;
    std::int64_t shared_wi = 0;
    std::int64_t shared_wo = 0;
    std::int64_t shared_gate = 0;
  };

  std::int64_t reserve(std::int64_t elements);
  void add_as_is(std::string name, std::vector<std::int64_t> shape, std::int64_t offset);
  void add_transposed(std::string name, std::vector<std::int64_t> shape, std::int64_t offset,
                      std::int64_t stride);
  LayerOffsets add_layer(std::int64_t layer);

  ModelDims dims_;
  std::int64_t size_ = 0;
  std::int64_t embedding_ = 0;
  std::int64_t final_norm_ = 0;
  std::int64_t head_ = 0;
  std::vector<LayerOffsets> layers_;
  std::vector<TensorPlace> tensors_;
};

/// The parameters of an untrained model: the same for a seed on every machine.
///
/// units     projections, experts, embedding and head: normal, deviation 0.02, those that write into
///           the residual stream divided by sqrt(2 * layers); norms at their identity; the
///           convolution uniform in +-1/sqrt(W); A_log and dt_bias uniform where a token's decay
///           exp(-exp(A_log) softplus(dt_bias)) runs from 0.999 to 0.2
template <Accumulator A>
[[nodiscard]] std::vector<A> initial_parameters(const ParameterLayout& layout, std::uint64_t seed);

}  // namespace heddle::train

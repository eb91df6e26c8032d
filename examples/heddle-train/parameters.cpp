#include "heddle-train/parameters.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "heddle-train/random.hpp"
#include "heddle/core/error.hpp"

namespace heddle::train {

ParameterLayout::ParameterLayout(const ModelDims& dims) : dims_(dims) {
  embedding_ = reserve(dims.vocab * dims.hidden);
  add_as_is("model.embed_tokens.weight", {dims.vocab, dims.hidden}, embedding_);
  for (std::int64_t layer = 0; layer < dims.layers; ++layer) {
    layers_.push_back(add_layer(layer));
  }
  final_norm_ = reserve(dims.hidden);
  add_as_is("model.norm.weight", {dims.hidden}, final_norm_);
  head_ = reserve(dims.vocab * dims.hidden);
  add_as_is("lm_head.weight", {dims.vocab, dims.hidden}, head_);
}

std::int64_t ParameterLayout::reserve(std::int64_t elements) {
  constexpr std::int64_t most = std::int64_t{1} << 56;  // beyond any memory, far from an overflow
  if (elements > most - size_) {
    fail("train::ParameterLayout", "dims", "a model of more than 2^56 parameters",
         "must be a model that fits a memory");
  }
  const std::int64_t offset = size_;
  size_ += elements;
  return offset;
}

void ParameterLayout::add_as_is(std::string name, std::vector<std::int64_t> shape,
                                std::int64_t offset) {
  TensorPlace place{.name = std::move(name), .shape = std::move(shape), .offset = offset};
  for (const std::int64_t extent : place.shape) {
    place.cols *= extent;
  }
  tensors_.push_back(std::move(place));
}

// A tensor [rows, cols] or [batch, rows, cols] whose transpose, with rows `stride` apart, is what
// the kernels read.
void ParameterLayout::add_transposed(std::string name, std::vector<std::int64_t> shape,
                                     std::int64_t offset, std::int64_t stride) {
  const std::size_t rank = shape.size();
  TensorPlace place{.name = std::move(name), .shape = std::move(shape), .offset = offset};
  place.rows = place.shape[rank - 2];
  place.cols = place.shape[rank - 1];
  place.row_stride = 1;
  place.col_stride = stride;
  if (rank == 3) {
    place.batch = place.shape[0];
    place.batch_stride = place.cols * stride;
  }
  tensors_.push_back(std::move(place));
}

ParameterLayout::LayerOffsets ParameterLayout::add_layer(std::int64_t layer) {
  const ModelDims& d = dims_;
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const auto as_is = [&](const char* name, std::vector<std::int64_t> shape) {
    std::int64_t elements = 1;
    for (const std::int64_t extent : shape) {
      elements *= extent;
    }
    const std::int64_t offset = reserve(elements);
    add_as_is(prefix + name, std::move(shape), offset);
    return offset;
  };
  const auto transposed = [&](const char* name, std::vector<std::int64_t> shape) {
    std::int64_t elements = 1;
    for (const std::int64_t extent : shape) {
      elements *= extent;
    }
    const std::int64_t stride = shape[shape.size() - 2];
    const std::int64_t offset = reserve(elements);
    add_transposed(prefix + name, std::move(shape), offset, stride);
    return offset;
  };

  LayerOffsets at;
  at.input_norm = as_is("input_layernorm.weight", {d.hidden});
  at.in_proj_qkv = as_is("linear_attn.in_proj_qkv.weight", {d.qkv_columns(), d.hidden});
  at.in_proj_z = as_is("linear_attn.in_proj_z.weight", {d.value_columns(), d.hidden});
  at.in_proj_b = as_is("linear_attn.in_proj_b.weight", {d.value_heads, d.hidden});
  at.in_proj_a = as_is("linear_attn.in_proj_a.weight", {d.value_heads, d.hidden});
  at.conv_weight = as_is("linear_attn.conv1d.weight", {d.qkv_columns(), 1, d.conv_width});
  at.a_log = as_is("linear_attn.A_log", {d.value_heads});
  at.dt_bias = as_is("linear_attn.dt_bias", {d.value_heads});
  at.gate_norm = as_is("linear_attn.norm.weight", {d.value_dim});
  at.out_proj = as_is("linear_attn.out_proj.weight", {d.hidden, d.value_columns()});
  at.post_norm = as_is("post_attention_layernorm.weight", {d.hidden});
  at.router_weight = transposed("mlp.gate.weight", {d.experts, d.hidden});
  tensors_.back().router = true;
  at.wi = transposed("mlp.experts.gate_up_proj", {d.experts, 2 * d.expert_dim, d.hidden});
  at.wo = transposed("mlp.experts.down_proj", {d.experts, d.hidden, d.expert_dim});
  // Gate columns, then up columns, of one kernel matrix: two tensors of the checkpoint.
  at.shared_wi = reserve(2 * d.shared_dim * d.hidden);
  add_transposed(prefix + "mlp.shared_expert.gate_proj.weight", {d.shared_dim, d.hidden},
                 at.shared_wi, 2 * d.shared_dim);
  add_transposed(prefix + "mlp.shared_expert.up_proj.weight", {d.shared_dim, d.hidden},
                 at.shared_wi + d.shared_dim, 2 * d.shared_dim);
  at.shared_wo = transposed("mlp.shared_expert.down_proj.weight", {d.hidden, d.shared_dim});
  at.shared_gate = as_is("mlp.shared_expert_gate.weight", {1, d.hidden});
  return at;
}

std::vector<TensorPlace> ParameterLayout::one_by_one(const TensorPlace& stacked) const {
  constexpr std::string_view gate_up = "gate_up_proj";
  constexpr std::string_view down = "experts.down_proj";
  std::vector<TensorPlace> places;
  const bool is_gate_up = stacked.name.ends_with(gate_up);
  if (!is_gate_up && !stacked.name.ends_with(down)) {
    return places;
  }
  const std::string prefix = stacked.name.substr(0, stacked.name.rfind('.') + 1);
  for (std::int64_t expert = 0; expert < stacked.batch; ++expert) {
    const auto add = [&](const char* name, std::int64_t first_row, std::int64_t rows) {
      TensorPlace place = stacked;
      place.name = prefix + std::to_string(expert) + "." + name;
      place.shape = {rows, stacked.cols};
      place.offset += expert * stacked.batch_stride + first_row * stacked.row_stride;
      place.batch = 1;
      place.rows = rows;
      places.push_back(std::move(place));
    };
    if (is_gate_up) {
      add("gate_proj.weight", 0, dims_.expert_dim);
      add("up_proj.weight", dims_.expert_dim, dims_.expert_dim);
    } else {
      add("down_proj.weight", 0, stacked.rows);
    }
  }
  return places;
}

template <Accumulator A>
std::vector<A> initial_parameters(const ParameterLayout& layout, std::uint64_t seed) {
  const ModelDims& dims = layout.dims();
  std::vector<A> parameters(static_cast<std::size_t>(layout.size()));
  const std::span<A> all(parameters);
  Random random(seed);
  const double deviation = 0.02;
  const double into_residual = deviation / std::sqrt(2.0 * static_cast<double>(dims.layers));
  for (const TensorPlace& place : layout.tensors()) {
    std::vector<double> tensor(static_cast<std::size_t>(place.size()));
    const auto fill = [&tensor](const auto& draw) {
      std::generate(tensor.begin(), tensor.end(), draw);
    };
    const auto is = [&place](std::string_view suffix) { return place.name.ends_with(suffix); };
    if (is("layernorm.weight") || is("model.norm.weight")) {
      fill([] { return 0.0; });
    } else if (is("linear_attn.norm.weight")) {
      fill([] { return 1.0; });
    } else if (is("A_log")) {
      fill([&random] { return random.uniform(0.0, 2.75); });
    } else if (is("dt_bias")) {
      fill([&random] { return random.uniform(-7.0, -2.25); });
    } else if (is("conv1d.weight")) {
      const double bound = 1.0 / std::sqrt(static_cast<double>(dims.conv_width));
      fill([&random, bound] { return random.uniform(-bound, bound); });
    } else {
      const bool writes_residual =
          is("out_proj.weight") || is("down_proj") || is("down_proj.weight");
      const double scale = writes_residual ? into_residual : deviation;
      fill([&random, scale] { return scale * random.normal(); });
    }
    scatter(place, std::span<const double>(tensor), all);
  }
  return parameters;
}

template std::vector<float> initial_parameters<float>(const ParameterLayout&, std::uint64_t);
template std::vector<double> initial_parameters<double>(const ParameterLayout&, std::uint64_t);

}  // namespace heddle::train

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heddle-train/model.hpp"
#include "heddle-train/parameters.hpp"
#include "heddle/core/scalar.hpp"
#include "support/tensor.hpp"

namespace heddle::train {

/// Appends a tensor for every parameter, under `prefix` and its checkpoint name, in the checkpoint's
/// shape.
template <Accumulator A>
void append_parameter_tensors(const std::string& prefix, const ParameterLayout& layout,
                              std::span<const A> values, std::vector<examples::Tensor>& out) {
  for (const TensorPlace& place : layout.tensors()) {
    examples::Tensor tensor(prefix + place.name, examples::dtype_of<A>(), place.shape);
    gather(place, values, tensor.values<A>());
    out.push_back(std::move(tensor));
  }
}

/// The norm of what the first update added to the parameters that it `start`ed from, by the tensors
/// "updated." of a dump.
template <Accumulator A>
[[nodiscard]] double update_norm(const ParameterLayout& layout, std::span<const A> start,
                                 const std::vector<examples::Tensor>& dump) {
  double total = 0;
  std::vector<A> before;
  for (const TensorPlace& place : layout.tensors()) {
    const auto updated = std::ranges::find(dump, "updated." + place.name, &examples::Tensor::name);
    before.resize(static_cast<std::size_t>(place.size()));
    gather(place, start, std::span<A>(before));
    const std::span<const A> after = std::as_const(*updated).template values<A>();
    double sum = 0;
    for (std::size_t i = 0; i < before.size(); ++i) {
      const double added = static_cast<double>(after[i]) - static_cast<double>(before[i]);
      sum += added * added;
    }
    total += sum;
  }
  return std::sqrt(total);
}

/// Copies the expert ids of a row into [layers, positions, K], the row's tokens from `first` on.
template <Storage S>
void copy_expert_ids(const RowActivations<S>& kept, std::int64_t positions, std::int64_t first,
                     std::span<std::int32_t> expert_ids) {
  for (std::size_t layer = 0; layer < kept.layers.size(); ++layer) {
    const Matrix<std::int32_t>& ids = kept.layers[layer].expert_ids;
    const std::int64_t begin = (static_cast<std::int64_t>(layer) * positions + first) * ids.cols();
    std::copy_n(ids.data(), ids.size(), expert_ids.begin() + begin);
  }
}

}  // namespace heddle::train

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heddle-train/model.hpp"
#include "heddle-train/parameters.hpp"
#include "support/random.hpp"

namespace heddle::train {

/// A model small enough to take every parameter's derivative by differences; no two extents that a
/// mistake could exchange are equal.
inline ModelDims tiny_dims() {
  return {.vocab = 13,
          .hidden = 6,
          .layers = 2,
          .key_heads = 2,
          .value_heads = 4,
          .key_dim = 3,
          .value_dim = 2,
          .conv_width = 3,
          .experts = 5,
          .experts_per_token = 2,
          .expert_dim = 4,
          .shared_dim = 3,
          .norm_eps = 1e-3};
}

/// Parameters of a size at which each matters: norms away from their identity, decays of all speeds.
template <class A>
std::vector<A> random_parameters(const ParameterLayout& layout, std::uint64_t seed) {
  test::Random random(seed);
  std::vector<A> parameters(static_cast<std::size_t>(layout.size()));
  for (const TensorPlace& place : layout.tensors()) {
    const std::vector<A> tensor = random.normals<A>(place.size(), 0.6);
    scatter(place, std::span<const A>(tensor), std::span<A>(parameters));
  }
  return parameters;
}

/// Documents laid into a row of `tokens` positions, each from the offset given for it.
struct TestRow {
  std::vector<std::int32_t> token_ids;
  std::vector<std::int32_t> segment_ids;
  std::vector<std::int32_t> segment_positions;

  TestRow(std::int64_t tokens, const std::vector<std::vector<std::int32_t>>& documents,
          const std::vector<std::int64_t>& offsets)
      // What stands at padding is no token id at all.
      : token_ids(static_cast<std::size_t>(tokens), -7),
        segment_ids(static_cast<std::size_t>(tokens), 0),
        segment_positions(static_cast<std::size_t>(tokens), 0) {
    for (std::size_t s = 0; s < documents.size(); ++s) {
      for (std::size_t i = 0; i < documents[s].size(); ++i) {
        const std::size_t t = static_cast<std::size_t>(offsets[s]) + i;
        token_ids[t] = documents[s][i];
        segment_ids[t] = static_cast<std::int32_t>(s) + 1;
        segment_positions[t] = static_cast<std::int32_t>(i);
      }
    }
  }

  [[nodiscard]] RowInputs inputs() const {
    return {.token_ids = token_ids,
            .segment_ids = segment_ids,
            .segment_positions = segment_positions,
            .forced_experts = {}};
  }
};

inline std::vector<std::int32_t> random_document(test::Random& random, std::int64_t length,
                                                 std::int64_t vocab) {
  std::vector<std::int32_t> document;
  for (std::int64_t i = 0; i < length; ++i) {
    document.push_back(static_cast<std::int32_t>(random.integer(0, vocab - 1)));
  }
  return document;
}

}  // namespace heddle::train

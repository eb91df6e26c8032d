#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "heddle/gdn/chunk.hpp"
#include "heddle/gdn/reference_recurrence.hpp"
#include "support/random.hpp"

namespace heddle::gdn::test {

/// One key head with two value heads, and a row that one chunk of the grid takes whole: documents start
/// in it, padding lies in it.
struct ChunkCase {
  Dims dims{.tokens = 11, .key_heads = 1, .value_heads = 2, .key_dim = 6, .value_dim = 5};
  std::vector<std::int32_t> ids = {7, 7, 7, 0, 7, 2, 2, 0, 2, 9, 9};
  Segments segments{ids, 7};
  ChunkOptions options{.chunk = 16, .chunking = Chunking::grid};
  ChunkPlan plan{segments, options};
  std::vector<double> y, g, beta, state;

  explicit ChunkCase(std::vector<std::int32_t> segment_ids = {7, 7, 7, 0, 7, 2, 2, 0, 2, 9, 9})
      : ids(std::move(segment_ids)) {
    dims.tokens = static_cast<std::int64_t>(ids.size());
    segments = Segments(ids, 7);
    plan = ChunkPlan(segments, options);
    heddle::test::Random random(3);
    y = random.normals<double>(dims.tokens * dims.qkv_columns(), 0.4);
    state = random.normals<double>(dims.state_rows() * dims.value_dim);
    for (std::int64_t i = 0; i < dims.tokens * dims.value_heads; ++i) {
      g.push_back(random.uniform(-0.5, 0));
      beta.push_back(random.uniform());
    }
  }

  [[nodiscard]] RecurrenceRow<double> row() const {
    return {.dims = dims,
            .segments = segments,
            .plan = plan,
            .norm = NormMode::none,
            .g = {g.data(), dims.tokens, dims.value_heads},
            .beta = {beta.data(), dims.tokens, dims.value_heads}};
  }
  [[nodiscard]] TokenRange range() const { return {0, dims.tokens}; }
  [[nodiscard]] HeadSlice slice() const { return HeadSlice::of_key_head(dims, 0); }
  [[nodiscard]] detail::ChunkExtents extents() const {
    return detail::ChunkExtents::of(dims, dims.tokens, slice());
  }
  [[nodiscard]] ConstMatrixView<double> all() const {
    return {y.data(), dims.tokens, dims.qkv_columns()};
  }
  [[nodiscard]] MatrixView<double> state_of(std::vector<double>& states, std::int64_t head) const {
    return {states.data() + head * dims.key_dim * dims.value_dim, dims.key_dim, dims.value_dim};
  }

  /// What the definition reads for a value head and no array holds: scaled queries, the head's gates.
  struct Head {
    std::vector<double> q, g, beta;
  };
  [[nodiscard]] Head head(std::int64_t h) const {
    Head out;
    for (std::int64_t t = 0; t < dims.tokens; ++t) {
      for (std::int64_t i = 0; i < dims.key_dim; ++i) {
        out.q.push_back(all()(t, i) * detail::Chunk<double>::query_scale(dims));
      }
      out.g.push_back(g[static_cast<std::size_t>(t * dims.value_heads + h)]);
      out.beta.push_back(beta[static_cast<std::size_t>(t * dims.value_heads + h)]);
    }
    return out;
  }
  [[nodiscard]] reference::RecurrenceInputs<double> inputs(const Head& own, std::int64_t h) const {
    return {.q = {own.q.data(), dims.tokens, dims.key_dim},
            .k = all().column_block(dims.key_column(0), dims.key_dim),
            .v = all().column_block(dims.value_column(h), dims.value_dim),
            .beta = own.beta,
            .g = own.g};
  }
};

}  // namespace heddle::gdn::test

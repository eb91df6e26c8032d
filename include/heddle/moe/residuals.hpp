#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/routing_map.hpp"
#include "heddle/moe/routing_window.hpp"

namespace heddle::moe {

/// How one device cuts the tokens of a layer: chunk c is tokens [c*slice, (c+1)*slice), the last ones
/// short or empty where that does not come out even.
struct ChunkPlan {
  std::int64_t tokens = 0;
  std::int64_t chunks = 1;
  std::int64_t slice = 0;       ///< tokens of a whole chunk
  std::int64_t balanced = 0;    ///< slots of a whole chunk
  std::int64_t chunk_rows = 0;  ///< most rows that a chunk keeps
  std::optional<std::int64_t> buffer_rows;

  ChunkPlan(const RouterDims& dims, const DispatchOptions& options)
      : tokens(dims.tokens),
        chunks(options.token_chunks),
        slice((dims.tokens + chunks - 1) / chunks),
        balanced(slice * dims.top_k),
        chunk_rows(balanced),
        buffer_rows(moe::buffer_rows(balanced, options.buffer_factor)) {
    if (buffer_rows) {
      chunk_rows = std::min(chunk_rows, *buffer_rows);
    }
  }

  [[nodiscard]] std::int64_t first(std::int64_t chunk) const {
    return std::min(chunk * slice, tokens);
  }
  [[nodiscard]] std::int64_t count(std::int64_t chunk) const {
    return first(chunk + 1) - first(chunk);
  }
};

/// What the forward of a layer leaves for its backward: exactly what that reads. The activation and the
/// experts' outputs are not among it; the maps are, so that nothing is sorted twice.
template <Storage S>
struct Residuals {
  using A = AccumulatorOf<S>;
  MatrixView<A> router_logits;            ///< [T,E]
  MatrixView<std::int32_t> expert_ids;    ///< [T,K]
  MatrixView<A> expert_weights;           ///< [T,K]
  std::span<std::int32_t> permutation;    ///< [T*K], each chunk's map behind that of the one before
  std::span<std::int32_t> inverse;        ///< [T*K]
  std::span<std::int64_t> group_offsets;  ///< [chunks * (E+1)]
  MatrixView<S> gate_up;         ///< [chunks * chunk_rows, 2F], a chunk's from its first row on
  MatrixView<S> shared_gate_up;  ///< [T, 2Fs]
  std::span<A> shared_weights;   ///< [T], sigmoid of the shared gate

  [[nodiscard]] bool wanted() const { return !group_offsets.empty(); }

  /// The memory of one chunk's map.
  [[nodiscard]] RoutingMapStorage map_storage(const Dims& dims, const ChunkPlan& plan,
                                              std::int64_t chunk) const {
    const auto first = static_cast<std::size_t>(plan.first(chunk) * dims.top_k);
    const auto count = static_cast<std::size_t>(plan.count(chunk) * dims.top_k);
    const auto offsets = static_cast<std::size_t>(dims.experts + 1);
    return {permutation.subspan(first, count), inverse.subspan(first, count),
            group_offsets.subspan(static_cast<std::size_t>(chunk) * offsets, offsets)};
  }

  /// The map that the forward built there.
  [[nodiscard]] RoutingMap map(const Dims& dims, const ChunkPlan& plan, std::int64_t chunk) const {
    const RoutingMapStorage storage = map_storage(dims, plan, chunk);
    return {.dims = {.tokens = plan.count(chunk), .experts = dims.experts, .top_k = dims.top_k},
            .experts = {.first = 0, .count = dims.experts},
            .permutation = storage.permutation,
            .inverse = storage.inverse,
            .group_offsets = storage.group_offsets};
  }
};

namespace detail {

/// Those of them that describe the routing: what a forward without residuals needs all the same.
template <Storage S>
[[nodiscard]] Residuals<S> take_routing(const Dims& dims, const ChunkPlan& plan,
                                        Workspace& memory) {
  using A = AccumulatorOf<S>;
  const auto matrix = [&]<class T>(T, std::int64_t cols) {
    return MatrixView<T>(memory.take<T>(dims.tokens * cols).data(), dims.tokens, cols);
  };
  return {.router_logits = matrix(A{}, dims.experts),
          .expert_ids = matrix(std::int32_t{}, dims.top_k),
          .expert_weights = matrix(A{}, dims.top_k),
          .permutation = memory.take<std::int32_t>(dims.slots()),
          .inverse = memory.take<std::int32_t>(dims.slots()),
          .group_offsets = memory.take<std::int64_t>(plan.chunks * (dims.experts + 1)),
          .gate_up = {},
          .shared_gate_up = {},
          .shared_weights = memory.take<A>(dims.has_shared_expert() ? dims.tokens : 0)};
}

template <Storage S>
[[nodiscard]] std::size_t routing_bytes(const Dims& dims, const ChunkPlan& plan) {
  using A = AccumulatorOf<S>;
  return Workspace::bytes_for<A>(dims.tokens * dims.experts) +
         3 * Workspace::bytes_for<std::int32_t>(dims.slots()) +
         Workspace::bytes_for<A>(dims.slots()) +
         Workspace::bytes_for<std::int64_t>(plan.chunks * (dims.experts + 1)) +
         Workspace::bytes_for<A>(dims.has_shared_expert() ? dims.tokens : 0);
}

template <Storage S>
void check_residuals(std::string_view where, const Dims& dims, const ChunkPlan& plan,
                     const Residuals<S>& kept) {
  const auto require_tokens = [&](std::string_view argument, auto matrix, std::string_view name,
                                  std::int64_t cols) {
    require_shape(where, argument, matrix, "dims.tokens", dims.tokens, name, cols);
  };
  require_tokens("residuals.router_logits", kept.router_logits, "dims.experts", dims.experts);
  require_tokens("residuals.expert_ids", kept.expert_ids, "dims.top_k", dims.top_k);
  require_tokens("residuals.expert_weights", kept.expert_weights, "dims.top_k", dims.top_k);
  require_length(where, "residuals.permutation", kept.permutation, "dims.slots", dims.slots());
  require_length(where, "residuals.inverse", kept.inverse, "dims.slots", dims.slots());
  require_length(where, "residuals.group_offsets", kept.group_offsets,
                 "token_chunks * (dims.experts + 1)", plan.chunks * (dims.experts + 1));
  require_shape(where, "residuals.gate_up", kept.gate_up, "token_chunks * chunk_rows",
                plan.chunks * plan.chunk_rows, "2 * dims.expert_hidden", 2 * dims.expert_hidden);
  if (dims.has_shared_expert()) {
    require_tokens("residuals.shared_gate_up", kept.shared_gate_up, "2 * dims.shared_hidden",
                   2 * dims.shared_hidden);
    require_length(where, "residuals.shared_weights", kept.shared_weights, "dims.tokens",
                   dims.tokens);
  }
}

}  // namespace detail

/// Bytes of the residuals of one layer.
/// throws    Error for bad dims or options
template <Storage S>
[[nodiscard]] std::size_t residual_bytes(const Dims& dims, const DispatchOptions& options) {
  constexpr std::string_view where = "moe::residual_bytes";
  dims.validate(where);
  options.validate(where, "options", dims.router());
  const ChunkPlan plan(dims.router(), options);
  return detail::routing_bytes<S>(dims, plan) +
         Workspace::bytes_for<S>(plan.chunks * plan.chunk_rows * 2 * dims.expert_hidden) +
         Workspace::bytes_for<S>(dims.tokens * 2 * dims.shared_hidden);
}

/// The residuals of one layer in memory of the caller's, as long as the frame they are taken in lasts:
/// residual_bytes of it.
/// throws    Error for bad dims or options
template <Storage S>
[[nodiscard]] Residuals<S> take_residuals(const Dims& dims, const DispatchOptions& options,
                                          Workspace& memory) {
  constexpr std::string_view where = "moe::take_residuals";
  dims.validate(where);
  options.validate(where, "options", dims.router());
  const ChunkPlan plan(dims.router(), options);
  Residuals<S> kept = detail::take_routing<S>(dims, plan, memory);
  const std::int64_t rows = plan.chunks * plan.chunk_rows;
  kept.gate_up = {memory.take<S>(rows * 2 * dims.expert_hidden).data(), rows,
                  2 * dims.expert_hidden};
  kept.shared_gate_up = {memory.take<S>(dims.tokens * 2 * dims.shared_hidden).data(), dims.tokens,
                         2 * dims.shared_hidden};
  return kept;
}

}  // namespace heddle::moe

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heddle/core/cost.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/chunked_cost.hpp"
#include "heddle/gdn/conv_port.hpp"
#include "heddle/gdn/detail/layer_row.hpp"
#include "heddle/gdn/detail/row_backward.hpp"
#include "heddle/gdn/detail/row_forward.hpp"
#include "heddle/gdn/detail/row_recurrence.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/gates.hpp"
#include "heddle/gdn/layer_options.hpp"
#include "heddle/gdn/states.hpp"

namespace heddle::gdn {

/// What a layer call needs of its scratch.
struct LayerWorkspaceBytes {
  std::size_t row = 0;     ///< once: the gates of all tokens
  std::size_t thread = 0;  ///< for each thread at work; of the row's instead in a slice entry

  friend constexpr bool operator==(const LayerWorkspaceBytes&,
                                   const LayerWorkspaceBytes&) = default;
};

namespace detail {

template <Accumulator A>
[[nodiscard]] std::size_t layer_row_bytes(const Dims& dims, std::size_t gates) {
  return LayerRow<A>::workspace_bytes(dims) + gates;
}

template <Storage S, Storage P, Accumulator A>
[[nodiscard]] std::size_t layer_forward_slice_bytes(const Dims& dims, const LayerOptions& options,
                                                    bool residuals) {
  const Segments none({}, 0);
  const ConvSource<S, P, A> source(dims, none, Inputs<S, P, A>{}, ConvOutput::accumulator);
  const std::int64_t longest = std::min(options.chunks.chunk, dims.tokens);
  const HeadSlice slice = HeadSlice::of_key_head(dims, 0);
  const std::size_t chunked = forward_slice_bytes<A>(dims, longest, source, slice);
  if (residuals || options.recurrence == Recurrence::chunked) {
    return chunked;
  }
  const std::size_t tokens = recurrence_slice_bytes<A>(dims, longest, source, slice);
  return options.recurrence == Recurrence::token_by_token ? tokens : std::max(chunked, tokens);
}

}  // namespace detail

/// Which residuals a call keeps, or a backward is given.
enum class Residuals { none, inverses, inverses_and_states };

/// Scratch of forward: of the whole call, whose threads need that much at most, and of a slice.
///
/// units     bytes; exact where a thread computes a key head whole, the row has a chunk of
///           layer_options.chunks.chunk tokens and options.recurrence says how it is evaluated
template <Storage S, Storage P = S, Accumulator A = AccumulatorOf<S>>
[[nodiscard]] LayerWorkspaceBytes layer_forward_workspace_bytes(const Dims& dims,
                                                                const LayerOptions& layer_options,
                                                                Residuals residuals) {
  return {.row = detail::layer_row_bytes<A>(dims, Workspace::bytes_for<A>(dims.value_heads)),
          .thread = detail::layer_forward_slice_bytes<S, P, A>(dims, layer_options,
                                                               residuals != Residuals::none)};
}

/// Scratch of states.
template <Storage S, Storage P = S, Accumulator A = AccumulatorOf<S>>
[[nodiscard]] LayerWorkspaceBytes layer_states_workspace_bytes(const Dims& dims,
                                                               const LayerOptions& layer_options,
                                                               Residuals residuals) {
  const std::int64_t longest = std::min(layer_options.chunks.chunk, dims.tokens);
  const Segments none({}, 0);
  const std::size_t transition = detail::transition_slice_bytes<A>(
      dims, longest,
      ConvSource<S, P, A>(dims, none, Inputs<S, P, A>{}, ConvOutput::accumulator, SourceRows::keys),
      HeadSlice::of_key_head(detail::transition_dims(dims), 0));
  return {.row = detail::layer_row_bytes<A>(dims, Workspace::bytes_for<A>(dims.value_heads)),
          .thread = std::max(detail::layer_forward_slice_bytes<S, P, A>(
                                 dims, layer_options, residuals != Residuals::none),
                             transition)};
}

/// Scratch of backward over a row of so many chunks.
template <Storage S, Storage P = S, Accumulator A = AccumulatorOf<S>>
[[nodiscard]] LayerWorkspaceBytes layer_backward_workspace_bytes(const Dims& dims,
                                                                 const LayerOptions& layer_options,
                                                                 std::int64_t chunks,
                                                                 Residuals residuals) {
  const std::int64_t longest = std::min(layer_options.chunks.chunk, dims.tokens);
  const Segments none({}, 0);
  const ConvPort<S, P, A> port(dims, none, Inputs<S, P, A>{}, ConvOutput::accumulator, {}, {});
  return {.row = detail::layer_row_bytes<A>(
              dims, gates_workspace_bytes<A>(dims.tokens, dims.value_heads)),
          .thread = detail::backward_slice_bytes<A>(dims, longest, chunks,
                                                    residuals == Residuals::inverses_and_states,
                                                    port, HeadSlice::of_key_head(dims, 0))};
}

/// Cost of forward on one document of dims.tokens tokens, without residuals: chunked_cost, the
/// convolution's 2 kernel flops and one exp an element, the gates' three transcendentals.
///
/// source    spec/gdn.md 9
template <Storage S, Storage P, Accumulator A, Storage O>
[[nodiscard]] constexpr Cost layer_forward_cost(const Dims& dims, const ChunkOptions& options) {
  const std::int64_t elements = dims.tokens * dims.qkv_columns();
  const std::int64_t gates = dims.tokens * dims.value_heads;
  Cost cost = chunked_cost<S, A, O>(dims, options);
  cost.flops += 2 * dims.kernel * elements;
  cost.transcendentals += elements + 3 * gates;
  cost.bytes_read +=
      detail::bytes_of<S>(2 * gates) + detail::bytes_of<P>(dims.qkv_columns() * (dims.kernel + 1));
  cost.bytes_written += detail::bytes_of<A>(2 * gates);
  return cost;
}

/// Cost of backward with both residuals kept: chunked_backward_cost, the convolution computed again twice
/// and its two products with d_z, 8 kernel flops and two exps an element, seven transcendentals for each
/// token's gates of a head.
template <Storage S, Storage P, Accumulator A, Storage G>
[[nodiscard]] constexpr Cost layer_backward_cost(const Dims& dims, const ChunkOptions& options) {
  const std::int64_t elements = dims.tokens * dims.qkv_columns();
  const std::int64_t gates = dims.tokens * dims.value_heads;
  Cost cost = chunked_backward_cost<S, A, G>(dims, options);
  cost.flops += 8 * dims.kernel * elements;
  cost.transcendentals += 2 * elements + 7 * gates;
  cost.bytes_read +=
      detail::bytes_of<S>(4 * gates) + detail::bytes_of<P>(dims.qkv_columns() * (dims.kernel + 1));
  cost.bytes_written += detail::bytes_of<A>(4 * gates + dims.qkv_columns() * (dims.kernel + 1));
  return cost;
}

}  // namespace heddle::gdn

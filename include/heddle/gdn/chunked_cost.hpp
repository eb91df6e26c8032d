#pragma once

#include <cstdint>

#include "heddle/core/cost.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/gdn/dims.hpp"

namespace heddle::gdn {

namespace detail {

/// Flops of a value head's chunk of n tokens, in products of three kinds and inverses; those of q and k
/// alone are shared by the value heads of a group.
struct ChunkProductCounts {
  std::int64_t with_state;  ///< n * key_dim * value_dim
  std::int64_t with_tile;   ///< n^2 * value_dim
  std::int64_t of_keys;     ///< n^2 * key_dim, once for a group
  std::int64_t inverses;    ///< multiply-adds (n^3 - n) / 6
};

[[nodiscard]] constexpr std::int64_t product_flops(const Dims& dims, std::int64_t n,
                                                   const ChunkProductCounts& counts) {
  const std::int64_t each = counts.with_state * 2 * n * dims.key_dim * dims.value_dim +
                            counts.with_tile * 2 * n * n * dims.value_dim +
                            counts.inverses * ((n * n * n - n) / 3);
  return dims.value_heads * each + dims.key_heads * counts.of_keys * 2 * n * n * dims.key_dim;
}

/// The same over a row of whole chunks and a last one.
[[nodiscard]] constexpr std::int64_t row_flops(const Dims& dims, const ChunkOptions& options,
                                               const ChunkProductCounts& counts) {
  const std::int64_t whole = dims.tokens / options.chunk;
  return whole * product_flops(dims, options.chunk, counts) +
         product_flops(dims, dims.tokens % options.chunk, counts);
}

/// Decays between the tokens of a chunk, and to and from the state.
[[nodiscard]] constexpr std::int64_t row_exps(const Dims& dims, const ChunkOptions& options) {
  const auto of_chunk = [](std::int64_t n) { return n * (n + 1) / 2 + 2 * n; };
  return dims.value_heads * (dims.tokens / options.chunk * of_chunk(options.chunk) +
                             of_chunk(dims.tokens % options.chunk));
}

template <class T>
[[nodiscard]] constexpr std::int64_t bytes_of(std::int64_t elements) {
  return elements * static_cast<std::int64_t>(sizeof(T));
}

}  // namespace detail

/// Cost of chunked_forward on one document of dims.tokens tokens, without residuals: dense products,
/// counted whole though the zeros of triangular tiles are mostly skipped.
///
/// source    spec/gdn.md 9, merged form
template <Storage S, Accumulator A, Storage O>
[[nodiscard]] constexpr Cost chunked_cost(const Dims& dims, const ChunkOptions& options) {
  const std::int64_t gates = 2 * dims.tokens * dims.value_heads;
  const std::int64_t states = dims.state_rows() * dims.value_dim;
  return {.flops = detail::row_flops(
              dims, options, {.with_state = 3, .with_tile = 2, .of_keys = 2, .inverses = 1}),
          .transcendentals = detail::row_exps(dims, options),
          .bytes_read = detail::bytes_of<S>(dims.tokens * dims.qkv_columns()) +
                        detail::bytes_of<A>(gates + states),
          .bytes_written = detail::bytes_of<O>(dims.tokens * dims.output_columns()) +
                           detail::bytes_of<A>(states)};
}

/// Cost of chunked_states, without residuals.
template <Storage S, Accumulator A>
[[nodiscard]] constexpr Cost chunked_states_cost(const Dims& dims, const ChunkOptions& options) {
  const std::int64_t gates = 2 * dims.tokens * dims.value_heads;
  const std::int64_t states = dims.state_rows() * dims.value_dim;
  return {.flops = detail::row_flops(
              dims, options, {.with_state = 2, .with_tile = 1, .of_keys = 1, .inverses = 1}),
          .transcendentals = detail::row_exps(dims, options),
          .bytes_read = detail::bytes_of<S>(dims.tokens *
                                            (dims.qkv_columns() - dims.key_heads * dims.key_dim)) +
                        detail::bytes_of<A>(gates + states),
          .bytes_written = detail::bytes_of<A>(states)};
}

/// Cost of transitions with kept inverses.
template <Storage S, Accumulator A>
[[nodiscard]] constexpr Cost transitions_cost(const Dims& dims, const ChunkOptions& options) {
  Dims square = dims;
  square.value_dim = dims.key_dim;
  const std::int64_t chunks = (dims.tokens + options.chunk - 1) / options.chunk;
  return {
      .flops = detail::row_flops(square, options,
                                 {.with_state = 2, .with_tile = 1, .of_keys = 0, .inverses = 0}),
      .transcendentals = detail::row_exps(dims, options),
      .bytes_read = detail::bytes_of<S>(dims.tokens * dims.key_heads * dims.key_dim) +
                    detail::bytes_of<A>(2 * dims.tokens * dims.value_heads +
                                        chunks * dims.value_heads * options.chunk * options.chunk),
      .bytes_written = detail::bytes_of<A>(dims.state_rows() * dims.key_dim)};
}

/// Cost of chunked_backward with both residuals kept.
template <Storage S, Accumulator A, Storage G>
[[nodiscard]] constexpr Cost chunked_backward_cost(const Dims& dims, const ChunkOptions& options) {
  const std::int64_t gates = 2 * dims.tokens * dims.value_heads;
  const std::int64_t states = dims.state_rows() * dims.value_dim;
  const std::int64_t chunks = (dims.tokens + options.chunk - 1) / options.chunk;
  return {
      .flops = detail::row_flops(dims, options,
                                 {.with_state = 7, .with_tile = 5, .of_keys = 6, .inverses = 0}),
      .transcendentals = detail::row_exps(dims, options),
      .bytes_read = detail::bytes_of<S>(dims.tokens * dims.qkv_columns()) +
                    detail::bytes_of<G>(dims.tokens * dims.output_columns()) +
                    detail::bytes_of<A>(gates + states + chunks * states +
                                        chunks * dims.value_heads * options.chunk * options.chunk),
      .bytes_written = detail::bytes_of<A>(dims.tokens * dims.qkv_columns() + gates + states)};
}

}  // namespace heddle::gdn

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/detail/backward_pass.hpp"
#include "heddle/head/detail/block_tasks.hpp"
#include "heddle/head/detail/forward_pass.hpp"
#include "heddle/head/options.hpp"

/// The head at the speed of its own matrix products: logits exist a tile at a time, in cache.
namespace heddle::head {

/// Log-prob of each row's target and entropy of its softmax; reference::forward says what that is, for
/// every input.
///
/// shapes    as Inputs and Outputs say
/// units     nats
/// dtypes    bf16, f32 or f64 storage, hidden and weight each their own under one accumulator A, and
///           scalars of the user's with the operations of a number; sums over columns in float lanes of
///           at most 1,024, in double beyond
/// writes    all of every output that is wanted, 0 at inactive rows
/// alias     outputs disjoint from inputs and from each other
/// specials  those of reference::forward; tokens = 0: no-op; inactive rows are never read or multiplied
/// order     logits: Gemm::fixed_order. Statistics: tiles of options.vocab_tile columns on one grid over
///           all columns, cut where ranks' columns end, in column order. A row's bits depend on the row,
///           the weight, the temperature, the policies, vocab_tile and the ranks' cuts alone: on no
///           chunk, layout, thread, path, stride or neighbour
/// accuracy  in float, against Mode::local, against any other tile: log-prob an ulp of the larger of it
///           and its log-sum, two where a rounding ties; entropy 7 ulp (chunked_head_test.cpp)
/// memory    forward_workspace_bytes of the workspace: a tile of weight and of logits, never all columns
///           of a chunk but in Mode::local and Mode::unsharded, which take options.scratch_bytes
/// cost      forward_cost; Mode::fused takes an exponential a logit and one where a tile raises the
///           maximum of tiles before it, the other modes three
/// throws    Error as reference::forward
/// source    spec/head.md 1-3, 6; spec/performance.md 3
template <Storage S, Storage W, Accumulator A>
void forward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
             const Outputs<A>& outputs, Workspace& workspace);

/// The cotangents of hidden and weight under those of log-probs and entropy; reference::backward says
/// what they are. Logits are computed again, a tile at a time; both products read that tile's one
/// cotangent, made with one exponential a logit and rounded once.
///
/// shapes    as Inputs, Residuals, OutputCotangents and Cotangents say
/// dtypes    as forward; d_hidden and d_weight in A, not rounded to storage. LogitsDtype::bf16 under
///           float keeps cotangents of logits in bf16, so that bf16 storage meets in bf16 products
/// writes    all of d_hidden, 0 at rows that draw no gradient; d_weight as its Write says
/// alias     cotangents disjoint from everything read and from each other; either may be null
/// specials  those of reference::backward
/// order     d_hidden: columns ascending in blocks of 512, then ranks ascending: the same bits for any
///           chunk. d_weight: a chunk's rows in blocks of 512, then chunks. Same bits in either layout
///           and on any number of threads
/// accuracy  Mode::fused against Mode::local, cotangents of logits: 2.6e-8 of the largest, 2e-6 with one
///           of the entropy (chunked_head_test.cpp)
/// memory    backward_workspace_bytes of the workspace, as forward and a chunk's rows of d_hidden
/// cost      backward_cost; Mode::fused an exponential a logit of rows with a cotangent, the other modes
///           two, four with one of the entropy
/// throws    Error as reference::backward
/// source    spec/head.md 4, 5, 6; spec/performance.md 3
template <Storage S, Storage W, Accumulator A>
void backward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
              const Residuals<A>& residuals, const OutputCotangents<A>& output_cotangents,
              const Cotangents<A>& cotangents, Workspace& workspace);

namespace detail {

template <Storage S, Storage W, Accumulator A>
inline constexpr bool accumulates_in =
    std::is_same_v<A, AccumulatorOf<S>>&& std::is_same_v<A, AccumulatorOf<W>>;

inline void require_row_ids(std::string_view where, const Dims& dims) {
  require(dims.tokens <= std::numeric_limits<std::int32_t>::max(), where, "dims.tokens",
          dims.tokens, "must fit an int32 row id");
}

}  // namespace detail

template <Storage S, Storage W, Accumulator A>
void forward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
             const Outputs<A>& outputs, Workspace& workspace) {
  static_assert(detail::accumulates_in<S, W, A>,
                "heddle::head::forward: outputs must be in the accumulator of hidden and weight");
  constexpr const char* where = "head::forward";
  detail::require_valid(where, dims, inputs, options);
  const A divisor = detail::temperature_divisor<A>(where, options);
  detail::require_valid(where, dims, outputs);
  detail::require_row_ids(where, dims);
  const Workspace::Frame frame(workspace);
  detail::ForwardPass<S, W, A> pass(workspace, dims, inputs, options, detail::arena_threads());
  pass.run(divisor, outputs);
}

namespace detail {

/// backward, on arguments that were checked: every row's share of d_hidden assigned, or added to what is
/// there.
template <Storage S, Storage W, Accumulator A>
void run_backward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
                  const Residuals<A>& residuals, const OutputCotangents<A>& output_cotangents,
                  const Cotangents<A>& cotangents, Write d_hidden_write, Workspace& workspace) {
  const A divisor = temperature_divisor<A>("head::backward", options);
  with_cotangent_storage<A>(options.logits_dtype, [&]<class D>(D) {
    const Workspace::Frame frame(workspace);
    BackwardPass<S, W, A, D> pass(workspace, dims, inputs, options, cotangents, arena_threads());
    pass.run(divisor, residuals, output_cotangents, cotangents.d_hidden, d_hidden_write);
  });
}

template <Storage S, Storage W, Accumulator A>
void require_valid_backward(std::string_view where, const Dims& dims, const Inputs<S, W>& inputs,
                            const ScoringOptions& options, const Residuals<A>& residuals,
                            const OutputCotangents<A>& output_cotangents,
                            const Cotangents<A>& cotangents, const WeightExtents& held) {
  require_valid(where, dims, inputs, options, held);
  static_cast<void>(temperature_divisor<A>(where, options));
  require_valid(where, dims, options, residuals, output_cotangents);
  require_valid(where, dims, inputs.layout, cotangents, held);
  require_row_ids(where, dims);
}

}  // namespace detail

template <Storage S, Storage W, Accumulator A>
void backward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
              const Residuals<A>& residuals, const OutputCotangents<A>& output_cotangents,
              const Cotangents<A>& cotangents, Workspace& workspace) {
  static_assert(
      detail::accumulates_in<S, W, A>,
      "heddle::head::backward: cotangents must be in the accumulator of hidden and weight");
  detail::require_valid_backward("head::backward", dims, inputs, options, residuals,
                                 output_cotangents, cotangents,
                                 detail::WeightExtents{dims.hidden, dims.vocab});
  detail::run_backward(dims, inputs, options, residuals, output_cotangents, cotangents,
                       Write::overwrite, workspace);
}

/// Bytes of workspace that forward takes of hidden states stored as S and a weight stored as W, in an
/// arena of so many threads.
///
/// throws    Error for dims and options
template <Storage S, Storage W = S>
[[nodiscard]] std::size_t forward_workspace_bytes(const Dims& dims, const ScoringOptions& options,
                                                  std::int64_t threads = 1) {
  dims.validate("head::forward_workspace_bytes");
  options.validate("head::forward_workspace_bytes");
  detail::ByteCounter counter;
  const detail::ForwardPass<S, W, AccumulatorOf<S>> pass(counter, dims, Inputs<S, W>{}, options,
                                                         threads);
  return counter.bytes();
}

/// The same of backward, both cotangents wanted.
template <Storage S, Storage W = S>
[[nodiscard]] std::size_t backward_workspace_bytes(const Dims& dims, WeightLayout layout,
                                                   const ScoringOptions& options,
                                                   std::int64_t threads = 1) {
  using A = AccumulatorOf<S>;
  dims.validate("head::backward_workspace_bytes");
  options.validate("head::backward_workspace_bytes");
  A wanted{};
  const Cotangents<A> both{.d_hidden = {&wanted, 1, 1}, .d_weight = {.values = {&wanted, 1, 1}}};
  const Inputs<S, W> inputs{.hidden = {}, .weight = {}, .layout = layout, .target_ids = {}};
  detail::ByteCounter counter;
  detail::with_cotangent_storage<A>(options.logits_dtype, [&]<class D>(D) {
    const detail::BackwardPass<S, W, A, D> pass(counter, dims, inputs, options, both, threads);
  });
  return counter.bytes();
}

namespace detail {

template <Storage S, Storage W>
[[nodiscard]] Cost pass_cost(const Dims& dims, const ScoringOptions& options,
                             std::int64_t products) {
  const std::int64_t rows = std::min(options.chunk, std::max<std::int64_t>(dims.tokens, 1));
  const std::int64_t chunks = (dims.tokens + rows - 1) / rows;
  return {.flops = products * 2 * dims.tokens * dims.hidden * dims.vocab,
          .transcendentals = dims.tokens * dims.vocab,
          .bytes_read = chunks * dims.hidden * dims.vocab * static_cast<std::int64_t>(sizeof(W)) +
                        dims.tokens * dims.hidden * static_cast<std::int64_t>(sizeof(S))};
}

}  // namespace detail

/// What forward costs where every token is active, in Mode::fused. The exponentials of rising maxima,
/// at most one a row and tile, depend on the data and are not counted.
template <Storage S, Storage W = S>
[[nodiscard]] Cost forward_cost(const Dims& dims, const ScoringOptions& options) {
  Cost cost = detail::pass_cost<S, W>(dims, options, 1);
  cost.transcendentals += dims.tokens;  // a logarithm each
  cost.bytes_written = 5 * dims.tokens * static_cast<std::int64_t>(sizeof(AccumulatorOf<S>));
  return cost;
}

/// What backward costs where every token has a cotangent: logits again and both products. d_weight is
/// read and written once a chunk.
template <Storage S, Storage W = S>
[[nodiscard]] Cost backward_cost(const Dims& dims, const ScoringOptions& options) {
  using A = AccumulatorOf<S>;
  constexpr auto element = static_cast<std::int64_t>(sizeof(A));
  Cost cost = detail::pass_cost<S, W>(dims, options, 3);
  const std::int64_t rows = std::min(options.chunk, std::max<std::int64_t>(dims.tokens, 1));
  const std::int64_t chunks = (dims.tokens + rows - 1) / rows;
  const std::int64_t weight = dims.hidden * dims.vocab * element;
  cost.bytes_read += std::max<std::int64_t>(chunks - 1, 0) * weight + 5 * dims.tokens * element;
  cost.bytes_written =
      std::max<std::int64_t>(chunks, 1) * weight + dims.tokens * dims.hidden * element;
  return cost;
}

}  // namespace heddle::head

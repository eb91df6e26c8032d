#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include <oneapi/tbb/task_arena.h>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/chunk.hpp"
#include "heddle/gdn/chunk_plan.hpp"
#include "heddle/gdn/detail/row_backward.hpp"
#include "heddle/gdn/detail/row_forward.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"
#include "heddle/gdn/workspaces.hpp"

namespace heddle::gdn {

/// What the recurrence of a row reads, once the convolution and the gates are computed.
///
/// shapes    y [tokens, qkv_columns] after convolution and SiLU, neither normalised nor scaled; g (log
///           decay, <= 0), beta [tokens, value_heads]; segment_ids [tokens], > 0 a document, 0 padding;
///           recurrent_state [state_rows, value_dim]
/// specials  recurrent_state null: zeros. Rows of padding are never read
template <Storage S, Accumulator A = AccumulatorOf<S>>
struct ChunkedInputs {
  ConstMatrixView<S> y{};
  ConstMatrixView<A> g{};
  ConstMatrixView<A> beta{};
  std::span<const std::int32_t> segment_ids{};
  ConstMatrixView<A> recurrent_state{};
};

/// What chunked_forward writes.
template <Storage O, Accumulator A>
struct ChunkedOutputs {
  MatrixView<O> o{};                      ///< [tokens, output_columns], 0 at padding
  MatrixView<A> final_recurrent_state{};  ///< null: not wanted
};

/// Cotangents going into chunked_backward, and coming out of it.
template <Storage G, Accumulator A>
struct ChunkedCotangents {
  ConstMatrixView<G> d_o{};                      ///< padding is not read
  ConstMatrixView<A> d_final_recurrent_state{};  ///< null: zero
  MatrixView<A> d_y{};
  MatrixView<A> d_g{};
  MatrixView<A> d_beta{};
  MatrixView<A> d_recurrent_state{};  ///< null: not wanted
};

namespace detail {

/// The slices that a row is cut into for so many threads: a key head each, and where these are fewer
/// than threads, fewer of its value heads, then fewer columns of theirs. The bits are the same.
class Slices {
 public:
  Slices(const Dims& dims, std::int64_t threads) : dims_(dims) {
    const std::int64_t wanted = (threads + dims.key_heads - 1) / dims.key_heads;
    heads_each_ = (dims.group() + wanted - 1) / wanted;
    head_parts_ = (dims.group() + heads_each_ - 1) / heads_each_;
    const std::int64_t column_parts = (wanted + head_parts_ - 1) / head_parts_;
    // Not below two panels: a product of fewer columns wastes most of a tile.
    constexpr std::int64_t least = 32;
    const std::int64_t columns = (dims.value_dim + column_parts - 1) / column_parts;
    columns_each_ = std::min((columns + least - 1) / least * least, dims.value_dim);
    column_parts_ = (dims.value_dim + columns_each_ - 1) / columns_each_;
  }

  [[nodiscard]] std::int64_t count() const { return dims_.key_heads * head_parts_ * column_parts_; }

  [[nodiscard]] HeadSlice at(std::int64_t index) const {
    const std::int64_t column = index % column_parts_ * columns_each_;
    const std::int64_t head = index / column_parts_ % head_parts_ * heads_each_;
    const std::int64_t key_head = index / column_parts_ / head_parts_;
    return {key_head, key_head * dims_.group() + head, std::min(heads_each_, dims_.group() - head),
            column, std::min(columns_each_, dims_.value_dim - column)};
  }

 private:
  Dims dims_;
  std::int64_t heads_each_;
  std::int64_t head_parts_;
  std::int64_t columns_each_;
  std::int64_t column_parts_;
};

/// forward_slice of every slice, in the caller's arena.
template <Accumulator A, class Source, Storage O>
void forward_row(const RecurrenceRow<A>& row, const Source& source, const StatesInOut<A>& states,
                 MatrixView<O> o, const ChunkResiduals<A>& kept, Workspaces& workspaces,
                 std::type_identity_t<ConstMatrixView<A>> t_inv = {}) {
  const Slices slices(row.dims, oneapi::tbb::this_task_arena::max_concurrency());
  workspaces.run(slices.count(), [&](std::int64_t task, Workspace& workspace) {
    forward_slice(row, source, slices.at(task), states, o, kept, workspace, t_inv);
  });
}

/// backward_slice of every key head, in the caller's arena.
template <Accumulator A, class Port, Storage G>
void backward_row(const RecurrenceRow<A>& row, const Port& port, ConstMatrixView<A> initial,
                  const ChunkResiduals<const A>& kept, const RowCotangents<G, A>& cotangents,
                  Workspaces& workspaces) {
  workspaces.run(row.dims.key_heads, [&](std::int64_t key_head, Workspace& workspace) {
    backward_slice(row, port, HeadSlice::of_key_head(row.dims, key_head), initial, kept, cotangents,
                   workspace);
  });
}

template <Storage S, Accumulator A>
[[nodiscard]] RecurrenceRow<A> recurrence_row(const Dims& dims, const Segments& segments,
                                              const ChunkPlan& plan, const Options& options,
                                              const ChunkedInputs<S, A>& inputs) {
  return {.dims = dims,
          .segments = segments,
          .plan = plan,
          .norm = options.norm,
          .eps = static_cast<A>(options.eps),
          .g = inputs.g,
          .beta = inputs.beta};
}

template <Storage S, Accumulator A>
void check_chunked(std::string_view where, const Dims& dims, const ChunkedInputs<S, A>& inputs,
                   const Options& options, const ChunkOptions& chunk_options) {
  dims.validate(where);
  require_shape(where, "y", inputs.y, "dims.tokens", dims.tokens, "dims.qkv_columns()",
                dims.qkv_columns());
  require_shape(where, "g", inputs.g, "dims.tokens", dims.tokens, "dims.value_heads",
                dims.value_heads);
  require_shape(where, "beta", inputs.beta, "dims.tokens", dims.tokens, "dims.value_heads",
                dims.value_heads);
  require_length(where, "segment_ids", inputs.segment_ids, "dims.tokens", dims.tokens);
  require_recurrent_shape(where, "recurrent_state", inputs.recurrent_state, dims);
  options.validate(where);
  require(static_cast<A>(options.eps) > A(0), where, "options.eps", options.eps,
          "must be > 0 in the accumulation type");
  chunk_options.validate(where);
}

template <class T>
void check_residuals(std::string_view where, const Dims& dims, const ChunkPlan& plan,
                     const ChunkResiduals<T>& residuals) {
  require_shape_if_given(where, "t_inv", residuals.t_inv, "chunks * value_heads",
                         plan.count() * dims.value_heads, "chunk * chunk",
                         plan.chunk() * plan.chunk());
  require_shape_if_given(where, "chunk_states", residuals.chunk_states, "chunks * value_heads",
                         plan.count() * dims.value_heads, "key_dim * value_dim",
                         dims.key_dim * dims.value_dim);
}

/// Checks a forward call, and runs it: run(row, source, states) does the slices.
template <Storage S, Accumulator A, Storage O, class Run>
void checked_forward(std::string_view where, const Dims& dims, const ChunkedInputs<S, A>& inputs,
                     const Options& options, const ChunkOptions& chunk_options,
                     const ChunkedOutputs<O, A>& outputs, const ChunkResiduals<A>& residuals,
                     const Run& run) {
  check_chunked(where, dims, inputs, options, chunk_options);
  const Segments segments(inputs.segment_ids, options.initial_segment);
  const ChunkPlan plan(segments, chunk_options);
  require_shape(where, "o", outputs.o, "dims.tokens", dims.tokens, "dims.output_columns()",
                dims.output_columns());
  require_recurrent_shape(where, "final_recurrent_state", outputs.final_recurrent_state, dims);
  check_residuals(where, dims, plan, residuals);
  run(recurrence_row(dims, segments, plan, options, inputs),
      ArrayPort<S, A>(dims, segments, inputs.y),
      StatesInOut<A>{.initial = inputs.recurrent_state, .final = outputs.final_recurrent_state});
}

/// The same for a backward call: run(row, port, cotangents).
template <Storage S, Accumulator A, Storage G, class Run>
void checked_backward(std::string_view where, const Dims& dims, const ChunkedInputs<S, A>& inputs,
                      const Options& options, const ChunkOptions& chunk_options,
                      const ChunkResiduals<const A>& residuals,
                      const ChunkedCotangents<G, A>& cotangents, const Run& run) {
  check_chunked(where, dims, inputs, options, chunk_options);
  const Segments segments(inputs.segment_ids, options.initial_segment);
  const ChunkPlan plan(segments, chunk_options);
  check_residuals(where, dims, plan, residuals);
  require_shape(where, "d_o", cotangents.d_o, "dims.tokens", dims.tokens, "dims.output_columns()",
                dims.output_columns());
  require_recurrent_shape(where, "d_final_recurrent_state", cotangents.d_final_recurrent_state,
                          dims);
  require_shape(where, "d_y", cotangents.d_y, "dims.tokens", dims.tokens, "dims.qkv_columns()",
                dims.qkv_columns());
  require_shape(where, "d_g", cotangents.d_g, "dims.tokens", dims.tokens, "dims.value_heads",
                dims.value_heads);
  require_shape(where, "d_beta", cotangents.d_beta, "dims.tokens", dims.tokens, "dims.value_heads",
                dims.value_heads);
  require_recurrent_shape(where, "d_recurrent_state", cotangents.d_recurrent_state, dims);
  run(recurrence_row(dims, segments, plan, options, inputs),
      ArrayPort<S, A>(dims, segments, inputs.y, cotangents.d_y),
      RowCotangents<G, A>{.d_o = cotangents.d_o,
                          .d_final = cotangents.d_final_recurrent_state,
                          .d_initial = cotangents.d_recurrent_state,
                          .d_g = cotangents.d_g,
                          .d_beta = cotangents.d_beta});
}

}  // namespace detail

/// The gated delta rule over a row of packed documents, a chunk at a time: the recurrence of
/// reference.hpp in products of matrices.
///   q = key_dim^(-1/2) norm(y_q), k = norm(y_k), v = y_v;  S_t = exp(g)(I - beta k k^T) S_{t-1} +
///   beta k v^T,  o_t = S_t^T q_t, S = 0 where a document starts
/// shapes    see ChunkedInputs, ChunkedOutputs, ChunkResiduals; value head h reads key head
///           h / (value_heads / key_heads), never repeated in memory
/// dtypes    y: S (bf16, f32, f64), widened a tile at a time; o: any storage, rounded once; all else
///           and all arithmetic A (f32, f64), sums of g in f64
/// writes    every element of o, 0 at padding, and of the final state; residuals as they say
/// alias     the final state may be the view of the initial one, all else is disjoint
/// specials  tokens = 0 or padding alone: the state passes through. Chunking::aligned: NaN in one
///           document reaches no other; Chunking::grid: it may reach those of the same chunk. A state
///           of another document is not read
/// order     the same bits for any number of threads, slices and kept residuals. Chunking::aligned: a
///           document's bits do not depend on what surrounds it
/// accuracy  float within 5e-6 of double relative to the largest value (chunked_test.cpp), whatever
///           the chunk size; keys must satisfy beta |k|^2 <= 2, which a norm sees to
/// memory    chunked_workspace_bytes for each thread at work; nothing of the size of y
/// cost      chunked_cost
/// throws    Error for a shape that is not dims', options out of range, a negative segment id
/// source    spec/gdn.md 5
template <Storage S, Accumulator A, Storage O>
void chunked_forward(const Dims& dims, const ChunkedInputs<S, A>& inputs, const Options& options,
                     const ChunkOptions& chunk_options, const ChunkedOutputs<O, A>& outputs,
                     const ChunkResiduals<A>& residuals, Workspaces& workspaces) {
  detail::checked_forward("gdn::chunked_forward", dims, inputs, options, chunk_options, outputs,
                          residuals, [&](const auto& row, const auto& source, const auto& states) {
                            detail::forward_row<A>(row, source, states, outputs.o, residuals,
                                                   workspaces);
                          });
}

/// The same for some key heads and their value heads, in the calling thread: reads and writes their
/// columns, states and residuals alone, equal in bits to what the whole call computes there.
///
/// memory    chunked_workspace_bytes
/// throws    Error also for key_heads outside dims
template <Storage S, Accumulator A, Storage O>
void chunked_forward(const Dims& dims, const ChunkedInputs<S, A>& inputs, const Options& options,
                     const ChunkOptions& chunk_options, const ChunkedOutputs<O, A>& outputs,
                     const ChunkResiduals<A>& residuals, KeyHeads key_heads, Workspace& workspace) {
  constexpr std::string_view where = "gdn::chunked_forward";
  dims.validate(where);
  key_heads.validate(where, dims);
  detail::checked_forward(where, dims, inputs, options, chunk_options, outputs, residuals,
                          [&](const auto& row, const auto& source, const auto& states) {
                            for (std::int64_t i = 0; i < key_heads.count; ++i) {
                              detail::forward_slice<A>(
                                  row, source, HeadSlice::of_key_head(dims, key_heads.first + i),
                                  states, outputs.o, residuals, workspace);
                            }
                          });
}

/// Backward of chunked_forward.
///
/// shapes    see ChunkedCotangents; residuals of the forward of the same inputs and chunk options
/// dtypes    d_o: any storage; what comes out: A, not rounded
/// writes    every element of d_y, d_g, d_beta, exactly 0 at padding, d_g also at a document's first
///           token; d_recurrent_state where it is given
/// alias     d_recurrent_state may be the view of d_final_recurrent_state, all else is disjoint
/// specials  what residuals lack is computed again, by the same steps: t_inv chunk by chunk, the states
///           from checkpoints before every sqrt(chunks)-th chunk. kappa, sigma, the decays and the
///           norm always are. d_o at padding is not read
/// order     the same bits for any number of threads and any kept residuals; value heads of a group
///           in ascending order. A document's cotangents do not depend on what surrounds it
///           (Chunking::aligned)
/// accuracy  float within 5e-6 of double (chunked_test.cpp). Each d_g is a sum of what its decay stands
///           between, not a difference of sums, and keeps its digits under strong decay
/// memory    chunked_backward_workspace_bytes for each thread at work
/// cost      chunked_backward_cost; with chunk_states missing two forward passes without output more
/// throws    Error as chunked_forward
/// source    spec/gdn.md 7
template <Storage S, Accumulator A, Storage G>
void chunked_backward(const Dims& dims, const ChunkedInputs<S, A>& inputs, const Options& options,
                      const ChunkOptions& chunk_options, const ChunkResiduals<const A>& residuals,
                      const ChunkedCotangents<G, A>& cotangents, Workspaces& workspaces) {
  detail::checked_backward("gdn::chunked_backward", dims, inputs, options, chunk_options, residuals,
                           cotangents,
                           [&](const auto& row, const auto& port, const auto& row_cotangents) {
                             detail::backward_row<A>(row, port, inputs.recurrent_state, residuals,
                                                     row_cotangents, workspaces);
                           });
}

/// The same for some key heads and their value heads, as chunked_forward has it.
template <Storage S, Accumulator A, Storage G>
void chunked_backward(const Dims& dims, const ChunkedInputs<S, A>& inputs, const Options& options,
                      const ChunkOptions& chunk_options, const ChunkResiduals<const A>& residuals,
                      const ChunkedCotangents<G, A>& cotangents, KeyHeads key_heads,
                      Workspace& workspace) {
  constexpr std::string_view where = "gdn::chunked_backward";
  dims.validate(where);
  key_heads.validate(where, dims);
  detail::checked_backward(where, dims, inputs, options, chunk_options, residuals, cotangents,
                           [&](const auto& row, const auto& port, const auto& row_cotangents) {
                             for (std::int64_t i = 0; i < key_heads.count; ++i) {
                               detail::backward_slice<A>(
                                   row, port, HeadSlice::of_key_head(dims, key_heads.first + i),
                                   inputs.recurrent_state, residuals, row_cotangents, workspace);
                             }
                           });
}

/// Workspace of chunked_forward: of the slice entry, and of each thread of the parallel one at most.
///
/// units     bytes; exact where the row has a chunk of chunk_options.chunk tokens
template <Accumulator A>
[[nodiscard]] std::size_t chunked_workspace_bytes(const Dims& dims,
                                                  const ChunkOptions& chunk_options) {
  const Segments none({}, 0);
  return detail::forward_slice_bytes<A>(dims, std::min(chunk_options.chunk, dims.tokens),
                                        ArrayPort<A, A>(dims, none, {}),
                                        HeadSlice::of_key_head(dims, 0));
}

/// Workspace of chunked_backward for a row of so many chunks, with or without kept chunk_states.
template <Accumulator A>
[[nodiscard]] std::size_t chunked_backward_workspace_bytes(const Dims& dims,
                                                           const ChunkOptions& chunk_options,
                                                           std::int64_t chunks, bool states_kept) {
  const Segments none({}, 0);
  return detail::backward_slice_bytes<A>(dims, std::min(chunk_options.chunk, dims.tokens), chunks,
                                         states_kept, ArrayPort<A, A>(dims, none, {}),
                                         HeadSlice::of_key_head(dims, 0));
}

}  // namespace heddle::gdn

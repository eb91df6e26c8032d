#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <oneapi/tbb/task_arena.h>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/causal_conv.hpp"
#include "heddle/gdn/chunk_plan.hpp"
#include "heddle/gdn/chunked.hpp"
#include "heddle/gdn/conv_port.hpp"
#include "heddle/gdn/detail/layer_row.hpp"
#include "heddle/gdn/detail/row_recurrence.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/gates.hpp"
#include "heddle/gdn/layer_options.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/states.hpp"
#include "heddle/gdn/workspaces.hpp"

/// The Gated Delta Net layer, from qkv before the convolution to the heads' outputs and back: what
/// reference.hpp defines, with the recurrence a chunk at a time or, forward, token by token.
namespace heddle::gdn {

/// The layer over a row of packed documents.
///   y = silu(conv(qkv)) within each document;  q = key_dim^(-1/2) norm(y_q), k = norm(y_k), v = y_v
///   beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias)
///   S_t = exp(g)(I - beta k k^T) S_{t-1} + beta k v^T,  o_t = S_t^T q_t, S = 0 where a document starts
/// shapes    see Inputs, Outputs and ChunkResiduals; value head h reads key head
///           h / (value_heads / key_heads), never repeated in memory
/// dtypes    qkv, a, b, conv_state: S (bf16, f32, f64), widened a tile at a time; conv_weight,
///           conv_bias: P; the rest, and all arithmetic: A (f32, f64), sums of g in f64; o: any
///           storage, rounded once
/// writes    every element of each view in outputs that is not null (o is required), o exactly 0 at
///           padding; residuals as they say
/// alias     a final state may be the view of the given one, all else is disjoint
/// specials  tokens = 0 or padding alone: o = 0, states pass through. Padding is never read: NaN there
///           is legal. Chunking::aligned: NaN in one document reaches no other; Chunking::grid: it may
///           reach those of the same chunk
/// order     of each Recurrence: the same bits for any number of threads and slices, of the chunked one
///           for any kept residuals; which one Recurrence::automatic takes does not depend on what
///           surrounds a document (takes_tokens). Chunking::aligned: nor do a document's bits
/// accuracy  float within 5e-6 of double relative to the largest value (layer_test.cpp)
/// memory    layer_forward_workspace_bytes (layer_cost.hpp); nothing of the size of qkv
/// cost      layer_forward_cost
/// throws    Error as check_inputs and check_outputs say, LayerOptions out of range, residuals of
///           another shape
/// source    spec/gdn.md 2, 3, 5
template <Storage S, Storage P, Accumulator A, Storage O>
void forward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
             const LayerOptions& layer_options, const Outputs<O, S, A>& outputs,
             const ChunkResiduals<A>& residuals, LayerScratch& scratch);

/// The same for some key heads and their value heads, in the calling thread: reads and writes their
/// columns, rows, states and residuals alone, equal in bits to what the whole call computes there.
/// throws    Error also for key_heads outside dims
template <Storage S, Storage P, Accumulator A, Storage O>
void forward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
             const LayerOptions& layer_options, const Outputs<O, S, A>& outputs,
             const ChunkResiduals<A>& residuals, KeyHeads key_heads, LayerScratch& scratch);

/// The states after a row, and its transition m, without its output: forward with the output's part
/// left out.
/// writes    every element of each view in outputs that is not null; residuals.t_inv where it is given
/// order     states and t_inv equal in bits to those of forward
/// memory    layer_states_workspace_bytes
/// throws    Error as forward; chunk_states given
/// source    spec/gdn.md 8.1, 8.2
template <Storage S, Storage P, Accumulator A>
void states(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
            const LayerOptions& layer_options, const StatesOutputs<S, A>& outputs,
            const ChunkResiduals<A>& residuals, LayerScratch& scratch);

/// Backward of forward: the cotangents of all inputs, from those of o and of both final states.
/// shapes    see OutputCotangents and Cotangents; residuals of the forward of the same inputs and layer
///           options
/// dtypes    d_o: any storage; every cotangent that comes out: A, not rounded
/// writes    see Cotangents
/// alias     see Cotangents
/// specials  what residuals lack is computed again, by the same steps; convolution, gates and norm
///           always are. Padding gets exactly 0 and is not read, in d_o either; without any token the
///           states' cotangents pass through and the parameters' are 0
/// order     the value heads of a group ascending; parameter sums in fixed blocks of tokens: the same
///           bits for any number of threads, slices and kept residuals
/// accuracy  central differences in double to 1e-6, float within 5e-6 of double (layer_test.cpp)
/// memory    layer_backward_workspace_bytes
/// cost      layer_backward_cost
/// throws    Error as check_inputs and check_cotangents say, LayerOptions out of range, residuals of
///           another shape
/// source    spec/gdn.md 2.3, 3, 7
template <Storage S, Storage P, Accumulator A, Storage G>
void backward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
              const LayerOptions& layer_options, const ChunkResiduals<const A>& residuals,
              const OutputCotangents<G, A>& given, const Cotangents<A>& wanted,
              LayerScratch& scratch);

/// The same for some key heads and their value heads, as forward has it.
template <Storage S, Storage P, Accumulator A, Storage G>
void backward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
              const LayerOptions& layer_options, const ChunkResiduals<const A>& residuals,
              const OutputCotangents<G, A>& given, const Cotangents<A>& wanted, KeyHeads key_heads,
              LayerScratch& scratch);

namespace detail {

[[nodiscard]] inline KeyHeads all_key_heads(const Dims& dims) {
  return {0, dims.key_heads};
}

/// Residuals are kept by chunks alone.
template <class T>
[[nodiscard]] bool takes_tokens(const Dims& dims, const LayerOptions& options,
                                const Segments& segments, const ChunkResiduals<T>& residuals) {
  return residuals.t_inv.is_null() && residuals.chunk_states.is_null() &&
         gdn::takes_tokens(dims, options, segments);
}

template <class T>
void check_recurrence(std::string_view where, const LayerOptions& options,
                      const ChunkResiduals<T>& residuals) {
  require(options.recurrence != Recurrence::token_by_token ||
              (residuals.t_inv.is_null() && residuals.chunk_states.is_null()),
          where, "residuals", "given", "must be null where options.recurrence is token_by_token");
}

/// A row's recurrence, one way or the other; o null: states alone.
template <Accumulator A, class Source, Storage O>
void layer_recurrence(const LayerOptions& options, const RecurrenceRow<A>& row,
                      const Source& source, const StatesInOut<A>& states, MatrixView<O> o,
                      const ChunkResiduals<A>& residuals, Workspaces& workspaces) {
  if (takes_tokens(row.dims, options, row.segments, residuals)) {
    run_recurrence(row, source, states, o, workspaces);
  } else {
    forward_row(row, source, states, o, residuals, workspaces);
  }
}

template <Accumulator A, class Source, Storage O>
void layer_recurrence_slice(const LayerOptions& options, const RecurrenceRow<A>& row,
                            const Source& source, const HeadSlice& slice,
                            const StatesInOut<A>& states, MatrixView<O> o,
                            const ChunkResiduals<A>& residuals, Workspace& workspace) {
  if (takes_tokens(row.dims, options, row.segments, residuals)) {
    recurrence_slice(row, source, slice, states, o, workspace);
  } else {
    forward_slice(row, source, slice, states, o, residuals, workspace);
  }
}

/// Checks and computes a forward call: run(row, source, states) does the slices.
template <Storage S, Storage P, Accumulator A, Storage O, class Loop, class Run>
void layer_forward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
                   const LayerOptions& layer_options, const Outputs<O, S, A>& outputs,
                   const ChunkResiduals<A>& residuals, KeyHeads key_heads, LayerScratch& scratch,
                   const Loop& loop, const Run& run) {
  constexpr std::string_view where = "gdn::forward";
  check_inputs(where, dims, inputs, options);
  check_outputs(where, dims, outputs);
  layer_options.validate(where);
  key_heads.validate(where, dims);
  const LayerRow<A> row(dims, inputs, options, layer_options.chunks, scratch.row());
  check_residuals(where, dims, row.plan, residuals);
  check_recurrence(where, layer_options, residuals);
  row.compute_gates(inputs, options, value_heads_of(dims, key_heads), scratch.row(), loop);
  run(row.recurrence, ConvSource<S, P, A>(dims, row.segments, inputs, options.conv_output),
      StatesInOut<A>{.initial = inputs.recurrent_state, .final = outputs.final_recurrent_state});
  // Last: a final state may lie where the given one was read.
  write_final_window(dims, row.segments, inputs, key_heads, outputs.final_conv_state);
}

/// The same for a backward call: run(row, port, cotangents).
template <Storage S, Storage P, Accumulator A, Storage G, class Loop, class Run>
void layer_backward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
                    const LayerOptions& layer_options, const ChunkResiduals<const A>& residuals,
                    const OutputCotangents<G, A>& given, const Cotangents<A>& wanted,
                    KeyHeads key_heads, LayerScratch& scratch, const Loop& loop, const Run& run) {
  constexpr std::string_view where = "gdn::backward";
  check_inputs(where, dims, inputs, options);
  check_cotangents(where, dims, inputs, given, wanted);
  layer_options.validate(where);
  key_heads.validate(where, dims);
  const LayerRow<A> row(dims, inputs, options, layer_options.chunks, scratch.row());
  check_residuals(where, dims, row.plan, residuals);
  const ValueHeads heads = value_heads_of(dims, key_heads);
  row.compute_gates(inputs, options, heads, scratch.row(), loop);
  // The gates' cotangents wait where their inputs' will be.
  run(row.recurrence,
      ConvPort<S, P, A>(dims, row.segments, inputs, options.conv_output, given.d_final_conv_state,
                        wanted),
      RowCotangents<G, A>{.d_o = given.d_o,
                          .d_final = given.d_final_recurrent_state,
                          .d_initial = wanted.d_recurrent_state,
                          .d_g = wanted.d_a,
                          .d_beta = wanted.d_b});
  gates_backward(row.segments, gate_inputs(inputs, heads), options.beta_range,
                 wanted.d_a.column_block(heads.first, heads.count),
                 wanted.d_b.column_block(heads.first, heads.count),
                 GateParameterCotangents<A>{.d_A_log = part(wanted.d_A_log, heads),
                                            .d_dt_bias = part(wanted.d_dt_bias, heads)},
                 scratch.row(), loop);
}

}  // namespace detail

template <Storage S, Storage P, Accumulator A, Storage O>
void forward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
             const LayerOptions& layer_options, const Outputs<O, S, A>& outputs,
             const ChunkResiduals<A>& residuals, LayerScratch& scratch) {
  detail::layer_forward(dims, inputs, options, layer_options, outputs, residuals,
                        detail::all_key_heads(dims), scratch, detail::ParallelBlocks{},
                        [&](const auto& row, const auto& source, const auto& states) {
                          detail::layer_recurrence<A>(layer_options, row, source, states, outputs.o,
                                                      residuals, scratch.threads());
                        });
}

template <Storage S, Storage P, Accumulator A, Storage O>
void forward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
             const LayerOptions& layer_options, const Outputs<O, S, A>& outputs,
             const ChunkResiduals<A>& residuals, KeyHeads key_heads, LayerScratch& scratch) {
  detail::layer_forward(
      dims, inputs, options, layer_options, outputs, residuals, key_heads, scratch,
      detail::SerialBlocks{}, [&](const auto& row, const auto& source, const auto& states) {
        for (std::int64_t i = 0; i < key_heads.count; ++i) {
          detail::layer_recurrence_slice<A>(layer_options, row, source,
                                            HeadSlice::of_key_head(dims, key_heads.first + i),
                                            states, outputs.o, residuals, scratch.row());
        }
      });
}

template <Storage S, Storage P, Accumulator A>
void states(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
            const LayerOptions& layer_options, const StatesOutputs<S, A>& outputs,
            const ChunkResiduals<A>& residuals, LayerScratch& scratch) {
  constexpr std::string_view where = "gdn::states";
  check_inputs(where, dims, inputs, options);
  check_outputs(where, dims, outputs);
  layer_options.validate(where);
  require(residuals.chunk_states.is_null(), where, "residuals.chunk_states", "given",
          "must be null: they are what is saved here");
  const KeyHeads all = detail::all_key_heads(dims);
  const detail::LayerRow<A> row(dims, inputs, options, layer_options.chunks, scratch.row());
  detail::check_residuals(where, dims, row.plan, residuals);
  detail::check_recurrence(where, layer_options, residuals);
  row.compute_gates(inputs, options, detail::value_heads_of(dims, all), scratch.row(),
                    detail::ParallelBlocks{});
  if (!outputs.m.is_null()) {
    const ConvSource<S, P, A> source(dims, row.segments, inputs, options.conv_output,
                                     SourceRows::keys);
    const detail::Slices slices(detail::transition_dims(dims),
                                oneapi::tbb::this_task_arena::max_concurrency());
    scratch.threads().run(slices.count(), [&](std::int64_t task, Workspace& workspace) {
      detail::transition_slice(row.recurrence, source, slices.at(task), ConstMatrixView<A>(),
                               outputs.m, workspace);
    });
  }
  if (!outputs.final_recurrent_state.is_null() || !residuals.t_inv.is_null()) {
    detail::layer_recurrence<A>(
        layer_options, row.recurrence,
        ConvSource<S, P, A>(dims, row.segments, inputs, options.conv_output),
        {.initial = inputs.recurrent_state, .final = outputs.final_recurrent_state},
        MatrixView<A>(), residuals, scratch.threads());
  }
  detail::write_final_window(dims, row.segments, inputs, all, outputs.final_conv_state);
}

template <Storage S, Storage P, Accumulator A, Storage G>
void backward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
              const LayerOptions& layer_options, const ChunkResiduals<const A>& residuals,
              const OutputCotangents<G, A>& given, const Cotangents<A>& wanted,
              LayerScratch& scratch) {
  detail::layer_backward(dims, inputs, options, layer_options, residuals, given, wanted,
                         detail::all_key_heads(dims), scratch, detail::ParallelBlocks{},
                         [&](const auto& row, const auto& port, const auto& cotangents) {
                           detail::backward_row<A>(row, port, inputs.recurrent_state, residuals,
                                                   cotangents, scratch.threads());
                         });
}

template <Storage S, Storage P, Accumulator A, Storage G>
void backward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
              const LayerOptions& layer_options, const ChunkResiduals<const A>& residuals,
              const OutputCotangents<G, A>& given, const Cotangents<A>& wanted, KeyHeads key_heads,
              LayerScratch& scratch) {
  detail::layer_backward(
      dims, inputs, options, layer_options, residuals, given, wanted, key_heads, scratch,
      detail::SerialBlocks{}, [&](const auto& row, const auto& port, const auto& cotangents) {
        for (std::int64_t i = 0; i < key_heads.count; ++i) {
          detail::backward_slice<A>(row, port, HeadSlice::of_key_head(dims, key_heads.first + i),
                                    inputs.recurrent_state, residuals, cotangents, scratch.row());
        }
      });
}

}  // namespace heddle::gdn

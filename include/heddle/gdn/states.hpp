#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#include <oneapi/tbb/task_arena.h>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/chunk.hpp"
#include "heddle/gdn/chunk_plan.hpp"
#include "heddle/gdn/chunked.hpp"
#include "heddle/gdn/detail/row_forward.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"
#include "heddle/gdn/workspaces.hpp"

namespace heddle::gdn {

namespace detail {

/// The columns of m that a task computes: as a state of key_dim columns that starts as the identity.
[[nodiscard]] inline Dims transition_dims(const Dims& dims) {
  Dims square = dims;
  square.value_dim = dims.key_dim;
  return square;
}

/// A slice of m holds no rows of v.
[[nodiscard]] inline ChunkExtents transition_extents(const Dims& dims, std::int64_t longest,
                                                     const HeadSlice& slice) {
  return {longest, dims.key_dim, slice.columns, 0};
}

template <Accumulator A, class Source>
[[nodiscard]] std::size_t transition_slice_bytes(const Dims& dims, std::int64_t longest,
                                                 const Source& source, const HeadSlice& slice) {
  ScratchCounter counter;
  const Chunk<A> chunk(transition_extents(dims, longest, slice), counter);
  const SliceStates<A> states(slice.value_heads, dims.key_dim, slice.columns, counter);
  return counter.bytes() + source.workspace_bytes(slice, longest);
}

/// Columns of m of one slice of transition_dims.
template <Accumulator A, class Source>
void transition_slice(const RecurrenceRow<A>& row, const Source& source, const HeadSlice& slice,
                      ConstMatrixView<A> t_inv, MatrixView<A> m, Workspace& workspace) {
  const Dims square = transition_dims(row.dims);
  const auto part = [&](std::int64_t member) { return state_of(square, m, slice, member); };
  for (std::int64_t member = 0; member < slice.value_heads; ++member) {
    clear_rows(part(member));
  }
  if (row.plan.last_start() >= 0) {
    return;  // a start cuts the row in two: nothing reaches its end
  }
  const Workspace::Frame frame(workspace);
  auto cursor = source.begin(slice, row.plan.longest(), workspace);
  Chunk<A> chunk(transition_extents(row.dims, row.plan.longest(), slice), workspace);
  SliceStates<A> states(slice.value_heads, row.dims.key_dim, slice.columns, workspace);
  for (std::int64_t member = 0; member < slice.value_heads; ++member) {
    states[member].load(part(member));
    for (std::int64_t column = 0; column < slice.columns; ++column) {
      states[member].values(slice.first_column + column, column) = A(1);
    }
  }
  // Products of decays pass through subnormal numbers on their way to 0; below this bound m is 0 to
  // the last bit of whatever it is multiplied by.
  const A least = static_cast<A>(row.dims.key_dim) * std::numeric_limits<A>::min();
  bool any = true;
  for (std::int64_t index = 0; index < row.plan.count() && any; ++index) {
    chunk.open(row, cursor, row.plan.at(index), Wanted::transition);
    any = false;
    for (std::int64_t member = 0; member < slice.value_heads; ++member) {
      ChunkState<A>& state = states[member];
      if (state.zero) {
        continue;
      }
      const std::int64_t head = slice.first_value_head + member;
      chunk.gate(row, head);
      chunk.triangles(kept_inverse(row.plan, row.dims, t_inv, index, head), false);
      chunk.residuals(state, 0, false);
      chunk.deltas();
      chunk.advance(state);
      const A largest = current_chunk_math<A>().largest(state.values.data(), state.values.stride(),
                                                        state.values.rows(), state.values.cols());
      state.zero = largest < least;
      any = any || !state.zero;
    }
  }
  for (std::int64_t member = 0; member < slice.value_heads; ++member) {
    states[member].store(part(member));
  }
}

}  // namespace detail

/// The states after a row without its output: chunked_forward with the output's part left out.
///
/// shapes    see ChunkedInputs, ChunkResiduals; q is not read
/// writes    all of final_state; residuals.t_inv where it is given
/// alias     final_state may be the view of the initial state
/// specials  chunks before the one of the last start are skipped but for their inverses, where these
///           are kept: the final state does not know of them
/// order     final state and t_inv equal in bits to those of chunked_forward
/// memory    chunked_workspace_bytes for each thread at work
/// cost      chunked_states_cost
/// throws    Error as chunked_forward; chunk_states given
/// source    spec/gdn.md 8.2
template <Storage S, Accumulator A>
void chunked_states(const Dims& dims, const ChunkedInputs<S, A>& inputs, const Options& options,
                    const ChunkOptions& chunk_options, MatrixView<A> final_state,
                    MatrixView<A> t_inv, Workspaces& workspaces) {
  constexpr std::string_view where = "gdn::chunked_states";
  detail::check_chunked(where, dims, inputs, options, chunk_options);
  const Segments segments(inputs.segment_ids, options.initial_segment);
  const ChunkPlan plan(segments, chunk_options);
  detail::require_recurrent_shape(where, "final_state", final_state, dims);
  require(!final_state.is_null(), where, "final_state", nullptr, "required");
  const ChunkResiduals<A> kept{.t_inv = t_inv};
  detail::check_residuals(where, dims, plan, kept);
  detail::forward_row<A>(detail::recurrence_row(dims, segments, plan, options, inputs),
                         ArrayPort<S, A>(dims, segments, inputs.y),
                         {.initial = inputs.recurrent_state, .final = final_state}, MatrixView<A>(),
                         kept, workspaces);
}

/// What a row does to the state before it: final state = m * initial state + what its tokens write, a
/// running product over chunks in which no chunk's own transition is formed.
///   m <- glast m - (diag(gout) K)^T X diag(beta gin) K m
/// shapes    m [state_rows, key_dim], a value head's [key_dim, key_dim] at state_row(head); t_inv as
///           in ChunkResiduals, from chunked_states or chunked_forward, or null: computed again.
///           inputs.y: only k is read
/// writes    all of m: exactly 0 where a document starts in the row, the identity without any token
/// specials  a head is left alone once max |m| < key_dim * the smallest normal number: its m is 0
/// order     the same bits for any number of threads
/// memory    transitions_workspace_bytes for each thread at work
/// cost      transitions_cost; nothing where a document starts
/// throws    Error as chunked_forward
/// source    spec/gdn.md 8.1, 8.2
template <Storage S, Accumulator A>
void transitions(const Dims& dims, const ChunkedInputs<S, A>& inputs, const Options& options,
                 const ChunkOptions& chunk_options, ConstMatrixView<A> t_inv, MatrixView<A> m,
                 Workspaces& workspaces) {
  constexpr std::string_view where = "gdn::transitions";
  detail::check_chunked(where, dims, inputs, options, chunk_options);
  const Segments segments(inputs.segment_ids, options.initial_segment);
  const ChunkPlan plan(segments, chunk_options);
  detail::check_residuals(where, dims, plan, ChunkResiduals<const A>{.t_inv = t_inv});
  require_shape(where, "m", m, "value_heads * key_dim", dims.state_rows(), "dims.key_dim",
                dims.key_dim);
  const RecurrenceRow<A> row = detail::recurrence_row(dims, segments, plan, options, inputs);
  const ArrayPort<S, A> source(dims, segments, inputs.y);
  const detail::Slices slices(detail::transition_dims(dims),
                              oneapi::tbb::this_task_arena::max_concurrency());
  workspaces.run(slices.count(), [&](std::int64_t task, Workspace& workspace) {
    detail::transition_slice(row, source, slices.at(task), t_inv, m, workspace);
  });
}

/// Workspace of transitions for each thread at most.
template <Accumulator A>
[[nodiscard]] std::size_t transitions_workspace_bytes(const Dims& dims,
                                                      const ChunkOptions& chunk_options) {
  const Segments none({}, 0);
  return detail::transition_slice_bytes<A>(
      dims, std::min(chunk_options.chunk, dims.tokens), ArrayPort<A, A>(dims, none, {}),
      HeadSlice::of_key_head(detail::transition_dims(dims), 0));
}

}  // namespace heddle::gdn

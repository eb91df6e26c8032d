#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/chunk.hpp"
#include "heddle/gdn/chunk_plan.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"

namespace heddle::gdn {

/// What a chunked forward may keep for its backward. Row chunk * value_heads + head of each array belongs
/// to that chunk of the plan and that head.
///
/// shapes    t_inv [chunks * value_heads, chunk^2]: a chunk of n tokens uses the first n rows of its
///           [chunk, chunk], of which columns below n are written; chunk_states [chunks * value_heads,
///           key_dim * value_dim]: the state before the chunk
/// specials  null: not kept, and computed again. t_inv depends on k, beta, g and segments alone. The
///           states before chunks that begin with a document's start are neither written nor read, nor
///           is that before the first chunk where no initial state is given
/// T is the accumulation type, const for a backward that reads them.
template <class T>
struct ChunkResiduals {
  MatrixView<T> t_inv{};
  MatrixView<T> chunk_states{};
};

/// A row's recurrent state going in (null: zeros) and coming out (null: not wanted), [state_rows,
/// value_dim]; they may be one view.
template <Accumulator A>
struct StatesInOut {
  ConstMatrixView<A> initial{};
  MatrixView<A> final{};
};

namespace detail {

/// The rows and columns of a [state_rows, value_dim] array that are a slice's value head.
template <class T>
[[nodiscard]] MatrixView<T> state_of(const Dims& dims, MatrixView<T> states, const HeadSlice& slice,
                                     std::int64_t member) {
  if (states.is_null()) {
    return {};
  }
  return states.row_block(dims.state_row(slice.first_value_head + member), dims.key_dim)
      .column_block(slice.first_column, slice.columns);
}

/// The inverse of a chunk of n tokens in an array of them.
template <class T>
[[nodiscard]] MatrixView<T> kept_inverse(const ChunkPlan& plan, const Dims& dims,
                                         MatrixView<T> t_inv, std::int64_t chunk,
                                         std::int64_t value_head) {
  if (t_inv.is_null()) {
    return {};
  }
  const std::int64_t n = plan.at(chunk).count;
  return {&t_inv(chunk * dims.value_heads + value_head, 0), n, n, plan.chunk()};
}

/// The part of the state before a chunk, in an array of them, that a slice computes.
template <class T>
[[nodiscard]] MatrixView<T> kept_state(const Dims& dims, MatrixView<T> states, std::int64_t chunk,
                                       const HeadSlice& slice, std::int64_t member) {
  if (states.is_null()) {
    return {};
  }
  T* const first = &states(chunk * dims.value_heads + slice.first_value_head + member, 0);
  return {first + slice.first_column, dims.key_dim, slice.columns, dims.value_dim};
}

/// Whether a slice is the one of those of its value heads that writes what they all know.
[[nodiscard]] inline bool writes_shared(const HeadSlice& slice) {
  return slice.first_column == 0;
}

template <Accumulator A, class Memory>
[[nodiscard]] ChunkState<A> take_state(Memory& memory, std::int64_t key_dim, std::int64_t columns) {
  return {take_tile<A>(memory, key_dim, columns), true};
}

/// The states of a slice's value heads.
template <Accumulator A>
class SliceStates {
 public:
  template <class Memory>
  SliceStates(std::int64_t heads, std::int64_t key_dim, std::int64_t columns, Memory& memory)
      : states_(memory.template take<ChunkState<A>>(heads)) {
    for (std::int64_t i = 0; i < heads; ++i) {
      const ChunkState<A> state = take_state<A>(memory, key_dim, columns);
      if (!states_.empty()) {
        states_[static_cast<std::size_t>(i)] = state;
      }
    }
  }
  [[nodiscard]] ChunkState<A>& operator[](std::int64_t member) {
    return states_[static_cast<std::size_t>(member)];
  }

 private:
  std::span<ChunkState<A>> states_;
};

/// Where one pass over chunks gets inverses from and what it keeps.
template <Accumulator A>
struct ChunkTraffic {
  ConstMatrixView<A> t_inv_in{};  ///< null: compute them
  MatrixView<A> t_inv_out{};      ///< null: not kept
  bool advance = true;            ///< false: only inverses are wanted of this chunk
};

/// A chunk for all value heads of a slice: on_output(member, o) where the output is wanted.
template <Accumulator A, class Cursor, class OnOutput>
void forward_chunk(const RecurrenceRow<A>& row, Chunk<A>& chunk, Cursor& cursor,
                   const HeadSlice& slice, std::int64_t index, Wanted wanted,
                   const ChunkTraffic<A>& traffic, SliceStates<A>& states,
                   const OnOutput& on_output) {
  const bool output = wanted == Wanted::output;
  chunk.open(row, cursor, row.plan.at(index), wanted);
  for (std::int64_t member = 0; member < slice.value_heads; ++member) {
    const std::int64_t head = slice.first_value_head + member;
    chunk.gate(row, head);
    chunk.triangles(kept_inverse(row.plan, row.dims, traffic.t_inv_in, index, head), output);
    if (!traffic.t_inv_out.is_null() && writes_shared(slice)) {
      store_rows<A, A>(chunk.inverse(),
                       kept_inverse(row.plan, row.dims, traffic.t_inv_out, index, head));
    }
    if (!traffic.advance) {
      continue;
    }
    ChunkState<A>& state = states[member];
    chunk.residuals(state, member, output);
    chunk.deltas();
    if (output) {
      on_output(member, chunk.output());
    }
    chunk.advance(state);
  }
}

/// Scratch of forward_slice, the source's included.
template <Accumulator A, class Source>
[[nodiscard]] std::size_t forward_slice_bytes(const Dims& dims, std::int64_t longest,
                                              const Source& source, const HeadSlice& slice) {
  ScratchCounter counter;
  const Chunk<A> chunk(ChunkExtents::of(dims, longest, slice), counter);
  const SliceStates<A> states(slice.value_heads, dims.key_dim, slice.columns, counter);
  return counter.bytes() + source.workspace_bytes(slice, longest);
}

/// The forward of one slice over the row; o null: states alone, equal in bits. t_inv: the row's inverses
/// where an earlier pass has kept them, null: computed.
template <Accumulator A, class Source, Storage O>
void forward_slice(const RecurrenceRow<A>& row, const Source& source, const HeadSlice& slice,
                   const StatesInOut<A>& recurrent, MatrixView<O> o, const ChunkResiduals<A>& kept,
                   Workspace& workspace, std::type_identity_t<ConstMatrixView<A>> t_inv = {}) {
  const Dims& dims = row.dims;
  const ChunkPlan& plan = row.plan;
  const Workspace::Frame frame(workspace);
  auto cursor = source.begin(slice, plan.longest(), workspace);
  Chunk<A> chunk(ChunkExtents::of(dims, plan.longest(), slice), workspace);
  SliceStates<A> states(slice.value_heads, dims.key_dim, slice.columns, workspace);

  const bool output = !o.is_null();
  const auto columns_of = [&](std::int64_t member) {
    return o.column_block((slice.first_value_head + member) * dims.value_dim + slice.first_column,
                          slice.columns);
  };
  // Without output, nothing before the last start is worth computing but inverses.
  const std::int64_t first_needed = output ? 0 : std::max<std::int64_t>(plan.last_start(), 0);
  for (std::int64_t member = 0; member < slice.value_heads; ++member) {
    if (first_needed == 0) {
      states[member].load(state_of(dims, recurrent.initial, slice, member));
    }
    if (output) {
      for_runs(row.segments, {0, row.segments.tokens()}, [&](TokenRange run, bool valid) {
        if (!valid) {
          clear_rows(columns_of(member).row_block(run.first, run.count));
        }
      });
    }
  }
  const bool inverses = !kept.t_inv.is_null() && writes_shared(slice);
  for (std::int64_t index = inverses ? 0 : first_needed; index < plan.count(); ++index) {
    const TokenRange range = plan.at(index);
    if (!kept.chunk_states.is_null() && !row.segments.starts(range.first) && !states[0].zero) {
      for (std::int64_t member = 0; member < slice.value_heads; ++member) {
        states[member].store(kept_state(dims, kept.chunk_states, index, slice, member));
      }
    }
    forward_chunk(row, chunk, cursor, slice, index, output ? Wanted::output : Wanted::states,
                  {.t_inv_in = t_inv, .t_inv_out = kept.t_inv, .advance = index >= first_needed},
                  states, [&](std::int64_t member, ConstMatrixView<A> values) {
                    const MatrixView<O> to = columns_of(member);
                    for_runs(row.segments, range, [&](TokenRange run, bool valid) {
                      if (valid) {
                        store_rows<O, A>(values.row_block(run.first - range.first, run.count),
                                         to.row_block(run.first, run.count));
                      }
                    });
                  });
  }
  if (!recurrent.final.is_null()) {
    for (std::int64_t member = 0; member < slice.value_heads; ++member) {
      states[member].store(state_of(dims, recurrent.final, slice, member));
    }
  }
}

}  // namespace detail
}  // namespace heddle::gdn

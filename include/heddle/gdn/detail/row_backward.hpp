#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "heddle/core/factor.hpp"
#include "heddle/core/packed_matrix.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/chunk.hpp"
#include "heddle/gdn/chunk_backward.hpp"
#include "heddle/gdn/chunk_plan.hpp"
#include "heddle/gdn/detail/row_forward.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"

namespace heddle::gdn::detail {

/// The states before each chunk of a slice, in descending order of chunks: read where the forward kept
/// them, else replayed from checkpoints at every sqrt(chunks)-th one, by the forward's own steps.
template <Accumulator A>
class StatesBefore {
 public:
  /// Chunks from one checkpoint to the next.
  [[nodiscard]] static std::int64_t block_length(std::int64_t chunks) {
    return static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(chunks))));
  }

  template <class Memory>
  StatesBefore(const Dims& dims, const HeadSlice& slice, std::int64_t chunks, bool kept,
               Memory& memory)
      : slice_(slice),
        elements_(dims.key_dim * slice.columns),
        length_(kept ? 1 : block_length(chunks)),
        running_(kept ? 0 : slice.value_heads, dims.key_dim, slice.columns, memory) {
    if (!kept && chunks > 0) {
      const std::int64_t blocks = (chunks + length_ - 1) / length_;
      checkpoints_ = memory.template take<A>(blocks * slice.value_heads * elements_);
      block_ = memory.template take<A>(length_ * slice.value_heads * elements_);
    }
  }

  /// The first pass of a replay: checkpoints, and the states of the last block.
  template <class Cursor>
  void prepare(const RecurrenceRow<A>& row, Chunk<A>& chunk, Cursor& cursor,
               ConstMatrixView<A> initial, const ChunkResiduals<const A>& kept) {
    initial_ = initial;
    kept_ = kept;
    if (!kept.chunk_states.is_null()) {
      return;
    }
    for (std::int64_t member = 0; member < slice_.value_heads; ++member) {
      running_[member].load(state_of(row.dims, initial, slice_, member));
    }
    for (std::int64_t first = 0; first < row.plan.count(); first += length_) {
      for (std::int64_t member = 0; member < slice_.value_heads; ++member) {
        running_[member].store(stored(row.dims, checkpoints_, first / length_, member));
      }
      replay_block(row, chunk, cursor, first);
    }
  }

  /// The state before a chunk.
  template <class Cursor>
  void load(const RecurrenceRow<A>& row, Chunk<A>& chunk, Cursor& cursor, std::int64_t index) {
    if (kept_.chunk_states.is_null() && index < first_) {
      const std::int64_t first = index / length_ * length_;
      for (std::int64_t member = 0; member < slice_.value_heads; ++member) {
        running_[member].load(stored(row.dims, checkpoints_, first / length_, member));
        running_[member].zero = first == 0 && initial_.is_null();
      }
      replay_block(row, chunk, cursor, first);
    }
  }

  void copy(const RecurrenceRow<A>& row, std::int64_t index, std::int64_t member,
            ChunkState<A>& state) const {
    const bool none =
        (index == 0 && initial_.is_null()) || row.segments.starts(row.plan.at(index).first);
    if (none) {
      state.zero = true;
    } else if (index == 0) {
      state.load(state_of(row.dims, initial_, slice_, member));
    } else if (kept_.chunk_states.is_null()) {
      state.load(stored(row.dims, block_, index - first_, member));
    } else {
      state.load(kept_state(row.dims, kept_.chunk_states, index, slice_, member));
    }
  }

 private:
  [[nodiscard]] MatrixView<A> stored(const Dims& dims, std::span<A> states, std::int64_t index,
                                     std::int64_t member) const {
    return {states.data() + (index * slice_.value_heads + member) * elements_, dims.key_dim,
            slice_.columns};
  }

  /// Runs the chunks of a block from the state in running_, and keeps the state before each.
  template <class Cursor>
  void replay_block(const RecurrenceRow<A>& row, Chunk<A>& chunk, Cursor& cursor,
                    std::int64_t first) {
    first_ = first;
    const std::int64_t end = std::min(first + length_, row.plan.count());
    for (std::int64_t index = first; index < end; ++index) {
      for (std::int64_t member = 0; member < slice_.value_heads; ++member) {
        running_[member].store(stored(row.dims, block_, index - first, member));
      }
      if (index + 1 < row.plan.count()) {  // nothing follows the last chunk
        forward_chunk(row, chunk, cursor, slice_, index, Wanted::states, {.t_inv_in = kept_.t_inv},
                      running_, [](std::int64_t, ConstMatrixView<A>) {});
      }
    }
  }

  HeadSlice slice_;
  std::int64_t elements_;
  std::int64_t length_;
  SliceStates<A> running_;
  std::span<A> checkpoints_;
  std::span<A> block_;
  ConstMatrixView<A> initial_;
  ChunkResiduals<const A> kept_;
  std::int64_t first_ = 0;  // of the block that is replayed
};

/// Scratch of backward_slice, the port's included.
template <Accumulator A, class Port>
[[nodiscard]] std::size_t backward_slice_bytes(const Dims& dims, std::int64_t longest,
                                               std::int64_t chunks, bool states_kept,
                                               const Port& port, const HeadSlice& slice) {
  ScratchCounter counter;
  const ChunkExtents extents = ChunkExtents::of(dims, longest, slice);
  const ChunkBackward<A> chunk(extents, counter);
  const StatesBefore<A> before(dims, slice, chunks, states_kept, counter);
  const SliceStates<A> d_states(slice.value_heads, dims.key_dim, slice.columns, counter);
  static_cast<void>(take_state<A>(counter, dims.key_dim, slice.columns));
  return counter.bytes() + port.workspace_bytes(slice, longest);
}

/// What comes into a row's backward and what leaves it besides the rows of q, k and v.
template <Storage G, Accumulator A>
struct RowCotangents {
  ConstMatrixView<G> d_o{};
  ConstMatrixView<A> d_final{};  ///< of the state after the row; null: zero
  MatrixView<A> d_initial{};     ///< of the state before it; null: not wanted
  MatrixView<A> d_g{};
  MatrixView<A> d_beta{};
};

/// The backward of one whole key head over the row.
template <Accumulator A, class Port, Storage G>
void backward_slice(const RecurrenceRow<A>& row, const Port& port, const HeadSlice& slice,
                    ConstMatrixView<A> initial, const ChunkResiduals<const A>& kept,
                    const RowCotangents<G, A>& cotangents, Workspace& workspace) {
  const Dims& dims = row.dims;
  const ChunkPlan& plan = row.plan;
  const Workspace::Frame frame(workspace);
  auto cursor = port.begin(slice, plan.longest(), workspace);
  ChunkBackward<A> chunk(ChunkExtents::of(dims, plan.longest(), slice), workspace);
  StatesBefore<A> before(dims, slice, plan.count(), !kept.chunk_states.is_null(), workspace);
  SliceStates<A> d_states(slice.value_heads, dims.key_dim, slice.columns, workspace);
  ChunkState<A> state = take_state<A>(workspace, dims.key_dim, slice.columns);

  before.prepare(row, chunk.forward(), cursor, initial, kept);
  for (std::int64_t member = 0; member < slice.value_heads; ++member) {
    d_states[member].load(state_of(dims, cotangents.d_final, slice, member));
    for (std::int64_t t = 0; t < dims.tokens; ++t) {
      if (!row.segments.valid(t)) {
        cotangents.d_g(t, slice.first_value_head + member) = A(0);
        cotangents.d_beta(t, slice.first_value_head + member) = A(0);
      }
    }
  }
  for (std::int64_t index = plan.count() - 1; index >= 0; --index) {
    before.load(row, chunk.forward(), cursor, index);
    chunk.open(row, cursor, plan.at(index));
    for (std::int64_t member = 0; member < slice.value_heads; ++member) {
      const std::int64_t head = slice.first_value_head + member;
      before.copy(row, index, member, state);
      chunk.value_head(row, head, member, kept_inverse(plan, dims, kept.t_inv, index, head), state,
                       cotangents.d_o.column_block(head * dims.value_dim, dims.value_dim),
                       d_states[member], cotangents.d_g.column_block(head, 1),
                       cotangents.d_beta.column_block(head, 1));
    }
    cursor.store(plan.at(index), chunk.close(row));
  }
  cursor.finish();
  if (!cotangents.d_initial.is_null()) {
    for (std::int64_t member = 0; member < slice.value_heads; ++member) {
      d_states[member].store(state_of(dims, cotangents.d_initial, slice, member));
    }
  }
}

}  // namespace heddle::gdn::detail

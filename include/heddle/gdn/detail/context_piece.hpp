#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <oneapi/tbb/task_arena.h>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/chunk.hpp"
#include "heddle/gdn/chunk_backward.hpp"
#include "heddle/gdn/chunked.hpp"
#include "heddle/gdn/context_pieces.hpp"
#include "heddle/gdn/conv_port.hpp"
#include "heddle/gdn/detail/layer_row.hpp"
#include "heddle/gdn/detail/row_forward.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/states.hpp"
#include "heddle/gdn/tile.hpp"
#include "heddle/gdn/workspaces.hpp"

namespace heddle::gdn::detail {

/// Scratch of cotangent_slice, the source's included.
template <Accumulator A, class Source>
[[nodiscard]] std::size_t cotangent_slice_bytes(const Dims& dims, std::int64_t longest,
                                                const Source& source, const HeadSlice& slice) {
  ScratchCounter counter;
  const ChunkBackward<A> chunk(ChunkExtents::of(dims, longest, slice), counter);
  const SliceStates<A> d_states(slice.value_heads, dims.key_dim, slice.columns, counter);
  return counter.bytes() + source.workspace_bytes(slice, longest);
}

/// The cotangent of the state before a row alone, of one slice: backward_slice with all else left out.
/// What lies behind the first start of a document is skipped: it knows nothing of that state.
template <Accumulator A, class Source, Storage G>
void cotangent_slice(const RecurrenceRow<A>& row, const Source& source, const HeadSlice& slice,
                     ConstMatrixView<A> t_inv, ConstMatrixView<G> d_o, ConstMatrixView<A> d_final,
                     MatrixView<A> d_initial, Workspace& workspace) {
  const Dims& dims = row.dims;
  const ChunkPlan& plan = row.plan;
  const Workspace::Frame frame(workspace);
  auto cursor = source.begin(slice, plan.longest(), workspace);
  ChunkBackward<A> chunk(ChunkExtents::of(dims, plan.longest(), slice), workspace);
  SliceStates<A> d_states(slice.value_heads, dims.key_dim, slice.columns, workspace);
  std::int64_t last = plan.count() - 1;
  if (plan.first_start() < plan.count()) {
    const std::int64_t start = plan.first_start();
    last = row.segments.starts(plan.at(start).first) ? start - 1 : start;
  } else {
    for (std::int64_t member = 0; member < slice.value_heads; ++member) {
      d_states[member].load(state_of(dims, d_final, slice, member));
    }
  }
  for (std::int64_t index = last; index >= 0; --index) {
    chunk.open_for_state(row, cursor, plan.at(index));
    for (std::int64_t member = 0; member < slice.value_heads; ++member) {
      const std::int64_t head = slice.first_value_head + member;
      chunk.state_alone(row, head, kept_inverse(plan, dims, t_inv, index, head),
                        d_o.column_block(head * dims.value_dim + slice.first_column, slice.columns),
                        d_states[member]);
    }
  }
  for (std::int64_t member = 0; member < slice.value_heads; ++member) {
    d_states[member].store(state_of(dims, d_initial, slice, member));
  }
}

[[nodiscard]] inline Dims dims_of_piece(Dims dims, const ContextPieces& pieces) {
  dims.tokens = pieces.length();
  return dims;
}

/// One piece of a row with what both of its passes need: the inputs' rows, the positions before them,
/// gates and chunks.
template <Storage S, Storage P, Accumulator A>
class ContextPiece {
 public:
  /// inputs: of the shard; window: of the piece, read where the pieces say that it is needed.
  ContextPiece(const ContextPieces& pieces, std::int64_t piece, const Dims& dims,
               const Inputs<S, P, A>& inputs, const Options& options,
               const ChunkOptions& chunk_options, ConstMatrixView<S> window, Workspace& workspace)
      : index_(piece),
        options_(with_initial_segment(options, pieces.initial_segment(piece))),
        halo_valid_(workspace.take<std::uint8_t>(piece == 0 ? 0 : dims.window_rows())),
        inputs_(rows_of(pieces, piece, inputs, window)),
        row_(dims_of_piece(dims, pieces), inputs_, options_, chunk_options, workspace) {
    pieces.fill_halo_valid(piece, halo_valid_);
  }
  ContextPiece(const ContextPiece&) = delete;
  ContextPiece& operator=(const ContextPiece&) = delete;
  ~ContextPiece() = default;

  [[nodiscard]] static std::size_t workspace_bytes(const Dims& dims, const ContextPieces& pieces) {
    return Workspace::bytes_for<std::uint8_t>(dims.window_rows()) +
           LayerRow<A>::workspace_bytes(dims_of_piece(dims, pieces));
  }

  [[nodiscard]] std::int64_t index() const { return index_; }
  [[nodiscard]] const LayerRow<A>& row() const { return row_; }
  [[nodiscard]] const Dims& dims() const { return row_.recurrence.dims; }
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] const Inputs<S, P, A>& inputs() const { return inputs_; }
  [[nodiscard]] std::span<const std::uint8_t> halo_valid() const { return halo_valid_; }
  [[nodiscard]] ValueHeads value_heads() const { return {0, row_.recurrence.dims.value_heads}; }

  void compute_gates(Workspace& workspace) const {
    row_.compute_gates(inputs_, options_, value_heads(), workspace, ParallelBlocks{});
  }

  [[nodiscard]] ConvSource<S, P, A> source(SourceRows rows = SourceRows::all) const {
    return {dims(), row_.segments, inputs_, options_.conv_output, rows, halo_valid_};
  }

  /// The states pass: `final` from `initial`, inverses kept where t_inv is given.
  void states(ConstMatrixView<A> initial, MatrixView<A> final, MatrixView<A> t_inv,
              Workspaces& threads) const {
    forward_row<A>(row_.recurrence, source(), {.initial = initial, .final = final}, MatrixView<A>(),
                   {.t_inv = t_inv}, threads);
  }

  void transition(ConstMatrixView<A> t_inv, MatrixView<A> m, Workspaces& threads) const {
    const ConvSource<S, P, A> keys = source(SourceRows::keys);
    const Slices slices(transition_dims(dims()), oneapi::tbb::this_task_arena::max_concurrency());
    threads.run(slices.count(), [&](std::int64_t task, Workspace& workspace) {
      transition_slice(row_.recurrence, keys, slices.at(task), t_inv, m, workspace);
    });
  }

  template <Storage G>
  void state_cotangent(ConstMatrixView<A> t_inv, ConstMatrixView<G> d_o, ConstMatrixView<A> d_final,
                       MatrixView<A> d_initial, Workspaces& threads) const {
    const ConvSource<S, P, A> rows = source();
    const Slices slices(dims(), oneapi::tbb::this_task_arena::max_concurrency());
    threads.run(slices.count(), [&](std::int64_t task, Workspace& workspace) {
      cotangent_slice(row_.recurrence, rows, slices.at(task), t_inv, d_o, d_final, d_initial,
                      workspace);
    });
  }

 private:
  [[nodiscard]] static Options with_initial_segment(Options options, std::int32_t segment) {
    options.initial_segment = segment;
    return options;
  }

  [[nodiscard]] static Inputs<S, P, A> rows_of(const ContextPieces& pieces, std::int64_t piece,
                                               const Inputs<S, P, A>& shard,
                                               ConstMatrixView<S> window) {
    const std::int64_t first = pieces.place(piece) * pieces.length();
    Inputs<S, P, A> rows = shard;
    rows.qkv = shard.qkv.row_block(first, pieces.length());
    rows.a = shard.a.row_block(first, pieces.length());
    rows.b = shard.b.row_block(first, pieces.length());
    rows.segment_ids = pieces.segment_ids(piece);
    if (piece > 0) {
      rows.conv_state = pieces.needs_window(piece) ? window : ConstMatrixView<S>();
      rows.recurrent_state = {};
    }
    return rows;
  }

  std::int64_t index_;
  Options options_;
  std::span<std::uint8_t> halo_valid_;  // of the first piece: none, its given state is all valid
  Inputs<S, P, A> inputs_;
  LayerRow<A> row_;
};

/// The pieces of a rank, by place, and the inverses kept of them. Their scratch lies in the order they
/// were made in. T is A, const where the inverses are read alone.
template <Storage S, Storage P, Accumulator A, class T>
class RankPieces {
 public:
  RankPieces(const ContextPieces& pieces, std::int64_t rank, const Dims& dims,
             const Inputs<S, P, A>& inputs, const Options& options,
             const ChunkOptions& chunk_options, ConstMatrixView<S> windows, MatrixView<T> t_inv,
             Workspace& workspace)
      : t_inv_(t_inv) {
    std::int64_t rows = 0;
    for (std::int64_t place = 0; place < pieces.per_rank(); ++place) {
      const ConstMatrixView<S> window =
          windows.row_block(place * dims.window_rows(), dims.window_rows());
      pieces_.push_back(std::make_unique<ContextPiece<S, P, A>>(
          pieces, pieces.at(rank, place), dims, inputs, options, chunk_options, window, workspace));
      first_row_.push_back(rows);
      rows += pieces_.back()->row().plan.count() * dims.value_heads;
    }
    first_row_.push_back(rows);
  }
  RankPieces(const RankPieces&) = delete;
  RankPieces& operator=(const RankPieces&) = delete;
  ~RankPieces() {
    while (!pieces_.empty()) {
      pieces_.pop_back();
    }
  }

  [[nodiscard]] const ContextPiece<S, P, A>& operator[](std::int64_t place) const {
    return *pieces_[static_cast<std::size_t>(place)];
  }
  /// The inverses of a piece, null where they are not kept.
  [[nodiscard]] MatrixView<T> t_inv(std::int64_t place) const {
    const auto at = static_cast<std::size_t>(place);
    return t_inv_.is_null() ? t_inv_
                            : t_inv_.row_block(first_row_[at], first_row_[at + 1] - first_row_[at]);
  }

 private:
  MatrixView<T> t_inv_;
  std::vector<std::unique_ptr<ContextPiece<S, P, A>>> pieces_;
  std::vector<std::int64_t> first_row_;  // of t_inv
};

}  // namespace heddle::gdn::detail

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <oneapi/tbb/task_arena.h>

#include "heddle/core/elementwise.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/chunk.hpp"
#include "heddle/gdn/chunk_plan.hpp"
#include "heddle/gdn/chunked.hpp"
#include "heddle/gdn/detail/chunk_math.hpp"
#include "heddle/gdn/detail/recurrence_rows.hpp"
#include "heddle/gdn/detail/row_forward.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"
#include "heddle/gdn/workspaces.hpp"

namespace heddle::gdn::detail {

/// A slice's value heads, token by token: rows come in tiles as for a chunk, the states lie in scratch
/// as panels of columns, each of which a first-level cache holds for the tokens of a tile.
template <Accumulator A>
class SliceRecurrence {
 public:
  static constexpr std::int64_t panel = state_panel_columns<A>;

  template <class Memory>
  SliceRecurrence(const Dims& dims, const HeadSlice& slice, std::int64_t most_tokens,
                  Memory& memory)
      : dims_(dims),
        slice_(slice),
        panels_((slice.columns + panel - 1) / panel),
        states_(memory.template take<A>(slice.value_heads * panels_ * panel_elements())),
        q_(take_tile<A>(memory, most_tokens, dims.key_dim)),
        k_(take_tile<A>(memory, most_tokens, dims.key_dim)),
        v_stride_(slice.value_columns()),
        v_(memory.template take<A>(most_tokens * v_stride_ + panel)),
        o_(memory.template take<A>(most_tokens * panels_ * panel)),
        decay_(memory.template take<A>(most_tokens)),
        gates_(memory.template take<RecurrenceGate<A>>(most_tokens)),
        scale_(memory.template take<A>(slice.value_heads)) {
    // A last panel that is not full reads values that are not its own: they stay in columns that
    // nobody reads, but they are to be numbers that somebody wrote.
    std::fill(v_.begin(), v_.end(), A(0));
  }

  /// The states before the row; null: zeros.
  void load_states(ConstMatrixView<A> initial) {
    std::fill(states_.begin(), states_.end(), A(0));
    std::fill(scale_.begin(), scale_.end(), A(1));
    for (std::int64_t member = 0; !initial.is_null() && member < slice_.value_heads; ++member) {
      for_panels(member, state_of(dims_, initial, slice_, member),
                 [](ConstMatrixView<A> from, MatrixView<A> to) { load_rows<A, A>(from, to); });
    }
  }
  void store_states(MatrixView<A> final) {
    for (std::int64_t member = 0; !final.is_null() && member < slice_.value_heads; ++member) {
      const A scale = scale_[static_cast<std::size_t>(member)];
      for_panels(member, state_of(dims_, final, slice_, member),
                 [scale](MatrixView<A> to, ConstMatrixView<A> from) {
                   for (std::int64_t i = 0; i < to.rows(); ++i) {
                     for (std::int64_t j = 0; j < to.cols(); ++j) {
                       to(i, j) = scale * from(i, j);
                     }
                   }
                 });
    }
  }

  /// The tokens of a range, any padding and starts among them: on_output(member, run, o) for each run
  /// of tokens without padding or a start in between, where the output is wanted.
  template <class Cursor, class OnOutput>
  void run(const RecurrenceRow<A>& row, const Cursor& cursor, TokenRange range, bool output,
           const OnOutput& on_output) {
    const MatrixView<A> q = output ? q_.row_block(0, range.count) : MatrixView<A>();
    const MatrixView<A> k = k_.row_block(0, range.count);
    cursor.load(range,
                {.q = q,
                 .k = k,
                 .v = MatrixView<A>(v_.data(), range.count, slice_.value_columns(), v_stride_)});
    normalise(row, A(1), k);
    if (output) {
      normalise(row, A(1) / std::sqrt(static_cast<A>(dims_.key_dim)), q);
    }
    for (std::int64_t member = 0; member < slice_.value_heads; ++member) {
      gather_gates(row, range, slice_.first_value_head + member);
      for_runs(row.segments, range, [&](TokenRange valid_run, bool valid) {
        for (std::int64_t first = valid_run.first; valid && first < valid_run.end();) {
          std::int64_t end = first + 1;
          while (end < valid_run.end() && !row.segments.starts(end)) {
            ++end;
          }
          const std::int64_t at = first - range.first;
          move(member, at, end - first, row.segments.starts(first), output);
          if (output) {
            on_output(member, TokenRange{first, end - first},
                      ConstMatrixView<A>(o_.data() + at * panels_ * panel, end - first,
                                         slice_.columns, panels_ * panel));
          }
          first = end;
        }
      });
    }
  }

 private:
  [[nodiscard]] std::int64_t panel_elements() const { return dims_.key_dim * panel; }
  [[nodiscard]] A* state_panel(std::int64_t member, std::int64_t index) const {
    return states_.data() + (member * panels_ + index) * panel_elements();
  }

  /// body(columns of the state, the same columns of their panel).
  template <class State, class Body>
  void for_panels(std::int64_t member, const State& state, const Body& body) const {
    for (std::int64_t index = 0; index < panels_; ++index) {
      const std::int64_t columns = std::min(panel, slice_.columns - index * panel);
      body(state.column_block(index * panel, columns),
           MatrixView<A>(state_panel(member, index), dims_.key_dim, columns, panel));
    }
  }

  static void normalise(const RecurrenceRow<A>& row, A scale, MatrixView<A> x) {
    current_chunk_math<A>().normalise_rows(row.norm, row.eps, scale, x.data(), x.stride(), x.rows(),
                                           x.cols(), x.data(), x.stride());
  }

  void gather_gates(const RecurrenceRow<A>& row, TokenRange range, std::int64_t head) {
    for (std::int64_t i = 0; i < range.count; ++i) {
      const std::int64_t t = range.first + i;
      const auto at = static_cast<std::size_t>(i);
      const bool valid = row.segments.valid(t);
      decay_[at] = valid && !row.segments.starts(t) ? row.g(t, head) : A(0);
    }
    transform_in_place(Elementwise::exp, decay_.first(static_cast<std::size_t>(range.count)));
    A scale = scale_[static_cast<std::size_t>(head - slice_.first_value_head)];
    for (std::int64_t i = 0; i < range.count; ++i) {
      const std::int64_t t = range.first + i;
      if (row.segments.valid(t)) {
        const auto at = static_cast<std::size_t>(i);
        scale = row.segments.starts(t) ? A(1) : scale;
        gates_[at] = RecurrenceGate<A>::of(row.beta(t, head), decay_[at], scale);
      }
    }
    scale_[static_cast<std::size_t>(head - slice_.first_value_head)] = scale;
  }

  void move(std::int64_t member, std::int64_t first, std::int64_t count, bool starts, bool output) {
    for (std::int64_t index = 0; index < panels_; ++index) {
      A* const state = state_panel(member, index);
      if (starts) {
        std::fill_n(state, panel_elements(), A(0));  // a selection: NaN does not survive it
      }
      recurrence_run(RecurrenceRun<A>{
          .state = state,
          .state_stride = panel,
          .key_dim = dims_.key_dim,
          .tokens = count,
          .q = &q_(first, 0),
          .k = &k_(first, 0),
          .qk_stride = k_.stride(),
          .v = v_.data() + first * v_stride_ + member * slice_.columns + index * panel,
          .v_stride = v_stride_,
          .o = output ? o_.data() + first * panels_ * panel + index * panel : nullptr,
          .o_stride = panels_ * panel,
          .gates = gates_.data() + first});
    }
  }

  Dims dims_;
  HeadSlice slice_;
  std::int64_t panels_;
  std::span<A> states_;
  MatrixView<A> q_;
  MatrixView<A> k_;
  std::int64_t v_stride_;
  std::span<A> v_;
  std::span<A> o_;
  std::span<A> decay_;
  std::span<RecurrenceGate<A>> gates_;
  std::span<A> scale_;  // of each value head's state
};

/// Scratch of recurrence_slice, the source's included.
template <Accumulator A, class Source>
[[nodiscard]] std::size_t recurrence_slice_bytes(const Dims& dims, std::int64_t longest,
                                                 const Source& source, const HeadSlice& slice) {
  ScratchCounter counter;
  const SliceRecurrence<A> recurrence(dims, slice, longest, counter);
  return counter.bytes() + source.workspace_bytes(slice, longest);
}

/// forward_slice without residuals, token by token.
///
/// order     the bits of an element depend on its document alone, on no cut of the row into ranges
template <Accumulator A, class Source, Storage O>
void recurrence_slice(const RecurrenceRow<A>& row, const Source& source, const HeadSlice& slice,
                      const StatesInOut<A>& recurrent, MatrixView<O> o, Workspace& workspace) {
  const Dims& dims = row.dims;
  const ChunkPlan& plan = row.plan;
  const Workspace::Frame frame(workspace);
  const auto cursor = source.begin(slice, plan.longest(), workspace);
  SliceRecurrence<A> recurrence(dims, slice, plan.longest(), workspace);
  const bool output = !o.is_null();
  const auto columns_of = [&](std::int64_t member) {
    return o.column_block((slice.first_value_head + member) * dims.value_dim + slice.first_column,
                          slice.columns);
  };
  for (std::int64_t member = 0; output && member < slice.value_heads; ++member) {
    for_runs(row.segments, {0, dims.tokens}, [&](TokenRange run, bool valid) {
      if (!valid) {
        clear_rows(columns_of(member).row_block(run.first, run.count));
      }
    });
  }
  // Without output, nothing before the last start is worth computing.
  const std::int64_t first_needed = output ? 0 : std::max<std::int64_t>(plan.last_start(), 0);
  recurrence.load_states(first_needed == 0 ? recurrent.initial : ConstMatrixView<A>());
  for (std::int64_t index = first_needed; index < plan.count(); ++index) {
    recurrence.run(row, cursor, plan.at(index), output,
                   [&](std::int64_t member, TokenRange run, ConstMatrixView<A> values) {
                     store_rows<O, A>(values, columns_of(member).row_block(run.first, run.count));
                   });
  }
  recurrence.store_states(recurrent.final);
}

/// recurrence_slice of every slice, in the caller's arena.
template <Accumulator A, class Source, Storage O>
void run_recurrence(const RecurrenceRow<A>& row, const Source& source, const StatesInOut<A>& states,
                    MatrixView<O> o, Workspaces& workspaces) {
  const Slices slices(row.dims, oneapi::tbb::this_task_arena::max_concurrency());
  workspaces.run(slices.count(), [&](std::int64_t task, Workspace& workspace) {
    recurrence_slice(row, source, slices.at(task), states, o, workspace);
  });
}

}  // namespace heddle::gdn::detail

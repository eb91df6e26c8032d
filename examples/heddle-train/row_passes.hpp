#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <oneapi/tbb/parallel_pipeline.h>
#include <oneapi/tbb/task_arena.h>

#include "heddle-train/model.hpp"
#include "heddle-train/model_head.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"

namespace heddle::train {

/// Rows that are computed at once, each with activations and a gradient of its own, kept from call to
/// call.
template <Storage S>
struct RowSlots {
  struct Slot {
    RowActivations<S> kept;
    std::vector<AccumulatorOf<S>> d_logps;
    std::vector<AccumulatorOf<S>> gradient;
  };
  std::vector<Slot> slots;
};

namespace detail {

/// Rows side by side, what they leave folded one after the other: compute(row, slot) leaves the row's own
/// gradient in the slot, or none.
template <Storage S, class Compute, class Fold>
void run_rows(std::int64_t count, RowSlots<S>& slots, std::span<AccumulatorOf<S>> gradient,
              const Compute& compute, const Fold& fold) {
  namespace tbb = oneapi::tbb;
  if (count == 0) {
    return;
  }
  const std::int64_t at_once =
      std::min<std::int64_t>(count, tbb::this_task_arena::max_concurrency());
  if (std::cmp_less(slots.slots.size(), at_once)) {
    slots.slots.resize(static_cast<std::size_t>(at_once));
  }
  // Rows enter and leave in order and at most `at_once` are inside, so no two share a slot.
  const auto slot_of = [&](std::int64_t row) ->
      typename RowSlots<S>::Slot& { return slots.slots[static_cast<std::size_t>(row % at_once)]; };

  std::int64_t next = 0;
  const auto enter = [&](tbb::flow_control& control) -> std::int64_t {
    if (next == count) {
      control.stop();
      return 0;
    }
    return next++;
  };
  const auto pass = [&](std::int64_t row) -> std::int64_t {
    compute(row, slot_of(row));
    return row;
  };
  const auto leave = [&](std::int64_t row) {
    const typename RowSlots<S>::Slot& slot = slot_of(row);
    constexpr std::int64_t grain = 1 << 15;
    parallel_blocks(static_cast<std::int64_t>(slot.gradient.size()), grain,
                    [&](std::int64_t first, std::int64_t last) {
                      for (std::int64_t i = first; i < last; ++i) {
                        gradient[static_cast<std::size_t>(i)] +=
                            slot.gradient[static_cast<std::size_t>(i)];
                      }
                    });
    fold(row, slot.kept);
  };
  tbb::parallel_pipeline(
      static_cast<std::size_t>(at_once),
      tbb::make_filter<void, std::int64_t>(tbb::filter_mode::serial_in_order, enter) &
          tbb::make_filter<std::int64_t, std::int64_t>(tbb::filter_mode::parallel, pass) &
          tbb::make_filter<std::int64_t, void>(tbb::filter_mode::serial_in_order, leave));
}

}  // namespace detail

/// Runs every row forward and, where `gradient` is wanted, backward: rows side by side, what they
/// leave folded one after the other.
///
///   for each row:  forward;  cotangent(row, kept, d_logps)        at once, in any order
///                  backward if cotangent returned true
///   in row order:  gradient += the row's;  fold(row, kept)
///
/// shapes    gradient [parameters], or empty; d_logps [T] of the row, token frame, zeroed before
/// writes    adds to gradient; each row's own gradient is summed from zero first
/// order     a sum over rows in row order, whatever the number of threads or of rows a call: rows in
///           several calls give the bits of one call
/// memory    one set of activations and one gradient for each row at work: as many as threads
/// throws    what a row that fails throws, when no other is at work any more
template <Storage S, class Cotangent, class Fold>
void pass_rows(const Model<S>& model, std::span<const RowInputs> rows, RowSlots<S>& slots,
               std::span<AccumulatorOf<S>> gradient, const Cotangent& cotangent, const Fold& fold) {
  using A = AccumulatorOf<S>;
  const auto compute = [&](std::int64_t row, typename RowSlots<S>::Slot& slot) {
    const RowInputs& inputs = rows[static_cast<std::size_t>(row)];
    model.forward(inputs, slot.kept);
    slot.d_logps.assign(inputs.token_ids.size(), A(0));
    const bool differentiate = cotangent(row, slot.kept, std::span<A>(slot.d_logps));
    if (gradient.empty() || !differentiate) {
      slot.gradient.clear();
    } else {
      slot.gradient.assign(gradient.size(), A(0));
      model.backward(inputs, slot.kept, slot.d_logps, slot.gradient);
    }
  };
  detail::run_rows<S>(static_cast<std::int64_t>(rows.size()), slots, gradient, compute, fold);
}

/// The same under a loss that is known token by token, so that the head's logits are computed once:
/// loss_of(row) is a head::TokenLoss over the row's token frame, fold(row, kept, loss) gets what it
/// summed up to.
template <Storage S, class LossOf, class Fold>
void pass_rows_with_loss(const Model<S>& model, std::span<const RowInputs> rows, RowSlots<S>& slots,
                         std::span<AccumulatorOf<S>> gradient, const LossOf& loss_of,
                         const Fold& fold) {
  using A = AccumulatorOf<S>;
  std::vector<double> losses(rows.size());
  const auto compute = [&](std::int64_t row, typename RowSlots<S>::Slot& slot) {
    slot.gradient.assign(gradient.size(), A(0));
    bool differentiated = false;
    losses[static_cast<std::size_t>(row)] =
        model.forward_backward(rows[static_cast<std::size_t>(row)], slot.kept, loss_of(row),
                               std::span<A>(slot.gradient), differentiated);
    if (!differentiated) {
      slot.gradient.clear();
    }
  };
  detail::run_rows<S>(static_cast<std::int64_t>(rows.size()), slots, gradient, compute,
                      [&](std::int64_t row, const RowActivations<S>& kept) {
                        fold(row, kept, losses[static_cast<std::size_t>(row)]);
                      });
}

}  // namespace heddle::train

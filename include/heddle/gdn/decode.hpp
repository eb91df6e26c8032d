#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/detail/decode_heads.hpp"
#include "heddle/gdn/detail/layer_row.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/gates.hpp"
#include "heddle/gdn/layer_options.hpp"
#include "heddle/gdn/segments.hpp"

namespace heddle::gdn {

/// One new token for each of several sequences, whose states lie in slots of a serving cache.
///
/// shapes    dims.tokens is the number of sequences; qkv [sequences, qkv_columns], a, b [sequences,
///           value_heads]; parameters as in Inputs; slots [sequences]; has_initial [sequences]
/// specials  slot 0 is nobody's: the sequence is a filler, none of its rows is read, its o is 0. Where
///           has_initial is 0 the token is its sequence's first: whatever the slot holds is not read
template <Storage S, Storage P = S, Accumulator A = AccumulatorOf<S>>
struct DecodeInputs {
  ConstMatrixView<S> qkv{};
  ConstMatrixView<P> conv_weight{};
  std::span<const P> conv_bias{};
  ConstMatrixView<S> a{};
  ConstMatrixView<S> b{};
  std::span<const A> A_log{};
  std::span<const A> dt_bias{};
  std::span<const std::int32_t> slots{};
  std::span<const std::uint8_t> has_initial{};
};

/// The states of all slots, updated in place.
///
/// shapes    conv [slots * (kernel - 1), qkv_columns], recurrent [slots * state_rows, value_dim], slot
///           after slot; a null conv where kernel = 1
template <Storage S, Accumulator A = AccumulatorOf<S>>
struct DecodeStates {
  MatrixView<S> conv{};
  MatrixView<A> recurrent{};
};

namespace detail {

template <Storage S, Storage P, Accumulator A, Storage O>
void check_decode_step(std::string_view where, const Dims& dims,
                       const DecodeInputs<S, P, A>& inputs, const Options& options,
                       const DecodeStates<S, A>& states, MatrixView<O> o) {
  // What a layer call checks: every token is one, so there is nothing to say of segments.
  const std::vector<std::int32_t> tokens(
      static_cast<std::size_t>(std::max<std::int64_t>(dims.tokens, 0)), 1);
  check_inputs(where, dims,
               Inputs<S, P, A>{.qkv = inputs.qkv,
                               .conv_weight = inputs.conv_weight,
                               .conv_bias = inputs.conv_bias,
                               .a = inputs.a,
                               .b = inputs.b,
                               .A_log = inputs.A_log,
                               .dt_bias = inputs.dt_bias,
                               .segment_ids = tokens},
               options);
  require_length(where, "slots", inputs.slots, "dims.tokens", dims.tokens);
  require_length(where, "has_initial", inputs.has_initial, "dims.tokens", dims.tokens);
  require_shape(where, "o", o, "dims.tokens", dims.tokens, "dims.output_columns()",
                dims.output_columns());
  const std::int64_t slots = states.recurrent.rows() / dims.state_rows();
  require_shape(where, "states.recurrent", states.recurrent, "slots * state_rows",
                slots * dims.state_rows(), "dims.value_dim", dims.value_dim);
  if (dims.window_rows() > 0) {
    require_shape(where, "states.conv", states.conv, "slots * (kernel - 1)",
                  slots * dims.window_rows(), "dims.qkv_columns()", dims.qkv_columns());
  }
  std::vector<bool> taken(static_cast<std::size_t>(slots), false);
  for (std::size_t i = 0; i < inputs.slots.size(); ++i) {
    const std::int32_t slot = inputs.slots[i];
    if (slot < 0 || slot >= std::max<std::int64_t>(slots, 1)) {
      fail(where, element_name("slots", i), slot, "must be in [0, " + std::to_string(slots) + ")");
    }
    if (slot > 0 && taken[static_cast<std::size_t>(slot)]) {
      fail(where, element_name("slots", i), slot, "must be of one sequence alone");
    }
    if (slot > 0) {
      taken[static_cast<std::size_t>(slot)] = true;
    }
  }
}

}  // namespace detail

/// Scratch of decode_step, and of decode but for the states that this carries.
template <Storage S, Storage P = S, Accumulator A = AccumulatorOf<S>>
struct DecodeWorkspaceBytes {
  [[nodiscard]] static std::size_t row(const Dims& dims) {
    return detail::DecodeParameters<S, P, A>::workspace_bytes(dims);
  }
  [[nodiscard]] static std::size_t thread(const Dims& dims) {
    return detail::DecodeHeads<S, P, A>::workspace_bytes(dims);
  }
};

/// One step of generation: a token of each sequence, its states read and written once.
///   y = silu(window . conv_weight);  S <- exp(g)(I - beta k k^T) S + beta k v^T,  o = S^T q
/// shapes    see DecodeInputs and DecodeStates; o [sequences, output_columns]
/// dtypes    as forward
/// writes    all of o; the slots of the sequences, and no other
/// alias     disjoint
/// specials  as DecodeInputs; no sequence: no-op
/// order     a sequence's bits depend on its own token and slot alone; those of decode
/// memory    DecodeWorkspaceBytes
/// cost      7 key_dim value_dim flops a value head and sequence, bound by its state: read and written
/// throws    Error as forward; a slot outside the cache, or of two sequences
/// source    spec/gdn.md 4
template <Storage S, Storage P, Accumulator A, Storage O>
void decode_step(const Dims& dims, const DecodeInputs<S, P, A>& inputs, const Options& options,
                 const DecodeStates<S, A>& states, MatrixView<O> o, LayerScratch& scratch) {
  detail::check_decode_step("gdn::decode_step", dims, inputs, options, states, o);
  const Workspace::Frame frame(scratch.row());
  const detail::DecodeParameters<S, P, A> parameters(
      dims, ConvInputs<S, P>{.weight = inputs.conv_weight, .bias = inputs.conv_bias},
      GateInputs<S, A>{.A_log = inputs.A_log, .dt_bias = inputs.dt_bias}, options, scratch.row());
  scratch.threads().run(dims.tokens * dims.key_heads, [&](std::int64_t task, Workspace& workspace) {
    const std::int64_t sequence = task / dims.key_heads;
    const std::int64_t key_head = task % dims.key_heads;
    const auto at = static_cast<std::size_t>(sequence);
    const std::int64_t slot = inputs.slots[at];
    O* const row = o.data() + sequence * o.stride();
    if (slot == 0) {
      const std::int64_t columns = dims.group() * dims.value_dim;
      std::fill_n(row + key_head * columns, columns, O(0));
      return;
    }
    const Workspace::Frame task_frame(workspace);
    detail::DecodeHeads<S, P, A>(parameters, key_head, workspace)
        .step(detail::DecodeToken<S>{&inputs.qkv(sequence, 0), &inputs.a(sequence, 0),
                                     &inputs.b(sequence, 0)},
              inputs.has_initial[at] == 0,
              states.conv.row_block(slot * dims.window_rows(), dims.window_rows()),
              states.recurrent.row_block(slot * dims.state_rows(), dims.state_rows()), row);
  });
}

/// forward as generation does it: one token after the other, the states carried from each to the next.
/// shapes    as forward
/// writes    as forward
/// alias     as forward
/// specials  as forward; padding and documents of any pattern
/// order     the bits of decode_step over the same tokens
/// memory    DecodeWorkspaceBytes, and one recurrent and one conv state for the row
/// cost      as decode_step, the key heads side by side
/// throws    Error as forward
/// source    spec/gdn.md 4
template <Storage S, Storage P, Accumulator A, Storage O>
void decode(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
            const Outputs<O, S, A>& outputs, LayerScratch& scratch) {
  constexpr std::string_view where = "gdn::decode";
  check_inputs(where, dims, inputs, options);
  check_outputs(where, dims, outputs);
  const Segments segments(inputs.segment_ids, options.initial_segment);
  Workspace& shared = scratch.row();
  const Workspace::Frame frame(shared);
  const MatrixView<S> window(shared.take<S>(dims.window_rows() * dims.qkv_columns()).data(),
                             dims.window_rows(), dims.qkv_columns());
  const MatrixView<A> state(shared.take<A>(dims.state_rows() * dims.value_dim).data(),
                            dims.state_rows(), dims.value_dim);
  const auto copy_or_clear = [](auto from, auto to) {
    if (from.is_null()) {
      detail::clear_rows(to);
      return;
    }
    for (std::int64_t row = 0; row < to.rows(); ++row) {
      std::copy_n(from.row(row).begin(), to.cols(), to.row(row).begin());
    }
  };
  copy_or_clear(inputs.conv_state, window);
  copy_or_clear(inputs.recurrent_state, state);

  const detail::DecodeParameters<S, P, A> parameters(
      dims, detail::conv_inputs(inputs),
      GateInputs<S, A>{.A_log = inputs.A_log, .dt_bias = inputs.dt_bias}, options, shared);
  scratch.threads().run(dims.key_heads, [&](std::int64_t key_head, Workspace& workspace) {
    const Workspace::Frame task_frame(workspace);
    detail::DecodeHeads<S, P, A> heads(parameters, key_head, workspace);
    std::int64_t gap = 0;  // padding since the last token
    for (std::int64_t t = 0; t < dims.tokens; ++t) {
      O* const row = outputs.o.data() + t * outputs.o.stride();
      if (!segments.valid(t)) {
        const std::int64_t columns = dims.group() * dims.value_dim;
        std::fill_n(row + key_head * columns, columns, O(0));
        ++gap;
        continue;
      }
      if (!segments.starts(t)) {
        for (std::int64_t i = std::min(gap, dims.window_rows()); i > 0; --i) {
          heads.shift_empty(window);
        }
      }
      gap = 0;
      heads.step(detail::DecodeToken<S>{&inputs.qkv(t, 0), &inputs.a(t, 0), &inputs.b(t, 0)},
                 segments.starts(t), window, state, row);
    }
  });

  if (!outputs.final_recurrent_state.is_null()) {
    copy_or_clear(ConstMatrixView<A>(state), outputs.final_recurrent_state);
  }
  if (!outputs.final_conv_state.is_null()) {
    copy_or_clear(ConstMatrixView<S>(window), outputs.final_conv_state);
  }
}

}  // namespace heddle::gdn

#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/detail/reference_arrays.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/reference.hpp"

namespace heddle::gdn::reference {

/// forward as generation does it: one token a call, the states carried from each to the next.
/// A step is forward over one token with options.initial_segment the document so far; between steps
/// of one document, padding shifts an empty slot into the window.
/// shapes    as forward
/// writes    as forward
/// alias     as forward
/// specials  as forward; padding and documents of any pattern
/// order     equal in bits to forward
/// memory    one conv state and one recurrent state, and what forward takes for one token
/// cost      as forward, and the states read and written once a token
/// throws    Error as forward
/// source    spec/gdn.md 4
template <Storage S, Storage P, Accumulator A, Storage O>
void decode(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
            const Outputs<O, S, A>& outputs) {
  constexpr std::string_view where = "gdn::reference::decode";
  check_inputs(where, dims, inputs, options);
  check_outputs(where, dims, outputs);

  detail::Matrix<S> window(dims.window_rows(), dims.qkv_columns());
  detail::Matrix<A> state(dims.state_rows(), dims.value_dim);
  if (!inputs.conv_state.is_null()) {
    detail::copy(inputs.conv_state, window.view());
  }
  detail::copy_or_zero(inputs.recurrent_state, state.view());

  Dims step_dims = dims;
  step_dims.tokens = 1;
  Options step_options = options;
  std::int64_t gap = 0;  // padding since the last token
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    const std::int32_t segment_id = inputs.segment_ids[static_cast<std::size_t>(t)];
    const MatrixView<O> o = outputs.o.row_block(t, 1);
    if (segment_id <= 0) {
      detail::fill(o, O(0));
      ++gap;
      continue;
    }
    for (gap = std::min(gap, dims.window_rows()); gap > 0; --gap) {
      for (std::int64_t slot = 0; slot < dims.window_rows(); ++slot) {
        const bool newest = slot + 1 == dims.window_rows();
        const std::span<S> row = window.row(slot);
        for (std::size_t c = 0; c < row.size(); ++c) {
          row[c] = newest ? S(0) : window.row(slot + 1)[c];
        }
      }
    }
    Inputs<S, P, A> step = inputs;
    step.qkv = inputs.qkv.row_block(t, 1);
    step.a = inputs.a.row_block(t, 1);
    step.b = inputs.b.row_block(t, 1);
    step.segment_ids = std::span(&segment_id, 1);
    step.conv_state = window.view();
    step.recurrent_state = state.view();
    forward(step_dims, step, step_options,
            Outputs<O, S, A>{
                .o = o, .final_recurrent_state = state.view(), .final_conv_state = window.view()});
    step_options.initial_segment = segment_id;
  }

  if (!outputs.final_recurrent_state.is_null()) {
    detail::copy<A>(state.view(), outputs.final_recurrent_state);
  }
  if (!outputs.final_conv_state.is_null()) {
    detail::copy<S>(window.view(), outputs.final_conv_state);
  }
}

}  // namespace heddle::gdn::reference

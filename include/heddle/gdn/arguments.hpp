#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/gdn/dims.hpp"

namespace heddle::gdn {

/// What a layer call reads. S stores activations, P the convolution's parameters, A computes.
///
/// shapes    qkv [tokens, qkv_columns] before the convolution; conv_weight [qkv_columns, kernel], the
///           last tap the current token; conv_bias [qkv_columns]; a, b [tokens, value_heads];
///           A_log, dt_bias [value_heads]; segment_ids [tokens], > 0 a document, 0 padding;
///           conv_state [kernel - 1, qkv_columns], oldest first; recurrent_state [state_rows,
///           value_dim]
/// specials  null means none: conv_bias (no bias), conv_state (no earlier token), recurrent_state
///           (zeros). Rows of padding are never read. Given states belong to the document
///           options.initial_segment; where the first token is of another they are not read
template <Storage S, Storage P = S, Accumulator A = AccumulatorOf<S>>
struct Inputs {
  ConstMatrixView<S> qkv{};
  ConstMatrixView<P> conv_weight{};
  std::span<const P> conv_bias{};
  ConstMatrixView<S> a{};  ///< before softplus: the decay's input
  ConstMatrixView<S> b{};  ///< before sigmoid: the writing strength's input
  std::span<const A> A_log{};
  std::span<const A> dt_bias{};
  std::span<const std::int32_t> segment_ids{};
  ConstMatrixView<S> conv_state{};
  ConstMatrixView<A> recurrent_state{};
};

/// What a forward call writes: every element of every view that is not null, padding rows of o as 0.
///
/// shapes    o [tokens, output_columns]; states as in Inputs
/// alias     a final state may be the very view of the given one (updated in place), else disjoint
/// specials  without any token the given states pass through (zeros where none is given)
template <Storage O, Storage S, Accumulator A = AccumulatorOf<S>>
struct Outputs {
  MatrixView<O> o{};
  MatrixView<A> final_recurrent_state{};  ///< after the last token, of that token's document
  MatrixView<S> final_conv_state{};       ///< raw inputs, copied; 0 where another document stood
};

/// What a states-only call writes; null: not wanted.
///
/// shapes    states as in Inputs; m [state_rows, key_dim], a value head's [key_dim, key_dim] at
///           state_row(head): final state = m * initial state + what the tokens wrote
/// specials  m is exactly 0 where a document starts in the row, the identity without any token
template <Storage S, Accumulator A = AccumulatorOf<S>>
struct StatesOutputs {
  MatrixView<A> final_recurrent_state{};
  MatrixView<S> final_conv_state{};
  MatrixView<A> m{};
};

/// The cotangents of a forward call's outputs. G stores d_o.
///
/// shapes    those of the outputs
/// specials  a null final-state cotangent is zero; rows of d_o at padding are never read
template <Storage G, Accumulator A>
struct OutputCotangents {
  ConstMatrixView<G> d_o{};
  ConstMatrixView<A> d_final_recurrent_state{};
  ConstMatrixView<A> d_final_conv_state{};
};

/// Where a backward call puts the cotangents of its inputs, in the accumulation type, not rounded.
///
/// shapes    those of the inputs
/// writes    d_qkv, d_a, d_b, d_conv_state, d_recurrent_state: every element, exactly 0 at padding;
///           parameters: as each says, overwrite or accumulate
/// alias     disjoint from the inputs and from each other; d_recurrent_state and d_conv_state may be
///           the very views of the final states' cotangents
/// specials  null: not wanted. d_qkv, d_a and d_b are required; those of the states may only be asked
///           for where the state is given, and are 0 where it belongs to another document
template <Accumulator A>
struct Cotangents {
  MatrixView<A> d_qkv{};
  WeightCotangent<A> d_conv_weight{};
  VectorCotangent<A> d_conv_bias{};
  MatrixView<A> d_a{};
  MatrixView<A> d_b{};
  VectorCotangent<A> d_A_log{};
  VectorCotangent<A> d_dt_bias{};
  MatrixView<A> d_conv_state{};
  MatrixView<A> d_recurrent_state{};
};

/// Key heads [first, first + count) with all their value heads: the slice of a layer that computes
/// and writes on its own.
struct KeyHeads {
  std::int64_t first = 0;
  std::int64_t count = 0;

  void validate(std::string_view where, const Dims& dims) const {
    require(first >= 0 && first <= dims.key_heads, where, "key_heads.first", first,
            "must be in [0, dims.key_heads (" + std::to_string(dims.key_heads) + ")]");
    require(
        count >= 0 && count <= dims.key_heads - first, where, "key_heads.count", count,
        "must be in [0, dims.key_heads - first (" + std::to_string(dims.key_heads - first) + ")]");
  }
};

namespace detail {

template <class T>
void require_shape_if_given(std::string_view where, std::string_view argument, MatrixView<T> view,
                            std::string_view rows_name, std::int64_t rows,
                            std::string_view cols_name, std::int64_t cols) {
  if (!view.is_null()) {
    require_shape(where, argument, view, rows_name, rows, cols_name, cols);
  }
}

template <class T>
void require_length_if_given(std::string_view where, std::string_view argument, std::span<T> values,
                             std::string_view length_name, std::int64_t length) {
  if (values.data() != nullptr) {
    require_length(where, argument, values, length_name, length);
  }
}

template <class T>
void require_recurrent_shape(std::string_view where, std::string_view argument, MatrixView<T> view,
                             const Dims& dims) {
  require_shape_if_given(where, argument, view, "value_heads * key_dim", dims.state_rows(),
                         "dims.value_dim", dims.value_dim);
}

template <class T>
void require_window_shape(std::string_view where, std::string_view argument, MatrixView<T> view,
                          const Dims& dims) {
  require_shape_if_given(where, argument, view, "kernel - 1", dims.window_rows(),
                         "dims.qkv_columns()", dims.qkv_columns());
}

}  // namespace detail

/// Refuses inputs that no layer call can take. Dims and options included; `where` goes into the text.
///
/// throws    Error for extents and enums out of range; a shape that is not dims'; exp(A_log) not
///           finite (it would meet a softplus of 0); a state given before padding that a token follows
template <Storage S, Storage P, Accumulator A>
void check_inputs(std::string_view where, const Dims& dims, const Inputs<S, P, A>& inputs,
                  const Options& options) {
  dims.validate(where);
  require_shape(where, "qkv", inputs.qkv, "dims.tokens", dims.tokens, "dims.qkv_columns()",
                dims.qkv_columns());
  require_shape(where, "conv_weight", inputs.conv_weight, "dims.qkv_columns()", dims.qkv_columns(),
                "dims.kernel", dims.kernel);
  detail::require_length_if_given(where, "conv_bias", inputs.conv_bias, "dims.qkv_columns()",
                                  dims.qkv_columns());
  require_shape(where, "a", inputs.a, "dims.tokens", dims.tokens, "dims.value_heads",
                dims.value_heads);
  require_shape(where, "b", inputs.b, "dims.tokens", dims.tokens, "dims.value_heads",
                dims.value_heads);
  require_length(where, "A_log", inputs.A_log, "dims.value_heads", dims.value_heads);
  for (std::int64_t head = 0; head < dims.value_heads; ++head) {
    using std::exp;
    using std::isfinite;
    const A value = inputs.A_log[static_cast<std::size_t>(head)];
    if (!isfinite(exp(value))) {
      fail(where, element_name("A_log", head), value, "exp(A_log) must be finite");
    }
  }
  require_length(where, "dt_bias", inputs.dt_bias, "dims.value_heads", dims.value_heads);
  require_length(where, "segment_ids", inputs.segment_ids, "dims.tokens", dims.tokens);
  for (std::size_t t = 0; t < inputs.segment_ids.size(); ++t) {
    if (inputs.segment_ids[t] < 0) [[unlikely]] {
      fail(where, element_name("segment_ids", t), inputs.segment_ids[t], "must be >= 0");
    }
  }
  detail::require_window_shape(where, "conv_state", inputs.conv_state, dims);
  detail::require_recurrent_shape(where, "recurrent_state", inputs.recurrent_state, dims);
  options.validate(where);
  require(static_cast<A>(options.eps) > A(0), where, "options.eps", options.eps,
          "must be > 0 in the accumulation type");
  const bool state_given = !inputs.conv_state.is_null() || !inputs.recurrent_state.is_null();
  const auto is_token = [](std::int32_t id) { return id > 0; };
  if (state_given && dims.tokens > 0 && !is_token(inputs.segment_ids[0]) &&
      std::any_of(inputs.segment_ids.begin(), inputs.segment_ids.end(), is_token)) {
    // It would pass the recurrent state through, but not the positional window of the convolution.
    fail(where, "segment_ids[0]", inputs.segment_ids[0],
         "must be > 0 where a state is given and a token follows: no padding between the two");
  }
}

/// The same for outputs.
template <Storage O, Storage S, Accumulator A>
void check_outputs(std::string_view where, const Dims& dims, const Outputs<O, S, A>& outputs) {
  require_shape(where, "o", outputs.o, "dims.tokens", dims.tokens, "dims.output_columns()",
                dims.output_columns());
  detail::require_recurrent_shape(where, "final_recurrent_state", outputs.final_recurrent_state,
                                  dims);
  detail::require_window_shape(where, "final_conv_state", outputs.final_conv_state, dims);
}

/// The same for those of a states-only call.
template <Storage S, Accumulator A>
void check_outputs(std::string_view where, const Dims& dims, const StatesOutputs<S, A>& outputs) {
  detail::require_recurrent_shape(where, "final_recurrent_state", outputs.final_recurrent_state,
                                  dims);
  detail::require_window_shape(where, "final_conv_state", outputs.final_conv_state, dims);
  detail::require_shape_if_given(where, "m", outputs.m, "value_heads * key_dim", dims.state_rows(),
                                 "dims.key_dim", dims.key_dim);
}

/// The same for the cotangents of a backward call, going in and coming out.
template <Storage S, Storage P, Accumulator A, Storage G>
void check_cotangents(std::string_view where, const Dims& dims, const Inputs<S, P, A>& inputs,
                      const OutputCotangents<G, A>& given, const Cotangents<A>& wanted) {
  require_shape(where, "d_o", given.d_o, "dims.tokens", dims.tokens, "dims.output_columns()",
                dims.output_columns());
  detail::require_recurrent_shape(where, "d_final_recurrent_state", given.d_final_recurrent_state,
                                  dims);
  detail::require_window_shape(where, "d_final_conv_state", given.d_final_conv_state, dims);
  require_shape(where, "d_qkv", wanted.d_qkv, "dims.tokens", dims.tokens, "dims.qkv_columns()",
                dims.qkv_columns());
  detail::require_shape_if_given(where, "d_conv_weight", wanted.d_conv_weight.values,
                                 "dims.qkv_columns()", dims.qkv_columns(), "dims.kernel",
                                 dims.kernel);
  detail::require_length_if_given(where, "d_conv_bias", wanted.d_conv_bias.values,
                                  "dims.qkv_columns()", dims.qkv_columns());
  require_shape(where, "d_a", wanted.d_a, "dims.tokens", dims.tokens, "dims.value_heads",
                dims.value_heads);
  require_shape(where, "d_b", wanted.d_b, "dims.tokens", dims.tokens, "dims.value_heads",
                dims.value_heads);
  detail::require_length_if_given(where, "d_A_log", wanted.d_A_log.values, "dims.value_heads",
                                  dims.value_heads);
  detail::require_length_if_given(where, "d_dt_bias", wanted.d_dt_bias.values, "dims.value_heads",
                                  dims.value_heads);
  detail::require_window_shape(where, "d_conv_state", wanted.d_conv_state, dims);
  require(wanted.d_conv_state.is_null() || dims.window_rows() == 0 || !inputs.conv_state.is_null(),
          where, "d_conv_state", "given", "must be null where conv_state is");
  detail::require_recurrent_shape(where, "d_recurrent_state", wanted.d_recurrent_state, dims);
  require(wanted.d_recurrent_state.is_null() || !inputs.recurrent_state.is_null(), where,
          "d_recurrent_state", "given", "must be null where recurrent_state is");
}

}  // namespace heddle::gdn

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/detail/reference_arrays.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/reference_conv.hpp"
#include "heddle/gdn/reference_gates.hpp"
#include "heddle/gdn/reference_norm.hpp"
#include "heddle/gdn/reference_recurrence.hpp"
#include "heddle/gdn/segments.hpp"

/// The Gated Delta Net layer by its definition: convolution, norm, gates, and the recurrence token by
/// token, forward and backward. What every other way of computing it is held against.
namespace heddle::gdn::reference {

/// The layer over a row of packed documents.
///   y = silu(conv(qkv)) within each document;  q = key_dim^(-1/2) norm(y_q), k = norm(y_k), v = y_v
///   beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias)
///   S_t = exp(g)(I - beta k k^T) S_{t-1} + beta k v^T,  o_t = S_t^T q_t, S = 0 where a document starts
/// shapes    see Inputs and Outputs; value head h reads key head h / (value_heads / key_heads)
/// dtypes    qkv, a, b, conv_state: S (bf16, f32, f64); conv_weight, conv_bias: P; the rest, and all
///           arithmetic: A (f32, f64); o: any storage, rounded once
/// writes    every element of each view in outputs that is not null (o is required)
/// alias     a final state may be the view of the given one, all else is disjoint
/// specials  tokens = 0 or padding alone: o = 0, states pass through. Padding is never read: NaN there
///           is legal. NaN in one document reaches no other
/// order     as each stage; a document's bits do not depend on what surrounds it, nor on threads
/// accuracy  float within 5e-6 of double relative to the largest value (reference_test.cpp)
/// memory    per key head at work: [tokens, 6 key_dim + 2 group value_dim + 2] of A and one state
/// cost      tokens * value_heads * 7 key_dim value_dim flops; 4 transcendentals a token and value
///           head, 1 a token and column
/// throws    Error as check_inputs and check_outputs say
/// source    spec/gdn.md 2 - 4
template <Storage S, Storage P, Accumulator A, Storage O>
void forward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
             const Outputs<O, S, A>& outputs);

/// The same for some key heads and their value heads, in the calling thread: reads and writes their
/// columns, rows and states alone, equal in bits to what the whole call computes there.
/// throws    Error also for key_heads outside dims
template <Storage S, Storage P, Accumulator A, Storage O>
void forward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
             const Outputs<O, S, A>& outputs, KeyHeads key_heads);

/// The states after a row, and its transition m, without its output.
/// writes    every element of each view in outputs that is not null
/// order     states equal in bits to those of forward
/// throws    Error as check_inputs and check_outputs say
/// source    spec/gdn.md 4, 8.1
template <Storage S, Storage P, Accumulator A>
void states(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
            const StatesOutputs<S, A>& outputs);

/// Backward of forward: the cotangents of all inputs, from those of o and of both final states.
/// shapes    see OutputCotangents and Cotangents
/// dtypes    d_o: any storage; every cotangent that comes out: A, not rounded
/// writes    see Cotangents
/// alias     see Cotangents
/// specials  padding gets exactly 0 and is not read, in d_o either; without any token the states'
///           cotangents pass through and the parameters' are 0
/// order     the value heads of a group ascending, parameter sums over tokens in fixed blocks: the
///           same bits for any number of threads. A document's d_qkv, d_a, d_b do not depend on what
///           surrounds it
/// accuracy  central differences in double to 1e-6, float within 5e-6 of double (reference_test.cpp)
/// memory    per key head at work: [tokens, 8 key_dim + 3 group value_dim + 4] of A, and about
///           2 sqrt(tokens) states; everything the forward computed is computed again
/// cost      tokens * value_heads * 25 key_dim value_dim flops
/// throws    Error as check_inputs and check_cotangents say
/// source    spec/gdn.md 2.3, 3, 4, 7.2
template <Storage S, Storage P, Accumulator A, Storage G>
void backward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
              const OutputCotangents<G, A>& given, const Cotangents<A>& wanted);

/// The same for some key heads and their value heads, as forward has it.
template <Storage S, Storage P, Accumulator A, Storage G>
void backward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
              const OutputCotangents<G, A>& given, const Cotangents<A>& wanted, KeyHeads key_heads);

namespace detail {

/// The columns of q, k or v that belong to one key head.
struct Columns {
  std::int64_t first;
  std::int64_t count;
};

struct GroupColumns {
  Columns q;
  Columns k;
  Columns v;
};

[[nodiscard]] inline GroupColumns group_columns(const Dims& dims, std::int64_t key_head) {
  return {.q = {dims.query_column(key_head), dims.key_dim},
          .k = {dims.key_column(key_head), dims.key_dim},
          .v = {dims.value_column(key_head * dims.group()), dims.group() * dims.value_dim}};
}

/// A part of an optional span, none of none.
template <class T>
[[nodiscard]] std::span<T> part(std::span<T> values, Columns columns) {
  return values.data() == nullptr ? values
                                  : values.subspan(static_cast<std::size_t>(columns.first),
                                                   static_cast<std::size_t>(columns.count));
}

template <Storage S, Storage P, Accumulator A>
[[nodiscard]] ConvInputs<S, P> conv_inputs(const Inputs<S, P, A>& inputs, Columns columns) {
  return {.x = inputs.qkv.column_block(columns.first, columns.count),
          .weight = inputs.conv_weight.row_block(columns.first, columns.count),
          .bias = part(inputs.conv_bias, columns),
          .state = inputs.conv_state.column_block(columns.first, columns.count)};
}

template <Storage S, Storage P, Accumulator A>
[[nodiscard]] GateInputs<S, A> gate_inputs(const Inputs<S, P, A>& inputs, std::int64_t value_head) {
  return {.a = inputs.a.column_block(value_head, 1),
          .b = inputs.b.column_block(value_head, 1),
          .A_log = inputs.A_log[static_cast<std::size_t>(value_head)],
          .dt_bias = inputs.dt_bias[static_cast<std::size_t>(value_head)]};
}

/// Convolution and, for q and k, norm of one column block, with what their backward reads.
template <Accumulator A>
struct Stream {
  Matrix<A> z;     // [T,C] before SiLU
  Matrix<A> y;     // [T,C] after it
  Matrix<A> unit;  // [T,C] normalised and scaled; [0,0] for v

  Stream(std::int64_t tokens, std::int64_t columns, std::int64_t unit_columns)
      : z(tokens, columns), y(tokens, columns), unit(tokens, unit_columns) {}
};

template <Storage S, Storage P, Accumulator A>
[[nodiscard]] Stream<A> value_stream(const Segments& segments, const Inputs<S, P, A>& inputs,
                                     const Options& options, Columns columns) {
  Stream<A> stream(segments.tokens(), columns.count, 0);
  conv_forward(segments, conv_inputs(inputs, columns), options.conv_output, stream.z.view(),
               stream.y.view());
  return stream;
}

template <Storage S, Storage P, Accumulator A>
[[nodiscard]] Stream<A> unit_stream(const Segments& segments, const Inputs<S, P, A>& inputs,
                                    const Options& options, Columns columns, const Norm<A>& norm) {
  Stream<A> stream(segments.tokens(), columns.count, columns.count);
  conv_forward(segments, conv_inputs(inputs, columns), options.conv_output, stream.z.view(),
               stream.y.view());
  for (std::int64_t t = 0; t < segments.tokens(); ++t) {
    if (segments.valid(t)) {
      norm_forward<A>(norm, stream.y.row(t), stream.unit.row(t));
    }
  }
  return stream;
}

template <Accumulator A>
[[nodiscard]] Norm<A> query_norm(const Dims& dims, const Options& options) {
  using std::sqrt;
  return {.mode = options.norm,
          .eps = static_cast<A>(options.eps),
          .scale = A(1) / sqrt(static_cast<A>(dims.key_dim))};
}

template <Accumulator A>
[[nodiscard]] Norm<A> key_norm(const Options& options) {
  return {.mode = options.norm, .eps = static_cast<A>(options.eps), .scale = A(1)};
}

template <Accumulator A>
void copy_or_zero(ConstMatrixView<A> from, MatrixView<A> to) {
  if (from.is_null()) {
    fill(to, A(0));
  } else {
    copy(from, to);
  }
}

/// forward (o given) or states (o null) of one key head and its value heads.
template <Storage S, Storage P, Accumulator A, Storage O>
void group_forward(const Dims& dims, const Segments& segments, const Inputs<S, P, A>& inputs,
                   const Options& options, std::int64_t key_head, const Outputs<O, S, A>& outputs,
                   MatrixView<A> m) {
  const GroupColumns columns = group_columns(dims, key_head);
  Stream<A> q(0, 0, 0);
  if (!outputs.o.is_null()) {
    q = unit_stream(segments, inputs, options, columns.q, query_norm<A>(dims, options));
  }
  Stream<A> k = unit_stream(segments, inputs, options, columns.k, key_norm<A>(options));
  Stream<A> v = value_stream(segments, inputs, options, columns.v);

  std::vector<A> beta(static_cast<std::size_t>(dims.tokens));
  std::vector<A> g(static_cast<std::size_t>(dims.tokens));
  Matrix<A> state(dims.key_dim, dims.value_dim);
  for (std::int64_t member = 0; member < dims.group(); ++member) {
    const std::int64_t head = key_head * dims.group() + member;
    gates_forward<S, A>(segments, gate_inputs(inputs, head), options.beta_range, beta, g);
    const RecurrenceInputs<A> head_inputs{
        .q = q.unit.view(),
        .k = k.unit.view(),
        .v = v.y.view().column_block(member * dims.value_dim, dims.value_dim),
        .beta = beta,
        .g = g};
    const auto rows = [&](auto view) { return view.row_block(dims.state_row(head), dims.key_dim); };
    copy_or_zero(rows(inputs.recurrent_state), state.view());
    recurrence_forward(segments, head_inputs, state.view(),
                       outputs.o.column_block(head * dims.value_dim, dims.value_dim));
    if (!outputs.final_recurrent_state.is_null()) {
      copy<A>(state.view(), rows(outputs.final_recurrent_state));
    }
    if (!m.is_null()) {
      transition(segments, head_inputs, rows(m));
    }
  }

  // Last: a final state may lie where the given one was read.
  if (!outputs.final_conv_state.is_null()) {
    for (const Columns block : {columns.q, columns.k, columns.v}) {
      conv_final_state(segments, conv_inputs(inputs, block),
                       outputs.final_conv_state.column_block(block.first, block.count));
    }
  }
}

/// backward of one key head and its value heads.
template <Storage S, Storage P, Accumulator A, Storage G>
void group_backward(const Dims& dims, const Segments& segments, const Inputs<S, P, A>& inputs,
                    const Options& options, std::int64_t key_head,
                    const OutputCotangents<G, A>& given, const Cotangents<A>& wanted) {
  const GroupColumns columns = group_columns(dims, key_head);
  const Norm<A> norm_q = query_norm<A>(dims, options);
  const Norm<A> norm_k = key_norm<A>(options);
  Stream<A> q = unit_stream(segments, inputs, options, columns.q, norm_q);
  Stream<A> k = unit_stream(segments, inputs, options, columns.k, norm_k);
  Stream<A> v = value_stream(segments, inputs, options, columns.v);

  // Cotangents of q, k and v, then of the convolution's output in the same place.
  Matrix<A> d_q(dims.tokens, columns.q.count);
  Matrix<A> d_k(dims.tokens, columns.k.count);
  Matrix<A> d_v(dims.tokens, columns.v.count);
  std::vector<A> beta(static_cast<std::size_t>(dims.tokens));
  std::vector<A> g(static_cast<std::size_t>(dims.tokens));
  std::vector<A> d_beta(static_cast<std::size_t>(dims.tokens));
  std::vector<A> d_g(static_cast<std::size_t>(dims.tokens));
  Matrix<A> d_state(dims.key_dim, dims.value_dim);
  for (std::int64_t member = 0; member < dims.group(); ++member) {
    const std::int64_t head = key_head * dims.group() + member;
    const Columns of_member{member * dims.value_dim, dims.value_dim};
    const GateInputs<S, A> gates = gate_inputs(inputs, head);
    gates_forward<S, A>(segments, gates, options.beta_range, beta, g);
    const RecurrenceInputs<A> head_inputs{
        .q = q.unit.view(),
        .k = k.unit.view(),
        .v = v.y.view().column_block(of_member.first, of_member.count),
        .beta = beta,
        .g = g};
    const auto rows = [&](auto view) { return view.row_block(dims.state_row(head), dims.key_dim); };
    copy_or_zero(rows(given.d_final_recurrent_state), d_state.view());
    recurrence_backward(
        segments, head_inputs, rows(inputs.recurrent_state),
        given.d_o.column_block(head * dims.value_dim, dims.value_dim), d_state.view(),
        RecurrenceCotangents<A>{.d_q = d_q.view(),
                                .d_k = d_k.view(),
                                .d_v = d_v.view().column_block(of_member.first, of_member.count),
                                .d_beta = d_beta,
                                .d_g = d_g});
    if (!wanted.d_recurrent_state.is_null()) {
      copy<A>(d_state.view(), rows(wanted.d_recurrent_state));
    }
    const GateParameterCotangents<A> parameters =
        gates_backward<S, A>(segments, gates, options.beta_range, d_beta, d_g,
                             wanted.d_a.column_block(head, 1), wanted.d_b.column_block(head, 1));
    const auto at = static_cast<std::size_t>(head);
    if (wanted.d_A_log.wanted()) {
      deliver(parameters.d_A_log, wanted.d_A_log.values[at], wanted.d_A_log.write);
    }
    if (wanted.d_dt_bias.wanted()) {
      deliver(parameters.d_dt_bias, wanted.d_dt_bias.values[at], wanted.d_dt_bias.write);
    }
  }

  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    // The convolution's backward does not read rows of padding.
    if (segments.valid(t)) {
      norm_backward<A>(norm_q, q.y.row(t), d_q.row(t), d_q.row(t));
      norm_backward<A>(norm_k, k.y.row(t), d_k.row(t), d_k.row(t));
    }
  }

  const auto conv = [&](Columns block, Stream<A>& stream, Matrix<A>& d_y) {
    conv_backward<S, P, A>(
        segments, conv_inputs(inputs, block), stream.z.view(), d_y.view(),
        given.d_final_conv_state.column_block(block.first, block.count),
        ConvCotangents<A>{
            .d_x = wanted.d_qkv.column_block(block.first, block.count),
            .d_weight = {wanted.d_conv_weight.values.row_block(block.first, block.count),
                         wanted.d_conv_weight.write},
            .d_bias = {part(wanted.d_conv_bias.values, block), wanted.d_conv_bias.write},
            .d_state = wanted.d_conv_state.column_block(block.first, block.count)});
  };
  conv(columns.q, q, d_q);
  conv(columns.k, k, d_k);
  conv(columns.v, v, d_v);
}

}  // namespace detail

template <Storage S, Storage P, Accumulator A, Storage O>
void forward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
             const Outputs<O, S, A>& outputs) {
  constexpr std::string_view where = "gdn::reference::forward";
  check_inputs(where, dims, inputs, options);
  check_outputs(where, dims, outputs);
  const Segments segments(inputs.segment_ids, options.initial_segment);
  parallel_tasks(dims.key_heads, [&](std::int64_t key_head) {
    detail::group_forward(dims, segments, inputs, options, key_head, outputs, MatrixView<A>());
  });
}

template <Storage S, Storage P, Accumulator A, Storage O>
void forward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
             const Outputs<O, S, A>& outputs, KeyHeads key_heads) {
  constexpr std::string_view where = "gdn::reference::forward";
  check_inputs(where, dims, inputs, options);
  check_outputs(where, dims, outputs);
  key_heads.validate(where, dims);
  const Segments segments(inputs.segment_ids, options.initial_segment);
  for (std::int64_t i = 0; i < key_heads.count; ++i) {
    detail::group_forward(dims, segments, inputs, options, key_heads.first + i, outputs,
                          MatrixView<A>());
  }
}

template <Storage S, Storage P, Accumulator A>
void states(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
            const StatesOutputs<S, A>& outputs) {
  constexpr std::string_view where = "gdn::reference::states";
  check_inputs(where, dims, inputs, options);
  check_outputs(where, dims, outputs);
  const Segments segments(inputs.segment_ids, options.initial_segment);
  const Outputs<A, S, A> without_o{.o = {},
                                   .final_recurrent_state = outputs.final_recurrent_state,
                                   .final_conv_state = outputs.final_conv_state};
  parallel_tasks(dims.key_heads, [&](std::int64_t key_head) {
    detail::group_forward(dims, segments, inputs, options, key_head, without_o, outputs.m);
  });
}

template <Storage S, Storage P, Accumulator A, Storage G>
void backward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
              const OutputCotangents<G, A>& given, const Cotangents<A>& wanted) {
  constexpr std::string_view where = "gdn::reference::backward";
  check_inputs(where, dims, inputs, options);
  check_cotangents(where, dims, inputs, given, wanted);
  const Segments segments(inputs.segment_ids, options.initial_segment);
  parallel_tasks(dims.key_heads, [&](std::int64_t key_head) {
    detail::group_backward(dims, segments, inputs, options, key_head, given, wanted);
  });
}

template <Storage S, Storage P, Accumulator A, Storage G>
void backward(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
              const OutputCotangents<G, A>& given, const Cotangents<A>& wanted,
              KeyHeads key_heads) {
  constexpr std::string_view where = "gdn::reference::backward";
  check_inputs(where, dims, inputs, options);
  check_cotangents(where, dims, inputs, given, wanted);
  key_heads.validate(where, dims);
  const Segments segments(inputs.segment_ids, options.initial_segment);
  for (std::int64_t i = 0; i < key_heads.count; ++i) {
    detail::group_backward(dims, segments, inputs, options, key_heads.first + i, given, wanted);
  }
}

}  // namespace heddle::gdn::reference

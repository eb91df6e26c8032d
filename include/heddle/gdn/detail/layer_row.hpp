#pragma once

#include <cstddef>
#include <cstdint>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/causal_conv.hpp"
#include "heddle/gdn/chunk.hpp"
#include "heddle/gdn/chunk_plan.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/gates.hpp"
#include "heddle/gdn/segments.hpp"

namespace heddle::gdn::detail {

/// The value heads of some key heads.
struct ValueHeads {
  std::int64_t first;
  std::int64_t count;
};

[[nodiscard]] inline ValueHeads value_heads_of(const Dims& dims, KeyHeads key_heads) {
  return {key_heads.first * dims.group(), key_heads.count * dims.group()};
}

template <Storage S, Storage P, Accumulator A>
[[nodiscard]] GateInputs<S, A> gate_inputs(const Inputs<S, P, A>& inputs, ValueHeads heads) {
  const auto first = static_cast<std::size_t>(heads.first);
  const auto count = static_cast<std::size_t>(heads.count);
  return {.a = inputs.a.column_block(heads.first, heads.count),
          .b = inputs.b.column_block(heads.first, heads.count),
          .A_log = inputs.A_log.subspan(first, count),
          .dt_bias = inputs.dt_bias.subspan(first, count)};
}

template <Storage S, Storage P, Accumulator A>
[[nodiscard]] ConvInputs<S, P> conv_inputs(const Inputs<S, P, A>& inputs) {
  return {.x = inputs.qkv,
          .weight = inputs.conv_weight,
          .bias = inputs.conv_bias,
          .state = inputs.conv_state};
}

template <class T>
[[nodiscard]] VectorCotangent<T> part(const VectorCotangent<T>& cotangent, ValueHeads heads) {
  if (!cotangent.wanted()) {
    return cotangent;
  }
  return {cotangent.values.subspan(static_cast<std::size_t>(heads.first),
                                   static_cast<std::size_t>(heads.count)),
          cotangent.write};
}

/// Gates of some value heads of a row, and what every chunk of it is computed from.
template <Accumulator A>
class LayerRow {
 public:
  template <Storage S, Storage P>
  LayerRow(const Dims& dims, const Inputs<S, P, A>& inputs, const Options& options,
           const ChunkOptions& chunk_options, Workspace& workspace)
      : frame_(workspace),
        segments(inputs.segment_ids, options.initial_segment),
        plan(segments, chunk_options),
        g(take(dims, workspace)),
        beta(take(dims, workspace)),
        recurrence{.dims = dims,
                   .segments = segments,
                   .plan = plan,
                   .norm = options.norm,
                   .eps = static_cast<A>(options.eps),
                   .g = g,
                   .beta = beta} {}

  [[nodiscard]] static std::size_t workspace_bytes(const Dims& dims) {
    return 2 * Workspace::bytes_for<A>(dims.tokens * dims.value_heads);
  }

 private:
  [[nodiscard]] static MatrixView<A> take(const Dims& dims, Workspace& workspace) {
    return {workspace.take<A>(dims.tokens * dims.value_heads).data(), dims.tokens,
            dims.value_heads};
  }

  Workspace::Frame frame_;

 public:
  const Segments segments;
  const ChunkPlan plan;
  const MatrixView<A> g;  // [tokens, value_heads]
  const MatrixView<A> beta;
  const RecurrenceRow<A> recurrence;

  template <Storage S, Storage P, class Loop>
  void compute_gates(const Inputs<S, P, A>& inputs, const Options& options, ValueHeads heads,
                     Workspace& workspace, const Loop& loop) const {
    gates_forward(segments, gate_inputs(inputs, heads), options.beta_range,
                  beta.column_block(heads.first, heads.count),
                  g.column_block(heads.first, heads.count), workspace, loop);
  }
};

/// The columns of q, k and v of some key heads of the window after a row.
template <Storage S, Storage P, Accumulator A>
void write_final_window(const Dims& dims, const Segments& segments, const Inputs<S, P, A>& inputs,
                        KeyHeads key_heads, MatrixView<S> final_state) {
  if (final_state.is_null()) {
    return;
  }
  const ValueHeads heads = value_heads_of(dims, key_heads);
  const auto copy = [&](std::int64_t column, std::int64_t count) {
    conv_final_state(segments, column_block(conv_inputs(inputs), column, count),
                     final_state.column_block(column, count));
  };
  copy(dims.query_column(key_heads.first), key_heads.count * dims.key_dim);
  copy(dims.key_column(key_heads.first), key_heads.count * dims.key_dim);
  copy(dims.value_column(heads.first), heads.count * dims.value_dim);
}

}  // namespace heddle::gdn::detail

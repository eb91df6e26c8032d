#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/streaming_copy.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/detail/conv_backward.hpp"
#include "heddle/gdn/detail/conv_tile.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"
#include "heddle/gdn/workspaces.hpp"

namespace heddle::gdn {

namespace detail {

/// Tokens and columns of a task of the whole-row calls. Columns: the rows that a window reads, the
/// weights and what is written fit a first-level cache.
inline constexpr std::int64_t conv_tokens = 512;
inline constexpr std::int64_t conv_columns = 1024;
inline constexpr std::int64_t conv_backward_tokens = 64;
inline constexpr std::int64_t conv_backward_columns = 512;

/// Whether rows are to be written past the caches: an array larger than they are, whole cache lines.
template <Accumulator A>
[[nodiscard]] bool streams(MatrixView<A> whole) {
  if constexpr (std::is_same_v<A, float>) {
    constexpr std::int64_t line = 64 / sizeof(float);
    return whole.rows() * whole.cols() * static_cast<std::int64_t>(sizeof(float)) >=
               streaming_bytes &&
           whole.cols() % line == 0 && whole.stride() % line == 0 &&
           reinterpret_cast<std::uintptr_t>(whole.data()) % 64 == 0;
  } else {
    return false;
  }
}

template <Storage S, Storage P>
[[nodiscard]] ConvInputs<S, P> column_block(const ConvInputs<S, P>& inputs, std::int64_t first,
                                            std::int64_t count) {
  const auto offset = static_cast<std::size_t>(first);
  return {.x = inputs.x.column_block(first, count),
          .weight = inputs.weight.row_block(first, count),
          .bias = inputs.bias.empty()
                      ? inputs.bias
                      : inputs.bias.subspan(offset, static_cast<std::size_t>(count)),
          .state = inputs.state.column_block(first, count),
          .halo_valid = inputs.halo_valid};
}

template <Accumulator A>
[[nodiscard]] ConvCotangents<A> column_block(const ConvCotangents<A>& out, std::int64_t first,
                                             std::int64_t count) {
  const auto offset = static_cast<std::size_t>(first);
  return {.d_x = out.d_x.column_block(first, count),
          .d_weight = {out.d_weight.values.row_block(first, count), out.d_weight.write},
          .d_bias = {out.d_bias.wanted()
                         ? out.d_bias.values.subspan(offset, static_cast<std::size_t>(count))
                         : out.d_bias.values,
                     out.d_bias.write},
          .d_state = out.d_state.column_block(first, count)};
}

template <Storage S, Storage P>
void check_conv(std::string_view where, const Segments& segments, const ConvInputs<S, P>& inputs) {
  const std::int64_t columns = inputs.columns();
  const std::int64_t kernel = inputs.kernel();
  require(kernel >= 1, where, "weight.cols", kernel, "must be >= 1");
  require_shape(where, "weight", inputs.weight, "weight.rows", columns, "weight.cols", kernel);
  require_shape(where, "x", inputs.x, "segments.tokens", segments.tokens(), "weight.rows", columns);
  if (!inputs.bias.empty()) {
    require_length(where, "bias", inputs.bias, "weight.rows", columns);
  }
  if (!inputs.state.is_null()) {
    require_shape(where, "state", inputs.state, "weight.cols - 1", kernel - 1, "weight.rows",
                  columns);
  }
  if (!inputs.halo_valid.empty()) {
    require_length(where, "halo_valid", inputs.halo_valid, "weight.cols - 1", kernel - 1);
  }
}

}  // namespace detail

/// Bytes of workspace that suffice for causal_conv of a range.
template <Storage S, Accumulator A = AccumulatorOf<S>>
[[nodiscard]] constexpr std::size_t causal_conv_workspace_bytes(std::int64_t columns,
                                                                std::int64_t kernel) {
  return detail::ConvTile<S, S, A>::workspace_bytes(columns, kernel);
}

/// Causal depthwise convolution over the tokens of one document, and SiLU.
///   z[t] = bias + sum_w weight[:,w] slot(t, w),  y[t] = z[t] / (1 + exp(-z[t]))
/// slot(t, w) is position t - (kernel - 1) + w of the row, before it the given state's row, nothing
/// where that is padding or of another document. Windows are positional: padding occupies a slot.
/// shapes    see ConvInputs; y [T,C]
/// dtypes    x, state: S, weight, bias: P (bf16, f32, f64), widened as they are read; arithmetic and y:
///           A; ConvOutput::storage rounds y to S and back
/// writes    all of y; exactly 0 at padding
/// alias     disjoint
/// specials  rows at padding are not read, nor a state of another document; a null state counts as
///           zeros
/// order     slots ascending, in float by fused multiply-adds from the bias on: an element depends on
///           its document alone, the same bits for any cut, number of threads and path
/// memory    each thread: causal_conv_workspace_bytes of 1024 columns. A result of 32 MiB and more, if
///           its rows are whole cache lines, is written past the caches
/// cost      2 kernel flops and one exp an element
/// throws    Error for another shape of an argument
/// source    spec/gdn.md 2.2
template <Storage S, Storage P, Accumulator A>
void causal_conv(const Segments& segments, const ConvInputs<S, P>& inputs, ConvOutput output,
                 MatrixView<A> y, Workspaces& workspaces) {
  constexpr std::string_view where = "gdn::causal_conv";
  detail::check_conv(where, segments, inputs);
  require_shape(where, "y", y, "segments.tokens", segments.tokens(), "weight.rows",
                inputs.columns());
  const bool streamed = detail::streams(y);
  const std::int64_t strips = (inputs.columns() + detail::conv_columns - 1) / detail::conv_columns;
  const std::int64_t blocks = (segments.tokens() + detail::conv_tokens - 1) / detail::conv_tokens;
  workspaces.run(strips * blocks, [&](std::int64_t task, Workspace& workspace) {
    const std::int64_t column = task % strips * detail::conv_columns;
    const std::int64_t columns = std::min(detail::conv_columns, inputs.columns() - column);
    const std::int64_t token = task / strips * detail::conv_tokens;
    const TokenRange range{token, std::min(detail::conv_tokens, segments.tokens() - token)};
    const Workspace::Frame frame(workspace);
    const detail::ConvTile<S, P, A> tile(segments, detail::column_block(inputs, column, columns),
                                         output, workspace);
    tile.forward(range, y.row_block(range.first, range.count).column_block(column, columns),
                 streamed);
    if (streamed) {
      fence_stores();
    }
  });
}

/// The same for a range of tokens in the calling thread, for hosts with threads of their own; pass
/// column blocks for a range of columns.
/// shapes    y [range.count, C]
/// memory    causal_conv_workspace_bytes
/// throws    Error also for a range outside the row
template <Storage S, Storage P, Accumulator A>
void causal_conv(const Segments& segments, const ConvInputs<S, P>& inputs, ConvOutput output,
                 TokenRange range, MatrixView<A> y, Workspace& workspace) {
  constexpr std::string_view where = "gdn::causal_conv";
  detail::check_conv(where, segments, inputs);
  require(range.first >= 0 && range.first <= segments.tokens(), where, "range.first", range.first,
          "must be in [0, tokens]");
  require(range.count >= 0 && range.end() <= segments.tokens(), where, "range.count", range.count,
          "must end in the row");
  require_shape(where, "y", y, "range.count", range.count, "weight.rows", inputs.columns());
  const Workspace::Frame frame(workspace);
  detail::ConvTile<S, P, A>(segments, inputs, output, workspace).forward(range, y);
}

/// The window that a continuation of the row would need: the last kernel - 1 positions up to the last
/// token, raw inputs copied.
/// shapes    final_state [kernel - 1, C]
/// writes    all of it; 0 in slots of padding, of another document, and before a row without state
/// alias     may be inputs.state itself
/// specials  no token: the state as it was given, zeros where none was
/// throws    Error for another shape of an argument
/// source    spec/gdn.md 2.2
template <Storage S, Storage P>
void conv_final_state(const Segments& segments, const ConvInputs<S, P>& inputs,
                      MatrixView<S> final_state) {
  constexpr std::string_view where = "gdn::conv_final_state";
  detail::check_conv(where, segments, inputs);
  const std::int64_t rows = inputs.kernel() - 1;
  require_shape(where, "final_state", final_state, "weight.cols - 1", rows, "weight.rows",
                inputs.columns());
  const std::int64_t last = segments.last_valid();
  for (std::int64_t i = 0; i < rows; ++i) {
    // The last token's window without its oldest slot. In place, a row is only ever read from one at
    // or behind it.
    const S* const from = last >= 0                ? detail::slot_row(segments, inputs, last, i + 1)
                          : inputs.state.is_null() ? nullptr
                                                   : &inputs.state(i, 0);
    if (from != nullptr) {
      std::copy_n(from, inputs.columns(), &final_state(i, 0));
    } else {
      std::fill_n(&final_state(i, 0), inputs.columns(), S(0));
    }
  }
}

/// Bytes of workspace that suffice for each thread of causal_conv_backward.
template <Storage S, Accumulator A = AccumulatorOf<S>>
[[nodiscard]] constexpr std::size_t causal_conv_backward_workspace_bytes(std::int64_t columns,
                                                                         std::int64_t kernel) {
  const std::int64_t strip = std::min(columns, detail::conv_backward_columns);
  return detail::ConvTile<S, S, A>::workspace_bytes(strip, kernel) +
         detail::ConvBackward<S, S, A>::workspace_bytes(strip, kernel,
                                                        detail::conv_backward_tokens);
}

/// Backward of causal_conv and conv_final_state; z is computed again.
///   dz[t] = d_y[t] s (1 + z (1 - s)),  s = 1 / (1 + exp(-z[t]))
///   each slot that z[t] read gets weight[:,w] dz[t]; d_weight[:,w] = sum_t dz[t] slot(t, w)
///   each slot that the final state was copied from gets that row's cotangent
/// shapes    d_y [T,C]; d_final_state [kernel - 1, C] or null; see ConvCotangents
/// writes    all of d_x and d_state, 0 where nothing was read; parameters as they say
/// alias     d_state may be d_final_state itself, everything else is disjoint
/// specials  d_y at padding is not read. No token: d_state = d_final_state
/// order     tokens in blocks of 64 from the end, ascending in a block; parameter sums in blocks of 256
///           tokens: the same bits for any number of threads
/// memory    each thread: causal_conv_backward_workspace_bytes
/// cost      6 kernel flops and one exp an element
/// throws    Error for another shape of an argument
/// source    spec/gdn.md 2.3
template <Storage S, Storage P, Accumulator A>
void causal_conv_backward(const Segments& segments, const ConvInputs<S, P>& inputs,
                          ConstMatrixView<A> d_y, ConstMatrixView<A> d_final_state,
                          const ConvCotangents<A>& out, Workspaces& workspaces) {
  constexpr std::string_view where = "gdn::causal_conv_backward";
  const std::int64_t tokens = segments.tokens();
  const std::int64_t columns = inputs.columns();
  const std::int64_t window = inputs.kernel() - 1;
  detail::check_conv(where, segments, inputs);
  require_shape(where, "d_y", d_y, "segments.tokens", tokens, "weight.rows", columns);
  if (!d_final_state.is_null()) {
    require_shape(where, "d_final_state", d_final_state, "weight.cols - 1", window, "weight.rows",
                  columns);
  }
  require_shape(where, "d_x", out.d_x, "segments.tokens", tokens, "weight.rows", columns);
  if (out.d_weight.wanted()) {
    require_shape(where, "d_weight", out.d_weight.values, "weight.rows", columns, "weight.cols",
                  inputs.kernel());
  }
  if (out.d_bias.wanted()) {
    require_length(where, "d_bias", out.d_bias.values, "weight.rows", columns);
  }
  if (!out.d_state.is_null()) {
    require_shape(where, "d_state", out.d_state, "weight.cols - 1", window, "weight.rows", columns);
  }

  constexpr std::int64_t block = detail::conv_backward_tokens;
  const bool streamed = detail::streams(out.d_x);
  const std::int64_t strips =
      (columns + detail::conv_backward_columns - 1) / detail::conv_backward_columns;
  workspaces.run(strips, [&](std::int64_t strip, Workspace& workspace) {
    const std::int64_t first = strip * detail::conv_backward_columns;
    const std::int64_t count = std::min(detail::conv_backward_columns, columns - first);
    const Workspace::Frame frame(workspace);
    const detail::ConvTile<S, P, A> tile(segments, detail::column_block(inputs, first, count),
                                         ConvOutput::accumulator, workspace);
    detail::ConvBackward<S, P, A> backward(tile, d_final_state.column_block(first, count),
                                           detail::column_block(out, first, count), streamed, block,
                                           workspace);
    for (std::int64_t end = tokens; end > 0;) {
      const std::int64_t begin = (end - 1) / block * block;
      backward.store({begin, end - begin},
                     d_y.row_block(begin, end - begin).column_block(first, count));
      end = begin;
    }
    backward.finish();
  });
}

}  // namespace heddle::gdn

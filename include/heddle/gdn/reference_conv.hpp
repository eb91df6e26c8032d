#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/gdn/detail/reference_arrays.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/reference_gates.hpp"
#include "heddle/gdn/segments.hpp"

namespace heddle::gdn::reference {

/// What one slot of a convolution window holds.
struct WindowSlot {
  enum class From { nothing, token, state };
  From from;
  std::int64_t index;  ///< of the token, or of the state's row

  friend bool operator==(const WindowSlot&, const WindowSlot&) = default;
};

/// Slot `slot` of [0, kernel) of the window that ends at `token`: the token or the state's row at
/// position token - (kernel - 1) + slot, nothing where that is padding or of another document.
/// Windows are positional: padding inside a document occupies a slot.
[[nodiscard]] inline WindowSlot window_slot(const Segments& segments, std::int64_t kernel,
                                            std::int64_t token, std::int64_t slot) {
  const std::int64_t position = token - (kernel - 1) + slot;
  if (position >= 0) {
    const bool same_document =
        segments.valid(position) && segments.epoch(position) == segments.epoch(token);
    return {same_document ? WindowSlot::From::token : WindowSlot::From::nothing, position};
  }
  return {segments.epoch(token) == 0 ? WindowSlot::From::state : WindowSlot::From::nothing,
          position + kernel - 1};
}

/// A column block of the convolution's inputs.
///
/// shapes    x [T,C]; weight [C,kernel], last tap the current token; bias [C] or empty; state
///           [kernel - 1, C], oldest first, or null: zeros
template <Storage S, Storage P>
struct ConvInputs {
  ConstMatrixView<S> x{};
  ConstMatrixView<P> weight{};
  std::span<const P> bias{};
  ConstMatrixView<S> state{};

  [[nodiscard]] std::int64_t columns() const { return weight.rows(); }
  [[nodiscard]] std::int64_t kernel() const { return weight.cols(); }

  /// The row that a window slot reads, null for nothing.
  [[nodiscard]] const S* row(const WindowSlot& slot) const {
    switch (slot.from) {
      case WindowSlot::From::token:
        return &x(slot.index, 0);
      case WindowSlot::From::state:
        return state.is_null() ? nullptr : &state(slot.index, 0);
      case WindowSlot::From::nothing:
        break;
    }
    return nullptr;
  }
};

/// Causal depthwise convolution over the tokens of one document, and SiLU.
///   z[t] = bias + sum_w weight[:,w] window_slot(t, w),  y[t] = z[t] sigmoid(z[t])
/// shapes    z, y [T,C]
/// dtypes    inputs: Storage; arithmetic, z and y: Accumulator; ConvOutput::storage rounds y to S
/// writes    all of z and y; exactly 0 at padding
/// specials  rows at padding are not read; a null state counts as zeros
/// order     slots ascending
/// memory    the taps [kernel, C] in A
/// source    spec/gdn.md 2.2
template <Storage S, Storage P, Accumulator A>
void conv_forward(const Segments& segments, const ConvInputs<S, P>& inputs, ConvOutput output,
                  MatrixView<A> z, MatrixView<A> y) {
  const std::int64_t columns = inputs.columns();
  detail::Matrix<A> taps(inputs.kernel(), columns);  // a tap's weights side by side
  for (std::int64_t c = 0; c < columns; ++c) {
    for (std::int64_t w = 0; w < inputs.kernel(); ++w) {
      taps.view()(w, c) = widen<A>(inputs.weight(c, w));
    }
  }
  for (std::int64_t t = 0; t < segments.tokens(); ++t) {
    A* const z_row = &z(t, 0);
    A* const y_row = &y(t, 0);
    if (!segments.valid(t)) {
      std::fill_n(z_row, columns, A(0));
      std::fill_n(y_row, columns, A(0));
      continue;
    }
    for (std::int64_t c = 0; c < columns; ++c) {
      z_row[c] = inputs.bias.empty() ? A(0) : widen<A>(inputs.bias[static_cast<std::size_t>(c)]);
    }
    for (std::int64_t w = 0; w < inputs.kernel(); ++w) {
      if (const S* const x = inputs.row(window_slot(segments, inputs.kernel(), t, w))) {
        const A* const tap = &taps.view()(w, 0);
        for (std::int64_t c = 0; c < columns; ++c) {
          z_row[c] += tap[c] * widen<A>(x[c]);
        }
      }
    }
    for (std::int64_t c = 0; c < columns; ++c) {
      const A value = z_row[c] * sigmoid(z_row[c]);
      y_row[c] = output == ConvOutput::storage ? widen<A>(narrow<S>(value)) : value;
    }
  }
}

/// The window that a continuation of the row would need: the last kernel - 1 positions up to the
/// last token, raw inputs copied.
/// shapes    final_state [kernel - 1, C]
/// writes    all of it; 0 in slots of padding, of another document, and before a row without state
/// alias     may be inputs.state itself
/// specials  no token: the state as it was given
/// source    spec/gdn.md 2.2
template <Storage S, Storage P>
void conv_final_state(const Segments& segments, const ConvInputs<S, P>& inputs,
                      MatrixView<S> final_state) {
  const std::int64_t last = segments.last_valid();
  for (std::int64_t i = 0; i < inputs.kernel() - 1; ++i) {
    // The window of the last token without its oldest slot. In place, a row is only ever read from
    // one at or behind it.
    const WindowSlot slot = last >= 0 ? window_slot(segments, inputs.kernel(), last, i + 1)
                                      : WindowSlot{WindowSlot::From::state, i};
    if (const S* const row = inputs.row(slot)) {
      std::copy_n(row, inputs.columns(), final_state.row(i).begin());
    } else {
      std::fill_n(final_state.row(i).begin(), inputs.columns(), S(0));
    }
  }
}

/// Where the cotangents of a column block go; d_state may be null, parameters as usual.
template <Accumulator A>
struct ConvCotangents {
  MatrixView<A> d_x{};            // [T,C]
  WeightCotangent<A> d_weight{};  // [C,kernel]
  VectorCotangent<A> d_bias{};    // [C]
  MatrixView<A> d_state{};        // [kernel - 1,C]
};

/// Backward of conv_forward and conv_final_state.
///   dz[t] = d_y[t] s (1 + z (1 - s)),  s = sigmoid(z[t])
///   each slot that z[t] read gets weight[:,w] dz[t]; d_weight[:,w] = sum_t dz[t] slot(t, w)
///   each slot that the final state was copied from gets that row's cotangent
/// shapes    z, d_y [T,C] (z as the forward wrote it); d_final_state [kernel - 1, C] or null
/// writes    all of d_x and d_state, 0 where nothing was read; parameters as they say
/// alias     d_state may be d_final_state itself, everything else is disjoint
/// specials  z and d_y at padding are not read
/// order     tokens ascending, parameter sums in blocks of tokens
/// memory    taps and their sums, 3 [kernel, C] in A
/// source    spec/gdn.md 2.3
template <Storage S, Storage P, Accumulator A>
void conv_backward(const Segments& segments, const ConvInputs<S, P>& inputs, ConstMatrixView<A> z,
                   ConstMatrixView<A> d_y, ConstMatrixView<A> d_final_state,
                   const ConvCotangents<A>& out) {
  const std::int64_t columns = inputs.columns();
  const std::int64_t kernel = inputs.kernel();
  detail::Matrix<A> taps(kernel, columns);
  for (std::int64_t c = 0; c < columns; ++c) {
    for (std::int64_t w = 0; w < kernel; ++w) {
      taps.view()(w, c) = widen<A>(inputs.weight(c, w));
    }
  }
  detail::Matrix<A> d_window(kernel - 1, columns);  // of the given state
  const auto cotangent_row = [&](const WindowSlot& slot) -> A* {
    switch (slot.from) {
      case WindowSlot::From::token:
        return &out.d_x(slot.index, 0);
      case WindowSlot::From::state:
        return &d_window.view()(slot.index, 0);
      case WindowSlot::From::nothing:
        break;
    }
    return nullptr;
  };

  const bool sum_weight = out.d_weight.wanted();
  const bool sum_bias = out.d_bias.wanted();
  detail::TokenSums<A> weight_sums(sum_weight ? kernel * columns : 0);
  detail::TokenSums<A> bias_sums(sum_bias ? columns : 0);
  std::vector<A> dz(static_cast<std::size_t>(columns));
  for (std::int64_t t = 0; t < segments.tokens(); ++t) {
    // Every slot looks back, so row t has not been added to yet.
    std::fill_n(&out.d_x(t, 0), columns, A(0));
    if (!segments.valid(t)) {
      continue;
    }
    for (std::int64_t c = 0; c < columns; ++c) {
      const A s = sigmoid(z(t, c));
      dz[static_cast<std::size_t>(c)] = d_y(t, c) * s * (A(1) + z(t, c) * (A(1) - s));
    }
    const A* const dz_row = dz.data();
    A* const weight_sum = sum_weight ? weight_sums.next_token().data() : nullptr;
    for (std::int64_t w = 0; w < kernel; ++w) {
      const WindowSlot slot = window_slot(segments, kernel, t, w);
      if (A* const d_slot = cotangent_row(slot)) {
        const A* const tap = &taps.view()(w, 0);
        for (std::int64_t c = 0; c < columns; ++c) {
          d_slot[c] += tap[c] * dz_row[c];
        }
      }
      if (const S* const x = inputs.row(slot); x != nullptr && sum_weight) {
        for (std::int64_t c = 0; c < columns; ++c) {
          weight_sum[w * columns + c] += dz_row[c] * widen<A>(x[c]);
        }
      }
    }
    if (sum_bias) {
      const std::span<A> sum = bias_sums.next_token();
      for (std::int64_t c = 0; c < columns; ++c) {
        sum[static_cast<std::size_t>(c)] += dz_row[c];
      }
    }
  }

  if (!d_final_state.is_null()) {
    const std::int64_t last = segments.last_valid();
    for (std::int64_t i = 0; i < kernel - 1; ++i) {
      const WindowSlot slot = last >= 0 ? window_slot(segments, kernel, last, i + 1)
                                        : WindowSlot{WindowSlot::From::state, i};
      if (A* const d_slot = cotangent_row(slot)) {
        for (std::int64_t c = 0; c < columns; ++c) {
          d_slot[c] += d_final_state(i, c);
        }
      }
    }
  }
  if (!out.d_state.is_null()) {
    detail::copy<A>(d_window.view(), out.d_state);
  }
  if (sum_weight) {
    const std::span<const A> total = weight_sums.total();
    for (std::int64_t c = 0; c < columns; ++c) {
      for (std::int64_t w = 0; w < kernel; ++w) {
        detail::deliver(total[static_cast<std::size_t>(w * columns + c)], out.d_weight.values(c, w),
                        out.d_weight.write);
      }
    }
  }
  if (sum_bias) {
    const std::span<const A> total = bias_sums.total();
    for (std::size_t c = 0; c < total.size(); ++c) {
      detail::deliver(total[c], out.d_bias.values[c], out.d_bias.write);
    }
  }
}

}  // namespace heddle::gdn::reference

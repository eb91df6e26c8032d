#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "heddle/core/elementwise.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/chunk.hpp"
#include "heddle/gdn/detail/chunk_math.hpp"
#include "heddle/gdn/detail/conv_rows.hpp"
#include "heddle/gdn/detail/conv_tile.hpp"
#include "heddle/gdn/detail/gate_rows.hpp"
#include "heddle/gdn/detail/layer_row.hpp"
#include "heddle/gdn/detail/recurrence_rows.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/gates.hpp"

namespace heddle::gdn::detail {

/// A layer's parameters as one token after the other wants them.
///
/// memory    of the workspace: kernel + 1 rows of qkv_columns and a row of value_heads in A
template <Storage S, Storage P, Accumulator A>
class DecodeParameters {
 public:
  DecodeParameters(const Dims& of, const ConvInputs<S, P>& conv, const GateInputs<S, A>& gates,
                   const Options& wanted, Workspace& workspace)
      : dims(of),
        options(wanted),
        taps(workspace.take<A>((of.kernel + 1) * of.qkv_columns()).data(), of.kernel + 1,
             of.qkv_columns()),
        has_bias(!conv.bias.empty()),
        rate(take_rates(gates.A_log, workspace)),
        dt_bias(gates.dt_bias) {
    fill_taps(conv, taps);
  }
  [[nodiscard]] static std::size_t workspace_bytes(const Dims& dims) {
    return Workspace::bytes_for<A>((dims.kernel + 1) * dims.qkv_columns()) +
           Workspace::bytes_for<A>(dims.value_heads);
  }

  const Dims dims;
  const Options options;
  const MatrixView<A> taps;  // the bias last
  const bool has_bias;
  const std::span<const A> rate;
  const std::span<const A> dt_bias;
};

/// One token's inputs, whole rows.
template <Storage S>
struct DecodeToken {
  const S* qkv;
  const S* a;
  const S* b;
};

/// The decode step of one key head and its value heads.
///
/// memory    of the workspace: what one token's q, k, v, gates and a panel of state take, in A
template <Storage S, Storage P, Accumulator A>
class DecodeHeads {
 public:
  static constexpr std::int64_t panel = state_panel_columns<A>;

  template <class Memory>
  DecodeHeads(const DecodeParameters<S, P, A>& parameters, std::int64_t key_head, Memory& memory)
      : DecodeHeads(parameters.dims, memory) {
    parameters_ = &parameters;
    key_head_ = key_head;
  }

  [[nodiscard]] static std::size_t workspace_bytes(const Dims& dims) {
    ScratchCounter counter;
    const DecodeHeads heads(dims, counter);
    return counter.bytes();
  }

  /// The window of these heads moves on by a position that holds nothing.
  void shift_empty(MatrixView<S> window) const {
    const Dims& dims = parameters_->dims;
    const std::int64_t first_head = key_head_ * dims.group();
    const auto shift = [&](std::int64_t column, std::int64_t columns) {
      for (std::int64_t slot = 0; slot < window.rows(); ++slot) {
        if (slot + 1 == window.rows()) {
          std::fill_n(&window(slot, column), columns, S(0));
        } else {
          std::copy_n(&window(slot + 1, column), columns, &window(slot, column));
        }
      }
    };
    shift(dims.query_column(key_head_), dims.key_dim);
    shift(dims.key_column(key_head_), dims.key_dim);
    shift(dims.value_column(first_head), dims.group() * dims.value_dim);
  }

  /// A token of the document that window and state belong to, or, where it starts one, of another:
  /// both are then written without having been read.
  template <Storage O>
  void step(const DecodeToken<S>& token, bool starts, MatrixView<S> window, MatrixView<A> state,
            O* o) {
    const Dims& dims = parameters_->dims;
    const std::int64_t first_head = key_head_ * dims.group();
    convolve(dims.query_column(key_head_), token.qkv, starts, window, q_);
    convolve(dims.key_column(key_head_), token.qkv, starts, window, k_);
    convolve(dims.value_column(first_head), token.qkv, starts, window,
             v_.first(static_cast<std::size_t>(dims.group() * dims.value_dim)));
    normalise(A(1) / std::sqrt(static_cast<A>(dims.key_dim)), q_);
    normalise(A(1), k_);
    strengths(token.b + first_head, highest_strength<A>(parameters_->options.beta_range),
              beta_.data(), dims.group());
    if (starts) {
      std::fill(decay_.begin(), decay_.end(), A(1));
    } else {
      decays(token.a + first_head, parameters_->rate.data() + first_head,
             parameters_->dt_bias.data() + first_head, decay_.data(), dims.group());
      transform_in_place(Elementwise::exp, decay_);
    }
    for (std::int64_t member = 0; member < dims.group(); ++member) {
      move(member, starts, state.row_block(dims.state_row(first_head + member), dims.key_dim));
      O* const to = o + (first_head + member) * dims.value_dim;
      for (std::int64_t i = 0; i < dims.value_dim; ++i) {
        to[i] = narrow<O>(o_[static_cast<std::size_t>(i)]);
      }
    }
  }

 private:
  template <class Memory>
  DecodeHeads(const Dims& dims, Memory& memory)
      : rows_(memory.template take<const S*>(dims.kernel)),
        row_taps_(memory.template take<const A*>(dims.kernel)),
        q_(memory.template take<A>(dims.key_dim)),
        k_(memory.template take<A>(dims.key_dim)),
        v_(memory.template take<A>(dims.group() * dims.value_dim + panel)),
        o_(memory.template take<A>(dims.value_dim + panel)),
        beta_(memory.template take<A>(dims.group())),
        decay_(memory.template take<A>(dims.group())),
        padded_(memory.template take<A>(dims.value_dim % panel == 0 ? 0 : dims.key_dim * panel)) {
    std::fill(v_.begin(), v_.end(), A(0));  // behind the last head something is read
  }

  /// silu of the window that ends at this token, over the columns of y; the window moves on.
  void convolve(std::int64_t column, const S* x, bool starts, MatrixView<S> window,
                std::span<A> y) {
    const std::int64_t older = parameters_->dims.window_rows();
    const auto columns = static_cast<std::int64_t>(y.size());
    int filled = 0;
    for (std::int64_t slot = starts ? older : 0; slot <= older; ++slot) {
      const auto at = static_cast<std::size_t>(filled);
      rows_[at] = slot < older ? &window(slot, column) : x + column;
      row_taps_[at] = &parameters_->taps(slot, column);
      ++filled;
    }
    conv_window<ConvFinish::silu>(ConvWindow<S, A>{
        .rows = rows_.data(),
        .taps = row_taps_.data(),
        .filled = filled,
        .columns = columns,
        .bias = parameters_->has_bias ? &parameters_->taps(older + 1, column) : nullptr,
        .in = nullptr,
        .out = y.data(),
        .rounded = parameters_->options.conv_output == ConvOutput::storage});
    for (std::int64_t slot = 0; slot < older; ++slot) {
      S* const to = &window(slot, column);
      if (slot + 1 == older) {
        std::copy_n(x + column, columns, to);
      } else if (starts) {
        std::fill_n(to, columns, S(0));
      } else {
        std::copy_n(&window(slot + 1, column), columns, to);
      }
    }
  }

  void normalise(A scale, std::span<A> x) const {
    const Options& options = parameters_->options;
    const auto columns = static_cast<std::int64_t>(x.size());
    current_chunk_math<A>().normalise_rows(options.norm, static_cast<A>(options.eps), scale,
                                           x.data(), columns, 1, columns, x.data(), columns);
  }

  /// A value head's state in the caller's memory, a panel of columns at a time; o_ holds its output.
  void move(std::int64_t member, bool starts, MatrixView<A> state) {
    const Dims& dims = parameters_->dims;
    const auto at = static_cast<std::size_t>(member);
    const auto gate = RecurrenceGate<A>::at_once(beta_[at], decay_[at]);
    for (std::int64_t column = 0; column < dims.value_dim; column += panel) {
      const std::int64_t columns = std::min(panel, dims.value_dim - column);
      const MatrixView<A> block = state.column_block(column, columns);
      // A last panel that is not full is moved on elsewhere: a kernel takes whole ones.
      const MatrixView<A> moved =
          columns == panel ? block : MatrixView<A>(padded_.data(), dims.key_dim, columns, panel);
      if (starts) {
        clear_rows(moved);
      } else if (columns < panel) {
        load_rows<A, A>(block, moved);
      }
      recurrence_run(RecurrenceRun<A>{.state = moved.data(),
                                      .state_stride = moved.stride(),
                                      .key_dim = dims.key_dim,
                                      .tokens = 1,
                                      .q = q_.data(),
                                      .k = k_.data(),
                                      .qk_stride = 0,
                                      .v = v_.data() + member * dims.value_dim + column,
                                      .v_stride = 0,
                                      .o = o_.data() + column,
                                      .o_stride = 0,
                                      .gates = &gate});
      if (columns < panel) {
        store_rows<A, A>(moved, block);
      }
    }
  }

  const DecodeParameters<S, P, A>* parameters_ = nullptr;
  std::int64_t key_head_ = 0;
  std::span<const S*> rows_;
  std::span<const A*> row_taps_;
  std::span<A> q_;
  std::span<A> k_;
  std::span<A> v_;
  std::span<A> o_;
  std::span<A> beta_;
  std::span<A> decay_;
  std::span<A> padded_;  // [key_dim, panel]
};

}  // namespace heddle::gdn::detail

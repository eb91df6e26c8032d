#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/detail/conv_rows.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"

namespace heddle::gdn {

/// A column block of the convolution's inputs. S stores x and the state, P the parameters.
///
/// shapes    x [T,C]; weight [C,kernel], last tap the current token; bias [C] or empty; state
///           [kernel - 1, C], oldest first, or null: zeros; halo_valid [kernel - 1] or empty: which
///           rows of the state hold a token of the document that the row continues, all where empty
template <Storage S, Storage P>
struct ConvInputs {
  ConstMatrixView<S> x{};
  ConstMatrixView<P> weight{};
  std::span<const P> bias{};
  ConstMatrixView<S> state{};
  std::span<const std::uint8_t> halo_valid{};

  [[nodiscard]] std::int64_t columns() const { return weight.rows(); }
  [[nodiscard]] std::int64_t kernel() const { return weight.cols(); }

  /// The state's row, null where there is none of this document.
  [[nodiscard]] const S* state_row(std::int64_t slot) const {
    const bool valid = halo_valid.empty() || halo_valid[static_cast<std::size_t>(slot)] != 0;
    return state.is_null() || !valid ? nullptr : &state(slot, 0);
  }
};

namespace detail {

/// What a window's slot reads, null for nothing: the row at position token - (kernel - 1) + slot,
/// before the row the state's; nothing where that is padding or of another document.
template <Storage S, Storage P>
[[nodiscard]] const S* slot_row(const Segments& segments, const ConvInputs<S, P>& inputs,
                                std::int64_t token, std::int64_t slot) {
  const std::int64_t position = token - (inputs.kernel() - 1) + slot;
  if (position < 0) {
    return segments.epoch(token) == 0 ? inputs.state_row(position + inputs.kernel() - 1) : nullptr;
  }
  const bool same_document =
      segments.valid(position) && segments.epoch(position) == segments.epoch(token);
  return same_document ? &inputs.x(position, 0) : nullptr;
}

/// Weights and bias as the kernels want them: a tap's of all columns side by side.
///
/// shapes    taps [kernel + 1, columns], the bias last, left alone where there is none
template <Storage S, Storage P, Accumulator A>
void fill_taps(const ConvInputs<S, P>& inputs, MatrixView<A> taps) {
  const std::int64_t kernel = inputs.kernel();
  for (std::int64_t c = 0; c < inputs.columns(); ++c) {
    for (std::int64_t w = 0; w < kernel; ++w) {
      taps(w, c) = widen<A>(inputs.weight(c, w));
    }
    if (!inputs.bias.empty()) {
      taps(kernel, c) = widen<A>(inputs.bias[static_cast<std::size_t>(c)]);
    }
  }
}

/// Convolution of a column block over ranges of tokens, with its weights as the kernels want them.
///
/// memory    (kernel + 1) rows of the columns in A and 2 kernel pointers of the workspace
template <Storage S, Storage P, Accumulator A>
class ConvTile {
 public:
  ConvTile(const Segments& segments, const ConvInputs<S, P>& inputs, ConvOutput output,
           Workspace& workspace)
      : segments_(segments),
        inputs_(inputs),
        output_(output),
        taps_(workspace.take<A>((inputs.kernel() + 1) * inputs.columns()).data(),
              inputs.kernel() + 1, inputs.columns()),
        rows_(workspace.take<const S*>(inputs.kernel())),
        row_taps_(workspace.take<const A*>(inputs.kernel())) {
    fill_taps(inputs, taps_);
  }

  [[nodiscard]] static std::size_t workspace_bytes(std::int64_t columns, std::int64_t kernel) {
    return Workspace::bytes_for<A>((kernel + 1) * columns) +
           Workspace::bytes_for<const S*>(kernel) + Workspace::bytes_for<const A*>(kernel);
  }

  [[nodiscard]] std::int64_t columns() const { return inputs_.columns(); }
  [[nodiscard]] std::int64_t kernel() const { return inputs_.kernel(); }
  [[nodiscard]] const ConvInputs<S, P>& inputs() const { return inputs_; }
  [[nodiscard]] const Segments& segments() const { return segments_; }
  [[nodiscard]] const A* tap(std::int64_t slot) const { return &taps_(slot, 0); }

  /// y of the range's tokens, 0 at padding. `streamed` as ConvRun has it.
  void forward(TokenRange range, MatrixView<A> y, bool streamed = false) const {
    apply<ConvFinish::silu>(range, {}, y, streamed);
  }

  /// The cotangent of z from that of y; rows of padding are neither read nor written.
  void slope(TokenRange range, ConstMatrixView<A> d_y, MatrixView<A> d_z) const {
    apply<ConvFinish::slope>(range, d_y, d_z, false);
  }

  /// sums[w] += sum_t dz[t] slot(t, w), sums[kernel] += sum_t dz[t], tokens ascending.
  void add_sums(TokenRange range, ConstMatrixView<A> d_z, MatrixView<A> sums) const {
    for_windows(
        range,
        [&](std::int64_t t, std::int64_t count) {
          sum_run(ConvRun<S, A>{.x = &inputs_.x(t - (kernel() - 1), 0),
                                .x_stride = inputs_.x.stride(),
                                .tokens = count,
                                .columns = columns(),
                                .kernel = kernel(),
                                .in = &d_z(t - range.first, 0),
                                .in_stride = d_z.stride(),
                                .out = sums.data(),
                                .out_stride = sums.stride()});
        },
        [&](std::int64_t t) {
          const A* const row = &d_z(t - range.first, 0);
          for (std::int64_t w = 0; w < kernel(); ++w) {
            if (const S* const x = slot_row(segments_, inputs_, t, w)) {
              add_product<S, A>(row, x, &sums(w, 0), columns());
            }
          }
          add_product<A, A>(row, nullptr, &sums(kernel(), 0), columns());
        },
        [](std::int64_t) {});
  }

  /// The cotangent of the range's rows of x, 0 at padding, from d_z of the range and of the kernel - 1
  /// positions behind it; rows of padding in d_z are not read.
  void d_x(TokenRange range, ConstMatrixView<A> d_z, MatrixView<A> to, bool streamed) const {
    const std::int64_t tokens = segments_.tokens();
    std::int64_t run_end = range.first;  // of the neighbouring tokens of one document from p on
    for (std::int64_t p = range.first; p < range.end();) {
      A* const row = &to(p - range.first, 0);
      if (!segments_.valid(p)) {
        std::fill_n(row, columns(), A(0));
        ++p;
        continue;
      }
      if (run_end <= p) {
        run_end = p + 1;
        while (run_end < std::min(tokens, range.end() + kernel() - 1) && segments_.valid(run_end) &&
               !segments_.starts(run_end)) {
          ++run_end;
        }
      }
      const std::int64_t whole = std::min(range.end(), run_end - (kernel() - 1)) - p;
      if (whole > 0) {
        conv_run<ConvFinish::none>(ConvRun<A, A>{.x = &d_z(p - range.first, 0),
                                                 .x_stride = d_z.stride(),
                                                 .tokens = whole,
                                                 .columns = columns(),
                                                 .kernel = kernel(),
                                                 .taps = tap(kernel() - 1),
                                                 .tap_stride = -taps_.stride(),
                                                 .out = row,
                                                 .out_stride = to.stride(),
                                                 .streamed = streamed});
        p += whole;
      } else {
        d_position(p, range.first, d_z, row);
        ++p;
      }
    }
  }

  /// The cotangent of what position p holds, a token or, where p < 0, a row of the state, from d_z
  /// whose first row is of token `first`.
  void d_position(std::int64_t p, std::int64_t first, ConstMatrixView<A> d_z, A* to) const {
    const std::int32_t epoch = p < 0 ? 0 : segments_.epoch(p);
    std::fill_n(to, columns(), A(0));
    const std::int64_t end = std::min(segments_.tokens(), p + kernel());
    for (std::int64_t t = std::max<std::int64_t>(p, 0); t < end; ++t) {
      if (segments_.valid(t) && segments_.epoch(t) == epoch) {
        add_product<A, A>(&d_z(t - first, 0), tap(kernel() - 1 - (t - p)), to, columns());
      }
    }
  }

 private:
  template <ConvFinish finish>
  void apply(TokenRange range, ConstMatrixView<A> in, MatrixView<A> out, bool streamed) const {
    const A* const bias = inputs_.bias.empty() ? nullptr : tap(kernel());
    const bool rounded = output_ == ConvOutput::storage;
    const auto in_row = [&](std::int64_t t) {
      return in.is_null() ? nullptr : &in(t - range.first, 0);
    };
    for_windows(
        range,
        [&](std::int64_t t, std::int64_t count) {
          conv_run<finish>(ConvRun<S, A>{.x = &inputs_.x(t - (kernel() - 1), 0),
                                         .x_stride = inputs_.x.stride(),
                                         .tokens = count,
                                         .columns = columns(),
                                         .kernel = kernel(),
                                         .taps = taps_.data(),
                                         .tap_stride = taps_.stride(),
                                         .bias = bias,
                                         .in = in_row(t),
                                         .in_stride = in.stride(),
                                         .out = &out(t - range.first, 0),
                                         .out_stride = out.stride(),
                                         .rounded = rounded,
                                         .streamed = streamed});
        },
        [&](std::int64_t t) {
          int filled = 0;
          for (std::int64_t w = 0; w < kernel(); ++w) {
            if (const S* const x = slot_row(segments_, inputs_, t, w)) {
              rows_[static_cast<std::size_t>(filled)] = x;
              row_taps_[static_cast<std::size_t>(filled)] = tap(w);
              ++filled;
            }
          }
          conv_window<finish>(ConvWindow<S, A>{.rows = rows_.data(),
                                               .taps = row_taps_.data(),
                                               .filled = filled,
                                               .columns = columns(),
                                               .bias = bias,
                                               .in = in_row(t),
                                               .out = &out(t - range.first, 0),
                                               .rounded = rounded});
        },
        [&](std::int64_t t) {
          if constexpr (finish == ConvFinish::silu) {
            std::fill_n(&out(t - range.first, 0), columns(), A(0));
          }
        });
  }

  /// Cuts a range: on_run(t, count) for windows whose every slot is a token of x, on_window(t) for
  /// others, on_padding(t).
  template <class OnRun, class OnWindow, class OnPadding>
  void for_windows(TokenRange range, const OnRun& on_run, const OnWindow& on_window,
                   const OnPadding& on_padding) const {
    std::int64_t behind = tokens_behind(range.first);
    for (std::int64_t t = range.first; t < range.end();) {
      if (!segments_.valid(t)) {
        behind = 0;
        on_padding(t);
        ++t;
        continue;
      }
      behind = segments_.starts(t) ? 0 : behind;
      if (behind < kernel() - 1) {
        on_window(t);
        ++behind;
        ++t;
        continue;
      }
      std::int64_t end = t + 1;
      while (end < range.end() && segments_.valid(end) && !segments_.starts(end)) {
        ++end;
      }
      on_run(t, end - t);
      behind += end - t;
      t = end;
    }
  }

  /// Neighbours before t that are of its document, without padding in between; kernel - 1 at most.
  [[nodiscard]] std::int64_t tokens_behind(std::int64_t t) const {
    std::int64_t behind = 0;
    while (behind < kernel() - 1 && behind < t && t < segments_.tokens() &&
           segments_.valid(t - 1 - behind) &&
           segments_.epoch(t - 1 - behind) == segments_.epoch(t)) {
      ++behind;
    }
    return behind;
  }

  const Segments& segments_;
  ConvInputs<S, P> inputs_;
  ConvOutput output_;
  MatrixView<A> taps_;  // [kernel + 1, columns], the bias last
  std::span<const S*> rows_;
  std::span<const A*> row_taps_;
};

}  // namespace detail
}  // namespace heddle::gdn

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heddle/core/scalar.hpp"
#include "heddle/core/streaming_copy.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/detail/conv_tile.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"

namespace heddle::gdn {

/// Where the cotangents of a column block go; d_state may be null, parameters as usual.
template <Accumulator A>
struct ConvCotangents {
  MatrixView<A> d_x{};            ///< [T,C]
  WeightCotangent<A> d_weight{};  ///< [C,kernel]
  VectorCotangent<A> d_bias{};    ///< [C]
  MatrixView<A> d_state{};        ///< [kernel - 1,C]
};

namespace detail {

/// Backward of a column block, ranges of tokens coming in descending order with padding alone between
/// them. A row of d_x needs d_z of the kernel - 1 positions behind it: those stay here from one range
/// to the next.
///
/// order     parameter sums: tokens ascending in a range, ranges as they come, in blocks of 256 tokens
///           or somewhat more
/// memory    of the workspace: most_tokens + 3 kernel + 1 rows of the columns in A
template <Storage S, Storage P, Accumulator A>
class ConvBackward {
 public:
  ConvBackward(const ConvTile<S, P, A>& tile, ConstMatrixView<A> d_final_state,
               const ConvCotangents<A>& out, bool streamed, std::int64_t most_tokens,
               Workspace& workspace)
      : tile_(tile),
        d_final_state_(d_final_state),
        out_(out),
        streamed_(streamed),
        d_z_(take_rows(workspace, most_tokens + tile.kernel() - 1)),
        block_(take_rows(workspace, tile.kernel() + 1)),
        total_(take_rows(workspace, tile.kernel() + 1)),
        first_(tile.segments().tokens()) {
    clear_rows(block_);
    clear_rows(total_);
  }

  [[nodiscard]] static std::size_t workspace_bytes(std::int64_t columns, std::int64_t kernel,
                                                   std::int64_t most_tokens) {
    return Workspace::bytes_for<A>((most_tokens + kernel - 1) * columns) +
           2 * Workspace::bytes_for<A>((kernel + 1) * columns);
  }

  void store(TokenRange range, ConstMatrixView<A> d_y) {
    clear_rows(out_.d_x.row_block(range.end(), first_ - range.end()));
    move_behind(range);
    tile_.slope(range, d_y, d_z_);
    if (out_.d_weight.wanted() || out_.d_bias.wanted()) {
      tile_.add_sums(range, d_z_, block_);
      block_tokens_ += range.count;
      if (block_tokens_ >= 256) {
        fold();
      }
    }
    const MatrixView<A> d_x = out_.d_x.row_block(range.first, range.count);
    tile_.d_x(range, d_z_, d_x, streamed_);
    for (std::int64_t i = 0; i < tile_.kernel() - 1; ++i) {
      const std::int64_t position = final_position(i);
      if (position >= range.first && position < range.end() && copied(position)) {
        add_row(&d_final_state_(i, 0), &d_x(position - range.first, 0));
      }
    }
  }

  void finish() {
    clear_rows(out_.d_x.row_block(0, first_));
    fold();
    if (!out_.d_state.is_null()) {
      move_behind({0, 0});
      write_d_state(block_);
    }
    for (std::int64_t c = 0; c < tile_.columns(); ++c) {
      if (out_.d_weight.wanted()) {
        for (std::int64_t w = 0; w < tile_.kernel(); ++w) {
          deliver(total_(w, c), out_.d_weight.values(c, w), out_.d_weight.write);
        }
      }
      if (out_.d_bias.wanted()) {
        deliver(total_(tile_.kernel(), c), out_.d_bias.values[static_cast<std::size_t>(c)],
                out_.d_bias.write);
      }
    }
    if (streamed_) {
      fence_stores();
    }
  }

 private:
  [[nodiscard]] MatrixView<A> take_rows(Workspace& workspace, std::int64_t count) const {
    return {workspace.take<A>(count * tile_.columns()).data(), count, tile_.columns()};
  }
  static void deliver(A value, A& cotangent, Write write) {
    cotangent = write == Write::accumulate ? cotangent + value : value;
  }
  void add_row(const A* from, A* to) const {
    add_product<A, A>(from, nullptr, to, tile_.columns());
  }

  /// Puts d_z of the kernel - 1 positions behind the range under the rows of its own tokens.
  void move_behind(TokenRange range) {
    const std::int64_t gap = first_ - range.end();  // of padding, whose rows nobody reads
    if (stored_) {
      for (std::int64_t i = tile_.kernel() - 2; i >= gap; --i) {
        std::copy_n(&d_z_(i - gap, 0), tile_.columns(), &d_z_(range.count + i, 0));
      }
    }
    first_ = range.first;
    stored_ = true;
  }

  void fold() {
    for (std::int64_t row = 0; row < block_.rows(); ++row) {
      add_row(&block_(row, 0), &total_(row, 0));
    }
    clear_rows(block_);
    block_tokens_ = 0;
  }

  /// The position that row i of the final window was copied from, below 0 a row of the given state;
  /// nowhere near where there is no token or no cotangent of it.
  [[nodiscard]] std::int64_t final_position(std::int64_t i) const {
    const std::int64_t last = tile_.segments().last_valid();
    return d_final_state_.is_null() || last < 0 ? -tile_.kernel() : last - (tile_.kernel() - 2) + i;
  }
  [[nodiscard]] bool copied(std::int64_t position) const {
    const Segments& segments = tile_.segments();
    const std::int32_t epoch = segments.epoch(segments.last_valid());
    return position < 0 ? epoch == 0
                        : segments.valid(position) && segments.epoch(position) == epoch;
  }

  /// The cotangent of the given state; `d` is scratch, for d_state may lie where the final state's is
  /// still read.
  void write_d_state(MatrixView<A> d) const {
    const std::int64_t rows = tile_.kernel() - 1;
    const bool passed_through = tile_.segments().last_valid() < 0;
    for (std::int64_t slot = 0; slot < rows; ++slot) {
      std::fill_n(&d(slot, 0), d.cols(), A(0));
      if (passed_through && !d_final_state_.is_null()) {
        add_row(&d_final_state_(slot, 0), &d(slot, 0));
      } else if (tile_.inputs().state_row(slot) != nullptr) {
        tile_.d_position(slot - rows, 0, d_z_, &d(slot, 0));
      }
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t slot = final_position(i) + rows;
      if (slot >= 0 && slot < rows && copied(slot - rows) &&
          tile_.inputs().state_row(slot) != nullptr) {
        add_row(&d_final_state_(i, 0), &d(slot, 0));
      }
    }
    for (std::int64_t slot = 0; slot < rows; ++slot) {
      std::copy_n(&d(slot, 0), d.cols(), &out_.d_state(slot, 0));
    }
  }

  const ConvTile<S, P, A>& tile_;
  ConstMatrixView<A> d_final_state_;
  ConvCotangents<A> out_;
  bool streamed_;
  MatrixView<A> d_z_;
  MatrixView<A> block_;  // sums of the current block of tokens: a row a tap, then the bias
  MatrixView<A> total_;
  std::int64_t first_;  // token of d_z's row 0; all of d_x behind it is written
  std::int64_t block_tokens_ = 0;
  bool stored_ = false;
};

}  // namespace detail
}  // namespace heddle::gdn

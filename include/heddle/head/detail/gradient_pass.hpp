#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "heddle/core/factor.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/detail/block_tasks.hpp"
#include "heddle/head/detail/logits_pass.hpp"
#include "heddle/head/options.hpp"

namespace heddle::head::detail {

template <class T>
void copy_rows(MatrixView<const T> from, MatrixView<T> to) {
  for (std::int64_t row = 0; row < from.rows(); ++row) {
    std::ranges::copy(from.row(row), to.row(row).begin());
  }
}

template <class T>
void add_rows(MatrixView<const T> from, MatrixView<T> to) {
  for (std::int64_t row = 0; row < from.rows(); ++row) {
    const T* const x = from.row(row).data();
    T* const y = to.row(row).data();
    for (std::int64_t i = 0; i < from.cols(); ++i) {
      y[i] += x[i];
    }
  }
}

/// to [cols, rows] = the rows `tokens` of from [.., cols], transposed, in blocks that stay in a cache.
template <class T>
void transpose_rows(MatrixView<const T> from, std::span<const std::int32_t> tokens,
                    MatrixView<T> to) {
  constexpr std::int64_t block = 16;
  const auto rows = static_cast<std::int64_t>(tokens.size());
  for (std::int64_t first = 0; first < rows; first += block) {
    const std::int64_t last = std::min(first + block, rows);
    for (std::int64_t col = 0; col < from.cols(); col += block) {
      const std::int64_t end = std::min(col + block, from.cols());
      for (std::int64_t row = first; row < last; ++row) {
        const T* const x = from.row(tokens[static_cast<std::size_t>(row)]).data();
        for (std::int64_t c = col; c < end; ++c) {
          to(c, row) = x[c];
        }
      }
    }
  }
}

/// Both products of the cotangents of logits, kept as D, a tile of columns at a time.
///
///   d_hidden  K = columns, in blocks that begin at each rank's first column: a row's bits depend on no
///             chunk and no tile. Ranks' shares are added in rank order
///   d_weight  K = a chunk's rows; chunks are added in order
template <Storage S, Storage W, Accumulator A, Storage D>
class GradientPass {
 public:
  template <class Space>
  GradientPass(Space& space, const Dims& dims, const Inputs<S, W>& inputs,
               const Cotangents<A>& cotangents, std::int64_t most_rows, std::int64_t shards,
               std::int64_t threads)
      : dims_(dims),
        inputs_(inputs),
        cotangents_(cotangents),
        shards_(shards),
        d_weight_write_(cotangents.d_weight.write) {
    const std::int64_t columns = std::min(product_columns, dims.vocab);
    if (wants_d_hidden()) {
      weight_ = RightTile<W>(space, columns, dims.hidden, threads);
      gathered_ = space.template take<A>(most_rows * dims.hidden).data();
      share_ = shards > 1 ? space.template take<A>(most_rows * dims.hidden).data() : nullptr;
    }
    if (wants_d_weight()) {
      if (inputs.layout == WeightLayout::dv) {
        d_logits_ = PackedTile<D>(space, most_rows, columns);
        by_hidden_ = space.template take<S>(dims.hidden * scratch_stride<S>(most_rows)).data();
      } else {
        hidden_ = PackedTile<S>(space, most_rows, dims.hidden);
      }
    }
  }

  /// d_hidden holds the share of the columns before these, and goes on from it.
  void add_to_d_hidden() { adds_to_d_hidden_ = true; }

  /// Scratch of one task.
  [[nodiscard]] static std::size_t piece_bytes(const Dims& dims, std::int64_t most_rows) {
    return std::max({product_bytes<D, W>(block_rows<W>, dims.hidden, product_columns),
                     product_bytes<S, D>(weight_rows, product_columns, most_rows),
                     product_bytes<D, S>(weight_rows, dims.hidden, most_rows)});
  }

  /// A chunk whose rows all have a cotangent.
  ///   before_tile(columns); make_rows(columns, first, last, scratch) -> rows [first, last) of d_logits
  ///   tile_rows(columns) -> all of them again, once they are made
  template <class BeforeTile, class MakeRows, class TileRows>
  void run(std::span<const std::int32_t> tokens, const BlockTasks& tasks,
           const BeforeTile& before_tile, const MakeRows& make_rows, const TileRows& tile_rows) {
    const auto rows = static_cast<std::int64_t>(tokens.size());
    if (rows == 0) {
      return;
    }
    const bool in_place = are_neighbours(tokens);
    MatrixView<A> d_hidden;
    if (wants_d_hidden()) {
      d_hidden = in_place ? cotangents_.d_hidden.row_block(tokens.front(), rows)
                          : MatrixView<A>(gathered_, rows, dims_.hidden);
    }
    if (wants_d_weight()) {
      load_hidden(tokens, tasks);
    }
    for_each_shard(dims_.vocab, shards_, [&](Columns held) {
      const MatrixView<A> share =
          shards_ > 1 && wants_d_hidden() ? MatrixView<A>(share_, rows, dims_.hidden) : d_hidden;
      for_each_tile(held, held.first, product_columns, [&](Columns columns) {
        before_tile(columns);
        if (wants_d_hidden()) {
          weight_.load(flipped(columns_of_weight(inputs_, columns)), shares_rows<W>(rows, tasks),
                       tasks);
        }
        const bool goes_on = adds_to_d_hidden_ && shards_ == 1;
        const Write write =
            columns.first == held.first && !goes_on ? Write::overwrite : Write::accumulate;
        tasks.run(rows, block_rows<W>, row_multiple,
                  [&](std::int64_t first, std::int64_t last, std::span<std::byte> scratch) {
                    const Factor<D> d_logits = make_rows(columns, first, last, scratch);
                    if (wants_d_hidden()) {
                      weight_.multiply_in(scratch, d_logits, share.row_block(first, last - first),
                                          write);
                    }
                  });
        if (wants_d_weight()) {
          add_d_weight(rows, columns, tile_rows(columns), tasks);
        }
      });
      if (shards_ > 1 && wants_d_hidden()) {
        tasks.run(rows, block_rows<W>, 1,
                  [&](std::int64_t first, std::int64_t last, std::span<std::byte>) {
                    const MatrixView<const A> from = share.row_block(first, last - first);
                    const MatrixView<A> to = d_hidden.row_block(first, last - first);
                    held.first == 0 && !adds_to_d_hidden_ ? copy_rows(from, to)
                                                          : add_rows(from, to);
                  });
      }
    });
    d_weight_write_ = Write::accumulate;
    if (wants_d_hidden() && !in_place) {
      for (std::int64_t row = 0; row < rows; ++row) {
        std::ranges::copy(d_hidden.row(row),
                          cotangents_.d_hidden.row(tokens[static_cast<std::size_t>(row)]).begin());
      }
    }
  }

  /// A d_weight that nothing was added to is zero where it was to be overwritten.
  void finish() {
    if (wants_d_weight() && d_weight_write_ == Write::overwrite) {
      for (std::int64_t row = 0; row < cotangents_.d_weight.values.rows(); ++row) {
        std::ranges::fill(cotangents_.d_weight.values.row(row), A(0));
      }
    }
  }

  [[nodiscard]] bool wants_d_hidden() const { return !cotangents_.d_hidden.is_null(); }
  [[nodiscard]] bool wants_d_weight() const { return cotangents_.d_weight.wanted(); }

 private:
  /// Rows of the weight's cotangent that a task forms.
  static constexpr std::int64_t weight_rows = 512;

  /// A chunk's hidden states as every tile of it will read them.
  void load_hidden(std::span<const std::int32_t> tokens, const BlockTasks& tasks) {
    if (inputs_.layout == WeightLayout::vd) {
      hidden_.load(picked_rows(inputs_.hidden, tokens), tasks);
      return;
    }
    const MatrixView<S> by_hidden = hidden_by_column(static_cast<std::int64_t>(tokens.size()));
    tasks.run(dims_.hidden, weight_rows, 64 / static_cast<std::int64_t>(sizeof(S)),
              [&](std::int64_t first, std::int64_t last, std::span<std::byte>) {
                transpose_rows(inputs_.hidden.column_block(first, last - first), tokens,
                               by_hidden.row_block(first, last - first));
              });
  }

  [[nodiscard]] MatrixView<S> hidden_by_column(std::int64_t rows) const {
    return {by_hidden_, dims_.hidden, rows, scratch_stride<S>(rows)};
  }

  void add_d_weight(std::int64_t rows, Columns columns, const Factor<D>& d_logits,
                    const BlockTasks& tasks) {
    const bool by_hidden = inputs_.layout == WeightLayout::dv;
    const MatrixView<A> result =
        by_hidden ? cotangents_.d_weight.values.column_block(columns.first, columns.count())
                  : cotangents_.d_weight.values.row_block(columns.first, columns.count());
    if (by_hidden) {
      d_logits_.load(d_logits, tasks);
    }
    tasks.run(result.rows(), weight_rows, row_multiple,
              [&](std::int64_t first, std::int64_t last, std::span<std::byte> scratch) {
                const std::int64_t count = last - first;
                const MatrixView<A> block = result.row_block(first, count);
                if (by_hidden) {
                  const MatrixView<const S> hidden = hidden_by_column(rows);
                  d_logits_.multiply_in(scratch, as_is(hidden.row_block(first, count)), block,
                                        d_weight_write_);
                } else {
                  hidden_.multiply_in(scratch, flipped(d_logits.column_block(first, count)), block,
                                      d_weight_write_);
                }
              });
  }

  const Dims& dims_;
  const Inputs<S, W>& inputs_;
  const Cotangents<A>& cotangents_;
  std::int64_t shards_;
  Write d_weight_write_;
  bool adds_to_d_hidden_ = false;
  RightTile<W> weight_;     // [columns, hidden]
  PackedTile<D> d_logits_;  // [rows, columns]
  PackedTile<S> hidden_;    // [rows, hidden], WeightLayout::vd
  S* by_hidden_ = nullptr;  // [hidden, rows], WeightLayout::dv
  A* gathered_ = nullptr;   // [rows, hidden]
  A* share_ = nullptr;      // [rows, hidden], of a rank
};

}  // namespace heddle::head::detail

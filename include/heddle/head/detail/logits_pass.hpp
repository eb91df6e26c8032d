#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "heddle/core/factor.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/detail/block_tasks.hpp"
#include "heddle/head/options.hpp"

namespace heddle::head::detail {

/// Columns [first, last).
struct Columns {
  std::int64_t first = 0;
  std::int64_t last = 0;

  [[nodiscard]] std::int64_t count() const { return last - first; }
  [[nodiscard]] bool hold(std::int64_t column) const { return first <= column && column < last; }
};

/// Calls body(columns) for each simulated rank that holds any, in rank order.
template <class Body>
void for_each_shard(std::int64_t vocab, std::int64_t shards, const Body& body) {
  Columns held;
  for (std::int64_t rank = 0; held.last < vocab; ++rank) {
    held.first = held.last;
    held.last += vocab / shards + (rank < vocab % shards ? 1 : 0);
    body(held);
  }
}

/// Calls body(columns) for each piece of `held` that one cell of the grid of `step` columns, from
/// `origin` on, covers.
template <class Body>
void for_each_tile(Columns held, std::int64_t origin, std::int64_t step, const Body& body) {
  for (std::int64_t first = held.first; first < held.last;) {
    const std::int64_t last = std::min(origin + ((first - origin) / step + 1) * step, held.last);
    body(Columns{first, last});
    first = last;
  }
}

/// Column of a target id, or -1 where it names none.
[[nodiscard]] inline std::int64_t target_column(std::int32_t id, std::int64_t vocab) {
  const std::int64_t wrapped = id < 0 ? id + vocab : std::int64_t{id};
  return wrapped >= 0 && wrapped < vocab ? wrapped : -1;
}

/// Elements between the rows of a scratch matrix: a cache line more than a whole page would be, so that
/// the rows of a column do not fall onto one set of the cache.
template <class T>
[[nodiscard]] constexpr std::int64_t scratch_stride(std::int64_t columns) {
  constexpr auto line = static_cast<std::int64_t>(64 / (sizeof(T) < 64 ? sizeof(T) : 64));
  const std::int64_t whole = (columns + line - 1) / line * line;
  return whole + line;
}

/// A chunk's active rows, as tokens of the call.
class ChunkRows {
 public:
  template <class Space>
  ChunkRows(Space& space, std::int64_t most) : tokens_(space.template take<std::int32_t>(most)) {}

  /// Calls body(tokens) for chunks of active rows: as few as `most` allows, as even as can be.
  template <class IsActive, class Body>
  void for_each_chunk(std::int64_t tokens, std::int64_t most, const IsActive& is_active,
                      const Body& body) {
    std::int64_t active = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      active += is_active(t) ? 1 : 0;
    }
    const std::int64_t chunks = (active + most - 1) / most;
    const std::int64_t rows = chunks == 0 ? 0 : (active + chunks - 1) / chunks;
    std::size_t count = 0;
    for (std::int64_t t = 0; t < tokens && active > 0; ++t) {
      if (is_active(t)) {
        tokens_[count++] = static_cast<std::int32_t>(t);
        --active;
        if (std::cmp_equal(count, rows) || active == 0) {
          body(std::span<const std::int32_t>(tokens_.first(count)));
          count = 0;
        }
      }
    }
  }

 private:
  std::span<std::int32_t> tokens_;
};

/// [hidden, columns] of the weight.
template <Storage S, Storage W>
[[nodiscard]] Factor<W> columns_of_weight(const Inputs<S, W>& inputs, Columns columns) {
  if (inputs.layout == WeightLayout::dv) {
    return as_is(inputs.weight.column_block(columns.first, columns.count()));
  }
  return transposed(inputs.weight.row_block(columns.first, columns.count()));
}

/// Logits of a chunk's rows, some columns at a time.
template <Storage S, Storage W, Accumulator A>
class LogitsPass {
 public:
  /// `columns` at most are asked for at a time.
  template <class Space>
  LogitsPass(Space& space, const Dims& dims, const Inputs<S, W>& inputs, std::int64_t columns,
             std::int64_t threads)
      : inputs_(inputs),
        weight_(space, dims.hidden, std::min({columns, product_columns, dims.vocab}), threads) {}

  /// Scratch of multiply_rows.
  [[nodiscard]] static std::size_t piece_bytes(const Dims& dims) {
    return product_bytes<S, W>(block_rows<W>, product_columns, dims.hidden);
  }

  /// For so many rows.
  void load(Columns columns, std::int64_t rows, const BlockTasks& tasks) {
    weight_.load(columns_of_weight(inputs_, columns), shares_rows<W>(rows, tasks), tasks);
  }

  /// All rows' logits of a group of columns into `logits` [rows, group]; on_row(row, its logits) as soon
  /// as they are complete, while they are in cache.
  template <class OnRow>
  void run(std::span<const std::int32_t> tokens, Columns group, MatrixView<A> logits,
           const BlockTasks& tasks, const OnRow& on_row) {
    for_each_tile(group, group.first, product_columns, [&](Columns columns) {
      load(columns, logits.rows(), tasks);
      tasks.run(logits.rows(), block_rows<W>, row_multiple,
                [&](std::int64_t first, std::int64_t last, std::span<std::byte> scratch) {
                  const std::int64_t count = last - first;
                  multiply_rows(tokens.subspan(static_cast<std::size_t>(first),
                                               static_cast<std::size_t>(count)),
                                logits.row_block(first, count)
                                    .column_block(columns.first - group.first, columns.count()),
                                scratch);
                  for (std::int64_t row = first; row < last && columns.last == group.last; ++row) {
                    on_row(row, logits.row(row));
                  }
                });
    });
  }

  void multiply_rows(std::span<const std::int32_t> tokens, MatrixView<A> logits,
                     std::span<std::byte> scratch) const {
    weight_.multiply_in(scratch, picked_rows(inputs_.hidden, tokens), logits, Write::overwrite);
  }

 private:
  const Inputs<S, W>& inputs_;
  RightTile<W> weight_;
};

}  // namespace heddle::head::detail

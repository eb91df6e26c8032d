#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "heddle/core/elementwise.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"

namespace heddle::gdn {

/// Tokens [first, first + count) of a row.
struct TokenRange {
  std::int64_t first = 0;
  std::int64_t count = 0;

  [[nodiscard]] constexpr std::int64_t end() const { return first + count; }
  friend constexpr bool operator==(const TokenRange&, const TokenRange&) = default;
};

/// What one task computes: a key head with some of its value heads, and of each of these some columns
/// of its values. State, v and o of different slices are disjoint; q, k and what follows from them
/// alone is worked out by each slice for itself.
struct HeadSlice {
  std::int64_t key_head = 0;
  std::int64_t first_value_head = 0;  ///< of the layer, not of the group
  std::int64_t value_heads = 0;
  std::int64_t first_column = 0;  ///< of value_dim
  std::int64_t columns = 0;

  /// A key head whole.
  [[nodiscard]] static constexpr HeadSlice of_key_head(const Dims& dims, std::int64_t key_head) {
    return {key_head, key_head * dims.group(), dims.group(), 0, dims.value_dim};
  }
  [[nodiscard]] constexpr std::int64_t value_columns() const { return value_heads * columns; }
};

/// Some tokens' q, k and v in scratch, in the type they are computed in: the convolution's output,
/// neither normalised nor scaled. Backward: their cotangents.
///
/// shapes    q, k [n, key_dim]; v [n, slice.value_columns()], value head after value head; any strides
/// specials  a null view is not wanted
template <Accumulator A>
struct QkvTile {
  MatrixView<A> q{};
  MatrixView<A> k{};
  MatrixView<A> v{};
};

/// Where the recurrence gets its rows from, a tile at a time: an array, or a convolution that runs over
/// the tile's tokens in scratch. begin() opens a slice in the calling thread; its scratch comes from
/// the workspace and lives until the caller's frame ends.
///
///   load(range, tile)   fills every wanted view, exactly 0 at padding, whose memory it does not read
///
/// Ranges come in any order, and again.
template <class Source, class A>
concept TileSource = Accumulator<A> &&
    requires(const Source& source, const HeadSlice& slice, TokenRange range, const QkvTile<A>& tile,
             Workspace& workspace) {
  source.begin(slice, std::int64_t{64}, workspace).load(range, tile);
  { source.workspace_bytes(slice, std::int64_t{64}) } -> std::convertible_to<std::size_t>;
};

/// A source whose rows' cotangents have somewhere to go. Slices are whole key heads.
///
///   store(range, d_tile)  after the load of the same range, for ranges in descending order that do not
///                         overlap. Rows of padding hold zeros. Padding may lie between two ranges,
///                         before the first and behind the last: its cotangents are the port's to write
///   finish()              after the last store of the slice, also where there was none
template <class Port, class A>
concept TilePort = TileSource<Port, A> &&
    requires(const Port& port, const HeadSlice& slice, TokenRange range, const QkvTile<A>& tile,
             Workspace& workspace) {
  port.begin(slice, std::int64_t{64}, workspace).store(range, tile);
  port.begin(slice, std::int64_t{64}, workspace).finish();
};

namespace detail {

/// Rows of an array, widened.
template <Storage S, Accumulator A>
void load_rows(ConstMatrixView<S> from, MatrixView<A> to) {
  for (std::int64_t row = 0; row < to.rows(); ++row) {
    if constexpr (std::same_as<S, A>) {
      std::copy_n(&from(row, 0), to.cols(), &to(row, 0));
    } else if constexpr (std::same_as<S, bfloat16> && std::same_as<A, float>) {
      heddle::detail::convert_values(&from(row, 0), &to(row, 0), to.cols());
    } else {
      for (std::int64_t col = 0; col < to.cols(); ++col) {
        to(row, col) = widen<A>(from(row, col));
      }
    }
  }
}

/// Rows of an array, rounded.
template <Storage S, Accumulator A>
void store_rows(ConstMatrixView<A> from, MatrixView<S> to) {
  for (std::int64_t row = 0; row < to.rows(); ++row) {
    if constexpr (std::same_as<S, A>) {
      std::copy_n(&from(row, 0), to.cols(), &to(row, 0));
    } else if constexpr (std::same_as<S, bfloat16> && std::same_as<A, float>) {
      heddle::detail::convert_values(&from(row, 0), &to(row, 0), to.cols());
    } else {
      for (std::int64_t col = 0; col < to.cols(); ++col) {
        to(row, col) = narrow<S>(from(row, col));
      }
    }
  }
}

template <class T>
void clear_rows(MatrixView<T> rows) {
  for (std::int64_t row = 0; row < rows.rows(); ++row) {
    std::fill_n(&rows(row, 0), rows.cols(), T(0));
  }
}

/// body(range) for each longest run of tokens of the range that are all real, or all padding.
template <class Body>
void for_runs(const Segments& segments, TokenRange range, const Body& body) {
  for (std::int64_t t = range.first; t < range.end();) {
    const bool valid = segments.valid(t);
    std::int64_t end = t + 1;
    while (end < range.end() && segments.valid(end) == valid) {
      ++end;
    }
    body(TokenRange{t, end - t}, valid);
    t = end;
  }
}

}  // namespace detail

/// The convolution's output as an array [tokens, qkv_columns], and its cotangent as another.
///
/// dtypes    y: any Storage, widened a tile at a time; d_y: the Accumulator, not rounded
/// writes    d_y: every column of a finished slice, exactly 0 at padding
template <Storage S, Accumulator A>
class ArrayPort {
 public:
  ArrayPort(const Dims& dims, const Segments& segments, ConstMatrixView<S> y,
            MatrixView<A> d_y = {})
      : dims_(dims), segments_(segments), y_(y), d_y_(d_y) {}

  class Cursor {
   public:
    void load(TokenRange range, const QkvTile<A>& tile) const {
      for_each_part(tile, [&](std::int64_t column, MatrixView<A> part) {
        detail::for_runs(port_.segments_, range, [&](TokenRange run, bool valid) {
          const MatrixView<A> rows = part.row_block(run.first - range.first, run.count);
          if (valid) {
            detail::load_rows<S, A>(
                port_.y_.row_block(run.first, run.count).column_block(column, part.cols()), rows);
          } else {
            detail::clear_rows(rows);
          }
        });
      });
    }

    void store(TokenRange range, const QkvTile<A>& tile) const {
      for_each_part(tile, [&](std::int64_t column, MatrixView<A> part) {
        detail::store_rows<A, A>(
            part, port_.d_y_.row_block(range.first, range.count).column_block(column, part.cols()));
      });
    }

    /// What lay in no range is padding.
    void finish() const {
      const Dims& dims = port_.dims_;
      detail::for_runs(
          port_.segments_, {0, port_.segments_.tokens()}, [&](TokenRange run, bool valid) {
            if (!valid) {
              const MatrixView<A> rows = port_.d_y_.row_block(run.first, run.count);
              detail::clear_rows(
                  rows.column_block(dims.query_column(slice_.key_head), dims.key_dim));
              detail::clear_rows(rows.column_block(dims.key_column(slice_.key_head), dims.key_dim));
              detail::clear_rows(rows.column_block(dims.value_column(slice_.first_value_head),
                                                   slice_.value_columns()));
            }
          });
    }

   private:
    friend class ArrayPort;

    Cursor(const ArrayPort& port, const HeadSlice& slice) : port_(port), slice_(slice) {}

    /// body(column of the array, wanted part of the tile).
    template <class Body>
    void for_each_part(const QkvTile<A>& tile, const Body& body) const {
      const Dims& dims = port_.dims_;
      if (!tile.q.is_null()) {
        body(dims.query_column(slice_.key_head), tile.q);
      }
      if (!tile.k.is_null()) {
        body(dims.key_column(slice_.key_head), tile.k);
      }
      for (std::int64_t i = 0; !tile.v.is_null() && i < slice_.value_heads; ++i) {
        body(dims.value_column(slice_.first_value_head + i) + slice_.first_column,
             tile.v.column_block(i * slice_.columns, slice_.columns));
      }
    }

    const ArrayPort& port_;
    HeadSlice slice_;
  };

  /// most_tokens: the longest range that will be asked for.
  [[nodiscard]] Cursor begin(const HeadSlice& slice, std::int64_t /*most_tokens*/,
                             Workspace& /*workspace*/) const {
    return {*this, slice};
  }
  [[nodiscard]] std::size_t workspace_bytes(const HeadSlice& /*slice*/,
                                            std::int64_t /*most_tokens*/) const {
    return 0;
  }

 private:
  const Dims& dims_;
  const Segments& segments_;
  ConstMatrixView<S> y_;
  MatrixView<A> d_y_;
};

}  // namespace heddle::gdn

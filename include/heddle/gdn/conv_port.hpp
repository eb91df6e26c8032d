#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/causal_conv.hpp"
#include "heddle/gdn/detail/conv_backward.hpp"
#include "heddle/gdn/detail/conv_tile.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"

namespace heddle::gdn {

/// Which rows a source is asked for.
enum class SourceRows {
  all,   ///< q, k and v
  keys,  ///< k alone, as the transition of a row needs: slices then say nothing of values
};

/// The convolution of a layer's qkv as the recurrence's source of rows: a key head's columns, a tile of
/// tokens at a time, from the stored inputs into scratch. No array of the convolution's output exists.
///
/// memory    of the workspace: the weights of the slice's columns in A
template <Storage S, Storage P, Accumulator A>
class ConvSource {
 public:
  /// halo_valid as ConvInputs has it.
  ConvSource(const Dims& dims, const Segments& segments, const Inputs<S, P, A>& inputs,
             ConvOutput output, SourceRows rows = SourceRows::all,
             std::span<const std::uint8_t> halo_valid = {})
      : dims_(dims),
        segments_(segments),
        inputs_{.x = inputs.qkv,
                .weight = inputs.conv_weight,
                .bias = inputs.conv_bias,
                .state = inputs.conv_state,
                .halo_valid = halo_valid},
        output_(output),
        rows_(rows) {}

  using Tile = detail::ConvTile<S, P, A>;

  class Cursor {
   public:
    void load(TokenRange range, const QkvTile<A>& tile) const {
      const std::size_t values = has_queries_ ? 2 : 1;
      if (!tile.q.is_null()) {
        tiles_.front().forward(range, tile.q);
      }
      if (!tile.k.is_null()) {
        tiles_[values - 1].forward(range, tile.k);
      }
      std::int64_t column = 0;
      for (std::size_t i = values; !tile.v.is_null() && i < tiles_.size(); ++i) {
        tiles_[i].forward(range, tile.v.column_block(column, tiles_[i].columns()));
        column += tiles_[i].columns();
      }
    }

   private:
    friend class ConvSource;

    std::span<Tile> tiles_;  // of q, k, and the parts of v
    bool has_queries_ = false;
  };

  [[nodiscard]] Cursor begin(const HeadSlice& slice, std::int64_t /*most_tokens*/,
                             Workspace& workspace) const {
    Cursor cursor;
    cursor.has_queries_ = rows_ == SourceRows::all;
    cursor.tiles_ = workspace.take<Tile>(parts(slice));
    std::size_t at = 0;
    for_each_part(slice, [&](std::int64_t column, std::int64_t count) {
      std::construct_at(&cursor.tiles_[at], segments_, detail::column_block(inputs_, column, count),
                        output_, workspace);
      ++at;
    });
    return cursor;
  }

  [[nodiscard]] std::size_t workspace_bytes(const HeadSlice& slice,
                                            std::int64_t /*most_tokens*/) const {
    std::size_t bytes = Workspace::bytes_for<Tile>(parts(slice));
    for_each_part(slice, [&](std::int64_t, std::int64_t count) {
      bytes += Tile::workspace_bytes(count, dims_.kernel);
    });
    return bytes;
  }

 private:
  [[nodiscard]] std::int64_t parts(const HeadSlice& slice) const {
    std::int64_t count = 0;
    for_each_part(slice, [&](std::int64_t, std::int64_t) { ++count; });
    return count;
  }

  /// body(first column, columns) for q, k and v of a slice. Values of whole heads lie side by side: one
  /// part. Parts of heads are one each.
  template <class Body>
  void for_each_part(const HeadSlice& slice, const Body& body) const {
    if (rows_ == SourceRows::all) {
      body(dims_.query_column(slice.key_head), dims_.key_dim);
    }
    body(dims_.key_column(slice.key_head), dims_.key_dim);
    if (rows_ == SourceRows::keys) {
      return;
    }
    if (slice.columns == dims_.value_dim) {
      body(dims_.value_column(slice.first_value_head), slice.value_columns());
      return;
    }
    for (std::int64_t i = 0; i < slice.value_heads; ++i) {
      body(dims_.value_column(slice.first_value_head + i) + slice.first_column, slice.columns);
    }
  }

  const Dims& dims_;
  const Segments& segments_;
  ConvInputs<S, P> inputs_;
  ConvOutput output_;
  SourceRows rows_;
};

/// ConvSource for whole key heads, whose cotangents go through the convolution's backward to those of
/// qkv, its parameters and its state as soon as a tile's are known.
///
/// memory    of the workspace, for each column of the slice: its weights, most_tokens + 3 kernel + 1
///           values, all in A
template <Storage S, Storage P, Accumulator A>
class ConvPort {
 public:
  ConvPort(const Dims& dims, const Segments& segments, const Inputs<S, P, A>& inputs,
           ConvOutput output, ConstMatrixView<A> d_final_conv_state, const Cotangents<A>& wanted,
           std::span<const std::uint8_t> halo_valid = {})
      : dims_(dims),
        segments_(segments),
        inputs_{.x = inputs.qkv,
                .weight = inputs.conv_weight,
                .bias = inputs.conv_bias,
                .state = inputs.conv_state,
                .halo_valid = halo_valid},
        output_(output),
        d_final_state_(d_final_conv_state),
        out_{.d_x = wanted.d_qkv,
             .d_weight = wanted.d_conv_weight,
             .d_bias = wanted.d_conv_bias,
             .d_state = wanted.d_conv_state},
        streamed_(detail::streams(wanted.d_qkv) && dims.key_dim % 16 == 0 &&
                  dims.value_dim % 16 == 0) {}

  /// Forward and backward of a column block. The second refers to the first: neither moves.
  class Part {
   public:
    Part(const ConvPort& port, std::int64_t column, std::int64_t count, std::int64_t most_tokens,
         Workspace& workspace)
        : tile_(port.segments_, detail::column_block(port.inputs_, column, count), port.output_,
                workspace),
          backward_(tile_, port.d_final_state_.column_block(column, count),
                    detail::column_block(port.out_, column, count), port.streamed_, most_tokens,
                    workspace) {}
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;
    ~Part() = default;

    void load(TokenRange range, MatrixView<A> y) const {
      if (!y.is_null()) {
        tile_.forward(range, y);
      }
    }
    void store(TokenRange range, ConstMatrixView<A> d_y) { backward_.store(range, d_y); }
    void finish() { backward_.finish(); }

   private:
    detail::ConvTile<S, P, A> tile_;
    detail::ConvBackward<S, P, A> backward_;
  };

  class Cursor {
   public:
    void load(TokenRange range, const QkvTile<A>& tile) const {
      q_.load(range, tile.q);
      k_.load(range, tile.k);
      v_.load(range, tile.v);
    }
    void store(TokenRange range, const QkvTile<A>& d_tile) {
      q_.store(range, d_tile.q);
      k_.store(range, d_tile.k);
      v_.store(range, d_tile.v);
    }
    void finish() {
      q_.finish();
      k_.finish();
      v_.finish();
    }

   private:
    friend class ConvPort;

    Cursor(const ConvPort& port, const HeadSlice& slice, std::int64_t most_tokens,
           Workspace& workspace)
        : q_(port, port.dims_.query_column(slice.key_head), port.dims_.key_dim, most_tokens,
             workspace),
          k_(port, port.dims_.key_column(slice.key_head), port.dims_.key_dim, most_tokens,
             workspace),
          v_(port, port.dims_.value_column(slice.first_value_head), slice.value_columns(),
             most_tokens, workspace) {}

    Part q_;
    Part k_;
    Part v_;
  };

  [[nodiscard]] Cursor begin(const HeadSlice& slice, std::int64_t most_tokens,
                             Workspace& workspace) const {
    return {*this, slice, most_tokens, workspace};
  }

  [[nodiscard]] std::size_t workspace_bytes(const HeadSlice& slice,
                                            std::int64_t most_tokens) const {
    const auto bytes = [&](std::int64_t columns) {
      return detail::ConvTile<S, P, A>::workspace_bytes(columns, dims_.kernel) +
             detail::ConvBackward<S, P, A>::workspace_bytes(columns, dims_.kernel, most_tokens);
    };
    return 2 * bytes(dims_.key_dim) + bytes(slice.value_columns());
  }

 private:
  const Dims& dims_;
  const Segments& segments_;
  ConvInputs<S, P> inputs_;
  ConvOutput output_;
  ConstMatrixView<A> d_final_state_;
  ConvCotangents<A> out_;
  bool streamed_;
};

}  // namespace heddle::gdn

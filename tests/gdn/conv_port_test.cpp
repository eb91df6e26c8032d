// Mutants: q's columns loaded for k; values of the group's first head for all; the state's window not
// handed on; keys alone that read values' columns; d_z of the range behind lost between two stores.
#include "heddle/gdn/conv_port.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/view.hpp"
#include "heddle/gdn/reference_conv.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::poison;
using heddle::test::same_bits;

static_assert(TileSource<ConvSource<bfloat16, bfloat16, float>, float>);
static_assert(TilePort<ConvPort<double, double, double>, double>);

/// A layer's inputs of two key heads with two value heads each, of a row that continues a document.
struct Layer {
  Dims dims{
      .tokens = 13, .key_heads = 2, .value_heads = 4, .key_dim = 3, .value_dim = 5, .kernel = 4};
  std::vector<std::int32_t> ids = {7, 7, 7, 0, 7, 7, 2, 2, 0, 0, 2, 2, 2};
  Segments segments{ids, 7};
  std::vector<double> qkv, weight, bias, state, d_y, d_final;

  Layer() {
    heddle::test::Random random(5);
    qkv = random.normals<double>(dims.tokens * columns());
    weight = random.normals<double>(columns() * dims.kernel);
    bias = random.normals<double>(columns());
    state = random.normals<double>(dims.window_rows() * columns());
    d_y = random.normals<double>(dims.tokens * columns());
    d_final = random.normals<double>(dims.window_rows() * columns());
    for (std::int64_t t = 0; t < dims.tokens; ++t) {
      if (!segments.valid(t)) {
        std::fill_n(qkv.begin() + t * columns(), columns(), poison<double>());
        std::fill_n(d_y.begin() + t * columns(), columns(), 0.0);
      }
    }
  }

  [[nodiscard]] std::int64_t columns() const { return dims.qkv_columns(); }
  [[nodiscard]] Inputs<double> inputs() const {
    return {.qkv = {qkv.data(), dims.tokens, columns()},
            .conv_weight = {weight.data(), columns(), dims.kernel},
            .conv_bias = bias,
            .conv_state = {state.data(), dims.window_rows(), columns()}};
  }
  [[nodiscard]] reference::ConvInputs<double, double> whole() const {
    return {.x = {qkv.data(), dims.tokens, columns()},
            .weight = {weight.data(), columns(), dims.kernel},
            .bias = bias,
            .state = {state.data(), dims.window_rows(), columns()}};
  }
};

/// Rows [range) and columns [first, first + count) of an array of all columns.
std::vector<double> block(const std::vector<double>& values, std::int64_t columns, TokenRange range,
                          std::int64_t first, std::int64_t count) {
  std::vector<double> out;
  for (std::int64_t t = range.first; t < range.end(); ++t) {
    const auto begin = values.begin() + t * columns + first;
    out.insert(out.end(), begin, begin + count);
  }
  return out;
}

TEST(GdnConvPort, ASourceLoadsTheConvolutionOfItsSlice) {
  const Layer layer;
  const Dims& dims = layer.dims;
  std::vector<double> z(layer.qkv.size()), y(layer.qkv.size());
  reference::conv_forward<double, double, double>(
      layer.segments, layer.whole(), ConvOutput::accumulator,
      {z.data(), dims.tokens, layer.columns()}, {y.data(), dims.tokens, layer.columns()});
  const ConvSource<double, double, double> source(dims, layer.segments, layer.inputs(),
                                                  ConvOutput::accumulator);
  // A key head whole, and its second value head's last three columns.
  for (const HeadSlice& slice : {HeadSlice::of_key_head(dims, 0), HeadSlice::of_key_head(dims, 1),
                                 HeadSlice{1, 3, 1, 2, 3}}) {
    Workspace workspace;
    const auto cursor = source.begin(slice, 5, workspace);
    EXPECT_EQ(workspace.high_water_bytes(), source.workspace_bytes(slice, 5));
    for (const TokenRange range : {TokenRange{8, 5}, TokenRange{0, 5}, TokenRange{2, 1}}) {
      const std::int64_t n = range.count;
      const std::int64_t values = slice.value_columns();
      std::vector<double> q(static_cast<std::size_t>(n * dims.key_dim), poison<double>());
      std::vector<double> k = q;
      std::vector<double> v(static_cast<std::size_t>(n * values), poison<double>());
      cursor.load(range, {.q = {q.data(), n, dims.key_dim},
                          .k = {k.data(), n, dims.key_dim},
                          .v = {v.data(), n, values}});
      const auto expected = [&](std::int64_t column, std::int64_t count) {
        return block(y, layer.columns(), range, column, count);
      };
      EXPECT_TRUE(close(q, expected(dims.query_column(slice.key_head), dims.key_dim), 1e-13));
      EXPECT_TRUE(close(k, expected(dims.key_column(slice.key_head), dims.key_dim), 1e-13));
      const std::int64_t column = dims.value_column(slice.first_value_head) + slice.first_column;
      EXPECT_TRUE(close(v, expected(column, values), 1e-13));
    }
  }
}

TEST(GdnConvPort, KeysAloneReadNoOtherColumn) {
  Layer layer;
  const Dims& dims = layer.dims;
  const ConvSource<double, double, double> all(dims, layer.segments, layer.inputs(),
                                               ConvOutput::accumulator);
  const HeadSlice slice = HeadSlice::of_key_head(dims, 1);
  const auto keys = [&](const ConvSource<double, double, double>& source) {
    Workspace workspace;
    std::vector<double> k(static_cast<std::size_t>(dims.tokens * dims.key_dim));
    source.begin(slice, dims.tokens, workspace)
        .load({0, dims.tokens}, {.k = {k.data(), dims.tokens, dims.key_dim}});
    return k;
  };
  const std::vector<double> expected = keys(all);
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    for (std::int64_t c = 0; c < layer.columns(); ++c) {
      if (c < dims.key_column(1) || c >= dims.key_column(1) + dims.key_dim) {
        layer.qkv[static_cast<std::size_t>(t * layer.columns() + c)] = poison<double>();
      }
    }
  }
  const ConvSource<double, double, double> source(dims, layer.segments, layer.inputs(),
                                                  ConvOutput::accumulator, SourceRows::keys);
  EXPECT_TRUE(same_bits(keys(source), expected));
}

TEST(GdnConvPort, APortSendsEachTilesCotangentsThroughTheBackward) {
  const Layer layer;
  const Dims& dims = layer.dims;
  const std::int64_t columns = layer.columns();
  const auto fresh = [](std::int64_t count) {
    return std::vector<double>(static_cast<std::size_t>(count), poison<double>());
  };
  struct Result {
    std::vector<double> d_qkv, d_weight, d_bias, d_state;
  };
  const auto result = [&] {
    return Result{fresh(dims.tokens * columns), fresh(columns * dims.kernel), fresh(columns),
                  fresh(dims.window_rows() * columns)};
  };
  Result expected = result();
  std::vector<double> z(layer.qkv.size()), y(layer.qkv.size());
  reference::conv_forward<double, double, double>(
      layer.segments, layer.whole(), ConvOutput::accumulator, {z.data(), dims.tokens, columns},
      {y.data(), dims.tokens, columns});
  const ConstMatrixView<double> d_final(layer.d_final.data(), dims.window_rows(), columns);
  reference::conv_backward<double, double, double>(
      layer.segments, layer.whole(), {z.data(), dims.tokens, columns},
      {layer.d_y.data(), dims.tokens, columns}, d_final,
      reference::ConvCotangents<double>{
          .d_x = {expected.d_qkv.data(), dims.tokens, columns},
          .d_weight = {{expected.d_weight.data(), columns, dims.kernel}, Write::overwrite},
          .d_bias = {expected.d_bias, Write::overwrite},
          .d_state = {expected.d_state.data(), dims.window_rows(), columns}});

  Result actual = result();
  const ConvPort<double, double, double> port(
      dims, layer.segments, layer.inputs(), ConvOutput::accumulator, d_final,
      Cotangents<double>{
          .d_qkv = {actual.d_qkv.data(), dims.tokens, columns},
          .d_conv_weight = {{actual.d_weight.data(), columns, dims.kernel}, Write::overwrite},
          .d_conv_bias = {actual.d_bias, Write::overwrite},
          .d_conv_state = {actual.d_state.data(), dims.window_rows(), columns}});
  for (std::int64_t head = 0; head < dims.key_heads; ++head) {
    const HeadSlice slice = HeadSlice::of_key_head(dims, head);
    const std::int64_t values = slice.value_columns();
    Workspace workspace;
    auto cursor = port.begin(slice, 4, workspace);
    EXPECT_EQ(workspace.high_water_bytes(), port.workspace_bytes(slice, 4));
    // Padding lies in a range, and between two.
    for (const TokenRange range : {TokenRange{10, 3}, TokenRange{4, 4}, TokenRange{0, 4}}) {
      const std::int64_t n = range.count;
      std::vector<double> q(static_cast<std::size_t>(n * dims.key_dim)), k = q;
      std::vector<double> v(static_cast<std::size_t>(n * values));
      const QkvTile<double> tile{.q = {q.data(), n, dims.key_dim},
                                 .k = {k.data(), n, dims.key_dim},
                                 .v = {v.data(), n, values}};
      cursor.load(range, tile);
      q = block(layer.d_y, columns, range, dims.query_column(head), dims.key_dim);
      k = block(layer.d_y, columns, range, dims.key_column(head), dims.key_dim);
      v = block(layer.d_y, columns, range, dims.value_column(slice.first_value_head), values);
      cursor.store(range, {.q = {q.data(), n, dims.key_dim},
                           .k = {k.data(), n, dims.key_dim},
                           .v = {v.data(), n, values}});
    }
    cursor.finish();
  }
  EXPECT_TRUE(close(actual.d_qkv, expected.d_qkv, 1e-13));
  EXPECT_TRUE(close(actual.d_weight, expected.d_weight, 1e-13));
  EXPECT_TRUE(close(actual.d_bias, expected.d_bias, 1e-13));
  EXPECT_TRUE(close(actual.d_state, expected.d_state, 1e-13));
}

}  // namespace
}  // namespace heddle::gdn

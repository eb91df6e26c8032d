#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/row_case.hpp"
#include "heddle/core/isa.hpp"
#include "heddle/gdn/chunked.hpp"
#include "support/threads.hpp"

// What of the chunked recurrence is the same to the last bit. Mutants: a start that multiplies by zero
// instead of selecting it; a start missed at a chunk's first row, in the recurrence's forward or
// backward alone; a slice that reads another slice's columns; sums over a group in another order; a
// product whose order depends on the chunk's length; a path with its own order of a sum; a policy that
// recomputes in another way; padding behind a document that reaches its last chunk.

namespace heddle::gdn {
namespace {

using heddle::test::Random;
using test::chunked;
using test::ChunkedCall;
using test::Ids;
using test::Keep;
using test::RowCase;
using test::RowMaker;
using test::RowResult;

const Dims model{.key_heads = 2, .value_heads = 6, .key_dim = 24, .value_dim = 80};

Ids row_of(const std::vector<std::pair<std::int32_t, int>>& runs) {
  Ids ids;
  for (const auto& [id, length] : runs) {
    ids.insert(ids.end(), static_cast<std::size_t>(length), id);
  }
  return ids;
}

const Ids packed = row_of({{1, 37}, {0, 3}, {1, 5}, {2, 1}, {3, 40}, {0, 7}});

RowCase usual(const Ids& ids, Chunking chunking = Chunking::aligned, bool states = true) {
  return RowMaker{.dims = model,
                  .segment_ids = ids,
                  .states = states,
                  .chunk_options = {.chunk = 16, .chunking = chunking}}
      .make();
}

TEST(GdnChunkedBits, AreThoseOfAnyPolicy) {
  for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
    const RowCase row = usual(packed, chunking);
    const auto expected = chunked<float>(row, Keep::all);
    EXPECT_TRUE(same_bits(chunked<float>(row, Keep::inverses), expected));
    EXPECT_TRUE(same_bits(chunked<float>(row, Keep::nothing), expected));
    EXPECT_TRUE(same_bits(chunked<double>(row, Keep::nothing), chunked<double>(row, Keep::all)));
  }
}

TEST(GdnChunkedBits, AreThoseOfAnyNumberOfThreads) {
  const RowCase row = usual(packed);
  const auto expected = chunked<float>(row);
  // With 3 threads groups are split, with 16 also columns.
  for (const int threads : {1, 2, 3, 8, 16}) {
    heddle::test::with_threads(threads, [&] {
      EXPECT_TRUE(same_bits(chunked<float>(row), expected)) << threads;
      EXPECT_TRUE(heddle::test::same_bits(chunked<float>(row, Keep::all).t_inv,
                                          chunked<float>(row, Keep::all).t_inv));
    });
  }
}

TEST(GdnChunkedBits, AreThoseOfAnySlices) {
  const detail::Slices few(model, 2);
  EXPECT_EQ(few.count(), 2);
  const detail::Slices groups(model, 6);
  EXPECT_EQ(groups.count(), 6);
  const detail::Slices columns(model, 16);
  EXPECT_EQ(columns.count(), 18);
  // Together they are every column of every value head once.
  std::vector<int> times(static_cast<std::size_t>(model.output_columns()), 0);
  for (std::int64_t i = 0; i < columns.count(); ++i) {
    const HeadSlice slice = columns.at(i);
    for (std::int64_t h = 0; h < slice.value_heads; ++h) {
      EXPECT_EQ(model.key_head_of(slice.first_value_head + h), slice.key_head);
      for (std::int64_t j = 0; j < slice.columns; ++j) {
        ++times[static_cast<std::size_t>((slice.first_value_head + h) * model.value_dim +
                                         slice.first_column + j)];
      }
    }
  }
  EXPECT_EQ(times, std::vector<int>(times.size(), 1));
}

TEST(GdnChunkedBits, AreThoseOfKeyHeadsOnTheirOwn) {
  const RowCase row = usual(packed);
  const auto expected = chunked<float>(row, Keep::all);
  ChunkedCall<float> call(row, Keep::all);
  Workspace workspace;
  for (const std::int64_t head : {1, 0}) {
    chunked_forward(call.dims, call.inputs(), call.options, call.chunk_options, call.outputs(),
                    call.residuals(), KeyHeads{head, 1}, workspace);
    chunked_backward(
        call.dims, call.inputs(), call.options, call.chunk_options,
        ChunkResiduals<const float>{call.residuals().t_inv, call.residuals().chunk_states},
        call.cotangents(), KeyHeads{head, 1}, workspace);
  }
  EXPECT_TRUE(same_bits(call.result, expected));
}

TEST(GdnChunkedBits, AreThoseOfEveryPath) {
  const RowCase row = usual(packed, Chunking::grid);
  const auto expected = chunked<float>(row);
  const auto in_double = chunked<double>(row);
  for (const Path path : available_paths()) {
    const ScopedPath scope(path);
    EXPECT_TRUE(same_bits(chunked<float>(row), expected)) << path_name(path);
    EXPECT_TRUE(same_bits(chunked<double>(row), in_double)) << path_name(path);
  }
}

/// The part of a row's results that belongs to tokens [first, first + count).
template <class A>
RowResult<A> tokens_of(const RowResult<A>& row, const Dims& dims, std::int64_t first,
                       std::int64_t count) {
  RowResult<A> part;
  part.o = test::rows_of(row.o, dims.output_columns(), first, count);
  part.d_y = test::rows_of(row.d_y, dims.qkv_columns(), first, count);
  part.d_g = test::rows_of(row.d_g, dims.value_heads, first, count);
  part.d_beta = test::rows_of(row.d_beta, dims.value_heads, first, count);
  return part;
}

/// The same tokens as a row of their own.
RowCase alone(const RowCase& row, std::int64_t first, std::int64_t count) {
  RowCase part = row;
  part.dims.tokens = count;
  part.segment_ids = test::rows_of(row.segment_ids, 1, first, count);
  part.options.initial_segment = 0;
  part.y = test::rows_of(row.y, row.dims.qkv_columns(), first, count);
  part.g = test::rows_of(row.g, row.dims.value_heads, first, count);
  part.beta = test::rows_of(row.beta, row.dims.value_heads, first, count);
  part.d_o = test::rows_of(row.d_o, row.dims.output_columns(), first, count);
  part.state.clear();
  part.d_final.clear();
  return part;
}

TEST(GdnChunkedBits, OfADocumentAreThoseItHasAlone) {
  // Padding first, last and inside, documents before and behind.
  const Ids ids = row_of({{0, 5}, {9, 20}, {1, 37}, {0, 3}, {1, 5}, {2, 11}, {3, 1}, {0, 9}});
  const RowCase row = usual(ids, Chunking::aligned, false);
  const auto whole = chunked<float>(row);
  for (const auto& [first, count] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{5, 20}, {25, 45}, {70, 11}, {81, 1}}) {
    auto by_itself = chunked<float>(alone(row, first, count));
    by_itself.final_state.clear();
    EXPECT_TRUE(same_bits(by_itself, tokens_of(whole, row.dims, first, count))) << first;
    const auto in_double = chunked<double>(alone(row, first, count));
    EXPECT_TRUE(heddle::test::same_bits(
        in_double.d_y, tokens_of(chunked<double>(row), row.dims, first, count).d_y));
  }
}

TEST(GdnChunkedBits, OfADocumentDoNotChangeWithAnother) {
  const Ids ids = row_of({{1, 21}, {2, 30}, {3, 13}});
  for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
    const RowCase row = usual(ids, chunking);
    RowCase changed = row;
    Random random(5);
    for (std::int64_t t = 21; t < 51; ++t) {
      for (std::int64_t j = 0; j < model.qkv_columns(); ++j) {
        changed.y[static_cast<std::size_t>(t * model.qkv_columns() + j)] =
            static_cast<float>(random.normal());
      }
      changed.g[static_cast<std::size_t>(t * model.value_heads)] = -3;
      changed.d_o[static_cast<std::size_t>(t * model.output_columns())] = 7;
    }
    const auto before = chunked<float>(row);
    const auto after = chunked<float>(changed);
    EXPECT_FALSE(
        same_bits(tokens_of(after, row.dims, 21, 30), tokens_of(before, row.dims, 21, 30)));
    for (const auto& [first, count] : {std::pair{0, 21}, std::pair{51, 13}}) {
      EXPECT_TRUE(same_bits(tokens_of(after, row.dims, first, count),
                            tokens_of(before, row.dims, first, count)));
    }
    EXPECT_TRUE(heddle::test::same_bits(after.final_state, before.final_state));
    EXPECT_TRUE(heddle::test::same_bits(after.d_state, before.d_state));
  }
}

TEST(GdnChunkedBits, OfADocumentDoNotChangeWithNaNInAnother) {
  const Ids ids = row_of({{1, 21}, {2, 30}, {3, 13}});
  const RowCase row = usual(ids);
  RowCase broken = row;
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  broken.y[static_cast<std::size_t>(25 * model.qkv_columns() + 3)] = nan;
  broken.g[static_cast<std::size_t>(30 * model.value_heads)] = nan;
  broken.d_o[static_cast<std::size_t>(40 * model.output_columns())] = nan;
  const auto expected = chunked<float>(row);
  const auto result = chunked<float>(broken, Keep::all);
  for (const auto& [first, count] : {std::pair{0, 21}, std::pair{51, 13}}) {
    EXPECT_TRUE(same_bits(tokens_of(result, row.dims, first, count),
                          tokens_of(expected, row.dims, first, count)));
  }
  EXPECT_TRUE(heddle::test::same_bits(result.final_state, expected.final_state));
  EXPECT_TRUE(heddle::test::same_bits(result.d_state, expected.d_state));
}

TEST(GdnChunkedBits, DoNotReadAStateOfAnotherDocument) {
  const Ids ids = row_of({{2, 21}, {3, 4}});
  for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
    RowCase row = usual(ids, chunking);
    row.options.initial_segment = 1;
    const auto expected = chunked<float>(row);
    row.state.assign(row.state.size(), std::numeric_limits<double>::quiet_NaN());
    EXPECT_TRUE(same_bits(chunked<float>(row), expected));
    EXPECT_TRUE(heddle::test::same_bits(expected.d_state,
                                        std::vector<float>(expected.d_state.size(), 0.0F)));
  }
}

TEST(GdnChunkedBits, DoNotChangeWhereARowIsCutBetweenChunks) {
  const Ids ids = row_of({{1, 64}});
  for (const std::int64_t cut : {16, 48}) {
    const RowCase row = usual(ids, Chunking::grid);
    const auto whole = chunked<float>(row);
    RowCase first = alone(row, 0, cut);
    first.options = row.options;
    first.state = row.state;
    RowCase second = alone(row, cut, 64 - cut);
    second.options = row.options;
    second.d_final = row.d_final;
    ChunkedCall<float> one(first);
    Workspaces workspaces;
    one.forward(workspaces);
    second.state.assign(one.result.final_state.begin(), one.result.final_state.end());
    const auto behind = chunked<float>(second);
    first.d_final.assign(behind.d_state.begin(), behind.d_state.end());
    const auto before = chunked<float>(first);
    EXPECT_TRUE(heddle::test::same_bits(behind.final_state, whole.final_state));
    EXPECT_TRUE(heddle::test::same_bits(before.d_state, whole.d_state));
    const auto part = [&](const RowResult<float>& result, std::int64_t at, std::int64_t count) {
      return tokens_of(result, row.dims, at, count);
    };
    EXPECT_TRUE(same_bits(part(before, 0, cut), part(whole, 0, cut)));
    EXPECT_TRUE(same_bits(part(behind, 0, 64 - cut), part(whole, cut, 64 - cut)));
  }
}

TEST(GdnChunkedBits, OfWholeChunksAreThoseOfTheGrid) {
  const Ids ids = row_of({{1, 64}});
  RowCase row = usual(ids, Chunking::aligned, false);
  const auto aligned = chunked<float>(row, Keep::all);
  row.chunk_options.chunking = Chunking::grid;
  EXPECT_TRUE(same_bits(chunked<float>(row, Keep::all), aligned));
}

/// Key heads exchanged with their value heads: every head computes what it computed.
TEST(GdnChunkedBits, FollowTheHeads) {
  const RowCase row = usual(packed);
  RowCase exchanged = row;
  const std::int64_t group = model.group();
  const auto exchange = [&](std::vector<double>& values, std::int64_t rows, std::int64_t cols,
                            std::int64_t column, std::int64_t width) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto at = values.begin() + r * cols + column;
      std::swap_ranges(at, at + width, at + width);
    }
  };
  const auto exchange_all = [&](RowCase& c) {
    const std::int64_t t = c.dims.tokens;
    exchange(c.y, t, model.qkv_columns(), model.query_column(0), model.key_dim);
    exchange(c.y, t, model.qkv_columns(), model.key_column(0), model.key_dim);
    exchange(c.y, t, model.qkv_columns(), model.value_column(0), group * model.value_dim);
    exchange(c.g, t, model.value_heads, 0, group);
    exchange(c.beta, t, model.value_heads, 0, group);
    exchange(c.d_o, t, model.output_columns(), 0, group * model.value_dim);
    exchange(c.state, 1, 0, 0, group * model.key_dim * model.value_dim);
    exchange(c.d_final, 1, 0, 0, group * model.key_dim * model.value_dim);
  };
  exchange_all(exchanged);
  auto result = chunked<double>(exchanged);
  const auto expected = chunked<double>(row);
  RowCase back = exchanged;
  back.y = result.d_y;
  back.g = result.d_g;
  back.beta = result.d_beta;
  back.d_o = result.o;
  back.state = result.final_state;
  back.d_final = result.d_state;
  exchange_all(back);
  EXPECT_TRUE(heddle::test::same_bits(back.y, expected.d_y));
  EXPECT_TRUE(heddle::test::same_bits(back.g, expected.d_g));
  EXPECT_TRUE(heddle::test::same_bits(back.beta, expected.d_beta));
  EXPECT_TRUE(heddle::test::same_bits(back.d_o, expected.o));
  EXPECT_TRUE(heddle::test::same_bits(back.state, expected.final_state));
  EXPECT_TRUE(heddle::test::same_bits(back.d_final, expected.d_state));
}

TEST(GdnChunkedBits, OfNarrowStorageAreThoseOfItsWidenedNumbers) {
  const RowCase row = usual(packed);
  ChunkedCall<bfloat16> narrow(row);
  Workspaces workspaces;
  RowCase widened = row;
  const auto round = [](std::vector<double>& values) {
    for (double& value : values) {
      value = static_cast<float>(bfloat16(static_cast<float>(value)));
    }
  };
  round(widened.y);
  round(widened.d_o);
  narrow.forward(workspaces);
  narrow.backward(workspaces);
  const auto expected = chunked<float>(widened);
  EXPECT_TRUE(same_bits(narrow.result, expected));

  // An output of bf16 is rounded once.
  std::vector<bfloat16> o(narrow.result.o.size());
  chunked_forward(narrow.dims, narrow.inputs(), narrow.options, narrow.chunk_options,
                  ChunkedOutputs<bfloat16, float>{
                      .o = {o.data(), narrow.dims.tokens, narrow.dims.output_columns()}},
                  {}, workspaces);
  for (std::size_t i = 0; i < o.size(); ++i) {
    EXPECT_EQ(static_cast<float>(o[i]), static_cast<float>(bfloat16(expected.o[i])));
  }
}

}  // namespace
}  // namespace heddle::gdn

#include "heddle/gdn/chunked.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/row_case.hpp"

// Mutants these tests are written against: a chunk boundary off by one; gin, gout or glast dropped,
// or applied in the wrong row; the diagonal of P dropped, forward or backward; the value head of another
// key head; the query scale missing forward or backward; dS' decayed before dN; dN without P^T dO; Z not
// negated in dA; dkappa^T dropped; alast dropped; a padding row read or left unwritten; the states of a
// replay off by one chunk; a residual of another head.

namespace heddle::gdn {
namespace {

using heddle::test::Random;
using test::by_tokens;
using test::chunked;
using test::Decay;
using test::Ids;
using test::Keep;
using test::Keys;
using test::RowCase;
using test::RowMaker;

const Dims small{.key_heads = 2, .value_heads = 4, .key_dim = 5, .value_dim = 3};

// One long document, one-token documents, padding in every place, an id that comes again.
const Ids packed{0, 0, 1, 1, 1, 0, 1, 2, 2, 3, 0, 0, 3, 1, 1, 1, 0, 4, 5, 6, 7, 7, 7,
                 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 8, 0, 0};
const Ids continued(packed.begin() + 2, packed.end());

TEST(GdnChunked, IsTheRecurrenceForEveryChunkSize) {
  for (const bool states : {false, true}) {
    RowCase row =
        RowMaker{.dims = small, .segment_ids = states ? continued : packed, .states = states}
            .make();
    const auto expected = by_tokens(row);
    for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
      for (const std::int64_t chunk :
           {1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 128}) {
        row.chunk_options = {.chunk = chunk, .chunking = chunking};
        EXPECT_TRUE(close(chunked<double>(row), expected, 1e-12)) << chunk;
        EXPECT_TRUE(close(chunked<float>(row), expected, 5e-6)) << chunk;
      }
    }
  }
}

TEST(GdnChunked, IsTheRecurrenceOnRandomRows) {
  Random random(7);
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const std::int64_t key_heads = random.integer(1, 3);
    const Dims dims{.key_heads = key_heads,
                    .value_heads = key_heads * random.integer(1, 3),
                    .key_dim = random.integer(3, 20),
                    .value_dim = random.integer(1, 40)};
    Ids ids = test::random_ids(random, random.integer(0, 90));
    const bool states = random.chance(0.5) && !ids.empty() && ids[0] > 0;
    const RowCase row =
        RowMaker{
            .dims = dims,
            .segment_ids = ids,
            .seed = seed,
            .states = states,
            .chunk_options = {.chunk = random.integer(1, 70),
                              .chunking = random.chance(0.5) ? Chunking::aligned : Chunking::grid}}
            .make();
    if (row.segments().valid_tokens() == 0) {
      continue;
    }
    const auto expected = by_tokens(row);
    EXPECT_TRUE(close(chunked<double>(row, Keep::all), expected, 1e-12)) << seed;
    EXPECT_TRUE(close(chunked<float>(row, Keep::inverses), expected, 5e-6)) << seed;
  }
}

TEST(GdnChunked, HoldsItsToleranceAtTheModelsExtents) {
  const Dims dims{.key_heads = 1, .value_heads = 2, .key_dim = 128, .value_dim = 128};
  const RowCase row = RowMaker{.dims = dims, .segment_ids = Ids(330, 1), .states = true}.make();
  const auto expected = by_tokens(row);
  EXPECT_TRUE(close(chunked<double>(row), expected, 1e-12));
  EXPECT_TRUE(close(chunked<float>(row), expected, 5e-6));
}

TEST(GdnChunked, TakesEveryNorm) {
  for (const NormMode norm : {NormMode::root, NormMode::clamp, NormMode::none}) {
    RowCase row =
        RowMaker{.dims = small, .segment_ids = packed, .chunk_options = {.chunk = 8}}.make();
    row.options.norm = norm;
    row.options.eps = 0.7;  // so that clamp has both sides of its bound
    if (norm == NormMode::none) {
      for (double& y : row.y) {
        y *= 0.25;  // beta |k|^2 <= 2
      }
    }
    const auto expected = by_tokens(row);
    EXPECT_TRUE(close(chunked<double>(row), expected, 1e-12));
    EXPECT_TRUE(close(chunked<float>(row), expected, 5e-6));
  }
}

/// Identical keys of full strength replace each other's value: N_i = v_i - v_{i-1}, o_i = (q . k) v_i.
TEST(GdnChunked, IdenticalKeysReplaceTheirValue) {
  RowCase row = RowMaker{.dims = {.key_heads = 1, .value_heads = 1, .key_dim = 4, .value_dim = 2},
                         .segment_ids = Ids(9, 1),
                         .chunk_options = {.chunk = 4}}
                    .make();
  row.options.norm = NormMode::none;
  const std::int64_t columns = row.dims.qkv_columns();
  for (std::size_t t = 0; t < 9; ++t) {
    row.g[t] = 0;
    row.beta[t] = 1;
    for (std::size_t i = 0; i < 4; ++i) {
      row.y[t * static_cast<std::size_t>(columns) + i] = i == 1 ? 3 : 0;      // q
      row.y[t * static_cast<std::size_t>(columns) + 4 + i] = i == 1 ? 1 : 0;  // k
    }
  }
  const auto result = chunked<float>(row);
  for (std::size_t t = 0; t < 9; ++t) {
    for (std::size_t j = 0; j < 2; ++j) {
      // The query scale is 1 / sqrt(4).
      EXPECT_NEAR(result.o[t * 2 + j], 1.5 * row.y[t * static_cast<std::size_t>(columns) + 8 + j],
                  2e-6);
    }
  }
  EXPECT_NEAR(result.final_state[2], result.o[16] / 1.5F, 1e-6);
  EXPECT_EQ(result.final_state[0], 0);
}

TEST(GdnChunked, WritesNothingWithoutBeta) {
  RowCase row =
      RowMaker{
          .dims = small, .segment_ids = Ids(11, 3), .states = true, .chunk_options = {.chunk = 4}}
          .make();
  row.beta.assign(row.beta.size(), 0.0);
  const auto result = chunked<double>(row, Keep::all);
  // S_T = exp(sum g) S_0, and X = I.
  for (std::int64_t h = 0; h < small.value_heads; ++h) {
    double sum = 0;
    for (std::int64_t t = 0; t < 11; ++t) {
      sum += row.g[static_cast<std::size_t>(t * small.value_heads + h)];
    }
    for (std::int64_t i = 0; i < small.key_dim * small.value_dim; ++i) {
      const auto at = static_cast<std::size_t>(h * small.key_dim * small.value_dim + i);
      EXPECT_NEAR(result.final_state[at], std::exp(sum) * row.state[at], 1e-14);
    }
  }
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t j = 0; j < 4; ++j) {
      EXPECT_EQ(result.t_inv[i * 4 + j], i == j ? 1 : 0);
    }
  }
}

TEST(GdnChunked, PassesStatesThroughWhereNoTokenIs) {
  for (const Ids& ids : {Ids{}, Ids(5, 0)}) {
    for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
      RowCase row = RowMaker{.dims = small,
                             .segment_ids = ids,
                             .states = true,
                             .chunk_options = {.chunk = 2, .chunking = chunking}}
                        .make();
      const auto result = chunked<double>(row);
      EXPECT_TRUE(heddle::test::same_bits(result.final_state, row.state));
      EXPECT_TRUE(heddle::test::same_bits(result.d_state, row.d_final));
      for (const auto* zeros : {&result.o, &result.d_y, &result.d_g, &result.d_beta}) {
        EXPECT_TRUE(heddle::test::same_bits(*zeros, std::vector<double>(zeros->size(), 0.0)));
      }
    }
  }
}

TEST(GdnChunked, GivesZerosForAStateThatWasNotGiven) {
  RowCase row = RowMaker{.dims = small, .segment_ids = Ids(5, 0)}.make();
  test::ChunkedCall<float> call(row);
  Workspaces workspaces;
  call.forward(workspaces);
  EXPECT_TRUE(heddle::test::same_bits(call.result.final_state,
                                      std::vector<float>(call.result.final_state.size(), 0.0F)));
}

TEST(GdnChunked, UpdatesAStateInPlace) {
  const RowCase row = RowMaker{.dims = small, .segment_ids = continued, .states = true}.make();
  const auto expected = chunked<float>(row);
  test::ChunkedCall<float> call(row);
  Workspaces workspaces;
  auto outputs = call.outputs();
  outputs.final_recurrent_state = {call.state.data(), small.state_rows(), small.value_dim};
  chunked_forward(call.dims, call.inputs(), call.options, call.chunk_options, outputs, {},
                  workspaces);
  EXPECT_TRUE(heddle::test::same_bits(call.state, expected.final_state));
}

TEST(GdnChunked, ReadsRowsOfAnyStride) {
  const RowCase row =
      RowMaker{.dims = small, .segment_ids = packed, .chunk_options = {.chunk = 8}}.make();
  const auto expected = chunked<float>(row);
  test::ChunkedCall<float> call(row);
  const Dims& d = call.dims;
  const std::int64_t stride = d.qkv_columns() + 3;
  std::vector<float> wide(static_cast<std::size_t>(d.tokens * stride),
                          std::numeric_limits<float>::quiet_NaN());
  std::vector<float> wide_d_y = wide;
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    std::copy_n(call.y.begin() + t * d.qkv_columns(), d.qkv_columns(), wide.begin() + t * stride);
  }
  auto inputs = call.inputs();
  inputs.y = {wide.data(), d.tokens, d.qkv_columns(), stride};
  auto cotangents = call.cotangents();
  cotangents.d_y = {wide_d_y.data(), d.tokens, d.qkv_columns(), stride};
  Workspaces workspaces;
  chunked_forward(d, inputs, call.options, call.chunk_options, call.outputs(), call.residuals(),
                  workspaces);
  chunked_backward(d, inputs, call.options, call.chunk_options, {}, cotangents, workspaces);
  EXPECT_TRUE(heddle::test::same_bits(call.result.o, expected.o));
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    for (std::int64_t j = 0; j < stride; ++j) {
      const float value = wide_d_y[static_cast<std::size_t>(t * stride + j)];
      if (j < d.qkv_columns()) {
        EXPECT_EQ(value, expected.d_y[static_cast<std::size_t>(t * d.qkv_columns() + j)]);
      } else {
        EXPECT_TRUE(std::isnan(value));
      }
    }
  }
}

/// Tokens [first, first + count) as a row of their own, without states.
RowCase piece_of(const RowCase& row, std::int64_t first, std::int64_t count) {
  const Dims& d = row.dims;
  RowCase part = row;
  part.dims.tokens = count;
  part.segment_ids = test::rows_of(row.segment_ids, 1, first, count);
  part.y = test::rows_of(row.y, d.qkv_columns(), first, count);
  part.g = test::rows_of(row.g, d.value_heads, first, count);
  part.beta = test::rows_of(row.beta, d.value_heads, first, count);
  part.d_o = test::rows_of(row.d_o, d.output_columns(), first, count);
  part.state.clear();
  part.d_final.clear();
  return part;
}

TEST(GdnChunked, MayBeCutAnywhereWithTheStateHandedOn) {
  const Ids ids{1, 1, 1, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0, 0, 3, 3, 3, 3};
  const RowCase row =
      RowMaker{.dims = small, .segment_ids = ids, .states = true, .chunk_options = {.chunk = 4}}
          .make();
  const auto expected = by_tokens(row);
  for (std::int64_t cut = 0; cut <= row.dims.tokens; ++cut) {
    RowCase first = piece_of(row, 0, cut);
    first.state = row.state;
    RowCase second = piece_of(row, cut, row.dims.tokens - cut);
    second.d_final = row.d_final;
    second.options.initial_segment =
        Segments(first.segment_ids, row.options.initial_segment).final_segment();
    test::ChunkedCall<double> front(first);
    Workspaces workspaces;
    front.forward(workspaces);
    second.state = front.result.final_state;
    const auto behind = chunked<double>(second);
    first.d_final = behind.d_state;
    auto joined = chunked<double>(first);
    const auto append = [](std::vector<double>& to, const std::vector<double>& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    append(joined.o, behind.o);
    append(joined.d_y, behind.d_y);
    append(joined.d_g, behind.d_g);
    append(joined.d_beta, behind.d_beta);
    joined.final_state = behind.final_state;
    EXPECT_TRUE(close(joined, expected, 1e-12)) << cut;
  }
}

/// Value heads of a group exchanged: what is theirs moves with them, bit for bit; what they share is
/// summed in another order.
TEST(GdnChunked, ValueHeadsOfAGroupAreAlike) {
  const RowCase row = RowMaker{
      .dims = {.key_heads = 1, .value_heads = 2, .key_dim = 5, .value_dim = 3},
      .segment_ids = continued,
      .chunk_options = {
          .chunk = 8}}.make();
  const Dims& d = row.dims;
  const auto exchanged = [&](std::vector<double> values, std::int64_t cols, std::int64_t column,
                             std::int64_t width) {
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      const auto at = values.begin() + t * cols + column;
      std::swap_ranges(at, at + width, at + width);
    }
    return values;
  };
  RowCase other = row;
  other.y = exchanged(row.y, d.qkv_columns(), d.value_column(0), d.value_dim);
  other.g = exchanged(row.g, d.value_heads, 0, 1);
  other.beta = exchanged(row.beta, d.value_heads, 0, 1);
  other.d_o = exchanged(row.d_o, d.output_columns(), 0, d.value_dim);
  const auto expected = chunked<double>(row);
  const auto result = chunked<double>(other);
  using heddle::test::same_bits;
  EXPECT_TRUE(same_bits(exchanged(result.o, d.output_columns(), 0, d.value_dim), expected.o));
  EXPECT_TRUE(same_bits(exchanged(result.d_g, d.value_heads, 0, 1), expected.d_g));
  EXPECT_TRUE(same_bits(exchanged(result.d_beta, d.value_heads, 0, 1), expected.d_beta));
  EXPECT_TRUE(heddle::test::close(
      exchanged(result.d_y, d.qkv_columns(), d.value_column(0), d.value_dim), expected.d_y, 1e-12));
}

}  // namespace
}  // namespace heddle::gdn

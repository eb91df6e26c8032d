#include "heddle/gdn/states.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/row_case.hpp"
#include "heddle/core/error.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants: the output's part left in or too much left out; a skipped chunk that held the last start; a
// start ignored by m; the identity placed in the wrong column of a slice; m written where only decay
// underflowed above the bound; an inverse of another head; v let into m.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::same_bits;
using test::ChunkedCall;
using test::Decay;
using test::Ids;
using test::Keep;
using test::RowCase;
using test::RowMaker;

const Dims model{.key_heads = 2, .value_heads = 4, .key_dim = 40, .value_dim = 24};

template <class A>
struct States {
  std::vector<A> final_state, t_inv, m;
};

/// The states-only pass, and m with the inverses it kept or without.
template <class A>
States<A> states(const RowCase& row, bool keep = true) {
  ChunkedCall<A> call(row, keep ? Keep::inverses : Keep::nothing);
  const Dims& d = call.dims;
  // q is not read.
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    std::fill_n(call.y.begin() + t * d.qkv_columns(), d.key_heads * d.key_dim,
                std::numeric_limits<A>::quiet_NaN());
  }
  Workspaces workspaces;
  chunked_states(d, call.inputs(), call.options, call.chunk_options,
                 call.outputs().final_recurrent_state, call.residuals().t_inv, workspaces);
  States<A> out{call.result.final_state, call.result.t_inv,
                std::vector<A>(static_cast<std::size_t>(d.state_rows() * d.key_dim),
                               heddle::test::poison<A>())};
  transitions(d, call.inputs(), call.options, call.chunk_options,
              ConstMatrixView<A>(call.residuals().t_inv),
              MatrixView<A>(out.m.data(), d.state_rows(), d.key_dim), workspaces);
  return out;
}

/// m from the definition: every unit vector of a state through the recurrence, with nothing to write.
std::vector<double> transitions_by_tokens(const RowCase& row) {
  RowCase silent = row;
  silent.dims.value_dim = row.dims.key_dim;
  const Dims& d = silent.dims;
  silent.y.assign(static_cast<std::size_t>(d.tokens * d.qkv_columns()), 0.0);
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    std::copy_n(row.y.begin() + t * row.dims.qkv_columns(), 2 * d.key_heads * d.key_dim,
                silent.y.begin() + t * d.qkv_columns());
  }
  silent.d_o.assign(static_cast<std::size_t>(d.tokens * d.output_columns()), 0.0);
  silent.d_final.clear();
  silent.state.assign(static_cast<std::size_t>(d.state_rows() * d.key_dim), 0.0);
  for (std::int64_t r = 0; r < d.state_rows(); ++r) {
    silent.state[static_cast<std::size_t>(r * d.key_dim + r % d.key_dim)] = 1;
  }
  return test::by_tokens(silent).final_state;
}

const Ids one_document(70, 1);
const Ids continued{1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0};
const Ids packed{1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2,
                 2, 2, 2, 0, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 0};

TEST(GdnStates, AreThoseOfTheForwardToTheLastBit) {
  for (const Ids& ids : {one_document, continued, packed}) {
    for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
      const RowCase row = RowMaker{.dims = model,
                                   .segment_ids = ids,
                                   .states = true,
                                   .chunk_options = {.chunk = 8, .chunking = chunking}}
                              .make();
      ChunkedCall<float> call(row, Keep::inverses);
      Workspaces workspaces;
      call.forward(workspaces);
      const auto alone = states<float>(row);
      EXPECT_TRUE(same_bits(alone.final_state, call.result.final_state));
      // What the pass leaves of an unfilled place is the poison of both.
      EXPECT_TRUE(same_bits(alone.t_inv, call.result.t_inv));
      EXPECT_TRUE(same_bits(states<float>(row, false).final_state, call.result.final_state));
      EXPECT_TRUE(same_bits(states<float>(row, false).m, alone.m));
    }
  }
}

TEST(GdnStates, AreThoseOfAnyNumberOfThreads) {
  const RowCase row = RowMaker{
      .dims = model,
      .segment_ids = one_document,
      .decay = Decay::long_memory,
      .states = true,
      .chunk_options = {
          .chunk = 16}}.make();
  const auto expected = states<float>(row);
  for (const int threads : {1, 3, 9}) {
    heddle::test::with_threads(threads, [&] {
      const auto result = states<float>(row);
      EXPECT_TRUE(same_bits(result.final_state, expected.final_state));
      EXPECT_TRUE(same_bits(result.t_inv, expected.t_inv));
      EXPECT_TRUE(same_bits(result.m, expected.m));
    });
  }
}

TEST(GdnStates, SkipWhatTheFinalStateDoesNotKnow) {
  // NaN in everything before the last start, or on the grid before its chunk, and in the state.
  for (const auto& [chunking, tokens] :
       {std::pair{Chunking::aligned, 22}, std::pair{Chunking::grid, 16}}) {
    RowCase row = RowMaker{.dims = model,
                           .segment_ids = packed,
                           .states = true,
                           .chunk_options = {.chunk = 8, .chunking = chunking}}
                      .make();
    const auto expected = states<float>(row).final_state;
    const auto numbers = static_cast<std::size_t>(tokens * model.qkv_columns());
    for (std::size_t i = 0; i < numbers; ++i) {
      row.y[i] = std::numeric_limits<double>::quiet_NaN();
    }
    row.state.assign(row.state.size(), std::numeric_limits<double>::quiet_NaN());
    EXPECT_TRUE(same_bits(states<float>(row).final_state, expected));
    EXPECT_TRUE(same_bits(states<float>(row, false).final_state, expected));
  }
}

TEST(GdnTransitions, AreTheProductOfTheTokens) {
  for (const Ids& ids : {one_document, continued}) {
    for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
      const RowCase row = RowMaker{.dims = model,
                                   .segment_ids = ids,
                                   .decay = Decay::long_memory,
                                   .states = true,
                                   .chunk_options = {.chunk = 16, .chunking = chunking}}
                              .make();
      const auto expected = transitions_by_tokens(row);
      EXPECT_TRUE(close(states<float>(row).m, expected, 1e-5));
      EXPECT_TRUE(close(states<double>(row).m, expected, 1e-13));
    }
  }
}

/// final state = m S_0 + what is written; and two pieces make one: (M2 M1, M2 B1 + B2).
TEST(GdnTransitions, CarryAStateOverTheRow) {
  const RowCase row = RowMaker{
      .dims = model,
      .segment_ids = one_document,
      .states = true,
      .chunk_options = {
          .chunk = 16}}.make();
  RowCase from_zero = row;
  from_zero.state.assign(row.state.size(), 0.0);
  const auto whole = states<double>(row);
  std::vector<double> combined = states<double>(from_zero).final_state;
  const auto product_added = [](const std::vector<double>& m, const std::vector<double>& s,
                                std::int64_t columns, std::vector<double>& sum) {
    for (std::int64_t r = 0; r < model.state_rows(); ++r) {
      const std::int64_t head_row = r / model.key_dim * model.key_dim;
      for (std::int64_t i = 0; i < model.key_dim; ++i) {
        for (std::int64_t j = 0; j < columns; ++j) {
          sum[static_cast<std::size_t>(r * columns + j)] +=
              m[static_cast<std::size_t>(r * model.key_dim + i)] *
              s[static_cast<std::size_t>((head_row + i) * columns + j)];
        }
      }
    }
  };
  product_added(whole.m, row.state, model.value_dim, combined);
  EXPECT_TRUE(close(combined, whole.final_state, 1e-12));

  const auto piece = [&](std::int64_t first, std::int64_t count) {
    RowCase part = from_zero;
    part.dims.tokens = count;
    part.segment_ids = Ids(static_cast<std::size_t>(count), 1);
    part.y = test::rows_of(row.y, model.qkv_columns(), first, count);
    part.g = test::rows_of(row.g, model.value_heads, first, count);
    part.beta = test::rows_of(row.beta, model.value_heads, first, count);
    part.d_o = test::rows_of(row.d_o, model.output_columns(), first, count);
    return states<double>(part);
  };
  const auto first = piece(0, 29);
  const auto second = piece(29, 41);
  std::vector<double> m(whole.m.size(), 0.0);
  product_added(second.m, first.m, model.key_dim, m);
  EXPECT_TRUE(close(m, whole.m, 1e-12));
  std::vector<double> written = second.final_state;
  product_added(second.m, first.final_state, model.value_dim, written);
  EXPECT_TRUE(close(written, states<double>(from_zero).final_state, 1e-12));
}

TEST(GdnTransitions, AreZeroWhereADocumentStartsAndTheIdentityWhereNoTokenIs) {
  const RowCase cut =
      RowMaker{.dims = model, .segment_ids = packed, .states = true, .chunk_options = {.chunk = 8}}
          .make();
  const auto zero = states<float>(cut).m;
  EXPECT_TRUE(same_bits(zero, std::vector<float>(zero.size(), 0.0F)));

  const RowCase padding = RowMaker{.dims = model, .segment_ids = Ids(9, 0)}.make();
  const auto identity = states<float>(padding).m;
  for (std::int64_t r = 0; r < model.state_rows(); ++r) {
    for (std::int64_t j = 0; j < model.key_dim; ++j) {
      EXPECT_EQ(identity[static_cast<std::size_t>(r * model.key_dim + j)],
                r % model.key_dim == j ? 1 : 0);
    }
  }
}

TEST(GdnTransitions, BecomeExactlyZeroInsteadOfSubnormal) {
  // e^-1 a token: 48 tokens are 1e-21, 96 are 2e-42.
  for (const auto& [tokens, zero] : {std::pair{48, false}, std::pair{96, true}}) {
    const RowCase row = RowMaker{
        .dims = model,
        .segment_ids = Ids(static_cast<std::size_t>(tokens), 1),
        .decay = Decay::one,
        .states = true,
        .chunk_options = {
            .chunk = 16}}.make();
    const auto m = states<float>(row).m;
    const bool all_zero = std::all_of(m.begin(), m.end(), [](float x) { return x == 0; });
    EXPECT_EQ(all_zero, zero);
    if (!zero) {
      EXPECT_TRUE(close(m, transitions_by_tokens(row), 1e-5));
    }
  }
}

TEST(GdnStates, TakeTheWorkspaceTheySay) {
  const Dims dims{.tokens = 128, .key_heads = 1, .value_heads = 3, .key_dim = 40, .value_dim = 24};
  const RowCase row = RowMaker{
      .dims = dims,
      .segment_ids = Ids(128, 1),
      .decay = Decay::none,
      .states = true,
      .chunk_options = {
          .chunk = 32}}.make();
  ChunkedCall<float> call(row);
  heddle::test::with_threads(1, [&] {
    Workspaces workspaces;
    chunked_states(call.dims, call.inputs(), call.options, call.chunk_options,
                   call.outputs().final_recurrent_state, MatrixView<float>(), workspaces);
    EXPECT_EQ(workspaces.high_water_bytes(),
              chunked_workspace_bytes<float>(dims, call.chunk_options));
    Workspaces for_m;
    std::vector<float> m(static_cast<std::size_t>(dims.state_rows() * dims.key_dim));
    transitions(call.dims, call.inputs(), call.options, call.chunk_options,
                ConstMatrixView<float>(),
                MatrixView<float>(m.data(), dims.state_rows(), dims.key_dim), for_m);
    EXPECT_EQ(for_m.high_water_bytes(),
              transitions_workspace_bytes<float>(dims, call.chunk_options));
  });
}

TEST(GdnStates, RefuseWhatDoesNotFit) {
  const RowCase row = RowMaker{.dims = model, .segment_ids = continued}.make();
  ChunkedCall<float> call(row);
  Workspaces workspaces;
  std::vector<float> m(static_cast<std::size_t>(model.state_rows() * model.key_dim));
  EXPECT_EQ(heddle::test::thrown_text<Error>([&] {
              chunked_states(call.dims, call.inputs(), call.options, call.chunk_options,
                             MatrixView<float>(), MatrixView<float>(), workspaces);
            }),
            "gdn::chunked_states: final_state = null: required");
  EXPECT_EQ(heddle::test::thrown_text<Error>([&] {
              transitions(call.dims, call.inputs(), call.options, call.chunk_options,
                          ConstMatrixView<float>(),
                          MatrixView<float>(m.data(), model.state_rows() - 1, model.key_dim),
                          workspaces);
            }),
            "gdn::transitions: m.rows = 159: must equal value_heads * key_dim (160)");
}

}  // namespace
}  // namespace heddle::gdn

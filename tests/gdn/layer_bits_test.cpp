#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/layer_calls.hpp"
#include "gdn/problem.hpp"
#include "heddle/core/isa.hpp"
#include "heddle/gdn/layer.hpp"
#include "heddle/gdn/layer_cost.hpp"
#include "support/compare.hpp"
#include "support/threads.hpp"

// What the layer promises to the last bit: whatever cuts, keeps or surrounds it.
//
// Mutants these tests are written against: a slice that reads or writes another's columns; a residual
// of the wrong chunk or head; a document's bits that depend on its offset, on its neighbours or on the
// padding around it; a mask that multiplies, so that NaN passes; the states-only pass taking other
// steps; bf16 rounded in between; parameters overwritten where they are to be added to.

namespace heddle::gdn {
namespace {

using heddle::test::same_bits;
using test::ForwardResult;
using test::Given;
using test::Gradients;
using test::Kept;
using test::layer_backward;
using test::layer_forward;
using test::OwnedResiduals;
using test::poison;
using test::Problem;
using test::random_problem;
using test::stored_as;

using Ids = std::vector<std::int32_t>;
using Single = Problem<float, float, float>;

constexpr Dims dims{.key_heads = 2, .value_heads = 4, .key_dim = 20, .value_dim = 40, .kernel = 4};

constexpr Recurrence recurrences[] = {Recurrence::chunked, Recurrence::token_by_token};

LayerOptions options_of(Recurrence recurrence, std::int64_t chunk = 16) {
  return {.chunks = {.chunk = chunk}, .recurrence = recurrence};
}

Ids row(const std::vector<int>& lengths) {
  Ids ids;
  std::int32_t id = 0;
  for (const int length : lengths) {
    id += length > 0 ? 1 : 0;
    ids.insert(ids.end(), static_cast<std::size_t>(std::abs(length)), length > 0 ? id : 0);
  }
  return ids;
}

Single single(const Ids& ids, std::uint64_t seed, Given given = Given::everything) {
  return stored_as<float>(random_problem(dims, ids, seed, given));
}

void expect_same(const ForwardResult<float, float, float>& a,
                 const ForwardResult<float, float, float>& b, const std::string& name) {
  EXPECT_TRUE(same_bits(a.o, b.o)) << name;
  EXPECT_TRUE(same_bits(a.final_recurrent_state, b.final_recurrent_state)) << name;
  EXPECT_TRUE(same_bits(a.final_conv_state, b.final_conv_state)) << name;
}

void expect_same(const Gradients<float>& a, const Gradients<float>& b, const std::string& name) {
  EXPECT_TRUE(same_bits(a.d_qkv, b.d_qkv)) << name;
  EXPECT_TRUE(same_bits(a.d_conv_weight, b.d_conv_weight)) << name;
  EXPECT_TRUE(same_bits(a.d_conv_bias, b.d_conv_bias)) << name;
  EXPECT_TRUE(same_bits(a.d_a, b.d_a)) << name;
  EXPECT_TRUE(same_bits(a.d_b, b.d_b)) << name;
  EXPECT_TRUE(same_bits(a.d_A_log, b.d_A_log)) << name;
  EXPECT_TRUE(same_bits(a.d_dt_bias, b.d_dt_bias)) << name;
  EXPECT_TRUE(same_bits(a.d_conv_state, b.d_conv_state)) << name;
  EXPECT_TRUE(same_bits(a.d_recurrent_state, b.d_recurrent_state)) << name;
}

TEST(GdnLayerBits, AnyNumberOfThreadsAndEveryPath) {
  const Single p = single(row({40, -2, 33}), 1);
  for (const Recurrence recurrence : recurrences) {
    const auto expected = layer_forward(p, options_of(recurrence));
    for (const int threads : {1, 2, 7}) {
      heddle::test::with_threads(threads, [&] {
        expect_same(layer_forward(p, options_of(recurrence)), expected,
                    std::to_string(threads) + " threads");
      });
    }
    for (const Path path : available_paths()) {
      const ScopedPath scoped(path);
      expect_same(layer_forward(p, options_of(recurrence)), expected, path_name(path).data());
    }
  }
  const auto expected = layer_backward(p, options_of(Recurrence::chunked));
  for (const int threads : {1, 2, 7}) {
    heddle::test::with_threads(threads, [&] {
      expect_same(layer_backward(p, options_of(Recurrence::chunked)), expected,
                  std::to_string(threads) + " threads");
    });
  }
  for (const Path path : available_paths()) {
    const ScopedPath scoped(path);
    expect_same(layer_backward(p, options_of(Recurrence::chunked)), expected,
                path_name(path).data());
  }
}

TEST(GdnLayerBits, SlicesOfKeyHeadsWriteTheirOwnAlone) {
  const Single p = single(row({30, -2, 21}), 2);
  for (const Recurrence recurrence : recurrences) {
    const auto whole = layer_forward(p, options_of(recurrence));
    ForwardResult<float, float, float> found(p.dims);
    LayerScratch scratch;
    forward(p.dims, p.inputs(), p.options, options_of(recurrence), found.outputs(p.dims),
            ChunkResiduals<float>{}, KeyHeads{1, 1}, scratch);
    const std::int64_t half = dims.output_columns() / 2;
    for (std::int64_t t = 0; t < p.dims.tokens; ++t) {
      EXPECT_TRUE(std::isnan(found.o[static_cast<std::size_t>(t * 2 * half)]));
    }
    forward(p.dims, p.inputs(), p.options, options_of(recurrence), found.outputs(p.dims),
            ChunkResiduals<float>{}, KeyHeads{0, 1}, scratch);
    expect_same(found, whole, "two slices");
  }
  const auto whole = layer_backward(p, options_of(Recurrence::chunked));
  Gradients<float> found(p);
  LayerScratch scratch;
  for (const std::int64_t first : {1, 0}) {
    backward(p.dims, p.inputs(), p.options, options_of(Recurrence::chunked),
             ChunkResiduals<const float>{}, p.cotangents(), found.cotangents(p.dims),
             KeyHeads{first, 1}, scratch);
  }
  expect_same(found, whole, "two slices");
}

TEST(GdnLayerBits, WhateverResidualsAreKept) {
  const Single p = single(row({50, -2, 37, 3}), 3);
  for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
    const LayerOptions options{.chunks = {.chunk = 16, .chunking = chunking}};
    const auto expected = layer_backward(p, options, Kept::nothing);
    expect_same(layer_backward(p, options, Kept::inverses), expected, "inverses");
    expect_same(layer_backward(p, options, Kept::everything), expected, "inverses and states");
  }
}

TEST(GdnLayerBits, StatesOnlyTakesTheStepsOfTheForward) {
  for (const Ids& ids : {row({50, -2, 37, 3}), Ids(40, 1)}) {
    const Single p = single(ids, 4);
    for (const Recurrence recurrence : recurrences) {
      const LayerOptions options = options_of(recurrence);
      const bool chunked = recurrence == Recurrence::chunked;
      OwnedResiduals<float> kept(p, options, chunked ? Kept::inverses : Kept::nothing);
      OwnedResiduals<float> expected_kept(p, options, chunked ? Kept::inverses : Kept::nothing);
      ForwardResult<float, float, float> found(p.dims);
      ForwardResult<float, float, float> expected(p.dims);
      LayerScratch scratch;
      forward(p.dims, p.inputs(), p.options, options, expected.outputs(p.dims),
              expected_kept.views(), scratch);
      const auto outputs = found.outputs(p.dims);
      states(p.dims, p.inputs(), p.options, options,
             StatesOutputs<float>{.final_recurrent_state = outputs.final_recurrent_state,
                                  .final_conv_state = outputs.final_conv_state},
             kept.views(), scratch);
      found.o = expected.o;
      expect_same(found, expected, "states");
      EXPECT_TRUE(same_bits(kept.t_inv, expected_kept.t_inv));
    }
  }
}

/// Rows [first, first + count) of a gradient or an output.
std::vector<float> tokens(const std::vector<float>& values, std::int64_t cols, std::int64_t first,
                          std::int64_t count) {
  return test::rows_of(values, cols, first, count);
}

/// A document alone, and the same one among others that are NaN, behind and before padding.
TEST(GdnLayerBits, ADocumentDoesNotKnowItsSurroundings) {
  const std::int64_t length = 41;
  const Single alone = single(Ids(static_cast<std::size_t>(length), 1), 5, Given::bias);
  for (const Recurrence recurrence :
       {Recurrence::chunked, Recurrence::token_by_token, Recurrence::automatic}) {
    const LayerOptions options = options_of(recurrence);
    const auto expected = layer_forward(alone, options);
    const auto expected_gradients = layer_backward(alone, options);
    for (const std::vector<int>& before :
         std::vector<std::vector<int>>{{}, {-5}, {1}, {16}, {7, -1}, {-64, 30, -3, 2}}) {
      Ids ids = row(before);
      const auto offset = static_cast<std::int64_t>(ids.size());
      ids.insert(ids.end(), static_cast<std::size_t>(length), 99);
      for (const int behind : {-4, 8}) {
        ids.insert(ids.end(), static_cast<std::size_t>(std::abs(behind)), behind > 0 ? 77 : 0);
      }
      Single packed = single(ids, 6, Given::bias);
      packed.conv_weight = alone.conv_weight;
      packed.conv_bias = alone.conv_bias;
      packed.A_log = alone.A_log;
      packed.dt_bias = alone.dt_bias;
      packed.d_final_recurrent_state.clear();
      packed.d_final_conv_state.clear();
      const auto embed = [&](const std::vector<float>& from, std::vector<float>& to,
                             std::int64_t cols) {
        std::fill(to.begin(), to.end(), poison<float>());
        std::copy(from.begin(), from.end(), to.begin() + offset * cols);
      };
      embed(alone.qkv, packed.qkv, dims.qkv_columns());
      embed(alone.a, packed.a, dims.value_heads);
      embed(alone.b, packed.b, dims.value_heads);
      embed(alone.d_o, packed.d_o, dims.output_columns());
      Single without_final = alone;
      without_final.d_final_recurrent_state.clear();
      without_final.d_final_conv_state.clear();
      const auto found = layer_forward(packed, options);
      const auto gradients = layer_backward(packed, options);
      const auto gradients_alone = layer_backward(without_final, options);
      EXPECT_TRUE(same_bits(tokens(found.o, dims.output_columns(), offset, length), expected.o))
          << offset;
      EXPECT_TRUE(same_bits(tokens(gradients.d_qkv, dims.qkv_columns(), offset, length),
                            gradients_alone.d_qkv))
          << offset;
      EXPECT_TRUE(
          same_bits(tokens(gradients.d_a, dims.value_heads, offset, length), gradients_alone.d_a))
          << offset;
      EXPECT_TRUE(
          same_bits(tokens(gradients.d_b, dims.value_heads, offset, length), gradients_alone.d_b))
          << offset;
    }
    EXPECT_FALSE(expected_gradients.d_qkv.empty());
  }
}

TEST(GdnLayerBits, AStateOfAnotherDocumentIsNotRead) {
  Single p = single(row({20, 15}), 7);
  p.options.initial_segment = 9;
  for (const Recurrence recurrence : recurrences) {
    Single clean = p;
    std::fill(clean.recurrent_state.begin(), clean.recurrent_state.end(), 0.0F);
    std::fill(clean.conv_state.begin(), clean.conv_state.end(), 0.0F);
    Single foreign = p;
    std::fill(foreign.recurrent_state.begin(), foreign.recurrent_state.end(), poison<float>());
    std::fill(foreign.conv_state.begin(), foreign.conv_state.end(), poison<float>());
    expect_same(layer_forward(foreign, options_of(recurrence)),
                layer_forward(clean, options_of(recurrence)), "forward");
    const auto gradients = layer_backward(foreign, options_of(recurrence));
    expect_same(gradients, layer_backward(clean, options_of(recurrence)), "backward");
    EXPECT_EQ(gradients.d_recurrent_state,
              std::vector<float>(gradients.d_recurrent_state.size(), 0.0F));
    EXPECT_EQ(gradients.d_conv_state, std::vector<float>(gradients.d_conv_state.size(), 0.0F));
  }
}

TEST(GdnLayerBits, GridCutsALoneDocumentOfWholeChunksAsAlignedDoes) {
  const Single p = single(Ids(48, 1), 8, Given::bias);
  const LayerOptions aligned = options_of(Recurrence::chunked);
  LayerOptions grid = aligned;
  grid.chunks.chunking = Chunking::grid;
  expect_same(layer_forward(p, grid), layer_forward(p, aligned), "forward");
  expect_same(layer_backward(p, grid), layer_backward(p, aligned), "backward");
}

/// Key heads with their groups, and value heads inside a group, in another order.
TEST(GdnLayerBits, HeadsInAnotherOrder) {
  const Single p = single(row({30, 7}), 9, Given::bias);
  const auto permuted = [&](const std::vector<std::int64_t>& key_order,
                            const std::vector<std::int64_t>& value_order) {
    Single q = p;
    const auto move_columns = [](std::vector<float>& to, const std::vector<float>& from,
                                 std::int64_t cols, std::int64_t first, std::int64_t width,
                                 const std::vector<std::int64_t>& order) {
      const std::int64_t rows = static_cast<std::int64_t>(from.size()) / cols;
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::size_t h = 0; h < order.size(); ++h) {
          std::copy_n(from.begin() + r * cols + first + order[h] * width, width,
                      to.begin() + r * cols + first + static_cast<std::int64_t>(h) * width);
        }
      }
    };
    const auto move_qkv = [&](std::vector<float>& to, const std::vector<float>& from,
                              std::int64_t each) {
      const std::int64_t cols = dims.qkv_columns() * each;
      move_columns(to, from, cols, 0, dims.key_dim * each, key_order);
      move_columns(to, from, cols, dims.key_column(0) * each, dims.key_dim * each, key_order);
      move_columns(to, from, cols, dims.value_column(0) * each, dims.value_dim * each, value_order);
    };
    move_qkv(q.qkv, p.qkv, 1);
    move_qkv(q.conv_weight, p.conv_weight, dims.kernel);
    move_qkv(q.conv_bias, p.conv_bias, 1);
    for (auto member : {&Single::a, &Single::b}) {
      move_columns(q.*member, p.*member, dims.value_heads, 0, 1, value_order);
    }
    for (auto member : {&Single::A_log, &Single::dt_bias}) {
      move_columns(q.*member, p.*member, dims.value_heads, 0, 1, value_order);
    }
    move_columns(q.d_o, p.d_o, dims.output_columns(), 0, dims.value_dim, value_order);
    q.d_final_recurrent_state.clear();
    q.d_final_conv_state.clear();
    return std::pair(q, [=](const std::vector<float>& o) {
      std::vector<float> to = o;
      move_columns(to, o, dims.output_columns(), 0, dims.value_dim, value_order);
      return to;
    });
  };
  for (const Recurrence recurrence : recurrences) {
    const auto expected = layer_forward(p, options_of(recurrence));
    const auto [swapped, of_swapped] = permuted({1, 0}, {2, 3, 0, 1});
    EXPECT_TRUE(
        same_bits(layer_forward(swapped, options_of(recurrence)).o, of_swapped(expected.o)));
    const auto [inside, of_inside] = permuted({0, 1}, {1, 0, 2, 3});
    EXPECT_TRUE(same_bits(layer_forward(inside, options_of(recurrence)).o, of_inside(expected.o)));
    const auto [across, of_across] = permuted({0, 1}, {2, 1, 0, 3});
    EXPECT_FALSE(same_bits(layer_forward(across, options_of(recurrence)).o, of_across(expected.o)))
        << "a value head belongs to its key head";
  }
}

TEST(GdnLayerBits, StatesMayBeUpdatedInPlace) {
  for (const Ids& ids : {row({20, 5}), Ids{1}, Ids{}, Ids{0, 0}}) {
    Single p = single(ids, 10);
    p.options.initial_segment = 1;
    if (!ids.empty() && ids[0] == 0) {
      p.options.initial_segment = 0;
    }
    for (const Recurrence recurrence : recurrences) {
      const auto expected = layer_forward(p, options_of(recurrence));
      Single q = p;
      ForwardResult<float, float, float> found(p.dims);
      auto outputs = found.outputs(p.dims);
      outputs.final_recurrent_state =
          test::matrix(q.recurrent_state, dims.state_rows(), dims.value_dim);
      outputs.final_conv_state = test::matrix(q.conv_state, dims.window_rows(), dims.qkv_columns());
      LayerScratch scratch;
      forward(q.dims, q.inputs(), q.options, options_of(recurrence), outputs,
              ChunkResiduals<float>{}, scratch);
      EXPECT_TRUE(same_bits(q.recurrent_state, expected.final_recurrent_state));
      EXPECT_TRUE(same_bits(q.conv_state, expected.final_conv_state));
      EXPECT_TRUE(same_bits(found.o, expected.o));
    }
    const auto expected = layer_backward(p);
    Gradients<float> found(p);
    auto wanted = found.cotangents(p.dims);
    Single q = p;
    wanted.d_recurrent_state =
        test::matrix(q.d_final_recurrent_state, dims.state_rows(), dims.value_dim);
    wanted.d_conv_state =
        test::matrix(q.d_final_conv_state, dims.window_rows(), dims.qkv_columns());
    LayerScratch scratch;
    backward(q.dims, q.inputs(), q.options, LayerOptions{}, ChunkResiduals<const float>{},
             q.cotangents(), wanted, scratch);
    EXPECT_TRUE(same_bits(q.d_final_recurrent_state, expected.d_recurrent_state));
    EXPECT_TRUE(same_bits(q.d_final_conv_state, expected.d_conv_state));
    EXPECT_TRUE(same_bits(found.d_qkv, expected.d_qkv));
  }
}

TEST(GdnLayerBits, ParametersAreAddedToWhereTheySaySo) {
  const Single p = single(row({20, 5}), 11);
  const auto expected = layer_backward(p);
  Gradients<float> found(p);
  for (auto member : {&Gradients<float>::d_conv_weight, &Gradients<float>::d_conv_bias,
                      &Gradients<float>::d_A_log, &Gradients<float>::d_dt_bias}) {
    std::fill((found.*member).begin(), (found.*member).end(), 2.0F);
  }
  LayerScratch scratch;
  backward(p.dims, p.inputs(), p.options, LayerOptions{}, ChunkResiduals<const float>{},
           p.cotangents(), found.cotangents(p.dims, Write::accumulate), scratch);
  const auto plus_two = [](std::vector<float> values) {
    for (float& value : values) {
      value = 2.0F + value;
    }
    return values;
  };
  EXPECT_TRUE(same_bits(found.d_conv_weight, plus_two(expected.d_conv_weight)));
  EXPECT_TRUE(same_bits(found.d_conv_bias, plus_two(expected.d_conv_bias)));
  EXPECT_TRUE(same_bits(found.d_A_log, plus_two(expected.d_A_log)));
  EXPECT_TRUE(same_bits(found.d_dt_bias, plus_two(expected.d_dt_bias)));
  EXPECT_TRUE(same_bits(found.d_qkv, expected.d_qkv));
}

/// bf16 storage is widened exactly, and rounded once at the end.
TEST(GdnLayerBits, NarrowStorageIsTheWideCallRounded) {
  const auto narrow =
      stored_as<bfloat16>(random_problem(dims, row({30, 7}), 12, Given::everything));
  Single same;
  same.dims = narrow.dims;
  same.options = narrow.options;
  same.segment_ids = narrow.segment_ids;
  const auto widened = [](const std::vector<bfloat16>& from) {
    return std::vector<float>(from.begin(), from.end());
  };
  same.qkv = widened(narrow.qkv);
  same.a = widened(narrow.a);
  same.b = widened(narrow.b);
  same.conv_state = widened(narrow.conv_state);
  same.d_o = widened(narrow.d_o);
  same.conv_weight = widened(narrow.conv_weight);
  same.conv_bias = widened(narrow.conv_bias);
  same.A_log = narrow.A_log;
  same.dt_bias = narrow.dt_bias;
  same.recurrent_state = narrow.recurrent_state;
  same.d_final_recurrent_state = narrow.d_final_recurrent_state;
  same.d_final_conv_state = narrow.d_final_conv_state;
  for (const Recurrence recurrence : recurrences) {
    const auto rounded = test::layer_forward_as<bfloat16>(narrow, options_of(recurrence));
    const auto wide = layer_forward(same, options_of(recurrence));
    std::vector<bfloat16> expected;
    for (const float value : wide.o) {
      expected.push_back(bfloat16(value));
    }
    EXPECT_TRUE(same_bits(rounded.o, expected));
    EXPECT_TRUE(same_bits(rounded.final_recurrent_state, wide.final_recurrent_state));
  }
  expect_same(layer_backward(narrow), layer_backward(same), "cotangents are not rounded at all");
}

TEST(GdnLayerBits, ScratchIsWhatTheFormulasSay) {
  const Single p = single(Ids(100, 1), 13);
  const std::size_t whole_copy = p.qkv.size() * sizeof(float);
  for (const Recurrence recurrence : recurrences) {
    for (const std::int64_t chunk : {16, 64}) {
      const LayerOptions options = options_of(recurrence, chunk);
      ForwardResult<float, float, float> result(p.dims);
      LayerScratch scratch;
      heddle::test::with_threads(1, [&] {
        forward(p.dims, p.inputs(), p.options, options, result.outputs(p.dims),
                ChunkResiduals<float>{}, scratch);
      });
      EXPECT_EQ(
          (LayerWorkspaceBytes{scratch.row_high_water_bytes(), scratch.thread_high_water_bytes()}),
          layer_forward_workspace_bytes<float>(p.dims, options, Residuals::none));
    }
  }
  const LayerOptions options = options_of(Recurrence::chunked);
  for (const Kept kept : {Kept::nothing, Kept::inverses, Kept::everything}) {
    OwnedResiduals<float> residuals(p, options, kept);
    LayerScratch forward_scratch;
    LayerScratch scratch;
    ForwardResult<float, float, float> result(p.dims);
    Gradients<float> gradients(p);
    heddle::test::with_threads(1, [&] {
      forward(p.dims, p.inputs(), p.options, options, result.outputs(p.dims), residuals.views(),
              forward_scratch);
      backward(p.dims, p.inputs(), p.options, options, residuals.const_views(), p.cotangents(),
               gradients.cotangents(p.dims), scratch);
    });
    const Residuals given = kept == Kept::nothing    ? Residuals::none
                            : kept == Kept::inverses ? Residuals::inverses
                                                     : Residuals::inverses_and_states;
    EXPECT_EQ(
        (LayerWorkspaceBytes{scratch.row_high_water_bytes(), scratch.thread_high_water_bytes()}),
        layer_backward_workspace_bytes<float>(p.dims, options, residuals.chunks, given));
  }
  // At the size of a model: nothing of the size of a widened input, and linear in tokens.
  Dims large{.tokens = 16384, .key_heads = 16, .value_heads = 64, .key_dim = 128, .value_dim = 128};
  const auto bytes = [&](std::int64_t count) {
    large.tokens = count;
    return layer_backward_workspace_bytes<bfloat16>(large, LayerOptions{}, count / 64,
                                                    Residuals::none);
  };
  const std::size_t copy = static_cast<std::size_t>(16384 * large.qkv_columns()) * sizeof(float);
  EXPECT_LT(bytes(16384).row + bytes(16384).thread, copy / 8);
  EXPECT_LT(bytes(65536).row, 5 * bytes(16384).row);
  EXPECT_LT(bytes(65536).thread, 5 * bytes(16384).thread);
  EXPECT_GT(whole_copy, 0U);
}

}  // namespace
}  // namespace heddle::gdn

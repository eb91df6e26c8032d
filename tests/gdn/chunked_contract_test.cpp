#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/row_case.hpp"
#include "heddle/core/error.hpp"
#include "heddle/gdn/chunked.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

namespace heddle::gdn {
namespace {

using test::ChunkedCall;
using test::Ids;
using test::Keep;
using test::RowCase;
using test::RowMaker;

const Dims model{.key_heads = 1, .value_heads = 3, .key_dim = 40, .value_dim = 24};

RowCase long_row() {
  return RowMaker{
      .dims = model, .segment_ids = Ids(200, 1), .states = true, .chunk_options = {.chunk = 32}}
      .make();
}

TEST(GdnChunkedContract, TakesTheWorkspaceItSays) {
  for (const Keep keep : test::every_policy) {
    ChunkedCall<float> call(long_row(), keep);
    Workspace forward;
    chunked_forward(call.dims, call.inputs(), call.options, call.chunk_options, call.outputs(),
                    call.residuals(), KeyHeads{0, 1}, forward);
    EXPECT_EQ(forward.high_water_bytes(),
              chunked_workspace_bytes<float>(call.dims, call.chunk_options));
    Workspace backward;
    chunked_backward(
        call.dims, call.inputs(), call.options, call.chunk_options,
        ChunkResiduals<const float>{call.residuals().t_inv, call.residuals().chunk_states},
        call.cotangents(), KeyHeads{0, 1}, backward);
    EXPECT_EQ(backward.high_water_bytes(),
              chunked_backward_workspace_bytes<float>(call.dims, call.chunk_options, call.chunks,
                                                      keep == Keep::all));
  }
}

TEST(GdnChunkedContract, TakesNoMoreOnAnyThread) {
  ChunkedCall<float> call(long_row());
  for (const int threads : {1, 2, 5}) {
    heddle::test::with_threads(threads, [&] {
      Workspaces workspaces;
      call.forward(workspaces);
      EXPECT_LE(workspaces.high_water_bytes(),
                chunked_workspace_bytes<float>(call.dims, call.chunk_options));
      EXPECT_GT(workspaces.high_water_bytes(), 0U);
    });
  }
}

TEST(GdnChunkedContract, NeedsNoMoreForALongerRowButCheckpoints) {
  const ChunkOptions options;
  const auto dims = [](std::int64_t tokens) {
    return Dims{
        .tokens = tokens, .key_heads = 16, .value_heads = 64, .key_dim = 128, .value_dim = 128};
  };
  EXPECT_EQ(chunked_workspace_bytes<float>(dims(4096), options),
            chunked_workspace_bytes<float>(dims(65536), options));
  EXPECT_EQ(chunked_backward_workspace_bytes<float>(dims(4096), options, 64, true),
            chunked_backward_workspace_bytes<float>(dims(65536), options, 1024, true));
  // 32 checkpoints and 32 states of the block at work, 4 heads, against 8 and 8.
  EXPECT_EQ(chunked_backward_workspace_bytes<float>(dims(65536), options, 1024, false) -
                chunked_backward_workspace_bytes<float>(dims(4096), options, 64, false),
            static_cast<std::size_t>(2 * (32 - 8) * 4 * 128 * 128 * 4));
  // The working set of a task: below the 4 heads' states and rows three times over, far below a row.
  EXPECT_LT(chunked_workspace_bytes<float>(dims(65536), options), std::size_t{2} << 20);
}

/// The text of the error of a call that `spoil` made wrong.
template <class Spoil>
std::string refused(const Spoil& spoil) {
  ChunkedCall<float> call(RowMaker{.dims = model, .segment_ids = {1, 1, 1}, .states = true}.make(),
                          Keep::all);
  ChunkedInputs<float> inputs = call.inputs();
  auto outputs = call.outputs();
  auto residuals = call.residuals();
  auto cotangents = call.cotangents();
  bool backward = false;
  spoil(call, inputs, outputs, residuals, cotangents, backward);
  Workspaces workspaces;
  return heddle::test::thrown_text<Error>([&] {
    if (backward) {
      chunked_backward(call.dims, inputs, call.options, call.chunk_options,
                       ChunkResiduals<const float>{residuals.t_inv, residuals.chunk_states},
                       cotangents, workspaces);
    } else {
      chunked_forward(call.dims, inputs, call.options, call.chunk_options, outputs, residuals,
                      workspaces);
    }
  });
}

TEST(GdnChunkedContract, RefusesWhatDoesNotFit) {
  using Call = ChunkedCall<float>;
  using In = ChunkedInputs<float>;
  using Out = ChunkedOutputs<float, float>;
  using Kept = ChunkResiduals<float>;
  using Cot = ChunkedCotangents<float, float>;
  EXPECT_EQ(refused([](Call& c, In&, Out&, Kept&, Cot&, bool&) { c.dims.key_heads = 2; }),
            "gdn::chunked_forward: dims.value_heads = 3: must be a multiple of dims.key_heads (2)");
  EXPECT_EQ(
      refused([](Call&, In& in, Out&, Kept&, Cot&, bool&) { in.y = in.y.column_block(0, 7); }),
      "gdn::chunked_forward: y.cols = 7: must equal dims.qkv_columns() (152)");
  EXPECT_EQ(refused([](Call&, In& in, Out&, Kept&, Cot&, bool&) { in.g = in.g.row_block(0, 2); }),
            "gdn::chunked_forward: g.rows = 2: must equal dims.tokens (3)");
  EXPECT_EQ(
      refused([](Call&, In& in, Out&, Kept&, Cot&, bool&) { in.beta = in.beta.row_block(0, 2); }),
      "gdn::chunked_forward: beta.rows = 2: must equal dims.tokens (3)");
  EXPECT_EQ(refused([](Call&, In& in, Out&, Kept&, Cot&, bool&) {
              in.segment_ids = in.segment_ids.first(2);
            }),
            "gdn::chunked_forward: segment_ids.size = 2: must equal dims.tokens (3)");
  EXPECT_EQ(refused([](Call& c, In& in, Out&, Kept&, Cot&, bool&) {
              c.ids[1] = -4;
              in.segment_ids = c.ids;
            }),
            "gdn::Segments: segment_ids[1] = -4: must be >= 0");
  EXPECT_EQ(refused([](Call&, In& in, Out&, Kept&, Cot&, bool&) {
              in.recurrent_state = in.recurrent_state.row_block(0, 40);
            }),
            "gdn::chunked_forward: recurrent_state.rows = 40: must equal value_heads * key_dim "
            "(120)");
  EXPECT_EQ(refused([](Call& c, In&, Out&, Kept&, Cot&, bool&) { c.options.eps = 1e-60; }),
            "gdn::chunked_forward: options.eps = 1e-60: must be > 0 in the accumulation type");
  EXPECT_EQ(refused([](Call& c, In&, Out&, Kept&, Cot&, bool&) { c.chunk_options.chunk = 0; }),
            "gdn::chunked_forward: options.chunk = 0: must be >= 1");
  EXPECT_EQ(refused([](Call&, In&, Out& out, Kept&, Cot&, bool&) { out.o = {}; }),
            "gdn::chunked_forward: o.rows = 0: must equal dims.tokens (3)");
  EXPECT_EQ(refused([](Call&, In&, Out&, Kept& kept, Cot&, bool&) {
              kept.t_inv = kept.t_inv.row_block(0, 1);
            }),
            "gdn::chunked_forward: t_inv.rows = 1: must equal chunks * value_heads (3)");
  EXPECT_EQ(refused([](Call&, In&, Out&, Kept& kept, Cot&, bool& backward) {
              backward = true;
              kept.chunk_states = kept.chunk_states.column_block(0, 9);
            }),
            "gdn::chunked_backward: chunk_states.cols = 9: must equal key_dim * value_dim (960)");
  EXPECT_EQ(refused([](Call&, In&, Out&, Kept&, Cot& cot, bool& backward) {
              backward = true;
              cot.d_y = cot.d_y.row_block(0, 2);
            }),
            "gdn::chunked_backward: d_y.rows = 2: must equal dims.tokens (3)");
  EXPECT_EQ(refused([](Call&, In&, Out&, Kept&, Cot& cot, bool& backward) {
              backward = true;
              cot.d_g = {};
            }),
            "gdn::chunked_backward: d_g.rows = 0: must equal dims.tokens (3)");
  EXPECT_EQ(refused([](Call&, In&, Out&, Kept&, Cot& cot, bool& backward) {
              backward = true;
              cot.d_o = cot.d_o.column_block(0, 24);
            }),
            "gdn::chunked_backward: d_o.cols = 24: must equal dims.output_columns() (72)");
}

TEST(GdnChunkedContract, RefusesKeyHeadsThatAreNotThere) {
  ChunkedCall<float> call(RowMaker{.dims = model, .segment_ids = {1, 1, 1}}.make());
  Workspace workspace;
  EXPECT_EQ(
      heddle::test::thrown_text<Error>([&] {
        chunked_forward(call.dims, call.inputs(), call.options, call.chunk_options, call.outputs(),
                        {}, KeyHeads{0, 2}, workspace);
      }),
      "gdn::chunked_forward: key_heads.count = 2: must be in [0, dims.key_heads - first (1)]");
}

}  // namespace
}  // namespace heddle::gdn

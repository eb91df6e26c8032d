// Mutants: the state decayed before it is read; beta on the wrong side of the inverse; a document's start
// that keeps the state; the output read before the chunk's own tokens; glast missing.
#include "heddle/gdn/chunk.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/chunk_case.hpp"
#include "support/compare.hpp"

namespace heddle::gdn {
namespace {

using detail::Chunk;
using heddle::test::close;
using heddle::test::poison;
using test::ChunkCase;

std::vector<double> values_of(ConstMatrixView<double> view) {
  std::vector<double> out;
  for (std::int64_t i = 0; i < view.rows(); ++i) {
    for (std::int64_t j = 0; j < view.cols(); ++j) {
      out.push_back(view(i, j));
    }
  }
  return out;
}

TEST(GdnChunk, OneKeyAgainAndAgainByHand) {
  // With one unit key, beta = 1 and no decay each token replaces what the last one wrote: the inverse
  // has -1 below its diagonal, N_i = v_i - v_{i-1}, o_i = (q . k) v_i, S' = k v_{n-1}^T.
  const Dims dims{.tokens = 4, .key_heads = 1, .value_heads = 1, .key_dim = 2, .value_dim = 1};
  const std::vector<std::int32_t> ids(4, 1);
  const Segments segments(ids, 0);
  const ChunkPlan plan(segments, {});
  const std::vector<double> y = {3, 1, 0.6, 0.8, 5,  1, 2, 0.6, 0.8, 7,
                                 0, 0, 0.6, 0.8, 11, 5, 0, 0.6, 0.8, 13};
  const std::vector<double> g(4, 0.0);
  const std::vector<double> beta(4, 1.0);
  const RecurrenceRow<double> row{.dims = dims,
                                  .segments = segments,
                                  .plan = plan,
                                  .norm = NormMode::none,
                                  .g = {g.data(), 4, 1},
                                  .beta = {beta.data(), 4, 1}};
  const ArrayPort<double, double> port(dims, segments, {y.data(), 4, 5});
  const HeadSlice slice = HeadSlice::of_key_head(dims, 0);
  Workspace workspace;
  Chunk<double> chunk(detail::ChunkExtents::of(dims, 4, slice), workspace);
  auto cursor = port.begin(slice, 4, workspace);
  std::vector<double> s(2, poison<double>());
  ChunkState<double> state{{s.data(), 2, 1}};
  chunk.open(row, cursor, {0, 4}, detail::Wanted::output);
  chunk.gate(row, 0);
  chunk.triangles({}, true);
  chunk.residuals(state, 0, true);
  chunk.deltas();
  EXPECT_TRUE(close(values_of(chunk.inverse()),
                    std::vector<double>{1, 0, 0, 0, -1, 1, 0, 0, 0, -1, 1, 0, 0, 0, -1, 1}, 1e-15));
  EXPECT_TRUE(close(values_of(chunk.n()), std::vector<double>{5, 2, 4, 2}, 1e-15));
  const double scale = 1 / std::sqrt(2.0);
  EXPECT_TRUE(close(values_of(chunk.output()),
                    std::vector<double>{2.6 * scale * 5, 2.2 * scale * 7, 0, 3.0 * scale * 13},
                    1e-14));
  chunk.advance(state);
  EXPECT_FALSE(state.zero);
  EXPECT_TRUE(close(s, std::vector<double>{0.6 * 13, 0.8 * 13}, 1e-14));
}

/// The chunk against the definition, for both value heads of its key head.
void agrees_with_the_definition(const ChunkCase& c, bool given) {
  const Dims& dims = c.dims;
  const RecurrenceRow<double> row = c.row();
  const ArrayPort<double, double> port(dims, c.segments, c.all());
  Workspace workspace;
  Chunk<double> chunk(c.extents(), workspace);
  auto cursor = port.begin(c.slice(), dims.tokens, workspace);
  chunk.open(row, cursor, c.range(), detail::Wanted::output);
  for (std::int64_t h = 0; h < dims.value_heads; ++h) {
    std::vector<double> states =
        given ? c.state : std::vector<double>(c.state.size(), poison<double>());
    ChunkState<double> state{c.state_of(states, h), !given};
    chunk.gate(row, h);
    chunk.triangles({}, true);
    chunk.residuals(state, h, true);
    chunk.deltas();
    std::vector<double> o = values_of(chunk.output());
    chunk.advance(state);

    const ChunkCase::Head own = c.head(h);
    std::vector<double> expected_states = given ? c.state : std::vector<double>(c.state.size());
    const MatrixView<double> expected_state = c.state_of(expected_states, h);
    std::vector<double> expected(o.size(), poison<double>());
    reference::recurrence_forward<double, double>(c.segments, c.inputs(own, h), expected_state,
                                                  {expected.data(), dims.tokens, dims.value_dim});
    for (std::int64_t t = 0; t < dims.tokens; ++t) {
      if (!c.segments.valid(t)) {  // no output of the chunk's to promise
        std::fill_n(o.begin() + t * dims.value_dim, dims.value_dim, 0.0);
      }
    }
    EXPECT_TRUE(close(o, expected, 1e-13)) << h;
    EXPECT_TRUE(close(values_of(state.values), values_of(expected_state), 1e-13)) << h;
  }
}

TEST(GdnChunk, AgreesWithTheDefinitionAcrossDocumentsAndPadding) {
  agrees_with_the_definition(ChunkCase(), true);
  agrees_with_the_definition(ChunkCase(), false);
}

TEST(GdnChunk, AgreesWithTheDefinitionWhereTheStateGoesThrough) {
  agrees_with_the_definition(ChunkCase(std::vector<std::int32_t>(16, 7)), true);
  agrees_with_the_definition(ChunkCase({7}), true);
}

TEST(GdnChunk, AStateThatNoRowContinuesIsNotRead) {
  ChunkCase c({2, 2, 0, 2});
  std::fill(c.state.begin(), c.state.end(), poison<double>());
  const RecurrenceRow<double> row = c.row();
  const ArrayPort<double, double> port(c.dims, c.segments, c.all());
  Workspace workspace;
  Chunk<double> chunk(c.extents(), workspace);
  auto cursor = port.begin(c.slice(), c.dims.tokens, workspace);
  chunk.open(row, cursor, c.range(), detail::Wanted::output);
  ChunkState<double> state{c.state_of(c.state, 0), false};
  chunk.gate(row, 0);
  chunk.triangles({}, true);
  chunk.residuals(state, 0, true);
  chunk.deltas();
  for (const double value : values_of(chunk.output())) {
    EXPECT_TRUE(std::isfinite(value));
  }
  chunk.advance(state);
  for (const double value : values_of(state.values)) {
    EXPECT_TRUE(std::isfinite(value));
  }
}

TEST(GdnChunk, AStateIsLoadedAndStoredAndKnownToBeZero) {
  std::vector<float> scratch(6, poison<float>());
  ChunkState<float> state{{scratch.data(), 2, 3}};
  std::vector<float> out(6, poison<float>());
  state.store({out.data(), 2, 3});
  EXPECT_EQ(out, std::vector<float>(6, 0.0F)) << "scratch is not read";
  const std::vector<float> given = {1, 2, 3, 4, 5, 6};
  state.load({given.data(), 2, 3});
  EXPECT_FALSE(state.zero);
  state.store({out.data(), 2, 3});
  EXPECT_EQ(out, given);
  state.load(ConstMatrixView<float>());
  EXPECT_TRUE(state.zero);
}

TEST(GdnChunk, ScratchIsCountedAsItIsTaken) {
  const ChunkCase c;
  detail::ScratchCounter counter;
  [[maybe_unused]] const Chunk<double> counted(c.extents(), counter);
  Workspace workspace;
  [[maybe_unused]] const Chunk<double> taken(c.extents(), workspace);
  EXPECT_EQ(counter.bytes(), workspace.high_water_bytes());
}

}  // namespace
}  // namespace heddle::gdn

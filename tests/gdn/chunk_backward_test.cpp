// Mutants: the state's cotangent decayed before it meets K; Z taken from the wrong side of the inverse;
// d_kappa not summed over the group's value heads; the diagonal counted in d_g; alast dropped.
#include "heddle/gdn/chunk_backward.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/chunk_case.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::poison;
using test::ChunkCase;

/// One chunk's backward against the token by token one, summed over the key head's value heads.
void agrees_with_the_definition(const ChunkCase& c, bool given, bool final_cotangent) {
  const Dims& dims = c.dims;
  const auto fresh = [](std::int64_t count) {
    return std::vector<double>(static_cast<std::size_t>(count), 0.0);
  };
  heddle::test::Random random(8);
  std::vector<double> d_o = random.normals<double>(dims.tokens * dims.output_columns());
  const std::vector<double> d_final =
      final_cotangent ? random.normals<double>(dims.state_rows() * dims.value_dim)
                      : fresh(dims.state_rows() * dims.value_dim);
  const ConstMatrixView<double> all_d_o(d_o.data(), dims.tokens, dims.output_columns());

  const RecurrenceRow<double> row = c.row();
  const ArrayPort<double, double> port(dims, c.segments, c.all());
  Workspace workspace;
  detail::ChunkBackward<double> chunk(c.extents(), workspace);
  auto cursor = port.begin(c.slice(), dims.tokens, workspace);
  chunk.open(row, cursor, c.range());

  std::vector<double> expected_d_q = fresh(dims.tokens * dims.key_dim);
  std::vector<double> expected_d_k = expected_d_q;
  for (std::int64_t h = 0; h < dims.value_heads; ++h) {
    std::vector<double> states = given ? c.state : std::vector<double>(c.state.size());
    std::vector<double> d_states = d_final;
    const ChunkState<double> state{c.state_of(states, h), !given};
    ChunkState<double> d_state{c.state_of(d_states, h), !final_cotangent};
    std::vector<double> d_g(static_cast<std::size_t>(dims.tokens), poison<double>());
    std::vector<double> d_beta = d_g;
    chunk.value_head<double>(row, h, h, {}, state,
                             all_d_o.column_block(h * dims.value_dim, dims.value_dim), d_state,
                             {d_g.data(), dims.tokens, 1}, {d_beta.data(), dims.tokens, 1});

    const ChunkCase::Head own = c.head(h);
    std::vector<double> expected_d_states = d_final;
    const MatrixView<double> expected_d_state = c.state_of(expected_d_states, h);
    std::vector<double> d_q = fresh(dims.tokens * dims.key_dim), d_k = d_q;
    std::vector<double> d_v = fresh(dims.tokens * dims.value_dim);
    std::vector<double> expected_d_g(d_g.size()), expected_d_beta(d_g.size());
    reference::recurrence_backward<double, double>(
        c.segments, c.inputs(own, h), given ? c.state_of(states, h) : MatrixView<double>(),
        all_d_o.column_block(h * dims.value_dim, dims.value_dim), expected_d_state,
        {.d_q = {d_q.data(), dims.tokens, dims.key_dim},
         .d_k = {d_k.data(), dims.tokens, dims.key_dim},
         .d_v = {d_v.data(), dims.tokens, dims.value_dim},
         .d_beta = expected_d_beta,
         .d_g = expected_d_g});
    EXPECT_TRUE(close(d_g, expected_d_g, 1e-12)) << h;
    EXPECT_TRUE(close(d_beta, expected_d_beta, 1e-12)) << h;
    std::vector<double> entering = fresh(dims.key_dim * dims.value_dim), expected_entering;
    d_state.store({entering.data(), dims.key_dim, dims.value_dim});
    for (std::int64_t i = 0; i < dims.key_dim; ++i) {
      for (std::int64_t j = 0; j < dims.value_dim; ++j) {
        expected_entering.push_back(expected_d_state(i, j));
      }
    }
    EXPECT_TRUE(close(entering, expected_entering, 1e-12)) << h;
    for (std::size_t i = 0; i < d_q.size(); ++i) {
      expected_d_q[i] += d_q[i] * detail::Chunk<double>::query_scale(dims);
      expected_d_k[i] += d_k[i];
    }
    // Values are a head's own; they are read where all heads' are done.
    const QkvTile<double> tile = h + 1 == dims.value_heads ? chunk.close(row) : QkvTile<double>();
    if (!tile.q.is_null()) {
      std::vector<double> got_q, got_k, got_v;
      for (std::int64_t t = 0; t < dims.tokens; ++t) {
        for (std::int64_t i = 0; i < dims.key_dim; ++i) {
          got_q.push_back(tile.q(t, i));
          got_k.push_back(tile.k(t, i));
        }
        for (std::int64_t j = 0; j < dims.value_dim; ++j) {
          got_v.push_back(tile.v(t, h * dims.value_dim + j));
        }
      }
      EXPECT_TRUE(close(got_q, expected_d_q, 1e-12));
      EXPECT_TRUE(close(got_k, expected_d_k, 1e-12));
      EXPECT_TRUE(close(got_v, d_v, 1e-12));
    }
  }
}

TEST(GdnChunkBackward, AgreesWithTheDefinitionAcrossDocumentsAndPadding) {
  agrees_with_the_definition(ChunkCase(), true, true);
  agrees_with_the_definition(ChunkCase(), false, false);
}

TEST(GdnChunkBackward, AgreesWithTheDefinitionWhereTheStateGoesThrough) {
  const ChunkCase c(std::vector<std::int32_t>(16, 7));
  agrees_with_the_definition(c, true, true);
  agrees_with_the_definition(c, true, false);
  agrees_with_the_definition(c, false, true);
}

TEST(GdnChunkBackward, ScratchIsCountedAsItIsTaken) {
  const ChunkCase c;
  detail::ScratchCounter counter;
  [[maybe_unused]] const detail::ChunkBackward<double> counted(c.extents(), counter);
  Workspace workspace;
  [[maybe_unused]] const detail::ChunkBackward<double> taken(c.extents(), workspace);
  EXPECT_EQ(counter.bytes(), workspace.high_water_bytes());
}

}  // namespace
}  // namespace heddle::gdn

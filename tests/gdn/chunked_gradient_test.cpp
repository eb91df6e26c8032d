#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/row_case.hpp"
#include "heddle/gdn/chunked.hpp"
#include "support/finite_difference.hpp"

// The chunked backward against differences of the chunked forward. Mutants: the query scale missing in
// the backward; eps of the norm other there; d_kappa or d_sigma of one value head alone; a term of B9
// dropped; the final state's cotangent ignored; the initial state's not returned; a chunk's residual
// taken for another's.

namespace heddle::gdn {
namespace {

using heddle::test::Random;
using test::chunked;
using test::ChunkedCall;
using test::Ids;
using test::Keep;
using test::RowCase;
using test::RowMaker;

RowCase small_row(Chunking chunking, NormMode norm) {
  RowCase row = RowMaker{.dims = {.key_heads = 1, .value_heads = 2, .key_dim = 3, .value_dim = 2},
                         .segment_ids = {1, 1, 1, 0, 1, 1, 2, 2, 2, 2, 0},
                         .states = true,
                         .chunk_options = {.chunk = 3, .chunking = chunking}}
                    .make();
  row.options.norm = norm;
  row.options.eps = norm == NormMode::clamp ? 1.5 : 0.01;
  return row;
}

/// o . d_o + S_T . d_S_T over what is real.
double loss(const RowCase& row) {
  ChunkedCall<double> call(row);
  Workspaces workspaces;
  call.forward(workspaces);
  const Segments segments = row.segments();
  double sum = test::inner(call.result.final_state, row.d_final);
  for (std::int64_t t = 0; t < row.dims.tokens; ++t) {
    for (std::int64_t j = 0; segments.valid(t) && j < row.dims.output_columns(); ++j) {
      const auto at = static_cast<std::size_t>(t * row.dims.output_columns() + j);
      sum += call.result.o[at] * row.d_o[at];
    }
  }
  return sum;
}

TEST(GdnChunkedGradient, IsThatOfCentralDifferences) {
  for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
    for (const NormMode norm : {NormMode::root, NormMode::clamp, NormMode::none}) {
      RowCase row = small_row(chunking, norm);
      const auto result = chunked<double>(row, Keep::all);
      const auto numeric = [&](std::vector<double>& x) {
        return heddle::test::central_differences(x, [&] { return loss(row); });
      };
      EXPECT_TRUE(heddle::test::close(result.d_y, numeric(row.y), 1e-6));
      EXPECT_TRUE(heddle::test::close(result.d_g, numeric(row.g), 1e-6));
      EXPECT_TRUE(heddle::test::close(result.d_beta, numeric(row.beta), 1e-6));
      EXPECT_TRUE(heddle::test::close(result.d_state, numeric(row.state), 1e-6));
    }
  }
}

TEST(GdnChunkedGradient, IsThatOfADirection) {
  Random random(11);
  Ids ids(37, 1);
  ids.resize(70, 2);
  RowCase row = RowMaker{.dims = {.key_heads = 2, .value_heads = 4, .key_dim = 12, .value_dim = 9},
                         .segment_ids = ids,
                         .states = true,
                         .chunk_options = {.chunk = 16}}
                    .make();
  const auto result = chunked<double>(row);
  const RowCase centre = row;
  std::vector<std::vector<double>> directions;
  double expected = 0;
  const auto add = [&](const std::vector<double>& gradient) {
    directions.push_back(random.normals<double>(static_cast<std::int64_t>(gradient.size())));
    expected += test::inner(gradient, directions.back());
  };
  add(result.d_y);
  add(result.d_g);
  add(result.d_beta);
  add(result.d_state);
  const auto at = [&](double step) {
    const auto moved = [&](const std::vector<double>& x, const std::vector<double>& u) {
      std::vector<double> to = x;
      for (std::size_t i = 0; i < x.size(); ++i) {
        to[i] += step * u[i];
      }
      return to;
    };
    row.y = moved(centre.y, directions[0]);
    row.g = moved(centre.g, directions[1]);
    row.beta = moved(centre.beta, directions[2]);
    row.state = moved(centre.state, directions[3]);
    return loss(row);
  };
  constexpr double h = 1e-6;
  EXPECT_NEAR((at(h) - at(-h)) / (2 * h), expected, 1e-7 * std::abs(expected) + 1e-6);
}

/// The backward does read what was kept: with states of other chunks it is wrong.
TEST(GdnChunkedGradient, ChangesWithTheStatesItReads) {
  const RowCase row = RowMaker{
      .dims = {.key_heads = 1, .value_heads = 1, .key_dim = 3, .value_dim = 2},
      .segment_ids = Ids(12, 1),
      .states = true,
      .chunk_options = {
          .chunk = 4}}.make();
  ChunkedCall<double> call(row, Keep::all);
  Workspaces workspaces;
  call.forward(workspaces);
  call.backward(workspaces);
  const auto right = call.result.d_g;
  std::swap_ranges(call.result.chunk_states.begin() + 6, call.result.chunk_states.begin() + 12,
                   call.result.chunk_states.begin() + 12);
  call.backward(workspaces);
  EXPECT_FALSE(heddle::test::close(call.result.d_g, right, 1e-3));
}

}  // namespace
}  // namespace heddle::gdn

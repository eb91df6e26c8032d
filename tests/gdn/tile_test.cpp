// Mutants: values of the group's first head for all; the first column ignored; padding copied; gaps
// between ranges left unwritten; a slice that writes its neighbour's columns.
#include "heddle/gdn/tile.hpp"

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"

namespace heddle::gdn {
namespace {

using heddle::test::poison;

static_assert(TileSource<ArrayPort<bfloat16, float>, float>);
static_assert(TilePort<ArrayPort<double, double>, double>);
static_assert(!TileSource<int, float>);

const std::vector<std::int32_t> ids = {0, 1, 1, 0, 1, 2, 0};
const Dims dims{.tokens = 7, .key_heads = 2, .value_heads = 4, .key_dim = 2, .value_dim = 3};
constexpr std::int64_t columns = 2 * 2 * 2 + 4 * 3;

/// y(t, column) = 100 t + column, small whole numbers; padding is poison.
template <class S>
std::vector<S> numbered() {
  std::vector<S> y;
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    for (std::int64_t c = 0; c < columns; ++c) {
      y.push_back(ids[static_cast<std::size_t>(t)] > 0
                      ? static_cast<S>(static_cast<float>(100 * t + c))
                      : poison<S>());
    }
  }
  return y;
}

TEST(GdnTile, ASliceIsSomeValueHeadsOfAKeyHead) {
  const HeadSlice whole = HeadSlice::of_key_head(dims, 1);
  EXPECT_EQ(whole.first_value_head, 2);
  EXPECT_EQ(whole.value_heads, 2);
  EXPECT_EQ(whole.value_columns(), 6);
  EXPECT_EQ((TokenRange{3, 4}.end()), 7);
}

TEST(GdnTile, RunsAreTheLongestOfOneKind) {
  const Segments segments(ids, 0);
  std::vector<std::pair<TokenRange, bool>> runs;
  detail::for_runs(segments, {1, 6},
                   [&](TokenRange run, bool valid) { runs.emplace_back(run, valid); });
  const std::vector<std::pair<TokenRange, bool>> expected = {
      {{1, 2}, true}, {{3, 1}, false}, {{4, 2}, true}, {{6, 1}, false}};
  EXPECT_EQ(runs, expected);
  detail::for_runs(segments, {3, 0}, [&](TokenRange, bool) { FAIL() << "nothing is there"; });
}

TEST(GdnTile, AnArrayLoadsWhatTheSliceNames) {
  const std::vector<float> y = numbered<float>();
  const Segments segments(ids, 0);
  const ArrayPort<float, float> port(dims, segments, {y.data(), dims.tokens, columns});
  Workspace workspace;
  // The second key head, its second value head, the last two of three columns.
  const HeadSlice slice{1, 3, 1, 1, 2};
  EXPECT_EQ(port.workspace_bytes(slice, 4), 0U);
  const auto cursor = port.begin(slice, 4, workspace);
  std::vector<float> q(8, poison<float>()), k = q, v = q;
  cursor.load({2, 4}, {.q = {q.data(), 4, 2}, .k = {k.data(), 4, 2}, .v = {v.data(), 4, 2}});
  EXPECT_EQ(q, (std::vector<float>{202, 203, 0, 0, 402, 403, 502, 503}));
  EXPECT_EQ(k, (std::vector<float>{206, 207, 0, 0, 406, 407, 506, 507}));
  EXPECT_EQ(v, (std::vector<float>{218, 219, 0, 0, 418, 419, 518, 519}));
  // What is null is not wanted.
  std::vector<float> alone(4, poison<float>());
  cursor.load({1, 2}, {.k = {alone.data(), 2, 2}});
  EXPECT_EQ(alone, (std::vector<float>{106, 107, 206, 207}));
}

TEST(GdnTile, AnArrayIsWidened) {
  const std::vector<bfloat16> y = numbered<bfloat16>();
  const Segments segments(ids, 0);
  const ArrayPort<bfloat16, float> port(dims, segments, {y.data(), dims.tokens, columns});
  Workspace workspace;
  std::vector<float> k(2, poison<float>());
  port.begin(HeadSlice::of_key_head(dims, 0), 1, workspace).load({1, 1}, {.k = {k.data(), 1, 2}});
  EXPECT_EQ(k, (std::vector<float>{104, 105}));
}

TEST(GdnTile, AnArrayStoresItsSliceAndZerosAtPadding) {
  const std::vector<float> y = numbered<float>();
  std::vector<float> d_y(y.size(), poison<float>());
  const Segments segments(ids, 0);
  const ArrayPort<float, float> port(dims, segments, {y.data(), dims.tokens, columns},
                                     {d_y.data(), dims.tokens, columns});
  Workspace workspace;
  const auto cursor = port.begin(HeadSlice::of_key_head(dims, 1), 3, workspace);
  const auto store = [&](std::int64_t first, std::int64_t count, float value) {
    std::vector<float> q(6, value), k(6, value + 1), v(18, value + 2);
    cursor.store({first, count},
                 {.q = {q.data(), count, 2}, .k = {k.data(), count, 2}, .v = {v.data(), count, 6}});
  };
  store(4, 2, 40);
  store(1, 2, 10);
  cursor.finish();
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const float value = d_y[static_cast<std::size_t>(t * columns + c)];
      const bool own = c == 2 || c == 3 || c == 6 || c == 7 || c >= 14;
      if (!own) {
        EXPECT_TRUE(std::isnan(value)) << t << " " << c;
        continue;
      }
      const float part = c < 4 ? 0 : c < 8 ? 1 : 2;
      const float expected = ids[static_cast<std::size_t>(t)] == 0 ? 0 : (t < 3 ? 10 : 40) + part;
      EXPECT_EQ(value, expected) << t << " " << c;
    }
  }
}

}  // namespace
}  // namespace heddle::gdn

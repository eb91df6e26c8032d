#include "heddle/gdn/chunk_plan.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "support/random.hpp"
#include "support/thrown_text.hpp"

namespace heddle::gdn {
namespace {

using Ids = std::vector<std::int32_t>;
using Ranges = std::vector<TokenRange>;

Ranges cut(const Ids& ids, std::int64_t chunk, Chunking chunking, std::int32_t initial = 0) {
  const Segments segments(ids, initial);
  const ChunkPlan plan(segments, {.chunk = chunk, .chunking = chunking});
  Ranges ranges;
  for (std::int64_t i = 0; i < plan.count(); ++i) {
    ranges.push_back(plan.at(i));
  }
  return ranges;
}

TEST(GdnChunkPlan, AlignsChunksWithDocuments) {
  EXPECT_EQ(cut({1, 1, 1, 2, 2, 3}, 2, Chunking::aligned),
            (Ranges{{0, 2}, {2, 1}, {3, 2}, {5, 1}}));
  EXPECT_EQ(cut({0, 1, 0, 0, 1, 1, 1, 0}, 2, Chunking::aligned), (Ranges{{1, 1}, {4, 2}, {6, 1}}));
  EXPECT_EQ(cut({}, 2, Chunking::aligned), Ranges{});
  EXPECT_EQ(cut({0, 0}, 2, Chunking::aligned), Ranges{});
}

TEST(GdnChunkPlan, CutsAGridFromTheRowsStart) {
  EXPECT_EQ(cut({1, 1, 1, 2, 2, 3, 3}, 3, Chunking::grid), (Ranges{{0, 3}, {3, 3}, {6, 1}}));
  // A cell of padding alone is no chunk, one with a token is a whole one.
  EXPECT_EQ(cut({0, 0, 0, 1, 0, 0, 0}, 2, Chunking::grid), (Ranges{{2, 2}}));
}

TEST(GdnChunkPlan, KnowsWhereDocumentsStart) {
  const auto starts = [](const Ids& ids, std::int32_t initial) {
    const Segments segments(ids, initial);
    const ChunkPlan plan(segments, {.chunk = 2});
    return std::vector<std::int64_t>{plan.first_start(), plan.last_start(), plan.longest()};
  };
  EXPECT_EQ(starts({1, 1, 1, 2, 2, 2, 3}, 1), (std::vector<std::int64_t>{2, 4, 2}));
  EXPECT_EQ(starts({1, 1, 1}, 1), (std::vector<std::int64_t>{2, -1, 2}));
  EXPECT_EQ(starts({1}, 0), (std::vector<std::int64_t>{0, 0, 1}));
  EXPECT_EQ(starts({}, 0), (std::vector<std::int64_t>{0, -1, 0}));
}

TEST(GdnChunkPlan, HoldsEveryTokenOnce) {
  heddle::test::Random random(3);
  for (int trial = 0; trial < 200; ++trial) {
    Ids ids;
    for (std::int64_t t = random.integer(0, 50); t > 0; --t) {
      ids.push_back(ids.empty() || random.chance(0.3)
                        ? static_cast<std::int32_t>(random.integer(0, 3))
                        : ids.back());
    }
    const Segments segments(ids, 0);
    const std::int64_t chunk = random.integer(1, 12);
    for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
      std::vector<int> times(ids.size(), 0);
      std::int64_t end = 0;
      for (const TokenRange range : cut(ids, chunk, chunking)) {
        EXPECT_GE(range.first, end);
        EXPECT_GE(range.count, 1);
        EXPECT_LE(range.count, chunk);
        end = range.end();
        for (std::int64_t t = range.first; t < end; ++t) {
          ++times[static_cast<std::size_t>(t)];
          if (chunking == Chunking::aligned) {
            EXPECT_TRUE(segments.valid(t));
            EXPECT_EQ(segments.epoch(t), segments.epoch(range.first));
          }
        }
      }
      for (std::size_t t = 0; t < ids.size(); ++t) {
        EXPECT_TRUE(times[t] == 1 || (times[t] == 0 && ids[t] == 0));
      }
    }
  }
}

TEST(GdnChunkPlan, RefusesAnEmptyChunk) {
  const Segments segments(Ids{1}, 0);
  EXPECT_EQ(heddle::test::thrown_text<Error>([&] { const ChunkPlan plan(segments, {.chunk = 0}); }),
            "gdn::ChunkPlan: options.chunk = 0: must be >= 1");
}

}  // namespace
}  // namespace heddle::gdn

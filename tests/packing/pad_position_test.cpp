#include "heddle/packing/pad_position.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: shift not rounded to pad_align (11), rounded up (12), off by one (13, 14),
// computed in floating point (15), trailing counted as budget minus tokens (16) or from the aligned cursor
// (17); an unknown name accepted (33); auto that takes the largest of equal shifts, prefers start, stops
// before the last shift, or weighs one phase only.

namespace heddle::packing {
namespace {

PlacedRow row_of(const std::vector<Segment>& segments, std::int64_t tokens) {
  return {.segments = segments, .tokens = tokens};
}

TEST(PadPosition, NamesAreReadBackAndNothingElseIs) {
  for (const char* known : {"end", "start", "auto"}) {
    EXPECT_EQ(name(pad_position(known)), known);
  }
  EXPECT_EQ(pad_position("start"), PadPosition::start);
  for (const std::string unknown : {"", "START", "End", "start ", "middle"}) {
    EXPECT_EQ(test::thrown_text<Error>([&] { static_cast<void>(pad_position(unknown)); }),
              "packing::pad_position: name = " + unknown + ": must be end, start or auto");
  }
}

TEST(PadPosition, StartShiftCountsFromTheLastToken) {
  // Row B: the aligned cursor (16) would give 4; tokens alone (11) would give 12 in the row of 23.
  const std::vector<Segment> row_b{{.start = 0, .len = 6}, {.start = 8, .len = 5}};
  EXPECT_EQ(start_shift(row_of(row_b, 22), 4), 8);
  EXPECT_EQ(start_shift(row_of(row_b, 23), 4), 8);
  EXPECT_EQ(start_shift(row_of(row_b, 13), 4), 0);
  EXPECT_EQ(start_shift(row_of(row_b, 16), 4), 0);
  EXPECT_EQ(start_shift(row_of(row_b, 17), 4), 4);
  EXPECT_EQ(start_shift(row_of(row_b, 22), 4096), 0);

  const std::vector<Segment> row_c{{.start = 0, .len = 9}};
  EXPECT_EQ(start_shift(row_of(row_c, 16), 8), 0) << "trailing 7 < 8";
  const std::vector<Segment> shorter{{.start = 0, .len = 8}};
  EXPECT_EQ(start_shift(row_of(shorter, 16), 8), 8);
  EXPECT_EQ(start_shift(row_of({}, 16), 8), 0) << "a row without tokens does not move";
}

TEST(PadPosition, StartShiftIsExactBeyondFloat) {
  // 2^24 + 1 has no float: a shift computed in one would be 2^24.
  const std::vector<Segment> segment{{.start = 0, .len = 1}};
  EXPECT_EQ(start_shift(row_of(segment, (std::int64_t{1} << 24) + 2), 1),
            (std::int64_t{1} << 24) + 1);
}

std::vector<Segment> aligned(const std::vector<std::int32_t>& lengths) {
  std::vector<Segment> segments;
  std::int32_t next = 0;
  for (const std::int32_t length : lengths) {
    segments.push_back({.start = (next + 63) / 64 * 64, .len = length});
    next = segments.back().end();
  }
  return segments;
}

TEST(PadPosition, AutoOnTheRowsOfTheSpecification) {
  struct Case {
    std::vector<std::int32_t> lengths;
    std::int64_t context, end, start, best_4096, best_2048, best_64;
  };
  const std::vector<Case> cases{
      {{60948}, 4, 932, 825, 825, 825, 825},
      {{60948}, 8, 466, 415, 415, 415, 415},
      {{17411, 12803, 9620, 8041, 6277, 4513, 2159}, 4, 278, 306, 278, 278, 263},
      {{17411, 12803, 9620, 8041, 6277, 4513, 2159}, 8, 158, 158, 158, 158, 148},
      {{30011, 16555, 8201}, 4, 484, 610, 484, 484, 464},
      {{30011, 16555, 8201}, 8, 270, 354, 270, 250, 232},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    const std::vector<Segment> segments = aligned(c.lengths);
    const PlacedRow row = row_of(segments, 65536);
    const AttentionShards shards{.context = c.context};
    const auto cost = [&](std::int64_t shift) {
      return count_attention_tiles({.segments = segments, .tokens = 65536, .shift = shift}, shards,
                                   TileRule::pad_aware)
          .busiest_cost();
    };
    EXPECT_EQ(cost(0), c.end) << "case " << i;
    EXPECT_EQ(cost(start_shift(row, 4096)), c.start) << "case " << i;
    EXPECT_EQ(cost(auto_shift(row, 4096, shards)), c.best_4096) << "case " << i;
    EXPECT_EQ(cost(auto_shift(row, 2048, shards)), c.best_2048) << "case " << i;
    EXPECT_EQ(cost(auto_shift(row, 64, shards)), c.best_64) << "case " << i;
  }
  EXPECT_EQ(auto_shift(row_of(aligned({60948}), 65536), 4096, {.context = 4}), 4096)
      << "as start on the seed row";
  EXPECT_EQ(auto_shift(row_of(aligned({17411, 12803, 9620, 8041, 6277, 4513, 2159}), 65536), 4096,
                       {.context = 8}),
            0)
      << "158 both at 0 and at 4096: the smaller";
}

TEST(PadPosition, AutoIsTheSmallestOfTheBestAndNeverWorseThanEndOrStart) {
  test::Random random(11);
  std::int64_t moved = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const AttentionShards shards{.context = random.integer(1, 4),
                                 .layout = static_cast<ContextLayout>(random.integer(0, 2)),
                                 .forward = {random.integer(1, 8), random.integer(1, 16)},
                                 .backward = {random.integer(1, 16), random.integer(1, 16)}};
    const std::int64_t tokens = 2 * shards.context * random.integer(1, 24);
    std::vector<Segment> segments;
    std::int64_t at = 0;
    while (segments.size() < 4) {
      const std::int64_t length = random.integer(1, std::max<std::int64_t>(1, tokens / 3));
      if (at + length > tokens) {
        break;
      }
      segments.push_back(
          {.start = static_cast<std::int32_t>(at), .len = static_cast<std::int32_t>(length)});
      at += length + random.integer(0, 3);
    }
    const std::int64_t align = random.integer(1, 6);
    const PlacedRow row = row_of(segments, tokens);
    const auto cost = [&](std::int64_t shift) {
      return count_attention_tiles({.segments = segments, .tokens = tokens, .shift = shift}, shards,
                                   TileRule::pad_aware)
          .busiest_cost();
    };
    const std::int64_t found = auto_shift(row, align, shards);
    std::int64_t best = 0;
    for (std::int64_t shift = 0; !segments.empty() && segments.back().end() + shift <= tokens;
         shift += align) {
      best = cost(shift) < cost(best) ? shift : best;
    }
    ASSERT_EQ(found, best) << "trial " << trial;
    ASSERT_LE(cost(found), std::min(cost(0), cost(start_shift(row, align))));
    moved += found > 0 ? 1 : 0;
  }
  EXPECT_GT(moved, 20) << "the trials must contain rows that gain";
}

TEST(PadPosition, AutoReadsItsShards) {
  const std::vector<Segment> segments = aligned({60948});
  const PlacedRow row = row_of(segments, 65536);
  EXPECT_EQ(auto_shift(row, 4096, {.context = 4}), 4096);
  EXPECT_EQ(auto_shift(row, 4096, {.context = 1}), 0) << "one rank does it all wherever it stands";
  EXPECT_EQ(auto_shift(row, 4096, {.context = 4, .layout = ContextLayout::contiguous}), 0)
      << "further right is further behind";
}

TEST(PadPosition, RefusesAnAlignmentThatMovesNothing) {
  EXPECT_EQ(test::thrown_text<Error>([] { static_cast<void>(start_shift({.tokens = 8}, 0)); }),
            "packing::start_shift: pad_align = 0: must be >= 1");
}

TEST(PadPosition, RefusesARowThatHasBeenMoved) {
  EXPECT_EQ(test::thrown_text<Error>(
                [] { static_cast<void>(start_shift({.tokens = 8, .shift = 4}, 4)); }),
            "packing::start_shift: row.shift = 4: must be 0");
}

}  // namespace
}  // namespace heddle::packing

#include "heddle/packing/attention_tiles.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: id 0 in the ranges of the pad-aware rule (50), or left out of the naive
// one; a tile of padding alone that runs (51); the causal test with the query tile's first position (52)
// or the key tile's last; the Transformer Engine's chunk order (53); queries tiled in sequence order;
// keys tiled in permuted order; blocks swapped; rule, layout or check ignored; a short last block left
// out; the shift ignored or added twice; forward and backward weights swapped in the cost.

namespace heddle::packing {
namespace {

using Counts = std::vector<std::int64_t>;

/// Rows of the specification, with 64-aligned starts.
struct Row {
  std::vector<Segment> segments;

  explicit Row(const std::vector<std::int32_t>& lengths) {
    std::int32_t next = 0;
    for (const std::int32_t length : lengths) {
      segments.push_back({.start = (next + 63) / 64 * 64, .len = length});
      next = segments.back().end();
    }
  }
};

const Row& s1() {
  static const Row row({60948});
  return row;
}
const Row& s2() {
  static const Row row({17411, 12803, 9620, 8041, 6277, 4513, 2159});
  return row;
}
const Row& s3() {
  static const Row row({30011, 16555, 8201});
  return row;
}

AttentionTiles tiles_of(const Row& row, std::int64_t shift, std::int64_t context, TileRule rule) {
  return count_attention_tiles({.segments = row.segments, .tokens = 65536, .shift = shift},
                               {.context = context}, rule);
}

TEST(AttentionTiles, ChunksOfTheSeedRow) {
  const auto chunks = [](std::int64_t shift, TileBlocks blocks) {
    return count_tiles({.segments = s1().segments, .tokens = 65536, .shift = shift},
                       {.context = 8, .layout = ContextLayout::contiguous, .blocks = blocks});
  };
  EXPECT_EQ(chunks(0, {1024, 4096}), (Counts{12, 28, 44, 60, 76, 92, 108, 68}));
  EXPECT_EQ(chunks(0, {2048, 2048}), (Counts{10, 26, 42, 58, 74, 90, 106, 64}));
  EXPECT_EQ(chunks(4096, {1024, 4096}), (Counts{8, 20, 36, 52, 68, 84, 100, 117}));
  EXPECT_EQ(chunks(4096, {2048, 2048}), (Counts{6, 18, 34, 50, 66, 82, 98, 116}));
}

TEST(AttentionTiles, SixteenNumbersOfTheSeed) {
  const AttentionTiles end = tiles_of(s1(), 0, 4, TileRule::naive);
  EXPECT_EQ(end.forward, (Counts{80, 136, 136, 136}));
  EXPECT_EQ(end.backward, (Counts{74, 132, 132, 132}));
  const AttentionTiles start = tiles_of(s1(), 4096, 4, TileRule::naive);
  EXPECT_EQ(start.forward, (Counts{125, 120, 120, 120}));
  EXPECT_EQ(start.backward, (Counts{122, 116, 116, 116}));
}

TEST(AttentionTiles, FullRows) {
  const Row full({65536});
  for (const TileRule rule : {TileRule::naive, TileRule::pad_aware}) {
    const AttentionTiles four = tiles_of(full, 0, 4, rule);
    EXPECT_EQ(four.forward, Counts(4, 136));
    EXPECT_EQ(four.backward, Counts(4, 132));
    const AttentionTiles eight = tiles_of(full, 0, 8, rule);
    EXPECT_EQ(eight.forward, Counts(8, 68));
    EXPECT_EQ(eight.backward, Counts(8, 66));
  }
}

TEST(AttentionTiles, RowsOfTheSpecificationUnderBothRules) {
  struct Case {
    const Row& row;
    std::int64_t start_shift;
    std::int64_t context;
    TileRule rule;
    Counts forward_end, forward_start, backward_end, backward_start;
  };
  constexpr auto naive = TileRule::naive;
  constexpr auto aware = TileRule::pad_aware;
  const std::vector<Case> cases{
      {s1(),
       4096,
       4,
       naive,
       {80, 136, 136, 136},
       {125, 120, 120, 120},
       {74, 132, 132, 132},
       {122, 116, 116, 116}},
      {s1(),
       4096,
       4,
       aware,
       {72, 136, 136, 136},
       {120, 120, 120, 120},
       {69, 132, 132, 132},
       {117, 116, 116, 116}},
      {s1(),
       4096,
       8,
       naive,
       {12, 68, 68, 68, 68, 68, 68, 68},
       {65, 60, 60, 60, 60, 60, 60, 60},
       {8, 66, 66, 66, 66, 66, 66, 66},
       {64, 58, 58, 58, 58, 58, 58, 58}},
      {s1(),
       4096,
       8,
       aware,
       {4, 68, 68, 68, 68, 68, 68, 68},
       {60, 60, 60, 60, 60, 60, 60, 60},
       {3, 66, 66, 66, 66, 66, 66, 66},
       {59, 58, 58, 58, 58, 58, 58, 58}},
      {s2(),
       4096,
       4,
       naive,
       {73, 55, 47, 53},
       {63, 48, 57, 43},
       {86, 60, 51, 60},
       {100, 53, 60, 44}},
      {s2(),
       4096,
       4,
       aware,
       {18, 44, 38, 42},
       {18, 38, 48, 38},
       {15, 37, 32, 38},
       {14, 32, 42, 34}},
      {s2(),
       4096,
       8,
       naive,
       {32, 41, 31, 24, 31, 16, 31, 22},
       {39, 24, 16, 32, 24, 33, 16, 27},
       {20, 66, 40, 20, 39, 12, 36, 24},
       {66, 34, 12, 41, 20, 40, 14, 30}},
      {s2(),
       4096,
       8,
       aware,
       {4, 14, 20, 24, 22, 16, 24, 18},
       {6, 12, 16, 22, 24, 24, 16, 22},
       {3, 12, 17, 20, 20, 12, 22, 16},
       {5, 9, 12, 20, 20, 22, 14, 20}},
      {s3(),
       8192,
       4,
       naive,
       {48, 59, 79, 66},
       {49, 49, 48, 92},
       {36, 64, 82, 62},
       {56, 54, 44, 90}},
      {s3(),
       8192,
       4,
       aware,
       {12, 42, 72, 66},
       {14, 40, 48, 90},
       {10, 38, 68, 62},
       {12, 36, 44, 86}},
      {s3(),
       8192,
       8,
       naive,
       {24, 24, 35, 24, 39, 40, 40, 26},
       {33, 16, 25, 24, 24, 24, 40, 52},
       {18, 18, 42, 22, 44, 38, 38, 24},
       {42, 14, 32, 22, 22, 22, 40, 50}},
      {s3(),
       8192,
       8,
       aware,
       {4, 8, 18, 24, 32, 40, 40, 26},
       {6, 8, 16, 24, 24, 24, 38, 52},
       {3, 7, 16, 22, 30, 38, 38, 24},
       {5, 7, 14, 22, 22, 22, 36, 50}},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    const AttentionTiles end = tiles_of(c.row, 0, c.context, c.rule);
    const AttentionTiles start = tiles_of(c.row, c.start_shift, c.context, c.rule);
    EXPECT_EQ(end.forward, c.forward_end) << "case " << i;
    EXPECT_EQ(start.forward, c.forward_start) << "case " << i;
    EXPECT_EQ(end.backward, c.backward_end) << "case " << i;
    EXPECT_EQ(start.backward, c.backward_start) << "case " << i;
  }
}

TEST(AttentionTiles, StripedRowsOfTheSpecification) {
  const auto cost = [](const Row& row, std::int64_t context) {
    return count_attention_tiles({.segments = row.segments, .tokens = 65536},
                                 {.context = context, .layout = ContextLayout::striped},
                                 TileRule::pad_aware)
        .busiest_cost();
  };
  EXPECT_EQ(cost(s1(), 4), 950);
  EXPECT_EQ(cost(s1(), 8), 532);
  EXPECT_EQ(cost(s2(), 4), 342);
  EXPECT_EQ(cost(s2(), 8), 259);
  EXPECT_EQ(cost(s3(), 4), 415);
  EXPECT_EQ(cost(s3(), 8), 257);
}

/// The rule tile by tile and token by token, from a row's ids; positions from the text of section 6.
Counts by_definition(const std::vector<std::int32_t>& ids, const TileOptions& options) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  const std::int64_t ranks = options.context;
  const std::int64_t shard = tokens / ranks;
  const auto position = [&](std::int64_t rank, std::int64_t i) {
    if (ranks == 1 || options.layout == ContextLayout::contiguous) {
      return rank * shard + i;
    }
    if (options.layout == ContextLayout::striped) {
      return i * ranks + rank;
    }
    const std::int64_t chunk = shard / 2;
    return i < chunk ? rank * chunk + i : (2 * ranks - 1 - rank) * chunk + (i - chunk);
  };
  struct Range {
    std::int64_t min = std::numeric_limits<std::int64_t>::max();
    std::int64_t max = -1;
  };
  const auto see = [&](Range& range, std::int64_t p) {
    const std::int32_t id = ids[static_cast<std::size_t>(p)];
    if (id > 0 || options.rule == TileRule::naive) {
      range.min = std::min<std::int64_t>(range.min, id);
      range.max = std::max<std::int64_t>(range.max, id);
    }
  };
  Counts counts(static_cast<std::size_t>(ranks), 0);
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    for (std::int64_t q = 0; q < shard; q += options.blocks.query) {
      Range query;
      std::int64_t greatest = -1;
      for (std::int64_t i = q; i < std::min(q + options.blocks.query, shard); ++i) {
        see(query, position(rank, i));
        greatest = std::max(greatest, position(rank, i));
      }
      for (std::int64_t k = 0; k < tokens; k += options.blocks.key) {
        Range key;
        for (std::int64_t p = k; p < std::min(k + options.blocks.key, tokens); ++p) {
          see(key, p);
        }
        if (greatest >= k && query.max >= 0 && key.max >= 0 && query.min <= key.max &&
            key.min <= query.max) {
          ++counts[static_cast<std::size_t>(rank)];
        }
      }
    }
  }
  return counts;
}

struct RandomRow {
  std::vector<Segment> segments;
  std::vector<std::int32_t> ids;

  RandomRow(test::Random& random, std::int64_t tokens) : ids(static_cast<std::size_t>(tokens), 0) {
    std::int64_t at = random.chance(0.5) ? random.integer(0, tokens) : 0;
    while (at < tokens && segments.size() < 12) {
      const std::int64_t length =
          random.chance(0.3) ? 1 : random.integer(1, std::max<std::int64_t>(1, tokens / 3));
      const std::int64_t end = std::min(at + length, tokens);
      segments.push_back(
          {.start = static_cast<std::int32_t>(at), .len = static_cast<std::int32_t>(end - at)});
      for (std::int64_t t = at; t < end; ++t) {
        ids[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(segments.size());
      }
      at = end + (random.chance(0.5) ? 0 : random.integer(0, 9));
    }
  }
};

TEST(AttentionTiles, EqualTheDefinitionForAnySizesLayoutsAndIds) {
  test::Random random(7);
  for (int trial = 0; trial < 600; ++trial) {
    TileOptions options{
        .context = random.integer(1, 5),
        .layout = static_cast<ContextLayout>(random.integer(0, 2)),
        .blocks = {random.integer(1, 40), random.integer(1, 40)},
        .rule = random.chance(0.5) ? TileRule::naive : TileRule::pad_aware,
    };
    if (random.chance(0.05)) {
      options.blocks = {std::numeric_limits<std::int64_t>::max(),
                        std::numeric_limits<std::int64_t>::max()};
    }
    const std::int64_t tokens = 2 * options.context * random.integer(0, 30);
    const RandomRow row(random, tokens);
    TileOptions plain = options;
    plain.blocks = {std::min<std::int64_t>(options.blocks.query, 1000),
                    std::min<std::int64_t>(options.blocks.key, 1000)};
    const Counts expected = by_definition(row.ids, plain);
    ASSERT_EQ(count_tiles(row.ids, options), expected) << "trial " << trial;
    ASSERT_EQ(count_tiles({.segments = row.segments, .tokens = tokens}, options), expected)
        << "trial " << trial;

    std::vector<std::int32_t> shuffled = row.ids;  // no order at all among ids
    for (std::int32_t& id : shuffled) {
      id = random.chance(0.3) ? static_cast<std::int32_t>(random.integer(0, 6)) : id;
    }
    ASSERT_EQ(count_tiles(shuffled, options), by_definition(shuffled, plain)) << "trial " << trial;
  }
}

TEST(AttentionTiles, ShiftMovesTheRow) {
  test::Random random(8);
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t tokens = 96;
    const RandomRow row(random, tokens);
    const std::int64_t trailing = tokens - used_positions(row.segments);
    const std::int64_t shift = random.integer(0, trailing);
    std::vector<std::int32_t> moved(static_cast<std::size_t>(tokens), 0);
    for (std::int64_t t = 0; t + shift < tokens; ++t) {
      moved[static_cast<std::size_t>(t + shift)] = row.ids[static_cast<std::size_t>(t)];
    }
    const TileOptions options{.context = 2, .blocks = {7, 5}, .rule = TileRule::pad_aware};
    EXPECT_EQ(count_tiles({.segments = row.segments, .tokens = tokens, .shift = shift}, options),
              by_definition(moved, options));
  }
}

TEST(AttentionTiles, PadAwareIsExactForContiguousTilesAndNaiveIsNot) {
  test::Random random(9);
  std::int64_t live = 0;
  std::int64_t naive_only = 0;
  for (int trial = 0; trial < 500; ++trial) {
    const std::int64_t context = random.integer(1, 3);
    const std::int64_t query = random.integer(1, 9);
    const std::int64_t key = random.integer(1, 24);
    const std::int64_t tokens = 2 * context * query * random.integer(1, 6);
    const RandomRow row(random, tokens);
    const ContextPartition partition(ContextLayout::dual_chunk_swap, tokens, context);
    Counts real(static_cast<std::size_t>(context), 0);
    for (std::int64_t slot = 0; slot < tokens; slot += query) {
      for (std::int64_t k = 0; k < tokens; k += key) {
        bool has_real_pair = false;
        for (std::int64_t i = slot; i < slot + query; ++i) {
          const std::int64_t p = partition.source(i);
          for (std::int64_t s = k; s < std::min(k + key, tokens); ++s) {
            has_real_pair = has_real_pair || (s <= p && row.ids[static_cast<std::size_t>(p)] > 0 &&
                                              row.ids[static_cast<std::size_t>(p)] ==
                                                  row.ids[static_cast<std::size_t>(s)]);
          }
        }
        real[static_cast<std::size_t>(slot / partition.shard())] += has_real_pair ? 1 : 0;
      }
    }
    TileOptions options{.context = context, .blocks = {query, key}, .rule = TileRule::pad_aware};
    ASSERT_EQ(count_tiles(row.ids, options), real) << "trial " << trial;
    options.rule = TileRule::naive;
    const Counts naive = count_tiles(row.ids, options);
    for (std::size_t r = 0; r < naive.size(); ++r) {
      live += real[r];
      naive_only += naive[r] - real[r];
    }
  }
  EXPECT_GT(live, 5000);
  EXPECT_GT(naive_only, 1000) << "the naive rule must run tiles in vain";
}

TEST(AttentionTiles, AllPaddingAndNoTokens) {
  const std::vector<std::int32_t> padding(64, 0);
  TileOptions options{.context = 2, .blocks = {16, 16}};
  EXPECT_EQ(count_tiles(padding, options), (Counts{5, 5}));
  EXPECT_EQ(count_tiles({.tokens = 64}, options), (Counts{5, 5}));
  options.rule = TileRule::pad_aware;
  EXPECT_EQ(count_tiles(padding, options), (Counts{0, 0}));
  EXPECT_EQ(count_tiles(PlacedRow{}, options), (Counts{0, 0}));
}

TEST(AttentionTiles, CostWeighsTheBusiestRankOfEachPhase) {
  EXPECT_EQ((AttentionTiles{.forward = {1, 7}, .backward = {11, 3}}).busiest_cost(), 14 + 55);
}

TEST(AttentionTiles, Refusals) {
  const auto text = [](const PlacedRow& row, const TileOptions& options) {
    return test::thrown_text<Error>([&] { static_cast<void>(count_tiles(row, options)); });
  };
  const std::string where = "packing::count_tiles: ";
  EXPECT_EQ(text({.tokens = 8}, {.blocks = {0, 1}}),
            where + "options.blocks.query = 0: must be >= 1");
  EXPECT_EQ(text({.tokens = 8}, {.blocks = {1, 0}}),
            where + "options.blocks.key = 0: must be >= 1");
  EXPECT_EQ(text({.tokens = 8}, {.blocks = {1, 1}, .rule = static_cast<TileRule>(5)}),
            where + "options.rule = 5: must be naive or pad_aware");
  EXPECT_EQ(text({.tokens = 24}, {.context = 2, .blocks = {4, 8}, .check = TileCheck::strict}),
            where + "options.blocks.query = 4: strict: must divide a rank's chunk (6)");
  EXPECT_EQ(text({.tokens = 24}, {.context = 2, .blocks = {3, 9}, .check = TileCheck::strict}),
            where + "options.blocks.key = 9: strict: must divide the row (24)");
  EXPECT_EQ(text({.tokens = 24}, {.context = 2, .blocks = {3, 8}, .check = TileCheck::strict}),
            "nothing was thrown");
  EXPECT_NE(text({.tokens = 10}, {.context = 2, .blocks = {1, 1}}).find("must be a multiple of"),
            std::string::npos);

  const std::vector<Segment> overlapping{{.start = 0, .len = 4}, {.start = 3, .len = 1}};
  EXPECT_EQ(text({.segments = overlapping, .tokens = 8}, {.blocks = {1, 1}}),
            where + "row.segments[1].start = 3: shifted, must not lie before 4");
  const std::vector<Segment> segment{{.start = 1, .len = 4}};
  EXPECT_EQ(text({.segments = segment, .tokens = 8, .shift = 4}, {.blocks = {1, 1}}),
            where + "row.segments[0].end = 9: shifted, must not exceed row.tokens (8)");
  EXPECT_EQ(text({.segments = segment, .tokens = 8, .shift = -1}, {.blocks = {1, 1}}),
            where + "row.shift = -1: must be in [0, row.tokens]");
  const std::vector<Segment> empty{{.start = 1, .len = 0}};
  EXPECT_EQ(text({.segments = empty, .tokens = 8}, {.blocks = {1, 1}}),
            where + "row.segments[0].len = 0: must be >= 1");

  const std::vector<std::int32_t> negative{1, 1, -3, 0};
  EXPECT_EQ(test::thrown_text<Error>([&] {
              static_cast<void>(count_tiles(negative, {.blocks = {1, 1}}));
            }),
            where + "segment_ids[2] = -3: must be >= 0");

  const auto shards = [](const AttentionShards& attention) {
    return test::thrown_text<Error>([&] { validate("pack", attention, 64); });
  };
  EXPECT_EQ(shards({.forward = {0, 1}}), "pack: options.attention.forward.query = 0: must be >= 1");
  EXPECT_EQ(shards({.forward = {1, 0}}), "pack: options.attention.forward.key = 0: must be >= 1");
  EXPECT_EQ(shards({.backward = {0, 1}}),
            "pack: options.attention.backward.query = 0: must be >= 1");
  EXPECT_EQ(shards({.backward = {1, 0}}), "pack: options.attention.backward.key = 0: must be >= 1");
  EXPECT_EQ(shards({}), "nothing was thrown");
}

}  // namespace
}  // namespace heddle::packing

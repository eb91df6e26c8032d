#include "heddle/packing/pack.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "packing/owned_rollout.hpp"
#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: an option lost between pack and its chunks or rows (26, 27): position,
// pad_align, pad_id, segment alignment, max_segments, max_loss_tokens, pack_size, filling; pad_align read
// under end (37); leftovers in sorted order (44); options checked after the return for no items; a last chunk
// of fewer rows; an all-padding chunk for two misfits in a row; is_update_step on every chunk (60) or none;
// items checked after the first chunk was written; num_segments without padding's bucket.

namespace heddle::packing {
namespace {

using Lists = std::vector<std::vector<std::int32_t>>;

Lists rows_of(const SegmentTable& table) {
  Lists rows;
  for (std::int64_t row = 0; row < table.rows(); ++row) {
    rows.emplace_back();
    for (const Segment& segment : table.row(row)) {
      rows.back().push_back(segment.item_index);
    }
  }
  return rows;
}

std::vector<test::OwnedRollout> items_of_lengths(const std::vector<std::int64_t>& lengths) {
  std::vector<test::OwnedRollout> items;
  for (const std::int64_t length : lengths) {
    items.push_back(test::plain_item(length / 2, length - length / 2,
                                     static_cast<std::int32_t>(100 * (items.size() + 1))));
  }
  return items;
}

/// Every byte of a chunk's arrays.
std::vector<char> bytes_of(const PackedChunk& chunk) {
  std::vector<char> bytes;
  const auto add = [&](auto array) {
    for (std::int64_t row = 0; row < array.rows(); ++row) {
      const auto values = array.row(row);
      const auto* const first = reinterpret_cast<const char*>(values.data());
      bytes.insert(bytes.end(), first, first + values.size_bytes());
    }
  };
  add(chunk.arrays.ids);
  add(chunk.arrays.prompt_mask);
  add(chunk.arrays.completion_mask);
  add(chunk.arrays.advantages);
  add(chunk.arrays.segment_ids);
  add(chunk.arrays.segment_positions);
  for (const PerTokenField field : per_token_fields) {
    add(chunk.arrays.per_token[field]);
  }
  add(chunk.arrays.routed_experts);
  const auto* const counts = reinterpret_cast<const char*>(chunk.arrays.num_real_segments.data());
  bytes.insert(bytes.end(), counts, counts + chunk.arrays.num_real_segments.size_bytes());
  return bytes;
}

struct Recorded {
  std::vector<std::vector<char>> bytes;
  std::vector<SegmentTable> segments;
  std::vector<bool> is_update_step;
};

Recorded record(const std::vector<Rollout>& items, const PackOptions& options) {
  ChunkBuffers buffers;
  Recorded recorded;
  pack(items, options, buffers, [&](const PackedChunk& chunk) {
    recorded.bytes.push_back(bytes_of(chunk));
    recorded.segments.push_back(chunk.segments);
    recorded.is_update_step.push_back(chunk.is_update_step);
  });
  return recorded;
}

TEST(Pack, LeftoversFillFurtherChunksOfAllRows) {
  const auto owned = items_of_lengths({4, 6, 4, 6, 2});
  const auto items = test::views(owned);
  const PackOptions options{.budget = 10, .pack_size = 2, .segment_align_multiple = 4};
  EXPECT_EQ(rows_of(plan(items, options)), (Lists{{1, 4}, {3}, {0, 2}, {}}));
  const Recorded recorded = record(items, options);
  ASSERT_EQ(recorded.segments.size(), 2U);
  EXPECT_EQ(rows_of(recorded.segments[0]), (Lists{{1, 4}, {3}}));
  EXPECT_EQ(rows_of(recorded.segments[1]), (Lists{{0, 2}, {}}));
  EXPECT_EQ(recorded.is_update_step, (std::vector<bool>{false, true}));
}

TEST(Pack, AChunkReturnsLeftoversInArrivalOrder) {
  const auto owned = items_of_lengths({4, 6, 4, 6, 2});
  ChunkBuffers buffers;
  const ChunkAndLeftover found = pack_chunk(
      test::views(owned), {.budget = 10, .pack_size = 2, .segment_align_multiple = 4}, buffers);
  EXPECT_EQ(rows_of(found.chunk.segments), (Lists{{1, 4}, {3}}));
  EXPECT_EQ(found.leftover, (std::vector<std::int32_t>{0, 2}));
  EXPECT_EQ(found.chunk.dims.rows, 2);
  EXPECT_FALSE(found.chunk.is_update_step);

  const ChunkAndLeftover nothing = pack_chunk({}, {.budget = 3, .pack_size = 2}, buffers);
  EXPECT_EQ(rows_of(nothing.chunk.segments), (Lists{{}, {}}));
  EXPECT_EQ(nothing.chunk.arrays.segment_ids(1, 2), 0);
}

TEST(Pack, BatchIsTheSameAsChunkAfterChunk) {
  test::Random random(41);
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t budget = random.integer(1, 48);
    const auto owned = test::random_items(random, {.count = random.integer(0, 20),
                                                   .longest = budget,
                                                   .all_fields = random.chance(0.3),
                                                   .layers = random.chance(0.3) ? 1 : 0,
                                                   .top_k = 2});
    const auto items = test::views(owned);
    PackOptions options{.budget = budget,
                        .pack_size = random.integer(1, 4),
                        .segment_align_multiple = random.integer(1, 5)};
    if (random.chance(0.4)) {
      options.max_segments = random.integer(1, 3);
    }
    if (random.chance(0.3)) {
      options.max_loss_tokens = budget;
    }
    if (random.chance(0.2)) {
      options.filling = RowFilling::padded;
    }
    const SegmentTable whole = plan(items, options);
    ASSERT_EQ(whole.rows() % options.pack_size, 0);

    ChunkBuffers buffers;
    const Recorded recorded = record(items, options);
    std::vector<std::int32_t> pending;  // indices of `items`
    for (std::size_t i = 0; i < items.size(); ++i) {
      pending.push_back(static_cast<std::int32_t>(i));
    }
    std::size_t chunk_index = 0;
    std::int64_t tokens = 0;
    while (!pending.empty()) {
      std::vector<Rollout> left;
      for (const std::int32_t index : pending) {
        left.push_back(items[static_cast<std::size_t>(index)]);
      }
      ChunkAndLeftover next = pack_chunk(left, options, buffers);
      ASSERT_LT(chunk_index, recorded.bytes.size()) << "trial " << trial;
      ASSERT_EQ(bytes_of(next.chunk), recorded.bytes[chunk_index]) << "trial " << trial;
      for (Segment& segment : next.chunk.segments.segments) {
        segment.item_index = pending[static_cast<std::size_t>(segment.item_index)];
        tokens += segment.len;
      }
      ASSERT_EQ(next.chunk.segments, recorded.segments[chunk_index]);
      ++chunk_index;
      for (std::int32_t& index : next.leftover) {
        index = pending[static_cast<std::size_t>(index)];
      }
      ASSERT_LT(next.leftover.size(), pending.size());
      pending = next.leftover;
    }
    ASSERT_EQ(chunk_index, recorded.bytes.size());
    std::int64_t expected_tokens = 0;
    for (const Rollout& item : items) {
      expected_tokens += item.length();
    }
    ASSERT_EQ(tokens, expected_tokens);
    for (std::size_t i = 0; i < recorded.is_update_step.size(); ++i) {
      ASSERT_EQ(recorded.is_update_step[i], i + 1 == recorded.is_update_step.size());
    }
  }
}

TEST(Pack, EndIsByteIdenticalForEveryPadAlign) {
  test::Random random(42);
  for (int trial = 0; trial < 210; ++trial) {
    const std::int64_t segment_align =
        std::array{48, 64, 1}.at(static_cast<std::size_t>(trial % 3));
    const std::int64_t longest = random.integer(1, 300);
    const auto owned = test::random_items(random, {.count = random.integer(0, 12),
                                                   .longest = longest,
                                                   .all_fields = random.chance(0.5),
                                                   .layers = 2,
                                                   .top_k = 2});
    const auto items = test::views(owned);
    PackOptions options{.budget = random.integer(longest, 500),
                        .pack_size = 2,
                        .segment_align_multiple = segment_align,
                        .pad_id = -9};
    const Recorded expected = record(items, options);
    for (const std::int64_t align :
         {std::int64_t{0}, std::int64_t{-5}, std::int64_t{1}, std::int64_t{48}, std::int64_t{77},
          std::int64_t{500}, std::numeric_limits<std::int64_t>::max()}) {
      options.pad_align = align;
      const Recorded found = record(items, options);
      EXPECT_EQ(found.bytes, expected.bytes) << "trial " << trial << ", pad_align " << align;
      EXPECT_EQ(found.segments, expected.segments);
    }
  }
}

TEST(Pack, EveryOptionReachesTheRows) {
  const auto owned = items_of_lengths({5, 3, 2});
  const auto items = test::views(owned);
  ChunkBuffers buffers;
  const auto first_row = [&](const PackOptions& options) {
    const PackedChunk chunk = pack_chunk(items, options, buffers).chunk;
    const auto row = chunk.arrays.ids.row(0);
    return std::vector<std::int32_t>(row.begin(), row.end());
  };
  using Ids = std::vector<std::int32_t>;
  PackOptions options{.budget = 16, .segment_align_multiple = 4, .pad_id = -1, .pad_align = 4};
  EXPECT_EQ(first_row(options),
            (Ids{100, 101, 102, 103, 104, -1, -1, -1, 200, 201, 202, -1, 300, 301, -1, -1}));
  PackOptions changed = options;
  changed.budget = 22;
  changed.pad_position = PadPosition::start;
  EXPECT_EQ(first_row(changed), (Ids{-1,  -1,  -1, -1, -1, -1,  -1,  -1,  100, 101, 102,
                                     103, 104, -1, -1, -1, 200, 201, 202, -1,  300, 301}));
  changed.pad_align = 8;
  EXPECT_EQ(first_row(changed)[8], 100);
  changed.budget = 21;
  EXPECT_EQ(first_row(changed)[0], 100) << "trailing 7 < 8";
  changed.pad_position = PadPosition::auto_;
  changed.budget = 24;
  changed.pad_align = 4;
  changed.attention = {.context = 4,
                       .layout = ContextLayout::dual_chunk_swap,
                       .forward = {1, 1},
                       .backward = {1, 1}};
  const SegmentTable balanced = plan(items, changed);
  EXPECT_EQ(balanced.shift(0),
            auto_shift({.segments = plan(items, {.budget = 24, .segment_align_multiple = 4}).row(0),
                        .tokens = 24},
                       4, changed.attention));
  changed = options;
  changed.segment_align_multiple = 8;
  EXPECT_EQ(first_row(changed)[8], 200);
  EXPECT_EQ(rows_of(plan(items, changed)), (Lists{{0, 1}, {2}}));
  changed = options;
  changed.max_segments = 1;
  EXPECT_EQ(rows_of(plan(items, changed)), (Lists{{0}, {1}, {2}}));
  EXPECT_EQ(pack_chunk(items, changed, buffers).chunk.num_segments, 2);
  EXPECT_EQ(pack_chunk(items, options, buffers).chunk.num_segments, 17);
  changed = options;
  changed.max_loss_tokens = 4;  // completions of 3, 2 and 1 tokens
  EXPECT_EQ(rows_of(plan(items, changed)), (Lists{{0, 2}, {1}}));
  changed = options;
  changed.pack_size = 3;
  EXPECT_EQ(rows_of(plan(items, changed)), (Lists{{0, 1, 2}, {}, {}}));
  changed.filling = RowFilling::padded;
  EXPECT_EQ(rows_of(plan(items, changed)), (Lists{{0}, {1}, {2}}));
  changed.pad_id = 77;
  EXPECT_EQ(first_row(changed)[5], 77);
}

TEST(Pack, PaddedRowsHoldOneItemInArrivalOrder) {
  const auto owned = items_of_lengths({2, 5, 0, 3});
  const auto items = test::views(owned);
  PackOptions options{.budget = 5, .pack_size = 3, .filling = RowFilling::padded};
  EXPECT_EQ(rows_of(plan(items, options)), (Lists{{0}, {1}, {}, {3}, {}, {}}));
  ChunkBuffers buffers;
  const ChunkAndLeftover chunk = pack_chunk(items, options, buffers);
  EXPECT_EQ(rows_of(chunk.chunk.segments), (Lists{{0}, {1}, {}}));
  EXPECT_EQ(chunk.leftover, (std::vector<std::int32_t>{3}));
}

TEST(Pack, NoItemsGiveNoChunkButOptionsAreChecked) {
  const PackOptions good{.budget = 8};
  EXPECT_EQ(plan({}, good).rows(), 0);
  EXPECT_TRUE(record({}, good).bytes.empty());
  PackOptions broken{.budget = 8, .pad_position = PadPosition::start, .pad_align = 0};
  ChunkBuffers buffers;
  const std::string rule =
      ": options.pad_align = 0: must be a positive multiple of segment_align_multiple (64)";
  EXPECT_EQ(test::thrown_text<Error>([&] { pack({}, broken, buffers, [](const PackedChunk&) {}); }),
            "packing::pack" + rule);
  EXPECT_EQ(test::thrown_text<Error>([&] { static_cast<void>(plan({}, broken)); }),
            "packing::plan" + rule);
  EXPECT_EQ(test::thrown_text<Error>([&] { static_cast<void>(pack_chunk({}, broken, buffers)); }),
            "packing::pack_chunk" + rule);
  const auto empties = items_of_lengths({0, 0});
  EXPECT_EQ(rows_of(plan(test::views(empties), {.budget = 8, .pack_size = 2})), (Lists{{}, {}}));
}

TEST(Pack, WrongItemsAreRefusedBeforeTheFirstChunk) {
  auto owned = items_of_lengths({8, 8, 9});
  ChunkBuffers buffers;
  int chunks = 0;
  const auto count = [&](const PackedChunk&) { ++chunks; };
  const PackOptions options{.budget = 8, .segment_align_multiple = 1};
  EXPECT_EQ(test::thrown_text<Error>([&] { pack(test::views(owned), options, buffers, count); }),
            "packing::pack: items[2].length = 9: must not exceed options.budget (8)");
  // The third chunk mixes items with and without a field.
  owned = items_of_lengths({8, 8, 4, 4});
  owned[3].per_token[PerTokenField::returns] = test::OwnedRollout::Values{{0.5F}, true};
  EXPECT_EQ(test::thrown_text<Error>([&] { pack(test::views(owned), options, buffers, count); }),
            "packing::pack: items[2].returns = null: must be given for every item of a chunk that "
            "has tokens, or for none");
  EXPECT_EQ(chunks, 0);
  // One chunk that carries it, others that do not: each chunk for itself.
  owned[2].per_token[PerTokenField::returns] = test::OwnedRollout::Values{{0.5F}, true};
  pack(test::views(owned), options, buffers, [&](const PackedChunk& chunk) {
    EXPECT_EQ(chunk.dims.carried[PerTokenField::returns], ++chunks == 3);
  });
  EXPECT_EQ(chunks, 3);
}

TEST(Pack, BuffersAreReused) {
  const auto owned = items_of_lengths({8, 8, 8});
  ChunkBuffers buffers;
  std::vector<const void*> places;
  pack(test::views(owned), {.budget = 8}, buffers,
       [&](const PackedChunk& chunk) { places.push_back(chunk.arrays.ids.data()); });
  EXPECT_EQ(places, std::vector<const void*>(3, places[0]));
}

}  // namespace
}  // namespace heddle::packing

#include "heddle/packing/row_writer.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <gtest/gtest.h>

#include "heddle/packing/row_layout.hpp"
#include "packing/owned_rollout.hpp"
#include "packing/poisoned_chunk.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: one array left unshifted: ids, prompt_mask, completion_mask, advantages,
// segment_ids, positions, a per-token field, routing (1-8); positions made absolute (9); a document one
// token long or short (10); two arrays, or prompt and completion, swapped; a field written to its
// neighbour; [n] values read from the front; padding left as it was, or filled with another array's value;
// padding's experts 0; tokens behind n - 1 routed; a 32-bit routing offset (57); partial presence of a field
// accepted; the streamed copy one line short, or with its unaligned head left out; a chunk's count of
// documents taken from the table's first row.

namespace heddle::packing {
namespace {

using Values = test::OwnedRollout::Values;
using Ints = std::vector<std::int32_t>;
using Floats = std::vector<float>;

template <class T>
std::vector<T> row(MatrixView<T> array, std::int64_t index) {
  const auto span = array.row(index);
  return {span.begin(), span.end()};
}

/// `value` at the listed positions of a row of `tokens`, else `elsewhere`.
template <class T>
std::vector<T> at(std::int64_t tokens, T elsewhere,
                  const std::vector<std::pair<std::size_t, T>>& values) {
  std::vector<T> result(static_cast<std::size_t>(tokens), elsewhere);
  for (const auto& [position, value] : values) {
    result[position] = value;
  }
  return result;
}

std::vector<test::OwnedRollout> row_a() {
  std::vector<test::OwnedRollout> items(3);
  items[0].prompt_ids = {11, 12};
  items[0].completion_ids = {13, 14, 15};
  items[0].completion_mask = Floats{1, 0, 1};
  items[0].advantages = Values{{0.5F}, true};
  items[0].per_token[PerTokenField::old_per_token_logps] = Values{{-1, -2, -3}};
  items[0].routed = {0, 1, 2, 3, 4, 5, 6, 7};
  items[0].routed_tokens = 4;
  items[0].layers = 1;
  items[0].top_k = 2;
  items[1].completion_ids = {21, 22, 23};
  items[1].completion_mask = Floats{1, 1, 1};
  items[1].advantages = Values{{-0.5F, -0.5F, -0.5F}};
  items[1].per_token[PerTokenField::old_per_token_logps] = Values{{-4, -5, -6}};
  items[2].prompt_ids = {31};
  items[2].per_token[PerTokenField::old_per_token_logps] = Values{{}};
  return items;
}

BinAssignment one_bin(std::int32_t items) {
  BinAssignment bins;
  for (std::int32_t i = 0; i < items; ++i) {
    bins.items.push_back(i);
  }
  bins.bin_begin = {0, items};
  return bins;
}

class RowA : public ::testing::TestWithParam<PadPosition> {};

TEST_P(RowA, EveryArrayByHand) {
  const auto owned = row_a();
  const auto items = test::views(owned);
  const SegmentTable table = lay_out_rows(
      items, one_bin(3), 1,
      {.budget = 24, .segment_align_multiple = 4, .pad_position = GetParam(), .pad_align = 8});
  const std::size_t shift = GetParam() == PadPosition::start ? 8 : 0;
  const ChunkDims dims = chunk_dims(items, table, {0, 1}, 24);
  EXPECT_EQ(dims.layers, 1);
  EXPECT_EQ(dims.top_k, 2);
  test::PoisonedChunk chunk(dims);
  write_rows(items, table, {0, 1}, 99, chunk.arrays);
  chunk.expect_guards();

  const ChunkArrays& arrays = chunk.arrays;
  const std::size_t s = shift;
  EXPECT_EQ(row(arrays.ids, 0), at<std::int32_t>(24, 99,
                                                 {{s, 11},
                                                  {s + 1, 12},
                                                  {s + 2, 13},
                                                  {s + 3, 14},
                                                  {s + 4, 15},
                                                  {s + 8, 21},
                                                  {s + 9, 22},
                                                  {s + 10, 23},
                                                  {s + 12, 31}}));
  EXPECT_EQ(row(arrays.segment_ids, 0), at<std::int32_t>(24, 0,
                                                         {{s, 1},
                                                          {s + 1, 1},
                                                          {s + 2, 1},
                                                          {s + 3, 1},
                                                          {s + 4, 1},
                                                          {s + 8, 2},
                                                          {s + 9, 2},
                                                          {s + 10, 2},
                                                          {s + 12, 3}}));
  EXPECT_EQ(row(arrays.segment_positions, 0),
            at<std::int32_t>(
                24, 0, {{s + 1, 1}, {s + 2, 2}, {s + 3, 3}, {s + 4, 4}, {s + 9, 1}, {s + 10, 2}}));
  EXPECT_EQ(row(arrays.prompt_mask, 0),
            at<float>(24, 0, {{s, 1.0F}, {s + 1, 1.0F}, {s + 12, 1.0F}}));
  EXPECT_EQ(
      row(arrays.completion_mask, 0),
      at<float>(24, 0,
                {{s + 2, 1.0F}, {s + 4, 1.0F}, {s + 8, 1.0F}, {s + 9, 1.0F}, {s + 10, 1.0F}}));
  EXPECT_EQ(row(arrays.advantages, 0), at<float>(24, 0,
                                                 {{s + 2, 0.5F},
                                                  {s + 3, 0.5F},
                                                  {s + 4, 0.5F},
                                                  {s + 8, -0.5F},
                                                  {s + 9, -0.5F},
                                                  {s + 10, -0.5F}}));
  EXPECT_EQ(row(arrays.per_token[PerTokenField::old_per_token_logps], 0),
            at<float>(24, 0,
                      {{s + 2, -1.0F},
                       {s + 3, -2.0F},
                       {s + 4, -3.0F},
                       {s + 8, -4.0F},
                       {s + 9, -5.0F},
                       {s + 10, -6.0F}}));
  for (std::int64_t t = 0; t < 24; ++t) {
    const auto token = t - static_cast<std::int64_t>(s);
    const bool routed = token >= 0 && token < 4;
    EXPECT_EQ(arrays.routed_experts(t, 0), routed ? 2 * token : -1) << t;
    EXPECT_EQ(arrays.routed_experts(t, 1), routed ? 2 * token + 1 : -1) << t;
  }
  EXPECT_EQ(arrays.num_real_segments[0], 3);
}

INSTANTIATE_TEST_SUITE_P(Positions, RowA, ::testing::Values(PadPosition::end, PadPosition::start),
                         [](const auto& position) { return std::string(name(position.param)); });

TEST(RowWriter, RowsBAndC) {
  const std::vector<test::OwnedRollout> row_b{test::plain_item(2, 4, 100),
                                              test::plain_item(0, 5, 200)};
  const std::vector<test::OwnedRollout> row_c{test::plain_item(4, 5, 300)};
  const auto ids_of = [](const std::vector<test::OwnedRollout>& owned, const PackOptions& options) {
    const auto items = test::views(owned);
    const SegmentTable table =
        lay_out_rows(items, one_bin(static_cast<std::int32_t>(items.size())), 1, options);
    test::PoisonedChunk chunk(chunk_dims(items, table, {0, 1}, options.budget));
    write_rows(items, table, {0, 1}, 7, chunk.arrays);
    return row(chunk.arrays.ids, 0);
  };
  PackOptions b{.budget = 22, .segment_align_multiple = 4, .pad_align = 4};
  EXPECT_EQ(ids_of(row_b, b), (Ints{100, 101, 102, 103, 104, 105, 7, 7, 200, 201, 202,
                                    203, 204, 7,   7,   7,   7,   7, 7, 7,   7,   7}));
  b.pad_position = PadPosition::start;
  EXPECT_EQ(ids_of(row_b, b), (Ints{7,   7,   7,   7, 7, 7,   7,   7,   100, 101, 102,
                                    103, 104, 105, 7, 7, 200, 201, 202, 203, 204, 7}));
  PackOptions c{.budget = 16,
                .segment_align_multiple = 4,
                .pad_position = PadPosition::start,
                .pad_align = 8};
  EXPECT_EQ(ids_of(row_c, c),
            (Ints{300, 301, 302, 303, 304, 305, 306, 307, 308, 7, 7, 7, 7, 7, 7, 7}));
  const std::vector<test::OwnedRollout> shorter{test::plain_item(4, 4, 300)};
  EXPECT_EQ(ids_of(shorter, c),
            (Ints{7, 7, 7, 7, 7, 7, 7, 7, 300, 301, 302, 303, 304, 305, 306, 307}));
  EXPECT_EQ(ids_of({}, c), Ints(16, 7));
}

/// What position `t` of a row must hold, looked up in the item itself.
struct Expected {
  std::int32_t id, segment_id, position;
  float prompt_mask, completion_mask;
};

void expect_row(const std::vector<test::OwnedRollout>& owned, std::span<const Segment> segments,
                std::int32_t pad_id, const ChunkDims& dims, const ChunkArrays& arrays,
                std::int64_t r) {
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    const auto found = std::find_if(segments.begin(), segments.end(), [t](const Segment& s) {
      return s.start <= t && t < s.start + s.len;
    });
    const bool real = found != segments.end();
    const test::OwnedRollout* const item =
        real ? &owned[static_cast<std::size_t>(found->item_index)] : nullptr;
    const std::int64_t p = real ? t - found->start : 0;
    Expected expected{pad_id, 0, 0, 0, 0};
    if (real) {
      const auto prompt = static_cast<std::int64_t>(item->prompt_ids.size());
      expected = {.id = p < prompt ? item->prompt_ids[static_cast<std::size_t>(p)]
                                   : item->completion_ids[static_cast<std::size_t>(p - prompt)],
                  .segment_id = static_cast<std::int32_t>(found - segments.begin()) + 1,
                  .position = static_cast<std::int32_t>(p),
                  .prompt_mask = p < prompt ? 1.0F : 0.0F,
                  .completion_mask = item->expected_mask(p)};
    }
    ASSERT_EQ(arrays.ids(r, t), expected.id) << r << " " << t;
    ASSERT_EQ(arrays.segment_ids(r, t), expected.segment_id);
    ASSERT_EQ(arrays.segment_positions(r, t), expected.position);
    ASSERT_EQ(arrays.prompt_mask(r, t), expected.prompt_mask);
    ASSERT_EQ(arrays.completion_mask(r, t), expected.completion_mask);
    ASSERT_EQ(arrays.advantages(r, t), real ? item->expected_value(item->advantages, p) : 0.0F);
    for (const PerTokenField field : per_token_fields) {
      if (dims.carried[field]) {
        ASSERT_EQ(arrays.per_token[field](r, t),
                  real ? item->expected_value(item->per_token[field], p) : 0.0F);
      }
    }
    if (dims.layers > 0) {
      const auto routed = arrays.routed_experts.row(r * dims.tokens + t);
      if (real && item->layers > 0 && p < item->routed_tokens) {
        const auto* const own = item->routed.data() + p * dims.routed_per_token();
        ASSERT_TRUE(std::equal(routed.begin(), routed.end(), own)) << r << " " << t;
      } else {
        ASSERT_TRUE(std::all_of(routed.begin(), routed.end(),
                                [](std::int16_t expert) { return expert == -1; }))
            << r << " " << t;
      }
    }
  }
}

TEST(RowWriter, EveryPositionComparedWithItsItemAndStartWithEnd) {
  test::Random random(31);
  std::int64_t moved = 0;
  for (int trial = 0; trial < 250; ++trial) {
    constexpr std::int64_t aligns[] = {1, 2, 4, 16, 48, 64, 128};
    const std::int64_t align = aligns[random.integer(0, 6)];
    const std::int64_t budget =
        random.chance(0.5) ? align * random.integer(1, std::max<std::int64_t>(2, 200 / align))
                           : random.integer(1, 200);
    const auto owned = test::random_items(random, {.count = random.integer(0, 12),
                                                   .longest = budget,
                                                   .all_fields = random.chance(0.5),
                                                   .layers = random.chance(0.6) ? 2 : 0,
                                                   .top_k = 3});
    const auto items = test::views(owned);
    PackOptions options{.budget = budget,
                        .segment_align_multiple = align,
                        .pad_id = static_cast<std::int32_t>(random.integer(-1, 2000)),
                        .pad_align = align * random.integer(1, 3)};
    std::vector<std::int32_t> pending;
    for (std::size_t i = 0; i < items.size(); ++i) {
      pending.push_back(static_cast<std::int32_t>(i));
    }
    const BinAssignment bins = detail::assign_bins(items, pending, 1000, options);
    const std::int64_t rows = bins.bins() + random.integer(0, 2);  // rows of padding too
    const SegmentTable end = lay_out_rows(items, bins, rows, options);
    options.pad_position = PadPosition::start;
    const SegmentTable start = lay_out_rows(items, bins, rows, options);

    const ChunkDims dims = chunk_dims(items, end, {0, rows}, budget);
    test::PoisonedChunk at_end(dims);
    test::PoisonedChunk at_start(dims);
    write_rows(items, end, {0, rows}, options.pad_id, at_end.arrays);
    write_rows(items, start, {0, rows}, options.pad_id, at_start.arrays);
    at_end.expect_guards();
    at_start.expect_guards();
    for (std::int64_t r = 0; r < rows; ++r) {
      expect_row(owned, end.row(r), options.pad_id, dims, at_end.arrays, r);
      ASSERT_EQ(at_end.arrays.num_real_segments[static_cast<std::size_t>(r)],
                static_cast<std::int32_t>(end.row(r).size()));

      // P-7: X_start[i] = X_end[(i - shift) mod T] in every array.
      const std::int64_t shift = start.shift(r);
      moved += shift > 0 ? 1 : 0;
      ASSERT_EQ(shift % options.pad_align, 0);
      for (std::int64_t i = 0; i < budget; ++i) {
        const std::int64_t j = ((i - shift) % budget + budget) % budget;
        ASSERT_EQ(at_start.arrays.ids(r, i), at_end.arrays.ids(r, j));
        ASSERT_EQ(at_start.arrays.segment_ids(r, i), at_end.arrays.segment_ids(r, j));
        ASSERT_EQ(at_start.arrays.segment_positions(r, i), at_end.arrays.segment_positions(r, j));
        ASSERT_EQ(at_start.arrays.prompt_mask(r, i), at_end.arrays.prompt_mask(r, j));
        ASSERT_EQ(at_start.arrays.completion_mask(r, i), at_end.arrays.completion_mask(r, j));
        ASSERT_EQ(at_start.arrays.advantages(r, i), at_end.arrays.advantages(r, j));
        for (const PerTokenField field : per_token_fields) {
          if (dims.carried[field]) {
            ASSERT_EQ(at_start.arrays.per_token[field](r, i), at_end.arrays.per_token[field](r, j));
          }
        }
        for (std::int64_t k = 0; k < dims.routed_per_token(); ++k) {
          ASSERT_EQ(at_start.arrays.routed_experts(r * budget + i, k),
                    at_end.arrays.routed_experts(r * budget + j, k));
        }
      }
      ASSERT_EQ(at_start.arrays.num_real_segments[static_cast<std::size_t>(r)],
                at_end.arrays.num_real_segments[static_cast<std::size_t>(r)]);
      std::vector<Segment> moved_back(start.row(r).begin(), start.row(r).end());
      for (Segment& segment : moved_back) {
        segment.start -= static_cast<std::int32_t>(shift);
      }
      ASSERT_EQ(moved_back, std::vector<Segment>(end.row(r).begin(), end.row(r).end()));
    }
  }
  EXPECT_GT(moved, 100) << "the trials must contain rows that move";
}

TEST(RowWriter, SomeRowsOfATable) {
  const std::vector<test::OwnedRollout> owned{
      test::plain_item(1, 2, 10), test::plain_item(0, 4, 20), test::plain_item(2, 0, 30)};
  const auto items = test::views(owned);
  BinAssignment bins;
  bins.items = {0, 2, 1};
  bins.bin_begin = {0, 2, 3};
  const SegmentTable table =
      lay_out_rows(items, bins, 3, {.budget = 6, .segment_align_multiple = 1});
  test::PoisonedChunk chunk(chunk_dims(items, table, {1, 2}, 6));
  write_rows(items, table, {1, 2}, -5, chunk.arrays);
  EXPECT_EQ(row(chunk.arrays.ids, 0), (Ints{20, 21, 22, 23, -5, -5}));
  EXPECT_EQ(row(chunk.arrays.ids, 1), Ints(6, -5));
  EXPECT_EQ(chunk.arrays.num_real_segments[0], 1);
  EXPECT_EQ(chunk.arrays.num_real_segments[1], 0);
  test::PoisonedChunk nothing({.rows = 0, .tokens = 6});
  write_rows(items, table, {3, 0}, 0, nothing.arrays);
}

TEST(RowWriter, FieldsAreCarriedByAllDocumentsOrNone) {
  std::vector<test::OwnedRollout> owned = row_a();
  owned.push_back(test::plain_item(0, 0));  // of no token: not asked
  const auto table_of = [](const std::vector<Rollout>& items) {
    return lay_out_rows(items, one_bin(static_cast<std::int32_t>(items.size())), 1,
                        {.budget = 24, .segment_align_multiple = 4});
  };
  auto items = test::views(owned);
  EXPECT_TRUE(
      chunk_dims(items, table_of(items), {0, 1}, 24).carried[PerTokenField::old_per_token_logps]);
  EXPECT_FALSE(chunk_dims(items, table_of(items), {0, 1}, 24).carried[PerTokenField::returns]);
  owned[1].per_token[PerTokenField::returns] = Values{{1.0F}, true};
  owned[2].per_token[PerTokenField::old_per_token_logps].reset();
  items = test::views(owned);
  EXPECT_EQ(
      test::thrown_text<Error>([&] {
        static_cast<void>(chunk_dims(items, table_of(items), {0, 1}, 24));
      }),
      "packing::chunk_dims: items[2].old_per_token_logps = null: must be given for every item "
      "of a chunk that has tokens, or for none");
  owned[2].per_token[PerTokenField::old_per_token_logps] = Values{{}};
  items = test::views(owned);
  EXPECT_EQ(test::thrown_text<Error>([&] {
              static_cast<void>(chunk_dims(items, table_of(items), {0, 1}, 24));
            }),
            "packing::chunk_dims: items[0, 2].returns = null: must be given for every item of a "
            "chunk that has tokens, or for none");
}

TEST(RowWriter, ALongListOfItemsWithoutAFieldIsCut) {
  std::vector<test::OwnedRollout> owned(12, test::plain_item(1, 0));
  owned[4].per_token[PerTokenField::overlong] = Values{{}};
  const auto items = test::views(owned);
  const SegmentTable table =
      lay_out_rows(items, one_bin(12), 1, {.budget = 12, .segment_align_multiple = 1});
  EXPECT_EQ(
      test::thrown_text<Error>([&] {
        static_cast<void>(chunk_dims(items, table, {0, 1}, 12));
      }),
      "packing::chunk_dims: items[0, 1, 2, 3, 5, 6, 7, 8, ...].overlong = null: must be given "
      "for every item of a chunk that has tokens, or for none");
}

TEST(RowWriter, RoutingMayBeMissingButNotDiffer) {
  std::vector<test::OwnedRollout> owned = row_a();
  owned[1].layers = 2;
  owned[1].top_k = 1;
  owned[1].routed_tokens = 2;
  owned[1].routed = {1, 2, 3, 4};
  const auto items = test::views(owned);
  const SegmentTable table =
      lay_out_rows(items, one_bin(3), 1, {.budget = 24, .segment_align_multiple = 4});
  EXPECT_EQ(test::thrown_text<Error>([&] {
              static_cast<void>(chunk_dims(items, table, {0, 1}, 24));
            }),
            "packing::chunk_dims: items[1].routed_experts = 2 x 1: must have the layers x top_k of "
            "the items before it (1 x 2)");
}

TEST(RowWriter, RoutingThatNobodyHasIsAllMinusOne) {
  const std::vector<test::OwnedRollout> owned{test::plain_item(2, 2)};
  const auto items = test::views(owned);
  const SegmentTable table =
      lay_out_rows(items, one_bin(1), 1, {.budget = 6, .segment_align_multiple = 1});
  test::PoisonedChunk chunk({.rows = 1, .tokens = 6, .layers = 1, .top_k = 2});
  write_rows(items, table, {0, 1}, 0, chunk.arrays);
  for (std::int64_t t = 0; t < 6; ++t) {
    EXPECT_EQ(chunk.arrays.routed_experts(t, 0), -1);
    EXPECT_EQ(chunk.arrays.routed_experts(t, 1), -1);
  }
}

TEST(RowWriter, TablesThatDoNotFitAreRefusedBeforeAnythingIsWritten) {
  const std::vector<test::OwnedRollout> owned{test::plain_item(2, 3), test::plain_item(0, 4)};
  const auto items = test::views(owned);
  const SegmentTable good =
      lay_out_rows(items, one_bin(2), 1, {.budget = 12, .segment_align_multiple = 1});
  test::PoisonedChunk chunk({.rows = 1, .tokens = 12});
  const auto refusal = [&](const SegmentTable& table, const RowRange& rows = {0, 1}) {
    const std::string text =
        test::thrown_text<Error>([&] { write_rows(items, table, rows, 0, chunk.arrays); });
    EXPECT_EQ(chunk.arrays.ids(0, 0), test::poison<std::int32_t>()) << text;
    return text;
  };
  const std::string where = "packing::write_rows: ";
  EXPECT_EQ(refusal(good, {2, 0}), where + "rows.first = 2: must be a row of the table");
  EXPECT_EQ(refusal(good, {-1, 1}), where + "rows.first = -1: must be a row of the table");
  EXPECT_EQ(refusal(good, {0, 2}), where + "rows.count = 2: must end within the table");
  SegmentTable broken = good;
  broken.segments[1].item_index = 2;
  EXPECT_EQ(refusal(broken),
            where + "table.row[0][1].item_index = 2: must be the index of an item");
  broken = good;
  broken.segments[1].len = 3;
  EXPECT_EQ(refusal(broken),
            where + "table.row[0][1].len = 3: must be >= 1 and the item's length (4)");
  broken = good;
  broken.segments[0].prompt_len = 3;
  EXPECT_EQ(refusal(broken),
            where + "table.row[0][0].prompt_len = 3: must be the item's prompt length (2)");
  broken = good;
  broken.segments[1].start = 4;
  EXPECT_EQ(refusal(broken), where +
                                 "table.row[0][1].start = 4: must not lie before 5, the end of "
                                 "what stands before it");
  broken = good;
  broken.segments[1].start = 9;
  EXPECT_EQ(refusal(broken), where + "table.row[0][1].end = 13: must not exceed the budget (12)");

  std::vector<Rollout> short_mask = items;
  const std::vector<float> two(2, 1.0F);
  short_mask[0].completion_mask = std::span<const float>(two);
  EXPECT_EQ(test::thrown_text<Error>([&] {
              write_rows(short_mask, good, {0, 1}, 0, chunk.arrays);
            }),
            where + "items[0].completion_mask.size = 2: must be the completion's length (3)");
  ChunkArrays missing = chunk.arrays;
  missing.advantages = {};
  EXPECT_EQ(test::thrown_text<Error>([&] {
              write_rows(items, good, {0, 1}, 0, missing);
            }),
            where + "arrays.advantages.rows = 0: must equal rows (1)");
  EXPECT_EQ(chunk.arrays.ids(0, 0), test::poison<std::int32_t>());
}

TEST(RowWriter, LargeChunksAreTheSameOnAnyNumberOfThreads) {
  // Above the size from which routing is streamed, with documents across its blocks.
  test::Random random(5);
  constexpr std::int64_t budget = 3 * detail::routing_block + 777;
  std::vector<test::OwnedRollout> owned;
  for (const std::int64_t length : {5000, 4095, 3600, 300}) {
    test::OwnedRollout item = test::plain_item(length / 3, length - length / 3);
    item.layers = 61;
    item.top_k = 23;
    item.routed_tokens = length - 1;
    item.routed.resize(static_cast<std::size_t>(item.routed_tokens * 61 * 23));
    for (std::int16_t& id : item.routed) {
      id = static_cast<std::int16_t>(random.bits() & 511);
    }
    owned.push_back(std::move(item));
  }
  const auto items = test::views(owned);
  const SegmentTable table = lay_out_rows(items, one_bin(4), 1,
                                          {.budget = budget,
                                           .segment_align_multiple = 1,
                                           .pad_position = PadPosition::start,
                                           .pad_align = 64});  // 6 stay behind
  const ChunkDims dims = chunk_dims(items, table, {0, 1}, budget);
  ASSERT_GT(cost(dims, 0).bytes_written, streaming_bytes);
  for (const int threads : {1, 2, 8}) {
    test::PoisonedChunk chunk(dims);
    test::with_threads(threads, [&] { write_rows(items, table, {0, 1}, 3, chunk.arrays); });
    chunk.expect_guards();
    expect_row(owned, table.row(0), 3, dims, chunk.arrays, 0);
  }
}

#ifdef __linux__
TEST(RowWriter, RoutingBeyondTwoToThe31Elements) {
  // Two rows of 4.4 GB of address space each, of which only the last block of the second is written:
  // its offset passes 2^31 in the chunk, and within the row.
  constexpr std::int64_t tokens = 1 << 20;
  constexpr std::int64_t per_token = 2100;
  static_assert((tokens - detail::routing_block) * per_token > (std::int64_t{1} << 31));
  constexpr std::size_t bytes = 2 * tokens * per_token * sizeof(std::int16_t);
  void* const reserved = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(reserved, MAP_FAILED);

  test::OwnedRollout item = test::plain_item(1, 1);
  item.layers = 1;
  item.top_k = per_token;
  item.routed_tokens = 2;
  item.routed.assign(2 * per_token, 5);
  item.routed.back() = 6;
  const std::vector<Rollout> items{item.view()};
  const std::vector<Segment> last_two{
      {.start = tokens - 2, .len = 2, .prompt_len = 1, .item_index = 0}};
  ChunkArrays arrays;
  arrays.ids = {nullptr, 2, tokens};
  arrays.routed_experts = {static_cast<std::int16_t*>(reserved), 2 * tokens, per_token};
  const auto pieces = detail::row_pieces(items, arrays, 0, detail::Stores::streaming);
  constexpr std::int64_t last_block = tokens / detail::routing_block - 1;
  pieces[static_cast<std::size_t>(last_block)](1, last_two);

  const auto expert = [&](std::int64_t t, std::int64_t k) {
    return arrays.routed_experts(tokens + t, k);
  };
  EXPECT_EQ(expert(tokens - detail::routing_block, 0), -1);
  EXPECT_EQ(expert(tokens - 3, per_token - 1), -1);
  EXPECT_EQ(expert(tokens - 2, 0), 5);
  EXPECT_EQ(expert(tokens - 1, per_token - 2), 5);
  EXPECT_EQ(expert(tokens - 1, per_token - 1), 6);
  munmap(reserved, bytes);
}
#endif

}  // namespace
}  // namespace heddle::packing

#include "heddle/packing/sequence_packer.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "packing/owned_rollout.hpp"
#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: the update flag on every chunk (60) or on a chunk before the last; a list that
// passes the update's end accepted, its surplus leaking into this update (P-6); an update of which nothing
// is handed out; items kept over an update's end; chunks handed out below or only above B * T tokens;
// alignment gaps counted; items of no token lost; a list kept in part when it is refused; options lost on the
// way to the chunk (26).

namespace heddle::packing {
namespace {

struct Handed {
  std::vector<std::int32_t> items;  ///< index in the update, rows one after the other
  bool is_update_step = false;
  std::vector<std::int32_t> ids;
};

class Recorder {
 public:
  void operator()(const PackedChunk& chunk) const {
    Handed handed{.items = {}, .is_update_step = chunk.is_update_step, .ids = {}};
    for (const Segment& segment : chunk.segments.segments) {
      handed.items.push_back(segment.item_index);
    }
    for (std::int64_t row = 0; row < chunk.dims.rows; ++row) {
      const auto ids = chunk.arrays.ids.row(row);
      handed.ids.insert(handed.ids.end(), ids.begin(), ids.end());
    }
    chunks_->push_back(handed);
  }
  [[nodiscard]] std::vector<Handed>& chunks() const { return *chunks_; }

 private:
  std::shared_ptr<std::vector<Handed>> chunks_ = std::make_shared<std::vector<Handed>>();
};

std::vector<test::OwnedRollout> items_of_lengths(const std::vector<std::int64_t>& lengths) {
  std::vector<test::OwnedRollout> items;
  for (const std::int64_t length : lengths) {
    items.push_back(
        test::plain_item(0, length, static_cast<std::int32_t>(100 * (items.size() + 1))));
  }
  return items;
}

PackOptions two_rows_of_ten() {
  return {.budget = 10, .pack_size = 2, .segment_align_multiple = 1};
}

TEST(SequencePacker, HandsOutAChunkOnceItsTokensAreThere) {
  const auto owned = items_of_lengths({6, 6, 7, 1, 5, 3});
  const auto items = test::views(owned);
  SequencePacker packer(two_rows_of_ten(), 6);
  const Recorder recorder;
  packer.feed(std::span(items).first(3), recorder);  // 19 tokens of 20
  EXPECT_TRUE(recorder.chunks().empty());
  EXPECT_EQ(packer.received(), 3);
  EXPECT_EQ(packer.kept(), 3);
  packer.feed(std::span(items).subspan(3, 1), recorder);  // 20: hand out, leftovers are normal
  ASSERT_EQ(recorder.chunks().size(), 1U);
  EXPECT_EQ(recorder.chunks()[0].items, (std::vector<std::int32_t>{2, 3, 0}));
  EXPECT_FALSE(recorder.chunks()[0].is_update_step);
  EXPECT_EQ(packer.kept(), 1);
  packer.feed(std::span(items).subspan(4, 2), recorder);  // the update's last item
  ASSERT_EQ(recorder.chunks().size(), 2U);
  EXPECT_EQ(recorder.chunks()[1].items, (std::vector<std::int32_t>{1, 5, 4}));
  EXPECT_TRUE(recorder.chunks()[1].is_update_step);
  EXPECT_EQ(packer.received(), 0);
  EXPECT_EQ(packer.kept(), 0);
  packer.finish();
}

TEST(SequencePacker, AlignmentGapsAreNotTokens) {
  const auto owned = items_of_lengths({5, 5, 5, 4, 1});
  const auto items = test::views(owned);
  PackOptions options = two_rows_of_ten();
  options.segment_align_multiple = 8;  // one document a row
  SequencePacker packer(options, 5);
  const Recorder recorder;
  packer.feed(std::span(items).first(4), recorder);  // 19 tokens, though they fill two rows
  EXPECT_TRUE(recorder.chunks().empty());
  packer.feed(std::span(items).last(1), recorder);
  ASSERT_EQ(recorder.chunks().size(), 2U);
  EXPECT_FALSE(recorder.chunks()[0].is_update_step);
  EXPECT_TRUE(recorder.chunks()[1].is_update_step);
}

TEST(SequencePacker, OneListOfAnUpdateIsTheBatch) {
  test::Random random(51);
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t budget = random.integer(1, 30);
    const auto owned =
        test::random_items(random, {.count = random.integer(1, 15), .longest = budget});
    const auto items = test::views(owned);
    PackOptions options{.budget = budget,
                        .pack_size = random.integer(1, 3),
                        .segment_align_multiple = random.integer(1, 4),
                        .filling = random.chance(0.2) ? RowFilling::padded : RowFilling::packed,
                        .pad_id = 5,
                        .pad_position = random.chance(0.5) ? PadPosition::start : PadPosition::end};
    options.pad_align = options.segment_align_multiple;
    SequencePacker packer(options, static_cast<std::int64_t>(items.size()));
    const Recorder streamed;
    packer.feed(items, streamed);
    packer.finish();
    ChunkBuffers buffers;
    const Recorder batch;
    pack(items, options, buffers, batch);
    ASSERT_EQ(streamed.chunks().size(), batch.chunks().size());
    for (std::size_t i = 0; i < batch.chunks().size(); ++i) {
      ASSERT_EQ(streamed.chunks()[i].items, batch.chunks()[i].items);
      ASSERT_EQ(streamed.chunks()[i].ids, batch.chunks()[i].ids);
      ASSERT_EQ(streamed.chunks()[i].is_update_step, batch.chunks()[i].is_update_step);
    }
  }
}

TEST(SequencePacker, EveryUpdateEndsOnceAndHoldsItsOwnItems) {
  test::Random random(52);
  std::int64_t early = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t budget = random.integer(4, 24);
    const std::int64_t per_update = random.integer(1, 12);
    const std::int64_t updates = random.integer(1, 4);
    const auto owned =
        test::random_items(random, {.count = per_update * updates, .longest = budget});
    const auto items = test::views(owned);
    const PackOptions options{
        .budget = budget,
        .pack_size = random.integer(1, 3),
        .segment_align_multiple = random.integer(1, 3),
        .filling = random.chance(0.2) ? RowFilling::padded : RowFilling::packed};
    SequencePacker packer(options, per_update);
    for (std::int64_t update = 0; update < updates; ++update) {
      const Recorder recorder;
      std::int64_t fed = 0;
      while (fed < per_update) {
        const std::int64_t count = random.integer(0, per_update - fed);
        packer.feed(std::span(items).subspan(static_cast<std::size_t>(update * per_update + fed),
                                             static_cast<std::size_t>(count)),
                    recorder);
        fed += count;
        // While the update goes on, less than a chunk's tokens (or items) are kept.
        std::int64_t kept_tokens = 0;
        for (std::int64_t i = 0; i < fed; ++i) {
          kept_tokens += items[static_cast<std::size_t>(update * per_update + i)].length();
        }
        for (const Handed& chunk : recorder.chunks()) {
          for (const std::int32_t index : chunk.items) {
            kept_tokens -= items[static_cast<std::size_t>(update * per_update + index)].length();
          }
        }
        if (options.filling == RowFilling::packed) {
          ASSERT_LT(kept_tokens, options.pack_size * budget) << "trial " << trial;
        } else {
          ASSERT_LT(packer.kept(), options.pack_size);
        }
        if (fed < per_update) {
          early += static_cast<std::int64_t>(recorder.chunks().size());
          for (const Handed& chunk : recorder.chunks()) {
            ASSERT_FALSE(chunk.is_update_step);
          }
        }
      }
      ASSERT_FALSE(recorder.chunks().empty());
      std::vector<int> times(static_cast<std::size_t>(per_update), 0);
      std::size_t steps = 0;
      for (const Handed& chunk : recorder.chunks()) {
        steps += chunk.is_update_step ? 1 : 0;
        for (const std::int32_t index : chunk.items) {
          ++times[static_cast<std::size_t>(index)];
        }
      }
      ASSERT_EQ(steps, 1U);
      ASSERT_TRUE(recorder.chunks().back().is_update_step);
      for (std::int64_t i = 0; i < per_update; ++i) {
        const Rollout& item = items[static_cast<std::size_t>(update * per_update + i)];
        ASSERT_EQ(times[static_cast<std::size_t>(i)], item.length() > 0 ? 1 : 0);
      }
      ASSERT_EQ(packer.received(), 0);
    }
    packer.finish();
  }
  EXPECT_GT(early, 50) << "the trials must hand out chunks before an update's end";
}

TEST(SequencePacker, AListThatPassesTheUpdatesEndIsRefusedWhole) {
  const auto owned = items_of_lengths({1, 2, 3, 4});
  const auto items = test::views(owned);
  SequencePacker packer(two_rows_of_ten(), 3);
  const Recorder recorder;
  packer.feed(std::span(items).first(2), recorder);
  EXPECT_EQ(test::thrown_text<Error>([&] { packer.feed(std::span(items).last(2), recorder); }),
            "packing::SequencePacker::feed: items.size = 2: must not pass the end of the update "
            "(2 of 3 items have arrived)");
  EXPECT_EQ(packer.received(), 2);
  EXPECT_TRUE(recorder.chunks().empty());
  packer.feed(std::span(items).subspan(2, 1), recorder);
  ASSERT_EQ(recorder.chunks().size(), 1U);
  EXPECT_EQ(recorder.chunks()[0].items, (std::vector<std::int32_t>{2, 1, 0}));
}

TEST(SequencePacker, AStreamThatEndsWithinAnUpdateIsRefused) {
  const auto owned = items_of_lengths({9, 9, 9});
  const auto items = test::views(owned);
  SequencePacker packer(two_rows_of_ten(), 5);
  const Recorder recorder;
  packer.finish();
  packer.feed(std::span(items).first(1), recorder);
  EXPECT_EQ(test::thrown_text<Error>([&] { packer.finish(); }),
            "packing::SequencePacker::finish: received = 1: the stream must end at the end of an "
            "update, items would be lost");
  packer.feed({}, recorder);  // an empty list changes nothing
  EXPECT_EQ(packer.received(), 1);
}

TEST(SequencePacker, AChunkWhoseUserThrowsIsHandedOut) {
  const auto owned = items_of_lengths({9, 9, 9, 2});
  const auto items = test::views(owned);
  SequencePacker packer(two_rows_of_ten(), 3);
  const auto give_up = [](const PackedChunk&) { throw std::runtime_error("no device"); };
  EXPECT_THROW(packer.feed(std::span(items).first(3), give_up), std::runtime_error);
  EXPECT_EQ(packer.kept(), 1) << "the first chunk's two rows are gone";
  const Recorder recorder;
  packer.feed({}, recorder);
  ASSERT_EQ(recorder.chunks().size(), 1U);
  EXPECT_EQ(recorder.chunks()[0].items, (std::vector<std::int32_t>{2}));
  EXPECT_TRUE(recorder.chunks()[0].is_update_step);
  EXPECT_THROW(
      {
        packer.feed(std::span(items).last(1), recorder);
        packer.feed(std::span(items).first(2), give_up);
      },
      std::runtime_error);
  packer.feed({}, recorder);
  packer.finish();
}

TEST(SequencePacker, UpdatesOfEmptyItemsStillHaveAChunk) {
  const std::vector<Rollout> empties(2);
  SequencePacker packer(two_rows_of_ten(), 2);
  const Recorder recorder;
  packer.feed(empties, recorder);
  ASSERT_EQ(recorder.chunks().size(), 1U);
  EXPECT_TRUE(recorder.chunks()[0].is_update_step);
  EXPECT_EQ(recorder.chunks()[0].ids, std::vector<std::int32_t>(20, 0));
}

TEST(SequencePacker, WrongItemsAndOptionsAreRefused) {
  const auto owned = items_of_lengths({3, 11});
  const auto items = test::views(owned);
  SequencePacker packer(two_rows_of_ten(), 4);
  const Recorder recorder;
  EXPECT_EQ(test::thrown_text<Error>([&] { packer.feed(items, recorder); }),
            "packing::SequencePacker::feed: items[1].length = 11: must not exceed options.budget "
            "(10)");
  EXPECT_EQ(packer.received(), 0) << "nothing of the list was kept";
  EXPECT_EQ(test::thrown_text<Error>([] { SequencePacker(two_rows_of_ten(), 0); }),
            "packing::SequencePacker: items_per_update = 0: must be >= 1");
  EXPECT_EQ(test::thrown_text<Error>([] { SequencePacker({}, 1); }),
            "packing::SequencePacker: options.budget = 0: must be in [1, 2^31 - 1]");
  EXPECT_EQ(packer.items_per_update(), 4);
  EXPECT_EQ(packer.options().pack_size, 2);

  // A field that one of a chunk's items lacks: named by its index in the update, nothing handed out.
  auto mixed = items_of_lengths({3, 4});
  mixed[0].per_token[PerTokenField::old_values] = test::OwnedRollout::Values{{1.0F}, true};
  const auto mixed_items = test::views(mixed);
  SequencePacker two(two_rows_of_ten(), 2);
  EXPECT_EQ(test::thrown_text<Error>([&] { two.feed(mixed_items, recorder); }),
            "packing::SequencePacker::feed: items[1].old_values = null: must be given for every "
            "item of a chunk that has tokens, or for none");
  EXPECT_EQ(two.kept(), 2);
  EXPECT_TRUE(recorder.chunks().empty());
}

}  // namespace
}  // namespace heddle::packing

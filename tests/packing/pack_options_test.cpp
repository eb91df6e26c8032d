#include "heddle/packing/pack_options.hpp"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

// Mutants that must fail here: an unknown position accepted (33); pad_align <= 0 accepted (34); the check
// of its multiple removed (35) or loosened to pad_align >= a (36); a check applied to end (37); the shift of
// another position; pad_align read from segment_align_multiple (30); a limit that accepts 0.

namespace heddle::packing {
namespace {

std::string refusal(const PackOptions& options) {
  return test::thrown_text<Error>([&] { validate("packing::pack", options); });
}

const std::string accepted = "nothing was thrown";

TEST(PackOptions, DefaultsAreThoseOfTheRecipe) {
  const PackOptions options{.budget = 65536};
  EXPECT_EQ(options.pad_position, PadPosition::end);
  EXPECT_EQ(options.pad_align, 4096);
  EXPECT_EQ(options.segment_align_multiple, 64);
  EXPECT_EQ(options.segment_limit(), 65536);
  EXPECT_EQ(options.num_segments(), 65537);
  EXPECT_EQ((PackOptions{.budget = 8, .max_segments = 3}).num_segments(), 4);
  EXPECT_EQ(refusal(options), accepted);
}

TEST(PackOptions, SizesMustBePositive) {
  const PackOptions good{.budget = 64};
  for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-5}, std::int64_t{1} << 31}) {
    const std::string rule = " = " + std::to_string(bad) + ": must be in [1, 2^31 - 1]";
    PackOptions options = good;
    options.budget = bad;
    EXPECT_EQ(refusal(options), "packing::pack: options.budget" + rule);
    options = good;
    options.pack_size = bad;
    EXPECT_EQ(refusal(options), "packing::pack: options.pack_size" + rule);
    options = good;
    options.segment_align_multiple = bad;
    EXPECT_EQ(refusal(options), "packing::pack: options.segment_align_multiple" + rule);
    options = good;
    options.max_segments = bad;
    EXPECT_EQ(refusal(options), "packing::pack: options.max_segments" + rule);
    options = good;
    options.max_loss_tokens = bad;
    EXPECT_EQ(refusal(options), "packing::pack: options.max_loss_tokens" + rule);
  }
}

TEST(PackOptions, UnknownEnumsAreRefused) {
  PackOptions options{.budget = 64};
  options.pad_position = static_cast<PadPosition>(7);
  EXPECT_EQ(refusal(options),
            "packing::pack: options.pad_position = 7: must be end, start or auto");
  EXPECT_EQ(test::thrown_text<Error>([&] { static_cast<void>(pad_shift({}, options)); }),
            "packing::pad_shift: options.pad_position = 7: must be end, start or auto");
  options.pad_position = PadPosition::end;
  options.filling = static_cast<RowFilling>(2);
  EXPECT_EQ(refusal(options), "packing::pack: options.filling = 2: must be packed or padded");
}

TEST(PackOptions, EndNeverReadsPadAlign) {
  for (const std::int64_t align :
       {std::int64_t{0}, std::int64_t{-5}, std::int64_t{1}, std::int64_t{96}, std::int64_t{4096},
        std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::min()}) {
    EXPECT_EQ(refusal({.budget = 1024, .pad_align = align}), accepted) << align;
    EXPECT_EQ(refusal({.budget = 1024, .segment_align_multiple = 48, .pad_align = align}),
              accepted);
  }
}

TEST(PackOptions, StartAndAutoNeedAPositiveMultipleOfTheSegmentAlignment) {
  for (const PadPosition position : {PadPosition::start, PadPosition::auto_}) {
    const auto with = [&](std::int64_t align, std::int64_t segment_align) {
      return refusal({.budget = 65536,
                      .segment_align_multiple = segment_align,
                      .pad_position = position,
                      .pad_align = align});
    };
    EXPECT_EQ(with(96, 128),
              "packing::pack: options.pad_align = 96: must be a positive multiple of "
              "segment_align_multiple (128)");
    EXPECT_EQ(with(4096, 48),
              "packing::pack: options.pad_align = 4096: must be a positive multiple of "
              "segment_align_multiple (48)");
    EXPECT_EQ(with(192, 128),
              "packing::pack: options.pad_align = 192: must be a positive multiple "
              "of segment_align_multiple (128)")
        << "not below, but no multiple";
    EXPECT_NE(with(0, 64), accepted);
    EXPECT_NE(with(-64, 64), accepted);
    EXPECT_EQ(with(4096, 64), accepted);
    EXPECT_EQ(with(128, 128), accepted);
    EXPECT_EQ(with(3, 1), accepted);
    EXPECT_EQ(with(65536, 64), accepted) << "rows simply cannot move";
    EXPECT_EQ(with(std::int64_t{1} << 40, 64), accepted);
  }
}

TEST(PackOptions, AutoNeedsShardsThatTheRowCanHave) {
  PackOptions options{.budget = 64,
                      .segment_align_multiple = 4,
                      .pad_position = PadPosition::auto_,
                      .pad_align = 8};
  EXPECT_EQ(refusal(options), accepted);
  options.attention.context = 3;
  EXPECT_NE(refusal(options).find("must be a multiple of 2 * context (6)"), std::string::npos);
  options.attention.context = 2;
  options.attention.forward.query = 0;
  EXPECT_EQ(refusal(options), "packing::pack: options.attention.forward.query = 0: must be >= 1");
  options.pad_position = PadPosition::start;
  EXPECT_EQ(refusal(options), accepted) << "start does not look at the shards";
}

TEST(PackOptions, PadShiftIsThatOfThePosition) {
  const std::vector<Segment> segments{{.start = 0, .len = 60948}};
  const PlacedRow row{.segments = segments, .tokens = 65536};
  PackOptions options{.budget = 65536};
  options.attention.context = 4;
  EXPECT_EQ(pad_shift(row, options), 0);
  options.pad_position = PadPosition::start;
  options.pad_align = 1024;
  EXPECT_EQ(pad_shift(row, options), 4096);
  options.pad_align = 1536;
  EXPECT_EQ(pad_shift(row, options), 3072);
  options.pad_position = PadPosition::auto_;
  options.pad_align = 4096;
  EXPECT_EQ(pad_shift(row, options), 4096);
  options.attention.context = 1;
  EXPECT_EQ(pad_shift(row, options), 0);
}

}  // namespace
}  // namespace heddle::packing

#include "support/pad_align.hpp"

#include <cstdint>
#include <optional>
#include <string>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

// Mutants that must fail here: 4096 in a row of 4096; an eighth that is no multiple of the segments'
// alignment, or 0; a request without effect accepted; one refused that says what holds anyway; an alignment
// as long as the row.

namespace heddle::examples {
namespace {

using packing::PadPosition;

PadRequest request(std::int64_t budget, std::int64_t segment_align,
                   PadPosition position = PadPosition::end,
                   std::optional<std::int64_t> pad_align = std::nullopt) {
  return {.budget = budget,
          .segment_align = segment_align,
          .position = position,
          .pad_align = pad_align};
}

std::string refusal(const PadRequest& wrong) {
  return test::thrown_text<UsageError>([&] { static_cast<void>(checked_pad_align(wrong)); });
}

TEST(PadAlign, DefaultIsTheUsualOneWhereItFitsElseAnEighth) {
  EXPECT_EQ(default_pad_align(request(65536, 128)), 4096);
  EXPECT_EQ(default_pad_align(request(4097, 16)), 4096);
  EXPECT_EQ(default_pad_align(request(4096, 16)), 512);
  EXPECT_EQ(default_pad_align(request(2048, 16)), 256);
  EXPECT_EQ(default_pad_align(request(1000, 48)), 96) << "a multiple, not above an eighth (125)";
  EXPECT_EQ(default_pad_align(request(100, 48)), 48) << "at least one";
  EXPECT_EQ(default_pad_align(request(1, 1)), 1);
}

TEST(PadAlign, WhatIsAskedForHolds) {
  for (const PadPosition position : {PadPosition::start, PadPosition::auto_}) {
    EXPECT_EQ(checked_pad_align(request(2048, 16, position)), 256);
    EXPECT_EQ(checked_pad_align(request(2048, 16, position, 48)), 48);
    EXPECT_EQ(checked_pad_align(request(2048, 16, position, 2032)), 2032);
  }
  EXPECT_EQ(checked_pad_align(request(2048, 16)), 256);
}

TEST(PadAlign, AnAlignmentWithoutEffectIsRefused) {
  EXPECT_EQ(refusal(request(65536, 16, PadPosition::end, 8192)),
            "--pad-align = 8192: has no effect with --pad-position=end");
  EXPECT_EQ(checked_pad_align(request(2048, 16, PadPosition::end, 4096)), 4096)
      << "the usual one may be said";
}

TEST(PadAlign, MustBeAMultipleThatARowCanMoveBy) {
  for (const std::int64_t wrong : {0, -16, 8, 40}) {
    EXPECT_EQ(refusal(request(2048, 16, PadPosition::start, wrong)),
              "--pad-align = " + std::to_string(wrong) +
                  ": must be a positive multiple of --segment-align (16)");
  }
  EXPECT_EQ(
      refusal(request(2048, 16, PadPosition::auto_, 2048)),
      "--pad-align = 2048: must be below --budget (2048) with --pad-position=auto, no row could "
      "move");
  EXPECT_EQ(refusal(request(16, 16, PadPosition::start)),
            "--pad-align = 16: must be below --budget (16) with --pad-position=start, no row could "
            "move")
      << "the default too";
}

}  // namespace
}  // namespace heddle::examples

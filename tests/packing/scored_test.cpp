#include "heddle/packing/scored.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: the scored mask missing (48), or wrapped round at token 0; the denominator
// taken from the completion mask (49); the mask multiplied instead of selected; positions ignored.

namespace heddle::packing {
namespace {

// Row A of the specification under start: documents of 5, 3 and 1 tokens at 8, 16 and 20.
const std::vector<std::int32_t> ids{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1,
                                    1, 0, 0, 0, 2, 2, 2, 0, 3, 0, 0, 0};
const std::vector<std::int32_t> positions{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3,
                                          4, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0};

TEST(Scored, RowAOfTheSpecification) {
  std::vector<std::uint8_t> found(24, 7);
  scored(ids, positions, found);
  std::vector<std::uint8_t> expected(24, 0);
  for (const std::size_t t : {9U, 10U, 11U, 12U, 17U, 18U}) {
    expected[t] = 1;
  }
  EXPECT_EQ(found, expected);
}

TEST(Scored, EffectiveMaskOfRowASumsToFourNotFive) {
  std::vector<float> mask(24, 0);
  for (const std::size_t t : {10U, 12U, 16U, 17U, 18U}) {
    mask[t] = 1;
  }
  std::vector<float> effective(24, test::poison<float>());
  effective_mask(ids, positions, mask, effective);
  std::vector<float> expected(24, 0);
  for (const std::size_t t : {10U, 12U, 17U, 18U}) {
    expected[t] = 1;
  }
  EXPECT_EQ(effective, expected);
  EXPECT_EQ(std::accumulate(effective.begin(), effective.end(), 0.0F), 4.0F);
}

TEST(Scored, UnscoredTokensAreSelectedNotMultiplied) {
  std::vector<float> mask(24, std::numeric_limits<float>::quiet_NaN());
  mask[9] = 0.25F;
  effective_mask(ids, positions, mask, mask);  // in place
  EXPECT_EQ(mask[9], 0.25F);
  EXPECT_EQ(mask[8], 0.0F) << "first of its document";
  EXPECT_EQ(mask[0], 0.0F) << "padding";
  EXPECT_TRUE(std::isnan(mask[10])) << "a scored token's mask is the caller's";
}

TEST(Scored, PositionsBreakDocumentsThatShareAnId) {
  std::vector<std::uint8_t> found(4, 7);
  scored(std::vector<std::int32_t>{1, 1, 1, 1}, std::vector<std::int32_t>{0, 1, 0, 1}, found);
  EXPECT_EQ(found, (std::vector<std::uint8_t>{0, 1, 0, 1}));
}

TEST(Scored, NoTokensAndWrongLengths) {
  scored({}, {}, {});
  effective_mask({}, {}, {}, {});
  // Sizes that the compiler does not see through: it would warn of what the refusal prevents.
  const std::size_t size = ids.size() / 8;
  const std::vector<std::int32_t> three(size, 1);
  const std::vector<std::int32_t> two_ids(size - 1);
  std::vector<std::uint8_t> out(size - 1);
  std::vector<float> two(size - 1);
  const auto text = [](auto action) { return test::thrown_text<Error>(action); };
  EXPECT_EQ(text([&] { scored(three, two_ids, out); }),
            "packing::scored: segment_positions.size = 2: must equal segment_ids.size (3)");
  EXPECT_EQ(text([&] { scored(three, three, out); }),
            "packing::scored: scored_tokens.size = 2: must equal segment_ids.size (3)");
  EXPECT_EQ(text([&] { effective_mask(three, three, two, two); }),
            "packing::effective_mask: completion_mask.size = 2: must equal segment_ids.size (3)");
  EXPECT_EQ(text([&] { effective_mask(three, two_ids, two, two); }),
            "packing::effective_mask: segment_positions.size = 2: must equal segment_ids.size (3)");
  EXPECT_EQ(text([&] { effective_mask(three, three, std::vector<float>(size), two); }),
            "packing::effective_mask: effective.size = 2: must equal segment_ids.size (3)");
}

TEST(Scored, NegativeIdsAreRefusedBeforeAnythingIsWritten) {
  const std::vector<std::int32_t> negative{1, -2};
  const std::vector<std::int32_t> counted{0, 1};
  std::vector<std::uint8_t> out(2, 7);
  const std::vector<float> mask(2, 1.0F);
  std::vector<float> effective(2, 7.0F);
  EXPECT_EQ(test::thrown_text<Error>([&] { scored(negative, counted, out); }),
            "packing::scored: segment_ids[1] = -2: must be >= 0");
  EXPECT_EQ(test::thrown_text<Error>([&] { effective_mask(negative, counted, mask, effective); }),
            "packing::effective_mask: segment_ids[1] = -2: must be >= 0");
  EXPECT_EQ(out, (std::vector<std::uint8_t>{7, 7}));
  EXPECT_EQ(effective, (std::vector<float>{7, 7}));
}

}  // namespace
}  // namespace heddle::packing

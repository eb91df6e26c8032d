#include "heddle/core/error.hpp"

#include <cstdint>
#include <string>

#include <gtest/gtest.h>

namespace heddle {
namespace {

enum class Colour { red, green };

TEST(Error, NamesWhereArgumentValueAndRule) {
  try {
    fail("gdn::forward", element_name("segment_ids", 1732), -3, "must be >= 0");
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "gdn::forward: segment_ids[1732] = -3: must be >= 0");
    EXPECT_EQ(error.where(), "gdn::forward");
    EXPECT_EQ(error.argument(), "segment_ids[1732]");
    EXPECT_EQ(error.value(), "-3");
    EXPECT_EQ(error.rule(), "must be >= 0");
  }
}

TEST(Error, TextOfEachKindOfValue) {
  EXPECT_EQ(error_text(std::int64_t{-5}), "-5");
  EXPECT_EQ(error_text(std::uint8_t{200}), "200");
  EXPECT_EQ(error_text(0.1), "0.1");
  EXPECT_EQ(error_text(0.1F), "0.1");
  EXPECT_EQ(error_text(true), "true");
  EXPECT_EQ(error_text(Colour::green), "1");
  EXPECT_EQ(error_text("START"), "START");
  EXPECT_EQ(error_text(std::string("end")), "end");
  EXPECT_EQ(error_text(nullptr), "null");
}

TEST(Error, NamesOfElementsAndMembers) {
  EXPECT_EQ(element_name("items", 3), "items[3]");
  EXPECT_EQ(member_name("logits", "rows"), "logits.rows");
}

TEST(Error, RequirePassesWhatHolds) {
  EXPECT_NO_THROW(require(true, "a", "b", 1, "c"));
  EXPECT_THROW(require(false, "a", "b", 1, "c"), Error);
}

TEST(Error, RequireEqualNamesTheExpectedExtent) {
  EXPECT_NO_THROW(require_equal("head::stats", "logits.cols", std::uint64_t{8}, "dims.vocab", 8));
  try {
    require_equal("head::stats", "logits.cols", 1000, "dims.vocab", std::int64_t{1024});
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "head::stats: logits.cols = 1000: must equal dims.vocab (1024)");
  }
  // -1 and 2^64 - 1 share their bits and are not equal.
  EXPECT_THROW(require_equal("a", "b", -1, "c", ~std::uint64_t{0}), Error);
}

}  // namespace
}  // namespace heddle

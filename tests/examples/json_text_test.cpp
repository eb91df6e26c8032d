#include "support/json_text.hpp"

#include <string>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"
#include "support/usage_error.hpp"

// Mutants that must fail here: a member twice accepted, or refused in two objects; the order lost; what follows a zero byte passed over.

namespace heddle::examples {
namespace {

std::string refusal(const std::string& text) {
  return test::thrown_text<UsageError>([&] { static_cast<void>(parse_json(text, "f")); });
}

TEST(JsonText, KeepsTheOrderOfMembers) {
  EXPECT_EQ(json_line(parse_json(R"({"b":1,"a":[{"d":2,"c":3}]})", "f")),
            R"({"b":1,"a":[{"d":2,"c":3}]})");
  EXPECT_EQ(parse_sorted_json(R"({"b":1,"a":2})", "f").dump(), R"({"a":2,"b":1})");
}

TEST(JsonText, AMemberMayNotAppearTwiceInOneObject) {
  EXPECT_EQ(refusal(R"({"a":{"a":1},"b":{"a":2}})"), "nothing was thrown");
  EXPECT_EQ(refusal(R"([{"a":1},{"a":1}])"), "nothing was thrown");
  EXPECT_EQ(refusal(R"([{"a":1,"b":{"c":1},"a":2}])"), "f: member \"a\" appears twice");
  EXPECT_EQ(refusal(R"({"a":1,"\u0061":2})"), "f: member \"a\" appears twice");
}

TEST(JsonText, NamesWhatPythonWritesAndJsonLacks) {
  EXPECT_EQ(refusal("NaN"), "f: is not JSON: NaN is no JSON number");
  EXPECT_EQ(refusal("[1, Infinity]"), "f: is not JSON: Infinity is no JSON number");
  EXPECT_EQ(refusal("[1, -Infinity]"), "f: is not JSON: Infinity is no JSON number");
  EXPECT_EQ(refusal(R"(["NaN", x])").find("NaN is no"), std::string::npos);
}

TEST(JsonText, SaysWhereTheTextIsBroken) {
  EXPECT_EQ(refusal("[1,]"),
            "f: is not JSON: column 4: syntax error while parsing value - unexpected ']'; expected "
            "'[', '{', or a literal");
  EXPECT_EQ(refusal("[\n1,]").substr(0, 34), "f: is not JSON: line 2, column 3: ");
  EXPECT_EQ(refusal(std::string("{}\0 more", 8)), "f: is not JSON: a zero byte at offset 2");
}

TEST(JsonText, LongValuesAreCutBetweenCharacters) {
  std::string euros;
  for (int i = 0; i < 100; ++i) {
    euros += "\xE2\x82\xAC";
  }
  const std::string text = shown(Json("a" + euros));
  EXPECT_EQ(text.size(), 200U + 3U);
  EXPECT_EQ(text.substr(197), "\xE2\x82\xAC...");
}

}  // namespace
}  // namespace heddle::examples

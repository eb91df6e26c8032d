#include "heddle/packing/rollout.hpp"

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "packing/owned_rollout.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: a field's name swapped with its neighbour's; an unknown field accepted; the
// completion's length taken from a mask's sum (P-1); [n] sliced from the front; one mask of two ignored;
// completion_mask winning over the product; routing of n - 2 tokens, or of -1, accepted; the scalar form
// checked for a length; a number of routed ids that overflows.

namespace heddle::packing {
namespace {

using Floats = std::span<const float>;

std::string refusal(const Rollout& item, std::int64_t budget = 64) {
  return test::thrown_text<Error>([&] { validate("pack", 3, item, budget); });
}

TEST(Rollout, FieldsAreAClosedSetReadBackByName) {
  const std::vector<std::string> names{
      "ref_per_token_logps", "old_per_token_logps",     "returns", "old_values",
      "sampler_is_weights",  "rollout_per_token_logps", "overlong"};
  ASSERT_EQ(per_token_fields.size(), names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(name(per_token_fields[i]), names[i]);
    EXPECT_EQ(per_token_field(names[i]), per_token_fields[i]);
  }
  EXPECT_EQ(name(PerTokenField::old_values), "old_values");
  EXPECT_EQ(name(PerTokenField::overlong), "overlong");
  EXPECT_EQ(test::thrown_text<Error>([] { static_cast<void>(per_token_field("rewards")); }),
            "packing::per_token_field: name = rewards: must be one of ref_per_token_logps, "
            "old_per_token_logps, returns, old_values, sampler_is_weights, "
            "rollout_per_token_logps, overlong");
}

TEST(Rollout, LengthsAreThoseOfTheIdArrays) {
  test::OwnedRollout item = test::plain_item(2, 3);
  item.completion_mask = std::vector<float>{1, 0, 0};  // a sum would say one token
  EXPECT_EQ(item.view().prompt_length(), 2);
  EXPECT_EQ(item.view().completion_length(), 3);
  EXPECT_EQ(item.view().length(), 5);
  EXPECT_EQ(refusal(item.view()), "nothing was thrown");
}

TEST(Rollout, ValuesTakeThreeForms) {
  const std::vector<float> whole{9, 8, 7, 6, 5};
  EXPECT_FALSE(TokenValues().is_given());
  EXPECT_TRUE(TokenValues(0.5F).is_scalar());
  EXPECT_EQ(TokenValues(0.5F).scalar(), 0.5F);
  const TokenValues values{Floats(whole)};
  EXPECT_TRUE(values.is_given());
  EXPECT_FALSE(values.is_scalar());
  EXPECT_EQ(values.completion(3).data(), whole.data() + 2)
      << "the prompt's are skipped, not copied";
  EXPECT_EQ(values.completion(5).size(), 5U);
  EXPECT_TRUE(TokenValues(Floats()).is_given()) << "an empty completion's values are given";
}

TEST(Rollout, CompletionMaskByTheRule) {
  const test::OwnedRollout plain = test::plain_item(1, 3);
  const auto mask_of = [](const test::OwnedRollout& item) {
    std::vector<float> mask(item.completion_ids.size(), -1.0F);
    write_completion_mask(item.view(), mask);
    return mask;
  };
  using Mask = std::vector<float>;
  test::OwnedRollout item = plain;
  EXPECT_EQ(mask_of(item), (Mask{1, 1, 1}));
  item.action_mask = Mask{9, 1, 0, 1};  // [n]: the prompt's 9 is skipped
  EXPECT_EQ(mask_of(item), (Mask{1, 0, 1}));
  item.loss_mask = Mask{0, 1, 1};  // [c]
  EXPECT_EQ(mask_of(item), (Mask{0, 0, 1}));
  item.completion_mask = Mask{1, 1, 0};
  EXPECT_EQ(mask_of(item), (Mask{0, 0, 1})) << "the product stands where both are given";
  item.action_mask.reset();
  EXPECT_EQ(mask_of(item), (Mask{1, 1, 0}));
  item.completion_mask.reset();
  EXPECT_EQ(mask_of(item), (Mask{0, 1, 1}));
}

TEST(Rollout, LossTokensAreThoseAboveZero) {
  test::OwnedRollout item = test::plain_item(4, 3);
  EXPECT_EQ(loss_token_count(item.view()), 3);
  item.completion_mask = std::vector<float>{0.25F, 0, -1};
  EXPECT_EQ(loss_token_count(item.view()), 1);
  EXPECT_EQ(loss_token_count(Rollout{}), 0);
}

TEST(Rollout, ArraysThatFitAreAccepted) {
  for (const std::int64_t prompt : {0, 1, 4}) {
    for (const std::int64_t completion : {0, 1, 5}) {
      test::OwnedRollout item = test::plain_item(prompt, completion);
      const auto c = static_cast<std::size_t>(completion);
      const auto n = static_cast<std::size_t>(prompt + completion);
      item.completion_mask = std::vector<float>(c, 1.0F);
      item.action_mask = std::vector<float>(n, 1.0F);
      item.loss_mask = std::vector<float>(c, 1.0F);
      item.advantages = test::OwnedRollout::Values{std::vector<float>(n, 1.0F)};
      item.per_token[PerTokenField::returns] =
          test::OwnedRollout::Values{std::vector<float>(c, 1.0F)};
      item.per_token[PerTokenField::overlong] = test::OwnedRollout::Values{{0.5F}, true};
      item.layers = 2;
      item.top_k = 3;
      for (const std::int64_t tokens : {prompt + completion, prompt + completion - 1}) {
        if (tokens >= 0) {
          item.routed_tokens = tokens;
          item.routed.assign(static_cast<std::size_t>(tokens * 6), 1);
          EXPECT_EQ(refusal(item.view()), "nothing was thrown") << prompt << " " << completion;
        }
      }
    }
  }
}

TEST(Rollout, ItemsLongerThanARowAreRefusedNotCut) {
  const test::OwnedRollout item = test::plain_item(3, 4);
  EXPECT_EQ(refusal(item.view(), 7), "nothing was thrown");
  EXPECT_EQ(refusal(item.view(), 6),
            "pack: items[3].length = 7: must not exceed options.budget (6)");
}

TEST(Rollout, WrongLengthsAreRefusedByName) {
  const std::vector<float> four(4, 1.0F);
  const test::OwnedRollout item = test::plain_item(2, 3);  // c = 3, n = 5
  const std::string both = ".size = 4: must be the completion's length (3) or the item's (5)";
  Rollout broken = item.view();
  broken.completion_mask = Floats(four);
  EXPECT_EQ(refusal(broken),
            "pack: items[3].completion_mask.size = 4: must be the completion's length (3)");
  const std::vector<float> five(5, 1.0F);
  broken.completion_mask = Floats(five);
  EXPECT_EQ(refusal(broken),
            "pack: items[3].completion_mask.size = 5: must be the completion's length (3)");
  broken = item.view();
  broken.action_mask = Floats(four);
  EXPECT_EQ(refusal(broken), "pack: items[3].action_mask" + both);
  broken = item.view();
  broken.loss_mask = Floats(four);
  EXPECT_EQ(refusal(broken), "pack: items[3].loss_mask" + both);
  broken = item.view();
  broken.advantages = Floats(four);
  EXPECT_EQ(refusal(broken), "pack: items[3].advantages" + both);
  broken.advantages = Floats();
  EXPECT_EQ(refusal(broken),
            "pack: items[3].advantages.size = 0: must be the completion's length (3) or the item's "
            "(5)");
  for (const PerTokenField field : per_token_fields) {
    broken = item.view();
    broken.per_token[field] = Floats(four);
    EXPECT_EQ(refusal(broken), "pack: items[3]." + std::string(name(field)) + both);
  }
}

TEST(Rollout, WrongRoutingIsRefusedByName) {
  const test::OwnedRollout item = test::plain_item(2, 3);
  const std::vector<std::int16_t> ids(64, 0);
  const auto routing = [&](const RoutedExperts& routed) {
    Rollout broken = item.view();
    broken.routed_experts = routed;
    return refusal(broken);
  };
  const auto span = [&](std::size_t count) { return std::span(ids).first(count); };
  EXPECT_EQ(routing({.ids = span(10), .tokens = 5, .layers = 0, .top_k = 2}),
            "pack: items[3].routed_experts.layers = 0: must be >= 1");
  EXPECT_EQ(routing({.ids = span(10), .tokens = 5, .layers = 1, .top_k = 0}),
            "pack: items[3].routed_experts.top_k = 0: must be >= 1");
  for (const std::int64_t tokens : {3, 6, -1}) {
    EXPECT_EQ(routing({.ids = span(0), .tokens = tokens, .layers = 1, .top_k = 2}),
              "pack: items[3].routed_experts.tokens = " + std::to_string(tokens) +
                  ": must be the item's length (5) or one less, and >= 0");
  }
  EXPECT_EQ(routing({.ids = span(9), .tokens = 5, .layers = 1, .top_k = 2}),
            "pack: items[3].routed_experts.ids.size = 9: must equal tokens * layers * top_k (10)");
  // A product of 2^62 and 5 would wrap round to 2^62.
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(
      routing({.ids = span(9), .tokens = 5, .layers = most, .top_k = most}),
      "pack: items[3].routed_experts.ids.size = 9: must equal tokens * layers * top_k, which are "
      "beyond I64");
  Rollout empty;
  empty.routed_experts = RoutedExperts{.ids = {}, .tokens = -1, .layers = 1, .top_k = 1};
  EXPECT_EQ(refusal(empty),
            "pack: items[3].routed_experts.tokens = -1: must be the item's length (0) or one less, "
            "and >= 0");
}

}  // namespace
}  // namespace heddle::packing

// Mutants: a group taken twice in one step; a group cut; a step that ends one rollout early or late;
// the cycle starting over at 0 each step; groups told apart by neighbourhood instead of name; groups
// "1" and 1 merged; advantages with divisor n; a group of one not 0; a mixed group accepted.
#include "heddle-train/step_plan.hpp"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/rollout_file.hpp"
#include "support/thrown_text.hpp"
#include "support/usage_error.hpp"

namespace heddle::train {
namespace {

using examples::RolloutRecord;
using examples::UsageError;
using Indices = std::vector<std::size_t>;

std::vector<RolloutRecord> parse(const std::vector<std::string>& members) {
  std::string text;
  for (const std::string& each : members) {
    text += R"({"prompt": "p", "completion": "cd", )" + each + "}\n";
  }
  return examples::parse_rollouts(text, "r");
}

std::string with_group(const std::string& group, const std::string& reward = "1") {
  return R"("reward": )" + reward + R"(, "group": )" + group;
}

TEST(HeddleTrainStepPlan, TakesWholeGroupsRoundAndRound) {
  // Groups of 2, 3, 1 and 2 rollouts; the first is not in one piece.
  const std::vector<RolloutRecord> records =
      parse({with_group("0"), with_group("7"), with_group("7"), with_group("0"), with_group("7"),
             with_group("\"x\""), with_group("3"), with_group("3")});
  StepPlan plan(records, 4);
  EXPECT_EQ(plan.next(), (Indices{0, 3}));        // the next group would make 5
  EXPECT_EQ(plan.next(), (Indices{1, 2, 4, 5}));  // exactly 4
  EXPECT_EQ(plan.next(), (Indices{6, 7, 0, 3}));  // round the end
  EXPECT_EQ(plan.next(), (Indices{1, 2, 4, 5}));
}

TEST(HeddleTrainStepPlan, TakesOneGroupAtLeastAndNoneTwice) {
  const std::vector<RolloutRecord> records =
      parse({with_group("1"), with_group("1"), with_group("1"), with_group("2")});
  StepPlan small(records, 1);
  EXPECT_EQ(small.next(), (Indices{0, 1, 2}));
  EXPECT_EQ(small.next(), (Indices{3}));
  StepPlan large(records, 100);
  EXPECT_EQ(large.next(), (Indices{0, 1, 2, 3}));
  EXPECT_EQ(large.next(), (Indices{0, 1, 2, 3}));
}

TEST(HeddleTrainStepPlan, ARolloutWithoutAGroupIsOneOfItsOwn) {
  const std::vector<RolloutRecord> records =
      parse({R"("advantages": 1)", R"("advantages": 2)", with_group("1"), with_group("\"1\"")});
  EXPECT_EQ(StepPlan(records, 8).groups(), (std::vector<Indices>{{0}, {1}, {2}, {3}}));
}

std::vector<double> advantages(const std::vector<RolloutRecord>& records) {
  return group_advantages(records, StepPlan(records, 1).groups(), "r");
}

TEST(HeddleTrainStepPlan, AdvantagesAreRelativeToTheGroup) {
  const std::vector<double> found = advantages(parse(
      {with_group("1", "1"), with_group("2", "5"), with_group("1", "0"), with_group("1", "0.5"),
       with_group("3", "2"), with_group("3", "2"), R"("advantages": 9)"}));
  // Rewards 1, 0, 0.5: mean 0.5, deviation sqrt((0.25 + 0.25 + 0) / 2) = 0.5.
  EXPECT_NEAR(found[0], 0.5 / (0.5 + 1e-6), 1e-15);
  EXPECT_EQ(found[1], 0.0);  // alone
  EXPECT_NEAR(found[2], -0.5 / (0.5 + 1e-6), 1e-15);
  EXPECT_EQ(found[3], 0.0);
  EXPECT_EQ(found[4], 0.0);  // no spread
  EXPECT_EQ(found[6], 0.0);  // carries its own
}

TEST(HeddleTrainStepPlan, NamesWhatAdvantagesMiss) {
  const auto text = [](const std::vector<std::string>& members) {
    const std::vector<RolloutRecord> records = parse(members);
    return test::thrown_text<UsageError>([&] { static_cast<void>(advantages(records)); });
  };
  EXPECT_EQ(text({with_group("1"), R"("group": 1)"}),
            "r:2: reward is missing: required where advantages are not given");
  EXPECT_EQ(text({R"("reward": 1)"}),
            "r:1: group is missing: required where advantages are not given");
  EXPECT_EQ(text({with_group("1"), with_group("2"), with_group("1") + R"(, "advantages": 0)"}),
            "r:3: advantages are given: must be as in line 1 of the same group");
  EXPECT_EQ(text({with_group("1") + R"(, "advantages": 0)", with_group("1")}),
            "r:2: advantages are missing: must be as in line 1 of the same group");
  EXPECT_EQ(text({with_group("1", "1e308"), with_group("1", "1e308"), with_group("1", "-1e308")}),
            "r:1: reward = 1e+308: the rewards of its group are too far apart for an advantage");
}

TEST(HeddleTrainStepPlan, RefusesWhatNoStepCouldUse) {
  const auto text = [](const std::vector<std::string>& members, std::int64_t budget) {
    const std::vector<RolloutRecord> records = parse(members);
    return test::thrown_text<UsageError>([&] { require_trainable(records, budget, "r"); });
  };
  EXPECT_EQ(text({with_group("1")}, 3), "nothing was thrown");
  EXPECT_EQ(text({with_group("1")}, 2),
            "r:1: the rollout has 3 tokens: must not exceed --budget (2)");
  EXPECT_EQ(text({R"("completion_mask": [1, 0.5])"}, 8),
            "r:1: completion_mask[1] = 0.5: must be 0 or 1");
  EXPECT_EQ(text({R"("loss_mask": [0, 1, 2])"}, 8), "r:1: loss_mask[2] = 2: must be 0 or 1");
  EXPECT_EQ(text({R"("action_mask": [-1, 1])"}, 8), "r:1: action_mask[0] = -1: must be 0 or 1");
  EXPECT_EQ(
      text({R"("old_per_token_logps": -1)", R"("reward": 1)"}, 8),
      "r:2: old_per_token_logps is missing: must be as in line 1, in all rollouts or in none");
  EXPECT_EQ(text({R"("reward": 1)", R"("returns": [1, 2])"}, 8),
            "r:2: returns is given: must be as in line 1, in all rollouts or in none");
}

TEST(HeddleTrainStepPlan, RoutingMustBeTheModels) {
  const std::vector<RolloutRecord> records =
      parse({R"("reward": 1)", R"("routed_experts": [[[0, 1]], [[0, 1]]])"});
  EXPECT_NO_THROW(require_routing(records, 1, 2, "r"));
  EXPECT_EQ(test::thrown_text<UsageError>([&] { require_routing(records, 2, 2, "r"); }),
            "r:2: routed_experts has 1 layers of 2 experts: the model has 2 of 2");
}

}  // namespace
}  // namespace heddle::train

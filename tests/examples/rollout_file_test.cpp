#include "support/rollout_file.hpp"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/scratch_folder.hpp"
#include "support/thrown_text.hpp"
#include "support/usage_error.hpp"

// Mutants that must fail here: bytes read as signed; bos or eos added to text; blank lines counted out
// of the line numbers; a scalar advantage read as an array of one; ids cut to 32 bits; routing flattened
// in another order; an unknown or doubled member passed over; lengths not checked.

namespace heddle::examples {
namespace {

using packing::PerTokenField;
using test::thrown_text;
using Ids = std::vector<std::int32_t>;
using Numbers = std::vector<float>;

std::string refusal(const std::string& text) {
  return thrown_text<UsageError>([&] { static_cast<void>(parse_rollouts(text, "f")); });
}

/// A line with one more member.
std::string with(const std::string& member) {
  return R"({"prompt_ids":[1,2],"completion_ids":[3,4,5],)" + member + "}";
}

TEST(RolloutFile, TextBecomesItsBytes) {
  const auto records = parse_rollouts(R"({"prompt":"Aé\n","completion":"\u20ac"})", "f");
  ASSERT_EQ(records.size(), 1U);
  EXPECT_EQ(records[0].prompt_ids, (Ids{65, 0xC3, 0xA9, 10}));
  EXPECT_EQ(records[0].completion_ids, (Ids{0xE2, 0x82, 0xAC}));
  const packing::Rollout view = records[0].view();
  EXPECT_EQ(view.prompt_length(), 4);
  EXPECT_FALSE(view.completion_mask || view.action_mask || view.loss_mask || view.routed_experts);
  EXPECT_FALSE(view.advantages.is_given());
  EXPECT_FALSE(records[0].reward || records[0].group);
}

TEST(RolloutFile, LinesKeepTheirNumbers) {
  const auto records = parse_rollouts(
      "\n  \r\n{\"prompt\":\"\",\"completion_ids\":[]}\r\n\n"
      "{\"prompt_ids\":[],\"completion\":\"x\"}",
      "f");
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0].line, 3);
  EXPECT_EQ(records[1].line, 5);
  EXPECT_EQ(refusal("\n\n{").substr(0, 4), "f:3:");
}

TEST(RolloutFile, EveryFieldArrives) {
  const auto records = parse_rollouts(
      with(R"("completion_mask":[1,0.5,true],"action_mask":[1,1,1,0,false],"loss_mask":[0,1,1],)"
           R"("advantages":-0.5,"ref_per_token_logps":[1,2,3],"old_per_token_logps":[-1,-2,-3],)"
           R"("returns":[1,2,3,4,5],"old_values":7,"sampler_is_weights":[0,0,1],)"
           R"("rollout_per_token_logps":[9,8,7],"overlong":0,)"
           R"("routed_experts":[[[1,2],[3,4],[5,6]],[[7,8],[9,10],[11,-1]],)"
           R"([[0,0],[0,0],[0,0]],[[1,1],[1,1],[1,32767]]],)"
           R"("policy_version":12,"reward":1e40,"group":"a")"),
      "f");
  const RolloutRecord& record = records[0];
  EXPECT_EQ(record.completion_mask, (Numbers{1, 0.5F, 1}));
  EXPECT_EQ(record.action_mask, (Numbers{1, 1, 1, 0, 0}));
  EXPECT_EQ(record.loss_mask, (Numbers{0, 1, 1}));
  EXPECT_EQ(record.reward, 1e40);
  EXPECT_EQ(record.group, "\"a\"");
  const packing::Rollout view = record.view();
  EXPECT_TRUE(view.advantages.is_scalar());
  EXPECT_EQ(view.advantages.scalar(), -0.5F);
  EXPECT_EQ(view.policy_version, 12);
  EXPECT_EQ(view.loss_mask->data(), record.loss_mask->data()) << "a view, not a copy";
  const auto completion = [&](PerTokenField field) {
    const auto values = view.per_token[field].completion(3);
    return Numbers(values.begin(), values.end());
  };
  EXPECT_EQ(completion(PerTokenField::ref_per_token_logps), (Numbers{1, 2, 3}));
  EXPECT_EQ(completion(PerTokenField::old_per_token_logps), (Numbers{-1, -2, -3}));
  EXPECT_EQ(completion(PerTokenField::returns), (Numbers{3, 4, 5}));
  EXPECT_EQ(view.per_token[PerTokenField::old_values].scalar(), 7.0F);
  EXPECT_EQ(completion(PerTokenField::sampler_is_weights), (Numbers{0, 0, 1}));
  EXPECT_EQ(completion(PerTokenField::rollout_per_token_logps), (Numbers{9, 8, 7}));
  EXPECT_TRUE(view.per_token[PerTokenField::overlong].is_scalar());
  ASSERT_TRUE(view.routed_experts.has_value());
  EXPECT_EQ(view.routed_experts->tokens, 4);
  EXPECT_EQ(view.routed_experts->layers, 3);
  EXPECT_EQ(view.routed_experts->top_k, 2);
  EXPECT_EQ(view.routed_experts->ids[6 + 4], 11);  // token 1, layer 2, first choice
  EXPECT_EQ(view.routed_experts->ids[23], 32767);

  EXPECT_EQ(parse_rollouts(with(R"("group":1)"), "f")[0].group, "1");
  const auto array =
      parse_rollouts(R"({"prompt":"a","completion":"b","advantages":[0.25]})", "f")[0].advantages;
  EXPECT_EQ(array.array, Numbers{0.25F}) << "an array of one is no scalar";
  EXPECT_FALSE(array.scalar.has_value());
}

TEST(RolloutFile, NullIsAbsent) {
  const auto records = parse_rollouts(
      R"({"prompt":null,"prompt_ids":[1],"completion":"a","reward":null,"old_values":null})", "f");
  EXPECT_EQ(records[0].prompt_ids, Ids{1});
  EXPECT_FALSE(records[0].reward.has_value());
  EXPECT_FALSE(records[0].view().per_token[PerTokenField::old_values].is_given());
  EXPECT_EQ(refusal(R"({"prompt":"a","completion":null})"),
            "f:1: completion or completion_ids is missing");
}

TEST(RolloutFile, RefusesWhatIsNoJsonObject) {
  EXPECT_EQ(refusal(""), "f: holds no rollout");
  EXPECT_EQ(refusal(" \n\n"), "f: holds no rollout");
  EXPECT_EQ(refusal("[]"), "f:1: must be an object");
  EXPECT_EQ(refusal(with(R"("reward":NaN)")), "f:1: is not JSON: NaN is no JSON number");
  EXPECT_EQ(refusal(with(R"("reward":-Infinity)")), "f:1: is not JSON: Infinity is no JSON number");
  EXPECT_EQ(refusal(with(R"("reward":1e999)")),
            "f:1: is not JSON: number overflow parsing '1e999'");
  EXPECT_NE(refusal("{\"prompt\":\"\xff\",\"completion\":\"\"}").find("ill-formed UTF-8"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"prompt":"\ud800","completion":""})").find("f:1: is not JSON: "),
            std::string::npos);
  EXPECT_NE(refusal(R"({"prompt":"\ud800","completion":""})").find("surrogate"), std::string::npos);
  EXPECT_EQ(refusal(with(R"("reward":1,"reward":2)")), "f:1: member \"reward\" appears twice");
  for (const std::string& text :
       {std::string("{\"a\nb\":1}"), std::string("{\"prompt\":\"\x01\"}")}) {
    EXPECT_EQ(refusal(text).find('\n'), std::string::npos) << "one line";
  }
}

TEST(RolloutFile, RefusesMembersThatContradictOrLack) {
  EXPECT_EQ(refusal(R"({"completion":"a"})"), "f:1: prompt or prompt_ids is missing");
  EXPECT_EQ(refusal(R"({"prompt":"a"})"), "f:1: completion or completion_ids is missing");
  EXPECT_EQ(refusal(R"({"prompt":"a","prompt_ids":[97],"completion":"b"})"),
            "f:1: prompt and prompt_ids are both given: must be one of the two");
  EXPECT_EQ(refusal(R"({"prompt":"a","completion":"b","completion_ids":[98]})"),
            "f:1: completion and completion_ids are both given: must be one of the two");
  EXPECT_EQ(refusal(with(R"("old_logps":[1,2,3])")),
            "f:1: unknown member \"old_logps\", must be one of prompt, prompt_ids, completion, "
            "completion_ids, completion_mask, action_mask, loss_mask, advantages, "
            "ref_per_token_logps, old_per_token_logps, returns, old_values, sampler_is_weights, "
            "rollout_per_token_logps, overlong, routed_experts, policy_version, reward, group");
}

TEST(RolloutFile, RefusesWrongTypes) {
  EXPECT_EQ(refusal(R"({"prompt":1,"completion":""})"), "f:1: prompt = 1: must be a string");
  EXPECT_EQ(refusal(R"({"prompt_ids":"a","completion":""})"),
            "f:1: prompt_ids = \"a\": must be an array of integers");
  for (const char* id :
       {"-1", "2147483648", "18446744073709551615", "1.0", "\"1\"", "null", "true", "1e300"}) {
    const std::string text =
        refusal(R"({"prompt_ids":[5,)" + std::string(id) + R"(],"completion":""})");
    EXPECT_EQ(text.substr(0, 22), "f:1: prompt_ids[1] = " + text.substr(21, 1));
    EXPECT_NE(text.find("must be an integer in [0, 2147483647]"), std::string::npos) << id;
  }
  EXPECT_EQ(refusal(with(R"("completion_mask":1)")),
            "f:1: completion_mask = 1: must be an array of numbers");
  EXPECT_EQ(refusal(with(R"("loss_mask":[1,"1",1])")),
            "f:1: loss_mask[1] = \"1\": must be a number");
  EXPECT_EQ(refusal(with(R"("advantages":"1")")),
            "f:1: advantages = \"1\": must be a number or an array of numbers");
  EXPECT_EQ(refusal(with(R"("advantages":1e39)")), "f:1: advantages = 1e+39: must fit F32");
  EXPECT_EQ(refusal(with(R"("returns":[0,0,-1e39])")), "f:1: returns[2] = -1e+39: must fit F32");
  EXPECT_EQ(refusal(with(R"("returns":[0,0,null])")), "f:1: returns[2] = null: must be a number");
  EXPECT_EQ(refusal(with(R"("reward":"1")")), "f:1: reward = \"1\": must be a number");
  EXPECT_EQ(refusal(with(R"("group":1.5)")), "f:1: group = 1.5: must be an integer or a string");
  EXPECT_EQ(refusal(with(R"("policy_version":1.5)")),
            "f:1: policy_version = 1.5: must be an integer that fits I64");
  EXPECT_EQ(refusal(with(R"("policy_version":18446744073709551615)")),
            "f:1: policy_version = 18446744073709551615: must be an integer that fits I64");
}

TEST(RolloutFile, RefusesArraysOfAnotherLength) {
  EXPECT_EQ(refusal(with(R"("completion_mask":[1,1])")),
            "f:1: completion_mask.size = 2: must be the completion's length (3)");
  EXPECT_EQ(refusal(with(R"("completion_mask":[1,1,1,1,1])")),
            "f:1: completion_mask.size = 5: must be the completion's length (3)");
  EXPECT_EQ(refusal(with(R"("action_mask":[1])")),
            "f:1: action_mask.size = 1: must be the completion's length (3) or the item's (5)");
  EXPECT_EQ(refusal(with(R"("advantages":[1,2])")),
            "f:1: advantages.size = 2: must be the completion's length (3) or the item's (5)");
  EXPECT_EQ(refusal(with(R"("overlong":[1,2,3,4])")),
            "f:1: overlong.size = 4: must be the completion's length (3) or the item's (5)");
}

TEST(RolloutFile, RefusesRoutingOfNoShape) {
  EXPECT_EQ(refusal(with(R"("routed_experts":3)")),
            "f:1: routed_experts = 3: must be arrays of one shape, [tokens][layers][top_k]");
  EXPECT_EQ(refusal(with(R"("routed_experts":[[1]])")),
            "f:1: routed_experts[0][0] = 1: must be arrays of one shape, [tokens][layers][top_k]");
  EXPECT_EQ(refusal(with(R"("routed_experts":[[]])")),
            "f:1: routed_experts[0] = []: must be arrays of one shape, [tokens][layers][top_k]");
  EXPECT_EQ(refusal(with(R"("routed_experts":[[[1]],[[1],[2]]])")),
            "f:1: routed_experts[1] = [[1],[2]]: must have 1 layers, like routed_experts[0]");
  EXPECT_EQ(refusal(with(R"("routed_experts":[[[1]],[[1,2]]])")),
            "f:1: routed_experts[1][0] = [1,2]: must have 1 experts, like routed_experts[0][0]");
  EXPECT_EQ(refusal(with(R"("routed_experts":[[[-2]]])")),
            "f:1: routed_experts[0][0][0] = -2: must be an integer in [-1, 32767]");
  EXPECT_EQ(refusal(with(R"("routed_experts":[[[32768]]])")),
            "f:1: routed_experts[0][0][0] = 32768: must be an integer in [-1, 32767]");
  EXPECT_EQ(refusal(with(R"("routed_experts":[[[1]],[[1]],[[1]]])")),
            "f:1: routed_experts.tokens = 3: must be the item's length (5) or one less, and >= 0");
  const std::string token = R"({"prompt":"","completion":"a","routed_experts":[)";
  EXPECT_EQ(
      refusal(token + "[[1,2]]]}\n{\"prompt\":\"a\",\"completion\":\"\"}\n" + token + "[[1]]]}"),
      "f:3: routed_experts has 1 layers of 1 experts: must have 1 of 2, like line 1");
  EXPECT_FALSE(parse_rollouts(token + "]}", "f")[0].routed_experts.has_value())
      << "of one token, none routed";
}

TEST(RolloutFile, RefusesIdsOutsideTheVocabulary) {
  const auto records = parse_rollouts("\n" + with(R"("reward":1)"), "f");
  require_vocabulary(records, 6, "f");
  EXPECT_EQ(thrown_text<UsageError>([&] { require_vocabulary(records, 5, "f"); }),
            "f:2: completion_ids[2] = 5: must be below the model's vocab_size (5)");
}

TEST(RolloutFile, ReadsFromAFileAndNamesIt) {
  const test::ScratchFolder scratch;
  const auto path = scratch.write("r.jsonl", with(R"("reward":0)") + "\n");
  EXPECT_EQ(read_rollouts(path).size(), 1U);
  EXPECT_EQ(views(read_rollouts(path)).size(), 1U);
  const auto broken = scratch.write("b.jsonl", with(R"("reward":0)") + "\n{}\n");
  EXPECT_EQ(thrown_text<UsageError>([&] { static_cast<void>(read_rollouts(broken)); }),
            broken.string() + ":2: prompt or prompt_ids is missing");
}

}  // namespace
}  // namespace heddle::examples

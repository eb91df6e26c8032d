// Mutants: the first token of a document without a prompt kept in the mask; masks of prompts; advantages
// one document off, or through F32; old log-probs of another row; outcome by advantage instead of
// reward; routing of layer and choice exchanged; padding counted as tokens.
#include "heddle-train/step_rows.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/rollout_file.hpp"

namespace heddle::train {
namespace {

packing::PackOptions options(std::int64_t budget) {
  packing::PackOptions pack;
  pack.budget = budget;
  pack.segment_align_multiple = 4;
  pack.pad_id = examples::pad_id;
  return pack;
}

using Ids = std::vector<std::int32_t>;
using Mask = std::vector<std::uint8_t>;

TEST(HeddleTrainStepRows, LaysRolloutsOutByHand) {
  const auto records = examples::parse_rollouts(
      R"({"prompt_ids":[1],"completion_ids":[2],"reward":0,"group":1,"old_per_token_logps":-1}
{"prompt_ids":[],"completion_ids":[5,6,7],"reward":1,"group":2,"old_per_token_logps":[-2,-3,-4]}
{"prompt_ids":[8,9],"completion_ids":[10,11,12],"completion_mask":[1,0,1],"advantages":[0.5,9,-0.25],"old_per_token_logps":[-5,-6,-7]}
)",
      "r");
  // 1/3 is no F32: what the row carries must still be it.
  const std::vector<double> advantages = {1.0 / 3.0, -2.0, 0.0};
  // The third, longest, then the second, at the next multiple of 4; the first left for a second row.
  const StepRows<double> step =
      pack_step<double>(records, std::vector<std::size_t>{0, 1, 2}, advantages, options(12));
  ASSERT_EQ(step.rows, 2);
  EXPECT_EQ(step.tokens, 12);
  EXPECT_EQ(step.real_tokens, 10);
  const std::int32_t p = examples::pad_id;
  EXPECT_EQ(step.token_ids, (Ids{8, 9, 10, 11, 12, p, p, p, 5, 6, 7, p,  //
                                 1, 2, p,  p,  p,  p, p, p, p, p, p, p}));
  EXPECT_EQ(step.segment_ids, (Ids{1, 1, 1, 1, 1, 0, 0, 0, 2, 2, 2, 0,  //
                                   1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(step.segment_positions, (Ids{0, 1, 2, 3, 4, 0, 0, 0, 0, 1, 2, 0,  //
                                         0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  // Token 8 begins a document: it has no score.
  EXPECT_EQ(step.mask, (Mask{0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0,  //
                             0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(step.counts, (loss::MaskCounts{.tokens = 5, .segments = 3}));
  EXPECT_EQ(step.advantages,
            (std::vector<double>{0, 0,         0.5, 9, -0.25, 0, 0, 0, -2, -2, -2, 0,  //
                                 0, 1.0 / 3.0, 0,   0, 0,     0, 0, 0, 0,  0,  0,  0}));
  EXPECT_EQ(step.old_logps, (std::vector<double>{0, 0,  -5, -6, -7, 0, 0, 0, -2, -3, -4, 0,  //
                                                 0, -1, 0,  0,  0,  0, 0, 0, 0,  0,  0,  0}));
  EXPECT_EQ(step.outcome[2], Outcome::none);  // no reward
  EXPECT_EQ(step.outcome[9], Outcome::rewarded);
  EXPECT_EQ(step.outcome[13], Outcome::unrewarded);
  EXPECT_TRUE(step.forced_views.empty());
  EXPECT_EQ(step.busiest_tiles, 1);
  const RowInputs second = step.inputs(1);
  EXPECT_EQ(second.tokens(), 12);
  EXPECT_EQ(second.token_ids[1], 2);
}

TEST(HeddleTrainStepRows, ChosenRolloutsAreNumberedAsInTheFile) {
  const auto records = examples::parse_rollouts(
      R"({"prompt":"a","completion":"b","reward":1,"group":1}
{"prompt":"c","completion":"d","reward":1,"group":1}
{"prompt":"e","completion":"f","reward":0,"group":1}
)",
      "r");
  const StepRows<float> step = pack_step<float>(records, std::vector<std::size_t>{2, 1},
                                                std::vector<double>{1, 2, 3}, options(4));
  ASSERT_EQ(step.rows, 2);
  EXPECT_EQ(step.token_ids[0], 'e');
  EXPECT_EQ(step.advantages[1], 3.0F);
  EXPECT_EQ(step.outcome[1], Outcome::unrewarded);
  EXPECT_EQ(step.token_ids[4], 'c');
  EXPECT_EQ(step.advantages[5], 2.0F);
  EXPECT_TRUE(step.old_logps.empty());
}

TEST(HeddleTrainStepRows, RoutingGoesToItsLayer) {
  // [tokens][layers = 2][top_k = 3], of all tokens but the last; the other rollout has none.
  const auto records = examples::parse_rollouts(
      R"({"prompt":"a","completion":"bc","advantages":1,"routed_experts":[[[1,2,3],[4,5,6]],[[7,8,9],[10,11,12]]]}
{"prompt":"a","completion":"b","advantages":1}
)",
      "r");
  const StepRows<float> step = pack_step<float>(records, std::vector<std::size_t>{0, 1},
                                                std::vector<double>{0, 0}, options(4));
  ASSERT_EQ(step.rows, 2);
  ASSERT_EQ(step.forced_views.size(), 2U);
  Ids first = {1, 2, 3, 7, 8, 9};
  Ids second = {4, 5, 6, 10, 11, 12};
  first.resize(24, -1);
  second.resize(24, -1);
  EXPECT_EQ(step.forced_experts[0], first);
  EXPECT_EQ(step.forced_experts[1], second);
  EXPECT_EQ(step.inputs(0).forced_experts[1](1, 2), 12);
  EXPECT_EQ(step.inputs(1).forced_experts[0](0, 0), -1);
}

TEST(HeddleTrainStepRows, CountsTheTilesOfLongRows) {
  std::string ids = "1";
  for (int i = 1; i < 3000; ++i) {
    ids += ",1";
  }
  const auto records = examples::parse_rollouts(
      R"({"prompt_ids":[)" + ids + R"(],"completion_ids":[1],"advantages":1})", "r");
  const StepRows<float> step =
      pack_step<float>(records, std::vector<std::size_t>{0}, std::vector<double>{0}, options(8192));
  // 3,001 tokens: three query blocks of 1,024 against the first key block of 4,096.
  EXPECT_EQ(step.busiest_tiles, 3);
}

}  // namespace
}  // namespace heddle::train

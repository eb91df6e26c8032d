#include "heddle/moe/options.hpp"

#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

// Mutants these tests are written against: a check dropped; a factor of 0 or NaN taken; experts
// that do not divide over the shards taken.

namespace heddle::moe {
namespace {

constexpr RouterDims dims{.tokens = 5, .experts = 6, .top_k = 2};
const std::string taken = "nothing was thrown";

std::string refusal(const RouterOptions& options) {
  return test::thrown_text<Error>([&] { options.validate("here", "options.router"); });
}

std::string refusal(const DispatchOptions& options) {
  return test::thrown_text<Error>([&] { options.validate("here", "options", dims); });
}

TEST(MoeRouterOptions, RefusesEachUnknownValue) {
  EXPECT_EQ(refusal(RouterOptions{}), taken);
  EXPECT_EQ(refusal(RouterOptions{.weights = TopKWeights::softmax_of_all,
                                  .padding = PaddingRouting::include,
                                  .mismatch = ReplayMismatch::measure}),
            taken);
  EXPECT_EQ(refusal(RouterOptions{.weights = static_cast<TopKWeights>(2)}),
            "here: options.router.weights = 2: must be softmax_of_chosen or softmax_of_all");
  EXPECT_EQ(refusal(RouterOptions{.padding = static_cast<PaddingRouting>(-1)}),
            "here: options.router.padding = -1: must be exclude or include");
  EXPECT_EQ(refusal(RouterOptions{.mismatch = static_cast<ReplayMismatch>(3)}),
            "here: options.router.mismatch = 3: must be skip or measure");
}

TEST(MoeDispatchOptions, RefusesEachValueOutOfRange) {
  EXPECT_EQ(refusal(DispatchOptions{}), taken);
  EXPECT_EQ(refusal(DispatchOptions{.buffer_factor = 1e300,
                                    .strategy = Strategy::all_to_all,
                                    .token_chunks = 7,
                                    .groups = 4,
                                    .shards = 3}),
            taken);
  EXPECT_EQ(refusal(DispatchOptions{.buffer_factor = 0.0}),
            "here: options.buffer_factor = 0: must be finite and > 0");
  EXPECT_EQ(refusal(DispatchOptions{.buffer_factor = -1.0}),
            "here: options.buffer_factor = -1: must be finite and > 0");
  EXPECT_EQ(refusal(DispatchOptions{.buffer_factor = std::numeric_limits<double>::quiet_NaN()}),
            "here: options.buffer_factor = nan: must be finite and > 0");
  EXPECT_EQ(refusal(DispatchOptions{.buffer_factor = std::numeric_limits<double>::infinity()}),
            "here: options.buffer_factor = inf: must be finite and > 0");
  EXPECT_EQ(refusal(DispatchOptions{.strategy = static_cast<Strategy>(7)}),
            "here: options.strategy = 7: must be ring or all_to_all");
  EXPECT_EQ(refusal(DispatchOptions{.token_chunks = 0}),
            "here: options.token_chunks = 0: must be >= 1");
  EXPECT_EQ(refusal(DispatchOptions{.groups = 0}), "here: options.groups = 0: must be >= 1");
  EXPECT_EQ(refusal(DispatchOptions{.shards = 0}), "here: options.shards = 0: must be >= 1");
  EXPECT_EQ(refusal(DispatchOptions{.shards = 4}),
            "here: options.shards = 4: must divide dims.experts (6)");
}

}  // namespace
}  // namespace heddle::moe

#include "heddle/moe/arguments.hpp"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moe/problem.hpp"
#include "support/thrown_text.hpp"

namespace heddle::moe {
namespace {

using heddle::test::thrown_text;

std::string text_of(const Options& options) {
  const Dims dims{.tokens = 2, .hidden = 3, .experts = 4, .top_k = 2, .expert_hidden = 5};
  return thrown_text<Error>([&] { detail::check_options("f", dims, options); });
}

TEST(Options, NamesWhatItRefuses) {
  EXPECT_EQ(text_of({.epilogue = static_cast<GluEpilogue>(4)}),
            "f: options.epilogue = 4: must be strict or fast");
  EXPECT_EQ(text_of({.fusion = static_cast<GluFusion>(4)}),
            "f: options.fusion = 4: must be fused or separate");
  EXPECT_EQ(text_of({.epilogue = GluEpilogue::fast, .fusion = GluFusion::separate}),
            "f: options.epilogue = 1: must be strict when fusion is separate");
  EXPECT_EQ(text_of({.router_training = static_cast<RouterTraining>(4)}),
            "f: options.router_training = 4: must be trained or frozen");
  EXPECT_EQ(text_of({.epilogue = GluEpilogue::fast}), "nothing was thrown");
}

TEST(Options, TheReferenceIsStrict) {
  auto p = test::random_problem<float>(
      {.tokens = 2, .hidden = 3, .experts = 4, .top_k = 2, .expert_hidden = 5}, 1);
  p.options.epilogue = GluEpilogue::fast;
  EXPECT_EQ(thrown_text<Error>([&] { static_cast<void>(test::run_forward(p)); }),
            "moe::reference::forward: options.epilogue = 1: must be strict in the reference tier");
}

}  // namespace
}  // namespace heddle::moe

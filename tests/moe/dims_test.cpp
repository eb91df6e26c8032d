#include "heddle/moe/dims.hpp"

#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

// Mutants these tests are written against: slots = tokens * experts; a check dropped or off by one;
// the slot limit compared after an int32 product.

namespace heddle::moe {
namespace {

constexpr RouterDims router{.tokens = 5, .experts = 4, .top_k = 2};
constexpr Dims layer{.tokens = 5, .hidden = 6, .experts = 4, .top_k = 2, .expert_hidden = 3};

template <class D, class Change>
std::string refusal(D dims, const Change& change) {
  change(dims);
  return test::thrown_text<Error>([&] { dims.validate("here"); });
}

TEST(MoeDims, SlotsAreTokensTimesChoices) {
  EXPECT_EQ(router.slots(), 10);
  EXPECT_EQ(layer.slots(), 10);
  EXPECT_EQ(layer.router().tokens, 5);
  EXPECT_EQ(layer.router().experts, 4);
  EXPECT_EQ(layer.router().top_k, 2);
  EXPECT_FALSE(layer.has_shared_expert());
}

TEST(MoeDims, TakesTheEdges) {
  const std::string taken = "nothing was thrown";
  EXPECT_EQ(refusal(router, [](RouterDims&) {}), taken);
  EXPECT_EQ(refusal(router, [](RouterDims& d) { d.tokens = 0; }), taken);
  EXPECT_EQ(refusal(router, [](RouterDims& d) { d.top_k = 4; }), taken);
  EXPECT_EQ(refusal(router, [](RouterDims& d) { d = {.tokens = 1, .experts = 1, .top_k = 1}; }),
            taken);
  EXPECT_EQ(refusal(router, [](RouterDims& d) { d.tokens = 1073741823; }), taken);
  EXPECT_EQ(refusal(layer, [](Dims& d) { d.shared_hidden = 7; }), taken);
}

TEST(MoeDims, RefusesEachExtentOutOfRange) {
  EXPECT_EQ(refusal(router, [](RouterDims& d) { d.tokens = -1; }),
            "here: dims.tokens = -1: must be >= 0");
  EXPECT_EQ(refusal(router, [](RouterDims& d) { d.experts = 0; }),
            "here: dims.experts = 0: must be >= 1");
  EXPECT_EQ(refusal(router, [](RouterDims& d) { d.experts = 2147483648; }),
            "here: dims.experts = 2147483648: must be at most 2147483647");
  EXPECT_EQ(refusal(router, [](RouterDims& d) { d.top_k = 0; }),
            "here: dims.top_k = 0: must be >= 1");
  EXPECT_EQ(refusal(router, [](RouterDims& d) { d.top_k = 5; }),
            "here: dims.top_k = 5: must be at most dims.experts (4)");
  EXPECT_EQ(refusal(router, [](RouterDims& d) { d.tokens = 1073741824; }),
            "here: dims.tokens = 1073741824: tokens * top_k must be at most 2147483647");
  EXPECT_EQ(refusal(layer, [](Dims& d) { d.tokens = -2; }), "here: dims.tokens = -2: must be >= 0");
  EXPECT_EQ(refusal(layer, [](Dims& d) { d.hidden = 0; }), "here: dims.hidden = 0: must be >= 1");
  EXPECT_EQ(refusal(layer, [](Dims& d) { d.expert_hidden = 0; }),
            "here: dims.expert_hidden = 0: must be >= 1");
  EXPECT_EQ(refusal(layer, [](Dims& d) { d.shared_hidden = -1; }),
            "here: dims.shared_hidden = -1: must be >= 0");
}

}  // namespace
}  // namespace heddle::moe

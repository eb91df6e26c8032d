// Mutants: an unknown exchange accepted; kept() that swaps states and transitions.
#include "heddle/gdn/context_options.hpp"

#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "support/thrown_text.hpp"

namespace heddle::gdn {
namespace {

TEST(GdnContextOptions, RefusesWhatIsNone) {
  const auto refusal = [](const ContextOptions& options) {
    return heddle::test::thrown_text<Error>([&] { options.validate("call"); });
  };
  EXPECT_EQ(refusal({}), "nothing was thrown");
  EXPECT_EQ(refusal({.exchange = StateExchange::gather}), "nothing was thrown");
  EXPECT_EQ(refusal({.chunks = {.chunk = 0}}), "call: options.chunk = 0: must be >= 1");
  EXPECT_EQ(refusal({.exchange = static_cast<StateExchange>(5)}),
            "call: options.exchange = 5: must be chain or gather");
}

TEST(GdnContextOptions, WhatIsKeptIsReadWhereItLies) {
  std::vector<double> numbers(40);
  const ContextResiduals<float, double> residuals{.states = {numbers.data(), 2, 3},
                                                  .transitions = {numbers.data() + 6, 2, 2},
                                                  .t_inv = {numbers.data() + 10, 1, 4}};
  const ContextResiduals<const float, const double> kept = residuals.kept();
  EXPECT_EQ(kept.states.data(), numbers.data());
  EXPECT_EQ(kept.transitions.data(), numbers.data() + 6);
  EXPECT_TRUE(kept.windows.is_null());
  EXPECT_EQ(kept.t_inv.cols(), 4);
}

}  // namespace
}  // namespace heddle::gdn

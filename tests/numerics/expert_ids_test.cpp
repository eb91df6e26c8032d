#include "heddle/numerics/expert_ids.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

// Mutants that must fail here: ids compared in their order; a token counted once a layer; the last layer
// not looked at; entries before the token left out, or only its own; a document's reach into the next, or
// a row's into the next.

namespace heddle::numerics {
namespace {

using Ids = std::vector<std::int32_t>;
using Elsewhere = std::vector<RoutedElsewhere>;
using Mask = std::vector<std::uint8_t>;

TEST(ExpertIds, TokensOfOtherSetsAreFoundOnce) {
  // Two layers of three tokens, two experts each.
  const Ids b = {0, 1, 2, 3, 4, 5,  //
                 0, 1, 2, 3, 4, 5};
  Ids c = b;
  const auto found = [&] {
    return routed_elsewhere({.layers = 2, .tokens = 3, .top_k = 2, .ids = b},
                            {.layers = 2, .tokens = 3, .top_k = 2, .ids = c});
  };
  EXPECT_EQ(found(), Elsewhere{});
  c[0] = 1;
  c[1] = 0;
  EXPECT_EQ(found(), Elsewhere{}) << "the same experts in another order";
  c[3] = 6;
  c[9] = 6;
  c[11] = 7;
  EXPECT_EQ(found(), (Elsewhere{{.token = 1, .layer = 0}, {.token = 2, .layer = 1}}));
  c[0] = 0;  // {0, 0}: as often counts too
  EXPECT_EQ(found().front(), (RoutedElsewhere{.token = 0, .layer = 0}));
}

TEST(ExpertIds, TokensRoutedNowhereOnOneSideDiffer) {
  const Ids b = {-1, -1, 0, 1};
  const Ids c = {2, 3, 0, 1};
  EXPECT_EQ(routed_elsewhere({.layers = 1, .tokens = 2, .top_k = 2, .ids = b},
                             {.layers = 1, .tokens = 2, .top_k = 2, .ids = c}),
            (Elsewhere{{.token = 0, .layer = 0}}));
  EXPECT_EQ(routed_elsewhere({}, {}), Elsewhere{});
}

TEST(ExpertIds, ReachIsTheRestOfTheDocument) {
  const Ids segments = {1, 1, 1, 2, 2, 0,  //
                        3, 3, 3, 3, 0, 0};
  const TokenLayout layout = {.tokens = 12, .row_tokens = 6, .layers = 2, .segment_ids = segments};
  const auto reached = [&](Elsewhere elsewhere) { return reached_entries(elsewhere, layout); };
  EXPECT_EQ(reached({}), Mask(12, 0));
  EXPECT_EQ(reached({{.token = 1, .layer = 0}}), (Mask{0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(reached({{.token = 6, .layer = 0}}), (Mask{0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0}));
  EXPECT_EQ(reached({{.token = 6, .layer = 1}}), (Mask{0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0}))
      << "no layer above carries it further";
  EXPECT_EQ(reached({{.token = 2, .layer = 1}, {.token = 4, .layer = 0}}),
            (Mask{0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0}));
}

TEST(ExpertIds, WithoutSegmentsARowIsADocument) {
  const TokenLayout layout = {.tokens = 6, .row_tokens = 3, .layers = 2, .segment_ids = {}};
  EXPECT_EQ(reached_entries(Elsewhere{{.token = 1, .layer = 0}}, layout), (Mask{0, 1, 1, 0, 0, 0}));
  EXPECT_EQ(reached_entries(Elsewhere{{.token = 2, .layer = 1}}, layout), (Mask{0, 0, 1, 0, 0, 0}))
      << "the next token stands in another row";
}

TEST(ExpertIds, RefusesWhatDoesNotFit) {
  const Ids ids(12);
  const ExpertIds good = {.layers = 2, .tokens = 3, .top_k = 2, .ids = ids};
  const auto refusal = [&](const ExpertIds& other) {
    return test::thrown_text<Error>([&] { static_cast<void>(routed_elsewhere(good, other)); });
  };
  EXPECT_EQ(
      refusal({.layers = 2, .tokens = 2, .top_k = 2, .ids = ids}),
      "numerics::routed_elsewhere: candidate.ids.size = 12: must equal layers * tokens * top_k "
      "(8)");
  EXPECT_EQ(refusal({.layers = 3, .tokens = 2, .top_k = 2, .ids = ids}),
            "numerics::routed_elsewhere: candidate.layers = 3: must equal baseline.layers (2)");
  EXPECT_EQ(refusal({.layers = 2, .tokens = 2, .top_k = 3, .ids = ids}),
            "numerics::routed_elsewhere: candidate.tokens = 2: must equal baseline.tokens (3)");
  EXPECT_EQ(refusal({.layers = -2, .tokens = -3, .top_k = 2, .ids = ids}),
            "numerics::routed_elsewhere: candidate.layers = -2: must be >= 0");
  const auto reach = [&](RoutedElsewhere one, const TokenLayout& layout) {
    return test::thrown_text<Error>(
        [&] { static_cast<void>(reached_entries(Elsewhere{one}, layout)); });
  };
  EXPECT_EQ(reach({.token = 6, .layer = 0}, {.tokens = 6, .row_tokens = 3, .layers = 1}),
            "numerics::reached_entries: elsewhere[0].token = 6: must be in [0, tokens)");
  EXPECT_EQ(reach({.token = 5, .layer = 1}, {.tokens = 6, .row_tokens = 3, .layers = 1}),
            "numerics::reached_entries: elsewhere[0].layer = 1: must be in [0, layers)");
  EXPECT_EQ(reach({}, {.tokens = 6, .row_tokens = 4, .layers = 1}),
            "numerics::reached_entries: layout.row_tokens = 4: must be >= 1 and divide tokens (6)");
  EXPECT_EQ(reach({}, {.tokens = 6, .row_tokens = 3, .layers = 1, .segment_ids = ids}),
            "numerics::reached_entries: layout.segment_ids.size = 12: must equal tokens (6)");
}

}  // namespace
}  // namespace heddle::numerics

// Mutants: an automatic choice that counts the row's tokens where a document starts in it; the limit of
// 64 x 64 exclusive; a group of value heads taken for one.
#include "heddle/gdn/layer_options.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "support/thrown_text.hpp"

namespace heddle::gdn {
namespace {

using Ids = std::vector<std::int32_t>;

Dims heads(std::int64_t key_dim, std::int64_t value_dim, std::int64_t group) {
  return {.key_heads = 1, .value_heads = group, .key_dim = key_dim, .value_dim = value_dim};
}

bool automatic(const Dims& dims, const Ids& ids, std::int32_t initial_segment) {
  return takes_tokens(dims, LayerOptions{}, Segments(ids, initial_segment));
}

TEST(GdnLayerOptions, SmallStatesGoTokenByTokenWhateverTheRow) {
  EXPECT_TRUE(automatic(heads(64, 64, 4), Ids(500, 1), 0));
  EXPECT_TRUE(automatic(heads(32, 128, 1), Ids(2, 1), 1));
  EXPECT_FALSE(automatic(heads(64, 65, 4), Ids(500, 1), 0));
}

TEST(GdnLayerOptions, FewTokensBehindAStateGoTokenByToken) {
  EXPECT_TRUE(automatic(heads(128, 128, 4), Ids(4, 7), 7));
  EXPECT_FALSE(automatic(heads(128, 128, 4), Ids(5, 7), 7));
  EXPECT_TRUE(automatic(heads(192, 192, 4), Ids(4, 7), 7));
  EXPECT_FALSE(automatic(heads(256, 192, 4), Ids(4, 7), 7));
  // Padding is no token.
  EXPECT_TRUE(automatic(heads(128, 128, 4), {7, 7, 0, 0, 7, 7, 0}, 7));
}

TEST(GdnLayerOptions, AHeadThatSharesItsKeysWithNoneGoesTokenByTokenBehindAState) {
  EXPECT_TRUE(automatic(heads(128, 128, 1), Ids(900, 7), 7));
  EXPECT_FALSE(automatic(heads(128, 129, 1), Ids(900, 7), 7));
  EXPECT_FALSE(automatic(heads(128, 128, 2), Ids(900, 7), 7));
}

TEST(GdnLayerOptions, WhereADocumentStartsItsLengthDoesNotCount) {
  for (const Ids& ids : {Ids{1}, Ids{1, 1, 2}, Ids(3, 1), Ids(900, 1)}) {
    EXPECT_FALSE(automatic(heads(128, 128, 1), ids, 0));
  }
  EXPECT_FALSE(automatic(heads(128, 128, 1), {7, 7, 2}, 7));
}

TEST(GdnLayerOptions, WhatIsAskedForIsTaken) {
  const Segments segments(Ids(900, 1), 0);
  for (const std::int64_t dim : {16, 256}) {
    const Dims dims = heads(dim, dim, 1);
    EXPECT_FALSE(takes_tokens(dims, {.recurrence = Recurrence::chunked}, segments));
    EXPECT_TRUE(takes_tokens(dims, {.recurrence = Recurrence::token_by_token}, segments));
  }
}

TEST(GdnLayerOptions, RefusesWhatIsNone) {
  const auto refusal = [](const LayerOptions& options) {
    return heddle::test::thrown_text<Error>([&] { options.validate("call"); });
  };
  EXPECT_EQ(refusal({}), "nothing was thrown");
  EXPECT_EQ(refusal({.chunks = {.chunk = 0}}), "call: options.chunk = 0: must be >= 1");
  EXPECT_EQ(refusal({.recurrence = static_cast<Recurrence>(9)}),
            "call: options.recurrence = 9: must be automatic, chunked or token_by_token");
}

}  // namespace
}  // namespace heddle::gdn

#include "heddle/gdn/segments.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

// Mutants these tests are written against: documents told apart by raw ids instead of starts;
// padding that ends a document; the incoming document ignored, or continued whatever its id; a start
// counted at padding; the last token taken for the last position.

namespace heddle::gdn {
namespace {

using Ids = std::vector<std::int32_t>;

struct Table {
  Ids valid, starts, active, epoch;
};

Table table(const Segments& segments) {
  Table result;
  for (std::int64_t t = 0; t < segments.tokens(); ++t) {
    result.valid.push_back(segments.valid(t) ? 1 : 0);
    result.starts.push_back(segments.starts(t) ? 1 : 0);
    result.active.push_back(segments.active(t));
    result.epoch.push_back(segments.epoch(t));
  }
  return result;
}

TEST(GdnSegments, AnIdThatReturnsIsANewDocument) {
  const Segments segments(Ids{1, 1, 2, 1}, 0);
  const Table found = table(segments);
  EXPECT_EQ(found.starts, (Ids{1, 0, 1, 1}));
  EXPECT_EQ(found.epoch, (Ids{1, 1, 2, 3}));
  EXPECT_EQ(segments.starts_in_row(), 3);
}

TEST(GdnSegments, PaddingDoesNotSplitADocument) {
  const Segments segments(Ids{0, 1, 0, 0, 1, 0, 2, 0}, 0);
  const Table found = table(segments);
  EXPECT_EQ(found.valid, (Ids{0, 1, 0, 0, 1, 0, 1, 0}));
  EXPECT_EQ(found.starts, (Ids{0, 1, 0, 0, 0, 0, 1, 0}));
  EXPECT_EQ(found.active, (Ids{0, 1, 1, 1, 1, 1, 2, 2}));
  EXPECT_EQ(found.epoch, (Ids{0, 1, 1, 1, 1, 1, 2, 2}));
  EXPECT_EQ(segments.first_valid(), 1);
  EXPECT_EQ(segments.last_valid(), 6);
  EXPECT_EQ(segments.valid_tokens(), 3);
  EXPECT_EQ(segments.final_segment(), 2);
}

TEST(GdnSegments, TheIncomingDocumentContinuesUnderItsOwnIdOnly) {
  const Table continued = table(Segments(Ids{7, 7, 3}, 7));
  EXPECT_EQ(continued.starts, (Ids{0, 0, 1}));
  EXPECT_EQ(continued.epoch, (Ids{0, 0, 1}));
  const Table other = table(Segments(Ids{7, 7, 3}, 3));
  EXPECT_EQ(other.starts, (Ids{1, 0, 1}));
  EXPECT_EQ(other.epoch, (Ids{1, 1, 2}));
  const Table through_padding = table(Segments(Ids{0, 7}, 7));
  EXPECT_EQ(through_padding.starts, (Ids{0, 0}));
  EXPECT_EQ(through_padding.active, (Ids{7, 7}));
}

TEST(GdnSegments, ARowWithoutTokensKeepsTheIncomingDocument) {
  for (const Ids& ids : {Ids{}, Ids{0, 0, 0}}) {
    const Segments segments(ids, 4);
    EXPECT_EQ(segments.first_valid(), -1);
    EXPECT_EQ(segments.last_valid(), -1);
    EXPECT_EQ(segments.valid_tokens(), 0);
    EXPECT_EQ(segments.starts_in_row(), 0);
    EXPECT_EQ(segments.final_segment(), 4);
    EXPECT_EQ(segments.initial_segment(), 4);
    EXPECT_EQ(segments.tokens(), static_cast<std::int64_t>(ids.size()));
  }
}

TEST(GdnSegments, APieceContinuesWhereTheLastOneEnded) {
  const Ids ids{5, 5, 0, 5, 6, 6, 0, 6, 6};
  const Table whole = table(Segments(ids, 5));
  for (std::size_t cut = 0; cut <= ids.size(); ++cut) {
    const auto middle = ids.begin() + static_cast<std::ptrdiff_t>(cut);
    const Segments first(Ids(ids.begin(), middle), 5);
    Ids starts = table(first).starts;
    const Ids rest = table(Segments(Ids(middle, ids.end()), first.final_segment())).starts;
    starts.insert(starts.end(), rest.begin(), rest.end());
    EXPECT_EQ(starts, whole.starts) << "cut at " << cut;
  }
}

TEST(GdnSegments, RefusesANegativeIncomingId) {
  EXPECT_EQ(heddle::test::thrown_text<Error>([] { const Segments segments(Ids{1}, -2); }),
            "gdn::Segments: initial_segment = -2: must be >= 0");
  EXPECT_EQ(heddle::test::thrown_text<Error>([] {
              const Segments segments(Ids{1, 1, -3}, 0);
            }),
            "gdn::Segments: segment_ids[2] = -3: must be >= 0");
}

}  // namespace
}  // namespace heddle::gdn

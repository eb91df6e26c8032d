// Mutants, each of which must fail a test here: the rule without `t >= 1`, without `segment != 0`,
// without `segment = segment before`, without the positions (or with `>` for `+ 1`); t >= 1 alone; the
// shift by none or by two; the shift the wrong way; the last state given a target; a value at an
// unscored token read; LossMask ignored; a mask of 2 taken for 0.
#include "heddle/head/target.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "heddle/head/reference.hpp"
#include "support/random.hpp"
#include "support/thrown_text.hpp"

namespace {

namespace head = heddle::head;
using heddle::test::thrown_text;
using Ids = std::vector<std::int32_t>;
using Mask = std::vector<std::uint8_t>;

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

Mask scored(const Ids& segments, const Ids& positions = {}) {
  Mask mask(segments.size(), 9);
  head::scored_tokens(segments, positions, mask);
  return mask;
}

Ids scored_list(const Ids& segments, const Ids& positions = {}) {
  const Mask mask = scored(segments, positions);
  Ids list;
  for (std::size_t t = 0; t < mask.size(); ++t) {
    EXPECT_LE(mask[t], 1);
    if (mask[t] != 0) {
      list.push_back(static_cast<std::int32_t>(t));
    }
  }
  return list;
}

struct Shifted {
  Ids target_ids;
  Mask active;
};

Shifted shifted(const Ids& tokens, const Ids& segments, const Ids& positions = {}) {
  Shifted result{Ids(tokens.size(), -77), Mask(tokens.size(), 9)};
  head::shift_targets({tokens, segments, positions}, {result.target_ids, result.active});
  return result;
}

// Items A (no prompt, 3 tokens of completion) and B (2 + 2), padded at the end and at the start by a
// shift of 4: the same tokens are scored, A's first in neither.
TEST(HeadTarget, FirstTokenWithoutPromptIsNotScoredUnderEitherPadding) {
  const Ids end = {1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0, 0};
  const Ids end_positions = {0, 1, 2, 0, 1, 2, 3, 0, 0, 0, 0, 0};
  const Ids start = {0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 0};
  const Ids start_positions = {0, 0, 0, 0, 0, 1, 2, 0, 1, 2, 3, 0};
  EXPECT_EQ(scored_list(end, end_positions), (Ids{1, 2, 4, 5, 6}));
  EXPECT_EQ(scored_list(start, start_positions), (Ids{5, 6, 8, 9, 10}));
  EXPECT_EQ(scored_list(end), (Ids{1, 2, 4, 5, 6}));
  EXPECT_EQ(scored_list(start), (Ids{5, 6, 8, 9, 10}));

  const Ids tokens = {10, 11, 12, 20, 21, 22, 23, 0, 0, 0, 0, 0};
  const Shifted targets = shifted(tokens, end, end_positions);
  EXPECT_EQ(targets.active, (Mask{1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(targets.target_ids, (Ids{11, 12, 0, 21, 22, 23, 0, 0, 0, 0, 0, 0}));
}

// The same row padded at the end and at the start, hidden states of padding NaN: what is scored, and
// every cotangent, moves by the shift and is otherwise the same.
TEST(HeadTarget, ARowScoresTheSameUnderEitherPadding) {
  constexpr std::int64_t tokens = 12;
  constexpr std::int64_t width = 3;
  constexpr std::int64_t vocab = 30;
  constexpr int shift = 4;
  constexpr int used = 7;
  heddle::test::Random random(12);
  const std::vector<double> weight = random.normals<double>(width * vocab);
  const std::vector<double> states = random.normals<double>(used * width);
  const Ids ids = {10, 11, 12, 20, 21, 22, 23};
  const Ids segments = {1, 1, 1, 2, 2, 2, 2};
  const std::vector<double> cotangents = random.normals<double>(used);
  struct Outcome {
    std::vector<double> logps, entropy, d_hidden, d_weight;
  };
  const auto run = [&](int offset) {
    Ids row_ids(tokens, 0);
    Ids row_segments(tokens, 0);
    std::vector<double> hidden(tokens * width, nan_value);
    std::vector<double> d_logps(tokens, nan_value);
    const auto at = [offset](int t) { return static_cast<std::size_t>(t + offset); };
    for (int t = 0; t < used; ++t) {
      const auto from = static_cast<std::size_t>(t);
      row_ids[at(t)] = ids[from];
      row_segments[at(t)] = segments[from];
      d_logps[at(t)] = cotangents[from];
      for (std::size_t d = 0; d < width; ++d) {
        hidden[at(t) * width + d] = states[from * width + d];
      }
    }
    const Mask mask = scored(row_segments);
    const Shifted targets = shifted(row_ids, row_segments);
    std::vector<double> shifted_d_logps(tokens);
    head::to_hidden_frame<double>(d_logps, mask, shifted_d_logps);
    const head::Dims dims{.tokens = tokens, .hidden = width, .vocab = vocab};
    const head::Inputs<double> inputs{.hidden = {hidden.data(), tokens, width},
                                      .weight = {weight.data(), width, vocab},
                                      .layout = head::WeightLayout::dv,
                                      .target_ids = targets.target_ids,
                                      .active = targets.active};
    std::vector<double> logps(tokens), entropy(tokens), max(tokens), exp_sum(tokens);
    head::reference::forward(
        dims, inputs, {},
        head::Outputs<double>{.logps = logps, .entropy = entropy, .max = max, .exp_sum = exp_sum});
    Outcome outcome{std::vector<double>(tokens), std::vector<double>(tokens),
                    std::vector<double>(tokens * width), std::vector<double>(width * vocab)};
    head::to_token_frame<double>(logps, mask, outcome.logps);
    head::to_token_frame<double>(entropy, mask, outcome.entropy);
    head::reference::backward(
        dims, inputs, {}, head::Residuals<double>{.max = max, .exp_sum = exp_sum},
        head::OutputCotangents<double>{.d_logps = shifted_d_logps},
        head::Cotangents<double>{.d_hidden = {outcome.d_hidden.data(), tokens, width},
                                 .d_weight = {.values = {outcome.d_weight.data(), width, vocab}}});
    return outcome;
  };
  const Outcome end = run(0);
  Outcome start = run(shift);
  std::rotate(start.logps.begin(), start.logps.begin() + shift, start.logps.end());
  std::rotate(start.entropy.begin(), start.entropy.begin() + shift, start.entropy.end());
  std::rotate(start.d_hidden.begin(), start.d_hidden.begin() + shift * width, start.d_hidden.end());
  EXPECT_EQ(start.logps, end.logps);
  EXPECT_EQ(start.entropy, end.entropy);
  EXPECT_EQ(start.d_hidden, end.d_hidden);
  EXPECT_EQ(start.d_weight, end.d_weight);
  EXPECT_EQ(end.logps[0], 0);
  EXPECT_NE(end.logps[1], 0);
  EXPECT_EQ(end.logps[3], 0) << "the second document's first token";
}

TEST(HeadTarget, PositionsTellDocumentsThatShareAnId) {
  const Ids segments = {1, 1, 1, 1, 1, 1};
  EXPECT_EQ(scored_list(segments), (Ids{1, 2, 3, 4, 5}));
  EXPECT_EQ(scored_list(segments, {0, 1, 2, 0, 1, 2}), (Ids{1, 2, 4, 5}));
  EXPECT_EQ(scored_list(segments, {0, 1, 3, 4, 5, 6}), (Ids{1, 3, 4, 5})) << "a gap";
  EXPECT_EQ(scored_list(segments, {5, 5, 4, 3, 2, 1}), Ids{});
}

TEST(HeadTarget, PaddingIsNeverScored) {
  EXPECT_EQ(scored_list({0, 0, 0}, {0, 1, 2}), Ids{});
  EXPECT_EQ(scored_list({1, 0, 0, 1}, {0, 1, 2, 3}), Ids{}) << "a gap between two of one id";
}

TEST(HeadTarget, RowsOfNoneAndOneToken) {
  EXPECT_EQ(scored({}), Mask{});
  EXPECT_EQ(scored({1}), Mask{0});
  EXPECT_EQ(shifted({}, {}).active, Mask{});
  EXPECT_EQ(shifted({5}, {1}).active, Mask{0});
  EXPECT_EQ(shifted({5}, {1}).target_ids, Ids{0});
}

TEST(HeadTarget, LargestPositionDoesNotOverflow) {
  constexpr std::int32_t largest = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(
      scored_list({1, 1, 1}, {largest - 1, largest, std::numeric_limits<std::int32_t>::min()}),
      Ids{1});
}

TEST(HeadTarget, IdsWhereInactiveAreNotPassedOn) {
  const Shifted targets = shifted({-5, 7, 1 << 30, 3, -1}, {1, 1, 2, 2, 0});
  EXPECT_EQ(targets.target_ids, (Ids{7, 0, 3, 0, 0}));
  EXPECT_EQ(targets.active, (Mask{1, 0, 1, 0, 0}));
}

TEST(HeadTarget, FramesAreEachOthersInverseOnScoredTokensAndSelectElsewhere) {
  const Ids segments = {1, 1, 1, 0, 2, 2};
  const Mask mask = scored(segments);
  ASSERT_EQ(mask, (Mask{0, 1, 1, 0, 0, 1}));
  // Token 0 has no state before it; tokens 3 and 4 stand behind a document's end: none may be read.
  const std::vector<double> token_frame = {nan_value, 1.5, 2.5, nan_value, nan_value, 5.5};
  std::vector<double> hidden_frame(6, nan_value);
  head::to_hidden_frame<double>(token_frame, mask, hidden_frame);
  EXPECT_EQ(hidden_frame, (std::vector<double>{1.5, 2.5, 0, 0, 5.5, 0}));

  const std::vector<double> scores = {1.5, 2.5, nan_value, nan_value, 5.5, nan_value};
  std::vector<double> back(6, nan_value);
  head::to_token_frame<double>(scores, mask, back);
  EXPECT_EQ(back, (std::vector<double>{0, 1.5, 2.5, 0, 0, 5.5}));
}

TEST(HeadTarget, ActiveInTheHiddenFrameIsTheScoredMaskMovedThere) {
  heddle::test::Random random(11);
  for (int round = 0; round < 50; ++round) {
    const auto tokens = static_cast<std::size_t>(random.integer(0, 70));
    Ids ids(tokens);
    Ids segments(tokens);
    Ids positions(tokens);
    for (std::size_t t = 0; t < tokens; ++t) {
      ids[t] = static_cast<std::int32_t>(random.integer(1, 99));
      segments[t] = static_cast<std::int32_t>(random.integer(0, 2));
      positions[t] = static_cast<std::int32_t>(random.integer(0, 2));
    }
    const Mask mask = scored(segments, positions);
    const Shifted targets = shifted(ids, segments, positions);
    Mask moved(tokens, 9);
    head::to_hidden_frame<std::uint8_t>(mask, mask, moved);
    EXPECT_EQ(targets.active, moved);
    Ids moved_ids(tokens, -77);
    head::to_hidden_frame<std::int32_t>(ids, mask, moved_ids);
    EXPECT_EQ(targets.target_ids, moved_ids);
  }
}

TEST(HeadTarget, LossMaskFollowsItsPolicy) {
  const Mask completion = {1, 1, 0, 2, 1};
  const Mask has_score = {0, 1, 1, 1, 0};
  Mask out(5, 9);
  head::loss_mask(completion, has_score, head::LossMask::scored, out);
  EXPECT_EQ(out, (Mask{0, 1, 0, 1, 0}));
  head::loss_mask(completion, has_score, head::LossMask::reference, out);
  EXPECT_EQ(out, (Mask{1, 1, 0, 1, 1}));
  Mask in_place = completion;
  head::loss_mask(in_place, has_score, head::LossMask::scored, in_place);
  EXPECT_EQ(in_place, (Mask{0, 1, 0, 1, 0}));
}

TEST(HeadTarget, WrongCallsAreRefusedBeforeAnythingIsWritten) {
  const Ids three = {1, 1, 1};
  const Ids negative = {1, 1, -3};
  Mask mask = {9, 9, 9};
  Mask short_mask = {9};
  Ids ids = {-77, -77, -77};
  Ids short_ids = {-77};
  EXPECT_EQ(thrown_text<heddle::Error>([&] { head::scored_tokens(negative, {}, mask); }),
            "head::scored_tokens: segment_ids[2] = -3: must be >= 0");
  EXPECT_EQ(thrown_text<heddle::Error>([&] { head::scored_tokens(three, short_ids, mask); }),
            "head::scored_tokens: segment_positions.size = 1: must equal segment_ids.size (3)");
  EXPECT_EQ(thrown_text<heddle::Error>([&] { head::scored_tokens(three, {}, short_mask); }),
            "head::scored_tokens: scored.size = 1: must equal segment_ids.size (3)");
  EXPECT_EQ(thrown_text<heddle::Error>([&] {
              head::shift_targets({three, short_ids, {}}, {ids, mask});
            }),
            "head::shift_targets: segment_ids.size = 1: must equal token_ids.size (3)");
  EXPECT_EQ(thrown_text<heddle::Error>([&] {
              head::shift_targets({three, negative, {}}, {ids, mask});
            }),
            "head::shift_targets: segment_ids[2] = -3: must be >= 0");
  EXPECT_EQ(thrown_text<heddle::Error>([&] {
              head::shift_targets({three, three, {}}, {short_ids, mask});
            }),
            "head::shift_targets: target_ids.size = 1: must equal token_ids.size (3)");
  EXPECT_EQ(thrown_text<heddle::Error>([&] {
              head::shift_targets({three, three, {}}, {ids, short_mask});
            }),
            "head::shift_targets: active.size = 1: must equal token_ids.size (3)");
  EXPECT_EQ(thrown_text<heddle::Error>(
                [&] { head::to_token_frame<std::int32_t>(three, short_mask, ids); }),
            "head::to_token_frame: scored.size = 1: must equal values.size (3)");
  EXPECT_EQ(thrown_text<heddle::Error>(
                [&] { head::to_token_frame<std::int32_t>(three, mask, short_ids); }),
            "head::to_token_frame: out.size = 1: must equal values.size (3)");
  EXPECT_EQ(thrown_text<heddle::Error>(
                [&] { head::to_hidden_frame<std::int32_t>(three, short_mask, ids); }),
            "head::to_hidden_frame: scored.size = 1: must equal values.size (3)");
  EXPECT_EQ(thrown_text<heddle::Error>(
                [&] { head::to_hidden_frame<std::int32_t>(three, mask, short_ids); }),
            "head::to_hidden_frame: out.size = 1: must equal values.size (3)");
  const Mask ones = {1, 1, 1};
  EXPECT_EQ(thrown_text<heddle::Error>(
                [&] { head::loss_mask(ones, short_mask, head::LossMask::scored, mask); }),
            "head::loss_mask: scored.size = 1: must equal completion_mask.size (3)");
  EXPECT_EQ(thrown_text<heddle::Error>(
                [&] { head::loss_mask(ones, ones, static_cast<head::LossMask>(4), mask); }),
            "head::loss_mask: policy = 4: must be scored or reference");
  EXPECT_EQ(thrown_text<heddle::Error>(
                [&] { head::loss_mask(ones, ones, head::LossMask::scored, short_mask); }),
            "head::loss_mask: out.size = 1: must equal completion_mask.size (3)");
  EXPECT_EQ(mask, (Mask{9, 9, 9}));
  EXPECT_EQ(ids, (Ids{-77, -77, -77}));
}

}  // namespace

// Mutants, each of which must fail a test here or in arguments_test.cpp: a check dropped; a bound off
// by one (hidden 0, vocab 0, tile 0, shards 0, ids beyond int32); an enum accepted that is none; a
// temperature of -1, NaN or inf accepted; 0 refused.
#include "heddle/head/options.hpp"

#include <cstdint>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "support/thrown_text.hpp"

namespace {

using heddle::head::Dims;
using heddle::head::ScoringOptions;
using heddle::test::thrown_text;

std::string refusal(const Dims& dims) {
  return thrown_text<heddle::Error>([&] { dims.validate("call"); });
}

std::string refusal(const ScoringOptions& options) {
  return thrown_text<heddle::Error>([&] { options.validate("call"); });
}

TEST(HeadDims, ExtentsOutOfRangeAreRefused) {
  EXPECT_EQ(refusal(Dims{.tokens = 0, .hidden = 1, .vocab = 1}), "nothing was thrown");
  EXPECT_EQ(refusal(Dims{.tokens = -1, .hidden = 1, .vocab = 1}),
            "call: dims.tokens = -1: must be >= 0");
  EXPECT_EQ(refusal(Dims{.tokens = 1, .hidden = 0, .vocab = 1}),
            "call: dims.hidden = 0: must be >= 1");
  EXPECT_EQ(refusal(Dims{.tokens = 1, .hidden = 1, .vocab = 0}),
            "call: dims.vocab = 0: must be >= 1");
  constexpr std::int64_t largest = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(refusal(Dims{.tokens = 1, .hidden = 1, .vocab = largest}), "nothing was thrown");
  EXPECT_EQ(refusal(Dims{.tokens = 1, .hidden = 1, .vocab = largest + 1}),
            "call: dims.vocab = 2147483648: must fit an int32 id");
}

TEST(HeadScoringOptions, DefaultsAreTheStrictOnes) {
  const ScoringOptions options;
  EXPECT_EQ(refusal(options), "nothing was thrown");
  EXPECT_EQ(options.mode, heddle::head::Mode::fused);
  EXPECT_EQ(options.logp_form, heddle::head::LogpForm::reference);
  EXPECT_EQ(options.entropy_policy, heddle::head::EntropyPolicy::xlogx);
  EXPECT_EQ(options.id_policy, heddle::head::IdPolicy::strict);
  EXPECT_EQ(options.logits_dtype, heddle::head::LogitsDtype::accumulator);
  EXPECT_EQ(options.vocab_shards, 1);
}

TEST(HeadScoringOptions, TemperatureIsZeroOrPositive) {
  EXPECT_EQ(refusal(ScoringOptions{.temperature = 0}), "nothing was thrown");
  EXPECT_EQ(refusal(ScoringOptions{.temperature = 0.7}), "nothing was thrown");
  EXPECT_EQ(refusal(ScoringOptions{.temperature = -0.5}),
            "call: options.temperature = -0.5: must be >= 0 and finite (0: no scaling)");
  EXPECT_EQ(refusal(ScoringOptions{.temperature = std::numeric_limits<double>::infinity()}),
            "call: options.temperature = inf: must be >= 0 and finite (0: no scaling)");
  EXPECT_EQ(refusal(ScoringOptions{.temperature = std::numeric_limits<double>::quiet_NaN()}),
            "call: options.temperature = nan: must be >= 0 and finite (0: no scaling)");
}

TEST(HeadScoringOptions, UnknownValuesAreRefused) {
  using namespace heddle::head;
  EXPECT_EQ(refusal(ScoringOptions{.mode = static_cast<Mode>(3)}),
            "call: options.mode = 3: must be unsharded, local or fused");
  EXPECT_EQ(refusal(ScoringOptions{.logp_form = static_cast<LogpForm>(2)}),
            "call: options.logp_form = 2: must be reference or shifted");
  EXPECT_EQ(refusal(ScoringOptions{.entropy_policy = static_cast<EntropyPolicy>(-1)}),
            "call: options.entropy_policy = -1: must be xlogx or reference");
  EXPECT_EQ(refusal(ScoringOptions{.id_policy = static_cast<IdPolicy>(2)}),
            "call: options.id_policy = 2: must be strict or wrap");
  EXPECT_EQ(refusal(ScoringOptions{.logits_dtype = static_cast<LogitsDtype>(7)}),
            "call: options.logits_dtype = 7: must be accumulator or bf16");
  EXPECT_EQ(refusal(ScoringOptions{.vocab_tile = 0}), "call: options.vocab_tile = 0: must be >= 1");
  EXPECT_EQ(refusal(ScoringOptions{.vocab_shards = 0}),
            "call: options.vocab_shards = 0: must be >= 1");
  EXPECT_EQ(refusal(ScoringOptions{.chunk = 0}), "call: options.chunk = 0: must be >= 1");
  EXPECT_EQ(refusal(ScoringOptions{.scratch_bytes = -1}),
            "call: options.scratch_bytes = -1: must be >= 0");
  EXPECT_EQ(refusal(ScoringOptions{.scratch_bytes = 0}), "nothing was thrown");
}

}  // namespace

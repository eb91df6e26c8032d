// Mutants, each of which must fail a test here: a check dropped or done after the first write; the ids
// of inactive rows checked; the bounds of an id off by one (-1, V - 1, V); the weight's shape taken
// from the other layout; residuals asked for in local mode, or not in fused; token_block that forgets
// a member or moves the weight.
#include "heddle/head/arguments.hpp"

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "heddle/head/reference.hpp"
#include "support/thrown_text.hpp"

namespace {

namespace head = heddle::head;
using heddle::test::thrown_text;

constexpr float poison = -77;

/// A valid call of 3 tokens, D = 2, V = 4, and what may be spoilt of it.
struct Call {
  head::Dims dims{.tokens = 3, .hidden = 2, .vocab = 4};
  std::vector<float> hidden = std::vector<float>(6, 0.5F);
  std::vector<float> weight = std::vector<float>(8, 0.25F);
  std::vector<std::int32_t> ids = {0, 3, 1};
  std::vector<std::uint8_t> active = {1, 1, 1};
  head::ScoringOptions options;
  std::vector<float> logps = std::vector<float>(3, poison);
  std::vector<float> entropy = std::vector<float>(3, poison);
  std::vector<float> max = std::vector<float>(3, poison);
  std::vector<float> exp_sum = std::vector<float>(3, poison);
  std::vector<float> mean = std::vector<float>(3, poison);
  std::vector<float> d_logps = std::vector<float>(3, 1.0F);
  std::vector<float> d_entropy = std::vector<float>(3, 1.0F);
  std::vector<float> d_hidden = std::vector<float>(6, poison);
  std::vector<float> d_weight = std::vector<float>(8, poison);

  head::Inputs<float> inputs{};
  head::Outputs<float> outputs{};
  head::Residuals<float> residuals{};
  head::OutputCotangents<float> output_cotangents{};
  head::Cotangents<float> cotangents{};

  Call() {
    inputs = {.hidden = {hidden.data(), 3, 2},
              .weight = {weight.data(), 2, 4},
              .layout = head::WeightLayout::dv,
              .target_ids = ids,
              .active = active};
    outputs = {.logps = logps, .entropy = entropy, .max = max, .exp_sum = exp_sum, .mean = mean};
    residuals = {.max = max, .exp_sum = exp_sum, .mean = mean};
    output_cotangents = {.d_logps = d_logps, .d_entropy = d_entropy};
    cotangents = {.d_hidden = {d_hidden.data(), 3, 2},
                  .d_weight = {.values = {d_weight.data(), 2, 4}}};
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  std::string forward() {
    return thrown_text<heddle::Error>(
        [&] { head::reference::forward(dims, inputs, options, outputs); });
  }
  std::string backward() {
    return thrown_text<heddle::Error>([&] {
      head::reference::backward(dims, inputs, options, residuals, output_cotangents, cotangents);
    });
  }
  void expect_untouched() const {
    for (const auto* written : {&logps, &entropy, &max, &exp_sum, &mean, &d_hidden, &d_weight}) {
      for (const float value : *written) {
        EXPECT_EQ(value, poison);
      }
    }
  }
};

std::string forward_refusal(const std::function<void(Call&)>& spoil) {
  Call call;
  spoil(call);
  const std::string text = call.forward();
  call.expect_untouched();
  return text;
}

std::string backward_refusal(const std::function<void(Call&)>& spoil) {
  Call call;
  spoil(call);
  const std::string text = call.backward();
  call.expect_untouched();
  return text;
}

TEST(HeadArguments, TheUnspoiltCallIsAccepted) {
  Call call;
  EXPECT_EQ(call.forward(), "nothing was thrown");
  EXPECT_EQ(call.backward(), "nothing was thrown");
}

TEST(HeadArguments, InputsOfAnotherShapeAreRefused) {
  EXPECT_EQ(forward_refusal([](Call& c) { c.dims.tokens = -1; }),
            "head::reference::forward: dims.tokens = -1: must be >= 0");
  EXPECT_EQ(forward_refusal([](Call& c) {
              c.inputs.hidden = {c.hidden.data(), 2, 2};
            }),
            "head::reference::forward: inputs.hidden.rows = 2: must equal dims.tokens (3)");
  EXPECT_EQ(forward_refusal([](Call& c) {
              c.inputs.hidden = {c.hidden.data(), 3, 1};
            }),
            "head::reference::forward: inputs.hidden.cols = 1: must equal dims.hidden (2)");
  EXPECT_EQ(forward_refusal([](Call& c) {
              c.inputs.hidden = {c.hidden.data(), 3, 2, 1};
            }),
            "head::reference::forward: inputs.hidden.stride = 1: must be at least its cols (2)");
  EXPECT_EQ(forward_refusal([](Call& c) { c.inputs.layout = static_cast<head::WeightLayout>(2); }),
            "head::reference::forward: inputs.layout = 2: must be dv or vd");
  EXPECT_EQ(forward_refusal([](Call& c) {
              c.inputs.weight = {c.weight.data(), 4, 2};
            }),
            "head::reference::forward: inputs.weight.rows = 4: must equal dims.hidden (2)");
  EXPECT_EQ(forward_refusal([](Call& c) { c.inputs.layout = head::WeightLayout::vd; }),
            "head::reference::forward: inputs.weight.rows = 2: must equal dims.vocab (4)");
  EXPECT_EQ(forward_refusal([](Call& c) {
              c.inputs.weight = {nullptr, 2, 4};
            }),
            "head::reference::forward: inputs.weight = null: required");
  EXPECT_EQ(forward_refusal([](Call& c) { c.inputs.target_ids = c.inputs.target_ids.first(2); }),
            "head::reference::forward: inputs.target_ids.size = 2: must equal dims.tokens (3)");
  EXPECT_EQ(forward_refusal([](Call& c) { c.inputs.active = c.inputs.active.first(1); }),
            "head::reference::forward: inputs.active.size = 1: must equal dims.tokens (3)");
  EXPECT_EQ(backward_refusal([](Call& c) { c.inputs.active = c.inputs.active.first(1); }),
            "head::reference::backward: inputs.active.size = 1: must equal dims.tokens (3)");
}

TEST(HeadArguments, OptionsAreValidated) {
  EXPECT_EQ(forward_refusal([](Call& c) { c.options.vocab_tile = 0; }),
            "head::reference::forward: options.vocab_tile = 0: must be >= 1");
  EXPECT_EQ(backward_refusal([](Call& c) { c.options.temperature = -1; }),
            "head::reference::backward: options.temperature = -1: must be >= 0 and finite "
            "(0: no scaling)");
}

// Narrowed to float these are 0 and inf: no scaling at all, and a uniform softmax.
TEST(HeadArguments, TemperatureBeyondTheAccumulatorIsRefused) {
  EXPECT_EQ(forward_refusal([](Call& c) { c.options.temperature = 1e-50; }),
            "head::reference::forward: options.temperature = 1e-50: must be a normal number of the "
            "accumulator");
  EXPECT_EQ(
      backward_refusal([](Call& c) { c.options.temperature = 1e50; }),
      "head::reference::backward: options.temperature = 1e+50: must be a normal number of the "
      "accumulator");
}

TEST(HeadArguments, StrictIdsMustNameAColumnOnActiveRowsOnly) {
  const std::string rule = ": must be in [0, dims.vocab (4)) on an active row";
  const std::string forward = "head::reference::forward: inputs.target_ids[1] = ";
  EXPECT_EQ(forward_refusal([](Call& c) { c.ids[1] = 4; }), forward + "4" + rule);
  EXPECT_EQ(forward_refusal([](Call& c) { c.ids[1] = -1; }), forward + "-1" + rule);
  EXPECT_EQ(forward_refusal([](Call& c) { c.ids[1] = -100; }), forward + "-100" + rule);
  EXPECT_EQ(backward_refusal([](Call& c) { c.ids[2] = 4; }),
            "head::reference::backward: inputs.target_ids[2] = 4" + rule);
  EXPECT_EQ(forward_refusal([](Call& c) {
              c.inputs.active = {};
              c.ids[1] = 4;
            }),
            forward + "4" + rule);
  Call inactive;
  inactive.active[1] = 0;
  inactive.ids[1] = -100;
  EXPECT_EQ(inactive.forward(), "nothing was thrown");
  Call wrapped;
  wrapped.options.id_policy = head::IdPolicy::wrap;
  wrapped.ids[1] = -100;
  EXPECT_EQ(wrapped.forward(), "nothing was thrown");
}

TEST(HeadArguments, OutputsOfAnotherLengthAreRefused) {
  EXPECT_EQ(forward_refusal([](Call& c) { c.outputs.logps = {}; }),
            "head::reference::forward: outputs.logps.size = 0: must equal dims.tokens (3)");
  EXPECT_EQ(forward_refusal([](Call& c) { c.outputs.entropy = c.outputs.entropy.first(1); }),
            "head::reference::forward: outputs.entropy.size = 1: must equal dims.tokens (3)");
  EXPECT_EQ(forward_refusal([](Call& c) { c.outputs.max = c.outputs.max.first(2); }),
            "head::reference::forward: outputs.max.size = 2: must equal dims.tokens (3)");
  EXPECT_EQ(forward_refusal([](Call& c) { c.outputs.exp_sum = c.outputs.exp_sum.first(2); }),
            "head::reference::forward: outputs.exp_sum.size = 2: must equal dims.tokens (3)");
  EXPECT_EQ(forward_refusal([](Call& c) { c.outputs.mean = c.outputs.mean.first(2); }),
            "head::reference::forward: outputs.mean.size = 2: must equal dims.tokens (3)");
}

TEST(HeadArguments, ResidualsThatTheModeReadsAreRequired) {
  EXPECT_EQ(backward_refusal([](Call& c) { c.residuals.max = {}; }),
            "head::reference::backward: residuals.max.size = 0: must equal dims.tokens (3)");
  EXPECT_EQ(backward_refusal([](Call& c) { c.residuals.exp_sum = {}; }),
            "head::reference::backward: residuals.exp_sum.size = 0: must equal dims.tokens (3)");
  EXPECT_EQ(backward_refusal([](Call& c) { c.residuals.mean = {}; }),
            "head::reference::backward: residuals.mean = null: required when d_entropy is given");
  EXPECT_EQ(backward_refusal([](Call& c) { c.residuals.mean = c.residuals.mean.first(1); }),
            "head::reference::backward: residuals.mean.size = 1: must equal dims.tokens (3)");
  for (const head::Mode mode : {head::Mode::local, head::Mode::unsharded}) {
    Call call;
    call.options.mode = mode;
    call.residuals = {};
    EXPECT_EQ(call.backward(), "nothing was thrown");
  }
}

TEST(HeadArguments, CotangentsOfAnotherShapeAreRefused) {
  EXPECT_EQ(backward_refusal([](Call& c) { c.output_cotangents.d_logps = {}; }),
            "head::reference::backward: output_cotangents.d_logps.size = 0: must equal dims.tokens "
            "(3)");
  EXPECT_EQ(
      backward_refusal(
          [](Call& c) { c.output_cotangents.d_entropy = c.output_cotangents.d_entropy.first(2); }),
      "head::reference::backward: output_cotangents.d_entropy.size = 2: must equal dims.tokens "
      "(3)");
  EXPECT_EQ(backward_refusal([](Call& c) {
              c.cotangents.d_hidden = {c.d_hidden.data(), 3, 1};
            }),
            "head::reference::backward: cotangents.d_hidden.cols = 1: must equal dims.hidden (2)");
  EXPECT_EQ(backward_refusal([](Call& c) {
              c.cotangents.d_weight.values = {c.d_weight.data(), 4, 2};
            }),
            "head::reference::backward: cotangents.d_weight.rows = 4: must equal dims.hidden (2)");
  EXPECT_EQ(backward_refusal(
                [](Call& c) { c.cotangents.d_weight.write = static_cast<heddle::Write>(5); }),
            "head::reference::backward: cotangents.d_weight.write = 5: must be overwrite or "
            "accumulate");
}

TEST(HeadArguments, TokenBlockCutsEverythingButTheWeight) {
  Call call;
  const auto inputs = call.inputs.token_block(1, 2);
  EXPECT_EQ(inputs.hidden.data(), call.hidden.data() + 2);
  EXPECT_EQ(inputs.hidden.rows(), 2);
  EXPECT_EQ(inputs.weight.data(), call.weight.data());
  EXPECT_EQ(inputs.weight.rows(), 2);
  EXPECT_EQ(inputs.target_ids.data(), call.ids.data() + 1);
  EXPECT_EQ(inputs.target_ids.size(), 2U);
  EXPECT_EQ(inputs.active.data(), call.active.data() + 1);
  EXPECT_EQ(inputs.active.size(), 2U);
  const auto outputs = call.outputs.token_block(1, 1);
  const auto expect_cut = [](std::span<const float> cut, const std::vector<float>& whole) {
    EXPECT_EQ(cut.data(), whole.data() + 1);
    EXPECT_EQ(cut.size(), 1U);
  };
  expect_cut(outputs.logps, call.logps);
  expect_cut(outputs.entropy, call.entropy);
  expect_cut(outputs.max, call.max);
  expect_cut(outputs.exp_sum, call.exp_sum);
  expect_cut(outputs.mean, call.mean);
  const auto residuals = call.residuals.token_block(1, 1);
  expect_cut(residuals.max, call.max);
  expect_cut(residuals.exp_sum, call.exp_sum);
  expect_cut(residuals.mean, call.mean);
  const auto given = call.output_cotangents.token_block(1, 1);
  expect_cut(given.d_logps, call.d_logps);
  expect_cut(given.d_entropy, call.d_entropy);
  call.cotangents.d_weight.write = heddle::Write::accumulate;
  const auto cotangents = call.cotangents.token_block(1, 2);
  EXPECT_EQ(cotangents.d_hidden.data(), call.d_hidden.data() + 2);
  EXPECT_EQ(cotangents.d_hidden.rows(), 2);
  EXPECT_EQ(cotangents.d_weight.values.data(), call.d_weight.data());
  EXPECT_EQ(cotangents.d_weight.write, heddle::Write::accumulate);
}

TEST(HeadArguments, TokenBlockLeavesAbsentMembersAbsent) {
  EXPECT_TRUE(head::Inputs<float>{}.token_block(1, 2).active.empty());
  EXPECT_TRUE(head::Outputs<float>{}.token_block(1, 2).entropy.empty());
  EXPECT_TRUE(head::Residuals<float>{}.token_block(1, 2).mean.empty());
  EXPECT_TRUE(head::OutputCotangents<float>{}.token_block(1, 2).d_entropy.empty());
  EXPECT_TRUE(head::Cotangents<float>{}.token_block(1, 2).d_hidden.is_null());
}

}  // namespace

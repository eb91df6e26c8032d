#include "heddle/moe/layer_cost.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/moe/grouped_gemm.hpp"

namespace heddle::moe {
namespace {

// One device of the 397B mesh: 64 experts, two chunks of 81,920 rows.
constexpr std::int64_t rows = 81'920;
const Dims device = {
    .tokens = 16'384, .hidden = 4096, .experts = 64, .top_k = 10, .expert_hidden = 1024};

TEST(LayerCost, ProductsAsInTheTableOfTheSpecification) {
  std::vector<std::int64_t> offsets;
  for (std::int64_t e = 0; e <= 64; ++e) {
    offsets.push_back(e * rows / 64);
  }
  const Cost wi = grouped_cost<bfloat16>({offsets}, 4096, 2048);
  EXPECT_EQ(wi.flops, 1'374'389'534'720);
  EXPECT_EQ(wi.bytes_read + wi.bytes_written, (640 + 1024 + 320) * (std::int64_t{1} << 20));
  const Cost wo = grouped_cost<bfloat16>({offsets}, 1024, 4096);
  EXPECT_EQ(wo.flops, 687'194'767'360);
  EXPECT_EQ(wo.bytes_read + wo.bytes_written, (160 + 512 + 640) * (std::int64_t{1} << 20));
  // Passes of their own: 320 + 160 MiB forward, 320 + 160 + 320 backward.
  const Cost glu = glu_cost<bfloat16>(rows, 1024);
  EXPECT_EQ(glu.bytes_read + glu.bytes_written, 480 * (std::int64_t{1} << 20));
  const Cost back = glu_backward_cost<bfloat16>(rows, 1024);
  EXPECT_EQ(back.bytes_read + back.bytes_written, 800 * (std::int64_t{1} << 20));
}

TEST(LayerCost, FlopsOfTheProductsAreSixAndTwelveDFARow) {
  Dims none = device;
  none.tokens = 0;
  const LayerCost cost = layer_cost<bfloat16, float>(device, WeightGradFrom::wo_input);
  const std::int64_t row = device.hidden * device.expert_hidden;
  const std::int64_t router = device.tokens * device.hidden * device.experts;
  // What is not a product is linear in D or F: less than a thousandth.
  const auto expect_near = [](std::int64_t actual, std::int64_t expected) {
    EXPECT_GE(actual, expected);
    EXPECT_LE(static_cast<double>(actual), 1.001 * static_cast<double>(expected));
  };
  EXPECT_EQ(6 * 2 * rows * row, 4'123'168'604'160);  // the specification's 4.123e12
  expect_near(cost.forward.flops, 6 * 2 * rows * row + 2 * router);
  expect_near(cost.backward.flops, 12 * 2 * rows * row + 4 * router);
  EXPECT_EQ(cost.forward.transcendentals, 2 * rows * 1024 + 2 * rows);
  const LayerCost from_output = layer_cost<bfloat16, float>(device, WeightGradFrom::wo_output);
  expect_near(from_output.backward.flops, 14 * 2 * rows * row + 4 * router);
  EXPECT_EQ(layer_cost<float>(none, WeightGradFrom::wo_input).forward.flops, 0);
}

TEST(LayerCost, TheSharedExpertIsOneThatEveryTokenGoesTo) {
  Dims shared = device;
  shared.shared_hidden = 1024;
  const LayerCost with = layer_cost<bfloat16>(shared, WeightGradFrom::wo_input);
  const LayerCost without = layer_cost<bfloat16>(device, WeightGradFrom::wo_input);
  const std::int64_t more = with.forward.flops - without.forward.flops;
  // The specification's 2.06e11 for 8,192 tokens; here are 16,384.
  EXPECT_NEAR(static_cast<double>(more), 2 * 2.06e11, 0.01 * 2 * 2.06e11);
  EXPECT_EQ(with.forward.transcendentals - without.forward.transcendentals, 16'384 * 1025);
}

}  // namespace
}  // namespace heddle::moe

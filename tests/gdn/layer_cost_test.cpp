// Mutants: taps of the convolution counted once; the parameters' cotangents not written; scratch that
// grows with the row beyond its gates; the recurrence's scratch left out of the automatic choice.
#include "heddle/gdn/layer_cost.hpp"

#include <algorithm>
#include <cstdint>

#include <gtest/gtest.h>

#include "heddle/core/cost.hpp"
#include "heddle/gdn/chunked_cost.hpp"

namespace heddle::gdn {
namespace {

Dims model(std::int64_t tokens) {
  return {.tokens = tokens,
          .key_heads = 16,
          .value_heads = 64,
          .key_dim = 128,
          .value_dim = 128,
          .kernel = 4};
}

TEST(GdnLayerCost, IsTheRecurrencesAndTheConvolutionsAndTheGates) {
  const Dims dims = model(16384);
  const std::int64_t elements = std::int64_t{16384} * 12288;
  const std::int64_t gates = std::int64_t{16384} * 64;
  const ChunkOptions chunks;

  const Cost inner = chunked_cost<bfloat16, float, bfloat16>(dims, chunks);
  const Cost forward = layer_forward_cost<bfloat16, bfloat16, float, bfloat16>(dims, chunks);
  EXPECT_EQ(forward.flops - inner.flops, 8 * elements);
  EXPECT_EQ(forward.transcendentals - inner.transcendentals, elements + 3 * gates);
  EXPECT_EQ(forward.bytes_read - inner.bytes_read, 2 * 2 * gates + 2 * 12288 * 5);
  EXPECT_EQ(forward.bytes_written - inner.bytes_written, 2 * 4 * gates);

  const Cost inner_backward = chunked_backward_cost<bfloat16, float, bfloat16>(dims, chunks);
  const Cost backward = layer_backward_cost<bfloat16, bfloat16, float, bfloat16>(dims, chunks);
  EXPECT_EQ(backward.flops - inner_backward.flops, 32 * elements);
  EXPECT_EQ(backward.transcendentals - inner_backward.transcendentals, 2 * elements + 7 * gates);
  EXPECT_EQ(backward.bytes_written - inner_backward.bytes_written, 4 * (4 * gates + 12288 * 5));
}

TEST(GdnLayerCost, ScratchGrowsWithTheRowByItsGatesAlone) {
  const LayerOptions options{.recurrence = Recurrence::chunked};
  const auto of = [&](std::int64_t tokens) {
    return layer_forward_workspace_bytes<bfloat16>(model(tokens), options, Residuals::none);
  };
  EXPECT_EQ(of(4096).thread, of(65536).thread);
  // Log decay and writing strength, f32, and nothing else that knows the tokens.
  EXPECT_EQ(of(65536).row - of(4096).row, std::size_t{2} * (65536 - 4096) * 64 * 4);
  // A whole widened copy of qkv would be 3 GiB.
  EXPECT_LT(of(65536).row + of(65536).thread, std::size_t{48} << 20);
}

TEST(GdnLayerCost, ScratchOfTheAutomaticChoiceHoldsEither) {
  const auto thread = [](Recurrence recurrence, Residuals residuals) {
    const LayerOptions options{.recurrence = recurrence};
    return layer_forward_workspace_bytes<float>(model(300), options, residuals).thread;
  };
  const std::size_t chunks = thread(Recurrence::chunked, Residuals::none);
  const std::size_t tokens = thread(Recurrence::token_by_token, Residuals::none);
  EXPECT_NE(chunks, tokens);
  EXPECT_EQ(thread(Recurrence::automatic, Residuals::none), std::max(chunks, tokens));
  // Residuals are a chunk's.
  EXPECT_EQ(thread(Recurrence::automatic, Residuals::inverses), chunks);
}

}  // namespace
}  // namespace heddle::gdn

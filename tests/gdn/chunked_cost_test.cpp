// Mutants: products shared by a group counted for every value head; the last short chunk counted whole;
// the diagonal's decays left out; the state read, not written.
#include "heddle/gdn/chunked_cost.hpp"

#include <cstdint>

#include <gtest/gtest.h>

#include "heddle/core/cost.hpp"
#include "heddle/gdn/dims.hpp"

namespace heddle::gdn {
namespace {

TEST(GdnChunkedCost, CountsTheProductsOfTheMergedForm) {
  const Dims dims{
      .tokens = 16384, .key_heads = 16, .value_heads = 64, .key_dim = 128, .value_dim = 128};
  const ChunkOptions options;
  const auto giga = [](const Cost& cost) { return 1e-9 * static_cast<double>(cost.flops); };
  EXPECT_NEAR((giga(chunked_cost<float, float, float>(dims, options))), 147.5, 0.1);
  EXPECT_NEAR((giga(chunked_backward_cost<float, float, float>(dims, options))), 352.2, 0.1);
  EXPECT_NEAR(giga(chunked_states_cost<float, float>(dims, options)), 91.6, 0.1);
  EXPECT_NEAR(giga(transitions_cost<float, float>(dims, options)), 85.9, 0.1);
  const Cost cost = chunked_cost<bfloat16, float, bfloat16>(dims, options);
  EXPECT_EQ(cost.transcendentals, std::int64_t{64} * 256 * (64 * 65 / 2 + 128));
  EXPECT_EQ(cost.bytes_read, std::int64_t{16384} * 12288 * 2 + 2 * 16384 * 64 * 4 +
                                 std::int64_t{64} * 128 * 128 * 4);
  EXPECT_EQ(cost.bytes_written, std::int64_t{16384} * 8192 * 2 + std::int64_t{64} * 128 * 128 * 4);
  // A short last chunk costs what it is.
  Dims longer = dims;
  longer.tokens += 1;
  const std::int64_t added = chunked_cost<float, float, float>(longer, options).flops -
                             chunked_cost<float, float, float>(dims, options).flops;
  EXPECT_EQ(added,
            std::int64_t{64} * (3 * 2 * 128 * 128 + 2 * 2 * 128) + std::int64_t{16} * 2 * 2 * 128);
}

TEST(GdnChunkedCost, OfNothingIsTheState) {
  const Dims dims{.tokens = 0, .key_heads = 1, .value_heads = 2, .key_dim = 3, .value_dim = 5};
  const Cost cost = chunked_cost<float, float, float>(dims, ChunkOptions{});
  EXPECT_EQ(cost.flops, 0);
  EXPECT_EQ(cost.transcendentals, 0);
  EXPECT_EQ(cost.bytes_read, 2 * 3 * 5 * 4);
  EXPECT_EQ(cost.bytes_written, 2 * 3 * 5 * 4);
}

}  // namespace
}  // namespace heddle::gdn

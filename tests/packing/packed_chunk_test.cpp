#include "heddle/packing/packed_chunk.hpp"

#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

// Mutants that must fail here: segment ids or positions in i64 (18), ids in f32, routing in u8; an array a
// token too long accepted (10); a buffer that shrinks, overlaps its neighbour or moves on reuse; an array that
// nobody fills accepted; a cost that forgets an array.

namespace heddle::packing {
namespace {

// Test 12 of the specification: the type of every output.
static_assert(std::is_same_v<decltype(ChunkArrays::ids), MatrixView<std::int32_t>>);
static_assert(std::is_same_v<decltype(ChunkArrays::prompt_mask), MatrixView<float>>);
static_assert(std::is_same_v<decltype(ChunkArrays::completion_mask), MatrixView<float>>);
static_assert(std::is_same_v<decltype(ChunkArrays::advantages), MatrixView<float>>);
static_assert(std::is_same_v<decltype(ChunkArrays::segment_ids), MatrixView<std::int32_t>>);
static_assert(std::is_same_v<decltype(ChunkArrays::segment_positions), MatrixView<std::int32_t>>);
static_assert(std::is_same_v<decltype(ChunkArrays::per_token), PerTokenArray<MatrixView<float>>>);
static_assert(std::is_same_v<decltype(ChunkArrays::routed_experts), MatrixView<std::int16_t>>);
static_assert(std::is_same_v<decltype(ChunkArrays::num_real_segments), std::span<std::int32_t>>);

ChunkDims small_dims() {
  ChunkDims dims{.rows = 3, .tokens = 5, .layers = 2, .top_k = 4};
  dims.carried[PerTokenField::returns] = true;
  return dims;
}

struct Extent {
  const char* begin;
  const char* end;
};

template <class T>
Extent extent(MatrixView<T> array) {
  const auto* const begin = reinterpret_cast<const char*>(array.data());
  return {begin, begin + static_cast<std::size_t>(array.rows() * array.cols()) * sizeof(T)};
}

std::vector<Extent> extents(const ChunkArrays& arrays) {
  std::vector<Extent> all{extent(arrays.ids),         extent(arrays.prompt_mask),
                          extent(arrays.advantages),  extent(arrays.completion_mask),
                          extent(arrays.segment_ids), extent(arrays.segment_positions)};
  for (const PerTokenField field : per_token_fields) {
    if (!arrays.per_token[field].is_null()) {
      all.push_back(extent(arrays.per_token[field]));
    }
  }
  if (!arrays.routed_experts.is_null()) {
    all.push_back(extent(arrays.routed_experts));
  }
  const auto* const counts = reinterpret_cast<const char*>(arrays.num_real_segments.data());
  all.push_back({counts, counts + arrays.num_real_segments.size_bytes()});
  return all;
}

TEST(PackedChunk, BuffersFitTheirDimsAndDoNotOverlap) {
  ChunkBuffers buffers;
  const ChunkArrays arrays = buffers.prepare(small_dims());
  EXPECT_EQ(test::thrown_text<Error>([&] { validate("pack", small_dims(), arrays); }),
            "nothing was thrown");
  const std::vector<Extent> all = extents(arrays);
  EXPECT_EQ(all.size(), 9U);
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      EXPECT_TRUE(all[i].end <= all[j].begin || all[j].end <= all[i].begin) << i << " " << j;
    }
  }
}

TEST(PackedChunk, BuffersStayWhereTheyAreUntilALargerChunkComes) {
  ChunkBuffers buffers;
  const void* const first = buffers.prepare(small_dims()).ids.data();
  EXPECT_EQ(buffers.prepare(small_dims()).ids.data(), first);
  ChunkDims smaller = small_dims();
  smaller.rows = 1;
  EXPECT_NE(buffers.prepare(smaller).ids.data(), nullptr);
  EXPECT_EQ(buffers.prepare(small_dims()).ids.data(), first);
  ChunkDims larger = small_dims();
  larger.rows = 1000;
  const ChunkArrays arrays = buffers.prepare(larger);
  EXPECT_EQ(test::thrown_text<Error>([&] { validate("pack", larger, arrays); }),
            "nothing was thrown");
}

TEST(PackedChunk, WithoutRowsThereIsNothing) {
  ChunkBuffers buffers;
  const ChunkDims none{.tokens = 8};
  const ChunkArrays arrays = buffers.prepare(none);
  EXPECT_EQ(test::thrown_text<Error>([&] { validate("pack", none, arrays); }),
            "nothing was thrown");
  EXPECT_EQ(cost(none, 0), Cost{});
}

TEST(PackedChunk, CostIsThePayloadOnce) {
  // Spec 9: 24 bytes a position, 4 a field, 1,200 of routing; a row of 65,536 with all is 82.1 MB.
  ChunkDims dims{.rows = 1, .tokens = 65536};
  EXPECT_EQ(cost(dims, 0).bytes_written, 65536 * 24 + 4);
  for (const PerTokenField field : per_token_fields) {
    dims.carried[field] = true;
  }
  dims.layers = 60;
  dims.top_k = 10;
  EXPECT_EQ(cost(dims, 0).bytes_written, std::int64_t{65536} * 1252 + 4);
  EXPECT_EQ(cost(dims, 1000).bytes_read, 1000 * (12 + 28 + 1200));
  dims.rows = 64;
  EXPECT_GT(dims.positions() * dims.routed_per_token(), std::int64_t{1} << 31);
  EXPECT_EQ(cost(dims, 0).bytes_written, 64 * (std::int64_t{65536} * 1252 + 4));
}

TEST(PackedChunk, ArraysOfAnotherShapeAreRefused) {
  ChunkBuffers buffers;
  const ChunkArrays good = buffers.prepare(small_dims());
  const auto refusal = [&](const std::function<void(ChunkArrays&)>& change) {
    ChunkArrays arrays = good;
    change(arrays);
    return test::thrown_text<Error>([&] { validate("pack", small_dims(), arrays); });
  };
  std::vector<std::int32_t> ids(3 * 6);
  std::vector<float> values(3 * 6);
  EXPECT_EQ(refusal([&](ChunkArrays& a) {
              a.ids = {ids.data(), 3, 6};
            }),
            "pack: arrays.ids.cols = 6: must equal budget (5)");
  EXPECT_EQ(refusal([&](ChunkArrays& a) {
              a.prompt_mask = {values.data(), 2, 5};
            }),
            "pack: arrays.prompt_mask.rows = 2: must equal rows (3)");
  EXPECT_EQ(refusal([&](ChunkArrays& a) {
              a.completion_mask = {values.data(), 3, 5, 4};
            }),
            "pack: arrays.completion_mask.stride = 4: must be at least its cols (5)");
  EXPECT_EQ(refusal([&](ChunkArrays& a) {
              a.advantages = {nullptr, 3, 5};
            }),
            "pack: arrays.advantages = null: required");
  EXPECT_EQ(refusal([&](ChunkArrays& a) { a.segment_ids = {}; }),
            "pack: arrays.segment_ids.rows = 0: must equal rows (3)");
  EXPECT_EQ(refusal([&](ChunkArrays& a) {
              a.segment_positions = {ids.data(), 3, 4};
            }),
            "pack: arrays.segment_positions.cols = 4: must equal budget (5)");
  EXPECT_EQ(refusal([&](ChunkArrays& a) { a.per_token[PerTokenField::returns] = {}; }),
            "pack: arrays.returns.rows = 0: must equal rows (3)");
  EXPECT_EQ(refusal([&](ChunkArrays& a) {
              a.per_token[PerTokenField::overlong] = {values.data(), 3, 5};
            }),
            "pack: arrays.overlong = given: must be null, no item of the chunk carries it");
  EXPECT_EQ(refusal([&](ChunkArrays& a) { a.num_real_segments = a.num_real_segments.first(2); }),
            "pack: arrays.num_real_segments.size = 2: must equal rows (3)");

  std::vector<std::int16_t> routed(15 * 9);
  EXPECT_EQ(refusal([&](ChunkArrays& a) { a.routed_experts = {}; }),
            "pack: arrays.routed_experts.rows = 0: must equal rows * budget (15)");
  EXPECT_EQ(refusal([&](ChunkArrays& a) {
              a.routed_experts = {routed.data(), 15, 9};
            }),
            "pack: arrays.routed_experts.cols = 9: must equal layers * top_k (8)");
  EXPECT_EQ(refusal([&](ChunkArrays& a) {
              a.routed_experts = {routed.data(), 15, 8, 9};
            }),
            "pack: arrays.routed_experts.stride = 9: must equal its cols (8)");
  EXPECT_EQ(refusal([&](ChunkArrays& a) {
              a.ids = {ids.data(), 3, 5, 6};
            }),
            "nothing was thrown")
      << "rows may stand apart";
}

TEST(PackedChunk, RoutingMayBeAskedForWhereNoItemHasAny) {
  ChunkDims dims = small_dims();
  dims.layers = 0;
  dims.top_k = 0;
  ChunkBuffers buffers;
  ChunkArrays arrays = buffers.prepare(dims);
  EXPECT_TRUE(arrays.routed_experts.is_null());
  std::vector<std::int16_t> routed(15 * 8);
  arrays.routed_experts = {routed.data(), 15, 8};
  EXPECT_EQ(test::thrown_text<Error>([&] { validate("pack", dims, arrays); }),
            "nothing was thrown");
  arrays.routed_experts = {routed.data(), 14, 8};
  EXPECT_EQ(test::thrown_text<Error>([&] { validate("pack", dims, arrays); }),
            "pack: arrays.routed_experts.rows = 14: must equal rows * budget (15)");
}

}  // namespace
}  // namespace heddle::packing

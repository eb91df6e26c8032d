#include "heddle/gdn/dims.hpp"

#include <cstdint>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

// Mutants these tests are written against: value_head % key_heads as key head; key columns before
// query columns; the group missing from the value columns; a check dropped or off by one.

namespace heddle::gdn {
namespace {

constexpr Dims good{.tokens = 5, .key_heads = 2, .value_heads = 6, .key_dim = 4, .value_dim = 3};

const std::string accepted = "nothing was thrown";

template <class Object>
std::string refusal(const Object& object) {
  return heddle::test::thrown_text<Error>([&] { object.validate("here"); });
}

TEST(GdnDims, ColumnsOfTheLargeModel) {
  constexpr Dims dims{
      .tokens = 16384, .key_heads = 16, .value_heads = 64, .key_dim = 128, .value_dim = 128};
  EXPECT_EQ(dims.qkv_columns(), 12288);
  EXPECT_EQ(dims.query_column(15), 1920);
  EXPECT_EQ(dims.key_column(0), 2048);
  EXPECT_EQ(dims.value_column(0), 4096);
  EXPECT_EQ(dims.value_column(63) + 128, 12288);
  EXPECT_EQ(dims.output_columns(), 8192);
  EXPECT_EQ(dims.state_rows(), 8192);
  EXPECT_EQ(dims.group(), 4);
  EXPECT_EQ(dims.window_rows(), 3);
}

TEST(GdnDims, NeighbouringValueHeadsShareAKeyHead) {
  const std::int64_t expected[] = {0, 0, 0, 1, 1, 1};
  for (std::int64_t head = 0; head < 6; ++head) {
    EXPECT_EQ(good.key_head_of(head), expected[head]) << head;
  }
}

TEST(GdnDims, ColumnsOfUnequalHeadDims) {
  EXPECT_EQ(good.qkv_columns(), 2 * 2 * 4 + 6 * 3);
  EXPECT_EQ(good.query_column(1), 4);
  EXPECT_EQ(good.key_column(1), 12);
  EXPECT_EQ(good.value_column(2), 22);
  EXPECT_EQ(good.state_row(5), 20);
}

TEST(GdnDims, RefusesEachExtentOutOfRange) {
  const auto with = [](auto change) {
    Dims dims = good;
    change(dims);
    return refusal(dims);
  };
  EXPECT_EQ(refusal(good), accepted);
  EXPECT_EQ(with([](Dims& d) { d.tokens = 0; }), accepted);
  EXPECT_EQ(with([](Dims& d) { d.kernel = 1; }), accepted);
  EXPECT_EQ(with([](Dims& d) { d.tokens = -1; }), "here: dims.tokens = -1: must be >= 0");
  EXPECT_EQ(with([](Dims& d) { d.key_heads = 0; }), "here: dims.key_heads = 0: must be >= 1");
  EXPECT_EQ(with([](Dims& d) { d.value_heads = 0; }), "here: dims.value_heads = 0: must be >= 1");
  EXPECT_EQ(with([](Dims& d) { d.value_heads = 5; }),
            "here: dims.value_heads = 5: must be a multiple of dims.key_heads (2)");
  EXPECT_EQ(with([](Dims& d) { d.key_dim = 0; }), "here: dims.key_dim = 0: must be >= 1");
  EXPECT_EQ(with([](Dims& d) { d.value_dim = 0; }), "here: dims.value_dim = 0: must be >= 1");
  EXPECT_EQ(with([](Dims& d) { d.kernel = 0; }), "here: dims.kernel = 0: must be >= 1");
}

TEST(GdnOptions, RefusesEachValueOutOfRange) {
  EXPECT_EQ(refusal(Options{}), accepted);
  EXPECT_EQ(refusal(Options{.eps = 0}), "here: options.eps = 0: must be > 0 and finite");
  EXPECT_EQ(refusal(Options{.eps = -1e-6}), "here: options.eps = -1e-06: must be > 0 and finite");
  EXPECT_EQ(refusal(Options{.eps = std::numeric_limits<double>::infinity()}),
            "here: options.eps = inf: must be > 0 and finite");
  EXPECT_EQ(refusal(Options{.eps = std::numeric_limits<double>::quiet_NaN()}),
            "here: options.eps = nan: must be > 0 and finite");
  EXPECT_EQ(refusal(Options{.norm = static_cast<NormMode>(3)}),
            "here: options.norm = 3: must be root, clamp or none");
  EXPECT_EQ(refusal(Options{.beta_range = static_cast<BetaRange>(2)}),
            "here: options.beta_range = 2: must be unit or doubled");
  EXPECT_EQ(refusal(Options{.conv_output = static_cast<ConvOutput>(7)}),
            "here: options.conv_output = 7: must be accumulator or storage");
  EXPECT_EQ(refusal(Options{.initial_segment = -1}),
            "here: options.initial_segment = -1: must be >= 0");
}

TEST(GdnChunkOptions, RefusesEachValueOutOfRange) {
  EXPECT_EQ(refusal(ChunkOptions{}), accepted);
  EXPECT_EQ(refusal(ChunkOptions{.chunk = 1, .chunking = Chunking::grid}), accepted);
  EXPECT_EQ(refusal(ChunkOptions{.chunk = 0}), "here: options.chunk = 0: must be >= 1");
  EXPECT_EQ(refusal(ChunkOptions{.chunking = static_cast<Chunking>(2)}),
            "here: options.chunking = 2: must be aligned or grid");
}

}  // namespace
}  // namespace heddle::gdn

// Mutants, each of which must fail a test here: the rest of an uneven split given to the last devices; a
// device's index along the axes in another order; traffic along one set of axes counted for the other.
#include "heddle/head/head_sharding.hpp"

#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

namespace {

namespace head = heddle::head;
using head::HeadSharding;
using head::WeightBlock;
using head::WeightSplit;
using heddle::Axis;
using heddle::DenseShard;
using heddle::IndexRange;
using heddle::Topology;

constexpr head::Dims dims{.tokens = 0, .hidden = 24, .vocab = 14};

TEST(HeadSharding, RowsInEqualBlocks) {
  const Topology mesh({.fsdp = 3, .context = 2});
  const WeightBlock block = weight_block(dims, {}, mesh, 4);  // fsdp 2, context 0
  EXPECT_EQ(block.hidden, (IndexRange{16, 8}));
  EXPECT_EQ(block.vocab, (IndexRange{0, 14}));
  // Devices that differ in context alone hold copies, unless all axes share the weight out.
  EXPECT_EQ(weight_block(dims, {}, mesh, 5).hidden, block.hidden);
  EXPECT_EQ(weight_block(dims, {.dense = DenseShard::all}, mesh, 5).hidden, (IndexRange{20, 4}));
}

TEST(HeadSharding, ColumnsAsEqualAsTheyCanBe) {
  const Topology mesh({.fsdp = 4});
  std::int64_t first = 0;
  for (const std::int64_t id : {0, 1, 2, 3}) {
    const WeightBlock block = weight_block(dims, {.split = WeightSplit::vocab}, mesh, id);
    EXPECT_EQ(block.hidden, (IndexRange{0, 24}));
    EXPECT_EQ(block.vocab, (IndexRange{first, id < 2 ? 4 : 3}));
    first += block.vocab.count;
  }
  EXPECT_EQ(first, 14);
}

TEST(HeadSharding, RefusesWhatDoesNotDivide) {
  const auto refused = [](const HeadSharding& sharding, const Topology& mesh) {
    return heddle::test::thrown_text<heddle::Error>(
        [&] { static_cast<void>(weight_block(dims, sharding, mesh, 0)); });
  };
  const Topology five({.fsdp = 5});
  EXPECT_NE(refused({}, five).find("is not divisible by fsdp=5 (= 5), remainder 4"),
            std::string::npos);
  EXPECT_EQ(refused({.split = WeightSplit::vocab}, five), "nothing was thrown");
  EXPECT_NE(refused({.split = static_cast<WeightSplit>(2)}, five).find("must be hidden or vocab"),
            std::string::npos);
  EXPECT_NE(refused({.dense = static_cast<DenseShard>(2)}, five).find("must be fsdp or all"),
            std::string::npos);
  EXPECT_NE(refused({.gather_columns = 0}, five).find("sharding.gather_columns"),
            std::string::npos);
}

TEST(HeadSharding, TrafficByAxes) {
  const head::HeadTraffic traffic{.gathered = {Axis::fsdp},
                                  .summed = {Axis::context, Axis::expert},
                                  .gather = {.sent_bytes = 1},
                                  .scatter = {.sent_bytes = 10},
                                  .sum = {.sent_bytes = 100}};
  EXPECT_EQ(traffic.sent_along({Axis::fsdp}), 11);
  EXPECT_EQ(traffic.sent_along({Axis::context, Axis::expert}), 100);
  EXPECT_EQ(traffic.sent_along({Axis::expert, Axis::context}), 0);
}

}  // namespace

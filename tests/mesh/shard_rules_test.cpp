// Mutants tried: cp_as_ep with the tuple turned round; dense cotangents not summed over the copies; small
// vectors not summed over expert; owner = expert mod group; dual_chunk_swap checked by ranks alone; D of
// the experts checked by all axes.
#include "heddle/mesh/shard_rules.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

namespace heddle {
namespace {

const ShardRules spread{.dense = DenseShard::all};
const ShardRules own{.experts = ExpertRule::ep_own};

/// "E:(context, expert) D:(fsdp) 2M:() | gathered (fsdp) | summed ()".
std::string described(ModelArray array, const ShardRules& rules) {
  const ArrayShards shards = shards_of(array, rules);
  std::string text;
  for (const DimShard& dim : shards.dims()) {
    text += std::string(dim.name) + ":" + to_string(dim.axes) + " ";
  }
  return text + "| gathered " + to_string(shards.gathered) + " | summed " +
         to_string(shards.summed);
}

TEST(ShardRules, TheTable) {
  EXPECT_EQ(described(ModelArray::tokens, {}),
            "B:(fsdp, expert) S:(context) | gathered () | summed ()");
  EXPECT_EQ(described(ModelArray::activations, {}),
            "B:(fsdp, expert) S:(context) D:() | gathered () | summed ()");
  EXPECT_EQ(described(ModelArray::expert_wi, {}),
            "E:(context, expert) D:(fsdp) 2M:() | gathered (fsdp) | summed ()");
  EXPECT_EQ(described(ModelArray::expert_wo, {}),
            "E:(context, expert) M:() D:(fsdp) | gathered (fsdp) | summed ()");
  EXPECT_EQ(described(ModelArray::expert_wi, own),
            "E:(expert) D:(fsdp, context) 2M:() | gathered (fsdp, context) | summed ()");
  EXPECT_EQ(described(ModelArray::dense_kernel, {}),
            "D:(fsdp) N:() | gathered (fsdp) | summed (context, expert)");
  EXPECT_EQ(described(ModelArray::head, {}),
            "D:(fsdp) V:() | gathered (fsdp) | summed (context, expert)");
  EXPECT_EQ(described(ModelArray::router_kernel, spread),
            "D:(fsdp, context, expert) E:() | gathered (fsdp, context, expert) | summed ()");
  EXPECT_EQ(described(ModelArray::embedding, spread),
            "D:(fsdp, context, expert) V:() | gathered (fsdp, context, expert) | summed ()");
  EXPECT_EQ(described(ModelArray::small_vector, {}),
            "N:() | gathered () | summed (fsdp, context, expert)");
}

TEST(ShardRules, EveryWeightsCotangentIsSummedOverEveryDataAxisOnce) {
  for (const ShardRules& rules : {ShardRules{}, spread, own}) {
    for (const ModelArray array :
         {ModelArray::dense_kernel, ModelArray::router_kernel, ModelArray::embedding,
          ModelArray::head, ModelArray::small_vector, ModelArray::expert_wi,
          ModelArray::expert_wo}) {
      const ArrayShards shards = shards_of(array, rules);
      // Experts get the tokens of their group by themselves.
      const bool is_expert = shards.dims()[0].name == "E";
      for (const Axis axis : all_axes) {
        const int summed = (shards.gathered.contains(axis) ? 1 : 0) +
                           (shards.summed.contains(axis) ? 1 : 0) +
                           (is_expert && expert_group(rules).contains(axis) ? 1 : 0);
        EXPECT_EQ(summed, 1) << shards.name << " over " << axis_name(axis);
      }
    }
  }
}

TEST(ShardRules, ShapesOfTheBenchmarkMesh) {
  const Topology mesh({.fsdp = 32, .context = 4, .expert = 2});
  // Device 11 is (1, 1, 1).
  const std::vector<std::int64_t> tokens = {64, 65536};
  EXPECT_EQ(local_ranges(shards_of(ModelArray::tokens), mesh, 11, tokens),
            (std::vector<IndexRange>{{3, 1}, {16384, 16384}}));
  const std::vector<std::int64_t> wi = {512, 4096, 2048};
  EXPECT_EQ(local_ranges(shards_of(ModelArray::expert_wi), mesh, 11, wi),
            (std::vector<IndexRange>{{192, 64}, {128, 128}, {0, 2048}}));
  EXPECT_EQ(local_ranges(shards_of(ModelArray::expert_wi, own), mesh, 11, wi),
            (std::vector<IndexRange>{{256, 256}, {160, 32}, {0, 2048}}));
  const std::vector<std::int64_t> head = {4096, 248320};
  EXPECT_EQ(local_ranges(shards_of(ModelArray::head), mesh, 11, head),
            (std::vector<IndexRange>{{128, 128}, {0, 248320}}));
  EXPECT_EQ(local_ranges(shards_of(ModelArray::head, spread), mesh, 11, head),
            (std::vector<IndexRange>{{176, 16}, {0, 248320}}));
}

TEST(ShardRules, BlocksCoverEveryDimensionOnce) {
  const Topology mesh({.fsdp = 3, .context = 2, .expert = 2});
  const ArrayShards wi = shards_of(ModelArray::expert_wi);
  const std::vector<std::int64_t> sizes = {8, 6, 5};
  std::vector<int> covered(8 * 6);
  for (std::int64_t id = 0; id < mesh.devices(); ++id) {
    const auto ranges = local_ranges(wi, mesh, id, sizes);
    for (std::int64_t e = ranges[0].first; e < ranges[0].first + ranges[0].count; ++e) {
      for (std::int64_t d = ranges[1].first; d < ranges[1].first + ranges[1].count; ++d) {
        ++covered[static_cast<std::size_t>(e * 6 + d)];
      }
    }
  }
  EXPECT_EQ(covered, std::vector<int>(48, 1));
}

TEST(ShardRules, OwnersAreContiguousBlocks) {
  const MeshAxes mesh{.fsdp = 32, .context = 4, .expert = 2};
  EXPECT_EQ(expert_owner(0, 512, mesh), 0);
  EXPECT_EQ(expert_owner(63, 512, mesh), 0);
  EXPECT_EQ(expert_owner(64, 512, mesh), 1);
  EXPECT_EQ(expert_owner(511, 512, mesh), 7);
  EXPECT_EQ(expert_owner(511, 512, mesh, own), 1);
  EXPECT_EQ(test::thrown_text<Error>([&] { static_cast<void>(expert_owner(512, 512, mesh)); }),
            "expert_owner: expert = 512: must be in [0, 512)");
  EXPECT_EQ(
      test::thrown_text<Error>([&] { static_cast<void>(expert_owner(0, 100, mesh)); }),
      "mesh: experts = 100: is not divisible by context=4 x expert=2 (= 8), remainder 4; nearest: "
      "96, 104");
}

std::string refusal(const GlobalSizes& sizes, const ShardRules& rules = {},
                    const MeshAxes& mesh = {.fsdp = 32, .context = 4, .expert = 2}) {
  return test::thrown_text<Error>([&] { require_divides(sizes, mesh, rules); });
}

const GlobalSizes model{.rows = 64,
                        .sequence = 65536,
                        .layout = ContextLayout::dual_chunk_swap,
                        .token_chunks = 2,
                        .experts = 512,
                        .dim = 4096};

TEST(ShardRules, TheBenchmarkModelFitsItsMeshes) {
  for (const ShardRules& rules : {ShardRules{}, spread, own}) {
    for (const MeshAxes& mesh :
         {MeshAxes{.fsdp = 32, .context = 4, .expert = 2},
          MeshAxes{.fsdp = 32, .context = 8, .expert = 2}, MeshAxes{.fsdp = 64, .context = 8}}) {
      EXPECT_EQ(refusal(model, rules, mesh), "nothing was thrown");
    }
  }
}

TEST(ShardRules, RefusalsNameTheAxesTheProductAndTheNeighbours) {
  const auto with = [](auto change) {
    GlobalSizes sizes = model;
    change(sizes);
    return sizes;
  };
  EXPECT_EQ(
      refusal(with([](GlobalSizes& s) { s.rows = 70; })),
      "mesh: rows = 70: is not divisible by fsdp=32 x expert=2 (= 64), remainder 6; nearest: 64, "
      "128");
  EXPECT_EQ(
      refusal(with([](GlobalSizes& s) { s.sequence = 65540; })),
      "mesh: sequence = 65540: is not divisible by context=4 x chunks=2 (= 8), remainder 4; "
      "nearest: 65536, 65544; dual_chunk_swap wants 2 equal chunks a rank, here of 8192 or 8193");
  EXPECT_EQ(
      refusal(with([](GlobalSizes& s) {
        s.sequence = 65538;
        s.layout = ContextLayout::contiguous;
      })),
      "mesh: sequence = 65538: is not divisible by context=4 (= 4), remainder 2; nearest: 65536, "
      "65540");
  EXPECT_EQ(
      refusal(with([](GlobalSizes& s) { s.token_chunks = 3; })),
      "mesh: local tokens = 16384: is not divisible by token_chunks=3 (= 3), remainder 1; nearest: "
      "16383, 16386");
  EXPECT_EQ(
      refusal(with([](GlobalSizes& s) { s.experts = 516; })),
      "mesh: experts = 516: is not divisible by context=4 x expert=2 (= 8), remainder 4; nearest: "
      "512, 520");
  EXPECT_EQ(refusal(with([](GlobalSizes& s) { s.dim = 4100; })),
            "mesh: dense_kernel dim 0 (D) = 4100: is not divisible by fsdp=32 (= 32), remainder 4; "
            "nearest: 4096, 4128");
  EXPECT_EQ(
      refusal(with([](GlobalSizes& s) { s.dim = 4128; }), spread),
      "mesh: dense_kernel dim 0 (D) = 4128: is not divisible by fsdp=32 x context=4 x expert=2 (= "
      "256), remainder 32; nearest: 4096, 4352");
  EXPECT_EQ(refusal(with([](GlobalSizes& s) { s.dim = 4128; }), own),
            "mesh: expert_wi dim 1 (D) = 4128: is not divisible by fsdp=32 x context=4 (= 128), "
            "remainder 32; nearest: 4096, 4224");
  EXPECT_EQ(refusal(with([](GlobalSizes& s) { s.rows = 0; })), "mesh: rows = 0: must be >= 1");
  const std::vector<std::int64_t> two = {8, 8};
  EXPECT_EQ(
      test::thrown_text<Error>([&] {
        static_cast<void>(local_ranges(shards_of(ModelArray::expert_wi), Topology({}), 0, two));
      }),
      "local_ranges: sizes.size = 2: must equal rank (3)");
  EXPECT_EQ(
      test::thrown_text<Error>([] { static_cast<void>(shards_of(static_cast<ModelArray>(40))); }),
      "shards_of: array = 40: must be one of the named arrays");
  EXPECT_EQ(test::thrown_text<Error>([] {
              static_cast<void>(shards_of(ModelArray::head, {.dense = static_cast<DenseShard>(2)}));
            }),
            "shards_of: rules.dense = 2: must be fsdp or all");
}

TEST(ShardRules, AxesOfOneDeviceAreAlwaysLegal) {
  EXPECT_EQ(refusal({.rows = 7,
                     .sequence = 5,
                     .layout = ContextLayout::dual_chunk_swap,
                     .experts = 3,
                     .dim = 11},
                    {}, {}),
            "nothing was thrown");
}

}  // namespace
}  // namespace heddle

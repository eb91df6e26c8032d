// Mutants tried: placed by the source's slot; the token after the border from the rank before; the fill on
// every rank; Transformer Engine's chunk order; positions counted from the rank's own start.
#include "heddle/mesh/sequence.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "mesh/device_arrays.hpp"
#include "support/compare.hpp"

namespace heddle {
namespace {

using test::of;
using test::PerDevice;

/// Line i of every rank: position and its square, two columns of a wider array whose gap is NaN.
constexpr std::int64_t stride = 3;

template <ContextLayout layout>
std::vector<float> shard_of_positions(const ContextPartition& partition, std::int64_t rank) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < partition.shard(); ++i) {
    const auto p = static_cast<float>(partition.source(rank * partition.shard() + i));
    values.insert(values.end(), {p, p * p, test::poison<float>()});
  }
  return values;
}

template <ContextLayout source, ContextLayout target>
void expect_moved(std::int64_t ranks, std::int64_t positions) {
  const ContextPartition from(source, positions, ranks);
  const ContextPartition to(target, positions, ranks);
  LocalMesh mesh({.context = ranks});
  PerDevice<float> outputs(
      static_cast<std::size_t>(ranks),
      std::vector<float>(static_cast<std::size_t>(to.shard() * stride), test::poison<float>()));
  mesh.run([&](MeshDevice& device) {
    const std::vector<float> in = shard_of_positions<source>(from, device.id());
    mesh::relayout<MeshDevice, float, source, target>(
        device,
        SequenceShard<const float, source>({in.data(), from.shard(), 2, stride}, from, device.id()),
        SequenceShard<float, target>({of(outputs, device.id()).data(), to.shard(), 2, stride}, to,
                                     device.id()));
  });
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    EXPECT_TRUE(test::same_bits(of(outputs, rank), shard_of_positions<target>(to, rank)))
        << ranks << " ranks, " << positions << " positions";
  }
}

TEST(Sequence, RelayoutKeepsEveryTokenAtItsPosition) {
  for (const std::int64_t ranks : {1, 2, 3, 4}) {
    for (const std::int64_t chunk : {0, 1, 3}) {
      const std::int64_t positions = 2 * ranks * chunk;
      expect_moved<ContextLayout::contiguous, ContextLayout::dual_chunk_swap>(ranks, positions);
      expect_moved<ContextLayout::dual_chunk_swap, ContextLayout::contiguous>(ranks, positions);
      expect_moved<ContextLayout::striped, ContextLayout::dual_chunk_swap>(ranks, positions);
    }
  }
}

TEST(Sequence, DualChunksOfFourRanksByHand) {
  const ContextPartition partition(ContextLayout::dual_chunk_swap, 16, 4);
  std::vector<float> values(4);
  const DualChunkShard<float> shard({values.data(), 4, 1}, partition, 1);
  EXPECT_EQ(shard.position(0), 2);
  EXPECT_EQ(shard.position(1), 3);
  EXPECT_EQ(shard.position(2), 12);
  EXPECT_EQ(shard.position(3), 13);
}

TEST(Sequence, TheNextTokenComesAcrossTheBorder) {
  for (const std::int64_t ranks : {1, 2, 4}) {
    for (const std::int64_t shard : {0, 1, 3}) {
      const ContextPartition partition(ContextLayout::contiguous, ranks * shard, ranks);
      LocalMesh mesh({.context = ranks});
      PerDevice<std::int32_t> outputs(
          static_cast<std::size_t>(ranks),
          std::vector<std::int32_t>(static_cast<std::size_t>(shard), -77));
      mesh.run([&](MeshDevice& device) {
        std::vector<std::int32_t> in;
        for (std::int64_t i = 0; i < shard; ++i) {
          in.push_back(static_cast<std::int32_t>(device.id() * shard + i));
        }
        const std::vector<std::int32_t> fill = {-1};
        mesh::next_token(
            device,
            ContiguousShard<const std::int32_t>({in.data(), shard, 1}, partition, device.id()),
            ContiguousShard<std::int32_t>({of(outputs, device.id()).data(), shard, 1}, partition,
                                          device.id()),
            fill);
      });
      for (std::int64_t p = 0; p < ranks * shard; ++p) {
        EXPECT_EQ(of(outputs, p / shard)[static_cast<std::size_t>(p % shard)],
                  p + 1 == ranks * shard ? -1 : p + 1);
      }
    }
  }
}

TEST(Sequence, AShardMustFitItsPartitionAndItsDevice) {
  const ContextPartition two(ContextLayout::contiguous, 8, 2);
  std::vector<float> values(8);
  const auto made = [&](std::int64_t rows, const ContextPartition& partition, std::int64_t rank) {
    return test::thrown_text<Error>([&] {
      ContiguousShard<float>({values.data(), rows, 1}, partition, rank);
    });
  };
  EXPECT_EQ(made(4, two, 1), "nothing was thrown");
  EXPECT_EQ(made(3, two, 1), "SequenceShard: values.rows = 3: must equal partition.shard (4)");
  EXPECT_EQ(made(4, two, 2), "SequenceShard: rank = 2: must be in [0, 2)");
  EXPECT_EQ(made(4, ContextPartition(ContextLayout::dual_chunk_swap, 8, 2), 0),
            "SequenceShard: partition.layout = 1: must be the layout of the type");
  const auto shifted = [&](const MeshAxes& axes, std::int64_t rank) {
    return test::run_text<Error>(axes, [&](MeshDevice& device) {
      std::vector<float> in(4), out(4);
      const std::vector<float> fill(1);
      mesh::next_token(device, ContiguousShard<const float>({in.data(), 4, 1}, two, rank),
                       ContiguousShard<float>({out.data(), 4, 1}, two, rank), fill);
    });
  };
  EXPECT_EQ(shifted({.context = 4}, 0),
            "mesh::next_token: partition.ranks = 2: must equal context (4)");
  EXPECT_EQ(shifted({.context = 2}, 1),
            "mesh::next_token: rank = 1: must equal the device's context index (0)");
}

}  // namespace
}  // namespace heddle

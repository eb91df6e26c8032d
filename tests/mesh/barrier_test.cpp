// Mutants tried: a barrier over the wrong axes; one that lets the first arrival through.
#include "heddle/mesh/barrier.hpp"

#include <array>
#include <atomic>
#include <vector>

#include <gtest/gtest.h>

#include "mesh/device_arrays.hpp"

namespace heddle {
namespace {

TEST(Barrier, NobodyLeavesBeforeEverybodyOfTheGroupHasCome) {
  LocalMesh mesh({.fsdp = 3, .context = 2, .expert = 2});
  const AxisTuple tuple = {Axis::context, Axis::fsdp};
  std::array<std::atomic<int>, 2> arrived = {};
  mesh.run([&](MeshDevice& device) {
    auto& own = arrived[static_cast<std::size_t>(device.id() % 2)];
    for (int round = 1; round <= 20; ++round) {
      ++own;
      mesh::barrier(device, tuple);
      EXPECT_GE(own, 6 * round);
    }
  });
}

TEST(Barrier, IsRecordedWithoutBytes) {
  LocalMesh mesh({.fsdp = 2});
  mesh.run([](MeshDevice& device) {
    mesh::barrier(device, {Axis::fsdp});
    mesh::barrier(device, {Axis::expert});
    mesh::barrier(device, {});
  });
  EXPECT_EQ(mesh.ledger().count({.op = Collective::barrier}), 6);
  EXPECT_EQ(mesh.ledger().sum({}), Traffic{});
  EXPECT_EQ(mesh.ledger().records()[1].members, 1);
}

}  // namespace
}  // namespace heddle

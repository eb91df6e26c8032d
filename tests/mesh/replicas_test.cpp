// Mutants tried: the check runs without being asked for; only neighbours are compared; lengths ignored;
// the check writes to the ledger.
#include "heddle/mesh/replicas.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/mesh/barrier.hpp"
#include "mesh/device_arrays.hpp"

namespace heddle {
namespace {

const MeshAxes axes{.fsdp = 2, .context = 4};

/// One device's packing differs from the rest of its context group.
std::string checked(ReplicaCheck check, std::size_t longer = 0) {
  return test::run_text<Error>(axes,
                               [&](MeshDevice& device) {
                                 std::vector<std::int32_t> segment_ids = {1, 1, 2, 0};
                                 if (device.id() == 5) {
                                   segment_ids[2] = longer == 0 ? 3 : 2;
                                   segment_ids.resize(4 + longer);
                                 }
                                 mesh::require_replicated(
                                     device, {Axis::context}, "segment_ids",
                                     std::span<const std::int32_t>(segment_ids));
                               },
                               {.replica_check = check});
}

TEST(Replicas, AnotherPackingOnOneDeviceIsNamed) {
  const std::string text =
      "mesh::require_replicated: segment_ids = different on device 5: must be the same bits on "
      "every "
      "device along (context) as on device 4";
  EXPECT_EQ(checked(ReplicaCheck::hashed), text);
  EXPECT_EQ(checked(ReplicaCheck::hashed, 1), text);
}

TEST(Replicas, EveryMemberOfTheGroupRefusesAndTheOtherGroupIsStopped) {
  std::vector<int> refused(8);
  LocalMesh mesh(axes, {.replica_check = ReplicaCheck::hashed});
  EXPECT_THROW(mesh.run([&](MeshDevice& device) {
    const std::vector<float> x = {device.id() == 6 ? -0.0F : 0.0F};
    try {
      mesh::require_replicated(device, {Axis::context}, "x", std::span<const float>(x));
    } catch (const Error&) {
      refused[static_cast<std::size_t>(device.id())] = 1;
      throw;
    }
    mesh::barrier(device, test::world);
  }),
               Error);
  EXPECT_EQ(refused, (std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1}));
}

TEST(Replicas, CostNothingUnlessAskedForAndNeverTouchTheLedger) {
  EXPECT_EQ(checked(ReplicaCheck::off), "nothing was thrown");
  LocalMesh mesh(axes, {.replica_check = ReplicaCheck::hashed});
  mesh.run([](MeshDevice& device) {
    const std::vector<float> x = {1};
    mesh::require_replicated(device, test::world, "x", std::span<const float>(x));
    mesh::barrier(device, test::world);
  });
  EXPECT_EQ(mesh.ledger().count({}), 8);
  EXPECT_EQ(mesh.ledger().records()[0].sequence, 0);
}

}  // namespace
}  // namespace heddle

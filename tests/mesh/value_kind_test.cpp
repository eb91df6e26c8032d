// Mutants tried: a gather of replicated values accepted; all_reduce of replicated values accepted; axes of
// one device refused; the claim of equal copies not checked; kinds of other axes lost.
#include "heddle/mesh/value_kind.hpp"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "mesh/device_arrays.hpp"

namespace heddle {
namespace {

const MeshAxes axes{.fsdp = 2, .context = 4};
const ValueKinds mixed{.fsdp = ValueKind::partial, .context = ValueKind::sharded};

std::string refusal(Collective op, const AxisTuple& tuple, const ValueKinds& kinds) {
  return test::thrown_text<Error>(
      [&] { static_cast<void>(mesh::kinds_after(op, tuple, axes, kinds)); });
}

TEST(ValueKinds, EachCollectiveTurnsOneKindIntoAnother) {
  EXPECT_EQ(mesh::kinds_after(Collective::all_gather, {Axis::context}, axes, mixed),
            (ValueKinds{.fsdp = ValueKind::partial}));
  EXPECT_EQ(mesh::kinds_after(Collective::reduce_scatter, {Axis::fsdp}, axes, mixed),
            (ValueKinds{.fsdp = ValueKind::sharded, .context = ValueKind::sharded}));
  EXPECT_EQ(mesh::kinds_after(Collective::all_reduce, {Axis::fsdp}, axes, mixed),
            (ValueKinds{.context = ValueKind::sharded}));
  EXPECT_EQ(mesh::kinds_after(Collective::broadcast, {Axis::context}, axes, mixed),
            (ValueKinds{.fsdp = ValueKind::partial}));
  for (const Collective op : {Collective::shift, Collective::permute, Collective::all_to_all,
                              Collective::exclusive_scan}) {
    EXPECT_EQ(mesh::kinds_after(op, {Axis::context}, axes, mixed), mixed);
  }
  EXPECT_EQ(mesh::kinds_after(Collective::barrier, test::world, axes, mixed), mixed);
}

TEST(ValueKinds, WrongKindsAreRefusedWithTheReason) {
  EXPECT_EQ(
      refusal(Collective::all_gather, {Axis::context}, {}),
      "mesh::all_gather: kind along context = replicated: must be sharded: each value would be "
      "held 4 times");
  EXPECT_EQ(refusal(Collective::all_reduce, {Axis::fsdp, Axis::context}, {}),
            "mesh::all_reduce: kind along fsdp = replicated: must be partial: each value would be "
            "counted 8 times");
  EXPECT_EQ(refusal(Collective::all_reduce, {Axis::context}, mixed),
            "mesh::all_reduce: kind along context = sharded: must be partial");
  EXPECT_EQ(refusal(Collective::all_gather, {Axis::fsdp}, mixed),
            "mesh::all_gather: kind along fsdp = partial: must be sharded");
  EXPECT_EQ(refusal(Collective::broadcast, {Axis::fsdp}, mixed),
            "mesh::broadcast: kind along fsdp = partial: must be sharded or replicated");
  EXPECT_EQ(refusal(Collective::shift, {Axis::fsdp}, mixed),
            "mesh::shift: kind along fsdp = partial: must be sharded");
}

TEST(ValueKinds, AxesOfOneDeviceAreOfEveryKind) {
  EXPECT_EQ(refusal(Collective::all_gather, {Axis::expert}, mixed), "nothing was thrown");
  EXPECT_EQ(refusal(Collective::all_reduce, {Axis::expert}, mixed), "nothing was thrown");
}

TEST(ValueKinds, PlacedValuesCarryTheirKindThrough) {
  LocalMesh mesh(axes, {.replica_check = ReplicaCheck::hashed});
  mesh.run([](MeshDevice& device) {
    // A weight sharded over fsdp: gathered, used, its cotangent reduce-scattered and summed over the copies.
    const std::vector<float> shard = {static_cast<float>(mesh::axis_index(device, {Axis::fsdp}))};
    std::vector<float> whole(2);
    const auto gathered = mesh::all_gather(
        device, {Axis::fsdp}, Placed<const float>{shard, ValueKinds{.fsdp = ValueKind::sharded}},
        std::span(whole));
    EXPECT_EQ(gathered.kinds, ValueKinds{});
    EXPECT_EQ(whole, (std::vector<float>{0, 1}));
    std::vector<float> cotangent = {1, 2};
    std::vector<float> own(1);
    const auto scattered = mesh::reduce_scatter(
        device, {Axis::fsdp},
        Placed<const float>{cotangent,
                            ValueKinds{.fsdp = ValueKind::partial, .context = ValueKind::partial}},
        std::span(own));
    EXPECT_EQ(scattered.kinds,
              (ValueKinds{.fsdp = ValueKind::sharded, .context = ValueKind::partial}));
    const auto summed = mesh::all_reduce(device, {Axis::context},
                                         Placed<const float>{own, scattered.kinds}, std::span(own));
    EXPECT_EQ(summed.kinds, (ValueKinds{.fsdp = ValueKind::sharded}));
    EXPECT_EQ(own[0], 8 * static_cast<float>(1 + mesh::axis_index(device, {Axis::fsdp})));
  });
}

TEST(ValueKinds, ReplicatedValuesAreNotGatheredAndClaimsAreChecked) {
  EXPECT_EQ(
      test::run_text<Error>(
          axes,
          [](MeshDevice& device) {
            const std::vector<float> x = {1};
            std::vector<float> y(4);
            mesh::all_gather(device, {Axis::context}, Placed<const float>{x, {}}, std::span(y));
          }),
      "mesh::all_gather: kind along context = replicated: must be sharded: each value would be "
      "held 4 times");
  const auto claims = [](ReplicaCheck check) {
    return test::run_text<Error>(
        axes,
        [](MeshDevice& device) {
          const std::vector<float> x = {device.id() == 6 ? 2.0F : 1.0F};
          std::vector<float> y(2);
          mesh::all_gather(device, {Axis::fsdp},
                           Placed<const float>{x, ValueKinds{.fsdp = ValueKind::sharded}},
                           std::span(y));
        },
        {.replica_check = check});
  };
  EXPECT_EQ(claims(ReplicaCheck::off), "nothing was thrown");
  EXPECT_EQ(
      claims(ReplicaCheck::hashed),
      "mesh::require_replicated: all_gather input = different on device 6: must be the same bits "
      "on every device along (context) as on device 4");
}

}  // namespace
}  // namespace heddle

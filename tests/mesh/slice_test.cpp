// Mutants tried: greedy from the first logical axis; the smallest set of physical axes first; core slowest
// in row_major; wraparound from 2x4x4; duplicates accepted.
#include "heddle/mesh/slice.hpp"

#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

namespace heddle::v7x {
namespace {

using heddle::test::thrown_text;

TEST(Slice, OnlyTheBlocksThatCanBeHad) {
  for (const char* text : {"2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8",
                           "4x4x16", "8x8x16"}) {
    EXPECT_EQ(to_string(parse_slice(text)), text);
  }
  for (const char* text : {"2x2x8", "4x4x2", "8x4x4", "4x4x6", "1x1x1", "2x4x8", "0x4x4"}) {
    EXPECT_EQ(thrown_text<Error>([&] { static_cast<void>(parse_slice(text)); }),
              "v7x::Slice: slice = " + std::string(text) +
                  ": must be 2x2x1, 2x2x2, 2x2x4, 2x4x4 or multiples of 4 in ascending order");
  }
  for (const char* text : {"4x4", "4x4x", "4x4x8x2", "4,4,8", "", "axbxc", "4x4x8 "}) {
    EXPECT_EQ(thrown_text<Error>([&] { static_cast<void>(parse_slice(text)); }),
              "v7x::parse_slice: slice = " + std::string(text) + ": must be written XxYxZ");
  }
  EXPECT_TRUE((Slice{4, 4, 4}).wraps());
  EXPECT_FALSE((Slice{2, 4, 4}).wraps());
  EXPECT_EQ((Slice{4, 4, 8}).devices(), 256);
}

std::string assigned(const MeshAxes& mesh, const Slice& slice) {
  const AxisAssignment assignment = assign_axes(mesh, slice);
  std::string text;
  for (const Axis axis : all_axes) {
    text += std::string(axis_name(axis)) + ":";
    for (const PhysicalAxis physical : assignment.along(axis)) {
      text += " " + std::string(physical_axis_name(physical));
    }
    text += ";";
  }
  return text;
}

TEST(Slice, JaxGreedyOnTheMeshesOfTheBenchmark) {
  EXPECT_EQ(assigned({.fsdp = 32, .context = 4, .expert = 2}, {4, 4, 8}),
            "fsdp: y z;context: x;expert: core;");
  EXPECT_EQ(assigned({.fsdp = 32, .context = 8, .expert = 2}, {4, 8, 8}),
            "fsdp: x z;context: y;expert: core;");
  EXPECT_EQ(assigned({.fsdp = 64, .context = 8}, {4, 8, 8}), "fsdp: y z;context: x core;expert:;");
  EXPECT_EQ(assigned({.fsdp = 256}, {4, 4, 8}), "fsdp: x y z core;context:;expert:;");
}

TEST(Slice, GreedyMayFailAndSaysWhatIsLeft) {
  EXPECT_EQ(
      thrown_text<Error>([] {
        static_cast<void>(assign_axes({.fsdp = 64, .context = 2, .expert = 2}, {4, 4, 8}));
      }),
      "v7x::assign_axes: context = 2: no physical axes of slice 4x4x8 multiply to it; left: x=4, "
      "y=4, z=8");
}

TEST(Slice, AnExpertPairIsOneChipAndAnExpertGroupARingOfFour) {
  const Topology mesh({.fsdp = 32, .context = 4, .expert = 2});
  const Placement placement(mesh, {4, 4, 8});
  for (std::int64_t id = 0; id < mesh.devices(); ++id) {
    const auto pair = mesh.group_of({Axis::expert}, id);
    const PhysicalCoordinate first = placement.of(pair[0]);
    const PhysicalCoordinate second = placement.of(pair[1]);
    EXPECT_EQ(std::tuple(first.x, first.y, first.z), std::tuple(second.x, second.y, second.z));
    EXPECT_NE(first.core, second.core);
    const auto group = mesh.group_of({Axis::context, Axis::expert}, id);
    for (std::size_t member = 0; member < group.size(); ++member) {
      EXPECT_EQ(placement.of(group[member]).x, static_cast<std::int64_t>(member / 2));
      EXPECT_EQ(placement.of(group[member]).y, placement.of(id).y);
      EXPECT_EQ(placement.of(group[member]).z, placement.of(id).z);
    }
  }
  const Topology other({.fsdp = 64, .context = 8});
  const Placement pairs(other, {4, 8, 8});
  EXPECT_EQ(pairs.of(0).core, 0);
  EXPECT_EQ(pairs.of(1).core, 1);
  EXPECT_EQ(pairs.of(1).x, 0);
  EXPECT_EQ(pairs.of(2).x, 1);
}

TEST(Slice, EveryOrderIsABijection) {
  const Topology mesh({.fsdp = 32, .context = 4, .expert = 2});
  for (const DeviceOrder order : {DeviceOrder::jax_greedy, DeviceOrder::row_major}) {
    const Placement placement(mesh, {4, 4, 8}, order);
    std::set<std::array<std::int64_t, 4>> places;
    for (std::int64_t id = 0; id < mesh.devices(); ++id) {
      places.insert(placement.of(id).values());
    }
    EXPECT_EQ(places.size(), 256U);
  }
  const Placement plain(mesh, {4, 4, 8}, DeviceOrder::row_major);
  EXPECT_EQ(plain.of(1), (PhysicalCoordinate{0, 0, 0, 1}));
  EXPECT_EQ(plain.of(2), (PhysicalCoordinate{0, 0, 1, 0}));
  EXPECT_EQ(plain.of(16), (PhysicalCoordinate{0, 1, 0, 0}));
  EXPECT_EQ(plain.of(255), (PhysicalCoordinate{3, 3, 7, 1}));
}

TEST(Slice, TablesOfTheCallersOwn) {
  const Topology mesh({.context = 4, .expert = 2});
  std::vector<PhysicalCoordinate> table;
  for (std::int64_t id = 7; id >= 0; --id) {
    table.push_back({id / 4, id / 2 % 2, 0, id % 2});
  }
  const Placement placement(mesh, {2, 2, 1}, table);
  EXPECT_EQ(placement.of(0), (PhysicalCoordinate{1, 1, 0, 1}));
  const auto refused = [&] {
    return thrown_text<Error>([&] { const Placement made(mesh, {2, 2, 1}, table); });
  };
  table[5] = table[2];
  EXPECT_EQ(
      refused(),
      "v7x::Placement: table = table[5] repeats table[2]: must name every core once; none is at "
      "(0,1,0,0)");
  table[5] = {2, 0, 0, 0};
  EXPECT_EQ(refused(), "v7x::Placement: table[5] = (2,0,0,0): must lie in slice 2x2x1");
  table.pop_back();
  EXPECT_EQ(refused(), "v7x::Placement: table.size = 7: must equal devices (8)");
}

TEST(Slice, AMeshMustHaveTheSlicesDevices) {
  EXPECT_EQ(
      thrown_text<Error>([] {
        const Placement made(Topology({.fsdp = 128}), {4, 4, 8});
      }),
      "v7x::Placement: devices = 128: must equal 2 devices a chip on the 128 chips of slice 4x4x8 "
      "(256)");
  const Placement placement(Topology({.context = 4, .expert = 2}), {2, 2, 1});
  EXPECT_EQ(thrown_text<Error>([&] { static_cast<void>(placement.of(8)); }),
            "v7x::Placement::of: id = 8: must be in [0, 8)");
}

}  // namespace
}  // namespace heddle::v7x

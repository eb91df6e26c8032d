// Mutants tried: fsdp varies fastest; index_in reads the tuple from the back; nearest multiples both
// below the value.
#include "heddle/mesh/topology.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace heddle {
namespace {

const Topology benchmark_mesh({.fsdp = 32, .context = 4, .expert = 2});

TEST(Topology, IdsOfTheBenchmarkMesh) {
  EXPECT_EQ(benchmark_mesh.devices(), 256);
  EXPECT_EQ(benchmark_mesh.coordinate(0), (Coordinate{0, 0, 0}));
  EXPECT_EQ(benchmark_mesh.coordinate(1), (Coordinate{0, 0, 1}));
  EXPECT_EQ(benchmark_mesh.coordinate(2), (Coordinate{0, 1, 0}));
  EXPECT_EQ(benchmark_mesh.coordinate(8), (Coordinate{1, 0, 0}));
  EXPECT_EQ(benchmark_mesh.coordinate(255), (Coordinate{31, 3, 1}));
  for (std::int64_t id = 0; id < benchmark_mesh.devices(); ++id) {
    EXPECT_EQ(benchmark_mesh.id(benchmark_mesh.coordinate(id)), id);
  }
}

TEST(Topology, GroupsOfDevice11) {
  using Ids = std::vector<std::int64_t>;
  EXPECT_EQ(benchmark_mesh.group_of({Axis::expert}, 11), (Ids{10, 11}));
  EXPECT_EQ(benchmark_mesh.group_of({Axis::context}, 11), (Ids{9, 11, 13, 15}));
  EXPECT_EQ(benchmark_mesh.group_of({Axis::context, Axis::expert}, 11),
            (Ids{8, 9, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(benchmark_mesh.group_of({Axis::expert, Axis::context}, 11),
            (Ids{8, 10, 12, 14, 9, 11, 13, 15}));
  EXPECT_EQ(benchmark_mesh.group_of({Axis::fsdp}, 11).front(), 3);
  EXPECT_EQ(benchmark_mesh.group_of({Axis::fsdp}, 11).back(), 251);
  EXPECT_EQ(benchmark_mesh.group_of({}, 11), (Ids{11}));
}

TEST(Topology, IndexInAGroupIsThePlaceInItsList) {
  const Topology mesh({.fsdp = 3, .context = 2, .expert = 4});
  const std::vector<AxisTuple> tuples = {{},
                                         {Axis::fsdp},
                                         {Axis::expert, Axis::fsdp},
                                         {Axis::context, Axis::expert},
                                         {Axis::fsdp, Axis::context, Axis::expert},
                                         {Axis::expert, Axis::context, Axis::fsdp}};
  for (const AxisTuple& tuple : tuples) {
    for (std::int64_t id = 0; id < mesh.devices(); ++id) {
      const auto group = mesh.group_of(tuple, id);
      EXPECT_EQ(group.at(static_cast<std::size_t>(mesh.index_in(tuple, id))), id);
    }
  }
}

TEST(Topology, RefusesWhatIsNotThere) {
  EXPECT_THROW(Topology({.fsdp = 0}), Error);
  EXPECT_THROW(static_cast<void>(benchmark_mesh.coordinate(256)), Error);
  EXPECT_THROW(static_cast<void>(benchmark_mesh.coordinate(-1)), Error);
  EXPECT_THROW(static_cast<void>(benchmark_mesh.id({.fsdp = 32})), Error);
}

TEST(Topology, ANumberOfDevicesMustBeTheProduct) {
  const MeshAxes axes{.fsdp = 32, .context = 4, .expert = 2};
  EXPECT_EQ(Topology(axes, 256).devices(), 256);
  try {
    const Topology mesh(axes, 512);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "Topology: devices = 512: must equal the product of fsdp=32,context=4,expert=2 (256)");
  }
}

TEST(Topology, AGroupIsNamedByItsLeastDevice) {
  EXPECT_EQ(benchmark_mesh.least_in_group({Axis::expert}, 11), 10);
  EXPECT_EQ(benchmark_mesh.least_in_group({Axis::context}, 11), 9);
  EXPECT_EQ(benchmark_mesh.least_in_group({Axis::expert, Axis::context}, 11), 8);
  EXPECT_EQ(benchmark_mesh.least_in_group({}, 11), 11);
  EXPECT_EQ((Coordinate{1, 2, 3}.with(Axis::context, 0)), (Coordinate{1, 0, 3}));
}

std::string refusal(std::int64_t value, const AxisTuple& axes) {
  try {
    require_divisible("rows", value, benchmark_mesh.axes(), axes);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Topology, DivisibilityNamesAxesProductAndBothNeighbours) {
  EXPECT_EQ(refusal(64, {Axis::fsdp, Axis::expert}), "accepted");
  EXPECT_EQ(refusal(70, {Axis::fsdp, Axis::expert}),
            "mesh: rows = 70: is not divisible by fsdp=32 x expert=2 (= 64), remainder 6; "
            "nearest: 64, 128");
  EXPECT_EQ(refusal(3, {Axis::context}),
            "mesh: rows = 3: is not divisible by context=4 (= 4), remainder 3; nearest: 4");
  EXPECT_EQ(refusal(0, {Axis::context}), "accepted");
}

TEST(Topology, DivisibilityMayHaveAFactorAndANote) {
  try {
    require_divisible("sequence", 12, {.context = 4}, {Axis::context}, 2, "chunks", "two a rank");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "mesh: sequence = 12: is not divisible by context=4 x chunks=2 (= 8), remainder 4; "
        "nearest: 8, 16; two a rank");
  }
}

}  // namespace
}  // namespace heddle

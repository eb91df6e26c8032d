// Mutants tried: repeated axis accepted; size 0 accepted; "fsdp=2," accepted; (context, expert) sized
// as (expert, context) is the same product, so the order is tested in topology_test.
#include "heddle/mesh/axes.hpp"

#include <string>

#include <gtest/gtest.h>

namespace heddle {
namespace {

std::string refusal(std::string_view text) {
  try {
    static_cast<void>(parse_axes(text));
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Axes, ReadsNamedSizesInAnyOrderAndDefaultsToOne) {
  EXPECT_EQ(parse_axes("fsdp=2,context=4,expert=3"),
            (MeshAxes{.fsdp = 2, .context = 4, .expert = 3}));
  EXPECT_EQ(parse_axes("expert=3,fsdp=2"), (MeshAxes{.fsdp = 2, .expert = 3}));
  EXPECT_EQ(parse_axes(""), MeshAxes{});
}

TEST(Axes, PrintsWhatItReads) {
  const MeshAxes mesh{.fsdp = 32, .context = 4, .expert = 2};
  EXPECT_EQ(to_string(mesh), "fsdp=32,context=4,expert=2");
  EXPECT_EQ(parse_axes(to_string(mesh)), mesh);
  EXPECT_EQ(mesh.devices(), 256);
}

TEST(Axes, RefusalsNameTheTextAndTheRule) {
  EXPECT_EQ(refusal("32x4x2"),
            "parse_axes: mesh = 32x4x2: must be written fsdp=F,context=C,expert=X");
  EXPECT_EQ(refusal("fsdp=0"), "parse_axes: fsdp = 0: must be a whole number of devices >= 1");
  EXPECT_EQ(refusal("fsdp=2x"), "parse_axes: fsdp = 2x: must be a whole number of devices >= 1");
  EXPECT_EQ(refusal("context=-1"),
            "parse_axes: context = -1: must be a whole number of devices >= 1");
  EXPECT_EQ(refusal("expert="), "parse_axes: expert = : must be a whole number of devices >= 1");
  EXPECT_EQ(refusal("data=2"), "parse_axes: mesh = data=2: axes are fsdp, context and expert");
  EXPECT_EQ(refusal("fsdp=2,fsdp=2"), "parse_axes: mesh = fsdp=2,fsdp=2: must name each axis once");
  EXPECT_EQ(refusal("fsdp=2,"), "parse_axes: mesh = fsdp=2,: must not end in a comma");
  EXPECT_EQ(refusal("fsdp=65536,context=65536"),
            "parse_axes: mesh = fsdp=65536,context=65536: must have at most 2^31 - 1 devices");
  EXPECT_EQ(refusal("fsdp=99999999999999999999"),
            "parse_axes: fsdp = 99999999999999999999: must be a whole number of devices >= 1");
}

TEST(Axes, ATupleIsOrderedAndNamesEachAxisOnce) {
  const AxisTuple group{Axis::context, Axis::expert};
  EXPECT_EQ(to_string(group), "(context, expert)");
  EXPECT_EQ(to_string(AxisTuple{}), "()");
  EXPECT_EQ(group.size({.fsdp = 5, .context = 4, .expert = 2}), 8);
  EXPECT_EQ(AxisTuple{}.size({.fsdp = 5}), 1);
  EXPECT_TRUE(group.contains(Axis::expert));
  EXPECT_FALSE(group.contains(Axis::fsdp));
  EXPECT_THROW((AxisTuple{Axis::fsdp, Axis::fsdp}), Error);
}

}  // namespace
}  // namespace heddle

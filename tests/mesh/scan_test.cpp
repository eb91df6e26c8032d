// Mutants tried: inclusive; operands swapped; identity combined with x_0; the reverse scan mirrors only the
// indices of the outputs; regrouped as a tree.
#include "heddle/mesh/scan.hpp"

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "mesh/device_arrays.hpp"
#include "support/compare.hpp"

namespace heddle {
namespace {

using test::of;
using test::PerDevice;

/// (m2, s2) after (m1, s1) is (m2 m1, m2 s1 + s2): not commutative, and in float not associative.
void compose(std::span<const float> earlier, std::span<const float> later,
             std::span<float> result) {
  result[0] = later[0] * earlier[0];
  result[1] = later[0] * earlier[1] + later[1];
}

const std::vector<float> unit = {1, 0};

TEST(Scan, CombinesWhatStandsBeforeInOrder) {
  for (const MeshAxes& axes : test::small_meshes()) {
    for (const AxisTuple& tuple : test::some_tuples()) {
      for (const auto direction : {mesh::ScanDirection::forward, mesh::ScanDirection::reverse}) {
        LocalMesh mesh(axes);
        const auto inputs = test::random_inputs<float>(mesh.topology(), 2, 37);
        PerDevice<float> outputs(inputs.size(), std::vector<float>(2, test::poison<float>()));
        mesh.run([&](auto& device) {
          mesh::exclusive_scan(device, tuple, of(inputs, device.id()), unit,
                               std::span(of(outputs, device.id())), compose, direction);
        });
        for (std::int64_t id = 0; id < mesh.topology().devices(); ++id) {
          auto ids = mesh.topology().group_of(tuple, id);
          if (direction == mesh::ScanDirection::reverse) {
            ids = {ids.rbegin(), ids.rend()};
          }
          std::vector<float> expected = unit;
          for (std::size_t place = 0; ids[place] != id; ++place) {
            const std::vector<float> before = expected;
            if (place == 0) {
              expected = of(inputs, ids[0]);
            } else {
              compose(before, of(inputs, ids[place]), expected);
            }
          }
          ASSERT_TRUE(test::same_bits(of(outputs, id), expected)) << to_string(axes);
        }
        require_balanced(mesh.ledger());
      }
    }
  }
}

TEST(Scan, ByHandInBothDirections) {
  LocalMesh mesh({.context = 3});
  PerDevice<float> forward(3, std::vector<float>(2));
  PerDevice<float> reverse = forward;
  const PerDevice<float> inputs = {{2, 1}, {3, 5}, {7, 11}};
  mesh.run([&](auto& device) {
    const auto& own = of(inputs, device.id());
    mesh::exclusive_scan(device, {Axis::context}, own, unit, std::span(of(forward, device.id())),
                         compose);
    mesh::exclusive_scan(device, {Axis::context}, own, unit, std::span(of(reverse, device.id())),
                         compose, mesh::ScanDirection::reverse);
  });
  EXPECT_EQ(forward, (PerDevice<float>{{1, 0}, {2, 1}, {6, 8}}));
  EXPECT_EQ(reverse, (PerDevice<float>{{21, 38}, {7, 11}, {1, 0}}));
}

TEST(Scan, NeverRegroups) {
  LocalMesh mesh({.context = 5});
  const std::vector<float> values = {1e8F, 1, -1e8F, 1, 0};
  std::vector<float> before(5);
  mesh.run([&](auto& device) {
    const auto id = static_cast<std::size_t>(device.id());
    const std::vector<float> own = {values[id]};
    const std::vector<float> zero = {0};
    mesh::exclusive_scan(
        device, {Axis::context}, own, zero, std::span(before).subspan(id, 1),
        [](auto earlier, auto later, auto result) { result[0] = earlier[0] + later[0]; });
  });
  EXPECT_EQ(before, (std::vector<float>{0, 1e8F, 1e8F, 0, 1}));
}

TEST(Scan, WhatCombineThrowsStopsTheMesh) {
  EXPECT_EQ(test::run_text<std::runtime_error>({.context = 4},
                                               [](auto& device) {
                                                 const std::vector<float> x(1);
                                                 std::vector<float> out(1);
                                                 mesh::exclusive_scan(
                                                     device, {Axis::context}, x, x, std::span(out),
                                                     [](auto, auto, auto) {
                                                       throw std::runtime_error("singular");
                                                     });
                                               }),
            "singular");
}

TEST(Scan, RefusalsNameWhatIsWrong) {
  const auto scanned = [](std::size_t in_size, std::size_t identity_size, std::size_t out_size,
                          mesh::ScanDirection direction) {
    return test::run_text<Error>({.context = 2}, [&](auto& device) {
      const std::vector<float> in(in_size);
      const std::vector<float> identity(identity_size);
      std::vector<float> out(out_size);
      mesh::exclusive_scan(device, {Axis::context}, in, identity, std::span(out), compose,
                           direction);
    });
  };
  const auto forward = mesh::ScanDirection::forward;
  EXPECT_EQ(scanned(2, 3, 2, forward),
            "mesh::exclusive_scan: identity.size = 3: must equal in.size (2)");
  EXPECT_EQ(scanned(2, 2, 1, forward),
            "mesh::exclusive_scan: out.size = 1: must equal in.size (2)");
  EXPECT_EQ(scanned(2, 2, 2, static_cast<mesh::ScanDirection>(5)),
            "mesh::exclusive_scan: direction = 5: must be forward or reverse");
}

}  // namespace
}  // namespace heddle

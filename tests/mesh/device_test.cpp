// Mutants tried: no check for tasks; an arena of all threads whatever workers says; the ledger of another
// device.
#include "heddle/mesh/device.hpp"

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <oneapi/tbb/task_arena.h>

#include "heddle/core/parallel.hpp"
#include "heddle/mesh/collectives.hpp"
#include "mesh/device_arrays.hpp"

namespace heddle {
namespace {

TEST(Device, KnowsWhereItStands) {
  LocalMesh mesh({.fsdp = 2, .context = 3, .expert = 2});
  mesh.run([](MeshDevice& device) {
    const Coordinate at = mesh::coordinate(device);
    EXPECT_EQ(device.id(), (at.fsdp * 3 + at.context) * 2 + at.expert);
    EXPECT_EQ(mesh::axis_size(device, {Axis::context, Axis::expert}), 6);
    EXPECT_EQ(mesh::axis_index(device, {Axis::expert, Axis::context}), at.expert * 3 + at.context);
    EXPECT_EQ(mesh::axis_index(device, {}), 0);
    EXPECT_EQ(mesh::axis_size(device, {}), 1);
    mesh::expect_group_size(device, {Axis::fsdp}, 2);
  });
  EXPECT_EQ(test::run_text<Error>(
                {.fsdp = 2},
                [](MeshDevice& device) { mesh::expect_group_size(device, {Axis::fsdp}, 4); }),
            "mesh: members of (fsdp) = 2: must equal the expected group size (4)");
}

TEST(Device, ParallelLoopsRunInsideAndCollectivesOutsideThem) {
  LocalMesh mesh({.fsdp = 4});
  std::vector<std::int64_t> sums(4);
  mesh.run([&](MeshDevice& device) {
    std::vector<std::int64_t> squares(100);
    parallel_tasks(
        100, [&](std::int64_t task) { squares[static_cast<std::size_t>(task)] = task * task; });
    std::int64_t sum = device.id();
    for (const std::int64_t square : squares) {
      sum += square;
    }
    const std::span<std::int64_t> own(&sum, 1);
    mesh::all_reduce(device, {Axis::fsdp}, own, own);
    sums[static_cast<std::size_t>(device.id())] = sum;
  });
  EXPECT_EQ(sums, std::vector<std::int64_t>(4, 4 * 328350 + 6));
}

TEST(Device, ACollectiveInsideATaskIsRefused) {
  const std::string text = test::run_text<Error>({.fsdp = 1}, [](MeshDevice& device) {
    parallel_tasks(64, [&](std::int64_t) { mesh::barrier(device, {Axis::fsdp}); });
  });
  EXPECT_TRUE(
      text ==
          "mesh: barrier = called inside a oneTBB task: a collective must stand outside "
          "every parallel loop" ||
      text ==
          "mesh: barrier = called from a foreign thread: a collective must be called by its "
          "device's own thread")
      << text;
}

TEST(Device, WorkersAreTheDevicesOwnArenaAndChangeNoBit) {
  std::vector<float> first;
  for (const int workers : {1, 3}) {
    LocalMesh mesh({.fsdp = 2}, {.workers = workers});
    std::vector<float> sums(2);
    mesh.run([&](MeshDevice& device) {
      EXPECT_EQ(oneapi::tbb::this_task_arena::max_concurrency(), workers);
      std::vector<float> partials(37);
      parallel_tasks(37, [&](std::int64_t task) {
        partials[static_cast<std::size_t>(task)] =
            1.0F / static_cast<float>(1 + task + 100 * device.id());
      });
      float sum = 0;
      for (const float partial : partials) {
        sum += partial;
      }
      const std::span<float> own(&sum, 1);
      mesh::all_reduce(device, {Axis::fsdp}, own, own);
      sums[static_cast<std::size_t>(device.id())] = sum;
    });
    first = first.empty() ? sums : first;
    EXPECT_EQ(sums, first);
  }
}

TEST(Device, WritesItsOwnLedgerUnderItsOwnLabels) {
  LocalMesh mesh({.fsdp = 2});
  mesh.run([](MeshDevice& device) {
    const LedgerScope scope(device.ledger(), Phase::backward,
                            "layer of device " + std::to_string(device.id()));
    mesh::barrier(device, {Axis::fsdp}, {"kernel.cpp", 12});
  });
  const auto& records = mesh.ledger().records();
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[1].device, 1);
  EXPECT_EQ(records[1].label, "layer of device 1");
  EXPECT_EQ(records[1].phase, Phase::backward);
  EXPECT_EQ(to_string(records[1].site), "kernel.cpp:12");
  EXPECT_EQ(records[1].axes, (AxisTuple{Axis::fsdp}));
  EXPECT_EQ(records[1].group, 0);
}

}  // namespace
}  // namespace heddle

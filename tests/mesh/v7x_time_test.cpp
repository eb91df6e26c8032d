// Mutants tried: bytes of a shared chip counted twice; those of two groups counted once; half rings priced
// as rings; all_reduce as one gather; the torus's long way round; a permuted order priced like its
// original; the mean over devices in place of the slowest.
#include "heddle/mesh/v7x_time.hpp"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/thrown_text.hpp"

namespace heddle::v7x {
namespace {

const MeshAxes axes{.fsdp = 32, .context = 4, .expert = 2};
const AxisTuple experts = {Axis::context, Axis::expert};
constexpr AxisTuple all = {Axis::fsdp, Axis::context, Axis::expert};
constexpr DataType bf16 = data_type<bfloat16>();
constexpr DataType f32 = data_type<float>();

const Placement& benchmark_placement() {
  static const Placement placement(Topology(axes), {4, 4, 8});
  return placement;
}

TEST(V7xTime, GroupsOfTheBenchmarkMesh) {
  const GroupShape ring = group_shape(benchmark_placement(), experts, 11);
  EXPECT_EQ(ring.chips, (std::array<std::int64_t, 3>{4, 1, 1}));
  EXPECT_EQ(ring.cores, 2);
  EXPECT_TRUE(ring.is_box);
  EXPECT_TRUE(ring.is_closed);
  EXPECT_EQ(ring.diameter, 2);
  const GroupShape plane = group_shape(benchmark_placement(), {Axis::fsdp}, 11);
  EXPECT_EQ(plane.ici_axes(), 2);
  EXPECT_EQ(plane.cores, 1);
  EXPECT_EQ(plane.diameter, 2 + 4);
  const GroupShape pair = group_shape(benchmark_placement(), {Axis::expert}, 11);
  EXPECT_EQ(pair.ici_axes(), 0);
  EXPECT_EQ(pair.cores, 2);
}

TEST(V7xTime, HopsTakeTheShortWayRoundWhereRingsClose) {
  EXPECT_EQ(hops({4, 4, 8}, {0, 0, 0}, {3, 1, 5}), 1 + 1 + 3);
  EXPECT_EQ(hops({2, 4, 4}, {0, 0, 0}, {1, 3, 3}), 1 + 3 + 3);
}

TEST(V7xTime, ByHandOnOneHost) {
  // 2x2x1 does not wrap: a pair of chips is a line of one link, and each of its cores is in a group of its
  // own, so 2 * 1 * bytes enter a chip over one axis.
  const Placement placement(Topology({.fsdp = 2, .context = 2, .expert = 2}), {2, 2, 1});
  const auto record = planned(placement.mesh(), {.op = Collective::all_gather,
                                                 .axes = {Axis::context},
                                                 .count = 90'000'000,
                                                 .type = data_type<std::uint8_t>()});
  EXPECT_DOUBLE_EQ(collective_time(placement, record).value, 2 * 90e6 / 90e9);
  // Both cores of a chip (greedily expert took x): nothing crosses a link, 2 * bytes the middle.
  const auto pair = planned(placement.mesh(), {.op = Collective::all_gather,
                                               .axes = {Axis::fsdp},
                                               .count = 1'200'000'000,
                                               .type = data_type<std::uint8_t>()});
  EXPECT_DOUBLE_EQ(collective_time(placement, pair).value, 2e-3);
  // Nothing to move still takes the hops.
  const auto nothing =
      planned(placement.mesh(), {.op = Collective::all_gather, .axes = all, .type = f32});
  EXPECT_DOUBLE_EQ(collective_time(placement, nothing).value, 2e-6);
}

TEST(V7xTime, FactorsBetweenTheCollectives) {
  const auto time = [](Collective op, std::int64_t count, std::int64_t argument = 0) {
    return collective_time(
               benchmark_placement(),
               planned(
                   Topology(axes),
                   {.op = op, .axes = experts, .count = count, .type = f32, .argument = argument}))
        .value;
  };
  const std::int64_t n = 1 << 24;
  const double gather = time(Collective::all_gather, n);
  EXPECT_DOUBLE_EQ(gather, 6.0 * 4 * static_cast<double>(n) / 180e9);
  EXPECT_DOUBLE_EQ(time(Collective::reduce_scatter, n), gather);
  EXPECT_DOUBLE_EQ(time(Collective::all_reduce, 8 * n), 2 * gather);
  EXPECT_DOUBLE_EQ(time(Collective::all_to_all, n), gather / 4);
  EXPECT_DOUBLE_EQ(time(Collective::broadcast, 8 * n), gather);
  EXPECT_DOUBLE_EQ(time(Collective::broadcast, 8 * n, 3), gather);
  EXPECT_DOUBLE_EQ(time(Collective::shift, n, 1), 4 * static_cast<double>(n) / 90e9);
  EXPECT_DOUBLE_EQ(time(Collective::exclusive_scan, n),
                   7 * (4 * static_cast<double>(n) / 90e9 + 1e-6));
  EXPECT_DOUBLE_EQ(time(Collective::barrier, 0), 2e-6);
}

TEST(V7xTime, OneMemberTakesNoTime) {
  const auto record =
      planned(Topology(axes), {.op = Collective::all_gather, .count = 5, .type = f32});
  EXPECT_EQ(collective_time(benchmark_placement(), record).value, 0);
}

/// Bytes of one device and seconds of a whole micro-batch of the 397B model: 60 layers.
struct MicroBatch {
  double gigabytes = 0;
  double seconds = 0;
};

MicroBatch repeated(const MeshAxes& mesh, const Slice& slice, const PlannedCall& call,
                    double times) {
  const Placement placement(Topology(mesh), slice);
  const TrafficRecord record = planned(placement.mesh(), call);
  return {times * static_cast<double>(record.bytes.wire_bytes) / 1e9,
          times * collective_time(placement, record).value};
}

TEST(V7xTime, CommunicationOfAMicroBatch) {
  struct Mesh {
    MeshAxes axes;
    Slice slice;
    double expert_weights, ring, dense, logits;
  };
  const std::vector<Mesh> meshes = {
      {axes, {4, 4, 8}, 280.9, 225.5, 46.4, 14.1},
      {{.fsdp = 32, .context = 8, .expert = 2}, {4, 8, 8}, 140.4, 241.6, 46.5, 15.1},
      {{.fsdp = 64, .context = 8}, {4, 8, 8}, 285.4, 112.7, 46.5, 7.05}};
  for (const Mesh& each : meshes) {
    const std::int64_t group = experts.size(each.axes);
    const std::int64_t tokens = 65536 / each.axes.context;
    // Weights: gathered in forward and backward, and reduce-scattered once.
    const auto weights =
        repeated(each.axes, each.slice,
                 {.op = Collective::all_gather,
                  .axes = {Axis::fsdp},
                  .count = std::int64_t{512} / group * 3 * 4096 * 1024 / each.axes.fsdp,
                  .type = bf16},
                 3 * 60);
    EXPECT_NEAR(weights.gigabytes, each.expert_weights, 0.06);
    const auto ring = repeated(
        each.axes, each.slice,
        {.op = Collective::all_gather, .axes = experts, .count = tokens * 4096, .type = bf16},
        4 * 60);
    EXPECT_NEAR(ring.gigabytes, each.ring, 0.06);
    const std::int64_t dense = 45 * std::int64_t{118010000} + 15 * std::int64_t{104860000} +
                               60 * std::int64_t{12590000} + 60 * std::int64_t{2100000};
    const auto dense_weights = repeated(each.axes, each.slice,
                                        {.op = Collective::all_gather,
                                         .axes = all,
                                         .count = dense / Topology(each.axes).devices(),
                                         .type = bf16},
                                        3);
    EXPECT_NEAR(dense_weights.gigabytes, each.dense, 0.06);
    const auto logits = repeated(
        each.axes, each.slice,
        {.op = Collective::all_gather, .axes = experts, .count = tokens * 512, .type = f32}, 60);
    EXPECT_NEAR(logits.gigabytes, each.logits, 0.06);
    if (each.axes == axes) {
      EXPECT_NEAR(weights.seconds, 1.56, 0.005);
      EXPECT_NEAR(ring.seconds, 1.07, 0.005);
      EXPECT_NEAR(dense_weights.seconds, 0.09, 0.005);
    }
  }
}

TEST(V7xTime, WhereTheCoreAxisGoesIsPaidForElsewhere) {
  // The experts on the core axis: both cores hold other experts, 3.12 GB of weights a layer enter a chip,
  // and 0.805 GB of tokens.
  const std::int64_t shard = std::int64_t{64} * 3 * 4096 * 1024 / 32 * 2;
  const std::int64_t tokens = std::int64_t{16384} * 4096 * 2;
  const auto entering = [](const GroupShape& shape, std::int64_t members, std::int64_t bytes) {
    return gather_time(shape, members, static_cast<double>(bytes)).value *
           (shape.is_closed ? 180e9 : 90e9) * static_cast<double>(shape.ici_axes());
  };
  EXPECT_NEAR(entering(group_shape(benchmark_placement(), {Axis::fsdp}, 0), 32, shard), 3.12e9,
              0.005e9);
  EXPECT_NEAR(entering(group_shape(benchmark_placement(), experts, 0), 8, tokens), 0.805e9,
              0.005e9);
  // fsdp on the core axis instead: 1.51 GB and, over a ring of 8 chips, 1.88 GB.
  const GroupShape fsdp{.chips = {4, 4, 1}, .cores = 2};
  const GroupShape ring{.chips = {1, 1, 8}, .cores = 1};
  EXPECT_NEAR(entering(fsdp, 32, shard), 1.51e9, 0.005e9);
  EXPECT_NEAR(entering(ring, 8, tokens), 1.88e9, 0.005e9);
}

TEST(V7xTime, APermutedOrderCostsMoreAndIsNoBox) {
  const Topology mesh(axes);
  std::vector<PhysicalCoordinate> table;
  for (std::int64_t id = 0; id < mesh.devices(); ++id) {
    table.push_back(benchmark_placement().of(id));
  }
  heddle::test::Random random(3);
  for (std::size_t i = table.size() - 1; i > 0; --i) {
    std::swap(table[i],
              table[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i)))]);
  }
  const Placement shuffled(mesh, {4, 4, 8}, table);
  EXPECT_FALSE(group_shape(shuffled, experts, 0).is_box);
  const auto record = planned(
      mesh, {.op = Collective::all_gather, .axes = experts, .count = 1 << 24, .type = bf16});
  EXPECT_GT(collective_time(shuffled, record).value,
            1.2 * collective_time(benchmark_placement(), record).value);
  // Row-major puts a context rank's pair on one chip as well, but the ring on the z axis's half.
  const Placement plain(mesh, {4, 4, 8}, DeviceOrder::row_major);
  const GroupShape half = group_shape(plain, experts, 0);
  EXPECT_TRUE(half.is_box);
  EXPECT_FALSE(half.is_closed);
  EXPECT_EQ(half.diameter, 3);
  EXPECT_DOUBLE_EQ(collective_time(plain, record).value,
                   2 * collective_time(benchmark_placement(), record).value);
}

TEST(V7xTime, APhaseIsTheSlowestDevicesSum) {
  const Topology mesh(axes);
  const PlannedCall call{.op = Collective::shift,
                         .axes = {Axis::context},
                         .count = 90'000'000,
                         .type = data_type<std::uint8_t>(),
                         .argument = 1,
                         .phase = Phase::backward};
  PlannedCall other = call;
  other.device = 9;
  TrafficRecord first = planned(mesh, other);
  TrafficRecord second = first;
  second.sequence = 1;
  const Ledger ledger({planned(mesh, call), first, second});
  const PhaseTime whole = phase_time(benchmark_placement(), ledger, {0.5e-3});
  EXPECT_DOUBLE_EQ(whole.communication.value, 2e-3);
  EXPECT_DOUBLE_EQ(whole.serial.value, 2.5e-3);
  EXPECT_DOUBLE_EQ(whole.overlapped.value, 2e-3);
  EXPECT_DOUBLE_EQ(
      phase_time(benchmark_placement(), ledger, {3e-3}, Phase::backward).overlapped.value, 3e-3);
  EXPECT_EQ(phase_time(benchmark_placement(), ledger, {0}, Phase::forward).serial.value, 0);
}

}  // namespace
}  // namespace heddle::v7x

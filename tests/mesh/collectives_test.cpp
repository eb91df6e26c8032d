// Mutants tried: G = 1 skips the checks or the ledger; an empty tuple refused; the denominator summed over
// devices that hold the same rows; the expert gradient divided by the group size; all_reduce applied to a
// replicated cotangent.
#include "heddle/mesh/collectives.hpp"

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

const auto adds = [](auto earlier, auto later, auto result) {
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = earlier[i] + later[i];
  }
};

TEST(Collectives, OneMemberAndNoAxesAreAnIdentityThatIsStillRecorded) {
  for (const AxisTuple& tuple : {AxisTuple{}, AxisTuple{Axis::context}}) {
    LocalMesh mesh({.fsdp = 2});
    mesh.run([&](MeshDevice& device) {
      const std::vector<float> in = {1, -0.0F, 3};
      const std::vector<float> unit(3, 7.0F);
      const std::vector<std::int64_t> all = {3};
      std::vector<float> out(3, test::poison<float>());
      const auto holds_input = [&] {
        const bool same = static_cast<bool>(test::same_bits(out, in));
        out.assign(3, test::poison<float>());
        return same;
      };
      const std::span<float> o(out);
      mesh::all_gather(device, tuple, in, o);
      EXPECT_TRUE(holds_input());
      std::vector<std::int64_t> offsets(2);
      mesh::all_gather_v(device, tuple, in, o, std::span(offsets));
      EXPECT_TRUE(holds_input());
      mesh::reduce_scatter(device, tuple, in, o);
      EXPECT_TRUE(holds_input());
      mesh::reduce_scatter_v(device, tuple, all, in, o);
      EXPECT_TRUE(holds_input());
      mesh::all_reduce(device, tuple, in, o);
      EXPECT_TRUE(holds_input());
      mesh::shift(device, tuple, 5, in, o);
      EXPECT_TRUE(holds_input());
      mesh::all_to_all(device, tuple, in, o);
      EXPECT_TRUE(holds_input());
      std::vector<std::int64_t> received(1);
      mesh::all_to_all_v(device, tuple, in, all, o, std::span(received));
      EXPECT_TRUE(holds_input());
      mesh::permute(device, tuple, std::vector<mesh::Move>{{.from = 0, .to = 0}}, in, o);
      EXPECT_TRUE(holds_input());
      out = in;
      mesh::broadcast(device, tuple, 0, o);
      EXPECT_TRUE(holds_input());
      mesh::exclusive_scan(device, tuple, in, unit, o, adds);
      EXPECT_EQ(out, unit);
      mesh::barrier(device, tuple);
    });
    EXPECT_EQ(mesh.ledger().count({.device = 1}), 12);
    EXPECT_EQ(mesh.ledger().sum({}).wire_bytes, 0);
    EXPECT_EQ(mesh.ledger().sum({}).sent_bytes, 0);
    require_balanced(mesh.ledger());
    EXPECT_EQ(test::run_text<Error>({.fsdp = 2},
                                    [&](MeshDevice& device) {
                                      std::vector<float> x(3), y(4);
                                      mesh::all_gather(device, tuple, x, std::span(y));
                                    }),
              "mesh::all_gather: out.size = 4: must equal members * in.size (3)");
  }
}

TEST(Collectives, NothingToMoveIsStillARendezvous) {
  LocalMesh mesh({.fsdp = 2});
  std::atomic<int> arrived = 0;
  mesh.run([&](MeshDevice& device) {
    std::vector<float> none;
    ++arrived;
    mesh::all_gather(device, {Axis::fsdp}, none, std::span(none));
    EXPECT_EQ(arrived, 2);
    mesh::reduce_scatter(device, {Axis::fsdp}, none, std::span(none));
    mesh::all_reduce(device, {Axis::fsdp}, none, std::span(none));
    mesh::all_to_all(device, {Axis::fsdp}, none, std::span(none));
    mesh::exclusive_scan(device, {Axis::fsdp}, none, none, std::span(none), adds);
  });
  EXPECT_EQ(mesh.ledger().count({}), 10);
}

TEST(Collectives, UnknownAxesAreRefusedBeforeAnythingMoves) {
  EXPECT_EQ(test::thrown_text<Error>([] { static_cast<void>(AxisTuple{static_cast<Axis>(3)}); }),
            "AxisTuple: axes = 3: must be fsdp, context or expert");
}

TEST(Collectives, ShuffledArrivalGivesTheSameBits) {
  const MeshAxes axes{.fsdp = 4, .context = 2};
  const auto inputs = test::random_inputs<float>(Topology(axes), 9, 47);
  PerDevice<float> first;
  for (const std::int64_t rotation : {0, 3, 5}) {
    LocalMesh mesh(axes, {.tokens = 8});
    PerDevice<float> outputs(inputs.size(), std::vector<float>(9));
    mesh.run([&](MeshDevice& device) {
      std::this_thread::sleep_for(std::chrono::milliseconds((device.id() + rotation) % 8));
      mesh::all_reduce(device, test::world, of(inputs, device.id()),
                       std::span(of(outputs, device.id())));
    });
    first = first.empty() ? outputs : first;
    EXPECT_EQ(outputs, first);
  }
}

/// Loss = sum over tokens of weight * x_t / (number of tokens), tokens split over every device; the
/// gradient of the replicated weight is a sum over tokens too.
struct LossAndGradient {
  float loss = 0;
  float gradient = 0;
};

enum class Mistake { none, reduces_the_cotangent_again, divides_by_each_devices_count };

LossAndGradient trained(const MeshAxes& axes, Mistake mistake = Mistake::none) {
  // 24 tokens whose sums are exact in float, in devices of unequal use: padding at the end.
  constexpr std::int64_t tokens = 24;
  constexpr std::int64_t real = 17;
  LocalMesh mesh(axes);
  std::vector<LossAndGradient> results(static_cast<std::size_t>(mesh.topology().devices()));
  mesh.run([&](MeshDevice& device) {
    const std::int64_t share = tokens / mesh.topology().devices();
    float sum = 0;
    float count = 0;
    for (std::int64_t t = device.id() * share; t < (device.id() + 1) * share; ++t) {
      if (t < real) {
        sum += static_cast<float>(t);
        count += 1;
      }
    }
    constexpr float weight = 3;
    float denominator = count;
    mesh::all_reduce(device, test::world, std::vector<float>{count}, std::span(&denominator, 1));
    if (mistake == Mistake::divides_by_each_devices_count) {
      denominator = count > 0 ? count : 1;
    }
    float loss = 0;
    mesh::all_reduce(device, test::world, std::vector<float>{weight * sum / denominator},
                     std::span(&loss, 1));
    // Backward: the loss is replicated, so its cotangent 1 reaches the local sum unchanged.
    float cotangent = 1;
    if (mistake == Mistake::reduces_the_cotangent_again) {
      mesh::all_reduce(device, test::world, std::vector<float>{cotangent},
                       std::span(&cotangent, 1));
    }
    float gradient = 0;
    mesh::all_reduce(device, test::world, std::vector<float>{cotangent * sum / denominator},
                     std::span(&gradient, 1));
    results[static_cast<std::size_t>(device.id())] = {loss, gradient};
  });
  for (const LossAndGradient& each : results) {
    EXPECT_EQ(each.loss, results[0].loss);
    EXPECT_EQ(each.gradient, results[0].gradient);
  }
  return results[0];
}

TEST(Collectives, LossAndGradientDoNotDependOnTheMesh) {
  const LossAndGradient alone = trained({});
  EXPECT_EQ(alone.loss, 24);     // 3 * (0 + ... + 16) / 17
  EXPECT_EQ(alone.gradient, 8);  // (0 + ... + 16) / 17
  for (const MeshAxes& axes :
       {MeshAxes{.context = 2}, MeshAxes{.context = 4}, MeshAxes{.fsdp = 2, .expert = 2}}) {
    const LossAndGradient split = trained(axes);
    EXPECT_NEAR(split.loss, alone.loss, 1e-5);
    EXPECT_NEAR(split.gradient, alone.gradient, 1e-5);
  }
  // The two classical mistakes are seen: the cotangent counted once a device, and a mean of means.
  const auto twice = trained({.context = 2}, Mistake::reduces_the_cotangent_again);
  EXPECT_NEAR(twice.gradient, 2 * alone.gradient, 1e-5);
  const auto means = trained({.context = 2}, Mistake::divides_by_each_devices_count);
  EXPECT_GT(std::abs(means.loss - alone.loss), 1);
}

TEST(Collectives, DenominatorsAreSummedOverTheAxesThatShardTokensAlone) {
  // Tokens are split over fsdp; the devices along expert hold the same rows.
  LocalMesh mesh({.fsdp = 3, .expert = 2});
  const std::vector<float> masked = {5, 0, 2};
  mesh.run([&](MeshDevice& device) {
    const float own = masked[static_cast<std::size_t>(mesh::axis_index(device, {Axis::fsdp}))];
    float count = 0;
    mesh::all_reduce(device, {Axis::fsdp}, std::vector<float>{own}, std::span(&count, 1));
    EXPECT_EQ(count, 7);
    float over_all = 0;
    mesh::all_reduce(device, test::world, std::vector<float>{own}, std::span(&over_all, 1));
    EXPECT_EQ(over_all, 14);  // what the mistake gives
  });
}

TEST(Collectives, ExpertGradientsDoNotScaleWithTheGroup) {
  // Every token goes to expert 0, owned by the first member of the group; its gradient is the sum over all
  // tokens of the group, for any number of members.
  for (const std::int64_t members : {1, 2, 8}) {
    LocalMesh mesh({.expert = members});
    float gradient = 0;
    mesh.run([&](MeshDevice& device) {
      const std::int64_t share = 16 / members;
      std::vector<float> tokens;
      for (std::int64_t t = 0; t < share; ++t) {
        tokens.push_back(static_cast<float>(device.id() * share + t));
      }
      std::vector<std::int64_t> send(static_cast<std::size_t>(members));
      send[0] = share;
      std::vector<std::int64_t> received(send.size());
      std::vector<float> arrived(16);
      const std::int64_t count = mesh::all_to_all_v(device, {Axis::expert}, tokens, send,
                                                    std::span(arrived), std::span(received));
      if (device.id() == 0) {
        for (std::int64_t t = 0; t < count; ++t) {
          gradient += arrived[static_cast<std::size_t>(t)];
        }
      }
    });
    EXPECT_EQ(gradient, 120) << members;
  }
}

TEST(Collectives, ANormCountsEveryParameterOnce) {
  // A dense vector sharded over fsdp alone with norm^2 20, an expert's over (expert) with norm^2 100.
  LocalMesh mesh({.fsdp = 2, .expert = 2});
  mesh.run([&](MeshDevice& device) {
    const Coordinate at = mesh::coordinate(device);
    const float dense = at.fsdp == 0 ? 4.0F : 2.0F;
    const float expert = at.expert == 0 ? 6.0F : 8.0F;
    std::vector<float> squares = {dense * dense};
    mesh::all_reduce(device, {Axis::fsdp}, squares, std::span(squares));
    std::vector<float> expert_squares = {expert * expert};
    mesh::all_reduce(device, {Axis::expert}, expert_squares, std::span(expert_squares));
    EXPECT_EQ(squares[0] + expert_squares[0], 120);
  });
}

TEST(Collectives, UntouchedRowsOfAnEmbeddingGradientAreExactlyZero) {
  // Each device scatters its tokens' cotangents into the whole index space; only then is it reduced and
  // cut, so a row that no device touched stays 0, and each row is owned once.
  LocalMesh mesh({.fsdp = 2, .context = 2});
  const std::vector<std::vector<std::size_t>> touched = {{1}, {1, 6}, {}, {6}};
  PerDevice<float> shards(4, std::vector<float>(2, test::poison<float>()));
  mesh.run([&](MeshDevice& device) {
    std::vector<float> rows(8);
    for (const std::size_t row : touched[static_cast<std::size_t>(device.id())]) {
      rows[row] += 1;
    }
    mesh::reduce_scatter(device, {Axis::fsdp, Axis::context}, rows,
                         std::span(of(shards, device.id())));
  });
  EXPECT_EQ(shards, (PerDevice<float>{{0, 2}, {0, 0}, {0, 0}, {2, 0}}));
}

}  // namespace
}  // namespace heddle

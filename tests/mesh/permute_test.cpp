// Mutants tried: shift the other way; a distance below 0 not wrapped; in-place shift without the copy;
// broadcast from id in place of index; members without a source keep their old values; a destination
// twice accepted.
#include "heddle/mesh/permute.hpp"

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

TEST(Permute, ShiftMovesRoundTheRingAndBack) {
  for (const MeshAxes& axes : test::small_meshes()) {
    for (const AxisTuple& tuple : test::some_tuples()) {
      for (const std::int64_t distance : {-7, -1, 0, 1, 2, 12}) {
        LocalMesh mesh(axes);
        const auto inputs = test::random_inputs<float>(mesh.topology(), 3, 31);
        PerDevice<float> outputs(inputs.size(), std::vector<float>(3, test::poison<float>()));
        PerDevice<float> in_place = inputs;
        PerDevice<float> back = outputs;
        mesh.run([&](auto& device) {
          auto& out = of(outputs, device.id());
          auto& own = of(in_place, device.id());
          mesh::shift(device, tuple, distance, of(inputs, device.id()), std::span(out));
          mesh::shift(device, tuple, distance, own, std::span(own));
          mesh::shift(device, tuple, -distance, out, std::span(of(back, device.id())));
        });
        const std::int64_t members = tuple.size(axes);
        for (std::int64_t id = 0; id < mesh.topology().devices(); ++id) {
          const std::int64_t own = mesh.topology().index_in(tuple, id);
          const std::int64_t source = (((own - distance) % members) + members) % members;
          const auto ids = mesh.topology().group_of(tuple, id);
          ASSERT_EQ(of(outputs, id), of(inputs, ids[static_cast<std::size_t>(source)]));
        }
        EXPECT_EQ(in_place, outputs);
        EXPECT_EQ(back, inputs);
        require_balanced(mesh.ledger());
      }
    }
  }
}

TEST(Permute, BroadcastTakesTheRootByItsIndex) {
  const AxisTuple tuple = {Axis::expert, Axis::context};
  LocalMesh mesh({.fsdp = 2, .context = 2, .expert = 2});
  for (std::int64_t root = 0; root < 4; ++root) {
    PerDevice<std::int32_t> data(8);
    mesh.run([&](auto& device) {
      auto& own = of(data, device.id());
      own.assign(2, static_cast<std::int32_t>(device.id()));
      mesh::broadcast(device, tuple, root, std::span(own));
    });
    for (std::int64_t id = 0; id < 8; ++id) {
      const auto ids = mesh.topology().group_of(tuple, id);
      const auto from = static_cast<std::int32_t>(ids[static_cast<std::size_t>(root)]);
      EXPECT_EQ(of(data, id), (std::vector<std::int32_t>(2, from)));
    }
    require_balanced(mesh.ledger());
    EXPECT_EQ(mesh.ledger().sum({}).wire_bytes, 2 * 3 * 8);
  }
}

TEST(Permute, NamedDestinationsReceiveAndOthersGetZeros) {
  LocalMesh mesh({.context = 4});
  const std::vector<mesh::Move> moves = {
      {.from = 0, .to = 2}, {.from = 0, .to = 0}, {.from = 3, .to = 1}};
  PerDevice<float> outputs(4, std::vector<float>(1, test::poison<float>()));
  mesh.run([&](auto& device) {
    const std::vector<float> own = {static_cast<float>(10 + device.id())};
    mesh::permute(device, {Axis::context}, moves, own, std::span(of(outputs, device.id())));
  });
  EXPECT_EQ(outputs, (PerDevice<float>{{10}, {13}, {10}, {0}}));
  require_balanced(mesh.ledger());
  EXPECT_EQ(mesh.ledger().sum({}).wire_bytes, 2 * 4);
  EXPECT_EQ(mesh.ledger().sum({.device = 0}).sent_bytes, 4);
}

TEST(Permute, NoMovesAndNothingToMove) {
  LocalMesh mesh({.context = 2});
  PerDevice<float> outputs(2, std::vector<float>(2, test::poison<float>()));
  mesh.run([&](auto& device) {
    const std::vector<float> own = {1, 2};
    std::vector<float> none;
    mesh::permute(device, {Axis::context}, {}, own, std::span(of(outputs, device.id())));
    mesh::shift(device, {Axis::context}, 1, none, std::span(none));
    mesh::broadcast(device, {Axis::context}, 1, std::span(none));
  });
  EXPECT_EQ(outputs, (PerDevice<float>{{0, 0}, {0, 0}}));
}

TEST(Permute, RefusalsNameWhatIsWrong) {
  const auto moved = [](std::vector<mesh::Move> moves) {
    return test::run_text<Error>({.context = 2}, [&](auto& device) {
      const std::vector<float> in(1);
      std::vector<float> out(1);
      mesh::permute(device, {Axis::context}, moves, in, std::span(out));
    });
  };
  EXPECT_EQ(moved({{.from = 0, .to = 1}, {.from = 1, .to = 1}}),
            "mesh::permute: moves[1].to = 1: must be a destination only once");
  EXPECT_EQ(moved({{.from = 2, .to = 1}}), "mesh::permute: moves[0].from = 2: must be in [0, 2)");
  EXPECT_EQ(moved({{.from = 0, .to = -1}}), "mesh::permute: moves[0].to = -1: must be in [0, 2)");
  for (const std::int64_t root : {-1, 2}) {
    EXPECT_EQ(test::run_text<Error>({.context = 2},
                                    [&](auto& device) {
                                      std::vector<float> x(1);
                                      mesh::broadcast(device, {Axis::context}, root, std::span(x));
                                    }),
              "mesh::broadcast: root = " + std::to_string(root) + ": must be in [0, 2)");
  }
  EXPECT_EQ(test::run_text<Error>({.context = 2},
                                  [](auto& device) {
                                    const std::vector<float> in(2);
                                    std::vector<float> out(1);
                                    mesh::shift(device, {Axis::context}, 1, in, std::span(out));
                                  }),
            "mesh::shift: out.size = 1: must equal in.size (2)");
}

TEST(Permute, MembersMustNameTheSameMoves) {
  const std::string text = test::run_text<CollectiveMismatch>({.context = 2}, [](auto& device) {
    const std::vector<mesh::Move> moves = {{.from = device.id(), .to = 0}};
    const std::vector<float> in(1);
    std::vector<float> out(1);
    mesh::permute(device, {Axis::context}, moves, in, std::span(out));
  });
  EXPECT_NE(text.find("mismatched collectives in group 0, 1"), std::string::npos) << text;
}

}  // namespace
}  // namespace heddle

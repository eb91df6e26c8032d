// Mutants tried: block addressed by device id; source order reversed; recv_counts of the sender; transposing
// twice is not the identity; sent bytes include the own block.
#include "heddle/mesh/all_to_all.hpp"

#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "mesh/device_arrays.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle {
namespace {

using test::of;
using test::PerDevice;

TEST(AllToAll, BlockJOfMemberIBecomesBlockIOfMemberJ) {
  for (const MeshAxes& axes : test::small_meshes()) {
    for (const AxisTuple& tuple : test::some_tuples()) {
      LocalMesh mesh(axes);
      const std::int64_t members = tuple.size(axes);
      const std::int64_t n = 2;
      const auto inputs = test::random_inputs<float>(mesh.topology(), n * members, 29);
      PerDevice<float> outputs(
          inputs.size(),
          std::vector<float>(static_cast<std::size_t>(n * members), test::poison<float>()));
      PerDevice<float> back = outputs;
      mesh.run([&](auto& device) {
        mesh::all_to_all(device, tuple, of(inputs, device.id()),
                         std::span(of(outputs, device.id())));
        mesh::all_to_all(device, tuple, of(outputs, device.id()), std::span(of(back, device.id())));
      });
      for (std::int64_t id = 0; id < mesh.topology().devices(); ++id) {
        const auto ids = mesh.topology().group_of(tuple, id);
        const std::int64_t own = mesh.topology().index_in(tuple, id);
        for (std::int64_t source = 0; source < members; ++source) {
          for (std::int64_t i = 0; i < n; ++i) {
            ASSERT_EQ(
                of(outputs, id)[static_cast<std::size_t>(source * n + i)],
                of(inputs,
                   ids[static_cast<std::size_t>(source)])[static_cast<std::size_t>(own * n + i)]);
          }
        }
      }
      EXPECT_EQ(back, inputs);
      require_balanced(mesh.ledger());
    }
  }
}

TEST(AllToAll, RaggedBlocksArriveInTheOrderOfTheirSources) {
  const MeshAxes axes{.context = 2, .expert = 2};
  const AxisTuple tuple = {Axis::expert, Axis::context};
  LocalMesh mesh(axes);
  // By index: what member s sends to member d; member 2 sends nothing, member 3 gets nothing from 0.
  const std::vector<std::vector<std::int64_t>> counts = {
      {1, 2, 0, 0}, {3, 0, 1, 2}, {0, 0, 0, 0}, {1, 1, 1, 1}};
  PerDevice<std::int32_t> outputs(4);
  PerDevice<std::int64_t> received(4, std::vector<std::int64_t>(4, -77));
  mesh.run([&](auto& device) {
    const std::int64_t own = device.topology().index_in(tuple, device.id());
    const auto& send = counts[static_cast<std::size_t>(own)];
    std::vector<std::int32_t> in;
    for (std::int64_t to = 0; to < 4; ++to) {
      for (std::int64_t i = 0; i < send[static_cast<std::size_t>(to)]; ++i) {
        in.push_back(static_cast<std::int32_t>(100 * own + 10 * to + i));
      }
    }
    std::vector<std::int64_t> arriving(4);
    mesh::exchange_counts(device, tuple, send, std::span(arriving));
    auto& out = of(outputs, device.id());
    out.resize(static_cast<std::size_t>(
        std::accumulate(arriving.begin(), arriving.end(), std::int64_t{0})));
    const std::int64_t total = mesh::all_to_all_v(device, tuple, in, send, std::span(out),
                                                  std::span(of(received, device.id())));
    EXPECT_EQ(total, static_cast<std::int64_t>(out.size()));
    EXPECT_EQ(arriving, of(received, device.id()));
  });
  // Index 0, 1, 2, 3 of the tuple are devices 0, 2, 1, 3.
  EXPECT_EQ(of(outputs, 0), (std::vector<std::int32_t>{0, 100, 101, 102, 300}));
  EXPECT_EQ(of(outputs, 2), (std::vector<std::int32_t>{10, 11, 310}));
  EXPECT_EQ(of(outputs, 1), (std::vector<std::int32_t>{120, 320}));
  EXPECT_EQ(of(outputs, 3), (std::vector<std::int32_t>{130, 131, 330}));
  EXPECT_EQ(of(received, 0), (std::vector<std::int64_t>{1, 3, 0, 1}));
  require_balanced(mesh.ledger());
  const LedgerFilter own{.device = 0, .op = Collective::all_to_all_v};
  EXPECT_EQ(mesh.ledger().sum(own).wire_bytes, 4 * 4);
  EXPECT_EQ(mesh.ledger().sum(own).sent_bytes, 2 * 4);
  EXPECT_EQ(mesh.ledger().sum(own).payload_bytes, 3 * 4);
}

TEST(AllToAll, OneMemberMayReceiveEverything) {
  LocalMesh mesh({.expert = 3});
  PerDevice<float> outputs(3, std::vector<float>(9, test::poison<float>()));
  mesh.run([&](auto& device) {
    const std::vector<float> in(3, static_cast<float>(device.id()));
    const std::vector<std::int64_t> send = {0, 3, 0};
    std::vector<std::int64_t> received(3);
    const std::int64_t total = mesh::all_to_all_v(
        device, {Axis::expert}, in, send, std::span(of(outputs, device.id())), std::span(received));
    EXPECT_EQ(total, device.id() == 1 ? 9 : 0);
  });
  EXPECT_EQ(of(outputs, 1), (std::vector<float>{0, 0, 0, 1, 1, 1, 2, 2, 2}));
  EXPECT_TRUE(std::isnan(of(outputs, 0)[0]));
}

TEST(AllToAll, RefusalsNameWhatIsWrong) {
  EXPECT_EQ(test::run_text<Error>({.expert = 2},
                                  [](auto& device) {
                                    const std::vector<float> in(3);
                                    std::vector<float> out(3);
                                    mesh::all_to_all(device, {Axis::expert}, in, std::span(out));
                                  }),
            "mesh::all_to_all: in.size = 3: must be a multiple of the members (2)");
  const auto ragged = [](std::vector<std::int64_t> send, std::size_t in_size, std::size_t out_size,
                         std::size_t counts_size) {
    return test::run_text<Error>({.expert = 2}, [&](auto& device) {
      const std::vector<float> in(in_size);
      std::vector<float> out(out_size);
      std::vector<std::int64_t> received(counts_size);
      mesh::all_to_all_v(device, {Axis::expert}, in, send, std::span(out), std::span(received));
    });
  };
  EXPECT_EQ(ragged({1}, 1, 9, 2),
            "mesh::all_to_all_v: send_counts.size = 1: must equal members (2)");
  EXPECT_EQ(ragged({1, 1}, 2, 9, 3),
            "mesh::all_to_all_v: recv_counts.size = 3: must equal members (2)");
  EXPECT_EQ(ragged({2, -1}, 1, 9, 2), "mesh::all_to_all_v: send_counts[1] = -1: must be >= 0");
  EXPECT_EQ(ragged({2, 1}, 2, 9, 2),
            "mesh::all_to_all_v: in.size = 2: must equal sum of send_counts (3)");
  EXPECT_EQ(
      ragged({1, std::numeric_limits<std::int64_t>::max()}, 2, 9, 2),
      "mesh::all_to_all_v: send_counts[1] = 9223372036854775807: must keep the sum within 2^63 "
      "- 1");
  EXPECT_EQ(ragged({2, 1}, 3, 3, 2),
            "mesh::all_to_all_v: out.size = 3: must be at least what arrives (4)");
}

}  // namespace
}  // namespace heddle

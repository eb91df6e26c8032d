// Mutants tried: out block by device id, not by index; own block skipped; offsets of the previous member;
// the sum of lengths compared with one too few; in == own block refused; ragged bytes counted with the own.
#include "heddle/mesh/gather.hpp"

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/mesh/all_to_all.hpp"
#include "heddle/mesh/reduction.hpp"
#include "mesh/device_arrays.hpp"
#include "support/compare.hpp"

namespace heddle {
namespace {

using test::of;
using test::PerDevice;

TEST(Gather, EveryMemberGetsAllInIndexOrder) {
  for (const MeshAxes& axes : test::small_meshes()) {
    for (const AxisTuple& tuple : test::some_tuples()) {
      for (const std::int64_t n : {0, 1, 5}) {
        LocalMesh mesh(axes);
        const Topology& topology = mesh.topology();
        const auto inputs = test::random_inputs<float>(topology, n, 3);
        const auto members = static_cast<std::size_t>(tuple.size(axes));
        PerDevice<float> outputs(
            inputs.size(),
            std::vector<float>(members * static_cast<std::size_t>(n), test::poison<float>()));
        mesh.run([&](auto& device) {
          mesh::all_gather(device, tuple, of(inputs, device.id()),
                           std::span(of(outputs, device.id())));
        });
        for (std::int64_t id = 0; id < topology.devices(); ++id) {
          std::vector<float> expected;
          for (const std::int64_t member : topology.group_of(tuple, id)) {
            const auto& part = of(inputs, member);
            expected.insert(expected.end(), part.begin(), part.end());
          }
          ASSERT_TRUE(test::same_bits(of(outputs, id), expected)) << to_string(axes);
        }
        require_balanced(mesh.ledger());
        EXPECT_EQ(mesh.ledger().count({.op = Collective::all_gather}), topology.devices());
      }
    }
  }
}

TEST(Gather, AxisOrderIsPartOfTheMeaning) {
  LocalMesh mesh({.context = 2, .expert = 2});
  PerDevice<std::int32_t> one(4, std::vector<std::int32_t>(4));
  PerDevice<std::int32_t> other = one;
  mesh.run([&](auto& device) {
    const std::vector<std::int32_t> own = {static_cast<std::int32_t>(device.id())};
    mesh::all_gather(device, {Axis::context, Axis::expert}, own, std::span(of(one, device.id())));
    mesh::all_gather(device, {Axis::expert, Axis::context}, own, std::span(of(other, device.id())));
  });
  EXPECT_EQ(of(one, 3), (std::vector<std::int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(of(other, 3), (std::vector<std::int32_t>{0, 2, 1, 3}));
}

TEST(Gather, TheInputMayStandInItsPlaceOfTheOutput) {
  LocalMesh mesh({.fsdp = 4});
  PerDevice<std::int32_t> outputs(4, std::vector<std::int32_t>(8, -77));
  mesh.run([&](auto& device) {
    const std::span<std::int32_t> out(of(outputs, device.id()));
    const auto own = out.subspan(static_cast<std::size_t>(2 * device.id()), 2);
    own[0] = static_cast<std::int32_t>(10 * device.id());
    own[1] = own[0] + 1;
    mesh::all_gather(device, {Axis::fsdp}, own, out);
  });
  for (const auto& out : outputs) {
    EXPECT_EQ(out, (std::vector<std::int32_t>{0, 1, 10, 11, 20, 21, 30, 31}));
  }
}

TEST(Gather, ResultsTooLargeForTheCachesAreTheSame) {
  // 3 * 3 * n floats are past the 32 MiB from which on results are written past the caches.
  constexpr std::int64_t n = 933001;
  LocalMesh mesh({.fsdp = 3});
  const auto inputs = test::random_inputs<float>(mesh.topology(), n, 4);
  std::vector<float> expected;
  for (const auto& input : inputs) {
    expected.insert(expected.end(), input.begin(), input.end());
  }
  PerDevice<float> gathered(3, std::vector<float>(3 * n));
  PerDevice<float> ragged = gathered;
  PerDevice<float> exchanged = gathered;
  PerDevice<float> summed = gathered;
  mesh.run([&](auto& device) {
    const std::int64_t id = device.id();
    mesh::all_gather(device, {Axis::fsdp}, of(inputs, id), std::span(of(gathered, id)));
    std::vector<std::int64_t> offsets(4);
    mesh::all_gather_v(device, {Axis::fsdp}, of(inputs, id), std::span(of(ragged, id)),
                       std::span(offsets));
    mesh::all_to_all(device, {Axis::fsdp}, of(gathered, id), std::span(of(exchanged, id)));
    mesh::all_reduce(device, {Axis::fsdp}, of(gathered, id), std::span(of(summed, id)));
  });
  for (std::int64_t id = 0; id < 3; ++id) {
    ASSERT_TRUE(test::same_bits(of(gathered, id), expected)) << id;
    ASSERT_TRUE(test::same_bits(of(ragged, id), expected)) << id;
    for (std::int64_t i = 0; i < 3 * n; i += 1009) {
      const auto at = static_cast<std::size_t>(i);
      ASSERT_EQ(of(exchanged, id)[at], expected[static_cast<std::size_t>(id * n + i % n)]);
      ASSERT_EQ(of(summed, id)[at], expected[at] + expected[at] + expected[at]);
    }
  }
}

TEST(Gather, RaggedLengthsComeWithTheirOffsets) {
  LocalMesh mesh({.fsdp = 2, .context = 3});
  const AxisTuple tuple = {Axis::context};
  PerDevice<std::int64_t> offsets(6, std::vector<std::int64_t>(4, -77));
  PerDevice<double> outputs(6, std::vector<double>(7, test::poison<double>()));
  mesh.run([&](auto& device) {
    // Along the context axis 3, 0 and 2 elements.
    const std::int64_t index = device.topology().index_in(tuple, device.id());
    const std::vector<double> own(static_cast<std::size_t>(index == 0   ? 3
                                                           : index == 1 ? 0
                                                                        : 2),
                                  static_cast<double>(device.id()));
    const std::int64_t total =
        mesh::all_gather_v(device, tuple, own, std::span(of(outputs, device.id())),
                           std::span(of(offsets, device.id())));
    EXPECT_EQ(total, 5);
  });
  for (std::int64_t id = 0; id < 6; ++id) {
    const double base = id < 3 ? 0 : 3;
    EXPECT_EQ(of(offsets, id), (std::vector<std::int64_t>{0, 3, 3, 5}));
    EXPECT_TRUE(test::same_bits(of(outputs, id), {base, base, base, base + 2, base + 2,
                                                  test::poison<double>(), test::poison<double>()}));
  }
  require_balanced(mesh.ledger());
  EXPECT_EQ(mesh.ledger().sum({.device = 1}).wire_bytes, 5 * 8);
  EXPECT_EQ(mesh.ledger().sum({.device = 0}).wire_bytes, 2 * 8);
  EXPECT_EQ(mesh.ledger().sum({.device = 0}).sent_bytes, 2 * 3 * 8);
}

TEST(Gather, ElementsMayBeAnyPlainStruct) {
  struct Routed {
    std::int32_t expert = 0;
    float weight = 0;
  };
  LocalMesh mesh({.expert = 2});
  std::vector<std::vector<Routed>> outputs(2, std::vector<Routed>(2));
  mesh.run([&](auto& device) {
    const std::vector<Routed> own = {{static_cast<std::int32_t>(device.id()), 0.5F}};
    mesh::all_gather(device, {Axis::expert}, own,
                     std::span(outputs[static_cast<std::size_t>(device.id())]));
  });
  EXPECT_EQ(outputs[0][1].expert, 1);
  EXPECT_EQ(outputs[1][0].weight, 0.5F);
}

TEST(Gather, TwoPhasesGiveTheSameBits) {
  LocalMesh mesh({.fsdp = 2, .expert = 2});
  const auto inputs = test::random_inputs<float>(mesh.topology(), 3, 5);
  PerDevice<float> blocking(4, std::vector<float>(6));
  PerDevice<float> split = blocking;
  mesh.run([&](auto& device) {
    const auto& own = of(inputs, device.id());
    mesh::all_gather(device, {Axis::fsdp}, own, std::span(of(blocking, device.id())));
    auto first =
        mesh::start_all_gather(device, {Axis::fsdp}, own, std::span(of(split, device.id())));
    std::vector<float> other(6);
    auto second = mesh::start_all_gather(device, {Axis::expert}, own, std::span(other));
    second.finish();
    first.finish();
  });
  EXPECT_EQ(blocking, split);
  EXPECT_EQ(mesh.ledger().records()[0].overlap, Overlap::blocking);
  EXPECT_EQ(mesh.ledger().records()[1].overlap, Overlap::overlappable);
}

TEST(Gather, RefusesBeforeAnythingMoves) {
  const auto text = [](std::size_t in_size, std::size_t out_size) {
    return test::run_text<Error>({.fsdp = 2}, [&](auto& device) {
      const std::vector<float> in(in_size);
      std::vector<float> out(out_size, -77);
      mesh::all_gather(device, {Axis::fsdp}, in, std::span(out));
    });
  };
  EXPECT_EQ(text(3, 5), "mesh::all_gather: out.size = 5: must equal members * in.size (6)");
  EXPECT_EQ(test::run_text<Error>({.fsdp = 2},
                                  [&](auto& device) {
                                    std::vector<float> out(6);
                                    mesh::all_gather(device, {Axis::fsdp},
                                                     std::span(out).subspan(1, 3), std::span(out));
                                  }),
            "mesh::all_gather: out = overlapping in: must be disjoint from in");
  EXPECT_EQ(test::run_text<Error>({.fsdp = 2},
                                  [&](auto& device) {
                                    std::vector<std::int64_t> offsets(2);
                                    const std::vector<float> in(1);
                                    std::vector<float> out(2);
                                    mesh::all_gather_v(device, {Axis::fsdp}, in, std::span(out),
                                                       std::span(offsets));
                                  }),
            "mesh::all_gather_v: offsets.size = 2: must equal members + 1 (3)");
}

TEST(Gather, ARaggedOutputThatIsTooSmallStopsItsDeviceAndThenTheRest) {
  EXPECT_EQ(test::run_text<Error>({.fsdp = 2},
                                  [&](auto& device) {
                                    std::vector<std::int64_t> offsets(3);
                                    const std::vector<float> in(3);
                                    std::vector<float> out(device.id() == 1 ? 5 : 6);
                                    mesh::all_gather_v(device, {Axis::fsdp}, in, std::span(out),
                                                       std::span(offsets));
                                  }),
            "mesh::all_gather_v: out.size = 5: must be at least the sum of all lengths (6)");
}

TEST(Gather, DifferentLengthsNameBothDevicesCountsAndCallSites) {
  const std::string text = test::run_text<CollectiveMismatch>({.fsdp = 2}, [&](auto& device) {
    const std::vector<float> in(device.id() == 0 ? 3 : 4);
    std::vector<float> out(2 * in.size());
    mesh::all_gather(device, {Axis::fsdp}, in, std::span(out), CallSite{"a.cpp", 1});
  });
  EXPECT_EQ(
      text,
      "mismatched collectives in group 0, 1: device 0: all_gather over (fsdp), f32 x 3, call 0 "
      "(a.cpp:1); device 1: all_gather over (fsdp), f32 x 4, call 0 (a.cpp:1)");
}

}  // namespace
}  // namespace heddle

// Mutants tried: fold in order of arrival; slice of the next member; second round skipped; grouped form
// used for all_reduce; in-place all_reduce reads what it overwrote; counts of a neighbour in the v-form;
// the accumulator argument ignored.
#include "heddle/mesh/reduction.hpp"

#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/mesh/gather.hpp"
#include "mesh/device_arrays.hpp"
#include "support/compare.hpp"

namespace heddle {
namespace {

using test::of;
using test::PerDevice;

/// The left fold of whole inputs in index order, from the definition.
std::vector<float> summed(const PerDevice<float>& inputs, const std::vector<std::int64_t>& ids) {
  std::vector<float> sum = of(inputs, ids[0]);
  for (std::size_t member = 1; member < ids.size(); ++member) {
    for (std::size_t i = 0; i < sum.size(); ++i) {
      sum[i] += of(inputs, ids[member])[i];
    }
  }
  return sum;
}

TEST(Reduction, AllReduceAndItsTwoHalvesAndTheLocalFoldAgreeInEveryBit) {
  for (const MeshAxes& axes : test::small_meshes()) {
    for (const AxisTuple& tuple : test::some_tuples()) {
      const std::int64_t members = tuple.size(axes);
      for (const std::int64_t block : {0, 1, 3}) {
        LocalMesh mesh(axes);
        const std::int64_t n = block * members;
        const auto inputs = test::random_inputs<float>(mesh.topology(), n, 7);
        const PerDevice<float> poisoned(
            inputs.size(), std::vector<float>(static_cast<std::size_t>(n), test::poison<float>()));
        PerDevice<float> reduced = poisoned;
        PerDevice<float> rebuilt = poisoned;
        mesh.run([&](auto& device) {
          const auto& own = of(inputs, device.id());
          mesh::all_reduce(device, tuple, own, std::span(of(reduced, device.id())));
          std::vector<float> part(static_cast<std::size_t>(block), test::poison<float>());
          mesh::reduce_scatter(device, tuple, own, std::span(part));
          mesh::all_gather(device, tuple, part, std::span(of(rebuilt, device.id())));
        });
        for (std::int64_t id = 0; id < mesh.topology().devices(); ++id) {
          const auto expected = summed(inputs, mesh.topology().group_of(tuple, id));
          ASSERT_TRUE(test::same_bits(of(reduced, id), expected))
              << to_string(axes) << to_string(tuple);
          ASSERT_TRUE(test::same_bits(of(rebuilt, id), expected))
              << to_string(axes) << to_string(tuple);
        }
        require_balanced(mesh.ledger());
      }
    }
  }
}

TEST(Reduction, LengthsNeedNotDivide) {
  LocalMesh mesh({.fsdp = 4});
  for (const std::int64_t n : {1, 2, 3, 5, 6, 7}) {
    const auto inputs = test::random_inputs<float>(mesh.topology(), n, 9);
    PerDevice<float> outputs(
        4, std::vector<float>(static_cast<std::size_t>(n), test::poison<float>()));
    mesh.run([&](auto& device) {
      mesh::all_reduce(device, {Axis::fsdp}, of(inputs, device.id()),
                       std::span(of(outputs, device.id())));
    });
    for (const auto& out : outputs) {
      ASSERT_TRUE(test::same_bits(out, summed(inputs, {0, 1, 2, 3}))) << n;
    }
    require_balanced(mesh.ledger());
    EXPECT_EQ(mesh.ledger().sum({}).wire_bytes, 2 * 3 * n * 4);
  }
}

TEST(Reduction, OrderAlongTheTupleDecidesTheBits) {
  LocalMesh mesh({.context = 2, .expert = 2});
  const PerDevice<float> inputs = {{1e8F}, {1.0F}, {-1e8F}, {1.0F}};
  std::vector<float> by_context(4);
  std::vector<float> by_expert(4);
  mesh.run([&](auto& device) {
    const auto id = static_cast<std::size_t>(device.id());
    mesh::all_reduce(device, {Axis::context, Axis::expert}, inputs[id],
                     std::span(by_context).subspan(id, 1));
    mesh::all_reduce(device, {Axis::expert, Axis::context}, inputs[id],
                     std::span(by_expert).subspan(id, 1));
  });
  EXPECT_EQ(by_context, std::vector<float>(4, 1.0F));  // ((1e8 + 1) - 1e8) + 1
  EXPECT_EQ(by_expert, std::vector<float>(4, 2.0F));   // ((1e8 - 1e8) + 1) + 1
}

TEST(Reduction, TwoLevelsAreAnotherOperation) {
  LocalMesh mesh({.context = 2, .expert = 2});
  const PerDevice<float> inputs = {{1e8F}, {1.0F}, {-1e8F}, {1.0F}};
  std::vector<float> grouped(4);
  mesh.run([&](auto& device) {
    const auto id = static_cast<std::size_t>(device.id());
    mesh::all_reduce_grouped(device, {Axis::context}, {Axis::expert}, inputs[id],
                             std::span(grouped).subspan(id, 1));
  });
  EXPECT_EQ(grouped, std::vector<float>(4, 2.0F));  // (1e8 - 1e8) + (1 + 1)
  EXPECT_EQ(mesh.ledger().count({.device = 0}), 2);
  EXPECT_EQ(test::run_text<Error>({.context = 2},
                                  [](auto& device) {
                                    std::vector<float> x(1);
                                    mesh::all_reduce_grouped(device, {Axis::context},
                                                             {Axis::context}, x, std::span(x));
                                  }),
            "mesh::all_reduce_grouped: outer = (context): must not name an axis of inner");
}

TEST(Reduction, InPlaceIsTheSame) {
  LocalMesh mesh({.fsdp = 3});
  PerDevice<float> arrays = test::random_inputs<float>(mesh.topology(), 10, 13);
  const auto expected = summed(arrays, {0, 1, 2});
  mesh.run([&](auto& device) {
    auto& own = of(arrays, device.id());
    mesh::all_reduce(device, {Axis::fsdp}, own, std::span(own));
  });
  for (const auto& out : arrays) {
    EXPECT_TRUE(test::same_bits(out, expected));
  }
}

TEST(Reduction, NarrowTypesRoundOnceAndWiderAccumulatorsAreNamed) {
  LocalMesh mesh({.fsdp = 3});
  const std::vector<float> values = {256, 1, 1};
  std::vector<float> narrow(3);
  std::vector<float> plain(3);
  std::vector<float> wide(3);
  const std::vector<float> cancelling = {1e8F, 1, -1e8F};
  mesh.run([&](auto& device) {
    const auto id = static_cast<std::size_t>(device.id());
    const std::vector<bfloat16> x = {bfloat16(values[id])};
    std::vector<bfloat16> y(1);
    mesh::all_reduce(device, {Axis::fsdp}, x, std::span(y));
    narrow[id] = static_cast<float>(y[0]);
    const std::vector<float> z = {cancelling[id]};
    mesh::all_reduce(device, {Axis::fsdp}, z, std::span(plain).subspan(id, 1));
    mesh::all_reduce<double>(device, {Axis::fsdp}, z, std::span(wide).subspan(id, 1));
  });
  EXPECT_EQ(narrow, std::vector<float>(3, 258));
  EXPECT_EQ(plain, std::vector<float>(3, 0));
  EXPECT_EQ(wide, std::vector<float>(3, 1));
}

TEST(Reduction, MaximumAndMinimumKeepTheirRules) {
  LocalMesh mesh({.context = 2});
  std::vector<float> most(2);
  std::vector<float> least(2);
  mesh.run([&](auto& device) {
    const auto id = static_cast<std::size_t>(device.id());
    const std::vector<float> zero = {id == 0 ? -0.0F : 0.0F};
    mesh::all_reduce(device, {Axis::context}, zero, std::span(most).subspan(id, 1), Reduce::max);
    mesh::all_reduce(device, {Axis::context}, zero, std::span(least).subspan(id, 1), Reduce::min);
  });
  EXPECT_FALSE(std::signbit(most[0]) || std::signbit(most[1]));
  EXPECT_TRUE(std::signbit(least[0]) && std::signbit(least[1]));
}

TEST(Reduction, MinusZeroSurvivesOneAndTwoMembers) {
  for (const std::int64_t members : {1, 2}) {
    LocalMesh mesh({.fsdp = members});
    PerDevice<float> arrays(static_cast<std::size_t>(members), {-0.0F});
    mesh.run([&](auto& device) {
      auto& own = of(arrays, device.id());
      mesh::all_reduce(device, {Axis::fsdp}, own, std::span(own));
    });
    EXPECT_TRUE(std::signbit(arrays[0][0]));
  }
}

TEST(Reduction, UnevenBlocksAreTheTransposeOfARaggedGather) {
  LocalMesh mesh({.fsdp = 3});
  const std::vector<std::int64_t> counts = {2, 0, 3};
  const auto inputs = test::random_inputs<float>(mesh.topology(), 5, 17);
  PerDevice<float> outputs = {std::vector<float>(2), {}, std::vector<float>(3)};
  mesh.run([&](auto& device) {
    mesh::reduce_scatter_v(device, {Axis::fsdp}, counts, of(inputs, device.id()),
                           std::span(of(outputs, device.id())));
  });
  std::vector<float> joined;
  for (const auto& out : outputs) {
    joined.insert(joined.end(), out.begin(), out.end());
  }
  EXPECT_TRUE(test::same_bits(joined, summed(inputs, {0, 1, 2})));
  require_balanced(mesh.ledger());
  EXPECT_EQ(mesh.ledger().sum({.device = 2}).wire_bytes, 2 * 3 * 4);
  EXPECT_EQ(mesh.ledger().sum({.device = 1}).wire_bytes, 0);
  EXPECT_EQ(mesh.ledger().sum({.device = 1}).sent_bytes, 5 * 4);
}

TEST(Reduction, BitsDoNotDependOnThreadsOrBucketing) {
  const MeshAxes axes{.fsdp = 2, .context = 3, .expert = 2};
  const std::int64_t n = 40;
  const auto inputs = test::random_inputs<float>(Topology(axes), n, 23);
  PerDevice<float> first;
  for (const std::int64_t tokens : {1, 2, 7}) {
    for (const std::int64_t bucket : {40, 1, 7}) {
      LocalMesh mesh(axes, {.tokens = tokens});
      PerDevice<float> outputs(inputs.size(), std::vector<float>(static_cast<std::size_t>(n)));
      mesh.run([&](auto& device) {
        const std::span<const float> in(of(inputs, device.id()));
        const std::span<float> out(of(outputs, device.id()));
        for (std::int64_t at = 0; at < n; at += bucket) {
          const auto begin = static_cast<std::size_t>(at);
          const auto count = static_cast<std::size_t>(std::min(bucket, n - at));
          mesh::all_reduce(device, test::world, in.subspan(begin, count),
                           out.subspan(begin, count));
        }
      });
      first = first.empty() ? outputs : first;
      EXPECT_EQ(outputs, first) << tokens << " tokens, buckets of " << bucket;
    }
  }
}

TEST(Reduction, RefusalsNameWhatIsWrong) {
  const auto scatter = [](std::size_t in_size, std::size_t out_size, Reduce reduce) {
    return test::run_text<Error>({.fsdp = 2}, [&](auto& device) {
      const std::vector<float> in(in_size);
      std::vector<float> out(out_size);
      mesh::reduce_scatter(device, {Axis::fsdp}, in, std::span(out), reduce);
    });
  };
  EXPECT_EQ(scatter(5, 2, Reduce::sum),
            "mesh::reduce_scatter: in.size = 5: must equal members * out.size (4)");
  EXPECT_EQ(scatter(4, 2, static_cast<Reduce>(9)),
            "mesh::reduce_scatter: reduce = 9: must be sum, max or min");
  EXPECT_EQ(
      test::run_text<Error>({.fsdp = 2},
                            [](auto& device) {
                              std::vector<float> x(4);
                              mesh::all_reduce(device, {Axis::fsdp}, std::span(x).subspan(0, 3),
                                               std::span(x).subspan(1, 3));
                            }),
      "mesh::all_reduce: out = overlapping in: must be the same range as in or disjoint from it");
  const auto uneven = [](std::vector<std::int64_t> counts, std::size_t in_size,
                         std::size_t out_size) {
    return test::run_text<Error>({.fsdp = 2}, [&](auto& device) {
      const std::vector<float> in(in_size);
      std::vector<float> out(out_size);
      mesh::reduce_scatter_v(device, {Axis::fsdp}, counts, in, std::span(out));
    });
  };
  EXPECT_EQ(uneven({1, 2, 3}, 6, 1),
            "mesh::reduce_scatter_v: counts.size = 3: must equal members (2)");
  EXPECT_EQ(uneven({1, -2}, 6, 1), "mesh::reduce_scatter_v: counts[1] = -2: must be >= 0");
  EXPECT_EQ(uneven({1, 2}, 6, 1),
            "mesh::reduce_scatter_v: in.size = 6: must equal sum of counts (3)");
  EXPECT_EQ(uneven({1, 2}, 3, 3),
            "mesh::reduce_scatter_v: out.size = 3: must equal counts[own index] (1)");
}

TEST(Reduction, MembersMustAgreeOnHowToFold) {
  const std::string text = test::run_text<CollectiveMismatch>({.fsdp = 2}, [](auto& device) {
    std::vector<float> x(1);
    mesh::all_reduce(device, {Axis::fsdp}, x, std::span(x),
                     device.id() == 0 ? Reduce::sum : Reduce::max, CallSite{"b.cpp", 2});
  });
  EXPECT_EQ(text,
            "mismatched collectives in group 0, 1: device 0: all_reduce(sum) over (fsdp), f32 x 1, "
            "call 0 (b.cpp:2); device 1: all_reduce(max) over (fsdp), f32 x 1, call 0 (b.cpp:2)");
}

}  // namespace
}  // namespace heddle

// Mutants tried: start waits for the peers; the result is computed at the start; a moved-from handle
// gives up when it goes; reductions in two phases fold in order of arrival.
#include "heddle/mesh/pending.hpp"

#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/mesh/collectives.hpp"
#include "mesh/device_arrays.hpp"

namespace heddle {
namespace {

using test::of;
using test::PerDevice;

TEST(Pending, StartWaitsForNobody) {
  LocalMesh mesh({.fsdp = 2}, {.tokens = 1});
  std::vector<std::int64_t> order;
  mesh.run([&](MeshDevice& device) {
    const std::vector<float> x(1);
    std::vector<float> y(2);
    auto pending = mesh::start_all_gather(device, {Axis::fsdp}, x, std::span(y));
    order.push_back(device.id());  // with one token: no waiting, so 0 gets here before 1 has begun
    order.push_back(device.id());
    pending.finish();
  });
  EXPECT_EQ(order, (std::vector<std::int64_t>{0, 0, 1, 1}));
}

TEST(Pending, SeveralAtATimeGiveTheBitsOfTheBlockingForms) {
  const MeshAxes axes{.fsdp = 2, .context = 3};
  LocalMesh mesh(axes);
  const auto inputs = test::random_inputs<float>(mesh.topology(), 6, 43);
  PerDevice<float> blocking(6);
  PerDevice<float> split(6);
  const auto sum = [](auto earlier, auto later, auto result) {
    for (std::size_t i = 0; i < result.size(); ++i) {
      result[i] = earlier[i] + later[i];
    }
  };
  mesh.run([&](MeshDevice& device) {
    const auto& in = of(inputs, device.id());
    const std::vector<float> zeros(6);
    std::vector<float> reduced(6), scattered(2), exchanged(6), shifted(6), scanned(6);
    mesh::all_reduce(device, test::world, in, std::span(reduced));
    mesh::reduce_scatter(device, {Axis::context}, in, std::span(scattered));
    mesh::all_to_all(device, {Axis::context}, in, std::span(exchanged));
    mesh::shift(device, {Axis::context}, 1, in, std::span(shifted));
    mesh::exclusive_scan(device, {Axis::fsdp}, in, zeros, std::span(scanned), sum);
    auto& out = of(blocking, device.id());
    for (const auto* part : {&reduced, &scattered, &exchanged, &shifted, &scanned}) {
      out.insert(out.end(), part->begin(), part->end());
    }
  });
  mesh.run([&](MeshDevice& device) {
    const auto& in = of(inputs, device.id());
    const std::vector<float> zeros(6);
    std::vector<float> reduced(6), scattered(2), exchanged(6), shifted(6), scanned(6);
    auto a = mesh::start_all_reduce(device, test::world, in, std::span(reduced));
    auto b = mesh::start_reduce_scatter(device, {Axis::context}, in, std::span(scattered));
    auto c = mesh::start_all_to_all(device, {Axis::context}, in, std::span(exchanged));
    auto d = mesh::start_shift(device, {Axis::context}, 1, in, std::span(shifted));
    auto e = mesh::start_exclusive_scan(device, {Axis::fsdp}, in, zeros, std::span(scanned), sum);
    c.finish();
    a.finish();
    e.finish();
    d.finish();
    b.finish();
    auto& out = of(split, device.id());
    for (const auto* part : {&reduced, &scattered, &exchanged, &shifted, &scanned}) {
      out.insert(out.end(), part->begin(), part->end());
    }
  });
  EXPECT_EQ(split, blocking);
  EXPECT_EQ(mesh.ledger().records()[4].op, Collective::exclusive_scan);
  EXPECT_EQ(mesh.ledger().records()[4].overlap, Overlap::overlappable);
  require_balanced(mesh.ledger());
}

TEST(Pending, AHandleMayMove) {
  LocalMesh mesh({.fsdp = 2});
  PerDevice<float> outputs(2, std::vector<float>(2));
  mesh.run([&](MeshDevice& device) {
    const std::vector<float> own = {static_cast<float>(device.id())};
    auto started =
        mesh::start_all_gather(device, {Axis::fsdp}, own, std::span(of(outputs, device.id())));
    std::optional<decltype(started)> kept(std::move(started));
    kept->finish();
  });
  EXPECT_EQ(outputs, (PerDevice<float>{{0, 1}, {0, 1}}));
}

TEST(Pending, AHandleLeftByAnExceptionGivesWayToThatException) {
  EXPECT_EQ(test::run_text<std::runtime_error>({.fsdp = 2},
                                               [](MeshDevice& device) {
                                                 const std::vector<float> x(1);
                                                 std::vector<float> y(2);
                                                 auto pending = mesh::start_all_gather(
                                                     device, {Axis::fsdp}, x, std::span(y));
                                                 if (device.id() == 1) {
                                                   throw std::runtime_error("in between");
                                                 }
                                                 pending.finish();
                                               }),
            "in between");
}

}  // namespace
}  // namespace heddle

#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "heddle/mesh/collectives.hpp"
#include "heddle/mesh/device.hpp"
#include "support/random.hpp"

namespace heddle::test {

/// Every collective over some axes, blocking and in two phases, on values whose sums depend on their
/// order: what a device gets out of them, as bytes. The same on every backend, or one of them is wrong.
inline std::vector<std::byte> run_every_collective(MeshDevice& device) {
  std::vector<std::byte> result;
  const auto keep = [&](const auto& values) {
    const auto bytes = std::as_bytes(std::span(values));
    result.insert(result.end(), bytes.begin(), bytes.end());
  };
  const std::vector<AxisTuple> tuples = {
      {}, {Axis::fsdp}, {Axis::expert, Axis::context}, {Axis::expert, Axis::fsdp, Axis::context}};
  Random random(100 + static_cast<std::uint64_t>(device.id()));
  for (const AxisTuple& tuple : tuples) {
    const LedgerScope scope(device.ledger(), Phase::backward, "over " + to_string(tuple));
    const auto members = static_cast<std::size_t>(mesh::axis_size(device, tuple));
    const auto own = static_cast<std::size_t>(mesh::axis_index(device, tuple));
    for (const std::size_t n : {std::size_t{0}, std::size_t{37}}) {
      const auto count = static_cast<std::int64_t>(n);
      const auto all = static_cast<std::int64_t>(n * members);
      const std::vector<float> block = random.normals<float>(count);
      const std::vector<float> blocks = random.normals<float>(all);
      std::vector<float> gathered(n * members), scattered(n), reduced(n * members);
      std::vector<float> exchanged(n * members), shifted(n), moved(n), scanned(n);
      mesh::all_gather(device, tuple, block, std::span(gathered));
      mesh::reduce_scatter(device, tuple, blocks, std::span(scattered));
      mesh::all_reduce(device, tuple, blocks, std::span(reduced));
      mesh::all_to_all(device, tuple, blocks, std::span(exchanged));
      mesh::shift(device, tuple, -2, block, std::span(shifted));
      const std::vector<mesh::Move> moves = {
          {.from = 0, .to = static_cast<std::int64_t>(members) - 1}};
      mesh::permute(device, tuple, moves, block, std::span(moved));
      const std::vector<float> zeros(n);
      mesh::exclusive_scan(
          device, tuple, block, zeros, std::span(scanned),
          [](auto earlier, auto later, auto out) {
            for (std::size_t i = 0; i < out.size(); ++i) {
              out[i] = 0.5F * earlier[i] + later[i];
            }
          },
          tuple.axes().size() == 2 ? mesh::ScanDirection::reverse : mesh::ScanDirection::forward);
      for (const auto* part :
           {&gathered, &scattered, &reduced, &exchanged, &shifted, &moved, &scanned}) {
        keep(*part);
      }
      std::vector<double> wide(n, static_cast<double>(device.id()) + 0.1);
      mesh::broadcast(device, tuple, static_cast<std::int64_t>(members) / 2, std::span(wide));
      keep(wide);
      std::vector<bfloat16> narrow = random.normals<bfloat16>(count);
      mesh::all_reduce(device, tuple, narrow, std::span(narrow), Reduce::sum);
      keep(narrow);
      mesh::all_reduce(device, tuple, block, std::span(shifted), Reduce::max);
      keep(shifted);

      // Ragged: member i brings i + n elements, and sends (i + j + n) mod 3 of them to member j.
      const std::vector<std::int32_t> ragged(own + n, static_cast<std::int32_t>(device.id()));
      std::vector<std::int64_t> offsets(members + 1);
      std::vector<std::int32_t> joined(members * (members + n));
      mesh::all_gather_v(device, tuple, ragged, std::span(joined), std::span(offsets));
      keep(joined);
      keep(offsets);
      std::vector<std::int64_t> send(members), received(members);
      std::vector<std::int32_t> leaving;
      for (std::size_t to = 0; to < members; ++to) {
        send[to] = static_cast<std::int64_t>((own + to + n) % 3);
        leaving.insert(
            leaving.end(), static_cast<std::size_t>(send[to]),
            static_cast<std::int32_t>(1000 * device.id()) + static_cast<std::int32_t>(to));
      }
      std::vector<std::int32_t> arrived(3 * members);
      mesh::all_to_all_v(device, tuple, leaving, send, std::span(arrived), std::span(received));
      keep(arrived);
      keep(received);
      std::vector<std::int64_t> counts(members, count);
      counts[0] += 2;
      const std::vector<float> uneven = random.normals<float>(all + 2);
      std::vector<float> part(static_cast<std::size_t>(counts[own]));
      mesh::reduce_scatter_v<double>(device, tuple, counts, uneven, std::span(part));
      keep(part);

      // Several at a time, finished in another order than they were started in.
      std::vector<float> first(n * members), second(n * members), third(n);
      auto a = mesh::start_all_reduce(device, tuple, blocks, std::span(first));
      auto b = mesh::start_all_gather(device, tuple, block, std::span(second));
      auto c = mesh::start_reduce_scatter(device, tuple, blocks, std::span(third));
      b.finish();
      c.finish();
      a.finish();
      for (const auto* each : {&first, &second, &third}) {
        keep(*each);
      }
      mesh::require_replicated(device, {}, "block", std::span<const float>(block));
      mesh::barrier(device, tuple);
    }
  }
  return result;
}

}  // namespace heddle::test

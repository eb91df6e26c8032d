#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>

#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/collectives.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/moe/detail/shard_weights.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/routing_map.hpp"
#include "heddle/moe/routing_window.hpp"
#include "heddle/moe/sharded_layer.hpp"

// Who sends how many rows to whom, and in which order they lie on both sides.

namespace heddle::moe::detail {

/// Slots of every expert in every chunk of every device of a group: [P, chunks, E].
struct SlotCounts {
  std::span<const std::int32_t> values;
  std::int64_t chunks = 1;
  std::int64_t experts = 1;

  [[nodiscard]] std::span<const std::int32_t> of(std::int64_t source, std::int64_t chunk,
                                                 ExpertRange range) const {
    return values.subspan(
        static_cast<std::size_t>((source * chunks + chunk) * experts + range.first),
        static_cast<std::size_t>(range.count));
  }
  [[nodiscard]] std::int64_t total(std::int64_t source, std::int64_t chunk,
                                   ExpertRange range) const {
    const auto counts = of(source, chunk, range);
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  }
};

/// One message for all chunks of the layer.
template <Communicator Device>
[[nodiscard]] SlotCounts gather_slot_counts(Device& device, const Dims& dims,
                                            const LayerShards& shards,
                                            std::span<const std::int64_t> group_offsets,
                                            Workspace& workspace) {
  const std::int64_t own = shards.chunks * dims.experts;
  const auto all = workspace.take<std::int32_t>(shards.members * own);
  const Workspace::Frame frame(workspace);
  const auto mine = workspace.take<std::int32_t>(own);
  for (std::int64_t chunk = 0; chunk < shards.chunks; ++chunk) {
    const auto offsets =
        group_offsets.subspan(static_cast<std::size_t>(chunk * (dims.experts + 1)));
    for (std::size_t e = 0; e < static_cast<std::size_t>(dims.experts); ++e) {
      mine[static_cast<std::size_t>(chunk * dims.experts) + e] =
          static_cast<std::int32_t>(offsets[e + 1] - offsets[e]);
    }
  }
  mesh::all_gather<Device, std::int32_t>(device, shards.group, mine, all);
  return {.values = all, .chunks = shards.chunks, .experts = dims.experts};
}

/// The experts of one device of the group.
[[nodiscard]] inline ExpertRange experts_of(const LayerShards& shards, std::int64_t member) {
  return {.first = member * shards.experts.count, .count = shards.experts.count};
}

/// Rows that `source` may send to `destination` in one chunk: a full buffer cuts the last sources.
[[nodiscard]] inline std::int64_t kept_rows(const SlotCounts& counts, const LayerShards& shards,
                                            std::int64_t chunk, std::int64_t source,
                                            std::int64_t destination) {
  const ExpertRange range = experts_of(shards, destination);
  std::int64_t before = 0;
  for (std::int64_t earlier = 0; earlier < source; ++earlier) {
    before += counts.total(earlier, chunk, range);
  }
  const std::int64_t wanted = counts.total(source, chunk, range);
  if (!shards.buffer_rows) {
    return wanted;
  }
  const std::int64_t room = *shards.buffer_rows;
  return std::min(before + wanted, room) - std::min(before, room);
}

/// Settles what this device sends to each of its group and what arrives from each; all devices come to the
/// same from the same counts. Returns the window of the rows that arrive.
[[nodiscard]] inline RoutingWindow agree_on_rows(const SlotCounts& counts,
                                                 const LayerShards& shards, std::int64_t chunk,
                                                 std::span<std::int64_t> sent,
                                                 std::span<std::int64_t> arrived) {
  RoutingWindow window;
  window.experts = shards.experts;
  for (std::int64_t member = 0; member < shards.members; ++member) {
    const auto i = static_cast<std::size_t>(member);
    sent[i] = kept_rows(counts, shards, chunk, shards.index, member);
    arrived[i] = kept_rows(counts, shards, chunk, member, shards.index);
    window.wanted += counts.total(member, chunk, shards.experts);
    window.kept += arrived[i];
  }
  window.rows = window.kept;
  return window;
}

/// The slots of the own tokens that are sent, in (expert, slot) order: the order in which they leave.
struct SourceChunk {
  RouterDims dims;
  RoutingMapStorage storage;     ///< of a map of all experts, then of the kept slots alone
  std::span<std::int64_t> rows;  ///< [P], to each device

  [[nodiscard]] std::int64_t total_rows() const {
    return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  }

  /// Takes the slots that are not sent out of the map: of each device's experts those behind the rows it
  /// has room for. Positions close up.
  void keep_rows(std::int64_t experts_a_device) const {
    if (total_rows() == storage.group_offsets.back()) {
      return;
    }
    std::int64_t to = 0;
    std::int64_t from = 0;
    for (std::size_t device = 0; device < rows.size(); ++device) {
      const std::int64_t end = to + rows[device];
      for (std::int64_t e = 0; e < experts_a_device; ++e) {
        const auto expert =
            device * static_cast<std::size_t>(experts_a_device) + static_cast<std::size_t>(e);
        const std::int64_t last = storage.group_offsets[expert + 1];
        for (; from < last; ++from) {
          const std::int32_t slot = storage.permutation[static_cast<std::size_t>(from)];
          std::int32_t& position = storage.inverse[static_cast<std::size_t>(slot)];
          if (to < end) {
            storage.permutation[static_cast<std::size_t>(to)] = slot;
            position = static_cast<std::int32_t>(to++);
          } else {
            position = nowhere;
          }
        }
        storage.group_offsets[expert + 1] = to;
      }
    }
  }

  [[nodiscard]] RoutingMap map() const {
    return {.dims = dims,
            .experts = {.first = 0, .count = dims.experts},
            .permutation = storage.permutation,
            .inverse = storage.inverse,
            .group_offsets = storage.group_offsets};
  }
  /// A buffer of exactly the rows that are sent.
  [[nodiscard]] RoutingWindow window() const {
    const std::int64_t kept = total_rows();
    return {.experts = {.first = 0, .count = dims.experts},
            .first_position = 0,
            .first_row = 0,
            .wanted = kept,
            .kept = kept,
            .rows = kept};
  }
};

/// The rows that arrive, source after source, as tokens of one expert each.
struct ArrivedChunk {
  std::int64_t experts = 1;
  std::span<std::int32_t> permutation;    ///< room for chunk_rows
  std::span<std::int32_t> inverse;        ///< the same
  std::span<std::int64_t> group_offsets;  ///< [experts + 1]
  std::span<std::int64_t> rows;           ///< [P], from each device

  [[nodiscard]] std::int64_t total_rows() const {
    return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  }
  [[nodiscard]] RouterDims dims() const {
    return {.tokens = total_rows(), .experts = experts, .top_k = 1};
  }
  [[nodiscard]] RoutingMapStorage storage() const {
    const auto count = static_cast<std::size_t>(total_rows());
    return {permutation.first(count), inverse.first(count), group_offsets};
  }
  /// The map that the forward built there.
  [[nodiscard]] RoutingMap map() const {
    const RoutingMapStorage kept = storage();
    return {.dims = dims(),
            .experts = {.first = 0, .count = experts},
            .permutation = kept.permutation,
            .inverse = kept.inverse,
            .group_offsets = kept.group_offsets};
  }
};

/// Sorts the rows that arrived by expert, stably: the order is then (expert, source, slot), the ring's.
[[nodiscard]] inline RoutingMap map_arrived(const SlotCounts& counts, const LayerShards& shards,
                                            std::int64_t chunk, const ArrivedChunk& arrived,
                                            RoutingMapBuilder& maps, Workspace& workspace) {
  const Workspace::Frame frame(workspace);
  const auto ids = workspace.take<std::int32_t>(arrived.total_rows());
  std::size_t row = 0;
  for (std::int64_t source = 0; source < shards.members; ++source) {
    std::int64_t room = arrived.rows[static_cast<std::size_t>(source)];
    const auto of_source = counts.of(source, chunk, shards.experts);
    for (std::size_t e = 0; e < of_source.size(); ++e) {
      const std::int64_t count = std::min<std::int64_t>(of_source[e], room);
      std::fill_n(ids.begin() + static_cast<std::ptrdiff_t>(row), count,
                  static_cast<std::int32_t>(e));
      row += static_cast<std::size_t>(count);
      room -= count;
    }
  }
  return maps.build(arrived.dims(), {ids.data(), arrived.total_rows(), 1},
                    {.first = 0, .count = arrived.experts}, arrived.storage());
}

/// Sends each device of the group its rows of `from`, which lie in the order of the devices; `to` gets what
/// they send, in that order as well.
template <class T, Communicator Device>
void exchange_rows(Device& device, const AxisTuple& group, std::span<const std::int64_t> sent,
                   ConstMatrixView<T> from, std::span<const std::int64_t> arriving,
                   MatrixView<T> to, Workspace& workspace) {
  const Workspace::Frame frame(workspace);
  const auto members = static_cast<std::int64_t>(sent.size());
  const auto send_counts = workspace.take<std::int64_t>(members);
  const auto recv_counts = workspace.take<std::int64_t>(members);
  std::transform(sent.begin(), sent.end(), send_counts.begin(),
                 [&](std::int64_t rows) { return rows * from.cols(); });
  mesh::all_to_all_v<Device, T>(device, group, elements_of(from), send_counts, elements_of(to),
                                recv_counts);
  for (std::size_t i = 0; i < recv_counts.size(); ++i) {
    require_equal("moe::exchange_rows", "rows that arrived", recv_counts[i], "rows agreed on",
                  arriving[i] * to.cols());
  }
}

}  // namespace heddle::moe::detail

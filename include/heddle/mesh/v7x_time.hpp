#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/slice.hpp"
#include "heddle/mesh/topology.hpp"
#include "heddle/mesh/v7x.hpp"

namespace heddle::v7x {

/// How a group of devices lies on its slice.
struct GroupShape {
  std::array<std::int64_t, 3> chips = {1, 1, 1};  ///< distinct chip coordinates along x, y, z
  std::int64_t cores = 1;                         ///< members on one chip
  bool is_box = true;         ///< every chip of a gapless block, each with the same cores
  bool is_closed = true;      ///< its lines are whole rings of the torus
  double mean_hops = 1;       ///< links between one member's chip and the next one's; 1 in a box
  std::int64_t diameter = 0;  ///< links along the longest shortest path

  /// Axes of the torus that the group extends over.
  [[nodiscard]] std::int64_t ici_axes() const {
    return std::count_if(chips.begin(), chips.end(), [](std::int64_t k) { return k > 1; });
  }
};

/// Links between two chips, the short way round where rings close.
[[nodiscard]] inline std::int64_t hops(const Slice& slice, const PhysicalCoordinate& a,
                                       const PhysicalCoordinate& b) {
  const std::array<std::int64_t, 3> sizes = {slice.x, slice.y, slice.z};
  std::int64_t total = 0;
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
    const std::int64_t apart = std::abs(a.values()[axis] - b.values()[axis]);
    total += slice.wraps() ? std::min(apart, sizes[axis] - apart) : apart;
  }
  return total;
}

/// The shape of the group of `id` along `axes`.
///
/// throws    Error for an id outside the mesh
[[nodiscard]] inline GroupShape group_shape(const Placement& placement, const AxisTuple& axes,
                                            std::int64_t id) {
  const Slice& slice = placement.slice();
  const std::array<std::int64_t, 3> sizes = {slice.x, slice.y, slice.z};
  const std::vector<std::int64_t> ids = placement.mesh().group_of(axes, id);
  std::array<std::set<std::int64_t>, 3> seen;
  std::map<std::array<std::int64_t, 3>, std::int64_t> on_chip;
  for (const std::int64_t member : ids) {
    const auto at = placement.of(member).values();
    for (std::size_t axis = 0; axis < seen.size(); ++axis) {
      seen[axis].insert(at[axis]);
    }
    ++on_chip[{at[0], at[1], at[2]}];
  }
  GroupShape shape;
  shape.cores = on_chip.begin()->second;
  std::int64_t block = 1;
  for (std::size_t axis = 0; axis < seen.size(); ++axis) {
    const auto extent = static_cast<std::int64_t>(seen[axis].size());
    shape.chips[axis] = extent;
    block *= extent;
    const bool is_gapless = *seen[axis].rbegin() - *seen[axis].begin() + 1 == extent;
    shape.is_box = shape.is_box && is_gapless;
    shape.is_closed = shape.is_closed && (extent == 1 || (extent == sizes[axis] && slice.wraps()));
  }
  shape.is_box = shape.is_box && block == static_cast<std::int64_t>(on_chip.size()) &&
                 std::all_of(on_chip.begin(), on_chip.end(),
                             [&](const auto& chip) { return chip.second == shape.cores; });
  if (shape.is_box) {
    for (const std::int64_t extent : shape.chips) {
      shape.diameter += shape.is_closed ? extent / 2 : extent - 1;
    }
    return shape;
  }
  shape.is_closed = false;
  std::int64_t total = 0;
  for (std::size_t member = 0; member < ids.size(); ++member) {
    const PhysicalCoordinate& from = placement.of(ids[member]);
    total += hops(slice, from, placement.of(ids[(member + 1) % ids.size()]));
    for (const std::int64_t other : ids) {
      shape.diameter = std::max(shape.diameter, hops(slice, from, placement.of(other)));
    }
  }
  shape.mean_hops = std::max(1.0, static_cast<double>(total) / static_cast<double>(on_chip.size()));
  return shape;
}

/// The time of an all-gather in which each member of a group brings `bytes`.
///   max(V / (2 w n), V_core / W, hops * latency) on rings, V / (w n) on lines: V bytes enter a chip over n
///   axes. Two members on one chip share what enters, and hand it on over the link between the cores; else
///   the chip's other core is in another group and needs other bytes of its own
/// specials  a group that is no block of neighbours: each byte takes mean_hops links
/// accuracy  bandwidth-bound transfers; shards below about 90 kB a hop are latency-bound
/// source    the scaling book
[[nodiscard]] inline Seconds gather_time(const GroupShape& shape, std::int64_t members,
                                         double bytes) {
  const auto group = static_cast<double>(members);
  const auto cores = static_cast<double>(shape.cores);
  const double entering = (group - cores) * bytes * (2 / cores);
  const auto axes = static_cast<double>(shape.ici_axes());
  const double rate = shape.is_closed ? per_axis(ici_link).value : ici_link.value;
  const double links = axes == 0 ? 0 : entering * shape.mean_hops / (rate * axes);
  const double crossing = shape.cores == 2 ? entering + 2 * bytes : 0;
  return {std::max({links, crossing / core_to_core.value,
                    hop_latency.value * static_cast<double>(shape.diameter)})};
}

/// The time of one collective, from its record and the chips its group lies on.
///   reduce_scatter as all_gather; all_reduce twice that; all_to_all a quarter on rings and half on lines;
///   broadcast as a gather of its payload; a step of shift bytes / w; a scan (G - 1) (bytes / w + latency)
/// throws    Error for a record of a device outside the placement's mesh
[[nodiscard]] inline Seconds collective_time(const Placement& placement,
                                             const TrafficRecord& record) {
  const std::int64_t members = record.members;
  const GroupShape shape = group_shape(placement, record.axes, record.device);
  if (members == 1) {
    return {0};
  }
  const auto group = static_cast<double>(members);
  const auto wire = static_cast<double>(record.bytes.wire_bytes);
  const auto sent = static_cast<double>(record.bytes.sent_bytes);
  const double step_rate = shape.ici_axes() == 0 ? core_to_core.value : ici_link.value;
  switch (record.op) {
    case Collective::all_gather:
    case Collective::all_gather_v:
    case Collective::reduce_scatter:
    case Collective::reduce_scatter_v:
      return gather_time(shape, members, wire / (group - 1));
    case Collective::all_reduce:
      return {2 * gather_time(shape, members, wire / (2 * (group - 1))).value};
    case Collective::all_to_all:
    case Collective::all_to_all_v: {
      const double local = wire * group / (group - 1);
      return {gather_time(shape, members, local).value / (shape.is_closed ? 4 : 2)};
    }
    case Collective::broadcast: {
      const double payload = std::max(wire, sent / (group - 1));
      return gather_time(shape, members, payload / group);
    }
    case Collective::shift:
    case Collective::permute:
      return {std::max(wire * shape.mean_hops / step_rate,
                       wire > 0 && shape.ici_axes() > 0 ? hop_latency.value : 0)};
    case Collective::exclusive_scan:
      return {(group - 1) *
              (std::max(wire, sent) * shape.mean_hops / step_rate + hop_latency.value)};
    case Collective::barrier:
    case Collective::compare:
      return {hop_latency.value * static_cast<double>(shape.diameter)};
  }
  fail("v7x::collective_time", "record.op", record.op, "must be one of the collectives");
}

/// What an equal-count collective would leave in a device's ledger if it ran. For plans.
struct PlannedCall {
  std::int64_t device = 0;
  Collective op = Collective::all_gather;
  AxisTuple axes = {};
  std::int64_t count = 0;  ///< as EqualCountCall
  DataType type = {};
  std::int64_t argument = 0;
  Phase phase = Phase::forward;
};

/// throws    Error as traffic_of(), and for a device outside the mesh
[[nodiscard]] inline TrafficRecord planned(const Topology& mesh, const PlannedCall& call) {
  const std::int64_t members = call.axes.size(mesh.axes());
  return {.device = call.device,
          .op = call.op,
          .axes = call.axes,
          .members = members,
          .group = mesh.least_in_group(call.axes, call.device),
          .type = call.type,
          .bytes = traffic_of({.op = call.op,
                               .members = members,
                               .index = mesh.index_in(call.axes, call.device),
                               .count = call.count,
                               .bytes = call.type.bytes,
                               .argument = call.argument}),
          .phase = call.phase};
}

/// What a phase takes on the slowest device. The truth lies between `serial` and `overlapped`.
struct PhaseTime {
  Seconds communication;  ///< the sum over the device's collectives
  Seconds serial;         ///< communication and computation one after the other
  Seconds overlapped;     ///< the longer of the two
};

/// Prices a ledger: one phase of it, or all.
///
/// throws    as collective_time()
[[nodiscard]] inline PhaseTime phase_time(const Placement& placement, const Ledger& ledger,
                                          Seconds compute,
                                          std::optional<Phase> phase = std::nullopt) {
  std::map<std::int64_t, double> by_device;
  for (const TrafficRecord& record : ledger.records()) {
    if (!phase || *phase == record.phase) {
      by_device[record.device] += collective_time(placement, record).value;
    }
  }
  double slowest = 0;
  for (const auto& [device, seconds] : by_device) {
    slowest = std::max(slowest, seconds);
  }
  return {.communication = {slowest},
          .serial = {slowest + compute.value},
          .overlapped = {std::max(slowest, compute.value)}};
}

}  // namespace heddle::v7x

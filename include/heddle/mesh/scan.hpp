#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/detail/collective.hpp"
#include "heddle/mesh/detail/stream.hpp"
#include "heddle/mesh/pending.hpp"

namespace heddle::mesh {

/// From which end of the group a scan begins.
enum class ScanDirection : std::uint8_t {
  forward,  ///< member 0 first
  reverse,  ///< the last member first
};

/// What everybody before a member brings, combined: a recurrence over shards of a sequence.
///   forward: out_0 = identity, out_i = ((x_0 * x_1) * ...) * x_{i-1}; reverse counts from the last member
/// shapes    in, identity, out [n], n equal on all members
/// writes    all of out
/// alias     disjoint. combine(earlier, later, result) gets three disjoint spans of n elements
/// specials  n = 0; one member: the identity. x_0 itself reaches out_1, not identity * x_0
/// order     as written, never regrouped: an operator that is associative on paper is not in floating
///           point. One member of each process runs the whole chain, on its own thread
/// memory    none beside out in one process
/// cost      members - 2 calls of combine; counted as a chain, n elements enter all but the first
/// throws    Error for out.size or identity.size != n, overlapping spans, an unknown direction; what combine
///           throws; and as Communicator
template <Communicator Device, class T, class Combine>
requires std::invocable<const Combine&, std::span<const T>, std::span<const T>, std::span<T>>
[[nodiscard]] auto start_exclusive_scan(Device& device, const AxisTuple& axes,
                                        std::type_identity_t<std::span<const T>> in,
                                        std::type_identity_t<std::span<const T>> identity,
                                        std::span<T> out, Combine combine,
                                        ScanDirection direction = ScanDirection::forward,
                                        CallSite site = CallSite::here(),
                                        Overlap overlap = Overlap::overlappable) {
  const detail::Group group = detail::group_of(device, Collective::exclusive_scan, axes);
  const std::int64_t n = detail::length(in);
  require(direction == ScanDirection::forward || direction == ScanDirection::reverse, group.where,
          "direction", direction, "must be forward or reverse");
  detail::require_addressable(group, n, data_type<T>());
  require_equal(group.where, "identity.size", identity.size(), "in.size", n);
  require_equal(group.where, "out.size", out.size(), "in.size", n);
  detail::require_disjoint<T>(group, in, out);
  detail::require_disjoint<T>(group, identity, out);
  const auto work = [identity, n, group, direction, combine = std::move(combine)](
                        Device& self, typename Device::Ticket& ticket, Traffic& traffic) {
    traffic.recv_bytes = traffic.wire_bytes;
    std::int64_t chainer = 0;
    while (!self.in_process(ticket, chainer)) {
      ++chainer;
    }
    if (chainer != group.index) {
      return;
    }
    const auto at = [&](std::int64_t place) {
      return direction == ScanDirection::forward ? place : group.members - 1 - place;
    };
    std::int64_t last = group.members - 1;
    while (!self.in_process(ticket, at(last))) {
      --last;
    }
    std::vector<T> spare;  // results of members elsewhere, every other one in the other half
    std::span<const T> before = identity;
    for (std::int64_t place = 0; place <= last; ++place) {
      std::span<T> result;
      if (self.in_process(ticket, at(place))) {
        const std::span<std::byte> bytes = self.neighbour_output(ticket, at(place));
        result = {reinterpret_cast<T*>(bytes.data()), static_cast<std::size_t>(n)};
      } else {
        spare.resize(static_cast<std::size_t>(2 * n));
        result = std::span(spare).subspan(static_cast<std::size_t>(place % 2 * n),
                                          static_cast<std::size_t>(n));
      }
      if (place < 2) {
        const T* const source =
            place == 0 ? identity.data() : detail::elements<T>(self.read(ticket, at(0)));
        heddle::detail::copy_elements(source, n, result.data());
      } else {
        const std::span<const T> later(detail::elements<T>(self.read(ticket, at(place - 1))),
                                       static_cast<std::size_t>(n));
        combine(before, later, result);
      }
      before = result;
    }
  };
  const std::int64_t reverse = direction == ScanDirection::reverse ? 1 : 0;
  return Pending(device,
                 CollectiveCall{.signature = {.op = Collective::exclusive_scan,
                                              .axes = axes,
                                              .type = data_type<T>(),
                                              .count = n,
                                              .argument = reverse},
                                .site = site,
                                .delivery = Delivery::whole,
                                .input = std::as_bytes(in),
                                .output = std::as_writable_bytes(out)},
                 traffic_of({.op = Collective::exclusive_scan,
                             .members = group.members,
                             .index = group.index,
                             .count = n,
                             .bytes = sizeof(T),
                             .argument = reverse}),
                 overlap, work);
}

/// start_exclusive_scan() and finish() at once.
template <Communicator Device, class T, class Combine>
requires std::invocable<const Combine&, std::span<const T>, std::span<const T>, std::span<T>>
void exclusive_scan(Device& device, const AxisTuple& axes,
                    std::type_identity_t<std::span<const T>> in,
                    std::type_identity_t<std::span<const T>> identity, std::span<T> out,
                    Combine combine, ScanDirection direction = ScanDirection::forward,
                    CallSite site = CallSite::here()) {
  start_exclusive_scan<Device, T, Combine>(device, axes, in, identity, out, std::move(combine),
                                           direction, site, Overlap::blocking)
      .finish();
}

}  // namespace heddle::mesh

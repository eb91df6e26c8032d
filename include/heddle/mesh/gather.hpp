#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "heddle/core/error.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/detail/collective.hpp"
#include "heddle/mesh/detail/stream.hpp"
#include "heddle/mesh/pending.hpp"

namespace heddle::mesh {

/// Every member's elements on every member, in index order along `axes`: sharded -> replicated.
///   out = x_0 x_1 ... x_{G-1}; its transpose is reduce_scatter(sum), which consumes partial cotangents
/// shapes    in [n], n equal on all members; out [G * n]
/// writes    all of out
/// alias     in may be this member's own block of out, else disjoint from it
/// specials  n = 0 and one member are legal
/// order     bits are moved, never computed with
/// memory    none beside out
/// cost      (G - 1) * n elements enter the device
/// throws    Error for out.size != G * n, overlapping spans, more than 2^63 - 1 bytes; and as
///           Communicator
template <Communicator Device, class T>
[[nodiscard]] auto start_all_gather(Device& device, const AxisTuple& axes,
                                    std::type_identity_t<std::span<const T>> in, std::span<T> out,
                                    CallSite site = CallSite::here(),
                                    Overlap overlap = Overlap::overlappable) {
  const detail::Group group = detail::group_of(device, Collective::all_gather, axes);
  const std::int64_t n = detail::length(in);
  detail::require_addressable(group, n, data_type<T>());
  require_equal(group.where, "out.size", out.size(), "members * in.size", group.members * n);
  if (in.data() != out.data() + group.index * n) {
    detail::require_disjoint<T>(group, in, out);
  }
  const auto work = [out, n, members = group.members, own = group.index](
                        Device& self, typename Device::Ticket& ticket, Traffic& traffic) {
    const heddle::detail::ResultCopy copy(members, static_cast<std::int64_t>(out.size_bytes()));
    for (std::int64_t i = 0; i < members; ++i) {
      // Everybody starts at its own block, so that not all read the same one at a time.
      const std::int64_t member = (own + i) % members;
      const std::span<const std::byte> bytes = self.read(ticket, member);
      copy(detail::elements<T>(bytes), n, out.data() + member * n);
      traffic.recv_bytes += member == own ? 0 : static_cast<std::int64_t>(bytes.size());
    }
  };
  return Pending(device,
                 CollectiveCall{.signature = {.op = Collective::all_gather,
                                              .axes = axes,
                                              .type = data_type<T>(),
                                              .count = n},
                                .site = site,
                                .delivery = Delivery::whole,
                                .input = std::as_bytes(in)},
                 traffic_of({.op = Collective::all_gather,
                             .members = group.members,
                             .index = group.index,
                             .count = n,
                             .bytes = sizeof(T)}),
                 overlap, work);
}

/// start_all_gather() and finish() at once.
template <Communicator Device, class T>
void all_gather(Device& device, const AxisTuple& axes, std::type_identity_t<std::span<const T>> in,
                std::span<T> out, CallSite site = CallSite::here()) {
  start_all_gather<Device, T>(device, axes, in, out, site, Overlap::blocking).finish();
}

/// all_gather of inputs whose lengths differ.
///   out = x_0 x_1 ... x_{G-1}; offsets[j] is where x_j begins, offsets[G] where the last one ends
/// shapes    in [n_i], n_i >= 0; out: room for the sum of all n_i; offsets [G + 1]
/// writes    the first offsets[G] elements of out, all of offsets; returns offsets[G]
/// alias     disjoint
/// specials  n_i = 0 on some members or on all
/// cost      the others' n_j elements enter the device
/// throws    Error for offsets.size != G + 1, overlapping spans; once the lengths are known, on the member
///           whose out is too small; and as Communicator
template <Communicator Device, class T>
[[nodiscard]] auto start_all_gather_v(Device& device, const AxisTuple& axes,
                                      std::type_identity_t<std::span<const T>> in, std::span<T> out,
                                      std::span<std::int64_t> offsets,
                                      CallSite site = CallSite::here(),
                                      Overlap overlap = Overlap::overlappable) {
  const detail::Group group = detail::group_of(device, Collective::all_gather_v, axes);
  detail::require_addressable(group, detail::length(in), data_type<T>());
  require_equal(group.where, "offsets.size", offsets.size(), "members + 1", group.members + 1);
  detail::require_disjoint<T>(group, in, out);
  const auto work = [out, offsets, group](Device& self, typename Device::Ticket& ticket,
                                          Traffic& traffic) {
    std::int64_t total = 0;
    for (std::int64_t member = 0; member < group.members; ++member) {
      total += detail::length(self.read(ticket, member)) / static_cast<std::int64_t>(sizeof(T));
    }
    if (total > detail::length(out)) {
      fail(group.where, "out.size", out.size(),
           "must be at least the sum of all lengths (" + std::to_string(total) + ")");
    }
    const heddle::detail::ResultCopy copy(group.members,
                                          total * static_cast<std::int64_t>(sizeof(T)));
    std::int64_t at = 0;
    for (std::int64_t member = 0; member < group.members; ++member) {
      const std::span<const std::byte> bytes = self.read(ticket, member);
      const std::int64_t n = detail::length(bytes) / static_cast<std::int64_t>(sizeof(T));
      copy(detail::elements<T>(bytes), n, out.data() + at);
      offsets[static_cast<std::size_t>(member)] = at;
      at += n;
      traffic.recv_bytes += member == group.index ? 0 : detail::length(bytes);
    }
    offsets.back() = at;
    traffic.wire_bytes = traffic.recv_bytes;
    return total;
  };
  const auto payload = static_cast<std::int64_t>(in.size_bytes());
  return Pending(device,
                 CollectiveCall{.signature = {.op = Collective::all_gather_v,
                                              .axes = axes,
                                              .type = data_type<T>(),
                                              .count = CollectiveSignature::ragged},
                                .site = site,
                                .delivery = Delivery::whole,
                                .input = std::as_bytes(in)},
                 Traffic{.payload_bytes = payload, .sent_bytes = (group.members - 1) * payload},
                 overlap, work);
}

/// start_all_gather_v() and finish() at once.
template <Communicator Device, class T>
std::int64_t all_gather_v(Device& device, const AxisTuple& axes,
                          std::type_identity_t<std::span<const T>> in, std::span<T> out,
                          std::span<std::int64_t> offsets, CallSite site = CallSite::here()) {
  return start_all_gather_v<Device, T>(device, axes, in, out, offsets, site, Overlap::blocking)
      .finish();
}

}  // namespace heddle::mesh

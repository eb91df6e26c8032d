#pragma once

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

/// Block j of member i becomes block i of member j: sharded along one dimension -> along another.
///   its transpose is itself
/// shapes    in, out [G * n], n equal on all members; blocks are addressed by index in the group
/// writes    all of out
/// alias     disjoint
/// specials  n = 0 and one member are legal
/// memory    none beside out
/// cost      (G - 1) * n elements enter the device
/// throws    Error for in.size not divisible by G, out.size != in.size, overlapping spans; and as
///           Communicator
template <Communicator Device, class T>
[[nodiscard]] auto start_all_to_all(Device& device, const AxisTuple& axes,
                                    std::type_identity_t<std::span<const T>> in, std::span<T> out,
                                    CallSite site = CallSite::here(),
                                    Overlap overlap = Overlap::overlappable) {
  const detail::Group group = detail::group_of(device, Collective::all_to_all, axes);
  const std::int64_t total = detail::length(in);
  if (total % group.members != 0) {
    fail(group.where, "in.size", total,
         "must be a multiple of the members (" + std::to_string(group.members) + ")");
  }
  require_equal(group.where, "out.size", out.size(), "in.size", total);
  detail::require_disjoint<T>(group, in, out);
  const std::int64_t n = total / group.members;
  const auto work = [out, n, members = group.members, own = group.index](
                        Device& self, typename Device::Ticket& ticket, Traffic& traffic) {
    const heddle::detail::ResultCopy copy(members, static_cast<std::int64_t>(out.size_bytes()));
    for (std::int64_t i = 0; i < members; ++i) {
      const std::int64_t member = (own + i) % members;
      const std::span<const std::byte> bytes = self.read(ticket, member);
      copy(detail::elements<T>(bytes), n, out.data() + member * n);
      traffic.recv_bytes += member == own ? 0 : detail::length(bytes);
    }
  };
  return Pending(device,
                 CollectiveCall{.signature = {.op = Collective::all_to_all,
                                              .axes = axes,
                                              .type = data_type<T>(),
                                              .count = total},
                                .site = site,
                                .delivery = Delivery::blocks,
                                .input = std::as_bytes(in)},
                 traffic_of({.op = Collective::all_to_all,
                             .members = group.members,
                             .index = group.index,
                             .count = total,
                             .bytes = sizeof(T)}),
                 overlap, work,
                 detail::equal_offsets(group.members, n * static_cast<std::int64_t>(sizeof(T))));
}

/// start_all_to_all() and finish() at once.
template <Communicator Device, class T>
void all_to_all(Device& device, const AxisTuple& axes, std::type_identity_t<std::span<const T>> in,
                std::span<T> out, CallSite site = CallSite::here()) {
  start_all_to_all<Device, T>(device, axes, in, out, site, Overlap::blocking).finish();
}

/// What an all_to_all_v will bring: recv_counts[j] = member j's send_counts[own index]. For callers
/// that size their output by it.
/// shapes    send_counts, recv_counts [G]
/// throws    as all_to_all
template <Communicator Device>
void exchange_counts(Device& device, const AxisTuple& axes,
                     std::span<const std::int64_t> send_counts, std::span<std::int64_t> recv_counts,
                     CallSite site = CallSite::here()) {
  all_to_all<Device, std::int64_t>(device, axes, send_counts, recv_counts, site);
}

/// all_to_all of blocks whose lengths differ. Every member says what it sends; out holds what arrives in
/// the order of its sources.
///   out = (block i of x_0) (block i of x_1) ...; its transpose swaps the counts
/// shapes    send_counts [G], >= 0; in [sum of send_counts]; out: room for what arrives; recv_counts [G]
/// writes    the first sum(recv_counts) elements of out, all of recv_counts; returns that sum
/// alias     disjoint
/// specials  counts of 0, and members that send or receive nothing at all
/// cost      what others send here enters the device
/// throws    Error for send_counts.size or recv_counts.size != G, a negative count, in.size != sum of
///           send_counts, overlapping spans; once the counts are known, on the member whose out is too
///           small; and as Communicator
template <Communicator Device, class T>
[[nodiscard]] auto start_all_to_all_v(Device& device, const AxisTuple& axes,
                                      std::type_identity_t<std::span<const T>> in,
                                      std::span<const std::int64_t> send_counts, std::span<T> out,
                                      std::span<std::int64_t> recv_counts,
                                      CallSite site = CallSite::here(),
                                      Overlap overlap = Overlap::overlappable) {
  const detail::Group group = detail::group_of(device, Collective::all_to_all_v, axes);
  require_equal(group.where, "send_counts.size", send_counts.size(), "members", group.members);
  require_equal(group.where, "recv_counts.size", recv_counts.size(), "members", group.members);
  const std::int64_t total = detail::sum_of_counts(group, "send_counts", send_counts);
  require_equal(group.where, "in.size", in.size(), "sum of send_counts", total);
  detail::require_disjoint<T>(group, in, out);
  const auto work = [out, recv_counts, group](Device& self, typename Device::Ticket& ticket,
                                              Traffic& traffic) {
    std::int64_t arriving = 0;
    for (std::int64_t member = 0; member < group.members; ++member) {
      arriving += detail::length(self.read(ticket, member)) / static_cast<std::int64_t>(sizeof(T));
    }
    if (arriving > detail::length(out)) {
      fail(group.where, "out.size", out.size(),
           "must be at least what arrives (" + std::to_string(arriving) + ")");
    }
    const heddle::detail::ResultCopy copy(group.members,
                                          arriving * static_cast<std::int64_t>(sizeof(T)));
    std::int64_t at = 0;
    for (std::int64_t member = 0; member < group.members; ++member) {
      const std::span<const std::byte> bytes = self.read(ticket, member);
      const std::int64_t n = detail::length(bytes) / static_cast<std::int64_t>(sizeof(T));
      copy(detail::elements<T>(bytes), n, out.data() + at);
      recv_counts[static_cast<std::size_t>(member)] = n;
      at += n;
      traffic.recv_bytes += member == group.index ? 0 : detail::length(bytes);
    }
    traffic.wire_bytes = traffic.recv_bytes;
    return arriving;
  };
  const auto own = send_counts[static_cast<std::size_t>(group.index)];
  const auto payload = static_cast<std::int64_t>(in.size_bytes());
  return Pending(device,
                 CollectiveCall{.signature = {.op = Collective::all_to_all_v,
                                              .axes = axes,
                                              .type = data_type<T>(),
                                              .count = CollectiveSignature::ragged},
                                .site = site,
                                .delivery = Delivery::blocks,
                                .input = std::as_bytes(in),
                                .cut = BlockCut::own},
                 Traffic{.payload_bytes = payload,
                         .sent_bytes = payload - own * static_cast<std::int64_t>(sizeof(T))},
                 overlap, work, detail::running_offsets<T>(send_counts));
}

/// start_all_to_all_v() and finish() at once.
template <Communicator Device, class T>
std::int64_t all_to_all_v(Device& device, const AxisTuple& axes,
                          std::type_identity_t<std::span<const T>> in,
                          std::span<const std::int64_t> send_counts, std::span<T> out,
                          std::span<std::int64_t> recv_counts, CallSite site = CallSite::here()) {
  return start_all_to_all_v<Device, T>(device, axes, in, send_counts, out, recv_counts, site,
                                       Overlap::blocking)
      .finish();
}

}  // namespace heddle::mesh

#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/detail/collective.hpp"
#include "heddle/mesh/detail/stream.hpp"
#include "heddle/mesh/pending.hpp"

namespace heddle::mesh {

namespace detail {

/// Copies the input of `sources[own index]` to out, or zeros where that is -1.
template <class T>
[[nodiscard]] auto copy_from_source(std::span<T> out, std::int64_t source, std::int64_t own) {
  return [out, source, own](auto& self, auto& ticket, Traffic& traffic) {
    if (source < 0) {
      std::fill(out.begin(), out.end(), T{});
      return;
    }
    const std::span<const std::byte> bytes = self.read(ticket, source);
    heddle::detail::copy_elements(elements<T>(bytes), length(out), out.data());
    traffic.recv_bytes += source == own ? 0 : length(bytes);
  };
}

}  // namespace detail

/// The root's elements on every member.
///   its transpose is a sum to the root
/// shapes    data [n], n equal on all members; root: an index along `axes`
/// writes    data, off the root
/// specials  n = 0 and one member are legal
/// cost      n elements enter every device but the root
/// throws    Error for root outside [0, G); and as Communicator
template <Communicator Device, class T>
[[nodiscard]] auto start_broadcast(Device& device, const AxisTuple& axes, std::int64_t root,
                                   std::span<T> data, CallSite site = CallSite::here(),
                                   Overlap overlap = Overlap::overlappable) {
  const detail::Group group = detail::group_of(device, Collective::broadcast, axes);
  const std::int64_t n = detail::length(data);
  if (root < 0 || root >= group.members) {
    fail(group.where, "root", root, "must be in [0, " + std::to_string(group.members) + ")");
  }
  detail::require_addressable(group, n, data_type<T>());
  const bool is_root = group.index == root;
  return Pending(
      device,
      CollectiveCall{.signature = {.op = Collective::broadcast,
                                   .axes = axes,
                                   .type = data_type<T>(),
                                   .count = n,
                                   .argument = root},
                     .site = site,
                     .delivery = Delivery::from_source,
                     .input = is_root ? std::as_bytes(data) : std::span<const std::byte>()},
      traffic_of({.op = Collective::broadcast,
                  .members = group.members,
                  .index = group.index,
                  .count = n,
                  .bytes = sizeof(T),
                  .argument = root}),
      overlap, detail::copy_from_source(data, root, group.index),
      std::vector<std::int64_t>(static_cast<std::size_t>(group.members), root));
}

/// start_broadcast() and finish() at once.
template <Communicator Device, class T>
void broadcast(Device& device, const AxisTuple& axes, std::int64_t root, std::span<T> data,
               CallSite site = CallSite::here()) {
  start_broadcast<Device, T>(device, axes, root, data, site, Overlap::blocking).finish();
}

/// A step around the ring of `axes`: out_i = x_{(i - distance) mod G}.
///   its transpose is the shift by -distance
/// shapes    in, out [n], n equal on all members; distance: any whole number
/// writes    all of out
/// alias     in may be out, for a copy of in
/// specials  n = 0 and one member are legal; a distance of 0 mod G copies
/// memory    n elements where in is out, else none
/// cost      n elements enter the device unless distance mod G = 0
/// throws    Error for out.size != n, spans that overlap without being the same; and as Communicator
template <Communicator Device, class T>
[[nodiscard]] auto start_shift(Device& device, const AxisTuple& axes, std::int64_t distance,
                               std::type_identity_t<std::span<const T>> in, std::span<T> out,
                               CallSite site = CallSite::here(),
                               Overlap overlap = Overlap::overlappable) {
  const detail::Group group = detail::group_of(device, Collective::shift, axes);
  const std::int64_t n = detail::length(in);
  detail::require_addressable(group, n, data_type<T>());
  require_equal(group.where, "out.size", out.size(), "in.size", n);
  detail::require_same_or_disjoint<T>(group, in, out);
  const std::int64_t members = group.members;
  const std::int64_t step = (distance % members + members) % members;
  std::vector<std::int64_t> sources(static_cast<std::size_t>(members));
  for (std::int64_t i = 0; i < members; ++i) {
    sources[static_cast<std::size_t>(i)] = (i - step + members) % members;
  }
  // In place, a neighbour would read what has already been overwritten.
  const bool in_place = n > 0 && in.data() == out.data();
  std::vector<T> copy(in_place ? in.begin() : in.end(), in.end());
  const std::span<const T> laid_open = in_place ? std::span<const T>(copy) : in;
  return Pending(
      device,
      CollectiveCall{.signature = {.op = Collective::shift,
                                   .axes = axes,
                                   .type = data_type<T>(),
                                   .count = n,
                                   .argument = distance},
                     .site = site,
                     .delivery = Delivery::from_source,
                     .input = std::as_bytes(laid_open)},
      traffic_of({.op = Collective::shift,
                  .members = members,
                  .index = group.index,
                  .count = n,
                  .bytes = sizeof(T),
                  .argument = distance}),
      overlap,
      [copy = std::move(copy), work = detail::copy_from_source(
                                   out, sources[static_cast<std::size_t>(group.index)],
                                   group.index)](Device& self, typename Device::Ticket& ticket,
                                                 Traffic& traffic) { work(self, ticket, traffic); },
      sources);
}

/// start_shift() and finish() at once.
template <Communicator Device, class T>
void shift(Device& device, const AxisTuple& axes, std::int64_t distance,
           std::type_identity_t<std::span<const T>> in, std::span<T> out,
           CallSite site = CallSite::here()) {
  start_shift<Device, T>(device, axes, distance, in, out, site, Overlap::blocking).finish();
}

/// One arrow of a permutation, between indices of a group.
struct Move {
  std::int64_t from = 0;
  std::int64_t to = 0;
};

/// Each arrow's source to its destination; members that are nobody's destination get zeros.
///   its transpose turns the arrows round
/// shapes    moves: equal on all members, each destination at most once; in, out [n], n equal on all
/// writes    all of out
/// alias     disjoint
/// specials  no moves: zeros everywhere; a source may serve several destinations
/// cost      n elements enter a destination whose source is another device
/// throws    Error for an index outside [0, G), a destination named twice, out.size != n, overlapping
///           spans; and as Communicator
template <Communicator Device, class T>
[[nodiscard]] auto start_permute(Device& device, const AxisTuple& axes, std::span<const Move> moves,
                                 std::type_identity_t<std::span<const T>> in, std::span<T> out,
                                 CallSite site = CallSite::here(),
                                 Overlap overlap = Overlap::overlappable) {
  const detail::Group group = detail::group_of(device, Collective::permute, axes);
  const std::int64_t n = detail::length(in);
  detail::require_addressable(group, n, data_type<T>());
  std::vector<std::int64_t> sources(static_cast<std::size_t>(group.members), -1);
  const std::string range = "must be in [0, " + std::to_string(group.members) + ")";
  std::int64_t leaving = 0;
  for (std::size_t i = 0; i < moves.size(); ++i) {
    const auto& [from, to] = moves[i];
    const std::string name = element_name("moves", i);
    require(from >= 0 && from < group.members, group.where, name + ".from", from, range);
    require(to >= 0 && to < group.members, group.where, name + ".to", to, range);
    std::int64_t& source = sources[static_cast<std::size_t>(to)];
    require(source == -1, group.where, name + ".to", to, "must be a destination only once");
    source = from;
    leaving += from == group.index && to != group.index ? 1 : 0;
  }
  require_equal(group.where, "out.size", out.size(), "in.size", n);
  detail::require_disjoint<T>(group, in, out);
  const std::int64_t source = sources[static_cast<std::size_t>(group.index)];
  const auto bytes = static_cast<std::int64_t>(in.size_bytes());
  const std::uint64_t pattern =
      detail::hash_bytes(std::as_bytes(std::span<const std::int64_t>(sources)));
  return Pending(device,
                 CollectiveCall{.signature = {.op = Collective::permute,
                                              .axes = axes,
                                              .type = data_type<T>(),
                                              .count = n,
                                              .argument = static_cast<std::int64_t>(pattern)},
                                .site = site,
                                .delivery = Delivery::from_source,
                                .input = std::as_bytes(in)},
                 Traffic{.payload_bytes = bytes,
                         .wire_bytes = source >= 0 && source != group.index ? bytes : 0,
                         .sent_bytes = leaving * bytes},
                 overlap, detail::copy_from_source(out, source, group.index), sources);
}

/// start_permute() and finish() at once.
template <Communicator Device, class T>
void permute(Device& device, const AxisTuple& axes, std::span<const Move> moves,
             std::type_identity_t<std::span<const T>> in, std::span<T> out,
             CallSite site = CallSite::here()) {
  start_permute<Device, T>(device, axes, moves, in, out, site, Overlap::blocking).finish();
}

}  // namespace heddle::mesh

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
#include "heddle/mesh/fold.hpp"
#include "heddle/mesh/pending.hpp"

namespace heddle::mesh {

namespace detail {

/// The accumulator a caller asked for, or T's own.
template <class A, class T>
using AccumulatorOr = std::conditional_t<std::is_void_v<A>, FoldAccumulator<T>, A>;

template <class A, class T>
inline constexpr bool can_accumulate = std::is_same_v<A, FoldAccumulator<T>> ||
                                       (std::is_floating_point_v<A> && !std::is_integral_v<T> &&
                                        sizeof(A) >= sizeof(FoldAccumulator<T>));

inline void require_reduction(const Group& group, Reduce reduce) {
  require(reduce == Reduce::sum || reduce == Reduce::max || reduce == Reduce::min, group.where,
          "reduce", reduce, "must be sum, max or min");
}

/// Folds what every member laid open for this one into `out`, and counts what came from others.
template <class A, class T, class Device>
void fold_reads(Device& device, typename Device::Ticket& ticket, const Group& group, Reduce reduce,
                std::span<T> out, Traffic& traffic) {
  std::vector<const T*> inputs(static_cast<std::size_t>(group.members));
  for (std::int64_t member = 0; member < group.members; ++member) {
    const std::span<const std::byte> bytes = device.read(ticket, member);
    inputs[static_cast<std::size_t>(member)] = elements<T>(bytes);
    traffic.recv_bytes += member == group.index ? 0 : length(bytes);
  }
  heddle::fold<A>(reduce, std::span<const T* const>(inputs), length(out), out.data());
}

template <class A, class T>
[[nodiscard]] CollectiveSignature fold_signature(Collective op, const AxisTuple& axes,
                                                 std::int64_t count, Reduce reduce) {
  static_assert(can_accumulate<A, T>,
                "mesh: the accumulator must be the element's own or a wider floating-point type");
  return {.op = op,
          .axes = axes,
          .type = data_type<T>(),
          .count = count,
          .fold = static_cast<std::int64_t>(reduce),
          .accumulator = data_type<A>()};
}

}  // namespace detail

/// Folds the members' inputs and leaves each member one block of the result: partial -> sharded.
///   out_i = fold_j x_j[i * n .. (i + 1) * n); its transpose is all_gather
/// shapes    in [G * n]; out [n], n equal on all members
/// dtypes    T: Foldable; summed in A (float for bf16 and f16, else T; a wider A may be named) and
///           rounded to T once
/// writes    all of out
/// alias     disjoint
/// specials  one member: a copy. -0, NaN and integer wrap as fold.hpp says
/// order     left fold in index order along `axes`; bits depend on values, members and axis order alone
/// memory    none beside out
/// cost      (G - 1) * n elements enter the device, G * n are read
/// throws    Error for in.size != G * n, overlapping spans, an unknown reduction; and as Communicator
template <class A = void, Communicator Device, Foldable T>
[[nodiscard]] auto start_reduce_scatter(Device& device, const AxisTuple& axes,
                                        std::type_identity_t<std::span<const T>> in,
                                        std::span<T> out, Reduce reduce = Reduce::sum,
                                        CallSite site = CallSite::here(),
                                        Overlap overlap = Overlap::overlappable) {
  using Sum = detail::AccumulatorOr<A, T>;
  const detail::Group group = detail::group_of(device, Collective::reduce_scatter, axes);
  const std::int64_t n = detail::length(out);
  detail::require_reduction(group, reduce);
  detail::require_addressable(group, n, data_type<T>());
  require_equal(group.where, "in.size", in.size(), "members * out.size", group.members * n);
  detail::require_disjoint<T>(group, in, out);
  const auto work = [out, reduce, group](Device& self, typename Device::Ticket& ticket,
                                         Traffic& traffic) {
    detail::fold_reads<Sum>(self, ticket, group, reduce, out, traffic);
  };
  return Pending(device,
                 CollectiveCall{.signature = detail::fold_signature<Sum, T>(
                                    Collective::reduce_scatter, axes, n, reduce),
                                .site = site,
                                .delivery = Delivery::blocks,
                                .input = std::as_bytes(in)},
                 traffic_of({.op = Collective::reduce_scatter,
                             .members = group.members,
                             .index = group.index,
                             .count = n,
                             .bytes = sizeof(T)}),
                 overlap, work,
                 detail::equal_offsets(group.members, n * static_cast<std::int64_t>(sizeof(T))));
}

/// start_reduce_scatter() and finish() at once.
template <class A = void, Communicator Device, Foldable T>
void reduce_scatter(Device& device, const AxisTuple& axes,
                    std::type_identity_t<std::span<const T>> in, std::span<T> out,
                    Reduce reduce = Reduce::sum, CallSite site = CallSite::here()) {
  start_reduce_scatter<A, Device, T>(device, axes, in, out, reduce, site, Overlap::blocking)
      .finish();
}

/// reduce_scatter into blocks of different lengths, the transpose of all_gather_v.
/// shapes    counts [G], equal on all members, >= 0; in [sum of counts]; out [counts[own index]]
/// specials  counts of 0 are legal
/// throws    Error for counts.size != G, a negative count, in.size != sum of counts, out.size != the
///           member's own count, overlapping spans, an unknown reduction; and as Communicator
template <class A = void, Communicator Device, Foldable T>
[[nodiscard]] auto start_reduce_scatter_v(Device& device, const AxisTuple& axes,
                                          std::span<const std::int64_t> counts,
                                          std::type_identity_t<std::span<const T>> in,
                                          std::span<T> out, Reduce reduce = Reduce::sum,
                                          CallSite site = CallSite::here(),
                                          Overlap overlap = Overlap::overlappable) {
  using Sum = detail::AccumulatorOr<A, T>;
  const detail::Group group = detail::group_of(device, Collective::reduce_scatter_v, axes);
  require_equal(group.where, "counts.size", counts.size(), "members", group.members);
  const std::int64_t total = detail::sum_of_counts(group, "counts", counts);
  detail::require_reduction(group, reduce);
  require_equal(group.where, "in.size", in.size(), "sum of counts", total);
  require_equal(group.where, "out.size", out.size(), "counts[own index]",
                counts[static_cast<std::size_t>(group.index)]);
  detail::require_disjoint<T>(group, in, out);
  const auto work = [out, reduce, group](Device& self, typename Device::Ticket& ticket,
                                         Traffic& traffic) {
    detail::fold_reads<Sum>(self, ticket, group, reduce, out, traffic);
    traffic.wire_bytes = traffic.recv_bytes;
  };
  CollectiveSignature signature =
      detail::fold_signature<Sum, T>(Collective::reduce_scatter_v, axes, total, reduce);
  signature.argument = static_cast<std::int64_t>(detail::hash_bytes(std::as_bytes(counts)));
  const auto payload = static_cast<std::int64_t>(in.size_bytes());
  return Pending(device,
                 CollectiveCall{.signature = signature,
                                .site = site,
                                .delivery = Delivery::blocks,
                                .input = std::as_bytes(in)},
                 Traffic{.payload_bytes = payload,
                         .sent_bytes = payload - static_cast<std::int64_t>(out.size_bytes())},
                 overlap, work, detail::running_offsets<T>(counts));
}

/// start_reduce_scatter_v() and finish() at once.
template <class A = void, Communicator Device, Foldable T>
void reduce_scatter_v(Device& device, const AxisTuple& axes, std::span<const std::int64_t> counts,
                      std::type_identity_t<std::span<const T>> in, std::span<T> out,
                      Reduce reduce = Reduce::sum, CallSite site = CallSite::here()) {
  start_reduce_scatter_v<A, Device, T>(device, axes, counts, in, out, reduce, site,
                                       Overlap::blocking)
      .finish();
}

/// Folds the members' inputs and gives the whole result to all of them: partial -> replicated.
///   out = fold_j x_j, the very bits of all_gather(reduce_scatter(x)). The transpose of a replicated
///   cotangent is the identity: it is not summed again. There is no mean: callers divide, and name what by
/// shapes    in, out [n], n equal on all members
/// dtypes    as reduce_scatter
/// writes    all of out
/// alias     in may be out
/// specials  n need not divide by the members; one member: a copy. -0, NaN and integer wrap as fold.hpp says
/// order     as reduce_scatter: each member folds one slice for all, and the slices are then copied
/// memory    none beside out
/// cost      2 (G - 1) / G * n elements enter the device
/// throws    Error for out.size != n, spans that overlap without being the same, an unknown reduction;
///           and as Communicator
template <class A = void, Communicator Device, Foldable T>
[[nodiscard]] auto start_all_reduce(Device& device, const AxisTuple& axes,
                                    std::type_identity_t<std::span<const T>> in, std::span<T> out,
                                    Reduce reduce = Reduce::sum, CallSite site = CallSite::here(),
                                    Overlap overlap = Overlap::overlappable) {
  using Sum = detail::AccumulatorOr<A, T>;
  const detail::Group group = detail::group_of(device, Collective::all_reduce, axes);
  const std::int64_t n = detail::length(in);
  detail::require_reduction(group, reduce);
  detail::require_addressable(group, n, data_type<T>());
  require_equal(group.where, "out.size", out.size(), "in.size", n);
  detail::require_same_or_disjoint<T>(group, in, out);
  const auto work = [out, reduce, group, n](Device& self, typename Device::Ticket& ticket,
                                            Traffic& traffic) {
    // In place this overwrites the own slice of the own input, which nobody else reads.
    const IndexRange own = fold_slice(n, group.members, group.index);
    detail::fold_reads<Sum>(
        self, ticket, group, reduce,
        out.subspan(static_cast<std::size_t>(own.first), static_cast<std::size_t>(own.count)),
        traffic);
    if (group.members == 1) {
      return;
    }
    self.wait_outputs(ticket);
    const heddle::detail::ResultCopy copy(group.members,
                                          static_cast<std::int64_t>(out.size_bytes()));
    for (std::int64_t i = 1; i < group.members; ++i) {
      const std::int64_t member = (group.index + i) % group.members;
      const IndexRange slice = fold_slice(n, group.members, member);
      const std::span<const std::byte> bytes = self.read_output(ticket, member);
      copy(detail::elements<T>(bytes), slice.count, out.data() + slice.first);
      traffic.recv_bytes += detail::length(bytes);
    }
  };
  return Pending(device,
                 CollectiveCall{.signature = detail::fold_signature<Sum, T>(Collective::all_reduce,
                                                                            axes, n, reduce),
                                .site = site,
                                .delivery = Delivery::blocks,
                                .input = std::as_bytes(in),
                                .output = std::as_writable_bytes(out)},
                 traffic_of({.op = Collective::all_reduce,
                             .members = group.members,
                             .index = group.index,
                             .count = n,
                             .bytes = sizeof(T)}),
                 overlap, work, detail::slice_offsets(group.members, n, sizeof(T)));
}

/// start_all_reduce() and finish() at once.
template <class A = void, Communicator Device, Foldable T>
void all_reduce(Device& device, const AxisTuple& axes, std::type_identity_t<std::span<const T>> in,
                std::span<T> out, Reduce reduce = Reduce::sum, CallSite site = CallSite::here()) {
  start_all_reduce<A, Device, T>(device, axes, in, out, reduce, site, Overlap::blocking).finish();
}

/// A two-level fold, first along `inner`, then of those results along `outer`: another operation than
/// all_reduce over both, with other bits, and never put in its place.
/// shapes    in, out [n]
/// dtypes    as all_reduce; rounded to T after each level
/// alias     in may be out
/// throws    as all_reduce
template <class A = void, Communicator Device, Foldable T>
void all_reduce_grouped(Device& device, const AxisTuple& inner, const AxisTuple& outer,
                        std::type_identity_t<std::span<const T>> in, std::span<T> out,
                        Reduce reduce = Reduce::sum, CallSite site = CallSite::here()) {
  for (const Axis axis : inner.axes()) {
    require(!outer.contains(axis), "mesh::all_reduce_grouped", "outer", to_string(outer),
            "must not name an axis of inner");
  }
  all_reduce<A, Device, T>(device, inner, in, out, reduce, site);
  all_reduce<A, Device, T>(device, outer, out, out, reduce, site);
}

}  // namespace heddle::mesh

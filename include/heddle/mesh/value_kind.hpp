#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "heddle/core/error.hpp"
#include "heddle/mesh/collectives.hpp"
#include "heddle/mesh/communicator.hpp"

namespace heddle {

/// How the values of the devices along an axis relate to each other.
enum class ValueKind : std::uint8_t {
  sharded,     ///< different data
  replicated,  ///< the same bits
  partial,     ///< addends: a sum is still owed
};

[[nodiscard]] constexpr std::string_view kind_name(ValueKind kind) {
  switch (kind) {
    case ValueKind::sharded:
      return "sharded";
    case ValueKind::replicated:
      return "replicated";
    case ValueKind::partial:
      return "partial";
  }
  return "unknown kind";
}

/// The kind along each axis.
struct ValueKinds {
  ValueKind fsdp = ValueKind::replicated;
  ValueKind context = ValueKind::replicated;
  ValueKind expert = ValueKind::replicated;

  [[nodiscard]] constexpr ValueKind along(Axis axis) const {
    return axis == Axis::fsdp ? fsdp : axis == Axis::context ? context : expert;
  }

  /// The same kinds but for the axes of `axes`.
  [[nodiscard]] constexpr ValueKinds with(const AxisTuple& axes, ValueKind kind) const {
    return {.fsdp = axes.contains(Axis::fsdp) ? kind : fsdp,
            .context = axes.contains(Axis::context) ? kind : context,
            .expert = axes.contains(Axis::expert) ? kind : expert};
  }

  friend constexpr bool operator==(const ValueKinds&, const ValueKinds&) = default;
};

/// A device's values together with what they are along each axis.
template <class T>
struct Placed {
  std::span<T> values;
  ValueKinds kinds;
};

namespace mesh {

/// What a collective over `axes` makes of values of these kinds. Axes of one device are of every kind.
///
///   all_gather      sharded -> replicated      reduce_scatter   partial -> sharded
///   all_reduce      partial -> replicated      broadcast        sharded or replicated -> replicated
///   all_to_all, shift, permute, exclusive_scan sharded -> sharded
///
/// throws    Error for a kind that the collective does not take: a gather of replicated values would hold
///           each one G times, a reduction of them would count it G times
[[nodiscard]] inline ValueKinds kinds_after(Collective op, const AxisTuple& axes,
                                            const MeshAxes& mesh, const ValueKinds& before) {
  const auto refuse = [&](Axis axis, const std::string& rule) {
    fail("mesh::" + std::string(collective_name(op)), "kind along " + std::string(axis_name(axis)),
         kind_name(before.along(axis)), rule);
  };
  const auto require_kind = [&](ValueKind needed, const std::string& else_what) {
    for (const Axis axis : axes.axes()) {
      if (mesh.size(axis) > 1 && before.along(axis) != needed) {
        refuse(axis, "must be " + std::string(kind_name(needed)) +
                         (before.along(axis) == ValueKind::replicated ? else_what : std::string()));
      }
    }
  };
  const std::string times = std::to_string(axes.size(mesh)) + " times";
  switch (op) {
    case Collective::all_gather:
    case Collective::all_gather_v:
      require_kind(ValueKind::sharded, ": each value would be held " + times);
      return before.with(axes, ValueKind::replicated);
    case Collective::reduce_scatter:
    case Collective::reduce_scatter_v:
      require_kind(ValueKind::partial, ": each value would be counted " + times);
      return before.with(axes, ValueKind::sharded);
    case Collective::all_reduce:
      require_kind(ValueKind::partial, ": each value would be counted " + times);
      return before.with(axes, ValueKind::replicated);
    case Collective::broadcast:
      for (const Axis axis : axes.axes()) {
        if (mesh.size(axis) > 1 && before.along(axis) == ValueKind::partial) {
          refuse(axis, "must be sharded or replicated");
        }
      }
      return before.with(axes, ValueKind::replicated);
    case Collective::shift:
    case Collective::permute:
    case Collective::all_to_all:
    case Collective::all_to_all_v:
    case Collective::exclusive_scan:
      require_kind(ValueKind::sharded, "");
      return before;
    case Collective::barrier:
    case Collective::compare:
      return before;
  }
  fail("mesh::kinds_after", "op", op, "must be one of the collectives");
}

/// Under ReplicaCheck::hashed: that values which claim to be replicated along an axis are.
template <Communicator Device, class T>
void require_kinds_hold(Device& device, std::string_view name, const Placed<const T>& placed,
                        CallSite site = CallSite::here()) {
  for (const Axis axis : all_axes) {
    if (placed.kinds.along(axis) == ValueKind::replicated) {
      require_replicated(device, {axis}, name, placed.values, site);
    }
  }
}

/// all_gather of values whose kinds are known: refuses what kinds_after() refuses, checks the claim of
/// equal copies where the mesh checks replicas, and says what the result is.
template <Communicator Device, class T>
Placed<T> all_gather(Device& device, const AxisTuple& axes,
                     std::type_identity_t<Placed<const T>> in, std::span<T> out,
                     CallSite site = CallSite::here()) {
  const ValueKinds after =
      kinds_after(Collective::all_gather, axes, device.topology().axes(), in.kinds);
  require_kinds_hold<Device, T>(device, "all_gather input", in, site);
  all_gather<Device, T>(device, axes, in.values, out, site);
  return {out, after};
}

/// reduce_scatter(sum) of values whose kinds are known.
template <Communicator Device, Foldable T>
Placed<T> reduce_scatter(Device& device, const AxisTuple& axes,
                         std::type_identity_t<Placed<const T>> in, std::span<T> out,
                         CallSite site = CallSite::here()) {
  const ValueKinds after =
      kinds_after(Collective::reduce_scatter, axes, device.topology().axes(), in.kinds);
  require_kinds_hold<Device, T>(device, "reduce_scatter input", in, site);
  reduce_scatter<void, Device, T>(device, axes, in.values, out, Reduce::sum, site);
  return {out, after};
}

/// all_reduce(sum) of values whose kinds are known. Applied to the cotangent of its own result, which is
/// replicated, it refuses: that cotangent passes unchanged.
template <Communicator Device, Foldable T>
Placed<T> all_reduce(Device& device, const AxisTuple& axes,
                     std::type_identity_t<Placed<const T>> in, std::span<T> out,
                     CallSite site = CallSite::here()) {
  const ValueKinds after =
      kinds_after(Collective::all_reduce, axes, device.topology().axes(), in.kinds);
  require_kinds_hold<Device, T>(device, "all_reduce input", in, site);
  all_reduce<void, Device, T>(device, axes, in.values, out, Reduce::sum, site);
  return {out, after};
}

}  // namespace mesh

}  // namespace heddle

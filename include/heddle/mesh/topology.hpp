#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/axes.hpp"

namespace heddle {

/// Where a device stands, one index an axis.
struct Coordinate {
  std::int64_t fsdp = 0;
  std::int64_t context = 0;
  std::int64_t expert = 0;

  [[nodiscard]] constexpr std::int64_t at(Axis axis) const {
    switch (axis) {
      case Axis::fsdp:
        return fsdp;
      case Axis::context:
        return context;
      case Axis::expert:
        return expert;
    }
    return 0;
  }

  /// The same place but for one axis.
  [[nodiscard]] constexpr Coordinate with(Axis axis, std::int64_t index) const {
    Coordinate moved = *this;
    switch (axis) {
      case Axis::fsdp:
        moved.fsdp = index;
        break;
      case Axis::context:
        moved.context = index;
        break;
      case Axis::expert:
        moved.expert = index;
        break;
    }
    return moved;
  }

  friend constexpr bool operator==(const Coordinate&, const Coordinate&) = default;
};

/// Refuses a value that a product of axes does not divide; nothing is ever cut off in silence.
///
///   "mesh: <what> = <value>: is not divisible by <axis>=<size> x ... (= <product>), remainder <r>;
///   nearest: <lo>, <hi>", and after it `note`, if there is one
///
/// throws    Error with that text; the lower neighbour is left out where it would be 0
inline void require_divisible(std::string_view what, std::int64_t value, const MeshAxes& mesh,
                              const AxisTuple& axes, std::int64_t factor = 1,
                              std::string_view factor_name = {}, std::string_view note = {}) {
  const std::int64_t product = axes.size(mesh) * factor;
  if (value % product == 0) {
    return;
  }
  std::string names;
  for (const Axis axis : axes.axes()) {
    names += (names.empty() ? "" : " x ") + std::string(axis_name(axis)) + "=" +
             std::to_string(mesh.size(axis));
  }
  if (factor != 1) {
    names += (names.empty() ? "" : " x ") + std::string(factor_name) + "=" + std::to_string(factor);
  }
  const std::int64_t below = value / product * product;
  fail("mesh", what, value,
       "is not divisible by " + names + " (= " + std::to_string(product) + "), remainder " +
           std::to_string(value % product) +
           "; nearest: " + (below > 0 ? std::to_string(below) + ", " : std::string()) +
           std::to_string(below + product) + (note.empty() ? "" : "; ") + std::string(note));
}

/// The devices of a mesh and their groups. Ids are row-major over (fsdp, context, expert), so `expert`
/// varies fastest: id = (fsdp * C + context) * X + expert.
///
/// source    JAX's Mesh array; torch's DeviceMesh
class Topology {
 public:
  /// throws    Error for an axis size < 1
  explicit Topology(const MeshAxes& axes) : axes_(axes) {
    for (const Axis axis : all_axes) {
      require(axes.size(axis) >= 1, "Topology", axis_name(axis), axes.size(axis), "must be >= 1");
    }
  }

  /// A mesh over exactly `supplied` devices.
  ///
  /// throws    Error with the axes, their product and the number supplied where the two differ
  Topology(const MeshAxes& axes, std::int64_t supplied) : Topology(axes) {
    if (supplied != devices()) {
      fail("Topology", "devices", supplied,
           "must equal the product of " + to_string(axes) + " (" + std::to_string(devices()) + ")");
    }
  }

  [[nodiscard]] const MeshAxes& axes() const { return axes_; }
  [[nodiscard]] std::int64_t devices() const { return axes_.devices(); }

  /// throws    Error for an id outside [0, devices)
  [[nodiscard]] Coordinate coordinate(std::int64_t id) const {
    require(id >= 0 && id < devices(), "Topology::coordinate", "id", id,
            "must be in [0, " + std::to_string(devices()) + ")");
    return {.fsdp = id / (axes_.context * axes_.expert),
            .context = id / axes_.expert % axes_.context,
            .expert = id % axes_.expert};
  }

  /// throws    Error for an index outside its axis
  [[nodiscard]] std::int64_t id(const Coordinate& at) const {
    for (const Axis axis : all_axes) {
      require(at.at(axis) >= 0 && at.at(axis) < axes_.size(axis), "Topology::id", axis_name(axis),
              at.at(axis), "must be in [0, " + std::to_string(axes_.size(axis)) + ")");
    }
    return (at.fsdp * axes_.context + at.context) * axes_.expert + at.expert;
  }

  /// The index of a device in its group along `tuple`, the tuple's first axis most significant.
  [[nodiscard]] std::int64_t index_in(const AxisTuple& tuple, std::int64_t id) const {
    const Coordinate at = coordinate(id);
    std::int64_t index = 0;
    for (const Axis axis : tuple.axes()) {
      index = index * axes_.size(axis) + at.at(axis);
    }
    return index;
  }

  /// The least id in the group of `id` along `axes`, which names the group.
  [[nodiscard]] std::int64_t least_in_group(const AxisTuple& axes, std::int64_t id) const {
    Coordinate least = coordinate(id);
    for (const Axis axis : axes.axes()) {
      least = least.with(axis, 0);
    }
    return this->id(least);
  }

  /// The ids of the group of `id` along `tuple`, in index order: the order in which folds run.
  [[nodiscard]] std::vector<std::int64_t> group_of(const AxisTuple& tuple, std::int64_t id) const {
    const std::int64_t size = tuple.size(axes_);
    std::vector<std::int64_t> ids(static_cast<std::size_t>(size));
    for (std::int64_t index = 0; index < size; ++index) {
      Coordinate at = coordinate(id);
      std::int64_t rest = index;
      for (std::size_t i = tuple.axes().size(); i-- > 0;) {
        const Axis axis = tuple.axes()[i];
        at = at.with(axis, rest % axes_.size(axis));
        rest /= axes_.size(axis);
      }
      ids[static_cast<std::size_t>(index)] = this->id(at);
    }
    return ids;
  }

 private:
  MeshAxes axes_;
};

}  // namespace heddle

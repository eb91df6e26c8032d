#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/topology.hpp"

namespace heddle::v7x {

/// JAX counts each of a chip's two cores.
inline constexpr std::int64_t devices_per_chip = 2;

/// A rectangular block of chips out of the pod's three-dimensional torus.
struct Slice {
  std::int64_t x = 2;
  std::int64_t y = 2;
  std::int64_t z = 1;

  [[nodiscard]] constexpr std::int64_t chips() const { return x * y * z; }
  [[nodiscard]] constexpr std::int64_t devices() const { return devices_per_chip * chips(); }
  /// Rings close on all three axes from 4x4x4 upward, on none below.
  [[nodiscard]] constexpr bool wraps() const { return x >= 4 && y >= 4 && z >= 4; }

  friend constexpr bool operator==(const Slice&, const Slice&) = default;
};

/// "4x4x8".
[[nodiscard]] inline std::string to_string(const Slice& slice) {
  return std::to_string(slice.x) + "x" + std::to_string(slice.y) + "x" + std::to_string(slice.z);
}

/// Refuses a block of chips that cannot be had: 2x2x1 (one host), 2x2x2, 2x2x4, 2x4x4, and 4i x 4j x 4k with
/// i <= j <= k.
///
/// throws    Error for any other
/// source    google/tunix topology.py, MaxText's accelerator table
inline void require_legal(const Slice& slice) {
  constexpr std::array<Slice, 4> small = {Slice{2, 2, 1}, Slice{2, 2, 2}, Slice{2, 2, 4},
                                          Slice{2, 4, 4}};
  const bool large = slice.x >= 4 && slice.x % 4 == 0 && slice.y % 4 == 0 && slice.z % 4 == 0 &&
                     slice.x <= slice.y && slice.y <= slice.z;
  require(large || std::find(small.begin(), small.end(), slice) != small.end(), "v7x::Slice",
          "slice", to_string(slice),
          "must be 2x2x1, 2x2x2, 2x2x4, 2x4x4 or multiples of 4 in ascending order");
}

/// Reads "4x4x8".
///
/// throws    Error for a text that is not three numbers, or a slice that is not legal
[[nodiscard]] inline Slice parse_slice(std::string_view text) {
  std::array<std::int64_t, 3> sizes{};
  std::string_view rest = text;
  for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
    const auto [end, status] = std::from_chars(rest.data(), rest.data() + rest.size(), sizes[axis]);
    const auto used = static_cast<std::size_t>(end - rest.data());
    const bool is_last = axis + 1 == sizes.size();
    require(status == std::errc{} &&
                (is_last ? used == rest.size() : used < rest.size() && rest[used] == 'x'),
            "v7x::parse_slice", "slice", text, "must be written XxYxZ");
    rest.remove_prefix(std::min(rest.size(), used + 1));
  }
  const Slice slice{sizes[0], sizes[1], sizes[2]};
  require_legal(slice);
  return slice;
}

/// Where a device sits: its chip, and which of the chip's two cores it is.
struct PhysicalCoordinate {
  std::int64_t x = 0;
  std::int64_t y = 0;
  std::int64_t z = 0;
  std::int64_t core = 0;

  [[nodiscard]] constexpr std::array<std::int64_t, 4> values() const { return {x, y, z, core}; }
  friend constexpr bool operator==(const PhysicalCoordinate&, const PhysicalCoordinate&) = default;
};

/// How logical ids are laid out on the chips. Never changes a result, only what it would cost.
enum class DeviceOrder : std::uint8_t {
  jax_greedy,  ///< logical axes from the last to the first, each to as many physical axes as fit exactly
  row_major,  ///< id counts through x, y, z, core, core fastest
};

/// Physical axes in the order in which JAX sees them.
enum class PhysicalAxis : std::uint8_t { x = 0, y = 1, z = 2, core = 3 };

/// "x", "y", "z" or "core".
[[nodiscard]] constexpr std::string_view physical_axis_name(PhysicalAxis axis) {
  constexpr std::array<std::string_view, 4> names = {"x", "y", "z", "core"};
  return names[static_cast<std::size_t>(axis)];
}

/// The physical axes that each logical axis is laid on, major to minor.
struct AxisAssignment {
  std::array<std::vector<PhysicalAxis>, 3> of_axis;

  [[nodiscard]] const std::vector<PhysicalAxis>& along(Axis axis) const {
    return of_axis[static_cast<std::size_t>(axis)];
  }
};

/// JAX's rule for a torus: from the last logical axis to the first, the largest set of free physical axes
/// whose sizes multiply to the logical size, the first such set in order.
///
/// throws    Error that names the axis that nothing fits, with the physical sizes that were left
/// source    jax/_src/mesh_utils.py
[[nodiscard]] inline AxisAssignment assign_axes(const MeshAxes& mesh, const Slice& slice) {
  std::array<std::int64_t, 4> free = {slice.x, slice.y, slice.z, devices_per_chip};
  AxisAssignment assignment;
  for (const Axis axis : {Axis::expert, Axis::context, Axis::fsdp}) {
    const std::int64_t size = mesh.size(axis);
    if (size == 1) {
      continue;
    }
    std::vector<PhysicalAxis> best;
    // Subsets as bit masks whose lowest axis is x: ordered by size, then as itertools.combinations does.
    for (std::size_t count = free.size(); count >= 1 && best.empty(); --count) {
      for (std::uint32_t reversed = 15; reversed >= 1 && best.empty(); --reversed) {
        std::int64_t product = 1;
        std::vector<PhysicalAxis> chosen;
        for (std::size_t i = 0; i < free.size(); ++i) {
          if ((reversed >> (3 - i) & 1U) != 0) {
            product *= free[i];
            chosen.push_back(static_cast<PhysicalAxis>(i));
          }
        }
        if (chosen.size() == count && product == size) {
          best = chosen;
        }
      }
    }
    if (best.empty()) {
      std::string left;
      for (std::size_t i = 0; i < free.size(); ++i) {
        if (free[i] > 1) {
          left += (left.empty() ? "" : ", ") +
                  std::string(physical_axis_name(static_cast<PhysicalAxis>(i))) + "=" +
                  std::to_string(free[i]);
        }
      }
      fail("v7x::assign_axes", axis_name(axis), size,
           "no physical axes of slice " + v7x::to_string(slice) + " multiply to it; left: " + left);
    }
    for (const PhysicalAxis taken : best) {
      free[static_cast<std::size_t>(taken)] = 0;
    }
    assignment.of_axis[static_cast<std::size_t>(axis)] = std::move(best);
  }
  return assignment;
}

/// A mesh laid on a slice: a bijection between logical ids and cores.
class Placement {
 public:
  /// throws    Error for a slice that is not legal, a mesh whose devices are not the slice's (with slice,
  ///           chips, devices a chip and N), and what assign_axes() throws
  Placement(const Topology& mesh, const Slice& slice, DeviceOrder order = DeviceOrder::jax_greedy)
      : mesh_(mesh), slice_(slice) {
    require_fits();
    require(order == DeviceOrder::jax_greedy || order == DeviceOrder::row_major, "v7x::Placement",
            "order", order, "must be jax_greedy or row_major");
    const AxisAssignment assignment =
        order == DeviceOrder::jax_greedy ? assign_axes(mesh.axes(), slice) : AxisAssignment{};
    const std::array<std::int64_t, 4> sizes = {slice.x, slice.y, slice.z, devices_per_chip};
    for (std::int64_t id = 0; id < mesh.devices(); ++id) {
      std::array<std::int64_t, 4> at{};
      if (order == DeviceOrder::row_major) {
        split(id, {PhysicalAxis::x, PhysicalAxis::y, PhysicalAxis::z, PhysicalAxis::core}, sizes,
              at);
      } else {
        for (const Axis axis : all_axes) {
          split(mesh.coordinate(id).at(axis), assignment.along(axis), sizes, at);
        }
      }
      places_.push_back({at[0], at[1], at[2], at[3]});
    }
  }

  /// An order of the caller's: where each id sits.
  ///
  /// throws    as above; Error for a table of another length, a place outside the slice, and a table that is
  ///           no bijection, with the first place named twice and the first named by nobody
  Placement(const Topology& mesh, const Slice& slice, std::span<const PhysicalCoordinate> table)
      : mesh_(mesh), slice_(slice), places_(table.begin(), table.end()) {
    constexpr std::string_view where = "v7x::Placement";
    require_fits();
    require_equal(where, "table.size", table.size(), "devices", mesh.devices());
    std::vector<std::int64_t> taken_by(table.size(), -1);
    std::string twice;
    for (std::size_t id = 0; id < table.size(); ++id) {
      const PhysicalCoordinate& at = table[id];
      require(at.x >= 0 && at.x < slice.x && at.y >= 0 && at.y < slice.y && at.z >= 0 &&
                  at.z < slice.z && at.core >= 0 && at.core < devices_per_chip,
              where, element_name("table", id), to_text(at),
              "must lie in slice " + v7x::to_string(slice));
      std::int64_t& owner = taken_by[static_cast<std::size_t>(row_major_index(at))];
      if (owner >= 0 && twice.empty()) {
        twice = element_name("table", id) + " repeats " + element_name("table", owner);
      }
      owner = static_cast<std::int64_t>(id);
    }
    const auto missing = std::find(taken_by.begin(), taken_by.end(), -1);
    if (missing != taken_by.end()) {
      std::array<std::int64_t, 4> at{};
      split(missing - taken_by.begin(),
            {PhysicalAxis::x, PhysicalAxis::y, PhysicalAxis::z, PhysicalAxis::core},
            {slice.x, slice.y, slice.z, devices_per_chip}, at);
      fail(where, "table", twice,
           "must name every core once; none is at " + to_text({at[0], at[1], at[2], at[3]}));
    }
  }

  [[nodiscard]] const Topology& mesh() const { return mesh_; }
  [[nodiscard]] const Slice& slice() const { return slice_; }

  /// throws    Error for an id outside the mesh
  [[nodiscard]] const PhysicalCoordinate& of(std::int64_t id) const {
    require(id >= 0 && id < mesh_.devices(), "v7x::Placement::of", "id", id,
            "must be in [0, " + std::to_string(mesh_.devices()) + ")");
    return places_[static_cast<std::size_t>(id)];
  }

 private:
  void require_fits() const {
    require_legal(slice_);
    if (mesh_.devices() != slice_.devices()) {
      fail("v7x::Placement", "devices", mesh_.devices(),
           "must equal " + std::to_string(devices_per_chip) + " devices a chip on the " +
               std::to_string(slice_.chips()) + " chips of slice " + v7x::to_string(slice_) + " (" +
               std::to_string(slice_.devices()) + ")");
    }
  }

  /// Adds an index along some physical axes, the first most significant.
  static void split(std::int64_t index, const std::vector<PhysicalAxis>& axes,
                    const std::array<std::int64_t, 4>& sizes, std::array<std::int64_t, 4>& at) {
    for (std::size_t i = axes.size(); i-- > 0;) {
      const auto axis = static_cast<std::size_t>(axes[i]);
      at[axis] = index % sizes[axis];
      index /= sizes[axis];
    }
  }

  [[nodiscard]] std::int64_t row_major_index(const PhysicalCoordinate& at) const {
    return ((at.x * slice_.y + at.y) * slice_.z + at.z) * devices_per_chip + at.core;
  }

  [[nodiscard]] static std::string to_text(const PhysicalCoordinate& at) {
    return "(" + std::to_string(at.x) + "," + std::to_string(at.y) + "," + std::to_string(at.z) +
           "," + std::to_string(at.core) + ")";
  }

  Topology mesh_;
  Slice slice_;
  std::vector<PhysicalCoordinate> places_;
};

}  // namespace heddle::v7x

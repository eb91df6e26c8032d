#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include "heddle/core/error.hpp"

namespace heddle {

/// The three axes of the device mesh, major to minor. Tokens are split over all of them, a row's
/// sequence over `context`, experts over the expert group (MeshAxes::expert_group in topology.hpp).
enum class Axis : std::uint8_t { fsdp = 0, context = 1, expert = 2 };

inline constexpr std::array<Axis, 3> all_axes = {Axis::fsdp, Axis::context, Axis::expert};

[[nodiscard]] constexpr std::string_view axis_name(Axis axis) {
  switch (axis) {
    case Axis::fsdp:
      return "fsdp";
    case Axis::context:
      return "context";
    case Axis::expert:
      return "expert";
  }
  return "unknown axis";
}

/// How many devices stand along each axis. Built by name, {.fsdp = 32, .context = 4, .expert = 2}:
/// three bare integers in a row mean one thing to MaxText and another to tunix, and do not compile.
struct MeshAxes {
  /// Stands in front so that a list without names starts with it, and nothing converts to it.
  class ByName {
    friend struct MeshAxes;
    constexpr ByName() = default;

   public:
    friend constexpr bool operator==(const ByName&, const ByName&) = default;
  };
  [[no_unique_address]] ByName by_name = ByName();

  std::int64_t fsdp = 1;
  std::int64_t context = 1;
  std::int64_t expert = 1;

  [[nodiscard]] constexpr std::int64_t size(Axis axis) const {
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

  [[nodiscard]] constexpr std::int64_t devices() const { return fsdp * context * expert; }

  friend constexpr bool operator==(const MeshAxes&, const MeshAxes&) = default;
};

/// An ordered set of axes, major to minor as written. (context, expert) and (expert, context) hold the
/// same devices in another index order, so a fold over them may give other bits.
class AxisTuple {
 public:
  constexpr AxisTuple() = default;

  /// throws    Error for an axis that is named twice or is none of the three
  constexpr AxisTuple(std::initializer_list<Axis> axes) {
    for (const Axis axis : axes) {
      if (static_cast<std::size_t>(axis) >= all_axes.size()) {
        fail("AxisTuple", "axes", axis, "must be fsdp, context or expert");
      }
      for (std::size_t i = 0; i < size_; ++i) {
        if (axes_[i] == axis) {
          fail("AxisTuple", "axes", axis_name(axis), "an axis may be named once");
        }
      }
      axes_[size_++] = axis;
    }
  }

  [[nodiscard]] constexpr std::span<const Axis> axes() const { return {axes_.data(), size_}; }
  [[nodiscard]] constexpr bool empty() const { return size_ == 0; }
  [[nodiscard]] constexpr bool contains(Axis axis) const {
    for (const Axis own : axes()) {
      if (own == axis) {
        return true;
      }
    }
    return false;
  }

  /// Devices in a group along these axes; 1 for the empty tuple.
  [[nodiscard]] constexpr std::int64_t size(const MeshAxes& mesh) const {
    std::int64_t product = 1;
    for (const Axis axis : axes()) {
      product *= mesh.size(axis);
    }
    return product;
  }

  friend constexpr bool operator==(const AxisTuple&, const AxisTuple&) = default;

 private:
  std::array<Axis, 3> axes_{};
  std::size_t size_ = 0;
};

/// "(context, expert)".
[[nodiscard]] inline std::string to_string(const AxisTuple& tuple) {
  std::string text = "(";
  for (const Axis axis : tuple.axes()) {
    if (text.size() > 1) {
      text += ", ";
    }
    text += axis_name(axis);
  }
  return text + ")";
}

/// "fsdp=32,context=4,expert=2": the form in which sizes are printed and read.
[[nodiscard]] inline std::string to_string(const MeshAxes& mesh) {
  std::string text;
  for (const Axis axis : all_axes) {
    if (!text.empty()) {
      text += ",";
    }
    text += std::string(axis_name(axis)) + "=" + std::to_string(mesh.size(axis));
  }
  return text;
}

/// Reads "fsdp=2,context=2,expert=2"; an axis left out is 1, an empty text is one device.
///
/// throws    Error for an unknown or repeated axis, a size that is not a whole number >= 1, or a
///           product beyond 2^31 - 1
[[nodiscard]] inline MeshAxes parse_axes(std::string_view text) {
  constexpr std::string_view where = "parse_axes";
  MeshAxes mesh;
  std::array<bool, 3> seen{};
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    require(comma != rest.size() - 1, where, "mesh", text, "must not end in a comma");
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    const std::size_t equals = part.find('=');
    require(equals != std::string_view::npos, where, "mesh", text,
            "must be written fsdp=F,context=C,expert=X");
    const std::string_view name = part.substr(0, equals);
    const std::string_view number = part.substr(equals + 1);
    std::int64_t size = 0;
    const auto [end, status] = std::from_chars(number.data(), number.data() + number.size(), size);
    require(status == std::errc{} && end == number.data() + number.size() && size >= 1 &&
                size <= std::numeric_limits<std::int32_t>::max(),
            where, name, number, "must be a whole number of devices >= 1");
    bool known = false;
    for (const Axis axis : all_axes) {
      if (axis_name(axis) != name) {
        continue;
      }
      known = true;
      const auto index = static_cast<std::size_t>(axis);
      require(!seen[index], where, "mesh", text, "must name each axis once");
      seen[index] = true;
      switch (axis) {
        case Axis::fsdp:
          mesh.fsdp = size;
          break;
        case Axis::context:
          mesh.context = size;
          break;
        case Axis::expert:
          mesh.expert = size;
          break;
      }
    }
    require(known, where, "mesh", text, "axes are fsdp, context and expert");
  }
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  require(mesh.context <= most / mesh.fsdp && mesh.expert <= most / (mesh.fsdp * mesh.context),
          where, "mesh", text, "must have at most 2^31 - 1 devices");
  return mesh;
}

}  // namespace heddle

#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include <Eigen/Core>

#include "heddle/core/scalar.hpp"

namespace heddle {

/// What the elements of a collective are: the devices of a group must agree on it, and the ledger
/// names it.
struct DataType {
  enum class Kind : std::uint8_t { floating, brain, signed_integer, unsigned_integer, other };

  Kind kind = Kind::other;
  std::int32_t bytes = 1;

  friend constexpr bool operator==(const DataType&, const DataType&) = default;
};

/// Floating point and integers by their kind and size, bfloat16 as "bf16", every other trivially
/// copyable type (a pair of an expert id and its weight, say) by its size alone.
template <class T>
[[nodiscard]] constexpr DataType data_type() {
  static_assert(std::is_trivially_copyable_v<T>,
                "mesh: elements of a collective must be trivially copyable");
  using Kind = DataType::Kind;
  constexpr auto bytes = static_cast<std::int32_t>(sizeof(T));
  if constexpr (std::is_same_v<T, bfloat16>) {
    return {Kind::brain, bytes};
  } else if constexpr (std::is_floating_point_v<T> || std::is_same_v<T, Eigen::half>) {
    return {Kind::floating, bytes};
  } else if constexpr (std::is_integral_v<T>) {
    return {std::is_signed_v<T> ? Kind::signed_integer : Kind::unsigned_integer, bytes};
  } else {
    return {Kind::other, bytes};
  }
}

/// "bf16", "f32", "i64", "u8"; "12 bytes" for a type that is none of these.
[[nodiscard]] inline std::string to_string(const DataType& type) {
  const std::string bits = std::to_string(8 * type.bytes);
  switch (type.kind) {
    case DataType::Kind::floating:
      return "f" + bits;
    case DataType::Kind::brain:
      return "bf" + bits;
    case DataType::Kind::signed_integer:
      return "i" + bits;
    case DataType::Kind::unsigned_integer:
      return "u" + bits;
    case DataType::Kind::other:
      break;
  }
  return std::to_string(type.bytes) + " bytes";
}

}  // namespace heddle

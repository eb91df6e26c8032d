#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/communicator.hpp"

namespace heddle::mesh::detail {

/// Who calls what over which axes: what every operation checks its arguments against.
struct Group {
  std::string where;
  std::int64_t members = 1;
  std::int64_t index = 0;
};

template <Communicator Device>
[[nodiscard]] Group group_of(const Device& device, Collective op, const AxisTuple& axes) {
  return {.where = "mesh::" + std::string(collective_name(op)),
          .members = axes.size(device.topology().axes()),
          .index = device.topology().index_in(axes, device.id())};
}

template <class T>
[[nodiscard]] std::int64_t length(std::span<T> values) {
  return static_cast<std::int64_t>(values.size());
}

/// FNV-1a over whole words: tells patterns and replicas apart, resists nobody.
[[nodiscard]] inline std::uint64_t hash_bytes(std::span<const std::byte> bytes,
                                              std::uint64_t seed = 0xCBF29CE484222325ULL) {
  std::uint64_t hash = seed;
  for (const std::byte byte : bytes) {
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001B3ULL;
  }
  return hash;
}

template <class T>
[[nodiscard]] bool overlaps(std::span<const T> a, std::span<const T> b) {
  const std::less<> before;  // a total order, also between unrelated arrays
  return !a.empty() && !b.empty() && before(a.data(), b.data() + b.size()) &&
         before(b.data(), a.data() + a.size());
}

/// Refuses an output that shares memory with the input.
template <class T>
void require_disjoint(const Group& group, std::span<const T> in, std::span<const T> out) {
  require(!overlaps(in, out), group.where, "out", "overlapping in", "must be disjoint from in");
}

/// Refuses an output that shares memory with the input without being the very same range.
template <class T>
void require_same_or_disjoint(const Group& group, std::span<const T> in, std::span<const T> out) {
  require((in.data() == out.data() && in.size() == out.size()) || !overlaps(in, out), group.where,
          "out", "overlapping in", "must be the same range as in or disjoint from it");
}

/// Refuses sizes whose bytes no signed 64-bit number can hold.
inline void require_addressable(const Group& group, std::int64_t count, DataType type) {
  if (count > std::numeric_limits<std::int64_t>::max() / group.members / type.bytes) {
    fail(group.where, "count", count,
         "must be at most 2^63 - 1 bytes of " + to_string(type) + " on " +
             std::to_string(group.members) + " devices together");
  }
}

/// Bytes where block 0 .. G - 1 begin and the last one ends.
[[nodiscard]] inline std::vector<std::int64_t> equal_offsets(std::int64_t members,
                                                             std::int64_t block_bytes) {
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(members) + 1);
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    offsets[i] = static_cast<std::int64_t>(i) * block_bytes;
  }
  return offsets;
}

[[nodiscard]] inline std::vector<std::int64_t> slice_offsets(std::int64_t members,
                                                             std::int64_t count,
                                                             std::int64_t element_bytes) {
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(members) + 1);
  for (std::int64_t i = 0; i < members; ++i) {
    offsets[static_cast<std::size_t>(i)] = fold_slice(count, members, i).first * element_bytes;
  }
  offsets.back() = count * element_bytes;
  return offsets;
}

/// The sum of a member's counts.
///
/// throws    Error for a negative count or one too many for 64 bits, named by its index
inline std::int64_t sum_of_counts(const Group& group, std::string_view name,
                                  std::span<const std::int64_t> counts) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] < 0) {
      fail(group.where, element_name(name, i), counts[i], "must be >= 0");
    }
    require(counts[i] <= std::numeric_limits<std::int64_t>::max() - sum, group.where,
            element_name(name, i), counts[i], "must keep the sum within 2^63 - 1");
    sum += counts[i];
  }
  return sum;
}

template <class T>
[[nodiscard]] std::vector<std::int64_t> running_offsets(std::span<const std::int64_t> counts) {
  std::vector<std::int64_t> offsets(counts.size() + 1, 0);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    offsets[i + 1] = offsets[i] + counts[i] * static_cast<std::int64_t>(sizeof(T));
  }
  return offsets;
}

template <class T>
[[nodiscard]] const T* elements(std::span<const std::byte> bytes) {
  return reinterpret_cast<const T*>(bytes.data());
}

}  // namespace heddle::mesh::detail

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "heddle/mesh/communicator.hpp"

namespace heddle::detail {

/// The three points at which members of a collective meet.
enum class Stage : std::uint8_t {
  started = 0,   ///< everybody's memory is open
  written = 1,   ///< everybody's part of the output is written (two-round collectives)
  finished = 2,  ///< nobody reads any more
};

/// One collective of one group while it is under way.
struct Slot {
  struct Member {
    bool arrived = false;
    CollectiveCall call;
  };

  AxisTuple axes;                 ///< as the first arrival wrote them
  std::vector<std::int64_t> ids;  ///< by index along `axes`
  std::vector<Member> members;    ///< by the same index
  std::int64_t local_members = 0;
  std::array<std::int64_t, 3> reached{};  ///< members of this process at each stage
  std::array<bool, 3> complete{};
  std::int64_t readers = 0;  ///< members of this process that read others' memory just now
  bool is_travelling =
      false;  ///< memory of this process's members is being sent to other processes

  /// What members of other processes laid open, once it has arrived here. `blocks` is by
  /// (place of the reader among this process's members) * G + source.
  struct Inbox {
    std::vector<std::unique_ptr<std::byte[]>> storage;
    std::vector<std::span<const std::byte>> whole;
    std::vector<std::span<const std::byte>> blocks;
    std::vector<std::span<const std::byte>> outputs;
  };
  std::unique_ptr<Inbox> inbox;  ///< only where members are elsewhere

  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(members.size()); }
  [[nodiscard]] bool is_external() const { return local_members < size(); }
  [[nodiscard]] const Member& member(std::int64_t index) const {
    return members[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] bool is_complete(Stage stage) const {
    return complete[static_cast<std::size_t>(stage)];
  }
};

/// Bytes [offsets[index], offsets[index + 1]) of `bytes`.
template <class Byte>
[[nodiscard]] std::span<Byte> part(std::span<Byte> bytes, std::span<const std::int64_t> offsets,
                                   std::int64_t index) {
  const auto i = static_cast<std::size_t>(index);
  return bytes.subspan(static_cast<std::size_t>(offsets[i]),
                       static_cast<std::size_t>(offsets[i + 1] - offsets[i]));
}

}  // namespace heddle::detail

#pragma once

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/detail/device_team.hpp"
#include "heddle/mesh/ledger.hpp"

namespace heddle::detail {

/// Counts of MPI 3 are ints, so data travels in pieces of at most this.
inline constexpr std::int64_t mpi_piece_bytes = std::int64_t{1} << 30;

/// Turns a status of MPI into an Error; no call of ours aborts by itself.
inline void check_mpi(int status, std::string_view call) {
  if (status == MPI_SUCCESS) {
    return;
  }
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(status, text, &length);
  fail("mesh", call, status, std::string_view(text, static_cast<std::size_t>(length)));
}

/// What members of a group tell each other before anything moves: 64 bytes a device.
struct MpiDescriptor {
  std::uint32_t magic = 0;
  std::uint8_t op = 0;
  std::uint8_t axes = 0;  ///< two bits an axis, the first lowest; 3 ends the tuple
  std::uint8_t type_kind = 0;
  std::uint8_t accumulator_kind = 0;
  std::int32_t type_bytes = 0;
  std::int32_t accumulator_bytes = 0;
  std::int32_t fold = 0;
  std::int32_t device = 0;
  std::int64_t count = 0;
  std::int64_t argument = 0;
  std::int64_t sequence = 0;
  std::int64_t input_bytes = 0;
  std::uint64_t site = 0;  ///< hash of the call site, for whoever looks at the wire

  static constexpr std::uint32_t expected_magic = 0x6865646C;  // "hedl"

  friend bool operator==(const MpiDescriptor&, const MpiDescriptor&) = default;
};
static_assert(sizeof(MpiDescriptor) == 64 && std::is_trivially_copyable_v<MpiDescriptor>);

[[nodiscard]] inline MpiDescriptor describe_call(std::int64_t device, const CollectiveCall& call) {
  const CollectiveSignature& signature = call.signature;
  std::uint8_t axes = 0;
  unsigned shift = 0;
  for (const Axis axis : signature.axes.axes()) {
    axes = static_cast<std::uint8_t>(axes | static_cast<unsigned>(axis) << shift);
    shift += 2;
  }
  axes = static_cast<std::uint8_t>(axes | (3U << shift));
  return {.magic = MpiDescriptor::expected_magic,
          .op = static_cast<std::uint8_t>(signature.op),
          .axes = axes,
          .type_kind = static_cast<std::uint8_t>(signature.type.kind),
          .accumulator_kind = static_cast<std::uint8_t>(signature.accumulator.kind),
          .type_bytes = signature.type.bytes,
          .accumulator_bytes = signature.accumulator.bytes,
          .fold = static_cast<std::int32_t>(signature.fold),
          .device = static_cast<std::int32_t>(device),
          .count = signature.count,
          .argument = signature.argument,
          .sequence = signature.sequence,
          .input_bytes = static_cast<std::int64_t>(call.input.size()),
          .site = std::hash<std::string>{}(to_string(call.site))};
}

/// Whether two members called the same thing: all but what may differ between them.
[[nodiscard]] inline bool same_signature(MpiDescriptor a, MpiDescriptor b) {
  a.device = b.device = 0;
  a.input_bytes = b.input_bytes = 0;
  a.site = b.site = 0;
  return a == b;
}

/// Writes numbers and texts one behind the other.
class Packer {
 public:
  void put(std::int64_t number) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + sizeof number);
    std::memcpy(bytes_.data() + at, &number, sizeof number);
  }
  void put(std::string_view text) {
    put(static_cast<std::int64_t>(text.size()));
    const auto* const data = reinterpret_cast<const std::byte*>(text.data());
    bytes_.insert(bytes_.end(), data, data + text.size());
  }
  [[nodiscard]] std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

/// Reads what a Packer wrote, in the same order.
class Unpacker {
 public:
  explicit Unpacker(std::span<const std::byte> bytes) : rest_(bytes) {}

  [[nodiscard]] std::int64_t number() {
    std::int64_t value = 0;
    std::memcpy(&value, next(sizeof value).data(), sizeof value);
    return value;
  }
  [[nodiscard]] std::string text() {
    const auto bytes = next(static_cast<std::size_t>(number()));
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  [[nodiscard]] bool is_empty() const { return rest_.empty(); }

 private:
  std::span<const std::byte> next(std::size_t size) {
    require(size <= rest_.size(), "mesh", "message", rest_.size(), "ends too early");
    const auto part = rest_.first(size);
    rest_ = rest_.subspan(size);
    return part;
  }

  std::span<const std::byte> rest_;
};

inline void put_record(Packer& packer, const TrafficRecord& record) {
  packer.put(record.sequence);
  packer.put(record.device);
  packer.put(static_cast<std::int64_t>(record.op));
  packer.put(static_cast<std::int64_t>(record.axes.axes().size()));
  for (const Axis axis : record.axes.axes()) {
    packer.put(static_cast<std::int64_t>(axis));
  }
  packer.put(record.members);
  packer.put(record.group);
  packer.put(static_cast<std::int64_t>(record.type.kind));
  packer.put(record.type.bytes);
  packer.put(record.bytes.payload_bytes);
  packer.put(record.bytes.wire_bytes);
  packer.put(record.bytes.sent_bytes);
  packer.put(record.bytes.recv_bytes);
  packer.put(static_cast<std::int64_t>(record.phase));
  packer.put(static_cast<std::int64_t>(record.overlap));
  packer.put(record.label);
  packer.put(record.site.file);
  packer.put(record.site.line);
}

/// File names of other processes' call sites go into `files`, which must outlive the record.
[[nodiscard]] inline TrafficRecord get_record(Unpacker& unpacker, std::set<std::string>& files) {
  TrafficRecord record;
  record.sequence = unpacker.number();
  record.device = unpacker.number();
  record.op = static_cast<Collective>(unpacker.number());
  const std::int64_t axes = unpacker.number();
  std::array<Axis, 3> named{};
  for (std::int64_t i = 0; i < axes; ++i) {
    named[static_cast<std::size_t>(i)] = static_cast<Axis>(unpacker.number());
  }
  record.axes = axes == 0   ? AxisTuple{}
                : axes == 1 ? AxisTuple{named[0]}
                : axes == 2 ? AxisTuple{named[0], named[1]}
                            : AxisTuple{named[0], named[1], named[2]};
  record.members = unpacker.number();
  record.group = unpacker.number();
  record.type.kind = static_cast<DataType::Kind>(unpacker.number());
  record.type.bytes = static_cast<std::int32_t>(unpacker.number());
  record.bytes.payload_bytes = unpacker.number();
  record.bytes.wire_bytes = unpacker.number();
  record.bytes.sent_bytes = unpacker.number();
  record.bytes.recv_bytes = unpacker.number();
  record.phase = static_cast<Phase>(unpacker.number());
  record.overlap = static_cast<Overlap>(unpacker.number());
  record.label = unpacker.text();
  record.site.file = files.insert(unpacker.text()).first->c_str();
  record.site.line = unpacker.number();
  return record;
}

inline void put_failure(Packer& packer, const DeviceTeam::Failure& failure) {
  packer.put(static_cast<std::int64_t>(failure.kind));
  packer.put(failure.origin);
  packer.put(failure.text);
  packer.put(static_cast<std::int64_t>(failure.members.size()));
  for (const std::int64_t member : failure.members) {
    packer.put(member);
  }
}

[[nodiscard]] inline DeviceTeam::Failure get_failure(Unpacker& unpacker) {
  DeviceTeam::Failure failure;
  failure.kind = static_cast<DeviceTeam::Failure::Kind>(unpacker.number());
  failure.origin = unpacker.number();
  failure.text = unpacker.text();
  failure.members.resize(static_cast<std::size_t>(unpacker.number()));
  for (std::int64_t& member : failure.members) {
    member = unpacker.number();
  }
  return failure;
}

/// Messages under way. Buffers that were handed over stay here until they are sent.
class MpiMessages {
 public:
  explicit MpiMessages(std::int64_t piece_bytes = mpi_piece_bytes)
      : piece_bytes_(static_cast<std::size_t>(piece_bytes)) {}

  /// Sends bytes that somebody else keeps, in pieces.
  void send(std::span<const std::byte> bytes, int rank, int tag, MPI_Comm comm) {
    for_pieces(bytes, [&](std::span<const std::byte> piece) {
      check_mpi(MPI_Isend(piece.data(), static_cast<int>(piece.size()), MPI_BYTE, rank, tag, comm,
                          &requests_.emplace_back()),
                "MPI_Isend");
    });
  }
  /// Sends bytes and keeps them meanwhile.
  void send_owned(std::vector<std::byte> bytes, int rank, int tag, MPI_Comm comm) {
    kept_.push_back(std::move(bytes));
    check_mpi(MPI_Isend(kept_.back().data(), static_cast<int>(kept_.back().size()), MPI_BYTE, rank,
                        tag, comm, &requests_.emplace_back()),
              "MPI_Isend");
  }
  void receive(std::span<std::byte> bytes, int rank, int tag, MPI_Comm comm) {
    for_pieces(bytes, [&](std::span<std::byte> piece) {
      check_mpi(MPI_Irecv(piece.data(), static_cast<int>(piece.size()), MPI_BYTE, rank, tag, comm,
                          &requests_.emplace_back()),
                "MPI_Irecv");
    });
  }

  /// True when all of them are done.
  [[nodiscard]] bool test() {
    if (requests_.empty()) {
      return true;
    }
    int done = 0;
    check_mpi(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done,
                          MPI_STATUSES_IGNORE),
              "MPI_Testall");
    if (done != 0) {
      requests_.clear();
      kept_.clear();
    }
    return done != 0;
  }

 private:
  template <class Byte, class Use>
  void for_pieces(std::span<Byte> bytes, const Use& use) const {
    for (std::size_t at = 0; at < bytes.size(); at += piece_bytes_) {
      use(bytes.subspan(at, std::min(bytes.size() - at, piece_bytes_)));
    }
  }

  std::size_t piece_bytes_;
  std::vector<MPI_Request> requests_;
  std::vector<std::vector<std::byte>> kept_;
};

}  // namespace heddle::detail

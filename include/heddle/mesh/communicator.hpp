#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "heddle/core/error.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/call_site.hpp"
#include "heddle/mesh/data_type.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/topology.hpp"

namespace heddle {

/// How partial values are put together, elementwise.
enum class Reduce : std::uint8_t { sum, max, min };

[[nodiscard]] constexpr std::string_view reduce_name(Reduce reduce) {
  switch (reduce) {
    case Reduce::sum:
      return "sum";
    case Reduce::max:
      return "max";
    case Reduce::min:
      return "min";
  }
  return "unknown reduction";
}

/// What every member of a group must agree on before anything moves.
struct CollectiveSignature {
  static constexpr std::int64_t ragged = -1;  ///< count of a v-form: each member has its own
  static constexpr std::int64_t no_fold = -1;

  Collective op = Collective::barrier;
  AxisTuple axes = {};
  DataType type = {};
  std::int64_t count = 0;
  std::int64_t fold = no_fold;  ///< the Reduce
  DataType accumulator = {};    ///< what a fold sums in
  std::int64_t argument = 0;    ///< root, shift distance, scan direction, hash of a permutation
  std::int64_t sequence = 0;    ///< collectives that the device entered before; set by the backend

  friend constexpr bool operator==(const CollectiveSignature&,
                                   const CollectiveSignature&) = default;
};

/// "all_reduce(sum) over (fsdp, context), f32 x 4096, call 17".
[[nodiscard]] inline std::string to_string(const CollectiveSignature& signature) {
  std::string text(collective_name(signature.op));
  const bool scan = signature.op == Collective::exclusive_scan;
  if (signature.fold != CollectiveSignature::no_fold) {
    text += "(" + std::string(reduce_name(static_cast<Reduce>(signature.fold)));
    if (signature.accumulator != signature.type) {
      text += " in " + to_string(signature.accumulator);
    }
    text += ")";
  } else if (signature.op == Collective::broadcast) {
    text += "(root " + std::to_string(signature.argument) + ")";
  } else if (signature.op == Collective::shift) {
    text += "(by " + std::to_string(signature.argument) + ")";
  } else if (scan) {
    text += signature.argument == 0 ? "(forward)" : "(reverse)";
  }
  text += " over " + to_string(signature.axes);
  if (signature.op != Collective::barrier) {
    text += ", " + to_string(signature.type);
    text += signature.count == CollectiveSignature::ragged
                ? " ragged"
                : " x " + std::to_string(signature.count);
  }
  return text + ", call " + std::to_string(signature.sequence);
}

/// Which part of a member's input goes to which member.
enum class Delivery : std::uint8_t {
  nothing,      ///< a barrier
  whole,        ///< every member reads every input
  blocks,       ///< member i reads block i of every input
  from_source,  ///< member i reads the whole input of sources[i], or nothing where that is -1
};

/// Whether the blocks of an input are cut alike on all members.
enum class BlockCut : std::uint8_t { alike, own };

/// What a device hands to its backend when it enters a collective. Spans must stay as they are until
/// the collective is finished; other devices read them.
struct CollectiveCall {
  CollectiveSignature signature = {};
  CallSite site = {};
  Delivery delivery = Delivery::nothing;
  std::span<const std::byte> input = {};
  std::span<const std::int64_t> block_offsets = {};  ///< [G + 1] bytes; Delivery::blocks
  BlockCut cut = BlockCut::alike;
  std::span<const std::int64_t> sources = {};  ///< [G]; Delivery::from_source
  /// A second round, once every member has written its part of the output: member i's own part is
  /// [output_offsets[i], output_offsets[i + 1]), which all others then read. Empty: one round.
  std::span<std::byte> output = {};
  std::span<const std::int64_t> output_offsets = {};  ///< [G + 1] bytes
};

/// Whether copies that should be equal are hashed and compared.
enum class ReplicaCheck : std::uint8_t { off, hashed };

/// One device of a mesh, as a kernel sees it. Kernels take it as `Communicator auto& device`, call the
/// operations of collectives.hpp on it, and are the same function on every backend.
///
/// The backend's part of a collective: start() lays the call's memory open and waits for nobody;
/// wait() until every member has started; read() what member j laid open for this device; where the call
/// has a second round, wait_outputs() and read_output(); finish() when this device has read all it needs,
/// waiting until its own memory is no longer read. Leaving early, by an exception, goes through abandon(),
/// which stops every device and returns when nobody reads this device's memory any more.
///
/// order     all calls come from the device's own thread, in the same order on every member of a group
/// throws    Error for a call from another thread or from inside a oneTBB task; CollectiveMismatch,
///           Deadlock, PeerFailure as failure.hpp says
template <class Device>
concept Communicator = requires(Device& device, const Device& constant, const CollectiveCall& call,
                                typename Device::Ticket& ticket, std::int64_t member,
                                const std::string& text) {
  { constant.topology() } -> std::same_as<const Topology&>;
  { constant.id() } -> std::same_as<std::int64_t>;
  { constant.replica_check() } -> std::same_as<ReplicaCheck>;
  { device.ledger() } -> std::same_as<DeviceLedger&>;
  { device.start(call) } -> std::same_as<typename Device::Ticket>;
  device.wait(ticket);
  { device.read(ticket, member) } -> std::same_as<std::span<const std::byte>>;
  device.wait_outputs(ticket);
  { device.read_output(ticket, member) } -> std::same_as<std::span<const std::byte>>;
  /// Where member j wants its result, if it runs in this process (null data otherwise).
  { device.neighbour_output(ticket, member) } -> std::same_as<std::span<std::byte>>;
  { device.in_process(ticket, member) } -> std::same_as<bool>;
  device.finish(ticket);
  device.abandon(ticket, text);
};

namespace mesh {

template <Communicator Device>
[[nodiscard]] Coordinate coordinate(const Device& device) {
  return device.topology().coordinate(device.id());
}

/// How many devices stand in a group along `axes`, and which of them this one is.
template <Communicator Device>
[[nodiscard]] std::int64_t axis_size(const Device& device, const AxisTuple& axes) {
  return axes.size(device.topology().axes());
}
template <Communicator Device>
[[nodiscard]] std::int64_t axis_index(const Device& device, const AxisTuple& axes) {
  return device.topology().index_in(axes, device.id());
}

/// For a kernel that was written for groups of a certain size.
///
/// throws    Error where the group along `axes` has another one
template <Communicator Device>
void expect_group_size(const Device& device, const AxisTuple& axes, std::int64_t expected) {
  require_equal("mesh", "members of " + to_string(axes), axis_size(device, axes),
                "the expected group size", expected);
}

}  // namespace mesh

}  // namespace heddle

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/detail/device_team.hpp"
#include "heddle/mesh/detail/slot.hpp"

namespace heddle {

/// The Communicator of both backends: one simulated device, run by a thread of its own. Its peers live in
/// the same process (LocalMesh), or some of them on other ranks (MpiMesh), which a kernel cannot tell.
///
/// alias     a handle, valid within the call of the SPMD function that it was passed to
class MeshDevice {
 public:
  using Ticket = detail::DeviceTeam::Ticket;

  MeshDevice(detail::DeviceTeam& team, std::int64_t id, ReplicaCheck replica_check)
      : team_(team), self_(team.device(id)), replica_check_(replica_check) {}
  MeshDevice(const MeshDevice&) = delete;
  MeshDevice& operator=(const MeshDevice&) = delete;
  ~MeshDevice() = default;

  [[nodiscard]] const Topology& topology() const { return team_.topology(); }
  [[nodiscard]] std::int64_t id() const { return self_.id; }
  [[nodiscard]] ReplicaCheck replica_check() const { return replica_check_; }
  [[nodiscard]] DeviceLedger& ledger() { return self_.ledger; }

  [[nodiscard]] Ticket start(const CollectiveCall& call) { return team_.start(self_, call); }
  void wait(Ticket& ticket) { team_.wait(self_, ticket); }

  [[nodiscard]] std::span<const std::byte> read(Ticket& ticket, std::int64_t member) const {
    const detail::Slot& slot = *ticket.slot;
    const CollectiveCall& own = slot.member(ticket.index).call;
    const auto source = static_cast<std::size_t>(member);
    if (!in_process(ticket, member)) {
      const detail::Slot::Inbox& inbox = *slot.inbox;
      return own.delivery == Delivery::blocks
                 ? inbox.blocks[static_cast<std::size_t>(ticket.local_index * slot.size() + member)]
                 : inbox.whole[source];
    }
    const CollectiveCall& theirs = slot.member(member).call;
    return own.delivery == Delivery::blocks
               ? detail::part(theirs.input, theirs.block_offsets, ticket.index)
               : theirs.input;
  }

  void wait_outputs(Ticket& ticket) { team_.wait_outputs(self_, ticket); }

  [[nodiscard]] std::span<const std::byte> read_output(Ticket& ticket, std::int64_t member) const {
    const detail::Slot& slot = *ticket.slot;
    if (!in_process(ticket, member)) {
      return slot.inbox->outputs[static_cast<std::size_t>(member)];
    }
    const CollectiveCall& theirs = slot.member(member).call;
    return detail::part(std::span<const std::byte>(theirs.output), theirs.output_offsets, member);
  }

  [[nodiscard]] std::span<std::byte> neighbour_output(Ticket& ticket, std::int64_t member) const {
    return in_process(ticket, member) ? ticket.slot->member(member).call.output
                                      : std::span<std::byte>();
  }

  [[nodiscard]] bool in_process(const Ticket& ticket, std::int64_t member) const {
    return team_.is_local(ticket.slot->ids[static_cast<std::size_t>(member)]);
  }

  void finish(Ticket& ticket) { team_.finish(self_, ticket); }
  void abandon(Ticket& ticket, const std::string& text) { team_.abandon(self_, ticket, text); }

 private:
  detail::DeviceTeam& team_;
  detail::DeviceTeam::Device& self_;
  ReplicaCheck replica_check_;
};

static_assert(Communicator<MeshDevice>);

}  // namespace heddle

#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heddle/mesh/communicator.hpp"

namespace heddle::mesh {

/// What a collective that has been started still owes: finish() waits for the peers, fills the output and
/// returns what the blocking form returns. Between the two the device may compute and start further
/// collectives; inputs and outputs belong to the collective meanwhile.
///
/// order     the order of the starts is the order of the collectives; handles may be finished in any
/// specials  a handle that is dropped unfinished stops the mesh: its peers would wait for ever
/// throws    finish(): what the blocking form throws once it communicates
template <Communicator Device, class Work>
class [[nodiscard]] Pending {
 public:
  /// Buffers that the call's spans point into; they stay where they are when the handle moves.
  using Offsets = std::vector<std::int64_t>;

  Pending(Device& device, CollectiveCall call, Traffic traffic, Overlap overlap, Work work,
          Offsets offsets = {})
      : device_(&device), offsets_(std::move(offsets)), work_(std::move(work)) {
    if (call.delivery == Delivery::blocks) {
      call.block_offsets = offsets_;
    } else if (call.delivery == Delivery::from_source) {
      call.sources = offsets_;
    }
    if (call.signature.op == Collective::all_reduce) {
      call.output_offsets = offsets_;
    }
    ticket_ = device.start(call);
    if (call.signature.op != Collective::compare) {
      record_ = device.ledger().open(
          {.device = device.id(),
           .op = call.signature.op,
           .axes = call.signature.axes,
           .members = call.signature.axes.size(device.topology().axes()),
           .group = device.topology().least_in_group(call.signature.axes, device.id()),
           .type = call.signature.type,
           .bytes = traffic,
           .overlap = overlap,
           .site = call.site});
    }
    site_ = call.site;
    op_ = call.signature.op;
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;
  Pending(Pending&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)),
        offsets_(std::move(other.offsets_)),
        work_(std::move(other.work_)),
        ticket_(std::move(other.ticket_)),
        record_(other.record_),
        site_(other.site_),
        op_(other.op_) {}
  ~Pending() {
    if (device_ != nullptr) {
      device_->abandon(ticket_, std::string(collective_name(op_)) + " (" + to_string(site_) +
                                    ") was started and never finished");
    }
  }

  auto finish() {
    Device& device = *device_;
    try {
      device.wait(ticket_);
      Traffic unrecorded;
      Traffic& traffic = record_ ? device.ledger().traffic(*record_) : unrecorded;
      if constexpr (std::is_void_v<decltype(work_(device, ticket_, traffic))>) {
        work_(device, ticket_, traffic);
        device.finish(ticket_);
        device_ = nullptr;
      } else {
        auto result = work_(device, ticket_, traffic);
        device.finish(ticket_);
        device_ = nullptr;
        return result;
      }
    } catch (const std::exception& error) {
      give_up(error.what());
      throw;
    } catch (...) {
      give_up("an exception that is no std::exception");
      throw;
    }
  }

 private:
  void give_up(const std::string& text) {
    device_->abandon(ticket_, text);
    device_ = nullptr;
  }

  Device* device_;
  Offsets offsets_;
  Work work_;
  typename Device::Ticket ticket_;
  std::optional<std::size_t> record_;
  CallSite site_;
  Collective op_ = Collective::barrier;
};

}  // namespace heddle::mesh

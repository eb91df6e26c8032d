#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/detail/collective.hpp"
#include "heddle/mesh/detail/report.hpp"
#include "heddle/mesh/pending.hpp"

namespace heddle::mesh {

/// Where the mesh runs with ReplicaCheck::hashed: refuses copies that should be the same bits along
/// `axes` and are not, on every member. Without it: nothing, at no cost.
///
/// shapes    values [n]; lengths that differ are a difference too
/// cost      a hash of values and 8 bytes from every member; outside the ledger
/// throws    Error that names the devices that differ from the first of the group; and as Communicator
template <Communicator Device, class T>
void require_replicated(Device& device, const AxisTuple& axes, std::string_view name,
                        std::span<const T> values, CallSite site = CallSite::here()) {
  if (device.replica_check() == ReplicaCheck::off) {
    return;
  }
  const std::vector<std::int64_t> ids = device.topology().group_of(axes, device.id());
  const std::uint64_t own = detail::hash_bytes(std::as_bytes(values), values.size());
  const auto work = [&ids](Device& self, typename Device::Ticket& ticket, Traffic&) {
    std::vector<std::int64_t> differing;
    const std::uint64_t first = *detail::elements<std::uint64_t>(self.read(ticket, 0));
    for (std::size_t member = 1; member < ids.size(); ++member) {
      const auto bytes = self.read(ticket, static_cast<std::int64_t>(member));
      if (*detail::elements<std::uint64_t>(bytes) != first) {
        differing.push_back(ids[member]);
      }
    }
    return differing;
  };
  const std::vector<std::int64_t> differing =
      Pending(
          device,
          CollectiveCall{
              .signature = {.op = Collective::compare,
                            .axes = axes,
                            .type = data_type<std::uint64_t>(),
                            .count = 1,
                            .argument = static_cast<std::int64_t>(detail::hash_bytes(
                                std::as_bytes(std::span<const char>(name.data(), name.size()))))},
              .site = site,
              .delivery = Delivery::whole,
              .input = std::as_bytes(std::span(&own, 1))},
          Traffic{}, Overlap::blocking, work)
          .finish();
  if (!differing.empty()) {
    fail("mesh::require_replicated", name,
         "different on " + heddle::detail::name_devices(differing),
         "must be the same bits on every device along " + to_string(axes) + " as on device " +
             std::to_string(ids.front()));
  }
}

}  // namespace heddle::mesh

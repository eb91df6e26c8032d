#pragma once

#include <cstdint>

#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/detail/collective.hpp"
#include "heddle/mesh/pending.hpp"

namespace heddle::mesh {

/// Nobody in the group along `axes` returns before everybody has called.
/// cost      moves nothing; recorded with 0 bytes
/// throws    as Communicator
template <Communicator Device>
void barrier(Device& device, const AxisTuple& axes, CallSite site = CallSite::here()) {
  Pending(device,
          CollectiveCall{.signature = {.op = Collective::barrier, .axes = axes}, .site = site},
          Traffic{}, Overlap::blocking, [](Device&, typename Device::Ticket&, Traffic&) {})
      .finish();
}

}  // namespace heddle::mesh

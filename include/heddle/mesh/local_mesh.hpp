#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/detail/device_team.hpp"
#include "heddle/mesh/detail/device_thread.hpp"
#include "heddle/mesh/device.hpp"
#include "heddle/mesh/failure.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/topology.hpp"

namespace heddle {

/// A backstop against a device that neither computes to an end nor reaches a collective. Deadlocks
/// between collectives need none: they are found when they happen.
struct Watchdog {
  std::chrono::milliseconds patience{
      0};  ///< without any collective entered or left; 0: no watchdog
  /// Called once, on the driver's thread, with who is where. When it returns, the mesh is stopped with
  /// Stalled; a device that really hangs then still keeps run() from returning, so a test's function
  /// rather ends the process.
  std::function<void(const std::string&)> report = {};
};

/// How the simulated devices run. It changes nothing of what they compute.
struct LocalMeshOptions {
  /// Devices that compute at the same time; absent: as many as the machine has threads. 1 is the serial
  /// mode: the ready device of least id always goes next, so that traces repeat.
  std::optional<std::int64_t> tokens = {};
  /// oneTBB threads of each device's own arena, the device's thread among them; absent: the arena that
  /// oneTBB gives every outside thread.
  std::optional<int> workers = {};
  std::int64_t stack_bytes = std::int64_t{1} << 20;
  std::int64_t device_bytes =
      0;  ///< a device's peak memory as declared by the caller, for the budget
  ReplicaCheck replica_check = ReplicaCheck::off;
  Watchdog watchdog = {};
};

/// Refuses a run whose devices would need more than 70 % of the machine's memory together.
///
/// throws    Error with both numbers
inline void require_memory_budget(std::int64_t devices, std::int64_t device_bytes,
                                  std::int64_t machine_bytes) {
  require(device_bytes >= 0, "LocalMesh", "options.device_bytes", device_bytes, "must be >= 0");
  const auto needed = static_cast<double>(devices) * static_cast<double>(device_bytes);
  const double budget = 0.7 * static_cast<double>(machine_bytes);
  if (needed > budget) {
    fail("LocalMesh", "options.device_bytes", device_bytes,
         std::to_string(devices) + " devices need " +
             std::to_string(static_cast<std::int64_t>(needed)) + " bytes, more than 70 % of the " +
             std::to_string(machine_bytes) + " bytes of this machine");
  }
}

/// Simulated devices in one process: run() calls an SPMD function once per device, each on an OS thread
/// of its own, and the collectives among them read each other's memory in place.
///
///   LocalMesh mesh({.fsdp = 2, .context = 2});
///   mesh.run([&](auto& device) { mesh::all_reduce(device, {Axis::fsdp}, in, out); });
///
/// writes    what the function writes; the ledger of the last run
/// specials  a device that throws stops all: the others get PeerFailure at their next collective, and
///           run() throws the original exception of the least device that has one of its own
/// order     results never depend on tokens, workers or timing. Devices are no oneTBB tasks: a task that
///           waits may keep the one it waits for from ever starting
/// memory    no staging copies; a stack of options.stack_bytes per device, touched as used
/// cost      starting and joining 256 devices takes tens of milliseconds
/// throws    Error for tokens < 1, workers < 1, stack_bytes below the system's least, a memory budget that
///           does not fit, a function that is empty; std::system_error when there are no threads left
class LocalMesh {
 public:
  using Device = MeshDevice;

  explicit LocalMesh(const MeshAxes& axes, LocalMeshOptions options = {})
      : topology_(axes), options_(std::move(options)) {
    constexpr const char* where = "LocalMesh";
    if (options_.tokens) {
      require(*options_.tokens >= 1, where, "options.tokens", *options_.tokens, "must be >= 1");
    }
    if (options_.workers) {
      require(*options_.workers >= 1, where, "options.workers", *options_.workers, "must be >= 1");
    }
    const auto least_stack = static_cast<std::int64_t>(::sysconf(_SC_THREAD_STACK_MIN));
    if (options_.stack_bytes < least_stack) {
      fail(where, "options.stack_bytes", options_.stack_bytes,
           "must be at least " + std::to_string(least_stack));
    }
    require_memory_budget(topology_.devices(), options_.device_bytes,
                          static_cast<std::int64_t>(::sysconf(_SC_PHYS_PAGES)) *
                              static_cast<std::int64_t>(::sysconf(_SC_PAGESIZE)));
  }

  [[nodiscard]] const Topology& topology() const { return topology_; }

  /// Calls body(device) once for every device and returns when all have returned.
  void run(const std::function<void(MeshDevice&)>& body) {
    require(static_cast<bool>(body), "LocalMesh::run", "body", nullptr, "required");
    ledger_ = Ledger();
    other_failures_ = 0;
    const std::int64_t devices = topology_.devices();
    detail::DeviceTeam team(topology_, {.first_id = 0, .devices = devices, .tokens = tokens()});
    std::vector<std::function<void()>> bodies(static_cast<std::size_t>(devices));
    for (std::int64_t id = 0; id < devices; ++id) {
      bodies[static_cast<std::size_t>(id)] = [&team, &body, this, id] {
        team.run_device(id, [&] {
          MeshDevice device(team, id, options_.replica_check);
          detail::in_arena(options_.workers, [&] { body(device); });
        });
      };
    }
    {
      std::vector<std::unique_ptr<detail::DeviceThread>> threads;
      threads.reserve(bodies.size());
      try {
        for (const std::function<void()>& each : bodies) {
          threads.push_back(std::make_unique<detail::DeviceThread>(each, options_.stack_bytes));
        }
      } catch (const std::system_error&) {
        team.cancel(static_cast<std::int64_t>(threads.size()));
        throw;
      }
      team.open();
      watch(team);
    }
    collect(team);
    team.rethrow();
  }

  /// What the devices sent in the last run, also one that failed.
  [[nodiscard]] const Ledger& ledger() const { return ledger_; }

  /// Of the last run that failed: devices, besides the one whose exception run() threw, that had one of
  /// their own.
  [[nodiscard]] std::int64_t other_failures() const { return other_failures_; }

 private:
  [[nodiscard]] std::int64_t tokens() const {
    return options_.tokens.value_or(
        std::max<std::int64_t>(1, static_cast<std::int64_t>(std::thread::hardware_concurrency())));
  }

  void watch(detail::DeviceTeam& team) const {
    if (options_.watchdog.patience.count() <= 0) {
      team.wait_until_left();
      return;
    }
    std::int64_t seen = team.transitions();
    while (!team.wait_until_left(options_.watchdog.patience)) {
      const std::int64_t now = team.transitions();
      if (now == seen && !team.failed()) {
        const std::string text = "stalled: no collective was entered or left for " +
                                 std::to_string(options_.watchdog.patience.count()) + " ms; " +
                                 team.describe();
        if (options_.watchdog.report) {
          options_.watchdog.report(text);
        }
        team.fail_with({.kind = detail::DeviceTeam::Failure::Kind::stalled, .text = text});
      }
      seen = now;
    }
  }

  void collect(detail::DeviceTeam& team) {
    std::vector<TrafficRecord> records;
    for (std::int64_t id = 0; id < topology_.devices(); ++id) {
      const auto& own = team.device(id).ledger.records();
      records.insert(records.end(), own.begin(), own.end());
    }
    ledger_ = Ledger(std::move(records));
    other_failures_ = std::max<std::int64_t>(0, team.originators() - 1);
  }

  Topology topology_;
  LocalMeshOptions options_;
  Ledger ledger_;
  std::int64_t other_failures_ = 0;
};

}  // namespace heddle

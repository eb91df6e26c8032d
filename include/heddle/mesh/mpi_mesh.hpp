#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/detail/device_thread.hpp"
#include "heddle/mesh/detail/mpi_groups.hpp"
#include "heddle/mesh/detail/mpi_leader.hpp"
#include "heddle/mesh/detail/mpi_wire.hpp"
#include "heddle/mesh/device.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/local_mesh.hpp"
#include "heddle/mesh/topology.hpp"

namespace heddle {

/// MPI from the first call to the last one. After a mesh on it has failed, its end is MPI_Abort: transfers
/// that are under way can neither be completed nor taken back.
///
/// throws    Error where MPI does not start, or cannot be called from the main thread of a program with
///           threads
class MpiSession {
 public:
  MpiSession(int& argc, char**& argv) {
    int provided = MPI_THREAD_SINGLE;
    detail::check_mpi(MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided),
                      "MPI_Init_thread");
    require(provided >= MPI_THREAD_FUNNELED, "MpiSession", "provided", provided,
            "must be MPI_THREAD_FUNNELED or more");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
  }
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
  ~MpiSession() {
    if (has_failed_) {
      abort(1);
    }
    MPI_Finalize();
  }

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int ranks() const { return ranks_; }

  /// Ends the program on every rank.
  [[noreturn]] void abort(int code) const {
    MPI_Abort(MPI_COMM_WORLD, code);
    std::terminate();  // not reached: MPI_Abort is not declared as what it is
  }

  /// From now on the end is MPI_Abort. Called by a mesh that fails.
  void mark_failed() { has_failed_ = true; }

 private:
  int rank_ = 0;
  int ranks_ = 1;
  bool has_failed_ = false;
};

/// How the devices of each rank run. It changes nothing of what they compute.
struct MpiMeshOptions {
  std::optional<std::int64_t> tokens = {};  ///< devices of a rank that compute at the same time
  std::optional<int> workers = {};          ///< oneTBB threads of each device's arena
  std::int64_t stack_bytes = std::int64_t{1} << 20;
  ReplicaCheck replica_check = ReplicaCheck::off;
  /// Without any collective entered or left on a rank for so long, the mesh is stopped with Stalled; 0: never.
  /// Deadlocks between collectives are found without it.
  std::chrono::milliseconds patience{0};
  /// Called once on every rank after a failure, with one line that says what this rank knows of it. Ranks
  /// wait for each other's, so that all are said before the first one ends the run.
  std::function<void(const std::string&)> report = {};
};

/// The same SPMD functions as LocalMesh on real ranks: N devices on R ranks, rank p with the devices
/// [p * N / R, (p + 1) * N / R), each again on a thread of its own, while the rank's main thread carries their
/// collectives to the other ranks.
///
///   MpiSession session(argc, argv);
///   MpiMesh mesh(session, {.fsdp = 2, .context = 4});
///   mesh.run([&](auto& device) { ... });
///
/// writes    what the function writes, on the rank of each device; the ledger, of all devices, on every rank
/// specials  R = 1 and R = N are legal
/// order     the bits and the ledger of LocalMesh: MPI moves bytes, and each device folds in rank order. No
///           reduction of MPI is ever called; they differ between sizes and implementations
/// memory    what other ranks send is held once per rank until it is read
/// throws    on the rank of the device that failed: its exception; on the others PeerFailure with it;
///           CollectiveMismatch, Deadlock and Stalled as LocalMesh. After any of them the session ends in
///           MPI_Abort. A rank that is killed is the launcher's to notice, which then ends the run. Where a failure
///           leaves transfers that cannot be completed, run() itself aborts after options.report.
///           Error for ranks that do not divide the devices, tokens or workers < 1, a call that is not the main
///           thread's
class MpiMesh {
 public:
  using Device = MeshDevice;

  /// Collective over all ranks of the session.
  MpiMesh(MpiSession& session, const MeshAxes& axes, MpiMeshOptions options = {})
      : session_(session), topology_(axes), options_(std::move(options)) {
    constexpr const char* where = "MpiMesh";
    if (topology_.devices() % session.ranks() != 0) {
      fail(where, "ranks", session.ranks(),
           "must divide the " + std::to_string(topology_.devices()) + " devices of " +
               to_string(axes));
    }
    require(options_.tokens.value_or(1) >= 1, where, "options.tokens", options_.tokens.value_or(1),
            "must be >= 1");
    require(options_.workers.value_or(1) >= 1, where, "options.workers",
            options_.workers.value_or(1), "must be >= 1");
    per_rank_ = topology_.devices() / session.ranks();
    detail::check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &control_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(control_, MPI_ERRORS_RETURN);
    groups_ = std::make_unique<detail::MpiGroups>(topology_, per_rank_, session.rank(), control_);
  }
  MpiMesh(const MpiMesh&) = delete;
  MpiMesh& operator=(const MpiMesh&) = delete;
  /// Collective over all ranks, except after a failure.
  ~MpiMesh() {
    if (!has_failed_) {
      groups_->free();
      MPI_Comm_free(&control_);
    }
  }

  [[nodiscard]] const Topology& topology() const { return topology_; }
  /// The devices of this rank are [first, first + count).
  [[nodiscard]] IndexRange own_devices() const { return {session_.rank() * per_rank_, per_rank_}; }

  /// Calls body(device) once for every device of this rank, and returns when the devices of all ranks have
  /// returned. Collective over all ranks.
  void run(const std::function<void(MeshDevice&)>& body) {
    require(static_cast<bool>(body), "MpiMesh::run", "body", nullptr, "required");
    int is_main = 0;
    MPI_Is_thread_main(&is_main);
    require(is_main != 0, "MpiMesh::run", "thread", "another", "must be the one that began MPI");
    ledger_ = Ledger();
    ++runs_;
    detail::MpiLeader leader({.mesh = &topology_,
                              .groups = groups_.get(),
                              .control = control_,
                              .rank = session_.rank(),
                              .ranks = session_.ranks(),
                              .per_rank = per_rank_,
                              .run = runs_,
                              .patience = options_.patience,
                              .report = [this](detail::DeviceTeam& team) { report(team); },
                              .abort = [this] { session_.abort(1); }});
    const std::int64_t first = own_devices().first;
    detail::DeviceTeam team(topology_,
                            {.first_id = first,
                             .devices = per_rank_,
                             .tokens = options_.tokens.value_or(hardware_threads()),
                             .on_external = [&leader](const auto& slot, detail::Stage stage) {
                               leader.enqueue(slot, stage);
                             }});
    std::vector<std::function<void()>> bodies;
    for (std::int64_t i = 0; i < per_rank_; ++i) {
      bodies.emplace_back([&team, &body, this, id = first + i] {
        team.run_device(id, [&] {
          MeshDevice device(team, id, options_.replica_check);
          detail::in_arena(options_.workers, [&] { body(device); });
        });
      });
    }
    {
      std::vector<std::unique_ptr<detail::DeviceThread>> threads;
      threads.reserve(bodies.size());
      try {
        for (const std::function<void()>& each : bodies) {
          threads.push_back(std::make_unique<detail::DeviceThread>(each, options_.stack_bytes));
        }
        team.open();
      } catch (const std::system_error& error) {
        team.fail_with({.origin = first, .text = error.what()});
        team.cancel(static_cast<std::int64_t>(threads.size()));
      }
      leader.lead(team);
    }
    if (team.failed()) {
      has_failed_ = true;
      session_.mark_failed();
      team.rethrow();
    }
    collect(team);
  }

  /// What all devices, on all ranks, sent in the last run that succeeded.
  [[nodiscard]] const Ledger& ledger() const { return ledger_; }

 private:
  [[nodiscard]] static std::int64_t hardware_threads() {
    return std::max<std::int64_t>(1,
                                  static_cast<std::int64_t>(std::thread::hardware_concurrency()));
  }

  void report(detail::DeviceTeam& team) const {
    if (!options_.report) {
      return;
    }
    try {
      team.rethrow();
    } catch (const std::exception& error) {
      options_.report("rank " + std::to_string(session_.rank()) + ": " + error.what());
    } catch (...) {
      options_.report("rank " + std::to_string(session_.rank()) +
                      ": an exception that is no std::exception");
    }
  }

  void collect(detail::DeviceTeam& team) {
    detail::Packer packer;
    for (std::int64_t i = 0; i < per_rank_; ++i) {
      for (const TrafficRecord& record : team.device(own_devices().first + i).ledger.records()) {
        detail::put_record(packer, record);
      }
    }
    const std::vector<std::byte> own = packer.take();
    auto size = static_cast<std::int64_t>(own.size());
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(session_.ranks()));
    detail::check_mpi(MPI_Allgather(&size, 1, MPI_INT64_T, sizes.data(), 1, MPI_INT64_T, control_),
                      "MPI_Allgather");
    constexpr int tag = 2;
    detail::MpiMessages messages;
    std::vector<std::vector<std::byte>> all(sizes.size());
    for (int rank = 0; rank < session_.ranks(); ++rank) {
      auto& theirs = all[static_cast<std::size_t>(rank)];
      if (rank == session_.rank()) {
        theirs = own;
        continue;
      }
      theirs.resize(static_cast<std::size_t>(sizes[static_cast<std::size_t>(rank)]));
      messages.receive(theirs, rank, tag, control_);
      messages.send(own, rank, tag, control_);
    }
    while (!messages.test()) {
      std::this_thread::yield();
    }
    std::vector<TrafficRecord> records;
    for (const std::vector<std::byte>& bytes : all) {
      detail::Unpacker unpacker(bytes);
      while (!unpacker.is_empty()) {
        records.push_back(detail::get_record(unpacker, files_));
      }
    }
    ledger_ = Ledger(std::move(records));
  }

  MpiSession& session_;
  Topology topology_;
  MpiMeshOptions options_;
  std::int64_t per_rank_ = 1;
  MPI_Comm control_ = MPI_COMM_NULL;
  std::unique_ptr<detail::MpiGroups> groups_;
  std::int64_t runs_ = 0;
  bool has_failed_ = false;
  Ledger ledger_;
  std::set<std::string> files_;  ///< names in the call sites of other ranks' records
};

}  // namespace heddle

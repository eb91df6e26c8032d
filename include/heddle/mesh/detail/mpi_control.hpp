#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "heddle/mesh/detail/device_team.hpp"
#include "heddle/mesh/detail/mpi_groups.hpp"
#include "heddle/mesh/detail/mpi_wire.hpp"

namespace heddle::detail {

/// What a rank tells the others about itself: enough to see, without any timeout, that nobody on any rank
/// can go on.
struct MpiStatus {
  bool is_done = false;                           ///< all its devices have returned
  std::map<GroupKey, std::int64_t> started = {};  ///< collectives that its members have entered
  std::vector<std::pair<GroupKey, std::int64_t>> waits = {};  ///< those whose peers it waits for
  std::string text = {};                                      ///< where its devices are
};

/// A deadlock across ranks: everybody is quiet, somebody waits, and every collective that anybody waits for
/// has a rank that has not entered it. A rank can only have gone on since it spoke if one of those was
/// complete after all, so old news does no harm.
[[nodiscard]] inline bool is_deadlock(const std::vector<std::optional<MpiStatus>>& ranks,
                                      const Topology& mesh, std::int64_t per_rank) {
  if (std::any_of(ranks.begin(), ranks.end(),
                  [](const std::optional<MpiStatus>& rank) { return !rank.has_value(); })) {
    return false;
  }
  bool anybody_waits = false;
  for (const std::optional<MpiStatus>& rank : ranks) {
    for (const auto& [key, number] : rank->waits) {
      const std::vector<int> members = ranks_of(mesh, key, per_rank);
      const bool is_missing = std::any_of(members.begin(), members.end(), [&](int member) {
        const auto& started = ranks[static_cast<std::size_t>(member)]->started;
        const auto found = started.find(key);
        return found == started.end() || found->second < number;
      });
      if (!is_missing) {
        return false;
      }
      anybody_waits = true;
    }
  }
  return anybody_waits;
}

/// Failures and states, between every two ranks, on a communicator of their own.
class MpiControl {
 public:
  MpiControl(MPI_Comm comm, int rank, int ranks, std::int64_t run)
      : comm_(comm), rank_(rank), run_(run), status_(static_cast<std::size_t>(ranks)) {}

  void tell_failure(const DeviceTeam::Failure& failure) {
    Packer packer = message(Kind::failure);
    put_failure(packer, failure);
    send_to_all(packer.take());
  }

  /// That this rank has said what it has to say and goes.
  void tell_leave() { send_to_all(message(Kind::leave).take()); }

  void tell_status(MpiStatus status) {
    Packer packer = message(Kind::status);
    packer.put(status.is_done ? 1 : 0);
    packer.put(static_cast<std::int64_t>(status.started.size()));
    for (const auto& [key, number] : status.started) {
      put_key(packer, key);
      packer.put(number);
    }
    packer.put(static_cast<std::int64_t>(status.waits.size()));
    for (const auto& [key, number] : status.waits) {
      put_key(packer, key);
      packer.put(number);
    }
    packer.put(status.text);
    send_to_all(packer.take());
    status_[static_cast<std::size_t>(rank_)] = std::move(status);
  }

  /// This rank goes on: what it said last no longer holds for itself.
  void forget_own_status() { status_[static_cast<std::size_t>(rank_)].reset(); }

  /// Reads what has come. True if anything had.
  bool receive() {
    static_cast<void>(messages_.test());
    bool any = false;
    for (;;) {
      int is_here = 0;
      MPI_Status status;
      check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, tag, comm_, &is_here, &status), "MPI_Iprobe");
      if (is_here == 0) {
        return any;
      }
      any = true;
      int size = 0;
      MPI_Get_count(&status, MPI_BYTE, &size);
      std::vector<std::byte> bytes(static_cast<std::size_t>(size));
      check_mpi(
          MPI_Recv(bytes.data(), size, MPI_BYTE, status.MPI_SOURCE, tag, comm_, MPI_STATUS_IGNORE),
          "MPI_Recv");
      Unpacker unpacker(bytes);
      if (unpacker.number() == run_) {
        read(unpacker, status.MPI_SOURCE);
      }
    }
  }

  [[nodiscard]] const std::optional<DeviceTeam::Failure>& failure() const { return failure_; }
  [[nodiscard]] const std::vector<std::optional<MpiStatus>>& status() const { return status_; }
  [[nodiscard]] bool all_are_done() const {
    return std::all_of(status_.begin(), status_.end(),
                       [](const auto& rank) { return rank && rank->is_done; });
  }
  /// Whether every other rank has gone.
  [[nodiscard]] bool all_have_left() const { return left_ + 1 == status_.size(); }
  [[nodiscard]] bool is_all_sent() { return messages_.test(); }

 private:
  enum class Kind : std::uint8_t { failure, leave, status };
  static constexpr int tag = 1;

  [[nodiscard]] Packer message(Kind kind) const {
    Packer packer;
    packer.put(run_);
    packer.put(static_cast<std::int64_t>(kind));
    return packer;
  }

  static void put_key(Packer& packer, const GroupKey& key) {
    packer.put(key.first);
    packer.put(key.second);
  }
  [[nodiscard]] static GroupKey get_key(Unpacker& unpacker) {
    const std::int64_t mask = unpacker.number();
    return {mask, unpacker.number()};
  }

  void send_to_all(const std::vector<std::byte>& bytes) {
    for (int rank = 0; rank < static_cast<int>(status_.size()); ++rank) {
      if (rank != rank_) {
        messages_.send_owned(bytes, rank, tag, comm_);
      }
    }
  }

  void read(Unpacker& unpacker, int source) {
    switch (static_cast<Kind>(unpacker.number())) {
      case Kind::failure: {
        DeviceTeam::Failure failure = get_failure(unpacker);
        if (!failure_) {
          failure_ = std::move(failure);
        }
        break;
      }
      case Kind::leave:
        ++left_;
        break;
      case Kind::status: {
        MpiStatus status;
        status.is_done = unpacker.number() != 0;
        for (std::int64_t left = unpacker.number(); left > 0; --left) {
          const GroupKey key = get_key(unpacker);
          status.started[key] = unpacker.number();
        }
        for (std::int64_t left = unpacker.number(); left > 0; --left) {
          const GroupKey key = get_key(unpacker);
          status.waits.emplace_back(key, unpacker.number());
        }
        status.text = unpacker.text();
        status_[static_cast<std::size_t>(source)] = std::move(status);
        break;
      }
    }
  }

  MPI_Comm comm_;
  int rank_;
  std::int64_t run_;  ///< messages of earlier runs are none of ours
  MpiMessages messages_;
  std::vector<std::optional<MpiStatus>> status_;  ///< by rank, the latest
  std::optional<DeviceTeam::Failure> failure_;    ///< the first that came
  std::size_t left_ = 0;
};

}  // namespace heddle::detail

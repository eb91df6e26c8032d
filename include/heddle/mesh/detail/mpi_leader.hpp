#pragma once

#include <mpi.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "heddle/mesh/detail/device_team.hpp"
#include "heddle/mesh/detail/mpi_control.hpp"
#include "heddle/mesh/detail/mpi_groups.hpp"
#include "heddle/mesh/detail/mpi_job.hpp"

namespace heddle::detail {

/// Runs on a rank's main thread, which is no device, and makes every call of MPI: carries the devices'
/// collectives to the other ranks and tells and hears of failures.
class MpiLeader {
 public:
  struct Settings {
    const Topology* mesh = nullptr;
    const MpiGroups* groups = nullptr;
    MPI_Comm control = MPI_COMM_NULL;
    int rank = 0;
    int ranks = 1;
    std::int64_t per_rank = 1;
    std::int64_t run = 0;
    std::chrono::milliseconds patience{0};  ///< of the watchdog; 0: none
    /// Once after a failure, when the devices have left: says on this rank what happened.
    std::function<void(DeviceTeam&)> report;
    /// When a failure leaves no way to unwind: does not return.
    std::function<void()> abort;
  };

  explicit MpiLeader(Settings settings)
      : settings_(std::move(settings)),
        control_(settings_.control, settings_.rank, settings_.ranks, settings_.run) {}

  /// What DeviceTeam calls, under its lock, on a device's thread.
  void enqueue(const std::shared_ptr<Slot>& slot, Stage stage) {
    {
      const std::lock_guard lock(mutex_);
      arrived_.emplace_back(slot, stage);
    }
    something_arrived_.notify_one();
  }

  /// Until every device of every rank has left, or something failed and this rank may go.
  void lead(DeviceTeam& team) {
    while (!team.all_left()) {
      bool moved = take_arrivals(team);
      moved = advance_jobs(team) || moved;
      moved = control_.receive() || moved;
      spread_failure(team);
      if (!team.failed()) {
        look_after_quiet(team, moved);
      } else if (Clock::now() - failed_at_ > grace) {
        // A device computes on and on, or a transfer has lost its other end: unwinding would take memory
        // away under MPI's hands.
        settings_.report(team);
        settings_.abort();
      }
      if (moved) {
        idle_rounds_ = 0;
      } else {
        idle();
      }
    }
    team.failed() ? leave_after_failure(team) : wait_for_the_others(team);
  }

 private:
  using Clock = std::chrono::steady_clock;

  /// How long a rank's own devices get to leave after a failure.
  static constexpr std::chrono::milliseconds grace{2000};
  /// How long other ranks get to hear of it and to say what they know: whose devices compute on says it, and
  /// ends the run, when their time is over.
  static constexpr std::chrono::milliseconds farewell = 2 * grace;
  /// A rank that has been quiet for so long tells the others where it stands.
  static constexpr std::chrono::milliseconds quiet_before_telling{20};
  /// About as long as a short message takes between two processes of a machine.
  static constexpr int yields_before_sleep = 100;

  bool take_arrivals(DeviceTeam& team) {
    std::deque<std::pair<std::shared_ptr<Slot>, Stage>> arrivals;
    {
      const std::lock_guard lock(mutex_);
      arrivals.swap(arrived_);
    }
    for (auto& [slot, stage] : arrivals) {
      const GroupKey key = group_key(*settings_.mesh, slot->axes, slot->ids.front());
      std::int64_t number = 0;
      if (stage == Stage::started) {
        number = ++started_[key];
        numbers_[slot.get()] = number;
      } else {
        number = numbers_.at(slot.get());
      }
      jobs_.emplace_back(slot, stage,
                         MpiJob::Place{.group = &settings_.groups->all().at(key),
                                       .key = key,
                                       .rank = settings_.rank,
                                       .per_rank = settings_.per_rank,
                                       .number = number});
      jobs_.back().begin(team);
    }
    return !arrivals.empty();
  }

  bool advance_jobs(DeviceTeam& team) {
    bool moved = false;
    for (auto job = jobs_.begin(); job != jobs_.end();) {
      const MpiJob::Progress progress = job->advance(team);
      moved = moved || progress != MpiJob::Progress::none;
      job = progress == MpiJob::Progress::done ? jobs_.erase(job) : std::next(job);
    }
    return moved;
  }

  /// What happened here goes to all; what happened elsewhere stops the devices here.
  void spread_failure(DeviceTeam& team) {
    if (control_.failure() && !team.failed()) {
      DeviceTeam::Failure failure = *control_.failure();
      if (failure.kind == DeviceTeam::Failure::Kind::stalled) {
        failure.text = stalled_text(team);  // each rank says where its own devices are
      }
      team.fail_with(std::move(failure));
    }
    if (team.failed() && !has_told_) {
      has_told_ = true;
      failed_at_ = Clock::now();
      control_.tell_failure(*team.failure());
    }
  }

  void look_after_quiet(DeviceTeam& team, bool moved) {
    const auto now = Clock::now();
    if (moved || !is_quiet(team)) {
      quiet_since_ = now;
      if (has_told_status_) {
        has_told_status_ = false;
        control_.forget_own_status();
      }
    } else if (!has_told_status_ && now - quiet_since_ > quiet_before_telling) {
      has_told_status_ = true;
      control_.tell_status(status(team));
    }
    if (has_told_status_ && is_deadlock(control_.status(), *settings_.mesh, settings_.per_rank)) {
      std::string text = "deadlock: no device can go on";
      for (const std::optional<MpiStatus>& rank : control_.status()) {
        text += "; " + rank->text;
      }
      team.fail_with({.kind = DeviceTeam::Failure::Kind::deadlock, .text = text});
    }
    const std::int64_t transitions = team.transitions();
    if (transitions != seen_transitions_) {
      seen_transitions_ = transitions;
      last_transition_ = now;
    } else if (settings_.patience.count() > 0 && now - last_transition_ > settings_.patience) {
      team.fail_with({.kind = DeviceTeam::Failure::Kind::stalled, .text = stalled_text(team)});
    }
  }

  [[nodiscard]] bool is_quiet(DeviceTeam& team) {
    return team.is_quiet() && std::all_of(jobs_.begin(), jobs_.end(),
                                          [](const MpiJob& job) { return job.waits_for_peers(); });
  }

  [[nodiscard]] MpiStatus status(DeviceTeam& team) {
    MpiStatus status{.is_done = false, .started = started_, .waits = {}, .text = team.describe()};
    for (const MpiJob& job : jobs_) {
      status.waits.emplace_back(job.place().key, job.place().number);
    }
    return status;
  }

  [[nodiscard]] std::string stalled_text(DeviceTeam& team) const {
    return "stalled: no collective was entered or left for " +
           std::to_string(settings_.patience.count()) + " ms; " + team.describe();
  }

  void wait_for_the_others(DeviceTeam& team) {
    MpiStatus done = status(team);
    done.is_done = true;
    done.waits.clear();
    control_.tell_status(std::move(done));
    while (!control_.all_are_done() || !control_.is_all_sent()) {
      if (!control_.receive()) {
        idle();
      }
      spread_failure(team);
      if (team.failed()) {
        leave_after_failure(team);
        return;
      }
    }
  }

  /// Says what happened, and stays until the others have said theirs, or would have.
  void leave_after_failure(DeviceTeam& team) {
    spread_failure(team);
    settings_.report(team);
    control_.tell_leave();
    while ((!control_.all_have_left() || !control_.is_all_sent()) &&
           Clock::now() - failed_at_ < farewell) {
      if (!control_.receive()) {
        idle();
      }
    }
  }

  /// Gives the core to a device. Nobody wakes us for a message, so the sleep is short, and at first, or while
  /// data is on its way, which moves only when we look, there is none.
  void idle() {
    const bool is_sending =
        std::any_of(jobs_.begin(), jobs_.end(), [](const MpiJob& job) { return job.is_sending(); });
    if (is_sending || ++idle_rounds_ < yields_before_sleep) {
      std::this_thread::yield();
      return;
    }
    std::unique_lock lock(mutex_);
    something_arrived_.wait_for(lock, std::chrono::microseconds(50),
                                [&] { return !arrived_.empty(); });
  }

  Settings settings_;
  MpiControl control_;
  std::list<MpiJob> jobs_;
  std::map<GroupKey, std::int64_t> started_;
  std::map<const Slot*, std::int64_t> numbers_;
  int idle_rounds_ = 0;
  bool has_told_ = false;
  bool has_told_status_ = false;
  Clock::time_point failed_at_ = Clock::now();
  Clock::time_point quiet_since_ = Clock::now();
  Clock::time_point last_transition_ = Clock::now();
  std::int64_t seen_transitions_ = 0;
  std::mutex mutex_;
  std::condition_variable something_arrived_;
  std::deque<std::pair<std::shared_ptr<Slot>, Stage>> arrived_;
};

}  // namespace heddle::detail

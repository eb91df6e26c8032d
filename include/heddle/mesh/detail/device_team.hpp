#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <oneapi/tbb/task.h>
#include <oneapi/tbb/task_arena.h>

#include "heddle/core/error.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/detail/parker.hpp"
#include "heddle/mesh/detail/report.hpp"
#include "heddle/mesh/detail/slot.hpp"
#include "heddle/mesh/failure.hpp"

namespace heddle::detail {

/// The devices of one process during one run: who computes, who waits for whom, and what went wrong.
///
/// At most `tokens` devices compute at a time; one that waits passes its token to the ready device of
/// least id. Everything below is guarded by one mutex: no more threads than tokens contend for it, and
/// whoever waits sleeps on a parker of its own.
class DeviceTeam {
 public:
  enum class State : std::uint8_t { ready, running, waiting, returned, failed };

  struct Device {
    std::int64_t id = 0;
    State state = State::ready;
    Parker parker;
    std::thread::id thread;
    std::int64_t sequence = 0;
    std::optional<CallRecord> entered;    ///< the last collective it entered
    std::optional<CallRecord> completed;  ///< the last one it came out of
    const Slot* waits_in = nullptr;
    Stage waits_for = Stage::started;
    bool told_of_peer = false;  ///< what it throws from now on began elsewhere
    bool originated = false;
    std::exception_ptr exception;
    DeviceLedger ledger;
  };

  /// What went wrong first.
  struct Failure {
    enum class Kind : std::uint8_t { device, mismatch, deadlock, stalled };

    Kind kind = Kind::device;
    std::int64_t origin = 0;
    std::string text = {};
    std::vector<std::int64_t> members = {};  ///< of the mismatched group
  };

  /// A device's hold on one collective.
  struct Ticket {
    std::shared_ptr<Slot> slot;
    std::int64_t index = 0;
    std::int64_t local_index = 0;  ///< among the members in this process
    bool reading = false;
    CallRecord call;
  };

  struct Settings {
    std::int64_t first_id = 0;
    std::int64_t devices = 1;
    std::int64_t tokens = 1;
    /// Called, under the lock, when all members of this process have reached a stage of a collective
    /// whose other members are elsewhere; complete() has to follow.
    std::function<void(const std::shared_ptr<Slot>&, Stage)> on_external = {};
  };

  DeviceTeam(const Topology& topology, Settings settings)
      : topology_(topology),
        settings_(std::move(settings)),
        devices_(static_cast<std::size_t>(settings_.devices)) {
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      devices_[i].id = settings_.first_id + static_cast<std::int64_t>(i);
    }
    for (auto& queues : queues_) {
      queues.resize(static_cast<std::size_t>(topology_.devices()));
    }
  }

  [[nodiscard]] const Topology& topology() const { return topology_; }
  [[nodiscard]] bool is_local(std::int64_t id) const {
    return id >= settings_.first_id && id < settings_.first_id + settings_.devices;
  }
  [[nodiscard]] Device& device(std::int64_t id) {
    return devices_[static_cast<std::size_t>(id - settings_.first_id)];
  }

  /// Lets the devices go.
  void open() {
    Lock lock(mutex_);
    admit(settings_.devices);
    settle(lock);
  }

  /// Lets the first `started` devices go home: the rest could not get a thread.
  void cancel(std::int64_t started) {
    Lock lock(mutex_);
    cancelled_ = true;
    admit(started);
    settle(lock);
  }

  /// What a device's thread does from its first to its last instruction.
  void run_device(std::int64_t id, const std::function<void()>& body) {
    Device& self = device(id);
    self.parker.park();
    self.thread = std::this_thread::get_id();
    std::string text;
    try {
      // After a peer's failure, too: whether a device fails by itself must not depend on who began.
      if (!cancelled_) {
        body();
      }
    } catch (const std::exception& error) {
      self.exception = std::current_exception();
      text = error.what();
    } catch (...) {
      self.exception = std::current_exception();
      text = "an exception that is no std::exception";
    }
    Lock lock(mutex_);
    if (self.exception && !self.told_of_peer) {
      self.originated = true;
      if (failure_ && failure_->kind == Kind::device && failure_->origin == id) {
        failure_->text = text;  // it was known that something left the device, and not yet what
      }
      fail({.kind = Kind::device, .origin = id, .text = text});
    }
    self.state = self.exception ? State::failed : State::returned;
    --running_;
    ++left_;
    look_for_deadlock();
    if (left_ == settings_.devices) {
      all_left_.notify_all();
    }
    settle(lock);
  }

  /// Enters a collective and lays the call's memory open.
  [[nodiscard]] Ticket start(Device& self, const CollectiveCall& call) {
    require_own_thread(self, call);
    Lock lock(mutex_);
    throw_if_failed(self);
    CollectiveCall own = call;
    own.signature.sequence = self.sequence++;
    Ticket ticket;
    ticket.call = {own.signature, own.site};
    self.entered = ticket.call;
    const AxisTuple& axes = own.signature.axes;
    Queue& queue = queue_of(axes, self.id);
    for (const std::shared_ptr<Slot>& open_slot : queue) {
      const std::int64_t place = topology_.index_in(open_slot->axes, self.id);
      if (!open_slot->member(place).arrived) {
        ticket.slot = open_slot;
        break;
      }
    }
    const bool first = ticket.slot == nullptr;
    if (first) {
      ticket.slot = new_slot(axes, self.id);
      queue.push_back(ticket.slot);
    }
    Slot& slot = *ticket.slot;
    ticket.index = topology_.index_in(slot.axes, self.id);
    for (std::int64_t i = 0; i < ticket.index; ++i) {
      ticket.local_index += is_local(slot.ids[static_cast<std::size_t>(i)]) ? 1 : 0;
    }
    Slot::Member& member = slot.members[static_cast<std::size_t>(ticket.index)];
    if (!first) {
      refuse_mismatch(lock, slot, self, own);
    }
    member = {.arrived = true, .call = own};
    if (reach(ticket.slot, Stage::started)) {
      queue.erase(std::find(queue.begin(), queue.end(), ticket.slot));
    }
    settle(lock);
    return ticket;
  }

  void wait(Device& self, Ticket& ticket) {
    Lock lock(mutex_);
    wait_for(lock, self, *ticket.slot, Stage::started);
    ++ticket.slot->readers;
    ticket.reading = true;
  }

  void wait_outputs(Device& self, Ticket& ticket) {
    Lock lock(mutex_);
    stop_reading(ticket);
    reach(ticket.slot, Stage::written);
    wait_for(lock, self, *ticket.slot, Stage::written);
    ++ticket.slot->readers;
    ticket.reading = true;
  }

  void finish(Device& self, Ticket& ticket) {
    Lock lock(mutex_);
    stop_reading(ticket);
    // Nobody reads anything of a barrier.
    if (ticket.call.signature.op != Collective::barrier) {
      reach(ticket.slot, Stage::finished);
      wait_for(lock, self, *ticket.slot, Stage::finished);
    }
    self.completed = ticket.call;
  }

  /// Stops every device and returns when nobody reads this device's memory any more: its owner is
  /// about to be unwound.
  void abandon(Device& self, Ticket& ticket, const std::string& text) {
    Lock lock(mutex_);
    stop_reading(ticket);
    fail({.kind = Kind::device, .origin = self.id, .text = text});
    settle(lock);
    drained_.wait(lock, [&] { return ticket.slot->readers == 0 && !ticket.slot->is_travelling; });
  }

  /// Memory of this process's members is on its way to other processes until complete(). False after a
  /// failure: its owners may be gone.
  [[nodiscard]] bool begin_transfer(Slot& slot) {
    const std::lock_guard lock(mutex_);
    slot.is_travelling = !failure_;
    return slot.is_travelling;
  }

  /// A stage of a collective with members elsewhere is done.
  void complete(const std::shared_ptr<Slot>& slot, Stage stage) {
    Lock lock(mutex_);
    --external_;
    slot->is_travelling = false;
    if (failure_) {
      drained_.notify_all();
    }
    mark_complete(*slot, stage);
    settle(lock);
  }

  /// Nobody of this process runs or is about to; who waits, waits for other processes.
  [[nodiscard]] bool is_quiet() {
    const std::lock_guard lock(mutex_);
    return running_ == 0 && ready_.empty();
  }

  /// Stops every device because of something that none of them did.
  void fail_with(Failure failure) {
    Lock lock(mutex_);
    fail(std::move(failure));
    settle(lock);
  }

  [[nodiscard]] bool failed() const { return has_failed_.load(std::memory_order_acquire); }

  /// Waits until every device has left, or `patience` is over. True when all have.
  [[nodiscard]] bool wait_until_left(std::chrono::milliseconds patience) {
    Lock lock(mutex_);
    return all_left_.wait_for(lock, patience, [&] { return left_ == settings_.devices; });
  }
  void wait_until_left() {
    Lock lock(mutex_);
    all_left_.wait(lock, [&] { return left_ == settings_.devices; });
  }
  [[nodiscard]] bool all_left() {
    const std::lock_guard lock(mutex_);
    return left_ == settings_.devices;
  }
  /// How often devices entered, left or were let through a collective: stands still when they do.
  [[nodiscard]] std::int64_t transitions() {
    const std::lock_guard lock(mutex_);
    return transitions_;
  }

  /// "device 0: computes, last completed <call>; ...": where everybody is.
  [[nodiscard]] std::string describe() {
    const std::lock_guard lock(mutex_);
    std::vector<std::pair<std::int64_t, std::string>> lines;
    for (const Device& each : devices_) {
      lines.emplace_back(each.id, doing(each));
    }
    return by_text(lines);
  }

  [[nodiscard]] std::optional<Failure> failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  /// Devices whose exception was their own.
  [[nodiscard]] std::int64_t originators() {
    const std::lock_guard lock(mutex_);
    return std::count_if(devices_.begin(), devices_.end(),
                         [](const Device& each) { return each.originated; });
  }

  /// After all have left: throws the exception of the least device that has one of its own, else what
  /// the failure itself is.
  void rethrow() {
    const std::lock_guard lock(mutex_);
    for (const Device& each : devices_) {
      if (each.originated) {
        std::rethrow_exception(each.exception);
      }
    }
    if (failure_) {
      const auto member = std::find_if(failure_->members.begin(), failure_->members.end(),
                                       [&](std::int64_t id) { return is_local(id); });
      throw_failure(member == failure_->members.end() ? -1 : *member);
    }
  }

 private:
  using Kind = Failure::Kind;
  using Lock = std::unique_lock<std::mutex>;
  using Queue = std::vector<std::shared_ptr<Slot>>;

  void admit(std::int64_t devices) {
    left_ = settings_.devices - devices;
    for (std::int64_t i = 0; i < devices; ++i) {
      ready_.push(settings_.first_id + i);
    }
  }

  /// Calls whose groups are the same devices meet, whatever the axes of size 1 among theirs.
  [[nodiscard]] Queue& queue_of(const AxisTuple& axes, std::int64_t id) {
    std::size_t mask = 0;
    for (const Axis axis : axes.axes()) {
      if (topology_.axes().size(axis) > 1) {
        mask |= std::size_t{1} << static_cast<unsigned>(axis);
      }
    }
    return queues_[mask][static_cast<std::size_t>(topology_.least_in_group(axes, id))];
  }

  [[nodiscard]] std::shared_ptr<Slot> new_slot(const AxisTuple& axes, std::int64_t id) {
    auto slot = std::make_shared<Slot>();
    slot->axes = axes;
    slot->ids = topology_.group_of(axes, id);
    slot->members.resize(slot->ids.size());
    slot->local_members = std::count_if(slot->ids.begin(), slot->ids.end(),
                                        [&](std::int64_t member) { return is_local(member); });
    return slot;
  }

  void require_own_thread(const Device& self, const CollectiveCall& call) const {
    const std::string_view op = collective_name(call.signature.op);
    require(self.thread == std::this_thread::get_id(), "mesh", op, "called from a foreign thread",
            "a collective must be called by its device's own thread");
    // A thread that waits inside a task may be given another device's task to run meanwhile. A thread
    // that oneTBB has never seen is in no task, and asking for its task would make it an arena.
    const bool knows_tbb = oneapi::tbb::this_task_arena::current_thread_index() !=
                           oneapi::tbb::task_arena::not_initialized;
    require(!knows_tbb || oneapi::tbb::task::current_context() == nullptr, "mesh", op,
            "called inside a oneTBB task", "a collective must stand outside every parallel loop");
  }

  void refuse_mismatch(Lock& lock, const Slot& slot, Device& self, const CollectiveCall& own) {
    const auto other = std::find_if(slot.members.begin(), slot.members.end(),
                                    [](const Slot::Member& member) { return member.arrived; });
    if (other == slot.members.end() || other->call.signature == own.signature) {
      return;
    }
    std::vector<std::pair<std::int64_t, std::string>> lines;
    for (std::size_t i = 0; i < slot.members.size(); ++i) {
      if (slot.members[i].arrived) {
        const CollectiveCall& call = slot.members[i].call;
        lines.emplace_back(slot.ids[i], to_string(CallRecord{call.signature, call.site}));
      }
    }
    lines.emplace_back(self.id, to_string(CallRecord{own.signature, own.site}));
    fail({.kind = Kind::mismatch,
          .origin = *std::min_element(slot.ids.begin(), slot.ids.end()),
          .text = mismatch_text(slot.ids, lines),
          .members = slot.ids});
    settle(lock);
    throw_if_failed(self);
  }

  /// Counts one member of this process at a stage. True when it was the last one.
  bool reach(const std::shared_ptr<Slot>& slot, Stage stage) {
    ++transitions_;
    std::int64_t& reached = slot->reached[static_cast<std::size_t>(stage)];
    if (++reached < slot->local_members) {
      return false;
    }
    if (slot->is_external() && stage != Stage::finished) {
      ++external_;
      settings_.on_external(slot, stage);
    } else {
      mark_complete(*slot, stage);
    }
    return true;
  }

  void mark_complete(Slot& slot, Stage stage) {
    ++transitions_;
    slot.complete[static_cast<std::size_t>(stage)] = true;
    for (const std::int64_t id : slot.ids) {
      if (is_local(id) && device(id).waits_in == &slot && device(id).waits_for == stage) {
        make_ready(device(id));
      }
    }
  }

  void make_ready(Device& device) {
    device.state = State::ready;
    device.waits_in = nullptr;
    ready_.push(device.id);
  }

  void wait_for(Lock& lock, Device& self, const Slot& slot, Stage stage) {
    if (!slot.is_complete(stage) && !failure_) {
      self.state = State::waiting;
      self.waits_in = &slot;
      self.waits_for = stage;
      --running_;
      ++transitions_;
      look_for_deadlock();
      wake(lock);
      self.parker.park();
      lock.lock();
    } else {
      settle(lock);
    }
    // What is finished stays so: a failure elsewhere is told at the next call. Earlier stages lead to
    // reading memory whose owner may be on its way out.
    if (stage != Stage::finished || !slot.is_complete(stage)) {
      throw_if_failed(self);
    }
  }

  void stop_reading(Ticket& ticket) {
    if (ticket.reading) {
      ticket.reading = false;
      if (--ticket.slot->readers == 0 && failure_) {
        drained_.notify_all();
      }
    }
  }

  /// Hands out free tokens, unlocks, and wakes whoever got one.
  void wake(Lock& lock) {
    std::vector<Parker*> woken;
    while (running_ < settings_.tokens && !ready_.empty()) {
      Device& next = device(ready_.top());
      ready_.pop();
      next.state = State::running;
      ++running_;
      woken.push_back(&next.parker);
    }
    lock.unlock();
    for (Parker* const parker : woken) {
      parker->unpark();
    }
  }

  /// The same for a thread that goes on.
  void settle(Lock& lock) {
    if (running_ < settings_.tokens && !ready_.empty()) {
      wake(lock);
      lock.lock();
    }
  }

  void fail(Failure failure) {
    if (failure_) {
      return;
    }
    failure_ = std::move(failure);
    has_failed_.store(true, std::memory_order_release);
    for (Device& each : devices_) {
      if (each.state == State::waiting) {
        make_ready(each);
      }
    }
  }

  void throw_if_failed(Device& self) {
    if (failure_) {
      self.told_of_peer = failure_->kind == Kind::device ||
                          (failure_->kind == Kind::mismatch && !is_member(self.id));
      throw_failure(self.id);
    }
  }

  [[nodiscard]] bool is_member(std::int64_t id) const {
    return std::find(failure_->members.begin(), failure_->members.end(), id) !=
           failure_->members.end();
  }

  [[noreturn]] void throw_failure(std::int64_t id) const {
    switch (failure_->kind) {
      case Kind::deadlock:
        throw Deadlock(failure_->text);
      case Kind::stalled:
        throw Stalled(failure_->text);
      case Kind::mismatch:
        if (is_member(id)) {
          throw CollectiveMismatch(failure_->text);
        }
        break;
      case Kind::device:
        break;
    }
    throw PeerFailure(failure_->origin, failure_->text);
  }

  /// Called on every step to waiting or leaving: where nobody runs, nobody is about to, and nothing is
  /// under way outside, nothing will ever happen again.
  void look_for_deadlock() {
    const bool all_gone = left_ == settings_.devices;
    if (running_ > 0 || !ready_.empty() || external_ > 0 || failure_ || all_gone) {
      return;
    }
    std::vector<const Slot*> slots;
    for (const Device& each : devices_) {
      if (each.waits_in != nullptr &&
          std::find(slots.begin(), slots.end(), each.waits_in) == slots.end()) {
        slots.push_back(each.waits_in);
      }
    }
    std::string text = "deadlock: no device can go on";
    for (const Slot* const slot : slots) {
      std::vector<std::pair<std::int64_t, std::string>> lines;
      for (std::size_t i = 0; i < slot->ids.size(); ++i) {
        const std::int64_t id = slot->ids[i];
        if (slot->members[i].arrived) {
          const CollectiveCall& call = slot->members[i].call;
          lines.emplace_back(id, "arrived at " + to_string(CallRecord{call.signature, call.site}));
        } else if (is_local(id)) {
          lines.emplace_back(id, "missing, " + doing(device(id)));
        } else {
          lines.emplace_back(id, "on another rank");
        }
      }
      text += "; group " + id_list(slot->ids) + ": " + by_text(lines);
    }
    fail({.kind = Kind::deadlock, .origin = settings_.first_id, .text = text});
  }

  [[nodiscard]] static std::string doing(const Device& each) {
    std::string text;
    switch (each.state) {
      case State::ready:
      case State::running:
        text = "computes";
        break;
      case State::waiting:
        text = "waits in " + to_string(*each.entered);
        break;
      case State::returned:
        text = "has returned";
        break;
      case State::failed:
        text = "has failed";
        break;
    }
    return text + ", last completed " +
           (each.completed ? to_string(*each.completed) : std::string("nothing"));
  }

  const Topology topology_;
  const Settings settings_;
  std::mutex mutex_;
  std::condition_variable all_left_;
  std::condition_variable drained_;
  std::vector<Device> devices_;
  std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> ready_;
  std::int64_t running_ = 0;
  std::int64_t left_ = 0;
  std::int64_t external_ = 0;  ///< stages that are under way outside this process
  std::int64_t transitions_ = 0;
  /// Open collectives by (which axes of size > 1) and (least id of the group).
  std::array<std::vector<Queue>, 8> queues_;
  std::optional<Failure> failure_;
  std::atomic<bool> has_failed_{false};
  bool cancelled_ = false;  ///< set before any device goes
};

}  // namespace heddle::detail

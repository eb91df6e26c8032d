#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <oneapi/tbb/task_arena.h>

#include "heddle/core/parallel.hpp"
#include "heddle/core/workspace.hpp"

namespace heddle::gdn {

/// Scratch of calls that run in the caller's arena: a Workspace for each of its threads, which the
/// caller may own and keep from call to call. Not for two calls at once.
class Workspaces {
 public:
  /// body(task, workspace) for each task, in any order, on any thread of the arena. A body must not run
  /// parallel loops of its own.
  template <class Body>
  void run(std::int64_t tasks, const Body& body) {
    namespace arena = oneapi::tbb::this_task_arena;
    const auto threads = static_cast<std::size_t>(std::max(2, arena::max_concurrency()));
    while (each_.size() < threads) {
      each_.emplace_back();
    }
    if (tasks <= 1) {
      for (std::int64_t task = 0; task < tasks; ++task) {
        body(task, each_[0]);
      }
      return;
    }
    arena::isolate([&] {
      parallel_tasks(tasks, [&](std::int64_t task) {
        body(task, each_[static_cast<std::size_t>(arena::current_thread_index())]);
      });
    });
  }

  /// The most that one thread had in use at a time since construction.
  [[nodiscard]] std::size_t high_water_bytes() const {
    std::size_t most = 0;
    for (const Workspace& workspace : each_) {
      most = std::max(most, workspace.high_water_bytes());
    }
    return most;
  }

 private:
  std::vector<Workspace> each_;
};

}  // namespace heddle::gdn

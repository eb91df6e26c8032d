#pragma once

#include <cstdint>

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>

#include "heddle/core/error.hpp"

namespace heddle {

/// Runs body(task) for task = 0 .. tasks - 1 in the caller's oneTBB arena, in any order, on any of
/// its threads.
///
/// writes    each task must own what it writes; a sum over tasks goes through one slot per task,
///           folded by the caller in task order
/// order     so results depend on the tasks alone, never on how many threads ran them
/// cost      about 0.1 us a task; below 50 us of work in all a plain loop is cheaper
/// throws    what the first failing body throws; Error for tasks < 0
template <class Body>
void parallel_tasks(std::int64_t tasks, const Body& body) {
  require(tasks >= 0, "parallel_tasks", "tasks", tasks, "must be >= 0");
  if (tasks == 1) {
    body(std::int64_t{0});
    return;
  }
  oneapi::tbb::parallel_for(
      oneapi::tbb::blocked_range<std::int64_t>(0, tasks, 1),
      [&body](const oneapi::tbb::blocked_range<std::int64_t>& range) {
        for (std::int64_t task = range.begin(); task != range.end(); ++task) {
          body(task);
        }
      },
      oneapi::tbb::simple_partitioner{});
}

/// Cuts [0, count) into blocks of `grain` (the last may be short) and runs body(first, last) for
/// each. The cuts depend on count and grain alone.
template <class Body>
void parallel_blocks(std::int64_t count, std::int64_t grain, const Body& body) {
  require(count >= 0, "parallel_blocks", "count", count, "must be >= 0");
  require(grain >= 1, "parallel_blocks", "grain", grain, "must be >= 1");
  parallel_tasks((count + grain - 1) / grain, [&](std::int64_t block) {
    const std::int64_t first = block * grain;
    body(first, first + grain < count ? first + grain : count);
  });
}

}  // namespace heddle

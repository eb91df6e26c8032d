// Mutants tried: last block runs past the end; a task is run twice; blocks cut by thread count.
#include "heddle/core/parallel.hpp"

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <oneapi/tbb/task_arena.h>

#include "support/threads.hpp"

namespace heddle {
namespace {

TEST(Parallel, EachTaskRunsOnce) {
  for (const std::int64_t tasks : {0, 1, 2, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
    parallel_tasks(tasks, [&](std::int64_t task) { ++runs[static_cast<std::size_t>(task)]; });
    for (const auto& count : runs) {
      EXPECT_EQ(count.load(), 1);
    }
  }
}

TEST(Parallel, BlocksDependOnCountAndGrainAlone) {
  using Blocks = std::vector<std::pair<std::int64_t, std::int64_t>>;
  for (const int threads : {1, 2, 8}) {
    Blocks blocks(3);
    test::with_threads(threads, [&] {
      parallel_blocks(10, 4, [&](std::int64_t first, std::int64_t last) {
        blocks[static_cast<std::size_t>(first / 4)] = {first, last};
      });
    });
    EXPECT_EQ(blocks, (Blocks{{0, 4}, {4, 8}, {8, 10}}));
  }
}

TEST(Parallel, StaysInsideTheCallersArena) {
  std::atomic<int> most{0};
  test::with_threads(2, [&] {
    parallel_tasks(64, [&](std::int64_t) {
      const int slot = oneapi::tbb::this_task_arena::current_thread_index();
      int seen = most.load();
      while (slot > seen && !most.compare_exchange_weak(seen, slot)) {
      }
    });
  });
  EXPECT_LE(most.load(), 1);
}

TEST(Parallel, AFailingTaskReachesTheCaller) {
  EXPECT_THROW(parallel_tasks(8,
                              [](std::int64_t task) {
                                if (task == 5) {
                                  throw std::runtime_error("task 5");
                                }
                              }),
               std::runtime_error);
}

TEST(Parallel, RefusesNonsense) {
  const auto nothing = [](std::int64_t) {};
  const auto range = [](std::int64_t, std::int64_t) {};
  EXPECT_THROW(parallel_tasks(-1, nothing), Error);
  EXPECT_THROW(parallel_blocks(-1, 1, range), Error);
  EXPECT_THROW(parallel_blocks(1, 0, range), Error);
}

}  // namespace
}  // namespace heddle

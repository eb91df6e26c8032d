// Mutants: tasks beyond the first dropped on one thread; two threads on one workspace; the high-water mark
// of the first workspace alone.
#include "heddle/gdn/workspaces.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/workspace.hpp"
#include "support/threads.hpp"

namespace heddle::gdn {
namespace {

TEST(GdnWorkspaces, EveryTaskRunsOnceOnAWorkspaceThatNobodyElseHas) {
  for (const int threads : {1, 2, 5}) {
    heddle::test::with_threads(threads, [&] {
      for (const std::int64_t tasks : {0, 1, 2, 100}) {
        Workspaces workspaces;
        std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
        std::atomic<bool> clean{true};
        workspaces.run(tasks, [&](std::int64_t task, Workspace& workspace) {
          const Workspace::Frame frame(workspace);
          const auto own = workspace.take<std::int64_t>(1000);
          std::fill(own.begin(), own.end(), task);
          ++runs[static_cast<std::size_t>(task)];
          if (std::any_of(own.begin(), own.end(), [&](std::int64_t x) { return x != task; })) {
            clean = false;
          }
        });
        EXPECT_TRUE(clean);
        for (const std::atomic<int>& each : runs) {
          EXPECT_EQ(each, 1) << tasks << " tasks, " << threads << " threads";
        }
      }
    });
  }
}

TEST(GdnWorkspaces, HighWaterIsTheMostOfAnyThread) {
  heddle::test::with_threads(3, [] {
    Workspaces workspaces;
    EXPECT_EQ(workspaces.high_water_bytes(), 0U);
    workspaces.run(64, [](std::int64_t task, Workspace& workspace) {
      const Workspace::Frame frame(workspace);
      const auto bytes = workspace.take<std::byte>(task == 63 ? 100000 : 10);
      bytes[0] = std::byte{1};
    });
    EXPECT_EQ(workspaces.high_water_bytes(), Workspace::bytes_for<std::byte>(100000));
  });
}

}  // namespace
}  // namespace heddle::gdn

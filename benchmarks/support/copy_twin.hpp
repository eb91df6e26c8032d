#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <oneapi/tbb/task_arena.h>

#include "heddle/core/parallel.hpp"
#include "heddle/core/workspace.hpp"

namespace heddle::bench {

/// memcpy of so many bytes between buffers that were touched before, on all threads of the arena: what a
/// kernel that only moves bytes is measured against.
class CopyTwin {
 public:
  explicit CopyTwin(std::int64_t bytes) {
    source_ = memory_.take<std::byte>(bytes);
    destination_ = memory_.take<std::byte>(bytes);
    std::memset(source_.data(), 1, source_.size());
    std::memset(destination_.data(), 2, destination_.size());
  }

  void operator()() const {
    const auto bytes = static_cast<std::int64_t>(source_.size());
    const std::int64_t threads = oneapi::tbb::this_task_arena::max_concurrency();
    parallel_blocks(bytes, (bytes + threads - 1) / threads,
                    [this](std::int64_t first, std::int64_t last) {
                      std::memcpy(destination_.data() + first, source_.data() + first,
                                  static_cast<std::size_t>(last - first));
                    });
  }

 private:
  Workspace memory_;
  std::span<std::byte> source_;
  std::span<std::byte> destination_;
};

}  // namespace heddle::bench

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <oneapi/tbb/task_arena.h>

#include "heddle/core/parallel.hpp"
#include "heddle/core/workspace.hpp"

namespace heddle::bench {

namespace detail {

typedef std::uint64_t Words __attribute__((vector_size(64)));

[[gnu::always_inline]] inline std::uint64_t read_loop(const std::byte* data, std::int64_t bytes) {
  constexpr int chains = 8;
  Words mixed[chains] = {};
  for (std::int64_t at = 0; at + chains * 64 <= bytes; at += chains * 64) {
    for (int c = 0; c < chains; ++c) {
      Words words;
      std::memcpy(&words, data + at + c * 64, sizeof words);
      mixed[c] ^= words;
    }
  }
  std::uint64_t result = 0;
  for (const Words& words : mixed) {
    for (int i = 0; i < 8; ++i) {
      result ^= words[i];
    }
  }
  return result;
}

#if defined(__x86_64__)
[[gnu::target("avx512f")]] inline std::uint64_t read_loop_avx512(const std::byte* data,
                                                                 std::int64_t bytes) {
  return read_loop(data, bytes);
}
#endif

[[nodiscard]] inline std::uint64_t read_bytes(const std::byte* data, std::int64_t bytes) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    return read_loop_avx512(data, bytes);
  }
#endif
  return read_loop(data, bytes);
}

}  // namespace detail

/// Reads so many bytes that were touched before, in order, on all threads of the arena: what a kernel
/// that mostly reads is measured against.
class ReadTwin {
 public:
  explicit ReadTwin(std::int64_t bytes) {
    source_ = memory_.take<std::byte>(bytes);
    std::memset(source_.data(), 1, source_.size());
  }

  void operator()() const {
    const auto bytes = static_cast<std::int64_t>(source_.size());
    const std::int64_t threads = oneapi::tbb::this_task_arena::max_concurrency();
    parallel_blocks(bytes, (bytes + threads - 1) / threads,
                    [this](std::int64_t first, std::int64_t last) {
                      sink_ = detail::read_bytes(source_.data() + first, last - first);
                    });
  }

 private:
  Workspace memory_;
  std::span<std::byte> source_;
  static inline volatile std::uint64_t sink_ = 0;
};

}  // namespace heddle::bench

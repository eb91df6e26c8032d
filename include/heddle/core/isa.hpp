#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "heddle/core/error.hpp"

namespace heddle {

/// The instruction sets that kernels are written for, worst first. Which of them runs never enters a
/// result: f32 and f64 results have the same bits on every path, and so do products of bf16 factors
/// unless a subnormal number takes part (the hardware dot product of avx512_bf16 reads and writes
/// those as 0).
enum class Path {
  portable,     ///< scalar std::fma; everywhere
  neon,         ///< aarch64, 128 bits
  avx2,         ///< x86-64 with AVX2 and FMA, 256 bits
  avx512,       ///< AVX-512 F, BW, DQ, VL
  avx512_bf16,  ///< the same with the bf16 dot product
};

[[nodiscard]] constexpr std::string_view path_name(Path path) {
  switch (path) {
    case Path::portable:
      return "scalar";
    case Path::neon:
      return "neon";
    case Path::avx2:
      return "avx2";
    case Path::avx512:
      return "avx512";
    case Path::avx512_bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

namespace detail {

struct PathList {
  std::array<Path, 5> paths{};
  std::size_t count = 0;

  constexpr void add(Path path) { paths[count++] = path; }
};

/// Asked of the processor and not of the compiler's flags, so that translation units with different
/// flags agree on what the inline functions of this library do. The answer is never below what the
/// flags promise: a program that runs at all has those instructions.
[[nodiscard]] inline PathList find_paths() {
  PathList found;
  found.add(Path::portable);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    found.add(Path::avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      found.add(Path::avx512);
      if (__builtin_cpu_supports("avx512bf16")) {
        found.add(Path::avx512_bf16);
      }
    }
  }
#elif defined(__aarch64__)
  found.add(Path::neon);
#endif
  return found;
}

[[nodiscard]] inline const PathList& path_list() {
  static const PathList found = find_paths();
  return found;
}

/// The path that a ScopedPath asks for, or -1.
inline std::atomic<int> forced_path{-1};

}  // namespace detail

/// The paths that this machine can run, worst first; never empty.
[[nodiscard]] inline std::span<const Path> available_paths() {
  const detail::PathList& list = detail::path_list();
  return {list.paths.data(), list.count};
}

/// The path that kernels take now: the best one available, unless a ScopedPath says another.
[[nodiscard]] inline Path current_path() {
  const int forced = detail::forced_path.load(std::memory_order_relaxed);
  return forced >= 0 ? static_cast<Path>(forced) : available_paths().back();
}

/// Makes every kernel of the process take `path` while it lives: for tests that hold the paths
/// against each other, and benchmarks of one of them. Create and destroy it where no kernel runs;
/// scopes nest.
///
/// throws    Error for a path that this machine cannot run
class ScopedPath {
 public:
  explicit ScopedPath(Path path) {
    bool available = false;
    std::string names;
    for (const Path candidate : available_paths()) {
      available = available || candidate == path;
      names.append(names.empty() ? "" : ", ").append(path_name(candidate));
    }
    require(available, "ScopedPath", "path", path_name(path), "must be one of " + names);
    previous_ = detail::forced_path.exchange(static_cast<int>(path));
  }
  ScopedPath(const ScopedPath&) = delete;
  ScopedPath& operator=(const ScopedPath&) = delete;
  ~ScopedPath() { detail::forced_path.store(previous_); }

 private:
  int previous_;
};

}  // namespace heddle

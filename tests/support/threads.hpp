#pragma once

#include <cstddef>

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

namespace heddle::test {

/// Runs f on an arena of `threads` threads, also where the machine has fewer cores.
template <class Function>
void with_threads(int threads, const Function& f) {
  const oneapi::tbb::global_control limit(oneapi::tbb::global_control::max_allowed_parallelism,
                                          static_cast<std::size_t>(threads));
  oneapi::tbb::task_arena arena(threads);
  arena.execute(f);
}

}  // namespace heddle::test

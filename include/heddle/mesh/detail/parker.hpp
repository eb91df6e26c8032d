#pragma once

#include <atomic>
#include <cstdint>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace heddle::detail {

/// Lets one thread sleep until another gives it leave, once per leave. Bare futex where there is one:
/// hundreds of devices pass through a rendezvous one wake-up each, and std::atomic::wait yields
/// several times before it sleeps.
class Parker {
 public:
  void park() {
    while (granted_.load(std::memory_order_acquire) == 0) {
#ifdef __linux__
      ::syscall(SYS_futex, address(), FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
#else
      granted_.wait(0, std::memory_order_acquire);
#endif
    }
    granted_.store(0, std::memory_order_relaxed);
  }

  void unpark() {
    granted_.store(1, std::memory_order_release);
#ifdef __linux__
    ::syscall(SYS_futex, address(), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
#else
    granted_.notify_one();
#endif
  }

 private:
  [[nodiscard]] void* address() {
    return &granted_;
  }

  std::atomic<std::int32_t> granted_{0};
};

}  // namespace heddle::detail

#pragma once

#include <pthread.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <system_error>

#include <oneapi/tbb/task_arena.h>

namespace heddle::detail {

/// A thread whose stack has a size of the caller's choice, which std::thread cannot give. Joins when
/// it goes out of scope.
class DeviceThread {
 public:
  /// `body` must not throw and must outlive the thread.
  ///
  /// throws    std::system_error when the system has no further thread to give
  DeviceThread(const std::function<void()>& body, std::int64_t stack_bytes) : body_(&body) {
    pthread_attr_t attributes;
    check(pthread_attr_init(&attributes));
    const int refused =
        pthread_attr_setstacksize(&attributes, static_cast<std::size_t>(stack_bytes));
    const int failed = refused != 0 ? refused : pthread_create(&thread_, &attributes, run, this);
    pthread_attr_destroy(&attributes);
    check(failed);
  }
  DeviceThread(const DeviceThread&) = delete;
  DeviceThread& operator=(const DeviceThread&) = delete;
  ~DeviceThread() { pthread_join(thread_, nullptr); }

 private:
  static void* run(void* self) {
    (*static_cast<DeviceThread*>(self)->body_)();
    return nullptr;
  }

  static void check(int status) {
    if (status != 0) {
      throw std::system_error(status, std::generic_category(),
                              "mesh: cannot start a device thread");
    }
  }

  const std::function<void()>* body_;
  pthread_t thread_{};
};

/// Calls body() in an oneTBB arena of `workers` threads, the caller among them, or where none is asked for in
/// the one that oneTBB gives every outside thread.
template <class Body>
void in_arena(const std::optional<int>& workers, const Body& body) {
  if (workers) {
    oneapi::tbb::task_arena arena(*workers);
    arena.execute(body);
  } else {
    body();
  }
}

}  // namespace heddle::detail

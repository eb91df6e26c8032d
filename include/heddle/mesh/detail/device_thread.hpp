#pragma once

#include <pthread.h>

#include <cstdint>
#include <functional>
#include <string>
#include <system_error>
#include <utility>

#include "heddle/core/error.hpp"

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

}  // namespace heddle::detail

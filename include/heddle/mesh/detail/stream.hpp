#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heddle/core/streaming_copy.hpp"

namespace heddle::detail {

/// Copies `count` elements that do not overlap, or lie at the same place.
template <class T>
void copy_elements(const T* from, std::int64_t count, T* to) {
  if (count > 0 && from != to) {
    std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(count) * sizeof(T));
  }
}

/// copy_elements for the parts of one device's result, past the caches where the results of all members
/// together are too large for them: a device that reads its own finds it in memory either way.
class ResultCopy {
 public:
  ResultCopy(std::int64_t members, std::int64_t bytes_each)
      : streams_(members * bytes_each >= streaming_bytes) {}
  ResultCopy(const ResultCopy&) = delete;
  ResultCopy& operator=(const ResultCopy&) = delete;
  ~ResultCopy() {
    if (streams_) {
      fence_stores();
    }
  }

  template <class T>
  void operator()(const T* from, std::int64_t count, T* to) const {
    if (streams_ && from != to) {
      streaming_copy(from, to, static_cast<std::size_t>(count) * sizeof(T));
    } else {
      copy_elements(from, count, to);
    }
  }

 private:
  bool streams_;
};

}  // namespace heddle::detail

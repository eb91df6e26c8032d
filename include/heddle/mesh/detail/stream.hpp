#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace heddle::detail {

/// Copies `count` elements that do not overlap, or lie at the same place.
template <class T>
void copy_elements(const T* from, std::int64_t count, T* to) {
  if (count > 0 && from != to) {
    std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(count) * sizeof(T));
  }
}

}  // namespace heddle::detail

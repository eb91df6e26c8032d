#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>
#include <utility>

namespace heddle::examples {

/// A regular file as read-only memory. Pages come from disk when they are touched, so files larger
/// than the memory can be opened.
///
/// throws    UsageError where the path cannot be opened or is no regular file
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }
  [[nodiscard]] std::string_view text() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace heddle::examples

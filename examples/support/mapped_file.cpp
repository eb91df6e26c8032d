#include "support/mapped_file.hpp"

#include <cerrno>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/usage_error.hpp"

namespace heddle::examples {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& why) {
  throw UsageError(path.string() + ": " + why);
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  // Without O_NONBLOCK a pipe that nobody writes to would hang before it can be refused.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) {
    refuse(path, std::string("cannot be read: ") + std::strerror(errno));
  }
  struct stat status {};
  if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(file);
    refuse(path, "must be a regular file");
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  void* memory = nullptr;
  int problem = 0;
  if (size > 0) {
    memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    problem = memory == MAP_FAILED ? errno : 0;
  }
  ::close(file);
  if (problem != 0) {
    refuse(path, std::string("cannot be mapped: ") + std::strerror(problem));
  }
  bytes_ = {static_cast<const std::byte*>(memory), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) {
    ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
}

}  // namespace heddle::examples

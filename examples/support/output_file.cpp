#include "support/output_file.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

#include "support/usage_error.hpp"

namespace heddle::examples {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_writing(const fs::path& path, int error) {
  throw std::system_error(error, std::generic_category(), path.string() + ": cannot be written");
}

/// "out/" names the same as "out".
fs::path without_trailing_slash(const fs::path& path) {
  return path.has_filename() ? path : path.parent_path();
}

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

void require_folder(const fs::path& path) {
  if (path.empty()) {
    throw UsageError("the output path must not be empty");
  }
  std::error_code ignored;
  const fs::path folder = folder_of(path);
  if (!fs::is_directory(folder, ignored)) {
    throw UsageError(path.string() + ": its folder " + folder.string() + " does not exist");
  }
}

/// A name in `folder` that nothing has: short, so that it fits wherever the target's own does.
fs::path temporary_in(const fs::path& folder) {
  static std::atomic<int> next = 0;
  return folder / (".heddle-" + std::to_string(::getpid()) + "-" + std::to_string(next++) + ".tmp");
}

}  // namespace

void require_output_file(const fs::path& path) {
  require_folder(path);
  std::error_code ignored;
  const fs::file_status link = fs::symlink_status(path, ignored);
  if (fs::exists(link) && !fs::is_regular_file(path, ignored)) {
    throw UsageError(path.string() + ": exists and is no regular file");
  }
}

void require_other_file(const fs::path& output, const fs::path& input, std::string_view what) {
  std::error_code ignored;  // of a file that does not exist, which is another
  if (fs::equivalent(output, input, ignored)) {
    throw UsageError(output.string() + ": is the file of " + std::string(what) +
                     ", which would be lost");
  }
}

void require_output_folder(const fs::path& path) {
  const fs::path folder = without_trailing_slash(path);
  require_folder(folder);
  std::error_code ignored;
  const fs::file_status status = fs::symlink_status(folder, ignored);
  if (fs::is_regular_file(status)) {
    throw UsageError(folder.string() + ": exists and is a file, where a folder would be written");
  }
  if (fs::exists(status)) {
    throw UsageError(folder.string() + ": exists and is no regular file");
  }
}

OutputFile::OutputFile(const OutputPath& path) : shown_(path.shown), target_(path.place) {
  require_output_file(target_);
  if (fs::exists(target_)) {
    target_ = fs::canonical(target_);
  }
  temporary_ = temporary_in(folder_of(target_));
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file_ < 0) {
    fail_writing(shown_, errno);
  }
}

OutputFile::~OutputFile() {
  if (file_ >= 0) {
    ::close(file_);
  }
  if (!temporary_.empty()) {
    ::unlink(temporary_.c_str());
  }
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    // Linux writes at most 2^31 - 4096 bytes in one call.
    const std::size_t piece = std::min(bytes.size(), std::size_t{1} << 30);
    const ssize_t written = ::write(file_, bytes.data(), piece);
    if (written < 0) {
      if (errno == EINTR) {
        continue;
      }
      fail_writing(shown_, errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void OutputFile::write(std::string_view text) {
  write(std::as_bytes(std::span(text)));
}

void OutputFile::commit() {
  if (::fsync(file_) != 0 && errno != EINVAL && errno != ENOTSUP) {
    fail_writing(shown_, errno);
  }
  const int closing = ::close(file_);
  file_ = -1;
  if (closing != 0 || ::rename(temporary_.c_str(), target_.c_str()) != 0) {
    fail_writing(shown_, errno);
  }
  temporary_.clear();
}

OutputFolder::OutputFolder(const fs::path& path) : target_(without_trailing_slash(path)) {
  require_output_folder(target_);
  temporary_ = temporary_in(folder_of(target_));
  std::error_code error;
  if (!fs::create_directory(temporary_, error)) {
    const int problem = error ? error.value() : EEXIST;
    temporary_.clear();
    fail_writing(target_, problem);
  }
}

OutputFolder::~OutputFolder() {
  if (!temporary_.empty()) {
    std::error_code ignored;
    fs::remove_all(temporary_, ignored);
  }
}

void OutputFolder::commit() {
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) {
    fail_writing(target_, errno);
  }
  temporary_.clear();
}

void write_text_file(const OutputPath& path, std::string_view text) {
  OutputFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace heddle::examples

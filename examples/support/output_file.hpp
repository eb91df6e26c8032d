#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace heddle::examples {

/// Refuses a path that an output file cannot take, so that a program can say so before it works for
/// an hour: one that exists and is no regular file, or whose folder does not exist.
///
/// throws    UsageError
void require_output_file(const std::filesystem::path& path);

/// Refuses an output that is the very file (a link to it too) that the program reads as `what`: it
/// would be lost.
///
/// throws    UsageError
void require_other_file(const std::filesystem::path& output, const std::filesystem::path& input,
                        std::string_view what);

/// require_output_file for a folder that is to be written: nothing may be there yet.
void require_output_folder(const std::filesystem::path& path);

/// A file that appears whole or not at all: written beside its place under another name, given its
/// own by commit(), removed if commit() is not reached.
///
/// writes    an existing regular file is replaced at commit(), through a symbolic link its target
/// throws    UsageError as require_output_file; std::system_error for what fails while writing
class OutputFile {
 public:
  explicit OutputFile(const std::filesystem::path& path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  void commit();

 private:
  std::filesystem::path shown_;  // as the user wrote it
  std::filesystem::path target_;
  std::filesystem::path temporary_;  // empty once committed
  int file_ = -1;
};

/// A folder that appears whole or not at all, by the same rule.
class OutputFolder {
 public:
  explicit OutputFolder(const std::filesystem::path& path);
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;
  ~OutputFolder();

  /// Where the files go until commit().
  [[nodiscard]] const std::filesystem::path& staging() const { return temporary_; }
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path temporary_;
};

/// A whole file of text.
void write_text_file(const std::filesystem::path& path, std::string_view text);

}  // namespace heddle::examples

#pragma once

#include <concepts>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>
#include <utility>

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

/// Where a file goes and, for messages, what the user calls it: the same but inside an OutputFolder.
struct OutputPath {
  std::filesystem::path place;
  std::filesystem::path shown;

  // Wherever a path will do, so that most callers need not know of this.
  template <std::convertible_to<std::filesystem::path> Path>
  OutputPath(const Path& path)  // NOLINT(google-explicit-constructor)
      : place(path), shown(place) {}
  OutputPath(std::filesystem::path where, std::filesystem::path shown_as)
      : place(std::move(where)), shown(std::move(shown_as)) {}
};

/// A file that appears whole or not at all: written beside its place under another name, given its
/// own by commit(), removed if commit() is not reached.
///
/// writes    an existing regular file is replaced at commit(), through a symbolic link its target
/// throws    UsageError as require_output_file; std::system_error for what fails while writing
class OutputFile {
 public:
  explicit OutputFile(const OutputPath& path);
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

  /// A file of the folder: where it goes until commit(), under the name it has then.
  [[nodiscard]] OutputPath file(std::string_view name) const {
    return {temporary_ / name, target_ / name};
  }
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path temporary_;
};

/// A whole file of text.
void write_text_file(const OutputPath& path, std::string_view text);

}  // namespace heddle::examples

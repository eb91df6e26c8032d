#include "support/output_file.hpp"

#include <csignal>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include <sys/resource.h>
#include <sys/stat.h>

#include <gtest/gtest.h>

#include "support/scratch_folder.hpp"
#include "support/thrown_text.hpp"
#include "support/usage_error.hpp"

// Mutants that must fail here: writing in place; the temporary file left after a failure; a pipe, a
// folder or a device accepted; the temporary name in a message; a symbolic link replaced by a file; a short write taken for a whole one.

namespace heddle::examples {
namespace {

namespace fs = std::filesystem;
using test::read_file;
using test::ScratchFolder;
using test::thrown_text;

using Names = std::vector<std::string>;

/// While it lives, no file grows beyond a page, as on a disk that is full.
class SmallFiles {
 public:
  SmallFiles() : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before_), 0);
    struct rlimit small = before_;
    small.rlim_cur = 4096;
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  }
  SmallFiles(const SmallFiles&) = delete;
  SmallFiles& operator=(const SmallFiles&) = delete;
  ~SmallFiles() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  struct rlimit before_ {};
  void (*handler_)(int);
};

std::string refusal(const fs::path& path) {
  return thrown_text<UsageError>([&] { OutputFile file(path); });
}

TEST(OutputFile, AppearsAtCommitAndNotBefore) {
  const ScratchFolder scratch;
  OutputFile file(scratch / "a.txt");
  file.write("one ");
  file.write("two");
  EXPECT_FALSE(fs::exists(scratch / "a.txt"));
  file.commit();
  EXPECT_EQ(scratch.names(), Names{"a.txt"});
  EXPECT_EQ(read_file(scratch / "a.txt"), "one two");
}

TEST(OutputFile, LeavesWhatWasThereUntilCommit) {
  const ScratchFolder scratch;
  scratch.write("a.txt", "old");
  {
    OutputFile file(scratch / "a.txt");
    file.write("new");
    EXPECT_EQ(read_file(scratch / "a.txt"), "old");
  }
  EXPECT_EQ(scratch.names(), Names{"a.txt"});
  EXPECT_EQ(read_file(scratch / "a.txt"), "old");
  write_text_file(scratch / "a.txt", "new");
  EXPECT_EQ(read_file(scratch / "a.txt"), "new");
}

TEST(OutputFile, HasThePermissionsOfAnyNewFile) {
  const ScratchFolder scratch;
  write_text_file(scratch / "a.txt", "");
  const mode_t mask = ::umask(0);
  ::umask(mask);
  EXPECT_EQ(static_cast<unsigned>(fs::status(scratch / "a.txt").permissions()), 0666U & ~mask);
}

TEST(OutputFile, WritesThroughALink) {
  const ScratchFolder scratch;
  fs::create_directory(scratch / "real");
  scratch.write("real/a.txt", "old");
  fs::create_symlink("real/a.txt", scratch / "link");
  write_text_file(scratch / "link", "new");
  EXPECT_TRUE(fs::is_symlink(scratch / "link"));
  EXPECT_EQ(read_file(scratch / "real/a.txt"), "new");
}

TEST(OutputFile, RefusesWhatIsNoRegularFile) {
  const ScratchFolder scratch;
  EXPECT_EQ(refusal(scratch.path()), scratch.path().string() + ": exists and is no regular file");
  EXPECT_EQ(refusal("/dev/null"), "/dev/null: exists and is no regular file");
  const std::string pipe = (scratch / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(refusal(pipe), pipe + ": exists and is no regular file");
  fs::create_symlink("nowhere", scratch / "dangling");
  EXPECT_EQ(refusal(scratch / "dangling"),
            (scratch / "dangling").string() + ": exists and is no regular file");
  fs::create_symlink("/dev/null", scratch / "device");
  EXPECT_EQ(refusal(scratch / "device"),
            (scratch / "device").string() + ": exists and is no regular file");
  EXPECT_EQ(refusal(scratch / "none/a.txt"), (scratch / "none/a.txt").string() + ": its folder " +
                                                 (scratch / "none").string() + " does not exist");
  EXPECT_EQ(refusal(""), "the output path must not be empty");
}

TEST(OutputFile, RefusesTheFileThatIsRead) {
  const ScratchFolder scratch;
  scratch.write("in.txt", "precious");
  fs::create_symlink("in.txt", scratch / "link");
  fs::create_hard_link(scratch / "in.txt", scratch / "hard");
  for (const char* name : {"in.txt", "link", "hard"}) {
    EXPECT_EQ(thrown_text<UsageError>(
                  [&] { require_other_file(scratch / name, scratch / "in.txt", "rollouts"); }),
              (scratch / name).string() + ": is the file of rollouts, which would be lost");
  }
  scratch.write("other.txt", "precious");
  EXPECT_NO_THROW(require_other_file(scratch / "other.txt", scratch / "in.txt", "rollouts"));
  EXPECT_NO_THROW(require_other_file(scratch / "new.txt", scratch / "in.txt", "rollouts"));
}

TEST(OutputFile, LeavesNothingWhereTheSpaceRunsOut) {
  const ScratchFolder scratch;
  const SmallFiles limit;
  const std::string text = thrown_text<std::system_error>(
      [&] { write_text_file(scratch / "a.txt", std::string(10'000, 'x')); });
  EXPECT_EQ(text, (scratch / "a.txt").string() + ": cannot be written: File too large");
  EXPECT_TRUE(scratch.names().empty());
}

TEST(OutputFolder, WhatFailsInItIsToldUnderTheNameThatTheUserGave) {
  const ScratchFolder scratch;
  const SmallFiles limit;
  const std::string text = thrown_text<std::system_error>([&] {
    const OutputFolder folder(scratch / "out/");
    write_text_file(folder.file("a.txt"), std::string(10'000, 'x'));
  });
  EXPECT_EQ(text, (scratch / "out/a.txt").string() + ": cannot be written: File too large");
  EXPECT_TRUE(scratch.names().empty());
}

TEST(OutputFolder, AppearsAtCommitAndNotBefore) {
  const ScratchFolder scratch;
  {
    OutputFolder folder(scratch / "out/");
    write_text_file(folder.file("a"), "1");
    EXPECT_FALSE(fs::exists(scratch / "out"));
    folder.commit();
  }
  EXPECT_EQ(scratch.names(), Names{"out"});
  EXPECT_EQ(read_file(scratch / "out/a"), "1");
  {
    OutputFolder folder(scratch / "other");
    write_text_file(folder.file("a"), "1");
  }
  EXPECT_EQ(scratch.names(), Names{"out"});
}

TEST(OutputFolder, RefusesWhateverIsThere) {
  const ScratchFolder scratch;
  fs::create_directory(scratch / "out");
  const auto folder_refusal = [](const fs::path& path) {
    return thrown_text<UsageError>([&] { OutputFolder folder(path); });
  };
  EXPECT_EQ(folder_refusal(scratch / "out/"),
            (scratch / "out").string() + ": exists and is no regular file");
  scratch.write("file", "");
  EXPECT_EQ(
      folder_refusal(scratch / "file"),
      (scratch / "file").string() + ": exists and is a file, where a folder would be written");
  EXPECT_EQ(folder_refusal(scratch / "none/out"),
            (scratch / "none/out").string() + ": its folder " + (scratch / "none").string() +
                " does not exist");
}

}  // namespace
}  // namespace heddle::examples

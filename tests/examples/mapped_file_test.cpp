#include "support/mapped_file.hpp"

#include <filesystem>
#include <string>
#include <utility>

#include <sys/stat.h>

#include <gtest/gtest.h>

#include "support/scratch_folder.hpp"
#include "support/thrown_text.hpp"
#include "support/usage_error.hpp"

// Mutants that must fail here: an empty file mapped, which is an error; a pipe that is waited for; a
// folder or a device accepted; bytes given back twice after a move; writing to the file's own pages.

namespace heddle::examples {
namespace {

namespace fs = std::filesystem;
using test::ScratchFolder;

std::string refusal(const fs::path& path) {
  return test::thrown_text<UsageError>([&] { const MappedFile file(path); });
}

TEST(MappedFile, HoldsTheBytesAsTheyAre) {
  const ScratchFolder scratch;
  const std::string content("one\0two\n\xFF", 9);
  const MappedFile file(scratch.write("a", content));
  EXPECT_EQ(file.text(), content);
  ASSERT_EQ(file.bytes().size(), 9U);
  EXPECT_EQ(file.bytes()[8], std::byte{0xFF});
}

TEST(MappedFile, AnEmptyFileHasNoBytes) {
  const ScratchFolder scratch;
  const MappedFile file(scratch.write("a", ""));
  EXPECT_TRUE(file.bytes().empty());
  EXPECT_EQ(file.text(), "");
}

TEST(MappedFile, LivesOnWhenItsNameIsGone) {
  const ScratchFolder scratch;
  const MappedFile file(scratch.write("a", std::string(100'000, 'x')));
  fs::remove(scratch / "a");
  EXPECT_EQ(file.text(), std::string(100'000, 'x'));
}

TEST(MappedFile, MovesTakeTheBytesAlong) {
  const ScratchFolder scratch;
  MappedFile first(scratch.write("a", "first"));
  const auto* const place = first.bytes().data();
  MappedFile second(std::move(first));
  EXPECT_EQ(second.text(), "first");
  EXPECT_EQ(second.bytes().data(), place);
  MappedFile third(scratch.write("b", "third"));
  third = std::move(second);
  EXPECT_EQ(third.text(), "first");
  EXPECT_EQ(third.bytes().data(), place);
}

TEST(MappedFile, FollowsALinkToARegularFile) {
  const ScratchFolder scratch;
  scratch.write("a", "text");
  fs::create_symlink("a", scratch / "link");
  EXPECT_EQ(MappedFile(scratch / "link").text(), "text");
}

TEST(MappedFile, RefusesWhatIsNoRegularFile) {
  const ScratchFolder scratch;
  EXPECT_EQ(refusal(scratch.path()), scratch.path().string() + ": must be a regular file");
  EXPECT_EQ(refusal("/dev/null"), "/dev/null: must be a regular file");
  const std::string pipe = (scratch / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(refusal(pipe), pipe + ": must be a regular file") << "and nobody waits for a writer";
  EXPECT_EQ(refusal(scratch / "none"),
            (scratch / "none").string() + ": cannot be read: No such file or directory");
  fs::create_symlink("nowhere", scratch / "dangling");
  EXPECT_EQ(refusal(scratch / "dangling"),
            (scratch / "dangling").string() + ": cannot be read: No such file or directory");
}

}  // namespace
}  // namespace heddle::examples

// Mutants tried: a ScopedPath that does not restore; one that restores the best path instead of the
// one before; a path that the machine lacks accepted.
#include "heddle/core/isa.hpp"

#include <algorithm>
#include <string>

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(Paths, StartAtTheScalarOneAndAscend) {
  const auto paths = available_paths();
  ASSERT_FALSE(paths.empty());
  EXPECT_EQ(paths.front(), Path::portable);
  EXPECT_TRUE(std::is_sorted(paths.begin(), paths.end()));
  EXPECT_EQ(current_path(), paths.back());
}

TEST(Paths, AScopeForcesOneAndGivesTheOuterOneBack) {
  const Path best = current_path();
  for (const Path path : available_paths()) {
    const ScopedPath outer(path);
    EXPECT_EQ(current_path(), path);
    {
      const ScopedPath inner(Path::portable);
      EXPECT_EQ(current_path(), Path::portable);
    }
    EXPECT_EQ(current_path(), path);
  }
  EXPECT_EQ(current_path(), best);
}

TEST(Paths, HaveNames) {
  EXPECT_EQ(path_name(Path::portable), "scalar");
  EXPECT_EQ(path_name(Path::neon), "neon");
  EXPECT_EQ(path_name(Path::avx2), "avx2");
  EXPECT_EQ(path_name(Path::avx512), "avx512");
  EXPECT_EQ(path_name(Path::avx512_bf16), "avx512_bf16");
}

TEST(PathErrors, APathOfAnotherMachineIsRefused) {
  const auto paths = available_paths();
  const bool is_arm = std::find(paths.begin(), paths.end(), Path::neon) != paths.end();
  std::string names;
  for (const Path path : paths) {
    names += (names.empty() ? "" : ", ") + std::string(path_name(path));
  }
  try {
    const ScopedPath scope(is_arm ? Path::avx2 : Path::neon);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), std::string("ScopedPath: path = ") + (is_arm ? "avx2" : "neon") +
                                ": must be one of " + names);
  }
  EXPECT_EQ(current_path(), paths.back());
}

}  // namespace
}  // namespace heddle

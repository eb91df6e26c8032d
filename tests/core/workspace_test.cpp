// Mutants tried: pieces not rounded up to a line; a frame that forgets later blocks; high water that
// follows in-use down.
#include "heddle/core/workspace.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(Workspace, PiecesAreAlignedAndDisjoint) {
  Workspace workspace;
  Workspace::Frame frame(workspace);
  std::vector<std::span<char>> pieces;
  for (std::int64_t size = 0; size < 200; size += 7) {
    pieces.push_back(workspace.take<char>(size));
    for (char& value : pieces.back()) {
      value = static_cast<char>(pieces.size());
    }
  }
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pieces[i].data()) % Workspace::alignment, 0U);
    for (const char value : pieces[i]) {
      EXPECT_EQ(value, static_cast<char>(i + 1));
    }
  }
}

TEST(Workspace, AFrameGivesBackWhatWasTakenInIt) {
  Workspace workspace(4096);
  Workspace::Frame outer(workspace);
  const float* kept = workspace.take<float>(16).data();
  const float* first = nullptr;
  {
    Workspace::Frame inner(workspace);
    first = workspace.take<float>(16).data();
    static_cast<void>(workspace.take<float>(1 << 20));  // spills into a second block
  }
  EXPECT_NE(kept, first);
  EXPECT_EQ(workspace.take<float>(16).data(), first);
}

TEST(Workspace, ASpillingLoopAllocatesOnce) {
  Workspace workspace(64);
  Workspace::Frame outer(workspace);
  static_cast<void>(workspace.take<float>(16));
  const double* first = nullptr;
  for (int i = 0; i < 3; ++i) {
    Workspace::Frame inner(workspace);
    const double* piece = workspace.take<double>(1000).data();
    first = i == 0 ? piece : first;
    EXPECT_EQ(piece, first);
  }
}

TEST(Workspace, HighWaterIsTheMostInUseAtOnce) {
  Workspace workspace;
  {
    Workspace::Frame frame(workspace);
    static_cast<void>(workspace.take<float>(16));
    static_cast<void>(workspace.take<double>(9));
  }
  {
    Workspace::Frame frame(workspace);
    static_cast<void>(workspace.take<float>(1));
  }
  EXPECT_EQ(workspace.high_water_bytes(), 64U + 128U);
  EXPECT_EQ(workspace.high_water_bytes(),
            Workspace::bytes_for<float>(16) + Workspace::bytes_for<double>(9));
}

TEST(Workspace, LargeBlocksServeWhereHugePagesAreAskedFor) {
  Workspace workspace;
  Workspace::Frame frame(workspace);
  const std::span<char> piece = workspace.take<char>(std::int64_t{5} << 20);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(piece.data()) % (std::uintptr_t{2} << 20), 0U);
  piece.front() = 1;
  piece.back() = 2;
  EXPECT_EQ(piece.front() + piece.back(), 3);
}

TEST(Workspace, RefusesANegativeCount) {
  Workspace workspace;
  EXPECT_THROW(static_cast<void>(workspace.take<float>(-1)), Error);
}

}  // namespace
}  // namespace heddle

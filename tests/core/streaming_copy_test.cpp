// Mutants tried: the head before the first whole line is left out; the tail is; a part of a line is stored
// twice; the line's parts swapped.
#include "heddle/core/streaming_copy.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"

namespace heddle {
namespace {

TEST(StreamingCopy, OfAnyLengthAndAlignmentWritesItsBytesAlone) {
  test::Random random(3);
  std::vector<unsigned char> source(512);
  for (unsigned char& byte : source) {
    byte = static_cast<unsigned char>(random.integer(0, 255));
  }
  for (std::size_t from = 0; from < 3; ++from) {
    for (std::size_t to = 0; to < 70; ++to) {
      for (const std::size_t bytes : {0U, 1U, 2U, 63U, 64U, 65U, 127U, 128U, 130U, 300U}) {
        alignas(64) unsigned char destination[512];
        std::fill(std::begin(destination), std::end(destination), static_cast<unsigned char>(0xA5));
        streaming_copy(source.data() + from, destination + to, bytes);
        fence_stores();
        for (std::size_t i = 0; i < sizeof destination; ++i) {
          const bool inside = i >= to && i < to + bytes;
          ASSERT_EQ(destination[i], inside ? source[from + i - to] : 0xA5)
              << from << " " << to << " " << bytes << " " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace heddle

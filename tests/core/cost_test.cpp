#include "heddle/core/cost.hpp"

#include <gtest/gtest.h>

namespace heddle {
namespace {

TEST(Cost, AddsEachKind) {
  const Cost product{.flops = 2, .bytes_read = 8, .bytes_written = 4};
  const Cost exps{.flops = 1, .transcendentals = 5, .bytes_read = 16};
  EXPECT_EQ(product + exps, (Cost{3, 5, 24, 4}));
  EXPECT_EQ(product + Cost{}, product);
}

}  // namespace
}  // namespace heddle

// Mutants tried: the callee's line in place of the caller's; folders kept in the text.
#include "heddle/mesh/call_site.hpp"

#include <gtest/gtest.h>

namespace heddle {
namespace {

CallSite callee(CallSite site = CallSite::here()) {
  return site;
}

TEST(CallSite, IsTheCallersThroughADefaultedParameter) {
  const std::int64_t line = __LINE__ + 1;
  const CallSite site = callee();
  EXPECT_EQ(site.line, line);
  EXPECT_EQ(to_string(site), "call_site_test.cpp:" + std::to_string(line));
}

TEST(CallSite, LeavesFoldersOut) {
  EXPECT_EQ(to_string(CallSite{"/far/away/ring.hpp", 61}), "ring.hpp:61");
  EXPECT_EQ(to_string(CallSite{"ring.hpp", 7}), "ring.hpp:7");
  EXPECT_EQ(to_string(CallSite{}), ":0");
}

}  // namespace
}  // namespace heddle

#pragma once

#include <string>

namespace heddle::test {

/// The text of the E that `action` throws; "nothing was thrown" where it does not. Any other
/// exception passes through and fails the test.
template <class E, class Action>
[[nodiscard]] std::string thrown_text(const Action& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace heddle::test

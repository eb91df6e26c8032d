#pragma once

#include <stdexcept>
#include <string>

namespace heddle::examples {

/// What the user gave is wrong: an option, a file, a line of a file. A program ends with status 2 and
/// this text, one line, on standard error. Anything that fails while running is any other exception.
class UsageError : public std::runtime_error {
 public:
  explicit UsageError(const std::string& line) : std::runtime_error(line) {}
};

}  // namespace heddle::examples

#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include <sys/wait.h>

#include "support/scratch_folder.hpp"

namespace heddle::test {

/// How a program ended and what it printed.
struct CommandResult {
  int status = -1;  ///< of exit; 128 + n when signal n ended it
  std::string out;
  std::string err;
};

[[nodiscard]] inline std::string shell_quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char letter : text) {
    quoted += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  }
  return quoted + "'";
}

/// Runs a program as a user's shell does: `command` is its path and its arguments.
[[nodiscard]] inline CommandResult run_command(const std::vector<std::string>& command) {
  const ScratchFolder scratch;
  std::string line;
  for (const std::string& word : command) {
    line += shell_quoted(word) + " ";
  }
  line += "</dev/null >" + shell_quoted((scratch / "out").string()) + " 2>" +
          shell_quoted((scratch / "err").string());
  const int ended = std::system(line.c_str());
  CommandResult result;
  result.status = WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended);
  result.out = read_file(scratch / "out");
  result.err = read_file(scratch / "err");
  return result;
}

}  // namespace heddle::test

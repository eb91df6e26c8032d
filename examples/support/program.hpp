#pragma once

#include <functional>
#include <iosfwd>
#include <string>

#include <CLI/CLI.hpp>

#include "support/json_text.hpp"
#include "support/usage_error.hpp"

namespace heddle::examples {

/// How a program ends.
inline constexpr int exit_done = 0;
inline constexpr int exit_failed = 1;  ///< what fails while running, or a check that did not pass
inline constexpr int exit_usage = 2;   ///< wrong usage or input

/// Where a program's results go: lines for a reader, or with --json one object a line.
class Results {
 public:
  explicit Results(std::ostream& out) : out_(out) {}

  /// Adds --json to `app`.
  void add_option(CLI::App& app);

  [[nodiscard]] bool json() const { return json_; }
  [[nodiscard]] std::ostream& out() const { return out_; }
  /// One object, one line.
  void print(const Json& object) const;

 private:
  std::ostream& out_;
  bool json_ = false;
};

struct ProgramInfo {
  std::string name;         ///< "heddle-pack"
  std::string description;  ///< what --help opens with
};

/// What a program does once its options are known; returns its exit status.
using Action = std::function<int()>;

/// The main() of every program. `set_up` adds options to the app, which has --help, --version and
/// --json already, and returns the action; the action runs after the options were parsed.
///
/// writes    results, help and version to standard output; one line "<name>: ..." to standard error
///           for whatever goes wrong
/// throws    nothing: UsageError and heddle::Error end the program with 2, any other exception and a
///           standard output that cannot be written with 1
int run_program(const ProgramInfo& program, int argc, const char* const* argv,
                const std::function<Action(CLI::App& app, Results& results)>& set_up);

/// The same on streams of the caller's.
int run_program(const ProgramInfo& program, int argc, const char* const* argv, std::ostream& out,
                std::ostream& errors,
                const std::function<Action(CLI::App& app, Results& results)>& set_up);

}  // namespace heddle::examples

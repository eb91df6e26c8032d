#include "support/program.hpp"

#include <algorithm>
#include <csignal>
#include <exception>
#include <iostream>
#include <new>
#include <string_view>

#include "heddle/core/error.hpp"

namespace heddle::examples {
namespace {

/// CLI11 and system errors may hold line ends; a script reads one line.
std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

}  // namespace

void Results::add_option(CLI::App& app) {
  app.add_flag("--json", json_, "Print JSON on standard output, one object a line");
}

void Results::print(const Json& object) const {
  out_ << json_line(object) << '\n';
}

int run_program(const ProgramInfo& program, int argc, const char* const* argv, std::ostream& out,
                std::ostream& errors,
                const std::function<Action(CLI::App& app, Results& results)>& set_up) {
  const auto complain = [&](std::string_view what) {
    errors << program.name << ": " << one_line(std::string(what)) << '\n';
  };
  try {
    CLI::App app(program.description, program.name);
    Results results(out);
    app.set_version_flag("--version", program.name + " " + HEDDLE_VERSION);
    results.add_option(app);
    const Action action = set_up(app, results);
    int status = exit_done;
    try {
      app.parse(argc, argv);
      status = action();
    } catch (const CLI::CallForHelp&) {
      out << app.help();
    } catch (const CLI::CallForAllHelp&) {
      out << app.help("", CLI::AppFormatMode::All);
    } catch (const CLI::CallForVersion&) {
      out << app.version() << '\n';
    } catch (const CLI::ParseError& error) {
      complain(error.what());
      return exit_usage;
    }
    if (!out.flush()) {
      complain("standard output cannot be written");
      return exit_failed;
    }
    return status;
  } catch (const UsageError& error) {
    complain(error.what());
    return exit_usage;
  } catch (const Error& error) {
    complain(error.what());
    return exit_usage;
  } catch (const std::bad_alloc&) {
    complain("out of memory");
    return exit_failed;
  } catch (const std::exception& error) {
    complain(error.what());
    return exit_failed;
  }
}

int run_program(const ProgramInfo& program, int argc, const char* const* argv,
                const std::function<Action(CLI::App& app, Results& results)>& set_up) {
  // A file that outgrows its limit is then an error of write() like a full disk, not a killed program
  // that leaves half a file behind.
  std::signal(SIGXFSZ, SIG_IGN);
  return run_program(program, argc, argv, std::cout, std::cerr, set_up);
}

}  // namespace heddle::examples

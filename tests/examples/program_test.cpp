#include "support/program.hpp"

#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"

// Mutants that must fail here: a usage error of CLI11 on two lines or with its own status; a failure
// reported as 2, wrong input as 1; help on standard error.

namespace heddle::examples {
namespace {

struct Ended {
  int status;
  std::string out;
  std::string err;
};

Ended run(std::vector<const char*> arguments, const Action& action) {
  arguments.insert(arguments.begin(), "heddle-x");
  std::ostringstream out;
  std::ostringstream err;
  const int status =
      run_program({"heddle-x", "Does x."}, static_cast<int>(arguments.size()), arguments.data(),
                  out, err, [&](CLI::App& app, Results& results) -> Action {
                    app.add_option("--count", "How many")->check(CLI::PositiveNumber);
                    return [&action, &results] {
                      const int ended = action();
                      if (results.json()) {
                        results.print({{"b", 1}, {"a", "\xff"}});
                      }
                      return ended;
                    };
                  });
  return {status, out.str(), err.str()};
}

Ended run(const std::vector<const char*>& arguments) {
  return run(arguments, [] { return exit_done; });
}

TEST(Program, HelpAndVersionGoToStandardOutput) {
  const Ended help = run({"--help"});
  EXPECT_EQ(help.status, 0);
  EXPECT_NE(help.out.find("Does x."), std::string::npos);
  EXPECT_NE(help.out.find("--json"), std::string::npos);
  EXPECT_EQ(help.err, "");
  const Ended version = run({"--version"});
  EXPECT_EQ(version.status, 0);
  EXPECT_EQ(version.out, "heddle-x " HEDDLE_VERSION "\n");
}

TEST(Program, WrongUsageIsOneLineAndTwo) {
  for (const std::vector<const char*>& arguments :
       {std::vector<const char*>{"--no-such-option"}, std::vector<const char*>{"surplus"},
        std::vector<const char*>{"--count"}, std::vector<const char*>{"--count", "-3"}}) {
    const Ended wrong = run(arguments);
    EXPECT_EQ(wrong.status, 2);
    EXPECT_EQ(wrong.out, "");
    EXPECT_EQ(wrong.err.substr(0, 10), "heddle-x: ");
    EXPECT_EQ(wrong.err.find('\n'), wrong.err.size() - 1) << wrong.err;
  }
}

TEST(Program, ErrorsEndItByTheirKind) {
  const auto ending = [](const auto& error) { return run({}, [&]() -> int { throw error; }); };
  const Ended usage = ending(UsageError("f:3: x\ny"));
  EXPECT_EQ(usage.status, 2);
  EXPECT_EQ(usage.err, "heddle-x: f:3: x y\n");
  const Ended refused = ending(Error("gdn::forward", "chunk", "0", "must be >= 1"));
  EXPECT_EQ(refused.status, 2);
  EXPECT_EQ(refused.err, "heddle-x: gdn::forward: chunk = 0: must be >= 1\n");
  const Ended failed = ending(std::runtime_error("the disk is full"));
  EXPECT_EQ(failed.status, 1);
  EXPECT_EQ(failed.err, "heddle-x: the disk is full\n");
  const Ended memory = ending(std::bad_alloc());
  EXPECT_EQ(memory.status, 1);
  EXPECT_EQ(memory.err, "heddle-x: out of memory\n");
  EXPECT_EQ(run({}, [] { return exit_failed; }).status, 1);
}

TEST(Program, JsonIsOneObjectALine) {
  const Ended json = run({"--json"});
  EXPECT_EQ(json.status, 0);
  EXPECT_EQ(json.out, "{\"b\":1,\"a\":\"\xEF\xBF\xBD\"}\n") << "in order; no UTF-8 is replaced";
  EXPECT_EQ(run({}).out, "");
}

TEST(Program, AnOutputThatCannotBeWrittenIsAFailure) {
  std::ostringstream out;
  std::ostringstream err;
  const char* const arguments[] = {"heddle-x"};
  const int status =
      run_program({"heddle-x", ""}, 1, arguments, out, err, [&](CLI::App&, Results&) -> Action {
        return [&out] {
          out.setstate(std::ios::badbit);
          return exit_done;
        };
      });
  EXPECT_EQ(status, 1);
  EXPECT_EQ(err.str(), "heddle-x: standard output cannot be written\n");
}

}  // namespace
}  // namespace heddle::examples

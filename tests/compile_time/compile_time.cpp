// What it costs to include a header: the compiler's processor time over that of a unit which includes
// <Eigen/Core> alone, in the same run, so that a slow or busy machine cancels out.
//
//   compile_time [--each] [--limit=3] [--only=core/error.hpp] INCLUDE_DIR SCRATCH COMPILER FLAG...
//
// Without --each, headers are compiled many to a unit: where the unit is below the limit each of them
// is, and where it is not it is halved. A header that alone seems to be above is measured again, in turns
// with the other unit, and judged by the median. With --each every header is measured and printed.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;
using Headers = std::span<const std::string>;

struct Arguments {
  bool each = false;
  double limit = 3;
  std::string only;
  fs::path include;
  fs::path scratch;
  std::vector<std::string> command;
};

Arguments parsed(int count, char** values) {
  Arguments arguments;
  std::vector<std::string> rest;
  for (int i = 1; i < count; ++i) {
    const std::string_view value = values[i];
    if (rest.empty() && value == "--each") {
      arguments.each = true;
    } else if (rest.empty() && value.starts_with("--limit=")) {
      arguments.limit = std::stod(std::string(value.substr(8)));
    } else if (rest.empty() && value.starts_with("--only=")) {
      arguments.only = value.substr(7);
    } else {
      rest.emplace_back(value);
    }
  }
  if (rest.size() < 3) {
    throw std::runtime_error("INCLUDE_DIR SCRATCH COMPILER FLAG...: missing");
  }
  arguments.include = rest[0];
  arguments.scratch = rest[1];
  arguments.command.assign(rest.begin() + 2, rest.end());
  return arguments;
}

/// The headers that a user includes, without those that need MPI.
std::vector<std::string> public_headers(const fs::path& include) {
  std::vector<std::string> headers;
  for (const auto& entry : fs::recursive_directory_iterator(include / "heddle")) {
    const std::string name = fs::relative(entry.path(), include / "heddle").string();
    const bool is_public = entry.path().extension() == ".hpp" && name != "heddle.hpp" &&
                           name.find("detail/") == std::string::npos &&
                           !entry.path().filename().string().starts_with("mpi_");
    if (is_public) {
      headers.push_back(name);
    }
  }
  std::sort(headers.begin(), headers.end());
  return headers;
}

class Compiler {
 public:
  Compiler(std::vector<std::string> command, fs::path scratch)
      : command_(std::move(command)), unit_(scratch / "unit.cpp") {
    fs::create_directories(scratch);
    command_.push_back("-fsyntax-only");
    command_.push_back(unit_.string());
  }

  double seconds_for_eigen() { return seconds("#include <Eigen/Core>\n"); }

  double seconds_for(Headers headers) {
    std::string text;
    for (const std::string& header : headers) {
      text += "#include \"heddle/" + header + "\"\n";
    }
    return seconds(text);
  }

 private:
  double seconds(const std::string& text) {
    std::ofstream(unit_) << text;
    std::vector<char*> arguments;
    for (std::string& argument : command_) {
      arguments.push_back(argument.data());
    }
    arguments.push_back(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      execvp(arguments[0], arguments.data());
      std::perror(arguments[0]);
      std::_Exit(127);
    }
    int status = 0;
    rusage usage{};  // of the driver and of the compiler proper that it started
    if (child < 0 || wait4(child, &status, 0, &usage) != child || status != 0) {
      throw std::runtime_error("does not compile:\n" + text);
    }
    const auto in_seconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    };
    return in_seconds(usage.ru_utime) + in_seconds(usage.ru_stime);
  }

  std::vector<std::string> command_;
  fs::path unit_;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The median ratio of `turns` pairs of units compiled one after the other.
double paired_ratio(Compiler& compiler, const std::string& header, int turns) {
  std::vector<double> ratios;
  for (int turn = 0; turn < turns; ++turn) {
    const double eigen = compiler.seconds_for_eigen();
    ratios.push_back(compiler.seconds_for({&header, 1}) / eigen);
  }
  return median(ratios);
}

void print_each(Compiler& compiler, Headers headers) {
  std::vector<std::pair<double, std::string>> rows;
  for (const std::string& header : headers) {
    rows.emplace_back(paired_ratio(compiler, header, 3), header);
  }
  std::sort(rows.rbegin(), rows.rend());
  std::puts("Eigen/Core = 1");
  for (const auto& [ratio, header] : rows) {
    std::printf("%6.2f  %s\n", ratio, header.c_str());
  }
}

/// Appends the headers that are above the limit.
void find_slow(Compiler& compiler, Headers headers, double eigen, double limit,
               std::vector<std::string>& slow) {
  const double ratio = compiler.seconds_for(headers) / eigen;
  if (ratio <= limit) {
    std::printf("%6.2f  %zu headers from %s to %s\n", ratio, headers.size(),
                headers.front().c_str(), headers.back().c_str());
  } else if (headers.size() > 1) {
    const std::size_t half = headers.size() / 2;
    find_slow(compiler, headers.first(half), eigen, limit, slow);
    find_slow(compiler, headers.subspan(half), eigen, limit, slow);
  } else if (const double again = paired_ratio(compiler, headers.front(), 5); again > limit) {
    std::printf("%6.2f  %s, above %.2f\n", again, headers.front().c_str(), limit);
    slow.push_back(headers.front());
  } else {
    std::printf("%6.2f  %s\n", again, headers.front().c_str());
  }
}

int run(const Arguments& arguments) {
  std::vector<std::string> headers = public_headers(arguments.include);
  if (!arguments.only.empty()) {
    std::erase_if(headers, [&](const std::string& header) { return header != arguments.only; });
  }
  if (headers.empty()) {
    throw std::runtime_error("no headers under " + arguments.include.string());
  }
  Compiler compiler(arguments.command, arguments.scratch);
  if (arguments.each) {
    print_each(compiler, headers);
    return 0;
  }
  std::vector<double> eigen;
  for (int turn = 0; turn < 3; ++turn) {
    eigen.push_back(compiler.seconds_for_eigen());
  }
  std::vector<std::string> slow;
  find_slow(compiler, headers, median(eigen), arguments.limit, slow);
  return slow.empty() ? 0 : 1;
}

}  // namespace

int main(int count, char** values) {
  try {
    return run(parsed(count, values));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "compile_time: %s\n", error.what());
    return 2;
  }
}

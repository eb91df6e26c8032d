#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace heddle {

/// Where a collective was called, for the reports of mismatches and deadlocks. Taken as the last,
/// defaulted parameter of every collective: `CallSite site = CallSite::here()`.
///
/// source    what std::source_location does, which not every C++20 compiler has yet
struct CallSite {
  const char* file = "";
  std::int64_t line = 0;

  [[nodiscard]] static constexpr CallSite here(const char* file = __builtin_FILE(),
                                               std::int64_t line = __builtin_LINE()) {
    return {file, line};
  }
};

/// "ring.hpp:61": a report is read on another machine than the one that compiled, so no folders.
[[nodiscard]] inline std::string to_string(const CallSite& site) {
  const std::string_view file(site.file);
  return std::string(file.substr(file.find_last_of("/\\") + 1)) + ":" + std::to_string(site.line);
}

}  // namespace heddle

#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

namespace heddle::examples {

/// Whether standard error is a terminal, so that what is drawn over may go there.
[[nodiscard]] bool stderr_is_terminal();

/// A bar on one line that is drawn over as work proceeds and is gone when the work is done.
///
///   packing [==========>         ]  50%  512/1024
///
/// writes    to `out` alone, and only where `visible`
class Progress {
 public:
  Progress(std::string label, std::int64_t total, std::ostream& out, bool visible);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  /// `note` stands behind the bar.
  void update(std::int64_t done, const std::string& note = {});

 private:
  std::string label_;
  std::int64_t total_;
  std::ostream& out_;
  bool visible_;
  std::string drawn_;
};

}  // namespace heddle::examples

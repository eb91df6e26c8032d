#include "support/progress.hpp"

#include <algorithm>
#include <ostream>
#include <utility>

#include <unistd.h>

namespace heddle::examples {

bool stderr_is_terminal() {
  return ::isatty(STDERR_FILENO) == 1;
}

Progress::Progress(std::string label, std::int64_t total, std::ostream& out, bool visible)
    : label_(std::move(label)), total_(total), out_(out), visible_(visible) {}

Progress::~Progress() {
  if (!drawn_.empty()) {
    out_ << "\r\x1b[K" << std::flush;
  }
}

void Progress::update(std::int64_t done, const std::string& note) {
  if (!visible_) {
    return;
  }
  constexpr std::int64_t width = 20;
  const std::int64_t shown = std::clamp<std::int64_t>(done, 0, std::max<std::int64_t>(total_, 0));
  const double share = total_ > 0 ? static_cast<double>(shown) / static_cast<double>(total_) : 1.0;
  const auto filled = static_cast<std::size_t>(share * width);
  std::string bar(filled, '=');
  if (filled < width) {
    bar += '>';
    bar.resize(width, ' ');
  }
  const std::string percent = std::to_string(static_cast<int>(share * 100));
  std::string line = label_ + " [" + bar + "] " + std::string(3 - percent.size(), ' ') + percent +
                     "%  " + std::to_string(shown) + "/" + std::to_string(total_) +
                     (note.empty() ? "" : "  " + note);
  if (line != drawn_) {
    drawn_ = std::move(line);
    out_ << '\r' << drawn_ << "\x1b[K" << std::flush;
  }
}

}  // namespace heddle::examples

#include "heddle-train/step_printer.hpp"

#include <array>
#include <cstdio>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "support/json_text.hpp"

namespace heddle::train {
namespace {

struct Column {
  std::string_view title;
  std::size_t width;
};

// Wide enough for what training brings: rows appear one by one, so no later row can widen them.
constexpr std::array columns = {
    Column{"step", 4},
    Column{"loss", 10},
    Column{"logp rewarded", 13},
    Column{"unrewarded", 10},
    Column{"gap", 9},
    Column{"entropy", 7},
    Column{"grad norm", 9},
    Column{"tokens", 7},
    Column{"tokens/s", 8},
    Column{"padding", 7},
    Column{"busiest tiles", 13},
};

void print_cells(std::ostream& out, const std::array<std::string, columns.size()>& cells) {
  for (std::size_t i = 0; i < columns.size(); ++i) {
    const std::size_t width = columns[i].width;
    out << (i == 0 ? "" : "  ")
        << std::string(cells[i].size() < width ? width - cells[i].size() : 0, ' ') << cells[i];
  }
  out << '\n';
}

std::string text(const char* format, double value) {
  char buffer[64];
  const int length = std::snprintf(buffer, sizeof buffer, format, value);
  return {buffer, static_cast<std::size_t>(length)};
}

std::string text(const char* format, const std::optional<double>& value) {
  return value ? text(format, *value) : "-";
}

examples::Json json(const std::optional<double>& value) {
  return value ? examples::Json(*value) : examples::Json();
}

// Of a step, not of an update: a token that U updates pass over counts once, in the time of all U.
double per_second(const StepReport& report) {
  return report.seconds > 0 ? static_cast<double>(report.tokens) / report.seconds : 0;
}

}  // namespace

void StepPrinter::print(std::int64_t step, const StepReport& report) {
  if (results_.json()) {
    print_object(step, report);
  } else {
    print_row(step, report);
  }
  // A step takes seconds: whoever reads through a pipe wants it now, and nobody to read it is a reason
  // not to begin the next.
  if (!results_.out().flush()) {
    throw std::runtime_error("standard output cannot be written");
  }
}

void StepPrinter::print_object(std::int64_t step, const StepReport& report) const {
  examples::Json object;
  object["step"] = step;
  object["loss"] = report.loss;
  object["logp_rewarded"] = json(report.logp_rewarded);
  object["logp_unrewarded"] = json(report.logp_unrewarded);
  object["logp_gap"] = json(report.logp_gap());
  object["entropy"] = json(report.entropy);
  object["grad_norm"] = report.grad_norm;
  object["tokens"] = report.tokens;
  object["tokens_per_second"] = per_second(report);
  object["padding_share"] = report.padding_share;
  object["busiest_tiles"] = report.busiest_tiles;
  object["dropped_slots"] = report.dropped_slots;
  results_.print(object);
}

void StepPrinter::print_row(std::int64_t step, const StepReport& report) {
  std::array<std::string, columns.size()> cells;
  if (!titles_printed_) {
    for (std::size_t i = 0; i < columns.size(); ++i) {
      cells[i] = columns[i].title;
    }
    print_cells(results_.out(), cells);
    titles_printed_ = true;
  }
  cells = {std::to_string(step),
           text("%+.6f", report.loss),
           text("%.4f", report.logp_rewarded),
           text("%.4f", report.logp_unrewarded),
           text("%+.5f", report.logp_gap()),
           text("%.4f", report.entropy),
           text("%.3g", report.grad_norm),
           std::to_string(report.tokens),
           text("%.0f", per_second(report)),
           text("%.1f%%", 100 * report.padding_share),
           std::to_string(report.busiest_tiles)};
  print_cells(results_.out(), cells);
}

}  // namespace heddle::train

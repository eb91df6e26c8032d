#pragma once

#include <cstdint>

#include "heddle-train/trainer.hpp"
#include "support/program.hpp"

namespace heddle::train {

/// A line a step as the steps are done: a row of a table under its titles, or one object of JSON.
///
/// throws    std::runtime_error where standard output cannot be written
class StepPrinter {
 public:
  explicit StepPrinter(const examples::Results& results) : results_(results) {}

  void print(std::int64_t step, const StepReport& report);

 private:
  void print_object(std::int64_t step, const StepReport& report) const;
  void print_row(std::int64_t step, const StepReport& report);

  const examples::Results& results_;
  bool titles_printed_ = false;
};

}  // namespace heddle::train

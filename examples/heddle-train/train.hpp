#pragma once

#include "heddle-train/options.hpp"
#include "support/program.hpp"

namespace heddle::train {

/// Trains a model on a file of rollouts and prints a line a step.
///
/// throws    UsageError for what is wrong with the files, before the first step;
///           std::exception for what fails while running
void train(const TrainOptions& options, const examples::Results& results);

}  // namespace heddle::train

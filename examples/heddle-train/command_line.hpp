#pragma once

#include <CLI/CLI.hpp>

#include "support/program.hpp"

namespace heddle::train {

/// The program's options on `app`, and what it then does.
examples::Action set_up(CLI::App& app, examples::Results& results);

}  // namespace heddle::train

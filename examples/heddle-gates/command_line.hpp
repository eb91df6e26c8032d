#pragma once

#include "support/program.hpp"

namespace heddle::gates {

/// heddle-gates BASELINE CANDIDATE [--noise OTHER], as main() hands it to run_program.
[[nodiscard]] examples::Action set_up(CLI::App& app, examples::Results& results);

}  // namespace heddle::gates

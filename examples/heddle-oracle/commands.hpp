#pragma once

#include "support/program.hpp"

namespace heddle::oracle {

/// list, run and compare, as main() hands them to run_program.
[[nodiscard]] examples::Action set_up(CLI::App& app, examples::Results& results);

}  // namespace heddle::oracle

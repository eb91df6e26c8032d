#pragma once

#include "support/program.hpp"

namespace heddle::pack {

/// The program's options, as main() hands them to run_program.
[[nodiscard]] examples::Action set_up(CLI::App& app, examples::Results& results);

}  // namespace heddle::pack

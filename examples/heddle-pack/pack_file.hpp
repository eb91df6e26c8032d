#pragma once

#include "heddle-pack/options.hpp"
#include "support/program.hpp"

namespace heddle::pack {

/// Packs the job's rollouts: OUT, the drawing where one is asked for, and a report of every row.
///
/// throws    UsageError or heddle::Error for what the user gave, before any file is written
void pack_file(const PackJob& job, const examples::Results& results);

}  // namespace heddle::pack

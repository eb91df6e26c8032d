#pragma once

#include <string>

#include "heddle/packing/pack_options.hpp"
#include "heddle/packing/segment_table.hpp"

namespace heddle::pack {

/// A drawing of the rows: documents with their prompts darker, padding between and around them, and under
/// each row its context chunks in the colour of the rank that holds them.
[[nodiscard]] std::string rows_svg(const packing::SegmentTable& table,
                                   const packing::PackOptions& options);

}  // namespace heddle::pack

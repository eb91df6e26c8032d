#pragma once

#include <optional>
#include <string>

#include "heddle/packing/attention_tiles.hpp"
#include "heddle/packing/pack_options.hpp"

namespace heddle::pack {

/// What one run of the program does.
struct PackJob {
  std::string rollouts;
  std::string out;
  std::optional<std::string> svg;
  packing::PackOptions options = {};  ///< options.attention is what tiles are counted for, always
};

}  // namespace heddle::pack

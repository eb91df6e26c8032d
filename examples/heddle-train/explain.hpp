#pragma once

#include <cstddef>
#include <iosfwd>

#include "heddle-train/parameters.hpp"
#include "heddle/packing/pack_options.hpp"

namespace heddle::train {

/// Says what a run works on: the model, its rows, and for each phase of a step what computes it and
/// what it sends to other devices.
void explain(const ParameterLayout& layout, std::size_t bytes_per_weight,
             const packing::PackOptions& pack, std::ostream& out);

}  // namespace heddle::train

#pragma once

#include <filesystem>
#include <span>

#include "heddle/packing/pack_options.hpp"
#include "heddle/packing/rollout.hpp"
#include "heddle/packing/segment_table.hpp"

namespace heddle::pack {

/// Writes the rows of all chunks, one after the other, as a safetensors file: every array of a packed
/// chunk under its name, [rows, budget] ([rows, budget, layers, top_k] of routing), per-token fields where
/// the items carry them, num_real_segments [rows], and
///   segment_table [segments, 5]: row, start, length, prompt length, item
/// The options and each row's shift stand in the metadata.
///
/// throws    heddle::Error for a field that some items carry and others do not
void write_rows_file(const std::filesystem::path& path, std::span<const packing::Rollout> items,
                     const packing::SegmentTable& table, const packing::PackOptions& options);

}  // namespace heddle::pack

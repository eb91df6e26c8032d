#include "heddle-pack/command_line.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "heddle-pack/options.hpp"
#include "heddle-pack/pack_file.hpp"
#include "heddle/mesh/context_layout.hpp"
#include "heddle/packing/pad_position.hpp"
#include "support/pad_align.hpp"
#include "support/usage_error.hpp"

namespace heddle::pack {
namespace {

using examples::UsageError;

/// The command line as it was read.
struct CommandLine {
  std::string rollouts;
  std::string out;
  std::int64_t budget = 2048;
  std::int64_t pack_size = 1;
  std::int64_t segment_align = 64;
  std::string pad_position = "end";
  std::optional<std::int64_t> pad_align;
  std::int32_t pad_id = 258;
  std::optional<std::int64_t> max_segments;
  std::int64_t context = 1;
  std::optional<std::string> forward_blocks;
  std::optional<std::string> backward_blocks;
  std::optional<std::string> svg;
};

void require_positive(const char* option, std::int64_t value) {
  if (value < 1) {
    throw UsageError(std::string(option) + " = " + std::to_string(value) + ": must be >= 1");
  }
}

/// "1024x4096".
packing::TileBlocks parse_blocks(const std::string& option, const std::string& text) {
  packing::TileBlocks blocks;
  const char* const end = text.data() + text.size();
  const auto query = std::from_chars(text.data(), end, blocks.query);
  if (query.ec == std::errc() && query.ptr != end && *query.ptr == 'x') {
    const auto key = std::from_chars(query.ptr + 1, end, blocks.key);
    if (key.ec == std::errc() && key.ptr == end && blocks.query >= 1 && blocks.key >= 1) {
      return blocks;
    }
  }
  throw UsageError(option + " = " + text + ": must be QxK, two numbers >= 1");
}

packing::AttentionShards attention_of(const CommandLine& line) {
  packing::AttentionShards attention{.context = line.context};
  if (line.context > line.budget) {
    throw UsageError("--context = " + std::to_string(line.context) +
                     ": must not exceed --budget (" + std::to_string(line.budget) + ")");
  }
  if (line.context > 1 && line.budget % (2 * line.context) != 0) {
    throw UsageError("--budget = " + std::to_string(line.budget) +
                     ": must be a multiple of 2 * --context (" + std::to_string(2 * line.context) +
                     ")");
  }
  const std::int64_t shard = line.budget / line.context;
  attention.forward = {std::min<std::int64_t>(1024, shard),
                       std::min<std::int64_t>(4096, line.budget)};
  attention.backward = {std::min<std::int64_t>(2048, shard),
                        std::min<std::int64_t>(2048, line.budget)};
  if (line.forward_blocks) {
    attention.forward = parse_blocks("--forward-blocks", *line.forward_blocks);
  }
  if (line.backward_blocks) {
    attention.backward = parse_blocks("--backward-blocks", *line.backward_blocks);
  }
  return attention;
}

PackJob job_of(const CommandLine& line) {
  require_positive("--budget", line.budget);
  require_positive("--pack-size", line.pack_size);
  require_positive("--segment-align", line.segment_align);
  require_positive("--max-segments", line.max_segments.value_or(1));
  require_positive("--context", line.context);
  PackJob job{.rollouts = line.rollouts, .out = line.out, .svg = line.svg};
  job.options = {.budget = line.budget,
                 .pack_size = line.pack_size,
                 .segment_align_multiple = line.segment_align,
                 .max_segments = line.max_segments,
                 .pad_id = line.pad_id,
                 .pad_position = packing::pad_position(line.pad_position),
                 .attention = attention_of(line)};
  job.options.pad_align = examples::checked_pad_align({.budget = line.budget,
                                                       .segment_align = line.segment_align,
                                                       .position = job.options.pad_position,
                                                       .pad_align = line.pad_align});
  validate("heddle-pack", job.options);
  return job;
}

}  // namespace

examples::Action set_up(CLI::App& app, examples::Results& results) {
  const auto line = std::make_shared<CommandLine>();
  app.add_option("ROLLOUTS", line->rollouts, "Rollouts, JSON lines")->required();
  app.add_option("OUT", line->out, "Safetensors file for the rows and the segment table")
      ->required();
  app.add_option("--budget", line->budget, "Positions of a row")->capture_default_str();
  app.add_option("--pack-size", line->pack_size,
                 "Rows of a chunk; a chunk is filled up with padding")
      ->capture_default_str();
  app.add_option("--segment-align", line->segment_align, "Documents start at multiples of this")
      ->capture_default_str();
  app.add_option("--pad-position", line->pad_position,
                 "Where a row's padding goes: end, start or auto")
      ->capture_default_str();
  app.add_option("--pad-align", line->pad_align,
                 "Rows move by multiples of this (4096, or less in a short row)");
  app.add_option("--pad-id", line->pad_id, "Token id of padding")->capture_default_str();
  app.add_option("--max-segments", line->max_segments, "Documents of a row at most");
  app.add_option("--context", line->context, "Context ranks that tiles are counted for")
      ->capture_default_str();
  app.add_option("--forward-blocks", line->forward_blocks,
                 "Query and key positions of a forward tile (1024x4096, or less in a short row)");
  app.add_option("--backward-blocks", line->backward_blocks,
                 "The same of the fused backward (2048x2048, or less in a short row)");
  app.add_option("--svg", line->svg, "SVG file that draws the rows");
  return [line, &results] {
    pack_file(job_of(*line), results);
    return examples::exit_done;
  };
}

}  // namespace heddle::pack

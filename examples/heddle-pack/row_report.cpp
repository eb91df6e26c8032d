#include "heddle-pack/row_report.hpp"

#include <algorithm>
#include <ostream>
#include <string>
#include <utility>

#include "support/table.hpp"

namespace heddle::pack {
namespace {

using examples::Json;
using packing::AttentionTiles;
using packing::PadPosition;
using packing::TileRule;

/// The two rules and the two phases, with the names they have in the output.
constexpr std::array<std::pair<TileRule, std::string_view>, 2> rules = {
    std::pair{TileRule::naive, std::string_view("naive")},
    std::pair{TileRule::pad_aware, std::string_view("pad_aware")}};
constexpr std::array<std::string_view, 2> phases = {"forward", "backward"};

const AttentionTiles& tiles_of(const PlacementReport& placement, TileRule rule) {
  return rule == TileRule::naive ? placement.naive : placement.pad_aware;
}

const std::vector<std::int64_t>& ranks_of(const AttentionTiles& tiles, std::string_view phase) {
  return phase == "forward" ? tiles.forward : tiles.backward;
}

PlacementReport place(const packing::PlacedRow& row, std::int64_t shift,
                      const packing::AttentionShards& attention) {
  const packing::PlacedRow shifted{.segments = row.segments, .tokens = row.tokens, .shift = shift};
  return {.shift = shift,
          .naive = count_attention_tiles(shifted, attention, TileRule::naive),
          .pad_aware = count_attention_tiles(shifted, attention, TileRule::pad_aware)};
}

/// What `start` asks of an alignment before it moves any row by it.
bool start_takes(const packing::PackOptions& options) {
  return options.pad_align >= 1 && options.pad_align < options.budget &&
         options.pad_align % options.segment_align_multiple == 0;
}

std::string joined(const std::vector<std::int64_t>& counts) {
  std::string text;
  for (const std::int64_t count : counts) {
    text += (text.empty() ? "" : " ") + std::to_string(count);
  }
  return text;
}

std::string percent(double share) {
  return examples::number_text(100 * share) + " %";
}

std::string counted(std::int64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace

RowReport report_row(const packing::SegmentTable& table, std::int64_t row,
                     const packing::PackOptions& options) {
  // Back to where `end` has them: the positions are compared from there.
  std::vector<packing::Segment> segments(table.row(row).begin(), table.row(row).end());
  for (packing::Segment& segment : segments) {
    segment.start -= table.shift(row);
  }
  const packing::PlacedRow at_end{.segments = segments, .tokens = options.budget};
  RowReport report{.row = row,
                   .tokens = packing::token_count(segments),
                   .segments = static_cast<std::int64_t>(segments.size()),
                   .trailing_padding = options.budget - packing::used_positions(segments),
                   .shift = table.shift(row)};
  const auto set = [&](PadPosition position, std::int64_t shift) {
    report.placements[static_cast<std::size_t>(position)] = place(at_end, shift, options.attention);
  };
  set(PadPosition::end, 0);
  if (start_takes(options)) {
    set(PadPosition::start, packing::start_shift(at_end, options.pad_align));
    set(PadPosition::auto_, packing::auto_shift(at_end, options.pad_align, options.attention));
  } else {
    set(PadPosition::auto_, 0);  // the one shift that is left
  }
  return report;
}

double saving(std::span<const std::int64_t> end, std::span<const std::int64_t> placed) {
  const std::int64_t before = *std::max_element(end.begin(), end.end());
  const std::int64_t after = *std::max_element(placed.begin(), placed.end());
  return before == 0 ? 0 : static_cast<double>(before - after) / static_cast<double>(before);
}

Json to_json(const RowReport& report) {
  Json tiles;
  Json savings;
  for (const PadPosition position : pad_positions) {
    const std::string key(name(position));
    const auto& placement = report.at(position);
    if (!placement) {
      tiles[key] = nullptr;
      savings[key] = nullptr;
      continue;
    }
    for (const auto& [rule, rule_name] : rules) {
      for (const std::string_view phase : phases) {
        const auto& ranks = ranks_of(tiles_of(*placement, rule), phase);
        const auto& at_end = ranks_of(tiles_of(*report.at(PadPosition::end), rule), phase);
        tiles[key][std::string(rule_name)][std::string(phase)] = ranks;
        if (position != PadPosition::end) {
          savings[key][std::string(rule_name)][std::string(phase)] = saving(at_end, ranks);
        }
      }
    }
  }
  return {{"row", report.row},
          {"tokens", report.tokens},
          {"segments", report.segments},
          {"trailing_padding", report.trailing_padding},
          {"shift", report.shift},
          {"tiles", tiles},
          {"saving", savings}};
}

void print(std::span<const RowReport> reports, const packing::PackOptions& options,
           std::ostream& out) {
  using Column = examples::Table::Column;
  constexpr auto left = examples::Table::Align::left;
  std::int64_t tokens = 0;
  for (const RowReport& report : reports) {
    tokens += report.tokens;
    out << "row " << report.row << ": " << counted(report.tokens, "token") << " in "
        << counted(report.segments, "document") << ", trailing padding " << report.trailing_padding
        << ", moved by " << report.shift << '\n';
    // Shifts of start and auto in the titles; a rank's tiles one after the other.
    std::vector<Column> columns{{"  tiles", left}, {"", left}};
    for (const PadPosition position : pad_positions) {
      const auto& placement = report.at(position);
      const std::string shift = placement ? " +" + std::to_string(placement->shift) : "";
      columns.push_back({std::string(name(position)) + shift, left});
      if (position != PadPosition::end) {
        columns.push_back({"saved"});
      }
    }
    examples::Table table(columns);
    for (const auto& [rule, rule_name] : rules) {
      for (const std::string_view phase : phases) {
        const auto& at_end = ranks_of(tiles_of(*report.at(PadPosition::end), rule), phase);
        std::vector<std::string> cells{"  " + std::string(rule_name), std::string(phase)};
        for (const PadPosition position : pad_positions) {
          const auto& placement = report.at(position);
          const auto* const ranks =
              placement ? &ranks_of(tiles_of(*placement, rule), phase) : nullptr;
          cells.push_back(ranks != nullptr ? joined(*ranks) : "-");
          if (position != PadPosition::end) {
            cells.push_back(ranks != nullptr ? percent(saving(at_end, *ranks)) : "-");
          }
        }
        table.add(std::move(cells));
      }
    }
    table.print(out);
  }
  const auto rows = static_cast<std::int64_t>(reports.size());
  const double positions = static_cast<double>(rows * options.budget);
  out << counted(rows, "row") << " in " << counted(rows / options.pack_size, "chunk") << ", "
      << counted(tokens, "token") << ", padding "
      << percent(rows == 0 ? 0 : 1 - static_cast<double>(tokens) / positions) << '\n';
}

}  // namespace heddle::pack

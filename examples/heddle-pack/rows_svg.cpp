#include "heddle-pack/rows_svg.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "heddle/mesh/context_layout.hpp"

namespace heddle::pack {
namespace {

constexpr double margin = 16;
constexpr double label_width = 64;
constexpr double row_width = 1024;
constexpr double bar_height = 22;
constexpr double strip_height = 7;
constexpr double row_pitch = 42;
constexpr double header_height = 52;

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

/// Colours around the wheel, neighbours far apart (steps of the golden angle).
std::string rank_colour(std::int64_t rank) {
  return "hsl(" + number(std::fmod(137.508 * static_cast<double>(rank), 360.0)) + ",62%,50%)";
}

class Drawing {
 public:
  Drawing(std::int64_t rows, std::int64_t positions) : positions_(static_cast<double>(positions)) {
    const double width = label_width + row_width + 2 * margin;
    const double height = header_height + row_pitch * static_cast<double>(rows) + 2 * margin;
    text_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + number(width) + "\" height=\"" +
            number(height) + "\" viewBox=\"0 0 " + number(width) + " " + number(height) +
            "\" font-family=\"sans-serif\" font-size=\"12\">\n"
            "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n";
  }

  [[nodiscard]] double x(std::int64_t position) const {
    return margin + label_width + row_width * static_cast<double>(position) / positions_;
  }

  void box(double left, double top, double width, double height, const std::string& style,
           const std::string& title) {
    text_ += "<rect x=\"" + number(left) + "\" y=\"" + number(top) + "\" width=\"" + number(width) +
             "\" height=\"" + number(height) + "\" " + style + "><title>" + title +
             "</title></rect>\n";
  }

  /// Positions [first, last) of a row as a box.
  void span(std::int64_t first, std::int64_t last, double top, double height,
            const std::string& style, const std::string& title) {
    box(x(first), top, x(last) - x(first), height, style, title);
  }

  void label(double left, double baseline, const std::string& words) {
    text_ += "<text x=\"" + number(left) + "\" y=\"" + number(baseline) + "\" fill=\"#333333\">" +
             words + "</text>\n";
  }

  [[nodiscard]] std::string finish() const { return text_ + "</svg>\n"; }

 private:
  double positions_;
  std::string text_;
};

constexpr const char* padding_style = "fill=\"#e4e4e4\"";
// A document's outline keeps neighbours apart where there is no gap between them.
constexpr const char* prompt_style = "fill=\"#6f8fb3\"";
constexpr const char* completion_style = "fill=\"#b8d0ea\"";
constexpr const char* outline_style = "fill=\"none\" stroke=\"#2f4a68\" stroke-width=\"0.8\"";

void draw_legend(Drawing& drawing, std::int64_t ranks) {
  double left = margin + label_width;
  const auto entry = [&](const std::string& style, const std::string& words) {
    drawing.box(left, margin, 14, 12, style, words);
    drawing.label(left + 20, margin + 10.5, words);
    left += 34 + 7.2 * static_cast<double>(words.size());
  };
  entry(prompt_style, "prompt");
  entry(completion_style, "completion");
  entry(padding_style, "padding");
  constexpr std::int64_t named = 8;  // as many as fit on the line
  for (std::int64_t rank = 0; rank < std::min(ranks, named); ++rank) {
    entry("fill=\"" + rank_colour(rank) + "\"", "rank " + std::to_string(rank));
  }
}

void draw_row(Drawing& drawing, const packing::SegmentTable& table, std::int64_t row,
              const packing::PackOptions& options) {
  const double top = margin + header_height + row_pitch * static_cast<double>(row);
  drawing.label(margin, top + 15, "row " + std::to_string(row));
  drawing.span(0, options.budget, top, bar_height, padding_style, "padding");
  for (const packing::Segment& segment : table.row(row)) {
    const std::string title = "item " + std::to_string(segment.item_index) + ": " +
                              std::to_string(segment.len) + " tokens from " +
                              std::to_string(segment.start) + ", prompt " +
                              std::to_string(segment.prompt_len);
    const std::int64_t completion = segment.start + segment.prompt_len;
    drawing.span(segment.start, completion, top, bar_height, prompt_style, title);
    drawing.span(completion, segment.end(), top, bar_height, completion_style, title);
    drawing.span(segment.start, segment.end(), top, bar_height, outline_style, title);
  }
  const ContextPartition partition(options.attention.layout, options.budget,
                                   options.attention.context);
  for (std::int64_t first = 0; first < options.budget; first += partition.chunk()) {
    const std::int64_t rank = partition.rank_of(first);
    drawing.span(first, first + partition.chunk(), top + bar_height + 2, strip_height,
                 "fill=\"" + rank_colour(rank) + "\" stroke=\"#ffffff\" stroke-width=\"0.8\"",
                 "rank " + std::to_string(rank));
  }
}

}  // namespace

std::string rows_svg(const packing::SegmentTable& table, const packing::PackOptions& options) {
  Drawing drawing(table.rows(), options.budget);
  draw_legend(drawing, options.attention.context);
  drawing.label(margin + label_width, margin + 34,
                std::to_string(options.budget) + " positions a row, pad_position " +
                    std::string(name(options.pad_position)));
  for (std::int64_t row = 0; row < table.rows(); ++row) {
    draw_row(drawing, table, row, options);
  }
  return drawing.finish();
}

}  // namespace heddle::pack

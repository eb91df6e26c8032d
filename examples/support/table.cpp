#include "support/table.hpp"

#include <algorithm>
#include <cstdio>
#include <ostream>

#include "heddle/core/error.hpp"

namespace heddle::examples {

std::size_t text_width(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char byte) {
    return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U;  // not a continuation byte
  }));
}

std::string number_text(double value, int digits) {
  char buffer[64];
  const int length = std::snprintf(buffer, sizeof buffer, "%.*g", digits, value);
  return {buffer, static_cast<std::size_t>(length)};
}

void Table::add(std::vector<std::string> cells) {
  require_equal("Table::add", "cells.size", cells.size(), "columns", columns_.size());
  rows_.push_back(std::move(cells));
}

void Table::print(std::ostream& out) const {
  std::vector<std::size_t> widths;
  for (std::size_t column = 0; column < columns_.size(); ++column) {
    std::size_t width = text_width(columns_[column].title);
    for (const std::vector<std::string>& row : rows_) {
      width = std::max(width, text_width(row[column]));
    }
    widths.push_back(width);
  }
  const auto print_line = [&](const auto& cell_of) {
    std::string line;
    for (std::size_t column = 0; column < columns_.size(); ++column) {
      const std::string& cell = cell_of(column);
      const std::string padding(widths[column] - text_width(cell), ' ');
      line += (column == 0 ? "" : "  ");
      line += columns_[column].align == Align::right ? padding + cell : cell + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << '\n';
  };
  if (std::ranges::any_of(columns_, [](const Column& column) { return !column.title.empty(); })) {
    print_line([&](std::size_t column) -> const std::string& { return columns_[column].title; });
  }
  for (const std::vector<std::string>& row : rows_) {
    print_line([&](std::size_t column) -> const std::string& { return row[column]; });
  }
}

}  // namespace heddle::examples

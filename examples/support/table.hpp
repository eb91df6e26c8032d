#pragma once

#include <cstddef>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heddle::examples {

/// Characters of UTF-8 text: what it takes on a terminal, for the scripts that messages are in.
[[nodiscard]] std::size_t text_width(std::string_view text);

/// A number in `digits` significant digits, as short as %g has it.
[[nodiscard]] std::string number_text(double value, int digits = 3);

/// Lines whose columns line up, two spaces between them.
class Table {
 public:
  enum class Align { left, right };
  struct Column {
    std::string title;
    Align align = Align::right;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// One cell a column; heddle::Error for another number.
  void add(std::vector<std::string> cells);

  /// The titles, unless all are empty, and all rows; no spaces at the end of a line.
  void print(std::ostream& out) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace heddle::examples

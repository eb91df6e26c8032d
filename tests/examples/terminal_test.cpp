#include "support/progress.hpp"
#include "support/table.hpp"

#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: widths counted in bytes; numbers to the left; spaces left at line ends;
// a bar drawn where nobody looks, or left behind.

namespace heddle::examples {
namespace {

std::string printed(const Table& table) {
  std::ostringstream out;
  table.print(out);
  return out.str();
}

TEST(Table, ColumnsLineUp) {
  Table table({{"name", Table::Align::left}, {"count"}, {"note", Table::Align::left}});
  table.add({"a", "12345678", ""});
  table.add({"größer", "7", "x"});
  EXPECT_EQ(printed(table),
            "name       count  note\n"
            "a       12345678\n"
            "größer         7  x\n");
  EXPECT_EQ(printed(Table({{"only"}})), "only\n");
}

TEST(Table, RefusesARowOfAnotherLength) {
  Table table({{"a"}, {"b"}});
  EXPECT_EQ(test::thrown_text<Error>([&] { table.add({"1"}); }),
            "Table::add: cells.size = 1: must equal columns (2)");
}

TEST(Table, NumbersAreShort) {
  EXPECT_EQ(number_text(0.000123456), "0.000123");
  EXPECT_EQ(number_text(1234567.0, 4), "1.235e+06");
  EXPECT_EQ(number_text(2.0), "2");
}

TEST(Progress, DrawsOverItselfAndIsGone) {
  std::ostringstream out;
  {
    Progress progress("work", 4, out, true);
    progress.update(1, "row 1");
    EXPECT_EQ(out.str(), "\rwork [=====>              ]  25%  1/4  row 1\x1b[K");
    out.str("");
    progress.update(1, "row 1");
    EXPECT_EQ(out.str(), "") << "nothing changed";
    progress.update(9);
    EXPECT_EQ(out.str(), "\rwork [====================] 100%  4/4\x1b[K");
    out.str("");
  }
  EXPECT_EQ(out.str(), "\r\x1b[K");
}

TEST(Progress, SaysNothingWhereNobodyLooks) {
  std::ostringstream out;
  { Progress("work", 4, out, false).update(2); }
  { Progress("work", 4, out, true); }
  EXPECT_EQ(out.str(), "");
}

TEST(Progress, OfNothingIsDone) {
  std::ostringstream out;
  Progress progress("work", 0, out, true);
  progress.update(0);
  EXPECT_EQ(out.str(), "\rwork [====================] 100%  0/0\x1b[K");
}

}  // namespace
}  // namespace heddle::examples

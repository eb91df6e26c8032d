#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace heddle {

/// What every public entry throws when it is called wrongly: one line that names who refuses, which
/// argument, what it was, and the rule it breaks.
///
///   what() = "where: argument = value: rule"
///
/// Thrown before anything is written and outside any parallel region. The first offender in argument
/// order is named, and of an array its first bad index ("segment_ids[1732]").
class Error : public std::runtime_error {
 public:
  Error(std::string where, std::string argument, std::string value, std::string rule)
      : std::runtime_error(where + ": " + argument + " = " + value + ": " + rule),
        where_(std::move(where)),
        argument_(std::move(argument)),
        value_(std::move(value)),
        rule_(std::move(rule)) {}

  [[nodiscard]] const std::string& where() const noexcept { return where_; }
  [[nodiscard]] const std::string& argument() const noexcept { return argument_; }
  [[nodiscard]] const std::string& value() const noexcept { return value_; }
  [[nodiscard]] const std::string& rule() const noexcept { return rule_; }

 private:
  std::string where_;
  std::string argument_;
  std::string value_;
  std::string rule_;
};

/// The text of a value in an error: integers in full, floating point in the shortest form that reads
/// back to the same bits, enums as their number, text as it is, a null pointer as "null".
template <class Value>
[[nodiscard]] std::string error_text(const Value& value) {
  if constexpr (std::is_same_v<Value, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_enum_v<Value>) {
    return std::to_string(static_cast<std::underlying_type_t<Value>>(value));
  } else if constexpr (std::is_integral_v<Value>) {
    return std::to_string(value);
  } else if constexpr (std::is_floating_point_v<Value>) {
    char buffer[64];
    const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
    return std::string(buffer, end);
  } else if constexpr (std::is_same_v<Value, std::nullptr_t>) {
    return "null";
  } else {
    static_assert(std::is_convertible_v<const Value&, std::string_view>,
                  "error_text: the value must be a number, an enum, nullptr or text");
    return std::string(std::string_view(value));
  }
}

/// Throws Error(where, argument, error_text(value), rule).
template <class Value>
[[noreturn]] void fail(std::string_view where, std::string_view argument, const Value& value,
                       std::string_view rule) {
  throw Error(std::string(where), std::string(argument), error_text(value), std::string(rule));
}

/// fail(...) unless `holds`. The texts are only put together on failure.
template <class Value>
void require(bool holds, std::string_view where, std::string_view argument, const Value& value,
             std::string_view rule) {
  if (!holds) [[unlikely]] {
    fail(where, argument, value, rule);
  }
}

/// Refuses an extent that differs from the one it must have: "must equal dims.vocab (1024)".
template <std::integral Extent, std::integral Expected>
void require_equal(std::string_view where, std::string_view argument, Extent value,
                   std::string_view expected_name, Expected expected) {
  if (!std::cmp_equal(value, expected)) [[unlikely]] {
    fail(where, argument, value,
         "must equal " + std::string(expected_name) + " (" + std::to_string(expected) + ")");
  }
}

/// "name[index]", the argument text of an offending element.
template <std::integral Index>
[[nodiscard]] std::string element_name(std::string_view name, Index index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

/// "name.member", the argument text of a property.
[[nodiscard]] inline std::string member_name(std::string_view name, std::string_view member) {
  std::string text(name);
  text.append(1, '.').append(member);
  return text;
}

}  // namespace heddle

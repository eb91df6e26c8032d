#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace heddle::examples {

/// Members stay in the order of the text, so that what is written back reads as it was.
using Json = nlohmann::ordered_json;

/// JSON from text, as strict as the standard: UTF-8 alone, no number beyond a double, no member
/// twice (of two equal names a plain parser silently keeps one).
///
/// throws    UsageError "<where>: is not JSON: ..."
[[nodiscard]] Json parse_json(std::string_view text, const std::string& where);

/// The same with members sorted by name: for objects of very many members, whose order does not
/// matter (an ordered object compares a new name with each that it has).
[[nodiscard]] nlohmann::json parse_sorted_json(std::string_view text, const std::string& where);

/// One line of JSON; bytes that are no UTF-8 (a file name, say) become the replacement character.
[[nodiscard]] std::string json_line(const Json& value);

/// The value as it reads in a message: its JSON, cut where it is long.
[[nodiscard]] std::string shown(const Json& value);

}  // namespace heddle::examples

#include "support/json_text.hpp"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <unordered_set>
#include <vector>

#include "support/usage_error.hpp"

namespace heddle::examples {
namespace {

constexpr std::size_t longest_excerpt = 200;

std::string cut(std::string text) {
  if (text.size() > longest_excerpt) {
    // Not in the middle of a UTF-8 sequence.
    std::size_t end = longest_excerpt;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) {
      --end;
    }
    text.resize(end);
    text += "...";
  }
  return text;
}

/// Python's json writes these; the standard has none of them.
std::string number_that_is_none(std::string_view text, std::size_t position) {
  for (const std::string_view name : {"NaN", "Infinity"}) {
    const std::size_t first = position > name.size() ? position - name.size() : 0;
    const std::size_t found = text.substr(first, 2 * name.size()).find(name);
    if (found != std::string_view::npos) {
      return std::string(name) + " is no JSON number";
    }
  }
  return {};
}

/// "[json.exception.parse_error.101] parse error at line 1, column 5: ..." without its number, and
/// without its line where there is but one.
std::string reason(const std::exception& error, std::string_view text) {
  std::string_view what = error.what();
  const std::size_t bracket = what.find("] ");
  what.remove_prefix(bracket == std::string_view::npos ? 0 : bracket + 2);
  constexpr std::string_view opening = "parse error at ";
  constexpr std::string_view first_line = "line 1, ";
  if (what.starts_with(opening)) {
    what.remove_prefix(opening.size());
    if (what.starts_with(first_line) && text.find('\n') == std::string_view::npos) {
      what.remove_prefix(first_line.size());
    }
  }
  return cut(std::string(what));
}

template <class AnyJson>
AnyJson parse(std::string_view text, const std::string& where) {
  // The parser would take it for the end of the text and pass over what follows.
  if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos) {
    throw UsageError(where + ": is not JSON: a zero byte at offset " + std::to_string(zero));
  }
  std::vector<std::unordered_set<std::string>> open_objects;
  const auto watch = [&](int, typename AnyJson::parse_event_t event, AnyJson& parsed) {
    if (event == AnyJson::parse_event_t::object_start) {
      open_objects.emplace_back();
    } else if (event == AnyJson::parse_event_t::object_end) {
      open_objects.pop_back();
    } else if (event == AnyJson::parse_event_t::key) {
      const auto& name = parsed.template get_ref<const std::string&>();
      if (!open_objects.back().insert(name).second) {
        throw UsageError(where + ": member " + shown(parsed) + " appears twice");
      }
    }
    return true;
  };
  try {
    return AnyJson::parse(text.begin(), text.end(), watch);
  } catch (const typename AnyJson::parse_error& error) {
    const std::string no_number = number_that_is_none(text, error.byte);
    throw UsageError(where +
                     ": is not JSON: " + (no_number.empty() ? reason(error, text) : no_number));
  } catch (const typename AnyJson::exception& error) {
    throw UsageError(where + ": is not JSON: " + reason(error, text));
  }
}

}  // namespace

Json parse_json(std::string_view text, const std::string& where) {
  return parse<Json>(text, where);
}

nlohmann::json parse_sorted_json(std::string_view text, const std::string& where) {
  return parse<nlohmann::json>(text, where);
}

std::string json_line(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string shown(const Json& value) {
  return cut(json_line(value));
}

}  // namespace heddle::examples

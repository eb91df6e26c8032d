#include "support/rollout_file.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "heddle/core/error.hpp"
#include "support/json_text.hpp"
#include "support/mapped_file.hpp"
#include "support/usage_error.hpp"

namespace heddle::examples {
namespace {

/// The members of one line, read by name and type.
class LineReader {
 public:
  LineReader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  /// Null where the member is absent or null.
  [[nodiscard]] const Json* find(std::string_view name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  [[noreturn]] void refuse(std::string_view name, const Json& value, std::string_view rule) const {
    throw UsageError(where_ + ": " + std::string(name) + " = " + shown(value) + ": " +
                     std::string(rule));
  }

  [[nodiscard]] std::vector<std::int32_t> tokens(const std::string& text_name,
                                                 const std::string& ids_name) const {
    const Json* const text = find(text_name);
    const Json* const ids = find(ids_name);
    if (text != nullptr && ids != nullptr) {
      throw UsageError(where_ + ": " + text_name + " and " + ids_name +
                       " are both given: must be one of the two");
    }
    if (text == nullptr && ids == nullptr) {
      throw UsageError(where_ + ": " + text_name + " or " + ids_name + " is missing");
    }
    if (ids != nullptr) {
      return integers<std::int32_t>(ids_name, *ids, 0);
    }
    if (!text->is_string()) {
      refuse(text_name, *text, "must be a string");
    }
    const auto& bytes = text->get_ref<const std::string&>();
    std::vector<std::int32_t> result(bytes.size());
    std::transform(bytes.begin(), bytes.end(), result.begin(), [](char byte) {
      return static_cast<std::int32_t>(static_cast<unsigned char>(byte));
    });
    return result;
  }

  template <class T>
  [[nodiscard]] std::vector<T> integers(const std::string& name, const Json& value,
                                        std::int64_t lowest) const {
    if (!value.is_array()) {
      refuse(name, value, "must be an array of integers");
    }
    std::vector<T> result;
    result.reserve(value.size());
    append_integers(name, value, lowest, result);
    return result;
  }

  template <class T>
  void append_integers(const std::string& name, const Json& array, std::int64_t lowest,
                       std::vector<T>& result) const {
    constexpr std::int64_t highest = std::numeric_limits<T>::max();
    for (std::size_t i = 0; i < array.size(); ++i) {
      const Json& element = array[i];
      const bool fits = element.is_number_integer() &&
                        !(element.is_number_unsigned() &&
                          element.get<std::uint64_t>() > static_cast<std::uint64_t>(highest)) &&
                        element.get<std::int64_t>() >= lowest &&
                        element.get<std::int64_t>() <= highest;
      if (!fits) {
        refuse(element_name(name, i), element,
               "must be an integer in [" + std::to_string(lowest) + ", " + std::to_string(highest) +
                   "]");
      }
      result.push_back(static_cast<T>(element.get<std::int64_t>()));
    }
  }

  [[nodiscard]] float number(const std::string& name, const Json& value) const {
    if (!value.is_number()) {
      refuse(name, value, "must be a number");
    }
    const auto narrowed = static_cast<float>(value.get<double>());
    if (!std::isfinite(narrowed)) {
      refuse(name, value, "must fit F32");
    }
    return narrowed;
  }

  [[nodiscard]] std::vector<float> numbers(const std::string& name, const Json& array) const {
    std::vector<float> result;
    result.reserve(array.size());
    for (std::size_t i = 0; i < array.size(); ++i) {
      result.push_back(number(element_name(name, i), array[i]));
    }
    return result;
  }

  [[nodiscard]] RecordedValues values(const std::string& name) const {
    const Json* const value = find(name);
    if (value == nullptr) {
      return {};
    }
    if (value->is_array()) {
      return {.scalar = std::nullopt, .array = numbers(name, *value)};
    }
    if (!value->is_number()) {
      refuse(name, *value, "must be a number or an array of numbers");
    }
    return {.scalar = number(name, *value), .array = std::nullopt};
  }

  /// Numbers, or booleans as 1 and 0.
  [[nodiscard]] std::optional<std::vector<float>> mask(const std::string& name) const {
    const Json* const value = find(name);
    if (value == nullptr) {
      return std::nullopt;
    }
    if (!value->is_array()) {
      refuse(name, *value, "must be an array of numbers");
    }
    std::vector<float> result;
    result.reserve(value->size());
    for (std::size_t i = 0; i < value->size(); ++i) {
      const Json& element = (*value)[i];
      result.push_back(element.is_boolean() ? (element.get<bool>() ? 1.0F : 0.0F)
                                            : number(element_name(name, i), element));
    }
    return result;
  }

  /// [tokens][layers][top_k]; nothing for an empty array, which routes no token.
  [[nodiscard]] std::optional<RecordedRouting> routing() const {
    const std::string name = "routed_experts";
    const Json* const value = find(name);
    if (value == nullptr) {
      return std::nullopt;
    }
    constexpr const char* rule = "must be arrays of one shape, [tokens][layers][top_k]";
    if (!value->is_array()) {
      refuse(name, *value, rule);
    }
    if (value->empty()) {
      return std::nullopt;
    }
    RecordedRouting result;
    result.tokens = static_cast<std::int64_t>(value->size());
    for (std::size_t t = 0; t < value->size(); ++t) {
      const Json& token = (*value)[t];
      const std::string token_name = element_name(name, t);
      if (!token.is_array() || token.empty()) {
        refuse(token_name, token, rule);
      }
      if (t == 0) {
        result.layers = static_cast<std::int32_t>(token.size());
      }
      if (!std::cmp_equal(token.size(), result.layers)) {
        refuse(token_name, token,
               "must have " + std::to_string(result.layers) + " layers, like " + name + "[0]");
      }
      for (std::size_t l = 0; l < token.size(); ++l) {
        const std::string layer_name = element_name(token_name, l);
        if (!token[l].is_array() || token[l].empty()) {
          refuse(layer_name, token[l], rule);
        }
        if (t == 0 && l == 0) {
          result.top_k = static_cast<std::int32_t>(token[l].size());
        }
        if (!std::cmp_equal(token[l].size(), result.top_k)) {
          refuse(layer_name, token[l],
                 "must have " + std::to_string(result.top_k) + " experts, like " + name + "[0][0]");
        }
        append_integers(layer_name, token[l], -1, result.ids);
      }
    }
    return result;
  }

 private:
  const Json& object_;
  std::string where_;
};

/// The members that a line may have.
std::vector<std::string> known_members() {
  std::vector<std::string> names = {"prompt",         "prompt_ids",      "completion",
                                    "completion_ids", "completion_mask", "action_mask",
                                    "loss_mask",      "advantages"};
  for (const packing::PerTokenField field : packing::per_token_fields) {
    names.emplace_back(packing::name(field));
  }
  for (const char* name : {"routed_experts", "policy_version", "reward", "group"}) {
    names.emplace_back(name);
  }
  return names;
}

void require_known_members(const Json& object, const std::string& where) {
  static const std::vector<std::string> known = known_members();
  for (const auto& [name, ignored] : object.items()) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      std::string rule;
      for (const std::string& member : known) {
        rule += (rule.empty() ? "" : ", ") + member;
      }
      throw UsageError(where + ": unknown member " + shown(Json(name)) + ", must be one of " +
                       rule);
    }
  }
}

RolloutRecord parse_line(std::string_view text, const std::string& where) {
  const Json object = parse_json(text, where);
  if (!object.is_object()) {
    throw UsageError(where + ": must be an object");
  }
  require_known_members(object, where);

  const LineReader reader(object, where);
  RolloutRecord record;
  record.prompt_ids = reader.tokens("prompt", "prompt_ids");
  record.completion_ids = reader.tokens("completion", "completion_ids");
  record.completion_mask = reader.mask("completion_mask");
  record.action_mask = reader.mask("action_mask");
  record.loss_mask = reader.mask("loss_mask");
  record.advantages = reader.values("advantages");
  for (const packing::PerTokenField field : packing::per_token_fields) {
    record.per_token[field] = reader.values(std::string(packing::name(field)));
  }
  record.routed_experts = reader.routing();
  if (const Json* const version = reader.find("policy_version")) {
    const bool fits = version->is_number_integer() &&
                      !(version->is_number_unsigned() &&
                        version->get<std::uint64_t>() >
                            static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
    if (!fits) {
      reader.refuse("policy_version", *version, "must be an integer that fits I64");
    }
    record.policy_version = version->get<std::int64_t>();
  }
  if (const Json* const reward = reader.find("reward")) {
    if (!reward->is_number()) {
      reader.refuse("reward", *reward, "must be a number");
    }
    record.reward = reward->get<double>();
  }
  if (const Json* const group = reader.find("group")) {
    if (!group->is_number_integer() && !group->is_string()) {
      reader.refuse("group", *group, "must be an integer or a string");
    }
    record.group = group->dump();
  }

  try {
    packing::validate("", 0, record.view(), std::numeric_limits<std::int64_t>::max());
  } catch (const Error& error) {
    // The line says which item it is, so "items[0].completion_mask.size" loses its first part.
    throw UsageError(where + ": " + error.argument().substr(error.argument().find('.') + 1) +
                     " = " + error.value() + ": " + error.rule());
  }
  return record;
}

std::optional<std::span<const float>> view_of(const std::optional<std::vector<float>>& values) {
  return values ? std::optional<std::span<const float>>(*values) : std::nullopt;
}

}  // namespace

packing::TokenValues RecordedValues::view() const {
  if (scalar) {
    return {*scalar};
  }
  return array ? packing::TokenValues(std::span<const float>(*array)) : packing::TokenValues();
}

packing::Rollout RolloutRecord::view() const {
  packing::Rollout rollout;
  rollout.prompt_ids = prompt_ids;
  rollout.completion_ids = completion_ids;
  rollout.completion_mask = view_of(completion_mask);
  rollout.action_mask = view_of(action_mask);
  rollout.loss_mask = view_of(loss_mask);
  rollout.advantages = advantages.view();
  for (const packing::PerTokenField field : packing::per_token_fields) {
    rollout.per_token[field] = per_token[field].view();
  }
  if (routed_experts) {
    rollout.routed_experts = {.ids = routed_experts->ids,
                              .tokens = routed_experts->tokens,
                              .layers = routed_experts->layers,
                              .top_k = routed_experts->top_k};
  }
  rollout.policy_version = policy_version;
  return rollout;
}

std::vector<RolloutRecord> parse_rollouts(std::string_view text, const std::string& where) {
  std::vector<RolloutRecord> records;
  std::optional<std::size_t> first_routed;
  std::int64_t line = 0;
  while (!text.empty()) {
    ++line;
    const std::size_t end = text.find('\n');
    const std::string_view content = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (content.find_first_not_of(" \t\r") == std::string_view::npos) {
      continue;
    }
    const std::string here = where + ":" + std::to_string(line);
    records.push_back(parse_line(content, here));
    RolloutRecord& record = records.back();
    record.line = line;
    if (!record.routed_experts) {
      continue;
    }
    first_routed = first_routed.value_or(records.size() - 1);
    const RolloutRecord& routed = records[*first_routed];
    const RecordedRouting& first = *routed.routed_experts;
    const RecordedRouting& own = *record.routed_experts;
    if (own.layers != first.layers || own.top_k != first.top_k) {
      throw UsageError(here + ": routed_experts has " + std::to_string(own.layers) + " layers of " +
                       std::to_string(own.top_k) + " experts: must have " +
                       std::to_string(first.layers) + " of " + std::to_string(first.top_k) +
                       ", like line " + std::to_string(routed.line));
    }
  }
  if (records.empty()) {
    throw UsageError(where + ": holds no rollout");
  }
  return records;
}

std::vector<RolloutRecord> read_rollouts(const std::filesystem::path& path) {
  const MappedFile file(path);
  return parse_rollouts(file.text(), path.string());
}

std::vector<packing::Rollout> views(std::span<const RolloutRecord> records) {
  std::vector<packing::Rollout> result;
  result.reserve(records.size());
  for (const RolloutRecord& record : records) {
    result.push_back(record.view());
  }
  return result;
}

void require_vocabulary(std::span<const RolloutRecord> records, std::int64_t vocab_size,
                        const std::string& where) {
  const auto check = [&](const RolloutRecord& record, const char* name,
                         const std::vector<std::int32_t>& ids) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= vocab_size) {
        throw UsageError(where + ":" + std::to_string(record.line) + ": " + element_name(name, i) +
                         " = " + std::to_string(ids[i]) +
                         ": must be below the model's vocab_size (" + std::to_string(vocab_size) +
                         ")");
      }
    }
  };
  for (const RolloutRecord& record : records) {
    check(record, "prompt_ids", record.prompt_ids);
    check(record, "completion_ids", record.completion_ids);
  }
}

}  // namespace heddle::examples

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"

namespace heddle::packing {

/// The per-token arrays that an item may carry beside its advantages. A closed set: each becomes an
/// array of the packed row, so an unknown name would be silently dropped otherwise.
enum class PerTokenField {
  ref_per_token_logps,
  old_per_token_logps,
  returns,
  old_values,
  sampler_is_weights,
  rollout_per_token_logps,
  overlong,
};

inline constexpr std::array<PerTokenField, 7> per_token_fields = {
    PerTokenField::ref_per_token_logps,
    PerTokenField::old_per_token_logps,
    PerTokenField::returns,
    PerTokenField::old_values,
    PerTokenField::sampler_is_weights,
    PerTokenField::rollout_per_token_logps,
    PerTokenField::overlong,
};

/// Something for each per-token field.
template <class T>
class PerTokenArray {
 public:
  [[nodiscard]] constexpr T& operator[](PerTokenField field) {
    return values_[static_cast<std::size_t>(field)];
  }
  [[nodiscard]] constexpr const T& operator[](PerTokenField field) const {
    return values_[static_cast<std::size_t>(field)];
  }
  friend constexpr bool operator==(const PerTokenArray&, const PerTokenArray&) = default;

 private:
  std::array<T, per_token_fields.size()> values_{};
};

[[nodiscard]] constexpr std::string_view name(PerTokenField field) {
  constexpr std::array<std::string_view, per_token_fields.size()> names = {
      "ref_per_token_logps", "old_per_token_logps",     "returns", "old_values",
      "sampler_is_weights",  "rollout_per_token_logps", "overlong"};
  return names[static_cast<std::size_t>(field)];
}

/// The field of that name; Error for a name outside the set.
[[nodiscard]] inline PerTokenField per_token_field(std::string_view field_name) {
  const auto* const found =
      std::find_if(per_token_fields.begin(), per_token_fields.end(),
                   [field_name](PerTokenField field) { return name(field) == field_name; });
  if (found == per_token_fields.end()) {
    std::string rule = "must be one of";
    for (const PerTokenField field : per_token_fields) {
      rule += (field == per_token_fields.front() ? " " : ", ") + std::string(name(field));
    }
    fail("packing::per_token_field", "name", field_name, rule);
  }
  return *found;
}

/// A value for each completion token, in one of three forms: one number for all, one a completion
/// token, or one a token of the whole item (of which the prompt's are skipped). Absent by default.
///
/// alias     the numbers stay the caller's
class TokenValues {
 public:
  constexpr TokenValues() = default;
  // Both forms stand for the same thing where an item is written down.
  constexpr TokenValues(float scalar)  // NOLINT(google-explicit-constructor)
      : form_(Form::scalar), scalar_(scalar) {}
  constexpr TokenValues(std::span<const float> values)  // NOLINT(google-explicit-constructor)
      : form_(Form::array), values_(values) {}

  [[nodiscard]] constexpr bool is_given() const { return form_ != Form::absent; }
  [[nodiscard]] constexpr bool is_scalar() const { return form_ == Form::scalar; }
  [[nodiscard]] constexpr float scalar() const { return scalar_; }
  [[nodiscard]] constexpr std::span<const float> values() const { return values_; }

  /// The last `completion_length` numbers: the completion's, whichever array form was given.
  [[nodiscard]] constexpr std::span<const float> completion(std::int64_t completion_length) const {
    return values_.last(static_cast<std::size_t>(completion_length));
  }

 private:
  enum class Form { absent, scalar, array };
  Form form_ = Form::absent;
  float scalar_ = 0;
  std::span<const float> values_;
};

/// The experts that the sampler chose, [tokens, layers, top_k] row-major, aligned to the whole item.
/// The sampler never routes the last token it sampled, so tokens is n or n - 1. -1: not captured.
struct RoutedExperts {
  std::span<const std::int16_t> ids = {};
  std::int64_t tokens = 0;
  std::int32_t layers = 0;
  std::int32_t top_k = 0;

  [[nodiscard]] constexpr std::int64_t per_token() const {
    return std::int64_t{layers} * std::int64_t{top_k};
  }
};

/// One unpadded rollout, a view of the caller's memory: n = p + c tokens.
///
///   completion mask of the item = action_mask * loss_mask where both are given, else completion_mask,
///   else the one of the two that is given, else 1
///
/// shapes    prompt_ids [p], completion_ids [c]; completion_mask [c]; action_mask, loss_mask [c] or [n];
///           advantages and per-token fields a number, [c] or [n]; routed_experts [n or n-1, L, K]
/// units     masks 0 or 1 (zeros inside a completion are tool or environment tokens)
/// alias     the memory must live until the chunk that holds the item has been written
/// specials  lengths are those of the id arrays, never a mask's sum; p = 0, c = 0 and n = 0 are legal;
///           advantages that are absent are 0
/// source    google/tunix TrainExample; spec/packing.md 1.1
struct Rollout {
  std::span<const std::int32_t> prompt_ids = {};
  std::span<const std::int32_t> completion_ids = {};
  std::optional<std::span<const float>> completion_mask = {};
  std::optional<std::span<const float>> action_mask = {};
  std::optional<std::span<const float>> loss_mask = {};
  TokenValues advantages = {};
  PerTokenArray<TokenValues> per_token = {};
  std::optional<RoutedExperts> routed_experts = {};
  std::optional<std::int64_t> policy_version =
      {};  ///< metadata; reached through Segment::item_index

  [[nodiscard]] constexpr std::int64_t prompt_length() const {
    return static_cast<std::int64_t>(prompt_ids.size());
  }
  [[nodiscard]] constexpr std::int64_t completion_length() const {
    return static_cast<std::int64_t>(completion_ids.size());
  }
  [[nodiscard]] constexpr std::int64_t length() const {
    return prompt_length() + completion_length();
  }
};

/// The item's completion mask, [c], as the rule above says.
///
/// shapes    mask [c]; the item has been validated
inline void write_completion_mask(const Rollout& item, std::span<float> mask) {
  const std::size_t completion = mask.size();
  const auto copy = [mask](std::span<const float> values) {
    std::copy(values.begin(), values.end(), mask.begin());
  };
  if (item.action_mask && item.loss_mask) {
    const auto action = item.action_mask->last(completion);
    const auto loss = item.loss_mask->last(completion);
    std::transform(action.begin(), action.end(), loss.begin(), mask.begin(),
                   [](float a, float b) { return a * b; });
  } else if (item.completion_mask) {
    copy(*item.completion_mask);
  } else if (item.action_mask || item.loss_mask) {
    copy((item.action_mask ? *item.action_mask : *item.loss_mask).last(completion));
  } else {
    std::fill(mask.begin(), mask.end(), 1.0F);
  }
}

/// Tokens of the item whose completion mask is above 0.
[[nodiscard]] inline std::int64_t loss_token_count(const Rollout& item) {
  std::vector<float> mask(item.completion_ids.size());
  write_completion_mask(item, mask);
  return std::count_if(mask.begin(), mask.end(), [](float value) { return value > 0; });
}

namespace detail {

/// Refuses arrays of one item; its name goes into the message, and is only put together then.
class ItemCheck {
 public:
  ItemCheck(std::string_view where, std::int64_t index, const Rollout& item)
      : where_(where), index_(index), item_(item) {}

  void length(std::int64_t budget) const {
    if (item_.length() > budget) {
      fail(where_, argument("length"), item_.length(),
           "must not exceed options.budget (" + std::to_string(budget) + ")");
    }
  }

  /// One number a completion token, and nothing else.
  void completion_array(std::string_view field, std::span<const float> values) const {
    if (!is_length(values, item_.completion_length())) {
      fail(where_, argument(field) + ".size", values.size(),
           "must be the completion's length (" + std::to_string(item_.completion_length()) + ")");
    }
  }

  /// The same, or one number a token of the item.
  void token_array(std::string_view field, std::span<const float> values) const {
    if (!is_length(values, item_.completion_length()) && !is_length(values, item_.length())) {
      fail(where_, argument(field) + ".size", values.size(),
           "must be the completion's length (" + std::to_string(item_.completion_length()) +
               ") or the item's (" + std::to_string(item_.length()) + ")");
    }
  }

  void token_values(std::string_view field, const TokenValues& values) const {
    if (values.is_given() && !values.is_scalar()) {
      token_array(field, values.values());
    }
  }

  void routing(const RoutedExperts& routing) const {
    if (routing.layers < 1) {
      fail(where_, argument("routed_experts.layers"), routing.layers, "must be >= 1");
    }
    if (routing.top_k < 1) {
      fail(where_, argument("routed_experts.top_k"), routing.top_k, "must be >= 1");
    }
    const std::int64_t missing = item_.length() - routing.tokens;
    if (routing.tokens < 0 || missing < 0 || missing > 1) {
      fail(where_, argument("routed_experts.tokens"), routing.tokens,
           "must be the item's length (" + std::to_string(item_.length()) +
               ") or one less, and >= 0");
    }
    if (routing.tokens > std::numeric_limits<std::int64_t>::max() / routing.per_token()) {
      fail(where_, argument("routed_experts.ids.size"), routing.ids.size(),
           "must equal tokens * layers * top_k, which are beyond I64");
    }
    const std::int64_t ids = routing.tokens * routing.per_token();
    if (!std::cmp_equal(routing.ids.size(), ids)) {
      fail(where_, argument("routed_experts.ids.size"), routing.ids.size(),
           "must equal tokens * layers * top_k (" + std::to_string(ids) + ")");
    }
  }

 private:
  [[nodiscard]] static bool is_length(std::span<const float> values, std::int64_t length) {
    return std::cmp_equal(values.size(), length);
  }
  [[nodiscard]] std::string argument(std::string_view field) const {
    return element_name("items", index_) + "." + std::string(field);
  }

  std::string_view where_;
  std::int64_t index_;
  const Rollout& item_;
};

}  // namespace detail

/// Refuses an item whose arrays do not fit its lengths or which is longer than a row; it is items[index]
/// in the message.
///
/// throws    Error for: n > budget (items are never cut), a mask, advantages or per-token array that is
///           neither [c] nor, where that is legal, [n], routed tokens other than n or n - 1, layers or
///           top_k < 1, a number of routed ids other than tokens * layers * top_k
inline void validate(std::string_view where, std::int64_t index, const Rollout& item,
                     std::int64_t budget) {
  const detail::ItemCheck check(where, index, item);
  check.length(budget);
  if (item.completion_mask) {
    check.completion_array("completion_mask", *item.completion_mask);
  }
  if (item.action_mask) {
    check.token_array("action_mask", *item.action_mask);
  }
  if (item.loss_mask) {
    check.token_array("loss_mask", *item.loss_mask);
  }
  check.token_values("advantages", item.advantages);
  for (const PerTokenField field : per_token_fields) {
    check.token_values(name(field), item.per_token[field]);
  }
  if (item.routed_experts) {
    check.routing(*item.routed_experts);
  }
}

}  // namespace heddle::packing

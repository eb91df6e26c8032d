#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "heddle/packing/rollout.hpp"
#include "support/random.hpp"

namespace heddle::test {

/// A rollout that owns its arrays, for items made up in a test.
struct OwnedRollout {
  std::vector<std::int32_t> prompt_ids;
  std::vector<std::int32_t> completion_ids;
  std::optional<std::vector<float>> completion_mask;
  std::optional<std::vector<float>> action_mask;
  std::optional<std::vector<float>> loss_mask;
  /// One number stands for itself where `scalar` says so.
  struct Values {
    std::vector<float> numbers;
    bool scalar = false;
  };
  std::optional<Values> advantages;
  packing::PerTokenArray<std::optional<Values>> per_token;
  std::vector<std::int16_t> routed;
  std::int64_t routed_tokens = 0;
  std::int32_t layers = 0;
  std::int32_t top_k = 0;

  [[nodiscard]] std::int64_t length() const {
    return static_cast<std::int64_t>(prompt_ids.size() + completion_ids.size());
  }

  [[nodiscard]] packing::Rollout view() const {
    packing::Rollout item{.prompt_ids = prompt_ids, .completion_ids = completion_ids};
    item.completion_mask = span_of(completion_mask);
    item.action_mask = span_of(action_mask);
    item.loss_mask = span_of(loss_mask);
    item.advantages = values_of(advantages);
    for (const packing::PerTokenField field : packing::per_token_fields) {
      item.per_token[field] = values_of(per_token[field]);
    }
    if (layers > 0) {
      item.routed_experts = packing::RoutedExperts{
          .ids = routed, .tokens = routed_tokens, .layers = layers, .top_k = top_k};
    }
    return item;
  }

  /// What the packed row must show of `values` on token `t` of the item, by the definition.
  [[nodiscard]] float expected_value(const std::optional<Values>& values, std::int64_t t) const {
    const auto prompt = static_cast<std::int64_t>(prompt_ids.size());
    if (!values || t < prompt) {
      return 0;
    }
    if (values->scalar) {
      return values->numbers[0];
    }
    const bool whole_item = std::cmp_equal(values->numbers.size(), length());
    return values->numbers[static_cast<std::size_t>(whole_item ? t : t - prompt)];
  }

  [[nodiscard]] float expected_mask(std::int64_t t) const {
    const auto prompt = static_cast<std::int64_t>(prompt_ids.size());
    if (t < prompt) {
      return 0;
    }
    const auto at = [&](const std::optional<std::vector<float>>& mask) {
      const bool whole_item = std::cmp_equal(mask->size(), length());
      return (*mask)[static_cast<std::size_t>(whole_item ? t : t - prompt)];
    };
    if (action_mask && loss_mask) {
      return at(action_mask) * at(loss_mask);
    }
    return completion_mask ? at(completion_mask)
           : action_mask   ? at(action_mask)
           : loss_mask     ? at(loss_mask)
                           : 1.0F;
  }

 private:
  static std::optional<std::span<const float>> span_of(
      const std::optional<std::vector<float>>& values) {
    return values ? std::optional<std::span<const float>>(*values) : std::nullopt;
  }
  static packing::TokenValues values_of(const std::optional<Values>& values) {
    if (!values) {
      return {};
    }
    return values->scalar ? packing::TokenValues(values->numbers[0])
                          : packing::TokenValues(std::span<const float>(values->numbers));
  }
};

[[nodiscard]] inline std::vector<packing::Rollout> views(const std::vector<OwnedRollout>& items) {
  std::vector<packing::Rollout> result;
  for (const OwnedRollout& item : items) {
    result.push_back(item.view());
  }
  return result;
}

/// An item of plain tokens, prompt and completion.
[[nodiscard]] inline OwnedRollout plain_item(std::int64_t prompt, std::int64_t completion,
                                             std::int32_t first_id = 1000) {
  OwnedRollout item;
  for (std::int64_t t = 0; t < prompt + completion; ++t) {
    (t < prompt ? item.prompt_ids : item.completion_ids)
        .push_back(first_id + static_cast<std::int32_t>(t));
  }
  return item;
}

struct RandomItems {
  std::int64_t count = 0;
  std::int64_t longest = 0;
  bool all_fields = false;  ///< every per-token field, or none
  std::int32_t layers = 0;  ///< 0: no routing
  std::int32_t top_k = 0;
};

/// Items in every form the packer takes: lengths of 0 and of whole rows, masks of each kind, values as
/// a number, [c] and [n], routing of n, n - 1 and no tokens.
[[nodiscard]] inline std::vector<OwnedRollout> random_items(Random& random,
                                                            const RandomItems& wanted) {
  std::vector<OwnedRollout> items;
  for (std::int64_t i = 0; i < wanted.count; ++i) {
    const std::int64_t length = random.chance(0.1)    ? 0
                                : random.chance(0.05) ? wanted.longest
                                                      : random.integer(1, wanted.longest);
    const std::int64_t prompt = random.chance(0.1)   ? 0
                                : random.chance(0.1) ? length
                                                     : random.integer(0, length);
    OwnedRollout item = plain_item(prompt, length - prompt, static_cast<std::int32_t>(1000 * i));
    const auto numbers = [&](bool whole_item) {
      return random.normals<float>(whole_item ? length : length - prompt);
    };
    const auto mask = [&](bool whole_item) {
      std::vector<float> values = numbers(whole_item);
      for (float& value : values) {
        value = value > 0 ? 1.0F : 0.0F;
      }
      return values;
    };
    const auto values = [&]() -> OwnedRollout::Values {
      if (random.chance(0.3)) {
        return {.numbers = random.normals<float>(1), .scalar = true};
      }
      return {.numbers = numbers(random.chance(0.5)), .scalar = false};
    };
    if (random.chance(0.5)) {
      item.completion_mask = mask(false);
    }
    if (random.chance(0.3)) {
      item.action_mask = mask(random.chance(0.5));
    }
    if (random.chance(0.3)) {
      item.loss_mask = mask(random.chance(0.5));
    }
    if (random.chance(0.9)) {
      item.advantages = values();
    }
    if (wanted.all_fields && length > 0) {
      for (const packing::PerTokenField field : packing::per_token_fields) {
        item.per_token[field] = values();
      }
    }
    if (wanted.layers > 0 && random.chance(0.7)) {
      item.layers = wanted.layers;
      item.top_k = wanted.top_k;
      item.routed_tokens = length > 0 && random.chance(0.5) ? length - 1 : length;
      for (std::int64_t id = 0; id < item.routed_tokens * wanted.layers * wanted.top_k; ++id) {
        item.routed.push_back(static_cast<std::int16_t>(random.integer(0, 511)));
      }
    }
    items.push_back(std::move(item));
  }
  return items;
}

}  // namespace heddle::test

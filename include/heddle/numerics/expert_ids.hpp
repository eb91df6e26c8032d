#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heddle/core/error.hpp"

namespace heddle::numerics {

/// Who each token is sent to in each layer of a run.
///
/// shapes    ids [layers, tokens, top_k], -1 where a token is routed nowhere
struct ExpertIds {
  std::int64_t layers = 0;
  std::int64_t tokens = 0;
  std::int64_t top_k = 0;
  std::span<const std::int32_t> ids = {};

  void validate(std::string_view where, std::string_view argument) const {
    require(layers >= 0, where, member_name(argument, "layers"), layers, "must be >= 0");
    require(tokens >= 0, where, member_name(argument, "tokens"), tokens, "must be >= 0");
    require(top_k >= 0, where, member_name(argument, "top_k"), top_k, "must be >= 0");
    require_equal(where, member_name(argument, "ids.size"), ids.size(), "layers * tokens * top_k",
                  layers * tokens * top_k);
  }

  [[nodiscard]] std::span<const std::int32_t> of(std::int64_t layer, std::int64_t token) const {
    return ids.subspan(static_cast<std::size_t>((layer * tokens + token) * top_k),
                       static_cast<std::size_t>(top_k));
  }
};

/// A token whose experts are others in the two runs, at the first layer where they are.
struct RoutedElsewhere {
  std::int64_t token = 0;
  std::int64_t layer = 0;

  friend constexpr bool operator==(const RoutedElsewhere&, const RoutedElsewhere&) = default;
};

/// The tokens that two runs send to different sets of experts, in token order. A near tie between the
/// last expert that is taken and the first that is not falls either way by rounding alone; the order of
/// those taken is none of its matter.
///
/// throws    Error for extents that differ or do not fit the ids
[[nodiscard]] inline std::vector<RoutedElsewhere> routed_elsewhere(const ExpertIds& baseline,
                                                                   const ExpertIds& candidate) {
  constexpr const char* where = "numerics::routed_elsewhere";
  baseline.validate(where, "baseline");
  candidate.validate(where, "candidate");
  require_equal(where, "candidate.layers", candidate.layers, "baseline.layers", baseline.layers);
  require_equal(where, "candidate.tokens", candidate.tokens, "baseline.tokens", baseline.tokens);
  require_equal(where, "candidate.top_k", candidate.top_k, "baseline.top_k", baseline.top_k);
  const auto sorted = [](std::span<const std::int32_t> ids) {
    std::vector<std::int32_t> copy(ids.begin(), ids.end());
    std::ranges::sort(copy);
    return copy;
  };
  std::vector<RoutedElsewhere> found;
  for (std::int64_t token = 0; token < baseline.tokens; ++token) {
    for (std::int64_t layer = 0; layer < baseline.layers; ++layer) {
      const auto b = baseline.of(layer, token);
      const auto c = candidate.of(layer, token);
      if (!std::ranges::equal(b, c) && sorted(b) != sorted(c)) {
        found.push_back({.token = token, .layer = layer});
        break;
      }
    }
  }
  return found;
}

/// How the tokens of a run lie in rows, and rows in documents.
///
/// shapes    segment_ids [tokens], 0 is padding, or empty: each row is one document
struct TokenLayout {
  std::int64_t tokens = 0;
  std::int64_t row_tokens = 0;
  std::int64_t layers = 0;
  std::span<const std::int32_t> segment_ids = {};
};

/// Which entries of per-token results (log-prob and entropy, entry t for token t given those before it)
/// such tokens reach: their own and the next, which is scored from theirs, and from every layer but the
/// last, by the recurrence of the layers above, all later ones of their document.
///
/// shapes    result [tokens], 1 where reached
/// throws    Error for row_tokens that do not divide tokens, another number of segment_ids, a token or
///           layer outside its range
[[nodiscard]] inline std::vector<std::uint8_t> reached_entries(
    std::span<const RoutedElsewhere> elsewhere, const TokenLayout& layout) {
  constexpr const char* where = "numerics::reached_entries";
  const auto [tokens, row_tokens, layers, segment_ids] = layout;
  require(tokens >= 0, where, "layout.tokens", tokens, "must be >= 0");
  require(row_tokens >= 1 && tokens % row_tokens == 0, where, "layout.row_tokens", row_tokens,
          "must be >= 1 and divide tokens (" + std::to_string(tokens) + ")");
  if (!segment_ids.empty()) {
    require_equal(where, "layout.segment_ids.size", segment_ids.size(), "tokens", tokens);
  }
  std::vector<std::uint8_t> reached(static_cast<std::size_t>(tokens), 0);
  for (std::size_t i = 0; i < elsewhere.size(); ++i) {
    const auto [token, layer] = elsewhere[i];
    require(token >= 0 && token < tokens, where, element_name("elsewhere", i) + ".token", token,
            "must be in [0, tokens)");
    require(layer >= 0 && layer < layers, where, element_name("elsewhere", i) + ".layer", layer,
            "must be in [0, layers)");
    const std::int64_t row_end = (token / row_tokens + 1) * row_tokens;
    const std::int64_t end = layer == layers - 1 ? std::min(token + 2, row_end) : row_end;
    for (std::int64_t t = token; t < end; ++t) {
      const auto at = static_cast<std::size_t>(t);
      if (!segment_ids.empty() && segment_ids[at] != segment_ids[static_cast<std::size_t>(token)]) {
        break;
      }
      reached[at] = 1;
    }
  }
  return reached;
}

}  // namespace heddle::numerics

#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "heddle/core/error.hpp"

namespace heddle::moe {

/// What an expert id says of a slot that is routed nowhere: excluded padding.
inline constexpr std::int32_t unrouted = -1;

/// Extents of the router. Slot t*K + k is the k-th choice of token t.
struct RouterDims {
  std::int64_t tokens = 0;   ///< T
  std::int64_t experts = 0;  ///< E
  std::int64_t top_k = 0;    ///< K, experts a token is sent to

  [[nodiscard]] std::int64_t slots() const { return tokens * top_k; }

  /// Throws Error for tokens < 0, experts < 1, top_k outside [1, experts], more slots than an int32
  /// can number.
  void validate(std::string_view where) const {
    require(tokens >= 0, where, "dims.tokens", tokens, "must be >= 0");
    require(experts >= 1, where, "dims.experts", experts, "must be >= 1");
    require(experts <= std::numeric_limits<std::int32_t>::max(), where, "dims.experts", experts,
            "must be at most 2147483647");
    require(top_k >= 1, where, "dims.top_k", top_k, "must be >= 1");
    if (top_k > experts) {
      fail(where, "dims.top_k", top_k,
           "must be at most dims.experts (" + std::to_string(experts) + ")");
    }
    require(tokens <= std::numeric_limits<std::int32_t>::max() / top_k, where, "dims.tokens",
            tokens, "tokens * top_k must be at most 2147483647");
  }
};

/// Extents of one routed layer. Gate columns come before up columns in every wi, so it is 2F wide.
struct Dims {
  std::int64_t tokens = 0;         ///< T
  std::int64_t hidden = 0;         ///< D
  std::int64_t experts = 0;        ///< E
  std::int64_t top_k = 0;          ///< K
  std::int64_t expert_hidden = 0;  ///< F, width of each expert's activation
  std::int64_t shared_hidden = 0;  ///< Fs, the same of the shared expert; 0: there is none

  [[nodiscard]] RouterDims router() const {
    return {.tokens = tokens, .experts = experts, .top_k = top_k};
  }
  [[nodiscard]] std::int64_t slots() const { return tokens * top_k; }
  [[nodiscard]] bool has_shared_expert() const { return shared_hidden > 0; }

  /// Throws Error for what RouterDims refuses, hidden or expert_hidden < 1, shared_hidden < 0.
  void validate(std::string_view where) const {
    router().validate(where);
    require(hidden >= 1, where, "dims.hidden", hidden, "must be >= 1");
    require(expert_hidden >= 1, where, "dims.expert_hidden", expert_hidden, "must be >= 1");
    require(shared_hidden >= 0, where, "dims.shared_hidden", shared_hidden, "must be >= 0");
  }
};

}  // namespace heddle::moe

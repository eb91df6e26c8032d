#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "heddle/core/error.hpp"
#include "heddle/head/options.hpp"

/// The next-token shift of a packed row. Two frames: in the token frame entry t speaks of token t; in
/// the hidden frame entry j speaks of what hidden state j predicts, token j + 1. A sharded head shifts
/// whole rows to the hidden frame before it cuts them, so that no rank needs its neighbour's tokens.
namespace heddle::head {

/// One packed row.
///
/// shapes    each [tokens]
/// specials  segment_ids: 0 is padding or an alignment gap; segment_positions, the position of a token
///           in its document, may be empty: then a document is told by its id alone
struct PackedRow {
  std::span<const std::int32_t> token_ids;
  std::span<const std::int32_t> segment_ids;
  std::span<const std::int32_t> segment_positions = {};
};

/// A row's targets in the hidden frame: what Inputs::target_ids and Inputs::active are made of.
///
/// shapes    each [tokens]
struct Targets {
  std::span<std::int32_t> target_ids;
  std::span<std::uint8_t> active;
};

namespace detail {

inline void require_valid(std::string_view where, std::span<const std::int32_t> segment_ids,
                          std::span<const std::int32_t> segment_positions) {
  for (std::size_t t = 0; t < segment_ids.size(); ++t) {
    if (segment_ids[t] < 0) [[unlikely]] {
      fail(where, element_name("segment_ids", t), segment_ids[t], "must be >= 0");
    }
  }
  if (!segment_positions.empty()) {
    require_equal(where, "segment_positions.size", segment_positions.size(), "segment_ids.size",
                  segment_ids.size());
  }
}

/// Token t follows token t - 1 in the same document, so that hidden state t - 1 speaks of it.
[[nodiscard]] inline bool is_scored(std::span<const std::int32_t> segment_ids,
                                    std::span<const std::int32_t> segment_positions,
                                    std::size_t t) {
  return t >= 1 && segment_ids[t] != 0 && segment_ids[t] == segment_ids[t - 1] &&
         (segment_positions.empty() ||
          std::int64_t{segment_positions[t]} == std::int64_t{segment_positions[t - 1]} + 1);
}

}  // namespace detail

/// Which tokens of a row have a score: those after the first of their document.
///   scored[t] = t >= 1 and segment_ids[t] != 0 and segment_ids[t] = segment_ids[t - 1]
///               and segment_positions[t] = segment_positions[t - 1] + 1
///
/// shapes    segment_ids, segment_positions (or empty), scored: one row, [tokens]
/// writes    all of scored, 0 or 1
/// specials  the rule asks nothing of where a row is padded, so a row scores the same under any; a
///           document without a prompt has no score for its first token, wherever it stands
/// throws    Error for lengths that differ, a negative segment id
/// source    spec/head.md 2
inline void scored_tokens(std::span<const std::int32_t> segment_ids,
                          std::span<const std::int32_t> segment_positions,
                          std::span<std::uint8_t> scored) {
  constexpr const char* where = "head::scored_tokens";
  detail::require_valid(where, segment_ids, segment_positions);
  require_equal(where, "scored.size", scored.size(), "segment_ids.size", segment_ids.size());
  for (std::size_t t = 0; t < scored.size(); ++t) {
    scored[t] = detail::is_scored(segment_ids, segment_positions, t) ? 1 : 0;
  }
}

/// A row's targets in the hidden frame.
///   active[j] = scored(j + 1), target_ids[j] = token_ids[j + 1] where active; the last state has none
///
/// shapes    row as PackedRow says, targets [tokens]: one row
/// writes    all of both targets; target_ids is 0 where inactive, whatever id stands there
/// alias     targets disjoint from the row
/// throws    Error for lengths that differ, a negative segment id
/// source    spec/head.md 2
inline void shift_targets(const PackedRow& row, const Targets& targets) {
  constexpr const char* where = "head::shift_targets";
  const std::size_t tokens = row.token_ids.size();
  require_equal(where, "segment_ids.size", row.segment_ids.size(), "token_ids.size", tokens);
  detail::require_valid(where, row.segment_ids, row.segment_positions);
  require_equal(where, "target_ids.size", targets.target_ids.size(), "token_ids.size", tokens);
  require_equal(where, "active.size", targets.active.size(), "token_ids.size", tokens);
  for (std::size_t j = 0; j < tokens; ++j) {
    const bool active =
        j + 1 < tokens && detail::is_scored(row.segment_ids, row.segment_positions, j + 1);
    targets.active[j] = active ? 1 : 0;
    targets.target_ids[j] = active ? row.token_ids[j + 1] : 0;
  }
}

/// Scores from the hidden frame to the token frame: out[t] = values[t - 1] where scored, else 0.
///
/// shapes    values, scored, out: one row, [tokens]
/// writes    all of out
/// alias     out disjoint from values
/// specials  values[t - 1] is not read where t is not scored
/// throws    Error for lengths that differ
template <class T>
void to_token_frame(std::type_identity_t<std::span<const T>> values,
                    std::span<const std::uint8_t> scored, std::span<T> out) {
  constexpr const char* where = "head::to_token_frame";
  require_equal(where, "scored.size", scored.size(), "values.size", values.size());
  require_equal(where, "out.size", out.size(), "values.size", values.size());
  for (std::size_t t = 0; t < out.size(); ++t) {
    out[t] = t >= 1 && scored[t] != 0 ? values[t - 1] : T(0);
  }
}

/// Cotangents, masks, advantages from the token frame to the hidden frame:
/// out[j] = values[j + 1] where token j + 1 is scored, else 0.
///
/// shapes    values, scored, out: one row, [tokens]
/// writes    all of out
/// alias     out disjoint from values
/// specials  values[t] is not read where t is not scored: what stands there is dropped by selection,
///           since NaN * 0 is NaN
/// throws    Error for lengths that differ
template <class T>
void to_hidden_frame(std::type_identity_t<std::span<const T>> values,
                     std::span<const std::uint8_t> scored, std::span<T> out) {
  constexpr const char* where = "head::to_hidden_frame";
  require_equal(where, "scored.size", scored.size(), "values.size", values.size());
  require_equal(where, "out.size", out.size(), "values.size", values.size());
  for (std::size_t j = 0; j < out.size(); ++j) {
    const bool active = j + 1 < out.size() && scored[j + 1] != 0;
    out[j] = active ? values[j + 1] : T(0);
  }
}

/// The mask of a loss over a row's tokens.
///   LossMask::scored: completion and scored; LossMask::reference: completion
///
/// shapes    completion_mask, scored, out: one row, [tokens]
/// writes    all of out, 0 or 1
/// alias     out may be the very span of completion_mask
/// specials  under LossMask::reference a first token without a prompt enters with the log-prob 0 that
///           it was given, in numerator and denominator: parity with trainers that do so, no more
/// throws    Error for lengths that differ, an unknown policy
/// source    spec/head.md 2
inline void loss_mask(std::span<const std::uint8_t> completion_mask,
                      std::span<const std::uint8_t> scored, LossMask policy,
                      std::span<std::uint8_t> out) {
  constexpr const char* where = "head::loss_mask";
  require_equal(where, "scored.size", scored.size(), "completion_mask.size",
                completion_mask.size());
  require(policy == LossMask::scored || policy == LossMask::reference, where, "policy", policy,
          "must be scored or reference");
  require_equal(where, "out.size", out.size(), "completion_mask.size", completion_mask.size());
  for (std::size_t t = 0; t < out.size(); ++t) {
    out[t] = completion_mask[t] != 0 && (policy == LossMask::reference || scored[t] != 0) ? 1 : 0;
  }
}

}  // namespace heddle::head

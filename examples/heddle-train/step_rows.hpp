#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heddle-train/model.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/loss/grpo.hpp"
#include "heddle/packing/pack.hpp"
#include "support/rollout_file.hpp"

namespace heddle::train {

/// What a completion token counts for in the table's log-probs.
enum class Outcome : std::uint8_t { none, rewarded, unrewarded };

/// A step's rollouts as packed rows, with what the loss reads, in the token frame.
///
/// shapes    arrays [rows, tokens] row after row; forced_experts one [rows * tokens, K] a layer, or none
template <Accumulator A>
struct StepRows {
  std::int64_t rows = 0;
  std::int64_t tokens = 0;       ///< positions of a row
  std::int64_t real_tokens = 0;  ///< of all rows
  std::vector<std::int32_t> token_ids;
  std::vector<std::int32_t> segment_ids;
  std::vector<std::int32_t> segment_positions;
  std::vector<std::uint8_t> mask;  ///< completion tokens of the loss that have a score
  std::vector<A> advantages;
  std::vector<A> old_logps;      ///< empty where the rollouts bring none
  std::vector<Outcome> outcome;  ///< of the tokens of the mask
  std::vector<std::vector<std::int32_t>> forced_experts;
  std::vector<std::vector<ConstMatrixView<std::int32_t>>> forced_views;  ///< [rows][layers]
  loss::MaskCounts counts;
  std::int64_t busiest_tiles = 0;  ///< largest over rows, forward, pad-aware

  template <class T>
  [[nodiscard]] std::span<T> row(std::vector<T>& values, std::int64_t index) const {
    return std::span<T>(values).subspan(static_cast<std::size_t>(index * tokens),
                                        static_cast<std::size_t>(tokens));
  }
  template <class T>
  [[nodiscard]] std::span<const T> row(const std::vector<T>& values, std::int64_t index) const {
    return std::span<const T>(values).subspan(static_cast<std::size_t>(index * tokens),
                                              static_cast<std::size_t>(tokens));
  }

  [[nodiscard]] RowInputs inputs(std::int64_t index) const {
    RowInputs inputs{.token_ids = row(token_ids, index),
                     .segment_ids = row(segment_ids, index),
                     .segment_positions = row(segment_positions, index),
                     .forced_experts = {}};
    if (!forced_views.empty()) {
      inputs.forced_experts = forced_views[static_cast<std::size_t>(index)];
    }
    return inputs;
  }
};

/// Packs rollouts records[chosen[0]], records[chosen[1]], ... `advantages` are those of records that
/// carry none, one a record.
///
/// throws    Error as packing::pack
template <Accumulator A>
[[nodiscard]] StepRows<A> pack_step(std::span<const examples::RolloutRecord> records,
                                    std::span<const std::size_t> chosen,
                                    std::span<const double> advantages,
                                    const packing::PackOptions& options);

}  // namespace heddle::train

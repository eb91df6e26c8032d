#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/packing/rollout.hpp"

namespace heddle::examples {

/// Ids that text is made of: its UTF-8 bytes are 0-255.
inline constexpr std::int32_t bos_id = 256;
inline constexpr std::int32_t eos_id = 257;
inline constexpr std::int32_t pad_id = 258;

/// One number for all completion tokens, an array, or nothing.
struct RecordedValues {
  std::optional<float> scalar;
  std::optional<std::vector<float>> array;

  [[nodiscard]] packing::TokenValues view() const;
};

struct RecordedRouting {
  std::vector<std::int16_t> ids;  // [tokens, layers, top_k]
  std::int64_t tokens = 0;
  std::int32_t layers = 0;
  std::int32_t top_k = 0;
};

/// One line of a rollout file, owning what packing::Rollout views.
struct RolloutRecord {
  std::vector<std::int32_t> prompt_ids;
  std::vector<std::int32_t> completion_ids;
  std::optional<std::vector<float>> completion_mask;
  std::optional<std::vector<float>> action_mask;
  std::optional<std::vector<float>> loss_mask;
  RecordedValues advantages;
  packing::PerTokenArray<RecordedValues> per_token;
  std::optional<RecordedRouting> routed_experts;
  std::optional<std::int64_t> policy_version;
  std::optional<double> reward;
  std::optional<std::string> group;  ///< as JSON, so that 1 and "1" stay apart
  std::int64_t line = 0;             ///< counted from 1

  /// Valid while this record lives where it is.
  [[nodiscard]] packing::Rollout view() const;
};

/// Rollouts from JSON lines: one object a line, blank lines skipped. `prompt` or `prompt_ids` and
/// `completion` or `completion_ids` are required; text becomes its UTF-8 bytes and nothing else. The
/// other members are those of packing::Rollout, `reward` and `group`, null like absent.
///
/// throws    UsageError "<path>:<line>: ..." for whatever is not so: no JSON, a member that is unknown,
///           missing, given twice or of the wrong type, both text and ids, ids below 0 or beyond I32,
///           numbers beyond F32 (F64 for reward), arrays whose length fits neither completion nor
///           item, routing that is not [tokens, layers, top_k] or whose layers and top_k change from
///           line to line; a file without any rollout
[[nodiscard]] std::vector<RolloutRecord> read_rollouts(const std::filesystem::path& path);

/// The same from text in memory; `where` stands for the path in messages.
[[nodiscard]] std::vector<RolloutRecord> parse_rollouts(std::string_view text,
                                                        const std::string& where);

/// Views of all records, in order.
[[nodiscard]] std::vector<packing::Rollout> views(std::span<const RolloutRecord> records);

/// Refuses ids that a model of `vocab_size` does not have.
void require_vocabulary(std::span<const RolloutRecord> records, std::int64_t vocab_size,
                        const std::string& where);

}  // namespace heddle::examples

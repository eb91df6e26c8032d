#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/packing/pack.hpp"
#include "heddle/packing/pack_options.hpp"
#include "heddle/packing/packed_chunk.hpp"
#include "heddle/packing/pad_position.hpp"
#include "heddle/packing/rollout.hpp"
#include "heddle/packing/sequence_packer.hpp"

namespace heddle::packing {

/// Tokens that an expert may take.
enum class ExpertCapacity {
  unlimited,  ///< dropless
  finite,     ///< a buffer that rows can overflow, in token order
};

/// Whether the router sees padding.
enum class PaddingRouting {
  excluded,  ///< positions of segment id 0 are routed nowhere
  routed,    ///< they compete for the experts' room
};

/// What a training job configures.
struct BatchAssemblerConfig {
  PackOptions pack = {};
  std::int64_t items_per_update = 0;
  std::int64_t max_prompt_length = 0;    ///< longest prompt the sampler is given
  std::int64_t max_response_length = 0;  ///< longest completion it may give
  ExpertCapacity expert_capacity = ExpertCapacity::unlimited;
  PaddingRouting padding_routing = PaddingRouting::excluded;
};

/// The pad_align that a job has which never asks for one.
inline constexpr std::int64_t default_pad_align = PackOptions{}.pad_align;

/// Refuses a job that would fail in hours, or whose setting would have no effect, before it starts. On
/// top of what a packer refuses:
///
///   max_prompt_length + max_response_length > budget
///   `end` with another pad_align than the default: the job would measure the default by accident
///   `start` or `auto`, padded: one item a row leaves nothing to move for the others
///   `start` or `auto`, pad_align >= budget: no row could ever move
///   `start` or `auto`, finite expert capacity with routed padding: leading padding comes first in token
///       order and would drive real tokens out
///
/// throws    Error as above, and for lengths < 0, lengths that are 0 both, items_per_update < 1
/// source    seed 0 (tunix#2913) for the refusals but the last; spec/packing.md 2.3, 3.1
inline void validate(std::string_view where, const BatchAssemblerConfig& config) {
  const PackOptions& options = config.pack;
  validate(where, options);
  require(config.items_per_update >= 1, where, "config.items_per_update", config.items_per_update,
          "must be >= 1");
  require(config.max_prompt_length >= 0, where, "config.max_prompt_length",
          config.max_prompt_length, "must be >= 0");
  require(config.max_response_length >= 0, where, "config.max_response_length",
          config.max_response_length, "must be >= 0");
  constexpr std::string_view both = "config.max_prompt_length + max_response_length";
  require(config.max_prompt_length > 0 || config.max_response_length > 0, where, both, 0,
          "must be >= 1");
  if (config.max_prompt_length > options.budget - config.max_response_length) {
    fail(where, both, config.max_prompt_length + config.max_response_length,
         "must not exceed options.budget (" + std::to_string(options.budget) + ")");
  }
  if (options.pad_position == PadPosition::end) {
    require(options.pad_align == default_pad_align, where, "options.pad_align", options.pad_align,
            "has no effect with pad_position=end");
    return;
  }
  const std::string position(name(options.pad_position));
  require(options.filling == RowFilling::packed, where, "options.pad_position", position,
          "rows of one padded item take end alone");
  if (options.pad_align >= options.budget) {
    fail(where, "options.pad_align", options.pad_align,
         "must be below options.budget (" + std::to_string(options.budget) +
             ") with pad_position=" + position + ", no row could move");
  }
  require(config.expert_capacity == ExpertCapacity::unlimited ||
              config.padding_routing == PaddingRouting::excluded,
          where, "config.padding_routing", "routed",
          "with finite expert capacity, pad_position=" + position +
              " needs padding excluded from routing");
}

/// Batches of a training job: the packed (or padded) form of the stream of rollouts, configured once.
/// Every path, the warm-up too, goes through the same options.
///
/// throws    Error for what validate(config) refuses, at construction; then as SequencePacker
/// source    google/tunix orchestrator's batch assembly; spec/packing.md 3.1
class BatchAssembler {
 public:
  explicit BatchAssembler(const BatchAssemblerConfig& config)
      : config_(checked(config)), packer_(config.pack, config.items_per_update) {}

  [[nodiscard]] const BatchAssemblerConfig& config() const { return config_; }

  /// See SequencePacker.
  template <class Use>
  void feed(std::span<const Rollout> items, const Use& use) {
    packer_.feed(items, use);
  }
  void finish() const { packer_.finish(); }

  /// A chunk full of made-up items of the job's greatest lengths, to run the first step's allocations and
  /// page faults on. It counts towards no update.
  [[nodiscard]] PackedChunk warm_up(ChunkBuffers& buffers) const {
    const std::vector<std::int32_t> prompt(static_cast<std::size_t>(config_.max_prompt_length), 0);
    const std::vector<std::int32_t> completion(
        static_cast<std::size_t>(config_.max_response_length), 0);
    const Rollout item{.prompt_ids = prompt, .completion_ids = completion};
    const std::int64_t a_row =
        config_.pack.budget / std::max<std::int64_t>(item.length(), 1);  // gaps not counted
    const std::vector<Rollout> items(static_cast<std::size_t>(config_.pack.pack_size * a_row),
                                     item);
    return pack_chunk(items, config_.pack, buffers).chunk;
  }

 private:
  static const BatchAssemblerConfig& checked(const BatchAssemblerConfig& config) {
    validate("packing::BatchAssembler", config);
    return config;
  }

  BatchAssemblerConfig config_;
  SequencePacker packer_;
};

}  // namespace heddle::packing

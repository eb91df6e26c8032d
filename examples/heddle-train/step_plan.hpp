#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/rollout_file.hpp"

namespace heddle::train {

/// Which rollouts each step takes: whole groups in file order, at least one, up to a number of
/// rollouts, round and round, and never a group twice in one step. A rollout without a group is one of
/// its own.
class StepPlan {
 public:
  StepPlan(std::span<const examples::RolloutRecord> records, std::int64_t rollouts_per_step);

  /// The next step's rollouts, by index, group after group.
  [[nodiscard]] std::vector<std::size_t> next();

  /// Groups by order of first appearance, their rollouts in file order.
  [[nodiscard]] const std::vector<std::vector<std::size_t>>& groups() const { return groups_; }

 private:
  std::vector<std::vector<std::size_t>> groups_;
  std::int64_t rollouts_per_step_;
  std::size_t next_group_ = 0;
};

/// An advantage for every rollout that the file gives none: its reward relative to its group's.
///
/// shapes    one a record; 0 where the record carries its own
/// throws    UsageError "<where>:<line>: ..." for a record with neither advantages nor reward and group,
///           a group of which some rollouts carry advantages and some do not, rewards whose spread is
///           beyond F64
[[nodiscard]] std::vector<double> group_advantages(
    std::span<const examples::RolloutRecord> records,
    const std::vector<std::vector<std::size_t>>& groups, const std::string& where);

/// Refuses what no step could use: a rollout longer than `budget`, a mask that holds something other
/// than 0 and 1, a per-token field that some rollouts with tokens carry and some do not.
///
/// throws    UsageError "<where>:<line>: ..."
void require_trainable(std::span<const examples::RolloutRecord> records, std::int64_t budget,
                       const std::string& where);

/// Refuses recorded routing that is not this model's.
void require_routing(std::span<const examples::RolloutRecord> records, std::int64_t layers,
                     std::int64_t experts_per_token, const std::string& where);

}  // namespace heddle::train

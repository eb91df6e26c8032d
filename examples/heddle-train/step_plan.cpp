#include "heddle-train/step_plan.hpp"

#include <cmath>
#include <map>
#include <optional>

#include "heddle/loss/grpo.hpp"
#include "support/usage_error.hpp"

namespace heddle::train {
namespace {

using examples::RolloutRecord;
using examples::UsageError;

std::string at_line(const std::string& where, const RolloutRecord& record) {
  return where + ":" + std::to_string(record.line) + ": ";
}

bool has_advantages(const RolloutRecord& record) {
  return record.advantages.view().is_given();
}

std::size_t length(const RolloutRecord& record) {
  return record.prompt_ids.size() + record.completion_ids.size();
}

}  // namespace

StepPlan::StepPlan(std::span<const RolloutRecord> records, std::int64_t rollouts_per_step)
    : rollouts_per_step_(rollouts_per_step) {
  std::map<std::string, std::size_t> group_of;
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (records[i].group) {
      const auto [known, added] = group_of.emplace(*records[i].group, groups_.size());
      if (!added) {
        groups_[known->second].push_back(i);
        continue;
      }
    }
    groups_.push_back({i});
  }
}

std::vector<std::size_t> StepPlan::next() {
  std::vector<std::size_t> taken;
  for (std::size_t count = 0; count < groups_.size(); ++count) {
    const std::vector<std::size_t>& group = groups_[next_group_];
    if (!taken.empty() && std::cmp_greater(taken.size() + group.size(), rollouts_per_step_)) {
      break;
    }
    taken.insert(taken.end(), group.begin(), group.end());
    next_group_ = (next_group_ + 1) % groups_.size();
  }
  return taken;
}

std::vector<double> group_advantages(std::span<const RolloutRecord> records,
                                     const std::vector<std::vector<std::size_t>>& groups,
                                     const std::string& where) {
  for (const RolloutRecord& record : records) {
    if (has_advantages(record)) {
      continue;
    }
    for (const char* missing :
         {record.reward ? nullptr : "reward", record.group ? nullptr : "group"}) {
      if (missing != nullptr) {
        throw UsageError(at_line(where, record) + missing +
                         " is missing: required where advantages are not given");
      }
    }
  }
  std::vector<double> advantages(records.size());
  for (const std::vector<std::size_t>& group : groups) {
    const bool given = has_advantages(records[group.front()]);
    std::vector<double> rewards;
    for (const std::size_t i : group) {
      if (has_advantages(records[i]) != given) {
        throw UsageError(at_line(where, records[i]) + "advantages " +
                         (given ? "are missing" : "are given") + ": must be as in line " +
                         std::to_string(records[group.front()].line) + " of the same group");
      }
      rewards.push_back(records[i].reward.value_or(0));
    }
    if (given) {
      continue;
    }
    const std::vector<std::int64_t> same(group.size(), 0);
    loss::advantages_of<double>(loss::AdvantageForm::group_relative, rewards, same, rewards);
    for (std::size_t k = 0; k < group.size(); ++k) {
      if (!std::isfinite(rewards[k])) {
        throw UsageError(at_line(where, records[group[k]]) +
                         "reward = " + error_text(*records[group[k]].reward) +
                         ": the rewards of its group are too far apart for an advantage");
      }
      advantages[group[k]] = rewards[k];
    }
  }
  return advantages;
}

void require_trainable(std::span<const RolloutRecord> records, std::int64_t budget,
                       const std::string& where) {
  for (const RolloutRecord& record : records) {
    if (std::cmp_greater(length(record), budget)) {
      throw UsageError(at_line(where, record) + "the rollout has " +
                       std::to_string(length(record)) + " tokens: must not exceed --budget (" +
                       std::to_string(budget) + ")");
    }
  }
  const auto check_mask = [&](const RolloutRecord& record, const char* name,
                              const std::optional<std::vector<float>>& mask) {
    for (std::size_t i = 0; mask && i < mask->size(); ++i) {
      if ((*mask)[i] != 0 && (*mask)[i] != 1) {
        throw UsageError(at_line(where, record) + element_name(name, i) + " = " +
                         error_text((*mask)[i]) + ": must be 0 or 1");
      }
    }
  };
  for (const RolloutRecord& record : records) {
    check_mask(record, "completion_mask", record.completion_mask);
    check_mask(record, "action_mask", record.action_mask);
    check_mask(record, "loss_mask", record.loss_mask);
  }
  for (const packing::PerTokenField field : packing::per_token_fields) {
    const RolloutRecord* first = nullptr;
    for (const RolloutRecord& record : records) {
      if (length(record) == 0) {
        continue;
      }
      first = first == nullptr ? &record : first;
      const bool given = first->per_token[field].view().is_given();
      if (record.per_token[field].view().is_given() != given) {
        throw UsageError(at_line(where, record) + std::string(packing::name(field)) +
                         (given ? " is missing" : " is given") + ": must be as in line " +
                         std::to_string(first->line) + ", in all rollouts or in none");
      }
    }
  }
}

void require_routing(std::span<const RolloutRecord> records, std::int64_t layers,
                     std::int64_t experts_per_token, const std::string& where) {
  for (const RolloutRecord& record : records) {
    const auto& routing = record.routed_experts;
    if (routing && (routing->layers != layers || routing->top_k != experts_per_token)) {
      throw UsageError(at_line(where, record) + "routed_experts has " +
                       std::to_string(routing->layers) + " layers of " +
                       std::to_string(routing->top_k) + " experts: the model has " +
                       std::to_string(layers) + " of " + std::to_string(experts_per_token));
    }
  }
}

}  // namespace heddle::train

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"

/// The clipped policy loss of GRPO and its relatives over packed rows, in the token frame, and its
/// gradient. A step of several micro-batches counts the masks of all its rows first (MaskCounts), then
/// takes each row's weights and loss under that one denominator; row losses and gradients just add.
namespace heddle::loss {

/// What a token of the mask weighs; c_s counts the mask in its segment, n counts segments with any.
enum class Aggregation {
  token_mean,                    ///< 1 / (mask count)
  sequence_mean_token_mean,      ///< 1 / (c_s n)
  sequence_mean_token_scale,     ///< 1 / max(norm n, 1)
  seq_mean_token_sum,            ///< 1 / n
  sequence_mean_token_sum_norm,  ///< 1 / norm, norm = n where it is not given
};

/// The term that keeps the policy near a reference, d = logp - ref_logp.
enum class KlForm {
  none,
  kl,          ///< d
  mse_kl,      ///< d^2 / 2
  low_var_kl,  ///< exp(-d) + d - 1
};

/// Whose log-ratio to the old policy is exponentiated and clipped.
enum class RatioLevel {
  token,     ///< each token's own
  sequence,  ///< its segment's mean, as a value; the gradient still flows token by token (gspo-token)
};

/// How rewards of a group become advantages.
enum class AdvantageForm {
  group_relative,  ///< (R - mean) / (standard deviation of n - 1 degrees of freedom + 1e-6)
  rloo,            ///< R - mean of the others
  drgrpo,          ///< R - mean
};

/// Where the log-ratio is cut before it is exponentiated; beyond it a token has no gradient.
inline constexpr double log_ratio_limit = 20;
/// The same for a segment's mean log-ratio, upwards only.
inline constexpr double sequence_log_ratio_limit = 10;
/// The largest weight that corrects for a sampler's log-probs.
inline constexpr double importance_weight_limit = 2;

/// The loss of one token, r = exp(logp - old_logp), A its advantage:
///   policy = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), for A < 0 at most -A dual_clip,
///   times its importance weight; loss = policy + beta kl
///
/// throws    validate: Error for clip_low outside [0, 1], clip_high < 0, dual_clip <= 1, beta < 0,
///           kl_clip or norm <= 0, anything not finite, norm missing where the aggregation needs one,
///           an unknown enum
/// source    spec/head.md 8; google/tunix grpo_loss_fn
struct GrpoOptions {
  double clip_low = 0.2;
  double clip_high = 0.2;
  std::optional<double> dual_clip = {};  ///< bound of the ratio under a negative advantage
  RatioLevel ratio = RatioLevel::token;
  KlForm kl = KlForm::none;
  double beta = 0.04;
  std::optional<double> kl_clip = {};  ///< the KL term is clipped to [-kl_clip, kl_clip]
  Aggregation aggregation = Aggregation::sequence_mean_token_mean;
  std::optional<double> norm =
      {};  ///< of sequence_mean_token_scale and sequence_mean_token_sum_norm

  void validate(std::string_view where) const {
    require(clip_low >= 0 && clip_low <= 1, where, "options.clip_low", clip_low,
            "must be in [0, 1]");
    require(clip_high >= 0 && std::isfinite(clip_high), where, "options.clip_high", clip_high,
            "must be >= 0 and finite");
    if (dual_clip) {
      require(*dual_clip > 1 && std::isfinite(*dual_clip), where, "options.dual_clip", *dual_clip,
              "must be > 1 and finite");
    }
    require(ratio == RatioLevel::token || ratio == RatioLevel::sequence, where, "options.ratio",
            ratio, "must be token or sequence");
    require(
        kl == KlForm::none || kl == KlForm::kl || kl == KlForm::mse_kl || kl == KlForm::low_var_kl,
        where, "options.kl", kl, "must be none, kl, mse_kl or low_var_kl");
    require(beta >= 0 && std::isfinite(beta), where, "options.beta", beta,
            "must be >= 0 and finite");
    if (kl_clip) {
      require(*kl_clip > 0 && std::isfinite(*kl_clip), where, "options.kl_clip", *kl_clip,
              "must be > 0 and finite");
    }
    require(aggregation == Aggregation::token_mean ||
                aggregation == Aggregation::sequence_mean_token_mean ||
                aggregation == Aggregation::sequence_mean_token_scale ||
                aggregation == Aggregation::seq_mean_token_sum ||
                aggregation == Aggregation::sequence_mean_token_sum_norm,
            where, "options.aggregation", aggregation,
            "must be token_mean, sequence_mean_token_mean, sequence_mean_token_scale, "
            "seq_mean_token_sum or sequence_mean_token_sum_norm");
    if (norm) {
      require(*norm > 0 && std::isfinite(*norm), where, "options.norm", *norm,
              "must be > 0 and finite");
    } else if (aggregation == Aggregation::sequence_mean_token_scale) {
      fail(where, "options.norm", nullptr, "required by sequence_mean_token_scale");
    }
  }
};

/// What the masks of rows count: all that a denominator needs to know of the rest of the step.
struct MaskCounts {
  std::int64_t tokens = 0;    ///< tokens of the mask
  std::int64_t segments = 0;  ///< segments with any of them

  friend constexpr MaskCounts operator+(MaskCounts a, MaskCounts b) {
    return {.tokens = a.tokens + b.tokens, .segments = a.segments + b.segments};
  }
  friend constexpr bool operator==(const MaskCounts&, const MaskCounts&) = default;
};

namespace detail {

/// Refuses negative segment ids, and a mask over padding, where there is no token to weigh.
inline void require_valid_mask(std::string_view where, std::span<const std::uint8_t> mask,
                               std::span<const std::int32_t> segment_ids) {
  require_equal(where, "segment_ids.size", segment_ids.size(), "mask.size", mask.size());
  for (std::size_t t = 0; t < mask.size(); ++t) {
    if (segment_ids[t] < 0) [[unlikely]] {
      fail(where, element_name("segment_ids", t), segment_ids[t], "must be >= 0");
    }
    if (mask[t] != 0 && segment_ids[t] == 0) [[unlikely]] {
      fail(where, element_name("mask", t), mask[t], "must be 0 where segment_ids is 0 (padding)");
    }
  }
}

/// Tokens of the mask in each segment that has any.
[[nodiscard]] inline std::unordered_map<std::int32_t, std::int64_t> segment_counts(
    std::span<const std::uint8_t> mask, std::span<const std::int32_t> segment_ids) {
  std::unordered_map<std::int32_t, std::int64_t> counts;
  for (std::size_t t = 0; t < mask.size(); ++t) {
    if (mask[t] != 0) {
      ++counts[segment_ids[t]];
    }
  }
  return counts;
}

}  // namespace detail

/// What one row's mask counts; a step's counts are the sum over its rows.
///
/// shapes    mask, segment_ids: one row, [tokens]; segment 0 is padding
/// throws    Error for lengths that differ, a negative segment id, a mask over padding
[[nodiscard]] inline MaskCounts count_mask(std::span<const std::uint8_t> mask,
                                           std::span<const std::int32_t> segment_ids) {
  detail::require_valid_mask("loss::count_mask", mask, segment_ids);
  MaskCounts counts;
  for (const auto& [segment, tokens] : detail::segment_counts(mask, segment_ids)) {
    counts.tokens += tokens;
    ++counts.segments;
  }
  return counts;
}

/// What one row's tokens weigh in the loss of the whole step: its denominator is already in.
///
/// shapes    mask, segment_ids, weights: one row, [tokens]
/// writes    all of weights, 0 off the mask
/// specials  nothing masked in: all 0, never 0 / 0
/// throws    Error for lengths that differ, a negative segment id, a mask over padding, counts below the
///           row's own, options
/// source    spec/head.md 8
inline void token_weights(const GrpoOptions& options, const MaskCounts& step,
                          std::span<const std::uint8_t> mask,
                          std::span<const std::int32_t> segment_ids, std::span<double> weights) {
  constexpr const char* where = "loss::token_weights";
  options.validate(where);
  detail::require_valid_mask(where, mask, segment_ids);
  const auto counts = detail::segment_counts(mask, segment_ids);
  const auto row_tokens =
      static_cast<std::int64_t>(std::ranges::count_if(mask, [](auto m) { return m != 0; }));
  require(step.tokens >= row_tokens, where, "step.tokens", step.tokens,
          "must count at least this row's mask");
  require(step.segments >= static_cast<std::int64_t>(counts.size()), where, "step.segments",
          step.segments, "must count at least this row's segments");
  require_equal(where, "weights.size", weights.size(), "mask.size", mask.size());

  // Trainers put a floor under the step's denominator. Counts of a row that has any token of the mask
  // are at least 1 and stand above it; a norm given by the caller may not.
  const auto tokens = static_cast<double>(step.tokens);
  const auto segments = static_cast<double>(step.segments);
  const auto denominator = [&](std::int32_t segment) {
    switch (options.aggregation) {
      case Aggregation::token_mean:
        return tokens;
      case Aggregation::sequence_mean_token_mean:
        return static_cast<double>(counts.at(segment)) * segments;
      case Aggregation::sequence_mean_token_scale:
        return std::max(*options.norm * segments, 1.0);
      case Aggregation::seq_mean_token_sum:
        return segments;
      case Aggregation::sequence_mean_token_sum_norm:
        return std::max(options.norm.value_or(segments), 1e-6);
    }
    fail(where, "options.aggregation", options.aggregation, "unknown");
  };
  for (std::size_t t = 0; t < mask.size(); ++t) {
    weights[t] = mask[t] != 0 ? 1 / denominator(segment_ids[t]) : 0;
  }
}

/// One row of a step.
///
/// shapes    each [tokens]; mask 0 or not; segment_ids 0 at padding
/// units     nats; weights as token_weights gives them
/// specials  entries off the mask are never read. Empty: old_logps (the policy itself, held constant:
///           every ratio is 1), ref_logps (then KlForm::none), importance_weights (all 1)
template <Accumulator A>
struct GrpoInputs {
  std::span<const A> logps;
  std::span<const A> old_logps = {};
  std::span<const A> ref_logps = {};
  std::span<const A> advantages;
  std::span<const A> importance_weights =
      {};  ///< of the policy term, constants: see importance_weights()
  std::span<const std::uint8_t> mask;
  std::span<const std::int32_t> segment_ids;
  std::span<const double> weights;
};

/// One row's share of the step's loss.
struct GrpoLoss {
  double policy = 0;
  double kl = 0;  ///< before beta
  double loss = 0;

  friend constexpr GrpoLoss operator+(GrpoLoss a, GrpoLoss b) {
    return {.policy = a.policy + b.policy, .kl = a.kl + b.kl, .loss = a.loss + b.loss};
  }
};

namespace detail {

struct TokenTerm {
  double value = 0;
  double d_logp = 0;
};

/// The clipped objective at a log-ratio. A ratio exactly on a bound counts as inside: the gradient of
/// the unclipped side holds there.
[[nodiscard]] inline TokenTerm policy_term(const GrpoOptions& options, double log_ratio,
                                           double advantage) {
  bool constant = false;
  if (options.ratio == RatioLevel::token) {
    constant = std::abs(log_ratio) > log_ratio_limit;
    log_ratio = std::clamp(log_ratio, -log_ratio_limit, log_ratio_limit);
  } else {
    constant = log_ratio > sequence_log_ratio_limit;
    log_ratio = std::min(log_ratio, sequence_log_ratio_limit);
  }
  const double ratio = std::exp(log_ratio);
  const double unclipped = -advantage * ratio;
  const double clipped =
      -advantage * std::clamp(ratio, 1 - options.clip_low, 1 + options.clip_high);
  TokenTerm term = {.value = unclipped, .d_logp = constant ? 0 : unclipped};
  if (clipped > unclipped) {
    term = {.value = clipped, .d_logp = 0};
  }
  if (options.dual_clip && advantage < 0) {
    const double bound = -advantage * *options.dual_clip;
    if (term.value > bound) {
      term = {.value = bound, .d_logp = 0};
    }
  }
  return term;
}

[[nodiscard]] inline TokenTerm kl_term(const GrpoOptions& options, double logp, double ref_logp) {
  const double difference = logp - ref_logp;
  TokenTerm term;
  switch (options.kl) {
    case KlForm::none:
      break;
    case KlForm::kl:
      term = {.value = difference, .d_logp = 1};
      break;
    case KlForm::mse_kl:
      term = {.value = difference * difference / 2, .d_logp = difference};
      break;
    case KlForm::low_var_kl:
      // expm1 keeps the digits of a small difference, where exp(-d) - 1 would cancel them.
      term = {.value = std::expm1(-difference) + difference, .d_logp = -std::expm1(-difference)};
      break;
  }
  if (options.kl_clip && std::abs(term.value) > *options.kl_clip) {
    term = {.value = std::copysign(*options.kl_clip, term.value), .d_logp = 0};
  }
  return term;
}

/// Every length must be that of `tokens`, which `tokens_name` names.
template <Accumulator A>
void require_valid(std::string_view where, const GrpoOptions& options, const GrpoInputs<A>& inputs,
                   std::string_view tokens_name, std::size_t tokens) {
  options.validate(where);
  const auto check = [&](std::string_view argument, std::size_t size) {
    require_equal(where, argument, size, tokens_name, tokens);
  };
  if (!inputs.old_logps.empty()) {
    check("inputs.old_logps.size", inputs.old_logps.size());
  }
  if (!inputs.ref_logps.empty()) {
    check("inputs.ref_logps.size", inputs.ref_logps.size());
  } else if (options.kl != KlForm::none && tokens > 0) {
    fail(where, "inputs.ref_logps", nullptr, "required by options.kl");
  }
  check("inputs.advantages.size", inputs.advantages.size());
  if (!inputs.importance_weights.empty()) {
    check("inputs.importance_weights.size", inputs.importance_weights.size());
  }
  check("inputs.mask.size", inputs.mask.size());
  check("inputs.segment_ids.size", inputs.segment_ids.size());
  require_valid_mask(where, inputs.mask, inputs.segment_ids);
  check("inputs.weights.size", inputs.weights.size());
}

/// A token's share of the loss and its gradient.
template <Accumulator A>
struct GrpoToken {
  GrpoLoss loss;
  A d_logp = 0;
};

/// Token t of the mask, at its log-prob and the log-ratio that its ratio level gives it.
template <Accumulator A>
[[nodiscard]] GrpoToken<A> grpo_token(const GrpoOptions& options, const GrpoInputs<A>& inputs,
                                      std::size_t t, A logp, double log_ratio) {
  const double correction =
      inputs.importance_weights.empty() ? 1.0 : static_cast<double>(inputs.importance_weights[t]);
  const TokenTerm policy =
      policy_term(options, log_ratio, static_cast<double>(inputs.advantages[t]));
  double d_logp = correction * policy.d_logp;
  GrpoToken<A> token;
  token.loss.policy = inputs.weights[t] * correction * policy.value;
  if (options.kl != KlForm::none) {
    const TokenTerm kl =
        kl_term(options, static_cast<double>(logp), static_cast<double>(inputs.ref_logps[t]));
    d_logp += options.beta * kl.d_logp;
    token.loss.kl = inputs.weights[t] * kl.value;
  }
  token.loss.loss = token.loss.policy + options.beta * token.loss.kl;
  token.d_logp = static_cast<A>(inputs.weights[t] * d_logp);
  return token;
}

/// Where there are no old log-probs they are the policy's own, held constant.
template <Accumulator A>
[[nodiscard]] double token_log_ratio(const GrpoInputs<A>& inputs, std::size_t t, A logp) {
  return inputs.old_logps.empty()
             ? 0.0
             : static_cast<double>(logp) - static_cast<double>(inputs.old_logps[t]);
}

}  // namespace detail

/// One row's share of the loss, and the gradient of the step's loss by its log-probs.
///   loss = sum over the mask of weight (policy + beta kl)
///
/// shapes    inputs as GrpoInputs says; d_logps [tokens]
/// dtypes    A in and out; arithmetic in double, rounded once
/// writes    all of d_logps, exactly 0 off the mask
/// alias     d_logps disjoint from the inputs
/// specials  all masked out: loss 0, gradient 0. Ties at a clip bound: as if inside it. Beyond +-20 of
///           log-ratio, and 10 of a segment's mean, no gradient; low_var_kl overflows float beyond
///           d = -88.7 unless kl_clip bounds value and gradient
/// order     tokens ascending
/// throws    Error for lengths that differ, ref_logps missing where there is a KL term, a negative
///           segment id, a mask over padding, options
/// source    spec/head.md 8
template <Accumulator A>
GrpoLoss grpo(const GrpoOptions& options, const GrpoInputs<A>& inputs, std::span<A> d_logps) {
  constexpr const char* where = "loss::grpo";
  detail::require_valid(where, options, inputs, "inputs.logps.size", inputs.logps.size());
  require_equal(where, "d_logps.size", d_logps.size(), "inputs.logps.size", inputs.logps.size());

  const auto log_ratio = [&](std::size_t t) {
    return detail::token_log_ratio(inputs, t, inputs.logps[t]);
  };
  struct Mean {
    double sum = 0;
    double count = 0;
  };
  std::unordered_map<std::int32_t, Mean> segment_log_ratios;
  if (options.ratio == RatioLevel::sequence) {
    for (std::size_t t = 0; t < inputs.mask.size(); ++t) {
      if (inputs.mask[t] != 0) {
        Mean& mean = segment_log_ratios[inputs.segment_ids[t]];
        mean.sum += std::clamp(log_ratio(t), -log_ratio_limit, log_ratio_limit);
        mean.count += 1;
      }
    }
  }

  GrpoLoss total;
  for (std::size_t t = 0; t < d_logps.size(); ++t) {
    if (inputs.mask[t] == 0) {
      d_logps[t] = A(0);
      continue;
    }
    double row_log_ratio = 0;
    if (options.ratio == RatioLevel::token) {
      row_log_ratio = log_ratio(t);
    } else {
      const Mean& mean = segment_log_ratios.at(inputs.segment_ids[t]);
      row_log_ratio = mean.sum / mean.count;
    }
    const detail::GrpoToken<A> token =
        detail::grpo_token(options, inputs, t, inputs.logps[t], row_log_ratio);
    total.policy += token.loss.policy;
    total.kl += token.loss.kl;
    d_logps[t] = token.d_logp;
  }
  total.loss = total.policy + options.beta * total.kl;
  return total;
}

/// Weights that correct for a sampler whose log-probs differ from the trainer's.
///   out[t] = min(exp(clip(trainer_logps[t] - sampler_logps[t], -20, 20)), 2) on the mask, else 0
///
/// shapes    each [tokens]
/// writes    all of out
/// alias     out disjoint from the inputs
/// specials  entries off the mask are never read
/// throws    Error for lengths that differ
/// source    spec/head.md 8 (TIS)
template <Accumulator A>
void importance_weights(std::span<const A> trainer_logps, std::span<const A> sampler_logps,
                        std::span<const std::uint8_t> mask, std::span<A> out) {
  constexpr const char* where = "loss::importance_weights";
  const std::size_t tokens = trainer_logps.size();
  require_equal(where, "sampler_logps.size", sampler_logps.size(), "trainer_logps.size", tokens);
  require_equal(where, "mask.size", mask.size(), "trainer_logps.size", tokens);
  require_equal(where, "out.size", out.size(), "trainer_logps.size", tokens);
  for (std::size_t t = 0; t < tokens; ++t) {
    out[t] = A(0);
    if (mask[t] != 0) {
      const double log_ratio =
          static_cast<double>(trainer_logps[t]) - static_cast<double>(sampler_logps[t]);
      out[t] = static_cast<A>(
          std::min(std::exp(std::clamp(log_ratio, -log_ratio_limit, log_ratio_limit)),
                   importance_weight_limit));
    }
  }
}

/// Advantages of rewards, each relative to its group: the rollouts of one prompt.
///
/// shapes    rewards, groups, advantages [rollouts]; equal entries of `groups` are one group, wherever
///           they stand
/// writes    all of advantages
/// alias     advantages may be the very span of rewards
/// specials  a group of one has nothing to be relative to: 0
/// order     a group's sums in index order, in double
/// throws    Error for lengths that differ, an unknown form
/// source    spec/head.md 8
template <Accumulator A>
void advantages_of(AdvantageForm form, std::span<const A> rewards,
                   std::span<const std::int64_t> groups, std::span<A> advantages) {
  constexpr const char* where = "loss::advantages_of";
  require(form == AdvantageForm::group_relative || form == AdvantageForm::rloo ||
              form == AdvantageForm::drgrpo,
          where, "form", form, "must be group_relative, rloo or drgrpo");
  require_equal(where, "groups.size", groups.size(), "rewards.size", rewards.size());
  require_equal(where, "advantages.size", advantages.size(), "rewards.size", rewards.size());
  struct Moments {
    double count = 0;
    double sum = 0;
    double squared_deviation = 0;
  };
  std::unordered_map<std::int64_t, Moments> moments;
  for (std::size_t i = 0; i < rewards.size(); ++i) {
    Moments& group = moments[groups[i]];
    group.count += 1;
    group.sum += static_cast<double>(rewards[i]);
  }
  for (std::size_t i = 0; i < rewards.size(); ++i) {
    Moments& group = moments[groups[i]];
    const double deviation = static_cast<double>(rewards[i]) - group.sum / group.count;
    group.squared_deviation += deviation * deviation;
  }
  for (std::size_t i = 0; i < rewards.size(); ++i) {
    const Moments& group = moments[groups[i]];
    const double reward = static_cast<double>(rewards[i]);
    double advantage = 0;
    if (group.count > 1) {
      switch (form) {
        case AdvantageForm::group_relative:
          advantage = (reward - group.sum / group.count) /
                      (std::sqrt(group.squared_deviation / (group.count - 1)) + 1e-6);
          break;
        case AdvantageForm::rloo:
          advantage = reward - (group.sum - reward) / (group.count - 1);
          break;
        case AdvantageForm::drgrpo:
          advantage = reward - group.sum / group.count;
          break;
      }
    }
    advantages[i] = static_cast<A>(advantage);
  }
}

}  // namespace heddle::loss

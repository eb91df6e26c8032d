#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/loss/grpo.hpp"

/// Losses in the form of a function of one token, for kernels that ask for them while a token's logits
/// are at hand: loss(token, logp, entropy) -> {loss, d_logp, d_entropy}, a TokenShare.
namespace heddle::loss {

/// A token's share of the loss, and its cotangents.
template <Accumulator A>
struct TokenShare {
  double loss = 0;
  A d_logp = 0;
  A d_entropy = 0;
};

/// The loss of grpo(), token by token. GSPO's ratio is a mean over a segment, which is not known before
/// all its tokens are scored: RatioLevel::sequence is no token loss, and refused by type.
///
/// shapes    inputs as GrpoInputs says, but logps, which the call brings: empty
/// alias     inputs are referred to and must outlive the object
/// specials  off the mask: nothing, and nothing is read
/// order     the bits of grpo(): d_logp the same, and the sum of losses over tokens ascending where
///           there is no KL term
/// throws    constructor: Error as grpo(), and for options.ratio other than the type's
/// source    spec/head.md 5.1, 8
template <Accumulator A, RatioLevel ratio = RatioLevel::token>
class GrpoTokenLoss {
  static_assert(
      ratio == RatioLevel::token,
      "heddle::loss::GrpoTokenLoss: a sequence's ratio needs all its tokens scored first; "
      "score, then call loss::grpo");

 public:
  GrpoTokenLoss(const GrpoOptions& options, const GrpoInputs<A>& inputs)
      : options_(options), inputs_(inputs) {
    constexpr const char* where = "loss::GrpoTokenLoss";
    require(inputs.logps.empty(), where, "inputs.logps.size", inputs.logps.size(),
            "must be 0: the call brings them");
    detail::require_valid(where, options, inputs, "inputs.mask.size", inputs.mask.size());
    require(options.ratio == ratio, where, "options.ratio", options.ratio, "must be token");
  }

  [[nodiscard]] TokenShare<A> operator()(std::int64_t token, A logp, A /*entropy*/) const {
    const auto t = static_cast<std::size_t>(token);
    if (inputs_.mask[t] == 0) {
      return {};
    }
    const detail::GrpoToken<A> share =
        detail::grpo_token(options_, inputs_, t, logp, detail::token_log_ratio(inputs_, t, logp));
    return {.loss = share.loss.loss, .d_logp = share.d_logp};
  }

 private:
  GrpoOptions options_;
  GrpoInputs<A> inputs_;
};

/// Negative log-likelihood: -weight logp for each token.
///
/// shapes    weights [tokens], denominators included; an empty span: `weight` for every token
/// alias     weights are referred to and must outlive the object
/// specials  a weight of 0: nothing, whatever the log-prob is
/// source    spec/head.md 5.1
template <Accumulator A>
class NllTokenLoss {
 public:
  explicit NllTokenLoss(std::span<const double> weights) : weights_(weights) {}
  explicit NllTokenLoss(double weight) : weight_(weight) {}

  [[nodiscard]] TokenShare<A> operator()(std::int64_t token, A logp, A /*entropy*/) const {
    const double weight = weights_.empty() ? weight_ : weights_[static_cast<std::size_t>(token)];
    if (weight == 0) {
      return {};
    }
    return {.loss = -weight * static_cast<double>(logp), .d_logp = static_cast<A>(-weight)};
  }

 private:
  std::span<const double> weights_;
  double weight_ = 0;
};

}  // namespace heddle::loss

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "heddle/core/error.hpp"

namespace heddle::head {

/// The extents of one scoring call.
///
/// shapes    hidden [tokens, hidden]; weight [hidden, vocab] or [vocab, hidden]
/// specials  tokens = 0 is legal
/// throws    validate: Error for tokens < 0, hidden < 1, vocab < 1 or beyond what an int32 id can name
struct Dims {
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t vocab = 0;

  void validate(std::string_view where) const {
    require(tokens >= 0, where, "dims.tokens", tokens, "must be >= 0");
    require(hidden >= 1, where, "dims.hidden", hidden, "must be >= 1");
    require(vocab >= 1, where, "dims.vocab", vocab, "must be >= 1");
    require(vocab <= std::numeric_limits<std::int32_t>::max(), where, "dims.vocab", vocab,
            "must fit an int32 id");
  }

  friend constexpr bool operator==(const Dims&, const Dims&) = default;
};

/// How log-prob and entropy are formed from a row of logits. All three agree up to rounding.
enum class Mode {
  unsharded,  ///< log-softmax and gather, entropy by a second softmax, on whole rows; the backward is
              ///< the derivative of just that, from the logits alone
  local,      ///< the same on columns split over ranks: a maximum of maxima, a sum of sums
  fused,  ///< one exponential a logit: statistics of vocabulary tiles, merged; the backward is one
          ///< expression of the logit and the row's residuals
};

/// How the log-sum is taken off the target's logit t.
enum class LogpForm {
  reference,  ///< t - (log exp_sum + max): an offset common to all logits costs its ulp
  shifted,    ///< (t - max) - log exp_sum: a common offset costs nothing
};

/// The entropy of a row in which some logit, but not all, is -inf.
enum class EntropyPolicy {
  xlogx,      ///< 0 log 0 = 0
  reference,  ///< NaN, and so is the cotangent: what softmax * log_softmax gives
};

/// What a target id outside [0, vocab) means.
enum class IdPolicy {
  strict,  ///< an error on an active row
  wrap,  ///< JAX's gather: a negative id counts from the end; what is still outside scores NaN and
         ///< draws no one-hot, its softmax part stays
};

/// Which tokens of a row enter a loss.
enum class LossMask {
  scored,     ///< completion tokens that have a score: a document's first token has none
  reference,  ///< completion tokens, as the completion mask says
};

/// How the head's weight is stored.
enum class WeightLayout {
  dv,  ///< [hidden, vocab]
  vd,  ///< [vocab, hidden]: an embedding tied to the head
};

/// The type in which logits, and on the way back their cotangents, leave the matrix product.
enum class LogitsDtype {
  accumulator,  ///< as accumulated
  bf16,         ///< rounded once to bfloat16 and widened again: a projection that runs in bf16
};

/// What is scored, whichever way it is computed.
///
/// units     temperature: unitless divisor of the logits; 0 and 1 both mean none
/// throws    validate: Error for a temperature that is negative or not finite, a tile, a chunk or a
///           number of shards < 1, scratch_bytes < 0, an unknown enum
/// source    spec/head.md 1-6
struct ScoringOptions {
  double temperature = 1;
  Mode mode = Mode::fused;
  LogpForm logp_form = LogpForm::reference;
  EntropyPolicy entropy_policy = EntropyPolicy::xlogx;
  IdPolicy id_policy = IdPolicy::strict;
  LogitsDtype logits_dtype = LogitsDtype::accumulator;
  /// Columns whose statistics are formed together, on a grid of the whole vocabulary. More than 1,024
  /// let rounding of f32 sums show.
  std::int64_t vocab_tile = 512;
  /// Ranks that the columns are split over, in contiguous pieces as equal as they can be; more ranks
  /// than columns leave some empty. Mode::unsharded puts the rows together first.
  std::int64_t vocab_shards = 1;
  /// Active rows that share one pass over the weight, at most: more of them take more scratch, fewer
  /// read the weight and write its cotangent more often. The reference tier has no chunks.
  std::int64_t chunk = 1024;
  /// Scratch that whole rows of logits may take, which forward_backward and Mode::local keep.
  std::int64_t scratch_bytes = std::int64_t{160} << 20;

  void validate(std::string_view where) const {
    require(temperature >= 0 && std::isfinite(temperature), where, "options.temperature",
            temperature, "must be >= 0 and finite (0: no scaling)");
    require(mode == Mode::unsharded || mode == Mode::local || mode == Mode::fused, where,
            "options.mode", mode, "must be unsharded, local or fused");
    require(logp_form == LogpForm::reference || logp_form == LogpForm::shifted, where,
            "options.logp_form", logp_form, "must be reference or shifted");
    require(entropy_policy == EntropyPolicy::xlogx || entropy_policy == EntropyPolicy::reference,
            where, "options.entropy_policy", entropy_policy, "must be xlogx or reference");
    require(id_policy == IdPolicy::strict || id_policy == IdPolicy::wrap, where,
            "options.id_policy", id_policy, "must be strict or wrap");
    require(logits_dtype == LogitsDtype::accumulator || logits_dtype == LogitsDtype::bf16, where,
            "options.logits_dtype", logits_dtype, "must be accumulator or bf16");
    require(vocab_tile >= 1, where, "options.vocab_tile", vocab_tile, "must be >= 1");
    require(vocab_shards >= 1, where, "options.vocab_shards", vocab_shards, "must be >= 1");
    require(chunk >= 1, where, "options.chunk", chunk, "must be >= 1");
    require(scratch_bytes >= 0, where, "options.scratch_bytes", scratch_bytes, "must be >= 0");
  }
};

}  // namespace heddle::head

#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/moe/dims.hpp"

namespace heddle::moe {

/// What the K routing weights of a token are. The choice itself is by logits in both.
enum class TopKWeights {
  softmax_of_chosen,  ///< softmax over the K chosen logits; they sum to 1 (norm_topk_prob = true)
  softmax_of_all,     ///< softmax over all E logits, read at the chosen (norm_topk_prob = false)
};

/// What becomes of padding tokens (segment id 0).
enum class PaddingRouting {
  exclude,  ///< routed nowhere: no expert row, no count, no buffer space, weights 0
  include,  ///< routed like any token; segment ids have no effect
};

/// Whether the report compares replayed ids with those the router would have chosen.
enum class ReplayMismatch {
  skip,
  measure,  ///< costs a top-K for replayed tokens too
};

/// How rows reach the experts' devices; it decides which slots a full buffer drops.
enum class Strategy {
  ring,        ///< tokens are gathered: rows lie in (expert, slot) order
  all_to_all,  ///< rows are sent: they arrive in (source device, expert, slot) order
};

/// Whether the router's weight is a trained parameter.
enum class RouterTraining {
  trained,
  frozen,  ///< its cotangent is zero; what flows through the router to hidden stays
};

/// Where the cotangent of a routing weight is formed.
enum class WeightGradFrom {
  wo_input,   ///< <d_out * Wo^T, A> over F: the expert's output is not computed again
  wo_output,  ///< <d_out, Y> over D
};

/// What becomes of buffer rows that no slot has.
enum class UnfilledRows {
  untouched,  ///< nothing here reads them, so a buffer costs what is in it, not what it could hold
  zeroed,     ///< all of them +0, for a reader that goes by the buffer's length
};

/// What the activation that ends a product reads.
enum class GluEpilogue {
  strict,  ///< the product as it is stored: the bits of a pass of its own over stored values
  fast,    ///< the product in its accumulator, before it is rounded
};

/// Where the gated unit is computed; under the strict epilogue the bits are the same.
enum class GluFusion {
  fused,     ///< on each tile of the product before it, while that is in cache
  separate,  ///< in passes of its own
};

namespace detail {

inline void require_unfilled_rows(std::string_view where, UnfilledRows unfilled) {
  require(unfilled == UnfilledRows::untouched || unfilled == UnfilledRows::zeroed, where,
          "unfilled", unfilled, "must be untouched or zeroed");
}

inline void require_glu_options(std::string_view where, const std::string& prefix,
                                GluEpilogue epilogue, GluFusion fusion) {
  require(epilogue == GluEpilogue::strict || epilogue == GluEpilogue::fast, where,
          prefix + "epilogue", epilogue, "must be strict or fast");
  require(fusion == GluFusion::fused || fusion == GluFusion::separate, where, prefix + "fusion",
          fusion, "must be fused or separate");
  require(epilogue == GluEpilogue::strict || fusion == GluFusion::fused, where, prefix + "epilogue",
          epilogue, "must be strict when fusion is separate");
}

}  // namespace detail

/// How tokens choose their experts.
struct RouterOptions {
  TopKWeights weights = TopKWeights::softmax_of_chosen;
  PaddingRouting padding = PaddingRouting::exclude;
  ReplayMismatch mismatch = ReplayMismatch::skip;

  /// Throws Error for a value that is none of its enum's.
  void validate(std::string_view where, const std::string& argument) const {
    require(weights == TopKWeights::softmax_of_chosen || weights == TopKWeights::softmax_of_all,
            where, argument + ".weights", weights, "must be softmax_of_chosen or softmax_of_all");
    require(padding == PaddingRouting::exclude || padding == PaddingRouting::include, where,
            argument + ".padding", padding, "must be exclude or include");
    require(mismatch == ReplayMismatch::skip || mismatch == ReplayMismatch::measure, where,
            argument + ".mismatch", mismatch, "must be skip or measure");
  }
};

/// How tokens and experts lie over devices, and how many rows a device has room for.
///
/// The T tokens lie in contiguous pieces over groups * shards devices, group after group, shard
/// after shard. Device s of a group holds experts [s * E/shards, (s + 1) * E/shards) and serves the
/// tokens of its own group, a chunk at a time: chunk c is the c-th of token_chunks equal slices of
/// every device's piece. A device's slice is ceil(T / (groups * shards * token_chunks)) tokens;
/// where that does not come out even the last slices are short or empty, as if filled up with
/// padding that is routed nowhere.
struct DispatchOptions {
  /// Rows that a device has room for, over those it has when balanced; none: no buffer, no drops.
  std::optional<double> buffer_factor = std::nullopt;
  Strategy strategy = Strategy::ring;
  std::int64_t token_chunks = 1;
  std::int64_t groups = 1;  ///< expert groups side by side, each with all experts
  std::int64_t shards = 1;  ///< P, devices of one expert group

  /// Throws Error for a factor that is not finite and positive, an unknown strategy, counts < 1,
  /// experts that do not divide over the shards.
  void validate(std::string_view where, const std::string& argument, const RouterDims& dims) const {
    if (buffer_factor) {
      require(std::isfinite(*buffer_factor) && *buffer_factor > 0, where,
              argument + ".buffer_factor", *buffer_factor, "must be finite and > 0");
    }
    require(strategy == Strategy::ring || strategy == Strategy::all_to_all, where,
            argument + ".strategy", strategy, "must be ring or all_to_all");
    require(token_chunks >= 1, where, argument + ".token_chunks", token_chunks, "must be >= 1");
    require(groups >= 1, where, argument + ".groups", groups, "must be >= 1");
    require(shards >= 1, where, argument + ".shards", shards, "must be >= 1");
    if (dims.experts % shards != 0) {
      fail(where, argument + ".shards", shards,
           "must divide dims.experts (" + std::to_string(dims.experts) + ")");
    }
  }
};

}  // namespace heddle::moe

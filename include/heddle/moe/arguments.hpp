#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/reference_router.hpp"

// What a routed layer is called with, whichever tier computes it.

namespace heddle::moe {

/// What one layer reads. R, the router's storage, may be wider than S.
template <Storage S, Storage R = S>
struct Inputs {
  ConstMatrixView<S> hidden;         ///< [T,D]
  ConstMatrixView<R> router_weight;  ///< [D,E]
  ConstMatrixView<S> wi;             ///< [E*D, 2F], expert e in rows [e*D, (e+1)*D)
  ConstMatrixView<S> wo;             ///< [E*F, D]
  // Null, all three, without a shared expert.
  ConstMatrixView<S> shared_wi = {};    ///< [D, 2Fs]
  ConstMatrixView<S> shared_wo = {};    ///< [Fs, D]
  ConstMatrixView<S> shared_gate = {};  ///< [D, 1]
  // Null or empty where there is nothing to replay, or no padding.
  ConstMatrixView<std::int32_t> forced_ids = {};   ///< [T,K], -1 = not replayed
  std::span<const std::int32_t> segment_ids = {};  ///< [T], 0 = padding
};

/// How an expert layer's call proceeds.
struct Options {
  RouterOptions router = {};
  DispatchOptions dispatch = {};
  RouterTraining router_training = RouterTraining::trained;    ///< backward only
  WeightGradFrom weight_grad_from = WeightGradFrom::wo_input;  ///< backward only
  GluEpilogue epilogue = GluEpilogue::strict;                  ///< the reference is strict
  GluFusion fusion = GluFusion::fused;                         ///< the reference has no choice
};

/// Where the forward writes. All but `out` may be null.
template <Accumulator A>
struct Outputs {
  MatrixView<A> out;                         ///< [T,D]
  MatrixView<std::int32_t> expert_ids = {};  ///< [T,K], -1 at excluded padding
  MatrixView<A> expert_weights = {};         ///< [T,K], 0 at excluded padding
  MatrixView<A> router_logits = {};          ///< [T,E], 0 at excluded padding
  std::span<std::int64_t> group_sizes = {};  ///< [E], slots of each expert before drops
};

/// What an expert layer's call saw of its tokens.
struct LayerReport {
  reference::RouterReport router;
  std::int64_t routed_slots = 0;   ///< K times the tokens that are routed
  std::int64_t dropped_slots = 0;  ///< of these without a row at their expert
  std::int64_t largest_drop = 0;   ///< of one device in one chunk
  std::int64_t buffer_rows = 0;    ///< see Dispatch
  double required_factor = 0;      ///< see Dispatch
};

/// What the backward is given.
template <Storage S>
struct OutputCotangents {
  ConstMatrixView<S> d_out;  ///< [T,D]
  /// [T,E] of losses on the logits; null: there are none.
  ConstMatrixView<AccumulatorOf<S>> d_router_logits = {};
};

/// Where the backward writes. Each weight's may be null, then nothing of it is computed.
template <Accumulator A>
struct InputCotangents {
  MatrixView<A> d_hidden;                   ///< [T,D]
  WeightCotangent<A> d_router_weight = {};  ///< [D,E]
  WeightCotangent<A> d_wi = {};             ///< [E*D, 2F]
  WeightCotangent<A> d_wo = {};             ///< [E*F, D]
  WeightCotangent<A> d_shared_wi = {};      ///< [D, 2Fs]
  WeightCotangent<A> d_shared_wo = {};      ///< [Fs, D]
  WeightCotangent<A> d_shared_gate = {};    ///< [D, 1]
};

namespace detail {

template <Storage S, Storage R>
void require_no_shared_weights(std::string_view where, const Inputs<S, R>& in) {
  const auto refuse = [&](std::string_view argument, ConstMatrixView<S> given) {
    require(given.is_null(), where, argument, "a matrix",
            "must be null when dims.shared_hidden is 0");
  };
  refuse("shared_wi", in.shared_wi);
  refuse("shared_wo", in.shared_wo);
  refuse("shared_gate", in.shared_gate);
}

template <Storage S, Storage R>
void check_inputs(std::string_view where, const Dims& dims, const Inputs<S, R>& in) {
  static_assert(std::is_same_v<AccumulatorOf<S>, AccumulatorOf<R>>,
                "heddle::moe: the router's weight must have the accumulator of hidden");
  dims.validate(where);
  require_shape(where, "hidden", in.hidden, "dims.tokens", dims.tokens, "dims.hidden", dims.hidden);
  require_shape(where, "router_weight", in.router_weight, "dims.hidden", dims.hidden,
                "dims.experts", dims.experts);
  require_shape(where, "wi", in.wi, "dims.experts * dims.hidden", dims.experts * dims.hidden,
                "2 * dims.expert_hidden", 2 * dims.expert_hidden);
  require_shape(where, "wo", in.wo, "dims.experts * dims.expert_hidden",
                dims.experts * dims.expert_hidden, "dims.hidden", dims.hidden);
  if (dims.has_shared_expert()) {
    require_shape(where, "shared_wi", in.shared_wi, "dims.hidden", dims.hidden,
                  "2 * dims.shared_hidden", 2 * dims.shared_hidden);
    require_shape(where, "shared_wo", in.shared_wo, "dims.shared_hidden", dims.shared_hidden,
                  "dims.hidden", dims.hidden);
    require_shape(where, "shared_gate", in.shared_gate, "dims.hidden", dims.hidden, "columns", 1);
  } else {
    require_no_shared_weights(where, in);
  }
  if (!in.forced_ids.is_null()) {
    require_shape(where, "forced_ids", in.forced_ids, "dims.tokens", dims.tokens, "dims.top_k",
                  dims.top_k);
  }
  reference::detail::check_segment_ids(where, in.segment_ids, dims.tokens);
}

inline void check_options(std::string_view where, const Dims& dims, const Options& options) {
  options.router.validate(where, "options.router");
  options.dispatch.validate(where, "options.dispatch", dims.router());
  require(options.router_training == RouterTraining::trained ||
              options.router_training == RouterTraining::frozen,
          where, "options.router_training", options.router_training, "must be trained or frozen");
  require(options.weight_grad_from == WeightGradFrom::wo_input ||
              options.weight_grad_from == WeightGradFrom::wo_output,
          where, "options.weight_grad_from", options.weight_grad_from,
          "must be wo_input or wo_output");
  require_glu_options(where, "options.", options.epilogue, options.fusion);
}

/// What the reference tier leaves undone, it refuses.
inline void require_plain(std::string_view where, const Options& options) {
  require(options.epilogue == GluEpilogue::strict, where, "options.epilogue", options.epilogue,
          "must be strict in the reference tier");
}

template <Accumulator A>
void check_cotangent(std::string_view where, const std::string& argument,
                     const WeightCotangent<A>& cotangent, std::string_view rows_name,
                     std::int64_t rows, std::string_view cols_name, std::int64_t cols) {
  require(cotangent.write == Write::overwrite || cotangent.write == Write::accumulate, where,
          argument + ".write", cotangent.write, "must be overwrite or accumulate");
  if (cotangent.wanted()) {
    require_shape(where, argument + ".values", cotangent.values, rows_name, rows, cols_name, cols);
  }
}

template <Accumulator A>
void require_no_shared_cotangents(std::string_view where, const InputCotangents<A>& out) {
  const auto refuse = [&](std::string_view argument, const WeightCotangent<A>& cotangent) {
    require(!cotangent.wanted(), where, argument, "a matrix",
            "must be null when dims.shared_hidden is 0");
  };
  refuse("d_shared_wi", out.d_shared_wi);
  refuse("d_shared_wo", out.d_shared_wo);
  refuse("d_shared_gate", out.d_shared_gate);
}

template <Accumulator A>
void check_shared_cotangents(std::string_view where, const Dims& dims,
                             const InputCotangents<A>& out) {
  if (!dims.has_shared_expert()) {
    require_no_shared_cotangents(where, out);
  }
  check_cotangent(where, "d_shared_wi", out.d_shared_wi, "dims.hidden", dims.hidden,
                  "2 * dims.shared_hidden", 2 * dims.shared_hidden);
  check_cotangent(where, "d_shared_wo", out.d_shared_wo, "dims.shared_hidden", dims.shared_hidden,
                  "dims.hidden", dims.hidden);
  check_cotangent(where, "d_shared_gate", out.d_shared_gate, "dims.hidden", dims.hidden, "columns",
                  1);
}

template <Accumulator A>
void check_outputs(std::string_view where, const Dims& dims, const Outputs<A>& out) {
  require_shape(where, "out", out.out, "dims.tokens", dims.tokens, "dims.hidden", dims.hidden);
  if (!out.expert_ids.is_null()) {
    require_shape(where, "expert_ids", out.expert_ids, "dims.tokens", dims.tokens, "dims.top_k",
                  dims.top_k);
  }
  if (!out.expert_weights.is_null()) {
    require_shape(where, "expert_weights", out.expert_weights, "dims.tokens", dims.tokens,
                  "dims.top_k", dims.top_k);
  }
  if (!out.router_logits.is_null()) {
    require_shape(where, "router_logits", out.router_logits, "dims.tokens", dims.tokens,
                  "dims.experts", dims.experts);
  }
  if (!out.group_sizes.empty()) {
    require_length(where, "group_sizes", out.group_sizes, "dims.experts", dims.experts);
  }
}

template <Storage S>
void check_output_cotangents(std::string_view where, const Dims& dims,
                             const OutputCotangents<S>& d) {
  require_shape(where, "d_out", d.d_out, "dims.tokens", dims.tokens, "dims.hidden", dims.hidden);
  if (!d.d_router_logits.is_null()) {
    require_shape(where, "d_router_logits", d.d_router_logits, "dims.tokens", dims.tokens,
                  "dims.experts", dims.experts);
  }
}

template <Accumulator A>
void check_input_cotangents(std::string_view where, const Dims& dims,
                            const InputCotangents<A>& out) {
  require_shape(where, "d_hidden", out.d_hidden, "dims.tokens", dims.tokens, "dims.hidden",
                dims.hidden);
  check_cotangent(where, "d_router_weight", out.d_router_weight, "dims.hidden", dims.hidden,
                  "dims.experts", dims.experts);
  check_cotangent(where, "d_wi", out.d_wi, "dims.experts * dims.hidden", dims.experts * dims.hidden,
                  "2 * dims.expert_hidden", 2 * dims.expert_hidden);
  check_cotangent(where, "d_wo", out.d_wo, "dims.experts * dims.expert_hidden",
                  dims.experts * dims.expert_hidden, "dims.hidden", dims.hidden);
  check_shared_cotangents(where, dims, out);
}

}  // namespace detail

}  // namespace heddle::moe

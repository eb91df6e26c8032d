#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/head/options.hpp"

namespace heddle::head {

namespace detail {

/// Elements [first, first + count) of a vector that may be absent.
template <class T>
[[nodiscard]] std::span<T> block(std::span<T> values, std::int64_t first, std::int64_t count) {
  return values.empty()
             ? values
             : values.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
}

/// Refuses a vector that is given, but not of `length`.
template <class T>
void require_length_if_given(std::string_view where, std::string_view argument, std::span<T> values,
                             std::string_view length_name, std::int64_t length) {
  if (!values.empty()) {
    require_length(where, argument, values, length_name, length);
  }
}

}  // namespace detail

/// What a scoring call reads. S stores the hidden states, W the weight: a trainer may keep the one in
/// bf16 and the other in f32.
///
/// shapes    hidden [tokens, hidden]; weight [hidden, vocab] (dv) or [vocab, hidden] (vd);
///           target_ids [tokens], the token that row t of `hidden` predicts: already shifted; active
///           [tokens], 0 or not
/// specials  an empty `active` means every row; the rest of an inactive row is never read
template <Storage S, Storage W = S>
struct Inputs {
  ConstMatrixView<S> hidden;
  ConstMatrixView<W> weight;
  WeightLayout layout = WeightLayout::dv;
  std::span<const std::int32_t> target_ids;
  std::span<const std::uint8_t> active = {};

  [[nodiscard]] bool is_active(std::int64_t token) const {
    return active.empty() || active[static_cast<std::size_t>(token)] != 0;
  }

  /// The same for tokens [first, first + count): a host with threads of its own takes one each.
  [[nodiscard]] Inputs token_block(std::int64_t first, std::int64_t count) const {
    return {.hidden = hidden.row_block(first, count),
            .weight = weight,
            .layout = layout,
            .target_ids = detail::block(target_ids, first, count),
            .active = detail::block(active, first, count)};
  }
};

/// What a forward call writes, every element: 0 at inactive rows.
///
/// shapes    each [tokens]
/// units     nats
/// alias     disjoint from the inputs and from each other
/// specials  an empty span is not wanted; logps is required. max, exp_sum and mean are what a backward
///           call needs, mean only where it has a cotangent of the entropy
template <Accumulator A>
struct Outputs {
  std::span<A> logps;
  std::span<A> entropy = {};
  std::span<A> max = {};      ///< of the tempered logits x; 0 where that is not finite
  std::span<A> exp_sum = {};  ///< sum of exp(x - max)
  std::span<A> mean = {};     ///< sum of p (x - max), p the softmax: entropy = log exp_sum - mean

  [[nodiscard]] Outputs token_block(std::int64_t first, std::int64_t count) const {
    return {.logps = detail::block(logps, first, count),
            .entropy = detail::block(entropy, first, count),
            .max = detail::block(max, first, count),
            .exp_sum = detail::block(exp_sum, first, count),
            .mean = detail::block(mean, first, count)};
  }
};

/// What forward_backward writes.
///
/// shapes    each [tokens]
/// specials  losses: each row's share, 0 at inactive rows; an empty span is not wanted
template <Accumulator A>
struct LossOutputs {
  Outputs<A> scores;
  std::span<double> losses = {};
};

/// What a backward call reads of its forward call.
///
/// shapes    each [tokens]
/// specials  max and exp_sum stay a pair: their log-sum alone has lost the digits of either. mean may
///           be empty without a cotangent of the entropy; Mode::local and Mode::unsharded read none
template <Accumulator A>
struct Residuals {
  std::span<const A> max;
  std::span<const A> exp_sum;
  std::span<const A> mean = {};

  [[nodiscard]] Residuals token_block(std::int64_t first, std::int64_t count) const {
    return {.max = detail::block(max, first, count),
            .exp_sum = detail::block(exp_sum, first, count),
            .mean = detail::block(mean, first, count)};
  }
};

/// The cotangents of log-probs and entropy.
///
/// shapes    each [tokens]
/// specials  an empty d_entropy is zero; entries of inactive rows are never read
template <Accumulator A>
struct OutputCotangents {
  std::span<const A> d_logps;
  std::span<const A> d_entropy = {};

  [[nodiscard]] OutputCotangents token_block(std::int64_t first, std::int64_t count) const {
    return {.d_logps = detail::block(d_logps, first, count),
            .d_entropy = detail::block(d_entropy, first, count)};
  }
};

/// Where a backward call puts the cotangents of its inputs, not rounded to their storage.
///
/// shapes    those of the inputs, d_weight in the weight's layout
/// writes    d_hidden: every element, 0 at rows that draw no gradient; d_weight: as it says, overwrite
///           or accumulate
/// alias     disjoint from the inputs and from each other
/// specials  null: not wanted
template <Accumulator A>
struct Cotangents {
  MatrixView<A> d_hidden;
  WeightCotangent<A> d_weight = {};

  /// d_weight is a sum over tokens: blocks that run at once each need their own, folded in order.
  [[nodiscard]] Cotangents token_block(std::int64_t first, std::int64_t count) const {
    return {.d_hidden = d_hidden.row_block(first, count), .d_weight = d_weight};
  }
};

namespace detail {

/// What a call holds of the weight, and the names of both extents in a message.
struct WeightExtents {
  std::int64_t hidden = 0;
  std::int64_t vocab = 0;
  std::string_view hidden_name = "dims.hidden";
  std::string_view vocab_name = "dims.vocab";
};

template <class T>
void require_weight_shape(std::string_view where, std::string_view argument, MatrixView<T> view,
                          WeightLayout layout, const WeightExtents& held) {
  if (layout == WeightLayout::dv) {
    require_shape(where, argument, view, held.hidden_name, held.hidden, held.vocab_name,
                  held.vocab);
  } else {
    require_shape(where, argument, view, held.vocab_name, held.vocab, held.hidden_name,
                  held.hidden);
  }
}

/// What logits are divided by, in the type they are divided in; 1 for the temperatures that mean no
/// scaling. A temperature that this type cannot hold is refused: narrowed to 0 or inf it would pass
/// for another one.
template <Accumulator A>
[[nodiscard]] A temperature_divisor(std::string_view where, const ScoringOptions& options) {
  const double temperature = options.temperature;
  if (temperature == 0) {
    return A(1);
  }
  require(temperature >= static_cast<double>(std::numeric_limits<A>::min()) &&
              temperature <= static_cast<double>(std::numeric_limits<A>::max()),
          where, "options.temperature", temperature, "must be a normal number of the accumulator");
  return static_cast<A>(temperature);
}

/// Everything about a call's inputs that can be wrong, in argument order; what an inactive row holds
/// cannot.
template <Storage S, Storage W>
void require_valid(std::string_view where, const Dims& dims, const Inputs<S, W>& inputs,
                   const ScoringOptions& options, const WeightExtents& held) {
  dims.validate(where);
  require_shape(where, "inputs.hidden", inputs.hidden, "dims.tokens", dims.tokens, "dims.hidden",
                dims.hidden);
  require(inputs.layout == WeightLayout::dv || inputs.layout == WeightLayout::vd, where,
          "inputs.layout", inputs.layout, "must be dv or vd");
  require_weight_shape(where, "inputs.weight", inputs.weight, inputs.layout, held);
  require_length(where, "inputs.target_ids", inputs.target_ids, "dims.tokens", dims.tokens);
  require_length_if_given(where, "inputs.active", inputs.active, "dims.tokens", dims.tokens);
  options.validate(where);
  if (options.id_policy == IdPolicy::strict) {
    for (std::int64_t t = 0; t < dims.tokens; ++t) {
      const std::int32_t id = inputs.target_ids[static_cast<std::size_t>(t)];
      if (inputs.is_active(t) && (id < 0 || id >= dims.vocab)) [[unlikely]] {
        fail(where, element_name("inputs.target_ids", t), id,
             "must be in [0, dims.vocab (" + std::to_string(dims.vocab) + ")) on an active row");
      }
    }
  }
}

template <Storage S, Storage W>
void require_valid(std::string_view where, const Dims& dims, const Inputs<S, W>& inputs,
                   const ScoringOptions& options) {
  require_valid(where, dims, inputs, options, {dims.hidden, dims.vocab});
}

template <Accumulator A>
void require_valid(std::string_view where, const Dims& dims, const Outputs<A>& outputs) {
  require_length(where, "outputs.logps", outputs.logps, "dims.tokens", dims.tokens);
  require_length_if_given(where, "outputs.entropy", outputs.entropy, "dims.tokens", dims.tokens);
  require_length_if_given(where, "outputs.max", outputs.max, "dims.tokens", dims.tokens);
  require_length_if_given(where, "outputs.exp_sum", outputs.exp_sum, "dims.tokens", dims.tokens);
  require_length_if_given(where, "outputs.mean", outputs.mean, "dims.tokens", dims.tokens);
}

template <Accumulator A>
void require_valid(std::string_view where, const Dims& dims, const ScoringOptions& options,
                   const Residuals<A>& residuals, const OutputCotangents<A>& output_cotangents) {
  if (options.mode == Mode::fused) {
    require_length(where, "residuals.max", residuals.max, "dims.tokens", dims.tokens);
    require_length(where, "residuals.exp_sum", residuals.exp_sum, "dims.tokens", dims.tokens);
    if (!output_cotangents.d_entropy.empty()) {
      if (residuals.mean.empty()) {
        fail(where, "residuals.mean", nullptr, "required when d_entropy is given");
      }
      require_length(where, "residuals.mean", residuals.mean, "dims.tokens", dims.tokens);
    }
  }
  require_length(where, "output_cotangents.d_logps", output_cotangents.d_logps, "dims.tokens",
                 dims.tokens);
  require_length_if_given(where, "output_cotangents.d_entropy", output_cotangents.d_entropy,
                          "dims.tokens", dims.tokens);
}

template <Accumulator A>
void require_valid(std::string_view where, const Dims& dims, WeightLayout layout,
                   const Cotangents<A>& cotangents, const WeightExtents& held) {
  if (!cotangents.d_hidden.is_null()) {
    require_shape(where, "cotangents.d_hidden", cotangents.d_hidden, "dims.tokens", dims.tokens,
                  "dims.hidden", dims.hidden);
  }
  if (cotangents.d_weight.wanted()) {
    require_weight_shape(where, "cotangents.d_weight", cotangents.d_weight.values, layout, held);
    require(cotangents.d_weight.write == Write::overwrite ||
                cotangents.d_weight.write == Write::accumulate,
            where, "cotangents.d_weight.write", cotangents.d_weight.write,
            "must be overwrite or accumulate");
  }
}

template <Accumulator A>
void require_valid(std::string_view where, const Dims& dims, WeightLayout layout,
                   const Cotangents<A>& cotangents) {
  require_valid(where, dims, layout, cotangents, {dims.hidden, dims.vocab});
}

}  // namespace detail

}  // namespace heddle::head

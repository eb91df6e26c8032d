#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "heddle/core/factor.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/parallel_product.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/head/chunked_head.hpp"
#include "heddle/head/forward_backward.hpp"
#include "heddle/head/logits_tile.hpp"

namespace heddle::bench {

/// One scoring call's arrays, of realistic scale: hidden states of root mean square 1, a weight of 0.02.
template <class S>
class HeadProblem {
 public:
  HeadProblem(const head::Dims& dims, head::WeightLayout layout)
      : dims_(dims),
        layout_(layout),
        hidden_(normals(dims.tokens, dims.hidden, 1.0, 1)),
        weight_(normals(weight_rows(), weight_cols(), 0.02, 2)),
        d_hidden_(take(dims.tokens, dims.hidden)),
        d_weight_(take(weight_rows(), weight_cols())) {
    std::mt19937 random(3);
    std::uniform_int_distribution<std::int32_t> id(0, static_cast<std::int32_t>(dims.vocab) - 1);
    std::normal_distribution<float> normal;
    for (std::int64_t t = 0; t < dims.tokens; ++t) {
      ids_.push_back(id(random));
      d_logps_.push_back(normal(random));
    }
    for (auto* values : {&logps_, &entropy_, &max_, &exp_sum_}) {
      values->resize(d_logps_.size());
    }
    // Under bf16 storage the projection runs in bf16, as a trainer's does.
    if (sizeof(S) == 2) {
      options_.logits_dtype = head::LogitsDtype::bf16;
    }
  }
  HeadProblem(const HeadProblem&) = delete;
  HeadProblem& operator=(const HeadProblem&) = delete;

  [[nodiscard]] const head::Dims& dims() const { return dims_; }
  [[nodiscard]] std::int64_t flops(std::int64_t products) const {
    return 2 * products * dims_.tokens * dims_.hidden * dims_.vocab;
  }
  [[nodiscard]] const std::vector<float>& logps() const { return logps_; }
  [[nodiscard]] MatrixView<float> d_hidden() const { return d_hidden_; }
  [[nodiscard]] MatrixView<float> d_weight() const { return d_weight_; }

  void forward(head::Mode mode, Workspace& workspace) {
    head::forward(dims_, inputs(), with(mode), scores(), workspace);
  }
  void backward(head::Mode mode, Workspace& workspace) {
    head::backward(dims_, inputs(), with(mode), head::Residuals<float>{max_, exp_sum_},
                   head::OutputCotangents<float>{d_logps_}, cotangents(), workspace);
  }
  void forward_backward(head::Mode mode, Workspace& workspace) {
    head::forward_backward(dims_, inputs(), with(mode), Weighed{d_logps_},
                           head::LossOutputs<float>{.scores = scores()}, cotangents(), workspace);
  }

  // The same with every logit kept in float: a product, log-softmax, and two products more.

  void unchunked_forward(Workspace& workspace) {
    keep_logits();
    parallel_multiply(as_is(hidden_), weight_by_hidden(), logits_, Write::overwrite, workspace);
    parallel_blocks(dims_.tokens, 16, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t t = first; t < last; ++t) {
        const auto at = static_cast<std::size_t>(t);
        head::RowStats<float> stats;
        head::add_logits(logits_.row(t), 0, ids_[at], 1.0F, options_.logits_dtype,
                         head::EntropyPolicy::xlogx, stats);
        const auto score = head::finish_row(stats, options_.logp_form, options_.entropy_policy);
        logps_[at] = score.logp;
        entropy_[at] = score.entropy;
        max_[at] = score.max;
        exp_sum_[at] = score.exp_sum;
      }
    });
  }
  void unchunked_backward(Workspace& workspace) {
    keep_logits();
    parallel_blocks(dims_.tokens, 16, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t t = first; t < last; ++t) {
        const auto at = static_cast<std::size_t>(t);
        const auto row =
            head::row_cotangent(d_logps_[at], 0.0F, max_[at], exp_sum_[at], 0.0F, ids_[at]);
        const std::span<S> d = d_logits_.row(t);
        if constexpr (sizeof(S) == 2) {
          convert(logits_.row(t), d);
          head::logits_cotangent<S>(d, 0, head::LogitsState::rounded, options_.logits_dtype, 1.0F,
                                    row, d);
        } else {
          head::logits_cotangent<S>(logits_.row(t), 0, head::LogitsState::tempered,
                                    options_.logits_dtype, 1.0F, row, d);
        }
      }
    });
    Factor<S> by_vocab = weight_by_hidden();
    by_vocab.transpose = !by_vocab.transpose;
    parallel_multiply(as_is(d_logits_), by_vocab, d_hidden_, Write::overwrite, workspace);
    if (layout_ == head::WeightLayout::dv) {
      parallel_multiply(transposed(hidden_), as_is(d_logits_), d_weight_, Write::overwrite,
                        workspace);
    } else {
      parallel_multiply(transposed(d_logits_), as_is(hidden_), d_weight_, Write::overwrite,
                        workspace);
    }
  }

  /// Log-probs of a few tokens against the definition in double.
  [[nodiscard]] bool scores_are_right() const {
    const double bar = sizeof(S) == 2 ? 3e-2 : 1e-4;  // half an ulp of bf16 logits of up to 8
    for (std::int64_t t = 0; t < dims_.tokens; t += (dims_.tokens + 2) / 3) {
      std::vector<double> x(static_cast<std::size_t>(dims_.vocab));
      for (std::int64_t d = 0; d < dims_.hidden; ++d) {
        const auto h = static_cast<double>(static_cast<float>(hidden_(t, d)));
        for (std::int64_t k = 0; k < dims_.vocab; ++k) {
          x[static_cast<std::size_t>(k)] +=
              h * static_cast<double>(static_cast<float>(weight_at(d, k)));
        }
      }
      double sum = 0;
      for (const double value : x) {
        sum += std::exp(value);
      }
      const auto at = static_cast<std::size_t>(t);
      const double expected = x[static_cast<std::size_t>(ids_[at])] - std::log(sum);
      if (!(std::abs(expected - static_cast<double>(logps_[at])) < bar)) {
        return false;
      }
    }
    return true;
  }

 private:
  /// Each row's log-prob times a weight of its own.
  struct Weighed {
    struct Share {
      double loss;
      float d_logp;
      float d_entropy;
    };
    const std::vector<float>& weights;

    [[nodiscard]] Share operator()(std::int64_t row, float logp, float /*entropy*/) const {
      const float weight = weights[static_cast<std::size_t>(row)];
      return {static_cast<double>(weight) * static_cast<double>(logp), weight, 0.0F};
    }
  };

  [[nodiscard]] MatrixView<float> take(std::int64_t rows, std::int64_t cols) {
    const std::span<float> values = memory_.take<float>(rows * cols);
    std::ranges::fill(values, 0.0F);  // touched before it is timed
    return {values.data(), rows, cols};
  }
  [[nodiscard]] MatrixView<S> normals(std::int64_t rows, std::int64_t cols, double deviation,
                                      std::uint32_t seed) {
    const std::span<S> values = memory_.take<S>(rows * cols);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0F, static_cast<float>(deviation));
    std::vector<S> stretch(65521);  // repeated: as good as fresh numbers to what is timed
    std::ranges::generate(stretch, [&] { return static_cast<S>(normal(random)); });
    for (std::size_t i = 0; i < values.size(); i += stretch.size()) {
      std::copy_n(stretch.begin(), std::min(stretch.size(), values.size() - i),
                  values.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return {values.data(), rows, cols};
  }

  [[nodiscard]] std::int64_t weight_rows() const {
    return layout_ == head::WeightLayout::dv ? dims_.hidden : dims_.vocab;
  }
  [[nodiscard]] std::int64_t weight_cols() const {
    return layout_ == head::WeightLayout::dv ? dims_.vocab : dims_.hidden;
  }
  [[nodiscard]] S weight_at(std::int64_t d, std::int64_t k) const {
    return layout_ == head::WeightLayout::dv ? weight_(d, k) : weight_(k, d);
  }
  [[nodiscard]] Factor<S> weight_by_hidden() const {
    return layout_ == head::WeightLayout::dv ? as_is(weight_) : transposed(weight_);
  }

  [[nodiscard]] head::Inputs<S> inputs() const {
    return {.hidden = hidden_, .weight = weight_, .layout = layout_, .target_ids = ids_};
  }
  [[nodiscard]] head::ScoringOptions with(head::Mode mode) const {
    head::ScoringOptions options = options_;
    options.mode = mode;
    return options;
  }
  [[nodiscard]] head::Outputs<float> scores() {
    return {.logps = logps_, .entropy = entropy_, .max = max_, .exp_sum = exp_sum_};
  }
  [[nodiscard]] head::Cotangents<float> cotangents() const {
    return {.d_hidden = d_hidden_, .d_weight = {.values = d_weight_}};
  }

  void keep_logits() {
    if (logits_.is_null()) {
      logits_ = take(dims_.tokens, dims_.vocab);
      if constexpr (sizeof(S) == 2) {
        d_logits_ = normals(dims_.tokens, dims_.vocab, 1.0, 4);
      } else {
        d_logits_ = logits_;
      }
    }
  }

  head::Dims dims_;
  head::WeightLayout layout_;
  head::ScoringOptions options_;
  Workspace memory_;
  MatrixView<S> hidden_, weight_;
  MatrixView<float> d_hidden_, d_weight_, logits_;
  MatrixView<S> d_logits_;
  std::vector<std::int32_t> ids_;
  std::vector<float> d_logps_, logps_, entropy_, max_, exp_sum_;
};

}  // namespace heddle::bench

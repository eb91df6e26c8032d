#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "heddle/core/factor.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/parallel_product.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/arguments.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"

namespace heddle::moe::detail {

/// The tokens that are routed, ascending, and the runs that they lie in: products with the router's
/// weight read no row of excluded padding.
class RoutedTokens {
 public:
  struct Run {
    std::int64_t first;
    std::int64_t count;
  };

  RoutedTokens(const Dims& dims, std::span<const std::int32_t> segment_ids,
               const RouterOptions& options, Workspace& workspace)
      : total_(dims.tokens) {
    const bool excludes = options.padding == PaddingRouting::exclude && !segment_ids.empty();
    const auto runs = workspace.take<Run>(most_runs(dims));
    const auto ids = workspace.take<std::int32_t>(excludes ? dims.tokens : 0);
    std::size_t run_count = 0;
    std::size_t count = 0;
    if (!excludes && dims.tokens > 0) {
      runs[run_count++] = {0, dims.tokens};
    }
    for (std::int64_t t = 0; excludes && t < dims.tokens; ++t) {
      if (segment_ids[static_cast<std::size_t>(t)] == 0) {
        continue;
      }
      if (run_count == 0 || runs[run_count - 1].first + runs[run_count - 1].count != t) {
        runs[run_count++] = {t, 0};
      }
      ++runs[run_count - 1].count;
      ids[count++] = static_cast<std::int32_t>(t);
    }
    runs_ = runs.first(run_count);
    ids_ = ids.first(count);
    all_ = !excludes;
  }

  [[nodiscard]] std::span<const Run> runs() const { return runs_; }

  /// Their rows of [T, ...] as a factor.
  template <class T>
  [[nodiscard]] Factor<T> of(ConstMatrixView<T> per_token) const {
    return all_ ? as_is(per_token) : gathered(per_token, ids_);
  }

  /// between(first, last) for what lies between the runs: excluded tokens.
  template <class Between>
  void for_each_gap(const Between& between) const {
    std::int64_t end = 0;
    for (const Run& run : runs_) {
      between(end, run.first);
      end = run.first + run.count;
    }
    between(end, total_);
  }

  [[nodiscard]] static std::int64_t most_runs(const Dims& dims) { return (dims.tokens + 1) / 2; }
  [[nodiscard]] static std::size_t bytes(const Dims& dims) {
    return Workspace::bytes_for<Run>(most_runs(dims)) +
           Workspace::bytes_for<std::int32_t>(dims.tokens);
  }

 private:
  std::int64_t total_;
  std::span<const Run> runs_;
  std::span<const std::int32_t> ids_;
  bool all_ = false;
};

/// result = a * b, or result += a * b, on the rows of the routed tokens.
template <Storage TA, Storage TB, Accumulator A>
void multiply_runs(const RoutedTokens& tokens, ConstMatrixView<TA> a, const Factor<TB>& b,
                   MatrixView<A> result, Write write, Workspace& workspace) {
  using Each = Product<TA, Factor<TB>, MatrixView<A>>;
  const Workspace::Frame frame(workspace);
  const auto runs = tokens.runs();
  const auto products = workspace.take<Each>(static_cast<std::int64_t>(runs.size()));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    std::construct_at(products.data() + i,
                      Each{as_is(a.row_block(runs[i].first, runs[i].count)), b,
                           result.row_block(runs[i].first, runs[i].count), write});
  }
  parallel_multiply(std::span<const Each>(products), workspace);
}

template <Storage S, Storage R>
[[nodiscard]] std::size_t router_product_bytes(const Dims& dims, std::int64_t threads) {
  using A = AccumulatorOf<S>;
  const std::int64_t runs = RoutedTokens::most_runs(dims);
  const std::int64_t most = std::max({dims.tokens, dims.experts, dims.hidden});
  return Workspace::bytes_for<Product<A, Factor<A>, MatrixView<A>>>(runs) +
         std::max({parallel_workspace_bytes<S, R>(runs, most, most, most, threads),
                   parallel_workspace_bytes<A, R>(runs, most, most, most, threads),
                   parallel_workspace_bytes<S, A>(runs, most, most, most, threads)});
}

/// logits = hidden * router_weight; 0 at excluded padding.
template <Storage S, Storage R>
void router_logits(const RoutedTokens& tokens, ConstMatrixView<S> hidden,
                   ConstMatrixView<R> router_weight, MatrixView<AccumulatorOf<S>> logits,
                   Workspace& workspace) {
  multiply_runs<S, R>(tokens, hidden, as_is(router_weight), logits, Write::overwrite, workspace);
  tokens.for_each_gap([&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      std::fill_n(logits.row(t).data(), logits.cols(), AccumulatorOf<S>(0));
    }
  });
}

/// d_logits += those of losses on the logits; null: there are none.
template <Accumulator A>
void add_loss_cotangents(const RoutedTokens& tokens, ConstMatrixView<A> d_router_logits,
                         MatrixView<A> d_logits) {
  if (d_router_logits.is_null()) {
    return;
  }
  for (const auto& run : tokens.runs()) {
    for (std::int64_t t = run.first; t < run.first + run.count; ++t) {
      for (std::int64_t e = 0; e < d_logits.cols(); ++e) {
        d_logits(t, e) += d_router_logits(t, e);
      }
    }
  }
}

/// d_hidden += d_logits * router_weight^T, d_router_weight = hidden^T d_logits. A frozen router's weight
/// has a cotangent of zeros, what flows through it does not.
template <Storage S, Storage R>
void router_weight_backward(const RoutedTokens& tokens, const Inputs<S, R>& in,
                            ConstMatrixView<AccumulatorOf<S>> d_logits, RouterTraining training,
                            MatrixView<AccumulatorOf<S>> d_hidden,
                            const WeightCotangent<AccumulatorOf<S>>& d_router_weight,
                            Workspace& workspace) {
  using A = AccumulatorOf<S>;
  multiply_runs<A, R>(tokens, d_logits, transposed(in.router_weight), d_hidden, Write::accumulate,
                      workspace);
  if (!d_router_weight.wanted()) {
    return;
  }
  const MatrixView<A> values = d_router_weight.values;
  if (training == RouterTraining::trained) {
    Factor<S> left = tokens.of(in.hidden);
    left.transpose = true;
    parallel_multiply(left, tokens.of(d_logits), values, d_router_weight.write, workspace);
  } else if (d_router_weight.write == Write::overwrite) {
    for (std::int64_t row = 0; row < values.rows(); ++row) {
      std::fill_n(values.row(row).data(), values.cols(), A(0));
    }
  }
}

}  // namespace heddle::moe::detail

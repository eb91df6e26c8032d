#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "heddle/core/factor.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/grouped_gemm.hpp"
#include "heddle/moe/options.hpp"
#include "moe_experts_problem.hpp"
#include "moe_problem.hpp"
#include "support/paired.hpp"
#include "support/read_twin.hpp"
#include "support/shapes.hpp"

namespace heddle::bench {

/// The four products of wi and wo: forward, by the rows, by the weights.
enum class GroupedOp { wi, wo, wi_dlhs, wo_dlhs, wi_drhs, wo_drhs };

[[nodiscard]] constexpr const char* name(GroupedOp op) {
  switch (op) {
    case GroupedOp::wi:
      return "wi";
    case GroupedOp::wo:
      return "wo";
    case GroupedOp::wi_dlhs:
      return "wi_dlhs";
    case GroupedOp::wo_dlhs:
      return "wo_dlhs";
    case GroupedOp::wi_drhs:
      return "wi_drhs";
    case GroupedOp::wo_drhs:
      return "wo_drhs";
  }
  return "";
}

/// Operands of all of them, filled once a dtype: the weights are gigabytes.
template <class S>
class GroupedOperands {
 public:
  explicit GroupedOperands(const ExpertShape& shape)
      : experts(shape.experts),
        hidden(shape.hidden),
        width(shape.width),
        rows(shape.total_rows()) {}

  [[nodiscard]] bool fits(const ExpertShape& shape) const {
    return experts == shape.experts && hidden == shape.hidden && width == shape.width &&
           rows >= shape.total_rows();
  }

  std::int64_t experts, hidden, width, rows;

 private:
  Workspace memory_;

 public:
  MatrixView<S> wi = take_normals<S>(memory_, experts* hidden, 2 * width, 0.02, 1);
  MatrixView<S> wo = take_normals<S>(memory_, experts* width, hidden, 0.02, 2);
  MatrixView<S> of_hidden = take_normals<S>(memory_, rows, hidden, 1.0, 3);
  MatrixView<S> of_width = take_normals<S>(memory_, rows, width, 1.0, 4);
  MatrixView<S> of_both = take_normals<S>(memory_, rows, 2 * width, 1.0, 5);
  MatrixView<S> result = take_normals<S>(memory_, rows, hidden, 0.0, 6);
  MatrixView<float> d_weights = take_normals<float>(memory_, experts* hidden, 2 * width, 0.0, 7);
};

template <class S>
[[nodiscard]] GroupedOperands<S>& grouped_operands(const ExpertShape& shape) {
  static std::unique_ptr<GroupedOperands<S>> kept;
  if (kept == nullptr || !kept->fits(shape)) {
    kept.reset();
    kept = std::make_unique<GroupedOperands<S>>(shape);
  }
  return *kept;
}

/// One of the six on one spread of rows.
template <class S>
class GroupedCase {
 public:
  GroupedCase(GroupedOp op, const ExpertShape& shape)
      : op_(op),
        shape_(shape),
        all_(grouped_operands<S>(shape)),
        offsets_(offsets_of(group_sizes(shape))) {}

  void run() {
    const moe::ExpertGroups groups{offsets_};
    const auto untouched = moe::UnfilledRows::untouched;
    switch (op_) {
      case GroupedOp::wi:
        return moe::grouped_product<S, S>(groups, as_is(left(all_.of_hidden)), all_.wi,
                                          rows(all_.of_both), untouched, workspace_);
      case GroupedOp::wo:
        return moe::grouped_product<S, S>(groups, as_is(left(all_.of_width)), all_.wo,
                                          rows(all_.result), untouched, workspace_);
      case GroupedOp::wi_dlhs:
        return moe::grouped_product_d_rows<S, S>(groups, as_is(left(all_.of_both)), all_.wi,
                                                 rows(all_.result), untouched, workspace_);
      case GroupedOp::wo_dlhs:
        return moe::grouped_product_d_rows<S, S>(groups, as_is(left(all_.of_hidden)), all_.wo,
                                                 rows(all_.of_width), untouched, workspace_);
      case GroupedOp::wi_drhs:
        return moe::grouped_product_d_weights<S>(groups, as_is(left(all_.of_hidden)),
                                                 as_is(left(all_.of_both)), {all_.d_weights},
                                                 workspace_);
      case GroupedOp::wo_drhs:
        return moe::grouped_product_d_weights<S>(
            groups, as_is(left(all_.of_width)), as_is(left(all_.of_hidden)),
            {MatrixView<float>(all_.d_weights.data(), all_.experts * all_.width, all_.hidden)},
            workspace_);
    }
  }

  [[nodiscard]] double flops() const {
    return 2.0 * static_cast<double>(shape_.total_rows() * shape_.hidden * shape_.width) *
           (of_wi() ? 2 : 1);
  }
  /// Of the experts that have rows.
  [[nodiscard]] double weight_bytes() const {
    double used = 0;
    for (std::size_t e = 1; e < offsets_.size(); ++e) {
      used += offsets_[e] > offsets_[e - 1] ? 1 : 0;
    }
    return used * static_cast<double>(shape_.hidden * shape_.width) * (of_wi() ? 2 : 1) * sizeof(S);
  }
  [[nodiscard]] bool of_wi() const {
    return op_ == GroupedOp::wi || op_ == GroupedOp::wi_dlhs || op_ == GroupedOp::wi_drhs;
  }

  /// One element of the forward products of each expert against double.
  [[nodiscard]] bool is_right() const {
    if (op_ != GroupedOp::wi && op_ != GroupedOp::wo) {
      return true;
    }
    const ConstMatrixView<S> a = op_ == GroupedOp::wi ? all_.of_hidden : all_.of_width;
    const ConstMatrixView<S> w = op_ == GroupedOp::wi ? all_.wi : all_.wo;
    const ConstMatrixView<S> c = op_ == GroupedOp::wi ? all_.of_both : all_.result;
    for (std::int64_t e = 0; e < all_.experts; ++e) {
      const std::int64_t row = offsets_[static_cast<std::size_t>(e) + 1] - 1;
      if (row < offsets_[static_cast<std::size_t>(e)]) {
        continue;
      }
      const std::int64_t column = (e * 37) % w.cols();
      double sum = 0;
      for (std::int64_t k = 0; k < a.cols(); ++k) {
        sum += static_cast<double>(a(row, k)) * static_cast<double>(w(e * a.cols() + k, column));
      }
      const double tolerance = sizeof(S) == 2 ? 0.02 : 1e-4;
      if (!(std::abs(static_cast<double>(c(row, column)) - sum) <=
            tolerance * (1 + std::abs(sum)))) {
        return false;
      }
    }
    return true;
  }

 private:
  [[nodiscard]] MatrixView<S> rows(MatrixView<S> matrix) const {
    return matrix.row_block(0, shape_.total_rows());
  }
  [[nodiscard]] ConstMatrixView<S> left(MatrixView<S> matrix) const { return rows(matrix); }

  GroupedOp op_;
  ExpertShape shape_;
  GroupedOperands<S>& all_;
  std::vector<std::int64_t> offsets_;
  Workspace workspace_;
};

template <class S>
void moe_grouped_gemm(benchmark::State& state, GroupedOp op, const ExpertShape& shape) {
  GroupedCase<S> problem(op, shape);
  problem.run();
  if (!problem.is_right()) {
    state.SkipWithError("moe.grouped_gemm: the product is wrong");
    return;
  }
  constexpr std::int64_t read_bytes = std::int64_t{256} << 20;
  const ReadTwin read(read_bytes);
  RateShare rate;
  std::vector<double> read_shares;
  for ([[maybe_unused]] const auto _ : state) {
    const double read_seconds = seconds_of(read);
    const double seconds = rate.run(problem.flops(), [&] { problem.run(); });
    read_shares.push_back(problem.weight_bytes() / seconds /
                          (static_cast<double>(read_bytes) / read_seconds));
    state.SetIterationTime(seconds);
  }
  state.counters["frac_f32"] = rate.share();
  state.counters["gflops"] = 1e-9 * problem.flops() / rate.seconds();
  state.counters["frac_read"] = median(read_shares);
}

template <class S>
void register_grouped_gemm(Shapes shapes) {
  const auto add = [&](GroupedOp op, const ExpertShape& shape) {
    benchmark::RegisterBenchmark(
        (std::string("moe.grouped_gemm/") + dtype_name<S> + "/" + name(op) + "/" + shape.text())
            .c_str(),
        [=](benchmark::State& state) { moe_grouped_gemm<S>(state, op, shape); })
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  };
  for (const GroupedOp op : {GroupedOp::wi, GroupedOp::wo, GroupedOp::wi_dlhs, GroupedOp::wo_dlhs,
                             GroupedOp::wi_drhs, GroupedOp::wo_drhs}) {
    add(op, expert_shape(shapes, Spread::uniform));
    add(op, expert_shape(shapes, Spread::skewed));
  }
  for (const GroupedOp op : {GroupedOp::wi, GroupedOp::wo}) {
    ExpertShape few = expert_shape(shapes, Spread::uniform);
    few.rows = 8;
    add(op, few);
  }
}

inline void register_moe_products(Shapes shapes) {
  register_grouped_gemm<bfloat16>(shapes);
  register_grouped_gemm<float>(shapes);
}

}  // namespace heddle::bench

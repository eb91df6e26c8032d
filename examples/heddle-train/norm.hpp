#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"

namespace heddle::train {

/// The logistic function and SiLU, x * logistic(x), with the derivative that backward needs.
template <Accumulator A>
[[nodiscard]] A logistic(A x) {
  return A{1} / (A{1} + std::exp(-x));
}

namespace detail {

/// sum of term(i) for i in [0, count): eight interleaved partial sums, folded in order, so that the
/// additions do not wait for each other and the bits depend on nothing but the terms.
template <Accumulator A, class Term>
[[nodiscard]] A sum_of(std::int64_t count, const Term& term) {
  constexpr std::int64_t lanes = 8;
  A partial[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      partial[lane] += term(i + lane);
    }
  }
  for (std::int64_t lane = 0; i < count; ++i, ++lane) {
    partial[lane] += term(i);
  }
  A total{0};
  for (const A part : partial) {
    total += part;
  }
  return total;
}

}  // namespace detail

/// Root-mean-square norm of every row, with a weight that is stored as its distance from one:
/// y = x * r * (1 + w), r = 1 / sqrt(mean(x^2) + eps).
///
/// shapes    x, y [T,D]; weight [D]; inverse_root [T] gets r, the residual that backward reads
/// dtypes    x, weight, inverse_root: Accumulator; y: Storage
/// writes    all of y and inverse_root
/// alias     y disjoint from x unless both are the same array
/// order     a row's bits depend on that row alone
/// throws    Error for shapes that differ
template <Storage S, Accumulator A>
void rms_norm(ConstMatrixView<A> x, std::span<const A> weight, double eps, MatrixView<S> y,
              std::span<A> inverse_root) {
  constexpr const char* where = "train::rms_norm";
  require_length(where, "weight", weight, "x.cols", x.cols());
  require_shape(where, "y", y, "x.rows", x.rows(), "x.cols", x.cols());
  require_length(where, "inverse_root", inverse_root, "x.rows", x.rows());
  const std::int64_t dim = x.cols();
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    const A* const row = x.row(t).data();
    const A squares = detail::sum_of<A>(dim, [row](std::int64_t d) { return row[d] * row[d]; });
    const A r = A{1} / std::sqrt(squares / static_cast<A>(dim) + static_cast<A>(eps));
    inverse_root[static_cast<std::size_t>(t)] = r;
    for (std::int64_t d = 0; d < dim; ++d) {
      y(t, d) = narrow<S>(row[d] * r * (A{1} + weight[static_cast<std::size_t>(d)]));
    }
  }
}

/// Backward of rms_norm. With g = d_y * (1 + w): d_x = r * (g - x * r^2 * mean(g * x)) and
/// d_weight = sum over rows of d_y * x * r.
///
/// shapes    x, d_y, d_x [T,D]; weight, d_weight [D]; inverse_root [T]
/// writes    adds to d_x (the residual path is already there) and to d_weight
/// alias     d_x disjoint from the rest
/// order     rows in order
/// throws    Error for shapes that differ
template <Accumulator A>
void rms_norm_backward(ConstMatrixView<A> x, std::span<const A> weight,
                       std::span<const A> inverse_root, ConstMatrixView<A> d_y, MatrixView<A> d_x,
                       std::span<A> d_weight) {
  constexpr const char* where = "train::rms_norm_backward";
  require_length(where, "weight", weight, "x.cols", x.cols());
  require_length(where, "inverse_root", inverse_root, "x.rows", x.rows());
  require_shape(where, "d_y", d_y, "x.rows", x.rows(), "x.cols", x.cols());
  require_shape(where, "d_x", d_x, "x.rows", x.rows(), "x.cols", x.cols());
  require_length(where, "d_weight", d_weight, "x.cols", x.cols());
  const std::int64_t dim = x.cols();
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    const A* const row = x.row(t).data();
    const A* const d_row = d_y.row(t).data();
    const A* const w = weight.data();
    const A r = inverse_root[static_cast<std::size_t>(t)];
    const A along =
        detail::sum_of<A>(dim, [=](std::int64_t d) { return d_row[d] * (A{1} + w[d]) * row[d]; });
    const A pull = along * r * r / static_cast<A>(dim);
    for (std::int64_t d = 0; d < dim; ++d) {
      d_x(t, d) += r * (d_row[d] * (A{1} + w[d]) - row[d] * pull);
      d_weight[static_cast<std::size_t>(d)] += d_row[d] * row[d] * r;
    }
  }
}

/// The norm that the mixer's heads leave through, each head by itself, the gate after the norm:
/// y = o * r * w * silu(z), r = 1 / sqrt(mean over the head of o^2 + eps). The factor is w itself.
///
/// shapes    o, z, y [T,H*Dv] head-major; weight [Dv], shared by the heads; inverse_root [T,H]
/// dtypes    o, weight, inverse_root: Accumulator; z, y: Storage
/// writes    all of y and inverse_root
/// order     a head's bits depend on that head of that row alone
/// throws    Error for shapes that differ
template <Storage S, Accumulator A>
void gated_norm(ConstMatrixView<A> o, ConstMatrixView<S> z, std::span<const A> weight, double eps,
                MatrixView<S> y, MatrixView<A> inverse_root) {
  constexpr const char* where = "train::gated_norm";
  const auto dim = static_cast<std::int64_t>(weight.size());
  const std::int64_t heads = inverse_root.cols();
  require_shape(where, "o", o, "o.rows", o.rows(), "heads * weight.size", heads * dim);
  require_shape(where, "z", z, "o.rows", o.rows(), "o.cols", o.cols());
  require_shape(where, "y", y, "o.rows", o.rows(), "o.cols", o.cols());
  require_equal(where, "inverse_root.rows", inverse_root.rows(), "o.rows", o.rows());
  for (std::int64_t t = 0; t < o.rows(); ++t) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const A* const head = o.row(t).data() + h * dim;
      const A squares =
          detail::sum_of<A>(dim, [head](std::int64_t d) { return head[d] * head[d]; });
      const A r = A{1} / std::sqrt(squares / static_cast<A>(dim) + static_cast<A>(eps));
      inverse_root(t, h) = r;
      for (std::int64_t d = 0; d < dim; ++d) {
        const A gate = widen<A>(z(t, h * dim + d));
        y(t, h * dim + d) =
            narrow<S>(head[d] * r * weight[static_cast<std::size_t>(d)] * gate * logistic(gate));
      }
    }
  }
}

/// Backward of gated_norm.
///
/// shapes    as gated_norm; d_y, d_o, d_z [T,H*Dv]; d_weight [Dv]
/// dtypes    d_o is Storage, what the recurrence's backward reads; d_z Accumulator
/// writes    all of d_o and d_z; adds to d_weight
/// order     rows in order, heads in order inside a row
/// throws    Error for shapes that differ
template <Storage S, Accumulator A>
void gated_norm_backward(ConstMatrixView<A> o, ConstMatrixView<S> z, std::span<const A> weight,
                         ConstMatrixView<A> inverse_root, ConstMatrixView<A> d_y, MatrixView<S> d_o,
                         MatrixView<A> d_z, std::span<A> d_weight) {
  constexpr const char* where = "train::gated_norm_backward";
  const auto dim = static_cast<std::int64_t>(weight.size());
  const std::int64_t heads = inverse_root.cols();
  require_shape(where, "o", o, "o.rows", o.rows(), "heads * weight.size", heads * dim);
  require_shape(where, "z", z, "o.rows", o.rows(), "o.cols", o.cols());
  require_equal(where, "inverse_root.rows", inverse_root.rows(), "o.rows", o.rows());
  require_shape(where, "d_y", d_y, "o.rows", o.rows(), "o.cols", o.cols());
  require_shape(where, "d_o", d_o, "o.rows", o.rows(), "o.cols", o.cols());
  require_shape(where, "d_z", d_z, "o.rows", o.rows(), "o.cols", o.cols());
  require_length(where, "d_weight", d_weight, "weight.size", dim);
  for (std::int64_t t = 0; t < o.rows(); ++t) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t first = h * dim;
      const A* const head = o.row(t).data() + first;
      const A r = inverse_root(t, h);
      A along{0};
      for (std::int64_t d = 0; d < dim; ++d) {
        const A w = weight[static_cast<std::size_t>(d)];
        const A gate = widen<A>(z(t, first + d));
        const A s = logistic(gate);
        const A d_out = d_y(t, first + d);
        const A normed = head[d] * r;
        along += d_out * w * gate * s * head[d];
        d_weight[static_cast<std::size_t>(d)] += d_out * normed * gate * s;
        d_z(t, first + d) = d_out * normed * w * s * (A{1} + gate * (A{1} - s));
      }
      const A pull = along * r * r / static_cast<A>(dim);
      for (std::int64_t d = 0; d < dim; ++d) {
        const A gate = widen<A>(z(t, first + d));
        const A g = d_y(t, first + d) * weight[static_cast<std::size_t>(d)] * gate * logistic(gate);
        d_o(t, first + d) = narrow<S>(r * (g - head[d] * pull));
      }
    }
  }
}

}  // namespace heddle::train

#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/moe/detail/reference_product.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/reference_glu.hpp"

namespace heddle::moe::reference::detail {

/// A matrix that owns its elements: scratch of the reference tier.
template <class T>
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t cols)
      : values_(static_cast<std::size_t>(rows * cols)), rows_(rows), cols_(cols) {}

  [[nodiscard]] MatrixView<T> view() { return {values_.data(), rows_, cols_}; }
  [[nodiscard]] ConstMatrixView<T> view() const { return {values_.data(), rows_, cols_}; }

 private:
  std::vector<T> values_;
  std::int64_t rows_;
  std::int64_t cols_;
};

/// Experts of one width, one under the other.
template <Storage S>
struct Experts {
  std::int64_t hidden = 0;  // D
  std::int64_t width = 0;   // F
  ConstMatrixView<S> wi;    // [count*D, 2F]
  ConstMatrixView<S> wo;    // [count*F, D]
};

/// The rows that experts compute, those of an expert together: row r is token tokens[r], times
/// weights[r].
template <Accumulator A>
struct ExpertRows {
  std::vector<std::int32_t> tokens;   // [R]
  std::vector<A> weights;             // [R]
  std::vector<std::int64_t> offsets;  // [count+1]

  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(tokens.size()); }
  [[nodiscard]] std::int64_t experts() const {
    return static_cast<std::int64_t>(offsets.size()) - 1;
  }
  [[nodiscard]] std::int64_t token(std::int64_t row) const {
    return tokens[static_cast<std::size_t>(row)];
  }
  [[nodiscard]] A weight(std::int64_t row) const { return weights[static_cast<std::size_t>(row)]; }
  [[nodiscard]] std::int64_t offset(std::int64_t expert) const {
    return offsets[static_cast<std::size_t>(expert)];
  }
};

/// A piece of one expert's rows, or of the rows of one of its weights: what a task works on.
struct ExpertBlock {
  std::int64_t expert;
  std::int64_t first;
  std::int64_t count;
};

inline constexpr std::int64_t rows_per_task = 64;  // some 100 us at D = 96; scratch stays in cache
inline constexpr std::int64_t weight_rows_per_task = 32;  // enough tasks where experts are few

/// Appends [first, last) of an expert in blocks of `grain`.
inline void append_blocks(std::vector<ExpertBlock>& blocks, std::int64_t expert, std::int64_t first,
                          std::int64_t last, std::int64_t grain) {
  for (; first < last; first += grain) {
    blocks.push_back({expert, first, std::min(grain, last - first)});
  }
}

/// The rows of every expert.
template <Accumulator A>
[[nodiscard]] std::vector<ExpertBlock> row_blocks(const ExpertRows<A>& rows) {
  std::vector<ExpertBlock> blocks;
  for (std::int64_t expert = 0; expert < rows.experts(); ++expert) {
    append_blocks(blocks, expert, rows.offset(expert), rows.offset(expert + 1), rows_per_task);
  }
  return blocks;
}

/// The `extent` rows of every expert's weight, also of an expert without rows of its own.
[[nodiscard]] inline std::vector<ExpertBlock> weight_blocks(std::int64_t experts,
                                                            std::int64_t extent) {
  std::vector<ExpertBlock> blocks;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    append_blocks(blocks, expert, 0, extent, weight_rows_per_task);
  }
  return blocks;
}

template <class Body>
void for_each_block(const std::vector<ExpertBlock>& blocks, const Body& body) {
  parallel_tasks(static_cast<std::int64_t>(blocks.size()),
                 [&](std::int64_t task) { body(blocks[static_cast<std::size_t>(task)]); });
}

/// Gate and up of a block of rows, rounded to storage, and their activation.
template <Storage S>
void activate(const Experts<S>& experts, const ExpertRows<AccumulatorOf<S>>& rows,
              const ExpertBlock& block, ConstMatrixView<S> hidden, MatrixView<S> gate_up,
              MatrixView<S> activation) {
  using A = AccumulatorOf<S>;
  const ConstMatrixView<S> wi =
      experts.wi.row_block(block.expert * experts.hidden, experts.hidden);  // [D,2F]
  product<A>(
      block.count, 2 * experts.width, experts.hidden,
      [&](std::int64_t i, std::int64_t d) {
        return widen<A>(hidden(rows.token(block.first + i), d));
      },
      [&](std::int64_t d, std::int64_t f) { return widen<A>(wi(d, f)); },
      [&](std::int64_t i, std::int64_t f, A sum) { gate_up(i, f) = narrow<S>(sum); });
  glu<S>(gate_up, activation);
}

/// The outputs of some rows of one expert, rounded to storage, not weighted.
template <Storage S>
void apply_wo(const Experts<S>& experts, std::int64_t expert, ConstMatrixView<S> activation,
              MatrixView<S> outputs) {
  using A = AccumulatorOf<S>;
  const ConstMatrixView<S> wo =
      experts.wo.row_block(expert * experts.width, experts.width);  // [F,D]
  product<A>(
      outputs.rows(), experts.hidden, experts.width,
      [&](std::int64_t i, std::int64_t f) { return widen<A>(activation(i, f)); },
      [&](std::int64_t f, std::int64_t d) { return widen<A>(wo(f, d)); },
      [&](std::int64_t i, std::int64_t d, A sum) { outputs(i, d) = narrow<S>(sum); });
}

/// The experts' outputs Y [R,D], not weighted.
template <Storage S>
[[nodiscard]] Matrix<S> experts_forward(const Experts<S>& experts,
                                        const ExpertRows<AccumulatorOf<S>>& rows,
                                        ConstMatrixView<S> hidden) {
  Matrix<S> outputs(rows.count(), experts.hidden);
  const MatrixView<S> y = outputs.view();
  for_each_block(row_blocks(rows), [&](const ExpertBlock& block) {
    Matrix<S> gate_up(block.count, 2 * experts.width);
    Matrix<S> activation(block.count, experts.width);
    activate(experts, rows, block, hidden, gate_up.view(), activation.view());
    apply_wo<S>(experts, block.expert, activation.view(), y.row_block(block.first, block.count));
  });
  return outputs;
}

template <Accumulator A>
struct ExpertRowCotangents {
  Matrix<A> d_rows;          // [R,D], of each row's hidden
  std::vector<A> d_weights;  // [R]
};

/// Through Y = glu(X * wi) * wo of every row, for the cotangent weights[r] * d_out[tokens[r]] of
/// its output.
template <Storage S>
[[nodiscard]] ExpertRowCotangents<AccumulatorOf<S>> experts_backward(
    const Experts<S>& experts, const ExpertRows<AccumulatorOf<S>>& rows, ConstMatrixView<S> hidden,
    ConstMatrixView<S> d_out, WeightGradFrom weight_grad_from,
    const WeightCotangent<AccumulatorOf<S>>& d_wi, const WeightCotangent<AccumulatorOf<S>>& d_wo) {
  using A = AccumulatorOf<S>;
  const std::int64_t width = experts.width;
  ExpertRowCotangents<A> result{Matrix<A>(rows.count(), experts.hidden),
                                std::vector<A>(static_cast<std::size_t>(rows.count()))};
  const MatrixView<A> d_rows = result.d_rows.view();
  // The factors of d_wo: under wo_input the weight stands at the activation, under wo_output at
  // d_out.
  Matrix<S> activations(rows.count(), width);
  Matrix<S> d_gate_ups(rows.count(), 2 * width);
  const auto d_output = [&](std::int64_t row, std::int64_t d) {
    const A o = widen<A>(d_out(rows.token(row), d));
    return weight_grad_from == WeightGradFrom::wo_input ? o
                                                        : widen<A>(narrow<S>(rows.weight(row) * o));
  };

  for_each_block(row_blocks(rows), [&](const ExpertBlock& block) {
    const ConstMatrixView<S> wi =
        experts.wi.row_block(block.expert * experts.hidden, experts.hidden);          // [D,2F]
    const ConstMatrixView<S> wo = experts.wo.row_block(block.expert * width, width);  // [F,D]
    Matrix<S> gate_up(block.count, 2 * width);
    const MatrixView<S> a = activations.view().row_block(block.first, block.count);
    activate(experts, rows, block, hidden, gate_up.view(), a);

    Matrix<A> through_wo(block.count, width);
    const MatrixView<A> q = through_wo.view();
    product<A>(
        block.count, width, experts.hidden,
        [&](std::int64_t i, std::int64_t d) { return d_output(block.first + i, d); },
        [&](std::int64_t d, std::int64_t f) { return widen<A>(wo(f, d)); },
        [&](std::int64_t i, std::int64_t f, A sum) { q(i, f) = sum; });

    Matrix<S> d_activation(block.count, width);
    const MatrixView<S> d_a = d_activation.view();
    if (weight_grad_from == WeightGradFrom::wo_input) {
      for (std::int64_t i = 0; i < block.count; ++i) {
        const A weight = rows.weight(block.first + i);
        A dot = A(0);  // <q, a>
        for (std::int64_t f = 0; f < width; ++f) {
          const A activation = widen<A>(a(i, f));
          dot += q(i, f) * activation;
          d_a(i, f) = narrow<S>(weight * q(i, f));
          a(i, f) = narrow<S>(weight * activation);
        }
        result.d_weights[static_cast<std::size_t>(block.first + i)] = dot;
      }
    } else {
      Matrix<S> outputs(block.count, experts.hidden);
      const MatrixView<S> y = outputs.view();
      apply_wo<S>(experts, block.expert, a, y);
      for (std::int64_t i = 0; i < block.count; ++i) {
        A dot = A(0);  // <d_out, y>
        for (std::int64_t d = 0; d < experts.hidden; ++d) {
          dot += widen<A>(d_out(rows.token(block.first + i), d)) * widen<A>(y(i, d));
        }
        result.d_weights[static_cast<std::size_t>(block.first + i)] = dot;
        for (std::int64_t f = 0; f < width; ++f) {
          d_a(i, f) = narrow<S>(q(i, f));
        }
      }
    }

    const MatrixView<S> d_gate_up = d_gate_ups.view().row_block(block.first, block.count);
    glu_backward<S>(gate_up.view(), d_a, d_gate_up);
    product<A>(
        block.count, experts.hidden, 2 * width,
        [&](std::int64_t i, std::int64_t f) { return widen<A>(d_gate_up(i, f)); },
        [&](std::int64_t f, std::int64_t d) { return widen<A>(wi(d, f)); },
        [&](std::int64_t i, std::int64_t d, A sum) { d_rows(block.first + i, d) = sum; });
  });

  // An expert without rows gets sums of nothing: its cotangents are exact zeros, and written.
  const ConstMatrixView<S> a = activations.view();
  const ConstMatrixView<S> d_gate_up = d_gate_ups.view();
  if (d_wi.wanted()) {
    for_each_block(weight_blocks(rows.experts(), experts.hidden), [&](const ExpertBlock& block) {
      const std::int64_t begin = rows.offset(block.expert);
      product<A>(
          block.count, 2 * width, rows.offset(block.expert + 1) - begin,
          [&](std::int64_t i, std::int64_t r) {
            return widen<A>(hidden(rows.token(begin + r), block.first + i));
          },
          [&](std::int64_t r, std::int64_t f) { return widen<A>(d_gate_up(begin + r, f)); },
          store_into(d_wi, block.expert * experts.hidden + block.first));
    });
  }
  if (d_wo.wanted()) {
    for_each_block(weight_blocks(rows.experts(), width), [&](const ExpertBlock& block) {
      const std::int64_t begin = rows.offset(block.expert);
      product<A>(
          block.count, experts.hidden, rows.offset(block.expert + 1) - begin,
          [&](std::int64_t i, std::int64_t r) { return widen<A>(a(begin + r, block.first + i)); },
          [&](std::int64_t r, std::int64_t d) { return d_output(begin + r, d); },
          store_into(d_wo, block.expert * width + block.first));
    });
  }
  return result;
}

}  // namespace heddle::moe::reference::detail

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <Eigen/Core>

#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"

namespace heddle::train {

/// A token-major array that owns its elements; resize() leaves them as they are.
template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

template <class T>
[[nodiscard]] ConstMatrixView<T> constant_view(const Matrix<T>& matrix) {
  return {matrix.data(), matrix.rows(), matrix.cols(), matrix.outerStride()};
}

/// Neighbouring tokens of one document.
struct TokenRun {
  std::int64_t first = 0;
  std::int64_t count = 0;

  friend bool operator==(const TokenRun&, const TokenRun&) = default;
};

/// The runs of a row's real tokens (segment id > 0), in order. A run is the unit of every product, so
/// that padding costs nothing and a document's bits do not depend on what is packed beside it.
[[nodiscard]] inline std::vector<TokenRun> token_runs(std::span<const std::int32_t> segment_ids) {
  std::vector<TokenRun> runs;
  std::int32_t previous = 0;
  for (std::size_t t = 0; t < segment_ids.size(); ++t) {
    const std::int32_t id = segment_ids[t];
    if (id > 0 && id == previous) {
      ++runs.back().count;
    } else if (id > 0) {
      runs.push_back({.first = static_cast<std::int64_t>(t), .count = 1});
    }
    previous = id;
  }
  return runs;
}

/// Zeroes the rows between the runs: what a kernel may read there must be finite.
template <class T>
void zero_padding(std::span<const TokenRun> runs, Matrix<T>& matrix) {
  std::int64_t next = 0;
  for (const TokenRun& run : runs) {
    matrix.middleRows(next, run.first - next).setConstant(T(0));
    next = run.first + run.count;
  }
  matrix.bottomRows(matrix.rows() - next).setConstant(T(0));
}

/// Rows of `from`, rounded to the type they are stored in.
template <Storage S, Accumulator A>
void store_rows(const TokenRun& run, const Matrix<A>& from, Matrix<S>& to) {
  for (std::int64_t t = run.first; t < run.first + run.count; ++t) {
    for (std::int64_t c = 0; c < from.cols(); ++c) {
      to(t, c) = narrow<S>(from(t, c));
    }
  }
}

/// out = in * weight^T for every token, run by run; padding rows of `out` are left as they are.
///
/// shapes    in [T,I]; weight [O,I]; out becomes [T,O]
/// dtypes    in, weight and out Storage; accumulated wider and rounded once
template <Storage S>
void project(std::span<const TokenRun> runs, const Matrix<S>& in, ConstMatrixView<S> weight,
             Matrix<S>& out) {
  using A = AccumulatorOf<S>;
  out.resize(in.rows(), weight.rows());
  if constexpr (std::same_as<S, A>) {
    for (const TokenRun& run : runs) {
      multiply(as_is(constant_view(in).row_block(run.first, run.count)), transposed(weight),
               view(out).row_block(run.first, run.count));
    }
  } else {
    Matrix<A> wide(in.rows(), weight.rows());
    for (const TokenRun& run : runs) {
      multiply(as_is(constant_view(in).row_block(run.first, run.count)), transposed(weight),
               view(wide).row_block(run.first, run.count));
      store_rows(run, wide, out);
    }
  }
}

/// The backward of project(): d_in (+)= d_out * weight and d_weight += d_out^T * in, run by run in
/// order.
///
/// writes    d_in's token rows as `write` says; adds to d_weight
template <Storage S, Accumulator A>
void project_backward(std::span<const TokenRun> runs, const Matrix<S>& in,
                      ConstMatrixView<S> weight, const Matrix<A>& d_out, Write write,
                      Matrix<A>& d_in, MatrixView<A> d_weight) {
  for (const TokenRun& run : runs) {
    const ConstMatrixView<A> cotangent = constant_view(d_out).row_block(run.first, run.count);
    multiply(as_is(cotangent), as_is(weight), view(d_in).row_block(run.first, run.count), write);
    multiply(transposed(cotangent), as_is(constant_view(in).row_block(run.first, run.count)),
             d_weight, Write::accumulate);
  }
}

}  // namespace heddle::train

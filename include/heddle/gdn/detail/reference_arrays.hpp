#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"

namespace heddle::gdn::reference::detail {

/// A row-major matrix that owns its elements, zero at first.
template <class T>
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t cols)
      : values_(static_cast<std::size_t>(rows * cols)), rows_(rows), cols_(cols) {}

  [[nodiscard]] MatrixView<T> view() { return {values_.data(), rows_, cols_}; }
  [[nodiscard]] std::span<T> row(std::int64_t index) { return view().row(index); }
  [[nodiscard]] std::span<T> values() { return values_; }

 private:
  std::vector<T> values_;
  std::int64_t rows_;
  std::int64_t cols_;
};

template <class T>
void copy(ConstMatrixView<T> from, MatrixView<T> to) {
  for (std::int64_t row = 0; row < to.rows(); ++row) {
    std::copy_n(from.row(row).begin(), to.cols(), to.row(row).begin());
  }
}

template <class T>
void fill(MatrixView<T> values, T value) {
  for (std::int64_t row = 0; row < values.rows(); ++row) {
    std::fill_n(values.row(row).begin(), values.cols(), value);
  }
}

/// sum_i a[i] b[i] in eight interleaved partial sums, folded in order: the order a vector unit can
/// follow, the same on each.
template <Accumulator A>
[[nodiscard]] A dot(std::span<const A> a, std::span<const A> b) {
  constexpr std::size_t lanes = 8;
  A partial[lanes] = {};
  std::size_t i = 0;
  for (; i + lanes <= a.size(); i += lanes) {
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      partial[lane] += a[i + lane] * b[i + lane];
    }
  }
  for (std::size_t lane = 0; i < a.size(); ++i, ++lane) {
    partial[lane] += a[i] * b[i];
  }
  A sum = partial[0];
  for (std::size_t lane = 1; lane < lanes; ++lane) {
    sum += partial[lane];
  }
  return sum;
}

/// Sums over the tokens of a row, `count` of them side by side: in blocks of tokens, so that
/// rounding grows with the block and the number of blocks, not with the number of tokens.
template <Accumulator A>
class TokenSums {
 public:
  explicit TokenSums(std::int64_t count)
      : block_(static_cast<std::size_t>(count)), total_(static_cast<std::size_t>(count)) {}

  /// The sums that this token's terms are to be added to.
  [[nodiscard]] std::span<A> next_token() {
    if (tokens_ == block_tokens) {
      fold();
    }
    ++tokens_;
    return block_;
  }

  [[nodiscard]] std::span<const A> total() {
    fold();
    return total_;
  }

 private:
  static constexpr int block_tokens = 256;  // about the square root of a long row

  void fold() {
    for (std::size_t i = 0; i < block_.size(); ++i) {
      total_[i] += block_[i];
      block_[i] = A(0);
    }
    tokens_ = 0;
  }

  std::vector<A> block_;
  std::vector<A> total_;
  int tokens_ = 0;
};

template <Accumulator A>
void deliver(A value, A& cotangent, Write write) {
  cotangent = write == Write::accumulate ? cotangent + value : value;
}

}  // namespace heddle::gdn::reference::detail

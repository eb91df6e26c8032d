#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "heddle/core/elementwise.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/glu.hpp"
#include "peers/strided_gemm.hpp"

namespace heddle::bench {

/// The routed part of a layer as one writes it over a library's products: gather each expert's tokens,
/// multiply, gate, multiply, add to the tokens; backward from what was stored on the way. Slots come
/// sorted by expert.
template <class S>
class ExpertLoop {
 public:
  ExpertLoop(std::span<const std::int64_t> offsets, std::span<const std::int32_t> tokens,
             std::span<const float> weights, std::int64_t hidden, std::int64_t width)
      : offsets_(offsets),
        tokens_(tokens),
        weights_(weights),
        x_(take<S>(hidden)),
        h1_(take<S>(2 * width)),
        a_(take<S>(width)),
        y_(take<S>(hidden)),
        d_y_(take<S>(hidden)),
        d_a_(take<S>(width)),
        d_h1_(take<S>(2 * width)),
        d_x_(take<S>(hidden)),
        d_row_weights_(tokens.size()) {}

  void forward(ConstMatrixView<S> h, ConstMatrixView<S> wi, ConstMatrixView<S> wo,
               MatrixView<float> out) {
    clear(out);
    for (std::int64_t e = 0; e < experts(); ++e) {
      const auto [first, count] = group(e);
      for (std::int64_t r = first; r < first + count; ++r) {
        copy_row(h.row(token(r)), x_.row(r));
      }
      gemm_(rows(x_, e), false, weight(wi, e, h.cols()), false, h1_.row_block(first, count));
      moe::glu<S>(h1_.row_block(first, count), a_.row_block(first, count));
      gemm_(rows(a_, e), false, weight(wo, e, a_.cols()), false, y_.row_block(first, count));
      for (std::int64_t r = first; r < first + count; ++r) {
        add_row(weight_of(r), y_.row(r), out.row(token(r)));
      }
    }
  }

  void backward(ConstMatrixView<S> d_out, ConstMatrixView<S> wi, ConstMatrixView<S> wo,
                MatrixView<float> d_h, MatrixView<float> d_wi, MatrixView<float> d_wo) {
    clear(d_h);
    for (std::int64_t e = 0; e < experts(); ++e) {
      const auto [first, count] = group(e);
      const MatrixView<float> d_wi_e = d_wi.row_block(e * d_h.cols(), d_h.cols());
      const MatrixView<float> d_wo_e = d_wo.row_block(e * a_.cols(), a_.cols());
      if (count == 0) {
        clear(d_wi_e);
        clear(d_wo_e);
        continue;
      }
      for (std::int64_t r = first; r < first + count; ++r) {
        float dot = 0;
        for (std::int64_t d = 0; d < d_out.cols(); ++d) {
          const float o = widen<float>(d_out(token(r), d));
          dot += o * widen<float>(y_(r, d));
          d_y_(r, d) = narrow<S>(weight_of(r) * o);
        }
        d_row_weights_[static_cast<std::size_t>(r)] = dot;
      }
      gemm_(rows(d_y_, e), false, weight(wo, e, a_.cols()), true, d_a_.row_block(first, count));
      gemm_(rows(a_, e), true, rows(d_y_, e), false, d_wo_e);
      moe::glu_backward<S>(h1_.row_block(first, count), d_a_.row_block(first, count),
                           d_h1_.row_block(first, count));
      gemm_(rows(d_h1_, e), false, weight(wi, e, d_h.cols()), true, d_x_.row_block(first, count));
      gemm_(rows(x_, e), true, rows(d_h1_, e), false, d_wi_e);
      for (std::int64_t r = first; r < first + count; ++r) {
        add_row(1, d_x_.row(r), d_h.row(token(r)));
      }
    }
  }

 private:
  template <class T>
  [[nodiscard]] MatrixView<T> take(std::int64_t cols) {
    const auto count = static_cast<std::int64_t>(tokens_.size());
    return {memory_.take<T>(count * cols).data(), count, cols};
  }
  [[nodiscard]] std::int64_t experts() const {
    return static_cast<std::int64_t>(offsets_.size()) - 1;
  }
  struct Group {
    std::int64_t first, count;
  };
  [[nodiscard]] Group group(std::int64_t e) const {
    const auto i = static_cast<std::size_t>(e);
    return {offsets_[i], offsets_[i + 1] - offsets_[i]};
  }
  [[nodiscard]] ConstMatrixView<S> rows(MatrixView<S> all, std::int64_t e) const {
    return all.row_block(group(e).first, group(e).count);
  }
  [[nodiscard]] static ConstMatrixView<S> weight(ConstMatrixView<S> all, std::int64_t e,
                                                 std::int64_t rows) {
    return all.row_block(e * rows, rows);
  }
  [[nodiscard]] std::int64_t token(std::int64_t row) const {
    return tokens_[static_cast<std::size_t>(row)];
  }
  [[nodiscard]] float weight_of(std::int64_t row) const {
    return weights_[static_cast<std::size_t>(row)];
  }
  static void copy_row(std::span<const S> from, std::span<S> to) {
    std::copy(from.begin(), from.end(), to.begin());
  }
  static void add_row(float factor, std::span<const S> from, std::span<float> to) {
    for (std::size_t i = 0; i < to.size(); ++i) {
      to[i] += factor * widen<float>(from[i]);
    }
  }
  static void clear(MatrixView<float> matrix) {
    for (std::int64_t row = 0; row < matrix.rows(); ++row) {
      std::fill_n(matrix.row(row).data(), matrix.cols(), 0.0F);
    }
  }

  std::span<const std::int64_t> offsets_;
  std::span<const std::int32_t> tokens_;
  std::span<const float> weights_;
  Workspace memory_;
  MatrixView<S> x_, h1_, a_, y_, d_y_, d_a_, d_h1_, d_x_;
  std::vector<float> d_row_weights_;
  StridedGemm<S> gemm_;
};

}  // namespace heddle::bench

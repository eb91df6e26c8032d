#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "heddle/core/factor.hpp"
#include "heddle/core/packed_matrix.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/chunk_plan.hpp"
#include "heddle/gdn/detail/chunk_math.hpp"
#include "heddle/gdn/detail/chunk_products.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"
#include "heddle/gdn/triangular_inverse.hpp"

namespace heddle::gdn {

/// What every chunk of a row is computed from besides its rows of q, k and v.
///
/// shapes    g (log decay, <= 0), beta [tokens, value_heads]; rows of padding are not read, and g not at
///           a document's first token
template <Accumulator A>
struct RecurrenceRow {
  Dims dims;
  const Segments& segments;
  const ChunkPlan& plan;
  NormMode norm = NormMode::root;
  A eps = A(1e-6);
  ConstMatrixView<A> g{};
  ConstMatrixView<A> beta{};
};

/// A value head's state, or its cotangent, in scratch. Zero states are known as such, and not read.
template <Accumulator A>
struct ChunkState {
  MatrixView<A> values;
  bool zero = true;

  void load(ConstMatrixView<A> from) {
    zero = from.is_null();
    if (!zero) {
      detail::load_rows<A, A>(from, values);
    }
  }
  void store(MatrixView<A> to) const {
    if (zero) {
      detail::clear_rows(to);
    } else {
      detail::store_rows<A, A>(values, to);
    }
  }
};

namespace detail {

/// Which q, k and v a pass over chunks reads.
enum class Wanted {
  output,      ///< all three
  states,      ///< no q
  cotangent,   ///< no v
  transition,  ///< neither q nor v
};

/// Extents that a slice's scratch follows from.
struct ChunkExtents {
  std::int64_t rows;  ///< most tokens of a chunk
  std::int64_t key_dim;
  std::int64_t columns;  ///< of one value head
  std::int64_t value_heads;

  static ChunkExtents of(const Dims& dims, std::int64_t longest, const HeadSlice& slice) {
    return {longest, dims.key_dim, slice.columns, slice.value_heads};
  }
};

/// A tile of scratch: from a workspace, or counted where it would come from one.
class ScratchCounter {
 public:
  template <class T>
  std::span<T> take(std::int64_t count) {
    bytes_ += Workspace::bytes_for<T>(count);
    return {};
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

template <class T, class Memory>
[[nodiscard]] MatrixView<T> take_tile(Memory& memory, std::int64_t rows, std::int64_t columns) {
  const std::int64_t stride = tile_stride<T>(columns);
  return {memory.template take<T>(rows * stride).data(), rows, columns, stride};
}

/// What the gates of one value head come to in a chunk.
template <class T>
struct ChunkGates {
  std::span<double> sums;         // [n] log decay since the chunk's first row or the last start
  std::span<std::int32_t> first;  // [n] first row of the same document
  std::span<T> beta;
  std::span<T> in;          // decay from the state to the row
  std::span<T> out;         // decay from the row to the next state
  T last{};                 // decay from state to next state
  std::int64_t entering{};  // rows that continue the state: [0, entering)
  std::int64_t leaving{};   // rows that reach the next state: [leaving, n)
};

/// The forward of one chunk of one slice, F1 - F8 of spec/gdn.md 5.2, step by step: what the row loops,
/// forward, states-only and backward, are put together from, so that their bits agree.
template <Accumulator A>
class Chunk {
 public:
  template <class Memory>
  Chunk(const ChunkExtents& extents, Memory& memory)
      : qk_(take_tile<A>(memory, 2 * extents.rows, extents.key_dim)),
        v_(take_tile<A>(memory, extents.rows, extents.value_heads * extents.columns)),
        kappa_(take_tile<A>(memory, extents.rows, extents.rows)),
        sigma_(take_tile<A>(memory, extents.rows, extents.rows)),
        gamma_(take_tile<A>(memory, extents.rows, extents.rows)),
        a_(take_tile<A>(memory, extents.rows, extents.rows)),
        p_(take_tile<A>(memory, extents.rows, extents.rows)),
        x_(take_tile<A>(memory, extents.rows, extents.rows)),
        qk_s_(take_tile<A>(memory, 2 * extents.rows, extents.columns)),
        r_(take_tile<A>(memory, extents.rows, extents.columns)),
        n_(take_tile<A>(memory, extents.rows, extents.columns)),
        panels_(memory.template take<A>(panel_bytes<A>(extents.key_dim, extents.rows) /
                                        static_cast<std::int64_t>(sizeof(A)))) {
    const std::int64_t most = extents.rows + 16;  // a vector may be read behind the last row
    gates_.sums = memory.template take<double>(most);
    gates_.first = memory.template take<std::int32_t>(most);
    gates_.beta = memory.template take<A>(most);
    gates_.in = memory.template take<A>(most);
    gates_.out = memory.template take<A>(most);
    const std::int64_t widest = std::max({extents.rows, extents.key_dim, extents.columns});
    products_ = ChunkProducts<A>(memory.template take<std::byte>(ChunkProducts<A>::scratch_bytes(
        std::max(2 * extents.rows, extents.key_dim), widest, std::max(2 * extents.rows, widest))));
  }

  /// The chunk's rows and what its value heads share of them (F1). raw, where given, keeps q and k as
  /// they were before the norm.
  template <class Cursor>
  void open(const RecurrenceRow<A>& row, Cursor& cursor, TokenRange range, Wanted wanted,
            const QkvTile<A>& raw = {}) {
    range_ = range;
    wanted_ = wanted;
    const std::int64_t n = range.count;
    const MatrixView<A> k = this->k();
    const bool queries = wanted == Wanted::output || wanted == Wanted::cotangent;
    const bool values = wanted == Wanted::output || wanted == Wanted::states;
    const MatrixView<A> q = queries ? this->q() : MatrixView<A>();
    const MatrixView<A> v = values ? v_.row_block(0, n) : MatrixView<A>();
    const QkvTile<A> tile{.q = raw.q.is_null() ? q : raw.q.row_block(0, n),
                          .k = raw.k.is_null() ? k : raw.k.row_block(0, n),
                          .v = v};
    cursor.load(range, tile);
    const ChunkMath<A>& math = current_chunk_math<A>();
    math.normalise_rows(row.norm, row.eps, A(1), tile.k.data(), tile.k.stride(), n, k.cols(),
                        k.data(), k.stride());
    const PanelView<A> k_transposed(panels_.data(), k.cols(), n);
    pack_panels(transposed(k), k_transposed);
    products_.to_lower(k, k_transposed, kappa());
    if (queries) {
      math.normalise_rows(row.norm, row.eps, query_scale(row.dims), tile.q.data(), tile.q.stride(),
                          n, q.cols(), q.data(), q.stride());
      products_.to_lower(q, k_transposed, sigma());
    }
    set_documents(row.segments);
  }

  /// The gates of a value head of the layer.
  void gate(const RecurrenceRow<A>& row, std::int64_t value_head) {
    const std::int64_t n = range_.count;
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t t = range_.first + i;
      const auto at = static_cast<std::size_t>(i);
      const bool valid = row.segments.valid(t);
      const bool starts = row.segments.starts(t);
      // In double, one after the other: sums reach a thousand and more, and of non-positive terms
      // their differences cannot come out positive.
      sum = starts ? 0.0 : valid ? sum + static_cast<double>(row.g(t, value_head)) : sum;
      gates_.sums[at] = sum;
      gates_.beta[at] = valid ? row.beta(t, value_head) : A(0);
    }
    std::fill_n(gates_.sums.begin() + n, 16, 0.0);
    current_chunk_math<A>().decays(gates_.sums.data(), n, gates_.entering, gates_.leaving,
                                   gates_.in.data(), gates_.out.data());
    gates_.last = gates_.leaving == 0 && gates_.entering == n
                      ? gates_.in[static_cast<std::size_t>(n - 1)]
                      : A(0);
  }

  /// Gamma, A (F2) and P (F6), and X (F3), computed or as given.
  void triangles(ConstMatrixView<A> t_inv, bool output) {
    const bool invert = t_inv.is_null();
    current_chunk_math<A>().decay_tiles(gates_.sums.data(), gates_.first.data(), gates_.beta.data(),
                                        range_.count, kappa_.stride(), kappa_.data(), sigma_.data(),
                                        gamma_.data(), invert ? a_.data() : nullptr,
                                        output ? p_.data() : nullptr);
    inverse_ = t_inv;
    if (invert) {
      const MatrixView<A> x = square(x_);
      invert_unit_lower<A>(square(a_), x);
      inverse_ = x;
    }
  }

  /// R = diag(beta) Y, Y = V - diag(gin) K S (F4), and Q S where the output is wanted.
  void residuals(const ChunkState<A>& state, std::int64_t member, bool output,
                 MatrixView<A> y = {}) {
    const std::int64_t n = range_.count;
    enters_ = gates_.entering > 0 && !state.zero;
    if (enters_) {
      const std::int64_t rows = output ? 2 * n : n;
      products_.run(as_is(ConstMatrixView<A>(qk_.row_block(0, rows))),
                    as_is(ConstMatrixView<A>(state.values)), qk_s_.row_block(0, rows),
                    Write::overwrite);
    }
    const A* const v = wanted_ == Wanted::transition ? nullptr : v_.data() + member * r_.cols();
    current_chunk_math<A>().residual_rows(
        v, v_.stride(), qk_s_.data(), qk_s_.stride(), gates_.in.data(), gates_.beta.data(),
        enters_ ? gates_.entering : 0, n, r_.cols(), y.data(), r_.data(), r_.stride());
  }

  /// N = X R (F5).
  void deltas() { products_.lower(inverse_, rows(r_), rows(n_), Write::overwrite); }

  /// O = diag(gin) Q S + P N (F7), in scratch.
  [[nodiscard]] ConstMatrixView<A> output() {
    const std::int64_t n = range_.count;
    const MatrixView<A> o = qk_s_.row_block(n, n);
    if (enters_) {
      current_chunk_math<A>().scale_rows(o.data(), o.stride(), gates_.in.data(), 0, gates_.entering,
                                         n, o.cols(), o.data(), o.stride());
    }
    products_.lower(square(p_), rows(n_), o, enters_ ? Write::accumulate : Write::overwrite);
    return o;
  }

  /// S' = glast S + K^T diag(gout) N (F8).
  void advance(ChunkState<A>& state) {
    const ChunkMath<A>& math = current_chunk_math<A>();
    const MatrixView<A> decayed = rows(r_);  // R is not needed any more
    math.scale_rows(n_.data(), n_.stride(), gates_.out.data(), gates_.leaving, range_.count,
                    range_.count, n_.cols(), decayed.data(), decayed.stride());
    const bool keeps = !state.zero && gates_.last != A(0);
    if (keeps) {
      math.scale_block(gates_.last, state.values.data(), state.values.stride(), state.values.rows(),
                       state.values.cols());
    }
    products_.run(transposed(ConstMatrixView<A>(k())), as_is(ConstMatrixView<A>(decayed)),
                  state.values, keeps ? Write::accumulate : Write::overwrite);
    state.zero = false;
  }

  [[nodiscard]] TokenRange range() const { return range_; }
  [[nodiscard]] const ChunkGates<A>& gates() const { return gates_; }
  [[nodiscard]] const ChunkProducts<A>& products() const { return products_; }
  [[nodiscard]] bool enters() const { return enters_; }
  /// X of the last value head.
  [[nodiscard]] ConstMatrixView<A> inverse() const { return inverse_; }
  [[nodiscard]] MatrixView<A> k() const { return qk_.row_block(0, range_.count); }
  [[nodiscard]] MatrixView<A> q() const { return qk_.row_block(range_.count, range_.count); }
  /// K above Q.
  [[nodiscard]] MatrixView<A> k_and_q() const { return qk_.row_block(0, 2 * range_.count); }
  [[nodiscard]] MatrixView<A> v() const { return v_.row_block(0, range_.count); }
  [[nodiscard]] MatrixView<A> kappa() const { return square(kappa_); }
  [[nodiscard]] MatrixView<A> sigma() const { return square(sigma_); }
  [[nodiscard]] MatrixView<A> gamma() const { return square(gamma_); }
  [[nodiscard]] MatrixView<A> p() const { return square(p_); }
  [[nodiscard]] MatrixView<A> n() const { return rows(n_); }

  /// K and Q of the last chunk are multiplied by this: dims.key_dim^(-1/2).
  [[nodiscard]] static A query_scale(const Dims& dims) {
    return A(1) / std::sqrt(static_cast<A>(dims.key_dim));
  }

 private:
  [[nodiscard]] MatrixView<A> rows(MatrixView<A> tile) const {
    return tile.row_block(0, range_.count);
  }
  [[nodiscard]] MatrixView<A> square(MatrixView<A> tile) const {
    return tile.row_block(0, range_.count).column_block(0, range_.count);
  }

  /// Which rows belong together: the same for all value heads.
  void set_documents(const Segments& segments) {
    const std::int64_t n = range_.count;
    const std::int32_t before = range_.first == 0 ? 0 : segments.epoch(range_.first - 1);
    gates_.entering = 0;
    gates_.leaving = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t t = range_.first + i;
      if (segments.starts(t)) {
        gates_.leaving = i;
      }
      if (segments.epoch(t) == before) {
        gates_.entering = i + 1;
      }
      gates_.first[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(gates_.leaving);
    }
  }

  MatrixView<A> qk_;
  MatrixView<A> v_;
  MatrixView<A> kappa_;
  MatrixView<A> sigma_;
  MatrixView<A> gamma_;
  MatrixView<A> a_;
  MatrixView<A> p_;
  MatrixView<A> x_;
  MatrixView<A> qk_s_;
  MatrixView<A> r_;
  MatrixView<A> n_;
  std::span<A> panels_;
  ChunkGates<A> gates_;
  ChunkProducts<A> products_;
  ConstMatrixView<A> inverse_;
  TokenRange range_;
  Wanted wanted_ = Wanted::output;
  bool enters_ = false;
};

}  // namespace detail
}  // namespace heddle::gdn

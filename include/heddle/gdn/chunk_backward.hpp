#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "heddle/core/factor.hpp"
#include "heddle/core/packed_matrix.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/gdn/chunk.hpp"
#include "heddle/gdn/detail/chunk_math.hpp"
#include "heddle/gdn/detail/chunk_products.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"

namespace heddle::gdn::detail {

/// The backward of one chunk of one key head, B1 - B13 of spec/gdn.md 7.1: open, value_head for each of
/// its value heads in ascending order, close.
template <Accumulator A>
class ChunkBackward {
 public:
  template <class Memory>
  ChunkBackward(const ChunkExtents& extents, Memory& memory)
      : forward_(extents, memory),
        raw_q_(take_tile<A>(memory, extents.rows, extents.key_dim)),
        raw_k_(take_tile<A>(memory, extents.rows, extents.key_dim)),
        d_q_(take_tile<A>(memory, extents.rows, extents.key_dim)),
        d_k_(take_tile<A>(memory, extents.rows, extents.key_dim)),
        d_v_(take_tile<A>(memory, extents.rows, extents.value_heads * extents.columns)),
        d_kappa_(take_tile<A>(memory, extents.rows, extents.rows)),
        d_sigma_(take_tile<A>(memory, extents.rows, extents.rows)),
        z_n_(take_tile<A>(memory, extents.rows, extents.rows)),
        o_n_(take_tile<A>(memory, extents.rows, extents.rows)),
        y_(take_tile<A>(memory, extents.rows, extents.columns)),
        d_n_(take_tile<A>(memory, extents.rows, extents.columns)),
        z_and_d_o_(take_tile<A>(memory, 2 * extents.rows, extents.columns)),
        to_state_(take_tile<A>(memory, 2 * extents.rows, extents.key_dim)),
        of_state_(take_tile<A>(memory, extents.rows, extents.key_dim)),
        panels_(memory.template take<A>(
            panel_bytes<A>(extents.columns, std::max(extents.key_dim, extents.rows)) /
            static_cast<std::int64_t>(sizeof(A)))) {
    const std::int64_t most = extents.rows + 16;  // a vector may be read behind the last row
    d_beta_ = memory.template take<A>(most);
    d_g_ = memory.template take<A>(most);
    d_in_ = memory.template take<A>(most);
    d_taken_ = memory.template take<A>(most);
    d_out_ = memory.template take<A>(most);
    sums_ = memory.template take<A>(most);
    factors_ = memory.template take<A>(2 * most);
  }

  /// The forward's steps and scratch, for a replay before open().
  [[nodiscard]] Chunk<A>& forward() { return forward_; }

  template <class Cursor>
  void open(const RecurrenceRow<A>& row, Cursor& cursor, TokenRange range) {
    forward_.open(row, cursor, range, Wanted::output, {.q = raw_q_, .k = raw_k_});
    for (const MatrixView<A>& sum : {d_q_, d_k_, d_kappa_, d_sigma_}) {
      clear_rows(sum.row_block(0, range.count));
    }
  }

  /// One value head: state is the one before the chunk, d_state the cotangent of the one after it going
  /// in and of the one before it coming out; d_g and d_beta [tokens, 1] get the chunk's rows.
  template <Storage G>
  void value_head(const RecurrenceRow<A>& row, std::int64_t head, std::int64_t member,
                  ConstMatrixView<A> t_inv, const ChunkState<A>& state, ConstMatrixView<G> d_o,
                  ChunkState<A>& d_state, MatrixView<A> d_g, MatrixView<A> d_beta) {
    forward_.gate(row, head);
    forward_.triangles(t_inv, true);
    forward_.residuals(state, member, false, y_);
    forward_.deltas();
    load_d_o(row, d_o);
    solve(d_state);
    triangles(member);
    const A d_last = states(state, d_state);
    deliver_gates(row, d_last, d_g, d_beta);
  }

  /// A chunk of which only the cotangent of the state before it is wanted: its v is not read.
  template <class Cursor>
  void open_for_state(const RecurrenceRow<A>& row, Cursor& cursor, TokenRange range) {
    forward_.open(row, cursor, range, Wanted::cotangent);
  }

  /// What value_head makes of d_state, without the rest: the same bits.
  template <Storage G>
  void state_alone(const RecurrenceRow<A>& row, std::int64_t head, ConstMatrixView<A> t_inv,
                   ConstMatrixView<G> d_o, ChunkState<A>& d_state) {
    forward_.gate(row, head);
    forward_.triangles(t_inv, true);
    load_d_o(row, d_o);
    solve(d_state);
    carry(d_state);
  }

  /// The cotangents of the chunk's rows of q, k and v before the norm, exactly 0 at padding.
  [[nodiscard]] QkvTile<A> close(const RecurrenceRow<A>& row) {
    const MatrixView<A> d_q = rows(d_q_);
    const MatrixView<A> d_k = rows(d_k_);
    const MatrixView<A> d_v = rows(d_v_);
    const ConstMatrixView<A> k = forward_.k();
    const ConstMatrixView<A> q = forward_.q();
    const ConstMatrixView<A> d_kappa = square(d_kappa_);
    const ConstMatrixView<A> d_sigma = square(d_sigma_);
    const ChunkProducts<A>& products = forward_.products();
    products.lower(d_sigma, k, d_q, Write::accumulate);
    products.lower(d_kappa, k, d_k, Write::accumulate);
    products.lower_transposed(d_kappa, k, d_k, Write::accumulate);
    products.lower_transposed(d_sigma, q, d_k, Write::accumulate);
    const ChunkMath<A>& math = current_chunk_math<A>();
    const TokenRange range = forward_.range();
    for_runs(row.segments, range, [&](TokenRange run, bool valid) {
      const std::int64_t first = run.first - range.first;
      for (const MatrixView<A>& tile : {d_q, d_k, d_v}) {
        if (!valid) {
          clear_rows(tile.row_block(first, run.count));
        }
      }
      if (valid) {
        math.normalise_rows_backward(row.norm, row.eps, Chunk<A>::query_scale(row.dims),
                                     &raw_q_(first, 0), raw_q_.stride(), run.count, d_q.cols(),
                                     &d_q(first, 0), d_q.stride());
        math.normalise_rows_backward(row.norm, row.eps, A(1), &raw_k_(first, 0), raw_k_.stride(),
                                     run.count, d_k.cols(), &d_k(first, 0), d_k.stride());
      }
    });
    return {.q = d_q, .k = d_k, .v = d_v};
  }

 private:
  [[nodiscard]] MatrixView<A> rows(MatrixView<A> tile) const {
    return tile.row_block(0, forward_.range().count);
  }
  [[nodiscard]] MatrixView<A> square(MatrixView<A> tile) const {
    return rows(tile).column_block(0, forward_.range().count);
  }
  [[nodiscard]] MatrixView<A> z() const { return rows(z_and_d_o_); }
  [[nodiscard]] MatrixView<A> d_o() const {
    return z_and_d_o_.row_block(forward_.range().count, forward_.range().count);
  }

  template <Storage G>
  void load_d_o(const RecurrenceRow<A>& row, ConstMatrixView<G> from) {
    const TokenRange range = forward_.range();
    for_runs(row.segments, range, [&](TokenRange run, bool valid) {
      const MatrixView<A> to = d_o().row_block(run.first - range.first, run.count);
      if (valid) {
        load_rows<G, A>(from.row_block(run.first, run.count), to);
      } else {
        clear_rows(to);
      }
    });
  }

  /// dN = P^T dO + diag(gout) K dS' (B1), Z = X^T dN (B2). The cotangent of the state is not decayed yet.
  void solve(const ChunkState<A>& d_state) {
    const ChunkProducts<A>& products = forward_.products();
    const ChunkGates<A>& gates = forward_.gates();
    const std::int64_t n = forward_.range().count;
    const MatrixView<A> d_n = rows(d_n_);
    if (!d_state.zero) {
      products.run(as_is(ConstMatrixView<A>(forward_.k())),
                   as_is(ConstMatrixView<A>(d_state.values)), d_n, Write::overwrite);
      current_chunk_math<A>().scale_rows(d_n.data(), d_n.stride(), gates.out.data(), gates.leaving,
                                         n, n, d_n.cols(), d_n.data(), d_n.stride());
    }
    products.lower_transposed(forward_.p(), d_o(), d_n,
                              d_state.zero ? Write::overwrite : Write::accumulate);
    products.lower_transposed(forward_.inverse(), d_n, z(), Write::overwrite);
  }

  /// B3 - B7, B10.
  void triangles(std::int64_t member) {
    const ChunkProducts<A>& products = forward_.products();
    const ChunkMath<A>& math = current_chunk_math<A>();
    const ChunkGates<A>& gates = forward_.gates();
    const std::int64_t n = forward_.range().count;
    const std::int64_t columns = d_n_.cols();
    const PanelView<A> n_transposed(panels_.data(), columns, n);
    pack_panels(transposed(ConstMatrixView<A>(forward_.n())), n_transposed);
    products.to_lower(z(), n_transposed, square(z_n_));
    products.to_lower(d_o(), n_transposed, square(o_n_));
    math.value_cotangents(n, columns, gates.beta.data(), z().data(), z().stride(), y_.data(),
                          y_.stride(), d_v_.data() + member * columns, d_v_.stride(),
                          d_beta_.data());
    math.tile_cotangents(n, z_n_.stride(), gates.beta.data(), forward_.gamma().data(),
                         forward_.kappa().data(), forward_.sigma().data(), z_n_.data(), o_n_.data(),
                         d_kappa_.data(), d_sigma_.data(), d_beta_.data(), d_g_.data(),
                         sums_.data());
  }

  /// B8, B9 and B11 but for the tiles' part, and B13; returns alast.
  A states(const ChunkState<A>& state, ChunkState<A>& d_state) {
    const ChunkProducts<A>& products = forward_.products();
    const ChunkMath<A>& math = current_chunk_math<A>();
    const ChunkGates<A>& gates = forward_.gates();
    const std::int64_t n = forward_.range().count;
    const std::int64_t key_dim = to_state_.cols();
    const MatrixView<A> both = z_and_d_o_.row_block(0, 2 * n);
    const bool enters = forward_.enters();
    const PanelView<A> panels(panels_.data(), d_n_.cols(), key_dim);
    if (enters) {
      pack_panels(transposed(ConstMatrixView<A>(state.values)), panels);
      products.run(as_is(ConstMatrixView<A>(both)), panels, to_state_.row_block(0, 2 * n),
                   Write::overwrite);
    }
    if (!d_state.zero) {
      pack_panels(transposed(ConstMatrixView<A>(d_state.values)), panels);
      products.run(as_is(ConstMatrixView<A>(forward_.n())), panels, rows(of_state_),
                   Write::overwrite);
    }
    math.state_cotangents(
        n, key_dim, gates.entering, gates.leaving, gates.in.data(), gates.out.data(),
        gates.beta.data(), forward_.q().data(), forward_.k().data(), forward_.k().stride(),
        enters ? to_state_.data() : nullptr, enters ? to_state_.row_block(n, n).data() : nullptr,
        d_state.zero ? nullptr : of_state_.data(), to_state_.stride(), d_q_.data(), d_k_.data(),
        d_q_.stride(), d_in_.data(), d_taken_.data(), d_out_.data());
    const bool keeps = !d_state.zero && gates.last != A(0);
    A d_last = A(0);
    if (keeps && enters) {
      d_last = gates.last * math.block_dot(d_state.values.data(), d_state.values.stride(),
                                           state.values.data(), state.values.stride(), key_dim,
                                           d_n_.cols());
    }
    carry(d_state);
    return d_last;
  }

  /// dS = glast dS' + Q^T diag(gin) dO - K^T diag(beta gin) Z (B13); Z and dO are used up.
  void carry(ChunkState<A>& d_state) {
    const ChunkMath<A>& math = current_chunk_math<A>();
    const ChunkGates<A>& gates = forward_.gates();
    const std::int64_t n = forward_.range().count;
    const MatrixView<A> both = z_and_d_o_.row_block(0, 2 * n);
    if (gates.entering == 0) {
      d_state.zero = true;
      return;
    }
    const bool keeps = !d_state.zero && gates.last != A(0);
    if (keeps) {
      math.scale_block(gates.last, d_state.values.data(), d_state.values.stride(),
                       d_state.values.rows(), d_state.values.cols());
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      factors_[at] = -(gates.beta[at] * gates.in[at]);
    }
    math.scale_rows(z().data(), z().stride(), factors_.data(), 0, gates.entering, n, both.cols(),
                    z().data(), z().stride());
    math.scale_rows(d_o().data(), d_o().stride(), gates.in.data(), 0, gates.entering, n,
                    both.cols(), d_o().data(), d_o().stride());
    forward_.products().run(transposed(ConstMatrixView<A>(forward_.k_and_q())),
                            as_is(ConstMatrixView<A>(both)), d_state.values,
                            keeps ? Write::accumulate : Write::overwrite);
    d_state.zero = false;
  }

  /// B12: each dg is a sum of what its decay stands between, nothing is subtracted from anything.
  void deliver_gates(const RecurrenceRow<A>& row, A d_last, MatrixView<A> d_g,
                     MatrixView<A> d_beta) {
    const TokenRange range = forward_.range();
    double before = static_cast<double>(d_last);
    for (std::int64_t i = 0; i < range.count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double to_next = static_cast<double>(d_out_[at]);
      d_out_[at] = static_cast<A>(before);
      before += to_next;
    }
    double behind = 0;
    for (std::int64_t i = range.count - 1; i >= 0; --i) {
      const auto at = static_cast<std::size_t>(i);
      const std::int64_t t = range.first + i;
      behind += static_cast<double>(d_in_[at]) - static_cast<double>(d_taken_[at]);
      const bool valid = row.segments.valid(t);
      const double sum = static_cast<double>(d_g_[at]) + behind + static_cast<double>(d_out_[at]);
      d_g(t, 0) = valid && !row.segments.starts(t) ? static_cast<A>(sum) : A(0);
      d_beta(t, 0) = valid ? d_beta_[at] : A(0);
    }
  }

  Chunk<A> forward_;
  MatrixView<A> raw_q_;
  MatrixView<A> raw_k_;
  MatrixView<A> d_q_;
  MatrixView<A> d_k_;
  MatrixView<A> d_v_;
  MatrixView<A> d_kappa_;
  MatrixView<A> d_sigma_;
  MatrixView<A> z_n_;
  MatrixView<A> o_n_;
  MatrixView<A> y_;
  MatrixView<A> d_n_;
  MatrixView<A> z_and_d_o_;  // Z, and below it dO: what K and Q stand to
  MatrixView<A> to_state_;   // Z S^T, and below it dO S^T
  MatrixView<A> of_state_;   // N dS'^T
  std::span<A> panels_;
  std::span<A> d_beta_;
  std::span<A> d_g_;
  std::span<A> d_in_;
  std::span<A> d_taken_;
  std::span<A> d_out_;
  std::span<A> sums_;
  std::span<A> factors_;
};

}  // namespace heddle::gdn::detail

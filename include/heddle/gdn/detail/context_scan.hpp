#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "heddle/core/factor.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/context_options.hpp"
#include "heddle/gdn/context_pieces.hpp"
#include "heddle/gdn/detail/context_messages.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/tile.hpp"
#include "heddle/gdn/workspaces.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/gather.hpp"
#include "heddle/mesh/permute.hpp"

namespace heddle::gdn::detail {

/// The order in which a state goes from piece to piece, or its cotangent back.
class Route {
 public:
  Route(const ContextPieces& pieces, Travel travel)
      : pieces_(pieces), forward_(travel == Travel::forward), travel_(travel) {}

  [[nodiscard]] Travel travel() const { return travel_; }
  /// The i-th piece to be reached, of all and of those in a rank's places.
  [[nodiscard]] std::int64_t piece(std::int64_t i) const {
    return forward_ ? i : pieces_.count() - 1 - i;
  }
  [[nodiscard]] std::int64_t place(std::int64_t i) const {
    return forward_ ? i : pieces_.per_rank() - 1 - i;
  }
  [[nodiscard]] bool is_first(std::int64_t piece) const { return piece == this->piece(0); }
  /// The borders over which one comes to a piece and goes on, by the piece before them.
  [[nodiscard]] std::int64_t border_in(std::int64_t piece) const {
    return forward_ ? piece - 1 : piece;
  }
  [[nodiscard]] std::int64_t border_out(std::int64_t piece) const {
    return forward_ ? piece : piece - 1;
  }
  /// Whether anything comes to a piece from the one before it, and goes on to the next.
  [[nodiscard]] bool arrives(std::int64_t piece) const { return used(border_in(piece)); }
  [[nodiscard]] bool leaves(std::int64_t piece) const { return used(border_out(piece)); }
  /// Whether what leaves a piece is what its own tokens make, whatever arrives.
  [[nodiscard]] bool stands_alone(std::int64_t piece) const {
    return is_first(piece) || pieces_.cuts(piece);
  }

 private:
  [[nodiscard]] bool used(std::int64_t border) const {
    return border >= 0 && border < pieces_.count() - 1 && pieces_.needs_state(border + 1);
  }

  const ContextPieces& pieces_;
  bool forward_;
  Travel travel_;
};

/// Elements of a piece's map: its state, and its transition.
[[nodiscard]] constexpr std::int64_t map_elements(const Dims& dims) {
  return dims.state_rows() * (dims.value_dim + dims.key_dim);
}

/// Scratch of StateScan::run.
template <Accumulator A>
[[nodiscard]] std::size_t state_scan_bytes(const Dims& dims, const ContextPieces& pieces,
                                           StateExchange exchange) {
  const bool gathers = exchange == StateExchange::gather && pieces.state_crosses();
  return 2 * Workspace::bytes_for<A>(dims.state_rows() * dims.value_dim) +
         (gathers ? Workspace::bytes_for<A>(pieces.count() * map_elements(dims)) : 0);
}

/// The exclusive scan over the pieces of a row: out = M in + B forward, M^T in + D backward, where a
/// piece's first piece of the route makes its out without in.
///
/// shapes    arriving, leaving [per_rank * state_rows, value_dim]: at a piece's place the state that comes
///           to it, and B or D, to which the rest is added; m [per_rank * state_rows, key_dim]
/// order     each element is added to once; chain and gather do the same products: the same bits
template <Communicator Device, Accumulator A>
class StateScan {
 public:
  StateScan(Device& device, const ContextPieces& pieces, Travel travel, const Dims& dims,
            MatrixView<A> arriving, MatrixView<A> leaving, ConstMatrixView<A> m,
            Workspace& workspace, Workspaces& threads)
      : device_(device),
        pieces_(pieces),
        route_(pieces, travel),
        dims_(dims),
        rank_(mesh::axis_index(device, context_axis)),
        arriving_(arriving),
        leaving_(leaving),
        m_(m),
        workspace_(workspace),
        threads_(threads) {}

  /// Brings every piece of this rank what comes to it.
  void run(StateExchange exchange) {
    const Workspace::Frame frame(workspace_);
    if (exchange == StateExchange::gather) {
      gather();
    } else {
      chain();
    }
  }

  /// The i-th of this rank's places that the route comes to.
  [[nodiscard]] std::int64_t place(std::int64_t i) const { return route_.place(i); }

 private:
  /// Border after border, each message once what it carries is known. All ranks take part in all of them,
  /// and wait for each: that is how collectives are. What a piece computes besides comes later, so that
  /// nobody waits for it.
  void chain() {
    const std::span<const A> idle = workspace_.take<A>(state_elements());
    const std::span<A> unread = workspace_.take<A>(state_elements());
    for (std::int64_t i = 0; i + 1 < pieces_.count(); ++i) {
      const std::int64_t piece = route_.piece(i);
      const std::int64_t next = route_.piece(i + 1);
      if (!route_.leaves(piece)) {
        continue;
      }
      const std::int64_t place = pieces_.place(piece);
      const bool mine = pieces_.owner(piece) == rank_;
      const bool comes = pieces_.owner(next) == rank_;
      if (mine) {
        advance(piece, arriving(place), transition(place), leaving(place));
      }
      if (!pieces_.crosses(route_.border_out(piece))) {
        if (mine) {
          store_rows<A, A>(leaving(place), arriving(pieces_.place(next)));
        }
        continue;
      }
      const mesh::Move move{.from = pieces_.owner(piece), .to = pieces_.owner(next)};
      mesh::permute<Device, A>(device_, context_axis, std::span(&move, 1),
                               mine ? span_of(leaving(place)) : idle,
                               comes ? span_of(arriving(pieces_.place(next))) : unread);
    }
  }

  /// Every rank gets every piece's map, and follows the route as far as it is concerned.
  void gather() {
    const std::int64_t each = map_elements(dims_);
    const std::int64_t own = rank_ * pieces_.per_rank() * each;
    std::span<A> pairs;
    if (pieces_.state_crosses()) {
      pairs = workspace_.take<A>(pieces_.ranks() * pieces_.per_rank() * each);
      for (std::int64_t place = 0; place < pieces_.per_rank(); ++place) {
        fill_pair(place, pairs.subspan(static_cast<std::size_t>(own + place * each),
                                       static_cast<std::size_t>(each)));
      }
      mesh::all_gather<Device, A>(
          device_, context_axis,
          pairs.subspan(static_cast<std::size_t>(own),
                        static_cast<std::size_t>(pieces_.per_rank() * each)),
          pairs);
    }
    MatrixView<A> current = state_at(workspace_.take<A>(state_elements()).data());
    MatrixView<A> next = state_at(workspace_.take<A>(state_elements()).data());
    std::int64_t left = pieces_.per_rank();
    for (std::int64_t i = 0; left > 0; ++i) {
      const std::int64_t piece = route_.piece(i);
      const std::int64_t place = pieces_.place(piece);
      const bool mine = pieces_.owner(piece) == rank_;
      if (mine && route_.arrives(piece)) {
        store_rows<A, A>(current, arriving(place));
      }
      left -= mine ? 1 : 0;
      if (left == 0 || !route_.leaves(piece) || (pairs.empty() && !mine)) {
        continue;
      }
      if (pairs.empty()) {
        store_rows<A, A>(leaving(place), next);
        advance(piece, current, transition(place), next);
      } else {
        const A* const pair =
            pairs.data() + (pieces_.owner(piece) * pieces_.per_rank() + place) * each;
        store_rows<A, A>(ConstMatrixView<A>(pair, dims_.state_rows(), dims_.value_dim), next);
        advance(piece, current,
                ConstMatrixView<A>(pair + state_elements(), dims_.state_rows(), dims_.key_dim),
                next);
      }
      std::swap(current, next);
    }
  }

  /// Parts of a map that nobody multiplies by are sent as zeros.
  void fill_pair(std::int64_t place, std::span<A> pair) const {
    const std::int64_t piece = pieces_.at(rank_, place);
    const MatrixView<A> state = state_at(pair.data());
    const MatrixView<A> m(pair.data() + state_elements(), dims_.state_rows(), dims_.key_dim);
    if (route_.leaves(piece) && (route_.is_first(piece) || !pieces_.empty(piece))) {
      store_rows<A, A>(leaving(place), state);
    } else {
      clear_rows(state);
    }
    if (pieces_.needs_transition(piece)) {
      store_rows<A, A>(transition(place), m);
    } else {
      clear_rows(m);
    }
  }

  /// Adds to what a piece's own tokens make what comes to it.
  void advance(std::int64_t piece, ConstMatrixView<A> in, ConstMatrixView<A> m,
               MatrixView<A> out) const {
    if (!route_.leaves(piece) || route_.stands_alone(piece)) {
      return;
    }
    if (pieces_.empty(piece)) {
      store_rows<A, A>(in, out);
      return;
    }
    if (!pieces_.needs_transition(piece)) {
      return;
    }
    threads_.run(dims_.value_heads, [&](std::int64_t head, Workspace& workspace) {
      const auto of_head = [&](auto rows) {
        return rows.row_block(dims_.state_row(head), dims_.key_dim);
      };
      const ConstMatrixView<A> map = of_head(m);
      multiply(route_.travel() == Travel::forward ? as_is(map) : transposed(map),
               as_is(of_head(in)), of_head(out), Write::accumulate, workspace);
    });
  }

  [[nodiscard]] std::int64_t state_elements() const { return dims_.state_rows() * dims_.value_dim; }
  [[nodiscard]] MatrixView<A> state_at(A* data) const {
    return {data, dims_.state_rows(), dims_.value_dim};
  }
  [[nodiscard]] MatrixView<A> arriving(std::int64_t place) const {
    return arriving_.row_block(place * dims_.state_rows(), dims_.state_rows());
  }
  [[nodiscard]] MatrixView<A> leaving(std::int64_t place) const {
    return leaving_.row_block(place * dims_.state_rows(), dims_.state_rows());
  }
  [[nodiscard]] ConstMatrixView<A> transition(std::int64_t place) const {
    return m_.row_block(place * dims_.state_rows(), dims_.state_rows());
  }
  [[nodiscard]] static std::span<A> span_of(MatrixView<A> rows) {
    return {rows.data(), static_cast<std::size_t>(rows.rows() * rows.cols())};
  }

  Device& device_;
  const ContextPieces& pieces_;
  Route route_;
  Dims dims_;
  std::int64_t rank_;
  MatrixView<A> arriving_;
  MatrixView<A> leaving_;
  ConstMatrixView<A> m_;
  Workspace& workspace_;
  Workspaces& threads_;
};

}  // namespace heddle::gdn::detail

#pragma once

#include <cstdint>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/view.hpp"
#include "heddle/gdn/dims.hpp"

namespace heddle::gdn {

/// How the states before the pieces of a row get to the ranks that hold them.
enum class StateExchange {
  chain,   ///< from piece to piece: one state over each border, transitions stay where they are
  gather,  ///< every rank gets every piece's state and transition at once and combines them itself
};

/// How a call over the context axis proceeds; equal on all its ranks. Of these, exchange alone does not
/// show in the bits.
///
/// throws    validate: Error as ChunkOptions, for an unknown enum
struct ContextOptions {
  ChunkOptions chunks{};
  StateExchange exchange = StateExchange::chain;
  /// Whether the state after the row is asked for, or its cotangent given: without, no message reaches
  /// the padding behind the last token.
  bool final_state = true;

  void validate(std::string_view where) const {
    chunks.validate(where);
    require(exchange == StateExchange::chain || exchange == StateExchange::gather, where,
            "options.exchange", exchange, "must be chain or gather");
  }
};

/// What a forward leaves its backward on this rank, a part for each of its pieces. S, A: const for the
/// backward that reads it (kept()).
///
/// shapes    of piece i of the rank: states rows [i state_rows, (i + 1) state_rows) of value_dim, the
///           state before it; transitions the same rows, of key_dim; windows rows [i window_rows,
///           (i + 1) window_rows) of qkv_columns, the positions before it; t_inv [chunks * value_heads,
///           chunk^2], the pieces' inverses one after the other (ContextPieces::chunks)
/// specials  states, transitions and windows are given together or not at all, rows one behind the other;
///           what nothing of the backward reads is not written (nor, of the row's first piece, any).
///           t_inv may be null: inverses are then computed again where they are used
template <class S, class A>
struct ContextResiduals {
  MatrixView<A> states{};
  MatrixView<A> transitions{};
  MatrixView<S> windows{};
  MatrixView<A> t_inv{};

  [[nodiscard]] ContextResiduals<const S, const A> kept() const {
    return {.states = states, .transitions = transitions, .windows = windows, .t_inv = t_inv};
  }
};

}  // namespace heddle::gdn

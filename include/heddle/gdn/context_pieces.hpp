#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/gdn/chunk_plan.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"
#include "heddle/mesh/context_layout.hpp"

namespace heddle::gdn {

/// A row as the ranks of the context axis see it: which positions lie where, and to which documents all
/// of them belong. Boundaries within a shard say too little: whether its first token starts a document
/// depends on tokens of another rank.
///
/// shapes    segment_ids [partition.positions()], in sequence order whatever the layout, equal on all
///           ranks; pieces_per_rank: stretches of neighbours that a rank works through one after the
///           other, 0 for the layout's own number. contiguous: any that divides the shard;
///           dual_chunk_swap: 2
/// alias     segment_ids are read where they lie
struct ContextRow {
  ContextPartition partition;
  std::span<const std::int32_t> segment_ids{};
  std::int64_t pieces_per_rank = 0;
};

/// The pieces of such a row, 0 first in the sequence, and what crosses the borders between them: all
/// that follows from the ids alone, so that every rank comes to the same answer without a message.
///
/// specials  the state reaches piece p only where its first token continues a document, or where it has
///           no token and the state reaches p + 1; behind the last piece, where the final state is
///           wanted. The convolution's window reaches it where a token that continues a document stands
///           in its first kernel - 1 positions, and the piece before ends in some of that document
/// memory    some bytes a piece, owned
/// cost      O(positions)
/// throws    Error for segment_ids.size != positions, a negative id, a striped layout, pieces that do not
///           divide the shard or are not the layout's, pieces shorter than kernel - 1 positions: a window
///           would reach over a whole piece
/// source    spec/gdn.md 8.3, 8.5, 8.6
class ContextPieces {
 public:
  ContextPieces(std::string_view where, const ContextRow& row, std::int32_t initial_segment,
                std::int64_t kernel, bool final_state)
      : ids_(row.segment_ids), ranks_(row.partition.ranks()) {
    const ContextLayout layout = row.partition.layout();
    require(layout == ContextLayout::contiguous || layout == ContextLayout::dual_chunk_swap, where,
            "row.partition.layout", layout, "must be contiguous or dual_chunk_swap");
    require_equal(where, "row.segment_ids.size", row.segment_ids.size(), "row.partition.positions",
                  row.partition.positions());
    for (std::size_t t = 0; t < ids_.size(); ++t) {
      if (ids_[t] < 0) [[unlikely]] {
        fail(where, element_name("row.segment_ids", t), ids_[t], "must be >= 0");
      }
    }
    dual_ = layout == ContextLayout::dual_chunk_swap && ranks_ > 1;
    const std::int64_t asked = row.pieces_per_rank;
    require(asked >= 0 && (!dual_ || asked == 0 || asked == 2), where, "row.pieces_per_rank", asked,
            dual_ ? "must be 2 in dual_chunk_swap order, or 0" : "must be >= 0");
    per_rank_ = dual_ ? 2 : std::max<std::int64_t>(asked, 1);
    const std::int64_t shard = row.partition.shard();
    require(shard % per_rank_ == 0, where, "row.pieces_per_rank", per_rank_,
            "must divide the tokens of a rank (" + std::to_string(shard) + ")");
    length_ = shard / per_rank_;
    if (count() > 1 && length_ > 0 && length_ < kernel - 1) {
      fail(where, "row.partition.positions", row.partition.positions(),
           "pieces of " + std::to_string(length_) + " tokens are shorter than dims.kernel - 1 (" +
               std::to_string(kernel - 1) + ")");
    }
    survey(initial_segment, kernel, final_state);
  }

  [[nodiscard]] std::int64_t count() const { return ranks_ * per_rank_; }
  [[nodiscard]] std::int64_t ranks() const { return ranks_; }
  [[nodiscard]] std::int64_t per_rank() const { return per_rank_; }
  /// Tokens of a piece.
  [[nodiscard]] std::int64_t length() const { return length_; }

  [[nodiscard]] std::int64_t owner(std::int64_t piece) const {
    return !dual_ ? piece / per_rank_ : piece < ranks_ ? piece : 2 * ranks_ - 1 - piece;
  }
  /// Which piece lies in rows [place * length, (place + 1) * length) of a rank's arrays: the later the
  /// place, the later in the sequence.
  [[nodiscard]] std::int64_t at(std::int64_t rank, std::int64_t place) const {
    return !dual_ ? rank * per_rank_ + place : place == 0 ? rank : 2 * ranks_ - 1 - rank;
  }
  [[nodiscard]] std::int64_t place(std::int64_t piece) const {
    return !dual_ ? piece % per_rank_ : piece < ranks_ ? 0 : 1;
  }
  /// Whether the border behind a piece lies between two ranks.
  [[nodiscard]] bool crosses(std::int64_t piece) const { return owner(piece) != owner(piece + 1); }

  [[nodiscard]] std::span<const std::int32_t> segment_ids(std::int64_t piece) const {
    return ids_.subspan(static_cast<std::size_t>(piece * length_),
                        static_cast<std::size_t>(length_));
  }
  /// The document that a piece continues, 0 for none.
  [[nodiscard]] std::int32_t initial_segment(std::int64_t piece) const {
    return piece_at(piece).initial;
  }
  [[nodiscard]] Segments segments(std::int64_t piece) const {
    return {segment_ids(piece), initial_segment(piece)};
  }

  /// No token: a state passes through as it is.
  [[nodiscard]] bool empty(std::int64_t piece) const { return !piece_at(piece).tokens; }
  /// A document starts in it: the state behind it does not know of the one before it.
  [[nodiscard]] bool cuts(std::int64_t piece) const { return piece_at(piece).starts; }
  /// Whether anything asks for the state before a piece; of count(): the state after the row.
  [[nodiscard]] bool needs_state(std::int64_t piece) const { return piece_at(piece).state; }
  /// Whether a state has to go from one rank to another.
  [[nodiscard]] bool state_crosses() const {
    for (std::int64_t piece = 0; piece + 1 < count(); ++piece) {
      if (crosses(piece) && needs_state(piece + 1)) {
        return true;
      }
    }
    return false;
  }
  /// Whether anything reads the rows of qkv before a piece; never before the first.
  [[nodiscard]] bool needs_window(std::int64_t piece) const { return piece_at(piece).window; }
  /// Whether anything asks for what the tokens of a piece make of a state, and of its cotangent.
  [[nodiscard]] bool maps_state(std::int64_t piece) const {
    return piece + 1 < count() && needs_state(piece + 1) && !empty(piece);
  }
  [[nodiscard]] bool maps_cotangent(std::int64_t piece) const {
    return piece > 0 && needs_state(piece) && !empty(piece);
  }
  /// Whether the transition of a piece is multiplied by a state: not that of the first piece, which knows
  /// its state, nor, for a cotangent, that of the last one.
  [[nodiscard]] bool needs_transition(std::int64_t piece) const {
    return piece > 0 && piece < count() - 1 && !empty(piece) && !cuts(piece) &&
           needs_state(piece + 1);
  }
  /// Where the window after the row is copied from: the last piece with a token, else the first one.
  [[nodiscard]] std::int64_t final_window_piece() const { return final_window_piece_; }

  /// Which of the window_rows positions before a piece hold a token of the document it continues.
  void fill_halo_valid(std::int64_t piece, std::span<std::uint8_t> valid) const {
    std::fill(valid.begin(), valid.end(), std::uint8_t{0});
    const std::int64_t end = piece * length_;
    const std::int64_t first = end - static_cast<std::int64_t>(valid.size());
    for (std::int64_t position = end - 1; position >= std::max<std::int64_t>(first, 0);
         --position) {
      const std::int32_t id = ids_[static_cast<std::size_t>(position)];
      if (id > 0 && id != initial_segment(piece)) {
        break;  // another document; what lies before it is no part of this one, whatever its id
      }
      valid[static_cast<std::size_t>(position - first)] = id > 0 ? 1 : 0;
    }
  }

  /// Chunks of the pieces of a rank together: rows of its inverses, over value_heads.
  [[nodiscard]] std::int64_t chunks(std::int64_t rank, const ChunkOptions& options) const {
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < per_rank_; ++i) {
      total += ChunkPlan(segments(at(rank, i)), options).count();
    }
    return total;
  }

 private:
  struct Piece {
    std::int32_t initial = 0;
    bool tokens = false;
    bool starts = false;
    bool continues = false;  // the first token does
    bool early = false;      // a token of its first kernel - 1 positions does
    bool state = false;
    bool window = false;
  };

  [[nodiscard]] const Piece& piece_at(std::int64_t piece) const {
    return pieces_[static_cast<std::size_t>(piece)];
  }

  void survey(std::int32_t initial_segment, std::int64_t kernel, bool final_state) {
    pieces_.resize(static_cast<std::size_t>(count() + 1));
    std::int32_t active = initial_segment;
    for (std::int64_t p = 0; p < count(); ++p) {
      Piece& piece = pieces_[static_cast<std::size_t>(p)];
      piece.initial = active;
      const Segments segments(segment_ids(p), active);
      const std::int64_t first = segments.first_valid();
      piece.tokens = first >= 0;
      piece.starts = segments.starts_in_row() > 0;
      piece.continues = piece.tokens && !segments.starts(first);
      piece.early = piece.continues && first < kernel - 1;
      active = segments.final_segment();
      if (piece.tokens) {
        final_window_piece_ = p;
      }
    }
    pieces_.back().state = final_state;
    std::vector<std::uint8_t> valid(static_cast<std::size_t>(kernel - 1));
    for (std::int64_t p = count() - 1; p >= 0; --p) {
      Piece& piece = pieces_[static_cast<std::size_t>(p)];
      piece.state = piece.tokens ? piece.continues : piece_at(p + 1).state;
      if (p > 0 && piece.early) {
        fill_halo_valid(p, valid);
        piece.window = std::find(valid.begin(), valid.end(), 1) != valid.end();
      }
    }
  }

  std::span<const std::int32_t> ids_;
  std::int64_t ranks_;
  std::int64_t per_rank_ = 1;
  std::int64_t length_ = 0;
  bool dual_ = false;
  std::vector<Piece> pieces_;  // and what lies behind the last
  std::int64_t final_window_piece_ = 0;
};

}  // namespace heddle::gdn

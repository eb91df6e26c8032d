#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "heddle/core/error.hpp"

namespace heddle {

/// In which order the positions of a row lie over the ranks of the context axis. A property of the
/// array: data in one order under a mask in another is wrong without any shape error.
enum class ContextLayout {
  contiguous,       ///< rank r holds one piece, in sequence order
  dual_chunk_swap,  ///< 2 * ranks chunks; rank r holds chunks r and 2 * ranks - 1 - r, in that order
  striped,          ///< rank r holds positions r, r + ranks, r + 2 * ranks, ...
};

/// Which divisibility a layout asks for.
enum class LayoutCheck {
  exact,   ///< what the mathematics needs
  strict,  ///< MaxText's rule as well: dual_chunk_swap with an even number of ranks
};

/// A row of `positions` tokens over `ranks` context ranks: the map between a position in sequence
/// order and the slot it has after permutation, slot = rank * shard + index in the shard.
///
///   source(destination(p)) = p for every position; contiguous is the identity, and so is any layout on one rank
///
/// shapes    positions = ranks * shard; shard(s) hold positions / ranks tokens each
/// specials  positions = 0 is legal; odd rank counts are legal under LayoutCheck::exact
/// throws    Error for ranks < 1, positions < 0, positions not divisible by ranks (dual_chunk_swap:
///           by 2 * ranks), an odd rank count under LayoutCheck::strict
/// source    AI-Hypercomputer/maxtext reorder_sequence (ranks hold the pairs (0,7)(1,6)(2,5)(3,4); the
///           Transformer Engine order of the same name is another one)
class ContextPartition {
 public:
  ContextPartition(ContextLayout layout, std::int64_t positions, std::int64_t ranks,
                   LayoutCheck check = LayoutCheck::exact)
      : layout_(layout), positions_(positions), ranks_(ranks) {
    constexpr const char* where = "ContextPartition";
    require(layout == ContextLayout::contiguous || layout == ContextLayout::dual_chunk_swap ||
                layout == ContextLayout::striped,
            where, "layout", layout, "must be contiguous, dual_chunk_swap or striped");
    require(positions >= 0, where, "positions", positions, "must be >= 0");
    require(ranks >= 1 && ranks <= std::numeric_limits<std::int32_t>::max(), where, "ranks", ranks,
            "must be in [1, 2^31 - 1]");
    const std::int64_t pieces =
        layout == ContextLayout::dual_chunk_swap && ranks > 1 ? 2 * ranks : ranks;
    if (positions % pieces != 0) {
      fail(where, "positions", positions,
           "must be a multiple of " +
               (pieces == ranks ? std::string("context") : std::string("2 * context")) + " (" +
               std::to_string(pieces) + ")");
    }
    if (check == LayoutCheck::strict && layout == ContextLayout::dual_chunk_swap && ranks > 1) {
      require(ranks % 2 == 0, where, "ranks", ranks, "strict dual_chunk_swap needs an even number");
    }
    shard_ = positions / ranks;
    chunk_ = layout == ContextLayout::dual_chunk_swap && ranks > 1 ? shard_ / 2 : shard_;
  }

  [[nodiscard]] ContextLayout layout() const { return layout_; }
  [[nodiscard]] std::int64_t positions() const { return positions_; }
  [[nodiscard]] std::int64_t ranks() const { return ranks_; }
  /// Tokens a rank holds.
  [[nodiscard]] std::int64_t shard() const { return shard_; }
  /// Consecutive positions a rank holds in one piece: the shard, or half of it under dual_chunk_swap.
  /// (Striped shards have no two neighbours unless there is one rank.)
  [[nodiscard]] std::int64_t chunk() const { return chunk_; }

  /// The position that stands at `slot` after permutation.
  [[nodiscard]] std::int64_t source(std::int64_t slot) const {
    if (ranks_ == 1) {
      return slot;
    }
    switch (layout_) {
      case ContextLayout::contiguous:
        return slot;
      case ContextLayout::dual_chunk_swap: {
        const std::int64_t rank = slot / shard_;
        const bool back = slot % shard_ >= chunk_;
        return (back ? 2 * ranks_ - 1 - rank : rank) * chunk_ + slot % chunk_;
      }
      case ContextLayout::striped:
        return slot % shard_ * ranks_ + slot / shard_;
    }
    return slot;
  }

  /// The slot that `position` moves to.
  [[nodiscard]] std::int64_t destination(std::int64_t position) const {
    if (ranks_ == 1) {
      return position;
    }
    switch (layout_) {
      case ContextLayout::contiguous:
        return position;
      case ContextLayout::dual_chunk_swap: {
        const std::int64_t chunk = position / chunk_;
        const std::int64_t place = chunk < ranks_ ? 2 * chunk : 2 * (2 * ranks_ - 1 - chunk) + 1;
        return place * chunk_ + position % chunk_;
      }
      case ContextLayout::striped:
        return position % ranks_ * shard_ + position / ranks_;
    }
    return position;
  }

  [[nodiscard]] std::int64_t rank_of(std::int64_t position) const {
    return shard_ == 0 ? 0 : destination(position) / shard_;
  }

  /// source(0), source(1), ...: permuted[i] = sequence[permutation[i]].
  [[nodiscard]] std::vector<std::int64_t> permutation() const {
    std::vector<std::int64_t> sources(static_cast<std::size_t>(positions_));
    for (std::int64_t slot = 0; slot < positions_; ++slot) {
      sources[static_cast<std::size_t>(slot)] = source(slot);
    }
    return sources;
  }

  /// destination(0), destination(1), ...: sequence[i] = permuted[inverse[i]].
  [[nodiscard]] std::vector<std::int64_t> inverse() const {
    std::vector<std::int64_t> slots(static_cast<std::size_t>(positions_));
    for (std::int64_t position = 0; position < positions_; ++position) {
      slots[static_cast<std::size_t>(position)] = destination(position);
    }
    return slots;
  }

 private:
  ContextLayout layout_;
  std::int64_t positions_;
  std::int64_t ranks_;
  std::int64_t shard_ = 0;
  std::int64_t chunk_ = 0;
};

}  // namespace heddle

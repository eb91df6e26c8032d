#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/detail/logits_pass.hpp"
#include "heddle/head/options.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/shard_rules.hpp"
#include "heddle/mesh/topology.hpp"

/// How the head's weight lies over a mesh, and what of it a device holds.
namespace heddle::head {

/// The dimension of the weight that is cut over the devices that share it out.
enum class WeightSplit : std::uint8_t {
  hidden,  ///< equal blocks of rows of [hidden, vocab]; the mesh must divide them
  vocab,   ///< contiguous columns, as equal as they can be, the first devices one more
};

/// throws    validate: Error for an unknown enum, gather_columns < 1
struct HeadSharding {
  DenseShard dense = DenseShard::fsdp;
  WeightSplit split = WeightSplit::hidden;
  /// Columns of the weight that are gathered at a time, in whole tiles of statistics forward and whole
  /// blocks of 512 backward, at least one of them. dims.vocab or more: the whole weight stays while it
  /// is used, which Mode::local, Mode::unsharded and a forward_backward of one pass want.
  std::int64_t gather_columns = 512;

  void validate(std::string_view where) const {
    require(dense == DenseShard::fsdp || dense == DenseShard::all, where, "sharding.dense", dense,
            "must be fsdp or all");
    require(split == WeightSplit::hidden || split == WeightSplit::vocab, where, "sharding.split",
            split, "must be hidden or vocab");
    require(gather_columns >= 1, where, "sharding.gather_columns", gather_columns, "must be >= 1");
  }
};

/// Rows and columns of [hidden, vocab] that a device holds.
struct WeightBlock {
  IndexRange hidden;
  IndexRange vocab;
};

namespace detail {

/// A weight's blocks on the members of a group, and the tiles of columns that it passes in.
class WeightPlan {
 public:
  /// throws    Error for dims, the sharding, a hidden dimension that the mesh does not divide
  WeightPlan(std::string_view where, const Topology& mesh, std::int64_t id, const Dims& dims,
             WeightLayout layout, const HeadSharding& sharding)
      : hidden_(dims.hidden), vocab_(dims.vocab), layout_(layout), split_(sharding.split) {
    dims.validate(where);
    sharding.validate(where);
    const ArrayShards shards = shards_of(ModelArray::head, {.dense = sharding.dense});
    gathered_ = shards.gathered;
    summed_ = shards.summed;
    members_ = gathered_.size(mesh.axes());
    index_ = mesh.index_in(gathered_, id);
    copies_ = summed_.size(mesh.axes());
    copy_ = mesh.index_in(summed_, id);
    whole_ = sharding.gather_columns >= dims.vocab;
    gather_columns_ = sharding.gather_columns;
    if (split_ == WeightSplit::hidden) {
      require_divisible("head dim 0 (D)", dims.hidden, mesh.axes(), gathered_);
    }
  }

  [[nodiscard]] const AxisTuple& gathered() const { return gathered_; }
  [[nodiscard]] const AxisTuple& summed() const { return summed_; }
  [[nodiscard]] std::int64_t members() const { return members_; }  ///< along gathered()
  [[nodiscard]] std::int64_t index() const { return index_; }
  [[nodiscard]] std::int64_t copies() const { return copies_; }  ///< along summed()
  [[nodiscard]] std::int64_t copy() const { return copy_; }
  [[nodiscard]] WeightLayout layout() const { return layout_; }
  [[nodiscard]] WeightSplit split() const { return split_; }
  [[nodiscard]] bool whole() const { return whole_; }

  /// What a member holds of columns [first, last).
  [[nodiscard]] WeightBlock part(std::int64_t member, Columns columns) const {
    if (split_ == WeightSplit::hidden) {
      const std::int64_t rows = hidden_ / members_;
      return {{member * rows, rows}, {columns.first, columns.count()}};
    }
    const IndexRange held = share(member);
    const std::int64_t first = std::clamp(columns.first, held.first, held.first + held.count);
    const std::int64_t last = std::clamp(columns.last, held.first, held.first + held.count);
    return {{0, hidden_}, {first, last - first}};
  }
  [[nodiscard]] WeightBlock held() const { return part(index_, {0, vocab_}); }

  [[nodiscard]] WeightExtents held_extents() const {
    const WeightBlock own = held();
    const bool by_hidden = split_ == WeightSplit::hidden;
    return {own.hidden.count, own.vocab.count,
            by_hidden ? "the device's share of dims.hidden" : "dims.hidden",
            by_hidden ? "dims.vocab" : "the device's share of dims.vocab"};
  }

  [[nodiscard]] std::int64_t part_elements(std::int64_t member, Columns columns) const {
    const WeightBlock block = part(member, columns);
    return block.hidden.count * block.vocab.count;
  }
  /// Of any member and any tile so wide.
  [[nodiscard]] std::int64_t most_part_elements(std::int64_t columns) const {
    return split_ == WeightSplit::hidden ? hidden_ / members_ * columns
                                         : hidden_ * std::min(columns, share(0).count);
  }

  /// Parts one behind the other are the tile as it is stored.
  [[nodiscard]] bool parts_are_tile() const {
    return (layout_ == WeightLayout::dv) == (split_ == WeightSplit::hidden);
  }

  /// Columns of a tile, in whole cells of `grid` from column 0 on.
  [[nodiscard]] std::int64_t tile_columns(std::int64_t grid) const {
    return whole_ ? vocab_
                  : std::min(std::max<std::int64_t>(gather_columns_ / grid, 1) * grid, vocab_);
  }

  /// The storage of a tile's block: [hidden, vocab] of it or the other way round.
  [[nodiscard]] std::int64_t stored_rows(const WeightBlock& block) const {
    return layout_ == WeightLayout::dv ? block.hidden.count : block.vocab.count;
  }
  [[nodiscard]] std::int64_t stored_cols(const WeightBlock& block) const {
    return layout_ == WeightLayout::dv ? block.vocab.count : block.hidden.count;
  }

  /// `block`, whose place is counted from `origin`'s first row and column, in an array that stores
  /// `origin`.
  template <class T>
  [[nodiscard]] MatrixView<T> block_of(MatrixView<T> array, const WeightBlock& origin,
                                       const WeightBlock& block) const {
    const std::int64_t hidden = block.hidden.first - origin.hidden.first;
    const std::int64_t vocab = block.vocab.first - origin.vocab.first;
    const bool dv = layout_ == WeightLayout::dv;
    return array.row_block(dv ? hidden : vocab, stored_rows(block))
        .column_block(dv ? vocab : hidden, stored_cols(block));
  }
  [[nodiscard]] WeightBlock tile_block(Columns columns) const {
    return {{0, hidden_}, {columns.first, columns.count()}};
  }

  [[nodiscard]] std::int64_t hidden() const { return hidden_; }
  [[nodiscard]] std::int64_t vocab() const { return vocab_; }

 private:
  [[nodiscard]] IndexRange share(std::int64_t member) const {
    const std::int64_t each = vocab_ / members_;
    const std::int64_t more = vocab_ % members_;
    return {member * each + std::min(member, more), each + (member < more ? 1 : 0)};
  }

  std::int64_t hidden_;
  std::int64_t vocab_;
  WeightLayout layout_;
  WeightSplit split_;
  AxisTuple gathered_;
  AxisTuple summed_;
  std::int64_t members_ = 1;
  std::int64_t index_ = 0;
  std::int64_t copies_ = 1;
  std::int64_t copy_ = 0;
  bool whole_ = false;
  std::int64_t gather_columns_ = 1;
};

}  // namespace detail

/// What device `id` holds of the weight: the shape of its shard, [hidden, vocab] or turned round as the
/// layout says.
///
/// throws    Error for dims, the sharding, a hidden dimension that the mesh does not divide
[[nodiscard]] inline WeightBlock weight_block(const Dims& dims, const HeadSharding& sharding,
                                              const Topology& mesh, std::int64_t id) {
  return detail::WeightPlan("head::weight_block", mesh, id, dims, WeightLayout::dv, sharding)
      .held();
}

/// What a device's part in a pass over the weight moves, by what it is for.
struct HeadTraffic {
  AxisTuple gathered = {};  ///< along these the weight is gathered and its cotangent scattered
  AxisTuple summed = {};    ///< along these the scattered cotangent is summed
  Traffic gather = {};
  Traffic scatter = {};
  Traffic sum = {};

  /// Bytes that leave the device along the groups of `axes`.
  [[nodiscard]] std::int64_t sent_along(const AxisTuple& axes) const {
    return (axes == gathered ? gather.sent_bytes + scatter.sent_bytes : 0) +
           (axes == summed ? sum.sent_bytes : 0);
  }

  friend bool operator==(const HeadTraffic&, const HeadTraffic&) = default;
};

}  // namespace heddle::head

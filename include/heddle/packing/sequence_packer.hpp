#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/packing/first_fit.hpp"
#include "heddle/packing/pack.hpp"
#include "heddle/packing/pack_options.hpp"
#include "heddle/packing/packed_chunk.hpp"
#include "heddle/packing/rollout.hpp"
#include "heddle/packing/row_layout.hpp"
#include "heddle/packing/row_writer.hpp"
#include "heddle/packing/segment_table.hpp"

namespace heddle::packing {

/// Packing of a stream: items arrive in lists, an optimizer update takes items_per_update of them, and
/// chunks are handed out as soon as there are tokens enough to fill one.
///
///   on a list: keep its items; at the update's last item hand out everything, the last chunk as
///   is_update_step; before that hand out a chunk while the tokens kept (padded: the items kept) would
///   fill pack_size rows
///
/// writes    the packer's own buffers; a chunk is valid until `use` returns
/// alias     an item's memory must live until the chunk that holds it is handed out
/// specials  alignment gaps are not counted, so a chunk handed out early may leave items for the next;
///           item_index counts the items of the update in arrival order; a chunk counts as handed out
///           even if `use` throws
/// memory    the buffers of one chunk and the items (views) of one update
/// throws    Error for options that validate refuses and items_per_update < 1 (constructor); for items that
///           validate refuses and a list that passes the update's end (feed: nothing of the list is kept
///           then); for what chunk_dims refuses (feed: before that chunk is written, its items are kept);
///           for a stream that ends within an update (finish)
/// source    google/tunix pack_sequences; spec/packing.md 2.2 (P-6)
class SequencePacker {
 public:
  SequencePacker(const PackOptions& options, std::int64_t items_per_update)
      : options_(options), items_per_update_(items_per_update) {
    constexpr const char* where = "packing::SequencePacker";
    validate(where, options);
    require(items_per_update >= 1, where, "items_per_update", items_per_update, "must be >= 1");
  }

  [[nodiscard]] const PackOptions& options() const { return options_; }
  [[nodiscard]] std::int64_t items_per_update() const { return items_per_update_; }
  /// Items of the current update that have arrived, and those of them not handed out yet.
  [[nodiscard]] std::int64_t received() const { return static_cast<std::int64_t>(items_.size()); }
  [[nodiscard]] std::int64_t kept() const { return kept_items_; }

  template <class Use>
  void feed(std::span<const Rollout> items, const Use& use) {
    constexpr const char* where = "packing::SequencePacker::feed";
    const std::int64_t room = items_per_update_ - received();
    if (std::cmp_greater(items.size(), room)) {
      fail(where, "items.size", items.size(),
           "must not pass the end of the update (" + std::to_string(received()) + " of " +
               std::to_string(items_per_update_) + " items have arrived)");
    }
    validate(where, items, options_);
    for (const Rollout& item : items) {
      items_.push_back(item);
      is_kept_.push_back(true);
      ++kept_items_;
      kept_tokens_ += item.length();
    }
    const bool update_is_complete = received() == items_per_update_;
    if (received() == 0 || (!update_is_complete && !fills_a_chunk())) {
      return;
    }
    // One placement for all chunks: what a chunk leaves over is what the later rows hold.
    const detail::Placement placement = detail::place(items_, kept_indices(), options_);
    for (std::int64_t row = 0; row < placement.rows.rows(); row += options_.pack_size) {
      if (!update_is_complete && !fills_a_chunk()) {
        return;
      }
      const RowRange rows{row, options_.pack_size};
      PackedChunk chunk =
          detail::write_chunk(where, items_, placement.rows, rows, options_, buffers_);
      chunk.is_update_step =
          update_is_complete && row + options_.pack_size == placement.rows.rows();
      forget(placement.bins, rows);
      if (chunk.is_update_step) {
        items_.clear();
        is_kept_.clear();
      }
      use(std::as_const(chunk));
    }
  }

  /// The stream is over: refuses to lose what has not been handed out.
  void finish() const {
    require(received() == 0, "packing::SequencePacker::finish", "received", received(),
            "the stream must end at the end of an update, items would be lost");
  }

 private:
  [[nodiscard]] bool fills_a_chunk() const {
    switch (options_.filling) {
      case RowFilling::packed:
        return kept_tokens_ >= options_.pack_size * options_.budget;
      case RowFilling::padded:
        return kept_items_ >= options_.pack_size;
    }
    return false;
  }

  [[nodiscard]] std::vector<std::int32_t> kept_indices() const {
    std::vector<std::int32_t> indices;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (is_kept_[i]) {
        indices.push_back(static_cast<std::int32_t>(i));
      }
    }
    return indices;
  }

  void forget(const BinAssignment& bins, const RowRange& rows) {
    const std::int64_t last = std::min(rows.first + rows.count, bins.bins());
    for (std::int64_t bin = rows.first; bin < last; ++bin) {
      for (const std::int32_t index : bins.bin(bin)) {
        const auto i = static_cast<std::size_t>(index);
        is_kept_[i] = false;
        --kept_items_;
        kept_tokens_ -= items_[i].length();
      }
    }
  }

  PackOptions options_;
  std::int64_t items_per_update_;
  std::vector<Rollout> items_;  // of the update so far
  std::vector<bool> is_kept_;   // not handed out yet
  std::int64_t kept_items_ = 0;
  std::int64_t kept_tokens_ = 0;
  ChunkBuffers buffers_;
};

}  // namespace heddle::packing

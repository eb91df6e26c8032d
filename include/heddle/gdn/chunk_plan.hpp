#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"

namespace heddle::gdn {

/// Where the chunked evaluation cuts a row: token ranges in ascending order, and which of them the state
/// before the row can reach.
///
/// specials  Chunking::aligned: a chunk holds one document and no padding, so that nothing of a
///           document's bits depends on where in the row it lies. Chunking::grid: multiples of the
///           chunk size, padding and starts inside; stretches of padding alone give no chunk in either
/// memory    16 bytes a chunk, owned; at most tokens / chunk + number of stretches of a document
/// cost      O(tokens)
/// throws    Error as ChunkOptions::validate
/// source    spec/gdn.md 5.3
class ChunkPlan {
 public:
  ChunkPlan(const Segments& segments, const ChunkOptions& options) : chunk_(options.chunk) {
    options.validate("gdn::ChunkPlan");
    if (options.chunking == Chunking::grid) {
      cut_grid(segments);
    } else {
      cut_aligned(segments);
    }
    for (std::int64_t i = 0; i < count(); ++i) {
      const TokenRange range = at(i);
      longest_ = std::max(longest_, range.count);
      for (std::int64_t t = range.first; t < range.end(); ++t) {
        if (segments.starts(t)) {
          first_start_ = std::min(first_start_, i);
          last_start_ = i;
        }
      }
    }
    first_start_ = std::min(first_start_, count());
  }

  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(ranges_.size()); }
  [[nodiscard]] TokenRange at(std::int64_t index) const {
    return ranges_[static_cast<std::size_t>(index)];
  }
  /// The chunk size asked for, and the most tokens that a chunk of this row has.
  [[nodiscard]] std::int64_t chunk() const { return chunk_; }
  [[nodiscard]] std::int64_t longest() const { return longest_; }

  /// The first chunk in which a document starts, count() without any: what comes later knows nothing
  /// of the state before the row.
  [[nodiscard]] std::int64_t first_start() const { return first_start_; }
  /// The last such chunk, -1 without any: the state after the row knows nothing of what comes before.
  [[nodiscard]] std::int64_t last_start() const { return last_start_; }

 private:
  void cut_grid(const Segments& segments) {
    for (std::int64_t first = 0; first < segments.tokens(); first += chunk_) {
      const TokenRange range{first, std::min(chunk_, segments.tokens() - first)};
      bool any = false;
      for (std::int64_t t = range.first; t < range.end(); ++t) {
        any = any || segments.valid(t);
      }
      if (any) {
        ranges_.push_back(range);
      }
    }
  }

  void cut_aligned(const Segments& segments) {
    bool open = false;
    for (std::int64_t t = 0; t < segments.tokens(); ++t) {
      if (!segments.valid(t)) {
        open = false;
      } else if (open && !segments.starts(t) && ranges_.back().count < chunk_) {
        ++ranges_.back().count;
      } else {
        ranges_.push_back({t, 1});
        open = true;
      }
    }
  }

  std::vector<TokenRange> ranges_;
  std::int64_t chunk_;
  std::int64_t longest_ = 0;
  std::int64_t first_start_ = INT64_MAX;
  std::int64_t last_start_ = -1;
};

}  // namespace heddle::gdn

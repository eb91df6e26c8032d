#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/context_layout.hpp"
#include "heddle/packing/segment_table.hpp"

namespace heddle::packing {

/// Which tiles an attention kernel runs, by the ranges of segment ids it compares.
enum class TileRule {
  naive,      ///< padding's id 0 is an id like others, as in the kernel behind tunix#2913's figures
  pad_aware,  ///< ranges over ids > 0 alone; a tile of padding alone never runs
};

/// Which sizes are legal.
enum class TileCheck {
  any,     ///< a block that does not divide ends short
  strict,  ///< what the TPU kernels want: whole query blocks in a chunk, whole key blocks in a row
};

/// Query and key positions of one tile.
struct TileBlocks {
  std::int64_t query = 0;
  std::int64_t key = 0;

  friend constexpr bool operator==(const TileBlocks&, const TileBlocks&) = default;
};

/// How attention is sharded, and what counts as a tile.
struct TileOptions {
  std::int64_t context = 1;  ///< ranks of the context axis
  ContextLayout layout = ContextLayout::dual_chunk_swap;
  TileBlocks blocks = {};
  TileRule rule = TileRule::naive;
  TileCheck check = TileCheck::any;
};

/// How attention is sharded and tiled in its two phases. The default blocks are the recipe's: both
/// tile shapes hold 2^22 pairs.
struct AttentionShards {
  std::int64_t context = 1;
  ContextLayout layout = ContextLayout::dual_chunk_swap;
  TileBlocks forward{1024, 4096};
  TileBlocks backward{2048, 2048};  ///< of the fused backward, sharded by query too
};

/// A row as its documents, placed `shift` further right than the segments say.
struct PlacedRow {
  std::span<const Segment> segments = {};
  std::int64_t tokens = 0;  ///< positions of the row, padding included
  std::int64_t shift = 0;
};

/// Tiles of each context rank in both phases.
struct AttentionTiles {
  std::vector<std::int64_t> forward;
  std::vector<std::int64_t> backward;

  /// Matrix products of the busiest rank: two a forward tile, five a backward tile.
  [[nodiscard]] std::int64_t busiest_cost() const {
    return 2 * *std::max_element(forward.begin(), forward.end()) +
           5 * *std::max_element(backward.begin(), backward.end());
  }
};

namespace detail {

/// Consecutive local positions [first, last) of one segment id > 0; runs are disjoint and ascend.
struct IdRun {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int32_t id = 0;
};

/// What a tile shows of itself to the rule. Empty: no id takes part.
struct TileRange {
  std::int32_t min_id = std::numeric_limits<std::int32_t>::max();
  std::int32_t max_id = -1;

  [[nodiscard]] bool meets(const TileRange& other) const {
    return min_id <= other.max_id && other.min_id <= max_id;
  }
};

[[nodiscard]] inline std::vector<IdRun> runs_of(const PlacedRow& row) {
  std::vector<IdRun> runs;
  runs.reserve(row.segments.size());
  for (const Segment& segment : row.segments) {
    const std::int64_t first = segment.start + row.shift;
    runs.push_back({first, first + segment.len, static_cast<std::int32_t>(runs.size()) + 1});
  }
  return runs;
}

[[nodiscard]] inline std::vector<IdRun> runs_of(std::span<const std::int32_t> segment_ids) {
  std::vector<IdRun> runs;
  const auto size = static_cast<std::int64_t>(segment_ids.size());
  for (std::int64_t t = 0; t < size; ++t) {
    const std::int32_t id = segment_ids[static_cast<std::size_t>(t)];
    if (id == 0) {
      continue;
    }
    if (!runs.empty() && runs.back().last == t && runs.back().id == id) {
      ++runs.back().last;
    } else {
      runs.push_back({t, t + 1, id});
    }
  }
  return runs;
}

/// The runs as they lie in a rank's shard, by local index. A slice of a run is one interval of a shard
/// (two where a run covers both chunks of a dual chunk swap), and local order is sequence order in
/// every layout, so the result ascends too.
inline void localize(std::span<const IdRun> runs, const ContextPartition& partition,
                     std::int64_t rank, std::vector<IdRun>& local) {
  local.clear();
  const std::int64_t ranks = partition.ranks();
  if (ranks > 1 && partition.layout() == ContextLayout::striped) {
    // Position i * ranks + rank has local index i: the first not below p is ceil((p - rank) / ranks).
    const auto local_index = [&](std::int64_t position) {
      return (position - rank + ranks - 1) / ranks;
    };
    for (const IdRun& run : runs) {
      const std::int64_t first = local_index(std::max(run.first, rank));
      const std::int64_t last = local_index(std::max(run.last, rank));
      if (first < last) {
        local.push_back({first, last, run.id});
      }
    }
    return;
  }
  const std::int64_t chunk = partition.chunk();
  for (std::int64_t offset = 0; offset < partition.shard(); offset += chunk) {
    const std::int64_t begin = partition.source(rank * partition.shard() + offset);
    for (const IdRun& run : runs) {
      const std::int64_t first = std::max(run.first, begin);
      const std::int64_t last = std::min(run.last, begin + chunk);
      if (first < last) {
        local.push_back({first - begin + offset, last - begin + offset, run.id});
      }
    }
  }
}

/// The ranges of `size` local positions cut into blocks (the last may be short), in one sweep over
/// runs and tiles.
inline void tile_ranges(std::span<const IdRun> runs, std::int64_t size, std::int64_t block,
                        TileRule rule, std::vector<TileRange>& tiles) {
  tiles.clear();
  std::size_t next = 0;
  for (std::int64_t begin = 0; begin < size; begin += block) {
    const std::int64_t end = std::min(begin + block, size);
    TileRange range;
    std::int64_t real = 0;
    while (next < runs.size() && runs[next].last <= begin) {
      ++next;
    }
    for (std::size_t i = next; i < runs.size() && runs[i].first < end; ++i) {
      range.min_id = std::min(range.min_id, runs[i].id);
      range.max_id = std::max(range.max_id, runs[i].id);
      real += std::min(runs[i].last, end) - std::max(runs[i].first, begin);
    }
    if (rule == TileRule::naive && real < end - begin) {
      range.min_id = 0;
      range.max_id = std::max(range.max_id, 0);
    }
    tiles.push_back(range);
  }
}

inline void validate_tiles(const char* where, const TileOptions& options, std::int64_t tokens,
                           const ContextPartition& partition) {
  require(options.blocks.query >= 1, where, "options.blocks.query", options.blocks.query,
          "must be >= 1");
  require(options.blocks.key >= 1, where, "options.blocks.key", options.blocks.key, "must be >= 1");
  require(options.rule == TileRule::naive || options.rule == TileRule::pad_aware, where,
          "options.rule", options.rule, "must be naive or pad_aware");
  if (options.check == TileCheck::strict) {
    if (partition.chunk() % options.blocks.query != 0) {
      fail(where, "options.blocks.query", options.blocks.query,
           "strict: must divide a rank's chunk (" + std::to_string(partition.chunk()) + ")");
    }
    if (tokens % options.blocks.key != 0) {
      fail(where, "options.blocks.key", options.blocks.key,
           "strict: must divide the row (" + std::to_string(tokens) + ")");
    }
  }
}

inline void validate_row(const char* where, const PlacedRow& row) {
  require(row.shift >= 0 && row.shift <= row.tokens, where, "row.shift", row.shift,
          "must be in [0, row.tokens]");
  std::int64_t free = 0;
  for (std::size_t i = 0; i < row.segments.size(); ++i) {
    const Segment& segment = row.segments[i];
    if (segment.len < 1) {
      fail(where, element_name("row.segments", i) + ".len", segment.len, "must be >= 1");
    }
    const std::int64_t start = segment.start + row.shift;
    if (start < free) {
      fail(where, element_name("row.segments", i) + ".start", start,
           "shifted, must not lie before " + std::to_string(free));
    }
    free = start + segment.len;
    if (free > row.tokens) {
      fail(where, element_name("row.segments", i) + ".end", free,
           "shifted, must not exceed row.tokens (" + std::to_string(row.tokens) + ")");
    }
  }
}

/// Tiles of each rank, for runs in a row of partition.positions() tokens.
[[nodiscard]] inline std::vector<std::int64_t> count_tiles(std::span<const IdRun> runs,
                                                           const ContextPartition& partition,
                                                           TileBlocks blocks, TileRule rule) {
  // A block beyond its axis is the whole axis; cut to that, sums of blocks stay in range.
  blocks.query = std::min(blocks.query, std::max<std::int64_t>(partition.shard(), 1));
  blocks.key = std::min(blocks.key, std::max<std::int64_t>(partition.positions(), 1));
  std::vector<TileRange> keys;
  tile_ranges(runs, partition.positions(), blocks.key, rule, keys);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(partition.ranks()), 0);
  std::vector<IdRun> local;
  std::vector<TileRange> queries;
  for (std::int64_t rank = 0; rank < partition.ranks(); ++rank) {
    localize(runs, partition, rank, local);
    tile_ranges(local, partition.shard(), blocks.query, rule, queries);
    std::int64_t count = 0;
    for (std::size_t q = 0; q < queries.size(); ++q) {
      // Local order is sequence order, so the tile's last slot holds its greatest position.
      const std::int64_t last_slot =
          std::min((static_cast<std::int64_t>(q) + 1) * blocks.query, partition.shard()) - 1;
      const std::int64_t last_position = partition.source(rank * partition.shard() + last_slot);
      const std::int64_t visible = last_position / blocks.key + 1;
      for (std::int64_t k = 0; k < visible; ++k) {
        count += queries[q].meets(keys[static_cast<std::size_t>(k)]) ? 1 : 0;
      }
    }
    counts[static_cast<std::size_t>(rank)] = count;
  }
  return counts;
}

}  // namespace detail

/// How many (query tile, key tile) pairs each context rank's attention kernel runs for one row.
/// Rank r tiles its shard, in the layout's order, by blocks.query; keys are the row in sequence order,
/// tiled by blocks.key. A pair runs if
///   (i)  the greatest position of the query tile >= the first position of the key tile, and
///   (ii) the ranges [min id, max id] of the two meet: over all ids (naive) or ids > 0 (pad_aware)
///
/// shapes    segment_ids [T], or the row's segments (shifted right by `shift`) in a row of `tokens`
/// writes    returns [context] counts
/// specials  T = 0: no tile; ids need not ascend (then a range may hold ids that no token has)
/// accuracy  pad_aware is exact for contiguous tiles and ascending ids: a pair runs iff it holds a real
///           query and a real key of one document, key not behind query
/// memory    O(segments + tiles of a rank)
/// cost      O(segments + tiles) for the ranges of a rank (segment_ids: O(T) more), one comparison a
///           causal pair of tiles
/// throws    Error for: an id < 0, blocks < 1, an unknown rule, a row that the layout cannot divide,
///           sizes that TileCheck::strict refuses, segments outside the row
/// source    seed 0 (tunix#2913) for the naive rule's figures; spec/packing.md 7
[[nodiscard]] inline std::vector<std::int64_t> count_tiles(
    std::span<const std::int32_t> segment_ids, const TileOptions& options) {
  constexpr const char* where = "packing::count_tiles";
  const auto tokens = static_cast<std::int64_t>(segment_ids.size());
  const ContextPartition partition(options.layout, tokens, options.context);
  detail::validate_tiles(where, options, tokens, partition);
  for (std::size_t t = 0; t < segment_ids.size(); ++t) {
    if (segment_ids[t] < 0) {
      fail(where, element_name("segment_ids", t), segment_ids[t], "must be >= 0");
    }
  }
  return detail::count_tiles(detail::runs_of(segment_ids), partition, options.blocks, options.rule);
}

[[nodiscard]] inline std::vector<std::int64_t> count_tiles(const PlacedRow& row,
                                                           const TileOptions& options) {
  constexpr const char* where = "packing::count_tiles";
  const ContextPartition partition(options.layout, row.tokens, options.context);
  detail::validate_tiles(where, options, row.tokens, partition);
  detail::validate_row(where, row);
  return detail::count_tiles(detail::runs_of(row), partition, options.blocks, options.rule);
}

/// Refuses shards that a row of `tokens` positions cannot have. `where` is who refuses.
inline void validate(std::string_view where, const AttentionShards& shards, std::int64_t tokens) {
  static_cast<void>(ContextPartition(shards.layout, tokens, shards.context));
  for (const auto& [argument, size] :
       {std::pair{"options.attention.forward.query", shards.forward.query},
        std::pair{"options.attention.forward.key", shards.forward.key},
        std::pair{"options.attention.backward.query", shards.backward.query},
        std::pair{"options.attention.backward.key", shards.backward.key}}) {
    require(size >= 1, where, argument, size, "must be >= 1");
  }
}

/// Both phases of a row.
[[nodiscard]] inline AttentionTiles count_attention_tiles(const PlacedRow& row,
                                                          const AttentionShards& shards,
                                                          TileRule rule) {
  const auto count = [&](TileBlocks blocks) {
    return count_tiles(
        row, {.context = shards.context, .layout = shards.layout, .blocks = blocks, .rule = rule});
  };
  return {.forward = count(shards.forward), .backward = count(shards.backward)};
}

}  // namespace heddle::packing

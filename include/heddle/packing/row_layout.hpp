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
#include "heddle/packing/first_fit.hpp"
#include "heddle/packing/pack_options.hpp"
#include "heddle/packing/rollout.hpp"
#include "heddle/packing/segment_table.hpp"

namespace heddle::packing {

/// Refuses items that no row can hold, before any is placed; they are items[0], items[1], ... in the
/// message.
///
/// throws    Error for: what validate(item) refuses, more loss tokens than options.max_loss_tokens, more
///           than 2^31 - 1 items
inline void validate(std::string_view where, std::span<const Rollout> items,
                     const PackOptions& options) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  require(std::cmp_less_equal(items.size(), most), where, "items.size", items.size(),
          "must be <= 2^31 - 1");
  for (std::size_t i = 0; i < items.size(); ++i) {
    validate(where, static_cast<std::int64_t>(i), items[i], options.budget);
    if (options.max_loss_tokens) {
      const std::int64_t count = loss_token_count(items[i]);
      if (count > *options.max_loss_tokens) {
        fail(where, element_name("items", i) + ".loss_tokens", count,
             "must not exceed options.max_loss_tokens (" +
                 std::to_string(*options.max_loss_tokens) + ")");
      }
    }
  }
}

namespace detail {

/// Shares out items[pending[0]], items[pending[1]], ... (arrival order) over at most `most_bins` bins;
/// the indices in the result are those of `items`. The items have been validated.
[[nodiscard]] inline BinAssignment assign_bins(std::span<const Rollout> items,
                                               std::span<const std::int32_t> pending,
                                               std::int64_t most_bins, const PackOptions& options) {
  BinAssignment bins;
  switch (options.filling) {
    case RowFilling::packed: {
      std::vector<std::int32_t> lengths;
      std::vector<std::int32_t> loss_tokens;
      for (const std::int32_t index : pending) {
        const Rollout& item = items[static_cast<std::size_t>(index)];
        lengths.push_back(static_cast<std::int32_t>(item.length()));
        if (options.max_loss_tokens) {
          loss_tokens.push_back(static_cast<std::int32_t>(loss_token_count(item)));
        }
      }
      BinLimits limits{.budget = options.budget,
                       .segment_align_multiple = options.segment_align_multiple,
                       .max_segments = options.segment_limit(),
                       .bins = most_bins};
      if (options.max_loss_tokens) {
        limits.max_loss_tokens = *options.max_loss_tokens;
      }
      bins = first_fit_decreasing(lengths, limits, loss_tokens);
      break;
    }
    case RowFilling::padded: {
      const auto count =
          static_cast<std::int32_t>(std::min(most_bins, static_cast<std::int64_t>(pending.size())));
      for (std::int32_t i = 0; i < static_cast<std::int32_t>(pending.size()); ++i) {
        (i < count ? bins.items : bins.leftover).push_back(i);
        if (i < count) {
          bins.bin_begin.push_back(i + 1);
        }
      }
      break;
    }
  }
  for (std::vector<std::int32_t>* list : {&bins.items, &bins.leftover}) {
    for (std::int32_t& index : *list) {
      index = pending[static_cast<std::size_t>(index)];
    }
  }
  return bins;
}

/// The documents of bin `row` at their places under `end`, appended to `segments`.
inline void lay_out_bin(std::string_view where, std::span<const Rollout> items,
                        const BinAssignment& bins, std::int64_t row, const PackOptions& options,
                        std::vector<Segment>& segments) {
  const auto argument = [row](const char* what) { return element_name("bins", row) + what; };
  std::int64_t load = 0;
  std::int64_t documents = 0;
  for (const std::int32_t index : bins.bin(row)) {
    if (index < 0 || std::cmp_greater_equal(index, items.size())) {
      fail(where, argument(".item"), index, "must be the index of an item");
    }
    const Rollout& item = items[static_cast<std::size_t>(index)];
    if (item.length() == 0) {
      continue;
    }
    const std::int64_t start = align_up(load, options.segment_align_multiple);
    load = start + item.length();
    if (load > options.budget) {
      fail(where, argument(".end"), load,
           "must not exceed options.budget (" + std::to_string(options.budget) + ")");
    }
    if (++documents > options.segment_limit()) {
      fail(
          where, argument(".segments"), documents,
          "must not exceed options.max_segments (" + std::to_string(options.segment_limit()) + ")");
    }
    segments.push_back({.start = static_cast<std::int32_t>(start),
                        .len = static_cast<std::int32_t>(item.length()),
                        .prompt_len = static_cast<std::int32_t>(item.prompt_length()),
                        .item_index = index});
  }
}

}  // namespace detail

/// Bins as rows: where each document stands, after alignment and the row's shift. Rows of padding alone
/// follow the bins up to `rows`. Items of no token get no document.
///
/// throws    Error for: options that validate refuses, an index that is no item's, a bin whose last token
///           lies beyond the budget or that holds more than max_segments documents, more bins than rows
/// source    spec/packing.md 2, 3
[[nodiscard]] inline SegmentTable lay_out_rows(std::span<const Rollout> items,
                                               const BinAssignment& bins, std::int64_t rows,
                                               const PackOptions& options) {
  constexpr const char* where = "packing::lay_out_rows";
  validate(where, options);
  require(rows >= bins.bins(), where, "rows", rows, "must be at least the number of bins");
  SegmentTable table;
  table.segments.reserve(bins.items.size());
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::size_t first = table.segments.size();
    if (row < bins.bins()) {
      detail::lay_out_bin(where, items, bins, row, options, table.segments);
    }
    const std::span<Segment> segments = std::span<Segment>(table.segments).subspan(first);
    const auto shift = static_cast<std::int32_t>(
        pad_shift({.segments = segments, .tokens = options.budget}, options));
    for (Segment& segment : segments) {
      segment.start += shift;
    }
    table.row_begin.push_back(static_cast<std::int64_t>(table.segments.size()));
    table.shifts.push_back(shift);
  }
  return table;
}

}  // namespace heddle::packing

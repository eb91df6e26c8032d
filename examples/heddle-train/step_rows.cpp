#include "heddle-train/step_rows.hpp"

#include <algorithm>
#include <utility>

#include "heddle/head/target.hpp"
#include "heddle/packing/attention_tiles.hpp"

namespace heddle::train {
namespace {

using examples::RolloutRecord;

template <class T>
void append(ConstMatrixView<T> row, std::vector<T>& values) {
  values.insert(values.end(), row.row(0).begin(), row.row(0).end());
}

// The tiles of a causal attention over the row on one device: what a longer row would cost there.
std::int64_t forward_tiles(std::span<const packing::Segment> segments, std::int64_t tokens) {
  const std::vector<std::int64_t> tiles = packing::count_tiles(
      {.segments = segments, .tokens = tokens},
      {.context = 1,
       .layout = ContextLayout::contiguous,
       .blocks = {std::min<std::int64_t>(1024, tokens), std::min<std::int64_t>(4096, tokens)},
       .rule = packing::TileRule::pad_aware});
  return *std::max_element(tiles.begin(), tiles.end());
}

template <Accumulator A>
void append_row(std::span<const RolloutRecord> records, std::span<const std::size_t> chosen,
                std::span<const double> advantages, const packing::PackedChunk& chunk,
                StepRows<A>& step) {
  const std::int64_t row = step.rows++;
  const auto tokens = static_cast<std::size_t>(step.tokens);
  append<std::int32_t>(chunk.arrays.ids, step.token_ids);
  append<std::int32_t>(chunk.arrays.segment_ids, step.segment_ids);
  append<std::int32_t>(chunk.arrays.segment_positions, step.segment_positions);
  const std::size_t all = step.token_ids.size();
  step.mask.resize(all);
  step.advantages.resize(all);
  step.outcome.resize(all);

  std::vector<std::uint8_t> scored(tokens);
  head::scored_tokens(step.row(std::as_const(step.segment_ids), row),
                      step.row(std::as_const(step.segment_positions), row), scored);
  std::vector<std::uint8_t> completion(tokens);
  std::ranges::transform(chunk.arrays.completion_mask.row(0), completion.begin(),
                         [](float value) { return std::uint8_t{value > 0}; });
  head::loss_mask(completion, scored, head::LossMask::scored, step.row(step.mask, row));
  step.counts = step.counts + loss::count_mask(step.row(std::as_const(step.mask), row),
                                               step.row(std::as_const(step.segment_ids), row));

  const std::span<const packing::Segment> segments = chunk.segments.row(0);
  step.real_tokens += packing::token_count(segments);
  step.busiest_tiles = std::max(step.busiest_tiles, forward_tiles(segments, step.tokens));
  const std::span<A> row_advantages = step.row(step.advantages, row);
  const std::span<Outcome> outcome = step.row(step.outcome, row);
  for (const packing::Segment& segment : segments) {
    const std::size_t index = chosen[static_cast<std::size_t>(segment.item_index)];
    const RolloutRecord& record = records[index];
    const bool given = record.advantages.view().is_given();
    for (auto t = static_cast<std::size_t>(segment.start + segment.prompt_len);
         std::cmp_less(t, segment.end()); ++t) {
      // Computed advantages are kept wider than a packed row's F32.
      row_advantages[t] = static_cast<A>(
          given ? static_cast<double>(chunk.arrays.advantages(0, static_cast<std::int64_t>(t)))
                : advantages[index]);
      if (record.reward) {
        outcome[t] = *record.reward > 0 ? Outcome::rewarded : Outcome::unrewarded;
      }
    }
  }
  const MatrixView<float> old = chunk.arrays.per_token[packing::PerTokenField::old_per_token_logps];
  if (!old.is_null()) {
    step.old_logps.resize(all);
    std::ranges::transform(old.row(0), step.row(step.old_logps, row).begin(),
                           [](float value) { return static_cast<A>(value); });
  }
}

// The routing of the row, layer by layer; -1 throughout where this row has none and another has.
template <Accumulator A>
void append_routing(const packing::PackedChunk& chunk, std::int64_t layers, std::int64_t top_k,
                    StepRows<A>& step) {
  step.forced_experts.resize(static_cast<std::size_t>(layers));
  const MatrixView<std::int16_t> routed = chunk.arrays.routed_experts;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    std::vector<std::int32_t>& ids = step.forced_experts[static_cast<std::size_t>(layer)];
    for (std::int64_t t = 0; t < step.tokens; ++t) {
      for (std::int64_t k = 0; k < top_k; ++k) {
        ids.push_back(chunk.dims.layers == 0 ? -1 : routed(t, layer * top_k + k));
      }
    }
  }
}

}  // namespace

template <Accumulator A>
StepRows<A> pack_step(std::span<const RolloutRecord> records, std::span<const std::size_t> chosen,
                      std::span<const double> advantages, const packing::PackOptions& options) {
  std::vector<packing::Rollout> items;
  std::int64_t layers = 0;
  std::int64_t top_k = 0;
  for (const std::size_t index : chosen) {
    items.push_back(records[index].view());
    if (records[index].routed_experts) {
      layers = records[index].routed_experts->layers;
      top_k = records[index].routed_experts->top_k;
    }
  }
  StepRows<A> step;
  step.tokens = options.budget;
  packing::ChunkBuffers buffers;
  packing::pack(items, options, buffers, [&](const packing::PackedChunk& chunk) {
    append_row(records, chosen, advantages, chunk, step);
    if (layers > 0) {
      append_routing(chunk, layers, top_k, step);
    }
  });
  for (std::int64_t row = 0; layers > 0 && row < step.rows; ++row) {
    std::vector<ConstMatrixView<std::int32_t>>& views = step.forced_views.emplace_back();
    for (const std::vector<std::int32_t>& ids : step.forced_experts) {
      views.emplace_back(ids.data() + row * step.tokens * top_k, step.tokens, top_k);
    }
  }
  return step;
}

template StepRows<float> pack_step<float>(std::span<const RolloutRecord>,
                                          std::span<const std::size_t>, std::span<const double>,
                                          const packing::PackOptions&);
template StepRows<double> pack_step<double>(std::span<const RolloutRecord>,
                                            std::span<const std::size_t>, std::span<const double>,
                                            const packing::PackOptions&);

}  // namespace heddle::train

#include "heddle/packing/batch_assembler.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "packing/owned_rollout.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: an option lost between configuration, assembler and chunk (23-26), or
// pad_align while the position passes (29); the padded refusal removed (38); pad_align >= budget loosened to
// > (39); the refusal of another pad_align under end removed (40); start as the default (41); capacity checked
// under end, or not at all; prompt and response lengths checked each for itself; the warm-up packed with other
// options.

namespace heddle::packing {
namespace {

std::string refusal(const BatchAssemblerConfig& config) {
  return test::thrown_text<Error>([&] { const BatchAssembler assembler(config); });
}

const std::string accepted = "nothing was thrown";
const std::string where = "packing::BatchAssembler: ";

BatchAssemblerConfig job(PadPosition position, std::int64_t budget, std::int64_t pad_align) {
  return {.pack = {.budget = budget, .pad_position = position, .pad_align = pad_align},
          .items_per_update = 4,
          .max_prompt_length = 100,
          .max_response_length = 200};
}

TEST(BatchAssembler, EndTakesTheDefaultPadAlignAlone) {
  EXPECT_EQ(refusal(job(PadPosition::end, 65536, 4096)), accepted);
  EXPECT_EQ(refusal(job(PadPosition::end, 4096, 4096)), accepted);
  EXPECT_EQ(refusal(job(PadPosition::end, 1024, 4096)), accepted) << "short rows work by default";
  for (const std::int64_t align : {2048, 8192, 0, -5, 4095}) {
    EXPECT_EQ(refusal(job(PadPosition::end, 65536, align)),
              where + "options.pad_align = " + std::to_string(align) +
                  ": has no effect with pad_position=end");
  }
}

TEST(BatchAssembler, StartAndAutoNeedRowsThatCanMove) {
  for (const PadPosition position : {PadPosition::start, PadPosition::auto_}) {
    EXPECT_EQ(refusal(job(position, 4097 + 63, 4096)), accepted);
    EXPECT_EQ(refusal(job(position, 4098, 4096)), accepted);
    EXPECT_EQ(refusal(job(position, 65536, 2048)), accepted)
        << "any multiple, not only the default";
    EXPECT_EQ(refusal(job(position, 4096, 4096)),
              where +
                  "options.pad_align = 4096: must be below options.budget (4096) with "
                  "pad_position=" +
                  std::string(name(position)) + ", no row could move");
    EXPECT_EQ(refusal(job(position, 1024, 4096)),
              where +
                  "options.pad_align = 4096: must be below options.budget (1024) with "
                  "pad_position=" +
                  std::string(name(position)) + ", no row could move");
    EXPECT_EQ(refusal(job(position, 65536, 96)),
              where +
                  "options.pad_align = 96: must be a positive multiple of "
                  "segment_align_multiple (64)");
    EXPECT_NE(refusal(job(position, 65536, 0)), accepted);
  }
  EXPECT_EQ(refusal(job(PadPosition::start, 4097, 4096)), accepted);
  EXPECT_EQ(refusal(job(static_cast<PadPosition>(9), 4097, 4096)),
            where + "options.pad_position = 9: must be end, start or auto");
}

TEST(BatchAssembler, PaddedRowsTakeEndAlone) {
  for (const PadPosition position : {PadPosition::start, PadPosition::auto_}) {
    BatchAssemblerConfig config = job(position, 65536, 4096);
    config.pack.filling = RowFilling::padded;
    EXPECT_EQ(refusal(config), where + "options.pad_position = " + std::string(name(position)) +
                                   ": rows of one padded item take end alone");
  }
  BatchAssemblerConfig config = job(PadPosition::end, 65536, 4096);
  config.pack.filling = RowFilling::padded;
  EXPECT_EQ(refusal(config), accepted);
}

TEST(BatchAssembler, FiniteCapacityNeedsPaddingOutOfTheRouting) {
  for (const PadPosition position : {PadPosition::start, PadPosition::auto_}) {
    BatchAssemblerConfig config = job(position, 65536, 4096);
    config.expert_capacity = ExpertCapacity::finite;
    EXPECT_EQ(refusal(config), accepted);
    config.padding_routing = PaddingRouting::routed;
    EXPECT_EQ(refusal(config), where +
                                   "config.padding_routing = routed: with finite expert "
                                   "capacity, pad_position=" +
                                   std::string(name(position)) +
                                   " needs padding excluded from routing");
    config.expert_capacity = ExpertCapacity::unlimited;
    EXPECT_EQ(refusal(config), accepted);
  }
  BatchAssemblerConfig config = job(PadPosition::end, 65536, 4096);
  config.expert_capacity = ExpertCapacity::finite;
  config.padding_routing = PaddingRouting::routed;
  EXPECT_EQ(refusal(config), accepted) << "trailing padding comes last in token order";
}

TEST(BatchAssembler, LengthsMustFitARowTogether) {
  BatchAssemblerConfig config = job(PadPosition::end, 300, 4096);
  EXPECT_EQ(refusal(config), accepted) << "100 + 200";
  config.pack.budget = 299;
  EXPECT_EQ(refusal(config),
            where +
                "config.max_prompt_length + max_response_length = 300: must not exceed "
                "options.budget (299)");
  config = job(PadPosition::end, 300, 4096);
  config.max_prompt_length = -1;
  EXPECT_EQ(refusal(config), where + "config.max_prompt_length = -1: must be >= 0");
  config = job(PadPosition::end, 300, 4096);
  config.max_response_length = -2;
  EXPECT_EQ(refusal(config), where + "config.max_response_length = -2: must be >= 0");
  config.max_response_length = 0;
  EXPECT_EQ(refusal(config), accepted) << "prompts alone";
  config.max_prompt_length = 0;
  EXPECT_EQ(refusal(config),
            where + "config.max_prompt_length + max_response_length = 0: must be >= 1");
  config = job(PadPosition::end, 300, 4096);
  config.items_per_update = 0;
  EXPECT_EQ(refusal(config), where + "config.items_per_update = 0: must be >= 1");
  config = job(PadPosition::end, 0, 4096);
  EXPECT_EQ(refusal(config), where + "options.budget = 0: must be in [1, 2^31 - 1]");
}

BatchAssemblerConfig small_job() {
  return {.pack = {.budget = 24,
                   .pack_size = 2,
                   .segment_align_multiple = 4,
                   .max_segments = 2,
                   .pad_id = 99,
                   .pad_position = PadPosition::start,
                   .pad_align = 8},
          .items_per_update = 3,
          .max_prompt_length = 3,
          .max_response_length = 5};
}

TEST(BatchAssembler, EveryOptionReachesTheChunks) {
  BatchAssembler assembler(small_job());
  const std::vector<test::OwnedRollout> owned{
      test::plain_item(2, 3, 10), test::plain_item(0, 3, 20), test::plain_item(1, 0, 30)};
  int chunks = 0;
  assembler.feed(test::views(owned), [&](const PackedChunk& chunk) {
    ++chunks;
    EXPECT_TRUE(chunk.is_update_step);
    EXPECT_EQ(chunk.dims.rows, 2);
    EXPECT_EQ(chunk.dims.tokens, 24);
    EXPECT_EQ(chunk.num_segments, 3);
    EXPECT_EQ(chunk.segments.segments,
              (std::vector<Segment>{{8, 5, 2, 0}, {16, 3, 0, 1}, {16, 1, 1, 2}}));
    EXPECT_EQ(chunk.segments.shifts, (std::vector<std::int32_t>{8, 16}));
    EXPECT_EQ(chunk.arrays.ids(0, 0), 99);
    EXPECT_EQ(chunk.arrays.ids(0, 8), 10);
    EXPECT_EQ(chunk.arrays.ids(1, 16), 30);
  });
  EXPECT_EQ(chunks, 1);
  assembler.finish();
  EXPECT_EQ(assembler.config().items_per_update, 3);
  const std::vector<test::OwnedRollout> two(2, test::plain_item(1, 1));
  assembler.feed(test::views(two), [](const PackedChunk&) {});
  EXPECT_NE(test::thrown_text<Error>([&] { assembler.finish(); }), accepted);
}

TEST(BatchAssembler, WarmUpPacksWithTheSameOptions) {
  const BatchAssembler assembler(small_job());
  ChunkBuffers buffers;
  const PackedChunk chunk = assembler.warm_up(buffers);
  EXPECT_EQ(chunk.segments.segments,
            (std::vector<Segment>{{8, 8, 3, 0}, {16, 8, 3, 1}, {8, 8, 3, 2}, {16, 8, 3, 3}}));
  EXPECT_EQ(chunk.num_segments, 3);
  EXPECT_EQ(chunk.arrays.ids(1, 7), 99);
  EXPECT_EQ(chunk.arrays.completion_mask(1, 11), 1.0F);
  EXPECT_FALSE(chunk.is_update_step);
}

}  // namespace
}  // namespace heddle::packing

// Ranks with a share of the vocabulary each against one device with all of it.
//
// Mutants, by their numbers in spec/head.md 10: ids shifted inside a shard [24], every rank adding the
// one-hot [30]; besides: the grid of tiles begun at the rank's first column, statistics of inactive rows
// finished.
#include "heddle/head/vocab_shard.hpp"

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "head/problem.hpp"
#include "heddle/head/logits_tile.hpp"
#include "support/compare.hpp"
#include "support/thrown_text.hpp"

namespace {

namespace head = heddle::head;
using namespace heddle::test;
using head::Mode;
using heddle::Workspace;

class VocabShard : public ::testing::Test {
 protected:
  void SetUp() override { current_tier = Tier::chunked; }
};

/// Ranks that end at `cuts`, each going on from the last one's statistics, or merged.
template <class S>
Results<float> sharded(const Problem<S>& problem, const std::vector<std::int64_t>& cuts,
                       bool merged) {
  const std::int64_t tokens = problem.dims.tokens;
  const std::int64_t width = problem.dims.hidden;
  const auto all = static_cast<std::size_t>(tokens);
  Workspace workspace;
  std::vector<head::RowStats<float>> stats(all);
  const auto for_each_rank = [&](const auto& body) {
    std::int64_t first = 0;
    for (const std::int64_t last : cuts) {
      head::Inputs<S> inputs = problem.inputs();
      inputs.weight = inputs.weight.column_block(first, last - first);
      body(head::Dims{.tokens = tokens, .hidden = width, .vocab = last - first}, inputs,
           head::VocabShard{.first_column = first, .vocab = problem.dims.vocab});
      first = last;
    }
  };
  for_each_rank(
      [&](const head::Dims& dims, const head::Inputs<S>& inputs, const head::VocabShard& shard) {
        std::vector<head::RowStats<float>> own(merged ? all : 0);
        head::add_shard_stats(dims, inputs, shard, problem.options,
                              std::span<head::RowStats<float>>(merged ? own : stats), workspace);
        for (std::size_t t = 0; t < own.size(); ++t) {
          stats[t] = head::merge(stats[t], own[t]);
        }
      });
  Results<float> out;
  for (auto* values : {&out.logps, &out.entropy, &out.max, &out.exp_sum, &out.mean}) {
    values->assign(all, -77.0F);
  }
  head::finish_scores<float>(
      problem.dims, problem.active, problem.options, stats,
      head::Outputs<float>{out.logps, out.entropy, out.max, out.exp_sum, out.mean});
  out.d_hidden.assign(problem.hidden.size(), 0.0F);
  out.d_weight.assign(problem.weight.size(), -77.0F);
  for_each_rank([&](const head::Dims& dims, const head::Inputs<S>& inputs,
                    const head::VocabShard& shard) {
    std::vector<float> share(problem.hidden.size(), -77.0F);
    heddle::MatrixView<float> d_weight(out.d_weight.data(), width, problem.dims.vocab);
    head::shard_backward(dims, inputs, shard, problem.options,
                         head::Residuals<float>{out.max, out.exp_sum, out.mean},
                         head::OutputCotangents<float>{problem.d_logps, problem.d_entropy},
                         head::Cotangents<float>{.d_hidden = {share.data(), tokens, width},
                                                 .d_weight = {.values = d_weight.column_block(
                                                                  shard.first_column, dims.vocab)}},
                         workspace);
    for (std::size_t i = 0; i < share.size(); ++i) {
      out.d_hidden[i] += share[i];
    }
  });
  return out;
}

TEST_F(VocabShard, VocabularyShardsOnTheGridHaveTheBitsOfOneDevice) {
  auto problem = random_problem<float>({.tokens = 13, .hidden = 6, .vocab = 203}, 9, 2.0);
  problem.options.vocab_tile = 16;
  problem.options.temperature = 0.7;
  problem.active.assign(13, 1);
  problem.active[4] = 0;
  const auto one = problem.backward();
  const std::vector<std::vector<std::int64_t>> splits = {
      {203}, {96, 203}, {16, 203}, {48, 96, 144, 203}, {16, 32, 192, 203}};
  for (const auto& cuts : splits) {
    const auto split = sharded(problem, cuts, false);
    EXPECT_TRUE(same_bits(split.logps, one.logps));
    EXPECT_TRUE(same_bits(split.entropy, one.entropy));
    EXPECT_TRUE(same_bits(split.max, one.max));
    EXPECT_TRUE(same_bits(split.exp_sum, one.exp_sum));
    EXPECT_TRUE(same_bits(split.mean, one.mean));
    EXPECT_TRUE(same_bits(split.d_weight, one.d_weight)) << "a column knows its rows alone";
    EXPECT_TRUE(close(split.d_hidden, one.d_hidden, 1e-6));
  }
}

TEST_F(VocabShard, MergedShardsOfAnyCutAgreeWithinTheBar) {
  auto problem = random_problem<float>({.tokens = 13, .hidden = 6, .vocab = 203}, 10, 2.0);
  problem.options.vocab_tile = 16;
  const auto one = problem.backward();
  for (const auto& cuts : std::vector<std::vector<std::int64_t>>{{1, 203}, {7, 100, 150, 203}}) {
    for (const bool merged : {false, true}) {
      const auto split = sharded(problem, cuts, merged);
      EXPECT_TRUE(close(split.logps, one.logps, 2e-7));
      EXPECT_TRUE(close(split.entropy, one.entropy, 5e-7));
      EXPECT_TRUE(close(split.d_hidden, one.d_hidden, 1e-6));
      EXPECT_TRUE(close(split.d_weight, one.d_weight, 5e-7));
    }
  }
}

TEST_F(VocabShard, ShardsAreRefusedByTheRulesOfTheWhole) {
  auto problem = random_problem<float>({.tokens = 2, .hidden = 1, .vocab = 4}, 11);
  problem.ids = {1, 9};
  std::vector<head::RowStats<float>> stats(2);
  Workspace workspace;
  const auto refusal = [&](const head::VocabShard& shard) {
    return thrown_text<heddle::Error>([&] {
      head::add_shard_stats(problem.dims, problem.inputs(), shard, problem.options,
                            std::span<head::RowStats<float>>(stats), workspace);
    });
  };
  EXPECT_EQ(refusal({.first_column = 6, .vocab = 10}), "nothing was thrown");
  EXPECT_EQ(
      refusal({.first_column = 5, .vocab = 9}),
      "head::add_shard_stats: inputs.target_ids[1] = 9: must be in [0, shard.vocab (9)) on an "
      "active row");
  EXPECT_EQ(refusal({.first_column = -1, .vocab = 9}),
            "head::add_shard_stats: shard.first_column = -1: must be >= 0");
  EXPECT_EQ(refusal({.first_column = 6, .vocab = 9}),
            "head::add_shard_stats: shard.vocab = 9: must hold the shard's columns");
  problem.options.mode = Mode::local;
  EXPECT_EQ(refusal({.first_column = 0, .vocab = 10}),
            "head::add_shard_stats: options.mode = 1: must be fused");
}

}  // namespace

#include "heddle/moe/reference.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/moe/reference_losses.hpp"
#include "moe/problem.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: weights of slot j instead of permutation[j]; weights
// renormalised after a drop; d_w missing, divided by w, or not zero for a dropped slot; gate and up
// swapped; the activation weighted twice or never; a transposed weight read untransposed; an empty
// expert's cotangent left unwritten; an expert's rows read past its group; padding's rows read, or
// times zero; the shared expert masked by padding, its gate without its own derivative, or left out
// of d_hidden; the router's part of d_hidden gone when it is frozen, or its weight's cotangent not;
// the given cotangent of the logits ignored; accumulate overwriting; storage rounding left out, or
// truncating; K blocks of the product folded twice; tokens past the last block skipped.

namespace heddle::moe::reference {
namespace {

using heddle::moe::test::Gradients;
using heddle::moe::test::layer_by_definition;
using heddle::moe::test::Problem;
using heddle::moe::test::random_problem;
using heddle::moe::test::Result;
using heddle::moe::test::run_backward;
using heddle::moe::test::run_forward;
using heddle::test::close;
using heddle::test::same_bits;
using heddle::test::thrown_text;

using Vector = std::vector<double>;
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// spec/moe.md 10.1's shape of the whole-layer check, with a shared expert.
constexpr Dims small{
    .tokens = 9, .hidden = 6, .experts = 8, .top_k = 3, .expert_hidden = 5, .shared_hidden = 4};

/// Four devices: slices of 3 tokens, 9 slots when balanced; `rows` = 0 is a buffer of no row, < 0
/// none.
DispatchOptions four_devices(int rows, Strategy strategy) {
  DispatchOptions options{.strategy = strategy, .shards = 4};
  if (rows >= 0) {
    options.buffer_factor = (rows + 0.5) / 9;
  }
  return options;
}

double weighted_sum(const Vector& weights, const Vector& values) {
  return std::inner_product(weights.begin(), weights.end(), values.begin(), 0.0);
}

/// Every cotangent of `p` against central differences of sum(d_out * out), plus `more`.
template <class More>
void expect_cotangents_by_differences(Problem<double>& p, const More& more) {
  Gradients<double> actual = run_backward(p);
  const auto objective = [&] {
    const Result<double> result = run_forward(p);
    return weighted_sum(p.d_out, result.out) + more(result);
  };
  const auto expect = [&](const char* name, Vector& input, const Vector& cotangent) {
    const Vector expected = heddle::test::central_differences(std::span<double>(input), objective);
    if (!input.empty()) {
      EXPECT_TRUE(close(cotangent, expected, 1e-6)) << name;
    }
    return expected;
  };
  expect("hidden", p.hidden, actual.d_hidden);
  expect("router_weight", p.router_weight, actual.d_router_weight);
  const Vector d_wi = expect("wi", p.wi, actual.d_wi);
  expect("wo", p.wo, actual.d_wo);
  expect("shared_wi", p.shared_wi, actual.d_shared_wi);
  expect("shared_wo", p.shared_wo, actual.d_shared_wo);
  expect("shared_gate", p.shared_gate, actual.d_shared_gate);

  // Gate and up columns apart: the larger half must not hide the other.
  const auto half = [&](const Vector& all, std::size_t which) {
    const auto width = static_cast<std::size_t>(p.dims.expert_hidden);
    Vector columns;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (i % (2 * width) / width == which) {
        columns.push_back(all[i]);
      }
    }
    return columns;
  };
  EXPECT_TRUE(close(half(actual.d_wi, 0), half(d_wi, 0), 1e-6));
  EXPECT_TRUE(close(half(actual.d_wi, 1), half(d_wi, 1), 1e-6));
}

void expect_cotangents_by_differences(Problem<double>& p) {
  expect_cotangents_by_differences(p, [](const Result<double>&) { return 0.0; });
}

TEST(ReferenceLayer, AgreesWithItsDefinition) {
  for (const TopKWeights weights : {TopKWeights::softmax_of_chosen, TopKWeights::softmax_of_all}) {
    Dims dims = small;
    dims.tokens = 150;  // more than two blocks of tokens
    Problem<double> p = random_problem<double>(dims, 1);
    p.options.router.weights = weights;
    p.segment_ids.assign(150, 1);
    std::fill_n(p.segment_ids.begin() + 20, 30, 0);
    EXPECT_TRUE(close(run_forward(p).out, layer_by_definition(p), 1e-13));
    p.options.router.padding = PaddingRouting::include;
    EXPECT_TRUE(close(run_forward(p).out, layer_by_definition(p), 1e-13));
  }
}

TEST(ReferenceLayer, WidthsBeyondABlockOfTheProduct) {
  const Dims dims{.tokens = 5,
                  .hidden = 300,
                  .experts = 3,
                  .top_k = 2,
                  .expert_hidden = 270,
                  .shared_hidden = 1};
  Problem<double> p = random_problem<double>(dims, 2);
  for (double& weight : p.wi) {
    weight *= 0.1;  // gates of order 1
  }
  EXPECT_TRUE(close(run_forward(p).out, layer_by_definition(p), 1e-12));
}

TEST(ReferenceLayer, ReportsItsRouting) {
  Dims dims = small;
  dims.shared_hidden = 0;
  Problem<double> p = random_problem<double>(dims, 3);
  p.segment_ids = {1, 1, 0, 1, 1, 0, 2, 2, 2};
  p.forced_ids.assign(27, -1);
  p.forced_ids[0] = 7;
  p.forced_ids[1] = 0;
  p.forced_ids[2] = 3;
  const Result<double> result = run_forward(p);
  EXPECT_EQ(result.report.router.padding_tokens, 2);
  EXPECT_EQ(result.report.router.forced_tokens, 1);
  EXPECT_EQ(result.report.router.automatic_tokens, 6);
  EXPECT_EQ(result.report.routed_slots, 21);
  EXPECT_EQ(result.report.dropped_slots, 0);
  EXPECT_EQ(result.expert_ids[0], 7);
  EXPECT_EQ(result.expert_ids[1], 0);
  EXPECT_EQ(result.expert_ids[2], 3);
  std::vector<std::int64_t> counts(8, 0);
  for (std::size_t slot = 0; slot < 27; ++slot) {
    const bool padding = slot / 3 == 2 || slot / 3 == 5;
    EXPECT_EQ(result.expert_ids[slot] == -1, padding);
    if (padding) {
      EXPECT_EQ(result.expert_weights[slot], 0.0);
    } else {
      ++counts[static_cast<std::size_t>(result.expert_ids[slot])];
    }
  }
  EXPECT_EQ(result.group_sizes, counts);
  for (std::size_t e = 0; e < 8; ++e) {
    EXPECT_EQ(result.router_logits[2 * 8 + e], 0.0);
    double logit = 0;
    for (std::size_t d = 0; d < 6; ++d) {
      logit += p.hidden[6 + d] * p.router_weight[d * 8 + e];
    }
    EXPECT_NEAR(result.router_logits[8 + e], logit, 1e-14);
  }
  // The same call without the optional outputs.
  Vector out(54, nan);
  forward(dims, p.inputs(), p.options, {.out = {out.data(), 9, 6}});
  EXPECT_TRUE(same_bits(out, result.out));
}

TEST(ReferenceLayer, CotangentsByCentralDifferences) {
  for (const auto& [strategy, rows] :
       {std::pair(Strategy::ring, -1), std::pair(Strategy::ring, 5), std::pair(Strategy::ring, 3),
        std::pair(Strategy::all_to_all, 5)}) {
    Problem<double> p = random_problem<double>(small, 4);
    p.options.dispatch = four_devices(rows, strategy);
    const LayerReport report = run_forward(p).report;
    EXPECT_EQ(report.buffer_rows, rows < 0 ? 36 : rows);
    EXPECT_EQ(report.dropped_slots > 0, rows >= 0) << rows;
    expect_cotangents_by_differences(p);
  }
}

TEST(ReferenceLayer, ABufferOfNoRowLeavesTheSharedExpert) {
  Problem<double> p = random_problem<double>(small, 4);
  p.options.dispatch = four_devices(0, Strategy::ring);
  EXPECT_EQ(run_forward(p).report.dropped_slots, 27);
  const Gradients<double> gradients = run_backward(p);
  EXPECT_EQ(gradients.d_router_weight, Vector(48, 0.0));
  EXPECT_EQ(gradients.d_wi, Vector(480, 0.0));
  EXPECT_EQ(gradients.d_wo, Vector(240, 0.0));
  const Vector d_hidden = heddle::test::central_differences(
      std::span<double>(p.hidden), [&] { return weighted_sum(p.d_out, run_forward(p).out); });
  EXPECT_TRUE(close(gradients.d_hidden, d_hidden, 1e-6));
}

TEST(ReferenceLayer, CotangentsWithPaddingReplayAndSoftmaxOfAll) {
  Problem<double> p = random_problem<double>(small, 5);
  p.segment_ids = {1, 1, 0, 0, 2, 2, 2, 0, 3};
  p.forced_ids.assign(27, -1);
  const std::int32_t forced[] = {6, 2, 4};
  std::copy_n(forced, 3, p.forced_ids.begin() + 12);
  p.options.router.weights = TopKWeights::softmax_of_all;
  expect_cotangents_by_differences(p);
  p.options.router.padding = PaddingRouting::include;
  p.options.weight_grad_from = WeightGradFrom::wo_output;
  expect_cotangents_by_differences(p);
}

TEST(ReferenceLayer, CotangentsOfLossesOnTheLogits) {
  Problem<double> p = random_problem<double>(small, 6);
  p.segment_ids = {1, 1, 0, 1, 1, 1, 1, 1, 1};
  const BalanceLossOptions balance{.weight = 0.9};
  const ZLossOptions z{.weight = 0.2};
  const auto losses = [&](const Result<double>& result) {
    RouterLossSums<double> sums;
    add_router_loss_sums<double>(p.dims.router(), {result.router_logits.data(), 9, 8},
                                 {result.expert_ids.data(), 9, 3}, sums);
    return balance_loss(p.dims.router(), sums, balance) + z_loss(sums, z);
  };
  const Result<double> result = run_forward(p);
  const ConstMatrixView<double> logits(result.router_logits.data(), 9, 8);
  const ConstMatrixView<std::int32_t> ids(result.expert_ids.data(), 9, 3);
  RouterLossSums<double> sums;
  add_router_loss_sums<double>(p.dims.router(), logits, ids, sums);
  p.d_router_logits.assign(72, 0.0);
  const MatrixView<double> d_logits(p.d_router_logits.data(), 9, 8);
  balance_loss_backward<double>(p.dims.router(), logits, ids, sums, balance, d_logits);
  z_loss_backward<double>(p.dims.router(), logits, ids, sums, z, d_logits);
  std::fill_n(p.d_router_logits.begin() + 16, 8, nan);  // padding
  expect_cotangents_by_differences(p, losses);
}

TEST(ReferenceLayer, DropsFollowTheDispatch) {
  Dims dims = small;
  dims.tokens = 40;
  for (const Strategy strategy : {Strategy::ring, Strategy::all_to_all}) {
    Problem<double> p = random_problem<double>(dims, 7);
    p.options.dispatch = {
        .buffer_factor = 0.6, .strategy = strategy, .token_chunks = 2, .groups = 2, .shards = 2};
    const Result<double> result = run_forward(p);
    const Dispatch expected =
        dispatch(dims.router(), {result.expert_ids.data(), 40, 3}, p.options.dispatch);
    EXPECT_GT(expected.dropped_slots, 0);
    EXPECT_EQ(result.report.dropped_slots, expected.dropped_slots);
    EXPECT_EQ(result.report.largest_drop, expected.largest_drop);
    EXPECT_EQ(result.report.buffer_rows, expected.buffer_rows);
    EXPECT_EQ(result.report.required_factor, expected.required_factor);
    EXPECT_EQ(
        std::accumulate(result.group_sizes.begin(), result.group_sizes.end(), std::int64_t{0}),
        120);
    EXPECT_TRUE(close(result.out, layer_by_definition(p, expected.kept), 1e-13));
  }
}

TEST(ReferenceLayer, ChunksAndDevicesWithoutDropsChangeNothing) {
  Problem<float> p = random_problem<float>(small, 8);
  const Result<float> plain = run_forward(p);
  const Gradients<float> gradients = run_backward(p);
  for (const std::int64_t chunks : {1, 2, 4, 8}) {
    p.options.dispatch = {.buffer_factor = 8.0,
                          .strategy = Strategy::all_to_all,
                          .token_chunks = chunks,
                          .shards = 4};
    EXPECT_TRUE(same_bits(run_forward(p).out, plain.out));
    const Gradients<float> chunked = run_backward(p);
    EXPECT_TRUE(same_bits(chunked.d_hidden, gradients.d_hidden));
    EXPECT_TRUE(same_bits(chunked.d_wi, gradients.d_wi));
    EXPECT_TRUE(same_bits(chunked.d_router_weight, gradients.d_router_weight));
  }
}

TEST(ReferenceLayer, BothFormsOfTheRoutingWeightsCotangentAgree) {
  Dims dims = small;
  dims.tokens = 30;
  Problem<double> p = random_problem<double>(dims, 9);
  p.segment_ids.assign(30, 1);
  p.segment_ids[4] = 0;
  p.options.dispatch = {.buffer_factor = 0.8, .shards = 2};
  Gradients<double> input = run_backward(p);
  p.options.weight_grad_from = WeightGradFrom::wo_output;
  Gradients<double> output = run_backward(p);
  EXPECT_TRUE(close(input.d_hidden, output.d_hidden, 1e-13));
  for (std::size_t i = 0; i < input.weights().size(); ++i) {
    EXPECT_TRUE(close(*input.weights()[i], *output.weights()[i], 1e-13)) << i;
  }
}

TEST(ReferenceLayer, ExcludedPaddingIsDeletedPaddingBitForBit) {
  Dims dims = small;
  dims.tokens = 140;
  dims.shared_hidden = 0;
  Problem<float> with = random_problem<float>(dims, 10);
  with.segment_ids.assign(140, 1);
  std::fill_n(with.segment_ids.begin(), 7, 0);
  std::fill_n(with.segment_ids.begin() + 61, 9, 0);
  with.segment_ids[139] = 0;
  Problem<float> without = with;
  without.segment_ids.clear();
  without.hidden.clear();
  without.d_out.clear();
  std::vector<std::size_t> real;
  for (std::size_t t = 0; t < 140; ++t) {
    for (std::size_t d = 0; d < 6; ++d) {
      if (with.segment_ids[t] != 0) {
        without.hidden.push_back(with.hidden[t * 6 + d]);
        without.d_out.push_back(with.d_out[t * 6 + d]);
        real.push_back(t * 6 + d);
      } else {
        with.hidden[t * 6 + d] = std::numeric_limits<float>::quiet_NaN();
        with.d_out[t * 6 + d] = std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
  without.dims.tokens = static_cast<std::int64_t>(real.size()) / 6;
  const auto real_rows = [&](const std::vector<float>& rows) {
    std::vector<float> result;
    for (const std::size_t i : real) {
      result.push_back(rows[i]);
    }
    return result;
  };
  const auto padding_is_zero = [&](const std::vector<float>& rows) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (with.segment_ids[i / 6] == 0 && (rows[i] != 0 || std::signbit(rows[i]))) {
        return false;
      }
    }
    return true;
  };
  const Result<float> padded = run_forward(with);
  const Result<float> plain = run_forward(without);
  EXPECT_TRUE(same_bits(real_rows(padded.out), plain.out));
  EXPECT_TRUE(padding_is_zero(padded.out));
  EXPECT_EQ(padded.group_sizes, plain.group_sizes);
  Gradients<float> d_padded = run_backward(with);
  Gradients<float> d_plain = run_backward(without);
  EXPECT_TRUE(same_bits(real_rows(d_padded.d_hidden), d_plain.d_hidden));
  EXPECT_TRUE(padding_is_zero(d_padded.d_hidden));
  EXPECT_TRUE(same_bits(d_padded.d_router_weight, d_plain.d_router_weight));
  EXPECT_TRUE(same_bits(d_padded.d_wi, d_plain.d_wi));
  EXPECT_TRUE(same_bits(d_padded.d_wo, d_plain.d_wo));
}

TEST(ReferenceLayer, TheSharedExpertRunsOnPadding) {
  Problem<double> p = random_problem<double>(small, 11);
  p.segment_ids.assign(9, 0);
  const Result<double> result = run_forward(p);
  EXPECT_TRUE(close(result.out, layer_by_definition(p), 1e-13));
  EXPECT_EQ(result.report.routed_slots, 0);
  Gradients<double> gradients = run_backward(p);
  EXPECT_EQ(gradients.d_router_weight, Vector(48, 0.0));
  EXPECT_EQ(gradients.d_wi, Vector(480, 0.0));
  EXPECT_EQ(gradients.d_wo, Vector(240, 0.0));
  for (const Vector* const values : {&gradients.d_shared_wi, &gradients.d_shared_wo,
                                     &gradients.d_shared_gate, &gradients.d_hidden}) {
    EXPECT_TRUE(std::all_of(values->begin(), values->end(), [](double v) { return v != 0; }));
  }
}

TEST(ReferenceLayer, FreezingTheRouterStopsItsWeightAlone) {
  Problem<double> p = random_problem<double>(small, 12);
  Gradients<double> trained = run_backward(p);
  p.options.router_training = RouterTraining::frozen;
  Gradients<double> frozen = run_backward(p);
  EXPECT_EQ(frozen.d_router_weight, Vector(48, 0.0));
  EXPECT_NE(trained.d_router_weight, frozen.d_router_weight);
  EXPECT_TRUE(same_bits(frozen.d_hidden, trained.d_hidden));
  EXPECT_TRUE(same_bits(frozen.d_wi, trained.d_wi));
  Gradients<double> added(p, 0.75);
  backward(p.dims, p.inputs(), p.cotangents(), p.options, added.views(p.dims, Write::accumulate));
  EXPECT_EQ(added.d_router_weight, Vector(48, 0.75));
}

TEST(ReferenceLayer, OneChoiceGivesTheRouterExactlyNothing) {
  Dims dims = small;
  dims.top_k = 1;
  for (const WeightGradFrom from : {WeightGradFrom::wo_input, WeightGradFrom::wo_output}) {
    Problem<float> p = random_problem<float>(dims, 13);
    p.options.weight_grad_from = from;
    EXPECT_EQ(run_backward(p).d_router_weight, std::vector<float>(48, 0.0F));
    EXPECT_EQ(run_forward(p).expert_weights, std::vector<float>(9, 1.0F));
  }
}

TEST(ReferenceLayer, ExpertsWithoutTokensGetExactZeros) {
  Problem<float> p = random_problem<float>(small, 14);
  std::fill(p.router_weight.begin(), p.router_weight.end(), 0.0F);  // all tie: experts 0, 1, 2
  const Result<float> result = run_forward(p);
  std::vector<std::int64_t> first_three(8, 0);
  std::fill_n(first_three.begin(), 3, 9);
  EXPECT_EQ(result.group_sizes, first_three);
  const Gradients<float> gradients = run_backward(p);
  const auto nonzero = [](const std::vector<float>& values, std::ptrdiff_t first,
                          std::ptrdiff_t last) {
    return std::count_if(values.begin() + first, values.begin() + last,
                         [](float v) { return v != 0 || std::signbit(v); });
  };
  EXPECT_EQ(nonzero(gradients.d_wi, 0, 180), 180);
  EXPECT_EQ(nonzero(gradients.d_wi, 180, 480), 0);
  EXPECT_EQ(nonzero(gradients.d_wo, 0, 90), 90);
  EXPECT_EQ(nonzero(gradients.d_wo, 90, 240), 0);
}

TEST(ReferenceLayer, EdgeShapes) {
  const Dims shapes[] = {
      {.tokens = 1, .hidden = 6, .experts = 8, .top_k = 3, .expert_hidden = 5, .shared_hidden = 4},
      {.tokens = 4, .hidden = 3, .experts = 5, .top_k = 5, .expert_hidden = 2},
      {.tokens = 4, .hidden = 1, .experts = 1, .top_k = 1, .expert_hidden = 1, .shared_hidden = 1},
      {.tokens = 130, .hidden = 2, .experts = 1, .top_k = 1, .expert_hidden = 9},
  };
  for (const Dims& dims : shapes) {
    Problem<double> p = random_problem<double>(dims, 15);
    EXPECT_TRUE(close(run_forward(p).out, layer_by_definition(p), 1e-13));
    if (dims.top_k > 1) {
      expect_cotangents_by_differences(p);
    }
  }
}

TEST(ReferenceLayer, NoTokensGiveZeroWeightCotangents) {
  Dims dims = small;
  dims.tokens = 0;
  Problem<float> p = random_problem<float>(dims, 16);
  const Result<float> result = run_forward(p);
  EXPECT_EQ(result.group_sizes, std::vector<std::int64_t>(8, 0));
  EXPECT_EQ(result.report.routed_slots, 0);
  Gradients<float> gradients = run_backward(p);
  for (const std::vector<float>* const values : gradients.weights()) {
    EXPECT_EQ(*values, std::vector<float>(values->size(), 0.0F));
  }
}

TEST(ReferenceLayer, PermutedTokensGivePermutedOutputs) {
  Problem<float> p = random_problem<float>(small, 17);
  const Result<float> result = run_forward(p);
  const Gradients<float> gradients = run_backward(p);
  Problem<float> reversed = p;
  const auto reverse_rows = [](std::vector<float> rows) {
    std::vector<float> result_rows;
    for (std::size_t t = 9; t-- > 0;) {
      result_rows.insert(result_rows.end(), rows.begin() + static_cast<std::ptrdiff_t>(t * 6),
                         rows.begin() + static_cast<std::ptrdiff_t>(t * 6 + 6));
    }
    return result_rows;
  };
  reversed.hidden = reverse_rows(p.hidden);
  reversed.d_out = reverse_rows(p.d_out);
  EXPECT_TRUE(same_bits(run_forward(reversed).out, reverse_rows(result.out)));
  EXPECT_TRUE(same_bits(run_backward(reversed).d_hidden, reverse_rows(gradients.d_hidden)));
}

TEST(ReferenceLayer, RelabelledExpertsGiveTheSameOutputs) {
  Problem<double> p = random_problem<double>(small, 18);
  Problem<double> q = p;
  for (std::size_t e = 0; e < 8; ++e) {  // expert e becomes 7 - e
    for (std::size_t d = 0; d < 6; ++d) {
      q.router_weight[d * 8 + 7 - e] = p.router_weight[d * 8 + e];
    }
    std::copy_n(p.wi.begin() + static_cast<std::ptrdiff_t>(e * 60), 60,
                q.wi.begin() + static_cast<std::ptrdiff_t>((7 - e) * 60));
    std::copy_n(p.wo.begin() + static_cast<std::ptrdiff_t>(e * 30), 30,
                q.wo.begin() + static_cast<std::ptrdiff_t>((7 - e) * 30));
  }
  EXPECT_TRUE(close(run_forward(q).out, run_forward(p).out, 1e-14));
  EXPECT_TRUE(close(run_backward(q).d_hidden, run_backward(p).d_hidden, 1e-14));
}

TEST(ReferenceLayer, EachWeightCotangentIsOptionalAndAccumulates) {
  Problem<float> p = random_problem<float>(small, 19);
  Gradients<float> all = run_backward(p);
  for (std::size_t which = 0; which < 6; ++which) {
    Gradients<float> some(p);
    InputCotangents<float> views = some.views(p.dims);
    WeightCotangent<float>* const cotangents[] = {
        &views.d_router_weight, &views.d_wi,        &views.d_wo,
        &views.d_shared_wi,     &views.d_shared_wo, &views.d_shared_gate};
    *cotangents[which] = {};
    WeightCotangent<float>& added = *cotangents[(which + 1) % 6];
    added.write = Write::accumulate;
    std::vector<float>& sum = *some.weights()[(which + 1) % 6];
    std::fill(sum.begin(), sum.end(), 0.375F);
    backward(p.dims, p.inputs(), p.cotangents(), p.options, views);
    EXPECT_TRUE(same_bits(some.d_hidden, all.d_hidden));
    for (std::size_t i = 0; i < 6; ++i) {
      if (i == which) {
        EXPECT_TRUE(std::all_of(some.weights()[i]->begin(), some.weights()[i]->end(),
                                [](float v) { return std::isnan(v); }));
      } else if (i == (which + 1) % 6) {
        std::vector<float> expected = *all.weights()[i];
        for (float& value : expected) {
          value = 0.375F + value;
        }
        EXPECT_TRUE(same_bits(sum, expected)) << i;
      } else {
        EXPECT_TRUE(same_bits(*some.weights()[i], *all.weights()[i])) << i;
      }
    }
  }
}

/// `values` as rows of `stride`, NaN in the gap.
Vector spread(const Vector& values, std::int64_t cols, std::int64_t stride) {
  Vector wide;
  for (std::size_t i = 0; i < values.size(); ++i) {
    wide.push_back(values[i]);
    if ((i + 1) % static_cast<std::size_t>(cols) == 0) {
      wide.insert(wide.end(), static_cast<std::size_t>(stride - cols), nan);
    }
  }
  return wide;
}

TEST(ReferenceLayer, ReadsAndWritesThroughStrides) {
  const Problem<double> p = random_problem<double>(small, 20);
  Inputs<double> in = p.inputs();
  const Vector hidden = spread(p.hidden, 6, 8);
  const Vector router_weight = spread(p.router_weight, 8, 9);
  const Vector wi = spread(p.wi, 10, 13);
  const Vector wo = spread(p.wo, 6, 7);
  const Vector shared_wi = spread(p.shared_wi, 8, 11);
  const Vector shared_wo = spread(p.shared_wo, 6, 9);
  const Vector shared_gate = spread(p.shared_gate, 1, 3);
  const Vector d_out = spread(p.d_out, 6, 10);
  in.hidden = {hidden.data(), 9, 6, 8};
  in.router_weight = {router_weight.data(), 6, 8, 9};
  in.wi = {wi.data(), 48, 10, 13};
  in.wo = {wo.data(), 40, 6, 7};
  in.shared_wi = {shared_wi.data(), 6, 8, 11};
  in.shared_wo = {shared_wo.data(), 4, 6, 9};
  in.shared_gate = {shared_gate.data(), 6, 1, 3};

  Vector out(9 * 7, -77);
  forward(p.dims, in, p.options, {.out = {out.data(), 9, 6, 7}});
  Gradients<double> dense = run_backward(p);
  Vector d_hidden(9 * 8, -77);
  Vector d_wi(48 * 12, -77);
  Gradients<double> strided(p);
  InputCotangents<double> views = strided.views(p.dims);
  views.d_hidden = {d_hidden.data(), 9, 6, 8};
  views.d_wi = {{d_wi.data(), 48, 10, 12}};
  backward(p.dims, in, {.d_out = {d_out.data(), 9, 6, 10}}, p.options, views);

  const auto expect_rows = [](const Vector& wide, std::size_t stride, const Vector& expected,
                              std::size_t cols) {
    for (std::size_t i = 0; i < wide.size(); ++i) {
      const double value = i % stride < cols ? expected[i / stride * cols + i % stride] : -77;
      EXPECT_EQ(wide[i], value) << i;
    }
  };
  expect_rows(out, 7, run_forward(p).out, 6);
  expect_rows(d_hidden, 8, dense.d_hidden, 6);
  expect_rows(d_wi, 12, dense.d_wi, 10);
  EXPECT_TRUE(same_bits(strided.d_wo, dense.d_wo));
  EXPECT_TRUE(same_bits(strided.d_router_weight, dense.d_router_weight));
  EXPECT_TRUE(same_bits(strided.d_shared_wi, dense.d_shared_wi));
  EXPECT_TRUE(same_bits(strided.d_shared_gate, dense.d_shared_gate));
}

TEST(ReferenceLayer, BitsDoNotDependOnThreads) {
  Dims dims = small;
  dims.tokens = 700;  // weight cotangents fold more than one block of rows
  const Problem<float> p = random_problem<float>(dims, 21);
  std::vector<float> out[3];
  std::vector<Gradients<float>> gradients;
  const int threads[] = {1, 2, 8};
  for (std::size_t i = 0; i < 3; ++i) {
    heddle::test::with_threads(threads[i], [&] {
      out[i] = run_forward(p).out;
      gradients.push_back(run_backward(p));
    });
    EXPECT_TRUE(same_bits(out[i], out[0]));
    EXPECT_TRUE(same_bits(gradients[i].d_hidden, gradients[0].d_hidden));
    for (std::size_t w = 0; w < 6; ++w) {
      EXPECT_TRUE(same_bits(*gradients[i].weights()[w], *gradients[0].weights()[w]));
    }
  }
}

/// A value rounded to bf16 and back.
double stored(double value) {
  return static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(value))));
}

// One hidden column, one expert of width 1: every rounding in its place, the chain worked out in
// double. The shared expert carries a weight other than 1; the routed one gives nothing.
TEST(ReferenceLayer, Bf16IsRoundedWhereItIsStored) {
  const Dims dims{
      .tokens = 200, .hidden = 1, .experts = 1, .top_k = 1, .expert_hidden = 1, .shared_hidden = 1};
  Problem<bfloat16, float> p = random_problem<bfloat16, float>(dims, 22);
  p.wi = {bfloat16(0.0F), bfloat16(0.0F)};
  p.wo = {bfloat16(0.0F)};
  p.shared_wi = {bfloat16(1.1328125F), bfloat16(-0.8828125F)};
  p.shared_wo = {bfloat16(1.3046875F)};
  p.shared_gate = {bfloat16(0.6953125F)};
  const auto wide = [](bfloat16 value) { return static_cast<double>(static_cast<float>(value)); };
  const double wg = wide(p.shared_wi[0]);
  const double wu = wide(p.shared_wi[1]);
  const double wo = wide(p.shared_wo[0]);
  const double ws = wide(p.shared_gate[0]);

  for (const WeightGradFrom from : {WeightGradFrom::wo_input, WeightGradFrom::wo_output}) {
    p.options.weight_grad_from = from;
    Vector out;
    Vector d_hidden;
    double d_wg = 0;
    double d_wo = 0;
    double d_ws = 0;
    for (std::size_t t = 0; t < 200; ++t) {
      const double h = wide(p.hidden[t]);
      const double o = wide(p.d_out[t]);
      const double gate = stored(h * wg);
      const double up = stored(h * wu);
      const double s = 1 / (1 + std::exp(-gate));
      const double a = stored(gate * s * up);
      const double y = stored(a * wo);
      const double w = 1 / (1 + std::exp(-h * ws));
      out.push_back(w * y);
      const bool input = from == WeightGradFrom::wo_input;
      const double d_w = input ? o * wo * a : o * y;
      const double d_a = input ? stored(w * (o * wo)) : stored(stored(w * o) * wo);
      d_wo += input ? stored(w * a) * o : a * stored(w * o);
      const double d_gate = stored(d_a * up * s * (1 + gate * (1 - s)));
      const double d_up = stored(d_a * gate * s);
      const double d_z = w * (1 - w) * d_w;
      d_hidden.push_back(d_gate * wg + d_up * wu + d_z * ws);
      d_wg += h * d_gate;
      d_ws += h * d_z;
    }
    const Gradients<float> gradients = run_backward(p);
    const Vector actual_hidden(gradients.d_hidden.begin(), gradients.d_hidden.end());
    const std::vector<float> actual_out = run_forward(p).out;
    for (std::size_t t = 0; t < 200; ++t) {
      // One rounding in another place would be 2e-3.
      EXPECT_NEAR(static_cast<double>(actual_out[t]), out[t], 1e-6 * std::abs(out[t]));
      EXPECT_NEAR(actual_hidden[t], d_hidden[t], 2e-6);
    }
    EXPECT_EQ(gradients.d_wo[0], 0.0F);
    EXPECT_NEAR(static_cast<double>(gradients.d_shared_wi[0]), d_wg, 2e-5 * std::abs(d_wg));
    EXPECT_NEAR(static_cast<double>(gradients.d_shared_wo[0]), d_wo, 2e-5 * std::abs(d_wo));
    EXPECT_NEAR(static_cast<double>(gradients.d_shared_gate[0]), d_ws, 2e-5 * std::abs(d_ws));
  }
}

TEST(ReferenceLayer, FloatAgreesWithDouble) {
  Dims dims = small;
  dims.tokens = 200;
  const Problem<float> p = random_problem<float>(dims, 23);
  Problem<double> wide;
  wide.dims = dims;
  const auto widened = [](const std::vector<float>& values) {
    return Vector(values.begin(), values.end());
  };
  wide.hidden = widened(p.hidden);
  wide.router_weight = widened(p.router_weight);
  wide.wi = widened(p.wi);
  wide.wo = widened(p.wo);
  wide.shared_wi = widened(p.shared_wi);
  wide.shared_wo = widened(p.shared_wo);
  wide.shared_gate = widened(p.shared_gate);
  wide.d_out = widened(p.d_out);
  EXPECT_EQ(run_forward(p).expert_ids, run_forward(wide).expert_ids);
  EXPECT_TRUE(close(widened(run_forward(p).out), run_forward(wide).out, 2e-6));
  Gradients<float> actual = run_backward(p);
  Gradients<double> expected = run_backward(wide);
  EXPECT_TRUE(close(widened(actual.d_hidden), expected.d_hidden, 2e-6));
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_TRUE(close(widened(*actual.weights()[i]), *expected.weights()[i], 2e-6)) << i;
  }
}

TEST(ReferenceLayer, ForwardRefusesWrongArguments) {
  const auto with = [](auto change) {
    Problem<double> p = random_problem<double>(small, 24);
    Inputs<double> in = p.inputs();
    Vector out(54, 5.0);
    Outputs<double> outputs{.out = {out.data(), 9, 6}};
    change(p, in, outputs);
    const std::string text = thrown_text<Error>([&] { forward(p.dims, in, p.options, outputs); });
    EXPECT_EQ(out, Vector(54, 5.0));
    const std::string where = "moe::reference::forward: ";
    return text.substr(0, where.size()) == where ? text.substr(where.size()) : text;
  };
  std::vector<std::int32_t> ids(27, 0);
  std::vector<std::int64_t> counts(7);
  EXPECT_EQ(with([](auto& p, auto&, auto&) { p.dims.hidden = 0; }),
            "dims.hidden = 0: must be >= 1");
  EXPECT_EQ(with([](auto&, auto& in, auto&) { in.hidden = in.hidden.row_block(0, 8); }),
            "hidden.rows = 8: must equal dims.tokens (9)");
  EXPECT_EQ(
      with([](auto&, auto& in, auto&) { in.router_weight = in.router_weight.row_block(0, 5); }),
      "router_weight.rows = 5: must equal dims.hidden (6)");
  EXPECT_EQ(with([](auto&, auto& in, auto&) { in.wi = in.wi.row_block(0, 47); }),
            "wi.rows = 47: must equal dims.experts * dims.hidden (48)");
  EXPECT_EQ(with([](auto&, auto& in, auto&) { in.wi = in.wi.column_block(0, 5); }),
            "wi.cols = 5: must equal 2 * dims.expert_hidden (10)");
  EXPECT_EQ(with([](auto&, auto& in, auto&) { in.wo = {}; }),
            "wo.rows = 0: must equal dims.experts * dims.expert_hidden (40)");
  EXPECT_EQ(with([](auto&, auto& in, auto&) { in.shared_wi = in.shared_wi.column_block(0, 4); }),
            "shared_wi.cols = 4: must equal 2 * dims.shared_hidden (8)");
  EXPECT_EQ(with([](auto&, auto& in, auto&) { in.shared_wo = in.shared_wo.row_block(0, 3); }),
            "shared_wo.rows = 3: must equal dims.shared_hidden (4)");
  EXPECT_EQ(with([](auto&, auto& in, auto&) { in.shared_gate = {}; }),
            "shared_gate.rows = 0: must equal dims.hidden (6)");
  EXPECT_EQ(with([](auto& p, auto&, auto&) { p.dims.shared_hidden = 0; }),
            "shared_wi = a matrix: must be null when dims.shared_hidden is 0");
  EXPECT_EQ(with([&](auto&, auto& in, auto&) {
              in.forced_ids = {ids.data(), 9, 2};
            }),
            "forced_ids.cols = 2: must equal dims.top_k (3)");
  EXPECT_EQ(with([&](auto&, auto& in, auto&) {
              in.segment_ids = {ids.data(), 8};
            }),
            "segment_ids.size = 8: must equal dims.tokens (9)");
  EXPECT_EQ(with([&](auto&, auto& in, auto&) {
              ids[5] = -4;
              in.segment_ids = {ids.data(), 9};
            }),
            "segment_ids[5] = -4: must be >= 0");
  EXPECT_EQ(with([](auto& p, auto&, auto&) { p.options.router.weights = TopKWeights(9); }),
            "options.router.weights = 9: must be softmax_of_chosen or softmax_of_all");
  EXPECT_EQ(with([](auto& p, auto&, auto&) { p.options.dispatch.shards = 3; }),
            "options.dispatch.shards = 3: must divide dims.experts (8)");
  EXPECT_EQ(with([](auto& p, auto&, auto&) { p.options.router_training = RouterTraining(2); }),
            "options.router_training = 2: must be trained or frozen");
  EXPECT_EQ(with([](auto& p, auto&, auto&) { p.options.weight_grad_from = WeightGradFrom(2); }),
            "options.weight_grad_from = 2: must be wo_input or wo_output");
  EXPECT_EQ(with([](auto&, auto&, auto& o) { o.out = o.out.column_block(0, 5); }),
            "out.cols = 5: must equal dims.hidden (6)");
  EXPECT_EQ(with([&](auto&, auto&, auto& o) {
              o.expert_ids = {ids.data(), 8, 3};
            }),
            "expert_ids.rows = 8: must equal dims.tokens (9)");
  EXPECT_EQ(with([](auto&, auto&, auto& o) { o.expert_weights = o.out; }),
            "expert_weights.cols = 6: must equal dims.top_k (3)");
  EXPECT_EQ(with([](auto&, auto&, auto& o) { o.router_logits = o.out; }),
            "router_logits.cols = 6: must equal dims.experts (8)");
  EXPECT_EQ(with([&](auto&, auto&, auto& o) { o.group_sizes = counts; }),
            "group_sizes.size = 7: must equal dims.experts (8)");
}

TEST(ReferenceLayer, BackwardRefusesWrongArguments) {
  const auto with = [](auto change) {
    Problem<double> p = random_problem<double>(small, 25);
    Inputs<double> in = p.inputs();
    OutputCotangents<double> d = p.cotangents();
    Gradients<double> gradients(p, 5.0);
    InputCotangents<double> views = gradients.views(p.dims);
    change(p, in, d, views);
    const std::string text = thrown_text<Error>([&] { backward(p.dims, in, d, p.options, views); });
    EXPECT_EQ(gradients.d_hidden, Vector(54, 5.0));
    EXPECT_EQ(gradients.d_wi, Vector(480, 5.0));
    const std::string where = "moe::reference::backward: ";
    return text.substr(0, where.size()) == where ? text.substr(where.size()) : text;
  };
  EXPECT_EQ(with([](auto&, auto& in, auto&, auto&) { in.wo = in.wo.row_block(0, 39); }),
            "wo.rows = 39: must equal dims.experts * dims.expert_hidden (40)");
  EXPECT_EQ(with([](auto&, auto&, auto& d, auto&) { d.d_out = d.d_out.row_block(0, 3); }),
            "d_out.rows = 3: must equal dims.tokens (9)");
  EXPECT_EQ(with([](auto&, auto&, auto& d, auto&) { d.d_router_logits = d.d_out; }),
            "d_router_logits.cols = 6: must equal dims.experts (8)");
  EXPECT_EQ(with([](auto& p, auto&, auto&, auto&) { p.options.dispatch.token_chunks = 0; }),
            "options.dispatch.token_chunks = 0: must be >= 1");
  EXPECT_EQ(with([](auto&, auto&, auto&, auto& v) { v.d_hidden = {}; }),
            "d_hidden.rows = 0: must equal dims.tokens (9)");
  EXPECT_EQ(with([](auto&, auto&, auto&, auto& v) { v.d_router_weight.values = v.d_hidden; }),
            "d_router_weight.values.rows = 9: must equal dims.hidden (6)");
  EXPECT_EQ(with([](auto&, auto&, auto&, auto& v) { v.d_wi.values = v.d_wo.values; }),
            "d_wi.values.rows = 40: must equal dims.experts * dims.hidden (48)");
  EXPECT_EQ(with([](auto&, auto&, auto&, auto& v) { v.d_wo.write = Write(4); }),
            "d_wo.write = 4: must be overwrite or accumulate");
  EXPECT_EQ(with([](auto&, auto&, auto&, auto& v) {
              v.d_shared_wi.values = v.d_shared_wi.values.column_block(0, 7);
            }),
            "d_shared_wi.values.cols = 7: must equal 2 * dims.shared_hidden (8)");
  EXPECT_EQ(with([](auto&, auto&, auto&, auto& v) {
              v.d_shared_wo.values = v.d_shared_wo.values.row_block(0, 3);
            }),
            "d_shared_wo.values.rows = 3: must equal dims.shared_hidden (4)");
  EXPECT_EQ(with([](auto&, auto&, auto&, auto& v) {
              v.d_shared_gate.values = v.d_shared_gate.values.row_block(0, 3);
            }),
            "d_shared_gate.values.rows = 3: must equal dims.hidden (6)");
  EXPECT_EQ(with([](auto& p, auto& in, auto&, auto&) {
              p.dims.shared_hidden = 0;
              in.shared_wi = in.shared_wo = in.shared_gate = {};
            }),
            "d_shared_wi = a matrix: must be null when dims.shared_hidden is 0");
}

}  // namespace
}  // namespace heddle::moe::reference

#include "heddle/moe/reference_router.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: a tie to the highest id; -0 below +0; NaN chosen; ids
// that repeat once only -inf is left; forced ids sorted, or taken one by one; -1 used as an index;
// replay before padding; padding's logits read; weights of the wrong slot; softmax over E without
// renormalisation, or with it where it must not be; max not subtracted; +inf giving NaN; the mean
// term of the backward dropped, or its unchosen experts under softmax_of_all; a cotangent for
// non-finite rows; a block of the counts not folded.

namespace heddle::moe::reference {
namespace {

using heddle::test::close;
using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;
using heddle::test::thrown_text;

using Ids = std::vector<std::int32_t>;
using Vector = std::vector<double>;
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double inf = std::numeric_limits<double>::infinity();

template <class S>
struct Call {
  using A = AccumulatorOf<S>;

  RouterDims dims;
  std::vector<S> logits;
  Ids forced;
  Ids segment_ids;
  RouterOptions options;
  Ids ids;
  std::vector<A> weights;
  RouterReport report;

  Call(RouterDims d, std::vector<S> l) : dims(d), logits(std::move(l)) {}

  Call& run() {
    ids.assign(static_cast<std::size_t>(dims.slots()), poison<std::int32_t>());
    weights.assign(ids.size(), poison<A>());
    report = route<S>(dims, inputs(), options,
                      {.expert_ids = {ids.data(), dims.tokens, dims.top_k},
                       .expert_weights = {weights.data(), dims.tokens, dims.top_k}});
    return *this;
  }

  [[nodiscard]] RouterInputs<S> inputs() const {
    return {.router_logits = {logits.data(), dims.tokens, dims.experts},
            .forced_ids = forced.empty() ? ConstMatrixView<std::int32_t>()
                                         : ConstMatrixView<std::int32_t>(forced.data(), dims.tokens,
                                                                         dims.top_k),
            .segment_ids = segment_ids};
  }

  [[nodiscard]] std::vector<A> backward(const std::vector<A>& d_weights) const {
    std::vector<A> d_logits(logits.size(), poison<A>());
    route_backward<S>(dims,
                      {.router_logits = {logits.data(), dims.tokens, dims.experts},
                       .expert_ids = {ids.data(), dims.tokens, dims.top_k},
                       .d_expert_weights = {d_weights.data(), dims.tokens, dims.top_k}},
                      options, {d_logits.data(), dims.tokens, dims.experts});
    return d_logits;
  }
};

Call<double> one_row(const Vector& logits, std::int64_t top_k) {
  Call<double> call(
      {.tokens = 1, .experts = static_cast<std::int64_t>(logits.size()), .top_k = top_k}, logits);
  return call.run();
}

TEST(ReferenceRouter, LargestFirstWeighedByTheirOwnSoftmax) {
  const Call<double> call = one_row({0.0, std::log(3.0), -5.0, std::log(2.0)}, 3);
  EXPECT_EQ(call.ids, (Ids{1, 3, 0}));
  EXPECT_TRUE(close(call.weights, Vector{3.0 / 6, 2.0 / 6, 1.0 / 6}, 1e-15));
  EXPECT_EQ(call.report.automatic_tokens, 1);
  EXPECT_EQ(call.report.nonfinite_rows, 0);
}

TEST(ReferenceRouter, SoftmaxOfAllIsNotRenormalised) {
  Call<double> call = one_row({0.0, std::log(3.0), std::log(4.0), std::log(2.0)}, 2);
  call.options.weights = TopKWeights::softmax_of_all;
  call.run();
  EXPECT_EQ(call.ids, (Ids{2, 1}));
  EXPECT_TRUE(close(call.weights, Vector{0.4, 0.3}, 1e-15));
}

TEST(ReferenceRouter, TiesGoToTheLowestId) {
  EXPECT_EQ(one_row({1, 2, 1, 2, 1}, 4).ids, (Ids{1, 3, 0, 2}));
  EXPECT_EQ(one_row({7, 7, 7}, 2).ids, (Ids{0, 1}));
  EXPECT_EQ(one_row({-0.0, 0.0, -1.0}, 2).ids, (Ids{0, 1}));
  EXPECT_EQ(one_row({0.0, -0.0, -1.0}, 1).ids, (Ids{0}));
}

TEST(ReferenceRouter, NonFiniteRows) {
  struct Case {
    Vector logits;
    Ids ids;
    Vector weights;
    std::int64_t counted;
  };
  const double e = std::exp(-1.0);
  const Case cases[] = {
      {{nan, nan, nan, nan, nan}, {0, 1, 2, 3}, {0.25, 0.25, 0.25, 0.25}, 1},
      {{-inf, -inf, -inf, -inf, -inf}, {0, 1, 2, 3}, {0.25, 0.25, 0.25, 0.25}, 1},
      {{nan, 1, 2, 2, 1},
       {2, 3, 1, 4},
       {0.5 / (1 + e), 0.5 / (1 + e), 0.5 * e / (1 + e), 0.5 * e / (1 + e)},
       0},
      {{-inf, 5, -inf, nan, -inf}, {1, 0, 2, 3}, {1, 0, 0, 0}, 0},
      {{nan, 3, -inf, 3, nan}, {1, 3, 0, 2}, {0.5, 0.5, 0, 0}, 0},
      {{1, inf, nan, inf, 2}, {1, 3, 4, 0}, {0.5, 0.5, 0, 0}, 1},
      {{inf, inf, inf, inf, inf}, {0, 1, 2, 3}, {0.25, 0.25, 0.25, 0.25}, 1},
      {{-inf, -inf, inf, -inf, nan}, {2, 0, 1, 3}, {1, 0, 0, 0}, 1},
  };
  for (const Case& expected : cases) {
    Call<double> call = one_row(expected.logits, 4);
    EXPECT_EQ(call.ids, expected.ids);
    EXPECT_TRUE(close(call.weights, expected.weights, 1e-15));
    EXPECT_EQ(call.report.nonfinite_rows, expected.counted);
    if (expected.counted > 0) {
      EXPECT_EQ(call.backward({1, 2, 3, 4}), Vector(5, 0.0));
      call.options.weights = TopKWeights::softmax_of_all;
      call.run();
      EXPECT_TRUE(close(call.weights, expected.weights, 1e-15));
      EXPECT_EQ(call.backward({1, 2, 3, 4}), Vector(5, 0.0));
    }
  }
}

TEST(ReferenceRouter, AnUnchosenInfinityTakesAllOfTheSoftmaxOfAll) {
  Call<double> call({.tokens = 1, .experts = 4, .top_k = 2}, {1, inf, 2, 3});
  call.forced = {3, 0};
  call.options.weights = TopKWeights::softmax_of_all;
  call.run();
  EXPECT_EQ(call.weights, (Vector{0, 0}));
  EXPECT_EQ(call.report.nonfinite_rows, 1);
  EXPECT_EQ(call.backward({1, 2}), Vector(4, 0.0));
  call.options.weights = TopKWeights::softmax_of_chosen;
  call.run();
  EXPECT_EQ(call.report.nonfinite_rows, 0);
  EXPECT_NEAR(call.weights[0], 1 / (1 + std::exp(-2.0)), 1e-15);
}

TEST(ReferenceRouter, ReplayTakesWholeRowsInTheirOrder) {
  const Vector row{0.5, 3, 1, 2, -1};
  Vector logits;
  for (int t = 0; t < 7; ++t) {
    logits.insert(logits.end(), row.begin(), row.end());
  }
  Call<double> call({.tokens = 7, .experts = 5, .top_k = 2}, logits);
  call.forced = {4,  0,   // replayed, the smaller logit first
                 0,  4,   // replayed
                 2,  -1,  // not replayed
                 -1, 2,   // not replayed
                 3,  3,   // a duplicate
                 5,  1,   // no expert
                 -7, 1};  // no expert
  call.options.mismatch = ReplayMismatch::measure;
  call.run();
  EXPECT_EQ(call.ids, (Ids{4, 0, 0, 4, 1, 3, 1, 3, 1, 3, 1, 3, 1, 3}));
  const double small = 1 / (1 + std::exp(1.5));
  EXPECT_TRUE(close(Vector(call.weights.begin(), call.weights.begin() + 4),
                    Vector{small, 1 - small, 1 - small, small}, 1e-15));
  EXPECT_EQ(call.report.forced_tokens, 2);
  EXPECT_EQ(call.report.automatic_tokens, 5);
  EXPECT_EQ(call.report.padding_tokens, 0);
  EXPECT_EQ(call.report.replay_mismatch, 1.0);
}

TEST(ReferenceRouter, MismatchIsTheShareOfForeignIds) {
  Call<double> call({.tokens = 2, .experts = 4, .top_k = 2}, {4, 3, 2, 1, 1, 2, 3, 4});
  call.forced = {1, 2, 2, 3};
  EXPECT_EQ(call.run().report.replay_mismatch, 0.0);
  call.options.mismatch = ReplayMismatch::measure;
  EXPECT_EQ(call.run().report.replay_mismatch, 0.25);
  call.forced = {-1, 0, -1, 0};
  EXPECT_EQ(call.run().report.replay_mismatch, 0.0);
}

TEST(ReferenceRouter, PaddingComesBeforeReplayAndIsNotRead) {
  Call<double> call({.tokens = 4, .experts = 3, .top_k = 2},
                    {nan, nan, nan, 1, 2, 3, inf, nan, 0, 3, 2, 1});
  call.forced = {0, 1, 0, 1, 1, 2, -1, -1};
  call.segment_ids = {0, 2, 0, 1};
  call.run();
  EXPECT_EQ(call.ids, (Ids{-1, -1, 0, 1, -1, -1, 0, 1}));
  EXPECT_EQ(call.weights[0], 0.0);
  EXPECT_EQ(call.weights[1], 0.0);
  EXPECT_EQ(call.weights[4], 0.0);
  EXPECT_EQ(call.weights[5], 0.0);
  EXPECT_NEAR(call.weights[2], 1 / (1 + std::exp(1.0)), 1e-15);
  EXPECT_EQ(call.report.padding_tokens, 2);
  EXPECT_EQ(call.report.forced_tokens, 1);
  EXPECT_EQ(call.report.automatic_tokens, 1);
  EXPECT_EQ(call.report.nonfinite_rows, 0);

  const Vector d_logits = call.backward({nan, nan, 1, 2, nan, nan, 2, 1});
  EXPECT_EQ(Vector(d_logits.begin(), d_logits.begin() + 3), Vector(3, 0.0));
  EXPECT_EQ(Vector(d_logits.begin() + 6, d_logits.begin() + 9), Vector(3, 0.0));
  EXPECT_NE(d_logits[3], 0.0);
  EXPECT_NE(d_logits[9], 0.0);
}

TEST(ReferenceRouter, IncludedPaddingIsRoutedLikeAnyToken) {
  Call<double> call({.tokens = 2, .experts = 3, .top_k = 1}, {1, 2, 0, 5, 2, 3});
  call.segment_ids = {0, 1};
  call.options.padding = PaddingRouting::include;
  call.run();
  EXPECT_EQ(call.ids, (Ids{1, 0}));
  EXPECT_EQ(call.weights, (Vector{1, 1}));
  EXPECT_EQ(call.report.padding_tokens, 0);
}

TEST(ReferenceRouter, LogitsFarApartNeitherOverflowNorTie) {
  const Call<double> call = one_row({-2000, 1000, -1000, 999, 0}, 3);
  EXPECT_EQ(call.ids, (Ids{1, 3, 4}));
  EXPECT_NEAR(call.weights[0], 1 / (1 + std::exp(-1.0)), 1e-15);
  EXPECT_EQ(call.weights[2], 0.0);
}

// Ids of a stable sort per row, weights of a softmax in double, over more than one block of tokens,
// on a grid with many ties.
TEST(ReferenceRouter, AgreesWithAStableSort) {
  Random random(11);
  const RouterDims dims{.tokens = 150, .experts = 12, .top_k = 5};
  Vector logits(static_cast<std::size_t>(dims.tokens * dims.experts));
  for (double& logit : logits) {
    logit = 0.5 * static_cast<double>(random.integer(-4, 4));
  }
  Call<double> call(dims, logits);
  call.segment_ids.assign(150, 1);
  call.segment_ids[3] = 0;
  call.segment_ids[140] = 0;
  call.run();
  EXPECT_EQ(call.report.padding_tokens, 2);
  EXPECT_EQ(call.report.automatic_tokens, 148);
  for (std::size_t t = 0; t < 150; ++t) {
    Ids order(12);
    std::iota(order.begin(), order.end(), 0);
    const double* const row = logits.data() + t * 12;
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return row[a] > row[b]; });
    double sum = 0;
    for (std::size_t k = 0; k < 5; ++k) {
      sum += std::exp(row[order[k]]);
    }
    for (std::size_t k = 0; k < 5; ++k) {
      const bool padding = t == 3 || t == 140;
      EXPECT_EQ(call.ids[t * 5 + k], padding ? -1 : order[k]);
      EXPECT_NEAR(call.weights[t * 5 + k], padding ? 0 : std::exp(row[order[k]]) / sum, 1e-15);
    }
  }
}

TEST(ReferenceRouter, Bf16LogitsAreWeighedInFloat) {
  Call<bfloat16> call({.tokens = 1, .experts = 3, .top_k = 2},
                      {bfloat16(1.0F), bfloat16(0.5F), bfloat16(1.0F)});
  call.run();
  EXPECT_EQ(call.ids, (Ids{0, 2}));
  EXPECT_EQ(call.weights, (std::vector<float>{0.5F, 0.5F}));
  call.dims.top_k = 3;
  call.run();
  EXPECT_NEAR(call.weights[2], 1 / (1 + 2 * std::exp(0.5)), 1e-7);
}

TEST(ReferenceRouter, EdgeShapes) {
  Call<double> none({.tokens = 0, .experts = 6, .top_k = 2}, {});
  none.run();
  EXPECT_EQ(none.report.automatic_tokens, 0);
  EXPECT_TRUE(none.backward({}).empty());
  const Call<double> one = one_row({-3}, 1);
  EXPECT_EQ(one.ids, (Ids{0}));
  EXPECT_EQ(one.weights, (Vector{1}));
  const Call<double> all = one_row({1, 3, 2}, 3);
  EXPECT_EQ(all.ids, (Ids{1, 2, 0}));
  EXPECT_NEAR(all.weights[0] + all.weights[1] + all.weights[2], 1, 1e-15);
}

TEST(ReferenceRouter, CotangentByCentralDifferences) {
  for (const TopKWeights weights : {TopKWeights::softmax_of_chosen, TopKWeights::softmax_of_all}) {
    Random random(5);
    const RouterDims dims{.tokens = 6, .experts = 7, .top_k = 3};
    Call<double> call(dims, random.normals<double>(42, 1.5));
    call.forced = Ids(18, -1);
    call.forced[6] = 5;
    call.forced[7] = 0;
    call.forced[8] = 3;
    call.segment_ids = {1, 1, 1, 0, 2, 2};
    call.options.weights = weights;
    const Vector d_weights = random.normals<double>(18);
    const auto objective = [&] {
      call.run();
      return std::inner_product(d_weights.begin(), d_weights.end(), call.weights.begin(), 0.0);
    };
    const Vector expected =
        heddle::test::central_differences(std::span<double>(call.logits), objective);
    call.run();
    EXPECT_TRUE(close(call.backward(d_weights), expected, 1e-9));
  }
}

TEST(ReferenceRouter, OneChoiceGivesExactlyNoCotangent) {
  Random random(6);
  Call<float> call({.tokens = 20, .experts = 5, .top_k = 1}, random.normals<float>(100));
  call.run();
  EXPECT_EQ(call.weights, std::vector<float>(20, 1.0F));
  EXPECT_EQ(call.backward(random.normals<float>(20)), std::vector<float>(100, 0.0F));
  call.options.weights = TopKWeights::softmax_of_all;
  call.run();
  EXPECT_NE(call.backward(std::vector<float>(20, 1.0F)), std::vector<float>(100, 0.0F));
}

TEST(ReferenceRouter, ReadsAndWritesThroughStrides) {
  Random random(7);
  const RouterDims dims{.tokens = 5, .experts = 4, .top_k = 2};
  Call<double> dense(dims, random.normals<double>(20));
  dense.run();
  Vector wide(5 * 6, nan);
  for (std::size_t t = 0; t < 5; ++t) {
    std::copy_n(dense.logits.begin() + static_cast<std::ptrdiff_t>(t * 4), 4,
                wide.begin() + static_cast<std::ptrdiff_t>(t * 6));
  }
  Ids ids(5 * 3, -77);
  Vector weights(5 * 4, -77);
  route<double>(dims, {.router_logits = {wide.data(), 5, 4, 6}}, {},
                {.expert_ids = {ids.data(), 5, 2, 3}, .expert_weights = {weights.data(), 5, 2, 4}});
  for (std::size_t t = 0; t < 5; ++t) {
    for (std::size_t k = 0; k < 2; ++k) {
      EXPECT_EQ(ids[t * 3 + k], dense.ids[t * 2 + k]);
      EXPECT_EQ(weights[t * 4 + k], dense.weights[t * 2 + k]);
    }
    EXPECT_EQ(ids[t * 3 + 2], -77);
    EXPECT_EQ(weights[t * 4 + 2], -77);
  }
}

TEST(ReferenceRouter, BitsDoNotDependOnThreads) {
  Random random(8);
  Call<float> one({.tokens = 300, .experts = 16, .top_k = 4}, random.normals<float>(4800));
  const std::vector<float> d_weights = random.normals<float>(1200);
  Call<float> many = one;
  std::vector<float> d_one;
  std::vector<float> d_many;
  heddle::test::with_threads(1, [&] { d_one = one.run().backward(d_weights); });
  heddle::test::with_threads(8, [&] { d_many = many.run().backward(d_weights); });
  EXPECT_EQ(one.ids, many.ids);
  EXPECT_TRUE(same_bits(one.weights, many.weights));
  EXPECT_TRUE(same_bits(d_one, d_many));
}

TEST(ReferenceRouter, RefusesWrongArguments) {
  const RouterDims dims{.tokens = 2, .experts = 3, .top_k = 2};
  const auto with = [&](auto change) {
    Call<double> call(dims, Vector(6, 0.0));
    change(call);
    return thrown_text<Error>([&] { call.run(); });
  };
  EXPECT_EQ(with([](auto& c) { c.dims.top_k = 4; }),
            "moe::reference::route: dims.top_k = 4: must be at most dims.experts (3)");
  EXPECT_EQ(with([](auto& c) { c.segment_ids = {1}; }),
            "moe::reference::route: segment_ids.size = 1: must equal dims.tokens (2)");
  EXPECT_EQ(with([](auto& c) {
              c.segment_ids = {1, -3};
            }),
            "moe::reference::route: segment_ids[1] = -3: must be >= 0");
  EXPECT_EQ(with([](auto& c) { c.options.padding = static_cast<PaddingRouting>(9); }),
            "moe::reference::route: options.padding = 9: must be exclude or include");

  Vector logits(6, 0.0);
  Ids ids(4, 0);
  Vector weights(4, 0.0);
  Vector d_logits(6, 7.0);
  const auto routed = [&](RouterInputs<double> in, RouterOutputs<double> out) {
    return thrown_text<Error>([&] { route<double>(dims, in, {}, out); });
  };
  const RouterInputs<double> in{.router_logits = {logits.data(), 2, 3}};
  const RouterOutputs<double> out{.expert_ids = {ids.data(), 2, 2},
                                  .expert_weights = {weights.data(), 2, 2}};
  EXPECT_EQ(routed({.router_logits = {logits.data(), 3, 2}}, out),
            "moe::reference::route: router_logits.rows = 3: must equal dims.tokens (2)");
  EXPECT_EQ(routed({.router_logits = {}}, out),
            "moe::reference::route: router_logits.rows = 0: must equal "
            "dims.tokens (2)");
  EXPECT_EQ(routed({.router_logits = in.router_logits, .forced_ids = {ids.data(), 2, 1}}, out),
            "moe::reference::route: forced_ids.cols = 1: must equal dims.top_k (2)");
  EXPECT_EQ(routed(in, {.expert_ids = {ids.data(), 1, 2}, .expert_weights = out.expert_weights}),
            "moe::reference::route: expert_ids.rows = 1: must equal dims.tokens (2)");
  EXPECT_EQ(routed(in, {.expert_ids = out.expert_ids, .expert_weights = {weights.data(), 2, 2, 1}}),
            "moe::reference::route: expert_weights.stride = 1: must be at least its cols (2)");

  const auto back = [&](Ids given, ConstMatrixView<double> d_weights, RouterOptions options = {}) {
    const std::string text = thrown_text<Error>([&] {
      route_backward<double>(dims,
                             {.router_logits = in.router_logits,
                              .expert_ids = {given.data(), 2, 2},
                              .d_expert_weights = d_weights},
                             options, {d_logits.data(), 2, 3});
    });
    EXPECT_EQ(d_logits, Vector(6, 7.0));
    return text;
  };
  const ConstMatrixView<double> d_weights(weights.data(), 2, 2);
  EXPECT_EQ(back({0, 1, 0, 3}, d_weights),
            "moe::reference::route_backward: expert_ids[3] = 3: must be in [0, 3) or -1");
  EXPECT_EQ(back({0, -2, 0, 1}, d_weights),
            "moe::reference::route_backward: expert_ids[1] = -2: must be in [0, 3) or -1");
  EXPECT_EQ(back({0, 1, 0, -1}, d_weights),
            "moe::reference::route_backward: expert_ids[3] = -1: must be -1 in every column of a "
            "row or in none");
  EXPECT_EQ(back({0, 1, 0, 1}, {weights.data(), 2, 1}),
            "moe::reference::route_backward: d_expert_weights.cols = 1: must equal dims.top_k (2)");
  EXPECT_EQ(back({0, 1, 0, 1}, d_weights, {.weights = static_cast<TopKWeights>(5)}),
            "moe::reference::route_backward: options.weights = 5: must be softmax_of_chosen or "
            "softmax_of_all");
  EXPECT_EQ(thrown_text<Error>([&] {
              route_backward<double>(dims,
                                     {.router_logits = in.router_logits,
                                      .expert_ids = {ids.data(), 2, 2},
                                      .d_expert_weights = d_weights},
                                     {}, {d_logits.data(), 2, 2});
            }),
            "moe::reference::route_backward: d_router_logits.cols = 2: must equal dims.experts "
            "(3)");
}

}  // namespace
}  // namespace heddle::moe::reference

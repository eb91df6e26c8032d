#include "heddle/moe/router.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/isa.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: a tie to the highest id; -0 below +0; NaN chosen; ids that
// repeat once only -inf is left; the rest of a row behind its last whole vector skipped, or its fill
// chosen; the threshold that of another rank, or not moved on; forced ids sorted, or taken one by one;
// -1 used as an index; replay before padding; padding's logits read; row 0 written where no row needs a
// choice; the boundaries 256 and 257 off by one; weights of the wrong slot; max not subtracted; softmax
// over E without renormalisation, or with it where it must not be; +inf giving NaN; the mean term of the
// backward dropped, or its unchosen experts under softmax_of_all; a cotangent for non-finite rows; K
// above 16 cut; a task's counts not folded.

namespace heddle::moe {
namespace {

using heddle::test::close;
using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;
using heddle::test::thrown_text;

using Ids = std::vector<std::int32_t>;
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float inf = std::numeric_limits<float>::infinity();

template <class S>
struct Call {
  using A = AccumulatorOf<S>;

  RouterDims dims;
  std::vector<S> logits;
  Ids forced, segment_ids;
  RouterOptions options;
  ChoiceRows choice = ChoiceRows::needed;
  Ids ids;
  std::vector<A> weights;
  RouterReport report;

  Call(RouterDims d, std::vector<S> l) : dims(d), logits(std::move(l)) {}

  [[nodiscard]] ConstMatrixView<S> logit_view() const {
    return {logits.data(), dims.tokens, dims.experts};
  }
  [[nodiscard]] RouterInputs<S> inputs() const {
    return {.router_logits = logit_view(),
            .forced_ids = forced.empty() ? ConstMatrixView<std::int32_t>()
                                         : ConstMatrixView<std::int32_t>(forced.data(), dims.tokens,
                                                                         dims.top_k),
            .segment_ids = segment_ids};
  }
  Call& run() {
    ids.assign(static_cast<std::size_t>(dims.slots()), poison<std::int32_t>());
    weights.assign(ids.size(), poison<A>());
    report = moe::route<S>(dims, inputs(), options,
                           {.expert_ids = {ids.data(), dims.tokens, dims.top_k},
                            .expert_weights = {weights.data(), dims.tokens, dims.top_k}},
                           choice);
    return *this;
  }
  [[nodiscard]] RouterBackwardInputs<S> backward_inputs(const std::vector<A>& d_weights) const {
    return {.router_logits = logit_view(),
            .expert_ids = {ids.data(), dims.tokens, dims.top_k},
            .d_expert_weights = {d_weights.data(), dims.tokens, dims.top_k}};
  }
  [[nodiscard]] std::vector<A> backward(const std::vector<A>& d_weights) const {
    std::vector<A> d_logits(logits.size(), poison<A>());
    moe::route_backward<S>(dims, backward_inputs(d_weights), options,
                           {d_logits.data(), dims.tokens, dims.experts});
    return d_logits;
  }
};

Call<float> one_row(std::vector<float> logits, std::int64_t top_k) {
  const auto experts = static_cast<std::int64_t>(logits.size());
  Call<float> call({.tokens = 1, .experts = experts, .top_k = top_k}, std::move(logits));
  call.run();
  return call;
}

/// Logits with ties, and some rows with NaN, infinities or nothing finite.
template <class S>
std::vector<S> wild_logits(const RouterDims& dims, std::uint64_t seed) {
  Random random(seed);
  std::vector<S> logits;
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    const std::int64_t kind = random.integer(0, 9);
    for (std::int64_t e = 0; e < dims.experts; ++e) {
      float value = static_cast<float>(random.normal(2));
      if (kind < 4) {
        value = 0.5F * static_cast<float>(random.integer(-4, 4));
      }
      if (kind == 5 && random.chance(0.3)) {
        value = nan;
      }
      if (kind == 6 && random.chance(0.2)) {
        value = inf;
      }
      if (kind == 7 && random.chance(0.9)) {
        value = -inf;
      }
      logits.push_back(static_cast<S>(kind == 8 ? nan : value));
    }
  }
  return logits;
}

/// Ids by a stable sort of a row, NaN with -inf.
template <class S>
Ids sorted_ids(const S* row, std::int64_t experts) {
  Ids order(static_cast<std::size_t>(experts));
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](std::int32_t e) {
    const float logit = static_cast<float>(row[e]);
    return std::isnan(logit) ? -inf : logit;
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return value(a) > value(b); });
  return order;
}

template <class S>
void check_against_sort_and_reference(const RouterDims& dims, TopKWeights weights) {
  Call<S> call(dims, wild_logits<S>(dims, 31));
  call.options.weights = weights;
  call.run();
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    const Ids order = sorted_ids(call.logits.data() + t * dims.experts, dims.experts);
    ASSERT_TRUE(std::equal(order.begin(), order.begin() + dims.top_k,
                           call.ids.begin() + static_cast<std::ptrdiff_t>(t * dims.top_k)))
        << "token " << t << " of E " << dims.experts;
  }
  Call<S> plain = call;
  plain.report =
      reference::route<S>(dims, plain.inputs(), plain.options,
                          {.expert_ids = {plain.ids.data(), dims.tokens, dims.top_k},
                           .expert_weights = {plain.weights.data(), dims.tokens, dims.top_k}});
  EXPECT_TRUE(close(call.weights, plain.weights, 1e-6));
  EXPECT_EQ(call.report.nonfinite_rows, plain.report.nonfinite_rows);
  EXPECT_EQ(call.report.automatic_tokens, dims.tokens);
  Random random(32);
  const std::vector<float> d_weights = random.normals<float>(dims.slots());
  std::vector<float> d_plain(call.logits.size());
  reference::route_backward<S>(dims, plain.backward_inputs(d_weights), plain.options,
                               {d_plain.data(), dims.tokens, dims.experts});
  EXPECT_TRUE(close(call.backward(d_weights), d_plain, 2e-6));
}

TEST(Router, AgreesWithAStableSortAndTheReference) {
  for (const TopKWeights weights : {TopKWeights::softmax_of_chosen, TopKWeights::softmax_of_all}) {
    for (const auto& [experts, top_k] :
         {std::pair(2, 1), {16, 4}, {17, 17}, {33, 10}, {64, 33}, {131, 8}, {512, 10}}) {
      check_against_sort_and_reference<float>({.tokens = 150, .experts = experts, .top_k = top_k},
                                              weights);
    }
    check_against_sort_and_reference<bfloat16>({.tokens = 150, .experts = 45, .top_k = 6}, weights);
  }
}

TEST(Router, WeightsAgainstFloat64) {
  const RouterDims dims{.tokens = 200, .experts = 512, .top_k = 10};
  Random random(33);
  Call<float> call(dims, random.normals<float>(dims.tokens * dims.experts, 2));
  for (const TopKWeights weights : {TopKWeights::softmax_of_chosen, TopKWeights::softmax_of_all}) {
    call.options.weights = weights;
    call.run();
    for (std::int64_t t = 0; t < dims.tokens; ++t) {
      const float* const row = call.logits.data() + t * dims.experts;
      const Ids order = sorted_ids(row, dims.experts);
      const std::size_t terms = weights == TopKWeights::softmax_of_chosen ? 10 : 512;
      double sum = 0;
      for (std::size_t i = 0; i < terms; ++i) {
        sum += std::exp(static_cast<double>(row[order[i]]) - static_cast<double>(row[order[0]]));
      }
      for (std::size_t k = 0; k < 10; ++k) {
        const double expected =
            std::exp(static_cast<double>(row[order[k]]) - static_cast<double>(row[order[0]])) / sum;
        const auto actual = static_cast<double>(call.weights[static_cast<std::size_t>(t) * 10 + k]);
        ASSERT_NEAR(actual, expected, 4e-7 * expected);
      }
    }
  }
}

TEST(Router, TiesGoToTheLowestIdAndZerosAreEqual) {
  EXPECT_EQ(one_row({1, 3, 3, 3}, 2).ids, (Ids{1, 2}));
  EXPECT_EQ(one_row({-0.0F, 0.0F, -0.0F, -1}, 3).ids, (Ids{0, 1, 2}));
  EXPECT_EQ(one_row(std::vector<float>(100, 0.25F), 10).ids, (Ids{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  std::vector<float> late(100, 0.0F);
  late[99] = late[37] = late[64] = 1;
  EXPECT_EQ(one_row(late, 5).ids, (Ids{37, 64, 99, 0, 1}));
}

TEST(Router, NonFiniteRows) {
  const Call<float> all_nan = one_row({nan, nan, nan, nan, nan, nan}, 4);
  EXPECT_EQ(all_nan.ids, (Ids{0, 1, 2, 3}));
  EXPECT_EQ(all_nan.weights, std::vector<float>(4, 0.25F));
  EXPECT_EQ(all_nan.report.nonfinite_rows, 1);
  // One finite score and K = 3: three distinct experts.
  EXPECT_EQ(one_row({-inf, -inf, 2, -inf, -inf}, 3).ids, (Ids{2, 0, 1}));
  const Call<float> one_nan = one_row({1, nan, 0, 2}, 3);
  EXPECT_EQ(one_nan.ids, (Ids{3, 0, 2}));
  EXPECT_EQ(one_nan.report.nonfinite_rows, 0);
  const Call<float> infinite = one_row({inf, 1, inf, 2}, 3);
  EXPECT_EQ(infinite.ids, (Ids{0, 2, 3}));
  EXPECT_EQ(infinite.weights, (std::vector<float>{0.5F, 0.5F, 0}));
  EXPECT_EQ(infinite.backward({1, 2, 3}), std::vector<float>(4, 0.0F));
  Call<float> elsewhere({.tokens = 1, .experts = 3, .top_k = 2}, {inf, 1, 2});
  elsewhere.forced = {1, 2};
  elsewhere.options.weights = TopKWeights::softmax_of_all;
  EXPECT_EQ(elsewhere.run().weights, (std::vector<float>{0, 0}));
  EXPECT_EQ(elsewhere.report.nonfinite_rows, 1);
}

TEST(Router, ReplayTakesWholeRowsInTheirOrder) {
  const std::vector<float> row{0.5F, 3, 1, 2, -1};
  std::vector<float> logits;
  for (int t = 0; t < 7; ++t) {
    logits.insert(logits.end(), row.begin(), row.end());
  }
  Call<float> call({.tokens = 7, .experts = 5, .top_k = 2}, logits);
  call.forced = {4, 0, 0, 4, 2, -1, -1, 2, 3, 3, 5, 1, -7, 1};
  for (const ReplayMismatch mismatch : {ReplayMismatch::skip, ReplayMismatch::measure}) {
    call.options.mismatch = mismatch;
    call.run();
    EXPECT_EQ(call.ids, (Ids{4, 0, 0, 4, 1, 3, 1, 3, 1, 3, 1, 3, 1, 3}));
    const double small = 1 / (1 + std::exp(1.5));
    EXPECT_TRUE(close(std::vector<float>(call.weights.begin(), call.weights.begin() + 4),
                      std::vector<double>{small, 1 - small, 1 - small, small}, 1e-6));
    EXPECT_EQ(call.report.forced_tokens, 2);
    EXPECT_EQ(call.report.automatic_tokens, 5);
    EXPECT_EQ(call.report.chosen_rows, mismatch == ReplayMismatch::skip ? 5 : 7);
    EXPECT_EQ(call.report.replay_mismatch, mismatch == ReplayMismatch::skip ? 0.0 : 1.0);
  }
}

TEST(Router, MismatchIsTheShareOfForeignIds) {
  Call<float> call({.tokens = 2, .experts = 4, .top_k = 2}, {4, 3, 2, 1, 1, 2, 3, 4});
  call.forced = {1, 2, 2, 3};
  call.options.mismatch = ReplayMismatch::measure;
  EXPECT_EQ(call.run().report.replay_mismatch, 0.25);
}

TEST(Router, PaddingComesBeforeReplayAndIsNotRead) {
  Call<float> call({.tokens = 4, .experts = 3, .top_k = 2},
                   {nan, nan, nan, 1, 2, 3, inf, nan, 0, 3, 2, 1});
  call.forced = {0, 1, 0, 1, 1, 2, -1, -1};
  call.segment_ids = {0, 2, 0, 1};
  for (const ChoiceRows choice : {ChoiceRows::needed, ChoiceRows::all, ChoiceRows::by_count}) {
    call.choice = choice;
    call.run();
    EXPECT_EQ(call.ids, (Ids{-1, -1, 0, 1, -1, -1, 0, 1}));
    for (const std::size_t slot : {0U, 1U, 4U, 5U}) {
      EXPECT_EQ(call.weights[slot], 0.0F);
    }
    EXPECT_EQ(call.report.padding_tokens, 2);
    EXPECT_EQ(call.report.nonfinite_rows, 0);
    EXPECT_EQ(call.report.chosen_rows, choice == ChoiceRows::needed ? 1 : 2);
  }
  const std::vector<float> d_logits = call.backward({nan, nan, 1, 2, nan, nan, 2, 1});
  EXPECT_EQ(std::vector<float>(d_logits.begin(), d_logits.begin() + 3), std::vector<float>(3, 0));
  EXPECT_EQ(std::vector<float>(d_logits.begin() + 6, d_logits.begin() + 9),
            std::vector<float>(3, 0));
  EXPECT_NE(d_logits[3], 0.0F);
  EXPECT_NE(d_logits[9], 0.0F);
  call.options.padding = PaddingRouting::include;
  EXPECT_EQ(call.run().report.padding_tokens, 0);
  EXPECT_EQ(call.report.forced_tokens, 3);
}

/// T tokens of which the last `automatic` choose for themselves.
Call<float> partly_replayed(std::int64_t tokens, std::int64_t automatic) {
  const RouterDims dims{.tokens = tokens, .experts = 24, .top_k = 3};
  Random random(34);
  Call<float> call(dims, random.normals<float>(dims.tokens * dims.experts));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < 3; ++k) {
      call.forced.push_back(t < tokens - automatic ? static_cast<std::int32_t>((t + 5 * k) % 24)
                                                   : -1);
    }
  }
  return call;
}

// The switch at 256 rows: how many rows are looked through changes, no output does.
TEST(Router, ChoicesAreMadeOnlyWhereNeeded) {
  const auto chosen_rows = [](std::int64_t tokens, std::int64_t automatic) {
    Call<float> call = partly_replayed(tokens, automatic);
    std::vector<std::int64_t> rows;
    const Ids expected = call.run().ids;
    const std::vector<float> weights = call.weights;
    Random random(35);
    const std::vector<float> d_weights = random.normals<float>(call.dims.slots());
    const std::vector<float> d_logits = call.backward(d_weights);
    for (const ChoiceRows choice : {ChoiceRows::needed, ChoiceRows::all, ChoiceRows::by_count}) {
      call.choice = choice;
      call.run();
      EXPECT_EQ(call.ids, expected);
      EXPECT_TRUE(same_bits(call.weights, weights));
      EXPECT_TRUE(same_bits(call.backward(d_weights), d_logits));
      EXPECT_EQ(call.report.automatic_tokens, automatic);
      rows.push_back(call.report.chosen_rows);
    }
    return rows;
  };
  using Rows = std::vector<std::int64_t>;
  EXPECT_EQ(chosen_rows(600, 0), (Rows{0, 600, 0}));
  EXPECT_EQ(chosen_rows(200, 0), (Rows{0, 200, 0}));
  EXPECT_EQ(chosen_rows(600, 1), (Rows{1, 600, 1}));
  EXPECT_EQ(chosen_rows(600, 256), (Rows{256, 600, 256}));
  EXPECT_EQ(chosen_rows(600, 257), (Rows{257, 600, 600}));
  EXPECT_EQ(chosen_rows(256, 3), (Rows{3, 256, 256}));
  EXPECT_EQ(chosen_rows(257, 3), (Rows{3, 257, 3}));
}

TEST(Router, EdgeShapes) {
  Call<float> none({.tokens = 0, .experts = 6, .top_k = 2}, {});
  EXPECT_EQ(none.run().report.automatic_tokens, 0);
  EXPECT_TRUE(none.backward({}).empty());
  const Call<float> one = one_row({-3}, 1);
  EXPECT_EQ(one.ids, (Ids{0}));
  EXPECT_EQ(one.weights, (std::vector<float>{1}));
  EXPECT_EQ(one_row({1, 3, 2}, 3).ids, (Ids{1, 2, 0}));
  EXPECT_EQ(one_row({-2000, 1000, -1000, 999, 0}, 3).ids, (Ids{1, 3, 4}));
}

TEST(Router, OneChoiceGivesExactlyNoCotangent) {
  Random random(36);
  Call<float> call({.tokens = 20, .experts = 5, .top_k = 1}, random.normals<float>(100));
  call.run();
  EXPECT_EQ(call.weights, std::vector<float>(20, 1.0F));
  EXPECT_EQ(call.backward(random.normals<float>(20)), std::vector<float>(100, 0.0F));
}

TEST(Router, CotangentByCentralDifferences) {
  for (const TopKWeights weights : {TopKWeights::softmax_of_chosen, TopKWeights::softmax_of_all}) {
    Random random(37);
    Call<double> call({.tokens = 6, .experts = 7, .top_k = 3}, random.normals<double>(42, 1.5));
    call.forced = Ids(18, -1);
    call.forced[6] = 5;
    call.forced[7] = 0;
    call.forced[8] = 3;
    call.segment_ids = {1, 1, 1, 0, 2, 2};
    call.options.weights = weights;
    const std::vector<double> d_weights = random.normals<double>(18);
    const auto objective = [&] {
      call.run();
      return std::inner_product(d_weights.begin(), d_weights.end(), call.weights.begin(), 0.0);
    };
    const std::vector<double> expected =
        heddle::test::central_differences(std::span<double>(call.logits), objective);
    call.run();
    EXPECT_TRUE(close(call.backward(d_weights), expected, 1e-9));
    // The same tokens in f32 and its backward, against the differences in double.
    Call<float> narrow(call.dims, {call.logits.begin(), call.logits.end()});
    narrow.forced = call.forced;
    narrow.segment_ids = call.segment_ids;
    narrow.options = call.options;
    EXPECT_TRUE(close(narrow.run().backward({d_weights.begin(), d_weights.end()}), expected, 1e-6));
  }
}

TEST(Router, BitsDependOnNeitherThreadsNorPath) {
  const RouterDims dims{.tokens = 300, .experts = 77, .top_k = 18};
  for (const TopKWeights weights : {TopKWeights::softmax_of_chosen, TopKWeights::softmax_of_all}) {
    Call<float> call(dims, wild_logits<float>(dims, 38));
    call.options.weights = weights;
    Random random(39);
    const std::vector<float> d_weights = random.normals<float>(dims.slots());
    const std::vector<float> d_logits = call.run().backward(d_weights);
    const auto check = [&](const std::string& what) {
      Call<float> other = call;
      EXPECT_TRUE(same_bits(other.run().backward(d_weights), d_logits)) << what;
      EXPECT_EQ(other.ids, call.ids) << what;
      EXPECT_TRUE(same_bits(other.weights, call.weights)) << what;
      EXPECT_EQ(other.report.nonfinite_rows, call.report.nonfinite_rows) << what;
    };
    for (const int threads : {1, 2, 16}) {
      heddle::test::with_threads(threads, [&] { check(std::to_string(threads)); });
    }
    for (const Path path : available_paths()) {
      const ScopedPath scoped(path);
      check(std::string(path_name(path)));
    }
  }
}

// Tokens in another order have their results in that order.
TEST(Router, TokensDoNotKnowEachOther) {
  const RouterDims dims{.tokens = 90, .experts = 20, .top_k = 4};
  Call<float> call(dims, wild_logits<float>(dims, 40));
  call.run();
  Call<float> reversed = call;
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    std::copy_n(call.logits.begin() + static_cast<std::ptrdiff_t>(t * 20), 20,
                reversed.logits.end() - static_cast<std::ptrdiff_t>((t + 1) * 20));
  }
  reversed.run();
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    for (std::int64_t k = 0; k < 4; ++k) {
      const auto here = static_cast<std::size_t>(t * 4 + k);
      const auto there = static_cast<std::size_t>((dims.tokens - 1 - t) * 4 + k);
      EXPECT_EQ(call.ids[here], reversed.ids[there]);
      EXPECT_EQ(call.weights[here], reversed.weights[there]);
    }
  }
}

TEST(Router, CostCountsTheRowsThatChoose) {
  const RouterDims dims{.tokens = 100, .experts = 64, .top_k = 4};
  const Cost some = route_cost<float>(dims, {}, 30, 100);
  EXPECT_EQ(some.bytes_read, 30 * 64 * 4);
  EXPECT_EQ(some.transcendentals, 400);
  EXPECT_EQ(some.bytes_written, 400 * 8);
  EXPECT_EQ(some.flops, 30 * 64 + 400);
  EXPECT_EQ(route_cost<float>(dims, {.weights = TopKWeights::softmax_of_all}, 30, 100).bytes_read,
            100 * 64 * 4);
}

TEST(Router, RefusesWrongArguments) {
  const RouterDims dims{.tokens = 2, .experts = 3, .top_k = 2};
  const auto with = [&](auto change) {
    Call<float> call(dims, std::vector<float>(6, 0.0F));
    change(call);
    return thrown_text<Error>([&] { call.run(); });
  };
  EXPECT_EQ(with([](auto& c) { c.dims.top_k = 4; }),
            "moe::route: dims.top_k = 4: must be at most dims.experts (3)");
  EXPECT_EQ(with([](auto& c) {
              c.segment_ids = {1, -3};
            }),
            "moe::route: segment_ids[1] = -3: must be >= 0");
  EXPECT_EQ(with([](auto& c) { c.options.padding = static_cast<PaddingRouting>(9); }),
            "moe::route: options.padding = 9: must be exclude or include");
  EXPECT_EQ(with([](auto& c) { c.choice = static_cast<ChoiceRows>(4); }),
            "moe::route: choice = 4: must be needed, all or by_count");
  Call<float> call(dims, std::vector<float>(6, 0.0F));
  call.run();
  call.ids[3] = 3;
  EXPECT_EQ(thrown_text<Error>([&] {
              static_cast<void>(call.backward({1, 2, 3, 4}));
            }),
            "moe::route_backward: expert_ids[3] = 3: must be in [0, 3) or -1");
}

}  // namespace
}  // namespace heddle::moe

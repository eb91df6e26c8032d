#include "heddle/moe/reference_losses.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: padding counted in the counts, in the probabilities or
// in the tokens; the mean of chunk losses; counts differentiated; the mean term of the gradient
// dropped; K missing from, or wrongly in, the scale; probabilities given to the z-loss; its factor
// 2 dropped; non-finite rows read; sequences or weight ignored.

namespace heddle::moe::reference {
namespace {

using heddle::test::close;
using heddle::test::Random;
using heddle::test::same_bits;
using heddle::test::thrown_text;

using Ids = std::vector<std::int32_t>;
using Vector = std::vector<double>;
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double inf = std::numeric_limits<double>::infinity();

struct Tokens {
  RouterDims dims;
  Vector logits;
  Ids ids;

  [[nodiscard]] ConstMatrixView<double> logit_view() const {
    return {logits.data(), dims.tokens, dims.experts};
  }
  [[nodiscard]] ConstMatrixView<std::int32_t> id_view() const {
    return {ids.data(), dims.tokens, dims.top_k};
  }
  [[nodiscard]] RouterLossSums<double> sums() const {
    RouterLossSums<double> result;
    add_router_loss_sums<double>(dims, logit_view(), id_view(), result);
    return result;
  }
};

/// Six tokens, four experts, two choices; token 2 is padding and token 4 holds +inf.
Tokens mixed_tokens() {
  Random random(21);
  Tokens tokens{{.tokens = 6, .experts = 4, .top_k = 2}, random.normals<double>(24, 1.5), {}};
  tokens.ids = {0, 1, 3, 0, -1, -1, 0, 2, 1, 2, 0, 1};
  tokens.logits[4 * 4 + 1] = inf;
  tokens.logits[5 * 4 + 3] = nan;  // counts as -inf
  return tokens;
}

TEST(ReferenceLosses, SumsByHand) {
  const Tokens tokens{
      {.tokens = 2, .experts = 2, .top_k = 1}, {0, std::log(3.0), std::log(7.0), 0}, {1, 0}};
  const RouterLossSums<double> sums = tokens.sums();
  EXPECT_EQ(sums.counts, (std::vector<std::int64_t>{1, 1}));
  EXPECT_TRUE(close(sums.probabilities, Vector{0.25 + 0.875, 0.75 + 0.125}, 1e-15));
  EXPECT_NEAR(sums.squared_logsumexp, std::log(4.0) * std::log(4.0) + std::log(8.0) * std::log(8.0),
              1e-14);
  EXPECT_EQ(sums.tokens, 2);
  // f = (1/2, 1/2), P = (9/16, 7/16): 2 * 1/2 * 1.
  EXPECT_NEAR(balance_loss<double>(tokens.dims, sums, {.weight = 3}), 3.0, 1e-14);
  EXPECT_NEAR(z_loss<double>(sums, {.weight = 2}), sums.squared_logsumexp, 1e-14);
}

TEST(ReferenceLosses, UniformRoutingNamesTheScale) {
  // 4 tokens, 6 experts, 3 choices, every expert twice; equal logits.
  const Tokens tokens{{.tokens = 4, .experts = 6, .top_k = 3},
                      Vector(24, 0.7),
                      {0, 1, 2, 3, 4, 5, 5, 0, 4, 1, 3, 2}};
  const RouterLossSums<double> sums = tokens.sums();
  EXPECT_NEAR(balance_loss<double>(tokens.dims, sums, {.weight = 1}), 3.0, 1e-14);
  EXPECT_NEAR(balance_loss<double>(tokens.dims, sums, {.weight = 1, .scale = BalanceScale::one}),
              1.0, 1e-14);
  EXPECT_NEAR(balance_loss<double>(tokens.dims, sums, {.weight = 0.5, .sequences = 4}), 3.0 / 8,
              1e-14);
}

TEST(ReferenceLosses, PaddingAndNonFiniteRowsAreLeftOut) {
  const Tokens tokens = mixed_tokens();
  const RouterLossSums<double> sums = tokens.sums();
  EXPECT_EQ(sums.tokens, 4);
  EXPECT_EQ(sums.counts, (std::vector<std::int64_t>{4, 2, 1, 1}));
  Tokens real{{.tokens = 4, .experts = 4, .top_k = 2}, {}, {}};
  for (const std::size_t t : {0U, 1U, 3U, 5U}) {
    for (std::size_t e = 0; e < 4; ++e) {
      const double logit = tokens.logits[t * 4 + e];
      real.logits.push_back(std::isnan(logit) ? -inf : logit);
    }
    real.ids.push_back(tokens.ids[t * 2]);
    real.ids.push_back(tokens.ids[t * 2 + 1]);
  }
  const RouterLossSums<double> expected = real.sums();
  EXPECT_TRUE(same_bits(sums.probabilities, expected.probabilities));
  EXPECT_EQ(sums.squared_logsumexp, expected.squared_logsumexp);

  Vector d_logits(24, 0.0);
  const MatrixView<double> d(d_logits.data(), 6, 4);
  balance_loss_backward<double>(tokens.dims, tokens.logit_view(), tokens.id_view(), sums,
                                {.weight = 1}, d);
  z_loss_backward<double>(tokens.dims, tokens.logit_view(), tokens.id_view(), sums, {.weight = 1},
                          d);
  for (std::size_t t = 0; t < 6; ++t) {
    for (std::size_t e = 0; e < 4; ++e) {
      const bool left_out = t == 2 || t == 4 || (t == 5 && e == 3);
      EXPECT_EQ(d_logits[t * 4 + e] == 0, left_out) << t << " " << e;
    }
  }
}

TEST(ReferenceLosses, GradientsByCentralDifferences) {
  for (const BalanceScale scale : {BalanceScale::top_k, BalanceScale::one}) {
    Tokens tokens = mixed_tokens();
    tokens.logits[5 * 4 + 3] = 0.25;
    const BalanceLossOptions balance{.weight = 0.7, .scale = scale, .sequences = 3};
    const ZLossOptions z{.weight = 0.1};
    Vector d_balance(24, 5.0);
    Vector d_z(24, 5.0);
    balance_loss_backward<double>(tokens.dims, tokens.logit_view(), tokens.id_view(), tokens.sums(),
                                  balance, {d_balance.data(), 6, 4});
    z_loss_backward<double>(tokens.dims, tokens.logit_view(), tokens.id_view(), tokens.sums(), z,
                            {d_z.data(), 6, 4});
    for (std::size_t i = 0; i < 24; ++i) {  // they add to what is there
      d_balance[i] -= 5.0;
      d_z[i] -= 5.0;
    }
    const std::span<double> logits(tokens.logits);
    EXPECT_TRUE(
        close(d_balance,
              heddle::test::central_differences(
                  logits, [&] { return balance_loss(tokens.dims, tokens.sums(), balance); }),
              1e-8));
    EXPECT_TRUE(close(
        d_z, heddle::test::central_differences(logits, [&] { return z_loss(tokens.sums(), z); }),
        1e-8));
  }
}

TEST(ReferenceLosses, ChunksAddUpBeforeTheProduct) {
  Random random(22);
  const RouterDims dims{.tokens = 8, .experts = 4, .top_k = 1};
  const Tokens whole{dims, random.normals<double>(32), {0, 0, 0, 1, 2, 3, 3, 2}};
  RouterLossSums<double> sums;
  double mean_of_chunks = 0;
  for (std::int64_t chunk = 0; chunk < 2; ++chunk) {
    const RouterDims half{.tokens = 4, .experts = 4, .top_k = 1};
    const ConstMatrixView<double> logits = whole.logit_view().row_block(chunk * 4, 4);
    const ConstMatrixView<std::int32_t> ids = whole.id_view().row_block(chunk * 4, 4);
    add_router_loss_sums<double>(half, logits, ids, sums);
    RouterLossSums<double> alone;
    add_router_loss_sums<double>(half, logits, ids, alone);
    mean_of_chunks += balance_loss<double>(half, alone, {.weight = 1}) / 2;
  }
  const double expected = balance_loss<double>(dims, whole.sums(), {.weight = 1});
  EXPECT_NEAR(balance_loss<double>(dims, sums, {.weight = 1}), expected, 1e-14);
  EXPECT_GT(std::abs(mean_of_chunks - expected), 1e-3);
}

TEST(ReferenceLosses, NoTokensCostNothing) {
  const Tokens tokens{{.tokens = 0, .experts = 3, .top_k = 2}, {}, {}};
  const RouterLossSums<double> sums = tokens.sums();
  EXPECT_EQ(balance_loss<double>(tokens.dims, sums, {.weight = 1}), 0);
  EXPECT_EQ(z_loss<double>(sums, {.weight = 1}), 0);
  const Tokens padding{{.tokens = 1, .experts = 3, .top_k = 2}, Vector(3, nan), {-1, -1}};
  Vector d(3, 2.0);
  balance_loss_backward<double>(padding.dims, padding.logit_view(), padding.id_view(), sums,
                                {.weight = 1}, {d.data(), 1, 3});
  z_loss_backward<double>(padding.dims, padding.logit_view(), padding.id_view(), sums,
                          {.weight = 1}, {d.data(), 1, 3});
  EXPECT_EQ(d, Vector(3, 2.0));
}

TEST(ReferenceLosses, BitsDoNotDependOnThreads) {
  Random random(23);
  const RouterDims dims{.tokens = 1000, .experts = 8, .top_k = 1};
  const std::vector<float> logits = random.normals<float>(8000);
  Ids ids(1000);
  for (std::int32_t& id : ids) {
    id = static_cast<std::int32_t>(random.integer(0, 7));
  }
  const auto run = [&](int threads) {
    RouterLossSums<float> sums;
    heddle::test::with_threads(threads, [&] {
      add_router_loss_sums<float>(dims, {logits.data(), 1000, 8}, {ids.data(), 1000, 1}, sums);
    });
    return sums;
  };
  const RouterLossSums<float> one = run(1);
  const RouterLossSums<float> eight = run(8);
  EXPECT_EQ(one.tokens, 1000);
  EXPECT_TRUE(same_bits(one.probabilities, eight.probabilities));
  EXPECT_EQ(one.squared_logsumexp, eight.squared_logsumexp);
  EXPECT_EQ(one.counts, eight.counts);
}

TEST(ReferenceLosses, RefusesWrongArguments) {
  const Tokens tokens = mixed_tokens();
  const auto added = [&](const RouterDims& dims, RouterLossSums<double> sums) {
    return thrown_text<Error>(
        [&] { add_router_loss_sums<double>(dims, tokens.logit_view(), tokens.id_view(), sums); });
  };
  EXPECT_EQ(added({.tokens = 5, .experts = 4, .top_k = 2}, {}),
            "moe::reference::add_router_loss_sums: router_logits.rows = 6: must equal dims.tokens "
            "(5)");
  EXPECT_EQ(added({.tokens = 6, .experts = 4, .top_k = 1}, {}),
            "moe::reference::add_router_loss_sums: expert_ids.cols = 2: must equal dims.top_k (1)");
  RouterLossSums<double> other;
  other.counts = {0, 0};
  EXPECT_EQ(added(tokens.dims, other),
            "moe::reference::add_router_loss_sums: sums.counts.size = 2: must equal dims.experts "
            "(4)");
  other.counts = {0, 0, 0, 0};
  EXPECT_EQ(added(tokens.dims, other),
            "moe::reference::add_router_loss_sums: sums.probabilities.size = 0: must equal "
            "dims.experts (4)");

  const RouterLossSums<double> sums = tokens.sums();
  const auto balanced = [&](const BalanceLossOptions& options) {
    return thrown_text<Error>([&] { static_cast<void>(balance_loss(tokens.dims, sums, options)); });
  };
  EXPECT_EQ(balanced({.weight = inf}),
            "moe::reference::balance_loss: options.weight = inf: must be finite");
  EXPECT_EQ(balanced({.scale = static_cast<BalanceScale>(4)}),
            "moe::reference::balance_loss: options.scale = 4: must be top_k or one");
  EXPECT_EQ(balanced({.sequences = 0}),
            "moe::reference::balance_loss: options.sequences = 0: must be >= 1");
  EXPECT_EQ(thrown_text<Error>([&] { static_cast<void>(z_loss(sums, {.weight = nan})); }),
            "moe::reference::z_loss: options.weight = nan: must be finite");
  Vector d(24, 0.0);
  EXPECT_EQ(thrown_text<Error>([&] {
              balance_loss_backward<double>(tokens.dims, tokens.logit_view(), tokens.id_view(),
                                            sums, {}, {d.data(), 4, 6});
            }),
            "moe::reference::balance_loss_backward: d_router_logits.rows = 4: must equal "
            "dims.tokens (6)");
  EXPECT_EQ(thrown_text<Error>([&] {
              z_loss_backward<double>(tokens.dims, tokens.logit_view(), tokens.id_view(), sums, {},
                                      {d.data(), 6, 3});
            }),
            "moe::reference::z_loss_backward: d_router_logits.cols = 3: must equal dims.experts "
            "(4)");
}

}  // namespace
}  // namespace heddle::moe::reference

#include "heddle/moe/router_losses.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/isa.hpp"
#include "heddle/core/workspace.hpp"
#include "moe/routed.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: padding counted in the counts, in the probabilities or in the
// tokens; the mean of chunk losses; counts differentiated; the mean term of the gradient dropped; the
// z-loss' factor 2 dropped, or its lse taken for the max; non-finite rows read; the last block of tokens
// skipped, or its sums not zeroed; the gradient overwriting.

namespace heddle::moe {
namespace {

using heddle::test::close;
using heddle::test::Random;
using heddle::test::same_bits;
using test::Ids;
using test::random_ids;

template <class S>
struct Tokens {
  using A = AccumulatorOf<S>;

  RouterDims dims;
  std::vector<S> logits;
  Ids ids;

  [[nodiscard]] ConstMatrixView<S> logit_view(std::int64_t first, std::int64_t count) const {
    return ConstMatrixView<S>(logits.data(), dims.tokens, dims.experts).row_block(first, count);
  }
  [[nodiscard]] ConstMatrixView<std::int32_t> id_view(std::int64_t first,
                                                      std::int64_t count) const {
    return ConstMatrixView<std::int32_t>(ids.data(), dims.tokens, dims.top_k)
        .row_block(first, count);
  }
  [[nodiscard]] RouterLossSums<A> sums(std::int64_t chunks = 1) const {
    RouterLossSums<A> result;
    const std::int64_t count = dims.tokens / chunks;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      RouterDims part = dims;
      part.tokens = count;
      Workspace workspace;
      add_router_loss_sums<S>(part, logit_view(chunk * count, count), id_view(chunk * count, count),
                              result, workspace);
      EXPECT_EQ(workspace.high_water_bytes(), router_loss_workspace_bytes<S>(part));
    }
    return result;
  }
  [[nodiscard]] std::vector<A> gradient(const RouterLossSums<A>& total,
                                        const RouterLossOptions& options, A start = A(0)) const {
    std::vector<A> result(logits.size(), start);
    Workspace workspace;
    router_loss_backward<S>(dims, logit_view(0, dims.tokens), id_view(0, dims.tokens), total,
                            options, {result.data(), dims.tokens, dims.experts}, workspace);
    EXPECT_EQ(workspace.high_water_bytes(), router_loss_backward_workspace_bytes<S>(dims));
    return result;
  }
};

/// Some padding, and one row with +inf that the losses leave out.
template <class S>
Tokens<S> random_tokens(const RouterDims& dims) {
  Random random(41);
  Tokens<S> tokens{dims, random.normals<S>(dims.tokens * dims.experts, 1.5), random_ids(dims, 42)};
  tokens.ids[0] = 0;
  for (std::int64_t k = 0; k < dims.top_k; ++k) {
    tokens.ids[static_cast<std::size_t>(k)] = static_cast<std::int32_t>(k);
  }
  tokens.logits[1] = std::numeric_limits<S>::infinity();
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    if (tokens.ids[static_cast<std::size_t>(t * dims.top_k)] == unrouted) {
      tokens.logits[static_cast<std::size_t>(t * dims.experts)] =
          std::numeric_limits<S>::quiet_NaN();
    }
  }
  return tokens;
}

const RouterLossOptions both{.balance = {.weight = 0.3, .sequences = 2}, .z = {.weight = 0.07}};

template <class S>
void check_against_reference(const RouterDims& dims) {
  using A = AccumulatorOf<S>;
  const Tokens<S> tokens = random_tokens<S>(dims);
  const RouterLossSums<A> sums = tokens.sums();
  RouterLossSums<A> expected;
  reference::add_router_loss_sums<S>(dims, tokens.logit_view(0, dims.tokens),
                                     tokens.id_view(0, dims.tokens), expected);
  EXPECT_EQ(sums.counts, expected.counts);
  EXPECT_EQ(sums.tokens, expected.tokens);
  EXPECT_LT(sums.tokens, dims.tokens);
  EXPECT_TRUE(close(sums.probabilities, expected.probabilities, 2e-6));
  EXPECT_NEAR(sums.squared_logsumexp, expected.squared_logsumexp,
              2e-6 * static_cast<double>(expected.squared_logsumexp));
  std::vector<A> d_expected(tokens.logits.size(), A(0));
  const MatrixView<A> d_view(d_expected.data(), dims.tokens, dims.experts);
  reference::balance_loss_backward<S>(dims, tokens.logit_view(0, dims.tokens),
                                      tokens.id_view(0, dims.tokens), expected, both.balance,
                                      d_view);
  reference::z_loss_backward<S>(dims, tokens.logit_view(0, dims.tokens),
                                tokens.id_view(0, dims.tokens), expected, both.z, d_view);
  EXPECT_TRUE(close(tokens.gradient(sums, both), d_expected, 5e-6));
}

TEST(RouterLosses, AgreeWithTheReference) {
  check_against_reference<float>({.tokens = 600, .experts = 37, .top_k = 3});
  check_against_reference<bfloat16>({.tokens = 300, .experts = 64, .top_k = 2});
  check_against_reference<double>({.tokens = 30, .experts = 5, .top_k = 2});
}

TEST(RouterLosses, GradientByCentralDifferences) {
  const RouterDims dims{.tokens = 8, .experts = 5, .top_k = 2};
  Tokens<double> tokens = random_tokens<double>(dims);
  tokens.logits[1] = 0.25;
  for (double& logit : tokens.logits) {
    logit = std::isnan(logit) ? 0.5 : logit;
  }
  const auto loss = [&] {
    const RouterLossSums<double> sums = tokens.sums();
    return balance_loss(dims, sums, both.balance) + z_loss(sums, both.z);
  };
  const std::vector<double> expected =
      heddle::test::central_differences(std::span<double>(tokens.logits), loss);
  EXPECT_TRUE(close(tokens.gradient(tokens.sums(), both), expected, 1e-8));
  const Tokens<float> narrow{dims, {tokens.logits.begin(), tokens.logits.end()}, tokens.ids};
  EXPECT_TRUE(close(narrow.gradient(narrow.sums(), both), expected, 3e-6));
}

TEST(RouterLosses, UniformRoutingGivesK) {
  const RouterDims dims{.tokens = 12, .experts = 6, .top_k = 2};
  Tokens<float> tokens{dims, std::vector<float>(72, 0.0F), {}};
  for (std::int32_t slot = 0; slot < 24; ++slot) {
    tokens.ids.push_back(slot % 6);
  }
  EXPECT_NEAR(balance_loss(dims, tokens.sums(), {.weight = 1}), 2, 1e-6);
  EXPECT_NEAR(balance_loss(dims, tokens.sums(), {.weight = 1, .scale = BalanceScale::one}), 1,
              1e-6);
  const double lse = std::log(6.0);
  EXPECT_NEAR(z_loss(tokens.sums(), {.weight = 1}), lse * lse, 1e-6);
}

// Sums of chunks are the sums of the whole; the mean of the chunks' losses is another number.
TEST(RouterLosses, ChunksAddUp) {
  const RouterDims dims{.tokens = 1024, .experts = 16, .top_k = 2};
  const Tokens<float> tokens = random_tokens<float>(dims);
  const RouterLossSums<float> whole = tokens.sums();
  for (const std::int64_t chunks : {2, 4}) {
    const RouterLossSums<float> parts = tokens.sums(chunks);
    EXPECT_EQ(parts.counts, whole.counts);
    EXPECT_EQ(parts.tokens, whole.tokens);
    EXPECT_TRUE(same_bits(parts.probabilities, whole.probabilities)) << "256 tokens a block";
  }
}

TEST(RouterLosses, GradientAddsAndLeavesOutWhatTheSumsLeftOut) {
  const RouterDims dims{.tokens = 40, .experts = 9, .top_k = 2};
  const Tokens<float> tokens = random_tokens<float>(dims);
  const RouterLossSums<float> sums = tokens.sums();
  const std::vector<float> gradient = tokens.gradient(sums, both);
  const std::vector<float> added = tokens.gradient(sums, both, 8.0F);
  for (std::int64_t t = 0; t < dims.tokens; ++t) {
    const bool taken = t > 0 && tokens.ids[static_cast<std::size_t>(t * 2)] != unrouted;
    for (std::int64_t e = 0; e < 9; ++e) {
      const float value = added[static_cast<std::size_t>(t * 9 + e)];
      EXPECT_TRUE(std::isfinite(value));
      EXPECT_EQ(value == 8.0F, !taken) << t;
      EXPECT_NEAR(value, 8.0F + gradient[static_cast<std::size_t>(t * 9 + e)], 2e-6);
    }
  }
}

TEST(RouterLosses, BitsDependOnNeitherThreadsNorPath) {
  const RouterDims dims{.tokens = 700, .experts = 43, .top_k = 3};
  const Tokens<float> tokens = random_tokens<float>(dims);
  const RouterLossSums<float> sums = tokens.sums();
  const std::vector<float> gradient = tokens.gradient(sums, both);
  const auto check = [&](const std::string& what) {
    const RouterLossSums<float> other = tokens.sums();
    EXPECT_TRUE(same_bits(other.probabilities, sums.probabilities)) << what;
    EXPECT_EQ(other.squared_logsumexp, sums.squared_logsumexp) << what;
    EXPECT_TRUE(same_bits(tokens.gradient(other, both), gradient)) << what;
  };
  for (const int threads : {1, 2, 8}) {
    heddle::test::with_threads(threads, [&] { check(std::to_string(threads)); });
  }
  for (const Path path : available_paths()) {
    const ScopedPath scoped(path);
    check(std::string(path_name(path)));
  }
}

TEST(RouterLosses, NoTokens) {
  const Tokens<float> none{{.tokens = 0, .experts = 4, .top_k = 2}, {}, {}};
  const RouterLossSums<float> sums = none.sums();
  EXPECT_EQ(sums.counts, std::vector<std::int64_t>(4, 0));
  EXPECT_EQ(balance_loss(none.dims, sums, both.balance), 0.0F);
  EXPECT_EQ(z_loss(sums, both.z), 0.0F);
  EXPECT_TRUE(none.gradient(sums, both).empty());
}

TEST(RouterLosses, RefuseWrongArguments) {
  const RouterDims dims{.tokens = 4, .experts = 3, .top_k = 2};
  const Tokens<float> tokens = random_tokens<float>(dims);
  const auto refusal = [](auto call) { return heddle::test::thrown_text<Error>(call); };
  RouterLossSums<float> sums;
  sums.counts.assign(4, 0);
  sums.probabilities.assign(4, 0.0F);
  Workspace workspace;
  EXPECT_EQ(refusal([&] {
              add_router_loss_sums<float>(dims, tokens.logit_view(0, 4), tokens.id_view(0, 4), sums,
                                          workspace);
            }),
            "moe::add_router_loss_sums: sums.counts.size = 4: must equal dims.experts (3)");
  EXPECT_EQ(refusal([&] { static_cast<void>(tokens.gradient(sums, both)); }),
            "moe::router_loss_backward: sums.counts.size = 4: must equal dims.experts (3)");
  RouterLossOptions options;
  options.z.weight = std::numeric_limits<double>::infinity();
  EXPECT_EQ(refusal([&] { static_cast<void>(tokens.gradient(tokens.sums(), options)); }),
            "moe::router_loss_backward: options.weight = inf: must be finite");
}

}  // namespace
}  // namespace heddle::moe

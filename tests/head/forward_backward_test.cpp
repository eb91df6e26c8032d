// Mutants, each of which must fail a test here: the loss asked of the wrong row, or of inactive rows; rows
// without a cotangent multiplied; rows of the chunk taken for rows of the call; the chunk's last row
// dropped; residuals of the chunk before; d_weight of a second chunk overwriting the first; x tempered
// twice; the budget ignored; a mode ignored; the loss' cotangent of the entropy dropped.
#include "heddle/head/forward_backward.hpp"

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "head/problem.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

namespace {

namespace head = heddle::head;
using namespace heddle::test;
using head::LogitsDtype;
using head::Mode;
using heddle::bfloat16;
using heddle::Workspace;

template <class A>
struct Share {
  double loss;
  A d_logp;
  A d_entropy;
};

/// A loss that bends both scores: every row's cotangents depend on what the row scored.
template <class A>
struct Bent {
  const std::vector<A>& a;
  const std::vector<A>& b;  ///< empty: the entropy is not in the loss
  std::vector<std::int64_t>* asked = nullptr;

  [[nodiscard]] Share<A> operator()(std::int64_t row, A logp, A entropy) const {
    if (asked != nullptr) {
      asked->push_back(row);
    }
    const auto t = static_cast<std::size_t>(row);
    const A h = b.empty() ? A(0) : b[t];
    return {static_cast<double>(a[t] * logp * logp + h * entropy * entropy), A(2) * a[t] * logp,
            A(2) * h * entropy};
  }
};

template <class A>
struct Outcome {
  Results<A> results;
  std::vector<double> losses;
};

template <class A, class P>
Outcome<A> fused_call(const P& problem) {
  Outcome<A> out;
  const std::vector<A> poisoned(problem.ids.size(), A(-77));
  out.results = {poisoned, poisoned, poisoned, poisoned, poisoned, {}, {}};
  out.results.d_hidden.assign(problem.hidden.size(), A(nan_value));
  out.results.d_weight.assign(problem.weight.size(), A(nan_value));
  out.losses.assign(problem.ids.size(), -77);
  Workspace workspace;
  Results<A>& r = out.results;
  head::forward_backward(
      problem.dims, problem.inputs(), problem.options, Bent<A>{problem.d_logps, problem.d_entropy},
      head::LossOutputs<A>{.scores = {r.logps, r.entropy, r.max, r.exp_sum, r.mean},
                           .losses = out.losses},
      head::Cotangents<A>{
          .d_hidden = {r.d_hidden.data(), problem.dims.tokens, problem.dims.hidden},
          .d_weight = {{r.d_weight.data(), problem.weight_rows(), problem.weight_cols()}}},
      workspace);
  return out;
}

/// forward, the loss, backward.
template <class A, class P>
Outcome<A> separate_calls(const P& problem) {
  current_tier = Tier::chunked;
  Outcome<A> out;
  auto with_cotangents = problem;
  const auto scores = problem.forward();
  const Bent<A> loss{problem.d_logps, problem.d_entropy};
  with_cotangents.d_entropy.resize(problem.ids.size());
  for (std::size_t t = 0; t < problem.ids.size(); ++t) {
    const bool active = problem.active.empty() || problem.active[t] != 0;
    const auto share = loss(static_cast<std::int64_t>(t), scores.logps[t], scores.entropy[t]);
    out.losses.push_back(active ? share.loss : 0.0);
    with_cotangents.d_logps[t] = share.d_logp;
    with_cotangents.d_entropy[t] = share.d_entropy;
  }
  out.results = with_cotangents.backward();
  return out;
}

template <class A>
void expect_same(const Outcome<A>& a, const Outcome<A>& b) {
  EXPECT_TRUE(same_bits(a.results.logps, b.results.logps));
  EXPECT_TRUE(same_bits(a.results.entropy, b.results.entropy));
  EXPECT_TRUE(same_bits(a.results.max, b.results.max));
  EXPECT_TRUE(same_bits(a.results.exp_sum, b.results.exp_sum));
  EXPECT_TRUE(same_bits(a.results.mean, b.results.mean));
  EXPECT_TRUE(same_bits(a.losses, b.losses));
  EXPECT_TRUE(same_bits(a.results.d_hidden, b.results.d_hidden));
  EXPECT_TRUE(same_bits(a.results.d_weight, b.results.d_weight));
}

TEST(ForwardBackward, HasTheBitsOfForwardLossAndBackward) {
  const auto check = [](auto problem) {
    using A = typename decltype(problem)::A;
    problem.options.vocab_tile = 70;
    problem.active.assign(problem.ids.size(), 1);
    for (const std::size_t t : {0U, 9U, 40U}) {
      problem.active[t] = 0;
    }
    for (const std::size_t t : {3U, 20U}) {  // scored, but drawing nothing
      problem.d_logps[t] = A(0);
      problem.d_entropy[t] = A(0);
    }
    for (const LogitsDtype dtype : {LogitsDtype::accumulator, LogitsDtype::bf16}) {
      for (const double temperature : {1.0, 0.7}) {
        for (const std::int64_t shards : {1, 3}) {
          problem.options.logits_dtype = dtype;
          problem.options.temperature = temperature;
          problem.options.vocab_shards = shards;
          for (const std::int64_t chunk : {16, 100}) {
            problem.options.chunk = chunk;
            expect_same(fused_call<A>(problem), separate_calls<A>(problem));
          }
        }
      }
    }
  };
  const head::Dims dims{.tokens = 41, .hidden = 12, .vocab = 700};
  check(random_problem<float>(dims, 1, 0.5));
  check(random_problem<bfloat16>(dims, 2, 0.5).transposed());
  check(random_problem<double>(dims, 3, 0.5));
}

TEST(ForwardBackward, GradientsAreTheDerivativesOfTheLoss) {
  auto problem = random_problem<double>({.tokens = 20, .hidden = 3, .vocab = 11}, 4);
  problem.options.temperature = 0.7;
  problem.options.chunk = 7;
  const auto loss = [&] {
    double sum = 0;
    for (const double share : fused_call<double>(problem).losses) {
      sum += share;
    }
    return sum;
  };
  const auto result = fused_call<double>(problem).results;
  EXPECT_TRUE(close(result.d_hidden, central_differences(problem.hidden, loss), 1e-8));
  EXPECT_TRUE(close(result.d_weight, central_differences(problem.weight, loss), 1e-8));
}

TEST(ForwardBackward, AsksForActiveRowsOnceAndInOrder) {
  auto problem = random_problem<float>({.tokens = 50, .hidden = 3, .vocab = 30}, 5);
  problem.active.assign(50, 1);
  problem.active[0] = problem.active[17] = problem.active[49] = 0;
  problem.options.chunk = 8;
  std::vector<std::int64_t> asked;
  std::vector<float> logps(50);
  Workspace workspace;
  head::forward_backward(problem.dims, problem.inputs(), problem.options,
                         Bent<float>{problem.d_logps, problem.d_entropy, &asked},
                         head::LossOutputs<float>{.scores = {.logps = logps}},
                         head::Cotangents<float>{}, workspace);
  std::vector<std::int64_t> expected;
  for (std::int64_t t = 0; t < 50; ++t) {
    if (problem.active[static_cast<std::size_t>(t)] != 0) {
      expected.push_back(t);
    }
  }
  EXPECT_EQ(asked, expected);
}

// Rows that are inactive, or that the loss has no use for, may hold anything.
TEST(ForwardBackward, RowsWithoutACotangentAreNotMultiplied) {
  auto clean = random_problem<float>({.tokens = 20, .hidden = 4, .vocab = 50}, 6);
  clean.active.assign(20, 1);
  clean.active[2] = 0;
  clean.d_logps[5] = clean.d_entropy[5] = 0;
  std::fill_n(clean.hidden.begin() + 8, 4, 0.0F);
  auto wild = clean;
  std::fill_n(wild.hidden.begin() + 8, 4, static_cast<float>(nan_value));
  const auto a = fused_call<float>(clean);
  expect_same(a, fused_call<float>(wild));
  for (std::size_t d = 0; d < 4; ++d) {
    EXPECT_EQ(a.results.d_hidden[8 + d], 0.0F);
    EXPECT_EQ(a.results.d_hidden[20 + d], 0.0F);
  }
  clean.active.assign(20, 0);
  const auto nothing = fused_call<float>(clean);
  EXPECT_EQ(nothing.results.d_weight, std::vector<float>(200, 0.0F));
  EXPECT_EQ(nothing.losses, std::vector<double>(20, 0.0));
}

TEST(ForwardBackward, ThreadsDoNotTouchABit) {
  auto problem = random_problem<bfloat16>({.tokens = 70, .hidden = 40, .vocab = 1100}, 7, 0.3);
  problem.options.logits_dtype = LogitsDtype::bf16;
  Outcome<float> one;
  with_threads(1, [&] { one = fused_call<float>(problem); });
  for (const int threads : {2, 8}) {
    with_threads(threads, [&] { expect_same(fused_call<float>(problem), one); });
  }
  // Nor do they decide how many rows a tight budget keeps.
  problem.options.scratch_bytes = std::int64_t{7} << 18;
  problem.options.chunk = 1024;
  with_threads(1, [&] { one = fused_call<float>(problem); });
  with_threads(8, [&] { expect_same(fused_call<float>(problem), one); });
}

// The budget decides how many rows are kept, from all of a chunk down to none: then the logits are
// computed twice and nothing else changes.
TEST(ForwardBackward, KeepsTheRowsThatTheBudgetAllows) {
  auto problem = random_problem<float>({.tokens = 300, .hidden = 6, .vocab = 2000}, 8, 0.3);
  const auto rows = [&] {
    return head::forward_backward_rows<float>(problem.dims, problem.layout, problem.options);
  };
  problem.options.chunk = 1024;
  EXPECT_EQ(rows(), 300);
  const auto all = fused_call<float>(problem);
  for (const std::int64_t mib : {4, 3, 0}) {
    problem.options.scratch_bytes = mib << 20;
    const std::int64_t kept = rows();
    EXPECT_LT(kept, 300);
    EXPECT_EQ(kept > 0, mib > 0) << kept;
    EXPECT_EQ(kept % 8, 0);
    const auto some = fused_call<float>(problem);
    EXPECT_TRUE(same_bits(some.results.logps, all.results.logps));
    EXPECT_TRUE(same_bits(some.results.d_hidden, all.results.d_hidden));
    EXPECT_TRUE(same_bits(some.losses, all.losses));
    EXPECT_TRUE(close(some.results.d_weight, all.results.d_weight, 1e-6));
    auto chunked = problem;
    chunked.options.chunk = kept > 0 ? kept : 1024;
    SCOPED_TRACE(kept);
    expect_same(some, separate_calls<float>(chunked));
  }
}

TEST(ForwardBackward, WorkspaceIsWhatItsFormulaSays) {
  const auto check = [](auto problem, Mode mode, std::int64_t bytes) {
    using S = typename decltype(problem.hidden)::value_type;
    problem.options.mode = mode;
    problem.options.chunk = 1024;
    problem.options.vocab_tile = 512;
    problem.options.scratch_bytes = bytes;
    std::vector<float> logps(problem.ids.size());
    std::vector<float> d_hidden(problem.hidden.size());
    std::vector<float> d_weight(problem.weight.size());
    with_threads(1, [&] {
      Workspace workspace;
      head::forward_backward(
          problem.dims, problem.inputs(), problem.options, Bent<float>{problem.d_logps, {}},
          head::LossOutputs<float>{.scores = {.logps = logps}},
          head::Cotangents<float>{
              .d_hidden = {d_hidden.data(), problem.dims.tokens, problem.dims.hidden},
              .d_weight = {{d_weight.data(), problem.weight_rows(), problem.weight_cols()}}},
          workspace);
      EXPECT_EQ(workspace.high_water_bytes(), head::forward_backward_workspace_bytes<S>(
                                                  problem.dims, problem.layout, problem.options));
      if (mode == Mode::fused && bytes > 0) {
        EXPECT_LE(workspace.high_water_bytes(), static_cast<std::size_t>(bytes));
      }
    });
  };
  const head::Dims dims{.tokens = 200, .hidden = 24, .vocab = 3000};
  for (const std::int64_t bytes : {std::int64_t{160} << 20, std::int64_t{4} << 20}) {
    check(random_problem<float>(dims, 9, 0.1), Mode::fused, bytes);
    auto narrow = random_problem<bfloat16>(dims, 10, 0.1).transposed();
    narrow.options.logits_dtype = LogitsDtype::bf16;
    check(narrow, Mode::fused, bytes);
  }
  check(random_problem<float>(dims, 11, 0.1), Mode::fused, 0);
}

TEST(ForwardBackward, StaysInsideItsBudgetAtFullSize) {
  const head::Dims device{.tokens = 16384, .hidden = 4096, .vocab = 248320};
  head::ScoringOptions options;
  for (const auto layout : {head::WeightLayout::dv, head::WeightLayout::vd}) {
    options.logits_dtype = LogitsDtype::accumulator;
    EXPECT_GE(head::forward_backward_rows<float>(device, layout, options), head::least_loss_rows);
    EXPECT_LE(head::forward_backward_workspace_bytes<float>(device, layout, options),
              std::size_t{160} << 20);
    options.logits_dtype = LogitsDtype::bf16;
    EXPECT_GE(head::forward_backward_rows<bfloat16>(device, layout, options), 200);
    EXPECT_LE(head::forward_backward_workspace_bytes<bfloat16>(device, layout, options),
              std::size_t{160} << 20);
  }
}

TEST(ForwardBackward, OtherModesGoTheLongWay) {
  auto problem = random_problem<float>({.tokens = 30, .hidden = 4, .vocab = 60}, 12);
  const auto fused = fused_call<float>(problem);
  for (const Mode mode : {Mode::local, Mode::unsharded}) {
    problem.options.mode = mode;
    EXPECT_EQ(head::forward_backward_rows<float>(problem.dims, problem.layout, problem.options), 0);
    const auto other = fused_call<float>(problem);
    expect_same(other, separate_calls<float>(problem));
    EXPECT_FALSE(same_bits(other.results.d_weight, fused.results.d_weight));
    EXPECT_TRUE(close(other.results.d_weight, fused.results.d_weight, 2e-6));
  }
}

// Two exponentials a logit, and each logit once: 6 T D V flops.
TEST(ForwardBackward, CountsAreTheModels) {
  const auto narrow = random_problem<double>({.tokens = 10, .hidden = 3, .vocab = 23}, 13);
  Problem<Counted> problem;
  problem.dims = narrow.dims;
  problem.hidden = converted<Counted>(narrow.hidden);
  problem.weight = converted<Counted>(narrow.weight);
  problem.ids = narrow.ids;
  problem.active.assign(10, 1);
  problem.active[4] = 0;
  problem.d_logps.assign(10, 0.5);
  problem.d_logps[7] = 0;
  problem.options.vocab_tile = 23;  // one tile: no maximum rises
  problem.options.chunk = 4;
  Counted::reset();
  static_cast<void>(fused_call<Counted>(problem));
  EXPECT_EQ(Counted::exps, 9 * 23 + 8 * 23);
  EXPECT_EQ(Counted::logs, 9);
  EXPECT_EQ(Counted::divisions, 9 + 8);
  const std::int64_t of_the_loss = 9 * 8;  // Bent's own products
  EXPECT_EQ(Counted::products, 9 * 23 * (3 + 1) + 8 * 23 * (2 * 3 + 1) + of_the_loss);
}

TEST(ForwardBackward, RefusesWhatForwardAndBackwardRefuse) {
  auto problem = random_problem<float>({.tokens = 4, .hidden = 2, .vocab = 5}, 14);
  std::vector<float> logps(4);
  std::vector<double> losses(3);
  std::vector<float> d_hidden(8);
  Workspace workspace;
  const auto refusal = [&](std::span<double> losses_given, heddle::MatrixView<float> d_view) {
    return thrown_text<heddle::Error>([&] {
      head::forward_backward(
          problem.dims, problem.inputs(), problem.options,
          Bent<float>{problem.d_logps, problem.d_entropy},
          head::LossOutputs<float>{.scores = {.logps = logps}, .losses = losses_given},
          head::Cotangents<float>{.d_hidden = d_view}, workspace);
    });
  };
  EXPECT_EQ(refusal(losses, {}),
            "head::forward_backward: outputs.losses.size = 3: must equal dims.tokens (4)");
  EXPECT_EQ(refusal({}, {d_hidden.data(), 2, 4}),
            "head::forward_backward: cotangents.d_hidden.rows = 2: must equal dims.tokens (4)");
  problem.ids[2] = 5;
  EXPECT_EQ(
      refusal({}, {}),
      "head::forward_backward: inputs.target_ids[2] = 5: must be in [0, dims.vocab (5)) on an "
      "active row");
  for (const float value : d_hidden) {
    EXPECT_EQ(value, 0.0F) << "nothing is written";
  }
}

}  // namespace

// What the chunked tier promises beyond the contract that tiers_test.cpp holds every tier to: counts,
// bits under any cut of the work, scratch, and the bars against log-softmax.
//
// Mutants of it, each of which must fail a test here or in tiers_test.cpp, by their numbers in
// spec/head.md 10: a token's cotangent taken from the chunk's first row [3], logits computed once more
// for each product [8], the mode ignored [12, 13], columns beyond the vocabulary counted [16], rounding
// before the one-hot [20], inactive rows multiplied [22], entropy of untempered logits
// [27]; besides: a tile's maximum used for the
// running one, chunks that overwrite d_weight, a block of K that begins at the chunk's tile instead of
// the rank's column, the last short chunk dropped, float sums over whole rows, a path's own order of
// sums, scratch that grows with tokens times vocabulary.
#include "heddle/head/chunked_head.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "head/problem.hpp"
#include "heddle/core/isa.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

namespace {

namespace head = heddle::head;
using namespace heddle::test;
using head::LogitsDtype;
using head::Mode;
using heddle::bfloat16;
using heddle::Workspace;

class ChunkedHead : public ::testing::Test {
 protected:
  void SetUp() override { current_tier = Tier::chunked; }
};

template <class A>
void expect_same_rows(const Results<A>& a, const Results<A>& b) {
  EXPECT_TRUE(same_bits(a.logps, b.logps));
  EXPECT_TRUE(same_bits(a.entropy, b.entropy));
  EXPECT_TRUE(same_bits(a.max, b.max));
  EXPECT_TRUE(same_bits(a.exp_sum, b.exp_sum));
  EXPECT_TRUE(same_bits(a.mean, b.mean));
  EXPECT_TRUE(same_bits(a.d_hidden, b.d_hidden));
}

// Counts.

/// A problem of 11 tokens, 9 active, 7 of them with a cotangent, whose maximum rises now and then.
Problem<Counted> counted_problem(bool entropy) {
  const auto problem = random_problem<double>({.tokens = 11, .hidden = 3, .vocab = 23}, 28, 2.0);
  Problem<Counted> counted;
  counted.dims = problem.dims;
  counted.hidden = converted<Counted>(problem.hidden);
  counted.weight = converted<Counted>(problem.weight);
  counted.ids = problem.ids;
  counted.active.assign(11, 1);
  counted.active[0] = counted.active[7] = 0;
  counted.d_logps.assign(11, 0.5);
  counted.d_entropy.assign(entropy ? 11 : 0, 0.25);
  for (const std::size_t t : {3U, 10U}) {
    counted.d_logps[t] = 0;
    if (entropy) {
      counted.d_entropy[t] = 0;
    }
  }
  counted.options.vocab_tile = 5;
  counted.options.chunk = 4;
  return counted;
}

/// Tiles after a row's first whose maximum is above all before, over active rows.
std::int64_t count_rises(const Problem<Counted>& problem) {
  std::int64_t rises = 0;
  for (std::int64_t t = 0; t < problem.dims.tokens; ++t) {
    double running = -inf;
    for (std::int64_t k = 0; k < problem.dims.vocab; k += problem.options.vocab_tile) {
      double largest = -inf;
      for (std::int64_t c = k; c < std::min(k + problem.options.vocab_tile, problem.dims.vocab);
           ++c) {
        double z = 0;
        for (std::int64_t d = 0; d < problem.dims.hidden; ++d) {
          const auto at = static_cast<std::size_t>(t * problem.dims.hidden + d);
          z += problem.hidden[at].value * problem.weight_at(d, c);
        }
        largest = std::max(largest, z);
      }
      rises +=
          problem.active[static_cast<std::size_t>(t)] != 0 && k > 0 && largest > running ? 1 : 0;
      running = std::max(running, largest);
    }
  }
  return rises;
}

struct Counts {
  std::int64_t exps = 0, logs = 0, products = 0, divisions = 0;
  friend bool operator==(const Counts&, const Counts&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Counts& c) {
    return out << c.exps << " exps, " << c.logs << " logs, " << c.products << " products, "
               << c.divisions << " divisions";
  }
};

template <class Action>
Counts counts_of(const Action& action) {
  Counted::reset();
  action();
  return {Counted::exps, Counted::logs, Counted::products, Counted::divisions};
}

TEST_F(ChunkedHead, FusedCountsAreTheModels) {
  constexpr std::int64_t active = 9;
  constexpr std::int64_t drawing = 7;
  constexpr std::int64_t vocab = 23;
  constexpr std::int64_t hidden = 3;
  for (const bool entropy : {false, true}) {
    for (const bool tempered : {false, true}) {
      auto problem = counted_problem(entropy);
      problem.options.temperature = tempered ? 0.5 : 1.0;
      const std::int64_t rises = count_rises(problem);
      ASSERT_GT(rises, 0);
      Results<Counted> scores;
      // A logit is hidden products, its e u one; a rise rescales both sums.
      EXPECT_EQ(counts_of([&] { scores = problem.forward(); }),
                (Counts{.exps = active * vocab + rises,
                        .logs = active,
                        .products = active * vocab * (hidden + 1) + 3 * rises,
                        .divisions = active + (tempered ? active * vocab : 0)}));
      std::vector<Counted> d_hidden(problem.hidden.size());
      std::vector<Counted> d_weight(problem.weight.size());
      // Three products, logits once among them; e kappa, or e (kappa + lambda u).
      EXPECT_EQ(
          counts_of([&] {
            run_backward(problem.dims, problem.inputs(), problem.options,
                         head::Residuals<Counted>{scores.max, scores.exp_sum, scores.mean},
                         head::OutputCotangents<Counted>{problem.d_logps, problem.d_entropy},
                         head::Cotangents<Counted>{.d_hidden = {d_hidden.data(), 11, hidden},
                                                   .d_weight = {{d_weight.data(), hidden, vocab}}});
          }),
          (Counts{
              .exps = drawing * vocab,
              .logs = 0,
              .products = drawing * vocab * (3 * hidden + (entropy ? 2 : 1)),
              .divisions = drawing * (entropy ? 2 : 1) + (tempered ? 2 * drawing * vocab : 0)}));
    }
  }
}

TEST_F(ChunkedHead, LocalTakesFiveExponentialsALogit) {
  for (const Mode mode : {Mode::local, Mode::unsharded}) {
    auto problem = counted_problem(false);
    problem.options.mode = mode;
    problem.options.vocab_shards = 3;
    Results<Counted> scores;
    const Counts forward = counts_of([&] { scores = problem.forward(); });
    EXPECT_EQ(forward.exps, 3 * 9 * 23);
    EXPECT_LE(forward.logs, 3 * 9);
    const Counts both = counts_of([&] { scores = problem.backward(); });
    EXPECT_EQ(both.exps - forward.exps, 2 * 7 * 23);
    problem = counted_problem(true);
    problem.options.mode = mode;
    const Counts with_entropy = counts_of([&] { scores = problem.backward(); });
    EXPECT_EQ(with_entropy.exps - forward.exps, 4 * 7 * 23 + 7);
  }
}

TEST_F(ChunkedHead, CostIsWhatIsCounted) {
  auto problem = counted_problem(false);
  problem.active.clear();
  problem.d_logps.assign(11, 0.5);
  Results<Counted> scores;
  const Counts forward = counts_of([&] { scores = problem.forward(); });
  const heddle::Cost cost = head::forward_cost<float>(problem.dims, problem.options);
  EXPECT_EQ(cost.transcendentals + count_rises([&] {
              auto all = problem;
              all.active.assign(11, 1);
              return all;
            }()),
            forward.exps + forward.logs);
  EXPECT_EQ(cost.flops, 2 * 11 * 3 * 23);
  EXPECT_EQ(head::backward_cost<float>(problem.dims, problem.options).flops, 3 * cost.flops);
  // Three chunks read the weight three times.
  EXPECT_EQ(cost.bytes_read, 4 * (3 * 3 * 23 + 11 * 3));
}

// Cuts.

TEST_F(ChunkedHead, RowsHaveTheSameBitsInAnyChunk) {
  for (const bool transpose : {false, true}) {
    for (const LogitsDtype dtype : {LogitsDtype::accumulator, LogitsDtype::bf16}) {
      auto problem = random_problem<float>({.tokens = 41, .hidden = 19, .vocab = 700}, 1);
      problem = transpose ? problem.transposed() : problem;
      problem.options.logits_dtype = dtype;
      problem.options.temperature = 0.7;
      problem.options.vocab_shards = 2;
      problem.active.assign(41, 1);
      problem.active[5] = problem.active[40] = 0;
      problem.d_logps[9] = problem.d_entropy[9] = 0;
      problem.options.chunk = 41;
      const auto whole = problem.backward();
      for (const std::int64_t chunk : {1, 3, 16, 40, 82}) {
        problem.options.chunk = chunk;
        const auto cut = problem.backward();
        expect_same_rows(cut, whole);
        EXPECT_TRUE(close(cut.d_weight, whole.d_weight, 1e-6));
      }
    }
  }
}

TEST_F(ChunkedHead, Bf16StorageHasTheSameBitsInAnyChunkAndLayout) {
  auto problem = random_problem<bfloat16>({.tokens = 37, .hidden = 21, .vocab = 600}, 2, 0.3);
  problem.options.logits_dtype = LogitsDtype::bf16;
  problem.options.chunk = 37;
  const auto whole = problem.backward();
  for (const std::int64_t chunk : {1, 5, 36}) {
    problem.options.chunk = chunk;
    expect_same_rows(problem.backward(), whole);
    expect_same_rows(problem.transposed().backward(), whole);
  }
}

/// Units in the last place between two scores, of the larger or of `scale`, if that is larger still.
double ulps(float a, float b, float scale) {
  scale = std::max({std::abs(a), std::abs(b), std::abs(scale)});
  const auto next = static_cast<double>(std::nextafter(std::abs(scale), 3e38F));
  return std::abs(static_cast<double>(a) - static_cast<double>(b)) /
         (next - std::abs(static_cast<double>(scale)));
}

TEST_F(ChunkedHead, TilesOfAnySizeAgreeWithinTheBar) {
  double worst_logp = 0;
  double worst_entropy = 0;
  for (const double spread : {0.3, 1.0, 3.0}) {
    auto problem = random_problem<float>({.tokens = 24, .hidden = 8, .vocab = 5003}, 3, spread);
    problem.options.vocab_tile = 512;
    const auto one = problem.forward();
    for (const std::int64_t tile : {1, 7, 128, 1000, 1024, 5003}) {
      problem.options.vocab_tile = tile;
      const auto other = problem.forward();
      for (std::size_t t = 0; t < one.logps.size(); ++t) {
        const float log_sum = one.max[t] + std::log(one.exp_sum[t]);
        worst_logp = std::max(worst_logp, ulps(one.logps[t], other.logps[t], log_sum));
        worst_entropy = std::max(
            worst_entropy, ulps(one.entropy[t], other.entropy[t], std::max(one.entropy[t], 1.0F)));
      }
    }
  }
  EXPECT_LE(worst_logp, 1.0);
  EXPECT_LE(worst_entropy, 7.0);
  RecordProperty("worst_logp", std::to_string(worst_logp));
  RecordProperty("worst_entropy", std::to_string(worst_entropy));
}

TEST_F(ChunkedHead, ThreadsDoNotTouchABit) {
  const auto check = [](auto problem, Mode mode) {
    problem.options.mode = mode;
    problem.options.vocab_shards = 2;
    problem.options.chunk = 50;
    auto one = problem.forward();
    with_threads(1, [&] { one = problem.backward(); });
    for (const int threads : {2, 3, 8}) {
      with_threads(threads, [&] {
        const auto many = problem.backward();
        expect_same_rows(many, one);
        EXPECT_TRUE(same_bits(many.d_weight, one.d_weight)) << threads;
      });
    }
  };
  const head::Dims dims{.tokens = 77, .hidden = 40, .vocab = 1100};
  check(random_problem<float>(dims, 4, 0.3), Mode::fused);
  check(random_problem<float>(dims, 5, 0.3).transposed(), Mode::local);
  auto problem = random_problem<bfloat16>(dims, 6, 0.3);
  problem.options.logits_dtype = LogitsDtype::bf16;
  check(problem, Mode::fused);
}

TEST_F(ChunkedHead, PathsHaveTheSameBits) {
  for (const Mode mode : modes) {
    for (const LogitsDtype dtype : {LogitsDtype::accumulator, LogitsDtype::bf16}) {
      auto problem = random_problem<float>({.tokens = 9, .hidden = 5, .vocab = 613}, 7, 2.0);
      problem.options.mode = mode;
      problem.options.logits_dtype = dtype;
      problem.options.temperature = 0.7;
      problem.options.vocab_tile = 129;
      const auto best = problem.backward();
      for (const heddle::Path path : heddle::available_paths()) {
        const heddle::ScopedPath forced(path);
        const auto other = problem.backward();
        expect_same_rows(other, best);
        EXPECT_TRUE(same_bits(other.d_weight, best.d_weight)) << heddle::path_name(path);
      }
    }
  }
}

// Ranks that each hold tokens in the order of a dual chunk swap: rows are what they were, and weight
// cotangents folded in rank order are the same every time.
TEST_F(ChunkedHead, TokenShardsOfAnyOrderHaveTheBitsOfTheWhole) {
  auto problem = random_problem<float>({.tokens = 64, .hidden = 7, .vocab = 300}, 8);
  problem.active.assign(64, 1);
  problem.active[63] = problem.active[20] = 0;
  const auto whole = problem.backward();
  for (const std::int64_t ranks : {1, 2, 4, 8}) {
    std::vector<float> folded(whole.d_weight.size(), 0.0F);
    const std::int64_t piece = 64 / (2 * ranks);
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      auto own = problem;
      own.dims.tokens = 2 * piece;
      own.hidden.clear();
      own.ids.clear();
      own.active.clear();
      own.d_logps.clear();
      own.d_entropy.clear();
      std::vector<std::int64_t> tokens;
      for (const std::int64_t chunk : {rank, 2 * ranks - 1 - rank}) {
        for (std::int64_t t = chunk * piece; t < (chunk + 1) * piece; ++t) {
          tokens.push_back(t);
          const auto at = static_cast<std::size_t>(t);
          own.hidden.insert(own.hidden.end(), problem.hidden.begin() + t * 7,
                            problem.hidden.begin() + (t + 1) * 7);
          own.ids.push_back(problem.ids[at]);
          own.active.push_back(problem.active[at]);
          own.d_logps.push_back(problem.d_logps[at]);
          own.d_entropy.push_back(problem.d_entropy[at]);
        }
      }
      const auto part = own.backward();
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        const auto at = static_cast<std::size_t>(tokens[i]);
        EXPECT_EQ(part.logps[i], whole.logps[at]);
        EXPECT_EQ(part.entropy[i], whole.entropy[at]);
        for (std::size_t d = 0; d < 7; ++d) {
          EXPECT_EQ(part.d_hidden[7 * i + d], whole.d_hidden[7 * at + d]);
        }
      }
      for (std::size_t i = 0; i < folded.size(); ++i) {
        folded[i] += part.d_weight[i];
      }
    }
    EXPECT_TRUE(close(folded, whole.d_weight, 1e-6)) << ranks;
  }
}

// Bars against log-softmax.

TEST_F(ChunkedHead, FusedAndLocalAgreeWithinTheBars) {
  double worst_logp = 0;
  double worst_entropy = 0;
  std::int64_t beyond_one = 0;
  std::int64_t compared = 0;
  std::uint64_t seed = 12;
  // Logits of deviation up to 2: an entropy far below 1 has more digits than log-softmax gives it.
  for (const double spread : {0.05, 0.2, 0.4}) {
    for (const double temperature : {1.0, 0.7}) {
      auto problem =
          random_problem<float>({.tokens = 30, .hidden = 16, .vocab = 4001}, seed++, spread);
      problem.options.vocab_tile = 512;
      problem.options.temperature = temperature;
      const std::vector<float> d_entropy = problem.d_entropy;
      for (const bool entropy : {false, true}) {
        problem.d_entropy = entropy ? d_entropy : std::vector<float>();
        problem.options.mode = Mode::fused;
        const auto fused = problem.backward();
        problem.options.mode = Mode::local;
        const auto local = problem.backward();
        for (std::size_t t = 0; t < fused.logps.size(); ++t) {
          const float log_sum = fused.max[t] + std::log(fused.exp_sum[t]);
          const double apart = ulps(fused.logps[t], local.logps[t], log_sum);
          worst_logp = std::max(worst_logp, apart);
          beyond_one += apart > 1 ? 1 : 0;
          ++compared;
          worst_entropy =
              std::max(worst_entropy, ulps(fused.entropy[t], local.entropy[t], fused.entropy[t]));
        }
        const double bar = entropy ? 2e-6 : 2e-7;
        EXPECT_TRUE(close(fused.d_weight, local.d_weight, bar));
        EXPECT_TRUE(close(fused.d_hidden, local.d_hidden, bar));
      }
    }
  }
  // Log-sums an ulp apart give log-probs an ulp apart, or two where the subtraction ties both ways.
  EXPECT_LE(worst_logp, 2.0);
  EXPECT_LE(100 * beyond_one, compared);
  EXPECT_LE(worst_entropy, 7.0);
  RecordProperty("worst_logp", std::to_string(worst_logp));
  RecordProperty("worst_entropy", std::to_string(worst_entropy));
}

// The cotangents of the logits themselves, before the products round: they differ by the exp-sum's last
// bit, where a probability is large.
TEST_F(ChunkedHead, FusedAndLocalCotangentsOfLogitsAgreeWithinTheBar) {
  Random random(19);
  for (const double deviation : {0.5, 1.0, 2.0}) {
    for (int round = 0; round < 40; ++round) {
      std::vector<double> x(3001);
      std::ranges::generate(x, [&] { return random.normal(deviation); });
      auto problem = row_problem<float>(x, static_cast<std::int32_t>(random.integer(0, 3000)));
      const auto fused = problem.backward();
      problem.options.mode = Mode::local;
      EXPECT_TRUE(close(fused.d_weight, problem.backward().d_weight, 2.6e-8));
      problem.d_entropy = {0.5F};
      const auto local = problem.backward();
      problem.options.mode = Mode::fused;
      EXPECT_TRUE(close(problem.backward().d_weight, local.d_weight, 2e-6));
    }
  }
}

// Laws.

TEST_F(ChunkedHead, ColumnsMayBePermuted) {
  auto problem = random_problem<float>({.tokens = 10, .hidden = 5, .vocab = 400}, 20);
  const auto plain = problem.backward();
  Random random(21);
  std::vector<std::int32_t> place(400);
  std::iota(place.begin(), place.end(), 0);
  for (std::size_t k = 399; k > 0; --k) {
    std::swap(place[k],
              place[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(k)))]);
  }
  auto moved = problem;
  for (std::size_t d = 0; d < 5; ++d) {
    for (std::size_t k = 0; k < 400; ++k) {
      moved.weight[d * 400 + static_cast<std::size_t>(place[k])] = problem.weight[d * 400 + k];
    }
  }
  for (std::int32_t& id : moved.ids) {
    id = place[static_cast<std::size_t>(id)];
  }
  const auto permuted = moved.backward();
  EXPECT_TRUE(close(permuted.logps, plain.logps, 2e-7));
  EXPECT_TRUE(close(permuted.entropy, plain.entropy, 5e-7));
  EXPECT_TRUE(close(permuted.d_hidden, plain.d_hidden, 1e-6));
  std::vector<float> back(plain.d_weight.size());
  for (std::size_t d = 0; d < 5; ++d) {
    for (std::size_t k = 0; k < 400; ++k) {
      back[d * 400 + k] = permuted.d_weight[d * 400 + static_cast<std::size_t>(place[k])];
    }
  }
  EXPECT_TRUE(close(back, plain.d_weight, 5e-7));
}

TEST_F(ChunkedHead, CotangentsAreLinear) {
  auto a = random_problem<double>({.tokens = 20, .hidden = 5, .vocab = 60}, 22);
  auto b = a;
  auto sum = a;
  Random random(23);
  for (std::size_t t = 0; t < 20; ++t) {
    b.d_logps[t] = random.normal();
    b.d_entropy[t] = random.normal();
    sum.d_logps[t] = a.d_logps[t] + 2 * b.d_logps[t];
    sum.d_entropy[t] = a.d_entropy[t] + 2 * b.d_entropy[t];
  }
  const auto of_a = a.backward();
  const auto of_b = b.backward();
  const auto of_sum = sum.backward();
  std::vector<double> d_weight;
  for (std::size_t i = 0; i < of_a.d_weight.size(); ++i) {
    d_weight.push_back(of_a.d_weight[i] + 2 * of_b.d_weight[i]);
  }
  EXPECT_TRUE(close(of_sum.d_weight, d_weight, 1e-12));
}

// Tokens whose cotangents change places change what they contribute, and nothing else: a cotangent
// taken from the chunk's first row would not tell.
TEST_F(ChunkedHead, EachTokenDrawsItsOwnCotangent) {
  auto problem = random_problem<float>({.tokens = 40, .hidden = 6, .vocab = 90}, 24);
  problem.d_entropy.clear();
  const auto plain = problem.backward();
  for (const auto& [a, b] : {std::pair{0U, 1U}, std::pair{3U, 33U}, std::pair{16U, 39U}}) {
    auto swapped = problem;
    std::swap(swapped.d_logps[a], swapped.d_logps[b]);
    const auto result = swapped.backward();
    for (std::size_t t = 0; t < 40; ++t) {
      // d_hidden is linear in a row's own cotangent.
      const double ratio =
          static_cast<double>(swapped.d_logps[t]) / static_cast<double>(problem.d_logps[t]);
      for (std::size_t d = 0; d < 6; ++d) {
        const auto expected = ratio * static_cast<double>(plain.d_hidden[6 * t + d]);
        EXPECT_NEAR(static_cast<double>(result.d_hidden[6 * t + d]), expected,
                    1e-5 * (1 + std::abs(expected)));
      }
    }
    EXPECT_FALSE(same_bits(result.d_weight, plain.d_weight));
  }
}

// Scratch.

template <class S>
void expect_high_water(const head::Dims& dims, LogitsDtype dtype, Mode mode, bool transpose,
                       bool gaps) {
  auto problem = random_problem<S>(dims, 30, 0.1);
  problem = transpose ? problem.transposed() : problem;
  problem.options = {.mode = mode, .logits_dtype = dtype};
  problem.d_entropy.clear();
  if (gaps) {
    problem.active.assign(problem.ids.size(), 1);
    problem.active[1] = 0;
  }
  Results<float> out = problem.forward();
  out.d_hidden.resize(problem.hidden.size());
  out.d_weight.resize(problem.weight.size());
  with_threads(1, [&] {
    Workspace forward;
    head::forward(problem.dims, problem.inputs(), problem.options,
                  head::Outputs<float>{.logps = out.logps}, forward);
    EXPECT_EQ(forward.high_water_bytes(),
              head::forward_workspace_bytes<S>(problem.dims, problem.options));
    Workspace backward;
    head::backward(
        problem.dims, problem.inputs(), problem.options,
        head::Residuals<float>{out.max, out.exp_sum, out.mean},
        head::OutputCotangents<float>{problem.d_logps},
        head::Cotangents<float>{
            .d_hidden = {out.d_hidden.data(), dims.tokens, dims.hidden},
            .d_weight = {{out.d_weight.data(), problem.weight_rows(), problem.weight_cols()}}},
        backward);
    EXPECT_EQ(backward.high_water_bytes(),
              head::backward_workspace_bytes<S>(problem.dims, problem.layout, problem.options));
  });
}

TEST_F(ChunkedHead, WorkspaceIsWhatItsFormulaSays) {
  for (const bool transpose : {false, true}) {
    for (const bool gaps : {false, true}) {
      for (const Mode mode : {Mode::fused, Mode::local}) {
        const head::Dims dims{.tokens = 70, .hidden = 40, .vocab = 1300};
        expect_high_water<float>(dims, LogitsDtype::accumulator, mode, transpose, gaps);
        expect_high_water<float>(dims, LogitsDtype::bf16, mode, transpose, gaps);
        expect_high_water<bfloat16>(dims, LogitsDtype::bf16, mode, transpose, gaps);
      }
    }
  }
}

TEST_F(ChunkedHead, WorkspaceHoldsOnManyThreads) {
  auto problem = random_problem<float>({.tokens = 90, .hidden = 30, .vocab = 1300}, 31, 0.1);
  for (const int threads : {2, 5}) {
    with_threads(threads, [&] {
      Workspace workspace;
      head::forward(problem.dims, problem.inputs(), problem.options,
                    head::Outputs<float>{.logps = std::span<float>(problem.d_logps)}, workspace);
      EXPECT_EQ(workspace.high_water_bytes(),
                head::forward_workspace_bytes<float>(problem.dims, problem.options, threads));
    });
  }
}

// A device's 16,384 tokens under a vocabulary of 248,320: 160 MiB where the logits would be 15 GiB.
// The run is of 1,024 tokens, a chunk: more of them take no more.
TEST_F(ChunkedHead, ScratchDoesNotGrowWithTokensTimesVocabulary) {
  constexpr std::size_t limit = std::size_t{160} << 20;
  const head::Dims device{.tokens = 16384, .hidden = 4096, .vocab = 248320};
  for (const auto layout : {head::WeightLayout::dv, head::WeightLayout::vd}) {
    for (const std::int64_t threads : {1, 2, 16}) {
      head::ScoringOptions options;
      EXPECT_LE(head::forward_workspace_bytes<float>(device, options, threads), limit);
      EXPECT_LE(head::backward_workspace_bytes<float>(device, layout, options, threads), limit);
      options.logits_dtype = LogitsDtype::bf16;
      EXPECT_LE(head::forward_workspace_bytes<bfloat16>(device, options, threads), limit);
      EXPECT_LE(head::backward_workspace_bytes<bfloat16>(device, layout, options, threads), limit);
    }
  }
  head::Dims chunk = device;
  chunk.tokens = 1024;
  const head::ScoringOptions options;
  EXPECT_EQ(head::backward_workspace_bytes<float>(device, head::WeightLayout::dv, options),
            head::backward_workspace_bytes<float>(chunk, head::WeightLayout::dv, options));
  expect_high_water<float>({.tokens = 1024, .hidden = 8, .vocab = 248320}, LogitsDtype::accumulator,
                           Mode::fused, false, false);
}

}  // namespace

#include "heddle/head/reference.hpp"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "head/problem.hpp"
#include "support/compare.hpp"

// What the reference tier promises beyond the contract that tiers_test.cpp holds it to.

namespace {

namespace head = heddle::head;
using namespace heddle::test;
using head::Mode;

// One exponential a logit, and one where two tiles meet; log-softmax by itself takes two. A cotangent
// of the entropy costs the fused form none.
TEST(HeadReference, ExponentialsAreAsManyAsTheContractSays) {
  constexpr std::int64_t tokens = 4;
  constexpr std::int64_t active = 3;
  constexpr std::int64_t with_cotangent = 2;
  constexpr std::int64_t vocab = 23;
  constexpr std::int64_t merges = 23 / 5;  // tiles of 5: five of them
  current_tier = Tier::reference;
  auto problem = random_problem<double>({.tokens = tokens, .hidden = 2, .vocab = vocab}, 28);
  Problem<Counted> counted;
  counted.dims = problem.dims;
  counted.hidden = converted<Counted>(problem.hidden);
  counted.weight = converted<Counted>(problem.weight);
  counted.ids = problem.ids;
  counted.active = {1, 0, 1, 1};
  counted.d_logps = {0.5, 0.5, 0.0, 0.5};
  counted.options.vocab_tile = 5;
  for (const Mode mode : modes) {
    for (const bool entropy : {false, true}) {
      counted.options.mode = mode;
      counted.d_entropy =
          entropy ? std::vector<Counted>{0.1, 0.1, 0.0, 0.1} : std::vector<Counted>{};
      Counted::exps = 0;
      Counted::logs = 0;
      const auto scores = counted.forward();
      const bool fused = mode == Mode::fused;
      EXPECT_EQ(Counted::exps, active * (fused ? vocab + merges : 2 * vocab));
      EXPECT_LE(Counted::logs, 3 * active);
      Counted::exps = 0;
      std::vector<Counted> d_hidden(counted.hidden.size());
      head::reference::backward(
          counted.dims, counted.inputs(), counted.options,
          head::Residuals<Counted>{scores.max, scores.exp_sum, scores.mean},
          head::OutputCotangents<Counted>{counted.d_logps, counted.d_entropy},
          head::Cotangents<Counted>{.d_hidden = {d_hidden.data(), tokens, 2}});
      EXPECT_EQ(Counted::exps, with_cotangent * vocab * (fused ? 1 : entropy ? 4 : 2));
    }
  }
}

// Storage in one type, arithmetic in a wider one: the float64 answer of float inputs.
TEST(HeadReference, AccumulatorMayBeWiderThanTheStorage) {
  const auto problem = random_problem<float>({.tokens = 5, .hidden = 4, .vocab = 12}, 75);
  std::vector<double> logps(5, -77.0);
  head::reference::forward(problem.dims, problem.inputs(), problem.options,
                           head::Outputs<double>{.logps = logps});
  EXPECT_TRUE(close(logps, definition(problem).logps, 1e-13));
}

}  // namespace

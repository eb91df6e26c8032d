// Mutants: decay coupled into the gradient; no decay; decay after the step instead of before; a moment
// without its bias correction; the step counted per update() instead of per begin_step(); eps inside
// the root; a block of update() writing another's moments.
#include "heddle-train/adamw.hpp"

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

namespace heddle::train {
namespace {

TEST(HeddleTrainAdamW, FirstStepByHand) {
  AdamW<double> adamw(2, {.learning_rate = 0.1, .weight_decay = 0.5});
  std::vector<double> p = {2.0, -1.0};
  const std::vector<double> g = {0.3, 0.0};
  adamw.begin_step();
  adamw.update(0, std::span<double>(p), std::span<const double>(g));
  // Decay by 1 - 0.05, then a step of the sign: m and v are unbiased to g and g^2.
  EXPECT_NEAR(p[0], 2.0 * 0.95 - 0.1 * 0.3 / (0.3 + 1e-8), 1e-15);
  EXPECT_NEAR(p[1], -0.95, 1e-15);
}

TEST(HeddleTrainAdamW, FollowsItsDefinitionOverSteps) {
  const AdamWOptions options = {
      .learning_rate = 3e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.02};
  test::Random random(11);
  const std::int64_t count = 40000;  // more than one block
  std::vector<double> actual = random.normals<double>(count);
  std::vector<double> expected = actual;
  std::vector<double> m(expected.size(), 0.0);
  std::vector<double> v(expected.size(), 0.0);
  AdamW<double> adamw(count, options);
  for (int step = 1; step <= 4; ++step) {
    const std::vector<double> g = random.normals<double>(count, 0.1);
    adamw.begin_step();
    // In two ranges: one step all the same.
    const std::int64_t cut = 12345;
    const auto rest = static_cast<std::size_t>(count - cut);
    adamw.update(0, std::span<double>(actual).first(static_cast<std::size_t>(cut)),
                 std::span<const double>(g).first(static_cast<std::size_t>(cut)));
    adamw.update(cut, std::span<double>(actual).last(rest), std::span<const double>(g).last(rest));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      m[i] = 0.8 * m[i] + 0.2 * g[i];
      v[i] = 0.95 * v[i] + 0.05 * g[i] * g[i];
      const double m_hat = m[i] / (1 - std::pow(0.8, step));
      const double v_hat = v[i] / (1 - std::pow(0.95, step));
      expected[i] -= 3e-2 * 0.02 * expected[i];
      expected[i] -= 3e-2 * m_hat / (std::sqrt(v_hat) + 1e-3);
    }
  }
  EXPECT_TRUE(test::close(actual, expected, 1e-14));
}

TEST(HeddleTrainAdamW, BitsDoNotDependOnThreads) {
  test::Random random(12);
  const std::vector<float> start = random.normals<float>(100000);
  const std::vector<float> g = random.normals<float>(100000);
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 2, 5}) {
    test::with_threads(threads, [&] {
      AdamW<float> adamw(100000, {.learning_rate = 1e-2});
      std::vector<float> p = start;
      for (int step = 0; step < 3; ++step) {
        adamw.begin_step();
        adamw.update(0, std::span<float>(p), std::span<const float>(g));
      }
      results.push_back(p);
    });
  }
  EXPECT_TRUE(test::same_bits(results[1], results[0]));
  EXPECT_TRUE(test::same_bits(results[2], results[0]));
}

TEST(HeddleTrainAdamW, NamesAGradientOfAnotherLength) {
  AdamW<float> adamw(3, {.learning_rate = 1});
  std::vector<float> p(3);
  const std::vector<float> g(2);
  adamw.begin_step();
  EXPECT_EQ(test::thrown_text<Error>(
                [&] { adamw.update(0, std::span<float>(p), std::span<const float>(g)); }),
            "train::AdamW::update: gradient.size = 2: must equal values.size (3)");
}

}  // namespace
}  // namespace heddle::train

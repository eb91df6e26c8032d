#include "heddle/gdn/reference_recurrence.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"

// Mutants these tests are written against: o read before the update, or the state before its decay;
// beta applied twice or not; a start that multiplies by zero instead of selecting it; a start ignored
// by the state, by m, or by the backward; padding that decays the state; S_t and S_{t-1} swapped in
// the backward; dd taken before o's part of dS; the second part of dk dropped; dg without exp(g);
// the final state's cotangent ignored; a block of the replay off by one; d_q or d_k overwritten.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::Random;

using Vector = std::vector<double>;
using Ids = std::vector<std::int32_t>;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

template <class A>
struct Head {
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  Ids segment_ids{};
  std::int32_t initial_segment = 0;
  std::vector<A> q{}, k{}, v{}, beta{}, g{}, state{};

  [[nodiscard]] std::int64_t tokens() const {
    return static_cast<std::int64_t>(segment_ids.size());
  }
  [[nodiscard]] Segments segments() const { return {segment_ids, initial_segment}; }
  [[nodiscard]] reference::RecurrenceInputs<A> inputs() const {
    return {.q = {q.data(), tokens(), key_dim},
            .k = {k.data(), tokens(), key_dim},
            .v = {v.data(), tokens(), value_dim},
            .beta = beta,
            .g = g};
  }
};

template <class A>
struct Forward {
  std::vector<A> o, state;
};

template <class A>
Forward<A> forward(const Head<A>& head) {
  Forward<A> out{std::vector<A>(head.v.size(), heddle::test::poison<A>()), head.state};
  reference::recurrence_forward<A, A>(head.segments(), head.inputs(),
                                      {out.state.data(), head.key_dim, head.value_dim},
                                      {out.o.data(), head.tokens(), head.value_dim});
  return out;
}

/// The recurrence as products of explicit transitions exp(g) (I - beta k k^T), document by document.
Forward<double> by_products(const Head<double>& head) {
  const auto rows = static_cast<std::size_t>(head.key_dim);
  const auto cols = static_cast<std::size_t>(head.value_dim);
  Forward<double> out{Vector(head.v.size(), 0.0), head.state};
  std::int32_t document = head.initial_segment;
  for (std::size_t t = 0; t < head.segment_ids.size(); ++t) {
    if (head.segment_ids[t] <= 0) {
      continue;
    }
    if (head.segment_ids[t] != document) {
      out.state.assign(rows * cols, 0.0);
      document = head.segment_ids[t];
    }
    Vector next(rows * cols, 0.0);
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < cols; ++j) {
        for (std::size_t l = 0; l < rows; ++l) {
          const double transition =
              (i == l ? 1.0 : 0.0) - head.beta[t] * head.k[t * rows + i] * head.k[t * rows + l];
          next[i * cols + j] += std::exp(head.g[t]) * transition * out.state[l * cols + j];
        }
        next[i * cols + j] += head.beta[t] * head.k[t * rows + i] * head.v[t * cols + j];
        out.o[t * cols + j] += next[i * cols + j] * head.q[t * rows + i];
      }
    }
    out.state = next;
  }
  return out;
}

struct Backward {
  Vector d_q, d_k, d_v, d_beta, d_g, d_state;
};

Backward backward(const Head<double>& head, const Vector& d_o, const Vector& d_state) {
  Backward out{Vector(head.q.size(), 0.0), Vector(head.k.size(), 0.0),
               Vector(head.v.size(), nan), Vector(head.beta.size(), nan),
               Vector(head.g.size(), nan), d_state};
  reference::recurrence_backward<double, double>(
      head.segments(), head.inputs(), {head.state.data(), head.key_dim, head.value_dim},
      {d_o.data(), head.tokens(), head.value_dim},
      {out.d_state.data(), head.key_dim, head.value_dim},
      {.d_q = {out.d_q.data(), head.tokens(), head.key_dim},
       .d_k = {out.d_k.data(), head.tokens(), head.key_dim},
       .d_v = {out.d_v.data(), head.tokens(), head.value_dim},
       .d_beta = out.d_beta,
       .d_g = out.d_g});
  return out;
}

enum class Keys { random, positive, near_identical, identical, antipodal, zero };
constexpr Keys every_family[] = {Keys::random,    Keys::positive,  Keys::near_identical,
                                 Keys::identical, Keys::antipodal, Keys::zero};

/// Log decays that have to work: none, long memory, the usual, strong, mixed, single cuts.
enum class Decay { none, long_memory, usual, one, five, sixteen, mixed, cuts };
constexpr Decay every_regime[] = {Decay::none, Decay::long_memory, Decay::usual, Decay::one,
                                  Decay::five, Decay::sixteen,     Decay::mixed, Decay::cuts};

double decay(Decay regime, std::int64_t token, Random& random) {
  switch (regime) {
    case Decay::none:
      return 0;
    case Decay::long_memory:
      return -1e-3;
    case Decay::usual:
      return random.uniform(-0.2, 0);
    case Decay::one:
      return -1;
    case Decay::five:
      return -5;
    case Decay::sixteen:
      return -16;
    case Decay::mixed:
      return token % 3 == 2 ? -200 : -0.01;
    case Decay::cuts:
      return token % 4 == 3 ? -1e4 : -0.1;
  }
  return nan;
}

Head<double> random_head(const Ids& ids, std::uint64_t seed, std::int64_t key_dim = 4,
                         std::int64_t value_dim = 3, Keys keys = Keys::random,
                         Decay regime = Decay::usual) {
  Random random(seed);
  Head<double> head{.key_dim = key_dim, .value_dim = value_dim, .segment_ids = ids};
  head.q = random.normals<double>(head.tokens() * key_dim);
  head.v = random.normals<double>(head.tokens() * value_dim);
  const Vector common = random.normals<double>(key_dim);
  for (std::int64_t t = 0; t < head.tokens(); ++t) {
    Vector k = random.normals<double>(key_dim);
    double length = 0;
    for (std::size_t i = 0; i < k.size(); ++i) {
      switch (keys) {
        case Keys::random:
          break;
        case Keys::positive:
          k[i] = std::abs(k[i]);
          break;
        case Keys::near_identical:
          k[i] = common[i] + 1e-3 * k[i];
          break;
        case Keys::identical:
          k[i] = common[i];
          break;
        case Keys::antipodal:
          k[i] = t % 2 == 0 ? common[i] : -common[i];
          break;
        case Keys::zero:
          k[i] = 0;
          break;
      }
      length += k[i] * k[i];
    }
    for (const double x : k) {
      head.k.push_back(length > 0 ? x / std::sqrt(length) : 0.0);
    }
    // Now and then nothing is written, or all but everything.
    const double choice = random.uniform();
    head.beta.push_back(choice < 0.1 ? 0.0 : choice < 0.3 ? 1 - 1e-7 : random.uniform());
    head.g.push_back(decay(regime, t, random));
  }
  head.state = random.normals<double>(key_dim * value_dim);
  if (!ids.empty() && ids[0] > 0) {
    head.initial_segment = ids[0];
  }
  return head;
}

const Ids packed{1, 1, 1, 0, 1, 2, 2, 3, 0, 0, 3, 1, 1, 1, 0};

TEST(GdnReferenceRecurrence, IdenticalKeysReplaceTheirValue) {
  Head<double> head{.key_dim = 2,
                    .value_dim = 2,
                    .segment_ids = {1, 1, 1},
                    .q = {1, 0, 1, 0, 0, 1},
                    .k = {1, 0, 1, 0, 1, 0},
                    .v = {1, 2, 3, 5, 8, 13},
                    .beta = {1, 1, 1},
                    .g = {0, 0, 0},
                    .state = {9, 9, 9, 9}};
  EXPECT_EQ(forward(head).o, (Vector{1, 2, 3, 5, 0, 0}));
  EXPECT_EQ(forward(head).state, (Vector{8, 13, 0, 0}));
  head.beta = {1, 0.5, 0.5};
  EXPECT_EQ(forward(head).state, (Vector{5, 8.25, 0, 0}));
}

TEST(GdnReferenceRecurrence, DecayPrecedesTheReadAndTheOutputReadsTheNewState) {
  const Head<double> head{.key_dim = 1,
                          .value_dim = 1,
                          .segment_ids = {1},
                          .initial_segment = 1,
                          .q = {2},
                          .k = {1},
                          .v = {10},
                          .beta = {0.5},
                          .g = {std::log(0.25)},
                          .state = {16}};
  // 16 / 4 = 4, written towards 10 by half: 7.
  EXPECT_NEAR(forward(head).state[0], 7, 1e-14);
  EXPECT_NEAR(forward(head).o[0], 14, 1e-14);
}

TEST(GdnReferenceRecurrence, AgreesWithExplicitTransitionsInEveryRegime) {
  double worst = 0;
  for (const Keys keys : every_family) {
    for (const Decay regime : every_regime) {
      const Head<double> head = random_head(packed, 7, 5, 3, keys, regime);
      const Forward<double> found = forward(head);
      const Forward<double> expected = by_products(head);
      EXPECT_TRUE(close(found.o, expected.o, 1e-13))
          << static_cast<int>(keys) << " " << static_cast<int>(regime);
      if (std::any_of(expected.state.begin(), expected.state.end(),
                      [](double x) { return x != 0; })) {
        EXPECT_TRUE(close(found.state, expected.state, 1e-13));
      } else {
        EXPECT_EQ(found.state, expected.state);
      }
      worst = std::max(worst, heddle::test::difference<double, double>(found.o, expected.o).error);
    }
  }
  RecordProperty("worst", std::to_string(worst));
}

TEST(GdnReferenceRecurrence, BackwardAgreesWithCentralDifferencesInEveryRegime) {
  Random random(21);
  for (const Keys keys : every_family) {
    for (const Decay regime : every_regime) {
      Head<double> head = random_head(packed, 9, 3, 2, keys, regime);
      const Vector d_o = random.normals<double>(head.tokens() * 2);
      const Vector d_state = random.normals<double>(6);
      const auto loss = [&] {
        const Forward<double> out = forward(head);
        double sum = 0;
        for (std::size_t i = 0; i < d_o.size(); ++i) {
          sum += out.o[i] * d_o[i];
        }
        for (std::size_t i = 0; i < d_state.size(); ++i) {
          sum += out.state[i] * d_state[i];
        }
        return sum;
      };
      const Backward found = backward(head, d_o, d_state);
      const auto check = [&](const Vector& actual, Vector& input, const char* what) {
        const Vector expected = heddle::test::central_differences(input, loss);
        double scale = 1;
        for (const double x : expected) {
          scale = std::max(scale, std::abs(x));
        }
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_NEAR(actual[i], expected[i], 1e-8 * scale)
              << what << " " << i << ", keys " << static_cast<int>(keys) << ", regime "
              << static_cast<int>(regime);
        }
      };
      check(found.d_q, head.q, "q");
      check(found.d_k, head.k, "k");
      check(found.d_v, head.v, "v");
      check(found.d_beta, head.beta, "beta");
      check(found.d_state, head.state, "state");
      // exp(-1e4 + h) is 0 on either side, as is the derivative.
      check(found.d_g, head.g, "g");
    }
  }
}

TEST(GdnReferenceRecurrence, ReplayedBlocksOfAnyLengthGiveTheSameGradients) {
  for (std::int64_t tokens = 0; tokens <= 18; ++tokens) {
    Head<double> head = random_head(Ids(static_cast<std::size_t>(tokens), 1), 31, 2, 2);
    head.initial_segment = 1;
    Random random(32);
    const Vector d_o = random.normals<double>(tokens * 2);
    const Vector d_state = random.normals<double>(4);
    const Backward found = backward(head, d_o, d_state);
    Vector expected = d_state;
    // The state's cotangent by the transposed transitions, by hand.
    for (std::int64_t t = tokens - 1; t >= 0; --t) {
      const auto at = static_cast<std::size_t>(t);
      const double* q = &head.q[at * 2];
      const double* k = &head.k[at * 2];
      Vector sum(4);
      for (std::size_t i = 0; i < 2; ++i) {
        for (std::size_t j = 0; j < 2; ++j) {
          sum[i * 2 + j] = expected[i * 2 + j] + q[i] * d_o[at * 2 + j];
        }
      }
      for (std::size_t i = 0; i < 2; ++i) {
        for (std::size_t j = 0; j < 2; ++j) {
          expected[i * 2 + j] =
              std::exp(head.g[at]) *
              (sum[i * 2 + j] - head.beta[at] * k[i] * (k[0] * sum[j] + k[1] * sum[2 + j]));
        }
      }
    }
    EXPECT_TRUE(close(found.d_state, expected, 1e-13)) << tokens;
    if (tokens > 0) {
      const auto loss = [&] {
        const Forward<double> out = forward(head);
        double sum = 0;
        for (std::size_t i = 0; i < d_o.size(); ++i) {
          sum += out.o[i] * d_o[i];
        }
        for (std::size_t i = 0; i < 4; ++i) {
          sum += out.state[i] * d_state[i];
        }
        return sum;
      };
      EXPECT_TRUE(close(found.d_g, heddle::test::central_differences(head.g, loss), 1e-7))
          << tokens;
      EXPECT_TRUE(close(found.d_k, heddle::test::central_differences(head.k, loss), 1e-7))
          << tokens;
    }
  }
}

TEST(GdnReferenceRecurrence, PaddingIsNotReadAndPassesTheStateThrough) {
  Head<double> head = random_head({1, 0, 1}, 3);
  Head<double> alone = random_head({1, 1}, 3);
  const auto copy_rows = [](const Vector& from, Vector& to, std::size_t width) {
    std::copy_n(from.begin(), width, to.begin());
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(2 * width), width,
                to.begin() + static_cast<std::ptrdiff_t>(width));
  };
  copy_rows(head.q, alone.q, 4);
  copy_rows(head.k, alone.k, 4);
  copy_rows(head.v, alone.v, 3);
  copy_rows(head.beta, alone.beta, 1);
  copy_rows(head.g, alone.g, 1);
  alone.state = head.state;
  std::fill_n(head.q.begin() + 4, 4, nan);
  std::fill_n(head.k.begin() + 4, 4, nan);
  std::fill_n(head.v.begin() + 3, 3, nan);
  head.beta[1] = nan;
  head.g[1] = nan;
  const Forward<double> found = forward(head);
  const Forward<double> expected = forward(alone);
  EXPECT_EQ(found.state, expected.state);
  EXPECT_EQ(Vector(found.o.begin() + 3, found.o.begin() + 6), Vector(3, 0.0));
  EXPECT_EQ(Vector(found.o.begin() + 6, found.o.end()),
            Vector(expected.o.begin() + 3, expected.o.end()));

  const Backward d = backward(head, {1, 2, 3, nan, nan, nan, 4, 5, 6}, Vector(12, 0.5));
  const Backward d_alone = backward(alone, {1, 2, 3, 4, 5, 6}, Vector(12, 0.5));
  EXPECT_EQ(d.d_state, d_alone.d_state);
  EXPECT_EQ(Vector(d.d_v.begin() + 3, d.d_v.begin() + 6), Vector(3, 0.0));
  EXPECT_EQ(d.d_beta, (Vector{d_alone.d_beta[0], 0, d_alone.d_beta[1]}));
  EXPECT_EQ(d.d_g, (Vector{d_alone.d_g[0], 0, d_alone.d_g[1]}));
}

TEST(GdnReferenceRecurrence, AStateOfAnotherDocumentIsSelectedAway) {
  Head<double> head = random_head({1, 1, 2}, 5);
  head.initial_segment = 0;
  head.g[0] = 0;
  head.g[2] = 0;
  const Forward<double> expected = forward(head);
  const Backward d_expected = backward(head, Vector(9, 1.0), Vector(12, 1.0));
  std::fill(head.state.begin(), head.state.end(), nan);
  const Forward<double> found = forward(head);
  EXPECT_EQ(found.o, expected.o);
  EXPECT_EQ(found.state, expected.state);
  const Backward d_found = backward(head, Vector(9, 1.0), Vector(12, 1.0));
  EXPECT_EQ(d_found.d_state, Vector(12, 0.0));
  EXPECT_EQ(d_found.d_k, d_expected.d_k);
  EXPECT_EQ(d_found.d_g, d_expected.d_g);
  EXPECT_EQ(d_found.d_g[0], 0);
  EXPECT_EQ(d_found.d_g[2], 0);
}

TEST(GdnReferenceRecurrence, ACutIsAStart) {
  Head<double> cut = random_head(Ids(8, 1), 13);
  cut.g[4] = -1e4;
  Head<double> start = cut;
  std::fill(start.segment_ids.begin() + 4, start.segment_ids.end(), 2);
  start.g[4] = 0;
  EXPECT_EQ(forward(cut).o, forward(start).o);
  EXPECT_EQ(forward(cut).state, forward(start).state);
  const Backward d_cut = backward(cut, Vector(24, 1.0), Vector(12, 1.0));
  const Backward d_start = backward(start, Vector(24, 1.0), Vector(12, 1.0));
  EXPECT_EQ(d_cut.d_g, d_start.d_g);
  EXPECT_EQ(d_cut.d_g[4], 0);
  EXPECT_EQ(d_cut.d_v, d_start.d_v);
  EXPECT_EQ(d_cut.d_state, d_start.d_state);
}

TEST(GdnReferenceRecurrence, WithoutWritingTheStateOnlyDecays) {
  Head<double> head = random_head(Ids(6, 1), 17);
  std::fill(head.beta.begin(), head.beta.end(), 0.0);
  double sum = 0;
  for (const double g : head.g) {
    sum += g;
  }
  Vector expected = head.state;
  for (double& x : expected) {
    x *= std::exp(sum);
  }
  EXPECT_TRUE(close(forward(head).state, expected, 1e-14));
}

TEST(GdnReferenceRecurrence, TheTransitionCarriesTheInitialState) {
  for (const Decay regime : every_regime) {
    Head<double> head = random_head({1, 1, 0, 1, 1, 1}, 19, 4, 3, Keys::random, regime);
    Vector m(16, nan);
    reference::transition<double>(head.segments(), head.inputs(), {m.data(), 4, 4});
    const Vector with = forward(head).state;
    Vector expected(12, 0.0);
    for (std::size_t i = 0; i < 4; ++i) {
      for (std::size_t j = 0; j < 3; ++j) {
        for (std::size_t l = 0; l < 4; ++l) {
          expected[i * 3 + j] += m[i * 4 + l] * head.state[l * 3 + j];
        }
      }
    }
    std::fill(head.state.begin(), head.state.end(), 0.0);
    const Vector without = forward(head).state;
    for (std::size_t i = 0; i < 12; ++i) {
      EXPECT_NEAR(with[i], expected[i] + without[i], 1e-13) << static_cast<int>(regime);
    }
  }
}

TEST(GdnReferenceRecurrence, TheTransitionIsTheProductOfTheTokens) {
  const Head<double> head = random_head({1, 1, 1}, 23, 2, 2);
  Vector expected{1, 0, 0, 1};
  for (std::size_t t = 0; t < 3; ++t) {
    const double* k = &head.k[t * 2];
    Vector next(4, 0.0);
    for (std::size_t i = 0; i < 2; ++i) {
      for (std::size_t j = 0; j < 2; ++j) {
        for (std::size_t l = 0; l < 2; ++l) {
          next[i * 2 + j] += std::exp(head.g[t]) *
                             ((i == l ? 1.0 : 0.0) - head.beta[t] * k[i] * k[l]) *
                             expected[l * 2 + j];
        }
      }
    }
    expected = next;
  }
  Vector m(4, nan);
  reference::transition<double>(head.segments(), head.inputs(), {m.data(), 2, 2});
  EXPECT_TRUE(close(m, expected, 1e-14));
}

TEST(GdnReferenceRecurrence, TheTransitionOfAStartIsZeroAndOfNothingTheIdentity) {
  Head<double> head = random_head({1, 1, 2, 2}, 29, 2, 2);
  Vector m(4, nan);
  reference::transition<double>(head.segments(), head.inputs(), {m.data(), 2, 2});
  EXPECT_EQ(m, Vector(4, 0.0));
  head = random_head({0, 0}, 29, 2, 2);
  reference::transition<double>(head.segments(), head.inputs(), {m.data(), 2, 2});
  EXPECT_EQ(m, (Vector{1, 0, 0, 1}));
}

TEST(GdnReferenceRecurrence, CotangentsOfSharedKeysAddUp) {
  const Head<double> head = random_head(Ids(5, 1), 37);
  const Backward once = backward(head, Vector(15, 1.0), Vector(12, 1.0));
  Vector d_q(20, 2.0);
  Vector d_k(20, -3.0);
  Vector d_v(15, nan);
  Vector d_beta(5, nan);
  Vector d_g(5, nan);
  Vector d_state(12, 1.0);
  const Vector d_o(15, 1.0);
  reference::recurrence_backward<double, double>(head.segments(), head.inputs(),
                                                 {head.state.data(), 4, 3}, {d_o.data(), 5, 3},
                                                 {d_state.data(), 4, 3},
                                                 {.d_q = {d_q.data(), 5, 4},
                                                  .d_k = {d_k.data(), 5, 4},
                                                  .d_v = {d_v.data(), 5, 3},
                                                  .d_beta = d_beta,
                                                  .d_g = d_g});
  for (std::size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(d_q[i], 2.0 + once.d_q[i]);
    EXPECT_NEAR(d_k[i], -3.0 + once.d_k[i], 1e-14);
  }
}

TEST(GdnReferenceRecurrence, StatesOnlyReadsNoQuery) {
  Head<double> head = random_head(packed, 41);
  const Forward<double> full = forward(head);
  reference::RecurrenceInputs<double> inputs = head.inputs();
  inputs.q = {};
  reference::recurrence_forward<double, double>(head.segments(), inputs, {head.state.data(), 4, 3},
                                                {});
  EXPECT_EQ(head.state, full.state);
}

TEST(GdnReferenceRecurrence, FloatFollowsDoubleInEveryRegime) {
  double worst = 0;
  for (const Keys keys : every_family) {
    for (const Decay regime : every_regime) {
      const Head<double> wide = random_head(Ids(200, 1), 43, 16, 16, keys, regime);
      Head<float> narrow{.key_dim = 16, .value_dim = 16, .segment_ids = wide.segment_ids};
      narrow.initial_segment = wide.initial_segment;
      Head<double> rounded = wide;
      const auto round = [](const Vector& from, std::vector<float>& to, Vector& back) {
        to.assign(from.begin(), from.end());
        back.assign(to.begin(), to.end());
      };
      round(wide.q, narrow.q, rounded.q);
      round(wide.k, narrow.k, rounded.k);
      round(wide.v, narrow.v, rounded.v);
      round(wide.beta, narrow.beta, rounded.beta);
      round(wide.g, narrow.g, rounded.g);
      round(wide.state, narrow.state, rounded.state);
      const auto o = heddle::test::difference<float, double>(forward(narrow).o, forward(rounded).o);
      EXPECT_EQ(o.mismatch, "");
      EXPECT_GT(o.compared, 0);
      worst = std::max(worst, o.error);
    }
  }
  EXPECT_LT(worst, 5e-6);
  RecordProperty("worst", std::to_string(worst));
}

}  // namespace
}  // namespace heddle::gdn

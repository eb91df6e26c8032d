#include "heddle/gdn/gates.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/isa.hpp"
#include "heddle/gdn/reference_gates.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: the sign or the rate of the decay; gates of padding left as
// they were or read; the decay of a document's first token kept, or its d_a; dt_bias outside softplus;
// the factor 2 of BetaRange::doubled missing in one direction; A_log's gradient without the softplus;
// a block of the sums over tokens dropped, or summed twice; heads behind the last whole vector.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;

template <class S, class A = AccumulatorOf<S>>
struct Gates {
  std::int64_t heads = 1;
  std::vector<std::int32_t> segment_ids{};
  std::vector<S> a{}, b{};
  std::vector<A> A_log{}, dt_bias{}, d_g{}, d_beta{};
  BetaRange range = BetaRange::unit;

  [[nodiscard]] std::int64_t tokens() const {
    return static_cast<std::int64_t>(segment_ids.size());
  }
  [[nodiscard]] GateInputs<S, A> inputs() const {
    return {.a = {a.data(), tokens(), heads},
            .b = {b.data(), tokens(), heads},
            .A_log = A_log,
            .dt_bias = dt_bias};
  }
};

template <class A>
struct Results {
  std::vector<A> beta, g, d_a, d_b, d_A_log, d_dt_bias;
};

template <class S, class A>
Results<A> computed(const Gates<S, A>& gates, Write write = Write::overwrite,
                    A before = poison<A>()) {
  const auto heads = static_cast<std::size_t>(gates.heads);
  Results<A> out{std::vector<A>(gates.a.size(), poison<A>()),
                 std::vector<A>(gates.a.size(), poison<A>()),
                 gates.d_g,
                 gates.d_beta,
                 std::vector<A>(heads, before),
                 std::vector<A>(heads, before)};
  const auto view = [&](std::vector<A>& values) {
    return MatrixView<A>(values.data(), gates.tokens(), gates.heads);
  };
  const Segments segments(gates.segment_ids, 0);
  Workspace workspace;
  gates_forward<S, A>(segments, gates.inputs(), gates.range, view(out.beta), view(out.g),
                      workspace);
  gates_backward<S, A>(segments, gates.inputs(), gates.range, view(out.d_a), view(out.d_b),
                       {.d_A_log = {out.d_A_log, write}, .d_dt_bias = {out.d_dt_bias, write}},
                       workspace);
  EXPECT_EQ(workspace.high_water_bytes(), gates_workspace_bytes<A>(gates.tokens(), gates.heads));
  return out;
}

/// Head by head through the reference, in double.
template <class S, class A>
Results<double> by_reference(const Gates<S, A>& gates) {
  const auto column = [&](const auto& values, std::int64_t head) {
    std::vector<double> result;
    for (std::int64_t t = 0; t < gates.tokens(); ++t) {
      result.push_back(
          static_cast<double>(values[static_cast<std::size_t>(t * gates.heads + head)]));
    }
    return result;
  };
  Results<double> out;
  for (std::vector<double>* const values : {&out.beta, &out.g, &out.d_a, &out.d_b}) {
    values->resize(gates.a.size());
  }
  const Segments segments(gates.segment_ids, 0);
  for (std::int64_t head = 0; head < gates.heads; ++head) {
    const auto at = static_cast<std::size_t>(head);
    const auto a = column(gates.a, head);
    const auto b = column(gates.b, head);
    const reference::GateInputs<double, double> inputs{
        .a = {a.data(), gates.tokens(), 1},
        .b = {b.data(), gates.tokens(), 1},
        .A_log = static_cast<double>(gates.A_log[at]),
        .dt_bias = static_cast<double>(gates.dt_bias[at])};
    std::vector<double> beta(a.size()), g(a.size()), d_a(a.size()), d_b(a.size());
    reference::gates_forward<double, double>(segments, inputs, gates.range, beta, g);
    const auto d_beta = column(gates.d_beta, head);
    const auto d_g = column(gates.d_g, head);
    const auto parameters = reference::gates_backward<double, double>(
        segments, inputs, gates.range, d_beta, d_g, {d_a.data(), gates.tokens(), 1},
        {d_b.data(), gates.tokens(), 1});
    out.d_A_log.push_back(parameters.d_A_log);
    out.d_dt_bias.push_back(parameters.d_dt_bias);
    for (std::size_t t = 0; t < a.size(); ++t) {
      const std::size_t to = t * static_cast<std::size_t>(gates.heads) + at;
      out.beta[to] = beta[t];
      out.g[to] = g[t];
      out.d_a[to] = d_a[t];
      out.d_b[to] = d_b[t];
    }
  }
  return out;
}

template <class S>
Gates<S> random_gates(std::int64_t tokens, std::int64_t heads, BetaRange range,
                      std::uint64_t seed) {
  using A = AccumulatorOf<S>;
  Random random(seed);
  Gates<S> gates{.heads = heads, .range = range};
  std::int32_t id = 1;
  for (std::int64_t t = 0; t < tokens; ++t) {
    id += random.chance(0.05) ? 1 : 0;
    gates.segment_ids.push_back(random.chance(0.1) ? 0 : id);
  }
  gates.a = random.normals<S>(tokens * heads, 2);
  gates.b = random.normals<S>(tokens * heads, 2);
  gates.A_log = random.normals<A>(heads);
  gates.dt_bias = random.normals<A>(heads);
  gates.d_g = random.normals<A>(tokens * heads);
  gates.d_beta = random.normals<A>(tokens * heads);
  const Segments segments(gates.segment_ids, 0);
  for (std::size_t t = 0; t < gates.segment_ids.size(); ++t) {
    const auto poison_row = [&](auto& values) {
      using T = typename std::remove_reference_t<decltype(values)>::value_type;
      std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(t) * heads, heads, poison<T>());
    };
    if (gates.segment_ids[t] == 0) {
      poison_row(gates.a);
      poison_row(gates.b);
      poison_row(gates.d_g);
      poison_row(gates.d_beta);
    } else if (segments.starts(static_cast<std::int64_t>(t))) {
      poison_row(gates.a);
      poison_row(gates.d_g);
    }
  }
  return gates;
}

template <class A>
void expect_close(const Results<A>& actual, const Results<double>& expected, double tolerance) {
  const auto check = [&](const char* what, const std::vector<A>& a, const std::vector<double>& e) {
    EXPECT_TRUE(close(std::vector<double>(a.begin(), a.end()), e, tolerance)) << what;
  };
  check("beta", actual.beta, expected.beta);
  check("g", actual.g, expected.g);
  check("d_a", actual.d_a, expected.d_a);
  check("d_b", actual.d_b, expected.d_b);
  check("d_A_log", actual.d_A_log, expected.d_A_log);
  check("d_dt_bias", actual.d_dt_bias, expected.d_dt_bias);
}

TEST(GdnGates, ByHand) {
  const Gates<double> gates{.heads = 2,
                            .segment_ids = {1, 1},
                            .a = {0, 0, 1, -1},
                            .b = {0, 2, 0, 2},
                            .A_log = {0, std::log(3.0)},
                            .dt_bias = {0, 1},
                            .d_g = {1, 1, 1, 1},
                            .d_beta = {1, 1, 1, 1}};
  const auto out = computed(gates);
  const double open = 1 / (1 + std::exp(-2.0));
  EXPECT_TRUE(close(out.beta, std::vector<double>{0.5, open, 0.5, open}, 1e-15));
  EXPECT_TRUE(close(
      out.g, std::vector<double>{0, 0, -std::log1p(std::exp(1.0)), -3 * std::log(2.0)}, 1e-15));
  EXPECT_TRUE(close(out.d_a, std::vector<double>{0, 0, -1 / (1 + std::exp(-1.0)), -1.5}, 1e-15));
  EXPECT_TRUE(
      close(out.d_b, std::vector<double>{0.25, open * (1 - open), 0.25, open * (1 - open)}, 1e-15));
  EXPECT_TRUE(close(out.d_A_log, std::vector<double>{out.g[2], out.g[3]}, 1e-15));
  EXPECT_TRUE(close(out.d_dt_bias, std::vector<double>{out.d_a[2], out.d_a[3]}, 1e-15));
}

TEST(GdnGates, AgreesWithTheReference) {
  std::uint64_t seed = 1;
  for (const BetaRange range : {BetaRange::unit, BetaRange::doubled}) {
    for (const std::int64_t tokens : {1, 7, 256, 257, 700}) {
      for (const std::int64_t heads : {1, 4, 16, 21}) {
        const auto wide = random_gates<double>(tokens, heads, range, ++seed);
        expect_close(computed(wide), by_reference(wide), 1e-13);
        const auto narrow = random_gates<bfloat16>(tokens, heads, range, ++seed);
        expect_close(computed(narrow), by_reference(narrow), 2e-6);
      }
    }
  }
  const auto single = random_gates<float>(300, 5, BetaRange::unit, 99);
  expect_close(computed(single), by_reference(single), 2e-6);
}

TEST(GdnGates, PaddingAndStartsAreExactlyZero) {
  const auto gates = random_gates<float>(200, 3, BetaRange::unit, 7);
  const auto out = computed(gates);
  const Segments segments(gates.segment_ids, 0);
  ASSERT_LT(segments.valid_tokens(), 200);
  ASSERT_GT(segments.starts_in_row(), 1);
  for (std::int64_t t = 0; t < 200; ++t) {
    for (std::int64_t h = 0; h < 3; ++h) {
      const auto i = static_cast<std::size_t>(t * 3 + h);
      if (!segments.valid(t)) {
        EXPECT_EQ(out.beta[i], 0);
        EXPECT_EQ(out.d_b[i], 0);
      }
      if (!segments.valid(t) || segments.starts(t)) {
        EXPECT_EQ(out.g[i], 0);
        EXPECT_EQ(out.d_a[i], 0);
      } else {
        EXPECT_LT(out.g[i], 0);
      }
    }
  }
}

TEST(GdnGates, FarAwayInputs) {
  const float far = 1e4F;
  const Gates<float> gates{.heads = 1,
                           .segment_ids = {1, 1, 1, 1, 1},
                           .a = {0, far, -far, 88, -88},
                           .b = {0, far, -far, 88, -88},
                           .A_log = {0.5F},
                           .dt_bias = {0},
                           .d_g = {1, 1, 1, 1, 1},
                           .d_beta = {1, 1, 1, 1, 1}};
  const auto out = computed(gates);
  const float rate = std::exp(0.5F);
  EXPECT_EQ(out.beta[1], 1);
  EXPECT_EQ(out.beta[2], 0);
  EXPECT_EQ(out.g[1], -rate * far);
  EXPECT_EQ(out.g[2], 0);
  EXPECT_EQ(out.d_a[1], -rate);
  EXPECT_EQ(out.d_a[2], 0);
  EXPECT_EQ(out.d_b[1], 0);
  EXPECT_EQ(out.d_b[2], 0);
  for (const auto* values : {&out.g, &out.d_a, &out.d_b, &out.beta, &out.d_A_log}) {
    EXPECT_TRUE(
        std::all_of(values->begin(), values->end(), [](float x) { return std::isfinite(x); }));
  }
}

TEST(GdnGates, SameBitsOnEveryPathForAnyNumberOfThreadsAndForOneHeadAlone) {
  const auto gates = random_gates<bfloat16>(1000, 19, BetaRange::unit, 8);
  const auto expected = computed(gates);
  const auto expect_same = [&](const char* name) {
    const auto found = computed(gates);
    EXPECT_TRUE(same_bits(found.beta, expected.beta)) << name;
    EXPECT_TRUE(same_bits(found.g, expected.g)) << name;
    EXPECT_TRUE(same_bits(found.d_a, expected.d_a)) << name;
    EXPECT_TRUE(same_bits(found.d_b, expected.d_b)) << name;
    EXPECT_TRUE(same_bits(found.d_A_log, expected.d_A_log)) << name;
    EXPECT_TRUE(same_bits(found.d_dt_bias, expected.d_dt_bias)) << name;
  };
  for (const Path path : available_paths()) {
    const ScopedPath scoped(path);
    expect_same(path_name(path).data());
  }
  for (const int threads : {1, 2, 7}) {
    heddle::test::with_threads(threads, [&] { expect_same("threads"); });
  }
  Gates<bfloat16> one{.heads = 1, .segment_ids = gates.segment_ids};
  for (std::size_t t = 0; t < 1000; ++t) {
    one.a.push_back(gates.a[t * 19 + 17]);
    one.b.push_back(gates.b[t * 19 + 17]);
    one.d_g.push_back(gates.d_g[t * 19 + 17]);
    one.d_beta.push_back(gates.d_beta[t * 19 + 17]);
  }
  one.A_log = {gates.A_log[17]};
  one.dt_bias = {gates.dt_bias[17]};
  const auto alone = computed(one);
  EXPECT_EQ(alone.d_A_log[0], expected.d_A_log[17]);
  EXPECT_EQ(alone.g[999], expected.g[999 * 19 + 17]);
}

/// A long row of one sign: what a plain float sum would lose.
TEST(GdnGates, ParameterSumsOfALongRowKeepTheirDigits) {
  auto gates = random_gates<float>(30000, 1, BetaRange::unit, 9);
  for (float& d_g : gates.d_g) {
    d_g = std::isnan(d_g) ? d_g : 1.0F + std::abs(d_g);
  }
  expect_close(computed(gates), by_reference(gates), 1e-6);
}

TEST(GdnGates, ParametersAreOverwrittenOrAddedToOrLeftAlone) {
  const auto gates = random_gates<double>(20, 2, BetaRange::unit, 10);
  const auto overwritten = computed(gates);
  const auto added = computed(gates, Write::accumulate, 3.0);
  for (std::size_t h = 0; h < 2; ++h) {
    EXPECT_EQ(added.d_A_log[h], 3.0 + overwritten.d_A_log[h]);
    EXPECT_EQ(added.d_dt_bias[h], 3.0 + overwritten.d_dt_bias[h]);
  }
  auto d_a = gates.d_g;
  auto d_b = gates.d_beta;
  Workspace workspace;
  gates_backward<double, double>(Segments(gates.segment_ids, 0), gates.inputs(), gates.range,
                                 {d_a.data(), 20, 2}, {d_b.data(), 20, 2}, {}, workspace);
  EXPECT_EQ(d_a, overwritten.d_a);
}

TEST(GdnGates, NoToken) {
  Gates<float> gates{.heads = 2, .A_log = {1, 2}, .dt_bias = {0, 0}};
  const auto out = computed(gates);
  EXPECT_EQ(out.d_A_log, (std::vector<float>{0, 0}));
  EXPECT_EQ(out.d_dt_bias, (std::vector<float>{0, 0}));
}

TEST(GdnGates, RefusesOtherShapes) {
  const auto gates = random_gates<float>(3, 2, BetaRange::unit, 11);
  const Segments segments(gates.segment_ids, 0);
  std::vector<float> beta(6, 5.0F);
  std::vector<float> g(6, 5.0F);
  Workspace workspace;
  const auto refusal = [&](auto change) {
    auto inputs = gates.inputs();
    MatrixView<float> beta_view(beta.data(), 3, 2);
    MatrixView<float> g_view(g.data(), 3, 2);
    change(inputs, beta_view, g_view);
    return heddle::test::thrown_text<Error>([&] {
      gates_forward<float, float>(segments, inputs, BetaRange::unit, beta_view, g_view, workspace);
    });
  };
  const std::string where = "gdn::gates_forward: ";
  EXPECT_EQ(refusal([](auto& in, auto&, auto&) { in.a = in.a.row_block(0, 1); }),
            where + "a.rows = 1: must equal segments.tokens (3)");
  EXPECT_EQ(refusal([](auto& in, auto&, auto&) { in.b = in.b.column_block(0, 1); }),
            where + "b.cols = 1: must equal A_log.size (2)");
  EXPECT_EQ(refusal([](auto& in, auto&, auto&) { in.dt_bias = in.dt_bias.first(1); }),
            where + "dt_bias.size = 1: must equal A_log.size (2)");
  EXPECT_EQ(refusal([](auto&, auto& out, auto&) { out = out.row_block(0, 1); }),
            where + "beta.rows = 1: must equal segments.tokens (3)");
  EXPECT_EQ(refusal([](auto&, auto&, auto& out) { out = {}; }),
            where + "g.rows = 0: must equal segments.tokens (3)");
  EXPECT_EQ(beta, std::vector<float>(6, 5.0F));
  EXPECT_EQ(g, std::vector<float>(6, 5.0F));

  const auto backward_refusal = [&](auto change) {
    MatrixView<float> d_a(g.data(), 3, 2);
    MatrixView<float> d_b(beta.data(), 3, 2);
    GateParameterCotangents<float> parameters;
    change(d_a, d_b, parameters);
    return heddle::test::thrown_text<Error>([&] {
      gates_backward<float, float>(segments, gates.inputs(), BetaRange::unit, d_a, d_b, parameters,
                                   workspace);
    });
  };
  const std::string backward = "gdn::gates_backward: ";
  std::vector<float> one(1, 5.0F);
  EXPECT_EQ(backward_refusal([](auto& d_a, auto&, auto&) { d_a = d_a.row_block(0, 1); }),
            backward + "d_g_then_d_a.rows = 1: must equal segments.tokens (3)");
  EXPECT_EQ(backward_refusal([](auto&, auto& d_b, auto&) { d_b = d_b.row_block(0, 1); }),
            backward + "d_beta_then_d_b.rows = 1: must equal segments.tokens (3)");
  EXPECT_EQ(backward_refusal([&](auto&, auto&, auto& p) { p.d_A_log.values = one; }),
            backward + "d_A_log.size = 1: must equal A_log.size (2)");
  EXPECT_EQ(backward_refusal([&](auto&, auto&, auto& p) { p.d_dt_bias.values = one; }),
            backward + "d_dt_bias.size = 1: must equal A_log.size (2)");
  EXPECT_EQ(one[0], 5.0F);
}

}  // namespace
}  // namespace heddle::gdn

#include "heddle/gdn/layer.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/layer_calls.hpp"
#include "gdn/problem.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"

// Mutants these tests are written against: chunks in the wrong order, forward or backward; a document's
// start ignored in the recurrence alone, in the convolution alone, in m alone; d_z of the next chunk not
// handed to the one before it; the gates' cotangents left in the place of their inputs'; dS_T or the
// final window's cotangent ignored; the state's cotangent from the wrong end; ConvOutput::storage,
// BetaRange, NormMode or eps ignored in one direction; key head h % Hk instead of h / r; the scale of q
// missing backward; a chunk size, or grid for aligned, not passed on.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::difference;
using test::Given;
using test::Gradients;
using test::Kept;
using test::layer_backward;
using test::layer_forward;
using test::Problem;
using test::Random;
using test::random_problem;
using test::reference_backward;
using test::reference_forward;
using test::stored_as;

using Vector = std::vector<double>;
using Ids = std::vector<std::int32_t>;

constexpr Dims small{.key_heads = 2, .value_heads = 4, .key_dim = 5, .value_dim = 3, .kernel = 4};
constexpr Dims uneven{
    .key_heads = 2, .value_heads = 6, .key_dim = 36, .value_dim = 40, .kernel = 4};

/// `lengths` tokens of documents 1, 2, ...; a negative length is padding.
Ids row(const std::vector<int>& lengths) {
  Ids ids;
  std::int32_t id = 0;
  for (const int length : lengths) {
    id += length > 0 ? 1 : 0;
    ids.insert(ids.end(), static_cast<std::size_t>(std::abs(length)), length > 0 ? id : 0);
  }
  return ids;
}

const Ids packed = row({70, 1, -3, 40, 2, -1, 9});
/// Padding inside a document, which goes on behind it, and a document whose id returns.
const Ids gaps{7, 7, 7, 0, 7, 7, 2, 3, 3, 0, 0, 3, 3, 7, 7, 7, 7, 0, 0};

template <class A>
Vector wide(const std::vector<A>& values) {
  return {values.begin(), values.end()};
}

template <class A>
void expect_close(const Gradients<A>& actual, const Gradients<double>& expected, double tolerance,
                  const std::string& name) {
  const auto check = [&](const char* what, const std::vector<A>& a, const Vector& e) {
    if (!e.empty()) {
      EXPECT_TRUE(close(wide(a), e, tolerance)) << name << ": " << what;
    }
  };
  check("d_qkv", actual.d_qkv, expected.d_qkv);
  check("d_conv_weight", actual.d_conv_weight, expected.d_conv_weight);
  check("d_conv_bias", actual.d_conv_bias, expected.d_conv_bias);
  check("d_a", actual.d_a, expected.d_a);
  check("d_b", actual.d_b, expected.d_b);
  check("d_A_log", actual.d_A_log, expected.d_A_log);
  check("d_dt_bias", actual.d_dt_bias, expected.d_dt_bias);
  check("d_conv_state", actual.d_conv_state, expected.d_conv_state);
  check("d_recurrent_state", actual.d_recurrent_state, expected.d_recurrent_state);
}

template <class S, class P>
void expect_agreement(const Problem<S, P>& p, const LayerOptions& options, double tolerance,
                      const std::string& name, Kept kept = Kept::nothing) {
  const auto same_inputs = stored_as<double>([&] {
    Problem<double> d;
    d.dims = p.dims;
    d.options = p.options;
    d.segment_ids = p.segment_ids;
    const auto fill = [](Vector& to, const auto& from) {
      for (const auto value : from) {
        to.push_back(static_cast<double>(value));
      }
    };
    fill(d.qkv, p.qkv);
    fill(d.a, p.a);
    fill(d.b, p.b);
    fill(d.conv_state, p.conv_state);
    fill(d.d_o, p.d_o);
    fill(d.conv_weight, p.conv_weight);
    fill(d.conv_bias, p.conv_bias);
    fill(d.A_log, p.A_log);
    fill(d.dt_bias, p.dt_bias);
    fill(d.recurrent_state, p.recurrent_state);
    fill(d.d_final_recurrent_state, p.d_final_recurrent_state);
    fill(d.d_final_conv_state, p.d_final_conv_state);
    return d;
  }());
  const auto out = layer_forward(p, options);
  const auto expected = reference_forward(same_inputs);
  EXPECT_TRUE(close(wide(out.o), expected.o, tolerance)) << name;
  EXPECT_TRUE(close(wide(out.final_recurrent_state), expected.final_recurrent_state, tolerance))
      << name;
  Vector window;
  for (const auto value : out.final_conv_state) {
    window.push_back(static_cast<double>(value));
  }
  EXPECT_EQ(window, expected.final_conv_state) << name;
  expect_close(layer_backward(p, options, kept), reference_backward(same_inputs), tolerance, name);
}

std::string describe(const LayerOptions& options) {
  return "chunk " + std::to_string(options.chunks.chunk) +
         (options.chunks.chunking == Chunking::grid ? " grid" : "") +
         (options.recurrence == Recurrence::token_by_token ? " token by token" : "");
}

TEST(GdnLayer, AgreesWithTheReferenceForAnyChunkSize) {
  const auto p = random_problem(small, packed, 1, Given::everything);
  const auto single = stored_as<float>(p);
  for (const std::int64_t chunk :
       {1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128}) {
    for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
      for (const Recurrence recurrence : {Recurrence::chunked, Recurrence::token_by_token}) {
        if (recurrence == Recurrence::token_by_token && chunk % 16 != 1) {
          continue;  // a chunk is a tile of rows there, nothing else
        }
        const LayerOptions options{.chunks = {.chunk = chunk, .chunking = chunking},
                                   .recurrence = recurrence};
        expect_agreement(p, options, 1e-12, describe(options));
        expect_agreement(single, options, 5e-6, describe(options) + " f32");
      }
    }
  }
}

TEST(GdnLayer, AgreesWithTheReferenceOnRandomRows) {
  Random random(2);
  for (int i = 0; i < 24; ++i) {
    const std::int64_t key_heads = random.integer(1, 3);
    const Dims dims{.key_heads = key_heads,
                    .value_heads = key_heads * random.integer(1, 3),
                    .key_dim = random.integer(1, 9),
                    .value_dim = random.integer(1, 9),
                    .kernel = random.integer(1, 5)};
    Ids ids;
    std::int32_t id = 0;
    while (static_cast<std::int64_t>(ids.size()) < random.integer(1, 90)) {
      id += static_cast<std::int32_t>(random.integer(0, 1));
      ids.insert(ids.end(), static_cast<std::size_t>(random.integer(1, 20)),
                 random.chance(0.25) ? 0 : id + 1);
    }
    const bool continued = ids[0] > 0 && random.chance(0.5);
    auto p = random_problem(dims, ids, 100U + static_cast<unsigned>(i),
                            continued ? Given::everything : Given::bias);
    for (std::int64_t t = 0; t < p.dims.tokens; ++t) {
      if (ids[static_cast<std::size_t>(t)] == 0) {
        const auto poison_row = [&](Vector& values, std::int64_t cols) {
          std::fill_n(values.begin() + t * cols, cols, test::poison<double>());
        };
        poison_row(p.qkv, dims.qkv_columns());
        poison_row(p.a, dims.value_heads);
        poison_row(p.b, dims.value_heads);
        poison_row(p.d_o, dims.output_columns());
      }
    }
    const LayerOptions options{
        .chunks = {.chunk = random.integer(1, 20),
                   .chunking = random.chance(0.3) ? Chunking::grid : Chunking::aligned}};
    expect_agreement(p, options, 1e-12, "row " + std::to_string(i) + " " + describe(options),
                     random.chance(0.5) ? Kept::everything : Kept::inverses);
  }
}

TEST(GdnLayer, AgreesWithTheReferenceAtLargerHeads) {
  const auto p = random_problem(uneven, row({100, 64, -2, 30}), 3, Given::everything);
  expect_agreement(stored_as<float>(p), {}, 5e-6, "f32");
  expect_agreement(stored_as<float>(p), {.recurrence = Recurrence::token_by_token}, 5e-6,
                   "f32 token by token");
  expect_agreement(stored_as<float>(p), {.recurrence = Recurrence::chunked}, 5e-6, "f32 chunked");
  expect_agreement(stored_as<bfloat16, float>(p), {}, 5e-6, "bf16 storage, unrounded results");
}

TEST(GdnLayer, EveryOptionIsObeyed) {
  const auto plain = random_problem(small, gaps, 4, Given::everything);
  const auto expect = [&](const Options& options, const std::string& name) {
    auto p = stored_as<bfloat16>(plain);
    p.options = options;
    p.options.initial_segment = plain.options.initial_segment;
    // Rounding of the convolution's output is not the double reference's: same storage for both.
    const auto out = layer_forward(p);
    const auto expected = reference_forward(p);
    EXPECT_TRUE(close(out.o, expected.o, 5e-6)) << name;
    const auto gradients = layer_backward(p);
    const auto expected_gradients = reference_backward(p);
    EXPECT_TRUE(close(gradients.d_qkv, expected_gradients.d_qkv, 5e-6)) << name;
    EXPECT_TRUE(close(gradients.d_b, expected_gradients.d_b, 5e-6)) << name;
    EXPECT_TRUE(close(gradients.d_a, expected_gradients.d_a, 5e-6)) << name;
    const auto without = layer_forward(stored_as<bfloat16>(plain));
    EXPECT_FALSE(close(out.o, without.o, 1e-4)) << name << " changes something";
  };
  expect({.eps = 0.3}, "eps");
  expect({.eps = 1.5, .norm = NormMode::clamp}, "clamp");
  expect({.beta_range = BetaRange::doubled}, "doubled");
  expect({.conv_output = ConvOutput::storage}, "storage");

  auto unnormed = stored_as<float>(plain);
  for (float& x : unnormed.qkv) {
    x *= 0.3F;  // beta |k|^2 stays below 2
  }
  unnormed.options.norm = NormMode::none;
  const auto out = layer_forward(unnormed);
  EXPECT_TRUE(close(out.o, reference_forward(unnormed).o, 5e-6));
  EXPECT_TRUE(close(layer_backward(unnormed).d_qkv, reference_backward(unnormed).d_qkv, 5e-6));
}

double loss(const Problem<double>& p, const LayerOptions& options) {
  const auto out = layer_forward(p, options);
  return test::inner(out.o, p.d_o) +
         test::inner(out.final_recurrent_state, p.d_final_recurrent_state) +
         test::inner(out.final_conv_state, p.d_final_conv_state);
}

TEST(GdnLayer, EachInputsCotangentAgreesWithCentralDifferences) {
  struct Input {
    const char* name;
    Vector Problem<double>::*input;
    Vector Gradients<double>::*gradient;
  };
  constexpr std::array<Input, 9> every_input{{
      {"qkv", &Problem<double>::qkv, &Gradients<double>::d_qkv},
      {"conv_weight", &Problem<double>::conv_weight, &Gradients<double>::d_conv_weight},
      {"conv_bias", &Problem<double>::conv_bias, &Gradients<double>::d_conv_bias},
      {"a", &Problem<double>::a, &Gradients<double>::d_a},
      {"b", &Problem<double>::b, &Gradients<double>::d_b},
      {"A_log", &Problem<double>::A_log, &Gradients<double>::d_A_log},
      {"dt_bias", &Problem<double>::dt_bias, &Gradients<double>::d_dt_bias},
      {"conv_state", &Problem<double>::conv_state, &Gradients<double>::d_conv_state},
      {"recurrent_state", &Problem<double>::recurrent_state, &Gradients<double>::d_recurrent_state},
  }};
  constexpr Dims tiny{.key_heads = 1, .value_heads = 2, .key_dim = 3, .value_dim = 2, .kernel = 3};
  auto p = random_problem(tiny, gaps, 5, Given::everything);
  const LayerOptions options{.chunks = {.chunk = 4}};
  const Gradients<double> found = layer_backward(p, options);
  for (const Input& each : every_input) {
    Vector& input = p.*each.input;
    const Vector& actual = found.*each.gradient;
    ASSERT_EQ(actual.size(), input.size());
    const Vector expected =
        heddle::test::central_differences(input, [&] { return loss(p, options); });
    double scale = 1;
    for (const double x : expected) {
      scale = std::max(scale, std::abs(x));
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(actual[i], expected[i], 1e-6 * scale) << each.name << " " << i;
    }
  }
}

/// All inputs at once along a random direction.
TEST(GdnLayer, DirectionalDerivative) {
  Random random(6);
  const auto p = random_problem(small, row({21, -2, 13, 1}), 7, Given::everything);
  const LayerOptions options{.chunks = {.chunk = 8}};
  const auto gradients = layer_backward(p, options);
  auto above = p;
  auto below = p;
  double expected = 0;
  const double step = 1e-5;
  const auto move = [&](Vector Problem<double>::*input, const Vector& gradient) {
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const double direction = random.normal();
      (above.*input)[i] += step * direction;
      (below.*input)[i] -= step * direction;
      expected += gradient[i] * direction;
    }
  };
  move(&Problem<double>::qkv, gradients.d_qkv);
  move(&Problem<double>::conv_weight, gradients.d_conv_weight);
  move(&Problem<double>::conv_bias, gradients.d_conv_bias);
  move(&Problem<double>::a, gradients.d_a);
  move(&Problem<double>::b, gradients.d_b);
  move(&Problem<double>::A_log, gradients.d_A_log);
  move(&Problem<double>::dt_bias, gradients.d_dt_bias);
  move(&Problem<double>::conv_state, gradients.d_conv_state);
  move(&Problem<double>::recurrent_state, gradients.d_recurrent_state);
  const double found = (loss(above, options) - loss(below, options)) / (2 * step);
  EXPECT_NEAR(found, expected, 1e-7 * std::max(1.0, std::abs(expected)));
}

TEST(GdnLayer, StatesAreThoseOfTheReference) {
  for (const Ids& ids : {Ids(50, 3), gaps}) {
    auto p = random_problem(small, ids, 8, Given::everything);
    test::set_decay(p, [](std::int64_t t, std::int64_t) { return t % 3 == 0 ? -0.01 : -1e-3; });
    std::vector<double> m(static_cast<std::size_t>(small.state_rows() * small.key_dim),
                          test::poison<double>());
    auto expected_m = m;
    test::ForwardResult<double, double, double> found(p.dims);
    test::ForwardResult<double, double, double> expected(p.dims);
    const auto views = [&](auto& result, auto& transition) {
      const auto outputs = result.outputs(p.dims);
      return StatesOutputs<double>{.final_recurrent_state = outputs.final_recurrent_state,
                                   .final_conv_state = outputs.final_conv_state,
                                   .m = {transition.data(), small.state_rows(), small.key_dim}};
    };
    LayerScratch scratch;
    states(p.dims, p.inputs(), p.options, LayerOptions{.chunks = {.chunk = 8}}, views(found, m),
           ChunkResiduals<double>{}, scratch);
    reference::states(p.dims, p.inputs(), p.options, views(expected, expected_m));
    EXPECT_TRUE(close(found.final_recurrent_state, expected.final_recurrent_state, 1e-12));
    EXPECT_EQ(found.final_conv_state, expected.final_conv_state);
    EXPECT_TRUE(close(m, expected_m, 1e-12));
    if (&ids != &gaps && ids != gaps) {
      EXPECT_GT(
          difference(std::span<const double>(m), std::span<const double>(Vector(m.size()))).max_abs,
          0.1)
          << "a row of one document has a transition";
    }
  }
}

/// [0, T) against [0, t) and [t, T), states carried over, and their cotangents back.
TEST(GdnLayer, SplitsAnywhere) {
  const Ids ids = row({9, 1, 6});
  const auto whole = random_problem(small, ids, 9, Given::everything);
  const LayerOptions options{.chunks = {.chunk = 4}, .recurrence = Recurrence::chunked};
  const auto expected = layer_forward(whole, options);
  const auto expected_gradients = layer_backward(whole, options);
  for (std::int64_t t = 0; t <= whole.dims.tokens; ++t) {
    auto first = token_range(whole, 0, t);
    first.options.initial_segment = whole.options.initial_segment;
    first.conv_state = whole.conv_state;
    first.recurrent_state = whole.recurrent_state;
    const auto first_out = layer_forward(first, options);
    auto second = token_range(whole, t, whole.dims.tokens - t);
    second.options.initial_segment =
        Segments(first.segment_ids, first.options.initial_segment).final_segment();
    second.conv_state = first_out.final_conv_state;
    second.recurrent_state = first_out.final_recurrent_state;
    second.d_final_conv_state = whole.d_final_conv_state;
    second.d_final_recurrent_state = whole.d_final_recurrent_state;
    const auto second_out = layer_forward(second, options);
    const auto second_gradients = layer_backward(second, options);
    first.d_final_conv_state = second_gradients.d_conv_state;
    first.d_final_recurrent_state = second_gradients.d_recurrent_state;
    const auto first_gradients = layer_backward(first, options);
    const auto joined = [](Vector a, const Vector& b) {
      a.insert(a.end(), b.begin(), b.end());
      return a;
    };
    const auto sum = [](Vector a, const Vector& b) {
      for (std::size_t i = 0; i < a.size(); ++i) {
        a[i] += b[i];
      }
      return a;
    };
    const auto check = [&](const Vector& a, const Vector& e, const char* what) {
      EXPECT_TRUE(close(a, e, 1e-12)) << what << " at " << t;
    };
    check(joined(first_out.o, second_out.o), expected.o, "o");
    check(second_out.final_recurrent_state, expected.final_recurrent_state, "S");
    EXPECT_EQ(second_out.final_conv_state, expected.final_conv_state) << t;
    check(joined(first_gradients.d_qkv, second_gradients.d_qkv), expected_gradients.d_qkv, "d_qkv");
    check(joined(first_gradients.d_a, second_gradients.d_a), expected_gradients.d_a, "d_a");
    check(joined(first_gradients.d_b, second_gradients.d_b), expected_gradients.d_b, "d_b");
    check(first_gradients.d_conv_state, expected_gradients.d_conv_state, "d_conv_state");
    check(first_gradients.d_recurrent_state, expected_gradients.d_recurrent_state,
          "d_recurrent_state");
    check(sum(first_gradients.d_conv_weight, second_gradients.d_conv_weight),
          expected_gradients.d_conv_weight, "d_conv_weight");
    check(sum(first_gradients.d_A_log, second_gradients.d_A_log), expected_gradients.d_A_log,
          "d_A_log");
  }
}

}  // namespace
}  // namespace heddle::gdn

#include "heddle/gdn/reference.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/problem.hpp"
#include "support/finite_difference.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: repeat as tile (value head % key heads); the scale of
// q missing in forward or backward; norm on v; eps of the forward not that of the backward; an
// option ignored; a document's start ignored in the convolution alone or in the recurrence
// alone; the first value head's parameters used for all; a group's d_q or d_k taken from its
// last head; a final state's cotangent ignored, or the convolution's not returned to the state;
// a parameter cotangent overwritten instead of accumulated, or the other way round, or written
// where it is null; slices that write beyond their columns; padding left unwritten; a write
// before a check; o rounded twice.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::same_bits;
using heddle::test::thrown_text;
using test::ForwardResult;
using test::Given;
using test::Gradients;
using test::Problem;
using test::Random;
using test::random_problem;

using Vector = std::vector<double>;
using Ids = std::vector<std::int32_t>;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

constexpr Dims small{.key_heads = 2, .value_heads = 4, .key_dim = 3, .value_dim = 2, .kernel = 4};
const Ids packed{7, 7, 7, 0, 7, 7, 2, 3, 3, 0, 0, 3, 3, 7, 7, 7, 7, 0, 0};
const Ids pad_first{0, 0, 4, 4, 4, 0, 4, 2, 2, 9};

template <class S, class P, class A>
ForwardResult<A, S, A> forward(const Problem<S, P, A>& p) {
  ForwardResult<A, S, A> result(p.dims);
  reference::forward(p.dims, p.inputs(), p.options, result.outputs(p.dims));
  return result;
}

template <class S, class P, class A>
Gradients<A> backward(const Problem<S, P, A>& p) {
  Gradients<A> gradients(p);
  reference::backward(p.dims, p.inputs(), p.options, p.cotangents(), gradients.cotangents(p.dims));
  return gradients;
}

/// o . d_o + S_T . d_S_T + conv_state_T . d_conv_state_T
double loss(const Problem<double>& p) {
  const auto out = forward(p);
  return test::inner(out.o, p.d_o) +
         test::inner(out.final_recurrent_state, p.d_final_recurrent_state) +
         test::inner(out.final_conv_state, p.d_final_conv_state);
}

/// Every input that has a gradient, beside that gradient.
struct InputAndGradient {
  const char* name;
  Vector Problem<double>::*input;
  Vector Gradients<double>::*gradient;
};

constexpr std::array<InputAndGradient, 9> every_input{{
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

void expect_central_differences(Problem<double> p, const std::string& name) {
  const Gradients<double> found = backward(p);
  for (const InputAndGradient& each : every_input) {
    Vector& input = p.*each.input;
    const Vector& actual = found.*each.gradient;
    ASSERT_EQ(actual.size(), input.size());
    const Vector expected = heddle::test::central_differences(input, [&] { return loss(p); });
    double scale = 1;
    for (const double x : expected) {
      scale = std::max(scale, std::abs(x));
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(actual[i], expected[i], 1e-6 * scale) << name << ": " << each.name << " " << i;
    }
  }
}

/// The layer by its definition: each token looks at the tokens of its own document one by one, and
/// the state moves by explicit transitions. Nothing but the mathematics is shared with the library.
ForwardResult<double, double, double> by_definition(const Problem<double>& p) {
  const Dims& d = p.dims;
  const auto at = [](const Vector& values, std::int64_t row, std::int64_t width, std::int64_t col) {
    return values[static_cast<std::size_t>(row * width + col)];
  };
  // Document of each token, -1 for padding; 0 is the one that the row continues.
  std::vector<int> document;
  int started = 0;
  std::int32_t id = p.options.initial_segment;
  std::int64_t last = -1;
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    const std::int32_t own = p.segment_ids[static_cast<std::size_t>(t)];
    if (own > 0) {
      started += own != id ? 1 : 0;
      id = own;
      last = t;
    }
    document.push_back(own > 0 ? started : -1);
  }
  const auto raw = [&](std::int64_t position, int of, std::int64_t c) {
    if (position >= 0) {
      return document[static_cast<std::size_t>(position)] == of
                 ? at(p.qkv, position, d.qkv_columns(), c)
                 : 0.0;
    }
    return of == 0 && !p.conv_state.empty()
               ? at(p.conv_state, position + d.kernel - 1, d.qkv_columns(), c)
               : 0.0;
  };

  ForwardResult<double, double, double> out(d);
  std::fill(out.o.begin(), out.o.end(), 0.0);
  out.final_recurrent_state =
      p.recurrent_state.empty() ? Vector(out.final_recurrent_state.size(), 0.0) : p.recurrent_state;
  for (std::int64_t i = 0; i < d.kernel - 1; ++i) {
    for (std::int64_t c = 0; c < d.qkv_columns(); ++c) {
      double& slot = out.final_conv_state[static_cast<std::size_t>(i * d.qkv_columns() + c)];
      if (last >= 0) {
        slot = raw(last - (d.kernel - 2) + i, document[static_cast<std::size_t>(last)], c);
      } else {
        slot = p.conv_state.empty() ? 0.0 : at(p.conv_state, i, d.qkv_columns(), c);
      }
    }
  }
  int previous = 0;
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    const int own = document[static_cast<std::size_t>(t)];
    if (own < 0) {
      continue;
    }
    Vector y;
    for (std::int64_t c = 0; c < d.qkv_columns(); ++c) {
      double z = p.conv_bias.empty() ? 0.0 : p.conv_bias[static_cast<std::size_t>(c)];
      for (std::int64_t w = 0; w < d.kernel; ++w) {
        z += at(p.conv_weight, c, d.kernel, w) * raw(t - (d.kernel - 1) + w, own, c);
      }
      y.push_back(z / (1 + std::exp(-z)));
    }
    const auto unit = [&](std::int64_t first, std::int64_t i) {
      double squares = 0;
      for (std::int64_t c = 0; c < d.key_dim; ++c) {
        squares += y[static_cast<std::size_t>(first + c)] * y[static_cast<std::size_t>(first + c)];
      }
      const double x = y[static_cast<std::size_t>(first + i)];
      switch (p.options.norm) {
        case NormMode::root:
          return x / std::sqrt(squares + p.options.eps);
        case NormMode::clamp:
          return x / std::max(std::sqrt(squares), p.options.eps);
        case NormMode::none:
          break;
      }
      return x;
    };
    for (std::int64_t h = 0; h < d.value_heads; ++h) {
      const std::int64_t key_head = h / (d.value_heads / d.key_heads);
      const double beta = (p.options.beta_range == BetaRange::doubled ? 2 : 1) /
                          (1 + std::exp(-at(p.b, t, d.value_heads, h)));
      const double x = at(p.a, t, d.value_heads, h) + p.dt_bias[static_cast<std::size_t>(h)];
      const double decay = own == previous
                               ? std::exp(-std::exp(p.A_log[static_cast<std::size_t>(h)]) *
                                          (x > 30 ? x : std::log1p(std::exp(x))))
                               : 0.0;
      double* const state =
          &out.final_recurrent_state[static_cast<std::size_t>(h * d.key_dim * d.value_dim)];
      Vector next(static_cast<std::size_t>(d.key_dim * d.value_dim), 0.0);
      for (std::int64_t i = 0; i < d.key_dim; ++i) {
        const double k_i = unit((d.key_heads + key_head) * d.key_dim, i);
        const double q_i =
            unit(key_head * d.key_dim, i) / std::sqrt(static_cast<double>(d.key_dim));
        for (std::int64_t j = 0; j < d.value_dim; ++j) {
          double& s = next[static_cast<std::size_t>(i * d.value_dim + j)];
          for (std::int64_t l = 0; l < d.key_dim && own == previous; ++l) {
            const double k_l = unit((d.key_heads + key_head) * d.key_dim, l);
            s += decay * ((i == l ? 1.0 : 0.0) - beta * k_i * k_l) * state[l * d.value_dim + j];
          }
          s += beta * k_i *
               y[static_cast<std::size_t>(2 * d.key_heads * d.key_dim + h * d.value_dim + j)];
          out.o[static_cast<std::size_t>(t * d.output_columns() + h * d.value_dim + j)] += s * q_i;
        }
      }
      std::copy(next.begin(), next.end(), state);
    }
    previous = own;
  }
  return out;
}

void expect_definition(const Problem<double>& p, const std::string& name) {
  const auto found = forward(p);
  const auto expected = by_definition(p);
  EXPECT_TRUE(close(found.o, expected.o, 1e-12)) << name;
  EXPECT_TRUE(close(found.final_recurrent_state, expected.final_recurrent_state, 1e-12)) << name;
  if (p.dims.kernel > 1) {
    EXPECT_EQ(found.final_conv_state, expected.final_conv_state) << name;
  }
}

TEST(GdnReference, AgreesWithTheDefinition) {
  expect_definition(random_problem(small, packed, 1), "packed");
  expect_definition(random_problem(small, packed, 2, Given::everything), "states and bias");
  expect_definition(random_problem(small, pad_first, 3, Given::bias), "padding first");
  expect_definition(random_problem(small, {5, 5}, 4, Given::states), "shorter than the window");
  expect_definition(random_problem(small, {5}, 5, Given::everything), "one token");
  Problem<double> other = random_problem(small, packed, 6, Given::everything);
  other.options.initial_segment = 8;
  expect_definition(other, "states of another document");
  other.conv_state.clear();
  other.recurrent_state.clear();
  other.options.initial_segment = packed[0];
  expect_definition(other, "continued without states");
  const Dims shapes[] = {
      {.key_heads = 1, .value_heads = 1, .key_dim = 1, .value_dim = 1, .kernel = 1},
      {.key_heads = 1, .value_heads = 3, .key_dim = 9, .value_dim = 5, .kernel = 2},
      {.key_heads = 3, .value_heads = 3, .key_dim = 2, .value_dim = 11, .kernel = 5},
      {.key_heads = 2, .value_heads = 6, .key_dim = 4, .value_dim = 4, .kernel = 7},
  };
  for (const Dims& shape : shapes) {
    expect_definition(random_problem(shape, packed, 7, Given::everything), "other shapes");
  }
}

TEST(GdnReference, EachOptionDoesWhatItSays) {
  for (const NormMode norm : {NormMode::root, NormMode::clamp, NormMode::none}) {
    for (const BetaRange range : {BetaRange::unit, BetaRange::doubled}) {
      Problem<double> p = random_problem(small, packed, 11, Given::everything);
      p.options.norm = norm;
      p.options.beta_range = range;
      p.options.eps = 0.3;  // of the size of the norms: above some, below others
      for (double& x : p.conv_weight) {
        x *= 0.5;  // without norm, beta k^2 stays below 2
      }
      expect_definition(p, "options");
    }
  }
}

TEST(GdnReference, GradientsAgreeWithCentralDifferences) {
  expect_central_differences(random_problem(small, packed, 21, Given::everything), "everything");
  expect_central_differences(random_problem(small, packed, 22), "no states, no bias");
  expect_central_differences(random_problem(small, pad_first, 23, Given::bias), "padding first");
  for (std::int64_t tokens = 0; tokens <= 5; ++tokens) {
    expect_central_differences(
        random_problem(small, Ids(static_cast<std::size_t>(tokens), 5), 24, Given::everything),
        std::to_string(tokens) + " tokens");
  }
  Problem<double> other = random_problem(small, packed, 25, Given::states);
  other.options.initial_segment = 8;
  expect_central_differences(other, "states of another document");
  EXPECT_EQ(backward(other).d_conv_state, Vector(other.conv_state.size(), 0.0));
  EXPECT_EQ(backward(other).d_recurrent_state, Vector(other.recurrent_state.size(), 0.0));
  Problem<double> without = random_problem(small, packed, 26, Given::states);
  without.d_final_conv_state.clear();
  without.d_final_recurrent_state.clear();
  expect_central_differences(without, "no cotangents of states");
  const Dims shape{.key_heads = 1, .value_heads = 3, .key_dim = 2, .value_dim = 3, .kernel = 1};
  expect_central_differences(random_problem(shape, packed, 27, Given::everything), "kernel of one");
}

TEST(GdnReference, GradientsUnderEachOptionAgreeWithCentralDifferences) {
  for (const NormMode norm : {NormMode::root, NormMode::clamp, NormMode::none}) {
    for (const BetaRange range : {BetaRange::unit, BetaRange::doubled}) {
      Problem<double> p = random_problem(small, {5, 5, 5, 0, 5, 2, 2}, 31, Given::everything);
      p.options.norm = norm;
      p.options.beta_range = range;
      p.options.eps = 0.3;
      for (double& x : p.conv_weight) {
        x *= 0.5;
      }
      expect_central_differences(p, "norm " + std::to_string(static_cast<int>(norm)) + ", range " +
                                        std::to_string(static_cast<int>(range)));
    }
  }
}

TEST(GdnReference, TheWholeGradientAgreesAlongRandomDirections) {
  Problem<double> p = random_problem(small, packed, 33, Given::everything);
  const Gradients<double> gradients = backward(p);
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    Random random(seed);
    double expected = 0;
    Problem<double> above = p;
    Problem<double> below = p;
    const double step = 1e-5;
    for (const InputAndGradient& each : every_input) {
      const Vector direction =
          random.normals<double>(static_cast<std::int64_t>((p.*each.input).size()));
      expected += test::inner(direction, gradients.*each.gradient);
      for (std::size_t i = 0; i < direction.size(); ++i) {
        (above.*each.input)[i] += step * direction[i];
        (below.*each.input)[i] -= step * direction[i];
      }
    }
    EXPECT_NEAR((loss(above) - loss(below)) / (2 * step) / expected, 1, 1e-7);
  }
}

/// The log decays that have to work.
double regime(int index, std::int64_t token) {
  const double each[] = {
      0,  -1e-3, -0.02 * static_cast<double>(token % 10), -1,
      -5, -16,   token % 3 == 2 ? -200 : -0.01,           token % 5 == 3 ? -1e4 : -0.1};
  return each[index];
}

TEST(GdnReference, GradientsInEveryDecayRegimeAgreeWithCentralDifferences) {
  const Dims shape{.key_heads = 1, .value_heads = 2, .key_dim = 2, .value_dim = 2, .kernel = 3};
  for (int index = 0; index < 8; ++index) {
    Problem<double> p =
        random_problem(shape, {3, 3, 3, 3, 3, 3, 0, 3, 1, 1, 1, 1}, 35, Given::states);
    test::set_decay(p, [&](std::int64_t t, std::int64_t) { return regime(index, t); });
    expect_definition(p, "regime " + std::to_string(index));
    expect_central_differences(p, "regime " + std::to_string(index));
  }
}

TEST(GdnReference, FloatFollowsDoubleInEveryDecayRegime) {
  const Dims shape{.key_heads = 2, .value_heads = 4, .key_dim = 16, .value_dim = 16};
  Ids ids(150, 3);
  std::fill(ids.begin() + 90, ids.end(), 4);
  double worst = 0;
  for (int index = 0; index < 8; ++index) {
    Problem<double> p = random_problem(shape, ids, 37, Given::everything);
    test::set_decay(p, [&](std::int64_t t, std::int64_t) { return regime(index, t); });
    const Problem<float> narrow = test::stored_as<float>(p);
    const auto compare = [&](const std::vector<float>& found, const Vector& expected,
                             const char* what) {
      if (std::all_of(expected.begin(), expected.end(), [](double x) { return x == 0; })) {
        EXPECT_TRUE(std::all_of(found.begin(), found.end(), [](float x) { return x == 0; }))
            << what;
        return;
      }
      const auto difference = heddle::test::difference<float, double>(found, expected);
      EXPECT_EQ(difference.mismatch, "");
      EXPECT_LT(difference.error, 5e-6) << what << " in regime " << index;
      worst = std::max(worst, difference.error);
    };
    const auto out = forward(narrow);
    const auto wide_out = forward(p);
    compare(out.o, wide_out.o, "o");
    compare(out.final_recurrent_state, wide_out.final_recurrent_state, "final_recurrent_state");
    const auto d = backward(narrow);
    const auto wide = backward(p);
    compare(d.d_qkv, wide.d_qkv, "d_qkv");
    compare(d.d_conv_weight, wide.d_conv_weight, "d_conv_weight");
    compare(d.d_conv_bias, wide.d_conv_bias, "d_conv_bias");
    compare(d.d_a, wide.d_a, "d_a");
    compare(d.d_b, wide.d_b, "d_b");
    compare(d.d_A_log, wide.d_A_log, "d_A_log");
    compare(d.d_dt_bias, wide.d_dt_bias, "d_dt_bias");
    compare(d.d_conv_state, wide.d_conv_state, "d_conv_state");
    compare(d.d_recurrent_state, wide.d_recurrent_state, "d_recurrent_state");
  }
  RecordProperty("worst", std::to_string(worst));
}

/// Rows [first, first + count) of o and of the token gradients.
struct DocumentBits {
  std::vector<float> o, d_qkv, d_a, d_b;
};

DocumentBits document_bits(const Problem<float>& p, std::int64_t first, std::int64_t count) {
  const auto out = forward(p);
  const auto d = backward(p);
  return {test::rows_of(out.o, p.dims.output_columns(), first, count),
          test::rows_of(d.d_qkv, p.dims.qkv_columns(), first, count),
          test::rows_of(d.d_a, p.dims.value_heads, first, count),
          test::rows_of(d.d_b, p.dims.value_heads, first, count)};
}

void expect_same_document(const DocumentBits& found, const DocumentBits& expected,
                          const std::string& name) {
  EXPECT_TRUE(same_bits(found.o, expected.o)) << name;
  EXPECT_TRUE(same_bits(found.d_qkv, expected.d_qkv)) << name;
  EXPECT_TRUE(same_bits(found.d_a, expected.d_a)) << name;
  EXPECT_TRUE(same_bits(found.d_b, expected.d_b)) << name;
}

TEST(GdnReference, ADocumentIsTheSameAloneAndAnywhereInARow) {
  // The document under test has id 5; everything around it changes.
  const Ids rows[] = {
      {0, 0, 0, 5, 5, 5, 5, 5, 5},
      {5, 5, 5, 5, 5, 5, 0, 0},
      {1, 1, 1, 5, 5, 5, 5, 5, 5, 2, 2, 2},
      {1, 0, 0, 1, 5, 5, 5, 5, 5, 5, 0, 3, 3, 0},
      {5, 1, 5, 5, 5, 5, 5, 5, 1, 5},
      {1, 2, 3, 4, 9, 8, 7, 6, 1, 2, 5, 5, 5, 5, 5, 5, 0, 0, 0, 0},
  };
  const std::int64_t starts[] = {3, 0, 3, 4, 2, 10};
  for (std::size_t i = 0; i < std::size(rows); ++i) {
    Problem<double> wide = random_problem(small, rows[i], 41 + i, Given::bias);
    wide.d_final_conv_state.clear();
    wide.d_final_recurrent_state.clear();
    const Problem<float> row = test::stored_as<float>(wide);
    const Problem<float> alone = test::token_range(row, starts[i], 6);
    expect_same_document(document_bits(row, starts[i], 6), document_bits(alone, 0, 6),
                         "row " + std::to_string(i));
  }
}

TEST(GdnReference, NanInOneDocumentOrInPaddingReachesNoOther) {
  const Ids ids{7, 7, 7, 0, 5, 5, 5, 5, 0, 5, 3, 3, 0, 0};
  Problem<float> p = test::stored_as<float>(random_problem(small, ids, 51, Given::states));
  p.d_final_conv_state.clear();
  p.d_final_recurrent_state.clear();
  const DocumentBits expected = document_bits(p, 4, 6);
  const auto poison_row = [&](std::int64_t t) {
    const auto fill = [&](std::vector<float>& values, std::int64_t cols) {
      std::fill_n(values.begin() + t * cols, cols, std::numeric_limits<float>::quiet_NaN());
    };
    fill(p.qkv, p.dims.qkv_columns());
    fill(p.a, p.dims.value_heads);
    fill(p.b, p.dims.value_heads);
    fill(p.d_o, p.dims.output_columns());
  };
  for (const std::int64_t padding : {3, 8, 12, 13}) {
    poison_row(padding);
  }
  expect_same_document(document_bits(p, 4, 6), expected, "padding");
  const auto d = backward(p);
  for (const float value : d.d_conv_weight) {
    EXPECT_TRUE(std::isfinite(value)) << "padding reaches no parameter either";
  }
  const auto out = forward(p);
  for (const std::int64_t padding : {3, 8, 12, 13}) {
    for (const float value : test::rows_of(out.o, p.dims.output_columns(), padding, 1)) {
      EXPECT_EQ(value, 0.0F);
    }
    for (const float value : test::rows_of(d.d_qkv, p.dims.qkv_columns(), padding, 1)) {
      EXPECT_EQ(value, 0.0F);
    }
    for (const float value : test::rows_of(d.d_a, p.dims.value_heads, padding, 1)) {
      EXPECT_EQ(value, 0.0F);
    }
    for (const float value : test::rows_of(d.d_b, p.dims.value_heads, padding, 1)) {
      EXPECT_EQ(value, 0.0F);
    }
  }
  for (const std::int64_t other : {0, 1, 2, 10, 11}) {
    poison_row(other);
  }
  std::fill(p.recurrent_state.begin(), p.recurrent_state.end(),
            std::numeric_limits<float>::quiet_NaN());
  expect_same_document(document_bits(p, 4, 6), expected, "other documents");
}

TEST(GdnReference, ANanStateOfAnotherDocumentIsNeverRead) {
  Problem<double> p = random_problem(small, packed, 53, Given::states);
  p.options.initial_segment = 0;
  const auto expected = forward(p);
  const auto d_expected = backward(p);
  std::fill(p.conv_state.begin(), p.conv_state.end(), nan);
  std::fill(p.recurrent_state.begin(), p.recurrent_state.end(), nan);
  const auto found = forward(p);
  EXPECT_TRUE(same_bits(found.o, expected.o));
  EXPECT_TRUE(same_bits(found.final_recurrent_state, expected.final_recurrent_state));
  EXPECT_TRUE(same_bits(found.final_conv_state, expected.final_conv_state));
  const auto d = backward(p);
  for (const InputAndGradient& each : every_input) {
    EXPECT_TRUE(same_bits(d.*each.gradient, d_expected.*each.gradient)) << each.name;
  }
  EXPECT_EQ(d.d_conv_state, Vector(p.conv_state.size(), 0.0));
  EXPECT_EQ(d.d_recurrent_state, Vector(p.recurrent_state.size(), 0.0));
}

TEST(GdnReference, ARowSplitAnywhereIsTheSameRow) {
  const Ids ids{7, 7, 7, 7, 0, 7, 7, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3};
  const Problem<double> whole = random_problem(small, ids, 61, Given::everything);
  const auto expected = forward(whole);
  const auto d_expected = backward(whole);
  const auto tokens = whole.dims.tokens;
  for (std::int64_t cut = 0; cut <= tokens; ++cut) {
    // A state stands for its document up to its last token: padding cannot be split from it.
    if (cut < tokens && (ids[static_cast<std::size_t>(cut)] == 0 ||
                         (cut > 0 && ids[static_cast<std::size_t>(cut - 1)] == 0))) {
      continue;
    }
    Problem<double> first = test::token_range(whole, 0, cut);
    first.options.initial_segment = whole.options.initial_segment;
    first.conv_state = whole.conv_state;
    first.recurrent_state = whole.recurrent_state;
    const auto first_out = forward(first);

    Problem<double> second = test::token_range(whole, cut, tokens - cut);
    second.options.initial_segment =
        Segments(first.segment_ids, first.options.initial_segment).final_segment();
    second.conv_state = first_out.final_conv_state;
    second.recurrent_state = first_out.final_recurrent_state;
    second.d_final_conv_state = whole.d_final_conv_state;
    second.d_final_recurrent_state = whole.d_final_recurrent_state;
    const auto second_out = forward(second);

    Vector o = first_out.o;
    o.insert(o.end(), second_out.o.begin(), second_out.o.end());
    EXPECT_TRUE(same_bits(o, expected.o)) << cut;
    EXPECT_TRUE(same_bits(second_out.final_recurrent_state, expected.final_recurrent_state)) << cut;
    EXPECT_TRUE(same_bits(second_out.final_conv_state, expected.final_conv_state)) << cut;

    const Gradients<double> second_d = backward(second);
    first.d_final_conv_state = second_d.d_conv_state;
    first.d_final_recurrent_state = second_d.d_recurrent_state;
    Gradients<double> d(first);
    d.d_conv_weight = second_d.d_conv_weight;
    d.d_conv_bias = second_d.d_conv_bias;
    d.d_A_log = second_d.d_A_log;
    d.d_dt_bias = second_d.d_dt_bias;
    reference::backward(first.dims, first.inputs(), first.options, first.cotangents(),
                        d.cotangents(first.dims, Write::accumulate));
    d.d_qkv.insert(d.d_qkv.end(), second_d.d_qkv.begin(), second_d.d_qkv.end());
    d.d_a.insert(d.d_a.end(), second_d.d_a.begin(), second_d.d_a.end());
    d.d_b.insert(d.d_b.end(), second_d.d_b.begin(), second_d.d_b.end());
    for (const InputAndGradient& each : every_input) {
      EXPECT_TRUE(close(d.*each.gradient, d_expected.*each.gradient, 1e-12))
          << each.name << " cut at " << cut;
    }
  }
}

TEST(GdnReference, StatesOnlyGivesTheSameStates) {
  for (const Ids& ids : {packed, Ids{5, 5, 5, 0, 5}, Ids{5}, Ids{}}) {
    const Problem<float> p = test::stored_as<float>(random_problem(small, ids, 63, Given::states));
    const auto expected = forward(p);
    ForwardResult<float, float, float> found(p.dims);
    std::vector<float> m(static_cast<std::size_t>(p.dims.state_rows() * p.dims.key_dim),
                         test::poison<float>());
    const auto outputs = found.outputs(p.dims);
    reference::states(p.dims, p.inputs(), p.options,
                      StatesOutputs<float>{.final_recurrent_state = outputs.final_recurrent_state,
                                           .final_conv_state = outputs.final_conv_state,
                                           .m = {m.data(), p.dims.state_rows(), p.dims.key_dim}});
    EXPECT_TRUE(same_bits(found.final_recurrent_state, expected.final_recurrent_state));
    EXPECT_TRUE(same_bits(found.final_conv_state, expected.final_conv_state));
  }
}

/// m of each value head, [state_rows, key_dim].
Vector transition(const Problem<double>& p) {
  Vector m(static_cast<std::size_t>(p.dims.state_rows() * p.dims.key_dim), nan);
  reference::states(p.dims, p.inputs(), p.options,
                    StatesOutputs<double>{.m = {m.data(), p.dims.state_rows(), p.dims.key_dim}});
  return m;
}

TEST(GdnReference, TheTransitionAndTheStatesWithoutAStateGiveTheStatesWithOne) {
  Problem<double> p = random_problem(small, {5, 5, 0, 5, 5, 5}, 65, Given::states);
  const Vector m = transition(p);
  const Vector with = forward(p).final_recurrent_state;
  const Vector state = std::exchange(p.recurrent_state, Vector());
  const Vector without = forward(p).final_recurrent_state;
  for (std::int64_t h = 0; h < 4; ++h) {
    for (std::int64_t i = 0; i < 3; ++i) {
      for (std::int64_t j = 0; j < 2; ++j) {
        double carried = 0;
        for (std::int64_t l = 0; l < 3; ++l) {
          carried += m[static_cast<std::size_t>((h * 3 + i) * 3 + l)] *
                     state[static_cast<std::size_t>((h * 3 + l) * 2 + j)];
        }
        const auto at = static_cast<std::size_t>((h * 3 + i) * 2 + j);
        EXPECT_NEAR(with[at], carried + without[at], 1e-13);
      }
    }
  }
}

TEST(GdnReference, TheTransitionIsZeroWhereADocumentStarts) {
  EXPECT_EQ(transition(random_problem(small, packed, 67, Given::states)), Vector(36, 0.0));
  EXPECT_EQ(transition(random_problem(small, {5, 5, 5}, 67)), Vector(36, 0.0))
      << "nothing is continued: the first token starts a document";
  const Vector m = transition(random_problem(small, {0, 0}, 67));
  for (std::size_t i = 0; i < 36; ++i) {
    EXPECT_EQ(m[i], i / 3 % 3 == i % 3 ? 1.0 : 0.0);
  }
}

TEST(GdnReference, TheOutputIsAffineInTheInitialState) {
  Problem<double> p = random_problem(small, {5, 5, 5, 5, 5}, 69, Given::states);
  const Vector once = forward(p).o;
  for (double& x : p.recurrent_state) {
    x *= 2;
  }
  const Vector twice = forward(p).o;
  p.recurrent_state.assign(p.recurrent_state.size(), 0.0);
  const Vector none = forward(p).o;
  Vector from_one;
  Vector from_two;
  for (std::size_t i = 0; i < once.size(); ++i) {
    from_one.push_back(2 * (once[i] - none[i]));
    from_two.push_back(twice[i] - none[i]);
  }
  EXPECT_TRUE(close(from_two, from_one, 1e-12));
}

TEST(GdnReference, KeyHeadsMoveWithTheirValueHeads) {
  const Dims shape{.key_heads = 3, .value_heads = 6, .key_dim = 2, .value_dim = 3};
  const Problem<float> p =
      test::stored_as<float>(random_problem(shape, packed, 71, Given::everything));
  const Dims& d = p.dims;
  const std::array<std::int64_t, 3> from{2, 0, 1};  // key head i of the other problem
  std::vector<std::int64_t> columns(static_cast<std::size_t>(d.qkv_columns()));
  std::vector<std::int64_t> heads(6);
  for (std::int64_t i = 0; i < 3; ++i) {
    const std::int64_t source = from[static_cast<std::size_t>(i)];
    const auto move = [&](std::int64_t to, std::int64_t first, std::int64_t count) {
      std::iota(columns.begin() + to, columns.begin() + to + count, first);
    };
    move(d.query_column(i), d.query_column(source), d.key_dim);
    move(d.key_column(i), d.key_column(source), d.key_dim);
    move(d.value_column(2 * i), d.value_column(2 * source), 2 * d.value_dim);
    heads[static_cast<std::size_t>(2 * i)] = 2 * source;
    heads[static_cast<std::size_t>(2 * i + 1)] = 2 * source + 1;
  }
  // `values` with its columns (blocks of `width`) in the order of `source`.
  const auto permuted = [](const std::vector<float>& values,
                           const std::vector<std::int64_t>& source, std::int64_t width) {
    std::vector<float> result;
    const auto cols = static_cast<std::int64_t>(source.size()) * width;
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(values.size()) / cols; ++row) {
      for (const std::int64_t block : source) {
        const auto first = values.begin() + row * cols + block * width;
        result.insert(result.end(), first, first + width);
      }
    }
    return result;
  };
  Problem<float> moved = p;
  moved.qkv = permuted(p.qkv, columns, 1);
  moved.conv_weight = permuted(p.conv_weight, columns, d.kernel);
  moved.conv_bias = permuted(p.conv_bias, columns, 1);
  moved.conv_state = permuted(p.conv_state, columns, 1);
  moved.d_final_conv_state = permuted(p.d_final_conv_state, columns, 1);
  moved.a = permuted(p.a, heads, 1);
  moved.b = permuted(p.b, heads, 1);
  moved.A_log = permuted(p.A_log, heads, 1);
  moved.dt_bias = permuted(p.dt_bias, heads, 1);
  moved.d_o = permuted(p.d_o, heads, d.value_dim);
  moved.recurrent_state = permuted(p.recurrent_state, heads, d.key_dim * d.value_dim);
  moved.d_final_recurrent_state =
      permuted(p.d_final_recurrent_state, heads, d.key_dim * d.value_dim);
  EXPECT_TRUE(same_bits(forward(moved).o, permuted(forward(p).o, heads, d.value_dim)));
  const auto found = backward(moved);
  const auto expected = backward(p);
  EXPECT_TRUE(same_bits(found.d_qkv, permuted(expected.d_qkv, columns, 1)));
  EXPECT_TRUE(same_bits(found.d_conv_weight, permuted(expected.d_conv_weight, columns, d.kernel)));
  EXPECT_TRUE(same_bits(found.d_A_log, permuted(expected.d_A_log, heads, 1)));
  EXPECT_TRUE(same_bits(found.d_recurrent_state,
                        permuted(expected.d_recurrent_state, heads, d.key_dim * d.value_dim)));

  // Inside a group everything but the order of two sums stays.
  Problem<float> swapped = p;
  for (std::int64_t c = 0; c < d.qkv_columns(); ++c) {
    columns[static_cast<std::size_t>(c)] = c;
  }
  std::iota(columns.begin() + d.value_column(0), columns.begin() + d.value_column(1),
            d.value_column(1));
  std::iota(columns.begin() + d.value_column(1), columns.begin() + d.value_column(2),
            d.value_column(0));
  heads = {1, 0, 2, 3, 4, 5};
  swapped.qkv = permuted(p.qkv, columns, 1);
  swapped.conv_weight = permuted(p.conv_weight, columns, d.kernel);
  swapped.conv_bias = permuted(p.conv_bias, columns, 1);
  swapped.conv_state = permuted(p.conv_state, columns, 1);
  swapped.a = permuted(p.a, heads, 1);
  swapped.b = permuted(p.b, heads, 1);
  swapped.A_log = permuted(p.A_log, heads, 1);
  swapped.dt_bias = permuted(p.dt_bias, heads, 1);
  swapped.recurrent_state = permuted(p.recurrent_state, heads, d.key_dim * d.value_dim);
  EXPECT_TRUE(same_bits(forward(swapped).o, permuted(forward(p).o, heads, d.value_dim)));
}

TEST(GdnReference, NoTokenPassesEverythingThrough) {
  for (const Ids& ids : {Ids{}, Ids{0, 0, 0}, Ids{0}}) {
    for (const std::int32_t initial : {0, 5}) {
      Problem<double> p = random_problem(small, ids, 73, Given::everything);
      p.options.initial_segment = initial;
      std::fill(p.qkv.begin(), p.qkv.end(), nan);
      std::fill(p.a.begin(), p.a.end(), nan);
      std::fill(p.b.begin(), p.b.end(), nan);
      std::fill(p.d_o.begin(), p.d_o.end(), nan);
      const auto out = forward(p);
      EXPECT_EQ(out.o, Vector(out.o.size(), 0.0));
      EXPECT_EQ(out.final_recurrent_state, p.recurrent_state);
      EXPECT_EQ(out.final_conv_state, p.conv_state);
      const auto d = backward(p);
      EXPECT_EQ(d.d_recurrent_state, p.d_final_recurrent_state);
      EXPECT_EQ(d.d_conv_state, p.d_final_conv_state);
      for (const Vector* zero :
           {&d.d_qkv, &d.d_a, &d.d_b, &d.d_conv_weight, &d.d_conv_bias, &d.d_A_log, &d.d_dt_bias}) {
        EXPECT_EQ(*zero, Vector(zero->size(), 0.0));
      }
    }
  }
  const auto out = forward(random_problem(small, {0}, 74));
  EXPECT_EQ(out.final_recurrent_state, Vector(out.final_recurrent_state.size(), 0.0));
  EXPECT_EQ(out.final_conv_state, Vector(out.final_conv_state.size(), 0.0));
}

TEST(GdnReference, AConvolutionOfZeroLeavesAFiniteLargeJacobian) {
  Problem<double> p = random_problem(small, {5, 5, 5}, 75, Given::states);
  std::fill(p.qkv.begin(), p.qkv.end(), 0.0);
  std::fill(p.conv_state.begin(), p.conv_state.end(), 0.0);
  const auto out = forward(p);
  EXPECT_EQ(out.o, Vector(out.o.size(), 0.0)) << "q = 0 reads nothing";
  const auto d = backward(p);
  double largest = 0;
  for (const double x : d.d_qkv) {
    ASSERT_TRUE(std::isfinite(x));
    largest = std::max(largest, std::abs(x));
  }
  EXPECT_GT(largest, 10) << "1 / sqrt(eps) = 1000 times half the tap";
}

TEST(GdnReference, WithoutWritingTheStateOnlyDecays) {
  Problem<double> p = random_problem(small, {5, 5, 5, 5}, 77, Given::states);
  std::fill(p.b.begin(), p.b.end(), -1e4);
  test::set_decay(p, [](std::int64_t t, std::int64_t h) {
    return -0.1 * static_cast<double>(t + 1) - 0.01 * static_cast<double>(h);
  });
  const Vector found = forward(p).final_recurrent_state;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto h = static_cast<double>(i / 6);
    EXPECT_NEAR(found[i], std::exp(-1.0 - 0.04 * h) * p.recurrent_state[i], 1e-6);
  }
}

TEST(GdnReference, AnOverflowingDecayInputCutsAndHasNoGradient) {
  Problem<double> p = random_problem(small, {5, 5, 5, 5, 5}, 79, Given::states);
  std::fill_n(p.a.begin() + 2 * 4, 4, 1e4);
  std::fill_n(p.a.begin() + 3 * 4, 4, -1e4);
  const auto out = forward(p);
  const auto d = backward(p);
  for (const double x : d.d_qkv) {
    ASSERT_TRUE(std::isfinite(x));
  }
  for (std::size_t h = 0; h < 4; ++h) {
    EXPECT_EQ(d.d_a[2 * 4 + h], 0) << "the decay underflows";
    EXPECT_EQ(d.d_a[3 * 4 + h], 0) << "the sigmoid underflows";
    EXPECT_NE(d.d_a[4 * 4 + h], 0);
  }
  // For the recurrence the same as a start; the convolution goes on.
  std::fill(p.recurrent_state.begin(), p.recurrent_state.end(), 0.0);
  EXPECT_EQ(test::rows_of(forward(p).o, p.dims.output_columns(), 2, 3),
            test::rows_of(out.o, p.dims.output_columns(), 2, 3));
}

TEST(GdnReference, ParametersAreOverwrittenOrAddedToOrLeftAlone) {
  const Problem<double> p = random_problem(small, packed, 81, Given::everything);
  const Gradients<double> expected = backward(p);
  using Parameter = Vector Gradients<double>::*;
  const Parameter parameters[] = {&Gradients<double>::d_conv_weight,
                                  &Gradients<double>::d_conv_bias, &Gradients<double>::d_A_log,
                                  &Gradients<double>::d_dt_bias};
  Gradients<double> added(p);
  for (const Parameter parameter : parameters) {
    (added.*parameter).assign((added.*parameter).size(), 3.0);
  }
  reference::backward(p.dims, p.inputs(), p.options, p.cotangents(),
                      added.cotangents(p.dims, Write::accumulate));
  for (const Parameter parameter : parameters) {
    for (std::size_t i = 0; i < (added.*parameter).size(); ++i) {
      EXPECT_EQ((added.*parameter)[i], 3.0 + (expected.*parameter)[i]);
    }
  }
  // Each null on its own: the others are what they were.
  for (int null = 0; null < 6; ++null) {
    Gradients<double> found(p);
    Cotangents<double> wanted = found.cotangents(p.dims);
    switch (null) {
      case 0:
        wanted.d_conv_weight = {};
        found.d_conv_weight = expected.d_conv_weight;
        break;
      case 1:
        wanted.d_conv_bias = {};
        found.d_conv_bias = expected.d_conv_bias;
        break;
      case 2:
        wanted.d_A_log = {};
        found.d_A_log = expected.d_A_log;
        break;
      case 3:
        wanted.d_dt_bias = {};
        found.d_dt_bias = expected.d_dt_bias;
        break;
      case 4:
        wanted.d_conv_state = {};
        found.d_conv_state = expected.d_conv_state;
        break;
      default:
        wanted.d_recurrent_state = {};
        found.d_recurrent_state = expected.d_recurrent_state;
        break;
    }
    reference::backward(p.dims, p.inputs(), p.options, p.cotangents(), wanted);
    for (const InputAndGradient& each : every_input) {
      EXPECT_TRUE(same_bits(found.*each.gradient, expected.*each.gradient))
          << each.name << " with null " << null;
    }
  }
}

TEST(GdnReference, StatesAreUpdatedInPlace) {
  for (const Ids& ids : {packed, Ids{5, 5}, Ids{0}}) {
    const Problem<double> p = random_problem(small, ids, 83, Given::states);
    const auto expected = forward(p);
    Problem<double> in_place = p;
    ForwardResult<double, double, double> result(p.dims);
    Outputs<double, double> outputs = result.outputs(p.dims);
    outputs.final_recurrent_state =
        test::matrix(in_place.recurrent_state, p.dims.state_rows(), p.dims.value_dim);
    outputs.final_conv_state =
        test::matrix(in_place.conv_state, p.dims.window_rows(), p.dims.qkv_columns());
    reference::forward(p.dims, in_place.inputs(), p.options, outputs);
    EXPECT_TRUE(same_bits(result.o, expected.o));
    EXPECT_TRUE(same_bits(in_place.recurrent_state, expected.final_recurrent_state));
    EXPECT_TRUE(same_bits(in_place.conv_state, expected.final_conv_state));

    const auto d_expected = backward(p);
    in_place = p;
    Gradients<double> gradients(p);
    Cotangents<double> wanted = gradients.cotangents(p.dims);
    wanted.d_recurrent_state =
        test::matrix(in_place.d_final_recurrent_state, p.dims.state_rows(), p.dims.value_dim);
    wanted.d_conv_state =
        test::matrix(in_place.d_final_conv_state, p.dims.window_rows(), p.dims.qkv_columns());
    reference::backward(p.dims, p.inputs(), p.options, in_place.cotangents(), wanted);
    EXPECT_TRUE(same_bits(gradients.d_qkv, d_expected.d_qkv));
    EXPECT_TRUE(same_bits(in_place.d_final_recurrent_state, d_expected.d_recurrent_state));
    EXPECT_TRUE(same_bits(in_place.d_final_conv_state, d_expected.d_conv_state));
  }
}

TEST(GdnReference, ASliceOfHeadsIsThatPartOfTheWhole) {
  const Dims shape{.key_heads = 3, .value_heads = 6, .key_dim = 2, .value_dim = 3};
  const Problem<double> p = random_problem(shape, packed, 85, Given::everything);
  const auto expected = forward(p);
  const auto d_expected = backward(p);
  ForwardResult<double, double, double> out(p.dims);
  Gradients<double> d(p);
  const auto finite = [](const Vector& values) {
    return std::count_if(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
  };
  std::int64_t done = 0;
  for (const std::int64_t count : {2, 0, 1}) {
    const KeyHeads heads{.first = done, .count = count};
    reference::forward(p.dims, p.inputs(), p.options, out.outputs(p.dims), heads);
    reference::backward(p.dims, p.inputs(), p.options, p.cotangents(), d.cotangents(p.dims), heads);
    done += count;
    // A third of every array a head, and nothing of the others.
    EXPECT_EQ(finite(out.o) * 3, done * static_cast<std::int64_t>(out.o.size()));
    EXPECT_EQ(finite(out.final_conv_state) * 3,
              done * static_cast<std::int64_t>(out.final_conv_state.size()));
    EXPECT_EQ(finite(out.final_recurrent_state) * 3,
              done * static_cast<std::int64_t>(out.final_recurrent_state.size()));
    for (const InputAndGradient& each : every_input) {
      EXPECT_EQ(finite(d.*each.gradient) * 3,
                done * static_cast<std::int64_t>((d.*each.gradient).size()))
          << each.name;
    }
  }
  EXPECT_TRUE(same_bits(out.o, expected.o));
  EXPECT_TRUE(same_bits(out.final_conv_state, expected.final_conv_state));
  EXPECT_TRUE(same_bits(out.final_recurrent_state, expected.final_recurrent_state));
  for (const InputAndGradient& each : every_input) {
    EXPECT_TRUE(same_bits(d.*each.gradient, d_expected.*each.gradient)) << each.name;
  }
  EXPECT_THROW(reference::forward(p.dims, p.inputs(), p.options, out.outputs(p.dims),
                                  KeyHeads{.first = 3, .count = 1}),
               Error);
  EXPECT_THROW(reference::backward(p.dims, p.inputs(), p.options, p.cotangents(),
                                   d.cotangents(p.dims), KeyHeads{.first = 0, .count = 4}),
               Error);
}

TEST(GdnReference, AnyNumberOfThreadsGivesTheSameBits) {
  const Dims shape{.key_heads = 8, .value_heads = 8, .key_dim = 4, .value_dim = 4};
  const Problem<float> p =
      test::stored_as<float>(random_problem(shape, packed, 87, Given::everything));
  std::vector<float> o;
  Gradients<float> d(p);
  for (const int threads : {1, 2, 8}) {
    heddle::test::with_threads(threads, [&] {
      const auto o_found = forward(p).o;
      const auto d_found = backward(p);
      if (threads == 1) {
        o = o_found;
        d = d_found;
      }
      EXPECT_TRUE(same_bits(o_found, o)) << threads;
      EXPECT_TRUE(same_bits(d_found.d_qkv, d.d_qkv)) << threads;
      EXPECT_TRUE(same_bits(d_found.d_conv_weight, d.d_conv_weight)) << threads;
      EXPECT_TRUE(same_bits(d_found.d_A_log, d.d_A_log)) << threads;
    });
  }
}

/// A [rows, cols] copy whose rows lie `gap` further apart, NaN between them.
class Strided {
 public:
  Strided(const Vector& values, std::int64_t rows, std::int64_t cols, std::int64_t gap = 3)
      : rows_(rows),
        cols_(cols),
        stride_(cols + gap),
        values_(static_cast<std::size_t>(rows * stride_), nan) {
    for (std::int64_t r = 0; r < rows; ++r) {
      std::copy_n(values.begin() + r * cols, cols, values_.begin() + r * stride_);
    }
  }

  [[nodiscard]] MatrixView<double> view() { return {values_.data(), rows_, cols_, stride_}; }
  [[nodiscard]] Vector packed_values() const {
    Vector result;
    for (std::int64_t r = 0; r < rows_; ++r) {
      const auto first = values_.begin() + r * stride_;
      result.insert(result.end(), first, first + cols_);
      EXPECT_TRUE(std::all_of(first + cols_, first + stride_, [](double x) {
        return std::isnan(x);
      })) << "written between the rows";
    }
    return result;
  }

 private:
  std::int64_t rows_;
  std::int64_t cols_;
  std::int64_t stride_;
  Vector values_;
};

TEST(GdnReference, RowsMayLieApart) {
  const Problem<double> p = random_problem(small, packed, 89, Given::everything);
  const Dims& d = p.dims;
  const auto expected = forward(p);
  const auto d_expected = backward(p);
  Strided qkv(p.qkv, d.tokens, d.qkv_columns());
  Strided weight(p.conv_weight, d.qkv_columns(), d.kernel);
  Strided a(p.a, d.tokens, d.value_heads);
  Strided b(p.b, d.tokens, d.value_heads);
  Strided conv_state(p.conv_state, d.window_rows(), d.qkv_columns());
  Strided state(p.recurrent_state, d.state_rows(), d.value_dim);
  Inputs<double> inputs = p.inputs();
  inputs.qkv = qkv.view();
  inputs.conv_weight = weight.view();
  inputs.a = a.view();
  inputs.b = b.view();
  inputs.conv_state = conv_state.view();
  inputs.recurrent_state = state.view();

  const ForwardResult<double, double, double> poisoned(d);
  Strided o(poisoned.o, d.tokens, d.output_columns());
  Strided final_state(poisoned.final_recurrent_state, d.state_rows(), d.value_dim);
  Strided final_conv(poisoned.final_conv_state, d.window_rows(), d.qkv_columns());
  reference::forward(d, inputs, p.options,
                     Outputs<double, double>{.o = o.view(),
                                             .final_recurrent_state = final_state.view(),
                                             .final_conv_state = final_conv.view()});
  EXPECT_TRUE(same_bits(o.packed_values(), expected.o));
  EXPECT_TRUE(same_bits(final_state.packed_values(), expected.final_recurrent_state));
  EXPECT_TRUE(same_bits(final_conv.packed_values(), expected.final_conv_state));

  Strided d_o(p.d_o, d.tokens, d.output_columns());
  Strided d_final(p.d_final_recurrent_state, d.state_rows(), d.value_dim);
  Strided d_final_conv(p.d_final_conv_state, d.window_rows(), d.qkv_columns());
  Gradients<double> unused(p);
  Strided d_qkv(unused.d_qkv, d.tokens, d.qkv_columns());
  Strided d_weight(unused.d_conv_weight, d.qkv_columns(), d.kernel);
  Strided d_a(unused.d_a, d.tokens, d.value_heads);
  Strided d_b(unused.d_b, d.tokens, d.value_heads);
  Strided d_conv(unused.d_conv_state, d.window_rows(), d.qkv_columns());
  Strided d_state(unused.d_recurrent_state, d.state_rows(), d.value_dim);
  reference::backward(d, inputs, p.options,
                      OutputCotangents<double, double>{.d_o = d_o.view(),
                                                       .d_final_recurrent_state = d_final.view(),
                                                       .d_final_conv_state = d_final_conv.view()},
                      Cotangents<double>{.d_qkv = d_qkv.view(),
                                         .d_conv_weight = {d_weight.view()},
                                         .d_conv_bias = {unused.d_conv_bias},
                                         .d_a = d_a.view(),
                                         .d_b = d_b.view(),
                                         .d_A_log = {unused.d_A_log},
                                         .d_dt_bias = {unused.d_dt_bias},
                                         .d_conv_state = d_conv.view(),
                                         .d_recurrent_state = d_state.view()});
  EXPECT_TRUE(same_bits(d_qkv.packed_values(), d_expected.d_qkv));
  EXPECT_TRUE(same_bits(d_weight.packed_values(), d_expected.d_conv_weight));
  EXPECT_TRUE(same_bits(d_a.packed_values(), d_expected.d_a));
  EXPECT_TRUE(same_bits(d_b.packed_values(), d_expected.d_b));
  EXPECT_TRUE(same_bits(d_conv.packed_values(), d_expected.d_conv_state));
  EXPECT_TRUE(same_bits(d_state.packed_values(), d_expected.d_recurrent_state));
}

TEST(GdnReference, Bfloat16IsWidenedOnceAndRoundedOnce) {
  const Problem<bfloat16, float> p =
      test::stored_as<bfloat16, float>(random_problem(small, packed, 91, Given::everything));
  Problem<float> wide;
  wide.dims = p.dims;
  wide.options = p.options;
  wide.segment_ids = p.segment_ids;
  wide.qkv = test::converted<float>(p.qkv);
  wide.a = test::converted<float>(p.a);
  wide.b = test::converted<float>(p.b);
  wide.conv_state = test::converted<float>(p.conv_state);
  wide.d_o = test::converted<float>(p.d_o);
  wide.conv_weight = p.conv_weight;
  wide.conv_bias = p.conv_bias;
  wide.A_log = p.A_log;
  wide.dt_bias = p.dt_bias;
  wide.recurrent_state = p.recurrent_state;
  wide.d_final_recurrent_state = p.d_final_recurrent_state;
  wide.d_final_conv_state = p.d_final_conv_state;

  const auto expected = forward(wide);
  const auto found = forward(p);
  EXPECT_TRUE(same_bits(found.o, expected.o));
  EXPECT_TRUE(same_bits(found.final_recurrent_state, expected.final_recurrent_state));
  EXPECT_TRUE(same_bits(test::converted<float>(found.final_conv_state), expected.final_conv_state));
  ForwardResult<bfloat16, bfloat16, float> rounded(p.dims);
  reference::forward(p.dims, p.inputs(), p.options, rounded.outputs(p.dims));
  EXPECT_TRUE(same_bits(rounded.o, test::converted<bfloat16>(expected.o)));

  const auto d = backward(p);
  const auto d_expected = backward(wide);
  EXPECT_TRUE(same_bits(d.d_qkv, d_expected.d_qkv));
  EXPECT_TRUE(same_bits(d.d_conv_weight, d_expected.d_conv_weight));
  EXPECT_TRUE(same_bits(d.d_a, d_expected.d_a));
  EXPECT_TRUE(same_bits(d.d_conv_state, d_expected.d_conv_state));
}

TEST(GdnReference, AStoredConvolutionOutputIsWhatBothDirectionsSee) {
  // With a kernel of one and a weight of one, y is silu(qkv): rounding it by hand is rounding it
  // inside.
  const Dims shape{.key_heads = 1, .value_heads = 2, .key_dim = 3, .value_dim = 2, .kernel = 1};
  Problem<double> wide = random_problem(shape, {5, 5, 5}, 93);
  std::fill(wide.conv_weight.begin(), wide.conv_weight.end(), 1.0);
  Problem<bfloat16, float> p = test::stored_as<bfloat16, float>(wide);
  const auto plain = forward(p);
  p.options.conv_output = ConvOutput::storage;
  const auto stored = forward(p);
  EXPECT_FALSE(same_bits(stored.o, plain.o));
  const auto difference = heddle::test::difference<float, float>(stored.o, plain.o);
  EXPECT_LT(difference.error, 0.03) << "a rounding of y, 2^-9, in each factor";
  EXPECT_EQ(difference.mismatch, "");

  // The last token's o through its own value alone, beta = 1, k.k = 1: o = (q.k) v, v rounded.
  std::fill(p.b.begin(), p.b.end(), bfloat16(1e4F));
  const Problem<bfloat16, float> last = test::token_range(p, 2, 1);
  const auto y = [&](std::int64_t column) {
    const auto x = static_cast<double>(last.qkv[static_cast<std::size_t>(column)]);
    return static_cast<double>(bfloat16(static_cast<float>(x / (1 + std::exp(-x)))));
  };
  double q_norm = 1e-6;
  double k_norm = 1e-6;
  double product = 0;
  for (std::int64_t i = 0; i < 3; ++i) {
    q_norm += y(i) * y(i);
    k_norm += y(3 + i) * y(3 + i);
    product += y(i) * y(3 + i);
  }
  const double factor = product / std::sqrt(3.0 * q_norm * k_norm);
  const auto o = forward(last).o;
  for (std::int64_t j = 0; j < 4; ++j) {
    EXPECT_NEAR(static_cast<double>(o[static_cast<std::size_t>(j)]), factor * y(6 + j), 1e-6);
  }
  // d_b, with beta's own slope put back, is d_o . o / beta: the rounded y is in the backward, too.
  Problem<bfloat16, float> half = last;
  std::fill(half.b.begin(), half.b.end(), bfloat16(0.0F));
  const auto d = backward(half);
  for (std::size_t h = 0; h < 2; ++h) {
    double expected = 0;
    for (std::size_t j = 0; j < 2; ++j) {
      expected += 0.25 * factor * y(static_cast<std::int64_t>(6 + h * 2 + j)) *
                  static_cast<double>(half.d_o[h * 2 + j]);
    }
    EXPECT_NEAR(static_cast<double>(d.d_b[h]), expected, 1e-6);
  }
}

TEST(GdnReference, RefusesBeforeWriting) {
  Problem<double> p = random_problem(small, packed, 95, Given::everything);
  ForwardResult<double, double, double> out(p.dims);
  Gradients<double> d(p);
  p.A_log[3] = 1000;
  EXPECT_EQ(thrown_text<Error>(
                [&] { reference::forward(p.dims, p.inputs(), p.options, out.outputs(p.dims)); }),
            "gdn::reference::forward: A_log[3] = 1000: exp(A_log) must be finite");
  EXPECT_EQ(thrown_text<Error>([&] {
              reference::states(
                  p.dims, p.inputs(), p.options,
                  StatesOutputs<double>{.final_conv_state = out.outputs(p.dims).final_conv_state});
            }),
            "gdn::reference::states: A_log[3] = 1000: exp(A_log) must be finite");
  EXPECT_EQ(thrown_text<Error>([&] {
              reference::backward(p.dims, p.inputs(), p.options, p.cotangents(),
                                  d.cotangents(p.dims));
            }),
            "gdn::reference::backward: A_log[3] = 1000: exp(A_log) must be finite");
  p.A_log[3] = 0;
  Cotangents<double> wanted = d.cotangents(p.dims);
  wanted.d_b = {};
  EXPECT_EQ(thrown_text<Error>([&] {
              reference::backward(p.dims, p.inputs(), p.options, p.cotangents(), wanted);
            }),
            "gdn::reference::backward: d_b.rows = 0: must equal dims.tokens (19)");
  Outputs<double, double> outputs = out.outputs(p.dims);
  outputs.final_conv_state = outputs.final_conv_state.row_block(0, 1);
  EXPECT_EQ(thrown_text<Error>([&] { reference::forward(p.dims, p.inputs(), p.options, outputs); }),
            "gdn::reference::forward: final_conv_state.rows = 1: must equal kernel - 1 (3)");
  const ForwardResult<double, double, double> untouched(p.dims);
  EXPECT_TRUE(same_bits(out.o, untouched.o));
  EXPECT_TRUE(same_bits(out.final_recurrent_state, untouched.final_recurrent_state));
  EXPECT_TRUE(same_bits(out.final_conv_state, untouched.final_conv_state));
  const Gradients<double> unwritten(p);
  for (const InputAndGradient& each : every_input) {
    EXPECT_TRUE(same_bits(d.*each.gradient, unwritten.*each.gradient)) << each.name;
  }
}

}  // namespace
}  // namespace heddle::gdn

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/layer_calls.hpp"
#include "gdn/problem.hpp"
#include "heddle/gdn/layer.hpp"
#include "support/compare.hpp"
#include "support/thrown_text.hpp"

// Gates, keys and edges at which a layer breaks, both ways of evaluating it; and what it refuses.
//
// Mutants these tests are written against: a scale that is folded into the state too late, or not into
// what the next token reads; a decay of exactly 0 that leaves the state as it was; a start that keeps
// the scale of the document before; a state that is handed out without its scale.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using test::ForwardResult;
using test::Given;
using test::layer_backward;
using test::layer_forward;
using test::Problem;
using test::Random;
using test::random_problem;
using test::stored_as;

using Vector = std::vector<double>;
using Ids = std::vector<std::int32_t>;

constexpr Dims dims{.key_heads = 1, .value_heads = 2, .key_dim = 12, .value_dim = 7, .kernel = 3};

/// Two documents, the first of which the row continues.
Ids two_documents() {
  Ids ids(70, 1);
  ids.insert(ids.end(), 30, 2);
  return ids;
}

Vector wide(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

void expect_agreement(const Problem<double>& p, const std::string& name) {
  const auto expected = test::reference_forward(p);
  const auto expected_gradients = test::reference_backward(p);
  const auto single = stored_as<float>(p);
  for (const Recurrence recurrence : {Recurrence::chunked, Recurrence::token_by_token}) {
    const LayerOptions options{.chunks = {.chunk = 16}, .recurrence = recurrence};
    const auto out = layer_forward(p, options);
    EXPECT_TRUE(close(out.o, expected.o, 1e-12)) << name;
    EXPECT_TRUE(close(out.final_recurrent_state, expected.final_recurrent_state, 1e-12)) << name;
    const auto narrow = layer_forward(single, options);
    EXPECT_TRUE(close(wide(narrow.o), expected.o, 5e-6)) << name << " f32";
    EXPECT_TRUE(close(wide(narrow.final_recurrent_state), expected.final_recurrent_state, 5e-6))
        << name << " f32";
  }
  const LayerOptions options{.chunks = {.chunk = 16}};
  const auto found = layer_backward(p, options);
  const auto narrow = layer_backward(single, options);
  const auto check = [&](const char* what, const Vector& a, const std::vector<float>& f,
                         const Vector& e) {
    EXPECT_TRUE(close(a, e, 1e-12)) << name << ": " << what;
    EXPECT_TRUE(close(wide(f), e, 5e-6)) << name << " f32: " << what;
  };
  check("d_qkv", found.d_qkv, narrow.d_qkv, expected_gradients.d_qkv);
  check("d_b", found.d_b, narrow.d_b, expected_gradients.d_b);
  check("d_a", found.d_a, narrow.d_a, expected_gradients.d_a);
  check("d_A_log", found.d_A_log, narrow.d_A_log, expected_gradients.d_A_log);
  check("d_dt_bias", found.d_dt_bias, narrow.d_dt_bias, expected_gradients.d_dt_bias);
  check("d_recurrent_state", found.d_recurrent_state, narrow.d_recurrent_state,
        expected_gradients.d_recurrent_state);
}

TEST(GdnLayerRegimes, EveryGateRegime) {
  Random random(1);
  Vector mild;
  for (int i = 0; i < 200; ++i) {
    mild.push_back(random.uniform(-0.2, 0));
  }
  const auto expect = [&](const char* name, auto decay) {
    Problem<double> p = random_problem(dims, two_documents(), 2, Given::everything);
    test::set_decay(p, decay);
    expect_agreement(p, name);
  };
  expect("g = 0", [](std::int64_t, std::int64_t) { return 0.0; });
  expect("g = -1e-3", [](std::int64_t, std::int64_t) { return -1e-3; });
  expect("g in (-0.2, 0)", [&](std::int64_t t, std::int64_t h) {
    return mild[static_cast<std::size_t>(2 * t + h) % mild.size()];
  });
  expect("g = -1", [](std::int64_t, std::int64_t) { return -1.0; });
  expect("g = -5", [](std::int64_t, std::int64_t) { return -5.0; });
  expect("g = -16", [](std::int64_t, std::int64_t) { return -16.0; });
  expect("g in {-0.01, -200}",
         [](std::int64_t t, std::int64_t) { return t % 7 == 3 ? -200.0 : -0.01; });
  expect("single tokens of -1e4",
         [](std::int64_t t, std::int64_t) { return t % 19 == 5 ? -1e4 : -0.1; });
}

TEST(GdnLayerRegimes, EveryKeyFamily) {
  struct Family {
    const char* name;
    double common;
    double noise;
    bool alternate;
  };
  for (const Family& family :
       {Family{"positive", 0, 1, false}, Family{"near-identical", 1, 0.01, false},
        Family{"identical", 1, 0, false}, Family{"antipodal", 1, 0, true},
        Family{"zero", 0, 0, false}}) {
    for (const double b : {-1e4, 0.0, 16.1}) {  // beta = 0, 1/2, 1 - 1e-7
      Problem<double> p = random_problem(dims, two_documents(), 3, Given::nothing);
      Random random(4);
      // A convolution that hands the columns through: one tap, and SiLU of what is large.
      std::fill(p.conv_weight.begin(), p.conv_weight.end(), 0.0);
      for (std::int64_t c = 0; c < dims.qkv_columns(); ++c) {
        p.conv_weight[static_cast<std::size_t>(c * dims.kernel + dims.kernel - 1)] = 1;
      }
      const Vector common = random.normals<double>(dims.key_dim);
      for (std::int64_t t = 0; t < p.dims.tokens; ++t) {
        const double sign = family.alternate && t % 2 == 1 ? -1 : 1;
        for (std::int64_t i = 0; i < dims.key_dim; ++i) {
          double& k =
              p.qkv[static_cast<std::size_t>(t * dims.qkv_columns() + dims.key_column(0) + i)];
          const double noisy = family.noise * (family.common == 0 ? std::abs(k) : k);
          k = static_cast<float>(sign *
                                 (family.common * common[static_cast<std::size_t>(i)] + noisy));
        }
      }
      std::fill(p.b.begin(), p.b.end(), static_cast<double>(static_cast<float>(b)));
      test::set_decay(p, [](std::int64_t, std::int64_t) { return -1e-3; });
      const std::string name = std::string(family.name) + ", b = " + std::to_string(b);
      const auto expected = test::reference_forward(p);
      const auto single = stored_as<float>(p);
      for (const Recurrence recurrence : {Recurrence::chunked, Recurrence::token_by_token}) {
        const LayerOptions options{.recurrence = recurrence};
        const auto out = layer_forward(p, options);
        EXPECT_TRUE(close(out.o, expected.o, 1e-12)) << name;
        EXPECT_TRUE(close(wide(layer_forward(single, options).o), expected.o, 5e-6)) << name;
      }
      const auto gradients = test::reference_backward(p);
      EXPECT_TRUE(close(layer_backward(p).d_qkv, gradients.d_qkv, 1e-12)) << name;
      EXPECT_TRUE(close(wide(layer_backward(single).d_qkv), gradients.d_qkv, 2e-5)) << name;
    }
  }
}

TEST(GdnLayerRegimes, ADecayOfNothingLeftIsAResetOfTheRecurrenceAlone) {
  Problem<double> p = random_problem(dims, Ids(40, 1), 5, Given::nothing);
  test::set_decay(p, [](std::int64_t t, std::int64_t) { return t == 20 ? -1e4 : -0.01; });
  for (const Recurrence recurrence : {Recurrence::chunked, Recurrence::token_by_token}) {
    const LayerOptions options{.chunks = {.chunk = 16}, .recurrence = recurrence};
    const auto whole = layer_forward(p, options);
    // The same tokens with the window carried over but not the state.
    Problem<double> behind = token_range(p, 20, 20);
    behind.options.initial_segment = 1;
    behind.conv_state = layer_forward(token_range(p, 0, 20), options).final_conv_state;
    const auto second = layer_forward(behind, options);
    EXPECT_TRUE(close(test::rows_of(whole.o, dims.output_columns(), 20, 20), second.o, 1e-12));
    EXPECT_TRUE(close(whole.final_recurrent_state, second.final_recurrent_state, 1e-12));
  }
  const auto gradients = layer_backward(stored_as<float>(p));
  for (std::int64_t h = 0; h < dims.value_heads; ++h) {
    EXPECT_EQ(gradients.d_a[static_cast<std::size_t>(20 * dims.value_heads + h)], 0);
  }
}

TEST(GdnLayerRegimes, Edges) {
  for (const Recurrence recurrence : {Recurrence::chunked, Recurrence::token_by_token}) {
    const LayerOptions options{.recurrence = recurrence};
    {
      const auto none = stored_as<float>(random_problem(dims, {}, 6, Given::states));
      const auto out = layer_forward(none, options);
      EXPECT_EQ(out.final_recurrent_state, none.recurrent_state);
      EXPECT_EQ(out.final_conv_state, none.conv_state);
      const auto gradients = layer_backward(none, options);
      EXPECT_EQ(gradients.d_recurrent_state, none.d_final_recurrent_state);
      EXPECT_EQ(gradients.d_conv_state, none.d_final_conv_state);
    }
    {
      auto padding = stored_as<float>(random_problem(dims, Ids(5, 0), 7, Given::everything));
      padding.options.initial_segment = 0;
      std::fill(padding.qkv.begin(), padding.qkv.end(), test::poison<float>());
      std::fill(padding.d_o.begin(), padding.d_o.end(), test::poison<float>());
      const auto out = layer_forward(padding, options);
      EXPECT_EQ(out.o, std::vector<float>(out.o.size(), 0.0F));
      EXPECT_EQ(out.final_recurrent_state, padding.recurrent_state);
      EXPECT_EQ(out.final_conv_state, padding.conv_state);
      const auto gradients = layer_backward(padding, options);
      for (const auto* zero :
           {&gradients.d_qkv, &gradients.d_a, &gradients.d_b, &gradients.d_conv_weight,
            &gradients.d_A_log, &gradients.d_dt_bias, &gradients.d_conv_bias}) {
        EXPECT_EQ(*zero, std::vector<float>(zero->size(), 0.0F));
      }
      EXPECT_EQ(gradients.d_recurrent_state, padding.d_final_recurrent_state);
      EXPECT_EQ(gradients.d_conv_state, padding.d_final_conv_state);
    }
    {
      // beta = 0: the state only decays.
      Problem<double> p = random_problem(dims, Ids(20, 3), 8, Given::states);
      std::fill(p.b.begin(), p.b.end(), -1e4);
      test::set_decay(p, [](std::int64_t, std::int64_t) { return -0.125; });
      const auto out = layer_forward(p, options);
      Vector expected = p.recurrent_state;
      for (double& x : expected) {
        x *= std::exp(-0.125 * 20);
      }
      // The gate's input that gives this decay is one of f32.
      EXPECT_TRUE(close(out.final_recurrent_state, expected, 1e-6));
    }
    {
      // Gate inputs far out, both ways.
      Problem<double> p = random_problem(dims, Ids(12, 3), 9, Given::states);
      for (std::size_t i = 0; i < p.a.size(); ++i) {
        p.a[i] = i % 3 == 0 ? 1e4 : i % 3 == 1 ? -1e4 : 0;
      }
      const auto out = layer_forward(stored_as<float>(p), options);
      EXPECT_TRUE(
          std::all_of(out.o.begin(), out.o.end(), [](float x) { return std::isfinite(x); }));
      const auto gradients = layer_backward(stored_as<float>(p), options);
      for (std::size_t i = 0; i < p.a.size(); ++i) {
        EXPECT_TRUE(std::isfinite(gradients.d_a[i]));
        EXPECT_TRUE(i % 3 == 2 || gradients.d_a[i] == 0) << i;
      }
    }
  }
}

/// o and the final state are linear in the state before the row.
TEST(GdnLayerRegimes, LinearInTheStateBefore) {
  Problem<double> p = random_problem(dims, Ids(30, 1), 10, Given::states);
  Problem<double> doubled = p;
  Problem<double> none = p;
  for (std::size_t i = 0; i < p.recurrent_state.size(); ++i) {
    doubled.recurrent_state[i] *= 2;
    none.recurrent_state[i] = 0;
  }
  for (const Recurrence recurrence : {Recurrence::chunked, Recurrence::token_by_token}) {
    const LayerOptions options{.recurrence = recurrence};
    const auto one = layer_forward(p, options).o;
    const auto two = layer_forward(doubled, options).o;
    const auto zero = layer_forward(none, options).o;
    Vector first;
    Vector second;
    for (std::size_t i = 0; i < one.size(); ++i) {
      first.push_back(one[i] - zero[i]);
      second.push_back((two[i] - zero[i]) / 2);
    }
    EXPECT_TRUE(close(second, first, 1e-12));
  }
}

TEST(GdnLayerRegimes, AutomaticDoesNotDependOnWhatSurroundsADocument) {
  Dims model{.key_heads = 16, .value_heads = 64, .key_dim = 128, .value_dim = 128};
  const LayerOptions automatic;
  const Segments step(Ids(1, 4), 4);
  const Segments prefill(Ids(500, 4), 4);
  EXPECT_TRUE(takes_tokens(model, automatic, step)) << "a step of generation";
  EXPECT_FALSE(takes_tokens(model, automatic, prefill));
  for (const Ids& ids : {Ids(1, 4), Ids(4, 4), Ids(500, 4), two_documents()}) {
    EXPECT_FALSE(takes_tokens(model, automatic, Segments(ids, 0)));
  }
  model.key_dim = model.value_dim = 64;
  for (const Ids& ids : {Ids(1, 4), Ids(4, 4), Ids(500, 4), two_documents()}) {
    EXPECT_TRUE(takes_tokens(model, automatic, Segments(ids, 0)));
  }
  EXPECT_FALSE(takes_tokens(model, {.recurrence = Recurrence::chunked}, step));
  model.key_dim = 1024;
  EXPECT_FALSE(takes_tokens(model, automatic, step));
  EXPECT_TRUE(takes_tokens(model, {.recurrence = Recurrence::token_by_token}, prefill));
}

TEST(GdnLayerRegimes, RefusesWhatItCannotTake) {
  const auto p = stored_as<float>(random_problem(dims, {1, 1, 1}, 11, Given::everything));
  const auto refusal = [&](auto change) {
    Problem<float> q = p;
    LayerOptions options;
    ChunkResiduals<float> residuals;
    ForwardResult<float, float, float> result(q.dims);
    change(q, options, residuals);
    LayerScratch scratch;
    const std::string text = heddle::test::thrown_text<Error>([&] {
      forward(q.dims, q.inputs(), q.options, options, result.outputs(p.dims), residuals, scratch);
    });
    EXPECT_TRUE(std::isnan(result.o[0])) << text;
    return text;
  };
  std::vector<float> memory(4096);
  const std::string where = "gdn::forward: ";
  EXPECT_EQ(refusal([](auto& q, auto&, auto&) { q.segment_ids[1] = -3; }),
            where + "segment_ids[1] = -3: must be >= 0");
  EXPECT_EQ(refusal([](auto& q, auto&, auto&) { q.segment_ids[0] = 0; }),
            where +
                "segment_ids[0] = 0: must be > 0 where a state is given and a token follows: no "
                "padding between the two");
  EXPECT_EQ(refusal([](auto& q, auto&, auto&) { q.A_log[1] = 89.0F; }),
            where + "A_log[1] = 89: exp(A_log) must be finite");
  EXPECT_EQ(refusal([](auto& q, auto&, auto&) { q.options.eps = 0; }),
            where + "options.eps = 0: must be > 0 and finite");
  EXPECT_EQ(refusal([](auto&, auto& options, auto&) { options.chunks.chunk = 0; }),
            where + "options.chunk = 0: must be >= 1");
  EXPECT_EQ(
      refusal([](auto&, auto& options, auto&) { options.recurrence = static_cast<Recurrence>(7); }),
      where + "options.recurrence = 7: must be automatic, chunked or token_by_token");
  EXPECT_EQ(refusal([&](auto&, auto&, auto& residuals) {
              residuals.t_inv = {memory.data(), 1, 64};
            }),
            where + "t_inv.rows = 1: must equal chunks * value_heads (2)");
  EXPECT_EQ(refusal([&](auto&, auto& options, auto& residuals) {
              options = {.chunks = {.chunk = 4}, .recurrence = Recurrence::token_by_token};
              residuals.t_inv = {memory.data(), 2, 16};
            }),
            where + "residuals = given: must be null where options.recurrence is token_by_token");
  LayerScratch scratch;
  ForwardResult<float, float, float> result(p.dims);
  EXPECT_EQ(heddle::test::thrown_text<Error>([&] {
              forward(p.dims, p.inputs(), p.options, LayerOptions{}, result.outputs(p.dims),
                      ChunkResiduals<float>{}, KeyHeads{0, 2}, scratch);
            }),
            where + "key_heads.count = 2: must be in [0, dims.key_heads - first (1)]");
  EXPECT_EQ(
      heddle::test::thrown_text<Error>([&] {
        ChunkResiduals<float> residuals;
        residuals.chunk_states = {memory.data(), 2, 84};
        states(p.dims, p.inputs(), p.options, LayerOptions{}, StatesOutputs<float>{}, residuals,
               scratch);
      }),
      "gdn::states: residuals.chunk_states = given: must be null: they are what is saved here");
}

}  // namespace
}  // namespace heddle::gdn

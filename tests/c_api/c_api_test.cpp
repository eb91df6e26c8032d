// examples/c-api against the plain tier, through its C header alone.
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/scalar.hpp"
#include "heddle/gdn/reference.hpp"
#include "heddle/head/reference.hpp"
#include "heddle_c.h"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace {

using heddle::bfloat16;
using heddle::test::close;
using heddle::test::Random;

constexpr float unwritten = std::numeric_limits<float>::quiet_NaN();

struct Context {
  heddle_context* handle = heddle_create();

  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { heddle_destroy(handle); }
};

template <class S>
constexpr heddle_storage storage_of = std::is_same_v<S, float> ? HEDDLE_F32 : HEDDLE_BF16;

std::vector<float> room(std::int64_t count) {
  return std::vector<float>(static_cast<std::size_t>(count), unwritten);
}

template <class S>
struct HeadCase {
  heddle_head_dims dims{.tokens = 37, .hidden = 20, .vocab = 91};
  std::vector<S> hidden, weight;
  std::vector<std::int32_t> target_ids;
  std::vector<std::uint8_t> active;
  std::vector<float> d_logps, d_entropy;

  HeadCase() {
    Random random(7);
    hidden = random.normals<S>(dims.tokens * dims.hidden);
    weight = random.normals<S>(dims.hidden * dims.vocab, 0.3);
    d_logps = random.normals<float>(dims.tokens);
    d_entropy = random.normals<float>(dims.tokens);
    for (std::int64_t t = 0; t < dims.tokens; ++t) {
      target_ids.push_back(static_cast<std::int32_t>(random.integer(0, dims.vocab - 1)));
      active.push_back(t % 5 != 3);
    }
  }

  heddle_head_inputs inputs() const {
    return {.storage = storage_of<S>,
            .hidden = hidden.data(),
            .weight = weight.data(),
            .target_ids = target_ids.data(),
            .active = active.data(),
            .temperature = 0.7};
  }

  heddle::head::Inputs<S> views() const {
    return {.hidden = {hidden.data(), dims.tokens, dims.hidden},
            .weight = {weight.data(), dims.hidden, dims.vocab},
            .target_ids = target_ids,
            .active = active};
  }
};

template <class S>
class CHead : public testing::Test {};
using Storages = testing::Types<float, bfloat16>;
TYPED_TEST_SUITE(CHead, Storages);

TYPED_TEST(CHead, ForwardAndBackwardAgreeWithThePlainTier) {
  const HeadCase<TypeParam> c;
  const auto [tokens, hidden, vocab] = c.dims;
  const heddle::head::Dims dims{.tokens = tokens, .hidden = hidden, .vocab = vocab};
  const heddle::head::ScoringOptions options{.temperature = 0.7};
  Context context;

  auto logps = room(tokens), entropy = room(tokens), max = room(tokens), exp_sum = room(tokens),
       mean = room(tokens);
  const heddle_head_inputs inputs = c.inputs();
  const heddle_head_outputs outputs{logps.data(), entropy.data(), max.data(), exp_sum.data(),
                                    mean.data()};
  ASSERT_EQ(heddle_head_forward(context.handle, &c.dims, &inputs, &outputs), HEDDLE_OK)
      << heddle_error(context.handle);
  EXPECT_STREQ(heddle_error(context.handle), "");

  auto plain_logps = room(tokens), plain_entropy = room(tokens), plain_max = room(tokens),
       plain_exp_sum = room(tokens), plain_mean = room(tokens);
  heddle::head::reference::forward<TypeParam, TypeParam, float>(dims, c.views(), options,
                                                                {.logps = plain_logps,
                                                                 .entropy = plain_entropy,
                                                                 .max = plain_max,
                                                                 .exp_sum = plain_exp_sum,
                                                                 .mean = plain_mean});
  EXPECT_TRUE(close(logps, plain_logps, 4e-6));
  EXPECT_TRUE(close(entropy, plain_entropy, 4e-6));
  EXPECT_TRUE(close(max, plain_max, 4e-6));
  EXPECT_TRUE(close(exp_sum, plain_exp_sum, 4e-6));
  EXPECT_TRUE(close(mean, plain_mean, 4e-6));

  for (const bool accumulate : {false, true}) {
    auto d_hidden = room(tokens * hidden);
    std::vector<float> d_weight(static_cast<std::size_t>(hidden * vocab),
                                accumulate ? 2.0F : unwritten);
    const heddle_head_cotangents cotangents{
        .max = max.data(),
        .exp_sum = exp_sum.data(),
        .mean = mean.data(),
        .d_logps = c.d_logps.data(),
        .d_entropy = c.d_entropy.data(),
        .d_hidden = d_hidden.data(),
        .d_weight = d_weight.data(),
        .d_weight_write = accumulate ? HEDDLE_ACCUMULATE : HEDDLE_OVERWRITE};
    ASSERT_EQ(heddle_head_backward(context.handle, &c.dims, &inputs, &cotangents), HEDDLE_OK)
        << heddle_error(context.handle);

    auto plain_d_hidden = room(tokens * hidden);
    std::vector<float> plain_d_weight(d_weight.size(), accumulate ? 2.0F : 0.0F);
    heddle::head::reference::backward<TypeParam, TypeParam, float>(
        dims, c.views(), options, {.max = plain_max, .exp_sum = plain_exp_sum, .mean = plain_mean},
        {.d_logps = c.d_logps, .d_entropy = c.d_entropy},
        {.d_hidden = {plain_d_hidden.data(), tokens, hidden},
         .d_weight = {.values = {plain_d_weight.data(), hidden, vocab},
                      .write = heddle::Write::accumulate}});
    EXPECT_TRUE(close(d_hidden, plain_d_hidden, 8e-6));
    EXPECT_TRUE(close(d_weight, plain_d_weight, 8e-6));
  }
}

TEST(CHeadErrors, WrongInputIsNamedAndNothingIsWritten) {
  HeadCase<float> c;
  Context context;
  auto logps = room(c.dims.tokens);
  heddle_head_outputs outputs{};
  outputs.logps = logps.data();
  const auto said = [&](const heddle_head_dims* dims, const heddle_head_inputs* inputs,
                        const heddle_head_outputs* given) {
    EXPECT_EQ(heddle_head_forward(context.handle, dims, inputs, given), HEDDLE_WRONG_INPUT);
    for (const float value : logps) {
      EXPECT_NE(value, value);
    }
    return std::string(heddle_error(context.handle));
  };
  const heddle_head_inputs inputs = c.inputs();
  EXPECT_EQ(said(nullptr, &inputs, &outputs), "heddle_head_forward: dims = null: required");
  EXPECT_EQ(said(&c.dims, nullptr, &outputs), "heddle_head_forward: inputs = null: required");
  EXPECT_EQ(said(&c.dims, &inputs, nullptr), "heddle_head_forward: outputs = null: required");

  auto other = inputs;
  other.storage = 7;
  EXPECT_EQ(said(&c.dims, &other, &outputs),
            "heddle_head_forward: inputs.storage = 7: must be HEDDLE_F32 or HEDDLE_BF16");
  other = inputs;
  other.weight = nullptr;
  EXPECT_NE(said(&c.dims, &other, &outputs).find("inputs.weight = null: required"),
            std::string::npos);
  other = inputs;
  other.target_ids = nullptr;
  EXPECT_NE(said(&c.dims, &other, &outputs).find("inputs.target_ids.size = 0: must equal"),
            std::string::npos);
  c.target_ids[2] = 91;
  EXPECT_NE(said(&c.dims, &inputs, &outputs).find("inputs.target_ids[2] = 91: must be in [0,"),
            std::string::npos);
  const heddle_head_dims negative{.tokens = -1, .hidden = 20, .vocab = 91};
  EXPECT_NE(said(&negative, &inputs, &outputs).find("dims.tokens = -1: must be >= 0"),
            std::string::npos);

  heddle_head_cotangents cotangents{};
  cotangents.d_weight_write = 9;
  EXPECT_EQ(heddle_head_backward(context.handle, &c.dims, &inputs, &cotangents),
            HEDDLE_WRONG_INPUT);
  EXPECT_STREQ(heddle_error(context.handle),
               "heddle_head_backward: cotangents.d_weight_write = 9: must be HEDDLE_OVERWRITE or "
               "HEDDLE_ACCUMULATE");

  EXPECT_EQ(heddle_head_forward(nullptr, &c.dims, &inputs, &outputs), HEDDLE_WRONG_INPUT);
  EXPECT_STREQ(heddle_error(nullptr), "context = null: required");
}

template <class S>
struct GdnCase {
  heddle_gdn_dims c_dims{
      .tokens = 150, .key_heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 6, .kernel = 4};
  heddle::gdn::Dims dims{
      .tokens = 150, .key_heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 6, .kernel = 4};
  std::vector<S> qkv, conv_weight, conv_bias, a, b, conv_state, d_o;
  std::vector<float> A_log, dt_bias, recurrent_state, d_final_conv_state, d_final_recurrent_state;
  std::vector<std::int32_t> segment_ids;

  GdnCase() {
    Random random(11);
    const std::int64_t columns = dims.qkv_columns();
    qkv = random.normals<S>(dims.tokens * columns);
    conv_weight = random.normals<S>(columns * dims.kernel, 0.5);
    conv_bias = random.normals<S>(columns, 0.2);
    a = random.normals<S>(dims.tokens * dims.value_heads);
    b = random.normals<S>(dims.tokens * dims.value_heads);
    conv_state = random.normals<S>(dims.window_rows() * columns);
    d_o = random.normals<S>(dims.tokens * dims.output_columns());
    A_log = random.normals<float>(dims.value_heads, 0.5);
    dt_bias = random.normals<float>(dims.value_heads, 0.5);
    recurrent_state = random.normals<float>(dims.state_rows() * dims.value_dim);
    d_final_conv_state = random.normals<float>(dims.window_rows() * columns);
    d_final_recurrent_state = random.normals<float>(dims.state_rows() * dims.value_dim);
    // Two documents, of which the first goes on from the states, and padding at the end.
    for (std::int64_t t = 0; t < dims.tokens; ++t) {
      segment_ids.push_back(t < 80 ? 3 : t < 140 ? 4 : 0);
    }
  }

  heddle_gdn_inputs inputs() const {
    return {.storage = storage_of<S>,
            .qkv = qkv.data(),
            .conv_weight = conv_weight.data(),
            .conv_bias = conv_bias.data(),
            .a = a.data(),
            .b = b.data(),
            .A_log = A_log.data(),
            .dt_bias = dt_bias.data(),
            .segment_ids = segment_ids.data(),
            .conv_state = conv_state.data(),
            .recurrent_state = recurrent_state.data(),
            .initial_segment = 3};
  }

  heddle::gdn::Inputs<S, S, float> views() const {
    return {.qkv = {qkv.data(), dims.tokens, dims.qkv_columns()},
            .conv_weight = {conv_weight.data(), dims.qkv_columns(), dims.kernel},
            .conv_bias = conv_bias,
            .a = {a.data(), dims.tokens, dims.value_heads},
            .b = {b.data(), dims.tokens, dims.value_heads},
            .A_log = A_log,
            .dt_bias = dt_bias,
            .segment_ids = segment_ids,
            .conv_state = {conv_state.data(), dims.window_rows(), dims.qkv_columns()},
            .recurrent_state = {recurrent_state.data(), dims.state_rows(), dims.value_dim}};
  }
};

template <class S>
class CGdn : public testing::Test {};
TYPED_TEST_SUITE(CGdn, Storages);

TYPED_TEST(CGdn, ForwardAgreesWithThePlainTier) {
  using S = TypeParam;
  const GdnCase<S> c;
  Context context;
  const auto stored = [&](std::int64_t count) {
    return std::vector<S>(static_cast<std::size_t>(count), static_cast<S>(unwritten));
  };
  auto o = stored(c.dims.tokens * c.dims.output_columns());
  auto conv = stored(c.dims.window_rows() * c.dims.qkv_columns());
  auto state = room(c.dims.state_rows() * c.dims.value_dim);
  const heddle_gdn_inputs inputs = c.inputs();
  const heddle_gdn_outputs outputs{o.data(), conv.data(), state.data()};
  ASSERT_EQ(heddle_gdn_forward(context.handle, &c.c_dims, &inputs, &outputs), HEDDLE_OK)
      << heddle_error(context.handle);

  auto plain_o = o;
  auto plain_conv = conv;
  auto plain_state = state;
  heddle::gdn::reference::forward(
      c.dims, c.views(), {.initial_segment = 3},
      heddle::gdn::Outputs<S, S, float>{
          .o = {plain_o.data(), c.dims.tokens, c.dims.output_columns()},
          .final_recurrent_state = {plain_state.data(), c.dims.state_rows(), c.dims.value_dim},
          .final_conv_state = {plain_conv.data(), c.dims.window_rows(), c.dims.qkv_columns()}});
  // Where o is stored in 8 bits, the two may round to neighbours.
  EXPECT_TRUE(close(o, plain_o, storage_of<S> == HEDDLE_F32 ? 1e-5 : 8e-3));
  EXPECT_TRUE(close(conv, plain_conv, 0));
  EXPECT_TRUE(close(state, plain_state, 1e-5));
}

TYPED_TEST(CGdn, BackwardAgreesWithThePlainTier) {
  using S = TypeParam;
  const GdnCase<S> c;
  const auto& d = c.dims;
  const std::int64_t columns = d.qkv_columns();
  const std::vector<std::int64_t> sizes = {d.tokens * columns,
                                           d.tokens * d.value_heads,
                                           d.tokens * d.value_heads,
                                           columns * d.kernel,
                                           columns,
                                           d.value_heads,
                                           d.value_heads,
                                           d.window_rows() * columns,
                                           d.state_rows() * d.value_dim};
  Context context;
  for (const bool accumulate : {false, true}) {
    std::vector<std::vector<float>> got;
    std::vector<std::vector<float>> plain;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const bool is_parameter = i >= 3 && i < 7;
      got.push_back(room(sizes[i]));
      if (is_parameter && accumulate) {
        got.back().assign(got.back().size(), 1.5F);
      }
      plain.emplace_back(got.back().size(), is_parameter && accumulate ? 1.5F : 0.0F);
    }
    const heddle_gdn_inputs inputs = c.inputs();
    const heddle_gdn_cotangents cotangents{
        .d_o = c.d_o.data(),
        .d_final_conv_state = c.d_final_conv_state.data(),
        .d_final_recurrent_state = c.d_final_recurrent_state.data(),
        .d_qkv = got[0].data(),
        .d_a = got[1].data(),
        .d_b = got[2].data(),
        .d_conv_weight = got[3].data(),
        .d_conv_bias = got[4].data(),
        .d_A_log = got[5].data(),
        .d_dt_bias = got[6].data(),
        .parameters_write = accumulate ? HEDDLE_ACCUMULATE : HEDDLE_OVERWRITE,
        .d_conv_state = got[7].data(),
        .d_recurrent_state = got[8].data()};
    ASSERT_EQ(heddle_gdn_backward(context.handle, &c.c_dims, &inputs, &cotangents), HEDDLE_OK)
        << heddle_error(context.handle);

    const auto add = heddle::Write::accumulate;
    heddle::gdn::reference::backward(
        d, c.views(), {.initial_segment = 3},
        heddle::gdn::OutputCotangents<S, float>{
            .d_o = {c.d_o.data(), d.tokens, d.output_columns()},
            .d_final_recurrent_state = {c.d_final_recurrent_state.data(), d.state_rows(),
                                        d.value_dim},
            .d_final_conv_state = {c.d_final_conv_state.data(), d.window_rows(), columns}},
        heddle::gdn::Cotangents<float>{
            .d_qkv = {plain[0].data(), d.tokens, columns},
            .d_conv_weight = {.values = {plain[3].data(), columns, d.kernel}, .write = add},
            .d_conv_bias = {.values = plain[4], .write = add},
            .d_a = {plain[1].data(), d.tokens, d.value_heads},
            .d_b = {plain[2].data(), d.tokens, d.value_heads},
            .d_A_log = {.values = plain[5], .write = add},
            .d_dt_bias = {.values = plain[6], .write = add},
            .d_conv_state = {plain[7].data(), d.window_rows(), columns},
            .d_recurrent_state = {plain[8].data(), d.state_rows(), d.value_dim}});
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_TRUE(close(got[i], plain[i], 2e-5)) << "cotangent " << i;
    }
  }
}

TEST(CGdnErrors, WrongInputIsNamedAndOptionalArraysMayBeAbsent) {
  const GdnCase<float> c;
  Context context;
  auto o = room(c.dims.tokens * c.dims.output_columns());
  heddle_gdn_outputs outputs{};
  outputs.o = o.data();
  auto inputs = c.inputs();

  heddle_gdn_dims dims = c.c_dims;
  dims.key_heads = 0;
  EXPECT_EQ(heddle_gdn_forward(context.handle, &dims, &inputs, &outputs), HEDDLE_WRONG_INPUT);
  EXPECT_STREQ(heddle_error(context.handle),
               "heddle_gdn_forward: dims.key_heads = 0: must be >= 1");
  inputs.A_log = nullptr;
  EXPECT_EQ(heddle_gdn_forward(context.handle, &c.c_dims, &inputs, &outputs), HEDDLE_WRONG_INPUT);
  EXPECT_NE(std::string(heddle_error(context.handle)).find("A_log"), std::string::npos);

  inputs = c.inputs();
  inputs.conv_bias = nullptr;
  inputs.conv_state = nullptr;
  inputs.recurrent_state = nullptr;
  inputs.initial_segment = 0;
  EXPECT_EQ(heddle_gdn_forward(context.handle, &c.c_dims, &inputs, &outputs), HEDDLE_OK)
      << heddle_error(context.handle);
  for (const float value : o) {
    EXPECT_EQ(value, value);
  }
}

}  // namespace

#include "heddle/gdn/arguments.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/problem.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: each check dropped, or made against another extent; an
// optional argument required; a required one optional; padding allowed between a state and its
// document, or refused where no state is given or no token follows.

namespace heddle::gdn {
namespace {

using test::Given;

constexpr Dims shape{
    .tokens = 3, .key_heads = 1, .value_heads = 2, .key_dim = 2, .value_dim = 3, .kernel = 4};

const std::string accepted = "nothing was thrown";

// qkv_columns 10, output_columns 6, state rows 4
struct Call {
  test::Problem<double> problem = test::random_problem(shape, {1, 1, 2}, 1, Given::everything);
  Inputs<double> inputs = problem.inputs();
  OutputCotangents<double, double> given = problem.cotangents();
  test::Gradients<double> gradients{problem};
  Cotangents<double> wanted = gradients.cotangents(problem.dims);
  test::ForwardResult<double, double, double> result{problem.dims};
  Outputs<double, double> outputs = result.outputs(problem.dims);
  std::vector<double> m = std::vector<double>(8);
  StatesOutputs<double> states{.final_recurrent_state = outputs.final_recurrent_state,
                               .final_conv_state = outputs.final_conv_state,
                               .m = {m.data(), 4, 2}};
};

template <class Change>
std::string refusal(const Change& change) {
  Call call;
  change(call);
  return heddle::test::thrown_text<Error>([&] {
    check_inputs("here", call.problem.dims, call.inputs, call.problem.options);
    check_outputs("here", call.problem.dims, call.outputs);
    check_outputs("here", call.problem.dims, call.states);
    check_cotangents("here", call.problem.dims, call.inputs, call.given, call.wanted);
  });
}

TEST(GdnArguments, AcceptsWhatIsRightAndWhatMayBeAbsent) {
  EXPECT_EQ(refusal([](Call&) {}), accepted);
  EXPECT_EQ(refusal([](Call& c) {
              c.inputs.conv_bias = {};
              c.inputs.conv_state = {};
              c.inputs.recurrent_state = {};
              c.outputs.final_conv_state = {};
              c.outputs.final_recurrent_state = {};
              c.states = {};
              c.given.d_final_conv_state = {};
              c.given.d_final_recurrent_state = {};
              c.wanted.d_conv_weight = {};
              c.wanted.d_conv_bias = {};
              c.wanted.d_A_log = {};
              c.wanted.d_dt_bias = {};
              c.wanted.d_conv_state = {};
              c.wanted.d_recurrent_state = {};
            }),
            accepted);
}

TEST(GdnArguments, RefusesInputsOfAnotherShape) {
  EXPECT_EQ(refusal([](Call& c) { c.problem.dims.value_heads = 0; }),
            "here: dims.value_heads = 0: must be >= 1");
  EXPECT_EQ(refusal([](Call& c) { c.inputs.qkv = c.inputs.qkv.row_block(0, 2); }),
            "here: qkv.rows = 2: must equal dims.tokens (3)");
  EXPECT_EQ(refusal([](Call& c) { c.inputs.qkv = c.inputs.qkv.column_block(0, 9); }),
            "here: qkv.cols = 9: must equal dims.qkv_columns() (10)");
  EXPECT_EQ(refusal([](Call& c) {
              c.inputs.qkv = {c.problem.qkv.data(), 3, 10, 9};
            }),
            "here: qkv.stride = 9: must be at least its cols (10)");
  EXPECT_EQ(refusal([](Call& c) {
              c.inputs.qkv = {nullptr, 3, 10};
            }),
            "here: qkv = null: required");
  EXPECT_EQ(refusal([](Call& c) {
              c.inputs.conv_weight = {c.problem.conv_weight.data(), 4, 10};
            }),
            "here: conv_weight.rows = 4: must equal dims.qkv_columns() (10)");
  EXPECT_EQ(
      refusal([](Call& c) { c.inputs.conv_weight = c.inputs.conv_weight.column_block(0, 3); }),
      "here: conv_weight.cols = 3: must equal dims.kernel (4)");
  EXPECT_EQ(refusal([](Call& c) { c.inputs.conv_bias = c.inputs.conv_bias.first(9); }),
            "here: conv_bias.size = 9: must equal dims.qkv_columns() (10)");
  EXPECT_EQ(refusal([](Call& c) { c.inputs.a = c.inputs.a.column_block(0, 1); }),
            "here: a.cols = 1: must equal dims.value_heads (2)");
  EXPECT_EQ(refusal([](Call& c) { c.inputs.b = c.inputs.b.row_block(0, 1); }),
            "here: b.rows = 1: must equal dims.tokens (3)");
  EXPECT_EQ(refusal([](Call& c) { c.inputs.A_log = c.inputs.A_log.first(1); }),
            "here: A_log.size = 1: must equal dims.value_heads (2)");
  EXPECT_EQ(refusal([](Call& c) { c.inputs.dt_bias = {}; }),
            "here: dt_bias.size = 0: must equal dims.value_heads (2)");
  EXPECT_EQ(refusal([](Call& c) { c.inputs.segment_ids = c.inputs.segment_ids.first(2); }),
            "here: segment_ids.size = 2: must equal dims.tokens (3)");
  EXPECT_EQ(refusal([](Call& c) { c.problem.segment_ids[1] = -3; }),
            "here: segment_ids[1] = -3: must be >= 0");
  EXPECT_EQ(refusal([](Call& c) { c.inputs.conv_state = c.inputs.conv_state.row_block(0, 2); }),
            "here: conv_state.rows = 2: must equal kernel - 1 (3)");
  EXPECT_EQ(refusal([](Call& c) { c.inputs.conv_state = c.inputs.conv_state.column_block(1, 9); }),
            "here: conv_state.cols = 9: must equal dims.qkv_columns() (10)");
  EXPECT_EQ(
      refusal([](Call& c) { c.inputs.recurrent_state = c.inputs.recurrent_state.row_block(0, 2); }),
      "here: recurrent_state.rows = 2: must equal value_heads * key_dim (4)");
  EXPECT_EQ(refusal([](Call& c) {
              c.inputs.recurrent_state = c.inputs.recurrent_state.column_block(0, 2);
            }),
            "here: recurrent_state.cols = 2: must equal dims.value_dim (3)");
  EXPECT_EQ(refusal([](Call& c) { c.problem.options.eps = 0; }),
            "here: options.eps = 0: must be > 0 and finite");
}

TEST(GdnArguments, RefusesARateThatIsNotFinite) {
  const auto with = [](double value) {
    return refusal([=](Call& c) { c.problem.A_log[1] = value; });
  };
  EXPECT_EQ(with(709), accepted);
  EXPECT_EQ(with(-std::numeric_limits<double>::infinity()), accepted);
  EXPECT_EQ(with(710), "here: A_log[1] = 710: exp(A_log) must be finite");
  EXPECT_EQ(with(std::nan("")), "here: A_log[1] = nan: exp(A_log) must be finite");
  // The bound is that of the accumulation type.
  auto narrow = test::stored_as<float>(Call().problem);
  narrow.A_log[0] = 89;
  EXPECT_THROW(check_inputs("here", narrow.dims, narrow.inputs(), narrow.options), Error);
  narrow.A_log[0] = 88;
  EXPECT_NO_THROW(check_inputs("here", narrow.dims, narrow.inputs(), narrow.options));
}

TEST(GdnArguments, RefusesAnEpsThatVanishesInTheAccumulator) {
  auto narrow = test::stored_as<float>(Call().problem);
  narrow.options.eps = 1e-60;
  EXPECT_EQ(heddle::test::thrown_text<Error>(
                [&] { check_inputs("here", narrow.dims, narrow.inputs(), narrow.options); }),
            "here: options.eps = 1e-60: must be > 0 in the accumulation type");
}

TEST(GdnArguments, RefusesPaddingBetweenAStateAndItsDocument) {
  const auto with = [](std::vector<std::int32_t> ids, bool conv_state, bool recurrent_state) {
    return refusal([&](Call& c) {
      c.problem.segment_ids = ids;
      c.problem.options.initial_segment = 2;
      if (!conv_state) {
        c.inputs.conv_state = {};
        c.wanted.d_conv_state = {};
      }
      if (!recurrent_state) {
        c.inputs.recurrent_state = {};
        c.wanted.d_recurrent_state = {};
      }
    });
  };
  const std::string refused =
      "here: segment_ids[0] = 0: must be > 0 where a state is given and a token follows: no "
      "padding "
      "between the two";
  EXPECT_EQ(with({0, 2, 2}, true, true), refused);
  EXPECT_EQ(with({0, 0, 2}, true, false), refused);
  EXPECT_EQ(with({0, 1, 2}, false, true), refused);
  EXPECT_EQ(with({0, 2, 2}, false, false), accepted);
  EXPECT_EQ(with({0, 0, 0}, true, true), accepted);
  EXPECT_EQ(with({2, 0, 2}, true, true), accepted);
}

TEST(GdnArguments, RefusesOutputsOfAnotherShape) {
  EXPECT_EQ(refusal([](Call& c) { c.outputs.o = {}; }),
            "here: o.rows = 0: must equal dims.tokens (3)");
  EXPECT_EQ(refusal([](Call& c) { c.outputs.o = c.outputs.o.column_block(0, 4); }),
            "here: o.cols = 4: must equal dims.output_columns() (6)");
  EXPECT_EQ(refusal([](Call& c) {
              c.outputs.final_recurrent_state = c.outputs.final_recurrent_state.row_block(0, 3);
            }),
            "here: final_recurrent_state.rows = 3: must equal value_heads * key_dim (4)");
  EXPECT_EQ(refusal([](Call& c) {
              c.outputs.final_conv_state = c.outputs.final_conv_state.column_block(0, 3);
            }),
            "here: final_conv_state.cols = 3: must equal dims.qkv_columns() (10)");
  EXPECT_EQ(refusal([](Call& c) { c.states.m = c.states.m.column_block(0, 1); }),
            "here: m.cols = 1: must equal dims.key_dim (2)");
  EXPECT_EQ(refusal([](Call& c) {
              c.states.final_recurrent_state = c.states.final_recurrent_state.column_block(0, 1);
            }),
            "here: final_recurrent_state.cols = 1: must equal dims.value_dim (3)");
  EXPECT_EQ(refusal([](Call& c) {
              c.states.final_conv_state = c.states.final_conv_state.row_block(0, 1);
            }),
            "here: final_conv_state.rows = 1: must equal kernel - 1 (3)");
}

TEST(GdnArguments, RefusesCotangentsOfAnotherShape) {
  EXPECT_EQ(refusal([](Call& c) { c.given.d_o = {}; }),
            "here: d_o.rows = 0: must equal dims.tokens (3)");
  EXPECT_EQ(refusal([](Call& c) {
              c.given.d_final_recurrent_state = c.given.d_final_recurrent_state.row_block(0, 1);
            }),
            "here: d_final_recurrent_state.rows = 1: must equal value_heads * key_dim (4)");
  EXPECT_EQ(refusal([](Call& c) {
              c.given.d_final_conv_state = c.given.d_final_conv_state.row_block(0, 1);
            }),
            "here: d_final_conv_state.rows = 1: must equal kernel - 1 (3)");
  EXPECT_EQ(refusal([](Call& c) { c.wanted.d_qkv = {}; }),
            "here: d_qkv.rows = 0: must equal dims.tokens (3)");
  EXPECT_EQ(refusal([](Call& c) {
              c.wanted.d_conv_weight.values = c.wanted.d_conv_weight.values.row_block(0, 1);
            }),
            "here: d_conv_weight.rows = 1: must equal dims.qkv_columns() (10)");
  EXPECT_EQ(
      refusal([](Call& c) { c.wanted.d_conv_bias.values = c.wanted.d_conv_bias.values.first(1); }),
      "here: d_conv_bias.size = 1: must equal dims.qkv_columns() (10)");
  EXPECT_EQ(refusal([](Call& c) { c.wanted.d_a = {}; }),
            "here: d_a.rows = 0: must equal dims.tokens (3)");
  EXPECT_EQ(refusal([](Call& c) { c.wanted.d_b = c.wanted.d_b.column_block(0, 1); }),
            "here: d_b.cols = 1: must equal dims.value_heads (2)");
  EXPECT_EQ(refusal([](Call& c) { c.wanted.d_A_log.values = c.wanted.d_A_log.values.first(1); }),
            "here: d_A_log.size = 1: must equal dims.value_heads (2)");
  EXPECT_EQ(
      refusal([](Call& c) { c.wanted.d_dt_bias.values = c.wanted.d_dt_bias.values.first(1); }),
      "here: d_dt_bias.size = 1: must equal dims.value_heads (2)");
  EXPECT_EQ(refusal([](Call& c) { c.wanted.d_conv_state = c.wanted.d_conv_state.row_block(0, 1); }),
            "here: d_conv_state.rows = 1: must equal kernel - 1 (3)");
  EXPECT_EQ(refusal([](Call& c) {
              c.wanted.d_recurrent_state = c.wanted.d_recurrent_state.column_block(0, 1);
            }),
            "here: d_recurrent_state.cols = 1: must equal dims.value_dim (3)");
}

TEST(GdnArguments, RefusesTheCotangentOfAStateThatIsNotGiven) {
  EXPECT_EQ(refusal([](Call& c) { c.inputs.conv_state = {}; }),
            "here: d_conv_state = given: must be null where conv_state is");
  EXPECT_EQ(refusal([](Call& c) { c.inputs.recurrent_state = {}; }),
            "here: d_recurrent_state = given: must be null where recurrent_state is");
}

TEST(GdnKeyHeads, RefusesHeadsThatTheLayerDoesNotHave) {
  const Dims dims{.tokens = 1, .key_heads = 4, .value_heads = 4, .key_dim = 1, .value_dim = 1};
  const auto refused = [&](KeyHeads heads) {
    return heddle::test::thrown_text<Error>([&] { heads.validate("here", dims); });
  };
  EXPECT_EQ(refused({.first = 0, .count = 4}), accepted);
  EXPECT_EQ(refused({.first = 4, .count = 0}), accepted);
  EXPECT_EQ(refused({.first = -1, .count = 1}),
            "here: key_heads.first = -1: must be in [0, dims.key_heads (4)]");
  EXPECT_EQ(refused({.first = 5, .count = 0}),
            "here: key_heads.first = 5: must be in [0, dims.key_heads (4)]");
  EXPECT_EQ(refused({.first = 3, .count = 2}),
            "here: key_heads.count = 2: must be in [0, dims.key_heads - first (1)]");
  EXPECT_EQ(refused({.first = 0, .count = -1}),
            "here: key_heads.count = -1: must be in [0, dims.key_heads - first (4)]");
}

}  // namespace
}  // namespace heddle::gdn

#include "heddle/gdn/reference_decode.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/problem.hpp"
#include "heddle/gdn/reference.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: the window not shifted by a token, or not by padding, or
// by padding before the row's end; the document so far forgotten between steps, or kept where another
// starts; a given state not taken over; o at padding left as it was.

namespace heddle::gdn {
namespace {

using heddle::test::same_bits;
using test::ForwardResult;
using test::Given;
using test::Problem;

using Ids = std::vector<std::int32_t>;

template <class S>
void expect_same_as_prefill(const Problem<S>& p) {
  using A = AccumulatorOf<S>;
  ForwardResult<A, S, A> expected(p.dims);
  reference::forward(p.dims, p.inputs(), p.options, expected.outputs(p.dims));
  ForwardResult<A, S, A> found(p.dims);
  reference::decode(p.dims, p.inputs(), p.options, found.outputs(p.dims));
  EXPECT_TRUE(same_bits(found.o, expected.o));
  EXPECT_TRUE(same_bits(found.final_recurrent_state, expected.final_recurrent_state));
  EXPECT_TRUE(same_bits(found.final_conv_state, expected.final_conv_state));
}

constexpr Dims small{.key_heads = 2, .value_heads = 4, .key_dim = 3, .value_dim = 2, .kernel = 4};

const Ids rows[] = {
    {},
    {5},
    {5, 5, 5, 5, 5, 5, 5},
    {0, 0, 0},
    {0, 0, 5, 5},
    {5, 0, 5, 0, 0, 5, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 5},
    {5, 5, 2, 2, 2, 5, 5},
    {5, 5, 0, 2, 0, 2, 2, 0, 0},
    {5, 0, 0, 0},
    {0, 5, 0, 5},
};

TEST(GdnReferenceDecode, GivesThePrefillsBits) {
  for (const Ids& ids : rows) {
    SCOPED_TRACE(::testing::PrintToString(ids));
    expect_same_as_prefill(test::random_problem(small, ids, 1, Given::bias));
    if (ids.empty() || ids[0] > 0) {
      const Problem<double> p = test::random_problem(small, ids, 2, Given::everything);
      expect_same_as_prefill(p);
      expect_same_as_prefill(test::stored_as<float>(p));
      expect_same_as_prefill(test::stored_as<bfloat16>(p));
      Problem<double> other = p;
      other.options.initial_segment = 3;
      expect_same_as_prefill(other);
      other.options.initial_segment = 0;
      expect_same_as_prefill(other);
    }
  }
}

TEST(GdnReferenceDecode, UnderEachOptionAndKernel) {
  for (const std::int64_t kernel : {1, 2, 6}) {
    Dims shape = small;
    shape.kernel = kernel;
    Problem<double> p = test::random_problem(shape, rows[7], 3, Given::everything);
    p.options.norm = NormMode::clamp;
    p.options.eps = 0.5;
    p.options.beta_range = BetaRange::doubled;
    expect_same_as_prefill(p);
  }
}

TEST(GdnReferenceDecode, StatesAreUpdatedInPlaceAndMayBeLeftOut) {
  const Problem<double> p = test::random_problem(small, rows[7], 4, Given::states);
  ForwardResult<double, double, double> expected(p.dims);
  reference::forward(p.dims, p.inputs(), p.options, expected.outputs(p.dims));
  Problem<double> in_place = p;
  std::vector<double> o(expected.o.size(), test::poison<double>());
  Outputs<double, double> outputs{.o = {o.data(), p.dims.tokens, p.dims.output_columns()}};
  reference::decode(p.dims, p.inputs(), p.options, outputs);
  EXPECT_TRUE(same_bits(o, expected.o));
  outputs.final_recurrent_state =
      test::matrix(in_place.recurrent_state, p.dims.state_rows(), p.dims.value_dim);
  outputs.final_conv_state =
      test::matrix(in_place.conv_state, p.dims.window_rows(), p.dims.qkv_columns());
  reference::decode(p.dims, in_place.inputs(), p.options, outputs);
  EXPECT_TRUE(same_bits(in_place.recurrent_state, expected.final_recurrent_state));
  EXPECT_TRUE(same_bits(in_place.conv_state, expected.final_conv_state));
}

TEST(GdnReferenceDecode, RefusesBeforeWriting) {
  Problem<double> p = test::random_problem(small, {5, 5}, 5, Given::states);
  p.segment_ids = {0, 5};
  ForwardResult<double, double, double> result(p.dims);
  const auto call = [&] {
    reference::decode(p.dims, p.inputs(), p.options, result.outputs(p.dims));
  };
  EXPECT_EQ(heddle::test::thrown_text<Error>(call),
            "gdn::reference::decode: segment_ids[0] = 0: must be > 0 where a state is given and a "
            "token follows: no padding between the two");
  const ForwardResult<double, double, double> untouched(p.dims);
  EXPECT_TRUE(same_bits(result.o, untouched.o));
  EXPECT_TRUE(same_bits(result.final_conv_state, untouched.final_conv_state));
}

}  // namespace
}  // namespace heddle::gdn

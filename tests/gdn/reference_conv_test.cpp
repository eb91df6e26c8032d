#include "heddle/gdn/reference_conv.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"

// Mutants these tests are written against: the last tap not the current token; taps reaching across
// a document's start, or skipping padding; the state read in a later document; a short row's window
// clamped instead of shifted; the window ending at the last position instead of the last token; the
// previous document's tokens left in it; SiLU' dropped; the state's taps missing from d_weight; the
// final window's cotangent dropped, not passed through to the state, or given to a masked slot; bias
// forgotten; overwrite and accumulate swapped; padding read or left unwritten.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::Random;

using Vector = std::vector<double>;
using Ids = std::vector<std::int32_t>;
using reference::WindowSlot;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

struct Conv {
  std::int64_t columns = 1;
  std::int64_t kernel = 4;
  Ids segment_ids{};
  std::int32_t initial_segment = 0;
  Vector x{}, weight{}, bias{}, state{};

  [[nodiscard]] std::int64_t tokens() const {
    return static_cast<std::int64_t>(segment_ids.size());
  }
  [[nodiscard]] Segments segments() const { return {segment_ids, initial_segment}; }
  [[nodiscard]] reference::ConvInputs<double, double> inputs() const {
    return {.x = {x.data(), tokens(), columns},
            .weight = {weight.data(), columns, kernel},
            .bias = bias,
            .state = {state.empty() ? nullptr : state.data(), kernel - 1, columns}};
  }
};

struct Forward {
  Vector z, y, final_state;
};

Forward forward(const Conv& c) {
  const auto size = static_cast<std::size_t>(c.tokens() * c.columns);
  Forward out{Vector(size, nan), Vector(size, nan),
              Vector(static_cast<std::size_t>((c.kernel - 1) * c.columns), nan)};
  reference::conv_forward<double, double, double>(c.segments(), c.inputs(), ConvOutput::accumulator,
                                                  {out.z.data(), c.tokens(), c.columns},
                                                  {out.y.data(), c.tokens(), c.columns});
  reference::conv_final_state<double, double>(c.segments(), c.inputs(),
                                              {out.final_state.data(), c.kernel - 1, c.columns});
  return out;
}

struct Backward {
  Vector d_x, d_weight, d_bias, d_state;
};

Backward backward(const Conv& c, const Vector& d_y, const Vector& d_final_state,
                  Write write = Write::overwrite, double before = nan) {
  const Forward at = forward(c);
  Backward out{Vector(c.x.size(), nan), Vector(c.weight.size(), before),
               Vector(static_cast<std::size_t>(c.columns), before), Vector(c.state.size(), nan)};
  reference::conv_backward<double, double, double>(
      c.segments(), c.inputs(), {at.z.data(), c.tokens(), c.columns},
      {d_y.data(), c.tokens(), c.columns},
      {d_final_state.empty() ? nullptr : d_final_state.data(), c.kernel - 1, c.columns},
      {.d_x = {out.d_x.data(), c.tokens(), c.columns},
       .d_weight = {{out.d_weight.data(), c.columns, c.kernel}, write},
       .d_bias = {out.d_bias, write},
       .d_state = {c.state.empty() ? nullptr : out.d_state.data(), c.kernel - 1, c.columns}});
  return out;
}

/// One column whose tap w weighs 10^w and whose token t is t + 1: z shows in its digits what was read.
Conv digits(const Ids& ids) {
  Conv c{.segment_ids = ids, .weight = {1, 10, 100, 1000}};
  for (std::size_t t = 0; t < ids.size(); ++t) {
    c.x.push_back(ids[t] > 0 ? static_cast<double>(t + 1) : nan);
  }
  return c;
}

TEST(GdnReferenceConv, TheLastTapIsTheCurrentToken) {
  EXPECT_EQ(forward(digits({1, 1, 1, 1, 1})).z, (Vector{1000, 2100, 3210, 4321, 5432}));
}

TEST(GdnReferenceConv, SiluOfZ) {
  Conv c{.kernel = 1, .segment_ids = {1, 1}, .x = {2, -1}, .weight = {1}};
  EXPECT_TRUE(
      close(forward(c).y, Vector{2 / (1 + std::exp(-2.0)), -1 / (1 + std::exp(1.0))}, 1e-15));
}

TEST(GdnReferenceConv, ADocumentReadsItsOwnTokensOnly) {
  EXPECT_EQ(forward(digits({1, 1, 2, 2, 1, 1})).z, (Vector{1000, 2100, 3000, 4300, 5000, 6500}));
}

TEST(GdnReferenceConv, PaddingOccupiesASlotAndIsNotRead) {
  const Forward out = forward(digits({0, 1, 0, 1, 1, 0, 0}));
  EXPECT_EQ(out.z, (Vector{0, 2000, 0, 4020, 5402, 0, 0}));
  EXPECT_EQ(out.y[0], 0);
  EXPECT_EQ(out.y[2], 0);
  EXPECT_EQ(out.final_state, (Vector{0, 4, 5})) << "positions 2, 3, 4: padding, token, last token";
}

TEST(GdnReferenceConv, BiasIsAddedToTokensOnly) {
  Conv c = digits({1, 0});
  c.bias = {0.5};
  EXPECT_EQ(forward(c).z, (Vector{1000.5, 0}));
}

TEST(GdnReferenceConv, TheStateIsReadByItsOwnDocumentOnly) {
  Conv c = digits({7, 7, 3, 3});
  c.state = {7, 8, 9};
  c.initial_segment = 7;
  EXPECT_EQ(forward(c).z, (Vector{1987, 2198, 3000, 4300}));
  c.initial_segment = 3;
  c.state = {nan, nan, nan};
  EXPECT_EQ(forward(c).z, (Vector{1000, 2100, 3000, 4300}));
}

TEST(GdnReferenceConv, AContinuedRowWithoutStateReadsZeros) {
  Conv c = digits({7, 7});
  c.initial_segment = 7;
  EXPECT_EQ(forward(c).z, (Vector{1000, 2100}));
  EXPECT_EQ(forward(c).final_state, (Vector{0, 1, 2}));
}

TEST(GdnReferenceConv, FinalStates) {
  struct Case {
    const char* name;
    Ids ids;
    std::int32_t initial_segment;
    Vector expected;
  };
  const Case cases[] = {
      {"long row", {4, 4, 4, 4, 4}, 4, {3, 4, 5}},
      {"shorter than the window: slots shift", {4, 4}, 4, {-1, 1, 2}},
      {"one token", {4}, 4, {-2, -1, 1}},
      {"no token", {}, 4, {-3, -2, -1}},
      {"padding alone", {0, 0, 0, 0}, 4, {-3, -2, -1}},
      {"padding alone, no document", {0, 0}, 0, {-3, -2, -1}},
      {"trailing padding is skipped", {4, 4, 0, 0, 0}, 4, {-1, 1, 2}},
      {"short last document", {4, 4, 4, 5, 5}, 4, {0, 4, 5}},
      {"one-token last document", {4, 4, 4, 5}, 4, {0, 0, 4}},
      {"short row of another document", {5, 5}, 4, {0, 1, 2}},
      {"interior padding", {4, 4, 0, 4}, 4, {2, 0, 4}},
  };
  for (const Case& each : cases) {
    Conv c = digits(each.ids);
    c.state = {-3, -2, -1};
    c.initial_segment = each.initial_segment;
    EXPECT_EQ(forward(c).final_state, each.expected) << each.name;
    // In place, too.
    reference::conv_final_state<double, double>(c.segments(), c.inputs(), {c.state.data(), 3, 1});
    EXPECT_EQ(c.state, each.expected) << each.name << " in place";
  }
}

TEST(GdnReferenceConv, WindowSlots) {
  const Segments segments(Ids{4, 0, 4, 5}, 4);
  using From = WindowSlot::From;
  EXPECT_EQ(reference::window_slot(segments, 4, 2, 0), (WindowSlot{From::state, 2}));
  EXPECT_EQ(reference::window_slot(segments, 4, 2, 1), (WindowSlot{From::token, 0}));
  EXPECT_EQ(reference::window_slot(segments, 4, 2, 2), (WindowSlot{From::nothing, 1}));
  EXPECT_EQ(reference::window_slot(segments, 4, 2, 3), (WindowSlot{From::token, 2}));
  EXPECT_EQ(reference::window_slot(segments, 4, 3, 2), (WindowSlot{From::nothing, 2}));
  EXPECT_EQ(reference::window_slot(segments, 5, 3, 0), (WindowSlot{From::nothing, 3}));
}

TEST(GdnReferenceConv, AKernelOfOneHasNoWindow) {
  Conv c{.kernel = 1, .segment_ids = {1, 2, 0}, .x = {3, 4, nan}, .weight = {2}, .bias = {1}};
  const Forward out = forward(c);
  EXPECT_EQ(out.z, (Vector{7, 9, 0}));
  EXPECT_TRUE(out.final_state.empty());
  const Backward back = backward(c, {1, 1, nan}, {});
  EXPECT_EQ(back.d_weight.size(), 1U);
  EXPECT_GT(back.d_x[0], 0);
  EXPECT_EQ(back.d_x[2], 0);
}

TEST(GdnReferenceConv, StorageRoundingRoundsTheOutputAlone) {
  const std::vector<bfloat16> x{bfloat16(1.0F), bfloat16(0.3F)};
  const std::vector<float> weight{0.7F};
  const Ids ids{1, 1};
  std::vector<float> z(2);
  std::vector<float> y(2);
  const reference::ConvInputs<bfloat16, float> inputs{
      .x = {x.data(), 2, 1}, .weight = {weight.data(), 1, 1}, .bias = {}, .state = {}};
  for (const ConvOutput output : {ConvOutput::accumulator, ConvOutput::storage}) {
    reference::conv_forward<bfloat16, float, float>(Segments(ids, 0), inputs, output,
                                                    {z.data(), 2, 1}, {y.data(), 2, 1});
    EXPECT_EQ(z[0], 0.7F);
    const float silu = 0.7F * reference::sigmoid(0.7F);
    EXPECT_EQ(y[0], output == ConvOutput::storage ? static_cast<float>(bfloat16(silu)) : silu);
  }
}

TEST(GdnReferenceConv, BackwardAgreesWithCentralDifferences) {
  struct Case {
    const char* name;
    Ids ids;
    std::int32_t initial_segment;
    std::int64_t kernel;
  };
  const Case cases[] = {
      {"one document", {1, 1, 1, 1, 1, 1}, 0, 4},
      {"continued, documents and padding", {3, 3, 0, 3, 1, 0, 1, 2, 0}, 3, 4},
      {"state of another document", {1, 1, 1, 2}, 9, 4},
      {"shorter than the window", {3, 3}, 3, 4},
      {"one token", {3}, 3, 5},
      {"short with trailing padding", {3, 3, 0, 0, 0}, 3, 5},
      {"padding first", {0, 0, 1, 1, 1}, 0, 3},
      {"kernel of two", {3, 3, 4, 4, 4}, 3, 2},
      {"kernel of one", {3, 3, 4}, 3, 1},
      {"no token", {0, 0}, 3, 4},
      {"nothing", {}, 3, 4},
  };
  for (const Case& each : cases) {
    for (const bool with_state : {false, true}) {
      Random random(2);
      Conv c{.columns = 3,
             .kernel = each.kernel,
             .segment_ids = each.ids,
             .initial_segment = each.initial_segment};
      const auto tokens = static_cast<std::int64_t>(each.ids.size());
      c.x = random.normals<double>(tokens * 3);
      c.weight = random.normals<double>(3 * each.kernel);
      c.bias = random.normals<double>(3);
      const bool state_allowed = each.ids.empty() || each.ids[0] > 0;
      if (with_state && state_allowed) {
        c.state = random.normals<double>((each.kernel - 1) * 3);
      }
      const Vector d_y = random.normals<double>(tokens * 3);
      const Vector d_final = random.normals<double>((each.kernel - 1) * 3);
      const auto loss = [&] {
        const Forward out = forward(c);
        double sum = 0;
        for (std::size_t i = 0; i < d_y.size(); ++i) {
          sum += out.y[i] * d_y[i];
        }
        for (std::size_t i = 0; i < d_final.size(); ++i) {
          sum += out.final_state[i] * d_final[i];
        }
        return sum;
      };
      const Backward found = backward(c, d_y, d_final);
      const auto check = [&](const Vector& actual, Vector& input, const char* what) {
        const Vector expected = heddle::test::central_differences(input, loss);
        ASSERT_EQ(actual.size(), expected.size());
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_NEAR(actual[i], expected[i], 1e-8)
              << each.name << ", state " << with_state << ", " << what << " " << i;
        }
      };
      check(found.d_x, c.x, "x");
      check(found.d_weight, c.weight, "weight");
      check(found.d_bias, c.bias, "bias");
      check(found.d_state, c.state, "state");
    }
  }
}

TEST(GdnReferenceConv, PaddingIsNotReadBackward) {
  Conv c = digits({0, 1, 0, 1, 2, 0});
  const Backward found = backward(c, {nan, 1, nan, 1, 1, nan}, {1, 1, 1});
  EXPECT_EQ(found.d_x[0], 0);
  EXPECT_EQ(found.d_x[2], 0);
  EXPECT_EQ(found.d_x[5], 0);
  for (const Vector& values : {found.d_x, found.d_weight, found.d_bias}) {
    for (const double value : values) {
      EXPECT_TRUE(std::isfinite(value));
    }
  }
}

TEST(GdnReferenceConv, ParametersAreOverwrittenOrAddedToOrLeftAlone) {
  Random random(8);
  Conv c{.columns = 2, .segment_ids = {1, 1, 1, 2, 2}};
  c.x = random.normals<double>(10);
  c.weight = random.normals<double>(8);
  c.bias = random.normals<double>(2);
  const Vector d_y = random.normals<double>(10);
  const Backward overwritten = backward(c, d_y, {});
  const Backward added = backward(c, d_y, {}, Write::accumulate, 3.0);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(added.d_weight[i], 3.0 + overwritten.d_weight[i]);
  }
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(added.d_bias[i], 3.0 + overwritten.d_bias[i]);
  }
  const Forward at = forward(c);
  Vector d_x(10, nan);
  reference::conv_backward<double, double, double>(
      c.segments(), c.inputs(), {at.z.data(), 5, 2}, {d_y.data(), 5, 2}, {},
      {.d_x = {d_x.data(), 5, 2}, .d_weight = {}, .d_bias = {}, .d_state = {}});
  EXPECT_EQ(d_x, overwritten.d_x);
}

TEST(GdnReferenceConv, TheStatesCotangentMayTakeTheFinalOnesPlace) {
  Conv c = digits({4, 4});
  c.state = {-3, -2, -1};
  c.initial_segment = 4;
  const Vector d_y{0.5, -0.25};
  Vector in_place{1, 2, 3};
  const Backward apart = backward(c, d_y, in_place);
  const Forward at = forward(c);
  Vector d_x(2, nan);
  reference::conv_backward<double, double, double>(c.segments(), c.inputs(), {at.z.data(), 2, 1},
                                                   {d_y.data(), 2, 1}, {in_place.data(), 3, 1},
                                                   {.d_x = {d_x.data(), 2, 1},
                                                    .d_weight = {},
                                                    .d_bias = {},
                                                    .d_state = {in_place.data(), 3, 1}});
  EXPECT_EQ(in_place, apart.d_state);
  EXPECT_EQ(d_x, apart.d_x);
}

}  // namespace
}  // namespace heddle::gdn

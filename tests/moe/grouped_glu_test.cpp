#include "heddle/moe/grouped_glu.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/isa.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// How a fusion is proven here: the seven checks of spec/moe.md 6, each a test of that number below. A norm
// over a whole gradient cannot see swapped halves, so everything is compared element by element, half by
// half, expert by expert, against double, and against the passes that the fusion replaces.
//
// Mutants these tests are written against (check 7): halves swapped in the forward, in the backward only,
// in both; up read from the next tile; the activation after a part of the contraction; the weight applied
// twice, or never; the dot taken of the weighted product, or divided by the weight; the sigmoid's slope
// without the gate's term; wo not transposed; -0 kept; a group's first row forgotten in a tile that begins
// further down; strict and fast exchanged; the partial dots of two tiles in one place.

namespace heddle::moe {
namespace {

using heddle::test::close;
using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;
using heddle::test::thrown_text;
using heddle::test::with_threads;

struct Shape {
  std::vector<std::int64_t> sizes;
  std::int64_t hidden;  // D
  std::int64_t width;   // F
};

/// Everything that forward and backward of some experts' gated unit write.
template <class S>
struct Result {
  std::vector<S> activation, gate_up, d_gate_up, weighted_activation;
  std::vector<AccumulatorOf<S>> d_row_weights;
};

template <class S>
struct Unit {
  using A = AccumulatorOf<S>;

  Shape shape;
  std::vector<std::int64_t> offsets;
  std::vector<S> rows, wi, wo, d_result;
  std::vector<A> row_weights;

  /// Unfilled rows before and behind the groups, NaN in every input.
  Unit(const Shape& of, std::int64_t before, std::int64_t behind, std::uint64_t seed)
      : shape(of), offsets{before} {
    for (const std::int64_t size : shape.sizes) {
      offsets.push_back(offsets.back() + size);
    }
    Random random(seed);
    const std::int64_t count = offsets.back() + behind;
    const double scale = 1 / std::sqrt(static_cast<double>(shape.hidden));
    rows = random.normals<S>(count * shape.hidden);
    wi = random.normals<S>(experts() * shape.hidden * 2 * shape.width, 2 * scale);
    wo = random.normals<S>(experts() * shape.width * shape.hidden, scale);
    d_result = random.normals<S>(count * shape.hidden);
    row_weights = random.normals<A>(count, 0.5);  // a dot divided by its weight would show
    if (offsets.back() > before) {
      row_weights[static_cast<std::size_t>(before)] = 0;
    }
    for (std::int64_t r = 0; r < count; ++r) {
      if (!filled(r)) {
        std::fill_n(rows.begin() + r * shape.hidden, shape.hidden, poison<S>());
        std::fill_n(d_result.begin() + r * shape.hidden, shape.hidden, poison<S>());
        row_weights[static_cast<std::size_t>(r)] = poison<A>();
      }
    }
  }

  [[nodiscard]] std::int64_t experts() const {
    return static_cast<std::int64_t>(shape.sizes.size());
  }
  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(row_weights.size()); }
  [[nodiscard]] bool filled(std::int64_t row) const {
    return offsets.front() <= row && row < offsets.back();
  }
  [[nodiscard]] ExpertGroups groups() const { return {offsets}; }
  [[nodiscard]] Factor<S> row_factor() const {
    return as_is(ConstMatrixView<S>(rows.data(), count(), shape.hidden));
  }
  [[nodiscard]] Factor<S> d_result_factor() const {
    return as_is(ConstMatrixView<S>(d_result.data(), count(), shape.hidden));
  }
  [[nodiscard]] ConstMatrixView<S> wi_view() const {
    return {wi.data(), experts() * shape.hidden, 2 * shape.width};
  }
  [[nodiscard]] ConstMatrixView<S> wo_view() const {
    return {wo.data(), experts() * shape.width, shape.hidden};
  }
  [[nodiscard]] MatrixView<S> narrow_view(std::vector<S>& values) const {
    return {values.data(), count(), shape.width};
  }
  [[nodiscard]] MatrixView<S> wide_view(std::vector<S>& values) const {
    return {values.data(), count(), 2 * shape.width};
  }

  [[nodiscard]] Result<S> poisoned(S value) const {
    const auto narrow_size = static_cast<std::size_t>(count() * shape.width);
    return {std::vector<S>(narrow_size, value), std::vector<S>(2 * narrow_size, value),
            std::vector<S>(2 * narrow_size, value), std::vector<S>(narrow_size, value),
            std::vector<A>(static_cast<std::size_t>(count()), static_cast<A>(value))};
  }

  /// Forward and backward, fused, one after the other.
  [[nodiscard]] Result<S> fused(GluEpilogue epilogue, UnfilledRows unfilled = UnfilledRows::zeroed,
                                S before = poison<S>(), bool weighted = true) const {
    Result<S> result = poisoned(before);
    Workspace workspace;
    grouped_glu(
        groups(), row_factor(), wi_view(),
        {.activation = narrow_view(result.activation), .gate_up = wide_view(result.gate_up)},
        epilogue, unfilled, workspace);
    grouped_glu_backward<S>(
        groups(),
        {.d_result = d_result_factor(),
         .wo = wo_view(),
         .gate_up = wide_view(result.gate_up),
         .row_weights = weighted ? std::span<const A>(row_weights) : std::span<const A>()},
        {.d_gate_up = wide_view(result.d_gate_up),
         .weighted_activation = narrow_view(result.weighted_activation),
         .d_row_weights = result.d_row_weights},
        epilogue, unfilled, workspace);
    return result;
  }

  /// The passes that the fusion replaces: a product, then a pass over what it stored.
  [[nodiscard]] Result<S> separate() const {
    Result<S> result = poisoned(poison<S>());
    Workspace workspace;
    grouped_product(groups(), row_factor(), wi_view(), wide_view(result.gate_up),
                    UnfilledRows::zeroed, workspace);
    glu<S>(wide_view(result.gate_up), narrow_view(result.activation));
    std::vector<A> q(static_cast<std::size_t>(count() * shape.width));
    grouped_product_d_rows(groups(), d_result_factor(), wo_view(),
                           MatrixView<A>(q.data(), count(), shape.width), UnfilledRows::zeroed,
                           workspace);
    std::vector<S> d_activation(q.size());
    for (std::int64_t r = 0; r < count(); ++r) {
      const A weight = filled(r) ? row_weights[static_cast<std::size_t>(r)] : A(0);
      for (std::int64_t f = 0; f < shape.width; ++f) {
        const auto i = static_cast<std::size_t>(r * shape.width + f);
        d_activation[i] = narrow<S>(weight * q[i]);
        result.weighted_activation[i] = narrow<S>(weight * widen<A>(result.activation[i]));
      }
    }
    glu_backward<S>(wide_view(result.gate_up), narrow_view(d_activation),
                    wide_view(result.d_gate_up));
    return result;
  }
};

/// The unit in double, from what the fused passes were given: of the backward, from the gate_up and
/// activation that were stored.
struct Exact {
  std::vector<double> gate_up, activation, d_gate_up, weighted_activation, d_row_weights;
};

template <class S>
Exact by_definition(const Unit<S>& u, const std::vector<S>* stored_gate_up = nullptr) {
  const std::int64_t D = u.shape.hidden;
  const std::int64_t F = u.shape.width;
  const auto at = [](const auto& values, std::int64_t i) {
    return static_cast<double>(values[static_cast<std::size_t>(i)]);
  };
  const auto n = static_cast<std::size_t>(u.count() * F);
  Exact x{std::vector<double>(2 * n), std::vector<double>(n), std::vector<double>(2 * n),
          std::vector<double>(n), std::vector<double>(static_cast<std::size_t>(u.count()))};
  for (std::int64_t e = 0; e < u.experts(); ++e) {
    for (std::int64_t r = u.offsets[static_cast<std::size_t>(e)];
         r < u.offsets[static_cast<std::size_t>(e) + 1]; ++r) {
      const double weight = at(u.row_weights, r);
      for (std::int64_t f = 0; f < 2 * F; ++f) {
        double sum = 0;
        for (std::int64_t d = 0; d < D; ++d) {
          sum += at(u.rows, r * D + d) * at(u.wi, (e * D + d) * 2 * F + f);
        }
        x.gate_up[static_cast<std::size_t>(r * 2 * F + f)] =
            stored_gate_up == nullptr ? sum : at(*stored_gate_up, r * 2 * F + f);
      }
      for (std::int64_t f = 0; f < F; ++f) {
        double q = 0;
        for (std::int64_t d = 0; d < D; ++d) {
          q += at(u.d_result, r * D + d) * at(u.wo, (e * F + f) * D + d);
        }
        const double g = at(x.gate_up, r * 2 * F + f);
        const double up = at(x.gate_up, r * 2 * F + F + f);
        const double s = 1 / (1 + std::exp(-g));
        const auto i = static_cast<std::size_t>(r * F + f);
        x.activation[i] = g * s * up;
        x.weighted_activation[i] = weight * x.activation[i];
        x.d_row_weights[static_cast<std::size_t>(r)] += q * x.activation[i];
        x.d_gate_up[static_cast<std::size_t>(r * 2 * F + f)] =
            weight * q * up * s * (1 + g * (1 - s));
        x.d_gate_up[static_cast<std::size_t>(r * 2 * F + F + f)] = weight * q * g * s;
      }
    }
  }
  return x;
}

// K steps 1, 2 and 3 of 512; a tile of 256 (forward) and 512 columns (backward) dividing F and not;
// groups that end inside a tile of rows and beyond one; empty first, middle and last group.
const std::vector<Shape> shapes = {
    {{0, 5, 0, 13, 1, 0}, 64, 48}, {{3, 0, 260}, 40, 256}, {{9, 4}, 700, 300},
    {{0, 7, 0}, 1100, 520},        {{2, 1}, 33, 1030},     {{17, 0, 8}, 512, 1},
};

/// One half, [0,F) or [F,2F), of one row of [R,2F].
template <class T>
std::vector<T> half_row(const std::vector<T>& values, std::int64_t row, std::int64_t width,
                        int half) {
  const auto begin = values.begin() + row * 2 * width + half * width;
  return {begin, begin + width};
}

/// Element by element, within a share of the row's largest value; sums of a row of one or two columns may
/// cancel, but a gate or up of 4 is in most rows and multiplies what q is off by.
template <class T>
::testing::AssertionResult row_close(const std::vector<T>& actual,
                                     const std::vector<double>& expected, double tolerance) {
  double scale = 4;
  for (const double value : expected) {
    scale = std::max(scale, std::abs(value));
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!(std::abs(static_cast<double>(actual[i]) - expected[i]) <= tolerance * scale)) {
      return ::testing::AssertionFailure()
             << "column " << i << ": " << static_cast<double>(actual[i]) << " against "
             << expected[i];
    }
  }
  return ::testing::AssertionSuccess();
}

template <class S>
class FusedGlu : public ::testing::Test {
 public:
  /// Of a row's largest value.
  static constexpr double tolerance = std::is_same_v<S, float> ? 2e-6 : 2 * 0x1p-8;
};
using Types = ::testing::Types<float, bfloat16>;
TYPED_TEST_SUITE(FusedGlu, Types);

// Checks 1 and 2: element by element, each half of each row, forward and backward together.
TYPED_TEST(FusedGlu, Check1And2EveryElementOfBothHalvesOfEachRow) {
  using S = TypeParam;
  for (const Shape& shape : shapes) {
    const Unit<S> u(shape, 3, 4, 1);
    for (const GluEpilogue epilogue : {GluEpilogue::strict, GluEpilogue::fast}) {
      const Result<S> result = u.fused(epilogue);
      const Exact whole = by_definition(u);
      const Exact from_stored = by_definition(u, &result.gate_up);
      for (std::int64_t r = u.offsets.front(); r < u.offsets.back(); ++r) {
        for (const int half : {0, 1}) {
          ASSERT_TRUE(row_close(half_row(result.gate_up, r, shape.width, half),
                                half_row(whole.gate_up, r, shape.width, half),
                                TestFixture::tolerance))
              << "row " << r << " half " << half;
          // A row of weight 0 has gradients of exact zeros.
          ASSERT_TRUE(row_close(half_row(result.d_gate_up, r, shape.width, half),
                                half_row(from_stored.d_gate_up, r, shape.width, half),
                                TestFixture::tolerance))
              << "row " << r << " half " << half;
        }
        const auto row_of = [&](const auto& values) {
          using T = typename std::decay_t<decltype(values)>::value_type;
          return std::vector<T>(values.begin() + r * shape.width,
                                values.begin() + (r + 1) * shape.width);
        };
        const Exact& source = epilogue == GluEpilogue::strict ? from_stored : whole;
        ASSERT_TRUE(row_close(row_of(result.activation), row_of(source.activation),
                              TestFixture::tolerance));
        ASSERT_TRUE(row_close(row_of(result.weighted_activation),
                              row_of(from_stored.weighted_activation), TestFixture::tolerance));
      }
      const auto filled_dots = [&](const auto& values) {
        using T = typename std::decay_t<decltype(values)>::value_type;
        return std::vector<T>(values.begin() + u.offsets.front(),
                              values.begin() + u.offsets.back());
      };
      // f32: 1e-5 of the largest; bf16: a dot of activations that were rounded once each.
      EXPECT_TRUE(close(filled_dots(result.d_row_weights), filled_dots(from_stored.d_row_weights),
                        std::is_same_v<S, float> ? 1e-5 : 5e-3));
    }
  }
}

TYPED_TEST(FusedGlu, Check2StrictHasTheBitsOfThePassesItReplaces) {
  using S = TypeParam;
  for (const Shape& shape : shapes) {
    const Unit<S> u(shape, 2, 5, 2);
    const Result<S> fused = u.fused(GluEpilogue::strict);
    const Result<S> separate = u.separate();
    EXPECT_TRUE(same_bits(fused.gate_up, separate.gate_up));
    EXPECT_TRUE(same_bits(fused.activation, separate.activation));
    EXPECT_TRUE(same_bits(fused.weighted_activation, separate.weighted_activation));
    EXPECT_TRUE(same_bits(fused.d_gate_up, separate.d_gate_up));
    // Fast reads sums that are not rounded: other bits in bf16, the same in f32.
    EXPECT_EQ(static_cast<bool>(same_bits(u.fused(GluEpilogue::fast).activation, fused.activation)),
              (std::is_same_v<S, float>));
  }
}

TYPED_TEST(FusedGlu, Check2NoRowsAtAll) {
  using S = TypeParam;
  const Unit<S> u({{0, 0, 0}, 20, 12}, 0, 0, 3);
  EXPECT_TRUE(u.fused(GluEpilogue::strict).activation.empty());
  const Unit<S> nothing_filled({{0, 0}, 20, 12}, 0, 3, 3);
  for (const S value : nothing_filled.fused(GluEpilogue::strict).d_gate_up) {
    EXPECT_EQ(static_cast<float>(value), 0.0F);
  }
}

// Check 3: one column of the cotangent of the activation at a time. With wo the identity, that is one
// column of d_result.
TYPED_TEST(FusedGlu, Check3AColumnOfTheCotangentReachesItsTwoColumnsAlone) {
  using S = TypeParam;
  constexpr std::int64_t width = 600;  // a second tile of 88
  Unit<S> u({{2, 1}, width, width}, 0, 0, 4);
  std::fill(u.wo.begin(), u.wo.end(), S(0.0F));
  for (std::int64_t e = 0; e < 2; ++e) {
    for (std::int64_t f = 0; f < width; ++f) {
      u.wo[static_cast<std::size_t>((e * width + f) * width + f)] = S(1.0F);
    }
  }
  std::fill(u.row_weights.begin(), u.row_weights.end(), 0.5F);
  const std::vector<S> gate_up = Random(5).normals<S>(3 * 2 * width);
  Workspace workspace;
  for (const std::int64_t f : {0, 1, 15, 16, 255, 256, 257, 511, 512, 513, 598, 599}) {
    std::fill(u.d_result.begin(), u.d_result.end(), S(0.0F));
    for (std::int64_t r = 0; r < 3; ++r) {
      u.d_result[static_cast<std::size_t>(r * width + f)] = S(1.0F);
    }
    std::vector<S> d_gate_up(gate_up.size(), poison<S>());
    grouped_glu_backward<S>(u.groups(),
                            {.d_result = u.d_result_factor(),
                             .wo = u.wo_view(),
                             .gate_up = {gate_up.data(), 3, 2 * width},
                             .row_weights = u.row_weights},
                            {.d_gate_up = u.wide_view(d_gate_up)}, GluEpilogue::strict,
                            UnfilledRows::zeroed, workspace);
    for (std::size_t i = 0; i < d_gate_up.size(); ++i) {
      const bool reached = static_cast<std::int64_t>(i) % width == f;
      ASSERT_EQ(static_cast<float>(d_gate_up[i]) != 0, reached) << "column " << f << ", at " << i;
    }
  }
}

// Check 4: what was in scratch, in the outputs and in unfilled rows before never shows.
TYPED_TEST(FusedGlu, Check4PoisonedScratchOutputsAndUnfilledRows) {
  using S = TypeParam;
  for (const Shape& shape : shapes) {
    const Unit<S> u(shape, 2, 3, 6);
    const Result<S> expected = u.fused(GluEpilogue::strict, UnfilledRows::zeroed, S(0.0F));
    for (const float value : {std::numeric_limits<float>::quiet_NaN(), 1e30F}) {
      Workspace workspace;
      const std::size_t bytes =
          grouped_glu_workspace_bytes<S>(u.experts(), u.count(), shape.hidden, shape.width, 64);
      {
        const Workspace::Frame frame(workspace);
        const auto scratch = workspace.take<float>(static_cast<std::int64_t>(bytes / 4));
        std::fill(scratch.begin(), scratch.end(), value);
      }
      Result<S> result = u.poisoned(S(value));
      grouped_glu(
          u.groups(), u.row_factor(), u.wi_view(),
          {.activation = u.narrow_view(result.activation), .gate_up = u.wide_view(result.gate_up)},
          GluEpilogue::strict, UnfilledRows::untouched, workspace);
      grouped_glu_backward<S>(u.groups(),
                              {.d_result = u.d_result_factor(),
                               .wo = u.wo_view(),
                               .gate_up = u.wide_view(result.gate_up),
                               .row_weights = u.row_weights},
                              {.d_gate_up = u.wide_view(result.d_gate_up),
                               .weighted_activation = u.narrow_view(result.weighted_activation),
                               .d_row_weights = result.d_row_weights},
                              GluEpilogue::strict, UnfilledRows::untouched, workspace);
      const auto filled = [&](const auto& values) {
        using T = typename std::decay_t<decltype(values)>::value_type;
        const std::size_t row = values.size() / static_cast<std::size_t>(u.count());
        return std::vector<T>(values.begin() + static_cast<std::ptrdiff_t>(row) * u.offsets.front(),
                              values.begin() + static_cast<std::ptrdiff_t>(row) * u.offsets.back());
      };
      EXPECT_TRUE(same_bits(filled(result.activation), filled(expected.activation)));
      EXPECT_TRUE(same_bits(filled(result.gate_up), filled(expected.gate_up)));
      EXPECT_TRUE(same_bits(filled(result.d_gate_up), filled(expected.d_gate_up)));
      EXPECT_TRUE(
          same_bits(filled(result.weighted_activation), filled(expected.weighted_activation)));
      EXPECT_TRUE(same_bits(filled(result.d_row_weights), filled(expected.d_row_weights)));
      for (std::int64_t r = 0; r < u.count(); ++r) {
        if (!u.filled(r)) {  // left as it was
          const float first =
              static_cast<float>(result.d_gate_up[static_cast<std::size_t>(r * 2 * shape.width)]);
          EXPECT_TRUE(std::isnan(value) ? std::isnan(first)
                                        : first == static_cast<float>(S(value)));
          EXPECT_EQ(
              static_cast<float>(expected.d_gate_up[static_cast<std::size_t>(r * 2 * shape.width)]),
              0.0F);
        }
      }
    }
  }
}

// Check 5: central differences through both passes, in double.
TEST(FusedGluF64, Check5CentralDifferences) {
  Unit<double> u({{0, 3, 2, 0}, 6, 5}, 1, 1, 7);
  const std::int64_t D = 6;
  const std::int64_t F = 5;
  // loss = sum of row_weight * <d_result, activation * wo>: its gradients by gate_up (the argument
  // here), by the weights, and by wo.
  const Result<double> result = u.fused(GluEpilogue::strict);
  std::vector<double> gate_up = result.gate_up;
  const auto loss = [&] {
    double total = 0;
    for (std::int64_t e = 0; e < u.experts(); ++e) {
      for (std::int64_t r = u.offsets[static_cast<std::size_t>(e)];
           r < u.offsets[static_cast<std::size_t>(e) + 1]; ++r) {
        for (std::int64_t f = 0; f < F; ++f) {
          const double g = gate_up[static_cast<std::size_t>(r * 2 * F + f)];
          const double a =
              g / (1 + std::exp(-g)) * gate_up[static_cast<std::size_t>(r * 2 * F + F + f)];
          for (std::int64_t d = 0; d < D; ++d) {
            total += u.row_weights[static_cast<std::size_t>(r)] *
                     u.d_result[static_cast<std::size_t>(r * D + d)] * a *
                     u.wo[static_cast<std::size_t>((e * F + f) * D + d)];
          }
        }
      }
    }
    return total;
  };
  EXPECT_TRUE(close(result.d_gate_up,
                    heddle::test::central_differences(std::span<double>(gate_up), loss), 1e-8));
  const auto d_weights =
      heddle::test::central_differences(std::span<double>(u.row_weights).subspan(1, 5), loss);
  EXPECT_TRUE(close(std::span<const double>(result.d_row_weights).subspan(1, 5),
                    std::span<const double>(d_weights), 1e-8));
  // d loss / d wo = weighted_activation^T d_result of the expert's rows.
  std::vector<double> d_wo(u.wo.size(), poison<double>());
  Workspace workspace;
  grouped_product_d_weights(
      u.groups(), as_is(ConstMatrixView<double>(result.weighted_activation.data(), u.count(), F)),
      u.d_result_factor(), {MatrixView<double>(d_wo.data(), u.experts() * F, D)}, workspace);
  EXPECT_TRUE(close(d_wo, heddle::test::central_differences(std::span<double>(u.wo), loss), 1e-8));
}

// Check 6: direction and length of each expert's gradient, each half.
TYPED_TEST(FusedGlu, Check6RelativeL2AndCosineOfEachExpert) {
  using S = TypeParam;
  for (const Shape& shape : shapes) {
    const Unit<S> u(shape, 0, 2, 8);
    const Result<S> result = u.fused(GluEpilogue::strict);
    const Exact exact = by_definition(u, &result.gate_up);
    for (std::int64_t e = 0; e < u.experts(); ++e) {
      for (const int half : {0, 1}) {
        double error = 0;
        double dot = 0;
        double actual_square = 0;
        double exact_square = 0;
        for (std::int64_t r = u.offsets[static_cast<std::size_t>(e)];
             r < u.offsets[static_cast<std::size_t>(e) + 1]; ++r) {
          for (std::int64_t f = 0; f < shape.width; ++f) {
            const auto i = static_cast<std::size_t>(r * 2 * shape.width + half * shape.width + f);
            const auto actual = static_cast<double>(result.d_gate_up[i]);
            error += (actual - exact.d_gate_up[i]) * (actual - exact.d_gate_up[i]);
            dot += actual * exact.d_gate_up[i];
            actual_square += actual * actual;
            exact_square += exact.d_gate_up[i] * exact.d_gate_up[i];
          }
        }
        if (exact_square > 0) {
          EXPECT_LE(std::sqrt(error / exact_square), (std::is_same_v<S, float> ? 1e-6 : 5e-3));
          EXPECT_GE(dot / std::sqrt(actual_square * exact_square),
                    (std::is_same_v<S, float> ? 1 - 1e-12 : 1 - 2e-5));
        } else {
          EXPECT_EQ(actual_square, 0.0);
        }
      }
    }
  }
}

TYPED_TEST(FusedGlu, SameBitsForEveryThreadCountAndPath) {
  using S = TypeParam;
  const Unit<S> u({{40, 0, 300, 5}, 530, 600}, 0, 0, 9);
  const Result<S> expected = u.fused(GluEpilogue::strict);
  const auto check = [&] {
    const Result<S> result = u.fused(GluEpilogue::strict);
    EXPECT_TRUE(same_bits(result.activation, expected.activation));
    EXPECT_TRUE(same_bits(result.d_gate_up, expected.d_gate_up));
    EXPECT_TRUE(same_bits(result.d_row_weights, expected.d_row_weights));
  };
  for (const int threads : {1, 2, 16}) {
    with_threads(threads, check);
  }
  for (const Path path : available_paths()) {
    const ScopedPath scoped(path);
    if (path != Path::portable) {
      check();
    }
  }
}

TYPED_TEST(FusedGlu, UnweightedIsWeightOneAndOutputsMayBeLeftOut) {
  using S = TypeParam;
  Unit<S> u({{4, 3}, 50, 70}, 0, 0, 10);
  std::fill(u.row_weights.begin(), u.row_weights.end(), 1.0F);
  const Result<S> ones = u.fused(GluEpilogue::strict);
  const Result<S> unweighted =
      u.fused(GluEpilogue::strict, UnfilledRows::zeroed, poison<S>(), false);
  EXPECT_TRUE(same_bits(unweighted.d_gate_up, ones.d_gate_up));
  EXPECT_TRUE(same_bits(unweighted.weighted_activation, ones.activation));
  EXPECT_TRUE(same_bits(unweighted.d_row_weights, ones.d_row_weights));
  Workspace workspace;
  for (const GluEpilogue epilogue : {GluEpilogue::strict, GluEpilogue::fast}) {
    const Result<S> all = u.fused(epilogue);
    Result<S> alone = u.poisoned(poison<S>());
    grouped_glu(u.groups(), u.row_factor(), u.wi_view(),
                {.activation = u.narrow_view(alone.activation)}, epilogue, UnfilledRows::zeroed,
                workspace);
    EXPECT_TRUE(same_bits(alone.activation, all.activation));
    grouped_glu_backward<S>(u.groups(),
                            {.d_result = u.d_result_factor(),
                             .wo = u.wo_view(),
                             .gate_up = {all.gate_up.data(), u.count(), 140},
                             .row_weights = u.row_weights},
                            {.d_gate_up = u.wide_view(alone.d_gate_up)}, epilogue,
                            UnfilledRows::zeroed, workspace);
    EXPECT_TRUE(same_bits(alone.d_gate_up, all.d_gate_up));
  }
}

TYPED_TEST(FusedGlu, StaysWithinItsWorkspace) {
  using S = TypeParam;
  for (const Shape& shape : shapes) {
    const Unit<S> u(shape, 0, 0, 11);
    with_threads(3, [&] {
      Workspace workspace;
      Result<S> result = u.poisoned(poison<S>());
      grouped_glu(
          u.groups(), u.row_factor(), u.wi_view(),
          {.activation = u.narrow_view(result.activation), .gate_up = u.wide_view(result.gate_up)},
          GluEpilogue::strict, UnfilledRows::zeroed, workspace);
      grouped_glu_backward<S>(
          u.groups(),
          {.d_result = u.d_result_factor(),
           .wo = u.wo_view(),
           .gate_up = u.wide_view(result.gate_up),
           .row_weights = u.row_weights},
          {.d_gate_up = u.wide_view(result.d_gate_up), .d_row_weights = result.d_row_weights},
          GluEpilogue::strict, UnfilledRows::zeroed, workspace);
      EXPECT_LE(
          workspace.high_water_bytes(),
          grouped_glu_workspace_bytes<S>(u.experts(), u.count(), shape.hidden, shape.width, 3));
    });
  }
}

TEST(FusedGluErrors, NameTheArgument) {
  const Unit<float> u({{2, 1}, 4, 3}, 0, 0, 12);
  Workspace workspace;
  std::vector<float> out(64, 0.0F);
  const auto view = [&](std::int64_t rows, std::int64_t cols) {
    return MatrixView<float>(out.data(), rows, cols);
  };
  const auto forward = [&](const GroupedGluOutputs<float>& to, GluEpilogue epilogue) {
    return thrown_text<Error>([&] {
      grouped_glu(u.groups(), u.row_factor(), u.wi_view(), to, epilogue, UnfilledRows::zeroed,
                  workspace);
    });
  };
  EXPECT_EQ(forward({.activation = view(3, 2)}, GluEpilogue::strict),
            "moe::grouped_glu: activation.cols = 2: must equal wi.cols / 2 (3)");
  EXPECT_EQ(forward({.activation = view(3, 3), .gate_up = view(3, 3)}, GluEpilogue::strict),
            "moe::grouped_glu: gate_up.cols = 3: must equal wi.cols (6)");
  EXPECT_EQ(forward({.activation = view(3, 3)}, static_cast<GluEpilogue>(9)),
            "moe::grouped_glu: epilogue = 9: must be strict or fast");
  const auto backward = [&](std::size_t weights, const GroupedGluGradients<float>& to) {
    return thrown_text<Error>([&] {
      grouped_glu_backward<float>(u.groups(),
                                  {.d_result = u.d_result_factor(),
                                   .wo = u.wo_view(),
                                   .gate_up = view(3, 6),
                                   .row_weights = std::span<const float>(out).first(weights)},
                                  to, GluEpilogue::strict, UnfilledRows::zeroed, workspace);
    });
  };
  EXPECT_EQ(backward(2, {.d_gate_up = view(3, 6)}),
            "moe::grouped_glu_backward: row_weights.size = 2: must equal d_result.rows (3)");
  EXPECT_EQ(backward(3, {.d_gate_up = view(3, 5)}),
            "moe::grouped_glu_backward: d_gate_up.cols = 5: must equal 2 * wo.rows / "
            "groups.experts (6)");
  EXPECT_EQ(
      backward(3, {.d_gate_up = view(3, 6), .weighted_activation = view(2, 3)}),
      "moe::grouped_glu_backward: weighted_activation.rows = 2: must equal d_result.rows (3)");
  EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float v) { return v == 0; }));
}

}  // namespace
}  // namespace heddle::moe

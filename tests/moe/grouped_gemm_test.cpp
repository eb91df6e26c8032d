#include "heddle/moe/grouped_gemm.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moe/grouped_problem.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: an expert's weights taken for the next one; a group one row
// longer or shorter; dlhs without its transposition; the cotangent of an empty expert left unwritten, or
// written where it is added to; rows behind a group in its contraction; garbage rows times zero; row
// offsets in 32 bits; a row id ignored, or counted from the group's first row; unfilled rows left where
// zeros were asked for, written where they were not.

namespace heddle::moe {
namespace {

using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;
using heddle::test::thrown_text;
using heddle::test::with_threads;
using test::Grouped;

/// Every element within 8 sqrt(n) 2^-24 sum |a b| of the sum in double over n terms, and what storing it
/// as S rounds.
template <class S>
void expect_products(const std::vector<S>& actual, const std::vector<double>& expected,
                     const std::vector<double>& magnitudes, std::int64_t terms) {
  ASSERT_EQ(actual.size(), expected.size());
  const double ulp = std::is_same_v<S, bfloat16> ? 0x1p-8 : 0;
  double worst = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double bound = 8 * std::sqrt(static_cast<double>(terms)) * 0x1p-24 * magnitudes[i] +
                         ulp * std::abs(expected[i]);
    const double error = std::abs(static_cast<double>(actual[i]) - expected[i]);
    ASSERT_LE(error, bound) << i;
    worst = std::max(worst, bound == 0 ? 0 : error / bound);
  }
  ::testing::Test::RecordProperty("worst_share_of_bound", std::to_string(worst));
}

template <class S>
class GroupedGemm : public ::testing::Test {};
using Types = ::testing::Types<float, bfloat16>;
TYPED_TEST_SUITE(GroupedGemm, Types);

// Empty first, middle and last experts, one row, the engine's tile rows and one more, a long group.
const std::vector<std::int64_t> uneven = {0, 5, 0, 13, 1, 0, 70, 8, 9, 0};

TYPED_TEST(GroupedGemm, EveryProductIsItsDefinition) {
  using S = TypeParam;
  for (const auto& [k, n] : {std::pair<std::int64_t, std::int64_t>{67, 45}, {1, 1}, {600, 33}}) {
    const Grouped<S> p(uneven, k, n, 4, 7, 3);
    const auto result = p.product();
    expect_products(result, p.product_by_definition(false), p.product_by_definition(true), k);
    const auto d_rows = p.d_rows();
    expect_products(d_rows, p.d_rows_by_definition(false), p.d_rows_by_definition(true), n);
    const auto d_weights = p.d_weights(poison<float>(), Write::overwrite);
    expect_products(d_weights, p.d_weights_by_definition(false), p.d_weights_by_definition(true),
                    70);
  }
}

TYPED_TEST(GroupedGemm, GatheredRowsHaveTheBitsOfTheirCopies) {
  using S = TypeParam;
  const Grouped<S> p(uneven, 40, 24, 2, 3, 4);
  Random random(5);
  // Rows scattered over a matrix of 50, some more than once; unfilled rows name a row too.
  const std::vector<S> source = random.normals<S>(50 * 40);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(p.buffer_rows()));
  Grouped<S> copied = p;
  for (std::size_t r = 0; r < ids.size(); ++r) {
    ids[r] = static_cast<std::int32_t>(random.integer(0, 49));
    std::copy_n(source.begin() + ids[r] * 40, 40,
                copied.rows.begin() + static_cast<std::ptrdiff_t>(r) * 40);
  }
  const Factor<S> rows =
      gathered(ConstMatrixView<S>(source.data(), 50, 40), std::span<const std::int32_t>(ids));
  EXPECT_TRUE(same_bits(p.product(rows), copied.product()));
  EXPECT_TRUE(same_bits(p.d_weights(rows, poison<float>(), Write::overwrite),
                        copied.d_weights(poison<float>(), Write::overwrite)));
}

TYPED_TEST(GroupedGemm, AnEmptyExpertGetsExactZerosOrKeepsWhatItHad) {
  using S = TypeParam;
  const Grouped<S> p(uneven, 9, 10, 0, 2, 6);
  const auto fresh = p.d_weights(poison<float>(), Write::overwrite);
  const auto again = p.d_weights(std::numeric_limits<float>::infinity(), Write::overwrite);
  EXPECT_TRUE(same_bits(fresh, again));
  const auto added = p.d_weights(2.5F, Write::accumulate);
  for (std::size_t e = 0; e < uneven.size(); ++e) {
    for (std::size_t i = e * 90; i < (e + 1) * 90; ++i) {
      if (uneven[e] == 0) {
        EXPECT_EQ(fresh[i], 0.0F);
        EXPECT_FALSE(std::signbit(fresh[i]));
      }
      EXPECT_EQ(added[i], 2.5F + fresh[i]);
    }
  }
}

TYPED_TEST(GroupedGemm, UnfilledRowsAreZerosOrLeft) {
  using S = TypeParam;
  const Grouped<S> p(uneven, 8, 6, 3, 5, 7);  // NaN in the unfilled rows of every input
  for (const UnfilledRows unfilled : {UnfilledRows::zeroed, UnfilledRows::untouched}) {
    const auto check = [&](const std::vector<S>& rows, std::int64_t cols) {
      for (std::int64_t r = 0; r < p.buffer_rows(); ++r) {
        const bool filled = p.offsets.front() <= r && r < p.offsets.back();
        for (std::int64_t j = 0; j < cols; ++j) {
          const auto value = static_cast<float>(rows[static_cast<std::size_t>(r * cols + j)]);
          if (filled) {
            EXPECT_TRUE(std::isfinite(value));
          } else if (unfilled == UnfilledRows::zeroed) {
            EXPECT_EQ(value, 0.0F);
          } else {
            EXPECT_TRUE(std::isnan(value));
          }
        }
      }
    };
    check(p.product(unfilled), 6);
    check(p.d_rows(unfilled), 8);
  }
}

TYPED_TEST(GroupedGemm, SameBitsForEveryThreadCountAndSlice) {
  using S = TypeParam;
  const Grouped<S> p(uneven, 530, 70, 1, 2, 8);
  std::vector<S> one_result;
  std::vector<S> one_d_rows;
  std::vector<float> one_d_weights;
  with_threads(1, [&] {
    one_result = p.product();
    one_d_rows = p.d_rows();
    one_d_weights = p.d_weights(0, Write::overwrite);
  });
  for (const int threads : {2, 5, 16}) {
    with_threads(threads, [&] {
      EXPECT_TRUE(same_bits(p.product(), one_result));
      EXPECT_TRUE(same_bits(p.d_rows(), one_d_rows));
      EXPECT_TRUE(same_bits(p.d_weights(0, Write::overwrite), one_d_weights));
    });
  }
  // A range of experts is a slice entry: three of them leave what one call leaves.
  std::vector<S> sliced(one_result.size(), poison<S>());
  Workspace workspace;
  for (const auto& [first, count] : {std::pair<int, int>{0, 4}, {4, 1}, {5, 5}}) {
    grouped_product(p.groups().slice(first, count), p.row_factor(),
                    p.weight_view().row_block(first * p.k, count * p.k),
                    MatrixView<S>(sliced.data(), p.buffer_rows(), p.n), UnfilledRows::untouched,
                    workspace);
  }
  for (std::int64_t r = p.offsets.front(); r < p.offsets.back(); ++r) {
    const auto at = static_cast<std::size_t>(r * p.n);
    EXPECT_TRUE(
        same_bits(std::span<const S>(sliced).subspan(at, static_cast<std::size_t>(p.n)),
                  std::span<const S>(one_result).subspan(at, static_cast<std::size_t>(p.n))));
  }
}

TYPED_TEST(GroupedGemm, StaysWithinItsWorkspace) {
  using S = TypeParam;
  for (const auto& [k, n] : {std::pair<std::int64_t, std::int64_t>{530, 70}, {16, 1100}, {3, 2}}) {
    const Grouped<S> p(uneven, k, n, 0, 0, 9);
    with_threads(4, [&] {
      const std::size_t bytes = grouped_workspace_bytes<S>(10, 70, p.k, p.n, 4);
      for (const int which : {0, 1, 2}) {
        Workspace workspace;
        p.run(which, workspace);
        EXPECT_LE(workspace.high_water_bytes(), bytes) << which;
        EXPECT_GT(workspace.high_water_bytes(), 0U);
      }
    });
  }
}

// What an expert without rows and a buffer's unfilled rows must not cost is proven by memory that cannot
// be touched.
TEST(GroupedGemmMemory, ReadsNoWeightOfAnEmptyExpertAndNoSpareRow) {
  constexpr std::int64_t k = 64;
  constexpr std::int64_t n = 64;  // an expert is four pages
  constexpr std::int64_t buffer_rows = 225'280;
  const std::vector<std::int64_t> offsets = {0, 0, 32, 32, 96, 96};
  test::ReservedMemory<float> weights(5 * k * n);
  test::ReservedMemory<float> rows(buffer_rows * k);
  test::ReservedMemory<float> result(buffer_rows * n);
  test::ReservedMemory<float> d_rows(buffer_rows * k);
  Random random(10);
  for (const std::int64_t e : {1, 3}) {
    for (float& w : weights.open(e * k * n, k * n)) {
      w = static_cast<float>(random.normal());
    }
  }
  for (float& x : rows.open(0, 96 * k)) {
    x = static_cast<float>(random.normal());
  }
  const std::span<float> filled = result.open(0, 96 * n);
  const std::span<float> d_filled = d_rows.open(0, 96 * k);
  Workspace workspace;
  const ConstMatrixView<float> x(rows.data(), buffer_rows, k);
  const ConstMatrixView<float> w(weights.data(), 5 * k, n);
  const MatrixView<float> y(result.data(), buffer_rows, n);
  grouped_product({offsets}, as_is(x), w, y, UnfilledRows::untouched, workspace);
  grouped_product_d_rows({offsets}, as_is(ConstMatrixView<float>(y)), w,
                         MatrixView<float>(d_rows.data(), buffer_rows, k), UnfilledRows::untouched,
                         workspace);
  std::vector<float> d_weights(5 * k * n, poison<float>());
  grouped_product_d_weights({offsets}, as_is(x), as_is(ConstMatrixView<float>(y)),
                            {MatrixView<float>(d_weights.data(), 5 * k, n)}, workspace);
  for (const std::span<const float> values :
       {std::span<const float>(filled), std::span<const float>(d_filled),
        std::span<const float>(d_weights)}) {
    EXPECT_TRUE(
        std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); }));
  }
  // Its cost says so too: that of 96 rows and two experts.
  const Cost cost = grouped_cost<float>({offsets}, k, n);
  EXPECT_EQ(cost.flops, 2 * 96 * k * n);
  EXPECT_EQ(cost.bytes_read, (96 * k + 2 * k * n) * 4);
  EXPECT_EQ(cost.bytes_written, 96 * n * 4);
}

TEST(GroupedGemmMemory, RowOffsetsNeedMoreThan32Bits) {
  // Three rows of a buffer whose rows are 2^30 elements apart; row 2 begins at element 2^31.
  constexpr std::int64_t stride = std::int64_t{1} << 30;
  test::ReservedMemory<bfloat16> rows(3 * stride);
  test::ReservedMemory<bfloat16> result(3 * stride);
  for (std::int64_t r = 0; r < 3; ++r) {
    rows.open(r * stride, 2)[0] = bfloat16(static_cast<float>(r + 1));
    rows.open(r * stride, 2)[1] = bfloat16(1.0F);
    result.open(r * stride, 1);
  }
  const std::vector<bfloat16> weights = {bfloat16(10.0F), bfloat16(1.0F), bfloat16(100.0F),
                                         bfloat16(2.0F)};
  const std::vector<std::int64_t> offsets = {0, 2, 3};
  Workspace workspace;
  grouped_product({offsets}, as_is(ConstMatrixView<bfloat16>(rows.data(), 3, 2, stride)),
                  ConstMatrixView<bfloat16>(weights.data(), 4, 1),
                  MatrixView<bfloat16>(result.data(), 3, 1, stride), UnfilledRows::zeroed,
                  workspace);
  EXPECT_EQ(static_cast<float>(result.data()[0]), 11.0F);
  EXPECT_EQ(static_cast<float>(result.data()[stride]), 21.0F);
  EXPECT_EQ(static_cast<float>(result.data()[2 * stride]), 302.0F);

  // The same rows gathered: row ids times the stride.
  const std::vector<std::int32_t> ids = {2, 0, 1};
  std::vector<float> d_weights(4);
  grouped_product_d_weights({offsets},
                            gathered(ConstMatrixView<bfloat16>(rows.data(), 3, 2, stride),
                                     std::span<const std::int32_t>(ids)),
                            as_is(ConstMatrixView<bfloat16>(result.data(), 3, 1, stride)),
                            {MatrixView<float>(d_weights.data(), 4, 1)}, workspace);
  EXPECT_EQ(d_weights, (std::vector<float>{3 * 11 + 21, 11 + 21, 2 * 302, 302}));
}

TEST(GroupedGemmErrors, NameTheArgument) {
  Workspace workspace;
  const Grouped<float> p({2, 3}, 4, 5, 0, 1, 11);
  std::vector<float> out(6 * 5);
  const MatrixView<float> result(out.data(), 6, 5);
  const auto with_offsets = [&](std::vector<std::int64_t> offsets) {
    return thrown_text<Error>([&] {
      grouped_product<float, float>({offsets}, p.row_factor(), p.weight_view(), result,
                                    UnfilledRows::zeroed, workspace);
    });
  };
  EXPECT_EQ(with_offsets({}), "moe::grouped_product: groups.offsets.size = 0: must be >= 1");
  EXPECT_EQ(with_offsets({-1, 2, 3}), "moe::grouped_product: groups.offsets[0] = -1: must be >= 0");
  EXPECT_EQ(
      with_offsets({0, 3, 2}),
      "moe::grouped_product: groups.offsets[2] = 2: must be at least the offset before it (3)");
  EXPECT_EQ(with_offsets({0, 3, 7}),
            "moe::grouped_product: groups.offsets[2] = 7: must be at most rows.rows (6)");
  EXPECT_EQ(with_offsets({0, 1, 2, 3}),
            "moe::grouped_product: weights.rows = 8: must equal groups.experts * rows.cols (12)");
  const auto call = [&](const Factor<float>& rows, MatrixView<float> to, UnfilledRows unfilled) {
    return thrown_text<Error>([&] {
      grouped_product<float, float>(p.groups(), rows, p.weight_view(), to, unfilled, workspace);
    });
  };
  EXPECT_EQ(call(p.row_factor(), MatrixView<float>(out.data(), 6, 4), UnfilledRows::zeroed),
            "moe::grouped_product: result.cols = 4: must equal weights.cols (5)");
  EXPECT_EQ(call(p.row_factor(), result, static_cast<UnfilledRows>(7)),
            "moe::grouped_product: unfilled = 7: must be untouched or zeroed");
  EXPECT_EQ(call(detail::transpose_of(p.row_factor()), result, UnfilledRows::zeroed),
            "moe::grouped_product: groups.offsets[2] = 5: must be at most rows.rows (4)");
  std::vector<std::int32_t> ids = {0, 1, 2, 3, 4, 6};
  EXPECT_EQ(call(gathered(p.row_view(), std::span<const std::int32_t>(ids)), result,
                 UnfilledRows::zeroed),
            "moe::grouped_product: rows.row_ids[5] = 6: must be in [0, 6)");
  EXPECT_EQ(
      thrown_text<Error>([&] {
        grouped_product_d_weights<float>(p.groups(), p.row_factor(), p.d_result_factor(),
                                         {MatrixView<float>(out.data(), 7, 4)}, workspace);
      }),
      "moe::grouped_product_d_weights: d_weights.values.rows = 7: must equal groups.experts * "
      "rows.cols (8)");
  EXPECT_EQ(
      thrown_text<Error>([&] {
        grouped_product_d_rows<float, float>(p.groups(), p.d_result_factor(),
                                             p.weight_view().row_block(0, 7), result,
                                             UnfilledRows::zeroed, workspace);
      }),
      "moe::grouped_product_d_rows: weights.rows = 7: must be a multiple of groups.experts (2)");
  EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float v) { return v == 0; }))
      << "an error is thrown before anything is written";
}

TEST(GroupedGemm, NoExpertsAndNoRows) {
  Workspace workspace;
  const std::vector<std::int64_t> none = {2};
  std::vector<float> out(3 * 2, 1.0F);
  const std::vector<float> rows(3 * 4, poison<float>());
  grouped_product({none}, as_is(ConstMatrixView<float>(rows.data(), 3, 4)),
                  ConstMatrixView<float>(nullptr, 0, 2), MatrixView<float>(out.data(), 3, 2),
                  UnfilledRows::zeroed, workspace);
  EXPECT_EQ(out, std::vector<float>(6, 0.0F));
  const Grouped<double> p({0, 0}, 3, 2, 0, 0, 12);
  EXPECT_EQ(p.d_weights(poison<double>(), Write::overwrite), std::vector<double>(12, 0.0));
}

}  // namespace
}  // namespace heddle::moe

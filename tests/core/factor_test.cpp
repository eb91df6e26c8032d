// Mutants tried: cols of a gathered factor counted in the matrix; a row block of a transposed factor
// taken from its rows; the offset of a gathered block dropped.
#include "heddle/core/factor.hpp"

#include <array>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <gtest/gtest.h>

namespace heddle {
namespace {

class FactorTest : public ::testing::Test {
 protected:
  FactorTest() { std::iota(data.begin(), data.end(), 0.0F); }

  static float at(const Factor<float>& factor, std::int64_t row, std::int64_t col) {
    const std::int64_t r = factor.transpose ? col : row;
    return factor.matrix(factor.row_ids ? (*factor.row_ids)[static_cast<std::size_t>(r)] : r,
                         factor.transpose ? row : col);
  }

  std::vector<float> data = std::vector<float>(12);
  ConstMatrixView<float> matrix{data.data(), 4, 3};
  std::array<std::int32_t, 5> ids{3, 0, 0, 2, 1};
};

TEST_F(FactorTest, ExtentsAreThoseOfTheOperand) {
  EXPECT_EQ(as_is(matrix).rows(), 4);
  EXPECT_EQ(as_is(matrix).cols(), 3);
  EXPECT_EQ(transposed(matrix).rows(), 3);
  EXPECT_EQ(transposed(matrix).cols(), 4);
  EXPECT_EQ(gathered(matrix, std::span<const std::int32_t>(ids)).rows(), 5);
  EXPECT_EQ(gathered_transposed(matrix, std::span<const std::int32_t>(ids)).cols(), 5);
  EXPECT_EQ(gathered(matrix, std::span<const std::int32_t>()).rows(), 0);
}

TEST_F(FactorTest, BlocksAreBlocksOfTheOperand) {
  for (const Factor<float>& factor :
       {as_is(matrix), transposed(matrix), gathered(matrix, std::span<const std::int32_t>(ids)),
        gathered_transposed(matrix, std::span<const std::int32_t>(ids))}) {
    const Factor<float> block = factor.row_block(1, 2).column_block(1, 2);
    ASSERT_EQ(block.rows(), 2);
    ASSERT_EQ(block.cols(), 2);
    for (const std::int64_t row : {0, 1}) {
      for (const std::int64_t col : {0, 1}) {
        EXPECT_EQ(at(block, row, col), at(factor, row + 1, col + 1));
      }
    }
  }
}

TEST_F(FactorTest, UnreadableOnesAreRefused) {
  const auto text = [](const Factor<float>& factor) -> std::string {
    try {
      require_readable("here", "x", factor);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  ids[3] = 4;
  EXPECT_EQ(text(gathered(matrix, std::span<const std::int32_t>(ids))),
            "here: x.row_ids[3] = 4: must be in [0, 4)");
  ids[1] = -1;
  EXPECT_EQ(text(gathered(matrix, std::span<const std::int32_t>(ids))),
            "here: x.row_ids[1] = -1: must be in [0, 4)");
  EXPECT_EQ(text(as_is(ConstMatrixView<float>(nullptr, 1, 1))), "here: x = null: required");
  EXPECT_EQ(text(as_is(ConstMatrixView<float>(nullptr, 0, 1))), "accepted");
  EXPECT_EQ(text(transposed(matrix)), "accepted");
}

}  // namespace
}  // namespace heddle

#include "heddle/core/view.hpp"

#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>
#include <Eigen/Core>

namespace heddle {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

static_assert(std::is_convertible_v<MatrixView<float>, ConstMatrixView<float>>);
static_assert(!std::is_convertible_v<ConstMatrixView<float>, MatrixView<float>>);
static_assert(!std::is_convertible_v<MatrixView<float>, MatrixView<double>>);

TEST(View, ElementsLieAtRowTimesStridePlusColumn) {
  std::vector<float> buffer(4 * 7);
  for (std::size_t i = 0; i < buffer.size(); ++i) {
    buffer[i] = static_cast<float>(i);
  }
  const MatrixView<float> matrix(buffer.data(), 4, 5, 7);
  EXPECT_EQ(matrix(2, 3), 17.0F);
  EXPECT_EQ(matrix.row(3).size(), 5U);
  EXPECT_EQ(matrix.row(3).front(), 21.0F);
  EXPECT_EQ(matrix.column_block(2, 2)(1, 1), 10.0F);
  EXPECT_EQ(matrix.row_block(1, 2).rows(), 2);
  EXPECT_EQ(matrix.row_block(1, 2)(1, 0), 14.0F);
}

TEST(View, OffsetsPassTheRangeOfInt32) {
  // The address is computed, never read: one row of 2^31 + 8 elements before the one asked for.
  const std::int64_t stride = (std::int64_t{1} << 31) + 8;
  char base = 0;
  const MatrixView<char> matrix(&base, 4, 1, stride);
  const auto address = reinterpret_cast<std::uintptr_t>(matrix.row_block(3, 1).data());
  EXPECT_EQ(address - reinterpret_cast<std::uintptr_t>(&base),
            static_cast<std::uintptr_t>(3 * stride));
}

TEST(View, SharesTheStorageOfAnEigenMatrix) {
  Matrix matrix(3, 4);
  EXPECT_EQ(view(matrix).data(), matrix.data());
  const Matrix& constant = matrix;
  static_assert(std::is_same_v<decltype(view(constant)), ConstMatrixView<float>>);
  auto block = matrix.middleCols(1, 2);
  EXPECT_EQ(view(block).data(), matrix.data() + 1);
  EXPECT_EQ(view(block).stride(), 4);
}

TEST(View, ADefaultViewIsNullAndSoAreItsBlocks) {
  const MatrixView<float> absent;
  EXPECT_TRUE(absent.is_null());
  EXPECT_TRUE(absent.column_block(3, 0).is_null());
  EXPECT_FALSE(WeightCotangent<float>{}.wanted());
  EXPECT_FALSE(VectorCotangent<float>{}.wanted());
}

std::string refusal(MatrixView<float> matrix) {
  try {
    require_shape("gdn::forward", "qkv", matrix, "dims.tokens", 2, "dims.qkv_columns()", 3);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(View, ShapeRefusalsNameTheExtent) {
  float buffer[8] = {};
  EXPECT_EQ(refusal({buffer, 2, 3}), "accepted");
  EXPECT_EQ(refusal({buffer, 2, 3, 4}), "accepted");
  EXPECT_EQ(refusal({buffer, 1, 3}), "gdn::forward: qkv.rows = 1: must equal dims.tokens (2)");
  EXPECT_EQ(refusal({buffer, 2, 4}),
            "gdn::forward: qkv.cols = 4: must equal dims.qkv_columns() (3)");
  EXPECT_EQ(refusal({buffer, 2, 3, 2}),
            "gdn::forward: qkv.stride = 2: must be at least its cols (3)");
  EXPECT_EQ(refusal({nullptr, 2, 3}), "gdn::forward: qkv = null: required");
  EXPECT_THROW(require_length("a", "b", std::span<float>(buffer, 3), "dims.tokens", 4), Error);
}

}  // namespace
}  // namespace heddle

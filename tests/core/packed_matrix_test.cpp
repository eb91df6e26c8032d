// Mutants tried: bf16 pairs swapped; the zero of an odd last pair left out; a last panel's missing
// columns not written; the second block of 512 rows written over the first; ids of gathered rows
// ignored.
#include "heddle/core/packed_matrix.hpp"

#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/isa.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle {
namespace {

template <class T>
class Packed : public ::testing::Test {};
using Scalars = ::testing::Types<float, double, bfloat16>;
TYPED_TEST_SUITE(Packed, Scalars);

/// The layout by its formula: every element in its place, zeros where there is none.
TYPED_TEST(Packed, HoldsEveryElementInItsPlace) {
  using T = TypeParam;
  constexpr std::int64_t w = std::is_same_v<T, double> ? 8 : 16;
  constexpr std::int64_t pair = std::is_same_v<T, bfloat16> ? 2 : 1;
  test::Random random(7);
  for (const std::int64_t rows : {1, 2, 7, 16, 515}) {
    for (const std::int64_t cols : {1, 8, 16, 23, 70}) {
      const std::int64_t stride = std::max(rows, cols) + 3;
      const std::vector<T> data = random.normals<T>(stride * stride);
      std::vector<std::int32_t> ids;
      for (std::int64_t i = 0; i < std::max(rows, cols); ++i) {
        ids.push_back(static_cast<std::int32_t>(stride - 1 - i));
      }
      const std::span<const std::int32_t> all_ids(ids);
      const ConstMatrixView<T> all(data.data(), stride, stride, stride);
      const ConstMatrixView<T> direct(data.data(), rows, cols, stride);
      const ConstMatrixView<T> turned(data.data(), cols, rows, stride);
      for (const Factor<T>& factor :
           {as_is(direct), transposed(turned),
            gathered(all.column_block(0, cols), all_ids.first(static_cast<std::size_t>(rows))),
            gathered_transposed(all.column_block(0, rows),
                                all_ids.first(static_cast<std::size_t>(cols)))}) {
        const std::int64_t padded_rows = (rows + pair - 1) / pair * pair;
        const std::int64_t panels = (cols + w - 1) / w;
        std::vector<T> expected(static_cast<std::size_t>(panels * padded_rows * w), T(0.0F));
        for (std::int64_t k = 0; k < rows; ++k) {
          for (std::int64_t n = 0; n < cols; ++n) {
            std::int64_t r = factor.transpose ? n : k;
            r = factor.row_ids ? (*factor.row_ids)[static_cast<std::size_t>(r)] : r;
            expected[static_cast<std::size_t>(n / w * padded_rows * w + k / pair * pair * w +
                                              n % w * pair + k % pair)] =
                factor.matrix(r, factor.transpose ? k : n);
          }
        }
        EXPECT_EQ(panel_bytes<T>(rows, cols),
                  static_cast<std::int64_t>(expected.size() * sizeof(T)));
        for (const Path path : available_paths()) {
          const ScopedPath scope(path);
          std::vector<T> memory(expected.size(), test::poison<T>());
          const PanelView<T> view(memory.data(), rows, cols);
          pack_panels(factor, view);
          ASSERT_TRUE(test::same_bits(memory, expected)) << path_name(path);
          EXPECT_EQ(
              static_cast<double>(view(rows - 1, cols - 1)),
              static_cast<double>(factor.matrix(
                  factor.row_ids ? factor.row_ids->back()
                                 : static_cast<std::int32_t>((factor.transpose ? cols : rows) - 1),
                  (factor.transpose ? rows : cols) - 1)));
        }
      }
    }
  }
}

TEST(PackedMatrixOwner, AlignsItsMemoryAndMayBeEmpty) {
  PackedMatrix<float> matrix(3, 5);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(matrix.view().data()) % 64, 0U);
  EXPECT_EQ(matrix.view().rows(), 3);
  EXPECT_EQ(matrix.view().cols(), 5);
  const PackedMatrix<float> empty(as_is(ConstMatrixView<float>(nullptr, 0, 4)));
  EXPECT_EQ(empty.view().elements(), 0);
  EXPECT_TRUE(PackedMatrix<float>().view().is_null());
}

TEST(PackedMatrixErrors, NameWhatDoesNotFit) {
  std::vector<float> data(64);
  const auto text = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const Factor<float> factor = as_is(ConstMatrixView<float>(data.data(), 2, 3));
  EXPECT_EQ(text([&] { pack_panels(factor, PanelView<float>(data.data(), 3, 3)); }),
            "pack_panels: panels.rows = 3: must equal factor.rows (2)");
  EXPECT_EQ(text([&] { pack_panels(factor, PanelView<float>(data.data(), 2, 4)); }),
            "pack_panels: panels.cols = 4: must equal factor.cols (3)");
  EXPECT_EQ(text([&] { pack_panels(factor, PanelView<float>(nullptr, 2, 3)); }),
            "pack_panels: panels = null: required");
  EXPECT_EQ(text([] { PackedMatrix<float>(-1, 2); }), "PackedMatrix: rows = -1: must be >= 0");
  EXPECT_EQ(text([] { PackedMatrix<float>(1, -2); }), "PackedMatrix: cols = -2: must be >= 0");
}

}  // namespace
}  // namespace heddle

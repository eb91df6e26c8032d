// Mutants tried: accumulate overwrites; overwrite accumulates; transposition of b ignored; strides
// taken for columns; the blocks of K 256 deep, or added from the last; a block's chain begun with c;
// the odd element of a bf16 pair taken second; an odd last element dropped; a multiply-add rounded
// twice; a row of a last panel of A, or a column beyond the last of C, written; row ids of a ignored;
// the second of two right factors multiplied by A of the first's last block; a tile handed out with
// the rows of the one before; a chain begun anew at each stretch of K, or never; a packing tile that
// leaves its second panel out.
#include "heddle/core/matrix_engine.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "support/bits.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle {
namespace {

enum class Stored { as_is, transposed };

/// A matrix [rows, cols] as a factor, stored either way, its rows apart and NaN between them, shuffled
/// among rows of NaN when `gather` asks for it.
template <class T>
struct Operand {
  std::vector<T> data;
  std::vector<std::int32_t> row_ids;
  Factor<T> factor;

  Operand(test::Random& random, std::int64_t rows, std::int64_t cols, Stored stored, bool gather) {
    const std::int64_t taken = stored == Stored::as_is ? rows : cols;
    const std::int64_t width = stored == Stored::as_is ? cols : rows;
    const std::int64_t gap = random.integer(0, 5);
    const std::int64_t existing = gather ? 2 * taken + 1 : taken;
    data.assign(static_cast<std::size_t>(existing * (width + gap)), test::poison<T>());
    const MatrixView<T> view(data.data(), existing, width, width + gap);
    for (std::int64_t i = 0; i < taken; ++i) {
      const std::int64_t row = gather ? 2 * (taken - 1 - i) + 1 : i;
      row_ids.push_back(static_cast<std::int32_t>(row));
      for (T& value : view.row(row)) {
        value = static_cast<T>(static_cast<float>(random.normal()));
      }
    }
    factor = {view, stored == Stored::transposed, {}};
    if (gather) {
      factor.row_ids = row_ids;
    }
  }
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;

  [[nodiscard]] T at(std::int64_t row, std::int64_t col) const {
    std::int64_t r = factor.transpose ? col : row;
    const std::int64_t c = factor.transpose ? row : col;
    r = factor.row_ids ? (*factor.row_ids)[static_cast<std::size_t>(r)] : r;
    return factor.matrix(r, c);
  }
};

/// One element of the result by the contract: scalar std::fma, blocks of 512, pairs of bf16 odd first.
template <class TC, class TA, class TB>
TC chain(const Operand<TA>& a, const Operand<TB>& b, std::int64_t m, std::int64_t n, TC old,
         Write write) {
  const std::int64_t depth = a.factor.cols();
  constexpr bool pairs = std::is_same_v<TA, bfloat16> && std::is_same_v<TB, bfloat16>;
  TC total = write == Write::accumulate ? old : TC(0);
  for (std::int64_t first = 0; first < depth; first += 512) {
    const std::int64_t last = std::min<std::int64_t>(first + 512, depth);
    TC sum = 0;
    const auto take = [&](std::int64_t k) {
      sum = k < last ? std::fma(static_cast<TC>(a.at(m, k)), static_cast<TC>(b.at(k, n)), sum)
                     : std::fma(TC(0), TC(0), sum);
    };
    for (std::int64_t k = first; k < last; k += pairs ? 2 : 1) {
      if (pairs) {
        take(k + 1);
      }
      take(k);
    }
    total = first == 0 && write == Write::overwrite ? sum : total + sum;
  }
  return total;
}

/// A result [rows, cols] with a stride and sentinels in the gaps, that a product must leave alone.
template <class T>
struct Result {
  static constexpr float sentinel = -77.0F;
  std::vector<T> data;
  MatrixView<T> view;

  Result(test::Random& random, std::int64_t rows, std::int64_t cols, Write write) {
    const std::int64_t gap = random.integer(0, 5);
    data.assign(static_cast<std::size_t>(rows * (cols + gap) + 1), static_cast<T>(sentinel));
    view = {data.data(), rows, cols, cols + gap};
    for (std::int64_t row = 0; row < rows; ++row) {
      for (T& value : view.row(row)) {
        value = write == Write::overwrite ? test::poison<T>()
                                          : static_cast<T>(static_cast<float>(random.normal()));
      }
    }
  }
};

template <class T>
bool equal_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

struct Shape {
  std::int64_t m, k, n;
};

/// 320 shapes: the edges of every tile, panel and block, then random ones.
std::vector<Shape> shapes() {
  std::vector<Shape> list = {{1, 1, 1},      {1, 512, 1},   {1, 513, 17},  {8, 512, 16},
                             {9, 511, 33},   {7, 1024, 15}, {6, 1025, 32}, {13, 2, 31},
                             {64, 128, 128}, {12, 3, 48},   {300, 7, 5},   {5, 9, 600}};
  test::Random random(3);
  while (list.size() < 320) {
    const bool deep = random.chance(0.15);
    list.push_back({random.integer(1, deep ? 10 : 40),
                    deep ? random.integer(500, 1100) : random.integer(1, 70),
                    random.integer(1, deep ? 20 : 70)});
  }
  return list;
}

template <class TA, class TB>
struct Types {
  using A = TA;
  using B = TB;
  using C = AccumulatorOf<TB>;
};

template <class T>
class FixedOrder : public ::testing::Test {};
using FactorTypes =
    ::testing::Types<Types<float, float>, Types<double, double>, Types<bfloat16, bfloat16>,
                     Types<bfloat16, float>, Types<float, bfloat16>>;
TYPED_TEST_SUITE(FixedOrder, FactorTypes);

TYPED_TEST(FixedOrder, EqualsTheScalarChainOnEveryPathAndInEveryForm) {
  using C = typename TypeParam::C;
  test::Random random(17);
  const std::vector<Shape> list = shapes();
  std::int64_t compared = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto [m, k, n] = list[i];
    const auto stored = [](std::size_t bit) {
      return bit % 2 == 0 ? Stored::as_is : Stored::transposed;
    };
    const Operand<typename TypeParam::A> a(random, m, k, stored(i), i % 5 == 3);
    const Operand<typename TypeParam::B> b(random, k, n, stored(i / 2), i % 7 == 3);
    const Write write = i / 4 % 2 == 0 ? Write::overwrite : Write::accumulate;
    const Result<C> before(random, m, n, write);
    for (const Path path : available_paths()) {
      const ScopedPath scope(path);
      std::vector<C> data = before.data;
      const MatrixView<C> c(data.data(), m, n, before.view.stride());
      Workspace workspace;
      multiply(a.factor, b.factor, c, write, workspace);
      for (std::int64_t row = 0; row < m; ++row) {
        for (std::int64_t col = 0; col < n; ++col) {
          const C expected = chain<C>(a, b, row, col, before.view(row, col), write);
          ASSERT_TRUE(equal_bits(c(row, col), expected))
              << path_name(path) << " " << m << "x" << k << "x" << n << " (" << row << "," << col
              << "): " << c(row, col) << " against " << expected;
          ++compared;
        }
        for (std::int64_t col = n; col < c.stride(); ++col) {
          ASSERT_EQ(data[static_cast<std::size_t>(row * c.stride() + col)],
                    static_cast<C>(Result<C>::sentinel));
        }
      }
      ASSERT_LE(workspace.high_water_bytes(),
                (product_workspace_bytes<typename TypeParam::A, typename TypeParam::B>(m, n, k)));
    }
  }
  EXPECT_GT(compared, 300 * 100);
}

/// Several blocks of packed rows, several column blocks, every form at a size where it matters.
TYPED_TEST(FixedOrder, LargeProductsEqualTheirSlices) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using C = typename TypeParam::C;
  test::Random random(5);
  constexpr std::int64_t m = 700, k = 530, n = 560;
  const Operand<A> a(random, m, k, Stored::as_is, false);
  const Operand<B> b(random, k, n, Stored::as_is, false);
  std::vector<C> whole(static_cast<std::size_t>(m * n));
  multiply(a.factor, b.factor, MatrixView<C>(whole.data(), m, n));
  const MatrixView<C> all(whole.data(), m, n);
  for (const auto& [row, col] : {std::pair{0, 0}, {699, 559}, {351, 512}, {256, 17}}) {
    EXPECT_TRUE(equal_bits(all(row, col), chain<C>(a, b, row, col, C(0), Write::overwrite)));
  }
  for (const std::int64_t rows : {1, 5, 8, 9, 300}) {
    for (const std::int64_t columns : {1, 16, 33, 540}) {
      std::vector<C> part(static_cast<std::size_t>(rows * columns));
      multiply(a.factor.row_block(100, rows), b.factor.column_block(3, columns),
               MatrixView<C>(part.data(), rows, columns));
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t col = 0; col < columns; ++col) {
          ASSERT_TRUE(equal_bits(part[static_cast<std::size_t>(row * columns + col)],
                                 all(100 + row, 3 + col)));
        }
      }
    }
  }
}

/// B far larger than a cache keeps: read in the order of memory by few rows, packed by the first tile of
/// more, and by itself where the last pair of K is not whole.
TYPED_TEST(FixedOrder, EqualsTheScalarChainAgainstALargeRightFactor) {
  using C = typename TypeParam::C;
  test::Random random(47);
  for (const auto& [m, k, n] : std::vector<Shape>{{1, 1030, 90},
                                                  {3, 1030, 83},
                                                  {7, 1030, 90},
                                                  {8, 1031, 83},
                                                  {8, 530, 150},
                                                  {13, 1030, 83}}) {
    for (const Stored stored : {Stored::as_is, Stored::transposed}) {
      const Operand<typename TypeParam::A> a(random, m, k, stored, false);
      const Operand<typename TypeParam::B> b(random, k, n, Stored::as_is, false);
      const Write write = stored == Stored::as_is ? Write::overwrite : Write::accumulate;
      const Result<C> before(random, m, n, write);
      std::vector<C> expected;
      for (std::int64_t i = 0; i < m * n; ++i) {
        expected.push_back(chain<C>(a, b, i / n, i % n, before.view(i / n, i % n), write));
      }
      for (const Path path : available_paths()) {
        const ScopedPath scope(path);
        std::vector<C> data = before.data;
        const MatrixView<C> c(data.data(), m, n, before.view.stride());
        Workspace workspace;
        multiply(a.factor, b.factor, c, write, workspace);
        for (std::int64_t i = 0; i < m * n; ++i) {
          ASSERT_TRUE(equal_bits(c(i / n, i % n), expected[static_cast<std::size_t>(i)]))
              << path_name(path) << " " << m << "x" << k << "x" << n << " element " << i;
        }
        ASSERT_LE(workspace.high_water_bytes(),
                  (product_workspace_bytes<typename TypeParam::A, typename TypeParam::B>(m, n, k)));
      }
    }
  }
}

TYPED_TEST(FixedOrder, PackedRightFactorsGiveTheSameBits) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using C = typename TypeParam::C;
  test::Random random(23);
  for (const auto& [m, k, n] :
       std::vector<Shape>{{5, 33, 40}, {70, 600, 90}, {1, 1, 1}, {9, 513, 7}}) {
    for (const Stored stored : {Stored::as_is, Stored::transposed}) {
      for (const bool gather : {false, true}) {
        const Operand<A> a(random, m, k, Stored::as_is, false);
        const Operand<B> b(random, k, n, stored, gather);
        const PackedMatrix<B> packed(b.factor);
        for (const Path path : available_paths()) {
          const ScopedPath scope(path);
          std::vector<C> plain(static_cast<std::size_t>(m * n)), result(plain);
          multiply(a.factor, b.factor, MatrixView<C>(plain.data(), m, n));
          multiply(a.factor, packed.view(), MatrixView<C>(result.data(), m, n));
          ASSERT_TRUE(test::same_bits(result, plain)) << path_name(path);
        }
      }
    }
  }
}

TYPED_TEST(FixedOrder, PrecheckedProductsGiveTheSameBits) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using C = typename TypeParam::C;
  test::Random random(41);
  for (const auto& [m, k, n] : std::vector<Shape>{
           {64, 128, 128}, {128, 64, 128}, {61, 33, 40}, {3, 600, 5}, {0, 3, 3}, {3, 0, 3}}) {
    for (const Stored stored : {Stored::as_is, Stored::transposed}) {
      for (const Write write : {Write::overwrite, Write::accumulate}) {
        const Operand<A> a(random, m, k, stored, false);
        const Operand<B> b(random, k, n, Stored::as_is, false);
        Workspace workspace;
        const auto scratch = workspace.take<std::byte>(
            static_cast<std::int64_t>(product_workspace_bytes<A, B>(m, n, k)));
        for (const Path path : available_paths()) {
          const ScopedPath scope(path);
          std::vector<C> expected(static_cast<std::size_t>(m * n), C(0.5)), result(expected);
          multiply(a.factor, b.factor, MatrixView<C>(expected.data(), m, n), write);
          multiply_prechecked(a.factor, b.factor, MatrixView<C>(result.data(), m, n), write,
                              scratch);
          ASSERT_TRUE(test::same_bits(result, expected)) << path_name(path);
        }
      }
    }
  }
}

template <class T>
class PanelResult : public ::testing::Test {};
using Accumulators = ::testing::Types<float, double>;
TYPED_TEST_SUITE(PanelResult, Accumulators);

TYPED_TEST(PanelResult, FeedsTheNextProduct) {
  using T = TypeParam;
  test::Random random(29);
  constexpr std::int64_t m = 37, k = 21, n = 43, rows = 19;
  const Operand<T> a(random, m, k, Stored::as_is, false);
  const Operand<T> b(random, k, n, Stored::transposed, false);
  const Operand<T> left(random, rows, m, Stored::as_is, false);
  std::vector<T> c(static_cast<std::size_t>(m * n), T(0.5));
  const MatrixView<T> plain(c.data(), m, n);
  PackedMatrix<T> packed(as_is(plain));
  for (const Write write : {Write::accumulate, Write::overwrite}) {
    multiply(a.factor, b.factor, plain, write);
    multiply(a.factor, b.factor, packed.view(), write);
    for (std::int64_t row = 0; row < m; ++row) {
      for (std::int64_t col = 0; col < n; ++col) {
        ASSERT_TRUE(equal_bits(packed.view()(row, col), plain(row, col)));
      }
    }
  }
  std::vector<T> expected(static_cast<std::size_t>(rows * n)), result(expected);
  multiply(left.factor, as_is(plain), MatrixView<T>(expected.data(), rows, n));
  multiply(left.factor, packed.view(), MatrixView<T>(result.data(), rows, n));
  EXPECT_TRUE(test::same_bits(result, expected));
}

TEST(NarrowResult, IsTheF32ResultRoundedOnce) {
  test::Random random(31);
  for (const Write write : {Write::overwrite, Write::accumulate}) {
    for (const auto& [m, k, n] : std::vector<Shape>{{3, 700, 5}, {300, 20, 530}, {4, 0, 9}}) {
      const Operand<bfloat16> a(random, m, k, Stored::as_is, false);
      const Operand<bfloat16> b(random, k, n, Stored::as_is, false);
      const Result<bfloat16> before(random, m, n, write);
      for (const Path path : available_paths()) {
        const ScopedPath scope(path);
        std::vector<float> wide(static_cast<std::size_t>(m * n));
        for (std::int64_t i = 0; i < m * n; ++i) {
          wide[static_cast<std::size_t>(i)] = static_cast<float>(before.view(i / n, i % n));
        }
        multiply(a.factor, b.factor, MatrixView<float>(wide.data(), m, n), write);
        std::vector<bfloat16> data = before.data;
        const MatrixView<bfloat16> c(data.data(), m, n, before.view.stride());
        multiply(a.factor, b.factor, c, write);
        for (std::int64_t i = 0; i < m * n; ++i) {
          ASSERT_TRUE(equal_bits(c(i / n, i % n), bfloat16(wide[static_cast<std::size_t>(i)])));
        }
      }
    }
  }
}

TEST(Bf16Pairs, ArithmeticIsTheHardwaresButForSubnormals) {
  // One pair whose order shows: 1 + 2^-24 (odd first: lost, then + 1) against the other way round,
  // with a sum in between that cancels.
  const auto product = [](std::array<float, 2> a, std::array<float, 2> b) {
    std::array<bfloat16, 2> left{bfloat16(a[0]), bfloat16(a[1])};
    std::array<bfloat16, 2> right{bfloat16(b[0]), bfloat16(b[1])};
    float c = 0;
    multiply(as_is(MatrixView<bfloat16>(left.data(), 1, 2)),
             as_is(MatrixView<bfloat16>(right.data(), 2, 1)), MatrixView<float>(&c, 1, 1));
    return c;
  };
  for (const Path path : available_paths()) {
    const ScopedPath scope(path);
    // Exact sum 2^24 + 1.0 + 2^-k ties; fma(even, fma(odd)) rounds odd's product first.
    EXPECT_EQ(product({1.5F, 0x1p30F}, {2.0F, 0x1p-30F}), 4.0F);
    EXPECT_EQ(product({0x1.02p0F, -1.0F}, {0x1.02p0F, 0x1p0F}),
              std::fma(0x1.02p0F, 0x1.02p0F, -1.0F));
    EXPECT_EQ(product({0x1p12F, 1.0F}, {0x1p12F, 1.0F}), std::fma(0x1p12F, 0x1p12F, 1.0F));
    const float subnormal = product({0x1p-70F, 0}, {0x1p-70F, 0});
    EXPECT_EQ(subnormal, path == Path::avx512_bf16 ? 0.0F : 0x1p-140F);
  }
}

TYPED_TEST(FixedOrder, TilesAreTheProductInEveryPart) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using C = typename TypeParam::C;
  test::Random random(37);
  constexpr std::int64_t m = 270, k = 520, n = 530;
  const Operand<A> a(random, m, k, Stored::transposed, true);
  const Operand<B> gate(random, k, n, Stored::as_is, false);
  const Operand<B> up(random, k, n, Stored::as_is, false);
  std::vector<C> first(static_cast<std::size_t>(m * n)), second(first);
  multiply(a.factor, gate.factor, MatrixView<C>(first.data(), m, n));
  multiply(a.factor, up.factor, MatrixView<C>(second.data(), m, n));
  std::vector<C> from_tiles(first.size(), test::poison<C>()), second_from_tiles(from_tiles);
  Workspace workspace;
  std::int64_t tiles = 0;
  multiply_tiles(
      a.factor, std::array{gate.factor, up.factor}, workspace, [&](const ProductTile<C, 2>& tile) {
        ++tiles;
        for (std::int64_t row = 0; row < tile.values[0].rows(); ++row) {
          for (std::int64_t col = 0; col < tile.values[0].cols(); ++col) {
            const auto at =
                static_cast<std::size_t>((tile.first_row + row) * n + tile.first_column + col);
            from_tiles[at] = tile.values[0](row, col);
            second_from_tiles[at] = tile.values[1](row, col);
          }
        }
      });
  EXPECT_EQ(tiles, 2 * 3);  // 256 rows, 2 x 256 columns
  EXPECT_TRUE(test::same_bits(from_tiles, first));
  EXPECT_TRUE(test::same_bits(second_from_tiles, second));
  const std::size_t used = workspace.high_water_bytes();
  EXPECT_LE(used, (product_workspace_bytes<A, B>(m, 2 * n, k)));
}

/// Under GCC and Clang, on x86-64 and (by .ci/neon) aarch64.
TEST(Bits, AreTheCommittedOnesOnEveryPath) {
  for (const Path path : available_paths()) {
    const ScopedPath scope(path);
    for (const test::Bits& bits : test::all_bits()) {
      EXPECT_EQ(bits.hash, bits.expected) << path_name(path) << ", " << bits.name;
    }
  }
}

/// op(a) * op(b) + c by the definition, in double.
template <class T, class A>
std::vector<double> product_in_double(const Operand<T>& a, const Operand<T>& b, MatrixView<A> c,
                                      Write write) {
  std::vector<double> result;
  for (std::int64_t m = 0; m < c.rows(); ++m) {
    for (std::int64_t n = 0; n < c.cols(); ++n) {
      double sum = write == Write::accumulate ? static_cast<double>(c(m, n)) : 0.0;
      for (std::int64_t k = 0; k < a.factor.cols(); ++k) {
        sum += static_cast<double>(a.at(m, k)) * static_cast<double>(b.at(k, n));
      }
      result.push_back(sum);
    }
  }
  return result;
}

template <class T>
class EveryEngine : public ::testing::Test {};
using Scalars = ::testing::Types<bfloat16, float, double>;
TYPED_TEST_SUITE(EveryEngine, Scalars);

TYPED_TEST(EveryEngine, MatchesTheDefinitionInEveryForm) {
  using A = AccumulatorOf<TypeParam>;
  test::Random random(11);
  const double tolerance = std::is_same_v<A, double> ? 1e-14 : 4e-6;
  for (const auto& [m, k, n] :
       std::vector<Shape>{{1, 1, 1}, {3, 5, 2}, {17, 300, 9}, {4, 513, 6}}) {
    for (const Stored stored_a : {Stored::as_is, Stored::transposed}) {
      for (const Stored stored_b : {Stored::as_is, Stored::transposed}) {
        for (const Write write : {Write::overwrite, Write::accumulate}) {
          for (const bool gather : {false, true}) {
            const Operand<TypeParam> a(random, m, k, stored_a, gather);
            const Operand<TypeParam> b(random, k, n, stored_b, gather);
            std::vector<A> c_data(static_cast<std::size_t>(m * n), write == Write::overwrite
                                                                       ? test::poison<A>()
                                                                       : static_cast<A>(2.5));
            const MatrixView<A> c(c_data.data(), m, n);
            const auto expected = product_in_double(a, b, c, write);
            std::vector<A> by_eigen = c_data;
            multiply(a.factor, b.factor, c, write);
            EXPECT_TRUE(test::close(c_data, expected, tolerance));
            multiply<Gemm::eigen>(a.factor, b.factor, MatrixView<A>(by_eigen.data(), m, n), write);
            EXPECT_TRUE(test::close(by_eigen, expected, tolerance));
          }
        }
      }
    }
  }
}

TYPED_TEST(EveryEngine, EmptyExtentsAreSumsOfNothing) {
  using A = AccumulatorOf<TypeParam>;
  const Factor<TypeParam> a = as_is(MatrixView<TypeParam>(nullptr, 2, 0));
  const Factor<TypeParam> b = as_is(MatrixView<TypeParam>(nullptr, 0, 3));
  const auto check = [&](const auto& call) {
    std::vector<A> c_data(6, static_cast<A>(7));
    const MatrixView<A> c(c_data.data(), 2, 3);
    call(a, b, c, Write::accumulate);
    EXPECT_EQ(c_data, std::vector<A>(6, static_cast<A>(7)));
    call(a, b, c, Write::overwrite);
    EXPECT_EQ(c_data, std::vector<A>(6, static_cast<A>(0)));
    call(as_is(MatrixView<TypeParam>(nullptr, 0, 4)), as_is(MatrixView<TypeParam>(nullptr, 4, 0)),
         MatrixView<A>(), Write::overwrite);
  };
  check([](const auto&... arguments) { multiply(arguments...); });
  check([](const auto&... arguments) { multiply<Gemm::eigen>(arguments...); });
}

TEST(FixedOrderRows, NanAndInfinityStayInTheirRow) {
  std::vector<float> a = {1, 2, 3, std::nanf(""), 5, INFINITY};
  std::vector<float> b = {1, 2, 3, 4};
  std::vector<float> c(6);
  multiply(as_is(MatrixView<float>(a.data(), 3, 2)), as_is(MatrixView<float>(b.data(), 2, 2)),
           MatrixView<float>(c.data(), 3, 2));
  EXPECT_EQ(c[0], 7);
  EXPECT_EQ(c[1], 10);
  EXPECT_TRUE(std::isnan(c[2]) && std::isnan(c[3]));
  EXPECT_EQ(c[4], INFINITY);
}

TEST(FixedOrderAlias, ColumnBlocksOfOneArrayAreDisjoint) {
  test::Random random(43);
  std::vector<float> array = random.normals<float>(20 * 60);
  const MatrixView<float> all(array.data(), 20, 60);
  const Factor<float> a = as_is(all.column_block(0, 20));
  const Factor<float> b = as_is(all.column_block(20, 20));
  std::vector<float> apart(20 * 20);
  multiply(a, b, MatrixView<float>(apart.data(), 20, 20));
  multiply(a, b, all.column_block(40, 20));
  for (std::int64_t i = 0; i < 400; ++i) {
    ASSERT_TRUE(equal_bits(all(i / 20, 40 + i % 20), apart[static_cast<std::size_t>(i)]));
  }
}

/// A user's scalar that counts its multiplications takes the plain loop.
struct Counting {
  static inline std::int64_t products = 0;
  float value = 0;

  Counting() = default;
  explicit Counting(float v) : value(v) {}
  explicit Counting(int v) : value(static_cast<float>(v)) {}
  friend Counting operator+(Counting a, Counting b) { return Counting(a.value + b.value); }
  friend Counting operator*(Counting a, Counting b) {
    ++products;
    return Counting(a.value * b.value);
  }
};

}  // namespace

template <>
struct ScalarTraits<Counting> {
  using Accumulator = Counting;
};

namespace {

TEST(PlainLoop, ServesAUsersScalar) {
  std::vector<Counting> a(6, Counting(2.0F)), b(12, Counting(3.0F)), c(8);
  multiply(as_is(MatrixView<Counting>(a.data(), 2, 3)), as_is(MatrixView<Counting>(b.data(), 3, 4)),
           MatrixView<Counting>(c.data(), 2, 4));
  EXPECT_EQ(Counting::products, 2 * 3 * 4);
  EXPECT_EQ(c[7].value, 18);
}

TEST(MatrixEngineErrors, NameTheExtentThatDoesNotFit) {
  std::vector<float> data(64);
  const auto text = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto refusal = [&](std::int64_t k, std::int64_t rows, std::int64_t cols,
                           std::int64_t stride) {
    return text([&] {
      multiply(as_is(ConstMatrixView<float>(data.data(), 2, 3)),
               as_is(ConstMatrixView<float>(data.data(), k, 4)),
               MatrixView<float>(data.data(), rows, cols, stride));
    });
  };
  EXPECT_EQ(refusal(5, 2, 4, 4), "multiply: b.rows = 5: must equal a.cols (3)");
  EXPECT_EQ(refusal(3, 3, 4, 4), "multiply: c.rows = 3: must equal a.rows (2)");
  EXPECT_EQ(refusal(3, 2, 5, 5), "multiply: c.cols = 5: must equal b.cols (4)");
  EXPECT_EQ(refusal(3, 2, 4, 3), "multiply: c.stride = 3: must be at least its cols (4)");
  const std::array<std::int32_t, 2> ids{1, 2};
  EXPECT_EQ(text([&] {
              multiply(gathered(ConstMatrixView<float>(data.data(), 2, 3), std::span(ids)),
                       as_is(ConstMatrixView<float>(data.data(), 3, 4)),
                       MatrixView<float>(data.data(), 2, 4));
            }),
            "multiply: a.row_ids[1] = 2: must be in [0, 2)");
  EXPECT_EQ(text([&] {
              multiply(as_is(ConstMatrixView<float>(data.data(), 2, 3)),
                       as_is(ConstMatrixView<float>(nullptr, 3, 4)),
                       MatrixView<float>(data.data(), 2, 4));
            }),
            "multiply: b = null: required");
  EXPECT_EQ(text([&] {
              multiply(as_is(ConstMatrixView<float>(data.data(), 2, 3)),
                       as_is(ConstMatrixView<float>(data.data(), 3, 4)),
                       MatrixView<float>(nullptr, 2, 4));
            }),
            "multiply: c = null: required");
  Workspace workspace;
  EXPECT_EQ(text([&] {
              multiply_tiles(as_is(ConstMatrixView<float>(data.data(), 2, 3)),
                             std::array{as_is(ConstMatrixView<float>(data.data(), 3, 4)),
                                        as_is(ConstMatrixView<float>(data.data(), 3, 5))},
                             workspace, [](const auto&) {});
            }),
            "multiply_tiles: b[1].cols = 5: must equal b[0].cols (4)");
}

}  // namespace
}  // namespace heddle

// Mutants tried: a task's rows counted in columns; the last column block dropped; an empty group given
// a task; one scratch for all threads; a waiting thread not isolated; tiles of the second product
// reported as the first's.
#include "heddle/core/parallel_product.hpp"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace {
std::atomic<std::int64_t> heap_calls{0};
}  // namespace

// Every allocation of this program is counted, so that a product can be shown to make none.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++heap_calls;
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) {
    return memory;
  }
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  ++heap_calls;
  const auto align = static_cast<std::size_t>(alignment);
  if (void* const memory = std::aligned_alloc(align, (bytes + align - 1) / align * align)) {
    return memory;
  }
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace heddle {
namespace {

template <class T>
using PlainProduct = Product<T, Factor<T>, MatrixView<float>>;

/// Groups of rows of one left array against weights of their own, as experts have them.
template <class T>
struct Groups {
  static constexpr std::int64_t depth = 70, columns = 1100;
  std::vector<std::int64_t> sizes;
  std::vector<T> a;
  std::vector<T> weights;
  std::vector<float> c;
  std::vector<PlainProduct<T>> products;

  explicit Groups(std::vector<std::int64_t> group_sizes) : sizes(std::move(group_sizes)) {
    test::Random random(7);
    std::int64_t rows = 0;
    for (const std::int64_t size : sizes) {
      rows += size;
    }
    a = random.normals<T>(rows * depth);
    weights = random.normals<T>(static_cast<std::int64_t>(sizes.size()) * depth * columns);
    c.assign(static_cast<std::size_t>(rows * columns), test::poison<float>());
    std::int64_t row = 0;
    for (std::size_t g = 0; g < sizes.size(); ++g) {
      // The weights of an empty group are not even there.
      const T* const w = sizes[g] == 0
                             ? reinterpret_cast<const T*>(std::uintptr_t{64})
                             : weights.data() + static_cast<std::int64_t>(g) * depth * columns;
      products.push_back({as_is(ConstMatrixView<T>(a.data() + row * depth, sizes[g], depth)),
                          as_is(ConstMatrixView<T>(w, depth, columns)),
                          MatrixView<float>(c.data() + row * columns, sizes[g], columns),
                          Write::overwrite});
      row += sizes[g];
    }
  }
  [[nodiscard]] std::span<const PlainProduct<T>> list() const { return products; }
};

template <class T>
class Grouped : public ::testing::Test {};
using Scalars = ::testing::Types<float, bfloat16>;
TYPED_TEST_SUITE(Grouped, Scalars);

TYPED_TEST(Grouped, EqualsOneProductAtATimeOnAnyNumberOfThreads) {
  Groups<TypeParam> groups({3, 0, 700, 1, 0, 64, 9, 0});
  Workspace workspace;
  for (const auto& product : groups.products) {
    multiply(product.a, product.b, product.c, product.write, workspace);
  }
  const std::vector<float> expected = groups.c;
  for (const int threads : {1, 2, 8}) {
    groups.c.assign(groups.c.size(), test::poison<float>());
    Workspace shared;
    test::with_threads(threads, [&] { parallel_multiply(groups.list(), shared); });
    EXPECT_TRUE(test::same_bits(groups.c, expected)) << threads << " threads";
    EXPECT_LE(shared.high_water_bytes(),
              (parallel_workspace_bytes<TypeParam, TypeParam>(8, 700, 1100, 70, threads)));
  }
}

TEST(ProductTasksTest, CutEveryElementOnceAndNoneForEmptyGroups) {
  Groups<float> groups({3, 0, 700, 64});
  Workspace workspace;
  const ProductTasks<PlainProduct<float>> tasks(groups.list(), 1, workspace);
  EXPECT_EQ(tasks.count(), 3 + 2 * 3 + 3);  // blocks of 512 x 512
  std::vector<std::byte> scratch(static_cast<std::size_t>(tasks.scratch_bytes()) + 64);
  std::byte* const aligned =
      scratch.data() + (64 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 64) % 64;
  std::int64_t written = 0;
  for (std::int64_t task = tasks.count() - 1; task >= 0; --task) {
    tasks.run(task, aligned);
    std::int64_t now = 0;
    for (const float value : groups.c) {
      now += value == value ? 1 : 0;
    }
    EXPECT_GT(now, written);
    written = now;
  }
  EXPECT_EQ(written, static_cast<std::int64_t>(groups.c.size()));
  const ProductTasks<PlainProduct<float>> finer(groups.list(), 8, workspace);
  EXPECT_GT(finer.count(), tasks.count());
  Groups<float> empty({0, 0});
  EXPECT_EQ((ProductTasks<PlainProduct<float>>(empty.list(), 4, workspace).count()), 0);
  parallel_multiply(empty.list(), workspace);
  parallel_multiply(std::span<const PlainProduct<float>>(), workspace);
}

TEST(ParallelMultiply, AccumulatesAndClearsAsMultiplyDoes) {
  test::Random random(13);
  const std::vector<float> a = random.normals<float>(600 * 5), b = random.normals<float>(5 * 600);
  std::vector<float> expected(600 * 600, 1.5F), result(expected);
  const Factor<float> left = as_is(ConstMatrixView<float>(a.data(), 600, 5));
  const Factor<float> right = as_is(ConstMatrixView<float>(b.data(), 5, 600));
  Workspace workspace;
  multiply(left, right, MatrixView<float>(expected.data(), 600, 600), Write::accumulate);
  parallel_multiply(left, right, MatrixView<float>(result.data(), 600, 600), Write::accumulate,
                    workspace);
  EXPECT_TRUE(test::same_bits(result, expected));
  parallel_multiply(left.column_block(0, 0), right.row_block(0, 0),
                    MatrixView<float>(result.data(), 600, 600), Write::overwrite, workspace);
  EXPECT_EQ(result, std::vector<float>(600 * 600, 0.0F));
}

TEST(ParallelTiles, ReachTheCallbackOnceEachAndNestedLoopsKeepThem) {
  test::Random random(19);
  constexpr std::int64_t m = 300, k = 20, n = 600;
  const std::vector<float> a = random.normals<float>(2 * m * k);
  const std::vector<float> b = random.normals<float>(2 * k * n);
  using Tiles = TileProduct<float, Factor<float>, 1>;
  std::vector<Tiles> products;
  std::vector<float> expected(2 * m * n), result(expected.size(), test::poison<float>());
  for (std::int64_t i = 0; i < 2; ++i) {
    products.push_back({as_is(ConstMatrixView<float>(a.data() + i * m * k, m, k)),
                        {as_is(ConstMatrixView<float>(b.data() + i * k * n, k, n))}});
    multiply(products.back().a, products.back().b[0],
             MatrixView<float>(expected.data() + i * m * n, m, n));
  }
  for (const int threads : {1, 2, 8}) {
    result.assign(result.size(), test::poison<float>());
    std::atomic<std::int64_t> tiles{0};
    Workspace workspace;
    test::with_threads(threads, [&] {
      parallel_multiply_tiles(std::span<const Tiles>(products), workspace,
                              [&](std::int64_t product, const ProductTile<float, 1>& tile) {
                                ++tiles;
                                const MatrixView<float> c(result.data() + product * m * n, m, n);
                                parallel_tasks(tile.values[0].rows(), [&](std::int64_t row) {
                                  for (std::int64_t col = 0; col < tile.values[0].cols(); ++col) {
                                    c(tile.first_row + row, tile.first_column + col) =
                                        tile.values[0](row, col);
                                  }
                                });
                              });
    });
    EXPECT_EQ(tiles, 2 * 2 * 2);
    EXPECT_TRUE(test::same_bits(result, expected)) << threads << " threads";
  }
}

TEST(ProductMemory, NothingComesFromTheHeapOnceTheWorkspaceHasIt) {
  test::Random random(23);
  constexpr std::int64_t m = 70, k = 520, n = 530;
  const std::vector<float> a = random.normals<float>(m * k), b = random.normals<float>(k * n);
  const auto a16 = random.normals<bfloat16>(m * k), b16 = random.normals<bfloat16>(k * n);
  std::vector<float> c(m * n);
  std::vector<bfloat16> c16(m * n);
  const MatrixView<float> result(c.data(), m, n);
  const auto work = [&](Workspace& workspace) {
    multiply(as_is(ConstMatrixView<float>(a.data(), m, k)),
             as_is(ConstMatrixView<float>(b.data(), k, n)), result, Write::overwrite, workspace);
    multiply(transposed(ConstMatrixView<float>(a.data(), k, m)),
             transposed(ConstMatrixView<float>(b.data(), n, k)), result, Write::accumulate,
             workspace);
    multiply(as_is(ConstMatrixView<bfloat16>(a16.data(), m, k)),
             as_is(ConstMatrixView<bfloat16>(b16.data(), k, n)),
             MatrixView<bfloat16>(c16.data(), m, n), Write::overwrite, workspace);
    multiply(as_is(ConstMatrixView<float>(a.data(), 5, k)),
             as_is(ConstMatrixView<float>(b.data(), k, n)), result.row_block(0, 5),
             Write::overwrite, workspace);
  };
  for (const Path path : available_paths()) {
    const ScopedPath scope(path);
    Workspace workspace(product_workspace_bytes<float, float>(m, n, k));
    const std::int64_t before = heap_calls;
    work(workspace);
    EXPECT_EQ(heap_calls - before, 0) << path_name(path);
    EXPECT_LE(workspace.high_water_bytes(), (product_workspace_bytes<float, float>(m, n, k)));
  }
}

TEST(ParallelMultiplyErrors, NameTheProduct) {
  Groups<float> groups({2, 3});
  Workspace workspace;
  const auto text = [&]() -> std::string {
    try {
      parallel_multiply(groups.list(), workspace);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto good = groups.products[1];
  groups.products[1].b = groups.products[1].b.row_block(0, 60);
  EXPECT_EQ(text(),
            "parallel_multiply: products[1].b.rows = 60: must equal products[1].a.cols (70)");
  groups.products[1] = good;
  groups.products[1].c = MatrixView<float>(groups.c.data(), 2, 1100);
  EXPECT_EQ(text(), "parallel_multiply: products[1].c.rows = 2: must equal products[1].a.rows (3)");
  groups.products[1] = good;
  EXPECT_EQ(text(), "accepted");
  try {
    const ProductTasks<PlainProduct<float>> tasks(groups.list(), 0, workspace);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "parallel_multiply: threads = 0: must be >= 1");
  }
}

}  // namespace
}  // namespace heddle

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <oneapi/tbb/task_arena.h>

#include "heddle/core/detail/gemm_blocked.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/factor.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"

namespace heddle {

/// c = a * b or c += a * b, one of many.
template <Storage TA, RightFactor Right, ProductResult Result>
struct Product {
  Factor<TA> a;
  Right b;
  Result c;
  Write write = Write::overwrite;
};

/// a * b[i] for all i, one of many, whose tiles go to a callback.
template <Storage TA, RightFactor Right, std::size_t count>
struct TileProduct {
  Factor<TA> a;
  std::array<Right, count> b;
};

namespace detail {

/// How a kind of product is checked and cut: rows and columns of a task, and whether these may be cut
/// finer to give every thread work.
template <class AnyProduct>
struct TaskShape;

template <class TA, class Right, class Result>
struct TaskShape<Product<TA, Right, Result>> {
  using Each = Product<TA, Right, Result>;
  static constexpr std::int64_t rows = 512;  // whole blocks of packed A: cutting costs no copy
  static constexpr std::int64_t columns = product_tile_columns;
  static constexpr std::int64_t least_columns = product_tile_columns / 4;

  static void require(std::string_view where, const std::string& prefix, const Each& each) {
    require_product(where, prefix, each.a, each.b, each.c);
  }
  static ResultRange whole(const Each& each) { return {0, each.c.rows(), 0, each.c.cols()}; }
  static std::int64_t bytes(const Each& each, const ResultRange& range) {
    return block_bytes<Result>(each.a, each.b, range);
  }
};

template <class TA, class Right, std::size_t count>
struct TaskShape<TileProduct<TA, Right, count>> {
  using Each = TileProduct<TA, Right, count>;
  static constexpr std::int64_t rows = product_tile_rows;
  static constexpr std::int64_t columns = tile_columns<typename Right::Element, count>;
  static constexpr std::int64_t least_columns = columns;

  static void require(std::string_view where, const std::string& prefix, const Each& each) {
    require_factors(where, prefix, each.a, each.b);
  }
  static ResultRange whole(const Each& each) { return {0, each.a.rows(), 0, each.b[0].cols()}; }
  static std::int64_t bytes(const Each& each, const ResultRange& range) {
    return block_bytes(each.a, each.b, range);
  }
};

/// Tasks that a thread should find, for uneven ones to balance.
inline constexpr std::int64_t tasks_each_thread = 3;

}  // namespace detail

/// Many products cut into tasks that own what they write: a block of rows and columns of one result
/// each, for hosts with threads of their own. parallel_multiply is a loop over it.
///
/// Grouped products are such: group e multiplies its rows of a by its own weights. An empty group gives
/// no task and its weights are never touched; groups of any size balance, since no task is more than a
/// block.
///
/// order     the bits of multiply, whatever the cut and the number of threads
/// memory    (products + 1) int64 of the workspace, while the object lives; scratch_bytes() of the
///           caller's, 64-byte aligned, for each task that runs at a time
/// throws    constructor: Error as multiply, naming products[i]; threads < 1
template <class AnyProduct>
class ProductTasks {
  using Shape = detail::TaskShape<AnyProduct>;

 public:
  /// `threads` is how many are expected to run tasks: fewer and larger ones for few.
  ProductTasks(std::span<const AnyProduct> products, std::int64_t threads, Workspace& workspace)
      : frame_(workspace),
        products_(products),
        first_task_(workspace.take<std::int64_t>(static_cast<std::int64_t>(products.size()) + 1)) {
    constexpr const char* where = "parallel_multiply";
    require(threads >= 1, where, "threads", threads, "must be >= 1");
    for (std::size_t i = 0; i < products.size(); ++i) {
      Shape::require(where, element_name("products", i) + ".", products[i]);
    }
    count_tasks();
    while (columns_ > Shape::least_columns && count() < detail::tasks_each_thread * threads) {
      columns_ /= 2;
      count_tasks();
    }
  }

  [[nodiscard]] std::int64_t count() const { return first_task_.back(); }

  /// What the hungriest task needs.
  [[nodiscard]] std::int64_t scratch_bytes() const { return scratch_bytes_; }

  /// One task. Products that hand out tiles take a callback: on_tile(product index, tile).
  template <class... OnTile>
  void run(std::int64_t task, std::byte* scratch, const OnTile&... on_tile) const {
    const auto after = std::upper_bound(first_task_.begin(), first_task_.end(), task);
    const auto index = static_cast<std::size_t>(after - first_task_.begin() - 1);
    const AnyProduct& each = products_[index];
    const detail::ResultRange range = block(each, task - first_task_[index]);
    if constexpr (sizeof...(OnTile) == 0) {
      detail::multiply_block(each.a, each.b, each.c, range, each.write, scratch);
    } else {
      detail::tiles_of_block(each.a, each.b, range, scratch, [&](const auto& tile) {
        (on_tile(static_cast<std::int64_t>(index), tile), ...);
      });
    }
  }

 private:
  void count_tasks() {
    first_task_[0] = 0;
    scratch_bytes_ = 0;
    for (std::size_t i = 0; i < products_.size(); ++i) {
      const detail::ResultRange whole = Shape::whole(products_[i]);
      const std::int64_t row_blocks = (whole.rows + Shape::rows - 1) / Shape::rows;
      const std::int64_t column_blocks = (whole.columns + columns_ - 1) / columns_;
      first_task_[i + 1] = first_task_[i] + row_blocks * column_blocks;
      if (row_blocks * column_blocks > 0) {
        // No block is larger than the first of a column block; the last one may end inside a panel.
        for (const std::int64_t task : {std::int64_t{0}, row_blocks * (column_blocks - 1)}) {
          scratch_bytes_ =
              std::max(scratch_bytes_, Shape::bytes(products_[i], block(products_[i], task)));
        }
      }
    }
  }

  /// Blocks of one column block follow each other: they read the same columns of b.
  [[nodiscard]] detail::ResultRange block(const AnyProduct& each, std::int64_t task) const {
    const detail::ResultRange whole = Shape::whole(each);
    const std::int64_t row_blocks = (whole.rows + Shape::rows - 1) / Shape::rows;
    const std::int64_t row = task % row_blocks * Shape::rows;
    const std::int64_t column = task / row_blocks * columns_;
    return {row, std::min(Shape::rows, whole.rows - row), column,
            std::min(columns_, whole.columns - column)};
  }

  Workspace::Frame frame_;
  std::span<const AnyProduct> products_;
  std::span<std::int64_t> first_task_;
  std::int64_t columns_ = Shape::columns;
  std::int64_t scratch_bytes_ = 0;
};

namespace detail {

/// Runs every task in the caller's arena, each thread with its own piece of the workspace.
template <class AnyProduct, class... OnTile>
void run_tasks(std::span<const AnyProduct> products, Workspace& workspace,
               const OnTile&... on_tile) {
  namespace arena = oneapi::tbb::this_task_arena;
  const Workspace::Frame frame(workspace);
  const std::int64_t threads = std::max(2, arena::max_concurrency());
  const ProductTasks<AnyProduct> tasks(products, threads, workspace);
  const std::int64_t piece = (tasks.scratch_bytes() + 63) / 64 * 64;
  // The arena numbers the threads that are in it below its size, which is at least 2.
  const auto scratch =
      workspace.take<std::byte>(tasks.count() > 1 ? threads * piece : piece * tasks.count());
  if (tasks.count() <= 1) {
    for (std::int64_t task = 0; task < tasks.count(); ++task) {
      tasks.run(task, scratch.data(), on_tile...);
    }
    return;
  }
  // Isolated: a thread that waits in a loop of on_tile's must not begin another task here, whose
  // scratch is the one it still uses.
  arena::isolate([&] {
    parallel_tasks(tasks.count(), [&](std::int64_t task) {
      const std::int64_t thread = arena::current_thread_index();
      tasks.run(task, scratch.data() + thread * piece, on_tile...);
    });
  });
}

}  // namespace detail

/// Bytes of workspace that suffice for parallel_multiply of so many products of at most these extents
/// on so many threads.
template <Storage TA, Storage TB>
[[nodiscard]] constexpr std::size_t parallel_workspace_bytes(std::int64_t products, std::int64_t m,
                                                             std::int64_t n, std::int64_t k,
                                                             std::int64_t threads) {
  return Workspace::bytes_for<std::int64_t>(products + 1) +
         static_cast<std::size_t>(std::max<std::int64_t>(threads, 2)) *
             product_workspace_bytes<TA, TB>(std::min(m, std::int64_t{512}), n, k);
}

/// Every product, on the threads of the caller's oneTBB arena.
///
/// shapes    as multiply, for each product
/// writes    each c; they must be disjoint from each other and from every a and b
/// alias     different products may share factors
/// specials  no product; products with M, N or K = 0
/// order     the bits of multiply, whatever the number of threads
/// memory    parallel_workspace_bytes of the workspace; nothing per thread outlives the call
/// cost      about 2 us more than the products when all threads are busy
/// throws    Error as multiply, naming products[i]
template <Storage TA, RightFactor Right, ProductResult Result>
void parallel_multiply(std::span<const Product<TA, Right, Result>> products, Workspace& workspace) {
  detail::run_tasks(products, workspace);
}

/// One product on the threads of the caller's arena.
template <Storage TA, RightFactor Right, ProductResult Result>
void parallel_multiply(const Factor<TA>& a, const Right& b, const Result& c, Write write,
                       Workspace& workspace) {
  const Product<TA, Right, Result> product{a, b, c, write};
  parallel_multiply(std::span<const Product<TA, Right, Result>>(&product, 1), workspace);
}

/// multiply_tiles of every product on the threads of the caller's arena: on_tile(product, tile), for
/// different tiles at the same time.
template <Storage TA, RightFactor Right, std::size_t count, class OnTile>
void parallel_multiply_tiles(std::span<const TileProduct<TA, Right, count>> products,
                             Workspace& workspace, const OnTile& on_tile) {
  detail::run_tasks(products, workspace, on_tile);
}

}  // namespace heddle

#pragma once

#include <algorithm>
#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "heddle/core/detail/gemm_blocked.hpp"
#include "heddle/core/detail/gemm_eigen.hpp"
#include "heddle/core/detail/gemm_types.hpp"
#include "heddle/core/elementwise.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/factor.hpp"
#include "heddle/core/packed_matrix.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"

namespace heddle {

/// Who multiplies.
enum class Gemm {
  fixed_order,  ///< own tiles; the bits of an element depend on its row of A and its column of B alone
  eigen,  ///< Eigen's product on operands widened a block at a time; bits depend on the shapes
};

/// fixed_order needs fused multiply-adds in hardware: in software they are correct and slow.
#if defined(__x86_64__) || defined(__aarch64__) || defined(FP_FAST_FMAF)
inline constexpr Gemm default_gemm = Gemm::fixed_order;
#else
inline constexpr Gemm default_gemm = Gemm::eigen;
#endif

/// What may stand right in a product: a Factor, or a PanelView of a packed one.
template <class T>
concept RightFactor = std::is_same_v<T, Factor<typename T::Element>> ||
    std::is_same_v<T, PanelView<typename T::Element>> ||
    std::is_same_v<T, ConstPanelView<typename T::Element>>;

/// What a product can be written to: a MatrixView, or a PanelView that the next product reads.
template <class T>
concept ProductResult = std::is_same_v<T, MatrixView<typename T::Element>> ||
    std::is_same_v<T, PanelView<typename T::Element>>;

/// Rows and columns of the tiles that multiply_tiles hands out: half of a second-level cache in f32.
inline constexpr std::int64_t product_tile_rows = 256;
inline constexpr std::int64_t product_tile_columns = 512;

namespace detail {

template <class T>
[[nodiscard]] StoredOperand<T> operand(const Factor<T>& factor) {
  return {factor.matrix.data(), factor.matrix.stride(), factor.transpose,
          factor.row_ids ? factor.row_ids->data() : nullptr};
}

template <class T>
[[nodiscard]] PanelOperand<std::remove_const_t<T>> operand(const PanelView<T>& panels) {
  return {panels.data(), panels.panel_stride()};
}

template <class T>
[[nodiscard]] ResultOperand<T> result_operand(const MatrixView<T>& view) {
  return {view.data(), view.stride(), panel_columns<T>};
}

template <class T>
[[nodiscard]] ResultOperand<T> result_operand(const PanelView<T>& panels) {
  return {panels.data(), panel_columns<T>, panels.panel_stride()};
}

template <class T>
void require_readable(std::string_view where, std::string_view argument,
                      const PanelView<T>& panels) {
  require(!panels.is_null() || panels.elements() == 0, where, argument, nullptr, "required");
}

template <class T>
void require_writable(std::string_view where, const std::string& argument,
                      const MatrixView<T>& view) {
  if (view.stride() < view.cols()) {
    fail(where, argument + ".stride", view.stride(),
         "must be at least its cols (" + std::to_string(view.cols()) + ")");
  }
  require(!view.is_null() || view.rows() == 0 || view.cols() == 0, where, argument, nullptr,
          "required");
}

template <class T>
void require_writable(std::string_view where, const std::string& argument,
                      const PanelView<T>& panels) {
  require(!panels.is_null() || panels.elements() == 0, where, argument, nullptr, "required");
}

/// Scratch that blocks of this product really need: little where factors are read in place.
template <class A, class Right>
[[nodiscard]] std::int64_t scratch_bytes(const StoredOperand<A>& a, const Right& b,
                                         const ResultRange& range, std::int64_t depth) {
  using B = typename Right::Element;
  constexpr std::int64_t most_tile_rows = 8;
  const std::int64_t packed_rows = reads_in_place(a, b, range.rows, range.columns, depth)
                                       ? std::min(range.rows, most_tile_rows)
                                       : range.rows;
  bool b_packed = std::is_same_v<B, bfloat16>;  // panels of it are widened on some paths
  std::int64_t chains = 0;
  const std::int64_t columns = std::min(range.columns, product_tile_columns);
  if constexpr (std::is_same_v<Right, StoredOperand<B>>) {
    chains = streams<A>(b, range.rows, depth) ? chain_bytes<B>(range.rows, columns) : 0;
    b_packed = !reads_in_place<A>(b, range.rows, depth) || range.columns % panel_columns<B> != 0;
  }
  return block_scratch_bytes<B>(packed_rows, b_packed ? columns : 0, depth) + chains;
}

/// True for the types that tiles exist for; a user's scalar takes the plain loop below.
template <class T>
inline constexpr bool has_tiles =
    std::is_same_v<T, bfloat16> || std::is_same_v<T, float> || std::is_same_v<T, double>;

/// The definition, in the engine's blocks of K, for scalars that only have + and *.
template <class TA, class TB, class TC>
void multiply_plain(const Factor<TA>& a, const Factor<TB>& b, MatrixView<TC> c, Write write) {
  const StoredOperand<TA> left = operand(a);
  const StoredOperand<TB> right = operand(b);
  const auto at = [](const auto& stored, std::int64_t row, std::int64_t col) {
    return widen<TC>(stored.transposed ? stored.row(col)[row] : stored.row(row)[col]);
  };
  for (std::int64_t m = 0; m < c.rows(); ++m) {
    for (std::int64_t n = 0; n < c.cols(); ++n) {
      TC total = write == Write::accumulate ? c(m, n) : TC(0);
      for (std::int64_t first = 0; first < a.cols(); first += product_block_depth) {
        TC sum(0);
        for (std::int64_t k = first; k < std::min(first + product_block_depth, a.cols()); ++k) {
          sum = sum + at(left, m, k) * at(right, k, n);
        }
        total = first == 0 && write == Write::overwrite ? sum : total + sum;
      }
      c(m, n) = total;
    }
  }
}

}  // namespace detail

/// A finished tile of a product, in scratch: values[i] is the part of a * b[i] that begins at
/// (first_row, first_column).
template <Accumulator C, std::size_t count>
struct ProductTile {
  std::int64_t first_row;
  std::int64_t first_column;
  std::array<MatrixView<C>, count> values;
};

namespace detail {

/// Elements between the rows of a tile in scratch: a cache line more than it has columns, so that the
/// rows of a column do not fall onto one set of the cache.
template <class C>
inline constexpr std::int64_t tile_stride = product_tile_columns +
                                            64 / static_cast<std::int64_t>(sizeof(C));

/// Columns of a tile for each of several right factors.
template <class B, std::size_t count>
inline constexpr std::int64_t tile_columns =
    product_tile_columns / static_cast<std::int64_t>(count) / panel_columns<B>* panel_columns<B>;

template <class C>
[[nodiscard]] constexpr std::int64_t tile_bytes(std::int64_t rows) {
  return std::min(rows, product_tile_rows) * tile_stride<C> * static_cast<std::int64_t>(sizeof(C));
}

/// c = a * b on the range, or c += a * b; c is the whole result.
template <class TA, class Right, class C>
void multiply_range(const StoredOperand<TA>& a, const Right& b, const ResultOperand<C>& c,
                    const ResultRange& range, std::int64_t depth, Write write, std::byte* scratch) {
  const BlockProduct<TA, typename Right::Element> product(a, depth, scratch);
  const auto block_at = [&range](std::int64_t column) {
    return ResultRange{range.first_row, range.rows, range.first_column + column,
                       std::min(product_tile_columns, range.columns - column)};
  };
  for (std::int64_t column = 0; column < range.columns; column += product_tile_columns) {
    const ResultRange block = block_at(column);
    product.run(std::array{b}, std::array{result_at(c, range.first_row, block.first_column)}, block,
                block_at(column + block.columns), write);
  }
}

/// The checks of a product; `prefix` names it where there are several ("products[3].").
template <class TA, class Right>
void require_factors(std::string_view where, const std::string& prefix, const Factor<TA>& a,
                     const Right& b) {
  require_readable(where, prefix + "a", a);
  require_equal(where, prefix + "b.rows", b.rows(), prefix + "a.cols", a.cols());
  require_readable(where, prefix + "b", b);
}

template <class TA, class Right, std::size_t count>
void require_factors(std::string_view where, const std::string& prefix, const Factor<TA>& a,
                     const std::array<Right, count>& b) {
  require_readable(where, prefix + "a", a);
  for (std::size_t i = 0; i < count; ++i) {
    const std::string name = prefix + element_name("b", i);
    require_equal(where, name + ".rows", b[i].rows(), prefix + "a.cols", a.cols());
    require_equal(where, name + ".cols", b[i].cols(), prefix + "b[0].cols", b[0].cols());
    require_readable(where, name, b[i]);
  }
}

template <class TA, class Right, class Result>
void require_product(std::string_view where, const std::string& prefix, const Factor<TA>& a,
                     const Right& b, const Result& c) {
  require_factors(where, prefix, a, b);
  require_equal(where, prefix + "c.rows", c.rows(), prefix + "a.rows", a.rows());
  require_equal(where, prefix + "c.cols", c.cols(), prefix + "b.cols", b.cols());
  require_writable(where, prefix + "c", c);
}

template <class Right, std::size_t count>
[[nodiscard]] auto operands(const std::array<Right, count>& b) {
  std::array<decltype(operand(b[0])), count> result;
  for (std::size_t i = 0; i < count; ++i) {
    result[i] = operand(b[i]);
  }
  return result;
}

template <class TA, class TB, class TC>
inline constexpr bool same_accumulator = std::is_same_v<AccumulatorOf<TA>, AccumulatorOf<TC>>&&
    std::is_same_v<AccumulatorOf<TB>, AccumulatorOf<TC>>;

/// Forms the tiles of the range of a * b[i], all i at once: begin_tile(tile) says whether the product
/// overwrites what it left in the tile or adds to it, end_tile(tile) reads the result.
template <class TA, class Right, std::size_t count, class BeginTile, class EndTile>
void tiles_of_range(const StoredOperand<TA>& a, const std::array<Right, count>& b,
                    const ResultRange& range, std::int64_t depth, std::byte* scratch,
                    const BeginTile& begin_tile, const EndTile& end_tile) {
  using TB = typename Right::Element;
  using C = AccumulatorOf<TB>;
  constexpr std::int64_t columns_each = tile_columns<TB, count>;
  C* const values = reinterpret_cast<C*>(scratch);
  const BlockProduct<TA, TB> product(a, depth, scratch + tile_bytes<C>(range.rows));
  const auto rows_at = [&](std::int64_t row) {
    return std::min(product_tile_rows, range.rows - row);
  };
  const auto columns_at = [&](std::int64_t column) {
    return std::min(columns_each, range.columns - column);
  };
  for (std::int64_t column = 0; column < range.columns; column += columns_each) {
    for (std::int64_t row = 0; row < range.rows; row += product_tile_rows) {
      const ResultRange block{range.first_row + row, rows_at(row), range.first_column + column,
                              columns_at(column)};
      // The tiles of a column block follow each other: they read the same columns of b.
      ResultRange next = block;
      if (row + block.rows == range.rows) {
        next.first_column += block.columns;
        next.columns = columns_at(column + block.columns);
      }
      ProductTile<C, count> tile{block.first_row, block.first_column, {}};
      std::array<ResultOperand<C>, count> results;
      for (std::size_t i = 0; i < count; ++i) {
        tile.values[i] = MatrixView<C>(values + static_cast<std::int64_t>(i) * columns_each,
                                       block.rows, block.columns, tile_stride<C>);
        results[i] = result_operand(tile.values[i]);
      }
      const Write write = begin_tile(tile);
      product.run(b, results, block, next, write);
      end_tile(tile);
    }
  }
}

/// multiply_range with a result of bf16: tiles of f32 that are rounded once.
template <class TA, class Right>
void multiply_narrowed(const StoredOperand<TA>& a, const Right& b, MatrixView<bfloat16> c,
                       const ResultRange& range, std::int64_t depth, Write write,
                       std::byte* scratch) {
  const auto in_result = [&](const ProductTile<float, 1>& tile) {
    return c.row_block(tile.first_row, tile.values[0].rows())
        .column_block(tile.first_column, tile.values[0].cols());
  };
  tiles_of_range(
      a, std::array{b}, range, depth, scratch,
      [&](const ProductTile<float, 1>& tile) {
        if (write == Write::accumulate) {
          const MatrixView<const bfloat16> old = in_result(tile);
          for (std::int64_t row = 0; row < old.rows(); ++row) {
            convert(old.row(row), tile.values[0].row(row));
          }
        }
        return write;
      },
      [&](const ProductTile<float, 1>& tile) {
        const MatrixView<bfloat16> result = in_result(tile);
        const MatrixView<const float> values = tile.values[0];
        for (std::int64_t row = 0; row < result.rows(); ++row) {
          convert(values.row(row), result.row(row));
        }
      });
}

/// Scratch of multiply_block.
template <class Result, class TA, class Right>
[[nodiscard]] std::int64_t block_bytes(const Factor<TA>& a, const Right& b,
                                       const ResultRange& range) {
  const std::int64_t bytes = scratch_bytes(operand(a), operand(b), range, a.cols());
  return std::is_same_v<typename Result::Element, bfloat16> ? bytes + tile_bytes<float>(range.rows)
                                                            : bytes;
}

/// c = a * b on the range, or c += a * b; c is the whole result.
template <class TA, class Right, class Result>
void multiply_block(const Factor<TA>& a, const Right& b, const Result& c, const ResultRange& range,
                    Write write, std::byte* scratch) {
  const auto left = operand(a);
  const auto right = operand(b);
  if constexpr (std::is_same_v<typename Result::Element, bfloat16>) {
    static_assert(std::is_same_v<Result, MatrixView<bfloat16>>,
                  "heddle::multiply: a bf16 result must be a MatrixView");
    multiply_narrowed(left, right, c, range, a.cols(), write, scratch);
  } else {
    multiply_range(left, right, result_operand(c), range, a.cols(), write, scratch);
  }
}

/// Scratch of tiles_of_block.
template <class TA, class Right, std::size_t count>
[[nodiscard]] std::int64_t block_bytes(const Factor<TA>& a, const std::array<Right, count>& b,
                                       const ResultRange& range) {
  ResultRange tiles = range;
  tiles.columns = std::min(range.columns, tile_columns<typename Right::Element, count>);
  const std::int64_t bytes = scratch_bytes(operand(a), operand(b[0]), tiles, a.cols());
  return bytes + tile_bytes<AccumulatorOf<typename Right::Element>>(range.rows);
}

/// on_tile for each tile of the range of a * b[i].
template <class TA, class Right, std::size_t count, class OnTile>
void tiles_of_block(const Factor<TA>& a, const std::array<Right, count>& b,
                    const ResultRange& range, std::byte* scratch, const OnTile& on_tile) {
  tiles_of_range(
      operand(a), operands(b), range, a.cols(), scratch,
      [](const auto&) { return Write::overwrite; }, on_tile);
}

/// True where the engine is own tiles.
template <Gemm engine, class TA, class TB>
inline constexpr bool takes_tiles = engine == Gemm::fixed_order&& has_tiles<TA>&& has_tiles<TB>;

/// Scratch of multiply_by.
template <Gemm engine, class TA, class Right, class Result>
[[nodiscard]] std::int64_t product_bytes(const Factor<TA>& a, const Right& b, const Result& c) {
  if constexpr (takes_tiles<engine, TA, typename Right::Element>) {
    return block_bytes<Result>(a, b, ResultRange{0, c.rows(), 0, c.cols()});
  } else {
    return 0;
  }
}

/// multiply, unchecked.
template <Gemm engine, class TA, class Right, class Result>
void multiply_by(const Factor<TA>& a, const Right& b, const Result& c, Write write,
                 std::byte* scratch) {
  using TB = typename Right::Element;
  using TC = typename Result::Element;
  static_assert(same_accumulator<TA, TB, TC>,
                "heddle::multiply: the result must be the accumulator type of both operands");
  if constexpr (takes_tiles<engine, TA, TB>) {
    multiply_block(a, b, c, ResultRange{0, c.rows(), 0, c.cols()}, write, scratch);
  } else {
    static_assert(std::is_same_v<Right, Factor<TB>> && std::is_same_v<Result, MatrixView<TC>> &&
                      Accumulator<TC>,
                  "heddle::multiply: panels and bf16 results are for Gemm::fixed_order");
    if (c.rows() == 0 || c.cols() == 0) {
      return;
    }
    if constexpr (engine == Gemm::eigen) {
      multiply_eigen(a, b, c, write);
    } else {
      multiply_plain(a, b, c, write);
    }
  }
}

}  // namespace detail

/// Bytes of workspace that suffice for one product [M,K] * [K,N] of factors stored as TA and TB,
/// whatever its form, result and path, at most about 1.3 MiB.
template <Storage TA, Storage TB>
[[nodiscard]] constexpr std::size_t product_workspace_bytes(std::int64_t m, std::int64_t n,
                                                            std::int64_t k) {
  using C = AccumulatorOf<TB>;
  return Workspace::bytes_for<std::byte>(
      detail::block_scratch_bytes<TB>(m, std::min(n, product_tile_columns), k) +
      detail::chain_bytes<TB>(m, std::min(n, product_tile_columns)) + detail::tile_bytes<C>(m));
}

/// c = a * b, or c += a * b.
///
/// shapes    a [M,K], b [K,N] after transposition and gathering, c [M,N]; any strides
/// dtypes    a, b: bf16, f32, f64, or a user's Storage; c: the Accumulator of both, or bf16 where that
///           is f32 (rounded once, at the end). bf16 with f32 factors: the bf16 one is widened
/// writes    all of c (Write::overwrite), or adds to all of it; K = 0 is a sum of nothing
/// alias     c disjoint from a and b; another column block of the same array is disjoint
/// specials  M, N or K = 0 are legal; NaN and inf of a row of a or a column of b stay in that row or
///           column of c
/// order     Gemm::fixed_order: K is cut into blocks of product_block_depth. In a block one chain of
///           fused multiply-adds from +0, k ascending; the first block is stored (accumulate: c +
///           block), the others added to c in order. So the bits of c(m,n) depend on row m of a,
///           column n of b and c(m,n) alone: on no shape, stride, form, path, compiler or thread.
///           bf16 times bf16 takes K in pairs, the odd element first: fma(a[k], b[k], fma(a[k+1],
///           b[k+1], sum)), an odd last one paired with 0; Path::avx512_bf16 reads and writes
///           subnormals as 0. Gemm::eigen: the same call gives the same bits, another shape may not
/// accuracy  |error| <= (min(K, 512) + K / 512) u sum |a b|, u = half an ulp of 1
/// memory    a is read in place where it is f32 or f64 and spans at most 128 KiB (or b has at most 128
///           columns), b where a has at most 8 rows or b is f32 or f64 and spans at most 128 KiB; what
///           must be copied, at most 1.3 MiB, comes from the workspace: product_workspace_bytes.
///           Without one it comes from the heap. Weights beyond a few MiB are read faster from huge pages
/// cost      2 M N K flops
/// throws    Error for a row id outside its matrix, a.cols != b.rows, c.rows != M, c.cols != N,
///           c.stride < N, null data
/// source    Goto and van de Geijn's blocking; numbers of spec/performance.md
template <Gemm engine = default_gemm, Storage TA, RightFactor Right, ProductResult Result>
void multiply(const Factor<TA>& a, const Right& b, const Result& c, Write write,
              Workspace& workspace) {
  detail::require_product("multiply", "", a, b, c);
  const Workspace::Frame frame(workspace);
  const std::int64_t bytes = detail::product_bytes<engine>(a, b, c);
  detail::multiply_by<engine>(a, b, c, write, workspace.take<std::byte>(bytes).data());
}

template <Gemm engine = default_gemm, Storage TA, RightFactor Right, ProductResult Result>
void multiply(const Factor<TA>& a, const Right& b, const Result& c,
              Write write = Write::overwrite) {
  Workspace workspace;
  multiply<engine>(a, b, c, write, workspace);
}

/// multiply for the inner loops of kernels, whose own entry has checked what the products need: the
/// same operands, results and bits for about 20 ns less, which shows below 10 us of work.
///
/// shapes    as multiply, in short of its checks: what it refuses is undefined here
/// memory    scratch: product_workspace_bytes<TA, TB>(M, N, K) bytes, 64-byte aligned; one piece of
///           the largest extents serves every product of a loop
template <Gemm engine = default_gemm, Storage TA, RightFactor Right, ProductResult Result>
void multiply_prechecked(const Factor<TA>& a, const Right& b, const Result& c, Write write,
                         std::span<std::byte> scratch) {
  assert(a.cols() == b.rows() && a.rows() == c.rows() && b.cols() == c.cols());
  assert(std::cmp_less_equal(detail::product_bytes<engine>(a, b, c), scratch.size()));
  detail::multiply_by<engine>(a, b, c, write, scratch.data());
}

/// Forms a * b[i] a tile at a time in scratch and hands each tile to on_tile while it is in cache, all
/// i of a tile at once: an epilogue reads the gate and the up column of a gated unit together, or
/// reduces logits that are never stored.
///
/// shapes    a [M,K], each b [K,N]; tiles of product_tile_rows x (product_tile_columns / b.size())
///           from (0,0) on, the last ones smaller; on_tile(const ProductTile<C, b.size()>&), C the
///           accumulator; on_tile may write to the tile
/// writes    nothing but scratch
/// order     Gemm::fixed_order of multiply; tiles column block by column block, rows ascending
/// memory    product_workspace_bytes(M, b.size() * N, K); A is packed once for all b
/// throws    Error as multiply; b[i].cols != b[0].cols
template <Storage TA, RightFactor Right, std::size_t count, class OnTile>
void multiply_tiles(const Factor<TA>& a, const std::array<Right, count>& b, Workspace& workspace,
                    const OnTile& on_tile) {
  detail::require_factors("multiply_tiles", "", a, b);
  const Workspace::Frame frame(workspace);
  const detail::ResultRange all{0, a.rows(), 0, b[0].cols()};
  const auto scratch = workspace.take<std::byte>(detail::block_bytes(a, b, all));
  detail::tiles_of_block(a, b, all, scratch.data(), on_tile);
}

}  // namespace heddle

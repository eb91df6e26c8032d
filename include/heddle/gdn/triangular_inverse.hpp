#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/simd.hpp"
#include "heddle/core/view.hpp"
#include "heddle/gdn/reference_inverse.hpp"

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"
namespace heddle::v4::gdn_inverse {
#include "heddle/gdn/detail/triangular_inverse.inl"
}  // namespace heddle::v4::gdn_inverse
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"
namespace heddle::v3::gdn_inverse {
#include "heddle/gdn/detail/triangular_inverse.inl"
}  // namespace heddle::v3::gdn_inverse
#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon::gdn_inverse {
#include "heddle/gdn/detail/triangular_inverse.inl"
}  // namespace heddle::neon::gdn_inverse

#endif

namespace heddle::portable::gdn_inverse {
#include "heddle/gdn/detail/triangular_inverse.inl"
}  // namespace heddle::portable::gdn_inverse

namespace heddle::gdn {

namespace detail {

/// triangular_inverse of one matrix without its checks: what a chunk calls, whose shapes are its own.
template <Accumulator A>
void invert_unit_lower(ConstMatrixView<A> t, MatrixView<A> t_inv) {
  const std::int64_t n = t_inv.rows();
  if constexpr (std::is_same_v<A, float>) {
    pick_path(&v4::gdn_inverse::inverse<v4::F32>, &v3::gdn_inverse::inverse<v3::F32>,
              &neon::gdn_inverse::inverse<neon::F32>,
              &portable::gdn_inverse::inverse<portable::F32>)(t.data(), t.stride(), t_inv.data(),
                                                              t_inv.stride(), n);
  } else if constexpr (std::is_same_v<A, double>) {
    pick_path(&v4::gdn_inverse::inverse<v4::F64>, &v3::gdn_inverse::inverse<v3::F64>,
              &neon::gdn_inverse::inverse<neon::F64>,
              &portable::gdn_inverse::inverse<portable::F64>)(t.data(), t.stride(), t_inv.data(),
                                                              t_inv.stride(), n);
  } else {
    reference::triangular_inverse<A>(t, t_inv);
  }
}

}  // namespace detail

/// Inverses of unit lower triangular matrices that lie under each other, by blocks of 16 rows: the
/// products with the rows above a block, then each row of the block subtracted from those below it
/// once it is final. No doubling and no Newton step: their terms grow as binomials and cancel.
///   x_i = e_i - sum_{j < i} t_ij x_j
/// shapes    t, t_inv [count * size, size]
/// dtypes    Accumulator throughout
/// writes    all of t_inv, the diagonals 1 and the upper parts 0
/// alias     t_inv may be t itself, else disjoint from it
/// specials  size = 0 or count = 0: no-op. The diagonal of t counts as 1 and its upper part as 0:
///           neither is read. NaN in a row stays in its matrix, at or below its block
/// order     float and double: one chain of fused multiply-adds an element, columns of t ascending; the
///           same bits on every path, for every block height, and for a matrix alone or among others
/// accuracy  unit keys and beta <= 1: 1e-6 absolute in float, 1e-14 in double, |t_inv_ij| <= beta_i
///           (triangular_inverse_test.cpp). Without such a bound on t the inverse may grow as 2^size
/// memory    none
/// cost      about size^3 / 4 multiply-adds a matrix
/// throws    Error for size < 0, rows not a multiple of size, another shape of t or t_inv
/// source    spec/gdn.md 6
template <Accumulator A>
void triangular_inverse(std::int64_t size, ConstMatrixView<A> t, MatrixView<A> t_inv) {
  constexpr std::string_view where = "gdn::triangular_inverse";
  require(size >= 0, where, "size", size, "must be >= 0");
  const std::int64_t rows = t.rows();
  require(size == 0 ? rows == 0 : rows % size == 0, where, "t.rows", rows,
          "must be a multiple of size (" + std::to_string(size) + ")");
  require_shape(where, "t", t, "t.rows", rows, "size", size);
  require_shape(where, "t_inv", t_inv, "t.rows", rows, "size", size);
  if (rows == 0) {
    return;
  }
  // About 50 us a task in f32.
  const std::int64_t grain = 1 + (std::int64_t{1} << 23) / (size * size * size + 1);
  parallel_blocks(rows / size, grain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      detail::invert_unit_lower<A>(t.row_block(i * size, size), t_inv.row_block(i * size, size));
    }
  });
}

/// The same for one matrix.
/// shapes    t, t_inv [n,n]
template <Accumulator A>
void triangular_inverse(ConstMatrixView<A> t, MatrixView<A> t_inv) {
  triangular_inverse<A>(t.cols(), t, t_inv);
}

}  // namespace heddle::gdn

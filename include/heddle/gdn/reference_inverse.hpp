#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"

namespace heddle::gdn::reference {

/// Inverse of a unit lower triangular matrix by forward substitution, a row at a time.
///   x_i = e_i - sum_{j < i} t_ij x_j
/// shapes    t [n,n], t_inv [n,n]; several matrices: one call each
/// dtypes    Accumulator throughout
/// writes    all of t_inv, the diagonal 1 and the upper part 0
/// alias     t_inv disjoint from t
/// specials  n = 0: no-op. The diagonal of t counts as 1 and its upper part as 0: neither is read
/// order     columns j of t ascending, one product subtracted at a time
/// accuracy  unit keys and beta <= 1: 1e-6 absolute in float, 1e-14 in double
///           (reference_inverse_test.cpp). Without such a bound on t its inverse may grow as 2^n
/// memory    none
/// cost      (n^3 - n) / 6 multiply-adds
/// throws    Error for t or t_inv not square or of different size
/// source    spec/gdn.md 6
template <Accumulator A>
void triangular_inverse(ConstMatrixView<A> t, MatrixView<A> t_inv) {
  constexpr std::string_view where = "gdn::reference::triangular_inverse";
  const std::int64_t n = t.rows();
  require_shape(where, "t", t, "t.rows", n, "t.rows", n);
  require_shape(where, "t_inv", t_inv, "t.rows", n, "t.rows", n);
  for (std::int64_t i = 0; i < n; ++i) {
    A* const x = &t_inv(i, 0);
    for (std::int64_t c = 0; c < n; ++c) {
      x[c] = c == i ? A(1) : A(0);
    }
    for (std::int64_t j = 0; j < i; ++j) {
      const A weight = t(i, j);
      const A* const row = &t_inv(j, 0);
      for (std::int64_t c = 0; c <= j; ++c) {  // row j is zero behind its diagonal
        x[c] -= weight * row[c];
      }
    }
  }
}

}  // namespace heddle::gdn::reference

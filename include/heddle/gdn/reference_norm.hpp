#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/gdn/detail/reference_arrays.hpp"
#include "heddle/gdn/dims.hpp"

namespace heddle::gdn::reference {

/// How a head's slice of one token is normalised, and what the result is multiplied by (q: the
/// attention scale key_dim^(-1/2); k: 1).
template <Accumulator A>
struct Norm {
  NormMode mode;
  A eps;
  A scale;
};

/// y = scale x rho,  rho = 1 / sqrt(sum x^2 + eps) | 1 / max(sqrt(sum x^2), eps) | 1
/// shapes    x, y [dim]
/// writes    all of y; y may be x
/// specials  x = 0 gives 0
/// source    spec/gdn.md 3
template <Accumulator A>
void norm_forward(const Norm<A>& norm, std::span<const A> x, std::span<A> y) {
  using std::sqrt;
  A rho = A(1);
  switch (norm.mode) {
    case NormMode::root:
      rho = A(1) / sqrt(detail::dot(x, x) + norm.eps);
      break;
    case NormMode::clamp: {
      const A length = sqrt(detail::dot(x, x));
      rho = A(1) / (length > norm.eps ? length : norm.eps);
      break;
    }
    case NormMode::none:
      break;
  }
  for (std::size_t i = 0; i < x.size(); ++i) {
    y[i] = norm.scale * (x[i] * rho);
  }
}

/// Backward of norm_forward: with u = x rho and d_u = scale d_y,
///   d_x = rho (d_u - u (u . d_u)), without the projection where rho does not depend on x
/// shapes    x, d_y, d_x [dim]
/// writes    all of d_x; d_x may be d_y
/// specials  the Jacobian at x = 0 is scale / sqrt(eps) (root) or scale / eps (clamp): large, finite
/// source    spec/gdn.md 3
template <Accumulator A>
void norm_backward(const Norm<A>& norm, std::span<const A> x, std::span<const A> d_y,
                   std::span<A> d_x) {
  using std::sqrt;
  A rho = A(1);
  A projection = A(0);  // rho^2 (x . d_y), what u (u . d_y) takes away for each x rho
  switch (norm.mode) {
    case NormMode::root:
      rho = A(1) / sqrt(detail::dot(x, x) + norm.eps);
      projection = rho * rho * detail::dot(x, d_y);
      break;
    case NormMode::clamp: {
      const A length = sqrt(detail::dot(x, x));
      if (length > norm.eps) {
        rho = A(1) / length;
        projection = rho * rho * detail::dot(x, d_y);
      } else {
        rho = A(1) / norm.eps;
      }
      break;
    }
    case NormMode::none:
      break;
  }
  for (std::size_t i = 0; i < x.size(); ++i) {
    d_x[i] = norm.scale * (rho * (d_y[i] - x[i] * projection));
  }
}

}  // namespace heddle::gdn::reference

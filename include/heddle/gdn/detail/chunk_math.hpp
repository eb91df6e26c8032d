#pragma once

#include <cstdint>

#include "heddle/core/simd.hpp"
#include "heddle/gdn/dims.hpp"

namespace heddle::gdn::detail {

/// Rows of a block in which lower triangular tiles are cut: products with them run block by block, over
/// the columns up to the block's end, where the tile holds zeros above its diagonal.
inline constexpr std::int64_t triangle_block = 16;

/// What one path offers for the work between a chunk's products: the functions of chunk_math.inl.
template <class T>
struct ChunkMath {
  void (*decays)(const double* sums, std::int64_t rows, std::int64_t entering, std::int64_t leaving,
                 T* in, T* out);
  void (*decay_tiles)(const double* sums, const std::int32_t* first, const T* beta,
                      std::int64_t rows, std::int64_t stride, const T* kappa, const T* sigma,
                      T* gamma, T* a, T* p);
  void (*residual_rows)(const T* v, std::int64_t v_stride, const T* ks, std::int64_t ks_stride,
                        const T* in, const T* beta, std::int64_t entering, std::int64_t rows,
                        std::int64_t columns, T* y, T* r, std::int64_t stride);
  void (*scale_rows)(const T* from, std::int64_t from_stride, const T* factor, std::int64_t begin,
                     std::int64_t end, std::int64_t rows, std::int64_t columns, T* to,
                     std::int64_t to_stride);
  void (*scale_block)(T factor, T* x, std::int64_t stride, std::int64_t rows, std::int64_t columns);
  T (*largest)(const T* x, std::int64_t stride, std::int64_t rows, std::int64_t columns);
  T(*block_dot)
  (const T* a, std::int64_t a_stride, const T* b, std::int64_t b_stride, std::int64_t rows,
   std::int64_t columns);
  void (*tile_cotangents)(std::int64_t rows, std::int64_t stride, const T* beta, const T* gamma,
                          const T* kappa, const T* sigma, const T* z_n, const T* o_n, T* d_kappa,
                          T* d_sigma, T* d_beta, T* d_g, T* sums);
  void (*state_cotangents)(std::int64_t rows, std::int64_t columns, std::int64_t entering,
                           std::int64_t leaving, const T* in, const T* out, const T* beta,
                           const T* q, const T* k, std::int64_t qk_stride, const T* s_z,
                           const T* s_o, const T* n_ds, std::int64_t stride, T* d_q, T* d_k,
                           std::int64_t d_stride, T* a_in, T* a_taken, T* a_out);
  void (*value_cotangents)(std::int64_t rows, std::int64_t columns, const T* beta, const T* z,
                           std::int64_t z_stride, const T* y, std::int64_t y_stride, T* d_v,
                           std::int64_t d_v_stride, T* d_beta);
  void (*normalise_rows)(NormMode mode, T eps, T scale, const T* x, std::int64_t x_stride,
                         std::int64_t rows, std::int64_t columns, T* y, std::int64_t y_stride);
  void (*normalise_rows_backward)(NormMode mode, T eps, T scale, const T* x, std::int64_t x_stride,
                                  std::int64_t rows, std::int64_t columns, T* d,
                                  std::int64_t d_stride);
};

}  // namespace heddle::gdn::detail

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"
namespace heddle::v4::gdn_chunk {
namespace detail = heddle::gdn::detail;
using heddle::gdn::NormMode;
#include "heddle/gdn/detail/chunk_math.inl"
}  // namespace heddle::v4::gdn_chunk
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"
namespace heddle::v3::gdn_chunk {
namespace detail = heddle::gdn::detail;
using heddle::gdn::NormMode;
#include "heddle/gdn/detail/chunk_math.inl"
}  // namespace heddle::v3::gdn_chunk
#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon::gdn_chunk {
namespace detail = heddle::gdn::detail;
using heddle::gdn::NormMode;
#include "heddle/gdn/detail/chunk_math.inl"
}  // namespace heddle::neon::gdn_chunk

#endif

namespace heddle::portable::gdn_chunk {
namespace detail = heddle::gdn::detail;
using heddle::gdn::NormMode;
#include "heddle/gdn/detail/chunk_math.inl"
}  // namespace heddle::portable::gdn_chunk

namespace heddle::gdn::detail {

/// The current path's functions.
template <class T>
[[nodiscard]] const ChunkMath<T>& current_chunk_math() {
  return *pick_path(&v4::gdn_chunk::chunk_math<T>, &v3::gdn_chunk::chunk_math<T>,
                    &neon::gdn_chunk::chunk_math<T>, &portable::gdn_chunk::chunk_math<T>);
}

}  // namespace heddle::gdn::detail

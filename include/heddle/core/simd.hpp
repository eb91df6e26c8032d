#pragma once

#include "heddle/core/detail/simd_avx2.hpp"
#include "heddle/core/detail/simd_avx512.hpp"
#include "heddle/core/detail/simd_neon.hpp"
#include "heddle/core/detail/simd_portable.hpp"
#include "heddle/core/isa.hpp"

// How a room writes a kernel that runs at the machine's width in a build without -march, with one text
// for all paths and the same bits on each:
//
//   1. The kernel's text goes into an .inl file without includes: inline functions over F32 (loads,
//      stores, arithmetic, masks), the functions of region/math.inl (exp, log, ..., fold_sum) and
//      plain C++. No lambda and no call of the standard library in it: neither would be compiled for
//      the path's instructions. Products that are added later are F32::fma or F32::mul, never a * b +
//      c, which one compiler contracts and another does not.
//   2. A header includes this one and then, at namespace scope, that text once for each path:
//
//        #if defined(__x86_64__)
//        #include "heddle/core/region/avx512_begin.inl"
//        namespace heddle::v4::head {
//        #include "heddle/head/detail/stats.inl"
//        }
//        #include "heddle/core/region/end.inl"
//        #include "heddle/core/region/avx2_begin.inl"
//        namespace heddle::v3::head {
//        #include "heddle/head/detail/stats.inl"
//        }
//        #include "heddle/core/region/end.inl"
//        #elif defined(__aarch64__)
//        namespace heddle::neon::head {
//        #include "heddle/head/detail/stats.inl"
//        }
//        #endif
//        namespace heddle::portable::head {
//        #include "heddle/head/detail/stats.inl"
//        }
//
//   3. An ordinary function takes the one of current_path(): pick_path(&v4::head::f, &v3::head::f,
//      &neon::head::f, &portable::head::f), where the namespaces of other processors are aliases of
//      portable. One such choice for a row or a tile, not for a vector: it costs a few nanoseconds.
//
// F32, in every path's namespace, is the path's vector of float:
//
//   Vector, Mask, lanes              the types, and how many floats a Vector holds
//   load, store (p)                  unaligned, of float or of bfloat16 (widened, rounded once)
//   load_first, store_first (p, n)   n <= lanes elements; the rest of the vector is the given fill
//   add, sub, mul, div               rounded once each; mul is never contracted with a later add
//   fma(a, b, c) = a b + c,  negated_fma(a, b, c) = c - a b
//   max(a, b) = a > b ? a : b,  min(a, b) = a < b ? a : b
//   less, equal, is_nan -> Mask;  select(mask, yes, no);  any(mask)
//   scale(a, n) = a 2^n rounded once, n a whole number in [-252, 254]

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"
namespace heddle::v4 {
#include "heddle/core/region/math.inl"
}  // namespace heddle::v4
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"
namespace heddle::v3 {
#include "heddle/core/region/math.inl"
}  // namespace heddle::v3
#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon {
#include "heddle/core/region/math.inl"
}  // namespace heddle::neon

#endif

namespace heddle::portable {
#include "heddle/core/region/math.inl"
}  // namespace heddle::portable

namespace heddle {

#if !defined(__x86_64__)
namespace v4 = portable;
namespace v3 = portable;
#endif
#if !defined(__aarch64__)
namespace neon = portable;
#endif

/// The one of a kernel's four compilations, or of four tables of them, that the current path takes.
template <class Kernel>
[[nodiscard]] Kernel pick_path(Kernel avx512, Kernel avx2, Kernel neon_kernel,
                               Kernel portable_kernel) {
  switch (current_path()) {
    case Path::avx512_bf16:
    case Path::avx512:
      return avx512;
    case Path::avx2:
      return avx2;
    case Path::neon:
      return neon_kernel;
    case Path::portable:
      break;
  }
  return portable_kernel;
}

}  // namespace heddle

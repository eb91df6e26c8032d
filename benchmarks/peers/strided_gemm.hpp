#pragma once

#include <cstdint>
#include <type_traits>
#include <unordered_map>

#ifdef HEDDLE_HAS_ONEDNN
#include <dlfcn.h>

#include <oneapi/dnnl/dnnl.hpp>
#endif
#ifdef HEDDLE_HAS_OPENBLAS
#include <cblas.h>
#endif

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"

namespace heddle::bench {

/// Whose product an expert loop calls, or nullptr where no library was found that has one of T: oneDNN
/// before OpenBLAS, which has none of bf16.
template <class T>
[[nodiscard]] constexpr const char* strided_gemm_library() {
#if defined(HEDDLE_HAS_ONEDNN)
  return "onednn";
#elif defined(HEDDLE_HAS_OPENBLAS)
  return std::is_same_v<T, float> ? "openblas" : nullptr;
#else
  return nullptr;
#endif
}

/// One thread, as what they are compared with: their threads are not oneTBB's.
inline void strided_gemm_on_one_thread() {
#if defined(HEDDLE_HAS_ONEDNN)
  if (void* const set = ::dlsym(RTLD_DEFAULT, "omp_set_num_threads")) {
    reinterpret_cast<void (*)(int)>(set)(1);
  }
#elif defined(HEDDLE_HAS_OPENBLAS)
  openblas_set_num_threads(1);
#endif
}

/// c = op(a) * op(b) of row-major matrices, op the transposition where it is asked for.
template <class T>
class StridedGemm {
 public:
  template <class C>
  void operator()(ConstMatrixView<T> a, bool a_transposed, ConstMatrixView<T> b, bool b_transposed,
                  MatrixView<C> c) {
    if (c.rows() == 0 || c.cols() == 0) {
      return;
    }
    const std::int64_t k = a_transposed ? a.rows() : a.cols();
#if defined(HEDDLE_HAS_ONEDNN)
    using dnnl::memory;
    const auto type = []<class X>(X) {
      return std::is_same_v<X, float> ? memory::data_type::f32 : memory::data_type::bf16;
    };
    const auto strides = [](std::int64_t stride, bool transposed) {
      return transposed ? memory::dims{1, stride} : memory::dims{stride, 1};
    };
    const memory::desc left({c.rows(), k}, type(T{}), strides(a.stride(), a_transposed));
    const memory::desc right({k, c.cols()}, type(T{}), strides(b.stride(), b_transposed));
    const memory::desc result({c.rows(), c.cols()}, type(C{}), strides(c.stride(), false));
    const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(left, right, result),
                                                   engine_);
    dnnl::matmul(description)
        .execute(stream_, {{DNNL_ARG_SRC, memory(left, engine_, const_cast<T*>(a.data()))},
                           {DNNL_ARG_WEIGHTS, memory(right, engine_, const_cast<T*>(b.data()))},
                           {DNNL_ARG_DST, memory(result, engine_, c.data())}});
    stream_.wait();
#elif defined(HEDDLE_HAS_OPENBLAS)
    if constexpr (std::is_same_v<T, float>) {
      const auto size = [](std::int64_t extent) { return static_cast<blasint>(extent); };
      cblas_sgemm(CblasRowMajor, a_transposed ? CblasTrans : CblasNoTrans,
                  b_transposed ? CblasTrans : CblasNoTrans, size(c.rows()), size(c.cols()), size(k),
                  1.0F, a.data(), size(a.stride()), b.data(), size(b.stride()), 0.0F, c.data(),
                  size(c.stride()));
    }
#else
    static_cast<void>(k);
    static_cast<void>(b);
    static_cast<void>(b_transposed);
#endif
  }

 private:
#ifdef HEDDLE_HAS_ONEDNN
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
#endif
};

}  // namespace heddle::bench

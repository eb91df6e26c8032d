#pragma once

#include <dlfcn.h>

#include <type_traits>
#include <unordered_map>

#include <oneapi/dnnl/dnnl.hpp>

#include "heddle/core/scalar.hpp"
#include "peers/eigen_gemm.hpp"

namespace heddle::bench {

/// oneDNN's matrix product on plain row-major memory, f32 out.
template <class T>
class OnednnGemm {
 public:
  explicit OnednnGemm(const PeerProduct& product)
      : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    using dnnl::memory;
    const auto type = std::is_same_v<T, float> ? memory::data_type::f32 : memory::data_type::bf16;
    const memory::dims a_strides =
        product.a_transposed ? memory::dims{1, product.m} : memory::dims{product.k, 1};
    const memory::desc a({product.m, product.k}, type, a_strides);
    const memory::desc b({product.k, product.n}, type, memory::dims{product.n, 1});
    const memory::desc c({product.m, product.n}, memory::data_type::f32,
                         memory::dims{product.n, 1});
    dnnl::primitive_attr attributes;
    if (product.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0F);
      attributes.set_post_ops(sum);
    }
    const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(a, b, c), attributes,
                                                   engine_);
    matmul_ = dnnl::matmul(description);
    arguments_ = {{DNNL_ARG_SRC, memory(a, engine_, nullptr)},
                  {DNNL_ARG_WEIGHTS, memory(b, engine_, nullptr)},
                  {DNNL_ARG_DST, memory(c, engine_, nullptr)}};
  }

  void operator()(const T* a, const T* b, float* c) {
    arguments_.at(DNNL_ARG_SRC).set_data_handle(const_cast<T*>(a));
    arguments_.at(DNNL_ARG_WEIGHTS).set_data_handle(const_cast<T*>(b));
    arguments_.at(DNNL_ARG_DST).set_data_handle(c);
    matmul_.execute(stream_, arguments_);
    stream_.wait();
  }

 private:
  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::matmul matmul_;
  std::unordered_map<int, dnnl::memory> arguments_;
};

/// The library's threads are OpenMP's, which this program is not compiled with.
inline void onednn_on_one_thread() {
  if (void* const set = ::dlsym(RTLD_DEFAULT, "omp_set_num_threads")) {
    reinterpret_cast<void (*)(int)>(set)(1);
  }
}

}  // namespace heddle::bench

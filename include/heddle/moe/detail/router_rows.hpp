#pragma once

#include <cstdint>

#include "heddle/core/simd.hpp"

namespace heddle::moe::detail {

/// The router's row functions of a path: taken once a task, not once a row.
template <class S>
struct RouterRowFunctions {
  void (*choose)(const S*, std::int64_t, std::int64_t, std::int32_t*, float*);
  void (*gather)(const S*, std::int64_t, const std::int32_t*, float*);
  void (*row_softmax)(const S*, std::int64_t, float*, float*);
  void (*exps_in_place)(std::int64_t, float, float*);
  void (*spread_mean)(const S*, std::int64_t, float, float, float, float*);
  void (*add_probabilities)(const S*, std::int64_t, float, float, float*);
  float (*mean_cost)(const S*, std::int64_t, float, float, const float*);
  void (*add_loss_row)(const S*, std::int64_t, float, float, const float*, float, float*);
  float (*log_one)(float);
};

}  // namespace heddle::moe::detail

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"

namespace heddle::v4::moe_router {
#include "heddle/moe/detail/router_rows.inl"
}  // namespace heddle::v4::moe_router

#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"

namespace heddle::v3::moe_router {
#include "heddle/moe/detail/router_rows.inl"
}  // namespace heddle::v3::moe_router

#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon::moe_router {
#include "heddle/moe/detail/router_rows.inl"
}  // namespace heddle::neon::moe_router

#endif

namespace heddle::portable::moe_router {
#include "heddle/moe/detail/router_rows.inl"
}  // namespace heddle::portable::moe_router

namespace heddle::moe::detail {

template <class S>
[[nodiscard]] RouterRowFunctions<S> router_row_functions() {
  return pick_path(&v4::moe_router::row_functions<S>, &v3::moe_router::row_functions<S>,
                   &neon::moe_router::row_functions<S>, &portable::moe_router::row_functions<S>)();
}

}  // namespace heddle::moe::detail

#pragma once

#include <cstdint>
#include <type_traits>

#include "heddle/core/scalar.hpp"
#include "heddle/core/simd.hpp"

namespace heddle::gdn::detail {

/// Columns of a state that are moved on together: a cache line's pair of vectors at 512 bits. With 128
/// rows such a panel is a third to a half of a first-level cache.
template <class T>
inline constexpr std::int64_t state_panel_columns = 128 / static_cast<std::int64_t>(sizeof(T));

/// What a token's gates do to a state that is stored divided by a scale c of its own, so that a decay
/// need not touch every element: S = c stored. With r = stored^T k, decay d and c' = c d,
///   stored <- keep stored + k (write v + erase r)^T,  o = scale stored^T q
/// and keep = 1, scale = c', write = beta / c', erase = -beta. Where c' comes to be small the decay is
/// carried out: keep = c', scale = 1, write = beta, erase = -beta c'.
template <class T>
struct RecurrenceGate {
  T keep;
  T write;
  T erase;
  T scale;

  /// `c` is the scale before the token going in, after it coming out.
  static RecurrenceGate of(T beta, T decay, T& c) {
    constexpr T least = T(1) / T(1 << 24);
    const T after = c * decay;
    if (after >= least) {
      c = after;
      return {T(1), beta / after, -beta, after};
    }
    c = T(1);
    return {after, beta, -beta * after, T(1)};
  }

  /// A decay carried out whatever it is, for states that are stored as they are.
  static RecurrenceGate at_once(T beta, T decay) { return {decay, beta, -beta * decay, T(1)}; }
};

/// Tokens of one document over a panel of a value head's state.
///
/// shapes    state [key_dim, state_panel_columns]; q, k [tokens, key_dim], normalised and scaled; v, o
///           [tokens, state_panel_columns]; gates [tokens]
/// specials  o null: not wanted, q is then not read
template <class T>
struct RecurrenceRun {
  T* state = nullptr;
  std::int64_t state_stride = 0;
  std::int64_t key_dim = 0;
  std::int64_t tokens = 0;  // >= 1
  const T* q = nullptr;
  const T* k = nullptr;
  std::int64_t qk_stride = 0;
  const T* v = nullptr;
  std::int64_t v_stride = 0;
  T* o = nullptr;
  std::int64_t o_stride = 0;
  const RecurrenceGate<T>* gates = nullptr;
};

/// A scalar as a vector of one lane.
template <class T>
struct OneLane {
  using Scalar = T;
  using Vector = T;
  static constexpr int lanes = 1;

  static T zero() { return T(0); }
  static T broadcast(T x) { return x; }
  static T load(const T* p) { return *p; }
  static void store(T* p, T x) { *p = x; }
  static T add(T a, T b) { return a + b; }
  static T fma(T a, T b, T c) { return a * b + c; }
};

}  // namespace heddle::gdn::detail

#if defined(__x86_64__)

#include "heddle/core/region/avx512_begin.inl"
namespace heddle::v4::gdn_recurrence {
namespace detail = heddle::gdn::detail;
#include "heddle/gdn/detail/recurrence_rows.inl"
}  // namespace heddle::v4::gdn_recurrence
#include "heddle/core/region/end.inl"

#include "heddle/core/region/avx2_begin.inl"
namespace heddle::v3::gdn_recurrence {
namespace detail = heddle::gdn::detail;
#include "heddle/gdn/detail/recurrence_rows.inl"
}  // namespace heddle::v3::gdn_recurrence
#include "heddle/core/region/end.inl"

#elif defined(__aarch64__)

namespace heddle::neon::gdn_recurrence {
namespace detail = heddle::gdn::detail;
#include "heddle/gdn/detail/recurrence_rows.inl"
}  // namespace heddle::neon::gdn_recurrence

#endif

namespace heddle::portable::gdn_recurrence {
namespace detail = heddle::gdn::detail;
#include "heddle/gdn/detail/recurrence_rows.inl"
}  // namespace heddle::portable::gdn_recurrence

namespace heddle::gdn::detail {

template <Accumulator A>
void recurrence_run(const RecurrenceRun<A>& run) {
  if constexpr (std::is_same_v<A, float>) {
    pick_path(&v4::gdn_recurrence::recurrence_run<v4::F32>,
              &v3::gdn_recurrence::recurrence_run<v3::F32>,
              &neon::gdn_recurrence::recurrence_run<neon::F32>,
              &portable::gdn_recurrence::recurrence_run<portable::F32>)(run);
  } else if constexpr (std::is_same_v<A, double>) {
    pick_path(&v4::gdn_recurrence::recurrence_run<v4::F64>,
              &v3::gdn_recurrence::recurrence_run<v3::F64>,
              &neon::gdn_recurrence::recurrence_run<neon::F64>,
              &portable::gdn_recurrence::recurrence_run<portable::F64>)(run);
  } else {
    portable::gdn_recurrence::recurrence_run<OneLane<A>>(run);
  }
}

}  // namespace heddle::gdn::detail

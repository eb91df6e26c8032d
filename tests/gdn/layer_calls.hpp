#pragma once

#include <cstdint>
#include <vector>

#include "gdn/problem.hpp"
#include "heddle/gdn/layer.hpp"
#include "heddle/gdn/reference.hpp"

namespace heddle::gdn::test {

/// Which residuals a forward keeps for its backward.
enum class Kept { everything, inverses, nothing };

/// Residuals that own their arrays, poisoned.
template <class A>
struct OwnedResiduals {
  std::vector<A> t_inv, chunk_states;
  std::int64_t chunk = 0;
  std::int64_t chunks = 0;
  Dims dims;

  template <class S, class P>
  OwnedResiduals(const Problem<S, P, A>& p, const LayerOptions& options, Kept kept)
      : chunk(options.chunks.chunk), dims(p.dims) {
    chunks = ChunkPlan(Segments(p.segment_ids, p.options.initial_segment), options.chunks).count();
    const std::int64_t rows = chunks * dims.value_heads;
    if (kept != Kept::nothing) {
      t_inv.assign(static_cast<std::size_t>(rows * chunk * chunk), poison<A>());
    }
    if (kept == Kept::everything) {
      chunk_states.assign(static_cast<std::size_t>(rows * dims.key_dim * dims.value_dim),
                          poison<A>());
    }
  }
  [[nodiscard]] ChunkResiduals<A> views() {
    const std::int64_t rows = chunks * dims.value_heads;
    return {.t_inv = matrix(t_inv, rows, chunk * chunk),
            .chunk_states = matrix(chunk_states, rows, dims.key_dim * dims.value_dim)};
  }
  [[nodiscard]] ChunkResiduals<const A> const_views() {
    const ChunkResiduals<A> mine = views();
    return {.t_inv = mine.t_inv, .chunk_states = mine.chunk_states};
  }
};

template <class O, class S, class P, class A>
[[nodiscard]] ForwardResult<O, S, A> layer_forward_as(const Problem<S, P, A>& p,
                                                      const LayerOptions& options = {}) {
  ForwardResult<O, S, A> result(p.dims);
  LayerScratch scratch;
  forward(p.dims, p.inputs(), p.options, options, result.outputs(p.dims), ChunkResiduals<A>{},
          scratch);
  return result;
}

template <class S, class P, class A>
[[nodiscard]] ForwardResult<A, S, A> layer_forward(const Problem<S, P, A>& p,
                                                   const LayerOptions& options = {}) {
  return layer_forward_as<A>(p, options);
}

template <class S, class P, class A>
[[nodiscard]] Gradients<A> layer_backward(const Problem<S, P, A>& p,
                                          const LayerOptions& options = {},
                                          Kept kept = Kept::nothing) {
  OwnedResiduals<A> residuals(p, options, kept);
  LayerScratch scratch;
  if (kept != Kept::nothing) {
    LayerOptions chunked = options;
    chunked.recurrence = Recurrence::automatic;
    ForwardResult<A, S, A> result(p.dims);
    forward(p.dims, p.inputs(), p.options, chunked, result.outputs(p.dims), residuals.views(),
            scratch);
  }
  Gradients<A> gradients(p);
  backward(p.dims, p.inputs(), p.options, options, residuals.const_views(), p.cotangents(),
           gradients.cotangents(p.dims), scratch);
  return gradients;
}

template <class S, class P, class A>
[[nodiscard]] ForwardResult<A, S, A> reference_forward(const Problem<S, P, A>& p) {
  ForwardResult<A, S, A> result(p.dims);
  reference::forward(p.dims, p.inputs(), p.options, result.outputs(p.dims));
  return result;
}

template <class S, class P, class A>
[[nodiscard]] Gradients<A> reference_backward(const Problem<S, P, A>& p) {
  Gradients<A> gradients(p);
  reference::backward(p.dims, p.inputs(), p.options, p.cotangents(), gradients.cotangents(p.dims));
  return gradients;
}

}  // namespace heddle::gdn::test

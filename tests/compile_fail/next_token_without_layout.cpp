// A bare array does not say in which order its tokens lie over the context ranks.
// expect: no matching function for call to .*next_token
#include "heddle/mesh/local_mesh.hpp"
#include "heddle/mesh/sequence.hpp"

using heddle::ContextLayout;
using heddle::ContextPartition;
using heddle::ContiguousShard;
using heddle::MatrixView;

void shift(heddle::MeshDevice& device) {
  float in[2] = {};
  float out[2] = {};
  const float fill[1] = {};
  const ContextPartition partition(ContextLayout::contiguous, 2, 1);
#ifdef HEDDLE_MISUSE
  heddle::mesh::next_token(device, MatrixView<const float>(in, 2, 1), MatrixView<float>(out, 2, 1),
                           fill);
#else
  heddle::mesh::next_token(
      device, ContiguousShard<const float>(MatrixView<float>(in, 2, 1), partition, 0),
      ContiguousShard<float>(MatrixView<float>(out, 2, 1), partition, 0), fill);
#endif
}

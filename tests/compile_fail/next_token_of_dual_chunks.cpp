// Under dual_chunk_swap the next token is not on the next rank, and no shape would tell.
// expect: the next token stands on the next rank in contiguous order alone
#include "heddle/mesh/local_mesh.hpp"
#include "heddle/mesh/sequence.hpp"

using heddle::ContextLayout;

void shift(heddle::MeshDevice& device) {
#ifdef HEDDLE_MISUSE
  constexpr ContextLayout layout = ContextLayout::dual_chunk_swap;
#else
  constexpr ContextLayout layout = ContextLayout::contiguous;
#endif
  float in[2] = {};
  float out[2] = {};
  const float fill[1] = {};
  const heddle::ContextPartition partition(layout, 2, 1);
  heddle::mesh::next_token(
      device,
      heddle::SequenceShard<const float, layout>(heddle::MatrixView<float>(in, 2, 1), partition, 0),
      heddle::SequenceShard<float, layout>(heddle::MatrixView<float>(out, 2, 1), partition, 0),
      fill);
}

// 32x4x2 is fsdp, context, expert to one program and fsdp, expert, context to the next.
// expect: (could not convert|no viable conversion from).*ByName
#include "heddle/mesh/axes.hpp"

int main() {
#ifdef HEDDLE_MISUSE
  const heddle::MeshAxes mesh{32, 4, 2};
#else
  const heddle::MeshAxes mesh{.fsdp = 32, .context = 4, .expert = 2};
#endif
  return mesh.devices() == 256 ? 0 : 1;
}

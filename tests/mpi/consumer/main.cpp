#include <cstdint>
#include <cstdio>
#include <span>
#include <vector>

#include "heddle/mesh/collectives.hpp"
#include "heddle/mesh/mpi_mesh.hpp"

int main(int argc, char** argv) {
  heddle::MpiSession session(argc, argv);
  heddle::MpiMesh mesh(session, {.fsdp = 2, .context = 2});
  bool right = true;
  mesh.run([&](auto& device) {
    const std::vector<std::int64_t> own = {device.id()};
    std::vector<std::int64_t> sum(1);
    heddle::mesh::all_reduce(device, {heddle::Axis::fsdp, heddle::Axis::context}, own,
                             std::span<std::int64_t>(sum));
    if (device.id() == 0) {
      right = sum[0] == 0 + 1 + 2 + 3;
    }
  });
  if (session.rank() == 0) {
    std::printf("sum of the ids of 4 devices on %d ranks: %s\n", session.ranks(),
                right ? "6" : "wrong");
  }
  return right ? 0 : 1;
}

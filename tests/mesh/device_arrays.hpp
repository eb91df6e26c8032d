#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "heddle/mesh/local_mesh.hpp"
#include "heddle/mesh/topology.hpp"
#include "support/random.hpp"
#include "support/thrown_text.hpp"

namespace heddle::test {

/// One array a device, by id.
template <class T>
using PerDevice = std::vector<std::vector<T>>;

inline constexpr AxisTuple world = {Axis::fsdp, Axis::context, Axis::expert};

/// Meshes on which every collective is held to its definition: each axis alone and together, odd sizes.
inline const std::vector<MeshAxes>& small_meshes() {
  static const std::vector<MeshAxes> meshes = {{},
                                               {.fsdp = 2},
                                               {.context = 2},
                                               {.expert = 2},
                                               {.fsdp = 3},
                                               {.context = 3, .expert = 2},
                                               {.fsdp = 2, .context = 2, .expert = 2}};
  return meshes;
}

/// Tuples of no, one, two and three axes, in both orders.
inline const std::vector<AxisTuple>& some_tuples() {
  static const std::vector<AxisTuple> tuples = {{},
                                                {Axis::context},
                                                {Axis::context, Axis::expert},
                                                {Axis::expert, Axis::context},
                                                {Axis::expert, Axis::fsdp, Axis::context},
                                                world};
  return tuples;
}

template <class T>
[[nodiscard]] PerDevice<T> random_inputs(const Topology& mesh, std::int64_t count,
                                         std::uint64_t seed) {
  PerDevice<T> inputs;
  for (std::int64_t id = 0; id < mesh.devices(); ++id) {
    Random random(seed + 1000 * static_cast<std::uint64_t>(id));
    inputs.push_back(random.normals<T>(count));
  }
  return inputs;
}

template <class T>
[[nodiscard]] std::vector<T>& of(PerDevice<T>& arrays, std::int64_t id) {
  return arrays[static_cast<std::size_t>(id)];
}
template <class T>
[[nodiscard]] const std::vector<T>& of(const PerDevice<T>& arrays, std::int64_t id) {
  return arrays[static_cast<std::size_t>(id)];
}

/// The text of the E that running `body` on a mesh throws.
template <class E, class Body>
[[nodiscard]] std::string run_text(const MeshAxes& axes, const Body& body,
                                   LocalMeshOptions options = {}) {
  return thrown_text<E>([&] {
    LocalMesh mesh(axes, options);
    mesh.run(body);
  });
}

}  // namespace heddle::test

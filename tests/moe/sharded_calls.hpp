#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/workspace.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/topology.hpp"
#include "heddle/moe/all_to_all.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/ring.hpp"
#include "heddle/moe/sharded_cost.hpp"
#include "heddle/moe/sharded_layer.hpp"

namespace heddle::moe::test {

/// What run_sharded calls of each strategy.
struct Ring {
  template <class S>
  using Residuals = RingResiduals<S>;
  template <class S>
  static auto take(const Topology& mesh, const Dims& dims, const ShardedOptions& options,
                   Workspace& memory) {
    return take_ring_residuals<S>(mesh, dims, options, memory);
  }
  template <class... Arguments>
  static auto forward(Arguments&&... arguments) {
    return ring_forward(std::forward<Arguments>(arguments)...);
  }
  template <class... Arguments>
  static void backward(Arguments&&... arguments) {
    ring_backward(std::forward<Arguments>(arguments)...);
  }
};

struct AllToAll {
  template <class S>
  using Residuals = AllToAllResiduals<S>;
  template <class S>
  static auto take(const Topology& mesh, const Dims& dims, const ShardedOptions& options,
                   Workspace& memory) {
    return take_all_to_all_residuals<S>(mesh, dims, options, memory);
  }
  template <class... Arguments>
  static auto forward(Arguments&&... arguments) {
    return all_to_all_forward(std::forward<Arguments>(arguments)...);
  }
  template <class... Arguments>
  static void backward(Arguments&&... arguments) {
    all_to_all_backward(std::forward<Arguments>(arguments)...);
  }
};

/// One device, each axis, and all of them; each divides the extents below.
inline const std::vector<MeshAxes>& meshes() {
  static const std::vector<MeshAxes> all = {{},
                                            {.fsdp = 2, .context = 2, .expert = 2},
                                            {.context = 4, .expert = 2},
                                            {.fsdp = 4, .context = 2},
                                            {.fsdp = 3}};
  return all;
}

inline constexpr Dims plain{
    .tokens = 48, .hidden = 24, .experts = 8, .top_k = 3, .expert_hidden = 10};
inline constexpr Dims shared{
    .tokens = 48, .hidden = 24, .experts = 8, .top_k = 3, .expert_hidden = 10, .shared_hidden = 14};

/// Passes when a device's ledger is what was foretold, by label and by axes.
inline void expect_messages(const Ledger& ledger, const std::vector<LayerMessage>& messages,
                            std::int64_t device, LayerPass pass) {
  std::size_t count = 0;
  for (const LayerMessage& message : messages) {
    if (message.pass != pass) {
      continue;
    }
    ++count;
    std::int64_t expected = 0;
    for (const LayerMessage& other : messages) {
      if (other.pass == pass && other.label == message.label && other.axes == message.axes) {
        expected += other.bytes.wire_bytes;
      }
    }
    EXPECT_EQ(
        ledger.sum({.device = device, .axes = message.axes, .label = std::string(message.label)})
            .recv_bytes,
        expected)
        << message.label << " " << to_string(message.axes);
    EXPECT_EQ(ledger.sum({.device = device, .axes = message.axes}).wire_bytes,
              bytes_along(messages, message.axes, pass));
  }
  EXPECT_EQ(ledger.count({.device = device}), static_cast<std::int64_t>(count));
}

}  // namespace heddle::moe::test

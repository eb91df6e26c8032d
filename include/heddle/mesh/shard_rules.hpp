#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/context_layout.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/topology.hpp"

namespace heddle {

/// Over which devices the experts are spread.
enum class ExpertRule : std::uint8_t {
  cp_as_ep,  ///< the group (context, expert): every device of a row's context holds other experts
  ep_own,    ///< the expert axis alone; context then helps to shard their D
};

/// Over which devices dense and head weights are spread.
enum class DenseShard : std::uint8_t {
  fsdp,  ///< fsdp; copies along context and expert
  all,   ///< all three axes; no copies
};

/// How a model's weights lie over the mesh.
struct ShardRules {
  ExpertRule experts = ExpertRule::cp_as_ep;
  DenseShard dense = DenseShard::fsdp;
};

/// The arrays of a model, by the role that decides how they are sharded. Optimizer state is sharded as
/// its weight is.
enum class ModelArray : std::uint8_t {
  tokens,         ///< [B, S]: ids, masks, advantages
  activations,    ///< [B, S, D]
  expert_wi,      ///< [E, D, 2M]
  expert_wo,      ///< [E, M, D]
  dense_kernel,   ///< [D, N]: projections of GDN and attention, the shared expert
  router_kernel,  ///< [D, E]
  embedding,      ///< [D, V]
  head,           ///< [D, V]
  small_vector,   ///< [N]: norm scales, A_log, dt_bias, convolution taps
};

/// One dimension of an array and the axes that split it; no axes: every device has it whole.
struct DimShard {
  std::string_view name = {};
  AxisTuple axes = {};
};

/// What an array is sharded by, and what that makes of it on the way in and of its cotangent on the way
/// back.
struct ArrayShards {
  std::string_view name;
  std::array<DimShard, 3> dimensions;
  std::size_t rank = 0;
  /// Gathered over these axes for use; the cotangent is reduce-scattered over the same.
  AxisTuple gathered;
  /// The data axes along which the weight is a copy: the cotangent is all-reduced over them besides. Never
  /// those of the expert group, whose tokens come to their experts.
  AxisTuple summed;

  [[nodiscard]] std::span<const DimShard> dims() const { return {dimensions.data(), rank}; }
};

/// The devices that share out a set of experts among them, in index order.
[[nodiscard]] constexpr AxisTuple expert_group(const ShardRules& rules) {
  return rules.experts == ExpertRule::cp_as_ep ? AxisTuple{Axis::context, Axis::expert}
                                               : AxisTuple{Axis::expert};
}

/// The table of who is sharded by what.
///
/// throws    Error for a rule or an array that is none of the named ones
/// source    MaxText's rule sets cp-as-ep and default
[[nodiscard]] inline ArrayShards shards_of(ModelArray array, const ShardRules& rules = {}) {
  constexpr std::string_view where = "shards_of";
  require(rules.experts == ExpertRule::cp_as_ep || rules.experts == ExpertRule::ep_own, where,
          "rules.experts", rules.experts, "must be cp_as_ep or ep_own");
  require(rules.dense == DenseShard::fsdp || rules.dense == DenseShard::all, where, "rules.dense",
          rules.dense, "must be fsdp or all");
  const AxisTuple everything = {Axis::fsdp, Axis::context, Axis::expert};
  const bool spread = rules.dense == DenseShard::all;
  const AxisTuple dense = spread ? everything : AxisTuple{Axis::fsdp};
  const AxisTuple copies = spread ? AxisTuple{} : AxisTuple{Axis::context, Axis::expert};
  const AxisTuple expert = expert_group(rules);
  const AxisTuple expert_dim = rules.experts == ExpertRule::cp_as_ep
                                   ? AxisTuple{Axis::fsdp}
                                   : AxisTuple{Axis::fsdp, Axis::context};
  const DimShard rows = {"B", {Axis::fsdp, Axis::expert}};
  const DimShard sequence = {"S", {Axis::context}};
  switch (array) {
    case ModelArray::tokens:
      return {"tokens", {rows, sequence}, 2, {}, {}};
    case ModelArray::activations:
      return {"activations", {rows, sequence, DimShard{"D"}}, 3, {}, {}};
    case ModelArray::expert_wi:
      return {"expert_wi",
              {DimShard{"E", expert}, DimShard{"D", expert_dim}, DimShard{"2M"}},
              3,
              expert_dim,
              {}};
    case ModelArray::expert_wo:
      return {"expert_wo",
              {DimShard{"E", expert}, DimShard{"M"}, DimShard{"D", expert_dim}},
              3,
              expert_dim,
              {}};
    case ModelArray::dense_kernel:
      return {"dense_kernel", {DimShard{"D", dense}, DimShard{"N"}}, 2, dense, copies};
    case ModelArray::router_kernel:
      return {"router_kernel", {DimShard{"D", dense}, DimShard{"E"}}, 2, dense, copies};
    case ModelArray::embedding:
      return {"embedding", {DimShard{"D", dense}, DimShard{"V"}}, 2, dense, copies};
    case ModelArray::head:
      return {"head", {DimShard{"D", dense}, DimShard{"V"}}, 2, dense, copies};
    case ModelArray::small_vector:
      return {"small_vector", {DimShard{"N"}}, 1, {}, everything};
  }
  fail(where, "array", array, "must be one of the named arrays");
}

/// What a device holds of each dimension of a global array: equal contiguous blocks in index order.
///
/// shapes    sizes: one extent a dimension of `array`
/// throws    Error for sizes.size != rank; for an extent that its axes do not divide, naming the array, the
///           dimension's index and name, the extent and the axes
[[nodiscard]] inline std::vector<IndexRange> local_ranges(const ArrayShards& array,
                                                          const Topology& mesh, std::int64_t id,
                                                          std::span<const std::int64_t> sizes) {
  require_equal("local_ranges", "sizes.size", sizes.size(), "rank", array.rank);
  std::vector<IndexRange> ranges(array.rank);
  for (std::size_t dim = 0; dim < array.rank; ++dim) {
    const DimShard& shard = array.dims()[dim];
    require_divisible(std::string(array.name) + " dim " + std::to_string(dim) + " (" +
                          std::string(shard.name) + ")",
                      sizes[dim], mesh.axes(), shard.axes);
    const std::int64_t block = sizes[dim] / shard.axes.size(mesh.axes());
    ranges[dim] = {mesh.index_in(shard.axes, id) * block, block};
  }
  return ranges;
}

/// The index in the expert group of the device that owns `expert`: contiguous blocks.
///
/// throws    Error for an expert outside [0, experts), experts not divisible by the group
[[nodiscard]] inline std::int64_t expert_owner(std::int64_t expert, std::int64_t experts,
                                               const MeshAxes& mesh, const ShardRules& rules = {}) {
  const AxisTuple group = expert_group(rules);
  require_divisible("experts", experts, mesh, group);
  require(expert >= 0 && expert < experts, "expert_owner", "expert", expert,
          "must be in [0, " + std::to_string(experts) + ")");
  return expert / (experts / group.size(mesh));
}

/// The global extents of a model and its batch that a mesh must divide.
struct GlobalSizes {
  std::int64_t rows = 1;      ///< B
  std::int64_t sequence = 1;  ///< S, slots of a row
  ContextLayout layout = ContextLayout::contiguous;
  std::int64_t token_chunks = 1;  ///< pieces a device's tokens pass through the experts in
  std::int64_t experts = 1;       ///< E
  std::int64_t dim = 1;           ///< D
};

/// Refuses a model that a mesh does not divide: at construction, before anything is cut.
///
/// specials  the vocabulary and the head's chunks need not divide
/// throws    Error for the first of rows % (fsdp x expert), sequence % context (dual_chunk_swap: 2 context),
///           local tokens % token_chunks, experts % expert group, D % the axes of dense weights and of experts;
///           for an extent < 1
inline void require_divides(const GlobalSizes& sizes, const MeshAxes& mesh,
                            const ShardRules& rules = {}) {
  const Topology checked(mesh);
  const auto positive = [](std::string_view what, std::int64_t value) {
    require(value >= 1, "mesh", what, value, "must be >= 1");
  };
  positive("rows", sizes.rows);
  positive("sequence", sizes.sequence);
  positive("token_chunks", sizes.token_chunks);
  positive("experts", sizes.experts);
  positive("dim", sizes.dim);
  require_divisible("rows", sizes.rows, mesh, {Axis::fsdp, Axis::expert});
  if (sizes.layout == ContextLayout::dual_chunk_swap && mesh.context > 1) {
    const std::int64_t chunk = sizes.sequence / (2 * mesh.context);
    require_divisible("sequence", sizes.sequence, mesh, {Axis::context}, 2, "chunks",
                      "dual_chunk_swap wants 2 equal chunks a rank, here of " +
                          std::to_string(chunk) + " or " + std::to_string(chunk + 1));
  } else {
    require_divisible("sequence", sizes.sequence, mesh, {Axis::context});
  }
  require_divisible("local tokens", sizes.sequence / mesh.context, mesh, {}, sizes.token_chunks,
                    "token_chunks");
  require_divisible("experts", sizes.experts, mesh, expert_group(rules));
  for (const ModelArray array : {ModelArray::dense_kernel, ModelArray::expert_wi}) {
    const ArrayShards shards = shards_of(array, rules);
    for (std::size_t dim = 0; dim < shards.rank; ++dim) {
      if (shards.dims()[dim].name == "D") {
        require_divisible(std::string(shards.name) + " dim " + std::to_string(dim) + " (D)",
                          sizes.dim, mesh, shards.dims()[dim].axes);
      }
    }
  }
}

}  // namespace heddle

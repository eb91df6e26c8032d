#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/collectives.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/routed_experts.hpp"
#include "heddle/moe/sharded_layer.hpp"

// Weights between their shards and their use: gathered over the axes that share out their D, and their
// cotangents summed over the same and cut again.

namespace heddle::moe::detail {

/// A weight as `runs` runs of `length` elements on each of `parts` devices: run r of the whole is those of
/// all devices one behind the other.
struct WeightSplit {
  AxisTuple axes;
  std::int64_t parts = 1;
  AxisTuple copies;  ///< along which the cotangent is summed besides
  std::int64_t copy_count = 1;
  std::int64_t rows = 0;  ///< of the whole
  std::int64_t cols = 0;
  std::int64_t runs = 1;
  std::int64_t length = 0;

  [[nodiscard]] std::int64_t shard_size() const { return runs * length; }
  [[nodiscard]] std::int64_t whole_size() const { return shard_size() * parts; }
};

/// `blocks` matrices one under the other whose rows are shared out.
[[nodiscard]] inline WeightSplit split_rows(const AxisTuple& axes, std::int64_t parts,
                                            std::int64_t blocks, std::int64_t rows,
                                            std::int64_t cols) {
  return {.axes = axes,
          .parts = parts,
          .copies = {},
          .rows = blocks * rows,
          .cols = cols,
          .runs = blocks,
          .length = rows / parts * cols};
}

/// A matrix whose columns are shared out.
[[nodiscard]] inline WeightSplit split_columns(const AxisTuple& axes, std::int64_t parts,
                                               std::int64_t rows, std::int64_t cols) {
  return {.axes = axes,
          .parts = parts,
          .copies = {},
          .rows = rows,
          .cols = cols,
          .runs = rows,
          .length = cols / parts};
}

[[nodiscard]] inline WeightSplit wi_split(const Dims& dims, const LayerShards& shards) {
  return split_rows(shards.expert_axes, shards.expert_parts, shards.experts.count, dims.hidden,
                    2 * dims.expert_hidden);
}
[[nodiscard]] inline WeightSplit wo_split(const Dims& dims, const LayerShards& shards) {
  return split_columns(shards.expert_axes, shards.expert_parts,
                       shards.experts.count * dims.expert_hidden, dims.hidden);
}
[[nodiscard]] inline WeightSplit dense_split(const LayerShards& shards, WeightSplit split) {
  split.copies = shards.dense_copies;
  split.copy_count = shards.copies;
  return split;
}
[[nodiscard]] inline WeightSplit router_split(const Dims& dims, const LayerShards& shards) {
  return dense_split(
      shards, split_rows(shards.dense_axes, shards.dense_parts, 1, dims.hidden, dims.experts));
}
[[nodiscard]] inline WeightSplit shared_wi_split(const Dims& dims, const LayerShards& shards) {
  return dense_split(shards, split_rows(shards.dense_axes, shards.dense_parts, 1, dims.hidden,
                                        2 * dims.shared_hidden));
}
[[nodiscard]] inline WeightSplit shared_wo_split(const Dims& dims, const LayerShards& shards) {
  return dense_split(shards, split_columns(shards.dense_axes, shards.dense_parts,
                                           dims.shared_hidden, dims.hidden));
}
[[nodiscard]] inline WeightSplit shared_gate_split(const Dims& dims, const LayerShards& shards) {
  return dense_split(shards, split_rows(shards.dense_axes, shards.dense_parts, 1, dims.hidden, 1));
}

template <class T>
[[nodiscard]] std::span<const T> elements_of(ConstMatrixView<T> view) {
  return {view.data(), static_cast<std::size_t>(view.rows() * view.cols())};
}
template <class T>
[[nodiscard]] std::span<T> elements_of(MatrixView<T> view) requires(!std::is_const_v<T>) {
  return {view.data(), static_cast<std::size_t>(view.rows() * view.cols())};
}

/// Bytes of workspace that a gathered weight keeps, and takes while it is gathered.
struct GatherBytes {
  std::size_t kept = 0;
  std::size_t passing = 0;
};

template <class T>
[[nodiscard]] GatherBytes gather_bytes(const WeightSplit& split) {
  if (split.parts == 1) {
    return {};
  }
  const std::size_t whole = Workspace::bytes_for<T>(split.whole_size());
  return {.kept = whole, .passing = split.runs == 1 ? 0 : whole};
}

/// The whole weight of which `shard` is this device's part, as long as the caller's frame lasts.
template <class T, Communicator Device>
[[nodiscard]] ConstMatrixView<T> gather_weight(Device& device, const WeightSplit& split,
                                               ConstMatrixView<T> shard, Workspace& workspace) {
  if (split.parts == 1) {
    return shard;
  }
  const std::span<T> whole = workspace.take<T>(split.whole_size());
  if (split.runs == 1) {
    mesh::all_gather<Device, T>(device, split.axes, elements_of(shard), whole);
    return {whole.data(), split.rows, split.cols};
  }
  const Workspace::Frame frame(workspace);
  const std::span<T> by_part = workspace.take<T>(split.whole_size());
  mesh::all_gather<Device, T>(device, split.axes, elements_of(shard), by_part);
  for (std::int64_t run = 0; run < split.runs; ++run) {
    for (std::int64_t part = 0; part < split.parts; ++part) {
      std::copy_n(by_part.data() + (part * split.runs + run) * split.length, split.length,
                  whole.data() + (run * split.parts + part) * split.length);
    }
  }
  return {whole.data(), split.rows, split.cols};
}

/// The cotangent of a gathered weight while it is computed: in memory of its own, whole, or where nobody
/// shares the weight in the caller's at once.
template <Accumulator A>
class SharedOutCotangent {
 public:
  SharedOutCotangent(const WeightSplit& split, const WeightCotangent<A>& shard,
                     Workspace& workspace)
      : split_(split), shard_(shard) {
    if (shard.wanted() && !is_own()) {
      whole_ = {workspace.take<A>(split.whole_size()).data(), split.rows, split.cols};
    }
  }

  /// Where the device writes what its own tokens make of it; null where it is not wanted.
  [[nodiscard]] WeightCotangent<A> whole() const {
    return is_own() ? shard_ : WeightCotangent<A>{whole_, Write::overwrite};
  }

  /// Sums the devices' and puts this one's part where it was asked for.
  template <Communicator Device>
  void settle(Device& device, Workspace& workspace) const {
    if (!shard_.wanted() || is_own()) {
      return;
    }
    const Workspace::Frame frame(workspace);
    std::span<A> sum = elements_of(whole_);
    if (split_.parts > 1) {
      std::span<const A> by_part = sum;
      if (split_.runs > 1) {
        const std::span<A> moved = workspace.take<A>(split_.whole_size());
        for (std::int64_t run = 0; run < split_.runs; ++run) {
          for (std::int64_t part = 0; part < split_.parts; ++part) {
            std::copy_n(whole_.data() + (run * split_.parts + part) * split_.length, split_.length,
                        moved.data() + (part * split_.runs + run) * split_.length);
          }
        }
        by_part = moved;
      }
      sum = workspace.take<A>(split_.shard_size());
      mesh::reduce_scatter<void, Device, A>(device, split_.axes, by_part, sum);
    }
    if (split_.copy_count > 1) {
      mesh::all_reduce<void, Device, A>(device, split_.copies, sum, sum);
    }
    const MatrixView<A> to = shard_.values;
    for (std::int64_t row = 0; row < to.rows(); ++row) {
      const A* const from = sum.data() + row * to.cols();
      for (std::int64_t col = 0; col < to.cols(); ++col) {
        to(row, col) = shard_.write == Write::accumulate ? to(row, col) + from[col] : from[col];
      }
    }
  }

  [[nodiscard]] static GatherBytes bytes(const WeightSplit& split) {
    if (split.parts == 1 && split.copy_count == 1) {
      return {};
    }
    const std::size_t whole = Workspace::bytes_for<A>(split.whole_size());
    const std::size_t moved = split.runs == 1 ? 0 : whole;
    return {.kept = whole,
            .passing = split.parts == 1 ? 0 : moved + Workspace::bytes_for<A>(split.shard_size())};
  }

 private:
  [[nodiscard]] bool is_own() const { return split_.parts == 1 && split_.copy_count == 1; }

  WeightSplit split_;
  WeightCotangent<A> shard_;
  MatrixView<A> whole_;
};

}  // namespace heddle::moe::detail

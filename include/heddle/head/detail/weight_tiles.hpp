#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/head/detail/gradient_pass.hpp"
#include "heddle/head/detail/logits_pass.hpp"
#include "heddle/head/head_sharding.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/gather.hpp"
#include "heddle/mesh/reduction.hpp"

namespace heddle::head::detail {

template <class T>
[[nodiscard]] bool is_contiguous(MatrixView<T> view) {
  return view.rows() <= 1 || view.stride() == view.cols();
}

template <class T>
[[nodiscard]] std::span<T> elements_of(MatrixView<T> contiguous) {
  return {contiguous.data(), static_cast<std::size_t>(contiguous.rows() * contiguous.cols())};
}

/// Parts one behind the other against a tile [rows, cols] of them, member by member.
///   body(part, its block of the tile)
template <class T, class Body>
void for_each_part(const WeightPlan& plan, Columns columns, std::span<T> parts, MatrixView<T> tile,
                   const Body& body) {
  T* next = parts.data();
  for (std::int64_t member = 0; member < plan.members(); ++member) {
    const WeightBlock block = plan.part(member, columns);
    if (block.vocab.count > 0) {
      const MatrixView<T> part(next, plan.stored_rows(block), plan.stored_cols(block));
      body(part, plan.block_of(tile, plan.tile_block(columns), block));
    }
    next += plan.part_elements(member, columns);
  }
}

/// Memory of the tiles of a weight that is gathered: none where a device has it whole.
template <Storage W>
struct TileMemory {
  template <class Space>
  TileMemory(Space& space, const WeightPlan& plan, std::int64_t columns) {
    if (plan.members() == 1) {
      return;
    }
    own = space.template take<W>(plan.most_part_elements(columns));
    // The next tile comes in while this one is used; where parts must be put together, as parts.
    slots[0] = space.template take<W>(plan.hidden() * columns);
    if (!plan.parts_are_tile() || columns < plan.vocab()) {
      slots[1] = space.template take<W>(plan.hidden() * columns);
    }
    if (plan.split() == WeightSplit::vocab) {
      offsets = space.template take<std::int64_t>(plan.members() + 1);
    }
  }

  std::span<W> own;  ///< the device's part, where its shard has gaps there
  std::span<W> slots[2];
  std::span<std::int64_t> offsets;  ///< of parts whose lengths differ
};

/// The tiles of a weight, each on every member while it is used.
template <Communicator Device, Storage W>
class WeightTiles {
  using Gather = decltype(mesh::start_all_gather<Device, W>(std::declval<Device&>(), AxisTuple{},
                                                            std::span<const W>(), std::span<W>()));
  using RaggedGather = decltype(mesh::start_all_gather_v<Device, W>(
      std::declval<Device&>(), AxisTuple{}, std::span<const W>(), std::span<W>(),
      std::span<std::int64_t>()));

 public:
  WeightTiles(Device& device, const WeightPlan& plan, const TileMemory<W>& memory,
              ConstMatrixView<W> shard)
      : device_(device), plan_(plan), memory_(memory), shard_(shard) {}

  /// body(columns, tile) for tiles of `step` columns, ascending.
  template <class Body>
  void for_each(std::int64_t step, const Body& body) {
    const auto from = [&](std::int64_t first) {
      return Columns{first, std::min(first + step, plan_.vocab())};
    };
    if (plan_.members() == 1) {
      for (std::int64_t first = 0; first < plan_.vocab(); first += step) {
        const Columns columns = from(first);
        body(columns, plan_.block_of(shard_, plan_.held(), plan_.tile_block(columns)));
      }
      return;
    }
    start(from(0));
    for (std::int64_t first = 0; first < plan_.vocab(); first += step) {
      const Columns columns = from(first);
      const MatrixView<W> tile = finish(columns);
      if (columns.last < plan_.vocab()) {
        start(from(columns.last));
      }
      body(columns, ConstMatrixView<W>(tile));
    }
  }

 private:
  void start(Columns columns) {
    const WeightBlock block = plan_.part(plan_.index(), columns);
    const ConstMatrixView<W> held = plan_.block_of(shard_, plan_.held(), block);
    std::span<const W> own = elements_of(held);
    if (!is_contiguous(held)) {
      const MatrixView<W> packed(memory_.own.data(), held.rows(), held.cols());
      copy_rows(held, packed);
      own = elements_of(packed);
    }
    const std::span<W> into =
        memory_.slots[slot_].first(static_cast<std::size_t>(plan_.hidden() * columns.count()));
    if (plan_.split() == WeightSplit::hidden) {
      gather_.emplace(mesh::start_all_gather<Device, W>(device_, plan_.gathered(), own, into));
    } else {
      ragged_.emplace(mesh::start_all_gather_v<Device, W>(device_, plan_.gathered(), own, into,
                                                          memory_.offsets));
    }
  }

  [[nodiscard]] MatrixView<W> finish(Columns columns) {
    if (gather_) {
      gather_->finish();
      gather_.reset();
    } else {
      ragged_->finish();
      ragged_.reset();
    }
    const std::span<W> parts = memory_.slots[slot_];
    const WeightBlock all = plan_.tile_block(columns);
    if (plan_.parts_are_tile()) {
      slot_ = 1 - slot_;
      return {parts.data(), plan_.stored_rows(all), plan_.stored_cols(all)};
    }
    const MatrixView<W> tile(memory_.slots[1].data(), plan_.stored_rows(all),
                             plan_.stored_cols(all));
    for_each_part(plan_, columns, parts, tile, [](MatrixView<W> part, MatrixView<W> block) {
      copy_rows(MatrixView<const W>(part), block);
    });
    return tile;
  }

  Device& device_;
  const WeightPlan& plan_;
  const TileMemory<W>& memory_;
  ConstMatrixView<W> shard_;
  std::size_t slot_ = 0;
  std::optional<Gather> gather_;
  std::optional<RaggedGather> ragged_;
};

/// Memory of the tiles of a weight's cotangent: none where a device's own is all there is.
template <Accumulator A>
struct CotangentMemory {
  template <class Space>
  CotangentMemory(Space& space, const WeightPlan& plan, std::int64_t columns) {
    if (plan.members() == 1 && plan.copies() == 1) {
      return;
    }
    tile = space.template take<A>(plan.hidden() * columns);
    if (plan.members() > 1) {
      own = space.template take<A>(plan.most_part_elements(columns));
      counts = space.template take<std::int64_t>(plan.members());
      if (!plan.parts_are_tile()) {
        parts = space.template take<A>(plan.hidden() * columns);
      }
    }
  }

  std::span<A> tile;
  std::span<A> parts;
  std::span<A> own;
  std::span<std::int64_t> counts;
};

/// A tile of the weight's cotangent: this device's share of it, then the shard's sum over all devices.
///
/// order     members along gathered() in rank order, then those along summed()
template <Communicator Device, Accumulator A>
class CotangentTiles {
 public:
  CotangentTiles(Device& device, const WeightPlan& plan, const CotangentMemory<A>& memory,
                 const WeightCotangent<A>& shard)
      : device_(device), plan_(plan), memory_(memory), shard_(shard) {}

  /// Where the device's share of a tile goes; null where no cotangent is wanted.
  [[nodiscard]] WeightCotangent<A> share(Columns columns) const {
    if (!shard_.wanted()) {
      return {};
    }
    const WeightBlock all = plan_.tile_block(columns);
    if (is_local()) {
      return {plan_.block_of(shard_.values, plan_.held(), all), shard_.write};
    }
    return {{memory_.tile.data(), plan_.stored_rows(all), plan_.stored_cols(all)},
            Write::overwrite};
  }

  void reduce(Columns columns) {
    if (!shard_.wanted() || is_local()) {
      return;
    }
    const WeightBlock block = plan_.part(plan_.index(), columns);
    std::span<A> sum =
        memory_.tile.first(static_cast<std::size_t>(plan_.hidden() * columns.count()));
    if (plan_.members() > 1) {
      const std::span<A> own =
          memory_.own.first(static_cast<std::size_t>(plan_.part_elements(plan_.index(), columns)));
      scatter(columns, sum, own);
      sum = own;
    }
    if (plan_.copies() > 1) {
      mesh::all_reduce(device_, plan_.summed(), sum, sum);
    }
    const MatrixView<const A> from(sum.data(), plan_.stored_rows(block), plan_.stored_cols(block));
    const MatrixView<A> to = plan_.block_of(shard_.values, plan_.held(), block);
    shard_.write == Write::overwrite ? copy_rows(from, to) : add_rows(from, to);
  }

 private:
  [[nodiscard]] bool is_local() const { return plan_.members() == 1 && plan_.copies() == 1; }

  void scatter(Columns columns, std::span<A> shares, std::span<A> own) {
    std::span<A> parts = shares;
    if (!plan_.parts_are_tile()) {
      parts = memory_.parts.first(shares.size());
      for_each_part(plan_, columns, parts, share(columns).values,
                    [](MatrixView<A> part, MatrixView<A> in_tile) {
                      copy_rows(MatrixView<const A>(in_tile), part);
                    });
    }
    if (plan_.split() == WeightSplit::hidden) {
      mesh::reduce_scatter(device_, plan_.gathered(), parts, own);
      return;
    }
    for (std::int64_t member = 0; member < plan_.members(); ++member) {
      memory_.counts[static_cast<std::size_t>(member)] = plan_.part_elements(member, columns);
    }
    mesh::reduce_scatter_v(device_, plan_.gathered(), memory_.counts, parts, own);
  }

  Device& device_;
  const WeightPlan& plan_;
  const CotangentMemory<A>& memory_;
  const WeightCotangent<A>& shard_;
};

/// Adds what the collectives of one tile move to `traffic`; `cotangent`: of the cotangent's, else of the
/// weight's.
template <class T>
void add_tile_traffic(const WeightPlan& plan, Columns columns, bool cotangent,
                      HeadTraffic& traffic) {
  constexpr auto bytes = static_cast<std::int64_t>(sizeof(T));
  const auto add = [](Traffic& to, Traffic call) {
    to.payload_bytes += call.payload_bytes;
    to.wire_bytes += call.wire_bytes;
    to.sent_bytes += call.sent_bytes;
    to.recv_bytes += call.wire_bytes;
  };
  const std::int64_t own = plan.part_elements(plan.index(), columns) * bytes;
  const std::int64_t all = plan.hidden() * columns.count() * bytes;
  const std::int64_t others = plan.members() - 1;
  if (others > 0 && cotangent) {
    add(traffic.scatter,
        {.payload_bytes = all, .wire_bytes = others * own, .sent_bytes = all - own});
  } else if (others > 0) {
    add(traffic.gather,
        {.payload_bytes = own, .wire_bytes = all - own, .sent_bytes = others * own});
  }
  if (cotangent && plan.copies() > 1) {
    add(traffic.sum, traffic_of({.op = Collective::all_reduce,
                                 .members = plan.copies(),
                                 .index = plan.copy(),
                                 .count = own / bytes,
                                 .bytes = bytes}));
  }
}

}  // namespace heddle::head::detail

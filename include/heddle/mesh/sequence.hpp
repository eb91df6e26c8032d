#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/view.hpp"
#include "heddle/mesh/all_to_all.hpp"
#include "heddle/mesh/communicator.hpp"
#include "heddle/mesh/context_layout.hpp"
#include "heddle/mesh/permute.hpp"

namespace heddle {

/// What one rank of the context axis holds of a row: a token a line, in an order that is part of the
/// type. Kernels in which the order matters take this and not a bare view, so that data in one order
/// does not reach them under another.
///
/// shapes    values [partition.shard(), cols]
/// alias     a view; MatrixView's rules
/// throws    Error for values.rows != partition.shard(), rank outside [0, ranks), a partition of another
///           layout
template <class T, ContextLayout layout>
class SequenceShard {
 public:
  using Element = T;

  SequenceShard(MatrixView<T> values, const ContextPartition& partition, std::int64_t rank)
      : values_(values), partition_(partition), rank_(rank) {
    constexpr const char* where = "SequenceShard";
    require_equal(where, "values.rows", values.rows(), "partition.shard", partition.shard());
    require(partition.layout() == layout, where, "partition.layout", partition.layout(),
            "must be the layout of the type");
    require(rank >= 0 && rank < partition.ranks(), where, "rank", rank,
            "must be in [0, " + std::to_string(partition.ranks()) + ")");
  }

  template <class U>
  requires(std::is_same_v<const U, T> && !std::is_same_v<U, T>)
      // As with views: what may be written may be read.
      SequenceShard(const SequenceShard<U, layout>& other)  // NOLINT(google-explicit-constructor)
      : SequenceShard(other.values(), other.partition(), other.rank()) {}

  [[nodiscard]] const MatrixView<T>& values() const { return values_; }
  [[nodiscard]] const ContextPartition& partition() const { return partition_; }
  [[nodiscard]] std::int64_t rank() const { return rank_; }

  /// Where line `index` stands in the row, in sequence order.
  [[nodiscard]] std::int64_t position(std::int64_t index) const {
    return partition_.source(rank_ * partition_.shard() + index);
  }

 private:
  MatrixView<T> values_;
  ContextPartition partition_;
  std::int64_t rank_;
};

template <class T>
using ContiguousShard = SequenceShard<T, ContextLayout::contiguous>;
template <class T>
using DualChunkShard = SequenceShard<T, ContextLayout::dual_chunk_swap>;

namespace mesh {

namespace detail {

template <Communicator Device, class T, ContextLayout layout>
void require_placed(const Device& device, const char* where,
                    const SequenceShard<T, layout>& shard) {
  const AxisTuple context = {Axis::context};
  require_equal(where, "partition.ranks", shard.partition().ranks(), "context",
                axis_size(device, context));
  require_equal(where, "rank", shard.rank(), "the device's context index",
                axis_index(device, context));
}

}  // namespace detail

/// The same row in another order over the context ranks.
///   the token that `from` holds at position p, `to` holds at position p
/// shapes    from, to: the same cols and positions
/// writes    all of to.values
/// alias     disjoint
/// specials  a row of no positions; the same layout on both sides copies
/// order     bits are moved
/// memory    two copies of the shard: what leaves, by destination, and what arrives
/// cost      every token whose rank changes crosses the context axis once
/// throws    Error for cols or positions that differ, a shard of another rank than the device's; and as
///           Communicator
template <Communicator Device, class T, ContextLayout source, ContextLayout target>
void relayout(Device& device, const SequenceShard<const T, source>& from,
              const SequenceShard<T, target>& to, CallSite site = CallSite::here()) {
  constexpr const char* where = "mesh::relayout";
  detail::require_placed(device, where, from);
  detail::require_placed(device, where, to);
  require_equal(where, "to.cols", to.values().cols(), "from.cols", from.values().cols());
  require_equal(where, "to.positions", to.partition().positions(), "from.positions",
                from.partition().positions());
  const std::int64_t ranks = from.partition().ranks();
  const std::int64_t shard = from.partition().shard();
  const std::int64_t cols = from.values().cols();
  const auto cells = [&](std::int64_t rows) { return static_cast<std::size_t>(rows * cols); };
  std::vector<std::int64_t> send(static_cast<std::size_t>(ranks));
  std::vector<T> leaving;
  leaving.reserve(cells(shard));
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    for (std::int64_t i = 0; i < shard; ++i) {
      if (to.partition().rank_of(from.position(i)) == rank) {
        const std::span<const T> row = from.values().row(i);
        leaving.insert(leaving.end(), row.begin(), row.end());
        send[static_cast<std::size_t>(rank)] += cols;
      }
    }
  }
  std::vector<T> arriving(cells(shard));
  std::vector<std::int64_t> received(send.size());
  all_to_all_v<Device, T>(device, {Axis::context}, leaving, send, std::span(arriving),
                          std::span(received), site);
  const T* next = arriving.data();
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    for (std::int64_t i = 0; i < shard; ++i) {
      const std::int64_t position = from.partition().source(rank * shard + i);
      const std::int64_t slot = to.partition().destination(position);
      if (slot / shard == to.rank()) {
        heddle::detail::copy_elements(next, cols, to.values().row(slot % shard).data());
        next += cols;
      }
    }
  }
}

/// Each token's successor: line i of `out` is the token after line i, across the borders of the ranks. The
/// last token of the row has none and gets `fill`.
/// shapes    out [shard, cols] as in; fill [cols]
/// writes    all of out.values
/// alias     disjoint
/// specials  a row of no positions
/// cost      one line crosses the context axis, also on ranks that need none
/// throws    Error for shapes that differ, a shard of another rank than the device's; and as Communicator.
///           A layout in which rank order is not sequence order does not compile
template <Communicator Device, class T, ContextLayout layout>
void next_token(Device& device, const SequenceShard<const T, layout>& in,
                const SequenceShard<T, layout>& out, std::type_identity_t<std::span<const T>> fill,
                CallSite site = CallSite::here()) {
  static_assert(
      layout == ContextLayout::contiguous,
      "mesh::next_token: the next token stands on the next rank in contiguous order alone");
  constexpr const char* where = "mesh::next_token";
  detail::require_placed(device, where, in);
  detail::require_placed(device, where, out);
  const std::int64_t shard = in.partition().shard();
  const std::int64_t cols = in.values().cols();
  require_equal(where, "out.positions", out.partition().positions(), "in.positions",
                in.partition().positions());
  require_equal(where, "out.cols", out.values().cols(), "in.cols", cols);
  require_length(where, "fill", fill, "in.cols", cols);
  const std::span<const T> first = shard == 0 ? std::span<const T>() : in.values().row(0);
  std::vector<T> after(first.size());
  shift<Device, T>(device, {Axis::context}, -1, first, std::span(after), site);
  if (shard == 0) {
    return;
  }
  for (std::int64_t i = 0; i + 1 < shard; ++i) {
    heddle::detail::copy_elements(in.values().row(i + 1).data(), cols, out.values().row(i).data());
  }
  const bool is_last = in.rank() == in.partition().ranks() - 1;
  heddle::detail::copy_elements(is_last ? fill.data() : after.data(), cols,
                                out.values().row(shard - 1).data());
}

}  // namespace mesh

}  // namespace heddle

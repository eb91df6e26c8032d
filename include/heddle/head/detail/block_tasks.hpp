#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <oneapi/tbb/task_arena.h>

#include "heddle/core/factor.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/packed_matrix.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"

namespace heddle::head::detail {

/// Adds up what a Workspace would be asked for: a kernel's workspace_bytes builds the kernel's own
/// scratch on it, so the two cannot differ.
class ByteCounter {
 public:
  template <class T>
  [[nodiscard]] std::span<T> take(std::int64_t count) {
    bytes_ += Workspace::bytes_for<T>(count);
    return {};
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

/// Threads of the caller's arena.
[[nodiscard]] inline std::int64_t arena_threads() {
  return std::max(1, oneapi::tbb::this_task_arena::max_concurrency());
}

/// Blocks of rows on the caller's threads, each thread with a piece of scratch of its own.
class BlockTasks {
 public:
  template <class Space>
  BlockTasks(Space& space, std::int64_t threads, std::size_t piece_bytes)
      : threads_(threads), piece_((piece_bytes + 63) / 64 * 64) {
    // An arena numbers the threads that are in it below its size, which is at least 2.
    const std::int64_t pieces = threads == 1 ? 1 : std::max<std::int64_t>(threads, 2);
    scratch_ = space.template take<std::byte>(pieces * static_cast<std::int64_t>(piece_));
  }

  [[nodiscard]] std::int64_t threads() const { return threads_; }

  /// body(first, last, scratch) for blocks of [0, count): at most `most` each and as even as multiples of
  /// `multiple` can be, every thread as many.
  template <class Body>
  void run(std::int64_t count, std::int64_t most, std::int64_t multiple, const Body& body) const {
    const std::int64_t least = (count + multiple - 1) / multiple;
    std::int64_t blocks = (count + most - 1) / most;
    blocks = std::min((blocks + threads_ - 1) / threads_ * threads_, least);
    if (blocks == 0) {
      return;
    }
    const std::int64_t grain = ((count + blocks - 1) / blocks + multiple - 1) / multiple * multiple;
    const auto block = [&](std::int64_t index, std::span<std::byte> scratch) {
      body(index * grain, std::min((index + 1) * grain, count), scratch);
    };
    blocks = (count + grain - 1) / grain;
    if (threads_ == 1 || blocks == 1) {
      for (std::int64_t index = 0; index < blocks; ++index) {
        block(index, piece(0));
      }
      return;
    }
    // Isolated: a thread that waits in here must not begin a task whose scratch is the one it uses.
    namespace arena = oneapi::tbb::this_task_arena;
    arena::isolate([&] {
      parallel_tasks(
          blocks, [&](std::int64_t index) { block(index, piece(arena::current_thread_index())); });
    });
  }

 private:
  [[nodiscard]] std::span<std::byte> piece(int thread) const {
    return scratch_.subspan(static_cast<std::size_t>(thread) * piece_, piece_);
  }

  std::int64_t threads_;
  std::size_t piece_;
  std::span<std::byte> scratch_;
};

/// Rows of a tile of the engine: blocks of rows are whole numbers of it where they can be.
inline constexpr std::int64_t row_multiple = 8;
/// Rows of a block of logits: what the engine packs of the left factor at a time, half of a second-level
/// cache.
template <Storage T>
inline constexpr std::int64_t block_rows = std::is_same_v<T, bfloat16> ? 512 : 256;
/// Columns that the weight is packed and multiplied by at a time. A whole number of blocks of K, since
/// d_hidden is a sum over columns.
inline constexpr std::int64_t product_columns = 512;
static_assert(product_columns % product_block_depth == 0);

template <class T>
inline constexpr bool has_panels = heddle::detail::has_tiles<T>;

/// c = a b, or c += a b, with scratch of product_bytes.
template <Storage TA, class Right, class TC>
void multiply_in(std::span<std::byte> scratch, const Factor<TA>& a, const Right& b,
                 MatrixView<TC> c, Write write) {
  if constexpr (has_panels<TA> && has_panels<typename Right::Element>) {
    multiply_prechecked(a, b, c, write, scratch);
  } else {
    static_cast<void>(scratch);
    multiply(a, b, c, write);
  }
}

template <Storage TA, Storage TB>
[[nodiscard]] constexpr std::size_t product_bytes(std::int64_t m, std::int64_t n, std::int64_t k) {
  if constexpr (has_panels<TA> && has_panels<TB>) {
    return product_workspace_bytes<TA, TB>(m, n, k);
  } else {
    return 0;
  }
}

/// A right factor that every block of rows meets. A thread that has the weight to itself, or enough rows
/// of its own, leaves packing to the product, which fetches ahead; threads that share few rows pack it
/// once for all. No bit depends on that.
template <Storage T>
class RightTile {
 public:
  RightTile() = default;
  /// Room for [rows, cols], and for any other shape in place of it whose panels are not larger.
  template <class Space>
  RightTile(Space& space, std::int64_t rows, std::int64_t cols, std::int64_t threads) {
    if constexpr (has_panels<T>) {
      if (threads > 1) {
        memory_ =
            space
                .template take<T>(panel_bytes<T>(rows, cols) / static_cast<std::int64_t>(sizeof(T)))
                .data();
      }
    }
  }

  void load(const Factor<T>& factor, bool pack, const BlockTasks& tasks) {
    factor_ = factor;
    packed_ = false;
    if constexpr (has_panels<T>) {
      packed_ = pack && memory_ != nullptr;
      if (!packed_) {
        return;
      }
      constexpr std::int64_t width = panel_columns<T>;
      const PanelView<T> panels(memory_, factor.rows(), factor.cols());
      const std::int64_t share = (factor.cols() + tasks.threads() - 1) / tasks.threads();
      tasks.run(factor.cols(), share, 4 * width,
                [&](std::int64_t first, std::int64_t last, std::span<std::byte>) {
                  pack_panels(factor.column_block(first, last - first),
                              PanelView<T>(memory_ + first / width * panels.panel_stride(),
                                           factor.rows(), last - first));
                });
      panels_ = panels;
    }
  }

  /// c = a tile, or c += a tile.
  template <Storage TA, class TC>
  void multiply_in(std::span<std::byte> scratch, const Factor<TA>& a, MatrixView<TC> c,
                   Write write) const {
    if (packed_) {
      detail::multiply_in(scratch, a, panels_, c, write);
    } else {
      detail::multiply_in(scratch, a, factor_, c, write);
    }
  }

 private:
  T* memory_ = nullptr;
  bool packed_ = false;
  Factor<T> factor_{};
  std::conditional_t<has_panels<T>, ConstPanelView<T>, Factor<T>> panels_{};
};

/// A right factor that is packed once, whoever meets it.
template <Storage T>
class PackedTile {
 public:
  PackedTile() = default;
  template <class Space>
  PackedTile(Space& space, std::int64_t rows, std::int64_t cols) : tile_(space, rows, cols, 2) {}

  void load(const Factor<T>& factor, const BlockTasks& tasks) { tile_.load(factor, true, tasks); }

  template <Storage TA, class TC>
  void multiply_in(std::span<std::byte> scratch, const Factor<TA>& a, MatrixView<TC> c,
                   Write write) const {
    tile_.multiply_in(scratch, a, c, write);
  }

 private:
  RightTile<T> tile_;
};

/// Whether threads have so few rows each that they had better share a packed factor.
template <Storage T>
[[nodiscard]] bool shares_rows(std::int64_t rows, const BlockTasks& tasks) {
  return tasks.threads() > 1 && rows < tasks.threads() * block_rows<T>;
}

/// Rows `tokens` of a matrix as a factor; in place where they are neighbours.
[[nodiscard]] inline bool are_neighbours(std::span<const std::int32_t> tokens) {
  return tokens.empty() ||
         static_cast<std::size_t>(tokens.back() - tokens.front()) + 1 == tokens.size();
}

template <class T>
[[nodiscard]] Factor<T> picked_rows(ConstMatrixView<T> matrix,
                                    std::span<const std::int32_t> tokens) {
  if (!tokens.empty() && are_neighbours(tokens)) {
    return as_is(matrix.row_block(tokens.front(), static_cast<std::int64_t>(tokens.size())));
  }
  return gathered(matrix, tokens);
}

/// The same rows, stored transposed: rows become columns.
template <class T>
[[nodiscard]] Factor<T> flipped(Factor<T> factor) {
  factor.transpose = !factor.transpose;
  return factor;
}

}  // namespace heddle::head::detail

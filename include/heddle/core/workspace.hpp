#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "heddle/core/error.hpp"

namespace heddle {

/// Scratch memory of a kernel: a stack of 64-byte aligned pieces that the caller may own, reuse from
/// call to call, and ask how much of it was needed at most.
///
/// writes    pieces come uninitialised
/// memory    grows by blocks and keeps them; after reserve(high_water_bytes()) on a fresh workspace
///           the same work makes no further heap call. Blocks of 4 MiB and more ask for huge pages:
///           the first touch of fresh small pages costs several times the write itself
/// order     pieces are given back in reverse order, by Workspace::Frame; not for two threads at once
/// throws    Error for a negative count
class Workspace {
 public:
  static constexpr std::size_t alignment = 64;  // one cache line, one 512-bit register

  Workspace() = default;
  explicit Workspace(std::size_t bytes) { reserve(bytes); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  Workspace(Workspace&&) noexcept = default;
  Workspace& operator=(Workspace&&) noexcept = default;
  ~Workspace() = default;

  /// Bytes that `count` elements of T take, rounded up to whole cache lines: what a kernel's
  /// workspace_bytes(dims) adds up.
  template <class T>
  [[nodiscard]] static constexpr std::size_t bytes_for(std::int64_t count) {
    const auto bytes = static_cast<std::size_t>(count) * sizeof(T);
    return (bytes + alignment - 1) / alignment * alignment;
  }

  /// Makes sure that pieces of `bytes` in total fit into one block.
  void reserve(std::size_t bytes) { find_block(bytes); }

  /// `count` uninitialised elements that live until the frame they were taken in ends.
  template <class T>
  [[nodiscard]] std::span<T> take(std::int64_t count) {
    static_assert(std::is_trivially_destructible_v<T>,
                  "Workspace::take: the element type must be trivially destructible");
    require(count >= 0, "Workspace::take", "count", count, "must be >= 0");
    const std::size_t bytes = bytes_for<T>(count);
    find_block(bytes);
    Block& block = blocks_[current_];
    T* const data = reinterpret_cast<T*>(block.memory.get() + block.used);
    block.used += bytes;
    in_use_ += bytes;
    high_water_ = std::max(high_water_, in_use_);
    return {data, static_cast<std::size_t>(count)};
  }

  /// Most bytes in use at one time since construction.
  [[nodiscard]] std::size_t high_water_bytes() const { return high_water_; }

  /// Gives back, at its end, every piece that was taken since its beginning.
  class Frame {
   public:
    explicit Frame(Workspace& workspace)
        : workspace_(workspace),
          current_(workspace.current_),
          used_(workspace.blocks_.empty() ? 0 : workspace.blocks_[current_].used),
          in_use_(workspace.in_use_) {}
    Frame(const Frame&) = delete;
    Frame& operator=(const Frame&) = delete;
    ~Frame() { workspace_.rewind(current_, used_, in_use_); }

   private:
    Workspace& workspace_;
    std::size_t current_;
    std::size_t used_;
    std::size_t in_use_;
  };

 private:
  static constexpr std::size_t huge_page = std::size_t{2} << 20;

  struct Free {
    std::size_t alignment = Workspace::alignment;
    void operator()(std::byte* memory) const {
      ::operator delete[](memory, std::align_val_t{alignment});
    }
  };
  struct Block {
    std::unique_ptr<std::byte[], Free> memory;
    std::size_t capacity = 0;
    std::size_t used = 0;
  };

  /// Makes blocks_[current_] one with room for `bytes`: the current one, a later one, or a new one.
  void find_block(std::size_t bytes) {
    for (std::size_t i = current_; i < blocks_.size(); ++i) {
      if (blocks_[i].capacity - blocks_[i].used >= bytes) {
        current_ = i;
        return;
      }
    }
    std::size_t total = 0;
    for (const Block& block : blocks_) {
      total += block.capacity;
    }
    blocks_.push_back(make_block(std::max({bytes, blocks_.empty() ? 0 : total, alignment})));
    current_ = blocks_.size() - 1;
  }

  [[nodiscard]] static Block make_block(std::size_t bytes) {
    const std::size_t block_alignment = bytes >= 2 * huge_page ? huge_page : alignment;
    const std::size_t capacity = (bytes + block_alignment - 1) / block_alignment * block_alignment;
    auto* const memory =
        static_cast<std::byte*>(::operator new[](capacity, std::align_val_t{block_alignment}));
#ifdef MADV_HUGEPAGE
    if (block_alignment == huge_page) {
      // Advice only: where the system has none to give, the memory serves as it is.
      static_cast<void>(::madvise(memory, capacity, MADV_HUGEPAGE));
    }
#endif
    return {std::unique_ptr<std::byte[], Free>(memory, Free{block_alignment}), capacity, 0};
  }

  void rewind(std::size_t current, std::size_t used, std::size_t in_use) {
    for (std::size_t i = current; i < blocks_.size(); ++i) {
      blocks_[i].used = i == current ? used : 0;
    }
    current_ = current;
    in_use_ = in_use;
  }

  std::vector<Block> blocks_;
  std::size_t current_ = 0;  // pieces come from here; blocks behind it are empty
  std::size_t in_use_ = 0;
  std::size_t high_water_ = 0;
};

}  // namespace heddle

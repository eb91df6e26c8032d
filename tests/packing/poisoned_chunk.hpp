#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/packing/packed_chunk.hpp"
#include "support/compare.hpp"

namespace heddle::test {

/// Arrays of a chunk full of poison, with rows that stand apart and guards around.
class PoisonedChunk {
 public:
  static constexpr std::int64_t gap = 3;

  explicit PoisonedChunk(const packing::ChunkDims& dims) : dims_(dims) {
    arrays.ids = make(ints_[0]);
    arrays.segment_ids = make(ints_[1]);
    arrays.segment_positions = make(ints_[2]);
    arrays.prompt_mask = make(floats_[0]);
    arrays.completion_mask = make(floats_[1]);
    arrays.advantages = make(floats_[2]);
    for (const packing::PerTokenField field : packing::per_token_fields) {
      if (dims.carried[field]) {
        arrays.per_token[field] = make(fields_[field]);
      }
    }
    if (dims.layers > 0) {
      routed_.assign(static_cast<std::size_t>(dims.positions() * dims.routed_per_token() + 2 * gap),
                     poison<std::int16_t>());
      arrays.routed_experts = {routed_.data() + gap, dims.positions(), dims.routed_per_token()};
    }
    counts_.assign(static_cast<std::size_t>(dims.rows), poison<std::int32_t>());
    arrays.num_real_segments = counts_;
  }

  /// Nothing outside the arrays was written.
  void expect_guards() const {
    for (const auto& values : ints_) {
      expect_guards(values);
    }
    for (const auto& values : floats_) {
      expect_guards(values);
    }
    for (const packing::PerTokenField field : packing::per_token_fields) {
      if (dims_.carried[field]) {
        expect_guards(fields_[field]);
      }
    }
    for (std::size_t i = 0; i < gap && !routed_.empty(); ++i) {
      EXPECT_EQ(routed_[i], poison<std::int16_t>());
      EXPECT_EQ(routed_[routed_.size() - 1 - i], poison<std::int16_t>());
    }
  }

  packing::ChunkArrays arrays;

 private:
  template <class T>
  MatrixView<T> make(std::vector<T>& storage) {
    const std::int64_t stride = dims_.tokens + gap;
    storage.assign(static_cast<std::size_t>(dims_.rows * stride + gap), poison<T>());
    return {storage.data() + gap, dims_.rows, dims_.tokens, stride};
  }

  template <class T>
  void expect_guards(const std::vector<T>& storage) const {
    const T expected = poison<T>();
    for (std::int64_t row = 0; row <= dims_.rows; ++row) {
      for (std::int64_t i = 0; i < gap; ++i) {
        const T found = storage[static_cast<std::size_t>(row * (dims_.tokens + gap) + i)];
        EXPECT_EQ(std::memcmp(&found, &expected, sizeof(T)), 0) << "row " << row;
      }
    }
  }

  packing::ChunkDims dims_;
  std::vector<std::int32_t> ints_[3];
  std::vector<float> floats_[3];
  packing::PerTokenArray<std::vector<float>> fields_;
  std::vector<std::int16_t> routed_;
  std::vector<std::int32_t> counts_;
};

}  // namespace heddle::test

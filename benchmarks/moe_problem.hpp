#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/routing_map.hpp"

namespace heddle::bench {

/// "bf16", "f32": the part of a benchmark's name that says what is stored.
template <class S>
inline constexpr const char* dtype_name = "f32";
template <>
inline constexpr const char* dtype_name<bfloat16> = "bf16";

/// Fills values with a repeating stretch of normal numbers: as good as fresh ones to what is timed, and
/// a hundred times faster to make.
template <class S>
void fill_normals(std::span<S> values, double deviation, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, static_cast<float>(deviation));
  std::vector<S> stretch(4093);
  std::generate(stretch.begin(), stretch.end(), [&] { return static_cast<S>(normal(random)); });
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = stretch[i % stretch.size()];
  }
}

template <class S>
[[nodiscard]] MatrixView<S> take_normals(Workspace& memory, std::int64_t rows, std::int64_t cols,
                                         double deviation, std::uint32_t seed) {
  const std::span<S> values = memory.take<S>(rows * cols);
  fill_normals(values, deviation, seed);
  return {values.data(), rows, cols};
}

/// Tokens that chose K distinct experts each, every expert as likely as the other, and the map of it.
class RoutedTokens {
 public:
  explicit RoutedTokens(const moe::RouterDims& dims)
      : dims_(dims),
        memory_(std::max<std::size_t>(huge, 4 * static_cast<std::size_t>(dims.slots()) * 4)),
        ids_(memory_.take<std::int32_t>(dims.slots())),
        permutation_(memory_.take<std::int32_t>(dims.slots())),
        inverse_(memory_.take<std::int32_t>(dims.slots())),
        group_offsets_(memory_.take<std::int64_t>(dims.experts + 1)) {
    std::mt19937 random(1);
    const auto K = static_cast<std::ptrdiff_t>(dims.top_k);
    std::uniform_int_distribution<std::int32_t> expert(0,
                                                       static_cast<std::int32_t>(dims.experts) - 1);
    for (auto row = ids_.begin(); row != ids_.end(); row += K) {
      for (auto id = row; id != row + K;) {
        *id = expert(random);
        id += std::find(row, id, *id) == id ? 1 : 0;
      }
    }
    map_ = build();
  }
  RoutedTokens(const RoutedTokens&) = delete;
  RoutedTokens& operator=(const RoutedTokens&) = delete;

  [[nodiscard]] const moe::RouterDims& dims() const { return dims_; }
  [[nodiscard]] std::span<const std::int32_t> ids() const { return ids_; }
  [[nodiscard]] const moe::RoutingMap& map() const { return map_; }

  moe::RoutingMap build() {
    return moe::RoutingMapBuilder(workspace_)
        .build(dims_, {ids_.data(), dims_.tokens, dims_.top_k},
               {permutation_, inverse_, group_offsets_});
  }

 private:
  static constexpr std::size_t huge = std::size_t{8} << 20;  // large enough for huge pages

  moe::RouterDims dims_;
  Workspace memory_;
  std::span<std::int32_t> ids_, permutation_, inverse_;
  std::span<std::int64_t> group_offsets_;
  Workspace workspace_;
  moe::RoutingMap map_;
};

}  // namespace heddle::bench

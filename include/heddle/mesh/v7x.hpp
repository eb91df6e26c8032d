#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"

/// The TPU v7x ("Ironwood") chip in numbers. A chip has two cores, and JAX counts each as a device, so a
/// figure without its unit is wrong by a factor of 2 half of the time: here the unit is the type.
namespace heddle::v7x {

/// A duration.
struct Seconds {
  double value = 0;
};
/// Of both cores of a chip.
struct FlopsPerSecondPerChip {
  double value = 0;
};
/// Of one core, which JAX counts as a device.
struct FlopsPerSecondPerDevice {
  double value = 0;
};
/// Of both cores of a chip.
struct BytesPerSecondPerChip {
  double value = 0;
};
/// Of one core, which JAX counts as a device.
struct BytesPerSecondPerDevice {
  double value = 0;
};
/// One direction of one of a chip's six links.
struct BytesPerSecondPerLink {
  double value = 0;
};
/// Into a chip over both its links along one axis of the torus.
struct BytesPerSecondPerAxis {
  double value = 0;
};

/// A core's half.
[[nodiscard]] constexpr FlopsPerSecondPerDevice per_device(FlopsPerSecondPerChip chip) {
  return {chip.value / 2};
}
/// A core's half.
[[nodiscard]] constexpr BytesPerSecondPerDevice per_device(BytesPerSecondPerChip chip) {
  return {chip.value / 2};
}
/// Both links of an axis.
[[nodiscard]] constexpr BytesPerSecondPerAxis per_axis(BytesPerSecondPerLink link) {
  return {2 * link.value};
}

// What the vendor and the published code state.
/// Of dense bf16 products.
/// source    Cloud TPU7x page; JAX's tpu_info says 2.31e15
inline constexpr FlopsPerSecondPerChip bf16_peak{2307e12};
/// Of dense fp8 products.
/// source    Cloud TPU7x page. Whether int8 is as fast is not established, nor is the clock
inline constexpr FlopsPerSecondPerChip fp8_peak{4614e12};
/// To and from HBM.
/// source    Cloud TPU7x page; JAX's tpu_info rounds to 7.4e12
inline constexpr BytesPerSecondPerChip hbm_peak{7380e9};
/// HBM of both cores.
inline constexpr std::int64_t hbm_bytes_per_chip = std::int64_t{192} << 30;
/// HBM of one core.
inline constexpr std::int64_t hbm_bytes_per_device = hbm_bytes_per_chip / 2;
/// Vector memory of one core.
/// source    MaxText's benchmark guide; JAX's tpu_info. One core of a chip cannot reach the other's
inline constexpr std::int64_t vmem_bytes_per_device = std::int64_t{64} << 20;
/// Scalar memory of one core.
inline constexpr std::int64_t smem_bytes_per_device = std::int64_t{1} << 20;
/// Columns of a vector register.
inline constexpr std::int64_t lanes = 128;
/// Rows of a vector register of 32-bit elements.
inline constexpr std::int64_t sublanes = 8;
/// Between neighbouring chips.
/// source    jax-ml/scaling-book#115. 1,200 GB/s over 6 links both ways would be 100 a direction raw
inline constexpr BytesPerSecondPerLink ici_link{90e9};
/// Between the cores of a chip.
/// source    MaxText's custom mesh ("six times an ICI axis"), jax-ml/jax#39340; the direction convention is
///           not established
inline constexpr BytesPerSecondPerChip core_to_core{1200e9};
/// Of one hop between neighbouring chips.
/// source    the scaling book, for older chips
inline constexpr Seconds hop_latency{1e-6};
/// Between slices, over the data centre's network.
/// source    Cloud TPU7x page: 100 Gb/s
inline constexpr BytesPerSecondPerChip dcn{12.5e9};

/// One line of a published measurement.
struct ReachedFlops {
  std::int64_t size = 0;  ///< n of an n x n x n product
  FlopsPerSecondPerDevice rate;
};
/// One line of a published measurement.
struct ReachedBytes {
  std::int64_t bytes = 0;
  BytesPerSecondPerDevice rate;
};

/// Dense bf16 products.
/// source    AI-Hypercomputer/tpu-recipes: microbenchmarks/ironwood
inline constexpr std::array<ReachedFlops, 5> reached_gemm = {
    {{1024, {350e12}}, {2048, {679e12}}, {4096, {893e12}}, {16384, {950e12}}, {32768, {956e12}}}};
/// HBM copies, read and written bytes together.
/// source    AI-Hypercomputer/tpu-recipes: microbenchmarks/ironwood/hbm
inline constexpr std::array<ReachedBytes, 3> reached_copy = {{{std::int64_t{2} << 20, {1379e9}},
                                                              {std::int64_t{16} << 20, {2757e9}},
                                                              {std::int64_t{512} << 20, {3200e9}}}};
/// All-gathers of f32 on a ring of four chips, by the bytes of a shard.
/// source    AI-Hypercomputer/tpu-recipes: all_gather.md; reading its figures as a chip's is derived
inline constexpr std::array<ReachedBytes, 4> reached_gather = {
    {{std::int64_t{256} << 10, {36e9}},
     {std::int64_t{1} << 20, {64.5e9}},
     {std::int64_t{4} << 20, {81e9}},
     {std::int64_t{64} << 20, {89.4e9}}}};

/// What a kernel's flops and bytes are divided by.
struct Rates {
  FlopsPerSecondPerDevice flops;
  BytesPerSecondPerDevice memory;
};

/// The vendor's figures.
[[nodiscard]] constexpr Rates peak_rates() {
  return {per_device(bf16_peak), per_device(hbm_peak)};
}

/// What large products and copies were measured to reach.
[[nodiscard]] constexpr Rates reached_rates() {
  return {reached_gemm[3].rate, reached_copy[2].rate};
}

/// The time of a kernel on one device under a roofline: its flops or its bytes, whichever takes longer.
///
/// accuracy  a lower bound: recurrences that issue instructions, and sparse accesses, take many times that
[[nodiscard]] constexpr Seconds kernel_time(const Cost& cost, const Rates& rates) {
  const double compute = static_cast<double>(cost.flops) / rates.flops.value;
  const double memory =
      static_cast<double>(cost.bytes_read + cost.bytes_written) / rates.memory.value;
  return {std::max(compute, memory)};
}

/// One optimizer step, as throughput is stated for it.
struct Step {
  std::int64_t rows = 1;   ///< of a micro-batch
  std::int64_t slots = 1;  ///< of a row, padding among them
  std::int64_t micro_batches = 1;
  std::int64_t chips = 1;
  Seconds time;
};

/// Slots a second and chip. Padding counts: real tokens are fewer.
///
/// throws    Error for a time <= 0 or not finite
[[nodiscard]] inline double tokens_per_second_per_chip(const Step& step) {
  require(std::isfinite(step.time.value) && step.time.value > 0, "v7x::tokens_per_second_per_chip",
          "step.time", step.time.value, "must be positive and finite");
  return static_cast<double>(step.rows * step.slots * step.micro_batches) /
         (static_cast<double>(step.chips) * step.time.value);
}

}  // namespace heddle::v7x

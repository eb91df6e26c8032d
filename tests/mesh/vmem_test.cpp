// Mutants tried: bf16 padded to 8 lines; lanes not padded; one buffer counted; a plan without a spill
// figure says "fits"; the limit rounded to nearest.
#include "heddle/mesh/vmem.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

namespace heddle::v7x {
namespace {

constexpr double mib = 1 << 20;

TEST(Vmem, RefsArePaddedToTiles) {
  EXPECT_EQ(vmem_bytes({.rows = 3, .cols = 5}), 8 * 128 * 4);
  EXPECT_EQ(vmem_bytes({.rows = 17, .cols = 129, .element_bytes = 2}), 32 * 256 * 2);
  EXPECT_EQ(vmem_bytes({.rows = 33, .cols = 128, .element_bytes = 1}), 64 * 128);
  EXPECT_EQ(
      vmem_bytes({.count = 2, .rows = 3, .cols = 5, .buffers = 2, .layout = VmemRows::compact}),
      2 * 2 * 3 * 128 * 4);
  EXPECT_EQ(vmem_bytes({.rows = 0, .cols = 5}), 0);
}

/// The GDN prefill kernel: 16 key and 64 value heads of 128, chunk 64.
std::vector<VmemRef> prefill(std::int64_t state_buffers) {
  const std::int64_t width = 2 * 16 * 128 + 64 * 128;
  return {{.name = "qkv", .rows = 64, .cols = width, .element_bytes = 2, .buffers = 2},
          {.name = "qkv f32", .rows = 64, .cols = width},
          {.name = "state", .count = 64, .rows = 128, .cols = 128, .buffers = state_buffers},
          {.name = "conv state",
           .rows = 3,
           .cols = width,
           .buffers = state_buffers,
           .layout = VmemRows::compact},
          {.name = "out", .rows = 64, .cols = 64 * 128, .element_bytes = 2, .buffers = 2},
          {.name = "chunk_states", .count = 64, .rows = 128, .cols = 128, .buffers = 2},
          {.name = "t_inv", .count = 64, .rows = 64, .cols = 64, .buffers = 2},
          {.name = "b, a", .count = 2, .rows = 64, .cols = 64, .buffers = 2},
          {.name = "carried conv", .rows = 3, .cols = width, .layout = VmemRows::compact},
          {.name = "carried state", .count = 64, .rows = 128, .cols = 128}};
}

TEST(Vmem, TheGdnPrefillKernel) {
  const auto refs = prefill(2);
  EXPECT_EQ(vmem_bytes(refs[0]), 3 << 20);
  EXPECT_EQ(vmem_bytes(refs[1]), 3 << 20);
  EXPECT_EQ(vmem_bytes(refs[2]), 8 << 20);
  EXPECT_NEAR(static_cast<double>(vmem_bytes(refs[3])) / mib, 0.281, 0.0005);
  EXPECT_EQ(vmem_bytes(refs[7]), 4 * 32 << 10);
  const double declared = static_cast<double>(vmem_plan(refs).declared_bytes) / mib;
  const double single = static_cast<double>(vmem_plan(prefill(1)).declared_bytes) / mib;
  EXPECT_NEAR(declared, 32.55, 0.005);
  EXPECT_NEAR(single, 28.41, 0.005);
  EXPECT_NEAR(declared - single, 4.141, 0.0005);
}

TEST(Vmem, TheSpillDecidesAtTheEdge) {
  // The compiler asked for 62.2 and 58.05 MiB, of which the spill is the same.
  const auto spill = static_cast<std::int64_t>((62.2 - 32.55) * mib);
  const auto verdict = [&](std::int64_t buffers, double factor) {
    return vmem_plan(prefill(buffers), {.factor = factor, .spill_bytes = spill}).verdict;
  };
  EXPECT_EQ(verdict(2, 0.90), VmemVerdict::refused);
  EXPECT_EQ(verdict(1, 0.90), VmemVerdict::refused);
  EXPECT_EQ(verdict(2, 0.95), VmemVerdict::refused);
  EXPECT_EQ(verdict(1, 0.95), VmemVerdict::fits);
}

TEST(Vmem, WithoutASpillFigureNothingMoreThanTheDeclaredIsPromised) {
  const VmemPlan plan = vmem_plan(prefill(2));
  EXPECT_EQ(plan.verdict, VmemVerdict::declared_fits);
  EXPECT_EQ(plan.limit_bytes, 60397977);
  EXPECT_EQ(plan.spill_allowance, plan.limit_bytes - plan.declared_bytes);
  EXPECT_EQ(vmem_plan({}, {.factor = 0.95}).limit_bytes, 63753420);
  EXPECT_EQ(vmem_plan({}, {.spill_bytes = 0}).verdict, VmemVerdict::fits);
  const std::vector<VmemRef> large = {{.name = "logits", .rows = 4096, .cols = 4096}};
  EXPECT_EQ(vmem_plan(large).verdict, VmemVerdict::refused);
  EXPECT_LT(vmem_plan(large).spill_allowance, 0);
}

TEST(Vmem, OtherKernelsOfTheSeeds) {
  // Splash attention, 1024 x 4096 tiles of 256: q, k, v and the f32 logits that must be cut up.
  EXPECT_EQ(vmem_bytes({.rows = 1024, .cols = 256, .element_bytes = 2}), 512 << 10);
  EXPECT_EQ(vmem_bytes({.rows = 4096, .cols = 256, .element_bytes = 2}), 2 << 20);
  EXPECT_EQ(vmem_bytes({.rows = 1024, .cols = 4096}), 16 << 20);
  // A grouped product of 512 rows in tiles of 1024: lhs, rhs, out and accumulator are 10 MiB.
  const std::vector<VmemRef> product = {
      {.rows = 512, .cols = 1024, .element_bytes = 2, .buffers = 2},
      {.rows = 1024, .cols = 1024, .element_bytes = 2, .buffers = 2},
      {.rows = 512, .cols = 1024, .element_bytes = 2, .buffers = 2},
      {.rows = 512, .cols = 1024}};
  EXPECT_EQ(vmem_plan(product).declared_bytes, 10 << 20);
  // "About 86 MiB at 64 heads a tile": the largest divisor of 64 that fits is 32.
  const auto backward = [](std::int64_t heads) {
    return static_cast<std::int64_t>(86.0 / 64 * static_cast<double>(heads) * mib);
  };
  std::int64_t fitting = 64;
  while (backward(fitting) > vmem_plan({}).limit_bytes) {
    fitting /= 2;
  }
  EXPECT_EQ(fitting, 32);
}

TEST(Vmem, RefusalsNameTheRefAndTheRule) {
  const auto refused = [](VmemRef ref) {
    ref.name = "q";
    return heddle::test::thrown_text<Error>([&] { static_cast<void>(vmem_bytes(ref)); });
  };
  EXPECT_EQ(refused({.rows = -1}), "v7x::vmem_bytes: q.rows = -1: must be >= 0");
  EXPECT_EQ(refused({.cols = -1}), "v7x::vmem_bytes: q.cols = -1: must be >= 0");
  EXPECT_EQ(refused({.count = -1}), "v7x::vmem_bytes: q.count = -1: must be >= 0");
  EXPECT_EQ(refused({.element_bytes = 8}),
            "v7x::vmem_bytes: q.element_bytes = 8: must be 1, 2 or 4");
  EXPECT_EQ(refused({.buffers = 0}), "v7x::vmem_bytes: q.buffers = 0: must be >= 1");
  EXPECT_EQ(
      heddle::test::thrown_text<Error>([] { static_cast<void>(vmem_plan({}, {.factor = 1.5})); }),
      "v7x::vmem_plan: options.factor = 1.5: must be in (0, 1]");
  EXPECT_EQ(heddle::test::thrown_text<Error>(
                [] { static_cast<void>(vmem_plan({}, {.spill_bytes = -1})); }),
            "v7x::vmem_plan: options.spill_bytes = -1: must be >= 0");
}

}  // namespace
}  // namespace heddle::v7x

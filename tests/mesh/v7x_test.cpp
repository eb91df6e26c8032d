// Mutants tried: peak of a chip given to a device; bytes read alone; the sum in place of the longer; padding
// left out of the stated throughput.
#include "heddle/mesh/v7x.hpp"

#include <string>
#include <type_traits>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

namespace heddle::v7x {
namespace {

TEST(V7x, TheTable) {
  EXPECT_EQ(bf16_peak.value, 2307e12);
  EXPECT_EQ(per_device(bf16_peak).value, 1153.5e12);
  EXPECT_EQ(per_device(fp8_peak).value, 2307e12);
  EXPECT_EQ(per_device(hbm_peak).value, 3690e9);
  EXPECT_EQ(hbm_bytes_per_device, std::int64_t{96} * 1024 * 1024 * 1024);
  EXPECT_EQ(vmem_bytes_per_device, 67108864);
  EXPECT_EQ(per_axis(ici_link).value, 180e9);
  EXPECT_EQ(reached_rates().flops.value, 950e12);
  EXPECT_EQ(reached_rates().memory.value, 3200e9);
  EXPECT_EQ(reached_gather[3].rate.value, 89.4e9);
}

TEST(V7x, RidgePoints) {
  EXPECT_NEAR(per_device(bf16_peak).value / per_device(hbm_peak).value, 312.6, 0.05);
  EXPECT_NEAR(bf16_peak.value / per_axis(ici_link).value, 12800, 20);
}

template <class Figure>
concept HasDeviceFigure = requires(Figure figure) {
  per_device(figure);
};

TEST(V7x, UnitsDoNotMix) {
  EXPECT_FALSE((std::is_convertible_v<FlopsPerSecondPerChip, FlopsPerSecondPerDevice>));
  EXPECT_FALSE((std::is_convertible_v<BytesPerSecondPerLink, BytesPerSecondPerAxis>));
  EXPECT_FALSE((std::is_convertible_v<BytesPerSecondPerChip, BytesPerSecondPerDevice>));
  EXPECT_FALSE((std::is_convertible_v<Seconds, BytesPerSecondPerDevice>));
  EXPECT_TRUE(HasDeviceFigure<FlopsPerSecondPerChip>);
  EXPECT_FALSE(HasDeviceFigure<FlopsPerSecondPerDevice>);
  EXPECT_FALSE(HasDeviceFigure<BytesPerSecondPerLink>);
}

TEST(V7x, AKernelTakesTheLongerOfItsFlopsAndItsBytes) {
  const Rates rates{{100}, {10}};
  EXPECT_EQ(kernel_time({.flops = 500, .bytes_read = 20, .bytes_written = 20}, rates).value, 5);
  EXPECT_EQ(kernel_time({.flops = 500, .bytes_read = 40, .bytes_written = 20}, rates).value, 6);
  EXPECT_EQ(kernel_time({}, rates).value, 0);
}

TEST(V7x, PublishedTimesThatFollowFromTheTable) {
  // Six copies of 256 MiB were said to take about 1 ms.
  const std::int64_t array = std::int64_t{16384} * 64 * 128 * 2;
  EXPECT_EQ(array, std::int64_t{1} << 28);
  const Cost copies{.bytes_read = 6 * array, .bytes_written = 6 * array};
  EXPECT_NEAR(kernel_time(copies, reached_rates()).value, 1.004e-3, 0.01e-3);
  // The head's four products of 16,384 tokens: 0.116 s at peak, 0.141 s at 82 % of it.
  const Cost head{.flops = std::int64_t{4} * 2 * 16384 * 4096 * 248320};
  EXPECT_NEAR(kernel_time(head, peak_rates()).value, 0.116, 0.0005);
  EXPECT_NEAR(kernel_time(head, reached_rates()).value, 0.141, 0.001);
  // One unsort moves 671 MB in and 537 MB out; 120 of them could take 45 ms and took 589.
  const Cost unsort{.bytes_read = 120 * std::int64_t{671088640},
                    .bytes_written = 120 * std::int64_t{536870912}};
  EXPECT_NEAR(kernel_time(unsort, reached_rates()).value, 0.045, 0.0005);
}

TEST(V7x, StatedThroughputsFollowFromStatedStepTimes) {
  const auto stated = [](double seconds) {
    return tokens_per_second_per_chip(
        {.rows = 64, .slots = 65536, .micro_batches = 9, .chips = 128, .time = {seconds}});
  };
  EXPECT_NEAR(stated(106.30), 2774, 2774 * 3e-4);
  EXPECT_NEAR(stated(82.671), 3567, 3567 * 3e-4);
  EXPECT_NEAR(stated(82.945), 3556, 3556 * 3e-4);
  EXPECT_NEAR(stated(83.316), 3540, 3540 * 3e-4);
  EXPECT_NEAR(stated((82.200 + 82.158) / 2), 3589, 3589 * 3e-4);
  EXPECT_NEAR(stated(89.77), 3285, 3285 * 3e-4);
  EXPECT_EQ(heddle::test::thrown_text<Error>(
                [] { static_cast<void>(tokens_per_second_per_chip({.time = {0}})); }),
            "v7x::tokens_per_second_per_chip: step.time = 0: must be positive and finite");
}

}  // namespace
}  // namespace heddle::v7x

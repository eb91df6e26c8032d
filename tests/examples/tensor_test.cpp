#include "support/tensor.hpp"

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

// Mutants that must fail here: a row of the dtype table out of its place; a product that wraps; a zero
// extent that does not win over an overflow; elements read as another type of the same width; the shape of
// a scalar without an element.

namespace heddle::examples {
namespace {

constexpr std::int64_t huge = std::int64_t{1} << 62;

TEST(Tensor, DtypesHaveTheirNamesWidthsAndTypes) {
  const auto check = [](Dtype dtype, const char* name, std::int64_t bytes, bool floating) {
    EXPECT_EQ(dtype_name(dtype), name);
    EXPECT_EQ(dtype_bytes(dtype), bytes);
    EXPECT_EQ(dtype_named(name), dtype);
    EXPECT_EQ(is_floating(dtype), floating) << name;
    with_type(dtype, [&](auto stored) {
      EXPECT_EQ(dtype_of<decltype(stored)>(), dtype);
      EXPECT_EQ(static_cast<std::int64_t>(sizeof stored), bytes);
    });
  };
  check(Dtype::f64, "F64", 8, true);
  check(Dtype::f32, "F32", 4, true);
  check(Dtype::bf16, "BF16", 2, true);
  check(Dtype::i64, "I64", 8, false);
  check(Dtype::i32, "I32", 4, false);
  check(Dtype::i16, "I16", 2, false);
  check(Dtype::u8, "U8", 1, false);
  EXPECT_EQ(dtype_named("F16"), std::nullopt);
  EXPECT_EQ(dtype_named("f32"), std::nullopt);
  EXPECT_EQ(dtype_names(), "F64, F32, BF16, I64, I32, I16, U8");
  EXPECT_THROW(with_type(static_cast<Dtype>(7), [](auto) {}), Error);
}

TEST(Tensor, ElementsOfAShape) {
  EXPECT_EQ(checked_element_count({}), 1) << "a scalar's";
  EXPECT_EQ(checked_element_count({2, 3, 4}), 24);
  EXPECT_EQ(checked_element_count({0}), 0);
  EXPECT_EQ(checked_element_count({huge, 1}), huge);
  EXPECT_EQ(checked_element_count({huge, 2}), std::nullopt);
  EXPECT_EQ(checked_element_count({huge, 4}), std::nullopt) << "2^64, which wraps to 0";
  EXPECT_EQ(checked_element_count({huge, huge, 0}), 0) << "however large the others are";
  EXPECT_EQ(checked_element_count({0, huge, huge}), 0);
  EXPECT_EQ(checked_element_count({-1}), std::nullopt);
  EXPECT_EQ(checked_element_count({0, -1}), std::nullopt);
  EXPECT_EQ(shape_text({}), "[]");
  EXPECT_EQ(shape_text({2, 0, 5}), "[2, 0, 5]");
}

TEST(Tensor, OwnsWhatItWasMadeOf) {
  const Tensor tensor = Tensor::of<std::int16_t>("x", {2, 2}, {1, -2, 3, 4});
  EXPECT_EQ(tensor.dtype, Dtype::i16);
  EXPECT_EQ(tensor.elements(), 4);
  EXPECT_EQ(tensor.bytes(), 8);
  EXPECT_EQ(tensor.values<std::int16_t>()[1], -2);
  const TensorView view = tensor.view();
  EXPECT_EQ(view.name, "x");
  EXPECT_EQ(view.raw().data(), tensor.storage.data());
  EXPECT_EQ(view.raw().size(), 8U);
  EXPECT_EQ(view.converted<double>(), (std::vector<double>{1, -2, 3, 4}));
  Tensor zeros("z", Dtype::f32, {3});
  EXPECT_EQ(zeros.values<float>()[2], 0);
  zeros.values<float>()[2] = 7;
  EXPECT_EQ(zeros.view().converted<int>(), (std::vector<int>{0, 0, 7}));
  EXPECT_TRUE(Tensor::of<float>("none", {0, 3}, {}).storage.empty());
  EXPECT_EQ(Tensor::of<float>("scalar", {}, {2}).elements(), 1);
}

TEST(Tensor, ConvertsEveryElementByItself) {
  const std::vector<bfloat16> halves = {bfloat16(0.5F), bfloat16(-3.0F)};
  EXPECT_EQ(Tensor::of<bfloat16>("x", {2}, halves).view().converted<float>(),
            (std::vector<float>{0.5F, -3.0F}));
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(Tensor::of<std::int64_t>("x", {1}, {most}).view().converted<std::int64_t>(),
            std::vector<std::int64_t>{most});
}

TEST(Tensor, RefusesWhatDoesNotFit) {
  EXPECT_EQ(test::thrown_text<Error>([] {
              const Tensor tensor("x", Dtype::f32, {2, -1});
            }),
            "Tensor: x = [2, -1]: must have extents >= 0 and a number of elements that fits I64");
  EXPECT_EQ(test::thrown_text<Error>([] {
              const Tensor tensor("x", Dtype::f32, {huge, 4});
            }),
            "Tensor: x = [" + std::to_string(huge) +
                ", 4]: must have extents >= 0 and a number of elements that fits I64");
  EXPECT_EQ(test::thrown_text<Error>([] {
              static_cast<void>(Tensor::of<float>("x", {2, 2}, {1, 2, 3}));
            }),
            "Tensor::of: x = 3: must equal [2, 2] (4)");
  Tensor tensor = Tensor::of<float>("x", {1}, {1});
  EXPECT_EQ(test::thrown_text<Error>([&] { static_cast<void>(tensor.values<std::int32_t>()); }),
            "Tensor::values: x = F32: must be of dtype I32");
  EXPECT_EQ(test::thrown_text<Error>([&] { static_cast<void>(tensor.view().values<double>()); }),
            "TensorView::values: x = F32: must be of dtype F64");
}

}  // namespace
}  // namespace heddle::examples

#include "heddle/numerics/tensor.hpp"

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

// Mutants that must fail here: elements read from the front whatever was asked; bf16 taken for bits; a
// vector split into rows of one; an empty tensor's rows counted by division; a product that wraps.

namespace heddle::numerics {
namespace {

template <class T>
NamedTensor tensor(const std::vector<T>& values, std::vector<std::int64_t> shape) {
  return {.name = "x", .shape = std::move(shape), .elements = std::span<const T>(values)};
}

TEST(NamedTensor, ReadsAnyTypeAsAnother) {
  const std::vector<bfloat16> halves = {bfloat16(0.5F), bfloat16(-2.0F), bfloat16(3.0F)};
  const NamedTensor a = tensor(halves, {3});
  EXPECT_EQ(a.read_all<double>(), (std::vector<double>{0.5, -2, 3}));
  EXPECT_TRUE(a.is_floating());
  EXPECT_EQ(a.element_bytes(), 2);
  std::vector<double> middle(1);
  a.read(1, std::span(middle));
  EXPECT_EQ(middle[0], -2);

  const std::vector<std::int64_t> large = {std::numeric_limits<std::int64_t>::max(), -1};
  const NamedTensor b = tensor(large, {2});
  EXPECT_FALSE(b.is_floating());
  EXPECT_EQ(b.read_all<std::int64_t>(), large);
  EXPECT_EQ(b.element_bytes(), 8);
  const std::vector<std::uint8_t> bytes = {255};
  EXPECT_EQ(tensor(bytes, {1}).read_all<std::int64_t>().front(), 255);
}

TEST(NamedTensor, RowsAreThoseOfTheLastDimension) {
  const std::vector<float> values(12);
  EXPECT_EQ(tensor(values, {2, 2, 3}).rows(), 4);
  EXPECT_EQ(tensor(values, {2, 2, 3}).row_size(), 3);
  EXPECT_EQ(tensor(values, {12}).rows(), 1) << "a vector is one row";
  EXPECT_EQ(tensor(std::vector<float>(1), {}).rows(), 1);
  EXPECT_EQ(tensor(std::vector<float>(), {0}).rows(), 0);
  EXPECT_EQ(tensor(std::vector<float>(), {5, 0}).rows(), 0);
}

TEST(NamedTensor, PlacesAreToldByTheirIndices) {
  EXPECT_EQ(entry_text({2, 3}, 4), "[1, 1]");
  EXPECT_EQ(entry_text({7}, 6), "[6]");
  EXPECT_EQ(entry_text({}, 0), "[]");
}

TEST(NamedTensor, RefusesAShapeThatIsNotItsElements) {
  const std::vector<float> values(6);
  const auto refusal = [&](std::vector<std::int64_t> shape) {
    return test::thrown_text<Error>([&] { tensor(values, std::move(shape)).validate("here"); });
  };
  EXPECT_EQ(refusal({2, 3}), "nothing was thrown");
  EXPECT_EQ(refusal({2, 2}), "here: x.elements.size = 6: must equal the product of its shape (4)");
  EXPECT_EQ(refusal({-2, -3}), "here: x.shape[0] = -2: must be >= 0");
  // The product is 6 modulo 2^64.
  const std::int64_t half = std::int64_t{1} << 32;
  EXPECT_NE(refusal({half, half, 6}), "nothing was thrown");
}

}  // namespace
}  // namespace heddle::numerics

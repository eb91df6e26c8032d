// Mutants tried: bf16 taken for f16; signedness lost; size in bits compared instead of kind and size.
#include "heddle/mesh/data_type.hpp"

#include <cstdint>

#include <gtest/gtest.h>

namespace heddle {
namespace {

struct RoutedToken {
  std::int32_t expert = 0;
  float weight = 0;
};

TEST(DataType, NamesKindAndSize) {
  EXPECT_EQ(to_string(data_type<float>()), "f32");
  EXPECT_EQ(to_string(data_type<double>()), "f64");
  EXPECT_EQ(to_string(data_type<bfloat16>()), "bf16");
  EXPECT_EQ(to_string(data_type<Eigen::half>()), "f16");
  EXPECT_EQ(to_string(data_type<std::int32_t>()), "i32");
  EXPECT_EQ(to_string(data_type<std::uint8_t>()), "u8");
  EXPECT_EQ(to_string(data_type<RoutedToken>()), "8 bytes");
}

TEST(DataType, TypesOfOneSizeDiffer) {
  EXPECT_NE(data_type<float>(), data_type<std::int32_t>());
  EXPECT_NE(data_type<std::int32_t>(), data_type<std::uint32_t>());
  EXPECT_NE(data_type<bfloat16>(), data_type<Eigen::half>());
  EXPECT_EQ(data_type<float>(), data_type<float>());
}

}  // namespace
}  // namespace heddle

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heddle/core/elementwise.hpp"
#include "heddle/core/factor.hpp"
#include "heddle/core/isa.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/packed_matrix.hpp"
#include "support/random.hpp"

namespace heddle::test {

/// A result that must have the same bits everywhere: under every compiler, on every path and machine.
struct Bits {
  std::string name;
  std::uint64_t hash = 0;
  std::uint64_t expected = 0;
};

/// FNV-1a of the bytes.
template <class T>
[[nodiscard]] std::uint64_t hash_of(std::span<const T> values) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const std::byte byte : std::as_bytes(values)) {
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3U;
  }
  return hash;
}

/// Numbers in [low, high) made of integer arithmetic alone: the normal distribution's logarithm and
/// cosine are another library's on another machine.
template <class T>
[[nodiscard]] std::vector<T> uniforms(std::uint64_t seed, std::int64_t count, double low = -1,
                                      double high = 1) {
  Random random(seed);
  std::vector<T> values(static_cast<std::size_t>(count));
  for (T& value : values) {
    value = static_cast<T>(static_cast<float>(random.uniform(low, high)));
  }
  return values;
}

template <class TA, class TB>
[[nodiscard]] std::uint64_t product_hash(bool transpose_a, bool transpose_b, bool packed,
                                         std::int64_t m, std::int64_t k, std::int64_t n) {
  using C = AccumulatorOf<TB>;
  const auto a = uniforms<TA>(1, m * k);
  const auto b = uniforms<TB>(2, k * n);
  std::vector<C> c = uniforms<C>(3, m * n);
  const ConstMatrixView<TA> a_view(a.data(), transpose_a ? k : m, transpose_a ? m : k);
  const ConstMatrixView<TB> b_view(b.data(), transpose_b ? n : k, transpose_b ? k : n);
  const Factor<TA> left = transpose_a ? transposed(a_view) : as_is(a_view);
  const Factor<TB> right = transpose_b ? transposed(b_view) : as_is(b_view);
  const MatrixView<C> result(c.data(), m, n);
  if (packed) {
    multiply(left, PackedMatrix<TB>(right).view(), result, Write::accumulate);
  } else {
    multiply(left, right, result, Write::accumulate);
  }
  return hash_of<C>(c);
}

[[nodiscard]] inline std::uint64_t elementwise_hash(Elementwise function, double low, double high) {
  const auto x = uniforms<float>(4, 20011, low, high);
  std::vector<float> y(x.size());
  transform<float>(function, x, y);
  return hash_of<float>(y);
}

/// Every kind of result on the current path.
[[nodiscard]] inline std::vector<Bits> all_bits() {
  std::vector<Bits> bits;
  const auto add = [&](const char* name, std::uint64_t hash, std::uint64_t expected) {
    bits.push_back({name, hash, expected});
  };
  add("f32 67x1000x211", product_hash<float, float>(false, false, false, 67, 1000, 211),
      0x3355eb60b59aac6bU);
  add("f32 transposed", product_hash<float, float>(true, true, false, 67, 1000, 211),
      0x98d8cbc33f19320cU);
  add("f32 packed, 5 rows", product_hash<float, float>(false, false, true, 5, 513, 40),
      0xb41217e97eb19b17U);
  add("f64 67x1000x211", product_hash<double, double>(false, true, false, 67, 1000, 211),
      0xd262ec1d026a2dd3U);
  add("bf16 67x1000x211", product_hash<bfloat16, bfloat16>(false, false, false, 67, 1000, 211),
      0xdb23b595426ef067U);
  add("bf16 transposed, odd", product_hash<bfloat16, bfloat16>(true, true, false, 67, 999, 211),
      0x9cd3937cc50af557U);
  add("bf16 packed, 5 rows", product_hash<bfloat16, bfloat16>(false, false, true, 5, 513, 40),
      0xa7f4d3d87790a846U);
  add("bf16, 5 rows", product_hash<bfloat16, bfloat16>(false, false, false, 5, 514, 40),
      0xd566581abc3d1964U);
  add("f32, 5 rows, large b", product_hash<float, float>(false, false, false, 5, 1030, 90),
      0xfa52dbf1bfd8536eU);
  add("bf16, 5 rows, large b", product_hash<bfloat16, bfloat16>(false, false, false, 5, 1030, 90),
      0x4cbc148be15cb084U);
  add("bf16 by f32", product_hash<bfloat16, float>(true, false, false, 67, 600, 50),
      0x56e2b8c8e3af24eU);
  add("f32 by bf16", product_hash<float, bfloat16>(false, true, true, 67, 601, 50),
      0x65a0dcae28b0cc99U);
  add("exp", elementwise_hash(Elementwise::exp, -110, 95), 0xb8b78214123a0ab9U);
  add("log", elementwise_hash(Elementwise::log, 0, 10), 0xd5f1ad7dc9691b6fU);
  add("log1p", elementwise_hash(Elementwise::log1p, -1, 3), 0x22e2537ea780ad2eU);
  add("softplus", elementwise_hash(Elementwise::softplus, -30, 30), 0x2b6f3a76e964f2afU);
  add("sigmoid", elementwise_hash(Elementwise::sigmoid, -30, 30), 0xdc508cbd108a034fU);
  add("silu", elementwise_hash(Elementwise::silu, -30, 30), 0x870216913136944aU);
  return bits;
}

}  // namespace heddle::test

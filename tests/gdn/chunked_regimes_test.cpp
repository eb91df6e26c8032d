#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/row_case.hpp"
#include "heddle/gdn/chunked.hpp"

// Every gate regime and key family. Mutants: sums of g in float, or not reset at a start; exp before
// the mask; exp of a difference taken the wrong way round; a decay below the cut left subnormal; the gate
// gradient as a difference of row and column sums; d_g at a start not zero.

namespace heddle::gdn {
namespace {

using test::by_tokens;
using test::chunked;
using test::Decay;
using test::Ids;
using test::Keep;
using test::Keys;
using test::RowCase;
using test::RowMaker;

const Dims dims{.key_heads = 1, .value_heads = 2, .key_dim = 16, .value_dim = 8};

Ids two_documents() {
  Ids ids(50, 1);
  ids.resize(90, 2);
  return ids;
}

TEST(GdnChunkedRegimes, AllHoldTheTolerance) {
  for (const Keys keys : test::every_family) {
    for (const Decay decay : test::every_regime) {
      RowCase row = RowMaker{.dims = dims,
                             .segment_ids = two_documents(),
                             .keys = keys,
                             .decay = decay,
                             .states = true}
                        .make();
      const auto expected = by_tokens(row);
      for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
        row.chunk_options.chunking = chunking;
        EXPECT_TRUE(close(chunked<double>(row), expected, 1e-12))
            << static_cast<int>(keys) << " " << static_cast<int>(decay);
        EXPECT_TRUE(close(chunked<float>(row), expected, 5e-6))
            << static_cast<int>(keys) << " " << static_cast<int>(decay);
      }
    }
  }
}

TEST(GdnChunkedRegimes, HoldItAtTheModelsKeyDim) {
  const Dims model{.key_heads = 1, .value_heads = 1, .key_dim = 128, .value_dim = 32};
  for (const Decay decay : test::every_regime) {
    const RowCase row =
        RowMaker{.dims = model, .segment_ids = Ids(150, 1), .keys = Keys::positive, .decay = decay}
            .make();
    EXPECT_TRUE(close(chunked<float>(row), by_tokens(row), 5e-6)) << static_cast<int>(decay);
  }
}

/// sqrt(sum (a - b)^2 / sum b^2).
double relative_rms(const std::vector<float>& a, const std::vector<double>& b) {
  return heddle::test::difference(std::span<const float>(a), std::span<const double>(b))
      .relative_l2;
}

TEST(GdnChunkedRegimes, GateGradientsKeepTheirDigitsUnderStrongDecay) {
  const Dims model{.key_heads = 1, .value_heads = 2, .key_dim = 128, .value_dim = 64};
  for (const Decay decay : test::every_regime) {
    const RowCase row =
        RowMaker{.dims = model, .segment_ids = Ids(128, 1), .keys = Keys::positive, .decay = decay}
            .make();
    const auto expected = by_tokens(row);
    const auto result = chunked<float>(row);
    EXPECT_LE(relative_rms(result.d_g, expected.d_g), 1.5e-6) << static_cast<int>(decay);
    // What A_log's gradient is: a sum over tokens that small terms must not be lost in.
    double sum = 0;
    double expected_sum = 0;
    double size = 0;
    for (std::size_t i = 0; i < expected.d_g.size(); ++i) {
      sum += static_cast<double>(result.d_g[i]) * row.g[i];
      expected_sum += expected.d_g[i] * row.g[i];
      size += std::abs(expected.d_g[i] * row.g[i]);
    }
    EXPECT_NEAR(sum, expected_sum, 2e-6 * size) << static_cast<int>(decay);
  }
}

TEST(GdnChunkedRegimes, TakesStrengthsUpToTwo) {
  RowCase row = RowMaker{.dims = dims, .segment_ids = two_documents(), .states = true}.make();
  for (double& beta : row.beta) {
    beta *= 2;
  }
  const auto expected = by_tokens(row);
  EXPECT_TRUE(close(chunked<double>(row), expected, 1e-11));
  EXPECT_TRUE(close(chunked<float>(row), expected, 2e-5));
}

TEST(GdnChunkedRegimes, AStrongEnoughDecayIsAStart) {
  constexpr std::int64_t cut = 21;
  RowCase row =
      RowMaker{.dims = dims, .segment_ids = Ids(40, 1), .chunk_options = {.chunk = 16}}.make();
  RowCase reset = row;
  std::fill(reset.segment_ids.begin() + cut, reset.segment_ids.end(), 2);
  for (std::int64_t h = 0; h < dims.value_heads; ++h) {
    row.g[static_cast<std::size_t>(cut * dims.value_heads + h)] = -1e4;
  }
  const auto decayed = chunked<float>(row);
  const auto started = by_tokens(reset);
  EXPECT_TRUE(close(decayed, started, 5e-6));
  for (std::int64_t h = 0; h < dims.value_heads; ++h) {
    EXPECT_EQ(decayed.d_g[static_cast<std::size_t>(cut * dims.value_heads + h)], 0);
  }
}

TEST(GdnChunkedRegimes, LeaveNoSubnormalDecay) {
  // Two tokens, e^-95: representable as a subnormal, taken as 0.
  RowCase row = RowMaker{.dims = dims, .segment_ids = Ids(2, 1), .states = true}.make();
  for (std::size_t i = 0; i < row.g.size(); ++i) {
    row.g[i] = i < 2 ? -95 : 0;
    row.beta[i] = 0;
  }
  EXPECT_TRUE(heddle::test::same_bits(
      chunked<float>(row).final_state,
      std::vector<float>(static_cast<std::size_t>(dims.state_rows() * dims.value_dim), 0.0F)));
}

TEST(GdnChunkedRegimes, IgnoresTheDecayOfADocumentsFirstToken) {
  RowCase row = RowMaker{.dims = dims, .segment_ids = two_documents()}.make();
  for (const Chunking chunking : {Chunking::aligned, Chunking::grid}) {
    row.chunk_options.chunking = chunking;
    const auto expected = chunked<float>(row);
    RowCase other = row;
    for (const std::int64_t start : {0, 50}) {
      other.g[static_cast<std::size_t>(start * dims.value_heads)] = -7;
    }
    const auto result = chunked<float>(other);
    EXPECT_TRUE(same_bits(result, expected));
    for (const std::int64_t start : {0, 50}) {
      EXPECT_EQ(result.d_g[static_cast<std::size_t>(start * dims.value_heads)], 0);
    }
  }
}

TEST(GdnChunkedRegimes, ZeroKeysOnlyDecayTheState) {
  const RowCase row =
      RowMaker{.dims = dims, .segment_ids = Ids(9, 1), .keys = Keys::zero, .states = true}.make();
  const auto result = chunked<double>(row);
  for (std::int64_t h = 0; h < dims.value_heads; ++h) {
    double sum = 0;
    for (std::int64_t t = 0; t < 9; ++t) {
      sum += row.g[static_cast<std::size_t>(t * dims.value_heads + h)];
    }
    const auto at = static_cast<std::size_t>(h * dims.key_dim * dims.value_dim);
    EXPECT_NEAR(result.final_state[at], std::exp(sum) * row.state[at], 1e-14);
  }
}

TEST(GdnChunkedRegimes, ChunkSizesAgree) {
  RowCase row = RowMaker{.dims = dims, .segment_ids = Ids(130, 1), .states = true}.make();
  const auto widened = [](const std::vector<float>& x) {
    return std::vector<double>(x.begin(), x.end());
  };
  row.chunk_options.chunk = 64;
  const auto expected = chunked<float>(row);
  for (const std::int64_t chunk : {1, 7, 16, 33, 128, 1000}) {
    row.chunk_options.chunk = chunk;
    const auto result = chunked<float>(row);
    EXPECT_TRUE(heddle::test::close(result.o, widened(expected.o), 5e-6)) << chunk;
    EXPECT_TRUE(heddle::test::close(result.d_y, widened(expected.d_y), 5e-6)) << chunk;
  }
}

}  // namespace
}  // namespace heddle::gdn

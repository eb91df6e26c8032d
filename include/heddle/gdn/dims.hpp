#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "heddle/core/error.hpp"

namespace heddle::gdn {

/// The extents of one Gated Delta Net layer call, and where a head lies in the packed columns.
///
/// shapes    qkv [tokens, qkv_columns()]: query heads, key heads, value heads, head-major inside each;
///           o [tokens, output_columns()]; a recurrent state [state_rows(), value_dim], head h in
///           rows [state_row(h), state_row(h) + key_dim); a conv state [window_rows(), qkv_columns()]
/// specials  tokens = 0 is legal; kernel = 1 is a convolution without state
/// throws    validate: Error for an extent out of range or value_heads % key_heads != 0
/// source    spec/gdn.md 1
struct Dims {
  std::int64_t tokens = 0;
  std::int64_t key_heads = 0;    ///< heads of q and of k
  std::int64_t value_heads = 0;  ///< heads of v, of the state and of o
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t kernel = 4;  ///< taps of the causal convolution

  /// Value heads that share a key head.
  [[nodiscard]] constexpr std::int64_t group() const { return value_heads / key_heads; }
  /// Repeat-interleave: neighbours share a key head. value_head % key_heads would be another model.
  [[nodiscard]] constexpr std::int64_t key_head_of(std::int64_t value_head) const {
    return value_head / group();
  }

  [[nodiscard]] constexpr std::int64_t qkv_columns() const {
    return 2 * key_heads * key_dim + value_heads * value_dim;
  }
  [[nodiscard]] constexpr std::int64_t query_column(std::int64_t key_head) const {
    return key_head * key_dim;
  }
  [[nodiscard]] constexpr std::int64_t key_column(std::int64_t key_head) const {
    return (key_heads + key_head) * key_dim;
  }
  [[nodiscard]] constexpr std::int64_t value_column(std::int64_t value_head) const {
    return 2 * key_heads * key_dim + value_head * value_dim;
  }

  [[nodiscard]] constexpr std::int64_t output_columns() const { return value_heads * value_dim; }
  [[nodiscard]] constexpr std::int64_t state_rows() const { return value_heads * key_dim; }
  [[nodiscard]] constexpr std::int64_t state_row(std::int64_t value_head) const {
    return value_head * key_dim;
  }
  [[nodiscard]] constexpr std::int64_t window_rows() const { return kernel - 1; }

  void validate(std::string_view where) const {
    require(tokens >= 0, where, "dims.tokens", tokens, "must be >= 0");
    require(key_heads >= 1, where, "dims.key_heads", key_heads, "must be >= 1");
    require(value_heads >= 1, where, "dims.value_heads", value_heads, "must be >= 1");
    if (value_heads % key_heads != 0) {
      fail(where, "dims.value_heads", value_heads,
           "must be a multiple of dims.key_heads (" + std::to_string(key_heads) + ")");
    }
    require(key_dim >= 1, where, "dims.key_dim", key_dim, "must be >= 1");
    require(value_dim >= 1, where, "dims.value_dim", value_dim, "must be >= 1");
    require(kernel >= 1, where, "dims.kernel", kernel, "must be >= 1");
  }

  friend constexpr bool operator==(const Dims&, const Dims&) = default;
};

/// How q and k are normalised, x a head's slice of one token after the convolution.
enum class NormMode {
  root,   ///< x / sqrt(sum x^2 + eps)
  clamp,  ///< x / max(sqrt(sum x^2), eps)
  none,   ///< x; keys must then satisfy beta * sum k^2 <= 2, or the recurrence itself diverges
};

/// The range of the writing strength beta.
enum class BetaRange {
  unit,     ///< sigmoid(b), in (0, 1)
  doubled,  ///< 2 sigmoid(b): transitions may have negative eigenvalues
};

/// The precision in which the convolution's output reaches norm and recurrence.
enum class ConvOutput {
  accumulator,  ///< as computed
  storage,      ///< rounded to the type of qkv, in forward and backward alike, where a fused kernel
                ///< stores it; the rounding itself passes its cotangent unchanged
};

/// What the layer computes, whichever way it is computed.
///
/// throws    validate: Error for eps not > 0 and finite, a negative initial_segment, an unknown enum
struct Options {
  double eps = 1e-6;
  NormMode norm = NormMode::root;
  BetaRange beta_range = BetaRange::unit;
  ConvOutput conv_output = ConvOutput::accumulator;
  /// Id of the document that the row continues and to which the given states belong; 0: none, the
  /// first token starts a document whatever its id.
  std::int32_t initial_segment = 0;

  void validate(std::string_view where) const {
    require(eps > 0 && std::isfinite(eps), where, "options.eps", eps, "must be > 0 and finite");
    require(norm == NormMode::root || norm == NormMode::clamp || norm == NormMode::none, where,
            "options.norm", norm, "must be root, clamp or none");
    require(beta_range == BetaRange::unit || beta_range == BetaRange::doubled, where,
            "options.beta_range", beta_range, "must be unit or doubled");
    require(conv_output == ConvOutput::accumulator || conv_output == ConvOutput::storage, where,
            "options.conv_output", conv_output, "must be accumulator or storage");
    require(initial_segment >= 0, where, "options.initial_segment", initial_segment,
            "must be >= 0");
  }
};

/// Where the chunked evaluation cuts a row.
enum class Chunking {
  aligned,  ///< every document start begins a chunk, then every `chunk` tokens; padding gets none
  grid,     ///< at multiples of `chunk` from the row's start
};

/// How the chunked evaluation proceeds. It changes rounding, never what is computed.
///
/// throws    validate: Error for chunk < 1, an unknown enum
struct ChunkOptions {
  std::int64_t chunk = 64;
  Chunking chunking = Chunking::aligned;

  void validate(std::string_view where) const {
    require(chunk >= 1, where, "options.chunk", chunk, "must be >= 1");
    require(chunking == Chunking::aligned || chunking == Chunking::grid, where, "options.chunking",
            chunking, "must be aligned or grid");
  }
};

}  // namespace heddle::gdn

#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "heddle/core/error.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/workspaces.hpp"

namespace heddle::gdn {

/// Scratch of layer calls, which the caller may own and keep from call to call. Not for two calls at
/// once.
class LayerScratch {
 public:
  [[nodiscard]] Workspace& row() { return row_; }
  [[nodiscard]] Workspaces& threads() { return threads_; }

  /// Most bytes in use at one time since construction: of the row's arrays, and of one thread.
  [[nodiscard]] std::size_t row_high_water_bytes() const { return row_.high_water_bytes(); }
  [[nodiscard]] std::size_t thread_high_water_bytes() const { return threads_.high_water_bytes(); }

 private:
  Workspace row_;
  Workspaces threads_;
};

/// How a forward or states call evaluates the recurrence; a backward is always chunked.
enum class Recurrence {
  automatic,       ///< what takes_tokens says
  chunked,         ///< a chunk at a time, in products of matrices
  token_by_token,  ///< the decode step in a loop
};

/// How a layer call proceeds. It changes rounding, never what is computed.
///
/// throws    validate: Error as ChunkOptions, for an unknown enum
struct LayerOptions {
  ChunkOptions chunks{};
  Recurrence recurrence = Recurrence::automatic;

  void validate(std::string_view where) const {
    chunks.validate(where);
    require(recurrence == Recurrence::automatic || recurrence == Recurrence::chunked ||
                recurrence == Recurrence::token_by_token,
            where, "options.recurrence", recurrence,
            "must be automatic, chunked or token_by_token");
  }
};

/// Whether a call without residuals goes token by token; those are a chunk's, and kept by chunks alone.
///
/// Measured at 32 .. 256 dimensions of keys and values, 1 and 4 value heads a key head, 1 .. 1024 tokens,
/// with AVX-512 and AVX2 (gdn.recurrence of the benchmarks): the decode step in a loop takes a third to
/// two thirds of a chunk's time up to 64 x 64, whose states a first-level cache holds, and about as
/// long as it at 128 x 128, where it wins for a few tokens behind a given state, or for one value head
/// that shares its keys with no other. A document that starts in the row keeps its first chunk's
/// products with the state from being needed at all, which chunks then use.
///
/// order     never by what surrounds a document: a row in which one starts is decided by its heads
[[nodiscard]] inline bool takes_tokens(const Dims& dims, const LayerOptions& options,
                                       const Segments& segments) {
  switch (options.recurrence) {
    case Recurrence::chunked:
      return false;
    case Recurrence::token_by_token:
      return true;
    case Recurrence::automatic:
      break;
  }
  const std::int64_t elements = dims.key_dim * dims.value_dim;
  if (elements <= 64 * 64) {
    return true;
  }
  const bool continues = segments.starts_in_row() == 0;
  const bool few_tokens = segments.valid_tokens() <= 4;
  return continues && elements <= 192 * 192 &&
         (few_tokens || (dims.group() == 1 && elements <= 128 * 128));
}

}  // namespace heddle::gdn

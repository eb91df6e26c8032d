#pragma once

#include <cstddef>
#include <string_view>

#include "heddle/core/workspace.hpp"
#include "heddle/gdn/dims.hpp"
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

/// How a layer call proceeds. It changes rounding, never what is computed.
///
/// throws    validate: Error as ChunkOptions
struct LayerOptions {
  ChunkOptions chunks{};

  void validate(std::string_view where) const { chunks.validate(where); }
};

}  // namespace heddle::gdn

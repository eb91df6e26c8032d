#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/mesh/v7x.hpp"

namespace heddle::v7x {

/// How the lines of a window lie in vector memory.
enum class VmemRows : std::uint8_t {
  tiled,    ///< padded to whole tiles: 8 sublanes of 4 bytes, so 16 lines of bf16
  compact,  ///< one line a sublane: windows read a token at a time
};

/// A window or scratch array of a kernel: `count` matrices of rows x cols.
///
/// units     cols are padded to 128 lanes, rows as `layout` says
struct VmemRef {
  std::string name = {};
  std::int64_t count = 1;
  std::int64_t rows = 1;
  std::int64_t cols = 1;
  std::int64_t element_bytes = 4;
  std::int64_t buffers = 1;  ///< 2: the next window is fetched while this one is used
  VmemRows layout = VmemRows::tiled;
};

/// Bytes that a ref takes, all its buffers together.
///
/// throws    Error for an extent < 0, buffers < 1, elements that are not of 1, 2 or 4 bytes
[[nodiscard]] inline std::int64_t vmem_bytes(const VmemRef& ref) {
  constexpr const char* where = "v7x::vmem_bytes";
  const auto name = [&](const char* field) { return ref.name + "." + field; };
  require(ref.count >= 0, where, name("count"), ref.count, "must be >= 0");
  require(ref.rows >= 0, where, name("rows"), ref.rows, "must be >= 0");
  require(ref.cols >= 0, where, name("cols"), ref.cols, "must be >= 0");
  require(ref.element_bytes == 1 || ref.element_bytes == 2 || ref.element_bytes == 4, where,
          name("element_bytes"), ref.element_bytes, "must be 1, 2 or 4");
  require(ref.buffers >= 1, where, name("buffers"), ref.buffers, "must be >= 1");
  const auto padded = [](std::int64_t size, std::int64_t unit) {
    return (size + unit - 1) / unit * unit;
  };
  const std::int64_t tile = ref.layout == VmemRows::tiled ? sublanes * (4 / ref.element_bytes) : 1;
  return ref.buffers * ref.count * padded(ref.rows, tile) * padded(ref.cols, lanes) *
         ref.element_bytes;
}

/// What a kernel's arrays are held against.
struct VmemOptions {
  double factor = 0.90;  ///< of the 64 MiB that a kernel may declare
  /// What the compiler spills besides. It cannot be predicted, only measured; absent: not known.
  std::optional<std::int64_t> spill_bytes = {};
};

/// Whether a kernel's arrays fit a core's memory.
enum class VmemVerdict : std::uint8_t {
  refused,        ///< more than the limit
  declared_fits,  ///< the declared arrays fit; of the spill nothing is known
  fits,           ///< with the stated spill
};

/// What vmem_plan found.
struct VmemPlan {
  std::int64_t declared_bytes = 0;
  std::int64_t limit_bytes = 0;
  std::int64_t spill_allowance =
      0;  ///< what the limit leaves for spills; negative where it is exceeded
  VmemVerdict verdict = VmemVerdict::refused;
};

/// Adds up a kernel's arrays against the limit floor(factor * 2^26).
///
/// throws    Error for a factor outside (0, 1], a spill < 0, and as vmem_bytes()
[[nodiscard]] inline VmemPlan vmem_plan(std::span<const VmemRef> refs,
                                        const VmemOptions& options = {}) {
  constexpr const char* where = "v7x::vmem_plan";
  require(options.factor > 0 && options.factor <= 1, where, "options.factor", options.factor,
          "must be in (0, 1]");
  require(options.spill_bytes.value_or(0) >= 0, where, "options.spill_bytes",
          options.spill_bytes.value_or(0), "must be >= 0");
  VmemPlan plan;
  for (const VmemRef& ref : refs) {
    plan.declared_bytes += vmem_bytes(ref);
  }
  plan.limit_bytes = static_cast<std::int64_t>(
      std::floor(options.factor * static_cast<double>(vmem_bytes_per_device)));
  plan.spill_allowance = plan.limit_bytes - plan.declared_bytes;
  if (plan.spill_allowance >= options.spill_bytes.value_or(0)) {
    plan.verdict = options.spill_bytes ? VmemVerdict::fits : VmemVerdict::declared_fits;
  }
  return plan;
}

}  // namespace heddle::v7x

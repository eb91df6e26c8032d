#pragma once

#include <cstdint>

namespace heddle {

/// What a kernel call costs, counted and not measured: what each family's cost(dims) returns and the
/// v7x model turns into time.
///
/// units     multiply and add are one flop each; bytes are payload, read or written once
struct Cost {
  std::int64_t flops = 0;
  std::int64_t transcendentals = 0;  ///< exp and log calls
  std::int64_t bytes_read = 0;
  std::int64_t bytes_written = 0;

  friend constexpr Cost operator+(const Cost& a, const Cost& b) {
    return {.flops = a.flops + b.flops,
            .transcendentals = a.transcendentals + b.transcendentals,
            .bytes_read = a.bytes_read + b.bytes_read,
            .bytes_written = a.bytes_written + b.bytes_written};
  }
  friend constexpr bool operator==(const Cost&, const Cost&) = default;
};

}  // namespace heddle

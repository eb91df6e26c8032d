// libFuzzer target: whatever the bytes, the reader of safetensors refuses them with one line or gives
// tensors that lie inside them.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "support/safetensors.hpp"
#include "support/usage_error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace heddle::examples;
  const std::span<const std::byte> file = std::as_bytes(std::span(data, size));
  try {
    const SafetensorsHeader header = parse_safetensors(file, "fuzz");
    std::int64_t covered = header.data_offset;
    for (const SafetensorsEntry& tensor : header.tensors) {
      if (header.data_offset + tensor.begin != covered) {
        std::abort();
      }
      covered += tensor.bytes();
    }
    if (covered != static_cast<std::int64_t>(size)) {
      std::abort();
    }
  } catch (const UsageError& error) {
    const std::string line = error.what();
    if (line.empty() || line.find('\n') != std::string::npos) {
      std::abort();
    }
  }
  return 0;
}

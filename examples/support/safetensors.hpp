#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/output_file.hpp"
#include "support/tensor.hpp"
#include "support/tensor_file.hpp"

namespace heddle::examples {

/// A safetensors file: 8 bytes of header length (little endian), a JSON header, the data section.
///
/// dtypes    F64, F32, BF16, I64, I32, I16, U8; a file that holds any other is refused
/// memory    the file is mapped: files of any size, tensors of no element among them
/// throws    UsageError "<path>: ..." for whatever is not so: a header that is longer than the file or
///           100 MB, no JSON, no UTF-8 or names a tensor twice; extents that are negative or whose
///           bytes overflow; bytes that do not match dtype and shape; a data section that is not
///           covered exactly (holes, overlaps, ends before or after the file's)
[[nodiscard]] TensorFile read_safetensors(const std::filesystem::path& path);

/// One entry of a header: a tensor and where it lies in the data section.
struct SafetensorsEntry : TensorInfo {
  std::int64_t begin = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;  ///< by place in the data section
  Metadata metadata;
  std::int64_t data_offset = 0;  ///< of the data section in the file
};

/// The checks of read_safetensors on bytes in memory; `where` opens each message.
[[nodiscard]] SafetensorsHeader parse_safetensors(std::span<const std::byte> file,
                                                  const std::string& where);

/// Writes a safetensors file tensor by tensor, so that it need not fit into memory. The header is
/// padded to 8 bytes; tensors follow in the order given, without gaps.
///
/// throws    as OutputFile; heddle::Error for a tensor name that appears twice or more or fewer bytes
///           than the tensors have
class SafetensorsWriter {
 public:
  SafetensorsWriter(const OutputPath& path, const std::vector<TensorInfo>& tensors,
                    const Metadata& metadata);

  /// The next bytes of the data section, in pieces of any size.
  void write(std::span<const std::byte> bytes);
  template <class T>
  void write(std::span<const T> elements) {
    write(std::as_bytes(elements));
  }
  void commit();

 private:
  OutputFile file_;
  std::int64_t remaining_ = 0;
};

void write_safetensors(const std::filesystem::path& path, const std::vector<Tensor>& tensors,
                       const Metadata& metadata);

}  // namespace heddle::examples

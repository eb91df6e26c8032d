#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "support/tensor.hpp"
#include "support/tensor_file.hpp"

namespace heddle::examples {

/// A folder of .npy files: NAME.npy holds the tensor NAME. `op.json`, where there is one, gives the
/// metadata (an object; numbers and booleans become text, booleans 1 / 0) and, as "bf16", the names
/// whose 16-bit unsigned elements are bf16 bit patterns.
///
/// dtypes    f8, f4, i8, i4, i2, u1; b1 (NumPy's bool) as U8; u2 for names under "bf16" alone
/// memory    files are mapped
/// throws    UsageError "<file>: ..." for a header of another version than 1 or 2, big endian, Fortran
///           order, another dtype, extents that overflow, fewer or more bytes than the shape has
[[nodiscard]] TensorFile read_npy_folder(const std::filesystem::path& path);

struct NpyHeader {
  std::string descr;  ///< "<f4"
  Shape shape;
  std::int64_t data_offset = 0;
};

/// The header of an .npy file; `where` opens each message.
[[nodiscard]] NpyHeader parse_npy_header(std::span<const std::byte> file, const std::string& where);

/// Writes a folder of NAME.npy files (version 1.0), renamed into place whole.
///
/// dtypes    all but BF16, which NumPy does not have
/// throws    as OutputFolder; heddle::Error for BF16 or a name that holds a slash
void write_npy_folder(const std::filesystem::path& path, const std::vector<Tensor>& tensors);

}  // namespace heddle::examples

#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/mapped_file.hpp"
#include "support/tensor.hpp"

namespace heddle::examples {

/// Named strings that go with a file's tensors (`__metadata__` of safetensors, `op.json` of a folder).
using Metadata = std::map<std::string, std::string>;

/// The tensors of a file or folder that was read, in their order there. Elements stay in the mapped
/// file until they are touched.
///
/// order     find() keeps what it has aligned: not for two threads at once
class TensorFile {
 public:
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] const Metadata& metadata() const { return metadata_; }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const { return tensors_; }

  /// The tensor of that name. Where the file holds it off the alignment of its element, a copy of it
  /// that lives as long as this object.
  [[nodiscard]] std::optional<TensorView> find(std::string_view name) const;

  /// find(name), or UsageError "<path>: tensor 'name' is missing".
  [[nodiscard]] TensorView at(std::string_view name) const;

  // For the readers.
  explicit TensorFile(std::string path) : path_(std::move(path)) {}
  void set_metadata(Metadata metadata) { metadata_ = std::move(metadata); }
  /// Takes the file over; add() refers to its bytes.
  std::span<const std::byte> keep(MappedFile file);
  void add(TensorInfo info, const std::byte* data);

 private:
  std::string path_;
  Metadata metadata_;
  std::vector<MappedFile> files_;
  std::vector<TensorInfo> tensors_;
  std::vector<const std::byte*> data_;  // one a tensor
  std::map<std::string, std::size_t, std::less<>> index_;
  mutable std::map<std::size_t, std::vector<std::byte>> aligned_;
};

/// A .safetensors file or a folder of .npy files, whichever `path` is.
[[nodiscard]] TensorFile read_tensors(const std::filesystem::path& path);

/// Writes the form that the name asks for: a file where it ends in .safetensors, else a folder.
void write_tensors(const std::filesystem::path& path, const std::vector<Tensor>& tensors,
                   const Metadata& metadata);

/// Refuses a path that write_tensors could not write.
void require_tensor_output(const std::filesystem::path& path);

}  // namespace heddle::examples

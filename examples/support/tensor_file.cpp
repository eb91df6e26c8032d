#include "support/tensor_file.hpp"

#include <cstdint>
#include <utility>

#include "support/npy.hpp"
#include "support/output_file.hpp"
#include "support/safetensors.hpp"
#include "support/usage_error.hpp"

namespace heddle::examples {
namespace {

bool is_safetensors_name(const std::filesystem::path& path) {
  return path.extension() == ".safetensors";
}

}  // namespace

std::optional<TensorView> TensorFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) {
    return std::nullopt;
  }
  const std::size_t position = found->second;
  TensorView view;
  static_cast<TensorInfo&>(view) = tensors_[position];
  view.data = data_[position];
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if (address % static_cast<std::uintptr_t>(dtype_bytes(view.dtype)) != 0) {
    auto [copy, is_new] = aligned_.try_emplace(position);
    if (is_new) {
      copy->second.assign(view.data, view.data + view.bytes());
    }
    view.data = copy->second.data();
  }
  return view;
}

TensorView TensorFile::at(std::string_view name) const {
  const std::optional<TensorView> found = find(name);
  if (!found) {
    throw UsageError(path_ + ": tensor '" + std::string(name) + "' is missing");
  }
  return *found;
}

std::span<const std::byte> TensorFile::keep(MappedFile file) {
  files_.push_back(std::move(file));
  return files_.back().bytes();
}

void TensorFile::add(TensorInfo info, const std::byte* data) {
  index_.emplace(info.name, tensors_.size());
  tensors_.push_back(std::move(info));
  data_.push_back(data);
}

TensorFile read_tensors(const std::filesystem::path& path) {
  return std::filesystem::is_directory(path) ? read_npy_folder(path) : read_safetensors(path);
}

void write_tensors(const std::filesystem::path& path, const std::vector<Tensor>& tensors,
                   const Metadata& metadata) {
  if (is_safetensors_name(path)) {
    write_safetensors(path, tensors, metadata);
  } else {
    write_npy_folder(path, tensors);
  }
}

void require_tensor_output(const std::filesystem::path& path) {
  if (is_safetensors_name(path)) {
    require_output_file(path);
  } else {
    require_output_folder(path);
  }
}

}  // namespace heddle::examples

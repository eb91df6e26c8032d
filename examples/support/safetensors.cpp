#include "support/safetensors.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "heddle/core/error.hpp"
#include "support/json_text.hpp"
#include "support/usage_error.hpp"

namespace heddle::examples {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tensors are mapped as they lie in the file, which is little endian");

constexpr std::int64_t length_bytes = 8;
constexpr std::uint64_t longest_header = 100'000'000;  // the limit of the format's own library
constexpr std::string_view metadata_name = "__metadata__";

using SortedJson = nlohmann::json;

std::string excerpt(const SortedJson& value) {
  return shown(Json(value));
}

/// A non-negative integer that fits I64.
std::optional<std::int64_t> as_extent(const SortedJson& value) {
  if (!value.is_number_unsigned()) {
    return std::nullopt;
  }
  const auto number = value.get<std::uint64_t>();
  if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return std::nullopt;
  }
  return static_cast<std::int64_t>(number);
}

Metadata parse_metadata(const SortedJson& value, const std::string& where) {
  if (!value.is_object()) {
    throw UsageError(where + ": __metadata__ must be an object of strings");
  }
  Metadata metadata;
  for (const auto& [name, text] : value.items()) {
    if (!text.is_string()) {
      throw UsageError(where + ": __metadata__ entry '" + name + "' = " + excerpt(text) +
                       ": must be a string");
    }
    metadata.emplace(name, text.get<std::string>());
  }
  return metadata;
}

struct Placed {
  SafetensorsEntry entry;
  std::int64_t end = 0;
};

Placed parse_entry(const std::string& name, const SortedJson& value, std::int64_t data_bytes,
                   const std::string& where) {
  const std::string tensor = where + ": tensor '" + name + "'";
  if (!value.is_object()) {
    throw UsageError(tensor + ": must be an object");
  }
  for (const auto& [member, ignored] : value.items()) {
    if (member != "dtype" && member != "shape" && member != "data_offsets") {
      throw UsageError(tensor + ": unknown member '" + member +
                       "', must be dtype, shape and data_offsets");
    }
  }
  for (const char* member : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(member)) {
      throw UsageError(tensor + ": " + member + " is missing");
    }
  }
  Placed placed;
  placed.entry.name = name;

  const SortedJson& dtype = value["dtype"];
  const std::optional<Dtype> known =
      dtype.is_string() ? dtype_named(dtype.get_ref<const std::string&>()) : std::nullopt;
  if (!known) {
    throw UsageError(tensor + ": dtype = " + excerpt(dtype) + ": must be one of " + dtype_names());
  }
  placed.entry.dtype = *known;

  const SortedJson& shape = value["shape"];
  const std::string shape_rule = tensor + ": shape = " + excerpt(shape) + ": ";
  if (!shape.is_array()) {
    throw UsageError(shape_rule + "must be an array of integers >= 0");
  }
  for (const SortedJson& extent : shape) {
    const std::optional<std::int64_t> number = as_extent(extent);
    if (!number) {
      throw UsageError(shape_rule + "must be an array of integers >= 0 that fit I64");
    }
    placed.entry.shape.push_back(*number);
  }
  const std::optional<std::int64_t> count = checked_element_count(placed.entry.shape);
  if (!count || *count > std::numeric_limits<std::int64_t>::max() / dtype_bytes(*known)) {
    throw UsageError(shape_rule + "its number of bytes does not fit I64");
  }

  const SortedJson& offsets = value["data_offsets"];
  const std::string offsets_rule = tensor + ": data_offsets = " + excerpt(offsets) + ": ";
  std::optional<std::int64_t> begin;
  std::optional<std::int64_t> end;
  if (offsets.is_array() && offsets.size() == 2) {
    begin = as_extent(offsets[0]);
    end = as_extent(offsets[1]);
  }
  if (!begin || !end) {
    throw UsageError(offsets_rule + "must be two integers >= 0 that fit I64");
  }
  if (*begin > *end) {
    throw UsageError(offsets_rule + "must not end before they begin");
  }
  if (*end > data_bytes) {
    throw UsageError(offsets_rule + "must lie in the data section of " +
                     std::to_string(data_bytes) + " bytes");
  }
  if (*end - *begin != placed.entry.bytes()) {
    throw UsageError(offsets_rule + "must hold the " + std::to_string(placed.entry.bytes()) +
                     " bytes of " + std::string(dtype_name(*known)) + " " +
                     shape_text(placed.entry.shape));
  }
  placed.entry.begin = *begin;
  placed.end = *end;
  return placed;
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& where) {
  if (file.size() < length_bytes) {
    throw UsageError(where + ": is " + std::to_string(file.size()) +
                     " bytes long: must be a safetensors file, which begins with 8 bytes of header "
                     "length");
  }
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
  if (header_bytes > longest_header) {
    throw UsageError(where + ": header length = " + std::to_string(header_bytes) +
                     ": must be at most " + std::to_string(longest_header));
  }
  if (header_bytes > file.size() - length_bytes) {
    throw UsageError(where + ": header length = " + std::to_string(header_bytes) +
                     ": must not exceed the " + std::to_string(file.size() - length_bytes) +
                     " bytes that follow it");
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + length_bytes,
                              header_bytes);
  if (text.empty() || text.front() != '{') {
    throw UsageError(where + ": header must begin with '{'");
  }
  const SortedJson json = parse_sorted_json(text, where + ": header");

  SafetensorsHeader header;
  header.data_offset = length_bytes + static_cast<std::int64_t>(header_bytes);
  const std::int64_t data_bytes = static_cast<std::int64_t>(file.size()) - header.data_offset;
  std::vector<Placed> placed;
  for (const auto& [name, value] : json.items()) {
    if (name == metadata_name) {
      header.metadata = parse_metadata(value, where);
    } else {
      placed.push_back(parse_entry(name, value, data_bytes, where));
    }
  }
  std::stable_sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
    return std::tie(a.entry.begin, a.end) < std::tie(b.entry.begin, b.end);
  });
  std::int64_t covered = 0;
  for (Placed& tensor : placed) {
    if (tensor.entry.begin != covered) {
      const bool hole = tensor.entry.begin > covered;
      throw UsageError(
          where + ": tensor '" + tensor.entry.name + "': begins at byte " +
          std::to_string(tensor.entry.begin) + " of the data section: must begin at " +
          std::to_string(covered) +
          (hole ? ", the data section has a hole" : ", it overlaps the tensor before it"));
    }
    covered = tensor.end;
    header.tensors.push_back(std::move(tensor.entry));
  }
  if (covered != data_bytes) {
    throw UsageError(where + ": " + std::to_string(data_bytes - covered) +
                     " bytes follow the last tensor: must be none");
  }
  return header;
}

TensorFile read_safetensors(const std::filesystem::path& path) {
  TensorFile result(path.string());
  const std::span<const std::byte> bytes = result.keep(MappedFile(path));
  SafetensorsHeader header = parse_safetensors(bytes, path.string());
  result.set_metadata(std::move(header.metadata));
  for (SafetensorsEntry& entry : header.tensors) {
    const std::byte* const data = bytes.data() + header.data_offset + entry.begin;
    result.add(std::move(entry), data);
  }
  return result;
}

SafetensorsWriter::SafetensorsWriter(const OutputPath& path, const std::vector<TensorInfo>& tensors,
                                     const Metadata& metadata)
    : file_(path) {
  Json header = Json::object();
  if (!metadata.empty()) {
    header[std::string(metadata_name)] = metadata;
  }
  // Put together member by member: an ordered object would compare each name with all before it.
  std::string text = metadata.empty() ? "{" : header.dump();
  if (!metadata.empty()) {
    text.pop_back();
  }
  std::unordered_set<std::string> names = {std::string(metadata_name)};
  for (const TensorInfo& tensor : tensors) {
    require(names.insert(tensor.name).second, "SafetensorsWriter", "name", tensor.name,
            "must be the name of one tensor alone");
    Json entry;
    entry["dtype"] = dtype_name(tensor.dtype);
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {remaining_, remaining_ + tensor.bytes()};
    text += (text.size() == 1 ? "" : ",") + Json(tensor.name).dump() + ":" + entry.dump();
    remaining_ += tensor.bytes();
  }
  text += "}";
  text.resize((text.size() + length_bytes - 1) / length_bytes * length_bytes, ' ');
  const std::uint64_t length = text.size();
  file_.write(std::as_bytes(std::span(&length, 1)));
  file_.write(text);
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  const auto count = static_cast<std::int64_t>(bytes.size());
  require(count <= remaining_, "SafetensorsWriter::write", "bytes.size", count,
          "must be at most the bytes that are left of the tensors (" + std::to_string(remaining_) +
              ")");
  file_.write(bytes);
  remaining_ -= count;
}

void SafetensorsWriter::commit() {
  require(remaining_ == 0, "SafetensorsWriter::commit", "missing bytes", remaining_, "must be 0");
  file_.commit();
}

void write_safetensors(const std::filesystem::path& path, const std::vector<Tensor>& tensors,
                       const Metadata& metadata) {
  SafetensorsWriter writer(path, std::vector<TensorInfo>(tensors.begin(), tensors.end()), metadata);
  for (const Tensor& tensor : tensors) {
    writer.write(std::span<const std::byte>(tensor.storage));
  }
  writer.commit();
}

}  // namespace heddle::examples

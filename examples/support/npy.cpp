#include "support/npy.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "heddle/core/error.hpp"
#include "support/json_text.hpp"
#include "support/output_file.hpp"
#include "support/usage_error.hpp"

namespace heddle::examples {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view magic = "\x93NUMPY";
constexpr const char* attributes_name = "op.json";
constexpr const char* extension = ".npy";

struct NpyDtype {
  std::string_view descr;
  Dtype dtype;
};

// Written in the first spelling of a dtype.
constexpr NpyDtype npy_dtypes[] = {
    {"<f8", Dtype::f64}, {"<f4", Dtype::f32}, {"<i8", Dtype::i64}, {"<i4", Dtype::i32},
    {"<i2", Dtype::i16}, {"|u1", Dtype::u8},  {"|b1", Dtype::u8},
};

/// Reads the Python literal {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }.
class LiteralReader {
 public:
  LiteralReader(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  /// True, and past it, where the text goes on with `token`.
  bool take(std::string_view token) {
    skip_space();
    if (text_.substr(position_, token.size()) != token) {
      return false;
    }
    position_ += token.size();
    return true;
  }

  void expect(std::string_view token) {
    if (!take(token)) {
      refuse();
    }
  }

  std::string quoted() {
    skip_space();
    const char quote = position_ < text_.size() ? text_[position_] : '\0';
    const std::size_t end =
        quote == '\'' || quote == '"' ? text_.find(quote, position_ + 1) : std::string_view::npos;
    if (end == std::string_view::npos) {
      refuse();
    }
    std::string result(text_.substr(position_ + 1, end - position_ - 1));
    position_ = end + 1;
    return result;
  }

  std::int64_t integer() {
    skip_space();
    std::int64_t value = 0;
    const char* const first = text_.data() + position_;
    const auto [last, error] = std::from_chars(first, text_.data() + text_.size(), value);
    if (error != std::errc{}) {
      refuse();
    }
    position_ += static_cast<std::size_t>(last - first);
    return value;
  }

  bool at_end() {
    skip_space();
    return position_ == text_.size();
  }

  [[noreturn]] void refuse() const {
    throw UsageError(where_ + ": its header is no NumPy array header: " + shown(Json(visible())));
  }

 private:
  void skip_space() {
    while (position_ < text_.size() &&
           std::string_view(" \n\t").find(text_[position_]) != std::string_view::npos) {
      ++position_;
    }
  }

  [[nodiscard]] std::string visible() const {
    const std::size_t last = text_.find_last_not_of(" \n");
    return std::string(text_.substr(0, last == std::string_view::npos ? 0 : last + 1));
  }

  std::string_view text_;
  std::string where_;
  std::size_t position_ = 0;
};

Shape parse_shape(LiteralReader& reader) {
  Shape shape;
  reader.expect("(");
  while (!reader.take(")")) {
    shape.push_back(reader.integer());
    if (!reader.take(",")) {
      reader.expect(")");
      break;
    }
  }
  return shape;
}

std::string descr_of(Dtype dtype) {
  for (const NpyDtype& known : npy_dtypes) {
    if (known.dtype == dtype) {
      return std::string(known.descr);
    }
  }
  return {};
}

Dtype dtype_of_descr(const std::string& descr, bool is_bf16, const std::string& where) {
  if (is_bf16) {
    if (descr != "<u2") {
      throw UsageError(where + ": dtype '" + descr +
                       "': must be '<u2' (bit patterns), for op.json names it under \"bf16\"");
    }
    return Dtype::bf16;
  }
  for (const NpyDtype& known : npy_dtypes) {
    if (known.descr == descr) {
      return known.dtype;
    }
  }
  std::string rule = "must be one of";
  for (const NpyDtype& known : npy_dtypes) {
    rule += " " + std::string(known.descr);
  }
  if (descr == "<u2") {
    rule += " (bf16 bit patterns are named under \"bf16\" in op.json)";
  } else if (descr.starts_with('>')) {
    rule += " (little endian)";
  }
  throw UsageError(where + ": dtype '" + descr + "': " + rule);
}

/// A value of op.json as the text that safetensors would hold.
std::string attribute_text(const Json& value, const std::string& name, const std::string& where) {
  if (value.is_string()) {
    return value.get<std::string>();
  }
  if (value.is_boolean()) {
    return value.get<bool>() ? "1" : "0";
  }
  if (value.is_number_float()) {
    return error_text(value.get<double>());
  }
  if (value.is_number()) {
    return value.dump();
  }
  throw UsageError(where + ": " + name + " = " + shown(value) +
                   ": must be a string, a number or a boolean");
}

struct FolderAttributes {
  Metadata metadata;
  std::set<std::string> bf16;
};

FolderAttributes read_attributes(const fs::path& path) {
  const MappedFile file(path);
  const std::string where = path.string();
  const Json json = parse_json(file.text(), where);
  if (!json.is_object()) {
    throw UsageError(where + ": must be an object");
  }
  FolderAttributes result;
  for (const auto& [name, value] : json.items()) {
    if (name != "bf16") {
      result.metadata.emplace(name, attribute_text(value, name, where));
      continue;
    }
    const bool names = value.is_array() && std::all_of(value.begin(), value.end(),
                                                       [](const Json& x) { return x.is_string(); });
    if (!names) {
      throw UsageError(where + ": bf16 = " + shown(value) + ": must be an array of tensor names");
    }
    for (const Json& tensor : value) {
      result.bf16.insert(tensor.get<std::string>());
    }
  }
  return result;
}

std::string header_of(const TensorInfo& tensor) {
  std::string shape = "(";
  for (const std::int64_t extent : tensor.shape) {
    shape += std::to_string(extent) + ", ";
  }
  if (tensor.shape.size() > 1) {
    shape.resize(shape.size() - 2);
  } else if (tensor.shape.size() == 1) {
    shape.pop_back();  // "(3,)"
  }
  std::string dictionary = "{'descr': '" + descr_of(tensor.dtype) +
                           "', 'fortran_order': False, 'shape': " + shape + "), }";
  // Magic, version, length and dictionary fill a multiple of 64 bytes, so that the data is aligned.
  constexpr std::size_t fixed = 10;
  const std::size_t total = (fixed + dictionary.size() + 1 + 63) / 64 * 64;
  dictionary.resize(total - fixed - 1, ' ');
  dictionary += '\n';
  const std::size_t length = dictionary.size();
  std::string header(magic);
  header += '\x01';
  header += '\0';
  header += static_cast<char>(length & 0xFFU);
  header += static_cast<char>(length >> 8U);
  return header + dictionary;
}

}  // namespace

NpyHeader parse_npy_header(std::span<const std::byte> file, const std::string& where) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  if (text.size() < 10 || !text.starts_with(magic)) {
    throw UsageError(where + ": must be a NumPy file, which begins with \\x93NUMPY");
  }
  const int major = static_cast<unsigned char>(text[6]);
  if (major != 1 && major != 2) {
    throw UsageError(where + ": version " + std::to_string(major) + "." +
                     std::to_string(static_cast<unsigned char>(text[7])) + ": must be 1.0 or 2.0");
  }
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  const std::size_t header_begin = 8 + length_bytes;
  std::uint32_t length = 0;
  if (text.size() >= header_begin) {
    std::memcpy(&length, text.data() + 8, length_bytes);
  }
  if (text.size() < header_begin || length > text.size() - header_begin) {
    throw UsageError(where + ": its header ends after the file");
  }

  NpyHeader header;
  header.data_offset = static_cast<std::int64_t>(header_begin + length);
  LiteralReader reader(text.substr(header_begin, length), where);
  bool fortran_order = false;
  std::set<std::string> members;
  reader.expect("{");
  while (!reader.take("}")) {
    const std::string member = reader.quoted();
    if (!members.insert(member).second) {
      reader.refuse();
    }
    reader.expect(":");
    if (member == "descr") {
      header.descr = reader.quoted();
    } else if (member == "fortran_order") {
      fortran_order = reader.take("True");
      if (!fortran_order) {
        reader.expect("False");
      }
    } else if (member == "shape") {
      header.shape = parse_shape(reader);
    } else {
      reader.refuse();
    }
    if (!reader.take(",")) {
      reader.expect("}");
      break;
    }
  }
  if (!reader.at_end() || members.size() != 3) {
    reader.refuse();
  }
  if (fortran_order) {
    throw UsageError(where + ": is in Fortran order: must be in C order (numpy.ascontiguousarray)");
  }
  return header;
}

TensorFile read_npy_folder(const fs::path& path) {
  FolderAttributes attributes;
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
    if (entry.path().filename() == attributes_name) {
      attributes = read_attributes(entry.path());
    } else if (entry.path().extension() == extension) {
      files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());

  TensorFile result(path.string());
  for (const fs::path& file : files) {
    const std::string where = file.string();
    const std::span<const std::byte> bytes = result.keep(MappedFile(file));
    const NpyHeader header = parse_npy_header(bytes, where);
    TensorInfo info;
    info.name = file.stem().string();
    info.dtype = dtype_of_descr(header.descr, attributes.bf16.erase(info.name) > 0, where);
    info.shape = header.shape;
    const std::optional<std::int64_t> count = checked_element_count(info.shape);
    if (!count || *count > std::numeric_limits<std::int64_t>::max() / dtype_bytes(info.dtype)) {
      throw UsageError(where + ": shape " + shape_text(info.shape) +
                       ": must have extents >= 0 and a number of bytes that fits I64");
    }
    const std::int64_t held = static_cast<std::int64_t>(bytes.size()) - header.data_offset;
    if (held != info.bytes()) {
      throw UsageError(where + ": holds " + std::to_string(held) +
                       " bytes of data: must hold the " + std::to_string(info.bytes()) + " of " +
                       header.descr + " " + shape_text(info.shape));
    }
    result.add(std::move(info), bytes.data() + header.data_offset);
  }
  if (!attributes.bf16.empty()) {
    throw UsageError((path / attributes_name).string() + ": bf16 names '" +
                     *attributes.bf16.begin() + "', and there is no such .npy file");
  }
  result.set_metadata(std::move(attributes.metadata));
  return result;
}

void write_npy_folder(const fs::path& path, const std::vector<Tensor>& tensors) {
  constexpr const char* where = "write_npy_folder";
  for (const Tensor& tensor : tensors) {
    require(!descr_of(tensor.dtype).empty(), where, tensor.name, dtype_name(tensor.dtype),
            "NumPy has no such dtype");
    require(tensor.name.find('/') == std::string::npos && !tensor.name.empty(), where, "name",
            tensor.name, "must be a file name");
  }
  OutputFolder folder(path);
  for (const Tensor& tensor : tensors) {
    OutputFile file(folder.file(tensor.name + extension));
    file.write(header_of(tensor));
    file.write(std::span<const std::byte>(tensor.storage));
    file.commit();
  }
  folder.commit();
}

}  // namespace heddle::examples

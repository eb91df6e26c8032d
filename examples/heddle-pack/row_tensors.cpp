#include "heddle-pack/row_tensors.hpp"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/core/view.hpp"
#include "heddle/packing/packed_chunk.hpp"
#include "heddle/packing/row_writer.hpp"
#include "support/safetensors.hpp"
#include "support/tensor.hpp"

namespace heddle::pack {
namespace {

std::vector<std::int32_t> segment_rows(const packing::SegmentTable& table) {
  std::vector<std::int32_t> rows;
  for (std::int64_t row = 0; row < table.rows(); ++row) {
    for (const packing::Segment& segment : table.row(row)) {
      rows.insert(rows.end(), {static_cast<std::int32_t>(row), segment.start, segment.len,
                               segment.prompt_len, segment.item_index});
    }
  }
  return rows;
}

examples::Metadata metadata_of(const packing::SegmentTable& table,
                               const packing::PackOptions& options) {
  std::string shifts;
  for (const std::int32_t shift : table.shifts) {
    shifts += (shifts.empty() ? "" : " ") + std::to_string(shift);
  }
  return {{"budget", std::to_string(options.budget)},
          {"pack_size", std::to_string(options.pack_size)},
          {"segment_align", std::to_string(options.segment_align_multiple)},
          {"pad_position", std::string(name(options.pad_position))},
          {"pad_align", std::to_string(options.pad_align)},
          {"pad_id", std::to_string(options.pad_id)},
          {"num_segments", std::to_string(options.num_segments())},
          {"chunks", std::to_string(table.rows() / options.pack_size)},
          {"shifts", shifts}};
}

/// Names and shapes first, so that the header stands; then the same arrays in the same order.
class ArrayList {
 public:
  template <class T>
  void add(std::string_view name, examples::Shape shape, const T* data) {
    examples::TensorView tensor;
    tensor.name = std::string(name);
    tensor.dtype = examples::dtype_of<T>();
    tensor.shape = std::move(shape);
    tensor.data = reinterpret_cast<const std::byte*>(data);
    tensors_.push_back(tensor);
  }

  void write(const std::filesystem::path& path, const examples::Metadata& metadata) const {
    examples::SafetensorsWriter writer(
        path, std::vector<examples::TensorInfo>(tensors_.begin(), tensors_.end()), metadata);
    for (const examples::TensorView& tensor : tensors_) {
      writer.write(tensor.raw());
    }
    writer.commit();
  }

 private:
  std::vector<examples::TensorView> tensors_;
};

}  // namespace

void write_rows_file(const std::filesystem::path& path, std::span<const packing::Rollout> items,
                     const packing::SegmentTable& table, const packing::PackOptions& options) {
  const packing::RowRange all{.first = 0, .count = table.rows()};
  const packing::ChunkDims dims = packing::chunk_dims(items, table, all, options.budget);
  packing::ChunkBuffers buffers;
  const packing::ChunkArrays arrays = buffers.prepare(dims);
  packing::write_rows(items, table, all, options.pad_id, arrays);

  const examples::Shape rows{dims.rows, dims.tokens};
  ArrayList list;
  list.add("ids", rows, arrays.ids.data());
  list.add("prompt_mask", rows, arrays.prompt_mask.data());
  list.add("completion_mask", rows, arrays.completion_mask.data());
  list.add("advantages", rows, arrays.advantages.data());
  list.add("segment_ids", rows, arrays.segment_ids.data());
  list.add("segment_positions", rows, arrays.segment_positions.data());
  for (const packing::PerTokenField field : packing::per_token_fields) {
    if (dims.carried[field]) {
      list.add(name(field), rows, arrays.per_token[field].data());
    }
  }
  if (dims.layers > 0) {
    list.add("routed_experts", {dims.rows, dims.tokens, dims.layers, dims.top_k},
             arrays.routed_experts.data());
  }
  list.add("num_real_segments", {dims.rows}, arrays.num_real_segments.data());
  const std::vector<std::int32_t> segments = segment_rows(table);
  list.add("segment_table", {static_cast<std::int64_t>(table.segments.size()), 5}, segments.data());
  list.write(path, metadata_of(table, options));
}

}  // namespace heddle::pack

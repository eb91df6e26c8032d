#include "heddle-train/checkpoint.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "support/json_text.hpp"
#include "support/mapped_file.hpp"
#include "support/output_file.hpp"
#include "support/safetensors.hpp"
#include "support/tensor.hpp"
#include "support/usage_error.hpp"

namespace heddle::train {
namespace {

namespace fs = std::filesystem;
using examples::Dtype;
using examples::Json;
using examples::TensorFile;
using examples::TensorInfo;
using examples::TensorView;
using examples::UsageError;

constexpr const char* whole_name = "model.safetensors";
constexpr const char* index_name = "model.safetensors.index.json";

// The files of a checkpoint and which of them holds each tensor.
class TensorFolder {
 public:
  explicit TensorFolder(const fs::path& folder) : path_(folder.string()) {
    const fs::path index = folder / index_name;
    if (fs::exists(folder / whole_name) || !fs::exists(index)) {
      add_file(folder / whole_name);
      return;
    }
    const std::map<std::string, std::string> file_of = read_index(index);
    std::set<std::string> files;
    for (const auto& [tensor, file] : file_of) {
      files.insert(file);
    }
    for (const std::string& file : files) {
      const std::size_t first = names_.size();
      add_file(folder / file);
      for (std::size_t i = first; i < names_.size(); ++i) {
        const auto listed = file_of.find(names_[i]);
        if (listed == file_of.end() || listed->second != file) {
          throw UsageError((folder / file).string() + ": tensor '" + names_[i] + "' is not what " +
                           index_name + " lists for this file");
        }
      }
    }
    for (const auto& [tensor, file] : file_of) {
      if (!where_.contains(tensor)) {
        throw UsageError((folder / file).string() + ": tensor '" + tensor + "' is missing, which " +
                         index_name + " lists for this file");
      }
    }
  }

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] bool has(const std::string& name) const { return where_.contains(name); }

  // Takes a tensor out: what is left at the end belongs to no model of this kind.
  [[nodiscard]] TensorView take(const TensorPlace& place) {
    const auto found = where_.find(place.name);
    if (found == where_.end()) {
      throw UsageError(path_ + ": tensor '" + place.name + "' is missing");
    }
    const TensorFile& file = files_[found->second];
    const TensorView tensor = file.at(place.name);
    const std::string what = file.path() + ": tensor '" + place.name + "' ";
    if (!examples::is_floating(tensor.dtype)) {
      throw UsageError(what + "is " + std::string(examples::dtype_name(tensor.dtype)) +
                       ": must be F32, BF16 or F64");
    }
    if (tensor.shape != place.shape) {
      throw UsageError(what + "is " + examples::shape_text(tensor.shape) + ": must be " +
                       examples::shape_text(place.shape));
    }
    where_.erase(found);
    return tensor;
  }

  void require_all_taken() const {
    for (const std::string& name : names_) {
      const auto left = where_.find(name);
      if (left != where_.end()) {
        throw UsageError(files_[left->second].path() + ": tensor '" + name +
                         "' is none of this model's");
      }
    }
  }

 private:
  void add_file(const fs::path& path) {
    files_.push_back(examples::read_safetensors(path));
    for (const TensorInfo& tensor : files_.back().tensors()) {
      if (!where_.emplace(tensor.name, files_.size() - 1).second) {
        throw UsageError(path.string() + ": tensor '" + tensor.name + "' is in another file too");
      }
      names_.push_back(tensor.name);
    }
  }

  static std::map<std::string, std::string> read_index(const fs::path& path) {
    const Json json = examples::parse_json(examples::MappedFile(path).text(), path.string());
    const auto map = json.is_object() ? json.find("weight_map") : json.end();
    if (map == json.end() || !map->is_object() || map->empty()) {
      throw UsageError(path.string() + ": weight_map must be an object of tensor and file names");
    }
    std::map<std::string, std::string> file_of;
    for (const auto& [tensor, file] : map->items()) {
      const std::string name = file.is_string() ? file.get<std::string>() : std::string();
      if (name.empty() || fs::path(name).filename() != name) {
        throw UsageError(path.string() + ": weight_map of '" + tensor + "' = " +
                         examples::shown(file) + ": must be the name of a file beside the index");
      }
      file_of.emplace(tensor, name);
    }
    return file_of;
  }

  std::string path_;
  std::vector<TensorFile> files_;
  std::map<std::string, std::size_t> where_;
  std::vector<std::string> names_;  // in the order of the files
};

struct PlacedTensor {
  TensorPlace place;
  TensorView tensor;
};

// Every tensor of the model, none of another.
std::vector<PlacedTensor> find_tensors(TensorFolder& folder, const ParameterLayout& layout) {
  std::vector<PlacedTensor> found;
  const auto take = [&](const TensorPlace& place) { found.push_back({place, folder.take(place)}); };
  for (const TensorPlace& place : layout.tensors()) {
    const std::vector<TensorPlace> parts = layout.one_by_one(place);
    if (!parts.empty() && !folder.has(place.name) && folder.has(parts.front().name)) {
      std::for_each(parts.begin(), parts.end(), take);
    } else {
      take(place);
    }
  }
  folder.require_all_taken();
  return found;
}

}  // namespace

examples::ModelConfig read_config(const fs::path& folder) {
  const fs::path path = folder / "config.json";
  examples::ModelConfig config = examples::read_model_config(path);
  if (config.tie_word_embeddings) {
    throw UsageError(path.string() + ": tie_word_embeddings = true: must be false");
  }
  return config;
}

ModelDims model_dims(const examples::ModelConfig& config) {
  return {.vocab = config.vocab_size,
          .hidden = config.hidden_size,
          .layers = config.num_hidden_layers,
          .key_heads = config.linear_num_key_heads,
          .value_heads = config.linear_num_value_heads,
          .key_dim = config.linear_key_head_dim,
          .value_dim = config.linear_value_head_dim,
          .conv_width = config.linear_conv_kernel_dim,
          .experts = config.num_experts,
          .experts_per_token = config.num_experts_per_tok,
          .expert_dim = config.moe_intermediate_size,
          .shared_dim = config.shared_expert_intermediate_size,
          .norm_eps = config.rms_norm_eps};
}

examples::ModelConfig default_model_config() {
  examples::ModelConfig config;
  config.vocab_size = 259;  // bytes, bos, eos, pad
  config.hidden_size = 96;
  config.num_hidden_layers = 2;
  config.linear_num_key_heads = 2;
  config.linear_num_value_heads = 4;
  config.linear_key_head_dim = 16;
  config.linear_value_head_dim = 16;
  config.linear_conv_kernel_dim = 4;
  config.num_experts = 8;
  config.num_experts_per_tok = 2;
  config.moe_intermediate_size = 32;
  config.shared_expert_intermediate_size = 32;
  config.bos_token_id = 256;
  config.eos_token_id = 257;
  config.pad_token_id = 258;
  return config;
}

template <Accumulator A>
std::vector<A> load_parameters(const fs::path& folder, const ParameterLayout& layout) {
  TensorFolder tensors(folder);
  // All of them before the first is copied: a config.json that does not belong to the tensors may ask
  // for more parameters than there is memory.
  const std::vector<PlacedTensor> found = find_tensors(tensors, layout);
  std::vector<A> parameters(static_cast<std::size_t>(layout.size()));
  for (const PlacedTensor& each : found) {
    examples::with_type(each.tensor.dtype, [&](auto stored) {
      scatter(each.place, each.tensor.values<decltype(stored)>(), std::span<A>(parameters));
    });
  }
  return parameters;
}

template <Accumulator A>
void save_checkpoint(const fs::path& folder, const examples::ModelConfig& config,
                     const ParameterLayout& layout, const std::vector<A>& parameters) {
  constexpr Dtype dtype = examples::dtype_of<A>();
  examples::OutputFolder output(folder);
  std::vector<TensorInfo> infos;
  for (const TensorPlace& place : layout.tensors()) {
    infos.push_back({.name = place.name, .dtype = dtype, .shape = place.shape});
  }
  examples::SafetensorsWriter writer(output.file(whole_name), infos, {{"format", "pt"}});
  std::vector<A> tensor;
  for (const TensorPlace& place : layout.tensors()) {
    tensor.resize(static_cast<std::size_t>(place.size()));
    gather(place, std::span<const A>(parameters), std::span<A>(tensor));
    writer.write(std::span<const A>(tensor));
  }
  writer.commit();
  examples::write_text_file(
      output.file("config.json"),
      examples::model_config_text(config, dtype == Dtype::f64 ? "float64" : "float32"));
  output.commit();
}

template std::vector<float> load_parameters<float>(const fs::path&, const ParameterLayout&);
template std::vector<double> load_parameters<double>(const fs::path&, const ParameterLayout&);
template void save_checkpoint<float>(const fs::path&, const examples::ModelConfig&,
                                     const ParameterLayout&, const std::vector<float>&);
template void save_checkpoint<double>(const fs::path&, const examples::ModelConfig&,
                                      const ParameterLayout&, const std::vector<double>&);

}  // namespace heddle::train

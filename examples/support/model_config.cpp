#include "support/model_config.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include "heddle/core/error.hpp"
#include "support/json_text.hpp"
#include "support/mapped_file.hpp"
#include "support/usage_error.hpp"

namespace heddle::examples {
namespace {

constexpr const char* linear_attention = "linear_attention";

struct IntegerField {
  const char* name;
  std::int64_t ModelConfig::*member;
  std::int64_t lowest;
};

constexpr IntegerField integer_fields[] = {
    {"vocab_size", &ModelConfig::vocab_size, 1},
    {"hidden_size", &ModelConfig::hidden_size, 1},
    {"num_hidden_layers", &ModelConfig::num_hidden_layers, 1},
    {"linear_num_key_heads", &ModelConfig::linear_num_key_heads, 1},
    {"linear_num_value_heads", &ModelConfig::linear_num_value_heads, 1},
    {"linear_key_head_dim", &ModelConfig::linear_key_head_dim, 1},
    {"linear_value_head_dim", &ModelConfig::linear_value_head_dim, 1},
    {"linear_conv_kernel_dim", &ModelConfig::linear_conv_kernel_dim, 1},
    {"num_experts", &ModelConfig::num_experts, 1},
    {"num_experts_per_tok", &ModelConfig::num_experts_per_tok, 1},
    {"moe_intermediate_size", &ModelConfig::moe_intermediate_size, 1},
    {"shared_expert_intermediate_size", &ModelConfig::shared_expert_intermediate_size, 1},
};

struct TokenField {
  const char* name;
  std::optional<std::int64_t> ModelConfig::*member;
};

constexpr TokenField token_fields[] = {
    {"bos_token_id", &ModelConfig::bos_token_id},
    {"eos_token_id", &ModelConfig::eos_token_id},
    {"pad_token_id", &ModelConfig::pad_token_id},
};

class ConfigReader {
 public:
  ConfigReader(const Json& top, std::string where) : top_(top), where_(std::move(where)) {
    const Json* const nested = find_in(top_, "text_config");
    if (nested != nullptr && !nested->is_object()) {
      refuse("text_config", *nested, "must be an object");
    }
    text_ = nested != nullptr ? nested : &top_;
  }

  /// In the text model's part, else at the top; null like absent.
  [[nodiscard]] const Json* find(const char* name) const {
    const Json* const own = find_in(*text_, name);
    return own != nullptr ? own : find_in(top_, name);
  }

  [[nodiscard]] const Json& at(const char* name) const {
    const Json* const found = find(name);
    if (found == nullptr) {
      throw UsageError(where_ + ": " + name + " is missing");
    }
    return *found;
  }

  [[noreturn]] void refuse(const std::string& name, const Json& value,
                           const std::string& rule) const {
    throw UsageError(where_ + ": " + name + " = " + shown(value) + ": " + rule);
  }

  [[nodiscard]] std::int64_t integer(const std::string& name, const Json& value,
                                     std::int64_t lowest) const {
    // Nothing here comes near this, and products of three of them still fit I64.
    constexpr std::int64_t highest = std::int64_t{1} << 20;
    const bool fits = value.is_number_integer() &&
                      !(value.is_number_unsigned() && value.get<std::uint64_t>() > highest) &&
                      value.get<std::int64_t>() >= lowest;
    if (!fits) {
      refuse(name, value,
             "must be an integer in [" + std::to_string(lowest) + ", " + std::to_string(highest) +
                 "]");
    }
    return value.get<std::int64_t>();
  }

 private:
  static const Json* find_in(const Json& object, const char* name) {
    const auto found = object.find(name);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }

  const Json& top_;
  const Json* text_ = nullptr;
  std::string where_;
};

void require_linear_layers(const ConfigReader& reader, std::int64_t layers) {
  const std::string rule =
      std::string("must be ") + linear_attention + ", the only kind of layer here";
  const Json* const types = reader.find("layer_types");
  if (types == nullptr) {
    // The default of transformers: every full_attention_interval-th layer attends fully.
    const Json* const given = reader.find("full_attention_interval");
    const Json interval = given != nullptr ? *given : Json(4);
    if (reader.integer("full_attention_interval", interval, 1) <= layers) {
      reader.refuse("full_attention_interval", interval,
                    "without layer_types it makes layers full_attention, and each " + rule);
    }
    return;
  }
  if (!types->is_array() || !std::cmp_equal(types->size(), layers)) {
    reader.refuse("layer_types", *types,
                  "must be an array of num_hidden_layers (" + std::to_string(layers) + ") names");
  }
  for (std::size_t layer = 0; layer < types->size(); ++layer) {
    if ((*types)[layer] != linear_attention) {
      reader.refuse(element_name("layer_types", layer), (*types)[layer], rule);
    }
  }
}

/// Settings that would change what the layers compute, at another value than the one they have here.
void require_supported(const ConfigReader& reader) {
  if (const Json* const activation = reader.find("hidden_act")) {
    if (*activation != "silu") {
      reader.refuse("hidden_act", *activation, "must be silu");
    }
  }
  if (const Json* const dense = reader.find("mlp_only_layers")) {
    if (!dense->is_array() || !dense->empty()) {
      reader.refuse("mlp_only_layers", *dense, "must be empty: every layer has experts");
    }
  }
  if (const Json* const output = reader.find("output_router_logits")) {
    if (*output != false) {
      reader.refuse("output_router_logits", *output,
                    "must be false: there is no auxiliary router loss");
    }
  }
}

}  // namespace

ModelConfig parse_model_config(std::string_view text, const std::string& where) {
  const Json top = parse_json(text, where);
  if (!top.is_object()) {
    throw UsageError(where + ": must be an object");
  }
  const ConfigReader reader(top, where);
  ModelConfig config;
  for (const IntegerField& field : integer_fields) {
    config.*field.member = reader.integer(field.name, reader.at(field.name), field.lowest);
  }
  for (const TokenField& field : token_fields) {
    const Json* const value = reader.find(field.name);
    if (value == nullptr) {
      continue;
    }
    const bool list = value->is_array() && !value->empty();
    config.*field.member = reader.integer(field.name, list ? value->front() : *value, 0);
  }
  const Json& eps = reader.at("rms_norm_eps");
  config.rms_norm_eps = eps.is_number() ? eps.get<double>() : 0;
  if (!(config.rms_norm_eps > 0)) {
    reader.refuse("rms_norm_eps", eps, "must be a number above 0");
  }
  if (const Json* const tied = reader.find("tie_word_embeddings")) {
    if (!tied->is_boolean()) {
      reader.refuse("tie_word_embeddings", *tied, "must be true or false");
    }
    config.tie_word_embeddings = tied->get<bool>();
  }
  require_linear_layers(reader, config.num_hidden_layers);
  require_supported(reader);
  if (config.linear_num_value_heads % config.linear_num_key_heads != 0) {
    reader.refuse("linear_num_value_heads", config.linear_num_value_heads,
                  "must be a multiple of linear_num_key_heads (" +
                      std::to_string(config.linear_num_key_heads) + ")");
  }
  if (config.num_experts_per_tok > config.num_experts) {
    reader.refuse("num_experts_per_tok", config.num_experts_per_tok,
                  "must be at most num_experts (" + std::to_string(config.num_experts) + ")");
  }
  config.source = text;
  return config;
}

ModelConfig read_model_config(const std::filesystem::path& path) {
  const std::filesystem::path file =
      std::filesystem::is_directory(path) ? path / "config.json" : path;
  return parse_model_config(MappedFile(file).text(), file.string());
}

std::string model_config_text(const ModelConfig& config, const std::string& dtype) {
  Json top = Json::object();
  if (!config.source.empty()) {
    top = parse_json(config.source, "config.json");
  } else {
    top["architectures"] = {"Qwen3_5MoeForCausalLM"};
    top["model_type"] = "qwen3_5_moe_text";
    top["hidden_act"] = "silu";
    top["layer_types"] = std::vector<std::string>(
        static_cast<std::size_t>(config.num_hidden_layers), linear_attention);
  }
  const bool nested = top.contains("text_config") && top["text_config"].is_object();
  Json& text = nested ? top["text_config"] : top;
  for (const IntegerField& field : integer_fields) {
    text[field.name] = config.*field.member;
  }
  text["rms_norm_eps"] = config.rms_norm_eps;
  Json& tied = nested && top.contains("tie_word_embeddings") ? top : text;
  tied["tie_word_embeddings"] = config.tie_word_embeddings;
  if (config.source.empty()) {
    for (const TokenField& field : token_fields) {
      if (config.*field.member) {
        text[field.name] = *(config.*field.member);
      }
    }
  }
  // Written under the name that the file has for it; older ones say torch_dtype.
  for (Json* part : {&text, &top}) {
    for (const char* name : {"dtype", "torch_dtype"}) {
      if (part->contains(name)) {
        (*part)[name] = dtype;
      }
    }
  }
  if (config.source.empty()) {
    top["dtype"] = dtype;
  }
  return top.dump(2) + "\n";
}

}  // namespace heddle::examples

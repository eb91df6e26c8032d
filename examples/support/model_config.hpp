#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace heddle::examples {

/// The config.json of a Qwen3.5-MoE text model whose layers are all `linear_attention`: what a model
/// needs to know. Names are those of the file.
struct ModelConfig {
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t linear_num_key_heads = 0;
  std::int64_t linear_num_value_heads = 0;
  std::int64_t linear_key_head_dim = 0;
  std::int64_t linear_value_head_dim = 0;
  std::int64_t linear_conv_kernel_dim = 4;
  std::int64_t num_experts = 0;
  std::int64_t num_experts_per_tok = 0;
  std::int64_t moe_intermediate_size = 0;
  std::int64_t shared_expert_intermediate_size = 0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  std::optional<std::int64_t> bos_token_id;
  std::optional<std::int64_t> eos_token_id;  ///< the first where the file lists several
  std::optional<std::int64_t> pad_token_id;

  /// The text that was read; empty of a model that was not read from a file.
  std::string source;
};

/// Reads a config.json, or the one inside a checkpoint folder. The fields may stand at the top or
/// under "text_config", where published checkpoints that also see images have them.
///
/// throws    UsageError "<path>: ..." for a field that is missing, of the wrong type or out of range; a
///           layer of another type than linear_attention (`layer_types`, or full_attention_interval
///           where that is absent); an activation other than silu; dense layers; an auxiliary router
///           loss
[[nodiscard]] ModelConfig read_model_config(const std::filesystem::path& path);

/// The same from text in memory; `where` stands for the path in messages.
[[nodiscard]] ModelConfig parse_model_config(std::string_view text, const std::string& where);

/// The config.json to save: what was read, unknown fields included, with this config's values in
/// their places; a complete one for a model that was not read from a file. `dtype` is the stored type
/// of the weights ("float32").
[[nodiscard]] std::string model_config_text(const ModelConfig& config, const std::string& dtype);

}  // namespace heddle::examples

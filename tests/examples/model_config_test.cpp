#include "support/model_config.hpp"

#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "support/json_text.hpp"
#include "support/scratch_folder.hpp"
#include "support/thrown_text.hpp"
#include "support/usage_error.hpp"

// Mutants that must fail here: two fields swapped; "text_config" passed over; a full_attention layer
// accepted, by its name or by the default interval; unknown fields lost on the way back.

namespace heddle::examples {
namespace {

using test::thrown_text;

/// A config of fourteen different numbers.
Json sample() {
  return parse_json(R"({
    "architectures": ["Qwen3_5MoeForCausalLM"], "dtype": "float32", "hidden_act": "silu",
    "vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "linear_attention"],
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "num_experts": 8,
    "num_experts_per_tok": 5, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": true, "bos_token_id": 256,
    "eos_token_id": [257, 258], "pad_token_id": null, "rope_parameters": {"rope_theta": 10000.0}
  })",
                    "sample");
}

Json changed(const std::string& name, Json value) {
  Json config = sample();
  config[name] = std::move(value);
  return config;
}

std::string refusal(const Json& config) {
  return thrown_text<UsageError>(
      [&] { static_cast<void>(parse_model_config(config.dump(), "c")); });
}

void expect_sample(const ModelConfig& config) {
  EXPECT_EQ(config.vocab_size, 259);
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.num_hidden_layers, 2);
  EXPECT_EQ(config.linear_num_key_heads, 3);
  EXPECT_EQ(config.linear_num_value_heads, 6);
  EXPECT_EQ(config.linear_key_head_dim, 16);
  EXPECT_EQ(config.linear_value_head_dim, 24);
  EXPECT_EQ(config.linear_conv_kernel_dim, 4);
  EXPECT_EQ(config.num_experts, 8);
  EXPECT_EQ(config.num_experts_per_tok, 5);
  EXPECT_EQ(config.moe_intermediate_size, 32);
  EXPECT_EQ(config.shared_expert_intermediate_size, 40);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.bos_token_id, 256);
  EXPECT_EQ(config.eos_token_id, 257);
  EXPECT_FALSE(config.pad_token_id.has_value());
}

TEST(ModelConfig, ReadsFlatAndNestedForms) {
  expect_sample(parse_model_config(sample().dump(), "c"));
  Json nested;
  nested["model_type"] = "qwen3_5_moe";
  nested["text_config"] = sample();
  nested["text_config"].erase("tie_word_embeddings");
  nested["tie_word_embeddings"] = true;
  nested["vision_config"] = {{"hidden_size", 1}};
  expect_sample(parse_model_config(nested.dump(), "c"));
}

TEST(ModelConfig, ReadsAFileOrItsFolder) {
  const test::ScratchFolder scratch;
  const auto path = scratch.write("config.json", sample().dump());
  expect_sample(read_model_config(path));
  expect_sample(read_model_config(scratch.path()));
  scratch.write("config.json", "{}");
  EXPECT_EQ(thrown_text<UsageError>([&] { static_cast<void>(read_model_config(scratch.path())); }),
            path.string() + ": vocab_size is missing");
}

TEST(ModelConfig, RefusesLayersThatAreNotLinear) {
  EXPECT_EQ(refusal(changed("layer_types", {"linear_attention", "full_attention"})),
            "c: layer_types[1] = \"full_attention\": must be linear_attention, the only kind of "
            "layer here");
  EXPECT_EQ(refusal(changed("layer_types", {"linear_attention"})),
            "c: layer_types = [\"linear_attention\"]: must be an array of num_hidden_layers (2) "
            "names");
  Json without = sample();
  without.erase("layer_types");
  without["num_hidden_layers"] = 3;
  expect_sample([&] {
    ModelConfig config = parse_model_config(without.dump(), "c");
    config.num_hidden_layers -= 1;
    return config;
  }());
  without["num_hidden_layers"] = 4;
  EXPECT_EQ(refusal(without),
            "c: full_attention_interval = 4: without layer_types it makes layers full_attention, "
            "and each must be linear_attention, the only kind of layer here");
  without["full_attention_interval"] = 5;
  EXPECT_EQ(refusal(without), "nothing was thrown");
}

TEST(ModelConfig, RefusesValuesOutOfRange) {
  EXPECT_EQ(refusal(changed("num_experts", 0)),
            "c: num_experts = 0: must be an integer in [1, 1048576]");
  EXPECT_EQ(refusal(changed("hidden_size", 64.0)),
            "c: hidden_size = 64.0: must be an integer in [1, 1048576]");
  EXPECT_EQ(refusal(changed("vocab_size", -1)),
            "c: vocab_size = -1: must be an integer in [1, 1048576]");
  EXPECT_EQ(refusal(changed("vocab_size", 18446744073709551615U)),
            "c: vocab_size = 18446744073709551615: must be an integer in [1, 1048576]");
  EXPECT_EQ(refusal(changed("hidden_size", nullptr)), "c: hidden_size is missing");
  EXPECT_EQ(refusal(changed("linear_num_value_heads", 4)),
            "c: linear_num_value_heads = 4: must be a multiple of linear_num_key_heads (3)");
  EXPECT_EQ(refusal(changed("num_experts_per_tok", 9)),
            "c: num_experts_per_tok = 9: must be at most num_experts (8)");
  EXPECT_EQ(refusal(changed("rms_norm_eps", 0)), "c: rms_norm_eps = 0: must be a number above 0");
  EXPECT_EQ(refusal(changed("rms_norm_eps", "1e-6")),
            "c: rms_norm_eps = \"1e-6\": must be a number above 0");
  EXPECT_EQ(refusal(changed("tie_word_embeddings", 1)),
            "c: tie_word_embeddings = 1: must be true or false");
  EXPECT_EQ(refusal(changed("bos_token_id", -1)),
            "c: bos_token_id = -1: must be an integer in [0, 1048576]");
}

TEST(ModelConfig, RefusesWhatTheLayersDoNotCompute) {
  EXPECT_EQ(refusal(changed("hidden_act", "gelu")), "c: hidden_act = \"gelu\": must be silu");
  EXPECT_EQ(refusal(changed("mlp_only_layers", {0})),
            "c: mlp_only_layers = [0]: must be empty: every layer has experts");
  EXPECT_EQ(refusal(changed("output_router_logits", true)),
            "c: output_router_logits = true: must be false: there is no auxiliary router loss");
  EXPECT_EQ(refusal(changed("text_config", 3)), "c: text_config = 3: must be an object");
  EXPECT_EQ(refusal(Json::array()), "c: must be an object");
}

TEST(ModelConfig, WritesBackWhatItReadWithItsOwnValues) {
  ModelConfig config = parse_model_config(sample().dump(), "c");
  EXPECT_EQ(parse_json(model_config_text(config, "float32"), "w"), sample());
  config.vocab_size = 300;
  Json expected = changed("vocab_size", 300);
  expected["dtype"] = "bfloat16";
  const Json written = parse_json(model_config_text(config, "bfloat16"), "w");
  EXPECT_EQ(written, expected) << "members in their order, rope_parameters too";

  Json nested;
  nested["model_type"] = "qwen3_5_moe";
  nested["text_config"] = sample();
  config = parse_model_config(nested.dump(), "c");
  EXPECT_EQ(parse_json(model_config_text(config, "float32"), "w"), nested);
}

TEST(ModelConfig, WritesACompleteFileForANewModel) {
  ModelConfig config = parse_model_config(sample().dump(), "c");
  config.source.clear();
  const std::string text = model_config_text(config, "float32");
  expect_sample(parse_model_config(text, "c"));
  EXPECT_EQ(parse_json(text, "w")["model_type"], "qwen3_5_moe_text");
  EXPECT_EQ(parse_json(text, "w")["dtype"], "float32");
}

}  // namespace
}  // namespace heddle::examples

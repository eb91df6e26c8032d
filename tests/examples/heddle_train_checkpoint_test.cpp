// Mutants: gate and up of experts one by one exchanged; a shard's tensor taken from another; an extra
// tensor ignored; a tensor of the right size and another shape accepted; an unknown field of config.json
// lost; bf16 read as its bits; a folder of a failed save left; --save in float for a double run.
#include "heddle-train/checkpoint.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "examples/heddle_train_cases.hpp"
#include "support/compare.hpp"
#include "support/json_text.hpp"
#include "support/model_config.hpp"
#include "support/output_file.hpp"
#include "support/run_command.hpp"
#include "support/safetensors.hpp"
#include "support/scratch_folder.hpp"
#include "support/thrown_text.hpp"
#include "support/usage_error.hpp"

namespace heddle::train {
namespace {

namespace fs = std::filesystem;
using examples::Json;
using examples::read_safetensors;
using examples::Tensor;
using examples::TensorFile;
using examples::TensorInfo;
using examples::UsageError;

const std::string folder = HEDDLE_TEST_DATA "/qwen35_tiny";

/// The tensors of the stored checkpoint, to be changed.
std::map<std::string, Tensor> stored() {
  const TensorFile file = read_safetensors(folder + "/model.safetensors");
  std::map<std::string, Tensor> tensors;
  for (const TensorInfo& info : file.tensors()) {
    tensors[info.name] = Tensor::of(info.name, info.shape, file.at(info.name).converted<float>());
  }
  return tensors;
}

std::vector<Tensor> listed(const std::map<std::string, Tensor>& tensors) {
  std::vector<Tensor> list;
  for (const auto& [name, tensor] : tensors) {
    list.push_back(tensor);
  }
  return list;
}

ParameterLayout stored_layout() {
  return ParameterLayout(model_dims(examples::read_model_config(folder)));
}

/// Experts of every layer as tensors of their own.
std::map<std::string, Tensor> one_by_one(std::map<std::string, Tensor> tensors) {
  for (const std::string layer : {"model.layers.0.mlp.experts.", "model.layers.1.mlp.experts."}) {
    const auto cut = [&](const std::string& stack, std::size_t expert, std::size_t first,
                         std::size_t rows, std::size_t stack_rows, std::size_t cols,
                         const std::string& name) {
      const auto all = tensors.at(layer + stack).values<float>();
      const auto part = all.subspan((expert * stack_rows + first) * cols, rows * cols);
      const std::string full = layer + std::to_string(expert) + "." + name;
      tensors[full] =
          Tensor::of(full, {static_cast<std::int64_t>(rows), static_cast<std::int64_t>(cols)},
                     std::vector<float>(part.begin(), part.end()));
    };
    for (std::size_t e = 0; e < 8; ++e) {
      cut("gate_up_proj", e, 0, 32, 64, 64, "gate_proj.weight");
      cut("gate_up_proj", e, 32, 32, 64, 64, "up_proj.weight");
      cut("down_proj", e, 0, 64, 64, 32, "down_proj.weight");
    }
    tensors.erase(layer + "gate_up_proj");
    tensors.erase(layer + "down_proj");
  }
  return tensors;
}

/// Tensors over two files and their index, every other one in each.
void write_sharded(const fs::path& path, const std::map<std::string, Tensor>& tensors) {
  std::vector<Tensor> shards[2];
  Json map = Json::object();
  std::size_t next = 0;
  for (const auto& [name, tensor] : tensors) {
    shards[next % 2].push_back(tensor);
    map[name] = "model-0000" + std::to_string(next % 2 + 1) + "-of-00002.safetensors";
    ++next;
  }
  examples::write_safetensors(path / "model-00001-of-00002.safetensors", shards[0], {});
  examples::write_safetensors(path / "model-00002-of-00002.safetensors", shards[1], {});
  examples::write_text_file(path / "model.safetensors.index.json",
                            Json{{"metadata", Json::object()}, {"weight_map", map}}.dump());
}

TEST(HeddleTrainCheckpoint, EveryFormGivesTheSameParameters) {
  const ParameterLayout layout = stored_layout();
  const std::vector<float> expected = load_parameters<float>(folder, layout);
  EXPECT_EQ(layout.size(), 180080);
  const test::ScratchFolder split;
  examples::write_safetensors(split / "model.safetensors", listed(one_by_one(stored())), {});
  EXPECT_TRUE(test::same_bits(load_parameters<float>(split.path(), layout), expected));
  const test::ScratchFolder sharded;
  write_sharded(sharded.path(), stored());
  EXPECT_TRUE(test::same_bits(load_parameters<float>(sharded.path(), layout), expected));
  const test::ScratchFolder both;
  write_sharded(both.path(), one_by_one(stored()));
  EXPECT_TRUE(test::same_bits(load_parameters<float>(both.path(), layout), expected));
  // A whole file beside an index of shards is the one that counts.
  examples::write_safetensors(both / "model.safetensors", listed(stored()), {});
  fs::remove(both / "model-00001-of-00002.safetensors");
  EXPECT_TRUE(test::same_bits(load_parameters<float>(both.path(), layout), expected));
}

TEST(HeddleTrainCheckpoint, WidensBf16AndNarrowsF64) {
  const ParameterLayout layout = stored_layout();
  const std::vector<float> full = load_parameters<float>(folder, layout);
  std::map<std::string, Tensor> tensors = stored();
  bool wide = false;
  for (auto& [name, tensor] : tensors) {
    if (wide) {
      const auto from = tensor.values<float>();
      tensor = Tensor::of(name, tensor.shape, std::vector<double>(from.begin(), from.end()));
    } else {
      std::vector<bfloat16> narrow;
      for (const float value : tensor.values<float>()) {
        narrow.push_back(bfloat16(value));
      }
      tensor = Tensor::of(name, tensor.shape, narrow);
    }
    wide = !wide;
  }
  const test::ScratchFolder scratch;
  examples::write_safetensors(scratch / "model.safetensors", listed(tensors), {});
  const std::vector<double> loaded = load_parameters<double>(scratch.path(), layout);
  std::size_t exact = 0;
  for (std::size_t i = 0; i < full.size(); ++i) {
    exact += loaded[i] == static_cast<double>(full[i]) ? 1 : 0;
    EXPECT_TRUE(loaded[i] == static_cast<double>(full[i]) ||
                loaded[i] == static_cast<double>(bfloat16(full[i])))
        << i;
  }
  EXPECT_GT(exact, full.size() / 4);
  EXPECT_LT(exact, full.size());
}

TEST(HeddleTrainCheckpoint, SavingAndLoadingGivesTheSame) {
  const ParameterLayout layout = stored_layout();
  const examples::ModelConfig config = examples::read_model_config(folder);
  const std::vector<float> parameters = load_parameters<float>(folder, layout);
  const test::ScratchFolder scratch;
  save_checkpoint(scratch / "saved", config, layout, parameters);
  EXPECT_EQ(scratch.names(), std::vector<std::string>{"saved"});
  EXPECT_TRUE(test::same_bits(load_parameters<float>(scratch / "saved", layout), parameters));
  // config.json says all that it said, the layers' unused fields among it.
  const auto json = [](const fs::path& path) {
    return examples::parse_json(test::read_file(path), path.string());
  };
  EXPECT_EQ(json(scratch / "saved" / "config.json"), json(fs::path(folder) / "config.json"));
  // The stored tensors are F32 under their own names and shapes.
  const TensorFile saved = read_safetensors(scratch / "saved" / "model.safetensors");
  const TensorFile original = read_safetensors(folder + "/model.safetensors");
  EXPECT_EQ(saved.tensors().size(), original.tensors().size());
  EXPECT_EQ(saved.metadata(), original.metadata());
  for (const TensorInfo& tensor : original.tensors()) {
    EXPECT_EQ(saved.at(tensor.name).shape, tensor.shape);
    EXPECT_EQ(saved.at(tensor.name).dtype, tensor.dtype);
  }

  const std::vector<double> wide = random_parameters<double>(layout, 31);
  save_checkpoint(scratch / "wide", config, layout, wide);
  EXPECT_TRUE(test::same_bits(load_parameters<double>(scratch / "wide", layout), wide));
  EXPECT_EQ(json(scratch / "wide" / "config.json")["dtype"], "float64");
}

TEST(HeddleTrainCheckpoint, TheDefaultModelSavesACompleteConfig) {
  const ParameterLayout layout(model_dims(default_model_config()));
  const test::ScratchFolder scratch;
  const std::vector<float> parameters = initial_parameters<float>(layout, 0);
  save_checkpoint(scratch / "saved", default_model_config(), layout, parameters);
  EXPECT_EQ(model_dims(examples::read_model_config(scratch / "saved")), layout.dims());
  EXPECT_TRUE(test::same_bits(load_parameters<float>(scratch / "saved", layout), parameters));
}

TEST(HeddleTrainCheckpoint, NamesTheTensorThatIsWrong) {
  const ParameterLayout layout = stored_layout();
  const auto text = [&](const std::function<void(std::map<std::string, Tensor>&)>& change) {
    std::map<std::string, Tensor> tensors = stored();
    change(tensors);
    const test::ScratchFolder scratch;
    examples::write_safetensors(scratch / "model.safetensors", listed(tensors), {});
    std::string what = test::thrown_text<UsageError>(
        [&] { static_cast<void>(load_parameters<float>(scratch.path(), layout)); });
    const std::size_t path = what.find(scratch.path().string());
    return path == 0 ? what.substr(scratch.path().string().size()) : what;
  };
  EXPECT_EQ(text([](auto& tensors) { tensors.erase("model.norm.weight"); }),
            ": tensor 'model.norm.weight' is missing");
  EXPECT_EQ(text([](auto& tensors) { tensors.erase("model.layers.1.mlp.experts.down_proj"); }),
            ": tensor 'model.layers.1.mlp.experts.down_proj' is missing");
  EXPECT_EQ(text([](auto& tensors) { tensors["x"] = Tensor::of<float>("x", {1}, {0}); }),
            "/model.safetensors: tensor 'x' is none of this model's");
  EXPECT_EQ(text([](auto& tensors) {
              const auto values = tensors.at("lm_head.weight").template values<float>();
              tensors["lm_head.weight"] = Tensor::of(
                  "lm_head.weight", {64, 259}, std::vector<float>(values.begin(), values.end()));
            }),
            "/model.safetensors: tensor 'lm_head.weight' is [64, 259]: must be [259, 64]");
  EXPECT_EQ(text([](auto& tensors) {
              tensors["model.norm.weight"] =
                  Tensor::of("model.norm.weight", {64}, std::vector<std::int32_t>(64, 0));
            }),
            "/model.safetensors: tensor 'model.norm.weight' is I32: must be F32, BF16 or F64");
  // Stacked and one by one at once, and one expert short.
  EXPECT_EQ(text([](auto& tensors) {
              std::map<std::string, Tensor> split = one_by_one(tensors);
              const std::string name = "model.layers.0.mlp.experts.0.gate_proj.weight";
              tensors[name] = split.at(name);
            }),
            "/model.safetensors: tensor 'model.layers.0.mlp.experts.0.gate_proj.weight' is none of "
            "this model's");
  EXPECT_EQ(text([](auto& tensors) {
              tensors = one_by_one(tensors);
              tensors.erase("model.layers.1.mlp.experts.7.up_proj.weight");
            }),
            ": tensor 'model.layers.1.mlp.experts.7.up_proj.weight' is missing");
}

TEST(HeddleTrainCheckpoint, NamesWhatIsWrongWithAnIndex) {
  const ParameterLayout layout = stored_layout();
  const auto text = [&](const std::function<void(const fs::path&)>& change) {
    const test::ScratchFolder scratch;
    write_sharded(scratch.path(), stored());
    change(scratch.path());
    std::string what = test::thrown_text<UsageError>(
        [&] { static_cast<void>(load_parameters<float>(scratch.path(), layout)); });
    return what.substr(what.find(scratch.path().string()) == 0 ? scratch.path().string().size()
                                                               : 0);
  };
  const auto edit_map = [](const std::function<void(Json&)>& edit) {
    return [edit](const fs::path& path) {
      const fs::path file = path / "model.safetensors.index.json";
      Json index = examples::parse_json(test::read_file(file), "index");
      edit(index["weight_map"]);
      examples::write_text_file(file, index.dump());
    };
  };
  EXPECT_EQ(text([](const fs::path&) {}), "nothing was thrown");
  EXPECT_EQ(text(edit_map([](Json& map) { map = Json::array(); })),
            "/model.safetensors.index.json: weight_map must be an object of tensor and file names");
  EXPECT_EQ(text(edit_map([](Json& map) { map["lm_head.weight"] = "../x.safetensors"; })),
            "/model.safetensors.index.json: weight_map of 'lm_head.weight' = \"../x.safetensors\": "
            "must be the name of a file beside the index");
  EXPECT_EQ(text(edit_map([](Json& map) { map.erase("lm_head.weight"); })),
            "/model-00001-of-00002.safetensors: tensor 'lm_head.weight' is not what "
            "model.safetensors.index.json lists for this file");
  EXPECT_EQ(text(edit_map([](Json& map) { map["x"] = "model-00001-of-00002.safetensors"; })),
            "/model-00001-of-00002.safetensors: tensor 'x' is missing, which "
            "model.safetensors.index.json lists for this file");
  EXPECT_NE(text([](const fs::path& path) {
              fs::remove(path / "model-00002-of-00002.safetensors");
            }).find("/model-00002-of-00002.safetensors"),
            std::string::npos);
}

TEST(HeddleTrainCheckpoint, TheProgramRefusesWhatIsNotItsModel) {
  const auto refused = [&](const std::function<void(Json&)>& change, const std::string& text) {
    const test::ScratchFolder scratch;
    Json config = examples::parse_json(test::read_file(folder + "/config.json"), "config");
    change(config);
    static_cast<void>(scratch.write("config.json", config.dump()));
    fs::copy(folder + "/model.safetensors", scratch / "model.safetensors");
    const test::CommandResult ended =
        test::run_command({HEDDLE_TRAIN_PROGRAM, folder + "/rollouts.jsonl", "--checkpoint",
                           scratch.path().string(), "--steps", "1"});
    EXPECT_EQ(ended.status, 2);
    EXPECT_EQ(ended.out, "");
    EXPECT_EQ(ended.err, "heddle-train: " + scratch.path().string() + text + "\n");
  };
  refused([](Json& config) { config["layer_types"][1] = "full_attention"; },
          "/config.json: layer_types[1] = \"full_attention\": must be linear_attention, the only "
          "kind of layer here");
  refused([](Json& config) { config["hidden_size"] = 63; },
          "/model.safetensors: tensor 'model.embed_tokens.weight' is [259, 64]: must be [259, 63]");
  refused([](Json& config) { config["tie_word_embeddings"] = true; },
          "/config.json: tie_word_embeddings = true: must be false");
  refused([](Json& config) { config.erase("num_experts"); },
          "/config.json: num_experts is missing");
}

}  // namespace
}  // namespace heddle::train

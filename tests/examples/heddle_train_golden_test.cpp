// heddle-train against transformers on a small checkpoint (tests/data/qwen35_tiny): scores, losses, the
// gradient of every parameter, one GRPO step. Bars are a few times what a plain f32 run of transformers
// itself misses the float64 values by.
//
// Mutants: reversed convolution taps, q and k exchanged, value head h reading key head h mod Hk, the
// state read before the decay, 1 + w in the gated norm, w in the others, gate before up, an ungated
// shared expert, weights not renormalised, no reset at document starts, a score one token off, the
// eps of the q and k norm (seen in double alone), divisor n in the advantages, decay left out.
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle-train/checkpoint.hpp"
#include "heddle-train/model.hpp"
#include "support/compare.hpp"
#include "support/json_text.hpp"
#include "support/model_config.hpp"
#include "support/run_command.hpp"
#include "support/safetensors.hpp"
#include "support/scratch_folder.hpp"
#include "support/table.hpp"

namespace heddle::train {
namespace {

using examples::read_safetensors;
using examples::Tensor;
using examples::TensorFile;
using examples::TensorInfo;

const std::string folder = HEDDLE_TEST_DATA "/qwen35_tiny";

struct Bars {
  std::string dtype;
  double output;
  double loss;
  double gradient;
  double grad_norm;
  double delta;
  double after;
};

constexpr const char* dtypes[] = {"f32", "f64"};

Bars bars(const std::string& dtype) {
  if (dtype == "f64") {
    // The stored gradients and deltas are F32.
    return {dtype, 1e-12, 1e-12, 1e-7, 1e-12, 1e-6, 1e-9};
  }
  return {dtype, 1e-5, 1e-6, 1e-4, 1e-5, 2e-3, 1e-4};
}

void run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), HEDDLE_TRAIN_PROGRAM);
  const test::CommandResult ended = test::run_command(arguments);
  ASSERT_EQ(ended.status, 0) << ended.err;
  EXPECT_EQ(ended.err, "");
}

std::vector<double> values(const TensorFile& file, const std::string& name) {
  return file.at(name).converted<double>();
}

/// Every gradient.<name> of `expected` against that of `actual`, by relative L2; the worst goes into
/// the test's report.
void expect_gradients(const TensorFile& actual, const TensorFile& expected, double bar) {
  double worst = 0;
  int compared = 0;
  for (const TensorInfo& tensor : expected.tensors()) {
    if (!tensor.name.starts_with("grad.")) {
      continue;
    }
    ASSERT_EQ(actual.at(tensor.name).shape, tensor.shape) << tensor.name;
    const std::vector<double> a = values(actual, tensor.name);
    const std::vector<double> b = values(expected, tensor.name);
    const test::Difference found =
        test::difference(std::span<const double>(a), std::span<const double>(b));
    EXPECT_EQ(found.mismatch, "") << tensor.name;
    EXPECT_LE(found.relative_l2, bar) << tensor.name;
    worst = std::max(worst, found.relative_l2);
    ++compared;
  }
  EXPECT_EQ(compared, 39);
  ::testing::Test::RecordProperty("worst_gradient", examples::number_text(worst));
}

class HeddleTrainGolden : public ::testing::TestWithParam<const char*> {
 protected:
  Bars bar = bars(GetParam());
  test::ScratchFolder scratch;

  [[nodiscard]] TensorFile score(const std::filesystem::path& tokens,
                                 const std::string& checkpoint = folder) const {
    const std::string out = (scratch / "scores.safetensors").string();
    run({"--score", tokens.string(), "--out", out, "--checkpoint", checkpoint, "--gradients",
         "--logits", "--dtype", bar.dtype});
    return read_safetensors(out);
  }

  void expect_close(const TensorFile& actual, const std::string& name, const TensorFile& expected,
                    const std::string& expected_name, double tolerance) const {
    EXPECT_TRUE(test::close(values(actual, name), values(expected, expected_name), tolerance))
        << name;
  }
};

TEST_P(HeddleTrainGolden, OneDocument) {
  const TensorFile scores = score(folder + "/single.in.safetensors");
  const TensorFile expected = read_safetensors(folder + "/single.out.safetensors");
  EXPECT_EQ(scores.at("logits").shape, (examples::Shape{48, 259}));
  EXPECT_EQ(scores.at("logits").dtype,
            bar.dtype == "f64" ? examples::Dtype::f64 : examples::Dtype::f32);
  for (const char* name : {"logits", "logps", "entropy"}) {
    expect_close(scores, name, expected, name, bar.output);
  }
  expect_close(scores, "loss", expected, "loss", bar.loss);
  EXPECT_EQ(values(scores, "expert_ids"), values(expected, "expert_ids"));
  EXPECT_EQ(scores.at("expert_ids").shape, (examples::Shape{2, 48, 2}));
  expect_gradients(scores, expected, bar.gradient);
}

TEST_P(HeddleTrainGolden, PackedRows) {
  const TensorFile in = read_safetensors(folder + "/packed.in.safetensors");
  const TensorFile expected = read_safetensors(folder + "/packed.out.safetensors");
  std::map<std::string, std::vector<std::int32_t>> stacked;
  for (const char* row : {"end.", "start.", "aligned."}) {
    std::vector<Tensor> tensors;
    for (const char* name : {"token_ids", "segment_ids", "segment_positions"}) {
      const std::vector<std::int32_t> ids =
          in.at(std::string(row) + name).converted<std::int32_t>();
      tensors.push_back(Tensor::of(name, {96}, ids));
      stacked[name].insert(stacked[name].end(), ids.begin(), ids.end());
    }
    examples::write_safetensors(scratch / "tokens.safetensors", tensors, {});
    const TensorFile scores = score(scratch / "tokens.safetensors");
    for (const char* name : {"logps", "entropy"}) {
      expect_close(scores, name, expected, std::string(row) + name, bar.output);
    }
    expect_close(scores, "loss", expected, "loss", bar.loss);
    expect_gradients(scores, expected, bar.gradient);
  }
  // The three rows at once: three times the tokens, the same mean.
  std::vector<Tensor> tensors;
  for (const auto& [name, ids] : stacked) {
    tensors.push_back(Tensor::of(name, {3, 96}, ids));
  }
  examples::write_safetensors(scratch / "tokens.safetensors", tensors, {});
  const TensorFile scores = score(scratch / "tokens.safetensors");
  EXPECT_EQ(scores.at("logps").shape, (examples::Shape{3, 96}));
  EXPECT_EQ(scores.at("logits").shape, (examples::Shape{3, 96, 259}));
  EXPECT_EQ(scores.at("expert_ids").shape, (examples::Shape{2, 288, 2}));
  expect_close(scores, "loss", expected, "loss", bar.loss);
  expect_gradients(scores, expected, bar.gradient);
}

/// The log-probs of each document of a dump, found by its token ids.
std::map<std::vector<std::int32_t>, std::vector<double>> by_document(const TensorFile& file,
                                                                     const std::string& name) {
  const auto ids = file.at("token_ids").converted<std::int32_t>();
  const auto segments = file.at("segment_ids").converted<std::int32_t>();
  const std::vector<double> entries = values(file, name);
  const auto row_length = static_cast<std::size_t>(file.at("token_ids").shape.back());
  std::map<std::vector<std::int32_t>, std::vector<double>> documents;
  for (std::size_t t = 0; t < ids.size();) {
    std::size_t end = t + 1;
    while (end % row_length != 0 && segments[end] == segments[t]) {
      ++end;
    }
    if (segments[t] > 0) {
      documents[{ids.begin() + static_cast<std::ptrdiff_t>(t),
                 ids.begin() + static_cast<std::ptrdiff_t>(end)}] = {
          entries.begin() + static_cast<std::ptrdiff_t>(t),
          entries.begin() + static_cast<std::ptrdiff_t>(end)};
    }
    t = end;
  }
  return documents;
}

TEST_P(HeddleTrainGolden, OneGrpoStep) {
  const TensorFile in = read_safetensors(folder + "/grpo.in.safetensors");
  const TensorFile expected = read_safetensors(folder + "/grpo.out.safetensors");
  const TensorFile before = read_safetensors(folder + "/model.safetensors");
  const std::string dump_path = (scratch / "dump.safetensors").string();
  const std::string saved = (scratch / "saved").string();
  // Rows of 40 positions, so several, moved to the right where there is room.
  run({folder + "/rollouts.jsonl",
       "--checkpoint",
       folder,
       "--steps",
       "1",
       "--learning-rate",
       "1e-3",
       "--dtype",
       bar.dtype,
       "--dump-step",
       dump_path,
       "--save",
       saved,
       "--budget",
       "40",
       "--segment-align",
       "4",
       "--pad-position",
       "start",
       "--pad-align",
       "4"});
  const TensorFile dump = read_safetensors(dump_path);
  ASSERT_GT(dump.at("token_ids").shape[0], 2);
  EXPECT_EQ(dump.at("token_ids").shape[1], 40);
  expect_close(dump, "loss", expected, "loss", bar.loss);
  expect_close(dump, "grad_norm", expected, "grad_norm", bar.grad_norm);
  expect_gradients(dump, expected, bar.gradient);

  const auto flat_ids = in.at("token_ids").converted<std::int32_t>();
  const auto flat_segments = in.at("segment_ids").converted<std::int32_t>();
  for (const char* name : {"logps", "entropy"}) {
    const auto found = by_document(dump, name);
    const std::vector<double> flat = values(expected, name);
    std::vector<double> actual;
    for (std::size_t t = 0; t < flat_ids.size();) {
      std::size_t end = t;
      while (end < flat_ids.size() && flat_segments[end] == flat_segments[t]) {
        ++end;
      }
      const std::vector<double>& entries =
          found.at({flat_ids.begin() + static_cast<std::ptrdiff_t>(t),
                    flat_ids.begin() + static_cast<std::ptrdiff_t>(end)});
      actual.insert(actual.end(), entries.begin(), entries.end());
      t = end;
    }
    EXPECT_TRUE(test::close(actual, flat, bar.output)) << name;
  }

  double worst = 0;
  for (const TensorInfo& tensor : before.tensors()) {
    std::vector<double> delta = values(dump, "updated." + tensor.name);
    const std::vector<double> old = values(before, tensor.name);
    for (std::size_t i = 0; i < delta.size(); ++i) {
      delta[i] -= old[i];
    }
    const std::vector<double> wanted = values(expected, "delta." + tensor.name);
    const test::Difference difference =
        test::difference(std::span<const double>(delta), std::span<const double>(wanted));
    EXPECT_LE(difference.relative_l2, bar.delta) << tensor.name;
    worst = std::max(worst, difference.relative_l2);
  }
  RecordProperty("worst_delta", examples::number_text(worst));

  const TensorFile after = score(folder + "/grpo.in.safetensors", saved);
  expect_close(after, "logps", expected, "after.logps", bar.after);
}

// The step's rollouts again under the updated model, their old log-probs from the file.
TEST_P(HeddleTrainGolden, OldLogProbsFromTheFile) {
  const TensorFile in = read_safetensors(folder + "/grpo.in.safetensors");
  const TensorFile expected = read_safetensors(folder + "/grpo.out.safetensors");
  const std::string saved = (scratch / "saved").string();
  run({folder + "/rollouts.jsonl", "--checkpoint", folder, "--steps", "1", "--learning-rate",
       "1e-3", "--dtype", bar.dtype, "--save", saved});

  const std::vector<double> old = values(expected, "logps");
  std::istringstream lines(test::read_file(folder + "/rollouts.jsonl"));
  std::string text;
  std::size_t t = 0;
  for (std::string line; std::getline(lines, line);) {
    examples::Json rollout = examples::parse_json(line, "rollouts");
    t += rollout["prompt_ids"].size();
    for (std::size_t i = 0; i < rollout["completion_ids"].size(); ++i) {
      rollout["old_per_token_logps"].push_back(old[t++]);
    }
    text += rollout.dump() + "\n";
  }
  ASSERT_EQ(t, old.size());
  const std::string path = scratch.write("old.jsonl", text).string();
  const std::string dump = (scratch / "dump.safetensors").string();
  run({path, "--checkpoint", saved, "--steps", "1", "--dtype", bar.dtype, "--dump-step", dump});
  // The file's log-probs are F32: their rounding shows in double.
  EXPECT_TRUE(test::close(values(read_safetensors(dump), "loss"), values(expected, "after.loss"),
                          bar.dtype == "f64" ? 1e-6 : 1e-3));
}

TEST_P(HeddleTrainGolden, FrozenRouterChangesNothingElse) {
  const TensorFile expected = read_safetensors(folder + "/grpo.out.safetensors");
  const TensorFile before = read_safetensors(folder + "/model.safetensors");
  const std::string path = (scratch / "dump.safetensors").string();
  run({folder + "/rollouts.jsonl", "--checkpoint", folder, "--steps", "1", "--learning-rate",
       "1e-3", "--dtype", bar.dtype, "--freeze-router", "1", "--dump-step", path});
  const TensorFile dump = read_safetensors(path);
  for (const TensorInfo& tensor : before.tensors()) {
    const std::vector<double> gradient = values(dump, "grad." + tensor.name);
    if (tensor.name.ends_with("mlp.gate.weight")) {
      EXPECT_EQ(gradient, std::vector<double>(gradient.size(), 0.0));
      EXPECT_EQ(values(dump, "updated." + tensor.name), values(before, tensor.name));
    } else {
      const std::vector<double> wanted = values(expected, "grad." + tensor.name);
      EXPECT_LE(test::difference(std::span<const double>(gradient), std::span<const double>(wanted))
                    .relative_l2,
                bar.gradient)
          << tensor.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, HeddleTrainGolden, ::testing::ValuesIn(dtypes),
                         [](const auto& each) { return std::string(each.param); });

// What no file of the program shows: the residual stream after each layer and the routing weights.
template <class T>
void expect_inside(double bar) {
  const ParameterLayout layout(model_dims(examples::read_model_config(folder)));
  const std::vector<T> parameters = load_parameters<T>(folder, layout);
  const Model<T> model(layout, parameters, moe::RouterTraining::trained);
  const TensorFile in = read_safetensors(folder + "/single.in.safetensors");
  const TensorFile expected = read_safetensors(folder + "/single.out.safetensors");
  const auto ids = in.at("token_ids").converted<std::int32_t>();
  const auto segments = in.at("segment_ids").converted<std::int32_t>();
  RowActivations<T> kept;
  model.forward(
      {.token_ids = ids, .segment_ids = segments, .segment_positions = {}, .forced_experts = {}},
      kept);
  std::vector<double> hidden;
  std::vector<double> weights;
  const auto append = [](const Matrix<T>& from, std::vector<double>& to) {
    to.insert(to.end(), from.data(), from.data() + from.size());
  };
  append(kept.layers[0].entering, hidden);
  append(kept.layers[1].entering, hidden);
  append(kept.leaving, hidden);
  append(kept.layers[0].expert_weights, weights);
  append(kept.layers[1].expert_weights, weights);
  EXPECT_TRUE(test::close(hidden, values(expected, "hidden_states"), std::max(bar, 1e-7)));
  EXPECT_TRUE(test::close(weights, values(expected, "expert_weights"), bar));
}

TEST(HeddleTrainInside, StreamAndRoutingWeights) {
  expect_inside<float>(1e-5);
  expect_inside<double>(1e-12);
}

}  // namespace
}  // namespace heddle::train

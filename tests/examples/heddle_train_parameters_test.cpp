// Mutants: gate and up columns of the shared expert exchanged; a transposed tensor laid as it is;
// experts one by one with another expert's rows; overlapping places; deviation of the residual writers
// not divided; a norm initialised to 1 where the factor is 1 + w.
#include "heddle-train/parameters.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "examples/heddle_train_cases.hpp"
#include "heddle-train/random.hpp"
#include "support/thrown_text.hpp"

namespace heddle::train {
namespace {

const TensorPlace& find(const ParameterLayout& layout, const std::string& name) {
  const auto& places = layout.tensors();
  return *std::find_if(places.begin(), places.end(),
                       [&](const TensorPlace& place) { return place.name == name; });
}

/// A flat array whose tensor `place` holds 0, 1, 2, ... in the checkpoint's order, -1 elsewhere.
std::vector<int> numbered(const ParameterLayout& layout, const TensorPlace& place) {
  std::vector<int> tensor(static_cast<std::size_t>(place.size()));
  std::iota(tensor.begin(), tensor.end(), 0);
  std::vector<int> flat(static_cast<std::size_t>(layout.size()), -1);
  scatter(place, std::span<const int>(tensor), std::span<int>(flat));
  return flat;
}

TEST(HeddleTrainParameters, TensorsCoverTheArrayOnce) {
  const ParameterLayout layout(tiny_dims());
  std::vector<int> taken(static_cast<std::size_t>(layout.size()), 0);
  std::map<std::string, int> names;
  for (const TensorPlace& place : layout.tensors()) {
    ++names[place.name];
    std::int64_t elements = 1;
    for (const std::int64_t extent : place.shape) {
      elements *= extent;
    }
    EXPECT_EQ(elements, place.size()) << place.name;
    std::vector<int> flat = numbered(layout, place);
    for (std::size_t i = 0; i < flat.size(); ++i) {
      taken[i] += flat[i] >= 0 ? 1 : 0;
    }
    std::vector<int> back(static_cast<std::size_t>(place.size()));
    gather(place, std::span<const int>(flat), std::span<int>(back));
    EXPECT_TRUE(std::is_sorted(back.begin(), back.end())) << place.name;
  }
  EXPECT_EQ(names.size(), layout.tensors().size());
  EXPECT_EQ(std::count(taken.begin(), taken.end(), 1), layout.size());
}

TEST(HeddleTrainParameters, KernelsReadTransposesOfTheCheckpoint) {
  const ParameterLayout layout(tiny_dims());
  const std::string prefix = "model.layers.1.";
  const auto with = [&](const std::string& name, const auto& check) {
    std::vector<int> flat = numbered(layout, find(layout, prefix + name));
    check(layout.views(flat.data()).layers[1]);
  };
  // Element (e, r, c) of a tensor [E, R, C] is number (e R + r) C + c.
  with("mlp.experts.gate_up_proj", [](const LayerViews<int>& layer) {  // [5, 8, 6]
    EXPECT_EQ(layer.wi(3 * 6 + 2, 7), (3 * 8 + 7) * 6 + 2);
  });
  with("mlp.experts.down_proj", [](const LayerViews<int>& layer) {  // [5, 6, 4]
    EXPECT_EQ(layer.wo(2 * 4 + 3, 5), (2 * 6 + 5) * 4 + 3);
  });
  with("mlp.gate.weight", [](const LayerViews<int>& layer) {  // [5, 6]
    EXPECT_EQ(layer.router_weight(1, 4), 4 * 6 + 1);
  });
  with("mlp.shared_expert.gate_proj.weight", [](const LayerViews<int>& layer) {  // [3, 6]
    EXPECT_EQ(layer.shared_wi(5, 1), 1 * 6 + 5);
    EXPECT_EQ(layer.shared_wi(5, 3 + 1), -1);
  });
  with("mlp.shared_expert.up_proj.weight",
       [](const LayerViews<int>& layer) { EXPECT_EQ(layer.shared_wi(5, 3 + 1), 1 * 6 + 5); });
  with("mlp.shared_expert.down_proj.weight", [](const LayerViews<int>& layer) {  // [6, 3]
    EXPECT_EQ(layer.shared_wo(2, 4), 4 * 3 + 2);
  });
  with("mlp.shared_expert_gate.weight",
       [](const LayerViews<int>& layer) { EXPECT_EQ(layer.shared_gate(4, 0), 4); });
  with("linear_attn.conv1d.weight", [](const LayerViews<int>& layer) {  // [20, 1, 3]
    EXPECT_EQ(layer.conv_weight(11, 2), 11 * 3 + 2);
  });
  with("linear_attn.in_proj_qkv.weight", [](const LayerViews<int>& layer) {  // [20, 6]
    EXPECT_EQ(layer.in_proj_qkv(19, 5), 119);
  });
}

TEST(HeddleTrainParameters, ExpertsOneByOneAreThoseOfTheStack) {
  const ParameterLayout layout(tiny_dims());
  const TensorPlace& gate_up = find(layout, "model.layers.0.mlp.experts.gate_up_proj");
  const std::vector<TensorPlace> parts = layout.one_by_one(gate_up);
  ASSERT_EQ(parts.size(), 10U);
  const std::vector<int> flat = numbered(layout, gate_up);
  const auto check = [&](const TensorPlace& part, const std::string& name, int first) {
    EXPECT_EQ(part.name, "model.layers.0.mlp.experts." + name);
    EXPECT_EQ(part.shape, (std::vector<std::int64_t>{4, 6}));
    std::vector<int> tensor(24);
    gather(part, std::span<const int>(flat), std::span<int>(tensor));
    EXPECT_EQ(tensor.front(), first);
    EXPECT_EQ(tensor.back(), first + 23);
  };
  check(parts[6], "3.gate_proj.weight", 3 * 48);
  check(parts[7], "3.up_proj.weight", 3 * 48 + 24);

  const TensorPlace& down = find(layout, "model.layers.0.mlp.experts.down_proj");
  const std::vector<TensorPlace> down_parts = layout.one_by_one(down);
  ASSERT_EQ(down_parts.size(), 5U);
  EXPECT_EQ(down_parts[4].name, "model.layers.0.mlp.experts.4.down_proj.weight");
  EXPECT_EQ(down_parts[4].shape, (std::vector<std::int64_t>{6, 4}));
  EXPECT_TRUE(layout.one_by_one(find(layout, "lm_head.weight")).empty());
  EXPECT_TRUE(
      layout.one_by_one(find(layout, "model.layers.0.mlp.shared_expert.down_proj.weight")).empty());
}

TEST(HeddleTrainParameters, InitialOnesAreTheSeedsAndNoOthers) {
  const ParameterLayout layout(tiny_dims());
  const std::vector<float> first = initial_parameters<float>(layout, 3);
  EXPECT_EQ(first, initial_parameters<float>(layout, 3));
  EXPECT_NE(first, initial_parameters<float>(layout, 4));
  const std::vector<double> wide = initial_parameters<double>(layout, 3);
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i], static_cast<float>(wide[i]));
  }
  const ModelViews<const float> views = layout.views(first.data());
  EXPECT_EQ(views.final_norm[0], 0.0F);
  EXPECT_EQ(views.layers[0].input_norm[1], 0.0F);
  EXPECT_EQ(views.layers[0].gate_norm[1], 1.0F);
}

TEST(HeddleTrainParameters, InitialSpreadIsWhatTheContractSays) {
  ModelDims dims = tiny_dims();
  dims.vocab = 2000;
  dims.hidden = 48;
  const ParameterLayout layout(dims);
  const std::vector<double> parameters = initial_parameters<double>(layout, 1);
  const auto deviation = [&](const std::string& name) {
    const TensorPlace& place = find(layout, name);
    std::vector<double> tensor(static_cast<std::size_t>(place.size()));
    gather(place, std::span<const double>(parameters), std::span<double>(tensor));
    double squares = 0;
    for (const double value : tensor) {
      squares += value * value;
    }
    return std::sqrt(squares / static_cast<double>(tensor.size()));
  };
  EXPECT_NEAR(deviation("lm_head.weight"), 0.02, 0.0004);
  EXPECT_NEAR(deviation("model.layers.0.mlp.experts.gate_up_proj"), 0.02, 0.001);
  EXPECT_NEAR(deviation("model.layers.0.mlp.experts.down_proj"), 0.01, 0.001);
  EXPECT_NEAR(deviation("model.layers.1.linear_attn.out_proj.weight"), 0.01, 0.001);
}

TEST(HeddleTrainParameters, TheStreamOfNumbersIsFixed) {
  // splitmix64 from 0, the generator's published first outputs.
  Random random(0);
  EXPECT_EQ(random.bits(), 0xE220A8397B1DCDAFULL);
  EXPECT_EQ(random.bits(), 0x6E789E6AA1B965F4ULL);
  double sum = 0;
  double squares = 0;
  for (int i = 0; i < 10000; ++i) {
    const double value = random.normal();
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / 10000, 0, 0.05);
  EXPECT_NEAR(squares / 10000, 1, 0.05);
}

TEST(HeddleTrainParameters, RefusesAModelBeyondAnyMemory) {
  ModelDims dims = tiny_dims();
  dims.hidden = std::int64_t{1} << 20;
  dims.experts = std::int64_t{1} << 20;
  dims.expert_dim = std::int64_t{1} << 20;
  EXPECT_EQ(test::thrown_text<Error>([&] { static_cast<void>(ParameterLayout(dims)); }),
            "train::ParameterLayout: dims = a model of more than 2^56 parameters: must be a model "
            "that fits a memory");
}

}  // namespace
}  // namespace heddle::train

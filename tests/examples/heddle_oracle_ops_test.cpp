#include "heddle-oracle/op_call.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <oneapi/tbb/task_arena.h>

#include "heddle-oracle/op_spec.hpp"
#include "heddle/core/error.hpp"
#include "support/safetensors.hpp"
#include "support/scratch_folder.hpp"
#include "support/thrown_text.hpp"
#include "support/usage_error.hpp"

// Mutants that must fail here: a tensor, attribute or default renamed or left out of the tables; an
// extent checked against the wrong symbol; 2*F read as F; the settings losing against the file; a dtype
// allowed where it is not; an optional output always written; initial_segment ignored; groups and shards
// of the mesh swapped; the ids of head.packed checked where they are not scored.

namespace heddle::oracle {
namespace {

using examples::Metadata;
using examples::TensorFile;
using examples::UsageError;
using test::ScratchFolder;
using test::thrown_text;
using Floats = std::vector<float>;
using Ids = std::vector<std::int32_t>;
using Counts = std::vector<std::int64_t>;

/// An op's input, as a file would hold it.
struct Case {
  Metadata attributes;
  std::vector<Tensor> tensors;

  Tensor& operator[](const std::string& name) {
    return *std::find_if(tensors.begin(), tensors.end(),
                         [&](const Tensor& tensor) { return tensor.name == name; });
  }
  void erase(const std::string& name) {
    std::erase_if(tensors, [&](const Tensor& tensor) { return tensor.name == name; });
  }
};

std::vector<Tensor> run(const Case& input, const Metadata& settings = {}) {
  const ScratchFolder scratch;
  examples::write_safetensors(scratch / "in.safetensors", input.tensors, input.attributes);
  return run_op(examples::read_safetensors(scratch / "in.safetensors"), settings);
}

/// What a case is refused with, the path of its file taken off.
std::string refusal(const Case& input, const Metadata& settings = {}) {
  std::string text = thrown_text<UsageError>([&] { static_cast<void>(run(input, settings)); });
  const std::string file = "in.safetensors: ";
  const std::size_t found = text.find(file);
  return found == std::string::npos ? text : text.substr(found + file.size());
}

std::string kernel_refusal(const Case& input, const Metadata& settings = {}) {
  return thrown_text<Error>([&] { static_cast<void>(run(input, settings)); });
}

const Tensor& named(const std::vector<Tensor>& tensors, const std::string& name) {
  return *std::find_if(tensors.begin(), tensors.end(),
                       [&](const Tensor& tensor) { return tensor.name == name; });
}

template <class T>
std::vector<T> values(const std::vector<Tensor>& tensors, const std::string& name) {
  return named(tensors, name).view().converted<T>();
}

std::vector<std::string> names(const std::vector<Tensor>& tensors) {
  std::vector<std::string> result;
  for (const Tensor& tensor : tensors) {
    result.push_back(tensor.name);
  }
  return result;
}

/// Small numbers, none of them the same.
Tensor ramp(const std::string& name, const Shape& shape, float step = 0.01F) {
  Tensor tensor(name, Dtype::f32, shape);
  float value = -0.3F;
  for (float& element : tensor.values<float>()) {
    element = (value += step);
  }
  return tensor;
}

Case gdn_case() {
  constexpr std::int64_t tokens = 5;
  return {.attributes = {{"op", "gdn.forward"},
                         {"key_heads", "1"},
                         {"value_heads", "2"},
                         {"key_dim", "3"},
                         {"value_dim", "4"}},
          .tensors = {ramp("qkv", {tokens, 14}), ramp("conv_weight", {14, 3}),
                      ramp("a", {tokens, 2}, 0.1F), ramp("b", {tokens, 2}, 0.1F),
                      ramp("A_log", {2}), ramp("dt_bias", {2}),
                      Tensor::of<std::int32_t>("segment_ids", {tokens}, {2, 2, 2, 1, 1})}};
}

Case head_case() {
  return {.attributes = {{"op", "head.forward"}},
          .tensors = {ramp("hidden", {3, 2}), ramp("weight", {2, 4}, 0.1F),
                      Tensor::of<std::int32_t>("target_ids", {3}, {0, 3, 1})}};
}

Case packed_case() {
  return {.attributes = {{"op", "head.packed"}},
          .tensors = {ramp("hidden", {5, 2}), ramp("weight", {2, 4}, 0.1F),
                      Tensor::of<std::int32_t>("token_ids", {5}, {9, 1, 2, -7, 3}),
                      Tensor::of<std::int32_t>("segment_ids", {5}, {1, 1, 1, 2, 2})}};
}

/// Four tokens that replay ids, so that what goes where is known.
Case moe_case(const Ids& forced) {
  constexpr std::int64_t tokens = 4;
  return {.attributes = {{"op", "moe.layer"}, {"top_k", "1"}},
          .tensors = {ramp("hidden", {tokens, 3}, 0.1F), ramp("router_weight", {3, 4}),
                      ramp("wi", {4, 3, 4}), ramp("wo", {4, 2, 3}),
                      Tensor::of<std::int32_t>("forced_ids", {tokens, 1}, forced)}};
}

Case loss_case() {
  return {.attributes = {{"op", "loss.grpo"}, {"aggregation", "token-mean"}},
          .tensors = {Tensor::of<float>("logps", {3}, {-1, -2, -3}),
                      Tensor::of<float>("old_logps", {3}, {-1, -2, -3}),
                      Tensor::of<float>("advantages", {3}, {1, -2, 4}),
                      Tensor::of<std::uint8_t>("mask", {3}, {0, 1, 1}),
                      Tensor::of<std::int32_t>("segment_ids", {3}, {1, 1, 1})}};
}

Case tiles_case() {
  return {.attributes = {{"op", "tiles.count"},
                         {"context", "2"},
                         {"block_q", "2"},
                         {"block_kv", "2"},
                         {"layout", "contiguous"}},
          .tensors = {Tensor::of<std::int32_t>("segment_ids", {8}, {1, 1, 1, 1, 1, 1, 1, 1})}};
}

/// The ops as the contract has them: "?" marks what is optional, "=" a default, and "|" separates
/// tensors, attributes and outputs.
const std::map<std::string, std::string> contract = {
    {"gdn.inverse", "t | block=16 | t_inv"},
    {"gdn.forward",
     "qkv conv_weight conv_bias? a b A_log dt_bias segment_ids? conv_state? recurrent_state? | "
     "key_heads value_heads key_dim value_dim chunk=64 eps=1e-6 chunking=aligned norm=root "
     "initial_segment? context_layout=contiguous | o final_recurrent_state final_conv_state"},
    {"gdn.states",
     "qkv conv_weight conv_bias? a b A_log dt_bias segment_ids? conv_state? recurrent_state? | "
     "key_heads value_heads key_dim value_dim chunk=64 eps=1e-6 chunking=aligned norm=root "
     "initial_segment? context_layout=contiguous | final_recurrent_state final_conv_state m"},
    {"gdn.backward",
     "qkv conv_weight conv_bias? a b A_log dt_bias segment_ids? conv_state? recurrent_state? d_o "
     "d_final_recurrent_state? d_final_conv_state? | "
     "key_heads value_heads key_dim value_dim chunk=64 eps=1e-6 chunking=aligned norm=root "
     "initial_segment? context_layout=contiguous | d_qkv d_conv_weight d_conv_bias? d_a d_b "
     "d_A_log "
     "d_dt_bias d_conv_state? d_recurrent_state?"},
    {"head.forward",
     "hidden weight target_ids active? | weight_layout=dv temperature=1 chunk=4096 vocab_tile=512 "
     "mode=fused logits_dtype=f32 logp_form=reference entropy_policy=xlogx id_policy=strict "
     "vocab_shards=1 | logps entropy max exp_sum"},
    {"head.backward",
     "hidden weight target_ids active? d_logps d_entropy? | weight_layout=dv temperature=1 "
     "chunk=4096 vocab_tile=512 mode=fused logits_dtype=f32 logp_form=reference "
     "entropy_policy=xlogx id_policy=strict vocab_shards=1 | d_hidden d_weight"},
    {"head.packed",
     "hidden weight token_ids segment_ids segment_positions? d_logps? d_entropy? | "
     "weight_layout=dv temperature=1 chunk=4096 vocab_tile=512 mode=fused logits_dtype=f32 "
     "logp_form=reference entropy_policy=xlogx id_policy=strict vocab_shards=1 | logps entropy "
     "d_hidden? d_weight?"},
    {"moe.route",
     "router_logits forced_ids? segment_ids? d_expert_weights? | top_k norm_topk_prob=1 "
     "exclude_padding=1 | expert_ids expert_weights permutation inverse group_sizes "
     "d_router_logits?"},
    {"moe.layer",
     "hidden router_weight wi wo shared_wi? shared_wo? shared_gate? forced_ids? segment_ids? | "
     "top_k norm_topk_prob=1 exclude_padding=1 buffer_factor? strategy=ring token_chunks=1 "
     "expert_group=context,expert | out dropped_slots group_sizes"},
    {"moe.backward",
     "hidden router_weight wi wo shared_wi? shared_wo? shared_gate? forced_ids? segment_ids? "
     "d_out | top_k norm_topk_prob=1 exclude_padding=1 buffer_factor? strategy=ring "
     "token_chunks=1 expert_group=context,expert freeze_router=0 weight_grad_from=wo_input | "
     "d_hidden d_router_weight d_wi d_wo d_shared_wi? d_shared_wo? d_shared_gate?"},
    {"tiles.count",
     "segment_ids | context block_q block_kv rule=naive layout=dual_chunk_swap | tiles"},
    {"loss.grpo",
     "logps old_logps advantages mask ref_logps? segment_ids | clip_low=0.2 clip_high=0.2 kl? "
     "beta=0.04 aggregation norm? | loss d_logps"},
};

TEST(OracleOps, TheTablesAreTheContract) {
  std::map<std::string, std::string> tables;
  for (const OpSpec& op : all_ops()) {
    std::string text;
    for (const TensorRule& tensor : op.tensors) {
      text += tensor.name + (tensor.optional ? "? " : " ");
    }
    text += "|";
    const std::vector<std::string> common = {"mesh", "threads", "path"};
    for (const AttributeRule& attribute : op.attributes) {
      if (std::find(common.begin(), common.end(), attribute.name) == common.end()) {
        text += " " + attribute.name +
                (attribute.default_value ? "=" + *attribute.default_value
                                         : std::string(attribute.required ? "" : "?"));
      }
    }
    text += " |";
    for (const OutputRule& output : op.outputs) {
      text += " " + output.name + (output.given_any_of.empty() ? "" : "?");
    }
    tables[op.name] = text;
    EXPECT_EQ(op.find_attribute("path")->choices.size(), op.name == "gdn.forward" ? 3U : 2U);
    EXPECT_EQ(op.find_attribute("path")->default_value, "fast");
    EXPECT_NE(op.find_attribute("mesh"), nullptr);
    EXPECT_NE(op.find_attribute("threads"), nullptr);
  }
  EXPECT_EQ(tables, contract);
}

TEST(OracleOps, ExtentsAreSumsOfProducts) {
  Symbols symbols = {{"Hk", 2}, {"Dk", 3}, {"Hv", 4}, {"Dv", 5}};
  EXPECT_EQ(extent_value("2*Hk*Dk + Hv*Dv", symbols), 32);
  EXPECT_EQ(extent_value("Hv*Dv", symbols), 20);
  EXPECT_EQ(extent_value("1", symbols), 1);
  EXPECT_EQ(extent_value("K - 1", symbols), std::nullopt);
  EXPECT_TRUE(match_extent("K - 1", 3, symbols));
  EXPECT_EQ(symbols.at("K"), 4);
  EXPECT_FALSE(match_extent("K - 1", 4, symbols));
  EXPECT_FALSE(match_extent("2*F", 7, symbols)) << "no integer F";
  EXPECT_FALSE(symbols.contains("F"));
  EXPECT_TRUE(match_extent("2*F", 8, symbols));
  EXPECT_EQ(symbols.at("F"), 4);
  EXPECT_TRUE(match_extent("1", 1, symbols));
  EXPECT_FALSE(match_extent("1", 2, symbols));
  symbols["T"] = std::int64_t{1} << 62;
  EXPECT_EQ(extent_value("T*K", symbols), std::nullopt) << "overflow";
  EXPECT_EQ(expected_shape_text({"K", "1", "Q", "2*F"}, symbols), "[K = 4, 1, Q, 2*F = 8]");
}

TEST(OracleOps, RefusesAnOpThatIsNone) {
  Case input = gdn_case();
  const std::string all =
      "must be gdn.inverse, gdn.forward, gdn.states, gdn.backward, head.forward, head.backward, "
      "head.packed, moe.route, moe.layer, moe.backward, tiles.count or loss.grpo";
  input.attributes["op"] = "gdn.foward";
  EXPECT_EQ(refusal(input), "op 'gdn.foward' is unknown: " + all);
  input.attributes.erase("op");
  EXPECT_EQ(refusal(input), "attribute 'op' is missing: " + all);
  EXPECT_EQ(refusal(input, {{"op", "gdn.forward"}}), "nothing was thrown") << "--set gives it";
}

TEST(OracleOps, RefusesAttributesByTheirRule) {
  const Case input = gdn_case();
  EXPECT_EQ(
      refusal(input, {{"chnk", "3"}}),
      "attribute 'chnk' = '3' is unknown: gdn.forward takes key_heads, value_heads, key_dim, "
      "value_dim, chunk, eps, chunking, norm, initial_segment, context_layout, mesh, threads, "
      "path");
  EXPECT_EQ(refusal(input, {{"chunk", "0"}}), "attribute 'chunk' = '0': must be an integer >= 1");
  EXPECT_EQ(refusal(input, {{"chunk", "1.5"}}),
            "attribute 'chunk' = '1.5': must be an integer >= 1");
  EXPECT_EQ(refusal(input, {{"chunk", "16 "}}),
            "attribute 'chunk' = '16 ': must be an integer >= 1");
  EXPECT_EQ(refusal(input, {{"chunk", "1e300"}}),
            "attribute 'chunk' = '1e300': must be at most 1073741824");
  EXPECT_EQ(refusal(input, {{"chunk", "1.6e1"}}), "nothing was thrown") << "numbers are doubles";
  EXPECT_EQ(refusal(input, {{"eps", "0"}}), "attribute 'eps' = '0': must be a finite number > 0");
  EXPECT_EQ(refusal(input, {{"eps", "inf"}}),
            "attribute 'eps' = 'inf': must be a finite number > 0");
  EXPECT_EQ(refusal(input, {{"eps", "nan"}}),
            "attribute 'eps' = 'nan': must be a finite number > 0");
  EXPECT_EQ(refusal(input, {{"eps", ""}}), "attribute 'eps' = '': must be a finite number > 0");
  EXPECT_EQ(refusal(input, {{"norm", "Root"}}),
            "attribute 'norm' = 'Root': must be root, clamp or none");
  EXPECT_EQ(refusal(input, {{"path", "slow"}}),
            "attribute 'path' = 'slow': must be fast, reference or decode");
  EXPECT_EQ(refusal(input, {{"threads", "0"}}),
            "attribute 'threads' = '0': must be an integer >= 1");
  EXPECT_EQ(refusal(input, {{"threads", "2000"}}),
            "attribute 'threads' = '2000': must be at most 1024");
  EXPECT_EQ(refusal(input, {{"key_heads", "0"}}),
            "attribute 'key_heads' = '0': must be an integer >= 1 (Hk)");
  EXPECT_EQ(refusal(head_case(), {{"temperature", "-1"}}),
            "attribute 'temperature' = '-1': must be a finite number >= 0");
  EXPECT_EQ(refusal(moe_case({0, 0, 0, 0}), {{"norm_topk_prob", "2"}}),
            "attribute 'norm_topk_prob' = '2': must be 0 or 1");
  Case missing = input;
  missing.attributes.erase("value_dim");
  EXPECT_EQ(refusal(missing), "attribute 'value_dim' is missing: must be an integer >= 1 (Dv)");
  missing = loss_case();
  missing.attributes.erase("aggregation");
  EXPECT_EQ(refusal(missing),
            "attribute 'aggregation' is missing: must be token-mean, sequence-mean-token-mean, "
            "sequence-mean-token-scale, seq-mean-token-sum or sequence-mean-token-sum-norm");
}

TEST(OracleOps, RefusesAMeshThatIsNone) {
  EXPECT_EQ(refusal(gdn_case(), {{"mesh", "rows=2"}}),
            "attribute 'mesh' = 'rows=2': mesh = rows=2: axes are fsdp, context and expert");
  EXPECT_EQ(refusal(gdn_case(), {{"mesh", "context=0"}}),
            "attribute 'mesh' = 'context=0': context = 0: must be a whole number of devices >= 1");
  EXPECT_EQ(refusal(gdn_case(), {{"mesh", "fsdp=1,context=1"}}), "nothing was thrown");
  EXPECT_EQ(refusal(gdn_case(), {{"mesh", ""}}), "nothing was thrown");
}

TEST(OracleOps, SettingsGoBeforeTheFile) {
  Case input = tiles_case();
  EXPECT_EQ(values<std::int64_t>(run(input), "tiles"), (Counts{3, 7}));
  EXPECT_EQ(values<std::int64_t>(run(input, {{"context", "1"}}), "tiles"), Counts{10});
  input.attributes["context"] = "0";
  EXPECT_EQ(values<std::int64_t>(run(input, {{"context", "1"}}), "tiles"), Counts{10})
      << "what is overridden is not checked";
}

TEST(OracleOps, RefusesTensorsByNameDtypeAndShape) {
  Case input = gdn_case();
  input.tensors.push_back(ramp("qvk", {2}));
  EXPECT_EQ(
      refusal(input),
      "tensor 'qvk' is F32 [2] and unknown: gdn.forward takes qkv, conv_weight, conv_bias, a, "
      "b, A_log, dt_bias, segment_ids, conv_state, recurrent_state");

  input = gdn_case();
  input.erase("qkv");
  EXPECT_EQ(refusal(input),
            "tensor 'qkv' is missing: must be F64, F32 or BF16 [T, 2*Hk*Dk + Hv*Dv = 14]");
  input = gdn_case();
  input.erase("b");
  EXPECT_EQ(refusal(input), "tensor 'b' is missing: must be F32 [T = 5, Hv = 2]");

  input = gdn_case();
  input["qkv"] = ramp("qkv", {5, 13});
  EXPECT_EQ(refusal(input),
            "tensor 'qkv' is F32 [5, 13]: must be F64, F32 or BF16 [T, 2*Hk*Dk + Hv*Dv = 14]");
  input["qkv"] = ramp("qkv", {5, 7, 2});
  EXPECT_EQ(refusal(input),
            "tensor 'qkv' is F32 [5, 7, 2]: must be F64, F32 or BF16 [T, 2*Hk*Dk + Hv*Dv = 14]");
  input["qkv"] = Tensor("qkv", Dtype::i32, {5, 14});
  EXPECT_EQ(refusal(input),
            "tensor 'qkv' is I32 [5, 14]: must be F64, F32 or BF16 [T, 2*Hk*Dk + Hv*Dv = 14]");

  input = gdn_case();
  input["a"] = Tensor("a", Dtype::f64, {5, 2});
  EXPECT_EQ(refusal(input), "tensor 'a' is F64 [5, 2]: must be F32 [T = 5, Hv = 2]");
  input["a"] = ramp("a", {4, 2});
  EXPECT_EQ(refusal(input), "tensor 'a' is F32 [4, 2]: must be F32 [T = 5, Hv = 2]");

  input = gdn_case();
  input.tensors.push_back(ramp("conv_state", {3, 14}));
  EXPECT_EQ(refusal(input),
            "tensor 'conv_state' is F32 [3, 14]: must be F32 [K - 1 = 2, 2*Hk*Dk + Hv*Dv = 14]");

  input = moe_case({0, 0, 0, 0});
  input["wi"] = ramp("wi", {4, 3, 5});
  EXPECT_EQ(refusal(input), "tensor 'wi' is F32 [4, 3, 5]: must be F32 [E = 4, D = 3, 2*F]");

  input = head_case();
  EXPECT_EQ(refusal(input, {{"weight_layout", "vd"}}),
            "tensor 'weight' is F32 [2, 4]: must be F32 [V, D = 2]");
  input["target_ids"] = Tensor("target_ids", Dtype::i64, {3});
  EXPECT_EQ(refusal(input), "tensor 'target_ids' is I64 [3]: must be I32 [T = 3]");
}

TEST(OracleOps, ParametersMayBeWiderThanBf16Activations) {
  const auto bf16 = [](Tensor& tensor) {
    tensor = Tensor::of<bfloat16>(tensor.name, tensor.shape, tensor.view().converted<bfloat16>());
  };
  Case input = gdn_case();
  for (const char* name : {"qkv", "a", "b"}) {
    bf16(input[name]);
  }
  EXPECT_EQ(refusal(input), "nothing was thrown");
  // Of the two parameters of the convolution either may be the wider one.
  const Floats wide = values<float>(run(input), "o");
  bf16(input["conv_weight"]);
  input["conv_weight"] =
      Tensor::of<float>("conv_weight", {14, 3}, input["conv_weight"].view().converted<float>());
  const Floats rounded = values<float>(run(input), "o");
  EXPECT_NE(rounded, wide);
  bf16(input["conv_weight"]);
  EXPECT_EQ(values<float>(run(input), "o"), rounded);
  input.tensors.push_back(Tensor("conv_bias", Dtype::f32, {14}));
  EXPECT_EQ(values<float>(run(input), "o"), rounded) << "a bias of zeros";
  EXPECT_EQ(named(run(input), "final_conv_state").dtype, Dtype::f32);

  input["A_log"] = Tensor("A_log", Dtype::bf16, {2});
  EXPECT_EQ(refusal(input), "tensor 'A_log' is BF16 [2]: must be F32 [Hv = 2]");
  input = gdn_case();
  input["conv_weight"] = Tensor("conv_weight", Dtype::bf16, {14, 3});
  EXPECT_EQ(refusal(input),
            "tensor 'conv_weight' is BF16 [14, 3]: must be F32 [2*Hk*Dk + Hv*Dv = 14, K]");
}

TEST(OracleOps, BooleansAreZeroOrOne) {
  Case input = loss_case();
  input["mask"].values<std::uint8_t>()[2] = 2;
  EXPECT_EQ(refusal(input), "tensor 'mask' has 2 at 2: must be 0 or 1 everywhere");
}

TEST(OracleOps, OutputsFollowWhatIsGiven) {
  using Names = std::vector<std::string>;
  Case input = gdn_case();
  input.attributes["op"] = "gdn.backward";
  input.tensors.push_back(ramp("d_o", {5, 8}));
  const Names always = {"d_qkv", "d_conv_weight", "d_a", "d_b", "d_A_log", "d_dt_bias"};
  EXPECT_EQ(names(run(input)), always);
  input.tensors.push_back(ramp("conv_state", {2, 14}));
  EXPECT_EQ(names(run(input)).back(), "d_conv_state");
  input = packed_case();
  EXPECT_EQ(names(run(input)), (Names{"logps", "entropy"}));
  input.tensors.push_back(ramp("d_entropy", {5}));
  EXPECT_EQ(names(run(input)), (Names{"logps", "entropy", "d_hidden", "d_weight"}));
  input.attributes["weight_layout"] = "vd";
  input["weight"] = ramp("weight", {4, 2});
  EXPECT_EQ(named(run(input), "d_weight").shape, (Shape{4, 2})) << "in the layout of weight";
}

TEST(OracleOps, OutputsHaveExtentsThatCanBe) {
  Case input = gdn_case();
  input["conv_weight"] = Tensor("conv_weight", Dtype::f32, {14, 0});
  EXPECT_EQ(refusal(input), "an output has the extent K - 1 = -1: must be >= 0 and fit I64");
  input.attributes = {{"op", "moe.route"}, {"top_k", "3"}};
  input.tensors = {Tensor("router_logits", Dtype::f32, {std::int64_t{1} << 62, 0})};
  EXPECT_EQ(kernel_refusal(input),
            "Tensor: expert_ids = [4611686018427387904, 3]: must have extents >= 0 and a number of "
            "elements that fits I64");
}

TEST(OracleOps, SharedWeightsComeTogether) {
  Case input = moe_case({0, 0, 0, 0});
  input.tensors.push_back(ramp("shared_wi", {3, 6}));
  input.tensors.push_back(ramp("shared_gate", {3, 1}));
  EXPECT_EQ(refusal(input),
            "tensor 'shared_wo' is missing: shared_wi, shared_wo, shared_gate come together or not "
            "at all");
  input.tensors.push_back(ramp("shared_wo", {3, 3}));
  EXPECT_EQ(refusal(input), "nothing was thrown");
}

TEST(OracleOps, TensorsWithoutElements) {
  Case input = gdn_case();
  input["conv_weight"] = ramp("conv_weight", {14, 1});
  input.tensors.push_back(Tensor("conv_state", Dtype::f32, {0, 14}));
  EXPECT_EQ(named(run(input), "final_conv_state").shape, (Shape{0, 14})) << "a convolution of 1";
  input = head_case();
  for (Tensor& tensor : input.tensors) {
    if (tensor.name != "weight") {
      Shape shape = tensor.shape;
      shape[0] = 0;
      tensor = Tensor(tensor.name, tensor.dtype, shape);
    }
  }
  EXPECT_EQ(named(run(input), "logps").shape, Shape{0});
}

TEST(OracleOps, AStateBelongsToTheFirstDocumentUnlessToldOtherwise) {
  Case input = gdn_case();
  const Floats without = values<float>(run(input), "o");
  input.tensors.push_back(ramp("recurrent_state", {2, 3, 4}));
  const Floats first = values<float>(run(input), "o");
  EXPECT_NE(first, without);
  EXPECT_EQ(values<float>(run(input, {{"initial_segment", "2"}}), "o"), first);
  EXPECT_EQ(values<float>(run(input, {{"initial_segment", "1"}}), "o"), without)
      << "a state of another document is not read";
  EXPECT_EQ(values<float>(run(input, {{"initial_segment", "0"}}), "o"), without);
  input.erase("segment_ids");
  EXPECT_EQ(values<float>(run(input), "o"),
            values<float>(run(input, {{"initial_segment", "1"}}), "o"))
      << "without ids every token is of document 1";
}

TEST(OracleOps, AnOpHasAsManyWorkersAsItAsksFor) {
  using oneapi::tbb::this_task_arena::max_concurrency;
  const int usual = max_concurrency();
  for (const int workers : {1, 3, 19}) {
    int found = 0;
    with_workers(workers, [&] { found = max_concurrency(); });
    EXPECT_EQ(found, workers);
  }
  int found = 0;
  with_workers(std::nullopt, [&] { found = max_concurrency(); });
  EXPECT_EQ(found, usual);
  EXPECT_EQ(values<std::int64_t>(run(tiles_case(), {{"threads", "2"}}), "tiles"), (Counts{3, 7}));
}

TEST(OracleOps, ResultsDoNotDependOnThreads) {
  const Case input = gdn_case();
  const Floats one = values<float>(run(input, {{"threads", "1"}}), "o");
  EXPECT_EQ(values<float>(run(input, {{"threads", "7"}}), "o"), one);
  EXPECT_EQ(values<float>(run(input), "o"), one);
}

TEST(OracleOps, TheReferenceModelsDropsOfTheMesh) {
  // Expert 0 takes all four tokens. A device has room for trunc(tokens of its slice * K * 1) rows.
  const Case input = moe_case({0, 0, 0, 0});
  const auto dropped = [&](Metadata settings) {
    settings["buffer_factor"] = "1";
    settings["path"] = "reference";
    return values<std::int64_t>(run(input, settings), "dropped_slots");
  };
  EXPECT_EQ(dropped({}), Counts{0}) << "room for 4";
  EXPECT_EQ(dropped({{"mesh", "expert=2"}}), Counts{2}) << "one group of two: room for 2 of 4";
  EXPECT_EQ(dropped({{"mesh", "context=2"}}), Counts{2}) << "context is in the group";
  EXPECT_EQ(dropped({{"mesh", "context=2"}, {"expert_group", "expert"}}), Counts{0})
      << "two groups of one: room for 2 of 2 each";
  EXPECT_EQ(dropped({{"mesh", "fsdp=2"}}), Counts{0}) << "two groups of one";
  EXPECT_EQ(dropped({{"mesh", "context=2,expert=2"}}), Counts{3});
  EXPECT_EQ(dropped({{"mesh", "context=2,expert=2"}, {"expert_group", "expert"}}), Counts{2});
  EXPECT_EQ(values<std::int64_t>(run(input, {{"mesh", "expert=2"}, {"path", "reference"}}),
                                 "dropped_slots"),
            Counts{0})
      << "no buffer, no drops";
  EXPECT_EQ(
      kernel_refusal(input, {{"mesh", "context=3"}, {"path", "reference"}}),
      "mesh: E = 4: is not divisible by context=3 x expert=1 (= 3), remainder 1; nearest: 3, 6");
}

TEST(OracleOps, PackedIdsAreCheckedWhereTheyAreScored) {
  Case input = packed_case();
  EXPECT_EQ(refusal(input), "nothing was thrown") << "9 and -7 open their documents";
  input["token_ids"].values<std::int32_t>()[2] = 4;
  EXPECT_EQ(refusal(input),
            "tensor 'token_ids' has 4 at 2: must be in [0, 4) where a token is scored, with "
            "id_policy=strict");
  EXPECT_EQ(refusal(input, {{"id_policy", "wrap"}}), "nothing was thrown");
}

TEST(OracleOps, ALossSaysWhatItLacks) {
  const Case input = loss_case();
  // By hand: ratios of 1, so the loss is -(−2 + 4) / 2 over the mask and each gradient −A / 2.
  EXPECT_EQ(values<float>(run(input), "loss"), Floats{-1});
  EXPECT_EQ(values<float>(run(input), "d_logps"), (Floats{0, 1, -2}));
  EXPECT_EQ(refusal(input, {{"kl", "kl"}}),
            "tensor 'ref_logps' is missing: must be given with kl=kl");
  EXPECT_EQ(
      refusal(input, {{"aggregation", "sequence-mean-token-scale"}}),
      "attribute 'norm' is missing: must be given with aggregation=sequence-mean-token-scale");
  EXPECT_EQ(values<float>(run(input, {{"aggregation", "sequence-mean-token-scale"}, {"norm", "4"}}),
                          "loss"),
            Floats{-0.5F});
}

}  // namespace
}  // namespace heddle::oracle

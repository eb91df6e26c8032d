#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heddle-oracle/op_call.hpp"
#include "heddle-oracle/ops.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/topology.hpp"
#include "heddle/moe/arguments.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/expert_layer.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/reference.hpp"
#include "heddle/moe/reference_maps.hpp"
#include "heddle/moe/reference_router.hpp"
#include "heddle/moe/residuals.hpp"
#include "heddle/moe/router.hpp"
#include "heddle/moe/routing_map.hpp"

namespace heddle::oracle {
namespace {

const TensorRule forced_ids = {
    .name = "forced_ids", .stored = Stored::ids, .shape = {"T", "K"}, .optional = true};
const TensorRule segment_ids = {
    .name = "segment_ids", .stored = Stored::ids, .shape = {"T"}, .optional = true};

std::vector<AttributeRule> router_attributes() {
  return {integer_attribute("top_k", 1).always("K"),
          flag_attribute("norm_topk_prob").by_default("1"),
          flag_attribute("exclude_padding").by_default("1")};
}

moe::RouterOptions router_options(const OpCall& call) {
  return {.weights = call.flag("norm_topk_prob") ? moe::TopKWeights::softmax_of_chosen
                                                 : moe::TopKWeights::softmax_of_all,
          .padding = call.flag("exclude_padding") ? moe::PaddingRouting::exclude
                                                  : moe::PaddingRouting::include};
}

/// Slots in the order of their experts, into the op's outputs.
void write_maps(OpCall& call, const moe::RouterDims& dims, ConstMatrixView<std::int32_t> ids) {
  const std::span<std::int32_t> permutation = call.output_vector<std::int32_t>("permutation");
  const std::span<std::int32_t> inverse = call.output_vector<std::int32_t>("inverse");
  const std::span<std::int64_t> group_sizes = call.output_vector<std::int64_t>("group_sizes");
  if (call.path() == Path::reference) {
    const moe::reference::RoutingMaps maps = moe::reference::routing_maps(dims, ids);
    std::ranges::copy(maps.permutation, permutation.begin());
    std::ranges::copy(maps.inverse, inverse.begin());
    std::ranges::copy(maps.group_sizes, group_sizes.begin());
    return;
  }
  std::vector<std::int64_t> offsets(group_sizes.size() + 1);
  Workspace workspace;
  moe::RoutingMapBuilder(workspace).build(dims, ids, {permutation, inverse, offsets});
  for (std::size_t e = 0; e < group_sizes.size(); ++e) {
    group_sizes[e] = offsets[e + 1] - offsets[e];
  }
}

void compute_route(OpCall& call) {
  with_storage(call, [&]<class S>(S) {
    using A = AccumulatorOf<S>;
    const moe::RouterDims dims{
        .tokens = call.extent("T"), .experts = call.extent("E"), .top_k = call.extent("K")};
    const moe::RouterOptions options = router_options(call);
    const moe::RouterInputs<S> inputs{.router_logits = call.matrix<S>("router_logits"),
                                      .forced_ids = call.matrix<std::int32_t>("forced_ids"),
                                      .segment_ids = call.vector<std::int32_t>("segment_ids")};
    const moe::RouterOutputs<A> outputs{.expert_ids = call.output<std::int32_t>("expert_ids"),
                                        .expert_weights = call.output<A>("expert_weights")};
    const bool plain = call.path() == Path::reference;
    if (plain) {
      moe::reference::route<S>(dims, inputs, options, outputs);
    } else {
      moe::route<S>(dims, inputs, options, outputs);
    }
    write_maps(call, dims, outputs.expert_ids);

    if (call.has("d_expert_weights")) {
      const moe::RouterBackwardInputs<S> given{
          .router_logits = inputs.router_logits,
          .expert_ids = outputs.expert_ids,
          .d_expert_weights = call.matrix<A>("d_expert_weights")};
      const MatrixView<A> d_logits = call.output<A>("d_router_logits");
      if (plain) {
        moe::reference::route_backward<S>(dims, given, options, d_logits);
      } else {
        moe::route_backward<S>(dims, given, options, d_logits);
      }
    }
  });
}

std::vector<TensorRule> layer_tensors() {
  return {
      {.name = "hidden", .stored = Stored::main, .shape = {"T", "D"}},
      {.name = "router_weight", .stored = Stored::parameter, .shape = {"D", "E"}},
      {.name = "wi", .shape = {"E", "D", "2*F"}},
      {.name = "wo", .shape = {"E", "F", "D"}},
      {.name = "shared_wi", .shape = {"D", "2*Fs"}, .optional = true},
      {.name = "shared_wo", .shape = {"Fs", "D"}, .optional = true},
      {.name = "shared_gate", .shape = {"D", "1"}, .optional = true},
      forced_ids,
      segment_ids,
  };
}

std::vector<AttributeRule> layer_attributes() {
  std::vector<AttributeRule> attributes = router_attributes();
  attributes.push_back(positive_attribute("buffer_factor"));
  attributes.push_back(choice_attribute("strategy", {"ring", "all_to_all"}).by_default("ring"));
  attributes.push_back(integer_attribute("token_chunks", 1).by_default("1"));
  attributes.push_back(
      choice_attribute("expert_group", {"context,expert", "expert"}).by_default("context,expert"));
  return attributes;
}

/// The arguments of a layer call, whichever op makes it.
template <class S, class R>
struct Layer {
  explicit Layer(OpCall& call) {
    const bool shared = call.has("shared_wi");
    dims = {.tokens = call.extent("T"),
            .hidden = call.extent("D"),
            .experts = call.extent("E"),
            .top_k = call.extent("K"),
            .expert_hidden = call.extent("F"),
            .shared_hidden = shared ? call.extent("Fs") : 0};
    inputs = {.hidden = call.matrix<S>("hidden"),
              .router_weight = call.matrix<R>("router_weight"),
              .wi = call.matrix<S>("wi"),
              .wo = call.matrix<S>("wo"),
              .shared_wi = call.matrix<S>("shared_wi"),
              .shared_wo = call.matrix<S>("shared_wo"),
              .shared_gate = call.matrix<S>("shared_gate"),
              .forced_ids = call.matrix<std::int32_t>("forced_ids"),
              .segment_ids = call.vector<std::int32_t>("segment_ids")};

    const AxisTuple group = call.text("expert_group") == "expert"
                                ? AxisTuple{Axis::expert}
                                : AxisTuple{Axis::context, Axis::expert};
    require_divisible("E", dims.experts, call.mesh(), group);
    options.router = router_options(call);
    moe::DispatchOptions& dispatch = options.dispatch;
    if (call.given("buffer_factor")) {
      dispatch.buffer_factor = call.number("buffer_factor");
    }
    dispatch.strategy =
        call.choice<moe::Strategy>("strategy", {moe::Strategy::ring, moe::Strategy::all_to_all});
    dispatch.token_chunks = call.integer("token_chunks");
    // Devices of a group are neighbours in rank order, groups stand one after the other.
    dispatch.shards = group.size(call.mesh());
    dispatch.groups = call.mesh().devices() / dispatch.shards;
  }

  moe::Dims dims;
  moe::Inputs<S, R> inputs;
  moe::Options options;
};

template <class Use>
void with_layer(OpCall& call, const Use& use) {
  with_storages(call, call.dtype("router_weight") != call.main_dtype(), [&](auto s, auto r) {
    Layer<decltype(s), decltype(r)> layer(call);
    use(layer);
  });
}

void compute_layer(OpCall& call) {
  with_layer(call, [&]<class S, class R>(Layer<S, R>& layer) {
    using A = AccumulatorOf<S>;
    const moe::Outputs<A> outputs{.out = call.output<A>("out"),
                                  .expert_ids = {},
                                  .expert_weights = {},
                                  .router_logits = {},
                                  .group_sizes = call.output_vector<std::int64_t>("group_sizes")};
    Workspace workspace;
    moe::RoutingMapBuilder maps(workspace);
    const moe::LayerReport report =
        call.path() == Path::reference
            ? moe::reference::forward(layer.dims, layer.inputs, layer.options, outputs)
            : moe::forward(layer.dims, layer.inputs, layer.options, outputs, moe::Residuals<S>{},
                           maps, workspace);
    call.output_vector<std::int64_t>("dropped_slots")[0] = report.dropped_slots;
  });
}

void compute_backward(OpCall& call) {
  with_layer(call, [&]<class S, class R>(Layer<S, R>& layer) {
    using A = AccumulatorOf<S>;
    layer.options.router_training =
        call.flag("freeze_router") ? moe::RouterTraining::frozen : moe::RouterTraining::trained;
    layer.options.weight_grad_from = call.choice<moe::WeightGradFrom>(
        "weight_grad_from", {moe::WeightGradFrom::wo_input, moe::WeightGradFrom::wo_output});
    const auto weight = [&](std::string_view name) {
      return WeightCotangent<A>{.values = call.output<A>(name)};
    };
    const moe::OutputCotangents<S> cotangents{.d_out = call.matrix<S>("d_out"),
                                              .d_router_logits = {}};
    const moe::InputCotangents<A> gradients{.d_hidden = call.output<A>("d_hidden"),
                                            .d_router_weight = weight("d_router_weight"),
                                            .d_wi = weight("d_wi"),
                                            .d_wo = weight("d_wo"),
                                            .d_shared_wi = weight("d_shared_wi"),
                                            .d_shared_wo = weight("d_shared_wo"),
                                            .d_shared_gate = weight("d_shared_gate")};
    if (call.path() == Path::reference) {
      moe::reference::backward(layer.dims, layer.inputs, cotangents, layer.options, gradients);
      return;
    }
    Workspace memory;
    Workspace workspace;
    moe::RoutingMapBuilder maps(workspace);
    const auto residuals = moe::take_residuals<S>(layer.dims, layer.options.dispatch, memory);
    const auto out = workspace.take<A>(layer.dims.tokens * layer.dims.hidden);
    moe::forward(layer.dims, layer.inputs, layer.options,
                 moe::Outputs<A>{.out = {out.data(), layer.dims.tokens, layer.dims.hidden}},
                 residuals, maps, workspace);
    moe::backward(layer.dims, layer.inputs, cotangents, layer.options, residuals, gradients,
                  workspace);
  });
}

}  // namespace

std::vector<OpSpec> moe_ops() {
  const std::vector<std::string> shared = {"shared_wi", "shared_wo", "shared_gate"};

  OpSpec route{.name = "moe.route",
               .tensors = {{.name = "router_logits", .stored = Stored::main, .shape = {"T", "E"}},
                           forced_ids,
                           segment_ids,
                           {.name = "d_expert_weights",
                            .stored = Stored::accumulator,
                            .shape = {"T", "K"},
                            .optional = true}},
               .attributes = router_attributes(),
               .outputs = {{.name = "expert_ids", .stored = Stored::ids, .shape = {"T", "K"}},
                           {.name = "expert_weights", .shape = {"T", "K"}},
                           {.name = "permutation", .stored = Stored::ids, .shape = {"T*K"}},
                           {.name = "inverse", .stored = Stored::ids, .shape = {"T*K"}},
                           {.name = "group_sizes", .stored = Stored::counts, .shape = {"E"}},
                           {.name = "d_router_logits",
                            .shape = {"T", "E"},
                            .given_any_of = {"d_expert_weights"}}},
               .compute = compute_route};

  OpSpec layer{.name = "moe.layer",
               .tensors = layer_tensors(),
               .attributes = layer_attributes(),
               .outputs = {{.name = "out", .shape = {"T", "D"}},
                           {.name = "dropped_slots", .stored = Stored::counts, .shape = {"1"}},
                           {.name = "group_sizes", .stored = Stored::counts, .shape = {"E"}}},
               .compute = compute_layer,
               .all_or_none = shared};

  OpSpec backward{
      .name = "moe.backward",
      .tensors = layer_tensors(),
      .attributes = layer_attributes(),
      .outputs = {{.name = "d_hidden", .shape = {"T", "D"}},
                  {.name = "d_router_weight", .shape = {"D", "E"}},
                  {.name = "d_wi", .shape = {"E", "D", "2*F"}},
                  {.name = "d_wo", .shape = {"E", "F", "D"}},
                  {.name = "d_shared_wi", .shape = {"D", "2*Fs"}, .given_any_of = {"shared_wi"}},
                  {.name = "d_shared_wo", .shape = {"Fs", "D"}, .given_any_of = {"shared_wo"}},
                  {.name = "d_shared_gate", .shape = {"D", "1"}, .given_any_of = {"shared_gate"}}},
      .compute = compute_backward,
      .all_or_none = shared};
  backward.tensors.push_back({.name = "d_out", .shape = {"T", "D"}});
  backward.attributes.push_back(flag_attribute("freeze_router").by_default("0"));
  backward.attributes.push_back(
      choice_attribute("weight_grad_from", {"wo_input", "wo_output"}).by_default("wo_input"));
  return {std::move(route), std::move(layer), std::move(backward)};
}

}  // namespace heddle::oracle

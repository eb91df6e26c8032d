#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "heddle-oracle/op_call.hpp"
#include "heddle-oracle/ops.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/decode.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/layer.hpp"
#include "heddle/gdn/reference.hpp"
#include "heddle/gdn/reference_inverse.hpp"
#include "heddle/gdn/triangular_inverse.hpp"

namespace heddle::oracle {
namespace {

constexpr const char* qkv_columns = "2*Hk*Dk + Hv*Dv";
constexpr const char* output_columns = "Hv*Dv";

std::vector<TensorRule> layer_tensors() {
  return {
      {.name = "qkv", .stored = Stored::main, .shape = {"T", qkv_columns}},
      {.name = "conv_weight", .stored = Stored::parameter, .shape = {qkv_columns, "K"}},
      {.name = "conv_bias", .stored = Stored::parameter, .shape = {qkv_columns}, .optional = true},
      {.name = "a", .shape = {"T", "Hv"}},
      {.name = "b", .shape = {"T", "Hv"}},
      {.name = "A_log", .stored = Stored::accumulator, .shape = {"Hv"}},
      {.name = "dt_bias", .stored = Stored::accumulator, .shape = {"Hv"}},
      {.name = "segment_ids", .stored = Stored::ids, .shape = {"T"}, .optional = true},
      {.name = "conv_state", .shape = {"K - 1", qkv_columns}, .optional = true},
      {.name = "recurrent_state",
       .stored = Stored::accumulator,
       .shape = {"Hv", "Dk", "Dv"},
       .optional = true},
  };
}

std::vector<AttributeRule> layer_attributes() {
  AttributeRule initial_segment = integer_attribute("initial_segment", 0);
  initial_segment.highest = std::numeric_limits<std::int32_t>::max();
  return {
      integer_attribute("key_heads", 1).always("Hk"),
      integer_attribute("value_heads", 1).always("Hv"),
      integer_attribute("key_dim", 1).always("Dk"),
      integer_attribute("value_dim", 1).always("Dv"),
      integer_attribute("chunk", 1).by_default("64"),
      positive_attribute("eps").by_default("1e-6"),
      choice_attribute("chunking", {"aligned", "grid"}).by_default("aligned"),
      choice_attribute("norm", {"root", "clamp", "none"}).by_default("root"),
      initial_segment,
      choice_attribute("context_layout", {"contiguous", "dual_chunk_swap"})
          .by_default("contiguous"),
  };
}

const std::vector<OutputRule> final_states = {
    {.name = "final_recurrent_state", .shape = {"Hv", "Dk", "Dv"}},
    {.name = "final_conv_state", .shape = {"K - 1", qkv_columns}},
};

/// The arguments of a layer call, whichever op makes it.
template <class S, class P>
struct Layer {
  using A = AccumulatorOf<S>;

  explicit Layer(OpCall& call) {
    dims = {.tokens = call.extent("T"),
            .key_heads = call.extent("Hk"),
            .value_heads = call.extent("Hv"),
            .key_dim = call.extent("Dk"),
            .value_dim = call.extent("Dv"),
            .kernel = call.extent("K")};
    segment_ids.assign(static_cast<std::size_t>(dims.tokens), 1);
    if (call.has("segment_ids")) {
      const auto given = call.vector<std::int32_t>("segment_ids");
      segment_ids.assign(given.begin(), given.end());
    }
    inputs.qkv = call.matrix<S>("qkv");
    inputs.conv_weight = call.matrix<P>("conv_weight");
    inputs.conv_bias = call.vector<P>("conv_bias");
    inputs.a = call.matrix<S>("a");
    inputs.b = call.matrix<S>("b");
    inputs.A_log = call.vector<A>("A_log");
    inputs.dt_bias = call.vector<A>("dt_bias");
    inputs.segment_ids = segment_ids;
    inputs.conv_state = call.matrix<S>("conv_state");
    inputs.recurrent_state = call.matrix<A>("recurrent_state");

    options.eps = call.number("eps");
    options.norm = call.choice<gdn::NormMode>(
        "norm", {gdn::NormMode::root, gdn::NormMode::clamp, gdn::NormMode::none});
    layer_options.chunks = {.chunk = call.integer("chunk"),
                            .chunking = call.choice<gdn::Chunking>(
                                "chunking", {gdn::Chunking::aligned, gdn::Chunking::grid})};
    if (call.given("initial_segment")) {
      options.initial_segment = static_cast<std::int32_t>(call.integer("initial_segment"));
    } else if ((call.has("conv_state") || call.has("recurrent_state")) && dims.tokens > 0) {
      options.initial_segment = std::max(segment_ids.front(), 0);
    }
  }

  gdn::Dims dims;
  gdn::Inputs<S, P, A> inputs;
  gdn::Options options;
  gdn::LayerOptions layer_options;
  gdn::LayerScratch scratch;
  std::vector<std::int32_t> segment_ids;
};

/// The convolution's window keeps the storage of its inputs; as an output it is widened.
template <class S>
class FinalWindow {
 public:
  using A = AccumulatorOf<S>;

  explicit FinalWindow(OpCall& call) : target_(call.output<A>("final_conv_state")) {
    if constexpr (!std::is_same_v<S, A>) {
      stored_.resize(static_cast<std::size_t>(target_.rows() * target_.cols()));
    }
  }

  [[nodiscard]] MatrixView<S> view() {
    if constexpr (std::is_same_v<S, A>) {
      return target_;
    } else {
      return {stored_.data(), target_.rows(), target_.cols()};
    }
  }

  /// After the kernel has written it.
  void widen_into_output() {
    std::transform(stored_.begin(), stored_.end(), target_.data(),
                   [](S element) { return widen<A>(element); });
  }

 private:
  MatrixView<A> target_;
  std::vector<S> stored_;
};

/// conv_bias has the type of conv_weight in a kernel: the narrower of the two is widened.
bool has_wider_convolution(const OpCall& call) {
  return call.dtype("conv_weight") != call.main_dtype() ||
         (call.has("conv_bias") && call.dtype("conv_bias") != call.main_dtype());
}

template <class Use>
void with_layer(OpCall& call, const Use& use) {
  with_storages(call, has_wider_convolution(call), [&](auto s, auto p) {
    Layer<decltype(s), decltype(p)> layer(call);
    use(layer);
  });
}

void compute_inverse(OpCall& call) {
  const auto compute = [&](auto scalar) {
    using A = decltype(scalar);
    const ConstMatrixView<A> t = call.matrix<A>("t");     // [N*C, C]
    const MatrixView<A> t_inv = call.output<A>("t_inv");  // [N*C, C]
    const std::int64_t size = call.extent("C");
    if (call.path() == Path::fast) {
      gdn::triangular_inverse(size, t, t_inv);
      return;
    }
    for (std::int64_t n = 0; n < call.extent("N"); ++n) {
      gdn::reference::triangular_inverse(t.row_block(n * size, size),
                                         t_inv.row_block(n * size, size));
    }
  };
  call.main_dtype() == Dtype::f64 ? compute(double{}) : compute(float{});
}

void compute_forward(OpCall& call) {
  with_layer(call, [&]<class S, class P>(Layer<S, P>& layer) {
    using A = AccumulatorOf<S>;
    FinalWindow<S> window(call);
    const gdn::Outputs<A, S, A> outputs{
        .o = call.output<A>("o"),
        .final_recurrent_state = call.output<A>("final_recurrent_state"),
        .final_conv_state = window.view()};
    switch (call.path()) {
      case Path::decode:
        gdn::decode(layer.dims, layer.inputs, layer.options, outputs, layer.scratch);
        break;
      case Path::fast:
        gdn::forward(layer.dims, layer.inputs, layer.options, layer.layer_options, outputs,
                     gdn::ChunkResiduals<A>{}, layer.scratch);
        break;
      case Path::reference:
        gdn::reference::forward(layer.dims, layer.inputs, layer.options, outputs);
        break;
    }
    window.widen_into_output();
  });
}

void compute_states(OpCall& call) {
  with_layer(call, [&]<class S, class P>(Layer<S, P>& layer) {
    using A = AccumulatorOf<S>;
    FinalWindow<S> window(call);
    const gdn::StatesOutputs<S, A> outputs{
        .final_recurrent_state = call.output<A>("final_recurrent_state"),
        .final_conv_state = window.view(),
        .m = call.output<A>("m")};
    if (call.path() == Path::fast) {
      gdn::states(layer.dims, layer.inputs, layer.options, layer.layer_options, outputs,
                  gdn::ChunkResiduals<A>{}, layer.scratch);
    } else {
      gdn::reference::states(layer.dims, layer.inputs, layer.options, outputs);
    }
    window.widen_into_output();
  });
}

void compute_backward(OpCall& call) {
  with_layer(call, [&]<class S, class P>(Layer<S, P>& layer) {
    using A = AccumulatorOf<S>;
    const gdn::OutputCotangents<S, A> given{
        .d_o = call.matrix<S>("d_o"),
        .d_final_recurrent_state = call.matrix<A>("d_final_recurrent_state"),
        .d_final_conv_state = call.matrix<A>("d_final_conv_state")};
    const gdn::Cotangents<A> wanted{.d_qkv = call.output<A>("d_qkv"),
                                    .d_conv_weight = {.values = call.output<A>("d_conv_weight")},
                                    .d_conv_bias = {.values = call.output_vector<A>("d_conv_bias")},
                                    .d_a = call.output<A>("d_a"),
                                    .d_b = call.output<A>("d_b"),
                                    .d_A_log = {.values = call.output_vector<A>("d_A_log")},
                                    .d_dt_bias = {.values = call.output_vector<A>("d_dt_bias")},
                                    .d_conv_state = call.output<A>("d_conv_state"),
                                    .d_recurrent_state = call.output<A>("d_recurrent_state")};
    if (call.path() == Path::fast) {
      gdn::backward(layer.dims, layer.inputs, layer.options, layer.layer_options,
                    gdn::ChunkResiduals<const A>{}, given, wanted, layer.scratch);
    } else {
      gdn::reference::backward(layer.dims, layer.inputs, layer.options, given, wanted);
    }
  });
}

}  // namespace

std::vector<OpSpec> gdn_ops() {
  OpSpec inverse{.name = "gdn.inverse",
                 .tensors = {{.name = "t", .stored = Stored::main_wide, .shape = {"N", "C", "C"}}},
                 .attributes = {integer_attribute("block", 1).by_default("16")},
                 .outputs = {{.name = "t_inv", .shape = {"N", "C", "C"}}},
                 .compute = compute_inverse};

  OpSpec forward{.name = "gdn.forward",
                 .tensors = layer_tensors(),
                 .attributes = layer_attributes(),
                 .outputs = {{.name = "o", .shape = {"T", output_columns}}},
                 .compute = compute_forward,
                 .paths = {"fast", "reference", "decode"}};
  forward.outputs.insert(forward.outputs.end(), final_states.begin(), final_states.end());

  OpSpec states{.name = "gdn.states",
                .tensors = layer_tensors(),
                .attributes = layer_attributes(),
                .outputs = final_states,
                .compute = compute_states};
  states.outputs.push_back({.name = "m", .shape = {"Hv", "Dk", "Dk"}});

  OpSpec backward{
      .name = "gdn.backward",
      .tensors = layer_tensors(),
      .attributes = layer_attributes(),
      .outputs = {{.name = "d_qkv", .shape = {"T", qkv_columns}},
                  {.name = "d_conv_weight", .shape = {qkv_columns, "K"}},
                  {.name = "d_conv_bias", .shape = {qkv_columns}, .given_any_of = {"conv_bias"}},
                  {.name = "d_a", .shape = {"T", "Hv"}},
                  {.name = "d_b", .shape = {"T", "Hv"}},
                  {.name = "d_A_log", .shape = {"Hv"}},
                  {.name = "d_dt_bias", .shape = {"Hv"}},
                  {.name = "d_conv_state",
                   .shape = {"K - 1", qkv_columns},
                   .given_any_of = {"conv_state"}},
                  {.name = "d_recurrent_state",
                   .shape = {"Hv", "Dk", "Dv"},
                   .given_any_of = {"recurrent_state"}}},
      .compute = compute_backward};
  backward.tensors.push_back({.name = "d_o", .shape = {"T", output_columns}});
  backward.tensors.push_back({.name = "d_final_recurrent_state",
                              .stored = Stored::accumulator,
                              .shape = {"Hv", "Dk", "Dv"},
                              .optional = true});
  backward.tensors.push_back({.name = "d_final_conv_state",
                              .stored = Stored::accumulator,
                              .shape = {"K - 1", qkv_columns},
                              .optional = true});
  return {std::move(inverse), std::move(forward), std::move(states), std::move(backward)};
}

}  // namespace heddle::oracle

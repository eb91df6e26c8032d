#include "heddle/gdn/layer.hpp"

#include "context.hpp"

namespace {

using heddle_c::matrix;
using heddle_c::required_matrix;
using heddle_c::vector;

heddle::gdn::Dims dims_of(const char* where, const heddle_gdn_dims& dims) {
  const heddle::gdn::Dims d{.tokens = dims.tokens,
                            .key_heads = dims.key_heads,
                            .value_heads = dims.value_heads,
                            .key_dim = dims.key_dim,
                            .value_dim = dims.value_dim,
                            .kernel = dims.kernel};
  d.validate(where);
  return d;
}

template <class S>
heddle::gdn::Inputs<S, S, float> inputs_of(const heddle::gdn::Dims& dims,
                                           const heddle_gdn_inputs& inputs) {
  const std::int64_t columns = dims.qkv_columns();
  return {.qkv = required_matrix<const S>(inputs.qkv, dims.tokens, columns),
          .conv_weight = required_matrix<const S>(inputs.conv_weight, columns, dims.kernel),
          .conv_bias = vector<const S>(inputs.conv_bias, columns),
          .a = required_matrix<const S>(inputs.a, dims.tokens, dims.value_heads),
          .b = required_matrix<const S>(inputs.b, dims.tokens, dims.value_heads),
          .A_log = vector<const float>(inputs.A_log, dims.value_heads),
          .dt_bias = vector<const float>(inputs.dt_bias, dims.value_heads),
          .segment_ids = vector<const std::int32_t>(inputs.segment_ids, dims.tokens),
          .conv_state = matrix<const S>(inputs.conv_state, dims.window_rows(), columns),
          .recurrent_state =
              matrix<const float>(inputs.recurrent_state, dims.state_rows(), dims.value_dim)};
}

}  // namespace

heddle_status heddle_gdn_forward(heddle_context* context, const heddle_gdn_dims* dims,
                                 const heddle_gdn_inputs* inputs,
                                 const heddle_gdn_outputs* outputs) {
  return heddle_c::guarded(context, [&] {
    constexpr const char* where = "heddle_gdn_forward";
    const auto d = dims_of(where, heddle_c::given(where, "dims", dims));
    const auto& in = heddle_c::given(where, "inputs", inputs);
    const auto& out = heddle_c::given(where, "outputs", outputs);
    heddle_c::with_storage(where, in.storage, [&]<class S>(S) {
      const heddle::gdn::Outputs<S, S, float> views{
          .o = required_matrix<S>(out.o, d.tokens, d.output_columns()),
          .final_recurrent_state =
              matrix<float>(out.final_recurrent_state, d.state_rows(), d.value_dim),
          .final_conv_state = matrix<S>(out.final_conv_state, d.window_rows(), d.qkv_columns())};
      heddle::gdn::forward(d, inputs_of<S>(d, in), {.initial_segment = in.initial_segment}, {},
                           views, {}, context->gdn_scratch);
    });
  });
}

heddle_status heddle_gdn_backward(heddle_context* context, const heddle_gdn_dims* dims,
                                  const heddle_gdn_inputs* inputs,
                                  const heddle_gdn_cotangents* cotangents) {
  return heddle_c::guarded(context, [&] {
    constexpr const char* where = "heddle_gdn_backward";
    const auto d = dims_of(where, heddle_c::given(where, "dims", dims));
    const auto& in = heddle_c::given(where, "inputs", inputs);
    const auto& c = heddle_c::given(where, "cotangents", cotangents);
    const std::int64_t columns = d.qkv_columns();
    const heddle::Write write =
        heddle_c::write_of(where, "cotangents.parameters_write", c.parameters_write);
    const heddle::gdn::Cotangents<float> wanted{
        .d_qkv = required_matrix<float>(c.d_qkv, d.tokens, columns),
        .d_conv_weight = {.values = matrix<float>(c.d_conv_weight, columns, d.kernel),
                          .write = write},
        .d_conv_bias = {.values = vector<float>(c.d_conv_bias, columns), .write = write},
        .d_a = required_matrix<float>(c.d_a, d.tokens, d.value_heads),
        .d_b = required_matrix<float>(c.d_b, d.tokens, d.value_heads),
        .d_A_log = {.values = vector<float>(c.d_A_log, d.value_heads), .write = write},
        .d_dt_bias = {.values = vector<float>(c.d_dt_bias, d.value_heads), .write = write},
        .d_conv_state = matrix<float>(c.d_conv_state, d.window_rows(), columns),
        .d_recurrent_state = matrix<float>(c.d_recurrent_state, d.state_rows(), d.value_dim)};
    heddle_c::with_storage(where, in.storage, [&]<class S>(S) {
      const heddle::gdn::OutputCotangents<S, float> given{
          .d_o = required_matrix<const S>(c.d_o, d.tokens, d.output_columns()),
          .d_final_recurrent_state =
              matrix<const float>(c.d_final_recurrent_state, d.state_rows(), d.value_dim),
          .d_final_conv_state =
              matrix<const float>(c.d_final_conv_state, d.window_rows(), columns)};
      heddle::gdn::backward(d, inputs_of<S>(d, in), {.initial_segment = in.initial_segment}, {}, {},
                            given, wanted, context->gdn_scratch);
    });
  });
}

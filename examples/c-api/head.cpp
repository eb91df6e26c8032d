#include "heddle/head/chunked_head.hpp"

#include "context.hpp"

namespace {

using heddle_c::vector;

heddle::head::Dims dims_of(const heddle_head_dims& dims) {
  return {.tokens = dims.tokens, .hidden = dims.hidden, .vocab = dims.vocab};
}

template <class S>
heddle::head::Inputs<S> inputs_of(const heddle::head::Dims& dims,
                                  const heddle_head_inputs& inputs) {
  return {.hidden = heddle_c::required_matrix<const S>(inputs.hidden, dims.tokens, dims.hidden),
          .weight = heddle_c::required_matrix<const S>(inputs.weight, dims.hidden, dims.vocab),
          .target_ids = vector<const std::int32_t>(inputs.target_ids, dims.tokens),
          .active = vector<const std::uint8_t>(inputs.active, dims.tokens)};
}

}  // namespace

heddle_status heddle_head_forward(heddle_context* context, const heddle_head_dims* dims,
                                  const heddle_head_inputs* inputs,
                                  const heddle_head_outputs* outputs) {
  return heddle_c::guarded(context, [&] {
    constexpr const char* where = "heddle_head_forward";
    const auto d = dims_of(heddle_c::given(where, "dims", dims));
    const auto& in = heddle_c::given(where, "inputs", inputs);
    const auto& out = heddle_c::given(where, "outputs", outputs);
    heddle_c::with_storage(where, in.storage, [&]<class S>(S) {
      heddle::head::forward<S, S, float>(d, inputs_of<S>(d, in), {.temperature = in.temperature},
                                         {.logps = vector<float>(out.logps, d.tokens),
                                          .entropy = vector<float>(out.entropy, d.tokens),
                                          .max = vector<float>(out.max, d.tokens),
                                          .exp_sum = vector<float>(out.exp_sum, d.tokens),
                                          .mean = vector<float>(out.mean, d.tokens)},
                                         context->head_scratch);
    });
  });
}

heddle_status heddle_head_backward(heddle_context* context, const heddle_head_dims* dims,
                                   const heddle_head_inputs* inputs,
                                   const heddle_head_cotangents* cotangents) {
  return heddle_c::guarded(context, [&] {
    constexpr const char* where = "heddle_head_backward";
    const auto d = dims_of(heddle_c::given(where, "dims", dims));
    const auto& in = heddle_c::given(where, "inputs", inputs);
    const auto& c = heddle_c::given(where, "cotangents", cotangents);
    const heddle::WeightCotangent<float> d_weight{
        .values = heddle_c::matrix<float>(c.d_weight, d.hidden, d.vocab),
        .write = heddle_c::write_of(where, "cotangents.d_weight_write", c.d_weight_write)};
    heddle_c::with_storage(where, in.storage, [&]<class S>(S) {
      heddle::head::backward<S, S, float>(
          d, inputs_of<S>(d, in), {.temperature = in.temperature},
          {.max = vector<const float>(c.max, d.tokens),
           .exp_sum = vector<const float>(c.exp_sum, d.tokens),
           .mean = vector<const float>(c.mean, d.tokens)},
          {.d_logps = vector<const float>(c.d_logps, d.tokens),
           .d_entropy = vector<const float>(c.d_entropy, d.tokens)},
          {.d_hidden = heddle_c::matrix<float>(c.d_hidden, d.tokens, d.hidden),
           .d_weight = d_weight},
          context->head_scratch);
    });
  });
}

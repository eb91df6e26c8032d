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
#include "heddle/head/arguments.hpp"
#include "heddle/head/chunked_head.hpp"
#include "heddle/head/options.hpp"
#include "heddle/head/reference.hpp"
#include "heddle/head/target.hpp"

namespace heddle::oracle {
namespace {

const ShapeVariant vocab_major = {.attribute = "weight_layout", .value = "vd", .shape = {"V", "D"}};

std::vector<TensorRule> scoring_tensors() {
  return {
      {.name = "hidden", .stored = Stored::main, .shape = {"T", "D"}},
      {.name = "weight", .stored = Stored::parameter, .shape = {"D", "V"}, .variant = vocab_major},
  };
}

std::vector<AttributeRule> scoring_attributes() {
  return {
      choice_attribute("weight_layout", {"dv", "vd"}).by_default("dv"),
      number_attribute("temperature", 0).by_default("1"),
      integer_attribute("chunk", 1).by_default("4096"),
      integer_attribute("vocab_tile", 1).by_default("512"),
      choice_attribute("mode", {"unsharded", "local", "fused"}).by_default("fused"),
      choice_attribute("logits_dtype", {"f32", "bf16"}).by_default("f32"),
      choice_attribute("logp_form", {"reference", "shifted"}).by_default("reference"),
      choice_attribute("entropy_policy", {"xlogx", "reference"}).by_default("xlogx"),
      choice_attribute("id_policy", {"strict", "wrap"}).by_default("strict"),
      integer_attribute("vocab_shards", 1).by_default("1"),
  };
}

head::ScoringOptions scoring_options(const OpCall& call) {
  return {
      .temperature = call.number("temperature"),
      .mode = call.choice<head::Mode>(
          "mode", {head::Mode::unsharded, head::Mode::local, head::Mode::fused}),
      .logp_form = call.choice<head::LogpForm>(
          "logp_form", {head::LogpForm::reference, head::LogpForm::shifted}),
      .entropy_policy = call.choice<head::EntropyPolicy>(
          "entropy_policy", {head::EntropyPolicy::xlogx, head::EntropyPolicy::reference}),
      .id_policy =
          call.choice<head::IdPolicy>("id_policy", {head::IdPolicy::strict, head::IdPolicy::wrap}),
      .logits_dtype = call.choice<head::LogitsDtype>(
          "logits_dtype", {head::LogitsDtype::accumulator, head::LogitsDtype::bf16}),
      .vocab_tile = call.integer("vocab_tile"),
      .vocab_shards = call.integer("vocab_shards"),
      .chunk = call.integer("chunk"),
  };
}

/// The arguments of a scoring call, whichever op makes it, and what its forward keeps.
template <class S, class W>
struct Scoring {
  using A = AccumulatorOf<S>;

  Scoring(OpCall& call, std::span<const std::int32_t> target_ids,
          std::span<const std::uint8_t> active)
      : dims{.tokens = call.extent("T"), .hidden = call.extent("D"), .vocab = call.extent("V")},
        options(scoring_options(call)),
        path(call.path()),
        max(static_cast<std::size_t>(dims.tokens)),
        exp_sum(max.size()),
        mean(max.size()),
        logps(max.size()),
        entropy(max.size()) {
    inputs.hidden = call.matrix<S>("hidden");
    inputs.weight = call.matrix<W>("weight");
    inputs.layout = call.choice<head::WeightLayout>(
        "weight_layout", {head::WeightLayout::dv, head::WeightLayout::vd});
    inputs.target_ids = target_ids;
    inputs.active = active;
  }

  void forward() {
    const head::Outputs<A> outputs{
        .logps = logps, .entropy = entropy, .max = max, .exp_sum = exp_sum, .mean = mean};
    if (path == Path::reference) {
      head::reference::forward(dims, inputs, options, outputs);
    } else {
      head::forward(dims, inputs, options, outputs, workspace);
    }
  }

  void backward(const head::OutputCotangents<A>& given, const head::Cotangents<A>& wanted) {
    const head::Residuals<A> residuals{.max = max, .exp_sum = exp_sum, .mean = mean};
    if (path == Path::reference) {
      head::reference::backward(dims, inputs, options, residuals, given, wanted);
    } else {
      head::backward(dims, inputs, options, residuals, given, wanted, workspace);
    }
  }

  head::Dims dims;
  head::ScoringOptions options;
  Path path;
  Workspace workspace;
  head::Inputs<S, W> inputs;
  std::vector<A> max;
  std::vector<A> exp_sum;
  std::vector<A> mean;
  std::vector<A> logps;
  std::vector<A> entropy;
};

template <class Use>
void with_scoring(OpCall& call, std::span<const std::int32_t> target_ids,
                  std::span<const std::uint8_t> active, const Use& use) {
  with_storages(call, call.dtype("weight") != call.main_dtype(), [&](auto s, auto w) {
    Scoring<decltype(s), decltype(w)> scoring(call, target_ids, active);
    use(scoring);
  });
}

template <class A>
void put(OpCall& call, std::string_view name, const std::vector<A>& values) {
  const std::span<A> output = call.output_vector<A>(name);
  std::copy(values.begin(), values.end(), output.begin());
}

void compute_forward(OpCall& call) {
  with_scoring(call, call.vector<std::int32_t>("target_ids"), call.vector<std::uint8_t>("active"),
               [&]<class S, class W>(Scoring<S, W>& scoring) {
                 scoring.forward();
                 put(call, "logps", scoring.logps);
                 put(call, "entropy", scoring.entropy);
                 put(call, "max", scoring.max);
                 put(call, "exp_sum", scoring.exp_sum);
               });
}

template <class A>
head::Cotangents<A> wanted_cotangents(OpCall& call) {
  return {.d_hidden = call.output<A>("d_hidden"),
          .d_weight = {.values = call.output<A>("d_weight")}};
}

void compute_backward(OpCall& call) {
  with_scoring(call, call.vector<std::int32_t>("target_ids"), call.vector<std::uint8_t>("active"),
               [&]<class S, class W>(Scoring<S, W>& scoring) {
                 using A = AccumulatorOf<S>;
                 scoring.forward();
                 scoring.backward({.d_logps = call.vector<A>("d_logps"),
                                   .d_entropy = call.vector<A>("d_entropy")},
                                  wanted_cotangents<A>(call));
               });
}

/// The kernel would name the shifted ids, which are none of the user's.
void require_scored_ids(const OpCall& call, std::span<const std::int32_t> token_ids,
                        std::span<const std::uint8_t> scored) {
  const std::int64_t vocab = call.extent("V");
  for (std::size_t t = 0; t < token_ids.size(); ++t) {
    if (scored[t] != 0 && (token_ids[t] < 0 || token_ids[t] >= vocab)) {
      call.refuse("tensor 'token_ids' has " + std::to_string(token_ids[t]) + " at " +
                  std::to_string(t) + ": must be in [0, " + std::to_string(vocab) +
                  ") where a token is scored, with id_policy=strict");
    }
  }
}

void compute_packed(OpCall& call) {
  const head::PackedRow row{.token_ids = call.vector<std::int32_t>("token_ids"),
                            .segment_ids = call.vector<std::int32_t>("segment_ids"),
                            .segment_positions = call.vector<std::int32_t>("segment_positions")};
  const std::size_t tokens = row.token_ids.size();
  std::vector<std::int32_t> target_ids(tokens);
  std::vector<std::uint8_t> active(tokens);
  std::vector<std::uint8_t> scored(tokens);
  head::shift_targets(row, {.target_ids = target_ids, .active = active});
  head::scored_tokens(row.segment_ids, row.segment_positions, scored);
  if (call.text("id_policy") == "strict") {
    require_scored_ids(call, row.token_ids, scored);
  }
  with_scoring(call, target_ids, active, [&]<class S, class W>(Scoring<S, W>& scoring) {
    using A = AccumulatorOf<S>;
    scoring.forward();
    head::to_token_frame<A>(scoring.logps, scored, call.output_vector<A>("logps"));
    head::to_token_frame<A>(scoring.entropy, scored, call.output_vector<A>("entropy"));
    if (!call.has("d_logps") && !call.has("d_entropy")) {
      return;
    }
    // Into the frame of hidden states; a cotangent that is not given is zero.
    std::vector<A> d_logps(tokens);
    std::vector<A> d_entropy(call.has("d_entropy") ? tokens : 0);
    if (call.has("d_logps")) {
      head::to_hidden_frame<A>(call.vector<A>("d_logps"), scored, std::span<A>(d_logps));
    }
    if (call.has("d_entropy")) {
      head::to_hidden_frame<A>(call.vector<A>("d_entropy"), scored, std::span<A>(d_entropy));
    }
    scoring.backward({.d_logps = d_logps, .d_entropy = d_entropy}, wanted_cotangents<A>(call));
  });
}

void add(std::vector<TensorRule>& tensors, std::vector<TensorRule> more) {
  tensors.insert(tensors.end(), more.begin(), more.end());
}

TensorRule per_token(std::string name, Stored stored, bool optional) {
  return {.name = std::move(name), .stored = stored, .shape = {"T"}, .optional = optional};
}

}  // namespace

std::vector<OpSpec> head_ops() {
  OpSpec forward{.name = "head.forward",
                 .tensors = scoring_tensors(),
                 .attributes = scoring_attributes(),
                 .outputs = {{.name = "logps", .shape = {"T"}},
                             {.name = "entropy", .shape = {"T"}},
                             {.name = "max", .shape = {"T"}},
                             {.name = "exp_sum", .shape = {"T"}}},
                 .compute = compute_forward};
  add(forward.tensors,
      {per_token("target_ids", Stored::ids, false), per_token("active", Stored::booleans, true)});

  OpSpec backward{.name = "head.backward",
                  .tensors = forward.tensors,
                  .attributes = scoring_attributes(),
                  .outputs = {{.name = "d_hidden", .shape = {"T", "D"}},
                              {.name = "d_weight", .shape = {"D", "V"}, .variant = vocab_major}},
                  .compute = compute_backward};
  add(backward.tensors, {per_token("d_logps", Stored::accumulator, false),
                         per_token("d_entropy", Stored::accumulator, true)});

  const std::vector<std::string> any_cotangent = {"d_logps", "d_entropy"};
  OpSpec packed{
      .name = "head.packed",
      .tensors = scoring_tensors(),
      .attributes = scoring_attributes(),
      .outputs = {{.name = "logps", .shape = {"T"}},
                  {.name = "entropy", .shape = {"T"}},
                  {.name = "d_hidden", .shape = {"T", "D"}, .given_any_of = any_cotangent},
                  {.name = "d_weight",
                   .shape = {"D", "V"},
                   .given_any_of = any_cotangent,
                   .variant = vocab_major}},
      .compute = compute_packed};
  add(packed.tensors,
      {per_token("token_ids", Stored::ids, false), per_token("segment_ids", Stored::ids, false),
       per_token("segment_positions", Stored::ids, true),
       per_token("d_logps", Stored::accumulator, true),
       per_token("d_entropy", Stored::accumulator, true)});
  return {std::move(forward), std::move(backward), std::move(packed)};
}

}  // namespace heddle::oracle

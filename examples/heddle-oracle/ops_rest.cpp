#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "heddle-oracle/op_call.hpp"
#include "heddle-oracle/ops.hpp"
#include "heddle/loss/grpo.hpp"
#include "heddle/mesh/context_layout.hpp"
#include "heddle/packing/attention_tiles.hpp"

namespace heddle::oracle {
namespace {

void compute_tiles(OpCall& call) {
  const std::vector<std::int64_t> tiles = packing::count_tiles(
      call.vector<std::int32_t>("segment_ids"),
      {.context = call.integer("context"),
       .layout = call.choice<ContextLayout>(
           "layout",
           {ContextLayout::dual_chunk_swap, ContextLayout::striped, ContextLayout::contiguous}),
       .blocks = {.query = call.integer("block_q"), .key = call.integer("block_kv")},
       .rule = call.choice<packing::TileRule>(
           "rule", {packing::TileRule::naive, packing::TileRule::pad_aware})});
  std::ranges::copy(tiles, call.output_vector<std::int64_t>("tiles").begin());
}

loss::GrpoOptions grpo_options(OpCall& call) {
  loss::GrpoOptions options;
  options.clip_low = call.number("clip_low");
  options.clip_high = call.number("clip_high");
  options.beta = call.number("beta");
  options.aggregation = call.choice<loss::Aggregation>(
      "aggregation",
      {loss::Aggregation::token_mean, loss::Aggregation::sequence_mean_token_mean,
       loss::Aggregation::sequence_mean_token_scale, loss::Aggregation::seq_mean_token_sum,
       loss::Aggregation::sequence_mean_token_sum_norm});
  if (call.given("norm")) {
    options.norm = call.number("norm");
  } else if (options.aggregation == loss::Aggregation::sequence_mean_token_scale) {
    call.refuse("attribute 'norm' is missing: must be given with aggregation=" +
                call.text("aggregation"));
  }
  if (call.given("kl")) {
    options.kl = call.choice<loss::KlForm>(
        "kl", {loss::KlForm::kl, loss::KlForm::mse_kl, loss::KlForm::low_var_kl});
    if (!call.has("ref_logps")) {
      call.refuse("tensor 'ref_logps' is missing: must be given with kl=" + call.text("kl"));
    }
  }
  return options;
}

void compute_grpo(OpCall& call) {
  const loss::GrpoOptions options = grpo_options(call);
  const auto mask = call.vector<std::uint8_t>("mask");
  const auto segment_ids = call.vector<std::int32_t>("segment_ids");
  std::vector<double> weights(mask.size());
  loss::token_weights(options, loss::count_mask(mask, segment_ids), mask, segment_ids, weights);
  with_storage(call, [&]<class S>(S) {
    using A = AccumulatorOf<S>;
    const loss::GrpoLoss total = loss::grpo<A>(options,
                                               {.logps = call.vector<A>("logps"),
                                                .old_logps = call.vector<A>("old_logps"),
                                                .ref_logps = call.vector<A>("ref_logps"),
                                                .advantages = call.vector<A>("advantages"),
                                                .importance_weights = {},
                                                .mask = mask,
                                                .segment_ids = segment_ids,
                                                .weights = weights},
                                               call.output_vector<A>("d_logps"));
    call.output_vector<A>("loss")[0] = static_cast<A>(total.loss);
  });
}

}  // namespace

std::vector<OpSpec> tile_ops() {
  return {{.name = "tiles.count",
           .tensors = {{.name = "segment_ids", .stored = Stored::ids, .shape = {"S"}}},
           .attributes = {integer_attribute("context", 1).always("context"),
                          integer_attribute("block_q", 1).always(),
                          integer_attribute("block_kv", 1).always(),
                          choice_attribute("rule", {"naive", "pad_aware"}).by_default("naive"),
                          choice_attribute("layout", {"dual_chunk_swap", "striped", "contiguous"})
                              .by_default("dual_chunk_swap")},
           .outputs = {{.name = "tiles", .stored = Stored::counts, .shape = {"context"}}},
           .compute = compute_tiles}};
}

std::vector<OpSpec> loss_ops() {
  return {{.name = "loss.grpo",
           .tensors = {{.name = "logps", .stored = Stored::main, .shape = {"T"}},
                       {.name = "old_logps", .shape = {"T"}},
                       {.name = "advantages", .shape = {"T"}},
                       {.name = "mask", .stored = Stored::booleans, .shape = {"T"}},
                       {.name = "ref_logps", .shape = {"T"}, .optional = true},
                       {.name = "segment_ids", .stored = Stored::ids, .shape = {"T"}}},
           .attributes = {number_attribute("clip_low", 0).by_default("0.2"),
                          number_attribute("clip_high", 0).by_default("0.2"),
                          choice_attribute("kl", {"kl", "mse_kl", "low_var_kl"}),
                          number_attribute("beta", 0).by_default("0.04"),
                          choice_attribute("aggregation",
                                           {"token-mean", "sequence-mean-token-mean",
                                            "sequence-mean-token-scale", "seq-mean-token-sum",
                                            "sequence-mean-token-sum-norm"})
                              .always(),
                          positive_attribute("norm")},
           .outputs = {{.name = "loss", .shape = {"1"}}, {.name = "d_logps", .shape = {"T"}}},
           .compute = compute_grpo}};
}

}  // namespace heddle::oracle

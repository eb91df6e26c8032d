#include "heddle-train/train.hpp"

#include <cstdint>
#include <cstring>
#include <iostream>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "heddle-train/checkpoint.hpp"
#include "heddle-train/dtype.hpp"
#include "heddle-train/explain.hpp"
#include "heddle-train/output_tensors.hpp"
#include "heddle-train/parameters.hpp"
#include "heddle-train/step_plan.hpp"
#include "heddle-train/step_printer.hpp"
#include "heddle-train/step_rows.hpp"
#include "heddle-train/trainer.hpp"
#include "heddle/packing/pack.hpp"
#include "support/model_config.hpp"
#include "support/output_file.hpp"
#include "support/progress.hpp"
#include "support/rollout_file.hpp"
#include "support/safetensors.hpp"

namespace heddle::train {
namespace {

using examples::ModelConfig;
using examples::RolloutRecord;

packing::PackOptions pack_options(const TrainOptions& options) {
  packing::PackOptions pack;
  pack.budget = options.budget;
  pack.pack_size = 1;
  pack.segment_align_multiple = options.segment_align;
  pack.pad_id = examples::pad_id;
  pack.pad_position = options.pad_position;
  pack.pad_align = options.pad_align;
  pack.attention.layout = ContextLayout::contiguous;  // one device
  return pack;
}

// Takes the step once more, row after row, as one device does, and fails where a parameter comes out
// in other bits.
template <Storage S>
void check_against_single(const ParameterLayout& layout, const std::vector<AccumulatorOf<S>>& start,
                          TrainerOptions options, StepRows<AccumulatorOf<S>>& rows,
                          const std::vector<AccumulatorOf<S>>& updated) {
  options.micro_batch = 1;
  Trainer<S> single(layout, start, options);
  static_cast<void>(single.step(
      rows, [](std::int64_t) {}, nullptr));
  for (const TensorPlace& place : layout.tensors()) {
    std::vector<AccumulatorOf<S>> expected(static_cast<std::size_t>(place.size()));
    std::vector<AccumulatorOf<S>> actual(expected.size());
    gather(place, std::span(single.parameters()), std::span(expected));
    gather(place, std::span(updated), std::span(actual));
    if (std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(actual[0])) != 0) {
      throw std::runtime_error("--check-against single: after step 1 " + place.name +
                               " is not that of one device");
    }
  }
  std::cerr << "heddle-train: after step 1 every parameter is that of one device, bit for bit\n";
}

// What the gates of a run read beside what the trainer itself knows of its first update.
template <Accumulator A>
void append_run_scalars(const ParameterLayout& layout, std::span<const A> start,
                        const StepReport& report, std::vector<examples::Tensor>& dump) {
  dump.push_back(examples::Tensor::of(
      "update_norm", {1}, std::vector<A>{static_cast<A>(update_norm(layout, start, dump))}));
  dump.push_back(
      examples::Tensor::of("dropped_slots", {1}, std::vector<std::int64_t>{report.dropped_slots}));
}

template <Storage S>
void train_as(const TrainOptions& options, const examples::Results& results) {
  using A = AccumulatorOf<S>;
  const packing::PackOptions pack = pack_options(options);
  const std::vector<RolloutRecord> records = examples::read_rollouts(options.rollouts);
  require_trainable(records, options.budget, options.rollouts);
  StepPlan plan(records, options.rollouts_per_step);
  const std::vector<double> advantages = group_advantages(records, plan.groups(), options.rollouts);

  const ModelConfig config =
      options.checkpoint ? read_config(*options.checkpoint) : default_model_config();
  const ParameterLayout layout(model_dims(config));
  examples::require_vocabulary(records, layout.dims().vocab, options.rollouts);
  require_routing(records, layout.dims().layers, layout.dims().experts_per_token, options.rollouts);
  const std::vector<A> start = options.checkpoint ? load_parameters<A>(*options.checkpoint, layout)
                                                  : initial_parameters<A>(layout, options.seed);
  const TrainerOptions trainer_options = {
      .adamw = {.learning_rate = options.learning_rate},
      .updates_per_step = options.updates_per_step,
      .micro_batch = options.micro_batch,
      .router = options.freeze_router ? moe::RouterTraining::frozen : moe::RouterTraining::trained};
  Trainer<S> trainer(layout, start, trainer_options);
  if (options.explain) {
    explain(layout, sizeof(S), pack, results.json() ? std::cerr : results.out());
  }

  StepPrinter printer(results);
  for (std::int64_t step = 1; step <= options.steps; ++step) {
    StepRows<A> rows = pack_step<A>(records, plan.next(), advantages, pack);
    std::vector<examples::Tensor> dump;
    const bool dumps = step == 1 && options.dump_step;
    const StepReport report = [&] {
      examples::Progress progress(
          "step " + std::to_string(step) + "/" + std::to_string(options.steps),
          rows.rows * options.updates_per_step, std::cerr, examples::stderr_is_terminal());
      return trainer.step(
          rows, [&](std::int64_t done) { progress.update(done); }, dumps ? &dump : nullptr);
    }();
    if (step == 1 && options.check_against_single) {
      StepRows<A> again = pack_step<A>(records, StepPlan(records, options.rollouts_per_step).next(),
                                       advantages, pack);
      check_against_single<S>(layout, start, trainer_options, again, trainer.parameters());
    }
    printer.print(step, report);
    if (dumps) {
      append_run_scalars<A>(layout, start, report, dump);
      examples::write_safetensors(*options.dump_step, dump, {});
    }
  }
  if (options.save) {
    save_checkpoint(*options.save, config, layout, trainer.parameters());
  }
}

}  // namespace

void train(const TrainOptions& options, const examples::Results& results) {
  if (options.dump_step) {
    examples::require_output_file(*options.dump_step);
    examples::require_other_file(*options.dump_step, options.rollouts, "rollouts");
  }
  if (options.save) {
    examples::require_output_folder(*options.save);
  }
  with_storage(options.dtype, [&](auto storage) { train_as<decltype(storage)>(options, results); });
}

}  // namespace heddle::train

#include "heddle-train/train.hpp"

#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "heddle-train/checkpoint.hpp"
#include "heddle-train/dtype.hpp"
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

template <Storage S>
void train_as(const TrainOptions& options, const examples::Results& results) {
  using A = AccumulatorOf<S>;
  const packing::PackOptions pack = pack_options(options);
  packing::validate("heddle-train", pack);
  const std::vector<RolloutRecord> records = examples::read_rollouts(options.rollouts);
  require_trainable(records, options.budget, options.rollouts);
  StepPlan plan(records, options.rollouts_per_step);
  const std::vector<double> advantages = group_advantages(records, plan.groups(), options.rollouts);

  const ModelConfig config =
      options.checkpoint ? read_config(*options.checkpoint) : default_model_config();
  const ParameterLayout layout(model_dims(config));
  examples::require_vocabulary(records, layout.dims().vocab, options.rollouts);
  require_routing(records, layout.dims().layers, layout.dims().experts_per_token, options.rollouts);
  Trainer<S> trainer(layout,
                     options.checkpoint ? load_parameters<A>(*options.checkpoint, layout)
                                        : initial_parameters<A>(layout, options.seed),
                     {.adamw = {.learning_rate = options.learning_rate},
                      .updates_per_step = options.updates_per_step,
                      .micro_batch = options.micro_batch,
                      .router = options.freeze_router ? moe::RouterTraining::frozen
                                                      : moe::RouterTraining::trained});

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
    printer.print(step, report);
    if (dumps) {
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
  }
  if (options.save) {
    examples::require_output_folder(*options.save);
  }
  with_storage(options.dtype, [&](auto storage) { train_as<decltype(storage)>(options, results); });
}

}  // namespace heddle::train

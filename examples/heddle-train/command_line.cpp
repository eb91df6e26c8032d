#include "heddle-train/command_line.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include "heddle-train/options.hpp"
#include "heddle-train/score.hpp"
#include "heddle-train/train.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/packing/pad_position.hpp"
#include "support/usage_error.hpp"

namespace heddle::train {
namespace {

using examples::UsageError;

// The command line as it was read: what both modes share, each mode's own, and what needs more than
// one device.
struct CommandLine {
  TrainOptions train;
  ScoreOptions score;
  std::optional<std::string> score_tokens;
  std::optional<std::string> checkpoint;
  std::optional<std::int64_t> pad_align;
  std::string pad_position = "end";
  std::string mesh;
  std::string recipe;
  std::string check_against;
  bool explain = false;
  int freeze_router = 0;
  DtypeOption dtype = DtypeOption::f32;
  std::optional<std::int64_t> threads;

  std::vector<const CLI::Option*> of_training;
  std::vector<const CLI::Option*> of_scoring;
  std::vector<const CLI::Option*> of_meshes;
};

// 4096, the least common multiple of the attention blocks, where that is below the budget; else about
// an eighth of it.
std::int64_t default_pad_align(std::int64_t budget, std::int64_t segment_align) {
  constexpr std::int64_t usual = 4096;
  if (usual < budget) {
    return usual;
  }
  return std::max(budget / 8 / segment_align * segment_align, segment_align);
}

void require_at_least(const char* option, std::int64_t value, std::int64_t lowest) {
  if (value < lowest) {
    throw UsageError(std::string(option) + " = " + std::to_string(value) +
                     ": must be >= " + std::to_string(lowest));
  }
}

// The program's column of spec/packing.md 3.1: an alignment that could not take effect is refused.
std::int64_t checked_pad_align(const CommandLine& line) {
  const TrainOptions& train = line.train;
  const std::int64_t by_default = default_pad_align(train.budget, train.segment_align);
  if (!line.pad_align) {
    return by_default;
  }
  const std::string what = "--pad-align = " + std::to_string(*line.pad_align) + ": ";
  if (train.pad_position == packing::PadPosition::end) {
    throw UsageError(what + "has no effect with --pad-position=end");
  }
  if (*line.pad_align < 1 || *line.pad_align % train.segment_align != 0) {
    throw UsageError(what + "must be a positive multiple of --segment-align (" +
                     std::to_string(train.segment_align) + ")");
  }
  if (*line.pad_align >= train.budget) {
    throw UsageError(what + "must be below --budget (" + std::to_string(train.budget) +
                     "), or no row could move");
  }
  return *line.pad_align;
}

void check_training(CommandLine& line) {
  TrainOptions& train = line.train;
  require_at_least("--steps", train.steps, 0);
  require_at_least("--rollouts-per-step", train.rollouts_per_step, 1);
  require_at_least("--updates-per-step", train.updates_per_step, 1);
  require_at_least("--micro-batch", train.micro_batch.value_or(1), 1);
  require_at_least("--budget", train.budget, 1);
  require_at_least("--segment-align", train.segment_align, 1);
  if (!std::isfinite(train.learning_rate) || train.learning_rate < 0) {
    throw UsageError("--learning-rate = " + error_text(train.learning_rate) +
                     ": must be >= 0 and finite");
  }
  if (train.dump_step && train.steps == 0) {
    throw UsageError("--dump-step: has no effect with --steps=0");
  }
  train.pad_position = packing::pad_position(line.pad_position);
  train.pad_align = checked_pad_align(line);
  train.freeze_router = line.freeze_router != 0;
}

void refuse(const std::vector<const CLI::Option*>& options, const std::string& why) {
  for (const CLI::Option* option : options) {
    if (option->count() > 0) {
      throw UsageError(option->get_name() + ": " + why);
    }
  }
}

int run(CommandLine& line, const examples::Results& results) {
  const MeshAxes mesh = parse_axes(line.mesh);
  if (mesh.devices() != 1) {
    throw UsageError("--mesh = " + to_string(mesh) + ": must be one device");
  }
  refuse(line.of_meshes, "needs a mesh of more than one device");
  require_at_least("--threads", line.threads.value_or(1), 1);

  std::function<void()> work;
  if (line.score_tokens) {
    refuse(line.of_training, "has no effect with --score");
    if (line.score.out.empty() || !line.checkpoint) {
      throw UsageError("--score needs --out and --checkpoint");
    }
    line.score.tokens = *line.score_tokens;
    line.score.checkpoint = *line.checkpoint;
    line.score.dtype = line.dtype;
    work = [&] { score(line.score); };
  } else {
    refuse(line.of_scoring, "has no effect without --score");
    if (line.train.rollouts.empty()) {
      throw UsageError("ROLLOUTS is required");
    }
    line.train.checkpoint = line.checkpoint;
    line.train.dtype = line.dtype;
    check_training(line);
    work = [&] { train(line.train, results); };
  }
  if (!line.threads) {
    work();
    return examples::exit_done;
  }
  // The arena bounds the rows at work at once, the control the threads below it.
  namespace tbb = oneapi::tbb;
  const auto threads = static_cast<std::size_t>(*line.threads);
  const tbb::global_control control(tbb::global_control::max_allowed_parallelism, threads);
  tbb::task_arena arena(static_cast<int>(std::min<std::size_t>(threads, 4096)));
  arena.execute(work);
  return examples::exit_done;
}

}  // namespace

examples::Action set_up(CLI::App& app, examples::Results& results) {
  const auto line = std::make_shared<CommandLine>();
  TrainOptions& train = line->train;
  const auto for_training = [&](const CLI::Option* option) { line->of_training.push_back(option); };
  const auto for_scoring = [&](const CLI::Option* option) { line->of_scoring.push_back(option); };
  const auto for_meshes = [&](const CLI::Option* option) { line->of_meshes.push_back(option); };

  for_training(app.add_option("ROLLOUTS", train.rollouts, "Rollouts, JSON lines"));
  app.add_option("--checkpoint", line->checkpoint,
                 "Folder of config.json and model.safetensors (a small model where absent)");
  app.add_option("--dtype", line->dtype, "Storage of weights and activations: f32, f64 or bf16")
      ->transform(CLI::Transformer(std::map<std::string, DtypeOption>{
          {"f32", DtypeOption::f32}, {"f64", DtypeOption::f64}, {"bf16", DtypeOption::bf16}}))
      ->default_str("f32");
  app.add_option("--mesh", line->mesh, "Axes of the device mesh, fsdp=F,context=C,expert=X");
  app.add_option("--threads", line->threads, "Worker threads (as many as there are cores)");

  for_training(app.add_option("--save", train.save, "New folder for the trained checkpoint"));
  for_training(app.add_option("--steps", train.steps, "Steps")->capture_default_str());
  for_training(app.add_option("--rollouts-per-step", train.rollouts_per_step,
                              "Rollouts of a step at most, in whole groups")
                   ->capture_default_str());
  for_training(app.add_option("--updates-per-step", train.updates_per_step,
                              "Updates under the old log-probs of the step's start")
                   ->capture_default_str());
  for_training(app.add_option("--micro-batch", train.micro_batch,
                              "Rows whose gradients are formed at a time (all of a step)"));
  for_training(app.add_option("--learning-rate", train.learning_rate, "Learning rate of AdamW")
                   ->capture_default_str());
  for_training(
      app.add_option("--budget", train.budget, "Positions of a packed row")->capture_default_str());
  for_training(
      app.add_option("--segment-align", train.segment_align, "Documents start at multiples of this")
          ->capture_default_str());
  for_training(app.add_option("--pad-position", line->pad_position,
                              "Where a row's padding goes: end, start or auto")
                   ->capture_default_str());
  for_training(app.add_option("--pad-align", line->pad_align,
                              "Rows move by multiples of this (4096, or less in a short row)"));
  for_training(app.add_option("--freeze-router", line->freeze_router,
                              "1: the router is no trained parameter")
                   ->check(CLI::IsMember({0, 1}))
                   ->capture_default_str());
  for_training(app.add_option("--seed", train.seed, "Seed of the small model's parameters")
                   ->capture_default_str());
  for_training(app.add_option("--dump-step", train.dump_step,
                              "Safetensors file for all tensors of the first update"));

  app.add_option("--score", line->score_tokens,
                 "Score the token ids of this safetensors file instead of training");
  for_scoring(app.add_option("--out", line->score.out, "Safetensors file for the scores"));
  for_scoring(app.add_flag("--gradients", line->score.gradients,
                           "Also the gradient of the mean negative log-prob"));
  for_scoring(app.add_flag("--logits", line->score.logits, "Also the logits"));

  for_meshes(app.add_option("--recipe", line->recipe, "How kernels are sharded over a mesh"));
  for_meshes(app.add_flag("--explain", line->explain, "Say what each device computes and sends"));
  for_meshes(app.add_option("--check-against", line->check_against,
                            "single: hold the mesh against one device")
                 ->check(CLI::IsMember({"single"})));
  return [line, &results] { return run(*line, results); };
}

}  // namespace heddle::train

#include "heddle-train/command_line.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include "heddle-train/options.hpp"
#include "heddle-train/score.hpp"
#include "heddle-train/train.hpp"
#include "heddle/core/error.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/packing/pad_position.hpp"
#include "support/pad_align.hpp"
#include "support/usage_error.hpp"

namespace heddle::train {
namespace {

using examples::UsageError;

constexpr std::int64_t most_threads = 4096;  // beyond any machine, within what an arena takes

// The command line as it was read: what both modes share and each mode's own.
struct CommandLine {
  TrainOptions train;
  ScoreOptions score;
  std::optional<std::string> score_tokens;
  std::optional<std::string> checkpoint;
  std::optional<std::int64_t> pad_align;
  std::string pad_position = "end";
  std::string mesh;
  std::string recipe = "tuned";
  std::optional<std::string> check_against;
  int freeze_router = 0;
  std::string dtype = "f32";
  std::optional<std::int64_t> threads;

  std::vector<const CLI::Option*> of_training;
  std::vector<const CLI::Option*> of_scoring;
};

void require_between(const char* option, std::int64_t value, std::int64_t lowest,
                     std::int64_t highest) {
  if (value < lowest || value > highest) {
    throw UsageError(std::string(option) + " = " + std::to_string(value) + ": must be in [" +
                     std::to_string(lowest) + ", " + std::to_string(highest) + "]");
  }
}

void require_at_least(const char* option, std::int64_t value, std::int64_t lowest) {
  if (value < lowest) {
    throw UsageError(std::string(option) + " = " + std::to_string(value) +
                     ": must be >= " + std::to_string(lowest));
  }
}

DtypeOption dtype_named(const std::string& name) {
  if (name == "f32") {
    return DtypeOption::f32;
  }
  if (name == "f64") {
    return DtypeOption::f64;
  }
  if (name == "bf16") {
    return DtypeOption::bf16;
  }
  throw UsageError("--dtype = " + name + ": must be f32, f64 or bf16");
}

MeshAxes mesh_named(const std::string& text) {
  try {
    return parse_axes(text);
  } catch (const Error& error) {
    const std::string axis = error.argument() == "mesh" ? "" : error.argument() + " ";
    throw UsageError("--mesh = " + text + ": " + axis + error.rule());
  }
}

packing::PadPosition pad_position_named(const std::string& name) {
  for (const packing::PadPosition position :
       {packing::PadPosition::end, packing::PadPosition::start, packing::PadPosition::auto_}) {
    if (packing::name(position) == name) {
      return position;
    }
  }
  throw UsageError("--pad-position = " + name + ": must be end, start or auto");
}

void check_training(CommandLine& line) {
  TrainOptions& train = line.train;
  require_at_least("--steps", train.steps, 0);
  require_at_least("--rollouts-per-step", train.rollouts_per_step, 1);
  require_at_least("--updates-per-step", train.updates_per_step, 1);
  require_at_least("--micro-batch", train.micro_batch.value_or(1), 1);
  constexpr std::int64_t most_positions = std::numeric_limits<std::int32_t>::max();
  require_between("--budget", train.budget, 1, most_positions);
  require_between("--segment-align", train.segment_align, 1, most_positions);
  if (!std::isfinite(train.learning_rate) || train.learning_rate < 0) {
    throw UsageError("--learning-rate = " + error_text(train.learning_rate) +
                     ": must be >= 0 and finite");
  }
  if (train.dump_step && train.steps == 0) {
    throw UsageError("--dump-step: has no effect with --steps=0");
  }
  train.pad_position = pad_position_named(line.pad_position);
  train.pad_align = examples::checked_pad_align({.budget = train.budget,
                                                 .segment_align = train.segment_align,
                                                 .position = train.pad_position,
                                                 .pad_align = line.pad_align});
  if (line.recipe != "tuned" && line.recipe != "baseline") {
    throw UsageError("--recipe = " + line.recipe + ": must be tuned or baseline");
  }
  if (line.check_against && *line.check_against != "single") {
    throw UsageError("--check-against = " + *line.check_against + ": must be single");
  }
  train.check_against_single = line.check_against.has_value();
  if (line.freeze_router != 0 && line.freeze_router != 1) {
    throw UsageError("--freeze-router = " + std::to_string(line.freeze_router) +
                     ": must be 0 or 1");
  }
  train.freeze_router = line.freeze_router == 1;
}

void refuse(const std::vector<const CLI::Option*>& options, const std::string& why) {
  for (const CLI::Option* option : options) {
    if (option->count() > 0) {
      throw UsageError(option->get_name() + ": " + why);
    }
  }
}

int run(CommandLine& line, const examples::Results& results) {
  const MeshAxes mesh = mesh_named(line.mesh);
  if (mesh.devices() != 1) {
    throw UsageError("--mesh = " + to_string(mesh) + ": must be one device");
  }
  require_between("--threads", line.threads.value_or(1), 1, most_threads);

  const DtypeOption dtype = dtype_named(line.dtype);
  std::function<void()> work;
  if (line.score_tokens) {
    refuse(line.of_training, "has no effect with --score");
    if (line.score.out.empty() || !line.checkpoint) {
      throw UsageError("--score needs --out and --checkpoint");
    }
    line.score.tokens = *line.score_tokens;
    line.score.checkpoint = *line.checkpoint;
    line.score.dtype = dtype;
    work = [&] { score(line.score); };
  } else {
    refuse(line.of_scoring, "has no effect without --score");
    if (line.train.rollouts.empty()) {
      throw UsageError("ROLLOUTS is required");
    }
    line.train.checkpoint = line.checkpoint;
    line.train.dtype = dtype;
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
  tbb::task_arena arena(static_cast<int>(threads));
  arena.execute(work);
  return examples::exit_done;
}

}  // namespace

examples::Action set_up(CLI::App& app, examples::Results& results) {
  const auto line = std::make_shared<CommandLine>();
  TrainOptions& train = line->train;
  const auto add = [&app](const char* name, auto& value, const char* type, const char* text) {
    return app.add_option(name, value, text)->type_name(type);
  };
  const auto for_training = [&](const char* name, auto& value, const char* type, const char* text) {
    CLI::Option* const option = add(name, value, type, text)->group("Training");
    line->of_training.push_back(option);
    return option;
  };

  line->of_training.push_back(add("ROLLOUTS", train.rollouts, "FILE", "Rollouts, JSON lines"));
  add("--checkpoint", line->checkpoint, "DIR",
      "Model: config.json and model.safetensors (a small new one)");
  add("--dtype", line->dtype, "f32|f64|bf16", "What weights and activations are stored in")
      ->capture_default_str();
  add("--mesh", line->mesh, "AXES", "Axes of the device mesh, fsdp=F,context=C,expert=X");
  add("--threads", line->threads, "N", "Worker threads (one a core)");

  for_training("--save", train.save, "DIR", "New folder for the trained model");
  for_training("--steps", train.steps, "N", "Steps")->capture_default_str();
  for_training("--rollouts-per-step", train.rollouts_per_step, "N",
               "Rollouts of a step at most, in whole groups")
      ->capture_default_str();
  for_training(
      "--updates-per-step", train.updates_per_step, "U",
      "Updates under the old log-probs of the step's start (tokens/s counts a token once a "
      "step, over the time of all of them)")
      ->capture_default_str();
  for_training("--micro-batch", train.micro_batch, "ROWS",
               "Rows whose gradients are formed at a time (all of a step)");
  for_training("--learning-rate", train.learning_rate, "R", "Learning rate of AdamW")
      ->capture_default_str();
  for_training("--budget", train.budget, "T", "Positions of a packed row")->capture_default_str();
  for_training("--segment-align", train.segment_align, "A", "Documents start at multiples of this")
      ->capture_default_str();
  for_training("--pad-position", line->pad_position, "end|start|auto", "Where a row's padding goes")
      ->capture_default_str();
  for_training("--pad-align", line->pad_align, "A",
               "Rows move by multiples of this (4096, less in short rows)");
  for_training("--freeze-router", line->freeze_router, "0|1", "1: the router is not trained")
      ->capture_default_str();
  for_training("--seed", train.seed, "N", "Seed of a new model's parameters")
      ->capture_default_str();
  for_training("--recipe", line->recipe, "tuned|baseline",
               "How kernels are sharded: the same on one device")
      ->capture_default_str();
  CLI::Option* const explain =
      app.add_flag("--explain", train.explain, "Say what is computed by what, and what is sent");
  line->of_training.push_back(explain->group("Training"));
  for_training("--check-against", line->check_against, "single",
               "Hold the first step against that of one device, bit for bit");
  for_training("--dump-step", train.dump_step, "FILE",
               "Write all tensors of the first update (safetensors)");

  const auto for_scoring = [&](CLI::Option* option) {
    line->of_scoring.push_back(option->group("Scoring"));
  };
  add("--score", line->score_tokens, "FILE", "Score these token ids (safetensors), do not train")
      ->group("Scoring");
  for_scoring(add("--out", line->score.out, "FILE", "Where the scores go (safetensors)"));
  for_scoring(app.add_flag("--gradients", line->score.gradients,
                           "Also the gradient of the mean negative log-prob"));
  for_scoring(app.add_flag("--logits", line->score.logits, "Also the logits"));

  return [line, &results] { return run(*line, results); };
}

}  // namespace heddle::train

#include "heddle-gates/command_line.hpp"

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/numerics/run_gates.hpp"
#include "heddle/numerics/tensor.hpp"
#include "support/gate_report.hpp"
#include "support/tensor_file.hpp"
#include "support/usage_error.hpp"

namespace heddle::gates {
namespace {

using examples::TensorFile;
using examples::UsageError;
using numerics::NamedTensor;

struct Arguments {
  std::string baseline;
  std::string candidate;
  std::optional<std::string> noise;
};

constexpr const char* explanation = R"(Gates of a run (tensor null in --json):
  loss                relative difference of `loss`
  log_prob            largest difference of `logps`: nats of a model, ulps of the log-sum-exp of a kernel
  entropy             largest difference of `entropy`, relative to the token's or the mean
  grad_norm           relative difference of `grad_norm`
  dropped_slots       difference of `dropped_slots`, the (token, expert) pairs that found no place
  update_norm         relative difference of `update_norm`, the norm of what the optimizer adds
Gates of each floating tensor:
  relative_l2         |candidate - baseline| / |baseline|
  one_minus_cosine    1 - cos(candidate, baseline)
  norm_ratio          | |candidate| / |baseline| - 1 |
  worst_row           relative L2 of the worst row, small rows against a thousandth of the largest
Gates of integers:
  expert_ids          tokens whose set of experts differs: left out of logps and entropy, with the later
                      entries of their document that they reach
  equal               entries that differ
names, shape and finite fail where a tensor is on one side alone, of another shape, or NaN or infinite.

A limit is max(floor, 8 x noise). Floors are those of a model's step in f32 where tensors are named
grad.* or updated.*, or loss stands beside logps (updated.* has its own: an optimizer divides by what
may be nothing but rounding); else those of one kernel on equal inputs, by the
coarser dtype. Without --noise the floors are all there is: a step in bf16 needs it.)";

/// The one run that would let a candidate pass whatever is in it.
void require_other_run(const Arguments& arguments) {
  std::error_code ignored;  // of a file that does not exist, which reading it reports
  if (std::filesystem::equivalent(*arguments.noise, arguments.candidate, ignored)) {
    throw UsageError("--noise = " + *arguments.noise +
                     ": is the candidate: must be another correct run");
  }
}

int judge(const Arguments& arguments, const examples::Results& results) {
  if (arguments.noise) {
    require_other_run(arguments);
  }
  const TensorFile baseline = examples::read_tensors(arguments.baseline);
  const TensorFile candidate = examples::read_tensors(arguments.candidate);
  const std::optional<TensorFile> noise =
      arguments.noise ? std::optional(examples::read_tensors(*arguments.noise)) : std::nullopt;
  if (baseline.tensors().empty()) {
    throw UsageError(arguments.baseline + ": holds no tensor to judge by");
  }
  const std::vector<NamedTensor> noise_tensors =
      noise ? examples::named_tensors(*noise) : std::vector<NamedTensor>();
  if (noise && noise_tensors.empty()) {
    throw UsageError("--noise = " + *arguments.noise + ": holds no tensor");
  }
  const numerics::RunReport report = [&] {
    try {
      return numerics::judge_runs(examples::named_tensors(baseline),
                                  examples::named_tensors(candidate), noise_tensors);
    } catch (const Error& error) {
      if (error.argument() == "noise") {
        throw UsageError("--noise = " + *arguments.noise + ": tensor '" + error.value() +
                         "': " + error.rule());
      }
      throw;
    }
  }();
  examples::print_report(report, results);
  return report.passed() ? examples::exit_done : examples::exit_failed;
}

}  // namespace

examples::Action set_up(CLI::App& app, examples::Results& results) {
  const auto arguments = std::make_shared<Arguments>();
  app.add_option("BASELINE", arguments->baseline,
                 "The run that is right: what heddle-train --dump-step wrote, or any .safetensors "
                 "file or folder of .npy files")
      ->required()
      ->type_name("PATH");
  app.add_option("CANDIDATE", arguments->candidate, "The run to judge: tensors of the same names")
      ->required()
      ->type_name("PATH");
  app.add_option(
         "--noise", arguments->noise,
         "Another correct run on the same inputs, of another order of summation: gates then "
         "allow 8 times its distance from BASELINE")
      ->type_name("PATH");
  app.footer(explanation);
  return [arguments, &results] { return judge(*arguments, results); };
}

}  // namespace heddle::gates

#include "heddle-oracle/commands.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "heddle-oracle/op_call.hpp"
#include "heddle-oracle/op_spec.hpp"
#include "heddle-oracle/tensor_compare.hpp"
#include "support/table.hpp"
#include "support/tensor_file.hpp"
#include "support/usage_error.hpp"

namespace heddle::oracle {
namespace {

using examples::Metadata;
using examples::Results;
using examples::TensorFile;
using examples::UsageError;

struct Arguments {
  std::string input;
  std::string output;
  std::vector<std::string> settings;
  std::string a;
  std::string b;
  double tolerance = 1e-5;
};

int list(const Results& results) {
  for (const OpSpec& op : all_ops()) {
    if (results.json()) {
      results.print(op_json(op));
    } else {
      print_op(op, results.out());
      results.out() << '\n';
    }
  }
  return examples::exit_done;
}

Metadata parse_settings(const std::vector<std::string>& settings) {
  Metadata parsed;
  for (const std::string& setting : settings) {
    const std::size_t equals = setting.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw UsageError("--set '" + setting + "': must be key=value");
    }
    if (!parsed.emplace(setting.substr(0, equals), setting.substr(equals + 1)).second) {
      throw UsageError("--set '" + setting + "': its key is set twice");
    }
  }
  return parsed;
}

int run(const Arguments& arguments, const Results& results) {
  const Metadata settings = parse_settings(arguments.settings);
  examples::require_tensor_output(arguments.output);
  const TensorFile file = examples::read_tensors(arguments.input);
  const std::vector<Tensor> outputs = run_op(file, settings);

  // What was computed goes with the result.
  Metadata metadata = file.metadata();
  for (const auto& [name, value] : settings) {
    metadata[name] = value;
  }
  metadata["source"] = std::string("heddle-oracle ") + HEDDLE_VERSION;
  examples::write_tensors(arguments.output, outputs, metadata);

  using Align = examples::Table::Align;
  examples::Table table({{"", Align::left}, {"", Align::left}, {"", Align::left}});
  for (const Tensor& tensor : outputs) {
    if (results.json()) {
      results.print({{"tensor", tensor.name},
                     {"dtype", examples::dtype_name(tensor.dtype)},
                     {"shape", tensor.shape}});
    }
    table.add({tensor.name, std::string(examples::dtype_name(tensor.dtype)),
               examples::shape_text(tensor.shape)});
  }
  if (!results.json()) {
    table.print(results.out());
  }
  return examples::exit_done;
}

int compare(const Arguments& arguments, const Results& results) {
  if (!(arguments.tolerance >= 0)) {
    throw UsageError("--tolerance " + error_text(arguments.tolerance) + ": must be >= 0");
  }
  const TensorFile a = examples::read_tensors(arguments.a);
  const TensorFile b = examples::read_tensors(arguments.b);
  const std::vector<TensorComparison> comparisons = compare_files(a, b, arguments.tolerance);
  if (comparisons.empty()) {
    throw UsageError(arguments.a + ": holds no tensor to compare");
  }
  if (results.json()) {
    for (const TensorComparison& comparison : comparisons) {
      results.print(comparison_json(comparison));
    }
  } else {
    print_comparisons(comparisons, results.out());
  }
  const bool passed = std::ranges::all_of(comparisons, &TensorComparison::passed);
  return passed ? examples::exit_done : examples::exit_failed;
}

}  // namespace

examples::Action set_up(CLI::App& app, Results& results) {
  const auto arguments = std::make_shared<Arguments>();
  app.require_subcommand(1);
  app.fallthrough();

  const CLI::App* const list_command =
      app.add_subcommand("list", "Print every op: its tensors, attributes and outputs");

  CLI::App* const run_command =
      app.add_subcommand("run", "Run the op that a file names on the tensors of the file");
  run_command
      ->add_option("IN", arguments->input,
                   "A .safetensors file, op and attributes in its metadata; or a folder of .npy "
                   "files with op.json")
      ->required()
      ->type_name("PATH");
  run_command
      ->add_option("OUT", arguments->output,
                   "Where outputs go: a file where it ends in .safetensors, else a folder of .npy "
                   "files")
      ->required()
      ->type_name("PATH");
  run_command
      ->add_option("--set", arguments->settings,
                   "key=value: overrides an attribute of IN, or the op; may be repeated")
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");

  CLI::App* const compare_command = app.add_subcommand(
      "compare", "Compare every tensor of A with what it is expected to be in B");
  compare_command->add_option("A", arguments->a, "A .safetensors file or a folder of .npy files")
      ->required()
      ->type_name("PATH");
  compare_command->add_option("B", arguments->b, "The same, with the expected values")
      ->required()
      ->type_name("PATH");
  compare_command
      ->add_option("--tolerance", arguments->tolerance,
                   "Largest max|a-b| / max|b| of a tensor that passes")
      ->capture_default_str();

  return [arguments, list_command, run_command, &results] {
    if (list_command->parsed()) {
      return list(results);
    }
    return run_command->parsed() ? run(*arguments, results) : compare(*arguments, results);
  };
}

}  // namespace heddle::oracle

// Runs every golden in the given folders and compares: NAME.in.safetensors through its op,
// NAME.out.safetensors within the tolerance that it states. Settings that may not change a value are
// tried as well. Fails where a case fails, and where a folder holds none.

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "heddle-oracle/op_call.hpp"
#include "heddle-oracle/tensor_compare.hpp"
#include "heddle/mesh/axes.hpp"
#include "support/safetensors.hpp"
#include "support/scratch_folder.hpp"
#include "support/tensor_file.hpp"

namespace {

namespace fs = std::filesystem;
using heddle::examples::Metadata;
using heddle::examples::TensorFile;

const std::string input_end = ".in.safetensors";
const std::string output_end = ".out.safetensors";

bool is_layer_of_gdn(const std::string& op) {
  return op.starts_with("gdn.") && op != "gdn.inverse";
}

/// What a case is run with, besides its own attributes.
std::vector<Metadata> variants(const Metadata& attributes) {
  const std::string& op = attributes.at("op");
  const auto mesh = attributes.find("mesh");
  const bool sharded = mesh != attributes.end() && heddle::parse_axes(mesh->second).devices() > 1;
  std::vector<Metadata> result = {{{"path", "reference"}}};
  if (sharded) {
    return result;
  }
  result.push_back({});
  result.push_back({{"threads", "1"}});
  if (op == "gdn.inverse") {
    result.push_back({{"block", "4"}});
  }
  if (is_layer_of_gdn(op)) {
    result.push_back({{"chunk", "7"}, {"chunking", "aligned"}});
    result.push_back({{"chunk", "5"}, {"chunking", "grid"}});
    result.push_back({{"context_layout", "dual_chunk_swap"}});
  }
  if (op == "gdn.forward") {
    result.push_back({{"path", "decode"}});
  }
  if (op.starts_with("head.")) {
    result.push_back({{"chunk", "3"}});
  }
  if (op == "moe.layer" || op == "moe.backward") {
    if (!attributes.contains("buffer_factor")) {
      result.push_back({{"token_chunks", "3"}});
    }
    if (op == "moe.backward") {
      result.push_back({{"weight_grad_from", "wo_input"}});
      result.push_back({{"weight_grad_from", "wo_output"}});
    }
  }
  return result;
}

std::string text_of(const Metadata& settings) {
  std::string text;
  for (const auto& [name, value] : settings) {
    text += " " + name + "=" + value;
  }
  return text;
}

/// Failures of one case.
int check_case(const fs::path& input) {
  std::string name = input.string();
  name.resize(name.size() - input_end.size());
  const heddle::test::ScratchFolder scratch;
  int failures = 0;
  const TensorFile file = heddle::examples::read_safetensors(input);
  const TensorFile expected = heddle::examples::read_safetensors(name + output_end);
  const double tolerance = std::stod(expected.metadata().at("tolerance"));
  for (const Metadata& settings : variants(file.metadata())) {
    std::string problem;
    try {
      // Through a file, as a user's results go.
      const fs::path output = scratch / "out.safetensors";
      heddle::examples::write_tensors(output, heddle::oracle::run_op(file, settings), {});
      for (const auto& comparison : heddle::oracle::compare_files(
               heddle::examples::read_safetensors(output), expected, tolerance)) {
        if (!comparison.passed) {
          problem += " " + heddle::oracle::comparison_json(comparison).dump();
        }
      }
    } catch (const std::exception& error) {
      problem = error.what();
    }
    if (!problem.empty()) {
      std::printf("%s%s, tolerance %g: %s\n", name.c_str(), text_of(settings).c_str(), tolerance,
                  problem.c_str());
      ++failures;
    }
  }
  return failures;
}

}  // namespace

int main(int argc, char** argv) {
  int failures = 0;
  for (int i = 1; i < argc; ++i) {
    std::vector<fs::path> inputs;
    for (const auto& entry : fs::recursive_directory_iterator(argv[i])) {
      if (entry.path().string().ends_with(input_end)) {
        inputs.push_back(entry.path());
      }
    }
    std::sort(inputs.begin(), inputs.end());
    for (const fs::path& input : inputs) {
      failures += check_case(input);
    }
    std::printf("%s: %zu goldens\n", argv[i], inputs.size());
    failures += inputs.empty() ? 1 : 0;
  }
  return argc > 1 && failures == 0 ? 0 : 1;
}

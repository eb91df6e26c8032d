#include "support/gate_report.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <ostream>
#include <utility>

#include "heddle/numerics/gates.hpp"
#include "support/table.hpp"

namespace heddle::examples {
namespace {

using numerics::Gate;
using numerics::GateKind;
using numerics::NamedTensor;
using numerics::RoutedElsewhere;
using numerics::RunReport;

constexpr std::size_t most_tokens_listed = 16;

std::string tokens_text(const RunReport& report) {
  const std::vector<RoutedElsewhere>& tokens = report.routed_elsewhere;
  std::string text = "expert ids differ at " + std::to_string(tokens.size()) + " of " +
                     std::to_string(report.routed_tokens) +
                     " tokens, left out of logps and entropy "
                     "with what they reach:";
  for (std::size_t i = 0; i < std::min(tokens.size(), most_tokens_listed); ++i) {
    text += (i == 0 ? " token " : ", token ") + std::to_string(tokens[i].token) + " (layer " +
            std::to_string(tokens[i].layer) + ")";
  }
  if (tokens.size() > most_tokens_listed) {
    text += " and " + std::to_string(tokens.size() - most_tokens_listed) + " more";
  }
  return text;
}

void print_table(const RunReport& report, std::ostream& out) {
  using Align = Table::Align;
  Table table({{"gate", Align::left},
               {"tensor", Align::left},
               {"value", Align::right},
               {"limit", Align::right},
               {"verdict", Align::left}});
  for (const Gate& gate : report.gates) {
    std::string verdict = gate.passed ? "pass" : "FAIL";
    verdict += gate.reason.empty() ? "" : ": " + gate.reason;
    table.add({std::string(name(gate.kind)), gate.tensor.empty() ? "-" : gate.tensor,
               std::isnan(gate.value) ? "-" : number_text(gate.value), number_text(gate.limit),
               std::move(verdict)});
  }
  table.print(out);
}

}  // namespace

NamedTensor named_tensor(const TensorView& tensor) {
  return with_type(tensor.dtype, [&](auto stored) {
    return NamedTensor{
        .name = tensor.name, .shape = tensor.shape, .elements = tensor.values<decltype(stored)>()};
  });
}

std::vector<NamedTensor> named_tensors(const TensorFile& file) {
  std::vector<NamedTensor> result;
  for (const TensorInfo& tensor : file.tensors()) {
    result.push_back(named_tensor(file.at(tensor.name)));
  }
  return result;
}

std::vector<NamedTensor> named_tensors(const std::vector<Tensor>& tensors) {
  std::vector<NamedTensor> result;
  for (const Tensor& tensor : tensors) {
    result.push_back(named_tensor(tensor.view()));
  }
  return result;
}

Json gate_json(const Gate& gate, const RunReport& report) {
  // JSON has no infinity and no NaN.
  const auto number = [](double value) {
    return std::isfinite(value) ? Json(value) : Json(nullptr);
  };
  Json object = {{"gate", std::string(name(gate.kind))},
                 {"tensor", gate.tensor.empty() ? Json(nullptr) : Json(gate.tensor)},
                 {"value", number(gate.value)},
                 {"limit", number(gate.limit)},
                 {"pass", gate.passed}};
  if (!gate.reason.empty()) {
    object["reason"] = gate.reason;
  }
  if (gate.kind == GateKind::expert_ids && !report.routed_elsewhere.empty()) {
    Json tokens = Json::array();
    for (const RoutedElsewhere& each : report.routed_elsewhere) {
      tokens.push_back({each.layer, each.token});
    }
    object["tokens"] = std::move(tokens);
  }
  return object;
}

void print_report(const RunReport& report, const Results& results) {
  if (results.json()) {
    for (const Gate& gate : report.gates) {
      results.print(gate_json(gate, report));
    }
    return;
  }
  std::ostream& out = results.out();
  print_table(report, out);
  if (!report.routed_elsewhere.empty()) {
    out << tokens_text(report) << '\n';
  }
  const auto failed =
      std::ranges::count_if(report.gates, [](const Gate& gate) { return !gate.passed; });
  out << (failed == 0 ? "all " : std::to_string(failed) + " of ") << report.gates.size()
      << (failed == 0 ? " gates pass" : " gates fail") << '\n';
}

}  // namespace heddle::examples

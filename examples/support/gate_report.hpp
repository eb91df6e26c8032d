#pragma once

#include <string>
#include <vector>

#include "heddle/numerics/run_gates.hpp"
#include "heddle/numerics/tensor.hpp"
#include "support/json_text.hpp"
#include "support/program.hpp"
#include "support/tensor.hpp"
#include "support/tensor_file.hpp"

namespace heddle::examples {

/// A stored tensor as the gates read it; the elements stay where they are.
[[nodiscard]] numerics::NamedTensor named_tensor(const TensorView& tensor);

/// All tensors of a file, or of a dump in memory, in their order; both must outlive the result.
[[nodiscard]] std::vector<numerics::NamedTensor> named_tensors(const TensorFile& file);
[[nodiscard]] std::vector<numerics::NamedTensor> named_tensors(const std::vector<Tensor>& tensors);

/// A gate as --json has it: gate, tensor or null, value or null where it is no number, limit, pass; a
/// reason where there is one; of expert_ids the tokens that differ, [layer, token] each.
[[nodiscard]] Json gate_json(const numerics::Gate& gate, const numerics::RunReport& report);

/// Every gate, as one JSON object a line, or as a table that names what is left out and what fails.
void print_report(const numerics::RunReport& report, const Results& results);

}  // namespace heddle::examples

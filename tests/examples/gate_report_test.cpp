#include "support/gate_report.hpp"

#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/numerics/gates.hpp"
#include "support/safetensors.hpp"
#include "support/scratch_folder.hpp"

// Mutants that must fail here: a tensor read as another type or in another order; infinity or NaN in JSON;
// an empty tensor's name for null; tokens listed without end, or [token, layer]; a reason lost.

namespace heddle::examples {
namespace {

using numerics::Gate;
using numerics::GateKind;
using numerics::RunReport;

const double nan = std::numeric_limits<double>::quiet_NaN();
const double inf = std::numeric_limits<double>::infinity();

RunReport report() {
  RunReport report;
  report.gates = {{.kind = GateKind::loss, .value = 1.5e-7, .limit = 1e-5, .passed = true},
                  {.kind = GateKind::expert_ids,
                   .tensor = "expert_ids",
                   .value = 2,
                   .limit = 3,
                   .passed = true},
                  {.kind = GateKind::relative_l2,
                   .tensor = "grad.w",
                   .value = inf,
                   .limit = 1e-4,
                   .passed = false},
                  {.kind = GateKind::entropy,
                   .value = nan,
                   .limit = 1e-5,
                   .passed = false,
                   .reason = "nan against 1"}};
  report.routed_elsewhere = {{.token = 7, .layer = 1}, {.token = 9, .layer = 0}};
  report.routed_tokens = 100;
  return report;
}

TEST(GateReport, TensorsOfAnyTypeAreReadWhereTheyAre) {
  const std::vector<Tensor> tensors = {Tensor::of<double>("a", {1}, {1.5}),
                                       Tensor::of<bfloat16>("b", {1}, {bfloat16(-2.0F)}),
                                       Tensor::of<std::uint8_t>("c", {2, 1}, {200, 3})};
  const auto named = named_tensors(tensors);
  ASSERT_EQ(named.size(), 3U);
  EXPECT_EQ(named[0].name, "a");
  EXPECT_EQ(named[0].read_all<double>(), std::vector<double>{1.5});
  EXPECT_EQ(named[1].read_all<double>(), std::vector<double>{-2});
  EXPECT_EQ(named[2].read_all<int>(), (std::vector<int>{200, 3}));
  EXPECT_EQ(named[2].shape, (std::vector<std::int64_t>{2, 1}));
  EXPECT_FALSE(named[2].is_floating());

  const test::ScratchFolder scratch;
  write_safetensors(scratch / "x", tensors, {});
  const TensorFile file = read_safetensors(scratch / "x");
  EXPECT_EQ(named_tensors(file)[1].read_all<double>(), std::vector<double>{-2});
}

TEST(GateReport, ObjectsHaveTheirFiveMembersAndWhatElseThereIsToSay) {
  const RunReport all = report();
  EXPECT_EQ(json_line(gate_json(all.gates[0], all)),
            R"({"gate":"loss","tensor":null,"value":1.5e-07,"limit":1e-05,"pass":true})");
  EXPECT_EQ(json_line(gate_json(all.gates[1], all)),
            R"({"gate":"expert_ids","tensor":"expert_ids","value":2.0,"limit":3.0,"pass":true,)"
            R"("tokens":[[1,7],[0,9]]})");
  EXPECT_EQ(json_line(gate_json(all.gates[2], all)),
            R"({"gate":"relative_l2","tensor":"grad.w","value":null,"limit":0.0001,"pass":false})");
  EXPECT_EQ(json_line(gate_json(all.gates[3], all)),
            R"({"gate":"entropy","tensor":null,"value":null,"limit":1e-05,"pass":false,)"
            R"("reason":"nan against 1"})");
}

TEST(GateReport, TableLinesUpAndSaysWhatIsLeftOut) {
  std::ostringstream out;
  print_report(report(), Results(out));
  EXPECT_EQ(out.str(),
            "gate         tensor        value   limit  verdict\n"
            "loss         -           1.5e-07   1e-05  pass\n"
            "expert_ids   expert_ids        2       3  pass\n"
            "relative_l2  grad.w          inf  0.0001  FAIL\n"
            "entropy      -                 -   1e-05  FAIL: nan against 1\n"
            "expert ids differ at 2 of 100 tokens, left out of logps and entropy with what they "
            "reach: token 7 (layer 1), token 9 (layer 0)\n"
            "2 of 4 gates fail\n");
}

TEST(GateReport, LongListsOfTokensAreCut) {
  RunReport many = report();
  many.gates.resize(2);
  many.routed_elsewhere.assign(20, {.token = 1, .layer = 0});
  std::ostringstream out;
  print_report(many, Results(out));
  EXPECT_NE(out.str().find(", token 1 (layer 0) and 4 more\nall 2 gates pass\n"), std::string::npos)
      << out.str();
  EXPECT_EQ(gate_json(many.gates[1], many)["tokens"].size(), 20U) << "a script gets all";
}

}  // namespace
}  // namespace heddle::examples

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/json_text.hpp"
#include "support/random.hpp"
#include "support/run_command.hpp"
#include "support/safetensors.hpp"
#include "support/scratch_folder.hpp"

// The program as a user starts it. Mutants that must fail here: a status of 0 where a gate fails; the
// candidate's noise accepted; --noise ignored; floors of kernels for a model's step; a line besides objects
// with --json; a broken file taken for a run that differs.

namespace heddle::gates {
namespace {

namespace fs = std::filesystem;
using examples::Json;
using examples::Tensor;
using test::CommandResult;
using test::ScratchFolder;

using Words = std::vector<std::string>;
using Floats = std::vector<float>;

CommandResult gates(Words arguments) {
  arguments.insert(arguments.begin(), HEDDLE_GATES_PROGRAM);
  return test::run_command(arguments);
}

std::vector<Json> json_lines(const std::string& text) {
  std::vector<Json> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(examples::parse_json(line, "a line"));
  }
  return lines;
}

/// "loss", "grad.w worst_row": the gates that fail.
std::set<std::string> failing(const CommandResult& ended) {
  std::set<std::string> names;
  for (const Json& gate : json_lines(ended.out)) {
    EXPECT_GE(gate.size(), 5U);
    if (!gate["pass"].get<bool>()) {
      names.insert((gate["tensor"].is_null() ? "" : gate["tensor"].get<std::string>() + " ") +
                   gate["gate"].get<std::string>());
    }
  }
  EXPECT_EQ(ended.status, names.empty() ? 0 : 1) << ended.err;
  EXPECT_EQ(ended.err, "");
  return names;
}

/// What heddle-train --dump-step writes, of one row of two documents and a model of one weight.
std::map<std::string, Tensor> step() {
  test::Random random(5);
  Floats logps(16);
  Floats entropy(16);
  std::vector<std::int32_t> segments(16);
  for (std::size_t t = 0; t < 14; ++t) {
    segments[t] = t < 7 ? 1 : 2;
    if (t % 7 != 0) {
      logps[t] = static_cast<float>(random.uniform(-6, -4));
      entropy[t] = static_cast<float>(random.uniform(4, 5));
    }
  }
  std::vector<std::int32_t> expert_ids(2 * 16 * 2);
  for (std::size_t i = 0; i < expert_ids.size(); ++i) {
    expert_ids[i] = static_cast<std::int32_t>(i % 2 * 4 + i / 2 % 4);
  }
  std::map<std::string, Tensor> tensors;
  const auto add = [&](Tensor tensor) { tensors.emplace(tensor.name, tensor); };
  add(Tensor::of("token_ids", {1, 16}, std::vector<std::int32_t>(16, 3)));
  add(Tensor::of("segment_ids", {1, 16}, segments));
  add(Tensor::of("logps", {1, 16}, logps));
  add(Tensor::of("entropy", {1, 16}, entropy));
  add(Tensor::of("expert_ids", {2, 16, 2}, expert_ids));
  add(Tensor::of<float>("loss", {1}, {0.07F}));
  add(Tensor::of<float>("grad_norm", {1}, {0.5F}));
  add(Tensor::of<float>("update_norm", {1}, {0.02F}));
  add(Tensor::of<std::int64_t>("dropped_slots", {1}, {4}));
  add(Tensor::of("grad.w", {8, 16}, random.normals<float>(128)));
  add(Tensor::of("updated.w", {8, 16}, random.normals<float>(128)));
  return tensors;
}

using Change = std::function<void(std::map<std::string, Tensor>&)>;

std::string write(
    const ScratchFolder& scratch, const std::string& name, const Change& change = [](auto&) {}) {
  std::map<std::string, Tensor> tensors = step();
  change(tensors);
  std::vector<Tensor> list;
  for (auto& [tensor_name, tensor] : tensors) {
    list.push_back(std::move(tensor));
  }
  examples::write_safetensors(scratch / name, list, {});
  return (scratch / name).string();
}

/// Multiplies an entry of a tensor.
Change scaled(const std::string& name, std::size_t at, float by) {
  return [=](auto& tensors) { tensors.at(name).template values<float>()[at] *= by; };
}

TEST(GatesProgram, EqualRunsPassEveryGateInATable) {
  const ScratchFolder scratch;
  const std::string a = write(scratch, "a");
  const CommandResult ended = gates({a, a});
  EXPECT_EQ(ended.status, 0);
  EXPECT_EQ(ended.err, "");
  EXPECT_EQ(ended.out.substr(0, ended.out.find("token_ids")),
            "gate              tensor       value   limit  verdict\n"
            "loss              -                0   1e-05  pass\n"
            "log_prob          -                0  0.0001  pass\n"
            "entropy           -                0   1e-05  pass\n"
            "grad_norm         -                0   0.002  pass\n"
            "dropped_slots     -                0       0  pass\n"
            "update_norm       -                0   0.002  pass\n"
            "expert_ids        expert_ids       0       1  pass\n"
            "relative_l2       grad.w           0  0.0001  pass\n"
            "one_minus_cosine  grad.w           0   1e-08  pass\n"
            "norm_ratio        grad.w           0   2e-05  pass\n"
            "worst_row         grad.w           0  0.0005  pass\n"
            "equal             segment_ids      0       0  pass\n"
            "equal             ");
  EXPECT_NE(ended.out.find("\nall 17 gates pass\n"), std::string::npos);
}

TEST(GatesProgram, JsonIsAnObjectAGate) {
  const ScratchFolder scratch;
  const CommandResult ended =
      gates({"--json", write(scratch, "a"), write(scratch, "b", scaled("grad_norm", 0, 1.25F))});
  EXPECT_EQ(ended.status, 1);
  const std::vector<Json> lines = json_lines(ended.out);
  ASSERT_EQ(lines.size(), 17U);
  EXPECT_EQ(lines[3].dump(),
            R"({"gate":"grad_norm","tensor":null,"value":0.25,"limit":0.002,"pass":false})");
  EXPECT_EQ(lines[7]["tensor"], "grad.w");
  EXPECT_EQ(lines[7]["pass"], true);
}

TEST(GatesProgram, EveryGateFailsOnItsMutant) {
  const ScratchFolder scratch;
  const std::string a = write(scratch, "a");
  const auto fails = [&](const Change& change) {
    return failing(gates({"--json", a, write(scratch, "b", change)}));
  };
  using Names = std::set<std::string>;
  EXPECT_EQ(fails(scaled("loss", 0, 1.001F)), Names{"loss"});
  EXPECT_EQ(fails(scaled("logps", 3, 1.001F)), Names{"log_prob"});
  EXPECT_EQ(fails(scaled("entropy", 3, 1.001F)), Names{"entropy"});
  EXPECT_EQ(fails(scaled("grad_norm", 0, 1.003F)), Names{"grad_norm"});
  EXPECT_EQ(fails(scaled("update_norm", 0, 0.0F)), Names{"update_norm"});
  EXPECT_EQ(fails([](auto& t) { t.at("dropped_slots").template values<std::int64_t>()[0] = 5; }),
            Names{"dropped_slots"});
  EXPECT_EQ(fails([](auto& t) { t.at("token_ids").template values<std::int32_t>()[9] = 4; }),
            Names{"token_ids equal"});
  EXPECT_EQ(fails(scaled("updated.w", 3, 2.0F)).count("updated.w relative_l2"), 1U);
  const Names direction = {"grad.w relative_l2", "grad.w one_minus_cosine", "grad.w worst_row"};
  EXPECT_EQ(fails([](auto& t) {
              for (float& g : t.at("grad.w").template values<float>()) {
                g = -g;
              }
            }),
            direction)
      << "the sign";
  EXPECT_EQ(fails([](auto& t) {
              const auto g = t.at("grad.w").template values<float>();
              std::rotate(g.begin(), g.begin() + 64, g.end());
            }),
            direction)
      << "the halves";
  EXPECT_EQ(fails([](auto& t) {
              const auto g = t.at("grad.w").template values<float>();
              for (std::size_t i = 0; i < g.size(); i += 2) {
                g[i] = -std::exchange(g[i + 1], g[i]);
              }
            }),
            direction)
      << "a rotation";
  EXPECT_EQ(fails([](auto& t) {
              for (float& g : t.at("grad.w").template values<float>()) {
                g *= 1.00005F;
              }
            }),
            Names{"grad.w norm_ratio"});
  EXPECT_EQ(fails([](auto& t) {
              for (std::int32_t& id : t.at("expert_ids").template values<std::int32_t>()) {
                id += 1;
              }
            }),
            (Names{"expert_ids expert_ids", "log_prob", "entropy"}))
      << "and no token is left to compare";
}

TEST(GatesProgram, NearTiesAreListedAndLeftOut) {
  const ScratchFolder scratch;
  const std::string b = write(scratch, "b", [](auto& t) {
    t.at("expert_ids").template values<std::int32_t>()[2 * 3] = 9;
    t.at("logps").template values<float>()[5] += 0.01F;
  });
  const CommandResult table = gates({write(scratch, "a"), b});
  EXPECT_EQ(table.status, 0) << table.out;
  EXPECT_NE(
      table.out.find("expert ids differ at 1 of 16 tokens, left out of logps and entropy with "
                     "what they reach: token 3 (layer 0)\n"),
      std::string::npos)
      << table.out;
  const std::vector<Json> lines = json_lines(gates({write(scratch, "a"), b, "--json"}).out);
  EXPECT_EQ(lines[6]["tokens"].dump(), "[[0,3]]");
  EXPECT_EQ(lines[1]["reason"], "4 entries left out");
}

TEST(GatesProgram, NoiseWidensTheLimits) {
  const ScratchFolder scratch;
  const std::string a = write(scratch, "a");
  const std::string b = write(scratch, "b", scaled("logps", 3, 1.0005F));
  const std::string noise = write(scratch, "noise", scaled("logps", 3, 1.0001F));
  EXPECT_EQ(failing(gates({"--json", a, b})).count("log_prob"), 1U);
  EXPECT_TRUE(failing(gates({"--json", a, b, "--noise", noise})).empty());
  EXPECT_EQ(failing(gates({"--json", "--noise", a, a, b})).count("log_prob"), 1U)
      << "a run that repeats is no noise";
}

TEST(GatesProgram, NoiseThatSaysNothingIsRefused) {
  const ScratchFolder scratch;
  const std::string a = write(scratch, "a");
  const std::string b = write(scratch, "b");
  const auto refusal = [&](const std::string& noise) {
    const CommandResult ended = gates({a, b, "--noise", noise});
    EXPECT_EQ(ended.status, 2);
    EXPECT_EQ(ended.out, "");
    return ended.err;
  };
  const auto says = [](const std::string& noise, const std::string& what) {
    return "heddle-gates: --noise = " + noise + ": " + what + "\n";
  };
  EXPECT_EQ(refusal(b), says(b, "is the candidate: must be another correct run"));
  fs::create_symlink("b", scratch / "link");
  const std::string link = (scratch / "link").string();
  EXPECT_EQ(refusal(link), says(link, "is the candidate: must be another correct run"));
  const std::string lacking = write(scratch, "c", [](auto& t) { t.erase("grad.w"); });
  EXPECT_EQ(refusal(lacking), says(lacking, "tensor 'grad.w': must be in every run"));
  const std::string nan =
      write(scratch, "d", scaled("grad.w", 0, std::numeric_limits<float>::quiet_NaN()));
  EXPECT_EQ(refusal(nan), says(nan, "tensor 'grad.w': must be finite"));
  const std::string other = write(
      scratch, "e", [](auto& t) { t.at("token_ids").template values<std::int32_t>()[0] = 8; });
  EXPECT_EQ(refusal(other), says(other, "tensor 'token_ids': integers must be the baseline's"));
}

TEST(GatesProgram, RunsThatDoNotMatchFailByName) {
  const ScratchFolder scratch;
  const std::string a = write(scratch, "a");
  using Names = std::set<std::string>;
  const std::string lacking = write(scratch, "b", [](auto& t) { t.erase("grad.w"); });
  EXPECT_EQ(failing(gates({"--json", a, lacking})), Names{"grad.w names"});
  EXPECT_EQ(failing(gates({"--json", lacking, a})), Names{"grad.w names"});
  const std::string turned = write(scratch, "c", [](auto& t) { t.at("grad.w").shape = {16, 8}; });
  EXPECT_EQ(failing(gates({"--json", a, turned})), Names{"grad.w shape"});
  EXPECT_NE(gates({a, turned}).out.find("FAIL: floating [16, 8] against floating [8, 16]\n"),
            std::string::npos);
  const std::string nan =
      write(scratch, "d", scaled("grad.w", 17, std::numeric_limits<float>::quiet_NaN()));
  const CommandResult ended = gates({"--json", a, nan});
  EXPECT_EQ(failing(ended), Names{"grad.w finite"});
  EXPECT_NE(ended.out.find("\"reason\":\"entry [1, 1] is nan against "), std::string::npos);
  EXPECT_EQ(failing(gates({"--json", nan, nan})), Names{"grad.w finite"});
}

TEST(GatesProgram, KernelsHaveTheirOwnFloors) {
  const ScratchFolder scratch;
  const auto kernel = [&](const std::string& name, float value) {
    examples::write_safetensors(scratch / name, {Tensor::of<float>("d_hidden", {2}, {1.0F, value})},
                                {});
    return (scratch / name).string();
  };
  const CommandResult ended = gates({"--json", kernel("a", 1.0F), kernel("b", 1.00001F)});
  EXPECT_EQ(failing(ended).count("d_hidden relative_l2"), 1U);
  EXPECT_EQ(json_lines(ended.out)[0]["limit"], 2e-6);
}

TEST(GatesProgram, FilesThatAreNoneAreOneLineAndTwo) {
  const ScratchFolder scratch;
  const std::string a = write(scratch, "a");
  const std::string broken = scratch.write("broken.safetensors", "broken").string();
  std::string bytes = test::read_file(a);
  bytes.pop_back();
  const std::string cut = scratch.write("cut.safetensors", bytes).string();
  examples::write_safetensors(scratch / "none", {}, {});
  const std::string none = (scratch / "none").string();
  for (const Words& arguments : std::vector<Words>{{},
                                                   {a},
                                                   {a, a, a},
                                                   {a, broken},
                                                   {broken, a},
                                                   {a, cut},
                                                   {a, a, "--noise", broken},
                                                   {a, a, "--noise"},
                                                   {a, (scratch / "missing").string()},
                                                   {a, "/dev/null"},
                                                   {none, a},
                                                   {a, a, "--noise", none},
                                                   {a, a, "--tolerance", "1"}}) {
    const CommandResult ended = gates(arguments);
    EXPECT_EQ(ended.status, 2) << ended.err;
    EXPECT_EQ(ended.out, "");
    EXPECT_EQ(ended.err.substr(0, 14), "heddle-gates: ");
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
  }
  EXPECT_EQ(gates({none, a}).err, "heddle-gates: " + none + ": holds no tensor to judge by\n");
  EXPECT_EQ(gates({a, none}).status, 1) << "a candidate without tensors is a run that differs";
}

TEST(GatesProgram, HelpAndVersion) {
  EXPECT_EQ(gates({"--version"}).out, std::string("heddle-gates ") + HEDDLE_VERSION + "\n");
  const CommandResult help = gates({"--help"});
  EXPECT_EQ(help.status, 0);
  EXPECT_EQ(help.err, "");
  EXPECT_NE(help.out.find("Usage: heddle-gates"), std::string::npos);
  for (const char* gate :
       {"loss", "log_prob", "entropy", "grad_norm", "dropped_slots", "update_norm", "relative_l2",
        "one_minus_cosine", "norm_ratio", "worst_row", "expert_ids", "equal"}) {
    EXPECT_NE(help.out.find(std::string("  ") + gate + " "), std::string::npos) << gate;
  }
}

}  // namespace
}  // namespace heddle::gates

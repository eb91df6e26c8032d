#include "heddle/numerics/run_gates.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: a gate left out of the verdict; a name of one side passed over; the shape
// of one side alone read; floors of a kernel for a model or the other way round; a token routed elsewhere
// that still counts, or that takes others' entries with it; noise of another run of other tokens accepted;
// noise that widens the limit of integers; the noise's own routing ignored.

namespace heddle::numerics {
namespace {

using Doubles = std::vector<double>;
using Floats = std::vector<float>;
using Ids = std::vector<std::int32_t>;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// The tensors of a run; a copy shares the elements, which the first owns.
class Dump {
 public:
  void set(const std::string& name, std::vector<std::int64_t> shape, Floats values) {
    put(name, std::move(shape), floats_.emplace_back(std::move(values)));
  }
  void set(const std::string& name, std::vector<std::int64_t> shape, Ids values) {
    put(name, std::move(shape), ids_.emplace_back(std::move(values)));
  }
  void erase(const std::string& name) {
    std::erase_if(tensors_, [&](const NamedTensor& t) { return t.name == name; });
  }

  [[nodiscard]] std::span<const NamedTensor> tensors() const { return tensors_; }

 private:
  template <class T>
  void put(const std::string& name, std::vector<std::int64_t> shape, const std::vector<T>& values) {
    const NamedTensor tensor = {
        .name = name, .shape = std::move(shape), .elements = std::span<const T>(values)};
    const auto found = std::ranges::find(tensors_, name, &NamedTensor::name);
    if (found == tensors_.end()) {
      tensors_.push_back(tensor);
    } else {
      *found = tensor;
    }
  }

  std::deque<Floats> floats_;
  std::deque<Ids> ids_;
  std::vector<NamedTensor> tensors_;
};

constexpr std::int64_t tokens = 12;

/// A step of a model of two layers over a row of two documents and padding, as a trainer dumps it.
struct Step {
  Ids token_ids = {5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 0, 0};
  Ids segment_ids = {1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0};
  Floats logps;
  Floats entropy;
  Ids expert_ids;
  float loss = 0.07F;
  float grad_norm = 0.34F;
  float update_norm = 0.02F;
  std::int32_t dropped_slots = 3;
  Floats gradient;
  Floats updated;

  Step() {
    test::Random random(3);
    gradient = random.normals<float>(96);
    updated = random.normals<float>(96);
    gradient[0] = 3;
    updated[0] = -3;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const bool scored = t < 10 && t % 5 != 0;
      logps.push_back(scored ? static_cast<float>(random.uniform(-6, -4)) : 0.0F);
      entropy.push_back(scored ? static_cast<float>(random.uniform(4, 5)) : 0.0F);
    }
    for (std::int64_t slot = 0; slot < 2 * tokens * 2; ++slot) {
      const std::int64_t token = slot / 2 % tokens;
      expert_ids.push_back(token < 10 ? static_cast<std::int32_t>(slot % 2 * 4 + token % 4) : -1);
    }
  }

  [[nodiscard]] Dump run() const {
    Dump run;
    run.set("token_ids", {1, tokens}, token_ids);
    run.set("segment_ids", {1, tokens}, segment_ids);
    run.set("logps", {1, tokens}, logps);
    run.set("entropy", {1, tokens}, entropy);
    run.set("expert_ids", {2, tokens, 2}, expert_ids);
    run.set("loss", {1}, Floats{loss});
    run.set("grad_norm", {1}, Floats{grad_norm});
    run.set("grad.w", {8, 12}, gradient);
    run.set("updated.w", {8, 12}, updated);
    run.set("update_norm", {1}, Floats{update_norm});
    run.set("dropped_slots", {1}, Ids{dropped_slots});
    return run;
  }
};

RunReport judged(const Dump& baseline, const Dump& candidate,
                 const std::optional<Dump>& noise = std::nullopt) {
  return judge_runs(baseline.tensors(), candidate.tensors(),
                    noise ? noise->tensors() : std::span<const NamedTensor>());
}

/// "grad_norm" of a scalar gate, "grad.w relative_l2" of a tensor's.
std::vector<std::string> failing(const RunReport& report) {
  std::vector<std::string> found;
  for (const Gate& gate : report.gates) {
    if (!gate.passed) {
      found.push_back((gate.tensor.empty() ? "" : gate.tensor + " ") +
                      std::string(name(gate.kind)));
    }
  }
  EXPECT_EQ(found.empty(), report.passed());
  return found;
}

using Names = std::vector<std::string>;

TEST(RunGates, EqualRunsPassEveryGate) {
  const Dump run = Step().run();
  const RunReport report = judged(run, run);
  EXPECT_TRUE(report.passed());
  Names gates;
  for (const Gate& gate : report.gates) {
    EXPECT_EQ(gate.value, 0) << name(gate.kind);
    gates.push_back((gate.tensor.empty() ? "" : gate.tensor + " ") + std::string(name(gate.kind)));
  }
  const Names expected = {"loss",
                          "log_prob",
                          "entropy",
                          "grad_norm",
                          "dropped_slots",
                          "update_norm",
                          "expert_ids expert_ids",
                          "token_ids equal",
                          "segment_ids equal",
                          "grad.w relative_l2",
                          "grad.w one_minus_cosine",
                          "grad.w norm_ratio",
                          "grad.w worst_row",
                          "updated.w relative_l2",
                          "updated.w one_minus_cosine",
                          "updated.w norm_ratio",
                          "updated.w worst_row"};
  EXPECT_EQ(gates, expected);
  EXPECT_EQ(report.routed_tokens, 10);
  EXPECT_TRUE(report.routed_elsewhere.empty());
}

TEST(RunGates, EachScalarGateFailsOnItsMutant) {
  const Dump baseline = Step().run();
  const auto fails = [&](const auto& change) {
    Step mutant;
    change(mutant);
    return failing(judged(baseline, mutant.run()));
  };
  EXPECT_EQ(fails([](Step& s) { s.loss *= 1.0001F; }), Names{"loss"});
  EXPECT_EQ(fails([](Step& s) { s.loss = -s.loss; }), Names{"loss"});
  EXPECT_EQ(fails([](Step& s) { s.logps[3] += 2e-4F; }), Names{"log_prob"});
  EXPECT_EQ(fails([](Step& s) {
              std::rotate(s.logps.begin() + 1, s.logps.begin() + 2, s.logps.begin() + 5);
            }),
            Names{"log_prob"})
      << "a mean would not see it";
  EXPECT_EQ(fails([](Step& s) { s.entropy[7] *= 1.001F; }), Names{"entropy"});
  EXPECT_EQ(fails([](Step& s) { s.grad_norm *= 1.003F; }), Names{"grad_norm"});
  EXPECT_EQ(fails([](Step& s) { s.dropped_slots -= 1; }), Names{"dropped_slots"});
  EXPECT_EQ(fails([](Step& s) { s.update_norm *= 2; }), Names{"update_norm"});
  EXPECT_EQ(fails([](Step& s) { s.update_norm = 0; }), Names{"update_norm"});
  EXPECT_EQ(fails([](Step& s) { s.token_ids[2] += 1; }), Names{"token_ids equal"});
}

TEST(RunGates, TensorGatesSeeWhatScalarsDoNot) {
  const Dump baseline = Step().run();
  const auto fails = [&](const auto& change) {
    Step mutant;
    change(mutant.gradient);
    return failing(judged(baseline, mutant.run()));
  };
  const Names direction = {"grad.w relative_l2", "grad.w one_minus_cosine", "grad.w worst_row"};
  EXPECT_EQ(fails([](Floats& g) {
              for (float& x : g) {
                x = -x;
              }
            }),
            direction);
  EXPECT_EQ(fails([](Floats& g) { std::rotate(g.begin(), g.begin() + 48, g.end()); }), direction);
  EXPECT_EQ(fails([](Floats& g) {
              for (std::size_t i = 0; i < g.size(); i += 2) {
                const float x = g[i];
                g[i] = g[i + 1];
                g[i + 1] = -x;
              }
            }),
            direction);
}

TEST(RunGates, UpdatedParametersAreHeldToo) {
  const Dump baseline = Step().run();
  Step noisy;
  noisy.updated[17] += 1e-3F;
  EXPECT_TRUE(judged(baseline, noisy.run()).passed());
  noisy.gradient[17] += 2e-3F;
  EXPECT_FALSE(judged(baseline, noisy.run()).passed()) << "a gradient has no optimizer to blame";
  Step mutant;
  mutant.updated[17] += 0.05F;
  EXPECT_EQ(failing(judged(baseline, mutant.run())),
            (Names{"updated.w relative_l2", "updated.w one_minus_cosine", "updated.w norm_ratio",
                   "updated.w worst_row"}));
}

TEST(RunGates, TokensRoutedElsewhereAreCountedListedAndLeftOut) {
  const Dump baseline = Step().run();
  Step near_tie;
  near_tie.expert_ids[2 * 2] = 7;  // layer 0, token 2 of the first document
  for (const std::size_t t : {2U, 3U, 4U}) {
    near_tie.logps[t] += 0.01F;
    near_tie.entropy[t] += 0.01F;
  }
  const RunReport report = judged(baseline, near_tie.run());
  EXPECT_TRUE(report.passed());
  EXPECT_EQ(report.routed_elsewhere, (std::vector<RoutedElsewhere>{{.token = 2, .layer = 0}}));
  EXPECT_EQ(report.gates[1].reason, "3 entries left out");
  EXPECT_EQ(report.gates[6].kind, GateKind::expert_ids);
  EXPECT_EQ(report.gates[6].value, 1);
  EXPECT_EQ(report.gates[6].limit, 1) << "one near tie, however few tokens there are";

  Step earlier = near_tie;
  earlier.logps[1] += 0.01F;
  EXPECT_EQ(failing(judged(baseline, earlier.run())), Names{"log_prob"})
      << "what came before the token is not reached";
  Step other_document = near_tie;
  other_document.entropy[6] += 0.01F;
  EXPECT_EQ(failing(judged(baseline, other_document.run())), Names{"entropy"});
  Step last_layer;
  last_layer.expert_ids[static_cast<std::size_t>((tokens + 1) * 2)] = 7;
  last_layer.logps[2] += 0.01F;
  EXPECT_TRUE(judged(baseline, last_layer.run()).passed());
  last_layer.logps[3] += 0.01F;
  EXPECT_EQ(failing(judged(baseline, last_layer.run())), Names{"log_prob"});
  Step two = near_tie;
  two.expert_ids[7 * 2] = 7;
  EXPECT_EQ(failing(judged(baseline, two.run())), Names{"expert_ids expert_ids"});
}

TEST(RunGates, LimitOfRoutingIsAThousandthOfTheTokens) {
  constexpr std::int64_t many = 5000;
  Dump baseline;
  Ids ids(many, 1);
  baseline.set("expert_ids", {many, 1}, ids);
  baseline.set("grad.w", {1}, Floats{1});
  for (const std::int64_t elsewhere : {5, 6}) {
    std::fill_n(ids.begin(), elsewhere, 2);
    Dump candidate;
    candidate.set("expert_ids", {many, 1}, ids);
    candidate.set("grad.w", {1}, Floats{1});
    const RunReport report = judged(baseline, candidate);
    EXPECT_EQ(report.gates[0].limit, 5);
    EXPECT_EQ(report.passed(), elsewhere == 5);
  }
}

TEST(RunGates, EverythingLeftOutIsNoPass) {
  Dump baseline;
  baseline.set("logps", {2}, Floats{-1, -2});
  baseline.set("loss", {1}, Floats{1});
  baseline.set("expert_ids", {2, 2, 1}, Ids{0, 1, 0, 1});
  Dump candidate = baseline;
  candidate.set("expert_ids", {2, 2, 1}, Ids{2, 1, 0, 1});
  const RunReport report = judged(baseline, candidate);
  EXPECT_EQ(failing(report), Names{"log_prob"});
  EXPECT_EQ(report.gates[1].reason, "every entry is left out");
}

TEST(RunGates, KindIsToldByTheNames) {
  const auto kind = [](const Names& names) {
    Dump run;
    for (const std::string& name : names) {
      run.set(name, {1}, Floats{1});
    }
    return kind_of(run.tensors());
  };
  EXPECT_EQ(kind({"grad.x"}), RunKind::whole_model);
  EXPECT_EQ(kind({"x", "updated.x"}), RunKind::whole_model);
  EXPECT_EQ(kind({"loss", "logps"}), RunKind::whole_model);
  EXPECT_EQ(kind({"loss", "d_logps"}), RunKind::kernel) << "of the loss kernel";
  EXPECT_EQ(kind({"logps", "entropy"}), RunKind::kernel);
  EXPECT_EQ(kind({"d_hidden", "gradual"}), RunKind::kernel);
  EXPECT_EQ(kind({}), RunKind::kernel);
}

TEST(RunGates, KernelsAreHeldToTheirOwnFloors) {
  Dump b;
  b.set("d_hidden", {2, 2}, Floats{1, 2, 3, 4});
  Dump c;
  c.set("d_hidden", {2, 2}, Floats{1, 2, 3, 4.0001F});
  const RunReport kernel = judged(b, c);
  EXPECT_FALSE(kernel.passed());
  EXPECT_EQ(kernel.gates[0].limit, kernel_f32.relative_l2);
  EXPECT_TRUE(judge_runs(b.tensors(), c.tensors(), {}, RunKind::whole_model).passed());

  const std::vector<bfloat16> half = {bfloat16(1.0F), bfloat16(2.0F), bfloat16(3.0F),
                                      bfloat16(4.0F)};
  const std::vector<NamedTensor> rounded = {
      {.name = "d_hidden", .shape = {2, 2}, .elements = std::span<const bfloat16>(half)}};
  const RunReport bf16 = judge_runs(rounded, c.tensors());
  EXPECT_EQ(bf16.gates[0].limit, kernel_bf16.relative_l2);
  EXPECT_TRUE(bf16.passed());
  EXPECT_EQ(judge_runs(c.tensors(), rounded).gates[3].limit, kernel_bf16.worst_row)
      << "the coarser of the two, whichever side it is";
}

TEST(RunGates, KernelLogProbsAreToldInUlpsOfTheirLogSumExp) {
  const auto run = [](float logp, bool with_lse) {
    Dump dump;
    dump.set("logps", {2}, Floats{logp, -3});
    if (with_lse) {
      dump.set("max", {2}, Floats{11.4F, 1});
      dump.set("exp_sum", {2}, Floats{2.718281828F, 1});
    }
    return dump;
  };
  const float off = -1e-4F + 0x1p-20F;
  EXPECT_NEAR(judged(run(-1e-4F, true), run(off, true)).gates[0].value, 1, 1e-4);
  EXPECT_NEAR(judged(run(-1e-4F, false), run(off, false)).gates[0].value, 4, 1e-4);
  EXPECT_EQ(judged(run(-1e-4F, true), run(off, true)).gates[0].limit, 2);
  EXPECT_TRUE(judged(run(-1e-4F, true), run(off, true)).passed());
  EXPECT_EQ(failing(judged(run(-1e-4F, true), run(-1e-4F + 0x1.8p-19F, true))), Names{"log_prob"});
}

TEST(RunGates, NamesMustBeOnBothSides) {
  const Dump full = Step().run();
  Dump lacking = full;
  lacking.erase("grad.w");
  const RunReport missing = judged(full, lacking);
  EXPECT_EQ(failing(missing), Names{"grad.w names"});
  const RunReport extra = judged(lacking, full);
  EXPECT_EQ(failing(extra), Names{"grad.w names"});
  EXPECT_EQ(extra.gates.back().reason, "not in the baseline");
  EXPECT_EQ(std::ranges::find(missing.gates, GateKind::names, &Gate::kind)->reason,
            "not in the candidate");
}

TEST(RunGates, ShapesAndFormsMustBeEqual) {
  const Dump baseline = Step().run();
  Dump candidate = baseline;
  candidate.set("grad.w", {12, 8}, Step().gradient);
  candidate.set("loss", {}, Floats{0.07F});
  candidate.set("token_ids", {1, tokens}, Floats(12, 1.0F));
  candidate.set("logps", {tokens}, Step().logps);
  candidate.set("expert_ids", {2, tokens, 1}, Ids(24));
  const RunReport report = judged(baseline, candidate);
  EXPECT_EQ(failing(report), (Names{"loss shape", "logps shape", "expert_ids shape",
                                    "token_ids shape", "grad.w shape"}));
  EXPECT_EQ(report.gates[0].reason, "floating [] against floating [1]");
  EXPECT_EQ(std::ranges::find(report.gates, "token_ids", &Gate::tensor)->reason,
            "floating [1, 12] against integer [1, 12]");
}

TEST(RunGates, WhatIsNotFiniteFailsOnEitherSide) {
  const Dump good = Step().run();
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Step step;
    step.loss = bad;
    step.logps[3] = bad;
    step.entropy[4] = bad;
    step.gradient[5] = bad;
    const Names expected = {"loss", "logps finite", "entropy finite", "grad.w finite"};
    EXPECT_EQ(failing(judged(good, step.run())), expected);
    EXPECT_EQ(failing(judged(step.run(), good)), expected);
    EXPECT_EQ(failing(judged(step.run(), step.run())), expected) << "equal, and as wrong";
    EXPECT_EQ(failing(judged(step.run(), good, good)), expected);
  }
}

TEST(RunGates, NoiseWidensTheLimits) {
  const Dump baseline = Step().run();
  const auto off = [](float by, std::int32_t drops) {
    Step step;
    step.loss *= 1 + by;
    step.grad_norm *= 1 + by;
    step.update_norm *= 1 + by;
    step.dropped_slots += drops;
    step.logps[3] *= 1 + by;
    step.entropy[3] *= 1 + by;
    step.gradient[0] *= 1 + by;
    step.updated[0] *= 1 + by;
    return step.run();
  };
  const Dump candidate = off(0.007F, 7);
  EXPECT_EQ(failing(judged(baseline, candidate)).size(), 14U);
  EXPECT_EQ(failing(judged(baseline, candidate, off(0.001F, 1))),
            (Names{"grad.w one_minus_cosine", "updated.w one_minus_cosine"}))
      << "49 times as far: a cosine goes with the square";
  EXPECT_TRUE(judged(baseline, off(0.0025F, 7), off(0.001F, 1)).passed());
  EXPECT_EQ(failing(judged(baseline, off(0.009F, 9), off(0.001F, 1))).size(), 14U);
}

TEST(RunGates, NoiseHasARoutingOfItsOwn) {
  const Dump baseline = Step().run();
  Step noise;
  noise.expert_ids[2 * 2] = 7;
  noise.logps[3] += 0.5F;  // reached: no noise of the log-probs that are compared
  Step candidate;
  candidate.logps[3] += 0.01F;
  const RunReport report = judged(baseline, candidate.run(), noise.run());
  EXPECT_EQ(failing(report), Names{"log_prob"});
  EXPECT_EQ(report.gates[6].limit, 8) << "eight times one token";
}

TEST(RunGates, NoiseThatIsNoneOfTheBaselineIsRefused) {
  const Dump baseline = Step().run();
  const auto refusal = [&](const Dump& noise) {
    return test::thrown_text<Error>([&] { static_cast<void>(judged(baseline, baseline, noise)); });
  };
  EXPECT_EQ(refusal(baseline), "nothing was thrown");
  Dump lacking = baseline;
  lacking.erase("updated.w");
  EXPECT_EQ(refusal(lacking), "numerics::judge_runs: noise = updated.w: must be in every run");
  Dump reshaped = baseline;
  reshaped.set("grad.w", {12, 8}, Step().gradient);
  EXPECT_EQ(refusal(reshaped),
            "numerics::judge_runs: noise = grad.w: must be the baseline's floating [8, 12], is "
            "floating [12, 8]");
  Step other;
  other.token_ids[0] = 77;
  EXPECT_EQ(refusal(other.run()),
            "numerics::judge_runs: noise = token_ids: integers must be the baseline's");
  for (const auto spoil :
       std::vector<void (*)(Step&)>{[](Step& s) { s.loss = static_cast<float>(nan); },
                                    [](Step& s) { s.logps[3] = static_cast<float>(nan); },
                                    [](Step& s) { s.entropy[3] = static_cast<float>(nan); },
                                    [](Step& s) { s.gradient[3] = static_cast<float>(nan); }}) {
    Step step;
    spoil(step);
    EXPECT_NE(refusal(step.run()).find("must be finite"), std::string::npos);
  }
}

TEST(RunGates, RefusesRunsThatAreNone) {
  const Dump run = Step().run();
  std::vector<NamedTensor> twice(run.tensors().begin(), run.tensors().end());
  twice.push_back(twice[2]);
  EXPECT_EQ(
      test::thrown_text<Error>([&] { static_cast<void>(judge_runs(twice, run.tensors())); }),
      "numerics::judge_runs: baseline[11].name = logps: must be the name of one tensor alone");
  EXPECT_TRUE(judge_runs({}, {}).gates.empty());
}

TEST(RunGates, EmptyTensorsPassAndSaySo) {
  Dump run;
  run.set("grad.none", {0, 4}, Floats{});
  run.set("logps", {0}, Floats{});
  run.set("expert_ids", {2, 0, 2}, Ids{});
  const RunReport report = judged(run, run);
  EXPECT_TRUE(report.passed());
  EXPECT_EQ(report.gates.back().reason, "no elements");
}

}  // namespace
}  // namespace heddle::numerics

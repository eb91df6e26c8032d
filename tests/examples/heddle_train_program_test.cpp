// heddle-train as a user starts it: what it prints and writes, that neither threads nor micro-batches nor
// padding change what it computes, and how it ends when something is wrong.
//
// Mutants: gradients folded as rows end instead of in order; a micro-batch's own denominator; old
// log-probs taken anew in each update; a step's rollouts taken from the next; --freeze-router read and
// not obeyed; weight decay on a frozen router; a checkpoint left half-written; training before the
// output path is checked; a message on two lines; exit 1 for wrong input, 2 for a full disk.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/json_text.hpp"
#include "support/random.hpp"
#include "support/run_command.hpp"
#include "support/safetensors.hpp"
#include "support/scratch_folder.hpp"

namespace heddle::train {
namespace {

using examples::Json;
using examples::read_safetensors;
using examples::TensorFile;
using examples::TensorInfo;
using Words = std::vector<std::string>;

const std::string folder = HEDDLE_TEST_DATA "/qwen35_tiny";
const std::string rollouts = folder + "/rollouts.jsonl";

test::CommandResult run(Words arguments) {
  arguments.insert(arguments.begin(), HEDDLE_TRAIN_PROGRAM);
  return test::run_command(arguments);
}

Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<Json> json_lines(const std::string& text) {
  std::vector<Json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    lines.push_back(examples::parse_json(line, "output"));
  }
  return lines;
}

/// Ends with `status`, nothing on standard output and one line on standard error: the text.
void expect_refused(const Words& arguments, const std::string& text, int status = 2) {
  const test::CommandResult ended = run(arguments);
  EXPECT_EQ(ended.status, status) << ended.err;
  EXPECT_EQ(ended.out, "");
  EXPECT_EQ(ended.err, "heddle-train: " + text + "\n");
}

// Four rows of the tiny checkpoint's rollouts, in double or float.
Words small_step(const test::ScratchFolder& scratch, const std::string& name) {
  return {rollouts,
          "--checkpoint",
          folder,
          "--steps",
          "1",
          "--budget",
          "40",
          "--segment-align",
          "4",
          "--dump-step",
          (scratch / name).string()};
}

TEST(HeddleTrainProgram, PrintsAnObjectAStep) {
  const test::CommandResult ended =
      run({rollouts, "--checkpoint", folder, "--steps", "3", "--budget", "64", "--json"});
  ASSERT_EQ(ended.status, 0) << ended.err;
  EXPECT_EQ(ended.err, "");
  const std::vector<Json> lines = json_lines(ended.out);
  ASSERT_EQ(lines.size(), 3U);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    std::vector<std::string> names;
    for (const auto& [name, value] : lines[i].items()) {
      names.push_back(name);
    }
    EXPECT_EQ(names, (Words{"step", "loss", "logp_rewarded", "logp_unrewarded", "logp_gap",
                            "entropy", "grad_norm", "tokens", "tokens_per_second", "padding_share",
                            "busiest_tiles", "dropped_slots"}));
    EXPECT_EQ(lines[i]["step"], i + 1);
    EXPECT_EQ(lines[i]["tokens"], 115);
    EXPECT_EQ(lines[i]["busiest_tiles"], 1);
    EXPECT_EQ(lines[i]["dropped_slots"], 0);
    EXPECT_GT(lines[i]["tokens_per_second"].get<double>(), 0);
    EXPECT_NEAR(lines[i]["logp_gap"].get<double>(),
                lines[i]["logp_rewarded"].get<double>() - lines[i]["logp_unrewarded"].get<double>(),
                1e-12);
  }
  // 115 tokens in whole rows of 64 positions.
  const double rows = std::round(115 / (1 - lines[0]["padding_share"].get<double>()) / 64);
  EXPECT_NEAR(lines[0]["padding_share"].get<double>(), 1 - 115 / (64 * rows), 1e-12);
}

TEST(HeddleTrainProgram, MeansAreOverCompletionTokens) {
  const test::ScratchFolder scratch;
  const test::CommandResult ended =
      run(small_step(scratch, "dump.safetensors") + Words{"--dtype", "f64", "--json"});
  ASSERT_EQ(ended.status, 0) << ended.err;
  const Json line = json_lines(ended.out).at(0);
  const TensorFile expected = read_safetensors(folder + "/grpo.out.safetensors");
  const TensorFile in = read_safetensors(folder + "/grpo.in.safetensors");
  const auto logps = expected.at("logps").values<double>();
  const auto entropy = expected.at("entropy").values<double>();
  const auto mask = in.at("loss_mask").values<float>();
  const auto document = in.at("segment_ids").values<std::int32_t>();
  const std::set<std::int32_t> rewarded = {1, 4, 5, 6, 8};  // reward above 0
  double sums[2] = {};
  double counts[2] = {};
  double entropies = 0;
  for (std::size_t t = 0; t < mask.size(); ++t) {
    if (mask[t] != 0) {
      const std::size_t side = rewarded.contains(document[t]) ? 1 : 0;
      sums[side] += logps[t];
      counts[side] += 1;
      entropies += entropy[t];
    }
  }
  EXPECT_NEAR(line["logp_rewarded"].get<double>(), sums[1] / counts[1], 1e-12);
  EXPECT_NEAR(line["logp_unrewarded"].get<double>(), sums[0] / counts[0], 1e-12);
  EXPECT_NEAR(line["entropy"].get<double>(), entropies / (counts[0] + counts[1]), 1e-12);
}

TEST(HeddleTrainProgram, PrintsATableForReaders) {
  const test::CommandResult ended = run({rollouts, "--checkpoint", folder, "--steps", "2"});
  ASSERT_EQ(ended.status, 0) << ended.err;
  EXPECT_EQ(ended.err, "");  // no bar where nobody watches
  std::istringstream lines(ended.out);
  std::string titles;
  std::string row;
  std::getline(lines, titles);
  for (const char* title : {"step", "loss", "logp rewarded", "unrewarded", "gap", "entropy",
                            "grad norm", "tokens/s", "padding", "busiest tiles"}) {
    EXPECT_NE(titles.find(title), std::string::npos) << title;
  }
  int rows = 0;
  while (std::getline(lines, row)) {
    EXPECT_EQ(row.size(), titles.size()) << row;
    ++rows;
  }
  EXPECT_EQ(rows, 2);
}

TEST(HeddleTrainProgram, MicroBatchesAndThreadsChangeNoBit) {
  for (const char* dtype : {"f32", "f64", "bf16"}) {
    const test::ScratchFolder scratch;
    const auto dump = [&](const std::string& name, const Words& more) {
      const test::CommandResult ended =
          run(small_step(scratch, name) + Words{"--dtype", dtype} + more);
      EXPECT_EQ(ended.status, 0) << ended.err;
      return test::read_file(scratch / name);
    };
    const std::string one_batch = dump("a", {"--threads", "1"});
    ASSERT_GT(one_batch.size(), 100000U);
    EXPECT_TRUE(dump("b", {"--threads", "2"}) == one_batch) << dtype;
    EXPECT_TRUE(dump("c", {"--threads", "5"}) == one_batch) << dtype;
    EXPECT_TRUE(dump("d", {"--micro-batch", "1"}) == one_batch) << dtype;
    EXPECT_TRUE(dump("e", {"--micro-batch", "3", "--threads", "3"}) == one_batch) << dtype;
    EXPECT_TRUE(dump("f", {"--micro-batch", "100"}) == one_batch) << dtype;
  }
}

TEST(HeddleTrainProgram, WhereThePaddingGoesChangesNothing) {
  const test::ScratchFolder scratch;
  const auto dump = [&](const std::string& name, const Words& more) {
    const Words common = {rollouts,
                          "--checkpoint",
                          folder,
                          "--steps",
                          "1",
                          "--dtype",
                          "f64",
                          "--dump-step",
                          (scratch / name).string(),
                          "--save",
                          (scratch / (name + "-saved")).string()};
    const test::CommandResult ended = run(common + more);
    EXPECT_EQ(ended.status, 0) << ended.err;
    return read_safetensors(scratch / name);
  };
  const TensorFile alone = dump("end", {"--budget", "512"});
  for (const Words& more :
       {Words{"--budget", "512", "--pad-position", "start"},
        Words{"--budget", "512", "--pad-position", "auto"},
        Words{"--budget", "64", "--pad-position", "start", "--pad-align", "16"},
        Words{"--budget", "24", "--segment-align", "1", "--pad-position", "start"},
        Words{"--budget", "33", "--segment-align", "5"}}) {
    const test::ScratchFolder inner;
    const TensorFile other =
        dump("other" + std::to_string(std::hash<std::string>{}(more[1] + more[3])), more);
    for (const TensorInfo& tensor : alone.tensors()) {
      if (tensor.name.starts_with("grad") || tensor.name == "loss") {
        EXPECT_TRUE(test::close(other.at(tensor.name).values<double>(),
                                alone.at(tensor.name).values<double>(), 1e-12))
            << tensor.name << " " << more[1];
      }
    }
  }
  // The rows did move.
  const auto first_id = [](const TensorFile& file) {
    return file.at("segment_ids").values<std::int32_t>()[0];
  };
  EXPECT_EQ(first_id(alone), 1);
  EXPECT_EQ(first_id(dump("moved", {"--budget", "512", "--pad-position", "start"})), 0);
}

TEST(HeddleTrainProgram, TakesGroupsInOrderRoundAndRound) {
  // Groups of 4: a step of 4 to 7 rollouts is one group, alternating.
  const test::CommandResult ended =
      run({rollouts, "--checkpoint", folder, "--steps", "3", "--rollouts-per-step", "7",
           "--learning-rate", "0", "--json"});
  ASSERT_EQ(ended.status, 0) << ended.err;
  const std::vector<Json> lines = json_lines(ended.out);
  EXPECT_EQ(lines[0]["tokens"], 68);  // four prompts of 7, completions of 9 + 14 + 5 + 12
  EXPECT_EQ(lines[1]["tokens"], 47);
  for (const char* name : {"loss", "logp_gap", "grad_norm", "entropy", "tokens"}) {
    EXPECT_EQ(lines[2][name], lines[0][name]) << name;
  }
}

TEST(HeddleTrainProgram, OldLogProbsDecideTheClip) {
  const test::ScratchFolder scratch;
  const Words options = {"--checkpoint", folder, "--steps",     "1",
                         "--dtype",      "f64",  "--dump-step", (scratch / "dump").string()};
  ASSERT_EQ(run(Words{rollouts} + options).status, 0);
  const TensorFile expected = read_safetensors(folder + "/grpo.out.safetensors");
  const TensorFile in = read_safetensors(folder + "/grpo.in.safetensors");
  const auto logps = expected.at("logps").values<double>();
  const auto advantages = expected.at("advantages").values<double>();
  const auto mask = in.at("loss_mask").values<float>();

  // Old log-probs up to 0.5 to either side: ratios on both sides of both clips.
  test::Random random(21);
  std::istringstream lines(test::read_file(rollouts));
  std::string text;
  double loss = 0;
  double tokens = 0;
  std::size_t t = 0;
  std::size_t document = 0;
  for (std::string line; std::getline(lines, line); ++document) {
    Json rollout = examples::parse_json(line, "rollouts");
    t += rollout["prompt_ids"].size();
    for (std::size_t i = 0; i < rollout["completion_ids"].size(); ++i, ++t) {
      const auto old = static_cast<float>(logps[t] + random.uniform(-0.5, 0.5));
      rollout["old_per_token_logps"].push_back(old);
      if (mask[t] != 0) {
        const double ratio = std::exp(logps[t] - static_cast<double>(old));
        const double advantage = advantages[document];
        loss += std::max(-advantage * ratio, -advantage * std::clamp(ratio, 0.8, 1.2));
        tokens += 1;
      }
    }
    text += rollout.dump() + "\n";
  }
  const std::string path = scratch.write("old.jsonl", text).string();
  ASSERT_EQ(run(Words{path} + options).status, 0);
  EXPECT_NEAR(read_safetensors(scratch / "dump").at("loss").values<double>()[0], loss / tokens,
              1e-12);
}

TEST(HeddleTrainProgram, TheGapGrows) {
  const test::ScratchFolder scratch;
  std::string text;
  for (int group = 0; group < 3; ++group) {
    const std::string sum = std::to_string(2 + group) + "+" + std::to_string(3 + group);
    for (int k = 0; k < 4; ++k) {
      Json rollout;
      rollout["group"] = group;
      rollout["prompt"] = "What is " + sum + "?\n";
      rollout["completion"] = std::to_string(5 + 2 * group + (k % 2 == 0 ? 0 : 1 + k)) +
                              (k % 2 == 0 ? " exactly" : " maybe");
      rollout["reward"] = k % 2 == 0 ? 1 : 0;
      text += rollout.dump() + "\n";
    }
  }
  const test::CommandResult ended = run({scratch.write("r.jsonl", text).string(), "--steps", "15",
                                         "--learning-rate", "3e-3", "--budget", "128", "--json"});
  ASSERT_EQ(ended.status, 0) << ended.err;
  const std::vector<Json> lines = json_lines(ended.out);
  const double first = lines.front()["logp_gap"].get<double>();
  const double last = lines.back()["logp_gap"].get<double>();
  EXPECT_LT(std::abs(first), 0.2);
  EXPECT_GT(last, first + 1.0);
}

TEST(HeddleTrainProgram, TheSeedDecidesTheStart) {
  const test::ScratchFolder scratch;
  const std::string path =
      scratch.write("r.jsonl", R"({"prompt":"a","completion":"bc","advantages":1})").string();
  const auto loss_text = [&](const Words& more) {
    const test::CommandResult ended = run(Words{path, "--steps", "1", "--json"} + more);
    EXPECT_EQ(ended.status, 0) << ended.err;
    return ended.out.substr(0, ended.out.find("\"tokens_per_second\""));
  };
  EXPECT_EQ(loss_text({}), loss_text({"--seed", "0"}));
  EXPECT_NE(loss_text({}), loss_text({"--seed", "1"}));
  // No reward: nothing to average over.
  const Json line = json_lines(run({path, "--steps", "1", "--json"}).out).at(0);
  EXPECT_TRUE(line["logp_rewarded"].is_null());
  EXPECT_TRUE(line["logp_unrewarded"].is_null());
  EXPECT_TRUE(line["logp_gap"].is_null());
}

TEST(HeddleTrainProgram, ItemsWithoutPromptOrCompletionAreLegal) {
  const test::ScratchFolder scratch;
  const std::string path =
      scratch
          .write("r.jsonl", R"({"prompt":"","completion":"abc","reward":1,"group":1}
{"prompt":"ab","completion":"","reward":0,"group":1}
{"prompt":"","completion":"","reward":0,"group":1}
)")
          .string();
  const test::CommandResult ended = run({path, "--steps", "2", "--budget", "16", "--json"});
  ASSERT_EQ(ended.status, 0) << ended.err;
  const Json line = json_lines(ended.out).at(0);
  EXPECT_EQ(line["tokens"], 5);
  EXPECT_TRUE(line["logp_unrewarded"].is_null());
  // The first token of "abc" has no score: two tokens of log-prob about -log 259.
  EXPECT_NEAR(line["logp_rewarded"].get<double>(), -std::log(259.0), 0.3);
}

TEST(HeddleTrainProgram, RefusesBrokenRollouts) {
  const test::ScratchFolder scratch;
  const std::string path = (scratch / "r.jsonl").string();
  const std::string good = R"({"prompt":"a","completion":"b","reward":1,"group":1})";
  const auto refused = [&](const std::string& content, const std::string& text) {
    static_cast<void>(scratch.write("r.jsonl", content));
    expect_refused({path, "--steps", "1", "--budget", "64"}, path + text);
  };
  refused("", ": holds no rollout");
  refused("\n \n", ": holds no rollout");
  refused(good + "\n" + R"({"prompt":"a","completion":"b","group":1})",
          ":2: reward is missing: required where advantages are not given");
  refused(good + "\n\n" + R"({"prompt":"a","completion":"b","reward":1})",
          ":3: group is missing: required where advantages are not given");
  refused(good + "\n" + R"({"prompt":"a","reward":1,"group":1})",
          ":2: completion or completion_ids is missing");
  refused(R"({"prompt":"a","prompt_ids":[1],"completion":"b","reward":1,"group":1})",
          ":1: prompt and prompt_ids are both given: must be one of the two");
  refused(R"({"prompt":"a","completion_ids":[258,259],"reward":1,"group":1})",
          ":1: completion_ids[1] = 259: must be below the model's vocab_size (259)");
  refused(R"({"prompt_ids":[-1],"completion":"b","reward":1,"group":1})",
          ":1: prompt_ids[0] = -1: must be an integer in [0, 2147483647]");
  refused(R"({"prompt":"a","completion":"b","completion_mask":[1,1],"reward":1,"group":1})",
          ":1: completion_mask.size = 2: must be the completion's length (1)");
  refused(R"({"prompt":"a","completion":"b","reward":"high","group":1})",
          R"(:1: reward = "high": must be a number)");
  refused(good + "\n" + R"({"prompt":"a","completion":")" + std::string(64, 'b') +
              R"(","reward":1,"group":1})",
          ":2: the rollout has 65 tokens: must not exceed --budget (64)");
  refused(
      R"({"prompt":"a","completion":"b","routed_experts":[[[0],[1],[2]]],"reward":1,"group":1})",
      ":1: routed_experts has 3 layers of 1 experts: the model has 2 of 2");
  for (const char* broken : {R"({"prompt":"a",)", R"({"prompt":"a","completion":"b","reward":NaN})",
                             R"({"prompt":"a","completion":"b","reward":1e999,"group":1})"}) {
    static_cast<void>(scratch.write("r.jsonl", good + "\n" + broken));
    const test::CommandResult ended = run({path});
    EXPECT_EQ(ended.status, 2);
    EXPECT_EQ(ended.out, "");
    EXPECT_EQ(ended.err.find("heddle-train: " + path + ":2: "), 0U) << ended.err;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
  }
  expect_refused({(scratch / "none").string()},
                 (scratch / "none").string() + ": cannot be read: No such file or directory");
}

TEST(HeddleTrainProgram, RefusesWrongUsage) {
  const test::ScratchFolder scratch;
  const std::string out = (scratch / "out").string();
  expect_refused({}, "ROLLOUTS is required");
  expect_refused({rollouts, "--steps", "-1"}, "--steps = -1: must be >= 0");
  expect_refused({rollouts, "--rollouts-per-step", "0"}, "--rollouts-per-step = 0: must be >= 1");
  expect_refused({rollouts, "--updates-per-step", "0"}, "--updates-per-step = 0: must be >= 1");
  expect_refused({rollouts, "--micro-batch", "0"}, "--micro-batch = 0: must be >= 1");
  expect_refused({rollouts, "--budget", "0"}, "--budget = 0: must be in [1, 2147483647]");
  expect_refused({rollouts, "--segment-align", "0"},
                 "--segment-align = 0: must be in [1, 2147483647]");
  expect_refused({rollouts, "--threads", "0"}, "--threads = 0: must be in [1, 4096]");
  expect_refused({rollouts, "--learning-rate", "nan"},
                 "--learning-rate = nan: must be >= 0 and finite");
  expect_refused({rollouts, "--steps", "0", "--dump-step", out},
                 "--dump-step: has no effect with --steps=0");
  expect_refused({rollouts, "--pad-align", "64"},
                 "--pad-align = 64: has no effect with --pad-position=end");
  expect_refused({rollouts, "--pad-position", "start", "--pad-align", "24"},
                 "--pad-align = 24: must be a positive multiple of --segment-align (16)");
  expect_refused(
      {rollouts, "--pad-position", "start", "--pad-align", "2048"},
      "--pad-align = 2048: must be below --budget (2048) with --pad-position=start, no row "
      "could move");
  expect_refused({rollouts, "--pad-position", "start", "--budget", "8192", "--segment-align", "48"},
                 "--pad-align = 4096: must be a positive multiple of --segment-align (48)");
  expect_refused({rollouts, "--mesh", "fsdp=2,context=2"},
                 "--mesh = fsdp=2,context=2,expert=1: must be one device");
  expect_refused({rollouts, "--mesh", "tensor=2"},
                 "--mesh = tensor=2: axes are fsdp, context and expert");
  expect_refused({rollouts, "--mesh", "fsdp=0"},
                 "--mesh = fsdp=0: fsdp must be a whole number of devices >= 1");
  expect_refused({rollouts, "--recipe", "fast"}, "--recipe = fast: must be tuned or baseline");
  expect_refused({rollouts, "--check-against", "double"},
                 "--check-against = double: must be single");
  expect_refused({rollouts, "--logits"}, "--logits: has no effect without --score");
  expect_refused({"--score", rollouts, "--out", out}, "--score needs --out and --checkpoint");
  expect_refused({"--score", rollouts, "--out", out, "--checkpoint", folder, "--steps", "2"},
                 "--steps: has no effect with --score");
  expect_refused({rollouts, "--dtype", "f16"}, "--dtype = f16: must be f32, f64 or bf16");
  expect_refused({rollouts, "--freeze-router", "2"}, "--freeze-router = 2: must be 0 or 1");
  expect_refused({rollouts, "--pad-position", "middle"},
                 "--pad-position = middle: must be end, start or auto");
  for (const Words& wrong :
       {Words{"--no-such-option"}, Words{"surplus"}, Words{"--steps", "many"}, Words{"--save"}}) {
    const test::CommandResult ended = run(Words{rollouts} + wrong);
    EXPECT_EQ(ended.status, 2) << wrong[0];
    EXPECT_EQ(ended.out, "");
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
  }
  EXPECT_EQ(run({rollouts, "--checkpoint", folder, "--steps", "1", "--mesh", "context=1"}).status,
            0);
  EXPECT_TRUE(scratch.names().empty());
}

TEST(HeddleTrainProgram, OneDeviceIsAMeshToo) {
  const Words train = {rollouts, "--checkpoint", folder, "--steps", "1", "--budget", "40"};
  const Words mesh = {"--mesh",    "fsdp=1,context=1,expert=1", "--recipe", "baseline",
                      "--explain", "--check-against",           "single"};
  const test::CommandResult ended = run(train + mesh);
  EXPECT_EQ(ended.status, 0);
  EXPECT_EQ(ended.err,
            "heddle-train: after step 1 every parameter is that of one device, bit for bit\n");
  for (const char* part : {"180080 parameters of 4 bytes", "40 positions, padding at the end",
                           "moe::reference, 8 experts", "step"}) {
    EXPECT_NE(ended.out.find(part), std::string::npos) << part;
  }
  // With --json nothing but objects is on standard output.
  const test::CommandResult json = run(train + mesh + Words{"--json"});
  EXPECT_EQ(json_lines(json.out).size(), 1U);
  EXPECT_NE(json.err.find("180080 parameters"), std::string::npos);
}

TEST(HeddleTrainProgram, RefusesOutputPathsBeforeItTrains) {
  const test::ScratchFolder scratch;
  std::filesystem::create_directory(scratch / "there");
  const std::string there = (scratch / "there").string();
  const Words train = {rollouts, "--checkpoint", folder, "--steps", "1000000"};
  expect_refused(train + Words{"--save", there}, there + ": exists and is no regular file");
  expect_refused(train + Words{"--dump-step", there}, there + ": exists and is no regular file");
  expect_refused(train + Words{"--dump-step", "/dev/full"},
                 "/dev/full: exists and is no regular file");
  const std::string nowhere = (scratch / "no" / "where").string();
  expect_refused(train + Words{"--save", nowhere},
                 nowhere + ": its folder " + (scratch / "no").string() + " does not exist");
  expect_refused(
      {"--score", folder + "/single.in.safetensors", "--checkpoint", folder, "--out", there},
      there + ": exists and is no regular file");
}

// A file that may not grow past a limit is a full disk: the write fails.
TEST(HeddleTrainProgram, AFullDiskLeavesNothingBehind) {
  for (const Words& arguments :
       {Words{rollouts, "--checkpoint", folder, "--steps", "1", "--save", "out"},
        Words{rollouts, "--checkpoint", folder, "--steps", "1", "--dump-step", "out"},
        Words{"--score", folder + "/single.in.safetensors", "--checkpoint", folder, "--gradients",
              "--out", "out"}}) {
    const test::ScratchFolder scratch;
    std::string line = "cd " + test::shell_quoted(scratch.path().string()) +
                       " && ulimit -f 100 && exec " + test::shell_quoted(HEDDLE_TRAIN_PROGRAM);
    for (const std::string& word : arguments) {
      line += " " + test::shell_quoted(word);
    }
    const test::CommandResult ended = test::run_command({"/bin/sh", "-c", line});
    EXPECT_EQ(ended.status, 1) << ended.err;
    EXPECT_NE(ended.err.find("cannot be written"), std::string::npos) << ended.err;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
    EXPECT_TRUE(scratch.names().empty());
  }
}

TEST(HeddleTrainProgram, AClosedOutputEndsTheRun) {
  const test::CommandResult ended = test::run_command(
      {"/bin/sh", "-c",
       "exec " + test::shell_quoted(HEDDLE_TRAIN_PROGRAM) + " " + test::shell_quoted(rollouts) +
           " --checkpoint " + test::shell_quoted(folder) + " --steps 1000000 >/dev/full"});
  EXPECT_EQ(ended.status, 1);
  EXPECT_EQ(ended.err, "heddle-train: standard output cannot be written\n");
}

TEST(HeddleTrainProgram, StopsWhereTheLossIsNotFinite) {
  const test::ScratchFolder scratch;
  const std::string path =
      scratch.write("r.jsonl", R"({"prompt":"a","completion":"bcd","advantages":3e38})").string();
  const std::string saved = (scratch / "saved").string();
  const test::CommandResult ended =
      run({path, "--checkpoint", folder, "--steps", "3", "--save", saved});
  EXPECT_EQ(ended.status, 1);
  EXPECT_EQ(ended.err.find("heddle-train: step 1: the loss is "), 0U) << ended.err;
  EXPECT_EQ(scratch.names(), Words{"r.jsonl"});
}

TEST(HeddleTrainProgram, RefusesTokensThatItCannotScore) {
  const test::ScratchFolder scratch;
  const std::string path = (scratch / "t.safetensors").string();
  const Words score = {"--score",      path,  "--out", (scratch / "out").string(),
                       "--checkpoint", folder};
  const auto refused = [&](const std::vector<examples::Tensor>& tensors, const std::string& text) {
    examples::write_safetensors(path, tensors, {});
    expect_refused(score, path + ": " + text);
    EXPECT_EQ(scratch.names(), Words{"t.safetensors"});
  };
  using examples::Tensor;
  const std::vector<std::int32_t> ids = {1, 2, 3, 4};
  refused({}, "tensor 'token_ids' is missing");
  refused({Tensor::of<std::int64_t>("token_ids", {2}, {1, 2})},
          "tensor 'token_ids' is I64: must be I32");
  refused({Tensor::of("token_ids", {1, 2, 2}, ids)},
          "tensor 'token_ids' is [1, 2, 2]: must be [T] or [B, T]");
  refused({Tensor::of("token_ids", {4}, ids), Tensor::of("segment_ids", {2, 2}, ids)},
          "tensor 'segment_ids' is [2, 2]: must be [4], like token_ids");
  refused({Tensor::of<std::int32_t>("token_ids", {3}, {1, 259, 2})},
          "token_ids[1] = 259: must be in the model's vocabulary [0, 259)");
  refused({Tensor::of("token_ids", {4}, ids),
           Tensor::of<std::int32_t>("segment_ids", {4}, {1, 1, -1, 1})},
          "segment_ids[2] = -1: must be >= 0");
}

TEST(HeddleTrainProgram, ScoresWithoutSegmentsOrTokens) {
  const test::ScratchFolder scratch;
  const std::string path = (scratch / "t.safetensors").string();
  const std::string out = (scratch / "out.safetensors").string();
  const Words score = {"--score", path,      "--out", out,          "--checkpoint",
                       folder,    "--dtype", "f64",   "--gradients"};
  const TensorFile in = read_safetensors(folder + "/single.in.safetensors");
  examples::write_safetensors(
      path, {examples::Tensor::of("token_ids", {48}, in.at("token_ids").converted<std::int32_t>())},
      {});
  ASSERT_EQ(run(score).status, 0);
  const TensorFile expected = read_safetensors(folder + "/single.out.safetensors");
  EXPECT_TRUE(test::close(read_safetensors(out).at("logps").values<double>(),
                          expected.at("logps").values<double>(), 1e-12));

  for (const examples::Shape& shape :
       {examples::Shape{0}, examples::Shape{2, 0}, examples::Shape{0, 5}}) {
    examples::write_safetensors(path, {examples::Tensor::of<std::int32_t>("token_ids", shape, {})},
                                {});
    ASSERT_EQ(run(score).status, 0);
    const TensorFile empty = read_safetensors(out);
    EXPECT_EQ(empty.at("logps").shape, shape);
    EXPECT_EQ(empty.at("loss").values<double>()[0], 0.0);
    const auto gradient = empty.at("grad.lm_head.weight").values<double>();
    EXPECT_EQ(std::count(gradient.begin(), gradient.end(), 0.0), 259 * 64);
  }
}

}  // namespace
}  // namespace heddle::train

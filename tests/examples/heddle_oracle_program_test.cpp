#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/json_text.hpp"
#include "support/npy.hpp"
#include "support/run_command.hpp"
#include "support/safetensors.hpp"
#include "support/scratch_folder.hpp"

// The program as a user starts it. Mutants that must fail here: an output left behind by a call that was
// refused, or written beside its name; a status of 0 for tensors that differ; results on standard error;
// --json mixed with other lines; the settings of --set lost.

namespace heddle::oracle {
namespace {

namespace fs = std::filesystem;
using examples::Dtype;
using examples::Json;
using examples::Tensor;
using test::CommandResult;
using test::ScratchFolder;

CommandResult oracle(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), HEDDLE_ORACLE_PROGRAM);
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

/// One line, ending in a line end.
void expect_one_line(const std::string& text) {
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_EQ(text.back(), '\n');
}

/// A row of eight tokens in one document, tiled by two: its counts are 3 and 7.
std::string write_input(const ScratchFolder& scratch) {
  const fs::path path = scratch / "in.safetensors";
  examples::write_safetensors(
      path, {Tensor::of<std::int32_t>("segment_ids", {8}, {1, 1, 1, 1, 1, 1, 1, 1})},
      {{"op", "tiles.count"},
       {"context", "2"},
       {"block_q", "2"},
       {"block_kv", "2"},
       {"layout", "contiguous"}});
  return path.string();
}

TEST(OracleProgram, ListNamesEveryOpAndWhatItTakes) {
  const CommandResult text = oracle({"list"});
  EXPECT_EQ(text.status, 0);
  EXPECT_EQ(text.err, "");
  EXPECT_NE(text.out.find("\n  conv_state?                   as qkv"), std::string::npos);
  EXPECT_NE(text.out.find("[D, V], or [V, D] with weight_layout=vd"), std::string::npos);
  EXPECT_NE(text.out.find("\n  chunk? = 64                   an integer >= 1\n"),
            std::string::npos);
  EXPECT_NE(text.out.find("[D, 2*Fs]  with shared_wi\n"), std::string::npos);
  const std::vector<Json> ops = json_lines(oracle({"list", "--json"}).out);
  ASSERT_EQ(ops.size(), 12U);
  for (const Json& op : ops) {
    EXPECT_NE(text.out.find(op["op"].get<std::string>() + "\n"), std::string::npos);
    EXPECT_FALSE(op["tensors"].empty());
    EXPECT_FALSE(op["outputs"].empty());
  }
  EXPECT_EQ(ops[0].dump().substr(0, 60),
            R"({"op":"gdn.inverse","tensors":[{"name":"t","dtype":"F64 or F)");
}

TEST(OracleProgram, RunWritesAFileAndSaysWhatIsInIt) {
  const ScratchFolder scratch;
  const std::string in = write_input(scratch);
  const std::string out = (scratch / "out.safetensors").string();
  const CommandResult run = oracle({"run", in, out});
  EXPECT_EQ(run.status, 0) << run.err;
  EXPECT_EQ(run.out, "tiles  I64  [2]\n");
  EXPECT_EQ(run.err, "");
  const auto file = examples::read_safetensors(out);
  EXPECT_EQ(file.at("tiles").converted<int>(), (std::vector<int>{3, 7}));
  EXPECT_EQ(file.metadata().at("op"), "tiles.count");
  EXPECT_EQ(file.metadata().at("source"), std::string("heddle-oracle ") + HEDDLE_VERSION);

  const CommandResult json =
      oracle({"--json", "run", "--set", "context=1", in, out, "--set", "rule=pad_aware"});
  EXPECT_EQ(json.status, 0) << json.err;
  EXPECT_EQ(json.out, "{\"tensor\":\"tiles\",\"dtype\":\"I64\",\"shape\":[1]}\n");
  const auto replaced = examples::read_safetensors(out);
  EXPECT_EQ(replaced.at("tiles").converted<int>(), std::vector<int>{10});
  EXPECT_EQ(replaced.metadata().at("context"), "1");
}

TEST(OracleProgram, FoldersOfArraysAreTheSame) {
  const ScratchFolder scratch;
  fs::create_directory(scratch / "in");
  examples::write_npy_folder(
      scratch / "arrays", {Tensor::of<std::int32_t>("segment_ids", {8}, {1, 1, 1, 1, 1, 1, 1, 1})});
  fs::rename(scratch / "arrays/segment_ids.npy", scratch / "in/segment_ids.npy");
  scratch.write(
      "in/op.json",
      R"({"op":"tiles.count","context":2,"block_q":2,"block_kv":2,"layout":"contiguous"})");
  const std::string in = (scratch / "in").string();
  const std::string out = (scratch / "out").string();
  EXPECT_EQ(oracle({"run", in, out}).status, 0);
  EXPECT_EQ(examples::read_npy_folder(out).at("tiles").converted<int>(), (std::vector<int>{3, 7}));
  EXPECT_FALSE(fs::exists(scratch / "out/op.json"));

  const std::string file = (scratch / "out.safetensors").string();
  EXPECT_EQ(oracle({"run", write_input(scratch), file}).status, 0);
  EXPECT_EQ(oracle({"compare", file, out, "--tolerance", "0"}).status, 0);
  EXPECT_EQ(oracle({"compare", out, file, "--tolerance", "0"}).status, 0);

  const CommandResult again = oracle({"run", in, out});
  EXPECT_EQ(again.status, 2);
  EXPECT_EQ(again.err, "heddle-oracle: " + out + ": exists and is no regular file\n");
}

TEST(OracleProgram, Bf16GoesThroughBothForms) {
  const ScratchFolder scratch;
  const std::vector<bfloat16> logits = {bfloat16(0.5F), bfloat16(2.0F), bfloat16(-1.0F)};
  examples::write_safetensors(scratch / "in.safetensors",
                              {Tensor::of<bfloat16>("router_logits", {1, 3}, logits)},
                              {{"op", "moe.route"}, {"top_k", "2"}});
  fs::create_directory(scratch / "in");
  std::vector<std::int16_t> bits(3);
  std::memcpy(bits.data(), logits.data(), 6);
  examples::write_npy_folder(scratch / "arrays",
                             {Tensor::of<std::int16_t>("router_logits", {1, 3}, bits)});
  std::string npy = test::read_file(scratch / "arrays/router_logits.npy");
  npy.replace(npy.find("<i2"), 3, "<u2");
  scratch.write("in/router_logits.npy", npy);
  scratch.write("in/op.json", R"({"op":"moe.route","top_k":2,"bf16":["router_logits"]})");
  const std::string a = (scratch / "a.safetensors").string();
  const std::string b = (scratch / "b").string();
  EXPECT_EQ(oracle({"run", (scratch / "in.safetensors").string(), a}).status, 0);
  EXPECT_EQ(oracle({"run", (scratch / "in").string(), b}).status, 0);
  EXPECT_EQ(oracle({"compare", a, b, "--tolerance", "0"}).status, 0);
  EXPECT_EQ(examples::read_safetensors(a).at("expert_ids").converted<int>(),
            (std::vector<int>{1, 0}));
}

TEST(OracleProgram, WhatIsRefusedLeavesNothingBehind) {
  const ScratchFolder scratch;
  const std::string in = write_input(scratch);
  const std::string out = (scratch / "out.safetensors").string();
  const CommandResult wrong = oracle({"run", in, out, "--set", "context=3"});
  EXPECT_EQ(wrong.status, 2);
  EXPECT_EQ(wrong.out, "");
  EXPECT_EQ(wrong.err,
            "heddle-oracle: ContextPartition: positions = 8: must be a multiple of context (3)\n");
  const CommandResult unknown = oracle({"run", in, out, "--set", "contxt=3"});
  EXPECT_EQ(unknown.status, 2);
  expect_one_line(unknown.err);
  EXPECT_EQ(oracle({"run", (scratch / "none").string(), out}).err,
            "heddle-oracle: " + (scratch / "none").string() +
                ": cannot be read: No such file or directory\n");
  scratch.write("broken.safetensors", "broken");
  EXPECT_EQ(oracle({"run", (scratch / "broken.safetensors").string(), out}).status, 2);
  EXPECT_EQ(scratch.names(), (std::vector<std::string>{"broken.safetensors", "in.safetensors"}));
}

TEST(OracleProgram, OutputsThatCannotBeAreRefusedBeforeWork) {
  const ScratchFolder scratch;
  const std::string in = write_input(scratch);
  const std::string folder = (scratch / "x.safetensors").string();
  fs::create_directory(folder);
  EXPECT_EQ(oracle({"run", (scratch / "none").string(), folder}).err,
            "heddle-oracle: " + folder + ": exists and is no regular file\n")
      << "before anything is read";
  EXPECT_EQ(oracle({"run", in, folder}).err,
            "heddle-oracle: " + folder + ": exists and is no regular file\n");
  const CommandResult device = oracle({"run", in, "/dev/null"});
  EXPECT_EQ(device.status, 2);
  EXPECT_EQ(device.err, "heddle-oracle: /dev/null: exists and is no regular file\n");
  const std::string file = scratch.write("file", "kept").string();
  EXPECT_EQ(oracle({"run", in, file}).status, 2) << "a folder would go there";
  EXPECT_EQ(test::read_file(file), "kept");
  const CommandResult nowhere = oracle({"run", in, (scratch / "no/out.safetensors").string()});
  EXPECT_EQ(nowhere.status, 2);
  expect_one_line(nowhere.err);
}

TEST(OracleProgram, CompareSaysHowFarTensorsAreApart) {
  const ScratchFolder scratch;
  const auto write = [&](const char* name, const std::vector<Tensor>& tensors) {
    examples::write_safetensors(scratch / name, tensors, {});
    return (scratch / name).string();
  };
  const std::string a = write(
      "a", {Tensor::of<float>("x", {2}, {1.0F, 2.0F}), Tensor::of<float>("zero", {1}, {0.0F})});
  const std::string b = write(
      "b", {Tensor::of<double>("x", {2}, {1.0, 2.00001}), Tensor::of<double>("zero", {1}, {0.0})});
  const CommandResult close = oracle({"compare", a, b});
  EXPECT_EQ(close.status, 0) << close.out;
  EXPECT_EQ(
      close.out,
      "x     max_abs 1e-05  max_rel 5e-06  rel_l2 4.47e-06  cosine 1  max_ulps 42  ok\n"
      "zero  max_abs 0      max_rel 0      rel_l2 0         cosine -  max_ulps 0   vacuous\n");
  const CommandResult apart = oracle({"compare", a, b, "--tolerance", "1e-6"});
  EXPECT_EQ(apart.status, 1);
  EXPECT_NE(apart.out.find("FAIL: max_rel above 1e-06\n"), std::string::npos);
  EXPECT_EQ(apart.err, "");

  const std::vector<Json> lines = json_lines(oracle({"compare", a, b, "--json"}).out);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0]["tensor"], "x");
  EXPECT_EQ(lines[0]["max_ulps"], 42);
  EXPECT_EQ(lines[0]["pass"], true);
  EXPECT_EQ(lines[1]["vacuous"], true);
  EXPECT_EQ(lines[1]["cosine"], nullptr);

  EXPECT_EQ(oracle({"compare", a, write("c", {Tensor::of<float>("x", {2}, {1.0F, 2.0F})})}).status,
            1)
      << "a name is missing";
  const CommandResult none = oracle({"compare", write("d", {}), write("e", {})});
  EXPECT_EQ(none.status, 2);
  EXPECT_EQ(none.err,
            "heddle-oracle: " + (scratch / "d").string() + ": holds no tensor to compare\n");
}

TEST(OracleProgram, WrongUsageIsOneLineAndTwo) {
  const ScratchFolder scratch;
  const std::string in = write_input(scratch);
  const std::string out = (scratch / "out.safetensors").string();
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {},
           {"explain"},
           {"run"},
           {"run", in},
           {"run", in, out, "surplus"},
           {"run", in, out, "--set"},
           {"run", in, out, "--set", "context"},
           {"run", in, out, "--set", "=1"},
           {"run", in, out, "--set", "context=1", "--set", "context=2"},
           {"compare", in},
           {"compare", in, in, "--tolerance", "-1"},
           {"compare", in, in, "--tolerance", "nan"},
           {"compare", in, in, "--tolerance", "small"},
           {"list", "--no-such-option"}}) {
    const CommandResult wrong = oracle(arguments);
    EXPECT_EQ(wrong.status, 2) << wrong.err;
    EXPECT_EQ(wrong.out, "");
    EXPECT_EQ(wrong.err.substr(0, 15), "heddle-oracle: ");
    expect_one_line(wrong.err);
  }
  EXPECT_FALSE(fs::exists(out));
}

TEST(OracleProgram, HelpAndVersion) {
  EXPECT_EQ(oracle({"--version"}).out, std::string("heddle-oracle ") + HEDDLE_VERSION + "\n");
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"--help"}, {"list", "--help"}, {"run", "--help"}, {"compare", "--help"}}) {
    const CommandResult help = oracle(arguments);
    EXPECT_EQ(help.status, 0);
    EXPECT_EQ(help.err, "");
    EXPECT_NE(help.out.find("Usage: heddle-oracle"), std::string::npos);
  }
}

}  // namespace
}  // namespace heddle::oracle

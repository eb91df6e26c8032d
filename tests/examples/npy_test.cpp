#include "support/npy.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "support/scratch_folder.hpp"
#include "support/thrown_text.hpp"
#include "support/usage_error.hpp"

// Mutants that must fail here: big endian or Fortran order accepted; the length of a version 2 header
// read in two bytes; a tuple of one without its comma; bf16 patterns read as integers; data that is
// longer or shorter than the shape accepted; an output folder visible before it is whole.

namespace heddle::examples {
namespace {

using test::ScratchFolder;
using test::thrown_text;

std::string npy(const std::string& dictionary, const std::string& data, char major = 1) {
  std::string file = "\x93NUMPY";
  file += major;
  file += '\0';
  const std::size_t length = dictionary.size();
  file += static_cast<char>(length & 0xFFU);
  file += static_cast<char>(length >> 8U);
  if (major >= 2) {
    file += std::string(2, '\0');
  }
  return file + dictionary + data;
}

std::string dictionary(const std::string& descr, const std::string& shape,
                       const std::string& order = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

std::string header_refusal(const std::string& file) {
  return thrown_text<UsageError>(
      [&] { static_cast<void>(parse_npy_header(std::as_bytes(std::span(file)), "f")); });
}

/// What a folder of one file x.npy, and perhaps op.json, is refused with, its path taken off.
std::string folder_refusal(const std::string& file, const std::string& attributes = {}) {
  const ScratchFolder scratch;
  scratch.write("x.npy", file);
  if (!attributes.empty()) {
    scratch.write("op.json", attributes);
  }
  std::string text =
      thrown_text<UsageError>([&] { static_cast<void>(read_npy_folder(scratch.path())); });
  const std::string folder = scratch.path().string() + "/";
  if (text.starts_with(folder)) {
    text.erase(0, folder.size());
  }
  return text;
}

TEST(Npy, WhatIsWrittenReadsBack) {
  const ScratchFolder scratch;
  const std::vector<Tensor> written = {
      Tensor::of<double>("a.b", {2, 1}, {1.5, -2.5}),
      Tensor::of<float>("f32", {3}, {1.0F, 2.0F, 3.0F}),
      Tensor::of<std::int64_t>("i64", {1}, {-7}),
      Tensor::of<std::int32_t>("i32", {1, 2, 1}, {-5, 7}),
      Tensor::of<std::int16_t>("i16", {2}, {-1, 32767}),
      Tensor::of<std::uint8_t>("u8", {}, {255}),
      Tensor("empty", Dtype::f32, {0, 4}),
  };
  write_npy_folder(scratch / "out", written);
  EXPECT_EQ(scratch.names(), std::vector<std::string>{"out"});
  const TensorFile read = read_npy_folder(scratch / "out");
  EXPECT_EQ(read.tensors().size(), written.size());
  EXPECT_TRUE(read.metadata().empty());
  for (const Tensor& tensor : written) {
    const TensorView view = read.at(tensor.name);
    EXPECT_EQ(view.dtype, tensor.dtype);
    EXPECT_EQ(view.shape, tensor.shape);
    const auto raw = view.raw();
    EXPECT_TRUE(std::equal(raw.begin(), raw.end(), tensor.storage.begin(), tensor.storage.end()));
  }
}

TEST(Npy, WritesWhatNumpyWould) {
  const ScratchFolder scratch;
  write_npy_folder(scratch / "out", {Tensor::of<float>("x", {2}, {1.0F, 2.0F})});
  const std::string file = test::read_file(scratch / "out/x.npy");
  EXPECT_EQ(file.size(), 128U + 8U) << "header of two lines of 64";
  EXPECT_EQ(file.substr(0, 10), std::string("\x93NUMPY\x01\0v\0", 10));
  EXPECT_EQ(file.substr(10, 59), "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }  ");
  EXPECT_EQ(file[127], '\n');
}

TEST(Npy, ReadsBothVersionsAndBooleans) {
  const ScratchFolder scratch;
  scratch.write("one.npy", npy(dictionary("|b1", "(2,)"), std::string("\1\0", 2)));
  scratch.write("two.npy", npy(dictionary("<i2", "(1, 1)"), std::string("\5\0", 2), 2));
  scratch.write("scalar.npy", npy(dictionary("|u1", "()"), "\7"));
  scratch.write("notes.txt", "not a tensor");
  const TensorFile file = read_npy_folder(scratch.path());
  EXPECT_EQ(file.tensors().size(), 3U);
  EXPECT_EQ(file.at("one").dtype, Dtype::u8);
  EXPECT_EQ(file.at("one").converted<int>(), (std::vector<int>{1, 0}));
  EXPECT_EQ(file.at("two").converted<int>(), std::vector<int>{5});
  EXPECT_EQ(file.at("scalar").converted<int>(), std::vector<int>{7});
}

TEST(Npy, OpJsonGivesAttributesAndBf16Names) {
  const ScratchFolder scratch;
  scratch.write("q.npy", npy(dictionary("<u2", "(2,)"), std::string("\x80\x3f\x40\xc0", 4)));
  scratch.write("op.json",
                R"({"op":"gdn.forward","chunk":16,"eps":1e-6,"on":true,"off":false,"bf16":["q"]})");
  const TensorFile file = read_npy_folder(scratch.path());
  EXPECT_EQ(file.at("q").dtype, Dtype::bf16);
  EXPECT_EQ(file.at("q").converted<float>(), (std::vector<float>{1.0F, -3.0F}));
  EXPECT_EQ(
      file.metadata(),
      (Metadata{
          {"chunk", "16"}, {"eps", "1e-06"}, {"off", "0"}, {"on", "1"}, {"op", "gdn.forward"}}));
}

TEST(Npy, RefusesBrokenHeaders) {
  EXPECT_EQ(header_refusal("PK\3\4 a zip archive"),
            "f: must be a NumPy file, which begins with \\x93NUMPY");
  EXPECT_EQ(header_refusal("\x93NUM"), "f: must be a NumPy file, which begins with \\x93NUMPY");
  EXPECT_EQ(header_refusal(npy("{}", "", 3)), "f: version 3.0: must be 1.0 or 2.0");
  EXPECT_EQ(header_refusal(npy("{}", "").substr(0, 11)), "f: its header ends after the file");
  EXPECT_EQ(header_refusal(npy("{}", "", 2).substr(0, 11)), "f: its header ends after the file");
  EXPECT_EQ(header_refusal(npy("{}", "")), "f: its header is no NumPy array header: \"{}\"");
  for (const std::string& broken :
       {std::string("{'descr': '<f4', 'fortran_order': False}"),
        std::string("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}"),
        std::string("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}"),
        std::string("{'descr': '<f4', 'fortran_order': False, 'shape': (1"),
        std::string("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'more': 1}"),
        std::string("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}"),
        std::string("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x"),
        std::string("{'descr': '<f4, 'fortran_order': False, 'shape': (1,)}"),
        std::string("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}"),
        std::string("{'descr': '<f4' 'fortran_order': False, 'shape': (1,)}")}) {
    EXPECT_NE(header_refusal(npy(broken, "")).find("f: its header is no NumPy array header"),
              std::string::npos)
        << broken;
  }
  EXPECT_EQ(header_refusal(npy(dictionary("<f4", "(2, 2)", "True"), "")),
            "f: is in Fortran order: must be in C order (numpy.ascontiguousarray)");
}

TEST(Npy, RefusesDtypesAndData) {
  EXPECT_EQ(folder_refusal(npy(dictionary(">f4", "(1,)"), "1234")),
            "x.npy: dtype '>f4': must be one of <f8 <f4 <i8 <i4 <i2 |u1 |b1 (little endian)");
  EXPECT_EQ(folder_refusal(npy(dictionary("<f2", "(1,)"), "12")),
            "x.npy: dtype '<f2': must be one of <f8 <f4 <i8 <i4 <i2 |u1 |b1");
  EXPECT_EQ(folder_refusal(npy(dictionary("<u2", "(1,)"), "12")),
            "x.npy: dtype '<u2': must be one of <f8 <f4 <i8 <i4 <i2 |u1 |b1 (bf16 bit patterns are "
            "named under \"bf16\" in op.json)");
  EXPECT_EQ(
      folder_refusal(npy(dictionary("<f4", "(1,)"), "1234"), R"({"bf16":["x"]})"),
      "x.npy: dtype '<f4': must be '<u2' (bit patterns), for op.json names it under \"bf16\"");
  EXPECT_EQ(folder_refusal(npy(dictionary("<f4", "(2,)"), "1234")),
            "x.npy: holds 4 bytes of data: must hold the 8 of <f4 [2]");
  EXPECT_EQ(folder_refusal(npy(dictionary("<f4", "(1,)"), "12345")),
            "x.npy: holds 5 bytes of data: must hold the 4 of <f4 [1]");
  EXPECT_EQ(folder_refusal(npy(dictionary("<f4", "(4294967296, 4294967296)"), "")),
            "x.npy: shape [4294967296, 4294967296]: must have extents >= 0 and a number of bytes "
            "that fits I64");
  EXPECT_EQ(folder_refusal(npy(dictionary("<f4", "(-1,)"), "")),
            "x.npy: shape [-1]: must have extents >= 0 and a number of bytes that fits I64");
}

TEST(Npy, RefusesABrokenOpJson) {
  const std::string tensor = npy(dictionary("<f4", "(1,)"), "1234");
  EXPECT_EQ(folder_refusal(tensor, "[]"), "op.json: must be an object");
  EXPECT_EQ(folder_refusal(tensor, R"({"op":"a","op":"b"})"),
            "op.json: member \"op\" appears twice");
  EXPECT_EQ(folder_refusal(tensor, R"({"op":["a"]})"),
            "op.json: op = [\"a\"]: must be a string, a number or a boolean");
  EXPECT_EQ(folder_refusal(tensor, R"({"bf16":"x"})"),
            "op.json: bf16 = \"x\": must be an array of tensor names");
  EXPECT_EQ(folder_refusal(tensor, R"({"bf16":["y"]})"),
            "op.json: bf16 names 'y', and there is no such .npy file");
}

TEST(Npy, RefusesToWriteWhatNumpyCannotHold) {
  const ScratchFolder scratch;
  EXPECT_EQ(thrown_text<Error>(
                [&] { write_npy_folder(scratch / "out", {Tensor("x", Dtype::bf16, {1})}); }),
            "write_npy_folder: x = BF16: NumPy has no such dtype");
  EXPECT_EQ(thrown_text<Error>(
                [&] { write_npy_folder(scratch / "out", {Tensor("a/b", Dtype::f32, {1})}); }),
            "write_npy_folder: name = a/b: must be a file name");
  EXPECT_TRUE(scratch.names().empty());
}

}  // namespace
}  // namespace heddle::examples

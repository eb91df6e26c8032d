#include "support/safetensors.hpp"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "support/scratch_folder.hpp"
#include "support/thrown_text.hpp"
#include "support/usage_error.hpp"

// Mutants that must fail here: a hole or an overlap accepted; bytes after the last tensor accepted;
// the product of extents wrapped; the header length trusted; a name twice; a copy at a misaligned
// place left out; the header not padded; the temporary file left behind; numbers read as signed.

namespace heddle::examples {
namespace {

using test::ScratchFolder;
using test::thrown_text;

std::string with_length(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + header + data;
}

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span(file)), "f");
}

std::string refusal(const std::string& file) {
  return thrown_text<UsageError>([&] { static_cast<void>(parse(file)); });
}

std::string refusal(const std::string& header, const std::string& data) {
  return refusal(with_length(header, data));
}

/// A header of one tensor 'x'.
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"x":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

TEST(Safetensors, ReadsEveryDtype) {
  const ScratchFolder scratch;
  const std::vector<Tensor> written = {
      Tensor::of<double>("f64", {2}, {1.5, -2.5}),
      Tensor::of<float>("f32", {1, 3}, {1.0F, -0.0F, 3e38F}),
      Tensor::of<bfloat16>("bf16", {2}, {bfloat16(1.0F), bfloat16(-3.0F)}),
      Tensor::of<std::int64_t>("i64", {1}, {-(std::int64_t{1} << 62)}),
      Tensor::of<std::int32_t>("i32", {2, 1}, {-5, 7}),
      Tensor::of<std::int16_t>("i16", {3}, {-1, 0, 32767}),
      Tensor::of<std::uint8_t>("u8", {}, {255}),
  };
  write_safetensors(scratch / "a.safetensors", written, {{"op", "none"}, {"note", "é \"q\""}});
  const TensorFile read = read_safetensors(scratch / "a.safetensors");
  EXPECT_EQ(read.metadata(), (Metadata{{"note", "é \"q\""}, {"op", "none"}}));
  ASSERT_EQ(read.tensors().size(), written.size());
  for (std::size_t i = 0; i < written.size(); ++i) {
    const TensorView view = read.at(written[i].name);
    EXPECT_EQ(read.tensors()[i].name, written[i].name) << "the order is that of the file";
    EXPECT_EQ(view.dtype, written[i].dtype);
    EXPECT_EQ(view.shape, written[i].shape);
    ASSERT_EQ(view.bytes(), static_cast<std::int64_t>(written[i].storage.size()));
    EXPECT_EQ(std::memcmp(view.data, written[i].storage.data(), written[i].storage.size()), 0);
  }
  EXPECT_EQ(read.at("u8").shape, Shape{});
  EXPECT_EQ(read.at("i32").converted<std::int64_t>(), (std::vector<std::int64_t>{-5, 7}));
  EXPECT_EQ(scratch.names(), std::vector<std::string>{"a.safetensors"});
}

TEST(Safetensors, ReadsElementsOffTheirAlignment) {
  // A header of 73 bytes and a U8 in front: neither tensor lies on its boundary.
  const ScratchFolder scratch;
  std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("b":{"dtype":"F64","shape":[2],"data_offsets":[1,17]}})";
  header.resize((header.size() + 7) / 8 * 8 + 3, ' ');
  const double values[] = {0.25, -8.0};
  std::string data(17, '\7');
  std::memcpy(data.data() + 1, values, sizeof values);
  const TensorFile file = read_safetensors(scratch.write("x", with_length(header, data)));
  const TensorView b = file.at("b");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data) % 8, 0U);
  EXPECT_EQ(b.converted<double>(), (std::vector<double>{0.25, -8.0}));
  EXPECT_EQ(file.at("b").data, b.data) << "aligned once";
}

TEST(Safetensors, TensorsWithoutElementsReadAndWrite) {
  const ScratchFolder scratch;
  const std::vector<Tensor> written = {Tensor("a", Dtype::f32, {0, 5}),
                                       Tensor::of<std::uint8_t>("b", {1}, {9}),
                                       Tensor("c", Dtype::f64, {3, 0})};
  write_safetensors(scratch / "a.safetensors", written, {});
  const TensorFile read = read_safetensors(scratch / "a.safetensors");
  EXPECT_EQ(read.at("a").shape, (Shape{0, 5}));
  EXPECT_EQ(read.at("a").elements(), 0);
  EXPECT_EQ(read.at("c").shape, (Shape{3, 0}));
  EXPECT_EQ(read.at("b").values<std::uint8_t>()[0], 9);

  write_safetensors(scratch / "none.safetensors", {}, {});
  EXPECT_TRUE(read_safetensors(scratch / "none.safetensors").tensors().empty());
  // However large the other extents are.
  EXPECT_EQ(parse(with_length(one("F64", "[0,9223372036854775807,9]", "[0,0]"), ""))
                .tensors[0]
                .elements(),
            0);
}

TEST(Safetensors, WritesAHeaderOfWholeWords) {
  const ScratchFolder scratch;
  write_safetensors(scratch / "a.safetensors", {Tensor::of<float>("w", {1}, {2.0F})}, {{"k", "v"}});
  const std::string file = test::read_file(scratch / "a.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  EXPECT_EQ(length % 8, 0U);
  EXPECT_EQ(file.size(), 8 + length + 4);
  EXPECT_EQ(file.substr(8, 70),
            R"({"__metadata__":{"k":"v"},"w":{"dtype":"F32","shape":[1],"data_offsets)");
}

TEST(Safetensors, FilesBeyondFourGigabytesOpenAtOnce) {
  const ScratchFolder scratch;
  const std::int64_t size = std::int64_t{5} << 30;
  const std::string end = std::to_string(size);
  const std::string header = R"({"x":{"dtype":"U8","shape":[)" + end + R"(],"data_offsets":[0,)" +
                             end + R"(]},"y":{"dtype":"U8","shape":[1],"data_offsets":[)" + end +
                             "," + std::to_string(size + 1) + "]}}";
  const auto path = scratch.write("big", with_length(header, ""));
  const auto data_offset = static_cast<std::int64_t>(8 + header.size());
  const int file = ::open(path.c_str(), O_WRONLY);
  ASSERT_EQ(::ftruncate(file, data_offset + size + 1), 0);  // sparse: takes no space
  ASSERT_EQ(::pwrite(file, "\5\6", 2, data_offset + size - 1), 2);
  ::close(file);
  const TensorFile read = read_safetensors(path);
  EXPECT_EQ(read.at("x").values<std::uint8_t>().back(), 5);
  EXPECT_EQ(read.at("y").values<std::uint8_t>()[0], 6);
}

TEST(Safetensors, RefusesABrokenFrame) {
  EXPECT_EQ(refusal(""),
            "f: is 0 bytes long: must be a safetensors file, which begins with 8 bytes of header "
            "length");
  EXPECT_EQ(refusal("1234567"),
            "f: is 7 bytes long: must be a safetensors file, which begins with 8 bytes of header "
            "length");
  std::string longer = with_length("{}", "");
  longer[0] = 3;
  EXPECT_EQ(refusal(longer), "f: header length = 3: must not exceed the 2 bytes that follow it");
  EXPECT_EQ(refusal(std::string(8, '\xff')),
            "f: header length = 18446744073709551615: must be at most 100000000");
  EXPECT_EQ(refusal("", ""), "f: header must begin with '{'");
  EXPECT_EQ(refusal(" {}", ""), "f: header must begin with '{'");
  EXPECT_EQ(refusal("[]", ""), "f: header must begin with '{'");
}

TEST(Safetensors, RefusesAHeaderThatIsNoJson) {
  EXPECT_EQ(refusal(R"({"x":)", ""),
            "f: header: is not JSON: column 6: syntax error while parsing "
            "value - unexpected end of input; expected '[', '{', or a literal");
  EXPECT_NE(refusal("{\"x\xff\":1}", "").find("f: header: is not JSON: "), std::string::npos);
  EXPECT_NE(refusal("{\"x\xff\":1}", "").find("ill-formed UTF-8"), std::string::npos);
  EXPECT_NE(refusal("{} {}", "").find("f: header: is not JSON: "), std::string::npos);
  EXPECT_EQ(refusal(std::string("{}\0", 3), ""), "f: header: is not JSON: a zero byte at offset 2");
  const std::string twice =
      R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],)"
      R"("data_offsets":[0,1]}})";
  EXPECT_EQ(refusal(twice, "1"), "f: header: member \"x\" appears twice");
  EXPECT_EQ(refusal(R"({"x":{"dtype":"U8","dtype":"U8"}})", "1"),
            "f: header: member \"dtype\" appears twice");
  // Nesting as deep as the header is long must not reach the stack's end.
  EXPECT_NE(refusal("{\"x\":" + std::string(1'000'000, '['), "").find("is not JSON"),
            std::string::npos);
}

TEST(Safetensors, RefusesAMalformedEntry) {
  EXPECT_EQ(refusal(R"({"x":3})", ""), "f: tensor 'x': must be an object");
  EXPECT_EQ(refusal(R"({"x":{"dtype":"U8","shape":[1]}})", "1"),
            "f: tensor 'x': data_offsets is missing");
  EXPECT_EQ(refusal(R"({"x":{"dtype":"U8","data_offsets":[0,1]}})", "1"),
            "f: tensor 'x': shape is missing");
  EXPECT_EQ(refusal(R"({"x":{"shape":[1],"data_offsets":[0,1]}})", "1"),
            "f: tensor 'x': dtype is missing");
  EXPECT_EQ(refusal(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1]}})", "1"),
            "f: tensor 'x': unknown member 'strides', must be dtype, shape and data_offsets");
  EXPECT_EQ(refusal(one("F16", "[1]", "[0,2]"), "12"),
            "f: tensor 'x': dtype = \"F16\": must be one of F64, F32, BF16, I64, I32, I16, U8");
  EXPECT_EQ(refusal(one("BOOL", "[1]", "[0,1]"), "1"),
            "f: tensor 'x': dtype = \"BOOL\": must be one of F64, F32, BF16, I64, I32, I16, U8");
  EXPECT_EQ(refusal(R"({"x":{"dtype":7,"shape":[1],"data_offsets":[0,1]}})", "1"),
            "f: tensor 'x': dtype = 7: must be one of F64, F32, BF16, I64, I32, I16, U8");
  EXPECT_EQ(refusal(R"({"__metadata__":[]})", ""), "f: __metadata__ must be an object of strings");
  EXPECT_EQ(refusal(R"({"__metadata__":{"op":1}})", ""),
            "f: __metadata__ entry 'op' = 1: must be a string");
}

TEST(Safetensors, RefusesShapesThatCannotBe) {
  EXPECT_EQ(refusal(one("U8", "1", "[0,1]"), "1"),
            "f: tensor 'x': shape = 1: must be an array of integers >= 0");
  for (const char* shape : {"[-1]", "[1.0]", "[true]", "[\"1\"]", "[9223372036854775808]",
                            "[99999999999999999999]", "[null]"}) {
    EXPECT_NE(refusal(one("U8", shape, "[0,1]"), "1")
                  .find("must be an array of integers >= 0 that fit I64"),
              std::string::npos)
        << shape;
  }
  // 2^32 * 2^32 wraps to 0, 2^62 * 4 F32 bytes to 0, 2^61 * 8 likewise.
  EXPECT_EQ(refusal(one("F32", "[4294967296,4294967296]", "[0,0]"), ""),
            "f: tensor 'x': shape = [4294967296,4294967296]: its number of bytes does not fit I64");
  EXPECT_EQ(refusal(one("F32", "[4611686018427387904]", "[0,0]"), ""),
            "f: tensor 'x': shape = [4611686018427387904]: its number of bytes does not fit I64");
  EXPECT_EQ(refusal(one("F64", "[2305843009213693952]", "[0,0]"), ""),
            "f: tensor 'x': shape = [2305843009213693952]: its number of bytes does not fit I64");
}

TEST(Safetensors, RefusesOffsetsThatDoNotCoverTheData) {
  for (const char* offsets :
       {"[0]", "[0,1,2]", "3", "[-1,0]", "[0,1.0]", "[0,18446744073709551615]"}) {
    EXPECT_EQ(refusal(one("U8", "[1]", offsets), "1"),
              "f: tensor 'x': data_offsets = " + std::string(offsets) +
                  ": must be two integers >= 0 that fit I64");
  }
  EXPECT_EQ(refusal(one("U8", "[1]", "[1,0]"), "1"),
            "f: tensor 'x': data_offsets = [1,0]: must not end before they begin");
  EXPECT_EQ(refusal(one("U8", "[2]", "[0,2]"), "1"),
            "f: tensor 'x': data_offsets = [0,2]: must lie in the data section of 1 bytes");
  EXPECT_EQ(refusal(one("F32", "[2]", "[0,4]"), "1234"),
            "f: tensor 'x': data_offsets = [0,4]: must hold the 8 bytes of F32 [2]");
  EXPECT_EQ(refusal(one("F32", "[]", "[0,8]"), "12345678"),
            "f: tensor 'x': data_offsets = [0,8]: must hold the 4 bytes of F32 []");
  EXPECT_EQ(refusal(one("U8", "[1]", "[1,2]"), "12"),
            "f: tensor 'x': begins at byte 1 of the data section: must begin at 0, the data "
            "section has a hole");
  const auto two = [](const std::string& second) {
    return R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],)"
           R"("data_offsets":)" +
           second + "}}";
  };
  EXPECT_EQ(refusal(two("[1,3]"), "123"),
            "f: tensor 'a': begins at byte 1 of the data section: must begin at 2, it overlaps the "
            "tensor before it");
  EXPECT_EQ(refusal(two("[0,2]"), "12"),
            "f: tensor 'b': begins at byte 0 of the data section: must begin at 2, it overlaps the "
            "tensor before it");
  EXPECT_EQ(refusal(two("[3,5]"), "12345"),
            "f: tensor 'a': begins at byte 3 of the data section: must begin at 2, the data "
            "section has a hole");
  EXPECT_EQ(refusal(two("[2,4]"), "12345"), "f: 1 bytes follow the last tensor: must be none");
  EXPECT_EQ(refusal("{}", "1"), "f: 1 bytes follow the last tensor: must be none");
  EXPECT_EQ(parse(with_length(two("[2,4]"), "1234")).tensors[0].name, "b")
      << "by place, not by name";
}

TEST(Safetensors, RefusesPathsThatAreNoFile) {
  const ScratchFolder scratch;
  const auto open = [](const std::filesystem::path& path) {
    return thrown_text<UsageError>([&] { static_cast<void>(read_safetensors(path)); });
  };
  EXPECT_EQ(open(scratch / "none"),
            (scratch / "none").string() + ": cannot be read: No such file or directory");
  EXPECT_EQ(open(scratch.path()), scratch.path().string() + ": must be a regular file");
  EXPECT_EQ(open("/dev/null"), "/dev/null: must be a regular file");
}

TEST(Safetensors, TheWriterHoldsTheCallerToTheHeader) {
  const ScratchFolder scratch;
  const std::vector<TensorInfo> infos = {{"a", Dtype::f32, {2}}};
  const std::vector<float> values = {1.0F, 2.0F};
  const std::span<const float> all(values);
  {
    SafetensorsWriter writer(scratch / "a.safetensors", infos, {});
    writer.write(all.first(1));
    EXPECT_EQ(thrown_text<Error>([&] { writer.commit(); }),
              "SafetensorsWriter::commit: missing bytes = 4: must be 0");
    EXPECT_EQ(
        thrown_text<Error>([&] { writer.write(all); }),
        "SafetensorsWriter::write: bytes.size = 8: must be at most the bytes that are left of "
        "the tensors (4)");
    EXPECT_FALSE(std::filesystem::exists(scratch / "a.safetensors"));
  }
  EXPECT_TRUE(scratch.names().empty()) << "nothing is left of a file that was not finished";
  EXPECT_EQ(thrown_text<Error>([&] {
              SafetensorsWriter(scratch / "a.safetensors",
                                {{"a", Dtype::u8, {}}, {"a", Dtype::u8, {}}}, {});
            }),
            "SafetensorsWriter: name = a: must be the name of one tensor alone");
  EXPECT_TRUE(scratch.names().empty());
}

}  // namespace
}  // namespace heddle::examples

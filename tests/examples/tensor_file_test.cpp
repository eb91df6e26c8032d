#include "support/tensor_file.hpp"

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/scratch_folder.hpp"
#include "support/thrown_text.hpp"
#include "support/usage_error.hpp"

// Mutants that must fail here: an element read off its alignment; the copy that is aligned gone with the
// next; order by name instead of place; a folder written where a file was asked for; a view that outlives a
// move of its file.

namespace heddle::examples {
namespace {

namespace fs = std::filesystem;
using test::ScratchFolder;

bool is_aligned(const TensorView& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) %
             static_cast<std::uintptr_t>(dtype_bytes(tensor.dtype)) ==
         0;
}

TEST(TensorFile, WritesTheFormThatTheNameAsksFor) {
  const ScratchFolder scratch;
  const std::vector<Tensor> tensors = {Tensor::of<float>("b", {2}, {1, 2}),
                                       Tensor::of<std::int32_t>("a", {1, 1}, {3})};
  for (const char* name : {"x.safetensors", "folder", "x.npy.d"}) {
    require_tensor_output(scratch / name);
    write_tensors(scratch / name, tensors, {{"op", "none"}});
    const TensorFile file = read_tensors(scratch / name);
    EXPECT_EQ(file.path(), (scratch / name).string());
    EXPECT_EQ(file.tensors().size(), 2U);
    EXPECT_EQ(file.at("b").converted<int>(), (std::vector<int>{1, 2}));
    EXPECT_EQ(file.at("a").shape, (Shape{1, 1}));
  }
  EXPECT_TRUE(fs::is_regular_file(scratch / "x.safetensors"));
  EXPECT_TRUE(fs::is_directory(scratch / "folder"));
  EXPECT_TRUE(fs::is_directory(scratch / "x.npy.d"));
  const TensorFile file = read_tensors(scratch / "x.safetensors");
  EXPECT_EQ(file.tensors()[0].name, "b") << "in the order of the file";
  EXPECT_EQ(file.metadata().at("op"), "none");
}

TEST(TensorFile, OutputThatCannotBeIsRefusedByItsForm) {
  const ScratchFolder scratch;
  fs::create_directory(scratch / "x.safetensors");
  scratch.write("folder", "");
  EXPECT_THROW(require_tensor_output(scratch / "x.safetensors"), UsageError);
  EXPECT_THROW(require_tensor_output(scratch / "folder"), UsageError);
}

TEST(TensorFile, AMissingTensorIsNamedWithItsFile) {
  const ScratchFolder scratch;
  const std::string path = (scratch / "x.safetensors").string();
  write_tensors(path, {Tensor::of<float>("a", {1}, {1})}, {});
  const TensorFile file = read_tensors(path);
  EXPECT_FALSE(file.find("b").has_value());
  EXPECT_TRUE(file.find("a").has_value());
  EXPECT_EQ(test::thrown_text<UsageError>([&] { static_cast<void>(file.at("b")); }),
            path + ": tensor 'b' is missing");
}

TEST(TensorFile, ElementsAreAlignedWhereverTheFileHoldsThem) {
  // Bytes first: what follows them lies off every wider alignment.
  const ScratchFolder scratch;
  const std::string path = (scratch / "x.safetensors").string();
  write_tensors(
      path,
      {Tensor::of<std::uint8_t>("odd", {1}, {1}), Tensor::of<double>("first", {2}, {0.5, -7}),
       Tensor::of<double>("second", {1}, {9})},
      {});
  const TensorFile file = read_tensors(path);
  const TensorView first = file.at("first");
  const TensorView second = file.at("second");
  const TensorView again = file.at("first");
  EXPECT_TRUE(is_aligned(first));
  EXPECT_TRUE(is_aligned(second));
  EXPECT_EQ(first.data, again.data) << "one copy, as long as the file lives";
  EXPECT_EQ(first.converted<double>(), (std::vector<double>{0.5, -7}));
  EXPECT_EQ(second.converted<double>(), std::vector<double>{9});
}

TEST(TensorFile, ViewsHoldWhenTheFileMoves) {
  const ScratchFolder scratch;
  const std::string path = (scratch / "x.safetensors").string();
  write_tensors(path, {Tensor::of<std::uint8_t>("odd", {1}, {1}), Tensor::of<float>("x", {1}, {4})},
                {});
  TensorFile file = read_tensors(path);
  const TensorView copy = file.at("x");
  const TensorView mapped = file.at("odd");
  const TensorFile moved = std::move(file);
  EXPECT_EQ(copy.values<float>()[0], 4);
  EXPECT_EQ(mapped.values<std::uint8_t>()[0], 1);
  EXPECT_EQ(moved.at("x").data, copy.data);
}

}  // namespace
}  // namespace heddle::examples

// Mutants tried: signatures compare without the sequence, without the accumulator, without the argument;
// the text leaves out the count.
#include "heddle/mesh/communicator.hpp"

#include <gtest/gtest.h>

#include "heddle/mesh/device.hpp"

namespace heddle {
namespace {

const CollectiveSignature base{.op = Collective::all_reduce,
                               .axes = {Axis::fsdp, Axis::context},
                               .type = data_type<bfloat16>(),
                               .count = 4096,
                               .fold = static_cast<std::int64_t>(Reduce::sum),
                               .accumulator = data_type<float>(),
                               .sequence = 17};

TEST(Communicator, SignatureTextNamesWhatMustAgree) {
  EXPECT_EQ(to_string(base), "all_reduce(sum in f32) over (fsdp, context), bf16 x 4096, call 17");
  EXPECT_EQ(to_string(CollectiveSignature{.op = Collective::barrier, .axes = {Axis::expert}}),
            "barrier over (expert), call 0");
  EXPECT_EQ(to_string(CollectiveSignature{.op = Collective::all_to_all_v,
                                          .type = data_type<float>(),
                                          .count = CollectiveSignature::ragged}),
            "all_to_all_v over (), f32 ragged, call 0");
  EXPECT_EQ(to_string(CollectiveSignature{
                .op = Collective::broadcast, .type = data_type<double>(), .argument = 3}),
            "broadcast(root 3) over (), f64 x 0, call 0");
  EXPECT_EQ(to_string(CollectiveSignature{
                .op = Collective::shift, .type = data_type<double>(), .argument = -1}),
            "shift(by -1) over (), f64 x 0, call 0");
  EXPECT_EQ(to_string(CollectiveSignature{
                .op = Collective::exclusive_scan, .type = data_type<float>(), .argument = 1}),
            "exclusive_scan(reverse) over (), f32 x 0, call 0");
}

TEST(Communicator, EveryPartOfASignatureCounts) {
  const auto differs = [](auto change) {
    CollectiveSignature other = base;
    change(other);
    return !(other == base);
  };
  using Signature = CollectiveSignature;
  EXPECT_FALSE(differs([](Signature&) {}));
  EXPECT_TRUE(differs([](Signature& s) { s.op = Collective::reduce_scatter; }));
  EXPECT_TRUE(differs([](Signature& s) { s.axes = {Axis::context, Axis::fsdp}; }));
  EXPECT_TRUE(differs([](Signature& s) { s.type = data_type<float>(); }));
  EXPECT_TRUE(differs([](Signature& s) { s.count = 4095; }));
  EXPECT_TRUE(differs([](Signature& s) { s.fold = static_cast<std::int64_t>(Reduce::max); }));
  EXPECT_TRUE(differs([](Signature& s) { s.accumulator = data_type<double>(); }));
  EXPECT_TRUE(differs([](Signature& s) { s.argument = 1; }));
  EXPECT_TRUE(differs([](Signature& s) { s.sequence = 18; }));
}

TEST(Communicator, OnlyDevicesAreCommunicators) {
  EXPECT_TRUE(Communicator<MeshDevice>);
  EXPECT_FALSE(Communicator<Topology>);
  EXPECT_FALSE(Communicator<int>);
}

}  // namespace
}  // namespace heddle

// Mutants tried: all_gather counts its own block; all_reduce counts 2n; a shift by a whole turn counts;
// the last member of a scan sends; broadcast charges the root; a sum ignores its filter; scopes do not
// nest; all_to_all counts the own block.
#include "heddle/mesh/ledger.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/thrown_text.hpp"

namespace heddle {
namespace {

struct Golden {
  const char* what;
  EqualCountCall call;
  std::int64_t payload;
  std::int64_t wire;
};

// fsdp=32, context=4, expert=2 of the 397B model: bytes of one device.
const std::vector<Golden>& goldens() {
  static const std::vector<Golden> table = {
      {"ring of experts, gather of a chunk",
       {.op = Collective::all_gather, .members = 8, .count = 8192 * 4096, .bytes = 2},
       67108864,
       469762048},
      {"ring of experts, its reduce-scatter",
       {.op = Collective::reduce_scatter, .members = 8, .count = 8192 * 4096, .bytes = 2},
       536870912,
       469762048},
      {"router logits",
       {.op = Collective::all_gather, .members = 8, .count = 8192 * 512, .bytes = 4},
       16777216,
       117440512},
      {"packed routing, an id and a weight for each of 10 experts",
       {.op = Collective::all_gather, .members = 8, .count = 8192 * 10, .bytes = 8},
       655360,
       4587520},
      {"expert weights, 64 of 512",
       {.op = Collective::all_gather,
        .members = 32,
        .count = std::int64_t{64} * 3 * 4096 * 1024 / 32,
        .bytes = 2},
       50331648,
       1560281088},
      {"head, sharded over all devices",
       {.op = Collective::all_gather,
        .members = 256,
        .count = std::int64_t{4096} * 248320 / 256,
        .bytes = 2},
       7946240,
       2026291200},
      {"attention keys and values",
       {.op = Collective::all_gather, .members = 4, .count = 16384 * 2 * 2 * 256, .bytes = 2},
       33554432,
       100663296},
      {"GDN context parallel, M and S of 64 heads",
       {.op = Collective::all_gather, .members = 4, .count = 2 * 64 * 128 * 128, .bytes = 4},
       8388608,
       25165824},
      {"router gradient",
       {.op = Collective::reduce_scatter, .members = 256, .count = 4096 * 512 / 256, .bytes = 4},
       8388608,
       8355840},
  };
  return table;
}

TEST(Ledger, BytesOfTheBenchmarkModel) {
  for (const Golden& golden : goldens()) {
    const Traffic traffic = traffic_of(golden.call);
    EXPECT_EQ(traffic.payload_bytes, golden.payload) << golden.what;
    EXPECT_EQ(traffic.wire_bytes, golden.wire) << golden.what;
    EXPECT_EQ(traffic.sent_bytes, golden.wire) << golden.what;
  }
}

TEST(Ledger, SmallCallsByHand) {
  const auto wire = [](const EqualCountCall& call) { return traffic_of(call).wire_bytes; };
  EXPECT_EQ(wire({.op = Collective::all_reduce, .members = 4, .count = 12, .bytes = 4}),
            2 * 3 * 12);
  EXPECT_EQ(wire({.op = Collective::all_to_all, .members = 4, .count = 12, .bytes = 2}), 18);
  EXPECT_EQ(wire({.op = Collective::broadcast,
                  .members = 4,
                  .index = 1,
                  .count = 5,
                  .bytes = 8,
                  .argument = 1}),
            0);
  EXPECT_EQ(wire({.op = Collective::broadcast,
                  .members = 4,
                  .index = 2,
                  .count = 5,
                  .bytes = 8,
                  .argument = 1}),
            40);
  EXPECT_EQ(traffic_of({.op = Collective::broadcast,
                        .members = 4,
                        .index = 1,
                        .count = 5,
                        .bytes = 8,
                        .argument = 1})
                .sent_bytes,
            120);
  for (const std::int64_t distance : {0, 4, -8}) {
    EXPECT_EQ(
        wire({.op = Collective::shift, .members = 4, .count = 3, .bytes = 1, .argument = distance}),
        0);
  }
  EXPECT_EQ(wire({.op = Collective::shift, .members = 4, .count = 3, .bytes = 1, .argument = -1}),
            3);
  EXPECT_EQ(wire({.op = Collective::barrier, .members = 9}), 0);
}

TEST(Ledger, AScanIsAChain) {
  for (const std::int64_t reverse : {0, 1}) {
    for (std::int64_t index = 0; index < 3; ++index) {
      const Traffic traffic = traffic_of({.op = Collective::exclusive_scan,
                                          .members = 3,
                                          .index = index,
                                          .count = 2,
                                          .bytes = 4,
                                          .argument = reverse});
      const bool is_first = index == (reverse == 0 ? 0 : 2);
      const bool is_last = index == (reverse == 0 ? 2 : 0);
      EXPECT_EQ(traffic.wire_bytes, is_first ? 0 : 8);
      EXPECT_EQ(traffic.sent_bytes, is_last ? 0 : 8);
    }
  }
}

TEST(Ledger, OneMemberSendsNothing) {
  for (const Collective op : {Collective::all_gather, Collective::reduce_scatter,
                              Collective::all_reduce, Collective::broadcast, Collective::shift,
                              Collective::all_to_all, Collective::exclusive_scan}) {
    const Traffic traffic = traffic_of({.op = op, .members = 1, .count = 6, .bytes = 4});
    EXPECT_EQ(traffic.payload_bytes, 24);
    EXPECT_EQ(traffic.wire_bytes, 0);
    EXPECT_EQ(traffic.sent_bytes, 0);
  }
}

TEST(Ledger, AllReduceSlicesAddUpWhereNothingDivides) {
  for (std::int64_t members = 1; members <= 9; ++members) {
    for (std::int64_t count = 0; count <= 20; ++count) {
      std::int64_t wire = 0;
      std::int64_t next = 0;
      for (std::int64_t index = 0; index < members; ++index) {
        const IndexRange slice = fold_slice(count, members, index);
        EXPECT_EQ(slice.first, next);
        next += slice.count;
        wire +=
            traffic_of(
                {.op = Collective::all_reduce, .members = members, .index = index, .count = count})
                .wire_bytes;
      }
      EXPECT_EQ(next, count);
      EXPECT_EQ(wire, 2 * (members - 1) * count);
    }
  }
}

TEST(Ledger, RaggedCallsHaveNoFormula) {
  EXPECT_EQ(
      test::thrown_text<Error>(
          [] { static_cast<void>(traffic_of({.op = Collective::all_to_all_v})); }),
      "traffic_of: call.op = all_to_all_v: must be a collective whose sizes are equal on every "
      "member");
}

TEST(Ledger, ScopesNestAndComeBack) {
  DeviceLedger ledger;
  EXPECT_EQ(ledger.phase(), Phase::forward);
  {
    const LedgerScope outer(ledger, Phase::backward, "layer 3");
    ledger.open({.op = Collective::barrier});
    {
      const LedgerScope inner(ledger, Phase::replay, "experts");
      ledger.open({.op = Collective::shift});
    }
    ledger.open({.op = Collective::barrier});
  }
  ledger.open({.op = Collective::barrier});
  const auto& records = ledger.records();
  ASSERT_EQ(records.size(), 4U);
  EXPECT_EQ(records[0].phase, Phase::backward);
  EXPECT_EQ(records[0].label, "layer 3");
  EXPECT_EQ(records[1].phase, Phase::replay);
  EXPECT_EQ(records[1].label, "experts");
  EXPECT_EQ(records[2].label, "layer 3");
  EXPECT_EQ(records[3].phase, Phase::forward);
  EXPECT_EQ(records[3].label, "");
  EXPECT_EQ(records[3].sequence, 3);
}

std::vector<TrafficRecord> two_devices() {
  return {
      {.sequence = 1,
       .device = 1,
       .op = Collective::shift,
       .axes = {Axis::fsdp},
       .members = 2,
       .bytes = {.payload_bytes = 4, .wire_bytes = 4, .sent_bytes = 4, .recv_bytes = 4}},
      {.sequence = 0, .device = 1, .op = Collective::barrier, .axes = {Axis::fsdp}, .members = 2},
      {.sequence = 0, .device = 0, .op = Collective::barrier, .axes = {Axis::fsdp}, .members = 2},
      {.sequence = 1,
       .device = 0,
       .op = Collective::shift,
       .axes = {Axis::fsdp},
       .members = 2,
       .bytes = {.payload_bytes = 4, .wire_bytes = 4, .sent_bytes = 4, .recv_bytes = 4},
       .phase = Phase::backward}};
}

TEST(Ledger, OrdersByDeviceThenSequenceAndSums) {
  const Ledger ledger(two_devices());
  ASSERT_EQ(ledger.records().size(), 4U);
  EXPECT_EQ(ledger.records()[0].device, 0);
  EXPECT_EQ(ledger.records()[1].op, Collective::shift);
  EXPECT_EQ(ledger.records()[3].sequence, 1);
  EXPECT_EQ(ledger.sum({}).wire_bytes, 8);
  EXPECT_EQ(ledger.sum({.device = 1}).sent_bytes, 4);
  EXPECT_EQ(ledger.sum({.op = Collective::barrier}).wire_bytes, 0);
  EXPECT_EQ(ledger.sum({.phase = Phase::backward}).recv_bytes, 4);
  EXPECT_EQ(ledger.sum({.axes = AxisTuple{Axis::context}}).payload_bytes, 0);
  EXPECT_EQ(ledger.count({.axes = AxisTuple{Axis::fsdp}}), 4);
  EXPECT_EQ(ledger.count({.label = "experts"}), 0);
}

TEST(Ledger, BalanceIsCheckedGroupByGroup) {
  require_balanced(Ledger(two_devices()));
  std::vector<TrafficRecord> lost = two_devices();
  lost[0].bytes.sent_bytes = 8;
  EXPECT_EQ(test::thrown_text<Error>([&] { require_balanced(Ledger(lost)); }),
            "require_balanced: sent_bytes = 12: must equal the bytes received (8) in shift 1 over "
            "(fsdp)");
  std::vector<TrafficRecord> unread = two_devices();
  unread[0].bytes.recv_bytes = 0;
  EXPECT_EQ(test::thrown_text<Error>([&] { require_balanced(Ledger(unread)); }),
            "require_balanced: device[1].recv_bytes = 0: must equal wire_bytes (4) of its shift 1");
}

TEST(Ledger, RecordsOfOneSourceTextAreEqualWhereverItWasCompiled) {
  TrafficRecord here{.site = {"/one/ring.hpp", 4}};
  TrafficRecord there{.site = {"/two/ring.hpp", 4}};
  EXPECT_EQ(here, there);
  there.site.line = 5;
  EXPECT_FALSE(here == there);
  there.site.line = 4;
  there.overlap = Overlap::overlappable;
  EXPECT_FALSE(here == there);
}

TEST(Ledger, NamesAreTheOnesOfTheOperations) {
  EXPECT_EQ(collective_name(Collective::reduce_scatter_v), "reduce_scatter_v");
  EXPECT_EQ(collective_name(static_cast<Collective>(99)), "unknown collective");
  EXPECT_EQ(phase_name(Phase::boundary), "boundary");
  EXPECT_EQ(phase_name(Phase::backward), "bwd");
}

}  // namespace
}  // namespace heddle

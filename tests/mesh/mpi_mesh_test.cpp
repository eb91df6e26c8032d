// Runs under mpiexec, see tests/mpi. Mutants tried: blocks sent by device id; the second round sends inputs;
// offsets of the own rank used for ragged sources; a killed or failing rank is not told of; groups keyed by
// axes of one device; deadlock found from stale news; numbers of two collectives under way confused.
#include "heddle/mesh/mpi_mesh.hpp"

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/mesh/local_mesh.hpp"
#include "mesh/collective_scenario.hpp"
#include "support/thrown_text.hpp"

namespace heddle {
namespace {

MpiSession* session = nullptr;

const AxisTuple world = {Axis::fsdp, Axis::context, Axis::expert};

/// Two meshes, one whose groups end where ranks do and one (6 or 24 devices) whose groups do not.
std::vector<MeshAxes> meshes_of_these_ranks() {
  return {{.fsdp = 2, .context = 2, .expert = 2},
          session->ranks() <= 2 ? MeshAxes{.context = 3, .expert = 2}
                                : MeshAxes{.fsdp = 4, .context = 3, .expert = 2}};
}

TEST(MpiMesh, EveryCollectiveGivesTheBitsAndTheLedgerOfTheLocalMesh) {
  for (const MeshAxes& axes : meshes_of_these_ranks()) {
    std::vector<std::vector<std::byte>> local(static_cast<std::size_t>(axes.devices()));
    std::vector<std::vector<std::byte>> ranks = local;
    LocalMesh simulated(axes);
    simulated.run([&](MeshDevice& device) {
      local[static_cast<std::size_t>(device.id())] = test::run_every_collective(device);
    });
    MpiMesh real(*session, axes, {.tokens = axes.fsdp == 2 ? 1 : 3});
    real.run([&](MeshDevice& device) {
      ranks[static_cast<std::size_t>(device.id())] = test::run_every_collective(device);
    });
    const IndexRange own = real.own_devices();
    for (std::int64_t id = own.first; id < own.first + own.count; ++id) {
      const auto i = static_cast<std::size_t>(id);
      ASSERT_GT(ranks[i].size(), 1000U);
      ASSERT_EQ(ranks[i], local[i]) << to_string(axes) << " device " << id;
    }
    EXPECT_EQ(real.ledger(), simulated.ledger()) << to_string(axes);
    require_balanced(real.ledger());
  }
}

TEST(MpiMesh, RunsAgainAndAgain) {
  const MeshAxes axes{.fsdp = 2, .context = 2, .expert = 2};
  MpiMesh mesh(*session, axes, {.replica_check = ReplicaCheck::hashed});
  for (int round = 0; round < 5; ++round) {
    mesh.run([&](MeshDevice& device) {
      std::vector<std::int64_t> sum = {device.id() + round};
      mesh::require_replicated(device, world, "round", std::span<const int>(&round, 1));
      mesh::all_reduce(device, world, sum, std::span(sum));
      EXPECT_EQ(sum[0], 28 + 8 * round);
    });
    EXPECT_EQ(mesh.ledger().count({}), 8);
  }
}

TEST(MpiMesh, ArraysLargerThanAnyEagerMessage) {
  const MeshAxes axes{.fsdp = 2, .expert = 4};
  MpiMesh mesh(*session, axes);
  mesh.run([&](MeshDevice& device) {
    const std::size_t n = 1 << 18;
    const std::vector<float> own(n, static_cast<float>(device.id()));
    std::vector<float> all(8 * n);
    mesh::all_gather(device, world, own, std::span(all));
    for (std::size_t member = 0; member < 8; ++member) {
      EXPECT_EQ(all[member * n], static_cast<float>(member));
      EXPECT_EQ(all[member * n + n - 1], static_cast<float>(member));
    }
    std::vector<float> sum(n);
    mesh::all_reduce(device, {Axis::fsdp}, own, std::span(sum));
    EXPECT_EQ(sum[n / 2], 2 * static_cast<float>(device.id() % 4) + 4);
  });
}

TEST(MpiMesh, LongMessagesTravelInPieces) {
  if (session->ranks() < 2 || session->rank() > 1) {
    return;
  }
  const int peer = 1 - session->rank();
  detail::MpiMessages messages(/*piece_bytes=*/1000);
  std::vector<std::byte> own(2501, static_cast<std::byte>(session->rank() + 1));
  std::vector<std::byte> theirs(2501);
  own.back() = std::byte{77};
  messages.receive(theirs, peer, 5, MPI_COMM_WORLD);
  messages.send(own, peer, 5, MPI_COMM_WORLD);
  while (!messages.test()) {
  }
  EXPECT_EQ(theirs[1000], static_cast<std::byte>(peer + 1));
  EXPECT_EQ(theirs[2499], static_cast<std::byte>(peer + 1));
  EXPECT_EQ(theirs[2500], std::byte{77});
}

TEST(MpiMesh, GroupsOfOneDeviceARankAreThoseOfACartesianGrid) {
  const MeshAxes axes{.fsdp = 2, .context = 2, .expert = 2};
  if (session->ranks() != axes.devices()) {
    return;
  }
  const std::array<int, 3> sizes = {2, 2, 2};
  const std::array<int, 3> open = {0, 0, 0};
  MPI_Comm grid = MPI_COMM_NULL;
  MPI_Cart_create(MPI_COMM_WORLD, 3, sizes.data(), open.data(), 0, &grid);
  MPI_Group everybody = MPI_GROUP_NULL;
  MPI_Comm_group(MPI_COMM_WORLD, &everybody);
  const Topology topology(axes);
  const detail::MpiGroups groups(topology, 1, session->rank(), MPI_COMM_WORLD);
  for (const Axis axis : all_axes) {
    std::array<int, 3> kept = {0, 0, 0};
    kept[static_cast<std::size_t>(axis)] = 1;
    MPI_Comm line = MPI_COMM_NULL;
    MPI_Cart_sub(grid, kept.data(), &line);
    MPI_Group members = MPI_GROUP_NULL;
    MPI_Comm_group(line, &members);
    const std::array<int, 2> places = {0, 1};
    std::vector<int> ranks(2);
    MPI_Group_translate_ranks(members, 2, places.data(), everybody, ranks.data());
    const auto key = detail::group_key(topology, {axis}, session->rank());
    EXPECT_EQ(groups.all().at(key).ranks, ranks) << axis_name(axis);
    int compared = MPI_UNEQUAL;
    MPI_Comm_compare(groups.all().at(key).comm, line, &compared);
    EXPECT_EQ(compared, MPI_CONGRUENT);
    MPI_Group_free(&members);
    MPI_Comm_free(&line);
  }
  MPI_Group_free(&everybody);
  MPI_Comm_free(&grid);
}

TEST(MpiMesh, DeadlocksAreSeenFromWhatRanksSaidEvenIfItIsOld) {
  // Two ranks of two devices; groups along fsdp lie on both.
  const Topology mesh({.fsdp = 2, .expert = 2});
  const detail::GroupKey left{1, 0};
  const detail::GroupKey right{1, 1};
  using Status = detail::MpiStatus;
  const auto dead = [&](const Status& a, const Status& b) {
    return detail::is_deadlock({a, b}, mesh, 2);
  };
  const Status waits_left{.started = {{left, 1}}, .waits = {{left, 1}}};
  const Status waits_right{.started = {{right, 1}}, .waits = {{right, 1}}};
  EXPECT_TRUE(dead(waits_left, waits_right));
  // The other has entered it too: a message is on its way.
  EXPECT_FALSE(dead(waits_left, {.started = {{left, 1}, {right, 1}}, .waits = {{right, 1}}}));
  EXPECT_TRUE(dead(waits_left, {.is_done = true}));
  EXPECT_FALSE(dead(waits_left, {.is_done = true, .started = {{left, 1}}}));
  EXPECT_FALSE(dead({.is_done = true}, {.is_done = true}));
  EXPECT_FALSE(detail::is_deadlock({waits_left, std::nullopt}, mesh, 2));
}

TEST(MpiMesh, DescriptorsTellCallsApart) {
  CollectiveCall call{.signature = {.op = Collective::all_reduce,
                                    .axes = {Axis::context, Axis::fsdp},
                                    .type = data_type<bfloat16>(),
                                    .count = 9,
                                    .fold = 0,
                                    .accumulator = data_type<float>(),
                                    .argument = 4,
                                    .sequence = 7},
                      .site = {"a.cpp", 1}};
  const detail::MpiDescriptor base = detail::describe_call(0, call);
  call.site = {"b.cpp", 2};
  EXPECT_TRUE(detail::same_signature(base, detail::describe_call(5, call)));
  const auto differs = [&](auto change) {
    CollectiveCall other = call;
    change(other.signature);
    return !detail::same_signature(base, detail::describe_call(0, other));
  };
  using Signature = CollectiveSignature;
  EXPECT_TRUE(differs([](Signature& s) { s.op = Collective::broadcast; }));
  EXPECT_TRUE(differs([](Signature& s) { s.axes = {Axis::fsdp, Axis::context}; }));
  EXPECT_TRUE(differs([](Signature& s) { s.axes = {Axis::context}; }));
  EXPECT_TRUE(differs([](Signature& s) { s.type = data_type<Eigen::half>(); }));
  EXPECT_TRUE(differs([](Signature& s) { s.count = 8; }));
  EXPECT_TRUE(differs([](Signature& s) { s.fold = 1; }));
  EXPECT_TRUE(differs([](Signature& s) { s.accumulator = data_type<double>(); }));
  EXPECT_TRUE(differs([](Signature& s) { s.argument = 5; }));
  EXPECT_TRUE(differs([](Signature& s) { s.sequence = 8; }));
}

TEST(MpiMesh, RefusalsNameWhatIsWrong) {
  const auto made = [](const MeshAxes& axes, const MpiMeshOptions& options) {
    return test::thrown_text<Error>([&] { MpiMesh mesh(*session, axes, options); });
  };
  const std::string ranks = std::to_string(session->ranks());
  if (session->ranks() > 1) {
    EXPECT_EQ(made({.fsdp = 9 * session->ranks() + 1}, {}),
              "MpiMesh: ranks = " + ranks + ": must divide the " +
                  std::to_string(9 * session->ranks() + 1) + " devices of fsdp=" +
                  std::to_string(9 * session->ranks() + 1) + ",context=1,expert=1");
  }
  const MeshAxes axes{.fsdp = session->ranks()};
  EXPECT_EQ(made(axes, {.tokens = 0}), "MpiMesh: options.tokens = 0: must be >= 1");
  EXPECT_EQ(made(axes, {.workers = 0}), "MpiMesh: options.workers = 0: must be >= 1");
  MpiMesh mesh(*session, axes);
  EXPECT_EQ(test::thrown_text<Error>([&] { mesh.run({}); }), "MpiMesh::run: body = null: required");
  std::string text;
  std::thread([&] {
    text = test::thrown_text<Error>([&] { mesh.run([](MeshDevice&) {}); });
  }).join();
  EXPECT_EQ(text, "MpiMesh::run: thread = another: must be the one that began MPI");
}

/// Fails on purpose. Devices of fsdp=2,context=2,expert=2 on however many ranks.
void run_scenario(const std::string& name) {
  using std::chrono::milliseconds;
  MpiMeshOptions options;
  options.patience = milliseconds(name == "stalls" ? 300 : 20000);
  options.report = [](const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); };
  MpiMesh mesh(*session, {.fsdp = 2, .context = 2, .expert = 2}, options);
  mesh.run([&](MeshDevice& device) {
    const std::int64_t id = device.id();
    const auto gather = [&](const AxisTuple& axes, std::size_t n) {
      const std::vector<float> in(n);
      std::vector<float> out(n * static_cast<std::size_t>(mesh::axis_size(device, axes)));
      mesh::all_gather(device, axes, in, std::span(out));
    };
    if (name == "throw") {
      gather(world, 2);
      if (id == 5) {
        throw std::runtime_error("no weights on 5");
      }
      mesh::barrier(device, {Axis::expert});
      mesh::barrier(device, world);
    } else if (name == "throw_while_others_compute") {
      if (id == 5) {
        throw std::runtime_error("no weights on 5");
      }
      // Longer than anybody waits for them.
      std::this_thread::sleep_for(std::chrono::seconds(id == 1 ? 25 : 0));
      mesh::barrier(device, world);
    } else if (name == "throw_after_others_are_done") {
      if (id == 5) {
        std::this_thread::sleep_for(milliseconds(300));
        throw std::runtime_error("no weights on 5");
      }
    } else if (name == "mismatched_operation") {
      if (id == 3) {
        std::vector<float> x(2);
        mesh::all_reduce(device, world, x, std::span(x));
      }
      gather(world, 2);
    } else if (name == "mismatched_count") {
      gather({Axis::fsdp}, id == 7 ? 3 : 2);
      mesh::barrier(device, world);
    } else if (name == "mismatched_on_one_rank") {
      if (id == 1) {
        mesh::barrier(device, {Axis::expert});
      }
      gather({Axis::expert}, 2);
      mesh::barrier(device, world);
    } else if (name == "returns_early") {
      if (id != 5) {
        mesh::barrier(device, world);
      }
    } else if (name == "skips_a_call") {
      mesh::barrier(device, {Axis::context});
      if (id != 5) {
        mesh::barrier(device, {Axis::context});
        mesh::barrier(device, world);
      }
    } else if (name == "cross_wait") {
      // In each half of the mesh 0 waits for 1, 1 for 3, 3 for 2 and 2 for 0.
      const bool is_swapped = id % 4 == 1 || id % 4 == 2;
      mesh::barrier(device, {is_swapped ? Axis::context : Axis::expert});
      mesh::barrier(device, {is_swapped ? Axis::expert : Axis::context});
    } else if (name == "stalls") {
      if (id == 4) {
        std::this_thread::sleep_for(std::chrono::seconds(3));
      }
      mesh::barrier(device, world);
    } else if (name == "large_transfer_under_way") {
      const std::vector<float> in(1 << 20);
      std::vector<float> out(8 << 20);
      auto pending = mesh::start_all_gather(device, world, in, std::span(out));
      if (id == 0) {
        throw std::runtime_error("no room on 0");
      }
      pending.finish();
    } else if (name == "killed") {
      mesh::barrier(device, world);
      if (id == 7) {
        std::raise(SIGKILL);
      }
      mesh::barrier(device, world);
    }
  });
}

}  // namespace
}  // namespace heddle

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  heddle::MpiSession session(argc, argv);
  heddle::session = &session;
  int expected_ranks = 0;
  std::string scenario;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--ranks=", 0) == 0) {
      expected_ranks = std::stoi(argument.substr(8));
    } else if (argument.rfind("--scenario=", 0) == 0) {
      scenario = argument.substr(11);
    }
  }
  // A launcher of another MPI starts as many programs of one rank each, and all of them would pass.
  if (session.ranks() != expected_ranks) {
    std::fprintf(stderr, "world of %d ranks, expected %d\n", session.ranks(), expected_ranks);
    session.abort(2);
  }
  if (!scenario.empty()) {
    try {
      heddle::run_scenario(scenario);
    } catch (const std::exception&) {
      return 1;
    }
    return 0;
  }
  if (session.rank() != 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
  }
  const int failed = RUN_ALL_TESTS();
  if (failed != 0 && session.rank() != 0) {
    std::fprintf(stderr, "rank %d: tests failed\n", session.rank());
  }
  int anywhere = 0;
  MPI_Allreduce(&failed, &anywhere, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return anywhere;
}

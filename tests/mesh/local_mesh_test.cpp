// Mutants tried: a failing device does not wake the waiting ones; the deadlock check only when a device
// returns; highest id first; the lowest originator replaced by the first; budget without the devices; the
// reader's memory freed while it is read; a token kept while waiting; PeerFailure counted as an originator;
// ledger kept from the run before.
#include "heddle/mesh/local_mesh.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <oneapi/tbb/parallel_for.h>

#include "heddle/mesh/collectives.hpp"
#include "mesh/device_arrays.hpp"

namespace heddle {
namespace {

using test::of;
using test::PerDevice;
using test::run_text;
using test::world;

/// Every test of a failure must be over long before this.
class Within {
 public:
  explicit Within(std::chrono::milliseconds limit) : limit_(limit) {}
  ~Within() { EXPECT_LT(std::chrono::steady_clock::now() - begin_, limit_); }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;

 private:
  std::chrono::milliseconds limit_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

constexpr std::chrono::milliseconds two_seconds{2000};

void meet(MeshDevice& device, const AxisTuple& axes, std::int64_t line) {
  mesh::barrier(device, axes, {"kernel.cpp", line});
}

TEST(LocalMesh, RunsTheFunctionOncePerDevice) {
  LocalMesh mesh({.fsdp = 2, .context = 3, .expert = 2});
  std::vector<std::atomic<int>> calls(12);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  mesh.run([&](MeshDevice& device) {
    ++calls[static_cast<std::size_t>(device.id())];
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  for (const auto& count : calls) {
    EXPECT_EQ(count, 1);
  }
  EXPECT_EQ(threads.size(), 12U);
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 0U);
}

TEST(LocalMesh, TwoHundredFiftySixDevicesOnFewCores) {
  const Within limit(std::chrono::seconds(20));
  const MeshAxes axes{.fsdp = 32, .context = 4, .expert = 2};
  LocalMesh mesh(axes);
  const PerDevice<float> inputs = test::random_inputs<float>(mesh.topology(), 3, 41);
  std::vector<float> expected = inputs[0];
  for (std::size_t id = 1; id < inputs.size(); ++id) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected[i] += inputs[id][i];
    }
  }
  PerDevice<float> sums(inputs.size(), std::vector<float>(3));
  PerDevice<std::int64_t> groups(inputs.size(), std::vector<std::int64_t>(8));
  mesh.run([&](MeshDevice& device) {
    mesh::all_reduce(device, world, of(inputs, device.id()), std::span(of(sums, device.id())));
    const std::vector<std::int64_t> own = {device.id()};
    mesh::all_gather(device, {Axis::context, Axis::expert}, own,
                     std::span(of(groups, device.id())));
  });
  for (const auto& sum : sums) {
    ASSERT_EQ(sum, expected);
  }
  EXPECT_EQ(of(groups, 11), (std::vector<std::int64_t>{8, 9, 10, 11, 12, 13, 14, 15}));
  require_balanced(mesh.ledger());
}

TEST(LocalMesh, AtMostTokensDevicesComputeAtATime) {
  for (const std::int64_t tokens : {1, 3}) {
    LocalMesh mesh({.fsdp = 8}, {.tokens = tokens});
    std::atomic<int> computing = 0;
    std::atomic<int> most = 0;
    mesh.run([&](MeshDevice& device) {
      for (int round = 0; round < 4; ++round) {
        const int now = ++computing;
        int seen = most;
        while (now > seen && !most.compare_exchange_weak(seen, now)) {
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        --computing;
        mesh::barrier(device, {Axis::fsdp});
      }
    });
    EXPECT_LE(most, tokens);
  }
}

TEST(LocalMesh, OneTokenHandsOnInIdOrderAndRepeats) {
  const auto trace = [] {
    LocalMesh mesh({.fsdp = 3, .context = 2}, {.tokens = 1});
    std::vector<std::int64_t> order;
    mesh.run([&](MeshDevice& device) {
      order.push_back(device.id());
      mesh::barrier(device, {Axis::context});
      order.push_back(device.id());
      mesh::barrier(device, world);
      order.push_back(device.id());
    });
    return order;
  };
  const std::vector<std::int64_t> first = trace();
  // 0 waits for 1, which completes their group and goes on; then 0 again, then the next pair.
  EXPECT_EQ(first,
            (std::vector<std::int64_t>{0, 1, 1, 0, 2, 3, 3, 2, 4, 5, 5, 4, 4, 0, 1, 2, 3, 5}));
  for (int repeat = 0; repeat < 3; ++repeat) {
    EXPECT_EQ(trace(), first);
  }
}

TEST(LocalMesh, RethrowsTheOriginalOfTheLeastDeviceAndCountsTheOthers) {
  const Within limit(two_seconds);
  struct Own : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  LocalMesh mesh({.fsdp = 4}, {.tokens = 1});
  std::atomic<int> told = 0;
  const std::string text = test::thrown_text<Own>([&] {
    mesh.run([&](MeshDevice& device) {
      if (device.id() == 1 || device.id() == 3) {
        throw Own("no weights on " + std::to_string(device.id()));
      }
      try {
        mesh::barrier(device, {Axis::fsdp});
      } catch (const PeerFailure& failure) {
        ++told;
        EXPECT_EQ(failure.origin(), 1);
        EXPECT_STREQ(failure.what(), "device 1 failed: no weights on 1");
        throw;
      }
    });
  });
  EXPECT_EQ(text, "no weights on 1");
  EXPECT_EQ(mesh.other_failures(), 1);
  EXPECT_EQ(told, 2);
}

TEST(LocalMesh, AThrowBetweenTwoCollectivesStopsEveryGroup) {
  const Within limit(two_seconds);
  const std::string text =
      run_text<std::logic_error>({.fsdp = 2, .context = 2, .expert = 2}, [](MeshDevice& device) {
        mesh::barrier(device, world);
        if (device.id() == 6) {
          throw std::logic_error("between");
        }
        for (;;) {
          mesh::barrier(device, {Axis::expert});
          mesh::barrier(device, {Axis::context});
        }
      });
  EXPECT_EQ(text, "between");
}

TEST(LocalMesh, AfterAFailureEveryFurtherCallThrows) {
  const Within limit(two_seconds);
  std::atomic<int> refused = 0;
  static_cast<void>(run_text<std::runtime_error>({.fsdp = 2}, [&](MeshDevice& device) {
    if (device.id() == 0) {
      throw std::runtime_error("first");
    }
    for (int attempt = 0; attempt < 3; ++attempt) {
      try {
        mesh::barrier(device, {});
        mesh::barrier(device, {Axis::fsdp});
      } catch (const PeerFailure&) {
        ++refused;
      }
    }
  }));
  EXPECT_EQ(refused, 3);
}

TEST(LocalMesh, ADeviceThatSwallowsItsPeersFailureDoesNotHideIt) {
  EXPECT_EQ(run_text<std::runtime_error>({.fsdp = 2},
                                         [&](MeshDevice& device) {
                                           if (device.id() == 1) {
                                             throw std::runtime_error("kept");
                                           }
                                           try {
                                             mesh::barrier(device, {Axis::fsdp});
                                           } catch (const MeshError&) {
                                             throw std::logic_error("what came of it");
                                           }
                                         }),
            "kept");
}

TEST(LocalMesh, ARunAfterAFailedOneStartsAfresh) {
  LocalMesh mesh({.fsdp = 2});
  EXPECT_THROW(mesh.run([](MeshDevice& device) {
    mesh::barrier(device, {Axis::fsdp});
    throw std::runtime_error("once");
  }),
               std::runtime_error);
  EXPECT_EQ(mesh.ledger().count({}), 2);
  mesh.run([](MeshDevice& device) { mesh::barrier(device, {Axis::fsdp}); });
  EXPECT_EQ(mesh.ledger().count({}), 2);
  EXPECT_EQ(mesh.other_failures(), 0);
}

TEST(LocalMeshDeadlock, OneDeviceSkipsACall) {
  const Within limit(two_seconds);
  const std::string text = run_text<Deadlock>({.fsdp = 3}, [](MeshDevice& device) {
    meet(device, {Axis::fsdp}, 1);
    if (device.id() != 1) {
      meet(device, {Axis::fsdp}, 2);
    }
  });
  EXPECT_EQ(
      text,
      "deadlock: no device can go on; group 0-2: devices 0, 2: arrived at barrier over (fsdp), "
      "call 1 (kernel.cpp:2); device 1: missing, has returned, last completed barrier over "
      "(fsdp), call 0 (kernel.cpp:1)");
}

TEST(LocalMeshDeadlock, TwoDevicesSwapCallsOnDifferentAxes) {
  const Within limit(two_seconds);
  // 0 waits for 1, 1 for 3, 3 for 2 and 2 for 0.
  const std::string text = run_text<Deadlock>({.context = 2, .expert = 2}, [](MeshDevice& device) {
    const bool swapped = device.id() == 1 || device.id() == 2;
    meet(device, {swapped ? Axis::context : Axis::expert}, 1);
    meet(device, {swapped ? Axis::expert : Axis::context}, 2);
  });
  EXPECT_NE(text.find("group 0, 1: device 0: arrived at barrier over (expert), call 0 "
                      "(kernel.cpp:1); device 1: missing, waits in barrier over (context), call 0 "
                      "(kernel.cpp:1), last completed nothing"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("group 0, 2: device 0: missing, waits in barrier over (expert)"),
            std::string::npos)
      << text;
}

TEST(LocalMeshDeadlock, ASwapThatHappensToPairUpIsAMismatch) {
  const Within limit(two_seconds);
  const std::string text =
      run_text<CollectiveMismatch>({.context = 2, .expert = 2}, [](MeshDevice& device) {
        const bool swapped = device.id() == 0;
        meet(device, {swapped ? Axis::expert : Axis::context}, 1);
        meet(device, {swapped ? Axis::context : Axis::expert}, 2);
      });
  EXPECT_NE(text.find("call 0"), std::string::npos) << text;
  EXPECT_NE(text.find("call 1"), std::string::npos) << text;
}

TEST(LocalMeshDeadlock, OneReturnsEarly) {
  const Within limit(two_seconds);
  const std::string text = run_text<Deadlock>({.expert = 4}, [](MeshDevice& device) {
    if (device.id() != 2) {
      meet(device, {Axis::expert}, 7);
    }
  });
  EXPECT_EQ(
      text,
      "deadlock: no device can go on; group 0-3: devices 0, 1, 3: arrived at barrier over "
      "(expert), call 0 (kernel.cpp:7); device 2: missing, has returned, last completed nothing");
}

TEST(LocalMeshDeadlock, AGroupOfOneAmongWaitingGroupsGoesOn) {
  const Within limit(two_seconds);
  std::atomic<int> passed = 0;
  LocalMesh mesh({.fsdp = 2, .context = 1, .expert = 2});
  mesh.run([&](MeshDevice& device) {
    if (device.id() == 3) {
      // The others wait by now, or soon; alone this device has nobody to wait for.
      mesh::barrier(device, {Axis::context});
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      mesh::barrier(device, {});
    } else {
      mesh::barrier(device, {Axis::context});
      mesh::barrier(device, {});
    }
    mesh::barrier(device, world);
    ++passed;
  });
  EXPECT_EQ(passed, 4);
}

TEST(LocalMeshDeadlock, HandlesFinishedInOppositeOrders) {
  const Within limit(two_seconds);
  const std::string text = run_text<Deadlock>({.fsdp = 2}, [](MeshDevice& device) {
    std::vector<float> x(1);
    std::vector<float> y(2);
    std::vector<float> z(2);
    auto first = mesh::start_all_gather(device, {Axis::fsdp}, x, std::span(y));
    auto second = mesh::start_all_gather(device, {Axis::fsdp}, x, std::span(z));
    if (device.id() == 0) {
      first.finish();
      second.finish();
    } else {
      second.finish();
      first.finish();
    }
  });
  EXPECT_NE(text.find("deadlock"), std::string::npos) << text;
}

TEST(LocalMeshDeadlock, OneMismatchAmong256Devices) {
  const Within limit(two_seconds);
  const std::string text =
      run_text<CollectiveMismatch>({.fsdp = 32, .context = 4, .expert = 2}, [](MeshDevice& device) {
        std::vector<float> x(device.id() == 77 ? 4 : 3);
        mesh::all_reduce(device, world, x, std::span(x), Reduce::sum, {"kernel.cpp", 9});
      });
  EXPECT_NE(text.find("mismatched collectives in group 0-255"), std::string::npos) << text;
  EXPECT_NE(text.find("f32 x 3, call 0 (kernel.cpp:9)"), std::string::npos) << text;
  EXPECT_NE(text.find("device 77: all_reduce(sum) over (fsdp, context, expert), f32 x 4"),
            std::string::npos)
      << text;
}

TEST(LocalMesh, AMismatchReachesEveryMemberAsSuchAndOthersAsAPeersFailure) {
  const Within limit(two_seconds);
  std::atomic<int> mismatched = 0;
  std::atomic<int> told = 0;
  static_cast<void>(run_text<CollectiveMismatch>({.fsdp = 2, .expert = 2}, [&](MeshDevice& device) {
    try {
      if (device.id() == 0) {
        mesh::barrier(device, {Axis::expert});
      } else if (device.id() == 1) {
        std::vector<float> x(1);
        mesh::shift(device, {Axis::expert}, 1, x, std::span(x));
      } else {
        mesh::barrier(device, {Axis::fsdp});
      }
    } catch (const CollectiveMismatch&) {
      ++mismatched;
      throw;
    } catch (const PeerFailure&) {
      ++told;
      throw;
    }
  }));
  EXPECT_EQ(mismatched, 2);
  EXPECT_EQ(told, 2);
}

TEST(LocalMesh, CallsOverAxesThatAreTheSameDevicesMeetAndMustAgree) {
  // With one device along context, (context, expert) and (expert) are the same group.
  const std::string text = run_text<CollectiveMismatch>({.expert = 2}, [](MeshDevice& device) {
    if (device.id() == 0) {
      meet(device, {Axis::context, Axis::expert}, 1);
    } else {
      meet(device, {Axis::expert}, 1);
    }
  });
  EXPECT_NE(text.find("barrier over (context, expert)"), std::string::npos) << text;
  const std::string order =
      run_text<CollectiveMismatch>({.context = 2, .expert = 2}, [](MeshDevice& device) {
        if (device.id() == 2) {
          meet(device, {Axis::context, Axis::expert}, 1);
        } else {
          meet(device, {Axis::expert, Axis::context}, 1);
        }
      });
  EXPECT_NE(order.find("barrier over (expert, context)"), std::string::npos) << order;
}

TEST(LocalMesh, NobodysMemoryGoesWhileItIsRead) {
  // Device 0 throws out of a collective while the others still copy from its input; under a sanitizer
  // an input freed too early is seen.
  for (int round = 0; round < 20; ++round) {
    static_cast<void>(run_text<Error>({.fsdp = 4}, [](MeshDevice& device) {
      const std::vector<float> in(1 << 16, 1.0F);
      std::vector<float> out(device.id() == 0 ? 1 : 4 << 16);
      std::vector<std::int64_t> offsets(5);
      mesh::all_gather_v(device, {Axis::fsdp}, in, std::span(out), std::span(offsets));
    }));
  }
}

TEST(LocalMesh, ADroppedHandleStopsTheMesh) {
  const Within limit(two_seconds);
  std::atomic<int> told = 0;
  static_cast<void>(run_text<MeshError>({.fsdp = 2}, [&](MeshDevice& device) {
    std::vector<float> x(1);
    std::vector<float> y(2);
    if (device.id() == 0) {
      static_cast<void>(
          mesh::start_all_gather(device, {Axis::fsdp}, x, std::span(y), CallSite{"kernel.cpp", 3}));
      return;
    }
    try {
      mesh::all_gather(device, {Axis::fsdp}, x, std::span(y));
      mesh::barrier(device, {Axis::fsdp});
    } catch (const PeerFailure& failure) {
      EXPECT_STREQ(failure.what(),
                   "device 0 failed: all_gather (kernel.cpp:3) was started and never finished");
      ++told;
      throw;
    }
  }));
  EXPECT_EQ(told, 1);
}

TEST(LocalMesh, ACollectiveBelongsToItsDevicesThreadAndStandsOutsideTasks) {
  EXPECT_EQ(
      run_text<Error>({.fsdp = 1},
                      [](MeshDevice& device) {
                        std::exception_ptr caught;
                        std::thread([&] {
                          try {
                            mesh::barrier(device, {Axis::fsdp});
                          } catch (...) {
                            caught = std::current_exception();
                          }
                        }).join();
                        std::rethrow_exception(caught);
                      }),
      "mesh: barrier = called from a foreign thread: a collective must be called by its device's "
      "own thread");
}

TEST(LocalMesh, StallsAreReportedByTheWatchdogAlone) {
  std::string report;
  LocalMeshOptions options;
  std::atomic<bool> go_on = false;
  options.watchdog = {.patience = std::chrono::milliseconds(30),
                      .report = [&](const std::string& text) {
                        report = text;
                        go_on = true;
                      }};
  const std::string text = run_text<Stalled>(
      {.fsdp = 2},
      [&](MeshDevice& device) {
        while (device.id() == 1 && !go_on) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        meet(device, {Axis::fsdp}, 4);
      },
      options);
  EXPECT_EQ(text, report);
  EXPECT_EQ(
      text,
      "stalled: no collective was entered or left for 30 ms; device 0: waits in barrier over "
      "(fsdp), call 0 (kernel.cpp:4), last completed nothing; device 1: computes, last completed "
      "nothing");
}

TEST(LocalMesh, OptionsAreChecked) {
  const auto made = [](LocalMeshOptions options) {
    return test::thrown_text<Error>([&] { const LocalMesh mesh({.fsdp = 2}, options); });
  };
  EXPECT_EQ(made({.tokens = 0}), "LocalMesh: options.tokens = 0: must be >= 1");
  EXPECT_EQ(made({.workers = 0}), "LocalMesh: options.workers = 0: must be >= 1");
  EXPECT_EQ(made({.stack_bytes = 1}).substr(0, 56),
            "LocalMesh: options.stack_bytes = 1: must be at least 163");
  EXPECT_EQ(made({.device_bytes = -1}), "LocalMesh: options.device_bytes = -1: must be >= 0");
  EXPECT_NE(made({.device_bytes = std::int64_t{1} << 50}).find("2 devices need"),
            std::string::npos);
  EXPECT_EQ(test::thrown_text<Error>([] {
              LocalMesh mesh({});
              mesh.run({});
            }),
            "LocalMesh::run: body = null: required");
}

TEST(LocalMesh, TheMemoryBudgetNamesBothNumbers) {
  require_memory_budget(256, 70, 25600);
  EXPECT_EQ(
      test::thrown_text<Error>([] { require_memory_budget(256, 71, 25600); }),
      "LocalMesh: options.device_bytes = 71: 256 devices need 18176 bytes, more than 70 % of the "
      "25600 bytes of this machine");
}

TEST(LocalMesh, StacksHaveTheirSize) {
  LocalMesh mesh({.fsdp = 2}, {.stack_bytes = std::int64_t{16} << 20});
  std::atomic<int> deep = 0;
  mesh.run([&](MeshDevice&) {
    volatile char frame[std::size_t{12} << 20];
    frame[0] = 1;
    deep += frame[0];
  });
  EXPECT_EQ(deep, 2);
}

TEST(LocalMesh, WithoutThreadsLeftItSaysSo) {
  // Stacks of 16 TiB: a few fit into the address space, and then none.
  const Within limit(two_seconds);
  LocalMesh mesh({.fsdp = 64}, {.stack_bytes = std::int64_t{1} << 44});
  std::atomic<int> ran = 0;
  EXPECT_THROW(mesh.run([&](MeshDevice&) { ++ran; }), std::system_error);
  EXPECT_EQ(ran, 0);
}

}  // namespace
}  // namespace heddle

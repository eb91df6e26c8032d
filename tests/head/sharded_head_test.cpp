// Mutants, each of which must fail a test here: parts of a tile in reverse rank order; the tile that comes
// in written over the one in use; a tile's first column counted from 0 (a target found in every tile, ids
// of later tiles missed); the last tile as wide as the others; statistics begun again at a tile; d_hidden
// overwritten by each tile, or added to what the caller had there; the cotangent of the weight not summed
// over copies, summed over the gathered axes too, or left on the wrong rows of a shard; a device without
// tokens that stays away; cotangents that nobody wants, sent; accumulation that overwrites; devices not
// holding a target adding its one-hot.
#include "heddle/head/sharded_head.hpp"

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "head/problem.hpp"
#include "heddle/mesh/fold.hpp"
#include "heddle/mesh/local_mesh.hpp"
#include "support/compare.hpp"
#include "support/thrown_text.hpp"

namespace {

namespace head = heddle::head;
using namespace heddle::test;
using head::HeadSharding;
using head::LogitsDtype;
using head::Mode;
using head::WeightBlock;
using head::WeightLayout;
using head::WeightSplit;
using heddle::Axis;
using heddle::AxisTuple;
using heddle::bfloat16;
using heddle::DenseShard;
using heddle::Ledger;
using heddle::LocalMesh;
using heddle::LocalMeshOptions;
using heddle::MatrixView;
using heddle::MeshAxes;
using heddle::MeshDevice;
using heddle::Topology;
using heddle::Workspace;
using heddle::Write;

constexpr MeshAxes meshes[] = {{},
                               {.fsdp = 2, .context = 2, .expert = 2},
                               {.fsdp = 1, .context = 4, .expert = 2},
                               {.fsdp = 4, .context = 2, .expert = 1},
                               {.fsdp = 3, .context = 1, .expert = 1}};

/// Which tokens each device holds, ascending.
using Tokens = std::vector<std::vector<std::int64_t>>;

/// Contiguous pieces of very different lengths; from three devices on, some have none.
Tokens uneven(std::int64_t tokens, std::int64_t devices) {
  Tokens held(static_cast<std::size_t>(devices));
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::int64_t device = t * t * devices / (tokens * tokens);
    device -= device % 3 == 1 ? 1 : 0;
    held[static_cast<std::size_t>(device)].push_back(t);
  }
  return held;
}

/// Every device's tokens from both ends of the row, as dual chunk swap has them.
Tokens swapped(std::int64_t tokens, std::int64_t devices) {
  Tokens held(static_cast<std::size_t>(devices));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t chunk = t * 2 * devices / tokens;
    const std::int64_t device = chunk < devices ? chunk : 2 * devices - 1 - chunk;
    held[static_cast<std::size_t>(device)].push_back(t);
  }
  return held;
}

template <class T>
std::vector<T> picked(const std::vector<T>& values, const std::vector<std::int64_t>& rows,
                      std::int64_t cols = 1) {
  std::vector<T> result;
  if (values.empty()) {
    return result;
  }
  for (const std::int64_t row : rows) {
    result.insert(result.end(), values.begin() + row * cols, values.begin() + (row + 1) * cols);
  }
  return result;
}

template <class T>
void put_back(const std::vector<T>& from, const std::vector<std::int64_t>& rows, std::int64_t cols,
              std::vector<T>& to) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(from.begin() + static_cast<std::int64_t>(i) * cols, cols,
                to.begin() + rows[i] * cols);
  }
}

/// The rows and columns that a block has in a weight as it is stored.
struct Stored {
  std::int64_t row, col, rows, cols;

  Stored(WeightLayout layout, const WeightBlock& block)
      : row(block.hidden.first),
        col(block.vocab.first),
        rows(block.hidden.count),
        cols(block.vocab.count) {
    if (layout == WeightLayout::vd) {
      std::swap(row, col);
      std::swap(rows, cols);
    }
  }
};

/// A shard in memory of its own, with a gap of two elements behind each row.
template <class T>
struct Shard {
  Stored place;
  std::int64_t stride;
  std::vector<T> storage;

  Shard(const Stored& at, T filling)
      : place(at),
        stride(at.cols + 2),
        storage(static_cast<std::size_t>(at.rows * stride), filling) {}
  [[nodiscard]] MatrixView<T> view() { return {storage.data(), place.rows, place.cols, stride}; }
  void load(const std::vector<T>& whole, std::int64_t whole_cols) {
    for (std::int64_t r = 0; r < place.rows; ++r) {
      std::copy_n(whole.begin() + (place.row + r) * whole_cols + place.col, place.cols,
                  storage.begin() + r * stride);
    }
  }
  void store(std::vector<T>& whole, std::int64_t whole_cols) const {
    for (std::int64_t r = 0; r < place.rows; ++r) {
      std::copy_n(storage.begin() + r * stride, place.cols,
                  whole.begin() + (place.row + r) * whole_cols + place.col);
    }
  }
};

template <class A>
struct Share {
  double loss;
  A d_logp;
  A d_entropy;
};

/// A loss that bends both scores; rows as the device counts them.
template <class A>
struct Bent {
  const std::vector<A>& a;
  const std::vector<A>& b;

  [[nodiscard]] Share<A> operator()(std::int64_t row, A logp, A entropy) const {
    const auto t = static_cast<std::size_t>(row);
    return {static_cast<double>(a[t] * logp * logp + b[t] * entropy * entropy), A(2) * a[t] * logp,
            A(2) * b[t] * entropy};
  }
};

enum class Call { forward_and_backward, one_call };

struct Setting {
  MeshAxes axes;
  HeadSharding sharding = {};
  LocalMeshOptions mesh_options = {};
  Call call = Call::forward_and_backward;
  bool wants_d_hidden = true;
  bool wants_d_weight = true;
  Write write = Write::overwrite;
};

/// What a mesh makes of a problem, put together again.
template <class A>
struct Outcome {
  Results<A> results;
  std::vector<double> losses;
  std::vector<std::vector<A>> d_weights;  ///< of each device, what it holds of it in its place
  Ledger forward_ledger, backward_ledger;
  std::vector<std::size_t> forward_bytes, backward_bytes;
};

template <class S, class W>
Outcome<heddle::AccumulatorOf<S>> run(const Problem<S, W>& problem, const Setting& setting,
                                      const Tokens& held) {
  using A = heddle::AccumulatorOf<S>;
  const Topology topology(setting.axes);
  const auto devices = static_cast<std::size_t>(topology.devices());
  const std::int64_t hidden = problem.dims.hidden;

  struct Part {
    Problem<S, W> problem;
    Shard<W> weight;
    Shard<A> d_weight;
    Results<A> results;
    std::vector<double> losses;
    Workspace forward_space, backward_space;
  };
  std::vector<Part> parts;
  for (std::size_t id = 0; id < devices; ++id) {
    Problem<S, W> own = problem;
    own.dims.tokens = static_cast<std::int64_t>(held[id].size());
    own.hidden = picked(problem.hidden, held[id], hidden);
    own.ids = picked(problem.ids, held[id]);
    own.active = picked(problem.active, held[id]);
    own.d_logps = picked(problem.d_logps, held[id]);
    own.d_entropy = picked(problem.d_entropy, held[id]);
    const Stored place(problem.layout, head::weight_block(problem.dims, setting.sharding, topology,
                                                          static_cast<std::int64_t>(id)));
    Part part{own,
              Shard<W>(place, W(nan_value)),
              Shard<A>(place, setting.write == Write::overwrite ? A(nan_value) : A(1)),
              {},
              {},
              {},
              {}};
    part.weight.load(problem.weight, problem.weight_cols());
    const std::vector<A> poisoned(held[id].size(), A(-77));
    part.results = {poisoned, poisoned, poisoned,
                    poisoned, poisoned, std::vector<A>(own.hidden.size(), A(nan_value)),
                    {}};
    part.losses.assign(held[id].size(), -77);
    parts.push_back(std::move(part));
  }

  const auto each = [&](const auto& body) {
    LocalMesh mesh(setting.axes, setting.mesh_options);
    mesh.run([&](MeshDevice& device) {
      Part& part = parts[static_cast<std::size_t>(device.id())];
      head::Inputs<S, W> inputs = part.problem.inputs();
      inputs.weight = part.weight.view();
      head::Cotangents<A> cotangents;
      // A device without tokens still says that it wants them: any memory will do.
      A nothing{};
      if (setting.wants_d_hidden) {
        cotangents.d_hidden = {
            part.results.d_hidden.empty() ? &nothing : part.results.d_hidden.data(),
            part.problem.dims.tokens, hidden};
      }
      if (setting.wants_d_weight) {
        cotangents.d_weight = {part.d_weight.view(), setting.write};
        if (cotangents.d_weight.values.is_null()) {
          cotangents.d_weight.values = {&nothing, part.d_weight.place.rows,
                                        part.d_weight.place.cols};
        }
      }
      body(device, part, inputs, cotangents);
    });
    require_balanced(mesh.ledger());
    return mesh.ledger();
  };

  Outcome<A> out;
  const auto outputs = [](Results<A>& r) {
    return head::Outputs<A>{r.logps, r.entropy, r.max, r.exp_sum, r.mean};
  };
  if (setting.call == Call::one_call) {
    out.backward_ledger = each([&](MeshDevice& device, Part& part, const head::Inputs<S, W>& inputs,
                                   const head::Cotangents<A>& cotangents) {
      head::sharded::forward_backward(device, part.problem.dims, inputs, setting.sharding,
                                      part.problem.options,
                                      Bent<A>{part.problem.d_logps, part.problem.d_entropy},
                                      head::LossOutputs<A>{outputs(part.results), part.losses},
                                      cotangents, part.backward_space);
    });
  } else {
    out.forward_ledger = each([&](MeshDevice& device, Part& part, const head::Inputs<S, W>& inputs,
                                  const head::Cotangents<A>&) {
      head::sharded::forward(device, part.problem.dims, inputs, setting.sharding,
                             part.problem.options, outputs(part.results), part.forward_space);
    });
    out.backward_ledger = each([&](MeshDevice& device, Part& part, const head::Inputs<S, W>& inputs,
                                   const head::Cotangents<A>& cotangents) {
      head::sharded::backward(
          device, part.problem.dims, inputs, setting.sharding, part.problem.options,
          head::Residuals<A>{part.results.max, part.results.exp_sum, part.results.mean},
          head::OutputCotangents<A>{part.problem.d_logps, part.problem.d_entropy}, cotangents,
          part.backward_space);
    });
  }

  const auto tokens = static_cast<std::size_t>(problem.dims.tokens);
  const std::vector<A> poisoned(tokens, A(-99));
  out.results = {poisoned,
                 poisoned,
                 poisoned,
                 poisoned,
                 poisoned,
                 std::vector<A>(problem.hidden.size(), A(nan_value)),
                 std::vector<A>(problem.weight.size(), A(nan_value))};
  out.losses.assign(tokens, -99);
  for (std::size_t id = 0; id < devices; ++id) {
    Part& part = parts[id];
    put_back(part.results.logps, held[id], 1, out.results.logps);
    put_back(part.results.entropy, held[id], 1, out.results.entropy);
    put_back(part.results.max, held[id], 1, out.results.max);
    put_back(part.results.exp_sum, held[id], 1, out.results.exp_sum);
    put_back(part.results.mean, held[id], 1, out.results.mean);
    put_back(part.results.d_hidden, held[id], hidden, out.results.d_hidden);
    put_back(part.losses, held[id], 1, out.losses);
    part.d_weight.store(out.results.d_weight, problem.weight_cols());
    out.d_weights.emplace_back(problem.weight.size(), A(0));
    part.d_weight.store(out.d_weights.back(), problem.weight_cols());
    out.forward_bytes.push_back(part.forward_space.high_water_bytes());
    out.backward_bytes.push_back(part.backward_space.high_water_bytes());
  }
  return out;
}

/// Each device's tokens on one device of its own, the weight whole; d_weight folded in rank order along the
/// gathered axes and then along the others.
template <class S, class W>
std::vector<heddle::AccumulatorOf<S>> folded_d_weight(const Problem<S, W>& problem,
                                                      const Setting& setting, const Tokens& held) {
  using A = heddle::AccumulatorOf<S>;
  const Topology topology(setting.axes);
  std::vector<std::vector<A>> shares;
  for (const std::vector<std::int64_t>& rows : held) {
    Problem<S, W> own = problem;
    own.dims.tokens = static_cast<std::int64_t>(rows.size());
    own.hidden = picked(problem.hidden, rows, problem.dims.hidden);
    own.ids = picked(problem.ids, rows);
    own.active = picked(problem.active, rows);
    own.d_logps = picked(problem.d_logps, rows);
    own.d_entropy = picked(problem.d_entropy, rows);
    shares.push_back(own.backward().d_weight);
  }
  const auto fold = [&](const std::vector<std::vector<A>>& terms) {
    std::vector<A> sum = terms.front();
    for (std::size_t i = 1; i < terms.size(); ++i) {
      for (std::size_t k = 0; k < sum.size(); ++k) {
        sum[k] += terms[i][k];
      }
    }
    return sum;
  };
  const bool all = setting.sharding.dense == DenseShard::all;
  const AxisTuple gathered =
      all ? AxisTuple{Axis::fsdp, Axis::context, Axis::expert} : AxisTuple{Axis::fsdp};
  const AxisTuple copies = all ? AxisTuple{} : AxisTuple{Axis::context, Axis::expert};
  std::vector<std::vector<A>> sums;
  for (const std::int64_t copy : topology.group_of(copies, 0)) {
    std::vector<std::vector<A>> terms;
    for (const std::int64_t id : topology.group_of(gathered, copy)) {
      terms.push_back(shares[static_cast<std::size_t>(id)]);
    }
    sums.push_back(fold(terms));
  }
  return fold(sums);
}

template <class A>
void expect_same_rows(const Results<A>& actual, const Results<A>& expected) {
  EXPECT_TRUE(same_bits(actual.logps, expected.logps));
  EXPECT_TRUE(same_bits(actual.entropy, expected.entropy));
  EXPECT_TRUE(same_bits(actual.max, expected.max));
  EXPECT_TRUE(same_bits(actual.exp_sum, expected.exp_sum));
  EXPECT_TRUE(same_bits(actual.mean, expected.mean));
  EXPECT_TRUE(same_bits(actual.d_hidden, expected.d_hidden));
}

std::string text(const Setting& setting) {
  return to_string(setting.axes) +
         (setting.sharding.dense == DenseShard::all ? ", all axes" : ", fsdp") +
         (setting.sharding.split == WeightSplit::vocab ? ", vocab" : ", hidden") + ", " +
         std::to_string(setting.sharding.gather_columns);
}

/// Three tiles, the last one short; the targets of some rows at both ends of each.
template <class S>
Problem<S> tiled_problem(std::uint64_t seed) {
  Problem<S> problem = random_problem<S>({.tokens = 37, .hidden = 24, .vocab = 1061}, seed, S(0.3));
  problem.options.vocab_tile = 128;
  problem.ids[0] = 0;
  problem.ids[5] = 511;
  problem.ids[10] = 512;
  problem.ids[20] = 1023;
  problem.ids[30] = 1024;
  problem.ids[36] = 1060;
  return problem;
}

class ShardedHead : public ::testing::Test {
 protected:
  void SetUp() override { current_tier = Tier::chunked; }
};

template <class S>
void expect_one_device(const Problem<S>& problem, const Setting& setting, const Tokens& held) {
  SCOPED_TRACE(text(setting));
  const auto single = problem.backward();
  const auto out = run(problem, setting, held);
  expect_same_rows(out.results, single);
  EXPECT_TRUE(same_bits(out.results.d_weight, folded_d_weight(problem, setting, held)));
  const auto apart = difference(std::span<const float>(out.results.d_weight),
                                std::span<const float>(single.d_weight));
  EXPECT_LT(apart.relative_l2, 2e-6);
  // Every copy of a shard, not the one that was put together last.
  for (const std::vector<float>& copy : out.d_weights) {
    for (std::size_t i = 0; i < copy.size(); ++i) {
      ASSERT_TRUE(copy[i] == 0 || copy[i] == out.results.d_weight[i]) << "a copy's element " << i;
    }
  }

  const Topology topology(setting.axes);
  for (std::int64_t id = 0; id < topology.devices(); ++id) {
    SCOPED_TRACE(id);
    const auto device = static_cast<std::size_t>(id);
    head::Dims dims = problem.dims;
    dims.tokens = static_cast<std::int64_t>(held[device].size());
    const auto forward =
        head::sharded::forward_traffic<S>(dims, setting.sharding, problem.options, topology, id);
    const auto backward = head::sharded::backward_traffic<S>(dims, setting.sharding, topology, id);
    using heddle::Collective;
    const bool equal_counts = setting.sharding.split == WeightSplit::hidden;
    const Collective gather = equal_counts ? Collective::all_gather : Collective::all_gather_v;
    const Collective scatter =
        equal_counts ? Collective::reduce_scatter : Collective::reduce_scatter_v;
    EXPECT_EQ(out.forward_ledger.sum({.device = id}), forward.gather);
    EXPECT_EQ(out.backward_ledger.sum({.device = id, .op = gather, .axes = backward.gathered}),
              backward.gather);
    EXPECT_EQ(out.backward_ledger.sum({.device = id, .op = scatter, .axes = backward.gathered}),
              backward.scatter);
    EXPECT_EQ(out.backward_ledger.sum(
                  {.device = id, .op = Collective::all_reduce, .axes = backward.summed}),
              backward.sum);
    EXPECT_EQ(
        out.backward_ledger.sum({.device = id, .phase = heddle::Phase::backward, .label = "head"})
            .sent_bytes,
        backward.sent_along(backward.gathered) + backward.sent_along(backward.summed));
    const std::int64_t threads = 1;
    EXPECT_LE(out.forward_bytes[device],
              head::sharded::forward_workspace_bytes<S>(dims, problem.layout, setting.sharding,
                                                        problem.options, setting.axes, threads));
    EXPECT_LE(out.backward_bytes[device],
              head::sharded::backward_workspace_bytes<S>(dims, problem.layout, setting.sharding,
                                                         problem.options, setting.axes, threads));
    // The first device of a split has no smaller a part than any other.
    if (id == 0) {
      EXPECT_EQ(out.forward_bytes[device],
                head::sharded::forward_workspace_bytes<S>(dims, problem.layout, setting.sharding,
                                                          problem.options, setting.axes, threads));
      EXPECT_EQ(out.backward_bytes[device],
                head::sharded::backward_workspace_bytes<S>(dims, problem.layout, setting.sharding,
                                                           problem.options, setting.axes, threads));
    }
  }
}

TEST_F(ShardedHead, EveryMeshHasTheBitsOfOneDevice) {
  Problem<float> problem = tiled_problem<float>(1);
  problem.options.temperature = 0.7;
  for (const WeightLayout layout : {WeightLayout::dv, WeightLayout::vd}) {
    const Problem<float> stored = layout == problem.layout ? problem : problem.transposed();
    for (const MeshAxes& axes : meshes) {
      for (const WeightSplit split : {WeightSplit::hidden, WeightSplit::vocab}) {
        const Setting setting{
            .axes = axes, .sharding = {.split = split}, .mesh_options = {.workers = 1}};
        expect_one_device(stored, setting, uneven(problem.dims.tokens, axes.devices()));
      }
    }
  }
}

TEST_F(ShardedHead, WeightsSharedOutByAllDevices) {
  const Problem<float> problem = tiled_problem<float>(2);
  for (const WeightSplit split : {WeightSplit::hidden, WeightSplit::vocab}) {
    for (const WeightLayout layout : {WeightLayout::dv, WeightLayout::vd}) {
      const Setting setting{.axes = {.fsdp = 2, .context = 2, .expert = 2},
                            .sharding = {.dense = DenseShard::all, .split = split},
                            .mesh_options = {.workers = 1}};
      expect_one_device(layout == problem.layout ? problem : problem.transposed(), setting,
                        swapped(problem.dims.tokens, 8));
    }
  }
}

TEST_F(ShardedHead, Bfloat16TravelsAsItIsStored) {
  Problem<bfloat16> problem = tiled_problem<bfloat16>(3);
  problem.options.logits_dtype = LogitsDtype::bf16;
  for (const MeshAxes& axes : {meshes[1], meshes[4]}) {
    const Setting setting{.axes = axes, .mesh_options = {.workers = 1}};
    const Tokens held = uneven(problem.dims.tokens, axes.devices());
    expect_one_device(problem, setting, held);
    const auto traffic = head::sharded::forward_traffic<bfloat16>(problem.dims, {}, problem.options,
                                                                  Topology(axes), 0);
    // Each element of the weight that is not the device's own, once.
    EXPECT_EQ(traffic.gather.wire_bytes,
              problem.dims.hidden * problem.dims.vocab * 2 * (axes.fsdp - 1) / axes.fsdp);
  }
}

TEST_F(ShardedHead, InactiveRowsAreNeverRead) {
  Problem<float> clean = tiled_problem<float>(4);
  for (std::int64_t t = 0; t < clean.dims.tokens; ++t) {
    clean.active.push_back(t % 3 == 1 || t == 36 ? 0 : 1);
  }
  clean.d_logps[3] = clean.d_entropy[3] = 0;  // active, but without a cotangent
  Problem<float> poisoned = clean;
  for (std::int64_t t = 0; t < clean.dims.tokens; ++t) {
    const auto at = static_cast<std::size_t>(t);
    if (clean.active[at] == 0) {
      std::fill_n(poisoned.hidden.begin() + t * 24, 24, std::nanf(""));
      poisoned.ids[at] = -2000;
      poisoned.d_logps[at] = poisoned.d_entropy[at] = std::nanf("");
    }
  }
  const Setting setting{.axes = meshes[1], .mesh_options = {.workers = 1}};
  const Tokens held = uneven(37, 8);
  const auto out = run(poisoned, setting, held);
  expect_same_rows(out.results, clean.backward());
  EXPECT_TRUE(same_bits(out.results.d_weight, run(clean, setting, held).results.d_weight));
  EXPECT_EQ(out.results.logps[1], 0);
  EXPECT_EQ(out.results.d_hidden[24], 0);
  EXPECT_EQ(out.results.d_hidden[3 * 24], 0);
}

TEST_F(ShardedHead, NoScheduleChangesABit) {
  Problem<float> problem = tiled_problem<float>(5);
  problem.options.chunk = 5;
  const Tokens held = uneven(37, 8);
  const Setting setting{.axes = meshes[1]};
  const auto expected = run(problem, setting, held).results;
  for (const std::int64_t columns : {1, 600, 1024, 1060, 1061, 5000}) {
    for (const WeightSplit split : {WeightSplit::hidden, WeightSplit::vocab}) {
      Setting other = setting;
      other.sharding.gather_columns = columns;
      other.sharding.split = split;
      other.mesh_options.tokens = columns == 600 ? 1 : 8;
      other.mesh_options.workers = columns == 1024 ? 3 : 1;
      SCOPED_TRACE(text(other));
      const auto actual = run(problem, other, held).results;
      expect_same_rows(actual, expected);
      EXPECT_TRUE(same_bits(actual.d_weight, expected.d_weight));
    }
  }
  // Tiles of statistics on another grid than blocks of columns.
  problem.options.vocab_tile = 300;
  const auto single = problem.backward();
  for (const std::int64_t columns : {1, 600, 1061}) {
    Setting other = setting;
    other.sharding.gather_columns = columns;
    expect_same_rows(run(problem, other, held).results, single);
  }
}

TEST_F(ShardedHead, DevicesWithoutTokensAndMoreDevicesThanColumns) {
  Problem<float> problem = random_problem<float>({.tokens = 4, .hidden = 3, .vocab = 2}, 6);
  for (const WeightSplit split : {WeightSplit::hidden, WeightSplit::vocab}) {
    for (const WeightLayout layout : {WeightLayout::dv, WeightLayout::vd}) {
      for (const std::int64_t columns : {1, 100}) {
        const Setting setting{.axes = meshes[4],
                              .sharding = {.split = split, .gather_columns = columns},
                              .mesh_options = {.workers = 1}};
        expect_one_device(layout == problem.layout ? problem : problem.transposed(), setting,
                          Tokens{{}, {0, 1, 2, 3}, {}});
      }
    }
  }
  problem.dims.tokens = 0;
  problem.hidden.clear();
  problem.ids.clear();
  problem.d_logps.clear();
  problem.d_entropy.clear();
  const auto out = run(problem, Setting{.axes = meshes[4]}, Tokens{{}, {}, {}});
  EXPECT_TRUE(same_bits(out.results.d_weight, std::vector<float>(6, 0.0F)));
}

TEST_F(ShardedHead, WhatNobodyWantsIsNotSent) {
  const Problem<float> problem = tiled_problem<float>(7);
  const Tokens held = uneven(37, 8);
  Setting setting{.axes = meshes[1], .mesh_options = {.workers = 1}};
  const auto both = run(problem, setting, held);

  setting.wants_d_weight = false;
  const auto d_hidden = run(problem, setting, held);
  EXPECT_TRUE(same_bits(d_hidden.results.d_hidden, both.results.d_hidden));
  for (std::int64_t id = 0; id < 8; ++id) {
    const auto traffic =
        head::sharded::backward_traffic<float>(problem.dims, {}, Topology(setting.axes), id, false);
    EXPECT_EQ(d_hidden.backward_ledger.sum({.device = id}), traffic.gather);
    EXPECT_EQ(traffic.scatter, heddle::Traffic{});
    EXPECT_EQ(traffic.sum, heddle::Traffic{});
  }

  setting.wants_d_hidden = false;
  EXPECT_TRUE(run(problem, setting, held).backward_ledger.records().empty());

  setting.wants_d_weight = true;
  EXPECT_TRUE(same_bits(run(problem, setting, held).results.d_weight, both.results.d_weight));
}

TEST_F(ShardedHead, AccumulatesWhatAllDevicesAdd) {
  const Problem<float> problem = tiled_problem<float>(8);
  for (const WeightSplit split : {WeightSplit::hidden, WeightSplit::vocab}) {
    Setting setting{
        .axes = meshes[1], .sharding = {.split = split}, .mesh_options = {.workers = 1}};
    const Tokens held = uneven(37, 8);
    std::vector<float> expected = run(problem, setting, held).results.d_weight;
    for (float& value : expected) {
      value += 1;
    }
    setting.write = Write::accumulate;
    EXPECT_TRUE(same_bits(run(problem, setting, held).results.d_weight, expected));
  }
}

TEST_F(ShardedHead, ALossInsideScoresAndDifferentiatesTheSame) {
  const Problem<float> problem = tiled_problem<float>(9);
  const Tokens held = uneven(37, 8);
  Setting setting{.axes = meshes[1], .mesh_options = {.workers = 1}};
  const auto scores = run(problem, setting, held).results;
  const Bent<float> loss{problem.d_logps, problem.d_entropy};
  Problem<float> after = problem;
  std::vector<double> losses;
  for (std::size_t t = 0; t < scores.logps.size(); ++t) {
    const auto share = loss(static_cast<std::int64_t>(t), scores.logps[t], scores.entropy[t]);
    after.d_logps[t] = share.d_logp;
    after.d_entropy[t] = share.d_entropy;
    losses.push_back(share.loss);
  }
  const auto expected = run(after, setting, held).results;

  setting.call = Call::one_call;
  for (const std::int64_t columns : {512, 2000}) {
    setting.sharding.gather_columns = columns;
    SCOPED_TRACE(text(setting));
    const auto out = run(problem, setting, held);
    expect_same_rows(out.results, expected);
    EXPECT_TRUE(same_bits(out.losses, losses));
    EXPECT_TRUE(same_bits(out.results.d_weight, expected.d_weight));
    for (std::int64_t id = 0; id < 8; ++id) {
      head::Dims dims = problem.dims;
      dims.tokens = static_cast<std::int64_t>(held[static_cast<std::size_t>(id)].size());
      const auto traffic = head::sharded::forward_backward_traffic<float>(
          dims, setting.sharding, problem.options, Topology(setting.axes), id);
      EXPECT_EQ(out.backward_ledger.sum({.device = id, .op = heddle::Collective::all_gather}),
                traffic.gather);
      EXPECT_EQ(out.backward_ledger.sum({.device = id}).sent_bytes,
                traffic.sent_along(traffic.gathered) + traffic.sent_along(traffic.summed));
      // Under tiles, scores that the call needs and is not given come from the workspace, too.
      const std::size_t given = columns < 1061 ? 4 * Workspace::bytes_for<float>(dims.tokens) : 0;
      EXPECT_EQ(out.backward_bytes[static_cast<std::size_t>(id)] + given,
                head::sharded::forward_backward_workspace_bytes<float>(
                    dims, problem.layout, setting.sharding, problem.options, setting.axes));
    }
  }
}

TEST_F(ShardedHead, WholeRowsInModesThatWantThem) {
  for (const Mode mode : {Mode::local, Mode::unsharded}) {
    Problem<float> problem = tiled_problem<float>(10);
    problem.options.mode = mode;
    expect_one_device(problem,
                      Setting{.axes = meshes[3],
                              .sharding = {.gather_columns = 1061},
                              .mesh_options = {.workers = 1}},
                      uneven(37, 8));
  }
}

/// The error of a run, in which nothing was to move.
std::string refused(const Problem<float>& problem, const MeshAxes& axes,
                    const HeadSharding& sharding, std::int64_t rows, std::int64_t cols) {
  LocalMesh mesh(axes);
  const std::vector<float> weight(problem.weight.size());
  const std::string error = thrown_text<heddle::Error>([&] {
    mesh.run([&](MeshDevice& device) {
      head::Inputs<float> inputs = problem.inputs();
      inputs.weight = {weight.data(), rows, cols};
      std::vector<float> logps(problem.ids.size(), -77);
      Workspace workspace;
      head::sharded::forward(device, problem.dims, inputs, sharding, problem.options,
                             head::Outputs<float>{.logps = logps}, workspace);
    });
  });
  EXPECT_TRUE(mesh.ledger().records().empty());
  return error;
}

TEST_F(ShardedHead, RefusesBeforeAnythingMoves) {
  const auto names = [](const std::string& error, const std::string& part) {
    return error.find(part) != std::string::npos ? ::testing::AssertionSuccess()
                                                 : ::testing::AssertionFailure() << error;
  };
  const MeshAxes two{.fsdp = 2};
  const Problem<float> problem = tiled_problem<float>(11);
  EXPECT_TRUE(names(refused(problem, {.fsdp = 5}, {}, 24, 1061),
                    "head dim 0 (D) = 24: is not divisible by fsdp=5"));
  EXPECT_TRUE(names(refused(problem, two, {}, 24, 1061),
                    "inputs.weight.rows = 24: must equal the device's share of dims.hidden (12)"));
  EXPECT_TRUE(names(refused(problem, two, {.split = WeightSplit::vocab}, 24, 1061),
                    "must equal the device's share of dims.vocab (531)"));
  EXPECT_TRUE(names(refused(problem, two, {.gather_columns = 0}, 12, 1061),
                    "sharding.gather_columns = 0: must be >= 1"));
  Problem<float> wrong = problem;
  wrong.options.vocab_shards = 2;
  EXPECT_TRUE(names(refused(wrong, two, {}, 12, 1061), "options.vocab_shards = 2: must be 1"));
  wrong = problem;
  wrong.options.mode = Mode::local;
  EXPECT_TRUE(names(refused(wrong, two, {}, 12, 1061), "options.mode = 1: must be fused"));
  wrong = problem;
  wrong.options.temperature = -1;
  EXPECT_TRUE(names(refused(wrong, two, {}, 12, 1061), "options.temperature = -1"));
  wrong = problem;
  wrong.ids[4] = 1061;
  EXPECT_TRUE(names(refused(wrong, two, {}, 12, 1061), "inputs.target_ids[4] = 1061"));
}

TEST_F(ShardedHead, WrappedAndForeignIdsAsOnOneDevice) {
  Problem<float> problem = tiled_problem<float>(12);
  problem.options.id_policy = head::IdPolicy::wrap;
  problem.ids[1] = -1;
  problem.ids[2] = -1061;
  problem.ids[3] = -1062;
  problem.ids[4] = 1061;
  problem.ids[6] = -550;
  const Setting setting{.axes = meshes[4], .mesh_options = {.workers = 1}};
  const auto single = problem.backward();
  const auto out = run(problem, setting, uneven(37, 3));
  expect_same_rows(out.results, single);
  EXPECT_TRUE(std::isnan(out.results.logps[4]));
}

}  // namespace

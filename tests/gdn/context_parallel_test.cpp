#include "heddle/gdn/context_parallel.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/context_calls.hpp"
#include "gdn/layer_calls.hpp"
#include "gdn/problem.hpp"
#include "heddle/gdn/context_cost.hpp"
#include "heddle/mesh/local_mesh.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

// Mutants these tests are written against: pieces in the order of the ranks instead of the sequence; M left
// out, or its transpose forward; a piece with a start given an M; a state where the first token starts a
// document; documents numbered within the shard; a window across a start, or of another document with the
// same id; its cotangent not returned, or to the wrong rows; the cotangent of a state decayed twice; what
// lies behind the first start let into D; a given state, or a cotangent of a final one, read on another
// rank than its own; the parameters of one piece alone.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::same_bits;
using test::Cut;
using test::describe;
using test::Given;
using test::Gradients;
using test::layer_backward;
using test::layer_forward;
using test::Problem;
using test::Random;
using test::random_problem;
using test::reference_backward;
using test::reference_forward;
using test::run_context;
using test::stored_as;

using Ids = std::vector<std::int32_t>;

constexpr Dims small{.key_heads = 2, .value_heads = 4, .key_dim = 5, .value_dim = 3, .kernel = 4};
constexpr auto contiguous = ContextLayout::contiguous;
constexpr auto dual = ContextLayout::dual_chunk_swap;

/// `lengths` tokens of documents 1, 2, ...; a negative length is padding.
Ids row(const std::vector<int>& lengths) {
  Ids ids;
  std::int32_t id = 0;
  for (const int length : lengths) {
    id += length > 0 ? 1 : 0;
    ids.insert(ids.end(), static_cast<std::size_t>(std::abs(length)), length > 0 ? id : 0);
  }
  return ids;
}

/// 48 tokens: eight pieces of 6, six of 8, and so on.
struct Row {
  const char* name;
  Ids ids;
};
const std::vector<Row> rows{
    {"one document", Ids(48, 3)},
    {"documents across the borders", row({5, 14, 10, 19})},
    {"starts on the borders", row({6, 6, 12, 12, 12})},
    {"a start just behind each border", row({7, 6, 6, 6, 6, 6, 6, 5})},
    {"ids that return", {1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 7, 7, 7, 7, 7, 7, 7, 8, 8, 7, 7, 7,
                         7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7}},
    {"padding inside and last", row({20, -17, 4, -7})},
    {"a document around padding pieces",
     {4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4,
      4, 0, 4, 4, 0, 4, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0}},
    {"padding first", row({-13, 20, 15})},
    {"a document that ends just behind a border", row({11, 2, -35})},
    {"padding alone", Ids(48, 0)},
};

Problem<double> long_memory(const Ids& ids, std::uint64_t seed, Given given) {
  auto p = random_problem(small, ids, seed, given);
  test::set_decay(p, [](std::int64_t t, std::int64_t h) { return t % 5 == h ? 0.0 : -1e-3; });
  return p;
}

/// Without what the row does not allow: a state before padding that a token follows.
Given allowed(const Ids& ids) {
  const bool any = std::any_of(ids.begin(), ids.end(), [](std::int32_t id) { return id > 0; });
  return ids[0] > 0 || !any ? Given::everything : Given::bias;
}

template <class A>
std::vector<double> wide(const std::vector<A>& values) {
  std::vector<double> to;
  for (const A value : values) {
    to.push_back(static_cast<double>(value));
  }
  return to;
}

template <class Run, class Forward, class Backward>
void expect_close(const Run& run, const Forward& forward, const Backward& gradients,
                  double tolerance, const std::string& name) {
  const auto check = [&](const char* what, const auto& a, const auto& e) {
    if (!e.empty()) {
      EXPECT_TRUE(close(wide(a), wide(e), tolerance)) << name << ": " << what;
    }
  };
  check("o", run.forward.o, forward.o);
  check("final_recurrent_state", run.forward.final_recurrent_state, forward.final_recurrent_state);
  EXPECT_EQ(wide(run.forward.final_conv_state), wide(forward.final_conv_state)) << name;
  const auto& g = run.gradients;
  check("d_qkv", g.d_qkv, gradients.d_qkv);
  check("d_conv_weight", g.d_conv_weight, gradients.d_conv_weight);
  check("d_conv_bias", g.d_conv_bias, gradients.d_conv_bias);
  check("d_a", g.d_a, gradients.d_a);
  check("d_b", g.d_b, gradients.d_b);
  check("d_A_log", g.d_A_log, gradients.d_A_log);
  check("d_dt_bias", g.d_dt_bias, gradients.d_dt_bias);
  check("d_conv_state", g.d_conv_state, gradients.d_conv_state);
  check("d_recurrent_state", g.d_recurrent_state, gradients.d_recurrent_state);
}

std::vector<Cut> every_cut() {
  std::vector<Cut> cuts;
  for (const std::int64_t ranks : {1, 2, 3, 4}) {
    for (const auto exchange : {StateExchange::chain, StateExchange::gather}) {
      const ContextOptions options{.chunks = {.chunk = 4}, .exchange = exchange};
      cuts.push_back({ranks, contiguous, 0, options});
      cuts.push_back({ranks, contiguous, 2, options});
      cuts.push_back({ranks, dual, 0, options});
    }
  }
  cuts.push_back({2, contiguous, 8, {.chunks = {.chunk = 64}}, false});
  cuts.push_back({3, dual, 2, {.chunks = {.chunk = 3, .chunking = Chunking::grid}}, false});
  cuts.push_back({8, dual, 2, {.chunks = {.chunk = 1}}});
  return cuts;
}

TEST(GdnContextParallel, AgreesWithTheUnsplitReferenceForAnyCut) {
  std::uint64_t seed = 1;
  for (const Row& each : rows) {
    for (const bool remembers : {true, false}) {
      const Given given = allowed(each.ids);
      const auto p = remembers ? long_memory(each.ids, seed, given)
                               : random_problem(small, each.ids, seed, given);
      ++seed;
      const auto forward = reference_forward(p);
      const auto gradients = reference_backward(p);
      const auto single = stored_as<float>(p);
      for (const Cut& cut : every_cut()) {
        const bool chained = cut.options.exchange == StateExchange::chain;
        if (!remembers && !chained) {
          continue;  // all that a gather may get wrong shows where states last
        }
        const std::string name = std::string(each.name) + ", " + describe(cut);
        expect_close(run_context(p, cut), forward, gradients, 1e-12, name);
        if (remembers && chained) {
          expect_close(run_context(single, cut), forward, gradients, 1e-5, name + " f32");
        }
      }
    }
  }
}

template <class Run>
void expect_same_bits(const Run& a, const Run& b, bool parameters, const std::string& name) {
  EXPECT_TRUE(same_bits(a.forward.o, b.forward.o)) << name;
  EXPECT_TRUE(same_bits(a.forward.final_recurrent_state, b.forward.final_recurrent_state)) << name;
  EXPECT_TRUE(same_bits(a.forward.final_conv_state, b.forward.final_conv_state)) << name;
  EXPECT_TRUE(same_bits(a.gradients.d_qkv, b.gradients.d_qkv)) << name;
  EXPECT_TRUE(same_bits(a.gradients.d_a, b.gradients.d_a)) << name;
  EXPECT_TRUE(same_bits(a.gradients.d_b, b.gradients.d_b)) << name;
  EXPECT_TRUE(same_bits(a.gradients.d_conv_state, b.gradients.d_conv_state)) << name;
  EXPECT_TRUE(same_bits(a.gradients.d_recurrent_state, b.gradients.d_recurrent_state)) << name;
  if (parameters) {
    EXPECT_TRUE(same_bits(a.gradients.d_conv_weight, b.gradients.d_conv_weight)) << name;
    EXPECT_TRUE(same_bits(a.gradients.d_conv_bias, b.gradients.d_conv_bias)) << name;
    EXPECT_TRUE(same_bits(a.gradients.d_A_log, b.gradients.d_A_log)) << name;
    EXPECT_TRUE(same_bits(a.gradients.d_dt_bias, b.gradients.d_dt_bias)) << name;
  } else {
    EXPECT_TRUE(close(a.gradients.d_conv_weight, b.gradients.d_conv_weight, 1e-6)) << name;
    EXPECT_TRUE(close(a.gradients.d_dt_bias, b.gradients.d_dt_bias, 1e-6)) << name;
  }
}

TEST(GdnContextParallel, TheSamePiecesGiveTheSameBits) {
  for (const Row& each : {rows[0], rows[1], rows[6]}) {
    const auto p = stored_as<float>(long_memory(each.ids, 31, allowed(each.ids)));
    for (const std::int64_t ranks : {2, 3, 4}) {
      const Cut base{ranks, contiguous, 2, {.chunks = {.chunk = 4}}};
      const auto expected = run_context(p, base);
      const auto expect = [&](const Cut& cut, const LocalMeshOptions& mesh, bool parameters,
                              const char* what) {
        expect_same_bits(run_context(p, cut, mesh), expected, parameters,
                         std::string(each.name) + ", " + what + ", " + describe(cut));
      };
      Cut cut = base;
      cut.options.exchange = StateExchange::gather;
      expect(cut, {}, true, "gathered");
      cut = base;
      cut.keep_inverses = false;
      expect(cut, {}, true, "without inverses");
      cut = base;
      cut.write = Write::accumulate;
      expect(cut, {}, true, "added to zeros");
      expect(base, {.tokens = 1}, true, "one device at a time");
      expect(base, {.workers = 3}, true, "three threads a device");
      cut = base;
      cut.layout = dual;
      expect(cut, {}, false, "swapped");
      cut.options.exchange = StateExchange::gather;
      expect(cut, {}, false, "swapped and gathered");
    }
    // As many pieces on one rank: nothing of a message shows.
    expect_same_bits(run_context(p, {1, contiguous, 8, {.chunks = {.chunk = 4}}}),
                     run_context(p, {4, contiguous, 2, {.chunks = {.chunk = 4}}}), false,
                     "1 and 4");
  }
}

TEST(GdnContextParallel, OnePieceIsTheUnsplitLayer) {
  const auto p = stored_as<float>(long_memory(rows[1].ids, 32, Given::everything));
  const LayerOptions layer{.chunks = {.chunk = 8}, .recurrence = Recurrence::chunked};
  const auto found = run_context(p, {1, dual, 0, {.chunks = layer.chunks}});
  const auto forward = layer_forward(p, layer);
  const auto gradients = layer_backward(p, layer);
  EXPECT_TRUE(same_bits(found.forward.o, forward.o));
  EXPECT_TRUE(same_bits(found.forward.final_recurrent_state, forward.final_recurrent_state));
  EXPECT_TRUE(same_bits(found.gradients.d_qkv, gradients.d_qkv));
  EXPECT_TRUE(same_bits(found.gradients.d_conv_weight, gradients.d_conv_weight));
  EXPECT_TRUE(same_bits(found.gradients.d_A_log, gradients.d_A_log));
  EXPECT_TRUE(same_bits(found.gradients.d_recurrent_state, gradients.d_recurrent_state));
}

TEST(GdnContextParallel, Bfloat16StorageAndGroups) {
  constexpr Dims wide_heads{
      .key_heads = 1, .value_heads = 3, .key_dim = 33, .value_dim = 40, .kernel = 3};
  auto p = random_problem(wide_heads, rows[1].ids, 33, Given::everything);
  test::set_decay(p, [](std::int64_t, std::int64_t) { return -1e-3; });
  const auto stored = stored_as<bfloat16, float>(p);
  expect_close(run_context(stored, {3, dual, 0, {.chunks = {.chunk = 7}}}), layer_forward(stored),
               layer_backward(stored), 1e-5, "bf16");
  Dims pointwise = small;
  pointwise.kernel = 1;
  const auto q = random_problem(pointwise, rows[1].ids, 34, Given::bias);
  expect_close(run_context(q, {4, dual, 0, {.chunks = {.chunk = 4}}}), reference_forward(q),
               reference_backward(q), 1e-12, "kernel 1");
}

/// Rows cut into documents and padding at random, as many tokens as the pieces need.
TEST(GdnContextParallel, AgreesWithTheReferenceOnRandomRows) {
  Random random(35);
  for (int i = 0; i < 40; ++i) {
    const std::int64_t ranks = random.integer(1, 4);
    const bool swapped = random.chance(0.5);
    const std::int64_t each = swapped && ranks > 1 ? 2 : random.integer(1, 3);
    Dims dims = small;
    dims.kernel = random.integer(1, 5);
    const std::int64_t length = std::max<std::int64_t>(dims.kernel - 1, random.integer(1, 9));
    Ids ids;
    std::int32_t id = 0;
    while (static_cast<std::int64_t>(ids.size()) < ranks * each * length) {
      id += static_cast<std::int32_t>(random.integer(0, 1));
      ids.insert(ids.end(), static_cast<std::size_t>(random.integer(1, 12)),
                 random.chance(0.25) ? 0 : id % 3 + 1);
    }
    ids.resize(static_cast<std::size_t>(ranks * each * length));
    auto p = random_problem(dims, ids, 500U + static_cast<unsigned>(i), allowed(ids));
    if (random.chance(0.5)) {
      test::set_decay(p, [](std::int64_t, std::int64_t) { return -1e-3; });
    }
    const auto poison_padding = [&](std::vector<double>& values, std::int64_t cols) {
      for (std::size_t t = 0; t < ids.size(); ++t) {
        if (ids[t] == 0) {
          std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(t) * cols, cols,
                      test::poison<double>());
        }
      }
    };
    poison_padding(p.qkv, dims.qkv_columns());
    poison_padding(p.a, dims.value_heads);
    poison_padding(p.b, dims.value_heads);
    poison_padding(p.d_o, dims.output_columns());
    const Cut cut{ranks,
                  swapped ? dual : contiguous,
                  each,
                  {.chunks = {.chunk = random.integer(1, 9),
                              .chunking = random.chance(0.3) ? Chunking::grid : Chunking::aligned},
                   .exchange = random.chance(0.5) ? StateExchange::chain : StateExchange::gather},
                  random.chance(0.5)};
    expect_close(run_context(p, cut), reference_forward(p), reference_backward(p), 1e-12,
                 "row " + std::to_string(i) + ", " + describe(cut));
  }
}

/// Wire bytes of one phase and label, over all ranks and of each.
std::int64_t wire(const Ledger& ledger, Phase phase, const std::string& label,
                  std::optional<std::int64_t> device = {}) {
  return ledger.sum({.device = device, .phase = phase, .label = label}).wire_bytes;
}

TEST(GdnContextParallel, SendsTheBytesOfTheTable) {
  const auto p = stored_as<bfloat16, float>(long_memory(rows[0].ids, 36, Given::everything));
  const std::int64_t state = small.value_heads * small.key_dim * small.value_dim * 4;
  const std::int64_t transition = small.value_heads * small.key_dim * small.key_dim * 4;
  const std::int64_t window = (small.kernel - 1) * small.qkv_columns();
  const std::int64_t parameters =
      (small.kernel * small.qkv_columns() + small.qkv_columns() + 2 * small.value_heads) * 4;
  for (const std::int64_t ranks : {1, 2, 3, 4}) {
    for (const auto layout : {contiguous, dual}) {
      const std::int64_t borders = layout == dual ? 2 * (ranks - 1) : ranks - 1;
      const std::int64_t each = layout == dual && ranks > 1 ? 2 : 1;
      for (const auto exchange : {StateExchange::chain, StateExchange::gather}) {
        const Cut cut{ranks, layout, 0, {.chunks = {.chunk = 4}, .exchange = exchange}};
        const auto run = run_context(p, cut);
        const std::int64_t states = exchange == StateExchange::chain
                                        ? borders * state
                                        : ranks * (ranks - 1) * each * (state + transition);
        for (const Phase phase : {Phase::forward, Phase::backward}) {
          EXPECT_EQ(wire(run.ledger, phase, "gdn.states"), states) << describe(cut);
        }
        EXPECT_EQ(wire(run.ledger, Phase::forward, "gdn.windows"), borders * window * 2);
        EXPECT_EQ(wire(run.ledger, Phase::backward, "gdn.windows"), borders * window * 4);
        EXPECT_EQ(wire(run.ledger, Phase::backward, "gdn.parameters"),
                  2 * (ranks - 1) * parameters);
        if (exchange == StateExchange::chain) {
          EXPECT_EQ(run.ledger.count({.device = 0, .phase = Phase::forward, .label = "gdn.states"}),
                    borders);
        }
      }
    }
  }
}

TEST(GdnContextParallel, EveryRanksBytesAndScratchAreThoseOfTheFormulas) {
  for (const Row& each : rows) {
    const auto p = stored_as<float>(random_problem(small, each.ids, 37, allowed(each.ids)));
    for (const Cut& cut : every_cut()) {
      const std::string name = std::string(each.name) + ", " + describe(cut);
      const ContextRow context{{cut.layout, 48, cut.ranks}, p.segment_ids, cut.pieces_per_rank};
      const ContextPieces pieces("test", context, p.options.initial_segment, small.kernel, true);
      Dims dims = p.dims;
      dims.tokens = 48 / cut.ranks;
      const auto run = run_context(p, cut);
      const auto parameters =
          static_cast<std::int64_t>(p.conv_weight.size() + p.conv_bias.size() + 2 * p.A_log.size());
      for (std::int64_t rank = 0; rank < cut.ranks; ++rank) {
        const auto at = static_cast<std::size_t>(rank);
        const auto forward =
            context_forward_traffic<float>(dims, pieces, rank, cut.options.exchange);
        const auto backward =
            context_backward_traffic<float>(dims, pieces, rank, cut.options.exchange, parameters);
        EXPECT_EQ(wire(run.ledger, Phase::forward, "gdn.windows", rank), forward.windows) << name;
        EXPECT_EQ(wire(run.ledger, Phase::forward, "gdn.states", rank), forward.states) << name;
        EXPECT_EQ(wire(run.ledger, Phase::backward, "gdn.windows", rank), backward.windows) << name;
        EXPECT_EQ(wire(run.ledger, Phase::backward, "gdn.states", rank), backward.states) << name;
        EXPECT_EQ(wire(run.ledger, Phase::backward, "gdn.parameters", rank), backward.parameters);
        EXPECT_EQ(run.ledger.sum({.device = rank}).wire_bytes, forward.total() + backward.total());
        const auto forward_bytes =
            context_forward_workspace_bytes<float>(dims, pieces, cut.options, true);
        const auto backward_bytes =
            context_backward_workspace_bytes<float>(dims, pieces, rank, cut.options, parameters);
        EXPECT_LE(run.forward_row_bytes[at], forward_bytes.row) << name;
        EXPECT_LE(run.forward_thread_bytes[at], forward_bytes.thread) << name;
        EXPECT_LE(run.row_bytes[at], backward_bytes.row) << name;
        EXPECT_LE(run.thread_bytes[at], backward_bytes.thread) << name;
        EXPECT_GE(2 * run.row_bytes[at], backward_bytes.row) << name;
      }
    }
  }
}

TEST(GdnContextParallel, NothingGoesWhereADocumentStarts) {
  // Pieces of 6 that each begin with a document: not one message but the parameters'.
  const auto apart = stored_as<float>(random_problem(small, row({6, 6, 6, 6, 6, 6, 6, 6}), 38));
  const auto none = run_context(apart, {4, dual, 0, {}});
  EXPECT_EQ(none.ledger.count({.device = 0}), 1);
  // A piece with a start inside sends its state, but has no transition.
  const auto p = long_memory(row({20, 28}), 39, Given::everything);
  const auto run = run_context(p, {4, contiguous, 0, {}});
  EXPECT_TRUE(std::isnan(run.transitions[0][0])) << "the first piece knows its state";
  EXPECT_TRUE(std::isnan(run.transitions[1][0])) << "a document starts in it";
  EXPECT_FALSE(std::isnan(run.transitions[2][0]));
  EXPECT_TRUE(std::isnan(run.transitions[3][0])) << "nothing comes after it";
  // Trailing padding asks for a state only if the caller does.
  const auto padded = long_memory(row({20, -28}), 40, Given::everything);
  Cut cut{4, contiguous, 0, {}};
  EXPECT_EQ(run_context(padded, cut)
                .ledger.count({.device = 0, .phase = Phase::forward, .label = "gdn.states"}),
            3);
  cut.options.final_state = false;
  auto without = padded;
  without.d_final_recurrent_state.clear();
  const auto short_run = run_context(without, cut);
  EXPECT_EQ(short_run.ledger.count({.device = 0, .phase = Phase::forward, .label = "gdn.states"}),
            1);
  EXPECT_TRUE(close(short_run.gradients.d_qkv, reference_backward(without).d_qkv, 1e-12));
}

TEST(GdnContextParallel, RefusesBeforeAnythingMoves) {
  const auto p = long_memory(rows[1].ids, 41, Given::everything);
  const auto expect = [&](const Problem<double>& problem, const Cut& cut, const char* argument) {
    try {
      static_cast<void>(run_context(problem, cut));
      ADD_FAILURE() << argument << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), argument) << error.what();
    }
  };
  auto long_window = small;
  long_window.kernel = 8;
  expect(random_problem(long_window, rows[0].ids, 1), {4, dual, 0, {}}, "row.partition.positions");
  expect(p, {3, dual, 1, {}}, "row.pieces_per_rank");
  expect(p, {2, contiguous, 5, {}}, "row.pieces_per_rank");
  expect(p, {2, ContextLayout::striped, 0, {}}, "row.partition.layout");
  expect(p, {2, contiguous, 0, {.chunks = {.chunk = 0}}}, "options.chunk");
  auto negative = p;
  negative.segment_ids[30] = -1;
  expect(negative, {2, contiguous, 0, {}}, "row.segment_ids[30]");
  auto behind_padding = long_memory(row({-13, 20, 15}), 42, Given::bias);
  behind_padding.recurrent_state.assign(
      static_cast<std::size_t>(small.state_rows() * small.value_dim), 1.0);
  expect(behind_padding, {2, contiguous, 0, {}}, "row.segment_ids[0]");
}

TEST(GdnContextParallel, FinalStatesMayLieWhereTheGivenOnesDo) {
  const auto p = long_memory(rows[0].ids, 43, Given::everything);
  const auto expected = run_context(p, {2, dual, 0, {.chunks = {.chunk = 4}}});
  const ContextPartition partition(dual, 48, 2);
  Dims dims = p.dims;
  dims.tokens = partition.shard();
  LocalMesh mesh({.fsdp = 2, .context = 2});
  mesh.run([&](auto& device) {
    const std::int64_t rank = mesh::axis_index(device, {Axis::context});
    const auto permuted = [&](const std::vector<double>& from, std::int64_t cols) {
      std::vector<double> to;
      for (std::int64_t i = 0; i < partition.shard(); ++i) {
        const std::int64_t t = partition.source(rank * partition.shard() + i);
        to.insert(to.end(), from.begin() + t * cols, from.begin() + (t + 1) * cols);
      }
      return to;
    };
    auto mine = p;
    mine.dims = dims;
    mine.qkv = permuted(p.qkv, dims.qkv_columns());
    mine.a = permuted(p.a, dims.value_heads);
    mine.b = permuted(p.b, dims.value_heads);
    Inputs<double> inputs = mine.inputs();
    inputs.segment_ids = {};
    std::vector<double> o(static_cast<std::size_t>(dims.tokens * dims.output_columns()));
    LayerScratch scratch;
    // Nothing is kept for a backward, and both states are updated in place.
    context_forward(
        device, dims, {partition, p.segment_ids}, inputs, p.options, {.chunks = {.chunk = 4}},
        Outputs<double, double>{
            .o = {o.data(), dims.tokens, dims.output_columns()},
            .final_recurrent_state = {mine.recurrent_state.data(), dims.state_rows(),
                                      dims.value_dim},
            .final_conv_state = {mine.conv_state.data(), dims.window_rows(), dims.qkv_columns()}},
        ContextResiduals<double, double>{}, scratch);
    EXPECT_TRUE(same_bits(o, permuted(expected.forward.o, dims.output_columns())));
    const ContextPieces pieces("test", {partition, p.segment_ids}, p.options.initial_segment,
                               dims.kernel, true);
    EXPECT_EQ(
        scratch.row_high_water_bytes(),
        context_forward_workspace_bytes<double>(dims, pieces, {.chunks = {.chunk = 4}}, false).row);
    if (rank == 0) {
      EXPECT_TRUE(same_bits(mine.recurrent_state, expected.forward.final_recurrent_state));
      EXPECT_TRUE(same_bits(mine.conv_state, expected.forward.final_conv_state));
    } else {
      EXPECT_EQ(mine.recurrent_state, p.recurrent_state);
      EXPECT_EQ(mine.conv_state, p.conv_state);
    }
  });
}

TEST(GdnContextParallel, CountsItsWork) {
  const ContextRow context{{dual, 48, 2}, rows[0].ids};
  const ContextPieces pieces("test", context, 0, small.kernel, true);
  Dims dims = small;
  dims.tokens = 24;
  Dims piece = small;
  piece.tokens = 12;
  const ChunkOptions options{.chunk = 4};
  const auto layer = layer_forward_cost<float, float, float, float>(piece, options);
  const Cost front = context_forward_cost<float, float, float, float>(dims, pieces, 0, options);
  const Cost middle = context_forward_cost<float, float, float, float>(dims, pieces, 1, options);
  const std::int64_t states = chunked_states_cost<float, float>(piece, options).flops +
                              2 * small.kernel * 12 * small.qkv_columns();
  const std::int64_t transition =
      transitions_cost<float, float>(piece, options).flops + 2 * 4 * 5 * 5 * 3;
  EXPECT_EQ(front.flops, 2 * layer.flops + states) << "pieces 0 and 3: the last has no map";
  EXPECT_EQ(middle.flops, 2 * layer.flops + 2 * (states + transition));
  const Cost back = context_backward_cost<float, float, float, float>(dims, pieces, 1, options);
  const auto backward = layer_backward_cost<float, float, float, float>(piece, options);
  EXPECT_GT(back.flops, 2 * backward.flops);
}

}  // namespace
}  // namespace heddle::gdn

#include "heddle/gdn/context_parallel.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/context_calls.hpp"
#include "gdn/layer_calls.hpp"
#include "gdn/problem.hpp"
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
        const std::string name = std::string(each.name) + ", " + describe(cut);
        expect_close(run_context(p, cut), forward, gradients, 1e-12, name);
        if (remembers) {
          expect_close(run_context(single, cut), forward, gradients, 1e-5, name + " f32");
        }
      }
    }
  }
}

}  // namespace
}  // namespace heddle::gdn

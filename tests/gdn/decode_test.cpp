#include "heddle/gdn/decode.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/problem.hpp"
#include "heddle/core/isa.hpp"
#include "heddle/gdn/reference.hpp"
#include "support/compare.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: the window not shifted by a token, or not by padding, or by
// padding before the row's end; a start that keeps the state, or reads the window; a sequence's slot
// taken for another's, or its number for it; slot 0 written; has_initial ignored; the decay of a first
// token kept; o of a filler left as it was; the last, narrower panel of a state lost.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;
using test::ForwardResult;
using test::Given;
using test::Problem;

using Ids = std::vector<std::int32_t>;

constexpr Dims small{.key_heads = 2, .value_heads = 4, .key_dim = 3, .value_dim = 2, .kernel = 4};
constexpr Dims uneven{
    .key_heads = 2, .value_heads = 4, .key_dim = 20, .value_dim = 72, .kernel = 4};

const Ids rows[] = {
    {},
    {5},
    {5, 5, 5, 5, 5, 5, 5},
    {0, 0, 0},
    {0, 0, 5, 5},
    {5, 0, 5, 0, 0, 5, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 5},
    {5, 5, 2, 2, 2, 5, 5},
    {5, 5, 0, 2, 0, 2, 2, 0, 0},
    {5, 0, 0, 0},
    {0, 5, 0, 5},
};

template <class S>
ForwardResult<AccumulatorOf<S>, S, AccumulatorOf<S>> decoded(const Problem<S>& p) {
  using A = AccumulatorOf<S>;
  ForwardResult<A, S, A> found(p.dims);
  LayerScratch scratch;
  decode(p.dims, p.inputs(), p.options, found.outputs(p.dims), scratch);
  return found;
}

template <class S>
void expect_prefill(const Problem<S>& p, double tolerance) {
  using A = AccumulatorOf<S>;
  ForwardResult<A, S, A> expected(p.dims);
  reference::forward(p.dims, p.inputs(), p.options, expected.outputs(p.dims));
  const auto found = decoded(p);
  if (p.dims.tokens > 0) {
    EXPECT_TRUE(close(found.o, expected.o, tolerance));
  }
  EXPECT_TRUE(close(found.final_recurrent_state, expected.final_recurrent_state, tolerance));
  EXPECT_TRUE(same_bits(found.final_conv_state, expected.final_conv_state));
}

TEST(GdnDecode, AgreesWithThePrefill) {
  for (const Dims& dims : {small, uneven}) {
    for (const Ids& ids : rows) {
      SCOPED_TRACE(::testing::PrintToString(ids));
      expect_prefill(test::random_problem(dims, ids, 1, Given::bias), 1e-12);
      if (ids.empty() || ids[0] > 0) {
        const Problem<double> p = test::random_problem(dims, ids, 2, Given::everything);
        expect_prefill(p, 1e-12);
        expect_prefill(test::stored_as<float>(p), 5e-6);
        expect_prefill(test::stored_as<bfloat16>(p), 5e-6);
        Problem<double> other = p;
        other.options.initial_segment = 3;
        expect_prefill(other, 1e-12);
      }
    }
  }
}

TEST(GdnDecode, UnderEachOptionAndKernel) {
  for (const std::int64_t kernel : {1, 2, 6}) {
    Dims shape = small;
    shape.kernel = kernel;
    Problem<double> p = test::random_problem(shape, rows[7], 3, Given::everything);
    p.options.norm = NormMode::clamp;
    p.options.eps = 0.5;
    p.options.beta_range = BetaRange::doubled;
    expect_prefill(p, 1e-12);
    auto rounded = test::stored_as<bfloat16>(p);
    rounded.options.conv_output = ConvOutput::storage;
    expect_prefill(rounded, 5e-6);
  }
}

TEST(GdnDecode, NaNInOneDocumentOrInAForeignStateReachesNoOther) {
  Problem<float> p =
      test::stored_as<float>(test::random_problem(small, {5, 5, 2, 2, 2}, 4, Given::everything));
  const auto clean = decoded(p);
  std::fill_n(p.qkv.begin(), 2 * small.qkv_columns(), poison<float>());
  std::fill(p.recurrent_state.begin(), p.recurrent_state.end(), poison<float>());
  std::fill(p.conv_state.begin(), p.conv_state.end(), poison<float>());
  const auto found = decoded(p);
  const auto document = [](const std::vector<float>& o) {
    return std::vector<float>(o.begin() + 2 * small.output_columns(), o.end());
  };
  EXPECT_TRUE(same_bits(document(found.o), document(clean.o)));
  EXPECT_TRUE(same_bits(found.final_recurrent_state, clean.final_recurrent_state));
}

/// A serving cache of so many slots, poisoned.
template <class S, class A = AccumulatorOf<S>>
struct Cache {
  Dims dims;
  std::int64_t slots;
  std::vector<S> conv;
  std::vector<A> recurrent;

  Cache(const Dims& of, std::int64_t count)
      : dims(of),
        slots(count),
        conv(static_cast<std::size_t>(count * of.window_rows() * of.qkv_columns()), poison<S>()),
        recurrent(static_cast<std::size_t>(count * of.state_rows() * of.value_dim), poison<A>()) {}

  [[nodiscard]] DecodeStates<S, A> states() {
    return {.conv = test::matrix(conv, slots * dims.window_rows(), dims.qkv_columns()),
            .recurrent = test::matrix(recurrent, slots * dims.state_rows(), dims.value_dim)};
  }
};

template <class S>
DecodeInputs<S> decode_inputs(const Problem<S>& p, const Ids& slots,
                              const std::vector<std::uint8_t>& has_initial) {
  const auto all = p.inputs();
  return {.qkv = all.qkv,
          .conv_weight = all.conv_weight,
          .conv_bias = all.conv_bias,
          .a = all.a,
          .b = all.b,
          .A_log = all.A_log,
          .dt_bias = all.dt_bias,
          .slots = slots,
          .has_initial = has_initial};
}

/// Sequences that step together, each from a slot of its own, some begun later than others.
template <class S>
void expect_sequences_alone(const Dims& shape) {
  using A = AccumulatorOf<S>;
  const Ids slot_of{3, 1, 4};
  const std::vector<std::int64_t> first_step{0, 2, 1};
  const std::int64_t steps = 6;
  std::vector<Problem<S>> sequences;
  for (std::size_t i = 0; i < 3; ++i) {
    const auto tokens = static_cast<std::size_t>(steps - first_step[i]);
    auto p = test::stored_as<S>(
        test::random_problem(shape, Ids(tokens, 1), 10U + static_cast<unsigned>(i), Given::bias));
    if (i > 0) {
      p.conv_weight = sequences[0].conv_weight;
      p.conv_bias = sequences[0].conv_bias;
      p.A_log = sequences[0].A_log;
      p.dt_bias = sequences[0].dt_bias;
    }
    sequences.push_back(p);
  }
  Cache<S> cache(shape, 6);
  const Cache<S> untouched(shape, 6);
  std::vector<std::vector<A>> o(3);
  LayerScratch scratch;
  for (std::int64_t step = 0; step < steps; ++step) {
    // Three sequences, and a filler between them.
    auto batch = sequences[0];
    batch.dims.tokens = 4;
    batch.qkv.assign(static_cast<std::size_t>(4 * shape.qkv_columns()), poison<S>());
    batch.a.assign(static_cast<std::size_t>(4 * shape.value_heads), poison<S>());
    batch.b = batch.a;
    Ids slots(4, 0);
    std::vector<std::uint8_t> has_initial(4, 0);
    for (std::size_t i = 0; i < 3; ++i) {
      const std::size_t row = i == 0 ? 0 : i + 1;
      const std::int64_t t = step - first_step[i];
      if (t < 0) {
        continue;
      }
      const auto copy = [&](const std::vector<S>& from, std::vector<S>& to, std::int64_t cols) {
        std::copy_n(from.begin() + t * cols, cols, to.begin() + static_cast<long>(row) * cols);
      };
      copy(sequences[i].qkv, batch.qkv, shape.qkv_columns());
      copy(sequences[i].a, batch.a, shape.value_heads);
      copy(sequences[i].b, batch.b, shape.value_heads);
      slots[row] = slot_of[i];
      has_initial[row] = t > 0 ? 1 : 0;
    }
    std::vector<A> out(static_cast<std::size_t>(4 * shape.output_columns()), poison<A>());
    decode_step(batch.dims, decode_inputs(batch, slots, has_initial), batch.options, cache.states(),
                MatrixView<A>(out.data(), 4, shape.output_columns()), scratch);
    for (std::size_t row = 0; row < 4; ++row) {
      const std::vector<A> values(
          out.begin() + static_cast<long>(row) * shape.output_columns(),
          out.begin() + static_cast<long>(row + 1) * shape.output_columns());
      if (slots[row] == 0) {
        EXPECT_EQ(values, std::vector<A>(values.size(), A(0)));
      } else {
        auto& sequence = o[row == 0 ? 0 : row - 1];
        sequence.insert(sequence.end(), values.begin(), values.end());
      }
    }
  }
  EXPECT_EQ(scratch.row_high_water_bytes(), (DecodeWorkspaceBytes<S>::row(shape)));
  EXPECT_EQ(scratch.thread_high_water_bytes(), (DecodeWorkspaceBytes<S>::thread(shape)));
  for (std::size_t i = 0; i < 3; ++i) {
    const auto alone = decoded(sequences[i]);
    EXPECT_TRUE(same_bits(o[i], alone.o)) << i;
    const auto part = [&](const auto& values, std::int64_t size) {
      using T = typename std::remove_cvref_t<decltype(values)>::value_type;
      return std::vector<T>(values.begin() + slot_of[i] * size,
                            values.begin() + (slot_of[i] + 1) * size);
    };
    EXPECT_TRUE(same_bits(part(cache.recurrent, shape.state_rows() * shape.value_dim),
                          alone.final_recurrent_state));
    EXPECT_TRUE(same_bits(part(cache.conv, shape.window_rows() * shape.qkv_columns()),
                          alone.final_conv_state));
  }
  for (const std::int64_t slot : {0, 2, 5}) {
    const auto slot_bits = [&](const auto& values, std::int64_t size) {
      using T = typename std::remove_cvref_t<decltype(values)>::value_type;
      return std::vector<T>(values.begin() + slot * size, values.begin() + (slot + 1) * size);
    };
    EXPECT_TRUE(same_bits(slot_bits(cache.recurrent, shape.state_rows() * shape.value_dim),
                          slot_bits(untouched.recurrent, shape.state_rows() * shape.value_dim)));
  }
}

TEST(GdnDecode, SequencesInSlotsStepAsEachDoesAlone) {
  expect_sequences_alone<float>(uneven);
  expect_sequences_alone<bfloat16>(small);
  expect_sequences_alone<double>(small);
  Dims no_window = small;
  no_window.kernel = 1;
  expect_sequences_alone<float>(no_window);
}

TEST(GdnDecode, SameBitsOnEveryPathAndForAnyNumberOfThreads) {
  const auto p =
      test::stored_as<float>(test::random_problem(uneven, rows[5], 5, Given::everything));
  const auto expected = decoded(p);
  for (const Path path : available_paths()) {
    const ScopedPath scoped(path);
    EXPECT_TRUE(same_bits(decoded(p).o, expected.o)) << path_name(path);
  }
  for (const int threads : {1, 3}) {
    heddle::test::with_threads(threads, [&] { EXPECT_TRUE(same_bits(decoded(p).o, expected.o)); });
  }
}

TEST(GdnDecode, RefusesWhatNoSequenceCanBe) {
  auto p = test::stored_as<float>(test::random_problem(small, {1, 1}, 6, Given::bias));
  Cache<float> cache(small, 3);
  std::vector<float> o(static_cast<std::size_t>(2 * small.output_columns()), 7.0F);
  LayerScratch scratch;
  const auto refusal = [&](const Ids& slots, std::size_t initials, auto change) {
    DecodeStates<float> states = cache.states();
    change(states);
    return heddle::test::thrown_text<Error>([&] {
      const std::vector<std::uint8_t> has_initial(initials, 0);
      decode_step(p.dims, decode_inputs(p, slots, has_initial), p.options, states,
                  MatrixView<float>(o.data(), 2, small.output_columns()), scratch);
    });
  };
  const auto nothing = [](auto&) {};
  const std::string where = "gdn::decode_step: ";
  EXPECT_EQ(refusal({1, 3}, 2, nothing), where + "slots[1] = 3: must be in [0, 3)");
  EXPECT_EQ(refusal({-1, 1}, 2, nothing), where + "slots[0] = -1: must be in [0, 3)");
  EXPECT_EQ(refusal({2, 2}, 2, nothing), where + "slots[1] = 2: must be of one sequence alone");
  EXPECT_EQ(refusal({1}, 2, nothing), where + "slots.size = 1: must equal dims.tokens (2)");
  EXPECT_EQ(refusal({1, 2}, 1, nothing),
            where + "has_initial.size = 1: must equal dims.tokens (2)");
  EXPECT_EQ(refusal({1, 2}, 2, [](auto& states) { states.conv = states.conv.row_block(0, 2); }),
            where + "states.conv.rows = 2: must equal slots * (kernel - 1) (9)");
  EXPECT_EQ(refusal({1, 2}, 2,
                    [](auto& states) {
                      states.recurrent = states.recurrent.row_block(0, states.recurrent.rows() - 1);
                    }),
            where + "states.recurrent.rows = 35: must equal slots * state_rows (24)");
  EXPECT_EQ(o, std::vector<float>(o.size(), 7.0F));
}

}  // namespace
}  // namespace heddle::gdn

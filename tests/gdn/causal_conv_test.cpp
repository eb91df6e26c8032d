#include "heddle/gdn/causal_conv.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/isa.hpp"
#include "heddle/gdn/reference_conv.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: the last tap not the current token; a run of whole windows
// begun a token too early or late; taps across a document's start, or skipping padding; the state read
// in a later document, or where the halo is not valid; SiLU' dropped; d_z of the range behind lost, not
// moved over padding, or of another document; the state's taps missing from d_weight; the final
// window's cotangent dropped, clamped, not passed through, or given to a masked slot; bias forgotten;
// overwrite and accumulate swapped; padding read or left unwritten; a block of the parameter sums
// lost; the vector behind the last whole one.

namespace heddle::gdn {
namespace {

using heddle::test::close;
using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;

using Ids = std::vector<std::int32_t>;

/// A column block that owns its arrays, exact in bf16; an empty one is not given.
template <class S, class P = S, class A = AccumulatorOf<S>>
struct Conv {
  std::int64_t columns = 1;
  std::int64_t kernel = 4;
  Ids segment_ids{};
  std::int32_t initial_segment = 0;
  std::vector<S> x{}, state{};
  std::vector<P> weight{}, bias{};
  std::vector<A> d_y{}, d_final{};
  std::vector<std::uint8_t> halo_valid{};

  [[nodiscard]] std::int64_t tokens() const {
    return static_cast<std::int64_t>(segment_ids.size());
  }
  [[nodiscard]] Segments segments() const { return {segment_ids, initial_segment}; }

  template <class Inputs>
  [[nodiscard]] Inputs as() const {
    Inputs inputs;
    inputs.x = {x.data(), tokens(), columns};
    inputs.weight = {weight.data(), columns, kernel};
    inputs.bias = bias;
    inputs.state = {state.empty() ? nullptr : state.data(), kernel - 1, columns};
    return inputs;
  }
  [[nodiscard]] ConvInputs<S, P> inputs() const {
    auto inputs = as<ConvInputs<S, P>>();
    inputs.halo_valid = halo_valid;
    return inputs;
  }
  [[nodiscard]] ConstMatrixView<A> d_final_view() const {
    return {d_final.empty() ? nullptr : d_final.data(), kernel - 1, columns};
  }
};

template <class To, class From>
std::vector<To> converted(const std::vector<From>& from) {
  std::vector<To> to;
  for (const From value : from) {
    to.push_back(static_cast<To>(static_cast<float>(value)));
  }
  return to;
}

template <class S, class P, class A, class From>
Conv<S, P, A> stored_as(const From& c) {
  return {.columns = c.columns,
          .kernel = c.kernel,
          .segment_ids = c.segment_ids,
          .initial_segment = c.initial_segment,
          .x = converted<S>(c.x),
          .state = converted<S>(c.state),
          .weight = converted<P>(c.weight),
          .bias = converted<P>(c.bias),
          .d_y = converted<A>(c.d_y),
          .d_final = converted<A>(c.d_final),
          .halo_valid = c.halo_valid};
}

enum class Given { nothing, state, everything };

Conv<bfloat16, bfloat16, double> random_conv(const Ids& ids, std::int32_t initial_segment,
                                             std::int64_t kernel, std::int64_t columns, Given given,
                                             std::uint64_t seed) {
  Random random(seed);
  Conv<bfloat16, bfloat16, double> c{
      .columns = columns, .kernel = kernel, .segment_ids = ids, .initial_segment = initial_segment};
  c.x = random.normals<bfloat16>(c.tokens() * columns);
  c.weight = random.normals<bfloat16>(columns * kernel);
  c.d_y = random.normals<double>(c.tokens() * columns);
  for (std::int64_t t = 0; t < c.tokens(); ++t) {
    if (ids[static_cast<std::size_t>(t)] <= 0) {  // never to be read
      std::fill_n(c.x.begin() + t * columns, columns, poison<bfloat16>());
      std::fill_n(c.d_y.begin() + t * columns, columns, poison<double>());
    }
  }
  if (given == Given::everything) {
    c.bias = random.normals<bfloat16>(columns);
    c.d_final = random.normals<double>((kernel - 1) * columns);
  }
  if (given != Given::nothing && (ids.empty() || ids[0] > 0)) {
    c.state = random.normals<bfloat16>((kernel - 1) * columns);
  }
  return c;
}

template <class S, class A>
struct Results {
  std::vector<A> y, d_x, d_weight, d_bias, d_state;
  std::vector<S> final_state;
};

template <class S, class P, class A>
Results<S, A> poisoned(const Conv<S, P, A>& c, A before = poison<A>()) {
  Results<S, A> out;
  out.y.assign(c.x.size(), poison<A>());
  out.final_state.assign(static_cast<std::size_t>((c.kernel - 1) * c.columns), poison<S>());
  out.d_x = out.y;
  out.d_weight.assign(c.weight.size(), before);
  out.d_bias.assign(static_cast<std::size_t>(c.columns), before);
  out.d_state.assign(c.state.size(), poison<A>());
  return out;
}

template <class Cotangents, class S, class P, class A>
Cotangents cotangents_of(const Conv<S, P, A>& c, Results<S, A>& out, Write write) {
  return {.d_x = {out.d_x.data(), c.tokens(), c.columns},
          .d_weight = {{out.d_weight.data(), c.columns, c.kernel}, write},
          .d_bias = {out.d_bias, write},
          .d_state = {c.state.empty() ? nullptr : out.d_state.data(), c.kernel - 1, c.columns}};
}

template <class S, class P, class A>
Results<S, A> fast(const Conv<S, P, A>& c, ConvOutput output = ConvOutput::accumulator,
                   Write write = Write::overwrite, A before = poison<A>()) {
  Results<S, A> out = poisoned(c, before);
  Workspaces workspaces;
  const Segments segments = c.segments();
  causal_conv<S, P, A>(segments, c.inputs(), output, {out.y.data(), c.tokens(), c.columns},
                       workspaces);
  conv_final_state<S, P>(segments, c.inputs(), {out.final_state.data(), c.kernel - 1, c.columns});
  causal_conv_backward<S, P, A>(segments, c.inputs(), {c.d_y.data(), c.tokens(), c.columns},
                                c.d_final_view(), cotangents_of<ConvCotangents<A>>(c, out, write),
                                workspaces);
  return out;
}

template <class S, class P, class A>
Results<S, A> by_reference(const Conv<S, P, A>& c) {
  Results<S, A> out = poisoned(c);
  std::vector<A> z(c.x.size());
  const Segments segments = c.segments();
  const auto inputs = c.template as<reference::ConvInputs<S, P>>();
  reference::conv_forward<S, P, A>(segments, inputs, ConvOutput::accumulator,
                                   {z.data(), c.tokens(), c.columns},
                                   {out.y.data(), c.tokens(), c.columns});
  reference::conv_final_state<S, P>(segments, inputs,
                                    {out.final_state.data(), c.kernel - 1, c.columns});
  reference::conv_backward<S, P, A>(
      segments, inputs, {z.data(), c.tokens(), c.columns}, {c.d_y.data(), c.tokens(), c.columns},
      c.d_final_view(), cotangents_of<reference::ConvCotangents<A>>(c, out, Write::overwrite));
  return out;
}

template <class S, class A>
void expect_close(const Results<S, A>& actual, const Results<double, double>& expected,
                  double tolerance, const std::string& name) {
  const auto check = [&](const char* what, const auto& a, const std::vector<double>& e) {
    if (!e.empty()) {
      EXPECT_TRUE(close(std::vector<double>(a.begin(), a.end()), e, tolerance))
          << name << " " << what;
    }
  };
  check("y", actual.y, expected.y);
  check("d_x", actual.d_x, expected.d_x);
  check("d_weight", actual.d_weight, expected.d_weight);
  check("d_bias", actual.d_bias, expected.d_bias);
  check("d_state", actual.d_state, expected.d_state);
  std::vector<double> window;
  for (const S value : actual.final_state) {
    window.push_back(static_cast<double>(value));
  }
  EXPECT_EQ(window, expected.final_state) << name;
}

struct Row {
  const char* name;
  Ids ids;
  std::int32_t initial_segment;
};

const Row rows[] = {
    {"one document", {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 0},
    {"continued", {3, 3, 3, 3, 3, 3, 3, 3, 3}, 3},
    {"documents and padding", {3, 3, 0, 3, 1, 0, 1, 2, 0, 0, 2, 2, 2, 2, 2, 2, 5}, 3},
    {"state of another document", {1, 1, 1, 2, 2, 2, 2, 2}, 9},
    {"shorter than the window", {3, 3}, 3},
    {"one token", {3}, 3},
    {"short with trailing padding", {3, 3, 0, 0, 0}, 3},
    {"padding first", {0, 0, 1, 1, 1, 1, 1}, 0},
    {"no token", {0, 0}, 3},
    {"nothing", {}, 3},
};

Ids random_ids(Random& random, std::int64_t tokens) {
  Ids ids;
  std::int32_t id = 0;
  while (static_cast<std::int64_t>(ids.size()) < tokens) {
    const bool padding = random.chance(0.2);
    id += padding ? 0 : static_cast<std::int32_t>(random.integer(0, 1));
    ids.insert(ids.end(), static_cast<std::size_t>(random.integer(1, 90)), padding ? 0 : id + 1);
  }
  ids.resize(static_cast<std::size_t>(tokens));
  return ids;
}

TEST(GdnCausalConv, AgreesWithTheReference) {
  std::uint64_t seed = 1;
  for (const Row& row : rows) {
    for (const std::int64_t kernel : {1, 2, 4, 5}) {
      for (const Given given : {Given::nothing, Given::state, Given::everything}) {
        const auto c = random_conv(row.ids, row.initial_segment, kernel, 19, given, ++seed);
        const auto wide = stored_as<double, double, double>(c);
        const auto expected = by_reference(wide);
        const std::string name = std::string(row.name) + ", kernel " + std::to_string(kernel);
        expect_close(fast(wide), expected, 1e-13, name + " f64");
        expect_close(fast(stored_as<float, float, float>(c)), expected, 2e-6, name + " f32");
        expect_close(fast(stored_as<bfloat16, bfloat16, float>(c)), expected, 2e-6, name + " bf16");
      }
    }
  }
}

TEST(GdnCausalConv, AgreesWithTheReferenceOverManyBlocks) {
  Random random(3);
  for (int i = 0; i < 12; ++i) {
    const std::int64_t tokens = random.integer(100, 700);
    const auto c =
        random_conv(random_ids(random, tokens), 0, i % 3 == 0 ? 3 : 4, random.integer(1, 70),
                    Given::everything, 50U + static_cast<unsigned>(i));
    const auto expected = by_reference(stored_as<double, double, double>(c));
    expect_close(fast(stored_as<bfloat16, float, float>(c)), expected, 5e-6, "bf16");
  }
}

template <class S, class A>
void expect_same_bits(const Results<S, A>& a, const Results<S, A>& b, const std::string& name) {
  EXPECT_TRUE(same_bits(a.y, b.y)) << name;
  EXPECT_TRUE(same_bits(a.d_x, b.d_x)) << name;
  EXPECT_TRUE(same_bits(a.d_weight, b.d_weight)) << name;
  EXPECT_TRUE(same_bits(a.d_bias, b.d_bias)) << name;
  EXPECT_TRUE(same_bits(a.d_state, b.d_state)) << name;
}

TEST(GdnCausalConv, SameBitsOnEveryPathAndForAnyNumberOfThreads) {
  Random random(4);
  Ids ids = random_ids(random, 1100);
  ids[0] = 1;
  const auto c =
      stored_as<bfloat16, bfloat16, float>(random_conv(ids, 1, 4, 1100, Given::everything, 5));
  const auto expected = fast(c);
  for (const Path path : available_paths()) {
    const ScopedPath scoped(path);
    expect_same_bits(fast(c), expected, std::string(path_name(path)));
  }
  for (const int threads : {1, 2, 5}) {
    heddle::test::with_threads(threads, [&] {
      expect_same_bits(fast(c), expected, std::to_string(threads) + " threads");
    });
  }
}

TEST(GdnCausalConv, RangesOfTokensAndColumnsHaveTheBitsOfTheWhole) {
  Random random(6);
  Ids ids = random_ids(random, 150);
  ids[0] = 1;
  const auto c =
      stored_as<bfloat16, float, float>(random_conv(ids, 1, 4, 90, Given::everything, 7));
  const auto whole = fast(c);
  std::vector<float> y(c.x.size(), poison<float>());
  const MatrixView<float> view(y.data(), c.tokens(), c.columns);
  Workspace workspace;
  for (std::int64_t first = 0; first < c.tokens();) {
    const std::int64_t count = std::min(random.integer(0, 40), c.tokens() - first);
    for (const auto& [column, columns] : {std::pair{0L, 33L}, std::pair{33L, 57L}}) {
      causal_conv<bfloat16, float, float>(
          c.segments(), detail::column_block(c.inputs(), column, columns), ConvOutput::accumulator,
          TokenRange{first, count}, view.row_block(first, count).column_block(column, columns),
          workspace);
    }
    first += count;
  }
  EXPECT_TRUE(same_bits(y, whole.y));
  EXPECT_EQ(workspace.high_water_bytes(), causal_conv_workspace_bytes<bfloat16>(57, 4));
}

TEST(GdnCausalConv, ADocumentHasTheSameBitsWhereverItLies) {
  Random random(8);
  const std::int64_t length = 77;
  const auto alone =
      random_conv(Ids(static_cast<std::size_t>(length), 1), 0, 4, 21, Given::nothing, 9);
  const auto expected = fast(stored_as<float, float, float>(alone));
  for (const std::int64_t offset : {1, 3, 64, 70}) {
    Ids ids(static_cast<std::size_t>(offset), 1);
    ids.insert(ids.end(), static_cast<std::size_t>(length), 2);
    ids.insert(ids.end(), 9, 3);
    auto packed = random_conv(ids, 0, 4, 21, Given::nothing, 10);
    packed.weight = alone.weight;
    std::fill(packed.x.begin(), packed.x.end(), poison<bfloat16>());  // the others are NaN
    std::copy(alone.x.begin(), alone.x.end(), packed.x.begin() + offset * 21);
    std::copy(alone.d_y.begin(), alone.d_y.end(), packed.d_y.begin() + offset * 21);
    const auto found = fast(stored_as<float, float, float>(packed));
    const auto part = [&](const std::vector<float>& v) {
      return std::vector<float>(v.begin() + offset * 21, v.begin() + (offset + length) * 21);
    };
    EXPECT_TRUE(same_bits(part(found.y), expected.y)) << offset;
    EXPECT_TRUE(same_bits(part(found.d_x), expected.d_x)) << offset;
  }
}

/// [0, T) against [0, t) and [t, T) with the state carried over: forward, and backward the other way.
TEST(GdnCausalConv, SplitsAnywhere) {
  const Ids ids{1, 1, 1, 2, 2, 2, 2, 0, 2, 2, 3, 3, 3, 3};
  const std::int64_t columns = 5;
  const auto row =
      stored_as<float, float, float>(random_conv(ids, 1, 4, columns, Given::everything, 11));
  const auto whole = fast(row);
  for (std::int64_t t = 0; t <= row.tokens(); ++t) {
    const auto padding = [&](std::int64_t token) {
      return ids[static_cast<std::size_t>(token)] == 0;
    };
    if (t > 0 && t < row.tokens() && (padding(t) || padding(t - 1))) {
      continue;  // a window that is handed over ends at a token, and the next token follows it
    }
    auto first = row;
    auto second = row;
    first.segment_ids.resize(static_cast<std::size_t>(t));
    second.segment_ids.erase(second.segment_ids.begin(), second.segment_ids.begin() + t);
    second.x.erase(second.x.begin(), second.x.begin() + t * columns);
    second.d_y.erase(second.d_y.begin(), second.d_y.begin() + t * columns);
    second.initial_segment = first.segments().final_segment();
    const auto first_forward = fast(first);
    second.state = first_forward.final_state;
    const auto second_found = fast(second);
    first.d_final = second_found.d_state;
    const auto first_found = fast(first);
    const auto joined = [&](std::vector<float> a, const std::vector<float>& b) {
      a.resize(static_cast<std::size_t>(t * columns));
      a.insert(a.end(), b.begin(), b.end());
      return a;
    };
    EXPECT_TRUE(same_bits(joined(first_found.y, second_found.y), whole.y)) << t;
    EXPECT_TRUE(close(joined(first_found.d_x, second_found.d_x), whole.d_x, 1e-6)) << t;
    EXPECT_EQ(second_found.final_state, whole.final_state) << t;
    EXPECT_TRUE(close(first_found.d_state, whole.d_state, 1e-6)) << t;
    std::vector<float> d_weight = first_found.d_weight;
    for (std::size_t i = 0; i < d_weight.size(); ++i) {
      d_weight[i] += second_found.d_weight[i];
    }
    EXPECT_TRUE(close(d_weight, whole.d_weight, 1e-6)) << t;
  }
}

TEST(GdnCausalConv, AHaloRowThatIsNotValidIsNeitherReadNorGivenACotangent) {
  Random random(12);
  auto c = stored_as<double, double, double>(
      random_conv({4, 4, 4, 4, 4}, 4, 4, 3, Given::everything, 13));
  for (unsigned mask = 0; mask < 8; ++mask) {
    auto masked = c;
    auto zeroed = c;
    masked.halo_valid = {static_cast<std::uint8_t>(mask & 1U), static_cast<std::uint8_t>(mask & 2U),
                         static_cast<std::uint8_t>(mask & 4U)};
    for (std::size_t slot = 0; slot < 3; ++slot) {
      if (masked.halo_valid[slot] == 0) {
        std::fill_n(masked.state.begin() + static_cast<std::ptrdiff_t>(3 * slot), 3,
                    poison<double>());
        std::fill_n(zeroed.state.begin() + static_cast<std::ptrdiff_t>(3 * slot), 3, 0.0);
      }
    }
    auto expected = by_reference(zeroed);
    for (std::size_t i = 0; i < expected.d_state.size(); ++i) {
      expected.d_state[i] = masked.halo_valid[i / 3] == 0 ? 0.0 : expected.d_state[i];
    }
    expect_close(fast(masked), expected, 1e-13, "mask " + std::to_string(mask));
    if (mask == 0) {
      EXPECT_EQ(fast(masked).d_state, std::vector<double>(9, 0.0));
    }
  }
}

TEST(GdnCausalConv, AHaloThatIsNotValidDoesNotEnterTheFinalWindow) {
  auto c = stored_as<double, double, double>(random_conv({4}, 4, 4, 1, Given::everything, 14));
  c.halo_valid = {1, 0, 1};
  const auto found = fast(c);
  EXPECT_EQ(found.final_state, (std::vector<double>{0, c.state[2], c.x[0]}));
  EXPECT_EQ(found.d_state[1], 0);
  EXPECT_NE(found.d_state[2], 0);
}

TEST(GdnCausalConv, StorageRoundsTheOutputOnce) {
  const auto c = stored_as<bfloat16, bfloat16, float>(
      random_conv({1, 1, 1, 1, 1, 1, 2, 2}, 0, 4, 37, Given::everything, 15));
  const auto exact = fast(c);
  const auto rounded = fast(c, ConvOutput::storage);
  std::vector<float> expected;
  for (const float y : exact.y) {
    expected.push_back(static_cast<float>(bfloat16(y)));
  }
  EXPECT_TRUE(same_bits(rounded.y, expected));
  EXPECT_FALSE(same_bits(exact.y, expected));
  const auto wide = stored_as<float, float, float>(c);
  EXPECT_TRUE(same_bits(fast(wide, ConvOutput::storage).y, exact.y))
      << "f32 holds what is computed";
}

TEST(GdnCausalConv, LargeMagnitudesStayFinite) {
  Conv<float> c{.kernel = 1, .segment_ids = Ids(8, 1), .weight = {1}};
  c.x = {-1e30F, -200, -88, -1, 0, 88, 200, 1e30F};
  c.d_y.assign(8, 1.0F);
  const auto found = fast(c);
  const std::vector<double> y{0,   0,   -88 * std::exp(-88.0), -1 / (1 + std::exp(1.0)), 0, 88,
                              200, 1e30};
  const std::vector<double> slope{0, 0, -87 * std::exp(-88.0), 0, 0.5, 1, 1, 1};
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_NEAR(found.y[i], y[i], 1e-6 * std::abs(y[i]) + 1e-37) << i;
    if (i != 3) {
      EXPECT_NEAR(found.d_x[i], slope[i], 1e-6 + 1e-37) << i;
    }
  }
}

TEST(GdnCausalConv, ParametersAreOverwrittenOrAddedToOrLeftAlone) {
  const auto c =
      stored_as<float, float, float>(random_conv({1, 1, 1, 2, 2}, 0, 4, 3, Given::everything, 16));
  const auto overwritten = fast(c);
  const auto added = fast(c, ConvOutput::accumulator, Write::accumulate, 3.0F);
  for (std::size_t i = 0; i < overwritten.d_weight.size(); ++i) {
    EXPECT_EQ(added.d_weight[i], 3.0F + overwritten.d_weight[i]);
  }
  for (std::size_t i = 0; i < overwritten.d_bias.size(); ++i) {
    EXPECT_EQ(added.d_bias[i], 3.0F + overwritten.d_bias[i]);
  }
  std::vector<float> d_x(c.x.size(), poison<float>());
  Workspaces workspaces;
  causal_conv_backward<float, float, float>(
      c.segments(), c.inputs(), {c.d_y.data(), c.tokens(), c.columns}, c.d_final_view(),
      {.d_x = {d_x.data(), c.tokens(), c.columns}, .d_weight = {}, .d_bias = {}, .d_state = {}},
      workspaces);
  EXPECT_TRUE(same_bits(d_x, overwritten.d_x));
}

TEST(GdnCausalConv, StatesMayBeUpdatedInPlace) {
  for (const Row& row : rows) {
    if (!row.ids.empty() && row.ids[0] == 0) {
      continue;
    }
    auto c = stored_as<double, double, double>(
        random_conv(row.ids, row.initial_segment, 4, 3, Given::everything, 17));
    const auto apart = fast(c);
    auto in_place = c;
    conv_final_state<double, double>(in_place.segments(), in_place.inputs(),
                                     {in_place.state.data(), 3, 3});
    EXPECT_EQ(in_place.state, apart.final_state) << row.name;
    auto out = poisoned(c);
    auto cotangents = cotangents_of<ConvCotangents<double>>(c, out, Write::overwrite);
    std::vector<double> d_state = c.d_final;
    cotangents.d_state = {d_state.data(), 3, 3};
    Workspaces workspaces;
    causal_conv_backward<double, double, double>(c.segments(), c.inputs(),
                                                 {c.d_y.data(), c.tokens(), c.columns},
                                                 {d_state.data(), 3, 3}, cotangents, workspaces);
    EXPECT_EQ(d_state, apart.d_state) << row.name;
  }
}

TEST(GdnCausalConv, WritesPastTheCachesWhatItWouldWriteOtherwise) {
  const std::int64_t columns = 2048;
  const std::int64_t tokens = 4100;
  auto c = stored_as<bfloat16, bfloat16, float>(
      random_conv(Ids(1, 1), 0, 4, columns, Given::nothing, 19));
  c.segment_ids.assign(static_cast<std::size_t>(tokens), 1);
  for (std::int64_t i = columns; i < tokens * columns; ++i) {
    c.x.push_back(bfloat16(static_cast<float>(i * 7919 % 1000 - 500) / 256));
    c.d_y.push_back(static_cast<float>(i * 104729 % 1000 - 500) / 512);
  }
  Workspace memory;
  const MatrixView<float> y(memory.take<float>(tokens * columns).data(), tokens, columns);
  const MatrixView<float> d_x(memory.take<float>(tokens * columns).data(), tokens, columns);
  ASSERT_TRUE(detail::streams(y));
  ASSERT_FALSE(detail::streams(y.row_block(0, 4000)));
  ASSERT_FALSE(detail::streams(y.column_block(1, columns - 16)));
  Workspaces workspaces;
  causal_conv<bfloat16, bfloat16, float>(c.segments(), c.inputs(), ConvOutput::accumulator, y,
                                         workspaces);
  causal_conv_backward<bfloat16, bfloat16, float>(
      c.segments(), c.inputs(), {c.d_y.data(), tokens, columns}, {},
      {.d_x = d_x, .d_weight = {}, .d_bias = {}, .d_state = {}}, workspaces);
  EXPECT_LE(workspaces.high_water_bytes(),
            std::max(causal_conv_workspace_bytes<bfloat16>(1024, 4),
                     causal_conv_backward_workspace_bytes<bfloat16>(columns, 4)));
  // A narrower block is written plainly.
  const std::int64_t some = 64;
  std::vector<float> y_part(static_cast<std::size_t>(tokens * some));
  std::vector<float> d_x_part(y_part.size());
  const auto part = detail::column_block(c.inputs(), 512, some);
  causal_conv<bfloat16, bfloat16, float>(c.segments(), part, ConvOutput::accumulator,
                                         {y_part.data(), tokens, some}, workspaces);
  causal_conv_backward<bfloat16, bfloat16, float>(
      c.segments(), part,
      ConstMatrixView<float>(c.d_y.data(), tokens, columns).column_block(512, some), {},
      {.d_x = {d_x_part.data(), tokens, some}, .d_weight = {}, .d_bias = {}, .d_state = {}},
      workspaces);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t i = 0; i < some; ++i) {
      const auto at = static_cast<std::size_t>(t * some + i);
      ASSERT_EQ(y(t, 512 + i), y_part[at]) << t;
      ASSERT_EQ(d_x(t, 512 + i), d_x_part[at]) << t;
    }
  }
}

TEST(GdnCausalConv, RefusesOtherShapes) {
  const auto c =
      stored_as<float, float, float>(random_conv({1, 1, 1}, 1, 4, 2, Given::everything, 20));
  const std::string where = "gdn::causal_conv: ";
  std::vector<float> y(6, 5.0F);
  Workspaces workspaces;
  Workspace workspace;
  const auto refusal = [&](auto change) {
    auto inputs = c.inputs();
    MatrixView<float> out(y.data(), 3, 2);
    change(inputs, out);
    return heddle::test::thrown_text<Error>([&] {
      causal_conv<float, float, float>(c.segments(), inputs, ConvOutput::accumulator, out,
                                       workspaces);
    });
  };
  EXPECT_EQ(refusal([](auto& in, auto&) {
              in.weight = {in.weight.data(), 2, 0};
            }),
            where + "weight.cols = 0: must be >= 1");
  EXPECT_EQ(refusal([](auto& in, auto&) { in.x = in.x.row_block(0, 2); }),
            where + "x.rows = 2: must equal segments.tokens (3)");
  EXPECT_EQ(refusal([](auto& in, auto&) { in.bias = in.bias.first(1); }),
            where + "bias.size = 1: must equal weight.rows (2)");
  EXPECT_EQ(refusal([](auto& in, auto&) { in.state = in.state.row_block(0, 2); }),
            where + "state.rows = 2: must equal weight.cols - 1 (3)");
  const std::vector<std::uint8_t> halo{1};
  EXPECT_EQ(refusal([&](auto& in, auto&) { in.halo_valid = halo; }),
            where + "halo_valid.size = 1: must equal weight.cols - 1 (3)");
  EXPECT_EQ(refusal([](auto&, auto& out) { out = out.column_block(0, 1); }),
            where + "y.cols = 1: must equal weight.rows (2)");
  EXPECT_EQ(heddle::test::thrown_text<Error>([&] {
              causal_conv<float, float, float>(c.segments(), c.inputs(), ConvOutput::accumulator,
                                               TokenRange{2, 2}, {y.data(), 2, 2}, workspace);
            }),
            where + "range.count = 2: must end in the row");
  EXPECT_EQ(y, std::vector<float>(6, 5.0F));

  const std::string backward = "gdn::causal_conv_backward: ";
  const auto backward_refusal = [&](auto change) {
    auto out = poisoned(c);
    auto cotangents = cotangents_of<ConvCotangents<float>>(c, out, Write::overwrite);
    ConstMatrixView<float> d_y(c.d_y.data(), 3, 2);
    ConstMatrixView<float> d_final = c.d_final_view();
    change(d_y, d_final, cotangents);
    const std::string text = heddle::test::thrown_text<Error>([&] {
      causal_conv_backward<float, float, float>(c.segments(), c.inputs(), d_y, d_final, cotangents,
                                                workspaces);
    });
    EXPECT_TRUE(std::isnan(out.d_x[0])) << text;
    return text;
  };
  EXPECT_EQ(backward_refusal([](auto& d_y, auto&, auto&) { d_y = d_y.row_block(0, 1); }),
            backward + "d_y.rows = 1: must equal segments.tokens (3)");
  EXPECT_EQ(
      backward_refusal([](auto&, auto& d_final, auto&) { d_final = d_final.row_block(0, 1); }),
      backward + "d_final_state.rows = 1: must equal weight.cols - 1 (3)");
  EXPECT_EQ(backward_refusal([](auto&, auto&, auto& out) { out.d_x = {}; }),
            backward + "d_x.rows = 0: must equal segments.tokens (3)");
  EXPECT_EQ(backward_refusal([](auto&, auto&, auto& out) {
              out.d_weight.values = out.d_weight.values.row_block(0, 1);
            }),
            backward + "d_weight.rows = 1: must equal weight.rows (2)");
  EXPECT_EQ(backward_refusal(
                [](auto&, auto&, auto& out) { out.d_bias.values = out.d_bias.values.first(1); }),
            backward + "d_bias.size = 1: must equal weight.rows (2)");
  EXPECT_EQ(
      backward_refusal([](auto&, auto&, auto& out) { out.d_state = out.d_state.row_block(0, 1); }),
      backward + "d_state.rows = 1: must equal weight.cols - 1 (3)");
}

}  // namespace
}  // namespace heddle::gdn

#include "heddle/moe/sort.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "heddle/core/isa.hpp"
#include "heddle/core/workspace.hpp"
#include "moe/routed.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/thrown_text.hpp"

// Mutants these tests are written against: the mask on the slot's index instead of its position; `<=
// kept`; slot mod K as the token; weights of position j instead of slot j; the row of a range's or an
// unbuffered window's first position off by one; a dropped slot's row multiplied by 0; weights divided
// by what was kept; a cotangent of a dropped slot not zero, or left unwritten; that of the weights
// divided by them; sums in bf16, in another order or contracted; casts that cut; row offsets in 32 bits;
// accumulate that overwrites; unfilled rows read, or written where nobody asked.

namespace heddle::moe {
namespace {

using heddle::test::close;
using heddle::test::poison;
using heddle::test::Random;
using heddle::test::same_bits;
using test::Ids;
using test::OwnedMap;
using test::random_ids;

/// A window's arrays, poisoned where nothing may be read.
template <class S>
struct Rows {
  using A = AccumulatorOf<S>;

  const OwnedMap& owned;
  RoutingWindow window;
  std::int64_t hidden;
  std::vector<S> tokens, rows;
  std::vector<A> weights;

  Rows(const OwnedMap& map, const RoutingWindow& w, std::int64_t columns, std::uint64_t seed)
      : owned(map), window(w), hidden(columns) {
    Random random(seed);
    tokens = random.normals<S>(map.dims.tokens * hidden);
    weights = random.normals<A>(map.dims.slots());
    rows.assign(static_cast<std::size_t>(window.rows * hidden), poison<S>());
    const std::vector<S> kept = random.normals<S>(window.kept * hidden);
    std::copy(kept.begin(), kept.end(),
              rows.begin() + static_cast<std::ptrdiff_t>(window.first_row * hidden));
  }

  [[nodiscard]] ConstMatrixView<S> token_view() const {
    return {tokens.data(), owned.dims.tokens, hidden};
  }
  [[nodiscard]] ConstMatrixView<S> row_view() const { return {rows.data(), window.rows, hidden}; }
  [[nodiscard]] ConstMatrixView<A> weight_view() const {
    return {weights.data(), owned.dims.tokens, owned.dims.top_k};
  }
  /// The row of a slot by the definition: where the sorted position falls in the window's buffer.
  [[nodiscard]] std::int64_t row_of(std::int64_t slot) const {
    const std::int64_t position = owned.inverse[static_cast<std::size_t>(slot)];
    if (position < window.first_position || position >= window.first_position + window.kept) {
      return -1;
    }
    return position - window.first_position + window.first_row;
  }
  template <class T>
  [[nodiscard]] std::vector<T> of_rows(T value = poison<T>()) const {
    return std::vector<T>(static_cast<std::size_t>(window.rows * hidden), value);
  }
  template <class T>
  [[nodiscard]] std::vector<T> of_tokens(T value = poison<T>()) const {
    return std::vector<T>(static_cast<std::size_t>(owned.dims.tokens * hidden), value);
  }
};

/// The sum by its definition: a slot after the other in the accumulator, both roundings.
template <class O, class S>
std::vector<O> sums(const Rows<S>& p, bool weighted) {
  using A = AccumulatorOf<S>;
  std::vector<O> out = p.template of_tokens<O>();
  const std::int64_t K = p.owned.dims.top_k;
  for (std::int64_t t = 0; t < p.owned.dims.tokens; ++t) {
    for (std::int64_t d = 0; d < p.hidden; ++d) {
      volatile A sum = 0;  // volatile: no compiler contracts the product into the sum
      for (std::int64_t k = 0; k < K; ++k) {
        const std::int64_t row = p.row_of(t * K + k);
        if (row >= 0) {
          const A value = static_cast<A>(p.rows[static_cast<std::size_t>(row * p.hidden + d)]);
          const volatile A term =
              weighted ? p.weights[static_cast<std::size_t>(t * K + k)] * value : value;
          sum = sum + term;
        }
      }
      out[static_cast<std::size_t>(t * p.hidden + d)] = static_cast<O>(static_cast<A>(sum));
    }
  }
  return out;
}

/// Everything sort.hpp does on one window, against the definition.
template <class S>
void check_all(const OwnedMap& owned, const RoutingWindow& window, std::int64_t hidden) {
  using A = AccumulatorOf<S>;
  const Rows<S> p(owned, window, hidden, 5);
  const std::int64_t T = owned.dims.tokens;
  const std::int64_t K = owned.dims.top_k;
  const auto matrix = [](auto& values, std::int64_t rows, std::int64_t cols) {
    return MatrixView<std::remove_reference_t<decltype(values[0])>>(values.data(), rows, cols);
  };

  std::vector<S> sorted = p.template of_rows<S>(S(7));
  sort<S>(owned.map, window, p.token_view(), matrix(sorted, window.rows, hidden));
  std::vector<S> expected = p.template of_rows<S>(S(7));
  std::vector<S> d_rows_expected = p.template of_rows<S>(S(0));
  std::vector<A> d_weights_expected(p.weights.size(), A(0));
  for (std::int64_t slot = 0; slot < owned.dims.slots(); ++slot) {
    const std::int64_t row = p.row_of(slot);
    if (row < 0) {
      continue;
    }
    double dot = 0;
    for (std::int64_t d = 0; d < hidden; ++d) {
      const S value = p.tokens[static_cast<std::size_t>(slot / K * hidden + d)];
      const auto at = static_cast<std::size_t>(row * hidden + d);
      expected[at] = value;
      d_rows_expected[at] =
          static_cast<S>(p.weights[static_cast<std::size_t>(slot)] * static_cast<A>(value));
      dot += static_cast<double>(value) * static_cast<double>(p.rows[at]);
    }
    d_weights_expected[static_cast<std::size_t>(slot)] = static_cast<A>(dot);
  }
  EXPECT_TRUE(same_bits(sorted, expected));
  sort<S>(owned.map, window, p.token_view(), matrix(sorted, window.rows, hidden),
          UnfilledRows::zeroed);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / hidden;
    if (row < window.first_row || row >= window.first_row + window.kept) {
      expected[i] = S(0);
    }
  }
  EXPECT_TRUE(same_bits(sorted, expected));

  std::vector<A> wide = p.template of_tokens<A>();
  std::vector<S> narrow = p.template of_tokens<S>();
  sort_backward<S, A>(owned.map, window, p.row_view(), matrix(wide, T, hidden));
  EXPECT_TRUE(same_bits(wide, sums<A>(p, false)));
  sort_backward<S, S>(owned.map, window, p.row_view(), matrix(narrow, T, hidden));
  EXPECT_TRUE(same_bits(narrow, sums<S>(p, false)));
  unsort<S, S>(owned.map, window, p.weight_view(), p.row_view(), matrix(narrow, T, hidden));
  EXPECT_TRUE(same_bits(narrow, sums<S>(p, true)));
  unsort<S, A>(owned.map, window, p.weight_view(), p.row_view(), matrix(wide, T, hidden));
  const std::vector<A> sum = sums<A>(p, true);
  EXPECT_TRUE(same_bits(wide, sum));
  unsort<S, A>(owned.map, window, p.weight_view(), p.row_view(), matrix(wide, T, hidden),
               Write::accumulate);
  std::vector<A> twice(sum.size());
  std::transform(sum.begin(), sum.end(), twice.begin(), [](A x) { return x + x; });
  EXPECT_TRUE(same_bits(wide, twice));

  std::vector<S> d_rows = p.template of_rows<S>();
  std::vector<A> d_weights(p.weights.size(), poison<A>());
  unsort_backward<S>(
      owned.map, window, p.weight_view(), p.row_view(), p.token_view(),
      {.d_rows = matrix(d_rows, window.rows, hidden), .d_expert_weights = matrix(d_weights, T, K)},
      UnfilledRows::zeroed);
  EXPECT_TRUE(same_bits(d_rows, d_rows_expected));
  if (!d_weights.empty() && hidden > 0) {
    EXPECT_TRUE(close(d_weights, d_weights_expected, 1e-5));
  }
  for (std::int64_t slot = 0; slot < owned.dims.slots(); ++slot) {
    if (p.row_of(slot) < 0) {
      EXPECT_EQ(d_weights[static_cast<std::size_t>(slot)], A(0));
    }
  }

  std::vector<A> row_weights(static_cast<std::size_t>(window.kept), poison<A>());
  sort_weights<A>(owned.map, window, p.weight_view(), row_weights);
  std::vector<A> slot_weights(p.weights.size(), poison<A>());
  unsort_weights<A>(owned.map, window, row_weights, matrix(slot_weights, T, K));
  for (std::int64_t slot = 0; slot < owned.dims.slots(); ++slot) {
    const std::int64_t row = p.row_of(slot);
    const A weight = p.weights[static_cast<std::size_t>(slot)];
    EXPECT_EQ(slot_weights[static_cast<std::size_t>(slot)], row < 0 ? A(0) : weight);
    if (row >= 0) {
      EXPECT_EQ(row_weights[static_cast<std::size_t>(row - window.first_row)], weight);
    }
  }
}

template <class S>
void check_windows(const RouterDims& dims, std::int64_t hidden) {
  const Ids ids = random_ids(dims, 9);
  const OwnedMap whole(dims, ids);
  const ExpertRange middle{dims.experts / 3, std::max<std::int64_t>(1, dims.experts / 3)};
  const OwnedMap held(dims, ids, middle);
  for (const std::optional<std::int64_t> buffer :
       {std::optional<std::int64_t>(), std::optional<std::int64_t>(dims.slots() / 2),
        std::optional<std::int64_t>(5), std::optional<std::int64_t>(0)}) {
    SCOPED_TRACE(buffer.value_or(-1));
    check_all<S>(whole, routing_window(whole.map, buffer), hidden);
    check_all<S>(whole, routing_window(whole.map, middle, buffer), hidden);
    check_all<S>(held, routing_window(held.map, buffer), hidden);
  }
}

TEST(Sort, F32AgreesWithTheDefinition) {
  for (const std::int64_t hidden : {1, 7, 64, 133}) {
    check_windows<float>({.tokens = 23, .experts = 6, .top_k = 3}, hidden);
  }
  check_windows<float>({.tokens = 300, .experts = 5, .top_k = 1}, 17);
  check_windows<float>({.tokens = 0, .experts = 3, .top_k = 2}, 8);
}

TEST(Sort, Bf16AgreesWithTheDefinition) {
  for (const std::int64_t hidden : {1, 15, 131, 320}) {
    check_windows<bfloat16>({.tokens = 23, .experts = 6, .top_k = 4}, hidden);
  }
}

TEST(Sort, F64AgreesWithTheDefinition) {
  check_windows<double>({.tokens = 23, .experts = 6, .top_k = 3}, 9);
}

// All instruction sets, also where a row ends inside a vector.
TEST(Sort, EveryPathHasTheSameBits) {
  const RouterDims dims{.tokens = 31, .experts = 6, .top_k = 3};
  const OwnedMap owned(dims, random_ids(dims, 10));
  const RoutingWindow window = routing_window(owned.map, 60);
  for (const std::int64_t hidden : {5, 77, 410}) {
    const auto run = [&]<class S>(S) {
      const Rows<S> p(owned, window, hidden, 11);
      std::vector<S> out = p.template of_tokens<S>();
      std::vector<S> d_rows = p.template of_rows<S>();
      std::vector<float> d_weights(p.weights.size());
      unsort<S, S>(owned.map, window, p.weight_view(), p.row_view(),
                   {out.data(), dims.tokens, hidden});
      unsort_backward<S>(owned.map, window, p.weight_view(), p.row_view(), p.token_view(),
                         {.d_rows = {d_rows.data(), window.rows, hidden},
                          .d_expert_weights = {d_weights.data(), dims.tokens, dims.top_k}},
                         UnfilledRows::zeroed);
      std::vector<float> all(out.begin(), out.end());
      all.insert(all.end(), d_rows.begin(), d_rows.end());
      all.insert(all.end(), d_weights.begin(), d_weights.end());
      return all;
    };
    const std::vector<float> f32 = run(float{});
    const std::vector<float> bf16 = run(bfloat16{});
    for (const Path path : available_paths()) {
      const ScopedPath scoped(path);
      EXPECT_TRUE(same_bits(run(float{}), f32)) << path_name(path);
      EXPECT_TRUE(same_bits(run(bfloat16{}), bf16)) << path_name(path);
    }
    for (const int threads : {1, 2, 8}) {
      heddle::test::with_threads(threads, [&] { EXPECT_TRUE(same_bits(run(bfloat16{}), bf16)); });
    }
  }
}

// Results larger than the last cache go past it; that is no other sum.
TEST(Sort, LargeResultsAreTheSame) {
  const std::int64_t tokens = 1030;
  const std::int64_t hidden = 32768 + 32;  // 64 MiB of bf16, whole cache lines, a short last block
  Ids ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    ids.push_back(static_cast<std::int32_t>(t % 5) - 1);  // every fifth token is routed nowhere
  }
  const OwnedMap owned({.tokens = tokens, .experts = 4, .top_k = 1}, ids);
  const RoutingWindow window = routing_window(owned.map);
  Workspace memory;
  const auto count = tokens * hidden;
  const MatrixView<bfloat16> rows(memory.take<bfloat16>(count).data(), tokens, hidden);
  const MatrixView<bfloat16> out(memory.take<bfloat16>(count).data(), tokens, hidden);
  const std::vector<float> pattern = Random(18).normals<float>(4099);
  for (std::int64_t row = 0; row < tokens; ++row) {
    for (std::int64_t d = 0; d < hidden; ++d) {
      rows(row, d) = bfloat16(pattern[static_cast<std::size_t>((row + d) % 4099)]);
      out(row, d) = poison<bfloat16>();
    }
  }
  const std::vector<float> weights(static_cast<std::size_t>(tokens), 0.3F);
  unsort<bfloat16, bfloat16>(owned.map, window, {weights.data(), tokens, 1}, rows, out);
  std::int64_t wrong = 0;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t row = window.row_of(owned.inverse[static_cast<std::size_t>(t)]);
    for (std::int64_t d = 0; d < hidden; ++d) {
      const bfloat16 expected =
          row == nowhere ? bfloat16(0) : bfloat16(0.3F * static_cast<float>(rows(row, d)));
      wrong += std::memcmp(&expected, &out(t, d), sizeof expected) == 0 ? 0 : 1;
    }
  }
  EXPECT_EQ(wrong, 0);
}

// What the four passes do to a buffer does not depend on how much of it is empty; NaN there stays
// unread and unwritten.
TEST(Sort, UnfilledRowsAreNeitherReadNorWritten) {
  const RouterDims dims{.tokens = 40, .experts = 8, .top_k = 2};
  const OwnedMap owned(dims, random_ids(dims, 12));
  const RoutingWindow window = routing_window(owned.map, {2, 3}, 70);
  ASSERT_LT(window.kept, 60);
  const Rows<float> p(owned, window, 33, 13);
  std::vector<float> buffer(static_cast<std::size_t>(window.rows * 33), poison<float>());
  sort<float>(owned.map, window, p.token_view(), {buffer.data(), window.rows, 33});
  std::vector<float> d_rows = buffer;
  unsort_backward<float>(owned.map, window, p.weight_view(), p.row_view(), p.token_view(),
                         {.d_rows = {d_rows.data(), window.rows, 33}});
  for (std::int64_t i = window.kept * 33; i < window.rows * 33; ++i) {
    EXPECT_TRUE(std::isnan(buffer[static_cast<std::size_t>(i)]));
    EXPECT_TRUE(std::isnan(d_rows[static_cast<std::size_t>(i)]));
  }
  std::vector<float> out = p.of_tokens<float>();
  unsort<float, float>(owned.map, window, p.weight_view(), p.row_view(), {out.data(), 40, 33});
  for (const float value : out) {
    EXPECT_TRUE(std::isfinite(value));
  }
}

TEST(Sort, TokensWithoutARowGetPositiveZeroAndAreNotRead) {
  const OwnedMap owned({.tokens = 3, .experts = 2, .top_k = 2}, {-1, -1, 0, 1, -1, -1});
  const RoutingWindow window = routing_window(owned.map);
  std::vector<float> tokens(3 * 2, poison<float>());
  tokens[2] = 1;
  tokens[3] = 2;
  std::vector<float> rows(6 * 2, poison<float>());
  sort<float>(owned.map, window, {tokens.data(), 3, 2}, {rows.data(), 6, 2});
  EXPECT_TRUE(same_bits(std::vector<float>(rows.begin(), rows.begin() + 4),
                        std::vector<float>{1, 2, 1, 2}));
  std::vector<float> out(6, poison<float>());
  const std::vector<float> weights{poison<float>(), poison<float>(), 0.5F,
                                   -0.5F,           poison<float>(), poison<float>()};
  unsort<float, float>(owned.map, window, {weights.data(), 3, 2}, {rows.data(), 6, 2},
                       {out.data(), 3, 2});
  EXPECT_TRUE(same_bits(out, std::vector<float>{0, 0, 0, 0, 0, 0}));
}

// Linear in the weights; dropped weights are not made up for.
TEST(Sort, SumsScaleWithTheWeights) {
  const RouterDims dims{.tokens = 20, .experts = 5, .top_k = 3};
  const OwnedMap owned(dims, random_ids(dims, 14));
  const RoutingWindow window = routing_window(owned.map, 31);
  Rows<float> p(owned, window, 12, 15);
  const auto run = [&] {
    std::vector<float> result = p.of_tokens<float>();
    std::vector<float> d_rows = p.of_rows<float>();
    std::vector<float> d_weights(p.weights.size());
    unsort<float, float>(owned.map, window, p.weight_view(), p.row_view(), {result.data(), 20, 12});
    unsort_backward<float>(
        owned.map, window, p.weight_view(), p.row_view(), p.token_view(),
        {.d_rows = {d_rows.data(), window.rows, 12}, .d_expert_weights = {d_weights.data(), 20, 3}},
        UnfilledRows::zeroed);
    result.insert(result.end(), d_rows.begin(), d_rows.end());
    return std::pair(result, d_weights);
  };
  auto [once, d_once] = run();
  for (float& weight : p.weights) {
    weight *= 4;  // a power of two: exact
  }
  for (float& value : once) {
    value *= 4;
  }
  const auto [scaled, d_scaled] = run();
  EXPECT_TRUE(same_bits(scaled, once));
  EXPECT_TRUE(same_bits(d_scaled, d_once));
}

TEST(Sort, OutputsThatAreNotWantedMayBeNull) {
  const OwnedMap owned({.tokens = 2, .experts = 2, .top_k = 1}, {1, 0});
  const RoutingWindow window = routing_window(owned.map);
  const std::vector<float> d_out{1, 2, 3, 4};
  const std::vector<float> weights{2, 3};
  std::vector<float> d_rows(4, poison<float>());
  unsort_backward<float>(owned.map, window, {weights.data(), 2, 1}, {}, {d_out.data(), 2, 2},
                         {.d_rows = {d_rows.data(), 2, 2}});
  EXPECT_EQ(d_rows, (std::vector<float>{9, 12, 2, 4}));
  std::vector<float> d_weights(2, poison<float>());
  unsort_backward<float>(owned.map, window, {}, {d_rows.data(), 2, 2}, {d_out.data(), 2, 2},
                         {.d_expert_weights = {d_weights.data(), 2, 1}});
  EXPECT_EQ(d_weights, (std::vector<float>{10, 75}));
}

/// Address space for rows of a stride that no 32 bits hold; only pages that are touched exist.
class FarRows {
 public:
  static constexpr std::int64_t stride = (std::int64_t{1} << 31) + 4096;

  explicit FarRows(std::int64_t rows)
      : rows_(rows),
        bytes_(static_cast<std::size_t>(rows * stride) * sizeof(bfloat16)),
        memory_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  FarRows(const FarRows&) = delete;
  FarRows& operator=(const FarRows&) = delete;
  ~FarRows() {
    if (memory_ != MAP_FAILED) {
      ::munmap(memory_, bytes_);
    }
  }
  [[nodiscard]] bool is_mapped() const { return memory_ != MAP_FAILED; }
  [[nodiscard]] MatrixView<bfloat16> view(std::int64_t columns) const {
    return {static_cast<bfloat16*>(memory_), rows_, columns, stride};
  }

 private:
  std::int64_t rows_;
  std::size_t bytes_;
  void* memory_;
};

TEST(Sort, RowOffsetsAreOf64Bits) {
  const std::int64_t hidden = 40;
  const RouterDims dims{.tokens = 3, .experts = 3, .top_k = 2};
  const OwnedMap owned(dims, {2, 1, 0, 2, 1, 2});
  const RoutingWindow window = routing_window(owned.map);
  const FarRows far_tokens(3);
  const FarRows far_rows(6);
  const FarRows far_out(3);
  ASSERT_TRUE(far_tokens.is_mapped() && far_rows.is_mapped() && far_out.is_mapped());
  Rows<bfloat16> near(owned, window, hidden, 16);
  for (std::int64_t t = 0; t < 3; ++t) {
    std::copy_n(near.tokens.data() + t * hidden, hidden, far_tokens.view(hidden).row(t).data());
  }
  sort<bfloat16>(owned.map, window, far_tokens.view(hidden), far_rows.view(hidden));
  sort<bfloat16>(owned.map, window, near.token_view(), {near.rows.data(), 6, hidden});
  for (std::int64_t row = 0; row < 6; ++row) {
    EXPECT_TRUE(same_bits<bfloat16>(far_rows.view(hidden).row(row), near.row_view().row(row)));
  }
  std::vector<bfloat16> out = near.of_tokens<bfloat16>();
  unsort<bfloat16, bfloat16>(owned.map, window, near.weight_view(), near.row_view(),
                             {out.data(), 3, hidden});
  unsort<bfloat16, bfloat16>(owned.map, window, near.weight_view(), far_rows.view(hidden),
                             far_out.view(hidden));
  for (std::int64_t t = 0; t < 3; ++t) {
    EXPECT_TRUE(same_bits<bfloat16>(far_out.view(hidden).row(t),
                                    ConstMatrixView<bfloat16>(out.data(), 3, hidden).row(t)));
  }
  std::vector<bfloat16> d_rows = near.of_rows<bfloat16>();
  unsort_backward<bfloat16>(owned.map, window, near.weight_view(), {}, near.token_view(),
                            {.d_rows = {d_rows.data(), 6, hidden}});
  unsort_backward<bfloat16>(owned.map, window, near.weight_view(), {}, far_tokens.view(hidden),
                            {.d_rows = far_rows.view(hidden)});
  for (std::int64_t row = 0; row < 6; ++row) {
    EXPECT_TRUE(same_bits<bfloat16>(far_rows.view(hidden).row(row),
                                    ConstMatrixView<bfloat16>(d_rows.data(), 6, hidden).row(row)));
  }
}

TEST(Sort, CostsFollowTheKeptRows) {
  const RouterDims dims{.tokens = 40, .experts = 4, .top_k = 2};
  const OwnedMap owned(dims, random_ids(dims, 17, 0));
  const RoutingWindow small = routing_window(owned.map, {1, 1}, 50);
  const RoutingWindow large = routing_window(owned.map, {1, 1});
  ASSERT_EQ(small.kept, large.kept);
  const Cost cost = sort_cost<bfloat16>(owned.map, small, 64);
  EXPECT_EQ(cost, sort_cost<bfloat16>(owned.map, large, 64));
  EXPECT_EQ(cost.bytes_written, small.kept * 128);
  EXPECT_EQ(cost.bytes_read, 40 * 128 + 80 * 4);
  const Cost unsort = unsort_cost<bfloat16, float>(owned.map, small, 64);
  EXPECT_EQ(unsort.flops, 2 * small.kept * 64);
  EXPECT_EQ(unsort.bytes_read, small.kept * 128 + 80 * 8);
  EXPECT_EQ(unsort.bytes_written, 40 * 64 * 4);
  EXPECT_EQ((sort_backward_cost<bfloat16, float>(owned.map, small, 64).flops), small.kept * 64);
  EXPECT_EQ(unsort_backward_cost<bfloat16>(owned.map, small, 64).bytes_written,
            small.kept * 128 + 80 * 4);
}

TEST(Sort, RefusesWrongArguments) {
  const OwnedMap owned({.tokens = 2, .experts = 2, .top_k = 2}, {1, 0, 0, 1});
  const RoutingWindow window = routing_window(owned.map, 3);
  std::vector<float> tokens(8, 7.0F);
  std::vector<float> rows(12, 7.0F);
  std::vector<float> weights(4, 7.0F);
  const auto refusal = [](auto call) { return heddle::test::thrown_text<Error>(call); };
  EXPECT_EQ(refusal([&] {
              sort<float>(owned.map, window, {tokens.data(), 3, 2}, {rows.data(), 3, 2});
            }),
            "moe::sort: hidden.rows = 3: must equal map.dims.tokens (2)");
  EXPECT_EQ(refusal([&] {
              sort<float>(owned.map, window, {tokens.data(), 2, 2}, {rows.data(), 4, 2});
            }),
            "moe::sort: rows.rows = 4: must equal window.rows (3)");
  EXPECT_EQ(refusal([&] {
              sort<float>(owned.map, window, {tokens.data(), 2, 2}, {rows.data(), 3, 2},
                          static_cast<UnfilledRows>(3));
            }),
            "moe::sort: unfilled = 3: must be untouched or zeroed");
  RoutingWindow foreign = window;
  foreign.experts = {1, 2};
  EXPECT_EQ(refusal([&] {
              sort<float>(owned.map, foreign, {tokens.data(), 2, 2}, {rows.data(), 3, 2});
            }),
            "moe::sort: window.experts.first = 1: must lie, with all of the range, in the map's "
            "experts");
  foreign = window;
  foreign.kept = 4;
  EXPECT_EQ(refusal([&] {
              sort<float>(owned.map, foreign, {tokens.data(), 2, 2}, {rows.data(), 3, 2});
            }),
            "moe::sort: window.kept = 4: must be rows of the window's buffer");
  EXPECT_EQ(refusal([&] {
              unsort<float, float>(owned.map, window, {weights.data(), 2, 1}, {rows.data(), 3, 2},
                                   {tokens.data(), 2, 2});
            }),
            "moe::unsort: expert_weights.cols = 1: must equal map.dims.top_k (2)");
  EXPECT_EQ(refusal([&] {
              sort_backward<float, float>(owned.map, window, {rows.data(), 3, 2},
                                          {tokens.data(), 2, 2}, static_cast<Write>(4));
            }),
            "moe::sort_backward: write = 4: must be overwrite or accumulate");
  EXPECT_EQ(refusal([&] {
              unsort_backward<float>(owned.map, window, {weights.data(), 2, 2}, {},
                                     {tokens.data(), 2, 2},
                                     {.d_expert_weights = {weights.data(), 2, 2}});
            }),
            "moe::unsort_backward: rows.rows = 0: must equal window.rows (3)");
  EXPECT_EQ(refusal([&] {
              std::vector<float> row_weights(2);
              sort_weights<float>(owned.map, window, {weights.data(), 2, 2}, row_weights);
            }),
            "moe::sort_weights: row_weights.size = 2: must equal window.kept (3)");
  EXPECT_EQ(tokens, std::vector<float>(8, 7.0F));
  EXPECT_EQ(rows, std::vector<float>(12, 7.0F));
  EXPECT_EQ(weights, std::vector<float>(4, 7.0F));
}

}  // namespace
}  // namespace heddle::moe

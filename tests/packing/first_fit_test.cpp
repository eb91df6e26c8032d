#include "heddle/packing/first_fit.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: an unstable sort or ties in reverse (43); leftovers in sorted order (44);
// the alignment left out of the fit test, or of the load (45); the first segment aligned from a base
// other than 0 (46); an item of no token counted as a segment (47); best fit or last fit instead of first;
// '<' for '<=' at a full row; max_segments off by one; max_loss_tokens ignored; a tree that is right for
// powers of two alone; the tree's early stop one level too soon.

namespace heddle::packing {
namespace {

using Lists = std::vector<std::vector<std::int32_t>>;

Lists lists(const BinAssignment& assignment) {
  Lists result;
  for (std::int64_t bin = 0; bin < assignment.bins(); ++bin) {
    const auto items = assignment.bin(bin);
    result.emplace_back(items.begin(), items.end());
  }
  return result;
}

struct Chunk {
  Lists bins;
  std::vector<std::int32_t> leftover;
};

/// Spec 2.1 word by word: every item looks at every bin. `items` are indices in arrival order.
Chunk literal_chunk(const std::vector<std::int32_t>& lengths,
                    const std::vector<std::int32_t>& loss_tokens,
                    const std::vector<std::int32_t>& items, std::int64_t bins,
                    const BinLimits& limits) {
  std::vector<std::int32_t> order;  // insertion after all that are not shorter
  for (const std::int32_t item : items) {
    std::size_t at = order.size();
    while (at > 0 && lengths[static_cast<std::size_t>(order[at - 1])] <
                         lengths[static_cast<std::size_t>(item)]) {
      --at;
    }
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(at), item);
  }
  struct Bin {
    std::int64_t load = 0;
    std::int64_t count = 0;
    std::int64_t loss = 0;
  };
  std::vector<Bin> state(static_cast<std::size_t>(bins));
  Chunk chunk{.bins = Lists(static_cast<std::size_t>(bins)), .leftover = {}};
  std::vector<bool> placed(lengths.size(), false);
  for (const std::int32_t item : order) {
    const auto i = static_cast<std::size_t>(item);
    const std::int64_t n = lengths[i];
    for (std::size_t b = 0; b < state.size() && !placed[i]; ++b) {
      if (n == 0) {
        chunk.bins[0].push_back(item);
        placed[i] = true;
        break;
      }
      Bin& bin = state[b];
      std::int64_t start = 0;
      while (bin.count > 0 && start < bin.load) {
        start += limits.segment_align_multiple;
      }
      const std::int64_t loss = loss_tokens.empty() ? 0 : loss_tokens[i];
      if (start + n <= limits.budget && bin.count < limits.max_segments &&
          bin.loss + loss <= limits.max_loss_tokens) {
        bin = {.load = start + n, .count = bin.count + 1, .loss = bin.loss + loss};
        chunk.bins[b].push_back(item);
        placed[i] = true;
      }
    }
  }
  for (const std::int32_t item : items) {
    if (!placed[static_cast<std::size_t>(item)]) {
      chunk.leftover.push_back(item);
    }
  }
  return chunk;
}

std::vector<std::int32_t> iota(std::size_t count) {
  std::vector<std::int32_t> indices;
  for (std::size_t i = 0; i < count; ++i) {
    indices.push_back(static_cast<std::int32_t>(i));
  }
  return indices;
}

/// Bins behind the last that holds an item say nothing.
Lists without_empty_tail(Lists bins) {
  while (!bins.empty() && bins.back().empty()) {
    bins.pop_back();
  }
  return bins;
}

TEST(FirstFit, VectorsByHand) {
  const std::vector<std::int32_t> lengths{4, 6, 4, 6, 2};
  BinAssignment found = first_fit_decreasing(lengths, {.budget = 10, .bins = 2});
  EXPECT_EQ(lists(found), (Lists{{1, 0}, {3, 2}}));
  EXPECT_EQ(found.leftover, (std::vector<std::int32_t>{4}));

  found = first_fit_decreasing(lengths, {.budget = 10, .segment_align_multiple = 4, .bins = 2});
  EXPECT_EQ(lists(found), (Lists{{1, 4}, {3}}));
  EXPECT_EQ(found.leftover, (std::vector<std::int32_t>{0, 2}));

  found = first_fit_decreasing(std::vector<std::int32_t>{3, 0, 7, 7, 1}, {.budget = 8, .bins = 2});
  EXPECT_EQ(lists(found), (Lists{{2, 4, 1}, {3}}));
  EXPECT_EQ(found.leftover, (std::vector<std::int32_t>{0}));

  found = first_fit_decreasing(std::vector<std::int32_t>{2, 2, 2, 2},
                               {.budget = 64, .max_segments = 2, .bins = 1});
  EXPECT_EQ(lists(found), (Lists{{0, 1}}));
  EXPECT_EQ(found.leftover, (std::vector<std::int32_t>{2, 3}));
}

TEST(FirstFit, LossTokensAreASecondLimit) {
  const std::vector<std::int32_t> lengths{4, 4, 4, 4};
  const std::vector<std::int32_t> loss{3, 3, 1, 0};
  const BinAssignment found =
      first_fit_decreasing(lengths, {.budget = 12, .max_loss_tokens = 4}, loss);
  EXPECT_EQ(lists(found), (Lists{{0, 2, 3}, {1}}));
}

TEST(FirstFit, EqualsTheLiteralRuleAlsoOverManyChunks) {
  test::Random random(20);
  std::int64_t chunks_seen = 0;
  for (int trial = 0; trial < 400; ++trial) {
    // Budgets around powers of two, few distinct lengths so that ties abound, empty items.
    const std::int64_t budget = (std::int64_t{1} << random.integer(2, 7)) + random.integer(-1, 1);
    BinLimits limits{
        .budget = budget,
        .segment_align_multiple = random.integer(1, 5) == 5 ? budget + 3 : random.integer(1, 16),
        .max_segments = random.chance(0.5) ? random.integer(1, 4) : budget};
    std::vector<std::int32_t> lengths(static_cast<std::size_t>(random.integer(0, 60)));
    const std::int64_t step = random.integer(1, 5);
    for (std::int32_t& length : lengths) {
      length = static_cast<std::int32_t>(
          std::min(budget, random.integer(0, (budget + step - 1) / step) * step));
    }
    std::vector<std::int32_t> loss;
    if (random.chance(0.4)) {
      limits.max_loss_tokens = std::max<std::int64_t>(1, random.integer(budget / 2, budget));
      for (const std::int32_t length : lengths) {
        loss.push_back(static_cast<std::int32_t>(
            random.integer(0, std::min<std::int64_t>(length, limits.max_loss_tokens))));
      }
    }
    const std::int64_t bins = random.integer(1, 6);

    const Chunk first = literal_chunk(lengths, loss, iota(lengths.size()), bins, limits);
    BinLimits one_chunk = limits;
    one_chunk.bins = bins;
    const BinAssignment chunk = first_fit_decreasing(lengths, one_chunk, loss);
    ASSERT_EQ(lists(chunk), without_empty_tail(first.bins)) << "trial " << trial;
    ASSERT_EQ(chunk.leftover, first.leftover) << "trial " << trial;

    // Chunk after chunk over the leftovers, as the reference packer does it.
    Lists all;
    std::vector<std::int32_t> pending = iota(lengths.size());
    while (!pending.empty()) {
      const Chunk next = literal_chunk(lengths, loss, pending, bins, limits);
      all.insert(all.end(), next.bins.begin(), next.bins.end());
      ASSERT_LT(next.leftover.size(), pending.size());
      pending = next.leftover;
      ++chunks_seen;
    }
    const BinAssignment whole = first_fit_decreasing(lengths, limits, loss);
    ASSERT_EQ(lists(whole), without_empty_tail(all)) << "trial " << trial;
    ASSERT_TRUE(whole.leftover.empty());

    std::vector<int> times(lengths.size(), 0);
    for (const std::int32_t item : whole.items) {
      ++times[static_cast<std::size_t>(item)];
    }
    ASSERT_EQ(times, std::vector<int>(lengths.size(), 1)) << "every item once";
  }
  EXPECT_GT(chunks_seen, 800) << "the trials must need many chunks";
}

TEST(FirstFit, CapacityAroundPowersOfTwo) {
  for (const std::int64_t budget : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65}) {
    const std::vector<std::int32_t> lengths(9, static_cast<std::int32_t>(budget));
    const BinAssignment found = first_fit_decreasing(lengths, {.budget = budget});
    EXPECT_EQ(found.bins(), 9) << "budget " << budget;
    const std::vector<std::int32_t> ones(static_cast<std::size_t>(3 * budget), 1);
    EXPECT_EQ(first_fit_decreasing(ones, {.budget = budget}).bins(), 3) << "budget " << budget;
  }
}

TEST(FirstFit, NoItemAndOnlyEmptyItems) {
  EXPECT_EQ(first_fit_decreasing({}, {.budget = 4}).bins(), 0);
  const BinAssignment empties =
      first_fit_decreasing(std::vector<std::int32_t>{0, 0}, {.budget = 4, .max_segments = 1});
  EXPECT_EQ(lists(empties), (Lists{{0, 1}}));
}

TEST(FirstFit, HugeLimitsDoNotOverflow) {
  constexpr std::int64_t most = 2147483647;
  const std::vector<std::int32_t> lengths{2147483647, 2147483647, 5};
  const BinAssignment found = first_fit_decreasing(
      lengths, {.budget = most, .segment_align_multiple = std::int64_t{1} << 62});
  EXPECT_EQ(lists(found), (Lists{{0}, {1}, {2}}));
}

TEST(FirstFit, RefusesWhatItCannotPlace) {
  const auto text = [](const std::vector<std::int32_t>& lengths, const BinLimits& limits,
                       const std::vector<std::int32_t>& loss = {}) {
    return test::thrown_text<Error>(
        [&] { static_cast<void>(first_fit_decreasing(lengths, limits, loss)); });
  };
  const std::string where = "packing::first_fit_decreasing: ";
  EXPECT_EQ(text({}, {.budget = 0}), where + "limits.budget = 0: must be in [1, 2^31 - 1]");
  EXPECT_EQ(text({}, {.budget = 4, .segment_align_multiple = 0}),
            where + "limits.segment_align_multiple = 0: must be >= 1");
  EXPECT_EQ(text({}, {.budget = 4, .max_segments = 0}),
            where + "limits.max_segments = 0: must be >= 1");
  EXPECT_EQ(text({}, {.budget = 4, .max_loss_tokens = 0}),
            where + "limits.max_loss_tokens = 0: must be in [1, 2^31 - 1]");
  EXPECT_EQ(text({}, {.budget = 4, .bins = 0}), where + "limits.bins = 0: must be >= 1");
  EXPECT_EQ(text({1, 5}, {.budget = 4}),
            where + "lengths[1] = 5: must be in [0, limits.budget (4)]");
  EXPECT_EQ(text({1, -1}, {.budget = 4}),
            where + "lengths[1] = -1: must be in [0, limits.budget (4)]");
  EXPECT_EQ(text({1, 2}, {.budget = 4}, {1}),
            where + "loss_tokens.size = 1: must equal lengths.size (2)");
  EXPECT_EQ(text({1, 2}, {.budget = 4, .max_loss_tokens = 1}, {0, 2}),
            where + "loss_tokens[1] = 2: must be in [0, limits.max_loss_tokens (1)]");
}

}  // namespace
}  // namespace heddle::packing

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/head/arguments.hpp"
#include "heddle/head/options.hpp"

/// The head as the formulas say it, to hold every other path against.
namespace heddle::head::reference {

/// Log-prob of each row's target and entropy of its softmax.
///   x = hidden weight / temperature, x rounded to the logits dtype before the division
///   logps[t] = x_y - log sum exp(x), entropy[t] = - sum p log p, p = softmax(x)
///
/// shapes    as Inputs and Outputs say
/// units     nats
/// dtypes    hidden: S, weight: W, each widened to A; products and exponentials in A, their sums over
///           the vocabulary in double where A is float
/// writes    all of every output that is wanted, 0 at inactive rows
/// alias     outputs disjoint from inputs and from each other
/// specials  tokens = 0: no-op; inactive rows are never read, NaN there is legal. A row with
///             NaN: max 0, exp_sum NaN, logp and entropy NaN
///             a +inf: max 0, exp_sum +inf, logp -inf (NaN where the target is +inf), entropy NaN
///             no finite logit, all -inf: max 0, exp_sum 0, logp and entropy NaN
///             some -inf: logp finite (-inf at a target of -inf), entropy as EntropyPolicy says
///           ids outside [0, vocab): as IdPolicy says
/// order     a logit is summed over hidden ascending, in either layout; vocabulary tiles lie on one
///           grid over all columns, cut at shards, and are merged in column order. A row's bits depend
///           on nothing but the row, the weight and the options: any token_block gives the same
/// accuracy  2e-6 (float), 1e-11 (double) of the largest float64 answer, held by the tests
///           FloatAndBf16StorageAreWithinTheBar and MatchesTheDefinitionInDouble; LogpForm::reference
///           besides loses an ulp of max
/// memory    32 rows of logits and of hidden, 64 columns of weight, in A
/// cost      2 T D V flops, T counts active rows; exponentials: T V and one a merge of tiles, in local
///           and unsharded 2 T V
/// throws    Error for shapes, lengths and options as their structs say, an id outside [0, vocab) on an
///           active row under IdPolicy::strict
/// source    spec/head.md 1, 3, 6
template <Storage S, Storage W, Accumulator A>
void forward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
             const Outputs<A>& outputs);

/// The cotangents of hidden and weight under those of log-probs (g) and entropy (h). Logits are
/// computed again; with e = exp(x - max), u = x - max,
///   d_x[k] = (e (-g / exp_sum - h / exp_sum (u - mean)) + g [k = target]) / temperature
/// rounded once to the logits dtype, then d_hidden = d_x weight', d_weight = hidden' d_x. Mode::local
/// and Mode::unsharded derive the same from log-softmax instead and read no residual.
///
/// shapes    as Inputs, Residuals, OutputCotangents and Cotangents say
/// dtypes    as forward; d_hidden and d_weight in A, not rounded to storage
/// writes    all of d_hidden, 0 at rows that draw no gradient; d_weight as its Write says
/// alias     cotangents disjoint from everything read and from each other; either may be null
/// specials  inactive rows, and active rows whose g and h are both 0, are never read. d_x of a row with
///             NaN, or all -inf: NaN everywhere
///             a +inf: NaN there and where exp(x) overflows, else 0, and g on the target
///             some -inf: 0 there, the rest as if it were not
///             no entropy (forward gave NaN): NaN everywhere if h is not 0
///           An id that wraps to nothing draws the softmax part alone. No d_entropy and a d_entropy of
///           0: same bits
/// order     d_hidden: columns ascending, 64 at a time, then ranks ascending, the same bits in any
///           token_block; d_weight: tokens ascending, 32 rows at a time. Same bits in either layout
/// accuracy  2e-6 (float), 1e-11 (double) of the largest float64 answer, held by the tests
///           FloatCotangentsAreWithinTheBar and CotangentsAreTheDerivativesOfTheDefinition
/// memory    as forward, and 33 rows of hidden
/// cost      6 T D V flops, T counts rows with a cotangent; exponentials: T V, in local and unsharded
///           2 T V, 4 T V with d_entropy
/// throws    as forward, and Error for residuals.mean missing where d_entropy is given
/// source    spec/head.md 4, 5, 6
template <Storage S, Storage W, Accumulator A>
void backward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
              const Residuals<A>& residuals, const OutputCotangents<A>& output_cotangents,
              const Cotangents<A>& cotangents);

namespace detail {

/// Rows that share one pass over the weight: enough to pay for a panel of it, few enough that their
/// logits stay small.
inline constexpr std::int64_t rows_per_block = 32;
/// Columns of weight widened at a time: D = 96 floats of them lie in a first-level cache.
inline constexpr std::int64_t panel_columns = 64;

/// What sums over the vocabulary are formed in: in float they would lose up to hundreds of ulps.
template <Accumulator A>
using SumOf = std::conditional_t<std::is_same_v<A, float>, double, A>;

template <Accumulator A>
inline constexpr A infinity = std::numeric_limits<A>::infinity();
template <Accumulator A>
inline constexpr A quiet_nan = std::numeric_limits<A>::quiet_NaN();

template <Accumulator A>
[[nodiscard]] bool is_nan(A x) {
  return x != x;
}

/// Columns [first, last).
struct Columns {
  std::int64_t first = 0;
  std::int64_t last = 0;

  [[nodiscard]] std::int64_t count() const { return last - first; }
  [[nodiscard]] bool hold(std::int64_t column) const { return first <= column && column < last; }
};

/// Calls body(columns) for each simulated rank that holds any, in rank order.
template <class Body>
void for_each_shard(std::int64_t vocab, std::int64_t shards, const Body& body) {
  Columns held;
  for (std::int64_t rank = 0; held.last < vocab; ++rank) {
    held.first = held.last;
    held.last += vocab / shards + (rank < vocab % shards ? 1 : 0);
    body(held);
  }
}

/// Calls body(columns) for each piece of `held` that one cell of the grid of `step` columns covers.
template <class Body>
void for_each_tile(Columns held, std::int64_t step, const Body& body) {
  for (std::int64_t first = held.first; first < held.last;) {
    const std::int64_t last = std::min((first / step + 1) * step, held.last);
    body(Columns{first, last});
    first = last;
  }
}

/// Column of a target id, or -1 where it names none.
[[nodiscard]] inline std::int64_t target_column(std::int32_t id, std::int64_t vocab) {
  const std::int64_t wrapped = id < 0 ? id + vocab : id;
  return wrapped >= 0 && wrapped < vocab ? wrapped : -1;
}

/// y += scale x, element by element in order.
template <Accumulator A>
void add_scaled(A scale, const A* x, std::int64_t count, A* y) {
  for (std::int64_t i = 0; i < count; ++i) {
    y[i] += scale * x[i];
  }
}

/// A value as it leaves the matrix product.
template <Accumulator A>
[[nodiscard]] A rounded(A value, LogitsDtype dtype) {
  return dtype == LogitsDtype::bf16 ? widen<A>(narrow<bfloat16>(value)) : value;
}

/// What one piece of a row contributes. Once there is a +inf or a NaN the sums mean nothing and are not
/// asked for: the row is then decided by the maximum and the flag alone.
template <Accumulator A>
struct TileStatistics {
  A max = -infinity<A>;       ///< over entries that are not NaN
  SumOf<A> exp_sum = 0;       ///< sum of e = exp(x - max)
  SumOf<A> weighted_sum = 0;  ///< sum of e (x - max)
  bool any_nan = false;
  bool any_negative_inf = false;
};

template <Accumulator A>
[[nodiscard]] TileStatistics<A> tile_statistics(std::span<const A> x) {
  using std::exp;
  TileStatistics<A> tile;
  for (const A value : x) {
    tile.any_nan = tile.any_nan || is_nan(value);
    tile.any_negative_inf = tile.any_negative_inf || value == -infinity<A>;
    if (value > tile.max) {
      tile.max = value;
    }
  }
  for (const A value : x) {
    if (value != -infinity<A>) {  // its e is 0 and its e u would be 0 * inf
      const A u = value - tile.max;
      const A e = exp(u);
      tile.exp_sum += SumOf<A>(e);
      tile.weighted_sum += SumOf<A>(e) * SumOf<A>(u);
    }
  }
  return tile;
}

/// Brings sums to a larger maximum: e shrinks by exp(max - new_max), and every u by the difference.
template <Accumulator A>
void raise_max(TileStatistics<A>& tile, A new_max) {
  using std::exp;
  if (tile.exp_sum == 0) {
    return;  // nothing to rescale, and -inf - new_max is not to be formed
  }
  const SumOf<A> delta = SumOf<A>(tile.max) - SumOf<A>(new_max);
  const SumOf<A> alpha = exp(delta);
  tile.weighted_sum = alpha * (tile.weighted_sum + delta * tile.exp_sum);
  tile.exp_sum *= alpha;
}

template <Accumulator A>
[[nodiscard]] TileStatistics<A> merged(TileStatistics<A> a, TileStatistics<A> b) {
  TileStatistics<A> both;
  both.max = std::max(a.max, b.max);
  both.any_nan = a.any_nan || b.any_nan;
  both.any_negative_inf = a.any_negative_inf || b.any_negative_inf;
  if (a.max < both.max) {
    raise_max(a, both.max);
  }
  if (b.max < both.max) {
    raise_max(b, both.max);
  }
  both.exp_sum = a.exp_sum + b.exp_sum;
  both.weighted_sum = a.weighted_sum + b.weighted_sum;
  return both;
}

/// One row of every output.
template <Accumulator A>
struct RowScore {
  A logp = 0;
  A entropy = 0;
  A max = 0;
  A exp_sum = 0;
  A mean = 0;
};

template <Accumulator A>
[[nodiscard]] A log_prob(A target, A max, SumOf<A> exp_sum, LogpForm form) {
  using std::log;
  const A log_sum = static_cast<A>(log(exp_sum));
  return form == LogpForm::shifted ? (target - max) - log_sum : target - (log_sum + max);
}

/// Mode::fused: statistics of tiles, merged over the row, finished by the table of specials.
template <Accumulator A>
[[nodiscard]] RowScore<A> fused_score(std::span<const A> x, std::int64_t target,
                                      const ScoringOptions& options) {
  using std::log;
  TileStatistics<A> row;
  A target_logit = quiet_nan<A>;
  const auto vocab = static_cast<std::int64_t>(x.size());
  for_each_shard(vocab, options.vocab_shards, [&](Columns held) {
    for_each_tile(held, options.vocab_tile, [&](Columns tile) {
      row = merged(row, tile_statistics(head::detail::block(x, tile.first, tile.count())));
    });
    if (held.hold(target)) {  // the owner's value, copied: a sum over ranks would be 0 * inf
      target_logit = x[static_cast<std::size_t>(target)];
    }
  });

  A max = 0;
  SumOf<A> exp_sum = 0;
  SumOf<A> mean = quiet_nan<SumOf<A>>;
  if (row.any_nan) {
    exp_sum = quiet_nan<SumOf<A>>;
  } else if (row.max == infinity<A>) {
    exp_sum = infinity<SumOf<A>>;
  } else if (row.max != -infinity<A>) {
    max = row.max;
    exp_sum = row.exp_sum;
    if (!row.any_negative_inf || options.entropy_policy == EntropyPolicy::xlogx) {
      mean = row.weighted_sum / row.exp_sum;
    }
  }
  return {.logp = log_prob(target_logit, max, exp_sum, options.logp_form),
          .entropy = static_cast<A>(log(exp_sum) - mean),
          .max = max,
          .exp_sum = static_cast<A>(exp_sum),
          .mean = static_cast<A>(mean)};
}

/// The maximum, 0 where it is not finite, and the sum of exp(x - max): of ranks' maxima and of ranks'
/// sums.
template <Accumulator A>
struct ExpSum {
  A max = 0;
  SumOf<A> sum = 0;
};

template <Accumulator A>
[[nodiscard]] ExpSum<A> exp_sum_of(std::span<const A> x, std::int64_t shards) {
  using std::exp;
  const auto vocab = static_cast<std::int64_t>(x.size());
  A max = -infinity<A>;
  for_each_shard(vocab, shards, [&](Columns held) {
    for (const A value : head::detail::block(x, held.first, held.count())) {
      max = value > max || is_nan(value) ? value : max;
    }
  });
  ExpSum<A> result;
  result.max = is_nan(max) || max == infinity<A> || max == -infinity<A> ? A(0) : max;
  for_each_shard(vocab, shards, [&](Columns held) {
    SumOf<A> rank_sum = 0;
    for (const A value : head::detail::block(x, held.first, held.count())) {
      rank_sum += SumOf<A>(exp(value - result.max));
    }
    result.sum += rank_sum;
  });
  return result;
}

[[nodiscard]] inline std::int64_t shards_of(const ScoringOptions& options) {
  return options.mode == Mode::unsharded ? 1 : options.vocab_shards;
}

/// Mode::local and Mode::unsharded: log-softmax and gather, entropy from the log-probs' own softmax.
template <Accumulator A>
[[nodiscard]] RowScore<A> local_score(std::span<const A> x, std::int64_t target,
                                      const ScoringOptions& options) {
  using std::exp;
  using std::log;
  const std::int64_t shards = shards_of(options);
  const ExpSum<A> total = exp_sum_of(x, shards);
  const A log_sum = static_cast<A>(log(total.sum));
  SumOf<A> entropy = 0;
  for_each_shard(static_cast<std::int64_t>(x.size()), shards, [&](Columns held) {
    SumOf<A> rank_sum = 0;
    for (const A value : head::detail::block(x, held.first, held.count())) {
      const A log_p = (value - total.max) - log_sum;
      if (log_p != -infinity<A> || options.entropy_policy == EntropyPolicy::reference) {
        rank_sum -= SumOf<A>(exp(log_p)) * SumOf<A>(log_p);
      }
    }
    entropy += rank_sum;
  });
  const A target_logit = target < 0 ? quiet_nan<A> : x[static_cast<std::size_t>(target)];
  return {.logp = log_prob(target_logit, total.max, total.sum, options.logp_form),
          .entropy = static_cast<A>(entropy),
          .max = total.max,
          .exp_sum = static_cast<A>(total.sum),
          .mean = static_cast<A>(log(total.sum) - entropy)};
}

/// The cotangents of one row's outputs, and what its forward kept.
template <Accumulator A>
struct RowCotangent {
  A d_logp = 0;
  A d_entropy = 0;
  A max = 0;
  A exp_sum = 0;
  A mean = 0;
};

/// Mode::fused: x becomes d_x, before one-hot, temperature and rounding.
template <Accumulator A>
void fused_cotangent(std::span<A> x, const RowCotangent<A>& row) {
  using std::exp;
  const A kappa = -row.d_logp / row.exp_sum;
  if (row.d_entropy == 0) {
    for (A& value : x) {
      value = exp(value - row.max) * kappa;
    }
    return;
  }
  const A lambda = -row.d_entropy / row.exp_sum;
  for (A& value : x) {
    const A u = value - row.max;
    const A e = exp(u);
    // Selected before the product: 0 * inf is NaN whatever is done to it afterwards. Where the policy
    // is that -inf costs the row its entropy, the mean is NaN and carries that to every column.
    const A finite_u = u == -infinity<A> ? A(0) : u;
    value = e * (kappa + lambda * (finite_u - row.mean));
  }
}

/// Mode::local and Mode::unsharded: the derivatives of gather(log_softmax(x)) and of
/// -sum exp(l) l, l = log_softmax(x), one after the other.
template <Accumulator A>
void local_cotangent(std::span<A> x, const RowCotangent<A>& row, const ScoringOptions& options) {
  using std::exp;
  using std::log;
  const ExpSum<A> total = exp_sum_of(std::span<const A>(x), shards_of(options));
  const A kappa = -row.d_logp / static_cast<A>(total.sum);
  const A log_sum = static_cast<A>(log(total.sum));
  const auto d_log_p = [&](A log_p, A p) {
    const bool vanishes = options.entropy_policy == EntropyPolicy::xlogx && log_p == -infinity<A>;
    return vanishes ? A(0) : -row.d_entropy * p * (log_p + 1);
  };
  SumOf<A> d_log_sum = 0;
  if (row.d_entropy != 0) {
    for (const A value : x) {
      const A log_p = (value - total.max) - log_sum;
      d_log_sum += SumOf<A>(d_log_p(log_p, exp(log_p)));
    }
  }
  for (A& value : x) {
    const A u = value - total.max;
    A d = exp(u) * kappa;
    if (row.d_entropy != 0) {
      const A log_p = u - log_sum;
      const A p = exp(log_p);
      d += d_log_p(log_p, p) - p * static_cast<A>(d_log_sum);
    }
    value = d;
  }
}

/// Rows of one block, their hidden states and logits, widened, and a panel of weight.
template <Storage S, Storage W, Accumulator A>
class RowBlock {
 public:
  RowBlock(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options, A divisor)
      : dims_(dims),
        inputs_(inputs),
        options_(options),
        divisor_(divisor),
        hidden_(size(std::min(rows_per_block, dims.tokens) * dims.hidden)),
        logits_(size(std::min(rows_per_block, dims.tokens) * dims.vocab)),
        panel_(size(std::min(panel_columns, dims.vocab) * dims.hidden)) {}

  [[nodiscard]] bool full() const { return rows_ == rows_per_block; }
  [[nodiscard]] std::int64_t rows() const { return rows_; }
  [[nodiscard]] std::int64_t token(std::int64_t row) const {
    return tokens_[static_cast<std::size_t>(row)];
  }
  [[nodiscard]] std::int64_t target(std::int64_t row) const {
    return target_column(inputs_.target_ids[static_cast<std::size_t>(token(row))], dims_.vocab);
  }
  [[nodiscard]] A* hidden(std::int64_t row) { return hidden_.data() + row * dims_.hidden; }
  [[nodiscard]] std::span<A> logits(std::int64_t row) {
    return {logits_.data() + row * dims_.vocab, size(dims_.vocab)};
  }

  void clear() { rows_ = 0; }
  void push(std::int64_t token) {
    tokens_[static_cast<std::size_t>(rows_)] = token;
    for (std::int64_t d = 0; d < dims_.hidden; ++d) {
      hidden(rows_)[d] = widen<A>(inputs_.hidden(token, d));
    }
    ++rows_;
  }

  /// Logits of every row: rounded to their dtype, then divided by the temperature.
  void compute_logits() {
    std::fill_n(logits_.begin(), rows_ * dims_.vocab, A(0));
    for_each_tile({0, dims_.vocab}, panel_columns, [&](Columns columns) {
      const A* const panel = load_panel_by_hidden(columns);  // [D, columns]
      for (std::int64_t row = 0; row < rows_; ++row) {
        A* const z = logits(row).data() + columns.first;
        for (std::int64_t d = 0; d < dims_.hidden; ++d) {
          add_scaled(hidden(row)[d], panel + d * columns.count(), columns.count(), z);
        }
      }
    });
    if (options_.logits_dtype != LogitsDtype::accumulator || divisor_ != 1) {
      for (A& z : std::span<A>(logits_).first(size(rows_ * dims_.vocab))) {
        z = rounded(z, options_.logits_dtype);
        z = divisor_ != 1 ? z / divisor_ : z;
      }
    }
  }

  /// Columns of the weight, widened, as [hidden, columns].
  [[nodiscard]] const A* load_panel_by_hidden(Columns columns) {
    const std::int64_t count = columns.count();
    if (inputs_.layout == WeightLayout::dv) {
      for (std::int64_t d = 0; d < dims_.hidden; ++d) {
        for (std::int64_t k = 0; k < count; ++k) {
          panel_[size(d * count + k)] = widen<A>(inputs_.weight(d, columns.first + k));
        }
      }
    } else {
      for (std::int64_t k = 0; k < count; ++k) {
        for (std::int64_t d = 0; d < dims_.hidden; ++d) {
          panel_[size(d * count + k)] = widen<A>(inputs_.weight(columns.first + k, d));
        }
      }
    }
    return panel_.data();
  }

  /// The same as [columns, hidden].
  [[nodiscard]] const A* load_panel_by_column(Columns columns) {
    const std::int64_t width = dims_.hidden;
    if (inputs_.layout == WeightLayout::vd) {
      for (std::int64_t k = 0; k < columns.count(); ++k) {
        for (std::int64_t d = 0; d < width; ++d) {
          panel_[size(k * width + d)] = widen<A>(inputs_.weight(columns.first + k, d));
        }
      }
    } else {
      for (std::int64_t d = 0; d < width; ++d) {
        for (std::int64_t k = 0; k < columns.count(); ++k) {
          panel_[size(k * width + d)] = widen<A>(inputs_.weight(d, columns.first + k));
        }
      }
    }
    return panel_.data();
  }

 private:
  [[nodiscard]] static std::size_t size(std::int64_t count) {
    return static_cast<std::size_t>(count);
  }

  const Dims& dims_;
  const Inputs<S, W>& inputs_;
  const ScoringOptions& options_;
  A divisor_;
  std::array<std::int64_t, static_cast<std::size_t>(rows_per_block)> tokens_{};
  std::int64_t rows_ = 0;
  std::vector<A> hidden_;  // [rows, D]
  std::vector<A> logits_;  // [rows, V]: on the way back their cotangents
  std::vector<A> panel_;
};

/// Logits become their cotangents, in place.
template <Storage S, Storage W, Accumulator A>
void compute_cotangents(RowBlock<S, W, A>& block, const ScoringOptions& options, A divisor,
                        const Residuals<A>& residuals,
                        const OutputCotangents<A>& output_cotangents) {
  const auto at = [](std::span<const A> values, std::size_t t) {
    return values.empty() ? A(0) : values[t];
  };
  for (std::int64_t row = 0; row < block.rows(); ++row) {
    const auto t = static_cast<std::size_t>(block.token(row));
    const RowCotangent<A> given = {.d_logp = output_cotangents.d_logps[t],
                                   .d_entropy = at(output_cotangents.d_entropy, t),
                                   .max = at(residuals.max, t),
                                   .exp_sum = at(residuals.exp_sum, t),
                                   .mean = at(residuals.mean, t)};
    const std::span<A> d_logits = block.logits(row);
    if (options.mode == Mode::fused) {
      fused_cotangent(d_logits, given);
    } else {
      local_cotangent(d_logits, given, options);
    }
    if (const std::int64_t target = block.target(row); target >= 0) {
      d_logits[static_cast<std::size_t>(target)] += given.d_logp;
    }
    if (options.logits_dtype != LogitsDtype::accumulator || divisor != 1) {
      for (A& d : d_logits) {
        d = divisor != 1 ? d / divisor : d;
        d = rounded(d, options.logits_dtype);
      }
    }
  }
}

/// d_hidden rows of a block: each rank's share in column order, ranks in theirs.
template <Storage S, Storage W, Accumulator A>
void write_d_hidden(RowBlock<S, W, A>& block, const Dims& dims, std::int64_t shards,
                    std::span<A> scratch, MatrixView<A> d_hidden) {
  for (std::int64_t row = 0; row < block.rows(); ++row) {
    std::ranges::fill(d_hidden.row(block.token(row)), A(0));
  }
  const std::span<A> rank_share =
      scratch.first(static_cast<std::size_t>(block.rows() * dims.hidden));  // [rows, D]
  const std::span<A> sum = scratch.last(static_cast<std::size_t>(dims.hidden));
  for_each_shard(dims.vocab, shards, [&](Columns held) {
    std::ranges::fill(rank_share, A(0));
    for_each_tile(held, panel_columns, [&](Columns columns) {
      const A* const panel = block.load_panel_by_column(columns);  // [columns, D]
      for (std::int64_t row = 0; row < block.rows(); ++row) {
        const A* const d_logits = block.logits(row).data() + columns.first;
        std::ranges::fill(sum, A(0));
        for (std::int64_t k = 0; k < columns.count(); ++k) {
          add_scaled(d_logits[k], panel + k * dims.hidden, dims.hidden, sum.data());
        }
        add_scaled(A(1), sum.data(), dims.hidden, rank_share.data() + row * dims.hidden);
      }
    });
    for (std::int64_t row = 0; row < block.rows(); ++row) {
      add_scaled(A(1), rank_share.data() + row * dims.hidden, dims.hidden,
                 d_hidden.row(block.token(row)).data());
    }
  });
}

/// Adds a block's share to d_weight: summed over its rows first, so that many tokens do not wear down
/// the digits of each.
template <Storage S, Storage W, Accumulator A>
void add_d_weight(RowBlock<S, W, A>& block, const Dims& dims, WeightLayout layout,
                  std::span<A> scratch, MatrixView<A> d_weight) {
  if (layout == WeightLayout::vd) {
    for (std::int64_t k = 0; k < dims.vocab; ++k) {
      const std::span<A> sum = scratch.first(static_cast<std::size_t>(dims.hidden));
      std::ranges::fill(sum, A(0));
      for (std::int64_t row = 0; row < block.rows(); ++row) {
        add_scaled(block.logits(row)[static_cast<std::size_t>(k)], block.hidden(row), dims.hidden,
                   sum.data());
      }
      add_scaled(A(1), sum.data(), dims.hidden, d_weight.row(k).data());
    }
    return;
  }
  for_each_tile({0, dims.vocab}, panel_columns, [&](Columns columns) {
    const std::span<A> sum = scratch.first(static_cast<std::size_t>(columns.count()));
    for (std::int64_t d = 0; d < dims.hidden; ++d) {
      std::ranges::fill(sum, A(0));
      for (std::int64_t row = 0; row < block.rows(); ++row) {
        add_scaled(block.hidden(row)[d], block.logits(row).data() + columns.first, columns.count(),
                   sum.data());
      }
      add_scaled(A(1), sum.data(), columns.count(), d_weight.row(d).data() + columns.first);
    }
  });
}

}  // namespace detail

template <Storage S, Storage W, Accumulator A>
void forward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
             const Outputs<A>& outputs) {
  constexpr const char* where = "head::reference::forward";
  head::detail::require_valid(where, dims, inputs, options);
  const A divisor = head::detail::temperature_divisor<A>(where, options);
  head::detail::require_valid(where, dims, outputs);

  const auto write = [&](std::int64_t token, const detail::RowScore<A>& score) {
    const auto t = static_cast<std::size_t>(token);
    const auto put = [t](std::span<A> values, A value) {
      if (!values.empty()) {
        values[t] = value;
      }
    };
    put(outputs.logps, score.logp);
    put(outputs.entropy, score.entropy);
    put(outputs.max, score.max);
    put(outputs.exp_sum, score.exp_sum);
    put(outputs.mean, score.mean);
  };
  detail::RowBlock<S, W, A> block(dims, inputs, options, divisor);
  for (std::int64_t token = 0; token < dims.tokens; ++token) {
    if (inputs.is_active(token)) {
      block.push(token);
    } else {
      write(token, {});
    }
    if (block.full() || (token + 1 == dims.tokens && block.rows() > 0)) {
      block.compute_logits();
      for (std::int64_t row = 0; row < block.rows(); ++row) {
        const std::span<const A> x = block.logits(row);
        write(block.token(row), options.mode == Mode::fused
                                    ? detail::fused_score(x, block.target(row), options)
                                    : detail::local_score(x, block.target(row), options));
      }
      block.clear();
    }
  }
}

template <Storage S, Storage W, Accumulator A>
void backward(const Dims& dims, const Inputs<S, W>& inputs, const ScoringOptions& options,
              const Residuals<A>& residuals, const OutputCotangents<A>& output_cotangents,
              const Cotangents<A>& cotangents) {
  constexpr const char* where = "head::reference::backward";
  head::detail::require_valid(where, dims, inputs, options);
  const A divisor = head::detail::temperature_divisor<A>(where, options);
  head::detail::require_valid(where, dims, options, residuals, output_cotangents);
  head::detail::require_valid(where, dims, inputs.layout, cotangents);

  const bool wants_d_hidden = !cotangents.d_hidden.is_null();
  const MatrixView<A> d_weight = cotangents.d_weight.values;
  if (cotangents.d_weight.wanted() && cotangents.d_weight.write == Write::overwrite) {
    for (std::int64_t row = 0; row < d_weight.rows(); ++row) {
      std::ranges::fill(d_weight.row(row), A(0));
    }
  }
  const auto draws_gradient = [&](std::int64_t token) {
    const auto t = static_cast<std::size_t>(token);
    return inputs.is_active(token) &&
           (output_cotangents.d_logps[t] != 0 ||
            (!output_cotangents.d_entropy.empty() && output_cotangents.d_entropy[t] != 0));
  };
  detail::RowBlock<S, W, A> block(dims, inputs, options, divisor);
  std::vector<A> scratch(static_cast<std::size_t>(
      std::max((detail::rows_per_block + 1) * dims.hidden, detail::panel_columns)));
  for (std::int64_t token = 0; token < dims.tokens; ++token) {
    if (draws_gradient(token)) {
      block.push(token);
    } else if (wants_d_hidden) {
      std::ranges::fill(cotangents.d_hidden.row(token), A(0));
    }
    if (block.full() || (token + 1 == dims.tokens && block.rows() > 0)) {
      block.compute_logits();
      detail::compute_cotangents(block, options, divisor, residuals, output_cotangents);
      if (wants_d_hidden) {
        detail::write_d_hidden(block, dims, detail::shards_of(options), std::span<A>(scratch),
                               cotangents.d_hidden);
      }
      if (cotangents.d_weight.wanted()) {
        detail::add_d_weight(block, dims, inputs.layout, std::span<A>(scratch), d_weight);
      }
      block.clear();
    }
  }
}

}  // namespace heddle::head::reference

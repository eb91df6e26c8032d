#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/moe/detail/rows.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/routing_map.hpp"
#include "heddle/moe/routing_window.hpp"

// Rows between tokens and experts. `rows` is always the buffer of a window, [window.rows, D], with the
// row of sorted position p where RoutingWindow::row_of says; slot t*K + k of token t has one if it was
// kept. All four passes go through the tokens: each token's row is read or written once, and stays in the
// first cache while its K rows in the buffer pass by. None of them sorts: the map of the forward serves
// the backward, an inverse being its own argsort.

namespace heddle::moe {

/// Where the cotangents of unsort go.
template <Storage S>
struct UnsortCotangents {
  using A = AccumulatorOf<S>;
  MatrixView<S> d_rows = {};            ///< [window.rows, D]; null: not computed
  MatrixView<A> d_expert_weights = {};  ///< [T,K]; null: not computed
};

namespace detail {

/// Tokens a task: its rows are about a megabyte, some fifty microseconds of memory traffic.
[[nodiscard]] inline std::int64_t tokens_per_task(const RouterDims& dims, std::int64_t row_bytes) {
  constexpr std::int64_t task_bytes = std::int64_t{1} << 20;
  return std::clamp<std::int64_t>(task_bytes / std::max<std::int64_t>(1, dims.top_k * row_bytes), 1,
                                  4096);
}

template <class T, class Body>
void for_token_ranges(const RoutingMap& map, MatrixView<T> rows, const Body& body) {
  const auto row_bytes = rows.cols() * static_cast<std::int64_t>(sizeof(T));
  parallel_blocks(map.dims.tokens, tokens_per_task(map.dims, row_bytes), body);
}

template <class T>
[[nodiscard]] SlotRows<T> slot_rows(const RoutingMap& map, const RoutingWindow& window,
                                    MatrixView<T> rows, std::int64_t token) {
  return {.rows = rows.data() + window.first_row * rows.stride(),
          .stride = rows.stride(),
          .positions = map.inverse.data() + token * map.dims.top_k,
          .count = map.dims.top_k,
          .first_position = window.first_position,
          .kept = window.kept,
          .has_next = token + 1 < map.dims.tokens};
}

inline void check_window(std::string_view where, const RoutingMap& map,
                         const RoutingWindow& window) {
  require(window.experts.first >= map.experts.first && window.experts.end() <= map.experts.end(),
          where, "window.experts.first", window.experts.first,
          "must lie, with all of the range, in the map's experts");
  require(
      window.kept >= 0 && window.first_row >= 0 && window.first_row + window.kept <= window.rows,
      where, "window.kept", window.kept, "must be rows of the window's buffer");
}

inline void check_write(std::string_view where, Write write) {
  require(write == Write::overwrite || write == Write::accumulate, where, "write", write,
          "must be overwrite or accumulate");
}

template <class T>
void zero_unfilled(const RoutingWindow& window, MatrixView<T> rows) {
  const auto zero = [&](std::int64_t from, std::int64_t to) {
    parallel_blocks(to - from, 64, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t row = from + first; row < from + last; ++row) {
        const std::span<T> values = rows.row(row);
        std::fill(values.begin(), values.end(), T(0));
      }
    });
  };
  zero(0, window.first_row);
  zero(window.first_row + window.kept, window.rows);
}

/// Results of this many bytes are out of the last cache before anything reads them: going past the
/// caches then saves a read of what is overwritten. Smaller ones are read next, from the cache.
inline constexpr std::int64_t streamed_bytes = std::int64_t{64} << 20;

template <class O>
[[nodiscard]] bool streams_past_caches(MatrixView<O> out) {
  constexpr std::uintptr_t line = 64;
  const auto row_bytes = static_cast<std::uintptr_t>(out.stride()) * sizeof(O);
  return out.rows() * out.cols() >= streamed_bytes / static_cast<std::int64_t>(sizeof(O)) &&
         reinterpret_cast<std::uintptr_t>(out.data()) % line == 0 && row_bytes % line == 0;
}

/// Streamed stores before whatever hands their task's results to another thread.
inline void order_streamed_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

/// Shared by sort_backward and unsort: the sum of a token's rows, weighted or not.
template <Storage S, Storage O>
void sum_rows(const RoutingMap& map, const RoutingWindow& window, std::int64_t first,
              std::int64_t last, ConstMatrixView<AccumulatorOf<S>> expert_weights,
              ConstMatrixView<S> rows, MatrixView<O> out, Write write) {
  const auto weighted_sum = row_functions<S, O>().weighted_sum;
  const bool streams = write == Write::overwrite && streams_past_caches(out);
  for (std::int64_t t = first; t < last; ++t) {
    weighted_sum(slot_rows(map, window, rows, t),
                 expert_weights.is_null() ? nullptr : expert_weights.row(t).data(),
                 write == Write::accumulate, streams, out.row(t).data(), rows.cols());
  }
  if (streams) {
    order_streamed_stores();
  }
}

template <Storage S, Storage O>
constexpr bool sums_to = std::is_same_v<O, S> || std::is_same_v<O, AccumulatorOf<S>>;

}  // namespace detail

/// sort for tokens [first, last), unchecked: what one task does.
template <Storage S>
void sort_tokens(const RoutingMap& map, const RoutingWindow& window, std::int64_t first,
                 std::int64_t last, ConstMatrixView<S> hidden, MatrixView<S> rows) {
  const auto bytes = static_cast<std::size_t>(hidden.cols()) * sizeof(S);
  for (std::int64_t t = first; t < last; ++t) {
    const detail::SlotRows<S> slots = detail::slot_rows(map, window, rows, t);
    const S* const source = hidden.row(t).data();
    for (std::int64_t k = 0; k < slots.count; ++k) {
      if (S* const row = slots.row(k)) {
        // Eigen's bfloat16 copies bytewise, though its type does not say so.
        std::memcpy(static_cast<void*>(row), source, bytes);
      }
    }
  }
}

/// Every kept slot's copy of its token.
///   rows[row of t*K + k] = hidden[t]
/// shapes    hidden [T,D]; rows [window.rows, D]
/// dtypes    any Storage; copied bit for bit
/// writes    the kept rows; the rest as `unfilled` says
/// alias     rows disjoint from hidden
/// specials  tokens without a kept slot are not read
/// order     each row has one writer
/// memory    none
/// cost      sort_cost
/// throws    Error for a window of another map, views of another shape
/// source    spec/moe.md 4; token by token as spec/performance.md 5
template <Storage S>
void sort(const RoutingMap& map, const RoutingWindow& window, ConstMatrixView<S> hidden,
          MatrixView<S> rows, UnfilledRows unfilled = UnfilledRows::untouched) {
  constexpr std::string_view where = "moe::sort";
  detail::check_window(where, map, window);
  require_shape(where, "hidden", hidden, "map.dims.tokens", map.dims.tokens, "hidden.cols",
                hidden.cols());
  require_shape(where, "rows", rows, "window.rows", window.rows, "hidden.cols", hidden.cols());
  detail::require_unfilled_rows(where, unfilled);
  detail::for_token_ranges(map, rows, [&](std::int64_t first, std::int64_t last) {
    sort_tokens<S>(map, window, first, last, hidden, rows);
  });
  if (unfilled == UnfilledRows::zeroed) {
    detail::zero_unfilled(window, rows);
  }
}

/// sort_backward for tokens [first, last), unchecked.
template <Storage S, Storage O>
void sort_backward_tokens(const RoutingMap& map, const RoutingWindow& window, std::int64_t first,
                          std::int64_t last, ConstMatrixView<S> d_rows, MatrixView<O> d_hidden,
                          Write write) {
  detail::sum_rows<S, O>(map, window, first, last, {}, d_rows, d_hidden, write);
}

/// The cotangent of sort.
///   d_hidden[t] = sum over kept k of d_rows[row of t*K + k]
/// shapes    d_rows [window.rows, D]; d_hidden [T,D]
/// dtypes    d_rows Storage; sums its Accumulator; d_hidden either of the two
/// writes    all of d_hidden, or adds to it
/// alias     d_hidden disjoint from d_rows
/// specials  only kept rows are read; a token without any gets +0
/// order     k ascending from +0, one rounding to d_hidden; same bits for any thread count and path
/// memory    none
/// cost      sort_backward_cost
/// throws    Error for a window of another map, views of another shape
/// source    spec/moe.md 4
template <Storage S, Storage O>
void sort_backward(const RoutingMap& map, const RoutingWindow& window, ConstMatrixView<S> d_rows,
                   MatrixView<O> d_hidden, Write write = Write::overwrite) {
  static_assert(
      detail::sums_to<S, O>,
      "heddle::moe::sort_backward: d_hidden must be of the rows' type or its accumulator");
  constexpr std::string_view where = "moe::sort_backward";
  detail::check_window(where, map, window);
  require_shape(where, "d_rows", d_rows, "window.rows", window.rows, "d_hidden.cols",
                d_hidden.cols());
  require_shape(where, "d_hidden", d_hidden, "map.dims.tokens", map.dims.tokens, "d_hidden.cols",
                d_hidden.cols());
  detail::check_write(where, write);
  detail::for_token_ranges(map, d_rows, [&](std::int64_t first, std::int64_t last) {
    sort_backward_tokens<S, O>(map, window, first, last, d_rows, d_hidden, write);
  });
}

/// unsort for tokens [first, last), unchecked.
template <Storage S, Storage O>
void unsort_tokens(const RoutingMap& map, const RoutingWindow& window, std::int64_t first,
                   std::int64_t last, ConstMatrixView<AccumulatorOf<S>> expert_weights,
                   ConstMatrixView<S> rows, MatrixView<O> out, Write write) {
  detail::sum_rows<S, O>(map, window, first, last, expert_weights, rows, out, write);
}

/// Each token's sum of its experts' rows.
///   out[t] = sum over kept k of expert_weights[t,k] * rows[row of t*K + k]
/// shapes    expert_weights [T,K]; rows [window.rows, D]; out [T,D]
/// dtypes    rows Storage; weights, products and sums its Accumulator; out either of the two
/// writes    all of out, or adds to it
/// alias     out disjoint from rows
/// specials  only kept rows are read, and never multiplied by 0; weights are not divided by what was
///           kept; a token without a kept slot gets +0
/// order     product and sum rounded each, k ascending from +0, one rounding to out; same bits for any
///           thread count and path
/// memory    none
/// cost      unsort_cost
/// throws    Error for a window of another map, views of another shape
/// source    spec/moe.md 4 and 10.1
template <Storage S, Storage O>
void unsort(const RoutingMap& map, const RoutingWindow& window,
            ConstMatrixView<AccumulatorOf<S>> expert_weights, ConstMatrixView<S> rows,
            MatrixView<O> out, Write write = Write::overwrite) {
  static_assert(detail::sums_to<S, O>,
                "heddle::moe::unsort: out must be of the rows' type or its accumulator");
  constexpr std::string_view where = "moe::unsort";
  detail::check_window(where, map, window);
  require_shape(where, "expert_weights", expert_weights, "map.dims.tokens", map.dims.tokens,
                "map.dims.top_k", map.dims.top_k);
  require_shape(where, "rows", rows, "window.rows", window.rows, "out.cols", out.cols());
  require_shape(where, "out", out, "map.dims.tokens", map.dims.tokens, "out.cols", out.cols());
  detail::check_write(where, write);
  detail::for_token_ranges(map, rows, [&](std::int64_t first, std::int64_t last) {
    unsort_tokens<S, O>(map, window, first, last, expert_weights, rows, out, write);
  });
}

/// unsort_backward for tokens [first, last), unchecked.
template <Storage S>
void unsort_backward_tokens(const RoutingMap& map, const RoutingWindow& window, std::int64_t first,
                            std::int64_t last, ConstMatrixView<AccumulatorOf<S>> expert_weights,
                            ConstMatrixView<S> rows, ConstMatrixView<S> d_out,
                            const UnsortCotangents<S>& out) {
  using A = AccumulatorOf<S>;
  const detail::RowFunctions<S> functions = detail::row_functions<S>();
  const std::int64_t columns = d_out.cols();
  for (std::int64_t t = first; t < last; ++t) {
    const S* const d_row = d_out.row(t).data();
    if (!out.d_expert_weights.is_null()) {
      const auto slots = detail::slot_rows(map, window, rows, t);
      for (std::int64_t k = 0; k < slots.count; ++k) {
        const S* const row = slots.row(k);
        out.d_expert_weights(t, k) = row == nullptr ? A(0) : functions.dot(d_row, row, columns);
      }
    }
    if (!out.d_rows.is_null()) {
      const auto slots = detail::slot_rows(map, window, out.d_rows, t);
      for (std::int64_t k = 0; k < slots.count; ++k) {
        if (S* const row = slots.row(k)) {
          functions.scale(expert_weights(t, k), d_row, row, columns);
        }
      }
    }
  }
}

/// The cotangents of unsort.
///   d_rows[row of t*K + k] = expert_weights[t,k] * d_out[t]
///   d_expert_weights[t,k] = <d_out[t], rows[row of t*K + k]>
/// shapes    expert_weights [T,K]; rows [window.rows, D]; d_out [T,D]; d_rows [window.rows, D],
///           d_expert_weights [T,K]
/// dtypes    rows, d_out and d_rows Storage; the rest and all arithmetic its Accumulator
/// writes    of d_rows the kept rows, the rest as `unfilled` says; all of d_expert_weights
/// alias     outputs disjoint from inputs. rows may be null where d_expert_weights is, expert_weights
///           where d_rows is
/// specials  a slot without a row: d_expert_weights 0. Only kept rows are read
/// order     each row and slot by itself; the dot in 64 fixed lanes; same bits for any thread count and
///           path
/// memory    none
/// cost      unsort_backward_cost
/// throws    Error for a window of another map, views of another shape
/// source    spec/moe.md 4
template <Storage S>
void unsort_backward(const RoutingMap& map, const RoutingWindow& window,
                     ConstMatrixView<AccumulatorOf<S>> expert_weights, ConstMatrixView<S> rows,
                     ConstMatrixView<S> d_out, const UnsortCotangents<S>& out,
                     UnfilledRows unfilled = UnfilledRows::untouched) {
  constexpr std::string_view where = "moe::unsort_backward";
  const std::int64_t tokens = map.dims.tokens;
  detail::check_window(where, map, window);
  if (!out.d_rows.is_null()) {
    require_shape(where, "expert_weights", expert_weights, "map.dims.tokens", tokens,
                  "map.dims.top_k", map.dims.top_k);
  }
  if (!out.d_expert_weights.is_null()) {
    require_shape(where, "rows", rows, "window.rows", window.rows, "d_out.cols", d_out.cols());
  }
  require_shape(where, "d_out", d_out, "map.dims.tokens", tokens, "d_out.cols", d_out.cols());
  if (!out.d_rows.is_null()) {
    require_shape(where, "d_rows", out.d_rows, "window.rows", window.rows, "d_out.cols",
                  d_out.cols());
  }
  if (!out.d_expert_weights.is_null()) {
    require_shape(where, "d_expert_weights", out.d_expert_weights, "map.dims.tokens", tokens,
                  "map.dims.top_k", map.dims.top_k);
  }
  detail::require_unfilled_rows(where, unfilled);
  detail::for_token_ranges(map, d_out, [&](std::int64_t first, std::int64_t last) {
    unsort_backward_tokens<S>(map, window, first, last, expert_weights, rows, d_out, out);
  });
  if (unfilled == UnfilledRows::zeroed && !out.d_rows.is_null()) {
    detail::zero_unfilled(window, out.d_rows);
  }
}

/// The weight of each kept row: row_weights[j] = expert_weights of the slot at the window's position j.
/// shapes    expert_weights [T,K]; row_weights [window.kept], from row window.first_row on
/// writes    all of row_weights
/// throws    Error for a window of another map, other shapes
template <class A>
void sort_weights(const RoutingMap& map, const RoutingWindow& window,
                  ConstMatrixView<A> expert_weights, std::span<A> row_weights) {
  constexpr std::string_view where = "moe::sort_weights";
  detail::check_window(where, map, window);
  require_shape(where, "expert_weights", expert_weights, "map.dims.tokens", map.dims.tokens,
                "map.dims.top_k", map.dims.top_k);
  require_length(where, "row_weights", row_weights, "window.kept", window.kept);
  parallel_blocks(window.kept, 16384, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t j = first; j < last; ++j) {
      const std::int64_t slot =
          map.permutation[static_cast<std::size_t>(window.first_position + j)];
      row_weights[static_cast<std::size_t>(j)] =
          expert_weights(slot / map.dims.top_k, slot % map.dims.top_k);
    }
  });
}

/// One number of each kept row to its slot, 0 to the slots without a row: what sort_weights did, back.
/// shapes    row_values [window.kept]; slot_values [T,K]
/// writes    all of slot_values
/// throws    Error for a window of another map, other shapes
template <class A>
void unsort_weights(const RoutingMap& map, const RoutingWindow& window,
                    std::span<const A> row_values, MatrixView<A> slot_values) {
  constexpr std::string_view where = "moe::unsort_weights";
  detail::check_window(where, map, window);
  require_length(where, "row_values", row_values, "window.kept", window.kept);
  require_shape(where, "slot_values", slot_values, "map.dims.tokens", map.dims.tokens,
                "map.dims.top_k", map.dims.top_k);
  parallel_blocks(map.dims.tokens, 4096, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      const detail::SlotRows<const A> slots{.rows = row_values.data(),
                                            .stride = 1,
                                            .positions = map.inverse.data() + t * map.dims.top_k,
                                            .count = map.dims.top_k,
                                            .first_position = window.first_position,
                                            .kept = window.kept};
      for (std::int64_t k = 0; k < map.dims.top_k; ++k) {
        const A* const value = slots.row(k);
        slot_values(t, k) = value == nullptr ? A(0) : *value;
      }
    }
  });
}

/// Costs of moving rows of `hidden` elements. Rows that no slot has cost nothing; nor do tokens without
/// a kept slot in sort, but which those are is not known to a window: their rows count as read.
template <Storage S>
[[nodiscard]] Cost sort_cost(const RoutingMap& map, const RoutingWindow& window,
                             std::int64_t hidden) {
  const std::int64_t row = hidden * static_cast<std::int64_t>(sizeof(S));
  return {.bytes_read = map.dims.tokens * row +
                        map.dims.slots() * static_cast<std::int64_t>(sizeof(std::int32_t)),
          .bytes_written = window.kept * row};
}

/// Of unsort, and of sort_backward, which has no products.
template <Storage S, Storage O>
[[nodiscard]] Cost unsort_cost(const RoutingMap& map, const RoutingWindow& window,
                               std::int64_t hidden) {
  constexpr auto weight = static_cast<std::int64_t>(sizeof(AccumulatorOf<S>));
  constexpr auto position = static_cast<std::int64_t>(sizeof(std::int32_t));
  return {.flops = 2 * window.kept * hidden,
          .bytes_read = window.kept * hidden * static_cast<std::int64_t>(sizeof(S)) +
                        map.dims.slots() * (position + weight),
          .bytes_written = map.dims.tokens * hidden * static_cast<std::int64_t>(sizeof(O))};
}
template <Storage S, Storage O>
[[nodiscard]] Cost sort_backward_cost(const RoutingMap& map, const RoutingWindow& window,
                                      std::int64_t hidden) {
  Cost cost = unsort_cost<S, O>(map, window, hidden);
  cost.flops /= 2;
  cost.bytes_read -= map.dims.slots() * static_cast<std::int64_t>(sizeof(AccumulatorOf<S>));
  return cost;
}

/// Of unsort_backward with both cotangents.
template <Storage S>
[[nodiscard]] Cost unsort_backward_cost(const RoutingMap& map, const RoutingWindow& window,
                                        std::int64_t hidden) {
  constexpr auto weight = static_cast<std::int64_t>(sizeof(AccumulatorOf<S>));
  constexpr auto position = static_cast<std::int64_t>(sizeof(std::int32_t));
  const std::int64_t row = hidden * static_cast<std::int64_t>(sizeof(S));
  return {
      .flops = 3 * window.kept * hidden,
      .bytes_read = (map.dims.tokens + window.kept) * row + map.dims.slots() * (position + weight),
      .bytes_written = window.kept * row + map.dims.slots() * weight};
}

}  // namespace heddle::moe

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "heddle/core/error.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/detail/gate_rows.hpp"
#include "heddle/gdn/dims.hpp"
#include "heddle/gdn/segments.hpp"
#include "heddle/gdn/tile.hpp"

namespace heddle::gdn {

/// The gates' inputs, all value heads side by side.
///
/// shapes    a, b [T,Hv]; A_log, dt_bias [Hv]
template <Storage S, Accumulator A>
struct GateInputs {
  ConstMatrixView<S> a{};
  ConstMatrixView<S> b{};
  std::span<const A> A_log{};
  std::span<const A> dt_bias{};

  [[nodiscard]] std::int64_t heads() const { return static_cast<std::int64_t>(A_log.size()); }
};

/// Where the cotangents of the gates' parameters go.
template <Accumulator A>
struct GateParameterCotangents {
  VectorCotangent<A> d_A_log{};
  VectorCotangent<A> d_dt_bias{};
};

namespace detail {

/// Tokens whose terms of d_A_log and d_dt_bias are summed before anything else is added to them.
inline constexpr std::int64_t gate_block = 256;

template <Accumulator A>
[[nodiscard]] constexpr A highest_strength(BetaRange range) {
  return range == BetaRange::doubled ? A(2) : A(1);
}

/// exp(A_log), once for all tokens.
template <Accumulator A>
[[nodiscard]] std::span<A> take_rates(std::span<const A> A_log, Workspace& workspace) {
  using std::exp;
  const std::span<A> rate = workspace.take<A>(static_cast<std::int64_t>(A_log.size()));
  for (std::size_t h = 0; h < rate.size(); ++h) {
    rate[h] = exp(A_log[h]);
  }
  return rate;
}

template <Storage S, Accumulator A>
void check_gates(std::string_view where, const Segments& segments, const GateInputs<S, A>& inputs) {
  const std::int64_t heads = inputs.heads();
  require_shape(where, "a", inputs.a, "segments.tokens", segments.tokens(), "A_log.size", heads);
  require_shape(where, "b", inputs.b, "segments.tokens", segments.tokens(), "A_log.size", heads);
  require_length(where, "dt_bias", inputs.dt_bias, "A_log.size", heads);
}

/// gates_forward over a range of tokens, rates given.
template <Storage S, Accumulator A>
void gates_of_range(const Segments& segments, const GateInputs<S, A>& inputs, const A* rate,
                    BetaRange beta_range, TokenRange range, MatrixView<A> beta, MatrixView<A> g) {
  const std::int64_t heads = inputs.heads();
  const A top = highest_strength<A>(beta_range);
  for (std::int64_t t = range.first; t < range.end(); ++t) {
    if (segments.valid(t)) {
      strengths(&inputs.b(t, 0), top, &beta(t, 0), heads);
    } else {
      std::fill_n(&beta(t, 0), heads, A(0));
    }
    if (segments.valid(t) && !segments.starts(t)) {
      decays(&inputs.a(t, 0), rate, inputs.dt_bias.data(), &g(t, 0), heads);
    } else {
      std::fill_n(&g(t, 0), heads, A(0));
    }
  }
}

/// Loops over blocks of tokens: in the calling thread, or in its arena.
struct SerialBlocks {
  template <class Body>
  void operator()(std::int64_t blocks, const Body& body) const {
    for (std::int64_t block = 0; block < blocks; ++block) {
      body(block);
    }
  }
};
struct ParallelBlocks {
  template <class Body>
  void operator()(std::int64_t blocks, const Body& body) const {
    parallel_tasks(blocks, body);
  }
};

[[nodiscard]] inline std::int64_t gate_blocks(const Segments& segments) {
  return (segments.tokens() + gate_block - 1) / gate_block;
}

[[nodiscard]] inline TokenRange gate_range(const Segments& segments, std::int64_t block) {
  const std::int64_t first = block * gate_block;
  return {first, std::min(gate_block, segments.tokens() - first)};
}

template <Storage S, Accumulator A, class Loop>
void gates_forward(const Segments& segments, const GateInputs<S, A>& inputs, BetaRange beta_range,
                   MatrixView<A> beta, MatrixView<A> g, Workspace& workspace, const Loop& loop) {
  const Workspace::Frame frame(workspace);
  const std::span<A> rate = take_rates(inputs.A_log, workspace);
  loop(gate_blocks(segments), [&](std::int64_t block) {
    gates_of_range(segments, inputs, rate.data(), beta_range, gate_range(segments, block), beta, g);
  });
}

template <Storage S, Accumulator A, class Loop>
void gates_backward(const Segments& segments, const GateInputs<S, A>& inputs, BetaRange beta_range,
                    MatrixView<A> d_g_then_d_a, MatrixView<A> d_beta_then_d_b,
                    const GateParameterCotangents<A>& parameters, Workspace& workspace,
                    const Loop& loop) {
  const std::int64_t heads = inputs.heads();
  const Workspace::Frame frame(workspace);
  const std::span<A> rate = take_rates(inputs.A_log, workspace);
  const A top = highest_strength<A>(beta_range);
  const std::int64_t blocks = gate_blocks(segments);
  const MatrixView<A> sums(workspace.take<A>(blocks * 2 * heads).data(), blocks, 2 * heads);
  loop(blocks, [&](std::int64_t block) {
    A* const sum = &sums(block, 0);  // of d_A_log, then of d_dt_bias
    std::fill_n(sum, 2 * heads, A(0));
    const TokenRange range = gate_range(segments, block);
    for (std::int64_t t = range.first; t < range.end(); ++t) {
      A* const d_a = &d_g_then_d_a(t, 0);
      A* const d_b = &d_beta_then_d_b(t, 0);
      if (segments.valid(t)) {
        strengths_backward(&inputs.b(t, 0), top, d_b, heads);
      } else {
        std::fill_n(d_b, heads, A(0));
      }
      if (segments.valid(t) && !segments.starts(t)) {
        decays_backward(&inputs.a(t, 0), rate.data(), inputs.dt_bias.data(), d_a, sum, sum + heads,
                        heads);
      } else {
        std::fill_n(d_a, heads, A(0));
      }
    }
  });

  const auto deliver = [&](const VectorCotangent<A>& cotangent, std::int64_t first) {
    for (std::int64_t h = 0; cotangent.wanted() && h < heads; ++h) {
      double total = 0;
      for (std::int64_t block = 0; block < blocks; ++block) {
        total += static_cast<double>(sums(block, first + h));
      }
      A& value = cotangent.values[static_cast<std::size_t>(h)];
      value = cotangent.write == Write::accumulate ? value + static_cast<A>(total)
                                                   : static_cast<A>(total);
    }
  };
  deliver(parameters.d_A_log, 0);
  deliver(parameters.d_dt_bias, heads);
}

}  // namespace detail

/// Bytes of workspace that suffice for gates_forward and gates_backward.
template <Accumulator A>
[[nodiscard]] constexpr std::size_t gates_workspace_bytes(std::int64_t tokens,
                                                          std::int64_t value_heads) {
  const std::int64_t blocks = (tokens + detail::gate_block - 1) / detail::gate_block;
  return Workspace::bytes_for<A>(value_heads) + Workspace::bytes_for<A>(blocks * 2 * value_heads);
}

/// Writing strength and log decay of every token and value head.
///   beta = sigmoid(b), twice that where BetaRange::doubled;  g = -exp(A_log) softplus(a + dt_bias)
/// shapes    beta, g [T,Hv]
/// units     g in nats, <= 0
/// dtypes    a, b: Storage, widened first; arithmetic and outputs: Accumulator
/// writes    all of beta and g
/// alias     outputs disjoint from inputs and each other
/// specials  padding: beta = g = 0, a and b not read; a document's first token: g = 0, a not read
///           (its decay would multiply a state that is exactly zero)
/// order     an element depends on its own inputs alone
/// memory    gates_workspace_bytes
/// cost      3 transcendentals an element
/// throws    Error for another shape of an argument
/// source    spec/gdn.md 3
template <Storage S, Accumulator A>
void gates_forward(const Segments& segments, const GateInputs<S, A>& inputs, BetaRange beta_range,
                   MatrixView<A> beta, MatrixView<A> g, Workspace& workspace) {
  constexpr std::string_view where = "gdn::gates_forward";
  detail::check_gates(where, segments, inputs);
  require_shape(where, "beta", beta, "segments.tokens", segments.tokens(), "A_log.size",
                inputs.heads());
  require_shape(where, "g", g, "segments.tokens", segments.tokens(), "A_log.size", inputs.heads());
  detail::gates_forward(segments, inputs, beta_range, beta, g, workspace, detail::ParallelBlocks{});
}

/// Backward of gates_forward.
///   d_b = d_beta beta (1 - sigmoid(b));  d_a = -d_g exp(A_log) sigmoid(a + dt_bias)
///   d_dt_bias = sum_t d_a,  d_A_log = sum_t d_g g
/// shapes    d_g_then_d_a, d_beta_then_d_b [T,Hv]: the cotangents of g and beta going in, those of a and
///           b coming out
/// writes    all of both; exactly 0 at padding, d_a also at a document's first token; parameters as
///           they say
/// specials  rows of padding, and d_g at a document's first token, are not read
/// order     parameter sums in blocks of 256 tokens, the blocks ascending in double
/// memory    gates_workspace_bytes
/// throws    Error for another shape of an argument
/// source    spec/gdn.md 3
template <Storage S, Accumulator A>
void gates_backward(const Segments& segments, const GateInputs<S, A>& inputs, BetaRange beta_range,
                    MatrixView<A> d_g_then_d_a, MatrixView<A> d_beta_then_d_b,
                    const GateParameterCotangents<A>& parameters, Workspace& workspace) {
  constexpr std::string_view where = "gdn::gates_backward";
  const std::int64_t heads = inputs.heads();
  detail::check_gates(where, segments, inputs);
  require_shape(where, "d_g_then_d_a", d_g_then_d_a, "segments.tokens", segments.tokens(),
                "A_log.size", heads);
  require_shape(where, "d_beta_then_d_b", d_beta_then_d_b, "segments.tokens", segments.tokens(),
                "A_log.size", heads);
  for (const auto& [name, cotangent] :
       {std::pair{"d_A_log", parameters.d_A_log}, std::pair{"d_dt_bias", parameters.d_dt_bias}}) {
    if (cotangent.wanted()) {
      require_length(where, name, cotangent.values, "A_log.size", heads);
    }
  }
  detail::gates_backward(segments, inputs, beta_range, d_g_then_d_a, d_beta_then_d_b, parameters,
                         workspace, detail::ParallelBlocks{});
}

}  // namespace heddle::gdn

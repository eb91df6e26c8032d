#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gdn/problem.hpp"
#include "heddle/gdn/context_parallel.hpp"
#include "heddle/mesh/local_mesh.hpp"

namespace heddle::gdn::test {

/// How a row is cut, and how the call proceeds.
struct Cut {
  std::int64_t ranks = 1;
  ContextLayout layout = ContextLayout::contiguous;
  std::int64_t pieces_per_rank = 0;
  ContextOptions options{};
  bool keep_inverses = true;
  Write write = Write::overwrite;
};

[[nodiscard]] inline std::string describe(const Cut& cut) {
  return std::to_string(cut.ranks) +
         (cut.layout == ContextLayout::dual_chunk_swap ? " dual" : " contiguous") + " x" +
         std::to_string(cut.pieces_per_rank) +
         (cut.options.exchange == StateExchange::gather ? " gather" : " chain") + " chunk " +
         std::to_string(cut.options.chunks.chunk) +
         (cut.options.chunks.chunking == Chunking::grid ? " grid" : "");
}

/// What all ranks wrote, put together in sequence order; parameters as every rank has them.
template <class S, class A>
struct ContextRun {
  ForwardResult<A, S, A> forward;
  Gradients<A> gradients;
  Ledger ledger;
  std::vector<std::size_t> forward_row_bytes, forward_thread_bytes, row_bytes, thread_bytes;
  std::vector<std::vector<A>> transitions;  // of each rank
};

/// Forward and backward of a row over the context axis of a mesh. States are given and cotangents of final
/// states passed on every rank alike: those that have nothing to do with them must not read them.
template <class S, class P, class A>
[[nodiscard]] ContextRun<S, A> run_context(const Problem<S, P, A>& p, const Cut& cut,
                                           LocalMeshOptions mesh_options = {}) {
  ContextRun<S, A> run{ForwardResult<A, S, A>(p.dims), Gradients<A>(p), {}, {}, {}, {}, {}, {}};
  const auto ranks = static_cast<std::size_t>(cut.ranks);
  run.forward_row_bytes.resize(ranks);
  run.forward_thread_bytes.resize(ranks);
  run.row_bytes.resize(ranks);
  run.thread_bytes.resize(ranks);
  run.transitions.resize(ranks);
  const ContextPartition partition(cut.layout, p.dims.tokens, cut.ranks);
  const ContextRow row{partition, p.segment_ids, cut.pieces_per_rank};
  std::vector<Gradients<A>> each(ranks, Gradients<A>(p));
  if (cut.write == Write::accumulate) {
    for (Gradients<A>& g : each) {
      std::fill(g.d_conv_weight.begin(), g.d_conv_weight.end(), A(0));
      std::fill(g.d_conv_bias.begin(), g.d_conv_bias.end(), A(0));
      std::fill(g.d_A_log.begin(), g.d_A_log.end(), A(0));
      std::fill(g.d_dt_bias.begin(), g.d_dt_bias.end(), A(0));
    }
  }
  LocalMesh mesh({.context = cut.ranks}, mesh_options);
  mesh.run([&](auto& device) {
    const std::int64_t rank = device.id();
    const auto at = static_cast<std::size_t>(rank);
    Problem<S, P, A> mine = p;
    mine.dims.tokens = partition.shard();
    const auto take = [&](auto& to, const auto& from, std::int64_t cols) {
      to.clear();
      for (std::int64_t i = 0; i < partition.shard(); ++i) {
        const std::int64_t t = partition.source(rank * partition.shard() + i);
        to.insert(to.end(), from.begin() + t * cols, from.begin() + (t + 1) * cols);
      }
    };
    const auto put = [&](const auto& from, auto& to, std::int64_t cols) {
      for (std::int64_t i = 0; i < partition.shard(); ++i) {
        const std::int64_t t = partition.source(rank * partition.shard() + i);
        std::copy_n(from.begin() + i * cols, cols, to.begin() + t * cols);
      }
    };
    take(mine.qkv, p.qkv, p.dims.qkv_columns());
    take(mine.a, p.a, p.dims.value_heads);
    take(mine.b, p.b, p.dims.value_heads);
    take(mine.d_o, p.d_o, p.dims.output_columns());
    const ContextPieces pieces("test", row, p.options.initial_segment, p.dims.kernel,
                               cut.options.final_state);
    if (pieces.owner(0) != rank) {
      std::fill(mine.conv_state.begin(), mine.conv_state.end(), poison<S>());
      std::fill(mine.recurrent_state.begin(), mine.recurrent_state.end(), poison<A>());
    }
    if (pieces.owner(pieces.count() - 1) != rank) {
      std::fill(mine.d_final_recurrent_state.begin(), mine.d_final_recurrent_state.end(),
                poison<A>());
    }
    if (pieces.owner(pieces.final_window_piece()) != rank) {
      std::fill(mine.d_final_conv_state.begin(), mine.d_final_conv_state.end(), poison<A>());
    }
    Inputs<S, P, A> inputs = mine.inputs();
    inputs.segment_ids = {};

    const std::int64_t states = pieces.per_rank() * p.dims.state_rows();
    const auto cells = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    std::vector<A> kept_states(cells(states * p.dims.value_dim), poison<A>());
    std::vector<A> transitions(cells(states * p.dims.key_dim), poison<A>());
    std::vector<S> windows(cells(pieces.per_rank() * p.dims.window_rows() * p.dims.qkv_columns()),
                           poison<S>());
    const std::int64_t square = cut.options.chunks.chunk * cut.options.chunks.chunk;
    const std::int64_t inverses =
        cut.keep_inverses ? pieces.chunks(rank, cut.options.chunks) * p.dims.value_heads : 0;
    std::vector<A> t_inv(cells(inverses * square), poison<A>());
    const ContextResiduals<S, A> residuals{
        .states = matrix(kept_states, states, p.dims.value_dim),
        .transitions = matrix(transitions, states, p.dims.key_dim),
        .windows = matrix(windows, pieces.per_rank() * p.dims.window_rows(), p.dims.qkv_columns()),
        .t_inv = matrix(t_inv, inverses, square)};
    LayerScratch scratch;
    ForwardResult<A, S, A> forward(mine.dims);
    auto outputs = forward.outputs(mine.dims);
    auto given = mine.cotangents();
    if (!cut.options.final_state) {
      outputs.final_recurrent_state = {};
      given.d_final_recurrent_state = {};
    }
    context_forward(device, mine.dims, row, inputs, p.options, cut.options, outputs, residuals,
                    scratch);
    run.forward_row_bytes[at] = scratch.row_high_water_bytes();
    run.forward_thread_bytes[at] = scratch.thread_high_water_bytes();
    run.transitions[at] = transitions;
    put(forward.o, run.forward.o, p.dims.output_columns());
    if (pieces.owner(pieces.count() - 1) == rank) {
      run.forward.final_recurrent_state = forward.final_recurrent_state;
    }
    if (pieces.owner(pieces.final_window_piece()) == rank) {
      run.forward.final_conv_state = forward.final_conv_state;
    }
    const LedgerScope scope(device.ledger(), Phase::backward, "");
    LayerScratch backward_scratch;
    Gradients<A>& g = each[at];
    g.d_qkv.assign(mine.qkv.size(), poison<A>());
    g.d_a.assign(mine.a.size(), poison<A>());
    g.d_b.assign(mine.b.size(), poison<A>());
    context_backward(device, mine.dims, row, inputs, p.options, cut.options, residuals.kept(),
                     given, g.cotangents(mine.dims, cut.write), backward_scratch);
    run.row_bytes[at] = backward_scratch.row_high_water_bytes();
    run.thread_bytes[at] = backward_scratch.thread_high_water_bytes();
    put(g.d_qkv, run.gradients.d_qkv, p.dims.qkv_columns());
    put(g.d_a, run.gradients.d_a, p.dims.value_heads);
    put(g.d_b, run.gradients.d_b, p.dims.value_heads);
    if (pieces.owner(0) == rank) {
      run.gradients.d_conv_state = g.d_conv_state;
      run.gradients.d_recurrent_state = g.d_recurrent_state;
    }
  });
  run.ledger = mesh.ledger();
  require_balanced(run.ledger);
  run.gradients.d_conv_weight = each[0].d_conv_weight;
  run.gradients.d_conv_bias = each[0].d_conv_bias;
  run.gradients.d_A_log = each[0].d_A_log;
  run.gradients.d_dt_bias = each[0].d_dt_bias;
  for (const Gradients<A>& other : each) {
    EXPECT_TRUE(heddle::test::same_bits(other.d_conv_weight, each[0].d_conv_weight));
    EXPECT_TRUE(heddle::test::same_bits(other.d_A_log, each[0].d_A_log));
  }
  return run;
}

}  // namespace heddle::gdn::test

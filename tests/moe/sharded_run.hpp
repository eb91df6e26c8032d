#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/workspace.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/ledger.hpp"
#include "heddle/mesh/local_mesh.hpp"
#include "heddle/mesh/shard_rules.hpp"
#include "heddle/mesh/topology.hpp"
#include "heddle/moe/sharded_layer.hpp"
#include "moe/layer_run.hpp"
#include "moe/problem.hpp"
#include "support/compare.hpp"

namespace heddle::moe::test {

/// A device's part of a matrix of blocks, from the rules themselves: some blocks, of each some rows, of
/// each some columns.
struct Part {
  IndexRange blocks, rows, cols;
  std::int64_t block_rows = 0;
  std::int64_t all_cols = 0;

  template <class Visit>
  void for_each(const Visit& visit) const {
    std::size_t own = 0;
    for (std::int64_t b = blocks.first; b < blocks.first + blocks.count; ++b) {
      for (std::int64_t r = rows.first; r < rows.first + rows.count; ++r) {
        for (std::int64_t c = cols.first; c < cols.first + cols.count; ++c) {
          visit(static_cast<std::size_t>((b * block_rows + r) * all_cols + c), own++);
        }
      }
    }
  }
  template <class T>
  [[nodiscard]] std::vector<T> of(const std::vector<T>& whole) const {
    std::vector<T> part;
    if (!whole.empty()) {
      for_each([&](std::size_t from, std::size_t) { part.push_back(whole[from]); });
    }
    return part;
  }
  [[nodiscard]] std::int64_t view_rows() const { return blocks.count * rows.count; }
};

/// All parts of one device.
struct DeviceParts {
  Part tokens_d, tokens_k, tokens_e, router, wi, wo, shared_wi, shared_wo, shared_gate;
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;

  DeviceParts(const Topology& mesh, std::int64_t id, const Dims& d, const ShardRules& rules) {
    tokens = d.tokens / mesh.devices();
    first_token = id * tokens;
    const auto of_tokens = [&](std::int64_t cols) {
      return Part{{0, 1}, {first_token, tokens}, {0, cols}, d.tokens, cols};
    };
    tokens_d = of_tokens(d.hidden);
    tokens_k = of_tokens(d.top_k);
    tokens_e = of_tokens(d.experts);
    const auto ranges = [&](ModelArray array, std::vector<std::int64_t> sizes) {
      return local_ranges(shards_of(array, rules), mesh, id, sizes);
    };
    const auto wi_ranges =
        ranges(ModelArray::expert_wi, {d.experts, d.hidden, 2 * d.expert_hidden});
    const auto wo_ranges = ranges(ModelArray::expert_wo, {d.experts, d.expert_hidden, d.hidden});
    wi = {wi_ranges[0], wi_ranges[1], wi_ranges[2], d.hidden, 2 * d.expert_hidden};
    wo = {wo_ranges[0], wo_ranges[1], wo_ranges[2], d.expert_hidden, d.hidden};
    const IndexRange dense = ranges(ModelArray::dense_kernel, {d.hidden, 1})[0];
    router = {{0, 1}, dense, {0, d.experts}, d.hidden, d.experts};
    shared_wi = {{0, 1}, dense, {0, 2 * d.shared_hidden}, d.hidden, 2 * d.shared_hidden};
    shared_wo = {{0, 1}, {0, d.shared_hidden}, dense, d.shared_hidden, d.hidden};
    shared_gate = {{0, 1}, dense, {0, 1}, d.hidden, 1};
  }
};

/// One device's cut of a problem.
template <class S, class R>
[[nodiscard]] Problem<S, R> cut(const Problem<S, R>& p, const DeviceParts& parts) {
  Problem<S, R> own;
  own.dims = p.dims;
  own.dims.tokens = parts.tokens;
  own.options = p.options;
  own.hidden = parts.tokens_d.of(p.hidden);
  own.d_out = parts.tokens_d.of(p.d_out);
  own.wi = parts.wi.of(p.wi);
  own.wo = parts.wo.of(p.wo);
  own.router_weight = parts.router.of(p.router_weight);
  own.shared_wi = parts.shared_wi.of(p.shared_wi);
  own.shared_wo = parts.shared_wo.of(p.shared_wo);
  own.shared_gate = parts.shared_gate.of(p.shared_gate);
  own.forced_ids = parts.tokens_k.of(p.forced_ids);
  own.d_router_logits = parts.tokens_e.of(p.d_router_logits);
  if (!p.segment_ids.empty()) {
    const auto first = p.segment_ids.begin() + parts.first_token;
    own.segment_ids.assign(first, first + parts.tokens);
  }
  return own;
}

template <class T>
[[nodiscard]] ConstMatrixView<T> part_view(const std::vector<T>& values, const Part& part) {
  return matrix(values, part.view_rows(), part.cols.count);
}
template <class T>
[[nodiscard]] MatrixView<T> part_view(std::vector<T>& values, const Part& part) {
  return matrix(values, part.view_rows(), part.cols.count);
}

template <class S, class R>
[[nodiscard]] Inputs<S, R> inputs_of(const Problem<S, R>& own, const DeviceParts& parts) {
  return {.hidden = {own.hidden.data(), parts.tokens, own.dims.hidden},
          .router_weight = part_view(own.router_weight, parts.router),
          .wi = part_view(own.wi, parts.wi),
          .wo = part_view(own.wo, parts.wo),
          .shared_wi = part_view(own.shared_wi, parts.shared_wi),
          .shared_wo = part_view(own.shared_wo, parts.shared_wo),
          .shared_gate = part_view(own.shared_gate, parts.shared_gate),
          .forced_ids = matrix(own.forced_ids, parts.tokens, own.dims.top_k),
          .segment_ids = own.segment_ids};
}

/// What a run asks for beside all results.
struct RunChoice {
  ShardedOptions options = {};
  bool with_residuals = true;
  bool backward = true;
  Write write = Write::overwrite;
  double before = std::numeric_limits<double>::quiet_NaN();  ///< in the weights' cotangents
  bool weight_cotangents = true;
  LocalMeshOptions mesh = {};
};

/// The results of all devices, put together as those of one.
template <class S>
struct ShardedResult {
  using A = AccumulatorOf<S>;
  Result<A> forward;
  Gradients<A> gradients;
  std::vector<LayerReport> reports;
  Ledger forward_ledger, backward_ledger;
  std::int64_t maps_built = 0;  ///< on one device
  std::size_t most_forward_bytes = 0;
  std::size_t most_backward_bytes = 0;
  std::size_t residual_bytes = 0;
};

/// Forward and backward of a whole problem on a mesh. Calls has what the strategy is called by.
template <class Calls, class S, class R>
[[nodiscard]] ShardedResult<S> run_sharded(const Problem<S, R>& p, const MeshAxes& axes,
                                           const RunChoice& choice) {
  using A = AccumulatorOf<S>;
  const Topology topology(axes);
  const auto devices = static_cast<std::size_t>(topology.devices());
  const auto nan = poison<A>();
  ShardedResult<S> result{
      .forward = {std::vector<A>(p.hidden.size(), nan),
                  std::vector<A>(static_cast<std::size_t>(p.dims.slots()), nan),
                  std::vector<A>(static_cast<std::size_t>(p.dims.tokens * p.dims.experts), nan),
                  std::vector<std::int32_t>(static_cast<std::size_t>(p.dims.slots()), -77),
                  std::vector<std::int64_t>(static_cast<std::size_t>(p.dims.experts), 0),
                  {}},
      .gradients = Gradients<A>(p, nan),
      .reports = std::vector<LayerReport>(devices),
      .forward_ledger = {},
      .backward_ledger = {}};
  std::vector<Workspace> memories(devices);
  std::vector<typename Calls::template Residuals<S>> residuals(devices);
  std::vector<Problem<S, R>> problems;
  std::vector<DeviceParts> parts;
  std::vector<std::vector<std::int64_t>> group_sizes;
  std::vector<Result<A>> outputs(devices);
  std::vector<std::int64_t> maps_built(devices);
  std::vector<std::size_t> used(devices);
  for (std::size_t i = 0; i < devices; ++i) {
    parts.emplace_back(topology, static_cast<std::int64_t>(i), p.dims, choice.options.rules);
    problems.push_back(cut(p, parts.back()));
    const Dims& dims = problems.back().dims;
    const auto poisoned = [&](std::int64_t count) {
      return std::vector<A>(static_cast<std::size_t>(count), nan);
    };
    outputs[i] = {poisoned(dims.tokens * dims.hidden),
                  poisoned(dims.slots()),
                  poisoned(dims.tokens * dims.experts),
                  std::vector<std::int32_t>(static_cast<std::size_t>(dims.slots()), -77),
                  std::vector<std::int64_t>(static_cast<std::size_t>(dims.experts), -77),
                  {}};
    if (choice.with_residuals) {
      residuals[i] = Calls::template take<S>(topology, dims, choice.options, memories[i]);
      result.residual_bytes = memories[i].high_water_bytes();
    }
  }
  LocalMesh mesh(axes, choice.mesh);
  mesh.run([&](auto& device) {
    const auto i = static_cast<std::size_t>(device.id());
    Workspace map_workspace;
    Workspace workspace;
    RoutingMapBuilder maps(map_workspace);
    const Dims& d = problems[i].dims;
    Result<A>& own = outputs[i];
    result.reports[i] =
        Calls::forward(device, d, inputs_of(problems[i], parts[i]), choice.options,
                       Outputs<A>{.out = {own.out.data(), d.tokens, d.hidden},
                                  .expert_ids = matrix(own.expert_ids, d.tokens, d.top_k),
                                  .expert_weights = matrix(own.expert_weights, d.tokens, d.top_k),
                                  .router_logits = matrix(own.router_logits, d.tokens, d.experts),
                                  .group_sizes = own.group_sizes},
                       residuals[i], maps, workspace);
    maps_built[i] = maps.maps_built();
    used[i] = workspace.high_water_bytes();
  });
  result.forward_ledger = mesh.ledger();
  require_balanced(mesh.ledger());
  result.maps_built = maps_built[0];
  const auto put = [](const Part& part, const auto& own, auto& whole) {
    part.for_each([&](std::size_t to, std::size_t from) { whole[to] = own[from]; });
  };
  for (std::size_t i = 0; i < devices; ++i) {
    put(parts[i].tokens_d, outputs[i].out, result.forward.out);
    put(parts[i].tokens_k, outputs[i].expert_weights, result.forward.expert_weights);
    put(parts[i].tokens_k, outputs[i].expert_ids, result.forward.expert_ids);
    put(parts[i].tokens_e, outputs[i].router_logits, result.forward.router_logits);
    for (std::size_t e = 0; e < result.forward.group_sizes.size(); ++e) {
      result.forward.group_sizes[e] += outputs[i].group_sizes[e];
    }
    result.most_forward_bytes = std::max(result.most_forward_bytes, used[i]);
  }
  result.forward.report = result.reports[0];
  if (!choice.backward) {
    return result;
  }

  std::vector<Gradients<A>> gradients;
  for (std::size_t i = 0; i < devices; ++i) {
    gradients.emplace_back(problems[i], static_cast<A>(choice.before));
  }
  mesh.run([&](auto& device) {
    const auto i = static_cast<std::size_t>(device.id());
    Workspace workspace;
    const Problem<S, R>& own = problems[i];
    Gradients<A>& g = gradients[i];
    InputCotangents<A> views{.d_hidden = {g.d_hidden.data(), own.dims.tokens, own.dims.hidden}};
    if (choice.weight_cotangents) {
      views.d_router_weight = {part_view(g.d_router_weight, parts[i].router), choice.write};
      views.d_wi = {part_view(g.d_wi, parts[i].wi), choice.write};
      views.d_wo = {part_view(g.d_wo, parts[i].wo), choice.write};
      views.d_shared_wi = {part_view(g.d_shared_wi, parts[i].shared_wi), choice.write};
      views.d_shared_wo = {part_view(g.d_shared_wo, parts[i].shared_wo), choice.write};
      views.d_shared_gate = {part_view(g.d_shared_gate, parts[i].shared_gate), choice.write};
    }
    Calls::backward(device, own.dims, inputs_of(own, parts[i]), own.cotangents(), choice.options,
                    residuals[i], views, workspace);
    used[i] = workspace.high_water_bytes();
  });
  result.backward_ledger = mesh.ledger();
  require_balanced(mesh.ledger());
  // A part that another device has too must be the same there.
  const auto put_copy = [](const Part& part, const std::vector<A>& own, std::vector<A>& whole) {
    if (whole.empty()) {
      return;
    }
    part.for_each([&](std::size_t to, std::size_t from) {
      EXPECT_TRUE(std::isnan(whole[to]) || whole[to] == own[from]) << "copies differ";
      whole[to] = own[from];
    });
  };
  for (std::size_t i = 0; i < devices; ++i) {
    put(parts[i].tokens_d, gradients[i].d_hidden, result.gradients.d_hidden);
    put_copy(parts[i].router, gradients[i].d_router_weight, result.gradients.d_router_weight);
    put_copy(parts[i].wi, gradients[i].d_wi, result.gradients.d_wi);
    put_copy(parts[i].wo, gradients[i].d_wo, result.gradients.d_wo);
    put_copy(parts[i].shared_wi, gradients[i].d_shared_wi, result.gradients.d_shared_wi);
    put_copy(parts[i].shared_wo, gradients[i].d_shared_wo, result.gradients.d_shared_wo);
    put_copy(parts[i].shared_gate, gradients[i].d_shared_gate, result.gradients.d_shared_gate);
    result.most_backward_bytes = std::max(result.most_backward_bytes, used[i]);
  }
  return result;
}

/// The options of a problem on a mesh.
template <class S, class R>
[[nodiscard]] RunChoice choice_of(const Problem<S, R>& p) {
  RunChoice choice;
  choice.options.layer = p.options;
  return choice;
}

/// The problem whose reference, on one device, drops what a mesh would.
template <class S, class R>
[[nodiscard]] Problem<S, R> modelled_on(Problem<S, R> p, const MeshAxes& axes,
                                        const ShardRules& rules = {}) {
  p.options.dispatch.shards = expert_group(rules).size(axes);
  p.options.dispatch.groups = axes.devices() / p.options.dispatch.shards;
  return p;
}

/// Passes when outputs and all gradients are within `tolerance` of the reference with the mesh's drops.
template <class Calls, class S, class R>
void expect_like_reference(const Problem<S, R>& p, const MeshAxes& axes, const RunChoice& choice,
                           double tolerance) {
  SCOPED_TRACE(to_string(axes));
  const auto actual = run_sharded<Calls>(p, axes, choice);
  const Problem<S, R> model = modelled_on(p, axes, choice.options.rules);
  const auto expected = run_forward(model);
  EXPECT_EQ(actual.forward.expert_ids, expected.expert_ids);
  EXPECT_EQ(actual.forward.group_sizes, expected.group_sizes);
  for (const LayerReport& report : actual.reports) {
    EXPECT_EQ(report.dropped_slots, expected.report.dropped_slots);
    EXPECT_EQ(report.largest_drop, expected.report.largest_drop);
    EXPECT_EQ(report.buffer_rows, expected.report.buffer_rows);
    EXPECT_EQ(report.routed_slots, expected.report.routed_slots);
    EXPECT_EQ(report.required_factor, expected.report.required_factor);
  }
  using heddle::test::close;
  EXPECT_TRUE(close(actual.forward.out, expected.out, tolerance));
  EXPECT_TRUE(close(actual.forward.router_logits, expected.router_logits, tolerance));
  EXPECT_TRUE(close(actual.forward.expert_weights, expected.expert_weights, tolerance));
  const auto expected_gradients = run_backward(model);
  for_each_gradient(actual.gradients, expected_gradients,
                    [&](const char* name, const auto& a, const auto& e) {
                      if (!e.empty()) {
                        EXPECT_TRUE(close(a, e, tolerance)) << name;
                      }
                    });
}

/// Passes when two runs wrote the same bits.
template <class S>
void expect_same_bits(const ShardedResult<S>& a, const ShardedResult<S>& b) {
  using heddle::test::same_bits;
  EXPECT_TRUE(same_bits(a.forward.out, b.forward.out));
  EXPECT_TRUE(same_bits(a.forward.expert_weights, b.forward.expert_weights));
  for_each_gradient(a.gradients, b.gradients, [&](const char* name, const auto& x, const auto& y) {
    EXPECT_TRUE(same_bits(x, y)) << name;
  });
}

}  // namespace heddle::moe::test

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/workspace.hpp"
#include "heddle/moe/expert_layer.hpp"
#include "heddle/moe/router_losses.hpp"
#include "moe/layer_run.hpp"
#include "moe/problem.hpp"
#include "support/compare.hpp"
#include "support/finite_difference.hpp"

// How a trainer adds the router's losses to a layer: their sums from the logits that the forward writes,
// their cotangent into the backward. Mutants: the losses' cotangent left out of d_hidden, or of
// d_router_weight; padding counted; the frozen router's part of d_hidden dropped with its weight's.

namespace heddle::moe {
namespace {

using heddle::test::central_differences;
using heddle::test::close;
using test::LayerRun;
using test::Problem;

constexpr RouterLossOptions losses = {.balance = {.weight = 0.7}, .z = {.weight = 0.3}};

RouterLossSums<double> sums_of(const Problem<double>& p, const test::Result<double>& result) {
  RouterLossSums<double> sums;
  Workspace workspace;
  // In two pieces, as micro-batches come: the sums are of both, the loss is formed once.
  for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, 5}, {5, 7}}) {
    const RouterDims piece = {.tokens = count, .experts = p.dims.experts, .top_k = p.dims.top_k};
    add_router_loss_sums<double>(
        piece, test::matrix(result.router_logits, 12, p.dims.experts).row_block(first, count),
        test::matrix(result.expert_ids, 12, p.dims.top_k).row_block(first, count), sums, workspace);
  }
  return sums;
}

TEST(LayerLosses, GradientsOfTheWholeByCentralDifferences) {
  for (const RouterTraining training : {RouterTraining::trained, RouterTraining::frozen}) {
    for (const std::int64_t chunks : {1, 3}) {
      Problem<double> p = test::random_problem<double>(
          {.tokens = 12, .hidden = 6, .experts = 5, .top_k = 2, .expert_hidden = 4}, 21);
      p.segment_ids = {1, 1, 0, 1, 1, 1, 2, 2, 0, 0, 2, 2};
      p.options.dispatch.token_chunks = chunks;
      p.options.router_training = training;
      const auto total = [&] {
        LayerRun<double> run(p);
        const auto result = run.forward(false);
        double loss = 0;
        for (std::size_t i = 0; i < result.out.size(); ++i) {
          loss += result.out[i] * p.d_out[i];
        }
        const auto sums = sums_of(p, result);
        return loss + balance_loss<double>(p.dims.router(), sums, losses.balance) +
               z_loss<double>(sums, losses.z);
      };
      LayerRun<double> run(p);
      const auto result = run.forward();
      EXPECT_EQ(sums_of(p, result).tokens, 9);
      p.d_router_logits.assign(12 * 5, 0.0);
      Workspace workspace;
      router_loss_backward<double>(
          p.dims.router(), test::matrix(std::as_const(result.router_logits), 12, 5),
          test::matrix(std::as_const(result.expert_ids), 12, 2), sums_of(p, result), losses,
          test::matrix(p.d_router_logits, 12, 5), workspace);
      const auto gradients = run.backward();
      EXPECT_TRUE(
          close(gradients.d_hidden, central_differences(std::span<double>(p.hidden), total), 1e-7));
      const auto d_router = central_differences(std::span<double>(p.router_weight), total);
      if (training == RouterTraining::trained) {
        EXPECT_TRUE(close(gradients.d_router_weight, d_router, 1e-7));
      } else {
        EXPECT_EQ(gradients.d_router_weight, std::vector<double>(d_router.size(), 0.0));
      }
    }
  }
}

}  // namespace
}  // namespace heddle::moe

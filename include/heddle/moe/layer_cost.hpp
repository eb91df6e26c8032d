#pragma once

#include <cstdint>
#include <string_view>

#include "heddle/core/cost.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/glu.hpp"
#include "heddle/moe/options.hpp"

namespace heddle::moe {

/// What one layer costs on one device.
struct LayerCost {
  Cost forward;
  Cost backward;
};

namespace detail {

/// rows x k times k x n weights of so many experts, all read once.
template <Storage S>
[[nodiscard]] constexpr Cost product_cost(std::int64_t rows, std::int64_t experts, std::int64_t k,
                                          std::int64_t n, std::int64_t result_bytes) {
  constexpr auto element = static_cast<std::int64_t>(sizeof(S));
  return {.flops = 2 * rows * k * n,
          .bytes_read = (rows * k + experts * k * n) * element,
          .bytes_written = rows * n * result_bytes};
}

/// The cotangent of those weights, in the accumulator.
template <Storage S>
[[nodiscard]] constexpr Cost weight_product_cost(std::int64_t rows, std::int64_t experts,
                                                 std::int64_t k, std::int64_t n) {
  return {.flops = 2 * rows * k * n,
          .bytes_read = rows * (k + n) * static_cast<std::int64_t>(sizeof(S)),
          .bytes_written = experts * k * n * static_cast<std::int64_t>(sizeof(AccumulatorOf<S>))};
}

/// The arithmetic of a pass that is fused into a product: its bytes stay where they are.
[[nodiscard]] constexpr Cost without_bytes(const Cost& cost) {
  return {.flops = cost.flops, .transcendentals = cost.transcendentals};
}

/// Experts of one width between `tokens` rows of D and the `rows` that they compute.
template <Storage S>
[[nodiscard]] constexpr LayerCost experts_cost(std::int64_t tokens, std::int64_t rows,
                                               std::int64_t experts, std::int64_t hidden,
                                               std::int64_t width,
                                               WeightGradFrom weight_grad_from) {
  constexpr auto element = static_cast<std::int64_t>(sizeof(S));
  constexpr auto wide = static_cast<std::int64_t>(sizeof(AccumulatorOf<S>));
  LayerCost cost;
  // X * wi leaves gate and up for the backward, and the activation.
  cost.forward = product_cost<S>(rows, experts, hidden, 2 * width, element) +
                 without_bytes(glu_cost<S>(rows, width)) +
                 Cost{.bytes_written = rows * width * element} +
                 product_cost<S>(rows, experts, width, hidden, element) +
                 Cost{.flops = 2 * rows * hidden,
                      .bytes_read = rows * hidden * element,
                      .bytes_written = tokens * hidden * wide};
  // q is formed tile by tile; gate and up are read there, their cotangent and w a are written.
  const Cost glu_in_place =
      without_bytes(glu_backward_cost<S>(rows, width)) + without_bytes(glu_cost<S>(rows, width)) +
      Cost{.bytes_read = 2 * rows * width * element, .bytes_written = 3 * rows * width * element};
  const Cost sums = {.flops = rows * hidden,
                     .bytes_read = rows * hidden * wide,
                     .bytes_written = tokens * hidden * wide};
  cost.backward = product_cost<S>(rows, experts, hidden, width, 0) + glu_in_place +
                  product_cost<S>(rows, experts, 2 * width, hidden, wide) + sums +
                  weight_product_cost<S>(rows, experts, hidden, 2 * width) +
                  weight_product_cost<S>(rows, experts, width, hidden);
  if (weight_grad_from == WeightGradFrom::wo_input) {
    cost.backward = cost.backward + Cost{.flops = 3 * rows * width};  // <q, a> and w a
  } else {
    cost.backward = cost.backward + product_cost<S>(rows, experts, width, hidden, element) +
                    Cost{.flops = 3 * rows * hidden,
                         .bytes_read = 2 * rows * hidden * element,
                         .bytes_written = rows * hidden * element};
  }
  return cost;
}

[[nodiscard]] constexpr LayerCost operator+(const LayerCost& a, const LayerCost& b) {
  return {.forward = a.forward + b.forward, .backward = a.backward + b.backward};
}

}  // namespace detail

/// The cost of a layer whose every slot has a row and whose every expert has a slot.
///
/// units     a product counts where the fast tier runs it: Y a second time under wo_output alone, the
///           activation a second time in both. R is the router's storage
/// throws    Error for bad dims
/// source    spec/moe.md 9
template <Storage S, Storage R = S>
[[nodiscard]] LayerCost layer_cost(const Dims& dims, WeightGradFrom weight_grad_from) {
  constexpr std::string_view where = "moe::layer_cost";
  constexpr auto element = static_cast<std::int64_t>(sizeof(S));
  constexpr auto router_element = static_cast<std::int64_t>(sizeof(R));
  constexpr auto wide = static_cast<std::int64_t>(sizeof(AccumulatorOf<S>));
  dims.validate(where);
  const std::int64_t tokens = dims.tokens;
  const std::int64_t router = tokens * dims.hidden * dims.experts;
  const std::int64_t weight = dims.hidden * dims.experts;
  LayerCost cost;
  cost.forward = {.flops = 2 * router,
                  .transcendentals = dims.slots(),
                  .bytes_read = tokens * dims.hidden * element + weight * router_element,
                  .bytes_written = tokens * dims.experts * wide};
  cost.backward = {.flops = 4 * router,
                   .bytes_read = tokens * dims.hidden * (element + wide) + weight * router_element +
                                 2 * tokens * dims.experts * wide,
                   .bytes_written = tokens * dims.hidden * wide + weight * wide};
  cost = detail::operator+(cost,
                           detail::experts_cost<S>(tokens, dims.slots(), dims.experts, dims.hidden,
                                                   dims.expert_hidden, weight_grad_from));
  if (dims.has_shared_expert()) {
    cost = detail::operator+(cost, detail::experts_cost<S>(tokens, tokens, 1, dims.hidden,
                                                           dims.shared_hidden, weight_grad_from));
    cost.forward = cost.forward + Cost{.flops = 2 * tokens * dims.hidden,
                                       .transcendentals = tokens,
                                       .bytes_read = tokens * dims.hidden * element};
    cost.backward = cost.backward + Cost{.flops = 4 * tokens * dims.hidden,
                                         .bytes_read = tokens * dims.hidden * (element + wide),
                                         .bytes_written = tokens * dims.hidden * wide};
  }
  return cost;
}

}  // namespace heddle::moe

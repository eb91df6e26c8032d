#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/gdn/arguments.hpp"
#include "heddle/gdn/dims.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle::gdn::test {

using heddle::test::poison;
using heddle::test::Random;

template <class T>
[[nodiscard]] ConstMatrixView<T> matrix(const std::vector<T>& values, std::int64_t rows,
                                        std::int64_t cols) {
  return values.empty() ? ConstMatrixView<T>() : ConstMatrixView<T>(values.data(), rows, cols);
}

template <class T>
[[nodiscard]] MatrixView<T> matrix(std::vector<T>& values, std::int64_t rows, std::int64_t cols) {
  return values.empty() ? MatrixView<T>() : MatrixView<T>(values.data(), rows, cols);
}

template <class To, class From>
[[nodiscard]] std::vector<To> converted(const std::vector<From>& from) {
  std::vector<To> to;
  to.reserve(from.size());
  for (const From value : from) {
    to.push_back(static_cast<To>(static_cast<float>(value)));
  }
  return to;
}

/// A layer call that owns its arrays, contiguous; an empty one is not given.
template <class S, class P = S, class A = AccumulatorOf<S>>
struct Problem {
  Dims dims;
  Options options;
  std::vector<S> qkv, a, b, conv_state, d_o;
  std::vector<P> conv_weight, conv_bias;
  std::vector<A> A_log, dt_bias, recurrent_state, d_final_recurrent_state, d_final_conv_state;
  std::vector<std::int32_t> segment_ids;

  [[nodiscard]] Inputs<S, P, A> inputs() const {
    const auto rows = [&](const std::vector<S>& values, std::int64_t cols) {
      return ConstMatrixView<S>(values.data(), dims.tokens, cols);
    };
    return {.qkv = rows(qkv, dims.qkv_columns()),
            .conv_weight = matrix(conv_weight, dims.qkv_columns(), dims.kernel),
            .conv_bias = conv_bias,
            .a = rows(a, dims.value_heads),
            .b = rows(b, dims.value_heads),
            .A_log = A_log,
            .dt_bias = dt_bias,
            .segment_ids = segment_ids,
            .conv_state = matrix(conv_state, dims.window_rows(), dims.qkv_columns()),
            .recurrent_state = matrix(recurrent_state, dims.state_rows(), dims.value_dim)};
  }

  [[nodiscard]] OutputCotangents<S, A> cotangents() const {
    return {
        .d_o = {d_o.data(), dims.tokens, dims.output_columns()},
        .d_final_recurrent_state =
            matrix(d_final_recurrent_state, dims.state_rows(), dims.value_dim),
        .d_final_conv_state = matrix(d_final_conv_state, dims.window_rows(), dims.qkv_columns())};
  }
};

/// The outputs of a forward call, poisoned before it.
template <class O, class S, class A>
struct ForwardResult {
  std::vector<O> o;
  std::vector<A> final_recurrent_state;
  std::vector<S> final_conv_state;

  explicit ForwardResult(const Dims& dims)
      : o(static_cast<std::size_t>(dims.tokens * dims.output_columns()), poison<O>()),
        final_recurrent_state(static_cast<std::size_t>(dims.state_rows() * dims.value_dim),
                              poison<A>()),
        final_conv_state(static_cast<std::size_t>(dims.window_rows() * dims.qkv_columns()),
                         poison<S>()) {}

  [[nodiscard]] Outputs<O, S, A> outputs(const Dims& dims) {
    return {
        .o = {o.data(), dims.tokens, dims.output_columns()},
        .final_recurrent_state = matrix(final_recurrent_state, dims.state_rows(), dims.value_dim),
        .final_conv_state = matrix(final_conv_state, dims.window_rows(), dims.qkv_columns())};
  }
};

/// The cotangents of all inputs, poisoned before the call; those of states only where they are given.
template <class A>
struct Gradients {
  std::vector<A> d_qkv, d_conv_weight, d_conv_bias, d_a, d_b, d_A_log, d_dt_bias, d_conv_state,
      d_recurrent_state;

  template <class S, class P>
  explicit Gradients(const Problem<S, P, A>& problem)
      : d_qkv(problem.qkv.size(), poison<A>()),
        d_conv_weight(problem.conv_weight.size(), poison<A>()),
        d_conv_bias(problem.conv_bias.size(), poison<A>()),
        d_a(problem.a.size(), poison<A>()),
        d_b(problem.b.size(), poison<A>()),
        d_A_log(problem.A_log.size(), poison<A>()),
        d_dt_bias(problem.dt_bias.size(), poison<A>()),
        d_conv_state(problem.conv_state.size(), poison<A>()),
        d_recurrent_state(problem.recurrent_state.size(), poison<A>()) {}

  [[nodiscard]] Cotangents<A> cotangents(const Dims& dims, Write write = Write::overwrite) {
    return {.d_qkv = {d_qkv.data(), dims.tokens, dims.qkv_columns()},
            .d_conv_weight = {matrix(d_conv_weight, dims.qkv_columns(), dims.kernel), write},
            .d_conv_bias = {d_conv_bias, write},
            .d_a = {d_a.data(), dims.tokens, dims.value_heads},
            .d_b = {d_b.data(), dims.tokens, dims.value_heads},
            .d_A_log = {d_A_log, write},
            .d_dt_bias = {d_dt_bias, write},
            .d_conv_state = matrix(d_conv_state, dims.window_rows(), dims.qkv_columns()),
            .d_recurrent_state = matrix(d_recurrent_state, dims.state_rows(), dims.value_dim)};
  }
};

/// What a random problem is given besides the required arrays.
enum class Given { nothing, bias, states, everything };

/// Random inputs and cotangents, exact in float; given states continue the first document.
[[nodiscard]] inline Problem<double> random_problem(const Dims& shape,
                                                    const std::vector<std::int32_t>& segment_ids,
                                                    std::uint64_t seed,
                                                    Given given = Given::nothing) {
  Random random(seed);
  Problem<double> p;
  p.dims = shape;
  p.dims.tokens = static_cast<std::int64_t>(segment_ids.size());
  p.segment_ids = segment_ids;
  const Dims& d = p.dims;
  p.qkv = random.normals<double>(d.tokens * d.qkv_columns());
  p.a = random.normals<double>(d.tokens * d.value_heads);
  p.b = random.normals<double>(d.tokens * d.value_heads);
  p.conv_weight = random.normals<double>(d.qkv_columns() * d.kernel, 0.5);
  p.A_log = random.normals<double>(d.value_heads, 0.5);
  p.dt_bias = random.normals<double>(d.value_heads);
  p.d_o = random.normals<double>(d.tokens * d.output_columns());
  p.d_final_recurrent_state = random.normals<double>(d.state_rows() * d.value_dim);
  p.d_final_conv_state = random.normals<double>(d.window_rows() * d.qkv_columns());
  if (given == Given::bias || given == Given::everything) {
    p.conv_bias = random.normals<double>(d.qkv_columns(), 0.3);
  }
  if (given == Given::states || given == Given::everything) {
    p.conv_state = random.normals<double>(d.window_rows() * d.qkv_columns());
    p.recurrent_state = random.normals<double>(d.state_rows() * d.value_dim, 0.5);
    p.options.initial_segment = segment_ids.empty() ? 0 : segment_ids[0];
  }
  return p;
}

/// Gate inputs with exp(A_log) = 1 and dt_bias = 0 whose log decay is g(token, head) <= 0.
template <class Decay>
void set_decay(Problem<double>& p, const Decay& g) {
  p.A_log.assign(p.A_log.size(), 0.0);
  p.dt_bias.assign(p.dt_bias.size(), 0.0);
  for (std::int64_t t = 0; t < p.dims.tokens; ++t) {
    for (std::int64_t h = 0; h < p.dims.value_heads; ++h) {
      const double decay = -g(t, h);
      // The inverse of softplus; 0 is only reached by underflow.
      const double a = decay == 0 ? -1e4 : decay > 30 ? decay : std::log(std::expm1(decay));
      p.a[static_cast<std::size_t>(t * p.dims.value_heads + h)] = static_cast<float>(a);
    }
  }
}

/// The same numbers in other types; inputs of random_problem are exact in float.
template <class S, class P = S>
[[nodiscard]] Problem<S, P> stored_as(const Problem<double>& p) {
  using A = AccumulatorOf<S>;
  Problem<S, P> to;
  to.dims = p.dims;
  to.options = p.options;
  to.segment_ids = p.segment_ids;
  to.qkv = converted<S>(p.qkv);
  to.a = converted<S>(p.a);
  to.b = converted<S>(p.b);
  to.conv_state = converted<S>(p.conv_state);
  to.d_o = converted<S>(p.d_o);
  to.conv_weight = converted<P>(p.conv_weight);
  to.conv_bias = converted<P>(p.conv_bias);
  to.A_log = converted<A>(p.A_log);
  to.dt_bias = converted<A>(p.dt_bias);
  to.recurrent_state = converted<A>(p.recurrent_state);
  to.d_final_recurrent_state = converted<A>(p.d_final_recurrent_state);
  to.d_final_conv_state = converted<A>(p.d_final_conv_state);
  return to;
}

/// Rows [first, first + count) of a [rows, cols] array.
template <class T>
[[nodiscard]] std::vector<T> rows_of(const std::vector<T>& values, std::int64_t cols,
                                     std::int64_t first, std::int64_t count) {
  return {values.begin() + first * cols, values.begin() + (first + count) * cols};
}

/// Tokens [first, first + count) as a row of their own: no states, no final cotangents.
template <class S, class P, class A>
[[nodiscard]] Problem<S, P, A> token_range(const Problem<S, P, A>& p, std::int64_t first,
                                           std::int64_t count) {
  Problem<S, P, A> part = p;
  part.dims.tokens = count;
  part.options.initial_segment = 0;
  part.qkv = rows_of(p.qkv, p.dims.qkv_columns(), first, count);
  part.a = rows_of(p.a, p.dims.value_heads, first, count);
  part.b = rows_of(p.b, p.dims.value_heads, first, count);
  part.d_o = rows_of(p.d_o, p.dims.output_columns(), first, count);
  part.segment_ids = rows_of(p.segment_ids, 1, first, count);
  part.conv_state.clear();
  part.recurrent_state.clear();
  part.d_final_recurrent_state.clear();
  part.d_final_conv_state.clear();
  return part;
}

/// sum_i a[i] b[i], 0 where one side is not given.
[[nodiscard]] inline double inner(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

}  // namespace heddle::gdn::test

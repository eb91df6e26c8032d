#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gdn/problem.hpp"
#include "heddle/gdn/chunked.hpp"
#include "heddle/gdn/reference_norm.hpp"
#include "heddle/gdn/reference_recurrence.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace heddle::gdn::test {

using Ids = std::vector<std::int32_t>;

/// Keys before the norm, as a head's [tokens, key_dim].
enum class Keys { random, positive, near_identical, identical, antipodal, zero };
inline constexpr Keys every_family[] = {Keys::random,    Keys::positive,  Keys::near_identical,
                                        Keys::identical, Keys::antipodal, Keys::zero};

/// Log decays that have to work: none, long memory, the usual, strong, mixed, single cuts.
enum class Decay { none, long_memory, usual, one, five, sixteen, mixed, cuts };
inline constexpr Decay every_regime[] = {Decay::none,  Decay::long_memory, Decay::usual,
                                         Decay::one,   Decay::five,        Decay::sixteen,
                                         Decay::mixed, Decay::cuts};

[[nodiscard]] inline double log_decay(Decay regime, std::int64_t token, Random& random) {
  switch (regime) {
    case Decay::none:
      return 0;
    case Decay::long_memory:
      return -0x1p-10;
    case Decay::usual:
      return static_cast<float>(random.uniform(-0.2, 0));
    case Decay::one:
      return -1;
    case Decay::five:
      return -5;
    case Decay::sixteen:
      return -16;
    case Decay::mixed:
      return token % 3 == 2 ? -200 : -0x1p-7;
    case Decay::cuts:
      return token % 4 == 3 ? -1e4 : -0.125;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

/// A row as the chunked recurrence takes it, and the cotangents of its results; every number exact in
/// float.
struct RowCase {
  Dims dims{};
  Ids segment_ids{};
  Options options{};
  ChunkOptions chunk_options{};
  std::vector<double> y{}, g{}, beta{}, state{}, d_o{},
      d_final{};  // state, d_final: empty where not given

  [[nodiscard]] Segments segments() const { return {segment_ids, options.initial_segment}; }
  [[nodiscard]] double& key(std::int64_t t, std::int64_t head, std::int64_t i) {
    return y[static_cast<std::size_t>(t * dims.qkv_columns() + dims.key_column(head) + i)];
  }
};

struct RowMaker {
  Dims dims{};
  Ids segment_ids{};
  std::uint64_t seed = 1;
  Keys keys = Keys::random;
  Decay decay = Decay::usual;
  bool states =
      false;  ///< an initial state of the first document, and a cotangent of the final one
  ChunkOptions chunk_options{};

  [[nodiscard]] RowCase make() const {
    Random random(seed);
    RowCase row{.dims = dims, .segment_ids = segment_ids, .chunk_options = chunk_options};
    row.dims.tokens = static_cast<std::int64_t>(segment_ids.size());
    const Dims& d = row.dims;
    row.y = random.normals<double>(d.tokens * d.qkv_columns());
    const std::vector<double> common = random.normals<double>(d.key_heads * d.key_dim);
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      for (std::int64_t j = 0; j < d.key_heads * d.key_dim; ++j) {
        double& k = row.key(t, 0, j);
        const double shared = common[static_cast<std::size_t>(j)];
        switch (keys) {
          case Keys::random:
            break;
          case Keys::positive:
            k = std::abs(k);
            break;
          case Keys::near_identical:
            k = static_cast<float>(shared + 1e-3 * k);
            break;
          case Keys::identical:
            k = shared;
            break;
          case Keys::antipodal:
            k = t % 2 == 0 ? shared : -shared;
            break;
          case Keys::zero:
            k = 0;
            break;
        }
      }
      for (std::int64_t h = 0; h < d.value_heads; ++h) {
        row.g.push_back(log_decay(decay, t + h, random));
        // Now and then nothing is written, or all but everything.
        const double choice = random.uniform();
        row.beta.push_back(static_cast<float>(choice < 0.1   ? 0
                                              : choice < 0.3 ? 1 - 1e-7
                                                             : random.uniform()));
      }
    }
    row.d_o = random.normals<double>(d.tokens * d.output_columns());
    if (states) {
      row.state = random.normals<double>(d.state_rows() * d.value_dim, 0.5);
      row.d_final = random.normals<double>(d.state_rows() * d.value_dim);
      row.options.initial_segment = segment_ids.empty() ? 1 : segment_ids[0];
    }
    return row;
  }
};

template <class A>
struct RowResult {
  std::vector<A> o, final_state, d_y, d_g, d_beta, d_state, t_inv, chunk_states;
};

/// Every output has to be right; d_state only where a state was given.
template <class A>
[[nodiscard]] ::testing::AssertionResult close(const RowResult<A>& actual,
                                               const RowResult<double>& expected,
                                               double tolerance) {
  const auto compare = [&](const char* name, const std::vector<A>& a,
                           const std::vector<double>& b) -> ::testing::AssertionResult {
    if (b.empty() && a.empty()) {
      return ::testing::AssertionSuccess();
    }
    const auto result = heddle::test::close(a, b, tolerance);
    return result ? result : ::testing::AssertionFailure() << name << ": " << result.message();
  };
  for (const auto& result :
       {compare("o", actual.o, expected.o),
        compare("final_state", actual.final_state, expected.final_state),
        compare("d_y", actual.d_y, expected.d_y), compare("d_g", actual.d_g, expected.d_g),
        compare("d_beta", actual.d_beta, expected.d_beta),
        compare("d_state", actual.d_state, expected.d_state)}) {
    if (!result) {
      return result;
    }
  }
  return ::testing::AssertionSuccess();
}

/// The same bits in everything but residuals.
template <class A>
[[nodiscard]] ::testing::AssertionResult same_bits(const RowResult<A>& a, const RowResult<A>& b) {
  const auto compare = [](const char* name, const std::vector<A>& x, const std::vector<A>& y) {
    const auto result = heddle::test::same_bits(x, y);
    return result ? result : ::testing::AssertionFailure() << name << ": " << result.message();
  };
  for (const auto& result :
       {compare("o", a.o, b.o), compare("final_state", a.final_state, b.final_state),
        compare("d_y", a.d_y, b.d_y), compare("d_g", a.d_g, b.d_g),
        compare("d_beta", a.d_beta, b.d_beta), compare("d_state", a.d_state, b.d_state)}) {
    if (!result) {
      return result;
    }
  }
  return ::testing::AssertionSuccess();
}

/// What the forward keeps for the backward.
enum class Keep { all, inverses, nothing };
inline constexpr Keep every_policy[] = {Keep::all, Keep::inverses, Keep::nothing};

template <class T>
void poison_rows(std::vector<T>& values, std::int64_t cols, const Segments& segments) {
  for (std::int64_t t = 0; t < segments.tokens(); ++t) {
    if (!segments.valid(t)) {
      std::fill_n(values.begin() + t * cols, cols, poison<T>());
    }
  }
}

/// The arrays of a call in the types it is made in: padding holds NaN in all that is read, and so do
/// outputs before the call.
template <class S, class A = AccumulatorOf<S>>
class ChunkedCall {
 public:
  explicit ChunkedCall(const RowCase& row, Keep keep = Keep::nothing)
      : dims(row.dims),
        ids(row.segment_ids),
        options(row.options),
        chunk_options(row.chunk_options),
        y(stored(row.y)),
        g(narrowed(row.g)),
        beta(narrowed(row.beta)),
        state(narrowed(row.state)),
        d_final(narrowed(row.d_final)),
        d_o(stored(row.d_o)) {
    const Segments segments(ids, options.initial_segment);
    poison_rows(y, dims.qkv_columns(), segments);
    poison_rows(g, dims.value_heads, segments);
    poison_rows(beta, dims.value_heads, segments);
    poison_rows(d_o, dims.output_columns(), segments);
    const ChunkPlan plan(segments, chunk_options);
    chunks = plan.count();
    result.o = fresh(dims.tokens * dims.output_columns());
    result.final_state = fresh(dims.state_rows() * dims.value_dim);
    result.d_y = fresh(dims.tokens * dims.qkv_columns());
    result.d_g = fresh(dims.tokens * dims.value_heads);
    result.d_beta = fresh(dims.tokens * dims.value_heads);
    result.d_state = fresh(static_cast<std::int64_t>(state.size()));
    if (keep != Keep::nothing) {
      result.t_inv = fresh(chunks * dims.value_heads * chunk_options.chunk * chunk_options.chunk);
    }
    if (keep == Keep::all) {
      result.chunk_states = fresh(chunks * dims.state_rows() * dims.value_dim);
    }
  }

  [[nodiscard]] ChunkedInputs<S, A> inputs() const {
    return {.y = {y.data(), dims.tokens, dims.qkv_columns()},
            .g = {g.data(), dims.tokens, dims.value_heads},
            .beta = {beta.data(), dims.tokens, dims.value_heads},
            .segment_ids = ids,
            .recurrent_state = matrix(state, dims.state_rows(), dims.value_dim)};
  }
  [[nodiscard]] ChunkResiduals<A> residuals() {
    return {.t_inv = matrix(result.t_inv, chunks * dims.value_heads,
                            chunk_options.chunk * chunk_options.chunk),
            .chunk_states = matrix(result.chunk_states, chunks * dims.value_heads,
                                   dims.key_dim * dims.value_dim)};
  }
  [[nodiscard]] ChunkedOutputs<A, A> outputs() {
    return {.o = {result.o.data(), dims.tokens, dims.output_columns()},
            .final_recurrent_state = matrix(result.final_state, dims.state_rows(), dims.value_dim)};
  }
  [[nodiscard]] ChunkedCotangents<S, A> cotangents() {
    return {.d_o = {d_o.data(), dims.tokens, dims.output_columns()},
            .d_final_recurrent_state =
                matrix(std::as_const(d_final), dims.state_rows(), dims.value_dim),
            .d_y = {result.d_y.data(), dims.tokens, dims.qkv_columns()},
            .d_g = {result.d_g.data(), dims.tokens, dims.value_heads},
            .d_beta = {result.d_beta.data(), dims.tokens, dims.value_heads},
            .d_recurrent_state = matrix(result.d_state, dims.state_rows(), dims.value_dim)};
  }

  void forward(Workspaces& workspaces) {
    chunked_forward(dims, inputs(), options, chunk_options, outputs(), residuals(), workspaces);
  }
  void backward(Workspaces& workspaces) {
    const ChunkResiduals<A> kept = residuals();
    chunked_backward(
        dims, inputs(), options, chunk_options,
        ChunkResiduals<const A>{.t_inv = kept.t_inv, .chunk_states = kept.chunk_states},
        cotangents(), workspaces);
  }

  Dims dims;
  Ids ids;
  Options options;
  ChunkOptions chunk_options;
  std::vector<S> y;
  std::vector<A> g, beta, state, d_final;
  std::vector<S> d_o;
  RowResult<A> result;
  std::int64_t chunks = 0;

 private:
  static std::vector<S> stored(const std::vector<double>& values) {
    std::vector<S> to;
    for (const double value : values) {
      to.push_back(static_cast<S>(static_cast<A>(value)));
    }
    return to;
  }
  static std::vector<A> narrowed(const std::vector<double>& values) {
    return {values.begin(), values.end()};
  }
  static std::vector<A> fresh(std::int64_t count) {
    return std::vector<A>(static_cast<std::size_t>(count), poison<A>());
  }
};

/// Forward and backward.
template <class A>
[[nodiscard]] RowResult<A> chunked(const RowCase& row, Keep keep = Keep::nothing) {
  ChunkedCall<A> call(row, keep);
  Workspaces workspaces;
  call.forward(workspaces);
  call.backward(workspaces);
  return call.result;
}

/// The same from the definition, token by token in double.
[[nodiscard]] inline RowResult<double> by_tokens(const RowCase& row) {
  const Dims& d = row.dims;
  const Segments segments = row.segments();
  RowResult<double> out;
  out.o.resize(row.d_o.size());
  out.d_y.resize(row.y.size());
  out.d_g.resize(row.g.size());
  out.d_beta.resize(row.beta.size());
  const auto elements = static_cast<std::size_t>(d.key_dim * d.value_dim);
  const reference::Norm<double> norm_q{row.options.norm, row.options.eps,
                                       1 / std::sqrt(static_cast<double>(d.key_dim))};
  const reference::Norm<double> norm_k{row.options.norm, row.options.eps, 1};
  for (std::int64_t key_head = 0; key_head < d.key_heads; ++key_head) {
    const auto size = static_cast<std::size_t>(d.tokens * d.key_dim);
    std::vector<double> q(size), k(size), d_q(size), d_k(size);
    const auto slice = [&](auto& values, std::int64_t t, std::int64_t column) {
      return std::span(values).subspan(static_cast<std::size_t>(t * d.qkv_columns() + column),
                                       static_cast<std::size_t>(d.key_dim));
    };
    const auto of_token = [&](std::vector<double>& values, std::int64_t t) {
      return std::span(values).subspan(static_cast<std::size_t>(t * d.key_dim),
                                       static_cast<std::size_t>(d.key_dim));
    };
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      if (segments.valid(t)) {
        reference::norm_forward<double>(norm_q, slice(row.y, t, d.query_column(key_head)),
                                        of_token(q, t));
        reference::norm_forward<double>(norm_k, slice(row.y, t, d.key_column(key_head)),
                                        of_token(k, t));
      }
    }
    for (std::int64_t member = 0; member < d.group(); ++member) {
      const std::int64_t h = key_head * d.group() + member;
      std::vector<double> g, beta, state(elements), d_state(elements);
      for (std::int64_t t = 0; t < d.tokens; ++t) {
        g.push_back(row.g[static_cast<std::size_t>(t * d.value_heads + h)]);
        beta.push_back(row.beta[static_cast<std::size_t>(t * d.value_heads + h)]);
      }
      const auto at = static_cast<std::ptrdiff_t>(h) * static_cast<std::ptrdiff_t>(elements);
      if (!row.state.empty()) {
        std::copy_n(row.state.begin() + at, elements, state.begin());
      }
      if (!row.d_final.empty()) {
        std::copy_n(row.d_final.begin() + at, elements, d_state.begin());
      }
      const std::vector<double> initial = state;
      const reference::RecurrenceInputs<double> inputs{
          .q = {q.data(), d.tokens, d.key_dim},
          .k = {k.data(), d.tokens, d.key_dim},
          .v = {row.y.data() + d.value_column(h), d.tokens, d.value_dim, d.qkv_columns()},
          .beta = beta,
          .g = g};
      const std::int64_t column = h * d.value_dim;
      reference::recurrence_forward<double, double>(
          segments, inputs, {state.data(), d.key_dim, d.value_dim},
          {out.o.data() + column, d.tokens, d.value_dim, d.output_columns()});
      out.final_state.insert(out.final_state.end(), state.begin(), state.end());
      std::vector<double> d_beta(g.size()), d_g(g.size());
      reference::recurrence_backward<double, double>(
          segments, inputs, {initial.data(), d.key_dim, d.value_dim},
          {row.d_o.data() + column, d.tokens, d.value_dim, d.output_columns()},
          {d_state.data(), d.key_dim, d.value_dim},
          {.d_q = {d_q.data(), d.tokens, d.key_dim},
           .d_k = {d_k.data(), d.tokens, d.key_dim},
           .d_v = {out.d_y.data() + d.value_column(h), d.tokens, d.value_dim, d.qkv_columns()},
           .d_beta = d_beta,
           .d_g = d_g});
      if (!row.state.empty()) {
        out.d_state.insert(out.d_state.end(), d_state.begin(), d_state.end());
      }
      for (std::int64_t t = 0; t < d.tokens; ++t) {
        out.d_g[static_cast<std::size_t>(t * d.value_heads + h)] = d_g[static_cast<std::size_t>(t)];
        out.d_beta[static_cast<std::size_t>(t * d.value_heads + h)] =
            d_beta[static_cast<std::size_t>(t)];
      }
    }
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      if (segments.valid(t)) {
        reference::norm_backward<double>(norm_q, slice(row.y, t, d.query_column(key_head)),
                                         of_token(d_q, t),
                                         slice(out.d_y, t, d.query_column(key_head)));
        reference::norm_backward<double>(norm_k, slice(row.y, t, d.key_column(key_head)),
                                         of_token(d_k, t),
                                         slice(out.d_y, t, d.key_column(key_head)));
      }
    }
  }
  return out;
}

/// Documents of random lengths with padding first, between, inside and last.
[[nodiscard]] inline Ids random_ids(Random& random, std::int64_t tokens) {
  Ids ids;
  std::int32_t document = 1;
  while (static_cast<std::int64_t>(ids.size()) < tokens) {
    const std::int64_t length = random.integer(1, 24);
    const bool padding = random.chance(0.2);
    for (std::int64_t i = 0; i < length && static_cast<std::int64_t>(ids.size()) < tokens; ++i) {
      ids.push_back(padding ? 0 : document);
    }
    document += padding && random.chance(0.5) ? 0 : 1;
  }
  return ids;
}

}  // namespace heddle::gdn::test

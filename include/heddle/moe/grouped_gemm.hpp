#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/factor.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/parallel_product.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/moe/options.hpp"

namespace heddle::moe {

/// Which rows of a buffer belong to which expert: expert e has the rows [offsets[e], offsets[e + 1]).
/// A subspan of the offsets is a range of experts, whose first row need not be 0.
struct ExpertGroups {
  std::span<const std::int64_t> offsets;  ///< [E+1], ascending

  [[nodiscard]] std::int64_t experts() const {
    return static_cast<std::int64_t>(offsets.size()) - 1;
  }
  [[nodiscard]] std::int64_t first_row(std::int64_t expert) const {
    return offsets[static_cast<std::size_t>(expert)];
  }
  [[nodiscard]] std::int64_t rows(std::int64_t expert) const {
    return first_row(expert + 1) - first_row(expert);
  }
  [[nodiscard]] std::int64_t total_rows() const { return offsets.back() - offsets.front(); }
  [[nodiscard]] std::int64_t largest() const {
    std::int64_t most = 0;
    for (std::int64_t e = 0; e < experts(); ++e) {
      most = std::max(most, rows(e));
    }
    return most;
  }
  /// Experts [first, first + count).
  [[nodiscard]] ExpertGroups slice(std::int64_t first, std::int64_t count) const {
    return {offsets.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count) + 1)};
  }

  /// Throws Error for no offset, a negative one, one below that before it, a last one above
  /// `buffer_rows`.
  void validate(std::string_view where, std::string_view rows_name,
                std::int64_t buffer_rows) const {
    require(!offsets.empty(), where, "groups.offsets.size", offsets.size(), "must be >= 1");
    require(offsets.front() >= 0, where, "groups.offsets[0]", offsets.front(), "must be >= 0");
    for (std::size_t e = 1; e < offsets.size(); ++e) {
      if (offsets[e] < offsets[e - 1]) [[unlikely]] {
        fail(where, element_name("groups.offsets", e), offsets[e],
             "must be at least the offset before it (" + std::to_string(offsets[e - 1]) + ")");
      }
    }
    if (offsets.back() > buffer_rows) {
      fail(where, element_name("groups.offsets", offsets.size() - 1), offsets.back(),
           "must be at most " + std::string(rows_name) + " (" + std::to_string(buffer_rows) + ")");
    }
  }
};

namespace detail {

/// `count` products in memory of the workspace, make(e) for each expert.
template <class AnyProduct, class Make>
[[nodiscard]] std::span<const AnyProduct> take_products(Workspace& workspace, std::int64_t count,
                                                        const Make& make) {
  const std::span<AnyProduct> products = workspace.take<AnyProduct>(count);
  for (std::int64_t e = 0; e < count; ++e) {
    std::construct_at(products.data() + e, make(e));
  }
  return products;
}

/// Zeros in rows [first, last), on the threads of the arena where that is worth it.
template <class T>
void zero_rows(MatrixView<T> matrix, std::int64_t first, std::int64_t last) {
  constexpr std::int64_t grain_elements = 1 << 16;
  const std::int64_t grain = std::max<std::int64_t>(1, grain_elements / (matrix.cols() + 1));
  parallel_blocks(last - first, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = first + begin; row < first + end; ++row) {
      std::fill_n(matrix.row(row).data(), matrix.cols(), T(0));
    }
  });
}

template <class T>
void settle_unfilled_rows(const ExpertGroups& groups, MatrixView<T> matrix, UnfilledRows unfilled) {
  if (unfilled == UnfilledRows::zeroed) {
    zero_rows(matrix, 0, groups.offsets.front());
    zero_rows(matrix, groups.offsets.back(), matrix.rows());
  }
}

/// Refuses weights that are not `experts` matrices of rows x cols, one under the other.
template <class T>
void require_weights(std::string_view where, std::string_view argument, MatrixView<T> weights,
                     const ExpertGroups& groups, std::string_view rows_name, std::int64_t rows,
                     std::string_view cols_name, std::int64_t cols) {
  require_shape(where, argument, weights, "groups.experts * " + std::string(rows_name),
                groups.experts() * rows, cols_name, cols);
}

/// Rows of one expert's weight where `weights` holds those of all, one under the other.
template <class T>
[[nodiscard]] std::int64_t weight_rows(std::string_view where, MatrixView<T> weights,
                                       const ExpertGroups& groups) {
  const std::int64_t experts = groups.experts();
  if (experts == 0 ? weights.rows() != 0 : weights.rows() % experts != 0) {
    fail(where, "weights.rows", weights.rows(),
         "must be a multiple of groups.experts (" + std::to_string(experts) + ")");
  }
  return experts == 0 ? 0 : weights.rows() / experts;
}

/// The factor that is not transposed, transposed.
template <class T>
[[nodiscard]] Factor<T> transpose_of(const Factor<T>& factor) {
  return {factor.matrix, !factor.transpose, factor.row_ids};
}

template <class T>
void require_rows(std::string_view where, std::string_view argument, const Factor<T>& rows) {
  require(!rows.transpose, where, std::string(argument) + ".transpose", rows.transpose,
          "must be false");
  require_readable(where, argument, rows);
}

}  // namespace detail

/// What a grouped product of n-column weights [k, n] costs, one product in all: forward, by the rows or
/// by the weights.
///
/// units     an expert without rows counts nothing, an unfilled row counts nothing
template <Storage S>
[[nodiscard]] Cost grouped_cost(const ExpertGroups& groups, std::int64_t k, std::int64_t n) {
  constexpr auto element = static_cast<std::int64_t>(sizeof(S));
  Cost cost;
  for (std::int64_t e = 0; e < groups.experts(); ++e) {
    const std::int64_t rows = groups.rows(e);
    if (rows > 0) {
      cost = cost + Cost{.flops = 2 * rows * k * n,
                         .bytes_read = (rows * k + k * n) * element,
                         .bytes_written = rows * n * element};
    }
  }
  return cost;
}

/// Bytes of workspace that suffice for a grouped product on so many threads, forward or backward;
/// `rows` those of the largest group.
template <Storage S>
[[nodiscard]] constexpr std::size_t grouped_workspace_bytes(std::int64_t experts, std::int64_t rows,
                                                            std::int64_t k, std::int64_t n,
                                                            std::int64_t threads) {
  using Largest = Product<S, Factor<S>, MatrixView<AccumulatorOf<S>>>;
  const std::int64_t extent = std::max(k, n);
  const std::int64_t most = std::max(rows, extent);
  return Workspace::bytes_for<Largest>(experts) +
         parallel_workspace_bytes<S, S>(experts, most, extent, most, threads);
}

/// Every row times its expert's weights.
///   result[r] = rows[r] * weights_e,  r a row of expert e
/// shapes    rows [R,k], as stored or gathered by row ids; weights [E*k, n], expert e in rows
///           [e*k, (e+1)*k); result [R,n]; any strides
/// dtypes    S in, S or its accumulator out: accumulated as core/matrix_engine does, rounded once
/// writes    the rows of every expert; the others as `unfilled` says
/// alias     result disjoint from the inputs
/// specials  an expert without rows costs nothing, its weights are not read; neither are unfilled rows
/// order     the bits of a result row depend on its row and its expert's weights alone
/// memory    grouped_workspace_bytes
/// cost      grouped_cost
/// throws    Error for bad groups, views of other shapes, row ids outside their matrix
/// source    spec/moe.md 6; spec/performance.md 5
template <Storage S, Storage C>
void grouped_product(const ExpertGroups& groups, const Factor<S>& rows, ConstMatrixView<S> weights,
                     MatrixView<C> result, UnfilledRows unfilled, Workspace& workspace) {
  constexpr std::string_view where = "moe::grouped_product";
  using Each = Product<S, Factor<S>, MatrixView<C>>;
  groups.validate(where, "rows.rows", rows.rows());
  detail::require_rows(where, "rows", rows);
  detail::require_weights(where, "weights", weights, groups, "rows.cols", rows.cols(),
                          "weights.cols", weights.cols());
  require_shape(where, "result", result, "rows.rows", rows.rows(), "weights.cols", weights.cols());
  detail::require_unfilled_rows(where, unfilled);
  const std::int64_t k = rows.cols();
  const Workspace::Frame frame(workspace);
  const auto products =
      detail::take_products<Each>(workspace, groups.experts(), [&](std::int64_t e) {
        return Each{rows.row_block(groups.first_row(e), groups.rows(e)),
                    as_is(weights.row_block(e * k, k)),
                    result.row_block(groups.first_row(e), groups.rows(e)), Write::overwrite};
      });
  parallel_multiply(products, workspace);
  detail::settle_unfilled_rows(groups, result, unfilled);
}

/// Backward of grouped_product by the rows; the weights are read in place.
///   d_rows[r] = d_result[r] * weights_e^T
/// shapes    d_result [R,n], as stored or gathered; weights [E*k, n]; d_rows [R,k]
/// writes    the rows of every expert; the others as `unfilled` says
/// and the rest as grouped_product
template <Storage S, Storage C>
void grouped_product_d_rows(const ExpertGroups& groups, const Factor<S>& d_result,
                            ConstMatrixView<S> weights, MatrixView<C> d_rows, UnfilledRows unfilled,
                            Workspace& workspace) {
  constexpr std::string_view where = "moe::grouped_product_d_rows";
  using Each = Product<S, Factor<S>, MatrixView<C>>;
  groups.validate(where, "d_result.rows", d_result.rows());
  detail::require_rows(where, "d_result", d_result);
  const std::int64_t k = detail::weight_rows(where, weights, groups);
  detail::require_weights(where, "weights", weights, groups, "weights.rows / groups.experts", k,
                          "d_result.cols", d_result.cols());
  require_shape(where, "d_rows", d_rows, "d_result.rows", d_result.rows(),
                "weights.rows / groups.experts", k);
  detail::require_unfilled_rows(where, unfilled);
  const Workspace::Frame frame(workspace);
  const auto products =
      detail::take_products<Each>(workspace, groups.experts(), [&](std::int64_t e) {
        return Each{d_result.row_block(groups.first_row(e), groups.rows(e)),
                    transposed(weights.row_block(e * k, k)),
                    d_rows.row_block(groups.first_row(e), groups.rows(e)), Write::overwrite};
      });
  parallel_multiply(products, workspace);
  detail::settle_unfilled_rows(groups, d_rows, unfilled);
}

/// Backward of grouped_product by the weights.
///   d_weights_e = sum over e's rows of rows[r]^T d_result[r]
/// shapes    rows [R,k], d_result [R,n], each as stored or gathered; d_weights [E*k, n]
/// dtypes    S in, its accumulator out
/// writes    all of d_weights, exact zeros where an expert has no rows; or adds to it
/// specials  null d_weights: nothing is done. Unfilled rows are read of neither factor
/// order     rows ascending inside a block of 512, blocks ascending
/// and the rest as grouped_product
template <Storage S>
void grouped_product_d_weights(const ExpertGroups& groups, const Factor<S>& rows,
                               const Factor<S>& d_result,
                               const WeightCotangent<AccumulatorOf<S>>& d_weights,
                               Workspace& workspace) {
  constexpr std::string_view where = "moe::grouped_product_d_weights";
  using Each = Product<S, Factor<S>, MatrixView<AccumulatorOf<S>>>;
  groups.validate(where, "rows.rows", rows.rows());
  detail::require_rows(where, "rows", rows);
  detail::require_rows(where, "d_result", d_result);
  require_equal(where, "d_result.rows", d_result.rows(), "rows.rows", rows.rows());
  require(d_weights.write == Write::overwrite || d_weights.write == Write::accumulate, where,
          "d_weights.write", d_weights.write, "must be overwrite or accumulate");
  if (!d_weights.wanted()) {
    return;
  }
  const std::int64_t k = rows.cols();
  detail::require_weights(where, "d_weights.values", d_weights.values, groups, "rows.cols", k,
                          "d_result.cols", d_result.cols());
  const Workspace::Frame frame(workspace);
  const std::span<Each> products = workspace.take<Each>(groups.experts());
  std::size_t used = 0;
  for (std::int64_t e = 0; e < groups.experts(); ++e) {
    const MatrixView<AccumulatorOf<S>> values = d_weights.values.row_block(e * k, k);
    const std::int64_t first = groups.first_row(e);
    const std::int64_t count = groups.rows(e);
    if (count > 0) {
      std::construct_at(products.data() + used++,
                        Each{detail::transpose_of(rows.row_block(first, count)),
                             d_result.row_block(first, count), values, d_weights.write});
    } else if (d_weights.write == Write::overwrite) {
      detail::zero_rows(values, 0, k);
    }
  }
  parallel_multiply(std::span<const Each>(products.first(used)), workspace);
}

}  // namespace heddle::moe

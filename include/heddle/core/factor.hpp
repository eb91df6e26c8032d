#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"

namespace heddle {

/// One factor of a product: a stored matrix, or some of its rows picked by index, read as it is or
/// transposed in place.
template <Storage T>
struct Factor {
  using Element = T;

  ConstMatrixView<T> matrix;
  bool transpose = false;
  /// The stored rows that take part, in this order; all of them where it is not set.
  std::optional<std::span<const std::int32_t>> row_ids = {};

  [[nodiscard]] std::int64_t stored_rows() const {
    return row_ids ? static_cast<std::int64_t>(row_ids->size()) : matrix.rows();
  }
  [[nodiscard]] std::int64_t rows() const { return transpose ? matrix.cols() : stored_rows(); }
  [[nodiscard]] std::int64_t cols() const { return transpose ? stored_rows() : matrix.cols(); }

  /// Rows [first, first + count) of the factor.
  [[nodiscard]] Factor row_block(std::int64_t first, std::int64_t count) const {
    return transpose ? stored_columns(first, count) : stored_block(first, count);
  }
  /// Columns [first, first + count) of the factor.
  [[nodiscard]] Factor column_block(std::int64_t first, std::int64_t count) const {
    return transpose ? stored_block(first, count) : stored_columns(first, count);
  }

 private:
  [[nodiscard]] Factor stored_block(std::int64_t first, std::int64_t count) const {
    if (row_ids) {
      return {matrix, transpose,
              row_ids->subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count))};
    }
    return {matrix.row_block(first, count), transpose, {}};
  }
  [[nodiscard]] Factor stored_columns(std::int64_t first, std::int64_t count) const {
    return {matrix.column_block(first, count), transpose, row_ids};
  }
};

/// `matrix` as a factor, as it is stored.
template <class T>
[[nodiscard]] Factor<std::remove_const_t<T>> as_is(MatrixView<T> matrix) {
  return {matrix, false, {}};
}

/// `matrix` as a factor, transposed; nothing is moved.
template <class T>
[[nodiscard]] Factor<std::remove_const_t<T>> transposed(MatrixView<T> matrix) {
  return {matrix, true, {}};
}

/// The rows `row_ids` of `matrix` as a factor: row i of it is matrix row row_ids[i]. Nothing is moved;
/// an id may occur more than once.
template <class T>
[[nodiscard]] Factor<std::remove_const_t<T>> gathered(MatrixView<T> matrix,
                                                      std::span<const std::int32_t> row_ids) {
  return {matrix, false, row_ids};
}

/// The transpose of gathered(matrix, row_ids).
template <class T>
[[nodiscard]] Factor<std::remove_const_t<T>> gathered_transposed(
    MatrixView<T> matrix, std::span<const std::int32_t> row_ids) {
  return {matrix, true, row_ids};
}

/// Refuses a factor without data or with a row id outside its matrix.
template <Storage T>
void require_readable(std::string_view where, std::string_view argument, const Factor<T>& factor) {
  if (factor.row_ids) {
    const auto rows = factor.matrix.rows();
    for (std::size_t i = 0; i < factor.row_ids->size(); ++i) {
      const std::int32_t id = (*factor.row_ids)[i];
      if (id < 0 || id >= rows) [[unlikely]] {
        fail(where, element_name(std::string(argument) + ".row_ids", i), id,
             "must be in [0, " + std::to_string(rows) + ")");
      }
    }
  }
  require(!factor.matrix.is_null() || factor.rows() == 0 || factor.cols() == 0, where, argument,
          nullptr, "required");
}

}  // namespace heddle

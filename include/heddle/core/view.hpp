#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "heddle/core/error.hpp"

namespace heddle {

/// A non-owning row-major matrix: `rows` rows of `cols` elements, `stride` elements from one row to
/// the next. The shape of every two-dimensional argument in the library; a head is a column block of
/// a [tokens, heads * dim] view, a token range a row block.
///
/// shapes    element (r, c) lies at data[r * stride + c], offsets in 64 bits
/// alias     never owns, never copies; MatrixView<T> converts to MatrixView<const T>
/// specials  a default view is null (no data, 0 x 0): an absent optional argument
template <class T>
class MatrixView {
 public:
  using Element = T;

  constexpr MatrixView() = default;
  constexpr MatrixView(T* data, std::int64_t rows, std::int64_t cols, std::int64_t stride)
      : data_(data), rows_(rows), cols_(cols), stride_(stride) {}
  constexpr MatrixView(T* data, std::int64_t rows, std::int64_t cols)
      : MatrixView(data, rows, cols, cols) {}

  template <class U>
  requires(std::is_same_v<const U, T> && !std::is_same_v<U, T>)
      // A view of mutable elements is usable wherever a view of constant ones is asked for.
      constexpr MatrixView(const MatrixView<U>& other)  // NOLINT(google-explicit-constructor)
      : MatrixView(other.data(), other.rows(), other.cols(), other.stride()) {}

  [[nodiscard]] constexpr T* data() const { return data_; }
  [[nodiscard]] constexpr std::int64_t rows() const { return rows_; }
  [[nodiscard]] constexpr std::int64_t cols() const { return cols_; }
  [[nodiscard]] constexpr std::int64_t stride() const { return stride_; }
  [[nodiscard]] constexpr bool is_null() const { return data_ == nullptr; }

  [[nodiscard]] constexpr T& operator()(std::int64_t row, std::int64_t col) const {
    return data_[row * stride_ + col];
  }

  [[nodiscard]] constexpr std::span<T> row(std::int64_t index) const {
    return {data_ + index * stride_, static_cast<std::size_t>(cols_)};
  }

  /// Rows [first, first + count).
  [[nodiscard]] constexpr MatrixView row_block(std::int64_t first, std::int64_t count) const {
    return {data_ == nullptr ? nullptr : data_ + first * stride_, count, cols_, stride_};
  }

  /// Columns [first, first + count): one head of a [tokens, heads * dim] array, for instance.
  [[nodiscard]] constexpr MatrixView column_block(std::int64_t first, std::int64_t count) const {
    return {data_ == nullptr ? nullptr : data_ + first, rows_, count, stride_};
  }

 private:
  T* data_ = nullptr;
  std::int64_t rows_ = 0;
  std::int64_t cols_ = 0;
  std::int64_t stride_ = 0;
};

template <class T>
using ConstMatrixView = MatrixView<const T>;

/// A row-major matrix of another library whose storage a view can share: Eigen's, for one.
template <class Owner>
concept RowMajorMatrix = requires(Owner& owner) {
  owner.data();
  { owner.rows() } -> std::convertible_to<std::int64_t>;
  { owner.cols() } -> std::convertible_to<std::int64_t>;
  { owner.outerStride() } -> std::convertible_to<std::int64_t>;
  requires static_cast<bool>(std::remove_cvref_t<Owner>::IsRowMajor);
};

/// A view of somebody else's row-major matrix; no element is copied.
template <RowMajorMatrix Owner>
[[nodiscard]] auto view(Owner& owner) {
  using T = std::remove_pointer_t<decltype(owner.data())>;
  return MatrixView<T>(owner.data(), owner.rows(), owner.cols(), owner.outerStride());
}

/// A temporary would be gone before the view is read.
template <RowMajorMatrix Owner>
auto view(const Owner&& owner) = delete;

/// What a backward pass does with the memory of a weight cotangent.
enum class Write {
  overwrite,   ///< every element is assigned, whatever was there
  accumulate,  ///< every element is added to, as a trainer with micro-batches needs
};

/// Where the cotangent of a weight goes. Null: it is neither computed, gathered nor sent.
template <class T>
struct WeightCotangent {
  MatrixView<T> values;
  Write write = Write::overwrite;

  [[nodiscard]] bool wanted() const { return !values.is_null(); }
};

/// The same for a weight that is a vector (a bias, A_log).
template <class T>
struct VectorCotangent {
  std::span<T> values;
  Write write = Write::overwrite;

  [[nodiscard]] bool wanted() const { return values.data() != nullptr; }
};

/// Refuses a view that is not [rows, cols] or whose rows overlap. The names of the extents it must
/// have go into the message.
template <class T>
void require_shape(std::string_view where, std::string_view argument, MatrixView<T> view,
                   std::string_view rows_name, std::int64_t rows, std::string_view cols_name,
                   std::int64_t cols) {
  require_equal(where, member_name(argument, "rows"), view.rows(), rows_name, rows);
  require_equal(where, member_name(argument, "cols"), view.cols(), cols_name, cols);
  if (view.stride() < cols) {
    fail(where, member_name(argument, "stride"), view.stride(),
         "must be at least its cols (" + std::to_string(cols) + ")");
  }
  if (view.is_null() && rows > 0 && cols > 0) {
    fail(where, argument, nullptr, "required");
  }
}

/// Refuses a span whose length is not `length`.
template <class T>
void require_length(std::string_view where, std::string_view argument, std::span<T> values,
                    std::string_view length_name, std::int64_t length) {
  require_equal(where, member_name(argument, "size"), values.size(), length_name, length);
}

}  // namespace heddle

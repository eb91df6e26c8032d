#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

#include "heddle/core/detail/gemm_paths.hpp"
#include "heddle/core/detail/gemm_types.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/factor.hpp"
#include "heddle/core/scalar.hpp"

namespace heddle {

/// A non-owning right factor [rows, cols] in the layout that products read it in: panels of
/// panel_columns<T> columns (a cache line of accumulators: 16 of f32 and bf16, 8 of f64), one behind
/// the other.
///
///   f32, f64  panel p, row k, column j of it: data[p * rows * w + k * w + j], w = panel_columns<T>
///   bf16      rows in pairs, an odd last one with zeros:
///             data[p * (rows + rows % 2) * w + (k - k % 2) * w + 2 * j + k % 2]
///
/// The layout is the same on every path. Columns that a last panel lacks may hold anything; no result
/// depends on them. The result of an f32 or f64 product can be written in this layout, and is then a
/// right factor of the next without being packed.
template <class T>
class PanelView {
 public:
  using Element = std::remove_const_t<T>;

  constexpr PanelView() = default;
  constexpr PanelView(T* data, std::int64_t rows, std::int64_t cols)
      : data_(data), rows_(rows), cols_(cols) {}

  template <class U>
  requires(std::is_same_v<const U, T> && !std::is_same_v<U, T>)
      // A view of mutable elements is usable wherever a view of constant ones is asked for.
      constexpr PanelView(const PanelView<U>& other)  // NOLINT(google-explicit-constructor)
      : PanelView(other.data(), other.rows(), other.cols()) {}

  [[nodiscard]] constexpr T* data() const { return data_; }
  [[nodiscard]] constexpr std::int64_t rows() const { return rows_; }
  [[nodiscard]] constexpr std::int64_t cols() const { return cols_; }
  [[nodiscard]] constexpr bool is_null() const { return data_ == nullptr; }

  /// Elements from one panel to the next.
  [[nodiscard]] constexpr std::int64_t panel_stride() const {
    constexpr std::int64_t pair = detail::step_depth<Element>;
    return (rows_ + pair - 1) / pair * pair * panel_columns<Element>;
  }
  /// Elements that the memory must have.
  [[nodiscard]] constexpr std::int64_t elements() const {
    return (cols_ + panel_columns<Element> - 1) / panel_columns<Element> * panel_stride();
  }

  [[nodiscard]] constexpr T& operator()(std::int64_t row, std::int64_t col) const {
    constexpr std::int64_t w = panel_columns<Element>;
    constexpr std::int64_t pair = detail::step_depth<Element>;
    return data_[col / w * panel_stride() + row / pair * pair * w + col % w * pair + row % pair];
  }

 private:
  T* data_ = nullptr;
  std::int64_t rows_ = 0;
  std::int64_t cols_ = 0;
};

template <class T>
using ConstPanelView = PanelView<const T>;

/// Bytes of a [rows, cols] matrix in panels.
template <Storage T>
[[nodiscard]] constexpr std::int64_t panel_bytes(std::int64_t rows, std::int64_t cols) {
  return PanelView<const T>(nullptr, rows, cols).elements() * static_cast<std::int64_t>(sizeof(T));
}

/// Copies a factor into panels.
///
/// shapes    factor [K,N] after transposition and gathering; panels [K,N]
/// dtypes    bf16, f32, f64; nothing is rounded
/// writes    all of panels, zeros where a last panel lacks columns
/// alias     panels disjoint from the factor; 64-byte aligned memory is read faster
/// memory    -
/// throws    Error for a factor that is not readable, panels.rows != K, panels.cols != N
template <Storage T>
void pack_panels(const Factor<T>& factor, PanelView<T> panels) {
  constexpr const char* where = "pack_panels";
  require_readable(where, "factor", factor);
  require_equal(where, "panels.rows", panels.rows(), "factor.rows", factor.rows());
  require_equal(where, "panels.cols", panels.cols(), "factor.cols", factor.cols());
  if (factor.rows() == 0 || factor.cols() == 0) {
    return;
  }
  require(!panels.is_null(), where, "panels", nullptr, "required");
  constexpr std::int64_t width = panel_columns<T>;
  const detail::PanelPackers<T>& packers = detail::current_panel_packers<T>();
  const std::int64_t stride_bytes = panels.panel_stride() * static_cast<std::int64_t>(sizeof(T));
  const auto row = [&](std::int64_t index) {
    return factor.matrix.data() +
           (factor.row_ids ? (*factor.row_ids)[static_cast<std::size_t>(index)] : index) *
               factor.matrix.stride();
  };
  const T* lines[product_block_depth];
  for (std::int64_t k = 0; k < factor.rows(); k += product_block_depth) {
    const std::int64_t depth = std::min(product_block_depth, factor.rows() - k);
    if (factor.transpose) {
      for (std::int64_t column = 0; column < factor.cols(); column += width) {
        const std::int64_t count = std::min(width, factor.cols() - column);
        for (std::int64_t j = 0; j < count; ++j) {
          lines[j] = row(column + j) + k;
        }
        packers.pack_lines(lines, static_cast<int>(count), depth,
                           panels.data() + column / width * panels.panel_stride() + k * width);
      }
    } else {
      for (std::int64_t i = 0; i < depth; ++i) {
        lines[i] = row(k + i);
      }
      for (std::int64_t column = 0; column < factor.cols(); column += detail::pack_group * width) {
        packers.pack_rows(
            lines, column, std::min(detail::pack_group * width, factor.cols() - column), depth,
            panels.data() + column / width * panels.panel_stride() + k * width, stride_bytes);
      }
    }
  }
}

/// A right factor that is packed once and multiplied often: owns its panels.
///
/// memory    panel_bytes<T>(rows, cols), 64-byte aligned; over memory of the caller's, pack_panels
///           into a PanelView does the same
/// throws    Error for rows < 0, cols < 0
template <Storage T>
class PackedMatrix {
 public:
  PackedMatrix() = default;
  PackedMatrix(std::int64_t rows, std::int64_t cols) : view_(nullptr, rows, cols) {
    require(rows >= 0, "PackedMatrix", "rows", rows, "must be >= 0");
    require(cols >= 0, "PackedMatrix", "cols", cols, "must be >= 0");
    const auto bytes = static_cast<std::size_t>(panel_bytes<T>(rows, cols));
    memory_.reset(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{alignment})));
    view_ = {reinterpret_cast<T*>(memory_.get()), rows, cols};
  }
  explicit PackedMatrix(const Factor<T>& factor) : PackedMatrix(factor.rows(), factor.cols()) {
    pack_panels(factor, view_);
  }

  [[nodiscard]] PanelView<T> view() { return view_; }
  [[nodiscard]] ConstPanelView<T> view() const { return view_; }

 private:
  static constexpr std::size_t alignment = 64;

  struct Free {
    void operator()(std::byte* memory) const {
      ::operator delete[](memory, std::align_val_t{alignment});
    }
  };

  std::unique_ptr<std::byte[], Free> memory_;
  PanelView<T> view_;
};

}  // namespace heddle

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/numerics/ulp.hpp"

namespace heddle::numerics {

/// The elements of a tensor in somebody else's memory, row-major.
using Elements =
    std::variant<std::span<const double>, std::span<const float>, std::span<const bfloat16>,
                 std::span<const std::int64_t>, std::span<const std::int32_t>,
                 std::span<const std::int16_t>, std::span<const std::uint8_t>>;

/// A tensor of a run under the name that the other run has it by too.
///
/// shapes    elements: as many as the product of `shape`; a shape of no extents is one element
/// alias     never owns, never copies
struct NamedTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  Elements elements;

  [[nodiscard]] std::int64_t size() const {
    return std::visit([](auto values) { return static_cast<std::int64_t>(values.size()); },
                      elements);
  }

  [[nodiscard]] bool is_floating() const {
    return std::visit(
        [](auto values) {
          return IeeeFloat<std::remove_cv_t<typename decltype(values)::element_type>>;
        },
        elements);
  }

  /// Bytes of an element: of two floating types the narrower is the coarser.
  [[nodiscard]] std::int64_t element_bytes() const {
    return std::visit(
        [](auto values) {
          return static_cast<std::int64_t>(sizeof(typename decltype(values)::element_type));
        },
        elements);
  }

  /// Elements [first, first + to.size()) as To: exact for To = double but for integers beyond 2^53.
  template <class To>
  void read(std::int64_t first, std::span<To> to) const {
    std::visit(
        [&](auto values) {
          const auto from = values.subspan(static_cast<std::size_t>(first), to.size());
          for (std::size_t i = 0; i < to.size(); ++i) {
            to[i] = static_cast<To>(from[i]);
          }
        },
        elements);
  }

  template <class To>
  [[nodiscard]] std::vector<To> read_all() const {
    std::vector<To> values(static_cast<std::size_t>(size()));
    read(0, std::span<To>(values));
    return values;
  }

  /// Extents of the tensor as rows of its last dimension; a vector is one row.
  [[nodiscard]] std::int64_t row_size() const { return shape.empty() ? 1 : shape.back(); }
  [[nodiscard]] std::int64_t rows() const { return size() == 0 ? 0 : size() / row_size(); }

  /// throws    Error for a negative extent or a number of elements that is not the shape's
  void validate(std::string_view where) const {
    std::int64_t count = 1;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      const std::int64_t extent = shape[axis];
      require(extent >= 0, where, element_name(name + ".shape", axis), extent, "must be >= 0");
      // Beyond I64 there is no span of so many elements: any number that is none of theirs will do.
      count = extent > 0 && count > std::numeric_limits<std::int64_t>::max() / extent
                  ? std::numeric_limits<std::int64_t>::max()
                  : count * extent;
    }
    require_equal(where, name + ".elements.size", size(), "the product of its shape", count);
  }
};

/// The place of an element by its indices: "[3, 1]".
[[nodiscard]] inline std::string entry_text(const std::vector<std::int64_t>& shape,
                                            std::int64_t flat) {
  std::vector<std::int64_t> index(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    index[axis] = flat % shape[axis];
    flat /= shape[axis];
  }
  std::string text = "[";
  for (std::size_t axis = 0; axis < index.size(); ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(index[axis]);
  }
  return text + "]";
}

}  // namespace heddle::numerics

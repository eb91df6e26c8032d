#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"

namespace heddle::examples {

/// What the elements of a stored tensor are.
enum class Dtype { f64, f32, bf16, i64, i32, i16, u8 };

struct DtypeTraits {
  Dtype dtype;
  std::string_view name;  ///< as safetensors spells it
  std::int64_t bytes;
};

inline constexpr DtypeTraits dtype_table[] = {
    {Dtype::f64, "F64", 8}, {Dtype::f32, "F32", 4}, {Dtype::bf16, "BF16", 2},
    {Dtype::i64, "I64", 8}, {Dtype::i32, "I32", 4}, {Dtype::i16, "I16", 2},
    {Dtype::u8, "U8", 1},
};

[[nodiscard]] constexpr const DtypeTraits& traits(Dtype dtype) {
  return dtype_table[static_cast<std::size_t>(dtype)];
}
[[nodiscard]] constexpr std::string_view dtype_name(Dtype dtype) {
  return traits(dtype).name;
}
[[nodiscard]] constexpr std::int64_t dtype_bytes(Dtype dtype) {
  return traits(dtype).bytes;
}

[[nodiscard]] constexpr std::optional<Dtype> dtype_named(std::string_view name) {
  for (const DtypeTraits& known : dtype_table) {
    if (known.name == name) {
      return known.dtype;
    }
  }
  return std::nullopt;
}

/// "F64, F32, BF16, I64, I32, I16, U8", for messages.
[[nodiscard]] inline std::string dtype_names() {
  std::string names;
  for (const DtypeTraits& known : dtype_table) {
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  return names;
}

[[nodiscard]] constexpr bool is_floating(Dtype dtype) {
  return dtype == Dtype::f64 || dtype == Dtype::f32 || dtype == Dtype::bf16;
}

template <class T>
[[nodiscard]] constexpr Dtype dtype_of() {
  if constexpr (std::is_same_v<T, double>) {
    return Dtype::f64;
  } else if constexpr (std::is_same_v<T, float>) {
    return Dtype::f32;
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    return Dtype::bf16;
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return Dtype::i64;
  } else if constexpr (std::is_same_v<T, std::int32_t>) {
    return Dtype::i32;
  } else if constexpr (std::is_same_v<T, std::int16_t>) {
    return Dtype::i16;
  } else {
    static_assert(std::is_same_v<T, std::uint8_t>, "dtype_of: no stored dtype for this type");
    return Dtype::u8;
  }
}

/// Calls use(T{}) with the C++ type of `dtype`.
template <class Use>
decltype(auto) with_type(Dtype dtype, const Use& use) {
  switch (dtype) {
    case Dtype::f64:
      return use(double{});
    case Dtype::f32:
      return use(float{});
    case Dtype::bf16:
      return use(bfloat16{});
    case Dtype::i64:
      return use(std::int64_t{});
    case Dtype::i32:
      return use(std::int32_t{});
    case Dtype::i16:
      return use(std::int16_t{});
    case Dtype::u8:
      return use(std::uint8_t{});
  }
  fail("with_type", "dtype", dtype, "must be a stored dtype");
}

using Shape = std::vector<std::int64_t>;

/// Elements of a shape (1 of a scalar's), or nothing for a negative extent or a product beyond I64.
/// An extent of 0 makes the product 0 however large the others are.
[[nodiscard]] inline std::optional<std::int64_t> checked_element_count(const Shape& shape) {
  std::int64_t count = 1;
  bool overflow = false;
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) {
      return std::nullopt;
    }
    empty = empty || extent == 0;
    overflow =
        overflow || (extent > 0 && count > std::numeric_limits<std::int64_t>::max() / extent);
    count = overflow ? count : count * extent;
  }
  if (empty) {
    return 0;
  }
  return overflow ? std::nullopt : std::optional<std::int64_t>(count);
}

[[nodiscard]] inline std::string shape_text(const Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

/// What a file says of a tensor without its elements.
struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::f32;
  Shape shape;

  /// The shape is one that checked_element_count has accepted.
  [[nodiscard]] std::int64_t elements() const { return checked_element_count(shape).value_or(0); }
  [[nodiscard]] std::int64_t bytes() const { return elements() * dtype_bytes(dtype); }
};

/// A tensor in somebody else's memory: row-major, aligned to its element.
struct TensorView : TensorInfo {
  const std::byte* data = nullptr;

  [[nodiscard]] std::span<const std::byte> raw() const {
    return {data, static_cast<std::size_t>(bytes())};
  }

  /// The elements; T must be the C++ type of dtype.
  template <class T>
  [[nodiscard]] std::span<const T> values() const {
    require(dtype_of<T>() == dtype, "TensorView::values", name, dtype_name(dtype),
            "must be of dtype " + std::string(dtype_name(dtype_of<T>())));
    return {reinterpret_cast<const T*>(data), static_cast<std::size_t>(elements())};
  }

  /// The elements as a vector of T, converted one by one.
  template <class T>
  [[nodiscard]] std::vector<T> converted() const {
    return with_type(dtype, [this](auto stored) {
      const auto elements = this->template values<decltype(stored)>();
      std::vector<T> result(elements.size());
      for (std::size_t i = 0; i < result.size(); ++i) {
        result[i] = static_cast<T>(elements[i]);
      }
      return result;
    });
  }
};

/// A tensor that owns its elements.
struct Tensor : TensorInfo {
  std::vector<std::byte> storage;

  Tensor() = default;
  /// All zero bits.
  Tensor(std::string tensor_name, Dtype element, Shape extents)
      : TensorInfo{std::move(tensor_name), element, std::move(extents)} {
    const std::optional<std::int64_t> count = checked_element_count(shape);
    require(count.has_value(), "Tensor", name, shape_text(shape),
            "must have extents >= 0 and a number of elements that fits I64");
    storage.resize(static_cast<std::size_t>(bytes()));
  }

  /// Of a vector whose length is the product of the shape.
  template <class T>
  [[nodiscard]] static Tensor of(std::string name, Shape shape, const std::vector<T>& elements) {
    Tensor tensor(std::move(name), dtype_of<T>(), std::move(shape));
    require_equal("Tensor::of", tensor.name, elements.size(), shape_text(tensor.shape),
                  tensor.elements());
    if (!elements.empty()) {
      std::memcpy(tensor.storage.data(), elements.data(), tensor.storage.size());
    }
    return tensor;
  }

  template <class T>
  [[nodiscard]] std::span<T> values() {
    require(dtype_of<T>() == dtype, "Tensor::values", name, dtype_name(dtype),
            "must be of dtype " + std::string(dtype_name(dtype_of<T>())));
    return {reinterpret_cast<T*>(storage.data()), static_cast<std::size_t>(elements())};
  }
  template <class T>
  [[nodiscard]] std::span<const T> values() const {
    return view().values<T>();
  }

  [[nodiscard]] TensorView view() const {
    TensorView result;
    static_cast<TensorInfo&>(result) = *this;
    result.data = storage.data();
    return result;
  }
};

}  // namespace heddle::examples

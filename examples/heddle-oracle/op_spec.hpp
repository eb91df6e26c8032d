#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "support/json_text.hpp"
#include "support/tensor.hpp"

namespace heddle::oracle {

using examples::Dtype;
using examples::Json;
using examples::Shape;
using examples::Tensor;
using examples::TensorInfo;

class OpCall;

/// What a tensor is stored in, relative to the op's main input, which is its first tensor.
enum class Stored {
  main,         ///< F64, F32 or BF16: the main input itself
  main_wide,    ///< the main input where there is no BF16 form: F64 or F32
  activation,   ///< as the main input
  parameter,    ///< as the main input, or F32 under BF16
  accumulator,  ///< F64 under F64, else F32
  ids,          ///< I32
  counts,       ///< I64
  booleans,     ///< U8, each 0 or 1
};

/// Another shape where an attribute has a certain value.
struct ShapeVariant {
  std::string attribute;
  std::string value;
  std::vector<std::string> shape = {};
};

/// A tensor of an op. Extents are sums of products of integers and symbols ("2*Hk*Dk + Hv*Dv", "K - 1");
/// a symbol is bound by an attribute or by the first tensor that has it.
struct TensorRule {
  std::string name;
  Stored stored = Stored::activation;
  std::vector<std::string> shape = {};
  bool optional = false;
  std::optional<ShapeVariant> variant = {};
};

/// An output, written always or where one of some optional tensors is given.
struct OutputRule {
  std::string name;
  Stored stored = Stored::accumulator;
  std::vector<std::string> shape = {};
  std::vector<std::string> given_any_of = {};
  std::optional<ShapeVariant> variant = {};
};

/// An attribute of an op.
struct AttributeRule {
  enum class Kind { integer, number, choice, flag, axes };

  std::string name;
  Kind kind = Kind::choice;
  std::optional<std::string> default_value = {};
  bool required = false;
  std::vector<std::string> choices;  ///< of a choice
  double lowest = 0;                 ///< of an integer or number
  bool above_lowest = false;         ///< the lowest itself is not legal
  /// Of an integer. Products of two such extents still fit I64 with room to spare.
  double highest = 1 << 30;
  std::optional<std::string> symbol;  ///< the extent that an integer gives

  /// "integer >= 1", "aligned or grid", ...: completes "must be ...".
  [[nodiscard]] std::string rule() const;

  [[nodiscard]] AttributeRule by_default(std::string value) const;
  /// Of an attribute that must be given; `extent` is the symbol it binds.
  [[nodiscard]] AttributeRule always(std::optional<std::string> extent = std::nullopt) const;
};

[[nodiscard]] AttributeRule integer_attribute(std::string name, std::int64_t lowest);
[[nodiscard]] AttributeRule number_attribute(std::string name, double lowest);
[[nodiscard]] AttributeRule positive_attribute(std::string name);
[[nodiscard]] AttributeRule choice_attribute(std::string name, std::vector<std::string> choices);
[[nodiscard]] AttributeRule flag_attribute(std::string name);

/// One op: what it takes and gives, from which `list`, all checks and all messages come, and what
/// computes it.
struct OpSpec {
  std::string name;
  std::vector<TensorRule> tensors;
  std::vector<AttributeRule> attributes;
  std::vector<OutputRule> outputs;
  std::function<void(OpCall&)> compute;
  std::vector<std::string> paths = {"fast", "reference"};
  /// Tensors that come together or not at all.
  std::vector<std::string> all_or_none = {};

  [[nodiscard]] const TensorRule* find_tensor(std::string_view tensor) const;
  [[nodiscard]] const AttributeRule* find_attribute(std::string_view attribute) const;
};

/// Every op, in the order of `list`.
[[nodiscard]] const std::vector<OpSpec>& all_ops();

/// The attributes that every op takes besides its own.
[[nodiscard]] std::vector<AttributeRule> common_attributes(const OpSpec& op);

/// The dtypes that a rule allows under a main input of `main`.
[[nodiscard]] std::vector<Dtype> allowed_dtypes(Stored stored, Dtype main);

/// Values of symbols, as they are bound.
using Symbols = std::map<std::string, std::int64_t>;

/// The value of an extent under the symbols; nothing where one is not bound or it overflows I64.
[[nodiscard]] std::optional<std::int64_t> extent_value(const std::string& extent,
                                                       const Symbols& symbols);

/// Whether `actual` can be the extent; binds the one symbol of it that is not bound yet.
[[nodiscard]] bool match_extent(const std::string& extent, std::int64_t actual, Symbols& symbols);

/// "[T = 4, K - 1]".
[[nodiscard]] std::string expected_shape_text(const std::vector<std::string>& shape,
                                              const Symbols& symbols);

/// `list`, for a reader and as one JSON object.
void print_op(const OpSpec& op, std::ostream& out);
[[nodiscard]] Json op_json(const OpSpec& op);

/// "a, b or c".
[[nodiscard]] std::string any_of_text(const std::vector<std::string>& names);

}  // namespace heddle::oracle

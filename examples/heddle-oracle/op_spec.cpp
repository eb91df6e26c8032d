#include "heddle-oracle/op_spec.hpp"

#include <algorithm>
#include <charconv>
#include <ostream>
#include <utility>

#include "heddle-oracle/ops.hpp"
#include "heddle/core/error.hpp"
#include "support/table.hpp"

namespace heddle::oracle {
namespace {

/// A product of an integer and symbols, with its sign.
struct Term {
  std::int64_t coefficient = 1;
  std::vector<std::string> symbols;
};

/// "2*Hk*Dk + Hv*Dv" and "K - 1" as terms. Only the tables of ops are read here, so what is no extent
/// is our own mistake.
std::vector<Term> terms_of(const std::string& extent) {
  std::vector<Term> terms;
  std::int64_t sign = 1;
  std::size_t position = 0;
  bool new_term = true;
  while (position < extent.size()) {
    const char letter = extent[position];
    if (letter == ' ' || letter == '*') {
      ++position;
      continue;
    }
    if (letter == '+' || letter == '-') {
      sign = letter == '-' ? -1 : 1;
      new_term = true;
      ++position;
      continue;
    }
    const std::size_t end = std::min(extent.find_first_of(" *+-", position), extent.size());
    const std::string factor = extent.substr(position, end - position);
    position = end;
    if (new_term) {
      terms.push_back({.coefficient = sign, .symbols = {}});
      new_term = false;
    }
    std::int64_t number = 0;
    const auto [last, error] =
        std::from_chars(factor.data(), factor.data() + factor.size(), number);
    if (error == std::errc{} && last == factor.data() + factor.size()) {
      terms.back().coefficient *= number;
    } else {
      terms.back().symbols.push_back(factor);
    }
  }
  return terms;
}

std::string join(const std::vector<std::string>& parts, const std::string& between,
                 const std::string& before_last) {
  std::string text;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    text += i == 0 ? "" : (i + 1 == parts.size() ? before_last : between);
    text += parts[i];
  }
  return text;
}

std::string plain_shape_text(const std::vector<std::string>& shape) {
  return "[" + join(shape, ", ", ", ") + "]";
}

std::string shape_text(const std::vector<std::string>& shape,
                       const std::optional<ShapeVariant>& variant) {
  return plain_shape_text(shape) + (variant
                                        ? ", or " + plain_shape_text(variant->shape) + " with " +
                                              variant->attribute + "=" + variant->value
                                        : "");
}

std::string stored_text(Stored stored, const std::string& main) {
  switch (stored) {
    case Stored::main:
      return "F64, F32 or BF16";
    case Stored::main_wide:
      return "F64 or F32";
    case Stored::activation:
      return "as " + main;
    case Stored::parameter:
      return "as " + main + ", or F32 under BF16";
    case Stored::accumulator:
      return "F32 (F64 under F64)";
    case Stored::ids:
      return "I32";
    case Stored::counts:
      return "I64";
    case Stored::booleans:
      return "U8";
  }
  fail("stored_text", "stored", stored, "unknown");
}

std::string attribute_head(const AttributeRule& attribute) {
  return attribute.name + (attribute.required ? "" : "?") +
         (attribute.default_value ? " = " + *attribute.default_value : "");
}

std::string output_condition(const OutputRule& output) {
  return output.given_any_of.empty() ? "" : "with " + any_of_text(output.given_any_of);
}

}  // namespace

std::string any_of_text(const std::vector<std::string>& names) {
  return join(names, ", ", " or ");
}

std::string AttributeRule::rule() const {
  const std::string bound = (above_lowest ? "> " : ">= ") + error_text(lowest);
  const std::string extent = symbol ? " (" + *symbol + ")" : "";
  switch (kind) {
    case Kind::integer:
      return "an integer " + bound + extent;
    case Kind::number:
      return "a finite number " + bound;
    case Kind::choice:
      return any_of_text(choices);
    case Kind::flag:
      return "0 or 1";
    case Kind::axes:
      return "device counts like fsdp=2,context=2,expert=2";
  }
  fail("AttributeRule::rule", "kind", kind, "unknown");
}

AttributeRule AttributeRule::by_default(std::string value) const {
  AttributeRule result = *this;
  result.default_value = std::move(value);
  return result;
}

AttributeRule AttributeRule::always(std::optional<std::string> extent) const {
  AttributeRule result = *this;
  result.required = true;
  result.symbol = std::move(extent);
  return result;
}

AttributeRule integer_attribute(std::string name, std::int64_t lowest) {
  AttributeRule rule;
  rule.name = std::move(name);
  rule.kind = AttributeRule::Kind::integer;
  rule.lowest = static_cast<double>(lowest);
  return rule;
}

AttributeRule number_attribute(std::string name, double lowest) {
  AttributeRule rule;
  rule.name = std::move(name);
  rule.kind = AttributeRule::Kind::number;
  rule.lowest = lowest;
  return rule;
}

AttributeRule positive_attribute(std::string name) {
  AttributeRule rule = number_attribute(std::move(name), 0);
  rule.above_lowest = true;
  return rule;
}

AttributeRule choice_attribute(std::string name, std::vector<std::string> choices) {
  AttributeRule rule;
  rule.name = std::move(name);
  rule.choices = std::move(choices);
  return rule;
}

AttributeRule flag_attribute(std::string name) {
  AttributeRule rule;
  rule.name = std::move(name);
  rule.kind = AttributeRule::Kind::flag;
  return rule;
}

std::vector<AttributeRule> common_attributes(const OpSpec& op) {
  AttributeRule mesh;
  mesh.name = "mesh";
  mesh.kind = AttributeRule::Kind::axes;
  AttributeRule threads = integer_attribute("threads", 1);
  threads.highest = 1024;
  return {mesh, threads, choice_attribute("path", op.paths).by_default("fast")};
}

const TensorRule* OpSpec::find_tensor(std::string_view tensor) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const TensorRule& rule) { return rule.name == tensor; });
  return found == tensors.end() ? nullptr : &*found;
}

const AttributeRule* OpSpec::find_attribute(std::string_view attribute) const {
  const auto found = std::find_if(attributes.begin(), attributes.end(),
                                  [&](const auto& rule) { return rule.name == attribute; });
  return found == attributes.end() ? nullptr : &*found;
}

const std::vector<OpSpec>& all_ops() {
  static const std::vector<OpSpec> ops = [] {
    std::vector<OpSpec> all;
    for (const auto& family : {gdn_ops(), head_ops(), moe_ops(), tile_ops(), loss_ops()}) {
      all.insert(all.end(), family.begin(), family.end());
    }
    for (OpSpec& op : all) {
      const std::vector<AttributeRule> common = common_attributes(op);
      op.attributes.insert(op.attributes.end(), common.begin(), common.end());
    }
    return all;
  }();
  return ops;
}

std::vector<Dtype> allowed_dtypes(Stored stored, Dtype main) {
  switch (stored) {
    case Stored::main:
      return {Dtype::f64, Dtype::f32, Dtype::bf16};
    case Stored::main_wide:
      return {Dtype::f64, Dtype::f32};
    case Stored::activation:
      return {main};
    case Stored::parameter:
      return main == Dtype::bf16 ? std::vector{Dtype::bf16, Dtype::f32} : std::vector{main};
    case Stored::accumulator:
      return {main == Dtype::f64 ? Dtype::f64 : Dtype::f32};
    case Stored::ids:
      return {Dtype::i32};
    case Stored::counts:
      return {Dtype::i64};
    case Stored::booleans:
      return {Dtype::u8};
  }
  fail("allowed_dtypes", "stored", stored, "unknown");
}

std::optional<std::int64_t> extent_value(const std::string& extent, const Symbols& symbols) {
  std::int64_t sum = 0;
  for (const Term& term : terms_of(extent)) {
    std::int64_t product = term.coefficient;
    for (const std::string& symbol : term.symbols) {
      const auto bound = symbols.find(symbol);
      if (bound == symbols.end() || __builtin_mul_overflow(product, bound->second, &product)) {
        return std::nullopt;
      }
    }
    if (__builtin_add_overflow(sum, product, &sum)) {
      return std::nullopt;
    }
  }
  return sum;
}

bool match_extent(const std::string& extent, std::int64_t actual, Symbols& symbols) {
  std::string unbound;
  for (const Term& term : terms_of(extent)) {
    for (const std::string& symbol : term.symbols) {
      if (!symbols.contains(symbol)) {
        unbound = symbol;
      }
    }
  }
  if (unbound.empty()) {
    return extent_value(extent, symbols) == actual;
  }
  // An extent is linear in its one unbound symbol: what it is at 0 and 1 says the rest.
  Symbols trial = symbols;
  trial[unbound] = 0;
  const std::optional<std::int64_t> at_zero = extent_value(extent, trial);
  trial[unbound] = 1;
  const std::optional<std::int64_t> at_one = extent_value(extent, trial);
  if (!at_zero || !at_one || *at_one <= *at_zero || actual < *at_zero) {
    return false;
  }
  const std::int64_t slope = *at_one - *at_zero;
  if ((actual - *at_zero) % slope != 0) {
    return false;
  }
  symbols[unbound] = (actual - *at_zero) / slope;
  return true;
}

std::string expected_shape_text(const std::vector<std::string>& shape, const Symbols& symbols) {
  std::vector<std::string> extents;
  for (const std::string& extent : shape) {
    const std::optional<std::int64_t> value = extent_value(extent, symbols);
    const std::string number = value ? std::to_string(*value) : "";
    extents.push_back(!value || number == extent ? extent : extent + " = " + number);
  }
  return plain_shape_text(extents);
}

void print_op(const OpSpec& op, std::ostream& out) {
  using Align = examples::Table::Align;
  out << op.name << '\n';
  const std::string main = op.tensors.front().name;
  examples::Table table({{"", Align::left}, {"", Align::left}, {"", Align::left}});
  for (const TensorRule& tensor : op.tensors) {
    table.add({"  " + tensor.name + (tensor.optional ? "?" : ""), stored_text(tensor.stored, main),
               shape_text(tensor.shape, tensor.variant)});
  }
  for (const AttributeRule& attribute : op.attributes) {
    table.add({"  " + attribute_head(attribute), attribute.rule(), ""});
  }
  for (const OutputRule& output : op.outputs) {
    const std::string condition = output_condition(output);
    table.add(
        {"  -> " + output.name, stored_text(output.stored, main),
         shape_text(output.shape, output.variant) + (condition.empty() ? "" : "  " + condition)});
  }
  table.print(out);
}

Json op_json(const OpSpec& op) {
  const std::string main = op.tensors.front().name;
  Json tensors = Json::array();
  for (const TensorRule& tensor : op.tensors) {
    tensors.push_back({{"name", tensor.name},
                       {"dtype", stored_text(tensor.stored, main)},
                       {"shape", shape_text(tensor.shape, tensor.variant)},
                       {"optional", tensor.optional}});
  }
  Json attributes = Json::array();
  for (const AttributeRule& attribute : op.attributes) {
    attributes.push_back(
        {{"name", attribute.name},
         {"value", attribute.rule()},
         {"default", attribute.default_value ? Json(*attribute.default_value) : Json(nullptr)},
         {"required", attribute.required}});
  }
  Json outputs = Json::array();
  for (const OutputRule& output : op.outputs) {
    const std::string condition = output_condition(output);
    outputs.push_back({{"name", output.name},
                       {"dtype", stored_text(output.stored, main)},
                       {"shape", shape_text(output.shape, output.variant)},
                       {"when", condition.empty() ? Json(nullptr) : Json(condition)}});
  }
  return {{"op", op.name},
          {"tensors", std::move(tensors)},
          {"attributes", std::move(attributes)},
          {"outputs", std::move(outputs)}};
}

}  // namespace heddle::oracle

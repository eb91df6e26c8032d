#include "heddle-oracle/op_call.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <utility>

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include "support/usage_error.hpp"

namespace heddle::oracle {
namespace {

using examples::dtype_name;
using examples::UsageError;

std::string tensor_text(const TensorInfo& tensor) {
  return "tensor '" + tensor.name + "' is " + std::string(dtype_name(tensor.dtype)) + " " +
         examples::shape_text(tensor.shape);
}

std::string dtypes_text(const std::vector<Dtype>& dtypes) {
  std::vector<std::string> names;
  for (const Dtype dtype : dtypes) {
    names.emplace_back(dtype_name(dtype));
  }
  return any_of_text(names);
}

std::string attribute_text(std::string_view name, const std::string& value) {
  return "attribute '" + std::string(name) + "' = '" + value + "'";
}

template <class Rule>
std::string names_of(const std::vector<Rule>& rules) {
  std::string names;
  for (const Rule& rule : rules) {
    names += (names.empty() ? "" : ", ") + rule.name;
  }
  return names;
}

/// The whole text as a number, as a double reads it.
std::optional<double> as_number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value)) {
    return std::nullopt;
  }
  return value;
}

bool is_within(const AttributeRule& rule, double value) {
  return rule.above_lowest ? value > rule.lowest : value >= rule.lowest;
}

}  // namespace

OpCall::OpCall(const examples::TensorFile& file, const examples::Metadata& settings) : file_(file) {
  find_op(settings);
  check_attributes(settings);
  check_tensors();
  make_outputs();
}

void OpCall::refuse(const std::string& what) const {
  throw UsageError(file_.path() + ": " + what);
}

void OpCall::find_op(const examples::Metadata& settings) {
  std::vector<std::string> names;
  for (const OpSpec& op : all_ops()) {
    names.push_back(op.name);
  }
  const auto find = [](const examples::Metadata& from) {
    const auto found = from.find("op");
    return found == from.end() ? nullptr : &found->second;
  };
  const std::string* const name =
      find(settings) != nullptr ? find(settings) : find(file_.metadata());
  if (name == nullptr) {
    refuse("attribute 'op' is missing: must be " + any_of_text(names));
  }
  const auto op = std::find(names.begin(), names.end(), *name);
  if (op == names.end()) {
    refuse("op '" + *name + "' is unknown: must be " + any_of_text(names));
  }
  op_ = &all_ops()[static_cast<std::size_t>(op - names.begin())];
}

void OpCall::check_attributes(const examples::Metadata& settings) {
  examples::Metadata given = settings;
  given.insert(file_.metadata().begin(), file_.metadata().end());  // keeps what is set already
  given.erase("op");
  for (const auto& [name, value] : given) {
    const AttributeRule* const rule = op_->find_attribute(name);
    if (rule == nullptr) {
      refuse(attribute_text(name, value) + " is unknown: " + op_->name + " takes " +
             names_of(op_->attributes));
    }
  }
  for (const AttributeRule& rule : op_->attributes) {
    const auto found = given.find(rule.name);
    if (found != given.end()) {
      check_attribute(rule, found->second);
      values_[rule.name] = found->second;
    } else if (rule.required) {
      refuse("attribute '" + rule.name + "' is missing: must be " + rule.rule());
    } else if (rule.default_value) {
      values_[rule.name] = *rule.default_value;
    }
    if (rule.symbol) {
      symbols_[*rule.symbol] = integer(rule.name);
    }
  }
  const std::string& path = text("path");
  path_ = path == "reference" ? Path::reference : path == "decode" ? Path::decode : Path::fast;
  if (mesh_.devices() > 1 && path_ != Path::reference) {
    refuse(attribute_text("mesh", text("mesh")) + ": must be one device with path=" + path +
           ", where no sharded kernel is available; path=reference computes what the mesh would");
  }
}

void OpCall::check_attribute(const AttributeRule& rule, const std::string& value) {
  bool holds = false;
  switch (rule.kind) {
    case AttributeRule::Kind::choice:
      holds = std::find(rule.choices.begin(), rule.choices.end(), value) != rule.choices.end();
      break;
    case AttributeRule::Kind::flag: {
      const std::optional<double> number = as_number(value);
      holds = number == 0.0 || number == 1.0;
      break;
    }
    case AttributeRule::Kind::number: {
      const std::optional<double> number = as_number(value);
      holds = number && is_within(rule, *number);
      break;
    }
    case AttributeRule::Kind::integer: {
      const std::optional<double> number = as_number(value);
      holds = number && is_within(rule, *number) && *number == std::floor(*number);
      if (holds && *number > rule.highest) {
        refuse(attribute_text(rule.name, value) + ": must be at most " + error_text(rule.highest));
      }
      break;
    }
    case AttributeRule::Kind::axes:
      try {
        mesh_ = parse_axes(value);
        holds = true;
      } catch (const Error& error) {
        refuse(attribute_text(rule.name, value) + ": " + error.argument() + " = " + error.value() +
               ": " + error.rule());
      }
      break;
  }
  if (!holds) {
    refuse(attribute_text(rule.name, value) + ": must be " + rule.rule());
  }
}

void OpCall::check_tensors() {
  for (const TensorInfo& tensor : file_.tensors()) {
    if (op_->find_tensor(tensor.name) == nullptr) {
      refuse(tensor_text(tensor) + " and unknown: " + op_->name + " takes " +
             names_of(op_->tensors));
    }
  }
  main_dtype_ = allowed_dtypes(op_->tensors.front().stored, Dtype::f32).front();
  for (const TensorRule& rule : op_->tensors) {
    const std::optional<examples::TensorView> tensor = file_.find(rule.name);
    if (tensor) {
      check_tensor(rule, *tensor);
      if (&rule == &op_->tensors.front()) {
        main_dtype_ = tensor->dtype;
      }
      if (rule.stored == Stored::booleans) {
        check_booleans(rule);
      }
    } else if (!rule.optional) {
      refuse("tensor '" + rule.name + "' is missing: must be " +
             dtypes_text(allowed_dtypes(rule.stored, main_dtype_)) + " " +
             expected_shape_text(shape_of(rule.shape, rule.variant), symbols_));
    }
  }
  const auto count = std::count_if(op_->all_or_none.begin(), op_->all_or_none.end(),
                                   [this](const std::string& name) { return has(name); });
  if (count > 0) {
    for (const std::string& name : op_->all_or_none) {
      if (!has(name)) {
        std::string together;
        for (const std::string& other : op_->all_or_none) {
          together += (together.empty() ? "" : ", ") + other;
        }
        refuse("tensor '" + name + "' is missing: " + together + " come together or not at all");
      }
    }
  }
}

void OpCall::check_tensor(const TensorRule& rule, const TensorInfo& tensor) {
  const std::vector<std::string>& shape = shape_of(rule.shape, rule.variant);
  const std::vector<Dtype> dtypes = allowed_dtypes(rule.stored, main_dtype_);
  const Symbols known = symbols_;  // the message is not to show what a wrong extent bound
  bool holds = std::find(dtypes.begin(), dtypes.end(), tensor.dtype) != dtypes.end() &&
               tensor.shape.size() == shape.size();
  for (std::size_t axis = 0; holds && axis < shape.size(); ++axis) {
    holds = match_extent(shape[axis], tensor.shape[axis], symbols_);
  }
  if (!holds) {
    refuse(tensor_text(tensor) + ": must be " + dtypes_text(dtypes) + " " +
           expected_shape_text(shape, known));
  }
}

void OpCall::check_booleans(const TensorRule& rule) {
  const std::span<const std::uint8_t> elements = vector<std::uint8_t>(rule.name);
  const auto wrong = std::find_if(elements.begin(), elements.end(),
                                  [](std::uint8_t element) { return element > 1; });
  if (wrong != elements.end()) {
    refuse("tensor '" + rule.name + "' has " + std::to_string(*wrong) + " at " +
           std::to_string(wrong - elements.begin()) + ": must be 0 or 1 everywhere");
  }
}

void OpCall::make_outputs() {
  for (const OutputRule& rule : op_->outputs) {
    const bool given = rule.given_any_of.empty() ||
                       std::any_of(rule.given_any_of.begin(), rule.given_any_of.end(),
                                   [this](const std::string& name) { return has(name); });
    if (!given) {
      continue;
    }
    Shape shape;
    for (const std::string& axis : shape_of(rule.shape, rule.variant)) {
      shape.push_back(extent(axis));
    }
    Tensor tensor(rule.name, allowed_dtypes(rule.stored, main_dtype_).front(), std::move(shape));
    // All bits set: NaN, or -1. A place that a kernel leaves out shows, where zero might be right by
    // accident.
    std::fill(tensor.storage.begin(), tensor.storage.end(), std::byte{0xFF});
    outputs_.push_back(std::move(tensor));
  }
}

const std::vector<std::string>& OpCall::shape_of(const std::vector<std::string>& shape,
                                                 const std::optional<ShapeVariant>& variant) const {
  return variant && text(variant->attribute) == variant->value ? variant->shape : shape;
}

std::optional<std::int64_t> OpCall::threads() const {
  return given("threads") ? std::optional<std::int64_t>(integer("threads")) : std::nullopt;
}

std::int64_t OpCall::integer(std::string_view attribute) const {
  return static_cast<std::int64_t>(number(attribute));
}

double OpCall::number(std::string_view attribute) const {
  return as_number(text(attribute)).value();
}

const std::string& OpCall::text(std::string_view attribute) const {
  const auto found = values_.find(attribute);
  require(found != values_.end(), "OpCall::text", "attribute", attribute, "must be given");
  return found->second;
}

std::ptrdiff_t OpCall::choice_index(std::string_view attribute, std::size_t count) const {
  const std::vector<std::string>& choices = op_->find_attribute(attribute)->choices;
  require_equal("OpCall::choice", "enumerators.size", count, attribute, choices.size());
  return std::find(choices.begin(), choices.end(), text(attribute)) - choices.begin();
}

std::int64_t OpCall::extent(const std::string& expression) const {
  const std::optional<std::int64_t> value = extent_value(expression, symbols_);
  if (!value || *value < 0) {
    refuse("an output has the extent " + expression +
           (value ? " = " + std::to_string(*value) : "") + ": must be >= 0 and fit I64");
  }
  return *value;
}

std::int64_t OpCall::rows_of(const Shape& shape) {
  std::int64_t rows = 1;
  for (std::size_t axis = 0; axis + 1 < shape.size(); ++axis) {
    require(!__builtin_mul_overflow(rows, shape[axis], &rows), "OpCall", "rows",
            examples::shape_text(shape), "must have a number of rows that fits I64");
  }
  return rows;
}

Tensor* OpCall::find_output(std::string_view name) {
  const auto found = std::find_if(outputs_.begin(), outputs_.end(),
                                  [&](const Tensor& tensor) { return tensor.name == name; });
  return found == outputs_.end() ? nullptr : &*found;
}

void with_workers(std::optional<std::int64_t> workers, const std::function<void()>& action) {
  if (!workers) {
    action();
    return;
  }
  using oneapi::tbb::global_control;
  // The control lets more workers come to life than there are cores, the arena takes as many.
  const global_control most(global_control::max_allowed_parallelism,
                            static_cast<std::size_t>(*workers));
  oneapi::tbb::task_arena arena(static_cast<int>(*workers));
  arena.execute(action);
}

std::vector<Tensor> run_op(const examples::TensorFile& file, const examples::Metadata& settings) {
  OpCall call(file, settings);
  with_workers(call.threads(), [&] { call.op().compute(call); });
  return call.take_outputs();
}

}  // namespace heddle::oracle

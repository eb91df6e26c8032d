#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "heddle-oracle/op_spec.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/mesh/axes.hpp"
#include "support/tensor_file.hpp"

namespace heddle::oracle {

/// One of the ways to compute an op.
enum class Path {
  fast,       ///< the best there is
  reference,  ///< the plain formulas, on one device
  decode,     ///< gdn.forward alone: a token a step
};

/// An op on the tensors of a file: checked against the op's rules when it is built, so that what
/// computes it can take everything for granted that the rules say.
///
/// throws    UsageError, from the constructor, for whatever the rules do not allow; it names the
///           tensor or attribute, what it is and what it must be
class OpCall {
 public:
  /// `settings` override attributes of the file; `op` among them.
  OpCall(const examples::TensorFile& file, const examples::Metadata& settings);

  [[nodiscard]] const OpSpec& op() const { return *op_; }
  [[nodiscard]] Path path() const { return path_; }
  [[nodiscard]] const MeshAxes& mesh() const { return mesh_; }
  /// Workers to compute with; nothing: as many as oneTBB takes.
  [[nodiscard]] std::optional<std::int64_t> threads() const;
  /// Of the main input.
  [[nodiscard]] Dtype main_dtype() const { return main_dtype_; }

  // Inputs.
  [[nodiscard]] bool has(std::string_view tensor) const { return file_.find(tensor).has_value(); }
  [[nodiscard]] Dtype dtype(std::string_view tensor) const { return file_.at(tensor).dtype; }

  /// All axes but the last as rows; null where the tensor is not given. Narrower elements are
  /// widened into a copy.
  template <class T>
  [[nodiscard]] ConstMatrixView<T> matrix(std::string_view tensor) {
    const std::span<const T> elements = vector<T>(tensor);
    if (!has(tensor)) {
      return {};
    }
    const Shape shape = file_.at(tensor).shape;
    return {elements.data(), rows_of(shape), shape.back()};
  }

  /// All elements; a null span where the tensor is not given.
  template <class T>
  [[nodiscard]] std::span<const T> vector(std::string_view tensor) {
    const std::optional<examples::TensorView> found = file_.find(tensor);
    if (!found) {
      return {};
    }
    if (found->dtype == examples::dtype_of<T>()) {
      return found->template values<T>();
    }
    kept_.push_back(Tensor::of<T>(found->name, found->shape, found->template converted<T>()));
    return kept_.back().template values<T>();
  }

  // Attributes.
  [[nodiscard]] bool given(std::string_view attribute) const {
    return values_.find(attribute) != values_.end();
  }
  [[nodiscard]] std::int64_t integer(std::string_view attribute) const;
  [[nodiscard]] double number(std::string_view attribute) const;
  [[nodiscard]] bool flag(std::string_view attribute) const { return integer(attribute) != 0; }
  [[nodiscard]] const std::string& text(std::string_view attribute) const;

  /// The enumerator that stands for a choice: one of `enumerators`, in the order of the rule.
  template <class Enum>
  [[nodiscard]] Enum choice(std::string_view attribute,
                            std::type_identity_t<std::initializer_list<Enum>> enumerators) const {
    return *(enumerators.begin() + choice_index(attribute, enumerators.size()));
  }

  /// The value of an extent ("T", "Hv*Dv").
  [[nodiscard]] std::int64_t extent(const std::string& expression) const;

  [[noreturn]] void refuse(const std::string& what) const;

  // Outputs.
  /// All axes but the last as rows; null where this call does not have the output.
  template <class T>
  [[nodiscard]] MatrixView<T> output(std::string_view name) {
    Tensor* const tensor = find_output(name);
    if (tensor == nullptr) {
      return {};
    }
    return {tensor->template values<T>().data(), rows_of(tensor->shape), tensor->shape.back()};
  }
  template <class T>
  [[nodiscard]] std::span<T> output_vector(std::string_view name) {
    Tensor* const tensor = find_output(name);
    return tensor == nullptr ? std::span<T>() : tensor->template values<T>();
  }
  [[nodiscard]] std::vector<Tensor> take_outputs() { return std::move(outputs_); }

 private:
  [[nodiscard]] static std::int64_t rows_of(const Shape& shape);
  [[nodiscard]] Tensor* find_output(std::string_view name);
  [[nodiscard]] std::ptrdiff_t choice_index(std::string_view attribute, std::size_t count) const;

  void find_op(const examples::Metadata& settings);
  void check_attributes(const examples::Metadata& settings);
  void check_attribute(const AttributeRule& rule, const std::string& value);
  void check_tensors();
  void check_tensor(const TensorRule& rule, const TensorInfo& tensor);
  void check_booleans(const TensorRule& rule);
  void make_outputs();
  [[nodiscard]] const std::vector<std::string>& shape_of(
      const std::vector<std::string>& shape, const std::optional<ShapeVariant>& variant) const;

  const examples::TensorFile& file_;
  const OpSpec* op_ = nullptr;
  Path path_ = Path::fast;
  MeshAxes mesh_;
  Dtype main_dtype_ = Dtype::f32;
  std::map<std::string, std::string, std::less<>> values_;  // of attributes, defaults included
  Symbols symbols_;
  std::list<Tensor> kept_;  // what views of widened tensors point to
  std::vector<Tensor> outputs_;
};

/// Runs `action` on that many oneTBB workers, more than there are cores included; without a number in
/// the caller's arena.
void with_workers(std::optional<std::int64_t> workers, const std::function<void()>& action);

/// Runs an op: all checks, the computation on as many threads as it asks for, its outputs.
[[nodiscard]] std::vector<Tensor> run_op(const examples::TensorFile& file,
                                         const examples::Metadata& settings);

/// Calls use(S{}) with the storage of the main input.
template <class Use>
void with_storage(const OpCall& call, const Use& use) {
  switch (call.main_dtype()) {
    case Dtype::f64:
      return use(double{});
    case Dtype::f32:
      return use(float{});
    case Dtype::bf16:
      return use(bfloat16{});
    case Dtype::i64:
    case Dtype::i32:
    case Dtype::i16:
    case Dtype::u8:
      break;
  }
  fail("with_storage", "dtype", examples::dtype_name(call.main_dtype()),
       "must be F64, F32 or BF16");
}

/// Calls use(S{}, W{}), W the storage of parameters: wider than S where it says so.
template <class Use>
void with_storages(const OpCall& call, bool is_wider, const Use& use) {
  with_storage(call, [&]<class S>(S s) {
    if (std::is_same_v<S, AccumulatorOf<S>> || !is_wider) {
      use(s, s);
    } else {
      use(s, AccumulatorOf<S>{});
    }
  });
}

}  // namespace heddle::oracle

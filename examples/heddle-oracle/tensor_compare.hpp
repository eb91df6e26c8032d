#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "support/json_text.hpp"
#include "support/tensor.hpp"
#include "support/tensor_file.hpp"

namespace heddle::oracle {

/// What the comparison of one tensor, a, with what it is expected to be, b, found. The figures are
/// over the entries that are finite on both sides; 0 where there is none.
///
/// units     max_ulps: steps of the narrower of the two dtypes, the wider side rounded to it; between
///           integers their difference
struct TensorComparison {
  std::string name;
  double max_abs = 0;
  double max_rel = 0;            ///< max|a-b| / max|b|; inf where b is zero and a is not
  double relative_l2 = 0;        ///< |a-b| / |b|, likewise
  std::optional<double> cosine;  ///< nothing where either side is zero
  double max_ulps = 0;
  bool vacuous = false;  ///< b has no finite entry but zeros: the figures say nothing
  bool passed = false;
  bool measured = true;  ///< false where there is nothing to compare it with: no figure holds
  std::string failure;   ///< why it has not passed
};

/// Compares in double; tensors of integers exactly, however large.
///
/// specials  NaN equals NaN, inf equals inf of its sign, -0 equals 0; an entry that is not finite on one
///           side alone fails. A b of zeros must be met exactly, and so must every integer: no
///           tolerance helps
/// throws    heddle::Error for a tolerance that is negative or NaN
[[nodiscard]] TensorComparison compare_tensors(const examples::TensorView& a,
                                               const examples::TensorView& b, double tolerance);

/// Every tensor of `a` in its order, then those of `b` alone, which fail.
[[nodiscard]] std::vector<TensorComparison> compare_files(const examples::TensorFile& a,
                                                          const examples::TensorFile& b,
                                                          double tolerance);

/// One line a tensor, in columns.
void print_comparisons(const std::vector<TensorComparison>& comparisons, std::ostream& out);
[[nodiscard]] examples::Json comparison_json(const TensorComparison& comparison);

}  // namespace heddle::oracle

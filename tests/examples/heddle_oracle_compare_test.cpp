#include "heddle-oracle/tensor_compare.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/core/error.hpp"
#include "support/safetensors.hpp"
#include "support/scratch_folder.hpp"
#include "support/thrown_text.hpp"

// Mutants that must fail here: |a| - |b| for |a - b|; NaN or inf passed over, or on one side alone; the
// maximum taken of a for b; zeros met by a tolerance; integers compared as doubles; a tensor or a
// dimension that is missing passed over; ulps of the wider dtype; squares that overflow.

namespace heddle::oracle {
namespace {

using examples::Dtype;
using examples::Tensor;
using test::ScratchFolder;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;
using Integers = std::vector<std::int64_t>;

const double nan = std::numeric_limits<double>::quiet_NaN();
const double inf = std::numeric_limits<double>::infinity();

template <class T>
Tensor tensor(const std::vector<T>& values) {
  return Tensor::of<T>("x", {static_cast<std::int64_t>(values.size())}, values);
}

template <class A, class B>
TensorComparison compared(const std::vector<A>& a, const std::vector<B>& b, double tolerance) {
  const Tensor left = tensor(a);
  const Tensor right = tensor(b);
  return compare_tensors(left.view(), right.view(), tolerance);
}

template <class A, class B>
bool passes(const std::vector<A>& a, const std::vector<B>& b, double tolerance) {
  return compared(a, b, tolerance).passed;
}

TEST(OracleCompare, FiguresByHand) {
  const TensorComparison c = compared(Doubles{3, -4, 0.5}, Doubles{3, -5, 0}, 1);
  EXPECT_EQ(c.max_abs, 1);
  EXPECT_EQ(c.max_rel, 1.0 / 5);
  EXPECT_DOUBLE_EQ(c.relative_l2, std::sqrt((1 + 0.25) / 34));
  EXPECT_DOUBLE_EQ(c.cosine.value(), 29 / (std::sqrt(25.25) * std::sqrt(34.0)));
  EXPECT_TRUE(c.passed);
  EXPECT_FALSE(c.vacuous);
  EXPECT_TRUE(passes(Doubles{3, -4, 0.5}, Doubles{3, -5, 0}, 0.2));
  EXPECT_FALSE(passes(Doubles{3, -4, 0.5}, Doubles{3, -5, 0}, 0.1999));
  EXPECT_FALSE(passes(Doubles{100, 1}, Doubles{1, 1}, 1.0)) << "relative to b, not to a";
  EXPECT_TRUE(passes(Doubles{1, 1}, Doubles{100, 1}, 1.0));
}

TEST(OracleCompare, TwoNegativesOfDifferentSizeDiffer) {
  EXPECT_FALSE(passes(Doubles{-5}, Doubles{-1}, 1e-3));
  EXPECT_FALSE(passes(Doubles{-1}, Doubles{-5}, 1e-3));
  EXPECT_FALSE(passes(Doubles{1}, Doubles{-1}, 1e-3));
}

TEST(OracleCompare, NanMeetsNanAlone) {
  EXPECT_TRUE(passes(Doubles{nan, 1}, Doubles{nan, 1}, 0));
  EXPECT_FALSE(passes(Doubles{nan, 1}, Doubles{1, 1}, 1e9));
  EXPECT_FALSE(passes(Doubles{1, 1}, Doubles{1, nan}, 1e9));
  EXPECT_FALSE(passes(Doubles{nan, 1}, Doubles{inf, 1}, 1e9));
  EXPECT_FALSE(passes(Doubles{nan}, Doubles{0}, 1e9));
  EXPECT_EQ(compared(Doubles{1, 2, nan}, Doubles{1, 2, 0.5}, 1).failure,
            "entry [2] is nan against 0.5");
  EXPECT_FALSE(passes(Doubles{nan, 2}, Doubles{nan, 1}, 0.5)) << "the rest is compared";
}

TEST(OracleCompare, InfinityMeetsItsOwnSignAlone) {
  EXPECT_TRUE(passes(Doubles{inf, -inf, 1}, Doubles{inf, -inf, 1}, 0));
  EXPECT_FALSE(passes(Doubles{inf}, Doubles{-inf}, 1e9));
  EXPECT_FALSE(passes(Doubles{1e308}, Doubles{inf}, 1e9));
  EXPECT_FALSE(passes(Doubles{inf}, Doubles{1e308}, 1e9));
  EXPECT_EQ(compared(Doubles{inf}, Doubles{-inf}, 1).failure, "entry [0] is inf against -inf");
  const TensorComparison c = compared(Doubles{inf, 2}, Doubles{inf, 1}, 1);
  EXPECT_EQ(c.max_rel, 1) << "over the finite entries";
}

TEST(OracleCompare, ZerosAreMetExactlyAndReportedAsVacuous) {
  const TensorComparison met = compared(Doubles{0, -0.0}, Doubles{-0.0, 0}, 0);
  EXPECT_TRUE(met.passed);
  EXPECT_TRUE(met.vacuous);
  EXPECT_EQ(met.max_ulps, 0);
  EXPECT_FALSE(met.cosine.has_value());
  const TensorComparison missed = compared(Doubles{1e-300, 0}, Doubles{0, 0}, 1e9);
  EXPECT_FALSE(missed.passed);
  EXPECT_EQ(missed.max_rel, inf);
  EXPECT_EQ(comparison_json(missed)["max_rel"], nullptr);
  EXPECT_EQ(comparison_json(missed)["pass"], false);
  EXPECT_TRUE(compared(Doubles{nan}, Doubles{nan}, 0).vacuous) << "nothing finite was compared";
  EXPECT_FALSE(compared(Doubles{0, 1}, Doubles{0, 1}, 0).vacuous);
  EXPECT_TRUE(compared(Integers{0, 0}, Integers{0, 0}, 0).vacuous);
}

TEST(OracleCompare, TensorsWithoutElementsPassAsVacuous) {
  const Tensor a("x", Dtype::f32, {0, 3});
  const Tensor b("x", Dtype::f64, {0, 3});
  const TensorComparison c = compare_tensors(a.view(), b.view(), 0);
  EXPECT_TRUE(c.passed);
  EXPECT_TRUE(c.vacuous);
  const Tensor other("x", Dtype::f64, {3, 0});
  EXPECT_FALSE(compare_tensors(a.view(), other.view(), 1).passed) << "of another shape";
}

TEST(OracleCompare, ShapesMustBeEqual) {
  const Tensor a = Tensor::of<float>("x", {2, 3}, Floats(6, 1.0F));
  const Tensor b = Tensor::of<float>("x", {3, 2}, Floats(6, 1.0F));
  const TensorComparison c = compare_tensors(a.view(), b.view(), 1e9);
  EXPECT_FALSE(c.passed);
  EXPECT_EQ(c.failure, "shape [2, 3] against [3, 2]");
  const Tensor flat = Tensor::of<float>("x", {6}, Floats(6, 1.0F));
  EXPECT_FALSE(compare_tensors(a.view(), flat.view(), 1e9).passed);
}

TEST(OracleCompare, OneUlpIsOneInTheNarrowerDtype) {
  const double next = std::nextafter(1.0, 2.0);
  EXPECT_EQ(compared(Doubles{next}, Doubles{1}, 1).max_ulps, 1);
  EXPECT_FALSE(passes(Doubles{next}, Doubles{1}, 0));
  EXPECT_EQ(compared(Floats{std::nextafterf(-1.0F, -2.0F)}, Doubles{-1}, 1).max_ulps, 1);
  EXPECT_EQ(compared(Doubles{next}, Floats{1}, 1).max_ulps, 0) << "the same float";
  const std::vector<bfloat16> bf16 = {bfloat16(1.0F)};
  EXPECT_EQ(compared(bf16, Floats{1.0078125F}, 1).max_ulps, 1);
  EXPECT_EQ(compared(Floats{-1e-45F}, Floats{1e-45F}, 10).max_ulps, 2) << "across zero";
  const double largest = std::numeric_limits<double>::max();
  EXPECT_EQ(compared(Doubles{largest}, Doubles{-largest}, 10).max_ulps,
            2.0 * 9218868437227405311.0);
}

TEST(OracleCompare, IntegersAreComparedExactly) {
  const std::int64_t large = std::int64_t{1} << 53;
  EXPECT_FALSE(passes(Integers{large + 1}, Integers{large}, 1e9)) << "equal as doubles";
  const TensorComparison c = compared(Integers{5, large + 1}, Integers{5, large}, 1e9);
  EXPECT_EQ(c.failure, "integers differ, first at [1]");
  EXPECT_EQ(c.max_abs, 1);
  EXPECT_TRUE(passes(Integers{large + 1}, Integers{large + 1}, 0));
  constexpr auto lowest = std::numeric_limits<std::int64_t>::min();
  constexpr auto highest = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(compared(Integers{lowest}, Integers{highest}, 1).max_abs, 18446744073709551615.0);
  EXPECT_FALSE(passes(Integers{1000001}, Integers{1000000}, 1e-3)) << "no tolerance helps";
}

TEST(OracleCompare, DtypesMayDiffer) {
  EXPECT_TRUE(passes(Floats{0.1F}, Doubles{0.1}, 1e-7));
  EXPECT_FALSE(passes(Floats{0.1F}, Doubles{0.1}, 1e-9));
  EXPECT_TRUE(passes(std::vector<std::int32_t>{-3}, Integers{-3}, 0));
  EXPECT_TRUE(passes(std::vector<std::uint8_t>{255}, std::vector<std::int16_t>{255}, 0));
  EXPECT_TRUE(passes(Integers{3, -7}, Doubles{3, -7}, 0));
  EXPECT_FALSE(passes(Integers{3}, Doubles{3.0000001}, 1e-3)) << "an integer is met exactly";
  EXPECT_FALSE(passes(Doubles{3.5}, Integers{3}, 1));
  const std::int64_t large = std::int64_t{1} << 53;
  EXPECT_FALSE(passes(Integers{large + 1}, Doubles{static_cast<double>(large)}, 1e9));
  EXPECT_FALSE(passes(Integers{std::numeric_limits<std::int64_t>::max()}, Doubles{0x1p63}, 1e9));
  EXPECT_FALSE(passes(Integers{1}, Doubles{nan}, 1e9));
  EXPECT_FALSE(passes(Integers{1}, Doubles{inf}, 1e9));
}

TEST(OracleCompare, ValuesNearTheEndsOfTheRangeDoNotOverflow) {
  const TensorComparison c = compared(Doubles{3e200, 0}, Doubles{4e200, 0}, 1);
  EXPECT_DOUBLE_EQ(c.relative_l2, 0.25);
  EXPECT_DOUBLE_EQ(c.cosine.value(), 1);
  EXPECT_DOUBLE_EQ(compared(Doubles{3e-200}, Doubles{4e-200}, 1).relative_l2, 0.25);
  EXPECT_FALSE(passes(Doubles{1.7e308}, Doubles{-1.7e308}, 1e9)) << "their difference is inf";
}

TEST(OracleCompare, EveryBlockOfALongTensorCounts) {
  Doubles a(10'000, 1.0);
  Doubles b = a;
  EXPECT_TRUE(passes(a, b, 0));
  a[9'999] = 2;
  EXPECT_EQ(compared(a, b, 0).max_abs, 1);
  b[9'998] = nan;
  EXPECT_EQ(compared(a, b, 0).failure, "entry [9998] is 1 against nan");
  Integers x(10'000, 1);
  Integers y = x;
  y[4096] = 2;
  EXPECT_EQ(compared(x, y, 0).failure, "integers differ, first at [4096]");
}

TEST(OracleCompare, NamesMustBeTheSameOnBothSides) {
  const ScratchFolder scratch;
  const auto write = [&](const char* name, const std::vector<Tensor>& tensors) {
    examples::write_safetensors(scratch / name, tensors, {});
    return examples::read_safetensors(scratch / name);
  };
  const Tensor x = tensor(Doubles{1});
  Tensor y = x;
  y.name = "y";
  const auto left = write("a", {y, x});
  const auto right = write("b", {x});
  const auto extra = compare_files(left, right, 0);
  ASSERT_EQ(extra.size(), 2U);
  EXPECT_EQ(extra[0].failure, "not in " + right.path());
  EXPECT_FALSE(extra[0].passed);
  EXPECT_TRUE(extra[1].passed);
  const auto lacking = compare_files(right, left, 0);
  ASSERT_EQ(lacking.size(), 2U);
  EXPECT_EQ(lacking[1].name, "y");
  EXPECT_EQ(lacking[1].failure, "not in " + right.path());
  EXPECT_EQ(comparison_json(lacking[1])["max_abs"], nullptr);

  std::ostringstream out;
  print_comparisons(lacking, out);
  EXPECT_EQ(out.str(),
            "x  max_abs 0  max_rel 0  rel_l2 0  cosine 1  max_ulps 0  ok\n"
            "y  max_abs -  max_rel -  rel_l2 -  cosine -  max_ulps -  FAIL: not in " +
                right.path() + "\n");
}

TEST(OracleCompare, RefusesAToleranceThatIsNone) {
  const Tensor x = tensor(Doubles{1});
  EXPECT_EQ(
      test::thrown_text<Error>([&] { static_cast<void>(compare_tensors(x.view(), x.view(), -1)); }),
      "compare_tensors: tolerance = -1: must be >= 0");
  EXPECT_EQ(test::thrown_text<Error>(
                [&] { static_cast<void>(compare_tensors(x.view(), x.view(), nan)); }),
            "compare_tensors: tolerance = nan: must be >= 0");
}

}  // namespace
}  // namespace heddle::oracle

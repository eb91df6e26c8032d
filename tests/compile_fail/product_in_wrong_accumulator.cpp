// A float product into a double result would widen after the sum, not before.
// expect: the result must be the accumulator type of both operands
#include "heddle/core/matrix_engine.hpp"

int main() {
#ifdef HEDDLE_MISUSE
  using Result = double;
#else
  using Result = float;
#endif
  float a[4] = {1, 2, 3, 4};
  Result c[4] = {};
  const heddle::ConstMatrixView<float> factor(a, 2, 2);
  heddle::multiply(heddle::as_is(factor), heddle::as_is(factor),
                   heddle::MatrixView<Result>(c, 2, 2));
  return 0;
}

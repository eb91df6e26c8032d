// Folds promise bits, which value-changing floating-point flags break. The macro stands for the flag.
// expect: compile without -ffast-math
#ifdef HEDDLE_MISUSE
#undef __FINITE_MATH_ONLY__
#define __FINITE_MATH_ONLY__ 1
#endif
#include "heddle/mesh/fold.hpp"

int main() {
  return 0;
}

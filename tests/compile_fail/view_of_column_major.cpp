// A column-major matrix would need a transposed copy, and no view makes one.
// expect: no matching function for call to .*view
#include <Eigen/Core>

#include "heddle/core/view.hpp"

int main() {
#ifdef HEDDLE_MISUSE
  Eigen::MatrixXf matrix(2, 3);
#else
  Eigen::Matrix<float, 2, 3, Eigen::RowMajor> matrix;
#endif
  return static_cast<int>(heddle::view(matrix).rows());
}

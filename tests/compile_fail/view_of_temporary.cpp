// A view of a matrix that is gone before the view is read.
// expect: use of deleted function|call to deleted function
#include <Eigen/Core>

#include "heddle/core/view.hpp"

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

int main() {
  Matrix matrix(2, 3);
#ifdef HEDDLE_MISUSE
  return static_cast<int>(heddle::view(Matrix(2, 3)).rows());
#else
  return static_cast<int>(heddle::view(matrix).rows());
#endif
}

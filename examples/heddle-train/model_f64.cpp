#include "heddle-train/model_passes.hpp"

namespace heddle::train {

template class Model<double>;

}  // namespace heddle::train

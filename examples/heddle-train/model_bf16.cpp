#include "heddle-train/model_passes.hpp"

namespace heddle::train {

template class Model<bfloat16>;

}  // namespace heddle::train

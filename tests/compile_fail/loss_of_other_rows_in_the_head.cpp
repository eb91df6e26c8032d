// A loss that cannot be asked of one row alone.
// expect: the loss must be a TokenLoss
#include "heddle/head/forward_backward.hpp"

namespace head = heddle::head;

struct Share {
  double loss;
  float d_logp;
  float d_entropy;
};
#ifdef HEDDLE_MISUSE
struct Loss {
  Share operator()(heddle::ConstMatrixView<float> all_logps) const;
};
#else
struct Loss {
  Share operator()(std::int64_t, float logp, float) const { return {-logp, -1.0F, 0.0F}; }
};
#endif

void call(const head::Dims& dims, const head::Inputs<float>& inputs, heddle::Workspace& workspace) {
  head::forward_backward(dims, inputs, {}, Loss{}, head::LossOutputs<float>{},
                         head::Cotangents<float>{}, workspace);
}
